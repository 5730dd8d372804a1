//! Decoding blocks of entropy-coded records. [`Block::decode`] in `format` is the definition; the others give its
//! tiles and its verdict, to the bit.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

use std::fmt;

use smoe_format::entropy::{Block, Part, decode_part, decode_record};
use smoe_format::{FormatError, LayerTable};

use crate::{Isa, Kernels};

/// How blocks of entropy-coded records are decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntropyDecoder {
    path: Path,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// Plain code: the definition.
    Scalar,
    /// Sixteen entries of a table at a time, and `pdep`.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The table in four registers, eight streams a register.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// The table in eight registers, two streams a register.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl EntropyDecoder {
    /// The fastest of those that the instruction set allows and this machine has: AVX-512 wants VBMI besides, AVX2
    /// wants BMI2.
    #[must_use]
    pub fn new(kernels: Kernels) -> Self {
        Self { path: path(kernels.isa()) }
    }

    /// Decodes a record into a slot; see [`decode_record`].
    ///
    /// # Errors
    /// If the record contradicts itself; the slot is then of no use.
    ///
    /// # Panics
    /// As [`decode_record`].
    pub fn decode(
        self,
        raw: &[u8],
        len: usize,
        layer: &LayerTable,
        slot: &mut [u8],
    ) -> Result<(), FormatError> {
        decode_record(raw, len, layer, slot, |block| self.block(block))
    }

    /// Decodes a part of a record into its share of a slot; see [`decode_part`].
    ///
    /// # Errors
    /// If the record contradicts itself.
    ///
    /// # Panics
    /// As [`decode_part`].
    pub fn decode_part(
        self,
        raw: &[u8],
        len: usize,
        layer: &LayerTable,
        part: &Part,
        out: &mut [u8],
    ) -> Result<(), FormatError> {
        decode_part(raw, len, layer, part, out, |block| self.block(block))
    }

    /// Decodes a block; see [`Block::decode`].
    #[must_use]
    pub fn block(self, block: &mut Block<'_>) -> bool {
        // Without bytes behind it, the end of a record is for the one that looks where it reads.
        if !block.has_slack() {
            return block.decode();
        }
        match self.path {
            Path::Scalar => block.decode(),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `path` looked for its features.
            Path::Avx2 => unsafe { avx2::decode(block) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Path::Avx512 => unsafe { avx512::decode(block) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            Path::Neon => unsafe { neon::decode(block) },
        }
    }
}

impl fmt::Display for EntropyDecoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.path {
            Path::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Path::Neon => "neon",
        })
    }
}

#[cfg(target_arch = "x86_64")]
fn path(isa: Isa) -> Path {
    let has_pdep = is_x86_feature_detected!("bmi2") && is_x86_feature_detected!("popcnt");
    match isa {
        Isa::Avx512 if is_x86_feature_detected!("avx512vbmi") => Path::Avx512,
        Isa::Avx512 | Isa::Avx2 if has_pdep => Path::Avx2,
        _ => Path::Scalar,
    }
}

#[cfg(target_arch = "aarch64")]
fn path(isa: Isa) -> Path {
    if isa == Isa::Scalar { Path::Scalar } else { Path::Neon }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn path(_: Isa) -> Path {
    Path::Scalar
}

/// Two tables of half bytes as one: `low` in the lower halves.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn pairs(low: &[u8; 128], high: &[u8; 128]) -> [u8; 128] {
    std::array::from_fn(|i| low[i] | high[i] << 4)
}

#[cfg(test)]
mod tests;
