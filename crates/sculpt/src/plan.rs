//! Everything about a sculpt that is known before the first weight is read: the model, where each tensor
//! comes from, how it is coded, and where its bytes go.

mod encodings;
mod layout;
mod sources;

use std::path::Path;
use std::sync::atomic::AtomicBool;

use smoe_format::backbone::LayerPart;
use smoe_format::crc::{crc32c, crc32c_append};
use smoe_format::expert_file::{FileEntry, Manifest, Provenance};
use smoe_format::{BackboneTensor, Encoding, ExpertFile, LayerTable, Projection, entropy, file_name};

use crate::calibrate::Statistics;
use crate::checkpoint::{Checkpoint, SideFile};
use crate::coded;
use crate::encode::StepSearch;
use crate::error::{SculptError, Warning};
use crate::files::WeightFiles;
use crate::progress::Progress;
use crate::settings::Settings;
use crate::tokenizer;
use crate::workers::{self, stopped};
use layout::run_rows;
pub(crate) use layout::{BackboneLayout, row_offset, runs};
pub(crate) use sources::Sources;

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
