//! Kernels: compiled at run time, launched with checked sizes, recorded as graphs.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaGraph, result, sys};
use cudarc::nvrtc;

use crate::device::failed;
use crate::{Cuda, CudaError};

/// The sources, in the order in which they need each other.
const SOURCES: [&str; 3] =
    [include_str!("cu/tile.cu"), include_str!("cu/products.cu"), include_str!("cu/layer.cu")];

/// Compiled kernels.
pub(crate) struct Program {
    module: sys::CUmodule,
    context: Arc<CudaContext>,
}

// SAFETY: a module belongs to a context, not to a thread; calls bind the context.
unsafe impl Send for Program {}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Program").finish_non_exhaustive()
    }
}

/// The text of the kernels for these constants.
pub(crate) fn text(constants: &[(&str, usize)]) -> String {
    let constants = constants.iter().map(|(name, value)| format!("#define {name} {value}\n"));
    constants.chain(SOURCES.map(str::to_owned)).collect()
}

/// Machine code of a text, for a compute capability.
pub(crate) fn compile(text: &str, capability: (i32, i32)) -> Result<Vec<u8>, CudaError> {
    let refused = |what: &str| CudaError::Compile { log: what.to_owned() };
    let text = CString::new(text).map_err(|_| refused("a NUL in the source"))?;
    let failed = |error: nvrtc::result::NvrtcError| refused(&format!("{:?}", error.0));
    let program = nvrtc::result::create_program(&text, Some(c"smoe.cu")).map_err(failed)?;
    let options =
        [format!("--gpu-architecture=sm_{}{}", capability.0, capability.1), "--std=c++17".to_owned()];
    // SAFETY: `program` was made above and is destroyed below, once; the image has the length that the library names.
    unsafe {
        let code = match nvrtc::result::compile_program(program, &options) {
            Ok(()) => {
                let mut len = 0;
                let sized = nvrtc::sys::nvrtcGetCUBINSize(program, &mut len).result();
                sized
                    .and_then(|()| {
                        let mut code = vec![0u8; len];
                        nvrtc::sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()).result().map(|()| code)
                    })
                    .map_err(failed)
            }
            Err(error) => {
                let log = nvrtc::result::get_program_log(program).unwrap_or_default();
                let log: Vec<u8> = log.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
                Err(refused(&format!("{:?}: {}", error.0, String::from_utf8_lossy(&log))))
            }
        };
        let _ = nvrtc::result::destroy_program(program);
        code
    }
}

impl Program {
    /// Compiles the kernels: a second or two.
    ///
    /// # Errors
    /// If the compiler or the driver refuses them.
    pub(crate) fn new(cuda: &Cuda, constants: &[(&str, usize)]) -> Result<Self, CudaError> {
        let code = compile(&text(constants), cuda.facts().capability)?;
        cuda.bind()?;
        // SAFETY: a whole image, which the driver copies.
        let module =
            unsafe { result::module::load_data(code.as_ptr().cast()) }.map_err(failed("loading kernels"))?;
        Ok(Self { module, context: cuda.context().clone() })
    }

    /// The kernel called `name`.
    pub(crate) fn kernel(&self, name: &str) -> Result<Kernel, CudaError> {
        let name =
            CString::new(name).map_err(|_| CudaError::Compile { log: "a NUL in a name".to_owned() })?;
        // SAFETY: the module is loaded.
        let function =
            unsafe { result::module::get_function(self.module, name) }.map_err(failed("finding a kernel"))?;
        Ok(Kernel { function })
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: loaded once, unloaded once; its kernels are no longer used by who owned both.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}

/// A kernel of a [`Program`], which must outlive it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    function: sys::CUfunction,
}

// SAFETY: as `Program`.
unsafe impl Send for Kernel {}

/// What a kernel is given.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg {
    /// An address, or a count of 64 bits.
    Long(u64),
    Word(u32),
    Float(f32),
}

/// A kernel, how many of it, and what it is given.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    pub(crate) kernel: Kernel,
    pub(crate) grid: (u32, u32),
    pub(crate) threads: u32,
    pub(crate) shared: u32,
    pub(crate) args: Vec<Arg>,
}

impl Launch {
    /// Hands it to the stream.
    ///
    /// # Safety
    /// The arguments are those of the kernel, in number and kind, and every address that it can form from them lies
    /// in memory that lives until it has run.
    pub(crate) unsafe fn run(&self, cuda: &Cuda) -> Result<(), CudaError> {
        let mut args = self.args.clone();
        let mut pointers: Vec<*mut c_void> = args
            .iter_mut()
            .map(|arg| match arg {
                Arg::Long(value) => std::ptr::from_mut(value).cast(),
                Arg::Word(value) => std::ptr::from_mut(value).cast(),
                Arg::Float(value) => std::ptr::from_mut(value).cast(),
            })
            .collect();
        let (grid, block) = ((self.grid.0, self.grid.1, 1), (self.threads, 1, 1));
        // SAFETY: by the caller's word; the driver has copied the arguments when it returns.
        unsafe {
            result::launch_kernel(
                self.kernel.function,
                grid,
                block,
                self.shared,
                cuda.stream().cu_stream(),
                &mut pointers,
            )
        }
        .map_err(failed("launching a kernel"))
    }
}

/// Launches that were recorded, to be replayed.
pub(crate) struct Graph(CudaGraph);

// SAFETY: a graph belongs to a context; it is replayed by one thread at a time, as `&mut` says.
unsafe impl Send for Graph {}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph").finish_non_exhaustive()
    }
}

impl Graph {
    /// Records what `record` launches.
    pub(crate) fn record(
        cuda: &Cuda,
        record: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Self, CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        cuda.stream().begin_capture(mode).map_err(failed("recording"))?;
        let recorded = record();
        let ended = cuda.stream().end_capture(sys::CUgraphInstantiate_flags(0)).map_err(failed("recording"));
        recorded?;
        let graph = ended?.ok_or_else(|| CudaError::Driver {
            doing: "recording",
            what: "nothing was recorded".to_owned(),
        })?;
        graph.upload().map_err(failed("recording"))?;
        Ok(Self(graph))
    }

    /// Hands it to the stream.
    pub(crate) fn replay(&mut self) -> Result<(), CudaError> {
        self.0.launch().map_err(failed("replaying"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KvKind, Shape};

    fn shape() -> Shape {
        Shape {
            d_model: 2048,
            vocab_size: 1000,
            layers: 2,
            heads: 32,
            kv_heads: 4,
            head_dim: 128,
            rope_dim: 128,
            kv: KvKind::F16,
            experts: 128,
            top_k: 8,
            d_expert: 768,
            renormalised: true,
            eps: 1e-6,
            embedding_scale: 1.0,
            residual_scale: 1.0,
            score_scale: 1.0,
            routed_scale: 1.0,
            tokens: 4,
            head_rows: 2,
            context: 64,
            blocks: 2,
            table_words: 2,
        }
    }

    #[test]
    fn the_kernels_compile() {
        // SAFETY: looks for the library and calls nothing in it.
        if !unsafe { nvrtc::sys::is_culib_present() } {
            eprintln!("skipped: there is no NVRTC (LD_LIBRARY_PATH)");
            return;
        }
        let wide = Shape { head_dim: 256, kv: KvKind::F32, experts: 40, top_k: 1, d_model: 1536, ..shape() };
        let narrow = Shape { head_dim: 64, rope_dim: 32, renormalised: false, ..shape() };
        for shape in [shape(), wide, narrow] {
            for capability in [(8, 0), (9, 0)] {
                let code = compile(&text(&shape.constants()), capability).expect("kernels that compile");
                assert!(code.len() > 10_000, "{} bytes", code.len());
            }
        }
    }

    #[test]
    fn a_kernel_that_does_not_compile_says_why() {
        // SAFETY: as above.
        if !unsafe { nvrtc::sys::is_culib_present() } {
            eprintln!("skipped: there is no NVRTC (LD_LIBRARY_PATH)");
            return;
        }
        let error = compile("__global__ void f() { nonsense; }", (9, 0)).expect_err("an error");
        assert!(error.to_string().contains("nonsense"), "{error}");
    }

    #[test]
    fn shapes_without_kernels_are_refused() {
        assert_eq!(shape().unsupported(), None);
        for other in [
            Shape { head_dim: 80, ..shape() },
            Shape { d_model: 2080, ..shape() },
            Shape { d_model: 8192, ..shape() },
            Shape { top_k: 64, ..shape() },
        ] {
            assert!(other.unsupported().is_some(), "{other:?}");
        }
    }
}
