//! Which instruction set runs: found once, at run time, and carried as a value that proves it.

use std::fmt;

/// An instruction set that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Portable Rust; the definition of every kernel.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
    /// aarch64 with NEON and its int8 dot product: Apple's M series, servers and phones since about 2018.
    Neon,
    /// The same with int8 matrix products (`i8mm`): Apple's from the M2 on, servers since about 2021.
    NeonI8mm,
}

impl Isa {
    /// All of them, the plainest first.
    pub const ALL: [Self; 5] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Neon, Self::NeonI8mm];

    /// The name that `SMOE_KERNELS` takes and that reports show.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Neon => "neon",
            Self::NeonI8mm => "neon-i8mm",
        }
    }

    fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
            #[cfg(target_arch = "aarch64")]
            Self::Neon => {
                std::arch::is_aarch64_feature_detected!("neon")
                    && std::arch::is_aarch64_feature_detected!("dotprod")
            }
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm => Self::Neon.is_available() && std::arch::is_aarch64_feature_detected!("i8mm"),
            #[cfg(not(target_arch = "aarch64"))]
            Self::Neon | Self::NeonI8mm => false,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The kernels of one instruction set. A value exists only if this machine has it, so its methods are safe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernels {
    isa: Isa,
}

/// A request for kernels that cannot be met.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KernelsError {
    /// No instruction set of that name.
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// This machine lacks it.
    Unavailable {
        /// What was asked for.
        isa: Isa,
    },
}

impl fmt::Display for KernelsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { name } => {
                write!(f, "no kernels are called `{name}`: use scalar, avx2, avx512, neon or neon-i8mm")
            }
            Self::Unavailable { isa } => write!(f, "this machine cannot run {isa} kernels"),
        }
    }
}

impl std::error::Error for KernelsError {}

impl Kernels {
    /// The kernels of `isa`.
    ///
    /// # Errors
    /// If this machine lacks it.
    pub fn new(isa: Isa) -> Result<Self, KernelsError> {
        if isa.is_available() { Ok(Self { isa }) } else { Err(KernelsError::Unavailable { isa }) }
    }

    /// The fastest kernels that this machine can run.
    #[must_use]
    pub fn detect() -> Self {
        let isa = Isa::ALL.into_iter().rev().find(|isa| isa.is_available());
        Self { isa: isa.unwrap_or(Isa::Scalar) }
    }

    /// The kernels called `name` (`scalar`, `avx2`, `avx512`, `neon`, `neon-i8mm`), or the fastest ones for `None`.
    ///
    /// # Errors
    /// If there is no such name, or this machine lacks them.
    pub fn by_name(name: Option<&str>) -> Result<Self, KernelsError> {
        let Some(name) = name else { return Ok(Self::detect()) };
        match Isa::ALL.into_iter().find(|isa| isa.name() == name) {
            Some(isa) => Self::new(isa),
            None => Err(KernelsError::Unknown { name: name.to_owned() }),
        }
    }

    /// Every set that this machine can run, scalar first: what tests walk.
    #[must_use]
    pub fn available() -> Vec<Self> {
        Isa::ALL.into_iter().filter_map(|isa| Self::new(isa).ok()).collect()
    }

    /// The instruction set.
    #[must_use]
    pub const fn isa(self) -> Isa {
        self.isa
    }

    /// Its name, as shown in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.isa.name()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_architectures_are_known_and_unavailable() {
        for isa in Isa::ALL {
            let kernels = Kernels::by_name(Some(isa.name()));
            match isa {
                Isa::Scalar => assert_eq!(kernels, Ok(Kernels { isa })),
                Isa::Avx2 | Isa::Avx512 if cfg!(not(target_arch = "x86_64")) => {
                    assert_eq!(kernels, Err(KernelsError::Unavailable { isa }));
                }
                Isa::Neon | Isa::NeonI8mm if cfg!(not(target_arch = "aarch64")) => {
                    assert_eq!(kernels, Err(KernelsError::Unavailable { isa }));
                }
                _ => assert_eq!(kernels.is_ok(), Kernels::available().contains(&Kernels { isa })),
            }
        }
        assert!(matches!(Kernels::by_name(Some("sse")), Err(KernelsError::Unknown { .. })));
    }

    #[test]
    fn detection_finds_what_the_processor_is_known_to_have() {
        // Set by `cargo xtask aarch64`, which knows the processors that it emulates.
        if let Ok(expected) = std::env::var("SMOE_EXPECTED_KERNELS") {
            assert_eq!(Kernels::detect().name(), expected);
        }
    }
}
