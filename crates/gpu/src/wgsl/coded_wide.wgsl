// The same sums as coded.wgsl's, to the bit, of one token and symmetric codes of 4 or 8 bits in groups of 64: 32 lanes share a tile. They read its pieces side by side, TILES_AHEAD tiles on their way before the first is needed; four lanes a tile
// would hold too much each for as many to be at work. A lane has four columns of eight rows at once (of four, if codes
// are bytes); exchanges with lanes that have other columns of the same rows leave it one row's integer. Then sixteen
// lanes run down the groups of a block, two rows each, with one fused multiply-add a group.
//
// Needs: coded_tiles.wgsl; memory_one.wgsl or memory_two.wgsl, and their parts; coded_plane.wgsl or coded_own.wgsl, the operand; coded_wide_exchange.wgsl or
// coded_wide_played.wgsl; fn finish, which takes the sums; fn fma2, const PLAYED; the lists load_tiles and take_tiles of what is here by
// the tile, which cut.rs appends; consts THREADS, TILES_AHEAD, ROW_TILES (of a block of rows), ONE_ROUND.

const LANES: u32 = 32u;
const TEAMS: u32 = THREADS / LANES;
// Pieces of codes that a lane has of a tile.
const PIECES: u32 = LOW * TILE_GROUP / 128u;

var<workgroup> terms: array<vec2<f32>, ROW_TILES * 32u>;

struct Window {
    pieces: array<vec4<u32>, TILES_AHEAD * PIECES>,
    // Activations of the lane's columns; scale and sum of the group.
    x: array<vec4<u32>, TILES_AHEAD>,
    cells: array<vec2<u32>, TILES_AHEAD>,
    // Two rows' scales, one of which is the lane's.
    scales: array<u32, TILES_AHEAD>,
}

// The row of a block that a lane ends with.
fn row_of(lane: u32) -> u32 {
    if (LOW == 8u) {
        return 16u * ((lane >> 2u) & 1u) + 4u * (lane & 3u) + 2u * (lane >> 4u) + ((lane >> 3u) & 1u);
    }
    return 16u * (lane >> 4u) + 4u * (lane & 3u) + ((lane >> 2u) & 3u);
}

fn load_x(job: ptr<function, Job>, window: ptr<function, Window>, tile: u32, lane: u32, i: u32) {
    if (LOW == 8u) {
        (*window).x[i] = x_codes_of(job, 0u, tile, lane >> 3u);
    } else {
        (*window).x[i].x = x_word_of(job, tile, lane >> 2u);
        (*window).x[i].y = x_word_of(job, tile, 8u + (lane >> 2u));
    }
    (*window).cells[i] = x_cell_of(job, 0u, tile);
}

fn load_tile(job: ptr<function, Job>, window: ptr<function, Window>, first: u32, lane: u32, i: u32) {
    let tile = first + i * TEAMS;
    if (tile < (*job).items) {
        let at = (*job).at + tile * TILE;
        if (LOW == 8u) {
            // Units 4 * (lane / 8) and the three after them: the four words of one piece of activations.
            let start = at + 32u * (lane >> 3u) + (lane & 7u);
            (*window).pieces[PIECES * i] = word(start);
            (*window).pieces[PIECES * i + 1u] = word(start + 8u);
            (*window).pieces[PIECES * i + 2u] = word(start + 16u);
            (*window).pieces[PIECES * i + 3u] = word(start + 24u);
        } else {
            (*window).pieces[PIECES * i] = word(at + lane);
            (*window).pieces[PIECES * i + 1u] = word(at + lane + 32u);
        }
        let row = row_of(lane);
        (*window).scales[i] = part(at + 4u * LOW_LINES + (row >> 3u), (row >> 1u) & 3u);
        if (X_AHEAD) {
            load_x(job, window, tile, lane, i);
        }
    }
}

// The sum of code * x of the lane's row; of 8-bit codes less 128.
fn dot_tile(window: ptr<function, Window>, lane: u32, i: u32) -> i32 {
    let upper = (lane & 16u) != 0u;
    let second = (lane & 8u) != 0u;
    let x = (*window).x[i];
    if (LOW == 8u) {
        let v = dot4((*window).pieces[PIECES * i] ^ vec4(0x80808080u), x.x)
            + dot4((*window).pieces[PIECES * i + 1u] ^ vec4(0x80808080u), x.y)
            + dot4((*window).pieces[PIECES * i + 2u] ^ vec4(0x80808080u), x.z)
            + dot4((*window).pieces[PIECES * i + 3u] ^ vec4(0x80808080u), x.w);
        let two = select(v.xy, v.zw, upper) + exchange2(select(v.zw, v.xy, upper), 16u);
        return select(two.x, two.y, second) + exchange1(select(two.y, two.x, second), 8u);
    }
    let a = (*window).pieces[PIECES * i];
    let b = (*window).pieces[PIECES * i + 1u];
    let low = dot4(a & vec4(0x0f0f0f0fu), x.x) + dot4(b & vec4(0x0f0f0f0fu), x.y);
    // Sixteen times code less 8: no shift but one in the end.
    let high = dot4((a & vec4(0xf0f0f0f0u)) ^ vec4(0x80808080u), x.x)
        + dot4((b & vec4(0xf0f0f0f0u)) ^ vec4(0x80808080u), x.y);
    let four = select(low, high, upper) + exchange4(select(high, low, upper), 16u);
    let two = select(four.xy, four.zw, second) + exchange2(select(four.zw, four.xy, second), 8u);
    let third = (lane & 4u) != 0u;
    let sum = select(two.x, two.y, third) + exchange1(select(two.y, two.x, third), 4u);
    let shifted = (sum >> 4u) + 8i * bitcast<i32>((*window).cells[i].y);
    return select(sum, shifted, upper);
}

fn take_tile(job: ptr<function, Job>, window: ptr<function, Window>, first: u32, lane: u32, i: u32) {
    let tile = first + i * TEAMS;
    let is_there = tile < (*job).items;
    // Where exchanges are played all lanes go on.
    if (is_there || EXCHANGE_PLAYED) {
        if (!X_AHEAD) {
            load_x(job, window, min(tile, ROW_TILES - 1u), lane, i);
        }
        let sum = dot_tile(window, lane, i);
        if (is_there) {
            let row = row_of(lane);
            let cell = (*window).cells[i];
            let two = unpack2x16float((*window).scales[i]);
            let scale = select(two.x, two.y, (row & 1u) == 1u);
            let integer = times_of() * sum + shift_of(bitcast<i32>(cell.y));
            terms[32u * tile + row] = vec2(f32(integer), scale * factor_of(cell));
        }
    }
    if (ONE_ROUND == 0u) {
        load_tile(job, window, first + TILES_AHEAD * TEAMS, lane, i);
    }
}

// A group's part of two rows: integer and factor of either.
fn terms_of(group: u32, pair: u32) -> vec4<f32> {
    let at = 32u * group + 2u * pair;
    return vec4(terms[at], terms[at + 1u]);
}

fn add_terms(acc: vec2<f32>, two: vec4<f32>) -> vec2<f32> {
    return fma2(two.xz, two.yw, acc);
}

// The workgroup's sums, each handed to `finish`.
fn products(job: ptr<function, Job>, index: u32) {
    var window: Window;
    let lane = index % LANES;
    let team = index / LANES;
    load_tiles(job, &window, team, lane);
    prepare(job, index);
    begin_exchanges(index);
    for (var first = team; first < ROW_TILES + team; first += TILES_AHEAD * TEAMS) {
        take_tiles(job, &window, first, lane);
        if (ONE_ROUND == 1u) {
            break;
        }
    }
    workgroupBarrier();
    if (index < 16u && (*job).items > 0u) {
        var acc = vec2(0.0);
        var group = 0u;
        // Eight loads in flight, then the chain; not where a multiply-add is forty lines to compile.
        for (; !PLAYED && group + 8u <= ROW_TILES; group += 8u) {
            let a = terms_of(group, index);
            let b = terms_of(group + 1u, index);
            let c = terms_of(group + 2u, index);
            let d = terms_of(group + 3u, index);
            let e = terms_of(group + 4u, index);
            let f = terms_of(group + 5u, index);
            let g = terms_of(group + 6u, index);
            let h = terms_of(group + 7u, index);
            acc = add_terms(add_terms(add_terms(add_terms(acc, a), b), c), d);
            acc = add_terms(add_terms(add_terms(add_terms(acc, e), f), g), h);
        }
        for (; group < ROW_TILES; group++) {
            acc = add_terms(acc, terms_of(group, index));
        }
        finish(job, Chain(0u, 0u, index), acc);
    }
}
