//! What is in a repository: the hub's listing of one revision.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use serde::Deserialize;
use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// The files of a revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Listing {
    /// The commit: the same files for ever.
    pub commit: String,
    pub files: BTreeMap<String, Entry>,
}

/// A file as the hub lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub bytes: u64,
    pub hash: Option<Hash>,
}

/// How a file is told from every other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Hash {
    /// Of its bytes: large files.
    Sha256(String),
    /// Of `blob LENGTH\0` and its bytes, as git has it: small files.
    GitBlob(String),
}

impl Hash {
    pub fn text(&self) -> &str {
        match self {
            Self::Sha256(text) | Self::GitBlob(text) => text,
        }
    }
}

/// Computes the hash that a file must have.
pub(crate) enum Hasher {
    Sha256(Sha256),
    GitBlob(Sha1),
}

impl Hasher {
    pub fn new(hash: &Hash, bytes: u64) -> Self {
        match hash {
            Hash::Sha256(_) => Self::Sha256(Sha256::new()),
            Hash::GitBlob(_) => Self::GitBlob(Sha1::new_with_prefix(format!("blob {bytes}\0"))),
        }
    }

    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hash) => hash.update(bytes),
            Self::GitBlob(hash) => hash.update(bytes),
        }
    }

    /// In lower-case hexadecimal.
    pub fn finish(self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Self::Sha256(hash) => hex(&hash.finalize()),
            Self::GitBlob(hash) => hex(&hash.finalize()),
        }
    }
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    #[serde(rename = "rfilename")]
    name: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

impl Listing {
    /// Reads the answer of `/api/models/REPO/revision/REVISION?blobs=true`; else what is wrong with it. A name that
    /// leads out of a directory, and a file without a length, are as if they were not there.
    pub fn parse(json: &[u8]) -> Result<Self, String> {
        let info: Info =
            serde_json::from_slice(json).map_err(|e| format!("its listing does not read: {e}"))?;
        let hex = |text: &str, len| text.len() == len && text.bytes().all(|b| b.is_ascii_hexdigit());
        if !hex(&info.sha, 40) {
            return Err(format!("`{}` is no commit", info.sha));
        }
        let files = info.siblings.into_iter().filter_map(|Sibling { name, size, blob_id, lfs }| {
            let inside = Path::new(&name).components().all(|part| matches!(part, Component::Normal(_)));
            // What a download writes beside a file has such names.
            if !inside || name.is_empty() || name.starts_with('.') || name.ends_with(".part") {
                return None;
            }
            let bytes = lfs.as_ref().map(|lfs| lfs.size).or(size)?;
            let large = lfs.map(|lfs| lfs.sha256.to_ascii_lowercase()).filter(|hash| hex(hash, 64));
            let small = blob_id.map(|hash| hash.to_ascii_lowercase()).filter(|hash| hex(hash, 40));
            let hash = large.map(Hash::Sha256).or(small.map(Hash::GitBlob));
            Some((name, Entry { bytes, hash }))
        });
        Ok(Self { files: files.collect(), commit: info.sha })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn large_files_have_their_own_hash_and_small_ones_gits() {
        let sha256 = "ab".repeat(32);
        let json = format!(
            r#"{{"id": "a/b", "sha": "{COMMIT}", "gated": false, "siblings": [
                {{"rfilename": "config.json", "size": 12, "blobId": "{COMMIT}"}},
                {{"rfilename": "model.safetensors", "size": 7, "blobId": "{COMMIT}",
                  "lfs": {{"sha256": "{}", "size": 999, "pointerSize": 134}}}},
                {{"rfilename": "../escape", "size": 1}}, {{"rfilename": "/etc/passwd", "size": 1}},
                {{"rfilename": ".gitattributes", "size": 1}}, {{"rfilename": "unknown"}},
                {{"rfilename": "sub/file", "size": 3}}]}}"#,
            sha256.to_uppercase()
        );
        let listing = Listing::parse(json.as_bytes()).expect("read");
        let names: Vec<&str> = listing.files.keys().map(String::as_str).collect();
        assert_eq!(
            (listing.commit.as_str(), names),
            (COMMIT, vec!["config.json", "model.safetensors", "sub/file"])
        );
        let of = |name: &str| listing.files[name].clone();
        assert_eq!(of("config.json"), Entry { bytes: 12, hash: Some(Hash::GitBlob(COMMIT.to_owned())) });
        assert_eq!(of("model.safetensors"), Entry { bytes: 999, hash: Some(Hash::Sha256(sha256)) });
        assert_eq!(of("sub/file").hash, None);
        for wrong in ["", "[]", "{}", r#"{"sha": "main", "siblings": []}"#] {
            assert!(Listing::parse(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn hashes_are_those_of_sha256sum_and_of_git() {
        let of = |hash: Hash, text: &str| {
            let mut hasher = Hasher::new(&hash, text.len() as u64);
            let (a, b) = text.as_bytes().split_at(text.len() / 2);
            hasher.update(a);
            hasher.update(b);
            hasher.finish()
        };
        // printf 'hello\n' | git hash-object --stdin; printf 'hello\n' | sha256sum
        let git = "ce013625030ba8dba906f756967f9e9ca394464a";
        let sha = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        assert_eq!(of(Hash::GitBlob(String::new()), "hello\n"), git);
        assert_eq!(of(Hash::Sha256(String::new()), "hello\n"), sha);
    }
}
