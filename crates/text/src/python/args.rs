//! Arguments of a Python call: by place or by name.

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};

/// The arguments of one call.
pub(super) struct Args {
    function: &'static str,
    places: Vec<Value>,
    names: Option<Kwargs>,
}

impl Args {
    /// Takes a call's arguments apart; more than `most` by place are an error.
    pub(super) fn new(
        function: &'static str,
        values: impl Into<Vec<Value>>,
        most: usize,
    ) -> Result<Self, Error> {
        let mut places = values.into();
        let names = match places.pop_if(|last| last.is_kwargs()) {
            Some(names) => Some(Kwargs::try_from(names)?),
            None => None,
        };
        let args = Args { function, places, names };
        if args.places.len() > most {
            return Err(args.error(ErrorKind::TooManyArguments, "too many arguments"));
        }
        Ok(args)
    }

    /// The argument at place `at` or called `name`; `None` in Python counts as not given.
    pub(super) fn get(&self, at: usize, name: &str) -> Result<Option<Value>, Error> {
        let named = match &self.names {
            Some(names) if names.has(name) => Some(names.get::<Value>(name)?),
            _ => None,
        };
        Ok(self.places.get(at).cloned().or(named).filter(|value| !value.is_none()))
    }

    /// As [`Args::get`], for one that must be given.
    pub(super) fn need(&self, at: usize, name: &str) -> Result<Value, Error> {
        self.get(at, name)?
            .ok_or_else(|| self.error(ErrorKind::MissingArgument, &format!("`{name}` is missing")))
    }

    /// A string that must be given.
    pub(super) fn text(&self, at: usize, name: &str) -> Result<String, Error> {
        self.string(&self.need(at, name)?, name)
    }

    /// A string that may be given.
    pub(super) fn maybe_text(&self, at: usize, name: &str) -> Result<Option<String>, Error> {
        self.get(at, name)?.map(|value| self.string(&value, name)).transpose()
    }

    /// An integer that may be given.
    pub(super) fn maybe_int(&self, at: usize, name: &str) -> Result<Option<i64>, Error> {
        self.get(at, name)?.map(i64::try_from).transpose()
    }

    /// A condition that may be given.
    pub(super) fn maybe_bool(&self, at: usize, name: &str) -> Result<Option<bool>, Error> {
        Ok(self.get(at, name)?.map(|value| value.is_true()))
    }

    /// Refuses names that no one asked for.
    pub(super) fn end(&self) -> Result<(), Error> {
        self.names.as_ref().map_or(Ok(()), Kwargs::assert_all_used)
    }

    fn string(&self, value: &Value, name: &str) -> Result<String, Error> {
        value.as_str().map(str::to_owned).ok_or_else(|| {
            let kind = value.kind();
            self.error(ErrorKind::InvalidOperation, &format!("`{name}` must be a string, not {kind}"))
        })
    }

    fn error(&self, kind: ErrorKind, reason: &str) -> Error {
        Error::new(kind, format!("{}: {reason}", self.function))
    }
}
