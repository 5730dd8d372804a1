//! What is planned is what is claimed.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use common::{open, options, write_tiny};
use smoe_engine::plan::RingSize;
use smoe_engine::{KvType, Sampler, Sampling, Vault};
use smoe_store::CountingAllocator;
use smoe_testkit::TinyModel;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// Lists of rows, tokens and blocks, some bytes of each, and what threads of an engine that has ended have not given back
/// yet; the plan's fixed part has room for them.
const LISTS: u64 = 256 << 10;

/// Bytes that an engine with its sessions and samplers takes from the heap, and those that are planned of them: planes,
/// states and their like. Weights, ring and keys and values are mapped.
fn claimed_and_planned(vault: &Vault, kv: KvType, chunk: usize, context: usize, sessions: usize) -> [u64; 2] {
    let mut options = options(RingSize::Auto, chunk, 2);
    (options.plan.context, options.plan.sessions, options.plan.kv) = (Some(context), sessions, Some(kv));
    let before = ALLOCATOR.bytes();
    let mut engine = open(vault, &options);
    let sessions: Vec<_> = (0..sessions).map(|_| engine.open_session().unwrap()).collect();
    let sampler = || Sampler::new(Sampling::default(), vault.spec.vocab_size).unwrap();
    let samplers: Vec<_> = sessions.iter().map(|_| sampler()).collect();
    let claimed = ALLOCATOR.bytes() - before;
    let plan = engine.plan();
    assert_eq!(engine.kv_usage().bytes, plan.kv_bytes, "{}", vault.spec.model_type);
    drop((samplers, sessions));
    [claimed, plan.activation_bytes + plan.state_bytes]
}

// One test only, so that no other thread allocates meanwhile.
#[test]
fn planes_states_and_blocks_take_what_is_planned() {
    for (experts, backbone, kv) in [("q4/64", "q8/64", KvType::F16), ("bf16", "bf16", KvType::F32)] {
        for model in TinyModel::every(9) {
            let dir = tempfile::tempdir().unwrap();
            let vault = write_tiny(dir.path(), &model, experts, backbone);
            // What does not grow with a step, the context and the sessions is in the plan's fixed part.
            let [few_claimed, few_planned] = claimed_and_planned(&vault, kv, 16, 128, 1);
            let [many_claimed, many_planned] = claimed_and_planned(&vault, kv, 512, 1024, 4);
            let (claimed, planned) = (many_claimed - few_claimed, many_planned - few_planned);
            let what = format!("{} {experts}: {claimed} of {planned}", vault.spec.model_type);
            println!("{what}");
            assert!(claimed <= planned + LISTS, "{what}");
            assert!(10 * claimed >= 8 * planned, "{what}");
        }
    }
}
