//! States in the file: played backends, drives that fail, processes that end at any moment.

use super::*;

fn linear() -> ModelSpec {
    smoe_testkit::TinyModel::qwen3_next(1).spec
}

/// A cache of so many blocks and snapshots, with a file on that drive.
fn opened(blocks: usize, snapshots: usize, drive: &Arc<Drive>, max_bytes: u64) -> KvCache {
    let spec = linear();
    let kv = KvCache::new(&spec, KvType::F16, blocks * BLOCK, 4).unwrap();
    let mut kv = kv.with_snapshots(&spec, snapshots);
    let (file, _) = BlockFile::on(drive.clone(), &kv.file_settings(max_bytes, [0; 32])).unwrap();
    kv.spill = Some(kv.spill_on(file).unwrap());
    kv
}

fn new_drive() -> Arc<Drive> {
    Arc::new(Drive { state: Mutex::new((Vec::new(), Mood::Works)), changed: Condvar::new() })
}

/// Bytes of a file of so many blocks.
fn room_for(blocks: u64) -> u64 {
    let kv = KvCache::new(&linear(), KvType::F16, BLOCK, 1).unwrap();
    4096 + blocks * (kv.geometry.block_stride as u64 + 4096)
}

/// Where the numbers of a layer's state that the tests look at lie: at both its ends, so that they are in all pieces.
fn ends(kv: &KvCache) -> (usize, [usize; 2]) {
    let stride = kv.states.as_ref().unwrap().len() / linear().delta_layers().count();
    (stride, [0, stride - 2])
}

/// A step that computes the last of `tokens`, from `from` on.
fn compute(kv: &mut KvCache, seq: SeqId, tokens: &[u32], from: usize) -> Result<(), EngineError> {
    compute_as(kv, seq, tokens, from, true)
}

/// Of a prompt, or of an answer.
fn compute_as(
    kv: &mut KvCache,
    seq: SeqId,
    tokens: &[u32],
    from: usize,
    is_prompt: bool,
) -> Result<(), EngineError> {
    kv.begin_step();
    kv.reserve(seq, from, tokens.len())?;
    kv.expect(seq, from, tokens.len(), is_prompt);
    let rows: Vec<Row> = (from..tokens.len()).map(|p| Row { seq, position: p as u32 }).collect();
    let (_, at) = ends(kv);
    for layer in linear().delta_layers() {
        let (mut runs, mut marks) = (Vec::new(), Vec::new());
        let memory = kv.states_of(layer, &rows, &mut runs, &mut marks).unwrap();
        assert_eq!(runs[0].from.is_some(), from > 0);
        if let Some(before) = runs[0].from {
            let expected = state_after(&tokens[..from]).map(f32::to_bits);
            at.iter().for_each(|at| assert_eq!(memory[before + at].to_bits(), expected[0], "layer {layer}"));
        }
        let after = marks.iter().map(|mark| (mark.to, from + mark.row + 1));
        for (to, len) in after.chain([(runs[0].to, tokens.len())]) {
            at.iter().for_each(|at| memory[to + at..][..2].copy_from_slice(&state_after(&tokens[..len])));
        }
    }
    for position in from..tokens.len() {
        let at = kv.place(seq, position);
        kv.memory[at..at + 8].copy_from_slice(&mark(&tokens[..=position]));
    }
    kv.keep(&rows);
    kv.commit(seq, tokens);
    Ok(())
}

/// A sequence has the rows and the state of its tokens.
fn is_whole(kv: &KvCache, seq: SeqId, tokens: &[u32]) {
    let states = kv.states.as_ref().unwrap();
    assert_eq!(states.at(seq), tokens.len());
    let (stride, at) = ends(kv);
    if !tokens.is_empty() {
        let expected = state_after(tokens).map(f32::to_bits);
        for at in at.iter().flat_map(|at| (0..3).map(move |layer| layer * stride + at)) {
            let found: Vec<u32> = states.state(seq)[at..at + 2].iter().map(|x| x.to_bits()).collect();
            assert_eq!(found, expected, "{at} of {} after {} tokens", states.len(), tokens.len());
        }
    }
    for position in 0..tokens.len() {
        let at = kv.place(seq, position);
        assert_eq!(kv.memory[at..at + 8], mark(&tokens[..=position]), "{position}");
    }
}

/// A conversation of these tokens from beginning to end; returns how much of it was known.
fn talk(kv: &mut KvCache, tokens: &[u32]) -> usize {
    let seq = kv.open().unwrap();
    let held = kv.adopt(seq, &tokens[..tokens.len() - 1]);
    is_whole(kv, seq, &tokens[..held]);
    compute(kv, seq, tokens, held).unwrap();
    kv.commit_all(seq, tokens);
    kv.close(seq);
    held
}

fn known(kv: &mut KvCache, tokens: &[u32]) -> usize {
    let seq = kv.open().unwrap();
    let held = kv.adopt(seq, tokens);
    is_whole(kv, seq, &tokens[..held]);
    kv.close(seq);
    assert_eq!(kv.usage().held, 0);
    held
}

fn flush(kv: &mut KvCache) {
    assert_eq!(kv.flush(Duration::from_secs(60)), 0);
}

fn numbered(from: u32, n: u32) -> Vec<u32> {
    (from..from + n).collect()
}

#[test]
fn an_end_comes_back_where_it_was() {
    for len in [50, 64, 33, 32, 319] {
        let drive = new_drive();
        let mut kv = opened(40, 8, &drive, room_for(100));
        let tokens = numbered(0, len);
        assert_eq!(talk(&mut kv, &tokens), 0);
        flush(&mut kv);
        drop(kv);
        // With one place for snapshots, and with hardly any for blocks.
        let mut kv = opened(40, 1, &drive, room_for(100));
        let said = [&tokens[..], &[9; 40]].concat();
        assert_eq!(known(&mut kv, &said), tokens.len());
        let reads = kv.spilled().unwrap().hits;
        assert_eq!(known(&mut kv, &said), tokens.len());
        // A state within a block stays in memory with the sequence that goes on.
        let again = kv.spilled().unwrap().hits - reads;
        assert_eq!(again, if len % 32 == 0 { 0 } else { 1 + kv.state_pieces() as u64 });
        // What is asked of it ends before: there is no state.
        assert_eq!(known(&mut kv, &tokens[..tokens.len() - 1]), 0);
        // Not written twice.
        let written = kv.spilled().unwrap().written;
        assert_eq!(talk(&mut kv, &said), tokens.len());
        flush(&mut kv);
        let blocks = said.len().div_ceil(BLOCK) - tokens.len() / BLOCK;
        assert_eq!(kv.spilled().unwrap().written - written, (blocks + kv.state_pieces()) as u64);
    }
}

#[test]
fn a_changed_token_goes_back_to_the_end_before_it() {
    let drive = new_drive();
    let mut kv = opened(60, 8, &drive, room_for(200));
    let turns: Vec<Vec<u32>> = [50, 120, 190].map(|len| numbered(0, len)).into();
    for (turn, held) in turns.iter().zip([0, 50, 120]) {
        assert_eq!(talk(&mut kv, turn), held);
    }
    flush(&mut kv);
    drop(kv);
    for (changed, held) in [(189, 120), (120, 120), (119, 50), (49, 0)] {
        let mut kv = opened(60, 8, &drive, room_for(200));
        let mut other = turns[2].clone();
        other[changed] = 999;
        assert_eq!(known(&mut kv, &other), held, "{changed}");
    }
}

#[test]
fn what_two_share_is_where_the_third_begins_after_a_restart() {
    let drive = new_drive();
    let mut kv = opened(60, 8, &drive, room_for(200));
    let begun = numbered(0, 100);
    let tokens = |who: u32| [&begun[..], &numbered(1000 * who, 60)].concat();
    assert_eq!(talk(&mut kv, &tokens(1)), 0);
    flush(&mut kv);
    drop(kv);
    // The first never had it; the second finds out where they part, from the file.
    let mut kv = opened(60, 8, &drive, room_for(200));
    assert_eq!(talk(&mut kv, &tokens(2)), 0);
    flush(&mut kv);
    assert_eq!(known(&mut kv, &tokens(3)), 96, "in memory");
    drop(kv);
    let mut kv = opened(60, 8, &drive, room_for(200));
    assert_eq!(known(&mut kv, &tokens(3)), 96, "in the file");
    assert_eq!(talk(&mut kv, &tokens(4)), 96);
}

#[test]
fn a_turn_without_the_thoughts_of_the_last_begins_at_its_prompts_edge() {
    let drive = new_drive();
    let (mut history, mut held) = (Vec::new(), Vec::new());
    for turn in 0..4 {
        let mut kv = opened(60, 8, &drive, room_for(200));
        let prompt = [&history[..], &numbered(1000 * turn, 50)].concat();
        let [thoughts, answer] = [numbered(1000 * turn + 100, 100), numbered(1000 * turn + 300, 20)];
        let seq = kv.open().unwrap();
        held.push(kv.adopt(seq, &prompt[..prompt.len() - 1]));
        compute(&mut kv, seq, &prompt, held[turn as usize]).unwrap();
        let said = [&prompt[..], &thoughts, &answer].concat();
        compute_as(&mut kv, seq, &said, prompt.len(), false).unwrap();
        is_whole(&kv, seq, &said);
        kv.commit_all(seq, &said);
        kv.close(seq);
        flush(&mut kv);
        history = [prompt, answer].concat();
    }
    // The first turn did not know; prompts are 50, 120, 190 and 260 long.
    assert_eq!(held, [0, 0, 96, 160]);
}

#[test]
fn a_word_is_not_worth_a_state() {
    let drive = new_drive();
    let mut kv = opened(60, 8, &drive, room_for(200));
    for len in [31, 50, 70, 95] {
        talk(&mut kv, &numbered(0, len));
        flush(&mut kv);
    }
    drop(kv);
    let mut kv = opened(60, 8, &drive, room_for(200));
    // 31 was too short, 50 was not; 70 is too near; 95 is far enough of what the file has.
    assert_eq!(known(&mut kv, &[&numbered(0, 70)[..], &[9]].concat()), 50);
    assert_eq!(known(&mut kv, &numbered(0, 99)), 95);
}

#[test]
fn without_a_piece_or_a_block_there_is_no_state() {
    let drive = new_drive();
    let mut kv = opened(60, 8, &drive, room_for(200));
    talk(&mut kv, &numbered(0, 70));
    talk(&mut kv, &numbered(0, 150));
    flush(&mut kv);
    let keys: Vec<u128> = {
        let spill = kv.spill.as_ref().unwrap();
        let blocks = numbered(0, 150);
        let chain = blocks.chunks(BLOCK).scan(Key::ROOT, |key, own| {
            *key = key.child(own);
            Some(*key)
        });
        let chain: Vec<Key> = chain.collect();
        let state = chain[4].state();
        assert!(spill.holds_state(state) && spill.pieces() == 3);
        chain.iter().map(|key| key.0).chain((0..3).map(|i| state.0 + i)).collect()
    };
    drop(kv);
    let image = drive.state.lock().unwrap().0.clone();
    for (which, key) in keys.into_iter().enumerate() {
        // Descriptor or payload of that block, wherever it is.
        for within in [20, 5000] {
            let mut bytes = image.clone();
            let slot = bytes.chunks(4096).position(|page| page[16..32] == key.to_le_bytes()).unwrap();
            bytes[slot * 4096 + within] ^= 1;
            let drive = new_drive();
            drive.state.lock().unwrap().0 = bytes;
            let mut kv = opened(60, 8, &drive, room_for(200));
            let held = known(&mut kv, &numbered(0, 160));
            assert_eq!(held, if which < 2 { 0 } else { 70 }, "{which}, {within}");
            // And it is computed, and whole again.
            talk(&mut kv, &numbered(0, 150));
            flush(&mut kv);
            drop(kv);
            let mut kv = opened(60, 8, &drive, room_for(200));
            assert_eq!(known(&mut kv, &numbered(0, 160)), 150, "{which}, {within}");
        }
    }
}

#[test]
fn a_process_that_is_killed_loses_what_was_not_written() {
    let drive = new_drive();
    let mut kv = opened(60, 8, &drive, room_for(200));
    let turns: Vec<Vec<u32>> = [50, 120, 190].map(|len| numbered(0, len)).into();
    let said = numbered(0, 200);
    let mut held = Vec::new();
    for turn in &turns {
        talk(&mut kv, turn);
        let mut more = true;
        while more {
            more = kv.save(1);
            kv.wait_for_file(Duration::from_secs(60));
            let copy = new_drive();
            copy.state.lock().unwrap().0 = drive.state.lock().unwrap().0.clone();
            held.push(known(&mut opened(60, 8, &copy, room_for(200)), &said));
        }
        flush(&mut kv);
    }
    assert!(held.is_sorted(), "{held:?}");
    held.dedup();
    assert_eq!(held, [0, 50, 120, 190]);
}

#[test]
fn a_drive_that_stands_still_or_fails_stops_nobody() {
    let drive = new_drive();
    let mut kv = opened(20, 4, &drive, room_for(200));
    drive.set(Mood::Stands);
    for who in 0..6 {
        talk(&mut kv, &numbered(1000 * who, 70));
        kv.save(9);
        kv.end_step();
    }
    let told = kv.usage();
    assert!(told.has_file && told.lost_states == 0, "{told:?}: nothing has looked for them yet");
    drive.set(Mood::Works);
    flush(&mut kv);
    assert!(kv.usage().lost_states > 0, "their places were needed");
    // The last one's is among those that were not.
    drop(kv);
    let mut kv = opened(20, 4, &drive, room_for(200));
    assert_eq!(known(&mut kv, &numbered(5000, 80)), 70);
    drive.set(Mood::Fails);
    for who in 10..40 {
        talk(&mut kv, &numbered(1000 * who, 70));
        kv.save(99);
        kv.wait_for_file(Duration::from_secs(60));
    }
    assert!(!kv.usage().has_file, "it is given up");
    assert!(matches!(kv.take_warning(), Some(EngineError::Spill(_))));
    assert!(matches!(kv.take_warning(), Some(EngineError::SpillGivenUp { .. })));
    assert_eq!(known(&mut kv, &numbered(39_000, 80)), 70, "memory goes on");
}

#[test]
fn a_bound_that_is_too_small_is_refused_or_kept_free_of_what_does_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let spec = linear();
    let mut kv = KvCache::new(&spec, KvType::F16, 40 * BLOCK, 4).unwrap().with_snapshots(&spec, 8);
    // Three pieces of a state, and a block.
    let max_bytes = room_for(4) - 1;
    let config = SpillConfig { path: dir.path().join("kv"), max_bytes };
    let refused = kv.spill_to(&config, [0; 32]);
    assert!(matches!(refused, Err(EngineError::SpillTooSmall { needed, .. }) if needed == room_for(4)));
    assert!(!config.path.exists());
    kv.spill_to(&SpillConfig { max_bytes: room_for(4), ..config }, [0; 32]).unwrap();
    drop(kv);
    let drive = new_drive();
    let mut kv = opened(40, 8, &drive, room_for(6));
    talk(&mut kv, &numbered(0, 60));
    flush(&mut kv);
    // Seven blocks and a state do not fit, so that nothing is driven out for it but by blocks.
    talk(&mut kv, &numbered(1000, 200));
    assert_eq!(kv.spill.as_ref().unwrap().unsaved_pieces(), 0);
    flush(&mut kv);
    assert_eq!(kv.spilled().unwrap().capacity, 6);
}

#[test]
fn the_state_that_was_used_longest_ago_gives_way() {
    let drive = new_drive();
    // Two conversations of three blocks and three pieces.
    let mut kv = opened(40, 8, &drive, room_for(13));
    let tokens = |who: u32| numbered(1000 * who, 70);
    for who in 0..2 {
        talk(&mut kv, &tokens(who));
        flush(&mut kv);
    }
    assert_eq!(known(&mut kv, &numbered(0, 80)), 70);
    talk(&mut kv, &tokens(2));
    flush(&mut kv);
    drop(kv);
    let mut kv = opened(40, 8, &drive, room_for(13));
    let found: Vec<usize> = (0..3).map(|who| known(&mut kv, &numbered(1000 * who, 80))).collect();
    assert_eq!(found, [70, 0, 70]);
}

#[test]
fn of_a_conversations_ends_the_last_two_stay_and_where_it_parts_from_others() {
    let drive = new_drive();
    // Room for 16 blocks, the four states that stay, and one that comes.
    let mut kv = opened(80, 16, &drive, room_for(34));
    let other = [&numbered(0, 40)[..], &numbered(5000, 50)].concat();
    talk(&mut kv, &other);
    flush(&mut kv);
    for turn in 1..12 {
        talk(&mut kv, &numbered(0, 40 * turn));
        flush(&mut kv);
    }
    drop(kv);
    let mut kv = opened(80, 16, &drive, room_for(34));
    let said = numbered(0, 450);
    assert_eq!(known(&mut kv, &said), 440);
    assert_eq!(known(&mut kv, &said[..439]), 400, "the turn before");
    assert_eq!(known(&mut kv, &[&other[..], &[9]].concat()), 90, "used longest ago, but not demoted");
    assert_eq!(known(&mut kv, &said[..70]), 32, "where they part");
    let spill = kv.spill.as_ref().unwrap();
    let ends = spill.ends().count();
    assert!((4..8).contains(&ends), "{ends} whole states in a file of 34 blocks");
}

/// Conversations of few different tokens that begin, go on, end and begin again, in processes that end at any moment, with
/// drives that stand still, fail and forget: each always has the rows and the state of its own tokens.
fn agree_with_the_model(seed: u64, blocks: usize, snapshots: usize, slots: u64) -> (usize, usize) {
    let mut random = Random(seed);
    let mut drive = new_drive();
    let mut kv = opened(blocks, snapshots, &drive, room_for(slots));
    let mut open: HashMap<usize, (SeqId, Vec<u32>, bool)> = HashMap::new();
    let mut spoken: Vec<Vec<u32>> = vec![Vec::new()];
    let (mut adopted, mut after_restart, mut is_fresh) = (0, 0, false);
    for step in 0..900 {
        let who = random.below(3);
        match (open.remove(&who), random.below(12)) {
            (None, _) => {
                let mut tokens = spoken[random.below(spoken.len())].clone();
                if random.below(3) == 0 {
                    tokens.truncate(random.below(tokens.len() + 1));
                }
                tokens.extend((0..1 + random.below(40)).map(|_| random.below(2) as u32));
                open.insert(who, (kv.open().unwrap(), tokens, false));
            }
            // Still looking for its beginning.
            (Some((seq, mut tokens, false)), 0..11) => {
                let part = kv.adopt_some(seq, &tokens[..tokens.len() - 1], random.below(4));
                if part.is_done {
                    adopted += part.held;
                    after_restart += if is_fresh { part.held } else { 0 };
                    tokens.truncate(part.held);
                }
                open.insert(who, (seq, tokens, part.is_done));
            }
            (Some((seq, mut tokens, true)), 0..7) => {
                let from = tokens.len();
                is_fresh = false;
                tokens.extend((0..1 + random.below(60)).map(|_| random.below(2) as u32));
                if compute(&mut kv, seq, &tokens, from).is_err() {
                    tokens.truncate(from);
                    assert_eq!(kv.truncate(seq, from), from);
                }
                open.insert(who, (seq, tokens, true));
            }
            (Some((seq, mut tokens, true)), 7) => {
                tokens.truncate(kv.truncate(seq, random.below(tokens.len() + 1)));
                open.insert(who, (seq, tokens, true));
            }
            (Some((seq, tokens, is_done)), _) => {
                if is_done {
                    kv.commit_all(seq, &tokens);
                    spoken.push(tokens);
                }
                kv.close(seq);
            }
        }
        for (seq, tokens, _) in open.values().filter(|(_, _, is_done)| *is_done) {
            is_whole(&kv, *seq, tokens);
        }
        kv.save(random.below(6));
        kv.end_step();
        match random.below(60) {
            0 => drive.set(Mood::Fails),
            1..20 => drive.set(Mood::Works),
            20 if kv.usage().has_file => flush_or_not(&mut kv, &drive),
            21 | 22 => {
                // A new process; of some the drive has forgotten, or mistaken, a few pages.
                let mut image = drive.state.lock().unwrap().0.clone();
                for _ in 0..random.below(3) {
                    let at = 8192 + random.below(image.len().saturating_sub(8192).max(1));
                    image.get_mut(at).into_iter().for_each(|byte| *byte ^= 0x10);
                }
                drive.set(Mood::Works);
                drive = new_drive();
                drive.state.lock().unwrap().0 = image;
                kv = opened(blocks, snapshots, &drive, room_for(slots));
                (open, is_fresh) = (HashMap::new(), true);
            }
            _ => {}
        }
        assert!(kv.usage().held <= blocks, "step {step}");
    }
    for (_, (seq, ..)) in open {
        kv.close(seq);
    }
    assert_eq!(kv.usage().held, 0);
    (adopted, after_restart)
}

fn flush_or_not(kv: &mut KvCache, drive: &Drive) {
    drive.set(Mood::Works);
    kv.flush(Duration::from_secs(60));
}

#[test]
fn whatever_happens_states_are_those_of_their_tokens() {
    let mut sums = (0, 0);
    for (seed, (blocks, snapshots, slots)) in
        (1..).zip([(60, 16, 400), (40, 3, 400), (14, 2, 400), (60, 16, 20), (30, 1, 60), (90, 8, 4)])
    {
        let (adopted, after_restart) = agree_with_the_model(seed, blocks, snapshots, slots);
        println!("{blocks} blocks, {snapshots} snapshots, {slots} in the file: {adopted}, {after_restart}");
        sums = (sums.0 + adopted, sums.1 + after_restart);
    }
    assert!(sums.0 > 1000 && sums.1 > 100, "{sums:?}: something is found, also by new processes");
}
