//! `smoe pull` as a user meets it, from a hub of this machine.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

#[path = "../../hub/tests/common/mod.rs"]
mod common;

use std::path::Path;
use std::process::{Command, Output};

use common::{Fault, Hub, REPO, TOKEN, files, write_checkpoint};

fn smoe(dir: &Path, hub: &str, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_smoe"))
        .current_dir(dir)
        .env("HF_ENDPOINT", hub)
        .env("HF_TOKEN", TOKEN)
        .args(args)
        .output()
        .unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn a_repository_becomes_the_vault_that_sculpt_makes_of_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    write_checkpoint(&at("checkpoint"), 2, 4, 2);
    let hub = Hub::new(&at("checkpoint"), |_| None);
    let made = smoe(dir.path(), "", &["sculpt", "checkpoint", "expected", "--bits", "6"]);
    assert!(made.status.success(), "{}", stderr(&made));

    let dry = smoe(dir.path(), &hub.endpoint, &["pull", REPO, "--bits", "6", "--dry-run", "--json"]);
    assert!(dry.status.success(), "{}", stderr(&dry));
    let dry: serde_json::Value = serde_json::from_slice(&dry.stdout).unwrap();
    assert!(dry["arriving_bytes"].as_u64().unwrap() > 1_000_000 && dry["experts"] == 8, "{dry}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "a dry run leaves nothing");

    let pulled = smoe(dir.path(), &hub.endpoint, &["pull", REPO, "--bits", "6"]);
    assert!(pulled.status.success(), "{}", stderr(&pulled));
    assert!(
        stderr(&pulled).contains("made Tiny-MoE of owner/Tiny-MoE at 0123456789ab"),
        "{}",
        stderr(&pulled)
    );
    assert_eq!(files(&at("Tiny-MoE")), files(&at("expected")));
    assert!(!at(".Tiny-MoE.download").exists());
}

/// Budgets, entropy codes and error feedback, the statistics from a vault that was pulled before.
#[test]
fn low_bits_are_those_of_sculpt() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    write_checkpoint(&at("checkpoint"), 2, 4, 2);
    let hub = Hub::new(&at("checkpoint"), |_| None);
    let run = |args: &[&str]| {
        let output = smoe(dir.path(), &hub.endpoint, args);
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        stderr(&output)
    };
    run(&["pull", REPO, "eight", "--bits", "8"]);
    std::fs::write(at("text"), "what the experts see ".repeat(40)).unwrap();
    run(&["calibrate", "eight", "--text", "text", "-o", "stats"]);
    for (name, how) in [
        ("usual", &[][..]),
        ("budget", &["--bpw", "3.6"]),
        ("coded", &["--entropy"]),
        ("fed", &["--entropy", "--bpw", "2.5", "--calibration", "stats"]),
    ] {
        let expected = format!("{name}-expected");
        run(&[&["sculpt", "checkpoint", &expected], how].concat());
        run(&[&["pull", REPO, name], how].concat());
        assert_eq!(files(&at(name)), files(&at(&expected)), "{name}");
    }
    for flag in ["--validate", "--measure-error"] {
        let output = smoe(dir.path(), &hub.endpoint, &["pull", REPO, "no", flag]);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains("needs the whole checkpoint"), "{}", stderr(&output));
    }
}

#[test]
fn what_is_not_there_is_explained_with_an_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = dir.path().join("ggufs");
    std::fs::create_dir(&checkpoint).unwrap();
    for name in ["tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"] {
        std::fs::write(checkpoint.join(name), b"GGUF").unwrap();
    }
    let hub = Hub::new(&checkpoint, |_| None);
    let refused = |args: &[&str], code: i32, needle: &str| {
        let output = smoe(dir.path(), &hub.endpoint, &[&["pull"], args].concat());
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        assert!(stderr(&output).contains(needle), "{}", stderr(&output));
    };
    refused(&[REPO], 1, "name one with --file: tiny-Q4_K_M.gguf, tiny-Q8_0.gguf");
    refused(&[REPO, "--file", "tiny.gguf"], 1, "it has no GGUF file tiny.gguf, but only tiny-Q4_K_M.gguf");
    refused(&[REPO, "--file", "tiny-Q8_0.gguf"], 1, "the file ends within");
    refused(&["Tiny-MoE"], 2, "`Tiny-MoE` names no repository");
    refused(&[REPO, "--revision", "v2", "elsewhere"], 1, "has no owner/Tiny-MoE of revision v2");
    let private = Hub::new(&checkpoint, |_| Some(Fault::Status(401, Vec::new())));
    let output = smoe(dir.path(), &private.endpoint, &["pull", REPO, "private"]);
    assert!(stderr(&output).contains("the token in HF_TOKEN is not accepted"), "{}", stderr(&output));
    let output = smoe(dir.path(), "hub.example", &["pull", REPO, "nowhere"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("HF_ENDPOINT"), "{}", stderr(&output));
}
