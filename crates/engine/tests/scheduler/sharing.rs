//! What was computed is found again, in memory and in the file.

use super::*;

#[test]
fn the_next_turn_costs_its_own_tokens() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = scheduler(&vault, &several(RingSize::Auto, 16, 2, 0));
    let mut conversation = model.prompt(75, 1);
    let (mut answer, first) = one(&mut scheduler, &conversation, 20);
    assert_eq!(first, 0);
    for turn in 0..3 {
        conversation.append(&mut answer);
        let known = conversation.len() - 1;
        conversation.extend(model.prompt(9, 50 + turn));
        let expected = greedy(&mut open(&vault, &options(RingSize::Auto, 16, 1)), &conversation, 20);
        let cached;
        (answer, cached) = one(&mut scheduler, &conversation, 20);
        // The last token of an answer is told but never computed.
        assert_eq!((cached, &answer), (known, &expected), "turn {turn}");
    }
    // A conversation that leaves it in the middle of a block goes on from there, and both stay as they are.
    let mut other = conversation[..50].to_vec();
    other.extend(model.prompt(8, 99));
    let expected = greedy(&mut open(&vault, &options(RingSize::Auto, 16, 1)), &other, 12);
    assert_eq!(one(&mut scheduler, &other, 12), (expected, 50));
    let again = greedy(&mut open(&vault, &options(RingSize::Auto, 16, 1)), &conversation, 20);
    assert_eq!(one(&mut scheduler, &conversation, 20), (again, conversation.len() - 1));
}

#[test]
fn equal_prompts_at_once_are_computed_once() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = scheduler(&vault, &several(RingSize::Auto, 32, 4, 0));
    let prompt = model.prompt(100, 1);
    let logs: Vec<Log> = (0..4)
        .map(|_| {
            let (job, log) = job(&prompt, 4);
            scheduler.submit(job).unwrap();
            log
        })
        .collect();
    run(&mut scheduler);
    assert_eq!(cached(&logs[0]), 0);
    for log in &logs[1..] {
        assert!(cached(log) >= 96, "{}", cached(log));
        assert_eq!(log.lock().unwrap().tokens, logs[0].lock().unwrap().tokens);
    }
}

fn spilling(vault: &Vault, file: &Path, kv_contexts: usize, max_bytes: u64) -> Scheduler {
    let spill = Some(SpillConfig { path: file.to_owned(), max_bytes });
    let options = several(RingSize::Auto, 64, 2, kv_contexts);
    Scheduler::new(open(vault, &options), SchedulerOptions { spill, ..SchedulerOptions::default() }).unwrap()
}

/// A cache of one context of 256 positions, and a dozen conversations of 120: most are in the file only.
#[test]
fn conversations_longer_than_memory_come_back_from_the_file() {
    comes_back_from_the_file(TinyModel::qwen3(3));
}

/// With a block of each kind in a record.
#[test]
fn so_do_those_of_windows() {
    comes_back_from_the_file(TinyModel::gpt_oss(3));
}

fn comes_back_from_the_file(model: TinyModel) {
    let (dir, vault, model) = tiny_of(model);
    let file = dir.path().join("conversations.kvcache");
    let prompts: Vec<Vec<u32>> = (0..12).map(|i| model.prompt(110, i)).collect();
    let expected: BTreeMap<usize, Vec<u32>> = {
        let mut scheduler = spilling(&vault, &file, 1, 64 << 20);
        let answers =
            prompts.iter().enumerate().map(|(i, prompt)| (i, one(&mut scheduler, prompt, 10).0)).collect();
        for (i, prompt) in prompts.iter().enumerate() {
            let (answer, cached) = one(&mut scheduler, prompt, 10);
            let answers: &BTreeMap<usize, Vec<u32>> = &answers;
            assert_eq!((&answer, cached), (&answers[&i], 109), "conversation {i}");
        }
        let spilled = scheduler.engine().spilled().unwrap();
        assert!(spilled.hits > 20 && spilled.corrupt == 0, "{spilled:?}");
        // What a crash leaves: the file as it is while the scheduler lives.
        std::fs::copy(&file, dir.path().join("crash.kvcache")).unwrap();
        answers
    };
    let mut found = 0;
    let mut scheduler = spilling(&vault, &dir.path().join("crash.kvcache"), 1, 64 << 20);
    for (i, prompt) in prompts.iter().enumerate() {
        let (answer, cached) = one(&mut scheduler, prompt, 10);
        assert_eq!(&answer, &expected[&i], "after a crash, conversation {i}");
        found += cached;
    }
    assert!(found > 10 * 109, "all but what was being written: {found}");
    let mut scheduler = spilling(&vault, &file, 1, 64 << 20);
    for (i, prompt) in prompts.iter().enumerate() {
        let (answer, cached) = one(&mut scheduler, prompt, 10);
        assert_eq!((&answer, cached), (&expected[&i], 109), "after a restart, conversation {i}");
    }
    drop(scheduler);
    // Damaged all over: what is still whole is used, and nobody hears a wrong word.
    let mut bytes = std::fs::read(&file).unwrap();
    for at in (8192..bytes.len()).step_by(50_021) {
        bytes[at] ^= 0x40;
    }
    std::fs::write(&file, &bytes).unwrap();
    let mut scheduler = spilling(&vault, &file, 1, 64 << 20);
    let mut reused = 0;
    for (i, prompt) in prompts.iter().enumerate() {
        let (answer, cached) = one(&mut scheduler, prompt, 10);
        assert_eq!(&answer, &expected[&i], "from a damaged file, conversation {i}");
        reused += cached;
    }
    assert!(reused < 12 * 109, "some were damaged");
    drop(scheduler);
    // Another model's: begun anew.
    let other = TinyModel::qwen3(4);
    let other_dir = tempfile::tempdir().unwrap();
    let other_vault = write_tiny(other_dir.path(), &other, "q4/64", "q8/64");
    let mut scheduler = spilling(&other_vault, &file, 1, 64 << 20);
    assert_eq!(one(&mut scheduler, &prompts[0], 10).1, 0);
}

#[test]
fn a_small_file_and_a_small_cache_make_it_slower_never_different() {
    is_never_different(TinyModel::qwen3(3));
    is_never_different(TinyModel::gpt_oss(3));
}

fn is_never_different(model: TinyModel) {
    let (dir, vault, model) = tiny_of(model);
    let mut alone = open(&vault, &options(RingSize::Auto, 16, 1));
    let prompts: Vec<Vec<u32>> = (0..5).map(|i| model.prompt(60 + 20 * i, i as u64)).collect();
    let expected: Vec<Vec<u32>> = prompts.iter().map(|prompt| greedy(&mut alone, prompt, 60)).collect();
    let bytes = 8 * (alone_block(&alone) + 4096) as u64;
    let mut scheduler = spilling(&vault, &dir.path().join("small.kvcache"), 1, bytes);
    for _ in 0..2 {
        let logs: Vec<Log> = prompts
            .iter()
            .map(|prompt| {
                let (job, log) = job(prompt, 60);
                scheduler.submit(job).unwrap();
                log
            })
            .collect();
        run(&mut scheduler);
        for (log, expected) in logs.iter().zip(&expected) {
            assert_eq!((finish(log), &log.lock().unwrap().tokens), (Ok(Finish::Length), expected));
        }
    }
}

/// Bytes of a block of this engine's cache.
fn alone_block(engine: &Engine) -> usize {
    let plan = engine.info().plan;
    plan.kv_bytes as usize / engine.kv_usage().blocks
}

#[test]
fn a_file_that_cannot_be_used_is_a_warning() {
    let (dir, vault, model) = tiny();
    let expected = greedy(&mut open(&vault, &options(RingSize::Auto, 16, 1)), &model.prompt(80, 1), 5);
    let taken = dir.path().join("taken.kvcache");
    let _holds = spilling(&vault, &taken, 1, 64 << 20);
    let foreign = dir.path().join("letter.kvcache");
    std::fs::write(&foreign, "Dear file,").unwrap();
    for path in [taken.clone(), foreign.clone(), dir.path().to_owned(), dir.path().join("no/such/directory")]
    {
        let mut scheduler = spilling(&vault, &path, 1, 64 << 20);
        let warning = scheduler.take_warning().expect("it is told");
        assert!(matches!(warning, EngineError::Spill(_)), "{warning:?}");
        assert!(scheduler.take_warning().is_none(), "once");
        assert!(!scheduler.load().kv_has_file);
        assert_eq!(one(&mut scheduler, &model.prompt(80, 1), 5), (expected.clone(), 0));
        assert_eq!(one(&mut scheduler, &model.prompt(80, 1), 5), (expected.clone(), 79));
    }
    assert_eq!(std::fs::read(&foreign).unwrap(), b"Dear file,");
    assert!(spilling(&vault, &dir.path().join("new.kvcache"), 1, 64 << 20).load().kv_has_file);
}

/// A conversation of 28 blocks is in the file only; while it is read, somebody else is being answered.
#[test]
fn a_beginning_is_read_from_the_file_while_others_go_on() {
    let (dir, vault, model) = tiny();
    let file = dir.path().join("long.kvcache");
    let mut options = several(RingSize::Auto, 64, 2, 0);
    options.plan.context = Some(1000);
    let open_on = |file: &Path| {
        let spill = Some(SpillConfig { path: file.to_owned(), max_bytes: 64 << 20 });
        Scheduler::new(open(&vault, &options), SchedulerOptions { spill, ..SchedulerOptions::default() })
            .unwrap()
    };
    let long = model.prompt(900, 1);
    let (expected, _) = one(&mut open_on(&file), &long, 4);
    let mut scheduler = open_on(&file);
    let (answered, answer) = job(&model.prompt(5, 2), 200);
    scheduler.submit(answered).unwrap();
    steps_until(&mut scheduler, |_| told(&answer) > 2);
    let (loaded, log) = job(&long, 4);
    scheduler.submit(loaded).unwrap();
    let mut steps = 0;
    while log.lock().unwrap().prefills.is_empty() {
        let (before, hits) = (told(&answer), scheduler.engine().spilled().unwrap().hits);
        scheduler.step();
        let read = scheduler.engine().spilled().unwrap().hits - hits;
        assert!(read <= 9, "{read} blocks in a step");
        assert!(told(&answer) > before, "who is being answered gets a token in every step");
        steps += 1;
    }
    assert!((4..=5).contains(&steps), "28 blocks in {steps} steps");
    run(&mut scheduler);
    assert_eq!(cached(&log), 899);
    assert_eq!(log.lock().unwrap().tokens, expected);
    // One that is cancelled meanwhile holds nothing.
    let mut scheduler = open_on(&dir.path().join("other.kvcache"));
    drop(scheduler);
    std::fs::copy(&file, dir.path().join("other.kvcache")).unwrap();
    scheduler = open_on(&dir.path().join("other.kvcache"));
    let (answered, answer) = job(&model.prompt(5, 2), 60);
    scheduler.submit(answered).unwrap();
    steps_until(&mut scheduler, |_| told(&answer) > 2);
    let (loaded, log) = job(&long, 4);
    let cancel = loaded.cancel.clone();
    scheduler.submit(loaded).unwrap();
    scheduler.step();
    scheduler.step();
    cancel.store(true, Ordering::Relaxed);
    run(&mut scheduler);
    assert_eq!(finish(&log), Ok(Finish::Stopped));
    assert_eq!(finish(&answer), Ok(Finish::Length));
    assert_eq!(scheduler.load().kv_used, 0);
    assert_eq!(one(&mut scheduler, &long, 4), (expected, 899));
}

#[test]
fn beginnings_are_shared_however_numbers_are_kept() {
    beginnings_are_shared(TinyModel::qwen3(3));
}

/// With the keys of their indexers, in memory and in the file.
#[test]
fn beginnings_of_sparse_attention_are_shared_too() {
    beginnings_are_shared(TinyModel::glm_dsa(3));
}

fn beginnings_are_shared(model: TinyModel) {
    let (dir, vault, model) = tiny_of(model);
    for kv in [KvType::F32, KvType::F16, KvType::Q8] {
        let file = dir.path().join(format!("{kv:?}.kvcache"));
        let mut options = several(RingSize::Auto, 16, 2, 0);
        options.plan.kv = Some(kv);
        let open_on = || {
            let spill = Some(SpillConfig { path: file.clone(), max_bytes: 64 << 20 });
            Scheduler::new(open(&vault, &options), SchedulerOptions { spill, ..SchedulerOptions::default() })
                .unwrap()
        };
        let mut scheduler = open_on();
        let mut conversation = model.prompt(75, 1);
        for turn in 0..3 {
            let expected = greedy(&mut open(&vault, &options), &conversation, 20);
            let (mut answer, cached) = one(&mut scheduler, &conversation, 20);
            assert_eq!(answer, expected, "{kv:?}, turn {turn}");
            assert_eq!(cached > 0, turn > 0);
            conversation.append(&mut answer);
            conversation.extend(model.prompt(9, 50 + turn));
        }
        // In the middle of a block; and from the file.
        let mut other = conversation[..50].to_vec();
        other.extend(model.prompt(8, 99));
        let expected = greedy(&mut open(&vault, &options), &other, 12);
        assert_eq!(one(&mut scheduler, &other, 12), (expected.clone(), 50), "{kv:?}");
        drop(scheduler);
        let (answer, cached) = one(&mut open_on(), &other, 12);
        assert_eq!(answer, expected, "{kv:?}, from the file");
        assert!(cached >= 57, "{cached}");
    }
}
