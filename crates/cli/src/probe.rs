//! `smoe probe`: what a forward computes, for comparing with a reference.

use std::collections::HashMap;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize_to_file};
use smoe_engine::Observer;
use smoe_format::ModelSpec;

use crate::args::ProbeArgs;
use crate::failure::Failure;
use crate::model;

/// A plane of f32 of known shape, filled row by row.
struct Plane {
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Plane {
    fn new(shape: Vec<usize>) -> Self {
        let bytes = vec![0; 4 * shape.iter().product::<usize>()];
        Self { shape, bytes }
    }

    /// Puts rows at (`outer`, `first`) of a `[outer, T, width]` or `[T, width]` plane.
    fn put(&mut self, outer: usize, first: usize, rows: &[f32]) {
        let width = self.shape.last().copied().unwrap_or(0);
        let tokens = self.shape[self.shape.len() - 2];
        let start = 4 * (outer * tokens + first) * width;
        for (bytes, value) in self.bytes[start..].chunks_exact_mut(4).zip(rows) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
    }
}

struct Recorder {
    logits: Plane,
    hidden: Plane,
    router: Plane,
}

impl Recorder {
    fn new(spec: &ModelSpec, tokens: usize) -> Self {
        Self {
            logits: Plane::new(vec![tokens, spec.vocab_size]),
            hidden: Plane::new(vec![spec.n_layers() + 1, tokens, spec.d_model]),
            router: Plane::new(vec![spec.moe_layers().count(), tokens, spec.moe.n_experts]),
        }
    }
}

impl Observer for Recorder {
    fn hidden(&mut self, index: usize, first: usize, rows: &[f32]) {
        self.hidden.put(index, first, rows);
    }

    fn router(&mut self, index: usize, first: usize, rows: &[f32]) {
        self.router.put(index, first, rows);
    }

    fn logits(&mut self, first: usize, rows: &[f32]) {
        self.logits.put(0, first, rows);
    }
}

/// Runs the command.
pub fn probe(args: &ProbeArgs) -> Result<(), Failure> {
    let vault = model::open_vault(&args.vault)?;
    let spec = &vault.spec;
    let row = spec.vocab_size
        + (spec.n_layers() + 1) * spec.d_model
        + spec.moe_layers().count() * spec.moe.n_experts;
    let planes = 4 * (row * args.tokens_in.len()) as u64;
    let mut engine = model::open_engine(&vault, &args.machine, planes)?;
    let mut recorder = Recorder::new(spec, args.tokens_in.len());
    engine.observe(&args.tokens_in, &mut recorder)?;
    let mut views = Vec::new();
    for (name, plane) in
        [("logits", &recorder.logits), ("hidden", &recorder.hidden), ("router", &recorder.router)]
    {
        views.push((name, TensorView::new(Dtype::F32, plane.shape.clone(), &plane.bytes)?));
    }
    let metadata: Option<HashMap<String, String>> = None;
    serialize_to_file(views, metadata, &args.out)?;
    eprintln!("wrote {} ({} tokens)", args.out.display(), args.tokens_in.len());
    Ok(())
}
