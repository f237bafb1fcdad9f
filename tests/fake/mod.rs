//! A calling program's structs, and a replica without a model.
//!
//! The replica's logits depend only on a row's token and position, so that a test knows the answer to each request,
//! whatever else is in the batch.

#![allow(dead_code, reason = "each test program uses a part of it")]

use getp::abi::lifecycle::{self, Backends};
use getp::abi::types::{Config, Requests, RunState, Sampler, Tokenizer, Transformer, TransformerWeights};
use getp::batch::{Draw, FoundScore, Greedy, StepOutput, StepPlan, Want};
use getp::checkpoint::Checkpoint;
use getp::engine::Protocol;
use getp::error::{Error, Result};
use getp::kv_blocks::KvBlocks;
use getp::options::Options;
use getp::profile::Profile;
use getp::random::{self, request_seed};
use getp::replica::{Pointers, Replica};
use getp::request::EndTokens;
use getp::sampler;
use getp::scheduler::steps_at_once;
use getp::weights::{PackReport, PackedKind};
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Barrier, Mutex, Once};

/// The vocabulary: every byte, one merge, and entries that never come out of encoding.
pub const VOCAB: usize = 300;
/// The score of the entries that never come out of encoding.
const SPECIAL_SCORE: f32 = -1e30;

/// How replicas are to behave, and what they did.
#[derive(Default)]
pub struct Control {
    /// Number of replicas to open; 0 means 1.
    pub replicas: usize,
    /// Steps in flight; 0 means 1.
    pub depth: usize,
    /// One of so many tokens that replicas select or sample is an end token; 0 means none.
    pub end_every: u32,
    /// Whether replicas sample tokens.
    pub draws: bool,
    /// One of so many tokens is left to the host; 0 means none.
    pub host_every: u32,
    /// Whether replicas score rows; the rows that are left to the host, by the row's logits, they do not score either.
    pub scores: bool,
    /// Rows of logits that the host fetched because replicas left the token or the score to it.
    pub fetched: AtomicUsize,
    /// Calls of submit and collect that fail, counted together from 1, by replica.
    pub fail_calls: Vec<(usize, usize)>,
    /// Calls that failed because of these.
    pub failed_calls: AtomicUsize,
    /// How many times opening the stand-in for failed replicas fails.
    pub refuse_fallback: AtomicUsize,
    /// Where replicas say that their weights are; 0 is 0x1000.
    pub weights_at: usize,
    /// Replicas opened to stand in.
    pub fallbacks: AtomicUsize,
    /// Where replicas, of all ranks that have it, meet before their first step.
    pub start: Option<Arc<Barrier>>,
    /// Where a replica meets the test in its first step, and again before it goes on.
    pub hold: Option<Barrier>,
    /// Blocks of the KV cache by replica, where they are not as many as usual.
    pub blocks: BTreeMap<usize, usize>,
    /// The most sequences that each replica had in one step.
    pub widest: Mutex<BTreeMap<usize, usize>>,
    /// Lines of tensors that are said to hold values that are not finite.
    pub non_finite: usize,
    /// The fingerprint of the weights.
    pub fingerprint: u64,
    /// Opening fails.
    pub refuse: bool,
    /// The step that fails, from 1.
    pub fail_at: Option<usize>,
    /// The step that panics, from 1.
    pub panic_at: Option<usize>,
    /// Steps of all replicas, and their rows.
    pub steps: AtomicUsize,
    pub rows: AtomicUsize,
    /// Replicas opened.
    pub opened: AtomicUsize,
    /// Replicas dropped.
    pub dropped: AtomicUsize,
    /// The way to the other ranks, once for each engine.
    pub transports: Mutex<Vec<Box<dyn Protocol>>>,
}

impl Control {
    /// Calls `work` with backends that open replicas as told here.
    pub fn with_backends<T>(self: &Arc<Self>, work: impl FnOnce(&Backends<'_>) -> T) -> T {
        let open = |_: &dyn Checkpoint, options: &Options| self.open(options);
        let fallback = |_: &dyn Checkpoint, options: &Options| self.fallback(options);
        work(&Backends {
            open: &open,
            fallback: &fallback,
            join: &|| Ok(self.transports.lock().unwrap().pop()),
        })
    }

    /// The replicas.
    pub fn open(self: &Arc<Self>, options: &Options) -> Result<Vec<Box<dyn Replica>>> {
        let replicas = 0..self.replicas.max(1);
        replicas.map(|replica| self.replica(Some(replica), options)).collect()
    }

    /// What a replica returns for a row whose sampled token is `token`: that token, an end token, or nothing.
    pub fn drawn(&self, logits: &[f32], token: u32) -> Option<u32> {
        let one_in = |every: u32, bits: u32| every > 0 && bits.is_multiple_of(every);
        if one_in(self.host_every, logits[1].to_bits() >> 1) {
            return None;
        }
        let ends = one_in(self.end_every, logits[0].to_bits());
        Some(if ends { EndTokens::RELEASED[0] } else { token })
    }

    /// What a replica finds of a row whose next token is `next`.
    fn found(&self, logits: &[f32], next: u32) -> FoundScore {
        let largest = logits[sampler::argmax(logits) as usize];
        let sum = logits.iter().map(|logit| f64::from(logit - largest).exp()).sum();
        let mut ids: Vec<u32> = (0..VOCAB as u32).collect();
        ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
        let is_left = self.host_every > 0 && (logits[2].to_bits() >> 1).is_multiple_of(self.host_every);
        FoundScore {
            token: next,
            logit: logits.get(next as usize).copied().unwrap_or(f32::NAN),
            largest,
            sum: if is_left { f64::NAN } else { sum },
            top: std::array::from_fn(|i| (ids[i], logits[ids[i] as usize])),
        }
    }

    /// The stand-in.
    pub fn fallback(self: &Arc<Self>, options: &Options) -> Result<Box<dyn Replica>> {
        let refusals = self.refuse_fallback.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1));
        if refusals.is_ok() {
            return Err(Error::State("the fake has no fallback".into()));
        }
        self.fallbacks.fetch_add(1, SeqCst);
        self.replica(None, options)
    }

    fn replica(self: &Arc<Self>, index: Option<usize>, options: &Options) -> Result<Box<dyn Replica>> {
        self.opened.fetch_add(1, SeqCst);
        if self.refuse {
            return Err(Error::State("the fake refuses".into()));
        }
        Ok(Box::new(FakeReplica {
            control: self.clone(),
            index,
            report: report(self.non_finite, self.fingerprint),
            profile: options.profile.then(Profile::default),
            calls: 0,
            steps: 0,
            under_way: VecDeque::new(),
            last_tokens: vec![0; 8 * steps_at_once(self.depth)],
            collected: Vec::new(),
        }))
    }
}

struct FakeReplica {
    control: Arc<Control>,
    /// Its number; `None` for the stand-in, which never fails.
    index: Option<usize>,
    report: PackReport,
    profile: Option<Profile>,
    calls: usize,
    steps: usize,
    /// Steps in flight; they run when they are collected, as late as possible.
    under_way: VecDeque<(StepPlan, Want)>,
    /// The last token of each slot.
    last_tokens: Vec<u32>,
    /// The rows of the step collected last, if tokens were drawn from them or they were scored.
    collected: Vec<Vec<f32>>,
}

impl FakeReplica {
    fn count_call(&mut self) -> Result<()> {
        self.calls += 1;
        let fails = |&(replica, call): &(usize, usize)| (Some(replica), call) == (self.index, self.calls);
        if self.control.fail_calls.iter().any(fails) {
            self.control.failed_calls.fetch_add(1, SeqCst);
            return Err(Error::State("the fake's call fails".into()));
        }
        Ok(())
    }

    fn start_step(&mut self, plan: &StepPlan) -> Result<()> {
        let Some(index) = self.index else { return Ok(()) };
        if let (1, Some(start)) = (self.steps, &self.control.start) {
            start.wait();
        }
        if let (1, Some(hold)) = (self.steps, &self.control.hold) {
            hold.wait();
            hold.wait();
        }
        let mut widest = self.control.widest.lock().unwrap();
        let widest = widest.entry(index).or_default();
        *widest = plan.chunks.len().max(*widest);
        if Some(self.steps) == self.control.fail_at {
            return Err(Error::State("the fake fails".into()));
        }
        Ok(())
    }

    fn run(&mut self, plan: &StepPlan, want: Want, output: &mut StepOutput) {
        output.greedy.clear();
        output.drawn.clear();
        output.scores.clear();
        output.logits.clear();
        self.collected.clear();
        let draws = want.draws(plan) && self.draws();
        let scores = want.scores(plan) && self.scores();
        let keeps = want.keeps_logits(plan) && self.draws();
        for row in &plan.logits {
            let fed = plan.tokens[row.row];
            let fed = u32::try_from(fed).unwrap_or_else(|_| {
                assert!(self.depth() > 1 && want == Want::Tokens);
                self.last_tokens[(-1 - fed) as usize]
            });
            let logits = logits(fed, row.position as u32);
            let token = greedy(&logits, self.control.end_every);
            let logit = logits[sampler::argmax(&logits) as usize];
            output.greedy.push(Greedy { token, logit });
            // The host samples from whole rows: nothing may use this as a token.
            let mut kept = if want == Want::Logits { u32::MAX } else { token };
            if draws {
                let drawn = row.is_drawn().then(|| sample(&logits, row.draw));
                let drawn = drawn.and_then(|token| self.control.drawn(&logits, token));
                output.drawn.push(drawn);
                kept = drawn.unwrap_or(kept);
            }
            if scores {
                let next = row.score.and_then(|score| score.next);
                output.scores.push(self.control.found(&logits, next.unwrap_or(kept)));
            }
            if draws || scores || keeps {
                self.collected.push(logits);
            } else if want == Want::Logits || row.is_for_host() {
                output.logits.own().extend(logits);
            }
            if row.sample {
                self.last_tokens[row.slot] = kept;
            }
        }
    }
}

fn report(non_finite: usize, fingerprint: u64) -> PackReport {
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
        non_finite: (0..non_finite)
            .map(|layer| format!("w_qkv of layer {layer}: NaN"))
            .collect(),
        fingerprint,
        read_bytes: 6_000_000,
        seconds: 0.5,
        sent: None,
    }
}

/// The row of logits after a token at a position.
pub fn logits(token: u32, position: u32) -> Vec<f32> {
    let mut state = request_seed(u64::from(token) << 32 | u64::from(position), 1);
    let next = || {
        state = request_seed(state, 1);
        (state >> 40) as f32 / (1 << 22) as f32
    };
    std::iter::repeat_with(next).take(VOCAB).collect()
}

/// The token taken from a row greedily; one in `end_every` ends the answer.
pub fn greedy(logits: &[f32], end_every: u32) -> u32 {
    let ends = end_every > 0 && logits[0].to_bits().is_multiple_of(end_every);
    if ends {
        EndTokens::RELEASED[0]
    } else {
        sampler::argmax(logits)
    }
}

impl Replica for FakeReplica {
    fn describe(&self) -> String {
        "fake".into()
    }

    fn pack_report(&self) -> &PackReport {
        &self.report
    }

    fn kv_blocks(&self) -> KvBlocks {
        KvBlocks {
            tokens: 16,
            count: self
                .index
                .and_then(|i| self.control.blocks.get(&i))
                .copied()
                .unwrap_or(64 + 2),
        }
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

    fn chunk_tokens(&self) -> usize {
        24
    }

    fn depth(&self) -> usize {
        self.control.depth.max(1)
    }

    fn draws(&self) -> bool {
        self.control.draws
    }

    fn scores(&self) -> bool {
        self.control.scores
    }

    fn decodes_as_prompts(&self) -> bool {
        true
    }

    fn submit(&mut self, plan: &StepPlan, want: Want) -> Result<()> {
        assert!(self.under_way.len() < self.depth());
        self.steps += 1;
        self.control.steps.fetch_add(1, SeqCst);
        self.control.rows.fetch_add(plan.rows(), SeqCst);
        assert_ne!(Some(self.steps), self.control.panic_at, "the fake panics");
        self.count_call()?;
        self.start_step(plan)?;
        self.under_way.push_back((plan.clone(), want));
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<()> {
        self.count_call()?;
        let (plan, want) = self.under_way.pop_front().expect("no step is under way");
        self.run(&plan, want, output);
        Ok(())
    }

    fn fetch(&mut self, rows: &[usize], output: &mut StepOutput) -> Result<()> {
        self.control.fetched.fetch_add(rows.len(), SeqCst);
        let rows = rows.iter().flat_map(|&row| &self.collected[row]);
        output.logits.clear();
        output.logits.own().extend(rows);
        Ok(())
    }

    fn profile(&self) -> Option<&Profile> {
        self.profile.as_ref()
    }

    fn pointers(&self) -> Pointers {
        let weights_at = match self.control.weights_at {
            0 => 0x1000,
            at => at,
        };
        Pointers {
            weights: [std::ptr::without_provenance_mut(weights_at); 16],
            state: [0x2000 as *mut c_void; 21],
        }
    }
}

impl Drop for FakeReplica {
    fn drop(&mut self) {
        self.control.dropped.fetch_add(1, SeqCst);
    }
}

/// A program's structs, and the memory that they point to.
pub struct Program {
    pub transformer: Box<Transformer>,
    pub tokenizer: Box<Tokenizer>,
    pub sampler: Sampler,
    pub requests: Requests,
    _pieces: Vec<Vec<u8>>,
    vocab: Vec<*mut c_char>,
    _lengths: Vec<c_int>,
    _scores: Vec<f32>,
    _prompts: Vec<u8>,
    answers: Vec<c_int>,
}

/// Bytes a prompt's token has room for.
const MAX_TOKEN_LEN: usize = 4;
/// A pattern in memory that must not be written.
const SENTINEL: c_int = 0x5EAF_00D5;

impl Program {
    pub fn new(prompts: &[&str], steps: usize) -> Self {
        let mut pieces: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        pieces.push(b"ab".to_vec());
        pieces.resize(VOCAB, Vec::new());
        let mut vocab: Vec<*mut c_char> = pieces.iter_mut().map(|piece| piece.as_mut_ptr().cast()).collect();
        let mut lengths: Vec<c_int> = pieces.iter().map(|piece| piece.len() as c_int).collect();
        let mut scores = vec![0.0; 257];
        scores.resize(VOCAB, SPECIAL_SCORE);
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
                vocab_size: VOCAB as c_int,
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
            vocab,
            _lengths: lengths,
            _scores: scores,
            _prompts: prompt_bytes,
            answers,
        }
    }

    /// Exchanges two tokens of the vocabulary.
    pub fn swap_tokens(&mut self, a: usize, b: usize) {
        self.vocab.swap(a, b);
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

unsafe extern "C" {
    /// The C library's, which the build of some tests for ThreadSanitizer has no crate for.
    fn dup2(from: c_int, to: c_int) -> c_int;
}

/// Keeps lines off stderr where no test reads any, and there would be thousands. With `--nocapture` they are shown.
pub fn silent() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::args().any(|argument| argument == "--nocapture" || argument == "--no-capture") {
            return;
        }
        let nowhere = File::options().write(true).open("/dev/null").unwrap();
        const STDERR: c_int = 2;
        // SAFETY: both are open, and nothing of this program keeps either number.
        let stderr = unsafe { dup2(nowhere.as_raw_fd(), STDERR) };
        assert_eq!(stderr, STDERR);
    });
}

/// `warm_up` on the fake.
pub fn warm_up(program: &mut Program, control: &Arc<Control>) -> Result<()> {
    quiet();
    let (transformer, tokenizer) = (&raw mut *program.transformer, &raw mut *program.tokenizer);
    // SAFETY: the program's own structs.
    control.with_backends(|backends| unsafe { lifecycle::warm_up(transformer, tokenizer, backends) })
}

/// `inference` on the fake.
pub fn inference(program: &mut Program, control: &Arc<Control>) -> Result<i64> {
    quiet();
    let (transformer, tokenizer) = (&raw mut *program.transformer, &raw mut *program.tokenizer);
    let (sampler, requests) = (&raw mut program.sampler, &raw mut program.requests);
    // SAFETY: the program's own structs.
    control
        .with_backends(|backends| unsafe { lifecycle::inference(transformer, tokenizer, sampler, requests, backends) })
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
    (257..VOCAB).for_each(|_| add(b"", SPECIAL_SCORE));
    let path = dir.join("tokenizer.bin");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A token sampled from logits.
fn sample(logits: &[f32], draw: Draw) -> u32 {
    let mut sampler = sampler::Sampler::new(VOCAB);
    sampler.make_room(draw.temperature, draw.topp).unwrap();
    sampler.sample(logits, draw)
}

/// The token that the program's own loop samples next from a random stream.
fn sample_next(logits: &[f32], sampler: &Sampler, state: &mut u64) -> u32 {
    let Sampler { temperature, topp, .. } = *sampler;
    let coin = if temperature == 0.0 {
        0.0
    } else {
        random::random_f32(state)
    };
    sample(
        logits,
        Draw {
            temperature,
            topp,
            coin,
        },
    )
}

/// What the program's own loop would answer, and the random state it would leave.
pub fn expected(prompt: &str, steps: usize, sampler: &Sampler, request: usize) -> (Vec<c_int>, u64) {
    let seed = request_seed(sampler.rng_state, request);
    let mut state = seed;
    let answer = answer(prompt, steps, |logits| sample_next(logits, sampler, &mut state));
    (answer, state)
}

/// The answers and the random state where a replica samples as `control` says.
pub fn expected_drawn(
    prompt: &str,
    steps: usize,
    sampler: &Sampler,
    request: usize,
    control: &Control,
) -> (Vec<c_int>, u64) {
    let seed = request_seed(sampler.rng_state, request);
    let mut state = seed;
    let answer = answer(prompt, steps, |logits| {
        let token = sample_next(logits, sampler, &mut state);
        control.drawn(logits, token).unwrap_or(token)
    });
    (answer, state)
}

/// The greedy answers, where one in `end_every` tokens ends an answer.
pub fn expected_ending(prompt: &str, steps: usize, end_every: u32) -> Vec<c_int> {
    answer(prompt, steps, |logits| greedy(logits, end_every))
}

fn answer(prompt: &str, steps: usize, mut sample: impl FnMut(&[f32]) -> u32) -> Vec<c_int> {
    let bytes = prompt.replace("ab", "\u{100}"); // its only merge has the id 256
    let tokens: Vec<u32> = bytes.chars().map(|c| c as u32).collect();
    let mut answer = Vec::new();
    let mut token = tokens[0];
    for position in 0..steps {
        let next = tokens.get(position + 1).copied();
        token = next.unwrap_or_else(|| {
            let sampled = sample(&logits(token, position as u32));
            answer.push(sampled as c_int);
            sampled
        });
        if EndTokens::RELEASED.contains(&token) {
            break;
        }
    }
    answer
}
