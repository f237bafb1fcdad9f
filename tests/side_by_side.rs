//! Concurrent calls from several threads: with a model each, with one model, with rows that another call is writing to,
//! and with one batch.

mod fake;

use fake::{Control, PROMPTS, Program, expected, finish, inference, quiet};
use getp::abi::batch::*;
use getp::abi::event::{CEvent, GETP_END_CANCELLED, GETP_END_LENGTH, GETP_END_NONE, getp_event_free};
use getp::abi::library::{Stats, getp_last_status, getp_stats_sized};
use getp::abi::lifecycle::{self, Backends};
use getp::abi::model::{Model, getp_model_close, getp_model_open, getp_model_transformer};
use getp::abi::status::{GETP_BAD_STATE, GETP_OK, GETP_TIMED_OUT};
use getp::abi::types::{self, Transformer, TransformerWeights};
use getp::backend::cpu;
use getp::checkpoint::{Checkpoint, TensorLayout, config_from_bytes};
use getp::options::{Options, Precision};
use getp::random::request_seed;
use std::ffi::{CString, c_int, c_void};
use std::ptr::null;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Barrier};
use std::thread;

/// The rows that the fake's model answers the prompts with.
fn rows_of(sampler: &types::Sampler, steps: usize) -> Vec<Vec<c_int>> {
    let rows = PROMPTS.iter().enumerate();
    rows.map(|(i, prompt)| expected(prompt, steps, sampler, i).0).collect()
}

#[test]
fn two_models_live_side_by_side() {
    let control = Arc::<Control>::default();
    let run = |seed: u64| {
        let mut program = Program::new(&PROMPTS, 30);
        program.sampler.temperature = 1.0;
        program.sampler.rng_state = seed;
        let before = program.sampler;
        for _ in 0..5 {
            program.sampler = before;
            inference(&mut program, &control).unwrap();
            assert_eq!(program.rows(), rows_of(&before, 30));
        }
        finish(&mut program).unwrap();
    };
    thread::scope(|scope| {
        scope.spawn(|| run(1));
        scope.spawn(|| run(2));
    });
    assert_eq!((control.opened.load(SeqCst), control.dropped.load(SeqCst)), (2, 2));
}

/// A transformer for several threads.
#[derive(Clone, Copy)]
struct OneModel(*mut Transformer);

// SAFETY: the library is to keep calls with one transformer apart.
unsafe impl Send for OneModel {}

#[test]
fn calls_with_one_model_wait_for_each_other() {
    quiet();
    let mut owner = Program::new(&[], 8);
    let control = Arc::<Control>::default();
    let start = Barrier::new(3);
    let model = OneModel(&raw mut *owner.transformer);
    thread::scope(|scope| {
        for seed in 0..3 {
            let (control, start) = (&control, &start);
            scope.spawn(move || {
                let model = model; // whole, as it may go to another thread
                let mut program = Program::new(&PROMPTS, 20);
                (program.sampler.temperature, program.sampler.rng_state) = (1.0, seed);
                let before = program.sampler;
                start.wait();
                for _ in 0..5 {
                    program.sampler = before;
                    let (tokenizer, sampler) = (&raw mut *program.tokenizer, &raw mut program.sampler);
                    let requests = &raw mut program.requests;
                    // SAFETY: the thread's own structs, but for the transformer, which only these calls use.
                    let answered = control.with_backends(|backends| unsafe {
                        lifecycle::inference(model.0, tokenizer, sampler, requests, backends)
                    });
                    answered.unwrap();
                    assert_eq!(program.rows(), rows_of(&before, 20));
                }
            });
        }
    });
    finish(&mut owner).unwrap();
    assert_eq!((control.opened.load(SeqCst), control.dropped.load(SeqCst)), (1, 1));
}

/// The rows of one `Requests`, for two threads.
#[derive(Clone, Copy)]
struct Shared(types::Requests);

// SAFETY: the test orders who writes when; the library is to keep its own calls apart.
unsafe impl Send for Shared {}

#[test]
fn rows_that_a_call_is_writing_to_are_refused_to_others() {
    let mut program = Program::new(&PROMPTS, 20);
    let requests = Shared(program.requests);
    let first = Arc::new(Control {
        hold: Some(Barrier::new(2)),
        ..Control::default()
    });
    let expected = rows_of(&program.sampler, 20);
    let answered = expected.iter().map(Vec::len).sum::<usize>();
    thread::scope(|scope| {
        // It stops in its first step until this thread has met it twice.
        let (control, shared) = (first.clone(), requests);
        let other = scope.spawn(move || {
            let shared = shared; // whole, as it may go to another thread
            let mut program = Program::new(&[], 20);
            program.requests = shared.0;
            let tokens = inference(&mut program, &control);
            finish(&mut program).unwrap();
            tokens.unwrap()
        });
        let hold = first.hold.as_ref().unwrap();
        hold.wait();
        let control = Arc::default();
        let refused = inference(&mut program, &control).unwrap_err().to_string();
        assert!(
            refused.starts_with("another call is answering these requests"),
            "{refused}"
        );
        // Rows that overlap are refused too, and none is touched.
        let last = PROMPTS.len() - 1;
        // SAFETY: the row of the last request; the other call waits.
        let marked = unsafe { program.requests.tok_gens.add(last * 21) };
        // SAFETY: as above.
        unsafe { marked.write(77) };
        program.requests.num_reqs = 1;
        program.requests.tok_gens = marked;
        let refused = inference(&mut program, &control).unwrap_err().to_string();
        assert!(
            refused.starts_with("another call is answering these requests"),
            "{refused}"
        );
        // SAFETY: as above.
        assert_eq!(unsafe { marked.read() }, 77);
        program.requests = requests.0;
        hold.wait();
        assert_eq!(other.join().unwrap() as usize, answered);
    });
    assert_eq!(program.rows(), expected);
    assert_eq!(inference(&mut program, &Arc::default()).unwrap() as usize, answered);
    finish(&mut program).unwrap();
}

/// Numbers for every array of a model of the program's dimensions.
fn weights(program: &Program) -> Vec<f32> {
    let config = config_from_bytes(&program.transformer.config.to_bytes()).unwrap();
    let numbers = TensorLayout::new(config).unwrap().file_bytes() / size_of::<f32>();
    let mut state = 1;
    let next = || {
        state = request_seed(state, 1);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(numbers).collect()
}

/// Answers the prompts on two replicas on the CPU, of two threads each.
fn answers_on_the_cpu(numbers: &[f32], precision: Precision, seed: u64) -> Vec<Vec<c_int>> {
    quiet();
    let mut program = Program::new(&PROMPTS, 12);
    program.transformer.weights = TransformerWeights::from_arrays([numbers.as_ptr().cast_mut().cast(); 16]);
    (program.sampler.temperature, program.sampler.rng_state) = (1.0, seed);
    let open_one = |checkpoint: &dyn Checkpoint, options: &Options| {
        let options = Options {
            precision: Some(precision),
            threads: 2,
            kv_mb: 1,
            ..options.clone()
        };
        cpu::open(checkpoint, &options)
    };
    let backends = Backends {
        open: &|checkpoint, options| (0..2).map(|_| open_one(checkpoint, options)).collect(),
        fallback: &open_one,
        join: &|| Ok(None),
    };
    let (transformer, tokenizer) = (&raw mut *program.transformer, &raw mut *program.tokenizer);
    let (sampler, requests) = (&raw mut program.sampler, &raw mut program.requests);
    // SAFETY: the program's own structs; every array has as many numbers as all together.
    unsafe { lifecycle::inference(transformer, tokenizer, sampler, requests, &backends) }.unwrap();
    let rows = program.rows();
    finish(&mut program).unwrap();
    rows
}

#[test]
fn models_on_the_cpu_answer_beside_others_as_alone() {
    let numbers = weights(&Program::new(&[], 1));
    for precision in [Precision::Exact, Precision::Fast] {
        let alone = [1, 2].map(|seed| answers_on_the_cpu(&numbers, precision, seed));
        assert_ne!(alone[0], alone[1]);
        let together = thread::scope(|scope| {
            let numbers = &numbers;
            let threads = [1, 2].map(|seed| scope.spawn(move || answers_on_the_cpu(numbers, precision, seed)));
            threads.map(|thread| thread.join().unwrap())
        });
        assert_eq!(together, alone);
    }
}

/// A model of random weights, opened from a file.
struct File(*mut Model);

// SAFETY: the library is to keep calls with one model apart.
unsafe impl Sync for File {}

impl File {
    fn open(name: &str) -> Self {
        quiet();
        let program = Program::new(&[], 1);
        let path = std::env::temp_dir().join(format!("getp-{name}-{}.bin", std::process::id()));
        let (mut bytes, numbers) = (program.transformer.config.to_bytes().to_vec(), weights(&program));
        bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        bytes.truncate(size_of_val(&numbers[..])); // the configuration is counted with them
        std::fs::write(&path, bytes).unwrap();
        let c_path = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a path.
        let model = unsafe { getp_model_open(c_path.as_ptr(), null()) };
        std::fs::remove_file(&path).unwrap();
        assert!(!model.is_null());
        Self(model)
    }

    fn open_batch(&self, options: Option<BatchOptions>) -> Option<Opened> {
        let options = options.as_ref().map_or(null(), std::ptr::from_ref);
        // SAFETY: an open model.
        let batch = unsafe { getp_batch_open(self.0, options) };
        assert!(!batch.is_null() || getp_last_status() == GETP_BAD_STATE);
        (!batch.is_null()).then_some(Opened(batch))
    }

    fn tokens(&self) -> u64 {
        let mut stats = Stats::default();
        // SAFETY: the transformer of an open model, and a struct of this test's own.
        let status = unsafe { getp_stats_sized(getp_model_transformer(self.0), &mut stats, size_of::<Stats>()) };
        assert_eq!(status, GETP_OK);
        stats.tokens
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: opened here, and nobody uses it any more.
        unsafe { getp_model_close(self.0) };
    }
}

/// A batch, which several threads may use.
struct Opened(*mut Batch);

// SAFETY: the library is to keep calls with one batch apart.
unsafe impl Sync for Opened {}

const MOST: usize = 12;

impl Opened {
    fn submit(&self, kind: usize) -> u64 {
        let (prompt, mut id) = ([1, 2, kind as c_int], u64::MAX);
        let request = Request {
            size: size_of::<Request>(),
            prompt: prompt.as_ptr(),
            prompt_length: prompt.len(),
            max_tokens: MOST,
            min_tokens: 0,
            temperature: kind as f32,
            topp: 0.9,
            seed: 5,
            stop: null(),
            stop_length: 0,
            ignore_end: 0,
            tokens_per_event: 1,
            tag: kind as u64,
            logprobs: 0,
            prompt_logprobs: 0,
            top_logprobs: 0,
            reserved: 0,
        };
        // SAFETY: an open batch, and structs of this test's own.
        assert_eq!(unsafe { getp_batch_submit(self.0, &request, &mut id) }, GETP_OK);
        id
    }

    /// Passes the next event on, if one comes in time.
    fn next(&self, seconds: f64, take: impl FnOnce(&CEvent)) {
        let mut event = null();
        // SAFETY: an open batch.
        match unsafe { getp_batch_next(self.0, seconds, &mut event) } {
            // SAFETY: an event, which lives until it is freed.
            GETP_OK => unsafe {
                take(&*event);
                getp_event_free(event);
            },
            status => assert_eq!(status, GETP_TIMED_OUT),
        }
    }

    fn unfinished(&self) -> usize {
        // SAFETY: an open batch.
        unsafe { getp_batch_unfinished(self.0) }
    }

    fn close(self) {
        // SAFETY: opened here, and nobody uses it any more.
        unsafe { getp_batch_close(self.0) };
    }
}

fn tokens_of(event: &CEvent) -> Vec<c_int> {
    // SAFETY: an event's tokens.
    unsafe { std::slice::from_raw_parts(event.tokens, event.count) }.to_vec()
}

#[test]
fn threads_share_a_batch() {
    let model = File::open("threads_share_a_batch");
    let batch = model.open_batch(None).unwrap();
    let alone = [0, 1, 2].map(|kind| {
        batch.submit(kind);
        let mut tokens = Vec::new();
        while batch.unfinished() > 0 {
            batch.next(-1.0, |event| tokens.extend(tokens_of(event)));
        }
        tokens
    });
    assert!(alone.iter().all(|tokens| tokens.len() == MOST));
    let (submitting, whole, cancelled) = (AtomicUsize::new(2), AtomicUsize::new(0), AtomicUsize::new(0));
    let take = |event: &CEvent| {
        thread::yield_now(); // another thread takes its event meanwhile
        let alone = &alone[event.tag as usize];
        assert_eq!(
            tokens_of(event),
            alone[event.answer_tokens - event.count..event.answer_tokens]
        );
        match event.end {
            GETP_END_NONE => 0,
            GETP_END_LENGTH => whole.fetch_add(1, SeqCst),
            end => {
                assert_eq!(end, GETP_END_CANCELLED);
                cancelled.fetch_add(1, SeqCst)
            }
        };
    };
    thread::scope(|scope| {
        let (model, batch, submitting, take) = (&model, &batch, &submitting, &take);
        for first in 0..2 {
            scope.spawn(move || {
                for i in 0..20 {
                    let id = batch.submit((first + i) % 3);
                    model.tokens();
                    if i % 5 == 2 {
                        // SAFETY: an open batch.
                        assert_eq!(unsafe { getp_batch_cancel(batch.0, id) }, GETP_OK);
                    }
                }
                // SAFETY: an open batch.
                assert!(first == 0 || unsafe { getp_batch_cancel_all(batch.0) } == GETP_OK);
                submitting.fetch_sub(1, SeqCst);
            });
            scope.spawn(move || {
                while submitting.load(SeqCst) > 0 || batch.unfinished() > 0 {
                    batch.next(0.001, take);
                }
            });
        }
    });
    assert_eq!(whole.into_inner() + cancelled.into_inner(), 40);
    batch.submit(0);
    batch.close();
}

/// Counts the last events that a batch hands over.
unsafe extern "C" fn count(context: *mut c_void, event: *const CEvent) {
    // SAFETY: what `threads_compete_for_a_model` passes, and an event.
    let (ended, event) = unsafe { (&*context.cast::<AtomicUsize>(), &*event) };
    ended.fetch_add(usize::from(event.end != GETP_END_NONE), SeqCst);
}

#[test]
fn threads_compete_for_a_model() {
    let model = File::open("threads_compete_for_a_model");
    let (opened, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        let (model, opened, ended) = (&model, &opened, &ended);
        for has_callback in [false, true] {
            scope.spawn(move || {
                for round in 0..20 {
                    let options = BatchOptions {
                        size: size_of::<BatchOptions>(),
                        on_event: if has_callback { Some(count) } else { None },
                        context: std::ptr::from_ref(ended).cast_mut().cast(),
                        tokenizer: null(),
                    };
                    let Some(batch) = model.open_batch(Some(options)) else {
                        continue;
                    };
                    opened.fetch_add(1, SeqCst);
                    batch.submit(round % 3);
                    // Some are closed before their request has an event.
                    while round % 2 == 0 && batch.unfinished() > 0 {
                        match has_callback {
                            true => thread::yield_now(),
                            false => batch.next(-1.0, |_| ()),
                        }
                    }
                    batch.close();
                }
            });
        }
    });
    assert!(opened.load(SeqCst) > 0 && ended.load(SeqCst) <= opened.load(SeqCst));
    // Waits for the last call of `count`.
    model.open_batch(None).unwrap().close();
}
