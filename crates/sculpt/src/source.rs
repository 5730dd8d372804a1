//! How tensors lie in the files of a checkpoint, and their rows read out of there.
//!
//! Whatever the file's own packing, a run of rows comes out in one of two ways: as floats, or as [`Codes`]:
//! unsigned codes in groups along the row, each group with a scale and a minimum in `f32`, so that a weight is
//! `fma(code, scale, minimum)`, or `level[code] * scale` if they name levels of a table. A tensor that a vault has
//! such codes for keeps them, and every other one gets the weights. The backbone has no tables: there the level
//! itself, counted from a power of two below, is the code ([`evened`]).

pub(crate) mod ggml;
pub(crate) mod gguf;
mod packed;
mod stacked;

use std::cell::RefCell;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use smoe_format::half::{f16_to_f32, f32_to_f16};
use smoe_format::tile::ROWS;
use smoe_format::{Encoding, Table, Uniform, Zero};

use crate::error::SculptError;
use crate::files::WeightFile;
pub(crate) use packed::{Mlx, Packing, Raw, resolve};

/// A file of weights.
#[derive(Debug)]
pub(crate) struct Shard {
    pub name: String,
    pub path: PathBuf,
    pub file: Box<dyn WeightFile>,
    pub len: u64,
    /// Everything before the data.
    pub header: Vec<u8>,
    /// Bytes of weights that were read.
    pub read: AtomicU64,
}

/// A place in a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct At {
    pub shard: usize,
    pub offset: u64,
}

impl At {
    /// The place `bytes` further on.
    pub const fn skip(self, bytes: u64) -> Self {
        Self { shard: self.shard, offset: self.offset + bytes }
    }
}

/// The bytes of a tensor, or some of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub at: At,
    pub bytes: u64,
}

/// A tensor as it is stored.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub shape: Vec<usize>,
    /// The file that it, or the first part of it, is in.
    pub shard: usize,
    /// How it is read; else why it cannot be.
    pub form: Result<Form, Unread>,
    pub order: Order,
    pub change: Change,
}

/// What the file's own converter has done to weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    None,
    /// A norm around one has it added: [`Part::OnePlus`] is done.
    OneAdded,
    /// They are to be read as this part.
    Read(Part),
}

impl Change {
    /// What of the tensor is meant if a family means `part`.
    pub fn part(self, part: Part) -> Part {
        match (self, part) {
            (Self::OneAdded, Part::OnePlus) => Part::Whole,
            (Self::Read(changed), Part::Whole) => changed,
            _ => part,
        }
    }
}

/// Heads of values, so many of each key head, in llama.cpp's order: by turns one of each key head, where checkpoints have
/// those of one key head side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiling {
    /// What lies before it is in its place.
    pub first: usize,
    /// Key heads.
    pub heads: usize,
    /// Heads of values of each.
    pub per: usize,
    /// Width of a head of values.
    pub width: usize,
}

impl Tiling {
    /// Where in the file number `i` of the checkpoint is.
    fn place(self, i: usize) -> usize {
        let Some(i) = i.checked_sub(self.first) else { return i };
        let (head, at) = (i / self.width, i % self.width);
        self.first + (head % self.per * self.heads + head / self.per) * self.width + at
    }
}

/// Why a stored tensor cannot be read.
#[derive(Clone, Debug)]
pub(crate) enum Unread {
    /// Its type is none that this build reads.
    Type(String),
    /// It is packed, and its parts contradict each other or are not all there.
    Packed(String),
}

/// Where row `r` of a tensor is among the rows of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// At `r`.
    Plain,
    /// At `first + step * r`: interleaved with other tensors.
    Step { first: usize, step: usize },
    /// Heads of which the halves that RoPE turns together are interleaved: what llama.cpp makes of them.
    Rope { head_dim: usize },
    /// As heads of values are tiled.
    Tiled(Tiling),
}

impl Order {
    fn file_row(self, row: usize) -> usize {
        match self {
            Self::Plain => row,
            Self::Step { first, step } => first + step * row,
            Self::Tiled(tiling) => tiling.place(row),
            Self::Rope { head_dim } => {
                let (head, i) = (row / head_dim, row % head_dim);
                let half = head_dim / 2;
                head * head_dim + 2 * (i % half) + i / half
            }
        }
    }
}

/// The bytes of a matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Form {
    /// Floats, row by row.
    Float { at: At, ty: Encoding },
    /// Floats, some places apart from row to row and from column to column.
    Strided { at: At, ty: Encoding, row: usize, col: usize },
    /// Blocks of llama.cpp.
    Ggml { at: At, kind: ggml::Kind },
    /// 8-bit floats (4 bits of exponent) with a scale for each square block.
    Fp8 { at: At, scales: At, ty: Encoding, block: [usize; 2] },
    /// 4-bit floats in groups of 32 with a power of two each, in two tensors.
    Mxfp4 { blocks: At, scales: At },
    /// MLX: a stream of codes, scales and minima ("biases").
    Mlx { codes: At, scales: At, minima: At, ty: Encoding, mlx: Mlx },
    /// GPTQ: codes packed along the columns.
    Gptq(packed::Gptq),
    /// AWQ: codes packed along the rows.
    Awq(packed::Awq),
    /// Two tensors, head by head: `k` rows out of columns of the first, `v` rows of the second.
    Heads(stacked::Heads),
    /// Two tensors, the second's rows by turns with parts of the first.
    Joined(stacked::Joined),
}

/// A tensor that the model needs, with its shape checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    /// What keeps its weights: their float type, or the codes that they are.
    pub encoding: Encoding,
    pub rows: usize,
    pub cols: usize,
    pub form: Form,
    pub order: Order,
    pub part: Part,
}

/// What of a stored matrix a source is. Its rows belong to heads, so many each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// All of it.
    Whole,
    /// Of every `of` rows `n`, from `first` on.
    Rows { of: usize, first: usize, n: usize },
    /// Of every `of` rows of `cols` columns the first `n`, turned: each head has `cols` rows of `n`.
    Columns { of: usize, n: usize, cols: usize },
    /// All of it, and one added to each weight, in `f32` as a norm around one does it.
    OnePlus,
    /// All of it, columns from where they are tiled to.
    Tiled(Tiling),
    /// All of it, tiled or not: the logarithm of what each is below zero.
    Log(Option<Tiling>),
}

impl Part {
    /// True if it is all rows, each changed as a whole.
    const fn is_by_row(self) -> bool {
        matches!(self, Self::OnePlus | Self::Tiled(_) | Self::Log(_))
    }

    /// Changes whole rows of `cols` weights.
    fn change(self, cols: usize, values: &mut [f32]) {
        let tiling = match self {
            Self::Tiled(tiling) => Some(tiling),
            Self::Log(tiling) => tiling,
            _ => None,
        };
        if let Some(tiling) = tiling {
            let mut tiled = Vec::new();
            for row in values.chunks_exact_mut(cols.max(1)) {
                tiled.clear();
                tiled.extend_from_slice(row);
                for (i, w) in row.iter_mut().enumerate() {
                    // Beyond the columns: of a shape that does not fit, and refused elsewhere.
                    *w = tiled.get(tiling.place(i)).copied().unwrap_or(f32::NAN);
                }
            }
        }
        match self {
            Self::OnePlus => values.iter_mut().for_each(|w| *w += 1.0),
            Self::Log(_) => values.iter_mut().for_each(|w| *w = (-*w).ln()),
            _ => {}
        }
    }
}

/// Some rows of a tensor.
pub(crate) type Rows = (Source, Range<usize>);

/// Reads rows of a whole tensor.
type ReadRows<'a, T> = dyn FnMut(Range<usize>, &mut Vec<T>) -> Result<(), SculptError> + 'a;

/// Rows as codes.
#[derive(Default)]
pub(crate) struct Codes {
    /// Row by row.
    pub codes: Vec<u8>,
    /// Scale and minimum (0 for a table) of each (row, group).
    pub levels: Vec<[f32; 2]>,
}

/// Affine codes.
pub(crate) fn affine(bits: u8, group: usize) -> Option<Uniform> {
    Uniform::new(bits, group, Zero::Affine)
}

/// Affine codes whose steps hold the levels of a table, and what must be added to a level to make its code: a power of
/// two, so that the minimum that takes it away again is exact.
pub(crate) fn evened(table: Table) -> (Uniform, i16) {
    let fits = |half: i16| table.levels().iter().all(|&level| (-half..half).contains(&i16::from(level)));
    let bits = if fits(16) { 5 } else { 8 };
    (affine(bits, table.group()).expect("bits and groups of the format"), 1 << (bits - 1))
}

/// What became of codes on their way into a vault.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kept {
    /// All weights are the same.
    Exactly,
    /// Some scale or minimum was rounded to f16.
    Rounded,
    /// One of them is beyond f16.
    Beyond(f32),
}

impl Codes {
    /// The weights, of codes that are of this encoding: the definition of every packed type's values.
    pub fn weights(&self, encoding: Encoding, cols: usize, out: &mut [f32]) {
        let tiles = encoding.tiles().expect("codes");
        let (group, groups) = (tiles.group(), tiles.groups(cols));
        for ((row, codes), levels) in out
            .chunks_exact_mut(cols)
            .zip(self.codes.chunks_exact(cols))
            .zip(self.levels.chunks_exact(groups))
        {
            for ((out, codes), &[scale, minimum]) in
                row.chunks_mut(group).zip(codes.chunks(group)).zip(levels)
            {
                for (w, &code) in out.iter_mut().zip(codes) {
                    *w = match encoding {
                        Encoding::Table(table) => table.dequantise(code, scale),
                        _ => f32::from(code).mul_add(scale, minimum),
                    };
                }
            }
        }
    }

    /// Writes them, codes of the encoding `of`, as tiles of `to`: the same, or what a table is evened to.
    pub fn tiles(&self, of: Encoding, to: Encoding, cols: usize, out: &mut [u8]) -> Kept {
        let uniform = to.tiles().expect("codes");
        let (group, groups) = (uniform.group(), uniform.groups(cols));
        let mut steps = [0; 128];
        let mut kept = Kept::Exactly;
        out.fill(0);
        for (row, (codes, levels)) in
            self.codes.chunks_exact(cols).zip(self.levels.chunks_exact(groups)).enumerate()
        {
            let block = &mut out[row / ROWS * uniform.block_bytes(cols)..][..uniform.block_bytes(cols)];
            for ((tile, codes), level) in
                block.chunks_exact_mut(uniform.tile_bytes()).zip(codes.chunks(group)).zip(levels)
            {
                let (mut codes, mut level) = (codes, *level);
                if let Encoding::Table(table) = of {
                    let of_code = |code: u8| table.levels()[usize::from(code)];
                    // Zero times any scale: the one of an empty block may be far below f16.
                    if codes.iter().all(|&code| of_code(code) == 0) {
                        level[0] = 0.0;
                    }
                    if to != of {
                        let (_, add) = evened(table);
                        for (step, &code) in steps.iter_mut().zip(codes) {
                            *step = (i16::from(of_code(code)) + add) as u8;
                        }
                        codes = &steps[..codes.len()];
                        level[1] = -f32::from(add) * level[0];
                    }
                }
                let halves = level.map(f32_to_f16);
                for (&level, half) in level.iter().zip(halves) {
                    let stored = f16_to_f32(half);
                    if !stored.is_finite() {
                        return Kept::Beyond(level);
                    }
                    if stored != level {
                        kept = Kept::Rounded;
                    }
                }
                uniform.write_row(tile, row % ROWS, codes, halves[0], halves[1]);
            }
        }
        kept
    }
}

impl Form {
    /// What keeps the weights of this form.
    pub fn encoding(&self) -> Encoding {
        let uniform = |uniform: Option<Uniform>| uniform.map_or(Encoding::F32, Encoding::Uniform);
        match self {
            Self::Float { ty, .. } | Self::Strided { ty, .. } => *ty,
            Self::Ggml { kind, .. } => kind.encoding(),
            // Products of two floats.
            Self::Fp8 { .. } | Self::Heads(_) | Self::Joined(_) => Encoding::F32,
            Self::Mxfp4 { .. } => ggml::Kind::Mxfp4.encoding(),
            Self::Mlx { mlx, .. } => uniform(affine(mlx.bits, mlx.group)),
            Self::Gptq(gptq) => uniform(gptq.uniform()),
            Self::Awq(awq) => uniform(awq.uniform()),
        }
    }

    /// A name for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Float { ty, .. } | Self::Strided { ty, .. } => match ty {
                Encoding::F16 => "F16",
                Encoding::Bf16 => "BF16",
                _ => "F32",
            },
            Self::Ggml { kind, .. } => kind.name(),
            Self::Fp8 { .. } => "FP8 in blocks",
            Self::Mxfp4 { .. } => "MXFP4",
            Self::Mlx { .. } => "MLX codes",
            Self::Gptq(_) => "GPTQ",
            Self::Awq(_) => "AWQ",
            Self::Heads(_) | Self::Joined(_) => "split by heads",
        }
    }

    /// True if an f16 scale and minimum can hold this form's own in principle. Of the others only luck keeps a
    /// group's weights as they are.
    pub const fn may_be_exact(&self) -> bool {
        !matches!(self, Self::Ggml { kind, .. } if kind.is_super_block())
    }

    /// The files that its bytes are in.
    pub fn shards(&self) -> Vec<usize> {
        let at = match self {
            Self::Float { at, .. } | Self::Strided { at, .. } | Self::Ggml { at, .. } => vec![*at],
            Self::Fp8 { at, scales, .. } => vec![*at, *scales],
            Self::Mxfp4 { blocks, scales } => vec![*blocks, *scales],
            Self::Mlx { codes, scales, minima, .. } => vec![*codes, *scales, *minima],
            Self::Gptq(gptq) => gptq.places(),
            Self::Awq(awq) => awq.places(),
            Self::Heads(heads) => heads.places(),
            Self::Joined(joined) => joined.places(),
        };
        at.into_iter().map(|at| at.shard).collect()
    }

    /// True if rows are not read as the bytes of floats that they are.
    pub const fn is_coded(&self) -> bool {
        !matches!(self, Self::Float { .. } | Self::Strided { .. })
    }

    /// True if some weights are stored as codes.
    pub fn has_codes(&self) -> bool {
        match self {
            Self::Heads(heads) => heads.has_codes(),
            Self::Joined(joined) => joined.has_codes(),
            _ => self.is_coded(),
        }
    }
}

/// Opened files, read by place.
#[derive(Clone, Copy)]
pub(crate) struct Files<'a> {
    shards: &'a [Shard],
    noted: Option<&'a RefCell<Vec<Span>>>,
}

impl<'a> Files<'a> {
    pub const fn new(shards: &'a [Shard]) -> Self {
        Self { shards, noted: None }
    }

    /// Files of which nothing is read: what would be is noted, and seems to be all zeros.
    pub const fn noting(shards: &'a [Shard], noted: &'a RefCell<Vec<Span>>) -> Self {
        Self { shards, noted: Some(noted) }
    }

    /// The file that `at` is in.
    pub fn path(self, at: At) -> &'a Path {
        &self.shards[at.shard].path
    }

    /// Fills `out` from `at` on.
    pub fn read(self, at: At, out: &mut [u8]) -> Result<(), SculptError> {
        if let Some(noted) = self.noted {
            out.fill(0);
            noted.borrow_mut().push(Span { at, bytes: out.len() as u64 });
            return Ok(());
        }
        let shard = &self.shards[at.shard];
        shard.read.fetch_add(out.len() as u64, Ordering::Relaxed);
        shard.file.read_exact_at(out, at.offset).map_err(SculptError::io("read", &shard.path))
    }

    /// Reads the rows of a tensor whose rows have `row_bytes` each, in its order.
    pub fn rows(
        self,
        at: At,
        row_bytes: usize,
        order: Order,
        rows: Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<(), SculptError> {
        out.resize(rows.len() * row_bytes, 0);
        if order == Order::Plain {
            return self.read(at.skip((rows.start * row_bytes) as u64), out);
        }
        for (row, bytes) in rows.zip(out.chunks_exact_mut(row_bytes.max(1))) {
            self.read(at.skip((order.file_row(row) * row_bytes) as u64), bytes)?;
        }
        Ok(())
    }
}

impl Source {
    /// That part of a whole matrix. Floats are kept as they are, whatever else as `f32`.
    pub fn part(self, part: Part) -> Self {
        let (rows, cols) = match part {
            Part::Whole => return self,
            Part::Rows { of, n, .. } => (self.rows / of * n, self.cols),
            Part::Columns { of, n, cols } => (self.rows / of * cols, n),
            Part::OnePlus | Part::Tiled(_) | Part::Log(_) => (self.rows, self.cols),
        };
        let is_changed = self.form.is_coded() || part.is_by_row();
        let encoding = if is_changed { Encoding::F32 } else { self.encoding };
        Self { encoding, rows, cols, part, ..self }
    }

    /// The matrix that this is a part of.
    fn whole(&self) -> Self {
        let (rows, cols) = match self.part {
            Part::Whole => return *self,
            Part::Rows { of, n, .. } => (self.rows / n * of, self.cols),
            Part::Columns { of, cols, .. } => (self.rows / cols * of, cols),
            Part::OnePlus | Part::Tiled(_) | Part::Log(_) => (self.rows, self.cols),
        };
        Self { encoding: self.form.encoding(), rows, cols, part: Part::Whole, ..*self }
    }

    /// Fills `out` with rows of a part, `width` units of `T` an element, from rows of the whole that `read` gives.
    fn pick<T: Copy + Default>(
        &self,
        rows: Range<usize>,
        width: usize,
        out: &mut Vec<T>,
        read: &mut ReadRows<'_, T>,
    ) -> Result<(), SculptError> {
        out.clear();
        let mut some = Vec::new();
        let mut row = rows.start;
        while row < rows.end {
            // As many rows as one head has.
            row += match self.part {
                Part::Whole | Part::OnePlus | Part::Tiled(_) | Part::Log(_) => {
                    read(row..rows.end, &mut some)?;
                    out.extend_from_slice(&some);
                    rows.end - row
                }
                Part::Rows { of, first, n } => {
                    let (head, i) = (row / n, row % n);
                    let n = (n - i).min(rows.end - row);
                    let start = head * of + first + i;
                    read(start..start + n, &mut some)?;
                    out.extend_from_slice(&some);
                    n
                }
                Part::Columns { of, n, cols } => {
                    let (head, i) = (row / cols, row % cols);
                    let count = (cols - i).min(rows.end - row);
                    read(head * of..head * of + n, &mut some)?;
                    for col in i..i + count {
                        for line in some.chunks_exact(cols * width) {
                            out.extend_from_slice(&line[col * width..(col + 1) * width]);
                        }
                    }
                    count
                }
            };
        }
        Ok(())
    }

    /// Reads whole rows of a float tensor as they are into `out`, through `raw`.
    pub fn read_raw(
        &self,
        files: Files<'_>,
        rows: Range<usize>,
        raw: &mut Vec<u8>,
        out: &mut Vec<u8>,
    ) -> Result<(), SculptError> {
        let width = |ty| if ty == Encoding::F32 { 4 } else { 2 };
        if self.part.is_by_row() {
            let mut values = Vec::new();
            self.read_rows(files, rows, raw, &mut Codes::default(), &mut values)?;
            out.clear();
            out.extend(values.iter().flat_map(|w| w.to_le_bytes()));
            return Ok(());
        }
        if self.part != Part::Whole {
            let whole = self.whole();
            return self.pick(rows, width(self.encoding), out, &mut |rows, out| {
                whole.read_raw(files, rows, raw, out)
            });
        }
        match self.form {
            Form::Float { at, ty } => files.rows(at, self.cols * width(ty), self.order, rows, out),
            Form::Strided { at, ty, row, col } => {
                let (width, n) = (width(ty), rows.len());
                out.resize(n * self.cols * width, 0);
                // One read per line of the direction in which the elements lie closer.
                let by_row = col <= row;
                let (lines, line, len, step) =
                    if by_row { (n, row, self.cols, col) } else { (self.cols, col, n, row) };
                raw.resize(((len.max(1) - 1) * step + 1) * width, 0);
                for l in 0..lines {
                    let from = rows.start * row + l * line;
                    files.read(at.skip((from * width) as u64), raw)?;
                    for e in 0..len {
                        let to = if by_row { l * self.cols + e } else { e * self.cols + l };
                        out[to * width..][..width].copy_from_slice(&raw[e * step * width..][..width]);
                    }
                }
                Ok(())
            }
            _ => unreachable!("coded tensors have no bytes of their own"),
        }
    }

    /// Reads whole rows as `f32` into `values`, by way of `raw` and `codes`.
    pub fn read_rows(
        &self,
        files: Files<'_>,
        rows: Range<usize>,
        raw: &mut Vec<u8>,
        codes: &mut Codes,
        values: &mut Vec<f32>,
    ) -> Result<(), SculptError> {
        if self.part != Part::Whole {
            let whole = self.whole();
            self.pick(rows, 1, values, &mut |rows, values| whole.read_rows(files, rows, raw, codes, values))?;
            self.part.change(self.cols, values);
            return Ok(());
        }
        values.resize(rows.len() * self.cols, 0.0);
        match self.form {
            Form::Float { ty, .. } | Form::Strided { ty, .. } => {
                let n = values.len();
                self.read_raw(files, rows, &mut codes.codes, raw)?;
                // All rows as one long row.
                ty.decode_row(raw, n, 0, values);
            }
            Form::Fp8 { at, scales, ty, block } => {
                packed::fp8(self, files, (at, scales, ty, block), rows, raw, values)?;
            }
            Form::Gptq(gptq) if gptq.uniform().is_none() => gptq.weights(self, files, rows, raw, values)?,
            Form::Heads(heads) => heads.weights(self, files, rows, raw, codes, values)?,
            Form::Joined(joined) => joined.weights(self, files, rows, raw, codes, values)?,
            _ => {
                self.read_codes(files, rows, raw, codes)?;
                codes.weights(self.encoding, self.cols, values);
            }
        }
        Ok(())
    }

    /// True if tiles of this encoding hold the codes that are stored, each as it is or by its level.
    pub fn keeps(&self, encoding: Encoding) -> bool {
        let even = |table| Encoding::Uniform(evened(table).0);
        encoding == self.encoding
            || matches!(self.encoding, Encoding::Table(table) if even(table) == encoding)
    }

    /// Reads whole rows of a tensor that is kept as codes.
    pub fn read_codes(
        &self,
        files: Files<'_>,
        rows: Range<usize>,
        raw: &mut Vec<u8>,
        out: &mut Codes,
    ) -> Result<(), SculptError> {
        let Some(tiles) = self.encoding.tiles() else {
            unreachable!("floats have no codes");
        };
        let groups = tiles.groups(self.cols);
        out.codes.resize(rows.len() * self.cols, 0);
        out.levels.resize(rows.len() * groups, [0.0; 2]);
        match self.form {
            Form::Ggml { at, kind } => {
                files.rows(at, kind.row_bytes(self.cols), self.order, rows, raw)?;
                kind.unpack(raw, &mut out.codes, &mut out.levels);
            }
            Form::Mxfp4 { blocks, scales } => {
                packed::mxfp4(self, files, (blocks, scales), rows, raw, out)?;
            }
            Form::Mlx { codes, scales, minima, ty, mlx } => {
                mlx.codes(self, files, (codes, scales, minima, ty), rows, raw, out)?;
            }
            Form::Gptq(gptq) => gptq.codes(self, files, rows, raw, out)?,
            Form::Awq(awq) => awq.codes(self, files, rows, raw, out)?,
            Form::Float { .. }
            | Form::Strided { .. }
            | Form::Fp8 { .. }
            | Form::Heads(_)
            | Form::Joined(_) => {
                unreachable!("these are kept as floats")
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    /// Three heads of five rows, whose elements are their own place in the file.
    #[test]
    fn parts_of_heads_are_read_from_any_row_on() {
        let (heads, of, cols, keys) = (3, 5, 4, 3);
        let mut file = tempfile::tempfile().expect("a file");
        let values: Vec<f32> = (0..heads * of * cols).map(|i| i as f32).collect();
        file.write_all(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>()).expect("room");
        let shards = [Shard {
            name: "s".to_owned(),
            path: "s".into(),
            file: Box::new(file),
            len: 0,
            header: Vec::new(),
            read: AtomicU64::new(0),
        }];
        let form = Form::Float { at: At { shard: 0, offset: 0 }, ty: Encoding::F32 };
        let (rows, order, part) = (heads * of, Order::Plain, Part::Whole);
        let whole = Source { encoding: Encoding::F32, rows, cols, form, order, part };
        let turned = |row: usize, col: usize| (row / cols * of + col) * cols + row % cols;
        let end = |row: usize, col: usize| (row / (of - keys) * of + keys + row % (of - keys)) * cols + col;
        let middle = |row: usize, col: usize| (row / 2 * of + 1 + row % 2) * cols + col;
        let next = |row: usize, col: usize| row * cols + col + 1;
        type Place<'a> = &'a dyn Fn(usize, usize) -> usize;
        let parts: [(Part, usize, usize, Place<'_>); 4] = [
            (Part::Columns { of, n: keys, cols }, heads * cols, keys, &turned),
            (Part::Rows { of, first: keys, n: of - keys }, heads * (of - keys), cols, &end),
            (Part::Rows { of, first: 1, n: 2 }, heads * 2, cols, &middle),
            (Part::OnePlus, heads * of, cols, &next),
        ];
        for (part, rows, cols, place) in parts {
            let source = whole.part(part);
            assert_eq!((source.rows, source.cols), (rows, cols));
            for range in [0..rows, 1..rows - 1, 3..4, 2..5] {
                let (mut raw, mut out) = (Vec::new(), Vec::new());
                let expected: Vec<f32> =
                    range.clone().flat_map(|row| (0..cols).map(move |col| place(row, col) as f32)).collect();
                source
                    .read_rows(Files::new(&shards), range.clone(), &mut raw, &mut Codes::default(), &mut out)
                    .expect("read");
                assert_eq!(out, expected, "{part:?} {range:?}");
                let mut bytes = Vec::new();
                source.read_raw(Files::new(&shards), range, &mut raw, &mut bytes).expect("read");
                assert_eq!(bytes, expected.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>());
            }
        }
    }
}
