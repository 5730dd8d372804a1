//! Vaults of checkpoints that arrive, whatever goes wrong on the way.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use common::{Fault, Hub, REPO, Request, TOKEN, files, write_checkpoint};
use smoe_hub::{HubError, Options, Patience, Pull, Watch};
use smoe_sculpt::{Levels, Outcome, SculptError, Settings, dry_run_of, sculpt, sculpt_of, small_files};
use tempfile::TempDir;

/// A checkpoint, the files of the vault that is made of it where it lies, and room.
struct Case {
    dir: TempDir,
    checkpoint: PathBuf,
    expected: BTreeMap<String, Vec<u8>>,
    settings: Settings,
}

impl Case {
    fn new(layers: usize, shards: usize) -> Self {
        Self::with(layers, shards, settings())
    }

    fn with(layers: usize, shards: usize, settings: Settings) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (checkpoint, vault) = (dir.path().join("checkpoint"), dir.path().join("expected"));
        write_checkpoint(&checkpoint, layers, 4, shards);
        sculpt(&checkpoint, &vault, &settings, &(), &AtomicBool::new(false)).unwrap();
        Self { checkpoint, expected: files(&vault), dir, settings }
    }

    fn hub(&self, script: impl FnMut(&Request) -> Option<Fault> + Send + 'static) -> Hub {
        Hub::new(&self.checkpoint, script)
    }

    fn vault(&self) -> PathBuf {
        self.dir.path().join("vault")
    }

    fn arrivals(&self) -> PathBuf {
        self.dir.path().join(".vault.download")
    }

    fn pull(&self, hub: &Hub) -> Result<Outcome, Failed> {
        self.pull_until(hub, Arc::new(()), stop())
    }

    fn pull_until(
        &self,
        hub: &Hub,
        watch: Arc<dyn Watch>,
        stop: &'static AtomicBool,
    ) -> Result<Outcome, Failed> {
        pull_with(&self.arrivals(), &self.vault(), &hub.endpoint, watch, stop, &self.settings)
    }

    fn assert_done(&self) {
        let found = files(&self.vault());
        assert!(found.keys().eq(self.expected.keys()), "{:?}", found.keys());
        for (name, bytes) in &found {
            assert!(*bytes == self.expected[name], "{name} differs");
        }
        assert!(!self.arrivals().exists());
    }

    /// Bytes of the weight files.
    fn weights(&self) -> u64 {
        let shards = files(&self.checkpoint).into_iter().filter(|(name, _)| name.ends_with(".safetensors"));
        shards.map(|(_, bytes)| bytes.len() as u64).sum()
    }
}

fn settings() -> Settings {
    Settings { threads: Some(2), levels: Levels::Uniform, ..Settings::default() }
}

fn stop() -> &'static AtomicBool {
    Box::leak(Box::new(AtomicBool::new(false)))
}

fn options(endpoint: &str) -> Options {
    let (first, longest) = (Duration::from_millis(1), Duration::from_millis(5));
    Options {
        endpoint: endpoint.to_owned(),
        token: Some(TOKEN.to_owned()),
        patience: Patience { tries: 4, first, longest },
        ..Options::default()
    }
}

#[derive(Debug)]
enum Failed {
    Hub(HubError),
    Sculpt(SculptError),
}

impl Failed {
    /// With all its causes.
    fn text(&self) -> String {
        let mut error: Option<&dyn std::error::Error> = Some(match self {
            Self::Hub(error) => error,
            Self::Sculpt(error) => error,
        });
        let mut text = String::new();
        while let Some(e) = error {
            text += &format!("{e}; ");
            error = e.source();
        }
        text
    }
}

fn pull(
    arrivals: &Path,
    vault: &Path,
    endpoint: &str,
    watch: Arc<dyn Watch>,
    stop: &'static AtomicBool,
) -> Result<Outcome, Failed> {
    pull_with(arrivals, vault, endpoint, watch, stop, &settings())
}

fn pull_with(
    arrivals: &Path,
    vault: &Path,
    endpoint: &str,
    watch: Arc<dyn Watch>,
    stop: &'static AtomicBool,
    settings: &Settings,
) -> Result<Outcome, Failed> {
    let pull = Pull::open(arrivals, REPO, &options(endpoint), watch, stop).map_err(Failed::Hub)?;
    pull.small(&small_files().collect::<Vec<_>>()).map_err(Failed::Hub)?;
    let outcome = sculpt_of(arrivals, &pull, vault, settings, &(), stop).map_err(Failed::Sculpt)?;
    pull.finish().map_err(Failed::Hub)?;
    Ok(outcome)
}

/// What a download tells; stops it once so many bytes have come.
struct Eye {
    received: AtomicU64,
    /// What was there was told.
    begun: AtomicBool,
    most: AtomicU64,
    notes: Mutex<Vec<String>>,
    stop: Option<(&'static AtomicBool, u64)>,
}

impl Eye {
    fn new(stop: Option<(&'static AtomicBool, u64)>) -> Arc<Self> {
        let (received, most) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { received, begun: AtomicBool::new(false), most, notes: Mutex::default(), stop })
    }
}

impl Watch for Eye {
    fn expected(&self, _: u64) {}

    fn received(&self, bytes: u64) {
        if !self.begun.swap(true, Ordering::Relaxed) && self.stop.is_some() {
            return;
        }
        let received = self.received.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if let Some((stop, after)) = self.stop
            && received >= after
        {
            stop.store(true, Ordering::Relaxed);
        }
    }

    fn held(&self, bytes: u64) {
        self.most.fetch_max(bytes, Ordering::Relaxed);
    }

    fn note(&self, text: &str) {
        self.notes.lock().unwrap().push(text.to_owned());
    }
}

#[test]
fn the_vault_is_that_of_the_downloaded_checkpoint_and_the_disk_never_holds_all_of_it() {
    let case = Case::new(10, 10);
    let hub = case.hub(|_| None);
    let eye = Eye::new(None);
    let outcome = pull(&case.arrivals(), &case.vault(), &hub.endpoint, eye.clone(), stop()).unwrap();
    assert_eq!(outcome, Outcome::Created);
    case.assert_done();
    let total = case.weights();
    assert_eq!(eye.received.load(Ordering::Relaxed), total);

    // The bound that a dry run tells, and beside it the headers of all files and the small files.
    let dry = {
        let pull = Pull::open(&case.arrivals(), REPO, &options(&hub.endpoint), Arc::new(()), stop()).unwrap();
        pull.small(&small_files().collect::<Vec<_>>()).unwrap();
        dry_run_of(&case.arrivals(), &pull, None, &settings(), stop()).unwrap()
    };
    let (most, bound) = (eye.most.load(Ordering::Relaxed), dry.arriving_bytes);
    assert!(bound < 4 * total / 10, "{bound} of {total}");
    assert!(most <= bound + 10 * (512 << 10) + (1 << 20) && most > bound / 2, "{most} {bound}");
    assert!(most < total, "{most} of {total}");

    // The token went to the hub in every request, and nowhere else.
    let seen = hub.seen();
    assert!(seen.iter().any(|request| request.elsewhere));
    for request in seen {
        let expected = (!request.elsewhere).then(|| format!("Bearer {TOKEN}"));
        assert_eq!(request.token, expected, "{request:?}");
    }

    let again = case.pull(&hub).unwrap();
    assert_eq!(again, Outcome::AlreadyComplete);
    case.assert_done();
}

/// Levels, widths and steps are decided by weights that were asked for one by one.
#[test]
fn what_weights_decide_is_decided_before_they_come() {
    let fitted = Settings { levels: Levels::Fitted, ..settings() };
    let entropy = Settings { entropy: true, group: 128, ..settings() };
    for settings in [
        fitted.clone(),
        Settings { bits: 2, ..fitted.clone() },
        Settings { bpw: Some("3.6".parse().unwrap()), ..fitted },
        entropy.clone(),
        Settings { coded_bpw: Some(250), keep_experts: false, ..entropy },
    ] {
        let case = Case::with(3, 3, settings);
        let hub = case.hub(|_| None);
        let eye = Eye::new(None);
        assert_eq!(case.pull_until(&hub, eye.clone(), stop()).unwrap(), Outcome::Created);
        case.assert_done();
        assert_eq!(eye.received.load(Ordering::Relaxed), case.weights(), "{:?}", case.settings);
        assert_eq!(case.pull(&hub).unwrap(), Outcome::AlreadyComplete);
    }
}

/// Work that was begun with levels or a step from samples that were wrong is not gone on with.
#[test]
fn wrong_samples_leave_nothing_in_the_vault() {
    let fitted = Settings { levels: Levels::Fitted, ..settings() };
    let coded =
        Settings { entropy: true, coded_bpw: Some(250), keep_experts: false, group: 128, ..settings() };
    for settings in [fitted, coded] {
        let case = Case::with(2, 2, settings);
        // Samples in the head of the second file, which is a part of it by then, and samples that are asked for.
        for of_head in [true, false] {
            let second = case.checkpoint.join("model-00002-of-00002.safetensors");
            let total = std::fs::metadata(second).unwrap().len();
            let mut heads = 0;
            let hub = case.hub(move |request| {
                let (start, end) = request.range.filter(|_| request.elsewhere)?;
                if !request.path.contains("00002-of") {
                    return None;
                }
                heads += usize::from(start == 0);
                // Those of a fingerprint are shorter.
                let rows = start > 0 && end - start > 32 << 10 && end < total;
                let wrong = if of_head { start == 0 } else { rows };
                (wrong && heads == 1).then_some(Fault::Other)
            });
            let error = case.pull(&hub).unwrap_err().text();
            assert!(error.contains("is not in the whole file; run again"), "{error}");
            let partial = std::fs::read(case.dir.path().join(".vault.partial/journal")).unwrap();
            let experts = String::from_utf8(partial).unwrap().matches("expert 0 ").count();
            assert!(experts > 0, "some were coded");
            assert_eq!(case.pull(&case.hub(|_| None)).unwrap(), Outcome::Created);
            case.assert_done();
            std::fs::remove_dir_all(case.vault()).unwrap();
        }
    }
}

/// Records of different lengths lie in their order, whatever that of the files.
#[test]
fn entropy_coded_records_of_late_files_are_waited_for() {
    let coded =
        Settings { entropy: true, coded_bpw: Some(250), keep_experts: false, group: 128, ..settings() };
    let case = Case::with(4, 4, coded);
    // The first layer in the last file.
    let name = |n: usize| format!("model-{n:05}-of-00004.safetensors");
    let at = |name: &str| case.checkpoint.join(name);
    for (from, to) in [(name(1), "aside".to_owned()), (name(4), name(1)), ("aside".to_owned(), name(4))] {
        std::fs::rename(at(&from), at(&to)).unwrap();
    }
    let index = std::fs::read_to_string(at("model.safetensors.index.json")).unwrap();
    let index = index.replace(&name(1), "aside").replace(&name(4), &name(1)).replace("aside", &name(4));
    std::fs::write(at("model.safetensors.index.json"), index).unwrap();
    let expected = case.dir.path().join("turned");
    sculpt(&case.checkpoint, &expected, &case.settings, &(), &AtomicBool::new(false)).unwrap();
    let case = Case { expected: files(&expected), ..case };

    let hub = case.hub(|_| None);
    let total = case.weights();
    let mut runs = 0;
    loop {
        runs += 1;
        let stop = stop();
        match case.pull_until(&hub, Eye::new(Some((stop, total / 3))), stop) {
            Ok(outcome) => {
                assert_eq!(outcome, Outcome::Created);
                break;
            }
            Err(Failed::Sculpt(SculptError::Cancelled { .. })) => {}
            other => panic!("{other:?}"),
        }
        assert!(!case.vault().exists() && runs < 20);
    }
    case.assert_done();
    assert!(runs > 1);
}

#[test]
fn what_may_pass_is_waited_for_and_no_byte_is_asked_for_twice() {
    let case = Case::new(3, 2);
    let mut count = BTreeMap::<String, usize>::new();
    let hub = case.hub(move |request| {
        let n = count.entry(request.path.clone()).or_default();
        *n += 1;
        if !request.elsewhere {
            return match n {
                1 => Some(Fault::Status(503, vec![("x-error-message", "asleep".to_owned())])),
                2 => Some(Fault::Status(429, vec![("retry-after", "0".to_owned())])),
                _ => None,
            };
        }
        match (request.weights(), n) {
            // A signed address that is too old.
            (_, 2) => Some(Fault::Status(403, Vec::new())),
            (Some((_, start, end)), _) if end - start > 100_000 => {
                Some(Fault::Cut((end - start) as usize / 3))
            }
            _ => None,
        }
    });
    let eye = Eye::new(None);
    pull(&case.arrivals(), &case.vault(), &hub.endpoint, eye.clone(), stop()).unwrap();
    case.assert_done();
    let notes = eye.notes.lock().unwrap().join("\n");
    assert!(notes.contains("answers 503 (it says: asleep); again in"), "{notes}");
    assert!(notes.contains("too many requests"), "{notes}");
    // Each request for weights goes on where the one before was cut.
    let mut next = BTreeMap::<String, u64>::new();
    for request in hub.seen().iter().filter(|request| request.elsewhere) {
        let Some((name, start, _)) = request.weights() else { continue };
        let reached = next.entry(name.to_owned()).or_default();
        assert!(start >= *reached, "{request:?} again, {reached} was reached");
        *reached = start;
    }
}

#[test]
fn a_file_with_another_hash_is_received_once_more_and_never_used() {
    let case = Case::new(2, 2);
    // All but headers.
    let whole = |request: &Request| {
        let weights = request.weights().filter(|_| request.elsewhere);
        weights.is_some_and(|(_, _, end)| end != 512 << 10)
    };
    // One that is damaged once.
    let mut damaged = false;
    let hub = case.hub(move |request| {
        let now = whole(request) && !std::mem::replace(&mut damaged, true);
        now.then_some(Fault::Damage)
    });
    let eye = Eye::new(None);
    pull(&case.arrivals(), &case.vault(), &hub.endpoint, eye.clone(), stop()).unwrap();
    case.assert_done();
    assert!(eye.notes.lock().unwrap().iter().any(|note| note.contains("does not have its hash")));

    // And one that always is.
    std::fs::remove_dir_all(case.vault()).unwrap();
    let hub = case.hub(move |request| whole(request).then_some(Fault::Damage));
    let error = case.pull(&hub).unwrap_err().text();
    assert!(error.contains("does not have the hash"), "{error}");
    assert!(!case.vault().exists());
    // Once the hub is well, the same call ends well.
    case.pull(&case.hub(|_| None)).unwrap();
    case.assert_done();
}

#[test]
fn answers_that_make_no_sense_are_named() {
    let case = Case::new(1, 1);
    let refused = |script: fn(&Request) -> Option<Fault>, needle: &str| {
        let hub = case.hub(script);
        let error = case.pull(&hub).unwrap_err().text();
        assert!(error.contains(needle), "{error}");
        assert!(!case.vault().exists());
        hub.seen().len()
    };
    fn api(r: &Request, status: u16) -> Option<Fault> {
        let said = vec![("x-error-message", "no".to_owned())];
        r.path.starts_with("/api/").then_some(Fault::Status(status, said))
    }
    fn leads(r: &Request, location: String) -> Option<Fault> {
        r.elsewhere.then(|| Fault::Status(302, vec![("location", location)]))
    }
    // What would fail again is not tried again.
    assert_eq!(refused(|r| api(r, 401), "the token in HF_TOKEN is not accepted"), 1);
    assert_eq!(refused(|r| api(r, 403), "accept its terms at"), 1);
    assert_eq!(refused(|r| api(r, 404), "has no owner/Tiny-MoE of revision main (it says: no)"), 1);
    assert_eq!(refused(|r| api(r, 400), "answers 400 (it says: no)"), 1);
    assert_eq!(refused(|r| api(r, 429), "too many requests"), 3);
    assert_eq!(refused(|r| api(r, 502), "answers 502"), 3);
    refused(|r| r.elsewhere.then_some(Fault::Whole), "sends no parts of files");
    refused(|r| r.elsewhere.then_some(Fault::Shifted), "it answers the bytes");
    refused(|r| r.elsewhere.then(|| Fault::Status(416, Vec::new())), "answers 416");
    refused(|r| leads(r, format!("{}?more", r.path)), "without end");
    refused(|r| leads(r, "file:///etc/passwd".to_owned()), "that is no address");

    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let endpoint = format!("http://{closed}");
    let offline = pull(&case.arrivals(), &case.vault(), &endpoint, Arc::new(()), stop()).unwrap_err().text();
    assert!(offline.contains("127.0.0.1 cannot be reached"), "{offline}");
    for wrong in ["", "name", "a/b/c", "../x", "a/..", "a b/c", "a/b?c"] {
        let opened = Pull::open(&case.arrivals(), wrong, &options(&endpoint), Arc::new(()), stop());
        assert!(matches!(opened, Err(HubError::Name { .. })), "{wrong}");
    }
}

#[test]
fn stopped_anywhere_it_goes_on_from_the_last_byte() {
    let case = Case::new(4, 4);
    let hub = case.hub(|_| None);
    let total = case.weights();
    let (mut runs, mut served) = (0, 0);
    loop {
        runs += 1;
        let stop = stop();
        let eye = Eye::new(Some((stop, total / 5)));
        let done = pull(&case.arrivals(), &case.vault(), &hub.endpoint, eye, stop);
        let weights = hub.seen();
        let ranges = weights.iter().filter(|request| request.elsewhere).filter_map(Request::weights);
        served += ranges.filter(|(_, start, _)| *start == 0).count();
        match done {
            Ok(outcome) => {
                assert_eq!(outcome, Outcome::Created);
                break;
            }
            Err(Failed::Sculpt(SculptError::Cancelled { done, total, .. })) => assert!(done <= total),
            other => panic!("{other:?}"),
        }
        assert!(!case.vault().exists() && runs < 40);
    }
    case.assert_done();
    assert!(runs > 3, "{runs}");
    // Each file was begun once.
    assert_eq!(served, 4);
}

#[test]
fn a_killed_process_loses_nothing() {
    let case = Case::new(4, 4);
    // After some bytes of a file nothing comes any more, and the process is killed.
    let (sender, stalled) = mpsc::channel();
    let mut cuts = vec![700_000, 300_000, 1_000_000];
    let hub = case.hub(move |request| {
        let (_, start, end) = request.weights().filter(|_| request.elsewhere)?;
        if start == 0 || end - start < 400_000 {
            return None;
        }
        let cut = cuts.pop()?;
        sender.send(()).unwrap();
        Some(Fault::Stall(cut))
    });
    for _ in 0..3 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_pulls_on_request"])
            .env("CHILD_FROM", &hub.endpoint)
            .env("CHILD_TO", case.vault())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        stalled.recv_timeout(Duration::from_secs(60)).unwrap();
        let parts = || -> u64 {
            let files = std::fs::read_dir(case.arrivals()).unwrap().map(Result::unwrap);
            files.map(|file| file.metadata().map_or(0, |meta| meta.len())).sum()
        };
        // Some of it is on the disk by now, or soon.
        let before = parts();
        for _ in 0..1000 {
            if parts() > before {
                break;
            }
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!case.vault().exists());
    }
    // The lock went with the process.
    assert_eq!(case.pull(&hub).unwrap(), Outcome::Created);
    case.assert_done();
    let seen = hub.seen();
    let begun = seen.iter().filter(|request| request.elsewhere).filter_map(Request::weights);
    assert_eq!(begun.filter(|(_, start, _)| *start == 0).count(), 4, "each header was asked for once");
}

/// Not a test: what [`a_killed_process_loses_nothing`] kills.
#[test]
fn child_pulls_on_request() {
    let (Some(from), Some(to)) = (std::env::var_os("CHILD_FROM"), std::env::var_os("CHILD_TO")) else {
        return;
    };
    let vault = PathBuf::from(to);
    let arrivals = vault.with_file_name(".vault.download");
    let _ = pull(&arrivals, &vault, from.to_str().unwrap(), Arc::new(()), stop());
}

#[test]
fn one_process_at_a_time_and_one_checkpoint() {
    let case = Case::new(1, 1);
    let hub = case.hub(|_| None);
    let open = |repo: &str, options: Options| {
        Pull::open(&case.arrivals(), repo, &options, Arc::new(()), stop()).map(|pull| pull.commit().len())
    };
    let first = Pull::open(&case.arrivals(), REPO, &options(&hub.endpoint), Arc::new(()), stop()).unwrap();
    assert!(matches!(open(REPO, options(&hub.endpoint)), Err(HubError::Busy { .. })));
    drop(first);
    assert_eq!(open(REPO, options(&hub.endpoint)).unwrap(), 40);
    let revision = Options { revision: "v2".to_owned(), ..options(&hub.endpoint) };
    assert!(matches!(open(REPO, revision.clone()), Err(HubError::Other { .. })));
    // Afresh, it is the hub that has no such revision.
    let force = Options { force: true, ..revision };
    assert!(matches!(open(REPO, force), Err(HubError::Absent { .. })));
    case.pull(&hub).unwrap();
    case.assert_done();
}
