// Attention of heads that share a latent, over one split of positions. Workgroups: (split, TILE heads, token).
//
// Needs: norm_float.wgsl, attention_*.wgsl, const HEADS, TILE (heads of a workgroup), PART (vectors of four that are staged at once), KEY_DIM,
// VALUE_DIM (the first elements of a key), COLUMNS (lanes side by side over a value), ROW (16-byte words of a cache row), NARROW (of
// four values in 16 bytes), alias Narrow (these four); the buffers keys (vec4<u32>) and values (four elements each) of the same
// cache, rows (vec4<u32>), tables (u32), queries (vec4<f32>), sums (vec4<f32>), stats (vec2<f32>); the lists add_pairs, add_weights and
// leave_heads of calls, as in coded.wgsl, which latent.rs appends.
//
// What it takes is arithmetic: a row of the cache is read once for TILE heads, each of which multiplies all of it. So
// both products are those of small matrices, with as many sums in registers as there is room for:
//
//     scores    keys and queries go through shared memory, PART vectors at a time, those that come being on their way. Half of the
//               lanes take one half of a part's vectors, half the other; a lane has SHARE heads at EACH positions
//     weights   a lane for four heads at every 32nd position
//     sums      a lane for four columns and every SLICES-th position, for all heads; slices are added last
//
// Splits begin at multiples of SPLIT, whatever the token sees, and every sum has an order of its own, which TILE does
// not change: so what a token gets depends neither on its neighbours nor on how many there are.
// attention_combine.wgsl joins the splits.

struct Params { first: u32, splits: u32, scale: f32, low: u32, nothing: u32 }
var<immediate> p: Params;

const SPLIT: u32 = 128u;
const BLOCK: u32 = 32u;
const THREADS: u32 = 128u;
// Heads of a lane.
const SHARE: u32 = 8u;
const SHARES: u32 = TILE / SHARE;
// Lanes side by side over positions, and positions of each.
const PLACES: u32 = THREADS / (2u * SHARES);
const EACH: u32 = SPLIT / PLACES;
// Vectors of four heads.
const VECTORS: u32 = TILE / 4u;
// Lanes that have weights of a vector.
const WEIGHERS: u32 = 32u;
const QUERY_WORDS: u32 = KEY_DIM / 4u;
const STEPS: u32 = (QUERY_WORDS + PART - 1u) / PART;
// Pieces of sixteen bytes of a position's part; a lane loads as many.
const PIECES: u32 = PART / PARTS;
// Vectors from one of a part to the next: no two lanes of a row's pieces meet in a bank.
const COLUMN: u32 = SPLIT + 1u;
const VALUE_WORDS: u32 = VALUE_DIM / 4u;
const SLICES: u32 = THREADS / COLUMNS;
// Rows of values that a lane reads before it adds them up.
const AT_ONCE: u32 = 8u;

alias KeysAhead = array<vec4<u32>, PIECES>;
// A vector of each of a lane's positions; its sums by head and position; and by head, of its columns.
alias Keys = array<vec4<f32>, EACH>;
alias Dots = array<f32, SHARE * EACH>;
alias Means = array<vec4<f32>, TILE>;

// Keys, [PART, COLUMN]; then scores and weights, [SPLIT, VECTORS]; in the end what slices have summed up.
var<workgroup> stage: array<vec4<f32>, PART * COLUMN>;
// Queries, [PART, TILE]; then the largest scores, [WEIGHERS, VECTORS].
var<workgroup> query_stage: array<vec4<f32>, 8u * TILE>;
var<workgroup> totals: array<vec4<f32>, WEIGHERS * VECTORS>;
var<workgroup> blocks: array<u32, SPLIT / BLOCK>;

/// First 16 bytes of the row of a position of the split.
fn row_at(position: u32) -> u32 {
    return (blocks[position / BLOCK] * BLOCK + position % BLOCK) * ROW;
}

fn load_keys(ahead: ptr<function, KeysAhead>, step: u32, start: u32, end: u32, lane: u32) {
    for (var i = 0u; i < PIECES; i++) {
        let item = i * THREADS + lane;
        let at = row_at(clamp(item / PIECES, start, end - 1u));
        // Pieces past the end are not looked at.
        (*ahead)[i] = keys[at + min(step * PIECES + item % PIECES, ROW - 1u)];
    }
}

fn stage_keys(ahead: ptr<function, KeysAhead>, step: u32, lane: u32) {
    for (var i = 0u; i < PIECES; i++) {
        let item = i * THREADS + lane;
        let wide = widen_key((*ahead)[i]);
        for (var j = 0u; j < PARTS; j++) {
            let word = (item % PIECES) * PARTS + j;
            stage[word * COLUMN + item / PIECES] = select(vec4(0.0), wide[j], step * PART + word < QUERY_WORDS);
        }
    }
}

fn query_of(token: u32, head: u32, word: u32) -> vec4<f32> {
    // Heads that are not there repeat the last one.
    let at = (token * HEADS + min(head, HEADS - 1u)) * QUERY_WORDS + min(word, QUERY_WORDS - 1u);
    return select(vec4(0.0), queries[at], word < QUERY_WORDS);
}

/// Adds a vector's part to the sum of a pair of head and position; `at` is the vector's of the lane's first head.
fn add_pair(key: ptr<function, Keys>, dots: ptr<function, Dots>, at: u32, pair: u32) {
    let k = (*key)[pair % EACH];
    let y = query_stage[at + pair / EACH];
    (*dots)[pair] = fma(k.w, y.w, fma(k.z, y.z, fma(k.y, y.y, fma(k.x, y.x, (*dots)[pair]))));
}

/// Adds a position's columns, by the weights of four heads.
fn add_weight(means: ptr<function, Means>, position: u32, x: vec4<f32>, v: u32) {
    let w = stage[position * VECTORS + v];
    (*means)[4u * v] = fma(vec4(w.x), x, (*means)[4u * v]);
    (*means)[4u * v + 1u] = fma(vec4(w.y), x, (*means)[4u * v + 1u]);
    (*means)[4u * v + 2u] = fma(vec4(w.z), x, (*means)[4u * v + 2u]);
    (*means)[4u * v + 3u] = fma(vec4(w.w), x, (*means)[4u * v + 3u]);
}

/// Leaves a head's columns: they are whole, or there are other lanes' to be added.
fn leave_head(means: ptr<function, Means>, unit: u32, first_head: u32, lane: u32, q: u32) {
    let column = lane % COLUMNS;
    if (SLICES == 1u) {
        if (column < VALUE_WORDS && first_head + q < HEADS) {
            sums[(unit * HEADS + first_head + q) * VALUE_WORDS + column] = (*means)[q];
        }
        return;
    }
    workgroupBarrier();
    stage[lane] = (*means)[q];
    workgroupBarrier();
    if (lane < VALUE_WORDS && first_head + q < HEADS) {
        var sum = vec4(0.0);
        for (var s = 0u; s < SLICES; s++) {
            sum += stage[s * COLUMNS + lane];
        }
        sums[(unit * HEADS + first_head + q) * VALUE_WORDS + lane] = sum;
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let token = p.first + wg.z;
    let first_head = wg.y * TILE;
    let unit = wg.z * p.splits + wg.x;
    let row = rows[token];
    let base = (row.z / SPLIT + wg.x) * SPLIT;
    // Positions of the split that are seen.
    let start = max(row.z, base) - base;
    let end = clamp(row.x + 1u, base, base + SPLIT) - base;
    if (end > start) {
        if (lane < SPLIT / BLOCK && lane * BLOCK < end) {
            blocks[lane] = tables[row.y + base / BLOCK + lane];
        }
        workgroupBarrier();

        let half = lane / (THREADS / 2u);
        let share = (lane / PLACES) % SHARES;
        let place = lane % PLACES;
        var keys_ahead: KeysAhead;
        load_keys(&keys_ahead, 0u, start, end, lane);
        var query_ahead = query_of(token, first_head + lane / PART, lane % PART);
        var dots = Dots();
        for (var step = 0u; step < STEPS; step++) {
            stage_keys(&keys_ahead, step, lane);
            if (lane < PART * TILE) {
                query_stage[(lane % PART) * TILE + lane / PART] = query_ahead;
            }
            workgroupBarrier();
            if (step + 1u < STEPS) {
                load_keys(&keys_ahead, step + 1u, start, end, lane);
                query_ahead = query_of(token, first_head + lane / PART, (step + 1u) * PART + lane % PART);
            }
            for (var i = 0u; i < PART / 2u; i++) {
                let word = half * (PART / 2u) + i;
                var key: Keys;
                for (var j = 0u; j < EACH; j++) {
                    key[j] = stage[word * COLUMN + place + j * PLACES];
                }
                add_pairs(&key, &dots, word * TILE + share * SHARE);
            }
            workgroupBarrier();
        }

        // The halves' sums meet.
        if (half == 1u) {
            for (var j = 0u; j < EACH; j++) {
                for (var v = 0u; v < SHARE / 4u; v++) {
                    stage[(place + j * PLACES) * VECTORS + share * (SHARE / 4u) + v] = vec4(
                        dots[4u * v * EACH + j],
                        dots[(4u * v + 1u) * EACH + j],
                        dots[(4u * v + 2u) * EACH + j],
                        dots[(4u * v + 3u) * EACH + j],
                    );
                }
            }
        }
        workgroupBarrier();
        if (half == 0u) {
            for (var j = 0u; j < EACH; j++) {
                let position = place + j * PLACES;
                let factor = scale_of(row_at(clamp(position, start, end - 1u))) * p.scale;
                for (var v = 0u; v < SHARE / 4u; v++) {
                    let at = position * VECTORS + share * (SHARE / 4u) + v;
                    stage[at] = factor * (stage[at] + vec4(
                        dots[4u * v * EACH + j],
                        dots[(4u * v + 1u) * EACH + j],
                        dots[(4u * v + 2u) * EACH + j],
                        dots[(4u * v + 3u) * EACH + j],
                    ));
                }
            }
        }
        workgroupBarrier();

        let weigher = lane / VECTORS;
        let vector = lane % VECTORS;
        let low = bitcast<f32>(p.low);
        if (weigher < WEIGHERS) {
            var most = vec4(low);
            for (var position = weigher; position < end; position += WEIGHERS) {
                if (position >= start) {
                    most = max(most, stage[position * VECTORS + vector]);
                }
            }
            query_stage[lane] = most;
        }
        workgroupBarrier();
        var most = vec4(low);
        for (var i = 0u; i < WEIGHERS; i++) {
            most = max(most, query_stage[i * VECTORS + vector]);
        }
        if (weigher < WEIGHERS) {
            // Scores that are all -infinity have no weight, rather than none that is a number.
            let origin = select(most, vec4(0.0), bitcast<vec4<u32>>(most) == vec4(p.low));
            var sum = vec4(0.0);
            for (var position = weigher; position < end; position += WEIGHERS) {
                if (position >= start) {
                    let at = position * VECTORS + vector;
                    let score = stage[at] - origin;
                    let weight =
                        vec4(exponential(score.x), exponential(score.y), exponential(score.z), exponential(score.w));
                    sum += weight;
                    stage[at] = weight * scale_of(row_at(position));
                }
            }
            totals[lane] = sum;
        }
        workgroupBarrier();
        if (weigher == 0u) {
            var total = vec4(0.0);
            for (var i = 0u; i < WEIGHERS; i++) {
                total += totals[i * VECTORS + vector];
            }
            for (var k = 0u; k < 4u; k++) {
                let head = first_head + 4u * vector + k;
                if (head < HEADS) {
                    stats[unit * HEADS + head] = vec2(most[k], total[k]);
                }
            }
        }

        let column = lane % COLUMNS;
        let slice = lane / COLUMNS;
        var means = Means();
        if (column < VALUE_WORDS) {
            for (var first = slice; first < end; first += SLICES * AT_ONCE) {
                var ahead: array<Narrow, AT_ONCE>;
                for (var j = 0u; j < AT_ONCE; j++) {
                    ahead[j] = values[row_at(clamp(first + j * SLICES, start, end - 1u)) * NARROW + column];
                }
                for (var j = 0u; j < AT_ONCE; j++) {
                    let position = first + j * SLICES;
                    if (position < start || position >= end) {
                        continue;
                    }
                    add_weights(&means, position, widen_value(ahead[j]));
                }
            }
        }
        leave_heads(&means, unit, first_head, lane);
    }
}
