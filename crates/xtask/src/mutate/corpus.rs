//! The vaults that are mutated.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use smoe_engine::Vault;
use smoe_format::{ExpertFile, file_name};
use smoe_sculpt::{Settings, sculpt, verify};
use smoe_testkit::tiny::CheckpointOptions;
use smoe_testkit::vault::encoding;
use smoe_testkit::{TinyModel, shared_path};

use super::trial::compute;
use crate::Result;

/// Files by name.
pub type Files = BTreeMap<String, Vec<u8>>;

/// A sound vault.
pub struct Base {
    pub name: String,
    /// What the files' names are relative to.
    pub directory: PathBuf,
    /// What is opened: the directory, or an original's expert file.
    pub path: PathBuf,
    pub files: Files,
    /// Name of the expert file.
    pub experts: String,
    /// Name of the backbone file.
    pub backbone: String,
    /// The head of the expert file.
    pub head: ExpertFile,
    /// Bits of the logits after a few tokens.
    pub logits: Vec<u32>,
}

impl Base {
    /// Version 3 files watch over every byte, the original's over none.
    pub fn has_checksums(&self) -> bool {
        self.head.manifest().is_some()
    }

    fn open(name: &str, directory: PathBuf, path: PathBuf) -> Result<Self> {
        let report = verify(&path, Some(1), &(), &AtomicBool::new(false))?;
        if let Some(problem) = report.problems.first() {
            return Err(format!("{name} is not whole before any mutation: {problem}").into());
        }
        let vault = Vault::open(&path)?;
        let file_name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut files = Files::new();
        for entry in fs::read_dir(&directory)? {
            let entry = entry?;
            files.insert(entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path())?);
        }
        Ok(Self {
            name: name.to_owned(),
            experts: file_name(&vault.experts_path),
            backbone: file_name(&vault.backbone_path),
            logits: compute(&vault, 0)?,
            head: vault.experts,
            directory,
            path,
            files,
        })
    }
}

/// Makes the vaults in `root`: other seeds, so that parts of one never pass for parts of another.
pub fn corpus(root: &Path) -> Result<Vec<Base>> {
    let mut bases = Vec::new();
    for (model, experts, backbone) in [
        (TinyModel::qwen3(1), ["q4/64", "q4/64", "q6a/32"], "q8/64"),
        (TinyModel::deepseek(2), ["q2/32"; 3], "q4/32"),
        (TinyModel::qwen3_tied(3), ["q8/128", "q5/64", "q3/16"], "bf16"),
        (TinyModel::qwen3(4), ["bf16", "f32", "f16"], "f32"),
        (TinyModel::qwen3(6), ["mxfp4/32", "t3/64", "iq4_nl/128"], "q5a/32"),
    ] {
        let name = format!("{}-{}", model.spec.model_type, model.seed);
        let directory = root.join(&name);
        fs::create_dir(&directory)?;
        model.write_vault(&directory, experts.map(encoding), backbone.parse()?);
        bases.push(Base::open(&name, directory.clone(), directory)?);
    }

    let checkpoint = root.join("checkpoint");
    fs::create_dir(&checkpoint)?;
    TinyModel::qwen3(5).write_checkpoint(&checkpoint, CheckpointOptions::default());
    let directory = root.join("sculpted");
    sculpt(&checkpoint, &directory, &Settings::default(), &(), &AtomicBool::new(false))?;
    bases.push(Base::open("sculpted", directory.clone(), directory)?);

    // Entropy-coded; wide enough for coding to pay.
    let checkpoint = root.join("wide-checkpoint");
    fs::create_dir(&checkpoint)?;
    let mut spec = TinyModel::qwen3(6).spec;
    (spec.d_model, spec.moe.d_expert) = (192, 128);
    TinyModel::new(spec, 6).write_checkpoint(&checkpoint, CheckpointOptions::default());
    let directory = root.join("coded");
    let settings = Settings { entropy: true, coded_bpw: Some(250), ..Settings::default() };
    sculpt(&checkpoint, &directory, &settings, &(), &AtomicBool::new(false))?;
    bases.push(Base::open("coded", directory.clone(), directory)?);

    if let Some(fixture) = shared_path("fixtures/original-vault-v2") {
        let directory = root.join("original");
        fs::create_dir(&directory)?;
        let mut path = None;
        for entry in fs::read_dir(fixture)? {
            let from = entry?.path();
            let to = directory.join(from.file_name().unwrap_or_default());
            // Written anew: a copy would keep the fixture's permissions.
            fs::write(&to, fs::read(&from)?)?;
            if to.extension().is_some_and(|extension| extension == "smoe") {
                path = Some(to);
            }
        }
        let path = path.ok_or("the original's fixture has no .smoe file")?;
        bases.push(Base::open("original", directory, path)?);
    }
    debug_assert!(bases.iter().all(|base| base.files.contains_key(&base.experts)));
    debug_assert!(bases[0].files.contains_key(file_name::BACKBONE));
    Ok(bases)
}
