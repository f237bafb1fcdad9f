//! The requests that wait, shared by all replicas.

use crate::error::{Error, Result};
use crate::scheduler::{Scheduler, Unfinished};
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
    waiting: VecDeque<Unfinished>,
    /// Requests waiting or running.
    unfinished: usize,
    /// Replicas that serve the queue.
    replicas: usize,
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
        let share = self.unfinished.div_ceil(self.replicas.max(1));
        #[cfg(feature = "mpi")]
        let share = share.max(self.ranks.share);
        share
    }

    /// Whether a replica without requests is to wait for some.
    fn has_more(&self) -> bool {
        #[cfg(feature = "mpi")]
        let of_ranks = self.ranks.more;
        #[cfg(not(feature = "mpi"))]
        let of_ranks = false;
        self.unfinished > 0 || of_ranks
    }
}

impl Queue {
    /// A queue that no replica serves yet.
    pub fn new(waiting: VecDeque<Unfinished>) -> Self {
        let state = State {
            unfinished: waiting.len(),
            waiting,
            replicas: 0,
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

    /// Moves requests to a replica's scheduler while it has room for the next one and less than its share. A request
    /// that could never run there is refused. Without memory for a request this fails, and the request stays in the
    /// queue.
    pub fn take(&self, scheduler: &mut Scheduler, mut refuse: impl FnMut(usize, Error)) -> Result<()> {
        let mut state = self.lock();
        #[cfg(feature = "mpi")]
        self.counts.looks.fetch_add(1, Ordering::Relaxed);
        if !scheduler.has_free_slot() {
            return Ok(());
        }
        while scheduler.running() + scheduler.waiting() < state.share() {
            let Some(first) = state.waiting.front_mut() else {
                #[cfg(feature = "mpi")]
                if state.ranks.more {
                    let more = state.share() - scheduler.running() - scheduler.waiting();
                    let wanted = scheduler.room(state.ranks.positions).min(more);
                    self.counts.wanted.fetch_add(wanted, Ordering::Relaxed);
                }
                break;
            };
            let (request, n_prompt, max_positions) = (first.request, first.prompt.len(), first.max_positions);
            let can_run = scheduler.check(request, n_prompt, max_positions).is_ok();
            if can_run {
                if !scheduler.has_room(n_prompt, max_positions) {
                    break;
                }
                scheduler.make_room(&mut first.prompt, max_positions)?;
            }
            let Some(first) = state.waiting.pop_front() else { break };
            #[cfg(feature = "mpi")]
            self.counts.taken.fetch_add(1, Ordering::Relaxed);
            if let Err(why) = scheduler.submit(request, first.prompt, max_positions) {
                refuse(request, why);
                self.count_finished(&mut state, 1);
            }
        }
        Ok(())
    }

    /// Waits until a request can be taken; `false` if all are finished or the queue is stopped.
    pub fn wait(&self) -> bool {
        let pending = |state: &mut State| state.waiting.is_empty() && state.has_more() && !self.is_stopped();
        let state = self.changed.wait_while(self.lock(), pending);
        let state = state.unwrap_or_else(PoisonError::into_inner);
        !state.waiting.is_empty() && !self.is_stopped()
    }

    /// Counts requests that have their answer.
    pub fn finish(&self, requests: usize) {
        self.count_finished(&mut self.lock(), requests);
    }

    /// Returns the unfinished requests of a replica that stops, in front of all others.
    pub fn give_back(&self, unfinished: Vec<Unfinished>) {
        let mut state = self.lock();
        state.replicas -= 1;
        for request in unfinished.into_iter().rev() {
            state.waiting.push_front(request);
        }
        self.changed.notify_all();
    }

    /// Adds replicas that serve the queue.
    pub fn join(&self, replicas: usize) {
        self.lock().replicas += replicas;
    }

    /// Adds requests that rank 0 has granted, and what concerns the queue of all ranks.
    #[cfg(feature = "mpi")]
    pub fn add(&self, requests: Vec<Unfinished>, ranks: OfRanks) {
        let mut state = self.lock();
        state.unfinished += requests.len();
        state.waiting.extend(requests);
        state.ranks = ranks;
        self.changed.notify_all();
    }

    /// Takes the last `requests` of those that wait out of the queue.
    #[cfg(feature = "mpi")]
    pub fn withdraw(&self, requests: usize) -> VecDeque<Unfinished> {
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
            replicas: state.replicas,
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
        if state.unfinished == 0 {
            self.changed.notify_all();
        }
    }

    /// Locks, also after a panic: no change is left half done by anything that could panic.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
