//! The tables, and their place in the experiment log.

use std::fmt::Write as _;
use std::path::Path;

use smoe_meter::fidelity::{DocumentMean, Estimate};
use smoe_sculpt::BackboneBits;

use super::score::Scores;
use super::texts::Texts;
use super::{Coding, Subject};
use crate::Result;

/// The lines between which a table stands.
pub type Marks = (&'static str, &'static str);
pub const MARKS: Marks = ("<!-- begin: written by `cargo xtask fidelity` -->", "<!-- end -->");
pub const DENSE_MARKS: Marks =
    ("<!-- begin: written by `cargo xtask fidelity --gguf` -->", "<!-- end of it -->");

/// Mean losses of the demo model over `heldout.jsonl` by its model card (transformers, f32): answers, all tokens.
const CARD: (f64, f64) = (1.205, 0.888);
/// The card has three decimals.
const CARD_TOLERANCE: f64 = 0.0006;

/// Mean KL of a prototype in Python with f32 activations, plain rounding in groups of 64, backbone untouched,
/// over the dialogues whose index 3 does not divide.
const PROTOTYPE: [(u8, f64); 6] =
    [(8, 0.00017), (6, 0.00099), (5, 0.00264), (4, 0.00912), (3, 0.0367), (2, 0.232)];

/// What a run found.
pub struct Report<'a> {
    pub command: String,
    pub commit: String,
    pub machine: String,
    pub model: String,
    pub texts: &'a Texts,
    pub subjects: &'a [Subject],
}

impl Report<'_> {
    /// Conditions and tables.
    pub fn text(&self) -> String {
        let mut text = String::new();
        self.conditions(&mut text);
        self.table(&mut text);
        self.codings(&mut text);
        self.comparison(&mut text);
        text
    }

    fn conditions(&self, text: &mut String) {
        line(text, &format!("- command: `{}`", self.command));
        line(text, &format!("- commit: {}", self.commit));
        line(text, &format!("- machine: {}", self.machine));
        line(
            text,
            &format!(
                "- text: {} dialogues of {}'s `heldout.jsonl`, {} tokens, {} scored, {} of them in answers",
                self.texts.list.len(),
                self.model,
                self.texts.tokens(|_| true),
                self.texts.tokens(|_| true) - self.texts.list.len(),
                self.texts.answers()
            ),
        );
    }

    fn table(&self, text: &mut String) {
        line(text, "");
        line(
            text,
            "| recipe | bits per expert weight | perplexity, answers | perplexity, all tokens | KL, nats | top-1, % |",
        );
        line(text, "| --- | ---: | ---: | ---: | ---: | ---: |");
        for subject in self.subjects {
            let Scores { answers, all_nll, .. } = &subject.scores;
            let kl = if subject.recipe.bits == 16 { "0".to_owned() } else { with_error(&answers.kl) };
            line(
                text,
                &format!(
                    "| {} | {:.2} | {:.3} | {:.3} | {kl} | {:.2} |",
                    subject.recipe.label(),
                    subject.weight_bits,
                    answers.nll.mean().exp(),
                    all_nll.mean().exp(),
                    100.0 * answers.top1.mean(),
                ),
            );
        }
        let Scores { answers, all_nll, .. } = &self.subjects[0].scores;
        line(text, "");
        line(
            text,
            &format!(
                "Mean loss of the bf16 vault: {:.4} nats on answers, {:.4} on all tokens.",
                answers.nll.mean(),
                all_nll.mean()
            ),
        );
    }

    /// What choosing codes better gains at equal bytes, judged by dialogues that calibrated nothing.
    fn codings(&self, text: &mut String) {
        let plain = |s: &&Subject| {
            !s.recipe.exact && s.recipe.backbone == BackboneBits::Bf16 && s.recipe.coded_bpw.is_none()
        };
        let find = |bits, coding| {
            self.subjects.iter().filter(plain).find(|s| s.recipe.bits == bits && s.recipe.coding == coding)
        };
        line(text, "");
        line(
            text,
            "Choosing codes, over the dialogues whose index 3 does not divide (the others calibrate; answers, int8 \
             activations):",
        );
        line(text, "");
        line(
            text,
            "| bits per expert weight | codes | KL, nats | of absmax at equal bytes | top-1, % | perplexity |",
        );
        line(text, "| ---: | --- | ---: | ---: | ---: | ---: |");
        for bits in [4, 3, 2] {
            let Some(base) = find(bits, Coding::Absmax) else { continue };
            for coding in Coding::ALL {
                let Some(subject) = find(bits, coding) else { continue };
                let answers = &subject.scores.apart;
                line(
                    text,
                    &format!(
                        "| {:.2} | {} | {} | {:.3} | {:.2} | {:.3} |",
                        subject.weight_bits,
                        coding.label(),
                        with_error(&answers.kl),
                        answers.kl.mean() / base.scores.apart.kl.mean(),
                        100.0 * answers.top1.mean(),
                        answers.nll.mean().exp(),
                    ),
                );
            }
        }
        for subject in self.subjects.iter().filter(|s| s.recipe.coded_bpw.is_some()) {
            let answers = &subject.scores.apart;
            let how =
                if matches!(subject.recipe.coding, Coding::Calibrated(_)) { ", calibrated" } else { "" };
            line(
                text,
                &format!(
                    "| {:.2} | entropy-coded{how} | {} | | {:.2} | {:.3} |",
                    subject.weight_bits,
                    with_error(&answers.kl),
                    100.0 * answers.top1.mean(),
                    answers.nll.mean().exp(),
                ),
            );
        }
    }

    fn comparison(&self, text: &mut String) {
        let prototype = &self.subjects[0].scores.apart.nll;
        line(text, "");
        line(
            text,
            &format!(
                "Against a prototype in Python, over the {} dialogues ({} answer tokens) whose index 3 does not divide:",
                prototype.documents(),
                prototype.tokens()
            ),
        );
        line(text, "");
        line(
            text,
            "| bits | prototype KL | KL, `--exact` | KL, int8 activations | perplexity, int8 | top-1, int8, % |",
        );
        line(text, "| ---: | ---: | ---: | ---: | ---: | ---: |");
        for (bits, expected) in PROTOTYPE {
            let find = |exact| {
                self.subjects
                    .iter()
                    .find(|s| {
                        let recipe = s.recipe;
                        recipe.coded_bpw.is_none()
                            && (recipe.bits, recipe.exact, recipe.coding) == (bits, exact, Coding::Absmax)
                    })
                    .map(|s| &s.scores.apart)
            };
            let (Some(exact), Some(coded)) = (find(true), find(false)) else { continue };
            line(
                text,
                &format!(
                    "| {bits} | {expected} | {} | {} | {:.3} | {:.2} |",
                    with_error(&exact.kl),
                    with_error(&coded.kl),
                    coded.nll.mean().exp(),
                    100.0 * coded.top1.mean()
                ),
            );
        }
    }

    /// That the bf16 vault reproduces the model card: the check that the scoring is right.
    pub fn check_card(&self) -> Result<()> {
        let Scores { answers, all_nll, .. } = &self.subjects[0].scores;
        let found = (answers.nll.mean(), all_nll.mean());
        let off = |found: f64, card: f64| (found - card).abs() > CARD_TOLERANCE;
        if off(found.0, CARD.0) || off(found.1, CARD.1) {
            return Err(format!("losses of {found:.4?} instead of {CARD:?}: the scoring is wrong").into());
        }
        Ok(())
    }
}

pub fn line(text: &mut String, line: &str) {
    writeln!(text, "{line}").expect("strings grow");
}

/// A mean and its standard error, as many digits as the error bears.
pub fn with_error(mean: &DocumentMean) -> String {
    let Estimate { value, standard_error } = Estimate::mean(mean);
    let places = if standard_error > 0.0 {
        (1.0 - standard_error.log10().floor()).clamp(2.0, 9.0) as usize
    } else {
        6
    };
    format!("{value:.places$} ± {standard_error:.places$}")
}

/// What stands before and after the table in the file at `path`, marks included; a file that is not there is begun.
pub fn around(path: &Path, (begin, end): Marks) -> Result<(String, String)> {
    let old = match std::fs::read_to_string(path) {
        Ok(old) => old,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            if parent.is_some_and(|parent| !parent.is_dir()) {
                return Err(format!("{}: there is no directory to write it to", path.display()).into());
            }
            format!("# Fidelity\n\n{begin}\n{end}\n")
        }
        Err(e) => return Err(format!("{}: {e}", path.display()).into()),
    };
    let marks = old.split_once(begin).and_then(|(head, rest)| Some((head, rest.split_once(end)?.1)));
    let (head, tail) =
        marks.ok_or_else(|| format!("{}: the lines `{begin}` and `{end}` are missing", path.display()))?;
    Ok((format!("{head}{begin}"), format!("{end}{tail}")))
}

/// Puts `text` between the marks of the file at `path`; a file that is not there is begun.
pub fn write(path: &Path, marks: Marks, text: &str) -> Result<()> {
    let (head, tail) = around(path, marks)?;
    std::fs::write(path, format!("{head}\n\n{text}\n{tail}"))?;
    eprintln!("written to {}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_between_the_marks_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table.md");
        write(&path, MARKS, "first").unwrap();
        let begun = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{begun}Prose below.\n")).unwrap();
        write(&path, MARKS, "second").unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(
            text.starts_with("# Fidelity\n") && text.ends_with(&format!("{}\nProse below.\n", MARKS.1)),
            "{text}"
        );
        assert!(text.contains("second") && !text.contains("first"), "{text}");
        std::fs::write(&path, "no marks").unwrap();
        assert!(write(&path, MARKS, "third").is_err());
    }

    #[test]
    fn a_mean_has_as_many_digits_as_its_error_bears() {
        let mut mean = DocumentMean::default();
        for value in [0.1, 0.2, 0.3, 0.2] {
            mean.begin();
            mean.add(value);
        }
        assert_eq!(with_error(&mean).split_once(" ± ").map(|(mean, _)| mean), Some("0.200"));
    }
}
