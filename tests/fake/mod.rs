//! A program as the library's callers are, and a replica that needs no model.
//!
//! The replica's logits depend on the token fed and its position alone, so that a test can say what each request's
//! answer must be whatever ran beside it.

#![allow(dead_code, reason = "each test program uses a part of it")]

use getp::abi::lifecycle;
use getp::abi::types::{Config, Requests, RunState, Sampler, Tokenizer, Transformer, TransformerWeights};
use getp::batch::StepPlan;
use getp::checkpoint::Checkpoint;
use getp::error::{Error, Result};
use getp::options::Options;
use getp::profile::Profile;
use getp::replica::{Greedy, KvBlocks, PackReport, PackedKind, Pointers, Replica, StepOutput, Want};
use getp::sampler::{self, request_seed};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once};

/// The model's vocabulary: larger than the tokenizer's, as it is in real life.
pub const VOCAB: usize = 300;
/// The tokenizer's: every byte, and one merge.
pub const TOKENS: usize = 257;

/// How a replica shall behave, and what became of it.
#[derive(Default)]
pub struct Control {
    /// Opening fails.
    pub refuse: bool,
    /// The step that fails, from 1.
    pub fail_at: Option<usize>,
    /// The step that panics, from 1.
    pub panic_at: Option<usize>,
    /// Replicas opened.
    pub opened: AtomicUsize,
    /// Replicas dropped.
    pub dropped: AtomicUsize,
}

impl Control {
    pub fn open(self: &Arc<Self>) -> impl Fn(&dyn Checkpoint, &Options) -> Result<Box<dyn Replica>> + Sync + use<> {
        let control = self.clone();
        move |_, options| {
            control.opened.fetch_add(1, Ordering::SeqCst);
            if control.refuse {
                return Err(Error::State("the fake refuses".into()));
            }
            Ok(Box::new(FakeReplica {
                control: control.clone(),
                report: report(),
                profile: options.profile.then(Profile::default),
                steps: 0,
            }))
        }
    }
}

struct FakeReplica {
    control: Arc<Control>,
    report: PackReport,
    profile: Option<Profile>,
    steps: usize,
}

fn report() -> PackReport {
    let kind = |name, format: &str, bytes, remark: Option<&str>| PackedKind {
        name,
        format: format.into(),
        bytes,
        remark: remark.map(String::from),
    };
    PackReport {
        kinds: vec![
            kind("w_qkv", "BF16", 2 << 20, None),
            kind("w_mlp1", "BF16+F32", 3 << 19, Some("layer 1 is no MXFP4")),
        ],
        read_bytes: 6_000_000,
        seconds: 0.5,
    }
}

/// The row of logits behind a token at a position.
pub fn logits(token: u32, position: u32) -> Vec<f32> {
    let mut state = request_seed(u64::from(token) << 32 | u64::from(position), 1);
    let next = || {
        state = request_seed(state, 1);
        (state >> 40) as f32 / (1 << 22) as f32
    };
    std::iter::repeat_with(next).take(VOCAB).collect()
}

impl Replica for FakeReplica {
    fn describe(&self) -> String {
        "fake".into()
    }

    fn pack_report(&self) -> &PackReport {
        &self.report
    }

    fn kv_blocks(&self) -> KvBlocks {
        KvBlocks { full: 64, window: 64 }
    }

    fn kv_bytes(&self) -> u64 {
        1 << 20
    }

    fn max_step_tokens(&self) -> usize {
        24
    }

    fn max_logits_rows(&self) -> usize {
        8
    }

    fn step(&mut self, plan: &StepPlan, want: Want, output: &mut StepOutput) -> Result<()> {
        self.steps += 1;
        assert_ne!(Some(self.steps), self.control.panic_at, "the fake panics");
        if Some(self.steps) == self.control.fail_at {
            return Err(Error::State("the fake fails".into()));
        }
        output.greedy.clear();
        output.logits.clear();
        for row in &plan.logits {
            let logits = logits(plan.tokens[row.row], row.position as u32);
            let token = sampler::argmax(&logits);
            output.greedy.push(Greedy {
                token,
                logit: logits[token as usize],
            });
            if want == Want::Logits {
                output.logits.extend(logits);
            }
        }
        Ok(())
    }

    fn profile(&self) -> Option<&Profile> {
        self.profile.as_ref()
    }

    fn pointers(&self) -> Pointers {
        Pointers {
            weights: [0x1000 as *mut c_void; 16],
            state: [0x2000 as *mut c_void; 21],
        }
    }
}

impl Drop for FakeReplica {
    fn drop(&mut self) {
        self.control.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

/// A program's structs and the memory behind them.
pub struct Program {
    pub transformer: Box<Transformer>,
    pub tokenizer: Box<Tokenizer>,
    pub sampler: Sampler,
    pub requests: Requests,
    _pieces: Vec<Vec<u8>>,
    _vocab: Vec<*mut c_char>,
    _lengths: Vec<c_int>,
    _scores: Vec<f32>,
    _prompts: Vec<u8>,
    answers: Vec<c_int>,
}

/// Bytes a prompt's token has room for.
const MAX_TOKEN_LEN: usize = 4;
/// What the program has not asked us to touch.
const SENTINEL: c_int = 0x5EAF_00D5;

impl Program {
    pub fn new(prompts: &[&str], steps: usize) -> Self {
        let mut pieces: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        pieces.push(b"ab".to_vec());
        let mut vocab: Vec<*mut c_char> = pieces.iter_mut().map(|piece| piece.as_mut_ptr().cast()).collect();
        let mut lengths: Vec<c_int> = pieces.iter().map(|piece| piece.len() as c_int).collect();
        let mut scores = vec![0.0; TOKENS];
        let slot = MAX_TOKEN_LEN * (steps + 1);
        let mut prompt_bytes = vec![0; prompts.len() * slot];
        for (bytes, prompt) in prompt_bytes.chunks_exact_mut(slot).zip(prompts) {
            bytes[..prompt.len()].copy_from_slice(prompt.as_bytes());
        }
        // One row more than asked for, to see whether anything is written behind the last.
        let mut answers = vec![SENTINEL; (prompts.len() + 1) * (steps + 1)];
        Self {
            transformer: Box::new(transformer()),
            tokenizer: Box::new(Tokenizer {
                vocab: vocab.as_mut_ptr(),
                lengths: lengths.as_mut_ptr(),
                scores: scores.as_mut_ptr(),
                vocab_size: TOKENS as c_int,
                max_token_length: 2,
                sorted_vocab: null_mut(),
                byte_tokens: [0; 256],
                byte_pieces: [0; 512],
            }),
            sampler: Sampler {
                vocab_size: VOCAB as c_int,
                probindex: null_mut(),
                temperature: 0.0,
                topp: 0.9,
                rng_state: 1234,
            },
            requests: Requests {
                num_reqs: prompts.len() as c_int,
                max_token_len: MAX_TOKEN_LEN as c_int,
                max_seq_len: steps as c_int,
                str_reqs: prompt_bytes.as_mut_ptr().cast(),
                tok_gens: answers.as_mut_ptr(),
            },
            _pieces: pieces,
            _vocab: vocab,
            _lengths: lengths,
            _scores: scores,
            _prompts: prompt_bytes,
            answers,
        }
    }

    /// Each request's row up to its end. Checks that each has one and that nothing behind the last is touched.
    pub fn rows(&self) -> Vec<Vec<c_int>> {
        let row = self.requests.max_seq_len as usize + 1;
        let (rows, behind) = self.answers.split_at(self.answers.len() - row);
        assert!(
            behind.iter().all(|&value| value == SENTINEL),
            "something wrote behind the last row"
        );
        let end = |row: &[c_int]| row.iter().position(|&token| token == -1).expect("a row without an end");
        rows.chunks_exact(row).map(|row| row[..end(row)].to_vec()).collect()
    }

    /// Bytes of the transformer, to see whether it is put back as it was.
    pub fn bytes(&self) -> [u64; 48] {
        let mut words = [0; 48];
        // SAFETY: both are 384 bytes; the struct was zeroed before it was filled, so that its padding is known.
        unsafe { std::ptr::copy_nonoverlapping((&raw const *self.transformer).cast(), words.as_mut_ptr(), 48) };
        words
    }
}

fn transformer() -> Transformer {
    // SAFETY: numbers and pointers, all of which may be zero.
    let mut transformer: Transformer = unsafe { std::mem::zeroed() };
    transformer.config = Config {
        vocab_size: VOCAB as c_int,
        hidden_dim: 32,
        n_experts: 2,
        experts_per_token: 1,
        intermediate_dim: 32,
        n_layers: 2,
        head_dim: 8,
        n_attn_heads: 2,
        n_kv_heads: 1,
        seq_len: 16,
        initial_context_length: 40,
        rope_theta: 150_000.0,
        rope_scaling_factor: 32.0,
        sliding_window: 16,
        swiglu_limit: 7.0,
    };
    transformer.weights = TransformerWeights::from_arrays([0x10 as *mut c_void; 16]);
    transformer.state = RunState::from_arrays([0x20 as *mut c_void; 21]);
    transformer.fd = 7;
    transformer
}

/// Keeps answers off the test's stdout, unless a test's own process is to print them.
pub fn quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var_os("GETP_PRINT").is_none() {
            // SAFETY: nothing here reads the environment but through Rust's own functions, which lock it.
            unsafe { std::env::set_var("GETP_PRINT", "0") };
        }
    });
}

/// `warm_up` on the fake.
pub fn warm_up(program: &mut Program, control: &Arc<Control>) -> Result<()> {
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

/// `inference` on the fake.
pub fn inference(program: &mut Program, control: &Arc<Control>) -> Result<i64> {
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

/// `finish`.
pub fn finish(program: &mut Program) -> Result<()> {
    // SAFETY: the program's own struct.
    unsafe { lifecycle::finish(&raw mut *program.transformer) }
}

/// Prompts of many lengths, more than a step has room for.
pub const PROMPTS: [&str; 12] = [
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

/// The text of the calling thread's last error.
pub fn last_error() -> Option<String> {
    let text = getp::abi::library::getp_last_error();
    // SAFETY: not NULL, it is this thread's string, and nothing replaces it meanwhile.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned())
}

/// Writes a `tokenizer.bin` of the vocabulary.
pub fn vocabulary_file(dir: &Path) -> PathBuf {
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

/// What the program's own loop would answer, and the random state it would leave.
pub fn expected(prompt: &str, steps: usize, sampler: &Sampler, request: usize) -> (Vec<c_int>, u64) {
    let bytes = prompt.replace("ab", "\u{100}"); // its only merge has the id 256
    let tokens: Vec<u32> = bytes.chars().map(|c| c as u32).collect();
    let seed = request_seed(sampler.rng_state, request);
    let mut draws = sampler::Sampler::new(VOCAB, sampler.temperature, sampler.topp, seed);
    let mut answer = Vec::new();
    let mut token = tokens[0];
    for position in 0..steps {
        let next = tokens.get(position + 1).copied();
        token = next.unwrap_or_else(|| {
            let sampled = draws.sample(&logits(token, position as u32));
            answer.push(sampled as c_int);
            sampled
        });
    }
    (answer, draws.rng_state())
}
