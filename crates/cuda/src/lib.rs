//! Models on NVIDIA cards through CUDA, for what a graph of kernels does better than dispatches that wait for each other
//! (EXP-GPU-07).
//!
//! The driver and its run-time compiler (NVRTC) are loaded when a device is opened: building needs neither. A [`Model`] has
//! all of its weights in the card's memory. The kernels of one token are recorded once, as a graph ([`Model::step`]), which
//! is replayed for each token: what differs between tokens is read from memory.
//!
//! Products of coded weights have the processor's bits; attention, norms and products of floats sum in an order of their
//! own, which is always the same.

mod build;
mod device;
mod error;
mod model;
mod planes;
mod program;
mod shape;

pub use device::{Buffer, Cuda, Facts};
pub use error::CudaError;
pub use model::{LayerParts, MatrixBytes, Model, Place, Slots};
pub use shape::{BLOCK, KvKind, Shape, bits, has_product};
