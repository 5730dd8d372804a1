//! Who is let in, who waits and who is refused; long prompts beside answers.

use super::*;

#[test]
fn what_cannot_be_done_is_refused_before_it_is_queued() {
    let (_dir, vault, model) = tiny();
    let engine = open(&vault, &several(RingSize::Auto, 16, 1, 0));
    let mut scheduler =
        Scheduler::new(engine, SchedulerOptions { max_queued: 2, ..SchedulerOptions::default() }).unwrap();
    let mut submit = |prompt: &[u32], sampling: Sampling| {
        let (mut job, _) = job(prompt, 4);
        job.sampling = sampling;
        scheduler.submit(job)
    };
    let good = Sampling::default();
    assert!(matches!(submit(&[], good.clone()), Err(EngineError::EmptyPrompt)));
    assert!(matches!(submit(&[u32::MAX], good.clone()), Err(EngineError::Token { .. })));
    assert!(matches!(submit(&[1; 257], good.clone()), Err(EngineError::ContextFull { .. })));
    let bad = Sampling { temperature: -1.0, ..Sampling::default() };
    assert!(matches!(submit(&[1], bad), Err(EngineError::Sampling { .. })));
    // One for the place that is free, and two that wait.
    (1..4).for_each(|i| submit(&model.prompt(4, i), good.clone()).map(|_| ()).unwrap());
    assert!(matches!(submit(&model.prompt(4, 4), good), Err(EngineError::QueueFull { queued: 2 })));
    run(&mut scheduler);
    // A prompt that fills the context has room for the tokens that follow its last one, one.
    let (job, log) = job(&model.prompt(256, 1), 10);
    scheduler.submit(job).unwrap();
    run(&mut scheduler);
    assert_eq!(finish(&log), Ok(Finish::ContextFull));
    assert_eq!(log.lock().unwrap().tokens.len(), 1);
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one() {
    let (_dir, vault, model) = tiny();
    let mut options = several(RingSize::Auto, 16, 3, 0);
    options.plan.context = Some(1000);
    for (long, short, others) in [(900, 10, 1), (900, 40, 1), (900, 40, 2)] {
        let mut scheduler = scheduler(&vault, &options);
        let mut longs = Vec::new();
        for i in 0..others {
            let (job, log) = job(&model.prompt(long, i), 2);
            scheduler.submit(job).unwrap();
            longs.push(log);
        }
        scheduler.step();
        let prompt = model.prompt(short, 9);
        let (job, log) = job(&prompt, 3);
        scheduler.submit(job).unwrap();
        let steps = steps_until(&mut scheduler, |_| told(&log) > 0);
        // Parts of 16 tokens for n prompts: ceil(r / floor(16 / 2n)), in a step each as nobody is being answered.
        let bound = short.div_ceil(16 / (2 * (others as usize + 1)));
        assert!(steps <= bound, "{steps} steps for {short} tokens beside {others} prompts of {long}");
        run(&mut scheduler);
        let mut alone = open(&vault, &options);
        assert_eq!(log.lock().unwrap().tokens, greedy(&mut alone, &prompt, 3));
        for (i, log) in longs.iter().enumerate() {
            assert_eq!(log.lock().unwrap().tokens, greedy(&mut alone, &model.prompt(long, i as u64), 2));
        }
    }
}

#[test]
fn a_prompt_needs_room_for_what_is_new_in_it() {
    let (_dir, vault, model) = tiny();
    // Eight blocks in all.
    let mut scheduler = scheduler(&vault, &several(RingSize::Auto, 64, 3, 1));
    let prompt = model.prompt(100, 1);
    let mut longer = prompt.clone();
    longer.extend(model.prompt(5, 2));
    let (first, log) = job(&prompt, 20);
    scheduler.submit(first).unwrap();
    steps_until(&mut scheduler, |_| told(&log) > 0);
    // Five blocks and one to spare; three of them the first one holds.
    let (second, other) = job(&longer, 20);
    scheduler.submit(second).unwrap();
    scheduler.step();
    assert_eq!((scheduler.load().running, scheduler.load().queued), (2, 0));
    // What shares nothing has to wait.
    let (third, stranger) = job(&model.prompt(100, 3), 20);
    scheduler.submit(third).unwrap();
    scheduler.step();
    assert_eq!((scheduler.load().running, scheduler.load().queued), (2, 1));
    run(&mut scheduler);
    assert_eq!(cached(&other), 96);
    assert_eq!(scheduler.load().sent_back, 0);
    let mut alone = open(&vault, &options(RingSize::Auto, 16, 1));
    for (log, prompt) in [(&log, &prompt), (&other, &longer), (&stranger, &model.prompt(100, 3))] {
        assert_eq!(finish(log), Ok(Finish::Length));
        assert_eq!(log.lock().unwrap().tokens, greedy(&mut alone, prompt, 20));
    }
    // Equal ones that come together count once, too.
    let logs: Vec<Log> = (0..3)
        .map(|_| {
            let (job, log) = job(&model.prompt(120, 7), 8);
            scheduler.submit(job).unwrap();
            log
        })
        .collect();
    scheduler.step();
    assert_eq!(scheduler.load().running, 3);
    run(&mut scheduler);
    assert!(logs.iter().all(|log| finish(log) == Ok(Finish::Length)));
    assert_eq!(scheduler.load().sent_back, 0);
}

fn queueing(vault: &Vault, sessions: usize, max_queued: usize) -> Scheduler {
    let engine = open(vault, &several(RingSize::Auto, 16, sessions, 0));
    Scheduler::new(engine, SchedulerOptions { max_queued, ..SchedulerOptions::default() }).unwrap()
}

#[test]
fn jobs_that_come_together_are_taken_or_refused_together() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = queueing(&vault, 2, 3);
    let jobs = |n: u64| -> (Vec<Job>, Vec<Log>) { (0..n).map(|i| job(&model.prompt(6, i), 4)).unzip() };
    let (many, refused) = jobs(6);
    assert!(matches!(scheduler.submit_all(many), Err(EngineError::QueueFull { queued: 0 })));
    assert_eq!(scheduler.load().queued, 0);
    assert!(refused.iter().all(|log| log.lock().unwrap().end.is_none()), "nobody heard of it");
    let (five, logs) = jobs(5);
    assert_eq!(scheduler.submit_all(five).unwrap().len(), 5);
    let (one, _) = jobs(1);
    assert!(matches!(scheduler.submit_all(one), Err(EngineError::QueueFull { queued: 3 })));
    scheduler.step();
    assert_eq!((scheduler.load().running, scheduler.load().queued), (2, 3));
    // One that cannot be done refuses the others.
    let (mut two, _) = jobs(2);
    two[1].prompt = vec![u32::MAX];
    assert!(matches!(scheduler.submit_all(two), Err(EngineError::Token { .. })));
    run(&mut scheduler);
    assert!(logs.iter().all(|log| finish(log) == Ok(Finish::Length)));
}

#[test]
fn without_a_queue_a_job_runs_at_once_or_not_at_all() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = queueing(&vault, 2, 0);
    let mut logs = Vec::new();
    for i in 0..2 {
        let (job, log) = job(&model.prompt(6, i), 4);
        scheduler.submit(job).unwrap();
        logs.push(log);
    }
    let refused = |scheduler: &mut Scheduler| scheduler.submit(job(&model.prompt(6, 8), 4).0);
    assert!(matches!(refused(&mut scheduler), Err(EngineError::QueueFull { queued: 0 })));
    scheduler.step();
    assert_eq!((scheduler.load().running, scheduler.load().queued), (2, 0));
    assert!(matches!(refused(&mut scheduler), Err(EngineError::QueueFull { .. })));
    run(&mut scheduler);
    assert!(logs.iter().all(|log| finish(log) == Ok(Finish::Length)));
    refused(&mut scheduler).unwrap();
    run(&mut scheduler);
    // A place without room in the cache is none.
    let engine = open(&vault, &several(RingSize::Auto, 16, 2, 1));
    let mut scheduler =
        Scheduler::new(engine, SchedulerOptions { max_queued: 0, ..SchedulerOptions::default() }).unwrap();
    scheduler.submit(job(&model.prompt(200, 1), 30).0).unwrap();
    scheduler.step();
    let second = scheduler.submit(job(&model.prompt(200, 2), 30).0);
    assert!(matches!(second, Err(EngineError::QueueFull { .. })));
}

#[test]
fn a_prompt_comes_in_parts_between_the_tokens_of_an_answer() {
    let (_dir, vault, model) = tiny();
    let mut options = several(RingSize::Auto, 512, 2, 0);
    options.plan.context = Some(1000);
    let engine = open(&vault, &options);
    // What steps take is nothing to this: a part is limited by the one before it.
    let stall = Duration::from_secs(3600);
    let mut scheduler =
        Scheduler::new(engine, SchedulerOptions { stall, ..SchedulerOptions::default() }).unwrap();
    let (answered, answer) = job(&model.prompt(5, 2), 900);
    scheduler.submit(answered).unwrap();
    steps_until(&mut scheduler, |_| told(&answer) > 2);
    let prompt = model.prompt(700, 1);
    let (prefilled, log) = job(&prompt, 3);
    scheduler.submit(prefilled).unwrap();
    // The first ones are few.
    let (mut done, mut most, mut parts) = (0, 128, 0);
    while told(&log) == 0 {
        let before = told(&answer);
        scheduler.step();
        assert_eq!(told(&answer), before + 1, "one token a step");
        let now = log.lock().unwrap().prefills.last().map_or(0, |prefill| prefill.0);
        let part = now - done;
        if part > 0 {
            assert!(part <= most.min(511), "a part of {part} after one of {}", most / 2);
            (done, most, parts) = (now, 2 * part.max(64), parts + 1);
        }
        assert!(told(&answer) < 800);
    }
    assert!(parts >= 3, "{parts}");
    run(&mut scheduler);
    assert_eq!(log.lock().unwrap().tokens, greedy(&mut open(&vault, &options), &prompt, 3));
    assert_eq!(answer.lock().unwrap().tokens, greedy(&mut open(&vault, &options), &model.prompt(5, 2), 900));
}
