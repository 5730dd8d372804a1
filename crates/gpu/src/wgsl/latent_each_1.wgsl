// One position a lane.

alias Each = f32;

fn columns_of(words: ptr<function, Words>) -> array<Each, 4> {
    let a = (*words)[0];
    return array<Each, 4>(a.x, a.y, a.z, a.w);
}

/// What the four lanes of a position have of a head, added up: (0 + 2) + (1 + 3).
fn sum_of_chains(dot: Each, chain: u32) -> f32 {
    let two = dot + subgroupShuffleXor(dot, 2u);
    return two + subgroupShuffleXor(two, 1u);
}
