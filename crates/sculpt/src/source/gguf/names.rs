//! Tensors of llama.cpp's architectures, under the names of the checkpoints they were made from.

use std::collections::{BTreeMap, HashMap};

use serde_json::Value as Json;

use super::arch::{Hybrid, PARTS};
use super::model::Keys;
use super::{Tensor, Type, stored};
use crate::error::SculptError;
use crate::source::stacked::{Heads, Joined, Leaf};
use crate::source::{At, Change, Form, Order, Part, Stored, Tiling, Unread};

/// All tensors under the names of the family. Those that have none keep their own.
pub(super) fn names(
    keys: &Keys<'_>,
    config: &Json,
    tensors: &BTreeMap<String, Tensor>,
) -> Result<HashMap<String, Stored>, SculptError> {
    let (arch, metadata) = (keys.arch, keys.metadata);
    let size = |key: &str| config[key].as_u64().unwrap_or(0) as usize;
    let head_dim = size("head_dim");
    let delta = arch.hybrid.map(|kind| Delta {
        kind,
        key_heads: size("linear_num_key_heads"),
        value_heads: size("linear_num_value_heads"),
        key: size("linear_key_head_dim"),
        value: size("linear_value_head_dim"),
    });
    // Norms around one.
    let norm = if delta.is_some() { Change::OneAdded } else { Change::None };
    let n_experts = keys.number("expert_count")?.unwrap_or(0);
    let stack = |name: &str, n: usize| match n as u64 == n_experts {
        true => Ok(()),
        false => Err(SculptError::Gguf {
            file: metadata.file.clone(),
            at: 0,
            what: format!("`{name}` has {n} experts, `{}` says {n_experts}", keys.key("expert_count")),
        }),
    };
    let mut out = HashMap::new();
    for (name, tensor) in tensors {
        let plain = || stored(tensor, tensor.shape.clone(), 0, Order::Plain);
        let top = match name.as_str() {
            "token_embd.weight" => Some("model.embed_tokens.weight"),
            "output_norm.weight" => Some("model.norm.weight"),
            "output.weight" => Some("lm_head.weight"),
            _ => None,
        };
        if let Some(top) = top {
            let change = if top == "model.norm.weight" { norm } else { Change::None };
            out.insert(top.to_owned(), Stored { change, ..plain() });
            continue;
        }
        let Some((layer, part, kind)) = layer_part(name) else {
            out.insert(name.clone(), plain());
            continue;
        };
        let prefix = format!("model.layers.{layer}");
        let ffn = format!("{prefix}.{}", arch.ffn);
        if let Some(&(_, ours)) = PARTS.iter().find(|(theirs, _)| *theirs == part) {
            let permuted = arch.permuted && matches!(part, "attn_q" | "attn_k");
            let order = match permuted {
                true if head_dim == 0 || head_dim % 2 == 1 || !tensor.shape[0].is_multiple_of(head_dim) => {
                    return Err(
                        metadata.bad(&keys.key("attention.key_length"), "a part of the queries' width")
                    );
                }
                // A bias lies in one row; its elements are the ones that are permuted.
                true if tensor.shape.len() == 1 => {
                    return Err(metadata.bad(name, "no bias where queries are permuted"));
                }
                true => Order::Rope { head_dim },
                false => Order::Plain,
            };
            let change = if part.ends_with("_norm") { norm } else { Change::None };
            let found = Stored { change, ..stored(tensor, tensor.shape.clone(), 0, order) };
            out.insert(format!("{prefix}.{ours}.{kind}"), found);
            continue;
        }
        if let Some(delta) = &delta
            && let Some((ours, found)) =
                delta.part(part, tensor, |part| tensors.get(&format!("blk.{layer}.{part}.weight")))
        {
            out.extend(found.map(|found| (format!("{prefix}.linear_attn.{ours}"), found)));
            continue;
        }
        let expert_name = |projection: &str, expert: usize| match (arch.mixtral, projection) {
            (true, "gate") => format!("{ffn}.experts.{expert}.w1.{kind}"),
            (true, "down") => format!("{ffn}.experts.{expert}.w2.{kind}"),
            (true, _) => format!("{ffn}.experts.{expert}.w3.{kind}"),
            _ => format!("{ffn}.experts.{expert}.{projection}_proj.{kind}"),
        };
        match (part, tensor.shape.as_slice()) {
            ("attn_sinks", _) => _ = out.insert(format!("{prefix}.self_attn.sinks"), plain()),
            ("ffn_gate_inp", _) => _ = out.insert(format!("{ffn}.{}.{kind}", arch.router), plain()),
            ("ffn_gate_inp_shexp", shape) => {
                // A row that is written as a vector.
                let row = vec![1, shape.last().copied().unwrap_or(0)];
                out.insert(
                    format!("{ffn}.{}_gate.{kind}", arch.shared),
                    stored(tensor, row, 0, Order::Plain),
                );
            }
            ("exp_probs_b", _) => {
                out.insert(format!("{ffn}.{}", arch.correction), plain());
            }
            ("attn_k_b" | "attn_v_b", _) => {
                if part == "attn_k_b"
                    && let Some(pair) = heads(tensor, tensors.get(&format!("blk.{layer}.attn_v_b.weight")))
                {
                    out.insert(format!("{prefix}.self_attn.kv_b_proj.weight"), pair);
                }
            }
            ("ffn_gate_up_exps", &[n, height, cols]) if height.is_multiple_of(2) => {
                stack(name, n)?;
                // Of each expert the gate's rows, and then those of up.
                let half = vec![height / 2, cols];
                let bytes = matrix_bytes(tensor, height / 2, cols);
                for i in 0..2 * n {
                    let name = expert_name(["gate", "up"][i % 2], i / 2);
                    out.insert(name, stored(tensor, half.clone(), i as u64 * bytes, Order::Plain));
                }
            }
            _ => {
                let Some((projection, of)) = feed_forward(part) else {
                    out.insert(name.clone(), plain());
                    continue;
                };
                match (of, tensor.shape.as_slice()) {
                    (Of::Dense, _) => _ = out.insert(format!("{ffn}.{projection}_proj.{kind}"), plain()),
                    (Of::Shared, _) => {
                        out.insert(format!("{ffn}.{}.{projection}_proj.{kind}", arch.shared), plain());
                    }
                    (Of::One(expert), _) => _ = out.insert(expert_name(projection, expert), plain()),
                    (Of::All, &[n, rows, cols]) => {
                        stack(name, n)?;
                        let each = matrix_bytes(tensor, rows, cols);
                        for expert in 0..n {
                            let skip = expert as u64 * each;
                            let part = stored(tensor, vec![rows, cols], skip, Order::Plain);
                            out.insert(expert_name(projection, expert), part);
                        }
                    }
                    (Of::All, &[_, _]) if kind == "bias" => {
                        out.insert(format!("{ffn}.experts.{projection}_proj.bias"), plain());
                    }
                    (Of::All, _) => return Err(metadata.bad(name, "a tensor of three dimensions")),
                }
            }
        }
    }
    Ok(out)
}

/// Bytes of so many rows of a tensor.
fn matrix_bytes(tensor: &Tensor, rows: usize, cols: usize) -> u64 {
    let (unit, bytes) = tensor.kind.unit().unwrap_or((1, 1));
    (rows * (cols / unit) * bytes) as u64
}

/// The widths of gated delta nets.
struct Delta {
    kind: Hybrid,
    key_heads: usize,
    value_heads: usize,
    key: usize,
    value: usize,
}

impl Delta {
    /// The name and the tensor that a part of a layer is, if it is one of a gated delta net; no tensor if it was taken
    /// together with another one.
    fn part<'t>(
        &self,
        part: &str,
        tensor: &Tensor,
        other: impl Fn(&str) -> Option<&'t Tensor>,
    ) -> Option<(&'static str, Option<Stored>)> {
        let tiled = self.kind == Hybrid::Tiled;
        let rows = |first: usize, width: usize| match self.tiling(first, width) {
            Some(tiling) if tiled => Order::Tiled(tiling),
            _ => Order::Plain,
        };
        let of_rows = |order| stored(tensor, tensor.shape.clone(), 0, order);
        // Whatever the file says; shapes are checked later.
        let values_from = self.key_heads.saturating_mul(self.key).saturating_mul(2);
        let found = match part {
            "attn_qkv" if tiled => ("in_proj_qkv.weight", of_rows(rows(values_from, self.value))),
            "attn_gate" if tiled => ("in_proj_z.weight", of_rows(rows(0, self.value))),
            "attn_qkv" => return Some(("in_proj_qkvz.weight", self.joined(tensor, other("attn_gate")))),
            "attn_gate" => return Some(("", None)),
            // Files of before queries, keys and values were taken apart.
            "ssm_in" => ("in_proj_qkvz.weight", of_rows(Order::Plain)),
            "ssm_ba" => ("in_proj_ba.weight", of_rows(Order::Plain)),
            "ssm_beta" => ("in_proj_b.weight", of_rows(rows(0, 1))),
            "ssm_alpha" => ("in_proj_a.weight", of_rows(rows(0, 1))),
            "ssm_conv1d" => {
                let mut shape = tensor.shape.clone();
                shape.insert(shape.len().saturating_sub(1), 1);
                ("conv1d.weight", stored(tensor, shape, 0, rows(values_from, self.value)))
            }
            "ssm_norm" => ("norm.weight", of_rows(Order::Plain)),
            "ssm_a" => {
                let tiling = self.tiling(0, 1).filter(|_| tiled);
                let change = Change::Read(Part::Log(tiling));
                ("A_log", Stored { change, ..of_rows(Order::Plain) })
            }
            "ssm_dt" => ("dt_bias", self.columns(1, of_rows(Order::Plain))),
            "ssm_out" => ("out_proj.weight", self.columns(self.value, of_rows(Order::Plain))),
            _ => return None,
        };
        Some((found.0, Some(found.1)))
    }

    /// In which order heads of so many values lie from `first` on, if there are several of each key head.
    fn tiling(&self, first: usize, width: usize) -> Option<Tiling> {
        let per = self.value_heads / self.key_heads.max(1);
        (per > 1 && self.value_heads == per * self.key_heads && width > 0).then_some(Tiling {
            first,
            heads: self.key_heads,
            per,
            width,
        })
    }

    fn columns(&self, width: usize, found: Stored) -> Stored {
        match self.tiling(0, width) {
            Some(tiling) if self.kind == Hybrid::Tiled => {
                Stored { change: Change::Read(Part::Tiled(tiling)), ..found }
            }
            _ => found,
        }
    }

    /// Queries, keys and values, and gates, as one matrix with those of each key head side by side.
    fn joined(&self, qkv: &Tensor, gate: Option<&Tensor>) -> Option<Stored> {
        let gate = gate?;
        let (&[height, cols], &[values, cols_z]) = (qkv.shape.as_slice(), gate.shape.as_slice()) else {
            return None;
        };
        let keys = self.key_heads.checked_mul(self.key)?;
        let whole = self.key_heads > 0 && values.is_multiple_of(self.key_heads);
        if !whole || cols != cols_z || keys.checked_mul(2)?.checked_add(values)? != height {
            return None;
        }
        let (heads, key, values_each) = (self.key_heads, self.key, values / self.key_heads);
        let form = leaf(qkv).and_then(|qkv| {
            Ok(Form::Joined(Joined { qkv, gate: leaf(gate)?, heads, key, values: values_each }))
        });
        let shape = vec![height.checked_add(values)?, cols];
        Some(Stored { shape, shard: qkv.shard, form, order: Order::Plain, change: Change::None })
    }
}

/// Layer, part and kind ("weight" or "bias") of a name such as `blk.3.attn_q.weight`.
fn layer_part(name: &str) -> Option<(usize, &str, &str)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let (part, kind) = rest.rsplit_once('.').unwrap_or((rest, "weight"));
    Some((layer.parse().ok()?, part, kind))
}

/// Whose feed-forward matrix it is.
enum Of {
    Dense,
    Shared,
    /// One expert's: files of before the stacks.
    One(usize),
    All,
}

fn feed_forward(part: &str) -> Option<(&str, Of)> {
    let (projection, rest) = ["gate", "up", "down"].into_iter().find_map(|projection| {
        let rest = part.strip_prefix("ffn_")?.strip_prefix(projection)?;
        Some((projection, rest))
    })?;
    match rest {
        "" => Some((projection, Of::Dense)),
        "_shexp" => Some((projection, Of::Shared)),
        "_exps" => Some((projection, Of::All)),
        _ => rest.strip_prefix('.')?.parse().ok().map(|expert| (projection, Of::One(expert))),
    }
}

/// Keys and values of latent attention, put together.
fn heads(k: &Tensor, v: Option<&Tensor>) -> Option<Stored> {
    let v = v?;
    let (&[n, cols, keys], &[n_v, values, cols_v]) = (k.shape.as_slice(), v.shape.as_slice()) else {
        return None;
    };
    if (n, cols) != (n_v, cols_v) {
        return None;
    }
    let form = leaf(k).and_then(|k| Ok(Form::Heads(Heads { k, v: leaf(v)?, keys, values })));
    let shape = vec![n.checked_mul(keys.checked_add(values)?)?, cols];
    Some(Stored { shape, shard: k.shard, form, order: Order::Plain, change: Change::None })
}

fn leaf(t: &Tensor) -> Result<Leaf, Unread> {
    let at = At { shard: t.shard, offset: t.offset };
    match t.kind {
        Type::Float(ty) => Ok(Leaf::Float(at, ty)),
        Type::Blocks(kind) => Ok(Leaf::Ggml(at, kind)),
        Type::Other(_) => Err(Unread::Type(t.kind.name())),
    }
}
