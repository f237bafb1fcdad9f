//! What each file of a model's directory, and each field of its configurations, is taken for, in words.

use serde_json::{Map, Value};
use std::path::Path;

use super::fields::{self, Table, read_object};
use super::safetensors::{CONFIG, INDEX};
use super::{SafetensorsCheckpoint, generation, hf_config, original_config};
use crate::error::{Error, Result, shown};

/// Something, and what it is taken for.
#[derive(Clone, Debug, PartialEq)]
pub struct Taken {
    /// A file, or a field and its value.
    pub what: String,
    /// In words.
    pub r#as: String,
}

/// The files of a directory by name; `model` is what was opened of it, if that was possible.
pub fn files(dir: &Path, model: Option<&SafetensorsCheckpoint>) -> Result<Vec<Taken>> {
    let io = |error| Error::io(dir, error);
    let mut names = Vec::new();
    for entry in dir.read_dir().map_err(io)? {
        let entry = entry.map_err(io)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_folder = entry.path().is_dir();
        names.push(if is_folder { format!("{name}/") } else { name });
    }
    names.sort_unstable();
    let tensors = |name: &str| {
        let mut files = model?.files();
        files
            .find(|(path, _)| path.file_name().is_some_and(|file| file == name))
            .map(|(_, tensors)| tensors)
    };
    let taken = |name: String| Taken {
        r#as: match (name.as_str(), tensors(&name)) {
            (_, Some(tensors)) => format!("weights, {tensors} tensors"),
            (CONFIG, _) => "the model's dimensions".into(),
            (generation::FILE, _) => "end tokens and sampling of requests that do not say otherwise".into(),
            ("tokenizer.json", _) => "text to tokens and back".into(),
            (INDEX, _) => "which file has which tensor".into(),
            ("chat_template.jinja", _) => "not read: conversations are rendered in the form of the training".into(),
            ("original/" | "metal/", _) => "not read: the model once more".into(),
            (name, None) if model.is_none() && name.ends_with(".safetensors") => "weights, not opened".into(),
            _ => "not read".into(),
        },
        what: name,
    };
    Ok(names.into_iter().map(taken).collect())
}

/// The fields of a directory's configurations, by file.
pub fn configurations(dir: &Path) -> Result<Vec<(&'static str, Vec<Taken>)>> {
    let object = read_object(&dir.join(CONFIG))?;
    let is_original = original_config::is_original(&object);
    let table = |of: &str| match (is_original, of) {
        (true, "") => Some(original_config::CONFIG),
        (true, _) => None,
        (false, of) => hf_config::table(of),
    };
    let mut fields = Vec::new();
    add("", &object, &table, &mut fields);
    let mut all = vec![(CONFIG, fields)];
    let path = dir.join(generation::FILE);
    if path.exists() {
        let object = read_object(&path)?;
        let taken = |(name, value): (&String, &Value)| Taken {
            what: format!("{name} {}", shown(value)),
            r#as: generation::taken(name, value).into(),
        };
        all.push((generation::FILE, object.iter().map(taken).collect()));
    }
    Ok(all)
}

/// Adds the fields of an object, and of the objects in it.
fn add(
    of: &str,
    object: &Map<String, Value>,
    table: &impl Fn(&str) -> Option<&'static Table>,
    fields: &mut Vec<Taken>,
) {
    let Some(own) = table(of) else { return };
    let prefix = if of.is_empty() { String::new() } else { format!("{of}.") };
    for (name, value) in object {
        match value {
            Value::Object(inner) if of.is_empty() && table(name).is_some() => add(name, inner, table, fields),
            value => fields.push(Taken {
                what: format!("{prefix}{name} {}", shown(value)),
                r#as: fields::taken(own, name, value),
            }),
        }
    }
    fields.extend(fields::left_out(own, object).map(|(name, default)| Taken {
        what: format!("{prefix}{name}"),
        r#as: format!("not given: {default}"),
    }));
}
