//! `smoe demo`: the bundled model, with no download.

use std::io::{self, IsTerminal};
use std::path::PathBuf;

use crate::args::{ChatArgs, DemoArgs, RunArgs};
use crate::failure::Failure;
use crate::{chat, run};

/// What it answers when nobody is at a terminal.
const SAMPLE: &str = "Write a short story about a lighthouse and a storm.";

/// Runs the command.
pub fn demo(args: &DemoArgs) -> Result<(), Failure> {
    let vault = PathBuf::from("demo");
    if io::stdin().is_terminal() && io::stdout().is_terminal() {
        return chat::chat(&ChatArgs {
            vault,
            system: None,
            max_tokens: 1024,
            sampling: args.sampling.clone(),
            machine: args.machine.clone(),
        });
    }
    run::run(&RunArgs {
        vault,
        prompt: Some(SAMPLE.to_owned()),
        tokens_in: None,
        raw_ids: false,
        max_tokens: 512,
        stop: Vec::new(),
        system: None,
        ignore_eos: false,
        no_template: false,
        sampling: args.sampling.clone(),
        machine: args.machine.clone(),
    })
}
