// The router's product, and route_one.wgsl in the workgroup that is done last. Workgroups: runs of rows, p.parts in all.
//
// WGSL knows no order between what different workgroups write, only that each atomic word has a history of its own. So
// a logit is its own proof that it is there: words are EMPTY until their logit is posted, and whoever was counted as
// the last reads each until it is not. It leaves everything as it found it.
//
// Needs: float.wgsl, float_wide.wgsl or float_odd.wgsl and an operand, route_one.wgsl, route_plain.wgsl or route_norm.wgsl, const COLS; the buffer post (atomic<u32>: EXPERTS logits, and
// the number of workgroups that are done).

// A NaN that no product makes here.
const EMPTY: u32 = 0xffffffffu;

var<workgroup> done_before: u32;

fn finish(job: ptr<function, Job>, row: u32, token: u32, sum: f32) {
    let bits = bitcast<u32>(sum);
    atomicStore(&post[row], select(bits, 0x7fc00000u, bits == EMPTY));
}

fn logit_of(expert: u32) -> f32 {
    var bits = EMPTY;
    while (bits == EMPTY) {
        bits = atomicLoad(&post[expert]);
    }
    atomicStore(&post[expert], EMPTY);
    return bitcast<f32>(bits);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_size) width: u32,
    @builtin(subgroup_invocation_id) place: u32,
) {
    var job: Job;
    job.rows = EXPERTS;
    job.cols = COLS;
    job.used = COLS;
    job.first = wg.x * TEAMS * ROWS;
    job.count = 1u;
    var first = first_weights(&job, lane);
    var held: Held;
    prepare(&held, wg.x, lane, width, place);
    products(&job, &first, lane);
    workgroupBarrier();
    if (lane == 0u) {
        done_before = atomicAdd(&post[EXPERTS], 1u);
    }
    if (workgroupUniformLoad(&done_before) + 1u == p.parts) {
        if (lane == 0u) {
            atomicStore(&post[EXPERTS], 0u);
        }
        route(lane, width, place);
        // Every workgroup has read what this one writes: their logits follow from it, and have been read.
        end(&held, lane);
    }
}
