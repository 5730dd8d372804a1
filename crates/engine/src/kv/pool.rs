//! Blocks of memory by their numbers: how many hold each, and when those that nobody holds were let go.

#[derive(Debug, Default)]
struct Block {
    /// Sequences that hold it.
    holders: u32,
    /// When it was last let go.
    used: u64,
}

/// Blocks of one size. One that nobody holds is free, or its owner says what it still holds: then it is cached.
#[derive(Debug)]
pub(super) struct Pool {
    blocks: Vec<Block>,
    free: Vec<u32>,
    /// Blocks with holders.
    held: usize,
    /// Clock of uses.
    now: u64,
}

impl Pool {
    /// So many blocks, all free.
    pub(super) fn new(blocks: usize) -> Self {
        let free = (0..blocks as u32).rev().collect();
        Self { blocks: (0..blocks).map(|_| Block::default()).collect(), free, held: 0, now: 0 }
    }

    /// All of them.
    pub(super) const fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Those with holders.
    pub(super) const fn held(&self) -> usize {
        self.held
    }

    /// Those that a new holder could get.
    pub(super) const fn available(&self) -> usize {
        self.blocks.len() - self.held
    }

    /// Those that nobody holds and that are not free.
    pub(super) const fn cached(&self) -> usize {
        self.blocks.len() - self.held - self.free.len()
    }

    /// How many hold a block.
    pub(super) fn holders(&self, id: u32) -> u32 {
        self.blocks[id as usize].holders
    }

    pub(super) fn hold(&mut self, id: u32) {
        let holders = &mut self.blocks[id as usize].holders;
        *holders += 1;
        self.held += usize::from(*holders == 1);
    }

    /// One holder less; true if nobody holds it now.
    pub(super) fn release(&mut self, id: u32) -> bool {
        self.now += 1;
        let block = &mut self.blocks[id as usize];
        block.holders -= 1;
        block.used = self.now;
        self.held -= usize::from(block.holders == 0);
        block.holders == 0
    }

    /// A block that nobody holds has nothing any more.
    pub(super) fn set_free(&mut self, id: u32) {
        self.free.push(id);
    }

    /// A free block, which the caller holds next.
    pub(super) fn take_free(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Where none is free: blocks that nobody holds, and when they were let go.
    pub(super) fn unheld(&self) -> impl Iterator<Item = (u32, u64)> {
        let unheld = (0..).zip(&self.blocks).filter(|(_, block)| block.holders == 0);
        unheld.map(|(id, block)| (id, block.used))
    }
}
