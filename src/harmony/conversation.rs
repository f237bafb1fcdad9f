//! A conversation as programs write it, the messages of chat completions, and as harmony has it.
//!
//! The text is a list of messages, or an object that has it as `messages`, as the body of a request has: then with
//! `tools` and `reasoning_effort`. What else the system message says is named `date`, `knowledge_cutoff` and
//! `model_identity`. There is a date only if the caller gives one, so that two days give the same tokens. Fields of a
//! body that say how to sample change nothing here; any other field is refused by name, since it might. A
//! `response_format` with a schema becomes a section of the developer message; that the answer follows it is for
//! whoever samples.
//!
//! - `system` and `developer` become developer messages; those before all others are one, with the tools.
//! - `user` is one.
//! - `assistant` becomes its `reasoning` on channel analysis, its `content` on final, or on commentary where calls
//!   follow, and a message for each of its `tool_calls`.
//! - `tool` becomes a message of the tool that its `tool_call_id` names.

use super::json::Json;
use super::tools::{self, Tool};
use super::{ANALYSIS, COMMENTARY, CONSTRAIN, FINAL, FUNCTIONS};
use crate::error::{Error, Result, shown};

/// Fields of a request that its prompt is made of.
pub const OF_CONVERSATION: [&str; 10] = [
    "messages",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "response_format",
    "date",
    "knowledge_cutoff",
    "model_identity",
    "add_generation_prompt",
    "continue_final_message",
];

/// Fields of a request that do not change what its prompt is.
const OF_SAMPLING: [&str; 26] = [
    "model",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "n",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "parallel_tool_calls",
    "stream",
    "stream_options",
    "user",
    "metadata",
    "store",
    "stop_token_ids",
    "ignore_eos",
    "structured_outputs",
    "repetition_penalty",
];

const IDENTITY: &str = "You are ChatGPT, a large language model trained by OpenAI.";
const CUTOFF: &str = "2024-06";

/// A message of harmony.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Message {
    /// Who speaks: a role, or a tool.
    pub author: String,
    /// The name of whom the role is.
    pub name: Option<String>,
    pub recipient: Option<String>,
    pub channel: Option<&'static str>,
    pub content_type: Option<&'static str>,
    /// Encoded one by one.
    pub texts: Vec<String>,
}

impl Message {
    pub fn is_assistant_s(&self) -> bool {
        self.author == ASSISTANT
    }
}

pub(super) const ASSISTANT: &str = "assistant";

/// What comes behind the messages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Tail {
    /// The beginning of an answer.
    Answer,
    /// Nothing.
    Nothing,
    /// The last message stays open, to be continued. The answer that it is in begins with this message.
    Open(usize),
}

/// A conversation to render.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    pub(super) messages: Vec<Message>,
    pub(super) tail: Tail,
    tools: Vec<String>,
    format: Option<Format>,
}

/// The form that the final message is asked to have.
#[derive(Clone, Debug, PartialEq)]
struct Format {
    /// What it is called and how it is described, if the model is told of it.
    heading: Option<(String, String)>,
    schema: Json,
}

impl Conversation {
    /// Reads a conversation from JSON.
    pub fn parse(json: &[u8]) -> Result<Self> {
        let wrong = |error: serde_json::Error| Error::format("conversation", format!("it is no JSON: {error}"));
        Self::of(serde_json::from_slice(json).map_err(wrong)?)
    }

    /// Reads a conversation from a value.
    pub fn of(json: Json) -> Result<Self> {
        Self::read(json).map_err(|why| Error::format("conversation", why))
    }

    /// The message that the answer goes on with, if it does, without its text so far.
    pub fn open_message(&self) -> Option<super::read::Message> {
        let Tail::Open(_) = self.tail else { return None };
        self.messages.last().map(|message| super::read::Message {
            role: message.author.clone(),
            recipient: message.recipient.clone(),
            channel: message.channel.map(str::to_owned),
            content_type: message.content_type.map(str::to_owned),
            ..super::read::Message::default()
        })
    }

    /// The text so far of the message that the answer goes on with.
    pub fn open_text(&self) -> Option<String> {
        self.open_message()?;
        self.messages.last().map(|message| message.texts.concat())
    }

    /// The names of the functions that the model may call.
    pub fn tools(&self) -> &[String] {
        &self.tools
    }

    /// The JSON schema that the final message is asked to follow.
    pub fn response_schema(&self) -> Option<&Json> {
        self.format.as_ref().map(|format| &format.schema)
    }

    fn read(json: Json) -> Result<Self, String> {
        let request = match json {
            Json::List(_) => Json::Object(vec![("messages".into(), json)]),
            request => request,
        };
        let request = Fields::new("", &request, &[&OF_CONVERSATION[..], &OF_SAMPLING[..]].concat())?;
        let format = match request.get("response_format") {
            Some(format) => response_format(format)?,
            None => None,
        };
        let tools = match request.text_or("tool_choice", "auto")? {
            "auto" => tools(&request)?,
            "none" => Vec::new(),
            other => {
                return Err(format!(
                    "tool_choice is {other:?}; only \"auto\" and \"none\" are supported"
                ));
            }
        };
        let mut reader = Reader::default();
        reader.messages.push(system(&request, !tools.is_empty())?);
        let messages = request.list("messages")?;
        let is_instruction =
            |message: &&Json| matches!(message.get("role").and_then(Json::text), Some("system" | "developer"));
        let first = messages.iter().take_while(is_instruction).count();
        reader.developer(&messages[..first], 0, &tools, format.as_ref())?;
        for (at, message) in messages.iter().enumerate().skip(first) {
            reader.message(at, message)?;
        }
        let tail = match (
            request.flag("continue_final_message")?,
            request.flag("add_generation_prompt")?,
        ) {
            (Some(true), Some(true)) => {
                return Err("continue_final_message and add_generation_prompt exclude each other".into());
            }
            (Some(true), _) => reader.open()?,
            (_, Some(false)) => Tail::Nothing,
            _ => Tail::Answer,
        };
        Ok(Self {
            messages: reader.messages,
            tail,
            tools: tools.into_iter().map(|tool| tool.name).collect(),
            format,
        })
    }
}

/// The system message: what the model is, when it is, how much it reasons, and which channels there are.
fn system(request: &Fields<'_>, has_tools: bool) -> Result<Message, String> {
    let effort = request.text_or("reasoning_effort", "medium")?;
    if !["low", "medium", "high"].contains(&effort) {
        return Err(format!(
            "reasoning_effort is {effort:?}; use \"low\", \"medium\" or \"high\""
        ));
    }
    let mut text = request.text_or("model_identity", IDENTITY)?.to_owned();
    text += &format!("\nKnowledge cutoff: {}", request.text_or("knowledge_cutoff", CUTOFF)?);
    if request.get("date").is_some() {
        text += &format!("\nCurrent date: {}", request.text_or("date", "")?);
    }
    text += &format!("\n\nReasoning: {effort}\n\n# Valid channels: {ANALYSIS}, {COMMENTARY}, {FINAL}.");
    text += " Channel must be included for every message.";
    if has_tools {
        text += "\nCalls to these tools must go to the commentary channel: 'functions'.";
    }
    Ok(Message {
        author: "system".into(),
        texts: vec![text],
        ..Message::default()
    })
}

/// The JSON schema that a `response_format` asks for, if it does.
pub fn response_schema(format: &Json) -> Result<Option<Json>, String> {
    Ok(response_format(format)?.map(|format| format.schema))
}

/// The form of a request's `response_format`.
fn response_format(format: &Json) -> Result<Option<Format>, String> {
    let format = Fields::new("response_format", format, &["type", "json_schema"])?;
    match format.text("type")? {
        "text" => Ok(None),
        "json_object" => Ok(Some(Format {
            heading: None,
            schema: Json::Object(vec![("type".into(), Json::Text("object".into()))]),
        })),
        "json_schema" => {
            let named = format
                .get("json_schema")
                .ok_or("response_format.json_schema is missing")?;
            // An answer always follows its schema.
            let named = Fields::new(
                "response_format.json_schema",
                named,
                &["name", "description", "schema", "strict"],
            )?;
            let schema = match named.get("schema") {
                Some(schema @ (Json::Object(_) | Json::Bool(_))) => schema.clone(),
                _ => return Err(named.must("schema", "a JSON schema")),
            };
            let name = named.text_or("name", "answer")?.to_owned();
            Ok(Some(Format {
                heading: Some((name, named.text_or("description", "")?.to_owned())),
                schema,
            }))
        }
        other => Err(format!(
            "response_format.type is {other:?}; use \"text\", \"json_object\" or \"json_schema\""
        )),
    }
}

impl Format {
    /// The section of a developer message that says what the answer is to be like.
    fn section(&self) -> Option<String> {
        let (name, description) = self.heading.as_ref()?;
        let description: String = description.lines().map(|line| format!("// {line}\n")).collect();
        Some(format!(
            "# Response Formats\n\n## {name}\n\n{description}{}",
            self.schema
        ))
    }
}

/// The tools of a request.
fn tools(request: &Fields<'_>) -> Result<Vec<Tool>, String> {
    let Some(list) = request.get("tools") else {
        return Ok(Vec::new());
    };
    let list = list
        .list()
        .ok_or_else(|| format!("tools is {}; it must be a list", shown(list)))?;
    let tool = |(at, tool): (usize, &Json)| {
        let place = format!("tools[{at}]");
        let outer = Fields::new(&place, tool, &["type", "function"])?;
        // Whether arguments must follow the schema is for whoever samples.
        let function = outer.function(&["name", "description", "parameters", "strict"])?;
        Ok(Tool {
            name: function.text("name")?.to_owned(),
            description: function.text_or("description", "")?.to_owned(),
            parameters: function.get("parameters").cloned(),
        })
    };
    list.iter().enumerate().map(tool).collect()
}

/// Reads messages one after the other.
#[derive(Default)]
struct Reader {
    messages: Vec<Message>,
    /// Tool calls so far: their ids and the functions that they called.
    calls: Vec<(String, String)>,
}

impl Reader {
    /// The developer message of several, the first of which has the number `at`, of the tools, and of the answer's
    /// form.
    fn developer(
        &mut self,
        messages: &[Json],
        at: usize,
        tools: &[Tool],
        format: Option<&Format>,
    ) -> Result<(), String> {
        let mut instructions = Vec::new();
        for (at, message) in (at..).zip(messages) {
            let place = format!("messages[{at}]");
            let message = Fields::new(&place, message, &["role", "content", "name"])?;
            instructions.push(texts(&message)?.concat());
        }
        let instructions = instructions.join("\n\n");
        let mut sections = Vec::new();
        if !instructions.is_empty() {
            sections.push(format!("# Instructions\n\n{instructions}"));
        }
        if !tools.is_empty() {
            sections.push(tools::section(tools));
        }
        sections.extend(format.and_then(Format::section));
        if !sections.is_empty() {
            self.messages.push(Message {
                author: "developer".into(),
                texts: vec![sections.join("\n\n")],
                ..Message::default()
            });
        }
        Ok(())
    }

    fn message(&mut self, at: usize, message: &Json) -> Result<(), String> {
        let place = format!("messages[{at}]");
        let role = message.get("role").and_then(Json::text);
        match role.ok_or_else(|| format!("{place}.role is missing, or no text"))? {
            "system" | "developer" => self.developer(std::slice::from_ref(message), at, &[], None),
            "user" => {
                let message = Fields::new(&place, message, &["role", "content", "name"])?;
                self.messages.push(Message {
                    author: "user".into(),
                    name: name(&message)?,
                    texts: texts(&message)?,
                    ..Message::default()
                });
                Ok(())
            }
            ASSISTANT => self.assistant(&place, message),
            "tool" => self.tool(&place, message),
            other => Err(format!(
                "{place}.role is {other:?}; use \"system\", \"developer\", \"user\", \"assistant\" or \"tool\""
            )),
        }
    }

    fn assistant(&mut self, place: &str, message: &Json) -> Result<(), String> {
        let known = [
            "role",
            "content",
            "name",
            "reasoning",
            "reasoning_content",
            "thinking",
            "tool_calls",
            // Names of answers.
            "id",
            // What answers of other servers have beside it; null, or empty.
            "reasoning_details",
            "refusal",
            "annotations",
            "audio",
            "function_call",
        ];
        let message = Fields::new(place, message, &known)?;
        for field in ["reasoning_details", "refusal", "annotations", "audio", "function_call"] {
            match message.get(field) {
                None => {}
                Some(Json::List(empty)) if empty.is_empty() => {}
                Some(value) => return Err(format!("{place}.{field} is {}; it is not supported", shown(value))),
            }
        }
        let names = ["reasoning", "reasoning_content", "thinking"];
        let mut reasoning: Vec<&str> = Vec::new();
        for name in names.into_iter().filter(|name| message.get(name).is_some()) {
            reasoning.push(message.text(name)?);
        }
        if reasoning.iter().any(|text| text != &reasoning[0]) {
            return Err(format!(
                "{place} has its reasoning under several names, and they differ"
            ));
        }
        let name = name(&message)?;
        let on = |channel, texts| Message {
            author: ASSISTANT.into(),
            name: name.clone(),
            channel: Some(channel),
            texts,
            ..Message::default()
        };
        let calls = match message.get("tool_calls") {
            None => &[][..],
            Some(calls) => calls
                .list()
                .ok_or_else(|| format!("{place}.tool_calls is {}; it must be a list", shown(calls)))?,
        };
        let reasoning = reasoning.first().filter(|text| !text.is_empty());
        if let Some(reasoning) = reasoning {
            self.messages.push(on(ANALYSIS, vec![(*reasoning).to_owned()]));
        }
        let content = match message.get("content") {
            Some(_) => texts(&message)?,
            // An answer that says nothing has null.
            None if calls.is_empty() && reasoning.is_none() && message.object.get("content").is_none() => {
                return Err(format!("{place}.content is missing"));
            }
            None => Vec::new(),
        };
        let is_said = content.iter().any(|text| !text.is_empty());
        if calls.is_empty() {
            // An empty answer is one, too, unless it is reasoning alone.
            if is_said || reasoning.is_none() {
                self.messages.push(on(FINAL, content));
            }
        } else if is_said {
            self.messages.push(on(COMMENTARY, content));
        }
        for (at, call) in calls.iter().enumerate() {
            let place = format!("{place}.tool_calls[{at}]");
            let call = Fields::new(&place, call, &["id", "type", "function", "index"])?;
            let function = call.function(&["name", "arguments"])?;
            let called = function.text("name")?;
            let called = called.strip_prefix(FUNCTIONS).unwrap_or(called);
            let arguments = match function.get("arguments") {
                // Some programs pass the arguments as they are.
                Some(object @ Json::Object(_)) => object.to_string(),
                Some(_) => function.text("arguments")?.to_owned(),
                None => String::new(),
            };
            self.calls.push((call.text_or("id", "")?.to_owned(), called.to_owned()));
            self.messages.push(Message {
                recipient: Some(format!("{FUNCTIONS}{called}")),
                content_type: Some(JSON_TYPE),
                ..on(COMMENTARY, vec![arguments])
            });
        }
        Ok(())
    }

    fn tool(&mut self, place: &str, message: &Json) -> Result<(), String> {
        let message = Fields::new(place, message, &["role", "content", "name", "tool_call_id"])?;
        let id = message.text_or("tool_call_id", "")?;
        let called = self.calls.iter().rev().find(|(call, _)| !id.is_empty() && call == id);
        let name = match (message.get("name"), called) {
            (_, Some((_, name))) => name.clone(),
            (Some(_), None) => message.text("name")?.to_owned(),
            (None, None) => {
                return Err(format!(
                    "{place}.tool_call_id is {id:?}, which no call before it has; give it, or the function's name"
                ));
            }
        };
        let name = name.strip_prefix(FUNCTIONS).unwrap_or(&name);
        self.messages.push(Message {
            author: format!("{FUNCTIONS}{name}"),
            recipient: Some(ASSISTANT.into()),
            channel: Some(COMMENTARY),
            texts: texts(&message)?,
            ..Message::default()
        });
        Ok(())
    }

    /// Leaves the last message open.
    fn open(&self) -> Result<Tail, String> {
        let last = self.messages.len() - 1;
        if !self.messages[last].is_assistant_s() {
            return Err("continue_final_message is true where the last message is not the assistant's".into());
        }
        // What it reasoned before is part of what goes on.
        let before = self.messages.iter().rposition(|message| !message.is_assistant_s());
        Ok(Tail::Open(before.map_or(0, |before| before + 1)))
    }
}

/// The content type of a call's arguments.
const JSON_TYPE: &str = "<|constrain|>json";
const _: () = assert!(JSON_TYPE.len() == CONSTRAIN.len() + "json".len());

/// The name of whom a message is, if it has one.
fn name(message: &Fields<'_>) -> Result<Option<String>, String> {
    let name = message.get("name").map(|_| message.text("name"));
    Ok(name.transpose()?.map(str::to_owned))
}

/// A message's texts: its content, or the parts of it.
fn texts(message: &Fields<'_>) -> Result<Vec<String>, String> {
    let place = message.name("content");
    match message.get("content") {
        Some(Json::Text(text)) => Ok(vec![text.clone()]),
        Some(Json::List(parts)) => {
            let text = |(at, part): (usize, &Json)| {
                let place = format!("{place}[{at}]");
                match part.get("type").and_then(Json::text) {
                    Some("text") => {}
                    _ => {
                        return Err(format!(
                            "{place} is {}; only parts of type \"text\" are supported",
                            shown(part)
                        ));
                    }
                }
                // Where others keep what they have computed changes no answer.
                let part = Fields::new(&place, part, &["type", "text", "cache_control"])?;
                Ok(part.text("text")?.to_owned())
            };
            parts.iter().enumerate().map(text).collect()
        }
        Some(other) => Err(format!(
            "{place} is {}; it must be a text, or a list of parts",
            shown(other)
        )),
        None => Err(format!("{place} is missing")),
    }
}

/// An object whose fields are known.
struct Fields<'a> {
    /// Where it stands, for messages; empty: it is the whole.
    place: String,
    object: &'a Json,
}

impl<'a> Fields<'a> {
    /// Refuses what is no object, and fields with a value that are not in the list.
    fn new(place: &str, object: &'a Json, known: &[&str]) -> Result<Self, String> {
        let Json::Object(fields) = object else {
            let what = if place.is_empty() { "it" } else { place };
            return Err(format!("{what} is {}; it must be an object", shown(object)));
        };
        let read = Self {
            place: place.to_owned(),
            object,
        };
        let is_unknown = |(name, value): &&(String, Json)| !known.contains(&name.as_str()) && *value != Json::Null;
        match fields.iter().find(is_unknown) {
            Some((name, value)) => Err(format!(
                "{} is {}; the field is not known here, and it might change the prompt",
                read.name(name),
                shown(value)
            )),
            None => Ok(read),
        }
    }

    fn name(&self, field: &str) -> String {
        if self.place.is_empty() {
            field.to_owned()
        } else {
            format!("{}.{field}", self.place)
        }
    }

    /// The fields of the function that a tool, or a call of one, has.
    fn function(&self, known: &[&str]) -> Result<Self, String> {
        match self.text_or("type", "function")? {
            "function" => {}
            other => {
                let name = self.name("type");
                return Err(format!("{name} is {other:?}; only \"function\" is supported"));
            }
        }
        let name = self.name("function");
        let function = self.get("function").ok_or_else(|| format!("{name} is missing"))?;
        Self::new(&name, function, known)
    }

    /// A field that is there and not null.
    fn get(&self, field: &str) -> Option<&'a Json> {
        self.object.given(field)
    }

    fn must(&self, field: &str, kind: &str) -> String {
        match self.get(field) {
            Some(value) => format!("{} is {}; it must be {kind}", self.name(field), shown(value)),
            None => format!("{} is missing; it must be {kind}", self.name(field)),
        }
    }

    fn text(&self, field: &str) -> Result<&'a str, String> {
        self.get(field)
            .and_then(Json::text)
            .ok_or_else(|| self.must(field, "a text"))
    }

    fn text_or(&self, field: &str, default: &'a str) -> Result<&'a str, String> {
        match self.get(field) {
            Some(_) => self.text(field),
            None => Ok(default),
        }
    }

    fn list(&self, field: &str) -> Result<&'a [Json], String> {
        self.get(field)
            .and_then(Json::list)
            .ok_or_else(|| self.must(field, "a list"))
    }

    fn flag(&self, field: &str) -> Result<Option<bool>, String> {
        match self.get(field) {
            None => Ok(None),
            Some(Json::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.must(field, "true or false")),
        }
    }
}
