//! Experts that the device finds by itself: in its own memory, a cache above the ring, layer by layer; or, where it
//! shares the processor's, in the ring.
//!
//! Every MoE layer has slots of its own, one after the other in one binding: a token needs as many experts of
//! each layer, so shares are equal, and a kernel addresses its layer's slots whatever the size of the card.
//! Whom a layer evicts is decided by the store's policies. A slot that a recorded kernel reads is not
//! overwritten before that kernel is submitted: the device works in the order of submission.
//!
//! A ring that has room for every expert has a layer's slots in a row if it was filled in the order of the file. Those
//! that lie so are the layer's slots here too ([`ExpertTier::place_at`]); their leases are kept, so none is evicted. Behind a
//! cache they are a second memory ([`ExpertTier::place_behind`]): kernels read there, over the bus, what the device's has not.

use std::sync::Arc;

use smoe_format::expert_file::LayerTable;
use smoe_gpu::{Gpu, GpuError, Slice, WorkList};
use smoe_meter::TierMeter;
use smoe_store::{Lease, Policy, PolicyKind};

use super::lent::Ring;

/// What a table says of an expert that is not here.
pub(super) const ABSENT: u32 = WorkList::ABSENT;

/// A layer's experts in the ring, behind its slots of the device's memory.
struct Behind {
    /// Slots of the ring, back to back, one for each expert.
    memory: Slice,
    /// The first of them.
    base: u32,
    /// By expert, counted from the first; or [`ABSENT`].
    slot_of: Vec<u32>,
    leases: Vec<Lease>,
}

/// Where a table says that experts are, for what is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pretence {
    /// All in the layer's slots, whatever lies there.
    Here,
    /// All behind them.
    Behind,
    /// Where they are.
    None,
}

/// One layer's slots.
struct LayerTier {
    /// Slots, back to back.
    memory: Slice,
    /// `[n_experts]` on the device: slot, or [`ABSENT`].
    table: Slice,
    slot_bytes: u64,
    /// Slots that `memory` has, whether experts may be there or not.
    room: u32,
    /// The first of them, in the ring; 0 if the memory is the device's.
    base: u32,
    /// Of experts in the ring.
    leases: Vec<Lease>,
    /// The same here.
    slot_of: Vec<u32>,
    /// Expert of each slot, or [`ABSENT`].
    expert_of: Vec<u32>,
    /// Number of the step that was being recorded when a kernel last took the slot.
    used_in: Vec<u64>,
    free: Vec<u32>,
    policy: Box<dyn Policy>,
    behind: Option<Behind>,
}

impl LayerTier {
    /// What the device is told of an expert.
    fn place_of(&self, expert: usize) -> u32 {
        match (self.slot_of[expert], self.slot_behind(expert)) {
            (ABSENT, Some(slot)) => WorkList::BEHIND | slot,
            (slot, _) => slot,
        }
    }

    /// The place of an expert behind the slots.
    fn slot_behind(&self, expert: usize) -> Option<u32> {
        self.behind.as_ref().map(|behind| behind.slot_of[expert]).filter(|&slot| slot != ABSENT)
    }

    /// Tells the policy of a use, if it will ever be asked: not where every expert has a slot.
    fn touch(&mut self, slot: u32, stamp: u64) {
        if self.expert_of.len() < self.slot_of.len() {
            self.policy.touch(slot, stamp);
        }
    }
}

/// What became of a request for a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// The expert's bytes go into this slot.
    Slot(u32),
    /// Every slot is read by kernels that are recorded and not submitted: submit, and ask again.
    Busy,
}

/// The tier of all layers.
pub(super) struct ExpertTier {
    layers: Vec<LayerTier>,
    meter: Arc<TierMeter>,
    /// Number of the step being recorded.
    step: u64,
    /// Experts that are not in the layers' slots.
    absent: usize,
    /// Of these, those that are not behind them either.
    out_of_reach: usize,
}

impl std::fmt::Debug for ExpertTier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExpertTier").field("layers", &self.layers.len()).finish_non_exhaustive()
    }
}

impl ExpertTier {
    /// `slots[i]` slots for the i-th MoE layer; behind them the slots of a ring that has room for every expert, if there is
    /// one, as far as bindings go.
    ///
    /// # Errors
    /// If the device has no room for them.
    pub(super) fn new(
        gpu: &Gpu,
        tables: &[LayerTable],
        slots: &[usize],
        kind: PolicyKind,
        ring: Option<&Ring>,
        meter: Arc<TierMeter>,
    ) -> Result<Self, GpuError> {
        let mut base = 0;
        let layer = |(table, &slots): (&LayerTable, &usize)| {
            let (n_experts, slot_bytes) = (table.n_experts as usize, table.record_len as u64);
            let behind = ring.and_then(|ring| ring.run(base, n_experts)).map(|memory| Behind {
                memory,
                base: base as u32,
                slot_of: vec![ABSENT; n_experts],
                leases: Vec::new(),
            });
            base += n_experts;
            let memory = gpu.buffer("experts", slots as u64 * slot_bytes)?;
            let places = gpu.buffer("places of experts", n_experts as u64 * 4)?;
            gpu.write(&places, 0, &vec![0xff; n_experts * 4]);
            Ok(LayerTier {
                memory,
                table: places,
                slot_bytes,
                room: slots as u32,
                base: 0,
                leases: Vec::new(),
                slot_of: vec![ABSENT; n_experts],
                expert_of: vec![ABSENT; slots],
                used_in: vec![0; slots],
                free: (0..slots as u32).rev().collect(),
                policy: kind.build(slots, n_experts),
                behind,
            })
        };
        let layers = tables.iter().zip(slots).map(layer).collect::<Result<_, GpuError>>()?;
        let absent = tables.iter().map(|table| table.n_experts as usize).sum();
        Ok(Self { layers, meter, step: 1, absent, out_of_reach: absent })
    }

    /// The same in the ring, `slots[i]` being all experts of the layer, or 0: then only what the host names is read.
    ///
    /// # Errors
    /// If the device has no room for tables.
    pub(super) fn in_place(
        gpu: &Gpu,
        tables: &[LayerTable],
        slots: &[usize],
        ring: &Ring,
        meter: Arc<TierMeter>,
    ) -> Result<Self, GpuError> {
        let mut base = 0;
        let layer = |(table, &slots): (&LayerTable, &usize)| {
            let n_experts = table.n_experts as usize;
            let own = ring.run(base, slots);
            let first = if own.is_some() { base } else { 0 };
            base += n_experts;
            let slots = if own.is_some() { slots } else { 0 };
            let memory = own.unwrap_or_else(|| ring.segments()[0].clone());
            let places = gpu.buffer("places of experts", n_experts as u64 * 4)?;
            gpu.write(&places, 0, &vec![0xff; n_experts * 4]);
            Ok(LayerTier {
                room: (memory.len() / ring.slot_bytes()) as u32,
                memory,
                table: places,
                slot_bytes: ring.slot_bytes(),
                base: first as u32,
                leases: Vec::new(),
                slot_of: vec![ABSENT; n_experts],
                expert_of: vec![ABSENT; slots],
                used_in: vec![0; slots],
                free: Vec::new(),
                // Nothing is evicted.
                policy: PolicyKind::Lru.build(1, 1),
                behind: None,
            })
        };
        let layers = tables.iter().zip(slots).map(layer).collect::<Result<_, GpuError>>()?;
        let absent = tables.iter().map(|table| table.n_experts as usize).sum();
        Ok(Self { layers, meter, step: 1, absent, out_of_reach: absent })
    }

    /// What the kernels of the `index`-th MoE layer bind: its memory, its table, and how far slots are apart.
    pub(super) fn bindings(&self, index: usize) -> (&Slice, &Slice, u64) {
        let layer = &self.layers[index];
        (&layer.memory, &layer.table, layer.slot_bytes)
    }

    /// The slot of the ring that a slot of the `index`-th MoE layer is.
    pub(super) fn in_ring(&self, index: usize, slot: u32) -> u32 {
        self.layers[index].base + slot
    }

    /// Keeps an expert that lies among the `index`-th MoE layer's slots of the ring, and its lease; gives the lease back if it
    /// lies elsewhere. The device is told by [`Self::tell`].
    pub(super) fn place_at(&mut self, index: usize, lease: Lease) -> Option<Lease> {
        let layer = &mut self.layers[index];
        let (expert, slot) = (lease.key().expert, lease.slot() as u32);
        let at = slot.checked_sub(layer.base).filter(|&at| (at as usize) < layer.expert_of.len());
        let Some(at) = at else { return Some(lease) };
        debug_assert_eq!(layer.expert_of[at as usize], ABSENT, "a slot has one expert");
        layer.expert_of[at as usize] = expert;
        layer.slot_of[expert as usize] = at;
        layer.leases.push(lease);
        self.absent -= 1;
        self.out_of_reach -= 1;
        None
    }

    /// The memory behind the slots of the `index`-th MoE layer, if there is one.
    pub(super) fn behind(&self, index: usize) -> Option<&Slice> {
        self.layers[index].behind.as_ref().map(|behind| &behind.memory)
    }

    /// Keeps an expert that lies behind the `index`-th MoE layer's slots, and its lease; gives the lease back if it lies
    /// elsewhere. The device is told by [`Self::tell`].
    pub(super) fn place_behind(&mut self, index: usize, lease: Lease) -> Option<Lease> {
        let layer = &mut self.layers[index];
        let Some(behind) = &mut layer.behind else { return Some(lease) };
        let (expert, slot) = (lease.key().expert as usize, lease.slot() as u32);
        let at = slot.checked_sub(behind.base).filter(|&at| (at as usize) < behind.slot_of.len());
        let Some(at) = at.filter(|_| behind.slot_of[expert] == ABSENT) else { return Some(lease) };
        behind.slot_of[expert] = at;
        behind.leases.push(lease);
        self.out_of_reach -= usize::from(layer.slot_of[expert] == ABSENT);
        None
    }

    /// The slot of the ring of an expert that lies behind the `index`-th MoE layer's slots.
    pub(super) fn in_ring_behind(&self, index: usize, expert: u32) -> Option<usize> {
        let layer = &self.layers[index];
        let slot = layer.slot_behind(expert as usize)?;
        layer.behind.as_ref().map(|behind| (behind.base + slot) as usize)
    }

    /// Forgets what lies behind slots; gives the leases, which steps that are under way may read still.
    pub(super) fn leave_behind(&mut self, gpu: &Gpu) -> Vec<Lease> {
        let behind: Vec<_> = self.layers.iter_mut().filter_map(|layer| layer.behind.take()).collect();
        self.out_of_reach = self.absent;
        (0..self.layers.len()).for_each(|index| self.tell(gpu, index));
        behind.into_iter().flat_map(|behind| behind.leases).collect()
    }

    /// True if every expert of every layer is in its slots.
    pub(super) const fn holds_all(&self) -> bool {
        self.absent == 0
    }

    /// True if kernels find every expert, in its layer's slots or behind them.
    pub(super) const fn reaches_all(&self) -> bool {
        self.out_of_reach == 0
    }

    /// True if they find none.
    pub(super) fn is_empty(&self) -> bool {
        let experts: usize = self.layers.iter().map(|layer| layer.slot_of.len()).sum();
        self.out_of_reach == experts
    }

    /// Bytes of a slot of the `index`-th MoE layer, if there is one.
    pub(super) fn slot_bytes(&self, index: usize) -> Option<u64> {
        self.layers.get(index).map(|layer| layer.slot_bytes)
    }

    /// Bytes of the experts of a token, `top_k` of each layer.
    pub(super) fn token_bytes(&self, top_k: usize) -> u64 {
        self.layers.iter().map(|layer| top_k as u64 * layer.slot_bytes).sum()
    }

    /// Slots of the `index`-th MoE layer.
    pub(super) fn room(&self, index: usize) -> usize {
        self.layers[index].expert_of.len()
    }

    /// Tells the device that every expert is somewhere, or again what is true; of layers that have nothing behind their
    /// slots, that they are in those.
    pub(super) fn pretend(&self, gpu: &Gpu, where_: Pretence) {
        for (index, layer) in self.layers.iter().enumerate() {
            let experts = layer.slot_of.len() as u32;
            let table: Vec<u32> = match (where_, &layer.behind) {
                (Pretence::None, _) => {
                    self.tell(gpu, index);
                    continue;
                }
                (Pretence::Behind, Some(_)) => (0..experts).map(|expert| WorkList::BEHIND | expert).collect(),
                _ => (0..experts).map(|expert| expert % layer.room).collect(),
            };
            gpu.write(&layer.table, 0, bytemuck::cast_slice(&table));
        }
    }

    /// Where an expert is.
    pub(super) fn place(&self, index: usize, expert: u32) -> Option<u32> {
        let slot = self.layers[index].slot_of[expert as usize];
        (slot != ABSENT).then_some(slot)
    }

    /// Counts a use of an expert that is here, by a kernel that is about to be recorded.
    pub(super) fn touch(&mut self, index: usize, slot: u32, stamp: u64) {
        let layer = &mut self.layers[index];
        layer.touch(slot, stamp);
        layer.used_in[slot as usize] = self.step;
        self.meter.hits.add(1);
    }

    /// Counts a use of an expert that is here, by a kernel that is done.
    pub(super) fn used(&mut self, index: usize, slot: u32, stamp: u64) {
        self.layers[index].touch(slot, stamp);
        self.meter.hits.add(1);
    }

    /// The recorded step was submitted: its slots may be written again.
    pub(super) fn submitted(&mut self) {
        self.step += 1;
    }

    /// Counts a use of an expert that is not here, and says whether it has been used more, by `margin` uses of late, than what
    /// its layer would give up for it.
    pub(super) fn is_better_off_with(&mut self, index: usize, expert: u32, stamp: u64, margin: f32) -> bool {
        let layer = &mut self.layers[index];
        layer.policy.outweighs(expert, stamp, margin) || !layer.free.is_empty()
    }

    /// A slot for an expert that is not here, its content given up. The device is told by [`Self::tell`].
    pub(super) fn admit(&mut self, index: usize, expert: u32, stamp: u64) -> Admission {
        let step = self.step;
        let layer = &mut self.layers[index];
        debug_assert_eq!(layer.slot_of[expert as usize], ABSENT);
        let slot = match layer.free.pop() {
            Some(slot) => slot,
            None => {
                let used = &layer.used_in;
                let Some(slot) = layer.policy.evict(&mut |slot| used[slot as usize] != step) else {
                    return Admission::Busy;
                };
                let old = std::mem::replace(&mut layer.expert_of[slot as usize], ABSENT);
                layer.slot_of[old as usize] = ABSENT;
                self.absent += 1;
                self.out_of_reach += usize::from(layer.slot_behind(old as usize).is_none());
                self.meter.evictions.add(1);
                slot
            }
        };
        layer.slot_of[expert as usize] = slot;
        self.absent -= 1;
        self.out_of_reach -= usize::from(layer.slot_behind(expert as usize).is_none());
        layer.expert_of[slot as usize] = expert;
        layer.used_in[slot as usize] = step;
        layer.policy.insert(slot, expert, stamp);
        self.meter.loads.add(1);
        self.meter.load_bytes.add(layer.slot_bytes);
        Admission::Slot(slot)
    }

    /// Tells the device where the experts of the `index`-th MoE layer are, before the next submitted step: at once, as
    /// each write is a copy of its own there.
    pub(super) fn tell(&self, gpu: &Gpu, index: usize) {
        let layer = &self.layers[index];
        let places: Vec<u32> = (0..layer.slot_of.len()).map(|expert| layer.place_of(expert)).collect();
        gpu.write(&layer.table, 0, bytemuck::cast_slice(&places));
    }

    /// The bytes of a slot, to be written.
    pub(super) fn slot(&self, index: usize, slot: u32, len: u64) -> Slice {
        let layer = &self.layers[index];
        layer.memory.part(u64::from(slot) * layer.slot_bytes, len)
    }

    /// Forgets every expert of the `index`-th MoE layer: gives the leases of those in the ring, which steps that are under
    /// way may read still.
    pub(super) fn clear(&mut self, gpu: &Gpu, index: usize) -> Vec<Lease> {
        let layer = &mut self.layers[index];
        let mut leases = std::mem::take(&mut layer.leases);
        let is_cache = leases.is_empty();
        for slot in 0..layer.expert_of.len() as u32 {
            let expert = std::mem::replace(&mut layer.expert_of[slot as usize], ABSENT);
            if expert != ABSENT {
                layer.slot_of[expert as usize] = ABSENT;
                self.absent += 1;
                self.out_of_reach += usize::from(layer.slot_behind(expert as usize).is_none());
                if is_cache {
                    layer.policy.remove(slot);
                    layer.free.push(slot);
                }
            }
        }
        if let Some(behind) = &mut layer.behind {
            self.out_of_reach += behind.leases.len();
            behind.slot_of.fill(ABSENT);
            leases.append(&mut behind.leases);
        }
        self.tell(gpu, index);
        leases
    }
}
