//! The tokenizer built from the program's vocabulary, and rebuilt when the program has changed it.

use super::pointer;
use super::types;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::report;
use crate::tokenizer::{Entry, Tokenizer};
use rustc_hash::FxHasher;
use std::ffi::{c_char, c_int};
use std::hash::Hasher;

/// A tokenizer, and a hash of the program's arrays that it was built from.
pub struct Vocabulary {
    tokenizer: Tokenizer,
    fingerprint: u64,
}

/// The struct's arrays, all of length `vocab_size`.
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
        // SAFETY: guaranteed by our caller.
        unsafe { Self::of(&Arrays::check(tokenizer)?) }
    }

    /// Rebuilds the tokenizer if the arrays' contents have changed: the program may have written to them, or may pass
    /// another struct.
    ///
    /// # Safety
    ///
    /// Same requirements as [`Self::read`].
    pub unsafe fn follow(&mut self, tokenizer: &types::Tokenizer) -> Result<()> {
        // SAFETY: guaranteed by our caller.
        let arrays = unsafe { Arrays::check(tokenizer) }?;
        // SAFETY: guaranteed by our caller.
        if unsafe { arrays.fingerprint() }? != self.fingerprint {
            report::line("the tokenizer is not what it was before; reading it anew");
            // SAFETY: guaranteed by our caller.
            *self = unsafe { Self::of(&arrays) }?;
        }
        Ok(())
    }

    /// # Safety
    ///
    /// Same requirements as [`Self::read`].
    unsafe fn of(arrays: &Arrays<'_>) -> Result<Self> {
        let mut entries = memory::room(arrays.vocab.len(), Purpose::Vocabulary)?;
        for id in 0..arrays.vocab.len() {
            // SAFETY: guaranteed by our caller.
            entries.push(unsafe { arrays.entry(id) }?);
        }
        Ok(Self {
            tokenizer: Tokenizer::new(entries, arrays.max_token_length)?,
            // SAFETY: guaranteed by our caller.
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
    /// Same requirements as [`Vocabulary::read`], for `'a`.
    unsafe fn check(tokenizer: &'a types::Tokenizer) -> Result<Self> {
        let n = size("vocab_size", tokenizer.vocab_size, 1)?;
        let max_token_length = size("max_token_length", tokenizer.max_token_length, 0)?;
        pointer::check(tokenizer.vocab, "Tokenizer.vocab")?;
        pointer::check(tokenizer.lengths, "Tokenizer.lengths")?;
        pointer::check(tokenizer.scores, "Tokenizer.scores")?;
        Ok(Self {
            // SAFETY: not NULL, aligned; the caller guarantees `n` entries that do not change.
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
    /// Same requirements as [`Vocabulary::read`], for `'a`.
    unsafe fn entry(&self, id: usize) -> Result<Entry<'a>> {
        let bytes = self.vocab[id];
        let length = usize::try_from(self.lengths[id]).ok();
        let length = length.filter(|&length| length <= MOST && !bytes.is_null());
        let length = length.ok_or_else(|| Error::format("Tokenizer", format!("token {id} has no bytes")))?;
        // SAFETY: not NULL; the caller guarantees `lengths[id]` bytes at `vocab[id]`.
        let bytes = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), length) };
        Ok((bytes, self.scores[id]))
    }

    /// A hash of everything that is read. Takes 4 to 10 ms for 200,000 tokens scattered over the heap.
    ///
    /// # Safety
    ///
    /// Same requirements as [`Vocabulary::read`].
    unsafe fn fingerprint(&self) -> Result<u64> {
        let mut hasher = FxHasher::default();
        hasher.write_usize(self.max_token_length);
        for id in 0..self.vocab.len() {
            // SAFETY: guaranteed by our caller.
            let (bytes, score) = unsafe { self.entry(id) }?;
            hasher.write_usize(bytes.len());
            hasher.write_u32(score.to_bits());
            hasher.write(bytes);
        }
        Ok(hasher.finish())
    }
}

/// The most tokens in a vocabulary, and the most bytes in a token. Far above real ones; it keeps garbage from being
/// taken for a size.
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
