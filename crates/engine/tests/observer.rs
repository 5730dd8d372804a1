//! What an observer of experts is shown.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::sync::{Arc, Mutex};

use common::{open, options, sculpted};
use smoe_engine::plan::RingSize;
use smoe_engine::{Control, ExpertObserver, ExpertSeen};
use smoe_sculpt::BackboneBits;

/// (layer, expert, token), weight, input and hidden values, as they came.
type Pair = ((u32, u32, u32), f32, Vec<f32>, Vec<f32>);

/// All of them.
#[derive(Debug, Default, Clone, PartialEq)]
struct Seen(Vec<Pair>);

#[derive(Debug)]
struct Recorder {
    seen: Seen,
    d_model: usize,
    d_expert: usize,
}

impl ExpertObserver for Recorder {
    fn expert(&mut self, seen: &ExpertSeen<'_>) {
        assert_eq!(seen.hidden.len(), seen.tokens.len() * self.d_expert);
        for ((&token, &weight), hidden) in
            seen.tokens.iter().zip(seen.weights).zip(seen.hidden.chunks_exact(self.d_expert))
        {
            let input = seen.inputs[token as usize * self.d_model..][..self.d_model].to_vec();
            self.seen.0.push(((seen.layer, seen.expert, token), weight, input, hidden.to_vec()));
        }
    }
}

#[test]
fn every_pair_is_shown_once_whatever_the_ring_and_nothing_else_changes() {
    let Some((_dir, vault)) = sculpted("qwen3_moe", 16, BackboneBits::Bf16) else { return };
    let tokens: Vec<u32> = (0..60).map(|i| (i * 7 + 3) % 90).collect();
    let mut all = Vec::new();
    let mut logits = Vec::new();
    for ring in [RingSize::Auto, RingSize::Slots(8)] {
        for watched in [true, false] {
            let mut engine = open(&vault, &options(ring, 64, 2));
            let spec = engine.spec().clone();
            let recorder =
                Recorder { seen: Seen::default(), d_model: spec.d_model, d_expert: spec.moe.d_expert };
            let recorder = Arc::new(Mutex::new(recorder));
            if watched {
                engine.watch_experts(Some(recorder.clone())).unwrap();
            }
            let mut session = engine.open_session().unwrap();
            engine.sync(&mut session, &tokens, &mut Control::default()).unwrap();
            logits.push(session.logits().to_vec());
            engine.watch_experts(None).unwrap();
            engine.sync(&mut session, &tokens[..30], &mut Control::default()).unwrap();
            let mut seen = recorder.lock().unwrap().seen.clone();
            if !watched {
                assert!(seen.0.is_empty());
                continue;
            }
            assert_eq!(seen.0.len(), tokens.len() * spec.moe.top_k * spec.moe_layers().count());
            seen.0.sort_by_key(|pair| pair.0);
            assert!(seen.0.windows(2).all(|pairs| pairs[0].0 != pairs[1].0));
            for pairs in &seen.0 {
                // A token's input is the same for all its experts.
                let same = seen.0.iter().find(|other| (other.0.0, other.0.2) == (pairs.0.0, pairs.0.2));
                assert_eq!(same.unwrap().2, pairs.2);
                assert!(pairs.1 > 0.0 && pairs.3.iter().any(|&x| x != 0.0));
            }
            all.push(seen);
        }
    }
    assert!(all[0] == all[1]);
    assert!(logits.iter().all(|l| *l == logits[0]));
}
