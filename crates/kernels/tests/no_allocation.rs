//! The token loop allocates nothing: forks, quantising, products and experts, within their capacities.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use smoe_format::spec::Activation;
use smoe_format::{Encoding, Uniform, Zero};
use smoe_kernels::{
    Activations, ExpertCall, ExpertScratch, Input, Kernels, Matrix, Pool, expert_ffn, matmul,
};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system's allocator, whose contract is the same.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

// One test only, so that no other thread allocates meanwhile.
#[test]
fn steps_within_capacity_do_not_allocate() {
    let (d_model, d_ff, tokens) = (512, 384, 9);
    let encoding = Encoding::Uniform(Uniform::new(4, 64, Zero::Symmetric).expect("valid"));
    let bytes = |rows, cols| vec![0u8; encoding.tensor_bytes(rows, cols).expect("small")];
    let (wide, tall) = (bytes(d_ff, d_model), bytes(d_model, d_ff));
    let up = Matrix::new(&wide, d_ff, d_model, encoding);
    let down = Matrix::new(&tall, d_model, d_ff, encoding);
    let lists: [&[u32]; 3] = [&[0, 1, 2, 3, 4, 5, 6, 7, 8], &[3], &[2, 8]];
    let experts = lists.map(|tokens| ExpertCall { gate: up, up, down, bias: None, tokens });
    let pairs = 12;
    let pool = Pool::new(3, false);
    // Threads allocate while they start: wait until each has taken a task.
    let barrier = std::sync::Barrier::new(3);
    pool.run(3, &|_| {
        barrier.wait();
    });
    let x = vec![0.5f32; tokens * d_model];
    let mut activations = Activations::with_capacity(tokens, d_model);
    let mut scratch = ExpertScratch::with_capacity(pairs, d_model, d_ff, false);
    let mut out = vec![0.0; pairs * d_model];
    for kernels in Kernels::available() {
        for _ in 0..3 {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            activations.quantise_parallel(&pool, kernels, &x, tokens, d_model, 64);
            let coded = [activations.view()];
            let input = Input::new(&x, tokens, &coded);
            matmul(&pool, kernels, &up, &input, &mut out[..tokens * d_ff]);
            expert_ffn(&pool, kernels, &experts, Activation::SwiGlu, &input, &mut scratch, &mut out);
            let after = ALLOCATIONS.load(Ordering::Relaxed);
            assert_eq!(after - before, 0, "{kernels:?}");
        }
    }
}
