//! The engine behind warm_up, inference and finish: from the program's requests to their answers.
//!
//! Nothing here knows a device or a C pointer: `abi` passes a checkpoint, a vocabulary and checked request buffers,
//! and `backend` the replicas.

mod answers;
mod in_flight;
mod ledger;
mod machine;
mod member;
mod queue;
mod ranks;
mod rows;
mod run;
mod scores;
mod service;
mod step_sampler;
mod summary;
mod totals;

use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::logits::Recorder;
use crate::memory::{self, Purpose};
use crate::options::Options;
use crate::random::request_seed;
use crate::replica::Replica;
use crate::report::{self, FewLines, Severity};
use crate::request::{EndTokens, LogProbs, Outlet, Request, Sampling};
use crate::requests::Requests;
use crate::scheduler::{Limits, Scheduler, steps_at_once};
use crate::tokenizer::Tokenizer;
use crate::workers::{self, Workers};
use answers::{Answers, Remark};
use in_flight::InFlight;
pub use ledger::{Ending, Event, Times};
use queue::Queue;
pub use ranks::{Protocol, RankInputs, Ranks};
use rayon::prelude::*;
use run::{Results, Run, Worker, WorkerResult};
pub use service::{Ask, Service};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use step_sampler::StepSampler;
pub use totals::{Stats, Totals};

/// Makes a replica on each device there is, at least one: [`crate::backend::open`], or a test's own.
pub type OpenReplicas<'a> = &'a (dyn Fn(&dyn Checkpoint, &Options) -> Result<Vec<Box<dyn Replica>>> + Sync);

/// Makes the replica that stands in when all have failed.
pub type Reopen<'a> = &'a dyn Fn(&Options) -> Result<Box<dyn Replica>>;

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
    replicas: Vec<InFlight>,
    config: ModelConfig,
    options: Options,
    /// Threads that encode prompts and sample tokens.
    workers: Workers,
    totals: Arc<Totals>,
    /// The other ranks, if this process is one of several.
    ranks: Option<Ranks>,
    /// How many tokens may be sampled; `None`: all.
    drawable: Option<usize>,
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
        let totals = Totals::default();
        totals.set_replicas(replicas.iter().map(|replica| &**replica));
        Ok(Self {
            replicas: replicas.into_iter().map(InFlight::new).collect(),
            config: config.clone(),
            options,
            workers,
            totals: totals.into(),
            ranks: None,
            drawable: None,
        })
    }

    /// From the next inference or service on, the model's ids from `tokens` on are never sampled: those that its
    /// vocabulary is padded with. `None`, as at first: all may be. Log-probabilities are over all ids in any case.
    pub fn draw_below(&mut self, tokens: Option<usize>) {
        let models = self.config.vocab_size;
        let drawable = tokens.filter(|&tokens| tokens < models);
        if let Some(tokens) = drawable.filter(|_| drawable != self.drawable && self.speaks()) {
            report::line(format_args!(
                "the model has {models} ids and the tokenizer {tokens}; the others are never sampled"
            ));
        }
        self.drawable = drawable;
    }

    /// Answers all requests, each into its own row. A request that cannot be answered gets an empty row and a line.
    /// A replica that fails is dropped, and its unfinished requests start again on the other replicas; if all have
    /// failed, or have no room for a request that others had, on the replica that `reopen` returns. If that one fails
    /// too, the unfinished requests' rows stay empty. An error means that no request was started.
    pub fn inference(
        &mut self,
        tokenizer: &Tokenizer,
        sampling: &mut Sampling,
        requests: &mut Requests<'_>,
        reopen: Reopen<'_>,
    ) -> Result<Outcome> {
        let start = Instant::now();
        requests.clear_all();
        let outcome = match self.ranks.clone() {
            Some(ranks) => ranks.inference(self, tokenizer, sampling, requests, reopen),
            None => self.answer_alone(tokenizer, sampling, requests, reopen),
        }?;
        if requests.is_empty() {
            return Ok(outcome);
        }
        self.totals.add_tokens(outcome.tokens);
        self.totals.add_busy(start.elapsed());
        self.print_profiles();
        Ok(outcome)
    }

    /// Totals of all inferences so far.
    pub fn stats(&self) -> Stats {
        self.totals.read()
    }

    /// The counters behind [`Self::stats`].
    pub fn totals(&self) -> Arc<Totals> {
        self.totals.clone()
    }

    /// The replicas; none after all have failed.
    pub fn replicas(&self) -> impl Iterator<Item = &dyn Replica> {
        self.replicas.iter().map(InFlight::replica)
    }

    /// The options that it was warmed up with.
    pub fn options(&self) -> &Options {
        &self.options
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
        let recorder = self.recorder()?;
        self.drain();
        if self.replicas.is_empty() {
            self.reopen(reopen)?;
        }
        let prompts = self.encode(tokenizer, requests)?;
        let max_positions = requests.positions(self.options.steps);
        let mut answers = Answers::new(tokenizer, requests, &prompts, max_positions, &self.options)?;
        let rooms = self
            .replicas()
            .map(|replica| (replica.describe(), self.limits(replica)));
        let rooms = memory::collect(rooms, Purpose::Requests)?;
        let asked = self.requests(prompts, max_positions, sampling);
        let waiting = self.admit(asked, &rooms, |request, remark| answers.say(request, remark))?;
        let run = Run {
            queue: Queue::new(waiting).into(),
            results: Results::Stored(Box::new(Mutex::new(answers))),
            recorder,
            totals: self.totals.clone(),
        };
        let mut failure = self.serve(&run, sampling)?;
        if run.queue.unfinished() > 0 {
            match self.reopen(reopen).and_then(|()| self.serve(&run, sampling)) {
                Ok(last) => {
                    failure = last;
                    run.refuse_unfit();
                }
                Err(error) => report::error(format_args!("there is no other replica either: {error}")),
            }
            self.dismiss_stand_in();
        }
        let failure = failure.filter(|_| run.queue.unfinished() > 0);
        let stored = run.end();
        sampling.rng_state = stored.first_state.unwrap_or(sampling.rng_state);
        Ok(Outcome {
            tokens: stored.tokens,
            failure,
        })
    }

    /// What the program asks for: a request for each prompt, or why there is none.
    fn requests(
        &self,
        prompts: Vec<Result<Prompt>>,
        max_positions: usize,
        sampling: &Sampling,
    ) -> impl Iterator<Item = Result<(Request, bool)>> + use<> {
        let ends = match self.options.ignore_end {
            true => EndTokens::default(),
            false => EndTokens::new(&EndTokens::RELEASED),
        };
        let (ends, sampling) = (Arc::new(ends), *sampling);
        prompts.into_iter().enumerate().map(move |(number, prompt)| {
            prompt.map(|prompt| {
                let request = Request {
                    number,
                    prompt: prompt.tokens,
                    max_positions,
                    sampling: Sampling {
                        rng_state: request_seed(sampling.rng_state, number),
                        ..sampling
                    },
                    ends: ends.clone(),
                    min_tokens: 0,
                    outlet: Outlet::Whole,
                    logprobs: LogProbs::default(),
                    grammar: None,
                    answered: 0,
                    lost: 0,
                };
                (request, prompt.is_cut)
            })
        })
    }

    /// The requests that can be answered: those that fit one of the replicas, which have names and limits. `say` is
    /// told of the others, and of prompts that are cut.
    fn admit(
        &mut self,
        asked: impl Iterator<Item = Result<(Request, bool)>>,
        replicas: &[(String, Limits)],
        mut say: impl FnMut(usize, Remark),
    ) -> Result<VecDeque<Request>> {
        for (_, limits) in replicas {
            limits.clone().check()?;
        }
        let mut waiting = memory::room(asked.size_hint().0, Purpose::Requests)?;
        for (number, asked) in asked.enumerate() {
            let (request, is_cut) = match asked {
                Ok(asked) => asked,
                Err(why @ Error::OutOfMemory { .. }) => return Err(why),
                Err(why) => {
                    say(number, Remark::Refused(why));
                    continue;
                }
            };
            if let Some(why) = queue::refusal(&request, replicas.iter().map(|(_, limits)| limits)) {
                say(number, Remark::Refused(why));
                continue;
            }
            if is_cut {
                say(number, Remark::Cut(request.prompt.len()));
            }
            memory::push(&mut waiting, request, Purpose::Requests)?;
        }
        if self.speaks() {
            warn_of_small_replicas(replicas, &waiting);
        }
        let prompt_tokens = waiting.iter().map(|request| request.prompt.len() as u64);
        self.totals.add_prompt_tokens(prompt_tokens.sum());
        Ok(waiting.into())
    }

    /// Lets all replicas serve the queue and drops those that failed; returns the last failure.
    fn serve(&mut self, run: &Run<'_, '_>, sampling: &Sampling) -> Result<Option<Error>> {
        let served = run::serve(run, self.workers(run, sampling)?)?;
        Ok(self.count(served.into_iter().map(Some).collect()))
    }

    /// Serves requests that arrive while others run, until the service is closed. A replica that fails is dropped, and
    /// its unfinished requests go on where others have room for them; the others of them fail. If all replicas have
    /// failed, one that `reopen` returns takes over. An error means that the requests without an end get none from this
    /// engine.
    pub fn serve_all(&mut self, service: &Service, reopen: Reopen<'_>) -> Result<()> {
        let recorder = self.recorder()?;
        self.drain();
        let run = Run {
            queue: service.queue.clone(),
            results: Results::Ledger(&service.ledger),
            recorder,
            totals: self.totals.clone(),
        };
        let served = self.serve_until_closed(&run, reopen);
        run.end();
        self.dismiss_stand_in();
        self.print_profiles();
        served
    }

    fn serve_until_closed(&mut self, run: &Run<'_, '_>, reopen: Reopen<'_>) -> Result<()> {
        while !run.queue.is_stopped() {
            if self.replicas.is_empty() {
                self.reopen(reopen)?;
            }
            let stands_in = self.replicas.iter().all(|in_flight| in_flight.stands_in);
            let failure = self.serve(run, &Sampling::WIDEST)?;
            if let Some(why) = failure.filter(|_| stands_in) {
                return Err(why);
            }
        }
        Ok(())
    }

    /// A service that [`Self::serve_all`] may serve.
    pub fn service(&self) -> Result<Service> {
        if let Some(ranks) = self.ranks.as_ref().filter(|ranks| ranks.count() > 1) {
            return Err(Error::State(format!(
                "a batch takes requests of one process, and there are {} ranks; start a single process, or call inference",
                ranks.count()
            )));
        }
        let service = Service::new(self.totals.clone(), &self.config);
        // Until an engine serves it, so that a request that none of its replicas takes is refused at once.
        service
            .queue
            .begin(self.replicas().map(|replica| self.limits(replica)))?;
        Ok(service)
    }

    /// A worker for each replica, with room for requests with this sampling.
    fn workers<'p, 'a, 'r>(&'p mut self, run: &'p Run<'a, 'r>, sampling: &Sampling) -> Result<Vec<Worker<'p, 'a, 'r>>> {
        let limits: Vec<_> = self.replicas().map(|replica| self.limits(replica)).collect();
        let caches = self.replicas.iter_mut().map(|in_flight| in_flight.cache.take());
        let schedulers = limits.into_iter().zip(caches).map(|(limits, cache)| match cache {
            Some(cache) => Scheduler::with_cache(limits, cache),
            None => Scheduler::new(limits),
        });
        let schedulers = schedulers.collect::<Result<Vec<_>>>()?;
        let pool = self.workers.pool();
        let threads = pool.current_num_threads().div_ceil(self.replicas.len().max(1));
        let replicas = self.replicas.iter_mut().zip(schedulers).enumerate();
        let workers = replicas.map(|(replica, (in_flight, scheduler))| {
            let device_draws = in_flight.replica().draws();
            in_flight.drawable = self.drawable;
            let vocab = self.config.vocab_size;
            let mut sampler = StepSampler::new(vocab, self.drawable.unwrap_or(vocab), threads, device_draws)?;
            sampler.make_room(sampling)?;
            Worker::new(run, replica, pool, in_flight, scheduler, sampler)
        });
        workers.collect()
    }

    /// Drops the replicas that failed or whose worker has panicked; returns the last failure.
    fn count(&mut self, served: Vec<Option<WorkerResult>>) -> Option<Error> {
        let works = |served: &Option<WorkerResult>| served.as_ref().is_some_and(Result::is_ok);
        let mut works = served.iter().map(works);
        self.replicas.retain(|_| works.next().unwrap_or(true));
        self.totals.set_replicas(self.replicas());
        served.into_iter().flatten().filter_map(Result::err).last()
    }

    /// Adds the replica that `reopen` returns, for what those that failed have left.
    fn reopen(&mut self, reopen: Reopen<'_>) -> Result<()> {
        report::warning(match self.replicas.is_empty() {
            true => "no device is left; packing the weights for the CPU",
            false => "no device that is left has room for some requests; packing the weights for the CPU",
        });
        let mut in_flight = InFlight::new(reopen(&self.options)?);
        in_flight.stands_in = true;
        self.replicas.push(in_flight);
        self.totals.set_replicas(self.replicas());
        self.print_summary();
        Ok(())
    }

    /// Drops the replica that stands in, where others work: the next run would wait for its share.
    fn dismiss_stand_in(&mut self) {
        if self.replicas.iter().any(|in_flight| !in_flight.stands_in) {
            self.replicas.retain(|in_flight| !in_flight.stands_in);
            self.totals.set_replicas(self.replicas());
        }
    }

    /// Waits for steps that an inference left in flight when it panicked; drops the replicas that fail in them.
    fn drain(&mut self) {
        self.replicas.retain_mut(|in_flight| {
            let drained = in_flight.drain();
            if let Err(error) = &drained {
                report::warning(format_args!("{} is given up: {error}", in_flight.replica().describe()));
                self.totals.lose_replica();
            }
            drained.is_ok()
        });
    }

    fn recorder(&self) -> Result<Option<Mutex<Recorder>>> {
        let path = self.options.logits.as_deref();
        let recorder = path.map(|path| Recorder::create(path, self.config.vocab_size));
        Ok(recorder.transpose()?.map(Mutex::new))
    }

    /// Whether this process prints what it has in common with other ranks.
    pub fn speaks(&self) -> bool {
        self.ranks.as_ref().is_none_or(Ranks::speaks)
    }

    fn print_summary(&self) {
        let replicas: Vec<_> = self.replicas().collect();
        let speaks = self.speaks();
        if speaks {
            summary::kind_lines(&replicas).iter().for_each(report::line);
        }
        let longest = self.options.longest_sequence(&self.config);
        let room = |replica: &dyn Replica| summary::room(&self.limits(replica), longest);
        summary::replica_lines(&replicas, room).iter().for_each(report::line);
        if !speaks {
            return;
        }
        let mut warnings = FewLines::new(Severity::Warning, "more tensors have values that are not finite");
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
        let totals = self.totals.read();
        if self.options.profile {
            report::line(format_args!(
                "{} tokens of prompts so far were not computed, since others had begun with the same ones",
                totals.shared_tokens
            ));
            report::line(format_args!(
                "{} tokens so far were computed again, since their sequences had been preempted",
                totals.recomputed_tokens
            ));
        }
        for replica in self.replicas() {
            if let Some(profile) = replica.profile() {
                if self.replicas.len() > 1 {
                    report::line(replica.describe());
                }
                profile.table().lines().for_each(report::line);
            }
            for stage in replica.stages() {
                let Some(profile) = stage.profile else { continue };
                report::line(stage.name);
                profile.table().lines().for_each(report::line);
            }
        }
    }

    /// The tokenizer must have as many tokens as the model may generate: a larger vocabulary has tokens without an
    /// embedding, a smaller one lacks the text of some.
    fn check_vocabulary(&self, tokenizer: &Tokenizer) -> Result<()> {
        let models = self.drawable.unwrap_or(self.config.vocab_size);
        if tokenizer.vocab_size() == models {
            return Ok(());
        }
        let why = format!(
            "it has {} tokens where the model has {models}; they do not belong together",
            tokenizer.vocab_size(),
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

    fn limits(&self, replica: &dyn Replica) -> Limits {
        Limits {
            record_all: self.options.logits.is_some(),
            ..limits(replica, &self.config)
        }
    }
}

/// The scheduler's limits for a replica, where logits are not recorded and the host samples.
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
        max_positions: replica.max_positions(),
        block_tokens: blocks.tokens,
        blocks: blocks.count,
        sliding_window: config.sliding_window,
        has_full_layers: config.windowed_layers() < config.n_layers,
        record_all: false,
        share_beginnings: true,
        share_answers: replica.decodes_as_prompts(),
        depth: replica.depth(),
        plans_ahead: false,
    }
}

/// Says of each replica for how many of the requests, which others take, it has no room, and why for the last one.
fn warn_of_small_replicas(replicas: &[(String, Limits)], waiting: &[Request]) {
    for (name, limits) in replicas {
        let unfit = waiting.iter().filter(|request| !limits.take(request));
        let last = unfit.enumerate().last();
        if let Some((others, Err(why))) = last.map(|(others, request)| (others, limits.check_request(request))) {
            report::warning(format_args!(
                "{name} has no room for {} of the requests, others have: {why}",
                others + 1
            ));
        }
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

/// Refuses weights that are infinite or NaN if the options say so.
fn check_finite(replicas: &[Box<dyn Replica>], options: &Options) -> Result<()> {
    let first = replicas
        .first()
        .and_then(|first| first.pack_report().non_finite.first());
    match first.filter(|_| options.strict) {
        Some(line) => {
            let why = format!("{line}; {}=1 refuses them", options.names.strict);
            Err(Error::unsupported("weights", why))
        }
        None => Ok(()),
    }
}
