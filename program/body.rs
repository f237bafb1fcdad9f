//! A line of a file of requests, as OpenAI's batches have it, and what it asks for.
//!
//! A field that would change the answer and is not supported is refused, by name, unless its value is the one that
//! changes nothing. A field that nobody knows is named once, and ignored.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use getp::batch::MOST_TOP;
use getp::error::{cut, shown};
use getp::grammar::Grammar;
use getp::harmony::{self, Conversation, Json, OF_CONVERSATION};
use getp::text::{Specials, TextTokenizer};

use serde_json::Number;

use crate::forms::{self, Forms};
use crate::input;
use crate::structured::Form as Structure;

/// What is asked for.
#[derive(Debug)]
pub struct Asked {
    pub form: Form,
    /// The prompts' tokens. A chat has one.
    pub prompts: Vec<Vec<u32>>,
    /// How many answers each prompt gets.
    pub n: usize,
    /// The name of the model, for the answer.
    pub model: Option<String>,
    pub max_tokens: Option<usize>,
    pub min_tokens: usize,
    pub temperature: Option<f32>,
    pub topp: Option<f32>,
    pub seed: Option<u64>,
    pub ignore_end: bool,
    pub stop_tokens: Vec<u32>,
    pub stops: Vec<String>,
    /// Whether the answer has log-probabilities, and of how many of the most probable tokens.
    pub logprobs: Option<usize>,
    /// What the answer must be like.
    pub grammar: Option<Arc<dyn Grammar>>,
}

/// The form of the answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// `/v1/chat/completions`, and the message that the answer goes on with.
    Chat(Option<harmony::Message>),
    /// `/v1/completions`
    Completion,
    /// The log-probabilities of the prompt's tokens behind so many of them.
    Score(usize),
}

/// What lines are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lines {
    /// Requests of OpenAI's batches.
    Requests,
    /// Continuations to be scored.
    Continuations,
}

/// Reads lines.
pub struct Reader<'a> {
    pub lines: Lines,
    pub tokenizer: &'a TextTokenizer,
    /// What becomes of special tokens' names in prompts that are texts.
    pub specials: Specials,
    /// Tokens of the model.
    pub vocab_size: usize,
    /// Compiles what answers must be like.
    pub forms: Forms,
    /// The fields that nobody knows, as far as they have been named.
    pub unknown: Mutex<BTreeSet<String>>,
    /// Says something of them.
    pub warn: &'a (dyn Fn(&str) + Sync),
}

/// The most fields that nobody knows that are named, and the most characters of a name.
const MOST_NAMED: usize = 20;
const MOST_OF_NAME: usize = 80;

/// The most answers to a prompt, and prompts of a request.
const MOST_ANSWERS: u64 = 1024;

/// What the answer to a completion has at most, unless the request says otherwise, as everywhere.
const COMPLETION_TOKENS: usize = 16;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Fields of either form that are used.
const USED: [&str; 13] = [
    "model",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "n",
    "logprobs",
    "response_format",
    "structured_outputs",
];
const USED_IN_CHAT: [&str; 2] = ["max_completion_tokens", "top_logprobs"];

/// Fields that change no answer.
const INERT: [&str; 15] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "stream",
    "stream_options",
    // A call ends the answer, so that there is one.
    "parallel_tool_calls",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "priority",
    "cache_salt",
    "detokenize",
    "spaces_between_special_tokens",
];

/// Fields that would change the answer, or what is said of it, and the value in JSON that does not, beside null, false
/// and what is empty.
const REFUSED: [(&str, &[&str]); 47] = [
    ("frequency_penalty", &["0"]),
    ("presence_penalty", &["0"]),
    ("repetition_penalty", &["1"]),
    ("length_penalty", &["1"]),
    ("top_k", &["0", "-1"]),
    ("min_p", &["0"]),
    ("typical_p", &["1"]),
    ("top_a", &["0", "0.0"]),
    ("logit_bias", &[]),
    ("logits_processors", &[]),
    ("best_of", &["1"]),
    ("echo", &[]),
    ("suffix", &[]),
    ("use_beam_search", &[]),
    ("early_stopping", &[]),
    ("bad_words", &[]),
    ("allowed_token_ids", &[]),
    ("functions", &[]),
    ("function_call", &["\"auto\"", "\"none\""]),
    ("prompt_logprobs", &[]),
    ("prompt_embeds", &[]),
    ("truncate_prompt_tokens", &[]),
    ("include_stop_str_in_output", &[]),
    ("skip_special_tokens", &["true"]),
    ("add_special_tokens", &["true"]),
    ("return_tokens_as_token_ids", &[]),
    ("return_token_ids", &[]),
    ("guided_json", &[]),
    ("guided_regex", &[]),
    ("guided_choice", &[]),
    ("guided_grammar", &[]),
    ("structural_tag", &[]),
    ("chat_template", &[]),
    ("chat_template_kwargs", &[]),
    ("documents", &[]),
    ("mm_processor_kwargs", &[]),
    ("modalities", &["[\"text\"]"]),
    ("audio", &[]),
    ("prediction", &[]),
    ("verbosity", &["\"medium\""]),
    ("web_search_options", &[]),
    ("thinking_token_budget", &[]),
    ("include_reasoning", &["true"]),
    ("kv_transfer_params", &[]),
    ("vllm_xargs", &[]),
    ("reasoning", &[]),
    ("thinking", &[]),
];

impl Reader<'_> {
    /// The custom_id of a line, and what it asks for, or why it cannot be answered.
    pub fn read(&self, line: &[u8]) -> (Option<String>, Result<Asked, String>) {
        let json = serde_json::from_slice::<Json>(line.trim_ascii_end());
        let custom_id = input::custom_id(line, json.as_ref().ok());
        let asked = match json {
            Ok(json @ Json::Object(_)) => self.envelope(&json),
            Ok(other) => Err(format!("the line is {}; it must be an object", shown(&other))),
            Err(why) => {
                let why = why.to_string().replace(" at line 1 column", " at column");
                Err(format!("the line is no JSON: {why}"))
            }
        };
        (custom_id, asked)
    }

    fn envelope(&self, line: &Json) -> Result<Asked, String> {
        let line = Object(line);
        line.text("custom_id")?.ok_or("custom_id is missing")?;
        if self.lines == Lines::Continuations {
            return self.score(&line);
        }
        self.look_for_unknown(&line, "", &["custom_id", "method", "url", "body"]);
        if let Some(method) = line.text("method")?.filter(|method| *method != "POST") {
            return Err(format!("method is {method:?}; it must be \"POST\""));
        }
        let body = match line.get("body") {
            Some(body @ Json::Object(_)) => Object(body),
            Some(other) => return Err(format!("body is {}; it must be an object", shown(other))),
            None => return Err("body is missing".into()),
        };
        match line.text("url")? {
            Some(CHAT) => self.chat(&body),
            Some(COMPLETIONS) => self.completion(&body),
            Some(other) => Err(format!("url is {other:?}; use {CHAT:?} or {COMPLETIONS:?}")),
            None => Err(format!("url is missing; use {CHAT:?} or {COMPLETIONS:?}")),
        }
    }

    /// A continuation and what is before it, two texts or two lists of ids.
    fn score(&self, line: &Object<'_>) -> Result<Asked, String> {
        self.look_for_unknown(line, "", &["custom_id", "context", "continuation"]);
        let given = |name: &str| line.get(name).ok_or_else(|| format!("{name} is missing"));
        let (context, prompt) = match (given("context")?, given("continuation")?) {
            (Json::Text(context), Json::Text(continuation)) => {
                // A blank at the border belongs to the word behind it, as in the texts that the model has learnt.
                let before = context.trim_end();
                let encode = |text: &str| self.tokenizer.encode(text.as_bytes(), self.specials);
                let whole = encode(&format!("{context}{continuation}")).map_err(|why| why.to_string())?;
                (encode(before).map_err(|why| why.to_string())?.len(), whole)
            }
            (Json::List(context), Json::List(continuation)) => {
                let before = self.ids("context", context)?;
                let whole = [before.as_slice(), &self.ids("continuation", continuation)?].concat();
                (before.len(), whole)
            }
            _ => return Err("context and continuation must be two texts, or two lists of ids".into()),
        };
        if context == 0 {
            return Err(
                "the context has no token of its own; begin it with one, such as the id of <|startoftext|>".into(),
            );
        }
        if prompt.len() <= context {
            return Err("the continuation has no token of its own".into());
        }
        Ok(Asked {
            form: Form::Score(context),
            prompts: vec![prompt],
            n: 1,
            model: None,
            max_tokens: Some(1),
            min_tokens: 0,
            temperature: Some(0.0),
            topp: None,
            seed: None,
            ignore_end: false,
            stop_tokens: Vec::new(),
            stops: Vec::new(),
            logprobs: None,
            grammar: None,
        })
    }

    /// Names the fields that are not known, once each.
    fn look_for_unknown(&self, object: &Object<'_>, place: &str, known: &[&str]) {
        for name in object.names().filter(|name| !known.contains(name)) {
            let name = cut(format!("{place}{name}"), MOST_OF_NAME);
            let mut unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
            if unknown.len() == MOST_NAMED {
                return;
            }
            if !unknown.contains(&name) {
                (self.warn)(&format!("{name} is not known, and ignored"));
                unknown.insert(name);
                if unknown.len() == MOST_NAMED {
                    (self.warn)("further fields that are not known are ignored without a word");
                }
            }
        }
    }

    fn chat(&self, body: &Object<'_>) -> Result<Asked, String> {
        self.check(body, &[&OF_CONVERSATION[..], &USED_IN_CHAT].concat())?;
        let fields = OF_CONVERSATION
            .into_iter()
            .filter_map(|name| Some((name.to_owned(), body.get(name)?.clone())));
        let conversation = Conversation::of(Json::Object(fields.collect())).map_err(|why| why.to_string())?;
        let prompt = harmony::render(self.tokenizer, &conversation).map_err(|why| why.to_string())?;
        let max_tokens = match (body.size("max_completion_tokens")?, body.size("max_tokens")?) {
            (Some(a), Some(b)) if a != b => {
                return Err(format!(
                    "max_completion_tokens is {a} and max_tokens {b}; give one of them"
                ));
            }
            (a, b) => a.or(b),
        };
        let top = body.size("top_logprobs")?;
        let logprobs = match (body.flag("logprobs")?.unwrap_or(false), top) {
            (false, None | Some(0)) => None,
            (false, Some(_)) => return Err("top_logprobs is given without logprobs; set that to true".into()),
            (true, top) => Some(top.unwrap_or(0)),
        };
        let form = Form::Chat(conversation.open_message());
        let grammar = match structure(body, conversation.response_schema())? {
            Some(form) => Some(self.forms.of_answer(&form, &conversation)?),
            None => None,
        };
        self.asked(
            body,
            form,
            vec![prompt],
            max_tokens,
            (logprobs, "top_logprobs"),
            grammar,
        )
    }

    fn completion(&self, body: &Object<'_>) -> Result<Asked, String> {
        self.check(body, &["prompt"])?;
        let prompts = self.prompts(body.get("prompt").ok_or("prompt is missing")?)?;
        let max_tokens = body.size("max_tokens")?.or(Some(COMPLETION_TOKENS));
        let logprobs = body.size("logprobs")?;
        let schema = match body.get("response_format") {
            Some(format) => harmony::response_schema(format)?,
            None => None,
        };
        let grammar = match structure(body, schema.as_ref())? {
            Some(form) => Some(self.forms.of_text(&form)?),
            None => None,
        };
        self.asked(
            body,
            Form::Completion,
            prompts,
            max_tokens,
            (logprobs, "logprobs"),
            grammar,
        )
    }

    /// The prompts of a completion: a text or ids, or a list of either.
    fn prompts(&self, prompt: &Json) -> Result<Vec<Vec<u32>>, String> {
        let wrong = || {
            format!(
                "prompt is {}; it must be a text, ids, or a list of either",
                shown(prompt)
            )
        };
        let one = |prompt: &Json| match prompt {
            Json::Text(text) => self
                .tokenizer
                .encode(text.as_bytes(), self.specials)
                .map_err(|why| why.to_string()),
            Json::List(ids) => self.ids("prompt", ids),
            _ => Err(wrong()),
        };
        let prompts = match prompt {
            Json::List(list) if list.iter().all(|one| matches!(one, Json::Number(_))) => vec![one(prompt)?],
            Json::List(list) => list.iter().map(one).collect::<Result<_, _>>()?,
            prompt => vec![one(prompt)?],
        };
        if prompts.len() as u64 > MOST_ANSWERS {
            return Err(format!(
                "prompt has {} prompts; the most are {MOST_ANSWERS}",
                prompts.len()
            ));
        }
        Ok(prompts)
    }

    fn ids(&self, name: &str, ids: &[Json]) -> Result<Vec<u32>, String> {
        let id = |id: &Json| {
            let number = id
                .number()
                .and_then(|id| id.as_u64())
                .filter(|&id| id < self.vocab_size as u64);
            number.map(|id| id as u32).ok_or_else(|| {
                let most = self.vocab_size - 1;
                format!("{name} has {}; tokens are from 0 to {most}", shown(id))
            })
        };
        ids.iter().map(id).collect()
    }

    /// Refuses fields that would change the answer, and names unknown ones.
    fn check(&self, body: &Object<'_>, own: &[&str]) -> Result<(), String> {
        for (name, harmless) in REFUSED {
            if let Some(value) = body.get(name).filter(|value| !is_nothing(value))
                && !harmless.iter().any(|harmless| is(value, harmless))
            {
                return Err(format!(
                    "{name} is {}; it would change the answer, and is not supported",
                    shown(value)
                ));
            }
        }
        let refused = REFUSED.map(|(name, _)| name);
        self.look_for_unknown(body, "body.", &[own, &USED, &INERT, &refused].concat());
        Ok(())
    }

    /// What either form asks for.
    fn asked(
        &self,
        body: &Object<'_>,
        form: Form,
        prompts: Vec<Vec<u32>>,
        max_tokens: Option<usize>,
        (logprobs, name_of_top): (Option<usize>, &str),
        grammar: Option<Arc<dyn Grammar>>,
    ) -> Result<Asked, String> {
        if grammar.is_some() {
            for name in ["min_tokens", "ignore_eos", "stop", "stop_token_ids"] {
                if body
                    .get(name)
                    .is_some_and(|value| !is_nothing(value) && !is(value, "0"))
                {
                    return Err(format!(
                        "{name} is given with a form; an answer of a form ends where that does"
                    ));
                }
            }
        }
        if prompts.iter().any(Vec::is_empty) {
            return Err("the prompt has no token".into());
        }
        if max_tokens == Some(0) {
            return Err("the answer is to have no token; ask for 1 or more".into());
        }
        if let Some(top) = logprobs.filter(|&top| top > MOST_TOP) {
            return Err(format!("{name_of_top} is {top}; the most are {MOST_TOP}"));
        }
        let n = body.size("n")?.unwrap_or(1);
        if n == 0 || n.saturating_mul(prompts.len()) as u64 > MOST_ANSWERS {
            return Err(format!(
                "n is {n}; it must be from 1 to {MOST_ANSWERS}, over all prompts"
            ));
        }
        let stops = match body.get("stop") {
            None => Vec::new(),
            Some(Json::Text(text)) => vec![text.clone()],
            Some(Json::List(list)) if list.iter().all(|stop| stop.text().is_some()) => {
                list.iter().filter_map(Json::text).map(str::to_owned).collect()
            }
            Some(other) => {
                return Err(format!(
                    "stop is {}; it must be a text, or a list of them",
                    shown(other)
                ));
            }
        };
        if stops.iter().any(String::is_empty) {
            return Err("stop has an empty text, which is everywhere; leave it out".into());
        }
        let stop_tokens = match body.get("stop_token_ids") {
            None => Vec::new(),
            Some(Json::List(ids)) => self.ids("stop_token_ids", ids)?,
            Some(other) => return Err(format!("stop_token_ids is {}; it must be a list of ids", shown(other))),
        };
        let seed = match body.get("seed") {
            None => None,
            Some(value) => {
                let number = value.number();
                let signed = |seed: &Number| seed.as_i64().map(i64::cast_unsigned);
                let seed = number.and_then(|seed| signed(seed).or_else(|| whole(seed)));
                Some(seed.ok_or_else(|| format!("seed is {}; it must be a whole number of 64 bits", shown(value)))?)
            }
        };
        Ok(Asked {
            form,
            prompts,
            n,
            model: body.text("model")?.map(str::to_owned),
            max_tokens,
            min_tokens: body.size("min_tokens")?.unwrap_or(0),
            temperature: body.real(
                "temperature",
                |value| value >= 0.0,
                "0, which is greedy, or a number above it in float32's range",
            )?,
            topp: body.real(
                "top_p",
                |value| value > 0.0 && value <= 1.0,
                "a number above 0, at most 1",
            )?,
            seed,
            ignore_end: body.flag("ignore_eos")?.unwrap_or(false),
            stop_tokens,
            stops,
            logprobs,
            grammar,
        })
    }
}

/// What the answer must be like, if either field says so.
fn structure(body: &Object<'_>, schema: Option<&Json>) -> Result<Option<Structure>, String> {
    match (schema, body.get("structured_outputs")) {
        (Some(_), Some(_)) => Err("response_format and structured_outputs exclude each other".into()),
        (Some(schema), None) => forms::json("response_format", schema).map(Some),
        (None, Some(given)) => forms::structured_outputs(given).map(Some),
        (None, None) => Ok(None),
    }
}

/// A whole number that is not negative. Some programs write 20.0 for 20.
fn whole(number: &Number) -> Option<u64> {
    let exact = |number: &f64| number.fract() == 0.0 && (0.0..9_007_199_254_740_992.0).contains(number);
    number
        .as_u64()
        .or_else(|| number.as_f64().filter(exact).map(|number| number as u64))
}

/// Whether a value is this one in JSON, however a number is written.
fn is(value: &Json, json: &str) -> bool {
    let number = value.number().and_then(Number::as_f64);
    value.to_string() == json || number.is_some() && number == json.parse().ok()
}

/// Null, false, and what is empty.
fn is_nothing(value: &Json) -> bool {
    match value {
        Json::Null | Json::Bool(false) => true,
        Json::Text(text) => text.is_empty(),
        Json::List(list) => list.is_empty(),
        Json::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// An object, and its fields as they must be.
struct Object<'a>(&'a Json);

impl<'a> Object<'a> {
    fn names(&self) -> impl Iterator<Item = &'a str> {
        let fields = match self.0 {
            Json::Object(fields) => fields.as_slice(),
            _ => &[],
        };
        fields.iter().map(|(name, _)| name.as_str())
    }

    /// A field that is there and not null.
    fn get(&self, name: &str) -> Option<&'a Json> {
        self.0.given(name)
    }

    fn read<T>(&self, name: &str, kind: &str, read: impl Fn(&'a Json) -> Option<T>) -> Result<Option<T>, String> {
        let value = self.get(name);
        let read =
            value.map(|value| read(value).ok_or_else(|| format!("{name} is {}; it must be {kind}", shown(value))));
        read.transpose()
    }

    fn text(&self, name: &str) -> Result<Option<&'a str>, String> {
        self.read(name, "a text", Json::text)
    }

    fn flag(&self, name: &str) -> Result<Option<bool>, String> {
        self.read(name, "true or false", |value| match value {
            Json::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    fn size(&self, name: &str) -> Result<Option<usize>, String> {
        self.read(name, "a whole number that is not negative, below 2^53", |value| {
            usize::try_from(whole(value.number()?)?).ok()
        })
    }

    fn real(&self, name: &str, fits: impl Fn(f32) -> bool, kind: &str) -> Result<Option<f32>, String> {
        self.read(name, kind, |value| {
            let value = value.number()?.as_f64()? as f32;
            (value.is_finite() && fits(value)).then_some(value)
        })
    }
}
