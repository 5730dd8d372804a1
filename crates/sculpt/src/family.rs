//! Model families as data: which keys, router, attention and names a checkpoint of each has.
//!
//! A family says what this build can compute; whatever else a config asks for is refused by name.

mod conditions;
mod known;

use smoe_format::backbone::LayerPart;
use smoe_format::spec::{GroupScore, RouterKind};
use smoe_format::{BackboneTensor, ExpertKey, ModelSpec, Projection, original};

use crate::source::Part;
use conditions::COMMON;
pub(crate) use conditions::Only;
use known::FAMILIES;

/// A model family.
#[derive(Debug)]
pub(crate) struct Family {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// The key of the text's own config, if it is a part of several.
    pub text: Option<&'static str>,
    /// What tensors' names begin with.
    pub prefix: &'static str,
    /// Linear attention in some layers.
    pub hybrid: Hybrid,
    /// RMSNorm of queries and keys.
    pub qk_norm: QkNorm,
    /// Biases of the projections.
    pub bias: Bias,
    /// Keys and values come from a latent.
    pub latent: bool,
    /// An indexer chooses what attention sees.
    pub indexer: Option<Indexer>,
    /// Each head has an attention sink.
    pub sinks: bool,
    /// `layer_types` says which layers see `sliding_window` positions only.
    pub windows: bool,
    /// `embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and `logits_scaling` count.
    pub multipliers: bool,
    /// How router logits become weights.
    pub router: Router,
    /// The key of the number of routed experts, newest first.
    pub n_experts: &'static [&'static str],
    /// The key of the number of experts that a token visits.
    pub top_k: &'static str,
    /// The key of a routed expert's width.
    pub d_expert: &'static str,
    /// What stands in a routed expert, and its biases.
    pub expert: Expert,
    /// The shared expert.
    pub shared: Shared,
    /// Which layers are dense.
    pub dense: Dense,
    /// Stretchings of RoPE that the family's reference defines.
    pub rope: &'static [&'static str],
    /// How elements of a head are rotated.
    pub rotary: Rotary,
    /// `num_key_value_heads` may be missing: as many as query heads.
    pub kv_heads_optional: bool,
    /// What the reference takes where the config is silent.
    pub defaults: Defaults,
    /// Values that keys must have, if they are there at all.
    pub only: &'static [Only],
    /// Names of a layer's tensors where they are not those of most families.
    pub parts: &'static [(LayerPart, &'static str)],
    /// Names of routed experts' tensors.
    pub experts: Experts,
}

/// Gated delta nets in the layers that `layer_types` names, or but every `full_attention_interval`-th; with them come
/// norms of 1 + weight, and a gate on attention's outputs that lies in `q_proj`, behind the query of each head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hybrid {
    None,
    /// Of each key head: query, key, values, gates; and what beta and decay are made of.
    Joined,
    /// Queries, keys and values in one, the others alone.
    Apart,
}

/// RMSNorm of queries and keys.
#[derive(Clone, Copy, Debug)]
pub(crate) enum QkNorm {
    None,
    /// Of each head.
    Heads,
    /// Of all heads as one.
    Whole,
    /// Of each head, if this key is true.
    Key(&'static str),
}

/// Biases of the projections of attention.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bias {
    None,
    /// Of queries, keys and values if the key is true, or missing and the default is.
    Qkv(&'static str, bool),
    /// Of the output too.
    All(&'static str, bool),
}

/// How router logits become weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Router {
    pub kind: RouterKind,
    /// Added to the logits.
    pub bias: bool,
    /// Added to scores for the choice.
    pub correction: bool,
    /// Chosen scores are divided by their sum: always, never, or as `norm_topk_prob` says, with this default.
    pub norm: Norm,
    /// The key of the least that this sum may be, and its default.
    pub norm_min: Option<(&'static str, f64)>,
    /// `n_group` and `topk_group`, and what groups are ranked by.
    pub groups: Option<GroupScore>,
    /// `routed_scaling_factor` counts.
    pub scale: bool,
}

/// When chosen scores are divided by their sum.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Norm {
    Always,
    Never,
    /// As `norm_topk_prob` says, with this default.
    Key(bool),
}

/// What stands in a routed expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expert {
    SwiGlu,
    /// `swiglu_alpha` and `swiglu_limit`, and biases.
    ClampedWithBiases,
}

/// How the indexer of sparse attention rotates its heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Indexer {
    /// Each element with the one half a width away.
    Halves,
    Neighbours,
}

/// The expert that every token visits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Shared {
    None,
    /// The key of how many there are, each as wide as a routed one.
    Count(&'static str),
    /// The key of its width; it has a gate.
    Gated(&'static str),
}

/// How a config says which layers are dense.
#[derive(Debug)]
pub(crate) enum Dense {
    /// None is.
    None,
    /// `decoder_sparse_step` and `mlp_only_layers`.
    SparseStep,
    /// The first `first_k_dense_replace` layers.
    FirstK,
    /// Those that `mlp_layer_types` calls `dense`; where it is silent the first `first_k_dense_replace`, or so many.
    Types(usize),
    /// Those outside of `moe_layer_start_index` to `moe_layer_end_index`, and inside all but each
    /// `moe_layer_interval`-th of the model.
    Outside,
}

/// How elements of a head are rotated.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rotary {
    /// All, each with the one half a head away.
    Halves,
    /// The first `partial_rotary_factor` of them, with this default.
    Partial(f64),
    /// As many of the first as this key says; where it is silent, as `partial_rotary_factor` does, or all.
    Width(&'static str),
    /// Neighbours.
    Neighbours,
    /// Neighbours, unless `rope_interleave` is false.
    NeighboursByKey,
}

/// What the reference takes where the config is silent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    pub eps: f64,
    pub theta: f64,
    /// The head is the embedding.
    pub tied: bool,
}

/// The names of routed experts' matrices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Experts {
    /// Behind `model.layers.N.`, before the expert's number.
    pub folder: &'static str,
    /// Of gate, up and down.
    pub names: [&'static str; 3],
}

/// Where a checkpoint has a matrix.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// The tensor.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// What of it is meant.
    pub part: Part,
}

impl Family {
    /// All conditions on keys.
    pub fn conditions(&self) -> impl Iterator<Item = &'static Only> {
        let own = |key: &str| match key {
            "attention_bias" => matches!(self.bias, Bias::Qkv(own, _) | Bias::All(own, _) if own == key),
            "partial_rotary_factor" => matches!(self.rotary, Rotary::Partial(_) | Rotary::Width(_)),
            "layer_types" => self.windows || self.indexer.is_some() || self.hybrid != Hybrid::None,
            "embedding_multiplier" | "attention_multiplier" | "residual_multiplier" | "logits_scaling" => {
                self.multipliers
            }
            _ => false,
        };
        COMMON.iter().filter(move |only| !own(only.key)).chain(self.only)
    }

    /// The family called `model_type`.
    pub fn find(model_type: &str) -> Option<&'static Self> {
        FAMILIES.iter().find(|family| family.model_type == model_type)
    }

    /// The names of all families, for messages.
    pub fn known() -> String {
        FAMILIES.iter().map(|family| family.model_type).collect::<Vec<_>>().join(", ")
    }

    /// The checkpoint's name of the tensor that has a backbone tensor.
    pub fn backbone_name(&self, spec: &ModelSpec, tensor: BackboneTensor) -> String {
        let own = |part| self.parts.iter().find(|(own, _)| *own == part);
        let name = match tensor {
            BackboneTensor::Layer(layer, part) if let Some((_, name)) = own(part) => {
                format!("model.layers.{layer}.{name}")
            }
            BackboneTensor::Layer(layer, part) if spec.delta_of(layer as usize).is_some() => {
                let name = match (part, self.hybrid) {
                    (LayerPart::O, _) => "out_proj",
                    (LayerPart::Beta | LayerPart::Decay, Hybrid::Joined) => "in_proj_ba",
                    (LayerPart::Q | LayerPart::K | LayerPart::V | LayerPart::OGate, Hybrid::Joined) => {
                        "in_proj_qkvz"
                    }
                    (LayerPart::Q | LayerPart::K | LayerPart::V, _) => "in_proj_qkv",
                    (LayerPart::OGate, _) => "in_proj_z",
                    _ => return self.prefixed(original::checkpoint_name(tensor)),
                };
                format!("model.layers.{layer}.linear_attn.{name}.weight")
            }
            BackboneTensor::Layer(layer, LayerPart::OGate) => {
                format!("model.layers.{layer}.self_attn.q_proj.weight")
            }
            BackboneTensor::Layer(layer, LayerPart::Q)
                if spec.attention.latent.is_some_and(|latent| latent.q_rank > 0) =>
            {
                format!("model.layers.{layer}.self_attn.q_b_proj.weight")
            }
            _ => original::checkpoint_name(tensor),
        };
        self.prefixed(name)
    }

    /// A name as the family begins it.
    fn prefixed(&self, name: String) -> String {
        match name.strip_prefix("model.") {
            Some(rest) if self.prefix != "model" => format!("{}.{rest}", self.prefix),
            _ => name,
        }
    }

    /// Where a checkpoint of the model `spec` has a backbone tensor.
    pub fn backbone(&self, spec: &ModelSpec, tensor: BackboneTensor) -> Place {
        let (name, (rows, cols)) = (self.backbone_name(spec, tensor), tensor.shape(spec));
        let a = &spec.attention;
        let whole = |shape| Place { name: name.clone(), shape, part: Part::Whole };
        if self.hybrid != Hybrid::None
            && let Some(place) = self.hybrid(spec, tensor)
        {
            return Place { name, ..place };
        }
        match (tensor, a.latent) {
            (BackboneTensor::Layer(_, part @ (LayerPart::KUp | LayerPart::VUp)), Some(latent)) => {
                // Head by head: what makes a key, then what makes a value.
                let (keys, values) = (a.head_dim - latent.rope_dim, latent.value_dim);
                let of = keys + values;
                let part = match part {
                    LayerPart::KUp => Part::Columns { of, n: keys, cols: latent.kv_rank },
                    _ => Part::Rows { of, first: keys, n: values },
                };
                Place { name, shape: vec![a.n_heads * of, latent.kv_rank], part }
            }
            _ if tensor.is_vector() => whole(vec![cols]),
            _ => whole(vec![rows, cols]),
        }
    }

    /// Shape and part of a tensor that hybrids have otherwise; the name is left out.
    fn hybrid(&self, spec: &ModelSpec, tensor: BackboneTensor) -> Option<Place> {
        use LayerPart as P;
        let (a, d) = (&spec.attention, spec.d_model);
        let place = |shape, part| Some(Place { name: String::new(), shape, part });
        let (layer, part) = match tensor {
            BackboneTensor::FinalNorm => return place(vec![d], Part::OnePlus),
            BackboneTensor::Layer(layer, part) => (layer as usize, part),
            BackboneTensor::Embed | BackboneTensor::Head => return None,
        };
        // Of every so many rows, `n` from `first` on.
        let rows =
            |of: usize, heads: usize, first, n| place(vec![heads * of, d], Part::Rows { of, first, n });
        let delta = spec.delta_of(layer);
        match (part, delta, self.hybrid) {
            (P::AttnNorm | P::FfnNorm | P::QNorm | P::KNorm, ..) => {
                place(vec![tensor.shape(spec).1], Part::OnePlus)
            }
            (P::Q, None, _) => rows(2 * a.head_dim, a.n_heads, 0, a.head_dim),
            (P::OGate, None, _) => rows(2 * a.head_dim, a.n_heads, a.head_dim, a.head_dim),
            (P::Conv, Some(delta), _) => place(vec![delta.channels(), 1, delta.conv_width], Part::Whole),
            (_, Some(delta), Hybrid::Joined) => {
                let per = delta.n_value_heads / delta.n_key_heads;
                let (key, values) = (delta.key_dim, per * delta.value_dim);
                let (of, heads) = (2 * (key + values), delta.n_key_heads);
                match part {
                    P::Q => rows(of, heads, 0, key),
                    P::K => rows(of, heads, key, key),
                    P::V => rows(of, heads, 2 * key, values),
                    P::OGate => rows(of, heads, 2 * key + values, values),
                    P::Beta => rows(2 * per, heads, 0, per),
                    P::Decay => rows(2 * per, heads, per, per),
                    _ => None,
                }
            }
            (_, Some(delta), _) => {
                let (of, keys) = (delta.channels(), delta.keys());
                match part {
                    P::Q => rows(of, 1, 0, keys),
                    P::K => rows(of, 1, keys, keys),
                    P::V => rows(of, 1, 2 * keys, delta.values()),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Where a checkpoint of the model `spec` has a routed expert's matrix.
    pub fn expert(&self, spec: &ModelSpec, key: ExpertKey, projection: Projection) -> Place {
        let (rows, cols) = projection.shape(spec);
        let Experts { folder, names } = self.experts;
        let (layer, expert, name) = (key.layer, key.expert, names[projection as usize]);
        let name = format!("{}.layers.{layer}.{folder}.{expert}.{name}.weight", self.prefix);
        Place { name, shape: vec![rows, cols], part: Part::Whole }
    }
}
