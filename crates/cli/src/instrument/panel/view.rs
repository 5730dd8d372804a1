//! What the panel looks like, at any size of the screen. Draws from plain values, touches no engine.

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Position, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, BorderType, Padding, Paragraph};
use smoe_engine::plan::Bytes;
use smoe_meter::Phase;

use super::input::Input;
use crate::instrument::table::{bar, percent, title};

/// Who said something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// The person.
    User,
    /// The model.
    Model,
    /// The program.
    Note,
}

/// Something that was said.
#[derive(Clone, Debug)]
pub struct Said {
    /// By whom.
    pub who: Who,
    /// What.
    pub text: String,
}

/// What the engine does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Doing {
    /// Nothing: the next line is waited for.
    #[default]
    Waiting,
    /// The prompt: tokens done, of those to do, none before it is known.
    Prefilling(usize, usize),
    /// The answer.
    Answering,
}

/// The numbers of the panel.
#[derive(Clone, Debug, Default)]
pub struct Gauges {
    pub model: String,
    pub doing: Doing,
    /// Since the answer began.
    pub elapsed: Option<Duration>,
    pub first_token: Option<Duration>,
    pub tokens: u64,
    pub rate: Option<f64>,
    /// Milliseconds a token.
    pub phases_ms: [f64; Phase::ALL.len()],
    pub hit_rate: Option<f64>,
    /// Of the last second.
    pub disk_bytes_per_s: f64,
    pub disk_bytes_per_token: Option<f64>,
    /// Experts in the ring, and slots.
    pub ring: (usize, usize),
    pub ring_bytes: u64,
    /// Positions held, of how many.
    pub context: (usize, usize),
    /// Resident now, and planned.
    pub memory: (u64, u64),
}

/// How much each expert was used of late, a row per MoE layer.
#[derive(Clone, Debug, Default)]
pub struct Heat {
    pub experts: usize,
    pub values: Vec<f32>,
}

/// Everything on the screen.
pub struct View<'a> {
    pub said: &'a [Said],
    pub input: &'a Input,
    /// Lines that the conversation is scrolled back.
    pub back: usize,
    /// What the next line replies to.
    pub question: Option<&'a str>,
    pub gauges: &'a Gauges,
    pub heat: &'a Heat,
    /// Without colours, shades are signs.
    pub mono: bool,
}

/// Columns of the instrument beside the conversation, and what the conversation needs beside it.
const BESIDE: u16 = 42;
const TALK_WIDTH: u16 = 38;
/// Rows of the instrument without its map, frame included.
const ROWS: u16 = 19;
/// Columns of a gauge.
const GAUGE: usize = 9;
/// Rows that the conversation needs above the instrument.
const TALK_ROWS: u16 = 8;

/// Draws everything; gives the rows that the conversation could be scrolled by.
pub fn draw(frame: &mut Frame<'_>, view: &View<'_>) -> usize {
    let area = frame.area();
    let (talk, instrument) = if area.width >= TALK_WIDTH + BESIDE && area.height >= ROWS {
        let [talk, instrument] =
            Layout::horizontal([Constraint::Min(TALK_WIDTH), Constraint::Length(BESIDE)]).areas(area);
        (talk, Some(instrument))
    } else if area.height >= TALK_ROWS + ROWS {
        let [talk, instrument] =
            Layout::vertical([Constraint::Min(TALK_ROWS), Constraint::Length(ROWS)]).areas(area);
        (talk, Some(instrument))
    } else {
        (area, None)
    };
    if let Some(area) = instrument {
        draw_instrument(frame, view, area);
    }
    draw_talk(frame, view, talk, instrument.is_none())
}

fn dim() -> Style {
    Style::new().add_modifier(Modifier::DIM)
}

fn block(title: &str) -> Block<'_> {
    let padding = Padding::horizontal(1);
    Block::bordered().border_type(BorderType::Rounded).border_style(dim()).padding(padding).title(title)
}

/// The conversation, a line of state where there is no room for the instrument, and the line being typed.
fn draw_talk(frame: &mut Frame<'_>, view: &View<'_>, area: Rect, with_state: bool) -> usize {
    let state_rows = u16::from(with_state && area.height > 5);
    let [talk, state, input] =
        Layout::vertical([Constraint::Min(0), Constraint::Length(state_rows), Constraint::Length(3)])
            .areas(area);
    let title = format!(" {} ", view.gauges.model);
    let frame_block = block(&title);
    let inner = frame_block.inner(talk);
    let height = usize::from(inner.height);
    // Only what may be seen is broken into lines: from the end, as far back as the screen reaches.
    let mut lines: Vec<Line<'_>> = Vec::new();
    for said in view.said.iter().rev() {
        if lines.len() >= height + view.back {
            break;
        }
        lines.push(Line::default());
        let (sign, style) = match said.who {
            Who::User => ("> ", Style::new().add_modifier(Modifier::BOLD)),
            Who::Model => ("", Style::new()),
            Who::Note => ("", dim()),
        };
        let wrapped = wrap(&format!("{sign}{}", said.text), usize::from(inner.width));
        lines.extend(wrapped.into_iter().rev().map(|text| Line::styled(text, style)));
    }
    let beyond = lines.len().saturating_sub(height);
    let mut shown: Vec<Line<'_>> = lines.into_iter().skip(view.back.min(beyond)).take(height).collect();
    shown.reverse();
    frame.render_widget(Paragraph::new(shown).block(frame_block), talk);
    if state_rows > 0 {
        frame.render_widget(Paragraph::new(state_line(view.gauges)), state);
    }
    draw_input(frame, view, input);
    beyond
}

fn draw_input(frame: &mut Frame<'_>, view: &View<'_>, area: Rect) {
    let waiting = view.gauges.doing == Doing::Waiting;
    let title = match view.question {
        Some(question) => format!(" {} ", question.trim()),
        None if waiting => " Enter sends · Ctrl-C leaves · PgUp, PgDn scroll · /help ".to_owned(),
        None => " Ctrl-C stops the answer ".to_owned(),
    };
    let frame_block = block(&title);
    let inner = frame_block.inner(area);
    let (before, behind) = view.input.parts();
    // The cursor stays in sight: what does not fit on its left is cut.
    let room = usize::from(inner.width).saturating_sub(3);
    let mut start = 0;
    while Span::raw(&before[start..]).width() > room {
        start += before[start..].chars().next().map_or(1, char::len_utf8);
    }
    let left = &before[start..];
    let line = Line::from(vec![Span::styled("> ", dim()), Span::raw(left.to_owned()), Span::raw(behind)]);
    frame.render_widget(Paragraph::new(line).block(frame_block), area);
    if waiting && inner.width > 3 && inner.height > 0 {
        let x = inner.x + 2 + Span::raw(left).width() as u16;
        frame.set_cursor_position(Position::new(x.min(inner.right() - 1), inner.y));
    }
}

fn doing_text(gauges: &Gauges) -> String {
    match gauges.doing {
        Doing::Waiting => "ready".to_owned(),
        Doing::Prefilling(_, 0) => "reading the prompt".to_owned(),
        Doing::Prefilling(done, total) => {
            format!("prefilling {total} tokens, {:.0} %", 100.0 * done as f64 / total as f64)
        }
        Doing::Answering => format!("answering, {} tokens", gauges.tokens),
    }
}

fn state_line(gauges: &Gauges) -> Line<'static> {
    let rate = gauges.rate.filter(|_| gauges.doing == Doing::Answering);
    let rate = rate.map_or_else(String::new, |rate| format!(" · {rate:.1} tok/s"));
    let hits = gauges.hit_rate.map_or_else(String::new, |rate| format!(" · hits {}", percent(Some(rate))));
    Line::styled(format!(" {}{rate}{hits}", doing_text(gauges)), dim())
}

/// A phase's colour, of the sixteen that every terminal has.
fn colour(phase: Phase) -> Color {
    match phase {
        Phase::Attention => Color::Blue,
        Phase::Dense => Color::Cyan,
        Phase::Router => Color::Magenta,
        Phase::DemandWait => Color::Red,
        Phase::Experts => Color::Green,
        Phase::Device => Color::LightGreen,
        Phase::Head => Color::Yellow,
        Phase::Sampling => Color::LightMagenta,
        Phase::Other => Color::DarkGray,
    }
}

fn draw_instrument(frame: &mut Frame<'_>, view: &View<'_>, area: Rect) {
    let gauges = view.gauges;
    let frame_block = block(" instrument ");
    let inner = frame_block.inner(area);
    frame.render_widget(frame_block, area);
    let width = usize::from(inner.width);
    let mut lines: Vec<Line<'_>> = Vec::new();
    let name = |text: &str| Span::styled(format!("{text:<8}"), dim());

    let mut first = vec![Span::styled(doing_text(gauges), Style::new().add_modifier(Modifier::BOLD))];
    if gauges.doing != Doing::Waiting
        && let Some(elapsed) = gauges.elapsed
    {
        first.push(Span::styled(format!("  {:.1} s", elapsed.as_secs_f64()), dim()));
    }
    lines.push(Line::from(first));
    lines.push(match gauges.doing {
        Doing::Prefilling(done, total) => {
            Line::styled(bar(done as f64 / total.max(1) as f64, width), Style::new().fg(Color::Blue))
        }
        Doing::Waiting | Doing::Answering => {
            let rate = gauges.rate.map_or_else(|| "–".to_owned(), |rate| format!("{rate:.1}"));
            let first = gauges.first_token.map(|time| format!("{:.2}", time.as_secs_f64()));
            let first = first.unwrap_or_else(|| "–".to_owned());
            Line::from(vec![name("decode"), Span::raw(format!("{rate} tok/s, first {first} s"))])
        }
    });
    lines.push(Line::default());

    let most = gauges.phases_ms.iter().copied().fold(1e-9, f64::max);
    for (phase, ms) in Phase::ALL.into_iter().zip(gauges.phases_ms) {
        if phase == Phase::Device && ms == 0.0 {
            continue;
        }
        let bar = bar(ms / most, width.saturating_sub(24));
        lines.push(Line::from(vec![
            Span::styled(format!("{:<12}", title(phase)), dim()),
            Span::raw(format!("{ms:>8.2} ms ")),
            Span::styled(bar, Style::new().fg(colour(phase))),
        ]));
    }
    lines.push(Line::default());

    let gauge = |label: &str, share: Option<f64>, text: String| {
        let filled = bar(share.unwrap_or(0.0), GAUGE);
        let pad = " ".repeat(GAUGE + 1 - filled.chars().count());
        Line::from(vec![
            name(label),
            Span::styled(filled, Style::new().fg(Color::Cyan)),
            Span::raw(pad + &text),
        ])
    };
    lines.push(gauge("hits", gauges.hit_rate, percent(gauges.hit_rate)));
    let a_token = gauges.disk_bytes_per_token.map(|bytes| format!(" · {} a token", Bytes(bytes as u64)));
    let disk = format!("{:.2} GB/s{}", gauges.disk_bytes_per_s / 1e9, a_token.unwrap_or_default());
    lines.push(Line::from(vec![name("disk"), Span::raw(disk)]));
    let (held, slots) = gauges.ring;
    let share = |a: u64, b: u64| Some(a as f64 / b.max(1) as f64);
    let ring = format!("{held}/{slots} · {}", Bytes(gauges.ring_bytes));
    lines.push(gauge("ring", share(held as u64, slots as u64), ring));
    let (resident, planned) = gauges.memory;
    let memory = format!("{} / {}", Bytes(resident), Bytes(planned));
    lines.push(gauge("memory", share(resident, planned), memory));
    let (used, context) = gauges.context;
    lines.push(gauge("context", share(used as u64, context as u64), format!("{used}/{context}")));

    let rows = lines.len() as u16;
    frame.render_widget(Paragraph::new(lines), inner);
    // A line's distance, a heading, and two rows at least.
    if inner.height >= rows + 4 && !view.heat.values.is_empty() {
        let top = inner.y + rows + 1;
        let heading = Rect { y: top, height: 1, ..inner };
        let says = format!("layers × {} experts, recent use", view.heat.experts);
        frame.render_widget(Paragraph::new(Line::styled(says, dim())), heading);
        let map = Rect { y: top + 1, height: inner.bottom() - top - 1, ..inner };
        draw_heat(frame, view, map);
    }
}

/// Shades from cold to hot, of the 256 colours; without colours, signs.
const SHADES: [Color; 8] = [
    Color::Indexed(234),
    Color::Indexed(17),
    Color::Indexed(54),
    Color::Indexed(90),
    Color::Indexed(161),
    Color::Indexed(203),
    Color::Indexed(215),
    Color::Indexed(230),
];
const SIGNS: [&str; 8] = [" ", "·", "░", "░", "▒", "▒", "▓", "█"];

/// The map, two rows to a line of the screen: as many layers and experts to a cell as it takes, the hottest shown.
fn draw_heat(frame: &mut Frame<'_>, view: &View<'_>, area: Rect) {
    let heat = view.heat;
    let layers = heat.values.len() / heat.experts.max(1);
    let per_line = if view.mono { 1 } else { 2 };
    let rows = (usize::from(area.height) * per_line).min(layers);
    let columns = usize::from(area.width).min(heat.experts);
    if rows == 0 || columns == 0 {
        return;
    }
    let most = heat.values.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
    let shade = |row: usize, column: usize| {
        let span = |i: usize, of: usize, all: usize| i * all / of..((i + 1) * all / of).max(i * all / of + 1);
        let hottest = span(row, rows, layers)
            .flat_map(|layer| {
                let start = layer * heat.experts;
                let experts = span(column, columns, heat.experts);
                &heat.values[start + experts.start..start + experts.end]
            })
            .copied()
            .fold(0.0, f32::max);
        // The root shows what is used seldom, too.
        (((hottest / most).sqrt() * (SHADES.len() - 1) as f32).ceil() as usize).min(SHADES.len() - 1)
    };
    // Few experts are drawn larger.
    let wide = usize::from(area.width) / columns;
    let tall = (usize::from(area.height) * per_line / rows).clamp(1, wide);
    let half_rows = rows * tall;
    for line in 0..half_rows.div_ceil(per_line) {
        let spans: Vec<Span<'_>> = (0..columns)
            .map(|column| {
                let upper = shade(line * per_line / tall, column);
                if view.mono {
                    return Span::raw(SIGNS[upper].repeat(wide));
                }
                let lower = line * per_line + 1;
                let mut style = Style::new().fg(SHADES[upper]);
                if lower < half_rows {
                    style = style.bg(SHADES[shade(lower / tall, column)]);
                }
                Span::styled("▀".repeat(wide), style)
            })
            .collect();
        let row = Rect { y: area.y + line as u16, height: 1, ..area };
        frame.render_widget(Paragraph::new(Line::from(spans)), row);
    }
}

/// Breaks text into lines of at most `width` columns, between words where it can.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let width = width.max(1);
    let mut lines = Vec::new();
    for paragraph in text.split('\n') {
        let mut line = String::new();
        let mut used = 0;
        for word in paragraph.split_inclusive(' ') {
            let word: String =
                word.chars().map(|c| if c == '\t' { ' ' } else { c }).filter(|c| !c.is_control()).collect();
            let columns = Span::raw(word.trim_end_matches(' ')).width();
            if used + columns > width && used > 0 {
                lines.push(std::mem::take(&mut line));
                used = 0;
            }
            if columns <= width {
                used += Span::raw(&word).width();
                line.push_str(&word);
                continue;
            }
            for c in word.chars() {
                let columns = Span::raw(c.encode_utf8(&mut [0; 4]) as &str).width();
                if used + columns > width && used > 0 {
                    lines.push(std::mem::take(&mut line));
                    used = 0;
                }
                used += columns;
                line.push(c);
            }
        }
        lines.push(line);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn screen(width: u16, height: u16, view: &View<'_>) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal
            .draw(|frame| {
                draw(frame, view);
            })
            .unwrap();
        let buffer = terminal.backend().buffer().clone();
        let rows = buffer.content().chunks(usize::from(width.max(1)));
        rows.map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>() + "\n").collect()
    }

    fn gauges(doing: Doing) -> Gauges {
        Gauges {
            model: "qwen3_moe".to_owned(),
            doing,
            elapsed: Some(Duration::from_millis(1234)),
            first_token: Some(Duration::from_millis(810)),
            tokens: 77,
            rate: Some(12.34),
            phases_ms: [1.0, 0.0, 0.5, 48.25, 20.0, 0.0, 3.0, 0.1, 0.2],
            hit_rate: Some(0.7125),
            disk_bytes_per_s: 2.31e9,
            disk_bytes_per_token: Some(2e8),
            ring: (600, 614),
            ring_bytes: 1 << 30,
            context: (1024, 8192),
            memory: (3 << 30, 4 << 30),
        }
    }

    #[test]
    fn it_draws_at_every_size() {
        let said = [
            Said { who: Who::User, text: "Tell me of 東京 and naïve cafés.".to_owned() },
            Said { who: Who::Model, text: "word ".repeat(300) + &"x".repeat(500) + "\n\tend\u{1b}[31m" },
            Said { who: Who::Note, text: "[stopped]".to_owned() },
        ];
        let mut input = Input::default();
        input.insert(&"long line 東京 ".repeat(30));
        let heats = [
            Heat::default(),
            Heat { experts: 7, values: vec![0.0; 21] },
            Heat { experts: 128, values: (0..128 * 94).map(|i| (i % 13) as f32).collect() },
        ];
        let doings = [Doing::Waiting, Doing::Prefilling(0, 0), Doing::Prefilling(3, 512), Doing::Answering];
        for (width, height) in
            [(1, 1), (2, 3), (10, 4), (20, 10), (40, 27), (80, 24), (80, 18), (120, 40), (300, 90)]
        {
            for heat in &heats {
                for doing in doings {
                    for (back, mono, question) in [(0, false, None), (10_000, true, Some("drop it? [Y/n] "))]
                    {
                        let gauges = gauges(doing);
                        let view =
                            View { said: &said, input: &input, back, question, gauges: &gauges, heat, mono };
                        let text = screen(width, height, &view);
                        assert_eq!(text.lines().count(), usize::from(height));
                        assert!(!text.contains('\u{1b}'));
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_wanted_is_on_the_screen() {
        let said = [Said { who: Who::Model, text: "an answer".to_owned() }];
        let (input, heat) = (Input::default(), Heat { experts: 8, values: vec![1.0; 32] });
        let text = |doing, width, height| {
            let gauges = gauges(doing);
            let (question, mono) = (None, true);
            screen(
                width,
                height,
                &View { said: &said, input: &input, back: 0, question, gauges: &gauges, heat: &heat, mono },
            )
        };
        for (width, height) in [(120, 40), (80, 24), (60, 40)] {
            let answering = text(Doing::Answering, width, height);
            let wanted = ["an answer", "12.3 tok/s", "0.81 s", "demand wait", "48.25", "71.2 %", "2.31 GB/s"];
            for wanted in wanted.into_iter().chain(["600/614", "1024/8192", "3.00 GiB / 4.00 GiB"]) {
                assert!(answering.contains(wanted), "{wanted}:\n{answering}");
            }
            assert!(text(Doing::Prefilling(128, 512), width, height).contains("prefilling 512 tokens, 25 %"));
        }
        assert!(text(Doing::Answering, 120, 40).contains("layers × 8 experts"));
        let small = text(Doing::Prefilling(128, 512), 50, 12);
        assert!(small.contains("prefilling 512 tokens, 25 %") && small.contains("hits 71.2 %"), "{small}");
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrap("one two three", 8), ["one two ", "three"]);
        assert_eq!(wrap("a\n\nbc", 8), ["a", "", "bc"]);
        assert_eq!(wrap("abcdefghij kl", 4), ["abcd", "efgh", "ij ", "kl"]);
        assert_eq!(wrap("東京東京", 5), ["東京", "東京"]);
        assert_eq!(wrap("", 5), [""]);
        assert_eq!(wrap("ab", 0), ["a", "b"]);
    }

    #[test]
    fn scrolling_back_shows_what_came_before() {
        let said: Vec<Said> =
            (0..50).map(|i| Said { who: Who::Note, text: format!("line {i} end") }).collect();
        let (input, heat, gauges) = (Input::default(), Heat::default(), gauges(Doing::Waiting));
        let at = |back| {
            let view = View {
                said: &said,
                input: &input,
                back,
                question: None,
                gauges: &gauges,
                heat: &heat,
                mono: true,
            };
            screen(40, 20, &view)
        };
        assert!(at(0).contains("line 49 end") && !at(0).contains("line 30 end"));
        assert!(!at(40).contains("line 49 end") && at(40).contains("line 25 end"), "{}", at(40));
        assert!(at(1000).contains("line 0 end"));
    }
}
