//! Several conversations decoding together: what all of them get, against one alone and against what the bytes that
//! they touch allow.

use std::time::Instant;

use smoe_engine::forecast::Touched;
use smoe_engine::{Control, Session, Vault};
use smoe_meter::TierSnapshot;
use smoe_sculpt::token_stream;

use super::figures::{self, Ceilings};
use super::record::{Record, median};
use super::runs::{Bench, Stretch};
use crate::failure::Failure;
use crate::interrupt;

/// Tokens of a client's prompt, of its answer before the ring is taken to be warm, and of what is measured.
const PROMPT: usize = 16;
const WARM: usize = 16;
const DECODE: usize = 48;

/// Positions that a client needs.
pub const CONTEXT: usize = PROMPT + WARM + DECODE + 32;

/// What one number of clients got, round by round.
#[derive(Default)]
struct Series {
    /// Tokens per second of all together.
    rate: Vec<f64>,
    /// Of the bound by bytes.
    share: Vec<f64>,
    /// Experts of a layer that a step needs.
    union: Vec<f64>,
    disk_bytes: Vec<f64>,
    hit_rate: Vec<f64>,
}

/// Runs `counts` clients, in turns.
pub fn run(
    bench: &mut Bench,
    ceilings: &mut Ceilings,
    vault: &Vault,
    counts: &[usize],
    rounds: usize,
    record: &mut Record,
) -> Result<(), Failure> {
    let touched = Touched::of(vault);
    let mut series: Vec<Series> = counts.iter().map(|_| Series::default()).collect();
    for round in 0..rounds {
        for (series, &n) in series.iter_mut().zip(counts) {
            bench.engine.forget_experts();
            let ((steps, stretch), around) =
                ceilings.around(bench, |bench| decode(bench, n, round as u64))?;
            let asked = (stretch.store.demand_hits + stretch.store.demand_misses) as f64 / steps as f64;
            let floor = figures::serial_floor_s(&touched, &stretch.store, steps, &around);
            series.rate.push(stretch.rate());
            series.share.push(floor / stretch.time.as_secs_f64());
            series.union.push(asked / touched.layers.max(1) as f64);
            series.disk_bytes.push(stretch.store.disk_bytes as f64 / stretch.tokens as f64);
            series.hit_rate.extend(stretch.store.hit_rate());
        }
    }
    let alone = series.first().map_or(f64::NAN, |series| median(&sorted(&series.rate)));
    for (series, n) in series.iter().zip(counts) {
        record.spread(&format!("clients_{n}_tok_s"), series.rate.iter().copied());
        let against = series.rate.iter().map(|rate| rate / alone);
        record.spread(&format!("clients_{n}_of_{}", counts[0]), against);
        record.spread(&format!("clients_{n}_bound_share"), series.share.iter().copied());
        record.spread(&format!("clients_{n}_union_experts"), series.union.iter().copied());
        record.spread(&format!("clients_{n}_disk_bytes_per_token"), series.disk_bytes.iter().copied());
        record.spread(&format!("clients_{n}_hit_rate"), series.hit_rate.iter().copied());
    }
    Ok(())
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values = values.to_vec();
    values.sort_unstable_by(f64::total_cmp);
    values
}

/// Steps and what they took, of `n` clients each with tokens of its own.
fn decode(bench: &mut Bench, n: usize, round: u64) -> Result<(usize, Stretch), Failure> {
    let vocab_size = bench.engine.spec().vocab_size;
    let mut streams: Vec<_> = (0..n as u64).map(|i| token_stream(vocab_size, 1 + 1000 * round + i)).collect();
    let mut control = Control::cancelled_by(interrupt::flag());
    let mut sessions: Vec<Session> = Vec::with_capacity(n);
    for stream in &mut streams {
        let mut session = bench.engine.open_session()?;
        let prompt: Vec<u32> = stream.take(PROMPT).collect();
        bench.engine.sync(&mut session, &prompt, &mut control)?;
        sessions.push(session);
    }
    let (mut start, mut store, mut phases) =
        (Instant::now(), bench.engine.store_snapshot(), bench.engine.phase_snapshot());
    for step in 0..WARM + DECODE {
        if step == WARM {
            (start, store, phases) =
                (Instant::now(), bench.engine.store_snapshot(), bench.engine.phase_snapshot());
        }
        for (session, stream) in sessions.iter_mut().zip(&mut streams) {
            session.queue(&stream.take(1).collect::<Vec<_>>(), 1);
        }
        bench.engine.step(&mut sessions, &mut control, &mut |_, _, _| {})?;
    }
    let stretch = Stretch {
        tokens: n * DECODE,
        time: start.elapsed(),
        store: bench.engine.store_snapshot() - store,
        phases: bench.engine.phase_snapshot() - phases,
        tier: TierSnapshot::default(),
    };
    Ok((DECODE, stretch))
}
