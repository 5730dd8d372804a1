// Attention over one split of positions, of the query heads of a few tokens that share a kv head. Workgroups:
// (split, kv head and part of its queries, tile of tokens).
//
// Needs: norm_float.wgsl, attention_*.wgsl, fn fma4, const HEADS, KV_HEADS, PER_KV, QUERIES (of a workgroup), GROUPS
// (workgroups that share a kv head's queries), TILE (tokens), HEAD_DIM, VALUE_DIM, COLUMNS (lanes side by side
// over a value), ROW (16-byte words of a cache row), NARROW (of four values in 16 bytes), STAGE, alias Narrow (these four); the buffers
// keys (vec4<u32>) and values (four elements each) of the same cache, rows (vec4<u32>),
// tables (u32), sums (vec4<f32>), stats (vec2<f32>).
//
// Splits begin at multiples of SPLIT, whatever the token sees, and every sum within one has an order of its own,
// fixed per query: so what a token gets depends neither on its neighbours nor on how many there are.
//
// Queries are there, and the token's own key and value in the cache (attention_turned.wgsl), or the workgroup makes them
// (attention_turns.wgsl).
//
// Then attention_split.wgsl leaves what others go on with, or, if there is no other split, attention_whole.wgsl makes
// of it what attention_combine.wgsl would.
//
//     scores    a quad of lanes for two positions; a lane takes every fourth 16 bytes of the two keys, for all
//               queries at once
//     weights   a lane for a position and four queries
//     sums      a lane for four columns and every SLICES-th position, for all queries; slices are added last

struct Params { first: u32, end: u32, splits: u32, scale: f32, low: u32, eps: f32, nothing: u32 }
var<immediate> p: Params;

const SPLIT: u32 = 128u;
const BLOCK: u32 = 32u;
const THREADS: u32 = 256u;
// Queries of a token in a workgroup.
const SHARE: u32 = QUERIES / TILE;
const QUERY_WORDS: u32 = HEAD_DIM / 4u;
const CHUNKS: u32 = (QUERY_WORDS + PARTS - 1u) / PARTS;
const STEPS: u32 = (CHUNKS + 3u) / 4u;
// The last chunks of a row are not all there.
const RAGGED: bool = STEPS * 4u * PARTS != QUERY_WORDS;
// Vectors of four queries.
const VECTORS: u32 = (QUERIES + 3u) / 4u;
const VALUE_WORDS: u32 = VALUE_DIM / 4u;
const SLICES: u32 = THREADS / COLUMNS;
// Rows of values that a lane reads before it adds them up: a round trip to memory for each would take longest of all.
const AT_ONCE: u32 = select(8u, 16u, FEW);
// So few queries leave a lane registers to read values ahead of the weights.
const FEW: bool = QUERIES <= 2u;
// Queries of a vector.
const IN_VECTOR: u32 = min(QUERIES, 4u);
// The weight of a position that a query does not see: -0, which no weight is.
const UNSEEN: u32 = 0x80000000u;

alias KeysAhead = array<vec4<u32>, 2u * STEPS>;

// First the queries; in the end what slices have summed up.
var<workgroup> stage: array<vec4<f32>, STAGE>;
// Scores, then weights.
var<workgroup> scores: array<vec4<f32>, SPLIT * VECTORS>;
var<workgroup> maxima: array<vec4<f32>, THREADS / 4u>;
var<workgroup> totals: array<vec4<f32>, THREADS / 4u>;
var<workgroup> blocks: array<u32, SPLIT / BLOCK>;

/// With the device's own fma: the order of these sums is nobody else's.
fn loose4(a: vec4<f32>, b: vec4<f32>, c: vec4<f32>) -> vec4<f32> {
    return fma(a, b, c);
}

fn most_of(v: vec4<f32>) -> vec4<f32> {
    if (QUERIES == 1u) {
        return vec4(subgroupMax(v.x), v.yzw);
    }
    return subgroupMax(v);
}

fn sum_of(v: vec4<f32>) -> vec4<f32> {
    if (QUERIES == 1u) {
        return vec4(subgroupAdd(v.x), v.yzw);
    }
    return subgroupAdd(v);
}

/// First 16 bytes of the row of a position of the split.
fn row_at(plane: u32, head: u32, position: u32) -> u32 {
    let block = blocks[position / BLOCK];
    return (((2u * block + plane) * KV_HEADS + head) * BLOCK + position % BLOCK) * ROW;
}

/// Sixteen bytes of a key: number `i` of those ahead.
fn key_at(
    ahead: ptr<function, KeysAhead>,
    i: u32,
    at: u32,
    is_own: bool,
    chunk: u32,
) -> vec4<u32> {
    if (!TURNS_OWN) {
        return keys[at];
    }
    return select((*ahead)[i], own_key(chunk), is_own);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_size) width: u32,
    @builtin(subgroup_invocation_id) place: u32,
) {
    let column = lane % COLUMNS;
    let slice = lane / COLUMNS;
    let kv_head = wg.y / GROUPS;
    let part = (wg.y % GROUPS) * SHARE;
    let tile = p.first + wg.z * TILE;
    let tokens = min(TILE, p.end - tile);
    // On its way while it is not known where keys are.
    let early = TILE == 1u && QUERIES * QUERY_WORDS <= THREADS;
    var query_word = vec4(0.0);
    if (early && lane < QUERIES * QUERY_WORDS) {
        let head = kv_head * PER_KV + min(part + lane / QUERY_WORDS, PER_KV - 1u);
        query_word = query_at((tile * HEADS + head) * QUERY_WORDS + lane % QUERY_WORDS);
    }
    // Tokens of one session whose splits are the same ones are served together, others one after the other.
    for (var begin = 0u; begin < tokens;) {
        let lead = rows[tile + begin];
        let base = (lead.z / SPLIT + wg.x) * SPLIT;
        // Positions of the split: where the run's tokens begin to see, where they end, whether all see the same.
        var start = SPLIT;
        var end = 0u;
        var alike = true;
        var to = begin;
        for (; to < tokens; to++) {
            let row = rows[tile + to];
            if (row.y != lead.y || row.z / SPLIT != lead.z / SPLIT) {
                break;
            }
            let a = max(row.z, base) - base;
            let b = clamp(row.x + 1u, base, base + SPLIT) - base;
            alike = alike && (to == begin || (a == start && b == end));
            start = min(start, a);
            end = max(end, b);
        }
        if (end > start) {
            if (lane < SPLIT / BLOCK && lane * BLOCK < end) {
                blocks[lane] = tables[lead.y + base / BLOCK + lane];
            }
            if (early && !TURNS_OWN && lane < QUERIES * QUERY_WORDS) {
                stage[lane] = query_word;
            }
            for (var i = lane; !early && i < QUERIES * QUERY_WORDS; i += THREADS) {
                let query = i / QUERY_WORDS;
                // Queries that are not there repeat one that is.
                let token = tile + clamp(query / SHARE, begin, to - 1u);
                let head = kv_head * PER_KV + min(part + query % SHARE, PER_KV - 1u);
                stage[i] = query_at((token * HEADS + head) * QUERY_WORDS + i % QUERY_WORDS);
            }
            workgroupBarrier();

            let quad = lane / 4u;
            let quarter = lane % 4u;
            let other = quad + SPLIT / 2u;
            let sees0 = quad >= start && quad < end;
            let sees1 = other >= start && other < end;
            let at0 = row_at(0u, kv_head, select(start, quad, sees0));
            let at1 = row_at(0u, kv_head, select(start, other, sees1));
            // All rows of a run are on their way before the first is used.
            var rows_ahead: array<Narrow, AT_ONCE>;
            if (FEW && column < VALUE_WORDS) {
                for (var j = 0u; j < AT_ONCE; j++) {
                    let i = clamp(slice + j * SLICES, start, end - 1u);
                    rows_ahead[j] = values[row_at(1u, kv_head, i) * NARROW + column];
                }
            }
            var keys_ahead: KeysAhead;
            if (TURNS_OWN) {
                for (var step = 0u; step < STEPS; step++) {
                    let chunk = 4u * step + quarter;
                    if (!RAGGED || chunk < CHUNKS) {
                        keys_ahead[2u * step] = keys[at0 + chunk];
                        keys_ahead[2u * step + 1u] = keys[at1 + chunk];
                    }
                }
                // The token's own row is not there yet.
                turn_own(lead, wg.y, base, lane);
                for (var j = 0u; j < AT_ONCE && column < VALUE_WORDS; j++) {
                    let i = clamp(slice + j * SLICES, start, end - 1u);
                    if (base + i == lead.x) {
                        rows_ahead[j] = own_value(column);
                    }
                }
            }
            let own0 = TURNS_OWN && base + quad == lead.x;
            let own1 = TURNS_OWN && base + other == lead.x;
            var dots0: array<f32, VECTORS * 4u>;
            var dots1: array<f32, VECTORS * 4u>;
            for (var step = 0u; step < STEPS; step++) {
                let chunk = 4u * step + quarter;
                var k0 = vec4(0u);
                var k1 = vec4(0u);
                if (!RAGGED || chunk < CHUNKS) {
                    if (sees0) {
                        k0 = key_at(&keys_ahead, 2u * step, at0 + chunk, own0, chunk);
                    }
                    if (sees1) {
                        k1 = key_at(&keys_ahead, 2u * step + 1u, at1 + chunk, own1, chunk);
                    }
                }
                let wide0 = widen_key(k0);
                let wide1 = widen_key(k1);
                for (var j = 0u; j < PARTS; j++) {
                    let word = chunk * PARTS + j;
                    if (!RAGGED || word < QUERY_WORDS) {
                        for (var q = 0u; q < QUERIES; q++) {
                            let y = stage[q * QUERY_WORDS + word];
                            dots0[q] = fma(wide0[j].x, y.x, dots0[q]);
                            dots1[q] = fma(wide1[j].x, y.x, dots1[q]);
                            dots0[q] = fma(wide0[j].y, y.y, dots0[q]);
                            dots1[q] = fma(wide1[j].y, y.y, dots1[q]);
                            dots0[q] = fma(wide0[j].z, y.z, dots0[q]);
                            dots1[q] = fma(wide1[j].z, y.z, dots1[q]);
                            dots0[q] = fma(wide0[j].w, y.w, dots0[q]);
                            dots1[q] = fma(wide1[j].w, y.w, dots1[q]);
                        }
                    }
                }
            }
            for (var q = 0u; q < QUERIES; q++) {
                dots0[q] += subgroupShuffleXor(dots0[q], 1u);
                dots0[q] += subgroupShuffleXor(dots0[q], 2u);
                dots1[q] += subgroupShuffleXor(dots1[q], 1u);
                dots1[q] += subgroupShuffleXor(dots1[q], 2u);
            }
            let factor0 = select(scale_of(at0), own_scale(0u), own0) * p.scale;
            let factor1 = select(scale_of(at1), own_scale(0u), own1) * p.scale;
            for (var v = 0u; v < VECTORS; v++) {
                // Each lane of the quad writes one of the vectors.
                if (quarter == v) {
                    scores[quad * VECTORS + v] =
                        vec4(dots0[4u * v], dots0[4u * v + 1u], dots0[4u * v + 2u], dots0[4u * v + 3u]) * factor0;
                }
                if (quarter == VECTORS + v) {
                    scores[other * VECTORS + v] =
                        vec4(dots1[4u * v], dots1[4u * v + 1u], dots1[4u * v + 2u], dots1[4u * v + 3u]) * factor1;
                }
            }
            workgroupBarrier();

            let position = lane % SPLIT;
            let vector = min(lane / SPLIT, VECTORS - 1u);
            var seen = vec4(false);
            for (var i = 0u; i < IN_VECTOR; i++) {
                let token = (4u * vector + i) / SHARE;
                if (token >= begin && token < to) {
                    let row = rows[tile + token];
                    seen[i] = base + position >= row.z && base + position <= row.x;
                }
            }
            let low = vec4(bitcast<f32>(p.low));
            let score = select(low, scores[position * VECTORS + vector], seen);
            let most = most_of(score);
            if (place == 0u) {
                maxima[lane / width] = most;
            }
            workgroupBarrier();
            // Subgroups of these four queries.
            let subgroups = SPLIT / width;
            let before = lane / SPLIT * subgroups;
            var maximum = low;
            for (var i = 0u; i < subgroups; i++) {
                maximum = max(maximum, maxima[before + i]);
            }
            // Scores that are all -infinity have no weight, rather than none that is a number.
            let origin = select(maximum, vec4(0.0), bitcast<vec4<u32>>(maximum) == vec4(p.low));
            var weight: vec4<f32>;
            for (var i = 0u; i < IN_VECTOR; i++) {
                weight[i] = exponential(score[i] - origin[i]);
            }
            weight = select(vec4(0.0), weight, seen);
            let sum = sum_of(weight);
            if (place == 0u) {
                totals[lane / width] = sum;
            }
            let shown = position >= start && position < end;
            let at = row_at(1u, kv_head, select(start, position, shown));
            weight *= select(scale_of(at), own_scale(1u), TURNS_OWN && base + position == lead.x);
            if (lane / SPLIT < VECTORS) {
                scores[position * VECTORS + vector] = select(bitcast<vec4<f32>>(vec4(UNSEEN)), weight, seen);
            }
            workgroupBarrier();
            if (position == 0u && lane / SPLIT < VECTORS) {
                var total = vec4(0.0);
                for (var i = 0u; i < subgroups; i++) {
                    total += totals[before + i];
                }
                for (var i = 0u; i < IN_VECTOR; i++) {
                    let query = 4u * vector + i;
                    let token = query / SHARE;
                    let head = part + query % SHARE;
                    if (token >= begin && token < to && head < PER_KV) {
                        let unit = (tile + token - p.first) * p.splits + wg.x;
                        end_query(unit, query, kv_head * PER_KV + head, maximum[i], total[i]);
                    }
                }
            }

            var acc: array<vec4<f32>, QUERIES>;
            for (var q = 0u; q < QUERIES; q++) {
                acc[q] = vec4(0.0);
            }
            if (column < VALUE_WORDS) {
                for (var first = slice; first < end; first += SLICES * AT_ONCE) {
                    for (var j = 0u; j < AT_ONCE && (!FEW || first > slice); j++) {
                        let i = clamp(first + j * SLICES, start, end - 1u);
                        rows_ahead[j] = values[row_at(1u, kv_head, i) * NARROW + column];
                    }
                    for (var j = 0u; j < AT_ONCE; j++) {
                        let i = first + j * SLICES;
                        if (i < start || i >= end) {
                            continue;
                        }
                        let x = widen_value(rows_ahead[j]);
                        for (var v = 0u; v < VECTORS; v++) {
                            let w = scores[i * VECTORS + v];
                            for (var k = 0u; k < 4u; k++) {
                                let q = 4u * v + k;
                                if (q < QUERIES) {
                                    let next = loose4(vec4(w[k]), x, acc[q]);
                                    acc[q] = select(acc[q], next, TILE == 1u || alike || bitcast<u32>(w[k]) != UNSEEN);
                                }
                            }
                        }
                    }
                }
            }
            for (var q = 0u; q < QUERIES; q += 2u) {
                workgroupBarrier();
                stage[lane] = acc[q];
                if (q + 1u < QUERIES) {
                    stage[THREADS + lane] = acc[q + 1u];
                }
                workgroupBarrier();
                for (var i = lane; i < 2u * VALUE_WORDS; i += THREADS) {
                    let query = q + i / VALUE_WORDS;
                    let word = i % VALUE_WORDS;
                    let token = query / SHARE;
                    let head = part + query % SHARE;
                    if (query < QUERIES && token >= begin && token < to && head < PER_KV) {
                        var sum = vec4(0.0);
                        for (var s = 0u; s < SLICES; s++) {
                            sum += stage[(i / VALUE_WORDS) * THREADS + s * COLUMNS + word];
                        }
                        let unit = (tile + token - p.first) * p.splits + wg.x;
                        end_sum(unit, query, kv_head * PER_KV + head, word, sum);
                    }
                }
            }
            workgroupBarrier();
            hand_out(tile, kv_head * PER_KV + part, min(SHARE, PER_KV - part), lane);
        }
        begin = to;
    }
}
