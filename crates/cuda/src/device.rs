//! A card: its memory, and the stream in whose order everything happens.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

use crate::CudaError;

/// The least compute capability: reductions of a warp in one instruction.
const NEEDED: (i32, i32) = (8, 0);

/// What a card is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// As the driver names it.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Bytes of its memory.
    pub memory: u64,
}

impl std::fmt::Display for Facts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (cuda, compute capability {}.{})", self.name, self.capability.0, self.capability.1)
    }
}

/// A card, opened.
#[derive(Debug)]
pub struct Cuda {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    facts: Facts,
}

/// Names an error by what was done.
pub(crate) fn failed(doing: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| CudaError::Driver { doing, what: error.to_string() }
}

impl Cuda {
    /// Opens the first card.
    ///
    /// # Errors
    /// If there is no driver, no compiler, no card, or it is too old.
    pub fn open() -> Result<Self, CudaError> {
        // SAFETY: looks for the library and calls nothing in it. Without it, every other call of the bindings panics.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        let context = match CudaContext::new(0) {
            Ok(context) => context,
            Err(DriverError(
                sys::CUresult::CUDA_ERROR_NO_DEVICE | sys::CUresult::CUDA_ERROR_INVALID_DEVICE,
            )) => return Err(CudaError::NoDevice),
            Err(error) => return Err(failed("opening a card")(error)),
        };
        let name = context.name().map_err(failed("naming the card"))?;
        let capability = context.compute_capability().map_err(failed("looking at the card"))?;
        let memory = context.total_mem().map_err(failed("looking at the card"))? as u64;
        if capability < NEEDED {
            return Err(CudaError::TooOld { name, capability });
        }
        // SAFETY: as above.
        if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
            return Err(CudaError::NoCompiler);
        }
        let stream = context.new_stream().map_err(failed("making a stream"))?;
        Ok(Self { context, stream, facts: Facts { name, capability, memory } })
    }

    /// What it is.
    #[must_use]
    pub const fn facts(&self) -> &Facts {
        &self.facts
    }

    pub(crate) const fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    pub(crate) const fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Makes the card that of this thread.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(failed("taking the card"))
    }

    /// Memory of zeros.
    ///
    /// # Errors
    /// If there is no room.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer, CudaError> {
        self.bind()?;
        // SAFETY: the address is used within `bytes` only, and freed once, by `Buffer`.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(|error| match error {
            DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                CudaError::OutOfMemory { name: self.facts.name.clone(), bytes }
            }
            error => failed("claiming memory")(error),
        })?;
        let buffer = Buffer { address, len: bytes, context: self.context.clone() };
        // SAFETY: within the buffer.
        unsafe { result::memset_d8_async(address, 0, bytes.max(1), self.stream.cu_stream()) }
            .map_err(failed("clearing memory"))?;
        Ok(buffer)
    }

    /// A buffer of these bytes.
    ///
    /// # Errors
    /// If there is no room.
    pub fn upload(&self, bytes: &[u8]) -> Result<Buffer, CudaError> {
        let buffer = self.buffer(bytes.len())?;
        self.write(&buffer, 0, bytes)?;
        Ok(buffer)
    }

    /// Writes, after all that the stream has; `bytes` may be reused at once.
    ///
    /// # Errors
    /// If the card fails.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn write(&self, buffer: &Buffer, at: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let to = buffer.at(at, bytes.len());
        self.bind()?;
        // SAFETY: within the buffer; from pageable memory the driver has taken the bytes when the call returns.
        unsafe { result::memcpy_htod_async(to, bytes, self.stream.cu_stream()) }
            .map_err(failed("writing memory"))
    }

    /// Reads, after all that the stream has.
    ///
    /// # Errors
    /// If the card fails, or what ran before did.
    ///
    /// # Panics
    /// If there are not so many bytes.
    pub fn read(&self, buffer: &Buffer, at: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        let from = buffer.at(at, bytes.len());
        self.bind()?;
        // SAFETY: within the buffer; waited for before `bytes` is given back.
        unsafe { result::memcpy_dtoh_async(bytes, from, self.stream.cu_stream()) }
            .map_err(failed("reading memory"))?;
        self.wait()
    }

    /// Reads into memory that the driver knows, after all that the stream has; what is there is right after [`Self::wait`].
    pub(crate) fn fetch(
        &self,
        buffer: &Buffer,
        out: &mut Pinned,
        at: usize,
        n: usize,
    ) -> Result<(), CudaError> {
        let from = buffer.at(0, 4 * n);
        let to = &mut out.floats_mut()[at..at + n];
        self.bind()?;
        // SAFETY: both parts are that long; `Pinned` is freed after a wait, and looked at after one.
        unsafe { result::memcpy_dtoh_async(to, from, self.stream.cu_stream()) }
            .map_err(failed("reading memory"))
    }

    /// Memory of the host that the card writes at the bus's speed: zeros.
    pub(crate) fn pinned(&self, floats: usize) -> Result<Pinned, CudaError> {
        self.bind()?;
        let bytes = 4 * floats.max(1);
        // SAFETY: `bytes` of memory, aligned to pages, of this process until it is freed, by `Pinned`; cleared below.
        let memory =
            unsafe { result::malloc_host(bytes, 0) }.map_err(failed("claiming the host's memory"))?;
        // SAFETY: as above.
        unsafe { memory.cast::<u8>().write_bytes(0, bytes) };
        Ok(Pinned { memory: memory.cast(), len: floats, stream: self.stream.clone() })
    }

    /// Copies within the card, after all that the stream has.
    ///
    /// # Errors
    /// If the card fails.
    ///
    /// # Panics
    /// If either part is not there.
    pub fn copy(&self, buffer: &Buffer, from: usize, to: usize, len: usize) -> Result<(), CudaError> {
        let (from, to) = (buffer.at(from, len), buffer.at(to, len));
        self.bind()?;
        // SAFETY: both within the buffer.
        unsafe { result::memcpy_dtod_async(to, from, len, self.stream.cu_stream()) }
            .map_err(failed("copying memory"))
    }

    /// Waits for all that the stream has.
    ///
    /// # Errors
    /// If something of it failed.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.stream.synchronize().map_err(failed("waiting"))
    }
}

/// Memory of a card.
#[derive(Debug)]
pub struct Buffer {
    address: sys::CUdeviceptr,
    len: usize,
    context: Arc<CudaContext>,
}

impl Buffer {
    /// Bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of `len` bytes from `at` on.
    pub(crate) fn at(&self, at: usize, len: usize) -> sys::CUdeviceptr {
        assert!(
            at.checked_add(len).is_some_and(|end| end <= self.len),
            "{len} bytes at {at} of {}",
            self.len
        );
        self.address + at as sys::CUdeviceptr
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // A context that is lost has freed it.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: claimed by `malloc_sync`, freed once; the call waits for the kernels that use it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Floats in memory of the host that the driver knows.
#[derive(Debug)]
pub(crate) struct Pinned {
    memory: *mut f32,
    len: usize,
    stream: Arc<CudaStream>,
}

// SAFETY: it is memory, owned alone.
unsafe impl Send for Pinned {}

impl Pinned {
    pub(crate) const fn floats(&self) -> &[f32] {
        // SAFETY: so many floats are there, written when it was made; the card writes them only between `fetch` and a wait,
        // and who calls `fetch` waits before it lets anyone look.
        unsafe { std::slice::from_raw_parts(self.memory, self.len) }
    }

    pub(crate) const fn floats_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.memory, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // What still writes to it is over, or the context is.
        let _ = self.stream.synchronize();
        // SAFETY: claimed by `malloc_host`, freed once.
        let _ = unsafe { result::free_host(self.memory.cast()) };
    }
}
