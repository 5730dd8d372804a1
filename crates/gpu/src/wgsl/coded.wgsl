// The sums of coded rows times int8 activations, in the definition's order (kernels' `coded_matmul`).
//
// A workgroup has a run of *items*, tiles of 32 rows each, and takes SLOTS of them a round. Four lanes share
// an item; each has four rows and the four 16 below, that is a 16-byte quarter of every line of the tile. It
// loads its whole share before it needs any, multiplies it by each token, and leaves the integers of its
// rows, exact as floats, in shared memory. Then the lanes change roles: sixteen lanes a (block of rows,
// token), two rows each, run down the block's items with one fused multiply-add a group.
//
// What is indexed by a literal, once all is inlined, lives in registers: hence the lists of calls in place of
// loops, `..s` of what is here by the line, token, span or chain, which cut.rs appends.
//
// Needs: those lists; coded_tiles.wgsl, memory_one.wgsl or memory_two.wgsl, coded_job.wgsl; coded_plane.wgsl or coded_own.wgsl, the operand; fn levels, which makes factors of
// codes; fn finish, which takes the sums; fn fma2, const PLAYED; consts THREADS, SLOTS, CHAINS, HELD
// (lanes hold their shares of tiles, as they cannot of the longest), ONE_ROUND (all items have slots at once: nothing is
// loaded for a second round, and a kernel that is shorter is sooner where it is needed).

const ROOM: u32 = select(1u, LINES, HELD == 1u);

var<workgroup> dots: array<vec4<f32>, SLOTS * TOKENS * 8u>;
var<workgroup> scales: array<vec4<u32>, SLOTS * 4u>;
var<workgroup> minima: array<vec4<u32>, select(1u, SLOTS * 4u, AFFINE == 1u)>;
// What scales are multiplied by, and the sum of the activations.
var<workgroup> cells: array<vec2<f32>, SLOTS * TOKENS>;

alias Lines = array<vec4<u32>, ROOM>;
alias Integers = array<vec4<i32>, 2u * TOKENS>;
// Two rows of each of a lane's chains.
alias Sums = array<vec2<f32>, CHAINS>;

fn place(job: ptr<function, Job>, item: u32, quarter: u32) -> u32 {
    return select((*job).at, (*job).split_at, item >= (*job).split) + item * TILE + quarter;
}

fn load_line(lines: ptr<function, Lines>, at: u32, i: u32) {
    (*lines)[i] = word(at + 4u * i);
}

fn load(job: ptr<function, Job>, lines: ptr<function, Lines>, slot: u32, item: u32, quarter: u32) {
    if (HELD == 1u && slot < SLOTS && item < (*job).items) {
        let at = place(job, item, quarter);
        load_lines(lines, at);
    }
}

fn line(lines: ptr<function, Lines>, at: u32, i: u32) -> vec4<u32> {
    var out: vec4<u32>;
    if (HELD == 1u) {
        out = (*lines)[i];
    } else {
        out = word(at + 4u * i);
    }
    return out;
}

// What is multiplied of four columns, unit `unit`, of four rows; of those 16 below if `half` is 1.
fn codes(lines: ptr<function, Lines>, at: u32, unit: u32, half: u32) -> vec4<u32> {
    var high: vec4<u32>;
    if (HIGH > 0u) {
        high = line(lines, at, high_line(unit));
    }
    return levels(codes_of(line(lines, at, low_line(unit, half)), high, unit, half));
}

// Sixteen columns of eight rows.
struct Span {
    low: array<vec4<u32>, 4>,
    high: array<vec4<u32>, 4>,
}

fn add_span(
    job: ptr<function, Job>,
    sums: ptr<function, Integers>,
    span: ptr<function, Span>,
    token: u32,
    tile: u32,
    v: u32,
) {
    let x = x_codes_of(job, token, tile, v);
    (*sums)[2u * token] += dot4((*span).low[0], x.x) + dot4((*span).low[1], x.y)
        + dot4((*span).low[2], x.z) + dot4((*span).low[3], x.w);
    (*sums)[2u * token + 1u] += dot4((*span).high[0], x.x) + dot4((*span).high[1], x.y)
        + dot4((*span).high[2], x.z) + dot4((*span).high[3], x.w);
}

fn take_span(
    job: ptr<function, Job>,
    lines: ptr<function, Lines>,
    sums: ptr<function, Integers>,
    at: u32,
    tile: u32,
    v: u32,
) {
    var span: Span;
    if (LOW == 4u && HIGH == 0u && TABLE == 1u) {
        // A table's levels are made for both halves at once.
        let a = level_pairs(line(lines, at, 4u * v));
        let b = level_pairs(line(lines, at, 4u * v + 1u));
        let c = level_pairs(line(lines, at, 4u * v + 2u));
        let d = level_pairs(line(lines, at, 4u * v + 3u));
        span.low = array<vec4<u32>, 4>(a.low, b.low, c.low, d.low);
        span.high = array<vec4<u32>, 4>(a.high, b.high, c.high, d.high);
        add_tokens(job, sums, &span, tile, v);
        return;
    }
    span.low[0] = codes(lines, at, 4u * v, 0u);
    span.high[0] = codes(lines, at, 4u * v, 1u);
    span.low[1] = codes(lines, at, 4u * v + 1u, 0u);
    span.high[1] = codes(lines, at, 4u * v + 1u, 1u);
    span.low[2] = codes(lines, at, 4u * v + 2u, 0u);
    span.high[2] = codes(lines, at, 4u * v + 2u, 1u);
    span.low[3] = codes(lines, at, 4u * v + 3u, 0u);
    span.high[3] = codes(lines, at, 4u * v + 3u, 1u);
    add_tokens(job, sums, &span, tile, v);
}

// Hands the integers of a token over.
fn hand(
    job: ptr<function, Job>,
    sums: ptr<function, Integers>,
    slot: u32,
    quarter: u32,
    tile: u32,
    token: u32,
) {
    let cell = x_cell_of(job, token, tile);
    let sum = bitcast<i32>(cell.y);
    let times = times_of();
    let shift = shift_of(sum);
    let low = times * (*sums)[2u * token] + vec4(shift);
    let high = times * (*sums)[2u * token + 1u] + vec4(shift);
    let i = slot * TOKENS + token;
    dots[8u * i + quarter] = vec4<f32>(low);
    dots[8u * i + 4u + quarter] = vec4<f32>(high);
    if (quarter == (token & 3u)) {
        cells[i] = vec2(factor_of(cell), f32(sum));
    }
}

fn multiply(
    job: ptr<function, Job>,
    lines: ptr<function, Lines>,
    slot: u32,
    item: u32,
    quarter: u32,
) {
    let at = place(job, item, quarter);
    let tile = item % (*job).tiles;
    var sums = Integers();
    take_spans(job, lines, &sums, at, tile);
    scales[4u * slot + quarter] = line(lines, at, LOW_LINES + HIGH_LINES);
    if (AFFINE == 1u) {
        minima[4u * slot + quarter] = line(lines, at, LOW_LINES + HIGH_LINES + 1u);
    }
    hand_tokens(job, &sums, slot, quarter, tile);
}

// A group's part of two rows.
struct Term {
    dot: vec2<f32>,
    factor: vec2<f32>,
    sum: vec2<f32>,
    least: vec2<f32>,
}

fn term(slot: u32, token: u32, pair: u32) -> Term {
    let i = slot * TOKENS + token;
    let four = dots[8u * i + (pair >> 1u)];
    let cell = cells[i];
    var out: Term;
    out.dot = select(four.xy, four.zw, (pair & 1u) == 1u);
    out.factor = unpack2x16float(scales[4u * slot + (pair >> 2u)][pair & 3u]) * cell.x;
    if (AFFINE == 1u) {
        out.sum = vec2(cell.y);
        out.least = unpack2x16float(minima[4u * slot + (pair >> 2u)][pair & 3u]) * cell.x;
    }
    return out;
}

fn add_term(acc: vec2<f32>, term: Term) -> vec2<f32> {
    var sum = fma2(term.dot, term.factor, acc);
    if (AFFINE == 1u) {
        sum = fma2(term.sum, term.least, sum);
    }
    return sum;
}

fn chain_of(lane: u32, k: u32) -> Chain {
    let c = k * THREADS + lane;
    return Chain(c / (16u * TOKENS), (c / 16u) % TOKENS, c % 16u);
}

// Runs a chain over the items `first .. first + SLOTS`.
fn run_chain(job: ptr<function, Job>, sums: ptr<function, Sums>, lane: u32, first: u32, k: u32) {
    let chain = chain_of(lane, k);
    let start = chain.block * (*job).tiles;
    let to = min(start + (*job).tiles, min(first + SLOTS, (*job).items));
    let end = select(0u, to, chain.token < (*job).count);
    var item = max(start, first);
    var acc = (*sums)[k];
    // Four loads in flight, then the chain; not where a multiply-add is forty lines to compile.
    for (; !PLAYED && item + 4u <= end; item += 4u) {
        let a = term(item - first, chain.token, chain.pair);
        let b = term(item - first + 1u, chain.token, chain.pair);
        let c = term(item - first + 2u, chain.token, chain.pair);
        let d = term(item - first + 3u, chain.token, chain.pair);
        acc = add_term(add_term(add_term(add_term(acc, a), b), c), d);
    }
    for (; item < end; item++) {
        acc = add_term(acc, term(item - first, chain.token, chain.pair));
    }
    (*sums)[k] = acc;
}

// Hands a chain's sums to `finish(job, chain, sums of rows 2 * pair and 2 * pair + 1)`.
fn finish_chain(job: ptr<function, Job>, sums: ptr<function, Sums>, lane: u32, k: u32) {
    let chain = chain_of(lane, k);
    if (chain.token < (*job).count && chain.block * (*job).tiles < (*job).items) {
        finish(job, chain, (*sums)[k]);
    }
}

fn load_items(job: ptr<function, Job>, lines: ptr<function, Lines>, first: u32, lane: u32) {
    let slot = lane >> 2u;
    load(job, lines, slot, first + slot, lane & 3u);
}

// The workgroup's sums, each handed to `finish`. By then nobody reads shared memory any more.
fn products(job: ptr<function, Job>, lane: u32) {
    var lines: Lines;
    var sums = Sums();
    let slot = lane >> 2u;
    load_items(job, &lines, 0u, lane);
    prepare(job, lane);
    for (var first = 0u; first < (*job).items; first += SLOTS) {
        if (slot < SLOTS && first + slot < (*job).items) {
            multiply(job, &lines, slot, first + slot, lane & 3u);
        }
        if (ONE_ROUND == 0u) {
            // On their way while the chains run.
            load_items(job, &lines, first + SLOTS, lane);
        }
        workgroupBarrier();
        run_chains(job, &sums, lane, first);
        workgroupBarrier();
        if (ONE_ROUND == 1u) {
            break;
        }
    }
    finish_chains(job, &sums, lane);
}
