//! A decoded token allocates nothing: forward, store, sampler, on any thread.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::ops::ControlFlow;

use common::{all_threads_have_begun, open, options, write_tiny};
use smoe_engine::plan::RingSize;
use smoe_engine::{Control, Limits, Sampler, Sampling};
use smoe_store::CountingAllocator;
use smoe_testkit::TinyModel;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

// One test only and no harness, so that no other thread allocates meanwhile.
fn main() {
    for (experts, backbone) in [("q4/64", "q8/64"), ("bf16", "bf16")] {
        for model in TinyModel::every(9) {
            let dir = tempfile::tempdir().unwrap();
            let vault = write_tiny(dir.path(), &model, experts, backbone);
            // A ring at the floor: tokens read and evict.
            let mut engine = open(&vault, &options(RingSize::Slots(vault.spec.moe.top_k), 16, 2));
            let base = Sampling { temperature: 1.5, min_p: 0.01, ..Sampling::default() };
            for sampling in [
                Sampling::default(),
                base.clone(),
                Sampling { top_p: 0.95, ..base.clone() },
                Sampling { top_k: 40, top_p: 0.95, repetition_penalty: 1.1, frequency_penalty: 0.1, ..base },
            ] {
                let mut sampler = Sampler::new(sampling, vault.spec.vocab_size).unwrap();
                let mut session = engine.open_session().unwrap();
                let prompt = model.prompt(20, 1);
                engine.sync(&mut session, &prompt, &mut Control::default()).unwrap();
                sampler.begin(&prompt);
                let limits = Limits { max_tokens: 160, end_tokens: Vec::new() };
                // The first tokens warm up: queues reach their sizes.
                let (mut n, mut warm) = (0, 0);
                engine
                    .generate(&mut session, &mut sampler, &limits, &mut Control::default(), &mut |_| {
                        n += 1;
                        if n == 60 {
                            all_threads_have_begun();
                            warm = ALLOCATOR.allocations();
                        }
                        ControlFlow::Continue(())
                    })
                    .unwrap();
                let after = ALLOCATOR.allocations();
                let read = engine.store_snapshot().disk_bytes;
                assert!(read > 0, "nothing was read");
                let family = &vault.spec.model_type;
                assert_eq!(after - warm, 0, "{family} {experts} {backbone}: allocations in 100 tokens");
            }
        }
    }
}
