//! Text to tokens and back, for the handles.
//!
//! A vocabulary is the evaluation program's `tokenizer.bin` or a checkpoint's `tokenizer.json`. With the first one text
//! is encoded by the program's rule, with the second as the model was trained. Either has the entries of the program's
//! struct, so that `inference` takes both.
//!
//! What users write and the frame around it are never one text: [`Specials::Text`] takes the names of special tokens in
//! a text for text, and only who asks for [`Specials::Tokens`] gets the tokens.

#[cfg(feature = "tokenizer-json")]
mod json;
mod stream;

pub use stream::{Decoder, take_characters};

use std::path::Path;

use crate::error::{Error, Result};
use crate::file_kind;
use crate::memory::{self, Purpose};
use crate::tokenizer::{self, Entry, Tokenizer, VocabularyFile};

/// The file of a directory that holds its tokenizer.
const TOKENIZER_JSON: &str = "tokenizer.json";

/// What becomes of special tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Specials {
    /// Their names in a text are text, and they are decoded to nothing.
    #[default]
    Text,
    /// Their names in a text are the tokens, and they are decoded to their names.
    Tokens,
}

/// What an id stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Text.
    Ordinary,
    /// A special token.
    Special,
    /// Nothing: a reserved id.
    #[cfg_attr(
        not(feature = "tokenizer-json"),
        allow(dead_code, reason = "a tokenizer.bin has names for all")
    )]
    Nothing,
}

/// A file with a vocabulary, read.
pub enum Source {
    /// A `tokenizer.bin`.
    Program(VocabularyFile),
    /// A `tokenizer.json`.
    #[cfg(feature = "tokenizer-json")]
    Checkpoint(Box<json::File>),
}

impl Source {
    /// Reads a `tokenizer.bin`, a `tokenizer.json`, or that of a directory.
    pub fn read(path: &Path) -> Result<Self> {
        if path.is_dir() {
            let file = path.join(TOKENIZER_JSON);
            if !file.exists() {
                let why =
                    format!("there is no {TOKENIZER_JSON} in it; name the directory that has it, or a tokenizer.bin");
                return Err(Error::format(path.display().to_string(), why));
            }
            return Self::read_json(&file);
        }
        match file_kind::is_json(path) {
            true => Self::read_json(path),
            false => Ok(Self::Program(VocabularyFile::read(path)?)),
        }
    }

    #[cfg(feature = "tokenizer-json")]
    fn read_json(path: &Path) -> Result<Self> {
        Ok(Self::Checkpoint(Box::new(json::File::read(path)?)))
    }

    #[cfg(not(feature = "tokenizer-json"))]
    fn read_json(path: &Path) -> Result<Self> {
        let why = "this library is built without the feature that reads it; build it with that (cargo build --release \
                   --features tokenizer-json, or make installable FEATURES=tokenizer-json), or name a tokenizer.bin, \
                   as the example export_tokenizer writes it";
        Err(Error::format(path.display().to_string(), why))
    }

    /// The most bytes of a token that merges give, and the entries, as the program's struct has them.
    pub fn entries(&self) -> Result<(usize, Vec<Entry<'_>>)> {
        match self {
            Self::Program(file) => file.entries(),
            #[cfg(feature = "tokenizer-json")]
            Self::Checkpoint(file) => Ok((usize::MAX, file.entries()?)),
        }
    }

    /// What encodes and decodes; `vocabulary` was made of [`Self::entries`].
    pub fn into_tokenizer(self, vocabulary: Tokenizer) -> Result<TextTokenizer> {
        match self {
            Self::Program(file) => {
                let kind = |(_, score): Entry<'_>| match tokenizer::is_ordinary(score) {
                    true => Kind::Ordinary,
                    false => Kind::Special,
                };
                let entries = file.entries()?.1.into_iter();
                Ok(TextTokenizer {
                    vocabulary,
                    kinds: memory::collect(entries.map(kind), Purpose::Vocabulary)?,
                    encoder: None,
                })
            }
            #[cfg(feature = "tokenizer-json")]
            Self::Checkpoint(file) => {
                let (kinds, encoder) = file.into_encoder();
                Ok(TextTokenizer {
                    vocabulary,
                    kinds,
                    encoder: Some(encoder),
                })
            }
        }
    }
}

#[cfg(feature = "tokenizer-json")]
type Encoder = json::Encoder;
#[cfg(not(feature = "tokenizer-json"))]
type Encoder = std::convert::Infallible;

/// A vocabulary that encodes texts and decodes tokens. Threads may share it.
pub struct TextTokenizer {
    vocabulary: Tokenizer,
    /// By id.
    kinds: Vec<Kind>,
    /// The checkpoint's own way to encode; `None`: the program's.
    encoder: Option<Encoder>,
}

impl TextTokenizer {
    /// Reads what [`Source::read`] does.
    pub fn open(path: &Path) -> Result<Self> {
        let source = Source::read(path)?;
        let (longest, entries) = source.entries()?;
        let vocabulary = Tokenizer::new(entries, longest)?;
        source.into_tokenizer(vocabulary)
    }

    /// The entries, as the evaluation program sees them.
    pub fn vocabulary(&self) -> &Tokenizer {
        &self.vocabulary
    }

    /// Whether text is encoded as the model was trained, and not by the program's rule.
    pub fn is_checkpoint_s(&self) -> bool {
        self.encoder.is_some()
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &[u8], specials: Specials) -> Result<Vec<u32>> {
        if text.len() > MOST_TEXT_BYTES {
            let why = format!("it has {} bytes; the most are {MOST_TEXT_BYTES}", text.len());
            return Err(Error::format("text", why));
        }
        match &self.encoder {
            #[cfg(feature = "tokenizer-json")]
            Some(encoder) => encoder.encode(text, specials),
            #[cfg(not(feature = "tokenizer-json"))]
            Some(never) => match *never {},
            None if specials == Specials::Tokens => Err(Error::format(
                "tokenizer",
                "it was opened of a tokenizer.bin, whose special tokens are not found in texts; open the directory of \
                 the model, or its tokenizer.json",
            )),
            None => self.vocabulary.encode(text, usize::MAX),
        }
    }

    /// The bytes of tokens, which need not be whole characters. An id without a token has none.
    pub fn decode(&self, ids: impl IntoIterator<Item = u32>, specials: Specials) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for id in ids {
            memory::append(&mut bytes, self.bytes(id, specials), Purpose::Requests)?;
        }
        Ok(bytes)
    }

    /// The bytes of a token.
    pub fn bytes(&self, id: u32, specials: Specials) -> &[u8] {
        match (self.kinds.get(id as usize), specials) {
            (Some(Kind::Ordinary), _) | (Some(Kind::Special), Specials::Tokens) => self.vocabulary.decode_piece(id),
            _ => &[],
        }
    }

    /// The special token of this name.
    pub fn special(&self, name: &str) -> Option<u32> {
        let kinds = (0..).zip(&self.kinds);
        let mut specials = kinds.filter(|(_, kind)| **kind == Kind::Special).map(|(id, _)| id);
        specials.find(|&id| self.vocabulary.decode_piece(id) == name.as_bytes())
    }
}

/// The most bytes of a text that are encoded at once: far more than a model's context.
const MOST_TEXT_BYTES: usize = 1 << 28;

#[cfg(test)]
pub(crate) mod tests;
