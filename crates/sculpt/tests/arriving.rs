//! Weight files that are on their way: what a dry run says of them.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use common::{Tiny, Type};
use smoe_sculpt::files::Place;
use smoe_sculpt::{Levels, OnDisk, Settings, WeightFile, WeightFiles, dry_run_of, sculpt_of};

/// Files that are there, but say that they come, and note what they are asked for before.
#[derive(Default)]
struct Arriving(Mutex<HashMap<(PathBuf, u64), u64>>);

impl Arriving {
    fn bytes(&self) -> u64 {
        self.0.lock().unwrap().values().sum()
    }
}

impl WeightFiles for Arriving {
    fn has(&self, path: &Path) -> bool {
        OnDisk.has(path)
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn WeightFile>> {
        OnDisk.open(path)
    }

    fn arrives(&self) -> bool {
        true
    }

    fn expect(&self, places: &[Place<'_>]) -> io::Result<()> {
        let mut noted = self.0.lock().unwrap();
        for place in places {
            let bytes = noted.entry((place.path.to_owned(), place.offset)).or_default();
            *bytes = (*bytes).max(place.bytes as u64);
        }
        Ok(())
    }
}

#[test]
fn a_dry_run_counts_what_is_read_before_the_files_come() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = dir.path().join("checkpoint");
    Tiny::deepseek(Type::Bf16, 7).write(&checkpoint, 2);
    let plain = Settings { threads: Some(2), levels: Levels::Uniform, ..Settings::default() };
    let fitted = Settings { levels: Levels::Fitted, ..plain.clone() };
    let coded =
        Settings { entropy: true, coded_bpw: Some(250), keep_experts: false, group: 128, ..plain.clone() };
    let mut sampled = Vec::new();
    for (i, settings) in [plain, fitted, coded.clone()].iter().enumerate() {
        let (asked, made) = (Arriving::default(), Arriving::default());
        let stop = AtomicBool::new(false);
        let dry = dry_run_of(&checkpoint, &asked, None, settings, &stop).unwrap();
        let vault = dir.path().join(format!("v{i}"));
        sculpt_of(&checkpoint, &made, &vault, settings, &(), &stop).unwrap();
        assert_eq!(dry.sampled_bytes, made.bytes(), "{settings:?}");
        assert!(dry.needed_bytes > dry.sampled_bytes + dry.arriving_bytes + dry.experts_bytes);
        // A dry run itself does not ask for what a step is found by.
        assert_eq!(asked.bytes() < dry.sampled_bytes, *settings == coded);
        sampled.push(dry.sampled_bytes);
    }
    assert!(sampled[0] < sampled[1] && sampled[0] < sampled[2], "{sampled:?}");
    let on_disk = dry_run_of(&checkpoint, &OnDisk, None, &coded, &AtomicBool::new(false)).unwrap();
    assert_eq!((on_disk.sampled_bytes, on_disk.arriving_bytes), (0, 0));
}
