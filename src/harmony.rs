//! Harmony, the form of conversations that gpt-oss was trained on: messages of chat completions in, tokens out
//! ([`render`]), and tokens of an answer in, a message out ([`Reader`]).
//!
//! Tokens are those of OpenAI's own library, openai-harmony 0.0.8, to the last id: `tests/programs/harmony.py` compares
//! them. The `chat_template.jinja` of the released directories is not used. What it renders differs from the training
//! form: a text beside a tool call goes to `analysis`, the type of a call is a word and no `<|constrain|>`, and the
//! arguments and results of tools become JSON strings once more.
//!
//! Each text is encoded by itself, between special tokens that only the renderer sets: nothing that a user, a tool or a
//! developer writes can open or close a message.
//!
//! Reading never fails. What the form does not have stays in the answer as text, and the message has its ids.

mod conversation;
mod framed;
mod json;
mod read;
mod render;
mod tools;

pub use conversation::{Conversation, OF_CONVERSATION, response_schema};
pub use framed::{Framed, Headers};
pub use json::Json;
pub use read::{Answer, BETWEEN, Delta, Message, Reader};
pub use render::render;

use crate::error::{Error, Result};
use crate::text::TextTokenizer;

/// The special tokens between texts.
#[derive(Clone, Copy, Debug)]
struct Frame {
    start: u32,
    message: u32,
    channel: u32,
    constrain: u32,
    /// The end of a message, of one that calls a tool, and of the answer.
    end: u32,
    call: u32,
    r#return: u32,
    /// The end of a text that has no frame.
    endoftext: u32,
}

impl Frame {
    fn of(tokenizer: &TextTokenizer) -> Result<Self> {
        let token = |name: &str| {
            tokenizer.special(name).ok_or_else(|| {
                let why =
                    format!("it has no special token {name}; conversations need the tokenizer of a gpt-oss model");
                Error::format("tokenizer", why)
            })
        };
        Ok(Self {
            start: token("<|start|>")?,
            message: token("<|message|>")?,
            channel: token("<|channel|>")?,
            constrain: token(CONSTRAIN)?,
            end: token("<|end|>")?,
            call: token("<|call|>")?,
            r#return: token("<|return|>")?,
            endoftext: token("<|endoftext|>")?,
        })
    }
}

/// What begins the content type of a call whose arguments have a form.
const CONSTRAIN: &str = "<|constrain|>";

/// The channels that messages of the assistant are on.
const ANALYSIS: &str = "analysis";
const COMMENTARY: &str = "commentary";
const FINAL: &str = "final";

/// The namespace of a request's tools.
const FUNCTIONS: &str = "functions.";

#[cfg(test)]
mod tests;
