//! A finished conversation as tokens, and which of them the model would have written.

use serde_json::Value as Json;

use crate::error::TextError;
use crate::model_text::ModelText;
use crate::template::{ChatTemplate, TemplateInput};
use crate::tokenizer::Tokenizer;

/// A rendered conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dialogue {
    /// All of it, as the chat template writes it.
    pub tokens: Vec<u32>,
    /// Of each token, whether it belongs to an answer: its text, or the mark that ends it. What opens an answer is
    /// given to the model and is none of it.
    pub answer: Vec<bool>,
}

impl ModelText {
    /// Renders a finished conversation and finds the assistant's answers in it.
    ///
    /// An answer begins where the prompt for it ends: the template is asked, for each one, how it opens an answer to
    /// what stands before it. It ends with the first end token, or where its message ends if it has none.
    ///
    /// # Errors
    /// [`TextError::Absent`] if the model has no tokenizer or template, [`TextError::Answer`] if an answer does not
    /// stand where its prompt ends; what rendering and encoding say.
    pub fn dialogue(&self, input: &TemplateInput) -> Result<Dialogue, TextError> {
        let tokenizer = self.tokenizer.as_ref().ok_or(TextError::Absent { what: "tokenizer" })?;
        let template = self.chat_template.as_ref().ok_or(TextError::Absent { what: "chat template" })?;
        let writer = Writer { tokenizer, template, input };
        let none = Vec::new();
        let messages = input.messages.as_array().unwrap_or(&none);
        let tokens = writer.tokens(messages, false)?;
        let mut answer = vec![false; tokens.len()];
        for (i, message) in messages.iter().enumerate() {
            if message["role"] != "assistant" {
                continue;
            }
            let (before, prompt) =
                (writer.tokens(&messages[..i], false)?, writer.tokens(&messages[..i], true)?);
            let start = common(&tokens, &prompt);
            // A template may open an answer otherwise than it retells one (with a mark that begins reasoning), but
            // what stands before it is the same.
            if start < before.len() {
                return Err(TextError::Answer { message: i + 1 });
            }
            let rest = &tokens[start..];
            let end = match rest.iter().position(|token| self.end_tokens.contains(token)) {
                Some(last) => start + last + 1,
                None => common(&tokens, &writer.tokens(&messages[..=i], false)?).max(start),
            };
            answer[start..end].fill(true);
        }
        Ok(Dialogue { tokens, answer })
    }
}

struct Writer<'a> {
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    input: &'a TemplateInput,
}

impl Writer<'_> {
    /// The first messages of the conversation as tokens; none are nothing.
    fn tokens(&self, messages: &[Json], add_generation_prompt: bool) -> Result<Vec<u32>, TextError> {
        if messages.is_empty() && !add_generation_prompt {
            return Ok(Vec::new());
        }
        let input = TemplateInput { messages: messages.into(), add_generation_prompt, ..self.input.clone() };
        self.tokenizer.encode(&self.template.render(&input)?)
    }
}

/// Length of what both begin with.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
