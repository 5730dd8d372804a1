//! What experts see: statistics of their inputs over a text, with which a sculpt feeds errors back.
//!
//! Of each routed expert: how many tokens it served, and `X^T X` of the inputs of gate and up and of the inputs of down.
//! They lie in a directory, `head.json` and a part per MoE layer; a part is written whole and then named, so that an
//! interrupted run goes on with the layers that it lacks. Who runs the model ([`collect`]'s caller) is not known here.
//!
//! A part: `SMSTAT1\n`, then little-endian u32 layer, n_experts, d_model, d_expert; u64 tokens of each expert; then the
//! upper triangles, row by row, in f32: all experts' inputs and hidden values summed, and then those of each expert. At
//! the end a crc32c of everything before.

mod collect;
mod part;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use smoe_format::ModelSpec;

pub use collect::{Collector, collect};

use crate::error::SculptError;
use crate::quantise::Square;
use part::Part;

const HEAD: &str = "head.json";

/// A text as the model computes it, at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Document {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Of each whether its inputs count.
    pub counted: Vec<bool>,
}

impl Document {
    /// A text of which some tokens are to be predicted: those before them count, as it is their inputs that predict.
    #[must_use]
    pub fn predicting(tokens: Vec<u32>, mut scored: Vec<bool>) -> Self {
        scored.rotate_left(1);
        if let Some(last) = scored.last_mut() {
            *last = false;
        }
        Self { tokens, counted: scored }
    }
}

/// Of what model and text statistics are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// Version of the files.
    pub version: u32,
    /// Fingerprint of the checkpoint ([`crate::Checkpoint::fingerprint`]).
    pub model: String,
    /// Its architecture.
    pub model_type: String,
    /// Hash of the text's tokens, and of which of them count.
    pub text: String,
    /// Tokens computed.
    pub tokens: u64,
    /// Tokens whose inputs were counted.
    pub counted: u64,
    /// MoE layers.
    pub layers: Vec<u32>,
    /// Routed experts of a layer.
    pub n_experts: usize,
    /// Width of the model.
    pub d_model: usize,
    /// Width of an expert.
    pub d_expert: usize,
}

impl Head {
    /// The version that is written and read.
    pub const VERSION: u32 = 1;

    /// The head for a model, made from the checkpoint of this fingerprint, and a text.
    #[must_use]
    pub fn new(fingerprint: &str, spec: &ModelSpec, text: &[Document]) -> Self {
        let mut hash = Sha256::new();
        for document in text {
            hash.update((document.tokens.len() as u64).to_le_bytes());
            for (token, &counted) in document.tokens.iter().zip(&document.counted) {
                hash.update(token.to_le_bytes());
                hash.update([u8::from(counted)]);
            }
        }
        let count = |document: &Document| document.counted.iter().filter(|counted| **counted).count() as u64;
        Self {
            version: Self::VERSION,
            model: fingerprint.to_owned(),
            model_type: spec.model_type.clone(),
            text: hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect(),
            tokens: text.iter().map(|document| document.tokens.len() as u64).sum(),
            counted: text.iter().map(count).sum(),
            layers: spec.moe_layers().map(|layer| layer as u32).collect(),
            n_experts: spec.moe.n_experts,
            d_model: spec.d_model,
            d_expert: spec.moe.d_expert,
        }
    }

    fn read(dir: &Path) -> Result<Option<Self>, SculptError> {
        let path = dir.join(HEAD);
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(SculptError::json(&path)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(SculptError::io("read", &path)(e)),
        }
    }

    /// Bytes of a layer's statistics, on disk and while they are collected.
    #[must_use]
    pub fn layer_bytes(&self) -> u64 {
        (self.n_experts as u64 + 1) * 4 * (triangle(self.d_model) + triangle(self.d_expert)) as u64
    }
}

/// Elements of an upper triangle.
const fn triangle(n: usize) -> usize {
    n * (n + 1) / 2
}

fn refuse(dir: &Path, what: impl Into<String>) -> SculptError {
    SculptError::Statistics { path: dir.to_owned(), what: what.into() }
}

/// Statistics on disk, complete.
#[derive(Debug)]
pub struct Statistics {
    dir: PathBuf,
    head: Head,
    /// The part that was asked for last, and the means of its layer: experts are coded layer by layer.
    last: Mutex<Option<Arc<Layer>>>,
}

#[derive(Debug)]
struct Layer {
    part: Part,
    /// Means over all experts' tokens, of inputs and of hidden values.
    pooled: [Square; 2],
    tokens: u64,
}

/// How much of an expert's Hessian is that of its whole layer (EXP-QUANT-03).
const POOLED: f32 = 0.3;
/// An expert that served fewer tokens than this share of its width has the layer's alone (EXP-QUANT-03).
const FEWEST: f64 = 0.25;

impl Statistics {
    /// Opens what [`collect`] wrote.
    ///
    /// # Errors
    /// If there is none, or it is unfinished.
    pub fn open(dir: &Path) -> Result<Self, SculptError> {
        let head = Head::read(dir)?
            .ok_or_else(|| refuse(dir, "has no head.json: name what `smoe calibrate` made"))?;
        if head.version != Head::VERSION {
            let what =
                format!("is of version {}, and {} is read: calibrate again", head.version, Head::VERSION);
            return Err(refuse(dir, what));
        }
        let lacking = head.layers.iter().filter(|&&layer| !part::path(dir, layer).is_file()).count();
        if lacking > 0 {
            let what =
                format!("lacks {lacking} of {} layers: run `smoe calibrate` to its end", head.layers.len());
            return Err(refuse(dir, what));
        }
        Ok(Self { dir: dir.to_owned(), head, last: Mutex::new(None) })
    }

    /// Of what they are.
    #[must_use]
    pub const fn head(&self) -> &Head {
        &self.head
    }

    /// Refuses those of another checkpoint, or of less of it than is sculpted.
    pub(crate) fn require(&self, fingerprint: &str, spec: &ModelSpec) -> Result<(), SculptError> {
        if self.head.model != fingerprint {
            let short = |s: &str| s.chars().take(12).collect::<String>();
            let (found, expected) = (short(&self.head.model), short(fingerprint));
            return Err(refuse(
                &self.dir,
                format!("is of checkpoint {found}, not of {expected}: calibrate this one"),
            ));
        }
        let whole = spec.moe.n_experts <= self.head.n_experts
            && spec.moe_layers().all(|layer| self.head.layers.contains(&(layer as u32)))
            && (spec.d_model, spec.moe.d_expert) == (self.head.d_model, self.head.d_expert);
        if whole { Ok(()) } else { Err(refuse(&self.dir, "is of a part of this model: calibrate all of it")) }
    }

    /// A name for these figures: text, and how many tokens counted.
    pub(crate) fn name(&self) -> String {
        format!("{}/{}", self.head.text.chars().take(16).collect::<String>(), self.head.counted)
    }

    /// Bytes that a layer's means take while its experts are coded.
    pub(crate) fn bytes(&self) -> u64 {
        8 * (self.head.d_model.pow(2) + self.head.d_expert.pow(2)) as u64
    }

    fn layer(&self, layer: u32) -> Result<Arc<Layer>, SculptError> {
        let mut last = self.last.lock().expect("no worker panics");
        if let Some(found) = last.as_ref().filter(|found| found.part.layer() == layer) {
            return Ok(found.clone());
        }
        let part = Part::open(&self.dir, &self.head, layer)?;
        let tokens = part.tokens().iter().sum::<u64>();
        let mut pooled = [Square::zeros(self.head.d_model), Square::zeros(self.head.d_expert)];
        for (kind, square) in pooled.iter_mut().enumerate() {
            part.add(None, kind, 1.0 / tokens.max(1) as f32, square)?;
        }
        let found = Arc::new(Layer { part, pooled, tokens });
        *last = Some(found.clone());
        Ok(found)
    }

    /// The Hessians of an expert: of gate and up, and of down. Means over tokens, blended with those of the layer.
    pub(crate) fn hessians(&self, layer: u32, expert: u32) -> Result<[Square; 2], SculptError> {
        let layer = self.layer(layer)?;
        let tokens = layer.part.tokens().get(expert as usize).copied().unwrap_or(0);
        let mut hessians = layer.pooled.clone();
        if layer.tokens == 0 {
            return Ok(hessians);
        }
        for (kind, square) in hessians.iter_mut().enumerate() {
            if (tokens as f64) < FEWEST * square.n as f64 {
                continue;
            }
            square.values.iter_mut().for_each(|value| *value *= POOLED);
            layer.part.add(Some(expert), kind, (1.0 - POOLED) / tokens as f32, square)?;
        }
        Ok(hessians)
    }
}
