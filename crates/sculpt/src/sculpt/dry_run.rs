//! What a sculpt would do.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use smoe_format::BackboneTensor;
use smoe_format::spec::{FfnKind, ModelSpec};

use super::place::{RESERVE, available, existing_ancestor};
use super::refuse_loss;
use crate::checkpoint::{Checkpoint, SideFile};
use crate::error::{SculptError, Warning};
use crate::files::{Expected, OnDisk, WeightFiles};
use crate::plan::Plan;
use crate::schedule;
use crate::settings::Settings;

/// What a sculpt would do.
#[derive(Clone, Debug)]
pub struct DryRun {
    /// The model as it would be in the vault.
    pub spec: ModelSpec,
    /// Everything odd.
    pub warnings: Vec<Warning>,
    /// Bytes of the checkpoint's weights.
    pub checkpoint_bytes: u64,
    /// Weights of the model.
    pub weights: u64,
    /// Weights that a token meets.
    pub active_weights: u64,
    /// Encoding of gate, up and down of the first MoE layer, `q4/64` for example.
    pub expert_encodings: [String; 3],
    /// Encodings of all layers, in words.
    pub widths: Vec<String>,
    /// Routed experts in all.
    pub experts: usize,
    /// Bytes of the largest record: what one slot holds.
    pub record_bytes: u64,
    /// Bytes of `experts.smoe`.
    pub experts_bytes: u64,
    /// Bytes of `backbone.safetensors`, which stays in memory.
    pub backbone_bytes: u64,
    /// Bytes of the files that travel with it.
    pub side_bytes: u64,
    /// Bytes of expert records that a token reads if none is in memory.
    pub token_expert_bytes: u64,
    /// Bytes of the backbone that a token reads: all but the embedding's other rows.
    pub token_backbone_bytes: u64,
    /// Bytes of padding in the records.
    pub padding_bytes: u64,
    /// Of files that arrive, the most that is on the disk at once.
    pub arriving_bytes: u64,
    /// Of files that arrive, what is read before any of them comes, and kept: by it checkpoints are told apart, and codes
    /// decided.
    pub sampled_bytes: u64,
    /// Free bytes that the disk must have.
    pub needed_bytes: u64,
    /// Free bytes that it has, if a vault was named.
    pub available_bytes: Option<u64>,
}

/// Tells what [`sculpt`](fn@crate::sculpt) would do, without writing anything. Refuses what it would refuse of the checkpoint.
///
/// # Errors
/// As [`sculpt`](fn@crate::sculpt) for the checkpoint and the settings.
pub fn dry_run(
    checkpoint: &Path,
    vault: Option<&Path>,
    settings: &Settings,
    cancel: &AtomicBool,
) -> Result<DryRun, SculptError> {
    dry_run_of(checkpoint, &OnDisk, vault, settings, cancel)
}

/// As [`dry_run`], of weight files that may not be on the disk yet.
///
/// # Errors
/// As [`dry_run`].
pub fn dry_run_of(
    checkpoint: &Path,
    files: &dyn WeightFiles,
    vault: Option<&Path>,
    settings: &Settings,
    cancel: &AtomicBool,
) -> Result<DryRun, SculptError> {
    let files = &Expected::of(files);
    let checkpoint = Checkpoint::open_of(checkpoint, settings.tokenizer.as_deref(), files)?;
    checkpoint.expect_samples(files)?;
    let settings = &settings.settled(checkpoint.is_coded());
    let plan = Plan::new((&checkpoint, files), settings, cancel)?;
    refuse_loss(&plan, settings)?;
    let spec = &plan.sources.spec;
    let side_bytes = plan.side_files.iter().map(SideFile::len).sum();
    let embedding = |tensor| tensor == BackboneTensor::Embed && !spec.tied_head;
    let token_backbone_bytes =
        plan.backbone.tensors.iter().filter(|t| !embedding(t.tensor)).map(|t| t.len).sum();
    let layers = &plan.experts.layers;
    let per_expert = (3 * spec.moe.d_expert * spec.d_model) as u64;
    let n_moe = spec.layers.iter().filter(|kind| **kind == FfnKind::Moe).count() as u64;
    let backbone_weights: u64 = plan.backbone.tensors.iter().map(|t| (t.rows * t.cols) as u64).sum();
    let embedding_weights: u64 = plan
        .backbone
        .tensors
        .iter()
        .filter(|t| embedding(t.tensor))
        .map(|t| (t.rows.saturating_sub(1) * t.cols) as u64)
        .sum();
    let (mut arriving_bytes, mut sampled_bytes) = (0, 0);
    if files.arrives() {
        // What a step is found by is not read here: it may be much.
        files.only_note();
        plan.expect_step((&checkpoint, files), settings, cancel)?;
        sampled_bytes = files.bytes();
        let (items, shards) = (plan.items(), checkpoint.shards());
        let all: Vec<usize> = (0..items.len()).collect();
        let stages = schedule::stages(plan.needs(&items, &all));
        arriving_bytes = schedule::most_bytes(&stages, |shard| shards[shard].len);
    }
    let available_bytes = match vault {
        None => None,
        Some(vault) => Some(available(existing_ancestor(vault))?),
    };
    Ok(DryRun {
        checkpoint_bytes: checkpoint.bytes(),
        weights: backbone_weights + n_moe * spec.moe.n_experts as u64 * per_expert,
        active_weights: backbone_weights - embedding_weights + n_moe * spec.moe.top_k as u64 * per_expert,
        widths: plan.widths(),
        expert_encodings: layers[0].tensors.map(|t| t.encoding.to_string()),
        experts: plan.experts.records.len(),
        record_bytes: layers.iter().map(|l| l.record_len as u64).max().unwrap_or(0),
        experts_bytes: plan.experts.file_len,
        backbone_bytes: plan.backbone.file_len,
        side_bytes,
        token_expert_bytes: plan.token_expert_bytes(),
        token_backbone_bytes,
        padding_bytes: plan.experts.records.iter().map(|record| record.len - record.used).sum(),
        needed_bytes: plan.total_bytes() + arriving_bytes + sampled_bytes + RESERVE,
        arriving_bytes,
        sampled_bytes,
        available_bytes,
        spec: spec.clone(),
        warnings: plan.sources.warnings,
    })
}
