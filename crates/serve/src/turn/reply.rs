//! A whole answer, for clients that want it at once.

use futures_util::{Stream, StreamExt};

use super::{Delta, Reason, TokenLogprob, TurnUsage};
use crate::error::ApiError;

/// One answer.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// Its reasoning.
    pub reasoning: String,
    /// Its text; with the prompt before it, if that was to be echoed.
    pub text: String,
    /// Its calls.
    pub calls: Vec<ReplyCall>,
    /// Its tokens, if asked for.
    pub logprobs: Vec<TokenLogprob>,
    /// Why it ended; `None` cannot be in what [`collect`] returns.
    pub reason: Option<Reason>,
    /// What it took.
    pub usage: TurnUsage,
}

/// A tool call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplyCall {
    /// Its id.
    pub id: String,
    /// The tool.
    pub name: String,
    /// JSON text.
    pub arguments: String,
}

/// Waits for all answers.
///
/// # Errors
/// The first that the stream tells.
pub async fn collect(stream: impl Stream<Item = Delta>, n: usize) -> Result<Vec<Reply>, ApiError> {
    let mut stream = std::pin::pin!(stream);
    let mut replies = vec![Reply::default(); n];
    while let Some(delta) = stream.next().await {
        match delta {
            Delta::Phase(_) => {}
            Delta::Accepted { echo, .. } => {
                for reply in &mut replies {
                    reply.text.push_str(echo.as_deref().unwrap_or_default());
                }
            }
            Delta::Reasoning { choice, text } => replies[choice].reasoning.push_str(&text),
            Delta::Text { choice, text, logprobs } => {
                replies[choice].text.push_str(&text);
                replies[choice].logprobs.extend(logprobs);
            }
            Delta::ToolBegin { choice, id, name, .. } => {
                replies[choice].calls.push(ReplyCall { id, name, arguments: String::new() });
            }
            Delta::ToolArguments { choice, index, fragment } => {
                if let Some(call) = replies[choice].calls.get_mut(index) {
                    call.arguments.push_str(&fragment);
                }
            }
            Delta::End { choice, reason, usage } => {
                replies[choice].reason = Some(reason);
                replies[choice].usage = usage;
            }
            Delta::Error(error) => return Err(error),
        }
    }
    Ok(replies)
}
