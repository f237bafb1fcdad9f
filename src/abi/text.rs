//! Text to tokens and back in the C API: encoding, decoding, decoding while tokens come.

use super::options::is_on;
use super::sized::{self, SizedStruct};
use super::status::{GETP_OK, Status};
use super::tokenizer::TokenizerHandle;
use super::{guard, pointer};
use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::text::{Decoder, Specials};
use std::ffi::{c_char, c_int};
use std::mem::{offset_of, size_of};
use std::ptr::{null, null_mut};

/// How text is encoded and tokens are decoded. Call `getp_text_options_init` before setting fields.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TextOptions {
    /// sizeof(getp_text_options) as the program knows it, set by `getp_text_options_init`.
    pub size: usize,
    /// GETP_OFF, the default: the names of special tokens in a text, such as "<|start|>", are text like any other, and
    /// special tokens are decoded to nothing. So what users write never becomes part of the frame. GETP_ON: these names
    /// are the tokens, and the tokens are decoded to their names.
    pub specials: c_int,
    /// 0: a later version may use it.
    pub reserved: c_int,
}

/// Tokens that the library has made. A program takes only pointers to it, so that it can grow.
#[repr(C)]
pub struct Tokens {
    /// sizeof(getp_tokens) as the library knows it.
    pub size: usize,
    /// `count` ids.
    pub ids: *const c_int,
    /// How many.
    pub count: usize,
}

/// A text that the library has made. A program takes only pointers to it, so that it can grow.
#[repr(C)]
pub struct Text {
    /// sizeof(getp_text) as the library knows it.
    pub size: usize,
    /// `length` bytes, and a NUL behind them. There may be NULs among them.
    pub bytes: *const c_char,
    /// How many.
    pub length: usize,
}

const _: () = assert!(size_of::<TextOptions>() == 16 && size_of::<Tokens>() == 24 && size_of::<Text>() == 24);

// SAFETY: it begins with `size`, and its fields are numbers.
unsafe impl SizedStruct for TextOptions {
    const NAME: &'static str = "getp_text_options";
    const SIZE: &'static str = "getp_text_options.size";
    const SIZES: &'static [usize] = &[size_of::<Self>()];
    const RESERVED: &'static [usize] = &[offset_of!(TextOptions, reserved)];

    fn with_size(size: usize) -> Self {
        Self {
            size,
            specials: 0,
            reserved: 0,
        }
    }
}

/// Decodes the tokens of one answer while they come.
pub struct DecoderHandle {
    decoder: Decoder,
    /// What the last call gave, and a NUL.
    given: Vec<u8>,
}

/// Tokens with what they point to.
#[repr(C)]
struct OwnedTokens {
    /// First, so that a pointer to it is one to the whole.
    _told: Tokens,
    _ids: Vec<u32>,
}

/// A text with what it points to.
#[repr(C)]
struct OwnedText {
    /// First, so that a pointer to it is one to the whole.
    _told: Text,
    _bytes: Vec<u8>,
}

/// Sets `options->size` to `size` and all other fields to their defaults; the macro `getp_text_options_init(options)`
/// passes `sizeof *options`.
///
/// Fails for a NULL or a size that no version of the struct can have: one line on stderr and the last error, returns
/// the failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_text_options_init_sized(options: *mut TextOptions, size: usize) -> Status {
    guard::look_coded(|| {
        // SAFETY: the program passes a pointer to a struct of its own and its size.
        unsafe { sized::init(options, size, "options") }?;
        Ok(GETP_OK)
    })
}

/// The tokens of a text of `length` bytes, for `getp_tokens_free`. `options` may be NULL. With a `tokenizer.json` the
/// text must be UTF-8.
///
/// On failure: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_tokenizer_encode(
    tokenizer: *const TokenizerHandle,
    text: *const c_char,
    length: usize,
    options: *const TextOptions,
) -> *const Tokens {
    guard::work(null(), || {
        // SAFETY: the program passes what `getp_tokenizer_open` gave.
        let handle = unsafe { pointer::borrow(tokenizer, "tokenizer") }?;
        // SAFETY: the program passes as many bytes as it says.
        let text = unsafe { pointer::slice(text.cast::<u8>(), length, "text") }?;
        // SAFETY: the program passes NULL or its own struct.
        let specials = unsafe { specials(options) }?;
        Ok(Tokens::into_raw(handle.text().encode(text, specials)?))
    })
}

/// The bytes of `count` tokens, for `getp_text_free`. They need not be UTF-8: a token may end within a character. An id
/// without a token has no bytes. `options` may be NULL.
///
/// On failure: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_tokenizer_decode(
    tokenizer: *const TokenizerHandle,
    ids: *const c_int,
    count: usize,
    options: *const TextOptions,
) -> *const Text {
    guard::work(null(), || {
        // SAFETY: the program passes what `getp_tokenizer_open` gave.
        let handle = unsafe { pointer::borrow(tokenizer, "tokenizer") }?;
        // SAFETY: the program passes as many ids as it says.
        let ids = unsafe { pointer::slice(ids, count, "ids") }?;
        // SAFETY: the program passes NULL or its own struct.
        let specials = unsafe { specials(options) }?;
        Text::into_raw(handle.text().decode(unsigned(ids), specials)?)
    })
}

/// Makes a decoder for the tokens of one answer. `options` may be NULL, and `tokenizer` may be closed before it.
///
/// On failure: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_decoder_open(
    tokenizer: *const TokenizerHandle,
    options: *const TextOptions,
) -> *mut DecoderHandle {
    guard::work(null_mut(), || {
        // SAFETY: the program passes what `getp_tokenizer_open` gave.
        let handle = unsafe { pointer::borrow(tokenizer, "tokenizer") }?;
        // SAFETY: the program passes NULL or its own struct.
        let specials = unsafe { specials(options) }?;
        Ok(Box::into_raw(Box::new(DecoderHandle {
            decoder: Decoder::new(handle.text().clone(), specials),
            given: Vec::new(),
        })))
    })
}

/// The text of the answer's next `count` tokens, as far as its characters are whole: `*length` bytes of UTF-8, and a
/// NUL behind them. The beginning of a character is kept back until the rest comes. Bytes that are no UTF-8 become
/// U+FFFD. The bytes belong to `decoder`, until its next call.
///
/// Fails for a NULL or a lack of memory: one line on stderr and the last error, returns NULL; unless `length` itself is
/// NULL, `*length` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_decoder_next(
    decoder: *mut DecoderHandle,
    ids: *const c_int,
    count: usize,
    length: *mut usize,
) -> *const c_char {
    let next = |decoder: &mut Decoder| {
        // SAFETY: the program passes as many ids as it says.
        decoder.next(unsigned(unsafe { pointer::slice(ids, count, "ids") }?))
    };
    // SAFETY: the program passes what `getp_decoder_open` gave, and a pointer to a variable of its own.
    guard::work(null(), || unsafe { decoded(decoder, length, next) })
}

/// The text of what was kept back, once the answer has ended: a U+FFFD, or nothing. As `getp_decoder_next` gives it;
/// afterwards the decoder is as new.
///
/// Fails for a NULL or a lack of memory: one line on stderr and the last error, returns NULL; unless `length` itself is
/// NULL, `*length` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_decoder_end(decoder: *mut DecoderHandle, length: *mut usize) -> *const c_char {
    // SAFETY: the program passes what `getp_decoder_open` gave, and a pointer to a variable of its own.
    guard::work(null(), || unsafe {
        decoded(decoder, length, |decoder| Ok(decoder.end()))
    })
}

/// Has the decoder keep and give what `text` makes of it.
///
/// # Safety
///
/// `decoder` is NULL or what `getp_decoder_open` gave, and `length` NULL or a variable; nobody else uses them.
unsafe fn decoded(
    decoder: *mut DecoderHandle,
    length: *mut usize,
    text: impl FnOnce(&mut Decoder) -> Result<String>,
) -> Result<*const c_char> {
    // SAFETY: guaranteed by our caller.
    let length = unsafe { pointer::borrow_mut(length, "length") }?;
    *length = 0;
    // SAFETY: guaranteed by our caller.
    let handle = unsafe { pointer::borrow_mut(decoder, "decoder") }?;
    handle.given = text(&mut handle.decoder)?.into_bytes();
    memory::push(&mut handle.given, 0, Purpose::Requests)?;
    *length = handle.given.len() - 1;
    Ok(handle.given.as_ptr().cast())
}

/// Closes a decoder. Does nothing for NULL.
///
/// Fails only by a defect of the library: one line on stderr and the last error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_decoder_close(decoder: *mut DecoderHandle) {
    guard::look((), || {
        // SAFETY: the program passes what `getp_decoder_open` gave, for the last time.
        unsafe { free(decoder) };
        Ok(())
    });
}

/// Frees tokens. Does nothing for NULL.
///
/// Fails only by a defect of the library: one line on stderr and the last error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_tokens_free(tokens: *const Tokens) {
    guard::look((), || {
        // SAFETY: the program passes what a function gave, for the last time; `into_raw` made it.
        unsafe { free(tokens.cast::<OwnedTokens>().cast_mut()) };
        Ok(())
    });
}

/// Frees a text. Does nothing for NULL.
///
/// Fails only by a defect of the library: one line on stderr and the last error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_text_free(text: *const Text) {
    guard::look((), || {
        // SAFETY: the program passes what a function gave, for the last time; `into_raw` made it.
        unsafe { free(text.cast::<OwnedText>().cast_mut()) };
        Ok(())
    });
}

/// # Safety
///
/// `owned` is NULL, or was made by `Box::into_raw` and is not used any more.
unsafe fn free<T>(owned: *mut T) {
    if !owned.is_null() {
        // SAFETY: guaranteed by our caller.
        drop(unsafe { Box::from_raw(owned) });
    }
}

impl Tokens {
    /// The program's tokens, for [`getp_tokens_free`].
    pub fn into_raw(ids: Vec<u32>) -> *const Self {
        let told = Self {
            size: size_of::<Self>(),
            ids: ids.as_ptr().cast(),
            count: ids.len(),
        };
        let owned = OwnedTokens { _told: told, _ids: ids };
        Box::into_raw(Box::new(owned)).cast_const().cast()
    }
}

impl Text {
    /// The program's text, for [`getp_text_free`].
    pub fn into_raw(mut bytes: Vec<u8>) -> Result<*const Self> {
        memory::push(&mut bytes, 0, Purpose::Requests)?;
        let told = Self {
            size: size_of::<Self>(),
            bytes: bytes.as_ptr().cast(),
            length: bytes.len() - 1,
        };
        let owned = OwnedText {
            _told: told,
            _bytes: bytes,
        };
        Ok(Box::into_raw(Box::new(owned)).cast_const().cast())
    }
}

/// What the options say of special tokens.
///
/// # Safety
///
/// `options` is NULL or points to a struct of as many bytes as it says.
unsafe fn specials(options: *const TextOptions) -> Result<Specials> {
    if options.is_null() {
        return Ok(Specials::default());
    }
    // SAFETY: guaranteed by our caller.
    let options = unsafe { sized::read(options, "options") }?;
    Ok(match is_on("getp_text_options.specials", options.specials)? {
        true => Specials::Tokens,
        false => Specials::Text,
    })
}

/// Ids as the library has them; a negative one is none of any vocabulary.
pub fn unsigned(ids: &[c_int]) -> impl Iterator<Item = u32> {
    ids.iter().map(|id| id.cast_unsigned())
}
