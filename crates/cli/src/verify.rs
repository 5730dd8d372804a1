//! `smoe verify`: every byte of a vault.

use serde_json::json;
use smoe_engine::plan::Bytes;

use crate::args::VerifyArgs;
use crate::failure::Failure;
use crate::{interrupt, model, progress};

/// Runs the command; damage is exit code 1.
pub fn verify(args: &VerifyArgs) -> Result<(), Failure> {
    let path = model::resolve(&args.vault)?;
    let bar = progress::Bar::default();
    let report = smoe_sculpt::verify(&path, None, &bar, interrupt::flag());
    bar.finish();
    let report = report?;
    if args.json {
        let problems: Vec<_> =
            report.problems.iter().map(|p| json!({"file": p.file, "problem": p.to_string()})).collect();
        let json = json!({
            "version": report.version,
            "whole": report.problems.is_empty(),
            "problems": problems,
            "checked_bytes": report.bytes,
            "checked_records": report.records,
            "checksums": report.checksums,
        });
        say!("{}", serde_json::to_string_pretty(&json)?);
    } else {
        for problem in &report.problems {
            say!("{problem}");
        }
    }
    if !report.problems.is_empty() {
        let problems = if report.problems.len() == 1 { "problem" } else { "problems" };
        eprintln!("{} {problems} in {}", report.problems.len(), path.display());
        return Err(Failure::Silent);
    }
    if args.json {
        return Ok(());
    }
    if report.checksums {
        say!("whole: {} records, {} checked", report.records, Bytes(report.bytes));
    } else {
        say!("sound in structure; an original file carries no checksums of its records");
    }
    Ok(())
}
