//! `smoe trace`: how tokens are routed, and what caches would make of it.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Map, Value, json};
use smoe_engine::{Control, Engine, EngineError, Limits, Sampler};
use smoe_sculpt::token_stream;
use smoe_store::PolicyKind;
use smoe_store::replay::{Score, Trace, belady, replay};

use crate::args::{TraceCommand, TraceRecordArgs, TraceReplayArgs};
use crate::failure::Failure;
use crate::{interrupt, model, run};

/// Runs the command.
pub fn trace(command: &TraceCommand) -> Result<(), Failure> {
    match command {
        TraceCommand::Record(args) => record(args),
        TraceCommand::Replay(args) => replay_file(args),
    }
}

fn record(args: &TraceRecordArgs) -> Result<(), Failure> {
    let vault = model::open_vault(&args.vault)?;
    let text = model::open_text(&vault)?;
    let prompt = match args.random {
        Some(_) => Vec::new(),
        None => run::prompt_tokens(&args.prompt, &text)?,
    };
    let file = File::create(&args.out).map_err(|e| cannot("write", &args.out, &e))?;
    let mut engine = model::open_engine(&vault, &args.machine, model::text_bytes(&vault))?;
    engine.record_trace(true)?;
    let flag = interrupt::fresh();
    let done = match args.random {
        Some(n) => random(&mut engine, n, args.sampling.seed, &mut Control::cancelled_by(flag)),
        None => {
            let sampler = Sampler::new(args.sampling.settings(&text.defaults), engine.spec().vocab_size)?;
            let limits = Limits { max_tokens: args.max_tokens, end_tokens: text.end_tokens.clone() };
            answer(&mut engine, &prompt, sampler, &limits, &mut Control::cancelled_by(flag))
        }
    };
    // What was recorded before a stop is a trace as well.
    let stopped = match done {
        Err(EngineError::Cancelled) => true,
        done => done.map(|()| interrupt::take())?,
    };
    let Some(trace) = engine.record_trace(false)? else { return Ok(()) };
    let mut out = BufWriter::new(file);
    trace.write(&mut out).and_then(|()| out.flush()).map_err(|e| cannot("write", &args.out, &e))?;
    eprintln!("{}: {}", args.out.display(), facts(&trace));
    if stopped { Err(Failure::Interrupted) } else { Ok(()) }
}

/// `n` random tokens, each decoded after the one before, in as many sessions as the context asks for.
fn random(engine: &mut Engine, n: usize, seed: u64, control: &mut Control<'_>) -> Result<(), EngineError> {
    let tokens: Vec<u32> = token_stream(engine.spec().vocab_size, seed).take(n).collect();
    for tokens in tokens.chunks(engine.info().plan.context) {
        let mut session = engine.open_session()?;
        for &token in tokens {
            engine.decode(&mut session, token, control)?;
        }
    }
    Ok(())
}

fn answer(
    engine: &mut Engine,
    prompt: &[u32],
    mut sampler: Sampler,
    limits: &Limits,
    control: &mut Control<'_>,
) -> Result<(), EngineError> {
    let mut session = engine.open_session()?;
    engine.sync(&mut session, prompt, control)?;
    sampler.begin(prompt);
    engine.generate(&mut session, &mut sampler, limits, control, &mut |_| ControlFlow::Continue(()))?;
    Ok(())
}

fn replay_file(args: &TraceReplayArgs) -> Result<(), Failure> {
    let file = File::open(&args.trace).map_err(|e| cannot("read", &args.trace, &e))?;
    let trace = Trace::read(&mut BufReader::new(file))
        .map_err(|e| Failure::new(format!("{}: {e}", args.trace.display())))?;
    let all = trace.n_records();
    let rings: Vec<usize> = args.ring.iter().map(|size| size.slots(all)).collect();
    let policies = policies(&args.policy)?;
    let mut rows: Vec<(&str, Vec<Score>)> = Vec::new();
    for kind in policies {
        let score = |slots: &usize| replay(&trace, *slots, &mut *kind.build(*slots, all));
        rows.push((kind.name(), rings.iter().map(score).collect()));
    }
    rows.push(("belady", rings.iter().map(|slots| belady(&trace, *slots)).collect()));
    if args.json {
        say!("{}", to_json(&trace, &rings, &rows));
        return Ok(());
    }
    say!("{}", facts(&trace));
    say!();
    let cells = |cells: &mut dyn Iterator<Item = String>| -> String {
        cells.map(|cell| format!("{cell:>9}")).collect()
    };
    let share = |slots: &usize| format!("{:.1} %", 100.0 * *slots as f64 / all as f64);
    say!("{:<10}{}", "ring", cells(&mut rings.iter().map(share)));
    say!("{:<10}{}", "slots", cells(&mut rings.iter().map(usize::to_string)));
    for (name, scores) in rows {
        let rate = |score: &Score| match score.hit_rate() {
            Some(rate) => format!("{:.2} %", 100.0 * rate),
            None => "-".to_owned(),
        };
        say!("{name:<10}{}", cells(&mut scores.iter().map(rate)));
    }
    Ok(())
}

fn to_json(trace: &Trace, rings: &[usize], rows: &[(&str, Vec<Score>)]) -> Value {
    let score =
        |score: &Score| json!({"hits": score.hits, "misses": score.misses, "hit_rate": score.hit_rate()});
    let policies: Map<String, Value> =
        rows.iter().map(|(name, scores)| ((*name).to_owned(), scores.iter().map(score).collect())).collect();
    json!({
        "format": "smoe-replay-1",
        "moe_layers": trace.n_layers(),
        "experts": trace.n_experts(),
        "top_k": trace.top_k(),
        "steps": trace.n_steps(),
        "tokens": trace.n_tokens(),
        "ring_slots": rings,
        "policies": policies,
    })
}

fn policies(names: &[String]) -> Result<Vec<PolicyKind>, Failure> {
    if names.iter().any(|name| name == "all") {
        return Ok(PolicyKind::ALL.to_vec());
    }
    let of = |name: &String| {
        PolicyKind::by_name(name).ok_or_else(|| {
            let known: Vec<&str> = PolicyKind::ALL.into_iter().map(PolicyKind::name).collect();
            Failure::Usage(format!("no policy `{name}`: all, or some of {}", known.join(", ")))
        })
    };
    names.iter().map(of).collect()
}

fn facts(trace: &Trace) -> String {
    format!(
        "{} tokens in {} steps, {} MoE layers of {} experts, {} a token",
        trace.n_tokens(),
        trace.n_steps(),
        trace.n_layers(),
        trace.n_experts(),
        trace.top_k()
    )
}

fn cannot(what: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot {what} {}: {error}", path.display()))
}
