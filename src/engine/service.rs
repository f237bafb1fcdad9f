//! Requests that arrive while others run, from any thread, and what becomes of them.
//!
//! Tokens go from the scheduler's commit into the ledger (`ledger.rs`), any number at once, where they wait until
//! the program takes them; the engine never waits for the program.
//!
//! If a replica fails, requests whose tokens are handed over one by one go on behind those: what has been said is part
//! of the prompt then, and the random stream stands where it stood. An answer that is handed over as a whole starts
//! anew. A cancelled request ends in the ledger at once; its replica drops it before it plans the next step, and one
//! that waits is dropped when its turn comes. A request that only a lost replica had room for fails: nobody packs
//! weights for it while others work.

use super::ledger::{Ending, Event, Ledger, Ticket};
use super::queue::Queue;
use super::totals::Totals;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::grammar::Grammar;
use crate::request::{EndTokens, LogProbs, Outlet, Request, Sampling};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// What a program asks for.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// The most positions that are fed to the model; `None` for as many as any replica takes.
    pub max_positions: Option<usize>,
    /// Before the answer has so many tokens, none ends it.
    pub min_tokens: usize,
    /// How tokens are sampled.
    pub sampling: Sampling,
    /// Tokens that end the answer.
    pub ends: Arc<EndTokens>,
    /// Which log-probabilities are wanted.
    pub logprobs: LogProbs,
    /// What the answer must be like.
    pub grammar: Option<Arc<dyn Grammar>>,
    /// Given back with each event.
    pub tag: u64,
    /// The fewest tokens of an event that is not the last; 0: there is only the last event, which has them all.
    pub tokens_per_event: usize,
}

/// Shared by the program's threads and the engine that serves it.
pub struct Service {
    pub(super) queue: Arc<Queue>,
    pub(super) ledger: Ledger,
    /// When it was opened.
    pub opened: Instant,
    /// The most positions that the model has been made for, if that is known.
    context: Option<usize>,
    /// The most positions of a request that does not say how many.
    usual: usize,
    /// Why no request can be answered any more, once that is so.
    broken: Mutex<Option<Arc<Error>>>,
    /// Held while the program is told of an event, by this thread.
    telling: Mutex<()>,
    teller: AtomicU64,
}

impl Service {
    /// A service without requests, that no engine serves yet.
    pub(super) fn new(totals: Arc<Totals>, config: &ModelConfig) -> Self {
        Self {
            context: config.context_length,
            usual: config.context_length.unwrap_or(config.seq_len),
            queue: Arc::new(Queue::open()),
            ledger: Ledger::new(totals),
            opened: Instant::now(),
            broken: Mutex::default(),
            telling: Mutex::default(),
            teller: AtomicU64::default(),
        }
    }

    /// Queues a request; gives its number. If no replica takes it, its only event says so.
    pub fn submit(&self, ask: Ask) -> Result<usize> {
        let ticket = Ticket {
            tag: ask.tag,
            tokens_per_event: ask.tokens_per_event,
            n_prompt: ask.prompt.len(),
        };
        let number = self.ledger.enter(ticket)?;
        let request = Request {
            number,
            max_positions: ask.max_positions.unwrap_or_else(|| {
                let most = self.most_positions(ask.prompt.len()).min(self.usual);
                most.max(ask.prompt.len())
            }),
            prompt: ask.prompt,
            sampling: ask.sampling,
            ends: ask.ends,
            min_tokens: ask.min_tokens,
            outlet: Outlet::Tokens,
            logprobs: ask.logprobs,
            grammar: ask.grammar,
            answered: 0,
            lost: 0,
        };
        // Under the lock, so that none is queued after the others have been ended.
        let broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        let ending = match &*broken {
            Some(why) => Ending::Failed(why.clone()),
            None => match self.check(&request).and_then(|()| self.queue.submit(request)) {
                Ok(()) => return Ok(number),
                Err(why @ Error::OutOfMemory { .. }) => {
                    self.ledger.strike(number);
                    self.queue.forget(number);
                    return Err(why);
                }
                Err(why) => Ending::Refused(why.into()),
            },
        };
        self.ledger.end(number, ending);
        // All may have been cancelled since it was entered.
        self.queue.forget(number);
        Ok(number)
    }

    /// Refuses a request with more positions than the model has.
    fn check(&self, request: &Request) -> Result<()> {
        match self.context {
            Some(most) if request.max_positions > most => Err(Error::format(
                format!("request {}", request.number),
                format!(
                    "its prompt and answer have {} positions, and the model has {most}; shorten it or ask for fewer tokens",
                    request.max_positions
                ),
            )),
            _ => Ok(()),
        }
    }

    /// The most positions that a request with so many prompt tokens may have; 0 if there can be none.
    pub fn most_positions(&self, n_prompt: usize) -> usize {
        let most = self.queue.most_positions(n_prompt);
        let most = self.context.map_or(most, |context| most.min(context));
        if n_prompt <= most { most } else { 0 }
    }

    /// The most positions of a request with so many prompt tokens whose answer may have `asked` tokens, or `usual` if
    /// it does not say; `None` for as many as there is room for.
    pub fn positions(&self, n_prompt: usize, asked: Option<usize>, usual: Option<usize>) -> Option<usize> {
        // The last token of an answer is not fed.
        let positions = |tokens: usize| n_prompt.saturating_add(tokens).saturating_sub(1);
        match (asked, usual) {
            (None, None) => None,
            // Where there is less room than is usual, it is a limit, and no reason to refuse.
            (None, Some(tokens)) => match self.most_positions(n_prompt) {
                0 => None,
                most => Some(positions(tokens).min(most)),
            },
            (Some(tokens), _) => Some(positions(tokens)),
        }
    }

    /// Cancels a request. Does nothing if it has ended; fails if there never was such a request.
    pub fn cancel(&self, number: usize) -> Result<()> {
        let cancelled = self.ledger.cancel(number, || self.queue.cancel([number].into_iter()));
        cancelled.unwrap_or_else(|| {
            Err(Error::format(
                "request",
                format!("{number} is no request of this batch"),
            ))
        })
    }

    /// Cancels all requests that have not ended.
    pub fn cancel_all(&self) -> Result<()> {
        let running = self.ledger.running()?;
        running.into_iter().try_for_each(|number| self.cancel(number))
    }

    /// The next event; waits for one until `deadline`, for ever if that is `None`.
    pub fn next(&self, deadline: Option<Instant>) -> Option<Event> {
        self.ledger.next(deadline)
    }

    /// Requests whose end has not been taken.
    pub fn untaken(&self) -> usize {
        self.ledger.untaken()
    }

    /// Hands events over to `tell` until the service is closed. [`Self::close`] waits for a call of it that runs.
    pub fn tell_all(&self, mut tell: impl FnMut(Event)) {
        // SAFETY: always succeeds.
        self.teller.store(unsafe { libc::pthread_self() }, Ordering::Relaxed);
        while let Some(event) = self.next(None) {
            let _telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
            if !self.is_closed() {
                tell(event);
            }
        }
    }

    /// Drops all requests and events, and ends the engine's work for them, without waiting for it.
    pub fn close(&self) {
        self.queue.stop();
        self.ledger.close();
        // SAFETY: always succeeds.
        if self.teller.load(Ordering::Relaxed) != unsafe { libc::pthread_self() } {
            drop(self.telling.lock());
        }
    }

    /// Whether it is closed.
    pub fn is_closed(&self) -> bool {
        self.queue.is_stopped()
    }

    /// Ends all requests, and those that are still submitted: none can be answered any more.
    pub fn fail(&self, why: Error) {
        let mut broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        let why = broken.insert(why.into());
        self.ledger.end_all(&Ending::Failed(why.clone()));
    }
}
