//! Opening what is already a vault.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use smoe_format::expert_file::HEADER_BYTES;
use smoe_format::{Backbone, ExpertFile, FormatError, file_name};

use crate::error::SculptError;

/// What has a vault's name.
pub(crate) enum Existing {
    /// Nothing, or an empty directory.
    Nothing,
    /// A vault whose head is whole.
    Vault(Box<ExpertFile>),
    /// Something with an expert file that does not read.
    Damaged(String),
    /// Something else.
    Other,
}

impl Existing {
    pub fn at(path: &Path) -> Result<Self, SculptError> {
        match fs::metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Self::Nothing),
            Err(e) => return Err(SculptError::io("read", path)(e)),
            Ok(meta) if !meta.is_dir() => return Ok(Self::Other),
            Ok(_) => {}
        }
        let experts = path.join(file_name::EXPERTS);
        if !experts.exists() {
            let empty = fs::read_dir(path).map_err(SculptError::io("read", path))?.next().is_none();
            return Ok(if empty { Self::Nothing } else { Self::Other });
        }
        let file = match read_head(&experts) {
            Ok((file, _)) => file,
            Err(SculptError::Vault { source, .. }) => return Ok(Self::Damaged(source.to_string())),
            Err(e) => return Err(e),
        };
        for entry in file.manifest().map_or(&[][..], |manifest| &manifest.files) {
            match fs::metadata(path.join(&entry.name)) {
                Ok(meta) if meta.len() == entry.bytes => {}
                Ok(meta) => {
                    let what = format!("{} has {} bytes instead of {}", entry.name, meta.len(), entry.bytes);
                    return Ok(Self::Damaged(what));
                }
                Err(_) => return Ok(Self::Damaged(format!("{} is missing", entry.name))),
            }
        }
        Ok(Self::Vault(Box::new(file)))
    }
}

/// Reads the bytes of the head of an expert file; also the file and its length.
pub(crate) fn head_bytes(path: &Path) -> Result<(Vec<u8>, File, u64), SculptError> {
    let (file, len) = open(path)?;
    let mut head = vec![0; HEADER_BYTES.min(len as usize)];
    file.read_exact_at(&mut head, 0).map_err(SculptError::io("read", path))?;
    let head_len = ExpertFile::head_len(&head, len).map_err(vault_error(path))?;
    head.resize(head_len as usize, 0);
    file.read_exact_at(&mut head, 0).map_err(SculptError::io("read", path))?;
    Ok((head, file, len))
}

/// Reads the head of an expert file.
pub(crate) fn read_head(path: &Path) -> Result<(ExpertFile, File), SculptError> {
    let (head, file, len) = head_bytes(path)?;
    Ok((ExpertFile::parse(&head, len).map_err(vault_error(path))?, file))
}

/// Reads the header of a backbone file.
pub(crate) fn read_backbone(path: &Path) -> Result<(Backbone, File), SculptError> {
    let (file, len) = open(path)?;
    let mut first = [0; 8];
    if len < 8 {
        let source = FormatError::Backbone { what: format!("a file of {len} bytes") };
        return Err(SculptError::Vault { path: path.to_owned(), source });
    }
    file.read_exact_at(&mut first, 0).map_err(SculptError::io("read", path))?;
    let header_len = Backbone::header_len(first, len).map_err(vault_error(path))?;
    let mut header = vec![0; header_len as usize];
    file.read_exact_at(&mut header, 0).map_err(SculptError::io("read", path))?;
    Ok((Backbone::parse(&header, len).map_err(vault_error(path))?, file))
}

fn open(path: &Path) -> Result<(File, u64), SculptError> {
    let file = File::open(path).map_err(SculptError::io("open", path))?;
    let len = file.metadata().map_err(SculptError::io("read", path))?.len();
    Ok((file, len))
}

fn vault_error(path: &Path) -> impl FnOnce(FormatError) -> SculptError {
    move |source| SculptError::Vault { path: path.to_owned(), source }
}
