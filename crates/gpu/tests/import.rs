//! Host memory that the device reads where it lies.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests fail loudly")]

mod common;

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock, Weak};

use smoe_gpu::{Access, Gpu, GpuError, Op, Segments, Shader, Slice};

const PAGE: u64 = 16 << 10;

/// Zeroed pages. Shared with the device, so written through a pointer only.
struct Pages {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: owned memory; who writes to it through the pointer takes care of the order.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    fn new(len: u64) -> Arc<Self> {
        let layout = Layout::from_size_align(len as usize, PAGE as usize).unwrap();
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        Arc::new(Self { start, layout })
    }

    fn write(&self, word: u64, value: u32) {
        assert!(word * 4 < self.layout.size() as u64);
        // SAFETY: in the allocation and aligned; no step is running.
        unsafe { self.start.cast::<u32>().add(word as usize).write(value) }
    }

    /// Imports everything.
    fn lend(self: &Arc<Self>, gpu: &Gpu) -> Result<Slice, GpuError> {
        // SAFETY: initialised pages that live as long as the `Arc`; `write` is called between steps only.
        unsafe { gpu.import("pages", self.start, self.layout.size() as u64, self.clone()) }
    }

    fn lend_segments(self: &Arc<Self>, gpu: &Gpu, record: u64, together: u64) -> Result<Segments, GpuError> {
        gpu.lend("records", self.clone(), record, together)
    }
}

impl AsRef<[UnsafeCell<u8>]> for Pages {
    fn as_ref(&self) -> &[UnsafeCell<u8>] {
        // SAFETY: the allocation, initialised; bytes are written through the pointer only.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.layout.size()) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: made with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// Copies the words at `p.first + 0, 1, ..` times `p.stride` of what it reads, plus one.
struct Gather {
    op: Op,
    out: Slice,
}

const GATHER: &str = "
struct Params { first: u32, stride: u32 }
var<immediate> p: Params;
@group(0) @binding(0) var<storage, read> words: array<u32>;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) i: u32) {
    out[i] = words[p.first + i * p.stride] + 1u;
}
";

impl Gather {
    fn new(gpu: &Gpu, from: &Slice) -> Self {
        let bindings = [Access::Read, Access::Write];
        let kernel =
            gpu.kernel(&Shader { name: "gather", source: GATHER.into(), bindings: &bindings }).unwrap();
        let out = gpu.buffer("gathered", 64 * 4).unwrap();
        Self { op: gpu.bind(&kernel, &[from, &out]).unwrap(), out }
    }

    fn run(&self, gpu: &Gpu, first: u32, stride: u32) -> Vec<u32> {
        let mut step = gpu.step();
        step.run(&self.op, &[first, stride], [1, 1, 1]);
        gpu.wait(&step.submit()).unwrap();
        let bytes = gpu.download(&self.out).unwrap();
        bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
    }
}

/// A device that imports, or None, said aloud.
fn importing() -> Option<&'static Gpu> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    let gpu = GPU.get_or_init(common::gpu).as_ref()?;
    match gpu.can_import() {
        Ok(align) => {
            assert!(align.is_power_of_two() && PAGE.is_multiple_of(align), "{align}");
            Some(gpu)
        }
        Err(why) => {
            eprintln!("SKIPPED: {}: {why}", gpu.facts());
            None
        }
    }
}

#[test]
fn what_the_host_writes_after_the_import_is_seen_by_the_next_step() {
    let Some(gpu) = importing() else { return };
    let pages = Pages::new(4 * PAGE);
    pages.write(0, 7);
    let lent = pages.lend(gpu).unwrap();
    assert_eq!(lent.len(), 4 * PAGE);
    let gather = Gather::new(gpu, &lent);
    let stride = (4 * PAGE / 4 / 64) as u32;
    let mut expected = vec![1; 64];
    expected[0] = 8;
    assert_eq!(gather.run(gpu, 0, stride), expected);
    for round in 1..20u32 {
        for i in 0..64 {
            pages.write(u64::from(i * stride), round * 1000 + i);
        }
        let expected: Vec<u32> = (0..64).map(|i| round * 1000 + i + 1).collect();
        assert_eq!(gather.run(gpu, 0, stride), expected, "round {round}");
    }
    // Parts bind, and steps copy from it.
    let part = lent.part(PAGE, PAGE);
    assert_eq!(Gather::new(gpu, &part).run(gpu, 0, stride)[..2], [19 * 1000 + 17, 19 * 1000 + 18]);
    assert_eq!(gpu.download(&part).unwrap()[..4], (19 * 1000 + 16u32).to_le_bytes());
}

#[test]
fn one_part_is_written_while_a_step_reads_another() {
    let Some(gpu) = importing() else { return };
    let pages = Pages::new(64 * PAGE);
    let lent = pages.lend(gpu).unwrap();
    let halves = [lent.part(0, 32 * PAGE), lent.part(32 * PAGE, 32 * PAGE)];
    let gathers = halves.map(|half| Gather::new(gpu, &half));
    let words = u64::from(32 * PAGE as u32 / 4);
    for round in 0..32u32 {
        let (read, write) = ((round % 2) as usize, u64::from((round + 1) % 2));
        let mut step = gpu.step();
        step.run(&gathers[read].op, &[0, 1], [1, 1, 1]);
        let submitted = step.submit();
        for i in 0..64 {
            pages.write(write * words + i, (round + 1) * 100 + i as u32);
        }
        gpu.wait(&submitted).unwrap();
        let bytes = gpu.download(&gathers[read].out).unwrap();
        let got = bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word));
        let expected = (0..64).map(|i| if round == 0 { 1 } else { round * 100 + i + 1 });
        assert!(got.eq(expected), "round {round}");
    }
}

#[test]
fn memory_is_kept_while_anything_may_read_it_and_no_longer() {
    let Some(gpu) = importing() else { return };
    let pages = Pages::new(PAGE);
    pages.write(5, 41);
    let alive: Weak<Pages> = Arc::downgrade(&pages);
    let lent = pages.lend(gpu).unwrap();
    drop(pages);
    let gather = Gather::new(gpu, &lent);
    drop(lent);
    assert!(alive.upgrade().is_some(), "a launcher is left");
    let mut step = gpu.step();
    step.run(&gather.op, &[0, 1], [1, 1, 1]);
    let Gather { op, out } = gather;
    drop(op);
    assert!(alive.upgrade().is_some(), "a step is recorded");
    let submitted = step.submit();
    gpu.wait(&submitted).unwrap();
    assert_eq!(gpu.download(&out).unwrap()[20..24], 42u32.to_le_bytes());
    assert!(alive.upgrade().is_none(), "nothing is left");
}

#[test]
fn a_slice_may_outlive_its_device() {
    let Some(gpu) = importing() else { return };
    let pages = Pages::new(PAGE);
    let alive = Arc::downgrade(&pages);
    let lent = pages.lend(gpu).unwrap();
    drop((pages, gpu));
    assert!(alive.upgrade().is_some());
    drop(lent);
    assert!(alive.upgrade().is_none());
}

#[test]
fn the_same_pages_can_be_lent_again() {
    let Some(gpu) = importing() else { return };
    let pages = Pages::new(2 * PAGE);
    for round in 0..50 {
        pages.write(3, round);
        let lent = pages.lend(gpu).unwrap();
        assert_eq!(Gather::new(gpu, &lent).run(gpu, 0, 1)[3], round + 1);
    }
    // Twice at once, too: the ring and a file's view of it.
    let both = [pages.lend(gpu).unwrap(), pages.lend(gpu).unwrap()];
    pages.write(3, 99);
    for lent in &both {
        assert_eq!(Gather::new(gpu, lent).run(gpu, 0, 1)[3], 100);
    }
}

#[test]
fn a_step_is_done_when_it_has_been_waited_for_and_stays_so() {
    let Some(gpu) = importing() else { return };
    let pages = Pages::new(PAGE);
    let gather = Gather::new(gpu, &pages.lend(gpu).unwrap());
    let mut last = None;
    for _ in 0..20 {
        let mut step = gpu.step();
        step.run(&gather.op, &[0, 1], [1, 1, 1]);
        let submitted = step.submit();
        // It may be, or not.
        gpu.is_done(&submitted).unwrap();
        gpu.wait(&submitted).unwrap();
        assert!(gpu.is_done(&submitted).unwrap() && last.is_none_or(|last| gpu.is_done(&last).unwrap()));
        last = Some(submitted);
    }
}

#[test]
fn records_that_belong_together_are_of_one_segment() {
    let Some(gpu) = importing() else { return };
    let pages = Pages::new(12 * PAGE);
    pages.write(7 * PAGE / 4, 41);
    let segments = pages.lend_segments(gpu, PAGE, 3).unwrap();
    assert_eq!(segments.slices().len(), 1);
    let run = segments.run(6, 3).unwrap();
    assert_eq!(run.len(), 3 * PAGE);
    assert_eq!(Gather::new(gpu, &run).run(gpu, (PAGE / 4) as u32, 1)[0], 42);
    assert!(segments.run(6, 7).is_none() && segments.run(12, 1).is_none() && segments.run(3, 0).is_none());
}

#[test]
fn what_is_not_whole_pages_is_refused() {
    let Some(gpu) = importing() else { return };
    let align = gpu.can_import().unwrap();
    if align == 1 {
        eprintln!("SKIPPED: {} takes any address", gpu.facts());
        return;
    }
    let pages = Pages::new(4 * PAGE);
    let lend = |offset: u64, len: u64| {
        // SAFETY: within the pages, which live as long as the `Arc`; nothing is written.
        unsafe { gpu.import("pages", pages.start.add(offset as usize), len, pages.clone()) }
    };
    for (offset, len) in [(align / 2, align), (4, align), (0, align - 1), (0, 3 * align / 2), (0, 0)] {
        let error = lend(offset, len).unwrap_err();
        assert!(matches!(&error, GpuError::Import { what, .. } if what == "pages"), "{error:?}");
    }
    assert_eq!(Arc::strong_count(&pages), 1, "what is refused is not kept");
    assert!(lend(align, align).is_ok());
    gpu.check().unwrap();
}

#[test]
fn a_region_longer_than_a_binding_comes_in_segments() {
    let Some(gpu) = importing() else { return };
    let most = gpu.facts().max_binding.min(gpu.facts().max_buffer);
    if most > 256 << 20 {
        // Too much memory for a test; `cut` has tests of its own.
        eprintln!("SKIPPED: {} binds {most} bytes", gpu.facts());
        return;
    }
    // Two records fit a binding, so five need three segments. Untouched pages cost nothing.
    let record = (most / 2).next_multiple_of(PAGE) - PAGE;
    let pages = Pages::new(5 * record);
    for i in 0..5 {
        pages.write(i * record / 4, 10 + i as u32);
        pages.write((i + 1) * record / 4 - 1, 20 + i as u32);
    }
    let segments = pages.lend_segments(gpu, record, 1).unwrap();
    assert_eq!(segments.slices().iter().map(Slice::len).collect::<Vec<_>>(), [2, 2, 1].map(|n| n * record));
    for i in 0..5 {
        assert_eq!(segments.locate(i), ((i / 2) as usize, i % 2));
        let slice = segments.record(i);
        assert_eq!(slice.len(), record);
        let gather = Gather::new(gpu, &slice);
        assert_eq!(gather.run(gpu, 0, 1)[0], 11 + i as u32);
        assert_eq!(gather.run(gpu, (record / 4 - 64) as u32, 1)[63], 21 + i as u32);
    }
    let error = pages.lend_segments(gpu, 5 * record, 1).unwrap_err();
    assert!(matches!(error, GpuError::Binding { .. }), "{error:?}");
}
