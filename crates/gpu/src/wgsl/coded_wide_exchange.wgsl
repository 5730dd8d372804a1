// What the lane whose number differs by `mask` has.

const EXCHANGE_PLAYED: bool = false;

fn begin_exchanges(index: u32) {}

fn exchange1(x: i32, mask: u32) -> i32 {
    return subgroupShuffleXor(x, mask);
}

fn exchange2(x: vec2<i32>, mask: u32) -> vec2<i32> {
    return subgroupShuffleXor(x, mask);
}

fn exchange4(x: vec4<i32>, mask: u32) -> vec4<i32> {
    return subgroupShuffleXor(x, mask);
}
