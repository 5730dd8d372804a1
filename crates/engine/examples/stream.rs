//! Opens a vault, starts a session, streams tokens: `stream VAULT 1,2,3 [MAX_TOKENS]`.
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

use smoe_engine::{Control, Engine, EngineOptions, Limits, Sampler, Sampling, Vault};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(path), Some(ids)) = (args.next(), args.next()) else {
        return Err("usage: stream VAULT 1,2,3 [MAX_TOKENS]".into());
    };
    let prompt = ids.split(',').map(str::parse).collect::<Result<Vec<u32>, _>>()?;
    let max_tokens = args.next().map_or(Ok(24), |n| n.parse())?;

    let vault = Vault::open(Path::new(&path))?;
    let mut engine = Engine::open(&vault, &EngineOptions::default())?;
    let mut sampler = Sampler::new(Sampling::default(), engine.spec().vocab_size)?;
    let mut session = engine.open_session()?;
    engine.sync(&mut session, &prompt, &mut Control::default())?;
    sampler.begin(&prompt);
    let limits = Limits { max_tokens, end_tokens: Vec::new() };
    engine.generate(&mut session, &mut sampler, &limits, &mut Control::default(), &mut |token| {
        print!("{token} ");
        let _ = std::io::stdout().flush();
        ControlFlow::Continue(())
    })?;
    println!();
    Ok(())
}
