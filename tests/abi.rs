//! warm_up, inference and finish, on a replica without a model: lifecycle, answers and random streams, well-formed
//! rows, bad inputs.

mod fake;

use fake::{Control, PROMPTS, Program, VOCAB, expected, finish, inference, last_error, quiet, warm_up};
use getp::abi::types::Config;
use getp::checkpoint::{Checkpoint, Tensor, TensorId, config_from_bytes};
use getp::config::ModelConfig;
use getp::engine::Engine;
use getp::error::{Error, Result};
use getp::options::{Options, Print};
use getp::request::Sampling;
use getp::requests::{Requests, Steps};
use getp::tokenizer::Tokenizer;
use std::ffi::c_int;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// The row of a request without an answer.
const EMPTY: [c_int; 0] = [];

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
fn a_copy_of_a_warm_transformer_is_refused() {
    // Other tests have transformers of their own, at the same time.
    let control = Arc::new(Control {
        weights_at: 0xc0b1,
        ..Control::default()
    });
    let mut program = Program::new(&["ab"], 8);
    let before = *program.transformer;
    warm_up(&mut program, &control).unwrap();
    let copy = Box::new(*program.transformer);
    let at = format!("{:#x}", (&raw const *program.transformer).addr());
    let refused = |program: &mut Program, word: &str| {
        for error in [
            warm_up(program, &control).unwrap_err(),
            inference(program, &control).unwrap_err(),
            finish(program).unwrap_err(),
        ] {
            assert!(error.to_string().contains(word), "{error}");
        }
        assert_eq!(program.rows(), [EMPTY]);
    };

    let original = std::mem::replace(&mut program.transformer, copy);
    refused(&mut program, &format!("a copy of the one warmed up at {at}"));
    let copy = std::mem::replace(&mut program.transformer, original);
    assert_eq!(inference(&mut program, &control).unwrap(), 8);
    finish(&mut program).unwrap();
    assert_eq!(*program.transformer, before);

    let original = std::mem::replace(&mut program.transformer, copy);
    refused(&mut program, "a copy of one that has been finished");
    program.transformer = original;
    assert_eq!(inference(&mut program, &control).unwrap(), 8);
    finish(&mut program).unwrap();
    assert_eq!(control.opened.load(SeqCst), 2);
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

/// A checkpoint that is asked for its dimensions alone.
struct Dimensions(ModelConfig);

impl Checkpoint for Dimensions {
    fn config(&self) -> &ModelConfig {
        &self.0
    }

    fn tensor(&self, id: TensorId) -> Result<Tensor<'_>> {
        Err(Error::Internal(format!("nobody reads {id:?}")))
    }
}

/// Answers to prompts of 40, 60, 61 and 2 tokens, from a model whose checkpoint may say that it has 60 positions.
fn rows_within(context_length: Option<usize>, strict: bool) -> (Program, Vec<Vec<c_int>>) {
    let prompts = [40, 60, 61, 2].map(|tokens| "x".repeat(tokens));
    let program = Program::new(&prompts.each_ref().map(String::as_str), 64);
    let options = Options {
        strict,
        ..Options::default()
    };
    let rows = rows_with(&program, context_length, options);
    (program, rows)
}

/// Answers with these options.
fn rows_with(program: &Program, context_length: Option<usize>, options: Options) -> Vec<Vec<c_int>> {
    quiet();
    let checkpoint = Dimensions(ModelConfig {
        context_length,
        ..config_from_bytes(&program.transformer.config.to_bytes()).unwrap()
    });
    let options = Options {
        print: Print::Nothing,
        ..options
    };
    let vocabulary = tempfile::tempdir().unwrap();
    let tokenizer = Tokenizer::read(fake::vocabulary_file(vocabulary.path())).unwrap();
    let mut sampling = Sampling {
        temperature: 0.0,
        topp: 0.9,
        rng_state: 1,
    };
    Arc::<Control>::default().with_backends(|backends| {
        let mut engine = Engine::warm_up(&checkpoint, options, backends.open).unwrap();
        let r = &program.requests;
        // SAFETY: the program's own buffers, used by nobody else during the call.
        let view = unsafe {
            Requests::from_raw(
                r.num_reqs,
                r.max_token_len,
                r.max_seq_len,
                r.str_reqs.cast(),
                r.tok_gens,
            )
        };
        let reopen = |_: &Options| Err(Error::State("there is no other".into()));
        engine
            .inference(&tokenizer, &mut sampling, &mut view.unwrap(), &reopen)
            .unwrap();
    });
    program.rows()
}

/// As the program counts in its two versions: `while (pos < steps)`, `while (pos + 1 < steps)`.
#[test]
fn steps_are_counted_as_the_option_says() {
    for steps in 1..=24 {
        let most = 26.min(4 * (steps + 1)); // bytes that a prompt has room for
        let prompts: Vec<_> = (1..=most).map(|tokens| "x".repeat(tokens)).collect();
        let prompts: Vec<_> = prompts.iter().map(String::as_str).collect();
        for (rule, positions) in [(Steps::Positions, steps), (Steps::Tokens, steps - 1)] {
            let program = Program::new(&prompts, steps);
            let options = Options {
                steps: rule,
                ..Options::default()
            };
            let rows = rows_with(&program, None, options);
            for (row, prompt) in rows.iter().zip(&prompts) {
                let tokens = (positions + 1).saturating_sub(prompt.len());
                assert_eq!(row.len(), tokens, "{} tokens in {steps} steps, {rule:?}", prompt.len());
                if tokens > 0 {
                    assert_eq!(*row, expected(prompt, positions, &program.sampler, 0).0);
                }
            }
        }
    }
}

/// The KV cache has 1,024 positions, and an answer's last token needs none.
#[test]
fn steps_that_count_tokens_need_one_position_less() {
    for (rule, steps, tokens) in [
        (Steps::Positions, 1024, 1024),
        (Steps::Positions, 1025, 0),
        (Steps::Tokens, 1025, 1024),
        (Steps::Tokens, 1026, 0),
    ] {
        let program = Program::new(&["x"], steps);
        let options = Options {
            steps: rule,
            ..Options::default()
        };
        assert_eq!(rows_with(&program, None, options)[0].len(), tokens, "{rule:?}, {steps}");
    }
}

#[test]
fn a_checkpoint_that_says_its_length_answers_prompts_up_to_it() {
    let (program, rows) = rows_within(Some(60), false);
    let of = |tokens: usize| expected(&"x".repeat(tokens), 64, &program.sampler, 0).0;
    assert_eq!(rows, [of(40), of(60), vec![], of(2)]);
    // Where the checkpoint does not say it, prompts are cut where the program cuts them, or refused if that is the
    // option.
    assert_eq!(rows_within(None, false).1, [of(40), of(40), of(40), of(2)]);
    assert_eq!(rows_within(None, true).1, [of(40), vec![], vec![], of(2)]);
}

#[test]
fn a_step_that_fails_keeps_what_is_finished() {
    let mut program = Program::new(&["12345678", "ab", "x"], 8);
    let control = Arc::new(Control {
        fail_at: Some(4),
        refuse_fallback: 1.into(),
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
            refuse_fallback: 1.into(),
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
    for error in [
        warm_up(&mut program, &control).unwrap_err(),
        inference(&mut program, &control).unwrap_err(),
    ] {
        assert_eq!(error.to_string(), "the fake refuses");
    }
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
    let harms: [(Harm, &str); 22] = [
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
        (
            |p| p.tokenizer.vocab_size -= 1,
            "it has 299 tokens where the model has 300",
        ),
        // SAFETY: the vocabulary has that entry.
        (|p| unsafe { *p.tokenizer.lengths.add(3) = c_int::MAX }, "token 3"),
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

/// The program reads its header from any file, and maps it.
#[test]
fn a_mapped_file_that_is_no_model_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.bin");
    std::fs::write(&path, [&b"GPT-OSS v1.0"[..], &[0; 244]].concat()).unwrap();
    let file = File::open(&path).unwrap();
    // SAFETY: nobody changes the file.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    let mut program = Program::new(&["ab"], 8);
    program.transformer.config = Config::from_bytes(*map.first_chunk().unwrap());
    program.transformer.fd = file.as_raw_fd();
    program.transformer.data = map.as_ptr().cast_mut().cast();
    program.transformer.file_size = map.len() as isize;
    let message = inference(&mut program, &Arc::default()).unwrap_err().to_string();
    let expected = format!("{}: it is the release's model for Metal", path.display());
    assert!(message.starts_with(&expected), "{message}");
    finish(&mut program).unwrap();
}

#[test]
fn a_vocabulary_larger_than_the_model_s_is_refused() {
    let mut program = Program::new(&["ab"], 8);
    program.transformer.config.vocab_size = 256;
    program.sampler.vocab_size = 256;
    let message = inference(&mut program, &Arc::default()).unwrap_err().to_string();
    assert!(message.contains("300 tokens where the model has 256"), "{message}");
    finish(&mut program).unwrap();
}

#[test]
fn a_sampler_is_what_main_would_have_made_of_it() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for (held, used) in [
        ((-1.0, -3.0, 5), (0.0, 0.9, 5)),
        ((-inf, nan, 0), (0.0, 0.9, 0)),
        ((-0.0, nan, 5), (0.0, 0.9, 5)),
        ((1.0, -3.0, 5), (1.0, 0.9, 5)),
        ((1.0, 2.0, 5), (1.0, 0.9, 5)),
        ((1.0, inf, 5), (1.0, 0.9, 5)),
        ((1.0, 0.0, 5), (1.0, 0.0, 5)),
        ((1.0, 1.0, 0), (1.0, 1.0, 0)),
        ((inf, 1.0, 5), (inf, 1.0, 5)),
        ((1e-40, 1.0, 5), (1e-40, 1.0, 5)),
    ] {
        let mut program = Program::new(&["ab", "x"], 8);
        let sampler = &mut program.sampler;
        (sampler.temperature, sampler.topp, sampler.rng_state) = used;
        let answers = ["ab", "x"].map(|prompt| expected(prompt, 8, &program.sampler, usize::from(prompt == "x")).0);
        let sampler = &mut program.sampler;
        (sampler.temperature, sampler.topp, sampler.rng_state) = held;
        assert_eq!(inference(&mut program, &Arc::default()).unwrap(), 16, "{held:?}");
        finish(&mut program).unwrap();
        assert_eq!(program.rows(), answers, "{held:?}");
    }
    for (temperature, topp, words) in [
        (nan, 0.9, "Sampler: temperature is NaN; use 0"),
        (1.0, nan, "Sampler: topp is NaN; use a number"),
    ] {
        let mut program = Program::new(&["ab", "x"], 8);
        (program.sampler.temperature, program.sampler.topp) = (temperature, topp);
        let error = inference(&mut program, &Arc::default()).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert_eq!(program.rows(), [EMPTY, EMPTY]);
        finish(&mut program).unwrap();
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

#[test]
fn a_vocabulary_changed_in_place_is_read_anew() {
    let mut program = Program::new(&["ab"], 8);
    let control = Arc::default();
    // A prompt of one token has eight positions for its answer, one of two has seven.
    let tokens = |program: &mut Program| inference(program, &control).unwrap();
    assert_eq!(tokens(&mut program), 8);
    // SAFETY: the vocabulary's own arrays, in which 256 is "ab".
    unsafe {
        let piece = (*program.tokenizer.vocab.add(256)).cast::<u8>();
        piece.write(b'x');
        assert_eq!(tokens(&mut program), 7);
        piece.write(b'a');
        assert_eq!(tokens(&mut program), 8);
        program.tokenizer.scores.add(256).write(-1e30); // a special token
        assert_eq!(tokens(&mut program), 7);
        program.tokenizer.scores.add(256).write(0.0);
        program.tokenizer.lengths.add(256).write(1);
        assert_eq!(tokens(&mut program), 7);
    }
    finish(&mut program).unwrap();
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
        options::getp_options_init_sized(null_mut(), 56);
        said("options");
        // Closing NULL is no failure, and the last error stays.
        model::getp_model_close(null_mut());
        sampler::getp_sampler_close(null_mut());
        tokenizer::getp_tokenizer_close(null_mut());
        requests::getp_requests_close(null_mut());
        said("options");
    }
    let row = program.rows();
    assert_eq!(row, [EMPTY], "rows are ended before anything else is looked at");
}
