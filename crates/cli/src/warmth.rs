//! Which experts a vault's conversations have used: kept from one start to the next, so that a chat can fill its
//! ring while it waits for the first question.
//!
//! A histogram per vault lies in the user's cache directory. It is a hint: one that is missing, damaged or of
//! another model is passed over, and one that cannot be written is not.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use smoe_engine::{Engine, Vault};
use smoe_format::ExpertKey;
use smoe_meter::RouteSnapshot;

/// Counts of earlier starts weigh half as much as those of the last one: what is used changes.
const FADE: u64 = 2;

/// Uses by MoE layer and expert.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Warmth {
    uses: Vec<Vec<u64>>,
}

impl Warmth {
    /// That of a vault, empty if there is none or it does not fit.
    pub fn load(vault: &Vault) -> Self {
        let read = || Self::parse(&fs::read_to_string(path(vault)?).ok()?);
        let fits = |warmth: &Self| {
            let tables = &vault.experts.layers;
            warmth.uses.len() == tables.len()
                && warmth.uses.iter().zip(tables).all(|(uses, table)| uses.len() == table.n_experts as usize)
        };
        read().filter(fits).unwrap_or_default()
    }

    fn parse(text: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(text).ok()?;
        let rows = value.get("uses")?.as_array()?;
        let row = |row: &Value| row.as_array()?.iter().map(Value::as_u64).collect::<Option<Vec<_>>>();
        Some(Self { uses: rows.iter().map(row).collect::<Option<_>>()? })
    }

    /// Adds what was counted since the engine was opened.
    pub fn add(&mut self, routes: &RouteSnapshot) {
        let old = std::mem::take(&mut self.uses);
        let faded = |layer: usize, expert: usize| {
            old.get(layer).and_then(|uses| uses.get(expert)).map_or(0, |&uses| uses / FADE)
        };
        let row = |(layer, uses): (usize, &[u64])| -> Vec<u64> {
            uses.iter().enumerate().map(|(expert, n)| n.saturating_add(faded(layer, expert))).collect()
        };
        self.uses = routes.layers().enumerate().map(row).collect();
    }

    /// Writes it for the next start, if that can be done.
    pub fn save(&self, vault: &Vault) {
        let Some(path) = path(vault) else { return };
        let write = || {
            fs::create_dir_all(path.parent()?).ok()?;
            // Whole or not at all: two chats may end at once.
            let part = path.with_extension(format!("{}.part", std::process::id()));
            fs::write(&part, json!({ "format": "smoe-warmth-1", "uses": self.uses }).to_string()).ok()?;
            fs::rename(&part, &path).ok()
        };
        let _ = write();
    }

    /// Experts that were used, the most used first.
    pub fn ranked(&self, vault: &Vault) -> Vec<ExpertKey> {
        let layers = vault.experts.layers.iter().map(|table| table.layer);
        let mut ranked: Vec<(u64, ExpertKey)> = layers
            .zip(&self.uses)
            .flat_map(|(layer, uses)| {
                let keyed = uses.iter().zip(0..);
                keyed.map(move |(&uses, expert)| (uses, ExpertKey { layer, expert }))
            })
            .filter(|(uses, _)| *uses > 0)
            .collect();
        ranked.sort_by_key(|(uses, key)| (std::cmp::Reverse(*uses), key.layer, key.expert));
        ranked.into_iter().map(|(_, key)| key).collect()
    }
}

/// Begins to read what earlier chats used most, in the background; the first token ends it.
pub fn prewarm(engine: &mut Engine, vault: &Vault) {
    if !engine.info().plan.holds_all() {
        engine.prewarm(&Warmth::load(vault).ranked(vault));
    }
}

/// Keeps what this start has used.
pub fn keep(engine: &Engine, vault: &Vault) {
    let mut warmth = Warmth::load(vault);
    warmth.add(&engine.route_snapshot());
    warmth.save(vault);
}

/// The histogram of the vault at this path, in the user's cache directory.
fn path(vault: &Vault) -> Option<PathBuf> {
    let directory = cache_directory()?;
    Some(directory.join(format!("warmth-{}.json", place_hash(&vault.experts_path)?)))
}

/// Where the user's programs keep what can be made again.
pub fn cache_directory() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let cache = set("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| set("HOME").map(|home| Path::new(&home).join(".cache")))?;
    Some(cache.join("smoe"))
}

/// A name for the place where a file is.
pub fn place_hash(path: &Path) -> Option<String> {
    let own = fs::canonicalize(path).ok()?;
    // FNV-1a: names must differ, nothing more.
    let hash = own.as_os_str().as_encoded_bytes().iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    Some(format!("{hash:016x}"))
}

#[cfg(test)]
mod tests {
    use smoe_meter::RouteMeter;

    use super::*;

    #[test]
    fn earlier_counts_fade_and_damage_is_nothing() {
        let meter = RouteMeter::new(2, 3, 1);
        meter.used(0, 1, 10);
        meter.used(1, 2, 3);
        let mut warmth = Warmth::default();
        warmth.add(&meter.snapshot());
        assert_eq!(warmth.uses, [[0, 10, 0], [0, 0, 3]]);
        warmth.add(&meter.snapshot());
        assert_eq!(warmth.uses, [[0, 15, 0], [0, 0, 4]]);
        let text = json!({ "uses": warmth.uses }).to_string();
        assert_eq!(Warmth::parse(&text), Some(warmth));
        for text in ["", "{}", "{\"uses\": [[1, -2]]}", "{\"uses\": 7}"] {
            assert_eq!(Warmth::parse(text), None, "{text}");
        }
    }
}
