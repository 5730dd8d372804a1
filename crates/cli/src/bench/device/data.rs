//! What kernels are timed on.

use smoe_format::{Encoding, Uniform, Zero};
use smoe_gpu::{CodedPlane, GpuError, Quantise, Slice};

use super::Bench;

pub(super) fn q(bits: u8) -> Encoding {
    Encoding::Uniform(Uniform::new(bits, 64, Zero::Symmetric).expect("an encoding that there is"))
}

pub(super) fn uniform(encoding: Encoding) -> Uniform {
    encoding.tiles().unwrap_or_else(|| panic!("{encoding} has no codes"))
}

/// Random codes and scales of 1, or random small floats.
pub(super) fn tensor(encoding: Encoding, rows: usize, cols: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut bytes = vec![0; encoding.tensor_bytes(rows, cols).expect("a shape that fits")];
    for eight in bytes.chunks_mut(8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // The exponents of floats are cleared of their highest bit: below 2.
        let word = if encoding.is_float() { state & 0xbfff_bfff_bfff_bfff } else { state };
        eight.copy_from_slice(&word.to_le_bytes()[..eight.len()]);
    }
    if let Some(uniform) = encoding.tiles() {
        for tile in bytes.chunks_exact_mut(uniform.tile_bytes()) {
            let scales = &mut tile[uniform.code_bytes()..];
            scales.chunks_exact_mut(2).for_each(|s| s.copy_from_slice(&0x3c00u16.to_le_bytes()));
        }
    }
    bytes
}

impl Bench {
    pub(super) fn words(&self, words: &[u32]) -> Result<Slice, GpuError> {
        let slice = self.gpu.buffer("words", 4 * words.len() as u64)?;
        self.gpu.write(&slice, 0, &words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>());
        Ok(slice)
    }

    pub(super) fn x(&self, tokens: usize, cols: usize) -> Result<Slice, GpuError> {
        let x: Vec<u8> = (0..tokens * cols)
            .flat_map(|i| (((i * 7919) % 1009) as f32 / 500.0 - 1.0).to_le_bytes())
            .collect();
        let slice = self.gpu.buffer("x", x.len() as u64)?;
        self.gpu.write(&slice, 0, &x);
        Ok(slice)
    }

    pub(super) fn coded_x(&self, tokens: usize, cols: usize, group: usize) -> Result<CodedPlane, GpuError> {
        let plane = CodedPlane::new(&self.gpu, tokens, cols, group)?;
        let quantise = Quantise::new(&self.gpu, &self.x(tokens, cols)?, &plane)?;
        let mut step = self.gpu.step();
        quantise.record(&mut step, tokens);
        let submitted = step.submit();
        self.gpu.wait(&submitted)?;
        Ok(plane)
    }

    /// Copies of a tensor that are `cold` bytes together, in one slice each.
    pub(super) fn copies_of(&self, bytes: &[u8]) -> Result<Vec<Slice>, GpuError> {
        let first = self.gpu.buffer("weights", bytes.len() as u64)?;
        // In pieces: what is written waits in memory of the host's until the next step.
        for (i, piece) in bytes.chunks(64 << 20).enumerate() {
            self.gpu.write(&first, (i * (64 << 20)) as u64, piece);
            let submitted = self.gpu.step().submit();
            self.gpu.wait(&submitted)?;
        }
        let count = (self.cold / bytes.len() as u64).max(1);
        let mut all = vec![first];
        for _ in 1..count {
            let copy = self.gpu.buffer("weights", bytes.len() as u64)?;
            let mut step = self.gpu.step();
            step.copy(&all[0], &copy);
            let submitted = step.submit();
            self.gpu.wait(&submitted)?;
            all.push(copy);
        }
        Ok(all)
    }
}
