// The sums of float rows times f32 tokens.
//
// LANES lanes share ROWS rows, one or four. Lane l takes the columns `8 * (l + LANES * i) ..+ 8` in ascending order, one
// fused multiply-add each; then neighbouring lanes join in fours by a fixed tree, and one lane adds the fours
// up in ascending order. So the order depends on the shape alone.
//
// Lists of calls by token stand in place of loops, as in coded.wgsl; float.rs appends them.
//
// Needs: float_wide.wgsl or float_odd.wgsl and an operand; fn finish, which takes the sums; consts TOKENS, THREADS, LANES,
// ROWS, FIRST (1 if the first weights of each lane are loaded beforehand).

const TEAMS: u32 = THREADS / LANES;
const FOURS: u32 = LANES / 4u;

var<workgroup> fours: array<f32, THREADS / 4u * ROWS * TOKENS>;

struct Job {
    // Where the matrix begins, in units of `matrix`.
    at: u32,
    rows: u32,
    cols: u32,
    // Columns to go through: all, or none.
    used: u32,
    // This workgroup's first row.
    first: u32,
    count: u32,
    tokens: array<u32, 8>,
}

struct Eight {
    a: vec4<f32>,
    b: vec4<f32>,
}

// Of a lane's rows.
alias Weights = array<Eight, ROWS>;
// By token, four rows.
alias Sums = array<vec4<f32>, TOKENS>;

fn dot8(w: Eight, x: Eight, acc: f32) -> f32 {
    let a = fma(w.a.w, x.a.w, fma(w.a.z, x.a.z, fma(w.a.y, x.a.y, fma(w.a.x, x.a.x, acc))));
    return fma(w.b.w, x.b.w, fma(w.b.z, x.b.z, fma(w.b.y, x.b.y, fma(w.b.x, x.b.x, a))));
}

fn add_token(
    job: ptr<function, Job>,
    sums: ptr<function, Sums>,
    w: ptr<function, Weights>,
    eight: u32,
    token: u32,
) {
    let x = x_eight((*job).tokens[token], (*job).cols, eight);
    (*sums)[token].x = dot8((*w)[0], x, (*sums)[token].x);
    if (ROWS == 4u) {
        (*sums)[token].y = dot8((*w)[1 % ROWS], x, (*sums)[token].y);
        (*sums)[token].z = dot8((*w)[2 % ROWS], x, (*sums)[token].z);
        (*sums)[token].w = dot8((*w)[3 % ROWS], x, (*sums)[token].w);
    }
}

fn join(sum: f32, lane: u32, row: u32, token: u32) {
    let two = sum + subgroupShuffleXor(sum, 1u);
    let four = two + subgroupShuffleXor(two, 2u);
    if ((lane & 3u) == 0u) {
        fours[(row * TOKENS + token) * (THREADS / 4u) + (lane >> 2u)] = four;
    }
}

fn join_token(sums: ptr<function, Sums>, lane: u32, token: u32) {
    join((*sums)[token].x, lane, 0u, token);
    if (ROWS == 4u) {
        join((*sums)[token].y, lane, 1u, token);
        join((*sums)[token].z, lane, 2u, token);
        join((*sums)[token].w, lane, 3u, token);
    }
}

// Rows past the end repeat the last one; `finish` is not called for them.
fn row_of(job: ptr<function, Job>, team: u32, i: u32) -> u32 {
    return min((*job).first + team * ROWS + i, (*job).rows - 1u);
}

/// A lane's weights of eight columns.
fn take_weights(job: ptr<function, Job>, lane: u32, eight: u32) -> Weights {
    let team = lane / LANES;
    var w: Weights;
    w[0] = weights_eight((*job).at, row_of(job, team, 0u), (*job).cols, eight);
    if (ROWS == 4u) {
        w[1 % ROWS] = weights_eight((*job).at, row_of(job, team, 1u), (*job).cols, eight);
        w[2 % ROWS] = weights_eight((*job).at, row_of(job, team, 2u), (*job).cols, eight);
        w[3 % ROWS] = weights_eight((*job).at, row_of(job, team, 3u), (*job).cols, eight);
    }
    return w;
}

/// Those that it needs first, where they are to be on their way early.
fn first_weights(job: ptr<function, Job>, lane: u32) -> Weights {
    var w: Weights;
    if (FIRST == 1u && 8u * (lane % LANES) < (*job).used) {
        w = take_weights(job, lane, lane % LANES);
    }
    return w;
}

// The workgroup's sums, each handed to `finish(job, row, token, sum)`.
fn products(job: ptr<function, Job>, first: ptr<function, Weights>, lane: u32) {
    let eights = ((*job).used + 7u) / 8u;
    var sums = Sums();
    for (var eight = lane % LANES; eight < eights; eight += LANES) {
        var w: Weights;
        if (FIRST == 1u && eight < LANES) {
            w = *first;
        } else {
            w = take_weights(job, lane, eight);
        }
        add_tokens(job, &sums, &w, eight);
    }
    join_tokens(&sums, lane);
    workgroupBarrier();
    for (var i = lane; i < TEAMS * ROWS * TOKENS; i += THREADS) {
        let token = i / (TEAMS * ROWS);
        let place = i % (TEAMS * ROWS);
        let row = (*job).first + place;
        let start = ((place % ROWS) * TOKENS + token) * (THREADS / 4u) + place / ROWS * FOURS;
        // Eight on their way before the first is added.
        var sum = 0.0;
        for (var j = 0u; j < FOURS; j += 8u) {
            var eight: array<f32, 8>;
            for (var i = 0u; i < 8u; i++) {
                eight[i] = fours[start + j + i];
            }
            for (var i = 0u; i < 8u; i++) {
                sum = select(sum + eight[i], eight[i], j + i == 0u);
            }
        }
        if (row < (*job).rows && token < (*job).count) {
            finish(job, row, token, sum);
        }
    }
}
