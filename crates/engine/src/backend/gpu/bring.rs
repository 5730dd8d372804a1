//! How experts come to the device, and what it holds of the ring until it has done with it.

use std::ops::Range;

use smoe_gpu::GpuError;
use smoe_store::Lease;

use super::flow::stamp;
use super::host::MARGIN;
use super::ops::LayerOps;
use super::tier::Admission;
use super::{GpuBackend, LISTS};
use crate::EngineError;
use crate::device::ExpertPath;
use crate::routes::Routes;

impl GpuBackend {
    /// Kernels read experts where the ring has them.
    pub(super) fn reads_in_place(&self) -> bool {
        self.plan.path == ExpertPath::InPlace
    }

    /// Kernels read what the device lacks where the ring has it, over the bus.
    fn reads_over_bus(&self) -> bool {
        self.plan.path == ExpertPath::ZeroCopy
    }

    /// Computes experts that have come into the ring: there, in their slots, or on the processor.
    pub(super) fn compute_ready(
        &mut self,
        layer: usize,
        ready: &mut Vec<Lease>,
        routes: &Routes,
    ) -> Result<(), EngineError> {
        let Some(index) = self.layers[layer].ops.moe().map(|moe| moe.index) else { return Ok(()) };
        self.meter.misses.add(ready.len() as u64);
        if self.flow.resumed && self.host.is_some() {
            self.compute_here(index, ready, routes);
            return Ok(());
        }
        if self.reads_in_place() {
            let in_ring = |lease: &Lease| {
                let expert = lease.key().expert;
                (lease.slot() as u32, expert, routes.of_expert(expert).0)
            };
            self.compute(layer, &ready.iter().map(in_ring).collect::<Vec<_>>());
            // Only now: what was handed over in between reads some of them, what is recorded the others.
            ready.drain(..).for_each(|lease| self.flights.hold(lease));
            return Ok(());
        }
        if self.listed == LISTS {
            // Now, and not when slots are admitted and what reads them is yet to be recorded: those would pass for read.
            self.submit();
        }
        let mut batch = Vec::with_capacity(ready.len());
        for lease in ready.drain(..) {
            let expert = lease.key().expert;
            let stamp = self.tokens_done + stamp(routes, expert);
            let slot = loop {
                match self.tier.admit(index, expert, stamp) {
                    Admission::Slot(slot) => break slot,
                    Admission::Busy => {
                        // What is recorded reads every slot: hand it over, then its slots may be written.
                        self.take_in(layer, &mut batch, routes);
                        self.submit();
                    }
                }
            };
            batch.push((slot, lease));
        }
        self.take_in(layer, &mut batch, routes);
        Ok(())
    }

    /// Computes experts of the halted layer on the processor, writes what they make where the device's own write it, and
    /// brings it those that it is better off with.
    fn compute_here(&mut self, index: usize, ready: &mut Vec<Lease>, routes: &Routes) {
        let Self { host: Some(host), gpu, pool, outputs, tokens, .. } = self else { return };
        host.compute(pool, index, *tokens, ready, routes, |pair, output| {
            let bytes: &[u8] = bytemuck::cast_slice(output);
            gpu.write(outputs, u64::from(pair) * bytes.len() as u64, bytes);
        });
        self.meter.computed.add(ready.len() as u64);
        let mut batch = Vec::new();
        for lease in ready.drain(..) {
            // Where it lies behind the slots the device finds it from now on.
            let Some(lease) = self.tier.place_behind(index, lease) else { continue };
            let expert = lease.key().expert;
            let stamp = self.tokens_done + stamp(routes, expert);
            if self.tier.is_better_off_with(index, expert, stamp, MARGIN)
                && let Admission::Slot(slot) = self.tier.admit(index, expert, stamp)
            {
                batch.push((slot, lease));
            }
        }
        self.upload(index, batch);
        self.tier.tell(&self.gpu, index);
    }

    /// Brings experts into their slots and records them.
    fn take_in(&mut self, layer: usize, batch: &mut Vec<(u32, Lease)>, routes: &Routes) {
        let Some(index) = self.layers[layer].ops.moe().map(|moe| moe.index) else { return };
        let here = |(slot, lease): &(u32, Lease)| {
            let expert = lease.key().expert;
            (*slot, expert, routes.of_expert(expert).0)
        };
        let experts: Vec<_> = batch.iter().map(here).collect();
        self.upload(index, std::mem::take(batch));
        self.compute(layer, &experts);
    }

    /// Records experts that are there: (slot, expert, its pairs). Slots are the layer's; those of the ring if kernels read
    /// it, a dispatch for each segment that has some.
    pub(super) fn compute(&mut self, layer: usize, experts: &[(u32, u32, &[u32])]) {
        let ring = self.ring.as_ref().filter(|_| self.reads_in_place());
        let Some(ring) = ring.cloned() else {
            self.compute_in(layer, 0, 1, experts);
            return;
        };
        let segments = ring.segments().len();
        let mut parts = vec![Vec::new(); segments];
        for &(slot, expert, pairs) in experts {
            let (segment, at) = ring.locate(slot);
            parts[segment].push((at, expert, pairs));
        }
        for (segment, experts) in parts.iter().enumerate() {
            self.compute_in(layer, segment, segments, experts);
        }
    }

    /// The same of one segment of so many.
    fn compute_in(&mut self, layer: usize, segment: usize, segments: usize, experts: &[(u32, u32, &[u32])]) {
        if experts.is_empty() {
            return;
        }
        if self.listed == LISTS {
            self.submit();
        }
        let Some(moe) = self.layers[layer].ops.moe() else { return };
        self.lists[self.listed].write(&self.gpu, self.tokens, experts);
        moe.lists[self.listed * segments + segment].record(self.recorder.step(), self.tokens);
        self.listed += 1;
    }

    /// Brings experts into their slots ahead of any step, and waits until they are there.
    pub(super) fn fill_slots(&mut self, layer: usize, ready: &mut Vec<Lease>) -> Result<(), EngineError> {
        let Some(index) = self.layers[layer].ops.moe().map(|moe| moe.index) else { return Ok(()) };
        let mut batch = Vec::with_capacity(ready.len());
        for lease in ready.drain(..) {
            let expert = lease.key().expert;
            if self.reads_over_bus() {
                // Its first use brings it.
                drop(self.tier.place_behind(index, lease));
                continue;
            }
            if self.tier.place(index, expert).is_some() {
                continue;
            }
            if self.reads_in_place() {
                // One that lies elsewhere is named by the host when it is needed.
                drop(self.tier.place_at(index, lease));
            } else if let Admission::Slot(slot) = self.tier.admit(index, expert, self.tokens_done) {
                batch.push((slot, lease));
            }
        }
        if self.reads_in_place() || self.reads_over_bus() {
            self.tier.tell(&self.gpu, index);
            return Ok(self.gpu.check()?);
        }
        self.upload(index, batch);
        // What is written waits in memory of the host's until something is submitted.
        let submitted = self.copies.take().unwrap_or_else(|| self.gpu.step()).submit();
        self.tier.submitted();
        self.flights.submitted(&submitted);
        self.gpu.wait(&submitted)?;
        self.land();
        Ok(())
    }

    /// Brings experts that lie behind a layer's slots into some of those, from slots of the ring: before what is recorded, by the
    /// device.
    pub(super) fn copy_over(&mut self, index: usize, brought: &[(u32, usize)]) {
        let Some(ring) = self.ring.as_ref().filter(|_| !brought.is_empty()) else { return };
        let copies = self.copies.get_or_insert_with(|| self.gpu.step());
        for &(slot, from) in brought {
            let to = self.tier.slot(index, slot, self.tier.slot_bytes(index).unwrap_or(0));
            copies.copy(&ring.slot(from, to.len()), &to);
        }
        self.tier.tell(&self.gpu, index);
    }

    /// Brings experts into their slots, before what is recorded: now, or by the device, which holds their leases until it has.
    fn upload(&mut self, index: usize, batch: Vec<(u32, Lease)>) {
        if batch.is_empty() {
            return;
        }
        match &self.ring {
            Some(ring) => {
                let copies = self.copies.get_or_insert_with(|| self.gpu.step());
                for (slot, lease) in batch {
                    let len = lease.bytes().len() as u64;
                    copies.copy(&ring.slot(lease.slot(), len), &self.tier.slot(index, slot, len));
                    self.flights.hold(lease);
                }
            }
            None => {
                let part = |(slot, lease): &(u32, Lease)| {
                    let len = lease.bytes().len() as u64;
                    self.tier.slot(index, *slot, len)
                };
                let parts: Vec<_> = batch.iter().map(|of| (part(of), of.1.bytes())).collect();
                self.gpu.write_all(&parts, &|tasks, task| self.pool.run(tasks, task));
            }
        }
        self.tier.tell(&self.gpu, index);
    }

    /// Forgets the experts of these layers, and waits until nothing reads them.
    pub(super) fn clear_slots(&mut self, layers: Range<usize>) {
        self.submit();
        for moe in self.layers[layers].iter().filter_map(|layer| layer.ops.moe()) {
            // A step that was begun before anyone asked for it may read them.
            self.tier.clear(&self.gpu, moe.index).into_iter().for_each(|lease| self.flights.hold(lease));
        }
        // A device that failed says so when it is asked next.
        let _ = self.land_all();
    }

    /// Gives back the leases that the device has done with. A failure shows when something is read.
    pub(super) fn land(&mut self) {
        let _ = self.flights.land(|submitted| self.gpu.is_done(submitted));
    }

    /// Hands over what reads leases, if something is recorded that does.
    fn take_off(&mut self) {
        if self.flights.is_recorded() {
            let _ = self.recorder.step();
            self.submit();
        }
    }

    /// Waits until every lease is given back.
    fn land_all(&mut self) -> Result<(), EngineError> {
        self.take_off();
        if let Some(latest) = self.flights.latest() {
            self.gpu.wait(latest)?;
        }
        // The device works in the order in which it is handed things.
        let _ = self.flights.land(|_| Ok::<_, GpuError>(true));
        Ok(())
    }

    /// Waits until what was handed over first gives its leases back; false if none is held.
    pub(super) fn land_oldest(&mut self) -> Result<bool, EngineError> {
        // By staging an expert's bytes are on their way when its lease is dropped, and none is held.
        let held = self.flights.held();
        if self.flights.oldest().is_none() {
            self.take_off();
        }
        if let Some(oldest) = self.flights.oldest() {
            self.gpu.wait(oldest)?;
            self.land();
        }
        Ok(self.flights.held() < held)
    }

    /// Gives up what lies behind slots: no kernel reads it any more, nor any that is recorded. Kernels that do without are made
    /// now.
    fn leave_behind(&mut self) -> Result<(), EngineError> {
        if !self.reads_over_bus() {
            return Ok(());
        }
        (self.flow.foreseen, self.flow.begun) = (None, None);
        // What is under way may read it without a lease in a flight.
        let copies = self.copies.take().unwrap_or_else(|| self.gpu.step());
        self.gpu.wait(&copies.submit())?;
        self.tier.leave_behind(&self.gpu).into_iter().for_each(drop);
        for layer in &mut self.layers {
            if let LayerOps::Moe(moe) = &mut layer.ops {
                let (slots, ..) = self.tier.bindings(moe.index);
                moe.own = moe.operands.routed(&self.gpu, &moe.list, slots, None)?;
                let shared = moe.shared.as_ref();
                moe.lone = moe.operands.with_shared(&self.gpu, &moe.list, slots, None, shared)?;
            }
        }
        Ok(())
    }

    /// Gives up the ring and brings experts by staging from then on; false if kernels read it.
    pub(super) fn withdraw_ring(&mut self) -> Result<bool, EngineError> {
        if self.reads_in_place() {
            return Ok(false);
        }
        if self.ring.is_some() {
            self.land_all()?;
            self.leave_behind()?;
            self.ring = None;
            self.plan.path = ExpertPath::Staging;
            self.path_note = Some("memory was short, and the ring was taken back from the device".to_owned());
        }
        Ok(true)
    }
}
