// The work list of a layer's experts: entries of (slot, first, count, expert), whose pairs are
// `pairs[first .. first + count]`, a pair being token * top_k + j.
//
// Needs: consts TOKENS, LIST (its binding; the pairs are the next), APART_BEHIND (what slots of a memory behind the first are apart, in
// pieces; 0 if there is none).

@group(0) @binding(LIST) var<storage, read> list: array<vec4<u32>>;
@group(0) @binding(LIST + 1u) var<storage, read> pairs: array<u32>;

struct Entry {
    slot: u32,
    first: u32,
    // None if the entry is past the end, or its expert not here: then there is nothing to do.
    count: u32,
}

// The expert of this workgroup lies in the memory behind the first.
var<private> is_behind: bool;

// Where an entry's slot begins, in pieces, slots of the first memory being so far apart.
fn start_of(e: Entry, apart: u32) -> u32 {
    return e.slot * select(apart, APART_BEHIND, is_behind);
}

// So many pairs of an entry, in parts. Both words are on their way at once: weights wait for them.
fn entry(i: u32, part: u32) -> Entry {
    let number = list[0].x;
    let e = list[i + 1u];
    // Entries of fewer tokens than eight have no parts.
    let skipped = select(part * TOKENS, 0u, TOKENS < 8u);
    let is_one = i < number && e.z > skipped;
    let count = select(0u, min(e.z - skipped, TOKENS), is_one && e.x != 0xffffffffu);
    is_behind = APART_BEHIND > 0u && (e.x & 0x80000000u) != 0u;
    return Entry(e.x & 0x7fffffffu, select(0u, e.y + skipped, is_one), count);
}

// The pair of one of an entry's tokens; of those past its end, that of its last.
fn pair_of(e: Entry, i: u32) -> u32 {
    return pairs[e.first + min(i, max(e.count, 1u) - 1u)];
}
