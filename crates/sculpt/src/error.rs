//! What can go wrong between a checkpoint and a vault, and what is only worth a warning.

use std::io;
use std::path::{Path, PathBuf};

use smoe_format::FormatError;

use crate::verify::Problem;

/// Why there is no vault (yet).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SculptError {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
    /// There is no checkpoint at this path.
    #[error("{} is no checkpoint: {what}", .path.display())]
    NoCheckpoint {
        /// The path.
        path: PathBuf,
        /// What is missing.
        what: String,
    },
    /// A JSON file does not read.
    #[error("{}: {what}", .path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A key of `config.json` is missing or has a value that this build does not know how to compute.
    #[error("config.json: `{key}` is {found}, this build needs {expected}")]
    Config {
        /// The key, with the key that contains it.
        key: String,
        /// Its value.
        found: String,
        /// What it must be.
        expected: String,
    },
    /// No such model family.
    #[error("config.json: `model_type` is {found}, this build knows {known}")]
    Family {
        /// The value found.
        found: String,
        /// The families there are.
        known: String,
    },
    /// A safetensors header does not read.
    #[error("{}: {what}; download the file again", .file.display())]
    Safetensors {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A safetensors file has another length than its header says.
    #[error(
        "{} has {found} bytes, its header says {expected}; download the file again",
        .file.display()
    )]
    FileLength {
        /// The file.
        file: PathBuf,
        /// Length by its header.
        expected: u64,
        /// Its length.
        found: u64,
    },
    /// The index names files that are not there.
    #[error(
        "{} names {file}, which is missing ({tensors} tensors; {missing} of {shards} files are missing); \
         finish the download",
        .index.display()
    )]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// The first missing file.
        file: String,
        /// Tensors that the index puts into it.
        tensors: usize,
        /// Missing files.
        missing: usize,
        /// Files named.
        shards: usize,
    },
    /// Tensors that the model needs are not in the checkpoint.
    #[error("{count} tensors of the model are missing: {}{}", .examples.join(", "), more(*.count, .examples.len()))]
    MissingTensors {
        /// How many.
        count: usize,
        /// The first few, with what the index says of them.
        examples: Vec<String>,
    },
    /// The config says that there is a head of its own and there is none.
    #[error(
        "the checkpoint has no tensor `{tensor}`, but config.json does not tie it to the embedding; if the \
         model is known to be tied, set `tie_word_embeddings` to true there"
    )]
    MissingHead {
        /// Its name.
        tensor: String,
    },
    /// A tensor has another shape than the config says.
    #[error("tensor `{tensor}` in {} has shape {found:?}, config.json says {expected:?}", .file.display())]
    Shape {
        /// Its name.
        tensor: String,
        /// The file it is in.
        file: PathBuf,
        /// Shape by the config.
        expected: Vec<usize>,
        /// Shape in the file.
        found: Vec<usize>,
    },
    /// A tensor is of a type that this build does not read.
    #[error(
        "tensor `{tensor}` in {} is {found}; this build reads BF16, F16, F32, FP8 in blocks, MXFP4, the codes of \
         MLX, GPTQ and AWQ, and of GGUF Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K and IQ4_NL", .file.display()
    )]
    Dtype {
        /// Its name.
        tensor: String,
        /// The file it is in.
        file: PathBuf,
        /// Its type.
        found: String,
    },
    /// Tensors of the model are of types that this build does not read.
    #[error(
        "weights are of types that this build does not read: {}; it reads BF16, F16, F32, FP8 in blocks, MXFP4, the \
         codes of MLX, GPTQ and AWQ, and of GGUF Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL and MXFP4: take \
         a file of those (a Q4_K_M, Q5_K_M, Q6_K or Q8_0 has no others), or the checkpoint that it was made of",
        .types.join(", ")
    )]
    Types {
        /// Each with how many there are, and one of them.
        types: Vec<String>,
    },
    /// A packed tensor's parts are missing or contradict each other.
    #[error("tensor `{tensor}` in {}: {what}", .file.display())]
    Packed {
        /// Its name.
        tensor: String,
        /// The file it is in.
        file: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A GGUF file's header does not read, or contradicts itself or the file.
    #[error("{}: at byte {at}: {what}", .file.display())]
    Gguf {
        /// The file.
        file: PathBuf,
        /// Where.
        at: u64,
        /// What is wrong.
        what: String,
    },
    /// A GGUF file's metadata lack a key, or it has a value that this build does not know what to do with.
    #[error("{}: `{key}` is {found}, this build needs {expected}", .file.display())]
    Metadata {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What it must be.
        expected: String,
    },
    /// A model without experts.
    #[error(
        "{} is a dense model ({architecture}): it has no experts. A vault is made for models of which a token \
         needs a few experts only; a dense one needs all of its weights for every token, and is better run from \
         memory", .file.display()
    )]
    Dense {
        /// The file.
        file: PathBuf,
        /// Its architecture.
        architecture: String,
    },
    /// No `tokenizer.json` can be made.
    #[error("{}: {what}; name a directory that has the model's tokenizer.json with --tokenizer", .file.display())]
    Tokenizer {
        /// The file.
        file: PathBuf,
        /// Why not.
        what: String,
    },
    /// A tensor would not be kept as it is, and that was asked for.
    #[error(
        "tensor `{tensor}` is {form}: {what}, so that no vault holds it without loss (leave --lossless out)"
    )]
    Lossy {
        /// Its name.
        tensor: String,
        /// Its type.
        form: &'static str,
        /// What does not fit.
        what: &'static str,
    },
    /// A tensor is in two files and no index decides.
    #[error("tensor `{tensor}` is in {first} and in {second}, and the index does not say which counts")]
    Ambiguous {
        /// Its name.
        tensor: String,
        /// A file it is in.
        first: String,
        /// Another.
        second: String,
    },
    /// A weight cannot be coded.
    #[error(
        "tensor `{tensor}` has the weight {found}, which no 16-bit scale reaches; keep it as it is with \
         {flag}"
    )]
    Range {
        /// Its name.
        tensor: String,
        /// The weight.
        found: f32,
        /// The setting that avoids coding it.
        flag: &'static str,
    },
    /// A setting has a value that cannot be.
    #[error("{flag} {found}: {expected}")]
    Setting {
        /// The setting's flag.
        flag: &'static str,
        /// Its value.
        found: String,
        /// What it must be.
        expected: String,
    },
    /// The format refuses.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A file of a vault does not read.
    #[error("{}: {source}", .path.display())]
    Vault {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: FormatError,
    },
    /// There is a vault of another checkpoint or other settings under this name.
    #[error(
        "{} is a vault of {what} (it has {found}; asked for {expected}); choose another name, or replace it \
         with --force", .vault.display()
    )]
    OtherVault {
        /// Its directory.
        vault: PathBuf,
        /// In what it differs.
        what: &'static str,
        /// What it was made from or with.
        found: String,
        /// What was asked for.
        expected: String,
    },
    /// The vault under this name is damaged.
    #[error("{} is a damaged vault ({what}); replace it with --force", .vault.display())]
    DamagedVault {
        /// Its directory.
        vault: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// Something that is no vault has the name.
    #[error("{} exists and is no vault; choose another name", .path.display())]
    NotAVault {
        /// The path.
        path: PathBuf,
    },
    /// The unfinished work beside the vault is of another checkpoint or other settings.
    #[error(
        "{} holds unfinished work for {what} ({found}; asked for {expected}); finish it with its own flags, \
         or start afresh with --force", .partial.display()
    )]
    OtherPartial {
        /// Its directory.
        partial: PathBuf,
        /// In what it differs.
        what: &'static str,
        /// What it is made from or with.
        found: String,
        /// What was asked for.
        expected: String,
    },
    /// Unfinished work holds a file that a sculpt does not write.
    #[error("{} is no part of a vault; remove it and run again", .path.display())]
    Stranger {
        /// The file.
        path: PathBuf,
    },
    /// The vault's name leads elsewhere.
    #[error("{}: {what}", .vault.display())]
    Place {
        /// The vault.
        vault: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// Another process is making this vault.
    #[error("another smoe sculpt is at work in {}; wait for it or stop it", .partial.display())]
    Busy {
        /// The directory of its unfinished work.
        partial: PathBuf,
    },
    /// The disk is too full.
    #[error(
        "{} has {available} bytes free, {needed} are needed; free {} bytes or choose another disk",
        .path.display(), .needed.saturating_sub(*.available)
    )]
    Space {
        /// A directory on that disk.
        path: PathBuf,
        /// Bytes needed, a reserve included.
        needed: u64,
        /// Bytes free.
        available: u64,
    },
    /// A file of the checkpoint changed under our hands.
    #[error("{} changed while it was being read; run again", .path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The caller asked to stop; the work so far is kept.
    #[error(
        "stopped with {done} of {total} bytes written; the same command goes on from {}", .partial.display()
    )]
    Cancelled {
        /// Where the work so far is.
        partial: PathBuf,
        /// Bytes of finished pieces.
        done: u64,
        /// Bytes of all pieces.
        total: u64,
    },
    /// The caller asked to stop an operation that leaves nothing behind.
    #[error("stopped")]
    Stopped,
    /// What was written does not read back.
    #[error(
        "{} does not read back as written: {}{}; run again to mend it, and suspect the disk",
        .path.display(), .problems[0], more(.problems.len(), 1)
    )]
    ReadBack {
        /// The directory.
        path: PathBuf,
        /// Everything that is wrong; never empty.
        problems: Vec<Problem>,
    },
    /// Statistics that cannot be used.
    #[error("{} {what}", .path.display())]
    Statistics {
        /// The directory, or a file in it.
        path: PathBuf,
        /// What is wrong, and what to do.
        what: String,
    },
    /// An original vault cannot be compared with this checkpoint.
    #[error("{} cannot be compared: {what}", .path.display())]
    Incomparable {
        /// The vault.
        path: PathBuf,
        /// Why not.
        what: String,
    },
}

impl SculptError {
    /// Wraps an I/O error with what was tried; for use in `map_err`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }

    pub(crate) fn json(path: &Path) -> impl FnOnce(serde_json::Error) -> Self {
        move |e| Self::Json { path: path.to_owned(), what: e.to_string() }
    }
}

fn more(count: usize, shown: usize) -> String {
    if count > shown { format!(" and {} more", count - shown) } else { String::new() }
}

/// Something odd about a checkpoint that does not stop the work; each says how it was decided.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Warning {
    /// A file of the checkpoint that a vault has no place for.
    #[error("{name} does not travel with a vault; the checkpoint's other templates do")]
    LeftOut {
        /// Its name.
        name: String,
    },
    /// A key is missing and the reference's default counts.
    #[error("config.json has no `{key}`; the reference's default {default} is used")]
    Default {
        /// The key.
        key: &'static str,
        /// The value used.
        default: String,
    },
    /// Two places of the config say different things.
    #[error("config.json: {what}; as in the reference, {used} counts")]
    Contradiction {
        /// Both.
        what: String,
        /// Which counts.
        used: String,
    },
    /// Tied, and a head of its own is shipped with the embedding's values.
    #[error("config.json ties `{tensor}` to the embedding and the checkpoint ships one equal to it: tied")]
    EqualHead {
        /// The head's name.
        tensor: String,
    },
    /// Tied, and a different head is shipped.
    #[error(
        "config.json ties `{tensor}` to the embedding, but the checkpoint ships one that differs from it; as \
         in the reference the shipped head is used (set `tie_word_embeddings` to false to say so)"
    )]
    DifferentHead {
        /// The head's name.
        tensor: String,
    },
    /// Tied, and only the head is shipped.
    #[error("the checkpoint has no `{embed}`; as in the reference its tied `{head}` is used")]
    EmbeddingFromHead {
        /// The embedding's name.
        embed: String,
        /// The head's name.
        head: String,
    },
    /// A key asks for something that nothing depends on.
    #[error("`{what}`: layers that guess further tokens are left out; the model is the same without them")]
    Ignored {
        /// The key.
        what: &'static str,
    },
    /// The checkpoint has a part for images too.
    #[error("`{what}`: the part that sees images is left out; text is answered as without it")]
    Vision {
        /// The key.
        what: &'static str,
    },
    /// Tensors that the model has no use for.
    #[error("{count} tensors of the checkpoint are not part of the model and are left out: {}", .examples.join(", "))]
    ExtraTensors {
        /// How many.
        count: usize,
        /// The first few.
        examples: Vec<String>,
    },
    /// `model.safetensors` and an index are both there.
    #[error("both {used} and {ignored} are there; as in the reference {used} counts")]
    TwoForms {
        /// The one read.
        used: String,
        /// The other.
        ignored: String,
    },
    /// A tensor is not in the file that the index names.
    #[error("the index puts `{tensor}` into {named}, it is in {found}; that one is used")]
    Misplaced {
        /// Its name.
        tensor: String,
        /// File by the index.
        named: String,
        /// File that has it.
        found: String,
    },
    /// A tensor is in two files.
    #[error("`{tensor}` is in {used} and in {ignored}; the index says that {used} counts")]
    Duplicate {
        /// Its name.
        tensor: String,
        /// The file that counts.
        used: String,
        /// The other.
        ignored: String,
    },
    /// The embedding has more rows than the tokenizer has tokens.
    #[error(
        "the embedding has {rows} rows, the tokenizer {tokens} tokens; the rows above are kept, their ids \
         have no text"
    )]
    RowsWithoutTokens {
        /// Rows of the embedding.
        rows: usize,
        /// Tokens.
        tokens: usize,
    },
    /// The tokenizer has more tokens than the embedding has rows.
    #[error(
        "the tokenizer has {tokens} tokens, the embedding only {rows} rows; text that needs the tokens \
         above cannot be read by the model"
    )]
    TokensWithoutRows {
        /// Rows of the embedding.
        rows: usize,
        /// Tokens.
        tokens: usize,
    },
    /// `tokenizer.json` could not be understood.
    #[error("tokenizer.json is copied but could not be checked: {what}")]
    Tokenizer {
        /// Why not.
        what: String,
    },
    /// A piece of unfinished work was damaged and is done again.
    #[error("{what} of the unfinished work is damaged and is done again")]
    Redone {
        /// Which piece.
        what: String,
    },
    /// Something of the old vault was left.
    #[error("{} holds files that are no part of the replaced vault; they were left there", .path.display())]
    LeftBehind {
        /// The directory.
        path: PathBuf,
    },
}
