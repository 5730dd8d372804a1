//! The resident backbone: one page-aligned buffer with the file's bytes, and views into it.

use std::ops::Range;
use std::sync::Mutex;

use smoe_format::backbone::LayerPart as P;
use smoe_format::{BackboneTensor, Encoding, FfnKind, ModelSpec, file_name};
use smoe_kernels::{DeltaWeights, Matrix};
use smoe_store::{AlignedBuf, Disk};

use crate::EngineError;
use crate::kv;
use crate::vault::Vault;

/// Bytes of a read; large enough for any drive's full speed.
const PIECE: usize = 8 << 20;

/// A matrix of the backbone.
#[derive(Clone, Debug)]
pub struct Tensor {
    bytes: Range<usize>,
    /// Rows: outputs.
    pub rows: usize,
    /// Columns: inputs.
    pub cols: usize,
    /// Its encoding.
    pub encoding: Encoding,
}

/// SwiGLU matrices: a dense layer, or a shared expert.
#[derive(Clone, Debug)]
pub struct Ffn {
    /// `[width, d_model]`.
    pub gate: Tensor,
    /// `[width, d_model]`.
    pub up: Tensor,
    /// `[d_model, width]`.
    pub down: Tensor,
}

/// The feed-forward weights of a layer that are resident.
#[allow(clippy::large_enum_variant, reason = "one a layer, and nearly all of the larger kind")]
#[derive(Clone, Debug)]
pub enum LayerFfn {
    /// A dense layer.
    Dense(Ffn),
    /// An MoE layer.
    Moe {
        /// `[n_experts, d_model]`.
        router: Tensor,
        /// `[n_experts]`, added to the logits.
        router_bias: Option<Vec<f32>>,
        /// `[n_experts]`, added to scores for the choice; empty if there is none.
        correction: Vec<f32>,
        /// What every token visits.
        shared: Option<Ffn>,
        /// `[1, d_model]`, what the shared expert's weight is the sigmoid of.
        shared_scale: Option<Tensor>,
        /// Gate, up, down: a row per expert.
        biases: Option<[Tensor; 3]>,
    },
}

/// What makes queries, and what is remembered, of a token.
#[allow(clippy::large_enum_variant, reason = "one a layer, and all of one kind")]
#[derive(Clone, Debug)]
pub enum Projections {
    /// Heads of their own.
    Heads {
        /// `[n_heads * head_dim, d_model]`.
        q: Tensor,
        /// `[n_kv_heads * head_dim, d_model]`.
        k: Tensor,
        /// `[n_kv_heads * head_dim, d_model]`.
        v: Tensor,
        /// Of the three.
        bias: Option<[Vec<f32>; 3]>,
        /// For queries and keys: `[head_dim]`, or as long as all their heads.
        norm: Option<[Vec<f32>; 2]>,
        /// `[n_heads * head_dim, d_model]`, what outputs are multiplied with the sigmoid of.
        gate: Option<Tensor>,
    },
    /// A latent that all heads share.
    Latent {
        /// `[q_rank, d_model]` and its norm `[q_rank]`, if queries come from a latent too.
        q_down: Option<(Tensor, Vec<f32>)>,
        /// `[n_heads * head_dim, q_rank or d_model]`.
        q: Tensor,
        /// `[kv_rank + rope_dim, d_model]`.
        kv_down: Tensor,
        /// `[kv_rank]`.
        kv_norm: Vec<f32>,
        /// `[n_heads * kv_rank, head_dim - rope_dim]`.
        k_up: Tensor,
        /// `[n_heads * value_dim, kv_rank]`.
        v_up: Tensor,
        /// What chooses the positions that are seen.
        indexer: Option<Indexer>,
    },
    /// A gated delta net: a state instead of what is remembered.
    Delta(Box<Delta>),
}

/// What goes into a gated delta net.
#[derive(Clone, Debug)]
pub struct Delta {
    /// `[n_key_heads * key_dim, d_model]`.
    pub q: Tensor,
    /// `[n_key_heads * key_dim, d_model]`.
    pub k: Tensor,
    /// `[n_value_heads * value_dim, d_model]`.
    pub v: Tensor,
    /// `[n_value_heads * value_dim, d_model]`, what normed outputs are multiplied with SiLU of.
    pub gate: Tensor,
    /// `[n_value_heads, d_model]`.
    pub beta: Tensor,
    /// `[n_value_heads, d_model]`.
    pub decay: Tensor,
    /// Convolution and decay.
    pub weights: DeltaWeights,
    /// `[value_dim]`, of each head's output.
    pub norm: Vec<f32>,
}

/// The indexer of sparse attention.
#[derive(Clone, Debug)]
pub struct Indexer {
    /// `[n_heads * head_dim, q_rank]`, of its own heads.
    pub q: Tensor,
    /// `[head_dim, d_model]`.
    pub k: Tensor,
    /// `[head_dim]`.
    pub k_norm: Vec<f32>,
    /// `[head_dim]`.
    pub k_norm_bias: Vec<f32>,
    /// `[n_heads, d_model]`.
    pub weights: Tensor,
}

/// A layer's resident weights.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// `[d_model]`.
    pub attn_norm: Vec<f32>,
    /// Into attention.
    pub projections: Projections,
    /// `[n_heads]`.
    pub sinks: Option<Vec<f32>>,
    /// `[d_model, n_heads * value_dim]`.
    pub o: Tensor,
    /// `[d_model]`.
    pub o_bias: Option<Vec<f32>>,
    /// `[d_model]`.
    pub ffn_norm: Vec<f32>,
    /// Feed-forward part.
    pub ffn: LayerFfn,
}

/// All resident weights.
pub struct Weights {
    buffer: AlignedBuf,
    /// `[vocab_size, d_model]`.
    pub embed: Tensor,
    /// By layer.
    pub layers: Vec<LayerWeights>,
    /// `[d_model]`.
    pub final_norm: Vec<f32>,
    /// `[vocab_size, d_model]`; the embedding if tied.
    pub head: Tensor,
}

impl std::fmt::Debug for Weights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Weights").field("bytes", &self.buffer.len()).finish_non_exhaustive()
    }
}

impl Weights {
    /// Reads the backbone file whole, by `threads` threads, and checks its checksum where the vault has one.
    ///
    /// # Errors
    /// If a read fails or the file is not the one that was sculpted.
    pub fn load(vault: &Vault, disk: &dyn Disk, threads: usize) -> Result<Self, EngineError> {
        let len = vault.backbone.file_len as usize;
        let mut buffer = AlignedBuf::zeroed(len.next_multiple_of(smoe_store::PAGE))?;
        let crc = read_all(disk, &mut buffer[..len], threads)?;
        if let Some(entry) = vault.listed(file_name::BACKBONE) {
            let found = format!("{crc:08x}");
            if entry.crc32c != found {
                let what = format!("checksum {found}, expected {}", entry.crc32c);
                return Err(EngineError::Damaged { file: vault.backbone_path.clone(), what });
            }
        }
        let source = Source { vault, buffer: &buffer };
        let spec = &vault.spec;
        let embed = source.matrix(BackboneTensor::Embed)?;
        let head = if spec.tied_head { embed.clone() } else { source.matrix(BackboneTensor::Head)? };
        let layers = (0..spec.n_layers()).map(|layer| source.layer(spec, layer)).collect::<Result<_, _>>()?;
        let final_norm = source.values(BackboneTensor::FinalNorm)?;
        Ok(Self { embed, layers, final_norm, head, buffer })
    }

    /// Bytes beside the backbone's own: what is kept as f32, arranged for the kernels. Norms and biases are not counted,
    /// a few KiB a layer.
    #[must_use]
    pub fn copied_bytes(spec: &ModelSpec) -> u64 {
        let floats = kv::state_shape(spec).map_or(0, |shape| DeltaWeights::floats(&shape));
        4 * (spec.delta_layers().count() * floats) as u64
    }

    /// A tensor as kernels take it.
    #[must_use]
    pub fn matrix(&self, tensor: &Tensor) -> Matrix<'_> {
        Matrix::new(&self.buffer[tensor.bytes.clone()], tensor.rows, tensor.cols, tensor.encoding)
    }

    /// Every matrix.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let layers = self.layers.iter().flat_map(|layer| {
            let (router, ffn, scale) = match &layer.ffn {
                LayerFfn::Dense(dense) => (None, Some(dense), None),
                LayerFfn::Moe { router, shared, shared_scale, .. } => {
                    (Some(router), shared.as_ref(), shared_scale.as_ref())
                }
            };
            let ffn = ffn.map(|ffn| [&ffn.gate, &ffn.up, &ffn.down]);
            let projections = match &layer.projections {
                Projections::Heads { q, k, v, gate, .. } => {
                    [Some(q), Some(k), Some(v), gate.as_ref(), None, None]
                }
                Projections::Latent { q_down, q, kv_down, k_up, v_up, .. } => {
                    let q_down = q_down.as_ref().map(|(down, _)| down);
                    [q_down, Some(q), Some(kv_down), Some(k_up), Some(v_up), None]
                }
                Projections::Delta(delta) => {
                    let Delta { q, k, v, gate, beta, decay, .. } = &**delta;
                    [q, k, v, gate, beta, decay].map(Some)
                }
            };
            let indexer = match &layer.projections {
                Projections::Latent { indexer: Some(Indexer { q, k, weights, .. }), .. } => {
                    Some([q, k, weights])
                }
                _ => None,
            };
            let projections = projections.into_iter().flatten().chain(indexer.into_iter().flatten());
            let ffn = ffn.into_iter().flatten();
            projections.chain([&layer.o]).chain(router).chain(scale).chain(ffn)
        });
        [&self.embed, &self.head].into_iter().chain(layers)
    }

    /// What is added to the scores of each MoE layer's experts for the choice; nothing where nothing is.
    #[must_use]
    pub fn corrections(&self) -> Vec<Vec<f32>> {
        let of_layer = |layer: &LayerWeights| match &layer.ffn {
            LayerFfn::Moe { correction, .. } => Some(correction.clone()),
            LayerFfn::Dense(_) => None,
        };
        self.layers.iter().filter_map(of_layer).collect()
    }
}

struct Source<'a> {
    vault: &'a Vault,
    buffer: &'a [u8],
}

impl Source<'_> {
    fn matrix(&self, tensor: BackboneTensor) -> Result<Tensor, EngineError> {
        let name = self.vault.tensor_name(tensor);
        let stored = self
            .vault
            .backbone
            .require(&self.vault.spec, tensor, &name)
            .map_err(|source| EngineError::Format { file: self.vault.backbone_path.clone(), source })?;
        Ok(Tensor {
            bytes: stored.bytes.start as usize..stored.bytes.end as usize,
            rows: stored.rows,
            cols: stored.cols,
            encoding: stored.encoding,
        })
    }

    /// All values of a tensor of floats, row by row.
    fn values(&self, tensor: BackboneTensor) -> Result<Vec<f32>, EngineError> {
        let stored = self.matrix(tensor)?;
        let (bytes, n) = (&self.buffer[stored.bytes], stored.rows * stored.cols);
        let mut values = vec![0.0; n];
        // All rows as one long row.
        stored.encoding.decode_row(bytes, n, 0, &mut values);
        Ok(values)
    }

    fn layer(&self, spec: &ModelSpec, index: usize) -> Result<LayerWeights, EngineError> {
        let tensor = |part| BackboneTensor::Layer(index as u32, part);
        let matrix = |part| self.matrix(tensor(part));
        let vector = |part| self.values(tensor(part));
        let ffn = |gate, up, down| {
            Ok::<_, EngineError>(Ffn { gate: matrix(gate)?, up: matrix(up)?, down: matrix(down)? })
        };
        let (a, moe) = (&spec.attention, &spec.moe);
        let shape = kv::state_shape(spec).filter(|_| spec.delta_of(index).is_some());
        let projections = match (a.latent, shape) {
            (_, Some(shape)) => Projections::Delta(Box::new(Delta {
                q: matrix(P::Q)?,
                k: matrix(P::K)?,
                v: matrix(P::V)?,
                gate: matrix(P::OGate)?,
                beta: matrix(P::Beta)?,
                decay: matrix(P::Decay)?,
                weights: DeltaWeights::new(
                    &shape,
                    &vector(P::Conv)?,
                    &vector(P::DecayLog)?,
                    &vector(P::DecayBias)?,
                ),
                norm: vector(P::DeltaNorm)?,
            })),
            (None, None) => Projections::Heads {
                q: matrix(P::Q)?,
                k: matrix(P::K)?,
                v: matrix(P::V)?,
                bias: if_so(a.qkv_bias, || Ok([vector(P::QBias)?, vector(P::KBias)?, vector(P::VBias)?]))?,
                norm: if_so(a.qk_norm, || Ok([vector(P::QNorm)?, vector(P::KNorm)?]))?,
                gate: if_so(a.gate, || matrix(P::OGate))?,
            },
            (Some(latent), None) => Projections::Latent {
                q_down: if_so(latent.q_rank > 0, || Ok((matrix(P::QDown)?, vector(P::QDownNorm)?)))?,
                q: matrix(P::Q)?,
                kv_down: matrix(P::KvDown)?,
                kv_norm: vector(P::KvDownNorm)?,
                k_up: matrix(P::KUp)?,
                v_up: matrix(P::VUp)?,
                indexer: if_so(a.indexer.is_some(), || {
                    Ok(Indexer {
                        q: matrix(P::IndexQ)?,
                        k: matrix(P::IndexK)?,
                        k_norm: vector(P::IndexKNorm)?,
                        k_norm_bias: vector(P::IndexKNormBias)?,
                        weights: matrix(P::IndexWeights)?,
                    })
                })?,
            },
        };
        let biases = [P::ExpertGateBias, P::ExpertUpBias, P::ExpertDownBias];
        let ffn = match spec.layers[index] {
            FfnKind::Dense(_) => LayerFfn::Dense(ffn(P::Gate, P::Up, P::Down)?),
            FfnKind::Moe => LayerFfn::Moe {
                router: matrix(P::Router)?,
                router_bias: if_so(moe.router_bias, || vector(P::RouterBias))?,
                correction: if_so(moe.correction_bias, || vector(P::Correction))?.unwrap_or_default(),
                shared: if_so(moe.d_shared > 0, || ffn(P::SharedGate, P::SharedUp, P::SharedDown))?,
                shared_scale: if_so(moe.shared_gate, || matrix(P::SharedScale))?,
                biases: if_so(moe.expert_bias, || {
                    let [gate, up, down] = biases.map(matrix);
                    Ok([gate?, up?, down?])
                })?,
            },
        };
        Ok(LayerWeights {
            attn_norm: vector(P::AttnNorm)?,
            projections,
            sinks: if_so(a.sinks && shape.is_none(), || vector(P::Sinks))?,
            o: matrix(P::O)?,
            o_bias: if_so(a.o_bias && shape.is_none(), || vector(P::OBias))?,
            ffn_norm: vector(P::FfnNorm)?,
            ffn,
        })
    }
}

/// What `read` gives, if the model has it.
fn if_so<T>(is_there: bool, read: impl FnOnce() -> Result<T, EngineError>) -> Result<Option<T>, EngineError> {
    if is_there { read().map(Some) } else { Ok(None) }
}

/// Fills `buffer` with the whole file, several reads in flight; gives the crc32c of its bytes.
fn read_all(disk: &dyn Disk, buffer: &mut [u8], threads: usize) -> Result<u32, EngineError> {
    let len = buffer.len();
    let pieces = Mutex::new(buffer.chunks_mut(PIECE).enumerate());
    let sums = Mutex::new(vec![0u32; len.div_ceil(PIECE)]);
    let worker = || -> Result<(), EngineError> {
        loop {
            // A poisoned lock means that another worker panicked, which the scope reports.
            let next = pieces.lock().ok().and_then(|mut pieces| pieces.next());
            let Some((i, piece)) = next else { return Ok(()) };
            disk.read_range((i * PIECE) as u64, piece)?;
            let sum = smoe_format::crc::crc32c(piece);
            if let Ok(mut sums) = sums.lock() {
                sums[i] = sum;
            }
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.max(2)).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().try_for_each(|handle| match handle.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    let sums = sums.into_inner().unwrap_or_default();
    Ok(sums
        .iter()
        .enumerate()
        .fold(0, |crc, (i, &sum)| smoe_format::crc::crc32c_combine(crc, sum, PIECE.min(len - i * PIECE))))
}
