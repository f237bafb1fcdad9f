//! One inference while it runs: what its replicas share, and how each of them serves the queue.

use super::answers::{Answers, StoredAnswers};
use super::in_flight::InFlight;
use super::ledger::{Ending, Ledger};
use super::queue::Queue;
use super::scores::{self, Scored};
use super::step_sampler::StepSampler;
use super::totals::Totals;
use crate::batch::{StepPlan, Want};
use crate::error::{Error, Result};
use crate::logits::Recorder;
use crate::memory::{self, Purpose};
use crate::report;
use crate::request::Request;
use crate::request::{Answer, Sampled};
use crate::scheduler::Scheduler;
use crate::threads::{self, Ended, Scope, Thread};
use rayon::ThreadPool;
use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What all replicas share.
pub struct Run<'a, 'r> {
    /// Requests to be answered.
    pub queue: Arc<Queue>,
    /// Where answers go.
    pub results: Results<'a, 'r>,
    /// The logits file, if logits are recorded.
    pub recorder: Option<Mutex<Recorder>>,
    /// Where steps are counted.
    pub totals: Arc<Totals>,
}

/// Where answers go, and the reasons of requests that get none.
pub enum Results<'a, 'r> {
    /// Into the program's rows.
    Stored(Box<Mutex<Answers<'a, 'r>>>),
    /// To a service's events, token by token.
    Ledger(&'a Ledger),
    /// To rank 0.
    Sent(Mutex<Outbox>),
}

/// Results that are still to be sent to rank 0.
#[derive(Default)]
pub struct Outbox {
    /// Answers.
    pub answers: VecDeque<Answer>,
    /// Requests that no device here can run, and why.
    pub refused: Vec<(Request, Error)>,
}

impl Run<'_, '_> {
    /// Refuses the requests in the queue that no replica can run which works.
    pub fn refuse_unfit(&self) {
        while let Some((request, why)) = self.queue.take_unfit() {
            match &self.results {
                Results::Stored(answers) => lock(answers).refuse(request.number, &why),
                Results::Ledger(ledger) => ledger.end(request.number, Ending::Failed(why.into())),
                Results::Sent(outbox) => lock(outbox).refused.push((request, why)),
            }
        }
    }

    /// Hands whole answers over.
    fn hand_in(&self, finished: &mut Vec<Answer>) {
        let requests = finished.len();
        match &self.results {
            Results::Stored(answers) => {
                let mut answers = lock(answers);
                finished.drain(..).for_each(|answer| answers.store(answer));
            }
            Results::Ledger(_) => finished.clear(),
            Results::Sent(outbox) => lock(outbox).answers.extend(finished.drain(..)),
        }
        self.queue.finish(requests);
    }

    /// Hands tokens over of requests that want them one by one. `ended` has room for as many requests as a step has.
    fn hand_over(&self, scored: Vec<Scored>, sampled: impl Iterator<Item = Sampled>, ended: &mut Vec<usize>) {
        let Results::Ledger(ledger) = self.results else {
            return;
        };
        ledger.take_tokens(scored, sampled, |number, is_lost| match is_lost {
            false => ended.push(number),
            // If there is no memory for this either, it runs to its end for nobody.
            true => drop(self.queue.cancel([number].into_iter())),
        });
        if !ended.is_empty() {
            self.queue.finish_open(ended.drain(..));
        }
    }

    /// Ends a request that cannot be answered to its end; its replica drops it before it plans the next step.
    fn give_up(&self, number: usize, why: Error) -> Result<()> {
        if let Results::Ledger(ledger) = self.results {
            ledger.end(number, Ending::Failed(why.into()));
        }
        self.queue.cancel([number].into_iter())
    }

    /// Waits until everything is printed and written; gives what was stored.
    pub fn end(self) -> StoredAnswers {
        if let Some(recorder) = self.recorder {
            recorder.into_inner().unwrap_or_else(PoisonError::into_inner).finish();
        }
        match self.results {
            Results::Stored(answers) => answers.into_inner().unwrap_or_else(PoisonError::into_inner).finish(),
            Results::Ledger(_) | Results::Sent(_) => StoredAnswers::default(),
        }
    }
}

/// One replica serving the queue. Workers share the queue, the answers and the logits file, and nothing else.
pub struct Worker<'p, 'a, 'r> {
    run: &'p Run<'a, 'r>,
    /// Its number among those that serve.
    replica: usize,
    pool: &'p ThreadPool,
    in_flight: &'p mut InFlight,
    scheduler: Scheduler,
    sampler: StepSampler,
    vocab: usize,
    finished: Vec<Answer>,
    /// Requests that it has begun with, and that have ended, for whoever is told of them.
    begun: Vec<usize>,
    ended: Vec<usize>,
}

/// The result of a worker: an error if its replica is to be dropped.
pub type WorkerResult = Result<()>;

/// Runs all workers until the queue is empty or they have failed, the first one on this thread.
pub fn serve<'p, 'a, 'r>(run: &'p Run<'a, 'r>, mut workers: Vec<Worker<'p, 'a, 'r>>) -> Result<Vec<WorkerResult>> {
    begin(run, &workers)?;
    if workers.len() <= 1 {
        return Ok(workers.into_iter().map(Worker::serve).collect());
    }
    let others = workers.split_off(1);
    threads::scope(|scope| {
        let others = start_all(scope, run, others);
        let mut served: Vec<_> = workers.into_iter().map(Worker::serve).collect();
        let join = |started: WorkerThread| started.join().unwrap_or_else(|panic| resume_unwind(panic));
        served.extend(others.into_iter().map(join));
        Ok(served)
    })
}

/// Runs all workers on threads of their own, and `beside` on this one meanwhile. A worker that panics gives its panic.
pub fn serve_beside<'p, 'a, 'r, T>(
    run: &'p Run<'a, 'r>,
    workers: Vec<Worker<'p, 'a, 'r>>,
    beside: impl FnOnce() -> T,
) -> (T, Vec<Ended<WorkerResult>>) {
    threads::scope(|scope| {
        let workers = start_all(scope, run, workers);
        let _guard = StopOnPanic(&run.queue);
        let done = beside();
        (done, workers.into_iter().map(WorkerThread::join).collect())
    })
}

/// Lets the queue know the workers' replicas.
pub fn begin(run: &Run<'_, '_>, workers: &[Worker<'_, '_, '_>]) -> Result<()> {
    let limits = workers.iter().map(|worker| worker.scheduler.limits().clone());
    run.queue.begin(limits)?;
    if let Results::Ledger(_) = run.results {
        run.refuse_unfit();
    }
    Ok(())
}

/// A worker's thread, or the result of one whose thread could not be started.
enum WorkerThread {
    Runs(Thread<WorkerResult>),
    NotStarted(WorkerResult),
}

impl WorkerThread {
    fn join(self) -> Ended<WorkerResult> {
        match self {
            Self::Runs(thread) => thread.join(),
            Self::NotStarted(served) => Ok(served),
        }
    }
}

/// Starts the workers' threads.
fn start_all<'scope, 'p: 'scope, 'a: 'scope, 'r: 'scope>(
    scope: &'scope Scope<'scope, '_>,
    run: &'p Run<'a, 'r>,
    workers: Vec<Worker<'p, 'a, 'r>>,
) -> Vec<WorkerThread> {
    let start = |worker: Worker<'p, 'a, 'r>| {
        let replica = worker.replica;
        let thread = scope.spawn(&format!("getp replica {replica}"), || worker.serve());
        thread.map_or_else(
            |error| WorkerThread::NotStarted(not_started(run, replica, &error)),
            WorkerThread::Runs,
        )
    };
    workers.into_iter().map(start).collect()
}

/// The result of a worker whose thread could not be started.
fn not_started(run: &Run<'_, '_>, replica: usize, error: &std::io::Error) -> WorkerResult {
    run.queue.give_back(replica, Vec::new());
    let why = format!("cannot start a thread for a replica: {error}; lower GETP_THREADS");
    report::warning(&why);
    run.totals.lose_replica();
    Err(Error::State(why))
}

impl<'p, 'a, 'r> Worker<'p, 'a, 'r> {
    /// A worker that serves `run` with the replica of `in_flight`; tokens are sampled by the threads of `pool`.
    pub fn new(
        run: &'p Run<'a, 'r>,
        replica: usize,
        pool: &'p ThreadPool,
        in_flight: &'p mut InFlight,
        scheduler: Scheduler,
        sampler: StepSampler,
    ) -> Result<Self> {
        Ok(Self {
            run,
            replica,
            pool,
            in_flight,
            finished: Vec::new(),
            begun: Vec::new(),
            ended: memory::room(scheduler.limits().max_batch, Purpose::Schedule)?,
            scheduler,
            vocab: sampler.vocab(),
            sampler,
        })
    }

    fn serve(mut self) -> WorkerResult {
        let _guard = StopOnPanic(&self.run.queue);
        let served = self.all_steps();
        match &served {
            Ok(()) => self.in_flight.cache = self.scheduler.into_cache(),
            Err(error) => self.give_back(error),
        }
        served
    }

    /// Takes requests, runs steps, samples and commits tokens, until every request has its answer.
    fn all_steps(&mut self) -> Result<()> {
        while !self.run.queue.is_stopped() {
            self.submit()?;
            let start = Instant::now();
            let collected = self.in_flight.collect()?;
            let waited = start.elapsed();
            match collected {
                Some(plan) => {
                    self.commit(&plan, waited)?;
                    self.in_flight.recycle(plan);
                }
                None if self.scheduler.running() > 0 => {
                    return Err(Error::Internal("sequences run, but none can be planned".into()));
                }
                None if self.run.queue.wait(self.replica) => {}
                None => break,
            }
        }
        Ok(())
    }

    /// Submits as many steps as may be in flight.
    fn submit(&mut self) -> Result<()> {
        while self.in_flight.has_room() {
            self.take()?;
            let (want, plans_ahead) = match self.run.recorder {
                Some(_) => (Want::Logits, false),
                None if self.scheduler.is_scored() && !self.in_flight.replica().scores() => (Want::Logits, false),
                None => self.sampler.next_step(self.scheduler.samplings()),
            };
            self.scheduler.plan_ahead(plans_ahead);
            if !self.in_flight.submit(&mut self.scheduler, want)? {
                break;
            }
        }
        Ok(())
    }

    /// Takes requests from the queue, as many as can start.
    fn take(&mut self) -> Result<()> {
        let taken = self.run.queue.take(self.replica, &mut self.scheduler, &mut self.begun);
        if let Results::Ledger(ledger) = self.run.results
            && !self.begun.is_empty()
        {
            ledger.begin(self.begun.drain(..));
        }
        taken
    }

    /// Samples a step's tokens and passes them to the scheduler.
    fn commit(&mut self, plan: &StepPlan, waited: Duration) -> Result<()> {
        self.record(plan);
        let start = Instant::now();
        let sampled = self
            .sampler
            .sample(self.pool, &mut self.scheduler, plan, self.in_flight);
        self.run.totals.add_step(waited, start.elapsed());
        self.run.totals.take_from(&mut self.scheduler);
        let sampled = sampled?;
        for (number, why) in sampled.failed {
            self.run.give_up(number, why)?;
        }
        let mut scored = scores::score(
            self.pool,
            &self.scheduler,
            plan,
            sampled.tokens,
            self.in_flight,
            self.vocab,
        )?;
        let committed = self.scheduler.commit(plan, sampled.tokens, &mut self.finished);
        sampled
            .left_to_host
            .iter()
            .for_each(|&sequence| self.scheduler.mend(sequence));
        // If memory ends at one answer, those complete before it are not given back. Requests behind it begin again
        // behind the tokens that they have been told of, and then have the scores of what comes there.
        if committed.is_err() {
            let has_token = |number| self.scheduler.sampled().iter().any(|token| token.number == number);
            scored.retain(|scored| scored.in_prompt.is_some() || has_token(scored.number));
        }
        self.hand_in(scored);
        committed
    }

    /// Writes the step's logits to the file, if they are recorded.
    fn record(&self, plan: &StepPlan) {
        if let Some(recorder) = &self.run.recorder {
            let request = |sequence| self.scheduler.request(sequence);
            lock(recorder).step(plan, &self.in_flight.output, request);
        }
    }

    /// Hands over the answers that are complete, and the tokens that have come, with their scores.
    fn hand_in(&mut self, scored: Vec<Scored>) {
        if !self.finished.is_empty() {
            self.run.hand_in(&mut self.finished);
        }
        self.run
            .hand_over(scored, self.scheduler.take_sampled(), &mut self.ended);
    }

    /// Returns unfinished requests to the queue; they start again on another replica, with the same random numbers.
    fn give_back(&mut self, error: &Error) {
        let unfinished = self.scheduler.take_unfinished();
        self.run.totals.take_from(&mut self.scheduler);
        let device = self.in_flight.replica().describe();
        report::warning(format_args!(
            "{device} is given up: {error}; unfinished requests that go back to the queue: {}",
            unfinished.len()
        ));
        self.run.totals.lose_replica();
        self.run.queue.give_back(self.replica, unfinished);
        if let Results::Ledger(_) = self.run.results {
            // Others go on: nobody may come for what only this one had room for.
            self.run.refuse_unfit();
        }
    }
}

/// Stops the other workers when one panics: its requests will not be finished.
struct StopOnPanic<'a>(&'a Queue);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop();
        }
    }
}

/// Locks, also after a panic: what these locks protect is only appended to.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
