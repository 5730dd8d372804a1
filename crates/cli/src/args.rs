//! The command line: what was typed, and its help.

mod values;

use std::path::PathBuf;

use clap::builder::TypedValueParser as _;
use clap::{Args, Parser, Subcommand, ValueEnum};
use smoe_engine::plan::{PlanRequest, RingSize};
use smoe_engine::{DeviceChoice, EngineOptions, ExpertPath, KvType, Sampling};
use smoe_text::GenerationDefaults;

pub use values::AutoNumber;
use values::{RingShare, parse_auto, parse_bias, parse_kv, parse_ring, parse_ring_share, parse_size};

/// Runs Mixture-of-Experts language models that are larger than memory.
///
/// Wherever a VAULT is named, a vault directory, an original .smoe file (its .scout.safetensors beside it) or
/// the word `demo` serves.
#[derive(Debug, Parser)]
#[command(name = "smoe", version, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// A command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer one prompt: text to stdout, figures to stderr
    Run(RunArgs),
    /// Talk, turn by turn
    Chat(ChatArgs),
    /// Serve vaults: OpenAI's, Anthropic's and Ollama's API, and a web console
    Serve(ServeArgs),
    /// Try the bundled demo model: chat at a terminal, a sample answer otherwise
    Demo(DemoArgs),
    /// Turn a Hugging Face checkpoint into a vault
    Sculpt(SculptArgs),
    /// Make a vault of a checkpoint on a hub while it is downloaded, file by file; --dry-run says what the disk holds
    ///
    /// The vault is the one that `smoe sculpt` makes of the checkpoint. Only what needs all of its weights at once
    /// cannot be had: --validate, --measure-error, and `smoe calibrate` of a checkpoint. Statistics for --calibration
    /// are made with a vault of the same checkpoint, say of 8 bits.
    Pull(PullArgs),
    /// See what a model's experts see of a text, for a vault of few bits (sculpt --calibration)
    Calibrate(CalibrateArgs),
    /// Make a vault of a real model's shape with random weights, to measure a machine without a download
    Synth(SynthArgs),
    /// Show what a vault will hold in memory, before anything is loaded
    Plan(PlanArgs),
    /// Show what is in a vault
    Inspect(InspectArgs),
    /// Check every byte of a vault
    Verify(VerifyArgs),
    /// Write logits, hidden states and router logits of a prompt to a safetensors file
    Probe(ProbeArgs),
    /// Measure how well a vault predicts a text, and how faithful it is to another vault
    Eval(EvalArgs),
    /// List the GPUs, and why some cannot be used
    Devices(DevicesArgs),
    /// Check a device's kernels against the processor's, and a whole model
    Selftest(SelftestArgs),
    /// Measure a vault on this machine, against what its disk and memory can do
    Bench(BenchArgs),
    /// Record how tokens are routed, and score cache policies on it
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Render a chat template for the conversation (JSON) on stdin
    Template(TemplateArgs),
}

/// How much memory, how many threads.
#[derive(Debug, Default, Clone, Args)]
#[command(next_help_heading = "Machine")]
pub struct MachineArgs {
    /// Memory that smoe may use, such as 12G [default: what the machine or its cgroup leaves free]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// Expert cache: auto, a number of experts, or a size such as 4G
    #[arg(long, value_name = "N|SIZE", default_value = "auto", value_parser = parse_ring)]
    pub ring: RingSize,
    /// Positions of a conversation: auto or a number
    #[arg(long, value_name = "N", default_value = "auto", value_parser = parse_auto)]
    pub context: AutoNumber,
    /// Compute threads [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Prompt tokens computed at once [default: as the memory plan allows]
    #[arg(long, value_name = "N")]
    pub chunk: Option<usize>,
    /// How keys and values are kept: f32, f16 or q8 [default: f16, f32 for 16-bit vaults]
    #[arg(long, value_name = "TYPE", value_parser = parse_kv)]
    pub kv: Option<KvType>,
    /// Expert reads in flight at once [default: 4 for records of some MB, more for smaller ones]
    #[arg(long, value_name = "N")]
    pub readers: Option<usize>,
    /// When decoding, read ahead so many experts of the next layer, as its router ranks them early: a number, 0 is
    /// off, or auto: as many as prove worth it
    #[arg(long, value_name = "N", default_value = "auto", value_parser = parse_auto)]
    pub look_ahead: AutoNumber,
    /// When decoding, read ahead so many experts of each layer that the last token ranked next; 0 is off
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub spec: usize,
    /// Multiply coded weights with f32 activations: slower, the definition
    #[arg(long)]
    pub exact: bool,
    /// Do not check the checksum of every record that is read
    #[arg(long)]
    pub no_checksums: bool,
    /// What computes: cpu, gpu, a part of a GPU's name, cuda (an NVIDIA card that holds the whole model), or auto (a
    /// hardware GPU if it can run the model)
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: DeviceChoice,
    /// The GPU's memory that smoe may use [default: nearly all]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub vram: Option<u64>,
    /// The most experts of a layer in the GPU's memory [default: as many as fit]
    #[arg(long, value_name = "N")]
    pub device_experts: Option<usize>,
    /// How experts come to the GPU: staging (copied by the processor), import (copied by the GPU from the ring), zero-copy (and
    /// what it lacks read over the bus, if the ring holds every expert), in-place (read where the ring has them), or auto: in-place
    /// if it shares the processor's memory, else zero-copy if the bus is fast enough, else import
    #[arg(long, value_name = "WAY", default_value = "auto")]
    pub device_path: ExpertPath,
}

impl MachineArgs {
    /// The plan request for one conversation.
    pub fn plan(&self) -> PlanRequest {
        PlanRequest {
            memory: self.memory,
            ring: self.ring,
            context: self.context.0,
            chunk: self.chunk,
            threads: self.threads,
            kv: self.kv,
            ..PlanRequest::default()
        }
    }

    /// The engine's options; kernels from `SMOE_KERNELS`.
    pub fn options(&self) -> EngineOptions {
        EngineOptions {
            plan: self.plan(),
            exact: self.exact,
            kernels: std::env::var("SMOE_KERNELS").ok().filter(|name| !name.is_empty()),
            verify: !self.no_checksums,
            readers: self.readers,
            look_ahead: self.look_ahead.0,
            spec: self.spec,
            device: self.device.clone(),
            vram: self.vram,
            device_slots: self.device_experts,
            device_path: self.device_path,
            ..EngineOptions::default()
        }
    }
}

/// How to choose tokens; what is not given comes from the model's generation_config.json.
#[derive(Debug, Default, Clone, Args)]
#[command(next_help_heading = "Sampling (unset: the model's own generation_config.json)")]
pub struct SamplingArgs {
    /// 0 is greedy
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Keep the K likeliest tokens; 0 keeps all
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Keep the likeliest tokens that together reach this probability
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Keep tokens at least this likely, relative to the likeliest
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Make tokens of prompt and answer less likely; 1 is off
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens in the answer
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_hyphen_values = true)]
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens in the answer, once per occurrence
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_hyphen_values = true)]
    pub frequency_penalty: f32,
    /// Add BIAS to the logit of a token: ID=BIAS, may be repeated
    #[arg(long, value_name = "ID=BIAS", value_parser = parse_bias, allow_hyphen_values = true)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the draws; the same seed repeats an answer
    #[arg(long, value_name = "N", default_value_t = 1337)]
    pub seed: u64,
}

impl SamplingArgs {
    /// The settings, with the model's own defaults for what was not given.
    pub fn settings(&self, model: &GenerationDefaults) -> Sampling {
        // A model that says `do_sample: false` is greedy unless asked otherwise, one that says true has the
        // reference's default temperature, and one that says neither has what temperature it names.
        let temperature = match model.do_sample {
            Some(false) => 0.0,
            Some(true) => model.temperature.unwrap_or(1.0),
            None => model.temperature.unwrap_or(0.0),
        };
        Sampling {
            temperature: self.temperature.unwrap_or(temperature),
            top_k: self.top_k.or(model.top_k.map(|k| k as usize)).unwrap_or(0),
            top_p: self.top_p.or(model.top_p).unwrap_or(1.0),
            min_p: self.min_p.or(model.min_p).unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.or(model.repetition_penalty).unwrap_or(1.0),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.clone(),
            seed: self.seed,
        }
    }
}

/// How a reading is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum InstrumentForm {
    /// For people
    Table,
    /// One object on one line
    Json,
}

/// What is shown of the engine at work.
#[derive(Debug, Default, Clone, Args)]
#[command(next_help_heading = "Instrument")]
pub struct InstrumentArgs {
    /// After an answer, show where its time went and how the expert cache fared; =json for one line of JSON
    #[arg(
        long,
        value_name = "FORM",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "table",
        value_enum,
        hide_possible_values = true
    )]
    pub instrument: Option<InstrumentForm>,
    /// At the end, write a page about the whole run: time, hit rate over ring size, use of experts
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
}

/// What is asked.
#[derive(Debug, Default, Clone, Args)]
pub struct PromptArgs {
    /// The prompt; read from stdin if neither it nor --tokens-in is given
    pub prompt: Option<String>,
    /// The prompt as token ids, used as they are
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', conflicts_with = "prompt")]
    pub tokens_in: Option<Vec<u32>>,
    /// Instructions for the model, before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "tokens_in")]
    pub system: Option<String>,
    /// Continue the prompt as it stands, without the model's chat template
    #[arg(long)]
    pub no_template: bool,
}

/// `smoe run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The vault
    pub vault: PathBuf,
    #[command(flatten)]
    pub prompt: PromptArgs,
    /// Print the ids of the new tokens alone, separated by spaces, an end token included
    #[arg(long)]
    pub raw_ids: bool,
    /// The most new tokens
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub max_tokens: usize,
    /// End when this text appears; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Go on past end tokens
    #[arg(long)]
    pub ignore_eos: bool,
    #[command(flatten)]
    pub instrument: InstrumentArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub machine: MachineArgs,
}

/// `smoe chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// The vault
    #[arg(required_unless_present = "connect")]
    pub vault: Option<PathBuf>,
    /// Instead of a vault, a server that runs: its address, such as localhost:8000
    #[arg(
        long,
        value_name = "URL",
        conflicts_with_all = ["vault", "panel", "instrument", "report", "memory", "ring", "context", "threads",
            "chunk", "kv", "readers", "look_ahead", "spec", "exact", "no_checksums", "device", "vram",
            "device_experts", "device_path"]
    )]
    pub connect: Option<String>,
    /// With --connect, which of the server's models [default: the one that is loaded, or its first]
    #[arg(long, value_name = "NAME", conflicts_with = "vault")]
    pub model: Option<String>,
    /// With --connect, the server's key [default: $SMOE_API_KEY, or $OPENAI_API_KEY]
    #[arg(long, value_name = "KEY", conflicts_with = "vault")]
    pub api_key: Option<String>,
    /// Instructions for the model
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// The most tokens of an answer [default: 4096; with --connect, what the server allows]
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Show answers as the model writes them: no markdown, reasoning not set apart
    #[arg(long)]
    pub plain: bool,
    /// Fill the screen: the conversation, and beside it the engine at work
    #[arg(long, conflicts_with = "instrument")]
    pub panel: bool,
    #[command(flatten)]
    pub instrument: InstrumentArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub machine: MachineArgs,
}

/// `smoe demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// At a terminal, fill the screen: the conversation, and beside it the engine at work
    #[arg(long, conflicts_with = "instrument")]
    pub panel: bool,
    #[command(flatten)]
    pub instrument: InstrumentArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub machine: MachineArgs,
}

/// `smoe sculpt`.
#[derive(Debug, Args)]
pub struct SculptArgs {
    /// A checkpoint: a directory with config.json and safetensors, or a GGUF file (of a split one any part), or its
    /// directory
    pub checkpoint: PathBuf,
    /// Where the vault goes
    pub vault: Option<PathBuf>,
    #[command(flatten)]
    pub how: SculptHow,
    /// Check the vault against the checkpoint once more, tensor by tensor
    #[arg(long)]
    pub validate: bool,
    /// Show the error of the coded weights, per kind of tensor
    #[arg(long)]
    pub measure_error: bool,
}

/// `smoe pull`.
#[derive(Debug, Args)]
pub struct PullArgs {
    /// A repository: OWNER/NAME
    pub repo: String,
    /// Where the vault goes [default: NAME, here]
    pub vault: Option<PathBuf>,
    /// A branch, a tag or a commit
    #[arg(long, value_name = "REVISION", default_value = "main")]
    pub revision: String,
    /// A GGUF file of the repository (of a split one any part)
    #[arg(long, value_name = "NAME.gguf")]
    pub file: Option<String>,
    #[command(flatten)]
    pub how: SculptHow,
    // Sculpt's, refused with a reason.
    #[arg(long, hide = true)]
    pub validate: bool,
    #[arg(long, hide = true)]
    pub measure_error: bool,
}

/// How a vault is made of a checkpoint.
#[derive(Debug, Args)]
pub struct SculptHow {
    /// Bits of a routed expert's weight: 2, 3, 4, 5, 6, 8, or 16 for the checkpoint's own numbers [default: 4; of a
    /// quantised checkpoint, its own codes]
    #[arg(long, value_name = "BITS")]
    pub bits: Option<u8>,
    /// Instead, a budget of bits per routed expert's weight, scales included, such as 3.25: down gets more than gate
    /// and up, as far as it goes. With --entropy about what records take on the disk, 1.5 to 3.9 [default there: 3.25;
    /// with --bits 4, and of a quantised checkpoint, what their codes take]
    #[arg(long, value_name = "BITS", conflicts_with = "bits")]
    pub bpw: Option<smoe_sculpt::BitsPerWeight>,
    /// Weights that share a scale: 32, 64 or 128 [default: 64; 128 with --entropy and a budget]
    #[arg(long, value_name = "N")]
    pub group: Option<usize>,
    /// Entropy-code the experts: fewer bytes to read for the same model, decoded on their way into memory, where
    /// they are 4-bit codes
    #[arg(long)]
    pub entropy: bool,
    /// Everything else: bf16 (as it was), q8, q6, q5 or q4 [default: q8; of a quantised checkpoint, its own codes]
    #[arg(long, value_name = "BITS")]
    pub backbone: Option<smoe_sculpt::BackboneBits>,
    /// How scales are found: searched (least error) or absmax (the largest weight's, as the original does)
    #[arg(long, value_name = "RECIPE", default_value = "searched")]
    pub recipe: smoe_sculpt::Recipe,
    /// What codes of 2 to 4 bits stand for: fitted (a table of levels made for this model) or uniform
    #[arg(long, value_name = "LEVELS", default_value = "fitted")]
    pub levels: smoe_sculpt::Levels,
    /// What the experts see, from `smoe calibrate`: errors are then made up for where it is seen least
    #[arg(long, value_name = "STATS")]
    pub calibration: Option<PathBuf>,
    /// Keep every weight as it is, to the bit, or make no vault
    #[arg(long)]
    pub lossless: bool,
    /// Take tokenizer and chat template from this directory
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Show topology, sizes and what it will need, and write nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Keep only the first N layers
    #[arg(long, value_name = "N")]
    pub max_layers: Option<usize>,
    /// Keep only the first N experts of each layer
    #[arg(long, value_name = "N")]
    pub max_experts: Option<usize>,
    /// Replace a vault or partial work made with other settings
    #[arg(long)]
    pub force: bool,
    /// Worker threads [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Print what --dry-run (and of sculpt --measure-error) finds as JSON
    #[arg(long)]
    pub json: bool,
}

/// `smoe calibrate`.
#[derive(Debug, Args)]
pub struct CalibrateArgs {
    /// A vault, 8 bits or more if possible; or a checkpoint, which is then sculpted for the time being
    pub model: PathBuf,
    /// Plain text, or conversations: lines of {"messages": [...]}
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    /// Directory of the statistics [default: MODEL.stats here]; what an interrupted run left there is gone on with
    #[arg(short, long, value_name = "STATS")]
    pub out: Option<PathBuf>,
    /// Count only what predicts an assistant's words
    #[arg(long)]
    pub answers_only: bool,
    /// Memory for model and statistics; the less, the more often the text is read [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// Read at most so many tokens
    #[arg(long, value_name = "N", default_value_t = 262_144)]
    pub max_tokens: usize,
    /// Threads [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Print what was made as JSON
    #[arg(long)]
    pub json: bool,
}

/// Codes of synthetic experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertBits {
    Mxfp4,
    Uniform(u8),
}

fn parse_expert_bits(s: &str) -> Result<ExpertBits, String> {
    match s.parse() {
        Ok(bits @ (2..=6 | 8 | 16)) => Ok(ExpertBits::Uniform(bits)),
        _ if s == "mxfp4" => Ok(ExpertBits::Mxfp4),
        _ => Err("must be 2, 3, 4, 5, 6, 8, 16 or mxfp4".to_owned()),
    }
}

/// `smoe synth`.
#[derive(Debug, Args)]
pub struct SynthArgs {
    /// Where the vault goes
    pub vault: PathBuf,
    /// Whose shape: a name such as qwen3-30b-a3b (a wrong one lists them all), or a config.json
    #[arg(long, value_name = "SHAPE")]
    pub like: String,
    /// Vault or checkpoint whose tokenizer, templates and generation settings come along: to talk to, or to serve
    #[arg(long, value_name = "DIR")]
    pub text: Option<PathBuf>,
    /// Only the first N layers
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,
    /// Write the experts of N layers only; the others have the same ones, by turns
    #[arg(long, value_name = "N")]
    pub unique_layers: Option<usize>,
    /// Bits of a routed expert's weight: 2, 3, 4, 5, 6, 8 or 16, or mxfp4 (4-bit floats in groups of 32) [default: mxfp4
    /// where the model is published so, as GPT-OSS is, else 4]
    #[arg(long, value_name = "BITS", value_parser = parse_expert_bits)]
    pub bits: Option<ExpertBits>,
    /// Weights that share a scale: 32, 64 or 128 [default: 64; mxfp4 has 32]
    #[arg(long, value_name = "N")]
    pub group: Option<usize>,
    /// Everything else: bf16, q8, q6, q5 or q4
    #[arg(long, value_name = "BITS", default_value = "q8")]
    pub backbone: smoe_sculpt::BackboneBits,
    /// Share of a token's experts that the token before it had too, to within 0.03; refused where the shape cannot have it
    /// [default: 0.46, or as near as can be]
    #[arg(long, value_name = "X")]
    pub overlap: Option<f64>,
    /// Share of choices that falls on the busiest tenth of a layer's experts, likewise; 0.1 is even [default: 0.3, or as
    /// near as can be]
    #[arg(long, value_name = "X")]
    pub skew: Option<f64>,
    /// Seed of the weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Replace a vault that was made otherwise
    #[arg(long)]
    pub force: bool,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// `smoe plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The vault
    pub vault: PathBuf,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub machine: MachineArgs,
}

/// `smoe inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// The vault
    pub vault: PathBuf,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// `smoe verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The vault
    pub vault: PathBuf,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// `smoe probe`.
#[derive(Debug, Args)]
pub struct ProbeArgs {
    /// The vault
    pub vault: PathBuf,
    /// The prompt as token ids
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', required = true)]
    pub tokens_in: Vec<u32>,
    /// Where to write: tensors `logits`, `hidden` and `router`
    #[arg(long, value_name = "FILE.safetensors")]
    pub out: PathBuf,
    #[command(flatten)]
    pub machine: MachineArgs,
}

/// `smoe eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    /// The vault
    pub vault: PathBuf,
    /// A plain text, or JSON lines (.jsonl) with `messages` or `text`, each line a document
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    /// The vault that is the reference: KL divergence from it, agreement with it
    #[arg(long, value_name = "VAULT2")]
    pub against: Option<PathBuf>,
    /// Score only what the assistant says in `messages`
    #[arg(long)]
    pub answers_only: bool,
    /// Score no more than so many tokens
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..).map(|n| n as usize))]
    pub max_tokens: Option<usize>,
    /// Tokens computed with each other; longer documents are cut [default: 2048, or the context]
    #[arg(long, value_name = "N")]
    pub window: Option<usize>,
    /// Tokens that a window has in common with the one before: the least context of a scored token [default: half]
    #[arg(long, value_name = "N")]
    pub overlap: Option<usize>,
    /// Likeliest tokens compared with the reference's
    #[arg(long, value_name = "K", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=64).map(|n| n as usize))]
    pub top_k: usize,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub machine: MachineArgs,
}

/// `smoe bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The vault
    pub vault: Option<PathBuf>,
    /// Measure a disk alone: a large file on it, or a vault
    #[arg(long, value_name = "FILE")]
    pub disk: Option<PathBuf>,
    /// Measure the kernels alone
    #[arg(long)]
    pub kernels: bool,
    /// Repeat everything so many times; figures are medians
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub runs: usize,
    /// Instead, so many conversations decoding together, in turns, such as 1,2,4,8
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=256))]
    pub clients: Vec<u16>,
    /// Seed of the token ids
    #[arg(long, value_name = "N", default_value_t = 1337)]
    pub seed: u64,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Also write the record to a file
    #[arg(long, value_name = "FILE.json")]
    pub out: Option<PathBuf>,
    /// Show the figures beside those of an older record
    #[arg(long, value_name = "OLD.json")]
    pub compare: Option<PathBuf>,
    #[command(flatten)]
    pub machine: MachineArgs,
}

/// `smoe devices`.
#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// `smoe selftest`.
#[derive(Debug, Args)]
pub struct SelftestArgs {
    /// What is tested: auto (a hardware GPU), gpu (any, also one that a program plays), a part of its name, or cuda
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceChoice,
    /// The model to be run
    #[arg(long, value_name = "VAULT", default_value = "demo")]
    pub vault: PathBuf,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// `smoe serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Vaults, or directories of them; the first one is loaded first
    #[arg(required = true)]
    pub paths: Vec<PathBuf>,
    /// Address to listen on; 0.0.0.0 is every one of this machine
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8000)]
    pub port: u16,
    /// Key that clients must send [default: any is accepted]
    #[arg(long, value_name = "KEY", env = "SMOE_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Let pages of other origins use the server
    #[arg(long)]
    pub cors: bool,
    /// Conversations answered at once; fewer on a small ring
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub parallel: u16,
    /// Requests that wait; more are told to come again
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub queue: usize,
    /// Vaults loaded at once, as far as memory allows
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub resident: usize,
    /// Memory for keys and values, in contexts that conversations share
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub kv_contexts: usize,
    /// Directory of the files in which conversations are remembered, or `off` [default: the user's cache]
    #[arg(long, value_name = "DIR|off")]
    pub kv_cache: Option<PathBuf>,
    /// The most that such a file may take
    #[arg(long, value_name = "SIZE", default_value = "4G", value_parser = parse_size)]
    pub kv_cache_size: u64,
    /// The longest wait for a token that is aimed at while a prompt is computed, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 500)]
    pub stall: u64,
    /// Do not guess tokens ahead
    #[arg(long)]
    pub no_speculation: bool,
    /// Log every request, not only what goes wrong
    #[arg(long, short)]
    pub verbose: bool,
    /// Each time all answers are over, show on stderr where the time went since the last time; =json for a line of JSON
    #[arg(
        long,
        value_name = "FORM",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "table",
        value_enum,
        hide_possible_values = true
    )]
    pub instrument: Option<InstrumentForm>,
    #[command(flatten)]
    pub machine: MachineArgs,
}

/// `smoe trace`.
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Write down which experts every token is routed to
    Record(Box<TraceRecordArgs>),
    /// Score eviction policies and ring sizes on a recorded trace, without a disk
    Replay(TraceReplayArgs),
}

/// `smoe trace record`.
#[derive(Debug, Args)]
pub struct TraceRecordArgs {
    /// The vault
    pub vault: PathBuf,
    #[command(flatten)]
    pub prompt: PromptArgs,
    /// Instead of a prompt, so many random tokens, one by one
    #[arg(long, value_name = "N", conflicts_with_all = ["prompt", "tokens_in", "system", "no_template"])]
    pub random: Option<usize>,
    /// Where the trace goes
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// The most tokens answered to a prompt
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_tokens: usize,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub machine: MachineArgs,
}

/// `smoe trace replay`.
#[derive(Debug, Args)]
pub struct TraceReplayArgs {
    /// The trace
    pub trace: PathBuf,
    /// Sizes of the ring: shares of all experts, or numbers of experts
    #[arg(
        long,
        value_name = "5%,10%,200",
        value_delimiter = ',',
        default_value = "5%,10%,20%,30%,40%,50%,75%",
        value_parser = parse_ring_share
    )]
    pub ring: Vec<RingShare>,
    /// Policies by name, or all; the best that any could do stands below them
    #[arg(long, value_name = "lru,...|all", value_delimiter = ',', default_value = "all")]
    pub policy: Vec<String>,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// `smoe template`.
#[derive(Debug, Args)]
pub struct TemplateArgs {
    /// A Jinja chat template
    pub file: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_is_not_given_comes_from_the_model() {
        let mut model = GenerationDefaults::default();
        (model.temperature, model.top_k) = (Some(0.6), Some(20));
        let settings = SamplingArgs::default().settings(&model);
        assert_eq!((settings.temperature, settings.top_k), (0.6, 20));
        model.do_sample = Some(false);
        assert_eq!(SamplingArgs::default().settings(&model).temperature, 0.0);
        (model.do_sample, model.temperature) = (Some(true), None);
        assert_eq!(SamplingArgs::default().settings(&model).temperature, 1.0);
        let given = SamplingArgs { temperature: Some(0.0), ..Default::default() };
        assert_eq!(given.settings(&model).temperature, 0.0);
    }
}
