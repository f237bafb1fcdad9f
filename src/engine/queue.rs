//! The requests that wait, shared by all replicas.

use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::request::Request;
use crate::scheduler::{Ahead, Limits, Scheduler};
use std::collections::VecDeque;
#[cfg(feature = "mpi")]
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// One queue for all replicas. A replica takes a request when it can start it at once, and has at most its share of the
/// unfinished requests: so all replicas finish at about the same time, even if one had room for every request.
pub struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    stopped: AtomicBool,
    #[cfg(feature = "mpi")]
    counts: Counts,
}

/// See [`Watched`].
#[cfg(feature = "mpi")]
#[derive(Default)]
struct Counts {
    looks: AtomicUsize,
    taken: AtomicUsize,
    wanted: AtomicUsize,
}

struct State {
    waiting: VecDeque<Request>,
    /// Requests waiting or running.
    unfinished: usize,
    /// The limits of each replica that serves the queue; `None` of those lost.
    replicas: Vec<Option<Limits>>,
    /// Replicas that wait although requests do: these are too long for them.
    resting: usize,
    #[cfg(feature = "mpi")]
    ranks: OfRanks,
}

/// What concerns the queue of all ranks, which fills this one.
#[cfg(feature = "mpi")]
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
#[cfg(feature = "mpi")]
#[derive(Clone, Copy, Debug, Default)]
pub struct Watched {
    /// Replicas that serve the queue.
    pub replicas: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// How often replicas have looked for requests so far.
    pub looks: usize,
    /// Requests taken so far.
    pub taken: usize,
    /// Requests that replicas had room for and did not find, summed over their looks.
    pub wanted: usize,
}

impl State {
    /// The most requests that a replica may run.
    fn share(&self) -> usize {
        let replicas = self.working().count().saturating_sub(self.resting);
        let share = self.unfinished.div_ceil(replicas.max(1));
        #[cfg(feature = "mpi")]
        let share = share.max(self.ranks.share);
        share
    }

    fn working(&self) -> impl Iterator<Item = &Limits> {
        self.replicas.iter().flatten()
    }

    /// The place in the queue of the first request that can run on a replica.
    fn next_for(&self, scheduler: &Scheduler) -> Option<usize> {
        self.waiting.iter().position(|request| scheduler.limits().take(request))
    }

    /// The place in the queue of the first request that no replica can run.
    fn unfit(&self) -> Option<usize> {
        let fits = |request: &Request| self.working().any(|limits| limits.take(request));
        self.waiting.iter().position(|request| !fits(request))
    }

    /// Whether a replica without requests is to wait for some: others may give back what they run.
    fn has_more(&self) -> bool {
        #[cfg(feature = "mpi")]
        let of_ranks = self.ranks.more;
        #[cfg(not(feature = "mpi"))]
        let of_ranks = false;
        self.unfinished > self.waiting.len() || of_ranks
    }
}

impl Queue {
    /// A queue that no replica serves yet.
    pub fn new(waiting: VecDeque<Request>) -> Self {
        let state = State {
            unfinished: waiting.len(),
            waiting,
            replicas: Vec::new(),
            resting: 0,
            #[cfg(feature = "mpi")]
            ranks: OfRanks::default(),
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            stopped: AtomicBool::new(false),
            #[cfg(feature = "mpi")]
            counts: Counts::default(),
        }
    }

    /// Moves requests to a replica's scheduler while it has room for the next one and less than its share. Those that
    /// could never run there are left to other replicas. Without memory for a request this fails, and the request stays
    /// in the queue.
    pub fn take(&self, scheduler: &mut Scheduler) -> Result<()> {
        let mut state = self.lock();
        #[cfg(feature = "mpi")]
        self.counts.looks.fetch_add(1, Ordering::Relaxed);
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
            let Some(next) = state.next_for(scheduler) else {
                #[cfg(feature = "mpi")]
                if state.ranks.more {
                    let more = state.share() - scheduler.running() - scheduler.waiting();
                    let wanted = scheduler.room(state.ranks.positions).min(more);
                    self.counts.wanted.fetch_add(wanted, Ordering::Relaxed);
                }
                break;
            };
            let request = &mut state.waiting[next];
            if !scheduler.has_room(request.prompt.len(), request.max_positions) {
                break;
            }
            let tables = scheduler.make_room(request)?;
            let Some(request) = state.waiting.remove(next) else {
                break;
            };
            #[cfg(feature = "mpi")]
            self.counts.taken.fetch_add(1, Ordering::Relaxed);
            scheduler.enqueue(request, tables);
        }
        Ok(())
    }

    /// Waits until there is a request that this replica, which runs none, can take; `false` if none can come any more or
    /// the queue is stopped.
    pub fn wait(&self, scheduler: &Scheduler) -> bool {
        let mut state = self.lock();
        loop {
            if self.is_stopped() {
                return false;
            }
            if state.next_for(scheduler).is_some() {
                return true;
            }
            if !state.has_more() {
                state.resting += 1;
                return false;
            }
            let rests = usize::from(!state.waiting.is_empty());
            state.resting += rests;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.resting -= rests;
        }
    }

    /// Counts requests that have their answer.
    pub fn finish(&self, requests: usize) {
        self.count_finished(&mut self.lock(), requests);
    }

    /// Returns the unfinished requests of a replica that stops, in front of all others.
    pub fn give_back(&self, replica: usize, unfinished: Vec<Request>) {
        let mut state = self.lock();
        state.replicas[replica] = None;
        for request in unfinished.into_iter().rev() {
            state.waiting.push_front(request);
        }
        self.changed.notify_all();
    }

    /// Begins to serve the queue with replicas of these limits, in place of those before.
    pub fn begin(&self, replicas: Vec<Option<Limits>>) {
        let mut state = self.lock();
        (state.replicas, state.resting) = (replicas, 0);
    }

    /// Takes the requests out of the queue that no replica can run which works, if one does; each with the reason of the
    /// last replica.
    pub fn take_unfit(&self) -> Result<Vec<(Request, Error)>> {
        let mut state = self.lock();
        let mut unfit = Vec::new();
        if state.working().next().is_none() {
            return Ok(unfit);
        }
        while let Some(at) = state.unfit() {
            let last = state
                .working()
                .last()
                .map(|limits| limits.check_request(&state.waiting[at]));
            memory::reserve(&mut unfit, 1, Purpose::Requests)?;
            if let (Some(request), Some(Err(why))) = (state.waiting.remove(at), last) {
                unfit.push((request, why));
            }
            self.count_finished(&mut state, 1);
        }
        Ok(unfit)
    }

    /// Adds requests that rank 0 has granted, and what concerns the queue of all ranks.
    #[cfg(feature = "mpi")]
    pub fn add(&self, requests: Vec<Request>, ranks: OfRanks) {
        let mut state = self.lock();
        state.unfinished += requests.len();
        state.waiting.extend(requests);
        state.ranks = ranks;
        self.changed.notify_all();
    }

    /// Takes the last `requests` of those that wait out of the queue.
    #[cfg(feature = "mpi")]
    pub fn withdraw(&self, requests: usize) -> VecDeque<Request> {
        let mut state = self.lock();
        let kept = state.waiting.len().saturating_sub(requests);
        let withdrawn = state.waiting.split_off(kept);
        state.unfinished -= withdrawn.len();
        withdrawn
    }

    /// The queue's state, for the rank's reports.
    #[cfg(feature = "mpi")]
    pub fn watch(&self) -> Watched {
        let state = self.lock();
        Watched {
            replicas: state.working().count(),
            waiting: state.waiting.len(),
            looks: self.counts.looks.load(Ordering::Relaxed),
            taken: self.counts.taken.load(Ordering::Relaxed),
            wanted: self.counts.wanted.load(Ordering::Relaxed),
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
