//! Synthetic vaults: whole, repeatable, refused where they must be, and of layers that share records.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use smoe_format::spec::{GroupScore, GroupSpec};
use smoe_format::{BackboneTensor, ExpertFile, Table, file_name};
use smoe_sculpt::synth::{Required, RoutingStats};
use smoe_sculpt::{
    BackboneBits, Damage, Outcome, Progress, SculptError, Settings, Shape, SynthOptions, Synthesis,
    Synthetic, read_head, synth, verify,
};
use tempfile::TempDir;

/// Four layers, the first dense with a shared expert in the others; odd widths, so that nothing fits its
/// tiles.
fn shape(dir: &Path) -> Shape {
    let config = json!({
        "model_type": "deepseek",
        "hidden_size": 72,
        "vocab_size": 6400,
        "max_position_embeddings": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "head_dim": 36,
        "n_routed_experts": 10,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "intermediate_size": 104,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "norm_topk_prob": true,
    });
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    Shape::find(dir.to_str().unwrap()).unwrap()
}

fn options(bits: u8, backbone: BackboneBits) -> SynthOptions {
    SynthOptions { settings: Settings { bits, backbone, ..Settings::default() }, ..SynthOptions::default() }
}

fn make(shape: &Shape, vault: &Path, options: &SynthOptions) -> Result<Synthesis, SculptError> {
    synth(shape, vault, options, &(), &AtomicBool::new(false))
}

fn data(vault: &Path) -> [Vec<u8>; 2] {
    [file_name::EXPERTS, file_name::BACKBONE].map(|name| fs::read(vault.join(name)).unwrap())
}

fn assert_whole(vault: &Path) {
    let report = verify(vault, None, &(), &AtomicBool::new(false)).unwrap();
    assert_eq!(report.problems, []);
    assert!(report.checksums);
}

fn entries(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn every_encoding_gives_a_whole_vault_that_says_how_it_was_made() {
    let dir = TempDir::new().unwrap();
    let shape = shape(dir.path());
    for (bits, backbone) in [
        (2, BackboneBits::Q4),
        (3, BackboneBits::Q5),
        (4, BackboneBits::Q8),
        (5, BackboneBits::Q6),
        (6, BackboneBits::Bf16),
        (8, BackboneBits::Q8),
        (16, BackboneBits::Bf16),
    ] {
        let vault = dir.path().join(format!("v{bits}"));
        let options = SynthOptions { seed: 5, unique_layers: Some(2), ..options(bits, backbone) };
        let made = make(&shape, &vault, &options).unwrap();
        assert_whole(&vault);
        let sizes: usize = data(&vault).iter().map(Vec::len).sum();
        assert_eq!(made.bytes, sizes as u64);
        let head = read_head(&vault).unwrap();
        let manifest = head.manifest().unwrap();
        assert_eq!(manifest.spec, shape.spec);
        let synthetic = Synthetic::of(&manifest.source).unwrap();
        assert_eq!((synthetic.like.as_str(), synthetic.unique_layers, synthetic.seed), ("config.json", 2, 5));
        assert_eq!(synthetic.routing, options.routing);
        let (predicted, short) = (synthetic.predict(&shape.spec, 4096), synthetic.predict(&shape.spec, 128));
        assert!((predicted.overlap - made.predicted.overlap).abs() < 1e-3);
        assert!(short.skew > predicted.skew);
    }
}

#[test]
fn weights_have_the_deviation_that_keeps_activations_tame() {
    let dir = TempDir::new().unwrap();
    let shape = shape(dir.path());
    for bits in [2, 4, 8, 16] {
        let vault = dir.path().join(format!("v{bits}"));
        make(&shape, &vault, &options(bits, BackboneBits::Q8)).unwrap();
        let head = read_head(&vault).unwrap();
        let [experts, _] = data(&vault);
        let (record, table) = (&head.records[0], &head.layers[0]);
        let bytes = &experts[record.offset as usize..];
        let deviation = table.tensors.map(|t| {
            let mut row = vec![0.0; t.cols];
            let mut squares = 0.0f64;
            for r in 0..t.rows {
                t.encoding.decode_row(&bytes[t.offset..t.offset + t.len], t.cols, r, &mut row);
                squares += row.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>();
            }
            (squares / (t.rows * t.cols) as f64).sqrt()
        });
        // 1 / sqrt(72), and 0.1 / sqrt(8) / 0.6 / sqrt(40); one exponent cannot come nearer than sqrt(2).
        let near = |found: f64, expected: f64| {
            let tolerance = if bits == 16 { 1.45 } else { 1.05 };
            assert!((1.0 / tolerance..tolerance).contains(&(found / expected)), "{bits}: {found} {expected}");
        };
        near(deviation[0], 0.11785);
        near(deviation[1], 0.11785);
        near(deviation[2], 0.009_317);
    }
}

#[test]
fn experts_may_be_mxfp4_whatever_the_settings_say() {
    let dir = TempDir::new().unwrap();
    let shape = shape(dir.path());
    let vault = dir.path().join("v");
    let options = SynthOptions { mxfp4: true, ..options(8, BackboneBits::Q4) };
    let made = make(&shape, &vault, &options).unwrap();
    assert_whole(&vault);
    assert_eq!(made.expert_encoding, "mxfp4/32");
    let head = read_head(&vault).unwrap();
    assert!(head.layers.iter().flat_map(|l| &l.tensors).all(|t| t.encoding == Table::MXFP4.into()));
    assert!(head.manifest().unwrap().source.settings.contains(" experts=mxfp4/32 "));
    // Gate: columns of 72 are in groups of 32, 32 and 8. Deviation 1 / sqrt(72).
    let [experts, _] = data(&vault);
    let (record, t) = (&head.records[0], &head.layers[0].tensors[0]);
    let bytes = &experts[record.offset as usize + t.offset..][..t.len];
    let mut squares = 0.0;
    let mut row = vec![0.0; t.cols];
    for r in 0..t.rows {
        t.encoding.decode_row(bytes, t.cols, r, &mut row);
        squares += row.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>();
    }
    let deviation = (squares / (t.rows * t.cols) as f64).sqrt();
    assert!((0.95..1.05).contains(&(deviation / 0.11785)), "{deviation}");
}

#[test]
fn the_same_arguments_give_the_same_bytes_whatever_the_threads() {
    let dir = TempDir::new().unwrap();
    let shape = shape(dir.path());
    let name = |n: &str| dir.path().join(n);
    let base = options(4, BackboneBits::Q4);
    make(&shape, &name("a"), &base).unwrap();
    let threads = |n| Settings { threads: Some(n), ..base.settings.clone() };
    make(&shape, &name("b"), &SynthOptions { settings: threads(1), ..base.clone() }).unwrap();
    make(&shape, &name("c"), &SynthOptions { settings: threads(5), ..base.clone() }).unwrap();
    make(&shape, &name("d"), &SynthOptions { seed: 1, ..base.clone() }).unwrap();
    assert_eq!(data(&name("a")), data(&name("b")));
    assert_eq!(data(&name("a")), data(&name("c")));
    let ([a, a_backbone], [d, d_backbone]) = (data(&name("a")), data(&name("d")));
    assert!(a != d && a_backbone != d_backbone);

    // Complete already; other arguments only by force.
    assert_eq!(make(&shape, &name("a"), &base).unwrap().outcome, Outcome::AlreadyComplete);
    let other = SynthOptions { seed: 1, ..base.clone() };
    assert!(matches!(make(&shape, &name("a"), &other), Err(SculptError::OtherVault { .. })));
    assert_eq!(data(&name("a"))[0], a);
    let settings = Settings { force: true, ..base.settings };
    assert_eq!(
        make(&shape, &name("a"), &SynthOptions { settings, ..other }).unwrap().outcome,
        Outcome::Created
    );
    assert_eq!(data(&name("a"))[0], d);
}

#[test]
fn layers_that_share_records_have_checksums_of_their_own() {
    let dir = TempDir::new().unwrap();
    let shape = shape(dir.path());
    let vault = dir.path().join("v");
    let options = SynthOptions { unique_layers: Some(2), ..options(4, BackboneBits::Q8) };
    make(&shape, &vault, &options).unwrap();
    let head = read_head(&vault).unwrap();
    // MoE layers 1, 2 and 3: the third has the first one's records.
    let of = |layer: u32| head.records.iter().filter(move |r| r.key.layer == layer);
    assert!(of(1).zip(of(3)).all(|(a, b)| (a.offset, a.len) == (b.offset, b.len) && a.crc32c != b.crc32c));
    let end = head.records.iter().map(|r| r.offset + r.len).max();
    assert_eq!(end, Some(head.file_len));
    assert_eq!(of(2).next_back().map(|r| r.offset + r.len), end);

    // A damaged byte shows in every layer that has it.
    let path = vault.join(file_name::EXPERTS);
    let mut bytes = fs::read(&path).unwrap();
    bytes[head.records[0].offset as usize + 3] ^= 1;
    fs::write(&path, bytes).unwrap();
    let report = verify(&vault, None, &(), &AtomicBool::new(false)).unwrap();
    let damaged: Vec<u32> = report
        .problems
        .iter()
        .map(|problem| match problem.what {
            Damage::Record { key, .. } => key.layer,
            ref other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(damaged, [1, 3]);
}

/// Cancels once so many bytes are written.
struct CancelAt<'a>(u64, &'a AtomicBool);

impl Progress for CancelAt<'_> {
    fn advance(&self, _bytes: u64) {
        self.1.store(true, Ordering::Relaxed);
    }

    fn start(&self, total_bytes: u64) {
        assert!(total_bytes > self.0);
    }
}

#[test]
fn an_end_before_time_leaves_nothing() {
    let dir = TempDir::new().unwrap();
    let shape = shape(dir.path());
    let vault = dir.path().join("v");
    let cancel = AtomicBool::new(false);
    let stopped = synth(&shape, &vault, &options(4, BackboneBits::Q8), &CancelAt(1, &cancel), &cancel);
    assert!(matches!(stopped, Err(SculptError::Stopped)));
    assert_eq!(entries(dir.path()), ["config.json"]);
    // A kill leaves what does not open, and the next run takes its place.
    let partial = dir.path().join(".v.partial");
    fs::create_dir(&partial).unwrap();
    fs::write(partial.join(file_name::EXPERTS), [0; 999]).unwrap();
    make(&shape, &vault, &options(4, BackboneBits::Q8)).unwrap();
    assert_eq!(entries(dir.path()), ["config.json", "v"]);
    assert_whole(&vault);
}

#[test]
fn another_works_unfinished_vault_is_left_alone() {
    let dir = TempDir::new().unwrap();
    let shape = shape(dir.path());
    let vault = dir.path().join("v");
    let partial = dir.path().join(".v.partial");
    fs::create_dir(&partial).unwrap();
    fs::write(partial.join("journal"), "a sculpt's").unwrap();
    let refused = make(&shape, &vault, &options(4, BackboneBits::Q8));
    assert!(matches!(refused, Err(SculptError::OtherPartial { .. })), "{refused:?}");
    assert_eq!(entries(&partial), ["journal"]);
}

#[test]
fn arguments_that_cannot_be_are_refused_by_their_flag() {
    let dir = TempDir::new().unwrap();
    let mut shape = shape(dir.path());
    let vault = dir.path().join("v");
    let base = options(4, BackboneBits::Q8);
    let routing = |overlap, skew| SynthOptions { routing: RoutingStats { overlap, skew }, ..base.clone() };
    let flag_of = |result: Result<Synthesis, SculptError>| match result {
        Err(SculptError::Setting { flag, .. }) => flag,
        other => panic!("{other:?}"),
    };
    assert_eq!(flag_of(make(&shape, &vault, &options(7, BackboneBits::Q8))), "--bits");
    assert_eq!(flag_of(make(&shape, &vault, &routing(-0.1, 0.3))), "--overlap");
    assert_eq!(flag_of(make(&shape, &vault, &routing(f64::NAN, 0.3))), "--overlap");
    assert_eq!(flag_of(make(&shape, &vault, &routing(0.4, 0.05))), "--skew");
    let none = SynthOptions { unique_layers: Some(0), ..base.clone() };
    assert_eq!(flag_of(make(&shape, &vault, &none)), "--unique-layers");
    assert_eq!(entries(dir.path()), ["config.json"]);

    for layers in [0, 1, 5] {
        assert!(matches!(shape.cut(layers), Err(SculptError::Setting { flag: "--layers", .. })), "{layers}");
    }
    shape.cut(2).unwrap();
    assert_eq!(shape.spec.n_layers(), 2);
    assert!(matches!(Shape::find("no-such-model"), Err(SculptError::Setting { flag: "--like", .. })));
    fs::write(dir.path().join("config.json"), r#"{"model_type": "unheard_of"}"#).unwrap();
    let unknown = Shape::find(dir.path().join("config.json").to_str().unwrap());
    assert!(matches!(unknown, Err(SculptError::Family { .. })), "{unknown:?}");
}

#[test]
fn statistics_out_of_reach_are_made_as_near_as_they_can_be() {
    let dir = TempDir::new().unwrap();
    let shape = shape(dir.path());
    // Independent routing: 3 of 10 experts are shared by chance.
    let made = |name: &str, overlap, skew| {
        let options =
            SynthOptions { routing: RoutingStats { overlap, skew }, ..options(2, BackboneBits::Q4) };
        make(&shape, &dir.path().join(name), &options).unwrap().predicted
    };
    let even = made("even", 0.0, 0.1);
    assert!((even.overlap - 0.3).abs() < 0.03, "{even:?}");
    assert!(even.skew < 0.12, "{even:?}");
    // The most that three of ten can give to one.
    let most = made("most", 1.0, 1.0);
    assert!(most.overlap > 0.97 && (most.skew - 1.0 / 3.0).abs() < 0.01, "{most:?}");
    // Skew alone gives more overlap than is asked for.
    let skewed = made("skewed", 0.1, 0.3);
    assert!((skewed.skew - 0.3).abs() < 0.03 && skewed.overlap > 0.5, "{skewed:?}");
}

#[test]
fn statistics_that_have_to_be_met_are_refused_where_they_cannot_be() {
    let dir = TempDir::new().unwrap();
    let mut shape = shape(dir.path());
    let refused = |shape: &Shape, overlap, skew, required| {
        let options = SynthOptions {
            routing: RoutingStats { overlap, skew },
            required,
            ..options(2, BackboneBits::Q4)
        };
        match make(shape, &dir.path().join("v"), &options) {
            Err(SculptError::Setting { flag, expected, .. }) => Some((flag, expected)),
            Ok(_) => None,
            other => panic!("{other:?}"),
        }
    };
    let [overlap, skew] = [(true, false), (false, true)].map(|(overlap, skew)| Required { overlap, skew });
    let (flag, expected) = refused(&shape, 0.1, 0.3, overlap).unwrap();
    assert!(flag == "--overlap" && expected.contains("with a skew of 0.3 the nearest is 0."), "{expected}");
    assert_eq!(refused(&shape, 1.0, 1.0, skew).unwrap().0, "--skew");
    assert_eq!(entries(dir.path()), ["config.json"]);
    // One group of two holds all of a token's experts, so no tenth of all has more than its share of them.
    let moe = &mut shape.spec.moe;
    (moe.n_experts, moe.top_k, moe.groups) =
        (8, 4, Some(GroupSpec { n: 2, top: 1, score: GroupScore::Best }));
    assert_eq!(
        refused(&shape, 0.1, 0.1, overlap).unwrap().0,
        "--overlap",
        "half of the tokens have the same four"
    );
    assert_eq!(refused(&shape, 0.55, 0.1, overlap), None);
}

#[test]
fn heads_of_layers_that_share_read_back() {
    let dir = TempDir::new().unwrap();
    let shape = shape(dir.path());
    let vault = dir.path().join("v");
    let options = SynthOptions { unique_layers: Some(1), ..options(4, BackboneBits::Q8) };
    make(&shape, &vault, &options).unwrap();
    let head = read_head(&vault).unwrap();
    assert_eq!(ExpertFile::parse(&head.head_bytes(), head.file_len).unwrap(), head);
}

/// A tokenizer of 300 tokens, three of them special, and a gap of two ids before the last.
fn text(dir: &Path, name: &str) -> std::path::PathBuf {
    let dir = dir.join(name);
    fs::create_dir(&dir).unwrap();
    let vocab: serde_json::Map<_, _> = (0..290).map(|id| (format!("t{id}"), json!(id))).collect();
    let added =
        [(290, true), (291, false), (292, true), (293, false), (294, false), (297, true), (299, false)];
    let added =
        added.map(|(id, special)| json!({"id": id, "special": special, "content": format!("<{id}>")}));
    let tokenizer = json!({"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added});
    fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(dir.join("generation_config.json"), r#"{"top_k": 5}"#).unwrap();
    fs::write(dir.join("chat_template.jinja"), name).unwrap();
    fs::write(dir.join("config.json"), r#"{"model_type": "another"}"#).unwrap();
    dir
}

#[test]
fn a_text_comes_along_and_its_tokenizer_says_what_can_be_said() {
    let dir = TempDir::new().unwrap();
    let shape = shape(dir.path());
    let (one, other) = (text(dir.path(), "one"), text(dir.path(), "other"));
    for backbone in [BackboneBits::Q4, BackboneBits::Q5, BackboneBits::Q8, BackboneBits::Bf16] {
        let vault = dir.path().join(format!("{backbone}"));
        let with = |text: &Path| SynthOptions { text: Some(text.to_owned()), ..options(4, backbone) };
        let made = make(&shape, &vault, &with(&one)).unwrap();
        assert_whole(&vault);
        assert_eq!(made.spec.vocab_size, 300);
        for name in ["tokenizer.json", "generation_config.json", "chat_template.jinja"] {
            assert_eq!(fs::read(vault.join(name)).unwrap(), fs::read(one.join(name)).unwrap());
        }
        assert!(!vault.join("config.json").exists(), "the shape is not that model's");
        let sizes: u64 = common::files(&vault).values().map(|bytes| bytes.len() as u64).sum();
        assert_eq!(made.bytes, sizes);

        let read = common::Vault::open(&vault);
        let (encoding, head) = read.backbone_tensor(&BackboneTensor::Head.to_string());
        let mut row = vec![0.0; made.spec.d_model];
        let silent: Vec<usize> = (0..300)
            .filter(|&id| {
                encoding.decode_row(head, row.len(), id, &mut row);
                row.iter().all(|weight| *weight == 0.0)
            })
            .collect();
        assert_eq!(silent, [290, 292, 295, 296, 297, 298], "{backbone}");

        assert_eq!(make(&shape, &vault, &with(&one)).unwrap().outcome, Outcome::AlreadyComplete);
        assert!(matches!(make(&shape, &vault, &with(&other)), Err(SculptError::OtherVault { .. })));
    }
}

#[test]
fn a_text_that_is_none_is_refused() {
    let dir = TempDir::new().unwrap();
    let shape = shape(dir.path());
    let text = text(dir.path(), "text");
    let make = || {
        let options = SynthOptions { text: Some(text.clone()), ..options(4, BackboneBits::Q8) };
        make(&shape, &dir.path().join("v"), &options).unwrap_err()
    };
    for tokenizer in [
        "[",
        "{}",
        r#"{"model": {"vocab": {"a": 1e30}}}"#,
        r#"{"model": {"vocab": {"a": 1152921504606846976}}}"#,
    ] {
        fs::write(text.join("tokenizer.json"), tokenizer).unwrap();
        assert!(matches!(make(), SculptError::Json { .. }), "{tokenizer}");
    }
    fs::remove_file(text.join("tokenizer.json")).unwrap();
    assert!(matches!(make(), SculptError::Setting { flag: "--text", .. }));
    assert_eq!(entries(dir.path()), ["config.json", "text"]);
}
