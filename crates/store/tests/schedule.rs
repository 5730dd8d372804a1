//! Both orders, low priority and the limit, against a naive model of the whole schedule.
//!
//! One reader and a disk that ends a read when it is told make every order of events one that the test chose.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // Tests stop at the first surprise, and say what they saw.

mod support;

use smoe_meter::StoreSnapshot;
use smoe_store::{ExpertKey, Lease, Order, Store, StoreConfig, StoreError, Want};
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use support::{Random, Turnstile, Vault, one_by_one, within_a_minute};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Lane {
    Demand,
    Low,
}

struct Resident {
    key: ExpertKey,
    stamp: u64,
    used: u64,
    unasked: bool,
}

struct Loading {
    key: ExpertKey,
    stamp: u64,
    unasked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Wanted,
    Loading,
    Ready(bool),
    Gone,
}

struct Cell {
    key: ExpertKey,
    stamp: u64,
    state: State,
    hit: bool,
}

#[derive(Debug, PartialEq)]
enum Taken {
    Leases(Vec<ExpertKey>),
    Failed(ExpertKey),
    Stalled { slots: usize, wanted: usize },
}

/// Everything as lists that are searched from end to end.
struct Model {
    floor: usize,
    all_slots: usize,
    limit: usize,
    slots: usize,
    time: u64,
    residents: Vec<Resident>,
    loading: Vec<Loading>,
    demand_queue: VecDeque<ExpertKey>,
    low_queue: VecDeque<ExpertKey>,
    running: Option<(ExpertKey, Lane)>,
    done: Vec<(ExpertKey, Lane, bool)>,
    order: Order,
    cells: Vec<Cell>,
    arrivals: VecDeque<usize>,
    list: VecDeque<Want>,
    named: Vec<ExpertKey>,
    may_evict: bool,
    /// What the test leases.
    held: Vec<ExpertKey>,
    counted: StoreSnapshot,
}

impl Model {
    fn new(slots: usize, floor: usize) -> Self {
        Self {
            floor,
            all_slots: slots,
            limit: slots,
            slots,
            time: 0,
            residents: Vec::new(),
            loading: Vec::new(),
            demand_queue: VecDeque::new(),
            low_queue: VecDeque::new(),
            running: None,
            done: Vec::new(),
            order: Order::Arrival,
            cells: Vec::new(),
            arrivals: VecDeque::new(),
            list: VecDeque::new(),
            named: Vec::new(),
            may_evict: false,
            held: Vec::new(),
            counted: StoreSnapshot::default(),
        }
    }

    fn is_resident(&self, key: ExpertKey) -> bool {
        self.residents.iter().any(|r| r.key == key)
    }

    fn is_loading(&self, key: ExpertKey) -> bool {
        self.loading.iter().any(|l| l.key == key)
    }

    fn forget_load(&mut self, key: ExpertKey) -> Loading {
        let place = self.loading.iter().position(|l| l.key == key).expect("loading");
        self.loading.remove(place)
    }

    fn is_leased(&self, key: ExpertKey) -> bool {
        let ready = |cell: &Cell| cell.key == key && cell.state == State::Ready(true);
        self.held.contains(&key) || self.cells.iter().any(ready)
    }

    fn in_batch(&self, key: ExpertKey) -> bool {
        self.cells.iter().any(|cell| cell.key == key)
    }

    fn n_wanted(&self) -> usize {
        self.cells.iter().filter(|cell| cell.state == State::Wanted).count()
    }

    fn evict(&mut self, spared: impl Fn(&Self, ExpertKey) -> bool) -> bool {
        let victims = self.residents.iter().filter(|r| !self.is_leased(r.key) && !spared(self, r.key));
        let victim = victims.min_by_key(|r| (r.stamp, r.used)).map(|r| r.key);
        victim.is_some_and(|victim| {
            self.evict_this(victim);
            true
        })
    }

    fn evict_this(&mut self, victim: ExpertKey) {
        let place = self.residents.iter().position(|r| r.key == victim).expect("resident");
        let resident = self.residents.remove(place);
        self.counted.evictions += 1;
        self.counted.ahead_waste += u64::from(resident.unasked);
    }

    fn has_free(&self) -> bool {
        self.residents.len() + self.loading.len() < self.slots
    }

    fn trim(&mut self) {
        while self.slots > self.limit && (self.has_free() || self.evict(|_, _| false)) {
            self.slots -= 1;
        }
    }

    fn set_limit(&mut self, limit: usize) {
        self.collect();
        self.limit = limit.clamp(self.floor, self.all_slots);
        self.slots = self.slots.max(self.limit);
        self.trim();
    }

    fn collect(&mut self) {
        for (key, lane, ok) in std::mem::take(&mut self.done) {
            let load = self.forget_load(key);
            if ok {
                self.time += 1;
                let Loading { key, stamp, unasked } = load;
                self.residents.push(Resident { key, stamp, used: self.time, unasked });
                self.counted.loads += 1;
            }
            if lane == Lane::Low {
                self.counted.ahead_reads += u64::from(ok);
                self.counted.ahead_errors += u64::from(!ok);
            }
            let waits = |cell: &Cell| cell.key == key && cell.state == State::Loading;
            if let Some(position) = self.cells.iter().position(waits) {
                if !ok && lane == Lane::Low {
                    self.cells[position].state = State::Wanted;
                } else {
                    self.cells[position].state = State::Ready(ok);
                    self.arrivals.push_back(position);
                }
            }
        }
        self.trim();
    }

    fn demand(&mut self, wants: &[Want], order: Order) {
        self.collect();
        self.list.clear();
        self.named.clear();
        let mut outbox = Vec::new();
        for key in std::mem::take(&mut self.low_queue) {
            if wants.iter().any(|want| want.key == key) {
                outbox.push(key);
            } else {
                self.forget_load(key);
            }
        }
        self.order = order;
        for &Want { key, stamp } in wants {
            let mut cell = Cell { key, stamp, state: State::Wanted, hit: false };
            if let Some(r) = self.residents.iter_mut().find(|r| r.key == key) {
                self.time += 1;
                (r.stamp, r.used) = (r.stamp.max(stamp), self.time);
                self.counted.ahead_hits += u64::from(std::mem::take(&mut r.unasked));
                (cell.state, cell.hit) = (State::Ready(true), true);
                self.arrivals.push_back(self.cells.len());
            } else if let Some(l) = self.loading.iter_mut().find(|l| l.key == key) {
                l.stamp = l.stamp.max(stamp);
                self.counted.ahead_late += u64::from(std::mem::take(&mut l.unasked));
                cell.state = State::Loading;
            }
            self.counted.demand_misses += u64::from(!cell.hit);
            self.cells.push(cell);
        }
        self.read_ahead(outbox);
    }

    fn read_ahead(&mut self, mut outbox: Vec<ExpertKey>) {
        while let Some(position) = self.cells.iter().position(|cell| cell.state == State::Wanted) {
            self.trim();
            let Cell { key, stamp, .. } = self.cells[position];
            let won = self.has_free() || self.evict(|_, _| false) || self.take_from_behind(position);
            if !won {
                break;
            }
            self.loading.push(Loading { key, stamp, unasked: false });
            self.cells[position].state = State::Loading;
            outbox.push(key);
        }
        outbox.sort_by_key(|&key| self.cells.iter().position(|cell| cell.key == key));
        self.demand_queue.extend(outbox);
    }

    fn take_from_behind(&mut self, position: usize) -> bool {
        // One reader: two loads keep it busy.
        if self.order == Order::Arrival || self.loading.len() >= 2 {
            return false;
        }
        let takable =
            |&i: &usize| self.cells[i].state == State::Ready(true) && !self.held.contains(&self.cells[i].key);
        let Some(behind) = (position + 1..self.cells.len()).rev().find(takable) else { return false };
        let cell = &mut self.cells[behind];
        cell.state = State::Wanted;
        self.counted.demand_misses += u64::from(std::mem::take(&mut cell.hit));
        let victim = cell.key;
        self.evict_this(victim);
        true
    }

    fn read_expected(&mut self) {
        while self.n_wanted() == 0
            && let Some(&Want { key, stamp }) = self.list.front()
        {
            if !self.is_resident(key) && !self.is_loading(key) {
                self.trim();
                let spared = |model: &Self, key| model.named.contains(&key) || model.in_batch(key);
                let won = self.has_free() || (self.may_evict && self.evict(spared));
                if !won {
                    return;
                }
                self.loading.push(Loading { key, stamp, unasked: true });
                self.low_queue.push_back(key);
            }
            self.list.pop_front();
        }
    }

    fn poll(&mut self) {
        self.collect();
        self.read_ahead(Vec::new());
        self.read_expected();
    }

    fn expect(&mut self, wants: &[Want], may_evict: bool) {
        for key in std::mem::take(&mut self.low_queue) {
            self.forget_load(key);
        }
        self.list = wants.iter().copied().collect();
        self.named = wants.iter().map(|want| want.key).collect();
        self.may_evict = may_evict;
        self.poll();
    }

    fn next_ready(&self) -> Option<usize> {
        match self.order {
            Order::Arrival => self.arrivals.front().copied(),
            Order::Given => {
                let first = self.cells.iter().position(|cell| cell.state != State::Gone)?;
                matches!(self.cells[first].state, State::Ready(_)).then_some(first)
            }
        }
    }

    fn remaining(&self) -> usize {
        self.cells.iter().filter(|cell| cell.state != State::Gone).count()
    }

    /// After a poll, when it need not wait.
    fn take_ready(&mut self, max: usize) -> Taken {
        let mut leases = Vec::new();
        while let Some(position) = self.next_ready()
            && leases.len() < max
        {
            let key = self.cells[position].key;
            let ok = self.cells[position].state == State::Ready(true);
            if !ok && !leases.is_empty() {
                break;
            }
            self.cells[position].state = State::Gone;
            self.arrivals.retain(|&p| p != position);
            if !ok {
                return Taken::Failed(key);
            }
            self.held.push(key);
            leases.push(key);
        }
        if leases.is_empty() && self.remaining() > 0 {
            return Taken::Stalled { slots: self.slots, wanted: self.n_wanted() };
        }
        Taken::Leases(leases)
    }

    fn end_batch(&mut self) {
        if self.remaining() > 0 {
            for key in std::mem::take(&mut self.demand_queue) {
                self.forget_load(key);
            }
        }
        self.counted.demand_hits += self.cells.iter().filter(|cell| cell.hit).count() as u64;
        self.cells.clear();
        self.arrivals.clear();
    }

    /// The reader takes what it can; returns whether it has taken something just now.
    fn begin_read(&mut self) -> bool {
        if self.running.is_none() {
            let demand = self.demand_queue.pop_front().map(|key| (key, Lane::Demand));
            self.running = demand.or_else(|| self.low_queue.pop_front().map(|key| (key, Lane::Low)));
            return self.running.is_some();
        }
        false
    }
}

/// What the test does through the store, or through a demand that borrows it.
trait Handle {
    fn poll(&mut self);
    fn in_flight(&self) -> usize;
}

impl Handle for Store {
    fn poll(&mut self) {
        Store::poll(self);
    }

    fn in_flight(&self) -> usize {
        Store::in_flight(self)
    }
}

impl Handle for smoe_store::Demand<'_> {
    fn poll(&mut self) {
        smoe_store::Demand::poll(self);
    }

    fn in_flight(&self) -> usize {
        smoe_store::Demand::in_flight(self)
    }
}

struct Run {
    vault: Vault,
    disk: Arc<Turnstile>,
    model: Model,
    random: Random,
    fail_share: usize,
}

impl Run {
    /// The reader is where the model has it.
    fn settle(&mut self) {
        if self.model.begin_read() {
            let (key, _) = self.model.running.unwrap();
            assert_eq!(self.disk.wait_for_reader(), self.vault.record(key).offset, "another read than {key}");
        }
    }

    fn poll(&mut self, store: &mut dyn Handle) {
        store.poll();
        self.model.poll();
        self.settle();
    }

    /// Ends the read that is under way, if there is one.
    fn end_read(&mut self, store: &mut dyn Handle) {
        let Some((key, lane)) = self.model.running else { return };
        if self.model.demand_queue.is_empty() && self.model.low_queue.is_empty() {
            // Nothing that follows would show that it has ended, so it is polled for; before that, once more
            // without it.
            self.poll(store);
        }
        let ok = self.random.below(100) >= self.fail_share;
        self.disk.release(ok);
        self.model.running = None;
        self.model.done.push((key, lane, ok));
        if self.model.demand_queue.is_empty() && self.model.low_queue.is_empty() {
            while store.in_flight() > 0 && !self.disk.has_reader() {
                store.poll();
                std::thread::yield_now();
            }
            self.model.poll();
        }
        self.settle();
    }

    fn wants(&mut self, most: usize) -> Vec<Want> {
        let all = self.vault.keys();
        let size = self.random.below(most + 1).min(self.random.below(most + 1));
        let chosen = self.random.choose(size, all.len());
        // Stamps come out of order, and again.
        chosen.into_iter().map(|i| Want { key: all[i], stamp: self.random.next() % 6 }).collect()
    }

    fn compare(&self, store: &Store) {
        let residents: HashSet<ExpertKey> = store.residents().collect();
        assert_eq!(residents, self.model.residents.iter().map(|r| r.key).collect());
        let mut told = HashSet::new();
        store.residency(&mut |key, resident| {
            if resident {
                told.insert(key);
            }
        });
        assert_eq!(told, residents);
        assert_eq!(store.n_resident(), residents.len());
        assert_eq!((store.limit(), store.n_slots()), (self.model.limit, self.model.slots));
        assert_eq!(store.in_flight(), self.model.loading.len());
        let counted = store.meter().snapshot();
        let of_model = StoreSnapshot {
            demand_hits: self.model.counted.demand_hits,
            demand_misses: self.model.counted.demand_misses,
            evictions: self.model.counted.evictions,
            loads: self.model.counted.loads,
            ahead_reads: self.model.counted.ahead_reads,
            ahead_hits: self.model.counted.ahead_hits,
            ahead_late: self.model.counted.ahead_late,
            ahead_waste: self.model.counted.ahead_waste,
            ahead_errors: self.model.counted.ahead_errors,
            ..counted
        };
        assert_eq!(counted, of_model);
        assert_eq!(counted.loads - counted.evictions, residents.len() as u64);
    }

    /// One batch from its demand to its end, or not quite.
    fn batch(&mut self, store: &mut Store, held: &mut Vec<Lease>) {
        let wants = self.wants(self.vault.records.len());
        let order = [Order::Arrival, Order::Given][self.random.below(2)];
        let keep = self.random.below(4);
        let patience = [usize::MAX, usize::MAX, self.random.below(12)][self.random.below(3)];
        let mut demand = store.demand(&wants, order).unwrap();
        self.model.demand(&wants, order);
        self.settle();
        let mut out = Vec::new();
        let mut order_seen = Vec::new();
        for _ in 0..patience {
            match self.random.below(5) {
                0 => {
                    let wants = self.wants(8);
                    demand.expect(&wants);
                    self.model.expect(&wants, true);
                    self.settle();
                }
                1 => self.end_read(&mut demand),
                _ => {}
            }
            // Until it need not wait.
            self.poll(&mut demand);
            while self.model.next_ready().is_none() && !self.model.loading.is_empty() {
                self.end_read(&mut demand);
                self.poll(&mut demand);
            }
            assert_eq!(demand.remaining(), self.model.remaining());
            let max = 1 + self.random.below(4);
            let expected = self.model.take_ready(max);
            let taken = match demand.take_ready(max, &mut out) {
                Ok(_) => Taken::Leases(out.iter().map(Lease::key).collect()),
                Err(StoreError::Read { key, .. }) => Taken::Failed(key),
                Err(StoreError::Stalled { slots, leased, wanted }) => {
                    assert_eq!(leased, slots);
                    Taken::Stalled { slots, wanted }
                }
                Err(error) => panic!("{error}"),
            };
            assert_eq!(taken, expected);
            match taken {
                Taken::Leases(keys) if keys.is_empty() => break,
                Taken::Leases(keys) => order_seen.extend(keys),
                Taken::Failed(key) => order_seen.push(key),
                Taken::Stalled { slots, .. } => {
                    let ours: HashSet<usize> = held.iter().map(Lease::slot).collect();
                    assert_eq!(ours.len(), slots, "the consumer holds every lease");
                    self.let_go(held, slots - 1);
                }
            }
            out.iter().for_each(|lease| self.vault.check(lease));
            held.append(&mut out);
            self.let_go(held, keep);
        }
        if order == Order::Given {
            let given: Vec<ExpertKey> = wants.iter().map(|want| want.key).take(order_seen.len()).collect();
            assert_eq!(order_seen, given);
        }
        drop(demand);
        self.model.end_batch();
        self.settle();
    }

    fn let_go(&mut self, held: &mut Vec<Lease>, most: usize) {
        while held.len() > most {
            let lease = held.swap_remove(self.random.below(held.len()));
            self.vault.check(&lease);
            let place = self.model.held.iter().position(|&key| key == lease.key()).unwrap();
            self.model.held.swap_remove(place);
        }
    }
}

fn agrees_with_the_model(seed: u64, slots: usize, fail_share: usize, steps: usize) {
    let vault = Vault::new(3, 5, 512);
    let disk = Turnstile::new(vault.bytes.clone());
    let floor = 1 + seed as usize % 2;
    let config = StoreConfig { floor, ..one_by_one(slots, vault.slot_bytes(), 1) };
    let mut store = vault.open_as(disk.clone(), config);
    let model = Model::new(slots, floor.min(slots));
    let mut run = Run { vault, disk, model, random: Random(seed), fail_share };
    let mut held: Vec<Lease> = Vec::new();
    for _ in 0..steps {
        match run.random.below(8) {
            0 => {
                let wants = run.wants(8);
                store.expect(&wants);
                run.model.expect(&wants, true);
                run.settle();
            }
            1 => {
                let keys: Vec<ExpertKey> = run.wants(15).iter().map(|want| want.key).collect();
                store.prewarm(&keys);
                run.model.expect(&support::wants(&keys), false);
                run.settle();
            }
            2 => {
                let limit = run.random.below(slots + 3);
                store.set_limit(limit);
                run.model.set_limit(limit);
            }
            3 => run.poll(&mut store),
            4 => run.end_read(&mut store),
            _ => run.batch(&mut store, &mut held),
        }
        run.compare(&store);
    }
    run.disk.open();
    println!("{slots} slots: {:?}", run.model.counted);
    let Model { counted, .. } = run.model;
    assert!(counted.ahead_reads > 0 && counted.ahead_late > 0 && counted.ahead_waste > 0);
    assert_eq!(counted.ahead_errors > 0, fail_share > 0);
}

#[test]
fn the_schedule_agrees_with_the_model() {
    within_a_minute(|| {
        for (seed, slots) in [1, 2, 3, 4, 6, 9, 13, 15].into_iter().enumerate() {
            agrees_with_the_model(seed as u64, slots, [0, 15][seed % 2], 1500);
            agrees_with_the_model(100 + seed as u64, slots, 15, 1500);
        }
    });
}
