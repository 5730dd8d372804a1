// The largest of a token's numbers, the first of several: of a part of them (workgroups: part, token), then of the
// parts (workgroups: 1, token).
//
// Needs: const THREADS; fn candidate(token, i), which gives a key and an id, fn emit(token, part, key and id).

struct Params { count: u32, parts: u32, nothing: u32 }
var<immediate> p: Params;

var<workgroup> best: array<vec2<u32>, THREADS>;

/// Orders like the number, both zeros alike, NaN above all.
fn key_of(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let magnitude = bits & 0x7fffffffu;
    let key = select(bits | 0x80000000u, ~bits, bits > 0x80000000u);
    return select(select(key, 0x80000000u, magnitude == 0u), 0xffffffffu, magnitude > 0x7f800000u);
}

/// The larger key, of equal ones the lower id.
fn better(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return select(a, b, b.x > a.x || (b.x == a.x && b.y < a.y));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    var mine = vec2(0u, 0xffffffffu);
    for (var i = wg.x * THREADS + lane; i < p.count; i += p.parts * THREADS) {
        mine = better(mine, candidate(wg.y, i));
    }
    best[lane] = mine;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (lane < half) {
            best[lane] = better(best[lane], best[lane + half]);
        }
        workgroupBarrier();
    }
    if (lane == 0u) {
        emit(wg.y, wg.x, best[0]);
    }
}
