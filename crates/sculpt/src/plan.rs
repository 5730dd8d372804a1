//! Everything about a sculpt that is known before the first weight is read: the model, where each tensor
//! comes from, how it is coded, and where its bytes go.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use smoe_format::backbone::{self, LayerPart};
use smoe_format::crc::{crc32c, crc32c_append};
use smoe_format::expert_file::{FileEntry, Manifest, Provenance};
use smoe_format::spec::{FfnKind, MixerKind, ModelSpec};
use smoe_format::tile::ROWS;
use smoe_format::{
    BackboneTensor, Encoding, ExpertFile, ExpertKey, LayerTable, Projection, Table, Zero, entropy, file_name,
};
use smoe_kernels::Kernels;

use crate::allocate::{Candidate, WIDTHS, allocate};
use crate::calibrate::Statistics;
use crate::checkpoint::{Checkpoint, SideFile};
use crate::coded;
use crate::config::{family_of, spec_from_config};
use crate::encode::{Scratch, StepSearch, encode_rows};
use crate::error::{SculptError, Warning};
use crate::family::{Family, Hybrid, Place};
use crate::files::WeightFiles;
use crate::progress::Progress;
use crate::quantise::fit_table;
use crate::settings::{Recipe, Role, Settings};
use crate::source::{Rows, Source};
use crate::tokenizer;
use crate::workers::{self, stopped};

/// Weights of a run of rows, a work item's reading unit: 4 MiB as `f32`.
const RUN_WEIGHTS: usize = 1 << 20;
/// Weights of each kind to which a table is fitted, from so many experts at most (EXP-QUANT-02).
const SAMPLED_WEIGHTS: usize = 1 << 18;
const SAMPLED_EXPERTS: usize = 256;
/// Experts of a layer by whose first rows the widths of a budget are chosen.
const MEASURED_EXPERTS: usize = 4;
/// Names shown of a longer list.
const EXAMPLES: usize = 5;
/// Data of the backbone file starts at a multiple of this, and so do its larger tensors: whole cache lines.
const BACKBONE_ALIGN: u64 = 64;

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

    /// How the experts of every MoE layer are coded.
    fn expert_encodings(
        &self,
        (checkpoint, files): (&Checkpoint, &dyn WeightFiles),
        settings: &Settings,
        stop: &AtomicBool,
    ) -> Result<BTreeMap<u32, [Encoding; 3]>, SculptError> {
        let Some(bpw) = settings.bpw else {
            return self.equal_encodings((checkpoint, files), settings, stop);
        };
        let widths = WIDTHS
            .map(|bits| {
                self.equal_encodings((checkpoint, files), &Settings { bits, ..settings.clone() }, stop)
            })
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?;
        let n_experts = self.spec.moe.n_experts as u64;
        let measured = self.measured_rows();
        checkpoint.expect_rows(files, &measured.concat())?;
        let mut candidates = Vec::new();
        let mut weights = 0;
        for layer in self.spec.moe_layers().map(|layer| layer as u32) {
            for (p, projection) in Projection::ALL.into_iter().enumerate() {
                let (rows, cols) = projection.shape(&self.spec);
                let encodings: Vec<(Encoding, u64)> = widths
                    .iter()
                    .map(|width| width[&layer][p])
                    .map(|e| (e, n_experts * e.tensor_bytes(rows, cols).unwrap_or(usize::MAX) as u64))
                    .collect();
                let errors =
                    self.errors(checkpoint, &measured[candidates.len()], &encodings, settings.recipe, stop)?;
                weights += n_experts * (rows * cols) as u64;
                candidates.push(Candidate { encodings, errors, projection });
            }
        }
        let chosen = allocate(&candidates, bpw.bytes(weights)).ok_or_else(|| {
            let least: u64 = candidates.iter().map(|c| c.encodings[0].1).sum();
            let expected =
                format!("must be at least {:.3} for this model", 8.0 * least as f64 / weights as f64 + 5e-4);
            SculptError::Setting { flag: "--bpw", found: bpw.to_string(), expected }
        })?;
        let mut chosen = candidates.iter().zip(chosen).map(|(c, i)| c.encodings[i].0);
        let mut encodings = BTreeMap::new();
        for layer in self.spec.moe_layers() {
            let kinds = [Encoding::F32; 3].map(|_| chosen.next().expect("three a layer"));
            encodings.insert(layer as u32, kinds);
        }
        Ok(encodings)
    }

    /// By which rows the widths of a budget are chosen: those of gate, up and down of each layer.
    fn measured_rows(&self) -> Vec<Vec<Rows>> {
        let mut all = Vec::new();
        for layer in self.spec.moe_layers() {
            let of_layer = || self.experts.iter().filter(|(key, _)| key.layer as usize == layer);
            let step = of_layer().count().div_ceil(MEASURED_EXPERTS).max(1);
            for p in 0..Projection::ALL.len() {
                let first = |(_, tensors): &(_, [Source; 3])| (tensors[p], 0..tensors[p].rows.min(ROWS));
                all.push(of_layer().step_by(step).map(first).collect());
            }
        }
        all
    }

    /// Squared error over power of a sample, under each encoding.
    fn errors(
        &self,
        checkpoint: &Checkpoint,
        sample: &[Rows],
        encodings: &[(Encoding, u64)],
        recipe: Recipe,
        stop: &AtomicBool,
    ) -> Result<Vec<f64>, SculptError> {
        let mut sums = vec![(0.0, 0.0); encodings.len()];
        let mut scratch = Scratch::default();
        for (source, rows) in sample {
            if stopped(stop) {
                return Err(SculptError::Stopped);
            }
            let mut row = vec![0.0; source.cols];
            let mut weights = Vec::new();
            checkpoint.read_rows(source, rows.clone(), &mut scratch.raw, &mut weights)?;
            for ((error, power), (encoding, _)) in sums.iter_mut().zip(encodings) {
                encode_rows(checkpoint, source, *encoding, recipe, rows.clone(), &mut scratch)?;
                for (i, weights) in weights.chunks_exact(source.cols).enumerate() {
                    encoding.decode_row(&scratch.out, source.cols, i, &mut row);
                    for (&w, &q) in weights.iter().zip(&row) {
                        *error += f64::from(w - q).powi(2);
                        *power += f64::from(w).powi(2);
                    }
                }
            }
        }
        Ok(sums.into_iter().map(|(error, power)| if power > 0.0 { error / power } else { 0.0 }).collect())
    }

    /// The same width everywhere.
    fn equal_encodings(
        &self,
        (checkpoint, files): (&Checkpoint, &dyn WeightFiles),
        settings: &Settings,
        stop: &AtomicBool,
    ) -> Result<BTreeMap<u32, [Encoding; 3]>, SculptError> {
        let mut encodings = BTreeMap::new();
        for layer in self.spec.moe_layers() {
            let layer = layer as u32;
            let of_layer = || self.experts.iter().filter(|(key, _)| key.layer == layer);
            let mut kinds = [Encoding::F32; 3];
            for (p, projection) in Projection::ALL.into_iter().enumerate() {
                let source = common_type(of_layer().map(|(_, tensors)| tensors[p].encoding));
                kinds[p] = settings.encoding(Role::Expert { layer, projection }, source);
            }
            encodings.insert(layer, kinds);
        }
        if settings.fits_levels() {
            // Codes that the checkpoint has are affine, or have their own table.
            let is_fitted =
                |kind| matches!(kind, Encoding::Uniform(uniform) if uniform.zero() == Zero::Symmetric);
            let fitted = [0, 1, 2].map(|p| encodings.values().any(|kinds| is_fitted(kinds[p])));
            let tables = self.fit_tables((checkpoint, files), fitted, settings, stop)?;
            for kinds in encodings.values_mut() {
                for (kind, table) in kinds.iter_mut().zip(tables).filter(|(kind, _)| is_fitted(**kind)) {
                    *kind = table.map_or(*kind, Encoding::Table);
                }
            }
        }
        Ok(encodings)
    }

    /// To which rows of one kind a table is fitted: by turns from different places, so that no layer is sampled by the
    /// same expert always.
    fn fitted_rows(&self, p: usize) -> Vec<Rows> {
        let step = self.experts.len().div_ceil(SAMPLED_EXPERTS).max(1);
        let sampled = self.experts.len().div_ceil(step).max(1);
        let rows = |(i, (_, tensors)): (usize, &(_, [Source; 3]))| {
            let source = tensors[p];
            let n = (SAMPLED_WEIGHTS / (sampled * source.cols.max(1))).clamp(1, source.rows);
            let start = (i * n) % (source.rows - n + 1);
            (source, start..start + n)
        };
        self.experts.iter().step_by(step).enumerate().map(rows).collect()
    }

    /// Fits those tables of gate, up and down that are `fitted`, to a sample of experts of all layers.
    fn fit_tables(
        &self,
        (checkpoint, files): (&Checkpoint, &dyn WeightFiles),
        fitted: [bool; 3],
        settings: &Settings,
        stop: &AtomicBool,
    ) -> Result<[Option<Table>; 3], SculptError> {
        let group = settings.group;
        let mut tables = [None; 3];
        let (mut raw, mut values) = (Vec::new(), Vec::new());
        let sampled = [0, 1, 2].map(|p| if fitted[p] { self.fitted_rows(p) } else { Vec::new() });
        checkpoint.expect_rows(files, &sampled.concat())?;
        for (p, (table, sampled)) in tables.iter_mut().zip(&sampled).enumerate().filter(|(p, _)| fitted[*p]) {
            let mut sample = Vec::new();
            // Narrower matrices have one group a row.
            let cols = self.experts.iter().map(|(_, tensors)| tensors[p].cols).min().unwrap_or(0);
            let width = group.min(cols / 16 * 16);
            for (source, rows) in sampled {
                if stopped(stop) {
                    return Err(SculptError::Stopped);
                }
                checkpoint.read_rows(source, rows.clone(), &mut raw, &mut values)?;
                for row in values.chunks_exact(source.cols) {
                    let pieces = row.chunks_exact(width.max(1)).filter(|_| width > 0);
                    sample.extend(pieces.filter(|piece| piece.iter().all(|w| w.is_finite())).flatten());
                }
            }
            *table = fit_table(Kernels::detect(), (settings.bits, group), width.max(16), &sample);
        }
        Ok(tables)
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

/// A backbone tensor with its place in the backbone file, and what its weights come from.
pub(crate) struct Placed<S = Source> {
    pub tensor: BackboneTensor,
    pub source: S,
    pub encoding: Encoding,
    pub rows: usize,
    pub cols: usize,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The backbone file, laid out.
pub(crate) struct BackboneLayout<S = Source> {
    /// Everything before the data.
    pub header: Vec<u8>,
    /// In file order.
    pub tensors: Vec<Placed<S>>,
    pub file_len: u64,
}

impl<S> BackboneLayout<S> {
    /// Lays out tensors whose sources have the given types.
    pub fn new(
        spec: &ModelSpec,
        settings: &Settings,
        sources: impl IntoIterator<Item = (BackboneTensor, S, Encoding)>,
    ) -> Result<Self, SculptError> {
        let mut tensors = Vec::new();
        for (tensor, source, source_type) in sources {
            let encoding = settings.encoding(Role::Backbone(tensor), source_type);
            let (rows, cols) = tensor.shape(spec);
            let len = encoding.tensor_bytes(rows, cols).ok_or_else(|| SculptError::Config {
                key: tensor.to_string(),
                found: format!("{rows}x{cols}"),
                expected: "a tensor of a size that fits".to_owned(),
            })? as u64;
            tensors.push(Placed { tensor, source, encoding, rows, cols, offset: 0, len });
        }
        // Whole cache lines first, so that no odd length moves them off their alignment.
        tensors.sort_by_cached_key(|t| (!t.len.is_multiple_of(BACKBONE_ALIGN), t.tensor.to_string()));
        let mut offset = 0;
        let mut labels = BTreeMap::new();
        let mut entries = serde_json::Map::new();
        for t in &mut tensors {
            let (dtype, shape) = match t.encoding {
                Encoding::F32 => ("F32", None),
                Encoding::F16 => ("F16", None),
                Encoding::Bf16 => ("BF16", None),
                Encoding::Uniform(_) | Encoding::Table(_) => {
                    labels.insert(t.tensor.to_string(), backbone::label(t.encoding, t.rows, t.cols));
                    ("U8", Some(vec![t.len]))
                }
            };
            let matrix = || vec![t.rows as u64, t.cols as u64];
            let shape =
                shape.unwrap_or_else(|| if t.tensor.is_vector() { vec![t.cols as u64] } else { matrix() });
            let entry = serde_json::json!({
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [offset, offset + t.len],
            });
            entries.insert(t.tensor.to_string(), entry);
            t.offset = offset;
            offset += t.len;
        }
        let mut json = serde_json::Map::new();
        if !labels.is_empty() {
            json.insert("__metadata__".to_owned(), serde_json::json!(labels));
        }
        json.append(&mut entries);
        let mut text = serde_json::Value::Object(json).to_string();
        // The format allows spaces behind the JSON.
        while !(8 + text.len() as u64).is_multiple_of(BACKBONE_ALIGN) {
            text.push(' ');
        }
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.extend_from_slice(text.as_bytes());
        let data = header.len() as u64;
        for t in &mut tensors {
            t.offset += data;
        }
        Ok(Self { header, tensors, file_len: data + offset })
    }

    /// Number and run of every piece of work, in file order.
    pub fn runs(&self) -> impl Iterator<Item = (usize, usize)> {
        let tensors = self.tensors.iter().enumerate();
        tensors.flat_map(|(i, placed)| (0..runs(placed.rows, placed.cols).len()).map(move |run| (i, run)))
    }

    /// Where a run of rows is: first byte and length.
    pub fn place(&self, tensor: usize, run: usize) -> (u64, u64) {
        let t = &self.tensors[tensor];
        let step = run_rows(t.cols);
        let start = row_offset(t.encoding, run * step, t.cols);
        let end =
            if (run + 1) * step >= t.rows { t.len } else { row_offset(t.encoding, (run + 1) * step, t.cols) };
        (t.offset + start, end - start)
    }
}

/// Cuts a tensor into runs of whole blocks of rows.
pub(crate) fn runs(
    rows: usize,
    cols: usize,
) -> impl ExactSizeIterator<Item = std::ops::Range<usize>> + Clone {
    let step = run_rows(cols);
    (0..rows.div_ceil(step)).map(move |i| i * step..((i + 1) * step).min(rows))
}

fn run_rows(cols: usize) -> usize {
    (RUN_WEIGHTS / (ROWS * cols.max(1))).max(1) * ROWS
}

/// First byte of row `row`, a multiple of 32, within its tensor.
pub(crate) fn row_offset(encoding: Encoding, row: usize, cols: usize) -> u64 {
    encoding.tensor_bytes(row, cols).expect("the whole tensor's length did not overflow") as u64
}

/// Bytes of a worker's buffers: the bytes, weights and codes of the longest run; of coded records, those.
pub(crate) fn worker_bytes(plan: &Plan) -> usize {
    let backbone = plan.backbone.tensors.iter().map(|t| t.cols);
    let experts = plan.experts.layers.iter().flat_map(|layer| layer.tensors.map(|t| t.cols));
    let weights = backbone.chain(experts).map(|cols| run_rows(cols) * cols).max().unwrap_or(0);
    let records = match plan.experts.coded {
        // A record whole, coded, and decoded again.
        true => plan.experts.layers.iter().map(|layer| 3 * layer.record_len).max().unwrap_or(0),
        false => 0,
    };
    let fed =
        plan.statistics.as_ref().map_or(0, |statistics| feedback_bytes(statistics, &plan.experts.layers));
    12 * weights + records + fed
}

/// What a worker needs besides for error feedback: whole matrices of an expert, two Hessians and their factors.
pub(crate) fn feedback_bytes(statistics: &Statistics, layers: &[LayerTable]) -> usize {
    let tensors = layers.iter().flat_map(|layer| &layer.tensors);
    3 * statistics.bytes() as usize + 24 * tensors.map(|t| t.rows * t.cols).max().unwrap_or(0)
}

/// The type that holds all weights of all `sources` without loss.
fn common_type(sources: impl Iterator<Item = Encoding>) -> Encoding {
    let mut common = None;
    for encoding in sources {
        match common {
            None => common = Some(encoding),
            Some(other) if other == encoding => {}
            // Neither half holds the other.
            Some(_) => return Encoding::F32,
        }
    }
    common.unwrap_or(Encoding::F32)
}

/// Everything that is decided beforehand.
pub(crate) struct Plan {
    pub sources: Sources,
    pub provenance: Provenance,
    /// Checksums still zero.
    pub experts: ExpertFile,
    pub backbone: BackboneLayout,
    pub side_files: Vec<SideFile>,
    /// Width of a row's cells in its mean magnitudes, where experts' codes are those of one step a row: known once it is
    /// [found](Self::find_step). Their records' lengths in `experts` are then what is to be expected.
    pub step: Option<f32>,
    /// With which experts' errors are fed back.
    pub statistics: Option<Statistics>,
}

/// Bytes of records of so many hundredths of a bit a weight.
fn estimated_lengths(experts: &ExpertFile, bpw: u16) -> Vec<u64> {
    let lengths = experts.records.iter().map(|record| {
        let table = experts.table(record.key.layer).expect("every record's layer has a table");
        let weights: usize = table.tensors.iter().map(|t| t.rows * t.cols).sum();
        (weights as u64 * u64::from(bpw)).div_ceil(800) + entropy::RECORD_HEAD_BYTES as u64
    });
    lengths.collect()
}

impl Plan {
    /// Of files that arrive, rows that decide how weights are coded are asked for one by one.
    pub fn new(
        (checkpoint, files): (&Checkpoint, &dyn WeightFiles),
        settings: &Settings,
        stop: &AtomicBool,
    ) -> Result<Self, SculptError> {
        settings.validate()?;
        let statistics = settings.calibration.as_deref().map(Statistics::open).transpose()?;
        let mut sources = Sources::find(checkpoint, settings, stop)?;
        let provenance = Provenance {
            fingerprint: checkpoint.fingerprint()?,
            settings: settings.canonical(statistics.as_ref()),
        };
        let tensors = sources.backbone.iter().map(|&(tensor, source)| (tensor, source, source.encoding));
        let backbone = BackboneLayout::new(&sources.spec, settings, tensors)?;
        let side_files = checkpoint.side_files()?;
        sources.warnings.extend(tokenizer::check(&side_files, sources.spec.vocab_size));
        let more = "additional_chat_templates";
        if checkpoint.tokenizer_dir().is_some_and(|dir| dir.join(more).is_dir()) {
            sources.warnings.push(Warning::LeftOut { name: more.to_owned() });
        }
        let mut listed = vec![FileEntry::new(file_name::BACKBONE, backbone.file_len, 0)];
        listed.extend(side_files.iter().map(|side| FileEntry::new(side.name, side.len(), 0)));
        let manifest = Manifest { spec: sources.spec.clone(), source: provenance.clone(), files: listed };
        if let Some(statistics) = &statistics {
            statistics.require(&provenance.fingerprint, &sources.spec)?;
        }
        let mut encodings = sources.expert_encodings((checkpoint, files), settings, stop)?;
        if settings.coded_bpw.is_some() {
            for (layer, kinds) in &mut encodings {
                for (p, projection) in Projection::ALL.into_iter().enumerate() {
                    let of_layer = sources.experts.iter().filter(|(key, _)| key.layer == *layer);
                    let source = common_type(of_layer.map(|(_, tensors)| tensors[p].encoding));
                    let row = coded::row_encoding(settings.group, projection.shape(&sources.spec).1);
                    // A source that is kept has an encoding of its own.
                    kinds[p] = row.filter(|_| kinds[p] != source).map_or(kinds[p], Encoding::Uniform);
                }
            }
        }
        let mut experts = ExpertFile::plan(manifest, |layer| encodings[&layer])?;
        if let Some(bpw) = settings.coded_bpw {
            experts.set_coded(&estimated_lengths(&experts, bpw));
        } else if settings.entropy {
            let used: Vec<u64> = experts.records.iter().map(|record| record.used).collect();
            experts.set_coded(&used);
        }
        Ok(Self { sources, provenance, experts, backbone, side_files, step: None, statistics })
    }

    /// A checksum of everything that weights decide: how every layer's experts are coded, with the levels, and the rows by
    /// which a step is found.
    pub fn decided(
        &self,
        (checkpoint, files): (&Checkpoint, &dyn WeightFiles),
        settings: &Settings,
        stop: &AtomicBool,
    ) -> Result<u32, SculptError> {
        let mut crc = crc32c(format!("{:?}", self.experts.layers).as_bytes());
        if settings.coded_bpw.is_none() {
            return Ok(crc);
        }
        let rows = self.step_search(checkpoint, settings, &(), stop).rows();
        checkpoint.expect_rows(files, &rows)?;
        let (mut raw, mut weights, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        for (source, rows) in rows {
            // A matrix may be whole.
            for run in runs(rows.len(), source.cols) {
                if stopped(stop) {
                    return Err(SculptError::Stopped);
                }
                let run = rows.start + run.start..rows.start + run.end;
                checkpoint.read_rows(&source, run, &mut raw, &mut weights)?;
                bytes.clear();
                bytes.extend(weights.iter().flat_map(|w| w.to_le_bytes()));
                crc = crc32c_append(crc, &bytes);
            }
        }
        Ok(crc)
    }

    fn step_search<'a>(
        &'a self,
        checkpoint: &'a Checkpoint,
        settings: &Settings,
        progress: &'a dyn Progress,
        stop: &'a AtomicBool,
    ) -> StepSearch<'a> {
        StepSearch {
            checkpoint,
            spec: &self.sources.spec,
            experts: &self.sources.experts,
            layers: &self.experts.layers,
            statistics: self.statistics.as_ref(),
            workers: workers::count(settings.threads, worker_bytes(self)),
            progress,
            stop,
        }
    }

    /// Tells `files` by which rows a step will be found, if one is to be.
    pub fn expect_step(
        &self,
        (checkpoint, files): (&Checkpoint, &dyn WeightFiles),
        settings: &Settings,
        stop: &AtomicBool,
    ) -> Result<(), SculptError> {
        if settings.coded_bpw.is_none() {
            return Ok(());
        }
        checkpoint.expect_rows(files, &self.step_search(checkpoint, settings, &(), stop).rows())
    }

    /// Finds the step of the experts' codes, where they are those of one, unless earlier work did: it must go on with
    /// the same.
    pub fn find_step(
        &mut self,
        (checkpoint, files): (&Checkpoint, &dyn WeightFiles),
        settings: &Settings,
        earlier: Option<f32>,
        progress: &dyn Progress,
        stop: &AtomicBool,
    ) -> Result<(), SculptError> {
        let Some(bpw) = settings.coded_bpw else { return Ok(()) };
        let search = self.step_search(checkpoint, settings, progress, stop);
        let find = || {
            checkpoint.expect_rows(files, &search.rows())?;
            search.find(f64::from(bpw) / 100.0)
        };
        self.step = Some(earlier.map_or_else(find, Ok)?);
        Ok(())
    }

    /// Encodings of gate, up and down, layers that follow each other with the same ones in one line.
    pub fn widths(&self) -> Vec<String> {
        let mut lines: Vec<(u32, u32, [Encoding; 3])> = Vec::new();
        for table in &self.experts.layers {
            let kinds = table.tensors.map(|t| t.encoding);
            match lines.last_mut() {
                Some((_, last, same)) if *same == kinds => *last = table.layer,
                _ => lines.push((table.layer, table.layer, kinds)),
            }
        }
        let line = |(first, last, [gate, up, down]): &(u32, u32, [Encoding; 3])| {
            let layers =
                if first == last { format!("layer {first}") } else { format!("layers {first}-{last}") };
            format!("{layers}: gate {gate}, up {up}, down {down}")
        };
        lines.iter().map(line).collect()
    }

    /// Bytes of the vault.
    pub fn total_bytes(&self) -> u64 {
        self.experts.file_len
            + self.backbone.file_len
            + self.side_files.iter().map(SideFile::len).sum::<u64>()
    }

    /// Every piece of work, in the order in which it is done.
    pub fn items(&self) -> Vec<Item> {
        let mut items: Vec<Item> =
            self.backbone.runs().map(|(tensor, run)| Item::Run { tensor, run }).collect();
        items.extend((0..self.experts.records.len()).map(Item::Expert));
        items
    }

    /// Bytes of expert records that a token reads if none is in memory.
    pub fn token_expert_bytes(&self) -> u64 {
        let records = &self.experts.records;
        let bytes: u64 = records.iter().map(|record| record.len).sum();
        let per_layer = bytes * self.sources.spec.moe.top_k as u64;
        per_layer / self.sources.spec.moe.n_experts.max(1) as u64
    }

    /// Bytes of an item once it is in memory: what progress counts.
    pub fn bytes(&self, item: Item) -> u64 {
        match item {
            Item::Expert(i) => {
                let table = self.experts.table(self.experts.records[i].key.layer);
                table.expect("every record's layer has a table").record_len as u64
            }
            Item::Run { .. } => self.place(item).1,
        }
    }

    /// Where an item's bytes are: first byte and length, in the expert file or the backbone file.
    pub fn place(&self, item: Item) -> (u64, u64) {
        match item {
            Item::Expert(i) => (self.experts.records[i].offset, self.experts.records[i].len),
            Item::Run { tensor, run } => self.backbone.place(tensor, run),
        }
    }

    /// An item's name in the journal.
    pub fn item_name(&self, item: Item) -> String {
        match item {
            Item::Expert(i) => {
                let key = self.experts.records[i].key;
                format!("expert {} {}", key.layer, key.expert)
            }
            Item::Run { tensor, run } => format!("tensor {} {run}", self.backbone.tensors[tensor].tensor),
        }
    }
}

/// A piece of work: what a worker takes, and what the journal remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    /// A record, by its number.
    Expert(usize),
    /// A run of rows of a backbone tensor, both by number.
    Run { tensor: usize, run: usize },
}

/// A backbone tensor's kind: its name without the layer.
pub(crate) fn kind_name(tensor: BackboneTensor) -> String {
    let name = tensor.to_string();
    match tensor {
        BackboneTensor::Layer(layer, part) => {
            let kind = name.trim_start_matches(&format!("layers.{layer}.")).to_owned();
            if matches!(part, LayerPart::Gate | LayerPart::Up | LayerPart::Down) {
                format!("dense {kind}")
            } else {
                kind
            }
        }
        _ => name,
    }
}

/// The directory in which a vault's unfinished work and finished self lie.
pub(crate) fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
