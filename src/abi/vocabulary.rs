//! The program's vocabulary, read once and kept as long as the struct says the same.

use super::pointer;
use super::types;
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;
use std::ffi::c_int;

/// A tokenizer, and the struct it was made of.
pub struct Vocabulary {
    tokenizer: Tokenizer,
    source: Source,
}

/// The fields a vocabulary is read through. Addresses are only compared.
#[derive(Clone, Copy, PartialEq)]
struct Source {
    vocab: usize,
    lengths: usize,
    scores: usize,
    vocab_size: c_int,
    max_token_length: c_int,
}

impl Vocabulary {
    /// Reads the struct's arrays.
    ///
    /// # Safety
    ///
    /// Pointers in `tokenizer` that are not NULL must point to what [`types::Tokenizer`] says of them, and nobody may
    /// write there during the call.
    pub unsafe fn read(tokenizer: &types::Tokenizer) -> Result<Self> {
        let n = size("vocab_size", tokenizer.vocab_size, 1)?;
        let max_token_length = size("max_token_length", tokenizer.max_token_length, 0)?;
        pointer::check(tokenizer.vocab, "Tokenizer.vocab")?;
        pointer::check(tokenizer.lengths, "Tokenizer.lengths")?;
        pointer::check(tokenizer.scores, "Tokenizer.scores")?;
        // SAFETY: not NULL, aligned; the caller vouches for `n` entries that do not change.
        let vocab = unsafe { std::slice::from_raw_parts(tokenizer.vocab, n) };
        // SAFETY: as above.
        let lengths = unsafe { std::slice::from_raw_parts(tokenizer.lengths, n) };
        // SAFETY: as above.
        let scores = unsafe { std::slice::from_raw_parts(tokenizer.scores, n) };
        let mut entries = Vec::with_capacity(n);
        for (id, ((&bytes, &length), &score)) in vocab.iter().zip(lengths).zip(scores).enumerate() {
            let length = usize::try_from(length).ok();
            let length = length.filter(|&length| length <= MOST && !bytes.is_null());
            let length = length.ok_or_else(|| Error::format("Tokenizer", format!("token {id} has no bytes")))?;
            // SAFETY: not NULL; the caller vouches for `lengths[id]` bytes at `vocab[id]`.
            let bytes = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), length) };
            entries.push((bytes, score));
        }
        Ok(Self {
            tokenizer: Tokenizer::new(entries, max_token_length)?,
            source: Source::of(tokenizer),
        })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Whether `tokenizer` is the struct this was read from, as it was then.
    pub fn is_of(&self, tokenizer: &types::Tokenizer) -> bool {
        self.source == Source::of(tokenizer)
    }
}

impl Source {
    fn of(tokenizer: &types::Tokenizer) -> Self {
        Self {
            vocab: tokenizer.vocab.addr(),
            lengths: tokenizer.lengths.addr(),
            scores: tokenizer.scores.addr(),
            vocab_size: tokenizer.vocab_size,
            max_token_length: tokenizer.max_token_length,
        }
    }
}

/// The most tokens of a vocabulary, and bytes of a token: far above any, so that garbage is not taken for a size.
const MOST: usize = 1 << 24;

fn size(field: &str, value: c_int, least: usize) -> Result<usize> {
    let size = usize::try_from(value).ok().filter(|size| (least..=MOST).contains(size));
    size.ok_or_else(|| {
        Error::format(
            "Tokenizer",
            format!("{field} is {value}; it must lie in {least}..={MOST}"),
        )
    })
}
