//! `smoe bench`: what a vault does on this machine, against what the machine can do.

mod clients;
#[cfg(feature = "gpu")]
mod device;
mod figures;
pub mod machine;
mod parts;
mod record;
mod runs;

use std::io::{self, IsTerminal};
use std::path::Path;
use std::time::Instant;

use smoe_engine::forecast::WeightsRate;
use smoe_engine::{DeviceChoice, Engine, EngineOptions};

use crate::args::BenchArgs;
use crate::failure::Failure;
use crate::{model, progress};
use figures::{Ceilings, Facts};
use record::Record;
use runs::Bench;

/// Positions that the canonical benchmark needs: the longest prefill and the decoding behind it.
const CONTEXT: usize = 2048 + 2 * 64 + 45;

/// Runs the command.
pub fn bench(args: &BenchArgs) -> Result<(), Failure> {
    let record = match (&args.vault, &args.disk, args.kernels) {
        (None, Some(path), false) => parts::disk(path)?,
        (None, None, true) if args.machine.device == DeviceChoice::Cpu => {
            parts::kernels(args.machine.threads)?
        }
        (None, None, true) => {
            #[cfg(feature = "gpu")]
            {
                device::kernels(&args.machine.device)?
            }
            #[cfg(not(feature = "gpu"))]
            return Err(Failure::Usage("this build has no GPU support".to_owned()));
        }
        (Some(path), None, false) => vault(args, path)?,
        _ => return Err(Failure::Usage("bench a VAULT, or --disk FILE, or --kernels".to_owned())),
    };
    if let Some(path) = &args.out {
        std::fs::write(path, record.to_json()?)?;
    }
    if args.json {
        say!("{}", record.to_json()?.trim_end());
    } else {
        record.print()?;
    }
    if let Some(old) = &args.compare {
        let table = record.compare(&Record::read(old)?);
        if args.json { eprint!("{table}") } else { say!("{}", table.trim_end()) }
    }
    Ok(())
}

fn vault(args: &BenchArgs, path: &Path) -> Result<Record, Failure> {
    let vault = model::open_vault(path)?;
    let mut options: EngineOptions = args.machine.options();
    let most = vault.spec.max_context;
    let positions = if args.clients.is_empty() { CONTEXT } else { clients::CONTEXT };
    options.plan.context = Some(options.plan.context.unwrap_or(positions).min(most));
    options.plan.sessions = args.clients.iter().copied().max().map_or(1, usize::from);
    options.plan.reserved = figures::buffer_bytes(&vault);
    model::warn_of_memory(&options.plan);
    let started = Instant::now();
    let spinner = progress::spinner("loading the backbone");
    let engine = Engine::open(&vault, &options);
    spinner.finish_and_clear();
    let mut engine = engine?;
    let open_s = started.elapsed().as_secs_f64();
    let spinner = progress::spinner("measuring the machine's ceilings");
    // While the ring is not touched its memory is there for others. Of what a disk adds a forecast knows nothing.
    let mut weights = match engine.holds_all() {
        true => {
            let (plan, kernels) = (engine.plan(), engine.kernels());
            WeightsRate::new(&vault, kernels, plan.threads, plan.ring_bytes())
        }
        false => None,
    };
    weights.iter_mut().for_each(WeightsRate::time);
    let rates = engine.measure_device()?;
    let costs = engine.device_costs()?;
    weights.iter_mut().for_each(WeightsRate::time);
    let rate = weights.as_ref().map_or(f64::NAN, WeightsRate::median);
    let weights_rates = weights.map_or(Vec::new(), |weights| weights.rates().to_vec());
    let forecast = engine.holds_all().then(|| engine.forecast(&vault, rate, rates));
    let ceilings = Ceilings::measure(&vault, &mut engine);
    spinner.finish_and_clear();
    let mut ceilings = ceilings?;
    let mut facts = Facts { open_s, weights_rates, forecast, costs, ..Facts::default() };
    let started = Instant::now();
    let before = engine.store_snapshot();
    model::preload(&mut engine)?;
    facts.load_bytes = (engine.store_snapshot() - before).disk_bytes;
    facts.load_s = started.elapsed().as_secs_f64();

    let mut bench = Bench::new(engine, args.seed)?;
    let runs = args.runs.max(1);
    if !args.clients.is_empty() {
        let mut record = figures::set_up(&vault, &bench, &facts);
        let counts: Vec<usize> = args.clients.iter().copied().map(usize::from).collect();
        clients::run(&mut bench, &mut ceilings, &vault, &counts, runs, &mut record)?;
        return Ok(record);
    }
    let tell = |what: &str| {
        if io::stderr().is_terminal() {
            eprint!("\r\x1b[K{what}");
        }
    };
    for run in 0..runs {
        bench.run(&mut ceilings, &|what| tell(&format!("run {} of {runs}: {what}", run + 1)))?;
    }
    bench.greedy(&tell)?;
    if io::stderr().is_terminal() {
        eprint!("\r\x1b[K");
    }
    let mut record = figures::record(&vault, &bench, &ceilings, &facts);
    if bench.engine.device_tier().is_some() {
        figures::device_kernels(&mut record, bench.profile()?);
    }
    Ok(record)
}
