use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};

use smoe_store::{BlockFile, DirectIo, Disk, DiskError, WriteDisk};

use super::*;

mod states;
mod windows;

/// A spec of two layers, small.
fn spec() -> ModelSpec {
    smoe_testkit::TinyModel::qwen3(1).spec
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n
    }
}

/// What a position holds depends on all tokens up to it, as keys and values do.
fn mark(tokens: &[u32]) -> [u8; 8] {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for token in tokens {
        hash = (hash ^ u64::from(*token)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    hash.to_le_bytes()
}

impl KvCache {
    fn place(&self, seq: SeqId, position: usize) -> usize {
        let block = self.blocks(seq)[position / BLOCK] as usize;
        block * self.geometry.block_stride + position % BLOCK * 8
    }
}

/// Sequences that begin, go on, roll back, end and begin again, of few different tokens so that they share: each
/// always holds what its own tokens say, whatever memory there is and whatever went through the file.
fn agrees_with_the_model(seed: u64, blocks: usize, file: Option<u64>) {
    let dir = tempfile::tempdir().unwrap();
    let mut random = Random(seed);
    let mut kv = KvCache::new(&spec(), KvType::F16, blocks * BLOCK, 4).unwrap();
    if let Some(slots) = file {
        let max_bytes = (slots + 1) * (kv.geometry.block_stride as u64 + 4096) + 65536;
        let config = SpillConfig { path: dir.path().join("kv"), max_bytes };
        kv.spill_to(&config, [seed as u8; 32]).unwrap();
    }
    let mut open: HashMap<usize, (SeqId, Vec<u32>)> = HashMap::new();
    let mut spoken: Vec<Vec<u32>> = vec![Vec::new()];
    let (mut adopted, mut refused) = (0, 0);
    for step in 0..1500 {
        let who = random.below(4);
        match (open.remove(&who), random.below(10)) {
            (None, _) => {
                // Something that was said before, a part of it, and something new.
                let mut tokens = spoken[random.below(spoken.len())].clone();
                tokens.truncate(random.below(tokens.len() + 1));
                tokens.extend((0..random.below(40)).map(|_| random.below(2) as u32));
                let seq = kv.open().unwrap();
                let held = kv.adopt(seq, &tokens);
                assert!(held <= tokens.len());
                adopted += held;
                tokens.truncate(held);
                open.insert(who, (seq, tokens));
            }
            (Some((seq, mut tokens)), 0..6) => {
                let n = 1 + random.below(50);
                if kv.reserve(seq, tokens.len(), tokens.len() + n).is_err() {
                    refused += 1;
                    kv.truncate(seq, tokens.len());
                } else {
                    for _ in 0..n {
                        tokens.push(random.below(2) as u32);
                        let at = kv.place(seq, tokens.len() - 1);
                        kv.memory[at..at + 8].copy_from_slice(&mark(&tokens));
                    }
                    kv.commit(seq, &tokens);
                }
                open.insert(who, (seq, tokens));
            }
            (Some((seq, mut tokens)), 6) => {
                let len = random.below(tokens.len() + 1);
                tokens.truncate(kv.truncate(seq, len));
                open.insert(who, (seq, tokens));
            }
            (Some((seq, tokens)), 7) => {
                kv.close(seq);
                spoken.push(tokens);
            }
            (Some((seq, tokens)), _) => {
                kv.commit_all(seq, &tokens);
                kv.close(seq);
                spoken.push(tokens);
            }
        }
        kv.save(random.below(3));
        kv.end_step();
        for (seq, tokens) in open.values() {
            for position in 0..tokens.len() {
                let at = kv.place(*seq, position);
                assert_eq!(kv.memory[at..at + 8], mark(&tokens[..=position]), "step {step}, {position}");
            }
        }
        let held: std::collections::HashSet<u32> =
            open.values().flat_map(|(seq, _)| kv.blocks(*seq)).copied().collect();
        let usage = kv.usage();
        assert_eq!(usage.held, held.len(), "step {step}");
        assert_eq!(usage.blocks, blocks);
    }
    for (_, (seq, _)) in open {
        kv.close(seq);
    }
    assert_eq!(kv.usage().held, 0);
    assert!(adopted > 100, "{adopted}");
    println!("{blocks} blocks, file {file:?}: {adopted} adopted, {refused} refused, {:?}", kv.spilled());
}

#[test]
fn every_sequence_holds_its_own_tokens_work() {
    for (seed, blocks) in (1..).zip([6, 9, 16, 40, 200]) {
        agrees_with_the_model(seed, blocks, None);
        agrees_with_the_model(seed, blocks, Some(1000));
        agrees_with_the_model(seed, blocks, Some(12));
    }
}

#[test]
fn a_room_that_is_refused_takes_nothing() {
    let mut kv = KvCache::new(&spec(), KvType::F16, 4 * BLOCK, 2).unwrap();
    let (a, b) = (kv.open().unwrap(), kv.open().unwrap());
    assert!(matches!(kv.open(), Err(EngineError::NoSession { sessions: 2 })));
    kv.reserve(a, 0, 3 * BLOCK).unwrap();
    let refused = kv.reserve(b, 0, BLOCK + 1);
    assert!(matches!(refused, Err(EngineError::ContextFull { needed: 33, context: 32 })));
    assert_eq!(kv.available(), 1);
    kv.reserve(b, 0, BLOCK).unwrap();
    kv.close(a);
    assert_eq!(kv.available(), 3);
}

#[derive(Clone, Copy, PartialEq)]
enum Mood {
    Works,
    Stands,
    Fails,
}

/// A drive in memory that stands still, or fails, while it is in that mood.
struct Drive {
    state: Mutex<(Vec<u8>, Mood)>,
    changed: Condvar,
}

impl Drive {
    fn set(&self, mood: Mood) {
        self.state.lock().unwrap().1 = mood;
        self.changed.notify_all();
    }
}

impl Disk for Drive {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, DiskError> {
        let state = self.state.lock().unwrap();
        let there = state.0.get(offset as usize..).unwrap_or(&[]);
        let len = there.len().min(buf.len());
        buf[..len].copy_from_slice(&there[..len]);
        Ok(len)
    }

    fn len(&self) -> u64 {
        self.state.lock().unwrap().0.len() as u64
    }

    fn name(&self) -> &Path {
        Path::new("drive")
    }

    fn direct(&self) -> &DirectIo {
        &DirectIo::Yes { alignment: 4096 }
    }
}

impl WriteDisk for Drive {
    fn write_all_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        while state.1 == Mood::Stands {
            state = self.changed.wait(state).unwrap();
        }
        if state.1 == Mood::Fails {
            return Err(io::Error::other("as told"));
        }
        let (at, end) = (offset as usize, offset as usize + bytes.len());
        let len = state.0.len().max(end);
        state.0.resize(len, 0);
        state.0[at..end].copy_from_slice(bytes);
        Ok(())
    }

    fn len_now(&self) -> io::Result<u64> {
        Ok(Disk::len(self))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.state.lock().unwrap().0.resize(len as usize, 0);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A cache of so many blocks, with a file of so many on a drive.
fn on_drive(blocks: usize, slots: u64) -> (KvCache, Arc<Drive>) {
    let mut kv = KvCache::new(&spec(), KvType::F16, blocks * BLOCK, 4).unwrap();
    let drive = Arc::new(Drive { state: Mutex::new((Vec::new(), Mood::Works)), changed: Condvar::new() });
    let max_bytes = 4096 + slots * (kv.geometry.block_stride as u64 + 4096);
    let (file, _) = BlockFile::on(drive.clone(), &kv.file_settings(max_bytes, [0; 32])).unwrap();
    kv.spill = Some(kv.spill_on(file).unwrap());
    (kv, drive)
}

/// A conversation of one block, which tells it from others, begins and ends.
fn say(kv: &mut KvCache, what: u32) -> usize {
    let tokens = [what; BLOCK];
    let seq = kv.open().unwrap();
    let held = kv.adopt(seq, &tokens);
    kv.reserve(seq, held, BLOCK).unwrap();
    kv.commit(seq, &tokens);
    kv.close(seq);
    held
}

#[test]
fn a_drive_that_stands_still_stops_nobody() {
    let (mut kv, drive) = on_drive(6, 100);
    drive.set(Mood::Stands);
    for what in 0..12 {
        assert_eq!(say(&mut kv, what), 0);
    }
    // Four could be queued; two were lost, for which the step waited once.
    assert_eq!((kv.usage().lost, kv.patience), (2, Duration::ZERO));
    // What is on its way is there.
    assert_eq!((say(&mut kv, 0), say(&mut kv, 3)), (BLOCK, BLOCK));
    assert_eq!(kv.usage().lost, 3, "the second took the place of the first, which the file has");
    drive.set(Mood::Works);
    assert_eq!(kv.flush(Duration::from_secs(60)), 0);
    assert!(kv.usage().has_file && kv.take_warning().is_none());
    for what in [1, 2, 11, 10, 9] {
        assert_eq!(say(&mut kv, what), BLOCK, "{what}");
    }
    assert_eq!(say(&mut kv, 4), 0, "lost");
}

#[test]
fn a_flush_ends_when_its_time_is_over() {
    let (mut kv, drive) = on_drive(8, 100);
    drive.set(Mood::Stands);
    (0..7).for_each(|what| assert_eq!(say(&mut kv, what), 0));
    assert_eq!(kv.flush(Duration::from_millis(20)), 7);
    assert!(!kv.usage().has_file);
    assert_eq!(say(&mut kv, 3), BLOCK, "the cache goes on without it");
    drive.set(Mood::Works);
}

#[test]
fn a_file_that_only_fails_is_given_up_and_that_is_told() {
    let (mut kv, drive) = on_drive(6, 100);
    assert_eq!(say(&mut kv, 0), 0);
    assert_eq!(kv.flush(Duration::from_secs(60)), 0);
    let fail = |kv: &mut KvCache, what| {
        drive.set(Mood::Fails);
        assert_eq!(say(kv, what), 0);
        kv.save(9);
        assert!(kv.wait_for_file(Duration::from_secs(60)));
        drive.set(Mood::Works);
        kv.save(9);
    };
    // Now and then is no reason.
    for what in 1..41 {
        fail(&mut kv, what);
        say(&mut kv, 1000 + what);
        kv.flush(Duration::from_secs(60));
    }
    let usage = kv.usage();
    assert!(usage.has_file && usage.file_failures == 40, "{usage:?}");
    assert!(matches!(kv.take_warning(), Some(EngineError::Spill(_))), "the first is told");
    assert!(kv.take_warning().is_none(), "once");
    let failures = (100..200).take_while(|&what| {
        fail(&mut kv, what);
        kv.usage().has_file
    });
    assert_eq!(failures.count(), 15);
    assert_eq!(kv.usage().file_failures, 56);
    let told = kv.take_warning();
    assert!(matches!(told, Some(EngineError::SpillGivenUp { failures: 56, .. })), "{told:?}");
    assert!(kv.take_warning().is_none());
    (200..220).for_each(|what| assert_eq!(say(&mut kv, what), 0, "and on without"));
}

#[test]
fn what_is_used_in_memory_stays_in_the_file() {
    let (mut kv, _drive) = on_drive(20, 4);
    for what in 0..4 {
        say(&mut kv, what);
        kv.flush(Duration::from_secs(60));
    }
    assert_eq!(say(&mut kv, 0), BLOCK, "from memory");
    say(&mut kv, 4);
    kv.flush(Duration::from_secs(60));
    let holds = |what: u32| kv.spill.as_ref().unwrap().holds(Key::ROOT.child(&[what; BLOCK]));
    let held: Vec<u32> = (0..5).filter(|&what| holds(what)).collect();
    assert_eq!(held, [0, 2, 3, 4]);
}

#[test]
fn a_long_beginning_comes_in_parts() {
    let (mut kv, _drive) = on_drive(40, 100);
    let tokens: Vec<u32> = (0..10 * BLOCK as u32 + 7).collect();
    let seq = kv.open().unwrap();
    kv.reserve(seq, 0, tokens.len()).unwrap();
    kv.commit_all(seq, &tokens);
    kv.close(seq);
    assert_eq!(kv.flush(Duration::from_secs(60)), 0);
    // Only the fourth block stays in memory.
    let kept = kv.tree.nodes().find(|(_, node)| node.tokens[0] == 3 * BLOCK as u32).map(|(id, _)| id);
    let ids: Vec<u32> = kv.tree.nodes().map(|(id, _)| id).filter(|&id| Some(id) != kept).collect();
    assert_eq!(ids.len(), 10);
    for id in ids {
        kv.unlink(id);
        kv.set_free(id);
    }
    let seq = kv.open().unwrap();
    let mut parts = Vec::new();
    loop {
        let before = kv.spilled().unwrap().hits;
        let adopted = kv.adopt_some(seq, &tokens, 4);
        parts.push((adopted.held, kv.spilled().unwrap().hits - before));
        if adopted.is_done {
            break;
        }
    }
    assert_eq!(parts, [(5 * BLOCK, 4), (9 * BLOCK, 4), (10 * BLOCK + 7, 2)]);
    kv.close(seq);
    assert_eq!(kv.usage().held, 0);
}

#[test]
fn the_list_of_what_is_unsaved_stays_short() {
    let (mut kv, drive) = on_drive(5, 100);
    drive.set(Mood::Stands);
    (0..200).for_each(|what| assert_eq!(say(&mut kv, what), 0));
    assert!(kv.spill.as_ref().unwrap().unsaved().len() <= 11);
    drive.set(Mood::Works);
}

/// What a state is after these tokens, for tests that play the backend.
fn state_after(tokens: &[u32]) -> [f32; 2] {
    let bytes = mark(tokens);
    [0, 4].map(|at| f32::from_bits(u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())))
}

/// Has every layer with states compute positions `from` on, in two calls if `cut` says where.
fn renew(kv: &mut KvCache, spec: &ModelSpec, seq: SeqId, tokens: &[u32], from: usize, cut: usize) {
    let rows: Vec<Row> = (from..tokens.len()).map(|p| Row { seq, position: p as u32 }).collect();
    let cut = cut.min(rows.len());
    for layer in spec.delta_layers() {
        for (first, rows) in [(from, &rows[..cut]), (from + cut, &rows[cut..])] {
            if rows.is_empty() {
                continue;
            }
            let (mut runs, mut marks) = (Vec::new(), Vec::new());
            let memory = kv.states_of(layer, rows, &mut runs, &mut marks).unwrap();
            assert_eq!(runs.len(), 1);
            let DeltaRun { rows, from: before, to } = runs.remove(0);
            assert_eq!((rows.len(), before.is_none()), (rows.end, first == 0));
            if let Some(before) = before {
                let bits = |x: &[f32]| [x[0].to_bits(), x[1].to_bits()];
                assert_eq!(bits(&memory[before..]), bits(&state_after(&tokens[..first])), "layer {layer}");
            }
            memory[to..to + 2].copy_from_slice(&state_after(&tokens[..first + rows.end]));
            for DeltaMark { row, to } in marks {
                memory[to..to + 2].copy_from_slice(&state_after(&tokens[..first + row + 1]));
            }
        }
    }
}

/// As [`agrees_with_the_model`] where layers keep states: steps that fail change nothing, and whatever a sequence goes
/// back to or begins with has the state of its tokens, or none.
fn states_agree_with_the_model(seed: u64, blocks: usize, snapshots: usize) {
    let spec = smoe_testkit::TinyModel::qwen3_next(1).spec;
    let mut random = Random(seed);
    let kv = KvCache::new(&spec, KvType::F16, blocks * BLOCK, 4).unwrap();
    let mut kv = kv.with_snapshots(&spec, snapshots);
    let mut open: HashMap<usize, (SeqId, Vec<u32>)> = HashMap::new();
    let mut spoken: Vec<Vec<u32>> = vec![Vec::new()];
    let (mut adopted, mut gone_back) = (0, 0);
    for _ in 0..1500 {
        let who = random.below(4);
        match (open.remove(&who), random.below(10)) {
            (None, _) => {
                let mut tokens = spoken[random.below(spoken.len())].clone();
                tokens.truncate(random.below(tokens.len() + 1));
                tokens.extend((0..random.below(40)).map(|_| random.below(2) as u32));
                let seq = kv.open().unwrap();
                let held = kv.adopt(seq, &tokens);
                adopted += held;
                tokens.truncate(held);
                open.insert(who, (seq, tokens));
            }
            (Some((seq, mut tokens)), 0..7) => {
                let (from, n) = (tokens.len(), if random.below(3) == 0 { 1 } else { 1 + random.below(90) });
                let fails = random.below(5) == 0;
                kv.begin_step();
                if kv.reserve(seq, from, from + n).is_ok() {
                    kv.expect(seq, from, from + n, n > 1 || random.below(2) == 0);
                    tokens.extend((0..n).map(|_| random.below(2) as u32));
                    renew(&mut kv, &spec, seq, &tokens, from, random.below(n + 1));
                    for position in from..from + n {
                        let at = kv.place(seq, position);
                        kv.memory[at..at + 8].copy_from_slice(&mark(&tokens[..=position]));
                    }
                    if fails {
                        tokens.truncate(from);
                    } else {
                        let row = |position| Row { seq, position: position as u32 };
                        kv.keep(&(from..from + n).map(row).collect::<Vec<_>>());
                        kv.commit(seq, &tokens);
                    }
                }
                assert_eq!(kv.truncate(seq, tokens.len()), tokens.len());
                open.insert(who, (seq, tokens));
            }
            (Some((seq, mut tokens)), 7) => {
                let len = random.below(tokens.len() + 1);
                let held = kv.truncate(seq, len);
                assert!(held <= len);
                gone_back += if len < tokens.len() { held } else { 0 };
                tokens.truncate(held);
                open.insert(who, (seq, tokens));
            }
            (Some((seq, tokens)), which) => {
                if which == 8 {
                    kv.commit_all(seq, &tokens);
                }
                kv.close(seq);
                spoken.push(tokens);
            }
        }
        for (seq, tokens) in open.values() {
            let states = kv.states.as_ref().unwrap();
            assert_eq!(states.at(*seq), tokens.len());
            if !tokens.is_empty() {
                let [a, b] = state_after(tokens).map(f32::to_bits);
                assert_eq!(states.state(*seq)[..2].iter().map(|x| x.to_bits()).collect::<Vec<_>>(), [a, b]);
            }
            for position in 0..tokens.len() {
                let at = kv.place(*seq, position);
                assert_eq!(kv.memory[at..at + 8], mark(&tokens[..=position]), "{position}");
            }
        }
    }
    // With little room hardly anything is still there.
    if blocks >= 60 && snapshots >= 16 {
        assert!(adopted > 0 && gone_back > 0, "seed {seed}: {adopted} adopted, {gone_back} gone back to");
    }
    assert!(
        snapshots > 0 || adopted + gone_back == 0,
        "seed {seed}: {adopted} and {gone_back} of no snapshot"
    );
}

#[test]
fn states_go_where_their_tokens_go() {
    for (seed, blocks, snapshots) in
        [(1, 60, 16), (2, 60, 3), (3, 14, 16), (4, 14, 1), (5, 30, 0), (6, 90, 20)]
    {
        states_agree_with_the_model(seed, blocks, snapshots);
    }
}

#[test]
fn a_prompt_can_be_answered_again_from_its_last_edge() {
    let spec = smoe_testkit::TinyModel::qwen3_next(1).spec;
    let mut kv = KvCache::new(&spec, KvType::F16, 2000, 2).unwrap().with_snapshots(&spec, 4);
    let tokens: Vec<u32> = (0..1100).map(|i| i % 7).collect();
    let seq = kv.open().unwrap();
    let step = |kv: &mut KvCache, from: usize, to: usize| {
        kv.begin_step();
        kv.reserve(seq, from, to).unwrap();
        kv.expect(seq, from, to, to <= 1090);
        renew(kv, &spec, seq, &tokens[..to], from, 40);
        let row = |position| Row { seq, position: position as u32 };
        kv.keep(&(from..to).map(row).collect::<Vec<_>>());
        kv.commit(seq, &tokens[..to]);
    };
    // The first step's last edge, 576, gives way to the second one's; what lies at 512 and 1024 does not.
    step(&mut kv, 0, 600);
    step(&mut kv, 600, 1085);
    step(&mut kv, 1085, 1090);
    (1090..1100).for_each(|at| step(&mut kv, at, at + 1));
    // Another conversation with the same beginning, and one that begins as the prompt does.
    for (len, held) in [(1090, 1088), (1087, 1024), (700, 512), (500, 0)] {
        let other = kv.open().unwrap();
        assert_eq!(kv.adopt(other, &tokens[..len]), held);
        kv.close(other);
    }
    assert_eq!(kv.truncate(seq, 1089), 1088);
    assert_eq!(kv.truncate(seq, 1088), 1088);
    assert_eq!(kv.truncate(seq, 1000), 512);
    assert_eq!(kv.truncate(seq, 0), 0);
}

/// A conversation of its own, in steps of at most `chunk`, its end kept.
fn converse(kv: &mut KvCache, spec: &ModelSpec, tokens: &[u32], chunk: usize) {
    let seq = kv.open().unwrap();
    let mut from = kv.adopt(seq, &tokens[..tokens.len() - 1]);
    while from < tokens.len() {
        let to = (from + chunk).min(tokens.len());
        kv.begin_step();
        kv.reserve(seq, from, to).unwrap();
        kv.expect(seq, from, to, true);
        renew(kv, spec, seq, &tokens[..to], from, chunk);
        kv.keep(&(from..to).map(|position| Row { seq, position: position as u32 }).collect::<Vec<_>>());
        kv.commit(seq, &tokens[..to]);
        from = to;
    }
    kv.commit_all(seq, tokens);
    kv.close(seq);
}

/// How much of `tokens` a new sequence finds.
fn found(kv: &mut KvCache, tokens: &[u32]) -> usize {
    let seq = kv.open().unwrap();
    let held = kv.adopt(seq, tokens);
    kv.close(seq);
    held
}

#[test]
fn one_long_step_leaves_the_ends_of_others() {
    let spec = smoe_testkit::TinyModel::qwen3_next(1).spec;
    let mut kv = KvCache::new(&spec, KvType::F16, 8000, 4).unwrap().with_snapshots(&spec, 8);
    let tokens = |who: u32, n: u32| -> Vec<u32> { (0..n).map(|i| who + i % 7).collect() };
    for who in 0..2 {
        converse(&mut kv, &spec, &tokens(100 * who, 50), 64);
    }
    // Its spaced positions would take every place, were a step not held to some of them.
    let seq = kv.open().unwrap();
    kv.begin_step();
    kv.reserve(seq, 0, 4100).unwrap();
    kv.expect(seq, 0, 4100, true);
    // And it fails: what it had set aside can be had again.
    kv.begin_step();
    kv.truncate(seq, 0);
    kv.close(seq);
    for who in 0..2 {
        assert_eq!(found(&mut kv, &tokens(100 * who, 60)), 50, "{who}");
    }
}

#[test]
fn an_end_that_is_known_gets_the_snapshot_that_it_has_lost() {
    let spec = smoe_testkit::TinyModel::qwen3_next(1).spec;
    let mut kv = KvCache::new(&spec, KvType::F16, 8000, 4).unwrap().with_snapshots(&spec, 2);
    let tokens = |who: u32| -> Vec<u32> { (0..50).map(|i| who + i % 7).collect() };
    converse(&mut kv, &spec, &tokens(0), 64);
    assert_eq!(found(&mut kv, &[&tokens(0)[..], &[9; 9]].concat()), 50);
    for who in 1..4 {
        converse(&mut kv, &spec, &tokens(100 * who), 64);
    }
    assert_eq!(found(&mut kv, &[&tokens(0)[..], &[9; 9]].concat()), 0);
    converse(&mut kv, &spec, &tokens(0), 64);
    assert_eq!(found(&mut kv, &[&tokens(0)[..], &[9; 9]].concat()), 50);
}

#[test]
fn a_prompt_in_steps_of_one_token_keeps_its_last_edge_and_no_other() {
    let spec = smoe_testkit::TinyModel::qwen3_next(1).spec;
    for (len, chunk) in [(65, 64), (65, 1), (97, 32)] {
        let mut kv = KvCache::new(&spec, KvType::F16, 2000, 2).unwrap().with_snapshots(&spec, 9);
        let tokens: Vec<u32> = (0..len).collect();
        converse(&mut kv, &spec, &tokens, chunk);
        let edge = (tokens.len() - 1) / BLOCK * BLOCK;
        assert_eq!(found(&mut kv, &tokens[..tokens.len() - 1]), edge, "{len} by {chunk}");
        assert_eq!(found(&mut kv, &tokens[..edge - 1]), 0, "{len} by {chunk}: earlier edges gave way");
    }
}

#[test]
fn the_nearest_snapshot_is_found_beside_the_blocks_that_are_known() {
    let spec = smoe_testkit::TinyModel::qwen3_next(1).spec;
    let mut kv = KvCache::new(&spec, KvType::F16, 8000, 4).unwrap().with_snapshots(&spec, 8);
    let tokens: Vec<u32> = (0..200).collect();
    // It ends in the middle of a block; another goes on from there, and has its snapshots far behind.
    converse(&mut kv, &spec, &tokens[..50], 64);
    converse(&mut kv, &spec, &tokens, 200);
    assert_eq!(found(&mut kv, &[&tokens[..120], &[9; 9]].concat()), 50);
    assert_eq!(found(&mut kv, &tokens[..50]), 50);
    assert_eq!(found(&mut kv, &tokens[..49]), 32, "the last edge of the first");
    assert_eq!(found(&mut kv, &tokens[..199]), 192);
    assert_eq!(kv.usage().held, 0);
}
