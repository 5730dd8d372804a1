//! Slots in queues: doubly linked lists threaded through one `Vec`.

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
}

/// `queues` queues over slots `0..slots`; a slot is in one of them or in none.
#[derive(Debug)]
pub(super) struct Queues {
    /// Per slot its neighbours; then per queue its end, which closes the ring. Of a slot in no queue, stale.
    links: Vec<Link>,
    slots: usize,
    lengths: Vec<usize>,
}

impl Queues {
    pub(super) fn new(slots: usize, queues: usize) -> Self {
        let links = (0..(slots + queues) as u32).map(|node| Link { older: node, newer: node }).collect();
        Self { links, slots, lengths: vec![0; queues] }
    }

    fn end(&self, queue: usize) -> u32 {
        (self.slots + queue) as u32
    }

    pub(super) fn len(&self, queue: usize) -> usize {
        self.lengths[queue]
    }

    /// Appends `slot`, which is in no queue.
    pub(super) fn push(&mut self, queue: usize, slot: u32) {
        let end = self.end(queue);
        let newest = self.links[end as usize].older;
        self.links[slot as usize] = Link { older: newest, newer: end };
        self.links[newest as usize].newer = slot;
        self.links[end as usize].older = slot;
        self.lengths[queue] += 1;
    }

    /// Takes `slot` out of `queue`, in which it is.
    pub(super) fn remove(&mut self, queue: usize, slot: u32) {
        let Link { older, newer } = self.links[slot as usize];
        self.links[older as usize].newer = newer;
        self.links[newer as usize].older = older;
        self.lengths[queue] -= 1;
    }

    /// The slot that has been in `queue` longest.
    pub(super) fn oldest(&self, queue: usize) -> Option<u32> {
        let end = self.end(queue);
        let oldest = self.links[end as usize].newer;
        (oldest != end).then_some(oldest)
    }

    /// Offers slots, the oldest first, until one is taken, and takes that one out.
    pub(super) fn take_first(&mut self, queue: usize, take: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        let end = self.end(queue);
        let mut slot = self.links[end as usize].newer;
        while slot != end {
            if take(slot) {
                self.remove(queue, slot);
                return Some(slot);
            }
            slot = self.links[slot as usize].newer;
        }
        None
    }
}
