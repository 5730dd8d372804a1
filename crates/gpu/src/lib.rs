//! The GPU: devices, buffers, shaders, and one checked launcher per kernel, over `wgpu` (Vulkan, Metal).
//!
//! One WGSL source per kernel serves every device: subgroup operations of whatever width the device has,
//! weights in the vault's own tiles, int8 activations and integer dot products, as on the CPU. Coded
//! products have the CPU's bits where the device's fma is fused ([`Gpu::fused_fma`]); float products, norms and
//! attention sum in an order of their own, fixed per kernel, and differ from the CPU's in the last bits. Results
//! repeat from run to run on a device and do not depend on how many tokens share a call.
//!
//! A launcher is made once, over the buffers that it works on ([`Op`]), and recorded into a [`Step`] as often
//! as needed; nothing runs until the step is submitted. This crate knows neither the order of a model's
//! layers nor where experts come from.

mod attention;
mod beside;
mod ceiling;
mod coded;
mod compile;
mod cut;
mod delta_net;
mod device;
mod draft;
mod embed;
mod error;
mod expert_layout;
mod experts;
mod float;
mod heads;
mod hidden;
mod import;
mod latent;
mod latent_attention;
mod latent_lone;
mod memories;
mod memory;
mod merge;
mod norm;
mod normed;
mod plane;
mod projection;
mod prompt;
mod quantise;
mod rope;
mod route;
mod shader;
mod step;
mod tiling;
mod work;

pub use attention::{Attention, AttentionGate, AttentionHeads, AttentionOutputs, AttentionScratch};
pub use beside::{Beside, ExpertsOf, LoneExperts};
pub use ceiling::{CopyKernel, Links};
pub use coded::{CodedMatmul, Columns, ExactMatmul, OwnMatmul, Weights};
pub use compile::CompileTimes;
pub use cut::{Lanes, Tuning};
pub use delta_net::{
    DeltaInput, DeltaLayout, DeltaNet, DeltaNetWeights, DeltaOutputs, DeltaScratch, StateMark, StateRun,
    StateRuns,
};
pub use device::{DeviceFacts, DeviceKind, Fault, Gpu, Software, devices};
pub use embed::Embed;
pub use error::GpuError;
pub use expert_layout::ExpertLayout;
pub use experts::{Down, ExpertInput, GateUp};
pub use float::FloatMatmul;
pub use heads::{HeadColumns, HeadInput, HeadMatmul, HeadPlane, HeadTurn};
pub use hidden::Hidden;
pub use import::{Keep, Segments};
pub use latent::{LatentAppend, LatentInput, LatentLayout, LatentNorm, LatentQueries};
pub use latent_attention::{LatentAttention, LatentCut};
pub use latent_lone::{LatentEntry, LatentExit, LatentRow};
pub use memory::{Arena, Fork, Slice};
pub use norm::{Delta, Halt, MixNorm, NormOutputs, Shared};
pub use normed::{NormInput, NormMatmul};
pub use plane::CodedPlane;
pub use quantise::Quantise;
pub use rope::{
    Angles, KV_BLOCK, KvFormat, KvLayout, Projections, QkNorm, RopeAppend, RopeInput, RopePairs, Rows,
};
pub use route::{Argmax, Route, RouteInputs, RouteOutputs, RouterNorm};
pub use shader::{Access, Idle, Kernel, Op, Shader};
pub use step::{Readback, Recorded, Step, Submitted};
pub use tiling::Tiling;
pub use work::WorkList;
