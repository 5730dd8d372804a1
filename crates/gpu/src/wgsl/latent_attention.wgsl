// Attention of heads that share a latent, over one split of positions. Workgroups: (split, TILE heads, token).
//
// Needs: norm_float.wgsl, fn fma2 and fma4, attention_*.wgsl, latent_units_*.wgsl, latent_each_*.wgsl, attention_split.wgsl or
// attention_whole.wgsl; const HEADS, THREADS, TILE (heads of a workgroup), AHEAD (units of each of its positions that a lane has on their
// way), VALUES_AHEAD (rows of values; a multiple of four), KEY_DIM, VALUE_DIM (the first elements of a key), COLUMNS (lanes side by side
// over a value), ROW (16-byte words of a cache row), NARROW (of four values in 16 bytes), ROOM and SLICED (vectors of `scores`, and where
// those of slices begin), alias Narrow (these four); the buffers keys (vec4<u32>) and values (four elements each) of the same cache, rows
// (vec4<u32>), tables (u32), queries (vec4<f32>); the lists load_units, take_units, add_heads, leave_scores, take_values, add_weights and
// end_heads of calls, as in coded.wgsl, which latent_attention.rs appends.
//
// A lone token waits for memory, many heads or tokens for arithmetic. So rows go from the cache to registers, many on their way at once, and
// what a lane has of a row is multiplied by all of the workgroup's heads:
//
//     scores    four lanes for each position, by turns a unit of eight columns each; a lane has EACH positions. Queries go
//               through shared memory, PART vectors at a time, those that come being on their way; four lanes add up what they have
//     weights   a lane for a head at every 32nd position
//     sums      a lane for four columns and every SLICES-th position, for some heads; slices are added last
//
// Splits begin at multiples of SPLIT, whatever the token sees, and every sum has an order of its own, which neither THREADS, TILE nor
// AHEAD changes: so what a token gets depends neither on its neighbours nor on how many there are.

struct Params { first: u32, splits: u32, scale: f32, low: u32, nothing: u32 }
var<immediate> p: Params;

const SPLIT: u32 = 128u;
const BLOCK: u32 = 32u;
// Lanes of a position: chains of a score.
const CHAINS: u32 = 4u;
// Lanes side by side over positions, and positions of each, one of each block.
const PLACES: u32 = THREADS / CHAINS;
const EACH: u32 = SPLIT / PLACES;
const QUERY_WORDS: u32 = KEY_DIM / 4u;
// Vectors of a head that are multiplied between two barriers.
const PART: u32 = 2u * CHAINS * AHEAD;
const ROUNDS: u32 = (QUERY_WORDS + PART - 1u) / PART;
// The last units are not all there.
const RAGGED: bool = ROUNDS * PART != QUERY_WORDS;
const QUERIES_EACH: u32 = (TILE * PART + THREADS - 1u) / THREADS;
// Lanes of a head's weights, and what four of them have found.
const WEIGHERS: u32 = 32u;
const FOUND: u32 = WEIGHERS / 4u;
// Vectors of four heads.
const VECTORS: u32 = (TILE + 3u) / 4u;
const VALUE_WORDS: u32 = VALUE_DIM / 4u;
// Lanes that add up rows of values, and how many of them share the heads.
const MIXERS: u32 = 128u;
const GROUPS: u32 = min(THREADS / MIXERS, TILE);
const HEADS_EACH: u32 = TILE / GROUPS;
const SLICES: u32 = MIXERS / COLUMNS;
// Positions of a slice.
const LENGTH: u32 = SPLIT / SLICES;

alias Starts = array<u32, EACH>;
alias Ahead = array<Unit, AHEAD * EACH>;
// A vector of each of a lane's positions; a column of a unit of each; its sums by head.
alias Words = array<vec4<f32>, EACH>;
alias Columns = array<Each, 8>;
alias Dots = array<Each, TILE>;
alias ValuesAhead = array<Narrow, VALUES_AHEAD>;
alias Four = array<vec4<f32>, 4>;
// Of a lane's columns, by its heads.
alias Means = array<vec4<f32>, HEADS_EACH>;
// A run of rows of values is of one block: their places are known by the first.
const RUN_IN_BLOCK: bool = VALUES_AHEAD * SLICES <= BLOCK;

// Queries, [2, TILE, PART].
var<workgroup> query_stage: array<vec4<f32>, 2u * TILE * PART>;
// Scores, then weights, [TILE, SLICES, LENGTH]: a slice's positions side by side.
var<workgroup> weights: array<vec4<f32>, TILE * SPLIT / 4u>;
// [TILE, FOUND].
var<workgroup> maxima: array<vec4<f32>, TILE * FOUND / 4u>;
var<workgroup> totals: array<vec4<f32>, TILE * FOUND / 4u>;
// What slices have summed up, and what attention_whole.wgsl hands out.
var<workgroup> scores: array<vec4<f32>, ROOM>;
var<workgroup> blocks: array<u32, SPLIT / BLOCK>;

/// First 16 bytes of the row of a position of the split.
fn row_at(position: u32) -> u32 {
    return (blocks[position / BLOCK] * BLOCK + position % BLOCK) * ROW;
}

/// Place of a position's weight in a head's.
fn place_of(position: u32) -> u32 {
    return (position % SLICES) * LENGTH + position / SLICES;
}

fn load_queries(ahead: ptr<function, array<vec4<f32>, QUERIES_EACH>>, token: u32, first_head: u32, round: u32, lane: u32) {
    for (var i = 0u; i < QUERIES_EACH; i++) {
        let item = i * THREADS + lane;
        let word = round * PART + item % PART;
        // Heads that are not there repeat the last one.
        let head = min(first_head + item / PART, HEADS - 1u);
        let at = (token * HEADS + head) * QUERY_WORDS;
        (*ahead)[i] = select(vec4(0.0), queries[at + min(word, QUERY_WORDS - 1u)], word < QUERY_WORDS);
    }
}

/// Unit `item / EACH` of a round of the lane's position `item % EACH`.
fn load_unit(ahead: ptr<function, Ahead>, starts: ptr<function, Starts>, round: u32, chain: u32, item: u32) {
    var unit = (round * AHEAD + item / EACH) * CHAINS + chain;
    if (RAGGED) {
        // Units past the end are not looked at.
        unit = min(unit, (QUERY_WORDS - 1u) / 2u);
    }
    (*ahead)[item] = unit_at((*starts)[item % EACH], unit);
}

/// Adds a unit of each position to its sum of a head; `at` is the unit's of the workgroup's first head.
fn add_head(columns: ptr<function, Columns>, dots: ptr<function, Dots>, at: u32, head: u32) {
    let x = query_stage[at + head * PART];
    let y = query_stage[at + head * PART + 1u];
    var dot = (*dots)[head];
    dot = fma((*columns)[0], Each(x.x), dot);
    dot = fma((*columns)[1], Each(x.y), dot);
    dot = fma((*columns)[2], Each(x.z), dot);
    dot = fma((*columns)[3], Each(x.w), dot);
    dot = fma((*columns)[4], Each(y.x), dot);
    dot = fma((*columns)[5], Each(y.y), dot);
    dot = fma((*columns)[6], Each(y.z), dot);
    dot = fma((*columns)[7], Each(y.w), dot);
    (*dots)[head] = dot;
}

/// Multiplies a unit of each position by all heads, and sends for the next round's.
fn take_unit(
    ahead: ptr<function, Ahead>,
    dots: ptr<function, Dots>,
    starts: ptr<function, Starts>,
    round: u32,
    chain: u32,
    stage: u32,
    i: u32,
) {
    var first: Words;
    var second: Words;
    for (var j = 0u; j < EACH; j++) {
        let unit = (*ahead)[EACH * i + j];
        first[j] = first_word(unit);
        second[j] = second_word(unit);
        if (round + 1u < ROUNDS) {
            load_unit(ahead, starts, round + 1u, chain, EACH * i + j);
        }
    }
    let word = 2u * (i * CHAINS + chain);
    let a = columns_of(&first);
    let b = columns_of(&second);
    var columns = Columns(a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]);
    if (RAGGED) {
        let left = QUERY_WORDS - min(round * PART + word, QUERY_WORDS);
        for (var c = 0u; c < 8u; c++) {
            columns[c] = select(Each(0.0), columns[c], left > c / 4u);
        }
    }
    add_heads(&columns, dots, stage + word);
}

/// Leaves a head's score of one of the lane's positions, that whose number is its chain; lanes beyond have none.
fn leave_score(dots: ptr<function, Dots>, chain: u32, factor: f32, place: u32, head: u32) {
    let sum = sum_of_chains((*dots)[head], chain);
    if (chain < EACH) {
        weights[(head * SPLIT + place) / 4u][place % 4u] = factor * sum;
    }
}

/// The largest or the sum of what four neighbouring lanes have.
fn most_of_four(x: f32) -> f32 {
    let two = max(x, subgroupShuffleXor(x, 1u));
    return max(two, subgroupShuffleXor(two, 2u));
}

fn sum_of_four(x: f32) -> f32 {
    let two = x + subgroupShuffleXor(x, 1u);
    return two + subgroupShuffleXor(two, 2u);
}

/// Rows `item ..+ 4` of a run of a slice's that begins with `first`; what is not seen is not looked at.
fn load_values(ahead: ptr<function, ValuesAhead>, first: u32, item: u32, start: u32, end: u32, lane: u32) {
    let slice = (lane % MIXERS) / COLUMNS;
    let column = min(lane % COLUMNS, VALUE_WORDS - 1u);
    if (RUN_IN_BLOCK) {
        let block = blocks[min(first * SLICES, end - 1u) / BLOCK] * BLOCK;
        let at = (block + (first * SLICES) % BLOCK + slice) * ROW * NARROW + column;
        for (var k = 0u; k < 4u; k++) {
            (*ahead)[item + k] = values[at + (item + k) * SLICES * ROW * NARROW];
        }
        return;
    }
    for (var k = 0u; k < 4u; k++) {
        let position = (first + item + k) * SLICES + slice;
        (*ahead)[item + k] = values[row_at(clamp(position, start, end - 1u)) * NARROW + column];
    }
}

/// Adds four positions' columns, by the weights of a head; `at` are these of the lane's first head.
fn add_weight(means: ptr<function, Means>, x: ptr<function, Four>, at: u32, head: u32) {
    let w = weights[at + head * (SPLIT / 4u)];
    var mean = (*means)[head];
    mean = fma(vec4(w.x), (*x)[0], mean);
    mean = fma(vec4(w.y), (*x)[1], mean);
    mean = fma(vec4(w.z), (*x)[2], mean);
    mean = fma(vec4(w.w), (*x)[3], mean);
    (*means)[head] = mean;
}

/// Adds four rows of values for the lane's heads, and sends for those of the next run. What is not seen counts as zeros.
fn take_value(
    ahead: ptr<function, ValuesAhead>,
    means: ptr<function, Means>,
    first: u32,
    start: u32,
    end: u32,
    lane: u32,
    v: u32,
) {
    let slice = (lane % MIXERS) / COLUMNS;
    var x: Four;
    for (var k = 0u; k < 4u; k++) {
        x[k] = widen_value((*ahead)[4u * v + k]);
    }
    if (first * SLICES < start || (first + VALUES_AHEAD) * SLICES > end) {
        for (var k = 0u; k < 4u; k++) {
            let position = (first + 4u * v + k) * SLICES + slice;
            x[k] = select(vec4(0.0), x[k], position >= start && position < end);
        }
    }
    if (first + VALUES_AHEAD < LENGTH) {
        load_values(ahead, first + VALUES_AHEAD, 4u * v, start, end, lane);
    }
    let head = (lane / MIXERS) * HEADS_EACH;
    add_weights(means, &x, (head * SPLIT + slice * LENGTH + first) / 4u + v);
}

/// Leaves the columns of one of the lane's heads: they are whole, or there are other lanes' to be added.
fn end_head(means: ptr<function, Means>, unit: u32, first_head: u32, lane: u32, h: u32) {
    var sum = (*means)[h];
    let mixer = lane % MIXERS;
    if (SLICES > 1u) {
        workgroupBarrier();
        scores[SLICED + lane] = sum;
        workgroupBarrier();
        if (mixer < VALUE_WORDS) {
            for (var s = 1u; s < SLICES; s++) {
                sum += scores[SLICED + s * COLUMNS + lane];
            }
        }
    }
    let head = (lane / MIXERS) * HEADS_EACH + h;
    if (mixer < VALUE_WORDS && head < TILE && first_head + head < HEADS) {
        end_sum(unit, head, first_head + head, mixer, sum);
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let token = p.first + wg.z;
    let first_head = wg.y * TILE;
    let unit = wg.z * p.splits + wg.x;
    var query_ahead: array<vec4<f32>, QUERIES_EACH>;
    load_queries(&query_ahead, token, first_head, 0u, lane);
    let row = rows[token];
    let base = (row.z / SPLIT + wg.x) * SPLIT;
    // Positions of the split that are seen.
    let start = max(row.z, base) - base;
    let end = clamp(row.x + 1u, base, base + SPLIT) - base;
    if (end > start) {
        let chain = lane % CHAINS;
        let place = lane / CHAINS;
        var starts: Starts;
        for (var j = 0u; j < EACH; j++) {
            let position = clamp(j * PLACES + place, start, end - 1u);
            let block = tables[row.y + (base + position) / BLOCK];
            starts[j] = (block * BLOCK + position % BLOCK) * ROW;
        }
        if (lane < SPLIT / BLOCK && lane * BLOCK < end) {
            blocks[lane] = tables[row.y + base / BLOCK + lane];
        }
        var ahead: Ahead;
        load_units(&ahead, &starts, 0u, chain);
        var dots = Dots();
        for (var round = 0u; round < ROUNDS; round++) {
            let stage = (round & 1u) * TILE * PART;
            for (var i = 0u; i < QUERIES_EACH; i++) {
                let item = i * THREADS + lane;
                if (item < TILE * PART) {
                    query_stage[stage + item] = query_ahead[i];
                }
            }
            workgroupBarrier();
            if (round + 1u < ROUNDS) {
                load_queries(&query_ahead, token, first_head, round + 1u, lane);
            }
            take_units(&ahead, &dots, &starts, round, chain, stage);
        }
        let own = (chain % EACH) * PLACES + place;
        let factor = scale_of(row_at(clamp(own, start, end - 1u))) * p.scale;
        leave_scores(&dots, chain, factor, place_of(own));

        // Values are on their way while weights are made; runs before the first that is seen are left out.
        let first = start / SLICES / VALUES_AHEAD * VALUES_AHEAD;
        let mixes = lane < GROUPS * MIXERS;
        var values_ahead: ValuesAhead;
        if (mixes) {
            for (var i = 0u; i < VALUES_AHEAD; i += 4u) {
                load_values(&values_ahead, first, i, start, end, lane);
            }
        }
        workgroupBarrier();

        let low = bitcast<f32>(p.low);
        let weigher = lane % WEIGHERS;
        for (var head = lane / WEIGHERS; head < TILE; head += THREADS / WEIGHERS) {
            var most = low;
            for (var position = weigher; position < SPLIT; position += WEIGHERS) {
                let at = head * SPLIT + place_of(position);
                let score = weights[at / 4u][at % 4u];
                most = max(most, select(low, score, position >= start && position < end));
            }
            most = most_of_four(most);
            if (weigher % 4u == 0u) {
                let at = head * FOUND + weigher / 4u;
                maxima[at / 4u][at % 4u] = most;
            }
        }
        workgroupBarrier();
        for (var head = lane / WEIGHERS; head < TILE; head += THREADS / WEIGHERS) {
            var four = maxima[head * (FOUND / 4u)];
            for (var i = 1u; i < FOUND / 4u; i++) {
                four = max(four, maxima[head * (FOUND / 4u) + i]);
            }
            let most = max(max(four.x, four.y), max(four.z, four.w));
            // Scores that are all -infinity have no weight, rather than none that is a number.
            let origin = select(most, 0.0, bitcast<u32>(most) == p.low);
            var sum = 0.0;
            for (var position = weigher; position < SPLIT; position += WEIGHERS) {
                let at = head * SPLIT + place_of(position);
                var weight = 0.0;
                if (position >= start && position < end) {
                    weight = exponential(weights[at / 4u][at % 4u] - origin);
                    sum += weight;
                    weight *= scale_of(row_at(position));
                }
                weights[at / 4u][at % 4u] = weight;
            }
            sum = sum_of_four(sum);
            if (weigher % 4u == 0u) {
                let at = head * FOUND + weigher / 4u;
                totals[at / 4u][at % 4u] = sum;
            }
        }
        workgroupBarrier();
        if (lane < TILE && first_head + lane < HEADS) {
            var four = maxima[lane * (FOUND / 4u)];
            var sum = totals[lane * (FOUND / 4u)];
            for (var i = 1u; i < FOUND / 4u; i++) {
                four = max(four, maxima[lane * (FOUND / 4u) + i]);
                sum += totals[lane * (FOUND / 4u) + i];
            }
            let most = max(max(four.x, four.y), max(four.z, four.w));
            end_query(unit, lane, first_head + lane, most, (sum.x + sum.y) + (sum.z + sum.w));
        }

        var means = Means();
        if (mixes) {
            for (var run = first; run * SLICES < end; run += VALUES_AHEAD) {
                take_values(&values_ahead, &means, run, start, end, lane);
            }
        }
        // Whoever ends a head needs what its softmax came to.
        workgroupBarrier();
        end_heads(&means, unit, first_head, lane);
        workgroupBarrier();
        hand_out(token, first_head, min(TILE, HEADS - first_head), lane);
    }
}
