//! The requests that wait, shared by all replicas.

use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::request::{Outlet, Request};
use crate::scheduler::{Ahead, Limits, Scheduler};
use rustc_hash::FxHashSet;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// One queue for all replicas. A replica takes a request when it can start it at once, and has at most its share of the
/// unfinished requests: so all replicas finish at about the same time, even if one had room for every request.
///
/// An open queue takes requests while others run, and its replicas wait for more until it is stopped.
pub struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    stopped: AtomicBool,
}

struct State {
    waiting: VecDeque<Request>,
    /// Requests waiting or running.
    unfinished: usize,
    /// Whether requests may be submitted.
    is_open: bool,
    /// Requests that are cancelled and still counted as unfinished. One that waits is dropped when it would be taken.
    cancelled: FxHashSet<usize>,
    /// How often requests have been cancelled, so that a replica looks for them only when some have been.
    cancels: usize,
    /// The replicas that serve the queue; `None` of those lost.
    replicas: Vec<Option<ReplicaState>>,
    /// Replicas that wait although requests do: these are too long for them.
    resting: usize,
    /// Replicas that wait for requests.
    asleep: usize,
    ranks: OfRanks,
    /// What has been seen so far.
    counts: Counts,
}

/// A replica that serves the queue.
struct ReplicaState {
    limits: Limits,
    /// The first so many requests that wait are too long for it. Nobody looks at them again for it.
    skips: usize,
    /// The [`State::cancels`] that it has seen.
    cancels: usize,
}

/// What concerns the queue of all ranks, which fills this one.
#[derive(Clone, Copy, Debug, Default)]
pub struct OfRanks {
    /// Whether more requests may come.
    pub more: bool,
    /// The most requests that a replica of any rank may run.
    pub share: usize,
    /// The most positions of a request.
    pub positions: usize,
}

/// What [`Queue::watch`] sees.
#[derive(Clone, Copy, Debug)]
pub struct Watched {
    /// Replicas that serve the queue.
    pub replicas: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// What has been seen so far.
    pub counts: Counts,
}

/// What a queue counts of its replicas.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// How often replicas have looked for requests.
    pub looks: usize,
    /// Requests taken.
    pub taken: usize,
    /// Requests that replicas had room for and did not find, summed over their looks.
    pub wanted: usize,
}

impl State {
    /// The most requests that a replica may run.
    fn share(&self) -> usize {
        let replicas = self.working().count().saturating_sub(self.resting);
        self.unfinished.div_ceil(replicas.max(1)).max(self.ranks.share)
    }

    fn working(&self) -> impl Iterator<Item = &Limits> + Clone {
        self.replicas.iter().flatten().map(|served| &served.limits)
    }

    /// The place in the queue of the first request that can run on a replica.
    fn next_for(&mut self, replica: usize) -> Option<usize> {
        let served = self.replicas.get_mut(replica)?.as_mut()?;
        let behind = self.waiting.range(served.skips.min(self.waiting.len())..);
        let skipped = behind.take_while(|request| !served.limits.take(request)).count();
        served.skips += skipped;
        Some(served.skips).filter(|&next| next < self.waiting.len())
    }

    /// Takes a request out of the queue.
    fn remove(&mut self, place: usize) -> Option<Request> {
        for served in self.replicas.iter_mut().flatten() {
            served.skips -= usize::from(place < served.skips);
        }
        self.waiting.remove(place)
    }

    /// Whether a replica without requests is to wait for some: others may give back what they run.
    fn has_more(&self) -> bool {
        self.is_open || self.unfinished > self.waiting.len() || self.ranks.more
    }
}

impl Queue {
    /// A queue of these requests, that no replica serves yet.
    pub fn new(waiting: VecDeque<Request>) -> Self {
        Self::with(waiting, false)
    }

    /// An open queue, that no replica serves yet.
    pub fn open() -> Self {
        Self::with(VecDeque::new(), true)
    }

    fn with(waiting: VecDeque<Request>, is_open: bool) -> Self {
        let state = State {
            unfinished: waiting.len(),
            waiting,
            is_open,
            cancelled: FxHashSet::default(),
            cancels: 0,
            replicas: Vec::new(),
            resting: 0,
            asleep: 0,
            ranks: OfRanks::default(),
            counts: Counts::default(),
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            stopped: AtomicBool::new(false),
        }
    }

    /// The most positions of a request with so many prompt tokens that one of the replicas takes.
    pub fn most_positions(&self, n_prompt: usize) -> usize {
        let state = self.lock();
        let most = state.working().map(|limits| limits.most_positions(n_prompt)).max();
        most.unwrap_or(0)
    }

    /// Adds a request to an open queue. Fails if none of the replicas takes it, or without memory. Where no replica
    /// works, one more may come.
    pub fn submit(&self, request: Request) -> Result<()> {
        let mut state = self.lock();
        if let Some(why) = refusal(&request, state.working()) {
            return Err(why);
        }
        let more = state.waiting.try_reserve(1);
        more.map_err(|_| memory::lacking::<Request>(state.waiting.len() + 1, Purpose::Requests))?;
        state.waiting.push_back(request);
        state.unfinished += 1;
        if state.asleep > 0 {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Cancels requests of an open queue, whose answers nobody takes any more. Fails without memory.
    pub fn cancel(&self, numbers: impl ExactSizeIterator<Item = usize>) -> Result<()> {
        let mut state = self.lock();
        let room = state.cancelled.try_reserve(numbers.len());
        room.map_err(|_| memory::lacking::<usize>(state.cancelled.len() + numbers.len(), Purpose::Requests))?;
        state.cancelled.extend(numbers);
        state.cancels += 1;
        if state.asleep > 0 {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Drops the note that a request was cancelled which did not come into the queue.
    pub fn forget(&self, number: usize) {
        self.lock().cancelled.remove(&number);
    }

    /// Drops a replica's requests that have been cancelled.
    fn drop_cancelled(&self, state: &mut State, replica: usize, scheduler: &mut Scheduler) {
        let Some(Some(served)) = state.replicas.get_mut(replica) else {
            return;
        };
        if served.cancels != state.cancels {
            served.cancels = state.cancels;
            let dropped = scheduler.cancel(|number| state.cancelled.remove(&number));
            self.count_finished(state, dropped);
        }
    }

    /// Moves requests to the scheduler of a replica while it has room for the next one and less than its share. Those
    /// that could never run there are left to other replicas, and those cancelled are dropped. Without memory for a
    /// request this fails, and the request stays in the queue. Of requests whose tokens are handed over one by one the
    /// numbers are appended to `begun`.
    pub fn take(&self, replica: usize, scheduler: &mut Scheduler, begun: &mut Vec<usize>) -> Result<()> {
        let mut state = self.lock();
        let state = &mut *state;
        self.drop_cancelled(state, replica, scheduler);
        state.counts.looks += 1;
        if !scheduler.has_free_slot() {
            return Ok(());
        }
        // Those that it will have taken when all are, if the replicas are equally fast.
        let its_share = state.share().saturating_sub(scheduler.running() + scheduler.waiting());
        let its_share = its_share.min(state.waiting.len());
        let ahead = (0..its_share).map(|i| &state.waiting[i * state.waiting.len() / its_share]);
        scheduler.look_ahead(ahead.map(|waiting| Ahead {
            n_prompt: waiting.prompt.len(),
            max_positions: waiting.max_positions,
        }));
        while scheduler.running() + scheduler.waiting() < state.share() {
            let Some(next) = state.next_for(replica) else {
                if state.ranks.more {
                    let more = state.share() - scheduler.running() - scheduler.waiting();
                    let wanted = scheduler.room(state.ranks.positions).min(more);
                    state.counts.wanted += wanted;
                }
                break;
            };
            let request = &mut state.waiting[next];
            if !state.cancelled.is_empty() && state.cancelled.remove(&request.number) {
                state.remove(next);
                self.count_finished(state, 1);
                continue;
            }
            if !scheduler.has_room(request) {
                break;
            }
            let tables = scheduler.make_room(request)?;
            if request.outlet == Outlet::Tokens {
                memory::push(begun, request.number, Purpose::Requests)?;
            }
            let Some(request) = state.remove(next) else {
                break;
            };
            state.counts.taken += 1;
            scheduler.enqueue(request, tables);
        }
        Ok(())
    }

    /// Waits until there is a request that this replica, which runs none, can take; `false` if none can come any more
    /// or the queue is stopped.
    pub fn wait(&self, replica: usize) -> bool {
        let mut state = self.lock();
        loop {
            if self.is_stopped() {
                return false;
            }
            if state.next_for(replica).is_some() {
                return true;
            }
            if !state.has_more() {
                state.resting += 1;
                return false;
            }
            let rests = usize::from(!state.waiting.is_empty());
            state.resting += rests;
            state.asleep += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.asleep -= 1;
            state.resting -= rests;
        }
    }

    /// Counts requests that have their answer.
    pub fn finish(&self, requests: usize) {
        self.count_finished(&mut self.lock(), requests);
    }

    /// Counts requests of an open queue that have their answer, and may have been cancelled meanwhile.
    pub fn finish_open(&self, numbers: impl ExactSizeIterator<Item = usize>) {
        let mut state = self.lock();
        let finished = numbers.len();
        for number in numbers {
            state.cancelled.remove(&number);
        }
        self.count_finished(&mut state, finished);
    }

    /// Returns the unfinished requests of a replica that stops, in front of all others.
    pub fn give_back(&self, replica: usize, unfinished: Vec<Request>) {
        let mut state = self.lock();
        state.replicas[replica] = None;
        for request in unfinished.into_iter().rev() {
            state.waiting.push_front(request);
        }
        for served in state.replicas.iter_mut().flatten() {
            served.skips = 0;
        }
        self.changed.notify_all();
    }

    /// Begins to serve the queue with replicas of these limits, in place of those before.
    pub fn begin(&self, replicas: impl Iterator<Item = Limits>) -> Result<()> {
        let served = replicas.map(|limits| {
            Some(ReplicaState {
                limits,
                skips: 0,
                cancels: 0,
            })
        });
        let served = memory::collect(served, Purpose::Requests)?;
        let mut state = self.lock();
        (state.replicas, state.resting) = (served, 0);
        Ok(())
    }

    /// Takes a request out of the queue that no replica can run which works, if one does, with the reason.
    pub fn take_unfit(&self) -> Option<(Request, Error)> {
        let mut state = self.lock();
        let why = |request| refusal(request, state.working());
        let (at, why) = (state.waiting.iter().enumerate()).find_map(|(at, request)| Some((at, why(request)?)))?;
        let request = state.remove(at)?;
        state.cancelled.remove(&request.number);
        self.count_finished(&mut state, 1);
        Some((request, why))
    }

    /// Adds requests that rank 0 has granted, and what concerns the queue of all ranks.
    pub fn add(&self, requests: Vec<Request>, ranks: OfRanks) {
        let mut state = self.lock();
        state.unfinished += requests.len();
        state.waiting.extend(requests);
        state.ranks = ranks;
        self.changed.notify_all();
    }

    /// Takes the last `requests` of those that wait out of the queue.
    pub fn withdraw(&self, requests: usize) -> VecDeque<Request> {
        let mut state = self.lock();
        let kept = state.waiting.len().saturating_sub(requests);
        let withdrawn = state.waiting.split_off(kept);
        for served in state.replicas.iter_mut().flatten() {
            served.skips = served.skips.min(kept);
        }
        state.unfinished -= withdrawn.len();
        withdrawn
    }

    /// The queue's state, for the rank's reports.
    pub fn watch(&self) -> Watched {
        let state = self.lock();
        Watched {
            replicas: state.working().count(),
            waiting: state.waiting.len(),
            counts: state.counts,
        }
    }

    /// Requests without an answer.
    pub fn unfinished(&self) -> usize {
        self.lock().unfinished
    }

    /// Stops all replicas.
    pub fn stop(&self) {
        let _state = self.lock(); // nobody is between its check and its wait
        self.stopped.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Whether all replicas are to stop.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    fn count_finished(&self, state: &mut State, requests: usize) {
        state.unfinished -= requests;
        if !state.has_more() {
            self.changed.notify_all();
        }
    }

    /// Locks, also after a panic: no change is left half done by anything that could panic.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why none of the replicas takes a request: what the one with the most room says. `None` if one does, or if there are
/// no replicas.
pub fn refusal<'a>(request: &Request, replicas: impl Iterator<Item = &'a Limits> + Clone) -> Option<Error> {
    if replicas.clone().any(|limits| limits.take(request)) {
        return None;
    }
    let widest = replicas.max_by_key(|limits| limits.blocks * limits.block_tokens);
    widest.and_then(|limits| limits.check_request(request).err())
}
