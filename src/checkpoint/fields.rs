//! The fields of a JSON object, each with what becomes of it.
//!
//! A configuration is data that says which mathematics a model has. A field that is passed over may make it another
//! model, so every field there can be stands in a table, and any other is refused by name.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// What becomes of a field.
pub(super) enum Fate {
    /// The model is made of it. Where it is absent, it is this, in JSON.
    Used(&'static str),
    /// The mathematics has this value, in JSON, built in, and no other is supported. Where it is absent, it is this.
    Only(&'static str),
    /// It changes no answer.
    Ignored,
}

/// The fields an object may have.
pub(super) type Table = [(&'static str, Fate)];

/// An object all of whose fields are known and supported.
pub(super) struct Fields {
    table: &'static Table,
    /// What stands before a field's name in messages, for example `rope_scaling.`.
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

    /// Whether the object has the field, be it null.
    pub fn has(&self, name: &str) -> bool {
        self.object.contains_key(name)
    }

    /// The field's value, or what it is where it is absent.
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

    /// A whole number; `None` if it is null.
    pub fn size_or_null(&self, name: &str) -> Result<Option<usize>, String> {
        let value = self.value(name);
        match (&value, value.as_u64().and_then(|value| usize::try_from(value).ok())) {
            (Value::Null, _) => Ok(None),
            (_, Some(size)) => Ok(Some(size)),
            (_, None) => Err(self.wrong(name, &value, "a whole number that is not negative")),
        }
    }

    /// A whole number.
    pub fn size(&self, name: &str) -> Result<usize, String> {
        self.size_or_null(name)?
            .ok_or_else(|| self.wrong(name, &Value::Null, "a whole number that is not negative"))
    }

    /// A number; `None` if it is null.
    pub fn number_or_null(&self, name: &str) -> Result<Option<f64>, String> {
        let value = self.value(name);
        match (&value, value.as_f64()) {
            (Value::Null, _) => Ok(None),
            (_, Some(number)) => Ok(Some(number)),
            (_, None) => Err(self.wrong(name, &value, "a number")),
        }
    }

    /// A number.
    pub fn number(&self, name: &str) -> Result<f64, String> {
        self.number_or_null(name)?
            .ok_or_else(|| self.wrong(name, &Value::Null, "a number"))
    }

    /// True or false.
    pub fn flag(&self, name: &str) -> Result<bool, String> {
        let value = self.value(name);
        value.as_bool().ok_or_else(|| self.wrong(name, &value, "true or false"))
    }

    /// A text; `None` if it is null.
    pub fn text_or_null(&self, name: &str) -> Result<Option<String>, String> {
        match self.value(name) {
            Value::Null => Ok(None),
            Value::String(text) => Ok(Some(text)),
            value => Err(self.wrong(name, &value, "a text")),
        }
    }

    /// The fields of an object in the object; `None` if it is null.
    pub fn object_or_null(&self, name: &str, table: &'static Table) -> Result<Option<Self>, String> {
        match self.value(name) {
            Value::Null => Ok(None),
            Value::Object(object) => Self::new(table, &format!("{}{name}.", self.prefix), object).map(Some),
            value => Err(self.wrong(name, &value, "an object")),
        }
    }

    /// Refuses a second name for a number where it says something else.
    pub fn agree(&self, name: &str, is: f64, from: &str) -> Result<(), String> {
        match self.number_or_null(name)? {
            Some(value) if value != is => Err(format!(
                "{}{name} is {value} where {from} is {is}; they are to be the same",
                self.prefix
            )),
            _ => Ok(()),
        }
    }

    /// Says that a value is not what the field can hold.
    pub fn wrong(&self, name: &str, value: &Value, expected: &str) -> String {
        format!("{}{name} is {}; it must be {expected}", self.prefix, shown(value))
    }
}

/// A value of a table.
fn parse(json: &'static str) -> Value {
    serde_json::from_str(json).unwrap_or(Value::Null)
}

/// Whether two values mean the same: numbers as float32, so that 1 is 1.0 and a number may have been rounded.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a as f32 == b as f32,
        _ => a == b,
    }
}

/// The most characters of a value that a message shows.
const MOST_SHOWN: usize = 60;

/// A value as a message shows it.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(MOST_SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// The most bytes of a JSON file: far above any index or configuration.
const MOST_BYTES: u64 = 64 << 20;

/// Reads a JSON file whose outermost value is an object.
pub(super) fn read_object(path: &Path) -> Result<Map<String, Value>> {
    let mut text = Vec::new();
    let file = File::open(path).map_err(|e| Error::io(path, e))?;
    file.take(MOST_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(|e| Error::io(path, e))?;
    let wrong = |why: String| Error::format(path.display().to_string(), why);
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
