//! `smoe`: the only room that prints, reads arguments and exits.
//!
//! `main` parses, one module per command does, and a [`failure::Failure`] becomes an exit code: 0 done, 1 failed,
//! 2 wrong usage, 130 interrupted.
#![forbid(unsafe_code)]
#![allow(clippy::print_stderr, reason = "printing is this room's office")]

/// A line on stdout; unlike `println!` a reader that has left is an error to return, not a panic.
macro_rules! say {
    () => { say!("") };
    ($($arg:tt)+) => {
        std::io::Write::write_fmt(
            &mut std::io::stdout().lock(),
            format_args!("{}\n", format_args!($($arg)+)),
        )?
    };
}

mod answer;
mod args;
mod bench;
mod calibrate;
mod chat;
mod corpus;
mod demo;
mod devices;
mod eval;
mod failure;
mod inspect;
mod instrument;
mod interrupt;
mod model;
mod plan;
mod probe;
mod progress;
mod pull;
mod run;
mod sculpt;
mod selftest;
mod serve;
mod synth;
mod template;
mod trace;
mod verify;
mod warmth;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Chat(args) => chat::chat(&args),
        Command::Demo(args) => demo::demo(&args),
        Command::Sculpt(args) => sculpt::sculpt(&args),
        Command::Pull(args) => pull::pull(&args),
        Command::Calibrate(args) => calibrate::calibrate(&args),
        Command::Synth(args) => synth::synth(&args),
        Command::Plan(args) => plan::plan(&args),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Verify(args) => verify::verify(&args),
        Command::Probe(args) => probe::probe(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Eval(args) => eval::eval(&args),
        Command::Devices(args) => devices::devices(&args),
        Command::Selftest(args) => selftest::selftest(&args),
        Command::Serve(args) => serve::serve(&args),
        Command::Trace(command) => trace::trace(&command),
        Command::Template(args) => template::template(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
