//! Synthetic vaults: a real model's shape filled with random weights, so that a machine can be measured
//! without a download. Bytes, reads and arithmetic are those of the model; the answers mean nothing.
//!
//! - Experts and the backbone's projections are random codes under one scale per tensor. Projections keep the
//!   deviation of their inputs, those that add to the residual stream are small: all layers together add
//!   about a tenth of the embedding, so hidden states stay near it through any number of layers.
//! - Routers and embedding decide which experts a stream of tokens chooses.
//! - A piece's random numbers depend on the seed and its place only, so the same arguments give the same
//!   bytes.
//!
//! | file | what |
//! | --- | --- |
//! | `synth/published.rs` | figures of published models |
//! | `synth/shape.rs` | the shape that a name or a config.json stands for |
//! | `synth/mixture.rs` | apart: a mixture of experts out of a dense model, with its trained weights |
//! | `synth/routing.rs` | from wanted statistics to the embedding's mixture |
//! | `synth/stream.rs` | tokens to measure with |
//! | `synth/text.rs` | another model's tokenizer and templates |
//! | `synth/random.rs` | random numbers and tensors |

mod mixture;
mod published;
mod random;
mod routing;
mod shape;
mod stream;
mod text;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sha2::{Digest as _, Sha256};
use smoe_format::backbone::LayerPart;
use smoe_format::expert_file::{Architecture, FileEntry, Manifest, Provenance};
use smoe_format::{
    BackboneTensor, Encoding, ExpertFile, LayerTable, ModelSpec, Projection, Table, file_name,
    record_crc_start,
};

pub use self::mixture::mixture_of_dense;
use self::random::{Random, constant, stream_of};
pub use self::routing::RoutingStats;
use self::routing::{Mixture, Router, TOKENS};
pub use self::shape::Shape;
pub use self::stream::token_stream;
use self::stream::{TOPICS, topic_width};
use self::text::Text;
use crate::encode::{Scratch, Writer};
use crate::error::SculptError;
use crate::partial::{JOURNAL, Partial};
use crate::plan::{BackboneLayout, runs};
use crate::progress::Progress;
use crate::sculpt::{self, Data, Outcome};
use crate::settings::{Recipe, Role, Settings};
use crate::vault::Existing;
use crate::workers;

/// Raised when the same arguments give other bytes than before.
const RECIPE: u32 = 1;
/// What all layers together add to the residual stream, as a share of the embedding.
const ADDED: f32 = 0.1;
/// Root mean square of `silu(x) * y` for normal x and y.
const SWIGLU: f32 = 0.6;
/// Deviation of router logits: the likeliest of a hundred experts has about a fifth of the weight.
const LOGITS: f32 = 1.5;
/// Bytes written between two waits for the disk: what may wait in the page cache.
const DURABLE: u64 = 256 << 20;

/// How to make a synthetic vault.
#[derive(Clone, Debug, PartialEq)]
pub struct SynthOptions {
    /// Encodings, threads, force; its limits on layers and experts have no meaning here.
    pub settings: Settings,
    /// Experts in MXFP4, in groups of 32, whatever bits and group the settings have.
    pub mxfp4: bool,
    /// Write the records of so many MoE layers; layers beyond them have the same ones, by turns.
    pub unique_layers: Option<usize>,
    /// Names the weights.
    pub seed: u64,
    /// What routing is to be like on a [`token_stream`].
    pub routing: RoutingStats,
    /// Which of it has to be met ([`RoutingStats::TOLERANCE`]), or the vault is refused; else it is as near as it can be.
    pub required: Required,
    /// A vault or a checkpoint whose tokenizer, templates and generation settings come along; the vocabulary is then
    /// its tokenizer's.
    pub text: Option<PathBuf>,
}

/// Statistics of routing that have to be met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Required {
    /// [`RoutingStats::overlap`] has to.
    pub overlap: bool,
    /// [`RoutingStats::skew`] has to.
    pub skew: bool,
}

impl Default for SynthOptions {
    fn default() -> Self {
        Self {
            // Random weights have nothing to lose: the plain rule, whatever the recipe says.
            settings: Settings { recipe: Recipe::Absmax, ..Settings::default() },
            mxfp4: false,
            unique_layers: None,
            seed: 0,
            routing: RoutingStats { overlap: 0.46, skew: 0.3 },
            required: Required::default(),
            text: None,
        }
    }
}

impl SynthOptions {
    fn expert_encoding(&self) -> Encoding {
        if self.mxfp4 {
            return Table::MXFP4.into();
        }
        self.settings.encoding(Role::Expert { layer: 0, projection: Projection::Gate }, Encoding::Bf16)
    }
}

/// What a synthetic vault's manifest says of its making.
#[derive(Clone, Debug, PartialEq)]
pub struct Synthetic {
    /// The shape's name.
    pub like: String,
    /// MoE layers with records of their own.
    pub unique_layers: usize,
    /// Seed of the weights.
    pub seed: u64,
    /// What was asked for.
    pub routing: RoutingStats,
    mixture: Mixture,
}

impl Synthetic {
    /// What routing is like on `tokens` tokens of a [`token_stream`], as far as drawing it tells. Fewer
    /// tokens see fewer topics: with about the same overlap, their skew is larger.
    #[must_use]
    pub fn predict(&self, spec: &ModelSpec, tokens: usize) -> RoutingStats {
        Router::of(spec).predict(self.mixture, tokens.max(1))
    }

    /// Tokens for which [`Self::routing`] was asked.
    pub const TOKENS: usize = TOKENS;

    /// Reads a manifest's `source`; `None` if the vault was made from a checkpoint.
    #[must_use]
    pub fn of(source: &Provenance) -> Option<Self> {
        if source.fingerprint != FINGERPRINT {
            return None;
        }
        let get = |key: &str| {
            source
                .settings
                .split(' ')
                .find_map(|word| word.split_once('=').filter(|(k, _)| *k == key))
                .map(|w| w.1)
        };
        Some(Self {
            like: get("like")?.to_owned(),
            unique_layers: get("unique-layers")?.parse().ok()?,
            seed: get("seed")?.parse().ok()?,
            routing: RoutingStats {
                overlap: get("overlap")?.parse().ok()?,
                skew: get("skew")?.parse().ok()?,
            },
            mixture: Mixture { a: get("a")?.parse().ok()?, b: get("b")?.parse().ok()? },
        })
    }
}

const FINGERPRINT: &str = "synthetic";

/// A vault that was made, or found made.
#[derive(Clone, Debug)]
pub struct Synthesis {
    /// Whether it was there already.
    pub outcome: Outcome,
    /// The model.
    pub spec: ModelSpec,
    /// MoE layers with records of their own.
    pub unique_layers: usize,
    /// Encoding of the experts, `q4/64` for example.
    pub expert_encoding: String,
    /// Bytes of its files.
    pub bytes: u64,
    /// Bytes of the backbone, which stays in memory.
    pub backbone_bytes: u64,
    /// Bytes of expert records that a token reads if none is in memory.
    pub token_expert_bytes: u64,
    /// Bytes of the backbone that a token reads: all but the embedding's other rows.
    pub token_backbone_bytes: u64,
    /// What routing will be like on 4096 tokens of a [`token_stream`], as far as drawing it tells.
    pub predicted: RoutingStats,
}

/// Makes a synthetic vault of `shape` at `vault`.
///
/// As with [`sculpt`](crate::sculpt()) it is made in `.NAME.partial/` and gets its name when it is complete;
/// unlike there, an end before that leaves nothing, and it is not read back: [`verify`](crate::verify())
/// does. Memory: some 10 MiB a worker, and the headers.
///
/// # Errors
/// [`SculptError::Stopped`] if `cancel` became true; a setting that cannot be; what the disk says.
pub fn synth(
    shape: &Shape,
    vault: &Path,
    options: &SynthOptions,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<Synthesis, SculptError> {
    let plan = Plan::new(shape, options)?;
    let vault = &sculpt::place(vault)?;
    let force = options.settings.force;
    if !force && sculpt::is_complete(vault, &plan.provenance)? {
        return Ok(plan.synthesis(Outcome::AlreadyComplete));
    }
    if let Existing::Other = Existing::at(vault)? {
        return Err(SculptError::NotAVault { path: vault.to_owned() });
    }
    sculpt::check_space(sculpt::existing_ancestor(vault), plan.bytes())?;
    let partial = Partial::lock(vault)?;
    partial.refuse_strangers()?;
    if !force && partial.file(JOURNAL).exists() {
        return Err(SculptError::OtherPartial {
            partial: partial.dir,
            what: "a checkpoint",
            found: "a sculpt's journal".to_owned(),
            expected: "a synthetic vault".to_owned(),
        });
    }
    partial.clear()?;
    let made =
        plan.write(&partial, progress, cancel).and_then(|()| sculpt::give_name(&partial, vault, progress));
    if let Err(error) = made {
        // What cannot be removed does not open, and the next run removes it.
        let _ = partial.clear();
        let _ = fs::remove_dir(&partial.dir);
        return Err(error);
    }
    Ok(plan.synthesis(Outcome::Created))
}

/// A piece of work.
#[derive(Clone, Copy)]
enum Item {
    Run {
        tensor: usize,
        run: usize,
    },
    /// A record, by its number.
    Record(usize),
}

/// Everything that is decided beforehand.
struct Plan {
    settings: Settings,
    /// Of the experts.
    encoding: Encoding,
    seed: u64,
    provenance: Provenance,
    spec: ModelSpec,
    mixture: Mixture,
    predicted: RoutingStats,
    unique_layers: usize,
    experts: ExpertFile,
    backbone: BackboneLayout<()>,
    text: Option<Text>,
}

impl Plan {
    fn new(shape: &Shape, options: &SynthOptions) -> Result<Self, SculptError> {
        let SynthOptions { settings, seed, routing, required, .. } = options;
        settings.validate()?;
        for (flag, value, low) in [("--overlap", routing.overlap, 0.0), ("--skew", routing.skew, 0.1)] {
            if !(low..=1.0).contains(&value) {
                let expected = format!("must be {low} to 1");
                return Err(SculptError::Setting { flag, found: value.to_string(), expected });
            }
        }
        let mut spec = shape.spec.clone();
        let text = options.text.as_deref().map(Text::read).transpose()?;
        if let Some(text) = &text {
            spec.vocab_size = text.vocab_size;
        }
        let n_moe = spec.moe_layers().count();
        let unique_layers = options.unique_layers.unwrap_or(n_moe).min(n_moe);
        if unique_layers == 0 {
            let expected = "must be above 0".to_owned();
            return Err(SculptError::Setting { flag: "--unique-layers", found: "0".to_owned(), expected });
        }
        spec.validate()?;
        let router = Router::of(&spec);
        let mixture = router.solve(*routing);
        let predicted = router.predict(mixture, TOKENS);
        let RoutingStats { overlap, skew } = *routing;
        for (required, flag, asked, nearest, other) in [
            (required.overlap, "--overlap", overlap, predicted.overlap, format!("a skew of {skew}")),
            (required.skew, "--skew", skew, predicted.skew, format!("an overlap of {overlap}")),
        ] {
            if required && (asked - nearest).abs() > RoutingStats::TOLERANCE {
                let expected =
                    format!("out of reach of this shape's router; with {other} the nearest is {nearest:.2}");
                return Err(SculptError::Setting { flag, found: asked.to_string(), expected });
            }
        }
        let described = serde_json::to_vec(&spec).unwrap_or_default();
        let encoding = options.expert_encoding();
        let digest: String =
            Sha256::digest(&described).iter().take(6).map(|byte| format!("{byte:02x}")).collect();
        let mut settings_line = format!(
            "recipe={RECIPE} like={} spec={digest} layers={} unique-layers={unique_layers} seed={seed} \
             experts={} backbone={} overlap={} skew={} a={:.5} b={:.5}",
            shape.name,
            spec.n_layers(),
            encoding,
            settings.backbone,
            routing.overlap,
            routing.skew,
            mixture.a,
            mixture.b,
        );
        if let Some(text) = &text {
            settings_line += &format!(" text={}", text.digest);
        }
        let provenance = Provenance { fingerprint: FINGERPRINT.to_owned(), settings: settings_line };
        let tensors = BackboneTensor::all(&spec).into_iter().map(|tensor| (tensor, (), Encoding::Bf16));
        let backbone = BackboneLayout::new(&spec, settings, tensors)?;
        let files = entries(backbone.file_len, 0, text.as_ref());
        let manifest = Manifest { spec: spec.clone(), source: provenance.clone(), files };
        let experts = ExpertFile::plan_shared(manifest, |_| [encoding; 3], unique_layers)?;
        Ok(Self {
            settings: settings.clone(),
            encoding,
            seed: *seed,
            provenance,
            spec,
            mixture,
            predicted,
            unique_layers,
            experts,
            backbone,
            text,
        })
    }

    fn bytes(&self) -> u64 {
        let text = self.text.iter().flat_map(|text| &text.files).map(|(_, bytes)| bytes.len() as u64);
        self.experts.file_len + self.backbone.file_len + text.sum::<u64>()
    }

    fn synthesis(&self, outcome: Outcome) -> Synthesis {
        let embedding = |tensor| tensor == BackboneTensor::Embed && !self.spec.tied_head;
        let read = self.backbone.tensors.iter().filter(|t| !embedding(t.tensor));
        let records = self.experts.layers.iter().map(|table| table.record_len as u64).sum::<u64>();
        Synthesis {
            outcome,
            spec: self.spec.clone(),
            unique_layers: self.unique_layers,
            expert_encoding: self.encoding.to_string(),
            bytes: self.bytes(),
            backbone_bytes: self.backbone.file_len,
            token_expert_bytes: records * self.spec.moe.top_k as u64,
            token_backbone_bytes: read.map(|t| t.len).sum(),
            predicted: self.predicted,
        }
    }

    fn write(
        &self,
        partial: &Partial,
        progress: &dyn Progress,
        cancel: &AtomicBool,
    ) -> Result<(), SculptError> {
        let data = Data::open(partial, self.experts.file_len, self.backbone.file_len)?;
        let mut items: Vec<Item> =
            self.backbone.runs().map(|(tensor, run)| Item::Run { tensor, run }).collect();
        let records = self.unique_layers * self.spec.moe.n_experts;
        items.extend((0..records).map(Item::Record));
        let crcs: Vec<OnceLock<u32>> = items.iter().map(|_| OnceLock::new()).collect();
        let embedding = Embedding::new(self);
        let workers = workers::count(self.settings.threads, 16 << 20);
        let written = AtomicU64::new(0);

        progress.phase("writing");
        progress.start(self.bytes());
        let done = workers::for_each(workers, items.len(), cancel, |i, scratch: &mut Scratch| {
            let (file, path) = match items[i] {
                Item::Run { .. } => &data.backbone,
                Item::Record(_) => &data.experts,
            };
            let (offset, len) = match items[i] {
                Item::Run { tensor, run } => self.backbone.place(tensor, run),
                Item::Record(record) => {
                    (self.experts.records[record].offset, self.experts.records[record].len)
                }
            };
            let mut writer = Writer { file, path, at: offset, crc: 0 };
            match items[i] {
                Item::Run { tensor, run } => {
                    self.fill_run(tensor, run, &embedding, scratch);
                    writer.put(&scratch.out)?;
                }
                Item::Record(record) => self.write_record(record, &mut writer, scratch, cancel)?,
            }
            debug_assert_eq!(writer.at, offset + len);
            _ = crcs[i].set(writer.crc);
            let before = written.fetch_add(len, Ordering::Relaxed);
            if before / DURABLE != (before + len) / DURABLE {
                file.sync_data().map_err(SculptError::io("write", path))?;
            }
            progress.advance(len);
            Ok(())
        })?;
        if !done {
            return Err(SculptError::Stopped);
        }
        let crcs: Vec<u32> = crcs.iter().map(|crc| *crc.get().expect("all items are done")).collect();
        let (runs, records) = crcs.split_at(items.len() - records);
        let mut backbone_crc = smoe_format::crc::crc32c(&self.backbone.header);
        for ((tensor, run), &crc) in self.backbone.runs().zip(runs) {
            let len = self.backbone.place(tensor, run).1;
            backbone_crc = smoe_format::crc::crc32c_combine(backbone_crc, crc, len as usize);
        }
        let mut experts = self.experts.clone();
        for (i, record) in experts.records.iter_mut().enumerate() {
            // The layers' keys differ, so do the checksums of the record that they share.
            let crc = records[i % records.len()];
            record.crc32c = Some(smoe_format::crc::crc32c_combine(
                record_crc_start(record.key),
                crc,
                record.len as usize,
            ));
        }
        if let Architecture::Manifest(manifest) = &mut experts.architecture {
            manifest.files = entries(self.backbone.file_len, backbone_crc, self.text.as_ref());
        }
        if let Some(text) = &self.text {
            text.write(&partial.dir, progress)?;
        }
        data.write_heads(&self.backbone.header, &experts)?;
        partial.sync()
    }

    /// Share of the embedding's deviation that one projection into the residual stream adds.
    fn added(&self) -> f32 {
        ADDED / ((2 * self.spec.n_layers()) as f32).sqrt()
    }

    /// Deviation of the weights of an expert's, a shared expert's or a dense layer's projection.
    fn deviation(&self, projection: Projection, width: usize) -> f32 {
        match projection {
            Projection::Gate | Projection::Up => 1.0 / (self.spec.d_model as f32).sqrt(),
            Projection::Down => self.added() / (SWIGLU * (width as f32).sqrt()),
        }
    }

    fn write_record(
        &self,
        record: usize,
        writer: &mut Writer<'_>,
        scratch: &mut Scratch,
        cancel: &AtomicBool,
    ) -> Result<(), SculptError> {
        let entry = &self.experts.records[record];
        let table: &LayerTable =
            self.experts.table(entry.key.layer).expect("every record's layer has a table");
        let mut random = Random::new(&[stream_of::EXPERT, self.seed, record as u64]);
        for (projection, t) in Projection::ALL.into_iter().zip(&table.tensors) {
            writer.zeros_to(entry.offset + t.offset as u64)?;
            let deviation = self.deviation(projection, self.spec.moe.d_expert);
            for rows in runs(t.rows, t.cols) {
                // A record may be large, and the disk slow.
                if workers::stopped(cancel) {
                    return Err(SculptError::Stopped);
                }
                let len = t.encoding.tensor_bytes(rows.len(), t.cols).expect("less than the tensor");
                scratch.out.resize(len, 0);
                random.rows(t.encoding, rows.len(), t.cols, deviation, &mut scratch.out);
                writer.put(&scratch.out)?;
            }
        }
        writer.zeros_to(entry.offset + entry.len)
    }

    /// Writes a run of a backbone tensor into `scratch.out`.
    fn fill_run(&self, tensor: usize, run: usize, embedding: &Embedding, scratch: &mut Scratch) {
        use LayerPart::{
            AttnNorm, Beta, Conv, Correction, Decay, DecayBias, DecayLog, DeltaNorm, Down, ExpertDownBias,
            ExpertGateBias, ExpertUpBias, FfnNorm, Gate, IndexK, IndexKNorm, IndexKNormBias, IndexQ,
            IndexWeights, K, KBias, KNorm, KUp, KvDown, KvDownNorm, O, OBias, OGate, Q, QBias, QDown,
            QDownNorm, QNorm, Router, RouterBias, SharedDown, SharedGate, SharedScale, SharedUp, Sinks, Up,
            V, VBias, VUp,
        };
        let t = &self.backbone.tensors[tensor];
        let rows = runs(t.rows, t.cols).nth(run).expect("items are made from runs");
        let mut random = Random::new(&[stream_of::BACKBONE, self.seed, tensor as u64, run as u64]);
        let len = t.encoding.tensor_bytes(rows.len(), t.cols).expect("less than the tensor");
        scratch.out.resize(len, 0);
        let deviation = match t.tensor {
            BackboneTensor::FinalNorm
            | BackboneTensor::Layer(
                _,
                AttnNorm | FfnNorm | QNorm | KNorm | QDownNorm | KvDownNorm | IndexKNorm | DeltaNorm,
            ) => {
                return constant(1.0, t.cols, &mut scratch.out);
            }
            BackboneTensor::Layer(
                _,
                QBias | KBias | VBias | OBias | IndexKNormBias | Sinks | RouterBias | Correction
                | SharedScale | ExpertGateBias | ExpertUpBias | ExpertDownBias | DecayLog | DecayBias,
            ) => return scratch.out.fill(0),
            BackboneTensor::Embed => {
                scratch.values.resize(rows.len() * t.cols, 0.0);
                for (token, row) in rows.zip(scratch.values.chunks_exact_mut(t.cols)) {
                    embedding.row(token, row);
                }
                return t.encoding.encode(&scratch.values, t.cols, &mut scratch.out);
            }
            BackboneTensor::Layer(_, Router) => {
                let deviation = LOGITS / (t.cols as f32).sqrt();
                scratch.values.clear();
                scratch.values.extend((0..rows.len() * t.cols).map(|_| deviation * random.weight()));
                return t.encoding.encode(&scratch.values, t.cols, &mut scratch.out);
            }
            BackboneTensor::Head
            | BackboneTensor::Layer(
                _,
                Q | K | V | QDown | KvDown | KUp | VUp | IndexQ | IndexK | IndexWeights | OGate | Beta
                | Decay | Conv,
            ) => 1.0 / (t.cols as f32).sqrt(),
            BackboneTensor::Layer(_, O) => self.added() / (t.cols as f32).sqrt(),
            BackboneTensor::Layer(_, Gate | SharedGate) => self.deviation(Projection::Gate, t.rows),
            BackboneTensor::Layer(_, Up | SharedUp) => self.deviation(Projection::Up, t.rows),
            BackboneTensor::Layer(_, Down | SharedDown) => self.deviation(Projection::Down, t.cols),
        };
        random.rows(t.encoding, rows.len(), t.cols, deviation, &mut scratch.out);
        if let (BackboneTensor::Head, Some(text)) = (t.tensor, &self.text) {
            text.mute(t.encoding, rows.start, rows.len(), t.cols, &mut scratch.out);
        }
    }
}

/// The files that a vault lists besides its experts.
fn entries(backbone_len: u64, backbone_crc: u32, text: Option<&Text>) -> Vec<FileEntry> {
    let mut entries = vec![FileEntry::new(file_name::BACKBONE, backbone_len, backbone_crc)];
    let side = text.iter().flat_map(|text| &text.files);
    entries.extend(
        side.map(|(name, bytes)| FileEntry::new(name, bytes.len() as u64, smoe_format::crc::crc32c(bytes))),
    );
    entries
}

/// The parts that the rows of the embedding share.
struct Embedding {
    seed: u64,
    topic_width: usize,
    /// `[TOPICS, d_model]`: the common part and the topic's.
    centres: Vec<f32>,
    /// Weight of a token's own part.
    own: f32,
}

impl Embedding {
    fn new(plan: &Plan) -> Self {
        let d = plan.spec.d_model;
        let Mixture { a, b } = plan.mixture;
        let [common, topical, own] = [a, b, 1.0 - a - b].map(|x| x.max(0.0).sqrt() as f32);
        let mut random = Random::new(&[stream_of::COMMON, plan.seed]);
        let centre: Vec<f32> = (0..d).map(|_| common * random.weight()).collect();
        let centres = (0..TOPICS as u64).flat_map(|topic| {
            let mut random = Random::new(&[stream_of::TOPIC, plan.seed, topic]);
            centre.iter().map(move |c| c + topical * random.weight())
        });
        Self {
            seed: plan.seed,
            topic_width: topic_width(plan.spec.vocab_size),
            centres: centres.collect(),
            own,
        }
    }

    fn row(&self, token: usize, row: &mut [f32]) {
        let mut random = Random::new(&[stream_of::TOKEN, self.seed, token as u64]);
        let centres = &self.centres[token / self.topic_width * row.len()..];
        for (value, centre) in row.iter_mut().zip(centres) {
            *value = centre + self.own * random.weight();
        }
    }
}
