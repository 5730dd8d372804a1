// Two positions a lane.

alias Each = vec2<f32>;

fn columns_of(words: ptr<function, Words>) -> array<Each, 4> {
    let a = (*words)[0];
    let b = (*words)[1];
    return array<Each, 4>(vec2(a.x, b.x), vec2(a.y, b.y), vec2(a.z, b.z), vec2(a.w, b.w));
}

/// What the four lanes of a position have of a head, added up: (0 + 2) + (1 + 3). A lane gets the sum of position `chain % 2`.
fn sum_of_chains(dot: Each, chain: u32) -> f32 {
    let two = dot + subgroupShuffleXor(dot, 2u);
    let odd = (chain & 1u) != 0u;
    return select(two.x, two.y, odd) + subgroupShuffleXor(select(two.y, two.x, odd), 1u);
}
