//! Where the tensors of a model are in a checkpoint.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::AtomicBool;

use smoe_format::spec::{FfnKind, MixerKind, ModelSpec};
use smoe_format::{BackboneTensor, ExpertKey, Projection};

use super::runs;
use crate::checkpoint::Checkpoint;
use crate::config::{family_of, spec_from_config};
use crate::error::{SculptError, Warning};
use crate::family::{Family, Hybrid, Place};
use crate::settings::Settings;
use crate::source::Source;
use crate::workers::stopped;

/// Names shown of a longer list.
const EXAMPLES: usize = 5;

/// Where the tensors of a model are in a checkpoint.
pub(crate) struct Sources {
    /// The model as sculpted: cut, and with the head that the weights show.
    pub spec: ModelSpec,
    pub family: &'static Family,
    /// In the order of [`BackboneTensor::all`].
    pub backbone: Vec<(BackboneTensor, Source)>,
    /// By layer and then expert: gate, up, down.
    pub experts: Vec<(ExpertKey, [Source; 3])>,
    pub warnings: Vec<Warning>,
}

impl Sources {
    /// Finds every tensor that the model needs and checks its shape and type.
    pub fn find(
        checkpoint: &Checkpoint,
        settings: &Settings,
        stop: &AtomicBool,
    ) -> Result<Self, SculptError> {
        let family = family_of(checkpoint.config())?;
        let (mut whole, config_warnings) = spec_from_config(checkpoint.config())?;
        let mut warnings = checkpoint.warnings().to_vec();
        warnings.extend(config_warnings);
        let embed = decide_head(checkpoint, family, &mut whole, &mut warnings, stop)?;
        let spec = cut(&whole, settings)?;

        let mut missing = Vec::new();
        let mut unread: BTreeMap<String, (usize, String)> = BTreeMap::new();
        let mut find = |place: &Place| {
            let found = match checkpoint.source(place) {
                Err(SculptError::Dtype { tensor, found, .. }) => {
                    unread.entry(found).or_insert((0, tensor)).0 += 1;
                    return Ok(None);
                }
                other => other?,
            };
            if found.is_none() {
                missing.push(place.name.clone());
            }
            Ok::<_, SculptError>(found)
        };
        let mut backbone = Vec::new();
        for tensor in BackboneTensor::all(&spec) {
            // A router that is cut has its whole shape in the checkpoint; so have its biases.
            let mut place = family.backbone(&whole, tensor);
            if tensor == BackboneTensor::Embed {
                place.name.clone_from(&embed);
            }
            if let Some(source) = find(&place)? {
                backbone.push((tensor, Source { cols: tensor.shape(&spec).1, ..source }));
            }
        }
        let mut experts = Vec::new();
        for layer in spec.moe_layers() {
            for expert in 0..spec.moe.n_experts {
                let key = ExpertKey { layer: layer as u32, expert: expert as u32 };
                let mut found = Vec::with_capacity(3);
                for projection in Projection::ALL {
                    found.extend(find(&family.expert(&whole, key, projection))?);
                }
                if let [gate, up, down] = found[..] {
                    experts.push((key, [gate, up, down]));
                }
            }
        }
        if !unread.is_empty() {
            let types = unread.into_iter();
            let types =
                types.map(|(name, (count, example))| format!("{name} ({count}, such as `{example}`)"));
            return Err(SculptError::Types { types: types.collect() });
        }
        if !missing.is_empty() {
            return Err(SculptError::MissingTensors {
                count: missing.len(),
                examples: missing
                    .iter()
                    .take(EXAMPLES)
                    .map(|name| checkpoint.describe_missing(name))
                    .collect(),
            });
        }
        warnings.extend(extra_tensors(checkpoint, family, &whole));
        Ok(Self { spec, family, backbone, experts, warnings })
    }

    /// The checkpoint's name of a backbone tensor.
    pub fn backbone_name(&self, tensor: BackboneTensor) -> String {
        self.family.backbone_name(&self.spec, tensor)
    }
}

/// Decides, as the reference does, what the head is; sets `tied_head` and returns the embedding's name.
fn decide_head(
    checkpoint: &Checkpoint,
    family: &Family,
    spec: &mut ModelSpec,
    warnings: &mut Vec<Warning>,
    stop: &AtomicBool,
) -> Result<String, SculptError> {
    let embed = family.backbone_name(spec, BackboneTensor::Embed);
    let head = family.backbone_name(spec, BackboneTensor::Head);
    match (spec.tied_head, checkpoint.has(&head)) {
        // The reference would put a random head here.
        (false, false) => Err(SculptError::MissingHead { tensor: head }),
        (false, true) | (true, false) => Ok(embed),
        (true, true) if !checkpoint.has(&embed) => {
            warnings.push(Warning::EmbeddingFromHead { embed, head: head.clone() });
            Ok(head)
        }
        (true, true) => {
            let source = |tensor| checkpoint.source(&family.backbone(spec, tensor));
            let sources = (source(BackboneTensor::Embed)?, source(BackboneTensor::Head)?);
            let (Some(a), Some(b)) = sources else { return Ok(embed) };
            spec.tied_head = equal(checkpoint, &a, &b, spec.vocab_size, stop)?;
            warnings.push(if spec.tied_head {
                Warning::EqualHead { tensor: head }
            } else {
                Warning::DifferentHead { tensor: head }
            });
            Ok(embed)
        }
    }
}

fn equal(
    checkpoint: &Checkpoint,
    a: &Source,
    b: &Source,
    rows: usize,
    stop: &AtomicBool,
) -> Result<bool, SculptError> {
    let (mut raw, mut left, mut right) = (Vec::new(), Vec::new(), Vec::new());
    for run in runs(rows, a.cols) {
        if stopped(stop) {
            return Err(SculptError::Stopped);
        }
        checkpoint.read_rows(a, run.clone(), &mut raw, &mut left)?;
        checkpoint.read_rows(b, run, &mut raw, &mut right)?;
        if left != right {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The model with fewer layers and experts.
fn cut(whole: &ModelSpec, settings: &Settings) -> Result<ModelSpec, SculptError> {
    let mut spec = whole.clone();
    let bad = |flag: &'static str, found: usize, expected: String| {
        Err(SculptError::Setting { flag, found: found.to_string(), expected })
    };
    if let Some(n) = settings.max_layers {
        spec.layers.truncate(n);
        spec.windows.truncate(n);
        spec.mixers.truncate(n);
        if !spec.mixers.contains(&MixerKind::GatedDelta) {
            (spec.mixers, spec.delta) = (Vec::new(), None);
        } else if !spec.mixers.contains(&MixerKind::Attention) {
            return bad("--max-layers", n, "leaves no layer with attention".to_owned());
        }
        if !spec.layers.contains(&FfnKind::Moe) {
            return bad("--max-layers", n, "leaves no layer with experts".to_owned());
        }
    }
    if let Some(n) = settings.max_experts.filter(|&n| n < spec.moe.n_experts)
        && spec.moe.groups.is_some()
    {
        return bad("--max-experts", n, "must be all: a token's experts come from groups of them".to_owned());
    }
    if let Some(n) = settings.max_experts {
        spec.moe.n_experts = spec.moe.n_experts.min(n);
        if spec.moe.top_k > spec.moe.n_experts {
            return bad("--max-experts", n, format!("must be at least top_k, {}", spec.moe.top_k));
        }
    }
    Ok(spec)
}

fn extra_tensors(checkpoint: &Checkpoint, family: &Family, spec: &ModelSpec) -> Option<Warning> {
    let mut known: HashSet<String> =
        BackboneTensor::all(spec).into_iter().map(|tensor| family.backbone_name(spec, tensor)).collect();
    known.insert(family.backbone_name(spec, BackboneTensor::Head));
    for layer in spec.moe_layers() {
        for expert in 0..spec.moe.n_experts as u32 {
            let key = ExpertKey { layer: layer as u32, expert };
            known.extend(Projection::ALL.map(|projection| family.expert(spec, key, projection).name));
        }
    }
    // Old checkpoints carry RoPE's frequencies; the reference computes them too.
    let mut extra: Vec<&str> = checkpoint
        .names()
        .filter(|name| !known.contains(*name) && !name.ends_with(".rotary_emb.inv_freq"))
        // Of what the config says that it is left out.
        .filter(|name| family.hybrid == Hybrid::None || !name.starts_with("model.visual."))
        .collect();
    extra.sort_unstable();
    (!extra.is_empty()).then(|| Warning::ExtraTensors {
        count: extra.len(),
        examples: extra.iter().take(EXAMPLES).map(|&name| name.to_owned()).collect(),
    })
}
