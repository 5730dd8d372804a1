// The sums of coded rows times int8 activations of many tokens, in the definition's order (kernels' `coded_matmul`): what coded.wgsl
// makes of a few.
//
// A workgroup has ROWS rows and up to TOKENS tokens, and goes along them stage by stage, STAGE groups each. Of a stage it
// leaves in shared memory the rows' codes, unpacked to signed bytes once, and the tokens' activations. Each lane multiplies
// QUADS times four rows by LANE_TOKENS tokens from there, four columns an operation; its integers become floats once a group,
// for the definition's multiply-adds into sums that never leave it. What the next stage needs is on its way from memory meanwhile.
//
// What is indexed by a literal, once all is inlined, lives in registers: hence the lists of calls in place of loops, `..s` of
// what is here by the item or the token, which tiling.rs appends. Token t of a lane is token `t * TOKEN_LANES + lane / ROW_LANES`
// of the workgroup: where there are fewer tokens lanes have fewer, and a way of their own along a stage.
//
// Needs: those lists; fn multiply, of coded_tiled_multiply.wgsl; coded_tiles.wgsl; memory_one.wgsl or memory_two.wgsl; fn levels; fn block_at, where a block of 32 of
// the rows begins, in pieces; fn input_row, the row of the plane that is a token; fn fma4; consts THREADS, ROWS, TOKENS, QUADS,
// LANE_TOKENS, STAGE, BUFFERS (of what is shared: with two a stage costs one barrier), CODE_ITEMS, INPUT_ITEMS, CELL_ITEMS (of a
// lane, in a stage).

@group(0) @binding(1) var<storage, read> x_codes: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> x_cells: array<vec2<u32>>;

// Rows come by four, columns by four: a unit. What is shared of a unit is a piece for each four rows, padded so that lanes that leave
// those of neighbouring units do not meet in a bank.
const FOURS: u32 = ROWS / 4u;
const PITCH: u32 = FOURS + 4u;
const UNITS: u32 = TILE_GROUP / 4u;
const ROW_LANES: u32 = FOURS / QUADS;
const TOKEN_LANES: u32 = TOKENS / LANE_TOKENS;
// Of a stage: pieces of the codes of a block are four a unit, those of its scales four.
const CODES: u32 = FOURS / 2u * UNITS * STAGE;
const SCALES: u32 = FOURS / 2u * STAGE;
const INPUTS: u32 = TOKENS * SPANS * STAGE;
const CELLS: u32 = TOKENS * STAGE;
// Whether the codes of a unit are in two lines.
const SECOND: bool = LOW == 8u || HIGH > 0u;

// 1.5 * 2^23: added to the bits of this, an integer of up to 22 bits and a sign is the same number more, as a float.
const SHIFTER: i32 = 0x4b400000i;
// What integers begin with, if that is the same for all.
const START: i32 = select(SHIFTER, 0i, LOW == 8u);

var<workgroup> codes: array<vec4<u32>, BUFFERS * STAGE * UNITS * PITCH>;
var<workgroup> inputs: array<vec4<u32>, BUFFERS * INPUTS>;
// What scales are multiplied by, and the sum of the activations.
var<workgroup> cells: array<vec2<u32>, BUFFERS * CELLS>;
var<workgroup> scales: array<vec4<f32>, BUFFERS * STAGE * FOURS>;
var<workgroup> minima: array<vec4<f32>, select(1u, BUFFERS * STAGE * FOURS, AFFINE == 1u)>;

struct Job {
    // Groups of a row; tokens.
    tiles: u32,
    count: u32,
}

// Where a lane's items begin.
struct Places {
    codes: array<u32, CODE_ITEMS>,
    inputs: array<u32, INPUT_ITEMS>,
    cells: array<u32, CELL_ITEMS>,
    scales: u32,
}

// What is on its way.
struct Ahead {
    low: array<vec4<u32>, CODE_ITEMS>,
    // The other half's line of 8-bit codes, or the high plane's.
    second: array<vec4<u32>, select(1u, CODE_ITEMS, SECOND)>,
    inputs: array<vec4<u32>, INPUT_ITEMS>,
    cells: array<vec2<u32>, CELL_ITEMS>,
    scales: vec4<u32>,
    minima: vec4<u32>,
}

// By quad, then by token.
alias Integers = array<vec4<i32>, QUADS * LANE_TOKENS>;
alias Sums = array<vec4<f32>, QUADS * LANE_TOKENS>;
// Sixteen columns of a lane's rows.
alias Span = array<vec4<u32>, 4u * QUADS>;

// Lanes past the last item repeat it, and leave the same in the same place.
fn code_item(lane: u32, k: u32) -> u32 {
    return min(k * THREADS + lane, CODES - 1u);
}

fn input_item(lane: u32, k: u32) -> u32 {
    return min(k * THREADS + lane, INPUTS - 1u);
}

fn cell_item(lane: u32, k: u32) -> u32 {
    return min(k * THREADS + lane, CELLS - 1u);
}

fn scale_item(lane: u32) -> u32 {
    return min(lane, SCALES - 1u);
}

fn place_code(job: ptr<function, Job>, places: ptr<function, Places>, lane: u32, k: u32) {
    let item = code_item(lane, k);
    (*places).codes[k] = block_at(item / (4u * UNITS * STAGE)) + item % 4u;
}

fn place_input(job: ptr<function, Job>, places: ptr<function, Places>, lane: u32, k: u32) {
    let row = input_row(input_item(lane, k) / (SPANS * STAGE));
    (*places).inputs[k] = row * (*job).tiles * SPANS;
}

fn place_cell(job: ptr<function, Job>, places: ptr<function, Places>, lane: u32, k: u32) {
    let row = input_row(cell_item(lane, k) / STAGE);
    (*places).cells[k] = row * (*job).tiles;
}

// Loads of the stage that begins with group `first`; of groups past `last`, the last.

fn load_code(ahead: ptr<function, Ahead>, places: ptr<function, Places>, first: u32, last: u32, lane: u32, k: u32) {
    let item = code_item(lane, k);
    let unit = item / 4u % UNITS;
    let at = (*places).codes[k] + min(first + item / (4u * UNITS) % STAGE, last) * TILE;
    (*ahead).low[k] = word(at + 4u * low_line(unit, 0u));
    if (LOW == 8u) {
        (*ahead).second[k] = word(at + 4u * low_line(unit, 1u));
    }
    if (HIGH > 0u) {
        (*ahead).second[k] = word(at + 4u * high_line(unit));
    }
}

fn load_input(ahead: ptr<function, Ahead>, places: ptr<function, Places>, first: u32, last: u32, lane: u32, k: u32) {
    let span = first * SPANS + input_item(lane, k) % (SPANS * STAGE);
    (*ahead).inputs[k] = x_codes[(*places).inputs[k] + min(span, last * SPANS + SPANS - 1u)];
}

fn load_cell(ahead: ptr<function, Ahead>, places: ptr<function, Places>, first: u32, last: u32, lane: u32, k: u32) {
    (*ahead).cells[k] = x_cells[(*places).cells[k] + min(first + cell_item(lane, k) % STAGE, last)];
}

fn load(job: ptr<function, Job>, ahead: ptr<function, Ahead>, places: ptr<function, Places>, first: u32, lane: u32) {
    let last = (*job).tiles - 1u;
    load_codes(ahead, places, first, last, lane);
    load_inputs(ahead, places, first, last, lane);
    load_cells(ahead, places, first, last, lane);
    let at = (*places).scales + min(first + scale_item(lane) / 4u % STAGE, last) * TILE;
    (*ahead).scales = word(at);
    if (AFFINE == 1u) {
        (*ahead).minima = word(at + 4u);
    }
}

// Signed bytes whose products make the definition's integers, of what `codes_of` and `levels` make; for 8-bit codes `float_of` has the
// rest to do. A byte that is to become `twice * byte - less` takes nothing from its neighbours as long as it counts from -128.
fn signed(bytes: vec4<u32>) -> vec4<u32> {
    if (TABLE == 1u && LEAST > 0u) {
        return (bytes + vec4((128u - LEAST) * 0x01010101u)) ^ vec4(0x80808080u);
    }
    if (TABLE == 0u && AFFINE == 0u && LOW < 8u) {
        return ((bytes << vec4(1u)) + vec4((129u - (1u << (LOW + HIGH))) * 0x01010101u)) ^ vec4(0x80808080u);
    }
    return bytes;
}

fn store_code(ahead: ptr<function, Ahead>, buffer: u32, lane: u32, k: u32) {
    let item = code_item(lane, k);
    let unit = item / 4u % UNITS;
    let group = buffer * STAGE + item / (4u * UNITS) % STAGE;
    let at = (group * UNITS + unit) * PITCH + 8u * (item / (4u * UNITS * STAGE)) + item % 4u;
    let low = (*ahead).low[k];
    var upper: vec4<u32>;
    var lower: vec4<u32>;
    if (LOW == 4u && HIGH == 0u) {
        let pair = level_pairs(low);
        upper = pair.low;
        lower = pair.high;
    } else if (SECOND) {
        let second = (*ahead).second[k];
        upper = levels(codes_of(low, second, unit, 0u));
        lower = levels(codes_of(select(low, second, LOW == 8u), second, unit, 1u));
    } else {
        upper = levels(codes_of(low, low, unit, 0u));
        lower = levels(codes_of(low, low, unit, 1u));
    }
    codes[at] = signed(upper);
    codes[at + 4u] = signed(lower);
}

fn store_input(ahead: ptr<function, Ahead>, buffer: u32, lane: u32, k: u32) {
    inputs[buffer * INPUTS + input_item(lane, k)] = (*ahead).inputs[k];
}

fn store_cell(ahead: ptr<function, Ahead>, buffer: u32, lane: u32, k: u32) {
    let cell = (*ahead).cells[k];
    cells[buffer * CELLS + cell_item(lane, k)] = vec2(bitcast<u32>(factor_of(cell)), cell.y);
}

fn halves(words: vec2<u32>) -> vec4<f32> {
    return vec4(unpack2x16float(words.x), unpack2x16float(words.y));
}

fn store(ahead: ptr<function, Ahead>, buffer: u32, lane: u32) {
    store_codes(ahead, buffer, lane);
    store_inputs(ahead, buffer, lane);
    store_cells(ahead, buffer, lane);
    let item = scale_item(lane);
    let at = (buffer * STAGE + item / 4u % STAGE) * FOURS + 8u * (item / (4u * STAGE)) + 2u * (item % 4u);
    scales[at] = halves((*ahead).scales.xy);
    scales[at + 1u] = halves((*ahead).scales.zw);
    if (AFFINE == 1u) {
        minima[at] = halves((*ahead).minima.xy);
        minima[at + 1u] = halves((*ahead).minima.zw);
    }
}

fn begin_token(integers: ptr<function, Integers>, t: u32) {
    (*integers)[t] = vec4(START);
    if (QUADS > 1u) {
        (*integers)[(QUADS - 1u) * LANE_TOKENS + t] = vec4(START);
    }
}

// Sixteen columns of a token; `at` is where those of the lane's first are.
fn multiply_token(integers: ptr<function, Integers>, span: ptr<function, Span>, at: u32, t: u32) {
    let x = inputs[at + t * (TOKEN_LANES * SPANS * STAGE)];
    var first = (*integers)[t];
    first += dot4((*span)[0], x.x);
    first += dot4((*span)[1], x.y);
    first += dot4((*span)[2], x.z);
    first += dot4((*span)[3], x.w);
    (*integers)[t] = first;
    if (QUADS > 1u) {
        var second = (*integers)[(QUADS - 1u) * LANE_TOKENS + t];
        second += dot4((*span)[4u * QUADS - 4u], x.x);
        second += dot4((*span)[4u * QUADS - 3u], x.y);
        second += dot4((*span)[4u * QUADS - 2u], x.z);
        second += dot4((*span)[4u * QUADS - 1u], x.w);
        (*integers)[(QUADS - 1u) * LANE_TOKENS + t] = second;
    }
}

// A group's integers as floats.
fn float_of(integers: vec4<i32>, sum: i32) -> vec4<f32> {
    var shifted = integers;
    if (LOW == 8u) {
        shifted = times_of() * shifted + vec4(shift_of(sum) + SHIFTER);
    }
    return bitcast<vec4<f32>>(shifted) - vec4(12582912.0);
}

// What a lane's rows have in a group.
struct Group {
    scales: array<vec4<f32>, QUADS>,
    minima: array<vec4<f32>, QUADS>,
}

fn add(acc: vec4<f32>, integers: vec4<i32>, cell: vec2<u32>, scale: vec4<f32>, least: vec4<f32>) -> vec4<f32> {
    let factor = bitcast<f32>(cell.x);
    let sum = bitcast<i32>(cell.y);
    var out = fma4(float_of(integers, sum), scale * factor, acc);
    if (AFFINE == 1u) {
        out = fma4(vec4(f32(sum)), least * factor, out);
    }
    return out;
}

// Ends a group of a token; `at` is where its cell is.
fn add_token(integers: ptr<function, Integers>, sums: ptr<function, Sums>, group: ptr<function, Group>, at: u32, t: u32) {
    let cell = cells[at + t * (TOKEN_LANES * STAGE)];
    (*sums)[t] = add((*sums)[t], (*integers)[t], cell, (*group).scales[0], (*group).minima[0]);
    if (QUADS > 1u) {
        let second = (QUADS - 1u) * LANE_TOKENS + t;
        (*sums)[second] =
            add((*sums)[second], (*integers)[second], cell, (*group).scales[QUADS - 1u], (*group).minima[QUADS - 1u]);
    }
    begin_token(integers, t);
}

// The lane's sums; other lanes may still read what is shared. None if there are no tokens.
fn products(job: ptr<function, Job>, sums: ptr<function, Sums>, lane: u32) {
    let tiles = select(0u, (*job).tiles, (*job).count > 0u);
    var places: Places;
    var ahead: Ahead;
    var integers: Integers;
    begin_tokens(&integers);
    if (tiles > 0u) {
        place_codes(job, &places, lane);
        place_inputs(job, &places, lane);
        place_cells(job, &places, lane);
        let item = scale_item(lane);
        places.scales = block_at(item / (4u * STAGE)) + 4u * (LOW_LINES + HIGH_LINES) + item % 4u;
        load(job, &ahead, &places, 0u, lane);
    }
    var buffer = 0u;
    for (var first = 0u; first < tiles; first += STAGE) {
        store(&ahead, buffer, lane);
        workgroupBarrier();
        if (first + STAGE < tiles) {
            load(job, &ahead, &places, first + STAGE, lane);
        }
        multiply(job, &integers, sums, buffer, min(STAGE, tiles - first), lane);
        if (BUFFERS > 1u) {
            buffer = 1u - buffer;
        } else {
            workgroupBarrier();
        }
    }
}
