//! `smoe demo`: the bundled model, with no download.

use std::io::{self, IsTerminal};
use std::path::PathBuf;

use crate::args::{ChatArgs, DemoArgs, PromptArgs, RunArgs};
use crate::failure::Failure;
use crate::{chat, run};

/// What it answers when nobody is at a terminal.
const SAMPLE: &str = "Write a short story about a lighthouse and a storm.";

/// Runs the command.
pub fn demo(args: &DemoArgs) -> Result<(), Failure> {
    let vault = PathBuf::from("demo");
    if io::stdin().is_terminal() && io::stdout().is_terminal() {
        return chat::chat(&ChatArgs {
            vault: Some(vault),
            connect: None,
            model: None,
            api_key: None,
            system: None,
            max_tokens: Some(1024),
            plain: false,
            panel: args.panel,
            instrument: args.instrument.clone(),
            sampling: args.sampling.clone(),
            machine: args.machine.clone(),
        });
    }
    if args.panel {
        eprintln!("note: --panel needs a terminal: a sample answer instead");
    }
    run::run(&RunArgs {
        vault,
        prompt: PromptArgs { prompt: Some(SAMPLE.to_owned()), ..PromptArgs::default() },
        raw_ids: false,
        max_tokens: 512,
        stop: Vec::new(),
        ignore_eos: false,
        instrument: args.instrument.clone(),
        sampling: args.sampling.clone(),
        machine: args.machine.clone(),
    })
}
