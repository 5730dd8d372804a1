//! Statistics of what the experts see of the texts that calibrate.

use std::path::Path;
use std::sync::{Arc, Mutex};

use smoe_engine::{Control, Engine, ExpertObserver, ExpertSeen, Vault};
use smoe_sculpt::calibrate::{Collector, Document, Head, collect};

use super::texts::Texts;
use crate::Result;

/// Reads what calibrates, counts what predicts an answer, and leaves statistics in `out`.
pub fn calibrate(vault: &Path, engine: &mut Engine, texts: &Texts, out: &Path) -> Result<()> {
    let documents: Vec<Document> = texts
        .list
        .iter()
        .filter(|text| text.calibrates)
        .map(|text| Document::predicting(text.tokens.clone(), text.answer.clone()))
        .collect();
    let vault = Vault::open(vault)?;
    let manifest = vault.experts.manifest().ok_or("a vault of ours has a manifest")?;
    let head = Head::new(&manifest.source.fingerprint, engine.spec(), &documents);
    let memory = 2 << 30;
    collect(out, &head, memory, None, |collector, _, _| {
        let watch = Arc::new(Mutex::new(Watch { collector: collector.clone(), counted: Vec::new() }));
        engine.watch_experts(Some(watch.clone()))?;
        for document in &documents {
            watch.lock().expect("nothing panics").counted.clone_from(&document.counted);
            let mut session = engine.open_session()?;
            engine.sync(&mut session, &document.tokens, &mut Control::default())?;
        }
        engine.watch_experts(None)?;
        Ok::<_, Box<dyn std::error::Error>>(())
    })?;
    eprintln!("calibrated with {} of {} tokens", head.counted, head.tokens);
    Ok(())
}

#[derive(Debug)]
struct Watch {
    collector: Arc<Mutex<Collector>>,
    counted: Vec<bool>,
}

impl ExpertObserver for Watch {
    fn expert(&mut self, seen: &ExpertSeen<'_>) {
        if let Ok(mut collector) = self.collector.lock() {
            let place = (seen.layer, seen.expert);
            collector.add_tokens(place, seen.tokens, &self.counted, seen.inputs, seen.hidden);
        }
    }
}
