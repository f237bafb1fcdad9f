//! Concurrent calls from several threads: with a model each, with one model, and with rows that another call is writing
//! to.

mod fake;

use fake::{Control, PROMPTS, Program, expected, finish, inference, quiet};
use getp::abi::lifecycle::{self, Backends};
use getp::abi::types::{self, Transformer, TransformerWeights};
use getp::backend::cpu;
use getp::checkpoint::{Checkpoint, TensorLayout, config_from_bytes};
use getp::options::{Options, Precision};
use getp::random::request_seed;
use std::ffi::c_int;
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
        #[cfg(feature = "mpi")]
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
