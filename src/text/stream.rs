//! Tokens to text while they come: whole characters, and the rest is kept back.

use std::sync::Arc;

use super::{Specials, TextTokenizer};
use crate::error::Result;
use crate::memory::{self, Purpose};

/// Decodes tokens that come one after the other. What it gives is, put together, what a lossy decoding of all bytes
/// gives: bytes that are no UTF-8 become U+FFFD.
pub struct Decoder {
    tokenizer: Arc<TextTokenizer>,
    specials: Specials,
    /// The beginning of a character.
    kept: Vec<u8>,
}

impl Decoder {
    /// A decoder that has seen no token.
    pub fn new(tokenizer: Arc<TextTokenizer>, specials: Specials) -> Self {
        Self {
            tokenizer,
            specials,
            kept: Vec::new(),
        }
    }

    /// The characters that are whole with these tokens.
    pub fn next(&mut self, ids: impl IntoIterator<Item = u32>) -> Result<String> {
        for id in ids {
            let bytes = self.tokenizer.bytes(id, self.specials);
            memory::append(&mut self.kept, bytes, Purpose::Requests)?;
        }
        Ok(take_characters(&mut self.kept))
    }

    /// What was kept back, of which no character has become.
    pub fn end(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.kept).into_owned();
        self.kept.clear();
        rest
    }
}

/// Takes the whole characters from the front of `bytes`, U+FFFD for what can be none, and leaves the beginning of one
/// that may go on.
pub fn take_characters(bytes: &mut Vec<u8>) -> String {
    let mut text = String::with_capacity(bytes.len());
    let mut taken = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        taken += chunk.valid().len();
        let rest = chunk.invalid();
        let may_go_on = || std::str::from_utf8(rest).is_err_and(|error| error.error_len().is_none());
        if rest.is_empty() || taken + rest.len() == bytes.len() && may_go_on() {
            break;
        }
        text.push(char::REPLACEMENT_CHARACTER);
        taken += rest.len();
    }
    bytes.drain(..taken);
    text
}
