// Residual sum, RMSNorm and int8 form of a token: one workgroup each, all of its values in registers.
//
// Needs: quantise.wgsl (const GROUP), norm_float.wgsl, fn fma4, const D, GROUPS, THREADS, ROUNDS, NORMED, CODED, CHANGED;
// load_hidden, store_hidden, load_weight, store_normed, delta, token_of; codes and cells if CODED.
//
// Lane q of a quad holds columns 4 * (4i + q) of a group and the three after them, i = 0..WORDS: a quad reads
// 64 bytes at a time.

struct Params { eps: f32, zero: f32, nothing: u32 }
var<immediate> p: Params;

var<workgroup> sums: array<f32, THREADS / 4u>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_size) width: u32,
    @builtin(subgroup_invocation_id) place: u32,
) {
    let row = wg.x;
    let token = token_of(row);
    var x: array<vec4<f32>, ROUNDS * WORDS>;
    var sum = 0.0;
    for (var round = 0u; round < ROUNDS; round++) {
        let group = round * (THREADS / 4u) + lane / 4u;
        for (var i = 0u; i < WORDS; i++) {
            let chunk = group * (GROUP / 4u) + 4u * i + lane % 4u;
            var v = vec4(0.0);
            if (4u * chunk < D) {
                v = load_hidden(token, chunk);
                if (CHANGED) {
                    v += delta(token, chunk);
                    store_hidden(token, chunk, v);
                }
            }
            x[round * WORDS + i] = v;
            sum = fma(v.x, v.x, sum);
            sum = fma(v.y, v.y, sum);
            sum = fma(v.z, v.z, sum);
            sum = fma(v.w, v.w, sum);
        }
    }
    let part = subgroupAdd(sum);
    if (place == 0u) {
        sums[lane / width] = part;
    }
    workgroupBarrier();
    var total = 0.0;
    for (var i = 0u; i < THREADS / width; i++) {
        total += sums[i];
    }
    let inverse = inverse_rms(total, f32(D), p.eps);
    for (var round = 0u; round < ROUNDS; round++) {
        let group = round * (THREADS / 4u) + lane / 4u;
        var y: array<vec4<f32>, WORDS>;
        for (var i = 0u; i < WORDS; i++) {
            let chunk = group * (GROUP / 4u) + 4u * i + lane % 4u;
            var v = vec4(0.0);
            if (4u * chunk < D) {
                v = load_weight(0u, chunk) * (x[round * WORDS + i] * inverse);
                if (NORMED) {
                    store_normed(row, chunk, v);
                }
            }
            y[i] = v;
        }
        if (CODED) {
            let coded = quantise(y);
            if (group < GROUPS) {
                store_codes(row * GROUPS + group, lane % 4u, coded);
            }
        }
    }
}
