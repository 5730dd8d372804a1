//! Keys of a config, read as what they must be.

use serde_json::Value;

use crate::error::{SculptError, Warning};

pub(super) fn show(value: Option<&Value>) -> String {
    let mut text = value.map_or_else(|| "missing".to_owned(), Value::to_string);
    if text.chars().count() > 80 {
        text = text.chars().take(77).chain("...".chars()).collect();
    }
    text
}

pub(super) fn bad(key: &str, found: Option<&Value>, expected: impl Into<String>) -> SculptError {
    SculptError::Config { key: key.to_owned(), found: show(found), expected: expected.into() }
}

pub(super) fn number(key: &str, value: &Value) -> Result<f64, SculptError> {
    value.as_f64().filter(|x| x.is_finite()).ok_or_else(|| bad(key, Some(value), "a number"))
}

pub(super) struct Keys<'a> {
    pub(super) config: &'a Value,
    pub(super) warnings: Vec<Warning>,
}

impl<'a> Keys<'a> {
    /// A key's value; missing and null are the same.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.config.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn default<T: ToString>(&mut self, key: &'static str, value: T) -> T {
        self.warnings.push(Warning::Default { key, default: value.to_string() });
        value
    }

    pub(super) fn optional_size(&self, key: &str) -> Result<Option<usize>, SculptError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                // Sizes in bytes are products of two or three of these.
                Some(n) if n <= u64::from(u32::MAX) => Ok(Some(n as usize)),
                _ => Err(bad(key, Some(value), "a whole number")),
            },
        }
    }

    pub(super) fn size(&self, key: &str) -> Result<usize, SculptError> {
        self.optional_size(key)?.ok_or_else(|| bad(key, None, "a number"))
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool, SculptError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| bad(key, Some(value), "true or false")),
        }
    }

    /// A number, or what a silent config means.
    pub(super) fn number_or(&self, key: &str, default: f64) -> Result<f64, SculptError> {
        self.get(key).map_or(Ok(default), |value| number(key, value))
    }

    /// As [`Self::number_or`] 1, of what must be above 0.
    pub(super) fn factor(&self, key: &str) -> Result<f64, SculptError> {
        match self.number_or(key, 1.0)? {
            factor if factor > 0.0 => Ok(factor),
            _ => Err(bad(key, self.get(key), "above 0")),
        }
    }
}
