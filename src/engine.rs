//! The engine behind warm_up, inference and finish: from the program's requests to their answers.
//!
//! Nothing here knows a device or a C pointer: `abi` passes a checkpoint, a vocabulary and checked request buffers,
//! and `backend` the replicas.

mod answers;
mod draws;
#[cfg(feature = "mpi")]
mod machine;
#[cfg(feature = "mpi")]
mod member;
mod pipeline;
mod queue;
#[cfg(feature = "mpi")]
mod ranks;
#[cfg(feature = "mpi")]
mod rows;
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
use crate::report::{self, FewLines, Kind};
use crate::requests::Requests;
use crate::sampler::device_may_draw;
use crate::scheduler::{Limits, Scheduler, Unfinished, steps_at_once};
use crate::tokenizer::Tokenizer;
use crate::workers::{self, Workers};
use answers::{Answers, Remark};
use draws::{Draws, Streams};
use pipeline::Pipeline;
use queue::Queue;
#[cfg(feature = "mpi")]
pub use ranks::{Begun, Ranks};
use rayon::prelude::*;
use run::{Results, Run, Served, Worker};
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
    /// The other ranks, if this process is one of several.
    #[cfg(feature = "mpi")]
    ranks: Option<Ranks>,
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
        if replicas.is_empty() {
            return Err(Error::State("there is no device to run on; see GETP_DEVICE".into()));
        }
        check_finite(&replicas, &options)?;
        let engine = Self::assemble(replicas, config, options)?;
        engine.print_summary();
        Ok(engine)
    }

    fn assemble(replicas: Vec<Box<dyn Replica>>, config: &ModelConfig, options: Options) -> Result<Self> {
        let workers = Workers::start("getp host", options.threads)?;
        Ok(Self {
            replicas: replicas.into_iter().map(Pipeline::new).collect(),
            config: config.clone(),
            options,
            workers,
            stats: Stats::default(),
            #[cfg(feature = "mpi")]
            ranks: None,
        })
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
        #[cfg(feature = "mpi")]
        let outcome = match self.ranks.clone() {
            Some(ranks) => self.answer_among(&ranks, tokenizer, sampling, requests, reopen),
            None => self.answer_alone(tokenizer, sampling, requests, reopen),
        }?;
        #[cfg(not(feature = "mpi"))]
        let outcome = self.answer_alone(tokenizer, sampling, requests, reopen)?;
        if requests.is_empty() {
            return Ok(outcome);
        }
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
    fn answer_alone(
        &mut self,
        tokenizer: &Tokenizer,
        sampling: &mut Sampling,
        requests: &mut Requests<'_>,
        reopen: Reopen<'_>,
    ) -> Result<Outcome> {
        if requests.is_empty() {
            return Ok(Outcome::default());
        }
        self.check_vocabulary(tokenizer)?;
        self.drain();
        if self.replicas.is_empty() {
            self.reopen(reopen)?;
        }
        let prompts = self.encode(tokenizer, requests)?;
        let want = self.want(sampling);
        let streams = Streams::new(sampling.rng_state, requests.len())?;
        let max_positions = requests.positions(self.options.steps);
        let mut answers = Answers::new(tokenizer, requests, &self.options)?;
        let room = self.replicas().map(|replica| self.room(replica));
        let room = memory::collect(room, Purpose::Requests)?;
        let waiting = self.admit(prompts, max_positions, &room, |request, remark| {
            answers.say(request, remark)
        })?;
        let run = Run {
            queue: Queue::new(waiting),
            results: Results::Stored(Mutex::new(answers)),
            recorder: self.recorder(),
            streams,
            want,
        };
        let mut failure = self.serve(&run, *sampling)?;
        if run.queue.unfinished() > 0 {
            match self.reopen(reopen).and_then(|()| self.serve(&run, *sampling)) {
                Ok(last) => failure = last,
                Err(error) => report::error(format_args!("there is no other replica either: {error}")),
            }
        }
        sampling.rng_state = run.streams.first_state();
        let failure = failure.filter(|_| run.queue.unfinished() > 0);
        Ok(Outcome {
            tokens: run.end(),
            failure,
        })
    }

    /// The requests that can be answered; `say` is told of the others, and of prompts that are cut. A request must fit
    /// every replica, as any of them may take it.
    fn admit(
        &mut self,
        prompts: Vec<Result<Prompt>>,
        max_positions: usize,
        replicas: &[Room],
        mut say: impl FnMut(usize, Remark),
    ) -> Result<VecDeque<Unfinished>> {
        for replica in replicas {
            replica.limits.clone().check()?;
        }
        let mut waiting = memory::room(prompts.len(), Purpose::Requests)?;
        for (request, prompt) in prompts.into_iter().enumerate() {
            let n_prompt = prompt.as_ref().map_or(0, |prompt| prompt.tokens.len());
            let fits = |replica: &Room| replica.check(request, n_prompt, max_positions);
            match prompt.and_then(|prompt| replicas.iter().try_for_each(fits).map(|()| prompt)) {
                Ok(prompt) => {
                    if prompt.is_cut {
                        say(request, Remark::Cut(n_prompt));
                    }
                    waiting.push(Unfinished {
                        request,
                        prompt: prompt.tokens,
                        max_positions,
                    });
                }
                Err(why @ Error::OutOfMemory { .. }) => return Err(why),
                // The program computes the prompt, and is through with it when it would sample the first token.
                Err(why) if n_prompt == max_positions + 1 => say(request, Remark::Full(why)),
                Err(why) => say(request, Remark::Refused(why)),
            }
        }
        self.stats.prompt_tokens += waiting.iter().map(|u| u.prompt.len() as u64).sum::<u64>();
        Ok(waiting.into())
    }

    /// Lets all replicas serve the queue and drops those that failed; returns the last failure.
    fn serve(&mut self, run: &Run<'_, '_>, sampling: Sampling) -> Result<Option<Error>> {
        let served = run::serve(run, self.workers(run, sampling)?);
        Ok(self.count(served.into_iter().map(Some).collect()))
    }

    /// A worker for each replica.
    fn workers<'p, 'a, 'r>(&'p mut self, run: &'p Run<'a, 'r>, sampling: Sampling) -> Result<Vec<Worker<'p, 'a, 'r>>> {
        let limits = self.replicas().map(|replica| self.limits(replica));
        let schedulers = limits.map(Scheduler::new).collect::<Result<Vec<_>>>()?;
        let pool = self.workers.pool();
        let threads = pool.current_num_threads().div_ceil(self.replicas.len().max(1));
        let workers = self.replicas.iter_mut().zip(schedulers).map(|(pipeline, scheduler)| {
            let device_draws = pipeline.replica().draws();
            let draws = Draws::new(self.config.vocab_size, sampling, threads, device_draws)?;
            Ok(Worker::new(run, pool, pipeline, scheduler, draws))
        });
        workers.collect()
    }

    /// Adds up what each replica's worker has done, and drops the replicas that failed or whose worker has panicked;
    /// returns the last failure.
    fn count(&mut self, served: Vec<Option<Served>>) -> Option<Error> {
        for served in served.iter().flatten() {
            self.stats.steps += served.steps;
            self.stats.waiting_seconds += served.waiting.as_secs_f64();
            self.stats.drawing_seconds += served.drawing.as_secs_f64();
        }
        let works = |served: &Option<Served>| served.as_ref().is_some_and(|served| served.failure.is_none());
        let mut works = served.iter().map(works);
        self.replicas.retain(|_| works.next().unwrap_or(true));
        served.into_iter().flatten().filter_map(|served| served.failure).last()
    }

    /// Replaces the failed replicas by the one that `reopen` returns.
    fn reopen(&mut self, reopen: Reopen<'_>) -> Result<()> {
        report::warning("no device is left; packing the weights for the CPU");
        self.replicas.push(Pipeline::new(reopen(&self.options)?));
        self.print_summary();
        Ok(())
    }

    /// Waits for steps that an inference left in flight when it panicked; drops the replicas that fail in them.
    fn drain(&mut self) {
        self.replicas.retain_mut(|pipeline| {
            let drained = pipeline.drain();
            if let Err(error) = &drained {
                report::warning(format_args!("{} is given up: {error}", pipeline.replica().describe()));
            }
            drained.is_ok()
        });
    }

    fn recorder(&self) -> Option<Mutex<Recorder>> {
        let path = self.options.logits.as_deref()?;
        Some(Mutex::new(Recorder::create(path, self.config.vocab_size)))
    }

    /// Whether this process prints what it has in common with other ranks.
    fn speaks(&self) -> bool {
        #[cfg(feature = "mpi")]
        return self.ranks.as_ref().is_none_or(Ranks::speaks);
        #[cfg(not(feature = "mpi"))]
        true
    }

    fn print_summary(&self) {
        let replicas: Vec<_> = self.replicas().collect();
        let speaks = self.speaks();
        if speaks {
            summary::kind_lines(&replicas).iter().for_each(report::line);
        }
        summary::replica_lines(&replicas).iter().for_each(report::line);
        if !speaks {
            return;
        }
        let mut warnings = FewLines::new(Kind::Warning, "more tensors have values that are not finite");
        for line in replicas
            .first()
            .map_or(&[][..], |first| &first.pack_report().non_finite)
        {
            warnings.line(format_args!("{line}; what passes through it is no number"));
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
        let length = PromptLength::of(&self.config, &self.options);
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

    /// What a request must fit to run on a replica.
    fn room(&self, replica: &dyn Replica) -> Room {
        Room {
            limits: self.limits(replica),
            max_positions: replica.max_positions(),
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

/// What a request must fit to run on a replica.
#[derive(Clone)]
struct Room {
    limits: Limits,
    /// See [`Replica::max_positions`].
    max_positions: usize,
}

impl Room {
    fn check(&self, request: usize, n_prompt: usize, max_positions: usize) -> Result<()> {
        self.limits.check_sequence(request, n_prompt, max_positions)?;
        in_reach(request, max_positions, self.max_positions)
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
    /// The prompt is refused, although the evaluation program would cut it, as the option of this name says.
    Strict(usize, &'static str),
    /// The prompt is refused: the checkpoint says that the model has no more positions.
    Model(usize),
}

impl PromptLength {
    fn of(config: &ModelConfig, options: &Options) -> Self {
        match config.context_length {
            Some(most) => Self::Model(most),
            None if options.strict => Self::Strict(config.initial_context_length, options.names.strict),
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
    let (PromptLength::Cut(most) | PromptLength::Strict(most, _) | PromptLength::Model(most)) = length;
    let mut tokens = tokenizer.encode(text, most + 1)?;
    let is_cut = tokens.len() > most;
    match length {
        PromptLength::Strict(_, strict) if is_cut => refuse(format!(
            "its prompt has more than {most} tokens, the model's initial_context_length; \
             shorten it, or let it be cut there without {strict}"
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

/// Refuses weights that are infinite or NaN if the options say so.
fn check_finite(replicas: &[Box<dyn Replica>], options: &Options) -> Result<()> {
    let first = replicas
        .first()
        .and_then(|first| first.pack_report().non_finite.first());
    match first.filter(|_| options.strict) {
        Some(line) => {
            let why = format!("{line}; {}=1 refuses them", options.names.strict);
            Err(Error::format("weights", why))
        }
        None => Ok(()),
    }
}
