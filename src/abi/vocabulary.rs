//! The program's vocabulary, read once and kept as long as it says the same.

use super::pointer;
use super::types;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::report;
use crate::tokenizer::{Entry, Tokenizer};
use rustc_hash::FxHasher;
use std::ffi::{c_char, c_int};
use std::hash::Hasher;

/// A tokenizer, and what it was made of.
pub struct Vocabulary {
    tokenizer: Tokenizer,
    fingerprint: u64,
}

/// The struct's arrays, which have one length.
struct Arrays<'a> {
    vocab: &'a [*mut c_char],
    lengths: &'a [c_int],
    scores: &'a [f32],
    max_token_length: usize,
}

impl Vocabulary {
    /// Reads the struct's arrays.
    ///
    /// # Safety
    ///
    /// Pointers in `tokenizer` that are not NULL must point to what [`types::Tokenizer`] says of them, and nobody may
    /// write there during the call.
    pub unsafe fn read(tokenizer: &types::Tokenizer) -> Result<Self> {
        // SAFETY: as our caller vouches.
        unsafe { Self::of(&Arrays::check(tokenizer)?) }
    }

    /// Reads the struct's arrays anew if they are not what they were: the program may have written to them, or pass
    /// another struct.
    ///
    /// # Safety
    ///
    /// As [`Self::read`].
    pub unsafe fn follow(&mut self, tokenizer: &types::Tokenizer) -> Result<()> {
        // SAFETY: as our caller vouches.
        let arrays = unsafe { Arrays::check(tokenizer) }?;
        // SAFETY: as our caller vouches.
        if unsafe { arrays.fingerprint() }? != self.fingerprint {
            report::line("the tokenizer is not what it was before; reading it anew");
            // SAFETY: as our caller vouches.
            *self = unsafe { Self::of(&arrays) }?;
        }
        Ok(())
    }

    /// # Safety
    ///
    /// As [`Self::read`].
    unsafe fn of(arrays: &Arrays<'_>) -> Result<Self> {
        let mut entries = memory::room(arrays.vocab.len(), Purpose::Vocabulary)?;
        for id in 0..arrays.vocab.len() {
            // SAFETY: as our caller vouches.
            entries.push(unsafe { arrays.entry(id) }?);
        }
        Ok(Self {
            tokenizer: Tokenizer::new(entries, arrays.max_token_length)?,
            // SAFETY: as our caller vouches.
            fingerprint: unsafe { arrays.fingerprint() }?,
        })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }
}

impl<'a> Arrays<'a> {
    /// Checks the struct's sizes and pointers.
    ///
    /// # Safety
    ///
    /// As [`Vocabulary::read`], for `'a`.
    unsafe fn check(tokenizer: &'a types::Tokenizer) -> Result<Self> {
        let n = size("vocab_size", tokenizer.vocab_size, 1)?;
        let max_token_length = size("max_token_length", tokenizer.max_token_length, 0)?;
        pointer::check(tokenizer.vocab, "Tokenizer.vocab")?;
        pointer::check(tokenizer.lengths, "Tokenizer.lengths")?;
        pointer::check(tokenizer.scores, "Tokenizer.scores")?;
        Ok(Self {
            // SAFETY: not NULL, aligned; the caller vouches for `n` entries that do not change.
            vocab: unsafe { std::slice::from_raw_parts(tokenizer.vocab, n) },
            // SAFETY: as above.
            lengths: unsafe { std::slice::from_raw_parts(tokenizer.lengths, n) },
            // SAFETY: as above.
            scores: unsafe { std::slice::from_raw_parts(tokenizer.scores, n) },
            max_token_length,
        })
    }

    /// A token's bytes and score.
    ///
    /// # Safety
    ///
    /// As [`Vocabulary::read`], for `'a`.
    unsafe fn entry(&self, id: usize) -> Result<Entry<'a>> {
        let bytes = self.vocab[id];
        let length = usize::try_from(self.lengths[id]).ok();
        let length = length.filter(|&length| length <= MOST && !bytes.is_null());
        let length = length.ok_or_else(|| Error::format("Tokenizer", format!("token {id} has no bytes")))?;
        // SAFETY: not NULL; the caller vouches for `lengths[id]` bytes at `vocab[id]`.
        let bytes = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), length) };
        Ok((bytes, self.scores[id]))
    }

    /// A hash of all that is read: 4 to 10 ms on a busy machine, for 200,000 tokens that lie scattered.
    ///
    /// # Safety
    ///
    /// As [`Vocabulary::read`].
    unsafe fn fingerprint(&self) -> Result<u64> {
        let mut hasher = FxHasher::default();
        hasher.write_usize(self.max_token_length);
        for id in 0..self.vocab.len() {
            // SAFETY: as our caller vouches.
            let (bytes, score) = unsafe { self.entry(id) }?;
            hasher.write_usize(bytes.len());
            hasher.write_u32(score.to_bits());
            hasher.write(bytes);
        }
        Ok(hasher.finish())
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
