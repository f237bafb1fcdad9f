//! A checked view of the program's request buffers.
//!
//! The program passes two flat buffers and three sizes. [`Extent::check`] checks the pointers and all arithmetic on the
//! sizes once; after that both buffers are slices. Prompts are a shared slice and answer rows an exclusive one, so the
//! view can be sent to another thread, and a prompt can be kept while rows are written.

use crate::error::{Error, Result};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::slice;

/// Stored after the last token of a row.
const END_OF_ROW: i32 = -1;

/// What the steps of a request (`max_seq_len`) count. Versions of the evaluation program differ in it. An answer's last
/// token is never fed to the model, so it takes no position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Steps {
    /// The positions that are computed: the program's loop is `while (pos < steps)`, and a prompt of n tokens gets up
    /// to `steps - n + 1`.
    #[default]
    Positions,
    /// The tokens of prompt and answer together: the loop is `while (pos + 1 < steps)`, and there are up to
    /// `steps - n`.
    Tokens,
}

impl Steps {
    /// The most positions that are computed for a request of so many steps.
    pub fn positions(self, steps: usize) -> usize {
        match self {
            Self::Positions => steps,
            Self::Tokens => steps.saturating_sub(1),
        }
    }
}

/// The program's requests: for each one the bytes of its prompt, and a row of ints for its answer.
#[derive(Debug)]
pub struct Requests<'a> {
    num_reqs: usize,
    steps: usize,
    prompt_bytes: usize,
    /// `[num_reqs, prompt_bytes]`
    prompts: &'a [u8],
    /// `[num_reqs, steps + 1]`. The program may pass them uninitialized.
    rows: &'a mut [MaybeUninit<i32>],
    /// Whether every row has an end.
    is_cleared: bool,
}

/// The addresses and sizes of the buffers, checked as far as possible without dereferencing a pointer.
#[derive(Debug)]
pub struct Extent {
    num_reqs: usize,
    steps: usize,
    prompt_bytes: usize,
    str_reqs: *const u8,
    tok_gens: *mut i32,
}

impl Extent {
    /// Checks the fields of the program's struct. With `num_reqs` 0 the other fields are not looked at.
    pub fn check(
        num_reqs: i32,
        max_token_len: i32,
        max_seq_len: i32,
        str_reqs: *const u8,
        tok_gens: *mut i32,
    ) -> Result<Self> {
        let num_reqs = at_least(0, "num_reqs", num_reqs)?;
        let mut extent = Self {
            num_reqs,
            steps: 0,
            prompt_bytes: 0,
            str_reqs,
            tok_gens,
        };
        if num_reqs == 0 {
            return Ok(extent);
        }
        let max_token_len = at_least(1, "max_token_len", max_token_len)?;
        extent.steps = at_least(1, "max_seq_len", max_seq_len)?;
        let row_ints = extent.steps + 1;
        extent.prompt_bytes = product("a prompt of Requests.str_reqs", &[max_token_len, row_ints])?;
        let all_bytes = product("Requests.str_reqs", &[num_reqs, extent.prompt_bytes])?;
        let rows_bytes = product("Requests.tok_gens", &[num_reqs, row_ints, size_of::<i32>()])?;
        check_pointer("Requests.str_reqs", str_reqs, all_bytes)?;
        check_pointer("Requests.tok_gens", tok_gens, rows_bytes)?;
        let (prompts, rows) = (str_reqs.addr()..str_reqs.addr() + all_bytes, extent.rows());
        if prompts.start < rows.end && rows.start < prompts.end {
            return Err(Error::format(
                "Requests",
                "str_reqs and tok_gens overlap; give each its own memory",
            ));
        }
        Ok(extent)
    }

    /// The address range of the rows; empty without requests.
    pub fn rows(&self) -> Range<usize> {
        let start = self.tok_gens.addr();
        match self.num_reqs {
            0 => 0..0,
            n => start..start + n * (self.steps + 1) * size_of::<i32>(),
        }
    }

    /// The buffers as slices.
    ///
    /// # Safety
    ///
    /// For all of `'a`, unless there are no requests:
    /// - `str_reqs` points to `num_reqs * max_token_len * (max_seq_len + 1)` readable, initialized bytes that nobody
    ///   writes to;
    /// - `tok_gens` points to `num_reqs * (max_seq_len + 1)` writable ints that nobody else reads or writes.
    pub unsafe fn view<'a>(&self) -> Requests<'a> {
        if self.num_reqs == 0 {
            return Requests::empty();
        }
        let rows = self.num_reqs * (self.steps + 1);
        // SAFETY: the pointer is not NULL, its end does not wrap, and the length is at most isize::MAX; the caller
        // guarantees that the bytes are readable, initialized and unchanged for 'a.
        let prompts = unsafe { slice::from_raw_parts(self.str_reqs, self.num_reqs * self.prompt_bytes) };
        // SAFETY: the pointer is not NULL and aligned, its end does not wrap, and the length is at most isize::MAX
        // bytes; the caller guarantees that the ints are writable and that nobody else uses them for 'a. The element
        // type allows them to be uninitialized.
        let rows = unsafe { slice::from_raw_parts_mut(self.tok_gens.cast(), rows) };
        Requests {
            num_reqs: self.num_reqs,
            steps: self.steps,
            prompt_bytes: self.prompt_bytes,
            prompts,
            rows,
            is_cleared: false,
        }
    }
}

impl<'a> Requests<'a> {
    /// Checks the fields of the program's struct and gives the buffers as slices.
    ///
    /// # Safety
    ///
    /// Same requirements as [`Extent::view`].
    pub unsafe fn from_raw(
        num_reqs: i32,
        max_token_len: i32,
        max_seq_len: i32,
        str_reqs: *const u8,
        tok_gens: *mut i32,
    ) -> Result<Self> {
        let extent = Extent::check(num_reqs, max_token_len, max_seq_len, str_reqs, tok_gens)?;
        // SAFETY: guaranteed by our caller.
        Ok(unsafe { extent.view() })
    }

    /// No requests.
    fn empty() -> Self {
        Self {
            num_reqs: 0,
            steps: 0,
            prompt_bytes: 0,
            prompts: &[],
            rows: &mut [],
            is_cleared: true,
        }
    }

    /// Number of requests.
    pub fn len(&self) -> usize {
        self.num_reqs
    }

    /// Whether there are no requests.
    pub fn is_empty(&self) -> bool {
        self.num_reqs == 0
    }

    /// The steps of a request, `max_seq_len`.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The most positions of a request, if this is what steps count.
    pub fn positions(&self, steps: Steps) -> usize {
        steps.positions(self.steps)
    }

    /// The prompt of request `i`: its bytes up to the first NUL, or all of it.
    ///
    /// # Panics
    ///
    /// If there is no request `i`.
    pub fn prompt(&self, i: usize) -> &'a [u8] {
        let bytes = &self.prompts[i * self.prompt_bytes..][..self.prompt_bytes];
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        &bytes[..end]
    }

    /// Ends every row at its start, so that all rows are well formed whatever happens later.
    pub fn clear_all(&mut self) {
        for i in 0..self.num_reqs {
            self.store(i, &[]);
        }
        self.is_cleared = true;
    }

    /// The tokens of request `i`'s answer.
    ///
    /// # Panics
    ///
    /// If there is no request `i`, or [`Self::clear_all`] was not called before.
    pub fn answer(&self, i: usize) -> impl Iterator<Item = u32> {
        assert!(self.is_cleared, "rows are read before they have an end");
        let row_ints = self.steps + 1;
        let row = &self.rows[i * row_ints..][..row_ints];
        // SAFETY: every row has been written by `store`, first to last token and the end behind them; nothing behind
        // the end is read.
        let tokens = row.iter().map(|cell| unsafe { cell.assume_init() });
        tokens.map_while(|token| u32::try_from(token).ok())
    }

    /// Writes the answer of request `i` and ends its row. Tokens beyond `steps` are dropped.
    ///
    /// # Panics
    ///
    /// If there is no request `i`.
    pub fn store(&mut self, i: usize, tokens: &[u32]) {
        let row_ints = self.steps + 1;
        let row = &mut self.rows[i * row_ints..][..row_ints];
        let kept = &tokens[..tokens.len().min(self.steps)];
        for (cell, &token) in row.iter_mut().zip(kept) {
            // Token ids are below the vocabulary's size, which is an int.
            cell.write(token.cast_signed());
        }
        row[kept.len()].write(END_OF_ROW);
    }
}

/// Converts a field of the struct to a size. Fails if it is below `least`.
fn at_least(least: i32, field: &'static str, value: i32) -> Result<usize> {
    usize::try_from(value)
        .ok()
        .filter(|_| value >= least)
        .ok_or_else(|| Error::format("Requests", format!("{field} is {value}; it must be {least} or more")))
}

/// The product of `sizes`. Fails if it is more bytes than a slice can have.
fn product(what: &'static str, sizes: &[usize]) -> Result<usize> {
    sizes
        .iter()
        .try_fold(1, |product: usize, &size| product.checked_mul(size))
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or(Error::Overflow(what))
}

/// Refuses a pointer that is NULL or misaligned for `T`, or whose `bytes` bytes would wrap around the address space.
fn check_pointer<T>(what: &'static str, pointer: *const T, bytes: usize) -> Result<()> {
    if pointer.is_null() {
        return Err(Error::Null(what));
    }
    if !pointer.is_aligned() {
        return Err(Error::format(
            what,
            format!("{pointer:p} is not aligned for its elements"),
        ));
    }
    match pointer.addr().checked_add(bytes) {
        Some(_) => Ok(()),
        None => Err(Error::Overflow(what)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr;

    /// The value of ints that must not be written to.
    const SENTINEL: i32 = 0x5EAF_00D5;

    /// Buffers as the program allocates them, followed by one row and one prompt that must stay unchanged.
    struct Buffers {
        num_reqs: i32,
        max_token_len: i32,
        max_seq_len: i32,
        str_reqs: Vec<u8>,
        tok_gens: Vec<i32>,
    }

    impl Buffers {
        fn new(max_token_len: i32, max_seq_len: i32, prompts: &[&[u8]]) -> Self {
            let prompt_bytes = (max_token_len * (max_seq_len + 1)) as usize;
            let mut str_reqs = vec![0; prompts.len() * prompt_bytes];
            for (bytes, prompt) in str_reqs.chunks_exact_mut(prompt_bytes).zip(prompts) {
                bytes[..prompt.len()].copy_from_slice(prompt);
            }
            str_reqs.resize(str_reqs.len() + prompt_bytes, b'!');
            Self {
                num_reqs: prompts.len() as i32,
                max_token_len,
                max_seq_len,
                str_reqs,
                tok_gens: vec![SENTINEL; (prompts.len() + 1) * (max_seq_len + 1) as usize],
            }
        }

        fn view(&mut self) -> Requests<'_> {
            let Self {
                num_reqs,
                max_token_len,
                max_seq_len,
                ..
            } = *self;
            let (str_reqs, tok_gens) = (self.str_reqs.as_ptr(), self.tok_gens.as_mut_ptr());
            // SAFETY: both vectors are at least as long as the sizes say and borrowed for the view's life.
            unsafe { Requests::from_raw(num_reqs, max_token_len, max_seq_len, str_reqs, tok_gens).unwrap() }
        }
    }

    /// The error for fields that are refused before a pointer is dereferenced.
    fn refused(fields: (i32, i32, i32), str_reqs: *const u8, tok_gens: *mut i32) -> Error {
        let (num_reqs, max_token_len, max_seq_len) = fields;
        // SAFETY: every caller passes fields or pointers that are refused, so nothing is read or written.
        unsafe { Requests::from_raw(num_reqs, max_token_len, max_seq_len, str_reqs, tok_gens).unwrap_err() }
    }

    /// The evaluation program's loop for a prompt of so many tokens, in either version: the positions that it computes,
    /// and how many tokens it stores. `None` where it would write in front of the row.
    fn program(rule: Steps, steps: usize, n_prompt: usize) -> Option<(usize, usize)> {
        let goes_on = |pos: usize| match rule {
            Steps::Positions => pos < steps,
            Steps::Tokens => pos + 1 < steps,
        };
        let mut pos = 0;
        while goes_on(pos) {
            pos += 1;
        }
        Some((pos, (pos + 1).checked_sub(n_prompt)?))
    }

    #[test]
    fn steps_count_what_the_program_s_loop_counts() {
        for steps in 1..40 {
            for rule in [Steps::Positions, Steps::Tokens] {
                let positions = rule.positions(steps);
                for n_prompt in 1..45 {
                    let tokens = (positions + 1).checked_sub(n_prompt);
                    let expected = program(rule, steps, n_prompt);
                    assert_eq!(tokens.map(|tokens| (positions, tokens)), expected, "{rule:?}, {steps}");
                }
            }
            assert_eq!(Steps::Tokens.positions(steps + 1), Steps::Positions.positions(steps));
        }
        // A prompt of one token and one step.
        assert_eq!(program(Steps::Positions, 1, 1), Some((1, 1)));
        assert_eq!(program(Steps::Tokens, 1, 1), Some((0, 0)));
    }

    #[test]
    fn prompts_end_at_the_first_nul_or_with_their_bytes() {
        let all_full = [b'x'; 12];
        let mut buffers = Buffers::new(3, 3, &[b"hello", &all_full, b"", b"a\0b", "\u{e4}\u{f6}".as_bytes()]);
        let requests = buffers.view();
        assert_eq!((requests.len(), requests.steps(), requests.is_empty()), (5, 3, false));
        assert_eq!(requests.prompt(0), b"hello");
        assert_eq!(requests.prompt(1), all_full);
        assert_eq!(requests.prompt(2), b"");
        assert_eq!(requests.prompt(3), b"a");
        assert_eq!(requests.prompt(4), "\u{e4}\u{f6}".as_bytes());
    }

    #[test]
    fn last_prompt_without_nul_does_not_run_on() {
        let mut buffers = Buffers::new(2, 1, &[b"abcd"]);
        assert_eq!(buffers.view().prompt(0), b"abcd");
    }

    #[test]
    fn rows_hold_tokens_then_the_end_and_nothing_else_changes() {
        let mut buffers = Buffers::new(4, 3, &[b"a".as_slice(); 5]);
        let mut requests = buffers.view();
        requests.store(1, &[7, 8]);
        requests.store(2, &[1, 2, 3]);
        requests.store(3, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        requests.store(4, &[]);
        const S: i32 = SENTINEL;
        let rows = [
            [S, S, S, S],
            [7, 8, -1, S],
            [1, 2, 3, -1],
            [1, 2, 3, -1],
            [-1, S, S, S],
            [S, S, S, S],
        ];
        assert_eq!(buffers.tok_gens, rows.as_flattened());
    }

    #[test]
    fn clear_all_ends_every_row_at_once() {
        let mut buffers = Buffers::new(4, 2, &[b"a".as_slice(); 3]);
        buffers.view().clear_all();
        const S: i32 = SENTINEL;
        assert_eq!(buffers.tok_gens, [-1, S, S, -1, S, S, -1, S, S, S, S, S]);
    }

    #[test]
    fn no_requests_are_nothing_to_do() {
        // SAFETY: without requests no pointer is followed.
        let mut requests = unsafe { Requests::from_raw(0, -1, -1, ptr::null(), ptr::null_mut()).unwrap() };
        assert!(requests.is_empty());
        requests.clear_all();
    }

    #[test]
    fn fields_that_cannot_be_sizes_are_refused() {
        for (fields, word) in [
            ((-1, 4, 4), "num_reqs is -1"),
            ((i32::MIN, 4, 4), "num_reqs is -2147483648"),
            ((1, 0, 4), "max_token_len is 0"),
            ((1, -4, 4), "max_token_len is -4"),
            ((1, 4, 0), "max_seq_len is 0"),
            ((1, 4, -1), "max_seq_len is -1"),
        ] {
            let message = refused(fields, ptr::null(), ptr::null_mut()).to_string();
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn sizes_beyond_the_address_space_are_refused() {
        let (byte, mut int) = (0_u8, 0_i32);
        let absurd = (i32::MAX, i32::MAX, i32::MAX);
        assert!(matches!(refused(absurd, &byte, &mut int), Error::Overflow(_)));
        let just_past = (3, i32::MAX, i32::MAX);
        assert!(matches!(refused(just_past, &byte, &mut int), Error::Overflow(_)));
        let past_the_end = ptr::without_provenance::<u8>(usize::MAX - 10);
        assert!(matches!(refused((1, 4, 4), past_the_end, &mut int), Error::Overflow(_)));
    }

    #[test]
    fn buffers_that_overlap_are_refused() {
        let mut words = [0_i32; 8];
        let at = words.as_mut_ptr();
        // One request of two steps and a byte a token: three bytes of prompt, three ints of row.
        for (prompt, overlaps) in [(0, true), (11, true), (12, false)] {
            let checked = Extent::check(1, 1, 2, at.cast::<u8>().wrapping_add(prompt), at);
            let refused = checked.err().map(|error| error.to_string());
            assert_eq!(refused.is_some(), overlaps, "{refused:?}");
            assert!(refused.is_none_or(|words| words.contains("overlap")));
        }
    }

    #[test]
    fn pointers_that_cannot_be_followed_are_refused() {
        let (byte, mut int) = (0_u8, 0_i32);
        assert!(matches!(
            refused((1, 4, 4), ptr::null(), &mut int),
            Error::Null("Requests.str_reqs")
        ));
        assert!(matches!(
            refused((1, 4, 4), &byte, ptr::null_mut()),
            Error::Null("Requests.tok_gens")
        ));
        let odd = (&raw mut int).wrapping_byte_add(1);
        assert!(matches!(refused((1, 4, 4), &byte, odd), Error::Format { .. }));
    }
}
