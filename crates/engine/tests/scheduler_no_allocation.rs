//! A step of a scheduler that only answers allocates nothing: of one job and of several, guesses included.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{all_threads_have_begun, open, options, write_tiny};
use smoe_engine::plan::RingSize;
use smoe_engine::{Driver, Event, Job, Limits, Sampling, Scheduler, SchedulerOptions};
use smoe_store::CountingAllocator;
use smoe_testkit::TinyModel;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

// One test only and no harness, so that no other thread allocates meanwhile.
fn main() {
    for model in TinyModel::all(9) {
        let dir = tempfile::tempdir().unwrap();
        let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
        for (jobs, ring) in [(1, 1), (3, 1), (3, 100)] {
            let ring = RingSize::Slots((vault.spec.moe.top_k * ring).min(vault.experts.records.len()));
            let mut options = options(ring, 16, 2);
            options.plan.sessions = jobs;
            let settings = SchedulerOptions { at_once: Some(jobs), ..SchedulerOptions::default() };
            let mut scheduler = Scheduler::new(open(&vault, &options), settings).unwrap();
            let told = Arc::new(AtomicUsize::new(0));
            for i in 0..jobs {
                let count = told.clone();
                // One of them repeats itself, which invites guesses.
                let prompt: Vec<u32> = model.prompt(3, i as u64).into_iter().cycle().take(20).collect();
                let job = Job {
                    prompt,
                    sampling: Sampling { temperature: 0.7 * i as f32, top_p: 0.9, ..Sampling::default() },
                    limits: Limits { max_tokens: 190, end_tokens: Vec::new() },
                    logprobs: None,
                    constraint: None,
                    cancel: Arc::default(),
                    sink: Box::new(move |event: Event<'_>| {
                        let is_token = matches!(event, Event::Token { .. });
                        count.fetch_add(usize::from(is_token), Ordering::Relaxed);
                        ControlFlow::Continue(())
                    }),
                };
                scheduler.submit(job).unwrap();
            }
            // Prompts, and the first tokens: queues reach their sizes.
            while told.load(Ordering::Relaxed) < 60 * jobs {
                scheduler.step();
            }
            all_threads_have_begun();
            let (warm, from) = (ALLOCATOR.allocations(), told.load(Ordering::Relaxed));
            while told.load(Ordering::Relaxed) < 160 * jobs {
                scheduler.step();
                let load = scheduler.load();
                assert_eq!(load.running, jobs);
            }
            let steps = told.load(Ordering::Relaxed) - from;
            assert_eq!(ALLOCATOR.allocations() - warm, 0, "allocations in {steps} tokens of {jobs} jobs");
        }
    }
}
