// Weights in one memory. Needs: alias Word; array `stored` of them.

fn word(at: u32) -> Word {
    return stored[at];
}
