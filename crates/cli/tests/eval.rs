//! `smoe eval` against the reference forward, in f64 and summed plainly.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::fmt::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use smoe_testkit::tiny::{CheckpointOptions, tokenizer};
use smoe_testkit::{TinyModel, VaultWeights, forward};
use tempfile::TempDir;

/// Means over tens of tokens of the engine's exact path against the reference: what a logit may be off, and less.
const MEAN: f64 = 1e-3;

fn smoe(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_smoe")).args(args).output().unwrap()
}

/// Two vaults of one checkpoint, at 16 and 4 bits.
struct Pair {
    dir: TempDir,
    fine: String,
    coarse: String,
}

impl Pair {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = dir.path().join("checkpoint");
        std::fs::create_dir(&checkpoint).unwrap();
        let options = CheckpointOptions { tokenizer: true, ..CheckpointOptions::default() };
        TinyModel::qwen3(4).write_checkpoint(&checkpoint, options);
        let make = |name: &str, flags: &[&str]| {
            let vault = dir.path().join(name).to_str().unwrap().to_owned();
            let made = smoe(&[&["sculpt", checkpoint.to_str().unwrap(), &vault], flags].concat());
            assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
            vault
        };
        let fine = make("fine", &["--bits", "16", "--backbone", "bf16"]);
        let coarse = make("coarse", &["--bits", "3"]);
        Self { dir, fine, coarse }
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path: PathBuf = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn eval(&self, more: &[&str]) -> Value {
        let common = ["eval", &self.coarse, "--against", &self.fine, "--exact", "--kv", "f32", "--json"];
        let output = smoe(&[&common[..], more].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

/// Figures of some tokens, each computed from the window it is in.
#[derive(Default)]
struct Expected {
    nll: Vec<f64>,
    kl: Vec<f64>,
    same: Vec<f64>,
}

impl Expected {
    fn add(&mut self, pair: &Pair, window: &[u32], counts: Range<usize>) {
        let rows = |vault: &str| {
            let weights = VaultWeights::open(Path::new(vault));
            let logits = forward(weights.spec(), &weights, window).logits;
            let probabilities = |row: &[f64]| -> Vec<f64> {
                let sum: f64 = row.iter().map(|l| l.exp()).sum();
                row.iter().map(|l| l.exp() / sum).collect()
            };
            logits.chunks(weights.spec().vocab_size).map(probabilities).collect::<Vec<_>>()
        };
        let (p, q) = (rows(&pair.fine), rows(&pair.coarse));
        let best = |row: &[f64]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
        for i in counts {
            let (p, q) = (&p[i - 1], &q[i - 1]);
            self.nll.push(-q[window[i] as usize].ln());
            self.kl.push(p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum());
            self.same.push(f64::from(u8::from(best(p) == best(q))));
        }
    }

    fn assert_is(&self, found: &Value) {
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let value = |path: &str| found.pointer(path).unwrap()["value"].as_f64().unwrap();
        assert_eq!(found["tokens"], self.nll.len());
        let near = |found: f64, expected: f64| assert!((found - expected).abs() < MEAN, "{found} {expected}");
        near(value("/nll"), mean(&self.nll));
        near(value("/perplexity").ln(), mean(&self.nll));
        near(value("/against/kl"), mean(&self.kl));
        // A near tie may fall otherwise.
        let changed = (value("/against/top_1") - mean(&self.same)).abs() * self.same.len() as f64;
        assert!(changed < 1.5, "{changed}");
        let difference = value("/against/perplexity_ratio").ln();
        near(difference, value("/nll") - value("/against/nll"));
    }
}

#[test]
fn a_plain_text_is_scored_window_by_window() {
    let pair = Pair::new();
    let text = "It is a truth universally acknowledged, that a single man in possession of a good fortune...";
    let tokens = tokenizer::encode(text);
    let file = pair.write("text.txt", text);
    let mut expected = Expected::default();
    // A window of 40 takes over 15 of the one before.
    let n = tokens.len();
    for (window, counts) in [(0..40, 1..40), (25..65, 15..40), (50..90, 15..40), (75..n, 15..n - 75)] {
        expected.add(&pair, &tokens[window], counts);
    }
    assert_eq!(expected.nll.len(), n - 1);
    let found = pair.eval(&["--text", &file, "--window", "40", "--overlap", "15", "--chunk", "7"]);
    expected.assert_is(&found);
    assert_eq!((&found["documents"], &found["complete"]), (&json!(4), &json!(true)));
    assert!(found["against"]["kl"]["standard_error"].as_f64().unwrap() > 0.0);

    // The same bits whatever the chunk, and with a ring that holds the least.
    let least = pair.eval(&["--text", &file, "--window", "40", "--overlap", "15", "--ring", "4"]);
    assert_eq!(found["against"], least["against"]);

    let mut short = Expected::default();
    short.add(&pair, &tokens[..12], 1..12);
    let found = pair.eval(&["--text", &file, "--max-tokens", "11"]);
    short.assert_is(&found);
    assert!(found["nll"]["standard_error"].is_null(), "one window has no spread");
}

#[test]
fn of_conversations_answers_alone_are_scored_if_asked_for() {
    let pair = Pair::new();
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let mut lines = String::new();
    let mut expected = Expected::default();
    for (question, answer) in [("1+1?", "2"), ("Why is the sky blue?", "It scatters."), ("Name?", "Tiny")] {
        let chat = json!({"messages": [turn("user", question), turn("assistant", answer)]});
        writeln!(lines, "{chat}").unwrap();
        let (open, close) = ([tokenizer::IM_START], [tokenizer::IM_END]);
        let text = tokenizer::encode;
        let question = [&open[..], &text(&format!("user\n{question}")), &close, &text("\n")].concat();
        let before = [question, open.to_vec(), text("assistant\n")].concat();
        let tokens = [&before[..], &text(answer), &close, &text("\n")].concat();
        let start = before.len();
        // The answer and the mark that ends it.
        expected.add(&pair, &tokens, start..start + answer.len() + 1);
    }
    let file = pair.write("chats.jsonl", &lines);
    let found = pair.eval(&["--text", &file, "--answers-only"]);
    expected.assert_is(&found);
    assert_eq!(found["documents"], 3);
    assert!(pair.eval(&["--text", &file])["tokens"].as_u64().unwrap() > 60);
}

#[test]
fn what_cannot_be_compared_or_read_is_named() {
    let pair = Pair::new();
    let text = pair.write("text.txt", "some text");
    let other = pair.dir.path().join("other");
    let refused = |args: &[&str], code: i32, needle: &str| {
        let output = smoe(args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(stderr.contains(needle), "{stderr}");
    };
    // The same tokens by other names.
    std::fs::create_dir(&other).unwrap();
    let options = CheckpointOptions { tokenizer: true, ..CheckpointOptions::default() };
    TinyModel::qwen3(4).write_checkpoint(&other, options);
    let mut json = tokenizer::tokenizer();
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    (vocab["e"], vocab["t"]) = (vocab["t"].clone(), vocab["e"].clone());
    std::fs::write(other.join("tokenizer.json"), json.to_string()).unwrap();
    let vault = pair.dir.path().join("other-vault").to_str().unwrap().to_owned();
    assert!(smoe(&["sculpt", other.to_str().unwrap(), &vault]).status.success());
    let eval = ["eval", &pair.fine, "--text", &text];
    refused(&[&eval[..], &["--against", &vault]].concat(), 1, "token 101 is `e` and `t`");
    refused(&[&eval[..], &["--against", "demo"]].concat(), 1, "their vocabularies have");
    refused(&[&eval[..], &["--answers-only"]].concat(), 2, "--answers-only");
    refused(&[&eval[..], &["--window", "1"]].concat(), 2, "--window 1");
    refused(&[&eval[..], &["--window", "9", "--overlap", "9"]].concat(), 2, "--overlap 9");
    let lines = pair.write("wrong.jsonl", "{\"text\": \"fine\"}\n{\"messages\": 1}\n");
    refused(&["eval", &pair.fine, "--text", &lines], 1, "line 2: it has neither `messages` nor `text`");
    let empty = pair.write("empty.txt", "");
    refused(&["eval", &pair.fine, "--text", &empty], 1, "nothing to predict");
    refused(&["eval", &pair.fine, "--text", "nowhere.txt"], 1, "nowhere.txt: cannot read it");
}
