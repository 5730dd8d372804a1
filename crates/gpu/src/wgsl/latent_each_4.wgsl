// Four positions a lane.

alias Each = vec4<f32>;

fn columns_of(words: ptr<function, Words>) -> array<Each, 4> {
    let a = (*words)[0];
    let b = (*words)[1];
    let c = (*words)[2];
    let d = (*words)[3];
    return array<Each, 4>(
        vec4(a.x, b.x, c.x, d.x),
        vec4(a.y, b.y, c.y, d.y),
        vec4(a.z, b.z, c.z, d.z),
        vec4(a.w, b.w, c.w, d.w),
    );
}

/// What the four lanes of a position have of a head, added up: (0 + 2) + (1 + 3). A lane gets the sum of position `chain`.
fn sum_of_chains(dot: Each, chain: u32) -> f32 {
    let upper = (chain & 2u) != 0u;
    let two = select(dot.xy, dot.zw, upper) + subgroupShuffleXor(select(dot.zw, dot.xy, upper), 2u);
    let odd = (chain & 1u) != 0u;
    return select(two.x, two.y, odd) + subgroupShuffleXor(select(two.y, two.x, odd), 1u);
}
