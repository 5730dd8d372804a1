// One of a chain of kernels that wait for each other.
//
// Needs: const LINK, which tells it from the others.

@group(0) @binding(0) var<storage, read> before: array<u32>;
@group(0) @binding(1) var<storage, read_write> after: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lane: u32) {
    if (lane == 0u) {
        after[0] = before[0] + LINK;
    }
}
