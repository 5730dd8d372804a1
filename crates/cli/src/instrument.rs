//! The instrument: where an answer's time went, and how the cache of experts fared.
//!
//! The engine counts all the time; an [`Instrument`] takes marks of its counters when an answer begins, at its first
//! token and at its end. What lies between two marks is a [`Stretch`]. A [`Reading`] has both stretches of an
//! answer, and is shown as a table, as a line of JSON, in the panel while it happens, and in the report of a
//! whole run.

pub mod panel;
mod report;
pub mod server;
mod table;

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use smoe_engine::{Engine, ExpertPath, Meters, Synced};
use smoe_meter::{Phase, PhaseSnapshot, RouteSnapshot, StoreSnapshot, TierSnapshot};

use crate::answer::Answer;
use crate::args::{InstrumentArgs, InstrumentForm};
use crate::failure::Failure;
use report::Report;

/// The counters at one time.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    at: Instant,
    store: StoreSnapshot,
    phases: PhaseSnapshot,
    tier: TierSnapshot,
}

impl Mark {
    /// Now.
    pub fn now(meters: &Meters) -> Self {
        let tier = meters.tier.as_ref().map(|tier| tier.snapshot()).unwrap_or_default();
        Self { at: Instant::now(), store: meters.store.snapshot(), phases: meters.phases.snapshot(), tier }
    }

    /// Nothing counted yet.
    fn nothing(at: Instant) -> Self {
        let (store, phases) = (StoreSnapshot::default(), PhaseSnapshot::default());
        Self { at, store, phases, tier: TierSnapshot::default() }
    }

    /// What lies between this mark and a later one.
    pub fn until(&self, later: &Self) -> Stretch {
        Stretch {
            time: later.at.saturating_duration_since(self.at),
            store: later.store - self.store,
            phases: later.phases - self.phases,
            tier: later.tier - self.tier,
        }
    }
}

/// What was done between two marks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stretch {
    /// Wall time.
    pub time: Duration,
    /// The store's counters.
    pub store: StoreSnapshot,
    /// Time by phase, of the steps that ended in it.
    pub phases: PhaseSnapshot,
    /// The counters of a device's tier of experts; nothing without one.
    pub tier: TierSnapshot,
}

impl Stretch {
    /// Time of a phase. What passed outside steps, while text was made and written or in a step that was given
    /// up, is in [`Phase::Other`]: all phases together are the wall time.
    pub fn phase_ns(&self, phase: Phase) -> u64 {
        let own = self.phases.phase_ns(phase);
        let outside = || (self.time.as_nanos() as u64).saturating_sub(self.phases.total_ns());
        if phase == Phase::Other { own + outside() } else { own }
    }

    /// A count or a time, per step; None without steps.
    pub fn per_step(&self, n: u64) -> Option<f64> {
        let steps = self.phases.steps();
        (steps > 0).then(|| n as f64 / steps as f64)
    }

    /// Steps a second.
    pub fn rate(&self) -> Option<f64> {
        self.per_step(self.time.as_nanos() as u64).filter(|ns| *ns > 0.0).map(|ns| 1e9 / ns)
    }

    /// GB/s while at least one read was under way.
    pub fn read_gb_s(&self) -> Option<f64> {
        self.store.read_bytes_per_s().map(|rate| rate / 1e9)
    }
}

/// An answer under way.
#[derive(Debug)]
pub struct Instrument {
    meters: Meters,
    start: Mark,
    first: Option<(Mark, RouteSnapshot)>,
}

impl Instrument {
    /// An answer begins.
    pub fn new(engine: &Engine) -> Self {
        let meters = engine.meters();
        let start = Mark::now(&meters);
        Self { meters, start, first: None }
    }

    /// Its first token is there; later calls are nothing.
    pub fn first_token(&mut self) {
        if self.first.is_none() {
            self.first = Some((Mark::now(&self.meters), self.meters.routes.snapshot()));
        }
    }

    /// It is over.
    pub fn finish(self, engine: &Engine, synced: Synced) -> Reading {
        let end = Mark::now(&self.meters);
        let routes = self.meters.routes.snapshot();
        let (first, before) = self.first.unwrap_or_else(|| (end, routes.clone()));
        let plan = engine.info().plan;
        Reading {
            synced,
            prompt: self.start.until(&first),
            decode: first.until(&end),
            routes: routes.since(&before),
            ring_slots: engine.ring_limit(),
            n_experts: plan.n_experts,
            slot_bytes: plan.slot_bytes,
            device_path: engine.device_tier().map(|tier| tier.plan.path),
        }
    }
}

/// What an answer cost.
#[derive(Clone, Debug)]
pub struct Reading {
    /// Prompt tokens reused and computed.
    pub synced: Synced,
    /// Up to the first token.
    pub prompt: Stretch,
    /// From the first token to the end; a step is a token.
    pub decode: Stretch,
    /// Routing from the first token on.
    pub routes: RouteSnapshot,
    /// Slots that the ring might use at the end.
    pub ring_slots: usize,
    /// Experts of the model.
    pub n_experts: usize,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// How experts come to a device, if there is one.
    pub device_path: Option<ExpertPath>,
}

impl Reading {
    /// As one object: flat keys with their units, those of bench records where they mean the same.
    pub fn to_json(&self) -> Value {
        let Self { synced, prompt, decode, .. } = self;
        let seconds = |time: Duration| time.as_secs_f64();
        let mut json = json!({
            "format": "smoe-instrument-1",
            "prompt_tokens": synced.prefilled,
            "reused_tokens": synced.reused,
            "ttft_s": seconds(prompt.time),
            "prefill_tok_s": synced.prefilled as f64 / seconds(prompt.time).max(1e-9),
            "prefill_hit_rate": prompt.store.hit_rate(),
            "prefill_disk_bytes": prompt.store.disk_bytes,
            "decode_tokens": decode.phases.steps(),
            "decode_s": seconds(decode.time),
            "decode_tok_s": decode.rate(),
            "ring_slots": self.ring_slots,
            "ring_share": self.ring_slots as f64 / self.n_experts.max(1) as f64,
        });
        if let Value::Object(json) = &mut json {
            json.extend(steps_json(decode, &self.routes, "token"));
            json.extend(self.device_path.map(|path| ("device_path".to_owned(), json!(path.name()))));
        }
        json
    }
}

/// Means of the steps of a stretch: flat keys with their units, `unit` being what a step is.
fn steps_json(work: &Stretch, routes: &RouteSnapshot, unit: &str) -> Map<String, Value> {
    let store = &work.store;
    let buckets: Map<String, Value> = Phase::ALL
        .into_iter()
        .filter_map(|phase| {
            Some((phase.name().to_owned(), json!(work.per_step(work.phase_ns(phase))? / 1e6)))
        })
        .collect();
    let coverage: Map<String, Value> = coverage(routes)
        .map(|Coverage { width, before, ahead }| (width.to_string(), json!([before, ahead])))
        .collect();
    let mut map = Map::new();
    let mut set = |key: &str, value: Value| map.insert(key.to_owned(), value);
    set("buckets_ms", buckets.into());
    set("hit_rate", json!(store.hit_rate()));
    set("demand_hits", store.demand_hits.into());
    set("demand_misses", store.demand_misses.into());
    set("disk_bytes", store.disk_bytes.into());
    set("demand_wait_gb_s", json!(work.read_gb_s()));
    set("overlap", json!(routes.overlap()));
    set("skew", json!(routes.skew()));
    set("coverage_next_token_next_layer", coverage.into());
    let each = [
        ("disk_bytes", store.disk_bytes),
        ("slot_bytes_decoded", store.decoded_bytes),
        ("hits", store.demand_hits),
        ("misses", store.demand_misses),
        ("evictions", store.evictions),
        ("ahead_hits", store.ahead_hits),
        ("ahead_late", store.ahead_late),
        ("ahead_waste", store.ahead_waste),
    ];
    for (name, count) in each {
        set(&format!("{name}_per_{unit}"), json!(work.per_step(count)));
    }
    if let Some(rate) = work.tier.hit_rate() {
        set("device_hit_rate", json!(rate));
        let each = [
            ("read_over_bus", work.tier.over_bus),
            ("computed_here", work.tier.computed),
            ("load_bytes", work.tier.load_bytes),
        ];
        for (name, count) in each {
            set(&format!("device_{name}_per_{unit}"), json!(work.per_step(count)));
        }
    }
    let decode_ms = work.per_step(store.decode_ns).map(|ns| ns / 1e6);
    set(&format!("entropy_decode_ms_per_{unit}"), json!(decode_ms));
    map
}

/// How much of a token's choice a ranking of so many experts holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coverage {
    /// Experts from the top of the ranking.
    pub width: usize,
    /// In the ranking of the token before.
    pub before: Option<f64>,
    /// In the ranking of the look-ahead.
    pub ahead: Option<f64>,
}

/// The curve, in steps of as many experts as a token uses.
pub fn coverage(routes: &RouteSnapshot) -> impl Iterator<Item = Coverage> {
    let most = routes.n_experts().min(8 * routes.top_k());
    (1..).map(|i| i * routes.top_k().max(1)).take_while(move |width| *width <= most).map(|width| Coverage {
        width,
        before: routes.coverage_before(width),
        ahead: routes.coverage_ahead(width),
    })
}

/// What a command was asked to show of its answers.
#[derive(Debug)]
pub struct Display {
    form: Option<InstrumentForm>,
    report: Option<Report>,
}

impl Display {
    /// Before the first answer: a report wants the routes written down.
    pub fn begin(args: &InstrumentArgs, engine: &mut Engine) -> Result<Self, Failure> {
        let report = args.report.as_deref().map(|path| Report::begin(path, engine)).transpose()?;
        Ok(Self { form: args.instrument, report })
    }

    /// An answer is over.
    pub fn keep(&mut self, answer: &Answer) {
        if let Some(report) = &mut self.report {
            report.keep(&answer.reading);
        }
    }

    /// Shows an answer's reading on stderr as it was asked for; the line of figures if nothing was and it is
    /// `wanted`.
    pub fn print(&self, answer: &Answer, wanted: bool) {
        match self.form {
            Some(InstrumentForm::Table) => eprint!("{}", table::table(&answer.reading)),
            Some(InstrumentForm::Json) => eprintln!("{}", answer.reading.to_json()),
            None if wanted => eprintln!("{}", answer.figures),
            None => {}
        }
    }

    /// After the last answer: writes the report.
    pub fn end(self, engine: &mut Engine) -> Result<(), Failure> {
        if let Some(report) = self.report {
            report.write(engine)?;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use smoe_engine::plan::{PlanRequest, RingSize};
    use smoe_engine::{Control, EngineOptions, Sampler, Sampling, Vault};
    use smoe_store::replay::{belady, replay};
    use smoe_testkit::TinyModel;

    /// An engine over a tiny model with a ring of `slots`, computing `chunk` prompt tokens at once.
    pub(crate) fn tiny(model: &TinyModel, slots: usize, chunk: usize) -> (tempfile::TempDir, Engine) {
        let dir = tempfile::tempdir().unwrap();
        let q4 = "q4/64".parse().unwrap();
        model.write_vault(dir.path(), [q4; 3], "q8/64".parse().unwrap());
        let plan = PlanRequest {
            memory: Some(1 << 30),
            ring: RingSize::Slots(slots),
            context: Some(256),
            chunk: Some(chunk),
            threads: Some(1),
            ..PlanRequest::default()
        };
        let vault = Vault::open(dir.path()).unwrap();
        let engine = Engine::open(&vault, &EngineOptions { plan, ..EngineOptions::default() }).unwrap();
        (dir, engine)
    }

    /// An answer of `n` tokens to `prompt`, and its reading.
    pub(crate) fn answered(engine: &mut Engine, prompt: &[u32], n: usize) -> Reading {
        let mut session = engine.open_session().unwrap();
        let mut sampler = Sampler::new(Sampling::default(), engine.spec().vocab_size).unwrap();
        sampler.begin(prompt);
        let mut instrument = Instrument::new(engine);
        let synced = engine.sync(&mut session, prompt, &mut Control::default()).unwrap();
        for i in 0..n {
            let token = engine.sample(&session, &mut sampler);
            instrument.first_token();
            if i + 1 < n {
                engine.decode(&mut session, token, &mut Control::default()).unwrap();
            }
        }
        instrument.finish(engine, synced)
    }

    #[test]
    fn buckets_are_the_wall_time_and_counts_are_the_engines() {
        let model = TinyModel::qwen3(5);
        let (_dir, mut engine) = tiny(&model, 9, 16);
        let before = engine.store_snapshot();
        let reading = answered(&mut engine, &model.prompt(24, 1), 20);
        let all = engine.store_snapshot() - before;
        let Stretch { time, store, phases, .. } = reading.decode;
        assert_eq!(phases.steps(), 19);
        let sum: u64 = Phase::ALL.into_iter().map(|phase| reading.decode.phase_ns(phase)).sum();
        assert_eq!(u128::from(sum), time.as_nanos());
        // The steps' own buckets, sampling but the first included, are in it.
        let steps: Vec<_> = engine.steps().since(0).filter(|step| step.tokens == 1).collect();
        let own: u64 = steps.iter().map(|step| step.phases.total_ns()).sum();
        assert_eq!(own, phases.total_ns());
        assert_eq!(steps.len(), 19);
        assert!(own <= sum);
        let hits: u64 = steps.iter().map(|step| step.store.demand_hits).sum();
        assert_eq!(hits, store.demand_hits);
        assert_eq!(store.demand_hits + store.demand_misses, 19 * 3 * 3);
        assert_eq!(reading.prompt.store.demand_misses + store.demand_misses, all.demand_misses);
        assert_eq!(reading.prompt.store.disk_bytes + store.disk_bytes, all.disk_bytes);

        let json = reading.to_json();
        let number = |key: &str| json[key].as_f64().unwrap();
        assert!(json.get("device_hit_rate").is_none(), "there is no device");
        assert_eq!(json["demand_misses"], store.demand_misses);
        assert_eq!(json["disk_bytes"], store.disk_bytes);
        assert!((number("misses_per_token") * 19.0 - store.demand_misses as f64).abs() < 1e-6);
        let buckets: f64 = json["buckets_ms"].as_object().unwrap().values().filter_map(Value::as_f64).sum();
        assert!((buckets * 19.0 / 1e3 - time.as_secs_f64()).abs() < 1e-6);
        assert!((number("decode_tok_s") * number("decode_s") - 19.0).abs() < 1e-6);
        assert_eq!((number("ring_slots"), json["prompt_tokens"].as_u64()), (9.0, Some(24)));
        assert_eq!(
            json["coverage_next_token_next_layer"]["6"][0].as_f64(),
            reading.routes.coverage_before(6)
        );
    }

    #[test]
    fn an_answer_of_one_token_has_no_means() {
        let model = TinyModel::qwen3(5);
        let (_dir, mut engine) = tiny(&model, 9, 16);
        let reading = answered(&mut engine, &model.prompt(5, 1), 1);
        let json = reading.to_json();
        assert!(json["decode_tok_s"].is_null() && json["disk_bytes_per_token"].is_null());
        assert_eq!(json["buckets_ms"], json!({}));
        assert!(table::table(&reading).contains("5 tokens"));
    }

    /// One expert a token, so that no two uses are of the same age and the order of arrivals decides nothing.
    #[test]
    fn replaying_a_recorded_trace_gives_the_engines_own_misses() {
        let mut model = TinyModel::qwen3(6);
        model.spec.moe.top_k = 1;
        for slots in [1, 4, 8, 21] {
            let (_dir, mut engine) = tiny(&model, slots, 1);
            assert!(engine.record_trace(true).unwrap().is_none());
            let reading = answered(&mut engine, &model.prompt(40, 2), 40);
            let trace = engine.record_trace(false).unwrap().unwrap();
            assert_eq!((trace.n_tokens(), trace.n_steps()), (79, 79));
            let score = replay(&trace, slots, &mut *smoe_engine::POLICY.build(slots, trace.n_records()));
            let store = engine.store_snapshot();
            assert_eq!((score.hits, score.misses), (store.demand_hits, store.demand_misses), "{slots} slots");
            assert!(belady(&trace, slots).hits >= score.hits);
            assert_eq!(reading.prompt.store.demand_misses + reading.decode.store.demand_misses, score.misses);
        }
    }
}
