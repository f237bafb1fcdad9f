//! The three functions on structs of any contents: every size and value is the fuzzer's. A pointer is NULL, or what it
//! points to is exactly as large as the sizes say, so that the address sanitizer sees one byte too many.

#![no_main]

use getp::abi::driver::{finish, inference, warm_up};
use getp::abi::types::{Config, Requests, RunState, Sampler, Tokenizer, Transformer, TransformerWeights};
use getp::checkpoint::{CONFIG_BYTES, Field, TensorLayout, config_from_bytes};
use getp::requests;
use getp_fuzz::{CONFIG, weight};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;

/// Larger buffers and models are announced, but NULL.
const MOST_BYTES: usize = 1 << 18;
/// The most positions of all answers: 65,536 took eleven seconds with the sanitizer, as long as a hang.
const MOST_POSITIONS: usize = 1 << 12;

#[derive(Arbitrary, Debug)]
struct Input {
    num_reqs: Size,
    max_token_len: Size,
    max_seq_len: Size,
    no_prompts: bool,
    no_answers: bool,
    text: Vec<u8>,
    /// Field and value.
    config: Option<(u8, Size)>,
    file_size: Option<i64>,
    fast: bool,
    pieces: Vec<Piece>,
    vocab_size: Option<Size>,
    max_token_length: Size,
    sampler_vocab_size: Option<i32>,
    temperature: f32,
    topp: f32,
    rng_state: u64,
    warm_up: bool,
    rounds: bool,
}

/// Sizes near those that mean something, and others.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Size {
    Small(u8),
    Any(i32),
}

#[derive(Arbitrary, Clone, Debug, Default)]
struct Piece {
    bytes: Vec<u8>,
    length: Option<i32>,
    special: bool,
    missing: bool,
}

impl Size {
    fn get(self) -> i32 {
        match self {
            Self::Small(size) => size.into(),
            Self::Any(size) => size,
        }
    }
}

fuzz_target!(|input: Input| {
    set_environment(&input);
    let mut model = Model::new(&input);
    let before = model.bytes();
    let mut vocabulary = Vocabulary::new(&input);
    let mut sampler = Sampler {
        vocab_size: input.sampler_vocab_size.unwrap_or(CONFIG.vocab_size),
        probindex: null_mut(),
        temperature: input.temperature,
        topp: input.topp,
        rng_state: input.rng_state,
    };
    let mut batch = Batch::new(&input);
    let (transformer, tokenizer) = (&raw mut *model.transformer, &raw mut vocabulary.tokenizer);
    if input.warm_up {
        // SAFETY: what the structs' pointers point to is as their sizes say.
        unsafe { warm_up(transformer, tokenizer) };
    }
    for _ in 0..1 + usize::from(input.rounds) {
        // SAFETY: as above.
        let tokens = unsafe { inference(transformer, tokenizer, &mut sampler, &mut batch.requests) };
        batch.check(tokens);
    }
    // SAFETY: as above.
    unsafe { finish(transformer, tokenizer) };
    assert!(before == model.bytes(), "finish gives the struct back as it was");
});

/// Little memory, and no output.
fn set_environment(input: &Input) {
    let variables = [
        ("GETP_PRECISION", if input.fast { "fast" } else { "exact" }),
        ("GETP_THREADS", "1"),
        ("GETP_MAX_BATCH", "4"),
        ("GETP_STEP_TOKENS", "8"),
        ("GETP_KV_MB", "1"),
        ("GETP_PRINT", "0"),
        ("GETP_PROGRESS", "0"),
    ];
    for (name, value) in variables {
        // SAFETY: the library's threads are gone when `finish` returns, and the fuzzer's read no variables.
        unsafe { std::env::set_var(name, value) };
    }
}

/// A transformer, and its mapped file.
struct Model {
    transformer: Box<Transformer>,
    _file: Vec<f32>,
}

impl Model {
    fn new(input: &Input) -> Self {
        let mut config = CONFIG.to_bytes();
        if let Some((field, value)) = input.config {
            let field = usize::from(field) % (CONFIG_BYTES / 4);
            config[4 * field..][..4].copy_from_slice(&value.get().to_le_bytes());
        }
        let layout = config_from_bytes(&config).and_then(TensorLayout::new);
        let layout = layout.ok().filter(|layout| layout.file_bytes() <= MOST_BYTES);
        let floats = layout.as_ref().map_or(0, |layout| layout.file_bytes() / 4);
        let mut file: Vec<f32> = (0..floats).map(weight).collect();
        let data = file.as_mut_ptr();
        let weights: [*mut c_void; Field::COUNT] = std::array::from_fn(|at| {
            let field = Field::IN_FILE_ORDER.into_iter().find(|&field| field as usize == at);
            let start = layout
                .as_ref()
                .zip(field)
                .map(|(layout, field)| layout.in_file(field).start);
            start.map_or(null_mut(), |start| data.wrapping_byte_add(start).cast())
        });
        // SAFETY: numbers and pointers, all of which may be zero; so is the padding, which is compared too.
        let mut transformer: Box<Transformer> = unsafe { Box::new_zeroed().assume_init() };
        transformer.config = Config::from_bytes(config);
        transformer.weights = TransformerWeights::from_arrays(weights);
        transformer.state = RunState::from_arrays([null_mut(); 21]);
        transformer.data = data;
        transformer.file_size = input.file_size.map_or(4 * floats as isize, |bytes| bytes as isize);
        Self {
            transformer,
            _file: file,
        }
    }

    fn bytes(&self) -> [u8; size_of::<Transformer>()] {
        // SAFETY: the struct was zeroed before it was filled, so that its padding is initialized too.
        unsafe { (&raw const *self.transformer).cast::<[u8; _]>().read() }
    }
}

/// A tokenizer, and what it points to.
struct Vocabulary {
    tokenizer: Tokenizer,
    _pieces: Vec<Box<[u8]>>,
    _vocab: Box<[*mut c_char]>,
    _lengths: Box<[c_int]>,
    _scores: Box<[f32]>,
}

impl Vocabulary {
    fn new(input: &Input) -> Self {
        let mut given: Vec<Piece> = input.pieces.clone();
        if input.vocab_size.is_none() {
            // As many as the model has, or no request is answered.
            given.resize_with(CONFIG.vocab_size as usize, Piece::default);
        }
        let mut pieces: Vec<Box<[u8]>> = given.iter().map(|piece| piece.bytes.clone().into()).collect();
        let count = input.vocab_size.map_or(pieces.len() as i32, Size::get);
        // More entries than there are would not be sound: then there are none at all.
        let is_there = usize::try_from(count).is_ok_and(|count| count <= pieces.len()) || count < 0;
        let mut vocab: Box<[*mut c_char]> = (given.iter().zip(&mut pieces))
            .map(|(piece, bytes)| {
                if piece.missing {
                    null_mut()
                } else {
                    bytes.as_mut_ptr().cast()
                }
            })
            .collect();
        // Nor would a length beyond the bytes.
        let mut lengths: Box<[c_int]> = (given.iter())
            .map(|piece| piece.length.unwrap_or(c_int::MAX).min(piece.bytes.len() as c_int))
            .collect();
        let scores = given.iter().map(|piece| if piece.special { -1e30 } else { 0.0 });
        let mut scores: Box<[f32]> = scores.collect();
        let tokenizer = Tokenizer {
            vocab: if is_there { vocab.as_mut_ptr() } else { null_mut() },
            lengths: lengths.as_mut_ptr(),
            scores: scores.as_mut_ptr(),
            vocab_size: count,
            max_token_length: input.max_token_length.get(),
            sorted_vocab: null_mut(),
            byte_tokens: [0; 256],
            byte_pieces: [0; 512],
        };
        Self {
            tokenizer,
            _pieces: pieces,
            _vocab: vocab,
            _lengths: lengths,
            _scores: scores,
        }
    }
}

/// Requests, and what they point to. NULL where that would be too large; of no size where it can be of none.
struct Batch {
    requests: Requests,
    _prompts: Option<Box<[u8]>>,
    /// `[num_reqs, max_seq_len + 1]`
    answers: Option<Box<[c_int]>>,
}

impl Batch {
    fn new(input: &Input) -> Self {
        let sizes = [input.num_reqs, input.max_token_len, input.max_seq_len].map(Size::get);
        let [num_reqs, max_token_len, max_seq_len] = sizes.map(|size| size.max(0) as usize);
        let rows = [num_reqs, max_seq_len + 1].into_iter().try_fold(1, usize::checked_mul);
        let bytes = rows.and_then(|rows| rows.checked_mul(max_token_len));
        let prompts = bytes
            .filter(|&bytes| !input.no_prompts && bytes <= MOST_BYTES)
            .map(|bytes| {
                let text = input.text.iter().copied().chain([0]).cycle();
                text.take(bytes).collect::<Box<[u8]>>()
            });
        let answers = rows
            .filter(|&rows| !input.no_answers && rows <= MOST_POSITIONS)
            .map(|rows| vec![-2; rows].into());
        let mut batch = Self {
            requests: Requests {
                num_reqs: sizes[0],
                max_token_len: sizes[1],
                max_seq_len: sizes[2],
                str_reqs: null_mut(),
                tok_gens: null_mut(),
            },
            _prompts: prompts,
            answers,
        };
        batch.requests.str_reqs = batch._prompts.as_mut().map_or(null_mut(), |p| p.as_mut_ptr().cast());
        batch.requests.tok_gens = batch
            .answers
            .as_mut()
            .map_or(null_mut(), |a: &mut Box<[c_int]>| a.as_mut_ptr());
        // The view alone, as Rust programs may use it.
        let r = &batch.requests;
        // SAFETY: both buffers are as large as the sizes say, or NULL.
        let view = unsafe {
            requests::Requests::from_raw(
                r.num_reqs,
                r.max_token_len,
                r.max_seq_len,
                r.str_reqs.cast(),
                r.tok_gens,
            )
        };
        if let Ok(mut view) = view {
            for i in 0..view.len() {
                assert!(view.prompt(i).len() <= max_token_len * (max_seq_len + 1));
                view.store(i, &[7; 3]);
            }
        }
        batch
    }

    /// The rows hold as many tokens as were counted, and each its end, if the buffers could be used at all.
    fn check(&self, counted: i64) {
        assert!(counted >= -1);
        let Some(answers) = self.answers.as_ref().filter(|_| counted >= 0) else {
            return;
        };
        let rows = answers.chunks_exact(self.requests.max_seq_len.max(0) as usize + 1);
        let end = |row: &[c_int]| row.iter().position(|&token| token == -1).expect("a row without an end");
        assert_eq!(rows.map(end).sum::<usize>() as i64, counted);
    }
}
