// Attention over one split of positions, of all query heads of a kv head and so many tokens that their queries fill a tile:
// products of matrices through shared memory. Workgroups: (split, kv head, tile of tokens).
//
// Needs: what attention.wgsl needs but GROUPS, and attention_split.wgsl; const THREADS, SLICES (attention.wgsl's), PIECE (words of
// a chain that are staged at once), STAGED (rows of values that are), STAGE (vectors of what is staged); those
// lists.
//
// Every sum has the order that it has in attention.wgsl, and so its bits:
//
//     scores    a lane for four queries and HELD positions. What there is a lane of a quad, every fourth 16 bytes, is here a
//               chain after the other: (0 + 1) + (2 + 3)
//     weights   a lane for a position, four queries after the other: subgroups are the same
//     sums      a lane for four columns of some queries. What there is a lane of a slice is here a slice after the other
//
// What is indexed by a literal, once all is inlined, lives in registers: hence functions of an item, and of `..s` of them, which
// prompt.rs appends, in place of loops.

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
// Lanes that surely are of one subgroup, and their maxima of a query.
const TEAM_LANES: u32 = 8u;
const TEAMS: u32 = ABREAST / TEAM_LANES;
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

alias Held = array<vec4<f32>, HELD>;
alias Mine = array<vec4<f32>, 4u * MINE>;
alias KeysAhead = array<vec4<u32>, KEYS_AHEAD>;
alias QueriesAhead = array<vec4<f32>, QUERIES_AHEAD>;
alias ValuesAhead = array<Narrow, VALUES_AHEAD>;

/// A run of tokens of one session whose splits are the same ones.
struct Run {
    // Its tokens, of the tile.
    begin: u32,
    to: u32,
    // Positions that one of them sees at least, and those that all see.
    start: u32,
    end: u32,
    all_from: u32,
    all_to: u32,
}

// A word of four queries, by element.
struct Word { x: vec4<f32>, y: vec4<f32>, z: vec4<f32>, w: vec4<f32> }

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

/// Where a query begins to see the split and where it ends; nowhere if it is not of this run of tokens.
fn bound_of(query: u32) -> vec2<u32> {
    let token = query / PER_KV;
    return select(vec2(SPLIT, 0u), bounds[min(token, TILE - 1u)], token < TILE);
}

fn seen_of(vector: u32) -> Seen {
    let x = bound_of(4u * vector);
    let y = bound_of(4u * vector + 1u);
    let z = bound_of(4u * vector + 2u);
    let w = bound_of(4u * vector + 3u);
    let low = vec4(bitcast<f32>(p.low));
    return Seen(vec4(x.x, y.x, z.x, w.x), vec4(x.y, y.y, z.y, w.y), low);
}

/// The most that each of four queries scored.
fn most_of(vector: u32) -> vec4<f32> {
    var most = vec4(bitcast<f32>(p.low));
    for (var i = 0u; i < TEAMS; i++) {
        most = max(most, stage[vector * TEAMS + i]);
    }
    return most;
}

/// The row in place `i` of the order in which rows are added: slice by slice.
fn position_of(i: u32) -> u32 {
    return i / PER_SLICE + SLICES * (i % PER_SLICE);
}

fn read_key(ahead: ptr<function, KeysAhead>, run: Run, kv_head: u32, chain: u32, piece: u32, lane: u32, j: u32) {
    let i = min(j * THREADS + lane, KEY_CHUNKS - 1u);
    let position = clamp(i / (PIECE / PARTS), run.start, run.end - 1u);
    (*ahead)[j] = keys[row_at(0u, kv_head, position) + chunk_of(chain, piece, i % (PIECE / PARTS))];
}

fn stage_part(wide: ptr<function, array<vec4<f32>, PARTS>>, i: u32, part: u32) {
    let word = i % (PIECE / PARTS) * PARTS + part;
    stage[word * KEY_STRIDE + i / (PIECE / PARTS)] = (*wide)[part];
}

fn stage_key(ahead: ptr<function, KeysAhead>, lane: u32, j: u32) {
    let i = j * THREADS + lane;
    if (KEY_CHUNKS % THREADS == 0u || i < KEY_CHUNKS) {
        var wide = widen_key((*ahead)[j]);
        stage_parts(&wide, i);
    }
}

fn read_query(ahead: ptr<function, QueriesAhead>, run: Run, kv_head: u32, tile: u32, chain: u32, piece: u32, lane: u32, j: u32) {
    let i = min(j * THREADS + lane, QUERIES * PIECE - 1u);
    // Queries that are not there repeat one that is.
    let query = min(i / PIECE, TILE * PER_KV - 1u);
    let token = tile + clamp(query / PER_KV, run.begin, run.to - 1u);
    let word = chunk_of(chain, piece, i % PIECE / PARTS) * PARTS + i % PARTS;
    let head = kv_head * PER_KV + query % PER_KV;
    (*ahead)[j] = queries[(token * HEADS + head) * QUERY_WORDS + word];
}

fn stage_query(ahead: ptr<function, QueriesAhead>, lane: u32, j: u32) {
    let i = j * THREADS + lane;
    if ((QUERIES * PIECE) % THREADS == 0u || i < QUERIES * PIECE) {
        stage[PIECE * KEY_STRIDE + i % PIECE * QUERY_STRIDE + i / PIECE] = (*ahead)[j];
    }
}

/// A word of the queries times that of a lane's position `j`.
fn multiply_position(acc: ptr<function, Held>, word: Word, at: u32, j: u32) {
    let key = stage[at + ABREAST * j];
    var sum = (*acc)[j];
    sum = loose4(vec4(key.x), word.x, sum);
    sum = loose4(vec4(key.y), word.y, sum);
    sum = loose4(vec4(key.z), word.z, sum);
    (*acc)[j] = loose4(vec4(key.w), word.w, sum);
}

/// What a lane's four queries see, and the most that they scored there.
struct Seen { start: vec4<u32>, end: vec4<u32>, most: vec4<f32> }

/// A chain has ended. The sum of two lies where it becomes the score: three at once would take registers.
fn end_position(
    acc: ptr<function, Held>,
    kept: ptr<function, Held>,
    seen: ptr<function, Seen>,
    chain: u32,
    vector: u32,
    across: u32,
    j: u32,
) {
    let position = ABREAST * j + across;
    let at = vector * SPLIT + position;
    if (chain % 2u == 0u) {
        (*kept)[j] = (*acc)[j];
    } else if (chain == 1u) {
        scores[at] = (*kept)[j] + (*acc)[j];
    } else {
        let score = (scores[at] + ((*kept)[j] + (*acc)[j])) * factors[position];
        scores[at] = score;
        let is_seen = vec4(position) >= (*seen).start & vec4(position) < (*seen).end;
        (*seen).most = select((*seen).most, max((*seen).most, score), is_seen);
    }
    (*acc)[j] = vec4(0.0);
}

fn read_value(ahead: ptr<function, ValuesAhead>, run: Run, kv_head: u32, first: u32, lane: u32, j: u32) {
    let i = first + (j * THREADS + lane) / COLUMNS;
    let row = row_at(1u, kv_head, clamp(position_of(i), run.start, run.end - 1u));
    (*ahead)[j] = values[row * NARROW + min(lane % COLUMNS, VALUE_WORDS - 1u)];
}

fn stage_value(ahead: ptr<function, ValuesAhead>, lane: u32, j: u32) {
    stage[j * THREADS + lane] = widen_value((*ahead)[j]);
}

/// A row of values, times the weights of a vector of queries that all see it.
fn add_vector(sums: ptr<function, Mine>, x: vec4<f32>, at: u32, v: u32) {
    let w = scores[at + v * SPLIT];
    (*sums)[4u * v] = loose4(vec4(w.x), x, (*sums)[4u * v]);
    (*sums)[4u * v + 1u] = loose4(vec4(w.y), x, (*sums)[4u * v + 1u]);
    (*sums)[4u * v + 2u] = loose4(vec4(w.z), x, (*sums)[4u * v + 2u]);
    (*sums)[4u * v + 3u] = loose4(vec4(w.w), x, (*sums)[4u * v + 3u]);
}

/// The sum with a row of values, if the weight is of one that is seen.
fn add_seen(w: f32, x: vec4<f32>, sum: vec4<f32>) -> vec4<f32> {
    return select(sum, loose4(vec4(w), x, sum), bitcast<u32>(w) != UNSEEN);
}

/// The same of queries some of which may not see it.
fn add_masked(sums: ptr<function, Mine>, x: vec4<f32>, at: u32, v: u32) {
    let w = scores[at + v * SPLIT];
    (*sums)[4u * v] = add_seen(w.x, x, (*sums)[4u * v]);
    (*sums)[4u * v + 1u] = add_seen(w.y, x, (*sums)[4u * v + 1u]);
    (*sums)[4u * v + 2u] = add_seen(w.z, x, (*sums)[4u * v + 2u]);
    (*sums)[4u * v + 3u] = add_seen(w.w, x, (*sums)[4u * v + 3u]);
}

/// A slice has ended.
fn end_slice(sums: ptr<function, Mine>, slice: ptr<function, Mine>, q: u32) {
    (*sums)[q] += (*slice)[q];
    (*slice)[q] = vec4(0.0);
}

/// Number of a token and split in `sums` and `stats`.
fn unit_of(tile: u32, token: u32, split: u32) -> u32 {
    return (tile + token - p.first) * p.splits + split;
}

fn leave_sum(sums: ptr<function, Mine>, run: Run, kv_head: u32, tile: u32, split: u32, mine: u32, column: u32, q: u32) {
    let query = 4u * mine + q;
    let token = query / PER_KV;
    if (token >= run.begin && token < run.to && column < VALUE_WORDS) {
        end_sum(unit_of(tile, token, split), query, kv_head * PER_KV + query % PER_KV, column, (*sums)[q]);
    }
}

fn leave_query(run: Run, kv_head: u32, tile: u32, split: u32, query: u32, most: f32, sum: f32) {
    let token = query / PER_KV;
    if (token >= run.begin && token < run.to) {
        end_query(unit_of(tile, token, split), query, kv_head * PER_KV + query % PER_KV, most, sum);
    }
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
        var run = Run(begin, begin, SPLIT, 0u, 0u, SPLIT);
        for (; run.to < tokens; run.to++) {
            let row = tile_rows[run.to];
            if (row.y != lead.y || row.z / SPLIT != lead.z / SPLIT) {
                break;
            }
            let a = max(row.z, base) - base;
            let b = clamp(row.x + 1u, base, base + SPLIT) - base;
            run.start = min(run.start, a);
            run.end = max(run.end, b);
            run.all_from = max(run.all_from, a);
            run.all_to = min(run.all_to, b);
        }
        let start = run.start;
        let end = run.end;
        let to = run.to;
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
            var seen = seen_of(vector);
            var acc: Held;
            var kept: Held;
            var keys_ahead: KeysAhead;
            var queries_ahead: QueriesAhead;
            // One more than there are pieces: the first is read before anything is computed.
            for (var n = 0u; n <= 4u * CHAIN_PIECES; n++) {
                if (n > 0u) {
                    workgroupBarrier();
                    stage_keys(&keys_ahead, lane);
                    stage_queries(&queries_ahead, lane);
                    workgroupBarrier();
                }
                if (n < 4u * CHAIN_PIECES) {
                    let chain = n / CHAIN_PIECES;
                    let piece = n % CHAIN_PIECES;
                    read_keys(&keys_ahead, run, kv_head, chain, piece, lane);
                    read_queries(&queries_ahead, run, kv_head, tile, chain, piece, lane);
                }
                if (n > 0u) {
                    for (var i = 0u; i < PIECE; i++) {
                        let at = PIECE * KEY_STRIDE + i * QUERY_STRIDE + 4u * vector;
                        let q0 = stage[at];
                        let q1 = stage[at + 1u];
                        let q2 = stage[at + 2u];
                        let q3 = stage[at + 3u];
                        let word = Word(
                            vec4(q0.x, q1.x, q2.x, q3.x),
                            vec4(q0.y, q1.y, q2.y, q3.y),
                            vec4(q0.z, q1.z, q2.z, q3.z),
                            vec4(q0.w, q1.w, q2.w, q3.w),
                        );
                        multiply_positions(&acc, word, i * KEY_STRIDE + across);
                    }
                    if (n % CHAIN_PIECES == 0u) {
                        end_positions(&acc, &kept, &seen, n / CHAIN_PIECES - 1u, vector, across);
                    }
                }
            }
            var most = seen.most;
            most = max(most, subgroupShuffleXor(most, 1u));
            most = max(most, subgroupShuffleXor(most, 2u));
            most = max(most, subgroupShuffleXor(most, 4u));
            workgroupBarrier();
            if (across % TEAM_LANES == 0u) {
                stage[vector * TEAMS + across / TEAM_LANES] = most;
            }
            workgroupBarrier();

            let position = lane % SPLIT;
            let subgroups = SPLIT / width;
            let low = vec4(bitcast<f32>(p.low));
            let shown = position >= start && position < end;
            let value_scale = scale_of(row_at(1u, kv_head, select(start, position, shown)));
            for (var v = lane / SPLIT; v < VECTORS; v += THREADS / SPLIT) {
                let bound = seen_of(v);
                let is_seen = vec4(position) >= bound.start & vec4(position) < bound.end;
                let score = select(low, scores[v * SPLIT + position], is_seen);
                let maximum = most_of(v);
                // Scores that are all -infinity have no weight, rather than none that is a number.
                let origin = select(maximum, vec4(0.0), bitcast<vec4<u32>>(maximum) == vec4(p.low));
                let x = score - origin;
                var weight = vec4(exponential(x.x), exponential(x.y), exponential(x.z), exponential(x.w));
                weight = select(vec4(0.0), weight, is_seen);
                let sum = subgroupAdd(weight);
                if (place == 0u) {
                    stage[VECTORS * TEAMS + v * subgroups + position / width] = sum;
                }
                weight *= value_scale;
                scores[v * SPLIT + position] = select(bitcast<vec4<f32>>(vec4(UNSEEN)), weight, is_seen);
            }
            workgroupBarrier();
            if (lane < VECTORS) {
                let maximum = most_of(lane);
                var total = vec4(0.0);
                for (var i = 0u; i < subgroups; i++) {
                    total += stage[VECTORS * TEAMS + lane * subgroups + i];
                }
                leave_query(run, kv_head, tile, wg.x, 4u * lane, maximum.x, total.x);
                leave_query(run, kv_head, tile, wg.x, 4u * lane + 1u, maximum.y, total.y);
                leave_query(run, kv_head, tile, wg.x, 4u * lane + 2u, maximum.z, total.z);
                leave_query(run, kv_head, tile, wg.x, 4u * lane + 3u, maximum.w, total.w);
            }

            let column = lane % COLUMNS;
            let mine = lane / COLUMNS * MINE;
            var all: Mine;
            var slice: Mine;
            var values_ahead: ValuesAhead;
            for (var n = 0u; n <= SPLIT / STAGED; n++) {
                if (n > 0u) {
                    workgroupBarrier();
                    stage_values(&values_ahead, lane);
                    workgroupBarrier();
                }
                if (n < SPLIT / STAGED) {
                    read_values(&values_ahead, run, kv_head, n * STAGED, lane);
                }
                if (n > 0u) {
                    for (var first = 0u; first < STAGED; first += TOGETHER) {
                        let i = (n - 1u) * STAGED + first;
                        let from_position = position_of(i);
                        let last_position = from_position + SLICES * (TOGETHER - 1u);
                        let row = first * COLUMNS + column;
                        let at = mine * SPLIT + from_position;
                        if (from_position >= run.all_from && last_position < run.all_to) {
                            for (var k = 0u; k < TOGETHER; k++) {
                                add_vectors(&slice, stage[row + k * COLUMNS], at + SLICES * k);
                            }
                        } else {
                            for (var k = 0u; k < TOGETHER; k++) {
                                let seen = from_position + SLICES * k;
                                if (seen >= start && seen < end) {
                                    add_maskeds(&slice, stage[row + k * COLUMNS], at + SLICES * k);
                                }
                            }
                        }
                        if ((i + TOGETHER) % PER_SLICE == 0u) {
                            end_slices(&all, &slice);
                        }
                    }
                }
            }
            leave_sums(&all, run, kv_head, tile, wg.x, mine, column);
            workgroupBarrier();
        }
        begin = to;
    }
}
