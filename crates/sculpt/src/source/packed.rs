//! Packed tensors of safetensors checkpoints: FP8 in blocks, MXFP4, MLX, GPTQ and AWQ.
//!
//! `config.json` says which it is. A packed weight `X.weight` is several tensors; [`resolve`] puts them
//! together under the name of the weight, and splits tensors in which the experts of a layer are stacked.

mod awq;
mod gptq;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use safetensors::Dtype;
use serde_json::Value;
use smoe_format::{Encoding, Uniform};

use super::{At, Change, Codes, Files, Form, Order, Source, Span, Stored, Unread, affine, ggml, stacked};
use crate::error::SculptError;
pub(crate) use awq::Awq;
use awq::awq;
pub(crate) use gptq::Gptq;
use gptq::gptq;

/// A tensor by its safetensors header.
#[derive(Clone, Debug)]
pub(crate) struct Raw {
    pub shard: usize,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub offset: u64,
}

impl Raw {
    pub fn at(&self) -> At {
        At { shard: self.shard, offset: self.offset }
    }

    pub fn span(&self) -> Span {
        let bits = self.shape.iter().product::<usize>() as u64 * self.dtype.bitsize() as u64;
        Span { at: self.at(), bytes: bits / 8 }
    }

    /// Its float type.
    pub fn float(&self) -> Option<Encoding> {
        match self.dtype {
            Dtype::F32 => Some(Encoding::F32),
            Dtype::F16 => Some(Encoding::F16),
            Dtype::BF16 => Some(Encoding::Bf16),
            _ => None,
        }
    }
}

/// How the weights of a checkpoint are packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    /// Not at all.
    Floats,
    /// `float8_e4m3fn`, a scale for each block.
    Fp8 { block: [usize; 2] },
    /// GPT-OSS.
    Mxfp4,
    /// MLX, with the modules that have parameters of their own.
    Mlx { usual: Mlx, other: BTreeMap<String, Mlx> },
    /// GPTQ; no group is one as wide as the row.
    Gptq { bits: u8, group: Option<usize>, zero_plus: u8 },
    /// AWQ.
    Awq { group: usize },
}

/// MLX's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mlx {
    pub bits: u8,
    pub group: usize,
}

fn bad(key: &str, found: Option<&Value>, expected: &str) -> SculptError {
    SculptError::Config {
        key: key.to_owned(),
        found: found.map_or_else(|| "missing".to_owned(), Value::to_string),
        expected: expected.to_owned(),
    }
}

impl Packing {
    /// Gives tensors of a model of several parts, which MLX calls by the part, the names that they are published under.
    pub fn publish(&mut self, raw: HashMap<String, Raw>) -> HashMap<String, Raw> {
        let own = |name: String| match name.strip_prefix("language_model.") {
            Some(rest) => match rest.strip_prefix("model.") {
                Some(rest) => format!("model.language_model.{rest}"),
                None => rest.to_owned(),
            },
            None => name,
        };
        if let Self::Mlx { other, .. } = self {
            *other = std::mem::take(other).into_iter().map(|(name, mlx)| (own(name), mlx)).collect();
        }
        raw.into_iter().map(|(name, tensor)| (own(name), tensor)).collect()
    }

    /// Reads the packing out of a config and takes it away: what is left describes the model.
    pub fn take(config: &mut Value) -> Result<Self, SculptError> {
        let Some(object) = config.as_object_mut() else { return Ok(Self::Floats) };
        // MLX writes the same under both names.
        let mlx = object.remove("quantization").filter(|v| !v.is_null());
        let other = object.remove("quantization_config").filter(|v| !v.is_null());
        match (mlx, other) {
            (Some(mlx), _) => Self::mlx("quantization", &mlx),
            (None, Some(other)) => Self::named(&other),
            (None, None) => Ok(Self::Floats),
        }
    }

    fn named(config: &Value) -> Result<Self, SculptError> {
        let path = |key: &str| format!("quantization_config.{key}");
        let get = |key: &str| config.get(key).filter(|value| !value.is_null());
        let only = |key: &str, right: fn(&Value) -> bool, expected: &str| match get(key) {
            Some(value) if !right(value) => Err(bad(&path(key), Some(value), expected)),
            _ => Ok(()),
        };
        let size = |keys: &[&str]| {
            let value = keys.iter().find_map(|key| get(key));
            value.and_then(Value::as_i64).ok_or_else(|| bad(&path(keys[0]), value, "a whole number"))
        };
        let method = get("quant_method").and_then(Value::as_str);
        match method {
            Some("fp8") => {
                only("fmt", |v| v == "e4m3", "\"e4m3\"")?;
                let found = get("weight_block_size");
                let block = found
                    .and_then(Value::as_array)
                    .map(|sizes| sizes.iter().map(|n| n.as_u64().unwrap_or(0) as usize).collect::<Vec<_>>());
                match block.as_deref() {
                    Some(&[rows @ 1..=65536, cols @ 1..=65536]) => Ok(Self::Fp8 { block: [rows, cols] }),
                    _ => Err(bad(&path("weight_block_size"), found, "two sizes, such as [128, 128]")),
                }
            }
            Some("mxfp4") => Ok(Self::Mxfp4),
            Some("gptq") => {
                let bits = size(&["bits"])?;
                let group = size(&["group_size"])?;
                // The first format stores a zero point less one.
                let format = get("checkpoint_format").and_then(Value::as_str).unwrap_or("gptq");
                let zero_plus = match format {
                    "gptq" => 1,
                    "gptq_v2" => 0,
                    _ => {
                        let found = get("checkpoint_format");
                        return Err(bad(&path("checkpoint_format"), found, "\"gptq\" or \"gptq_v2\""));
                    }
                };
                if !matches!(bits, 2 | 3 | 4 | 8) {
                    return Err(bad(&path("bits"), get("bits"), "2, 3, 4 or 8"));
                }
                if group == 0 || group < -1 {
                    return Err(bad(&path("group_size"), get("group_size"), "above 0, or -1"));
                }
                Ok(Self::Gptq { bits: bits as u8, group: usize::try_from(group).ok(), zero_plus })
            }
            Some("awq") => {
                only("version", |v| v.as_str().is_some_and(|v| v.eq_ignore_ascii_case("gemm")), "\"gemm\"")?;
                only("zero_point", |v| *v == Value::Bool(true), "true")?;
                if size(&["bits", "w_bit"])? != 4 {
                    return Err(bad(&path("bits"), get("bits").or(get("w_bit")), "4"));
                }
                let group = size(&["group_size", "q_group_size"])?;
                match usize::try_from(group) {
                    Ok(group @ 1..) => Ok(Self::Awq { group }),
                    _ => Err(bad(&path("group_size"), get("group_size"), "above 0")),
                }
            }
            None if get("bits").is_some() && get("group_size").is_some() => {
                Self::mlx("quantization_config", config)
            }
            _ => {
                let expected = "fp8, mxfp4, gptq, awq, or MLX's";
                Err(bad(&path("quant_method"), get("quant_method"), expected))
            }
        }
    }

    fn mlx(key: &str, config: &Value) -> Result<Self, SculptError> {
        let read = |path: &str, value: &Value| {
            if let Some(mode) = value.get("mode").filter(|mode| *mode != "affine") {
                return Err(bad(&format!("{path}.mode"), Some(mode), "\"affine\""));
            }
            let number = |key: &str| {
                let found = value.get(key);
                found
                    .and_then(Value::as_u64)
                    .ok_or_else(|| bad(&format!("{path}.{key}"), found, "a whole number"))
            };
            let (bits, group) = (number("bits")?, number("group_size")?);
            match (u8::try_from(bits), usize::try_from(group)) {
                (Ok(bits), Ok(group)) if affine(bits, group).is_some() => Ok(Mlx { bits, group }),
                _ => Err(bad(path, Some(value), "2, 3, 4, 5, 6 or 8 bits in groups of 16, 32, 64 or 128")),
            }
        };
        let mut other = BTreeMap::new();
        for (module, value) in config.as_object().into_iter().flatten() {
            if value.is_object() {
                other.insert(module.clone(), read(&format!("{key}.{module}"), value)?);
            }
        }
        Ok(Self::Mlx { usual: read(key, config)?, other })
    }
}

/// Puts the parts of packed weights together, and takes stacked experts apart.
pub(crate) fn resolve(
    raw: &HashMap<String, Raw>,
    packing: &Packing,
    halves: bool,
) -> HashMap<String, Stored> {
    let mut tensors = HashMap::with_capacity(raw.len());
    for (name, tensor) in raw {
        if stacked::split(name, tensor, raw, packing, halves, &mut tensors) {
            continue;
        }
        let stored = match (packing, name.rsplit_once('.')) {
            (Packing::Fp8 { block }, Some((module, "weight"))) if tensor.dtype == Dtype::F8_E4M3 => {
                fp8_stored(module, tensor, raw, *block)
            }
            (Packing::Fp8 { .. }, Some((_, "weight_scale_inv"))) => continue,
            (Packing::Mlx { usual, other }, Some((module, "weight"))) if tensor.dtype == Dtype::U32 => {
                let mlx = other.get(module).copied().unwrap_or(*usual);
                mlx_stored(module, tensor, raw, mlx)
            }
            // MLX's minima; Hugging Face's biases have the singular.
            (Packing::Mlx { .. }, Some((module, "scales" | "biases")))
                if raw.get(&format!("{module}.weight")).is_some_and(|w| w.dtype == Dtype::U32) =>
            {
                continue;
            }
            (Packing::Gptq { bits, group, zero_plus }, Some((module, "qweight"))) => {
                let form = gptq(module, tensor, raw, (*bits, *group, *zero_plus));
                tensors.insert(format!("{module}.weight"), form);
                continue;
            }
            (Packing::Awq { group }, Some((module, "qweight"))) => {
                tensors.insert(format!("{module}.weight"), awq(module, tensor, raw, *group));
                continue;
            }
            (Packing::Gptq { .. } | Packing::Awq { .. }, Some((module, "qzeros" | "scales" | "g_idx")))
                if raw.contains_key(&format!("{module}.qweight")) =>
            {
                continue;
            }
            _ => float_stored(tensor),
        };
        tensors.insert(name.clone(), stored);
    }
    if halves {
        stacked::mlx_hybrid(&mut tensors);
    }
    tensors
}

/// A tensor of floats, or of a type that this build does not read.
pub(crate) fn float_stored(tensor: &Raw) -> Stored {
    let form = match tensor.float() {
        Some(ty) => Ok(Form::Float { at: tensor.at(), ty }),
        None => Err(Unread::Type(format!("{:?}", tensor.dtype))),
    };
    Stored {
        shape: tensor.shape.clone(),
        shard: tensor.shard,
        form,
        order: Order::Plain,
        change: Change::None,
    }
}

/// A part of a packed tensor, which must have this shape and one of these types.
pub(crate) fn part<'a>(
    raw: &'a HashMap<String, Raw>,
    name: &str,
    shape: &[usize],
    types: &[Dtype],
) -> Result<&'a Raw, Unread> {
    let part = raw.get(name).ok_or_else(|| Unread::Packed(format!("its part `{name}` is missing")))?;
    if part.shape != shape {
        let found = &part.shape;
        return Err(Unread::Packed(format!("its part `{name}` has shape {found:?} instead of {shape:?}")));
    }
    if !types.contains(&part.dtype) {
        let found = part.dtype;
        return Err(Unread::Packed(format!("its part `{name}` is {found:?} instead of {types:?}")));
    }
    Ok(part)
}

const FLOATS: &[Dtype] = &[Dtype::F16, Dtype::BF16, Dtype::F32];
const INTS: &[Dtype] = &[Dtype::I32, Dtype::U32];

fn matrix(tensor: &Raw) -> Result<[usize; 2], Unread> {
    let shape: Result<[usize; 2], _> = tensor.shape.as_slice().try_into();
    shape.map_err(|_| Unread::Packed(format!("its shape {:?} is not that of a matrix", tensor.shape)))
}

fn stored(tensor: &Raw, parts: Result<([usize; 2], Form), Unread>) -> Stored {
    let (shape, form) = match parts {
        Ok((shape, form)) => (shape.to_vec(), Ok(form)),
        Err(unread) => (tensor.shape.clone(), Err(unread)),
    };
    Stored { shape, shard: tensor.shard, form, order: Order::Plain, change: Change::None }
}

fn float(raw: &Raw) -> Encoding {
    raw.float().expect("checked to be a float")
}

fn fp8_stored(module: &str, tensor: &Raw, raw: &HashMap<String, Raw>, block: [usize; 2]) -> Stored {
    let form = || {
        let shape = matrix(tensor)?;
        let blocks = [shape[0].div_ceil(block[0]), shape[1].div_ceil(block[1])];
        let scales = part(raw, &format!("{module}.weight_scale_inv"), &blocks, FLOATS)?;
        let (at, ty) = (tensor.at(), float(scales));
        Ok((shape, Form::Fp8 { at, scales: scales.at(), ty, block }))
    };
    stored(tensor, form())
}

fn mlx_stored(module: &str, tensor: &Raw, raw: &HashMap<String, Raw>, mlx: Mlx) -> Stored {
    let form = || {
        let [rows, words] = matrix(tensor)?;
        let cols = mlx.cols(words)?;
        let (scales, minima) = mlx.parts(module, raw, &[rows, cols / mlx.group])?;
        let (ty, codes) = (float(scales), tensor.at());
        Ok(([rows, cols], Form::Mlx { codes, scales: scales.at(), minima: minima.at(), ty, mlx }))
    };
    stored(tensor, form())
}

impl Mlx {
    /// Columns of a row of so many words.
    pub fn cols(self, words: usize) -> Result<usize, Unread> {
        let bits = words.checked_mul(32).filter(|bits| bits.is_multiple_of(usize::from(self.bits)));
        let cols = bits.map(|bits| bits / usize::from(self.bits));
        cols.filter(|cols| cols.is_multiple_of(self.group)).ok_or_else(|| {
            Unread::Packed(format!(
                "rows of {words} words are no whole groups of {} codes of {} bits",
                self.group, self.bits
            ))
        })
    }

    /// Scales and minima.
    pub fn parts<'a>(
        self,
        module: &str,
        raw: &'a HashMap<String, Raw>,
        shape: &[usize],
    ) -> Result<(&'a Raw, &'a Raw), Unread> {
        let scales = part(raw, &format!("{module}.scales"), shape, FLOATS)?;
        Ok((scales, part(raw, &format!("{module}.biases"), shape, &[scales.dtype])?))
    }

    /// Reads rows; the codes are one stream of bits, lowest first.
    pub fn codes(
        self,
        source: &Source,
        files: Files<'_>,
        (codes, scales, minima, ty): (At, At, At, Encoding),
        rows: Range<usize>,
        raw: &mut Vec<u8>,
        out: &mut Codes,
    ) -> Result<(), SculptError> {
        let cols = source.cols;
        let row_bytes = cols * usize::from(self.bits) / 8;
        files.rows(codes, row_bytes, source.order, rows.clone(), raw)?;
        for (codes, bytes) in out.codes.chunks_exact_mut(cols).zip(raw.chunks_exact(row_bytes)) {
            for (c, code) in codes.iter_mut().enumerate() {
                *code = bits_at(bytes, c * usize::from(self.bits), self.bits);
            }
        }
        let groups = cols / self.group;
        let mut values = vec![0.0; rows.len() * groups];
        for (which, at) in [scales, minima].into_iter().enumerate() {
            floats(files, at, ty, source.order, groups, rows.clone(), raw, &mut values)?;
            for (level, &value) in out.levels.iter_mut().zip(&values) {
                level[which] = value;
            }
        }
        Ok(())
    }
}

/// Rows of a matrix of floats with `cols` columns.
#[expect(clippy::too_many_arguments, reason = "a place, a shape and two buffers")]
fn floats(
    files: Files<'_>,
    at: At,
    ty: Encoding,
    order: Order,
    cols: usize,
    rows: Range<usize>,
    raw: &mut Vec<u8>,
    out: &mut [f32],
) -> Result<(), SculptError> {
    let width = if ty == Encoding::F32 { 4 } else { 2 };
    files.rows(at, cols * width, order, rows, raw)?;
    let n = out.len();
    ty.decode_row(raw, n, 0, out);
    Ok(())
}

/// `bits` bits from bit `at` of a stream that begins with the lowest bit of its first byte.
fn bits_at(bytes: &[u8], at: usize, bits: u8) -> u8 {
    let (byte, shift) = (at / 8, at % 8);
    let next = bytes.get(byte + 1).copied().unwrap_or(0);
    let pair = u16::from_le_bytes([bytes[byte], next]);
    ((pair >> shift) & ((1 << bits) - 1)) as u8
}

/// The value of an 8-bit float with four bits of exponent (`float8_e4m3fn`: no infinity, one NaN of each sign).
fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Rows of 8-bit floats times the scales of their blocks.
pub(crate) fn fp8(
    source: &Source,
    files: Files<'_>,
    (at, scales, ty, block): (At, At, Encoding, [usize; 2]),
    rows: Range<usize>,
    raw: &mut Vec<u8>,
    values: &mut [f32],
) -> Result<(), SculptError> {
    let across = source.cols.div_ceil(block[1]);
    let blocks = rows.start / block[0]..rows.end.div_ceil(block[0]);
    let mut factors = vec![0.0; blocks.len() * across];
    floats(files, scales, ty, Order::Plain, across, blocks.clone(), raw, &mut factors)?;
    files.rows(at, source.cols, source.order, rows.clone(), raw)?;
    let table: Vec<f32> = (0..=u8::MAX).map(e4m3).collect();
    let of_rows = values.chunks_exact_mut(source.cols).zip(raw.chunks_exact(source.cols)).zip(rows);
    for ((values, bytes), row) in of_rows {
        let factors = &factors[(row / block[0] - blocks.start) * across..][..across];
        for (col, (value, &byte)) in values.iter_mut().zip(bytes).enumerate() {
            *value = table[usize::from(byte)] * factors[col / block[1]];
        }
    }
    Ok(())
}

/// Rows of MXFP4: sixteen bytes to a group of 32, an even column in the low nibble.
pub(crate) fn mxfp4(
    source: &Source,
    files: Files<'_>,
    (blocks, scales): (At, At),
    rows: Range<usize>,
    raw: &mut Vec<u8>,
    out: &mut Codes,
) -> Result<(), SculptError> {
    files.rows(blocks, source.cols / 2, source.order, rows.clone(), raw)?;
    for (pair, &byte) in out.codes.chunks_exact_mut(2).zip(raw.iter()) {
        (pair[0], pair[1]) = (byte & 15, byte >> 4);
    }
    files.rows(scales, source.cols / 32, source.order, rows, raw)?;
    for (level, &e) in out.levels.iter_mut().zip(raw.iter()) {
        *level = [ggml::e8m0_half(e), 0.0];
    }
    Ok(())
}

/// The codes that hold those of `bits` bits in groups of `group` columns.
fn regrouped(bits: u8, group: usize) -> Option<Uniform> {
    let fits = [128, 64, 32, 16].into_iter().find(|&g| group.is_multiple_of(g))?;
    affine(bits, fits)
}

/// Gives each group of the vault the levels of the file's larger group that it is in.
fn regroup(source: &Source, levels: &[[f32; 2]], group: usize, out: &mut Codes) {
    let Encoding::Uniform(uniform) = source.encoding else { unreachable!("kept as codes") };
    let (theirs, ours) = (source.cols.div_ceil(group), uniform.groups(source.cols));
    for (out, levels) in out.levels.chunks_exact_mut(ours).zip(levels.chunks_exact(theirs)) {
        for (g, level) in out.iter_mut().enumerate() {
            *level = levels[g * uniform.group() / group];
        }
    }
}
