//! Cancellations, failures, constraints: they concern those whose they are.

use super::*;

#[test]
fn cancelled_jobs_end_and_leave_what_they_computed() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = scheduler(&vault, &several(RingSize::Auto, 16, 2, 0));
    let prompt = model.prompt(100, 1);
    let (first, log) = job(&prompt, 50);
    let cancel = first.cancel.clone();
    scheduler.submit(first).unwrap();
    for _ in 0..4 {
        scheduler.step();
    }
    cancel.store(true, Ordering::Relaxed);
    run(&mut scheduler);
    assert_eq!(finish(&log), Ok(Finish::Stopped));
    let computed = log.lock().unwrap().prefills.last().unwrap().0;
    assert!((48..100).contains(&computed), "{computed}");
    let expected = greedy(&mut open(&vault, &options(RingSize::Auto, 16, 1)), &prompt, 5);
    assert_eq!(one(&mut scheduler, &prompt, 5), (expected, computed));
    // One that waits, and one whose sink will hear no more.
    let (waits, log) = job(&prompt, 5);
    let cancel = waits.cancel.clone();
    scheduler.submit(waits).unwrap();
    cancel.store(true, Ordering::Relaxed);
    let (mut deaf, _) = job(&prompt, 5);
    let heard = Arc::new(Mutex::new(0));
    let count = heard.clone();
    deaf.sink = Box::new(move |event: Event<'_>| {
        *count.lock().unwrap() += usize::from(matches!(event, Event::Token { .. }));
        ControlFlow::Break(())
    });
    scheduler.submit(deaf).unwrap();
    run(&mut scheduler);
    assert_eq!(finish(&log), Ok(Finish::Stopped));
    assert!(*heard.lock().unwrap() <= 1);
    assert_eq!(scheduler.load().kv_used, 0);
}

/// Says only even tokens, and fails after a few.
struct Even {
    mask: Vec<u32>,
    left: usize,
}

impl Constraint for Even {
    fn mask(&mut self) -> Result<&[u32], String> {
        if self.left == 0 { Err("nothing fits".to_owned()) } else { Ok(&self.mask) }
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        assert_eq!(token % 2, 0);
        self.left -= 1;
        Ok(())
    }
}

#[test]
fn a_constraint_is_kept_and_its_failure_is_the_jobs() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = scheduler(&vault, &several(RingSize::Auto, 16, 2, 0));
    let prompt = model.prompt(12, 1);
    let (mut constrained, log) = job(&prompt, 20);
    constrained.constraint =
        Some(Box::new(Even { mask: vec![0x5555_5555; vault.spec.vocab_size.div_ceil(32)], left: 6 }));
    let (free, other) = job(&prompt, 20);
    scheduler.submit(constrained).unwrap();
    scheduler.submit(free).unwrap();
    run(&mut scheduler);
    assert!(finish(&log).unwrap_err().contains("nothing fits"));
    let tokens = log.lock().unwrap().tokens.clone();
    assert!(tokens.len() == 6 && tokens.iter().all(|token| token % 2 == 0), "{tokens:?}");
    assert_eq!(finish(&other), Ok(Finish::Length));
    let expected = greedy(&mut open(&vault, &options(RingSize::Auto, 16, 1)), &prompt, 20);
    assert_eq!(other.lock().unwrap().tokens, expected);
}

#[test]
fn a_failed_read_fails_those_who_need_it() {
    let (_dir, vault, model) = tiny();
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| model.prompt(6, i)).collect();
    let mut alone = open(&vault, &options(RingSize::Auto, 16, 1));
    let expected: Vec<Vec<u32>> = prompts.iter().map(|prompt| greedy(&mut alone, prompt, 6)).collect();
    let mut failed = 0;
    for record in vault.experts.records.iter().step_by(3) {
        let disk = FaultyDisk::new(FileDisk::open(&vault.experts_path, OpenMode::Auto).unwrap());
        disk.on_offset(record.offset, Fault::Error(ErrorKind::Other));
        let ring = RingSize::Slots(vault.spec.moe.top_k * 2);
        let engine = Engine::open_on(&vault, disk.clone(), &several(ring, 8, 4, 0)).unwrap();
        let options = SchedulerOptions { at_once: Some(4), ..SchedulerOptions::default() };
        let mut scheduler = Scheduler::new(engine, options).unwrap();
        assert_eq!(scheduler.load().max_running, 4);
        let logs: Vec<Log> = prompts
            .iter()
            .map(|prompt| {
                let (job, log) = job(prompt, 6);
                scheduler.submit(job).unwrap();
                log
            })
            .collect();
        run(&mut scheduler);
        for (log, expected) in logs.iter().zip(&expected) {
            match finish(log) {
                Ok(finish) => assert_eq!((finish, &log.lock().unwrap().tokens), (Finish::Length, expected)),
                Err(error) => {
                    let names = format!("layer {} expert {}", record.key.layer, record.key.expert);
                    assert!(error.contains(&names), "{error}");
                    failed += 1;
                }
            }
        }
        disk.heal();
        assert_eq!(one(&mut scheduler, &prompts[0], 6).0, expected[0]);
    }
    assert!(failed > 0);
}

#[test]
fn a_cancelled_flag_that_is_set_during_a_long_prompt_is_seen_between_layers() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = scheduler(&vault, &several(RingSize::Auto, 128, 1, 0));
    let (mut long, _) = job(&model.prompt(120, 1), 5);
    let cancel = Arc::<AtomicBool>::default();
    long.cancel = cancel.clone();
    let ended = Arc::new(Mutex::new(None));
    let end = ended.clone();
    long.sink = Box::new(move |event: Event<'_>| {
        match event {
            Event::Prefill { done, .. } if done > 0 => cancel.store(true, Ordering::Relaxed),
            Event::End(e) => *end.lock().unwrap() = Some(e),
            _ => {}
        }
        ControlFlow::Continue(())
    });
    scheduler.submit(long).unwrap();
    run(&mut scheduler);
    let ended = ended.lock().unwrap().take().unwrap();
    assert_eq!((ended.result.unwrap(), ended.usage.completion), (Finish::Stopped, 0));
}

#[test]
fn what_an_early_end_took_is_told() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = scheduler(&vault, &several(RingSize::Auto, 16, 1, 0));
    let shared = model.prompt(64, 1);
    one(&mut scheduler, &shared, 1);
    let mut prompt = shared.clone();
    prompt.extend(model.prompt(60, 2));
    let (running, first) = job(&prompt, 50);
    let (waiting, second) = job(&prompt, 50);
    let cancels = [running.cancel.clone(), waiting.cancel.clone()];
    scheduler.submit(running).unwrap();
    scheduler.submit(waiting).unwrap();
    scheduler.step();
    scheduler.step();
    cancels.iter().for_each(|cancel| cancel.store(true, Ordering::Relaxed));
    run(&mut scheduler);
    let usage = |log: &Log| log.lock().unwrap().end.as_ref().unwrap().usage;
    let (of_first, of_second) = (usage(&first), usage(&second));
    assert_eq!((of_first.prompt, of_first.cached, of_first.completion), (124, 64, 0));
    assert!(of_first.prefill > Duration::ZERO && of_first.decode == Duration::ZERO);
    assert_eq!((of_second.prompt, of_second.cached, of_second.completion), (124, 0, 0));
    assert!(of_second.queued >= of_first.prefill && of_second.prefill == Duration::ZERO);
    // In the middle of an answer.
    let (job, log) = job(&prompt, 50);
    let cancel = job.cancel.clone();
    scheduler.submit(job).unwrap();
    steps_until(&mut scheduler, |_| told(&log) == 7);
    cancel.store(true, Ordering::Relaxed);
    run(&mut scheduler);
    let usage = usage(&log);
    assert!(
        usage.prompt == 124 && usage.cached >= 64 && usage.completion == 7 && usage.decode > Duration::ZERO
    );
}
