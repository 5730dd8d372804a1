//! `smoe eval`: how well a vault predicts a text, and how faithful it is to another vault.
//!
//! Both models compute the same tokens chunk by chunk, the reference first; only its rows of one chunk are held, and
//! the other's are scored as they come. What the figures mean is in `meter::fidelity`.

mod documents;
mod score;

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};
use smoe_engine::memory::MemoryFacts;
use smoe_engine::{Engine, EngineError, Vault, plan_vault};
use smoe_meter::fidelity::{Against, Estimate, Fidelity, Summary};

use crate::args::{AutoNumber, EvalArgs, MachineArgs};
use crate::corpus::Document;
use crate::failure::Failure;
use crate::{interrupt, model, progress};
use documents::{Documents, windows};
use score::Scorer;

/// Tokens of a window, unless others are asked for: figures of different machines can be compared.
const WINDOW: usize = 2048;

/// A vault as it was named.
struct Named<'a> {
    name: &'a Path,
    vault: Vault,
}

impl<'a> Named<'a> {
    fn open(name: &'a Path) -> Result<Self, Failure> {
        Ok(Self { name, vault: model::open_vault(name)? })
    }

    fn vocab_size(&self) -> usize {
        self.vault.spec.vocab_size
    }
}

/// Runs the command.
pub fn eval(args: &EvalArgs) -> Result<(), Failure> {
    let subject = Named::open(&args.vault)?;
    let against = args.against.as_deref().map(Named::open).transpose()?;
    let documents = read(args, &subject, against.as_ref())?;

    let vaults: Vec<&Named<'_>> = [Some(&subject), against.as_ref()].into_iter().flatten().collect();
    let most = vaults.iter().map(|named| named.vault.spec.max_context).min().unwrap_or(0);
    let asked = args.window.or(args.machine.context.0);
    let window = asked.unwrap_or(WINDOW.min(most));
    let overlap = args.overlap.unwrap_or(window / 2);
    if window > most || window < 2 {
        return Err(Failure::Usage(format!(
            "--window {window}: must be 2 to {most}, which the model was made for"
        )));
    }
    if !(1..window).contains(&overlap) {
        let what = format!("--overlap {overlap}: must be at least 1 and less than the window of {window}");
        return Err(Failure::Usage(what));
    }
    let longest = documents.list.iter().map(|d| d.tokens.len()).max().unwrap_or(0);
    let mut machine = args.machine.clone();
    machine.context = AutoNumber(Some(machine.context.0.unwrap_or(0).max(window.min(longest)).min(most)));

    let held = Scorer::bytes(subject.vocab_size(), against.is_some()) + documents.bytes();
    let shares = shares(&machine, &vaults, held + model::text_bytes(&subject.vault))?;
    let open = |(i, named): (usize, &&Named<'_>)| {
        let machine = MachineArgs { memory: shares[i], ..machine.clone() };
        model::open_engine(&named.vault, &machine, if i == 0 { held } else { 0 })
    };
    let mut engines = vaults.iter().enumerate().map(open).collect::<Result<Vec<Engine>, Failure>>()?;

    let found = run(args, &documents, (window, overlap), &mut engines, &vaults)?;
    let head = Head { args, documents: &documents, window, overlap, complete: found.1 };
    if args.json {
        say!("{}", serde_json::to_string_pretty(&head.json(&found.0))?);
    } else {
        head.print(&found.0)?;
    }
    if found.1 { Ok(()) } else { Err(Failure::Interrupted) }
}

/// The text as tokens, the same for both.
fn read(args: &EvalArgs, subject: &Named<'_>, against: Option<&Named<'_>>) -> Result<Documents, Failure> {
    let text = model::open_text(&subject.vault)?;
    let documents = Documents::read(&args.text, &text, args.answers_only, args.max_tokens)?;
    let Some(against) = against else { return Ok(documents) };
    let differ = |what: String| {
        let (a, b) = (subject.name.display(), against.name.display());
        Failure::new(format!("{a} and {b} cannot be compared: {what}"))
    };
    if subject.vocab_size() != against.vocab_size() {
        let (a, b) = (subject.vocab_size(), against.vocab_size());
        return Err(differ(format!("their vocabularies have {a} and {b} tokens")));
    }
    let other = model::open_text(&against.vault)?;
    let Some(tokenizer) = other.tokenizer else { return Ok(documents) };
    let own = text.tokenizer.as_ref();
    let used: BTreeSet<u32> = documents.list.iter().flat_map(|document| document.tokens.clone()).collect();
    for id in used {
        let (a, b) = (own.and_then(|own| own.id_to_token(id)), tokenizer.id_to_token(id));
        if a != b {
            let name =
                |token: Option<String>| token.map_or("nothing".to_owned(), |token| format!("`{token}`"));
            return Err(differ(format!("token {id} is {} and {}", name(a), name(b))));
        }
    }
    Ok(documents)
}

/// The memory of each vault, if there are two: all that the smaller one can use, up to half, and the rest.
fn shares(machine: &MachineArgs, vaults: &[&Named<'_>], held: u64) -> Result<Vec<Option<u64>>, Failure> {
    let [subject, against] = vaults else { return Ok(vec![machine.memory]) };
    let facts = MemoryFacts::detect();
    let budget = machine.memory.unwrap_or_else(|| facts.budget());
    let wants = |named: &Named<'_>, reserved| {
        let mut request = machine.plan();
        (request.memory, request.reserved) = (Some(budget), reserved);
        let plan = plan_vault(&named.vault, &request, &facts)?;
        Ok::<_, Failure>((plan.floor_bytes(), plan.total_bytes()))
    };
    let ((floor_a, a), (floor_b, b)) = (wants(subject, held)?, wants(against, 0)?);
    let fair = if a <= b { a.min(budget / 2) } else { budget - b.min(budget / 2) };
    let a = fair.min(budget.saturating_sub(floor_b)).max(floor_a);
    Ok(vec![Some(a), Some(budget.saturating_sub(a))])
}

/// Scores everything; false if Ctrl-C ended it before.
fn run(
    args: &EvalArgs,
    documents: &Documents,
    (window, overlap): (usize, usize),
    engines: &mut [Engine],
    vaults: &[&Named<'_>],
) -> Result<(Summary, bool), Failure> {
    let lengths = || documents.list.iter().flat_map(|d| windows(d.tokens.len(), window, overlap));
    let total: usize = lengths().map(|w| w.tokens.len()).sum();
    let bar = progress::tokens("evaluating", (total * engines.len()) as u64);
    let mut fidelity = Fidelity::default();
    let mut scorer = Scorer::new(engines, args.top_k, interrupt::fresh(), &bar);
    let mut complete = true;
    'all: for (index, Document { tokens, scored, .. }) in documents.list.iter().enumerate() {
        if !documents.windows_are_documents {
            fidelity.begin();
        }
        for part in windows(tokens.len(), window, overlap) {
            if documents.windows_are_documents {
                fidelity.begin();
            }
            let counts = |i: usize| i >= part.first && scored[i];
            let range = part.tokens.clone();
            let mark: Vec<bool> = range.clone().map(counts).collect();
            match scorer.window(&tokens[range], &mark, &mut fidelity) {
                Err(score::Error::Engine(EngineError::Cancelled)) => {
                    complete = false;
                    break 'all;
                }
                Err(score::Error::Engine(e)) => return Err(e.into()),
                Err(score::Error::NoNumber { model, token }) => {
                    let (name, token) = (vaults[model].name.display(), part.tokens.start + token);
                    let what =
                        format!("{name}: its logits are no numbers, document {}, token {token}", index + 1);
                    return Err(Failure::new(what));
                }
                Ok(()) => bar.set_message(format!("evaluating, perplexity {:.3}", fidelity.nll().exp())),
            }
        }
    }
    bar.finish_and_clear();
    Ok((fidelity.summary(), complete))
}

/// What stands beside the figures.
struct Head<'a> {
    args: &'a EvalArgs,
    documents: &'a Documents,
    window: usize,
    overlap: usize,
    complete: bool,
}

impl Head<'_> {
    fn json(&self, found: &Summary) -> Value {
        let estimate = |e: &Estimate| {
            // JSON has no NaN: an error that cannot be told is null.
            json!({"value": e.value, "standard_error": e.standard_error.is_finite().then_some(e.standard_error)})
        };
        let against = found.against.as_ref().map(|against| {
            json!({
                "vault": self.args.against.as_ref().map(|path| path.display().to_string()),
                "nll": estimate(&against.nll),
                "perplexity": estimate(&against.perplexity),
                "perplexity_ratio": estimate(&against.perplexity_ratio),
                "kl": estimate(&against.kl),
                "kl_largest": against.kl_largest,
                "top_1": estimate(&against.top1),
                "k": self.args.top_k,
                "top_k": estimate(&against.top_k),
            })
        });
        json!({
            "format": "smoe-eval-1",
            "vault": self.args.vault.display().to_string(),
            "text": self.args.text.display().to_string(),
            "answers_only": self.args.answers_only,
            "window": self.window,
            "overlap": self.overlap,
            "complete": self.complete,
            "documents": found.documents,
            "tokens": found.tokens,
            "nll": estimate(&found.nll),
            "perplexity": estimate(&found.perplexity),
            "against": against,
        })
    }

    fn print(&self, found: &Summary) -> Result<(), Failure> {
        let what = if self.args.answers_only { "answer tokens" } else { "tokens" };
        let of = if self.documents.windows_are_documents { "windows" } else { "documents" };
        let stopped = if self.complete { "" } else { ", stopped before the end" };
        say!("text         {} {what} of {} {of}{stopped}", found.tokens, found.documents);
        if found.tokens == 0 {
            return Ok(());
        }
        say!("perplexity   {}", with_error(&found.perplexity, 1.0));
        let Some(Against { perplexity, perplexity_ratio, kl, kl_largest, top1, top_k, .. }) = &found.against
        else {
            return Ok(());
        };
        say!();
        say!("against      {}", self.args.against.as_deref().unwrap_or(Path::new("")).display());
        say!("perplexity   {}", with_error(perplexity, 1.0));
        say!("ratio        {}", with_error(perplexity_ratio, 1.0));
        say!("KL           {} nats a token, at most {kl_largest:.3}", with_error(kl, 1.0));
        say!("top-1        {} % the same", with_error(top1, 100.0));
        say!("top-{:<8} {} % in common", self.args.top_k, with_error(top_k, 100.0));
        Ok(())
    }
}

/// A value and its standard error, as many digits as the error bears.
fn with_error(e: &Estimate, factor: f64) -> String {
    let (value, error) = (factor * e.value, factor * e.standard_error);
    if !error.is_finite() {
        return format!("{value:.4}");
    }
    let places = if error > 0.0 { (1.0 - error.log10().floor()).clamp(2.0, 9.0) as usize } else { 4 };
    format!("{value:.places$} ± {error:.places$}")
}
