//! A model that is loaded: its thread, its text, and who uses it.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use smoe_engine::{EngineInfo, Meters};
use smoe_text::{ChatTemplate, GrammarVocabulary, ModelText, ReplyFormat};
use tokio::sync::watch;

use crate::error::ApiError;
use crate::fleet::{Listing, Opened};
use crate::runner::Runner;

/// A loaded model.
#[derive(Debug)]
pub struct Model {
    listing: Listing,
    text: ModelText,
    format: ReplyFormat,
    knows_developer: bool,
    vocab_size: usize,
    context: usize,
    runner: Runner,
    meters: Option<Meters>,
    info: Option<EngineInfo>,
    warnings: Vec<String>,
    /// Made when it is first needed.
    grammar: OnceLock<Result<GrammarVocabulary, ApiError>>,
    users: watch::Sender<usize>,
}

impl Model {
    pub(crate) fn new(
        listing: Listing,
        text: ModelText,
        vocab_size: usize,
        opened: Opened,
    ) -> std::io::Result<Self> {
        let runner = Runner::start(opened.machine)?;
        let template = text.chat_template.as_ref().map_or("", ChatTemplate::source);
        Ok(Self {
            format: text.reply_format(),
            knows_developer: template.contains("developer"),
            context: runner.load().context,
            runner,
            listing,
            text,
            vocab_size,
            meters: opened.meters,
            info: opened.info,
            warnings: opened.warnings,
            grammar: OnceLock::new(),
            users: watch::Sender::new(0),
        })
    }

    /// What its vault says.
    pub fn listing(&self) -> &Listing {
        &self.listing
    }

    /// Tokeniser, template, defaults.
    pub fn text(&self) -> &ModelText {
        &self.text
    }

    /// How it writes reasoning and calls.
    pub fn format(&self) -> &ReplyFormat {
        &self.format
    }

    /// Whether its template knows the role `developer`.
    pub(crate) fn knows_developer(&self) -> bool {
        self.knows_developer
    }

    /// Width of its logits.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Positions of its longest conversation, as it is loaded.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Its thread.
    pub fn runner(&self) -> &Runner {
        &self.runner
    }

    /// The engine's counters, if there is an engine.
    pub fn meters(&self) -> Option<&Meters> {
        self.meters.as_ref()
    }

    /// The engine's plan, if there is an engine.
    pub fn info(&self) -> Option<&EngineInfo> {
        self.info.as_ref()
    }

    /// What it goes without, in words.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = self.warnings.clone();
        warnings.extend(self.runner.warnings());
        warnings
    }

    /// Bytes that it may hold.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.info.as_ref().map_or(0, |info| info.plan.total_bytes())
    }

    /// Of a device's memory.
    pub(crate) fn device_bytes(&self) -> u64 {
        let tier = self.info.as_ref().and_then(|info| info.tier.as_ref());
        tier.map_or(0, |tier| tier.plan.total_bytes())
    }

    /// Its tokens, for grammars: most of a second of work the first time.
    pub(crate) fn grammar(&self) -> Result<&GrammarVocabulary, ApiError> {
        let make = || {
            let tokenizer = self.text.tokenizer.as_ref();
            let tokenizer =
                tokenizer.ok_or_else(|| ApiError::invalid("this model's vault has no tokenizer"))?;
            let made = GrammarVocabulary::new(tokenizer, self.vocab_size, &self.text.end_tokens);
            made.map_err(|error| ApiError::invalid(error.to_string()).coded("unsupported_by_model"))
        };
        self.grammar.get_or_init(make).as_ref().map_err(Clone::clone)
    }

    /// How many leases there are.
    pub fn users(&self) -> usize {
        *self.users.borrow()
    }

    /// Comes back when there is no lease.
    pub(crate) async fn idle(&self) {
        // The sender is our own, so it cannot be gone.
        let _ = self.users.subscribe().wait_for(|users| *users == 0).await;
    }
}

/// Keeps a model from being unloaded.
#[derive(Debug)]
pub struct Lease(Arc<Model>);

impl Lease {
    pub(crate) fn new(model: &Arc<Model>) -> Self {
        model.users.send_modify(|users| *users += 1);
        Self(model.clone())
    }
}

impl Clone for Lease {
    fn clone(&self) -> Self {
        Self::new(&self.0)
    }
}

impl Deref for Lease {
    type Target = Model;

    fn deref(&self) -> &Model {
        &self.0
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.users.send_modify(|users| *users -= 1);
    }
}
