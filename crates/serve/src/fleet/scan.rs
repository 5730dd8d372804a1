//! The catalogue: which vaults there are, by what their own bytes say.
//!
//! A look at the disk costs a directory's names and two times of change; heads are read again only where a file has
//! changed.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use smoe_engine::Vault;
use smoe_format::{Encoding, file_name};

use super::Open;

/// A vault, as it describes itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Listing {
    /// Its name: that of its directory or file.
    pub id: String,
    /// Where it is.
    pub path: PathBuf,
    /// When it was written, in seconds since 1970.
    pub created: u64,
    /// Bytes of its weights.
    pub bytes: u64,
    /// Layers.
    pub layers: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Positions that the model was made for.
    pub context: usize,
    /// Bits of an expert's weight.
    pub bits: u8,
    /// The model's family.
    pub family: String,
    /// Names its exact weights.
    pub fingerprint: String,
}

/// What was found where, and when that was last changed.
#[derive(Debug, Default)]
pub(super) struct Catalogue {
    seen: HashMap<PathBuf, (Stamp, Result<Listing, String>)>,
    /// In the order of the paths given, then by name.
    order: Vec<PathBuf>,
}

/// Tells whether a file is the one that was read.
type Stamp = (SystemTime, u64);

impl Catalogue {
    /// Looks at the disk.
    pub(super) fn scan(&mut self, paths: &[PathBuf], open: &Open) {
        let mut taken = HashSet::new();
        self.order =
            paths.iter().flat_map(|path| vaults_at(path)).filter(|p| taken.insert(p.clone())).collect();
        let order = &self.order;
        self.seen.retain(|path, _| order.contains(path));
        let mut ids = HashSet::new();
        for path in order {
            let stamp = stamp(path);
            let known =
                self.seen.get(path).filter(|(seen, _)| *seen == stamp).map(|(_, listing)| listing.clone());
            let mut listing = known.unwrap_or_else(|| {
                let listing = open(path).map(|vault| describe(&vault, path, stamp));
                if let Err(error) = &listing {
                    tracing::warn!(path = %path.display(), "not served: {error}");
                }
                listing
            });
            if let Ok(listing) = &mut listing {
                let name = name_of(path);
                let named = (2..).map(|n| format!("{name}-{n}"));
                let id = std::iter::once(name.clone()).chain(named).find(|id| ids.insert(id.clone()));
                listing.id = id.unwrap_or(name);
            }
            self.seen.insert(path.clone(), (stamp, listing));
        }
    }

    pub(super) fn listings(&self) -> Vec<Listing> {
        self.found().cloned().collect()
    }

    pub(super) fn find(&self, id: &str) -> Option<Listing> {
        self.found().find(|listing| listing.id == id).cloned()
    }

    pub(super) fn first(&self) -> Option<Listing> {
        self.found().next().cloned()
    }

    /// Why there is nothing to serve.
    pub(super) fn complaint(&self) -> String {
        let failed = self.seen.values().find_map(|(_, listing)| listing.as_ref().err());
        failed.cloned().unwrap_or_else(|| "there is no vault at the paths given".to_owned())
    }

    fn found(&self) -> impl Iterator<Item = &Listing> {
        self.order.iter().filter_map(|path| self.seen.get(path)?.1.as_ref().ok())
    }
}

/// The vaults that a path means: itself, or what is in it.
fn vaults_at(path: &Path) -> Vec<PathBuf> {
    if !path.is_dir() || path.join(file_name::EXPERTS).is_file() {
        return vec![path.to_owned()];
    }
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| is_vault(path)).collect();
    found.sort();
    found
}

fn is_vault(path: &Path) -> bool {
    if path.is_dir() {
        path.join(file_name::EXPERTS).is_file()
    } else {
        path.extension().is_some_and(|e| e == "smoe")
    }
}

/// The expert file is written last, or renamed with its directory.
fn stamp(path: &Path) -> Stamp {
    let file = if path.is_dir() { path.join(file_name::EXPERTS) } else { path.to_owned() };
    let found = std::fs::metadata(file).and_then(|found| Ok((found.modified()?, found.len())));
    found.unwrap_or((UNIX_EPOCH, 0))
}

fn name_of(path: &Path) -> String {
    let whole = path.canonicalize().unwrap_or_default();
    // `.` and the like have their name elsewhere.
    let path = if path.file_name().is_some() { path } else { &whole };
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.unwrap_or_default().to_string_lossy().into_owned()
}

fn describe(vault: &Vault, path: &Path, (modified, _): Stamp) -> Listing {
    let spec = &vault.spec;
    let bits = |encoding| match encoding {
        Encoding::F32 => 32,
        Encoding::F16 | Encoding::Bf16 => 16,
        Encoding::Uniform(uniform) => uniform.bits(),
        Encoding::Table(table) => table.bits(),
    };
    let encodings = vault.experts.layers.iter().flat_map(|layer| layer.tensors);
    let source = vault.experts.manifest().map_or("", |manifest| manifest.source.fingerprint.as_str());
    let source: String = source.chars().filter(char::is_ascii_alphanumeric).take(12).collect();
    Listing {
        id: String::new(),
        path: path.to_owned(),
        created: modified.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        bytes: vault.experts.file_len + vault.backbone.file_len,
        layers: spec.n_layers(),
        experts: spec.moe.n_experts,
        top_k: spec.moe.top_k,
        context: spec.max_context,
        bits: encodings.map(|tensor| bits(tensor.encoding)).max().unwrap_or(0),
        family: spec.model_type.clone(),
        fingerprint: format!("fp_{source}{:x}", vault.experts.file_len),
    }
}
