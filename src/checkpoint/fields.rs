//! JSON configurations, read by a table of fields.
//!
//! A field of a configuration may change the model's mathematics, so none may be ignored by accident: the table lists
//! every field that is allowed and how it is handled, and any other field is refused by name.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

use crate::file_kind::{self, Wanted};
/// How a field is handled.
pub(super) enum Fate {
    /// It is read. The text is the default, in JSON.
    Used(&'static str),
    /// Only this value, in JSON, is supported; it is also the default.
    Only(&'static str),
    /// It is ignored, since it changes no answer.
    Ignored,
}

/// The fields that an object may have.
pub(super) type Table = [(&'static str, Fate)];

/// A JSON object that has only fields of its table, with supported values.
pub(super) struct Fields {
    table: &'static Table,
    /// Printed before a field's name in messages, for example `rope_scaling.`.
    prefix: String,
    object: Map<String, Value>,
}

impl Fields {
    /// Refuses fields that are not in the table, and values that are not supported.
    pub fn new(table: &'static Table, prefix: &str, object: Map<String, Value>) -> Result<Self, String> {
        for (name, value) in &object {
            let known = table.iter().find(|(known, _)| known == name);
            match known.map(|(_, fate)| fate) {
                Some(Fate::Only(only)) if !same(value, &parse(only)) => {
                    return Err(format!("{prefix}{name} is {}; only {only} is supported", shown(value)));
                }
                Some(_) => {}
                None => {
                    return Err(format!(
                        "{prefix}{name} is {}; the field is not known, and it might make this another model",
                        shown(value)
                    ));
                }
            }
        }
        Ok(Self {
            table,
            prefix: prefix.into(),
            object,
        })
    }

    /// Whether the object has the field, even if its value is null.
    pub fn has(&self, name: &str) -> bool {
        self.object.contains_key(name)
    }

    /// The field's value, or its default.
    pub fn value(&self, name: &str) -> Value {
        let absent = || {
            let known = self.table.iter().find(|(known, _)| *known == name);
            match known {
                Some((_, Fate::Used(default) | Fate::Only(default))) => parse(default),
                _ => Value::Null,
            }
        };
        self.object.get(name).cloned().unwrap_or_else(absent)
    }

    /// The value of a field that is a whole number; `None` if it is null.
    pub fn size_or_null(&self, name: &str) -> Result<Option<usize>, String> {
        let value = self.value(name);
        match (&value, value.as_u64().and_then(|value| usize::try_from(value).ok())) {
            (Value::Null, _) => Ok(None),
            (_, Some(size)) => Ok(Some(size)),
            (_, None) => Err(self.wrong(name, &value, "a whole number that is not negative")),
        }
    }

    /// The value of a field that is a whole number.
    pub fn size(&self, name: &str) -> Result<usize, String> {
        self.size_or_null(name)?
            .ok_or_else(|| self.wrong(name, &Value::Null, "a whole number that is not negative"))
    }

    /// The value of a field that is a number; `None` if it is null.
    pub fn number_or_null(&self, name: &str) -> Result<Option<f64>, String> {
        let value = self.value(name);
        match (&value, value.as_f64()) {
            (Value::Null, _) => Ok(None),
            (_, Some(number)) => Ok(Some(number)),
            (_, None) => Err(self.wrong(name, &value, "a number")),
        }
    }

    /// The value of a field that is a number.
    pub fn number(&self, name: &str) -> Result<f64, String> {
        self.number_or_null(name)?
            .ok_or_else(|| self.wrong(name, &Value::Null, "a number"))
    }

    /// The value of a field that is true or false.
    pub fn flag(&self, name: &str) -> Result<bool, String> {
        let value = self.value(name);
        value.as_bool().ok_or_else(|| self.wrong(name, &value, "true or false"))
    }

    /// The value of a field that is a string; `None` if it is null.
    pub fn text_or_null(&self, name: &str) -> Result<Option<String>, String> {
        match self.value(name) {
            Value::Null => Ok(None),
            Value::String(text) => Ok(Some(text)),
            value => Err(self.wrong(name, &value, "a text")),
        }
    }

    /// The value of a field that is an object, checked against its own table; `None` if it is null.
    pub fn object_or_null(&self, name: &str, table: &'static Table) -> Result<Option<Self>, String> {
        match self.value(name) {
            Value::Null => Ok(None),
            Value::Object(object) => Self::new(table, &format!("{}{name}.", self.prefix), object).map(Some),
            value => Err(self.wrong(name, &value, "an object")),
        }
    }

    /// Checks a field that repeats another one, `from`: it must be absent, null, or that one's value `is`.
    pub fn agree(&self, name: &str, is: f64, from: &str) -> Result<(), String> {
        match self.number_or_null(name)? {
            Some(value) if value != is => Err(format!(
                "{}{name} is {value} where {from} is {is}; they are to be the same",
                self.prefix
            )),
            _ => Ok(()),
        }
    }

    /// The message for a value that the field cannot have.
    pub fn wrong(&self, name: &str, value: &Value, expected: &str) -> String {
        format!("{}{name} is {}; it must be {expected}", self.prefix, shown(value))
    }
}

/// A value written in a table.
fn parse(json: &'static str) -> Value {
    serde_json::from_str(json).unwrap_or(Value::Null)
}

/// Whether two values are equal. Numbers are compared as float32: 1 equals 1.0, and a number may have been rounded.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a as f32 == b as f32,
        _ => a == b,
    }
}

/// Number of characters after which a message cuts a value.
const MOST_SHOWN: usize = 60;

/// A value's text for a message.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(MOST_SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// The most bytes accepted of a JSON file; real indices and configurations are far smaller.
const MOST_BYTES: u64 = 64 << 20;

/// Reads a JSON file whose outermost value is an object.
pub(super) fn read_object(path: &Path) -> Result<Map<String, Value>> {
    let mut text = Vec::new();
    let file = File::open(path).map_err(|e| Error::io(path, e))?;
    file.take(MOST_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(|e| Error::io(path, e))?;
    let wrong = |why: String| {
        let error = Error::format(path.display().to_string(), why);
        file_kind::explain(path, error, Wanted::Configuration)
    };
    if text.len() as u64 > MOST_BYTES {
        return Err(wrong(format!(
            "it has more than {MOST_BYTES} bytes, which no configuration has"
        )));
    }
    match serde_json::from_slice(&text).map_err(|e| wrong(e.to_string()))? {
        Value::Object(object) => Ok(object),
        value => Err(wrong(format!("it holds {}, not an object", shown(&value)))),
    }
}
