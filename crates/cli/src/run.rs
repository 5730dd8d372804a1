//! `smoe run`: one prompt, one answer.

use std::io::{self, IsTerminal, Read, Write};

use serde_json::json;
use smoe_engine::{Finish, Limits, Sampler};
use smoe_text::{ModelText, TemplateInput};

use crate::answer::{Asker, Piece};
use crate::args::{PromptArgs, RunArgs};
use crate::failure::Failure;
use crate::instrument::Display;
use crate::model;
use crate::progress::Prefill;

/// Runs the command.
pub fn run(args: &RunArgs) -> Result<(), Failure> {
    let vault = model::open_vault(&args.vault)?;
    let text = model::open_text(&vault)?;
    let prompt = prompt_tokens(&args.prompt, &text)?;
    if text.tokenizer.is_none() && !args.raw_ids {
        eprintln!("note: the vault has no tokenizer: printing token ids");
    }
    let mut engine = model::open_engine(&vault, &args.machine, model::text_bytes(&vault))?;
    let mut sampler = Sampler::new(args.sampling.settings(&text.defaults), engine.spec().vocab_size)?;
    let end_tokens = if args.ignore_eos { Vec::new() } else { text.end_tokens.clone() };
    let limits = Limits { max_tokens: args.max_tokens, end_tokens };
    let mut session = engine.open_session()?;
    let mut display = Display::begin(&args.instrument, &mut engine)?;
    let mut bar = Prefill::default();
    let ids_only = args.raw_ids || text.tokenizer.is_none();
    let mut out = io::stdout().lock();
    let answer = Asker {
        engine: &mut engine,
        session: &mut session,
        sampler: &mut sampler,
        // With --raw-ids text is still made where stop strings need it.
        tokenizer: text.tokenizer.as_ref(),
        markup: false,
        limits: &limits,
        stops: &args.stop,
    }
    .answer(&prompt, &mut |piece| {
        match piece {
            Piece::Prompt { done, total } => bar.at(done, total),
            Piece::Text(text) if !ids_only => out.write_all(text.as_bytes())?,
            Piece::Token { id, first: true } if ids_only => write!(out, "{id}")?,
            Piece::Token { id, .. } if ids_only => write!(out, " {id}")?,
            Piece::Token { .. } | Piece::Text(_) => return Ok(()),
        }
        out.flush()
    });
    drop(bar);
    writeln!(out)?;
    let answer = answer?;
    if answer.finish == Finish::ContextFull {
        eprintln!("note: the context of {} positions is full", engine.info().plan.context);
    }
    display.keep(&answer);
    display.print(&answer, true);
    display.end(&mut engine)?;
    if answer.finish == Finish::Stopped && answer.interrupted {
        return Err(Failure::Interrupted);
    }
    Ok(())
}

/// The tokens of a prompt, in the model's chat template unless it stands for itself.
pub fn prompt_tokens(args: &PromptArgs, text: &ModelText) -> Result<Vec<u32>, Failure> {
    if let Some(ids) = &args.tokens_in {
        return Ok(ids.clone());
    }
    let Some(tokenizer) = &text.tokenizer else {
        return Err(Failure::Usage("this vault has no tokenizer: give the prompt as --tokens-in".to_owned()));
    };
    let prompt = match &args.prompt {
        Some(prompt) => prompt.clone(),
        None if io::stdin().is_terminal() => {
            return Err(Failure::Usage("no prompt: give one, or pipe it in".to_owned()));
        }
        None => {
            let mut prompt = String::new();
            io::stdin()
                .read_to_string(&mut prompt)
                .map_err(|e| Failure::new(format!("cannot read the prompt from stdin: {e}")))?;
            prompt.trim_end_matches('\n').to_owned()
        }
    };
    if prompt.is_empty() {
        return Err(Failure::Usage("the prompt is empty".to_owned()));
    }
    let template = text.chat_template.as_ref().filter(|_| !args.no_template);
    let Some(template) = template else {
        if !args.no_template {
            eprintln!("note: the vault has no chat template: the prompt is continued as it stands");
        }
        let prompt = [args.system.as_deref().unwrap_or_default(), &prompt].concat();
        return Ok(tokenizer.encode_with_special(&prompt)?);
    };
    let mut messages = Vec::new();
    messages.extend(args.system.as_ref().map(|system| json!({"role": "system", "content": system})));
    messages.push(json!({"role": "user", "content": prompt}));
    let rendered = template.render(&conversation(text, messages))?;
    Ok(tokenizer.encode(&rendered)?)
}

/// A conversation as the template takes it, to be answered by the model.
pub fn conversation(text: &ModelText, messages: Vec<serde_json::Value>) -> TemplateInput {
    TemplateInput {
        messages: messages.into(),
        tools: None,
        add_generation_prompt: true,
        bos_token: text.bos_token.clone(),
        eos_token: text.eos_token.clone(),
        extra: serde_json::Map::new(),
        now: None,
    }
}
