//! The instrument, the report and traces, through the binary.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use smoe_testkit::TinyModel;
use tempfile::TempDir;

fn smoe(args: &[&str], stdin: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_smoe"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that wants no input may be gone already.
    let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
    child.wait_with_output().unwrap()
}

fn stderr(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(output.status.success(), "{text}");
    text
}

/// A model of three MoE layers, three of seven experts a token, with a byte tokeniser.
fn tiny() -> (TempDir, String, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let vault = dir.path().join("vault");
    std::fs::create_dir(&vault).unwrap();
    let q4 = "q4/64".parse().unwrap();
    TinyModel::qwen3(4).write_vault(&vault, [q4; 3], "q8/64".parse().unwrap());
    let out = dir.path().join("out");
    (dir, vault.to_str().unwrap().to_owned(), out)
}

/// The lines of stderr that are JSON.
fn readings(output: &Output) -> Vec<Value> {
    let text = stderr(output);
    text.lines()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn a_line_of_json_an_answer_adds_up() {
    let (_dir, vault, _) = tiny();
    let ids = (1..=20).map(|id| id.to_string()).collect::<Vec<_>>().join(",");
    let args = ["run", &vault, "--tokens-in", &ids, "--raw-ids", "--ignore-eos", "--max-tokens", "12"];
    let output = smoe(&[&args[..], &["--ring", "9", "--instrument=json"]].concat(), "");
    assert_eq!(String::from_utf8_lossy(&output.stdout).split_whitespace().count(), 12);
    let readings = readings(&output);
    let [reading] = &readings[..] else { panic!("{readings:?}") };
    let number = |key: &str| reading[key].as_f64().unwrap();
    assert_eq!((number("prompt_tokens"), number("decode_tokens"), number("ring_slots")), (20.0, 11.0, 9.0));
    assert_eq!(number("demand_hits") + number("demand_misses"), 11.0 * 3.0 * 3.0);
    assert!((number("hit_rate") - number("demand_hits") / 99.0).abs() < 1e-9);
    assert!((number("disk_bytes_per_token") * 11.0 - number("disk_bytes")).abs() < 1e-3);
    let buckets = reading["buckets_ms"].as_object().unwrap();
    assert_eq!(buckets.len(), 9);
    let sum: f64 = buckets.values().map(|ms| ms.as_f64().unwrap()).sum();
    assert!((sum * 11.0 - 1e3 * number("decode_s")).abs() < 1e-6 * sum);
}

/// The bundled model's routers rank the next layer's experts well enough: nobody has to ask for it.
#[test]
fn what_the_next_layer_wants_is_read_ahead_where_that_is_known() {
    let run = |look_ahead: &str| {
        let args =
            ["run", "demo", "--ring", "64", "--ignore-eos", "--max-tokens", "48", "--temperature", "0"];
        let output =
            smoe(&[&args[..], &["--look-ahead", look_ahead, "--instrument=json", "Rivers"]].concat(), "");
        let reading = readings(&output).remove(0);
        let ahead = |key: &str| reading[key].as_f64().unwrap();
        let in_use = ahead("ahead_hits_per_token") + ahead("ahead_late_per_token");
        (String::from_utf8(output.stdout).unwrap(), in_use, ahead("ahead_waste_per_token"))
    };
    let (plain, in_use, waste) = run("0");
    assert_eq!((in_use, waste), (0.0, 0.0));
    let (auto, in_use, waste) = run("auto");
    assert_eq!(auto, plain);
    assert!(
        in_use > 0.2 && in_use > waste,
        "{in_use} experts a token were wanted that had been read ahead, {waste} were not"
    );
}

#[test]
fn a_chat_has_a_reading_for_each_answer_and_one_report() {
    let (_dir, vault, out) = tiny();
    let args = ["chat", &vault, "--max-tokens", "8", "--instrument=json", "--report", out.to_str().unwrap()];
    let output = smoe(&args, "hello\nand more\n");
    let readings = readings(&output);
    assert_eq!(readings.len(), 2);
    assert!(readings[0]["reused_tokens"] == 0 && readings[1]["reused_tokens"].as_u64() > Some(0));
    assert!(stderr(&output).contains("report: "));
    let page = std::fs::read_to_string(out).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
    assert_eq!(page.matches("<svg ").count(), 5);
}

#[test]
fn a_table_stands_where_the_line_of_figures_would() {
    let output = smoe(&["demo", "--instrument"], "");
    let text = stderr(&output);
    assert!(text.contains("demand wait") && text.contains("a token: the wall time"), "{text}");
    assert!(!text.contains("first token after"), "{text}");
}

#[test]
fn a_report_that_cannot_be_written_is_refused_before_the_work() {
    let output = smoe(&["demo", "--report", "/no/such/directory/report.html"], "");
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    assert!(String::from_utf8_lossy(&output.stderr).contains("/no/such/directory"));
}

#[test]
fn a_panel_without_a_terminal_says_so_and_talks_on() {
    let (_dir, vault, _) = tiny();
    let output = smoe(&["chat", &vault, "--max-tokens", "4", "--panel"], "hello\n");
    assert!(stderr(&output).contains("--panel needs a terminal"));
    assert!(!output.stdout.is_empty());
    assert_eq!(smoe(&["chat", &vault, "--panel", "--instrument"], "").status.code(), Some(2));
}

#[test]
fn traces_are_recorded_and_replayed() {
    let (_dir, vault, out) = tiny();
    let out = out.to_str().unwrap();
    let replayed = |more: &[&str]| {
        let output = smoe(&[&["trace", "replay", out], more].concat(), "");
        stderr(&output);
        String::from_utf8(output.stdout).unwrap()
    };
    // Random tokens are decoded one by one, in as many sessions as the context asks for.
    let random = ["trace", "record", &vault, "--out", out, "--random", "50", "--context", "20"];
    assert!(
        stderr(&smoe(&random, "")).contains("50 tokens in 50 steps, 3 MoE layers of 7 experts, 3 a token")
    );
    let json: Value = serde_json::from_str(&replayed(&["--ring", "4,50%,100%", "--json"])).unwrap();
    assert_eq!(json["ring_slots"], serde_json::json!([4, 11, 21]));
    let scores = json["policies"].as_object().unwrap();
    assert_eq!(scores.keys().next_back().map(String::as_str), Some("belady"));
    assert_eq!(scores.len(), 8);
    for scores in scores.values() {
        for (i, score) in scores.as_array().unwrap().iter().enumerate() {
            let (hits, misses) = (score["hits"].as_u64().unwrap(), score["misses"].as_u64().unwrap());
            assert_eq!(hits + misses, 50 * 3 * 3);
            assert!(hits <= json["policies"]["belady"][i]["hits"].as_u64().unwrap());
        }
    }
    // With room for all, each expert that is used is missed once, whatever the policy.
    assert!(scores.values().all(|scores| scores[2]["misses"].as_u64() <= Some(21)));

    let prompt = ["trace", "record", &vault, "--out", out, "hello", "--no-template", "--max-tokens", "6"];
    // The prompt is one step; an answer's last token is not computed.
    let told = stderr(&smoe(&prompt, ""));
    let counts: Vec<u64> = told.split([' ', ':']).filter_map(|word| word.parse().ok()).collect();
    assert_eq!(counts[0] - 5, counts[1] - 1, "{told}");
    let table = replayed(&["--ring", "20%", "--policy", "lru,clock"]);
    let names: Vec<_> = table.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names[names.len() - 5..], ["ring", "slots", "lru", "clock", "belady"]);

    let refused = smoe(&["trace", "replay", out, "--policy", "mru"], "");
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("s3-fifo"));
    std::fs::write(out, "no trace").unwrap();
    let refused = smoe(&["trace", "replay", out], "");
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains(out));
}
