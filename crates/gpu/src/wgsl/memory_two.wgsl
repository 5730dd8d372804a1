// Weights of experts in one memory or in another behind it. A workgroup's are in one, so a branch is no matter: what is behind is far
// away.
//
// Needs: alias Word; array `stored` of them; experts.wgsl; const BEHIND, the binding of the other.

@group(0) @binding(BEHIND) var<storage, read> behind: array<Word>;

fn word(at: u32) -> Word {
    if (is_behind) {
        return behind[at];
    }
    return stored[at];
}
