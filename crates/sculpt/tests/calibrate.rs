//! Vaults of few bits: with statistics, and with a budget.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{Random, Tiny, Type, Vault, files, run, settings};
use smoe_sculpt::calibrate::{Document, Head, collect};
use smoe_sculpt::{
    BackboneBits, Levels, Outcome, Progress, Recipe, SculptError, Settings, compare_codes, dry_run,
    measure_error, read_head, sculpt, verify,
};

static NEVER: AtomicBool = AtomicBool::new(false);

/// Statistics of inputs whose columns depend on each other, and of hidden channels of which some are louder than others,
/// for the model of the vault `of`.
fn statistics(of: &Path, out: &Path, seed: u64) {
    let file = read_head(of).unwrap();
    let manifest = file.manifest().unwrap();
    let spec = &manifest.spec;
    let text = [Document { tokens: vec![seed as u32; 400], counted: vec![true; 400] }];
    let head = Head::new(&manifest.source.fingerprint, spec, &text);
    let mut random = Random(seed);
    let mut row = |n: usize| {
        let mut common = 0.0;
        (0..n)
            .map(|_| {
                common = 0.8 * common + (random.below(2001) as f32 - 1000.0) / 1000.0;
                common
            })
            .collect::<Vec<f32>>()
    };
    let done = collect(out, &head, u64::MAX, None, |collector, _, _| {
        let mut collector = collector.lock().unwrap();
        for token in 0..400 {
            for layer in spec.moe_layers() {
                let expert = token % spec.moe.n_experts;
                let mut hidden = row(spec.moe.d_expert);
                hidden.iter_mut().enumerate().for_each(|(i, h)| *h *= (1 + 3 * (i % 3)) as f32);
                collector.add(layer as u32, expert as u32, &row(spec.d_model), &hidden);
            }
        }
        Ok::<_, SculptError>(())
    });
    done.unwrap();
}

#[test]
fn calibrated_vaults_are_whole_and_the_same_for_any_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    Tiny::qwen3(Type::Bf16, 51).write(&at("checkpoint"), 0);
    run(&at("checkpoint"), &at("plain"), &settings(4, BackboneBits::Bf16)).unwrap();
    statistics(&at("plain"), &at("stats"), 5);
    let with = |bits, levels| Settings {
        recipe: Recipe::Searched,
        levels,
        calibration: Some(at("stats")),
        ..settings(bits, BackboneBits::Q8)
    };
    let coded = |coded_bpw| Settings { entropy: true, coded_bpw, group: 32, ..with(4, Levels::Uniform) };
    for (bits, kind) in [
        ("2", with(2, Levels::Fitted)),
        ("3", with(3, Levels::Uniform)),
        ("4", with(4, Levels::Fitted)),
        ("8", with(8, Levels::Uniform)),
        ("entropy-coded", coded(None)),
        ("entropy-coded-3", coded(Some(300))),
    ] {
        let calibrated = |threads| Settings { threads: Some(threads), ..kind.clone() };
        let [one, three] = [1, 3].map(|threads| {
            let vault = at(&format!("{bits}-{threads}"));
            run(&at("checkpoint"), &vault, &calibrated(threads)).unwrap();
            files(&vault)
        });
        assert!(one == three, "{bits}");
        let vault = at(&format!("{bits}-1"));
        assert!(verify(&vault, None, &(), &NEVER).unwrap().problems.is_empty());
        let compare =
            |stats: Option<&Path>| compare_codes(&at("checkpoint"), &vault, stats, None, &(), &NEVER);
        let counts = compare(Some(&at("stats"))).unwrap();
        assert!(counts.iter().all(|c| c.different_codes == 0 && c.different_scales == 0), "{counts:?}");
        assert!(matches!(compare(None), Err(SculptError::Incomparable { .. })));
        // They are not the codes of plain rounding.
        let searched = at(&format!("{bits}-searched"));
        run(&at("checkpoint"), &searched, &Settings { calibration: None, ..calibrated(1) }).unwrap();
        assert!(Vault::open(&searched).experts_bytes != Vault::open(&vault).experts_bytes);
    }
}

#[test]
fn statistics_of_another_model_or_none_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for (name, seed) in [("a", 52), ("b", 53)] {
        Tiny::qwen3(Type::Bf16, seed).write(&at(name), 0);
    }
    run(&at("b"), &at("vault"), &settings(4, BackboneBits::Bf16)).unwrap();
    statistics(&at("vault"), &at("stats"), 7);
    let with = |stats: &str| Settings {
        recipe: Recipe::Searched,
        calibration: Some(at(stats)),
        ..settings(3, BackboneBits::Q8)
    };
    let refused = |settings: &Settings| run(&at("a"), &at("out"), settings).unwrap_err();
    assert!(matches!(refused(&with("stats")), SculptError::Statistics { .. }));
    assert!(matches!(refused(&with("none")), SculptError::Statistics { .. }));
    let plain = Settings { recipe: Recipe::Absmax, ..with("stats") };
    assert!(matches!(refused(&plain), SculptError::Setting { flag: "--calibration", .. }));
    assert!(!at("out").exists());
}

#[test]
fn a_budget_is_kept_and_down_has_most_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = dir.path().join("checkpoint");
    Tiny::deepseek(Type::Bf16, 54).write(&checkpoint, 0);
    let with = |bpw: &str| Settings {
        bpw: Some(bpw.parse().unwrap()),
        recipe: Recipe::Searched,
        levels: Levels::Fitted,
        ..settings(4, BackboneBits::Q8)
    };
    let mut before = 0;
    for bpw in ["3.1", "4.0", "4.8", "6.0", "12"] {
        let out = dir.path().join(bpw);
        run(&checkpoint, &out, &with(bpw)).unwrap();
        assert!(verify(&out, None, &(), &NEVER).unwrap().problems.is_empty());
        let vault = Vault::open(&out);
        let tensors: Vec<_> = vault.experts.layers.iter().flat_map(|layer| layer.tensors).collect();
        let bytes: usize = tensors.iter().map(|t| t.len).sum();
        let weights: usize = tensors.iter().map(|t| t.rows * t.cols).sum();
        assert!(8.0 * bytes as f64 / weights as f64 <= bpw.parse::<f64>().unwrap());
        assert!(bytes > before, "{bpw}");
        before = bytes;
        for layer in &vault.experts.layers {
            let [gate, up, down] = layer.tensors.map(|t| t.encoding.tiles().unwrap().bits());
            assert!(down >= gate.max(up), "{bpw}");
        }
        let dry = dry_run(&checkpoint, None, &with(bpw), &NEVER).unwrap();
        assert!(!dry.widths.is_empty());
    }
    let too_few = run(&checkpoint, &dir.path().join("few"), &with("2")).unwrap_err();
    assert!(matches!(too_few, SculptError::Setting { flag: "--bpw", .. }), "{too_few}");
}

/// A checkpoint, its statistics, and settings under which they decide codes of a number of bits.
struct Calibrated {
    dir: tempfile::TempDir,
    settings: Settings,
}

impl Calibrated {
    fn new(seed: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        // Wide enough that what a record has besides codes is little.
        let mut config = Tiny::qwen3(Type::Bf16, seed).config;
        for (key, value) in [("hidden_size", 192), ("moe_intermediate_size", 128), ("num_experts", 8)] {
            config[key] = value.into();
        }
        Tiny::fill(config, Type::Bf16, seed).write(&at("checkpoint"), 0);
        run(&at("checkpoint"), &at("plain"), &settings(4, BackboneBits::Bf16)).unwrap();
        statistics(&at("plain"), &at("stats"), seed);
        let settings = Settings {
            recipe: Recipe::Searched,
            calibration: Some(at("stats")),
            entropy: true,
            coded_bpw: Some(325),
            group: 64,
            threads: Some(2),
            ..settings(4, BackboneBits::Q8)
        };
        Self { dir, settings }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Sculpts, watched; stops as soon as the phase `stop` advances.
    fn watched(
        &self,
        vault: &str,
        stop: Option<&'static str>,
    ) -> (Result<Outcome, SculptError>, Vec<String>) {
        let watch = Phases { stop, stopped: AtomicBool::new(false), names: Mutex::default() };
        let outcome = sculpt(&self.at("checkpoint"), &self.at(vault), &self.settings, &watch, &watch.stopped);
        (outcome, watch.names.into_inner().unwrap())
    }
}

struct Phases {
    stop: Option<&'static str>,
    stopped: AtomicBool,
    names: Mutex<Vec<String>>,
}

impl Progress for Phases {
    fn phase(&self, name: &str) {
        self.names.lock().unwrap().push(name.to_owned());
    }

    fn advance(&self, bytes: u64) {
        if bytes > 0 && self.names.lock().unwrap().last().map(String::as_str) == self.stop {
            self.stopped.store(true, Ordering::Relaxed);
        }
    }
}

const STEP: &str = "finding the step";

#[test]
fn the_step_is_found_once_and_finding_it_can_be_stopped() {
    let case = Calibrated::new(61);
    let found = |phases: &[String]| phases.iter().filter(|name| *name == STEP).count();

    let (stopped, phases) = case.watched("v", Some(STEP));
    assert!(matches!(stopped, Err(SculptError::Stopped)), "{stopped:?}");
    assert_eq!((found(&phases), phases.iter().any(|name| name == "encoding")), (1, false), "{phases:?}");
    assert!(!case.at(".v.partial").exists() && !case.at("v").exists());

    // Stopped later it is kept, and the vault is the one of a run that was not stopped.
    let (stopped, phases) = case.watched("v", Some("encoding"));
    assert!(matches!(stopped, Err(SculptError::Cancelled { .. })), "{stopped:?}");
    assert_eq!(found(&phases), 1, "{phases:?}");
    let (made, phases) = case.watched("v", None);
    assert_eq!((made.unwrap(), found(&phases)), (Outcome::Created, 0), "{phases:?}");
    let (made, phases) = case.watched("w", None);
    assert_eq!((made.unwrap(), found(&phases)), (Outcome::Created, 1), "{phases:?}");
    assert!(files(&case.at("v")) == files(&case.at("w")));

    // Nor is it found for a vault that is there, or for who only asks.
    let (again, phases) = case.watched("v", None);
    assert_eq!((again.unwrap(), found(&phases)), (Outcome::AlreadyComplete, 0), "{phases:?}");
    dry_run(&case.at("checkpoint"), None, &case.settings, &NEVER).unwrap();
}

#[test]
fn calibrated_codes_keep_the_budget() {
    let case = Calibrated::new(62);
    for bpw in [220, 325, 380] {
        // Of two layers three experts each: the sample is all of them.
        for (max_experts, most) in [(Some(3), 0.0), (None, 0.05)] {
            let name = format!("{bpw}-{max_experts:?}");
            let settings = Settings { coded_bpw: Some(bpw), max_experts, ..case.settings.clone() };
            run(&case.at("checkpoint"), &case.at(&name), &settings).unwrap();
            let experts = read_head(&case.at(&name)).unwrap();
            let bytes: u64 = experts.records.iter().map(|record| record.used).sum();
            let weights: usize = experts
                .layers
                .iter()
                .flat_map(|layer| layer.tensors.map(|t| t.rows * t.cols * layer.n_experts as usize))
                .sum();
            let (found, wanted) = (8.0 * bytes as f64 / weights as f64, f64::from(bpw) / 100.0);
            assert!(found <= wanted + most && found > wanted - 0.1, "{name}: {found}");
            // Channels that were scaled are scaled back before they are measured.
            let errors = measure_error(&case.at("checkpoint"), &case.at(&name), None, &(), &NEVER).unwrap();
            let least = errors.iter().map(|error| error.snr_db).fold(f64::MAX, f64::min);
            assert!(bpw == 220 || least > 6.0, "{name}: {errors:?}");
        }
    }
}

/// Counts what is read of a checkpoint.
#[derive(Default)]
struct Read(AtomicU64);

impl Progress for Read {
    fn encoded(&self, source_bytes: u64) {
        self.0.fetch_add(source_bytes, Ordering::Relaxed);
    }
}

#[test]
fn what_a_cut_model_reads_of_its_checkpoint_is_its_own_part() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = dir.path().join("checkpoint");
    let tiny = Tiny::qwen3(Type::Bf16, 63);
    tiny.write(&checkpoint, 2);
    let read = |name: &str, max_experts| {
        let settings = Settings { max_experts, ..settings(4, BackboneBits::Q8) };
        let read = Read::default();
        sculpt(&checkpoint, &dir.path().join(name), &settings, &read, &NEVER).unwrap();
        read.0.into_inner()
    };
    let bytes = |of: &dyn Fn(&str) -> bool| -> u64 {
        tiny.tensors.iter().filter(|(name, _)| of(name)).map(|(_, tensor)| tensor.bytes.len() as u64).sum()
    };
    assert_eq!(read("whole", None), bytes(&|_| true));
    let left_out = |name: &str| ["experts.3.", "experts.4.", "experts.5."].iter().any(|n| name.contains(n));
    let router = bytes(&|name| name.ends_with("mlp.gate.weight"));
    assert_eq!(read("cut", Some(3)), bytes(&|name| !left_out(name)) - router / 2);
}
