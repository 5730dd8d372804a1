//! What is demanded, and in which order it shall come.

use crate::ExpertKey;

/// An expert, and how recent this use of it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Want {
    /// The expert.
    pub key: ExpertKey,
    /// Larger is more recent: for an engine, the position of the last token that uses the expert, counted over
    /// all that it ever computed. Eviction goes by it ([`crate::Policy`]).
    pub stamp: u64,
}

impl From<ExpertKey> for Want {
    /// With stamp 0: among such uses the later one is the more recent.
    fn from(key: ExpertKey) -> Self {
        Self { key, stamp: 0 }
    }
}

/// In which order a demand hands its experts out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// What is resident first, then the others as they arrive.
    Arrival,
    /// As they are given. For those who accumulate in order; what arrived early waits.
    Given,
}
