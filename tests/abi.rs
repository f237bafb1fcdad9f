//! The three functions and the handles, on a replica that needs no model: lifecycle, bad inputs, well-formed rows,
//! random streams, printing, recording.

mod fake;

use fake::{Control, Program, VOCAB, expected};
use getp::abi::lifecycle;
use getp::error::Result;
use getp::logits::LogitsReader;
use std::ffi::{CStr, CString, c_int};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Once};

/// Keeps answers off the test's stdout, unless a test's own process is to print them.
fn quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var_os("GETP_PRINT").is_none() {
            // SAFETY: nothing here reads the environment but through Rust's own functions, which lock it.
            unsafe { std::env::set_var("GETP_PRINT", "0") };
        }
    });
}

fn warm_up(program: &mut Program, control: &Arc<Control>) -> Result<()> {
    quiet();
    // SAFETY: the program's own structs.
    unsafe {
        lifecycle::warm_up(
            &raw mut *program.transformer,
            &raw mut *program.tokenizer,
            &control.open(),
        )
    }
}

fn inference(program: &mut Program, control: &Arc<Control>) -> Result<i64> {
    quiet();
    let Program {
        transformer,
        tokenizer,
        sampler,
        requests,
        ..
    } = program;
    // SAFETY: the program's own structs.
    unsafe {
        lifecycle::inference(
            &raw mut **transformer,
            &raw mut **tokenizer,
            sampler,
            requests,
            &control.open(),
        )
    }
}

fn finish(program: &mut Program) -> Result<()> {
    // SAFETY: the program's own struct.
    unsafe { lifecycle::finish(&raw mut *program.transformer) }
}

/// The row of a request without an answer.
const EMPTY: [c_int; 0] = [];

const PROMPTS: [&str; 12] = [
    "hello",
    "ab",
    "x",
    "abab",
    "a long prompt with ab in it",
    "0123456789",
    "y",
    "z",
    "aba",
    "bab",
    "q",
    "the last",
];

#[test]
fn every_request_gets_its_own_answer() {
    for (temperature, topp) in [(0.0, 0.9), (1.0, 0.9), (0.7, 1.0)] {
        let mut program = Program::new(&PROMPTS, 40);
        (program.sampler.temperature, program.sampler.topp) = (temperature, topp);
        let before = program.sampler;
        let control = Arc::default();
        warm_up(&mut program, &control).unwrap();
        let tokens = inference(&mut program, &control).unwrap();
        finish(&mut program).unwrap();

        let answers: Vec<_> = (0..)
            .zip(PROMPTS)
            .map(|(i, prompt)| expected(prompt, 40, &before, i))
            .collect();
        let rows: Vec<_> = answers.iter().map(|(row, _)| row.clone()).collect();
        assert_eq!(program.rows(), rows);
        assert_eq!(tokens as usize, rows.iter().map(Vec::len).sum::<usize>());
        assert_eq!(
            program.sampler.rng_state, answers[0].1,
            "request 0 draws from the sampler's own stream"
        );
        assert_eq!(temperature == 0.0, program.sampler.rng_state == before.rng_state);
    }
}

#[test]
fn warming_up_twice_is_once_and_finishing_twice_too() {
    let mut program = Program::new(&["ab"], 8);
    let before = program.bytes();
    let control = Arc::<Control>::default();
    finish(&mut program).unwrap();
    for round in 1..=2 {
        warm_up(&mut program, &control).unwrap();
        assert_eq!(program.transformer.weights.out.addr(), 0x1000);
        assert_eq!(program.transformer.state.mask.addr(), 0x2000);
        warm_up(&mut program, &control).unwrap();
        assert_eq!(control.opened.load(SeqCst), round);
        assert!(inference(&mut program, &control).unwrap() > 0);
        finish(&mut program).unwrap();
        finish(&mut program).unwrap();
        assert_eq!(control.dropped.load(SeqCst), round);
        assert_eq!(program.bytes(), before);
    }
}

#[test]
fn inference_first_warms_up() {
    let mut program = Program::new(&["ab"], 8);
    let control = Arc::<Control>::default();
    assert_eq!(inference(&mut program, &control).unwrap(), 8);
    assert_eq!(inference(&mut program, &control).unwrap(), 8);
    assert_eq!(control.opened.load(SeqCst), 1);
    finish(&mut program).unwrap();
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
            let rows: Vec<_> = (0..)
                .zip(PROMPTS)
                .map(|(i, prompt)| expected(prompt, 30, &before, i).0)
                .collect();
            assert_eq!(program.rows(), rows);
        }
        finish(&mut program).unwrap();
    };
    std::thread::scope(|scope| {
        scope.spawn(|| run(1));
        scope.spawn(|| run(2));
    });
    assert_eq!((control.opened.load(SeqCst), control.dropped.load(SeqCst)), (2, 2));
}

#[test]
fn another_transformer_at_the_address_is_not_mistaken_for_the_first() {
    let control = Arc::<Control>::default();
    let mut program = Program::new(&["ab"], 8);
    let other = *program.transformer;
    warm_up(&mut program, &control).unwrap();
    *program.transformer = other;
    assert_eq!(inference(&mut program, &control).unwrap(), 8);
    assert_eq!((control.opened.load(SeqCst), control.dropped.load(SeqCst)), (2, 1));
    *program.transformer = other;
    program.transformer.fd = 99;
    finish(&mut program).unwrap();
    assert_eq!(program.transformer.fd, 99, "what the program put there stays");
    assert_eq!(control.dropped.load(SeqCst), 2);
}

#[test]
fn requests_that_cannot_be_answered_have_empty_rows() {
    let long = "x".repeat(9);
    let mut program = Program::new(&["", "ab", &long, "12345678"], 8);
    let control = Arc::default();
    let tokens = inference(&mut program, &control).unwrap();
    finish(&mut program).unwrap();
    let rows = program.rows();
    assert_eq!(rows.iter().map(Vec::len).collect::<Vec<_>>(), [0, 8, 0, 1]);
    assert_eq!(tokens, 9);
}

#[test]
fn steps_beyond_the_kv_cache_are_refused_by_request() {
    let mut program = Program::new(&["ab", "x"], 64 * 16 + 1);
    assert_eq!(inference(&mut program, &Arc::default()).unwrap(), 0);
    finish(&mut program).unwrap();
    assert_eq!(program.rows(), [EMPTY; 2]);
}

#[test]
fn steps_beyond_seq_len_are_not() {
    let mut program = Program::new(&["ab"], 100);
    let before = program.sampler;
    assert_eq!(inference(&mut program, &Arc::default()).unwrap(), 100);
    finish(&mut program).unwrap();
    assert_eq!(program.rows(), [expected("ab", 100, &before, 0).0]);
}

#[test]
fn prompts_are_cut_at_the_initial_context() {
    let prompt = "x".repeat(60);
    let mut program = Program::new(&[&prompt], 64);
    let before = program.sampler;
    inference(&mut program, &Arc::default()).unwrap();
    finish(&mut program).unwrap();
    assert_eq!(program.rows(), [expected(&prompt[..40], 64, &before, 0).0]);
}

#[test]
fn a_step_that_fails_keeps_what_is_finished() {
    let mut program = Program::new(&["12345678", "ab", "x"], 8);
    let control = Arc::new(Control {
        fail_at: Some(4),
        ..Control::default()
    });
    assert_eq!(inference(&mut program, &control).unwrap(), 1);
    assert_eq!(program.rows().iter().map(Vec::len).collect::<Vec<_>>(), [1, 0, 0]);
    assert_eq!(
        inference(&mut program, &control).unwrap(),
        17,
        "the next inference is not hurt"
    );
    finish(&mut program).unwrap();

    let mut program = Program::new(&["ab"], 8);
    let error = inference(
        &mut program,
        &Arc::new(Control {
            fail_at: Some(4),
            ..Control::default()
        }),
    )
    .unwrap_err();
    assert_eq!(error.to_string(), "the fake fails");
    assert_eq!(program.rows(), [EMPTY]);
    finish(&mut program).unwrap();
}

#[test]
fn a_panic_leaves_rows_well_formed_and_the_engine_usable() {
    let mut program = Program::new(&["12345678", "ab"], 8);
    let control = Arc::new(Control {
        panic_at: Some(4),
        ..Control::default()
    });
    let tokens = getp::abi::guard::work(-1, || inference(&mut program, &control));
    assert_eq!(tokens, -1);
    assert!(last_error().unwrap().contains("the fake panics"));
    assert_eq!(program.rows().iter().map(Vec::len).collect::<Vec<_>>(), [1, 0]);
    assert_eq!(inference(&mut program, &control).unwrap(), 9);
    finish(&mut program).unwrap();
}

#[test]
fn a_model_that_cannot_be_opened_leaves_the_struct_alone() {
    let mut program = Program::new(&["ab"], 8);
    let before = program.bytes();
    let control = Arc::new(Control {
        refuse: true,
        ..Control::default()
    });
    assert!(warm_up(&mut program, &control).is_err());
    assert!(inference(&mut program, &control).is_err());
    assert_eq!(program.rows(), [EMPTY], "rows are well formed even so");
    finish(&mut program).unwrap();
    assert_eq!(program.bytes(), before);
}

#[test]
fn no_requests_are_no_tokens() {
    let mut program = Program::new(&[], 8);
    assert_eq!(inference(&mut program, &Arc::default()).unwrap(), 0);
    finish(&mut program).unwrap();
}

type Harm = fn(&mut Program);

#[test]
fn garbage_in_the_structs_is_refused() {
    let harms: [(Harm, &str); 20] = [
        (|p| p.transformer.config.vocab_size = -1, "vocab_size"),
        (|p| p.transformer.config.n_layers = 0, "n_layers"),
        (|p| p.transformer.config.hidden_dim = i32::MAX, "hidden_dim"),
        (|p| p.transformer.config.rope_theta = f32::NAN, "rope_theta"),
        (|p| p.transformer.weights.w_qkv = null_mut(), "w_qkv"),
        (
            |p| (p.transformer.data, p.transformer.file_size) = (0x8 as *mut f32, 64),
            "token_embedding_table",
        ),
        (|p| p.tokenizer.vocab = null_mut(), "Tokenizer.vocab"),
        (|p| p.tokenizer.lengths = null_mut(), "Tokenizer.lengths"),
        (
            |p| p.tokenizer.scores = p.tokenizer.scores.wrapping_byte_add(1),
            "not aligned",
        ),
        (|p| p.tokenizer.vocab_size = -5, "vocab_size"),
        (|p| p.tokenizer.vocab_size = i32::MAX, "vocab_size"),
        (|p| p.tokenizer.max_token_length = -1, "max_token_length"),
        (|p| p.sampler.vocab_size = VOCAB as c_int + 1, "Sampler"),
        (|p| p.sampler.vocab_size = -1, "Sampler"),
        (|p| p.requests.num_reqs = -1, "num_reqs"),
        (|p| p.requests.max_seq_len = -1, "max_seq_len"),
        (|p| p.requests.max_token_len = i32::MIN, "max_token_len"),
        (|p| p.requests.str_reqs = null_mut(), "str_reqs"),
        (|p| p.requests.tok_gens = null_mut(), "tok_gens"),
        // SAFETY: the vocabulary has that entry.
        (|p| unsafe { *p.tokenizer.vocab.add(3) = null_mut() }, "token 3"),
    ];
    for (harm, word) in harms {
        let mut program = Program::new(&["ab"], 8);
        harm(&mut program);
        let message = inference(&mut program, &Arc::default()).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
        finish(&mut program).unwrap();
    }
}

#[test]
fn a_vocabulary_larger_than_the_model_s_is_refused() {
    let mut program = Program::new(&["ab"], 8);
    program.transformer.config.vocab_size = 256;
    program.sampler.vocab_size = 256;
    let message = inference(&mut program, &Arc::default()).unwrap_err().to_string();
    assert!(message.contains("257 tokens where the model has 256"), "{message}");
    finish(&mut program).unwrap();
}

#[test]
fn odd_temperatures_are_answered() {
    for (temperature, topp) in [(f32::NAN, 0.9), (f32::INFINITY, f32::NAN), (-1.0, -3.0), (1e-40, 2.0)] {
        let mut program = Program::new(&["ab", "x"], 8);
        (program.sampler.temperature, program.sampler.topp) = (temperature, topp);
        assert_eq!(inference(&mut program, &Arc::default()).unwrap(), 16);
        finish(&mut program).unwrap();
        assert!(
            program
                .rows()
                .iter()
                .flatten()
                .all(|&token| (0..VOCAB as c_int).contains(&token))
        );
    }
}

#[test]
fn a_changed_tokenizer_is_read_anew() {
    let mut program = Program::new(&["ab"], 8);
    let before = program.sampler;
    let control = Arc::default();
    inference(&mut program, &control).unwrap();
    assert_eq!(program.rows(), [expected("ab", 8, &before, 0).0]);
    program.tokenizer.max_token_length = 1; // no merges any more
    assert_eq!(inference(&mut program, &control).unwrap(), 7);
    finish(&mut program).unwrap();
}

// The exports, on bad pointers.

fn last_error() -> Option<String> {
    let text = getp::abi::library::getp_last_error();
    // SAFETY: not NULL, it is this thread's string, and nothing replaces it meanwhile.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned())
}

#[test]
fn null_is_refused_everywhere() {
    use getp::abi::{driver, library, model, options, requests, sampler, tokenizer};
    quiet();
    let mut program = Program::new(&["ab"], 8);
    let (t, k) = (&raw mut *program.transformer, &raw mut *program.tokenizer);
    let (s, r) = (&raw mut program.sampler, &raw mut program.requests);
    let said = |what: &str| {
        let error = last_error().unwrap();
        assert!(error.starts_with(&format!("{what} is NULL")), "{error}");
    };
    let mut length = 7;
    // SAFETY: NULL, or the program's own structs.
    unsafe {
        driver::warm_up(null_mut(), k);
        said("transformer");
        driver::warm_up(t, null_mut());
        said("tokenizer");
        assert_eq!(driver::inference(null_mut(), k, s, r), -1);
        said("transformer");
        assert_eq!(driver::inference(t, null_mut(), s, r), -1);
        said("tokenizer");
        assert_eq!(driver::inference(t, k, null_mut(), r), -1);
        said("sampler");
        assert_eq!(driver::inference(t, k, s, null_mut()), -1);
        said("requests");
        driver::finish(null_mut(), null_mut());
        said("transformer");
        driver::finish(t, null_mut());
        assert_eq!(last_error(), None);
        assert_eq!(library::getp_stats(t, null_mut()), -1);
        said("stats");
        assert!(model::getp_model_open(null(), null()).is_null());
        said("path");
        assert!(model::getp_model_transformer(null_mut()).is_null());
        said("model");
        assert!(sampler::getp_sampler_open(null(), 0.0, 0.0, 0).is_null());
        said("model");
        assert!(sampler::getp_sampler_get(null_mut()).is_null());
        said("sampler");
        assert!(tokenizer::getp_tokenizer_open(null()).is_null());
        said("path");
        assert!(tokenizer::getp_tokenizer_get(null_mut()).is_null());
        said("tokenizer");
        assert!(tokenizer::getp_tokenizer_piece(null(), 0, &mut length).is_null());
        said("tokenizer");
        assert_eq!(length, 0);
        assert!(requests::getp_requests_open(c"/dev/null".as_ptr(), 8, null()).is_null());
        said("tokenizer");
        assert!(requests::getp_requests_get(null_mut()).is_null());
        said("requests");
        assert_eq!(requests::getp_requests_count(null()), -1);
        assert!(requests::getp_requests_tokens(null(), 0, &mut length).is_null());
        said("requests");
        assert!(requests::getp_requests_prompt(null(), 0, null_mut()).is_null());
        said("length");
        options::getp_options_init(null_mut());
        said("options");
        // To close nothing is no failure, and it keeps the last one.
        model::getp_model_close(null_mut());
        sampler::getp_sampler_close(null_mut());
        tokenizer::getp_tokenizer_close(null_mut());
        requests::getp_requests_close(null_mut());
        said("options");
    }
    let row = program.rows();
    assert_eq!(row, [EMPTY], "rows are ended before anything else is looked at");
}

#[test]
fn options_are_checked() {
    use getp::abi::options::{GETP_FAST, GETP_OFF, GETP_ON, Options, getp_options_init};
    let mut options = Options {
        size: 3,
        ..Options::default()
    };
    // SAFETY: its own struct.
    unsafe { getp_options_init(&mut options) };
    assert_eq!(options.size, 48);
    // SAFETY: `logits` is NULL in all of them, or a C string.
    let choices = |options: Options| unsafe { options.choices() };
    let default = choices(options).unwrap();
    assert!(default.threads.is_none() && default.print.is_none() && default.logits.is_none());
    let chosen = Options {
        precision: GETP_FAST,
        max_batch: 5,
        print: GETP_OFF,
        profile: GETP_ON,
        logits: c"/tmp/x".as_ptr(),
        ..options
    };
    let chosen = choices(chosen).unwrap();
    assert_eq!(
        (chosen.max_batch, chosen.print, chosen.profile),
        (Some(5), Some(false), Some(true))
    );
    assert_eq!(chosen.logits.as_deref(), Some(Path::new("/tmp/x")));
    for (wrong, word) in [
        (Options { size: 0, ..options }, "getp_options.size=0"),
        (Options { threads: -1, ..options }, "getp_options.threads=-1"),
        (
            Options {
                precision: 9,
                ..options
            },
            "GETP_EXACT or GETP_FAST",
        ),
        (Options { print: -1, ..options }, "GETP_ON or GETP_OFF"),
    ] {
        let message = choices(wrong).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
}

// Handles.

fn vocabulary_file(dir: &Path) -> PathBuf {
    let mut bytes = 2_i32.to_le_bytes().to_vec();
    let mut add = |piece: &[u8], score: f32| {
        bytes.extend(score.to_le_bytes());
        bytes.extend((piece.len() as i32).to_le_bytes());
        bytes.extend(piece);
    };
    add(b"<0x00>", 0.0);
    (1..=255).for_each(|byte| add(&[byte], 0.0));
    add(b"ab", 0.0);
    let path = dir.join("tokenizer.bin");
    std::fs::write(&path, bytes).unwrap();
    path
}

fn c_path(path: &Path) -> CString {
    CString::new(path.to_str().unwrap()).unwrap()
}

#[test]
fn a_tokenizer_handle_is_the_program_s_struct() {
    use getp::abi::tokenizer::*;
    let dir = tempfile::tempdir().unwrap();
    let path = c_path(&vocabulary_file(dir.path()));
    // SAFETY: handles of this test's own; arrays are as long as the struct says.
    unsafe {
        let handle = getp_tokenizer_open(path.as_ptr());
        let tokenizer = &*getp_tokenizer_get(handle);
        assert_eq!((tokenizer.vocab_size, tokenizer.max_token_length), (257, 2));
        assert_eq!(CStr::from_ptr(*tokenizer.vocab), c"<0x00>");
        assert_eq!(CStr::from_ptr(*tokenizer.vocab.add(256)), c"ab");
        assert_eq!(*tokenizer.lengths.add(256), 2);
        assert_eq!(tokenizer.byte_tokens[65], 65);
        assert_eq!(tokenizer.byte_pieces[130..132], [65, 0]);
        let sorted = std::slice::from_raw_parts(tokenizer.sorted_vocab, 257);
        let at = sorted.iter().position(|entry| entry.id == 256).unwrap();
        assert_eq!((sorted[at - 1].id, sorted[at].len), (i32::from(b'a'), 2));
        let piece = |id| {
            let mut length = 9;
            let bytes = getp_tokenizer_piece(handle, id, &mut length);
            std::slice::from_raw_parts(bytes.cast::<u8>(), length).to_vec()
        };
        assert_eq!((piece(256), piece(0)), (b"ab".to_vec(), vec![0]));
        assert_eq!((piece(257), piece(-1)), (vec![], vec![]));
        getp_tokenizer_close(handle);
    }
}

#[test]
fn a_request_handle_reads_its_file_and_runs() {
    use getp::abi::{requests::*, tokenizer::*};
    let dir = tempfile::tempdir().unwrap();
    let vocabulary = c_path(&vocabulary_file(dir.path()));
    let file = dir.path().join("requests");
    let open = |text: &str, steps| {
        std::fs::write(&file, text).unwrap();
        // SAFETY: paths and handles of this test's own.
        unsafe {
            let tokenizer = getp_tokenizer_open(vocabulary.as_ptr());
            let handle = getp_requests_open(c_path(&file).as_ptr(), steps, tokenizer);
            getp_tokenizer_close(tokenizer);
            handle
        }
    };
    for (text, steps, word) in [
        ("", 8, "first line"),
        ("two\na\nb\n", 8, "first line"),
        ("3\na\nb\n", 8, "has 2 prompts"),
        ("1\na\n", 0, "steps"),
        ("1\na\n", -4, "steps"),
    ] {
        assert!(open(text, steps).is_null());
        let error = last_error().unwrap();
        assert!(error.contains(word), "{error}");
    }
    let handle = open("3\nab\n\na prompt far too long for its steps", 8);
    let mut program = Program::new(&[], 8);
    let mut length = 0;
    // SAFETY: as above; the structs are the test's own.
    unsafe {
        assert_eq!(getp_requests_count(handle), 3);
        let prompt = getp_requests_prompt(handle, 2, &mut length);
        assert_eq!(
            std::slice::from_raw_parts(prompt.cast::<u8>(), length),
            b"a prompt far too long for its steps"
        );
        getp_requests_tokens(handle, 0, &mut length);
        assert_eq!(length, 0);
        program.requests = *getp_requests_get(handle);
        assert_eq!(inference(&mut program, &Arc::default()).unwrap(), 8);
        let tokens = getp_requests_tokens(handle, 0, &mut length);
        assert_eq!(
            std::slice::from_raw_parts(tokens, length),
            expected("ab", 8, &program.sampler, 0).0
        );
        getp_requests_tokens(handle, 2, &mut length);
        assert_eq!(length, 0);
        for index in [-1, 3] {
            assert!(getp_requests_tokens(handle, index, &mut length).is_null());
            assert!(last_error().unwrap().contains("out of range"));
        }
        getp_requests_close(handle);
    }
    finish(&mut program).unwrap();
}

#[test]
fn a_model_handle_warms_up_from_its_file_and_finishes_when_closed() {
    use getp::abi::{library::*, model::*, sampler::*};
    use getp::checkpoint::{TensorLayout, config_from_bytes, config_to_bytes};
    quiet();
    let mut program = Program::new(&["ab"], 8);
    let config = config_from_bytes(&program.transformer.config.to_bytes()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.bin");
    let mut bytes = config_to_bytes(&config).to_vec();
    bytes.resize(TensorLayout::new(config).unwrap().file_bytes(), 0);
    std::fs::write(&path, bytes).unwrap();
    let control = Arc::<Control>::default();
    // SAFETY: paths, handles and structs of this test's own.
    unsafe {
        assert!(getp_model_open(c"/does/not/exist".as_ptr(), null()).is_null());
        assert!(last_error().unwrap().starts_with("/does/not/exist: "));
        let model = getp_model_open(c_path(&path).as_ptr(), null());
        let transformer = getp_model_transformer(model);
        assert_eq!((*transformer).config, program.transformer.config);
        let sampler = getp_sampler_open(model, 0.0, 0.9, 5);
        assert_eq!((*getp_sampler_get(sampler)).vocab_size, VOCAB as c_int);
        let mut stats = Stats::default();
        assert_eq!(getp_stats(transformer, &mut stats), -1);
        let open = control.open();
        let tokenizer = &raw mut *program.tokenizer;
        lifecycle::warm_up(transformer, tokenizer, &open).unwrap();
        let requests = &raw mut program.requests;
        let tokens = lifecycle::inference(transformer, tokenizer, getp_sampler_get(sampler), requests, &open);
        assert_eq!(tokens.unwrap(), 8);
        assert_eq!(getp_stats(transformer, &mut stats), 0);
        assert_eq!(
            (stats.tokens, stats.prompt_tokens, stats.steps, stats.kv_bytes),
            (8, 1, 8, 1 << 20)
        );
        getp_sampler_close(sampler);
        getp_model_close(model);
    }
    assert_eq!(control.dropped.load(SeqCst), 1);
}

// What depends on the environment or is seen on stdout and stderr runs in a process of its own.

/// Set in the processes of [`child`]; the tests they run do nothing without it.
const CHILD: &str = "TEST_IN_A_CHILD";

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Runs the test `name` of this program alone, with these variables.
fn child(name: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    command
        .env(CHILD, "1")
        .env_remove("GETP_PRINT")
        .envs(variables.iter().copied());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    output
}

/// Lines of ours on stderr.
fn lines(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stderr);
    text.lines()
        .filter_map(|line| Some(line.strip_prefix("getp: ")?.to_owned()))
        .collect()
}

#[test]
fn child_answers() {
    if !is_child() {
        return;
    }
    let mut program = Program::new(&PROMPTS, 40);
    let before = program.sampler;
    let control = Arc::default();
    warm_up(&mut program, &control).unwrap();
    inference(&mut program, &control).unwrap();
    finish(&mut program).unwrap();
    let rows: Vec<_> = (0..)
        .zip(PROMPTS)
        .map(|(i, prompt)| expected(prompt, 40, &before, i).0)
        .collect();
    assert_eq!(program.rows(), rows);
}

#[test]
fn child_refused() {
    if !is_child() {
        return;
    }
    let mut program = Program::new(&[""; 15], 8);
    assert_eq!(inference(&mut program, &Arc::default()).unwrap(), 0);
}

#[test]
fn child_fails_to_warm_up() {
    if !is_child() {
        return;
    }
    let mut program = Program::new(&["ab"], 8);
    let error = warm_up(&mut program, &Arc::default()).unwrap_err();
    getp::abi::guard::record(&error);
}

#[test]
fn answers_are_printed_in_order_as_they_are() {
    let output = child("child_answers", &[("GETP_PRINT", "1")]);
    let program = Program::new(&PROMPTS, 40);
    let mut text = Vec::new();
    for (i, prompt) in PROMPTS.into_iter().enumerate() {
        text.extend(format!("[{i}] ").into_bytes());
        let tokens = expected(prompt, 40, &program.sampler, i).0;
        let piece = |token: c_int| match token {
            0..=255 => vec![token as u8],
            256 => b"ab".to_vec(),
            _ => vec![], // not in the vocabulary
        };
        text.extend(tokens.into_iter().flat_map(piece));
        text.push(b'\n');
    }
    assert!(output.stdout.windows(text.len()).any(|window| window == text));
}

#[test]
fn logits_of_every_position_are_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("logits");
    child(
        "child_answers",
        &[("GETP_PRINT", "0"), ("GETP_LOGITS", path.to_str().unwrap())],
    );
    let mut reader = LogitsReader::open(&path).unwrap();
    let records = reader.records().to_vec();
    assert_eq!((reader.vocab(), records.len()), (VOCAB, PROMPTS.len() * 40));
    let keys: std::collections::HashSet<_> = records.iter().map(|(key, _)| *key).collect();
    assert_eq!(keys.len(), records.len());
    let mut row = Vec::new();
    for (at, (key, token)) in records.into_iter().enumerate() {
        reader.read(at, &mut row).unwrap();
        assert_eq!(row, fake::logits(token, key.position));
    }
}

#[test]
fn logits_that_cannot_be_written_cost_one_line() {
    for path in ["/dev/full", "/does/not/exist"] {
        let output = child("child_answers", &[("GETP_PRINT", "0"), ("GETP_LOGITS", path)]);
        let said = lines(&output);
        assert_eq!(
            said.iter()
                .filter(|line| line.contains("logits are not recorded"))
                .count(),
            1,
            "{said:?}"
        );
    }
}

#[test]
fn many_bad_requests_do_not_bury_the_rest() {
    let said = lines(&child("child_refused", &[]));
    let named: Vec<_> = said.iter().filter(|line| line.starts_with("request ")).collect();
    assert_eq!(named.len(), 10, "{said:?}");
    assert!(named[9].starts_with("request 9: it is empty"), "{said:?}");
    assert!(said.contains(&"5 more requests get no answer".into()), "{said:?}");
}

#[test]
fn bad_options_are_named() {
    let said = lines(&child("child_fails_to_warm_up", &[("GETP_PRECISION", "half")]));
    assert!(
        said.contains(&"GETP_PRECISION=half is not known; use exact or fast".into()),
        "{said:?}"
    );
    let said = lines(&child("child_answers", &[("GETP_PRINT", "0"), ("GETP_BATCH", "3")]));
    assert!(said[0].starts_with("GETP_BATCH: not known and not used;"), "{said:?}");
}

#[test]
fn the_summary_and_the_profile_are_printed() {
    let said = lines(&child("child_answers", &[("GETP_PRINT", "0"), ("GETP_PROFILE", "1")]));
    assert_eq!(
        said[..3],
        [
            "w_qkv                  BF16               2.00 MiB",
            "w_mlp1                 BF16+F32           1.50 MiB  layer 1 is no MXFP4",
            "fake; weights 3.5 MiB from 5.7 MiB in 0.5 s (0.0 GB/s); KV cache 1.0 MiB, 64 blocks full, 64 windowed",
        ]
    );
    assert!(said.iter().any(|line| line.starts_with("stage ")), "{said:?}");
}

// The shared object.

fn library() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.with_file_name("libgetp.so")
}

#[test]
fn nothing_else_is_exported() {
    let output = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(library())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let mut names: Vec<_> = text.lines().filter_map(|line| line.split_whitespace().last()).collect();
    names.retain(|name| !name.starts_with("getp_"));
    names.sort();
    let expected = [
        "_Z6finishP11TransformerP9Tokenizer",
        "_Z7warm_upP11TransformerP9Tokenizer",
        "_Z9inferenceP11TransformerP9TokenizerP7SamplerP8Requests",
        "finish",
        "inference",
        "warm_up",
    ];
    assert_eq!(names, expected);
}

#[test]
fn the_c_program_says_what_went_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("batch");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let so_dir = library().parent().unwrap().to_owned();
    let built = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-o"])
        .args([&program, &root.join("c_examples/batch.c")])
        .arg(format!("-I{}", root.join("include").display()))
        .arg(format!("-L{}", so_dir.display()))
        .arg("-lgetp")
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let vocabulary = vocabulary_file(dir.path());
    let requests = dir.path().join("requests");
    std::fs::write(&requests, "1\nab\n").unwrap();
    let run = |model: &str| {
        Command::new(&program)
            .env("LD_LIBRARY_PATH", &so_dir)
            .args([Path::new(model), &vocabulary, &requests, Path::new("8")])
            .output()
            .unwrap()
    };
    let output = run("/does/not/exist.bin");
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        text.contains("getp: /does/not/exist.bin: ") && text.contains("batch: /does/not/exist.bin: "),
        "{text}"
    );
}
