//! The report: one page about a whole run, whole in itself, for a browser.
//!
//! While it is wanted the engine writes down how every token is routed; at the end the trace is replayed for rings of
//! other sizes. The page asks nothing of any server, works without its little script, and every picture has
//! its numbers in a table below.

mod charts;
mod html;

use std::path::{Path, PathBuf};

use smoe_engine::plan::Bytes;
use smoe_engine::{DirectIo, Engine, EngineInfo};
use smoe_format::ModelSpec;
use smoe_meter::{Phase, RouteSnapshot, Step, StoreSnapshot};
use smoe_store::replay::{Trace, belady, replay};

use super::table::{percent, title};
use super::{Coverage, Reading, Stretch, coverage};
use crate::bench::machine;
use crate::failure::Failure;
use crate::progress;
use charts::{Column, MapRow, RingPoint, SHADES, number};
use html::Html;

/// Most expert ids that are replayed, the last ones of a longer trace: a few seconds of work.
const REPLAYED_IDS: usize = 2_000_000;
/// Sizes of the ring that are tried, as shares of all experts.
const RINGS: [f64; 11] = [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0];

/// What is kept for a report while answers are made.
#[derive(Debug)]
pub struct Report {
    path: PathBuf,
    /// Of each answer.
    readings: Vec<Reading>,
    /// Steps before the first answer.
    first_step: u64,
    store: StoreSnapshot,
    routes: RouteSnapshot,
}

impl Report {
    /// From here on; the file is tried now, rather than after an hour's work.
    pub fn begin(path: &Path, engine: &mut Engine) -> Result<Self, Failure> {
        std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(|e| Failure::new(format!("cannot write the report to {}: {e}", path.display())))?;
        engine.record_trace(true)?;
        Ok(Self {
            path: path.to_owned(),
            readings: Vec::new(),
            first_step: engine.steps().pushed(),
            store: engine.store_snapshot(),
            routes: engine.route_snapshot(),
        })
    }

    /// One more answer.
    pub fn keep(&mut self, reading: &Reading) {
        self.readings.push(reading.clone());
    }

    /// Writes the page.
    pub fn write(self, engine: &mut Engine) -> Result<(), Failure> {
        let trace = engine.record_trace(false)?;
        let spinner = progress::spinner("replaying the routes for other rings");
        let page = page(&Run::of(&self, engine, trace.as_ref()));
        spinner.finish_and_clear();
        std::fs::write(&self.path, page)
            .map_err(|e| Failure::new(format!("cannot write the report to {}: {e}", self.path.display())))?;
        eprintln!("report: {}", self.path.display());
        Ok(())
    }
}

/// Everything that the page is about.
struct Run<'a> {
    spec: ModelSpec,
    info: EngineInfo,
    readings: &'a [Reading],
    /// Decoding, over all answers.
    decode: Stretch,
    /// Everything, prompts included.
    store: StoreSnapshot,
    routes: RouteSnapshot,
    /// Steps of one token that are still known.
    steps: Vec<Step>,
    ring_slots: usize,
    rings: Vec<RingPoint>,
    /// Tokens that were replayed.
    replayed: u64,
    /// Whether each expert is in the ring, a row per MoE layer.
    resident: Vec<Vec<bool>>,
}

impl<'a> Run<'a> {
    fn of(report: &'a Report, engine: &Engine, trace: Option<&Trace>) -> Self {
        let spec = engine.spec().clone();
        let ring_slots = engine.ring_limit();
        let trace = trace.filter(|trace| trace.n_steps() > 0).and_then(last_part);
        let rings = trace.as_ref().map(|trace| ring_points(trace, ring_slots, spec.moe.top_k));
        let mut resident = vec![vec![false; spec.moe.n_experts]; spec.moe_layers().count()];
        let row_of: Vec<usize> = spec.moe_layers().collect();
        engine.residency(&mut |key, is_in| {
            let row = row_of.iter().position(|layer| *layer == key.layer as usize);
            if let Some(cell) = row.and_then(|row| resident[row].get_mut(key.expert as usize)) {
                *cell = is_in;
            }
        });
        let sum = |stretches: &mut dyn Iterator<Item = Stretch>| stretches.reduce(plus).unwrap_or_default();
        Self {
            info: engine.info(),
            readings: &report.readings,
            decode: sum(&mut report.readings.iter().map(|reading| reading.decode)),
            store: engine.store_snapshot() - report.store,
            routes: engine.route_snapshot().since(&report.routes),
            steps: engine.steps().since(report.first_step).filter(|step| step.tokens == 1).copied().collect(),
            ring_slots,
            rings: rings.unwrap_or_default(),
            replayed: trace.map_or(0, |trace| trace.n_tokens()),
            resident,
            spec,
        }
    }
}

fn plus(a: Stretch, b: Stretch) -> Stretch {
    let (store, phases) = (a.store + b.store, a.phases + b.phases);
    Stretch { time: a.time + b.time, store, phases, tier: a.tier + b.tier }
}

/// The last steps of a trace, as many as are replayed.
fn last_part(trace: &Trace) -> Option<Trace> {
    let [layers, experts, top_k] = [trace.n_layers(), trace.n_experts(), trace.top_k()].map(|n| n as u32);
    let mut left =
        (trace.n_tokens() as usize * trace.n_layers() * trace.top_k()).saturating_sub(REPLAYED_IDS);
    let mut part = Trace::new(layers, experts, top_k).ok()?;
    for (tokens, ids) in trace.steps() {
        if left == 0 {
            part.push(tokens, ids).ok()?;
        }
        left = left.saturating_sub(ids.len());
    }
    Some(part)
}

fn ring_points(trace: &Trace, present: usize, least: usize) -> Vec<RingPoint> {
    let all = trace.n_records();
    let mut sizes: Vec<usize> = RINGS.iter().map(|share| (share * all as f64).round() as usize).collect();
    // The present ring takes the place of what is nearly as large.
    sizes.retain(|slots| slots.abs_diff(present) > all / 64 && (least..=all).contains(slots));
    sizes.push(present.clamp(1, all.max(1)));
    sizes.sort_unstable();
    sizes.dedup();
    let point = |slots| RingPoint {
        slots,
        policy: replay(trace, slots, &mut *smoe_engine::POLICY.build(slots, all)).hit_rate(),
        belady: belady(trace, slots).hit_rate(),
    };
    sizes.into_iter().map(point).collect()
}

/// The page.
fn page(run: &Run<'_>) -> String {
    let mut html = Html::default();
    let name = format!("S-MoE report: {}", run.spec.model_type);
    html.within("html", &[("lang", "en")], |html| {
        html.within("head", &[], |html| {
            html.void("meta", &[("charset", "utf-8")]);
            html.void("meta", &[("name", "viewport"), ("content", "width=device-width, initial-scale=1")]);
            html.leaf("title", &[], &name);
            html.within("style", &[], |html| html.raw(include_str!("report/page.css")));
        });
        html.within("body", &[], |html| {
            html.within("main", &[], |html| body(html, run));
            html.void_tip();
            html.within("script", &[], |html| html.raw(include_str!("report/page.js")));
        });
    });
    html.finish()
}

fn body(html: &mut Html, run: &Run<'_>) {
    let Run { spec, info, .. } = run;
    let share = run.ring_slots as f64 / info.plan.n_experts.max(1) as f64;
    html.leaf("h1", &[], &format!("{}, as it ran", spec.model_type));
    html.leaf(
        "p",
        &[("class", "lead")],
        &format!(
            "{} layers, {} of them with {} experts, {} for a token. The ring had room for {} of all {} experts ({}).",
            spec.n_layers(),
            run.resident.len(),
            spec.moe.n_experts,
            spec.moe.top_k,
            run.ring_slots,
            info.plan.n_experts,
            percent(Some(share)),
        ),
    );
    headline(html, run);
    time(html, run);
    html.within("div", &[("class", "pair")], |html| {
        hits(html, run);
        covered(html, run);
    });
    maps(html, run);
    answers(html, run);
    facts(html, run);
    html.leaf("footer", &[], &format!("smoe {} ({})", env!("CARGO_PKG_VERSION"), env!("SMOE_COMMIT")));
}

fn headline(html: &mut Html, run: &Run<'_>) {
    let decode = &run.decode;
    let prefilled: usize = run.readings.iter().map(|reading| reading.synced.prefilled).sum();
    let prompts: f64 = run.readings.iter().map(|reading| reading.prompt.time.as_secs_f64()).sum();
    let wait = decode.phase_ns(Phase::DemandWait) as f64 / decode.time.as_nanos().max(1) as f64;
    let bytes = decode.per_step(decode.store.disk_bytes);
    let none = || ("–".to_owned(), "");
    let value = |value: Option<f64>, unit| value.map_or_else(none, |v| (number(v), unit));
    let tiles: [(&str, (String, &str), String); 6] = [
        ("decode", value(decode.rate(), "tok/s"), format!("{} tokens decoded", decode.phases.steps())),
        (
            "first token",
            value((!run.readings.is_empty()).then(|| prompts / run.readings.len() as f64), "s"),
            match run.readings.len() {
                1 => format!("after {prefilled} prompt tokens"),
                n => {
                    format!("mean of {n}, after {} prompt tokens", number(prefilled as f64 / n.max(1) as f64))
                }
            },
        ),
        (
            "prefill",
            value((prompts > 0.0).then(|| prefilled as f64 / prompts), "tok/s"),
            format!("{prefilled} tokens computed"),
        ),
        (
            "hit rate",
            value(decode.store.hit_rate().map(|rate| 100.0 * rate), "%"),
            "of experts asked for when decoding".to_owned(),
        ),
        (
            "disk",
            value(bytes.map(|bytes| bytes / 1e6), "MB/token"),
            match decode.read_gb_s() {
                Some(rate) => format!("{} GB/s while reads were under way", number(rate)),
                None => "nothing was read".to_owned(),
            },
        ),
        (
            "waiting",
            value((decode.phases.steps() > 0).then_some(100.0 * wait), "%"),
            "of decoding's time, for the disk".to_owned(),
        ),
    ];
    html.within("div", &[("class", "tiles")], |html| {
        for (what, (value, unit), note) in tiles {
            html.within("div", &[("class", "tile")], |html| {
                html.leaf("span", &[("class", "what")], what);
                html.within("b", &[], |html| {
                    html.text(&value);
                    html.leaf("small", &[], &format!(" {unit}"));
                });
                html.leaf("span", &[], &note);
            });
        }
    });
}

fn section(html: &mut Html, name: &str, says: &str, inner: impl FnOnce(&mut Html)) {
    html.within("section", &[], |html| {
        html.leaf("h2", &[], name);
        html.leaf("p", &[("class", "say")], says);
        inner(html);
    });
}

/// A table behind a line that opens it.
fn figures(html: &mut Html, summary: &str, heads: &[&str], rows: &mut dyn Iterator<Item = Vec<String>>) {
    html.within("details", &[], |html| {
        html.leaf("summary", &[], summary);
        html.within("div", &[("class", "scroll")], |html| table(html, heads, rows));
    });
}

fn table(html: &mut Html, heads: &[&str], rows: &mut dyn Iterator<Item = Vec<String>>) {
    html.within("table", &[("class", "figures")], |html| {
        html.within("tr", &[], |html| {
            heads.iter().for_each(|head| html.leaf("th", &[("class", "number")], head));
        });
        for row in rows {
            html.within("tr", &[], |html| {
                row.iter().for_each(|cell| html.leaf("td", &[("class", "number")], cell));
            });
        }
    });
}

fn time(html: &mut Html, run: &Run<'_>) {
    let decode = &run.decode;
    let Some(token_ns) = decode.per_step(decode.time.as_nanos() as u64) else { return };
    let says = format!(
        "A decoded token took {} ms of wall time on average; these are its parts, and together they are all of it.",
        number(token_ns / 1e6)
    );
    section(html, "Where a token's time went", &says, |html| {
        let most = Phase::ALL.into_iter().map(|phase| decode.phase_ns(phase)).max().unwrap_or(0).max(1);
        html.within("table", &[("class", "buckets")], |html| {
            for phase in Phase::ALL {
                let ns = decode.phase_ns(phase);
                let class = format!("p-{}", phase.name());
                html.within("tr", &[], |html| {
                    html.within("th", &[], |html| {
                        html.leaf("span", &[("class", &format!("swatch {class}"))], "");
                        html.text(title(phase));
                    });
                    let ms = decode.per_step(ns).unwrap_or(0.0) / 1e6;
                    html.leaf("td", &[("class", "number")], &format!("{ms:.3} ms"));
                    let share = ns as f64 / decode.time.as_nanos().max(1) as f64;
                    html.leaf("td", &[("class", "number")], &percent(Some(share)));
                    html.within("td", &[("class", "track")], |html| {
                        let width = format!("width:{:.2}%", 100.0 * ns as f64 / most as f64);
                        html.leaf("span", &[("class", &format!("fill {class}")), ("style", &width)], "");
                    });
                });
            }
        });
        let columns = Column::of(&run.steps);
        let Some(first) = columns.first() else { return };
        let each = match first.tokens {
            1 => "each column is a token".to_owned(),
            n => format!("each column is the mean of {n} tokens"),
        };
        let says = format!(
            "Token by token, in the colours above; {each}. The tallest two in a hundred may reach beyond the top."
        );
        html.leaf("p", &[("class", "say")], &says);
        html.within("div", &[("class", "wide")], |html| {
            let says = format!(
                "Stacked columns of {} decoded tokens, mean {} ms a token.",
                run.steps.len(),
                number(columns.iter().map(Column::total_ms).sum::<f64>() / columns.len() as f64)
            );
            charts::steps(html, &columns, &says);
        });
        let heads: Vec<&str> =
            ["from token"].into_iter().chain(Phase::ALL.map(title)).chain(["misses", "MB read"]).collect();
        let mut rows = columns.iter().map(|column| {
            let phases = column.phases_ms.iter().map(|ms| number(*ms));
            let counts = [number(column.misses), number(column.bytes / 1e6)];
            [column.first.to_string()].into_iter().chain(phases).chain(counts).collect()
        });
        figures(html, "The numbers, in ms", &heads, &mut rows);
    });
}

fn hits(html: &mut Html, run: &Run<'_>) {
    let says = format!(
        "The routes of {} tokens, replayed from an empty ring of other sizes: as the ring evicts, and as the best choice \
         with knowledge of the future would (Belady).",
        run.replayed
    );
    section(html, "Hit rate over ring size", &says, |html| {
        if run.rings.is_empty() {
            html.leaf("p", &[], "No routes were recorded.");
            return;
        }
        html.within("div", &[("class", "key")], |html| {
            key(html, "k1", "the ring's policy");
            key(html, "dash", "Belady");
            key(html, "k-dot", "measured, prompts and reading ahead included");
        });
        let measured = run.store.hit_rate();
        let here = run.rings.iter().find(|point| point.slots == run.ring_slots);
        let says = format!(
            "Hit rate rises with the ring. With the present {} slots: the policy {}, Belady {}, measured {}.",
            run.ring_slots,
            percent(here.and_then(|point| point.policy)),
            percent(here.and_then(|point| point.belady)),
            percent(measured)
        );
        let present = (run.ring_slots, measured);
        charts::hit_rates(html, &run.rings, run.info.plan.n_experts, present, &says);
        let mut rows = run.rings.iter().map(|point| {
            let share = point.slots as f64 / run.info.plan.n_experts.max(1) as f64;
            let bytes = Bytes(point.slots as u64 * run.info.plan.slot_bytes);
            vec![
                point.slots.to_string(),
                percent(Some(share)),
                bytes.to_string(),
                percent(point.policy),
                percent(point.belady),
            ]
        });
        figures(html, "The numbers", &["slots", "share", "memory", "policy", "Belady"], &mut rows);
    });
}

fn key(html: &mut Html, class: &str, text: &str) {
    html.within("span", &[], |html| {
        html.leaf("i", &[("class", class)], "");
        html.text(text);
    });
}

fn covered(html: &mut Html, run: &Run<'_>) {
    let says = "How much of what a token chose was near the top of a ranking made before: that of the token before \
                it, and that of the look-ahead, the next layer's router applied a layer early. This is what \
                reading ahead can hope for.";
    section(html, "What could be foreseen", says, |html| {
        let points: Vec<Coverage> = coverage(&run.routes).collect();
        if points.iter().all(|point| point.before.is_none() && point.ahead.is_none()) {
            html.leaf("p", &[], "Too few tokens were decoded to say.");
            return;
        }
        html.within("div", &[("class", "key")], |html| {
            key(html, "k1", "next token");
            key(html, "k2", "next layer");
            key(html, "chance", "chance");
        });
        let says = format!(
            "Adjacent tokens share {} of their experts; the look-ahead's top {} hold {}.",
            percent(run.routes.overlap()),
            run.spec.moe.top_k,
            percent(run.routes.coverage_ahead(run.spec.moe.top_k))
        );
        charts::coverage(html, &points, run.spec.moe.n_experts, &says);
        html.leaf("p", &[("class", "say")], &says);
        let mut rows = points
            .iter()
            .map(|point| vec![point.width.to_string(), percent(point.before), percent(point.ahead)]);
        figures(html, "The numbers", &["top", "next token", "next layer"], &mut rows);
    });
}

/// Use of an expert over its even share: its shade.
fn shade(uses: u64, total: u64, n_experts: usize) -> usize {
    if uses == 0 || total == 0 {
        return 0;
    }
    let relative = uses as f64 * n_experts as f64 / total as f64;
    // A shade a factor of two: 1 is less than a quarter of the even share, SHADES is eight times and more.
    (relative.log2().floor() + 4.0).clamp(1.0, SHADES as f64) as usize
}

/// What the shades mean.
const SHADE_NAMES: [&str; SHADES + 1] =
    ["unused", "< ¼ of even", "¼", "½", "even", "2 ×", "4 ×", "8 × and more"];

fn maps(html: &mut Html, run: &Run<'_>) {
    let layers: Vec<usize> = run.spec.moe_layers().collect();
    let n_experts = run.spec.moe.n_experts;
    let rows = || layers.iter().zip(run.routes.layers()).zip(&run.resident);
    let says = format!(
        "A row is a layer, the first on top; a column is an expert. Shades are use over an even share. The busiest \
         tenth of a layer's experts has {} of its use.",
        percent(run.routes.skew())
    );
    let facts: Vec<(Vec<usize>, Vec<String>)> = rows()
        .map(|((layer, uses), resident)| {
            let total: u64 = uses.iter().sum();
            let shades = uses.iter().map(|n| shade(*n, total, n_experts)).collect();
            let busiest = uses.iter().enumerate().max_by_key(|(_, n)| **n).unwrap_or((0, &0));
            let used = uses.iter().filter(|n| **n > 0).count();
            let held = resident.iter().filter(|is_in| **is_in).count();
            let share = (total > 0).then(|| *busiest.1 as f64 / total as f64);
            let cells = [*layer, used, busiest.0].map(|n| n.to_string());
            let [layer, used, expert] = cells;
            (shades, vec![layer, used, expert, percent(share), held.to_string()])
        })
        .collect();
    section(html, "Use of experts", &says, |html| {
        html.within("div", &[("class", "key")], |html| {
            for (shade, name) in SHADE_NAMES.into_iter().enumerate() {
                key(html, &format!("k-shade k-s{shade}"), name);
            }
        });
        let map_rows: Vec<MapRow> = facts
            .iter()
            .map(|(shades, cells)| MapRow {
                shades: shades.clone(),
                says: format!(
                    "layer {}: {} of {n_experts} experts used\nbusiest: {} with {}\nin the ring: {}",
                    cells[0], cells[1], cells[2], cells[3], cells[4]
                ),
            })
            .collect();
        html.within("div", &[("class", "wide")], |html| {
            charts::map(html, "use", "Use of experts, layer by layer", &map_rows, &says);
        });
        let held: usize = run.resident.iter().flatten().filter(|is_in| **is_in).count();
        let says = format!(
            "In the ring at the end: {held} of {} experts, those that are filled.",
            layers.len() * n_experts
        );
        html.leaf("p", &[("class", "say")], &says);
        let held_rows: Vec<MapRow> = map_rows
            .iter()
            .zip(&run.resident)
            .map(|(row, resident)| MapRow {
                shades: resident.iter().map(|is_in| if *is_in { 5 } else { 0 }).collect(),
                says: row.says.clone(),
            })
            .collect();
        html.within("div", &[("class", "wide")], |html| {
            charts::map(html, "ring", "Experts in the ring, layer by layer", &held_rows, &says);
        });
        let heads = ["layer", "experts used", "busiest", "its share", "in the ring"];
        figures(html, "The numbers", &heads, &mut facts.iter().map(|(_, cells)| cells.clone()));
    });
}

fn answers(html: &mut Html, run: &Run<'_>) {
    let says =
        "Prompt tokens are those that were computed; what a conversation held already is not among them.";
    section(html, "Answers", says, |html| {
        let heads = [
            "answer",
            "prompt",
            "first token",
            "prompt read",
            "decoded",
            "tok/s",
            "hit rate",
            "read a token",
        ];
        let mut rows = run.readings.iter().enumerate().map(|(i, reading)| {
            let decode = &reading.decode;
            let bytes = decode.per_step(decode.store.disk_bytes);
            vec![
                (i + 1).to_string(),
                reading.synced.prefilled.to_string(),
                format!("{:.2} s", reading.prompt.time.as_secs_f64()),
                Bytes(reading.prompt.store.disk_bytes).to_string(),
                decode.phases.steps().to_string(),
                decode.rate().map_or_else(|| "–".to_owned(), number),
                percent(decode.store.hit_rate()),
                bytes.map_or_else(|| "–".to_owned(), |bytes| Bytes(bytes as u64).to_string()),
            ]
        });
        html.within("div", &[("class", "scroll")], |html| table(html, &heads, &mut rows));
    });
}

fn facts(html: &mut Html, run: &Run<'_>) {
    let plan = &run.info.plan;
    let direct = match &run.info.direct_io {
        DirectIo::Yes { .. } => "yes".to_owned(),
        DirectIo::No { why } => format!("no: {why}"),
    };
    let ring = format!(
        "{} of {} slots planned, {} each; the least is {}",
        run.ring_slots,
        plan.ring_slots,
        Bytes(plan.slot_bytes),
        plan.ring_floor
    );
    let rows: [(&str, String); 13] = [
        ("processor", machine::processor()),
        ("system", machine::system()),
        ("kernels", run.info.kernels.to_owned()),
        ("compute threads", plan.threads.to_string()),
        ("direct I/O", direct),
        ("expert file", run.info.experts_path.display().to_string()),
        ("memory that may be used", Bytes(plan.budget_bytes).to_string()),
        ("planned in all", Bytes(plan.total_bytes()).to_string()),
        ("backbone", Bytes(plan.backbone_bytes).to_string()),
        ("KV cache", format!("{} for {} positions", Bytes(plan.kv_bytes), plan.context)),
        ("activations", format!("{} for steps of up to {} tokens", Bytes(plan.activation_bytes), plan.chunk)),
        ("ring", ring),
        ("read in all", format!("{} in {} reads", Bytes(run.store.disk_bytes), run.store.reads)),
    ];
    section(html, "Machine and plan", "What the run had to work with.", |html| {
        html.within("div", &[("class", "scroll")], |html| {
            html.within("table", &[("class", "figures")], |html| {
                for (name, value) in rows {
                    html.within("tr", &[], |html| {
                        html.leaf("th", &[], name);
                        html.leaf("td", &[], &value);
                    });
                }
            });
        });
    });
}

impl Html {
    /// Where the script shows what is pointed at.
    fn void_tip(&mut self) {
        self.leaf("div", &[("id", "tip"), ("hidden", "")], "");
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{answered, tiny};
    use super::*;
    use smoe_testkit::TinyModel;

    fn report_of(model: &TinyModel, slots: usize, answers: usize) -> String {
        let (dir, mut engine) = tiny(model, slots, 16);
        let path = dir.path().join("report.html");
        let mut report = Report::begin(&path, &mut engine).unwrap();
        for i in 0..answers {
            let prompt = model.prompt(20 + i, i as u64);
            report.keep(&answered(&mut engine, &prompt, 30));
        }
        report.write(&mut engine).unwrap();
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn a_report_is_well_formed_and_whole_in_itself() {
        for model in TinyModel::all(7) {
            let page = report_of(&model, 9, 2);
            let found = html::tests::elements(&page);
            let count = |name: &str| found.iter().filter(|found| *found == name).count();
            assert_eq!((count("html"), count("main"), count("svg")), (1, 1, 5));
            assert!(count("desc") == 5 && count("details") >= 4 && count("rect") > 29, "{found:?}");
            for outside in ["http:", "https:", "src=", "href=", "url(", "@import", "NaN", "inf "] {
                assert!(!page.contains(outside), "{outside}");
            }
        }
    }

    #[test]
    fn a_report_about_nothing_is_well_formed_too() {
        let page = report_of(&TinyModel::qwen3(7), 21, 0);
        assert!(html::tests::elements(&page).iter().filter(|name| *name == "svg").count() >= 2);
        assert!(page.contains("No routes were recorded."));
    }

    #[test]
    fn hostile_names_stay_text() {
        let model = TinyModel::qwen3(7);
        let (dir, mut engine) = tiny(&model, 9, 16);
        let mut report = Report::begin(&dir.path().join("report.html"), &mut engine).unwrap();
        report.keep(&answered(&mut engine, &model.prompt(20, 0), 30));
        let trace = engine.record_trace(false).unwrap();
        let mut run = Run::of(&report, &engine, trace.as_ref());
        let sound = html::tests::elements(&page(&run));
        run.spec.model_type = "<script>\"&'</title>".to_owned();
        run.info.experts_path = "/tmp/<b>&\"".into();
        let page = page(&run);
        assert!(!page.contains("</title>\"") && !page.contains("<b>&"));
        assert_eq!(html::tests::elements(&page), sound);
    }

    #[test]
    fn the_curve_holds_the_present_ring_and_rises() {
        let model = TinyModel::qwen3(7);
        let (_dir, mut engine) = tiny(&model, 8, 1);
        engine.record_trace(true).unwrap();
        answered(&mut engine, &model.prompt(20, 0), 30);
        let trace = engine.record_trace(false).unwrap().unwrap();
        let points = ring_points(&trace, 8, 3);
        assert!(points.iter().any(|point| point.slots == 8));
        assert_eq!(points.last().map(|point| point.slots), Some(21));
        assert!(points.windows(2).all(|two| two[0].slots < two[1].slots && two[0].belady <= two[1].belady));
        assert!(points.iter().all(|point| point.policy <= point.belady));
        assert_eq!(last_part(&trace).as_ref(), Some(&trace));
    }

    #[test]
    fn shades_are_factors_of_two() {
        let shades = [0, 1, 2, 4, 8, 16, 32, 64, 1000].map(|uses| shade(uses, 8 * 128, 128));
        assert_eq!(shades, [0, 1, 2, 3, 4, 5, 6, 7, 7]);
    }
}
