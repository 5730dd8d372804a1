//! What lies in a device's memory, and how experts come there.

use std::fmt;
use std::str::FromStr;

/// How experts come from the ring to a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertPath {
    /// As suits the device: read where the ring has them if it shares the processor's memory; if not, copied by itself, and what
    /// it lacks read over the bus if that is fast enough.
    #[default]
    Auto,
    /// Copied by the processor to where the driver fetches them.
    Staging,
    /// Copied by the device from the ring, whose memory is lent to it.
    Import,
    /// The same, and what the device lacks of a step of few tokens is read where the ring has it, over the bus, by the kernels
    /// that need it: where the ring has room for every expert.
    ZeroCopy,
    /// Not at all: kernels read them where the ring has them.
    InPlace,
}

impl ExpertPath {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Staging => "staging",
            Self::Import => "import",
            Self::ZeroCopy => "zero-copy",
            Self::InPlace => "in-place",
        }
    }
}

impl fmt::Display for ExpertPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ExpertPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = [Self::Auto, Self::Staging, Self::Import, Self::ZeroCopy, Self::InPlace];
        let found = all.into_iter().find(|path| path.name() == text);
        found.ok_or_else(|| format!("must be {}", all.map(Self::name).join(", ")))
    }
}

/// Bytes and slots on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePlan {
    /// The device, as its driver names it.
    pub device: String,
    /// What may be used of its memory.
    pub budget_bytes: u64,
    /// Resident weights.
    pub backbone_bytes: u64,
    /// Keys and values.
    pub kv_bytes: u64,
    /// States of layers with linear attention: two a session, and snapshots.
    pub state_bytes: u64,
    /// Snapshots of states that there is room for.
    pub snapshots: usize,
    /// Planes of a step.
    pub plane_bytes: u64,
    /// How experts come to them: never [`ExpertPath::Auto`].
    pub path: ExpertPath,
    /// Slots for experts, by MoE layer; in place those of the ring, if it has room for every expert, or none.
    pub slots: Vec<usize>,
    /// Bytes of these slots that are the device's.
    pub expert_bytes: u64,
    /// Experts of the model.
    pub n_experts: usize,
}

impl DevicePlan {
    /// Everything together.
    #[must_use]
    pub const fn total_bytes(&self) -> u64 {
        self.backbone_bytes + self.kv_bytes + self.state_bytes + self.plane_bytes + self.expert_bytes
    }

    /// Every expert has a slot.
    #[must_use]
    pub fn holds_all(&self) -> bool {
        self.slots.iter().sum::<usize>() >= self.n_experts
    }
}
