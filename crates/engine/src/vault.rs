//! A vault on disk: its head, its backbone's index, its side files. No weights yet.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use smoe_format::{
    Backbone, BackboneTensor, ExpertFile, FormatError, ModelSpec, expert_file, file_name, original,
};

use crate::EngineError;

/// An opened vault.
#[derive(Clone, Debug)]
pub struct Vault {
    /// Path of the expert file.
    pub experts_path: PathBuf,
    /// Path of the backbone file.
    pub backbone_path: PathBuf,
    /// Where side files lie.
    directory: PathBuf,
    /// Head of the expert file.
    pub experts: ExpertFile,
    /// Index of the backbone file.
    pub backbone: Backbone,
    /// The model.
    pub spec: ModelSpec,
    /// What is odd about it, for the user to know.
    pub warnings: Vec<String>,
}

impl Vault {
    /// Opens a vault directory, or an original `NAME.smoe` with `NAME.scout.safetensors` beside it.
    ///
    /// # Errors
    /// If a file is missing, damaged, or lacks a tensor that the model needs.
    pub fn open(path: &Path) -> Result<Self, EngineError> {
        Self::open_with(path, None)
    }

    /// The same; for an original file `spec`, from the checkpoint's config, wins over what the file says of
    /// its model: version 1 says nothing, version 2 only what fits its architecture block.
    ///
    /// # Errors
    /// As [`Vault::open`].
    pub fn open_with(path: &Path, spec: Option<ModelSpec>) -> Result<Self, EngineError> {
        let not_a_vault = |what: String| EngineError::NotAVault { path: path.to_owned(), what };
        let (experts_path, backbone_path, directory) = if path.is_dir() {
            let experts = path.join(file_name::EXPERTS);
            if !experts.is_file() {
                return Err(not_a_vault(format!("there is no {} in it", file_name::EXPERTS)));
            }
            (experts, path.join(file_name::BACKBONE), path.to_owned())
        } else if path.is_file() {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let stem = name.strip_suffix(".smoe").unwrap_or(&name);
            let directory = path.parent().map(Path::to_owned).unwrap_or_default();
            let beside = directory.join(format!("{stem}{}", original::BACKBONE_SUFFIX));
            // The expert file of a vault directory names the vault too.
            let inside = directory.join(file_name::BACKBONE);
            let backbone = if !beside.is_file() && inside.is_file() { inside } else { beside };
            (path.to_owned(), backbone, directory)
        } else {
            return Err(not_a_vault("there is no such file or directory".to_owned()));
        };

        let experts = read_expert_head(&experts_path)?;
        let backbone = read_backbone_header(&backbone_path)?;
        let format = |file: &Path| {
            let file = file.to_owned();
            move |source: FormatError| EngineError::Format { file, source }
        };
        let mut warnings = Vec::new();
        let spec = match spec {
            Some(spec) if experts.manifest().is_none() => spec,
            _ => {
                let mut spec = experts.spec(&backbone).map_err(format(&experts_path))?;
                if experts.manifest().is_none() {
                    warnings.extend(original::mend_rope(&mut spec));
                }
                spec
            }
        };
        let vault = Self { experts_path, backbone_path, directory, experts, backbone, spec, warnings };
        vault.experts.check(&vault.spec).map_err(format(&vault.experts_path))?;
        vault.check_backbone().map_err(format(&vault.backbone_path))?;
        if vault.experts.manifest().is_some() {
            let listed = vault.listed(file_name::BACKBONE).map(|entry| entry.bytes);
            if listed != Some(vault.backbone.file_len) {
                let expected = listed.map_or("none".to_owned(), |bytes| bytes.to_string());
                let what = format!("{} bytes, expected {expected}", vault.backbone.file_len);
                return Err(EngineError::Damaged { file: vault.backbone_path.clone(), what });
            }
        }
        Ok(vault)
    }

    /// Every tensor that the model needs is there.
    fn check_backbone(&self) -> Result<(), FormatError> {
        BackboneTensor::all(&self.spec).into_iter().try_for_each(|tensor| {
            self.backbone.require(&self.spec, tensor, &self.tensor_name(tensor)).map(|_| ())
        })
    }

    /// The name under which the backbone file holds a tensor.
    #[must_use]
    pub fn tensor_name(&self, tensor: BackboneTensor) -> String {
        if self.experts.version < expert_file::VERSION {
            original::checkpoint_name(tensor)
        } else {
            tensor.to_string()
        }
    }

    /// What the manifest says of a file; the original's vaults list none.
    #[must_use]
    pub fn listed(&self, name: &str) -> Option<&expert_file::FileEntry> {
        self.experts.manifest()?.files.iter().find(|entry| entry.name == name)
    }

    /// A hash of all that decides what is computed: the model, every record's checksum, the backbone's, the precision
    /// of activations.
    pub(crate) fn fingerprint(&self, exact: bool) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(format!("{:?} {exact}", self.spec));
        for record in &self.experts.records {
            hash.update(format!("{:?} {} {:?}", record.key, record.len, record.crc32c));
        }
        let backbone = self.listed(file_name::BACKBONE).map(|entry| entry.crc32c.clone());
        hash.update(format!("{} {backbone:?}", self.backbone.file_len));
        hash.finalize().into()
    }

    /// Where a side file would be.
    #[must_use]
    pub fn side_path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// A side file (tokeniser, template, configs), with its checksum checked; `None` if there is none.
    ///
    /// # Errors
    /// If it cannot be read, or is not the file that was sculpted.
    pub fn side_file(&self, name: &str) -> Result<Option<Vec<u8>>, EngineError> {
        let path = self.side_path(name);
        let listed = self.listed(name);
        if self.experts.manifest().is_some() && listed.is_none() {
            return Ok(None);
        }
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && listed.is_none() => return Ok(None),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let what = "it is missing, and the vault lists it".to_owned();
                return Err(EngineError::Damaged { file: path, what });
            }
            Err(source) => return Err(EngineError::Io { file: path, source }),
        };
        if let Some(entry) = listed {
            let found = format!("{:08x}", smoe_format::crc::crc32c(&bytes));
            if entry.bytes != bytes.len() as u64 || entry.crc32c != found {
                let what = format!(
                    "{} bytes with checksum {found}, expected {} with {}",
                    bytes.len(),
                    entry.bytes,
                    entry.crc32c
                );
                return Err(EngineError::Damaged { file: path, what });
            }
        }
        Ok(Some(bytes))
    }
}

fn read_expert_head(path: &Path) -> Result<ExpertFile, EngineError> {
    let format = |source| EngineError::Format { file: path.to_owned(), source };
    let (mut file, file_len) = open(path)?;
    let mut head = read_up_to(&mut file, path, expert_file::HEADER_BYTES as u64)?;
    let head_len = ExpertFile::head_len(&head, file_len).map_err(format)?;
    head.extend(read_up_to(&mut file, path, head_len - head.len() as u64)?);
    ExpertFile::parse(&head, file_len).map_err(format)
}

fn read_backbone_header(path: &Path) -> Result<Backbone, EngineError> {
    let format = |source| EngineError::Format { file: path.to_owned(), source };
    let (mut file, file_len) = open(path)?;
    let mut header = read_up_to(&mut file, path, 8)?;
    let Ok(first) = <[u8; 8]>::try_from(header.as_slice()) else {
        return Err(format(FormatError::Truncated {
            what: "backbone header",
            offset: 0,
            needed: 8,
            available: file_len,
        }));
    };
    let header_len = Backbone::header_len(first, file_len).map_err(format)?;
    header.extend(read_up_to(&mut file, path, header_len - 8)?);
    Backbone::parse(&header, file_len).map_err(format)
}

fn open(path: &Path) -> Result<(File, u64), EngineError> {
    let io = |source| EngineError::Io { file: path.to_owned(), source };
    let file = File::open(path).map_err(io)?;
    let len = file.metadata().map_err(io)?.len();
    Ok((file, len))
}

fn read_up_to(file: &mut File, path: &Path, len: u64) -> Result<Vec<u8>, EngineError> {
    let mut bytes = Vec::new();
    file.take(len)
        .read_to_end(&mut bytes)
        .map_err(|source| EngineError::Io { file: path.to_owned(), source })?;
    Ok(bytes)
}
