//! The engine behind warm_up, inference and finish: from the program's requests to their answers.
//!
//! Nothing here knows a device or a C pointer: `abi` passes a checkpoint, a vocabulary and checked request buffers,
//! and `backend` the replicas.

mod answers;
mod draws;
mod pipeline;
mod queue;
mod run;
mod summary;

use crate::batch::Want;
use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::logits::Recorder;
use crate::memory::{self, Purpose};
use crate::options::Options;
use crate::replica::Replica;
use crate::report::{self, FewLines};
use crate::requests::Requests;
use crate::sampler::device_may_draw;
use crate::scheduler::{Limits, Scheduler, Unfinished, steps_at_once};
use crate::tokenizer::Tokenizer;
use crate::workers::{self, Workers};
use answers::Answers;
use draws::{Draws, Streams};
use pipeline::Pipeline;
use queue::Queue;
use rayon::prelude::*;
use run::{Run, Worker};
use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Instant;

/// Makes a replica on each device there is, at least one: [`crate::backend::open`], or a test's own.
pub type OpenReplicas<'a> = &'a (dyn Fn(&dyn Checkpoint, &Options) -> Result<Vec<Box<dyn Replica>>> + Sync);

/// Makes the replica that stands in when all have failed.
pub type Reopen<'a> = &'a dyn Fn(&Options) -> Result<Box<dyn Replica>>;

/// How tokens are sampled: the fields of the program's sampler.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy: the token of the largest logit.
    pub temperature: f32,
    /// Nucleus sampling keeps the most probable tokens whose probabilities sum to more than this.
    pub topp: f32,
    /// State of request 0's random number generator; the other requests' states are derived from it.
    pub rng_state: u64,
}

impl Sampling {
    /// Whether each token is the argmax of its logits.
    fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }
}

/// Totals of all inferences so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Tokens stored in answers.
    pub tokens: u64,
    /// Tokens of the prompts that could be queued.
    pub prompt_tokens: u64,
    /// Steps.
    pub steps: u64,
    /// Seconds of wall time, encoding and printing included.
    pub seconds: f64,
    /// Seconds that the replicas' threads waited for their devices, summed over replicas.
    pub waiting_seconds: f64,
    /// Seconds that the replicas' threads sampled tokens, summed over replicas.
    pub drawing_seconds: f64,
}

/// The result of one inference.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Tokens stored in answers.
    pub tokens: u64,
    /// Why it stopped before all requests had their answer.
    pub failure: Option<Error>,
}

/// A model that is warmed up.
pub struct Engine {
    /// One per device; empty after all have failed.
    replicas: Vec<Pipeline>,
    config: ModelConfig,
    options: Options,
    /// Threads that encode prompts and sample tokens.
    workers: Workers,
    stats: Stats,
}

impl Engine {
    /// Packs the weights, allocates the KV cache, and prints a summary.
    pub fn warm_up(checkpoint: &dyn Checkpoint, mut options: Options, open: OpenReplicas<'_>) -> Result<Self> {
        options.threads = workers::within_reason(options.threads);
        let replicas = open(checkpoint, &options)?;
        Self::new(replicas, checkpoint.config(), options)
    }

    /// An engine with the given replicas.
    pub fn new(replicas: Vec<Box<dyn Replica>>, config: &ModelConfig, options: Options) -> Result<Self> {
        let workers = Workers::start("getp host", options.threads)?;
        if replicas.is_empty() {
            return Err(Error::State("there is no device to run on; see GETP_DEVICE".into()));
        }
        check_finite(&replicas, options.strict)?;
        let engine = Self {
            replicas: replicas.into_iter().map(Pipeline::new).collect(),
            config: config.clone(),
            options,
            workers,
            stats: Stats::default(),
        };
        engine.print_summary();
        Ok(engine)
    }

    /// Answers all requests, each into its own row. A request that cannot be answered gets an empty row and a line.
    /// A replica that fails is dropped, and its unfinished requests start again on the other replicas; if all have
    /// failed, on the replica that `reopen` returns. If that one fails too, the unfinished requests' rows stay empty.
    /// An error means that no request was started.
    pub fn inference(
        &mut self,
        tokenizer: &Tokenizer,
        sampling: &mut Sampling,
        requests: &mut Requests<'_>,
        reopen: Reopen<'_>,
    ) -> Result<Outcome> {
        let start = Instant::now();
        requests.clear_all();
        if requests.is_empty() {
            return Ok(Outcome::default());
        }
        self.check_vocabulary(tokenizer)?;
        self.drain();
        if self.replicas.is_empty() {
            self.reopen(reopen)?;
        }
        let prompts = self.encode(tokenizer, requests)?;
        let outcome = self.answer(tokenizer, sampling, requests, prompts, reopen)?;
        self.stats.tokens += outcome.tokens;
        self.stats.seconds += start.elapsed().as_secs_f64();
        self.print_profiles();
        Ok(outcome)
    }

    /// Totals of all inferences so far.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// The replicas; none after all have failed.
    pub fn replicas(&self) -> impl Iterator<Item = &dyn Replica> {
        self.replicas.iter().map(Pipeline::replica)
    }

    /// The model's dimensions.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Serves the queue with all replicas, and if all fail, with the one that `reopen` returns.
    fn answer(
        &mut self,
        tokenizer: &Tokenizer,
        sampling: &mut Sampling,
        requests: &mut Requests<'_>,
        prompts: Vec<Result<Prompt>>,
        reopen: Reopen<'_>,
    ) -> Result<Outcome> {
        let want = self.want(sampling);
        let streams = Streams::new(sampling.rng_state, requests.len())?;
        let mut answers = Answers::new(tokenizer, requests, &self.options)?;
        let waiting = self.admit(prompts, &mut answers)?;
        let run = Run {
            queue: Queue::new(waiting),
            answers: Mutex::new(answers),
            recorder: self.recorder(),
            streams,
            want,
        };
        let mut failure = self.serve(&run, *sampling)?;
        if run.queue.unfinished() > 0 {
            match self.reopen(reopen).and_then(|()| self.serve(&run, *sampling)) {
                Ok(last) => failure = last,
                Err(error) => report::line(format_args!("there is no other replica either: {error}")),
            }
        }
        sampling.rng_state = run.streams.first_state();
        let failure = failure.filter(|_| run.queue.unfinished() > 0);
        Ok(Outcome {
            tokens: run.end(),
            failure,
        })
    }

    /// Queues the requests that can be answered and refuses the others. A request must fit every replica, as any
    /// of them may take it.
    fn admit(&mut self, prompts: Vec<Result<Prompt>>, answers: &mut Answers<'_, '_>) -> Result<VecDeque<Unfinished>> {
        let limits = self.replicas().map(|replica| self.limits(replica).check());
        let limits = limits.collect::<Result<Vec<_>>>()?;
        let max_positions = answers.steps();
        let most_positions = self.replicas().map(Replica::max_positions).min().unwrap_or(0);
        let mut waiting = memory::room(prompts.len(), Purpose::Requests)?;
        for (request, prompt) in prompts.into_iter().enumerate() {
            let n_prompt = prompt.as_ref().map_or(0, |prompt| prompt.tokens.len());
            let fits = |limits: &Limits| limits.check_sequence(request, n_prompt, max_positions);
            let fits = || {
                limits
                    .iter()
                    .try_for_each(fits)
                    .and(in_reach(request, max_positions, most_positions))
            };
            match prompt.and_then(|prompt| fits().map(|()| prompt)) {
                Ok(prompt) => {
                    if prompt.is_cut {
                        answers.say_cut(request, n_prompt);
                    }
                    waiting.push(Unfinished {
                        request,
                        prompt: prompt.tokens,
                        max_positions,
                    });
                }
                Err(why @ Error::OutOfMemory { .. }) => return Err(why),
                Err(why) => answers.refuse(request, &why),
            }
        }
        self.stats.prompt_tokens += waiting.iter().map(|u| u.prompt.len() as u64).sum::<u64>();
        Ok(waiting.into())
    }

    /// Lets all replicas serve the queue and drops those that failed; returns the last failure.
    fn serve(&mut self, run: &Run<'_, '_>, sampling: Sampling) -> Result<Option<Error>> {
        let limits = self.replicas().map(|replica| self.limits(replica));
        let schedulers = limits.map(Scheduler::new).collect::<Result<Vec<_>>>()?;
        let pool = self.workers.pool();
        let threads = pool.current_num_threads().div_ceil(self.replicas.len());
        let workers = self.replicas.iter_mut().zip(schedulers).map(|(pipeline, scheduler)| {
            let device_draws = pipeline.replica().draws();
            let draws = Draws::new(self.config.vocab_size, sampling, threads, device_draws)?;
            Ok(Worker::new(run, pool, pipeline, scheduler, draws))
        });
        let served = run::serve(run, workers.collect::<Result<_>>()?);
        for served in &served {
            self.stats.steps += served.steps;
            self.stats.waiting_seconds += served.waiting.as_secs_f64();
            self.stats.drawing_seconds += served.drawing.as_secs_f64();
        }
        let mut failed = served.iter().map(|served| served.failure.is_some());
        self.replicas.retain(|_| !failed.next().unwrap_or(false));
        Ok(served.into_iter().filter_map(|served| served.failure).last())
    }

    /// Replaces the failed replicas by the one that `reopen` returns.
    fn reopen(&mut self, reopen: Reopen<'_>) -> Result<()> {
        report::line("no device is left; packing the weights for the CPU");
        self.replicas.push(Pipeline::new(reopen(&self.options)?));
        self.print_summary();
        Ok(())
    }

    /// Waits for steps that an inference left in flight when it panicked; drops the replicas that fail in them.
    fn drain(&mut self) {
        self.replicas.retain_mut(|pipeline| {
            let drained = pipeline.drain();
            if let Err(error) = &drained {
                report::line(format_args!("{} is given up: {error}", pipeline.replica().describe()));
            }
            drained.is_ok()
        });
    }

    fn recorder(&self) -> Option<Mutex<Recorder>> {
        let path = self.options.logits.as_deref()?;
        Some(Mutex::new(Recorder::create(path, self.config.vocab_size)))
    }

    fn print_summary(&self) {
        let replicas: Vec<_> = self.replicas().collect();
        summary::lines(&replicas).iter().for_each(report::line);
        let mut warnings = FewLines::new("more tensors have values that are not finite");
        for line in replicas
            .first()
            .map_or(&[][..], |first| &first.pack_report().non_finite)
        {
            warnings.line(format_args!("warning: {line}; what passes through it is no number"));
        }
        warnings.finish();
    }

    /// Prints each replica's profile, under its name if there are several.
    fn print_profiles(&self) {
        for replica in self.replicas() {
            if let Some(profile) = replica.profile() {
                if self.replicas.len() > 1 {
                    report::line(replica.describe());
                }
                profile.table().lines().for_each(report::line);
            }
            for part in replica.parts() {
                let Some(profile) = part.profile else { continue };
                report::line(part.name);
                profile.table().lines().for_each(report::line);
            }
        }
    }

    /// Tokenizer and model must have equally many tokens: a larger vocabulary has tokens without an embedding, a
    /// smaller one lacks the text of tokens that the model may generate.
    fn check_vocabulary(&self, tokenizer: &Tokenizer) -> Result<()> {
        if tokenizer.vocab_size() == self.config.vocab_size {
            return Ok(());
        }
        let why = format!(
            "it has {} tokens where the model has {}; they do not belong together",
            tokenizer.vocab_size(),
            self.config.vocab_size
        );
        Err(Error::format("tokenizer", why))
    }

    /// Each request's prompt in tokens, or why it has none.
    fn encode(&self, tokenizer: &Tokenizer, requests: &Requests<'_>) -> Result<Vec<Result<Prompt>>> {
        let length = PromptLength::of(&self.config, self.options.strict);
        let none = (0..requests.len()).map(|_| Ok(Prompt::default()));
        let mut prompts = memory::collect(none, Purpose::Requests)?;
        let encode = |(request, prompt): (usize, &mut _)| {
            *prompt = encode(tokenizer, request, requests.prompt(request), length);
        };
        self.workers
            .pool()
            .install(|| prompts.par_iter_mut().enumerate().for_each(encode));
        Ok(prompts)
    }

    /// What each step is to return. Recording needs all logits.
    fn want(&self, sampling: &Sampling) -> Want {
        let Sampling { temperature, topp, .. } = *sampling;
        match self.options.logits {
            Some(_) => Want::Logits,
            None if sampling.is_greedy() => Want::Greedy,
            None if device_may_draw(temperature) => Want::Draws { temperature, topp },
            None => Want::Logits,
        }
    }

    fn limits(&self, replica: &dyn Replica) -> Limits {
        Limits {
            record_all: self.options.logits.is_some(),
            ignore_end: self.options.ignore_end,
            ..limits(replica, &self.config)
        }
    }
}

/// The scheduler's limits for a replica, where logits are not recorded, the host samples and end tokens end answers.
pub fn limits(replica: &dyn Replica, config: &ModelConfig) -> Limits {
    let step_tokens = replica.max_step_tokens();
    let max_logits_rows = replica.max_logits_rows();
    let blocks = replica.kv_blocks();
    Limits {
        max_batch: max_logits_rows
            .min(step_tokens)
            .saturating_mul(steps_at_once(replica.depth())),
        step_tokens,
        chunk_tokens: replica.chunk_tokens().min(step_tokens),
        max_logits_rows,
        block_tokens: blocks.tokens,
        full_blocks: blocks.full,
        window_blocks: blocks.window,
        sliding_window: config.sliding_window,
        has_full_layers: config.windowed_layers() < config.n_layers,
        record_all: false,
        depth: replica.depth(),
        speculate: false,
        ignore_end: false,
    }
}

/// The most bytes of a prompt: the encoder counts in 32 bits.
const MAX_PROMPT_BYTES: usize = u32::MAX as usize - 1;

/// A request's prompt in tokens.
#[derive(Default)]
struct Prompt {
    tokens: Vec<u32>,
    /// Whether the text has more tokens than these.
    is_cut: bool,
}

/// How many tokens a prompt may have, and what is done with a longer one.
#[derive(Clone, Copy)]
enum PromptLength {
    /// The prompt is cut, as the evaluation program cuts it.
    Cut(usize),
    /// The prompt is refused, although the evaluation program would cut it.
    Strict(usize),
    /// The prompt is refused: the checkpoint says that the model has no more positions.
    Model(usize),
}

impl PromptLength {
    fn of(config: &ModelConfig, strict: bool) -> Self {
        match config.context_length {
            Some(most) => Self::Model(most),
            None if strict => Self::Strict(config.initial_context_length),
            None => Self::Cut(config.initial_context_length),
        }
    }
}

fn encode(tokenizer: &Tokenizer, request: usize, text: &[u8], length: PromptLength) -> Result<Prompt> {
    let refuse = |why: String| Err(Error::format(format!("request {request}"), why));
    match text.len() {
        0 => return refuse("it is empty; give it at least one character".into()),
        1..=MAX_PROMPT_BYTES => {}
        bytes => return refuse(format!("it has {bytes} bytes; {MAX_PROMPT_BYTES} are the most")),
    }
    let (PromptLength::Cut(most) | PromptLength::Strict(most) | PromptLength::Model(most)) = length;
    let mut tokens = tokenizer.encode(text, most + 1)?;
    let is_cut = tokens.len() > most;
    match length {
        PromptLength::Strict(_) if is_cut => refuse(format!(
            "its prompt has more than {most} tokens, the model's initial_context_length; \
             shorten it, or let it be cut there without GETP_STRICT"
        )),
        PromptLength::Model(_) if is_cut => refuse(format!(
            "its prompt has more than {most} tokens, and the model no more positions; shorten it"
        )),
        _ => {
            tokens.truncate(most);
            Ok(Prompt { tokens, is_cut })
        }
    }
}

/// Refuses a request with more positions than a device's table of rotary embeddings.
fn in_reach(request: usize, positions: usize, most: usize) -> Result<()> {
    if positions <= most {
        return Ok(());
    }
    let why = format!("its {positions} positions are more than the {most} that the device takes; ask for fewer steps");
    Err(Error::format(format!("request {request}"), why))
}

/// Refuses weights that are infinite or NaN if `strict`.
fn check_finite(replicas: &[Box<dyn Replica>], strict: bool) -> Result<()> {
    let first = replicas
        .first()
        .and_then(|first| first.pack_report().non_finite.first());
    match first.filter(|_| strict) {
        Some(line) => Err(Error::format("weights", format!("{line}; GETP_STRICT=1 refuses them"))),
        None => Ok(()),
    }
}
