//! Device memory: arenas of buffers that bindings can address, and slices of them.

use std::num::NonZeroU64;
use std::sync::{Mutex, PoisonError};

use wgpu::WriteOnly;

use crate::{Gpu, GpuError};

/// Calls a function with every number below the first argument, on as many threads as it likes, and returns when all
/// have returned.
pub type Fork<'a> = &'a dyn Fn(usize, &(dyn Fn(usize) + Sync));

/// Bytes that a thread copies at once on their way to the device.
const PIECE: usize = 256 << 10;

/// A range of a device buffer.
#[derive(Clone, Debug)]
pub struct Slice {
    pub(crate) buffer: wgpu::Buffer,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Slice {
    /// Bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// True if there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it is the same range of the same buffer.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.buffer == other.buffer && (self.offset, self.len) == (other.offset, other.len)
    }

    /// Where it begins, counted from the beginning of a slice of the same buffer that ends before it.
    pub(crate) fn after(&self, other: &Self) -> Option<u64> {
        let behind = self.buffer == other.buffer && other.offset + other.len <= self.offset;
        behind.then(|| self.offset - other.offset)
    }

    /// From its beginning to the end of a slice of the same buffer behind it.
    pub(crate) fn to_end_of(&self, other: &Self) -> Self {
        Self { len: other.offset + other.len - self.offset, ..self.clone() }
    }

    /// `len` bytes from `offset` on. As a binding, `offset` must be aligned as [`Gpu::alignment`] says.
    ///
    /// # Panics
    /// If they are not of this slice.
    #[must_use]
    pub fn part(&self, offset: u64, len: u64) -> Self {
        assert!(offset <= self.len && len <= self.len - offset, "{offset} + {len} of {}", self.len);
        Self { buffer: self.buffer.clone(), offset: self.offset + offset, len }
    }
}

/// Buffers that hold many slices: as few as the device's limits allow, claimed as they are needed.
#[derive(Debug)]
pub struct Arena {
    what: &'static str,
    segment: u64,
    current: Option<Slice>,
    used: u64,
}

impl Arena {
    /// For `what`, in segments of at most `segment` bytes.
    #[must_use]
    pub const fn new(what: &'static str, segment: u64) -> Self {
        Self { what, segment, current: None, used: 0 }
    }

    /// A slice of `len` bytes, alone in a buffer if it is longer than a segment.
    ///
    /// # Errors
    /// If the device has no room, or cannot bind as much.
    pub fn take(&mut self, gpu: &Gpu, len: u64) -> Result<Slice, GpuError> {
        let align = gpu.alignment();
        let start = self.used.next_multiple_of(align);
        if let Some(segment) = &self.current
            && start + len <= segment.len
        {
            self.used = start + len;
            return Ok(segment.part(start, len));
        }
        if len >= self.segment {
            return gpu.buffer(self.what, len);
        }
        let segment = gpu.buffer(self.what, self.segment.min(gpu.facts().max_binding))?;
        let slice = segment.part(0, len);
        (self.current, self.used) = (Some(segment), len);
        Ok(slice)
    }
}

impl Gpu {
    /// What the offset of a binding must be a multiple of.
    #[must_use]
    pub fn alignment(&self) -> u64 {
        u64::from(self.device.limits().min_storage_buffer_offset_alignment).max(256)
    }

    /// A zeroed buffer of `len` bytes, rounded up to whole words, in device memory.
    ///
    /// # Errors
    /// If there is no room, or the device cannot bind as much.
    pub fn buffer(&self, what: &str, len: u64) -> Result<Slice, GpuError> {
        let size = len.max(4).next_multiple_of(4);
        let most = self.facts().max_binding.min(self.facts().max_buffer);
        if size > most {
            let (device, what) = (self.facts().to_string(), what.to_owned());
            return Err(GpuError::Binding { device, what, bytes: size, most });
        }
        let usage = wgpu::BufferUsages::STORAGE
            | wgpu::BufferUsages::COPY_SRC
            | wgpu::BufferUsages::COPY_DST
            | wgpu::BufferUsages::INDIRECT;
        let buffer = self.allocate(what, size, usage)?;
        Ok(Slice { buffer, offset: 0, len: size })
    }

    /// Writes each slice's first bytes (whole words), before the next submitted step.
    ///
    /// # Panics
    /// If bytes do not fit their slice.
    pub fn write_all(&self, parts: &[(Slice, &[u8])], fork: Fork<'_>) {
        let mut staged = Vec::with_capacity(parts.len());
        for (slice, bytes) in parts {
            let to = slice.part(0, bytes.len() as u64);
            // Without room for it, the device says so when it is asked next.
            if let Some(len) = NonZeroU64::new(to.len)
                && let Some(view) = self.queue.write_buffer_with(&to.buffer, to.offset, len)
            {
                staged.push((view, *bytes));
            }
        }
        let mut pieces = Vec::new();
        for (view, bytes) in &mut staged {
            let (whole, mut rest) = view.slice(..).into_chunks::<PIECE>();
            let (sources, tail) = bytes.as_chunks::<PIECE>();
            rest.copy_from_slice(tail);
            pieces.extend(whole.into_iter().map(|piece| Mutex::new(Some(piece))).zip(sources));
        }
        fork(pieces.len(), &|i| {
            let (piece, source) = &pieces[i];
            if let Some(piece) = piece.lock().unwrap_or_else(PoisonError::into_inner).take() {
                WriteOnly::<[u8]>::from(piece).copy_from_slice(*source);
            }
        });
    }

    /// Writes `bytes` (whole words) at `offset` of `slice`, before the next submitted step.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn write(&self, slice: &Slice, offset: u64, bytes: &[u8]) {
        let to = slice.part(offset, bytes.len() as u64);
        self.queue.write_buffer(&to.buffer, to.offset, bytes);
    }
}
