//! The tokens of an answer to messages.
//!
//! The prompt ends in `<|start|>assistant`, so an answer begins within a header. A message is a header, `<|message|>`
//! and a text, up to a token that ends it. Reading is lenient, since the model may write anything:
//!
//! - A header that says neither channel nor recipient is that of a final message, and a text without any header is one.
//! - A header that the form does not have is text, together with what stands behind it, and the message has its ids.
//! - A message that is cut is a message, and so is a header that is cut where it is one.
//! - A `<|start|>` ends the message before it. Other special tokens within a text are their names.

use std::sync::Arc;

use serde::Serialize;

use super::{ANALYSIS, COMMENTARY, CONSTRAIN, FINAL, FUNCTIONS, Frame};
use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::text::{Specials, TextTokenizer, take_characters};

const ASSISTANT: &str = "assistant";

/// A message of an answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Message {
    /// Who speaks: the assistant, or whom the model takes for somebody else.
    pub role: String,
    /// Whom it is for, such as `functions.get_weather`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recipient: Option<String>,
    /// `analysis`, `commentary` or `final`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel: Option<String>,
    /// The form of its text, such as `<|constrain|>json`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    /// Its text.
    pub content: String,
    /// The tokens of a message whose header the form does not have; its text has the header, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ids: Option<Vec<u32>>,
}

/// A piece of a message's text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Delta {
    /// The number of the message within the answer.
    pub message: usize,
    /// Its channel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel: Option<String>,
    /// Its recipient.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recipient: Option<String>,
    /// The text that follows that of the piece before.
    pub content: String,
}

/// What an answer is: a message of chat completions, and the messages that it was made of.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    /// The message as chat completions have it.
    pub message: Chat,
    /// `stop`, `tool_calls`, or `length` where no token ends the answer.
    pub finish_reason: &'static str,
    /// The messages of harmony.
    pub messages: Vec<Message>,
}

/// A message of chat completions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Chat {
    role: &'static str,
    /// What is for the user; null if there is nothing.
    pub content: Option<String>,
    /// What was thought.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The functions that are called.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<Call>,
}

/// A call of a function.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Call {
    id: String,
    r#type: &'static str,
    /// What is called.
    pub function: Function,
}

/// A function and its arguments.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// In JSON, if the model has written it right.
    pub arguments: String,
}

/// Reads the tokens of an answer while they come.
pub struct Reader {
    tokenizer: Arc<TextTokenizer>,
    frame: Frame,
    messages: Vec<Message>,
    state: State,
    /// The tokens of the message so far, those of its header included.
    ids: Vec<u32>,
    /// The beginning of a character.
    kept: Vec<u8>,
    /// The token that has ended the last message, unless another has begun.
    end: Option<u32>,
}

#[derive(Clone, Debug, PartialEq)]
enum State {
    /// In a header, whose tokens begin behind `<|start|>`. That of an answer's first message may lack its role.
    Header { is_first: bool },
    /// In the text of the last of the messages.
    Text,
    /// Behind a message.
    Between,
}

/// What a message is to the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// He does not see it.
    Thought,
    /// It is for a tool.
    Call,
    /// He sees it.
    Final,
}

impl Kind {
    /// That of a message with this recipient and channel.
    pub(super) fn of(recipient: Option<&str>, channel: Option<&str>) -> Self {
        match (recipient, channel) {
            (Some(_), _) => Self::Call,
            (None, Some(ANALYSIS)) => Self::Thought,
            (None, _) => Self::Final,
        }
    }
}

impl Delta {
    /// Whether it is part of what the user sees, the content of the answer.
    pub fn is_content(&self) -> bool {
        Kind::of(self.recipient.as_deref(), self.channel.as_deref()) == Kind::Final
    }
}

impl Reader {
    /// A reader that has seen no token.
    pub fn new(tokenizer: Arc<TextTokenizer>) -> Result<Self> {
        Ok(Self {
            frame: Frame::of(&tokenizer)?,
            tokenizer,
            messages: Vec::new(),
            state: State::Header { is_first: true },
            ids: Vec::new(),
            kept: Vec::new(),
            end: None,
        })
    }

    /// A reader of an answer that goes on with this message, if there is one.
    pub fn going_on(tokenizer: Arc<TextTokenizer>, message: Option<Message>) -> Result<Self> {
        let mut reader = Self::new(tokenizer)?;
        if let Some(message) = message {
            reader.open(message);
        }
        Ok(reader)
    }

    /// Whether a token ends messages, so that it says how the answer ends.
    pub fn is_end(&self, id: u32) -> bool {
        let frame = &self.frame;
        [frame.end, frame.call, frame.r#return, frame.endoftext].contains(&id)
    }

    /// Reads tokens; gives the pieces of texts that are whole characters with them.
    pub fn next(&mut self, ids: impl IntoIterator<Item = u32>) -> Result<Vec<Delta>> {
        let mut deltas = Vec::new();
        for id in ids {
            self.token(id, &mut deltas)?;
        }
        Ok(deltas)
    }

    /// Reads no more; gives the pieces of texts that only the answer's end has shown to be such.
    pub fn close(&mut self) -> Result<Vec<Delta>> {
        let mut deltas = Vec::new();
        self.finish(None, &mut deltas)?;
        Ok(deltas)
    }

    /// The answer. The reader is as new afterwards.
    pub fn end(&mut self) -> Result<Answer> {
        self.finish(None, &mut Vec::new())?;
        let answer = Answer::of(std::mem::take(&mut self.messages), self.end.take(), &self.frame);
        self.state = State::Header { is_first: true };
        Ok(answer)
    }

    fn token(&mut self, id: u32, deltas: &mut Vec<Delta>) -> Result<()> {
        let Frame { start, message, .. } = self.frame;
        if id == start {
            self.finish(None, deltas)?;
            self.end = None;
            self.state = State::Header { is_first: false };
            return Ok(());
        }
        if self.is_end(id) {
            return self.finish(Some(id), deltas);
        }
        self.end = None;
        memory::push(&mut self.ids, id, Purpose::Requests)?;
        match self.state {
            State::Header { is_first } if id == message => {
                self.ids.pop();
                let header = self.header(is_first, true);
                self.ids.push(id);
                match header {
                    Some(header) => self.open(header),
                    None => self.open_as_text(deltas)?,
                }
            }
            State::Header { .. } => {}
            State::Text => {
                let bytes = self.tokenizer.bytes(id, Specials::Tokens);
                memory::append(&mut self.kept, bytes, Purpose::Requests)?;
                let text = take_characters(&mut self.kept);
                self.add(text, deltas);
            }
            State::Between => self.open_as_text(deltas)?,
        }
        Ok(())
    }

    /// Ends the message, if there is one, with this token.
    fn finish(&mut self, end: Option<u32>, deltas: &mut Vec<Delta>) -> Result<()> {
        if let State::Header { is_first } = self.state {
            // `<|start|>` says nothing, also with a role behind it.
            let says_nothing = self.ids.is_empty() || !is_first && self.text(&self.ids).as_deref() == Some(ASSISTANT);
            // A header that is cut may be one all the same.
            match self.header(is_first, false) {
                _ if says_nothing => {}
                Some(header) => self.open(header),
                None => self.open_as_text(deltas)?,
            }
        }
        if self.state == State::Text {
            let rest = String::from_utf8_lossy(&self.kept).into_owned();
            self.kept.clear();
            self.add(rest, deltas);
            if let Some(ids) = self.messages.last_mut().and_then(|message| message.ids.as_mut()) {
                *ids = std::mem::take(&mut self.ids);
            }
        }
        self.ids.clear();
        self.state = State::Between;
        self.end = end.or(self.end);
        Ok(())
    }

    /// Begins a message.
    fn open(&mut self, header: Message) {
        self.messages.push(header);
        self.state = State::Text;
    }

    /// Begins a message that is the text of all its tokens so far.
    fn open_as_text(&mut self, deltas: &mut Vec<Delta>) -> Result<()> {
        let ids = self.ids.iter().copied();
        self.kept = self.tokenizer.decode(ids.clone(), Specials::Tokens)?;
        let is_framed = ids
            .clone()
            .any(|id| [self.frame.channel, self.frame.message].contains(&id));
        self.open(Message {
            role: ASSISTANT.into(),
            ids: is_framed.then(Vec::new),
            ..Message::default()
        });
        let text = take_characters(&mut self.kept);
        self.add(text, deltas);
        Ok(())
    }

    /// Adds to the text of the last message.
    fn add(&mut self, text: String, deltas: &mut Vec<Delta>) {
        let number = self.messages.len() - 1;
        let message = &mut self.messages[number];
        message.content += &text;
        if !text.is_empty() {
            deltas.push(Delta {
                message: number,
                channel: message.channel.clone(),
                recipient: message.recipient.clone(),
                content: text,
            });
        }
    }

    /// What the tokens of the header say; `None` if the form has no such header. One that is cut must say a channel, or
    /// whom it is for.
    fn header(&self, is_first: bool, is_whole: bool) -> Option<Message> {
        let mut header = Message::default();
        let mut words = Vec::new();
        let mut rest = self.ids.as_slice();
        let is_mark = |id: &u32| [self.frame.channel, self.frame.constrain].contains(id);
        loop {
            let length = rest.iter().position(is_mark).unwrap_or(rest.len());
            let (run, behind) = rest.split_at(length);
            let text = self.text(run)?;
            words.extend(text.split_whitespace().map(str::to_owned));
            let Some((mark, behind)) = behind.split_first() else {
                break;
            };
            let length = behind.iter().position(is_mark).unwrap_or(behind.len());
            let text = self.text(&behind[..length])?;
            let word = text.split_whitespace().next().unwrap_or_default();
            let place = if *mark == self.frame.channel {
                &mut header.channel
            } else {
                &mut header.content_type
            };
            if place.is_some() || word.is_empty() {
                return None;
            }
            *place = Some(match *mark == self.frame.channel {
                true => word.to_owned(),
                false => format!("{CONSTRAIN}{word}"),
            });
            words.extend(text.split_whitespace().skip(1).map(str::to_owned));
            rest = &behind[length..];
        }
        if header
            .channel
            .as_deref()
            .is_some_and(|name| ![ANALYSIS, COMMENTARY, FINAL].contains(&name))
        {
            return None;
        }
        let mut words = words.into_iter().peekable();
        header.role = match is_first {
            true => {
                words.next_if(|word| word == ASSISTANT);
                ASSISTANT.into()
            }
            false => words.next()?,
        };
        let mut others = Vec::new();
        for word in words {
            match word.strip_prefix("to=") {
                Some(recipient) if header.recipient.is_none() && !recipient.is_empty() => {
                    header.recipient = Some(recipient.to_owned());
                }
                Some(_) => return None,
                None => others.push(word),
            }
        }
        let says = header.channel.is_some() || header.recipient.is_some();
        // A recipient may lack its mark, and the form of a text its own.
        for word in others {
            if word.starts_with(FUNCTIONS) && header.recipient.is_none() {
                header.recipient = Some(word);
            } else if header.content_type.is_none() && says {
                header.content_type = Some(word);
            } else {
                return None;
            }
        }
        (is_whole || says).then_some(header)
    }

    /// The text of tokens that are ordinary ones.
    fn text(&self, ids: &[u32]) -> Option<String> {
        let bytes: Vec<u8> = ids
            .iter()
            .flat_map(|&id| self.tokenizer.bytes(id, Specials::Text))
            .copied()
            .collect();
        let is_ordinary = |&id: &u32| !self.tokenizer.bytes(id, Specials::Text).is_empty();
        ids.iter()
            .all(is_ordinary)
            .then(|| String::from_utf8(bytes).ok())
            .flatten()
    }
}

impl Answer {
    /// Leaves out of the content what is no final message: an answer that is cut within a header has that as text.
    pub fn keep_final(&mut self) {
        let finals = self
            .messages
            .iter()
            .filter(|message| message.channel.as_deref() == Some(FINAL));
        self.message.content = joined(finals.map(|message| message.content.as_str()).collect());
    }

    fn of(messages: Vec<Message>, end: Option<u32>, frame: &Frame) -> Self {
        let mut content: Vec<&str> = Vec::new();
        let mut reasoning: Vec<&str> = Vec::new();
        let mut tool_calls = Vec::new();
        for message in messages.iter().filter(|message| message.role == ASSISTANT) {
            let recipient = message.recipient.as_deref().unwrap_or_default();
            match Kind::of(message.recipient.as_deref(), message.channel.as_deref()) {
                Kind::Call => tool_calls.push(Call {
                    id: format!("call_{}", tool_calls.len()),
                    r#type: "function",
                    function: Function {
                        name: recipient.strip_prefix(FUNCTIONS).unwrap_or(recipient).to_owned(),
                        arguments: message.content.clone(),
                    },
                }),
                Kind::Thought => reasoning.push(&message.content),
                Kind::Final => content.push(&message.content),
            }
        }
        let message = Chat {
            role: ASSISTANT,
            content: joined(content),
            reasoning: joined(reasoning),
            tool_calls,
        };
        let finish_reason = match end {
            Some(end) if end == frame.call && !message.tool_calls.is_empty() => "tool_calls",
            // `<|end|>` ends a message, and no answer.
            Some(end) if end != frame.end => "stop",
            _ => "length",
        };
        Self {
            message,
            finish_reason,
            messages,
        }
    }
}

/// The texts of several messages in one; `None` if there are none.
fn joined(texts: Vec<&str>) -> Option<String> {
    (!texts.is_empty()).then(|| texts.join(BETWEEN))
}

/// What stands between the texts of several messages in one of chat completions.
pub const BETWEEN: &str = "\n\n";
