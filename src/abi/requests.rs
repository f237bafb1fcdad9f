//! `getp_requests`: prompts from a file, and memory for the answers, in the eval program's layout.

use super::tokenizer::TokenizerHandle;
use super::types::Requests;
use super::{guard, pointer};
use crate::error::{Error, Result};
use crate::file_kind::{self, GivenAs};
use crate::memory::{self, Purpose};
use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int};
use std::path::Path;
use std::ptr::{null, null_mut};

/// Requests read from a file: the program's struct, and the memory that it points to.
pub struct RequestsHandle {
    /// The program may write to it, so the accessors use the fields below instead.
    requests: UnsafeCell<Requests>,
    count: c_int,
    /// `max_token_len * (max_seq_len + 1)`
    prompt_bytes: usize,
    /// `max_seq_len + 1`
    row_ints: usize,
    /// `[count, prompt_bytes]`
    prompts: Vec<u8>,
    /// `[count, row_ints]`
    answers: Vec<c_int>,
}

/// Reads a file of prompts: its first line is their number, and each further line is a prompt. `steps` becomes
/// `max_seq_len`: a prompt of n tokens gets an answer of up to `steps` - n + 1 tokens, or, with GETP_TOKENS in
/// `getp_options.steps`, of up to `steps` - n. For one token and one step that is one token, or none. `tokenizer` is
/// needed only for this call.
///
/// Lines end in LF, or all of them in CR LF. A UTF-8 byte order mark and empty lines behind the last prompt are
/// skipped. Refused are files with both ends of lines, in UTF-16, with a NUL byte in a prompt, or with more or fewer
/// prompts than the first line says.
///
/// On failure: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_requests_open(
    path: *const c_char,
    steps: c_int,
    tokenizer: *const TokenizerHandle,
) -> *mut RequestsHandle {
    guard::work(null_mut(), || {
        // SAFETY: the program passes a C string.
        let path = unsafe { pointer::path(path, "path") }?;
        // SAFETY: the program passes what `getp_tokenizer_open` gave.
        let tokenizer = unsafe { pointer::borrow(tokenizer, "tokenizer") }?;
        let explain = |error| Error::in_file(file_kind::explain(path, error, GivenAs::Prompts));
        let data = std::fs::read(path).map_err(|error| explain(Error::io(path, error)))?;
        let lines = lines(path, &data).map_err(explain)?;
        let requests = RequestsHandle::new(&lines, steps, tokenizer.max_token_length())?;
        Ok(Box::into_raw(Box::new(requests)))
    })
}

/// The struct to pass to `inference`. It belongs to `requests` and is valid until those are closed.
///
/// Fails for a NULL: one line on stderr and the last error, returns NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_requests_get(requests: *mut RequestsHandle) -> *mut Requests {
    guard::look(null_mut(), || {
        // SAFETY: the program passes what `getp_requests_open` gave.
        let handle = unsafe { pointer::borrow(requests, "requests") }?;
        Ok(handle.requests.get())
    })
}

/// The number of requests.
///
/// Fails for a NULL: one line on stderr and the last error, returns -1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_requests_count(requests: *const RequestsHandle) -> c_int {
    guard::look(-1, || {
        // SAFETY: the program passes what `getp_requests_open` gave.
        let handle = unsafe { pointer::borrow(requests, "requests") }?;
        Ok(handle.count)
    })
}

/// The prompt of request `index`: `*length` bytes, which a NUL need not follow. It belongs to `requests`.
///
/// Fails for a NULL or an index out of range: one line on stderr and the last error, returns NULL; unless `length`
/// itself is NULL, `*length` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_requests_prompt(
    requests: *const RequestsHandle,
    index: c_int,
    length: *mut usize,
) -> *const c_char {
    guard::look(null(), || {
        // SAFETY: the program passes a pointer to a variable of its own.
        let length = unsafe { pointer::borrow_mut(length, "length") }?;
        *length = 0;
        // SAFETY: the program passes what `getp_requests_open` gave.
        let handle = unsafe { pointer::borrow(requests, "requests") }?;
        let prompt = row(&handle.prompts, handle.index(index)?, handle.prompt_bytes);
        *length = prompt.iter().position(|&byte| byte == 0).unwrap_or(prompt.len());
        Ok(prompt.as_ptr().cast())
    })
}

/// The answer to request `index`: `*length` tokens, none before `inference` has stored them. They belong to `requests`.
///
/// Fails for a NULL or an index out of range: one line on stderr and the last error, returns NULL; unless `length`
/// itself is NULL, `*length` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_requests_tokens(
    requests: *const RequestsHandle,
    index: c_int,
    length: *mut usize,
) -> *const c_int {
    guard::look(null(), || {
        // SAFETY: the program passes a pointer to a variable of its own.
        let length = unsafe { pointer::borrow_mut(length, "length") }?;
        *length = 0;
        // SAFETY: the program passes what `getp_requests_open` gave.
        let handle = unsafe { pointer::borrow(requests, "requests") }?;
        let row = row(&handle.answers, handle.index(index)?, handle.row_ints);
        *length = row.iter().position(|&token| token < 0).unwrap_or(row.len());
        Ok(row.as_ptr())
    })
}

/// Closes requests. Does nothing for NULL.
///
/// Fails only by a defect of the library: one line on stderr and the last error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_requests_close(requests: *mut RequestsHandle) {
    guard::look((), || {
        if !requests.is_null() {
            // SAFETY: the program passes what `getp_requests_open` gave, for the last time.
            drop(unsafe { Box::from_raw(requests) });
        }
        Ok(())
    });
}

impl RequestsHandle {
    fn new(lines: &[&[u8]], steps: c_int, max_token_length: c_int) -> Result<Self> {
        let row_ints = usize::try_from(steps)
            .ok()
            .filter(|&steps| steps > 0)
            .map(|steps| steps + 1);
        let row_ints = row_ints.ok_or_else(|| Error::format("steps", format!("{steps} is too few; use 1 or more")))?;
        // `max_seq_len + 1` tokens of the greatest length fit. A longer prompt gets memory too, so that `inference`
        // sees it whole and refuses it, instead of answering its beginning.
        let longest = lines.iter().map(|line| line.len()).max().unwrap_or(0);
        let max_token_len = longest.div_ceil(row_ints).max(1);
        let max_token_len = c_int::try_from(max_token_len).map_err(|_| Error::Overflow("max_token_len"))?;
        let max_token_len = max_token_len.max(max_token_length);
        let prompt_bytes = max_token_len as usize * row_ints;
        let mut prompts = zeroed("the prompts", lines.len(), prompt_bytes)?;
        let mut answers = zeroed("the answers", lines.len(), row_ints)?;
        for (prompt, line) in prompts.chunks_exact_mut(prompt_bytes).zip(lines) {
            prompt[..line.len()].copy_from_slice(line);
        }
        answers.chunks_exact_mut(row_ints).for_each(|row| row[0] = -1);
        let count = c_int::try_from(lines.len()).map_err(|_| Error::Overflow("num_reqs"))?;
        let requests = Requests {
            num_reqs: count,
            max_token_len,
            max_seq_len: steps,
            str_reqs: prompts.as_mut_ptr().cast(),
            tok_gens: answers.as_mut_ptr(),
        };
        Ok(Self {
            requests: UnsafeCell::new(requests),
            count,
            prompt_bytes,
            row_ints,
            prompts,
            answers,
        })
    }

    fn index(&self, index: c_int) -> Result<usize> {
        let count = self.count;
        match usize::try_from(index) {
            Ok(at) if index < count => Ok(at),
            _ => Err(Error::format(
                "index",
                format!("{index} is out of range; there are {count} requests"),
            )),
        }
    }
}

fn row<T>(values: &[T], index: usize, row: usize) -> &[T] {
    &values[index * row..][..row]
}

/// The prompts of a request file.
fn lines<'a>(path: &Path, data: &'a [u8]) -> Result<Vec<&'a [u8]>> {
    let wrong = |why: String| Error::format(path.display().to_string(), why);
    if data.starts_with(b"\xff\xfe") || data.starts_with(b"\xfe\xff") {
        return Err(wrong("it is UTF-16 or UTF-32; save it as UTF-8".into()));
    }
    // Editors that end lines in CR LF often write a byte order mark, too.
    let data = data.strip_prefix(b"\xef\xbb\xbf").unwrap_or(data);
    let has_cr = ends_in_cr_lf(data).map_err(&wrong)?;
    let of_line = |line: &'a [u8]| line.strip_suffix(b"\r").filter(|_| has_cr).unwrap_or(line);
    // A newline at the end of the file begins no further line.
    let mut lines = data
        .strip_suffix(b"\n")
        .unwrap_or(data)
        .split(|&byte| byte == b'\n')
        .map(of_line);
    let first = String::from_utf8_lossy(lines.next().unwrap_or_default());
    let count = first.trim().parse::<usize>().map_err(|_| {
        let start: String = first.chars().take(32).collect();
        wrong(format!(
            "its first line is not a number but {start:?}; write how many prompts follow"
        ))
    })?;
    let prompts = memory::collect(lines.by_ref().take(count), Purpose::Requests)?;
    if prompts.len() < count {
        return Err(wrong(format!(
            "it has {} prompts where its first line says {count}",
            prompts.len()
        )));
    }
    if let Some(behind) = lines.position(|line| !line.is_empty()) {
        let more = 1 + lines.filter(|line| !line.is_empty()).count();
        return Err(wrong(format!(
            "its first line says {count} prompts, and {more} more follow, the first in line {}; correct the number",
            count + behind + 2
        )));
    }
    if let Some(at) = prompts.iter().position(|prompt| prompt.contains(&0)) {
        let why = format!("line {} has a NUL byte, where the prompt would end; remove it", at + 2);
        return Err(wrong(why));
    }
    Ok(prompts)
}

/// Whether the lines end in CR LF. Fails if only some do, or if they end in CR alone: nobody can tell then which CR
/// belongs to a prompt.
fn ends_in_cr_lf(data: &[u8]) -> std::result::Result<bool, String> {
    let mut first = None;
    for (number, line) in (1..).zip(data.split_inclusive(|&byte| byte == b'\n')) {
        // The last line may end with the file.
        let Some(line) = line
            .strip_suffix(b"\n")
            .or_else(|| line.ends_with(b"\r").then_some(line))
        else {
            continue;
        };
        let has_cr = line.ends_with(b"\r");
        if *first.get_or_insert(has_cr) != has_cr {
            let [with, without] = if has_cr { [number, 1] } else { [1, number] };
            let why = "end all lines alike, so that it is clear whether a CR belongs to the prompt";
            return Err(format!(
                "line {with} ends in CR LF and line {without} in LF alone; {why}"
            ));
        }
    }
    if data.contains(&b'\r') && !data.contains(&b'\n') {
        return Err("its lines end in CR alone; end them in LF or in CR LF".into());
    }
    Ok(first == Some(true))
}

/// `[rows, row]` zeros, or an error if there is no memory for them.
fn zeroed<T: Copy + Default>(what: &'static str, rows: usize, row: usize) -> Result<Vec<T>> {
    let values = rows.checked_mul(row).ok_or(Error::Overflow(what))?;
    memory::filled(T::default(), values, Purpose::Requests)
}
