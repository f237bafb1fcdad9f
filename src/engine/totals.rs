//! What an engine has done so far: counters that may be read while it works.

use crate::replica::Replica;
use crate::scheduler::Scheduler;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Totals of all inferences so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Tokens stored in answers, or handed over.
    pub tokens: u64,
    /// Tokens of the prompts that could be queued.
    pub prompt_tokens: u64,
    /// Of these, tokens that were not computed, since another prompt with the same beginning had been.
    pub shared_tokens: u64,
    /// Tokens that were computed again, since their sequences had been preempted or their replica had failed.
    pub recomputed_tokens: u64,
    /// Steps.
    pub steps: u64,
    /// Seconds of wall time with requests, encoding and printing included.
    pub seconds: f64,
    /// Seconds that the replicas' threads waited for their devices, summed over replicas.
    pub waiting_seconds: f64,
    /// Seconds that the replicas' threads sampled tokens, summed over replicas.
    pub drawing_seconds: f64,
    /// Replicas that work.
    pub replicas: u64,
    /// Replicas that have failed.
    pub lost_replicas: u64,
    /// Bytes of the packed weights of all replicas.
    pub packed_bytes: u64,
    /// Bytes of the KV caches of all replicas.
    pub kv_bytes: u64,
}

/// See [`Stats`]. Times are in nanoseconds.
#[derive(Debug, Default)]
pub struct Totals {
    tokens: AtomicU64,
    prompt_tokens: AtomicU64,
    shared_tokens: AtomicU64,
    recomputed_tokens: AtomicU64,
    steps: AtomicU64,
    busy: AtomicU64,
    waiting: AtomicU64,
    drawing: AtomicU64,
    replicas: AtomicU64,
    lost_replicas: AtomicU64,
    packed_bytes: AtomicU64,
    kv_bytes: AtomicU64,
}

impl Totals {
    /// As they are now.
    pub fn read(&self) -> Stats {
        let number = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let seconds = |counter: &AtomicU64| Duration::from_nanos(number(counter)).as_secs_f64();
        Stats {
            tokens: number(&self.tokens),
            prompt_tokens: number(&self.prompt_tokens),
            shared_tokens: number(&self.shared_tokens),
            recomputed_tokens: number(&self.recomputed_tokens),
            steps: number(&self.steps),
            seconds: seconds(&self.busy),
            waiting_seconds: seconds(&self.waiting),
            drawing_seconds: seconds(&self.drawing),
            replicas: number(&self.replicas),
            lost_replicas: number(&self.lost_replicas),
            packed_bytes: number(&self.packed_bytes),
            kv_bytes: number(&self.kv_bytes),
        }
    }

    /// Tokens were stored or handed over.
    pub fn add_tokens(&self, tokens: u64) {
        self.tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    /// Tokens of prompts were queued.
    pub fn add_prompt_tokens(&self, tokens: u64) {
        self.prompt_tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    /// Adds what a replica's scheduler has counted since the last call: tokens of prompts that were shared, and tokens
    /// that were computed again.
    pub fn take_from(&self, scheduler: &mut Scheduler) {
        let (shared, recomputed) = (scheduler.take_shared_tokens(), scheduler.take_recomputed());
        self.shared_tokens.fetch_add(shared, Ordering::Relaxed);
        self.recomputed_tokens.fetch_add(recomputed, Ordering::Relaxed);
    }

    /// There were requests for so long.
    pub fn add_busy(&self, time: Duration) {
        add(&self.busy, time);
    }

    /// A replica's thread has completed a step, for which it waited for its device and then sampled tokens.
    pub fn add_step(&self, waiting: Duration, drawing: Duration) {
        self.steps.fetch_add(1, Ordering::Relaxed);
        add(&self.waiting, waiting);
        add(&self.drawing, drawing);
    }

    /// These replicas work.
    pub fn set_replicas<'a>(&self, replicas: impl Iterator<Item = &'a dyn Replica>) {
        let (mut count, mut packed_bytes, mut kv_bytes) = (0, 0, 0);
        for replica in replicas {
            count += 1;
            packed_bytes += replica.pack_report().kinds.iter().map(|kind| kind.bytes).sum::<u64>();
            kv_bytes += replica.kv_bytes();
        }
        self.replicas.store(count, Ordering::Relaxed);
        self.packed_bytes.store(packed_bytes, Ordering::Relaxed);
        self.kv_bytes.store(kv_bytes, Ordering::Relaxed);
    }

    /// A replica has failed.
    pub fn lose_replica(&self) {
        self.lost_replicas.fetch_add(1, Ordering::Relaxed);
        self.replicas.fetch_sub(1, Ordering::Relaxed);
    }
}

fn add(counter: &AtomicU64, time: Duration) {
    counter.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
}
