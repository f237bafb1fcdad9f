//! `getp_tokenizer`: a vocabulary read from a file, in the eval program's layout.

use super::types::{TokenIndex, Tokenizer};
use super::{guard, pointer};
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::text::{Source, TextTokenizer};
use crate::tokenizer::{self, Entry};
use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_uchar};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::Arc;

/// A vocabulary read from a file: the program's struct, and the memory that it points to.
pub struct TokenizerHandle {
    text: Arc<TextTokenizer>,
    /// The program may write to it.
    tokenizer: UnsafeCell<Tokenizer>,
    max_token_length: c_int,
    _memory: Memory,
}

/// The memory that the struct points to. It neither moves nor changes once it is filled.
struct Memory {
    _text: Vec<u8>,
    _vocab: Vec<*mut c_char>,
    _lengths: Vec<c_int>,
    _scores: Vec<f32>,
    _sorted: Vec<TokenIndex>,
}

/// Reads a vocabulary: the evaluation program's `tokenizer.bin`, a model's `tokenizer.json`, or the directory that has
/// one, such as Hugging Face's. A `tokenizer.bin` encodes by the program's rule, which gives most texts other tokens
/// than the model was trained on; a `tokenizer.json` encodes as the model was trained. `inference` encodes its prompts
/// by the program's rule with both.
///
/// A `tokenizer.json` takes about a second, in which another thread may warm up the model, and a library with the
/// feature tokenizer-json.
///
/// On failure: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_tokenizer_open(path: *const c_char) -> *mut TokenizerHandle {
    guard::work(null_mut(), || {
        // SAFETY: the program passes a C string.
        let path = unsafe { pointer::path(path, "path") }?;
        Ok(Box::into_raw(Box::new(
            TokenizerHandle::open(path).map_err(Error::in_file)?,
        )))
    })
}

/// The struct to pass to `warm_up`, `inference` and `finish`. It belongs to `tokenizer` and is valid until that is
/// closed.
///
/// Fails for a NULL: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_tokenizer_get(tokenizer: *mut TokenizerHandle) -> *mut Tokenizer {
    guard::look(null_mut(), || {
        // SAFETY: the program passes what `getp_tokenizer_open` gave.
        let handle = unsafe { pointer::borrow(tokenizer, "tokenizer") }?;
        Ok(handle.tokenizer.get())
    })
}

/// The text of token `id`, a special one's name: `*length` bytes without a NUL after them, 0 for an id outside the
/// vocabulary. They belong to `tokenizer`.
///
/// Fails for a NULL: one line on stderr and the last error, returns NULL; unless `length` itself is NULL, `*length` is
/// 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_tokenizer_piece(
    tokenizer: *const TokenizerHandle,
    id: c_int,
    length: *mut usize,
) -> *const c_char {
    guard::look(null(), || {
        // SAFETY: the program passes a pointer to a variable of its own.
        let length = unsafe { pointer::borrow_mut(length, "length") }?;
        *length = 0;
        // SAFETY: the program passes what `getp_tokenizer_open` gave.
        let handle = unsafe { pointer::borrow(tokenizer, "tokenizer") }?;
        let piece = u32::try_from(id).map_or(&[][..], |id| handle.text.vocabulary().decode_piece(id));
        *length = piece.len();
        Ok(piece.as_ptr().cast())
    })
}

/// Closes a vocabulary. Does nothing for NULL.
///
/// Fails only by a defect of the library: one line on stderr and the last error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_tokenizer_close(tokenizer: *mut TokenizerHandle) {
    guard::look((), || {
        if !tokenizer.is_null() {
            // SAFETY: the program passes what `getp_tokenizer_open` gave, for the last time.
            drop(unsafe { Box::from_raw(tokenizer) });
        }
        Ok(())
    });
}

impl TokenizerHandle {
    fn open(path: &Path) -> Result<Self> {
        let source = Source::read(path)?;
        let (max_token_length, entries) = source.entries()?;
        let decoder = tokenizer::Tokenizer::new(entries.iter().copied(), max_token_length)?;
        // Neither number exceeds the file's size, so they overflow an int only for files of 2 GiB or more.
        let vocab_size = c_int::try_from(entries.len()).map_err(|_| Error::Overflow("the vocabulary's size"))?;
        let max_token_length =
            c_int::try_from(decoder.max_token_length()).map_err(|_| Error::Overflow("max_token_length"))?;
        let mut memory = Memory::new(&entries)?;
        let mut byte_tokens = [0; 256];
        for (byte, token) in (0..=255).zip(&mut byte_tokens) {
            *token = byte_token(&decoder, byte)?;
        }
        let tokenizer = Tokenizer {
            vocab: memory._vocab.as_mut_ptr(),
            lengths: memory._lengths.as_mut_ptr(),
            scores: memory._scores.as_mut_ptr(),
            vocab_size,
            max_token_length,
            sorted_vocab: memory._sorted.as_mut_ptr(),
            byte_tokens,
            byte_pieces: std::array::from_fn(|at| if at % 2 == 0 { (at / 2) as c_uchar } else { 0 }),
        };
        Ok(Self {
            text: Arc::new(source.into_tokenizer(decoder)?),
            tokenizer: UnsafeCell::new(tokenizer),
            max_token_length,
            _memory: memory,
        })
    }

    /// What encodes texts and decodes tokens.
    pub fn text(&self) -> &Arc<TextTokenizer> {
        &self.text
    }

    /// Length in bytes of the longest token that encoding can produce.
    pub fn max_token_length(&self) -> c_int {
        self.max_token_length
    }
}

impl Memory {
    fn new(entries: &[Entry<'_>]) -> Result<Self> {
        let bytes = entries.iter().map(|(entry, _)| entry.len() + 1).sum();
        let mut text: Vec<u8> = memory::room(bytes, Purpose::Vocabulary)?;
        for (entry, _) in entries {
            text.extend_from_slice(entry);
            text.push(0); // C strings, as in a vocabulary that the program reads itself
        }
        let mut rest = text.as_mut_slice();
        let mut vocab = memory::room(entries.len(), Purpose::Vocabulary)?;
        for (entry, _) in entries {
            let (first, behind) = rest.split_at_mut(entry.len() + 1);
            vocab.push(first.as_mut_ptr().cast());
            rest = behind;
        }
        // The file stores each length as an int, so the cast loses nothing.
        let lengths = entries.iter().map(|(entry, _)| entry.len() as c_int);
        Ok(Self {
            _sorted: sorted(entries, &vocab)?,
            _lengths: memory::collect(lengths, Purpose::Vocabulary)?,
            _scores: memory::collect(entries.iter().map(|(_, score)| *score), Purpose::Vocabulary)?,
            _vocab: vocab,
            _text: text,
        })
    }
}

/// The vocabulary sorted by bytes, then length, then id.
fn sorted(entries: &[Entry<'_>], vocab: &[*mut c_char]) -> Result<Vec<TokenIndex>> {
    let mut ids = memory::collect(0..entries.len(), Purpose::Vocabulary)?;
    ids.sort_unstable_by_key(|&id| (entries[id].0, id));
    let index = |id: usize| TokenIndex {
        str: vocab[id],
        len: entries[id].0.len() as c_int,
        id: id as c_int,
    };
    memory::collect(ids.into_iter().map(index), Purpose::Vocabulary)
}

/// The token of a single byte, 0 if it has none.
fn byte_token(tokenizer: &tokenizer::Tokenizer, byte: u8) -> Result<c_int> {
    Ok(tokenizer.encode(&[byte], 1)?.first().map_or(0, |id| id.cast_signed()))
}
