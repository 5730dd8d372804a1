//! Damaged and hostile GGUF files: each is sculpted to a whole vault, or refused, and then there is none.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use smoe_sculpt::{Settings, sculpt, verify};
use smoe_testkit::TinyModel;
use smoe_testkit::fixtures::{OWN, fixture};
use smoe_testkit::gguf::{self, Gguf, Meta};
use smoe_testkit::random::Random;
use smoe_testkit::tiny::CheckpointOptions;

use super::corpus::Files;
use crate::Result;

/// Parts of the split file, of which the first has metadata only.
const PARTS: usize = 3;
/// No file grows beyond this.
const MAX_FILE: usize = 4 << 20;

/// A sound checkpoint.
pub struct Source {
    name: String,
    file: Gguf,
    split: bool,
}

/// A mutated one.
pub struct Mutant {
    pub files: Files,
    /// The one that is named.
    pub path: String,
    /// For people.
    pub what: String,
}

/// Makes the checkpoints, in `root` for the time being: grouped queries with a vocabulary, whole and split; linear
/// attention; latent attention with an indexer.
pub fn sources(root: &Path) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    for (family, split) in [("qwen3", false), ("qwen3", true), ("qwen3_next", false), ("glm_moe_dsa", false)]
    {
        let made = root.join("gguf-of");
        let dir = if OWN.contains(&family) {
            fixture(family).ok_or("a fixture of this repository is absent")?
        } else {
            fs::create_dir(&made)?;
            TinyModel::qwen3(7).write_checkpoint(&made, CheckpointOptions::default());
            made.clone()
        };
        let (config, tensors) = gguf::load(&dir);
        if dir == made {
            fs::remove_dir_all(&made)?;
        }
        let mut file = gguf::of_checkpoint(&config, &tensors, true);
        let vocab_size = config["vocab_size"].as_u64().ok_or("a config without vocab_size")?;
        let tokens: Vec<String> = (0..vocab_size).map(|id| format!("<{id}>")).collect();
        file.set("tokenizer.ggml.model", Meta::str("gpt2"));
        file.set("tokenizer.ggml.pre", Meta::str("qwen2"));
        file.set("tokenizer.ggml.token_type", Meta::I32s(vec![1; tokens.len()]));
        file.set("tokenizer.ggml.tokens", Meta::Strs(tokens));
        file.set("tokenizer.ggml.merges", Meta::Strs(Vec::new()));
        file.set("tokenizer.ggml.eos_token_id", Meta::U32(3));
        file.set("tokenizer.chat_template", Meta::str("{{ messages }}"));
        let name = format!("{family}.gguf{}", if split { " in parts" } else { "" });
        sources.push(Source { name, file, split });
    }
    Ok(sources)
}

impl Source {
    /// The files of a checkpoint, and which one is named.
    fn files(&self, file: &Gguf, room: &Path) -> Result<(Files, String)> {
        if !self.split {
            return Ok((Files::from([("m.gguf".to_owned(), file.bytes().0)]), "m.gguf".to_owned()));
        }
        let mut files = Files::new();
        let mut first = None;
        for path in file.write_split(room, "m", PARTS) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            files.insert(name.clone(), fs::read(&path)?);
            fs::remove_file(&path)?;
            first.get_or_insert(name);
        }
        Ok((files, first.ok_or("a split file has parts")?))
    }
}

/// Draws and applies the mutation of a case.
pub fn mutate(sources: &[Source], room: &Path, random: &mut Random) -> Result<Mutant> {
    let source = &sources[random.below(sources.len())];
    let mut file = source.file.clone();
    let mut what = source.name.clone();
    let shaped = random.below(2) == 0;
    if shaped {
        for _ in 0..=random.below(2) {
            what += &format!("; {}", reshape(&mut file, random));
        }
    }
    let (mut files, path) = source.files(&file, room)?;
    if !shaped || random.below(4) == 0 {
        for _ in 0..[1, 1, 2, 4][random.below(4)] {
            let names: Vec<String> = files.keys().cloned().collect();
            let name = &names[random.below(names.len())];
            what += &format!("; {name}: {}", damage(&mut files, name, random));
            if files.is_empty() {
                break;
            }
        }
    }
    Ok(Mutant { files, path, what })
}

/// Numbers that are too large, or look as if they were not.
fn absurd(random: &mut Random) -> u64 {
    let most =
        [u64::MAX, i64::MAX as u64, u64::from(u32::MAX), 1 << 62, 1 << 40, 1 << 31, 1 << 20, 255, 7, 1, 0];
    let n = most[random.below(most.len())];
    n.wrapping_sub(random.below(3) as u64)
}

/// Changes what the file says: a value, its type, a shape, a type of weights, a name.
fn reshape(file: &mut Gguf, random: &mut Random) -> String {
    if random.below(2) == 0 {
        let i = random.below(file.meta.len());
        let (key, value) = &mut file.meta[i];
        let key = key.clone();
        *value = match random.below(9) {
            0 => Meta::U32(absurd(random) as u32),
            1 => Meta::I32(absurd(random) as i32),
            2 => Meta::F32([f32::NAN, f32::INFINITY, -1.0, 0.0, 1e-30, 1e30][random.below(6)]),
            3 => Meta::Bool(random.below(2) == 0),
            4 => Meta::str(
                ["", "llama", "qwen3moe", "qwen3next", "yarn", "longrope", "\u{0}"][random.below(7)],
            ),
            5 => Meta::Strs(vec!["x".repeat(random.below(64)); random.below(300)]),
            6 => Meta::I32s(vec![absurd(random) as i32; random.below(300)]),
            7 => Meta::F32s(vec![f32::NAN; random.below(300)]),
            _ => {
                file.meta.remove(i);
                return format!("without {key}");
            }
        };
        return format!("{key} = {:.60}", format!("{:?}", file.meta[i].1));
    }
    let i = random.below(file.tensors.len());
    let (name, shape, kind, _) = &mut file.tensors[i];
    let was = name.clone();
    match random.below(6) {
        0 if !shape.is_empty() => {
            let dim = random.below(shape.len());
            shape[dim] = absurd(random) as usize;
            format!("{was} of shape {shape:?}")
        }
        1 => {
            shape.resize(random.below(6), 1);
            format!("{was} of shape {shape:?}")
        }
        2 => {
            shape.reverse();
            format!("{was} of shape {shape:?}")
        }
        3 => {
            *kind = random.below(48) as u32;
            format!("{was} of type {kind}")
        }
        4 => {
            file.tensors.remove(i);
            format!("without {was}")
        }
        _ => {
            let other = random.below(file.tensors.len());
            file.tensors[i].0 =
                file.tensors[other].0.replacen("blk.", ["blk.", "blk.9", "v.blk."][random.below(3)], 1);
            format!("{was} called {}", file.tensors[i].0)
        }
    }
}

/// Damages bytes of a file: structure far more often than weights.
fn damage(files: &mut Files, name: &str, random: &mut Random) -> String {
    if random.below(12) == 0 {
        files.remove(name);
        return "missing".to_owned();
    }
    let bytes = files.get_mut(name).expect("one of them");
    if bytes.is_empty() {
        return "empty".to_owned();
    }
    // Metadata, and the table of tensors, end at about a fifth of these files.
    let end = if random.below(8) == 0 { bytes.len() } else { bytes.len() / 5 + 1 };
    let at = random.below(end);
    match random.below(7) {
        0 | 1 => {
            bytes[at] ^= 1 << random.below(8);
            format!("a bit at {at}")
        }
        2 => {
            bytes[at] = [0, 0xff, 8, 9][random.below(4)];
            format!("byte {at} = {}", bytes[at])
        }
        3 | 4 => {
            let number = absurd(random).to_le_bytes();
            let n = 8.min(bytes.len() - at);
            bytes[at..at + n].copy_from_slice(&number[..n]);
            format!("a number at {at}: {}", u64::from_le_bytes(number))
        }
        5 => {
            let len = random.below(bytes.len());
            bytes.truncate(len);
            format!("cut to {len}")
        }
        _ => {
            let n = random.below(64).min(MAX_FILE - bytes.len().min(MAX_FILE));
            let some: Vec<u8> = bytes[at..].iter().take(n).copied().collect();
            bytes.splice(at..at, some);
            format!("{n} bytes twice at {at}")
        }
    }
}

/// Sculpts the mutant in `room`, which is empty again afterwards; the verdict.
pub fn attempt(mutant: &Mutant, room: &Path) -> std::result::Result<String, String> {
    let failed = |e: std::io::Error| format!("the room for it: {e}");
    for (name, bytes) in &mutant.files {
        fs::write(room.join(name), bytes).map_err(failed)?;
    }
    let (path, vault) = (room.join(&mutant.path), room.join("vault"));
    let settings = Settings { threads: Some(1), ..Settings::default() };
    let verdict = match sculpt(&path, &vault, &settings, &(), &AtomicBool::new(false)) {
        Ok(_) => match verify(&vault, Some(1), &(), &AtomicBool::new(false)) {
            Ok(report) if report.problems.is_empty() => Ok("a GGUF file is sculpted".to_owned()),
            Ok(report) => Err(format!("a vault that is not whole: {}", report.problems[0])),
            Err(error) => Err(format!("a vault that cannot be verified: {error}")),
        },
        Err(error) if vault.exists() => Err(format!("a vault in spite of: {error}")),
        Err(error) if error.to_string().len() > 4000 => Err("a message of more than 4000 bytes".to_owned()),
        Err(_) => Ok("a GGUF file is refused".to_owned()),
    };
    for entry in fs::read_dir(room).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) }.map_err(failed)?;
    }
    verdict
}
