//! `smoe serve`: the fleet over HTTP until Ctrl-C or SIGTERM.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::time::Duration;

use smoe_engine::{KvType, SchedulerOptions, SpillConfig, Vault};
use smoe_serve::fleet::{Fleet, LoaderConfig};
use smoe_serve::{Config, Server, start_engine};

use crate::args::ServeArgs;
use crate::failure::Failure;
use crate::instrument::server::Rests;
use crate::{interrupt, model, warmth};

/// How often Ctrl-C is looked for.
const LOOK: Duration = Duration::from_millis(100);

/// Runs the command.
pub fn serve(args: &ServeArgs) -> Result<(), Failure> {
    let level = if args.verbose { tracing::Level::INFO } else { tracing::Level::WARN };
    tracing_subscriber::fmt().with_max_level(level).with_target(false).with_writer(std::io::stderr).init();
    let paths = args.paths.iter().map(|path| model::resolve(path)).collect::<Result<Vec<_>, _>>()?;
    let mut options = args.machine.options();
    options.plan.sessions = usize::from(args.parallel);
    options.plan.kv_contexts = args.kv_contexts.max(1);
    model::warn_of_memory(&options.plan);
    let directory = kv_directory(args)?;
    let reserve = {
        let spills = directory.is_some();
        let kv = options.plan.kv.unwrap_or(KvType::F16);
        move |vault: &Vault| {
            model::text_bytes(vault) + if spills { SpillConfig::memory_bytes(&vault.spec, kv) } else { 0 }
        }
    };
    let scheduler = {
        let (stall, speculate) = (Duration::from_millis(args.stall), !args.no_speculation);
        let (max_queued, max_bytes) = (args.queue, args.kv_cache_size);
        move |vault: &Vault| SchedulerOptions {
            max_queued,
            stall,
            at_once: None,
            speculate,
            spill: spill_path(directory.as_deref(), vault).map(|path| SpillConfig { path, max_bytes }),
        }
    };
    let fleet = Fleet::new(LoaderConfig {
        paths,
        open: Box::new(|path: &Path| model::open_vault(path).map_err(|failure| failure.to_string())),
        start: start_engine(options, scheduler, reserve),
        resident: args.resident.max(1),
        max_waiting: args.queue,
    })
    .map_err(Failure::new)?;
    let config = Config {
        host: args.host.clone(),
        port: args.port,
        api_key: args.api_key.clone(),
        cors: args.cors,
        ..Config::default()
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let rests = args.instrument.map(|form| Rests::new(fleet.clone(), form));
    let served = runtime.block_on(async {
        let server = Server::bind(config, fleet).await.map_err(|e| Failure::new(e.to_string()))?;
        let address = server.address()?;
        eprintln!("serving on http://{address} · console at http://{address}/ · Ctrl-C ends");
        let Some(mut rests) = rests else {
            server.run(interrupted()).await;
            return Ok(());
        };
        {
            let mut running = pin!(server.run(interrupted()));
            while tokio::time::timeout(LOOK, &mut running).await.is_err() {
                rests.look();
            }
        }
        rests.end();
        Ok(())
    });
    // The server has given everything its time; a thread that a disk still holds up must not hold up the end.
    runtime.shutdown_background();
    served
}

/// Comes with Ctrl-C or SIGTERM; a second one ends the process.
async fn interrupted() {
    let flag = interrupt::fresh();
    while !flag.load(Ordering::Relaxed) {
        tokio::time::sleep(LOOK).await;
    }
}

/// Where conversations are kept; none if they are not.
fn kv_directory(args: &ServeArgs) -> Result<Option<PathBuf>, Failure> {
    let directory = match &args.kv_cache {
        Some(off) if off.as_os_str() == "off" => return Ok(None),
        Some(directory) => directory.clone(),
        None => match warmth::cache_directory() {
            Some(directory) => directory,
            None => {
                eprintln!("note: no cache directory is known: conversations are forgotten at the end");
                return Ok(None);
            }
        },
    };
    std::fs::create_dir_all(&directory).map_err(|e| Failure::new(format!("{}: {e}", directory.display())))?;
    Ok(Some(directory))
}

fn spill_path(directory: Option<&Path>, vault: &Vault) -> Option<PathBuf> {
    // An original's pair has no checksums that would tell it from another of the same shape.
    vault.experts.manifest()?;
    Some(directory?.join(format!("conversations-{}.kvcache", warmth::place_hash(&vault.experts_path)?)))
}
