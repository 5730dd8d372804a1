//! A reading as a table of 80 columns, for a terminal.

use std::fmt::{self, Write};

use smoe_engine::plan::Bytes;
use smoe_meter::{Phase, RouteSnapshot};

use super::{Coverage, Reading, Stretch, coverage};

/// Columns of the longest bar.
const BAR: usize = 40;
/// Places of a coverage curve that are shown.
const CURVE: usize = 4;

/// The table, its last line ended.
pub fn table(reading: &Reading) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write(reading, &mut text);
    text
}

fn write(reading: &Reading, out: &mut String) -> fmt::Result {
    let Reading { synced, prompt, decode, routes, .. } = reading;
    writeln!(out, "── instrument {}", "─".repeat(66))?;
    let seconds = prompt.time.as_secs_f64();
    let rate = synced.prefilled as f64 / seconds.max(1e-9);
    let read = Bytes(prompt.store.disk_bytes);
    writeln!(
        out,
        "prompt       {} tokens in {seconds:.2} s, {rate:.1} tok/s · {read} read",
        synced.prefilled
    )?;
    if synced.reused > 0 {
        writeln!(out, "             {} more were held already", synced.reused)?;
    }
    let (Some(rate), Some(token_ns)) = (decode.rate(), decode.per_step(decode.time.as_nanos() as u64)) else {
        return writeln!(out, "answer       a single token: nothing to take means of");
    };
    writeln!(
        out,
        "answer       {} tokens more in {:.2} s, {rate:.1} tok/s",
        decode.phases.steps(),
        decode.time.as_secs_f64()
    )?;
    writeln!(out)?;
    steps(out, decode, token_ns, "a token")?;
    let ring =
        Ring { slots: reading.ring_slots, n_experts: reading.n_experts, slot_bytes: reading.slot_bytes };
    experts(out, decode, routes, ring, "a token")
}

/// Steps of a server between two rests, each of one token or more, as a table.
pub fn server_table(model: &str, work: &Stretch, routes: &RouteSnapshot, ring: Ring) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write_server(model, work, routes, ring, &mut text);
    text
}

fn write_server(
    model: &str,
    work: &Stretch,
    routes: &RouteSnapshot,
    ring: Ring,
    out: &mut String,
) -> fmt::Result {
    let model: String = model.chars().take(48).collect();
    writeln!(out, "── instrument {model} {}", "─".repeat(65 - model.chars().count()))?;
    let (steps_done, seconds) = (work.phases.steps(), work.time.as_secs_f64());
    writeln!(out, "work         {steps_done} steps in {seconds:.2} s")?;
    writeln!(out)?;
    steps(out, work, work.per_step(work.time.as_nanos() as u64).unwrap_or(0.0), "a step")?;
    experts(out, work, routes, ring, "a step")
}

/// Slots of the ring, and what they are for.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    /// Slots that it might use.
    pub slots: usize,
    /// Experts of the model.
    pub n_experts: usize,
    /// Bytes of a slot.
    pub slot_bytes: u64,
}

/// Where the time went.
fn steps(out: &mut String, decode: &Stretch, each_ns: f64, unit: &str) -> fmt::Result {
    let longest = Phase::ALL.into_iter().map(|phase| decode.phase_ns(phase)).max().unwrap_or(0).max(1);
    for phase in Phase::ALL {
        let ns = decode.phase_ns(phase);
        if phase == Phase::Device && ns == 0 {
            continue;
        }
        let ms = decode.per_step(ns).unwrap_or(0.0) / 1e6;
        let share = 100.0 * ns as f64 / decode.time.as_nanos().max(1) as f64;
        let bar = bar(ns as f64 / longest as f64, BAR);
        let line = format!("{:<12} {ms:>9.3} ms {share:>5.1} %  {bar}", title(phase));
        writeln!(out, "{}", line.trim_end())?;
    }
    writeln!(out, "{:<12} {:>9.3} ms {unit}: the wall time", "in all", each_ns / 1e6)?;
    writeln!(out)
}

/// How the experts fared.
fn experts(
    out: &mut String,
    decode: &Stretch,
    routes: &RouteSnapshot,
    ring: Ring,
    unit: &str,
) -> fmt::Result {
    let store = &decode.store;
    let a_token = |n: u64| decode.per_step(n).unwrap_or(0.0);
    writeln!(
        out,
        "experts      {}: {:.1} hits, {:.1} misses, {:.1} evictions {unit}",
        percent(store.hit_rate()),
        a_token(store.demand_hits),
        a_token(store.demand_misses),
        a_token(store.evictions)
    )?;
    let tier = &decode.tier;
    if tier.misses > 0 {
        let (rate, brought) = (percent(tier.hit_rate()), Bytes(a_token(tier.load_bytes) as u64));
        let (hits, misses) = (a_token(tier.hits), a_token(tier.misses));
        writeln!(out, "device       {rate}: {hits:.1} hits, {misses:.1} misses, {brought} brought {unit}")?;
        let (over_bus, computed) = (a_token(tier.over_bus), a_token(tier.computed));
        writeln!(
            out,
            "             {over_bus:.1} read over the bus, {computed:.1} computed by the processor"
        )?;
    }
    if store.ahead_reads + store.ahead_hits + store.ahead_late > 0 {
        writeln!(
            out,
            "read ahead   {:.1} in time, {:.1} late, {:.1} in vain {unit}",
            a_token(store.ahead_hits),
            a_token(store.ahead_late),
            a_token(store.ahead_waste)
        )?;
    }
    write!(out, "disk         {} {unit}", Bytes(a_token(store.disk_bytes) as u64))?;
    if let Some(rate) = decode.read_gb_s() {
        write!(out, " · {rate:.2} GB/s while reads were under way")?;
    }
    if let Some(rate) = store.decode_bytes_per_s() {
        let (slots, ms) = (Bytes(a_token(store.decoded_bytes) as u64), a_token(store.decode_ns) / 1e6);
        write!(out, " · decoded to {slots} in {ms:.2} ms, {:.1} GB/s a reader", rate / 1e9)?;
    }
    writeln!(out)?;
    let share = ring.slots as f64 / ring.n_experts.max(1) as f64;
    writeln!(
        out,
        "ring         {} of {} experts ({}), {}",
        ring.slots,
        ring.n_experts,
        percent(Some(share)),
        Bytes(ring.slots as u64 * ring.slot_bytes)
    )?;
    writeln!(
        out,
        "routing      {} as the token before · busiest tenth has {}",
        percent(routes.overlap()),
        percent(routes.skew())
    )?;
    let curve: Vec<Coverage> = coverage(routes).take(CURVE).collect();
    let mut line = |name: &str, of: fn(&Coverage) -> Option<f64>| -> fmt::Result {
        if curve.iter().any(|point| of(point).is_some()) {
            let points: Vec<String> =
                curve.iter().map(|point| format!("{} in top {}", percent(of(point)), point.width)).collect();
            writeln!(out, "{name:<12} {}", points.join(", "))?;
        }
        Ok(())
    };
    line("next token", |point| point.before)?;
    line("next layer", |point| point.ahead)
}

/// A phase for people.
pub fn title(phase: Phase) -> &'static str {
    match phase {
        Phase::DemandWait => "demand wait",
        phase => phase.name(),
    }
}

/// A share for people, to a tenth where there is room for it.
pub fn percent(share: Option<f64>) -> String {
    match share {
        Some(share) if share >= 0.9995 => "100 %".to_owned(),
        Some(share) => format!("{:.1} %", 100.0 * share),
        None => "none".to_owned(),
    }
}

/// `share` of `columns`, to an eighth of a column.
pub fn bar(share: f64, columns: usize) -> String {
    const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (share.clamp(0.0, 1.0) * columns as f64 * 8.0).round() as usize;
    "█".repeat(eighths / 8) + PARTS[eighths % 8]
}

#[cfg(test)]
mod tests {
    use super::super::tests::{answered, tiny};
    use super::*;
    use smoe_testkit::TinyModel;

    #[test]
    fn bars_are_as_long_as_their_shares() {
        assert_eq!(bar(0.0, 10), "");
        assert_eq!(bar(1.0, 10).chars().count(), 10);
        assert_eq!(bar(0.5, 4), "██");
        assert_eq!(bar(0.53, 10), "█████▎");
        assert_eq!(bar(f64::INFINITY, 3), "███");
        assert_eq!(bar(f64::NAN, 3), "");
    }

    #[test]
    fn a_table_keeps_within_80_columns_and_names_every_phase() {
        let model = TinyModel::qwen3(5);
        let (_dir, mut engine) = tiny(&model, 9, 16);
        let mut reading = answered(&mut engine, &model.prompt(30, 1), 20);
        let small = table(&reading);
        // Numbers as long as they come.
        reading.synced.prefilled = 123_456;
        reading.synced.reused = 123_456;
        reading.prompt.time *= 100_000;
        reading.decode.time *= 2000;
        reading.n_experts = 61 * 256;
        reading.ring_slots = 9_999;
        reading.slot_bytes = 44 << 20;
        reading.decode.store.demand_hits *= 1000;
        reading.decode.tier.hits = 19 * 9_999;
        reading.decode.tier.misses = 19 * 999;
        reading.decode.tier.over_bus = 19 * 998;
        reading.decode.tier.computed = 19;
        reading.decode.tier.load_bytes = 19 << 30;
        reading.decode.store.disk_bytes *= 100_000;
        reading.decode.store.busy_ns *= 100_000;
        for text in [small.clone(), table(&reading)] {
            for line in text.lines() {
                assert!(line.chars().count() <= 80, "{line}");
            }
            let device = text.contains("998.0 read over the bus, 1.0 computed");
            assert_eq!(device, text != small, "none without a device: {text}");
            for phase in Phase::ALL.into_iter().filter(|&phase| reading.decode.phase_ns(phase) > 0) {
                assert!(text.lines().any(|line| line.starts_with(title(phase))), "{text}");
            }
        }
    }
}
