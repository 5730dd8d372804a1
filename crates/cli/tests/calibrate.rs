//! Calibrating, and sculpting with it, through the binary.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn smoe(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_smoe")).args(args).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

const CHAT: &str = r#"{"messages": [{"role": "user", "content": "What is a cat?"}, {"role": "assistant", "content": "A cat is a small animal that likes to sleep."}]}
{"messages": [{"role": "user", "content": "And a dog?"}, {"role": "assistant", "content": "A dog is a friend."}, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "It likes people."}]}
"#;

#[test]
fn the_demo_vault_is_calibrated_in_passes_with_chat_and_with_plain_text() {
    let dir = tempfile::tempdir().unwrap();
    let (chat, stats) = (dir.path().join("chat.jsonl"), dir.path().join("stats"));
    std::fs::write(&chat, CHAT).unwrap();
    let read = |more: &[&str], out: &Path| {
        let args = ["calibrate", "demo", "--text", text(&chat), "-o", text(out), "--json"];
        smoe(&[&args[..], more].concat())
    };
    // Half for the model, half for the statistics of seven of eight layers, 10.8 MB each.
    let output = read(&["--answers-only", "--memory", "160M"], &stats);
    assert!(output.status.success(), "{}", said(&output));
    let made: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&made["layers"], &made["passes"]), (&Value::from(8), &Value::from(2)), "{made}");
    let (tokens, counted) = (made["tokens"].as_u64().unwrap(), made["counted"].as_u64().unwrap());
    // Answers are about half of this text.
    assert!(counted > tokens / 4 && counted < 3 * tokens / 4, "{made}");
    // All is there already.
    let again: Value = serde_json::from_slice(&read(&["--answers-only"], &stats).stdout).unwrap();
    assert_eq!(again["passes"], 0);
    // Another text is not mixed in.
    let other = read(&[], &stats);
    assert!(!other.status.success() && said(&other).contains("another model or text"), "{}", said(&other));

    let plain = dir.path().join("plain.txt");
    std::fs::write(&plain, "A cat sleeps.\n".repeat(200)).unwrap();
    let out = dir.path().join("plain-stats");
    let plain = |more: &[&str]| {
        let args =
            ["calibrate", "demo", "--text", text(&plain), "-o", text(&out), "--max-tokens", "300", "--json"];
        smoe(&[&args[..], more].concat())
    };
    let refused = plain(&["--answers-only"]);
    assert!(!refused.status.success() && said(&refused).contains("no conversations"), "{}", said(&refused));
    let made: Value = serde_json::from_slice(&plain(&[]).stdout).unwrap();
    assert_eq!((&made["tokens"], &made["counted"]), (&Value::from(300), &Value::from(300)));
}

#[test]
fn a_checkpoint_is_calibrated_by_way_of_a_vault_that_goes_and_then_sculpted() {
    let Some(checkpoint) = smoe_testkit::shared_path("demo-model") else { return };
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::write(at("chat.jsonl"), CHAT).unwrap();
    let output =
        smoe(&["calibrate", text(&checkpoint), "--text", text(&at("chat.jsonl")), "-o", text(&at("stats"))]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("removed"), "{}", said(&output));
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
    let (vault, stats) = (at("vault"), at("stats"));
    let args = ["sculpt", text(&checkpoint), text(&vault), "--bits", "3", "--calibration", text(&stats)];
    let output = smoe(&[&args[..], &["--validate"]].concat());
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("valid: every code"), "{}", said(&output));
    let output = smoe(&["run", text(&vault), "Hello", "--max-tokens", "8"]);
    assert!(output.status.success(), "{}", said(&output));
}
