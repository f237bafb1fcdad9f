//! The forms that answers are asked to have: `response_format` and `structured_outputs`.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use getp::grammar::Grammar;
use getp::harmony::{Conversation, Framed, Headers, Json};
use getp::text::{Specials, TextTokenizer};
use serde_json::Value;

use crate::structured::{Compiler, Form};

/// Compiles forms, each once as long as few are in use.
pub struct Forms {
    tokenizer: Arc<TextTokenizer>,
    vocab_size: usize,
    /// The model's end tokens.
    ends: Vec<u32>,
    /// Made while the weights are packed, if the file seems to need it, or else for the first request that does.
    compiler: OnceLock<Result<Compiler, String>>,
    /// By the form's text.
    grammars: Remembered<String, Arc<dyn Grammar>>,
    /// By the request's tools.
    headers: Remembered<Vec<String>, Arc<Headers>>,
}

impl Forms {
    /// None so far.
    pub fn new(tokenizer: Arc<TextTokenizer>, vocab_size: usize, ends: Vec<u32>) -> Self {
        Self {
            tokenizer,
            vocab_size,
            ends,
            compiler: OnceLock::new(),
            grammars: Remembered::default(),
            headers: Remembered::default(),
        }
    }

    /// Makes the compiler, which takes a second for a vocabulary of 200,000 tokens.
    pub fn prepare(&self) {
        let _ = self.compiler();
    }

    fn compiler(&self) -> &Result<Compiler, String> {
        let make = || Compiler::new(self.tokenizer.clone(), self.vocab_size, &self.ends).map_err(|why| why.to_string());
        self.compiler.get_or_init(make)
    }

    /// A grammar of texts of this form.
    pub fn of_text(&self, form: &Form) -> Result<Arc<dyn Grammar>, String> {
        let compiler = self.compiler().as_ref().map_err(String::clone)?;
        self.grammars.get(format!("{form:?}"), || {
            compiler.compile(form).map_err(|why| format!("{}: {why}", form.field()))
        })
    }

    /// A grammar of answers to a conversation whose final message has this form.
    pub fn of_answer(&self, form: &Form, conversation: &Conversation) -> Result<Arc<dyn Grammar>, String> {
        let of_text = self.of_text(form)?;
        let tokenizer = &self.tokenizer;
        let headers = self.headers.get(conversation.tools().to_vec(), || {
            let headers = Headers::new(tokenizer, conversation.tools(), &self.ends);
            headers.map(Arc::new).map_err(|why| why.to_string())
        })?;
        let framed = Framed::new(headers, of_text);
        let framed = match (conversation.open_message(), conversation.open_text()) {
            (Some(message), Some(text)) => tokenizer
                .encode(text.as_bytes(), Specials::Text)
                .and_then(|text| framed.going_on(&message, text))
                .map_err(|why| why.to_string())?,
            _ => framed,
        };
        Ok(Arc::new(framed))
    }
}

/// What was made of a key, or why it cannot be. Who asks for one that is being made waits for it, and for no other.
struct Remembered<K, V>(Mutex<HashMap<K, Made<V>>>);

type Made<V> = Arc<OnceLock<Result<V, String>>>;

/// Forms and lists of tools that are remembered: a file has few, or each line its own, which are not worth the memory.
const MOST_REMEMBERED: usize = 256;

impl<K, V> Default for Remembered<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Hash + Eq, V: Clone> Remembered<K, V> {
    /// What was made of this before, or what is made of it now.
    fn get(&self, key: K, make: impl FnOnce() -> Result<V, String>) -> Result<V, String> {
        let made = {
            let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if all.len() >= MOST_REMEMBERED && !all.contains_key(&key) {
                all.clear();
            }
            all.entry(key).or_default().clone()
        };
        made.get_or_init(make).clone()
    }
}

/// The form that JSON of the schema in this field has.
pub fn json(field: &str, schema: &Json) -> Result<Form, String> {
    let schema = serde_json::from_str(&schema.to_string()).map_err(|why| why.to_string())?;
    of_schema(field, schema)
}

/// From here on most readers, and llguidance, take a whole number of JSON for one beside it.
const TOO_LARGE: f64 = 9_007_199_254_740_992.0;

/// The largest `multipleOf` that llguidance compiles within moments, in units of its last digit.
const MOST_MULTIPLE: f64 = 10_000.0;

/// Refuses what llguidance would follow in another way than the schema says, or not within moments.
fn of_schema(field: &str, mut schema: Value) -> Result<Form, String> {
    check_schema(&mut schema).map_err(|why| format!("{field}: {why}"))?;
    Ok(Form::Json(schema))
}

/// Formats that llguidance follows. Others say what a text is for, as JSON Schema has it, and not what it is like.
const FORMATS: [&str; 10] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
];

fn check_schema(schema: &mut Value) -> Result<(), String> {
    match schema {
        Value::Array(values) => values.iter_mut().try_for_each(check_schema),
        Value::Object(fields) => {
            check_object(fields)?;
            let is_followed = |format: &Value| format.as_str().is_none_or(|format| FORMATS.contains(&format));
            if fields.get("format").is_some_and(|format| !is_followed(format)) {
                fields.remove("format");
            }
            fields
                .iter_mut()
                .try_for_each(|(name, value)| match (name.as_str(), value) {
                    // Words about it.
                    ("default" | "examples" | "title" | "description" | "$comment", _) => Ok(()),
                    ("enum" | "const", value) => check_value(value),
                    // By a name that may be any.
                    ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(schemas)) => {
                        schemas.values_mut().try_for_each(check_schema)
                    }
                    (_, value) => check_schema(value),
                })
        }
        value => check_value(value),
    }
}

/// Refuses numbers that are read as others.
fn check_value(value: &Value) -> Result<(), String> {
    match value {
        Value::Number(number) if number.as_f64().is_none_or(|number| number.abs() >= TOO_LARGE) => Err(format!(
            "{number} is a number that others read as one beside it; use smaller ones, or texts"
        )),
        Value::Array(values) => values.iter().try_for_each(check_value),
        Value::Object(fields) => fields.values().try_for_each(check_value),
        _ => Ok(()),
    }
}

/// Refuses keywords of a schema that llguidance follows in another way.
fn check_object(fields: &serde_json::Map<String, Value>) -> Result<(), String> {
    if fields.contains_key("x-guidance") {
        return Err("x-guidance is not supported".into());
    }
    if let Some(place) = fields.get("$ref").and_then(Value::as_str)
        && place.contains(['%', '~'])
    {
        return Err(format!(
            "$ref {place:?} has signs that are escaped, which is not supported; give what it names another name"
        ));
    }
    let number = |name: &str| fields.get(name).and_then(Value::as_f64);
    if let Some(least) = number("exclusiveMinimum").filter(|least| least.fract() == 0.0) {
        let mut most = [number("maximum"), number("exclusiveMaximum")].into_iter().flatten();
        if let Some(most) = most.find(|most| *most < least + 1.0) {
            return Err(format!(
                "exclusiveMinimum {least} is not supported with a largest number of {most}; use minimum"
            ));
        }
    }
    if let Some(multiple) = number("multipleOf") {
        let text = multiple.to_string();
        let digits = text.split_once('.').map_or(0, |(_, behind)| behind.len());
        if multiple * 10_f64.powi(digits as i32) > MOST_MULTIPLE {
            return Err(format!("multipleOf {multiple} takes too long to be followed"));
        }
    }
    // A name that no property fixes may come again, and counts again.
    let is_open =
        fields.contains_key("patternProperties") || fields.get("additionalProperties") != Some(&Value::Bool(false));
    let fixed = fields.get("required").and_then(Value::as_array).map_or(0, Vec::len);
    if let Some(least) = number("minProperties").filter(|&least| is_open && least > 1.0 && least > fixed as f64) {
        return Err(format!(
            "minProperties {least} is not supported beyond the properties that are required; require them"
        ));
    }
    Ok(())
}

/// What `structured_outputs` asks for: one of its fields is given.
pub fn structured_outputs(given: &Json) -> Result<Form, String> {
    let wrong = |why: &str| format!("structured_outputs {why}; give one of json, json_object, regex, choice, grammar");
    let Json::Object(fields) = given else {
        return Err(wrong("is no object"));
    };
    let is_given = |value: &Json| !matches!(value, Json::Null | Json::Bool(false));
    let fields: Vec<_> = fields.iter().filter(|(_, value)| is_given(value)).collect();
    let [(name, value)] = fields[..] else {
        let names: Vec<_> = fields.iter().map(|(name, _)| name.as_str()).collect();
        return Err(match names.is_empty() {
            true => wrong("has no field"),
            false => wrong(&format!("has several fields, {}", names.join(", "))),
        });
    };
    match (name.as_str(), value) {
        // Others take the schema as a text, too.
        ("json", Json::Text(schema)) => {
            let schema = serde_json::from_str(schema);
            let schema = schema.map_err(|why| format!("structured_outputs.json is no JSON: {why}"))?;
            of_schema("structured_outputs.json", schema)
        }
        ("json", schema @ Json::Object(_)) => json("structured_outputs.json", schema),
        ("json_object", Json::Bool(true)) => Ok(Form::Json(serde_json::json!({"type": "object"}))),
        ("regex", Json::Text(regex)) => Ok(Form::Regex(regex.clone())),
        ("grammar", Json::Text(grammar)) => Ok(Form::Lark(grammar.clone())),
        ("choice", Json::List(texts)) if !texts.is_empty() && texts.iter().all(|text| text.text().is_some()) => Ok(
            Form::Choice(texts.iter().filter_map(Json::text).map(str::to_owned).collect()),
        ),
        ("json" | "json_object" | "regex" | "grammar" | "choice", _) => Err(format!(
            "structured_outputs.{name} has another kind of value than it must; json is a schema, json_object true, \
             regex and grammar are texts, choice a list of texts"
        )),
        _ => Err(wrong(&format!("has the field {name}, which is not supported"))),
    }
}
