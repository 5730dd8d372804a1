//! The report's pictures, as inline SVG.
//!
//! Colours are classes, so that the page can have them dark or light. A picture of many parts has a path per colour
//! with all its rectangles in it, and on top invisible bands that say what lies below.

use std::fmt::Write;

use smoe_meter::{Phase, Step};

use super::html::{Attribute, Html};
use crate::instrument::Coverage;
use crate::instrument::table::{percent, title};

/// Most columns of the picture of steps; neighbours are averaged beyond.
pub const COLUMNS: usize = 180;
/// Shades of the heat map, the last one the strongest.
pub const SHADES: usize = 7;

/// Where a chart draws, in units of its own.
struct Frame {
    width: f64,
    height: f64,
    /// Room left of the drawing, for the ticks.
    left: f64,
}

/// Room above, right of and below the drawing.
const TOP: f64 = 12.0;
const RIGHT: f64 = 14.0;
const BOTTOM: f64 = 38.0;

impl Frame {
    fn x(&self, share: f64) -> f64 {
        self.left + share * (self.width - self.left - RIGHT)
    }

    fn y(&self, share: f64) -> f64 {
        self.height - BOTTOM - share * (self.height - TOP - BOTTOM)
    }
}

/// A picture with its name and what it says, for those who do not see it.
fn svg(
    html: &mut Html,
    id: &str,
    (width, height): (f64, f64),
    name: &str,
    says: &str,
    draw: impl FnOnce(&mut Html),
) {
    let view = format!("0 0 {width} {height}");
    let (title_id, desc_id) = (format!("{id}-title"), format!("{id}-desc"));
    let labels = format!("{title_id} {desc_id}");
    html.within("svg", &[("viewBox", &view), ("role", "img"), ("aria-labelledby", &labels)], |html| {
        html.leaf("title", &[("id", &title_id)], name);
        html.leaf("desc", &[("id", &desc_id)], says);
        draw(html);
    });
}

fn label(html: &mut Html, class: &str, x: f64, y: f64, text: &str) {
    let (x, y) = (format!("{x:.1}"), format!("{y:.1}"));
    html.leaf("text", &[("class", class), ("x", &x), ("y", &y)], text);
}

fn line(html: &mut Html, class: &str, from: (f64, f64), to: (f64, f64)) {
    let path = format!("M{:.1} {:.1}L{:.1} {:.1}", from.0, from.1, to.0, to.1);
    html.void("path", &[("class", class), ("d", &path)]);
}

fn curve(html: &mut Html, class: &str, points: &[(f64, f64)]) {
    let mut path = String::new();
    for (i, (x, y)) in points.iter().enumerate() {
        let _ = write!(path, "{}{x:.1} {y:.1}", if i == 0 { 'M' } else { 'L' });
    }
    html.void("path", &[("class", class), ("d", &path)]);
}

fn dot(html: &mut Html, class: &str, (x, y): (f64, f64), says: &str) {
    let (x, y) = (format!("{x:.1}"), format!("{y:.1}"));
    let attributes: [Attribute<'_>; 4] = [("class", class), ("cx", &x), ("cy", &y), ("r", "4.5")];
    html.within("circle", &attributes, |html| html.leaf("title", &[], says));
}

/// An invisible rectangle that says something when pointed at.
fn band(html: &mut Html, (x, y): (f64, f64), (width, height): (f64, f64), says: &str) {
    let [x, y, width, height] = [x, y, width, height].map(|v| format!("{v:.1}"));
    let attributes: [Attribute<'_>; 5] =
        [("class", "band"), ("x", &x), ("y", &y), ("width", &width), ("height", &height)];
    html.within("rect", &attributes, |html| html.leaf("title", &[], says));
}

/// Horizontal lines with their values.
fn grid(html: &mut Html, frame: &Frame, most: f64, step: f64, unit: &str) {
    let mut value = 0.0;
    while value <= most * 1.0001 {
        let y = frame.y(value / most);
        line(html, if value == 0.0 { "axis" } else { "grid" }, (frame.x(0.0), y), (frame.x(1.0), y));
        label(html, "tick end", frame.x(0.0) - 6.0, y + 4.0, &format!("{}{unit}", number(value)));
        value += step;
    }
}

/// Up to three significant digits, no zeros behind the point.
pub fn number(value: f64) -> String {
    let digits = match value {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// A step between grid lines that gives up to five of them: 1, 2 or 5 times a power of ten.
fn grid_step(most: f64) -> f64 {
    let rough = (most / 5.0).max(1e-6);
    let power = 10_f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|f| f * power >= rough * 0.999);
    factor.unwrap_or(10.0) * power
}

/// Decoded tokens that share a column: milliseconds by phase, and what they read.
#[derive(Clone, Debug, Default)]
pub struct Column {
    pub first: usize,
    pub tokens: usize,
    pub phases_ms: [f64; Phase::ALL.len()],
    pub bytes: f64,
    pub misses: f64,
}

impl Column {
    pub fn total_ms(&self) -> f64 {
        self.phases_ms.iter().sum()
    }

    /// Steps in at most [`COLUMNS`] columns of as many each.
    pub fn of(steps: &[Step]) -> Vec<Self> {
        let each = steps.len().div_ceil(COLUMNS).max(1);
        let column = |(i, steps): (usize, &[Step])| {
            let n = steps.len() as f64;
            let mean = |of: &dyn Fn(&Step) -> u64| steps.iter().map(|s| of(s) as f64).sum::<f64>() / n;
            Self {
                first: i * each + 1,
                tokens: steps.len(),
                phases_ms: Phase::ALL.map(|phase| mean(&|step| step.phases.phase_ns(phase)) / 1e6),
                bytes: mean(&|step| step.store.disk_bytes),
                misses: mean(&|step| step.store.demand_misses),
            }
        };
        steps.chunks(each).enumerate().map(column).collect()
    }
}

/// Time of each token, stacked by phase.
pub fn steps(html: &mut Html, columns: &[Column], says: &str) {
    let frame = Frame { width: 940.0, height: 280.0, left: 58.0 };
    // A few slow tokens, such as the first after a pause, must not flatten all others.
    let mut totals: Vec<f64> = columns.iter().map(Column::total_ms).collect();
    totals.sort_unstable_by(f64::total_cmp);
    let most = totals.get((totals.len() * 98 / 100).min(totals.len().saturating_sub(1))).copied();
    let step = grid_step(most.unwrap_or(1.0).max(1e-3) * 1.05);
    let most = (most.unwrap_or(1.0).max(1e-3) * 1.05 / step).ceil() * step;
    svg(html, "steps", (frame.width, frame.height), "Time of each decoded token", says, |html| {
        grid(html, &frame, most, step, " ms");
        let n = columns.len().max(1) as f64;
        let width = (frame.x(1.0) - frame.x(0.0)) / n;
        let gap = if width > 4.0 { 1.0 } else { 0.0 };
        let mut bottoms = vec![0.0; columns.len()];
        for (phase, class) in (0..).zip(Phase::ALL.map(|phase| format!("p-{}", phase.name()))) {
            let mut path = String::new();
            for (i, (column, bottom)) in columns.iter().zip(&mut bottoms).enumerate() {
                let top = *bottom + column.phases_ms[phase as usize];
                let (low, high) = (frame.y((*bottom / most).min(1.0)), frame.y((top / most).min(1.0)));
                *bottom = top;
                if low - high > 0.05 {
                    let x = frame.x(i as f64 / n);
                    let _ =
                        write!(path, "M{x:.1} {low:.1}V{high:.1}h{:.1}V{low:.1}z", (width - gap).max(0.5));
                }
            }
            html.void("path", &[("class", &class), ("d", &path)]);
        }
        let last = columns.last().map_or(0, |column| column.first + column.tokens - 1);
        for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
            let token = (share * last as f64).round().max(1.0);
            let class = if share == 1.0 { "tick end" } else { "tick" };
            label(html, class, frame.x(share), frame.height - 21.0, &format!("{token}"));
        }
        label(html, "tick mid", frame.x(0.5), frame.height - 5.0, "decoded token");
        for (i, column) in columns.iter().enumerate() {
            let mut says = match column.tokens {
                1 => format!("token {}", column.first),
                n => format!("tokens {} to {}, a token", column.first, column.first + n - 1),
            };
            let _ = write!(says, ": {} ms", number(column.total_ms()));
            for (phase, ms) in Phase::ALL.into_iter().zip(column.phases_ms) {
                if ms >= 0.005 * column.total_ms() {
                    let _ = write!(says, "\n{} {} ms", title(phase), number(ms));
                }
            }
            let _ =
                write!(says, "\nmisses {}, read {} MB", number(column.misses), number(column.bytes / 1e6));
            let x = frame.x(i as f64 / n);
            band(html, (x, TOP), (width, frame.y(0.0) - TOP), &says);
        }
    });
}

/// A place on the curve of hit rates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RingPoint {
    pub slots: usize,
    pub policy: Option<f64>,
    pub belady: Option<f64>,
}

/// Hit rate over the size of the ring; `present` is the ring's, with the rate that was measured.
pub fn hit_rates(
    html: &mut Html,
    points: &[RingPoint],
    n_experts: usize,
    present: (usize, Option<f64>),
    says: &str,
) {
    let frame = Frame { width: 480.0, height: 300.0, left: 46.0 };
    let name = "Hit rate over ring size";
    svg(html, "hits", (frame.width, frame.height), name, says, |html| {
        grid(html, &frame, 100.0, 25.0, " %");
        shares_below(html, &frame);
        label(html, "tick mid", frame.x(0.5), frame.height - 5.0, "ring, as a share of all experts");
        let place =
            |slots: usize, rate: f64| (frame.x(slots as f64 / n_experts.max(1) as f64), frame.y(rate));
        let of = |rate: fn(&RingPoint) -> Option<f64>| -> Vec<(f64, f64)> {
            points.iter().filter_map(|point| Some(place(point.slots, rate(point)?))).collect()
        };
        let (belady, lru) = (of(|point| point.belady), of(|point| point.policy));
        curve(html, "line second dashed", &belady);
        curve(html, "line first", &lru);
        let x = place(present.0, 0.0).0;
        line(html, "mark", (x, frame.y(0.0)), (x, frame.y(1.0)));
        let (class, shift) = if x > frame.x(0.7) { ("note end", -6.0) } else { ("note", 6.0) };
        label(html, class, x + shift, frame.y(0.04), "this ring");
        for point in points {
            let rates = [("the policy", point.policy), ("Belady", point.belady)];
            for ((name, rate), class) in rates.into_iter().zip(["dot first", "dot second"]) {
                if let Some(rate) = rate {
                    let says = format!("{} slots, {name}: {}", point.slots, percent(Some(rate)));
                    dot(html, class, place(point.slots, rate), &says);
                }
            }
        }
        if let Some(rate) = present.1 {
            let says = format!("measured with {} slots: {}", present.0, percent(Some(rate)));
            dot(html, "dot measured", place(present.0, rate), &says);
        }
    });
}

fn shares_below(html: &mut Html, frame: &Frame) {
    for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let class = if share == 1.0 { "tick end" } else { "tick mid" };
        label(html, class, frame.x(share), frame.height - 21.0, &format!("{} %", number(100.0 * share)));
    }
}

/// The coverage curves, with what chance would cover.
pub fn coverage(html: &mut Html, points: &[Coverage], n_experts: usize, says: &str) {
    let frame = Frame { width: 480.0, height: 300.0, left: 46.0 };
    let most = points.last().map_or(1, |point| point.width) as f64;
    svg(html, "coverage", (frame.width, frame.height), "Coverage of rankings", says, |html| {
        grid(html, &frame, 100.0, 25.0, " %");
        let every = points.len().div_ceil(8).max(1);
        for point in points.iter().skip(every - 1).step_by(every) {
            let x = frame.x(point.width as f64 / most);
            label(html, "tick mid", x, frame.height - 21.0, &point.width.to_string());
        }
        label(html, "tick mid", frame.x(0.5), frame.height - 5.0, "experts from the top of the ranking");
        let chance = (most / n_experts.max(1) as f64).min(1.0);
        curve(html, "line faint dashed", &[(frame.x(0.0), frame.y(0.0)), (frame.x(1.0), frame.y(chance))]);
        let before = points.iter().map(|point| point.before).collect::<Vec<_>>();
        let ahead = points.iter().map(|point| point.ahead).collect::<Vec<_>>();
        for (class, name, covered) in [("first", "next token", before), ("second", "next layer", ahead)] {
            let places: Vec<_> = points
                .iter()
                .zip(covered)
                .filter_map(|(point, covered)| {
                    let says = format!("{name}: {} within the top {}", percent(covered), point.width);
                    Some(((frame.x(point.width as f64 / most), frame.y(covered?)), says))
                })
                .collect();
            let line = places.iter().map(|(place, _)| *place).collect::<Vec<_>>();
            curve(html, &format!("line {class}"), &line);
            places.iter().for_each(|(place, says)| dot(html, &format!("dot {class}"), *place, says));
        }
    });
}

/// A row of a map of experts.
pub struct MapRow {
    /// Shade of each expert, 0 for none.
    pub shades: Vec<usize>,
    /// What the row says.
    pub says: String,
}

/// Layers from top to bottom, experts from left to right, each in its shade.
pub fn map(html: &mut Html, id: &str, name: &str, rows: &[MapRow], says: &str) {
    let experts = rows.iter().map(|row| row.shades.len()).max().unwrap_or(0).max(1);
    // About as wide as the page whatever the model; rows are no lower than they are readable.
    let cell = (920.0 / experts as f64).clamp(2.0, 24.0).floor();
    let height = (360.0 / rows.len().max(1) as f64).clamp(4.0, 14.0).floor();
    let size = (cell * experts as f64, height * rows.len() as f64);
    svg(html, id, size, name, says, |html| {
        let [width, all] = [size.0, size.1].map(|v| v.to_string());
        html.void("rect", &[("class", "s0"), ("width", &width), ("height", &all)]);
        for shade in 1..=SHADES {
            let mut path = String::new();
            for (y, row) in rows.iter().enumerate() {
                let mut x = 0;
                while x < row.shades.len() {
                    let run = row.shades[x..].iter().take_while(|s| **s == shade).count();
                    if run > 0 {
                        let (left, top) = (x as f64 * cell, y as f64 * height);
                        let _ = write!(path, "M{left} {top}h{}v{height}H{left}z", run as f64 * cell);
                    }
                    x += run.max(1);
                }
            }
            if !path.is_empty() {
                html.void("path", &[("class", &format!("s{shade}")), ("d", &path)]);
            }
        }
        for (y, row) in rows.iter().enumerate() {
            band(html, (0.0, y as f64 * height), (size.0, height), &row.says);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let shown = [0.0, 0.126, 3.149, 5.0, 31.41, 314.1, 12345.6].map(number);
        assert_eq!(shown, ["0", "0.13", "3.15", "5", "31.4", "314", "12346"]);
    }

    #[test]
    fn grids_have_a_few_lines() {
        for most in [0.003, 0.7, 1.0, 33.0, 81.3, 5000.0] {
            let lines = most / grid_step(most);
            assert!((2.0..=5.1).contains(&lines), "{most}: {lines}");
        }
    }

    #[test]
    fn columns_are_means_over_neighbours() {
        let step = |misses| {
            let mut step = Step::default();
            step.store.demand_misses = misses;
            step
        };
        let steps: Vec<_> = (0..=2 * COLUMNS as u64).map(step).collect();
        let columns = Column::of(&steps);
        assert_eq!(columns.len(), steps.len().div_ceil(3));
        assert_eq!((columns[1].first, columns[1].tokens, columns[1].misses), (4, 3, 4.0));
        assert_eq!(columns.iter().map(|column| column.tokens).sum::<usize>(), steps.len());
        assert!(Column::of(&[]).is_empty());
    }
}
