//! A layer's statistics as a file.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use super::{Head, refuse, triangle};
use crate::encode::crc_at;
use crate::error::SculptError;
use crate::quantise::Square;

const MAGIC: &[u8; 8] = b"SMSTAT1\n";

/// Where a layer's part is.
pub(super) fn path(dir: &Path, layer: u32) -> PathBuf {
    dir.join(format!("layer-{layer:05}.stat"))
}

/// Sums of one expert, or of all of a layer: upper triangles of `X^T X`, row by row.
#[derive(Clone, Debug, Default)]
pub(super) struct Sum {
    pub tokens: u64,
    pub input: Vec<f32>,
    pub hidden: Vec<f32>,
}

impl Sum {
    pub fn zeros(d_model: usize, d_expert: usize) -> Self {
        Self { tokens: 0, input: vec![0.0; triangle(d_model)], hidden: vec![0.0; triangle(d_expert)] }
    }
}

fn fixed(head: &Head, layer: u32) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    for value in [layer, head.n_experts as u32, head.d_model as u32, head.d_expert as u32] {
        bytes.extend_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// Writes a layer's part, whole or not at all.
pub(super) fn write(dir: &Path, head: &Head, layer: u32, experts: &[Sum]) -> Result<(), SculptError> {
    let path = path(dir, layer);
    let new = path.with_extension("new");
    let mut pooled = Sum::zeros(head.d_model, head.d_expert);
    for expert in experts {
        for (to, from) in [(&mut pooled.input, &expert.input), (&mut pooled.hidden, &expert.hidden)] {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
    }
    let file = File::create(&new).map_err(SculptError::io("create", &new))?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let mut crc = 0;
    let mut put = |bytes: &[u8]| {
        crc = smoe_format::crc::crc32c_append(crc, bytes);
        out.write_all(bytes)
    };
    let mut all = || {
        put(&fixed(head, layer))?;
        for expert in experts {
            put(&expert.tokens.to_le_bytes())?;
        }
        let mut bytes = Vec::new();
        for sum in std::iter::once(&pooled).chain(experts) {
            for values in [&sum.input, &sum.hidden] {
                for values in values.chunks(1 << 16) {
                    bytes.clear();
                    bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
                    put(&bytes)?;
                }
            }
        }
        Ok::<_, std::io::Error>(())
    };
    all()
        .and_then(|()| out.write_all(&crc.to_le_bytes()))
        .and_then(|()| out.flush())
        .and_then(|()| out.get_ref().sync_all())
        .and_then(|()| fs::rename(&new, &path))
        .map_err(SculptError::io("write", &path))
}

/// A part, opened and checked.
#[derive(Debug)]
pub(super) struct Part {
    file: File,
    path: PathBuf,
    layer: u32,
    tokens: Vec<u64>,
    widths: [usize; 2],
}

impl Part {
    /// Opens a layer's part and checks every byte of it.
    pub fn open(dir: &Path, head: &Head, layer: u32) -> Result<Self, SculptError> {
        let path = path(dir, layer);
        let read = |e| SculptError::io("read", &path)(e);
        let file = File::open(&path).map_err(SculptError::io("open", &path))?;
        let len = file.metadata().map_err(read)?.len();
        let start = fixed(head, layer);
        let counts = 8 * head.n_experts;
        let expected = (start.len() + counts + 4) as u64 + head.layer_bytes();
        if len != expected {
            return Err(refuse(&path, format!("has {len} bytes instead of {expected}: calibrate again")));
        }
        let crc = crc_at(&file, 0, len - 4, 0, &mut Vec::new()).map_err(read)?;
        let mut bytes = vec![0; start.len() + counts];
        file.read_exact_at(&mut bytes, 0).map_err(read)?;
        let mut stored = [0; 4];
        file.read_exact_at(&mut stored, len - 4).map_err(read)?;
        if crc != u32::from_le_bytes(stored) || !bytes.starts_with(&start) {
            return Err(refuse(&path, "is damaged, or of another model: calibrate again"));
        }
        let tokens = bytes[start.len()..].as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        Ok(Self { file, path: path.clone(), layer, tokens, widths: [head.d_model, head.d_expert] })
    }

    pub const fn layer(&self) -> u32 {
        self.layer
    }

    /// Tokens that each expert served.
    pub fn tokens(&self) -> &[u64] {
        &self.tokens
    }

    /// Adds `factor` times the sums of an expert, or of all, to both triangles of `out`: of inputs (`kind` 0) or of
    /// hidden values (1).
    pub fn add(
        &self,
        expert: Option<u32>,
        kind: usize,
        factor: f32,
        out: &mut Square,
    ) -> Result<(), SculptError> {
        let sizes = self.widths.map(|width| 4 * triangle(width) as u64);
        let place = expert.map_or(0, |expert| u64::from(expert) + 1);
        let start = (MAGIC.len() + 16 + 8 * self.tokens.len()) as u64;
        let mut at = start + place * (sizes[0] + sizes[1]) + if kind == 0 { 0 } else { sizes[0] };
        let n = self.widths[kind];
        let mut bytes = Vec::new();
        for i in 0..n {
            bytes.resize(4 * (n - i), 0);
            self.file.read_exact_at(&mut bytes, at).map_err(SculptError::io("read", &self.path))?;
            at += bytes.len() as u64;
            for (j, value) in (i..n).zip(bytes.as_chunks::<4>().0) {
                let value = factor * f32::from_le_bytes(*value);
                out.values[i * out.stride + j] += value;
                if j > i {
                    out.values[j * out.stride + i] += value;
                }
            }
        }
        Ok(())
    }
}
