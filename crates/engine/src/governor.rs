//! The elastic ring: smaller while memory is short, and back when there is room again.
//!
//! A plan is made once, a machine's memory is shared for hours. Three signs are watched: what could be claimed
//! without swapping (`MemAvailable`), what is left below the lowest cgroup limit, and how long tasks stood
//! still for want of memory (PSI). Overshooting costs a factor (EXP-MEMORY-02), a smaller ring some percent.
//! macOS tells the first, and instead of the last whether it asks programs to give memory back.
//!
//! A ring that is lent to a device has its pages pinned: a device that copies from it is told to do without, and the
//! processor copies from then on (`Backend::give_ring_back`); one whose kernels read it in place cannot, and its ring
//! keeps its size whatever the signs say.
//!
//! Looking costs a few reads of `/proc` into buffers on the stack, some times a second: nothing is allocated.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::memory;

/// Time between two looks.
const PERIOD: Duration = Duration::from_millis(250);
/// Of all memory, and of a cgroup's limit, so much is left free: 1/64. The ring shrinks below that.
pub(crate) const RESERVE: u64 = 64;
/// The ring grows while this many reserves are free.
const ROOMY: u64 = 4;
/// How long there must have been room before it grows.
const PATIENCE: Duration = Duration::from_secs(5);
/// The ring changes by this part of its planned size at a time, or by what is missing if that is more.
const STEP: usize = 16;
/// Percent of the last ten seconds in which every task stood still for memory, from which on memory is short.
const STALLED: f64 = 5.0;

/// What the signs say, in bytes and percent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Signs {
    /// What may still be claimed: the least of what the machine and the cgroups say.
    free: u64,
    /// What is to stay free.
    reserve: u64,
    /// PSI `full avg10`.
    stalled: f64,
}

/// Watches memory and says how many slots the ring may have.
#[derive(Debug)]
pub(crate) struct Governor {
    sources: Sources,
    slot_bytes: u64,
    planned: usize,
    floor: usize,
    looked: Instant,
    roomy_since: Option<Instant>,
}

impl Governor {
    pub(crate) fn new(slot_bytes: u64, planned: usize, floor: usize) -> Self {
        Self {
            sources: Sources::under(Path::new("/")),
            slot_bytes: slot_bytes.max(1),
            planned,
            floor,
            looked: Instant::now(),
            roomy_since: None,
        }
    }

    /// The slots that the ring should have from now on, if that differs from `slots`, what it may have now.
    pub(crate) fn advise(&mut self, slots: usize) -> Option<usize> {
        let now = Instant::now();
        if now.saturating_duration_since(self.looked) < PERIOD {
            return None;
        }
        self.looked = now;
        let signs = self.sources.read()?;
        self.decide(signs, slots, now)
    }

    fn decide(&mut self, signs: Signs, slots: usize, now: Instant) -> Option<usize> {
        let Signs { free, reserve, stalled } = signs;
        let step = (self.planned / STEP).max(1);
        if free < reserve || (stalled > STALLED && free < ROOMY * reserve) {
            self.roomy_since = None;
            let missing = (2 * reserve).saturating_sub(free).div_ceil(self.slot_bytes) as usize;
            let fewer = slots.saturating_sub(missing.max(step)).max(self.floor);
            return (fewer < slots).then_some(fewer);
        }
        if free < ROOMY * reserve {
            self.roomy_since = None;
            return None;
        }
        let since = *self.roomy_since.get_or_insert(now);
        if slots >= self.planned || now.saturating_duration_since(since) < PATIENCE {
            return None;
        }
        // Growing must not lead to where it shrinks.
        let room = ((free - ROOMY * reserve) / self.slot_bytes) as usize;
        let more = (slots + step.min(room)).min(self.planned);
        (more > slots).then_some(more)
    }
}

/// The files that tell, kept open.
#[derive(Debug)]
struct Sources {
    /// `/`, but for tests.
    root: PathBuf,
    meminfo: Option<File>,
    pressure: Option<File>,
    /// Limit, and what is used of it, of each cgroup that has one.
    groups: Vec<(u64, File, File)>,
}

impl Sources {
    fn under(root: &Path) -> Self {
        let open = |path: PathBuf| File::open(path).ok();
        let groups = memory::cgroups(root)
            .into_iter()
            .filter_map(|group| {
                let usage = open(group.directory.join(group.usage_file))?;
                let stat = open(group.directory.join("memory.stat"))?;
                Some((group.limit?, usage, stat))
            })
            .collect();
        Self {
            root: root.to_owned(),
            meminfo: open(root.join("proc/meminfo")),
            pressure: open(root.join("proc/pressure/memory")),
            groups,
        }
    }

    /// None if nothing tells.
    fn read(&self) -> Option<Signs> {
        let mut buffer = [0; 8192];
        let signs =
            |free: u64, limit: u64, stalled| Signs { free, reserve: (limit / RESERVE).max(1), stalled };
        let stalled = self.pressure.as_ref().and_then(|file| {
            let text = read(file, &mut buffer)?;
            let full = text.lines().find_map(|line| line.strip_prefix("full "))?;
            full.split(' ').find_map(|field| field.strip_prefix("avg10="))?.parse().ok()
        });
        let machine = self.meminfo.as_ref().and_then(|file| {
            let text = read(file, &mut buffer)?;
            let field = |name| memory::meminfo_field(text, name);
            // The pressure is the machine's: it says nothing where a cgroup is tighter.
            Some(signs(field("MemAvailable:")?, field("MemTotal:")?, stalled.unwrap_or(0.0)))
        });
        let mut tightest = machine.or_else(|| {
            let machine = memory::machine(&self.root)?;
            Some(signs(machine.available, machine.physical, if machine.pressed { 100.0 } else { 0.0 }))
        });
        for (limit, usage, stat) in &self.groups {
            let Some(used) = read(usage, &mut buffer).and_then(|text| text.trim().parse::<u64>().ok()) else {
                continue;
            };
            // Pages of files that nobody uses now go before anything is refused. Version 1 counts those of groups
            // below apart, version 2 does not.
            let cached = read(stat, &mut buffer).and_then(|text| {
                let field = |name| text.lines().find_map(|line| line.strip_prefix(name));
                let line = field("total_inactive_file ").or_else(|| field("inactive_file "))?;
                line.trim().parse::<u64>().ok()
            });
            let group = signs(limit.saturating_sub(used.saturating_sub(cached.unwrap_or(0))), *limit, 0.0);
            tightest = Some(tightest.filter(|signs| signs.slack() <= group.slack()).unwrap_or(group));
        }
        tightest
    }
}

impl Signs {
    /// How many reserves are free.
    fn slack(&self) -> f64 {
        self.free as f64 / self.reserve as f64
    }
}

/// The start of a file, from its beginning.
fn read<'a>(file: &File, buffer: &'a mut [u8]) -> Option<&'a str> {
    let n = std::os::unix::fs::FileExt::read_at(file, buffer, 0).ok()?;
    let whole = &buffer[..n];
    // A file that is longer than the buffer may be cut inside a character.
    let valid = std::str::from_utf8(whole).map_or_else(|e| e.valid_up_to(), str::len);
    std::str::from_utf8(&whole[..valid]).ok()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const MB: u64 = 1 << 20;

    fn governor() -> Governor {
        Governor::new(MB, 160, 8)
    }

    fn signs(free: u64, stalled: f64) -> Signs {
        Signs { free: free * MB, reserve: 100 * MB, stalled }
    }

    #[test]
    fn it_shrinks_by_what_is_missing_and_never_below_the_floor() {
        let (mut governor, now) = (governor(), Instant::now());
        assert_eq!(governor.decide(signs(99, 0.0), 160, now), Some(59));
        assert_eq!(governor.decide(signs(0, 0.0), 160, now), Some(8));
        assert_eq!(governor.decide(signs(0, 0.0), 8, now), None);
        // Stalls count only where room is not plenty.
        assert_eq!(governor.decide(signs(300, 9.0), 160, now), Some(150));
        assert_eq!(governor.decide(signs(500, 9.0), 160, now), None);
        assert_eq!(governor.decide(signs(200, 0.0), 160, now), None);
    }

    #[test]
    fn it_grows_with_patience_and_not_beyond_the_plan() {
        let (mut governor, start) = (governor(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(governor.decide(signs(1000, 0.0), 100, at(0)), None);
        assert_eq!(governor.decide(signs(1000, 0.0), 100, at(6)), Some(110));
        assert_eq!(governor.decide(signs(1000, 0.0), 155, at(7)), Some(160));
        assert_eq!(governor.decide(signs(1000, 0.0), 160, at(8)), None);
        assert_eq!(governor.decide(signs(403, 0.0), 100, at(8)), Some(103), "to where it is roomy still");
        // A squeeze in between, and patience begins anew.
        assert_eq!(governor.decide(signs(300, 0.0), 110, at(9)), None);
        assert_eq!(governor.decide(signs(1000, 0.0), 110, at(10)), None);
        assert_eq!(governor.decide(signs(1000, 0.0), 110, at(15)), Some(120));
    }

    #[test]
    fn a_squeeze_and_its_end_settle_without_swinging() {
        // The ring itself is the only user: what it gives up becomes free.
        let (mut governor, mut slots, others) = (governor(), 160, 6200u64);
        let mut seen = Vec::new();
        for second in 0..60 {
            let now = Instant::now() + Duration::from_secs(second);
            let squeeze = if (10..30).contains(&second) { 160 } else { 0 };
            let free = (6600 - others - squeeze).saturating_sub(slots as u64);
            if let Some(new) = governor.decide(signs(free, 0.0), slots, now) {
                slots = new;
                seen.push((second, new));
            }
        }
        // It shrinks once, at the squeeze, and what is free afterwards is not roomy enough to grow.
        assert_eq!(seen.len(), 1, "{seen:?}");
        assert_eq!(seen[0].0, 10);
    }

    #[test]
    fn the_tightest_source_counts() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let read = || Sources::under(dir.path()).read();
        assert_eq!(read(), None);
        write("proc/meminfo", "MemTotal: 65536 kB\nMemFree: 1 kB\nMemAvailable: 32768 kB\n");
        assert_eq!(read(), Some(Signs { free: 32 * MB, reserve: MB, stalled: 0.0 }));
        write("proc/self/cgroup", "0::/a/b\n");
        write("sys/fs/cgroup/a/memory.max", "33554432\n");
        write("sys/fs/cgroup/a/memory.current", "31457280\n");
        write("sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 1048576\nactive_file 9\n");
        write("proc/pressure/memory", "some avg10=8.00 avg60=0\nfull avg10=6.50 avg60=0.00 total=1\n");
        assert_eq!(read(), Some(Signs { free: 3 * MB, reserve: MB / 2, stalled: 0.0 }));
        write("proc/meminfo", "MemTotal: 65536 kB\nMemAvailable: 2048 kB\n");
        assert_eq!(read(), Some(Signs { free: 2 * MB, reserve: MB, stalled: 6.5 }));
    }
}
