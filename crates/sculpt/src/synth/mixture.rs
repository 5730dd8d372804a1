//! A mixture of experts out of a dense model: trained weights for those who measure codes.
//!
//! Each feed-forward part is cut into experts of equal width, `down` times their number, and the router is zero: every
//! token then visits all of them with equal weights, which is the dense model's function. It says what codes do to
//! weights that were trained, and nothing about routing.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::ops::Range;
use std::path::Path;

use serde_json::{Map, Value, json};
use smoe_format::half::f32_to_bf16;

use crate::checkpoint::Checkpoint;
use crate::error::SculptError;
use crate::family::Place;
use crate::source::Part;

/// Writes a bf16 checkpoint of `n_experts` experts a layer, a power of two so that their weights are exact, into the
/// directory `out`, out of a dense GGUF file of llama's architecture; tokenizer and template come with it.
///
/// # Errors
/// If the file cannot be read or is of another architecture, if its feed-forward part cannot be cut into so many, or if
/// the checkpoint cannot be written.
pub fn mixture_of_dense(gguf: &Path, n_experts: usize, out: &Path) -> Result<(), SculptError> {
    let checkpoint = Checkpoint::open_dense(gguf, n_experts)?;
    let config = checkpoint.config();
    let size = |key: &str| config[key].as_u64().unwrap_or(0) as usize;
    let (d_model, d_expert, layers) =
        (size("hidden_size"), size("intermediate_size"), size("num_hidden_layers"));
    let (q, kv) =
        (size("num_attention_heads") * size("head_dim"), size("num_key_value_heads") * size("head_dim"));
    let d_ffn = n_experts * d_expert;

    let mut writer = Writer::default();
    writer.copy("model.embed_tokens.weight", &[size("vocab_size"), d_model]);
    writer.copy("model.norm.weight", &[d_model]);
    if checkpoint.has("lm_head.weight") {
        writer.copy("lm_head.weight", &[size("vocab_size"), d_model]);
    }
    for layer in 0..layers {
        let prefix = format!("model.layers.{layer}");
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            writer.copy(&format!("{prefix}.{norm}.weight"), &[d_model]);
        }
        for (name, shape) in
            [("q", [q, d_model]), ("k", [kv, d_model]), ("v", [kv, d_model]), ("o", [d_model, q])]
        {
            writer.copy(&format!("{prefix}.self_attn.{name}_proj.weight"), &shape);
        }
        let moe = format!("{prefix}.block_sparse_moe");
        writer.put(format!("{moe}.gate.weight"), vec![n_experts, d_model], Of::Zeros);
        for expert in 0..n_experts {
            let cut = expert * d_expert..(expert + 1) * d_expert;
            for (projection, w) in [("gate", "w1"), ("up", "w3")] {
                let place = place(&format!("{moe}.{projection}_proj.weight"), &[d_ffn, d_model]);
                let name = format!("{moe}.experts.{expert}.{w}.weight");
                writer.put(name, vec![d_expert, d_model], Of::Rows(place, cut.clone()));
            }
            let place = place(&format!("{moe}.down_proj.weight"), &[d_model, d_ffn]);
            let name = format!("{moe}.experts.{expert}.w2.weight");
            writer.put(name, vec![d_model, d_expert], Of::Columns(place, cut, n_experts as f32));
        }
    }
    fs::create_dir_all(out).map_err(SculptError::io("create", out))?;
    for side in checkpoint.side_files()? {
        let path = out.join(side.name);
        fs::write(&path, &side.read()?).map_err(SculptError::io("write", &path))?;
    }
    writer.write(&checkpoint, &out.join("model.safetensors"))
}

fn place(name: &str, shape: &[usize]) -> Place {
    Place { name: name.to_owned(), shape: shape.to_vec(), part: Part::Whole }
}

/// Where a tensor's weights come from.
enum Of {
    All(Place),
    Rows(Place, Range<usize>),
    /// Of every row, times a factor.
    Columns(Place, Range<usize>, f32),
    Zeros,
}

/// A safetensors file to come.
#[derive(Default)]
struct Writer {
    tensors: Vec<(String, Vec<usize>, Of)>,
}

impl Writer {
    fn copy(&mut self, name: &str, shape: &[usize]) {
        self.put(name.to_owned(), shape.to_vec(), Of::All(place(name, shape)));
    }

    fn put(&mut self, name: String, shape: Vec<usize>, from: Of) {
        self.tensors.push((name, shape, from));
    }

    fn write(&self, checkpoint: &Checkpoint, path: &Path) -> Result<(), SculptError> {
        let mut entries = Map::new();
        let mut at = 0;
        for (name, shape, _) in &self.tensors {
            let end = at + 2 * shape.iter().product::<usize>();
            entries
                .insert(name.clone(), json!({ "dtype": "BF16", "shape": shape, "data_offsets": [at, end] }));
            at = end;
        }
        let header = Value::Object(entries).to_string();
        let file = File::create(path).map_err(SculptError::io("create", path))?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let mut put = |bytes: &[u8]| out.write_all(bytes).map_err(SculptError::io("write", path));
        put(&(header.len() as u64).to_le_bytes())?;
        put(header.as_bytes())?;
        let (mut raw, mut values, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        for (_, shape, from) in &self.tensors {
            let mut read = |place: &Place, rows: Option<Range<usize>>, values: &mut Vec<f32>| {
                let missing = || SculptError::MissingTensors { count: 1, examples: vec![place.name.clone()] };
                let source = checkpoint.source(place)?.ok_or_else(missing)?;
                checkpoint.read_rows(&source, rows.unwrap_or(0..source.rows), &mut raw, values)
            };
            match from {
                Of::All(place) => read(place, None, &mut values)?,
                Of::Rows(place, rows) => read(place, Some(rows.clone()), &mut values)?,
                Of::Columns(place, columns, factor) => {
                    read(place, None, &mut values)?;
                    let rows = values.chunks_exact(place.shape[1]);
                    values = rows.flat_map(|row| &row[columns.clone()]).map(|w| w * factor).collect();
                }
                Of::Zeros => {
                    values.clear();
                    values.resize(shape.iter().product(), 0.0);
                }
            }
            bytes.clear();
            bytes.extend(values.iter().flat_map(|&w| f32_to_bf16(w).to_le_bytes()));
            put(&bytes)?;
        }
        out.flush().map_err(SculptError::io("write", path))
    }
}
