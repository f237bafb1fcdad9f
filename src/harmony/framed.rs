//! A grammar for what the user sees of an answer, within the frame of a conversation.
//!
//! The grammar is in force in the text of a final message. What is thought before it, and the arguments of tools that
//! are called, are free, but that an answer does not end with a thought. Headers are not: each message is thought, a
//! call of a tool of the request, or final. Otherwise the model could write to the user beside the final message, or
//! leave out the frame. A trained model writes these headers anyway.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use super::conversation::ASSISTANT;
use super::read::Kind;
use super::{ANALYSIS, COMMENTARY, FINAL, FUNCTIONS, Frame, Message};
use crate::error::{Error, Result};
use crate::grammar::{Grammar, Matcher};
use crate::memory::{self, Purpose};
use crate::text::{Specials, TextTokenizer};

/// The headers that messages may have, and the tokens that they can be made of.
#[derive(Debug)]
pub struct Headers {
    frame: Frame,
    headers: Vec<Header>,
    /// Each token of the vocabulary that stands somewhere in a header, with its symbols.
    tokens: Vec<(u32, Vec<Symbol>)>,
    /// Tokens of the tokenizer.
    vocab_size: usize,
    /// The tokens of it that end answers.
    ends: Vec<u32>,
}

/// A header, from the token that begins the message to the one that begins its text.
#[derive(Debug)]
struct Header {
    symbols: Vec<Symbol>,
    kind: Kind,
}

/// A byte, or a special token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Symbol {
    Byte(u8),
    Special(u32),
}

/// How many symbols of a header the prompt has, in which `<|start|>assistant` begins the answer.
const OF_PROMPT: usize = 1 + ASSISTANT.len();

impl Headers {
    /// The headers of answers to a request with these tools, which one of `ends` ends. Fails for a tool whose name a
    /// header cannot have.
    pub fn new(tokenizer: &TextTokenizer, tools: &[String], ends: &[u32]) -> Result<Self> {
        let is_name =
            |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c));
        if let Some(name) = tools.iter().find(|name| !is_name(name)) {
            let why = format!("{name:?} is no name that a header can have; use letters, digits, _, . and -");
            return Err(Error::format("tools", why));
        }
        let frame = Frame::of(tokenizer)?;
        let form = |words: &str, is_json: bool| {
            let text = |text: &str| text.bytes().map(Symbol::Byte).collect::<Vec<_>>();
            let special = |id| vec![Symbol::Special(id)];
            let assistant = text(ASSISTANT);
            let mut symbols = [special(frame.start), assistant, special(frame.channel), text(words)].concat();
            if is_json {
                symbols.extend([text(" "), special(frame.constrain), text("json")].concat());
            }
            symbols.push(Symbol::Special(frame.message));
            symbols
        };
        let header = |words: &str, is_json, kind| Header {
            symbols: form(words, is_json),
            kind,
        };
        let mut headers = vec![
            header(ANALYSIS, false, Kind::Thought),
            header(FINAL, false, Kind::Final),
            header(FINAL, true, Kind::Final),
        ];
        for tool in tools {
            let words = format!("{COMMENTARY} to={FUNCTIONS}{tool}");
            headers.extend([false, true].map(|is_json| header(&words, is_json, Kind::Call)));
        }
        let mut parts = HashSet::new();
        let mut longest = 0;
        for Header { symbols, .. } in &headers {
            for run in symbols.chunk_by(|a, b| matches!((a, b), (Symbol::Byte(_), Symbol::Byte(_)))) {
                let parts_from = |from: usize| (from + 1..=run.len()).map(move |to| &run[from..to]);
                parts.extend((0..run.len()).flat_map(parts_from));
                longest = longest.max(run.len());
            }
        }
        let mut tokens = Vec::new();
        let vocab_size = tokenizer.vocabulary().vocab_size();
        for id in 0..vocab_size as u32 {
            let symbols = symbols_of(tokenizer, id, longest);
            if !ends.contains(&id) && parts.contains(&symbols[..]) {
                memory::push(&mut tokens, (id, symbols), Purpose::Requests)?;
            }
        }
        Ok(Self {
            frame,
            headers,
            tokens,
            vocab_size,
            ends: ends
                .iter()
                .copied()
                .filter(|&end| (end as usize) < vocab_size)
                .collect(),
        })
    }

    /// The tokens that can come next in those of the headers that may be meant, of which `at` symbols are there.
    fn next_in<'a>(&'a self, may_be: &'a [usize], at: usize) -> impl Iterator<Item = &'a (u32, Vec<Symbol>)> {
        let rest = move |&header: &usize| &self.headers[header].symbols[at..];
        let tokens = self.tokens.iter();
        tokens.filter(move |(_, symbols)| may_be.iter().any(|header| rest(header).starts_with(symbols)))
    }

    /// The tokens that may not come in a text that is not final: those that end the answer, or that a reader takes for
    /// its end. A call may end it, where `<|call|>` does.
    fn ends(&self, is_call: bool) -> impl Iterator<Item = u32> {
        let Frame {
            call,
            r#return,
            endoftext,
            ..
        } = self.frame;
        let calls = is_call && self.ends.contains(&call);
        let ends = [r#return, endoftext, call].into_iter().chain(self.ends.iter().copied());
        ends.filter(move |&end| !(calls && end == call))
    }
}

/// The symbols of a token; those of a text longer than `longest` bytes are cut, since it is in no header.
fn symbols_of(tokenizer: &TextTokenizer, id: u32, longest: usize) -> Vec<Symbol> {
    match tokenizer.bytes(id, Specials::Text) {
        [] => vec![Symbol::Special(id)],
        bytes => bytes.iter().take(longest + 1).map(|&byte| Symbol::Byte(byte)).collect(),
    }
}

/// A grammar of final messages, and where an answer begins.
#[derive(Clone, Debug)]
pub struct Framed {
    headers: Arc<Headers>,
    of_text: Arc<dyn Grammar>,
    /// The kind of the message that the answer goes on with, if it does, and the tokens of its text so far.
    open: Option<(Kind, Vec<u32>)>,
}

impl Framed {
    /// Answers whose final messages have this grammar.
    pub fn new(headers: Arc<Headers>, of_text: Arc<dyn Grammar>) -> Self {
        Self {
            headers,
            of_text,
            open: None,
        }
    }

    /// Answers that go on with this message, whose text has these tokens so far. Fails if they are none of the
    /// grammar's.
    pub fn going_on(mut self, message: &Message, text: Vec<u32>) -> Result<Self> {
        let kind = Kind::of(message.recipient.as_deref(), message.channel.as_deref());
        self.open = Some((kind, text));
        match self.matcher().mask(&mut Vec::new()) {
            Ok(()) => Ok(self),
            Err(_) => Err(Error::format(
                "conversation",
                "the message that is continued does not begin as its response_format says",
            )),
        }
    }

    fn matcher(&self) -> Place {
        let headers = self.headers.clone();
        let state = match &self.open {
            None => State::header(&headers, OF_PROMPT),
            Some((Kind::Thought, _)) => State::Free { is_call: false },
            Some((Kind::Call, _)) => State::Free { is_call: true },
            Some((Kind::Final, text)) => {
                let mut matcher = self.of_text.matcher();
                text.iter().for_each(|&token| matcher.take(token));
                State::Final(matcher)
            }
        };
        Place {
            headers,
            of_text: self.of_text.clone(),
            state,
        }
    }
}

impl Grammar for Framed {
    fn matcher(&self) -> Box<dyn Matcher> {
        Box::new(Self::matcher(self))
    }
}

/// How far an answer has come.
struct Place {
    headers: Arc<Headers>,
    of_text: Arc<dyn Grammar>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// In a header: by their numbers, those that it may be, and how many symbols of them are there.
    Header(Vec<usize>, usize),
    /// In a text that has no grammar, but that it does not end the answer, unless it is a call.
    Free { is_call: bool },
    /// In a final message.
    Final(Box<dyn Matcher>),
}

impl State {
    fn header(headers: &Headers, symbols: usize) -> Self {
        Self::Header((0..headers.headers.len()).collect(), symbols)
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.state.fmt(f)
    }
}

impl Matcher for Place {
    fn take(&mut self, token: u32) {
        let frame = &self.headers.frame;
        match &mut self.state {
            State::Free { .. } if token == frame.end => self.state = State::header(&self.headers, 0),
            State::Free { .. } if token == frame.start => self.state = State::header(&self.headers, 1),
            State::Free { .. } => {}
            State::Final(matcher) => matcher.take(token),
            State::Header(may_be, at) => {
                let known = self.headers.tokens.iter().find(|(id, _)| *id == token);
                let symbols = known.map_or(&[][..], |(_, symbols)| symbols);
                let header = |number: usize| &self.headers.headers[number];
                // No token has no symbols: one that is in no header leaves none.
                may_be.retain(|&number| !symbols.is_empty() && header(number).symbols[*at..].starts_with(symbols));
                *at += symbols.len();
                if let Some(&whole) = may_be.iter().find(|&&number| header(number).symbols.len() == *at) {
                    self.state = match header(whole).kind {
                        Kind::Final => State::Final(self.of_text.matcher()),
                        Kind::Thought => State::Free { is_call: false },
                        Kind::Call => State::Free { is_call: true },
                    };
                }
            }
        }
    }

    fn allows(&mut self, token: u32) -> Result<bool> {
        match &mut self.state {
            State::Final(matcher) => matcher.allows(token),
            State::Free { is_call } => Ok(!self.headers.ends(*is_call).any(|end| end == token)),
            State::Header(may_be, at) => {
                let mut next = self.headers.next_in(may_be, *at);
                Ok(next.any(|(id, _)| *id == token))
            }
        }
    }

    fn mask(&mut self, mask: &mut Vec<u32>) -> Result<()> {
        let headers = &self.headers;
        let words = headers.vocab_size.div_ceil(32);
        mask.clear();
        match &mut self.state {
            State::Final(matcher) => matcher.mask(mask),
            State::Free { is_call } => {
                memory::resize(mask, words, u32::MAX, Purpose::Draws)?;
                let beyond = 32 * words - headers.vocab_size;
                mask.last_mut().into_iter().for_each(|last| *last >>= beyond);
                headers
                    .ends(*is_call)
                    .for_each(|end| mask[end as usize / 32] &= !(1 << (end % 32)));
                Ok(())
            }
            State::Header(may_be, at) => {
                memory::resize(mask, words, 0, Purpose::Draws)?;
                let next = headers.next_in(may_be, *at);
                next.for_each(|(token, _)| mask[*token as usize / 32] |= 1 << (token % 32));
                match mask.iter().all(|&word| word == 0) {
                    false => Ok(()),
                    true => Err(Error::format("the answer", "it has left the frame of a conversation")),
                }
            }
        }
    }
}
