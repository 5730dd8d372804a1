//! `/smoe/instrument`: what the server is doing, a few times a second, for the console's panel.
//!
//! Each client has its own view: the figures of an event are those since its last one. What the engine counts
//! is read from its meters while it works; what only its thread can tell is asked for, and shown when it
//! comes.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::response::sse::{Event, Sse};
use axum::routing::get;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use futures_util::{Stream, StreamExt};
use serde_json::{Map, Value as Json, json};
use smoe_engine::memory::MemoryFacts;
use smoe_engine::plan::Plan;
use smoe_engine::{Load, Meters};
use smoe_meter::{Phase, PhaseSnapshot, RouteSnapshot, StoreSnapshot};
use tokio::task::JoinHandle;

use crate::AppState;
use crate::fleet::Loading;
use crate::runner::Glance;

/// Between two looks, and between two events while something runs.
const TICK: Duration = Duration::from_millis(250);
/// Between two events while nothing does.
const IDLE: Duration = Duration::from_secs(2);
/// How long an event waits for the model's thread.
const PATIENCE: Duration = Duration::from_millis(20);

/// `/smoe/instrument`.
pub(crate) fn routes() -> Router<AppState> {
    Router::new().route("/smoe/instrument", get(instrument))
}

async fn instrument(State(state): State<AppState>) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let draining = state.draining();
    let events = futures_util::stream::unfold(Watch::new(state), |mut watch| async {
        let event = watch.next().await;
        Some((Ok(Event::default().data(event.to_string())), watch))
    });
    Sse::new(events.take_until(draining))
}

/// One client's view.
struct Watch {
    state: AppState,
    /// When the last event was.
    last: Option<Instant>,
    before: Option<Reading>,
    asked: Option<JoinHandle<Option<Glance>>>,
    glance: Option<Glance>,
}

/// Everything that only grows, at one time.
struct Reading {
    model: String,
    at: Instant,
    tokens: u64,
    phases: PhaseSnapshot,
    store: StoreSnapshot,
    routes: RouteSnapshot,
}

impl Reading {
    fn now(model: &str, tokens: u64, meters: &Meters) -> Self {
        Self {
            model: model.to_owned(),
            at: Instant::now(),
            tokens,
            phases: meters.phases.snapshot(),
            store: meters.store.snapshot(),
            routes: meters.routes.snapshot(),
        }
    }
}

impl Watch {
    fn new(state: AppState) -> Self {
        Self { state, last: None, before: None, asked: None, glance: None }
    }

    /// The next event, when it is due.
    async fn next(&mut self) -> Json {
        loop {
            if self.last.is_some() {
                tokio::time::sleep(TICK).await;
            }
            let loading = self.state.fleet().loading().borrow().clone();
            let model = self.state.fleet().loaded().pop();
            let load = model.as_ref().map(|model| model.runner().load()).unwrap_or_default();
            let busy = loading.is_some() || load.running + load.queued > 0;
            if !busy && self.last.is_some_and(|last| last.elapsed() < IDLE) {
                continue;
            }
            self.last = Some(Instant::now());
            let mut event = head(loading.as_ref(), &load);
            let Some(model) = model else { return Json::Object(event) };
            let id = &model.listing().id;
            event.insert("model".to_owned(), id.as_str().into());
            if self.before.as_ref().is_some_and(|before| before.model != *id) {
                (self.before, self.glance, self.asked) = (None, None, None);
            }
            let asked = self.asked.get_or_insert_with(|| {
                let model = model.clone();
                tokio::spawn(async move { model.runner().glance().await })
            });
            if let Ok(answer) = tokio::time::timeout(PATIENCE, asked).await {
                self.asked = None;
                self.glance = answer.ok().flatten();
            }
            if let Some(meters) = model.meters() {
                let now = Reading::now(id, self.state.tally().tokens.get(), meters);
                let before = self.before.as_ref().unwrap_or(&now);
                event.extend(figures(before, &now));
                event.insert("atlas".to_owned(), atlas(before, &now, self.glance.as_ref()));
                self.before = Some(now);
            }
            if let Some(info) = model.info() {
                let limit = self.glance.as_ref().map_or(info.plan.ring_slots, |glance| glance.ring_limit);
                let store = self.before.as_ref().map(|now| now.store).unwrap_or_default();
                let held = store.loads.saturating_sub(store.evictions);
                event.insert("ring".to_owned(), json!({"slots": held, "limit": limit}));
                event.insert("memory".to_owned(), memory(&info.plan, limit, &MemoryFacts::detect()));
            }
            return Json::Object(event);
        }
    }
}

/// What is going on.
fn head(loading: Option<&Loading>, load: &Load) -> Map<String, Json> {
    let state = match loading {
        Some(_) => "loading",
        None if load.running + load.queued > 0 => "running",
        None => "idle",
    };
    let mut event = Map::new();
    event.insert("model".to_owned(), loading.map_or("", |loading| &loading.id).into());
    event.insert("state".to_owned(), state.into());
    if let Some(loading) = loading {
        event.insert("loading".to_owned(), json!({"done": loading.done, "total": loading.total}));
    }
    event.insert("running".to_owned(), load.running.into());
    event.insert("queued".to_owned(), load.queued.into());
    event.insert("context".to_owned(), load.context.into());
    let kv = json!({"blocks": load.kv_blocks, "used": load.kv_used, "cached": load.kv_cached});
    event.insert("kv".to_owned(), kv);
    event
}

/// Rates and means between two readings.
fn figures(before: &Reading, now: &Reading) -> Map<String, Json> {
    let seconds = (now.at - before.at).as_secs_f64();
    let rate = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
    let tokens = now.tokens.saturating_sub(before.tokens) as f64;
    let (phases, store) = (now.phases - before.phases, now.store - before.store);
    let step = |phase| {
        let steps = phases.steps().max(1) as f64;
        (phase_name(phase), Json::from(phases.phase_ns(phase) as f64 / 1e6 / steps))
    };
    let mut figures = Map::new();
    figures.insert("tok_s".to_owned(), rate(tokens).into());
    figures.insert("step_ms".to_owned(), Json::Object(Phase::ALL.into_iter().map(step).collect()));
    figures.insert("hit_rate".to_owned(), store.hit_rate().into());
    figures.insert("disk_gb_s".to_owned(), rate(store.disk_bytes as f64 / 1e9).into());
    let each = (tokens > 0.0).then(|| store.disk_bytes as f64 / tokens);
    figures.insert("disk_bytes_per_token".to_owned(), each.into());
    figures
}

fn phase_name(phase: Phase) -> String {
    phase.name().to_owned()
}

/// Uses of each expert between two readings, and which are in memory.
fn atlas(before: &Reading, now: &Reading, glance: Option<&Glance>) -> Json {
    let routes = now.routes.since(&before.routes);
    let uses = routes.layers().flatten();
    let uses: Vec<u8> = uses.flat_map(|&n| u16::try_from(n).unwrap_or(u16::MAX).to_le_bytes()).collect();
    json!({
        "layers": routes.layers().count(),
        "experts": routes.n_experts(),
        "uses": BASE64.encode(uses),
        "resident": BASE64.encode(glance.map_or(&[][..], |glance| &glance.resident)),
    })
}

/// Memory by the plan, less the slots that were given back; short of it is who had to give some.
fn memory(plan: &Plan, limit: usize, facts: &MemoryFacts) -> Json {
    let given_back = plan.ring_slots.saturating_sub(limit);
    let pressure = match given_back {
        0 => "ok",
        _ if limit <= plan.ring_floor => "critical",
        _ => "tight",
    };
    json!({
        "budget_bytes": plan.budget_bytes,
        "used_bytes": plan.total_bytes().saturating_sub(given_back as u64 * plan.slot_bytes),
        "available_bytes": facts.available,
        "pressure": pressure,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use smoe_meter::{PhaseClock, PhaseMeter, RouteMeter, StoreMeter};
    use std::sync::Arc;

    fn meters() -> Meters {
        Meters {
            tier: None,
            phases: Arc::new(PhaseMeter::default()),
            store: Arc::new(StoreMeter::default()),
            routes: Arc::new(RouteMeter::new(2, 3, 1)),
        }
    }

    #[test]
    fn figures_are_those_of_the_interval() {
        let meters = meters();
        meters.store.demand_hits.add(100);
        meters.routes.used(0, 1, 5);
        let before = Reading::now("m", 10, &meters);
        meters.store.demand_hits.add(3);
        meters.store.demand_misses.add(1);
        meters.store.disk_bytes.add(4_000_000_000);
        meters.routes.used(1, 2, 70_000);
        PhaseClock::new(meters.phases.clone()).charge(Phase::Experts, Duration::from_millis(30));
        let now = Reading { at: before.at + Duration::from_secs(2), ..Reading::now("m", 14, &meters) };
        let figures = figures(&before, &now);
        assert_eq!(figures["tok_s"], 2.0);
        assert_eq!(figures["hit_rate"], 0.75);
        assert_eq!(figures["disk_gb_s"], 2.0);
        assert_eq!(figures["disk_bytes_per_token"], 1e9);
        assert_eq!(figures["step_ms"]["experts"], 30.0);
        let glance = Glance { resident: vec![0b10_0001], ring_limit: 2 };
        let atlas = atlas(&before, &now, Some(&glance));
        assert_eq!((&atlas["layers"], &atlas["experts"]), (&json!(2), &json!(3)));
        let uses = BASE64.decode(atlas["uses"].as_str().unwrap()).unwrap();
        assert_eq!(
            uses,
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255],
            "16 bits each, the last as many as they hold"
        );
        assert_eq!(BASE64.decode(atlas["resident"].as_str().unwrap()).unwrap(), [0b10_0001]);
    }

    #[test]
    fn nothing_happened_in_no_time() {
        let now = Reading::now("m", 10, &meters());
        let figures = figures(&now, &now);
        assert_eq!((&figures["tok_s"], &figures["hit_rate"]), (&json!(0.0), &Json::Null));
        assert_eq!(figures["disk_bytes_per_token"], Json::Null);
    }

    #[test]
    fn loading_is_told_before_anything_else() {
        let loading = Loading { id: "q4".to_owned(), done: 3, total: 7 };
        let load = Load { running: 1, queued: 2, ..Load::default() };
        let event = head(Some(&loading), &load);
        assert_eq!((&event["state"], &event["model"]), (&json!("loading"), &json!("q4")));
        assert_eq!(event["loading"], json!({"done": 3, "total": 7}));
        assert_eq!(head(None, &load)["state"], "running");
        assert_eq!(head(None, &Load::default())["state"], "idle");
    }
}
