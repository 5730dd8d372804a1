//! The work itself: rows of a checkpoint to bytes of a vault.

mod step;

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use smoe_format::half::f32_to_f16;
use smoe_format::{Encoding, ExpertKey, LayerTable, ModelSpec, RECORD_ALIGN, record_crc_start};
use smoe_kernels::Kernels;

use crate::calibrate::Statistics;
use crate::checkpoint::Checkpoint;
use crate::coded;
use crate::error::SculptError;
use crate::plan::{Item, Plan, row_offset, runs};
use crate::quantise::{self, Expert, Feedback, Finesse, Square, encode_with_feedback, may_scale};
use crate::settings::{Recipe, Role, Settings};
use crate::source::{Codes, Kept, Source};
pub(crate) use step::StepSearch;

static ZEROS: [u8; 4096] = [0; 4096];

/// A worker's buffers: a run's bytes, its weights or codes, what becomes of them.
pub(crate) struct Scratch {
    pub kernels: Kernels,
    pub raw: Vec<u8>,
    pub values: Vec<f32>,
    pub codes: Codes,
    pub out: Vec<u8>,
    pub record: RecordScratch,
}

/// The same for a record that is entropy-coded: as it is in a slot, on disk, and decoded again.
#[derive(Default)]
pub(crate) struct RecordScratch {
    tiles: Vec<u8>,
    pub coded: Vec<u8>,
    decoded: Vec<u8>,
}

impl Default for Scratch {
    fn default() -> Self {
        Self {
            kernels: Kernels::detect(),
            raw: Vec::new(),
            values: Vec::new(),
            codes: Codes::default(),
            out: Vec::new(),
            record: RecordScratch::default(),
        }
    }
}

/// What a run of rows lost on its way into the vault.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Loss {
    /// Nothing.
    None,
    /// What coding costs, or rounding of scales.
    Some,
    /// This number is beyond every f16.
    Beyond(f32),
}

/// Encodes whole rows into `scratch.out`.
pub(crate) fn encode_rows(
    checkpoint: &Checkpoint,
    source: &Source,
    encoding: Encoding,
    recipe: Recipe,
    rows: Range<usize>,
    scratch: &mut Scratch,
) -> Result<Loss, SculptError> {
    let len = encoding.tensor_bytes(rows.len(), source.cols).expect("a run is smaller than its tensor");
    if !encoding.is_float() && source.keeps(encoding) {
        checkpoint.read_codes(source, rows, &mut scratch.raw, &mut scratch.codes)?;
        scratch.out.resize(len, 0);
        return Ok(match scratch.codes.tiles(source.encoding, encoding, source.cols, &mut scratch.out) {
            Kept::Exactly => Loss::None,
            Kept::Rounded => Loss::Some,
            Kept::Beyond(level) => Loss::Beyond(level),
        });
    }
    if encoding == source.encoding && !source.form.is_coded() {
        // Bytes as they are: not even a NaN's payload changes.
        checkpoint.read_raw(source, rows, &mut scratch.raw, &mut scratch.out)?;
        return Ok(Loss::None);
    }
    checkpoint.read_rows(source, rows, &mut scratch.raw, &mut scratch.values)?;
    if !encoding.is_float()
        && let Some(&w) = scratch.values.iter().find(|&&w| !codable(w))
    {
        return Ok(Loss::Beyond(w));
    }
    scratch.out.resize(len, 0);
    let (values, cols, out) = (&scratch.values, source.cols, &mut scratch.out);
    let searched = encoding.tiles().is_some_and(|tiles| recipe.at(tiles.bits()) == Recipe::Searched);
    match encoding {
        _ if searched && quantise::is_searchable(encoding) => {
            quantise::encode_searched(scratch.kernels, encoding, values, cols, out);
        }
        Encoding::Uniform(uniform) => quantise::encode_absmax(scratch.kernels, uniform, values, cols, out),
        _ => encoding.encode(values, cols, out),
    }
    // Whatever the source, `f32` holds its weights.
    Ok(if encoding == Encoding::F32 { Loss::None } else { Loss::Some })
}

/// Encodes rows of an expert: with `step`, what is not kept as it is gets the codes of one step a row.
pub(crate) fn encode_expert_rows(
    checkpoint: &Checkpoint,
    source: &Source,
    encoding: Encoding,
    recipe: Recipe,
    step: Option<f32>,
    rows: Range<usize>,
    scratch: &mut Scratch,
) -> Result<Loss, SculptError> {
    let (Some(step), Encoding::Uniform(uniform), true) = (step, encoding, encoding != source.encoding) else {
        return encode_rows(checkpoint, source, encoding, recipe, rows, scratch);
    };
    let len = encoding.tensor_bytes(rows.len(), source.cols).expect("a run is smaller than its tensor");
    checkpoint.read_rows(source, rows, &mut scratch.raw, &mut scratch.values)?;
    if let Some(&w) = scratch.values.iter().find(|&&w| !codable(w)) {
        return Ok(Loss::Beyond(w));
    }
    scratch.out.resize(len, 0);
    coded::encode_uniform(uniform, &scratch.values, source.cols, step, &mut scratch.out);
    Ok(Loss::Some)
}

/// Makes a record, entropy-coded, in `scratch.record.coded`.
pub(crate) fn encode_record(
    checkpoint: &Checkpoint,
    plan: &Plan,
    index: usize,
    settings: &Settings,
    scratch: &mut Scratch,
) -> Result<(), SculptError> {
    let (key, _) = &plan.sources.experts[index];
    let table = plan.experts.table(key.layer).expect("every record's layer has a table");
    let mut tiles = std::mem::take(&mut scratch.record.tiles);
    tiles.clear();
    tiles.resize(table.record_len, 0);
    let put = |at: usize, bytes: &[u8]| {
        tiles[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    };
    let result = for_each_run(checkpoint, plan, index, settings, scratch, put);
    scratch.record.tiles = tiles;
    result?;
    let RecordScratch { tiles, coded, decoded } = &mut scratch.record;
    coded::encode_checked(tiles, table, decoded, coded);
    Ok(())
}

/// Encodes an expert run by run, and hands over the bytes of each with its place in the record.
fn for_each_run(
    checkpoint: &Checkpoint,
    plan: &Plan,
    index: usize,
    settings: &Settings,
    scratch: &mut Scratch,
    mut put: impl FnMut(usize, &[u8]) -> Result<(), SculptError>,
) -> Result<(), SculptError> {
    let sources = &plan.sources;
    let (key, tensors) = &sources.experts[index];
    let table = plan.experts.table(key.layer).expect("every record's layer has a table");
    let mut fed = match &plan.statistics {
        Some(statistics) if may_feed_back(tensors, table) => {
            encode_expert(checkpoint, &sources.spec, statistics, plan.step, (*key, tensors), table, scratch)?
                .into_iter()
        }
        _ => Vec::new().into_iter(),
    };
    for ((entry, source), projection) in table.tensors.iter().zip(tensors).zip(smoe_format::Projection::ALL) {
        let role = Role::Expert { layer: key.layer, projection };
        let name = || sources.family.expert(&sources.spec, *key, projection).name;
        if let Some((loss, tiles)) = fed.next() {
            refuse(loss, settings.lossless, source, role, name)?;
            put(entry.offset, &tiles)?;
            continue;
        }
        for rows in runs(entry.rows, entry.cols) {
            let at = entry.offset + row_offset(entry.encoding, rows.start, entry.cols) as usize;
            let loss = encode_expert_rows(
                checkpoint,
                source,
                entry.encoding,
                settings.recipe,
                plan.step,
                rows,
                scratch,
            )?;
            refuse(loss, settings.lossless, source, role, name)?;
            put(at, &scratch.out)?;
        }
    }
    Ok(())
}

/// True if a group with this weight has a finite scale.
pub(crate) fn codable(w: f32) -> bool {
    // Infinity in binary16, and its NaNs above.
    w.abs() <= 65504.0 || (w.is_finite() && f32_to_f16(w.abs()) < 0x7c00)
}

/// Writes a piece's bytes in ascending order and keeps their checksum.
pub(crate) struct Writer<'a> {
    pub file: &'a File,
    pub path: &'a Path,
    pub at: u64,
    pub crc: u32,
}

impl Writer<'_> {
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), SculptError> {
        self.file.write_all_at(bytes, self.at).map_err(SculptError::io("write", self.path))?;
        self.crc = smoe_format::crc::crc32c_append(self.crc, bytes);
        self.at += bytes.len() as u64;
        Ok(())
    }

    pub fn zeros_to(&mut self, end: u64) -> Result<(), SculptError> {
        while self.at < end {
            let n = (end - self.at).min(ZEROS.len() as u64) as usize;
            self.put(&ZEROS[..n])?;
        }
        Ok(())
    }
}

/// Encodes one item and writes it to `file`; returns its checksum.
pub(crate) fn write_item(
    checkpoint: &Checkpoint,
    plan: &Plan,
    item: Item,
    (file, path): (&File, &Path),
    settings: &Settings,
    scratch: &mut Scratch,
) -> Result<u32, SculptError> {
    let (offset, len) = plan.place(item);
    let mut writer = Writer { file, path, at: offset, crc: crc_start(plan, item) };
    let sources = &plan.sources;
    let (recipe, lossless) = (settings.recipe, settings.lossless);
    match item {
        Item::Expert(i) => {
            for_each_run(checkpoint, plan, i, settings, scratch, |at, bytes| {
                writer.zeros_to(offset + at as u64)?;
                writer.put(bytes)
            })?;
            writer.zeros_to(offset + len)?;
        }
        Item::Run { tensor, run } => {
            let t = &plan.backbone.tensors[tensor];
            let rows = runs(t.rows, t.cols).nth(run).expect("items are made from runs");
            debug_assert_eq!(offset, t.offset + row_offset(t.encoding, rows.start, t.cols));
            let loss = encode_rows(checkpoint, &t.source, t.encoding, recipe, rows, scratch)?;
            refuse(loss, lossless, &t.source, Role::Backbone(t.tensor), || sources.backbone_name(t.tensor))?;
            writer.put(&scratch.out)?;
        }
    }
    debug_assert_eq!(writer.at, offset + len);
    Ok(writer.crc)
}

/// Codes gate, up and down of an expert with error feedback, with `step` in the cells of one step a row: what each lost,
/// and its tiles.
pub(crate) fn encode_expert(
    checkpoint: &Checkpoint,
    spec: &ModelSpec,
    statistics: &Statistics,
    step: Option<f32>,
    (key, tensors): (ExpertKey, &[Source; 3]),
    table: &LayerTable,
    scratch: &mut Scratch,
) -> Result<Vec<(Loss, Vec<u8>)>, SculptError> {
    let mut weights: [Vec<f32>; 3] = Default::default();
    let mut losses = [Loss::Some; 3];
    for (i, (source, entry)) in tensors.iter().zip(&table.tensors).enumerate() {
        checkpoint.read_rows(source, 0..entry.rows, &mut scratch.raw, &mut weights[i])?;
        if let Some(&w) = weights[i].iter().find(|&&w| !codable(w)) {
            losses[i] = Loss::Beyond(w);
        }
    }
    if losses != [Loss::Some; 3] {
        return Ok(losses.into_iter().zip(&table.tensors).map(|(loss, t)| (loss, vec![0; t.len])).collect());
    }
    let [input, mut hidden] = statistics.hessians(key.layer, key.expert)?;
    let kernels = scratch.kernels;
    let mut steps = None;
    if let Some(step) = step {
        let [gate, up, down] = weights;
        let mut expert = Expert { gate, up, down };
        let finesse = expert.scale(kernels, &input, &mut hidden, may_scale(spec));
        weights = [expert.gate, expert.up, expert.down];
        let of = |rows: Vec<f32>| rows.iter().map(|row| Finesse::step(*row, step)).collect::<Vec<_>>();
        steps = Some([of(finesse.gate), of(finesse.up), of(finesse.down)]);
    }
    let factor = |hessian: Square| match &steps {
        Some(_) => Feedback::loudest_first(kernels, &hessian),
        None => Feedback::new(kernels, &hessian),
    };
    let mut factors = [Some(factor(input)), Some(factor(hidden))];
    let mut all = Vec::with_capacity(3);
    for (i, (weights, entry)) in weights.iter_mut().zip(&table.tensors).enumerate() {
        let mut out = vec![0; entry.len];
        let feedback = factors[usize::from(i == 2)].as_ref().expect("kept until down is done");
        let steps = steps.as_ref().map(|steps| &*steps[i]);
        encode_with_feedback(kernels, entry.encoding, steps, feedback, weights, entry.cols, &mut out);
        *weights = Vec::new();
        if i == 1 {
            factors[0] = None;
        }
        all.push((Loss::Some, out));
    }
    Ok(all)
}

/// True if error feedback is for this expert: all its tensors are coded anew.
pub(crate) fn may_feed_back(tensors: &[Source; 3], table: &LayerTable) -> bool {
    let mut all = tensors.iter().zip(&table.tensors);
    all.all(|(source, entry)| quantise::is_searchable(entry.encoding) && !source.keeps(entry.encoding))
}

fn refuse(
    loss: Loss,
    lossless: bool,
    source: &Source,
    role: Role,
    name: impl Fn() -> String,
) -> Result<(), SculptError> {
    let flag = match role {
        Role::Expert { .. } => "--bits 16",
        Role::Backbone(_) => "--backbone bf16",
    };
    match loss {
        Loss::Beyond(found) => Err(SculptError::Range { tensor: name(), found, flag }),
        Loss::Some if lossless => {
            let what = "some of its scales or minima are no f16 numbers";
            Err(SculptError::Lossy { tensor: name(), form: source.form.name(), what })
        }
        Loss::Some | Loss::None => Ok(()),
    }
}

/// Writes the entropy-coded record that [`encode_record`] made at `offset`; returns its checksum.
pub(crate) fn write_record(
    plan: &Plan,
    index: usize,
    (file, path): (&File, &Path),
    offset: u64,
    record: &RecordScratch,
) -> Result<u32, SculptError> {
    let mut writer = Writer { file, path, at: offset, crc: crc_start(plan, Item::Expert(index)) };
    writer.put(&record.coded)?;
    writer.zeros_to(offset + record.coded.len().next_multiple_of(RECORD_ALIGN) as u64)?;
    Ok(writer.crc)
}

/// The checksum of an item before its first byte.
pub(crate) fn crc_start(plan: &Plan, item: Item) -> u32 {
    match item {
        Item::Expert(i) => record_crc_start(plan.experts.records[i].key),
        Item::Run { .. } => 0,
    }
}

/// Continues a checksum over bytes of a file, piece by piece.
pub(crate) fn crc_at(
    file: &File,
    offset: u64,
    len: u64,
    start: u32,
    buffer: &mut Vec<u8>,
) -> std::io::Result<u32> {
    const PIECE: u64 = 1 << 20;
    let (mut at, end, mut crc) = (offset, offset + len, start);
    while at < end {
        buffer.resize((end - at).min(PIECE) as usize, 0);
        file.read_exact_at(buffer, at)?;
        crc = smoe_format::crc::crc32c_append(crc, buffer);
        at += buffer.len() as u64;
    }
    Ok(crc)
}
