//! A conversation to tokens.

use super::conversation::{ASSISTANT, Conversation, Message, Tail};
use super::{ANALYSIS, CONSTRAIN, FINAL, Frame};
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::text::{Specials, TextTokenizer};

/// The tokens of a conversation, with the beginning of the assistant's answer behind them.
///
/// What the assistant reasoned before its first final message is left out where its last message is final: the model
/// was trained on conversations without. While it calls tools its reasoning stays.
pub fn render(tokenizer: &TextTokenizer, conversation: &Conversation) -> Result<Vec<u32>> {
    if !tokenizer.is_checkpoint_s() {
        return Err(Error::format(
            "tokenizer",
            "it was opened of a tokenizer.bin, which does not encode text as the model was trained; open the \
             directory of the model, or its tokenizer.json",
        ));
    }
    let mut writer = Writer {
        tokenizer,
        frame: Frame::of(tokenizer)?,
        ids: Vec::new(),
    };
    let messages = &conversation.messages;
    // A message that goes on has not ended an answer.
    let ended = match conversation.tail {
        Tail::Open(first) => &messages[..first],
        Tail::Answer | Tail::Nothing => &messages[..],
    };
    let is_final = |message: &Message| message.channel == Some(FINAL);
    let last = ended.iter().rev().find(|message| message.is_assistant_s());
    let dropped = match last.is_some_and(is_final) {
        true => ended.iter().position(is_final).unwrap_or(0),
        false => 0,
    };
    for (at, message) in messages.iter().enumerate() {
        if at >= dropped || message.channel != Some(ANALYSIS) {
            writer.message(message)?;
        }
    }
    match conversation.tail {
        Tail::Answer => {
            writer.token(writer.frame.start)?;
            writer.text(ASSISTANT)?;
        }
        Tail::Nothing => {}
        Tail::Open(_) => _ = writer.ids.pop(),
    }
    Ok(writer.ids)
}

struct Writer<'a> {
    tokenizer: &'a TextTokenizer,
    frame: Frame,
    ids: Vec<u32>,
}

impl Writer<'_> {
    fn token(&mut self, token: u32) -> Result<()> {
        memory::push(&mut self.ids, token, Purpose::Requests)
    }

    /// A text of its own: tokens are not merged across its ends.
    fn text(&mut self, text: &str) -> Result<()> {
        let ids = self.tokenizer.encode(text.as_bytes(), Specials::Text)?;
        memory::append(&mut self.ids, &ids, Purpose::Requests)
    }

    fn message(&mut self, message: &Message) -> Result<()> {
        self.token(self.frame.start)?;
        self.text(&message.author)?;
        if let Some(name) = &message.name {
            self.text(&format!(":{name}"))?;
        }
        if let Some(recipient) = &message.recipient {
            self.text(&format!(" to={recipient}"))?;
        }
        if let Some(channel) = message.channel {
            self.token(self.frame.channel)?;
            self.text(channel)?;
        }
        if let Some(form) = message.content_type.and_then(|kind| kind.strip_prefix(CONSTRAIN)) {
            self.text(" ")?;
            self.token(self.frame.constrain)?;
            self.text(form)?;
        }
        self.token(self.frame.message)?;
        message.texts.iter().try_for_each(|text| self.text(text))?;
        let calls = message.is_assistant_s() && message.recipient.is_some();
        self.token(if calls { self.frame.call } else { self.frame.end })
    }
}
