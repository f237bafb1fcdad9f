//! What a checkpoint says of its answers: which tokens end them, and how they are sampled unless the caller says
//! otherwise. Of a directory it is `generation_config.json`, and what that leaves out of the ends is `config.json`'s.
//!
//! No field of it changes the model, so none is refused for being unknown. Those that would change answers and are not
//! supported are named, for a warning.

use std::path::Path;

use serde_json::{Map, Value};

use super::fields::read_object;
use crate::error::{Error, Result, shown};
use crate::request::EndTokens;

/// The file in a directory.
pub(super) const FILE: &str = "generation_config.json";

/// What a checkpoint says of its answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The tokens that end an answer.
    pub ends: Vec<u32>,
    /// The temperature; 0 is greedy.
    pub temperature: f32,
    /// The nucleus' share; 1 is all tokens.
    pub topp: f32,
    /// The most tokens of an answer; its prompt does not count.
    pub max_tokens: Option<usize>,
    /// What else it says that would change answers, and that is ignored, in words; `None` if there is nothing.
    pub ignored: Option<String>,
}

/// As the evaluation program has it.
impl Default for Generation {
    fn default() -> Self {
        Self {
            ends: EndTokens::RELEASED.to_vec(),
            temperature: 0.0,
            topp: 1.0,
            max_tokens: None,
            ignored: None,
        }
    }
}

/// Fields that are read.
const USED: &[&str] = &["eos_token_id", "temperature", "top_p", "do_sample", "max_new_tokens"];

/// Fields that say nothing of an answer's tokens.
const IGNORED: &[&str] = &[
    "bos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "transformers_version",
    "_from_model_config",
    "use_cache",
    "cache_implementation",
    "cache_config",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "prefill_chunk_size",
    "max_time",
    "trust_remote_code",
];

/// Fields that are ignored, and the values at which they change no answer.
const INERT: &[(&str, &[f64])] = &[
    ("top_k", &[0.0]),
    ("min_p", &[0.0]),
    ("typical_p", &[1.0]),
    ("epsilon_cutoff", &[0.0]),
    ("eta_cutoff", &[0.0]),
    ("repetition_penalty", &[1.0]),
    ("encoder_repetition_penalty", &[1.0]),
    ("presence_penalty", &[0.0]),
    ("frequency_penalty", &[0.0]),
    ("length_penalty", &[1.0]),
    ("diversity_penalty", &[0.0]),
    ("no_repeat_ngram_size", &[0.0]),
    ("encoder_no_repeat_ngram_size", &[0.0]),
    ("num_beams", &[1.0]),
    ("num_beam_groups", &[1.0]),
    ("num_return_sequences", &[1.0]),
    ("min_length", &[0.0]),
    ("min_new_tokens", &[0.0]),
    ("num_assistant_tokens", &[]),
];

impl Generation {
    /// What a directory says; `ends` are those that its `config.json` names.
    pub(super) fn read(dir: &Path, ends: Option<Vec<u32>>) -> Result<Self> {
        let mut generation = Self::default();
        if let Some(ends) = ends {
            generation.ends = ends;
        }
        let path = dir.join(FILE);
        if path.exists() {
            let name = path.display().to_string();
            let ignored = generation
                .take(&read_object(&path)?)
                .map_err(|why| Error::format(&name, why))?;
            generation.ignored = (!ignored.is_empty()).then(|| format!("{name}: ignored: {}", ignored.join(", ")));
        }
        Ok(generation)
    }

    /// Takes what the file says; gives what of it is not supported.
    fn take(&mut self, object: &Map<String, Value>) -> Result<Vec<String>, String> {
        if let Some(ends) = ends(object)? {
            self.ends = ends;
        }
        let temperature = number(
            object,
            "temperature",
            |value| value >= 0.0,
            "a number that is not negative",
        )?;
        let topp = number(
            object,
            "top_p",
            |value| value > 0.0 && value <= 1.0,
            "a number above 0, at most 1",
        )?;
        let is_sampled = match object.get("do_sample") {
            None | Some(Value::Null) => temperature.is_some() || topp.is_some(),
            Some(Value::Bool(is_sampled)) => *is_sampled,
            Some(other) => return Err(wrong("do_sample", other, "true or false")),
        };
        if is_sampled {
            self.temperature = temperature.unwrap_or(1.0) as f32;
            self.topp = topp.unwrap_or(1.0) as f32;
        }
        let most = number(
            object,
            "max_new_tokens",
            |value| value >= 1.0 && value.fract() == 0.0,
            "a whole number above 0",
        )?;
        self.max_tokens = most.map(|most| most as usize);
        let not_supported = object
            .iter()
            .filter(|(name, value)| !USED.contains(&name.as_str()) && !says_nothing(name, value));
        let mut named: Vec<_> = not_supported
            .map(|(name, value)| format!("{name} {}", shown(value)))
            .collect();
        // Whatever order the map has.
        named.sort_unstable();
        Ok(named)
    }
}

/// Whether a field that is not read changes no answer.
fn says_nothing(name: &str, value: &Value) -> bool {
    let inert = INERT
        .iter()
        .find(|(known, _)| *known == name)
        .map_or(&[][..], |(_, values)| *values);
    IGNORED.contains(&name)
        || matches!(value, Value::Null | Value::Bool(false))
        || value.as_f64().is_some_and(|value| inert.contains(&value))
}

/// What a field is taken for, in words.
pub(super) fn taken(name: &str, value: &Value) -> &'static str {
    if USED.contains(&name) {
        "used where a request does not say otherwise"
    } else if says_nothing(name, value) {
        "ignored: changes no answer"
    } else {
        "ignored, though it would change answers"
    }
}

/// The `eos_token_id` of a file: one id, or several; `None` if it names none.
pub(super) fn ends(object: &Map<String, Value>) -> Result<Option<Vec<u32>>, String> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let Some(value) = object.get("eos_token_id").filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let ids: Option<Vec<u32>> = match value {
        Value::Array(ids) => ids.iter().map(id).collect(),
        one => id(one).map(|id| vec![id]),
    };
    ids.map(Some)
        .ok_or_else(|| wrong("eos_token_id", value, "a token's id, or a list of them"))
}

/// A field that is a number; `None` if it is absent or null.
fn number(
    object: &Map<String, Value>,
    name: &str,
    fits: impl Fn(f64) -> bool,
    expected: &str,
) -> Result<Option<f64>, String> {
    let Some(value) = object.get(name).filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let number = value
        .as_f64()
        .filter(|&number| fits(number) && number <= f64::from(f32::MAX));
    number.map(Some).ok_or_else(|| wrong(name, value, expected))
}

fn wrong(name: &str, value: &Value, expected: &str) -> String {
    format!("{name} is {}; it must be {expected}", shown(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str, ends: Option<Vec<u32>>) -> Result<Generation> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE), json).unwrap();
        Generation::read(dir.path(), ends)
    }

    #[test]
    fn the_released_file_is_read() {
        let released = r#"{"bos_token_id": 199998, "do_sample": true, "eos_token_id": [200002, 199999, 200012],
            "pad_token_id": 199999, "transformers_version": "4.55.0.dev0"}"#;
        let expected = Generation {
            ends: vec![200_002, 199_999, 200_012],
            temperature: 1.0,
            topp: 1.0,
            max_tokens: None,
            ignored: None,
        };
        assert_eq!(read(released, Some(vec![7])).unwrap(), expected);
    }

    #[test]
    fn each_file_says_what_the_other_leaves_out() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Generation::read(dir.path(), None).unwrap(), Generation::default());
        let of_config = Generation::read(dir.path(), Some(vec![7])).unwrap();
        assert_eq!((of_config.ends, of_config.temperature), (vec![7], 0.0));
        let generation = read(r#"{"temperature": 0.6, "max_new_tokens": 32}"#, Some(vec![7])).unwrap();
        assert_eq!((generation.ends, generation.max_tokens), (vec![7], Some(32)));
        assert_eq!((generation.temperature, generation.topp), (0.6, 1.0));
        assert_eq!(read(r#"{"eos_token_id": 3}"#, Some(vec![7])).unwrap().ends, [3]);
        assert_eq!(
            read(r#"{"eos_token_id": null}"#, None).unwrap().ends,
            EndTokens::RELEASED
        );
    }

    #[test]
    fn sampling_is_what_the_file_says() {
        for (json, temperature, topp) in [
            (r#"{}"#, 0.0, 1.0),
            (r#"{"do_sample": true}"#, 1.0, 1.0),
            (r#"{"do_sample": false, "temperature": 0.6}"#, 0.0, 1.0),
            (r#"{"top_p": 0.9}"#, 1.0, 0.9),
            (r#"{"do_sample": true, "temperature": 0.0, "top_p": null}"#, 0.0, 1.0),
        ] {
            let read = read(json, None).unwrap();
            assert_eq!((read.temperature, read.topp), (temperature, topp), "{json}");
        }
    }

    #[test]
    fn what_is_ignored_is_named_if_it_would_change_answers() {
        let ignored = |json: &str| read(json, None).unwrap().ignored;
        let inert =
            r#"{"top_k": 0, "repetition_penalty": 1.0, "num_beams": 1, "bad_words_ids": null, "use_cache": true}"#;
        assert_eq!(ignored(inert), None);
        let named = ignored(r#"{"top_k": 50, "repetition_penalty": 1.1, "suppress_tokens": [5], "temperature": 1}"#);
        let named = named.unwrap();
        assert!(
            named.ends_with("ignored: repetition_penalty 1.1, suppress_tokens [5], top_k 50"),
            "{named}"
        );
    }

    #[test]
    fn values_that_cannot_be_are_refused() {
        for (json, words) in [
            (
                r#"{"eos_token_id": "x"}"#,
                "eos_token_id is \"x\"; it must be a token's id",
            ),
            (r#"{"eos_token_id": [1, -1]}"#, "eos_token_id is [1,-1]"),
            (r#"{"temperature": -1}"#, "temperature is -1; it must be a number that"),
            (r#"{"top_p": 0}"#, "top_p is 0; it must be a number above 0"),
            (r#"{"do_sample": 1}"#, "do_sample is 1; it must be true or false"),
            (
                r#"{"max_new_tokens": 1.5}"#,
                "max_new_tokens is 1.5; it must be a whole number",
            ),
            ("[]", "holds [], not an object"),
        ] {
            let error = read(json, None).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains(FILE), "{error}");
        }
    }
}
