//! A bench record: flat keys with their units in their names, as JSON, as a table, and against an older one.

use std::path::Path;

use serde_json::{Map, Value};

use crate::failure::Failure;

/// What must agree for two records to be comparable.
const SETTINGS: [&str; 10] = [
    "format",
    "processor",
    "model",
    "source",
    "layers",
    "expert_bits_per_weight",
    "kernels",
    "threads",
    "ring_slots",
    "direct_io",
];

/// Keys and values, in the order in which they are shown.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    fields: Map<String, Value>,
    order: Vec<String>,
}

impl Record {
    /// Sets a key.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        if self.fields.insert(key.to_owned(), value.into()).is_none() {
            self.order.push(key.to_owned());
        }
    }

    /// Sets a key to the median of `values`, with the least and the greatest beside it; nothing if there are
    /// none.
    pub fn spread(&mut self, key: &str, values: impl IntoIterator<Item = f64>) {
        let mut values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        values.sort_unstable_by(f64::total_cmp);
        let (Some(min), Some(max)) = (values.first(), values.last()) else { return };
        self.set(key, rounded(median(&values)));
        if values.len() > 1 {
            self.set(&format!("{key}_min"), rounded(*min));
            self.set(&format!("{key}_max"), rounded(*max));
        }
    }

    /// A number.
    pub fn number(&self, key: &str) -> Option<f64> {
        self.fields.get(key)?.as_f64()
    }

    /// As JSON, a line per key.
    pub fn to_json(&self) -> Result<String, Failure> {
        let mut text = String::from("{\n");
        for (i, key) in self.order.iter().enumerate() {
            let comma = if i + 1 < self.order.len() { "," } else { "" };
            let value = serde_json::to_string(&self.fields[key])?;
            text.push_str(&format!("  {}: {value}{comma}\n", serde_json::to_string(key)?));
        }
        text.push_str("}\n");
        Ok(text)
    }

    /// Reads one that [`Self::to_json`] wrote.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let bad = |why: String| Failure::new(format!("{}: {why}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
        let fields: Map<String, Value> = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
        let order = fields.keys().cloned().collect();
        Ok(Self { fields, order })
    }

    /// A line per key; spreads stand behind their medians.
    pub fn print(&self) -> Result<(), Failure> {
        for key in &self.order {
            let base = key.strip_suffix("_min").or_else(|| key.strip_suffix("_max"));
            if base.is_some_and(|base| self.fields.contains_key(base)) {
                continue;
            }
            let mut line = format!("{key:<28} {}", shown(&self.fields[key]));
            let ends = ["min", "max"].map(|end| self.fields.get(&format!("{key}_{end}")));
            if let [Some(min), Some(max)] = ends {
                line.push_str(&format!("  ({} to {})", shown(min), shown(max)));
            }
            say!("{line}");
        }
        Ok(())
    }

    /// A line for every number that both have: old, new, new / old; before them what makes them hard to compare.
    pub fn compare(&self, old: &Self) -> String {
        let mut text = String::new();
        for key in SETTINGS {
            let [a, b] = [old, self].map(|record| record.fields.get(key).map(shown).unwrap_or_default());
            if a != b {
                text.push_str(&format!("note: {key} differs: {a} then, {b} now\n"));
            }
        }
        text.push_str(&format!("{:<28} {:>14} {:>14} {:>8}\n", "compared", "old", "new", "new/old"));
        for key in self.order.iter().filter(|key| !key.ends_with("_min") && !key.ends_with("_max")) {
            if let (Some(a), Some(b)) = (old.number(key), self.number(key)) {
                let ratio = if a == 0.0 { String::from("-") } else { format!("{:.3}", b / a) };
                let [old, new] = [&old.fields[key], &self.fields[key]].map(shown);
                text.push_str(&format!("{key:<28} {old:>14} {new:>14} {ratio:>8}\n"));
            }
        }
        text
    }
}

/// The middle of sorted values, or the mean of the two in the middle.
pub fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) && middle > 0 {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    } else {
        sorted.get(middle).copied().unwrap_or(f64::NAN)
    }
}

/// Five significant digits: more is noise.
pub fn rounded(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Object(fields) => {
            let parts: Vec<_> = fields.iter().map(|(key, value)| format!("{key} {}", shown(value))).collect();
            parts.join(", ")
        }
        Value::Array(values) => values.iter().map(shown).collect::<Vec<_>>().join(", "),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_being_written() {
        let mut record = Record::default();
        record.set("name", "a \"vault\"");
        record.spread("decode_tok_s", [3.0, 1.0, 2.0]);
        record.spread("nothing", [f64::NAN]);
        assert_eq!(record.number("decode_tok_s"), Some(2.0));
        assert_eq!(record.number("decode_tok_s_max"), Some(3.0));
        assert_eq!(record.number("nothing"), None);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.json");
        std::fs::write(&path, record.to_json().unwrap()).unwrap();
        let read = Record::read(&path).unwrap();
        assert_eq!(read.fields, record.fields);
        let mut other = read.clone();
        other.set("decode_tok_s", 3.0);
        other.set("kernels", "scalar");
        let table = other.compare(&read);
        assert!(table.contains("kernels differs") && table.contains("1.500"), "{table}");
        std::fs::write(&path, "[1]").unwrap();
        assert!(Record::read(&path).is_err());
    }

    #[test]
    fn medians_are_in_the_middle() {
        assert_eq!(median(&[1.0, 2.0, 9.0]), 2.0);
        assert_eq!(median(&[1.0, 2.0, 4.0, 9.0]), 3.0);
        assert!(median(&[]).is_nan());
        assert_eq!(rounded(123_456.0), 123_460.0);
    }
}
