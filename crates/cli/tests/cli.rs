//! The binary as a user meets it.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use smoe_testkit::tiny::CheckpointOptions;
use smoe_testkit::{Golden, TinyModel, compare, compare_greedy, fixtures, shared_path};
use tempfile::TempDir;

fn smoe<S: AsRef<OsStr>>(args: &[S]) -> Output {
    smoe_with(args, "")
}

fn smoe_with<S: AsRef<OsStr>>(args: &[S], stdin: &str) -> Output {
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

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}: {}", output.status, text(&output.stderr));
    text(&output.stdout)
}

/// A tiny checkpoint with a tokeniser and a chat template, sculpted.
fn tiny_vault() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = dir.path().join("checkpoint");
    std::fs::create_dir(&checkpoint).unwrap();
    TinyModel::qwen3(4)
        .write_checkpoint(&checkpoint, CheckpointOptions { tokenizer: true, ..CheckpointOptions::default() });
    let vault = dir.path().join("vault");
    stdout(&smoe(&[OsStr::new("sculpt"), checkpoint.as_os_str(), vault.as_os_str()]));
    (dir, vault)
}

fn ids(output: &Output) -> Vec<u32> {
    stdout(output).split_whitespace().map(|id| id.parse().unwrap()).collect()
}

#[test]
fn fixtures_meet_their_goldens_from_sculpt_to_tokens() {
    for family in fixtures::FAMILIES {
        let Some(checkpoint) = fixtures::fixture(family) else { continue };
        let golden = Golden::of(family).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let (vault, out) = (path("vault"), path("probe.safetensors"));
        let checkpoint = checkpoint.to_str().unwrap();
        stdout(&smoe(&["sculpt", checkpoint, &vault, "--bits", "16", "--backbone", "bf16"]));
        for (i, prompt) in golden.prompts.iter().enumerate() {
            let tokens = prompt.tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            stdout(&smoe(&["probe", &vault, "--tokens-in", &tokens, "--out", &out]));
            let bytes = std::fs::read(&out).unwrap();
            let probe = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let plane = |name: &str| -> Vec<f32> {
                let data = probe.tensor(name).unwrap();
                let values = data.data().chunks_exact(4);
                values.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            };
            let spec = smoe_engine::Vault::open(Path::new(&vault)).unwrap().spec;
            let (hidden, router) = (plane("hidden"), plane("router"));
            compare(&golden, i, &plane("logits"), Some(&hidden), Some(&router), &spec).assert_passes();
            let run = smoe(&[
                "run",
                &vault,
                "--tokens-in",
                &tokens,
                "--raw-ids",
                "--ignore-eos",
                "--temperature",
                "0",
                "--max-tokens",
                "24",
            ]);
            compare_greedy(&ids(&run), &prompt.greedy).assert_passes();
        }
    }
}

/// A version 1 file is a version 2 file without an architecture block; the checkpoint's config says the rest.
#[test]
fn original_files_of_both_versions_answer_like_a_vault_of_the_same_checkpoint() {
    let Some(pair) = shared_path("fixtures/original-vault-v2") else { return };
    let Some(checkpoint) = shared_path("fixtures/qwen3_moe") else { return };
    let dir = tempfile::tempdir().unwrap();
    let vault = dir.path().join("vault");
    let flags = ["--bits", "4", "--recipe", "absmax", "--backbone", "bf16"].map(OsStr::new);
    let paths = [OsStr::new("sculpt"), checkpoint.as_os_str(), vault.as_os_str()];
    stdout(&smoe(&[&paths[..], &flags].concat()));
    let mut original = std::fs::read(pair.join("qwen3_moe.smoe")).unwrap();
    original[8] = 1;
    original[60..64].fill(0);
    let version_1 = dir.path().join("old.smoe");
    std::fs::write(&version_1, original).unwrap();
    let scout = dir.path().join("old.scout.safetensors");
    std::fs::copy(pair.join("qwen3_moe.scout.safetensors"), scout).unwrap();
    let run = |vault: &Path, tokens: &str| {
        let args =
            ["--tokens-in", tokens, "--raw-ids", "--ignore-eos", "--temperature", "0", "--max-tokens", "24"];
        smoe(&[&["run", vault.to_str().unwrap()], &args[..]].concat())
    };
    let refused = run(&version_1, "34");
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("config.json"), "{}", text(&refused.stderr));
    std::fs::copy(checkpoint.join("config.json"), dir.path().join("config.json")).unwrap();
    for prompt in Golden::of("qwen3_moe").unwrap().prompts {
        let tokens = prompt.tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let expected = ids(&run(&vault, &tokens));
        assert_eq!(ids(&run(&pair.join("qwen3_moe.smoe"), &tokens)), expected, "version 2");
        assert_eq!(ids(&run(&version_1, &tokens)), expected, "version 1");
    }
}

#[test]
fn the_bundled_demo_answers_with_no_setup() {
    let output = smoe(&["demo"]);
    let answer = stdout(&output);
    assert!(answer.split_whitespace().count() > 20, "{answer}");
    assert!(text(&output.stderr).contains("tok/s"), "{}", text(&output.stderr));
    // The seed is fixed: it answers the same again, whatever the ring.
    assert_eq!(stdout(&smoe(&["demo", "--ring", "4", "--threads", "1"])), answer);
    assert!(stdout(&smoe(&["verify", "demo"])).contains("whole"));
    assert!(stdout(&smoe(&["inspect", "demo", "--json"])).contains("\"qwen3_moe\""));
    assert!(stdout(&smoe(&["plan", "demo", "--json"])).contains("\"floor_bytes\""));
}

#[test]
fn chat_remembers_and_obeys_its_commands() {
    let lines = "My favourite colour is green.\nTell me more.\n/stats\n/nonsense\n/reset\n/system Be brief.\nHello!\n";
    let output = smoe_with(&["chat", "demo", "--temperature", "0", "--max-tokens", "40"], lines);
    let answers = stdout(&output);
    assert_eq!(answers.lines().filter(|line| !line.trim().is_empty()).count(), 3, "{answers}");
    let told = text(&output.stderr);
    assert!(told.contains("no such command") && told.contains("forgotten"), "{told}");
    assert!(told.contains("kernels"), "{told}");
}

#[test]
fn a_conversation_that_does_not_fit_says_so() {
    let output = smoe_with(&["chat", "demo", "--context", "32"], &"word ".repeat(60));
    assert!(stdout(&output).trim().is_empty());
    assert!(text(&output.stderr).contains("of 32 positions"), "{}", text(&output.stderr));
}

#[test]
fn prompts_come_as_argument_pipe_or_tokens_and_end_where_they_should() {
    let (_dir, vault) = tiny_vault();
    let vault = vault.to_str().unwrap();
    let run = |more: &[&str], stdin: &str| {
        smoe_with(&[&["run", vault, "--temperature", "0", "--max-tokens", "12"], more].concat(), stdin)
    };
    let argument = stdout(&run(&["--raw-ids", "hello"], ""));
    assert_eq!(stdout(&run(&["--raw-ids"], "hello\n")), argument);
    // The byte tokeniser: ids are bytes; without a template the prompt stands as it is.
    let plain = stdout(&run(&["--raw-ids", "--no-template", "hi"], ""));
    assert_eq!(stdout(&run(&["--raw-ids", "--tokens-in", "104,105"], "")), plain);
    assert_ne!(plain, argument);
    // Stop strings cut the text, wherever tokens end.
    let whole = stdout(&run(&["--no-template", "--ignore-eos", "hi"], ""));
    let stop: String = whole.chars().skip(2).take(1).collect();
    let cut = stdout(&run(&["--no-template", "--ignore-eos", "--stop", &stop, "hi"], ""));
    assert_eq!(cut.trim_end_matches('\n'), whole.split(&stop).next().unwrap());
    // Ids only: nothing else on stdout.
    assert_eq!(ids(&run(&["--raw-ids", "--ignore-eos", "hi"], "")).len(), 12);
}

#[test]
fn damage_is_named_and_never_answered() {
    let (_dir, vault) = tiny_vault();
    let args = |vault: &Path| {
        let vault = vault.to_str().unwrap();
        ["run", vault, "--raw-ids", "--tokens-in", "1,2,3", "--temperature", "0", "--max-tokens", "8"]
            .map(str::to_owned)
    };
    let expected = stdout(&smoe(&args(&vault)));
    let names: Vec<_> = std::fs::read_dir(&vault).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(names.len() >= 4, "{names:?}");
    for name in names {
        let file = vault.join(&name);
        let whole = std::fs::read(&file).unwrap();
        let mut damages: Vec<Vec<u8>> = vec![whole[..whole.len() / 2].to_vec(), Vec::new()];
        for i in 0..5 {
            let mut flipped = whole.clone();
            let at = (whole.len() - 1) * i / 4;
            flipped[at] ^= 0x10;
            damages.push(flipped);
        }
        for damaged in damages {
            std::fs::write(&file, &damaged).unwrap();
            let verify = smoe(&["verify", vault.to_str().unwrap()]);
            assert_eq!(verify.status.code(), Some(1), "{name:?}");
            assert!(text(&verify.stdout).contains(name.to_str().unwrap()), "{}", text(&verify.stdout));
            let run = smoe(&args(&vault));
            match run.status.code() {
                Some(0) => assert_eq!(text(&run.stdout), expected, "{name:?}"),
                Some(1) => assert!(text(&run.stderr).contains("error: "), "{}", text(&run.stderr)),
                other => panic!("{name:?}: {other:?}"),
            }
        }
        std::fs::write(&file, &whole).unwrap();
    }
    assert_eq!(stdout(&smoe(&args(&vault))), expected);
}

#[test]
fn entropy_coded_experts_are_made_described_checked_and_answer() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (checkpoint, vault) = (path("checkpoint"), path("vault"));
    std::fs::create_dir(&checkpoint).unwrap();
    let mut spec = TinyModel::qwen3(8).spec;
    (spec.d_model, spec.moe.d_expert) = (256, 128);
    TinyModel::new(spec, 8).write_checkpoint(Path::new(&checkpoint), CheckpointOptions::default());
    let sculpt = ["sculpt", &checkpoint, &vault, "--entropy", "--bpw", "2.5", "--validate"];
    let made = smoe(&sculpt);
    stdout(&made);
    assert!(text(&made.stderr).contains("valid: every code and scale"), "{}", text(&made.stderr));
    stdout(&smoe(&["verify", &vault]));
    let json = |args: &[&str]| serde_json::from_str::<serde_json::Value>(&stdout(&smoe(args))).unwrap();
    let facts = json(&["inspect", &vault, "--json"]);
    assert_eq!(facts["entropy_coded"], true);
    let bits = facts["bits_per_expert_weight_unpadded"].as_f64().unwrap();
    assert!((2.4..=2.52).contains(&bits), "{bits}");
    assert!(facts["record_bytes"].as_u64().unwrap() < facts["slot_bytes_of_all_experts"].as_u64().unwrap());
    assert!(stdout(&smoe(&["inspect", &vault])).contains("entropy-coded: 2."));
    let plan = json(&["plan", &vault, "--json"]);
    let decoding = &plan["entropy_decoding"];
    assert!(decoding["codes_per_s_a_thread"].as_f64().unwrap() > 0.0 && decoding["keeps_up"].is_boolean());
    let number = |key: &str| decoding[key].as_f64().unwrap();
    assert_eq!(decoding["pays"].as_bool().unwrap(), number("waited_for") <= 0.14);
    assert!(number("waited_for") <= number("share_of_disk_time"));
    let from = decoding["pays_from_misses_a_layer"].as_f64();
    assert_eq!(
        from.is_some_and(|from| from <= number("misses_a_layer")),
        decoding["pays"].as_bool().unwrap()
    );
    let share = number("disk_bytes_per_s")
        / number("record_bytes_per_s_a_thread")
        / plan["threads"].as_f64().unwrap();
    assert!((number("share_of_disk_time") / share - 1.0).abs() < 1e-9);
    assert!(stdout(&smoe(&["plan", &vault])).contains("G codes/s a thread"));
    let run = [
        "run",
        &vault,
        "--raw-ids",
        "--tokens-in",
        "5,6,7",
        "--ring",
        "3",
        "--max-tokens",
        "4",
        "--ignore-eos",
    ];
    assert_eq!(ids(&smoe(&run)).len(), 4);
    for (args, what) in [
        (&["sculpt", &checkpoint, &path("no"), "--entropy", "--bits", "3"][..], "--bits"),
        (&["sculpt", &checkpoint, &path("no"), "--entropy", "--bpw", "5"], "1.5 to 3.9"),
    ] {
        let output = smoe(args);
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains(what), "{}", text(&output.stderr));
    }
}

#[test]
fn a_chat_outlives_a_failed_answer() {
    let (_dir, vault) = tiny_vault();
    let file = vault.join("experts.smoe");
    let mut bytes = std::fs::read(&file).unwrap();
    let len = bytes.len();
    // Every record is damaged; the head is whole.
    for at in (16 * 1024..len).step_by(1000) {
        bytes[at] ^= 1;
    }
    std::fs::write(&file, bytes).unwrap();
    // A ring below all experts, so that nothing is loaded beforehand.
    let output = smoe_with(&["chat", vault.to_str().unwrap(), "--ring", "3"], "one\ntwo\n/stats\n");
    let told = text(&output.stderr);
    assert!(output.status.success(), "{told}");
    assert_eq!(told.matches("error: ").count(), 2, "{told}");
    assert!(told.contains("layer") && told.contains("expert") && told.contains("kernels"), "{told}");
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    for args in [&["inspect", "demo"][..], &["plan", "demo"], &["verify", "demo"], &["demo"]] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_smoe"))
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    }
}

#[test]
fn templates_render_exactly_and_their_errors_are_failures() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.jinja");
    std::fs::write(
        &file,
        "{%- if not messages %}{{ raise_exception('no messages') }}{% endif %}\
         {{ messages[0].content }} {{ strftime_now('%Y-%m-%d') }}{% if tools %} tools{% endif %}",
    )
    .unwrap();
    let file = file.to_str().unwrap();
    let input = r#"{"messages": [{"role": "user", "content": "hi"}], "tools": null,
        "strftime_now": "2026-01-02 03:04:05"}"#;
    assert_eq!(stdout(&smoe_with(&["template", file], input)), "hi 2026-01-02");
    let failed = smoe_with(&["template", file], r#"{"messages": []}"#);
    assert_eq!(failed.status.code(), Some(1));
    assert!(text(&failed.stderr).contains("no messages"));
    assert_eq!(smoe_with(&["template", file], "not json").status.code(), Some(1));
}

#[test]
fn wrong_usage_is_2_a_failure_is_1_and_both_say_what_to_do() {
    let code = |args: &[&str]| smoe(args).status.code();
    assert_eq!(code(&[]), Some(2));
    assert_eq!(code(&["run", "demo", "--temperature", "warm", "x"]), Some(2));
    assert_eq!(code(&["run", "demo", "--ring", "lots", "x"]), Some(2));
    assert_eq!(code(&["run", "demo", "--ring", "0", "x"]), Some(2));
    assert_eq!(code(&["run", "demo", "--context", "0", "x"]), Some(2));
    assert_eq!(code(&["run", "demo", "--memory", "1000T", "x"]), Some(2));
    assert_eq!(code(&["run", "demo", ""]), Some(2));
    assert_eq!(code(&["run", "/no/such/vault", "x"]), Some(1));
    let error = |args: &[&str]| text(&smoe(args).stderr);
    assert!(error(&["run", "demo", "--ring", "1", "x"]).contains("--ring"));
    assert!(error(&["run", "demo", "--memory", "1M", "x"]).contains("--memory"));
    assert!(error(&["run", "demo", "--tokens-in", "99999"]).contains("99999"));
    assert!(error(&["run", "demo", "--temperature", "-1", "x"]).contains("temperature"));
    assert!(text(&smoe(&["--help"]).stdout).contains("sculpt"));
}
