//! From a vault to a machine: the engine behind its scheduler.

use smoe_engine::memory::MemoryFacts;
use smoe_engine::{Engine, EngineOptions, Scheduler, SchedulerOptions, Vault};

use crate::fleet::{Opened, Start, Starting};
use crate::runner::{Glance, Machine};

impl Machine for Scheduler {
    fn glance(&self) -> Option<Glance> {
        let mut glance = Glance { ring_limit: self.engine().ring_limit(), ..Glance::default() };
        let mut resident = Vec::new();
        self.engine().residency(&mut |key, is_resident| resident.push((key, is_resident)));
        resident.sort_unstable();
        glance.resident = resident.chunks(8).map(bits).collect();
        Some(glance)
    }
}

fn bits<K>(experts: &[(K, bool)]) -> u8 {
    experts.iter().enumerate().fold(0, |byte, (bit, (_, resident))| byte | u8::from(*resident) << bit)
}

/// Loads vaults with these options. `scheduler` may depend on the vault (a cache has its file), and `reserve` says
/// how many bytes its text takes.
pub fn start_engine(
    options: EngineOptions,
    scheduler: impl Fn(&Vault) -> SchedulerOptions + Send + Sync + 'static,
    reserve: impl Fn(&Vault) -> u64 + Send + Sync + 'static,
) -> Start {
    // What there is before anything is loaded: a ring that is claimed and not yet touched counts as free later on.
    let free = options.plan.memory.unwrap_or_else(|| MemoryFacts::detect().budget());
    Box::new(move |Starting { vault, held, progress }| {
        let mut options = options.clone();
        options.plan.reserved = reserve(vault);
        if held > 0 {
            options.plan.memory = Some(free.saturating_sub(held));
        }
        let mut engine = Engine::open(vault, &options)?;
        let mut scheduling = scheduler(vault);
        let mut warnings: Vec<String> = engine.info().device_note.into_iter().collect();
        // Before the long work. Conversations are worth less than answers: without their file it goes on.
        if let Some(file) = scheduling.spill.take()
            && let Err(error) = engine.spill_to(&file)
        {
            warnings.push(format!("conversations are not remembered beyond memory: {error}"));
        }
        engine.preload(progress)?;
        let (meters, info) = (Some(engine.meters()), Some(engine.info()));
        // Who may wait is decided at the fleet's door; whom that lets in the scheduler must not turn away.
        scheduling.max_queued += engine.plan().sessions;
        let scheduler = Scheduler::new(engine, scheduling)?;
        Ok(Opened { machine: Box::new(scheduler), meters, info, warnings })
    })
}
