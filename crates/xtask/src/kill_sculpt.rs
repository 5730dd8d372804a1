//! `cargo xtask kill-sculpt`: a sculpt that is killed again and again ends with the bytes of one that was not.
//!
//! The real binary, real SIGKILLs. The moments are drawn over the length of an undisturbed run, the first ones
//! early in it, the last ones late, so that kills meet reading, encoding, checking and renaming.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use smoe_format::ModelSpec;
use smoe_format::spec::{FfnKind, MoeSpec};
use smoe_testkit::random::Random;
use smoe_testkit::tiny::CheckpointOptions;
use smoe_testkit::{TinyModel, shared_path};

use crate::{Result, workspace};

/// `cargo xtask kill-sculpt`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Kills
    #[arg(long, value_name = "N", default_value_t = 10)]
    times: usize,
    /// Seed of the moments [default: the clock's]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Entropy-code the experts, whose records' places are known only once they are made
    #[arg(long)]
    entropy: bool,
    /// The smoe binary [default: built from this source, beside this one]
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
}

/// Killed runs take longer in all than an undisturbed one: each starts anew and loses what was not yet durable.
/// The last moments should meet the check and the renaming.
const STRETCH: f64 = 1.3;

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
    let seed = args.seed.unwrap_or(clock);
    let scratch = tempfile::tempdir()?;
    let sculpt = Sculpt {
        binary: binary(args.binary.as_deref())?,
        checkpoint: checkpoint(scratch.path())?,
        vault: scratch.path().join("killed"),
        entropy: args.entropy,
    };

    let reference = scratch.path().join("undisturbed");
    let start = Instant::now();
    finished(sculpt.start(&reference)?)?;
    let whole = start.elapsed();
    let expected = contents(&reference)?;
    let bytes: usize = expected.values().map(Vec::len).sum();
    println!("undisturbed: {} files, {bytes} bytes in {:.2} s", expected.len(), whole.as_secs_f64());

    println!("seed {seed}");
    let mut random = Random::new(seed);
    let mut kills = 0;
    while kills < args.times {
        // One moment in each equal part of the time. Work that a kill left goes on in the next run, so only the
        // time between two moments is waited for.
        let left = args.times - kills;
        let moments = (0..left).map(|part| (part as f64 + random.unit()) / left as f64 * STRETCH);
        let moments: Vec<f64> = moments.collect();
        let mut last = 0.0;
        for moment in moments {
            let delay = whole.mul_f64(moment - last);
            last = moment;
            if !sculpt.kill_after(delay, bytes, &mut kills)? {
                fs::remove_dir_all(&sculpt.vault)?;
                break;
            }
        }
    }
    finished(sculpt.start(&sculpt.vault)?)?;

    let found = contents(&sculpt.vault)?;
    let left: Vec<_> = fs::read_dir(scratch.path())?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with('.'))
        .collect();
    if !left.is_empty() {
        return Err(format!("left behind: {}", left.join(", ")).into());
    }
    if let Some(difference) = difference(&expected, &found) {
        return Err(format!("after {kills} kills {difference}").into());
    }
    println!("after {kills} kills and a last run: {} files identical, {bytes} bytes", found.len());
    Ok(())
}

struct Sculpt {
    binary: PathBuf,
    checkpoint: PathBuf,
    vault: PathBuf,
    entropy: bool,
}

impl Sculpt {
    /// One thread: slow enough to be hit.
    fn start(&self, vault: &Path) -> Result<Child> {
        let mut command = Command::new(&self.binary);
        command.arg("sculpt").arg(&self.checkpoint).arg(vault).args(["--threads", "1"]);
        if self.entropy {
            command.arg("--entropy");
        }
        Ok(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?)
    }

    /// Starts or resumes, kills after `delay` and says what was there; false if it had finished before.
    fn kill_after(&self, delay: Duration, bytes: usize, kills: &mut usize) -> Result<bool> {
        let mut child = self.start(&self.vault)?;
        std::thread::sleep(delay);
        if child.try_wait()?.is_some() {
            finished(child)?;
            println!("      finished within {:.0} ms; starting anew", delay.as_secs_f64() * 1e3);
            return Ok(false);
        }
        child.kill()?;
        child.wait()?;
        *kills += 1;
        println!("{kills:>4}  {:>6.0} ms  {}", delay.as_secs_f64() * 1e3, self.state(bytes));
        if self.vault.exists() {
            // Killed between the last rename and the exit: complete.
            fs::remove_dir_all(&self.vault)?;
        }
        Ok(true)
    }

    /// What a kill left.
    fn state(&self, bytes: usize) -> String {
        if self.vault.exists() {
            return "the vault had its name already".to_owned();
        }
        let partial = self.vault.with_file_name(".killed.partial");
        let Ok(entries) = fs::read_dir(&partial) else { return "nothing written yet".to_owned() };
        let journal = fs::read(partial.join("journal"));
        let written: u64 =
            entries.flatten().filter_map(|entry| Some(entry.metadata().ok()?.blocks() * 512)).sum();
        let share = 100.0 * written as f64 / bytes as f64;
        match journal {
            Err(_) => format!("no journal, {written} bytes on disk ({share:.0} %)"),
            Ok(journal) => {
                let pieces = journal.iter().filter(|&&byte| byte == b'\n').count().saturating_sub(1);
                let len = journal.len();
                format!(
                    "journal of {len} bytes lists {pieces} pieces, {written} bytes on disk ({share:.0} %)"
                )
            }
        }
    }
}

/// The binary to kill. Built each time, so that it is never an older one; that costs nothing if it is fresh.
fn binary(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        return Ok(path.canonicalize()?);
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["build", "--release", "--package", "smoe-cli"];
    let status = Command::new(cargo).current_dir(workspace::root()).args(arguments).status()?;
    if !status.success() {
        return Err("smoe does not build".into());
    }
    Ok(std::env::current_exe()?.with_file_name("smoe"))
}

/// A checkpoint of some 100 MB.
fn checkpoint(scratch: &Path) -> Result<PathBuf> {
    if let Some(path) = shared_path("demo-model") {
        return Ok(path);
    }
    let tiny = TinyModel::qwen3(1).spec;
    let spec = ModelSpec {
        d_model: 256,
        layers: vec![FfnKind::Moe; 12],
        moe: MoeSpec { n_experts: 32, top_k: 4, d_expert: 192, ..tiny.moe },
        ..tiny
    };
    let path = scratch.join("checkpoint");
    fs::create_dir(&path)?;
    TinyModel::new(spec, 1).write_checkpoint(&path, CheckpointOptions::default());
    Ok(path)
}

fn finished(child: Child) -> Result<()> {
    let output = child.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("smoe sculpt: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr)).into())
}

/// Every file of a directory.
fn contents(directory: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        files.insert(entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path())?);
    }
    Ok(files)
}

fn difference(expected: &BTreeMap<String, Vec<u8>>, found: &BTreeMap<String, Vec<u8>>) -> Option<String> {
    if !expected.keys().eq(found.keys()) {
        return Some(format!("the files are {:?}, not {:?}", found.keys(), expected.keys()));
    }
    expected.iter().find_map(|(name, bytes)| {
        let other = &found[name];
        let at = bytes.iter().zip(other).position(|(a, b)| a != b);
        match at {
            Some(at) => Some(format!("{name} differs from byte {at} on")),
            None if bytes.len() != other.len() => {
                Some(format!("{name} has {} bytes, not {}", other.len(), bytes.len()))
            }
            None => None,
        }
    })
}
