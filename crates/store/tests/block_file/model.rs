//! Random puts, gets, touches, removals and restarts against a list.

use crate::support::{Random, within_a_minute};
use crate::{PAYLOAD, config, get, keys, meta, payload};
use smoe_store::{BlockFile, BlockFileConfig, BlockFileError, OpenMode};

#[derive(Default)]
struct Model {
    capacity: usize,
    clock: u64,
    blocks: Vec<Block>,
    evicted: u64,
    full: u64,
}

struct Block {
    key: u128,
    put: u64,
    used: u64,
}

impl Model {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn holds(&self, key: u128) -> bool {
        self.blocks.iter().any(|block| block.key == key)
    }

    fn touch(&mut self, key: u128) -> bool {
        if !self.holds(key) {
            return false;
        }
        let now = self.tick();
        self.blocks.iter_mut().filter(|block| block.key == key).for_each(|block| block.used = now);
        true
    }

    /// False if there is no room.
    fn put(&mut self, key: u128) -> bool {
        if self.touch(key) {
            return true;
        }
        if self.blocks.len() == self.capacity {
            // With the newcomer's parent counted, as if it were there.
            let is_parent = |k: u128| meta(key).parent == k || self.blocks.iter().any(|b| b.key / 2 == k);
            let childless = (0..self.blocks.len()).filter(|&i| !is_parent(self.blocks[i].key));
            let Some(victim) = childless.min_by_key(|&i| self.blocks[i].used) else {
                self.full += 1;
                return false;
            };
            self.blocks.remove(victim);
            self.evicted += 1;
        }
        let now = self.tick();
        self.blocks.push(Block { key, put: now, used: now });
        true
    }

    fn restart(&mut self) {
        self.blocks.iter_mut().for_each(|block| block.used = block.put);
        self.clock = self.blocks.iter().map(|block| block.put).max().unwrap_or(0);
    }

    fn keys(&self) -> Vec<u128> {
        let mut keys: Vec<u128> = self.blocks.iter().map(|block| block.key).collect();
        keys.sort_unstable();
        keys
    }
}

fn run(config: &BlockFileConfig, capacity: usize, seed: u64, steps: usize) -> Model {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("blocks");
    let (mut file, opened) = BlockFile::open(&path, config).unwrap();
    if seed == 0 {
        println!("direct I/O: {}", opened.direct_io);
    }
    assert_eq!((opened.blocks, opened.dropped, opened.stale), (0, 0, None));
    let mut model = Model { capacity, ..Model::default() };
    let mut random = Random(seed);
    for _ in 0..steps {
        // Trees of four levels and more, so that chains are longer than small files.
        let mut key = || 1 + random.below(40) as u128;
        let key = key();
        match random.below(20) {
            0..10 => {
                let room = model.put(key);
                let payload = payload(key);
                loop {
                    match file.put(meta(key), &payload) {
                        Ok(true) => assert!(room),
                        Ok(false) => {
                            file.flush().unwrap();
                            continue;
                        }
                        Err(BlockFileError::Full { capacity }) => {
                            assert_eq!((room, capacity), (false, model.capacity))
                        }
                        Err(error) => panic!("{error}"),
                    }
                    break;
                }
            }
            10..13 => {
                let wanted: Vec<u128> = (0..random.below(6)).map(|_| 1 + random.below(40) as u128).collect();
                let held: Vec<bool> = wanted.iter().map(|&key| model.touch(key)).collect();
                assert_eq!(get(&mut file, &wanted), held);
            }
            13..15 => {
                model.touch(key);
                file.touch(key);
            }
            // One at a time: which of several goes first is not said.
            15 if model.blocks.iter().all(|block| block.used > 0) => {
                model.blocks.iter_mut().filter(|block| block.key == key).for_each(|block| block.used = 0);
                file.demote(key);
            }
            15 => {}
            16..18 => {
                model.blocks.retain(|block| block.key != key);
                file.remove(key);
            }
            18 => {
                assert!(file.poll().is_empty());
                if model.touch(key) {
                    while !file.replace(meta(key), &payload(key)).unwrap() {
                        file.flush().unwrap();
                    }
                    let written = |block: &mut Block| block.put = block.used;
                    model.blocks.iter_mut().filter(|block| block.key == key).for_each(written);
                }
            }
            _ => {
                let before = file.snapshot();
                assert_eq!((before.evicted, before.corrupt), (model.evicted, 0));
                assert_eq!((before.read_errors, before.write_errors), (0, 0));
                drop(file);
                model.restart();
                model.evicted = 0;
                let opened;
                (file, opened) = BlockFile::open(&path, config).unwrap();
                assert_eq!((opened.blocks, opened.dropped), (model.blocks.len(), 0));
                assert_eq!(opened.stale, None);
            }
        }
        assert_eq!(keys(&file), model.keys());
        let snapshot = file.snapshot();
        assert_eq!((snapshot.blocks, snapshot.capacity), (model.blocks.len(), capacity));
        assert!(path.metadata().unwrap().len() <= config.max_bytes);
    }
    let all = model.keys();
    assert!(get(&mut file, &all).iter().all(|&came| came));
    model
}

#[test]
fn what_is_held_is_what_a_list_says() {
    within_a_minute(|| {
        let mut full = 0;
        for seed in 0..16 {
            let slots = [1, 2, 3, 5, 8, 13, 30, 60][seed as usize % 8];
            let direct = if seed < 8 { OpenMode::Auto } else { OpenMode::Buffered };
            let config = BlockFileConfig { direct, queue: 1 + seed as usize % 3, ..config(slots) };
            full += run(&config, slots, seed, 250).full;
        }
        assert!(full > 0, "chains longer than the file occurred");
    });
}

#[test]
fn counts_are_those_of_what_was_asked() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(2);
    let (mut file, _) = BlockFile::open(&folder.path().join("blocks"), &config).unwrap();
    assert_eq!(config.slot_bytes().unwrap(), crate::SLOT);
    for key in [1, 2, 3, 1] {
        crate::put(&mut file, key);
    }
    file.flush().unwrap();
    assert_eq!(get(&mut file, &[1, 3, 2, 2]), [true, true, false, false]);
    let snapshot = file.snapshot();
    assert_eq!((snapshot.blocks, snapshot.capacity, snapshot.writing), (2, 2, 0));
    assert_eq!((snapshot.hits, snapshot.misses), (2, 2));
    assert_eq!(snapshot.read_bytes, 2 * PAYLOAD as u64);
    assert_eq!(snapshot.written_bytes, snapshot.written * crate::SLOT as u64);
}
