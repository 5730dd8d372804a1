//! Tensors that hold several of the model's: the experts of a layer on top of each other, gate and up
//! interleaved or in one, keys and values apart.
//!
//! Each part gets the name that it has in checkpoints of one tensor per matrix, so that a family needs to know
//! those only: `model.layers.N.mlp.experts.E.gate_proj.weight`, and `model.layers.N.mlp.experts.gate_proj.bias`
//! (`[experts, width]`) for the biases of all.

use std::collections::HashMap;
use std::ops::Range;

use safetensors::Dtype;
use smoe_format::Encoding;

use super::packed::{Raw, float_stored, part};
use super::{At, Change, Codes, Files, Form, Mlx, Order, Packing, Part, Source, Stored, Unread, ggml};
use crate::error::SculptError;

/// More experts than this a layer of no model has (the largest published ones have 512): a header that says so is wrong.
const MAX_EXPERTS: usize = 1 << 16;

/// Puts the parts of `tensor` into `tensors` if it is a stack (or belongs to one); false if it is not. With `halves` an
/// expert's gate is not interleaved with its up, but lies before it. What has no weights, or too many experts, is no stack.
pub(crate) fn split(
    name: &str,
    tensor: &Raw,
    raw: &HashMap<String, Raw>,
    packing: &Packing,
    halves: bool,
    tensors: &mut HashMap<String, Stored>,
) -> bool {
    if tensor.shape.contains(&0) || tensor.shape.first().is_some_and(|&n| n > MAX_EXPERTS) {
        return false;
    }
    if let Some((experts, rest)) = name.split_once(".mlp.experts.") {
        if halves {
            let (both, down) = (&["gate_proj", "up_proj"][..], &["down_proj"][..]);
            return match rest {
                "gate_up_proj" => in_halves(&format!("{experts}.mlp.experts"), both, tensor, tensors),
                "down_proj" => in_halves(&format!("{experts}.mlp.experts"), down, tensor, tensors),
                _ => false,
            };
        }
        return gpt_oss(&format!("{experts}.mlp.experts"), rest, tensor, raw, tensors);
    }
    if let Some((module, rest)) = name.split_once(".block_sparse_moe.")
        && granite(&format!("{module}.block_sparse_moe"), rest, tensor, tensors)
    {
        return true;
    }
    if let Some((module, rest)) = name.split_once(".switch_mlp.") {
        return mlx(module, rest, tensor, raw, packing, tensors);
    }
    if let Some((module, rest)) = name.split_once(".self_attn.") {
        return mlx_latent(&format!("{module}.self_attn"), rest, tensor, raw, packing, tensors);
    }
    false
}

/// MLX's `kv_b_proj` of latent attention: what makes keys, turned, and what makes values, both head by head.
fn mlx_latent(
    module: &str,
    rest: &str,
    tensor: &Raw,
    raw: &HashMap<String, Raw>,
    packing: &Packing,
    tensors: &mut HashMap<String, Stored>,
) -> bool {
    match rest.split_once('.') {
        Some(("embed_q", "weight")) => {}
        // Taken with it.
        Some(("unembed_out", "weight" | "scales" | "biases") | ("embed_q", "scales" | "biases")) => {
            return true;
        }
        _ => return false,
    }
    let leaf = |name: &str, tensor: &Raw| -> Result<(Leaf, [usize; 3]), Unread> {
        let &[heads, rows, cols] = tensor.shape.as_slice() else {
            return Err(Unread::Packed(format!(
                "`{name}` has the shape {:?}, and not three dimensions",
                tensor.shape
            )));
        };
        match packing {
            Packing::Mlx { usual, other } if tensor.dtype == Dtype::U32 => {
                let mlx = other.get(name).copied().unwrap_or(*usual);
                let cols = mlx.cols(cols)?;
                let (scales, minima) = mlx.parts(name, raw, &[heads, rows, cols / mlx.group])?;
                let ty = scales.float().expect("checked to be a float");
                let (codes, scales, minima) = (tensor.at(), scales.at(), minima.at());
                Ok((Leaf::Mlx { codes, scales, minima, ty, mlx }, [heads, rows, cols]))
            }
            _ => match tensor.float() {
                Some(ty) => Ok((Leaf::Float(tensor.at(), ty), [heads, rows, cols])),
                None => Err(Unread::Type(format!("{:?}", tensor.dtype))),
            },
        }
    };
    let (k_name, v_name) = (format!("{module}.embed_q"), format!("{module}.unembed_out"));
    let mut shape = Vec::new();
    let form = (|| {
        let v = raw.get(&format!("{v_name}.weight"));
        let v = v.ok_or_else(|| Unread::Packed(format!("`{v_name}.weight` is missing")))?;
        let ((k, [heads, cols, keys]), (v, [heads_v, values, cols_v])) =
            (leaf(&k_name, tensor)?, leaf(&v_name, v)?);
        if (heads, cols) != (heads_v, cols_v) {
            return Err(Unread::Packed(format!(
                "the shapes of `{k_name}` and `{v_name}` contradict each other"
            )));
        }
        let rows = keys.checked_add(values).and_then(|height| heads.checked_mul(height));
        let too_large = || Unread::Packed(format!("`{k_name}` and `{v_name}` have too many rows"));
        shape = vec![rows.ok_or_else(too_large)?, cols];
        Ok(Form::Heads(Heads { k, v, keys, values }))
    })();
    let (shard, change) = (tensor.shard, Change::None);
    let stored = Stored { shape, shard, form, order: Order::Plain, change };
    tensors.insert(format!("{module}.kv_b_proj.weight"), stored);
    true
}

/// What MLX has done to a hybrid whose convolutions have their one input last: norms around one have it added.
pub(crate) fn mlx_hybrid(tensors: &mut HashMap<String, Stored>) {
    let conv = |name: &str| name.ends_with(".linear_attn.conv1d.weight");
    let turned = |stored: &Stored| matches!(stored.shape[..], [_, width, 1] if width > 1);
    if !tensors.iter().any(|(name, stored)| conv(name) && turned(stored)) {
        return;
    }
    for (name, stored) in tensors {
        if conv(name) && turned(stored) {
            stored.shape.swap(1, 2);
        } else if name.ends_with("norm.weight") && !name.ends_with(".linear_attn.norm.weight") {
            stored.change = Change::OneAdded;
        }
    }
}

/// The stacks of GPT-OSS: `gate_up_proj` with gate in the even places and up in the odd ones, floats with
/// inputs before outputs or MXFP4 with outputs before inputs.
fn gpt_oss(
    experts: &str,
    part_name: &str,
    tensor: &Raw,
    raw: &HashMap<String, Raw>,
    tensors: &mut HashMap<String, Stored>,
) -> bool {
    // Which rows of the file each projection has.
    let projections: &[(&str, usize, usize)] = if part_name.starts_with("gate_up_proj") {
        &[("gate_proj", 0, 2), ("up_proj", 1, 2)]
    } else {
        &[("down_proj", 0, 1)]
    };
    let mut put = |name: String, shape: [usize; 2], form: Result<Form, Unread>, order: Order| {
        tensors.insert(
            name,
            Stored { shape: shape.to_vec(), shard: tensor.shard, form, order, change: Change::None },
        );
    };
    match (part_name, tensor.shape.as_slice()) {
        ("gate_up_proj" | "down_proj", &[n, cols, height]) => {
            let Some(ty) = tensor.float() else { return false };
            let width = if ty == Encoding::F32 { 4 } else { 2 };
            for expert in 0..n {
                for &(projection, first, step) in projections {
                    let at = tensor.at().skip((width * (expert * cols * height + first)) as u64);
                    let form = Form::Strided { at, ty, row: step, col: height };
                    let name = format!("{experts}.{expert}.{projection}.weight");
                    put(name, [height / step, cols], Ok(form), Order::Plain);
                }
            }
            true
        }
        ("gate_up_proj_bias" | "down_proj_bias", &[n, height]) => {
            let Some(ty) = tensor.float() else { return false };
            let width = if ty == Encoding::F32 { 4 } else { 2 };
            for &(projection, first, step) in projections {
                let at = tensor.at().skip((width * first) as u64);
                let form = Form::Strided { at, ty, row: height, col: step };
                put(format!("{experts}.{projection}.bias"), [n, height / step], Ok(form), Order::Plain);
            }
            true
        }
        ("gate_up_proj_blocks" | "down_proj_blocks", &[n, height, groups, 16]) => {
            let stem = part_name.trim_end_matches("_blocks");
            let scales = part(raw, &format!("{experts}.{stem}_scales"), &[n, height, groups], &[Dtype::U8])
                .map(Raw::at);
            for expert in 0..n {
                for &(projection, first, step) in projections {
                    let form = scales.clone().map(|scales| Form::Mxfp4 {
                        blocks: tensor.at().skip((expert * height * groups * 16) as u64),
                        scales: scales.skip((expert * height * groups) as u64),
                    });
                    let name = format!("{experts}.{expert}.{projection}.weight");
                    put(name, [height / step, groups * 32], form, Order::Step { first, step });
                }
            }
            true
        }
        ("gate_up_proj_scales" | "down_proj_scales", _) => true,
        _ => false,
    }
}

/// Granite's stacks, which have words of their own for the projections.
fn granite(module: &str, rest: &str, tensor: &Raw, tensors: &mut HashMap<String, Stored>) -> bool {
    let projections: &[&str] = match rest {
        "input_linear.weight" => &["w1", "w3"],
        "output_linear.weight" => &["w2"],
        _ => return false,
    };
    in_halves(&format!("{module}.experts"), projections, tensor, tensors)
}

/// Stacks of outputs before inputs: of each expert first all rows of the first projection, then those of the next.
fn in_halves(
    experts: &str,
    projections: &[&str],
    tensor: &Raw,
    tensors: &mut HashMap<String, Stored>,
) -> bool {
    let &[n, height, cols] = tensor.shape.as_slice() else { return false };
    if !height.is_multiple_of(projections.len()) {
        return false;
    }
    let rows = height / projections.len();
    for expert in 0..n {
        for (i, projection) in projections.iter().enumerate() {
            let first = (expert * projections.len() + i) * rows;
            let name = format!("{experts}.{expert}.{projection}.weight");
            tensors.insert(name, float_stored(&slice(tensor, first, rows, cols)));
        }
    }
    true
}

/// Rows of a stack of matrices, as a tensor.
fn slice(tensor: &Raw, first: usize, rows: usize, cols: usize) -> Raw {
    let offset = tensor.offset + (first * cols * tensor.dtype.bitsize() / 8) as u64;
    Raw { shape: vec![rows, cols], offset, ..tensor.clone() }
}

/// MLX's stacks: outputs before inputs, packed or not.
fn mlx(
    module: &str,
    rest: &str,
    tensor: &Raw,
    raw: &HashMap<String, Raw>,
    packing: &Packing,
    tensors: &mut HashMap<String, Stored>,
) -> bool {
    let Some((projection, kind)) = rest.split_once('.') else { return false };
    // Mixtral's own names, which MLX does not keep.
    let name = |expert: usize| match (module.ends_with(".block_sparse_moe"), projection) {
        (true, "gate_proj") => format!("{module}.experts.{expert}.w1.weight"),
        (true, "down_proj") => format!("{module}.experts.{expert}.w2.weight"),
        (true, "up_proj") => format!("{module}.experts.{expert}.w3.weight"),
        _ => format!("{module}.experts.{expert}.{projection}.weight"),
    };
    let packed = |w: &Raw| w.dtype == Dtype::U32;
    let this = format!("{module}.switch_mlp.{projection}");
    match (kind, packing, tensor.shape.as_slice()) {
        ("scales" | "biases", _, _) => raw.get(&format!("{this}.weight")).is_some_and(packed),
        ("weight", Packing::Mlx { usual, other }, &[n, rows, words]) if packed(tensor) => {
            let mlx = other.get(&this).copied().unwrap_or(*usual);
            let parts = mlx.cols(words).and_then(|cols| {
                let (scales, minima) = mlx.parts(&this, raw, &[n, rows, cols / mlx.group])?;
                Ok((cols, scales.at(), minima.at(), scales.float().expect("checked to be a float")))
            });
            for expert in 0..n {
                let form = parts.clone().map(|(cols, scales, minima, ty)| {
                    let width = if ty == Encoding::F32 { 4 } else { 2 };
                    let levels = (expert * rows * (cols / mlx.group) * width) as u64;
                    let (scales, minima) = (scales.skip(levels), minima.skip(levels));
                    let codes = tensor.at().skip((4 * expert * rows * words) as u64);
                    Form::Mlx { codes, scales, minima, ty, mlx }
                });
                let cols = parts.as_ref().map_or(words, |parts| parts.0);
                let (shape, shard) = (vec![rows, cols], tensor.shard);
                tensors.insert(
                    name(expert),
                    Stored { shape, shard, form, order: Order::Plain, change: Change::None },
                );
            }
            true
        }
        ("weight", _, &[n, rows, cols]) => {
            for expert in 0..n {
                tensors.insert(name(expert), float_stored(&slice(tensor, expert * rows, rows, cols)));
            }
            true
        }
        _ => false,
    }
}

/// DeepSeek's `kv_b_proj` in newer GGUF files and in MLX's: `k` is `[heads, cols, keys]`, `v` is `[heads, values, cols]`. A
/// head's rows are its keys, which are columns of `k`, and then its values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub k: Leaf,
    pub v: Leaf,
    pub keys: usize,
    pub values: usize,
}

/// A part of [`Heads`] or of [`Joined`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Leaf {
    Float(At, Encoding),
    Ggml(At, ggml::Kind),
    Mlx { codes: At, scales: At, minima: At, ty: Encoding, mlx: Mlx },
}

impl Leaf {
    const fn has_codes(self) -> bool {
        !matches!(self, Self::Float(..))
    }

    fn places(self) -> Vec<At> {
        match self {
            Self::Float(at, _) | Self::Ggml(at, _) => vec![at],
            Self::Mlx { codes, scales, minima, .. } => vec![codes, scales, minima],
        }
    }

    fn source(self, rows: usize, cols: usize) -> Source {
        let form = match self {
            Self::Float(at, ty) => Form::Float { at, ty },
            Self::Ggml(at, kind) => Form::Ggml { at, kind },
            Self::Mlx { codes, scales, minima, ty, mlx } => Form::Mlx { codes, scales, minima, ty, mlx },
        };
        Source { encoding: form.encoding(), rows, cols, form, order: Order::Plain, part: Part::Whole }
    }
}

impl Heads {
    /// Where its tensors are.
    pub fn places(&self) -> Vec<At> {
        [self.k, self.v].into_iter().flat_map(Leaf::places).collect()
    }

    pub fn has_codes(&self) -> bool {
        self.k.has_codes() || self.v.has_codes()
    }

    pub fn weights(
        &self,
        source: &Source,
        files: Files<'_>,
        rows: Range<usize>,
        raw: &mut Vec<u8>,
        codes: &mut Codes,
        out: &mut [f32],
    ) -> Result<(), SculptError> {
        let (cols, height) = (source.cols, self.keys + self.values);
        let k = self.k.source(source.rows / height * cols, self.keys);
        let v = self.v.source(source.rows / height * self.values, cols);
        let (mut keys, mut loaded, mut row_values) = (Vec::new(), None, Vec::new());
        for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
            let (head, i) = (row / height, row % height);
            if i < self.keys {
                if loaded != Some(head) {
                    k.read_rows(files, head * cols..(head + 1) * cols, raw, codes, &mut keys)?;
                    loaded = Some(head);
                }
                for (c, value) in out.iter_mut().enumerate() {
                    *value = keys[c * self.keys + i];
                }
            } else {
                let row = head * self.values + i - self.keys;
                v.read_rows(files, row..row + 1, raw, codes, &mut row_values)?;
                out.copy_from_slice(&row_values);
            }
        }
        Ok(())
    }
}

/// Qwen3-Next's `in_proj_qkvz` in GGUF files: all queries, then all keys, then all values in one tensor, and gates in
/// another. A key head's rows are its query, its key, its values and their gates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Joined {
    pub qkv: Leaf,
    pub gate: Leaf,
    /// Key heads.
    pub heads: usize,
    /// Width of a key.
    pub key: usize,
    /// Width of all values of a key head.
    pub values: usize,
}

impl Joined {
    /// Where its tensors are.
    pub fn places(&self) -> Vec<At> {
        [self.qkv, self.gate].into_iter().flat_map(Leaf::places).collect()
    }

    pub fn has_codes(&self) -> bool {
        self.qkv.has_codes() || self.gate.has_codes()
    }

    pub fn weights(
        &self,
        source: &Source,
        files: Files<'_>,
        rows: Range<usize>,
        raw: &mut Vec<u8>,
        codes: &mut Codes,
        out: &mut [f32],
    ) -> Result<(), SculptError> {
        let &Self { heads, key, values, .. } = self;
        let cols = source.cols;
        let qkv = self.qkv.source(heads * (2 * key + values), cols);
        let gate = self.gate.source(heads * values, cols);
        let mut found = Vec::new();
        for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
            let (head, i) = (row / (2 * (key + values)), row % (2 * (key + values)));
            let (source, row) = if i < 2 * key {
                (&qkv, i / key * heads * key + head * key + i % key)
            } else if i < 2 * key + values {
                (&qkv, 2 * heads * key + head * values + i - 2 * key)
            } else {
                (&gate, head * values + i - 2 * key - values)
            };
            source.read_rows(files, row..row + 1, raw, codes, &mut found)?;
            out.copy_from_slice(&found);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;
    use smoe_format::half::f32_to_bf16;

    use super::*;
    use crate::Checkpoint;
    use crate::family::Place;

    /// Writes `tensors` as a checkpoint.
    fn write(dir: &Path, config: &serde_json::Value, tensors: &[(&str, &str, &[usize], Vec<u8>)]) {
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, dtype, shape, bytes) in tensors {
            let start = data.len();
            data.extend_from_slice(bytes);
            let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]});
            header.insert((*name).to_owned(), entry);
        }
        let header = serde_json::Value::Object(header).to_string();
        let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat();
        std::fs::write(dir.join("model.safetensors"), file).expect("written");
        std::fs::write(dir.join("config.json"), config.to_string()).expect("written");
    }

    fn place(name: &str, shape: &[usize]) -> Place {
        Place { name: name.to_owned(), shape: shape.to_vec(), part: Part::Whole }
    }

    fn rows(checkpoint: &Checkpoint, name: &str, shape: [usize; 2], rows: Range<usize>) -> Vec<f32> {
        let source = checkpoint.source(&place(name, &shape)).expect("readable").expect("there");
        let mut values = Vec::new();
        checkpoint.read_rows(&source, rows, &mut Vec::new(), &mut values).expect("read");
        values
    }

    #[test]
    fn gate_and_up_are_taken_out_of_their_stack() {
        let dir = tempfile::tempdir().expect("dir");
        let (n, cols, f) = (2, 3, 4);
        // Each weight says where it is: expert, projection, row, column.
        let number = |e: usize, p: usize, r: usize, c: usize| (64 * e + 32 * p + 4 * r + c) as f32;
        let bytes =
            |values: Vec<f32>| values.iter().flat_map(|&v| f32_to_bf16(v).to_le_bytes()).collect::<Vec<u8>>();
        let (mut gate_up, mut down, mut bias) = (Vec::new(), Vec::new(), Vec::new());
        for e in 0..n {
            for c in 0..cols {
                gate_up.extend((0..2 * f).map(|r| number(e, r % 2, r / 2, c)));
            }
            for c in 0..f {
                down.extend((0..cols).map(|r| number(e, 2, r, c)));
            }
            bias.extend((0..2 * f).map(|r| number(e, r % 2, r / 2, 3)));
        }
        let at = "model.layers.0.mlp.experts";
        write(
            dir.path(),
            &json!({}),
            &[
                (&format!("{at}.gate_up_proj"), "BF16", &[n, cols, 2 * f], bytes(gate_up)),
                (&format!("{at}.down_proj"), "BF16", &[n, f, cols], bytes(down)),
                (&format!("{at}.gate_up_proj_bias"), "BF16", &[n, 2 * f], bytes(bias)),
            ],
        );
        let checkpoint = Checkpoint::open(dir.path()).expect("opened");
        for (p, projection) in ["gate", "up"].into_iter().enumerate() {
            for e in 0..n {
                let name = format!("{at}.{e}.{projection}_proj.weight");
                let wanted: Vec<f32> =
                    (1..3).flat_map(|r| (0..cols).map(move |c| number(e, p, r, c))).collect();
                assert_eq!(rows(&checkpoint, &name, [f, cols], 1..3), wanted, "{name}");
            }
            let wanted: Vec<f32> = (0..f).map(|r| number(1, p, r, 3)).collect();
            assert_eq!(rows(&checkpoint, &format!("{at}.{projection}_proj.bias"), [n, f], 1..2), wanted);
        }
        let wanted: Vec<f32> = (0..cols).flat_map(|r| (0..f).map(move |c| number(1, 2, r, c))).collect();
        assert_eq!(rows(&checkpoint, &format!("{at}.1.down_proj.weight"), [cols, f], 0..cols), wanted);
    }

    #[test]
    fn stacks_that_no_file_holds_are_none() {
        let dir = tempfile::tempdir().expect("dir");
        let layer = "model.layers.0";
        for (n, cols) in [(1 << 40, 0), (MAX_EXPERTS + 1, 1), (0, 1)] {
            let mut all = Vec::new();
            for (name, shape) in [
                (format!("{layer}.mlp.switch_mlp.gate_proj.weight"), vec![n, 1, cols]),
                (format!("{layer}.mlp.experts.gate_up_proj"), vec![n, cols, 2]),
                (format!("{layer}.mlp.experts.down_proj_bias"), vec![n, cols]),
                (format!("{layer}.block_sparse_moe.input_linear.weight"), vec![n, 2, cols]),
            ] {
                let len = 2 * shape.iter().product::<usize>();
                all.push((name, shape, vec![0; len]));
            }
            let all: Vec<_> =
                all.iter().map(|(name, shape, bytes)| (&**name, "BF16", &**shape, bytes.clone())).collect();
            write(dir.path(), &json!({}), &all);
            let Ok(checkpoint) = Checkpoint::open(dir.path()) else { continue };
            assert_eq!(checkpoint.names().count(), all.len(), "{n} {cols}");
        }
    }

    #[test]
    fn gates_lie_before_what_they_open() {
        let dir = tempfile::tempdir().expect("dir");
        let (n, d, f) = (3, 5, 2);
        let bytes = |first: usize, len: usize| -> Vec<u8> {
            (first..first + len).flat_map(|v| f32_to_bf16(v as f32).to_le_bytes()).collect()
        };
        let at = "model.language_model.layers.1.mlp.experts";
        write(
            dir.path(),
            &json!({"model_type": "qwen3_5_moe"}),
            &[
                (&format!("{at}.gate_up_proj"), "BF16", &[n, 2 * f, d], bytes(0, n * 2 * f * d)),
                (&format!("{at}.down_proj"), "BF16", &[n, d, f], bytes(100, n * d * f)),
            ],
        );
        let checkpoint = Checkpoint::open(dir.path()).expect("opened");
        for e in 0..n {
            for (name, rows_of, cols, first) in [
                ("gate_proj", f, d, e * 2 * f * d),
                ("up_proj", f, d, (e * 2 + 1) * f * d),
                ("down_proj", d, f, 100 + e * d * f),
            ] {
                let name = format!("{at}.{e}.{name}.weight");
                let wanted: Vec<f32> = (first..first + rows_of * cols).map(|v| v as f32).collect();
                assert_eq!(rows(&checkpoint, &name, [rows_of, cols], 0..rows_of), wanted, "{name}");
            }
        }
        let at = "model.layers.4.block_sparse_moe";
        write(
            dir.path(),
            &json!({}),
            &[
                (&format!("{at}.input_linear.weight"), "BF16", &[n, 2 * f, d], bytes(0, n * 2 * f * d)),
                (&format!("{at}.output_linear.weight"), "BF16", &[n, d, f], bytes(100, n * d * f)),
                (&format!("{at}.router.layer.weight"), "BF16", &[n, d], bytes(200, n * d)),
            ],
        );
        let checkpoint = Checkpoint::open(dir.path()).expect("opened");
        for e in 0..n {
            for (name, rows_of, cols, first) in [
                ("w1", f, d, e * 2 * f * d),
                ("w3", f, d, (e * 2 + 1) * f * d),
                ("w2", d, f, 100 + e * d * f),
            ] {
                let name = format!("{at}.experts.{e}.{name}.weight");
                let wanted: Vec<f32> = (first..first + rows_of * cols).map(|v| v as f32).collect();
                assert_eq!(rows(&checkpoint, &name, [rows_of, cols], 0..rows_of), wanted, "{name}");
            }
        }
        let router = format!("{at}.router.layer.weight");
        assert_eq!(rows(&checkpoint, &router, [n, d], 0..1), [200.0, 201.0, 202.0, 203.0, 204.0]);
    }

    #[test]
    fn heads_whose_rows_cannot_be_counted_are_not_read() {
        let raw = |shape: [usize; 3]| Raw { shard: 0, dtype: Dtype::F32, shape: shape.to_vec(), offset: 0 };
        let at = "model.layers.0.self_attn";
        for (k, v) in [([2, 64, usize::MAX], [2, 1, 64]), ([3, 64, usize::MAX / 2], [3, 1, 64])] {
            let all = HashMap::from([(format!("{at}.unembed_out.weight"), raw(v))]);
            let mut tensors = HashMap::new();
            let name = format!("{at}.embed_q.weight");
            assert!(split(&name, &raw(k), &all, &Packing::Floats, false, &mut tensors));
            match &tensors[&format!("{at}.kv_b_proj.weight")].form {
                Err(Unread::Packed(why)) => assert!(why.contains("too many rows"), "{why}"),
                _ => panic!("{k:?} is read"),
            }
        }
    }

    #[test]
    fn four_bit_floats_are_taken_out_of_their_stack() {
        let dir = tempfile::tempdir().expect("dir");
        let (n, f, groups) = (2, 3, 2);
        let at = "model.layers.0.mlp.experts";
        let blocks: Vec<u8> = (0..n * 2 * f * groups * 16).map(|i| (i * 37 % 251) as u8).collect();
        let scales: Vec<u8> = (0..n * 2 * f * groups).map(|i| 120 + (i % 9) as u8).collect();
        let config = json!({"quantization_config": {"quant_method": "mxfp4"}});
        let names = [format!("{at}.gate_up_proj_blocks"), format!("{at}.gate_up_proj_scales")];
        let whole: [(&str, &str, &[usize], Vec<u8>); 2] = [
            (&names[0], "U8", &[n, 2 * f, groups, 16], blocks.clone()),
            (&names[1], "U8", &[n, 2 * f, groups], scales.clone()),
        ];
        write(dir.path(), &config, &whole);
        let checkpoint = Checkpoint::open(dir.path()).expect("opened");
        let value = |nibble: u8| {
            let (exponent, mantissa) = (nibble >> 1 & 3, f32::from(nibble & 1));
            let magnitude = if exponent == 0 {
                mantissa / 2.0
            } else {
                (1.0 + mantissa / 2.0) * f32::from(1u8 << (exponent - 1))
            };
            if nibble < 8 { magnitude } else { -magnitude }
        };
        for (p, projection) in ["gate", "up"].into_iter().enumerate() {
            let name = format!("{at}.1.{projection}_proj.weight");
            let mut wanted = Vec::new();
            for r in 0..f {
                let line = (2 * f + 2 * r + p) * groups;
                for c in 0..32 * groups {
                    let byte = blocks[line * 16 + c / 2];
                    let nibble = if c % 2 == 0 { byte & 15 } else { byte >> 4 };
                    wanted.push(value(nibble) * 2f32.powi(i32::from(scales[line + c / 32]) - 127));
                }
            }
            assert_eq!(rows(&checkpoint, &name, [f, 32 * groups], 0..f), wanted, "{name}");
        }
        write(dir.path(), &config, &whole[..1]);
        let checkpoint = Checkpoint::open(dir.path()).expect("opened");
        let up = place(&format!("{at}.0.up_proj.weight"), &[f, 64]);
        let error = checkpoint.source(&up).expect_err("no scales");
        assert!(error.to_string().contains("gate_up_proj_scales` is missing"), "{error}");
    }
}
