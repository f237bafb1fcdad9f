//! Conversations in the C API: JSON text of messages to tokens, and tokens of an answer to JSON text.

use super::text::{Text, Tokens, unsigned};
use super::tokenizer::TokenizerHandle;
use super::{guard, pointer};
use crate::error::{Error, Result};
use crate::harmony::{self, Conversation, Reader};
use serde::Serialize;
use std::ffi::{c_char, c_int};
use std::ptr::{null, null_mut};

/// Reads the tokens of one answer while they come.
pub struct ReaderHandle {
    reader: Reader,
}

/// The tokens of a conversation as gpt-oss was trained on them, with the beginning of the assistant's answer behind
/// them, for `getp_tokens_free`. `json` has `length` bytes: a list of messages as chat completions have them, or the
/// body of such a request, of which `messages`, `tools`, `tool_choice` and `reasoning_effort` are used. With
/// `continue_final_message` the last message is left open instead; with `add_generation_prompt` false nothing is
/// behind the messages. `date`, `knowledge_cutoff` and `model_identity` are what the system message says; there is no
/// date unless it is given. docs/harmony.md has the rules.
///
/// Whatever the texts hold, they are encoded as text. `tokenizer` must be of a `tokenizer.json`.
///
/// On failure, as for a field that is not known: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_harmony_render(
    tokenizer: *const TokenizerHandle,
    json: *const c_char,
    length: usize,
) -> *const Tokens {
    guard::work(null(), || {
        // SAFETY: the program passes what `getp_tokenizer_open` gave.
        let handle = unsafe { pointer::borrow(tokenizer, "tokenizer") }?;
        // SAFETY: the program passes as many bytes as it says.
        let json = unsafe { pointer::slice(json.cast::<u8>(), length, "json") }?;
        let conversation = Conversation::parse(json)?;
        Ok(Tokens::into_raw(harmony::render(handle.text(), &conversation)?))
    })
}

/// What an answer of `count` tokens says, as JSON text for `getp_text_free`: an object with `message`, the assistant's
/// message of chat completions (`content`, `reasoning`, `tool_calls`), `finish_reason`, which is "stop", "tool_calls"
/// or "length", and `messages`, those of harmony that it was made of (`role`, `channel`, `recipient`, `content_type`,
/// `content`). `ids` are an event's, the token that ends the answer included.
///
/// It takes whatever the model has written: a message whose header the form does not have is text, with its `ids`.
///
/// On failure: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_harmony_read(
    tokenizer: *const TokenizerHandle,
    ids: *const c_int,
    count: usize,
) -> *const Text {
    guard::work(null(), || {
        // SAFETY: the program passes what `getp_tokenizer_open` gave.
        let handle = unsafe { pointer::borrow(tokenizer, "tokenizer") }?;
        // SAFETY: the program passes as many ids as it says.
        let ids = unsafe { pointer::slice(ids, count, "ids") }?;
        let mut reader = Reader::new(handle.text().clone())?;
        reader.next(unsigned(ids))?;
        text(&reader.end()?)
    })
}

/// Makes a reader for the tokens of one answer. `tokenizer` may be closed before it.
///
/// On failure: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_harmony_reader_open(tokenizer: *const TokenizerHandle) -> *mut ReaderHandle {
    guard::work(null_mut(), || {
        // SAFETY: the program passes what `getp_tokenizer_open` gave.
        let handle = unsafe { pointer::borrow(tokenizer, "tokenizer") }?;
        let reader = Reader::new(handle.text().clone())?;
        Ok(Box::into_raw(Box::new(ReaderHandle { reader })))
    })
}

/// Makes a reader for the tokens of the answer to a conversation, `length` bytes of JSON as `getp_harmony_render` takes
/// them. With `continue_final_message` the answer goes on with the last message, and what is read is text of that one;
/// otherwise it is the reader that `getp_harmony_reader_open` makes.
///
/// On failure: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_harmony_reader_open_for(
    tokenizer: *const TokenizerHandle,
    json: *const c_char,
    length: usize,
) -> *mut ReaderHandle {
    guard::work(null_mut(), || {
        // SAFETY: the program passes what `getp_tokenizer_open` gave.
        let handle = unsafe { pointer::borrow(tokenizer, "tokenizer") }?;
        // SAFETY: the program passes as many bytes as it says.
        let json = unsafe { pointer::slice(json.cast::<u8>(), length, "json") }?;
        let open = Conversation::parse(json)?.open_message();
        let reader = Reader::going_on(handle.text().clone(), open)?;
        Ok(Box::into_raw(Box::new(ReaderHandle { reader })))
    })
}

/// What the answer's next `count` tokens add to it, as JSON text for `getp_text_free`: a list of pieces, each with the
/// number of its `message`, that one's `channel` and `recipient`, and the `content` that follows the piece before.
/// Characters are whole. The list is empty while a header is read.
///
/// On failure: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_harmony_reader_next(
    reader: *mut ReaderHandle,
    ids: *const c_int,
    count: usize,
) -> *const Text {
    guard::work(null(), || {
        // SAFETY: the program passes what `getp_harmony_reader_open` gave.
        let handle = unsafe { pointer::borrow_mut(reader, "reader") }?;
        // SAFETY: the program passes as many ids as it says.
        let ids = unsafe { pointer::slice(ids, count, "ids") }?;
        text(&handle.reader.next(unsigned(ids))?)
    })
}

/// What only the answer's end shows to be text, as `getp_harmony_reader_next` gives it: the rest of a character, or all
/// of an answer that has no header. To be called once the answer has ended, before `getp_harmony_reader_end`.
///
/// On failure: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_harmony_reader_finish(reader: *mut ReaderHandle) -> *const Text {
    guard::work(null(), || {
        // SAFETY: the program passes what `getp_harmony_reader_open` gave.
        let handle = unsafe { pointer::borrow_mut(reader, "reader") }?;
        text(&handle.reader.close()?)
    })
}

/// What the whole answer says, once it has ended, as `getp_harmony_read` gives it. Afterwards the reader is as new.
///
/// On failure: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_harmony_reader_end(reader: *mut ReaderHandle) -> *const Text {
    guard::work(null(), || {
        // SAFETY: the program passes what `getp_harmony_reader_open` gave.
        let handle = unsafe { pointer::borrow_mut(reader, "reader") }?;
        text(&handle.reader.end()?)
    })
}

/// Closes a reader. Does nothing for NULL.
///
/// Fails only by a defect of the library: one line on stderr and the last error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_harmony_reader_close(reader: *mut ReaderHandle) {
    guard::look((), || {
        if !reader.is_null() {
            // SAFETY: the program passes what `getp_harmony_reader_open` gave, for the last time.
            drop(unsafe { Box::from_raw(reader) });
        }
        Ok(())
    });
}

/// A value as JSON text for the program.
fn text(value: &impl Serialize) -> Result<*const Text> {
    Text::into_raw(serde_json::to_vec(value).map_err(|error| Error::Internal(error.to_string()))?)
}
