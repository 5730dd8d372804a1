//! The instrument of a server: each time a model comes to rest, what its work since the last rest cost.
//!
//! Answers run side by side and share steps, so there is no reading of one answer; the work between two rests is whole.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Map, Value, json};
use smoe_engine::Meters;
use smoe_meter::RouteSnapshot;
use smoe_serve::fleet::Fleet;

use super::table::{Ring, server_table};
use super::{Mark, Stretch, steps_json};
use crate::args::InstrumentForm;

/// Marks of the models that are loaded.
#[derive(Debug)]
pub struct Rests {
    fleet: Arc<Fleet>,
    form: InstrumentForm,
    /// When each was last seen at rest, or before it was loaded.
    marks: HashMap<String, (Mark, Option<RouteSnapshot>)>,
    looked: Instant,
}

impl Rests {
    /// Nothing is marked yet.
    pub fn new(fleet: Arc<Fleet>, form: InstrumentForm) -> Self {
        Self { fleet, form, marks: HashMap::new(), looked: Instant::now() }
    }

    /// Looks at every model, and shows on stderr the work of those that have come to rest since it last looked: to be called
    /// some times a second. What passed between the last look at rest and the first step is in the bucket `other`; a model's first work
    /// has its loading's reads in it.
    pub fn look(&mut self) {
        let models = self.fleet.loaded();
        self.marks.retain(|id, _| models.iter().any(|model| model.listing().id == *id));
        for model in models {
            let (Some(meters), Some(info)) = (model.meters(), model.info()) else { continue };
            let id = &model.listing().id;
            let unknown = || (Mark::nothing(self.looked), None);
            let (before, routes_before) = self.marks.entry(id.clone()).or_insert_with(unknown);
            let load = model.runner().load();
            if load.running + load.queued > 0 {
                continue;
            }
            let plan = &info.plan;
            let ring =
                Ring { slots: plan.ring_slots, n_experts: plan.n_experts, slot_bytes: plan.slot_bytes };
            let (mark, routes) = now(meters);
            let work = before.until(&mark);
            if work.phases.steps() > 0 {
                let routes =
                    routes_before.as_ref().map_or_else(|| routes.clone(), |before| routes.since(before));
                show(self.form, id, &work, &routes, ring);
            }
            (*before, *routes_before) = (mark, Some(routes));
        }
        self.looked = Instant::now();
    }
}

fn now(meters: &Meters) -> (Mark, RouteSnapshot) {
    (Mark::now(meters), meters.routes.snapshot())
}

fn show(form: InstrumentForm, model: &str, work: &Stretch, routes: &RouteSnapshot, ring: Ring) {
    match form {
        InstrumentForm::Table => eprint!("{}", server_table(model, work, routes, ring)),
        InstrumentForm::Json => eprintln!("{}", Value::Object(to_json(model, work, routes, ring))),
    }
}

/// As one object: flat keys with their units, those of an answer's reading where they mean the same.
fn to_json(model: &str, work: &Stretch, routes: &RouteSnapshot, ring: Ring) -> Map<String, Value> {
    let mut map = steps_json(work, routes, "step");
    map.insert("format".to_owned(), "smoe-instrument-server-1".into());
    map.insert("model".to_owned(), model.into());
    map.insert("steps".to_owned(), work.phases.steps().into());
    map.insert("work_s".to_owned(), json!(work.time.as_secs_f64()));
    map.insert("ring_slots".to_owned(), ring.slots.into());
    map.insert("ring_share".to_owned(), json!(ring.slots as f64 / ring.n_experts.max(1) as f64));
    map
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use smoe_meter::Phase;
    use smoe_testkit::TinyModel;

    use super::super::tests::{answered, tiny};
    use super::*;

    #[test]
    fn work_of_a_server_adds_up_and_fits_its_table() {
        let model = TinyModel::qwen3(5);
        let (_dir, mut engine) = tiny(&model, 9, 16);
        let meters = engine.meters();
        let (before, routes) = now(&meters);
        answered(&mut engine, &model.prompt(24, 1), 20);
        let (after, later) = now(&meters);
        let (work, routes) = (before.until(&after), later.since(&routes));
        let ring = Ring { slots: 9, n_experts: 21, slot_bytes: 1 << 20 };
        let json = to_json("tiny", &work, &routes, ring);
        // A prompt of 24 in chunks of 16, then 19 tokens one by one.
        assert_eq!(json["steps"], 21);
        let buckets = json["buckets_ms"].as_object().unwrap();
        let sum: f64 = buckets.values().filter_map(Value::as_f64).sum();
        let wall = Duration::from_secs_f64(json["work_s"].as_f64().unwrap());
        assert!((sum * 21.0 / 1e3 - wall.as_secs_f64()).abs() < 1e-6);
        let misses = json["misses_per_step"].as_f64().unwrap() * 21.0;
        assert!((misses - json["demand_misses"].as_f64().unwrap()).abs() < 1e-6);
        let long = "a-vault-whose-directory-has-a-name-that-is-longer-than-any-line-of-a-table-may-be";
        let text = server_table(long, &work, &routes, ring);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains("21 steps") && text.contains("ms a step: the wall time"), "{text}");
        for phase in Phase::ALL.into_iter().filter(|&phase| work.phase_ns(phase) > 0) {
            assert!(text.lines().any(|line| line.starts_with(super::super::table::title(phase))), "{text}");
        }
    }
}
