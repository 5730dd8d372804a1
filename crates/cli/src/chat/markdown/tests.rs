use super::*;
use crate::chat::cells::{encode, plain};

fn rendered(text: &str, columns: usize) -> Vec<Row> {
    let (mut markdown, mut rows) = (Markdown::default(), Vec::new());
    text.lines().for_each(|line| markdown.line(line, columns, &mut rows));
    markdown.finish(columns, &mut rows);
    rows
}

fn shown(text: &str) -> String {
    plain(&rendered(text, 60))
}

fn styled(text: &str) -> String {
    rendered(text, 60).iter().map(|row| encode(row, true)).collect::<Vec<_>>().join("\n")
}

#[test]
fn marks_in_a_line_become_styles() {
    assert_eq!(styled("a **b** *c* ***d*** ~~e~~"), {
        "a \x1b[1mb\x1b[0m \x1b[3mc\x1b[0m \x1b[1;3md\x1b[0m \x1b[9me\x1b[0m"
    });
    assert_eq!(styled("use `**x**` here"), "use \x1b[36m**x**\x1b[0m here");
    assert_eq!(styled("# One #"), "\x1b[1;4;35mOne\x1b[0m");
    assert_eq!(styled("### *Three*"), "\x1b[1;3;35mThree\x1b[0m");
}

#[test]
fn what_only_looks_like_a_mark_is_text() {
    for text in [
        "2 * 3 * 4 and snake_case_name",
        "#hashtag, C# and F #",
        "a ** b",
        "unfinished `code and **bold",
        "<div class=\"x\"> & [note]: not a link",
        "[x] no item",
        "+1, -1 and 1.5",
        "a line that ends in \\",
        "costs $5, not $10",
    ] {
        assert_eq!(shown(text), text);
    }
    assert_eq!(shown("\\*not emphasis\\* &amp; 5 &lt; 6"), "*not emphasis* & 5 < 6");
}

#[test]
fn links_say_where_they_lead() {
    assert_eq!(shown("see [the *docs*](https://a.example/b) now"), "see the docs (https://a.example/b) now");
    assert_eq!(shown("<https://a.example>"), "https://a.example");
    assert_eq!(shown("![a cat](cat.png)"), "a cat (cat.png)");
}

#[test]
fn lists_keep_their_indentation_and_hang() {
    let text = "- one two three four five six seven eight nine ten eleven twelve\n  - nested\n    1. deep\n- [x] done\n- [ ] open\n10) last";
    let expected = "\
• one two three four five six seven eight nine ten eleven
  twelve
  • nested
    1. deep
☑ done
☐ open
10) last";
    assert_eq!(shown(text), expected);
}

#[test]
fn quotes_nest_and_hold_blocks() {
    let text = "> said\n> > again\n> - item\n> ```\n> code\nout";
    assert_eq!(shown(text), "▌ said\n▌ ▌ again\n▌ • item\n▌ ╭─\n▌ │ code\nout");
}

#[test]
fn fenced_code_stands_behind_a_gutter_as_it_is() {
    let text = "```rust\nfn main() {\n\n    *x* | # y\n```\nafter";
    assert_eq!(shown(text), "╭─ rust\n│ fn main() {\n│ \n│     *x* | # y\n╰─\nafter");
    // A fence is closed by its own mark, as long or longer; one in an item is indented with it.
    assert_eq!(shown("~~~~\n```\n~~~\n~~~~~\nafter"), "╭─\n│ ```\n│ ~~~\n╰─\nafter");
    assert_eq!(shown("- see\n  ```py\n  a\n    b\n  ```"), "• see\n  ╭─ py\n  │ a\n  │   b\n  ╰─");
    assert_eq!(shown("```inline``` code"), "inline code");
    let long = rendered(&format!("```\n{}", "x".repeat(25)), 12);
    assert_eq!(plain(&long), "╭─\n│ xxxxxxxxxx\n│ xxxxxxxxxx\n│ xxxxx");
}

#[test]
fn code_by_indentation_is_code_outside_lists_only() {
    assert_eq!(shown("so:\n\n    a*b*c\n\nand\n    went on"), "so:\n\n│ a*b*c\n\nand\n    went on");
    assert_eq!(shown("- item\n\n    *still* it"), "• item\n\n    still it");
}

#[test]
fn tables_are_aligned_and_squeezed() {
    let text = "| Name | Price |\n|:-----|------:|\n| **tea** | 2 |\n| a \\| b | 1000 |\n\nend";
    assert_eq!(shown(text), "Name  │ Price\n──────┼──────\ntea   │     2\na | b │  1000\n\nend");
    let narrow = plain(&rendered("| a | b |\n|---|---|\n| one two three | four five |", 15));
    assert_eq!(narrow, "a      │ b\n───────┼───────\none    │ four\ntwo    │ five\nthree  │ ");
    // Not even that fits: fields.
    let fields = plain(&rendered("|a|b|c|\n|-|-|-|\n|first|second|third|\n|1|2|", 12));
    assert_eq!(fields, "a: first\nb: second\nc: third\n\na: 1\nb: 2\nc:");
    // A bar alone makes no table.
    assert_eq!(shown("a || b\nc"), "a || b\nc");
    assert_eq!(shown("a | b\n---"), format!("a | b\n{}", "─".repeat(40)));
}

#[test]
fn rules_and_blank_lines() {
    assert_eq!(shown("\n\na\n\n\n\n* * *\nb\n\n"), format!("a\n\n{}\nb", "─".repeat(40)));
}

#[test]
fn what_is_hostile_is_harmless() {
    let text = "\x1b[2J# \x1b]0;owned\x07\n```\x1b[31m\n\x1b[A\n```\n&#27;[31m **&#x9b;2J** `\x1b[0m`\n[a](http://x/\x1b[1m)\n|\x1b|\n|-|\n|\x07|\n\u{202e}evil";
    let all = rendered(text, 40).iter().map(|row| encode(row, false)).collect::<String>();
    let own = ["\x1b[1m", "\x1b[2m", "\x1b[3m", "\x1b[4m", "\x1b[1;4m", "\x1b[0m"];
    let rest = own.iter().fold(all, |rest, code| rest.replace(code, ""));
    assert!(rest.chars().all(|c| !c.is_control() && c != '\u{202e}'), "{rest:?}");
}

#[test]
fn every_width_holds_every_line() {
    let text = "# A heading of some length\n> > - quoted item with words\n\n| wide | table |\n|---|---|\n| 日本語の文 | b |\n```\nlong code line\n```\n1. 👩‍👩‍👧 emoji";
    for columns in 4..60 {
        for row in rendered(text, columns) {
            assert!(width(&row) <= columns.max(8), "{columns}: {row:?}");
        }
    }
}

#[test]
fn a_preview_is_the_end_of_what_is_there() {
    let text = "intro\n\n- a\n- b **c**\n\n|x|y|\n|-|-|\n|1|2|\n```\ncode";
    for cut in (0..=text.len()).filter(|cut| text.is_char_boundary(*cut)) {
        let (mut markdown, mut rows) = (Markdown::default(), Vec::new());
        let (lines, pending) = text[..cut].rsplit_once('\n').map_or(("", &text[..cut]), |(l, p)| (l, p));
        if text[..cut].contains('\n') {
            lines.split('\n').for_each(|line| markdown.line(line, 60, &mut rows));
        }
        rows.extend(markdown.preview(pending, 60));
        assert_eq!(plain(&rows), shown(&text[..cut]), "{cut}");
    }
}

#[test]
fn a_table_that_grows_without_end_is_shown_by_its_last_lines() {
    let (mut markdown, mut rows) = (Markdown::default(), Vec::new());
    markdown.line("|a|", 60, &mut rows);
    markdown.line("|-|", 60, &mut rows);
    (0..1000).for_each(|i| markdown.line(&format!("|{i}|"), 60, &mut rows));
    assert!(rows.is_empty());
    let preview = markdown.preview("|new", 60);
    assert_eq!(preview.len(), MOST_SHOWN + 1);
    assert!(plain(&preview).ends_with("|999|\n|new"));
    markdown.finish(60, &mut rows);
    assert_eq!(rows.len(), 1002);
}
