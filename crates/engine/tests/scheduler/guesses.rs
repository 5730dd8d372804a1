//! Guesses at what follows change nothing.

use super::*;

/// Repetition invites guesses; they never change what is said.
#[test]
fn guesses_change_nothing() {
    let (_dir, vault, model) = tiny();
    let period = model.prompt(5, 3);
    let prompt: Vec<u32> = period.iter().copied().cycle().take(60).collect();
    let run_with = |speculate| {
        let engine = open(&vault, &several(RingSize::Auto, 16, 1, 0));
        let options =
            SchedulerOptions { speculate, stall: Duration::from_secs(1), ..SchedulerOptions::default() };
        let mut scheduler = Scheduler::new(engine, options).unwrap();
        let mut answers = Vec::new();
        for seed in 0..4 {
            let (mut job, log) = job(&prompt, 80);
            job.sampling = Sampling { temperature: seed as f32 * 0.3, top_k: 4, seed, ..Sampling::default() };
            scheduler.submit(job).unwrap();
            run(&mut scheduler);
            assert_eq!(finish(&log), Ok(Finish::Length));
            answers.push(log.lock().unwrap().tokens.clone());
        }
        answers
    };
    assert_eq!(run_with(true), run_with(false));
}

/// A lone answer that guesses and runs into the end of the context, of every length of the prompt.
#[test]
fn guesses_at_the_end_of_the_context_change_nothing_and_end() {
    let (_dir, vault, model) = tiny();
    let period = model.prompt(4, 3);
    for (chunk, len) in [(16, 180), (16, 199), (2, 215), (1, 240), (3, 230)] {
        let prompt: Vec<u32> = period.iter().copied().cycle().take(len).collect();
        let answer = |speculate| {
            let engine = open(&vault, &several(RingSize::Auto, chunk, 1, 0));
            let options = SchedulerOptions { speculate, ..SchedulerOptions::default() };
            let mut scheduler = Scheduler::new(engine, options).unwrap();
            let (job, log) = job(&prompt, 1000);
            scheduler.submit(job).unwrap();
            // And one that waits: it must come to its turn.
            let (next, later) = self::job(&prompt[..20], 2);
            scheduler.submit(next).unwrap();
            run(&mut scheduler);
            assert_eq!((finish(&log), finish(&later)), (Ok(Finish::ContextFull), Ok(Finish::Length)));
            log.lock().unwrap().tokens.clone()
        };
        assert_eq!(answer(true), answer(false), "{len} tokens, chunk {chunk}");
    }
}

/// An answer that repeats itself: guesses are right, and counted.
#[test]
fn guesses_that_are_right_save_steps() {
    let (_dir, vault, model) = tiny();
    let prompt: Vec<u32> = model.prompt(5, 3).into_iter().cycle().take(60).collect();
    let run_with = |speculate| {
        let engine = open(&vault, &several(RingSize::Auto, 16, 1, 0));
        let options = SchedulerOptions { speculate, ..SchedulerOptions::default() };
        let mut scheduler = Scheduler::new(engine, options).unwrap();
        let (mut job, log) = job(&prompt, 120);
        // Only two tokens may be said: they soon repeat.
        job.constraint = Some(Box::new(Few(vec![0b11])));
        scheduler.submit(job).unwrap();
        let steps = steps_until(&mut scheduler, |_| told(&log) == 120);
        run(&mut scheduler);
        assert_eq!(finish(&log), Ok(Finish::Length));
        let tokens = log.lock().unwrap().tokens.clone();
        (tokens, steps, scheduler.load())
    };
    let (plain, plain_steps, load) = run_with(false);
    assert_eq!((load.guessed, load.accepted), (0, 0));
    let (tokens, steps, load) = run_with(true);
    assert_eq!(tokens, plain);
    assert!(load.accepted > 0 && load.accepted <= load.guessed, "{load:?}");
    assert_eq!(steps + load.accepted as usize, plain_steps, "each that was right saved a step");
}

/// Allows what its mask says.
struct Few(Vec<u32>);

impl Constraint for Few {
    fn mask(&mut self) -> Result<&[u32], String> {
        Ok(&self.0)
    }

    fn accept(&mut self, _token: u32) -> Result<(), String> {
        Ok(())
    }
}
