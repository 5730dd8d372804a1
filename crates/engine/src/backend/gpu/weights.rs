//! The backbone in device memory.

use std::time::{Duration, Instant};

use smoe_format::Encoding;
use smoe_format::expert_file::TensorEntry;
use smoe_format::tile::ROWS;
use smoe_gpu::{Arena, Gpu, GpuError, Slice};
use smoe_kernels::Matrix;

/// Bytes that are handed to the device at once.
const PIECE: usize = 8 << 20;

/// Rows of a matrix that lie in one binding.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) bytes: Slice,
    pub(super) first_row: usize,
    pub(super) rows: usize,
}

/// A matrix, or several of the same input, one under the other.
#[derive(Clone, Debug)]
pub(super) struct DeviceMatrix {
    pub(super) parts: Vec<Part>,
    pub(super) cols: usize,
    pub(super) encoding: Encoding,
}

/// Brings matrices to the device.
pub(super) struct Uploader<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) arena: Arena,
    /// What handing over has taken.
    pub(super) spent: Duration,
}

impl<'a> Uploader<'a> {
    pub(super) fn new(gpu: &'a Gpu) -> Self {
        Self { gpu, arena: Arena::new("the backbone", SEGMENT), spent: Duration::ZERO }
    }

    /// One matrix, in as many parts as bindings demand.
    pub(super) fn matrix(&mut self, matrix: &Matrix<'_>) -> Result<DeviceMatrix, GpuError> {
        self.stack(&[*matrix])
    }

    /// Matrices of one input and one encoding as one, where whole blocks of rows allow it.
    pub(super) fn stack(&mut self, matrices: &[Matrix<'_>]) -> Result<DeviceMatrix, GpuError> {
        let (cols, encoding) = (matrices[0].cols(), matrices[0].encoding());
        let rows: usize = matrices.iter().map(Matrix::rows).sum();
        let bytes: u64 = matrices.iter().map(|m| m.bytes().len() as u64).sum();
        let most = self.gpu.facts().max_binding.min(self.gpu.facts().max_buffer);
        let mut parts = Vec::new();
        if bytes <= most {
            let slice = self.arena.take(self.gpu, bytes)?;
            let mut at = 0;
            for matrix in matrices {
                self.write(&slice, at, matrix.bytes());
                at += matrix.bytes().len() as u64;
            }
            parts.push(Part { bytes: slice, first_row: 0, rows });
        } else {
            let mut above = 0;
            for matrix in matrices {
                // Rows of a block lie together.
                let run = if encoding.is_float() { 1 } else { ROWS };
                let run_bytes = encoding.tensor_bytes(run, cols).unwrap_or(usize::MAX);
                let runs = (most as usize / run_bytes.max(1)).max(1);
                let step = runs * run_bytes;
                for (i, piece) in matrix.bytes().chunks(step).enumerate() {
                    let slice = self.arena.take(self.gpu, piece.len() as u64)?;
                    self.write(&slice, 0, piece);
                    let first = i * runs * run;
                    let rows = (runs * run).min(matrix.rows() - first);
                    parts.push(Part { bytes: slice, first_row: above + first, rows });
                }
                above += matrix.rows();
            }
        }
        Ok(DeviceMatrix { parts, cols, encoding })
    }

    /// Matrices of one record, at their offsets.
    pub(super) fn record(
        &mut self,
        matrices: &[Matrix<'_>],
        tensors: &[TensorEntry],
        len: u64,
    ) -> Result<Slice, GpuError> {
        let slice = self.arena.take(self.gpu, len)?;
        for (matrix, tensor) in matrices.iter().zip(tensors) {
            self.write(&slice, tensor.offset as u64, matrix.bytes());
        }
        Ok(slice)
    }

    /// A vector of f32.
    pub(super) fn vector(&mut self, values: &[f32]) -> Result<Slice, GpuError> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let slice = self.arena.take(self.gpu, bytes.len() as u64)?;
        self.write(&slice, 0, &bytes);
        Ok(slice)
    }

    /// Matrices of as many rows as f32: the first row of each, then the next.
    pub(super) fn rows(&mut self, matrices: &[Matrix<'_>]) -> Result<Slice, GpuError> {
        let mut values = Vec::new();
        for row in 0..matrices.first().map_or(0, Matrix::rows) {
            for matrix in matrices {
                let at = values.len();
                values.resize(at + matrix.cols(), 0.0);
                matrix.encoding().decode_row(matrix.bytes(), matrix.cols(), row, &mut values[at..]);
            }
        }
        self.vector(&values)
    }

    fn write(&mut self, slice: &Slice, at: u64, bytes: &[u8]) {
        let start = Instant::now();
        let mut at = at;
        for piece in bytes.chunks(PIECE) {
            if piece.len().is_multiple_of(4) {
                self.gpu.write(slice, at, piece);
            } else {
                let mut padded = piece.to_vec();
                padded.resize(piece.len().next_multiple_of(4), 0);
                self.gpu.write(slice, at, &padded);
            }
            at += piece.len() as u64;
            // What was handed over is copied by the driver; a step in between bounds how much waits.
            let _ = self.gpu.step().submit();
        }
        self.spent += start.elapsed();
    }
}

/// Bytes of a segment of the arena.
const SEGMENT: u64 = 64 << 20;

/// Whether matrices can be one: the same input and encoding, and whole blocks of rows if coded.
pub(super) fn stackable(matrices: &[Matrix<'_>]) -> bool {
    let first = &matrices[0];
    matrices.iter().all(|m| {
        m.cols() == first.cols()
            && m.encoding() == first.encoding()
            && m.bytes().len().is_multiple_of(16)
            && (m.encoding().is_float() || m.rows().is_multiple_of(ROWS))
    })
}
