//! The instrument of a server: each time a model comes to rest, what its work since the last rest cost.
//!
//! Answers run side by side and share steps, so there is no reading of one answer; the work between two rests is whole.

use std::sync::Arc;
use std::time::Instant;

use serde_json::{Map, Value, json};
use smoe_engine::Meters;
use smoe_meter::RouteSnapshot;
use smoe_serve::fleet::Fleet;

use super::table::{Ring, server_table};
use super::{Mark, Stretch, steps_json};
use crate::args::InstrumentForm;

/// What is loaded, as far as this is concerned.
#[derive(Clone, Debug)]
struct Loaded {
    id: String,
    meters: Meters,
    ring: Ring,
    at_rest: bool,
}

/// Marks of the models that are loaded.
#[derive(Debug)]
pub struct Rests {
    fleet: Arc<Fleet>,
    form: InstrumentForm,
    marks: Marks,
}

impl Rests {
    /// Nothing is marked yet.
    pub fn new(fleet: Arc<Fleet>, form: InstrumentForm) -> Self {
        Self { fleet, form, marks: Marks { known: Vec::new(), looked: Instant::now() } }
    }

    /// Looks at every model, and shows on stderr the work of those that have come to rest, or were unloaded, since it last
    /// looked: to be called some times a second. What passed between the last look at rest and the first step is in the
    /// bucket `other`; a model's first work has its loading's reads in it.
    pub fn look(&mut self) {
        let loaded = self.fleet.loaded().into_iter().filter_map(|model| {
            let (meters, plan) = (model.meters()?.clone(), &model.info()?.plan);
            let ring =
                Ring { slots: plan.ring_slots, n_experts: plan.n_experts, slot_bytes: plan.slot_bytes };
            let load = model.runner().load();
            let at_rest = load.running + load.queued == 0;
            Some(Loaded { id: model.listing().id.clone(), meters, ring, at_rest })
        });
        for work in self.marks.look(&loaded.collect::<Vec<_>>()) {
            show(self.form, &work);
        }
    }

    /// The last look: what is still under way is shown as far as it came.
    pub fn end(mut self) {
        self.look();
        for work in self.marks.look(&[]) {
            show(self.form, &work);
        }
    }
}

/// Work of a model between two rests.
#[derive(Debug)]
struct Work {
    model: String,
    stretch: Stretch,
    routes: RouteSnapshot,
    ring: Ring,
}

/// A model that was seen before.
#[derive(Debug)]
struct Known {
    model: Loaded,
    /// When it was last seen at rest, or before it was loaded.
    mark: Mark,
    routes: Option<RouteSnapshot>,
}

impl Known {
    /// What was done since the mark, if anything was.
    fn work(&mut self) -> Option<Work> {
        let meters = &self.model.meters;
        let (mark, routes) = (Mark::now(meters), meters.routes.snapshot());
        let stretch = self.mark.until(&mark);
        let since = self.routes.as_ref().map_or_else(|| routes.clone(), |before| routes.since(before));
        (self.mark, self.routes) = (mark, Some(routes));
        let Loaded { id, ring, .. } = &self.model;
        (stretch.phases.steps() > 0).then(|| Work { model: id.clone(), stretch, routes: since, ring: *ring })
    }
}

#[derive(Debug)]
struct Marks {
    known: Vec<Known>,
    looked: Instant,
}

impl Marks {
    /// The work that has come to its end since the last look.
    fn look(&mut self, loaded: &[Loaded]) -> Vec<Work> {
        let mut done = Vec::new();
        // The same engine: one that was loaded again has other counters.
        let is = |known: &Known, model: &Loaded| Arc::ptr_eq(&known.model.meters.store, &model.meters.store);
        for gone in self.known.extract_if(.., |known| !loaded.iter().any(|model| is(known, model))) {
            done.extend({ gone }.work());
        }
        for model in loaded {
            let at = self.known.iter().position(|known| is(known, model)).unwrap_or_else(|| {
                let mark = Mark::nothing(self.looked);
                self.known.push(Known { model: model.clone(), mark, routes: None });
                self.known.len() - 1
            });
            if model.at_rest {
                done.extend(self.known[at].work());
            }
        }
        self.looked = Instant::now();
        done
    }
}

fn show(form: InstrumentForm, work: &Work) {
    let Work { model, stretch, routes, ring } = work;
    match form {
        InstrumentForm::Table => eprint!("{}", server_table(model, stretch, routes, *ring)),
        InstrumentForm::Json => eprintln!("{}", Value::Object(to_json(model, stretch, routes, *ring))),
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
    use std::slice;
    use std::time::Duration;

    use smoe_meter::{Phase, PhaseClock};
    use smoe_testkit::TinyModel;

    use super::super::tests::{answered, tiny};
    use super::*;

    #[test]
    fn work_of_a_server_adds_up_and_fits_its_table() {
        let model = TinyModel::qwen3(5);
        let (_dir, mut engine) = tiny(&model, 9, 16);
        let meters = engine.meters();
        let ring = Ring { slots: 9, n_experts: 21, slot_bytes: 1 << 20 };
        let loaded = Loaded { id: "tiny".to_owned(), meters, ring, at_rest: true };
        let mut marks = Marks { known: Vec::new(), looked: Instant::now() };
        assert!(marks.look(slice::from_ref(&loaded)).is_empty());
        answered(&mut engine, &model.prompt(24, 1), 20);
        let mut done = marks.look(slice::from_ref(&loaded));
        assert!(marks.look(&[loaded]).is_empty());
        let Work { stretch: work, routes, .. } = done.pop().unwrap();
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

    /// A model that does `n` steps when it is asked to.
    fn scripted(id: &str) -> (Loaded, impl FnMut(usize)) {
        let meters = Meters {
            tier: None,
            phases: Arc::default(),
            store: Arc::default(),
            routes: Arc::new(smoe_meter::RouteMeter::new(1, 4, 2)),
        };
        let mut clock = PhaseClock::new(meters.phases.clone());
        let work = move |n| {
            for _ in 0..n {
                clock.begin_step();
                clock.switch(Phase::Experts);
                clock.end_step();
            }
        };
        let ring = Ring { slots: 4, n_experts: 4, slot_bytes: 1 };
        (Loaded { id: id.to_owned(), meters, ring, at_rest: true }, work)
    }

    #[test]
    fn every_step_is_shown_once_whatever_is_loaded_and_unloaded() {
        let mut marks = Marks { known: Vec::new(), looked: Instant::now() };
        let steps = |works: Vec<Work>| -> Vec<(String, u64)> {
            works.into_iter().map(|work| (work.model, work.stretch.phases.steps())).collect()
        };
        let shown = |id: &str, n: u64| vec![(id.to_owned(), n)];
        let (a, mut work_a) = scripted("a");
        // Done before it was first seen.
        work_a(2);
        assert_eq!(steps(marks.look(slice::from_ref(&a))), shown("a", 2));
        // At work, then at rest.
        work_a(3);
        let busy = Loaded { at_rest: false, ..a.clone() };
        assert_eq!(steps(marks.look(&[busy])), []);
        work_a(1);
        let (b, mut work_b) = scripted("b");
        assert_eq!(steps(marks.look(&[a.clone(), b.clone()])), shown("a", 4));
        // Unloaded right after its work; loaded again under the same name, with counters from nothing.
        work_a(5);
        let (again, mut work_again) = scripted("a");
        work_again(1);
        work_b(7);
        let mut done = steps(marks.look(&[again, b]));
        done.sort();
        assert_eq!(done, [shown("a", 1), shown("a", 5), shown("b", 7)].concat());
        // The end.
        work_again(2);
        assert_eq!(steps(marks.look(&[])), shown("a", 2));
        assert_eq!(steps(marks.look(&[])), []);
    }
}
