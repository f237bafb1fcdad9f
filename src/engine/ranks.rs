//! The engine as one of several ranks: what they agree on, and an inference over all of them.

use super::answers::Answers;
use super::machine::{Machine, with_part};
use super::member::Member;
use super::queue::Queue;
use super::rows::{Closing, share_rows};
use super::run::{self, Outbox, Results, Run, lock, serve_beside};
use super::{Engine, OpenReplicas, Outcome, Prompt, Reopen};
use crate::checkpoint::Checkpoint;
use crate::cluster::message::{Reader, Writer};
use crate::cluster::transport::{Promise, Transport, gather};
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::options::Options;
use crate::report;
use crate::request::Sampling;
use crate::requests::Requests;
use crate::scheduler::Limits;
use crate::tokenizer::Tokenizer;
use rustc_hash::FxHasher;
use std::any::Any;
use std::collections::VecDeque;
use std::hash::{Hash, Hasher};
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex};

/// What a worker has panicked with.
type Panic = Box<dyn Any + Send>;

/// The other ranks, as an engine knows them.
#[derive(Clone)]
pub struct Ranks {
    /// Locked for a whole inference: all ranks do the same in the same order.
    protocol: Arc<Mutex<Box<dyn Protocol>>>,
    rank: usize,
    count: usize,
    /// A fingerprint of the weights; `None` on a rank that has not packed them.
    weights: Option<u64>,
}

impl Ranks {
    /// Whether this rank prints what all have in common.
    pub(super) fn speaks(&self) -> bool {
        self.rank == 0
    }

    /// How many there are, this one included.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// An address of its own, for the program's struct on a rank without devices.
    pub fn address(&self) -> *const () {
        Arc::as_ptr(&self.protocol).cast()
    }

    /// See [`Protocol::inference`].
    pub(super) fn inference(
        &self,
        engine: &mut Engine,
        tokenizer: &Tokenizer,
        sampling: &mut Sampling,
        requests: &mut Requests<'_>,
        reopen: Reopen<'_>,
    ) -> Result<Outcome> {
        let protocol = lock(&self.protocol);
        protocol.inference(engine, self, tokenizer, sampling, requests, reopen)
    }
}

/// What several ranks do together, as the engine and its callers see it. Every transport can do it, and nothing else
/// refers to it: so the linker leaves it out of a library that has no transport.
pub trait Protocol: Transport {
    /// Warms up as one of several ranks. If one could not begin, all fail. A rank that cannot open a device of its own
    /// has none, and only receives the answers; if that holds for all, all fail.
    fn warm_up(self: Box<Self>, inputs: RankInputs<'_>, open: OpenReplicas<'_>) -> Result<Engine>;

    /// Answers requests together with the other ranks, which `ranks` has. All of them end with the same rows and the
    /// same result.
    fn inference(
        &self,
        engine: &mut Engine,
        ranks: &Ranks,
        tokenizer: &Tokenizer,
        sampling: &mut Sampling,
        requests: &mut Requests<'_>,
        reopen: Reopen<'_>,
    ) -> Result<Outcome>;

    /// Tells the other ranks that this one cannot begin what all do together next, so that they need not wait for it.
    fn decline(&self, why: &Error);
}

impl<T: Transport + 'static> Protocol for T {
    fn warm_up(self: Box<Self>, inputs: RankInputs<'_>, open: OpenReplicas<'_>) -> Result<Engine> {
        let (mut engine, devices) = together(&*self, || Engine::open_among(&*self, inputs, open))?;
        let ranks = Ranks {
            rank: self.rank(),
            count: self.ranks(),
            weights: engine
                .replicas()
                .next()
                .map(|replica| replica.pack_report().fingerprint),
            protocol: Arc::new(Mutex::new(self)),
        };
        if ranks.speaks() {
            report::line(format_args!(
                "ranks that share the requests: {}; their devices: {devices}",
                ranks.count
            ));
        }
        engine.ranks = Some(ranks);
        engine.print_summary();
        Ok(engine)
    }

    fn inference(
        &self,
        engine: &mut Engine,
        ranks: &Ranks,
        tokenizer: &Tokenizer,
        sampling: &mut Sampling,
        requests: &mut Requests<'_>,
        reopen: Reopen<'_>,
    ) -> Result<Outcome> {
        engine.drain();
        let run = || engine.run_among(ranks, self, tokenizer, *sampling, requests, reopen);
        let ended = together(self, run);
        // Rank 0 may have stored answers, and another rank some of the rows that all have.
        let (closing, panic) = ended.inspect_err(|_| requests.clear_all())?;
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
        if let (false, Some(state)) = (sampling.is_greedy(), closing.first_state) {
            sampling.rng_state = state;
        }
        let failure = (closing.unfinished > 0).then(|| {
            Error::State(format!(
                "no rank has a device left; {} requests have no answer",
                closing.unfinished
            ))
        });
        Ok(Outcome {
            tokens: closing.tokens,
            failure,
        })
    }

    fn decline(&self, why: &Error) {
        // What the others say changes nothing.
        let _ = together(self, || {
            agree(self, Err::<(), _>(Error::State(why.to_string())), |(), _| Ok(()))
        });
    }
}

/// What a rank has before it opens devices.
pub struct RankInputs<'a> {
    /// The weights.
    pub checkpoint: &'a dyn Checkpoint,
    /// The options.
    pub options: Options,
    /// The GPUs that the options and the model allow, by names that are the same for all processes of a machine.
    pub devices: Vec<String>,
}

/// What a rank brings to an inference.
struct Entry {
    fingerprints: Fingerprints,
    /// The limits of its replicas.
    replicas: Vec<Limits>,
}

/// What must be the same on all ranks. A model's dimensions and its weights have a fingerprint each.
const SAME: [&str; 6] = [
    "set of requests",
    "model",
    "model",
    "tokenizer",
    "sampler",
    "set of options",
];

/// Fingerprints of it, in the order of [`SAME`]; `None` for what a rank does not have.
type Fingerprints = [Option<u64>; SAME.len()];

/// Why a rank leaves what all do together.
enum Leave {
    /// All of them leave it.
    Together(Error),
    /// Others may wait for this one.
    Alone(Error),
}

impl From<Error> for Leave {
    fn from(error: Error) -> Self {
        Self::Alone(error)
    }
}

/// Does what all ranks do together. If this one leaves alone, or panics, the transport is told.
fn together<T>(transport: &dyn Transport, work: impl FnOnce() -> Result<T, Leave>) -> Result<T> {
    let promise = Promise::new(transport);
    let done = work();
    if !matches!(done, Err(Leave::Alone(_))) {
        promise.keep();
    }
    done.map_err(|(Leave::Together(why) | Leave::Alone(why))| why)
}

impl Engine {
    /// An engine with this rank's part of its machine's devices, and the number of all ranks' replicas.
    fn open_among(
        transport: &dyn Transport,
        inputs: RankInputs<'_>,
        open: OpenReplicas<'_>,
    ) -> Result<(Self, usize), Leave> {
        let RankInputs {
            checkpoint,
            options,
            devices,
        } = inputs;
        let machine = Machine::this(devices);
        let (_, machines) = agree(transport, Ok(()), |(), writer| machine.write(writer))?;
        let machines = memory::try_collect(machines.iter().map(|words| Machine::read(words)), Purpose::Requests)?;
        let (options, has_part) = with_part(options, &machines, transport.rank());
        let opened = match has_part {
            true => open(checkpoint, &options).and_then(|replicas| {
                super::check_finite(&replicas, &options)?;
                Ok(replicas)
            }),
            false => Err(Error::State("the devices here belong to other ranks".into())),
        };
        let (replicas, why) = match opened {
            Ok(replicas) => (replicas, None),
            Err(why) => (Vec::new(), Some(why)),
        };
        let engine = Self::assemble(replicas, checkpoint.config(), options);
        let (engine, counts) = agree(transport, engine, |engine, writer| {
            writer.number(engine.replicas.len())?;
            writer.text(&why.as_ref().map_or_else(String::new, Error::to_string))
        })?;
        let mut devices = 0;
        let mut first_why = None;
        for (rank, words) in counts.iter().enumerate() {
            let mut reader = Reader::new(words);
            devices += reader.number()?;
            let why = reader.text()?;
            first_why = first_why.or_else(|| (!why.is_empty()).then(|| of_rank(rank, &why)));
        }
        match why {
            Some(why) if devices == 0 => return Err(Leave::Together(why)),
            Some(why) => report::warning(format_args!("{why}; this rank only receives the answers")),
            None if devices == 0 => {
                let why = first_why.unwrap_or_else(|| Error::State("no rank has a device".into()));
                return Err(Leave::Together(why));
            }
            None => {}
        }
        Ok((engine, devices))
    }

    /// The other ranks, if there are any.
    pub fn ranks(&self) -> Option<&Ranks> {
        self.ranks.as_ref()
    }

    /// Tells the other ranks that this one cannot begin an inference, so that they need not wait for it.
    pub fn decline(&self, why: &Error) {
        if let Some(ranks) = &self.ranks {
            lock(&ranks.protocol).decline(why);
        }
    }

    /// From the requests to the rows of all ranks; gives the panic of a worker as well. If a rank fails meanwhile, some
    /// rows may be there.
    fn run_among(
        &mut self,
        ranks: &Ranks,
        transport: &dyn Transport,
        tokenizer: &Tokenizer,
        sampling: Sampling,
        requests: &mut Requests<'_>,
        reopen: Reopen<'_>,
    ) -> Result<(Closing, Option<Panic>), Leave> {
        let count = requests.len();
        let prepared = self.prepare(tokenizer, requests);
        let fingerprints = self.fingerprints(ranks, tokenizer, &sampling, requests);
        let (prompts, mut entries) = self.enter(transport, prepared, fingerprints)?;
        if requests.is_empty() {
            return Ok((Closing::default(), None));
        }
        if entries.iter().all(|entry| entry.replicas.is_empty()) {
            self.reopen_or_say(reopen);
            ((), entries) = self.enter(transport, Ok(()), fingerprints)?;
        }
        let max_positions = requests.positions(self.options.steps);
        let mut answers = match ranks.speaks() {
            true => Answers::new(tokenizer, &mut *requests, &prompts, max_positions, &self.options).map(Some),
            false => Ok(None),
        };
        let named = |(rank, entry): (usize, &Entry)| {
            let of_rank = move |limits: &Limits| (format!("a device of rank {rank}"), limits.clone());
            entry.replicas.iter().map(of_rank).collect::<Vec<_>>()
        };
        let replicas: Vec<_> = entries.iter().enumerate().flat_map(named).collect();
        let asked = self.requests(prompts, max_positions, &sampling);
        let waiting = self.admit(asked, &replicas, |request, remark| {
            if let Ok(Some(answers)) = &mut answers {
                answers.say(request, remark);
            }
        });
        let ready = answers.and_then(|answers| Ok((answers, Member::new(transport, waiting?, count, max_positions)?)));
        let ((mut answers, mut member), _) = agree(transport, ready, |_, _| Ok(()))?;
        let run = Run {
            queue: Queue::new(VecDeque::new()).into(),
            results: Results::Sent(Mutex::new(Outbox::default())),
            recorder: None,
            totals: self.totals.clone(),
        };
        let devices = entries.iter().map(|entry| entry.replicas.len()).collect();
        let mut limits: Vec<_> = entries.into_iter().map(|entry| entry.replicas).collect();
        let panic = self.serve_among(
            &run,
            &sampling,
            &mut member,
            answers.as_mut(),
            (devices, &mut limits),
            reopen,
        )?;
        let tokens = answers.map_or(0, |answers| answers.finish().tokens);
        let closing = Closing {
            tokens,
            unfinished: member.unfinished(),
            first_state: member.first_state,
            failure: member.failure,
        };
        let closing = share_rows(transport, requests, closing, &mut member.words)?;
        if !closing.failure.is_empty() {
            return Err(Leave::Together(Error::State(closing.failure)));
        }
        Ok((closing, panic))
    }

    /// Serves the queue of all ranks, and if all devices have failed, with those that `reopen` returns; gives the panic
    /// of a worker.
    fn serve_among(
        &mut self,
        run: &Run<'_, '_>,
        sampling: &Sampling,
        member: &mut Member<'_>,
        mut answers: Option<&mut Answers<'_, '_>>,
        (mut devices, limits): (Vec<usize>, &mut Vec<Vec<Limits>>),
        reopen: Reopen<'_>,
    ) -> Result<Option<Panic>, Leave> {
        let mut panic = None;
        for again in [false, true] {
            if again {
                if panic.is_none() && member.failure.is_empty() {
                    self.reopen_or_say(reopen);
                }
                devices = self.count_devices(member.transport, &member.failure)?;
                limits.clear();
            }
            member.begin(run, &devices, limits);
            let workers = self.workers(run, sampling).unwrap_or_else(|why| {
                report::warning(format_args!("the devices here are not used: {why}"));
                Vec::new()
            });
            run::begin(run, &workers)?;
            let (served, workers) = serve_beside(run, workers, || member.serve(run, answers.as_deref_mut()));
            served?;
            if run.queue.is_stopped() {
                member.give_up(run, answers.as_deref_mut())?;
            }
            let workers: Vec<_> = workers
                .into_iter()
                .map(|worker| worker.map_err(|why| panic = Some(why)).ok())
                .collect();
            self.count(workers);
            if member.unfinished() == 0 {
                break;
            }
        }
        Ok(panic)
    }

    /// What may fail on this rank alone: prompts in tokens.
    fn prepare(&self, tokenizer: &Tokenizer, requests: &Requests<'_>) -> Result<Vec<Result<Prompt>>> {
        self.check_vocabulary(tokenizer)?;
        if self.options.logits.is_some() {
            return Err(Error::State(format!(
                "{} records the logits of one process; unset it, or start a single process",
                self.options.names.logits
            )));
        }
        self.encode(tokenizer, requests)
    }

    /// See [`SAME`].
    fn fingerprints(
        &self,
        ranks: &Ranks,
        tokenizer: &Tokenizer,
        sampling: &Sampling,
        requests: &Requests<'_>,
    ) -> Fingerprints {
        let of_requests = fingerprint(|hasher| {
            (requests.len(), requests.steps()).hash(hasher);
            (0..requests.len()).for_each(|i| requests.prompt(i).hash(hasher));
        });
        let Sampling {
            temperature,
            topp,
            rng_state,
        } = *sampling;
        let of_sampler = fingerprint(|hasher| {
            // Without draws the seed changes nothing; programs take it from the clock.
            let seed = if sampling.is_greedy() { 0 } else { rng_state };
            (temperature.to_bits(), topp.to_bits(), seed).hash(hasher);
        });
        let of_config = fingerprint(|hasher| format!("{:?}", self.config).hash(hasher));
        [
            Some(of_requests),
            Some(of_config),
            ranks.weights,
            Some(fingerprint(|hasher| tokenizer.hash(hasher))),
            Some(of_sampler),
            Some(fingerprint_of_options(&self.options)),
        ]
    }

    /// Enters an inference with what this rank has prepared for it: fails on all ranks if one has failed in that, or
    /// was given something else.
    fn enter<T>(
        &self,
        transport: &dyn Transport,
        prepared: Result<T>,
        fingerprints: Fingerprints,
    ) -> Result<(T, Vec<Entry>), Leave> {
        let (prepared, entries) = agree(transport, prepared, |_, writer| {
            for fingerprint in fingerprints {
                writer.word(u32::from(fingerprint.is_some()))?;
                writer.long(fingerprint.unwrap_or(0))?;
            }
            writer.number(self.replicas.len())?;
            self.replicas()
                .try_for_each(|replica| write_limits(&self.limits(replica), writer))
        })?;
        let entries = entries.iter().map(|words| self.entry(words));
        let entries = memory::try_collect(entries, Purpose::Requests)?;
        check_same(entries.iter().map(|entry| entry.fingerprints)).map_err(Leave::Together)?;
        Ok((prepared, entries))
    }

    fn entry(&self, words: &[u32]) -> Result<Entry> {
        let mut reader = Reader::new(words);
        let mut fingerprints = Fingerprints::default();
        for fingerprint in &mut fingerprints {
            let (has, bits) = (reader.word()? != 0, reader.long()?);
            *fingerprint = has.then_some(bits);
        }
        let replicas = reader.many(|reader| self.read_limits(reader))?;
        reader.end()?;
        Ok(Entry { fingerprints, replicas })
    }

    /// What [`write_limits`] has written. The other limits follow from the model and the options, which all ranks
    /// share.
    fn read_limits(&self, reader: &mut Reader<'_>) -> Result<Limits> {
        Ok(Limits {
            max_batch: reader.number()?,
            step_tokens: reader.number()?,
            chunk_tokens: reader.number()?,
            max_logits_rows: reader.number()?,
            max_positions: reader.number()?,
            block_tokens: reader.number()?,
            blocks: reader.number()?,
            depth: reader.number()?,
            sliding_window: self.config.sliding_window,
            has_full_layers: self.config.windowed_layers() < self.config.n_layers,
            record_all: false,
            share_beginnings: true,
            share_answers: false,
            plans_ahead: false,
        })
    }

    fn reopen_or_say(&mut self, reopen: Reopen<'_>) {
        if let Err(why) = self.reopen(reopen) {
            report::error(format_args!("there is no other replica either: {why}"));
        }
    }

    /// Each rank's devices; fails on all ranks if this one has failed.
    fn count_devices(&self, transport: &dyn Transport, failure: &str) -> Result<Vec<usize>, Leave> {
        let done = match failure {
            "" => Ok(()),
            why => Err(Error::State(why.into())),
        };
        let (_, counts) = agree(transport, done, |(), writer| writer.number(self.replicas.len()))?;
        Ok(counts
            .iter()
            .map(|words| Reader::new(words).number())
            .collect::<Result<_>>()?)
    }
}

fn write_limits(limits: &Limits, writer: &mut Writer) -> Result<()> {
    let numbers = [
        limits.max_batch,
        limits.step_tokens,
        limits.chunk_tokens,
        limits.max_logits_rows,
        limits.max_positions,
        limits.block_tokens,
        limits.blocks,
        limits.depth,
    ];
    numbers
        .iter()
        .try_for_each(|&number| writer.number(number.min(u32::MAX as usize)))
}

/// Gives every rank what each has written, and back what this one has done so far; fails on all of them if one has
/// failed in that.
fn agree<T>(
    transport: &dyn Transport,
    done: Result<T>,
    write: impl FnOnce(&T, &mut Writer) -> Result<()>,
) -> Result<(T, Vec<Vec<u32>>), Leave> {
    let mut writer = Writer::default();
    let done = done.and_then(|done| {
        writer.text("")?;
        write(&done, &mut writer)?;
        Ok(done)
    });
    if let Err(why) = &done {
        writer = Writer::default();
        writer.text(&why.to_string())?;
    }
    let mut records = gather(transport, writer.words())?;
    let done = done.map_err(Leave::Together)?;
    for (rank, words) in records.iter_mut().enumerate() {
        let mut reader = Reader::new(words);
        let why = reader.text()?;
        if !why.is_empty() {
            return Err(Leave::Together(of_rank(rank, &why)));
        }
        words.drain(..words.len() - reader.rest().len());
    }
    Ok((done, records))
}

fn of_rank(rank: usize, why: &str) -> Error {
    Error::State(format!("rank {rank} cannot begin: {why}"))
}

/// Fails if a rank was given something else than the first one that has it.
fn check_same(ranks: impl Iterator<Item = Fingerprints>) -> Result<()> {
    let mut first: [Option<(usize, u64)>; SAME.len()] = Default::default();
    for (rank, fingerprints) in ranks.enumerate() {
        let mut other: Option<(usize, Vec<&str>)> = None;
        for ((name, first), fingerprint) in SAME.iter().zip(&mut first).zip(fingerprints) {
            let Some(fingerprint) = fingerprint else { continue };
            let (of, expected) = *first.get_or_insert((rank, fingerprint));
            let (_, names) = match fingerprint == expected {
                true => continue,
                false => other.get_or_insert((of, Vec::new())),
            };
            if names.last() != Some(name) {
                names.push(name);
            }
        }
        if let Some((of, names)) = other {
            let why = format!(
                "rank {rank} has another {} than rank {of}; start all with the same arguments and environment",
                names.join(" and another ")
            );
            return Err(Error::State(why));
        }
    }
    Ok(())
}

/// Of the options only what changes answers is compared: where a rank computes is its own affair.
fn fingerprint_of_options(options: &Options) -> u64 {
    fingerprint(|hasher| {
        let precision = options.precision.map(|precision| precision as u8);
        (precision, options.strict, options.steps as u8, options.ignore_end).hash(hasher);
    })
}

fn fingerprint(write: impl FnOnce(&mut FxHasher)) -> u64 {
    let mut hasher = FxHasher::default();
    write(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Precision;
    use crate::requests::Steps;

    #[test]
    fn options_that_change_answers_are_compared() {
        type Change = fn(&mut Options);
        let fingerprint_with = |change: Change| {
            let mut options = Options::default();
            change(&mut options);
            fingerprint_of_options(&options)
        };
        let same = fingerprint_of_options(&Options::default());
        let change: [Change; 4] = [
            |o| o.precision = Some(Precision::Fast),
            |o| o.strict = true,
            |o| o.steps = Steps::Tokens,
            |o| o.ignore_end = true,
        ];
        let mut fingerprints: Vec<_> = change.into_iter().map(fingerprint_with).collect();
        fingerprints.push(same);
        fingerprints.sort();
        fingerprints.dedup();
        assert_eq!(fingerprints.len(), 5);
        assert_eq!(
            fingerprint_with(|o| (o.threads, o.kv_mb, o.profile) = (3, 9, true)),
            same
        );
    }
}
