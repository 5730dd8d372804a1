//! What coding cost: a vault's weights against the checkpoint's, kind by kind.
//!
//! Both vaults of ours and the original's pairs are read, so that two encoders can be compared by the errors
//! they leave or code by code. Pieces are measured in any order and summed in one: the figures do not depend
//! on the number of threads.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

use sha2::{Digest as _, Sha256};
use smoe_format::entropy::decode_record;
use smoe_format::spec::ModelSpec;
use smoe_format::tile::{self, ROWS};
use smoe_format::{
    Backbone, BackboneTensor, Encoding, ExpertFile, ExpertKey, Projection, Uniform, file_name, original,
};

use crate::calibrate::Statistics;
use crate::checkpoint::Checkpoint;
use crate::encode::{Loss, Scratch, StepSearch, encode_expert, encode_expert_rows, may_feed_back};
use crate::error::SculptError;
use crate::plan::{Sources, feedback_bytes, kind_name, row_offset, runs};
use crate::progress::Progress;
use crate::quantise::may_scale;
use crate::settings::{CALIBRATION, CHANNELS, Recipe, Settings};
use crate::source::Source;
use crate::vault::{read_backbone, read_head};
use crate::verify::{original_backbone, original_spec};
use crate::workers;

/// The error of one kind of tensor over all layers and experts.
#[derive(Clone, Debug, PartialEq)]
pub struct KindError {
    /// `expert gate`, `q`, `embed`, ...
    pub kind: String,
    /// How it is kept; several labels if layers differ.
    pub encoding: String,
    /// Weights compared.
    pub weights: u64,
    /// Root of the mean squared error.
    pub rmse: f64,
    /// Ratio of the weights' power to the error's, in decibels; infinite if there is no error.
    pub snr_db: f64,
    /// The largest error.
    pub max_error: f64,
    /// A hash of all codes and scales in their order; equal for equal encodings of equal shapes, whatever file
    /// they are in.
    pub digest: u64,
}

/// Codes and scales of one kind of tensor, against those of our own encoder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CodeCounts {
    /// `expert gate`, `q`, `embed`, ...
    pub kind: String,
    /// Codes (or, in a float tensor, weights) that are the same.
    pub equal_codes: u64,
    /// Those that are not.
    pub different_codes: u64,
    /// Scales and minima that are the same.
    pub equal_scales: u64,
    /// Those that are not.
    pub different_scales: u64,
}

/// Measures the error that `vault` (a directory, or an original `.smoe`) makes of `checkpoint`.
///
/// # Errors
/// If either does not read, they are of different models, or the caller wants to stop.
pub fn measure_error(
    checkpoint: &Path,
    vault: &Path,
    threads: Option<usize>,
    progress: &dyn Progress,
    stop: &AtomicBool,
) -> Result<Vec<KindError>, SculptError> {
    let pair = Pair::open(checkpoint, vault, stop)?;
    let sums = pair.walk(threads, progress, stop, |piece, buffers| {
        let mut sums = Sums { encodings: vec![piece.encoding], ..Sums::default() };
        let Buffers { scratch, stored, row } = buffers;
        pair.checkpoint.read_rows(
            &piece.source,
            piece.rows.clone(),
            &mut scratch.raw,
            &mut scratch.values,
        )?;
        let values = std::mem::take(&mut scratch.values);
        let channels = pair.channels(piece, scratch)?;
        scratch.values = values;
        row.resize(piece.cols, 0.0);
        for (i, weights) in scratch.values.chunks_exact(piece.cols).enumerate() {
            piece.encoding.decode_row(stored, piece.cols, i, row);
            match &channels {
                Channels::AsTheyWere => {}
                Channels::Rows => scale_back(weights, row),
                Channels::Columns(scales) => row.iter_mut().zip(scales).for_each(|(q, s)| *q /= s),
            }
            for (&w, &q) in weights.iter().zip(row.iter()) {
                let (w, q) = (f64::from(w), f64::from(q));
                sums.power += w * w;
                sums.error += (w - q) * (w - q);
                sums.max = sums.max.max((w - q).abs());
            }
        }
        sums.weights = scratch.values.len() as u64;
        sums.hash.update(Sha256::digest(stored));
        Ok(sums)
    })?;
    Ok(sums.into_iter().map(|(kind, sums)| sums.finish(kind)).collect())
}

/// Encodes `checkpoint` anew with the encodings that `vault` (a directory, or an original `.smoe`) has, and
/// counts codes and scales that are the same and that are not. A vault that was made with a calibration needs it.
///
/// # Errors
/// As [`measure_error`].
pub fn compare_codes(
    checkpoint: &Path,
    vault: &Path,
    calibration: Option<&Path>,
    threads: Option<usize>,
    progress: &dyn Progress,
    stop: &AtomicBool,
) -> Result<Vec<CodeCounts>, SculptError> {
    let pair = Pair::open(checkpoint, vault, stop)?;
    let statistics = pair.statistics(calibration, vault)?;
    let step = pair.step(statistics.as_ref(), threads, progress, stop)?;
    let counts = pair.walk(threads, progress, stop, |piece, buffers| {
        let Buffers { scratch, stored, .. } = buffers;
        let fed = statistics.as_ref().zip(pair.expert(piece));
        if let Some((statistics, (record, bytes))) = fed
            && let (key, sources) = &pair.sources[record]
            && let Some(table) = pair.experts.0.table(key.layer)
            && may_feed_back(sources, table)
            && let Some(tiles) = piece.encoding.tiles()
        {
            let fed = encode_expert(
                &pair.checkpoint,
                &pair.spec,
                statistics,
                step,
                (*key, sources),
                table,
                scratch,
            )?;
            let (entry, (_, out)) = table
                .tensors
                .iter()
                .zip(&fed)
                .rfind(|(entry, _)| entry.offset <= bytes.start)
                .expect("the first begins at 0");
            return Ok(compare_tiles(
                tiles,
                piece,
                stored,
                &out[bytes.start - entry.offset..][..bytes.len()],
            ));
        }
        // A weight that cannot be coded has no code to compare: every code of the run then differs.
        let step = if let Place::Expert { .. } = piece.place { step } else { None };
        let rows = piece.rows.clone();
        let loss = encode_expert_rows(
            &pair.checkpoint,
            &piece.source,
            piece.encoding,
            pair.recipe,
            step,
            rows,
            scratch,
        )?;
        if let Loss::Beyond(_) = loss {
            scratch.out.clear();
            scratch.out.extend(stored.iter().map(|byte| !byte));
        }
        Ok(match (piece.encoding.tiles(), piece.encoding) {
            (Some(tiles), _) => compare_tiles(tiles, piece, stored, &scratch.out),
            (None, Encoding::F32) => compare_words::<4>(stored, &scratch.out),
            (None, _) => compare_words::<2>(stored, &scratch.out),
        })
    })?;
    Ok(counts.into_iter().map(|(kind, counts)| CodeCounts { kind, ..counts }).collect())
}

fn compare_words<const N: usize>(a: &[u8], b: &[u8]) -> CodeCounts {
    let (a, b) = (a.as_chunks::<N>().0, b.as_chunks::<N>().0);
    let equal = a.iter().zip(b).filter(|(a, b)| a == b).count();
    CodeCounts {
        equal_codes: equal as u64,
        different_codes: (a.len() - equal) as u64,
        ..CodeCounts::default()
    }
}

fn compare_tiles(uniform: Uniform, piece: &Piece, a: &[u8], b: &[u8]) -> CodeCounts {
    let mut counts = CodeCounts::default();
    let (size, group, groups) = (uniform.tile_bytes(), uniform.group(), uniform.groups(piece.cols));
    for (i, (a, b)) in a.chunks_exact(size).zip(b.chunks_exact(size)).enumerate() {
        let (block, g) = (i / groups, i % groups);
        let rows = (piece.rows.len() - block * ROWS).min(ROWS);
        let cols = (piece.cols - g * group).min(group);
        for row in 0..rows {
            for col in 0..cols {
                let code = |t: &[u8]| tile::code(t, uniform.bits(), group, row, col);
                if code(a) == code(b) {
                    counts.equal_codes += 1;
                } else {
                    counts.different_codes += 1;
                }
            }
            // By bits, so that NaNs compare.
            let scale = |t: &[u8]| {
                let (scale, minimum) = uniform.scale(t, row);
                (scale.to_bits(), minimum.to_bits())
            };
            if scale(a) == scale(b) {
                counts.equal_scales += 1;
            } else {
                counts.different_scales += 1;
            }
        }
    }
    counts
}

/// What is summed over pieces of a kind.
trait Add {
    fn add(&mut self, other: Self);
}

impl Add for CodeCounts {
    fn add(&mut self, other: Self) {
        self.equal_codes += other.equal_codes;
        self.different_codes += other.different_codes;
        self.equal_scales += other.equal_scales;
        self.different_scales += other.different_scales;
    }
}

#[derive(Default)]
struct Sums {
    encodings: Vec<Encoding>,
    weights: u64,
    power: f64,
    error: f64,
    max: f64,
    hash: Sha256,
}

impl Add for Sums {
    fn add(&mut self, other: Self) {
        for encoding in other.encodings {
            if !self.encodings.contains(&encoding) {
                self.encodings.push(encoding);
            }
        }
        self.weights += other.weights;
        self.power += other.power;
        self.error += other.error;
        self.max = self.max.max(other.max);
        self.hash.update(other.hash.finalize());
    }
}

impl Sums {
    fn finish(self, kind: String) -> KindError {
        let digest = self.hash.finalize();
        let mut first = [0; 8];
        first.copy_from_slice(&digest[..8]);
        KindError {
            kind,
            encoding: self.encodings.iter().map(Encoding::to_string).collect::<Vec<_>>().join(" "),
            weights: self.weights,
            rmse: (self.error / self.weights.max(1) as f64).sqrt(),
            snr_db: if self.error > 0.0 { 10.0 * (self.power / self.error).log10() } else { f64::INFINITY },
            max_error: self.max,
            digest: u64::from_be_bytes(first),
        }
    }
}

/// What became of the channels of an expert in the matrix of a piece: those of one that was calibrated for an entropy
/// coder are scaled, up's rows by what down's columns are not ([`crate::quantise::Expert::scale`]).
enum Channels {
    AsTheyWere,
    Rows,
    Columns(Vec<f32>),
}

/// What a row was divided by, as far as its codes tell; 1 if they do not.
fn divisor(weights: &[f32], decoded: &[f32]) -> f32 {
    let sum = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let divisor = (sum(weights, weights) / sum(weights, decoded)) as f32;
    if divisor.is_finite() && divisor > 0.0 { divisor } else { 1.0 }
}

fn scale_back(weights: &[f32], decoded: &mut [f32]) {
    let divisor = divisor(weights, decoded);
    decoded.iter_mut().for_each(|q| *q *= divisor);
}

/// A run of rows of a tensor.
struct Piece {
    kind: String,
    encoding: Encoding,
    source: Source,
    rows: Range<usize>,
    cols: usize,
    place: Place,
}

/// Where the stored bytes of a run are.
enum Place {
    Backbone {
        offset: u64,
        len: usize,
    },
    /// In record `record`: bytes of the record.
    Expert {
        record: usize,
        projection: Projection,
        bytes: Range<usize>,
    },
}

#[derive(Default)]
struct Buffers {
    scratch: Scratch,
    /// The stored bytes of the run, in tiles if coded.
    stored: Vec<u8>,
    row: Vec<f32>,
}

/// A checkpoint and a vault of the same model.
struct Pair {
    checkpoint: Checkpoint,
    experts: (ExpertFile, File, PathBuf),
    backbone: (File, PathBuf),
    /// How the vault says that its scales were found.
    recipe: Recipe,
    /// All that it says of its making.
    made: Option<String>,
    spec: ModelSpec,
    /// Of each record.
    sources: Vec<(ExpertKey, [Source; 3])>,
    pieces: Vec<Piece>,
}

impl Pair {
    fn open(checkpoint: &Path, vault: &Path, stop: &AtomicBool) -> Result<Self, SculptError> {
        let (experts_path, backbone_path) = if vault.is_dir() {
            (vault.join(file_name::EXPERTS), vault.join(file_name::BACKBONE))
        } else if vault.file_name().is_some_and(|name| name == file_name::EXPERTS) {
            (vault.to_owned(), vault.with_file_name(file_name::BACKBONE))
        } else {
            (vault.to_owned(), original_backbone(vault))
        };
        let (experts, experts_file) = read_head(&experts_path)?;
        let (backbone, backbone_file) = read_backbone(&backbone_path)?;
        let (spec, name_of): (ModelSpec, fn(BackboneTensor) -> String) = match experts.manifest() {
            Some(manifest) => (manifest.spec.clone(), |tensor| tensor.to_string()),
            None => (original_spec(&experts, &backbone, &experts_path)?, original::checkpoint_name),
        };
        let checkpoint = Checkpoint::open(checkpoint)?;
        // The vault may be cut.
        let settings = Settings {
            max_layers: Some(spec.layers.len()),
            max_experts: Some(spec.moe.n_experts),
            ..Settings::default()
        };
        let sources = Sources::find(&checkpoint, &settings, stop)?;
        let shape = |spec: &ModelSpec| {
            (spec.d_model, spec.vocab_size, spec.layers.clone(), spec.moe.n_experts, spec.moe.d_expert)
        };
        if shape(&spec) != shape(&sources.spec) || spec.attention != sources.spec.attention {
            return Err(SculptError::Incomparable {
                path: vault.to_owned(),
                what: "it is of another model than the checkpoint".to_owned(),
            });
        }
        let pieces = pieces(&sources, &experts, &backbone, name_of, &backbone_path)?;
        let made = experts.manifest().map(|manifest| manifest.source.settings.clone());
        let recipe = Recipe::of(experts.manifest().map(|manifest| manifest.source.settings.as_str()));
        Ok(Self {
            checkpoint,
            recipe,
            made,
            spec: sources.spec,
            sources: sources.experts,
            experts: (experts, experts_file, experts_path),
            backbone: (backbone_file, backbone_path),
            pieces,
        })
    }

    /// The step of the experts' codes, if they are those of one step a row.
    fn step(
        &self,
        statistics: Option<&Statistics>,
        threads: Option<usize>,
        progress: &dyn Progress,
        stop: &AtomicBool,
    ) -> Result<Option<f32>, SculptError> {
        let experts = &self.experts.0;
        let bpw = self.made.as_deref().and_then(Settings::coded_bpw_of).filter(|_| experts.coded);
        let fed = statistics.map_or(0, |statistics| feedback_bytes(statistics, &experts.layers));
        let search = StepSearch {
            checkpoint: &self.checkpoint,
            spec: &self.spec,
            experts: &self.sources,
            layers: &experts.layers,
            statistics,
            workers: workers::count(threads, fed),
            progress,
            stop,
        };
        bpw.map(|bpw| search.find(f64::from(bpw) / 100.0)).transpose()
    }

    /// The statistics with which the vault was made, if it was made with any.
    fn statistics(&self, dir: Option<&Path>, vault: &Path) -> Result<Option<Statistics>, SculptError> {
        let Some(made) = self.made.as_deref().and_then(|made| made.split_once(CALIBRATION)) else {
            return Ok(None);
        };
        let refuse = |what: &str| SculptError::Incomparable { path: vault.to_owned(), what: what.to_owned() };
        let line = self.made.as_deref().unwrap_or_default();
        if Settings::coded_bpw_of(line).is_some() && !line.contains(CHANNELS) {
            return Err(refuse("its codes, entropy-coded with statistics, follow an earlier rule"));
        }
        let dir = dir.ok_or_else(|| refuse("it was made with statistics: name them with --calibration"))?;
        let statistics = Statistics::open(dir)?;
        if made.1.split(' ').next() != Some(&*statistics.name()) {
            return Err(refuse("it was made with other statistics"));
        }
        statistics.require(&self.checkpoint.fingerprint()?, &self.spec)?;
        Ok(Some(statistics))
    }

    /// The record of a piece of an expert, and its bytes there.
    fn expert(&self, piece: &Piece) -> Option<(usize, Range<usize>)> {
        match &piece.place {
            Place::Expert { record, bytes, .. } => Some((*record, bytes.clone())),
            Place::Backbone { .. } => None,
        }
    }

    /// Calls `visit` for every piece, its stored bytes read, and sums what it returns by kind.
    fn walk<T: Add + Send + Sync>(
        &self,
        threads: Option<usize>,
        progress: &dyn Progress,
        stop: &AtomicBool,
        visit: impl Fn(&Piece, &mut Buffers) -> Result<T, SculptError> + Sync,
    ) -> Result<Vec<(String, T)>, SculptError> {
        progress.phase("measuring");
        let len = |piece: &Piece| match &piece.place {
            Place::Backbone { len, .. } => *len as u64,
            Place::Expert { bytes, .. } => bytes.len() as u64,
        };
        progress.start(self.pieces.iter().map(len).sum());
        let results: Vec<OnceLock<T>> = self.pieces.iter().map(|_| OnceLock::new()).collect();
        let widest = self.pieces.iter().map(|p| 16 * p.rows.len() * p.cols).max().unwrap_or(0);
        let workers = workers::count(threads, widest);
        let done = workers::for_each(workers, self.pieces.len(), stop, |i, buffers: &mut Buffers| {
            let piece = &self.pieces[i];
            self.read(piece, buffers)?;
            _ = results[i].set(visit(piece, buffers)?);
            progress.advance(len(piece));
            Ok(())
        })?;
        if !done {
            return Err(SculptError::Stopped);
        }
        let mut order: Vec<(String, T)> = Vec::new();
        let mut places: BTreeMap<&str, usize> = BTreeMap::new();
        for (piece, result) in self.pieces.iter().zip(results) {
            let result = result.into_inner().expect("every piece is done");
            match places.get(piece.kind.as_str()) {
                Some(&place) => order[place].1.add(result),
                None => {
                    places.insert(&piece.kind, order.len());
                    order.push((piece.kind.clone(), result));
                }
            }
        }
        Ok(order)
    }

    /// An entropy-coded record as it is in a slot.
    fn decoded(&self, record: usize) -> Result<Vec<u8>, SculptError> {
        let (experts, file, path) = &self.experts;
        let entry = &experts.records[record];
        let mut raw = vec![0; entry.len as usize];
        file.read_exact_at(&mut raw, entry.offset).map_err(SculptError::io("read", path))?;
        let table = experts.table(entry.key.layer).expect("every record's layer has a table");
        let mut tiles = vec![0; table.record_len];
        decode_record(&raw, raw.len(), table, &mut tiles, |block| block.decode())
            .map_err(|source| SculptError::Vault { path: path.clone(), source })?;
        Ok(tiles)
    }

    /// What became of the channels in the matrix of a piece.
    fn channels(&self, piece: &Piece, scratch: &mut Scratch) -> Result<Channels, SculptError> {
        let scaled = self.made.as_deref().is_some_and(|made| made.contains(CHANNELS));
        let Place::Expert { record, projection, .. } = piece.place else { return Ok(Channels::AsTheyWere) };
        let (key, sources) = &self.sources[record];
        let table = self.experts.0.table(key.layer).expect("every record's layer has a table");
        if !(scaled && may_scale(&self.spec) && may_feed_back(sources, table))
            || projection == Projection::Gate
        {
            return Ok(Channels::AsTheyWere);
        }
        if projection == Projection::Up {
            return Ok(Channels::Rows);
        }
        let (source, entry) = (&sources[1], &table.tensors[1]);
        let tiles = self.decoded(record)?;
        self.checkpoint.read_rows(source, 0..source.rows, &mut scratch.raw, &mut scratch.values)?;
        let mut row = vec![0.0; source.cols];
        let rows = scratch.values.chunks_exact(source.cols).enumerate();
        Ok(Channels::Columns(
            rows.map(|(i, weights)| {
                entry.encoding.decode_row(&tiles[entry.offset..][..entry.len], source.cols, i, &mut row);
                divisor(weights, &row)
            })
            .collect(),
        ))
    }

    /// Reads a piece's stored bytes into `buffers.stored`.
    fn read(&self, piece: &Piece, buffers: &mut Buffers) -> Result<(), SculptError> {
        let (file, at, len, path) = match &piece.place {
            Place::Backbone { offset, len } => (&self.backbone.0, *offset, *len, &self.backbone.1),
            Place::Expert { record, bytes, .. } => {
                let (experts, file, path) = &self.experts;
                let entry = &experts.records[*record];
                if experts.coded {
                    let tiles = self.decoded(*record)?;
                    buffers.stored.clear();
                    buffers.stored.extend_from_slice(&tiles[bytes.clone()]);
                    return Ok(());
                }
                if let Some(descriptors) = experts.original.get(*record) {
                    // Row-major: the whole record into tiles, and the run out of it.
                    let mut raw = vec![0; entry.len as usize];
                    file.read_exact_at(&mut raw, entry.offset).map_err(SculptError::io("read", path))?;
                    let table = experts.table(entry.key.layer).expect("every record's layer has a table");
                    let mut tiles = vec![0; table.record_len];
                    original::retile(&raw, descriptors, table, &mut tiles);
                    buffers.stored.clear();
                    buffers.stored.extend_from_slice(&tiles[bytes.clone()]);
                    return Ok(());
                }
                (file, entry.offset + bytes.start as u64, bytes.len(), path)
            }
        };
        buffers.stored.resize(len, 0);
        file.read_exact_at(&mut buffers.stored, at).map_err(SculptError::io("read", path))
    }
}

/// All runs of all tensors, backbone first.
fn pieces(
    sources: &Sources,
    experts: &ExpertFile,
    backbone: &Backbone,
    name_of: fn(BackboneTensor) -> String,
    backbone_path: &Path,
) -> Result<Vec<Piece>, SculptError> {
    let mut pieces = Vec::new();
    for &(tensor, source) in &sources.backbone {
        let stored = backbone
            .require(&sources.spec, tensor, &name_of(tensor))
            .map_err(|source| SculptError::Vault { path: backbone_path.to_owned(), source })?;
        for rows in runs(stored.rows, stored.cols) {
            let start = row_offset(stored.encoding, rows.start, stored.cols);
            let end = if rows.end == stored.rows {
                stored.bytes.end - stored.bytes.start
            } else {
                row_offset(stored.encoding, rows.end, stored.cols)
            };
            pieces.push(Piece {
                kind: kind_name(tensor),
                encoding: stored.encoding,
                source,
                rows,
                cols: stored.cols,
                place: Place::Backbone { offset: stored.bytes.start + start, len: (end - start) as usize },
            });
        }
    }
    // Gate of all experts, then up, then down: kinds stand together.
    for (p, projection) in Projection::ALL.into_iter().enumerate() {
        for (record, (key, tensors)) in sources.experts.iter().enumerate() {
            let table = experts.table(key.layer).expect("the models were compared");
            let entry = &table.tensors[p];
            for rows in runs(entry.rows, entry.cols) {
                let start = row_offset(entry.encoding, rows.start, entry.cols) as usize;
                let end = if rows.end == entry.rows {
                    entry.len
                } else {
                    row_offset(entry.encoding, rows.end, entry.cols) as usize
                };
                pieces.push(Piece {
                    kind: format!("expert {}", projection.name()),
                    encoding: entry.encoding,
                    source: tensors[p],
                    rows,
                    cols: entry.cols,
                    place: Place::Expert {
                        record,
                        projection,
                        bytes: entry.offset + start..entry.offset + end,
                    },
                });
            }
        }
    }
    Ok(pieces)
}
