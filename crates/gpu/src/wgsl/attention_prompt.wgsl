// Attention over one split of positions, of all query heads of a kv head and so many tokens that their queries fill a tile:
// products of matrices through shared memory. Workgroups: (split, kv head, tile of tokens).
//
// Needs: what attention.wgsl needs but GROUPS, and attention_split.wgsl; const THREADS, SLICES (attention.wgsl's), PIECE (words of
// a chain that are staged at once), STAGED (rows of values that are), STAGE (vectors of what is staged).
//
// Every sum has the order that it has in attention.wgsl, and so its bits:
//
//     scores    a lane for four queries and HELD positions. What there is a lane of a quad, every fourth 16 bytes, is here a
//               chain after the other: (0 + 1) + (2 + 3)
//     weights   a lane for a position, four queries after the other: subgroups are the same
//     sums      a lane for four columns of some queries. What there is a lane of a slice is here a slice after the other

struct Params { first: u32, end: u32, splits: u32, scale: f32, low: u32, nothing: u32 }
var<immediate> p: Params;

const SPLIT: u32 = 128u;
const BLOCK: u32 = 32u;
const QUERY_WORDS: u32 = HEAD_DIM / 4u;
const CHAIN_PIECES: u32 = QUERY_WORDS / 4u / PIECE;
const VECTORS: u32 = QUERIES / 4u;
const VALUE_WORDS: u32 = VALUE_DIM / 4u;
// Two more than there are: lanes that stage words side by side write to banks of their own.
const KEY_STRIDE: u32 = SPLIT + 2u;
const QUERY_STRIDE: u32 = QUERIES + 2u;
// Lanes side by side over positions, and positions of a lane.
const ABREAST: u32 = THREADS / VECTORS;
const HELD: u32 = SPLIT / ABREAST;
// Vectors of queries of a lane, for sums.
const MINE: u32 = VECTORS * COLUMNS / THREADS;
const PER_SLICE: u32 = SPLIT / SLICES;
// Rows of a slice that are staged together.
const TOGETHER: u32 = min(STAGED, PER_SLICE);
// 16 bytes of keys, words of queries and of values that a lane stages at once.
const KEY_CHUNKS: u32 = SPLIT * PIECE / PARTS;
const KEYS_AHEAD: u32 = (KEY_CHUNKS + THREADS - 1u) / THREADS;
const QUERIES_AHEAD: u32 = (QUERIES * PIECE + THREADS - 1u) / THREADS;
const VALUES_AHEAD: u32 = STAGED * COLUMNS / THREADS;
// The weight of a position that a query does not see: -0, which no weight is.
const UNSEEN: u32 = 0x80000000u;

// In turn: words of keys and queries; maxima and totals of subgroups; rows of values.
var<workgroup> stage: array<vec4<f32>, STAGE>;
// Scores, then weights: of four queries, [vector][position].
var<workgroup> scores: array<vec4<f32>, VECTORS * SPLIT>;
// What a position's scores are multiplied with.
var<workgroup> factors: array<f32, SPLIT>;
var<workgroup> tile_rows: array<vec4<u32>, TILE>;
// Where a token begins to see the split, and where it ends.
var<workgroup> bounds: array<vec2<u32>, TILE>;
var<workgroup> blocks: array<u32, SPLIT / BLOCK>;

/// With the device's own fma, as in attention.wgsl.
fn loose4(a: vec4<f32>, b: vec4<f32>, c: vec4<f32>) -> vec4<f32> {
    return fma(a, b, c);
}

/// First 16 bytes of the row of a position of the split.
fn row_at(plane: u32, head: u32, position: u32) -> u32 {
    let block = blocks[position / BLOCK];
    return (((2u * block + plane) * KV_HEADS + head) * BLOCK + position % BLOCK) * ROW;
}

/// 16 bytes of a row that are number `i` of a piece of a chain.
fn chunk_of(chain: u32, piece: u32, i: u32) -> u32 {
    return 4u * (piece * (PIECE / PARTS) + i) + chain;
}

/// Which of four queries see a position: those of this run of tokens that do.
fn seen_by(vector: u32, position: u32) -> vec4<bool> {
    if (PER_KV % 4u == 0u) {
        let bound = bounds[min(4u * vector / PER_KV, TILE - 1u)];
        return vec4(position >= bound.x && position < bound.y);
    }
    var seen: vec4<bool>;
    for (var i = 0u; i < 4u; i++) {
        let token = (4u * vector + i) / PER_KV;
        let bound = bounds[min(token, TILE - 1u)];
        seen[i] = token < TILE && position >= bound.x && position < bound.y;
    }
    return seen;
}

/// The row in place `i` of the order in which rows are added: slice by slice.
fn position_of(i: u32) -> u32 {
    return i / PER_SLICE + SLICES * (i % PER_SLICE);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_size) width: u32,
    @builtin(subgroup_invocation_id) place: u32,
) {
    let kv_head = wg.y;
    let tile = p.first + wg.z * TILE;
    let tokens = min(TILE, p.end - tile);
    if (lane < tokens) {
        tile_rows[lane] = rows[tile + lane];
    }
    workgroupBarrier();
    // Tokens of one session whose splits are the same ones are served together, others one after the other.
    for (var begin = 0u; begin < tokens;) {
        let lead = tile_rows[begin];
        let base = (lead.z / SPLIT + wg.x) * SPLIT;
        // Positions that one of the run's tokens sees at least, and those that all see.
        var start = SPLIT;
        var end = 0u;
        var all_from = 0u;
        var all_to = SPLIT;
        var to = begin;
        for (; to < tokens; to++) {
            let row = tile_rows[to];
            if (row.y != lead.y || row.z / SPLIT != lead.z / SPLIT) {
                break;
            }
            let a = max(row.z, base) - base;
            let b = clamp(row.x + 1u, base, base + SPLIT) - base;
            start = min(start, a);
            end = max(end, b);
            all_from = max(all_from, a);
            all_to = min(all_to, b);
        }
        if (end > start) {
            if (lane < SPLIT / BLOCK && lane * BLOCK < end) {
                blocks[lane] = tables[lead.y + base / BLOCK + lane];
            }
            if (lane < TILE) {
                var bound = vec2(SPLIT, 0u);
                if (lane >= begin && lane < to) {
                    let row = tile_rows[lane];
                    bound = vec2(max(row.z, base), clamp(row.x + 1u, base, base + SPLIT)) - base;
                }
                bounds[lane] = bound;
            }
            workgroupBarrier();
            if (lane < SPLIT) {
                factors[lane] = scale_of(row_at(0u, kv_head, clamp(lane, start, end - 1u))) * p.scale;
            }

            let vector = lane / ABREAST;
            let across = lane % ABREAST;
            var acc: array<vec4<f32>, HELD>;
            var kept: array<vec4<f32>, HELD>;
            var keys_ahead: array<vec4<u32>, KEYS_AHEAD>;
            var queries_ahead: array<vec4<f32>, QUERIES_AHEAD>;
            // One more than there are pieces: the first is read before anything is computed.
            for (var n = 0u; n <= 4u * CHAIN_PIECES; n++) {
                if (n > 0u) {
                    workgroupBarrier();
                    for (var j = 0u; j < KEYS_AHEAD; j++) {
                        let i = j * THREADS + lane;
                        if (KEY_CHUNKS % THREADS == 0u || i < KEY_CHUNKS) {
                            let wide = widen_key(keys_ahead[j]);
                            let first = i % (PIECE / PARTS) * PARTS;
                            for (var part = 0u; part < PARTS; part++) {
                                stage[(first + part) * KEY_STRIDE + i / (PIECE / PARTS)] = wide[part];
                            }
                        }
                    }
                    for (var j = 0u; j < QUERIES_AHEAD; j++) {
                        let i = j * THREADS + lane;
                        if ((QUERIES * PIECE) % THREADS == 0u || i < QUERIES * PIECE) {
                            stage[PIECE * KEY_STRIDE + i % PIECE * QUERY_STRIDE + i / PIECE] = queries_ahead[j];
                        }
                    }
                    workgroupBarrier();
                }
                if (n < 4u * CHAIN_PIECES) {
                    let chain = n / CHAIN_PIECES;
                    let piece = n % CHAIN_PIECES;
                    for (var j = 0u; j < KEYS_AHEAD; j++) {
                        let i = min(j * THREADS + lane, KEY_CHUNKS - 1u);
                        let position = clamp(i / (PIECE / PARTS), start, end - 1u);
                        let chunk = chunk_of(chain, piece, i % (PIECE / PARTS));
                        keys_ahead[j] = keys[row_at(0u, kv_head, position) + chunk];
                    }
                    for (var j = 0u; j < QUERIES_AHEAD; j++) {
                        let i = min(j * THREADS + lane, QUERIES * PIECE - 1u);
                        // Queries that are not there repeat one that is.
                        let query = min(i / PIECE, TILE * PER_KV - 1u);
                        let token = tile + clamp(query / PER_KV, begin, to - 1u);
                        let word = chunk_of(chain, piece, i % PIECE / PARTS) * PARTS + i % PARTS;
                        let head = kv_head * PER_KV + query % PER_KV;
                        queries_ahead[j] = queries[(token * HEADS + head) * QUERY_WORDS + word];
                    }
                }
                if (n > 0u) {
                    for (var word = 0u; word < PIECE; word++) {
                        let at = PIECE * KEY_STRIDE + word * QUERY_STRIDE + 4u * vector;
                        let q0 = stage[at];
                        let q1 = stage[at + 1u];
                        let q2 = stage[at + 2u];
                        let q3 = stage[at + 3u];
                        let x = vec4(q0.x, q1.x, q2.x, q3.x);
                        let y = vec4(q0.y, q1.y, q2.y, q3.y);
                        let z = vec4(q0.z, q1.z, q2.z, q3.z);
                        let w = vec4(q0.w, q1.w, q2.w, q3.w);
                        for (var j = 0u; j < HELD; j++) {
                            let key = stage[word * KEY_STRIDE + ABREAST * j + across];
                            acc[j] = loose4(vec4(key.x), x, acc[j]);
                            acc[j] = loose4(vec4(key.y), y, acc[j]);
                            acc[j] = loose4(vec4(key.z), z, acc[j]);
                            acc[j] = loose4(vec4(key.w), w, acc[j]);
                        }
                    }
                    if (n % CHAIN_PIECES == 0u) {
                        // A chain has ended. The sum of two lies where it becomes the score: three at once would take registers.
                        let chain = n / CHAIN_PIECES - 1u;
                        for (var j = 0u; j < HELD; j++) {
                            let position = ABREAST * j + across;
                            let at = vector * SPLIT + position;
                            if (chain % 2u == 0u) {
                                kept[j] = acc[j];
                            } else if (chain == 1u) {
                                scores[at] = kept[j] + acc[j];
                            } else {
                                scores[at] = (scores[at] + (kept[j] + acc[j])) * factors[position];
                            }
                            acc[j] = vec4(0.0);
                        }
                    }
                }
            }
            workgroupBarrier();

            let position = lane % SPLIT;
            let subgroups = SPLIT / width;
            let low = vec4(bitcast<f32>(p.low));
            for (var v = lane / SPLIT; v < VECTORS; v += THREADS / SPLIT) {
                let most = subgroupMax(select(low, scores[v * SPLIT + position], seen_by(v, position)));
                if (place == 0u) {
                    stage[v * subgroups + position / width] = most;
                }
            }
            workgroupBarrier();
            let shown = position >= start && position < end;
            let value_scale = scale_of(row_at(1u, kv_head, select(start, position, shown)));
            for (var v = lane / SPLIT; v < VECTORS; v += THREADS / SPLIT) {
                let seen = seen_by(v, position);
                let score = select(low, scores[v * SPLIT + position], seen);
                var maximum = low;
                for (var i = 0u; i < subgroups; i++) {
                    maximum = max(maximum, stage[v * subgroups + i]);
                }
                // Scores that are all -infinity have no weight, rather than none that is a number.
                let origin = select(maximum, vec4(0.0), bitcast<vec4<u32>>(maximum) == vec4(p.low));
                var weight: vec4<f32>;
                for (var i = 0u; i < 4u; i++) {
                    weight[i] = exponential(score[i] - origin[i]);
                }
                weight = select(vec4(0.0), weight, seen);
                let sum = subgroupAdd(weight);
                if (place == 0u) {
                    stage[(VECTORS + v) * subgroups + position / width] = sum;
                }
                weight *= value_scale;
                scores[v * SPLIT + position] = select(bitcast<vec4<f32>>(vec4(UNSEEN)), weight, seen);
            }
            workgroupBarrier();
            if (lane < VECTORS) {
                var maximum = low;
                var total = vec4(0.0);
                for (var i = 0u; i < subgroups; i++) {
                    maximum = max(maximum, stage[lane * subgroups + i]);
                    total += stage[(VECTORS + lane) * subgroups + i];
                }
                for (var i = 0u; i < 4u; i++) {
                    let query = 4u * lane + i;
                    let token = query / PER_KV;
                    if (token >= begin && token < to) {
                        let unit = (tile + token - p.first) * p.splits + wg.x;
                        end_query(unit, query, kv_head * PER_KV + query % PER_KV, maximum[i], total[i]);
                    }
                }
            }

            let column = lane % COLUMNS;
            let mine = lane / COLUMNS * MINE;
            var sums_of: array<vec4<f32>, 4u * MINE>;
            var slice_sums: array<vec4<f32>, 4u * MINE>;
            var values_ahead: array<Narrow, VALUES_AHEAD>;
            for (var n = 0u; n <= SPLIT / STAGED; n++) {
                if (n > 0u) {
                    workgroupBarrier();
                    for (var j = 0u; j < VALUES_AHEAD; j++) {
                        stage[j * THREADS + lane] = widen_value(values_ahead[j]);
                    }
                    workgroupBarrier();
                }
                if (n < SPLIT / STAGED) {
                    for (var j = 0u; j < VALUES_AHEAD; j++) {
                        let i = n * STAGED + (j * THREADS + lane) / COLUMNS;
                        let row = row_at(1u, kv_head, clamp(position_of(i), start, end - 1u));
                        values_ahead[j] = values[row * NARROW + min(column, VALUE_WORDS - 1u)];
                    }
                }
                if (n > 0u) {
                    for (var first = 0u; first < STAGED; first += TOGETHER) {
                        let i = (n - 1u) * STAGED + first;
                        let from_position = position_of(i);
                        let last_position = from_position + SLICES * (TOGETHER - 1u);
                        if (from_position >= all_from && last_position < all_to) {
                            for (var k = 0u; k < TOGETHER; k++) {
                                let x = stage[(first + k) * COLUMNS + column];
                                for (var v = 0u; v < MINE; v++) {
                                    let w = scores[(mine + v) * SPLIT + from_position + SLICES * k];
                                    slice_sums[4u * v] = loose4(vec4(w.x), x, slice_sums[4u * v]);
                                    slice_sums[4u * v + 1u] = loose4(vec4(w.y), x, slice_sums[4u * v + 1u]);
                                    slice_sums[4u * v + 2u] = loose4(vec4(w.z), x, slice_sums[4u * v + 2u]);
                                    slice_sums[4u * v + 3u] = loose4(vec4(w.w), x, slice_sums[4u * v + 3u]);
                                }
                            }
                        } else {
                            for (var k = 0u; k < TOGETHER; k++) {
                                let at = from_position + SLICES * k;
                                if (at < start || at >= end) {
                                    continue;
                                }
                                let x = stage[(first + k) * COLUMNS + column];
                                for (var v = 0u; v < MINE; v++) {
                                    let w = scores[(mine + v) * SPLIT + at];
                                    for (var q = 0u; q < 4u; q++) {
                                        let next = loose4(vec4(w[q]), x, slice_sums[4u * v + q]);
                                        slice_sums[4u * v + q] =
                                            select(slice_sums[4u * v + q], next, bitcast<u32>(w[q]) != UNSEEN);
                                    }
                                }
                            }
                        }
                        if ((i + TOGETHER) % PER_SLICE == 0u) {
                            for (var q = 0u; q < 4u * MINE; q++) {
                                sums_of[q] += slice_sums[q];
                                slice_sums[q] = vec4(0.0);
                            }
                        }
                    }
                }
            }
            for (var q = 0u; q < 4u * MINE; q++) {
                let query = 4u * mine + q;
                let token = query / PER_KV;
                if (token >= begin && token < to && column < VALUE_WORDS) {
                    let unit = (tile + token - p.first) * p.splits + wg.x;
                    end_sum(unit, query, kv_head * PER_KV + query % PER_KV, column, sums_of[q]);
                }
            }
            workgroupBarrier();
        }
        begin = to;
    }
}
