//! Every damage to a vault is named.
#![allow(clippy::print_stderr)]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use common::{Random, Tiny, Type, Vault, files, run, settings, shared};
use smoe_sculpt::{BackboneBits, Damage, Problem, Report, SculptError, verify};

fn check(path: &Path) -> Report {
    let one = verify(path, Some(1), &(), &AtomicBool::new(false)).expect("verified");
    let two = verify(path, Some(2), &(), &AtomicBool::new(false)).expect("verified");
    assert_eq!(one, two);
    one
}

fn vault(dir: &Path) -> (std::path::PathBuf, BTreeMap<String, Vec<u8>>) {
    let mut tiny = Tiny::qwen3(Type::Bf16, 31);
    tiny.side.insert("chat_template.jinja".into(), b"{{ x }}".to_vec());
    tiny.write(&dir.join("checkpoint"), 0);
    let vault = dir.join("vault");
    run(&dir.join("checkpoint"), &vault, &settings(4, BackboneBits::Q8)).expect("sculpted");
    let files = files(&vault);
    (vault, files)
}

#[test]
fn a_flipped_bit_anywhere_names_its_file_and_record() {
    let dir = tempfile::tempdir().expect("dir");
    let (vault, files) = vault(dir.path());
    let whole = check(&vault);
    assert_eq!(whole.problems, []);
    assert_eq!((whole.version, whole.records, whole.checksums), (Some(3), 12, true));
    let head = Vault::open(&vault).experts;
    let mut random = Random(3);
    let mut flips = 0;
    for (name, bytes) in &files {
        let len = bytes.len() as u64;
        let mut places: Vec<u64> = (0..60).map(|_| random.below(len)).collect();
        places.extend([0, 7, 8, len - 1]);
        if name == "experts.smoe" {
            // The head is small against the records: also there, and at both ends of each record.
            places.extend((0..60).map(|_| random.below(head.data_offset)));
            places.extend(head.records.iter().flat_map(|r| [r.offset, r.offset + r.len - 1]));
        }
        for at in places.into_iter().filter(|&at| at < len) {
            let mut damaged = bytes.clone();
            damaged[at as usize] ^= 1 << random.below(8);
            std::fs::write(vault.join(name), damaged).expect("damaged");
            let report = check(&vault);
            assert!(!report.problems.is_empty(), "{name} byte {at}");
            assert!(report.problems.iter().all(|p| p.file == *name), "{name} byte {at}: {report:?}");
            if name == "experts.smoe" && at >= head.data_offset {
                let hit = head.records.iter().find(|r| at >= r.offset && at < r.offset + r.len);
                let key = hit.expect("inside a record").key;
                assert!(
                    matches!(report.problems[..], [Problem { what: Damage::Record { key: k, .. }, .. }] if k == key)
                );
                assert!(report.problems[0].to_string().contains(&key.to_string()));
            }
            flips += 1;
        }
        std::fs::write(vault.join(name), bytes).expect("mended");
    }
    eprintln!("{flips} flipped bits were named");
    assert_eq!(check(&vault), whole);
}

#[test]
fn every_cut_and_every_missing_or_added_file_is_named() {
    let dir = tempfile::tempdir().expect("dir");
    let (vault, files) = vault(dir.path());
    for (name, bytes) in &files {
        for len in [0, 1, 100, bytes.len() / 2, bytes.len() - 1, bytes.len() + 1] {
            let mut cut = bytes.clone();
            cut.resize(len, 0);
            if cut == *bytes {
                continue;
            }
            std::fs::write(vault.join(name), cut).expect("cut");
            let report = check(&vault);
            assert!(!report.problems.is_empty(), "{name} cut to {len}");
            assert!(report.problems.iter().all(|p| p.file == *name), "{name} cut to {len}: {report:?}");
        }
        std::fs::remove_file(vault.join(name)).expect("removed");
        let report = check(&vault);
        let expected = Problem { file: name.clone(), what: Damage::Missing };
        assert!(report.problems.contains(&expected), "{name} missing: {report:?}");
        std::fs::write(vault.join(name), bytes).expect("mended");
    }
    std::fs::write(vault.join("tokenizer.json"), "{}").expect("added");
    let expected = Problem { file: "tokenizer.json".into(), what: Damage::Unexpected };
    assert_eq!(check(&vault).problems, [expected]);
}

#[test]
fn records_that_are_cut_off_are_counted_one_by_one() {
    let dir = tempfile::tempdir().expect("dir");
    let (vault, files) = vault(dir.path());
    let head = Vault::open(&vault).experts;
    let third = head.records[9];
    let bytes = &files["experts.smoe"][..third.offset as usize + 5];
    std::fs::write(vault.join("experts.smoe"), bytes).expect("cut");
    let report = check(&vault);
    let cut = report.problems.iter().filter(|p| matches!(p.what, Damage::RecordCut { .. })).count();
    assert_eq!((cut, report.records), (3, 9));
    assert!(matches!(report.problems[0].what, Damage::Length { .. }));
}

#[test]
fn swapped_records_are_both_named() {
    let dir = tempfile::tempdir().expect("dir");
    let (vault, files) = vault(dir.path());
    let head = Vault::open(&vault).experts;
    let mut bytes = files["experts.smoe"].clone();
    let (a, b) = (head.records[1], head.records[8]);
    let len = a.len as usize;
    let (at, bt) = (a.offset as usize, b.offset as usize);
    let first = bytes[at..at + len].to_vec();
    bytes.copy_within(bt..bt + len, at);
    bytes[bt..bt + len].copy_from_slice(&first);
    std::fs::write(vault.join("experts.smoe"), bytes).expect("swapped");
    let keys: Vec<_> = check(&vault)
        .problems
        .into_iter()
        .map(|p| match p.what {
            Damage::Record { key, .. } => key,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(keys, [a.key, b.key]);
}

#[test]
fn many_damages_are_all_named_at_once() {
    let dir = tempfile::tempdir().expect("dir");
    let (vault, files) = vault(dir.path());
    let head = Vault::open(&vault).experts;
    let mut experts = files["experts.smoe"].clone();
    for i in [0, 5, 11] {
        experts[head.records[i].offset as usize + 40] ^= 4;
    }
    std::fs::write(vault.join("experts.smoe"), experts).expect("damaged");
    let mut backbone = files["backbone.safetensors"].clone();
    let last = backbone.len() - 1;
    backbone[last] ^= 1;
    std::fs::write(vault.join("backbone.safetensors"), backbone).expect("damaged");
    std::fs::remove_file(vault.join("config.json")).expect("removed");
    std::fs::write(vault.join("stranger"), "").expect("added");
    let report = check(&vault);
    assert_eq!(report.problems.len(), 6, "{:?}", report.problems);
}

#[test]
fn the_path_of_the_expert_file_means_its_vault_and_nothing_is_an_error() {
    let dir = tempfile::tempdir().expect("dir");
    let (vault, _) = vault(dir.path());
    assert_eq!(check(&vault.join("experts.smoe")), check(&vault));
    let nowhere = verify(&dir.path().join("nowhere"), None, &(), &AtomicBool::new(false));
    assert!(matches!(nowhere, Err(SculptError::Io { .. })));
    let stopped = verify(&vault, None, &(), &AtomicBool::new(true));
    assert!(matches!(stopped, Err(SculptError::Stopped)));
}

#[test]
fn an_original_pair_is_checked_in_structure_only() {
    let Some(smoe) = shared("fixtures/original-vault-v2/qwen3_moe.smoe") else { return };
    let report = check(&smoe);
    assert_eq!(report.problems, []);
    assert_eq!((report.version, report.checksums, report.records), (Some(2), false, 0));
    let dir = tempfile::tempdir().expect("dir");
    let copy = dir.path().join("m.smoe");
    std::fs::write(&copy, &std::fs::read(&smoe).expect("original")[..300_000]).expect("cut");
    let report = check(&copy);
    let named: Vec<&str> = report.problems.iter().map(|p| p.file.as_str()).collect();
    assert_eq!(named, ["m.smoe", "m.scout.safetensors"]);
}
