//! What the machine says of its memory where no file tells: macOS. Compile-checked; not run in CI on Linux.

/// Memory of the whole machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineMemory {
    /// Installed, in bytes.
    pub physical: u64,
    /// What could be claimed without compressing or swapping anything, in bytes: what is free, pages of files,
    /// and what programs have marked as expendable.
    pub available: u64,
    /// Whether the system asks programs to give memory back.
    pub pressed: bool,
}

/// Asks the system; allocates nothing. None where it cannot be asked, or does not answer.
#[must_use]
pub fn machine_memory() -> Option<MachineMemory> {
    platform::memory()
}

#[cfg(target_os = "macos")]
mod platform {
    use std::ffi::CStr;
    use std::mem::MaybeUninit;
    use std::ptr;
    use std::sync::OnceLock;

    use super::MachineMemory;

    /// `kern.memorystatus_vm_pressure_level` from which on memory is short; 1 is normal.
    const WARNING: u64 = 2;

    pub(super) fn memory() -> Option<MachineMemory> {
        let statistics = statistics()?;
        // SAFETY: set before the program starts and never changed.
        let page = unsafe { libc::vm_page_size } as u64;
        // Speculative pages count as free and as pages of files.
        let free = u64::from(statistics.free_count.saturating_sub(statistics.speculative_count));
        let files = u64::from(statistics.external_page_count);
        let expendable = u64::from(statistics.purgeable_count);
        Some(MachineMemory {
            physical: number(c"hw.memsize")?,
            available: (free + files + expendable) * page,
            pressed: number(c"kern.memorystatus_vm_pressure_level").is_some_and(|level| level >= WARNING),
        })
    }

    fn statistics() -> Option<libc::vm_statistics64> {
        // Asked for once: each call hands out another reference to the port.
        static HOST: OnceLock<libc::mach_port_t> = OnceLock::new();
        #[allow(deprecated, reason = "one call does not earn another dependency")]
        // SAFETY: takes nothing and only hands out a port.
        let host = *HOST.get_or_init(|| unsafe { libc::mach_host_self() });
        let mut statistics = MaybeUninit::<libc::vm_statistics64>::zeroed();
        let mut count = libc::HOST_VM_INFO64_COUNT;
        // SAFETY: a place of `count` integers for the answer, which may be shorter on older systems.
        let status = unsafe {
            libc::host_statistics64(
                host,
                libc::HOST_VM_INFO64,
                statistics.as_mut_ptr().cast(),
                &raw mut count,
            )
        };
        // SAFETY: zeroed above, and all-zero is a valid value of this struct of integers.
        (status == libc::KERN_SUCCESS).then(|| unsafe { statistics.assume_init() })
    }

    /// A number of the system's, of four or eight bytes.
    fn number(name: &CStr) -> Option<u64> {
        let mut value = 0u64;
        let mut len = size_of::<u64>();
        // SAFETY: a name that ends in zero, and a place of `len` bytes for the answer; nothing is set. A number
        // of four bytes fills the lower half: every Mac is little-endian.
        let status = unsafe {
            libc::sysctlbyname(name.as_ptr(), (&raw mut value).cast(), &raw mut len, ptr::null_mut(), 0)
        };
        (status == 0).then_some(value)
    }
}

#[cfg(not(target_os = "macos"))]
mod platform {
    pub(super) const fn memory() -> Option<super::MachineMemory> {
        None
    }
}
