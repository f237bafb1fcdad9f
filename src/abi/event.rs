//! `getp_event`: what a program is told of a request.

use super::guard;
use super::status::{self, GETP_OK, GETP_REFUSED, Status};
use crate::engine::{Ending, Event};
use crate::report;
use crate::request::{End, Score};
use std::ffi::{CString, c_char, c_int};
use std::mem::{offset_of, size_of};
use std::ptr::null;
use std::time::Instant;

/// `getp_event.end`: the request goes on, and more events come.
pub const GETP_END_NONE: c_int = 0;
/// `getp_event.end`: the answer ends with one of the model's end tokens, `end_token`.
pub const GETP_END_TOKEN: c_int = 1;
/// `getp_event.end`: the answer ends with one of the request's stop tokens, `end_token`.
pub const GETP_END_STOP: c_int = 2;
/// `getp_event.end`: the answer has as many tokens as it may have.
pub const GETP_END_LENGTH: c_int = 3;
/// `getp_event.end`: the request was cancelled.
pub const GETP_END_CANCELLED: c_int = 4;
/// `getp_event.end`: the request cannot be answered; `status` and `why` say why.
pub const GETP_END_REFUSED: c_int = 5;
/// `getp_event.end`: the request could not be answered to its end; `status` and `why` say why.
pub const GETP_END_FAILED: c_int = 6;

/// What a program is told of a request. The library makes it, so that it can grow: a program takes only pointers to it.
#[repr(C)]
pub struct CEvent {
    /// sizeof(getp_event) as the library knows it: an older one has no field behind so many bytes.
    pub size: usize,
    /// The request's number within the batch.
    pub id: u64,
    /// The request's `tag`.
    pub tag: u64,
    /// The tokens of the answer since the request's event before: `count` ids, the token that ends the answer included.
    pub tokens: *const c_int,
    /// How many.
    pub count: usize,
    /// GETP_END_NONE, or how the request has ended; then this is its last event.
    pub end: c_int,
    /// The token that ended the answer, or -1.
    pub end_token: c_int,
    /// GETP_OK, or what a request that was refused or has failed came to.
    pub status: Status,
    /// 0: a later version may use it.
    pub reserved: c_int,
    /// The reason in words, one line; NULL if `status` is GETP_OK.
    pub why: *const c_char,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the answer so far.
    pub answer_tokens: usize,
    /// When the request was submitted, in seconds since the batch was opened, as the times below. -1 for what has not
    /// happened.
    pub submitted: f64,
    /// When a device began with it.
    pub started: f64,
    /// When its first token came.
    pub first_token: f64,
    /// When its last token so far came.
    pub last_token: f64,
    /// The log-probabilities of `tokens`, `count` of them, if the request wants these; otherwise NULL.
    pub logprobs: *const LogProb,
    /// Those of the prompt's tokens since the request's event before, from its second token on: `prompt_count`, if the
    /// request wants these.
    pub prompt_logprobs: *const LogProb,
    /// How many.
    pub prompt_count: usize,
}

/// The log-probability of a token: the natural logarithm of its share in the softmax of the logits, whatever the
/// request's temperature is. It gets no more fields, since events have arrays of it.
#[repr(C)]
pub struct LogProb {
    /// The token.
    pub token: c_int,
    /// Its log-probability.
    pub logprob: f32,
    /// The most probable tokens, the most probable one first: `top_count`.
    pub top: *const TopLogProb,
    /// How many.
    pub top_count: usize,
}

/// One of the most probable tokens. It gets no more fields, since there are arrays of it.
#[repr(C)]
pub struct TopLogProb {
    /// The token.
    pub token: c_int,
    /// Its log-probability.
    pub logprob: f32,
}

// A program compiled with an older header must keep working: an event's fields are only ever added at the end.
const _: () = {
    assert!(size_of::<CEvent>() == 136 && size_of::<LogProb>() == 24 && size_of::<TopLogProb>() == 8);
    assert!(offset_of!(CEvent, size) == 0 && offset_of!(CEvent, end) == 40 && offset_of!(CEvent, why) == 56);
    assert!(offset_of!(CEvent, submitted) == 80 && offset_of!(CEvent, prompt_count) == 128);
};

/// An event with what it points to.
#[repr(C)]
pub struct Owned {
    /// First, so that a pointer to it is one to the whole.
    told: CEvent,
    tokens: Vec<u32>,
    why: Option<CString>,
    scores: Scores,
    prompt_scores: Scores,
}

/// Log-probabilities as the program sees them.
struct Scores {
    all: Vec<LogProb>,
    /// What their pointers point to.
    _top: Vec<TopLogProb>,
}

impl Scores {
    fn new(scores: Vec<Score>) -> Self {
        let top = |&(token, logprob): &(u32, f32)| TopLogProb {
            token: token.cast_signed(),
            logprob,
        };
        let tops: Vec<_> = scores.iter().flat_map(|score| score.top.iter().map(top)).collect();
        let mut rest = tops.as_slice();
        let one = |score: Score| {
            let (own, behind) = rest.split_at(score.top.len());
            rest = behind;
            LogProb {
                token: score.token.cast_signed(),
                logprob: score.logprob,
                top: own.as_ptr(),
                top_count: own.len(),
            }
        };
        Self {
            all: scores.into_iter().map(one).collect(),
            _top: tops,
        }
    }

    /// NULL if there are none.
    fn pointer(&self) -> *const LogProb {
        if self.all.is_empty() { null() } else { self.all.as_ptr() }
    }
}

/// Frees an event of `getp_batch_next`. Does nothing for NULL.
///
/// Fails only by a defect of the library: one line on stderr and the last error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getp_event_free(event: *const CEvent) {
    guard::look((), || {
        if !event.is_null() {
            // SAFETY: the program passes what `getp_batch_next` gave, for the last time; it was made by `into_raw`.
            drop(unsafe { Box::from_raw(event.cast::<Owned>().cast_mut()) });
        }
        Ok(())
    });
}

impl CEvent {
    /// The program's event, for [`getp_event_free`]; times count from `opened`.
    pub fn into_raw(event: Event, opened: Instant) -> *const Self {
        Box::into_raw(Owned::new(event, opened)).cast_const().cast()
    }
}

impl Owned {
    /// The event as the program sees it; times count from `opened`.
    pub fn new(event: Event, opened: Instant) -> Box<Self> {
        let (end, end_token, status, why) = match &event.end {
            None => (GETP_END_NONE, None, GETP_OK, None),
            Some(Ending::Answered(End::EndToken(token))) => (GETP_END_TOKEN, Some(*token), GETP_OK, None),
            Some(Ending::Answered(End::StopToken(token))) => (GETP_END_STOP, Some(*token), GETP_OK, None),
            Some(Ending::Answered(End::Length)) => (GETP_END_LENGTH, None, GETP_OK, None),
            Some(Ending::Cancelled) => (GETP_END_CANCELLED, None, GETP_OK, None),
            Some(Ending::Refused(why)) => (GETP_END_REFUSED, None, GETP_REFUSED, Some(why)),
            Some(Ending::Failed(why)) => (GETP_END_FAILED, None, status::of(why), Some(why)),
        };
        let why = why.and_then(|why| CString::new(report::escaped(&why.to_string())).ok());
        let seconds =
            |time: Option<Instant>| time.map_or(-1.0, |time| time.saturating_duration_since(opened).as_secs_f64());
        let mut owned = Box::new(Self {
            told: CEvent {
                size: size_of::<CEvent>(),
                id: event.number as u64,
                tag: event.ticket.tag,
                tokens: null(),
                count: event.tokens.len(),
                end,
                end_token: end_token.map_or(-1, |token| token.cast_signed()),
                status,
                reserved: 0,
                why: null(),
                prompt_tokens: event.ticket.n_prompt,
                answer_tokens: event.n_tokens,
                submitted: seconds(Some(event.times.submitted)),
                started: seconds(event.times.started),
                first_token: seconds(event.times.first_token),
                last_token: seconds(event.times.last_token),
                logprobs: null(),
                prompt_logprobs: null(),
                prompt_count: event.prompt_scores.len(),
            },
            tokens: event.tokens,
            why,
            scores: Scores::new(event.scores),
            prompt_scores: Scores::new(event.prompt_scores),
        });
        owned.told.logprobs = owned.scores.pointer();
        owned.told.prompt_logprobs = owned.prompt_scores.pointer();
        owned.told.tokens = owned.tokens.as_ptr().cast();
        owned.told.why = owned.why.as_ref().map_or(null(), |why| why.as_ptr());
        owned
    }

    /// What the program is given.
    pub fn told(&self) -> &CEvent {
        &self.told
    }
}
