//! What the vaults read: dialogues with answers, or windows of a plain text.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use smoe_text::{ModelText, TemplateInput};

use crate::Result;

/// Tokens of a window, which sees nothing before it.
pub const WINDOW: usize = 512;
/// Windows that calibrate, at most, and that judge.
const CALIBRATING: usize = 40;
const JUDGING: usize = 12;

/// Tokens that see each other.
#[derive(Debug)]
pub struct Text {
    pub tokens: Vec<u32>,
    /// The tokens whose predictions count.
    pub answer: Vec<bool>,
    pub calibrates: bool,
    pub judges: bool,
}

/// All of them.
#[derive(Debug)]
pub struct Texts {
    pub list: Vec<Text>,
}

impl Texts {
    /// The dialogues of `heldout.jsonl` beside a checkpoint, or the first of them, by the model's own template. All
    /// judge, and those calibrate whose index 3 divides.
    pub fn dialogues(checkpoint: &Path, most: Option<usize>) -> Result<Self> {
        let text = ModelText::load(&|name| fs::read(checkpoint.join(name)).ok())?;
        let lines = fs::read_to_string(checkpoint.join("heldout.jsonl"))?;
        let dialogue = |(index, line): (usize, &str)| -> Result<Text> {
            let messages = serde_json::from_str::<Value>(line)?["messages"].take();
            let input = TemplateInput { messages, ..Default::default() };
            let dialogue = text.dialogue(&input).map_err(|e| format!("dialogue {index}: {e}"))?;
            let calibrates = index.is_multiple_of(3);
            Ok(Text { tokens: dialogue.tokens, answer: dialogue.answer, calibrates, judges: true })
        };
        let list = lines.lines().enumerate().take(most.unwrap_or(usize::MAX)).map(dialogue);
        Ok(Self { list: list.collect::<Result<_>>()? })
    }

    /// Windows of plain text, every token after the first of which counts: those of the first three quarters calibrate,
    /// the others judge. No more than one of a part, so that they are of many subjects.
    pub fn windows(parts: &[String], model: &ModelText, judging: Option<usize>) -> Result<Self> {
        let tokenizer = model.tokenizer.as_ref().ok_or("the model has no tokenizer")?;
        let mut windows = Vec::new();
        for part in parts {
            let tokens = tokenizer.encode(part)?;
            let most = if parts.len() == 1 { usize::MAX } else { 1 };
            windows.extend(tokens.chunks_exact(WINDOW).take(most).map(<[u32]>::to_vec));
        }
        let judging = judging.unwrap_or(JUDGING).min(windows.len() / 4);
        if judging == 0 {
            let what = format!("the text has {} windows of {WINDOW} tokens, and 4 are needed", windows.len());
            return Err(what.into());
        }
        let apart = windows.len() * 3 / 4;
        let mut list = Vec::new();
        for (i, tokens) in windows.into_iter().enumerate() {
            let mut answer = vec![true; WINDOW];
            answer[0] = false;
            let (calibrates, judges) = (i < apart.min(CALIBRATING), (apart..apart + judging).contains(&i));
            if calibrates || judges {
                list.push(Text { tokens, answer, calibrates, judges });
            }
        }
        Ok(Self { list })
    }

    /// Tokens of those that `choose` takes.
    pub fn tokens(&self, choose: impl Fn(&Text) -> bool) -> usize {
        self.list.iter().filter(|text| choose(text)).map(|text| text.tokens.len()).sum()
    }

    /// Tokens that count, of those that judge.
    pub fn answers(&self) -> usize {
        let judging = self.list.iter().filter(|text| text.judges);
        judging.flat_map(|text| &text.answer).filter(|answer| **answer).count()
    }
}

/// The chapters of the Rust book that comes with a toolchain, as plain text.
pub fn rust_book() -> Result<Vec<String>> {
    let output = Command::new("rustc").args(["--print", "sysroot"]).output()?;
    let book = PathBuf::from(String::from_utf8(output.stdout)?.trim()).join("share/doc/rust/html/book");
    let missing = |e| {
        format!("{}: {e}: `rustup component add rust-docs`, or name a plain text with --text", book.display())
    };
    let mut chapters: Vec<PathBuf> = fs::read_dir(&book)
        .map_err(missing)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("ch") && name.ends_with(".html")
        })
        .collect();
    chapters.sort();
    chapters.iter().map(|path| Ok(plain(&fs::read_to_string(path)?))).collect()
}

/// The text of a page's main part.
fn plain(html: &str) -> String {
    let main = html.split_once("<main>").map_or(html, |(_, rest)| rest);
    let main = main.split_once("</main>").map_or(main, |(main, _)| main);
    let mut text = String::with_capacity(main.len());
    let mut rest = main;
    while let Some((before, tag)) = rest.split_once('<') {
        text.push_str(before);
        rest = tag.split_once('>').map_or("", |(_, after)| after);
    }
    text.push_str(rest);
    for (entity, character) in
        [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#39;", "'"), ("&#x27;", "'"), ("&amp;", "&")]
    {
        text = text.replace(entity, character);
    }
    // Blank lines stand where tags were.
    let lines = text.lines().map(str::trim_end).collect::<Vec<_>>();
    let mut out = String::with_capacity(text.len());
    for pair in lines.chunk_by(|a, b| a.is_empty() && b.is_empty()) {
        out.push_str(pair[0]);
        out.push('\n');
    }
    out.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_its_text() {
        let page = "<html>no<main>\n<h1>A &amp; B</h1>\n\n\n\n<p>x &lt; <code>y</code>\n</p></main>neither";
        assert_eq!(plain(page), "A & B\n\nx < y");
    }
}
