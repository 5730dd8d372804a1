// Gate, up, activation and the quantising of the hidden values, of a layer's experts.
//
// A workgroup has an entry and PART blocks of 32 rows of gate and as many of up: whole groups of GROUP hidden
// values. Workgroups: (parts, entries, eights of an entry).
//
// Needs: coded.wgsl, coded_plane.wgsl, experts_gate_up_hidden.wgsl, const TOP_K.

// Rows `4 * four ..+ 4` of a block of the products.
fn place_of(block: u32, token: u32, four: u32) -> u32 {
    return 8u * (block * TOKENS + token) + four;
}

fn gate_of(block: u32, token: u32, four: u32) -> vec4<f32> {
    return dots[place_of(block, token, four)];
}

fn up_of(block: u32, token: u32, four: u32) -> vec4<f32> {
    return dots[place_of(blocks + block, token, four)];
}

fn finish(job: ptr<function, Job>, chain: Chain, sum: vec2<f32>) {
    let i = place_of(chain.block, chain.token, chain.pair >> 1u);
    if ((chain.pair & 1u) == 0u) {
        dots[i].x = sum.x;
        dots[i].y = sum.y;
    } else {
        dots[i].z = sum.x;
        dots[i].w = sum.y;
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let e = entry(wg.y, wg.z);
    take_biases(wg.y);
    first_block = wg.x * PART;
    blocks = min(PART, (p.rows + 31u) / 32u - first_block);
    var job: Job;
    let start = first_block * p.tiles * TILE + start_of(e, p.slot);
    job.at = start + p.gate;
    job.split = blocks * p.tiles;
    job.split_at = start + p.up - job.split * TILE;
    job.tiles = p.tiles;
    job.items = select(0u, 2u * job.split, e.count > 0u);
    job.count = e.count;
    job.rows[0] = pair_of(e, 0u) / TOP_K;
    if (TOKENS > 1u) { job.rows[1] = pair_of(e, 1u) / TOP_K; }
    if (TOKENS > 2u) { job.rows[2] = pair_of(e, 2u) / TOP_K; job.rows[3] = pair_of(e, 3u) / TOP_K; }
    if (TOKENS > 4u) {
        job.rows[4] = pair_of(e, 4u) / TOP_K;
        job.rows[5] = pair_of(e, 5u) / TOP_K;
        job.rows[6] = pair_of(e, 6u) / TOP_K;
        job.rows[7] = pair_of(e, 7u) / TOP_K;
    }
    products(&job, lane);
    workgroupBarrier();
    make_hidden(e.first, e.count, lane);
}
