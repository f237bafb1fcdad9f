//! JSON configurations, read by a table of fields.
//!
//! A field of a configuration may change the model's mathematics, so none may be ignored by accident: the table lists
//! every field that is allowed and how it is handled, and any other field is refused by name. All that is refused is
//! said at once.

use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value};

use crate::descriptors::open_file;
use crate::error::{Error, Result, shown};
use crate::file_kind::{self, GivenAs};

/// How a field is handled.
pub(super) enum Fate {
    /// It is read. The text is the default, in JSON.
    Used(&'static str),
    /// Only this value, in JSON, is supported; it is also the default.
    Only(&'static str),
    /// It is ignored at one of these values, in JSON, which change no answer. Others might, and are refused.
    Inert(&'static [&'static str]),
    /// It is ignored, since it changes no answer.
    Ignored,
}

impl Fate {
    /// Why a value is refused, if it is.
    fn refusal(&self, value: &Value) -> Option<String> {
        let supported = match self {
            Self::Only(only) => std::slice::from_ref(only),
            Self::Inert(values) => values,
            Self::Used(_) | Self::Ignored => return None,
        };
        let is_supported = supported.iter().any(|one| same(value, &parse(one)));
        (!is_supported).then(|| format!("only {} is supported", supported.join(" or ")))
    }
}

/// The fields that an object may have.
pub(super) type Table = [(&'static str, Fate)];

/// What is wrong with a configuration.
#[derive(Default)]
pub(super) struct Refusals {
    /// Fields that no table has, with their values.
    unknown: Vec<String>,
    /// Other refusals, each in words of its own.
    others: Vec<String>,
}

/// The most refusals that a message lists.
const MOST_LISTED: usize = 100;

impl Refusals {
    /// The value, or `None` with its refusal noted.
    pub fn keep<T>(&mut self, value: Result<T, String>) -> Option<T> {
        value.map_err(|refusal| self.others.push(refusal)).ok()
    }

    /// What was made of a configuration, if nothing of it is refused.
    pub fn finish<T>(mut self, made: Option<T>) -> Result<T, String> {
        match &self.unknown[..] {
            [] => {}
            [one] => self.others.push(format!(
                "{one}; the field is not known, and it might make this another model"
            )),
            several => self.others.push(format!(
                "{}; these fields are not known, and they might make this another model",
                list(several, ", ")
            )),
        }
        match (&self.others[..], made) {
            ([], Some(made)) => Ok(made),
            ([one], _) => Err(one.clone()),
            (several, _) => {
                let numbered: Vec<_> = (1..)
                    .zip(several)
                    .map(|(n, refusal)| format!("({n}) {refusal}"))
                    .collect();
                Err(list(&numbered, "; "))
            }
        }
    }
}

/// The items between separators; beyond `MOST_LISTED` only their number.
fn list(items: &[String], separator: &str) -> String {
    let shown = items[..items.len().min(MOST_LISTED)].join(separator);
    match items.len().saturating_sub(MOST_LISTED) {
        0 => shown,
        more => format!("{shown}{separator}and {more} more"),
    }
}

/// A JSON object and the table of its fields.
pub(super) struct Fields {
    table: &'static Table,
    /// Printed before a field's name in messages, for example `rope_scaling.`.
    prefix: String,
    object: Map<String, Value>,
}

impl Fields {
    /// Refuses fields that are not in the table, and values that are not supported.
    pub fn new(table: &'static Table, prefix: &str, object: Map<String, Value>, refused: &mut Refusals) -> Self {
        // By name, whatever order the map has.
        let mut by_name: Vec<_> = object.iter().collect();
        by_name.sort_unstable_by_key(|(name, _)| *name);
        for (name, value) in by_name {
            let is = format!("{prefix}{name} is {}", shown(value));
            let Some((_, fate)) = table.iter().find(|(known, _)| known == name) else {
                refused.unknown.push(is);
                continue;
            };
            refused
                .others
                .extend(fate.refusal(value).map(|why| format!("{is}; {why}")));
        }
        Self {
            table,
            prefix: prefix.into(),
            object,
        }
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
    pub fn object_or_null(
        &self,
        name: &str,
        table: &'static Table,
        refused: &mut Refusals,
    ) -> Result<Option<Self>, String> {
        match self.value(name) {
            Value::Null => Ok(None),
            Value::Object(object) => {
                let prefix = format!("{}{name}.", self.prefix);
                Ok(Some(Self::new(table, &prefix, object, refused)))
            }
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

/// What a field is taken for, in words.
pub(super) fn taken(table: &Table, name: &str, value: &Value) -> String {
    let Some((_, fate)) = table.iter().find(|(known, _)| *known == name) else {
        return "refused: not known".into();
    };
    if let Some(why) = fate.refusal(value) {
        return format!("refused: {why}");
    }
    let taken = match fate {
        Fate::Used(_) => "used",
        Fate::Only(_) => "what is computed; no other value is supported",
        Fate::Inert(_) | Fate::Ignored => "ignored: changes no answer",
    };
    taken.into()
}

/// The fields of a table that an object lacks, and the values that they are taken to have.
pub(super) fn left_out(
    table: &Table,
    object: &Map<String, Value>,
) -> impl Iterator<Item = (&'static str, &'static str)> {
    let fields = table.iter().filter(|(name, _)| !object.contains_key(*name));
    fields.filter_map(|(name, fate)| match fate {
        Fate::Used(default) if *default != "null" => Some((*name, *default)),
        _ => None,
    })
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

/// The most bytes accepted of a JSON file; real indices and configurations are far smaller.
const MOST_BYTES: u64 = 64 << 20;

/// Reads a JSON file whose outermost value is an object.
pub(super) fn read_object(path: &Path) -> Result<Map<String, Value>> {
    let mut text = Vec::new();
    let file = open_file(path).map_err(|e| Error::io(path, e))?;
    file.take(MOST_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(|e| Error::io(path, e))?;
    let wrong = |why: String| {
        let error = Error::format(path.display().to_string(), why);
        file_kind::explain(path, error, GivenAs::Configuration)
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
