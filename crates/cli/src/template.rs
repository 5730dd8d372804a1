//! `smoe template`: a chat template, rendered as the model's own would be.

use std::io::{self, Write};

use smoe_text::{ChatTemplate, TemplateInput};

use crate::args::TemplateArgs;
use crate::failure::Failure;

/// Runs the command: JSON on stdin, exactly the rendering on stdout.
pub fn template(args: &TemplateArgs) -> Result<(), Failure> {
    let source = std::fs::read_to_string(&args.file)
        .map_err(|e| Failure::new(format!("{}: {e}", args.file.display())))?;
    let input: serde_json::Value = serde_json::from_reader(io::stdin().lock())
        .map_err(|e| Failure::new(format!("stdin is not a conversation in JSON: {e}")))?;
    let rendered = ChatTemplate::compile(&source)?.render(&TemplateInput::from_json(&input)?)?;
    io::stdout().lock().write_all(rendered.as_bytes())?;
    Ok(())
}
