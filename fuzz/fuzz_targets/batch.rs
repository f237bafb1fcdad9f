//! A batch on one small model: calls in any order, requests whose fields have any values. A pointer is NULL or
//! misaligned, or what it points to is exactly as large as the lengths say, so that the address sanitizer sees one
//! token too many.

#![no_main]

use getp::abi::batch::*;
use getp::abi::event::*;
use getp::abi::library::{Stats, getp_stats_sized};
use getp::abi::model::{Model, getp_model_close, getp_model_open, getp_model_transformer};
use getp::abi::options::{GETP_OFF, GETP_ON, Options, getp_options_init_sized};
use getp::abi::status::*;
use getp::abi::types::Config;
use getp::checkpoint::{TensorLayout, config_from_bytes};
use getp_fuzz::weight;
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, c_int};
use std::ptr::{from_ref, null, null_mut};
use std::slice;
use std::sync::Mutex;

/// Positions that fit the KV cache; the most that the requests of one input have together.
const ROOM: usize = 512;
const MOST_POSITIONS: usize = 4 * ROOM;
/// Answers that are kept.
const MOST_KEPT: usize = 1 << 14;

#[derive(Arbitrary, Debug)]
struct Input {
    calls: Vec<Call>,
    /// What is left at the end is dropped.
    is_left: bool,
    /// With the model, before the batch.
    closes_model: bool,
}

#[derive(Arbitrary, Debug)]
enum Call {
    Submit(Asked),
    Again(u8),
    Cancel(u8),
    CancelAny(u64),
    CancelAll,
    Next(f64),
    NextOrNone,
    Stats,
}

#[derive(Arbitrary, Clone, Debug)]
struct Asked {
    size: Option<usize>,
    prompt: Ids,
    max_tokens: Size,
    min_tokens: Size,
    temperature: Option<f32>,
    topp: Option<f32>,
    seed: u64,
    stop: Ids,
    ignore_end: Option<i32>,
    tokens_per_event: Option<i32>,
    tag: u64,
    logprobs: Option<i32>,
    prompt_logprobs: Option<i32>,
    top_logprobs: Option<i32>,
}

#[derive(Arbitrary, Clone, Debug)]
enum Ids {
    Small(Vec<u8>),
    Any(Vec<i32>),
    /// NULL, with a length.
    Null(usize),
    /// Not aligned, with a length.
    Odd(usize),
    /// More than there is memory, behind a pointer that may be read.
    Huge(usize),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Size {
    Small(u8),
    Any(usize),
}

impl Size {
    fn get(self) -> usize {
        match self {
            Self::Small(size) => usize::from(size % 32),
            Self::Any(size) => size,
        }
    }
}

/// Ids as the request has them.
struct Given {
    ids: Box<[c_int]>,
    pointer: *const c_int,
    length: usize,
}

impl Given {
    fn new(ids: &Ids) -> Self {
        let (ids, pointer, length): (Box<[c_int]>, _, _) = match ids {
            Ids::Small(ids) => (ids.iter().map(|&id| id.into()).collect(), None, None),
            Ids::Any(ids) => (ids.as_slice().into(), None, None),
            Ids::Null(length) => ([].into(), Some(null()), Some(*length)),
            Ids::Odd(length) => ([0; 2].into(), Some(null::<c_int>().wrapping_byte_add(1)), Some(*length)),
            Ids::Huge(length) => ([0; 2].into(), None, Some((*length).max(usize::MAX / 8 + 1))),
        };
        Self {
            pointer: pointer.unwrap_or(ids.as_ptr()),
            length: length.unwrap_or(ids.len()),
            ids,
        }
    }

    /// Whether the header allows them.
    fn is_good(&self) -> bool {
        let is_known = |id: &c_int| (0..CONFIG.vocab_size).contains(id);
        self.length == 0
            || self.length == self.ids.len() && self.pointer == self.ids.as_ptr() && self.ids.iter().all(is_known)
    }
}

/// What a request is answered with: its tokens, and how they end.
#[derive(Clone, Debug, PartialEq)]
struct Answer {
    tokens: Vec<c_int>,
    end: c_int,
    end_token: c_int,
}

/// A request of the batch, as far as its events tell.
struct Running {
    asked: Asked,
    answer: Answer,
    is_cancelled: bool,
}

struct Session {
    model: *mut Model,
    batch: *mut Batch,
    running: BTreeMap<u64, Running>,
    ended: Vec<Running>,
    next: u64,
    /// Positions that may still be asked for.
    positions: usize,
    tokens: u64,
}

impl Session {
    fn new(model: *mut Model) -> Self {
        // SAFETY: an open model.
        let batch = unsafe { getp_batch_open(model, null()) };
        assert!(!batch.is_null());
        Self {
            model,
            batch,
            running: BTreeMap::new(),
            ended: Vec::new(),
            next: 0,
            positions: MOST_POSITIONS,
            tokens: 0,
        }
    }

    /// Submits a request, if its answer is not too long for this input. Exactly those that the header allows are taken.
    fn submit(&mut self, asked: &Asked) {
        let (prompt, stop) = (Given::new(&asked.prompt), Given::new(&asked.stop));
        let (max_tokens, temperature) = (asked.max_tokens.get(), asked.temperature.unwrap_or(0.0));
        let request = Request {
            size: asked.size.unwrap_or(size_of::<Request>()),
            prompt: prompt.pointer,
            prompt_length: prompt.length,
            max_tokens,
            min_tokens: asked.min_tokens.get(),
            temperature,
            topp: asked.topp.unwrap_or(0.9),
            seed: asked.seed,
            stop: stop.pointer,
            stop_length: stop.length,
            ignore_end: asked.ignore_end.unwrap_or(0),
            tokens_per_event: asked.tokens_per_event.unwrap_or(1),
            tag: asked.tag,
            logprobs: asked.logprobs.unwrap_or(0),
            prompt_logprobs: asked.prompt_logprobs.unwrap_or(0),
            top_logprobs: asked.top_logprobs.unwrap_or(0),
            reserved: 0,
        };
        let switches = [request.ignore_end, request.logprobs, request.prompt_logprobs];
        let is_good = request.size == size_of::<Request>()
            && prompt.is_good()
            && stop.is_good()
            && temperature.is_finite()
            && temperature >= 0.0
            && (temperature == 0.0 || !request.topp.is_nan())
            && switches.iter().all(|switch| [0, GETP_ON, GETP_OFF].contains(switch))
            && (0..=GETP_MOST_TOP_LOGPROBS).contains(&request.top_logprobs)
            && request.tokens_per_event >= 0;
        let most = if max_tokens == 0 {
            ROOM
        } else {
            prompt.ids.len().saturating_add(max_tokens)
        };
        let positions = if most > 2 * ROOM { 0 } else { most };
        // A size that a later version may have says that there are more bytes.
        let is_later = request.size > size_of::<Request>() && request.size <= 4096;
        if positions > self.positions || is_later {
            return;
        }
        let mut id = u64::MAX;
        // SAFETY: an open batch; what the request points to is as long as it says, or refused before it is read.
        let status = unsafe { getp_batch_submit(self.batch, &request, &mut id) };
        if !is_good {
            assert_eq!((status, id), (GETP_BAD_ARGUMENT, u64::MAX));
            return;
        }
        assert_eq!((status, id), (GETP_OK, self.next));
        self.next += 1;
        self.positions -= positions;
        let running = Running {
            asked: asked.clone(),
            answer: Answer {
                tokens: Vec::new(),
                end: GETP_END_NONE,
                end_token: -1,
            },
            is_cancelled: false,
        };
        self.running.insert(id, running);
    }

    fn cancel(&mut self, id: u64) {
        // SAFETY: an open batch.
        let status = unsafe { getp_batch_cancel(self.batch, id) };
        assert_eq!(status, if id < self.next { GETP_OK } else { GETP_BAD_ARGUMENT });
        if let Some(running) = self.running.get_mut(&id) {
            running.is_cancelled = true;
        }
    }

    fn cancel_all(&mut self) {
        // SAFETY: an open batch.
        assert_eq!(unsafe { getp_batch_cancel_all(self.batch) }, GETP_OK);
        self.running
            .values_mut()
            .for_each(|running| running.is_cancelled = true);
    }

    /// Takes an event, and holds it against what is known; waits for ever only where one must come.
    fn next(&mut self, seconds: f64) {
        let seconds = match seconds {
            _ if seconds.is_nan() => seconds,
            _ if self.running.is_empty() => 0.0,
            _ if seconds > 0.01 => -1.0,
            _ => seconds,
        };
        let mut event = null();
        // SAFETY: an open batch.
        let status = unsafe { getp_batch_next(self.batch, seconds, &mut event) };
        if status != GETP_OK {
            assert!(event.is_null());
            let wanted = if seconds.is_nan() {
                GETP_BAD_ARGUMENT
            } else {
                GETP_TIMED_OUT
            };
            assert_eq!(status, wanted);
            assert!(seconds >= 0.0 || seconds.is_nan(), "an event must come");
            return;
        }
        // SAFETY: an event, which lives until it is freed.
        self.check(unsafe { &*event });
        // SAFETY: as above.
        unsafe { getp_event_free(event) };
        // SAFETY: an open batch.
        assert_eq!(unsafe { getp_batch_unfinished(self.batch) }, self.running.len());
    }

    fn check(&mut self, event: &CEvent) {
        let running = self.running.get_mut(&event.id).expect("a request that has not ended");
        assert_eq!(event.tag, running.asked.tag);
        // SAFETY: an event's tokens.
        let tokens = unsafe { slice::from_raw_parts(event.tokens, event.count) };
        running.answer.tokens.extend(tokens);
        self.tokens += tokens.len() as u64;
        let has_scores = running.asked.logprobs == Some(GETP_ON) && event.count > 0;
        assert_eq!(event.logprobs.is_null(), !has_scores);
        if has_scores {
            // SAFETY: as above.
            let scores = unsafe { slice::from_raw_parts(event.logprobs, event.count) };
            let top = running.asked.top_logprobs.unwrap_or(0) as usize;
            assert!(scores.iter().map(|score| score.token).eq(tokens.iter().copied()));
            assert!(scores.iter().all(|score| score.top_count == top));
        }
        assert_eq!(running.answer.tokens.len(), event.answer_tokens);
        assert_eq!(event.prompt_tokens, Given::new(&running.asked.prompt).length);
        if event.end == GETP_END_NONE {
            let fewest = running.asked.tokens_per_event.unwrap_or(1);
            assert!(!running.is_cancelled && fewest > 0 && event.count >= fewest as usize);
            return;
        }
        (running.answer.end, running.answer.end_token) = (event.end, event.end_token);
        assert!(event.end != GETP_END_FAILED && (event.end != GETP_END_CANCELLED || running.is_cancelled));
        assert_eq!(event.end == GETP_END_REFUSED, event.status == GETP_REFUSED);
        assert_eq!(event.status == GETP_OK, event.why.is_null());
        assert!(event.end != GETP_END_REFUSED || event.count == 0 && event.started < 0.0);
        let times = [event.submitted, event.started, event.first_token, event.last_token];
        assert!(event.answer_tokens == 0 || times.is_sorted() && times[0] >= 0.0);
        self.ended.extend(self.running.remove(&event.id));
    }

    /// The tokens handed over are among those counted.
    fn count(&self) {
        assert!(tokens_of(self.model) >= self.tokens);
    }

    fn drain(&mut self) {
        while !self.running.is_empty() {
            self.next(-1.0);
        }
        self.next(0.0);
    }

    /// Gives what has ended.
    fn close(self) -> Vec<Running> {
        // SAFETY: opened here, for the last time.
        unsafe { getp_batch_close(self.batch) };
        self.ended
    }
}

fn tokens_of(model: *mut Model) -> u64 {
    let mut stats = Stats::default();
    // SAFETY: the transformer of an open model, and a struct of our own.
    let status = unsafe { getp_stats_sized(getp_model_transformer(model), &mut stats, size_of::<Stats>()) };
    assert_eq!(status, GETP_OK);
    stats.tokens
}

/// What lives over inputs: the model, and what requests are answered with alone, by all that they ask for.
struct Kept {
    model: *mut Model,
    alone: HashMap<String, Answer>,
}

impl Kept {
    fn alone(&mut self, asked: &Asked) -> &Answer {
        let asked = Asked {
            tag: 0,
            tokens_per_event: None,
            ..asked.clone()
        };
        let key = format!("{asked:?}");
        if self.alone.len() >= MOST_KEPT {
            self.alone.clear();
        }
        let model = self.model;
        self.alone.entry(key).or_insert_with(|| {
            let mut session = Session::new(model);
            session.submit(&asked);
            session.drain();
            session.close().pop().expect("it was taken before").answer
        })
    }
}

// SAFETY: nothing of a model belongs to a thread.
unsafe impl Send for Kept {}

fuzz_target!(|input: Input| {
    static KEPT: Mutex<Option<Kept>> = Mutex::new(None);
    let mut kept = KEPT.lock().unwrap();
    let kept = kept.get_or_insert_with(|| Kept {
        model: open(),
        alone: HashMap::new(),
    });
    run(&input, kept);
});

fn run(input: &Input, kept: &mut Kept) {
    let mut session = Session::new(kept.model);
    // SAFETY: an open model.
    let second = unsafe { getp_batch_open(kept.model, null()) };
    assert!(second.is_null(), "one batch at a time");
    let mut submitted: Vec<&Asked> = Vec::new();
    for call in &input.calls {
        match call {
            Call::Submit(asked) => {
                session.submit(asked);
                submitted.push(asked);
            }
            Call::Again(which) if !submitted.is_empty() => {
                session.submit(submitted[usize::from(*which) % submitted.len()]);
            }
            Call::Again(_) => {}
            Call::Cancel(id) => session.cancel((*id).into()),
            Call::CancelAny(id) => session.cancel(*id),
            Call::CancelAll => session.cancel_all(),
            Call::Next(seconds) => session.next(*seconds),
            Call::NextOrNone => session.next(0.0),
            Call::Stats => session.count(),
        }
    }
    if !input.is_left {
        session.drain();
        session.count();
    }
    if input.closes_model {
        // SAFETY: opened here, for the last time.
        unsafe { getp_model_close(kept.model) };
        kept.model = open();
        let mut event = null();
        // SAFETY: an open batch.
        let submitted = unsafe { getp_batch_submit(session.batch, null(), null_mut()) };
        // SAFETY: as above.
        let next = unsafe { getp_batch_next(session.batch, -1.0, &mut event) };
        assert_eq!((submitted, next), (GETP_BAD_ARGUMENT, GETP_CLOSED));
    }
    for ended in session.close() {
        let alone = kept.alone(&ended.asked);
        if ended.answer.end == GETP_END_CANCELLED {
            assert!(alone.tokens.starts_with(&ended.answer.tokens));
        } else {
            assert_eq!(*alone, ended.answer);
        }
    }
}

/// With heads so large that [`ROOM`] positions fill the smallest KV cache, of 1 MiB.
const CONFIG: Config = Config {
    head_dim: 64,
    n_attn_heads: 4,
    n_kv_heads: 4,
    ..getp_fuzz::CONFIG
};

/// Opens a model whose KV cache has room for [`ROOM`] positions.
fn open() -> *mut Model {
    let mut bytes = CONFIG.to_bytes().to_vec();
    let layout = config_from_bytes(&CONFIG.to_bytes()).and_then(TensorLayout::new);
    let floats = (layout.expect("a model").file_bytes() - bytes.len()) / size_of::<f32>();
    bytes.extend((0..floats).flat_map(|i| weight(i).to_le_bytes()));
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), bytes).expect("room for it");
    let path = CString::new(file.path().to_str().expect("a path")).expect("without NUL");
    let mut options = Options::default();
    // SAFETY: a struct of our own.
    unsafe { getp_options_init_sized(&mut options, size_of::<Options>()) };
    (options.threads, options.max_batch, options.step_tokens, options.kv_mb) = (1, 4, 8, 1);
    // SAFETY: a path, and a struct of our own.
    let model = unsafe { getp_model_open(path.as_ptr(), from_ref(&options)) };
    assert!(!model.is_null());
    model
}
