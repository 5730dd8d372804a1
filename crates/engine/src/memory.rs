//! How much memory this process may use: physical, cgroup limit, and what is free right now.
//!
//! Sources on Linux: `/proc/meminfo`; cgroup v2 `memory.max` and v1 `memory.limit_in_bytes` of the own
//! group and every ancestor. A limit that cannot be read is taken as absent. macOS is asked itself.

use std::fs;
use std::path::{Path, PathBuf};

use smoe_store::{MachineMemory, machine_memory};

/// What the machine says of its memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryFacts {
    /// Installed memory.
    pub physical: u64,
    /// The lowest cgroup limit above this process, if any.
    pub cgroup_limit: Option<u64>,
    /// What could be claimed now without swapping (`MemAvailable`, or its like), if known.
    pub available: Option<u64>,
}

/// Share of the limit that is never exceeded; the rest belongs to the system: EXP-MEMORY-02.
const SHARE: (u64, u64) = (7, 8);
/// Left free of what is available now, at least: page tables, thread stacks, other programs' small growth.
const MARGIN: u64 = 256 << 20;
/// And at least this part of the limit: three times what the governor keeps free, so that a ring that has just been
/// filled is not emptied at once.
const MARGIN_SHARE: u64 = 3;

impl MemoryFacts {
    /// Reads them.
    #[must_use]
    pub fn detect() -> Self {
        Self::under(Path::new("/"))
    }

    /// Reads them below another root directory: what tests do.
    fn under(root: &Path) -> Self {
        let meminfo = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
        let machine = machine(root);
        let physical =
            meminfo_field(&meminfo, "MemTotal:").or(machine.map(|m| m.physical)).unwrap_or(8 << 30);
        Self {
            physical,
            cgroup_limit: cgroup_limit(root).filter(|limit| *limit < physical),
            available: meminfo_field(&meminfo, "MemAvailable:").or(machine.map(|m| m.available)),
        }
    }

    /// The hard limit: the lower of physical memory and cgroup.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.cgroup_limit.map_or(self.physical, |limit| limit.min(self.physical))
    }

    /// What this process should plan with when the user names no size.
    #[must_use]
    pub fn budget(&self) -> u64 {
        let share = self.limit() / SHARE.1 * SHARE.0;
        match self.available {
            Some(available) => {
                let margin = MARGIN.max(MARGIN_SHARE * (self.limit() / crate::governor::RESERVE));
                share.min(available.saturating_sub(margin))
            }
            None => share,
        }
    }
}

pub(crate) fn meminfo_field(meminfo: &str, name: &str) -> Option<u64> {
    let rest = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// What the system itself says; nothing below a directory that stands for another.
pub(crate) fn machine(root: &Path) -> Option<MachineMemory> {
    if root == Path::new("/") { machine_memory() } else { None }
}

/// The lowest limit of the own cgroup and its ancestors, in either version.
fn cgroup_limit(root: &Path) -> Option<u64> {
    cgroups(root).into_iter().filter_map(|group| group.limit).min()
}

/// A memory cgroup that this process is in.
#[derive(Debug)]
pub(crate) struct Cgroup {
    /// Where its files are.
    pub(crate) directory: PathBuf,
    /// The file that says how much is used.
    pub(crate) usage_file: &'static str,
    /// The most that may be used, if there is a limit.
    pub(crate) limit: Option<u64>,
}

/// The own cgroup and its ancestors, in either version.
pub(crate) fn cgroups(root: &Path) -> Vec<Cgroup> {
    let own = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut groups = Vec::new();
    for line in own.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (mount, limit_file, usage_file) = if controllers.is_empty() {
            ("sys/fs/cgroup", "memory.max", "memory.current")
        } else if controllers.split(',').any(|c| c == "memory") {
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        } else {
            continue;
        };
        let mount = root.join(mount);
        let mut directory: PathBuf = mount.join(path.trim_start_matches('/'));
        loop {
            // `max` (version 2) and a number near 2^63 (version 1) both mean no limit.
            let text = fs::read_to_string(directory.join(limit_file)).unwrap_or_default();
            let limit = text.trim().parse::<u64>().ok().filter(|limit| *limit < 1 << 60);
            groups.push(Cgroup { directory: directory.clone(), usage_file, limit });
            if directory == mount || !directory.pop() {
                break;
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> MemoryFacts {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        MemoryFacts::under(dir.path())
    }

    const MEMINFO: &str = "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n";

    #[test]
    fn without_a_cgroup_the_machine_is_the_limit() {
        let facts = machine(&[("proc/meminfo", MEMINFO), ("proc/self/cgroup", "0::/user\n")]);
        assert_eq!(facts.limit(), 16 << 30);
        assert_eq!(facts.budget(), (8 << 30) - 3 * (16 << 30) / 64);
    }

    #[test]
    fn the_lowest_limit_of_all_ancestors_counts_in_version_2() {
        let facts = machine(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/memory.max", "2147483648\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
        ]);
        assert_eq!(facts.cgroup_limit, Some(2 << 30));
        assert_eq!(facts.budget(), (2 << 30) / 8 * 7);
    }

    #[test]
    fn version_1_limits_count_and_its_no_limit_does_not() {
        let facts = machine(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "5:cpu:/x\n4:memory:/x\n"),
            ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "1073741824\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        assert_eq!(facts.cgroup_limit, Some(1 << 30));
    }
}
