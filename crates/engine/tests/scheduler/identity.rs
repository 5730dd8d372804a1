//! Every job gets the tokens that it gets alone.

use super::*;

#[test]
fn every_client_gets_the_tokens_that_it_gets_alone() {
    gets_the_tokens_that_it_gets_alone(TinyModel::qwen3(3));
}

/// Tokens of one step see choices of their own.
#[test]
fn so_does_every_client_of_sparse_attention() {
    gets_the_tokens_that_it_gets_alone(TinyModel::glm_dsa(3));
}

/// Blocks that are seen no more are others' at once, also where the cache is short.
#[test]
fn so_does_every_client_of_windows() {
    gets_the_tokens_that_it_gets_alone(TinyModel::gpt_oss(3));
}

fn gets_the_tokens_that_it_gets_alone(model: TinyModel) {
    let (_dir, vault, model) = tiny_of(model);
    let top_k = vault.spec.moe.top_k;
    let prompts: Vec<Vec<u32>> = (0..6).map(|i| model.prompt(5 + 23 * i, i as u64)).collect();
    let mut alone = open(&vault, &options(RingSize::Auto, 16, 1));
    let expected: Vec<Vec<u32>> = prompts.iter().map(|prompt| greedy(&mut alone, prompt, 24)).collect();
    for ring in [RingSize::Auto, RingSize::Slots(top_k), RingSize::Slots(3 * top_k)] {
        for (sessions, kv_contexts, chunk) in [(6, 0, 64), (3, 0, 7), (6, 1, 16), (2, 1, 64)] {
            let mut scheduler = scheduler(&vault, &several(ring, chunk, sessions, kv_contexts));
            let mut logs = Vec::new();
            for (i, prompt) in prompts.iter().enumerate() {
                let (job, log) = job(prompt, 24);
                scheduler.submit(job).unwrap();
                logs.push(log);
                // Some come while others are being answered.
                for _ in 0..3 * (i % 3) {
                    scheduler.step();
                }
            }
            run(&mut scheduler);
            for ((log, expected), i) in logs.iter().zip(&expected).zip(0..) {
                assert_eq!(finish(log), Ok(Finish::Length), "client {i}");
                assert_eq!(
                    log.lock().unwrap().tokens,
                    *expected,
                    "client {i}, {ring:?}, {sessions} sessions"
                );
            }
            let load = scheduler.load();
            assert_eq!((load.running, load.queued, load.kv_used), (0, 0, 0));
        }
    }
}

#[test]
fn sampled_tokens_do_not_depend_on_neighbours_and_logprobs_are_the_models() {
    let (_dir, vault, model) = tiny();
    let sampling = |seed| Sampling { temperature: 1.0, top_p: 0.9, seed, ..Sampling::default() };
    let submit = |scheduler: &mut Scheduler, seed: u64| {
        let (mut job, log) = job(&model.prompt(20, seed), 16);
        job.sampling = sampling(seed);
        job.logprobs = Some(3);
        scheduler.submit(job).unwrap();
        log
    };
    let mut together = scheduler(&vault, &several(RingSize::Auto, 16, 4, 0));
    let logs: Vec<Log> = (0..4).map(|seed| submit(&mut together, seed)).collect();
    run(&mut together);
    for (seed, log) in (0..).zip(&logs) {
        let mut alone = scheduler(&vault, &several(RingSize::Auto, 16, 1, 0));
        let expected = submit(&mut alone, seed);
        run(&mut alone);
        let (log, expected) = (log.lock().unwrap(), expected.lock().unwrap());
        assert_eq!((&log.tokens, &log.logprobs), (&expected.tokens, &expected.logprobs));
        for (logprob, top) in &log.logprobs {
            assert_eq!(top.len(), 3);
            assert!(top.is_sorted_by(|a, b| a.1 >= b.1) && top[0].1 >= *logprob && *logprob < 0.0);
        }
    }
    let mut engine = open(&vault, &options(RingSize::Auto, 16, 1));
    let mut session = engine.open_session().unwrap();
    engine.sync(&mut session, &model.prompt(20, 0), &mut smoe_engine::Control::default()).unwrap();
    let token = Sampler::new(sampling(0), vault.spec.vocab_size)
        .map(|mut s| engine.sample(&session, &mut s))
        .unwrap();
    let first = logs[0].lock().unwrap();
    assert_eq!(first.tokens[0], token);
    let sum: f64 = session.logits().iter().map(|&l| f64::from(l).exp()).sum();
    let expected = f64::from(session.logits()[token as usize]) - sum.ln();
    assert!((f64::from(first.logprobs[0].0) - expected).abs() < 1e-5);
}

#[test]
fn no_token_is_a_length_too() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = scheduler(&vault, &several(RingSize::Auto, 16, 1, 0));
    for (most, told) in [(0, 0), (1, 1)] {
        let (job, log) = job(&model.prompt(20, 1), most);
        scheduler.submit(job).unwrap();
        run(&mut scheduler);
        assert_eq!(finish(&log), Ok(Finish::Length));
        assert_eq!(log.lock().unwrap().tokens.len(), told);
    }
}

#[test]
fn who_is_sent_back_goes_on_with_the_same_tokens() {
    let (_dir, vault, model) = tiny();
    let sampled = |seed: u64| {
        let (mut job, log) = job(&model.prompt(70, seed), 500);
        job.sampling = Sampling {
            temperature: 0.9,
            top_p: 0.9,
            repetition_penalty: 1.1,
            frequency_penalty: 0.2,
            seed,
            ..Sampling::default()
        };
        (job, log)
    };
    // Room for 31 blocks, of which both jobs come to need 18, and seem to need 11 when they are let in.
    let mut options = several(RingSize::Auto, 16, 2, 1);
    options.plan.context = Some(992);
    let mut together = scheduler(&vault, &options);
    let logs: Vec<Log> = (0..2)
        .map(|seed| {
            let (job, log) = sampled(seed);
            together.submit(job).unwrap();
            log
        })
        .collect();
    run(&mut together);
    assert!(together.load().sent_back > 0);
    let mut alone = scheduler(&vault, &options);
    for (seed, log) in (0..).zip(&logs) {
        assert_eq!(finish(log), Ok(Finish::Length));
        let (job, expected) = sampled(seed);
        alone.submit(job).unwrap();
        run(&mut alone);
        assert_eq!(log.lock().unwrap().tokens, expected.lock().unwrap().tokens);
    }
    assert_eq!(alone.load().sent_back, 0);
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

/// Conversations that share beginnings come, go on, and are given up at any moment, with little room and much, with a
/// file and without. Whoever is not given up gets what it gets alone, who is gets a beginning of it, and at the end
/// nothing is held.
#[test]
fn whoever_leaves_the_others_get_what_they_get_alone() {
    leave(TinyModel::qwen3(3));
}

/// With states, which go to the file too.
#[test]
fn whoever_leaves_those_of_linear_attention_get_what_they_get_alone() {
    leave(TinyModel::qwen3_next(3));
}

fn leave(model: TinyModel) {
    let (dir, vault, model) = tiny_of(model);
    let top_k = vault.spec.moe.top_k;
    for seed in 1..7_u64 {
        let mut random = Random(seed * 0x9e37_79b9);
        let ring = if seed % 2 == 0 { RingSize::Slots(2 * top_k) } else { RingSize::Auto };
        let mut options = several(ring, [7, 16, 64][seed as usize % 3], 4, 1 + seed as usize % 2);
        options.plan.context = Some(600);
        let spill = (seed > 3).then(|| SpillConfig {
            path: dir.path().join(format!("{seed}.kvcache")),
            max_bytes: if seed == 4 { 300_000 } else { 64 << 20 },
        });
        let settings =
            SchedulerOptions { at_once: Some(4), max_queued: 1000, spill, ..SchedulerOptions::default() };
        let mut scheduler = Scheduler::new(open(&vault, &options), settings).unwrap();
        let prompts: Vec<Vec<u32>> = (0..14)
            .map(|i| {
                let mut prompt = model.prompt(20 + 15 * random.below(12), i % 3);
                prompt.extend(model.prompt(1 + random.below(40), 100 + i));
                prompt
            })
            .collect();
        let lengths: Vec<usize> = prompts.iter().map(|_| random.below(300)).collect();
        let mut jobs: Vec<(Log, Arc<AtomicBool>, bool)> = Vec::new();
        while jobs.len() < prompts.len() || scheduler.load().running + scheduler.load().queued > 0 {
            if jobs.len() < prompts.len() && random.below(8) == 0 {
                let (mut job, log) = job(&prompts[jobs.len()], lengths[jobs.len()]);
                job.sampling = Sampling { temperature: 0.8, seed: jobs.len() as u64, ..Sampling::default() };
                jobs.push((log, job.cancel.clone(), false));
                scheduler.submit(job).unwrap();
            }
            if !jobs.is_empty() && random.below(60) == 0 {
                let i = random.below(jobs.len());
                jobs[i].1.store(true, Ordering::Relaxed);
                jobs[i].2 = true;
            }
            scheduler.step();
            let load = scheduler.load();
            assert!(load.kv_used + load.kv_cached <= load.kv_blocks);
            assert!(load.running > 0 || load.kv_used == 0, "nobody holds {} blocks", load.kv_used);
        }
        run(&mut scheduler);
        assert_eq!(scheduler.load().kv_used, 0);
        let mut alone = self::scheduler(&vault, &options);
        let mut given_up = 0;
        for (i, (log, _, may_be_short)) in jobs.iter().enumerate() {
            let (mut job, expected) = job(&prompts[i], lengths[i]);
            job.sampling = Sampling { temperature: 0.8, seed: i as u64, ..Sampling::default() };
            alone.submit(job).unwrap();
            run(&mut alone);
            let (finish, expected) = (finish(log), expected.lock().unwrap());
            let tokens = &log.lock().unwrap().tokens;
            if finish == Ok(Finish::Stopped) && *may_be_short {
                given_up += 1;
                assert_eq!(*tokens, expected.tokens[..tokens.len()], "seed {seed}, job {i}");
            } else {
                assert_eq!(
                    (&finish, tokens),
                    (&Ok(Finish::Length), &expected.tokens),
                    "seed {seed}, job {i}"
                );
            }
        }
        assert!((1..14).contains(&given_up), "{given_up} of 14 were given up");
    }
}
