//! GGUF files as a user meets them: weights, tokenizer and template out of one file, or out of several.
#![allow(clippy::print_stderr, clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use smoe_testkit::gguf::{self, Gguf, Meta};
use smoe_testkit::{Golden, fixtures, tolerance};

const FAMILY: &str = "granitemoe";

fn smoe(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_smoe")).current_dir(dir).args(args).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn run(dir: &Path, args: &[&str]) -> String {
    let output = smoe(dir, args);
    assert!(output.status.success(), "{args:?}: {}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// A prompt of the reference implementation and its greedy continuation, in float32, as far as no choice was close.
struct Reference {
    prompt: Vec<u32>,
    greedy: Vec<u32>,
    /// Characters by token: those of `prompt` and `greedy` are letters.
    tokens: Vec<String>,
    /// A pair that is a token, of none of those letters.
    merge: String,
}

impl Reference {
    fn new() -> Self {
        let golden = Golden::of(FAMILY).unwrap();
        let prompt = golden.prompts.iter().find(|prompt| (4..20).contains(&prompt.tokens.len())).unwrap();
        let sure = prompt.greedy.iter().take_while(|step| step.margin > 2.0 * tolerance::GREEDY_MARGIN);
        let greedy: Vec<u32> = sure.map(|step| step.token).collect();
        assert!(greedy.len() >= 8, "a prompt whose answer is sure");
        let mut letters = ('a'..='z').chain('A'..='Z');
        // Of two bytes each, and none of them a letter.
        let mut tokens: Vec<String> =
            (0..128).map(|id| char::from_u32(0x100 + id).unwrap().to_string()).collect();
        for &id in prompt.tokens.iter().chain(&greedy) {
            if !tokens[id as usize].is_ascii() {
                tokens[id as usize] = letters.next().unwrap().to_string();
            }
        }
        let others: Vec<usize> = (0..128).filter(|&id| !tokens[id].is_ascii()).take(3).collect();
        let merge = format!("{} {}", tokens[others[0]], tokens[others[1]]);
        tokens[others[2]] = merge.replace(' ', "");
        Self { prompt: prompt.tokens.clone(), greedy, tokens, merge }
    }

    fn text(&self, ids: &[u32]) -> String {
        ids.iter().map(|&id| self.tokens[id as usize].as_str()).collect()
    }

    /// A token that the answer does not have.
    fn end(&self) -> u32 {
        (0..128).find(|id| !self.prompt.contains(id) && !self.greedy.contains(id)).unwrap()
    }

    /// The vault in `dir` answers as the reference, asked with numbers and asked with letters.
    fn check(&self, dir: &Path, vault: &str) {
        let n = self.greedy.len().to_string();
        let ids = self.prompt.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let how = ["--max-tokens", &n, "--temperature", "0"];
        let args = ["run", vault, "--tokens-in", &ids, "--raw-ids"];
        let found = run(dir, &[&args[..], &how].concat());
        let found: Vec<u32> = found.split_whitespace().map(|id| id.parse().unwrap()).collect();
        assert_eq!(found, self.greedy, "{vault}");
        let text = self.text(&self.prompt);
        let found = run(dir, &[&["run", vault, &text][..], &how].concat());
        assert_eq!(found.trim_end(), self.text(&self.greedy), "{vault}");
    }
}

const TEMPLATE: &str = "{% for message in messages %}{{ message['content'] }}{% endfor %}";

/// The fixture's file as llama.cpp's converter makes it, with a vocabulary.
fn file(reference: &Reference) -> Gguf {
    let (config, tensors) = gguf::load(&fixtures::fixture(FAMILY).unwrap());
    let mut file = gguf::of_checkpoint(&config, &tensors, false);
    file.set("tokenizer.ggml.model", Meta::str("gpt2"));
    file.set("tokenizer.ggml.pre", Meta::str("refact"));
    file.set("tokenizer.ggml.tokens", Meta::Strs(reference.tokens.clone()));
    file.set("tokenizer.ggml.token_type", Meta::I32s(vec![1; reference.tokens.len()]));
    file.set("tokenizer.ggml.merges", Meta::Strs(vec![reference.merge.clone()]));
    file.set("tokenizer.ggml.eos_token_id", Meta::U32(reference.end()));
    file.set("tokenizer.chat_template", Meta::str(TEMPLATE));
    file
}

const EXACT: [&str; 4] = ["--bits", "16", "--backbone", "bf16"];

#[test]
fn a_gguf_file_is_all_that_a_vault_needs() {
    let dir = tempfile::tempdir().unwrap();
    let reference = Reference::new();
    let whole = file(&reference);
    whole.write(&dir.path().join("tiny.gguf"));
    run(dir.path(), &[&["sculpt", "tiny.gguf", "vault"][..], &EXACT].concat());
    reference.check(dir.path(), "vault");
    // Its folder is named as well as the file, whatever sees images beside it.
    std::fs::create_dir(dir.path().join("folder")).unwrap();
    let at = |name: &str| dir.path().join("folder").join(name);
    whole.write(&at("tiny.gguf"));
    std::fs::write(at("mmproj-tiny.gguf"), b"GGUF").unwrap();
    std::fs::write(at("README.md"), b"").unwrap();
    let output = smoe(dir.path(), &[&["sculpt", "folder", "vault"][..], &EXACT].concat());
    assert!(output.status.success() && said(&output).contains("complete already"), "{}", said(&output));
    std::fs::write(at("tiny-Q8_0.gguf"), b"GGUF").unwrap();
    let output = smoe(dir.path(), &["sculpt", "folder", "other"]);
    assert!(
        said(&output).contains("several GGUF files; name one: tiny-Q8_0.gguf, tiny.gguf"),
        "{}",
        said(&output)
    );
}

#[test]
fn a_split_file_is_named_by_its_first_part_or_by_its_folder() {
    let dir = tempfile::tempdir().unwrap();
    let reference = Reference::new();
    let parts: Vec<PathBuf> = file(&reference).write_split(dir.path(), "tiny", 3);
    for (path, vault) in
        [("tiny-00001-of-00003.gguf", "first"), (".", "folder"), ("tiny-00003-of-00003.gguf", "last")]
    {
        run(dir.path(), &[&["sculpt", path, vault][..], &EXACT].concat());
        reference.check(dir.path(), vault);
    }
    std::fs::remove_file(&parts[1]).unwrap();
    for path in ["tiny-00001-of-00003.gguf", "."] {
        let output = smoe(dir.path(), &["sculpt", path, "none"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(said(&output).contains("tiny-00002-of-00003.gguf"), "{}", said(&output));
        assert!(!dir.path().join("none").exists() && !dir.path().join(".none.partial").exists());
    }
}

/// The same from a file that llama.cpp's own `gguf` package writes.
#[test]
fn a_file_of_the_gguf_package_is_read() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gguf/write.py");
    let python = std::env::var("SMOE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let has_gguf = Command::new(&python).args(["-c", "import gguf"]).output();
    if !has_gguf.is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED: {python} has no package gguf (set SMOE_PYTHON to one that has)");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let reference = Reference::new();
    let vocabulary = serde_json::json!({
        "tokens": reference.tokens, "merge": reference.merge, "eos": reference.end(), "template": TEMPLATE,
    });
    std::fs::write(dir.path().join("vocabulary.json"), vocabulary.to_string()).unwrap();
    let made = Command::new(&python)
        .arg(script)
        .arg(fixtures::fixture(FAMILY).unwrap())
        .arg(dir.path().join("vocabulary.json"))
        .arg(dir.path().join("tiny.gguf"))
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", said(&made));
    run(dir.path(), &[&["sculpt", "tiny.gguf", "vault"][..], &EXACT].concat());
    reference.check(dir.path(), "vault");
}
