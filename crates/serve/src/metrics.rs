//! `/metrics`: every counter as Prometheus reads them (text format 0.0.4).
//!
//! Counters of a model count since it was loaded and go with it. Times are in seconds, sizes in bytes.

use std::fmt::{Display, Write};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use smoe_engine::Load;
use smoe_engine::memory::MemoryFacts;
use smoe_engine::plan::Plan;
use smoe_meter::{Phase, PhaseSnapshot, StoreSnapshot, TierSnapshot};

use crate::AppState;
use crate::model::Model;
use crate::tally::{Histogram, Tally};

/// How long to wait for what only a model's thread can tell; a step may take longer.
const PATIENCE: Duration = Duration::from_millis(100);

/// `/metrics`.
pub(crate) fn routes() -> Router<AppState> {
    Router::new().route("/metrics", get(metrics))
}

async fn metrics(State(state): State<AppState>) -> impl IntoResponse {
    let mut seen = Vec::new();
    for model in state.fleet().loaded() {
        seen.push(Seen::look(&model, state.fleet().max_waiting()).await);
    }
    let page = page(state.tally(), &seen, &MemoryFacts::detect());
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page)
}

/// What a loaded model shows.
#[derive(Debug, Default)]
struct Seen {
    model: String,
    load: Load,
    max_waiting: usize,
    warnings: usize,
    phases: PhaseSnapshot,
    store: StoreSnapshot,
    /// If a device computes.
    tier: Option<TierSnapshot>,
    plan: Option<Plan>,
    ring_limit: Option<usize>,
}

impl Seen {
    async fn look(model: &Arc<Model>, max_waiting: usize) -> Self {
        let meters = model.meters();
        let glance = tokio::time::timeout(PATIENCE, model.runner().glance()).await;
        Self {
            model: model.listing().id.clone(),
            load: model.runner().load(),
            max_waiting,
            warnings: model.warnings().len(),
            phases: meters.map(|meters| meters.phases.snapshot()).unwrap_or_default(),
            store: meters.map(|meters| meters.store.snapshot()).unwrap_or_default(),
            tier: meters.and_then(|meters| meters.tier.as_ref()).map(|tier| tier.snapshot()),
            plan: model.info().map(|info| info.plan.clone()),
            ring_limit: glance.ok().flatten().map(|glance| glance.ring_limit),
        }
    }
}

/// A family with one sample a model: name, kind, help, value if there is one.
type Family = (&'static str, &'static str, &'static str, fn(&Seen) -> Option<f64>);

const FAMILIES: &[Family] = &[
    ("smoe_jobs_running", "gauge", "Jobs being computed.", |s| n(s.load.running)),
    ("smoe_jobs_prefilling", "gauge", "Of the running jobs, prompts not yet done.", |s| n(s.load.prefilling)),
    ("smoe_jobs_queued", "gauge", "Jobs waiting.", |s| n(s.load.queued)),
    ("smoe_jobs_running_max", "gauge", "The most jobs that run at once.", |s| n(s.load.max_running)),
    ("smoe_jobs_queued_max", "gauge", "The most jobs that wait.", |s| n(s.max_waiting)),
    ("smoe_model_warnings", "gauge", "Things that the model goes without; /health names them.", |s| {
        n(s.warnings)
    }),
    ("smoe_context_tokens", "gauge", "Positions of the longest conversation.", |s| n(s.load.context)),
    ("smoe_kv_blocks", "gauge", "Blocks of the KV cache.", |s| n(s.load.kv_blocks)),
    ("smoe_kv_blocks_used", "gauge", "Blocks that running jobs hold.", |s| n(s.load.kv_used)),
    ("smoe_kv_blocks_cached", "gauge", "Blocks that hold what finished jobs computed.", |s| {
        n(s.load.kv_cached)
    }),
    ("smoe_kv_window_blocks", "gauge", "Blocks of layers that see a window.", |s| n(s.load.kv_window_blocks)),
    ("smoe_kv_window_blocks_used", "gauge", "Those that running jobs hold.", |s| n(s.load.kv_window_used)),
    ("smoe_kv_block_tokens", "gauge", "Positions of a block.", |s| n(s.load.kv_block_tokens)),
    ("smoe_kv_file", "gauge", "1 if the KV cache has a file that is used.", |s| {
        n(usize::from(s.load.kv_has_file))
    }),
    ("smoe_kv_file_failures_total", "counter", "Reads and writes of that file that failed.", |s| {
        c(s.load.kv_file_failures)
    }),
    ("smoe_kv_blocks_lost_total", "counter", "Blocks that gave way before the file had taken them.", |s| {
        c(s.load.kv_lost)
    }),
    (
        "smoe_kv_states_lost_total",
        "counter",
        "States of linear attention that gave way before the file had taken them.",
        |s| c(s.load.kv_states_lost),
    ),
    (
        "smoe_jobs_sent_back_total",
        "counter",
        "Times that a job went back to the queue for want of room.",
        |s| c(s.load.sent_back),
    ),
    ("smoe_guessed_tokens_total", "counter", "Tokens guessed ahead.", |s| c(s.load.guessed)),
    ("smoe_guessed_right_tokens_total", "counter", "Of those, the right ones.", |s| c(s.load.accepted)),
    ("smoe_steps_total", "counter", "Steps of the engine.", |s| Some(s.phases.steps() as f64)),
    ("smoe_expert_hits_total", "counter", "Experts demanded that were in memory.", |s| {
        c(s.store.demand_hits)
    }),
    ("smoe_expert_misses_total", "counter", "Experts demanded that were not in memory.", |s| {
        c(s.store.demand_misses)
    }),
    ("smoe_expert_loads_total", "counter", "Experts read into a slot, whatever for.", |s| c(s.store.loads)),
    ("smoe_expert_evictions_total", "counter", "Experts whose slot was given to another.", |s| {
        c(s.store.evictions)
    }),
    ("smoe_expert_wait_seconds_total", "counter", "Time in which nothing demanded was ready.", |s| {
        seconds(s.store.wait_ns)
    }),
    ("smoe_ahead_loads_total", "counter", "Experts read before they were demanded.", |s| {
        c(s.store.ahead_reads)
    }),
    ("smoe_ahead_hits_total", "counter", "Experts demanded that had been read ahead.", |s| {
        c(s.store.ahead_hits)
    }),
    ("smoe_ahead_wasted_total", "counter", "Experts read ahead and evicted without a use.", |s| {
        c(s.store.ahead_waste)
    }),
    ("smoe_disk_reads_total", "counter", "Disk reads completed.", |s| c(s.store.reads)),
    ("smoe_disk_read_bytes_total", "counter", "Bytes that the disk delivered.", |s| c(s.store.disk_bytes)),
    ("smoe_disk_busy_seconds_total", "counter", "Time with at least one read under way.", |s| {
        seconds(s.store.busy_ns)
    }),
    ("smoe_disk_read_errors_total", "counter", "Disk reads that failed.", |s| c(s.store.read_errors)),
    ("smoe_record_errors_total", "counter", "Records that were damaged.", |s| {
        c(s.store.checksum_errors + s.store.decode_errors)
    }),
    ("smoe_device_expert_hits_total", "counter", "Experts asked for that the device held.", |s| {
        c(s.tier?.hits)
    }),
    ("smoe_device_expert_misses_total", "counter", "Experts asked for that it did not hold.", |s| {
        c(s.tier?.misses)
    }),
    (
        "smoe_device_over_bus_total",
        "counter",
        "Of those, read by its kernels where the ring has them.",
        |s| c(s.tier?.over_bus),
    ),
    ("smoe_device_computed_here_total", "counter", "And computed by the processor.", |s| c(s.tier?.computed)),
    ("smoe_device_loaded_bytes_total", "counter", "Bytes of experts brought to the device.", |s| {
        c(s.tier?.load_bytes)
    }),
    ("smoe_ring_slots", "gauge", "Slots for experts, as planned.", |s| n(s.plan.as_ref()?.ring_slots)),
    ("smoe_ring_limit_slots", "gauge", "Slots that may be used now.", |s| n(s.ring_limit?)),
    ("smoe_ring_resident_slots", "gauge", "Slots that hold an expert.", |s| {
        s.plan.as_ref()?;
        c(s.store.loads.saturating_sub(s.store.evictions))
    }),
    ("smoe_memory_budget_bytes", "gauge", "What the process may use.", |s| c(s.plan.as_ref()?.budget_bytes)),
    ("smoe_memory_planned_bytes", "gauge", "What the model takes when its ring is full.", |s| {
        c(s.plan.as_ref()?.total_bytes())
    }),
];

fn n(value: usize) -> Option<f64> {
    Some(value as f64)
}

fn c(value: u64) -> Option<f64> {
    Some(value as f64)
}

fn seconds(ns: u64) -> Option<f64> {
    Some(ns as f64 / 1e9)
}

fn page(tally: &Tally, models: &[Seen], memory: &MemoryFacts) -> String {
    let mut page = Page::default();
    page.family("smoe_requests_total", "counter", "Responses, by route and status.");
    for (route, status, count) in tally.requests() {
        page.sample("smoe_requests_total", &[("route", &route), ("status", &status.to_string())], count);
    }
    let totals = [
        ("smoe_answers_total", "Answers that are over.", &tally.answers),
        ("smoe_prompt_tokens_total", "Tokens of their prompts.", &tally.prompt_tokens),
        ("smoe_cached_prompt_tokens_total", "Tokens of prompts that were cached.", &tally.cached_tokens),
        ("smoe_completion_tokens_total", "Their new tokens.", &tally.completion_tokens),
    ];
    for (name, help, counter) in totals {
        page.family(name, "counter", help);
        page.sample(name, &[], counter.get());
    }
    let help = "From submission to an answer's first token.";
    page.histogram("smoe_time_to_first_token_seconds", help, &tally.first_token);
    let help = "Between two tokens; the mean of an answer counts once.";
    page.histogram("smoe_time_between_tokens_seconds", help, &tally.between_tokens);
    if let Some(available) = memory.available {
        page.family("smoe_memory_available_bytes", "gauge", "What the machine has left.");
        page.sample("smoe_memory_available_bytes", &[], available);
    }
    for &(name, kind, help, value) in FAMILIES {
        page.family(name, kind, help);
        for seen in models {
            if let Some(value) = value(seen) {
                page.sample(name, &[("model", &seen.model)], value);
            }
        }
    }
    page.family("smoe_phase_seconds_total", "counter", "Time of the engine's steps, by what it was doing.");
    for seen in models {
        for phase in Phase::ALL {
            let labels = [("model", seen.model.as_str()), ("phase", phase.name())];
            page.sample("smoe_phase_seconds_total", &labels, seen.phases.phase_ns(phase) as f64 / 1e9);
        }
    }
    page.0
}

/// The text so far. Writing to a string cannot fail.
#[derive(Debug, Default)]
struct Page(String);

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.0.push_str(name);
        for (at, (label, text)) in labels.iter().enumerate() {
            let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.0, "{}{label}=\"{text}\"", if at == 0 { '{' } else { ',' });
        }
        let _ = writeln!(self.0, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.family(name, "histogram", help);
        let counts = histogram.cumulative();
        let bounds = Histogram::BOUNDS.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(counts) {
            self.sample(&format!("{name}_bucket"), &[("le", &bound)], count);
        }
        self.sample(&format!("{name}_sum"), &[], histogram.sum_seconds());
        self.sample(&format!("{name}_count"), &[], counts[counts.len() - 1]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> MemoryFacts {
        MemoryFacts { physical: 1 << 34, cgroup_limit: None, available: Some(1 << 33) }
    }

    #[test]
    fn labels_are_escaped() {
        let mut page = Page::default();
        page.sample("a", &[("x", "q\"\\\n"), ("y", "z")], 1);
        page.sample("b", &[], 0.5);
        assert_eq!(page.0, "a{x=\"q\\\"\\\\\\n\",y=\"z\"} 1\nb 0.5\n");
    }

    /// A scraper refuses a page that breaks one of these.
    #[test]
    fn every_family_is_told_once_and_before_its_samples() {
        let tally = Tally::default();
        tally.responded("/v1/models", 200);
        tally.answered(&smoe_engine::Usage { completion: 3, ..Default::default() });
        let tier = Some(TierSnapshot { hits: 7, ..TierSnapshot::default() });
        let models = [("a", None), ("b", tier)].map(|(model, tier)| Seen {
            model: model.to_owned(),
            tier,
            ..Seen::default()
        });
        let page = page(&tally, &models, &memory());
        let mut families: Vec<(&str, &str)> = Vec::new();
        let mut samples = std::collections::HashSet::new();
        for line in page.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert!(families.iter().all(|(known, _)| *known != name), "{name} twice");
                assert_eq!(name.ends_with("_total"), kind == "counter", "{name}");
                families.push((name, kind));
            } else if !line.starts_with('#') {
                let (series, value) = line.rsplit_once(' ').unwrap();
                assert!(value.parse::<f64>().unwrap() >= 0.0, "{line}");
                assert!(samples.insert(series), "{series} twice");
                let (family, kind) = families.last().unwrap();
                let name = series.split('{').next().unwrap();
                let rest = name.strip_prefix(family).unwrap();
                assert!(rest.is_empty() || (*kind == "histogram" && rest.starts_with('_')), "{line}");
            }
        }
        assert!(samples.contains("smoe_requests_total{route=\"/v1/models\",status=\"200\"}"));
        assert!(samples.contains("smoe_time_to_first_token_seconds_bucket{le=\"+Inf\"}"));
        assert!(page.contains("smoe_device_expert_hits_total{model=\"b\"} 7\n"));
        assert!(!samples.contains("smoe_device_expert_hits_total{model=\"a\"}"), "it has no device");
        assert!(samples.contains("smoe_phase_seconds_total{model=\"b\",phase=\"demand_wait\"}"));
    }
}
