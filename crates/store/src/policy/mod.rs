//! Whom to evict. Pure: it sees slots and records as numbers, and uses with their stamps.
//!
//! LRU is what everybody understands, and the default. [`Lrfu`] is what the engine uses: on routes with some overlap, in
//! rings that are short, it hits 4 to 7 points more, where the best possible is 16 to 31; in rings that hold nearly all
//! that is used, and where routes are independent, it may lose a point (EXP-STORE-09). [`Policy`] is the place to try
//! another, [`crate::replay`] the way to score it.

mod candidates;
mod lrfu;
mod lru;
mod ordered;
mod queues;

pub use candidates::{Clock, Fifo, LfuDecay, S3Fifo, Slru};
pub use lrfu::Lrfu;
pub use lru::Lru;

/// An eviction policy over the slots that hold an expert.
///
/// Slots being loaded are not in it; leased ones are, and are passed over when a victim is sought. A *stamp* is
/// the recency of a use, larger is more recent; uses need not come in the order of their stamps.
pub trait Policy: Send {
    /// `slot`, which was not in the policy, now holds `record`, whose use has `stamp`.
    fn insert(&mut self, slot: u32, record: u32, stamp: u64);

    /// `slot` was demanded again.
    fn touch(&mut self, slot: u32, stamp: u64);

    /// `record`, which no slot holds, was demanded, and what it is needed for may be done without it: whether it should
    /// have the slot of what would be parted with first, having been used more, of late, by `margin` uses. A use that
    /// [`Self::insert`] counts then is counted once.
    fn outweighs(&mut self, record: u32, stamp: u64, margin: f32) -> bool {
        let _ = (record, stamp, margin);
        true
    }

    /// Offers slots to `take`, the one to part with first, until it takes one; that one leaves the policy. None
    /// only after every slot was offered.
    fn evict(&mut self, take: &mut dyn FnMut(u32) -> bool) -> Option<u32>;

    /// `slot`, which is in the policy, leaves it for another reason.
    fn remove(&mut self, slot: u32);
}

/// The policies by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PolicyKind {
    /// [`Lrfu`], with a half-life of [`PolicyKind::LRFU_HALF_LIFE`] stamps.
    Lrfu,
    /// [`Lru`].
    #[default]
    Lru,
    /// [`Fifo`].
    Fifo,
    /// [`Clock`].
    Clock,
    /// [`LfuDecay`], with a half-life of [`PolicyKind::HALF_LIFE`] stamps.
    LfuDecay,
    /// [`Slru`].
    Slru,
    /// [`S3Fifo`].
    S3Fifo,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Lrfu, Self::Lru, Self::Fifo, Self::Clock, Self::LfuDecay, Self::Slru, Self::S3Fifo];

    /// Half-life of [`PolicyKind::Lrfu`], in tokens: EXP-STORE-09.
    pub const LRFU_HALF_LIFE: u32 = 12;

    /// Half-life of [`PolicyKind::LfuDecay`]: a paragraph's worth of tokens. Not measured.
    pub const HALF_LIFE: u32 = 128;

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lrfu => "lrfu",
            Self::Lru => "lru",
            Self::Fifo => "fifo",
            Self::Clock => "clock",
            Self::LfuDecay => "lfu-decay",
            Self::Slru => "slru",
            Self::S3Fifo => "s3-fifo",
        }
    }

    /// The policy of that name, if there is one.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// A policy for slots `0..slots`, none held, and records `0..records`.
    pub fn build(self, slots: usize, records: usize) -> Box<dyn Policy> {
        match self {
            Self::Lrfu => Box::new(Lrfu::new(slots, records, Self::LRFU_HALF_LIFE)),
            Self::Lru => Box::new(Lru::new(slots)),
            Self::Fifo => Box::new(Fifo::new(slots)),
            Self::Clock => Box::new(Clock::new(slots)),
            Self::LfuDecay => Box::new(LfuDecay::new(slots, records, Self::HALF_LIFE)),
            Self::Slru => Box::new(Slru::new(slots)),
            Self::S3Fifo => Box::new(S3Fifo::new(slots, records)),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SLOTS: u32 = 24;

    #[derive(Clone, Debug)]
    enum Step {
        Use { slot: u32, record: u32, stamp: u64 },
        Evict { leased: u32 },
        Remove { slot: u32 },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            6 => (0..SLOTS, 0..40_u32, 0..50_u64)
                .prop_map(|(slot, record, stamp)| Step::Use { slot, record, stamp }),
            3 => any::<u32>().prop_map(|leased| Step::Evict { leased }),
            1 => (0..SLOTS).prop_map(|slot| Step::Remove { slot }),
        ];
        prop::collection::vec(step, 1..400)
    }

    proptest! {
        /// Against a `Vec` of (stamp, time of use, slot), searched from end to end.
        #[test]
        fn lru_agrees_with_a_vec(steps in steps()) {
            let mut lru = Lru::new(SLOTS as usize);
            let mut model: Vec<(u64, usize, u32)> = Vec::new();
            for (time, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Use { slot, record, stamp } => {
                        match model.iter_mut().find(|held| held.2 == slot) {
                            None => {
                                lru.insert(slot, record, stamp);
                                model.push((stamp, time, slot));
                            }
                            Some(held) => {
                                lru.touch(slot, stamp);
                                *held = (stamp.max(held.0), time, slot);
                            }
                        }
                    }
                    Step::Evict { leased } => {
                        let free = |slot: u32| leased & (1 << slot) == 0;
                        let expected = model.iter().filter(|held| free(held.2)).min().copied();
                        model.retain(|held| Some(*held) != expected);
                        prop_assert_eq!(lru.evict(&mut |slot| free(slot)), expected.map(|held| held.2));
                    }
                    Step::Remove { slot } => {
                        if let Some(place) = model.iter().position(|held| held.2 == slot) {
                            lru.remove(slot);
                            model.remove(place);
                        }
                    }
                }
            }
        }

        /// Whatever a policy prefers, it offers what it holds and nothing else, and all of it before it gives up.
        #[test]
        fn every_policy_parts_with_what_it_holds(steps in steps()) {
            for kind in PolicyKind::ALL {
                let mut policy = kind.build(SLOTS as usize, 40);
                let mut held = 0_u32;
                for step in &steps {
                    match *step {
                        Step::Use { slot, record, stamp } if held & (1 << slot) == 0 => {
                            policy.insert(slot, record, stamp);
                            held |= 1 << slot;
                        }
                        Step::Use { slot, stamp, .. } => policy.touch(slot, stamp),
                        Step::Evict { leased } => {
                            let mut offered = 0;
                            let taken = policy.evict(&mut |slot| {
                                offered |= 1 << slot;
                                leased & (1 << slot) == 0
                            });
                            prop_assert_eq!(offered & !held, 0, "{} offered a stranger", kind.name());
                            match taken {
                                Some(slot) => held &= !(1 << slot),
                                None => prop_assert_eq!(offered, held, "{} gave up early", kind.name()),
                            }
                        }
                        Step::Remove { slot } if held & (1 << slot) != 0 => {
                            policy.remove(slot);
                            held &= !(1 << slot);
                        }
                        Step::Remove { .. } => {}
                    }
                }
            }
        }
    }

    #[test]
    fn names_lead_back() {
        for kind in PolicyKind::ALL {
            assert_eq!(PolicyKind::by_name(kind.name()), Some(kind));
        }
        assert_eq!(PolicyKind::by_name("mru"), None);
        assert_eq!(PolicyKind::default(), PolicyKind::Lru);
    }

    /// Each candidate's own idea, on the smallest case that shows it.
    #[test]
    fn candidates_do_what_they_are_named_for() {
        let any = &mut |_| true;
        let filled = |kind: PolicyKind| {
            let mut policy = kind.build(4, 10);
            (0..4).for_each(|slot| policy.insert(slot, slot, u64::from(slot)));
            policy
        };
        let mut fifo = filled(PolicyKind::Fifo);
        fifo.touch(0, 9);
        assert_eq!(fifo.evict(any), Some(0));
        let mut clock = filled(PolicyKind::Clock);
        clock.touch(0, 9);
        assert_eq!(clock.evict(any), Some(1), "0 has a second chance");
        let mut lfu = filled(PolicyKind::LfuDecay);
        [0, 0, 1, 1, 2].into_iter().for_each(|slot| lfu.touch(slot, 4));
        assert_eq!(lfu.evict(any), Some(3), "used last, but once");
        assert_eq!(lfu.evict(any), Some(2));
        lfu.insert(2, 7, 100 * u64::from(PolicyKind::HALF_LIFE));
        assert_eq!(lfu.evict(any), Some(0), "old uses have faded");
        let mut lrfu = filled(PolicyKind::Lrfu);
        lrfu.touch(0, 4);
        assert_eq!(lrfu.evict(any), Some(1), "0 was used twice");
        lrfu.touch(3, 4);
        lrfu.touch(2, 4);
        lrfu.touch(2, 4);
        assert_eq!(lrfu.evict(any), Some(0), "the same use twice is one");
        lrfu.insert(0, 0, 5);
        lrfu.insert(1, 9, 5);
        assert_eq!(lrfu.evict(any), Some(1), "what 0 was used for before it left is remembered");
        let mut lrfu = filled(PolicyKind::Lrfu);
        assert!(!lrfu.outweighs(8, 5, 1.0), "a use of late is not one more than a use shortly before");
        assert!(lrfu.outweighs(8, 5, 0.0) && !lrfu.outweighs(8, 5, 1.0), "the same use twice is one");
        assert!(
            lrfu.outweighs(8, 6, 0.75) && lrfu.outweighs(9, 500, 0.75),
            "a second use, and what has faded"
        );
        assert_eq!(lrfu.evict(any), Some(0), "nothing was taken in");
        assert!(PolicyKind::Lru.build(1, 2).outweighs(1, 0, 9.0));
        let mut slru = filled(PolicyKind::Slru);
        slru.touch(0, 4);
        assert_eq!([slru.evict(any), slru.evict(any)], [Some(1), Some(2)], "0 is protected");
        let mut s3 = filled(PolicyKind::S3Fifo);
        s3.touch(0, 4);
        s3.touch(0, 5);
        assert_eq!(s3.evict(any), Some(1), "0 moves on");
        s3.insert(1, 1, 6);
        assert_eq!([s3.evict(any), s3.evict(any)], [Some(2), Some(3)], "1 was remembered");
    }
}
