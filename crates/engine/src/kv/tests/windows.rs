//! Layers that see a window beside layers that see all.

use super::*;

/// Windows of 9 and 40 positions, and a layer that sees all between them.
fn spec() -> ModelSpec {
    smoe_testkit::TinyModel::gpt_oss(1).spec
}

/// The layers that the tests look into.
const ALL: usize = 1;
const WINDOWED: usize = 2;
const WIDTH: usize = 40;

/// Positions that the next token of a layer with the widest window sees of `len`.
fn seen(len: usize) -> std::ops::Range<usize> {
    (len + 1).saturating_sub(WIDTH)..len
}

impl KvCache {
    fn place_in(&self, layer: usize, seq: SeqId, position: usize) -> usize {
        let block = self.table(layer, seq)[position / BLOCK];
        assert_ne!(block, GONE, "position {position} of layer {layer} is read");
        block as usize * self.memory(layer).1.block_stride + position % BLOCK * 8
    }

    fn row(&self, layer: usize, seq: SeqId, position: usize) -> &[u8] {
        &self.memory(layer).0[self.place_in(layer, seq, position)..][..8]
    }

    /// Every row that the next token sees is what its own tokens say.
    fn check_rows(&self, seq: SeqId, tokens: &[u32], what: &str) {
        for (layer, positions) in [(ALL, 0..tokens.len()), (WINDOWED, seen(tokens.len()))] {
            for position in positions {
                let expected = mark(&tokens[..=position]);
                assert_eq!(self.row(layer, seq, position), expected, "{what}: layer {layer}, {position}");
            }
        }
    }

    /// A step from `from` on, whose tokens are the last of these: each reads what it sees, and writes its own row.
    fn compute(&mut self, seq: SeqId, tokens: &[u32], from: usize) {
        for n in from..tokens.len() {
            for position in seen(n) {
                let expected = mark(&tokens[..=position]);
                assert_eq!(self.row(WINDOWED, seq, position), expected, "in a step: {position} from {n}");
            }
            let row = mark(&tokens[..=n]);
            let at = self.place_in(ALL, seq, n);
            self.memory[at..at + 8].copy_from_slice(&row);
            let at = self.place_in(WINDOWED, seq, n);
            self.windows.as_mut().unwrap().memory[at..at + 8].copy_from_slice(&row);
        }
    }

    /// Counts are what the tables say, and what nobody holds is free or can be found.
    fn check_windows(&self) {
        let windows = self.windows.as_ref().unwrap();
        let mut holders = vec![0; windows.pool.len()];
        for i in 0..self.sequences.len() {
            let seq = SeqId(i as u32);
            assert_eq!(windows.table(seq).len(), self.blocks(seq).len());
            windows.table(seq).iter().filter(|&&block| block != GONE).for_each(|&b| holders[b as usize] += 1);
        }
        let found: Vec<u32> = (0..self.pool.len() as u32).filter_map(|other| windows.of(other)).collect();
        let mut unheld = 0;
        for (block, &expected) in (0..).zip(&holders) {
            assert_eq!(windows.pool.holders(block), expected);
            unheld += usize::from(expected == 0 && found.contains(&block));
        }
        assert_eq!(windows.pool.cached(), unheld);
        assert_eq!(windows.pool.held(), holders.iter().filter(|&&n| n > 0).count());
        for other in 0..self.pool.len() as u32 {
            assert!(windows.of(other).is_none() || self.tree.node(other).is_some());
        }
    }
}

/// The longest step of the random model.
const STEP: usize = 90;

/// What a sequence of the random model is: its tokens, and whether others may find them.
type Open = (SeqId, Vec<u32>, bool);

/// As `agrees_with_the_model`, with windows: whatever a sequence begins with, goes back to, or holds, the next token finds
/// every row that it sees, and never a block that is gone; and windows never run short.
fn agrees_with_a_model_that_keeps_everything(seed: u64, positions: usize, file: Option<u64>) -> [usize; 3] {
    let (dir, spec) = (tempfile::tempdir().unwrap(), spec());
    let mut random = Random(seed);
    let blocks = window_blocks(&spec, positions, 4, STEP);
    let kv = KvCache::new(&spec, KvType::F16, positions, 4).unwrap();
    let mut kv = kv.with_windows(&spec, blocks).unwrap();
    if let Some(slots) = file {
        let settings = kv.file_settings(1 << 30, [0; 32]);
        let max_bytes = (slots + 1) * (settings.payload_bytes as u64 + 4096) + 65536;
        kv.spill_to(&SpillConfig { path: dir.path().join("kv"), max_bytes }, [seed as u8; 32]).unwrap();
    }
    let mut open: HashMap<usize, Open> = HashMap::new();
    let mut spoken: Vec<Vec<u32>> = vec![Vec::new()];
    let (mut adopted, mut wanted, mut gone_back) = (0, 0, 0);
    for step in 0..1500 {
        let who = random.below(4);
        match (open.remove(&who), random.below(12)) {
            (None, _) => {
                let mut tokens = spoken[random.below(spoken.len())].clone();
                let known = if random.below(3) == 0 { random.below(tokens.len() + 1) } else { tokens.len() };
                tokens.truncate(known);
                tokens.extend((0..random.below(40)).map(|_| random.below(2) as u32));
                let seq = kv.open().unwrap();
                let most = if random.below(2) == 0 { usize::MAX } else { 1 + random.below(5) };
                let held = loop {
                    let adopted = kv.adopt_some(seq, &tokens, most);
                    if adopted.is_done {
                        break adopted.held;
                    }
                };
                assert!(held <= tokens.len());
                adopted += held;
                wanted += known;
                tokens.truncate(held);
                open.insert(who, (seq, tokens, random.below(8) > 0));
            }
            (Some((seq, mut tokens, shared)), 0..7) => {
                let answers = random.below(2) == 0;
                let n = 1 + random.below(if answers { 4 } else { STEP });
                let from = tokens.len();
                kv.begin_step();
                if kv.reserve(seq, from, from + n).is_ok() {
                    kv.expect(seq, from, from + n, !answers);
                    tokens.extend((0..n).map(|_| random.below(2) as u32));
                    kv.compute(seq, &tokens, from);
                    if random.below(8) == 0 {
                        tokens.truncate(from);
                        assert_eq!(kv.truncate(seq, from), from, "a step that failed");
                    } else {
                        if shared {
                            kv.commit(seq, &tokens);
                        }
                        kv.slide(seq, tokens.len());
                        // Guesses are taken back; and where the answer begins can be gone back to.
                        if answers && n > 1 {
                            tokens.truncate(from + 1);
                            assert_eq!(kv.truncate(seq, from + 1), from + 1);
                        } else if !answers && random.below(4) == 0 {
                            tokens.pop();
                            assert_eq!(kv.truncate(seq, tokens.len()), tokens.len());
                        }
                    }
                } else {
                    let missing = (from + n).div_ceil(BLOCK) - kv.blocks(seq).len();
                    assert!(missing + 1 > kv.available(), "step {step}: windows ran short");
                    assert_eq!(kv.truncate(seq, from), from);
                }
                open.insert(who, (seq, tokens, shared));
            }
            (Some((seq, mut tokens, shared)), 7) => {
                let len = random.below(tokens.len() + 1);
                let held = kv.truncate(seq, len);
                assert!(held <= len);
                gone_back += held;
                tokens.truncate(held);
                open.insert(who, (seq, tokens, shared));
            }
            (Some((seq, tokens, shared)), which) => {
                if shared && which > 8 {
                    kv.commit_all(seq, &tokens);
                }
                kv.close(seq);
                spoken.push(tokens);
            }
        }
        kv.save(random.below(4));
        kv.end_step();
        for (seq, tokens, _) in open.values() {
            kv.check_rows(*seq, tokens, "after a step");
        }
        kv.check_windows();
    }
    for (_, (seq, ..)) in open {
        kv.close(seq);
    }
    let usage = kv.usage();
    assert_eq!((usage.held, usage.window_held), (0, 0));
    println!("{usage:?}, file {file:?}: {adopted} of {wanted} adopted, {gone_back} gone back to");
    [adopted, wanted, gone_back]
}

#[test]
fn the_next_token_finds_every_row_that_it_sees() {
    for (seed, blocks) in (1..).zip([8, 12, 20, 50, 200]) {
        for file in [None, Some(1000), Some(12)] {
            let [adopted, wanted, gone_back] =
                agrees_with_a_model_that_keeps_everything(seed, blocks * BLOCK, file);
            assert!(gone_back > 0);
            // The file has most of what is asked for, memory some.
            let part = match file {
                Some(1000) => 2,
                _ if blocks >= 50 => 4,
                _ => 20,
            };
            assert!(part * adopted > wanted, "{blocks}, {file:?}: {adopted} of {wanted}");
        }
    }
}

/// A cache of so many positions for two sequences, by the plan.
fn cache(positions: usize) -> KvCache {
    let spec = spec();
    let kv = KvCache::new(&spec, KvType::F16, positions, 2).unwrap();
    kv.with_windows(&spec, window_blocks(&spec, positions, 2, 64)).unwrap()
}

/// Goes on with a sequence to the end of `tokens`, in steps of at most `chunk`: of a prompt, or an answer.
fn go_on(kv: &mut KvCache, seq: SeqId, tokens: &[u32], from: usize, chunk: usize, shared: bool) {
    let mut from = from;
    while from < tokens.len() {
        let to = (from + chunk).min(tokens.len());
        kv.reserve(seq, from, to).unwrap();
        kv.expect(seq, from, to, chunk > 1);
        kv.compute(seq, &tokens[..to], from);
        if shared {
            kv.commit(seq, &tokens[..to]);
        }
        kv.slide(seq, to);
        kv.save(4);
        kv.end_step();
        from = to;
    }
}

/// How much of a conversation a new sequence finds; it then says the rest.
fn say_all(kv: &mut KvCache, tokens: &[u32], prompt: usize) -> usize {
    let seq = kv.open().unwrap();
    let held = kv.adopt(seq, &tokens[..prompt - 1]);
    go_on(kv, seq, &tokens[..prompt], held, 64, true);
    go_on(kv, seq, tokens, prompt, 1, true);
    kv.commit_all(seq, tokens);
    kv.close(seq);
    held
}

fn tokens(who: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| who * 1000 + i).collect()
}

#[test]
fn a_window_takes_what_it_sees_however_long_the_conversation() {
    let mut kv = cache(100 * BLOCK);
    let tokens = tokens(0, 2_000);
    let seq = kv.open().unwrap();
    go_on(&mut kv, seq, &tokens[..300], 0, 64, false);
    let mut most = 0;
    for from in 300..tokens.len() {
        go_on(&mut kv, seq, &tokens[..=from], from, 1, false);
        most = most.max(kv.usage().window_held);
    }
    // 40 positions and 32 that may be taken back are in 4 blocks at most; those before the answer, here, in 2.
    assert_eq!(most, 4 + 2);
    assert_eq!(kv.usage().held, 2_000_usize.div_ceil(BLOCK));
    // It goes back a few tokens, then to where the answer began, then nowhere.
    assert_eq!(kv.truncate(seq, 1_980), 1_980);
    assert_eq!(kv.truncate(seq, 1_000), 320, "the end of the block");
    assert_eq!(kv.truncate(seq, 299), 299);
    assert_eq!(kv.truncate(seq, 298), 298);
    kv.check_rows(seq, &tokens[..298], "gone back");
    assert_eq!(kv.truncate(seq, 200), 0);
}

#[test]
fn a_conversation_is_gone_on_from_its_end_and_its_answer_said_again() {
    let mut kv = cache(64 * BLOCK);
    let said = tokens(0, 700);
    assert_eq!(say_all(&mut kv, &said, 400), 0);
    // Another one passes by, longer than all windows that are kept.
    assert_eq!(say_all(&mut kv, &tokens(1, 900), 800), 0);
    let longer = [&said[..], &tokens(2, 50)].concat();
    assert_eq!(say_all(&mut kv, &longer, 750), 700, "its end");
    assert_eq!(say_all(&mut kv, &said[..450], 400), 399, "where its answer began");
    // The place itself is in the middle of a block: what goes on otherwise after it is found as well.
    let other = [&said[..402], &tokens(3, 60)].concat();
    let seq = kv.open().unwrap();
    assert_eq!(kv.adopt(seq, &other), 402);
    kv.close(seq);
    kv.check_windows();
}

#[test]
fn where_conversations_part_is_known_by_the_second_and_found_by_the_third() {
    let mut kv = cache(96 * BLOCK);
    let begin = tokens(0, 500);
    let with = |who| [&begin[..], &tokens(who, 700)].concat();
    assert_eq!(say_all(&mut kv, &with(1), 1100), 0);
    let second = say_all(&mut kv, &with(2), 1100);
    assert!(second < 500, "the windows there had given way: {second}");
    for who in 3..6 {
        assert_eq!(say_all(&mut kv, &with(who), 1100), 500, "{who}");
    }
}

#[test]
fn any_beginning_comes_back_from_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let config = SpillConfig { path: dir.path().join("kv"), max_bytes: 1 << 30 };
    let said = tokens(0, 1000);
    let mut kv = cache(64 * BLOCK);
    kv.spill_to(&config, [1; 32]).unwrap();
    say_all(&mut kv, &said, 900);
    assert_eq!(kv.flush(Duration::from_secs(60)), 0);
    drop(kv);
    let mut kv = cache(64 * BLOCK);
    let opened = kv.spill_to(&config, [1; 32]).unwrap();
    assert_eq!(opened.blocks, 1000_usize.div_ceil(BLOCK));
    for (asked, parts) in [(1000, 3), (333, 1), (640, usize::MAX), (1000, usize::MAX)] {
        let seq = kv.open().unwrap();
        let held = loop {
            let adopted = kv.adopt_some(seq, &said[..asked], parts);
            if adopted.is_done {
                break adopted.held;
            }
        };
        assert_eq!(held, asked);
        kv.check_rows(seq, &said[..asked], "from the file");
        kv.close(seq);
        kv.check_windows();
    }
    // Windows that are gone from memory alone come too, with nothing else.
    let before = kv.spilled().unwrap().hits;
    let seq = kv.open().unwrap();
    assert_eq!(kv.adopt(seq, &said[..512]), 512);
    assert!(kv.spilled().unwrap().hits - before <= 2, "40 positions");
    kv.check_rows(seq, &said[..512], "of memory and the file");
}

#[test]
fn a_block_whose_window_was_gone_has_it_in_the_file_once_it_was_computed_again() {
    let dir = tempfile::tempdir().unwrap();
    let config = SpillConfig { path: dir.path().join("kv"), max_bytes: 1 << 30 };
    let said = tokens(0, 320);
    let mut kv = cache(64 * BLOCK);
    kv.spill_to(&config, [1; 32]).unwrap();
    let seq = kv.open().unwrap();
    kv.reserve(seq, 0, said.len()).unwrap();
    kv.compute(seq, &said, 0);
    kv.commit(seq, &said);
    let blocks = kv.blocks(seq).to_vec();
    kv.close(seq);
    blocks.iter().for_each(|&block| kv.windows.as_mut().unwrap().forget(block));
    while kv.save(usize::MAX) {
        kv.wait_for_file(Duration::from_secs(60));
    }
    assert_eq!(say_all(&mut kv, &said, 300), 0, "no window is whole, in memory or in the file");
    assert_eq!(kv.flush(Duration::from_secs(60)), 0);
    assert_eq!(kv.spilled().unwrap().blocks, 10, "each once");
    drop(kv);
    let mut kv = cache(64 * BLOCK);
    assert_eq!(kv.spill_to(&config, [1; 32]).unwrap().blocks, 10);
    for asked in [160, 320] {
        let seq = kv.open().unwrap();
        assert_eq!(kv.adopt(seq, &said[..asked]), asked);
        kv.check_rows(seq, &said[..asked], "from the file");
        kv.close(seq);
    }
}

#[test]
fn a_model_without_windows_has_what_it_had() {
    for model in smoe_testkit::TinyModel::every(1) {
        let spec = model.spec;
        let (positions, kv_type) = (1000, KvType::F16);
        let blocks = window_blocks(&spec, positions, 3, 64);
        let kv = KvCache::new(&spec, kv_type, positions, 3).unwrap().with_windows(&spec, blocks).unwrap();
        let has = (0..spec.n_layers()).any(|layer| spec.window(layer).is_some());
        assert_eq!((kv.windows.is_some(), blocks > 0), (has, has), "{}", spec.model_type);
        let planned = KvCache::windowed_bytes(&spec, kv_type, positions, blocks);
        assert_eq!(kv.usage().bytes, planned);
        let all = KvCache::bytes(&spec, kv_type, positions);
        assert!(has || planned == all, "{}", spec.model_type);
        assert!(blocks < positions / BLOCK);
    }
}
