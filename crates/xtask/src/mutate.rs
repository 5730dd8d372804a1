//! `cargo xtask mutate`: damaged and hostile vaults, and GGUF files, against everything that reads them.
//!
//! ```text
//! base vault ──► edits (, checksums mended) ──► verify, Vault::open, side files, Engine::open, 3 tokens
//! GGUF files ──► other values, shapes, types, names; edits; parts missing ──► sculpt ──► a whole vault, or none
//! ```
//!
//! A mutated vault must end in a typed error, or be called damaged, or give the same bits; one whose checksums
//! were mended may be another model, but must not panic, hang or claim absurd memory either. The cases run in a
//! process of their own under a limit of address space, so that aborts and hangs are findings too. A case
//! depends on seed and number alone: `--seed S --case N` repeats it.

mod corpus;
mod edit;
mod gguf;
mod trial;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::Result;

/// `cargo xtask mutate`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How long
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
    /// Seed of the mutations [default: the clock's]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Only this case
    #[arg(long, value_name = "N", requires = "seed")]
    case: Option<u64>,
    /// The process that tries the cases, from this one on
    #[arg(long, hide = true)]
    worker_from: Option<u64>,
}

/// A case that takes longer hangs: they take some milliseconds.
const HANG: Duration = Duration::from_secs(20);
/// Address space of the worker in KiB: sixteen times the memory plan of a case.
const ADDRESS_SPACE_KIB: u64 = 4 << 20;
/// Enough to see a pattern.
const MAX_FINDINGS: usize = 10;

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros() as u64;
    let seed = args.seed.unwrap_or(clock);
    if let Some(first) = args.worker_from {
        return trial::work(seed, first, args.case, Duration::from_secs(args.seconds));
    }
    println!("seed {seed}");
    let mut tally = Tally { seed, ..Tally::default() };
    let start = Instant::now();
    let mut next = args.case.unwrap_or(0);
    loop {
        let left = Duration::from_secs(args.seconds).saturating_sub(start.elapsed());
        let ended = tally.supervise(&mut Worker::start(seed, next, args.case, left)?)?;
        next = tally.last + 1;
        let enough = start.elapsed() >= Duration::from_secs(args.seconds);
        if ended || enough || args.case.is_some() || tally.findings >= MAX_FINDINGS {
            break;
        }
    }
    for (outcome, count) in &tally.outcomes {
        println!("{count:>8}  {outcome}");
    }
    println!("{:>8}  cases in {:.0} s", tally.outcomes.values().sum::<u64>(), start.elapsed().as_secs_f64());
    match tally.findings {
        0 => Ok(()),
        n => Err(format!("{n} findings with seed {seed}").into()),
    }
}

/// What the worker tells, one line each.
mod tell {
    /// A case begins: number and mutation.
    pub const CASE: &str = "case ";
    /// How it ended.
    pub const OUTCOME: &str = "outcome ";
    /// It ended as none should.
    pub const FINDING: &str = "finding ";
    /// The time is over.
    pub const END: &str = "end";
}

struct Worker {
    process: Child,
    lines: Receiver<String>,
}

impl Worker {
    fn start(seed: u64, first: u64, only: Option<u64>, time: Duration) -> Result<Self> {
        // Where a shell cannot limit address space (macOS), the worker runs without.
        let script = format!("ulimit -v {ADDRESS_SPACE_KIB} 2>/dev/null; exec \"$0\" \"$@\"");
        let mut command = Command::new("sh");
        command.arg("-c").arg(script).arg(std::env::current_exe()?).arg("mutate");
        let numbers = [("--seed", Some(seed)), ("--worker-from", Some(first)), ("--case", only)];
        for (flag, number) in numbers.into_iter().chain([("--seconds", Some(time.as_secs()))]) {
            if let Some(number) = number {
                command.arg(flag).arg(number.to_string());
            }
        }
        let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let stdout = process.stdout.take().ok_or("the worker has no output")?;
        Ok(Self { process, lines: read_lines(stdout) })
    }
}

fn read_lines(stdout: ChildStdout) -> Receiver<String> {
    let (send, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(std::io::Result::ok) {
            if send.send(line).is_err() {
                break;
            }
        }
    });
    lines
}

/// What came of all cases.
#[derive(Default)]
struct Tally {
    seed: u64,
    /// The case begun last.
    last: u64,
    mutation: String,
    /// It has not ended yet.
    pending: bool,
    outcomes: BTreeMap<String, u64>,
    findings: usize,
}

impl Tally {
    /// Follows a worker to its end; false if it did not end by itself.
    fn supervise(&mut self, worker: &mut Worker) -> Result<bool> {
        loop {
            match worker.lines.recv_timeout(HANG) {
                Ok(line) if line == tell::END => {
                    worker.process.wait()?;
                    return Ok(true);
                }
                Ok(line) => self.hear(&line),
                Err(RecvTimeoutError::Timeout) => {
                    worker.process.kill()?;
                    worker.process.wait()?;
                    self.own_fault("does not answer")?;
                    self.find(&format!("hangs: nothing within {} s", HANG.as_secs()));
                    return Ok(false);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let status = worker.process.wait()?;
                    self.own_fault("died")?;
                    self.find(&format!("the process died: {status}"));
                    return Ok(false);
                }
            }
        }
    }

    /// An error if no case is on: then the mutation tool itself failed.
    fn own_fault(&self, what: &str) -> Result<()> {
        if self.pending {
            return Ok(());
        }
        Err(format!("the worker {what} after case {} of seed {}", self.last, self.seed).into())
    }

    fn hear(&mut self, line: &str) {
        if let Some((number, mutation)) = line.strip_prefix(tell::CASE).and_then(|c| c.split_once(' ')) {
            self.last = number.parse().unwrap_or(self.last);
            mutation.clone_into(&mut self.mutation);
            self.pending = true;
        } else if let Some(outcome) = line.strip_prefix(tell::OUTCOME) {
            *self.outcomes.entry(outcome.to_owned()).or_default() += 1;
            self.pending = false;
        } else if let Some(what) = line.strip_prefix(tell::FINDING) {
            self.find(what);
        }
    }

    fn find(&mut self, what: &str) {
        self.findings += 1;
        self.pending = false;
        *self.outcomes.entry("FINDING".to_owned()).or_default() += 1;
        println!("FINDING: {what}");
        println!("    mutation: {}", self.mutation);
        println!("    again:    cargo xtask mutate --seed {} --case {}", self.seed, self.last);
    }
}
