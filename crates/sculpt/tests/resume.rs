//! Stopped, killed or torn at any moment and run again: the same bytes, and no vault before that.
#![allow(clippy::print_stderr)]

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use common::{Random, Tiny, Type, Watch, files, run, settings, watched};
use serde_json::json;
use smoe_sculpt::{BackboneBits, Outcome, SculptError, Settings, dry_run, sculpt};

fn ours() -> Settings {
    Settings { threads: Some(2), ..settings(4, BackboneBits::Q8) }
}

/// Records whose lengths, and so whose places, are known only once they are made.
fn coded() -> Settings {
    Settings { entropy: true, coded_bpw: Some(300), group: 32, ..ours() }
}

/// Written while a process is started: between fork and exec it holds the files of the other tests, locks included,
/// and what was just given back would seem busy.
static FORK: RwLock<()> = RwLock::new(());

/// A checkpoint, the files of its uninterrupted vault, and their directory.
struct Case {
    /// Nobody forks meanwhile; `None` in the test that does.
    _no_fork: Option<RwLockReadGuard<'static, ()>>,
    dir: tempfile::TempDir,
    checkpoint: PathBuf,
    settings: Settings,
    whole: BTreeMap<String, Vec<u8>>,
}

impl Case {
    fn new(tiny: &Tiny) -> Self {
        Self::with(tiny, ours())
    }

    fn with(tiny: &Tiny, settings: Settings) -> Self {
        let no_fork = FORK.read().unwrap_or_else(PoisonError::into_inner);
        let dir = tempfile::tempdir().expect("dir");
        let checkpoint = dir.path().join("checkpoint");
        tiny.write(&checkpoint, 2);
        let reference = dir.path().join("reference");
        run(&checkpoint, &reference, &Settings { threads: Some(1), ..settings.clone() }).expect("sculpted");
        let whole = files(&reference);
        Self { _no_fork: Some(no_fork), dir, checkpoint, settings, whole }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Finishes `vault` and compares.
    fn finish(&self, vault: &Path) -> Vec<String> {
        let (outcome, warnings) = watched(&self.checkpoint, vault, &self.settings);
        assert_eq!(outcome.expect("finished"), Outcome::Created);
        let made = files(vault);
        assert!(made.keys().eq(self.whole.keys()), "{:?}", made.keys());
        for (name, bytes) in &made {
            assert!(*bytes == self.whole[name], "{name} differs");
        }
        assert!(!partial(vault).exists());
        warnings
    }

    /// Cancels after `bytes` of progress; true if that was before the end.
    fn cancel(&self, vault: &Path, bytes: u64) -> bool {
        let stop = AtomicBool::new(false);
        let watch = Watch::new(&stop, bytes);
        match sculpt(&self.checkpoint, vault, &self.settings, &watch, &stop) {
            Err(SculptError::Cancelled { partial: kept, done, total }) => {
                assert_eq!(kept, partial(vault));
                assert!(done <= total && kept.is_dir() && !vault.exists());
                true
            }
            Ok(Outcome::Created) => false,
            other => panic!("{other:?}"),
        }
    }
}

fn partial(vault: &Path) -> PathBuf {
    let name = vault.file_name().expect("name").to_str().expect("UTF-8");
    vault.with_file_name(format!(".{name}.partial"))
}

#[test]
fn cancelled_at_any_item_it_goes_on_to_the_same_bytes() {
    cancelled_at_any_item(&Case::new(&Tiny::qwen3(Type::Bf16, 21)));
    cancelled_at_any_item(&Case::with(&Tiny::qwen3(Type::Bf16, 21), coded()));
}

fn cancelled_at_any_item(case: &Case) {
    let total = dry_run(&case.checkpoint, None, &case.settings, &AtomicBool::new(false)).expect("plan");
    let total = total.experts_bytes + total.backbone_bytes;
    let mut random = Random(99);
    let mut stops = 0;
    for i in 0..25 {
        let vault = case.path(&format!("v{i}"));
        // Also within the final check, which reads everything once more, and several times in a row.
        while stops < 1000 && case.cancel(&vault, 1 + random.below(2 * total)) {
            stops += 1;
            if random.below(3) == 0 {
                break;
            }
        }
        if !vault.exists() {
            assert_eq!(case.finish(&vault), [""; 0]);
        } else {
            assert!(files(&vault) == case.whole);
        }
    }
    eprintln!("stopped {stops} times in 25 sculpts");
    assert!(stops > 10);
}

#[test]
fn what_a_power_cut_can_tear_is_noticed_and_done_again() {
    what_a_power_cut_can_tear(&Case::new(&Tiny::qwen3(Type::F16, 22)), 10);
    // A record that is torn costs those behind it, too, which are not told one by one.
    what_a_power_cut_can_tear(&Case::with(&Tiny::qwen3(Type::F16, 22), coded()), 5);
}

fn what_a_power_cut_can_tear(case: &Case, least: usize) {
    let mut random = Random(7);
    let mut redone = 0;
    for i in 0..40 {
        let vault = case.path(&format!("v{i}"));
        if !case.cancel(&vault, 200_000 + random.below(150_000)) {
            continue;
        }
        let dir = partial(&vault);
        let names = ["journal", "experts.smoe", "backbone.safetensors"];
        for _ in 0..=random.below(2) {
            let path = dir.join(names[random.below(3) as usize]);
            let Ok(mut bytes) = std::fs::read(&path) else { continue };
            let len = bytes.len() as u64;
            match random.below(5) {
                0 => bytes.truncate((len - random.below(len.min(300))) as usize),
                1 => bytes.truncate(random.below(len) as usize),
                2 => {
                    let tail = bytes.len() - random.below(len.min(5000)) as usize;
                    bytes[tail..].fill(0);
                }
                3 => {
                    for _ in 0..20 {
                        bytes[random.below(len) as usize] ^= 1 << random.below(8);
                    }
                }
                _ => {
                    std::fs::remove_file(&path).expect("removed");
                    continue;
                }
            }
            std::fs::write(&path, bytes).expect("torn");
        }
        redone += case.finish(&vault).iter().filter(|w| w.contains("done again")).count();
    }
    eprintln!("{redone} pieces were noticed to be damaged and done again");
    assert!(redone > least);
}

/// The child of the next test: sculpts what the environment says.
#[test]
fn child_sculpts_on_request() {
    if let (Some(checkpoint), Some(vault)) = (std::env::var_os("CHILD_FROM"), std::env::var_os("CHILD_TO")) {
        run(Path::new(&checkpoint), Path::new(&vault), &ours()).expect("sculpted");
    }
}

#[test]
fn killed_processes_leave_work_that_goes_on_to_the_same_bytes() {
    // Some megabytes, so that there is something to be killed in.
    let mut tiny = Tiny::qwen3(Type::Bf16, 23);
    for (key, value) in [
        ("hidden_size", json!(256)),
        ("moe_intermediate_size", json!(192)),
        ("num_experts", json!(24)),
        ("vocab_size", json!(3000)),
        ("num_hidden_layers", json!(4)),
    ] {
        tiny.config[key] = value;
    }
    let case = Case { _no_fork: None, ..Case::new(&Tiny::fill(tiny.config, Type::Bf16, 23)) };
    let mut random = Random(5);
    let (mut kills, mut went_on) = (0, 0);
    for i in 0..4 {
        let vault = case.path(&format!("v{i}"));
        for _ in 0..8 {
            let fork = FORK.write().unwrap_or_else(PoisonError::into_inner);
            let mut child = Command::new(std::env::current_exe().expect("test binary"))
                .args(["--exact", "child_sculpts_on_request"])
                .env("CHILD_FROM", &case.checkpoint)
                .env("CHILD_TO", &vault)
                .stdout(Stdio::null())
                .spawn()
                .expect("child");
            drop(fork);
            // Killed once so many pieces more are in the journal, or when it has ended by itself.
            let pieces = || {
                let journal = std::fs::read(partial(&vault).join("journal")).unwrap_or_default();
                journal.iter().filter(|&&byte| byte == b'\n').count() as u64
            };
            let enough = pieces() + random.below(30);
            let ended = loop {
                let ended = child.try_wait().expect("child");
                if ended.is_some() || pieces() > enough {
                    break ended;
                }
                std::thread::yield_now();
            };
            child.kill().expect("kill");
            child.wait().expect("child");
            if ended.is_some() || vault.exists() {
                break;
            }
            kills += 1;
            let journal = std::fs::read(partial(&vault).join("journal")).unwrap_or_default();
            went_on += usize::from(journal.iter().filter(|&&b| b == b'\n').count() > 1);
        }
        if vault.exists() {
            // Complete under its name, however the process ended.
            assert!(files(&vault) == case.whole);
        } else {
            case.finish(&vault);
        }
    }
    eprintln!("killed {kills} times, {went_on} times with pieces in the journal");
    assert!(kills > 0);
}

#[test]
fn a_finished_directory_that_only_lacks_its_name_gets_it() {
    let case = Case::new(&Tiny::deepseek(Type::Bf16, 24));
    let vault = case.path("v");
    let dir = partial(&vault);
    std::fs::create_dir(&dir).expect("dir");
    for (name, bytes) in &case.whole {
        std::fs::write(dir.join(name), bytes).expect("file");
    }
    assert_eq!(case.finish(&vault), [""; 0]);
    // But not if it is damaged.
    let vault = case.path("w");
    let dir = partial(&vault);
    std::fs::create_dir(&dir).expect("dir");
    for (name, bytes) in &case.whole {
        let mut bytes = bytes.clone();
        let last = bytes.len() - 1;
        bytes[last] ^= u8::from(name == "experts.smoe");
        std::fs::write(dir.join(name), bytes).expect("file");
    }
    assert!(case.finish(&vault)[0].contains("done again"));
}

#[test]
fn a_complete_vault_is_left_alone_and_another_is_not_replaced_without_force() {
    let case = Case::new(&Tiny::qwen3(Type::Bf16, 25));
    let vault = case.path("reference");
    let time =
        |vault: &Path| std::fs::metadata(vault.join("experts.smoe")).expect("file").modified().expect("time");
    let before = time(&vault);
    assert_eq!(run(&case.checkpoint, &vault, &ours()).expect("there"), Outcome::AlreadyComplete);
    let more_threads = Settings { threads: Some(7), ..ours() };
    assert_eq!(run(&case.checkpoint, &vault, &more_threads).expect("there"), Outcome::AlreadyComplete);
    assert_eq!(time(&vault), before);
    assert!(!partial(&vault).exists());

    let other = Settings { group: 32, ..ours() };
    let error = run(&case.checkpoint, &vault, &other).expect_err("refused");
    assert!(matches!(&error, SculptError::OtherVault { what: "other settings", .. }), "{error}");
    assert!(error.to_string().contains("--force"));
    // Other weights of the same shapes are another checkpoint.
    let fine_tuned = case.path("fine-tuned");
    Tiny::qwen3(Type::Bf16, 26).write(&fine_tuned, 2);
    let error = run(&fine_tuned, &vault, &ours()).expect_err("refused");
    assert!(matches!(&error, SculptError::OtherVault { what: "another checkpoint", .. }), "{error}");
    assert!(files(&vault) == case.whole);

    let forced = Settings { force: true, ..other.clone() };
    std::fs::write(vault.join("notes.txt"), "mine").expect("note");
    let (outcome, warnings) = watched(&case.checkpoint, &vault, &forced);
    assert_eq!(outcome.expect("replaced"), Outcome::Created);
    assert!(files(&vault)["experts.smoe"] != case.whole["experts.smoe"]);
    assert!(warnings.iter().any(|w| w.contains("left there")), "{warnings:?}");
    assert_eq!(std::fs::read(case.path(".reference.old-1/notes.txt")).expect("kept"), b"mine");
    assert_eq!(run(&case.checkpoint, &vault, &other).expect("there"), Outcome::AlreadyComplete);

    // A damaged one is said to be damaged.
    std::fs::write(vault.join("config.json"), "{}").expect("damage");
    let error = run(&case.checkpoint, &vault, &other).expect_err("refused");
    assert!(
        matches!(&error, SculptError::DamagedVault { what, .. } if what.contains("config.json")),
        "{error}"
    );
    run(&case.checkpoint, &vault, &forced).expect("replaced");
    assert!(case.path(".reference.old-1/notes.txt").exists());
    assert!(!case.path(".reference.old-2").exists());
}

#[test]
fn unfinished_work_with_other_flags_is_kept_without_force() {
    let case = Case::new(&Tiny::qwen3(Type::Bf16, 27));
    let vault = case.path("v");
    assert!(case.cancel(&vault, 250_000));
    let other = Settings { bits: 5, ..ours() };
    let error = run(&case.checkpoint, &vault, &other).expect_err("refused");
    assert!(matches!(&error, SculptError::OtherPartial { what: "other settings", .. }), "{error}");
    // Untouched: it goes on.
    assert_eq!(case.finish(&vault), [""; 0]);
    let vault = case.path("w");
    assert!(case.cancel(&vault, 250_000));
    run(&case.checkpoint, &vault, &Settings { force: true, ..other }).expect("afresh");
    assert!(!partial(&vault).exists());
}

#[test]
fn what_is_no_vault_is_never_replaced() {
    let case = Case::new(&Tiny::qwen3(Type::Bf16, 28));
    let forced = Settings { force: true, ..ours() };
    let file = case.path("file");
    std::fs::write(&file, "text").expect("file");
    let dir = case.path("documents");
    std::fs::create_dir(&dir).expect("dir");
    std::fs::write(dir.join("thesis"), "text").expect("file");
    for path in [&file, &dir] {
        for settings in [&forced, &ours()] {
            assert!(matches!(run(&case.checkpoint, path, settings), Err(SculptError::NotAVault { .. })));
        }
    }
    assert!(dir.join("thesis").exists() && file.is_file());
    // An empty directory is as good as none.
    let empty = case.path("empty");
    std::fs::create_dir(&empty).expect("dir");
    case.finish(&empty);
}

#[test]
fn a_request_to_stop_before_the_start_is_heard() {
    let case = Case::new(&Tiny::qwen3(Type::Bf16, 29));
    let stop = AtomicBool::new(true);
    let vault = case.path("v");
    let stopped = sculpt(&case.checkpoint, &vault, &ours(), &(), &stop);
    assert!(matches!(stopped, Err(SculptError::Cancelled { done: 0, .. })), "{stopped:?}");
    stop.store(false, Ordering::Relaxed);
    case.finish(&vault);
}

#[test]
fn work_begun_with_other_files_is_not_mixed_in() {
    let case = Case::new(&Tiny::qwen3(Type::Bf16, 31));
    let vault = case.path("v");
    assert!(case.cancel(&vault, 150_000));
    // The same names, shapes and lengths, one expert's weights changed: the fingerprint's samples miss it.
    let shard = std::fs::read_dir(&case.checkpoint)
        .expect("checkpoint")
        .map(|entry| entry.expect("entry").path())
        .find(|path| path.extension().is_some_and(|ending| ending == "safetensors"))
        .expect("a shard");
    let bytes = std::fs::read(&shard).expect("shard");
    std::fs::remove_file(&shard).expect("removed");
    std::fs::write(&shard, &bytes).expect("written anew");
    let begun = std::time::SystemTime::UNIX_EPOCH;
    let file = std::fs::File::options().write(true).open(&shard).expect("shard");
    file.set_modified(begun).expect("another time");
    let refused = run(&case.checkpoint, &vault, &ours()).expect_err("other files");
    assert!(refused.to_string().contains("written anew"), "{refused}");
    run(&case.checkpoint, &vault, &Settings { force: true, ..ours() }).expect("afresh");
    assert!(files(&vault) == case.whole);
}

#[test]
fn a_stranger_in_unfinished_work_is_named_before_any_work() {
    let case = Case::new(&Tiny::qwen3(Type::Bf16, 32));
    let vault = case.path("v");
    std::fs::create_dir(partial(&vault)).expect("dir");
    std::fs::write(partial(&vault).join(".DS_Store"), b"x").expect("stranger");
    let refused = run(&case.checkpoint, &vault, &ours()).expect_err("a stranger");
    assert!(refused.to_string().contains(".DS_Store"), "{refused}");
}

#[test]
fn a_linked_vault_is_made_and_replaced_where_the_link_leads() {
    let case = Case::new(&Tiny::qwen3(Type::Bf16, 33));
    let (real, link) = (case.path("real"), case.path("link"));
    std::fs::create_dir(&real).expect("dir");
    std::os::unix::fs::symlink(&real, &link).expect("link");
    run(&case.checkpoint, &link, &ours()).expect("made");
    assert!(files(&real) == case.whole);
    run(&case.checkpoint, &link, &Settings { force: true, bits: 8, ..ours() }).expect("replaced");
    assert!(files(&real) != case.whole && link.is_symlink());
    let nowhere = case.path("nowhere");
    std::os::unix::fs::symlink(case.path("gone"), &nowhere).expect("link");
    assert!(run(&case.checkpoint, &nowhere, &ours()).is_err());
}
