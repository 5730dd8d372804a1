//! Kernels that are compiled while whoever asked for them goes on.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::sync::{Arc, Barrier};
use std::thread;

use common::gpu;
use smoe_gpu::{Access, Gpu, GpuError, Kernel, Shader};

const KERNELS: u32 = 24;

/// Adds `n` to a word.
fn adds(n: u32) -> String {
    format!(
        "@group(0) @binding(0) var<storage, read_write> word: array<u32>;\n\
         @compute @workgroup_size(64)\n\
         fn main(@builtin(local_invocation_index) lane: u32) {{ if (lane == 0u) {{ word[0] += {n}u; }} }}"
    )
}

/// No WGSL.
fn nonsense(n: u32) -> String {
    format!("fn main( {n}")
}

fn ask(gpu: &Gpu, name: &str, source: String) -> Result<Arc<Kernel>, GpuError> {
    gpu.kernel(&Shader { name, source: source.into(), bindings: &[Access::Write] })
}

#[track_caller]
fn refused(result: Result<(), GpuError>) -> String {
    match result {
        Err(GpuError::Kernel { kernel, why, .. }) => {
            assert!(!why.is_empty());
            kernel
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn many_are_asked_for_at_once_and_each_is_run() {
    let Some(gpu) = gpu() else { return };
    let word = gpu.buffer("word", 4).unwrap();
    let mut step = gpu.step();
    let kernels: Vec<_> = (0..KERNELS).map(|n| ask(&gpu, "adds", adds(1 << n)).unwrap()).collect();
    for kernel in &kernels {
        // Waits for it: nobody has waited for all.
        step.run(&gpu.bind(kernel, &[&word]).unwrap(), &[], [1, 1, 1]);
    }
    gpu.wait(&step.submit()).unwrap();
    let sum = u32::from_le_bytes(gpu.download(&word).unwrap().try_into().unwrap());
    assert_eq!(sum, (1 << KERNELS) - 1);
    gpu.finish_kernels().unwrap();
    let times = gpu.compile_times();
    assert!(times.kernels == u64::from(KERNELS) && !times.shaders.is_zero() && !times.pipelines.is_zero());
}

#[test]
fn what_threads_ask_for_at_once_is_compiled_once() {
    let Some(gpu) = gpu() else { return };
    let (threads, sources) = (4, 5);
    let start = Barrier::new(threads);
    let asked: Vec<Vec<_>> = thread::scope(|scope| {
        let threads = (0..threads).map(|_| {
            scope.spawn(|| {
                start.wait();
                (0..sources).map(|n| ask(&gpu, "adds", adds(n)).unwrap()).collect()
            })
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    gpu.finish_kernels().unwrap();
    for (n, kernel) in asked[0].iter().enumerate() {
        assert!(asked.iter().all(|others| Arc::ptr_eq(&others[n], kernel)), "{n}");
    }
    assert_eq!(gpu.compile_times().kernels, u64::from(sources));
}

#[test]
fn the_first_that_was_asked_for_of_those_that_are_refused_is_told() {
    let Some(gpu) = gpu() else { return };
    for n in 0..KERNELS {
        ask(&gpu, "adds", adds(n)).unwrap();
        if n % 4 == 3 {
            // Whether others were refused by now is nobody's business here.
            ask(&gpu, &format!("nonsense {n}"), nonsense(n)).unwrap();
        }
    }
    assert_eq!(refused(gpu.finish_kernels()), "nonsense 3");
    // They are forgotten, and the device is none the worse.
    gpu.finish_kernels().unwrap();
    gpu.check().unwrap();
    assert_eq!(gpu.compiled().len(), KERNELS as usize);
    ask(&gpu, "nonsense again", nonsense(3)).unwrap();
    assert_eq!(refused(gpu.finish_kernels()), "nonsense again");
}

#[test]
fn a_kernel_that_is_refused_is_never_passed_over() {
    let Some(gpu) = gpu() else { return };
    let word = gpu.buffer("word", 4).unwrap();
    let op = gpu.bind(&ask(&gpu, "nonsense", nonsense(0)).unwrap(), &[&word]).unwrap();
    assert_eq!(refused(gpu.finish_kernels()), "nonsense");
    let mut step = gpu.step();
    step.run(&op, &[], [1, 1, 1]);
    assert_eq!(step.dispatches(), 0);
    let error = gpu.wait(&step.submit()).unwrap_err();
    assert!(matches!(error, GpuError::Lost { .. }) && error.to_string().contains("nonsense"), "{error}");
}

#[test]
fn a_device_that_is_lost_meanwhile_says_so() {
    let Some(gpu) = gpu() else { return };
    for n in 0..KERNELS {
        ask(&gpu, "adds", adds(n)).unwrap();
    }
    gpu.lose("pulled out");
    for error in [gpu.finish_kernels(), ask(&gpu, "adds", adds(KERNELS)).map(drop)] {
        let error = error.unwrap_err();
        assert!(
            matches!(error, GpuError::Lost { .. }) && error.to_string().contains("pulled out"),
            "{error}"
        );
    }
}

#[test]
fn a_device_that_is_dropped_meanwhile_leaves_nobody_waiting() {
    let Some(gpu) = gpu() else { return };
    let word = gpu.buffer("word", 4).unwrap();
    let kernels: Vec<_> = (0..KERNELS).map(|n| ask(&gpu, "adds", adds(n)).unwrap()).collect();
    let ops: Vec<_> = kernels.iter().map(|kernel| gpu.bind(kernel, &[&word]).unwrap()).collect();
    let mut step = gpu.step();
    drop(gpu);
    // Each was compiled, or given up.
    ops.iter().for_each(|op| step.run(op, &[], [1, 1, 1]));
    assert!(step.dispatches() <= KERNELS);
}

#[test]
fn twins_are_compiled_side_by_side() {
    let Some(gpu) = gpu() else { return };
    let source = |n: u32| {
        format!(
            "struct P {{ n: u32, nothing: u32 }}\nvar<immediate> p: P;\n{}",
            adds(n).replace("word[0] +=", "word[0] += p.nothing +")
        )
    };
    let word = gpu.buffer("word", 4).unwrap();
    let kernels: Vec<_> = (0..4).map(|n| ask(&gpu, "adds", source(n)).unwrap()).collect();
    let ops: Vec<_> = kernels.iter().map(|kernel| gpu.bind(kernel, &[&word]).unwrap()).collect();
    let idle = Arc::new(gpu.idle(&kernels).unwrap());
    // Twins are there; one that was asked for before them may take longer.
    gpu.finish_kernels().unwrap();
    assert_eq!(gpu.compile_times().kernels, 8);
    for (idle, expected) in [(None, 6), (Some(idle), 6)] {
        let mut step = gpu.step();
        idle.into_iter().for_each(|idle| step.idle(idle));
        ops.iter().for_each(|op| step.run(op, &[1], [1, 1, 1]));
        gpu.wait(&step.submit()).unwrap();
        assert_eq!(gpu.download(&word).unwrap(), [expected, 0, 0, 0]);
    }
}
