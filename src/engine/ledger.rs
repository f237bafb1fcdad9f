//! What a program is to be told of its requests: tokens as they come, and how each request ends.

use super::scores::Scored;
use super::totals::Totals;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::request::{End, Sampled, Score};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The requests whose end the program has not taken.
pub struct Ledger {
    state: Mutex<State>,
    /// An event can be taken, or there will be none any more.
    changed: Condvar,
    totals: Arc<Totals>,
}

struct State {
    entries: FxHashMap<usize, Entry>,
    /// The requests that have an event, each once. There is room for all.
    ready: VecDeque<usize>,
    /// The number of the next request.
    next: usize,
    /// Entries without an end.
    running: usize,
    /// Since when there are any.
    busy_since: Option<Instant>,
    /// Calls that wait for an event.
    asleep: usize,
    is_closed: bool,
}

/// What a program gives with a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ticket {
    /// Given back with each event.
    pub tag: u64,
    /// The fewest tokens of an event that is not the last; 0: there is only the last event, which has them all.
    pub tokens_per_event: usize,
    /// Tokens of the prompt.
    pub n_prompt: usize,
}

struct Entry {
    ticket: Ticket,
    /// Those that are not handed over, and their scores, if these are wanted.
    tokens: Vec<u32>,
    scores: Vec<Score>,
    n_tokens: usize,
    /// Scores of the prompt's tokens that are not handed over.
    prompt_scores: Vec<Score>,
    /// How many of the prompt's tokens have been scored.
    n_prompt_scores: usize,
    times: Times,
    end: Option<Ending>,
    is_ready: bool,
}

/// When what happened to a request.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// It was submitted.
    pub submitted: Instant,
    /// A replica began with it, the first time.
    pub started: Option<Instant>,
    /// It got its first token.
    pub first_token: Option<Instant>,
    /// It got its last token so far.
    pub last_token: Option<Instant>,
}

/// How a request ended.
#[derive(Clone, Debug)]
pub enum Ending {
    /// Its answer is complete.
    Answered(End),
    /// The program has cancelled it.
    Cancelled,
    /// It cannot be answered.
    Refused(Arc<Error>),
    /// It could not be answered to its end.
    Failed(Arc<Error>),
}

/// What a program is told of a request.
#[derive(Debug)]
pub struct Event {
    /// The request's number.
    pub number: usize,
    /// What the program gave with the request.
    pub ticket: Ticket,
    /// The tokens since the event before.
    pub tokens: Vec<u32>,
    /// Their log-probabilities, if these are wanted.
    pub scores: Vec<Score>,
    /// Those of the prompt's tokens since the event before, from its second token on, if these are wanted.
    pub prompt_scores: Vec<Score>,
    /// Tokens of the answer so far.
    pub n_tokens: usize,
    /// When what happened.
    pub times: Times,
    /// How it ended; `None` if more events come.
    pub end: Option<Ending>,
}

impl Ledger {
    /// A ledger without requests.
    pub fn new(totals: Arc<Totals>) -> Self {
        let state = State {
            entries: FxHashMap::default(),
            ready: VecDeque::new(),
            next: 0,
            running: 0,
            busy_since: None,
            asleep: 0,
            is_closed: false,
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            totals,
        }
    }

    /// Enters a request; gives its number. Fails without memory, or if the ledger is closed.
    pub fn enter(&self, ticket: Ticket) -> Result<usize> {
        let mut state = self.lock();
        let state = &mut *state;
        if state.is_closed {
            let why = "the model has been finished, which closed the batch; close it here, too, and open another one";
            return Err(Error::State(why.into()));
        }
        let entries = state.entries.len() + 1;
        let room = state.entries.try_reserve(1);
        room.map_err(|_| memory::lacking::<Entry>(entries, Purpose::Requests))?;
        let room = state.ready.try_reserve(entries - state.ready.len());
        room.map_err(|_| memory::lacking::<usize>(entries, Purpose::Requests))?;
        let (number, now) = (state.next, Instant::now());
        let entry = Entry {
            ticket,
            tokens: Vec::new(),
            scores: Vec::new(),
            n_tokens: 0,
            prompt_scores: Vec::new(),
            n_prompt_scores: 0,
            times: Times {
                submitted: now,
                started: None,
                first_token: None,
                last_token: None,
            },
            end: None,
            is_ready: false,
        };
        state.entries.insert(number, entry);
        state.next += 1;
        state.running += 1;
        state.busy_since.get_or_insert(now);
        Ok(number)
    }

    /// Takes a request out again that could not be queued. It may have been cancelled meanwhile, with all others.
    pub fn strike(&self, number: usize) {
        let mut state = self.lock();
        let Some(entry) = state.entries.remove(&number) else {
            return;
        };
        if entry.is_ready {
            state.ready.retain(|&ready| ready != number);
        }
        if entry.end.is_none() {
            self.count_ended(&mut state);
        }
    }

    /// Replicas have begun with these requests.
    pub fn begin(&self, numbers: impl Iterator<Item = usize>) {
        let (mut state, now) = (self.lock(), Instant::now());
        for number in numbers {
            if let Some(entry) = state.entries.get_mut(&number)
                && entry.times.started.is_none()
            {
                entry.times.started = Some(now);
                self.totals.add_prompt_tokens(entry.ticket.n_prompt as u64);
            }
        }
    }

    /// Takes scores and tokens that a step has brought. `ended` is told of each request that has ended by them, and of
    /// those whose tokens there is no memory for with `true`: nobody takes their answers any more.
    pub fn take_tokens(
        &self,
        scored: Vec<Scored>,
        sampled: impl Iterator<Item = Sampled>,
        mut ended: impl FnMut(usize, bool),
    ) {
        let (mut state, now) = (self.lock(), Instant::now());
        let mut tokens = 0;
        for Scored {
            number,
            in_prompt,
            score,
        } in scored
        {
            let Some(entry) = state.entries.get_mut(&number).filter(|entry| entry.end.is_none()) else {
                continue;
            };
            if let Err(why) = entry.take_score(in_prompt, score) {
                ended(number, true);
                self.end_with(&mut state, number, Ending::Failed(why.into()));
            }
        }
        for Sampled { number, token, end } in sampled {
            if end.is_some() {
                ended(number, false);
            }
            let Some(entry) = state.entries.get_mut(&number).filter(|entry| entry.end.is_none()) else {
                continue;
            };
            if let Err(why) = memory::push(&mut entry.tokens, token, Purpose::Requests) {
                if end.is_none() {
                    ended(number, true);
                }
                self.end_with(&mut state, number, Ending::Failed(why.into()));
                continue;
            }
            tokens += 1;
            entry.n_tokens += 1;
            entry.times.first_token.get_or_insert(now);
            entry.times.last_token = Some(now);
            match end {
                Some(end) => self.end_with(&mut state, number, Ending::Answered(end)),
                None if entry.has_event() => self.announce(&mut state, number),
                None => {}
            }
        }
        self.totals.add_tokens(tokens);
    }

    /// Ends a request, unless it has ended.
    pub fn end(&self, number: usize, ending: Ending) {
        self.end_with(&mut self.lock(), number, ending);
    }

    /// Ends a request as cancelled, unless it has ended before. First calls `dequeue`, while no step can end it, and
    /// leaves the request as it is if that fails. `None` if there never was such a request.
    pub fn cancel(&self, number: usize, dequeue: impl FnOnce() -> Result<()>) -> Option<Result<()>> {
        let mut state = self.lock();
        if number >= state.next {
            return None;
        }
        let runs = state.entries.get(&number).is_some_and(|entry| entry.end.is_none());
        let dequeued = if runs { dequeue() } else { Ok(()) };
        if dequeued.is_ok() {
            self.end_with(&mut state, number, Ending::Cancelled);
        }
        Some(dequeued)
    }

    /// The requests without an end.
    pub fn running(&self) -> Result<Vec<usize>> {
        let state = self.lock();
        let mut numbers = memory::room(state.running, Purpose::Requests)?;
        let running = state.entries.iter().filter(|(_, entry)| entry.end.is_none());
        numbers.extend(running.map(|(number, _)| *number));
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Requests whose end has not been taken.
    pub fn untaken(&self) -> usize {
        self.lock().entries.len()
    }

    /// Ends all requests that have not ended.
    pub fn end_all(&self, ending: &Ending) {
        let mut state = self.lock();
        let state = &mut *state;
        let first = state.ready.len();
        for (number, entry) in state.entries.iter_mut().filter(|(_, entry)| entry.end.is_none()) {
            entry.end = Some(ending.clone());
            if !std::mem::replace(&mut entry.is_ready, true) {
                state.ready.push_back(*number);
            }
        }
        state.ready.make_contiguous()[first..].sort_unstable();
        state.running = 0;
        self.stop_clock(state);
        self.changed.notify_all();
    }

    /// The next event; waits for one until `deadline`, for ever if that is `None`. `None` if there is none by then, or
    /// the ledger is closed.
    pub fn next(&self, deadline: Option<Instant>) -> Option<Event> {
        let mut state = self.lock();
        loop {
            if let Some(event) = state.next() {
                return Some(event);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if state.is_closed || left == Some(Duration::ZERO) {
                return None;
            }
            state.asleep += 1;
            state = match left {
                Some(left) => {
                    let waited = self.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
            state.asleep -= 1;
        }
    }

    /// Drops all requests and events: nobody takes them any more.
    pub fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        state.running = 0;
        self.stop_clock(&mut state);
        let dropped = (std::mem::take(&mut state.entries), std::mem::take(&mut state.ready));
        self.changed.notify_all();
        drop(state);
        drop(dropped); // unlocked, since it may take a while
    }

    fn end_with(&self, state: &mut State, number: usize, ending: Ending) {
        let entry = state.entries.get_mut(&number);
        if let Some(entry) = entry.filter(|entry| entry.end.is_none()) {
            entry.end = Some(ending);
            self.announce(state, number);
            self.count_ended(state);
        }
    }

    /// Notes that a request has an event.
    fn announce(&self, state: &mut State, number: usize) {
        let Some(entry) = state.entries.get_mut(&number).filter(|entry| !entry.is_ready) else {
            return;
        };
        entry.is_ready = true;
        state.ready.push_back(number);
        if state.asleep > 0 {
            self.changed.notify_one();
        }
    }

    fn count_ended(&self, state: &mut State) {
        state.running -= 1;
        if state.running == 0 {
            self.stop_clock(state);
        }
    }

    fn stop_clock(&self, state: &mut State) {
        if let Some(since) = state.busy_since.take() {
            self.totals.add_busy(since.elapsed());
        }
    }

    /// Locks, also after a panic: no change is left half done by anything that could panic.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn next(&mut self) -> Option<Event> {
        let number = self.ready.pop_front()?;
        let entry = self.entries.get_mut(&number)?;
        entry.is_ready = false;
        let event = Event {
            number,
            ticket: entry.ticket,
            tokens: std::mem::take(&mut entry.tokens),
            scores: std::mem::take(&mut entry.scores),
            prompt_scores: std::mem::take(&mut entry.prompt_scores),
            n_tokens: entry.n_tokens,
            times: entry.times,
            end: entry.end.take(),
        };
        if event.end.is_some() {
            self.entries.remove(&number);
        }
        Some(event)
    }
}

impl Entry {
    /// Stores the score of the prompt's token at this place, or of the answer's next token.
    fn take_score(&mut self, in_prompt: Option<usize>, score: Score) -> Result<()> {
        match in_prompt {
            // It begins with the second token, and has been told before a replica failed.
            Some(at) if at <= self.n_prompt_scores => Ok(()),
            Some(_) => {
                self.n_prompt_scores += 1;
                memory::push(&mut self.prompt_scores, score, Purpose::Requests)
            }
            None => memory::push(&mut self.scores, score, Purpose::Requests),
        }
    }

    fn has_event(&self) -> bool {
        let fewest = self.ticket.tokens_per_event;
        fewest > 0 && self.tokens.len() >= fewest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_could_not_be_queued_leaves_nothing_also_if_all_were_cancelled_meanwhile() {
        let ledger = Ledger::new(Arc::default());
        let numbers = [(); 2].map(|()| ledger.enter(Ticket::default()).unwrap());
        assert!(
            ledger
                .cancel(numbers[0], || Ok(()))
                .is_some_and(|cancelled| cancelled.is_ok())
        );
        ledger.strike(numbers[0]);
        assert_eq!(ledger.running().unwrap(), [numbers[1]]);
        ledger.end(numbers[1], Ending::Cancelled);
        let now = Some(Instant::now());
        assert_eq!(ledger.next(now).map(|event| event.number), Some(numbers[1]));
        assert!(ledger.next(now).is_none() && ledger.untaken() == 0);
    }

    /// Else the queue would note a request as cancelled that has left it, and keep the note.
    #[test]
    fn no_step_can_end_a_request_between_its_cancellation_and_the_queue_s_note_of_it() {
        let ledger = Ledger::new(Arc::default());
        let number = ledger.enter(Ticket::default()).unwrap();
        let mut noted = 0;
        for _ in 0..2 {
            let note = || {
                assert!(ledger.state.try_lock().is_err());
                noted += 1;
                Ok(())
            };
            ledger.cancel(number, note).unwrap().unwrap();
        }
        assert_eq!(noted, 1);
        assert!(ledger.cancel(number + 1, || Ok(())).is_none());
        // What cannot be noted goes on.
        let number = ledger.enter(Ticket::default()).unwrap();
        let lacking = || Err(memory::lacking::<usize>(1, Purpose::Requests));
        assert!(ledger.cancel(number, lacking).unwrap().is_err());
        assert_eq!(ledger.running().unwrap(), [number]);
    }
}
