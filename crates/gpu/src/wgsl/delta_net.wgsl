// States of gated delta nets go through the tokens of runs. Rows of a state do not depend on each other: a team of lanes holds
// two of them in registers, and all teams of a workgroup are of one value head. Workgroups: (runs of rows, value head, run).
//
// Needs: delta_channels.wgsl, const KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, CONV, STRIDE, Q_AT, K_AT, V_AT, UNIT, STATE, MIXED as delta_mix.wgsl, MARKS_AT (in the
// words), LANES (of a team, of one subgroup), THREADS, TILE (tokens that are staged at once), REMEMBERS_EARLY (stage_items does), PARTS (vectors of a row that a lane
// holds); fn read_items, stage_items (delta_staged.wgsl or delta_lone.wgsl); fn answer, end (delta_found.wgsl or delta_ended.wgsl); fn load_parts, meet_parts,
// take_parts, leave_parts, which call the ones here; the buffers words (u32), plane, states (vec4<f32>).
//
// Per token and row: s = decay s; d = beta (v - s k); s = s + d k; out = s q. A sum over a row is a lane's vectors one after the
// other, then its four columns, then lanes as a tree: the same however many tokens, runs and workgroups there are.

struct Params { eps: f32, scale: f32, norm_eps: f32, nothing: u32 }
var<immediate> p: Params;

const TEAMS: u32 = THREADS / LANES;
// All that follow are vectors of four.
const HISTORY: u32 = (CONV - 1u) * CHANNELS;
// Values of a workgroup's rows.
const ROW_CHUNKS: u32 = TEAMS / 2u;
// What is staged of a token: its query, its key, those values, and the rates of two heads.
const STAGED: u32 = 2u * KEY_CHUNKS + ROW_CHUNKS + 1u;
const ITEMS: u32 = (TILE * STAGED + THREADS - 1u) / THREADS;
// The last vectors of a row are not all there.
const RAGGED: bool = PARTS * LANES != KEY_CHUNKS;

alias Ahead = array<vec4<f32>, ITEMS>;

struct Held {
    a: array<vec4<f32>, PARTS>,
    b: array<vec4<f32>, PARTS>,
}

struct Sums {
    a: vec4<f32>,
    b: vec4<f32>,
}

// Tokens, and numbers of states.
struct Run {
    first: u32,
    end: u32,
    before: u32,
    to: u32,
}

var<workgroup> staged: array<vec4<f32>, TILE * STAGED>;
var<private> head: u32;
// The first vector of the workgroup's values among those of the head.
var<private> row_chunk: u32;

/// Where the state of the workgroup's key head begins in a state.
fn unit_of(state: u32) -> u32 {
    return (state * STATE + head / PER_KEY * UNIT) / 4u;
}

/// Where a row of the head begins there.
fn row_of(state: u32, row: u32) -> u32 {
    return unit_of(state) + HISTORY + ((head % PER_KEY) * VALUE_DIM + row) * KEY_CHUNKS;
}

fn load_part(s: ptr<function, Held>, at: u32, part: u32, j: u32) {
    let chunk = part + LANES * j;
    if (!RAGGED || chunk < KEY_CHUNKS) {
        (*s).a[j] = states[at + chunk];
        (*s).b[j] = states[at + KEY_CHUNKS + chunk];
    }
}

fn leave_part(s: ptr<function, Held>, at: u32, part: u32, j: u32) {
    let chunk = part + LANES * j;
    if (!RAGGED || chunk < KEY_CHUNKS) {
        states[at + chunk] = (*s).a[j];
        states[at + KEY_CHUNKS + chunk] = (*s).b[j];
    }
}

fn staged_at(at: u32, chunk: u32) -> vec4<f32> {
    if (!RAGGED) {
        return staged[at + chunk];
    }
    return select(vec4(0.0), staged[at + min(chunk, KEY_CHUNKS - 1u)], chunk < KEY_CHUNKS);
}

/// Decays, and asks for the key.
fn meet_part(s: ptr<function, Held>, sums: ptr<function, Sums>, at: u32, decay: f32, part: u32, j: u32) {
    let k = staged_at(at + KEY_CHUNKS, part + LANES * j);
    (*s).a[j] *= decay;
    (*s).b[j] *= decay;
    (*sums).a = fma((*s).a[j], k, (*sums).a);
    (*sums).b = fma((*s).b[j], k, (*sums).b);
}

/// Takes what is new, and asks for the query.
fn take_part(s: ptr<function, Held>, sums: ptr<function, Sums>, at: u32, d: vec2<f32>, part: u32, j: u32) {
    let chunk = part + LANES * j;
    let k = staged_at(at + KEY_CHUNKS, chunk);
    let q = staged_at(at, chunk);
    (*s).a[j] = fma(vec4(d.x), k, (*s).a[j]);
    (*s).b[j] = fma(vec4(d.y), k, (*s).b[j]);
    (*sums).a = fma((*s).a[j], q, (*sums).a);
    (*sums).b = fma((*s).b[j], q, (*sums).b);
}

/// The sums of a team's two rows, in all of its lanes.
fn joined(sums: Sums) -> vec2<f32> {
    var sum = vec2(
        (sums.a.x + sums.a.y) + (sums.a.z + sums.a.w),
        (sums.b.x + sums.b.y) + (sums.b.z + sums.b.w),
    );
    for (var step = 1u; step < LANES; step *= 2u) {
        sum += subgroupShuffleXor(sum, step);
    }
    return sum;
}

/// Leaves the inputs of the convolution's last positions before `end` in a state: of this workgroup's values, and of queries and
/// keys if it is the key head's first. A channel is always the same lane's, which reads it before it writes it: so a state may be its own
/// successor.
fn remember(run: Run, end: u32, state: u32, lane: u32, lanes: u32) {
    let keys = select(0u, 2u * KEY_CHUNKS, row_chunk == 0u && head % PER_KEY == 0u);
    let n = end - run.first;
    for (var i = lane; i < keys + ROW_CHUNKS; i += lanes) {
        var channel = i;
        var column = select(K_AT / 4u - KEY_CHUNKS, Q_AT / 4u, i < KEY_CHUNKS) + head / PER_KEY * KEY_CHUNKS + i;
        if (i >= keys) {
            let c = row_chunk + i - keys;
            if (c >= VALUE_CHUNKS) {
                continue;
            }
            channel = 2u * KEY_CHUNKS + (head % PER_KEY) * VALUE_CHUNKS + c;
            column = V_AT / 4u + head * VALUE_CHUNKS + c;
        }
        // All are on their way before the first is written.
        var x: array<vec4<f32>, CONV>;
        for (var slot = 0u; slot + 1u < CONV; slot++) {
            if (slot + n >= CONV - 1u) {
                x[slot] = plane[(end + slot - (CONV - 1u)) * (STRIDE / 4u) + column];
            } else if (run.before != NONE) {
                x[slot] = states[unit_of(run.before) + (slot + n) * CHANNELS + channel];
            }
        }
        for (var slot = 0u; slot + 1u < CONV; slot++) {
            states[unit_of(state) + slot * CHANNELS + channel] = x[slot];
        }
    }
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let at_run = 8u * wg.z;
    let run = Run(words[at_run], words[at_run + 1u], words[at_run + 2u], words[at_run + 3u]);
    if (run.first >= run.end) {
        return;
    }
    head = wg.y;
    row_chunk = wg.x * ROW_CHUNKS;
    let team = lane / LANES;
    let part = lane % LANES;
    // Rows that are not there repeat the last two, and are not written.
    let row = min(wg.x * 2u * TEAMS + 2u * team, VALUE_DIM - 2u);
    let is_there = wg.x * 2u * TEAMS + 2u * team == row;
    var ahead: Ahead;
    read_items(&ahead, run, run.first, lane);
    var s: Held;
    if (run.before != NONE) {
        load_parts(&s, row_of(run.before, row), part);
    }
    var mark = words[at_run + 4u];
    let marks = words[at_run + 5u];
    for (var base = run.first; base < run.end; base += TILE) {
        workgroupBarrier();
        stage_items(&ahead, run, lane);
        workgroupBarrier();
        if (base + TILE < run.end) {
            read_items(&ahead, run, base + TILE, lane);
        }
        for (var i = 0u; i < min(TILE, run.end - base); i++) {
            let at = i * STAGED;
            let two = staged[at + STAGED - 1u];
            let rates = select(two.xy, two.zw, head % 2u == 1u);
            let four = staged[at + 2u * KEY_CHUNKS + team / 2u];
            let v = select(four.xy, four.zw, team % 2u == 1u);
            var sums: Sums;
            meet_parts(&s, &sums, at, rates.x, part);
            let d = rates.y * (v - joined(sums));
            var made: Sums;
            take_parts(&s, &made, at, d, part);
            let found = joined(made);
            if (part == 0u && is_there) {
                answer(base + i, row / 2u, found);
            }
            if (mark < marks && words[MARKS_AT + 2u * mark] == base + i) {
                let state = words[MARKS_AT + 2u * mark + 1u];
                if (is_there) {
                    leave_parts(&s, row_of(state, row), part);
                }
                remember(run, base + i + 1u, state, lane, THREADS);
                mark++;
            }
        }
    }
    if (is_there) {
        leave_parts(&s, row_of(run.to, row), part);
    }
    if (!REMEMBERS_EARLY) {
        remember(run, run.end, run.to, lane, THREADS);
    }
    end(lane);
}
