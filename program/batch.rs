//! `getp batch`: a file of requests in, a file of answers out.
//!
//! Some threads read lines and submit what they ask for, as far ahead as [`MOST_AHEAD`] says: one of them may take
//! seconds, for a form that is hard to compile. The main thread takes events, and writes each answer when it ends.
//! Nothing of an answer depends on when it is computed: its random numbers follow from the request's seed, or from the
//! line that it is on.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use getp::abi::sampler::GETP_STATE_OF_SEED_0;
use getp::backend;
use getp::checkpoint::Generation;
use getp::engine::{Ask, Ending, Event, Service, Totals};
use getp::error::Error;
use getp::random::request_seed;
use getp::report::{self, FewLines};
use getp::request::{EndTokens, LogProbs, Sampling};
use getp::text::{Specials, TextTokenizer};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;

use crate::answer::Answer;
use crate::body::{self, Asked, Form, Lines as Kind};
use crate::forms::Forms;
use crate::input::{self, Lines, Survey};
use crate::interrupt::{self, Interrupt};
use crate::model::{Model, Place};
use crate::output::{self, Done, Output};
use crate::reply::Reply;

/// The files of a run.
#[derive(clap::Args)]
struct Files {
    #[command(flatten)]
    place: Place,
    /// The lines to read.
    #[arg(short, long)]
    input: PathBuf,
    /// The file that gets a line for each of them, in the order in which they end.
    #[arg(short, long)]
    output: PathBuf,
    /// Keeps the lines that the output has, and computes the others.
    #[arg(long)]
    resume: bool,
    /// Names of special tokens in prompts that are texts, such as <|start|>, are the tokens; otherwise they are text.
    #[arg(long)]
    specials: bool,
}

#[derive(clap::Args)]
pub struct Batch {
    #[command(flatten)]
    files: Files,
    #[command(flatten)]
    defaults: Defaults,
    /// Ids that the model has and its tokenizer does not may be sampled, too; they are decoded to nothing.
    #[arg(long)]
    sample_padding: bool,
}

/// What requests have that do not say otherwise.
#[derive(clap::Args, Clone, Copy, Default)]
struct Defaults {
    /// The most tokens of an answer whose request does not say; otherwise what the model's files say, or as many as
    /// there is room for.
    #[arg(long, value_parser = positive)]
    max_tokens: Option<NonZeroUsize>,
    /// Seeds the random numbers of requests without a seed, each with its line.
    #[arg(long, default_value_t = 0, value_parser = seed, allow_negative_numbers = true)]
    seed: u64,
}

fn positive(text: &str) -> Result<NonZeroUsize, &'static str> {
    text.parse().map_err(|_| "it must be a whole number above 0")
}

/// As in requests: a negative one is taken for what has the same bits.
fn seed(text: &str) -> Result<u64, &'static str> {
    let signed = || text.parse().map(i64::cast_unsigned);
    text.parse()
        .or_else(|_| signed())
        .map_err(|_| "it must be a whole number of 64 bits")
}

#[derive(clap::Args)]
pub struct Score {
    #[command(flatten)]
    files: Files,
}

/// Requests that have been submitted and have no answer yet, at most. It is more than any device computes at once.
const MOST_AHEAD: usize = 8192;

/// Threads that read lines.
const FEWEST_READERS: usize = 2;
const MOST_READERS: usize = 8;

/// How long the main thread waits for an event before it looks around.
const LOOK_AROUND: Duration = Duration::from_millis(50);

/// How often a line says how far it is, where there is no bar.
const BETWEEN_LINES: Duration = Duration::from_secs(60);

/// Answers the requests.
pub fn batch(args: &Batch) -> Result<ExitCode> {
    run(&args.files, Kind::Requests, args.defaults, args.sample_padding)
}

/// Scores the continuations.
pub fn score(args: &Score) -> Result<ExitCode> {
    run(&args.files, Kind::Continuations, Defaults::default(), true)
}

fn run(args: &Files, kind: Kind, defaults: Defaults, samples_padding: bool) -> Result<ExitCode> {
    let interrupt = Interrupt::new()?;
    if output::is_same(&args.output, &args.input) {
        bail!(
            "{}: the answers cannot be written to the file of the requests; name another one",
            args.output.display()
        );
    }
    let (mut output, done) = Output::open(&args.output, args.resume)?;
    let survey = input::survey(&args.input, &done, &args.output)?;
    output.begin()?;
    let lines = Mutex::new(Lines::open(&args.input)?);
    let (model, forms) = args.place.open(|tokenizer, config, generation| {
        let forms = Forms::new(tokenizer.clone(), config.vocab_size, generation.ends.clone());
        if survey.has_forms {
            forms.prepare();
        }
        forms
    })?;
    let Model {
        checkpoint,
        mut engine,
        tokenizer,
        generation,
    } = model;
    if !samples_padding {
        engine.draw_below(Some(tokenizer.vocabulary().vocab_size()));
    }
    let shows_progress = engine.options().progress;
    let vocab_size = engine.config().vocab_size;
    let bar = bar(shows_progress, survey.lines, done.len());
    let readers =
        thread::available_parallelism().map_or(FEWEST_READERS, |cores| cores.get().clamp(FEWEST_READERS, MOST_READERS));
    let run = Run {
        defaults,
        service: engine.service()?,
        totals: engine.totals(),
        ends: Arc::new(EndTokens::new(&generation.ends)),
        generation,
        tokenizer,
        interrupt,
        shows_progress,
        bar: bar.clone(),
        done,
        survey,
        shared: Mutex::new(Shared {
            output,
            rows: HashMap::new(),
            choices: HashMap::new(),
            sent: 0,
            counts: Counts::default(),
            refused: FewLines::new(report::Severity::Warning, "more requests have an error for an answer"),
            bar,
        }),
        changed: Condvar::new(),
        unread: AtomicUsize::new(readers),
        reading: AtomicUsize::new(readers),
        ends_early: AtomicBool::new(false),
        has_warned: AtomicBool::new(false),
        is_broken: AtomicBool::new(false),
        began: Instant::now(),
    };
    let warn = |what: &str| run.bar.suspend(|| report::warning(what));
    let reader = body::Reader {
        lines: kind,
        tokenizer: &run.tokenizer,
        specials: match args.specials {
            true => Specials::Tokens,
            false => Specials::Text,
        },
        vocab_size,
        forms,
        unknown: Mutex::default(),
        warn: &warn,
    };
    run.interrupt.begin();
    let ended = thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let reopen = |options: &_| backend::cpu::open(&*checkpoint, options);
            let served = engine.serve_all(&run.service, &reopen);
            if let Err(why) = served {
                report::error(format_args!("the batch ends: {why}"));
                run.is_broken.store(true, Ordering::SeqCst);
                run.service.fail(why);
            }
        });
        let read = || {
            let _ended = OnDrop(|| {
                run.reading.fetch_sub(1, Ordering::SeqCst);
            });
            run.read(&reader, &lines)
        };
        let reading: Vec<_> = (0..readers).map(|_| scope.spawn(read)).collect();
        let written = run.write();
        run.ends_early.store(true, Ordering::SeqCst);
        run.changed.notify_all();
        run.service.close();
        let read: Vec<_> = reading.into_iter().map(ScopedJoinHandle::join).collect();
        let served = serving.join();
        written?;
        for read in read {
            read.map_err(|_| anyhow::anyhow!("a thread that reads requests has panicked"))??;
        }
        served.map_err(|_| anyhow::anyhow!("the thread that computes has panicked"))
    });
    run.bar.finish_and_clear();
    let Shared {
        output,
        counts,
        refused,
        ..
    } = run.shared.into_inner().unwrap_or_else(PoisonError::into_inner);
    refused.finish();
    let finished = output.finish();
    let rows = run.survey.lines - run.done.len();
    counts.say(run.began.elapsed(), rows, run.totals.read().shared_tokens);
    ended?;
    finished?;
    if run.is_broken.into_inner() {
        bail!("requests without an answer are left; go on with --resume");
    }
    if run.interrupt.came() {
        report::line("interrupted; go on with --resume");
        return Ok(ExitCode::from(interrupt::STATUS));
    }
    Ok(ExitCode::SUCCESS)
}

/// Why a request is refused, without its number within this run: another run, which goes on, has other numbers.
fn refusal(why: &Error) -> String {
    match why {
        Error::Format { why, .. } => why.clone(),
        other => other.to_string(),
    }
}

/// Does something when it is dropped, also by a panic.
struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// A bar, if there is a terminal.
fn bar(is_wanted: bool, rows: usize, done: usize) -> ProgressBar {
    let target = match is_wanted {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(Some(rows as u64), target).with_position(done as u64);
    bar.reset_eta();
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} requests, {elapsed}, {eta} left, {msg}") {
        bar.set_style(style);
    }
    bar
}

struct Run {
    defaults: Defaults,
    service: Service,
    totals: Arc<Totals>,
    tokenizer: Arc<TextTokenizer>,
    generation: Generation,
    /// The model's end tokens.
    ends: Arc<EndTokens>,
    interrupt: Interrupt,
    done: Done,
    survey: Survey,
    shared: Mutex<Shared>,
    /// There are fewer rows than there were, or the run ends early.
    changed: Condvar,
    /// Threads that have not come to the end of the lines.
    unread: AtomicUsize,
    /// Threads that read, or may.
    reading: AtomicUsize,
    /// Nothing more is to be submitted.
    ends_early: AtomicBool,
    /// It has been said what a request costs that does not say how long its answer may be.
    has_warned: AtomicBool,
    /// The engine has failed: what it has not answered stays without an answer.
    is_broken: AtomicBool,
    began: Instant,
    shows_progress: bool,
    /// Hidden where there is no terminal.
    bar: ProgressBar,
}

/// What both threads use.
struct Shared {
    output: Output,
    /// By line.
    rows: HashMap<usize, Row>,
    /// By tag.
    choices: HashMap<u64, Choice>,
    /// Choices so far.
    sent: u64,
    counts: Counts,
    refused: FewLines,
    bar: ProgressBar,
}

/// A request that has no answer yet.
struct Row {
    custom_id: String,
    asked: Asked,
    /// Its choices, as far as they have ended.
    ended: Vec<Option<Value>>,
    /// Tokens of those.
    tokens: usize,
    /// The tags of those that have not.
    tags: Vec<u64>,
}

/// One answer of a row.
struct Choice {
    line: usize,
    index: usize,
    /// What the library calls it, once it has been submitted.
    number: Option<usize>,
    answer: Answer,
}

#[derive(Default)]
struct Counts {
    answered: usize,
    errors: usize,
    tokens_in: usize,
    tokens_out: usize,
}

impl Counts {
    fn say(&self, took: Duration, rows: usize, shared: u64) {
        let seconds = took.as_secs_f64();
        let left = rows.saturating_sub(self.answered + self.errors);
        report::line(format_args!(
            "{} answered, {} errors, {left} left; {} tokens in, {} out; {shared} tokens of all prompts shared; \
             {seconds:.1} s, {:.0} tok/s",
            self.answered,
            self.errors,
            self.tokens_in,
            self.tokens_out,
            self.tokens_out as f64 / seconds.max(1e-3)
        ));
    }
}

impl Run {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.ends_early.load(Ordering::SeqCst) || self.interrupt.came()
    }

    /// Reads lines, as other threads do, and submits what they ask for.
    fn read(&self, reader: &body::Reader<'_>, lines: &Mutex<Lines>) -> Result<()> {
        let next = || lines.lock().unwrap_or_else(PoisonError::into_inner).next();
        while !self.is_over()
            && let Some(line) = next()?
        {
            if self.done.contains_key(&line.number) {
                continue;
            }
            let (custom_id, asked) = match &line.text {
                Some(text) => reader.read(text),
                None => (None, Err(input::too_long())),
            };
            let asked = match self.survey.again.get(&line.number) {
                Some(first) => Err(format!("custom_id is that of line {first}, too")),
                None => asked,
            };
            match (custom_id, asked) {
                (Some(custom_id), Ok(asked)) => self.submit(line.number, custom_id, asked)?,
                (custom_id, Err(why)) => {
                    self.lock()
                        .refuse(line.number, custom_id.as_deref(), "invalid_request", &why)?;
                    self.bar.inc(1);
                }
                (None, Ok(_)) => bail!("internal error: a request without a custom_id"),
            }
        }
        self.unread.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }

    /// Submits the choices of a row, once there are few enough before it.
    fn submit(&self, line: usize, custom_id: String, asked: Asked) -> Result<()> {
        if asked.max_tokens.or(self.usual()).is_none() && !self.has_warned.swap(true, Ordering::SeqCst) {
            let why = "so its answer has room for the model's whole context kept for it, and few such requests run \
                       side by side; give it max_tokens, or all of them --max-tokens";
            self.bar
                .suspend(|| report::warning(format_args!("line {line} has no max_tokens, {why}")));
        }
        let count = asked.prompts.len() * asked.n;
        let mut shared = self.lock();
        while shared.choices.len() >= MOST_AHEAD && !self.is_over() {
            let waited = self.changed.wait_timeout(shared, LOOK_AROUND);
            shared = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let mut asks = Vec::new();
        for index in 0..count {
            let (tag, answer) = (shared.sent, Answer::new(&self.tokenizer, &asked)?);
            shared.sent += 1;
            asks.push(self.ask(&asked, line, index, tag));
            let number = None;
            shared.choices.insert(
                tag,
                Choice {
                    line,
                    index,
                    number,
                    answer,
                },
            );
        }
        let row = Row {
            custom_id,
            asked,
            ended: vec![None; count],
            tokens: 0,
            tags: asks.iter().map(|ask| ask.tag).collect(),
        };
        shared.rows.insert(line, row);
        for ask in asks {
            let tag = ask.tag;
            // Under the lock, so that an event finds the number.
            match self.service.submit(ask) {
                Ok(number) => {
                    if let Some(choice) = shared.choices.get_mut(&tag) {
                        choice.number = Some(number);
                    }
                }
                Err(_) if self.is_over() => break,
                Err(why) => {
                    self.give_up(&mut shared, line, "failed", &why.to_string())?;
                    break;
                }
            }
        }
        Ok(())
    }

    /// The most tokens of an answer whose request does not say.
    fn usual(&self) -> Option<usize> {
        self.defaults
            .max_tokens
            .map(NonZeroUsize::get)
            .or(self.generation.max_tokens)
    }

    /// What a row's choice asks of the model.
    fn ask(&self, asked: &Asked, line: usize, index: usize, tag: u64) -> Ask {
        let prompt = asked.prompts[index / asked.n].clone();
        let state = |seed: u64| if seed == 0 { GETP_STATE_OF_SEED_0 } else { seed };
        let of_row = match asked.seed {
            Some(seed) => state(seed),
            None => request_seed(state(self.defaults.seed), line - 1),
        };
        let ends: &[u32] = if asked.ignore_end { &[] } else { &self.generation.ends };
        Ask {
            max_positions: self.service.positions(prompt.len(), asked.max_tokens, self.usual()),
            prompt,
            grammar: asked.grammar.clone(),
            min_tokens: asked.min_tokens,
            sampling: Sampling {
                temperature: asked.temperature.unwrap_or(self.generation.temperature),
                topp: asked.topp.unwrap_or(self.generation.topp),
                rng_state: request_seed(of_row, index),
            },
            ends: match asked.ignore_end || !asked.stop_tokens.is_empty() {
                false => self.ends.clone(),
                true => Arc::new(EndTokens::with_stops(ends, asked.stop_tokens.clone())),
            },
            logprobs: match asked.form {
                Form::Score(_) => LogProbs {
                    answer: false,
                    prompt: true,
                    top: 1,
                },
                Form::Chat(_) | Form::Completion => LogProbs {
                    answer: asked.logprobs.is_some(),
                    prompt: false,
                    top: asked.logprobs.unwrap_or(0),
                },
            },
            tag,
            // Only who looks for strings needs the tokens before the end.
            tokens_per_event: usize::from(!asked.stops.is_empty()),
        }
    }

    /// Writes answers until all have one, or the run ends early.
    fn write(&self) -> Result<()> {
        let mut said = Instant::now();
        loop {
            // In this order: who has ended has said before whether all is read, and its rows were there before that.
            let read_ended = self.reading.load(Ordering::SeqCst) == 0;
            let all_read = self.unread.load(Ordering::SeqCst) == 0;
            if all_read && self.lock().rows.is_empty() {
                return Ok(());
            }
            let has_failed = self.is_broken.load(Ordering::SeqCst) || read_ended && !all_read;
            let is_over = self.is_over() || has_failed;
            let wait = if is_over { Duration::ZERO } else { LOOK_AROUND };
            match self.service.next(Some(Instant::now() + wait)) {
                Some(event) => self.take(event)?,
                None if is_over => return Ok(()),
                None => {}
            }
            if self.shows_progress && self.bar.is_hidden() && said.elapsed() >= BETWEEN_LINES {
                said = Instant::now();
                let shared = self.lock();
                let rows = self.survey.lines - self.done.len();
                let tokens = self.totals.read().shared_tokens;
                shared.counts.say(self.began.elapsed(), rows, tokens);
            }
        }
    }

    fn take(&self, event: Event) -> Result<()> {
        let mut guard = self.lock();
        let shared = &mut *guard;
        // What ended early, or whose row is given up, may still have events.
        let Some(choice) = shared.choices.get_mut(&event.ticket.tag) else {
            return Ok(());
        };
        let line = choice.line;
        let end = match &event.end {
            None => None,
            Some(Ending::Answered(end)) => Some(*end),
            Some(Ending::Cancelled) => return Ok(()),
            Some(Ending::Refused(why)) => return self.give_up(shared, line, "refused", &refusal(why)),
            // The engine ends, and another one may answer it.
            Some(Ending::Failed(_)) if self.is_broken.load(Ordering::SeqCst) => return Ok(()),
            Some(Ending::Failed(why)) => return self.give_up(shared, line, "failed", &why.to_string()),
        };
        choice.answer.take_prompt(&event.prompt_scores);
        if !choice.answer.take(&event.tokens, &event.scores, end)? {
            return Ok(());
        }
        if end.is_none() {
            self.service.cancel(event.number)?;
        }
        let Some(choice) = shared.choices.remove(&event.ticket.tag) else {
            return Ok(());
        };
        self.changed.notify_all();
        let Some(row) = shared.rows.get_mut(&line) else {
            return Ok(());
        };
        row.tags.retain(|&tag| tag != event.ticket.tag);
        row.tokens += choice.answer.len();
        row.ended[choice.index] = Some(choice.answer.choice(choice.index, row.asked.logprobs)?);
        if row.tags.is_empty()
            && let Some(row) = shared.rows.remove(&line)
        {
            shared.answer(line, row)?;
            self.bar.inc(1);
            let tokens = shared.counts.tokens_out;
            let rate = tokens as f64 / self.began.elapsed().as_secs_f64().max(1e-3);
            self.bar.set_message(format!("{tokens} tokens, {rate:.0} tok/s"));
        }
        Ok(())
    }

    /// Writes an error for a row, and drops what of it still runs.
    fn give_up(&self, shared: &mut Shared, line: usize, code: &str, why: &str) -> Result<()> {
        let Some(row) = shared.rows.remove(&line) else {
            return Ok(());
        };
        for tag in &row.tags {
            if let Some(Choice {
                number: Some(number), ..
            }) = shared.choices.remove(tag)
            {
                self.service.cancel(number)?;
            }
        }
        self.changed.notify_all();
        self.bar.inc(1);
        shared.refuse(line, Some(&row.custom_id), code, why)
    }
}

impl Shared {
    /// Writes the answer to a row.
    fn answer(&mut self, line: usize, row: Row) -> Result<()> {
        let prompt_tokens: usize = row.asked.prompts.iter().map(Vec::len).sum();
        let custom_id = &row.custom_id;
        let reply = Reply::of_row(line, custom_id, &row.asked, &row.ended, [prompt_tokens, row.tokens]);
        self.output.write(&reply)?;
        self.counts.answered += 1;
        self.counts.tokens_in += prompt_tokens * row.asked.n;
        self.counts.tokens_out += row.tokens;
        Ok(())
    }

    /// Writes an error for a line.
    fn refuse(&mut self, line: usize, custom_id: Option<&str>, code: &str, why: &str) -> Result<()> {
        self.bar
            .suspend(|| self.refused.line(format_args!("line {line}: {why}")));
        self.counts.errors += 1;
        self.output.write(&Reply::error(line, custom_id, code, why))
    }
}
