//! What lies in a device's memory.

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
    /// Slots for experts, by MoE layer.
    pub slots: Vec<usize>,
    /// Bytes of these slots.
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
