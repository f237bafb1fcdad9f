//! warm_up, inference and finish in words: the one path of the data, from the program's requests to their answers.
//!
//! Nothing here knows a device or a C pointer: `abi` brings a checkpoint, a vocabulary and checked request buffers,
//! and `backend` a replica.

mod answers;
mod draws;

use crate::batch::StepPlan;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::logits::Recorder;
use crate::model::ModelConfig;
use crate::options::Options;
use crate::replica::{Replica, StepOutput, Want};
use crate::report;
use crate::requests::Requests;
use crate::scheduler::{Limits, Scheduler};
use crate::tokenizer::Tokenizer;
use crate::workers::Workers;
use answers::Answers;
use draws::Draws;
use rayon::ThreadPool;
use rayon::prelude::*;
use std::time::Instant;

/// Makes a replica: [`crate::backend::open`], or a test's own.
pub type OpenReplica<'a> = &'a (dyn Fn(&dyn Checkpoint, &Options) -> Result<Box<dyn Replica>> + Sync);

/// How to draw tokens, as the program's sampler says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// The mass of the nucleus.
    pub topp: f32,
    /// The state of request 0's random stream, from which the other requests' follow.
    pub rng_state: u64,
}

/// What all inferences so far took and gave.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Tokens stored in answers.
    pub tokens: u64,
    /// Tokens of the prompts that could be queued.
    pub prompt_tokens: u64,
    /// Steps.
    pub steps: u64,
    /// Seconds, encoding and printing included.
    pub seconds: f64,
}

/// What one inference gave.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Tokens stored in answers.
    pub tokens: u64,
    /// Why it stopped before all requests had their answer.
    pub failure: Option<Error>,
}

/// A model that is warmed up.
pub struct Engine {
    replica: Box<dyn Replica>,
    config: ModelConfig,
    options: Options,
    /// Encodes prompts and draws tokens.
    workers: Workers,
    stats: Stats,
}

impl Engine {
    /// Packs the weights, makes room for the KV cache, and says what became of it all.
    pub fn warm_up(checkpoint: &dyn Checkpoint, options: Options, open: OpenReplica<'_>) -> Result<Self> {
        let workers = Workers::start("getp host", options.threads)?;
        let replica = open(checkpoint, &options)?;
        report::summary(&*replica).iter().for_each(report::line);
        Ok(Self {
            replica,
            config: checkpoint.config().clone(),
            options,
            workers,
            stats: Stats::default(),
        })
    }

    /// Answers all requests, each into its own row. A request that cannot be answered gets an empty row and a line;
    /// if a step fails, those not finished keep theirs empty. Fails itself only if it could not begin.
    pub fn inference(
        &mut self,
        tokenizer: &Tokenizer,
        sampling: &mut Sampling,
        requests: &mut Requests<'_>,
    ) -> Result<Outcome> {
        let start = Instant::now();
        requests.clear_all();
        if requests.is_empty() {
            return Ok(Outcome::default());
        }
        self.check_vocabulary(tokenizer)?;
        let prompts = self.encode(tokenizer, requests);
        let mut run = self.begin(tokenizer, *sampling, requests)?;
        run.submit(prompts);
        let failure = run.all_steps().err();
        sampling.rng_state = run.draws.first_state();
        let tokens = run.end();
        self.stats.tokens += tokens;
        self.stats.seconds += start.elapsed().as_secs_f64();
        self.print_profile();
        Ok(Outcome { tokens, failure })
    }

    /// What all inferences so far took and gave.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// The model's copy on its device.
    pub fn replica(&self) -> &dyn Replica {
        &*self.replica
    }

    /// The model's dimensions.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Everything one inference needs beside the prompts.
    fn begin<'a, 'r>(
        &'a mut self,
        tokenizer: &'a Tokenizer,
        sampling: Sampling,
        requests: &'a mut Requests<'r>,
    ) -> Result<Run<'a, 'r>> {
        let vocab = self.config.vocab_size;
        let logits = self.options.logits.as_deref();
        Ok(Run {
            scheduler: Scheduler::new(self.limits())?,
            draws: Draws::new(
                vocab,
                sampling,
                requests.len(),
                self.workers.pool().current_num_threads(),
            ),
            recorder: logits.map(|path| Recorder::create(path, vocab)),
            answers: Answers::new(tokenizer, requests, &self.options),
            replica: &mut *self.replica,
            pool: self.workers.pool(),
            stats: &mut self.stats,
        })
    }

    fn print_profile(&self) {
        if let Some(profile) = self.replica.profile() {
            profile.table().lines().for_each(report::line);
        }
    }

    /// A vocabulary larger than the model's would feed it tokens it has no embedding for.
    fn check_vocabulary(&self, tokenizer: &Tokenizer) -> Result<()> {
        if tokenizer.vocab_size() <= self.config.vocab_size {
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
    fn encode(&self, tokenizer: &Tokenizer, requests: &Requests<'_>) -> Vec<Result<Vec<u32>>> {
        let most = self.config.initial_context_length;
        let encode = |request| encode(tokenizer, request, requests.prompt(request), most);
        self.workers
            .pool()
            .install(|| (0..requests.len()).into_par_iter().map(encode).collect())
    }

    fn limits(&self) -> Limits {
        let (config, replica) = (&self.config, &self.replica);
        let step_tokens = self.options.step_tokens.min(replica.max_step_tokens());
        let max_logits_rows = replica.max_logits_rows();
        let blocks = replica.kv_blocks();
        Limits {
            max_batch: self.options.max_batch.min(step_tokens).min(max_logits_rows),
            step_tokens,
            // A prompt alone may fill the step.
            chunk_tokens: step_tokens,
            max_logits_rows,
            full_blocks: blocks.full,
            window_blocks: blocks.window,
            sliding_window: config.sliding_window,
            has_full_layers: config.windowed_layers() < config.n_layers,
            record_all: self.options.logits.is_some(),
        }
    }
}

/// One inference while it runs.
struct Run<'a, 'r> {
    scheduler: Scheduler,
    replica: &'a mut dyn Replica,
    pool: &'a ThreadPool,
    answers: Answers<'a, 'r>,
    draws: Draws,
    recorder: Option<Recorder>,
    stats: &'a mut Stats,
}

impl Run<'_, '_> {
    /// Queues the requests that can be answered and refuses the others.
    fn submit(&mut self, prompts: Vec<Result<Vec<u32>>>) {
        let steps = self.answers.steps();
        for (request, prompt) in prompts.into_iter().enumerate() {
            let prompt_tokens = prompt.as_ref().map_or(0, Vec::len) as u64;
            match prompt.and_then(|prompt| self.scheduler.submit(request, prompt, steps)) {
                Ok(()) => self.stats.prompt_tokens += prompt_tokens,
                Err(why) => self.answers.refuse(request, &why),
            }
        }
    }

    /// Plan, step, draw, commit, until every request has its answer.
    fn all_steps(&mut self) -> Result<()> {
        let want = if self.recorder.is_some() {
            Want::Logits
        } else {
            self.draws.want()
        };
        let (mut plan, mut output, mut finished) = (StepPlan::default(), StepOutput::default(), Vec::new());
        while self.scheduler.plan(&mut plan) {
            self.replica.step(&plan, want, &mut output)?;
            self.stats.steps += 1;
            self.record(&plan, &output);
            let sampled = self.draws.draw(self.pool, &self.scheduler, &plan, &output)?;
            self.scheduler.commit(&plan, sampled, &mut finished)?;
            finished.drain(..).for_each(|answer| self.answers.store(answer));
        }
        Ok(())
    }

    /// Writes the step's logits to the file asked for, if one was.
    fn record(&mut self, plan: &StepPlan, output: &StepOutput) {
        if let Some(recorder) = &mut self.recorder {
            recorder.step(plan, output, |sequence| self.scheduler.request(sequence));
        }
    }

    /// Waits until all is printed and written, and counts the tokens.
    fn end(self) -> u64 {
        if let Some(recorder) = self.recorder {
            recorder.finish();
        }
        self.answers.finish()
    }
}

/// The most bytes of a prompt; the encoder counts them in 32 bits.
const MAX_PROMPT_BYTES: usize = u32::MAX as usize - 1;

fn encode(tokenizer: &Tokenizer, request: usize, text: &[u8], most: usize) -> Result<Vec<u32>> {
    let refuse = |why: String| Err(Error::format(format!("request {request}"), why));
    match text.len() {
        0 => refuse("it is empty; give it at least one character".into()),
        1..=MAX_PROMPT_BYTES => Ok(tokenizer.encode(text, most)),
        bytes => refuse(format!("it has {bytes} bytes; {MAX_PROMPT_BYTES} are the most")),
    }
}
