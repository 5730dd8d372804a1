// coded_wide_exchange.wgsl where subgroups may be narrower than 32 lanes: for tests, on a program that plays a device.
//
// Needs: const THREADS; called by all lanes of a workgroup.

const EXCHANGE_PLAYED: bool = true;

var<private> exchange_lane: u32;
var<workgroup> exchanged: array<vec4<i32>, THREADS>;

fn begin_exchanges(index: u32) {
    exchange_lane = index;
}

fn exchange4(x: vec4<i32>, mask: u32) -> vec4<i32> {
    workgroupBarrier();
    exchanged[exchange_lane] = x;
    workgroupBarrier();
    return exchanged[exchange_lane ^ mask];
}

fn exchange2(x: vec2<i32>, mask: u32) -> vec2<i32> {
    return exchange4(vec4(x, 0i, 0i), mask).xy;
}

fn exchange1(x: i32, mask: u32) -> i32 {
    return exchange4(vec4(x, 0i, 0i, 0i), mask).x;
}
