//! The scheduler with a simulated device.
//!
//! The device has no model. It records which sequence and position each place of each KV block was last written for,
//! and checks for every row that all positions that it attends to are still there and are its own sequence's. So no
//! block is shared, and rings are long enough. Where beginnings are shared it records instead which tokens each place
//! was last written for, up to the position there. The token sampled is a function of request and position, so the
//! expected answers are known for any number of steps in flight.

use getp::batch::{Chunk, Draw, LogitsRow, RowScore, StepPlan};
use getp::kv_blocks::ring_blocks;
use getp::random::coin;
use getp::request::{Answer, End, EndTokens, LogProbs, Outlet, Request, Sampled, Sampling};
use getp::scheduler::{Ahead, FULL_TABLES, Limits, Scheduler};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The token at which some requests stop.
const STOP: u32 = 100_001;

/// A request as the test knows it.
#[derive(Clone, Default)]
struct Job {
    prompt: Vec<u32>,
    max_positions: usize,
    /// One in so many tokens sampled is an end token; 0 is none.
    end_every: u64,
    /// One in so many tokens the device leaves to the host, if it samples at all; 0 is none.
    host_every: u64,
    outlet: Outlet,
    logprobs: LogProbs,
    min_tokens: usize,
    /// Tokens of the answer at the prompt's end: a device has handed them over, and failed.
    answered: usize,
    /// Its first rows that such a device had computed or shared.
    lost: usize,
}

impl Job {
    fn random(rng: &mut ChaCha8Rng, max_positions: usize) -> Self {
        let n_prompt = match rng.random_range(0..4) {
            0 => max_positions,
            1 => 1,
            _ => rng.random_range(1..=max_positions),
        };
        Self {
            prompt: (0..n_prompt).map(|_| rng.random_range(0..1000)).collect(),
            max_positions,
            end_every: [0, 0, 3, 20][rng.random_range(0..4)],
            host_every: [0, 0, 1, 2, 5][rng.random_range(0..5)],
            outlet: [Outlet::Whole, Outlet::Tokens][rng.random_range(0..2)],
            logprobs: LogProbs {
                answer: rng.random_bool(0.2),
                prompt: rng.random_bool(0.2),
                top: rng.random_range(0..3),
            },
            min_tokens: [0, 0, 1, 5, 1000][rng.random_range(0..5)],
            answered: 0,
            lost: 0,
        }
    }

    fn request(&self, number: usize) -> Request {
        Request {
            ends: EndTokens::with_stops(&EndTokens::RELEASED, vec![STOP]).into(),
            outlet: self.outlet,
            logprobs: self.logprobs,
            min_tokens: self.min_tokens,
            answered: self.answered,
            lost: self.lost,
            ..Request::greedy(number, self.prompt.clone(), self.max_positions)
        }
    }

    /// The job that it may be after devices have failed, with the largest ring of windowed blocks.
    fn largest(&self) -> Self {
        let mut largest = self.clone();
        if self.outlet == Outlet::Tokens {
            largest.prompt.resize(self.max_positions, 0);
        }
        largest
    }

    /// Whether the device leaves the token sampled for `request` at `position` to the host.
    fn is_left_to_host(&self, request: usize, position: usize) -> bool {
        let hash = ((request as u64) << 32 | position as u64).wrapping_mul(0xD1B5_4A32_D192_ED03) >> 20;
        self.host_every > 0 && hash.is_multiple_of(self.host_every)
    }

    /// The token sampled for `request` at `position`.
    fn sample(&self, request: usize, position: usize) -> u32 {
        let hash = ((request as u64) << 32 | position as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
        if self.end_every > 0 && hash.is_multiple_of(self.end_every) {
            let [one, other] = EndTokens::RELEASED;
            [one, other, STOP][(hash / self.end_every % 3) as usize]
        } else {
            (hash % 100_000) as u32
        }
    }

    /// The answer, by the program's own loop: one request, one position after the other.
    fn answer(&self, request: usize) -> Vec<u32> {
        let n_prompt = self.prompt.len();
        let mut answer = Vec::new();
        let mut pos = 0;
        while pos < self.max_positions {
            pos += 1;
            if pos < n_prompt {
                continue;
            }
            let token = self.sample(request, pos - 1);
            answer.push(token);
            if [199_999, 200_002, STOP].contains(&token) && answer.len() + self.answered >= self.min_tokens {
                break;
            }
        }
        answer
    }
}

/// What keys and values at a position depend on.
type Content = (u64, usize);

/// The KV blocks of one kind of layers: for each place of each block, what was last written there.
struct Cache {
    block_tokens: usize,
    places: Vec<Option<Content>>,
}

impl Cache {
    fn new(block_tokens: usize, blocks: usize) -> Self {
        Self {
            block_tokens,
            places: vec![None; blocks * block_tokens],
        }
    }

    /// What a block held is not there any more.
    fn lose(&mut self, block: u32) {
        self.places[block as usize * self.block_tokens..][..self.block_tokens].fill(None);
    }

    fn place(&mut self, table: &[u32], block: usize, position: usize) -> &mut Option<Content> {
        &mut self.places[table[block] as usize * self.block_tokens + position % self.block_tokens]
    }
}

/// What a request's keys and values at a position are: its own, or those of all whose tokens up to there are equal. And
/// where they are.
struct Contents<'a> {
    request: u64,
    /// Of its tokens up to each position, if beginnings are shared.
    hashes: Option<&'a [u64]>,
    full: &'a mut Cache,
    window: &'a mut Cache,
}

impl Contents<'_> {
    fn at(&self, position: usize) -> Content {
        let hash = match self.hashes {
            None => self.request,
            // Behind an end token any token may be fed.
            Some(hashes) => hashes.get(position).copied().unwrap_or(1 << 63 | self.request),
        };
        (hash, position)
    }
}

/// Runs plans and checks them.
struct Device {
    limits: Limits,
    full: Cache,
    window: Cache,
    /// The token sampled last in each slot.
    last_tokens: Vec<Option<u32>>,
    /// Of each request: the tokens it is fed, known beforehand.
    fed: HashMap<usize, Vec<u32>>,
    /// Of each request: a hash of the tokens up to each position, if beginnings are shared.
    hashes: HashMap<usize, Vec<u64>>,
    /// Positions of all prompts that were there when their sequences started.
    shared: usize,
    /// Of each running request: the next position to feed.
    next: HashMap<usize, usize>,
    /// Running requests in the order in which they started.
    started: Vec<usize>,
    /// Requests for whose last token the device has a wrong one.
    wrong: HashSet<usize>,
    /// Of each running request, and of those preempted: the first positions, whose rows are committed.
    committed: HashMap<usize, usize>,
    /// Where each running request began, behind what it shares.
    began: HashMap<usize, usize>,
    /// Of each request that was preempted: how many were committed then.
    again: HashMap<usize, usize>,
    /// Requests that were preempted, and have not started again.
    preempted: HashSet<usize>,
    /// Rows computed again, and how many the scheduler says.
    recomputed: usize,
    counted: u64,
    /// Whether sequences ever took turns: then they may have started in another order.
    took_turns: bool,
    /// The number of steps so far, and the last step of each running request.
    steps: usize,
    last_step: HashMap<usize, usize>,
}

/// A step in flight.
struct UnderWay {
    plan: StepPlan,
    /// The request of each chunk.
    requests: Vec<usize>,
    /// A token for each row that asks for one.
    sampled: Vec<u32>,
    /// Slots whose token the device left to the host.
    left_to_host: Vec<usize>,
    /// Requests whose token the device does not have.
    not_on_device: HashSet<usize>,
}

impl Device {
    fn new(limits: &Limits) -> Self {
        Self {
            limits: limits.clone(),
            full: Cache::new(limits.block_tokens, limits.blocks),
            window: Cache::new(limits.block_tokens, limits.blocks),
            last_tokens: vec![None; limits.max_batch],
            fed: HashMap::new(),
            hashes: HashMap::new(),
            shared: 0,
            next: HashMap::new(),
            started: Vec::new(),
            wrong: HashSet::new(),
            committed: HashMap::new(),
            began: HashMap::new(),
            again: HashMap::new(),
            preempted: HashSet::new(),
            recomputed: 0,
            counted: 0,
            took_turns: false,
            steps: 0,
            last_step: HashMap::new(),
        }
    }

    /// Runs one step and samples the rows that ask for it. Requests that `sit_out` have a token yet to be sampled.
    fn step(&mut self, plan: &StepPlan, scheduler: &Scheduler, jobs: &[Job], sit_out: &HashSet<usize>) -> UnderWay {
        self.check_bounds(plan, scheduler);
        self.check_service(plan, scheduler, jobs, sit_out);
        for chunk in &plan.chunks {
            let request = scheduler.request(chunk.slot).expect("a planned sequence runs");
            self.check_rows(plan, chunk, request, &jobs[request]);
            self.write(plan, chunk, request);
        }
        for chunk in &plan.chunks {
            let request = scheduler.request(chunk.slot).unwrap();
            if !self.wrong.contains(&request) {
                self.attend(plan, chunk, request);
            }
        }
        self.check_logits(plan, scheduler, jobs);
        self.sample(plan, scheduler, jobs)
    }

    fn sample(&mut self, plan: &StepPlan, scheduler: &Scheduler, jobs: &[Job]) -> UnderWay {
        let requests = plan.chunks.iter().map(|chunk| scheduler.request(chunk.slot).unwrap());
        let mut step = UnderWay {
            plan: plan.clone(),
            requests: requests.collect(),
            sampled: Vec::new(),
            left_to_host: Vec::new(),
            not_on_device: HashSet::new(),
        };
        for row in plan.logits.iter().filter(|row| row.sample) {
            let request = scheduler.request(row.slot).unwrap();
            let token = jobs[request].sample(request, row.position);
            let wrong = [EndTokens::RELEASED[1], 77][row.position % 2];
            if self.wrong.contains(&request) {
                self.last_tokens[row.slot] = Some(wrong);
                step.sampled.push(wrong);
                continue;
            }
            step.sampled.push(token);
            self.last_tokens[row.slot] = Some(token);
            if !self.limits.plans_ahead {
                self.last_tokens[row.slot] = None;
                step.not_on_device.insert(request);
            } else if jobs[request].is_left_to_host(request, row.position) {
                self.last_tokens[row.slot] = Some(wrong);
                self.wrong.insert(request);
                step.left_to_host.push(row.slot);
            }
        }
        step
    }

    /// From now on the device has the request's tokens again; the next one is fed at `next`.
    fn mend(&mut self, request: usize, next: usize) {
        assert!(self.wrong.remove(&request));
        self.next.insert(request, next);
    }

    /// A step stays within the limits, and its chunks cover its rows.
    fn check_bounds(&self, plan: &StepPlan, scheduler: &Scheduler) {
        let limits = &self.limits;
        assert!((1..=limits.step_tokens).contains(&plan.rows()));
        assert_eq!(plan.positions.len(), plan.rows());
        assert!(plan.logits.len() <= limits.max_logits_rows);
        assert!(plan.chunks.len() <= scheduler.running() && scheduler.running() <= limits.max_batch);
        let held = limits.blocks - scheduler.free_blocks();
        if limits.share_beginnings {
            let mut blocks = plan.tables.clone();
            blocks.sort_unstable();
            blocks.dedup();
            assert!(blocks.len() <= held && plan.tables.len() <= limits.most_table_blocks());
        } else {
            assert!(plan.tables.len() <= held);
        }
        let mut row = 0;
        for chunk in &plan.chunks {
            assert_eq!(chunk.first_row, row);
            assert!((1..=limits.chunk_tokens).contains(&chunk.rows));
            row += chunk.rows;
        }
        assert_eq!(row, plan.rows());
        let mut sequences: Vec<_> = plan.chunks.iter().map(|chunk| chunk.slot).collect();
        sequences.sort_unstable();
        sequences.dedup();
        assert_eq!(sequences.len(), plan.chunks.len(), "one chunk a sequence");
    }

    /// Requests start in the order they came, every decoding one that has its block moves, and prompts are served
    /// oldest first. Where sequences take turns, a step serves its share of those whose token is known, or of those
    /// that were in no step that is computed at the same time.
    fn check_service(&mut self, plan: &StepPlan, scheduler: &Scheduler, jobs: &[Job], sit_out: &HashSet<usize>) {
        let plans_ahead = self.limits.plans_ahead;
        let turns = if plans_ahead {
            self.limits.depth.max(2) - 1
        } else {
            self.limits.depth
        };
        let take_turns = turns > 1;
        self.steps += 1;
        self.took_turns |= take_turns;
        let planned: Vec<_> = plan
            .chunks
            .iter()
            .map(|chunk| scheduler.request(chunk.slot).unwrap())
            .collect();
        let shares = self.limits.share_beginnings;
        for (&request, chunk) in planned.iter().zip(&plan.chunks) {
            if !self.next.contains_key(&request) {
                let place = self.started.partition_point(|&started| started < request);
                assert!(self.took_turns || shares || place == self.started.len(), "not in order");
                let shared = if shares { chunk.first_position } else { 0 };
                assert!(shared.is_multiple_of(self.limits.block_tokens) && shared < jobs[request].prompt.len());
                assert!(shared == 0 || !jobs[request].logprobs.prompt, "its prompt is scored");
                self.shared += shared.saturating_sub(self.known(request, &jobs[request]));
                self.next.insert(request, shared);
                self.began.insert(request, shared);
                self.started.insert(place, request);
            }
        }
        let (mut decoding, prompts): (Vec<usize>, Vec<usize>) = self
            .started
            .iter()
            .partition(|&request| self.next[request] >= jobs[*request].prompt.len());
        let waiting = self.check_waiting(scheduler, jobs);
        decoding.retain(|request| !waiting.contains(request));
        let mut ready = decoding.clone();
        ready.retain(|request| self.next[request] < jobs[*request].max_positions && !sit_out.contains(request));
        if take_turns {
            let last_step = |request: &usize| self.last_step.get(request).copied().unwrap_or(0);
            let others = planned.iter().any(|request| prompts.contains(request));
            let longest_ago = ready.iter().map(last_step).min().filter(|_| !others).unwrap_or(0);
            let before = (self.steps + 1).saturating_sub(turns).max(longest_ago + 1);
            ready.retain(|request| !plans_ahead || last_step(request) < before);
            ready.truncate(decoding.len().div_ceil(turns));
        }
        for &request in &planned {
            self.last_step.insert(request, self.steps);
        }
        if shares {
            let (decoded, prompted) = planned.split_at(plan.decode_chunks);
            assert!(decoded.iter().all(|request| decoding.contains(request)));
            assert!(prompted.iter().all(|request| prompts.contains(request)));
            let moves = |request: &usize| decoded.contains(request);
            let may_wait = |request: &usize| self.next[request].is_multiple_of(self.limits.block_tokens);
            let all_move = ready.iter().all(|request| moves(request) || may_wait(request));
            assert!(take_turns || all_move, "every decoding sequence moves");
            return;
        }
        let (first, rest) = planned.split_at(ready.len());
        assert_eq!(first, ready, "every decoding sequence moves");
        assert_eq!(plan.decode_chunks, ready.len());
        if take_turns {
            let mut prompts = prompts.iter();
            assert!(
                rest.iter().all(|request| prompts.any(|prompt| prompt == request)),
                "oldest first"
            );
            let sampled = plan.logits.iter().filter(|row| row.sample).count();
            assert!(sampled <= scheduler.running().div_ceil(turns), "no more than its share");
        } else {
            assert_eq!(rest, &prompts[..rest.len()], "prompts are served oldest first");
            assert!(!rest.is_empty() || prompts.is_empty(), "the oldest prompt moves");
        }
    }

    /// The requests that wait for a block. They are at the end of one, and older requests may still ask for all that
    /// are free.
    fn check_waiting(&self, scheduler: &Scheduler, jobs: &[Job]) -> HashSet<usize> {
        let slots = (0..self.limits.max_batch).filter(|&slot| scheduler.waits_for_block(slot));
        let waiting: HashSet<_> = slots.filter_map(|slot| scheduler.request(slot)).collect();
        let mut asked_for = 0;
        for &request in &self.started {
            let (next, tokens) = (self.next[&request], self.limits.block_tokens);
            if waiting.contains(&request) {
                assert!(self.limits.has_full_layers && next > 0 && next.is_multiple_of(tokens));
                assert!(
                    self.limits.share_beginnings || scheduler.free_blocks() <= asked_for,
                    "request {request} waits for nothing"
                );
            }
            asked_for += jobs[request].max_positions.div_ceil(tokens) - next.div_ceil(tokens);
        }
        waiting
    }

    /// The rows are the next tokens of the request.
    fn check_rows(&mut self, plan: &StepPlan, chunk: &Chunk, request: usize, job: &Job) {
        let again = self.known(request, job).min(chunk.first_position + chunk.rows);
        self.recomputed += again.saturating_sub(chunk.first_position);
        let fed = self
            .fed
            .entry(request)
            .or_insert_with(|| [job.prompt.clone(), job.answer(request)].concat());
        let next = self.next.get_mut(&request).unwrap();
        assert_eq!(chunk.first_position, *next, "no position is left out or fed twice");
        *next += chunk.rows;
        assert!(*next <= job.max_positions);
        let rows = chunk.first_row..chunk.first_row + chunk.rows;
        for (row, position) in rows.zip(chunk.first_position..) {
            assert_eq!(plan.positions[row] as usize, position);
            // After an end token that is not known yet any token may be fed.
            let Some(&expected) = fed.get(position) else {
                assert!(self.limits.plans_ahead);
                continue;
            };
            let token = u32::try_from(plan.tokens[row]).unwrap_or_else(|_| {
                assert_eq!(plan.tokens[row], -1 - chunk.slot as i32);
                assert!(self.limits.plans_ahead && self.limits.depth > 1 && chunk.rows == 1);
                self.last_tokens[chunk.slot].unwrap()
            });
            if !self.wrong.contains(&request) {
                assert_eq!(token, expected);
            }
        }
    }

    /// Writes keys and values, as a step does before it attends.
    fn write(&mut self, plan: &StepPlan, chunk: &Chunk, request: usize) {
        let (full, ring) = (&plan.tables[chunk.full.clone()], &plan.tables[chunk.window.clone()]);
        let last = chunk.first_position + chunk.rows - 1;
        let block_tokens = self.limits.block_tokens;
        assert_eq!(full.is_empty(), !self.limits.has_full_layers);
        assert_eq!(ring.is_empty(), self.limits.sliding_window == 0);
        assert!(full.is_empty() || full.len() == last / block_tokens + 1);
        // Positions computed from a wrong token belong to no sequence.
        let is_wrong = self.wrong.contains(&request);
        let its = self.contents(request);
        for position in chunk.first_position..=last {
            let content = if is_wrong {
                (u64::MAX, position)
            } else {
                its.at(position)
            };
            let block = position / block_tokens;
            // A block has one kind of layers at a time.
            if !full.is_empty() {
                *its.full.place(full, block, position) = Some(content);
                its.window.lose(full[block]);
            }
            if !ring.is_empty() {
                *its.window.place(ring, block % ring.len(), position) = Some(content);
                its.full.lose(ring[block % ring.len()]);
            }
        }
    }

    fn contents(&mut self, request: usize) -> Contents<'_> {
        let fed = self.fed.get(&request).filter(|_| self.limits.share_beginnings);
        let hashes = fed.map(|fed| {
            self.hashes.entry(request).or_insert_with(|| {
                let mut hasher = DefaultHasher::new();
                let hash = |token: &u32| {
                    token.hash(&mut hasher);
                    hasher.finish() >> 1
                };
                fed.iter().map(hash).collect()
            })
        });
        Contents {
            request: request as u64,
            hashes: hashes.map(|hashes| &hashes[..]),
            full: &mut self.full,
            window: &mut self.window,
        }
    }

    /// Everything a row attends to is in the cache, and is its own.
    fn attend(&mut self, plan: &StepPlan, chunk: &Chunk, request: usize) {
        let (full, ring) = (&plan.tables[chunk.full.clone()], &plan.tables[chunk.window.clone()]);
        let first = chunk.first_position;
        let last = first + chunk.rows - 1;
        let (block_tokens, sliding_window) = (self.limits.block_tokens, self.limits.sliding_window);
        let its = self.contents(request);
        // Each row needs a longer prefix of the same positions, so the last row needs all of them.
        if !full.is_empty() {
            for position in 0..=last {
                let held = *its.full.place(full, position / block_tokens, position);
                assert_eq!(held, Some(its.at(position)), "full layers, row at {last}");
            }
        }
        // The windows overlap: together they are all positions from the first window's start to the last one's end.
        if !ring.is_empty() {
            for position in (first + 1).saturating_sub(sliding_window)..=last {
                let held = *its.window.place(ring, position / block_tokens % ring.len(), position);
                assert_eq!(held, Some(its.at(position)), "windowed layers, rows {first}..={last}");
            }
        }
    }

    /// Logits are wanted where the program samples, and everywhere when recording.
    fn check_logits(&self, plan: &StepPlan, scheduler: &Scheduler, jobs: &[Job]) {
        let mut wanted = plan.logits.iter();
        for chunk in &plan.chunks {
            let job = &jobs[scheduler.request(chunk.slot).unwrap()];
            let n_prompt = job.prompt.len();
            let again = scheduler
                .request(chunk.slot)
                .and_then(|request| self.again.get(&request));
            for (row, position) in (chunk.first_row..chunk.first_row + chunk.rows).zip(chunk.first_position..) {
                let sample = position + 1 >= n_prompt;
                let in_prompt = position + 1 < n_prompt - job.answered;
                let LogProbs { answer, prompt, top } = job.logprobs;
                let score = (in_prompt && prompt || sample && answer).then(|| RowScore {
                    next: job.prompt.get(position + 1).copied().filter(|_| in_prompt),
                    top,
                });
                let is_again = again.is_some_and(|&again| position < again);
                if is_again || !sample && score.is_none() && !self.limits.record_all {
                    continue;
                }
                let logits = wanted.next().expect("a row's logits are missing");
                let found = (logits.row, logits.slot, logits.position, logits.sample);
                assert_eq!(found, (row, chunk.slot, position, sample));
                assert_eq!(logits.score, score);
            }
        }
        assert!(wanted.next().is_none());
    }

    /// How many of a request's first rows were committed before it began, here or on a device that failed.
    fn known(&self, request: usize, job: &Job) -> usize {
        self.again.get(&request).map_or(job.lost, |&again| again.max(job.lost))
    }

    /// A request waits again. What is committed is computed again.
    fn preempt(&mut self, request: usize, job: &Job) {
        let committed = self.committed.get(&request).copied().unwrap_or(0);
        let again = self.again.entry(request).or_insert(0);
        *again = committed.max(*again);
        // Those in flight nobody commits.
        let next = self.next.remove(&request).unwrap_or(0);
        let began = self.began.get(&request).copied().unwrap_or(0);
        self.recomputed += next.saturating_sub(began.max(self.known(request, job)));
        self.preempted.insert(request);
        self.last_step.remove(&request);
        self.wrong.remove(&request);
        self.started.retain(|&started| started != request);
    }

    /// Forgets requests that have left.
    fn leave(&mut self, request: usize) {
        self.committed.remove(&request);
        self.began.remove(&request);
        self.again.remove(&request);
        self.preempted.remove(&request);
        self.next.remove(&request);
        self.fed.remove(&request);
        self.hashes.remove(&request);
        self.wrong.remove(&request);
        self.started.retain(|&started| started != request);
    }
}

/// Who holds how many blocks, from what the plans say.
#[derive(Default)]
struct Ledger {
    /// Blocks of the full layers that each running request holds.
    held: BTreeMap<usize, usize>,
    /// Whether an answer has ended before its limit: then more may start than without.
    ended_early: bool,
}

impl Ledger {
    /// Counts anew after blocks were lent, and checks the rules of `lending.rs`. Requests start in the order of
    /// numbers.
    fn check(&mut self, device: &Device, scheduler: &Scheduler, jobs: &[Job], first_waiting: Option<&Job>) {
        let limits = &device.limits;
        let free = scheduler.free_blocks();
        let tokens = limits.block_tokens;
        let slots = (0..limits.max_batch).filter_map(|slot| Some((scheduler.request(slot)?, slot)));
        let running: BTreeMap<usize, usize> = slots.collect();
        assert_eq!(running.len(), scheduler.running());
        self.held.retain(|request, _| running.contains_key(request));
        let ring = |request: usize| {
            let job = &jobs[request];
            let decodes = device.next.get(&request).is_some_and(|&next| next >= job.prompt.len());
            if decodes {
                Self::decoding_ring(limits, job)
            } else {
                Self::ring(limits, job)
            }
        };
        let rings: usize = running.keys().map(|&request| ring(request)).sum();
        assert_eq!(scheduler.blocks_for_rings(), rings);
        if !limits.has_full_layers {
            assert_eq!(free + rings, limits.blocks);
            return;
        }
        let before = self.held.len();
        let waits: Vec<_> = running.values().map(|&slot| scheduler.waits_for_block(slot)).collect();
        for (&request, &waits) in running.keys().zip(&waits) {
            let next = device.next.get(&request).copied().unwrap_or(0);
            let has = next.div_ceil(tokens).max(if waits { 0 } else { next / tokens + 1 });
            let need = jobs[request].max_positions.div_ceil(tokens);
            let first = jobs[request].prompt.len().div_ceil(tokens);
            let held = self.held.entry(request).or_insert(first);
            assert!(
                !waits || *held == next / tokens,
                "it waits, and holds a block for its next position"
            );
            *held = has.min(need).max(*held);
        }
        assert_eq!(free + rings + self.held.values().sum::<usize>(), limits.blocks);
        // What each may still ask for, and what is free or held by older ones.
        let (mut reach, mut spare, mut all) = (free, usize::MAX, Vec::new());
        for ((&request, held), &waits) in self.held.iter().zip(&waits) {
            let ring = ring(request);
            let (held, need) = (held + ring, jobs[request].max_positions.div_ceil(tokens) + ring);
            assert!(need - held <= reach, "request {request} could wait for ever");
            all.push((held, need, waits, spare));
            spare = spare.min(reach - (need - held));
            reach += held;
        }
        assert!(all.is_empty() || !all[0].2, "the oldest one waits");
        let may_ask_for = |part: &[(usize, usize, bool, usize)]| part.iter().map(|one| one.1 - one.0).sum::<usize>();
        let lent_to = all.len() - (self.held.len() - before);
        let most = limits.blocks + limits.blocks / 8;
        let forecast = |all: &[(usize, usize)]| {
            let at = |time| {
                all.iter()
                    .filter(|one| one.1 - one.0 >= time)
                    .map(|one| one.0 + time)
                    .sum::<usize>()
            };
            (0..=limits.blocks).map(at).max().unwrap_or(0)
        };
        let grown: Vec<_> = all.iter().map(|&(held, need, ..)| (held, need)).collect();
        // With the blocks that were lent the forecast may be another than before.
        if self.ended_early && forecast(&grown[..lent_to]) + lent_to > most {
            return;
        }
        let old = lent_to.div_ceil(4);
        let kept = may_ask_for(&all[..old]);
        for (place, &(_, _, _, spare)) in all.iter().enumerate().filter(|(_, one)| one.2) {
            let kept = if place < old { 0 } else { kept };
            assert!(spare == 0 || free <= kept, "a sequence waits for nothing");
        }
        let mut all = grown;
        if self.held.len() > before && !self.ended_early {
            assert!(forecast(&all) <= most, "more have started than the forecast allows");
        }
        if let Some(job) = first_waiting.filter(|_| scheduler.has_free_slot()) {
            let ring = Self::ring(limits, job);
            let [first, need] = [job.prompt.len(), job.max_positions].map(|n| n.div_ceil(tokens) + ring);
            all.push((first, need));
            let may = first <= spare.min(free.saturating_sub(kept)) && forecast(&all) <= most;
            assert!(!may, "a request waits for nothing");
        }
    }

    fn ring(limits: &Limits, job: &Job) -> usize {
        let rows = if limits.record_all {
            limits.max_logits_rows
        } else {
            usize::MAX
        };
        let rows = rows.min(limits.chunk_tokens).min(limits.step_tokens);
        match limits.sliding_window {
            0 => 0,
            window => ring_blocks(limits.block_tokens, window, rows, job.prompt.len(), job.max_positions),
        }
    }

    /// The ring once the prompt is computed.
    fn decoding_ring(limits: &Limits, job: &Job) -> usize {
        match limits.sliding_window {
            0 => 0,
            window => ring_blocks(limits.block_tokens, window, 1, 1, job.max_positions),
        }
    }
}

/// Scheduler, device and requests together.
struct World {
    ledger: Ledger,
    scheduler: Scheduler,
    device: Device,
    /// The step planned last.
    plan: StepPlan,
    /// Requests that were cancelled.
    cancelled: HashSet<usize>,
    under_way: VecDeque<UnderWay>,
    jobs: Vec<Job>,
    answers: Vec<Option<Vec<u32>>>,
    /// The tokens of requests whose tokens are handed over one by one.
    handed: Vec<Vec<u32>>,
    /// Whether the scheduler is told of the requests in a queue.
    looks_ahead: bool,
    /// Before every so many plans the youngest is made to make way; 0: never.
    preempts_every: usize,
    /// Plans made.
    begun: usize,
    /// The most requests that it may run.
    share: usize,
    /// The requests that ran when a step was planned last.
    ran: HashSet<usize>,
    /// Rows of all steps, but those behind an answer's end.
    rows: usize,
}

impl World {
    fn new(limits: Limits) -> Self {
        Self {
            ledger: Ledger::default(),
            device: Device::new(&limits),
            scheduler: Scheduler::new(limits).unwrap(),
            plan: StepPlan::default(),
            cancelled: HashSet::new(),
            under_way: VecDeque::new(),
            jobs: Vec::new(),
            answers: Vec::new(),
            handed: Vec::new(),
            looks_ahead: false,
            preempts_every: 0,
            begun: 0,
            share: usize::MAX,
            ran: HashSet::new(),
            rows: 0,
        }
    }

    /// Submits so many requests with prompts of equal length, whose answers end at their last position.
    fn submit_alike(&mut self, requests: usize, n_prompt: usize, max_positions: usize) {
        for _ in 0..requests {
            self.submit(Job {
                prompt: vec![1; n_prompt],
                max_positions,
                ..Job::default()
            });
        }
    }

    fn submit(&mut self, job: Job) {
        let request = self.jobs.len();
        self.add(job);
        self.submit_number(request);
    }

    /// Adds a job that is not submitted yet.
    fn add(&mut self, job: Job) {
        self.jobs.push(job);
        self.answers.push(None);
        self.handed.push(Vec::new());
    }

    /// Submits one of `jobs`.
    fn submit_number(&mut self, request: usize) {
        self.scheduler.submit(self.jobs[request].request(request)).unwrap();
    }

    /// Begins as many steps as may be in flight and completes the oldest one; `false` if there is nothing to do.
    fn step(&mut self) -> bool {
        while self.under_way.len() < self.device.limits.depth && self.begin() {}
        self.complete()
    }

    /// Adds the rows of a step to those of all steps, but for those behind an answer's end.
    fn count_rows(&mut self, step: &UnderWay) {
        for (chunk, &request) in step.plan.chunks.iter().zip(&step.requests) {
            self.rows += if self.answers[request].is_none() { chunk.rows } else { 0 };
        }
    }

    /// The scheduler counts rows that are computed again as the device does.
    fn count_recomputed(&mut self) {
        self.device.counted += self.scheduler.take_recomputed();
        // Of beginnings that a sequence once shared, and has to compute after all, it does not know who has.
        if !self.device.limits.share_beginnings || self.preempts_every == 0 {
            assert_eq!(self.device.counted, self.device.recomputed as u64);
        }
    }

    /// Completes the oldest step in flight; `false` if there is none.
    fn complete(&mut self) -> bool {
        let Some(step) = self.under_way.pop_front() else {
            return false;
        };
        self.count_rows(&step);
        let mut finished = Vec::new();
        let left_to_host = step
            .left_to_host
            .iter()
            .map(|&slot| (slot, self.scheduler.drawing(slot)));
        let left_to_host: Vec<_> = left_to_host.collect();
        for chunk in &step.plan.chunks {
            if let Some(request) = self.scheduler.drawing(chunk.slot) {
                let committed = chunk.first_position + chunk.rows;
                self.device.committed.insert(request, committed);
            }
        }
        self.scheduler.commit(&step.plan, &step.sampled, &mut finished).unwrap();
        for (slot, request) in left_to_host {
            self.scheduler.mend(slot);
            // Unless it was cancelled, or this was its last token.
            let request = request.filter(|&request| self.scheduler.request(slot) == Some(request));
            let row = step.plan.logits.iter().find(|row| row.sample && row.slot == slot);
            if let (Some(request), Some(row)) = (request, row) {
                self.device.mend(request, row.position + 1);
            }
        }
        for Answer { number, tokens, .. } in finished {
            self.leave(number, tokens.len());
            assert_eq!(self.jobs[number].outlet, Outlet::Whole);
            assert!(self.answers[number].replace(tokens).is_none(), "finished twice");
        }
        let sampled: Vec<_> = self.scheduler.take_sampled().collect();
        for Sampled { number, token, end } in sampled {
            assert_eq!(self.jobs[number].outlet, Outlet::Tokens);
            assert!(
                !self.cancelled.contains(&number),
                "a token after the request was cancelled"
            );
            self.handed[number].push(token);
            let Some(end) = end else { continue };
            let expected = match token {
                199_999 | 200_002 => End::EndToken(token),
                STOP => End::StopToken(token),
                _ => End::Length,
            };
            let is_full = self.handed[number].len() < self.jobs[number].min_tokens;
            assert_eq!(end, if is_full { End::Length } else { expected });
            self.leave(number, self.handed[number].len());
            let answer = self.handed[number].clone();
            assert!(self.answers[number].replace(answer).is_none(), "finished twice");
        }
        true
    }

    /// A request has its answer, of so many tokens.
    fn leave(&mut self, request: usize, tokens: usize) {
        let job = &self.jobs[request];
        self.ledger.ended_early |= job.prompt.len() + tokens - job.answered <= job.max_positions;
        self.device.leave(request);
    }

    /// Plans a step and begins it; `false` if there is none.
    fn begin(&mut self) -> bool {
        self.begun += 1;
        if self.preempts_every > 0 && self.begun.is_multiple_of(self.preempts_every) {
            self.preempt_youngest();
        }
        let planned = self.scheduler.plan(&mut self.plan);
        self.see_preempted();
        self.check_lending();
        if !planned {
            return false;
        }
        let sit_out = self.sit_out();
        let step = self.device.step(&self.plan, &self.scheduler, &self.jobs, &sit_out);
        self.scheduler.begin(&self.plan);
        self.count_recomputed();
        self.under_way.push_back(step);
        true
    }

    fn running(&self) -> HashSet<usize> {
        let slots = 0..self.device.limits.max_batch;
        slots.filter_map(|slot| self.scheduler.request(slot)).collect()
    }

    /// Has the youngest make way, and who waits for what it would have computed.
    fn preempt_youngest(&mut self) {
        let before = self.running();
        self.scheduler.preempt_youngest();
        for &request in before.difference(&self.running()) {
            self.ran.remove(&request);
            self.preempted(request);
        }
    }

    fn preempted(&mut self, request: usize) {
        self.device.preempt(request, &self.jobs[request]);
        self.ledger.held.remove(&request);
        for step in &mut self.under_way {
            step.not_on_device.remove(&request);
        }
    }

    /// Finds the requests that were preempted since the last step.
    fn see_preempted(&mut self) {
        let slots = 0..self.device.limits.max_batch;
        let planned: HashMap<usize, usize> = slots
            .filter_map(|slot| self.scheduler.request(slot).zip(self.scheduler.planned(slot)))
            .collect();
        let ran = std::mem::replace(&mut self.ran, planned.keys().copied().collect());
        for request in ran {
            let next = self.device.next.get(&request).copied().unwrap_or(0);
            let is_there = self.answers[request].is_none() && !self.cancelled.contains(&request);
            if is_there && planned.get(&request).is_none_or(|&planned| planned < next) {
                self.preempted(request);
            }
        }
        self.device.preempted.retain(|request| !self.ran.contains(request));
    }

    /// Checks who holds blocks, after they were lent.
    fn check_lending(&mut self) {
        let running = self.running();
        let mut waiting = (0..self.jobs.len()).filter(|request| {
            self.answers[*request].is_none() && !self.cancelled.contains(request) && !running.contains(request)
        });
        // With a timetable one that was preempted waits for its time.
        let waits_for_time = |request: &usize| self.looks_ahead && self.device.preempted.contains(request);
        let first = waiting
            .next()
            .filter(|request| self.scheduler.waiting() > 0 && !waits_for_time(request));
        let first = first.map(|first| &self.jobs[first]);
        if self.device.limits.share_beginnings {
            return;
        }
        self.ledger.check(&self.device, &self.scheduler, &self.jobs, first);
    }

    /// Takes requests from a queue as an engine does, and completes a step; `false` if there is nothing to do.
    fn serve(&mut self, queue: &mut VecDeque<usize>) -> bool {
        while self.under_way.len() < self.device.limits.depth {
            if self.looks_ahead {
                let of_its_share = queue.len().min(self.share.saturating_sub(self.scheduler.running()));
                let ahead = (0..of_its_share).map(|i| queue[i * queue.len() / of_its_share]);
                self.scheduler.look_ahead(ahead.map(|request| Ahead {
                    n_prompt: self.jobs[request].prompt.len(),
                    max_positions: self.jobs[request].max_positions,
                }));
            }
            while let Some(&request) = queue.front() {
                let job = &self.jobs[request];
                let has_slot = self.scheduler.has_free_slot();
                if self.scheduler.running() + self.scheduler.waiting() >= self.share
                    || !(has_slot && self.scheduler.has_room(&job.request(request)))
                {
                    break;
                }
                self.submit_number(request);
                queue.pop_front();
            }
            let began = self.begin();
            let shares = self.device.limits.share_beginnings;
            assert!(
                shares || self.scheduler.waiting() <= self.device.preempted.len(),
                "what had room has started"
            );
            if !began {
                break;
            }
        }
        if self.under_way.is_empty() {
            assert_eq!((self.scheduler.running(), queue.len()), (0, 0), "nobody goes on");
            return false;
        }
        self.complete()
    }

    /// Requests that cannot continue before a step in flight completes.
    fn sit_out(&self) -> HashSet<usize> {
        let mut sit_out = HashSet::new();
        for step in &self.under_way {
            sit_out.extend(&step.not_on_device);
            let rows = step.plan.logits.iter().filter(|row| row.sample);
            // Rows that are skipped delay no request.
            let next = |row: &LogitsRow| {
                let request = self.scheduler.request(row.slot)?;
                (self.device.next.get(&request) == Some(&(row.position + 1))).then_some(request)
            };
            if !self.device.limits.plans_ahead {
                sit_out.extend(rows.filter_map(next));
            }
        }
        sit_out
    }

    /// Lets sequences take turns, or go on with what the device knows.
    fn plan_ahead(&mut self, plans_ahead: bool) {
        self.scheduler.plan_ahead(plans_ahead);
        self.device.limits.plans_ahead = plans_ahead;
    }

    fn run(&mut self) {
        while self.step() {}
        self.check_idle();
    }

    /// All requests are answered and all blocks are free.
    fn check_idle(&self) {
        assert_eq!(self.scheduler.free_blocks(), self.device.limits.blocks);
        assert_eq!(self.scheduler.blocks_for_rings(), 0);
        assert_eq!((self.scheduler.running(), self.scheduler.waiting()), (0, 0));
        assert!(self.device.started.is_empty());
    }

    /// All requests have their answers, but for those cancelled.
    fn check_answers(&self) {
        for (request, (job, answer)) in self.jobs.iter().zip(&self.answers).enumerate() {
            // What it was submitted with.
            let mut job = job.clone();
            job.prompt.truncate(job.prompt.len() - job.answered);
            job.answered = 0;
            let expected = job.answer(request);
            let handed = &self.handed[request];
            assert_eq!(*handed, expected[..handed.len()], "request {request}");
            let expected = (!self.cancelled.contains(&request)).then_some(expected);
            assert_eq!(*answer, expected, "request {request}");
        }
    }

    /// Cancels a request; `false` if it is neither waiting nor running.
    fn cancel(&mut self, request: usize) -> bool {
        let was_there = self.scheduler.cancel(|number| number == request) > 0;
        if was_there {
            self.device.leave(request);
            self.cancelled.insert(request);
        }
        was_there
    }

    /// Takes the device away, and gives its requests back to the queue, in front.
    fn fail(&mut self, rng: &mut ChaCha8Rng, queue: &mut VecDeque<usize>) {
        let unfinished = self.lose_device(rng);
        unfinished
            .iter()
            .rev()
            .for_each(|request| queue.push_front(request.number));
    }

    /// Takes the device away: the step that failed was planned, perhaps begun, and never committed; nor were others
    /// under way. Gives the requests without an answer.
    fn lose_device(&mut self, rng: &mut ChaCha8Rng) -> Vec<Request> {
        if rng.random_bool(0.5) {
            self.scheduler.plan(&mut self.plan);
        } else {
            self.begin();
        }
        for step in std::mem::take(&mut self.under_way) {
            self.count_rows(&step);
        }
        let unfinished = self.scheduler.take_unfinished();
        for request in self.device.started.clone() {
            self.device.preempt(request, &self.jobs[request]);
        }
        self.count_recomputed();
        let known = |request: &Request| self.device.known(request.number, &self.jobs[request.number]);
        let is_known = unfinished.iter().all(|request| request.lost == known(request));
        assert!(is_known || self.device.limits.share_beginnings);
        self.check_idle();
        self.device = Device {
            recomputed: self.device.recomputed,
            counted: self.device.counted,
            ..Device::new(&self.device.limits)
        };
        self.ledger.held.clear();
        self.ran.clear();
        for request in &unfinished {
            let job = &mut self.jobs[request.number];
            let handed = &self.handed[request.number];
            job.prompt.extend(&handed[job.answered..]);
            job.answered = handed.len();
            job.lost = request.lost;
            assert_eq!(
                *request,
                job.request(request.number),
                "it goes on behind what was handed over"
            );
        }
        unfinished
    }
}

fn plain_limits() -> Limits {
    Limits {
        max_batch: 4,
        step_tokens: 32,
        chunk_tokens: 32,
        max_logits_rows: 4,
        max_positions: u32::MAX as usize,
        block_tokens: 16,
        blocks: 128,
        sliding_window: 20,
        has_full_layers: true,
        share_beginnings: false,
        share_answers: true,
        record_all: false,
        depth: 1,
        plans_ahead: false,
    }
}

/// Limits that are valid, and often as tight as can be.
fn random_limits(rng: &mut ChaCha8Rng) -> Limits {
    let max_batch = [1, 2, 3, 8, 30][rng.random_range(0..5)];
    let step_tokens = max_batch + [0, 0, 1, 7, 16, 100][rng.random_range(0..6)];
    let sliding_window = [0, 1, 2, 15, 16, 17, 40, 1000][rng.random_range(0..8)];
    Limits {
        max_batch,
        step_tokens,
        chunk_tokens: [1, 5, 16, step_tokens][rng.random_range(0..4)],
        max_logits_rows: max_batch + [0, 1, 50][rng.random_range(0..3)],
        max_positions: u32::MAX as usize,
        block_tokens: [16, 64, 5][rng.random_range(0..3)],
        blocks: rng.random_range(1..40) + rng.random_range(1..40),
        sliding_window,
        has_full_layers: sliding_window == 0 || rng.random_bool(0.8),
        share_beginnings: false,
        share_answers: true,
        record_all: rng.random_bool(0.3),
        depth: rng.random_range(1..6),
        plans_ahead: rng.random_bool(0.5),
    }
}

/// A random job that could run alone, if one is found soon.
fn random_job(rng: &mut ChaCha8Rng, limits: &Limits) -> Option<Job> {
    let mut trial = Scheduler::new(limits.clone()).unwrap();
    (0..20).find_map(|_| {
        let longest = [8, 33, 200][rng.random_range(0..3)];
        let max_positions = rng.random_range(1..=longest);
        let job = Job::random(rng, max_positions);
        let fits = trial.submit(job.largest().request(0)).is_ok();
        fits.then_some(job)
    })
}

/// Runs `body` with many seeds and names the one that failed.
fn for_seeds(seeds: u64, body: impl Fn(&mut ChaCha8Rng) + std::panic::RefUnwindSafe) {
    for seed in 0..seeds {
        let outcome = std::panic::catch_unwind(|| body(&mut ChaCha8Rng::seed_from_u64(seed)));
        if let Err(panic) = outcome {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

/// Requests come in bursts of random size between steps.
fn arrive(rng: &mut ChaCha8Rng, world: &mut World, jobs: usize, mut between: impl FnMut(&mut ChaCha8Rng, &mut World)) {
    while world.jobs.len() < jobs {
        for _ in 0..rng.random_range(0..6) {
            let Some(job) = random_job(rng, &world.device.limits) else {
                break;
            };
            world.submit(job);
        }
        for _ in 0..rng.random_range(1..10) {
            between(rng, world);
            world.step();
        }
        if world.jobs.is_empty() {
            return;
        }
    }
}

#[test]
fn random_arrivals_under_random_limits() {
    for_seeds(4000, |rng| {
        let mut world = World::new(random_limits(rng));
        arrive(rng, &mut world, 30, |_, _| ());
        world.run();
        world.check_answers();
    });
}

/// Limits with little more blocks than the longest request needs, and requests that fit.
fn scarce(rng: &mut ChaCha8Rng, jobs: usize) -> (Limits, Vec<Job>) {
    let limits = random_limits(rng);
    let block_tokens = [1, 2, 4, 5, 16, 64][rng.random_range(0..6)];
    let blocks = [3, 8, 30][rng.random_range(0..3)];
    let longest = (block_tokens * rng.random_range(1..=blocks)).min(250);
    let mut jobs: Vec<Job> = (0..jobs)
        .map(|_| {
            let max_positions = if rng.random_bool(0.3) {
                longest
            } else {
                rng.random_range(1..=longest)
            };
            let mut job = Job::random(rng, max_positions);
            if rng.random_bool(0.6) {
                job.prompt.truncate(rng.random_range(1..=job.prompt.len()));
            }
            job
        })
        .collect();
    if rng.random_bool(0.3) {
        jobs.iter_mut().for_each(|job| job.max_positions = longest);
    }
    let mut limits = Limits {
        block_tokens,
        depth: limits.depth.min(block_tokens + 1),
        blocks: usize::MAX >> 33,
        ..limits
    };
    let blocks = jobs.iter().map(|job| {
        let full = if limits.has_full_layers {
            job.max_positions.div_ceil(block_tokens)
        } else {
            0
        };
        full + Ledger::ring(&limits, &job.largest())
    });
    let most = blocks.max().unwrap();
    limits.blocks = most + [0, 0, 1, 3, most, 7 * most][rng.random_range(0..6)];
    (limits, jobs)
}

/// Requests are taken from a queue as they have room; some are cancelled, devices fail, sequences begin to take turns.
#[test]
fn scarce_blocks_are_enough_for_all() {
    for_seeds(1000, |rng| {
        let n = rng.random_range(1..40);
        let (limits, jobs) = scarce(rng, n);
        let mut world = World::new(limits);
        jobs.into_iter().for_each(|job| world.add(job));
        let [cancel, fail, turn] = [(); 3].map(|()| [0.0, 0.0, 0.01, 0.1][rng.random_range(0..4)]);
        let direct = rng.random_bool(0.3);
        world.looks_ahead = rng.random_bool(0.5);
        let mut failures = 0;
        let mut queue: VecDeque<_> = (0..n).collect();
        if direct {
            queue.drain(..).for_each(|request| world.submit_number(request));
        }
        loop {
            let more = if direct { world.step() } else { world.serve(&mut queue) };
            if !more {
                break;
            }
            if rng.random_bool(cancel) {
                let request = rng.random_range(0..n);
                world.cancel(request);
            }
            if rng.random_bool(turn) {
                let plans_ahead = rng.random_bool(0.5);
                world.plan_ahead(plans_ahead);
            }
            if failures < 4 && rng.random_bool(fail * 0.3) {
                failures += 1;
                world.fail(rng, &mut queue);
                if rng.random_bool(0.5) {
                    world.scheduler = Scheduler::new(world.device.limits.clone()).unwrap();
                }
                if direct {
                    queue.drain(..).for_each(|request| world.submit_number(request));
                }
            }
        }
        world.check_idle();
        world.check_answers();
    });
}

#[test]
fn thousands_of_requests_at_once() {
    for_seeds(2, |rng| {
        let mut world = World::new(Limits {
            max_batch: 64,
            step_tokens: 256,
            chunk_tokens: 128,
            max_logits_rows: 64,
            blocks: 550,
            sliding_window: 32,
            ..plain_limits()
        });
        for _ in 0..5000 {
            let max_positions = rng.random_range(1..=100);
            world.submit(Job::random(rng, max_positions));
        }
        assert_eq!(world.scheduler.waiting(), 5000);
        world.run();
        world.check_answers();
    });
}

#[test]
fn cancelled_requests_leave_and_the_others_do_not_notice() {
    for_seeds(1000, |rng| {
        let mut world = World::new(random_limits(rng));
        arrive(rng, &mut world, 30, |rng, world| {
            if world.jobs.is_empty() || rng.random_bool(0.7) {
                return;
            }
            let request = rng.random_range(0..world.jobs.len());
            let was_there = world.answers[request].is_none() && !world.cancelled.contains(&request);
            assert_eq!(world.cancel(request), was_there);
        });
        world.run();
        world.check_answers();
    });
}

#[test]
fn cancelling_during_a_step_drops_its_rows() {
    let mut world = World::new(plain_limits());
    for n_prompt in [1, 2, 3] {
        world.submit(Job {
            prompt: vec![5; n_prompt],
            max_positions: 10,
            ..Job::default()
        });
    }
    assert!(world.scheduler.plan(&mut world.plan));
    let step = world
        .device
        .step(&world.plan, &world.scheduler, &world.jobs, &HashSet::new());
    world.scheduler.begin(&world.plan);
    assert!(world.cancel(1));
    let mut finished = Vec::new();
    world
        .scheduler
        .commit(&world.plan, &step.sampled, &mut finished)
        .unwrap();
    assert!(finished.is_empty());
    world.run();
    world.check_answers();
}

#[test]
fn requests_of_a_device_that_fails_finish_on_another() {
    for_seeds(1000, |rng| {
        let mut world = World::new(random_limits(rng));
        arrive(rng, &mut world, 30, |rng, world| {
            if rng.random_bool(0.9) {
                return;
            }
            let unfinished = world.lose_device(rng);
            assert!(!world.scheduler.plan(&mut world.plan));
            let missing: Vec<_> = (0..world.jobs.len()).filter(|&r| world.answers[r].is_none()).collect();
            let given_back: Vec<_> = unfinished.iter().map(|request| request.number).collect();
            assert_eq!(given_back, missing, "in the order in which they came");
            world.scheduler = Scheduler::new(world.device.limits.clone()).unwrap();
            for request in unfinished {
                world.scheduler.submit(request).unwrap();
            }
        });
        world.run();
        world.check_answers();
    });
}

#[test]
fn long_prompts_are_cut_and_decoding_goes_on_beside_them() {
    let mut world = World::new(plain_limits());
    for (n_prompt, max_positions) in [(3, 40), (100, 103), (10, 11)] {
        world.submit(Job {
            prompt: vec![1; n_prompt],
            max_positions,
            ..Job::default()
        });
    }
    let mut rows = Vec::new();
    for _ in 0..6 {
        assert!(world.step());
        rows.push(world.plan.chunks.iter().map(|chunk| chunk.rows).collect::<Vec<_>>());
    }
    let expected: [&[usize]; 6] = [&[3, 29], &[1, 31], &[1, 31], &[1, 9, 10], &[1, 1, 1], &[1, 1]];
    assert_eq!(rows, expected);
    world.run();
    world.check_answers();
}

#[test]
fn recording_cuts_chunks_to_the_logits_rows() {
    let mut world = World::new(Limits {
        share_beginnings: false,
        record_all: true,
        max_batch: 2,
        max_logits_rows: 5,
        ..plain_limits()
    });
    world.submit_alike(2, 7, 8);
    let mut rows = Vec::new();
    while world.step() {
        assert_eq!(world.plan.logits.len(), world.plan.rows());
        rows.push(world.plan.chunks.iter().map(|chunk| chunk.rows).collect::<Vec<_>>());
    }
    let expected: [&[usize]; 4] = [&[5], &[2, 3], &[1, 4], &[1]];
    assert_eq!(rows, expected);
    world.check_answers();
}

#[test]
fn a_slot_is_filled_again_in_the_next_step() {
    let mut world = World::new(Limits {
        max_batch: 2,
        ..plain_limits()
    });
    world.submit_alike(6, 4, 4);
    for waiting in [4, 2, 0] {
        assert!(world.step());
        assert_eq!(world.plan.chunks.len(), 2);
        assert_eq!(world.scheduler.waiting(), waiting);
    }
    assert!(!world.step());
    world.check_answers();
    assert!(world.answers.iter().flatten().all(|answer| answer.len() == 1));
}

#[test]
fn the_answer_ends_at_the_end_token_or_the_last_step() {
    for (end_tokens, expected) in [
        ([7, 7, 7, 7], vec![7, 7, 7]),
        ([EndTokens::RELEASED[0], 7, 7, 7], vec![EndTokens::RELEASED[0]]),
        ([7, EndTokens::RELEASED[1], 7, 7], vec![7, EndTokens::RELEASED[1]]),
        ([7, 7, EndTokens::RELEASED[0], 7], vec![7, 7, EndTokens::RELEASED[0]]),
    ] {
        let mut scheduler = Scheduler::new(plain_limits()).unwrap();
        scheduler.submit(Request::greedy(3, vec![1, 2], 4)).unwrap();
        let (mut plan, mut finished, mut sampled) = (StepPlan::default(), Vec::new(), end_tokens.iter());
        while scheduler.plan(&mut plan) {
            let token = *sampled.next().unwrap();
            scheduler.begin(&plan);
            scheduler.commit(&plan, &[token], &mut finished).unwrap();
        }
        let tokens = expected;
        let rng_state = 0;
        assert_eq!(
            finished,
            [Answer {
                number: 3,
                tokens,
                rng_state
            }]
        );
    }
}

/// Nine requests may ask for 36 blocks, and there are 32. All start at once; when the blocks are used up, some wait
/// until the oldest have ended.
#[test]
fn more_run_than_have_room_at_their_longest() {
    let mut world = World::new(Limits {
        max_batch: 9,
        max_logits_rows: 9,
        blocks: 32,
        sliding_window: 0,
        ..plain_limits()
    });
    world.submit_alike(9, 3, 64);
    let mut rows = Vec::new();
    while world.step() {
        rows.push(world.plan.chunks.len());
    }
    world.check_idle();
    world.check_answers();
    // The oldest three keep a block each, two of the others get one: five end, then four.
    let expected = [(9, 46), (5, 16), (4, 16)].map(|(rows, steps)| vec![rows; steps]);
    assert_eq!(rows, expected.concat());
}

/// Ten requests of four blocks have room at their longest, and eleven start at once. More run if they start one by one.
#[test]
fn requests_of_different_ages_have_room_where_others_have_not() {
    let running = |steps_between: usize| {
        let mut world = World::new(Limits {
            max_batch: 30,
            max_logits_rows: 30,
            blocks: 40,
            sliding_window: 0,
            ..plain_limits()
        });
        for _ in 0..30 {
            world.submit(Job {
                prompt: vec![1; 3],
                max_positions: 64,
                ..Job::default()
            });
            (0..steps_between).for_each(|_| assert!(world.step()));
        }
        assert!(world.step());
        let running = world.scheduler.running();
        world.run();
        world.check_answers();
        running
    };
    assert_eq!([0, 4].map(running), [11, 15]);
}

/// Serves these requests from the queue of so many replicas, whose steps take equally long. Gives the steps, and the
/// most requests that ran at once on one of them.
fn serve_all(limits: &Limits, jobs: &[Job], looks_ahead: bool, replicas: usize) -> (usize, usize) {
    let world = || {
        let mut world = World::new(limits.clone());
        world.looks_ahead = looks_ahead;
        jobs.iter().for_each(|job| world.add(job.clone()));
        world
    };
    let mut worlds: Vec<_> = (0..replicas).map(|_| world()).collect();
    let mut queue: VecDeque<_> = (0..jobs.len()).collect();
    let (mut most, mut goes_on) = (0, true);
    while goes_on {
        goes_on = false;
        for i in 0..replicas {
            let running = worlds.iter().map(|world| world.scheduler.running()).sum::<usize>();
            let world = &mut worlds[i];
            world.share = (running + queue.len()).div_ceil(replicas);
            goes_on |= (world.scheduler.running() > 0 || !queue.is_empty()) && world.serve(&mut queue);
            most = most.max(world.scheduler.running());
        }
    }
    worlds.iter().for_each(World::check_idle);
    let steps = worlds.iter().map(|world| world.device.steps).max();
    let mut first = worlds.swap_remove(0);
    for world in &mut worlds {
        let answers = first.answers.iter_mut().zip(&mut world.answers);
        answers.for_each(|(answer, other)| *answer = answer.take().or_else(|| other.take()));
        for (handed, other) in first.handed.iter_mut().zip(&mut world.handed) {
            handed.append(other);
        }
    }
    first.check_answers();
    (steps.unwrap_or(0), most)
}

/// Room for 30 of these requests at their longest.
fn room_for_30() -> Limits {
    Limits {
        max_batch: 100,
        max_logits_rows: 100,
        step_tokens: 2000,
        blocks: 30 * 8,
        sliding_window: 0,
        depth: 2,
        plans_ahead: true,
        ..plain_limits()
    }
}

fn unending(n_prompt: usize, max_positions: usize) -> Job {
    Job {
        prompt: vec![1; n_prompt],
        max_positions,
        ..Job::default()
    }
}

/// Three waves of one age become one of all ages; the answers are the same.
#[test]
fn starts_are_spread_where_more_wait_than_have_room() {
    // With several steps computed at once, each has sequences of its own, and a token takes as many steps.
    for (depth, expected) in [
        (2, [(371, 58), (293, 60)]),
        (3, [(744, 60), (587, 60)]),
        (5, [(1587, 55), (1175, 60)]),
    ] {
        let limits = Limits { depth, ..room_for_30() };
        let jobs = vec![unending(8, 128); 88];
        let found = [false, true].map(|looks_ahead| serve_all(&limits, &jobs, looks_ahead, 1));
        assert_eq!(found, expected, "steps, and the most at once");
    }
}

/// Sequences' rings are among the blocks.
#[test]
fn starts_are_spread_with_rings() {
    let limits = Limits {
        blocks: 30 * 10,
        sliding_window: 16,
        ..room_for_30()
    };
    let jobs = vec![unending(8, 128); 88];
    let found = [false, true].map(|looks_ahead| serve_all(&limits, &jobs, looks_ahead, 1));
    assert_eq!(found, [(388, 50), (319, 57)], "steps, and the most at once");
}

/// So many requests as a scheduler asks for may start: each with a block and its ring, and there are blocks for all at
/// their longest.
#[test]
fn there_is_room_for_rings_too() {
    let limits = Limits {
        max_batch: 30,
        max_logits_rows: 30,
        blocks: 20,
        sliding_window: 16,
        ..plain_limits()
    };
    let mut world = World::new(limits);
    let room = |world: &mut World| [16, 64].map(|positions| world.scheduler.room(positions));
    // Of 16 positions each has a block and a ring of one, of 64 four and two.
    assert_eq!(room(&mut world), [10, 3]);
    world.submit(answered(counting(10_000, 150), 50));
    (0..10).for_each(|_| assert!(world.step()));
    assert_eq!(world.scheduler.free_blocks(), 8);
    assert_eq!(room(&mut world), [4, 2]);
}

#[test]
fn each_replica_spreads_the_starts_of_its_share() {
    let limits = room_for_30();
    for (replicas, requests, expected) in [(2, 176, [371, 293]), (2, 300, [622, 447]), (3, 200, [259, 239])] {
        let jobs = vec![unending(8, 128); requests];
        let steps = [false, true].map(|looks_ahead| serve_all(&limits, &jobs, looks_ahead, replicas).0);
        assert_eq!(steps, expected, "{replicas} replicas, {requests} requests");
    }
}

/// Nine of ten answers end long before their limits. What the first ones held says how many more have room.
#[test]
fn more_run_where_answers_end_early() {
    let limits = Limits {
        blocks: 600,
        ..room_for_30()
    };
    let mut jobs = vec![unending(8, 512); 400];
    for (i, job) in jobs.iter_mut().enumerate() {
        job.end_every = if i % 10 == 9 { 0 } else { 20 };
    }
    assert_eq!(
        serve_all(&limits, &jobs, false, 1),
        (1109, 100),
        "steps, and the most at once"
    );
}

/// After many short answers long ones come. The youngest make way, and go on where they were: the world checks their
/// tokens, and that nothing is sampled, scored or recorded twice.
#[test]
fn the_youngest_make_way_where_answers_become_longer() {
    let recomputed = AtomicUsize::new(0);
    for_seeds(60, |rng| {
        let limits = random_limits(rng);
        let block_tokens = [4, 16][rng.random_range(0..2)];
        let mut limits = Limits {
            max_batch: rng.random_range(20..40),
            step_tokens: rng.random_range(64..200),
            max_logits_rows: rng.random_range(40..64),
            block_tokens,
            depth: limits.depth.min(block_tokens + 1),
            blocks: rng.random_range(90..150),
            has_full_layers: true,
            ..limits
        };
        let job = |place: usize, rng: &mut ChaCha8Rng| {
            let mut job = Job::random(rng, 12 * block_tokens);
            job.prompt.truncate(rng.random_range(1..=block_tokens));
            job.end_every = if place < 80 { 3 } else { 0 };
            job.min_tokens = 0;
            job
        };
        let jobs: Vec<_> = (0..160).map(|place| job(place, rng)).collect();
        let ring = jobs.iter().map(|job| Ledger::ring(&limits, &job.largest())).max();
        limits.blocks += 30 * ring.unwrap();
        let mut world = World::new(limits);
        jobs.into_iter().for_each(|job| world.add(job));
        let mut queue: VecDeque<_> = (0..160).collect();
        let mut failures = [0, 0, 0, 3][rng.random_range(0..4)];
        while world.serve(&mut queue) {
            if failures > 0 && rng.random_bool(0.01) {
                failures -= 1;
                world.fail(rng, &mut queue);
            }
        }
        world.check_idle();
        world.check_answers();
        recomputed.fetch_add(world.device.recomputed, Ordering::Relaxed);
    });
    assert!(recomputed.into_inner() > 10_000);
}

/// The rings of prompts are longer: seven have room. Once a prompt is computed most of its ring is free for others.
#[test]
fn rings_are_short_once_prompts_are_computed() {
    let limits = Limits {
        max_batch: 16,
        max_logits_rows: 16,
        step_tokens: 512,
        chunk_tokens: 512,
        blocks: 8 * (19 + 3),
        ..plain_limits()
    };
    let (_, most) = serve_all(&limits, &vec![unending(100, 300); 20], false, 1);
    assert_eq!(most, 11);
}

/// A plan is made for limits. Where answers end long before them, it is given up before it costs much.
#[test]
fn answers_that_end_early_are_not_held_up() {
    let limits = room_for_30();
    let mut jobs = vec![unending(8, 128); 300];
    jobs.iter_mut().for_each(|job| job.end_every = 30);
    let [waves, ages] = [false, true].map(|looks_ahead| serve_all(&limits, &jobs, looks_ahead, 1).0);
    assert!(100 * ages <= 105 * waves, "{ages} steps instead of {waves}");
}

/// Of requests alike none take more steps for it, however many wait, and fewer in the mean; of lengths mixed at
/// random, which differ in age by themselves, hardly fewer, and some more. Where all run at once hardly a step more
/// in any case.
#[test]
fn spread_starts_take_fewer_steps() {
    for (kind, least, mean) in [
        ("short prompts", 1.0, 1.25),
        ("long prompts", 1.0, 1.15),
        ("mixed", 0.85, 1.0),
    ] {
        let mut gains = Vec::new();
        for seed in 0..80 {
            let rng = &mut ChaCha8Rng::seed_from_u64(seed);
            let limits = Limits {
                blocks: rng.random_range(60..400),
                ..room_for_30()
            };
            let longest = rng.random_range(6..20) * 16;
            let requests = rng.random_range(1..100);
            let mut one = || match kind {
                "short prompts" => unending(8, longest),
                "long prompts" => unending(longest / 2, longest),
                _ => {
                    let max_positions = rng.random_range(1..=longest);
                    unending(rng.random_range(1..=max_positions), max_positions)
                }
            };
            let jobs: Vec<_> = (0..requests).map(|_| one()).collect();
            let [(waves, most), (ages, _)] = [false, true].map(|looks_ahead| serve_all(&limits, &jobs, looks_ahead, 1));
            let at_once = most == requests;
            assert!(
                !at_once || 100 * ages <= 101 * waves,
                "{kind}, seed {seed}: {ages} steps instead of {waves}"
            );
            gains.push(waves as f64 / ages as f64);
        }
        gains.sort_by(f64::total_cmp);
        let found = (gains[0], gains.iter().sum::<f64>() / 80.0);
        assert!(
            found.0 >= least && found.1 >= mean,
            "{kind}: at least and in the mean {found:?}"
        );
    }
}

#[test]
fn long_requests_wait_their_turn_but_not_for_ever() {
    let mut world = World::new(Limits {
        blocks: 8,
        sliding_window: 0,
        ..plain_limits()
    });
    for i in 0..60 {
        world.submit(Job {
            prompt: vec![1; 2],
            max_positions: if i % 10 == 4 { 128 } else { 5 },
            ..Job::default()
        });
    }
    // The device asserts that requests start in order: one that needs the whole cache is not overtaken.
    world.run();
    world.check_answers();
}

#[test]
fn a_plan_is_the_same_until_it_is_committed() {
    let mut world = World::new(plain_limits());
    for n_prompt in [3, 50, 7, 1, 9] {
        world.submit(Job {
            prompt: vec![1; n_prompt],
            max_positions: 60,
            ..Job::default()
        });
    }
    let mut again = StepPlan::default();
    loop {
        let more = world.scheduler.plan(&mut again);
        if !world.step() {
            assert!(!more);
            break;
        }
        assert_eq!(format!("{again:?}"), format!("{:?}", world.plan));
    }
    world.check_answers();
}

#[test]
fn outcomes_of_another_step_are_refused() {
    let mut scheduler = Scheduler::new(plain_limits()).unwrap();
    scheduler.submit(Request::greedy(0, vec![1], 3)).unwrap();
    let (mut plan, mut finished) = (StepPlan::default(), Vec::new());
    assert!(scheduler.plan(&mut plan));
    let mut refused = |scheduler: &mut Scheduler, plan: &StepPlan, sampled: &[u32], words: &str| {
        let error = scheduler.commit(plan, sampled, &mut finished).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let not_the_oldest = "not the oldest under way: slot 0 is not at position 0";
    refused(&mut scheduler, &plan, &[1], not_the_oldest); // it has not begun
    scheduler.begin(&plan);
    refused(&mut scheduler, &plan, &[], "samples 1 rows came back with 0 tokens");
    refused(&mut scheduler, &plan, &[1, 2], "samples 1 rows came back with 2 tokens");
    scheduler.commit(&plan, &[1], &mut Vec::new()).unwrap();
    refused(&mut scheduler, &plan, &[1], not_the_oldest);
    let mut foreign = plan.clone();
    foreign.chunks[0].slot = 1000;
    refused(&mut scheduler, &foreign, &[1], "slot 1000 is not at position 0");
    assert!(scheduler.plan(&mut plan));
    assert_eq!(plan.positions, [1], "refused outcomes change nothing");
}

#[test]
fn requests_that_could_never_run_are_refused_and_leave_no_trace() {
    let mut world = World::new(plain_limits());
    for (n_prompt, max_positions, words) in [
        (0, 5, "no prompt"),
        (6, 5, "6 prompt tokens"),
        (1, 128 * 16 + 1, "GETP_KV_MB"),
    ] {
        let request = Request::greedy(0, vec![1; n_prompt], max_positions);
        let message = world.scheduler.submit(request).unwrap_err().to_string();
        assert!(message.contains(words), "{message}");
    }
    world.check_idle();
    world.submit(Job {
        prompt: vec![1; 30],
        max_positions: 64 * 16,
        ..Job::default()
    });
    world.run();
    world.check_answers();
}

#[test]
fn answers_do_not_depend_on_the_steps_under_way() {
    for_seeds(300, |rng| {
        let limits = random_limits(rng);
        let jobs: Vec<Job> = (0..20).map_while(|_| random_job(rng, &limits)).collect();
        for (depth, plans_ahead) in [
            (1, false),
            (1, true),
            (2, false),
            (2, true),
            (3, true),
            (5, false),
            (5, true),
        ] {
            let mut world = World::new(Limits {
                depth,
                plans_ahead,
                ..limits.clone()
            });
            jobs.iter().for_each(|job| world.submit(job.clone()));
            world.run();
            world.check_answers();
        }
    });
}

#[test]
fn a_row_behind_an_end_token_is_passed_over() {
    let mut scheduler = Scheduler::new(Limits {
        max_batch: 2,
        blocks: 2,
        sliding_window: 0,
        depth: 2,
        plans_ahead: true,
        ..plain_limits()
    })
    .unwrap();
    // Two blocks: the third request needs those of the first.
    for request in 0..3 {
        scheduler.submit(Request::greedy(request, vec![1, 2], 16)).unwrap();
    }
    let (mut first, mut second, mut third) = (StepPlan::default(), StepPlan::default(), StepPlan::default());
    let mut finished = Vec::new();
    assert!(scheduler.plan(&mut first));
    scheduler.begin(&first);
    assert!(scheduler.plan(&mut second));
    scheduler.begin(&second);
    assert_eq!(second.tokens, [-1, -2], "the device has these tokens");
    assert_eq!((second.decode_chunks, second.positions.as_slice()), (2, &[2, 2][..]));
    scheduler
        .commit(&first, &[EndTokens::RELEASED[0], 7], &mut finished)
        .unwrap();
    assert_eq!((finished.len(), finished[0].number), (1, 0));
    assert_eq!((scheduler.request(0), scheduler.free_blocks()), (None, 1));
    assert!(scheduler.plan(&mut third));
    assert_eq!(third.tokens, [-2], "the slot is not free before its row is back");
    scheduler.begin(&third);
    scheduler.commit(&second, &[8, 9], &mut finished).unwrap();
    assert_eq!(finished.len(), 1, "what came behind the end is ignored");
    assert!(scheduler.plan(&mut first));
    assert_eq!(first.tokens, [-2, 1, 2], "the third request starts");
    assert_eq!(scheduler.request(0), Some(2));
}

#[test]
fn a_wrong_token_is_mended_one_step_late() {
    let mut scheduler = Scheduler::new(Limits {
        depth: 2,
        plans_ahead: true,
        ..plain_limits()
    })
    .unwrap();
    let sampling = Sampling {
        temperature: 0.7,
        topp: 0.9,
        rng_state: 42,
    };
    for (number, max_positions) in [(0, 16), (1, 16), (2, 2), (3, 16)] {
        let request = Request::greedy(number, vec![1, 2], max_positions);
        scheduler.submit(Request { sampling, ..request }).unwrap();
    }
    // The random number of a sequence's token that comes so many behind its first.
    let draw = |token| Draw {
        temperature: 0.7,
        topp: 0.9,
        coin: coin(42, token),
    };
    let (mut first, mut second, mut third) = (StepPlan::default(), StepPlan::default(), StepPlan::default());
    let mut finished = Vec::new();
    assert!(scheduler.plan(&mut first));
    scheduler.begin(&first);
    assert!(scheduler.plan(&mut second));
    assert_eq!(
        second.tokens,
        [-1, -2, -4],
        "the third request has its only token under way"
    );
    assert_eq!(
        first.logits.iter().map(|row| row.draw).collect::<Vec<_>>(),
        [draw(0); 4]
    );
    assert_eq!(second.logits[1].draw, draw(1));
    scheduler.begin(&second);
    // The host draws for all but the first: a token, the last one there may be, and an end token.
    let tokens = [7, 8, 9, EndTokens::RELEASED[0]];
    scheduler.commit(&first, &tokens, &mut finished).unwrap();
    (1..4).for_each(|slot| scheduler.mend(slot));
    let answers: Vec<_> = finished.iter().map(|f| (f.number, f.tokens[0])).collect();
    assert_eq!(answers, [(2, 9), (3, EndTokens::RELEASED[0])]);
    let drawing = [0, 1, 2, 3].map(|slot| scheduler.drawing(slot));
    assert_eq!(drawing, [Some(0), None, None, None]);
    assert!(scheduler.plan(&mut third));
    assert_eq!(
        (third.tokens.as_slice(), third.positions.as_slice()),
        (&[-1, 8][..], &[3, 2][..])
    );
    let draws = [0, 1].map(|row| third.logits[row].draw);
    assert_eq!(draws, [draw(2), draw(1)], "the row passed over draws nothing");
    scheduler.begin(&third);
    scheduler.commit(&second, &[10, 11, 12], &mut finished).unwrap();
    assert_eq!(scheduler.drawing(1), Some(1));
    scheduler
        .commit(&third, &[13, EndTokens::RELEASED[1]], &mut finished)
        .unwrap();
    assert_eq!(
        (finished[2].number, finished[2].tokens.as_slice()),
        (1, &[8, EndTokens::RELEASED[1]][..])
    );
}

#[test]
fn answers_do_not_depend_on_when_sequences_take_turns() {
    for_seeds(1000, |rng| {
        let limits = random_limits(rng);
        let mut world = World::new(Limits {
            depth: 2,
            ..limits.clone()
        });
        arrive(rng, &mut world, 20, |rng, world| {
            if rng.random_bool(0.3) {
                let plans_ahead = rng.random_bool(0.5);
                world.plan_ahead(plans_ahead);
            }
        });
        world.run();
        world.check_answers();
    });
}

#[test]
fn the_last_position_is_not_planned_twice() {
    let mut world = World::new(Limits {
        depth: 2,
        plans_ahead: true,
        ..plain_limits()
    });
    world.submit(Job {
        prompt: vec![1; 3],
        max_positions: 4,
        ..Job::default()
    });
    assert!(world.begin() && world.begin());
    assert!(!world.begin(), "all positions are under way");
    world.run();
    world.check_answers();
}

#[test]
fn halves_take_turns_and_become_even_again() {
    let mut world = World::new(Limits {
        max_batch: 16,
        max_logits_rows: 16,
        step_tokens: 64,
        depth: 2,
        ..plain_limits()
    });
    let submit = |world: &mut World, max_positions| {
        world.submit(Job {
            prompt: vec![1; 2],
            max_positions,
            ..Job::default()
        });
    };
    // The first half leaves early, so that all that remain were in the same half.
    (0..6).for_each(|_| submit(&mut world, 12));
    (0..6).for_each(|_| submit(&mut world, 40));
    let mut sampled = Vec::new();
    loop {
        while world.under_way.len() < 2 && world.begin() {
            sampled.push(world.plan.logits.len());
        }
        if sampled.len() == 40 {
            (0..4).for_each(|_| submit(&mut world, 30));
        }
        if !world.step() {
            break;
        }
    }
    let expected = [(6, 22), (3, 18), (5, 38), (2, 20)].map(|(rows, steps)| vec![rows; steps]);
    assert_eq!(sampled, expected.concat());
    world.check_answers();
}

/// Three steps are in flight: each has four of twelve sequences, and tokens stay on the device.
#[test]
fn sequences_take_turns_where_several_steps_are_computed_at_once() {
    let mut world = World::new(Limits {
        max_batch: 12,
        max_logits_rows: 4,
        step_tokens: 8,
        depth: 4,
        plans_ahead: true,
        ..plain_limits()
    });
    let submit = |world: &mut World, requests: usize, max_positions| {
        (0..requests).for_each(|_| {
            world.submit(Job {
                prompt: vec![1; 2],
                max_positions,
                ..Job::default()
            });
        });
    };
    // The six longest requests were not evenly distributed over the three steps, and end one round later.
    submit(&mut world, 6, 12);
    submit(&mut world, 6, 40);
    let mut sampled = Vec::new();
    loop {
        while world.under_way.len() < 4 && world.begin() {
            sampled.push(world.plan.logits.len());
        }
        if !world.step() {
            break;
        }
    }
    let expected = [(4, 33), (2, 1), (3, 1), (1, 1), (2, 81)].map(|(rows, steps)| vec![rows; steps]);
    assert_eq!(sampled, expected.concat());
    world.check_answers();
}

/// A single sequence does not wait for the turns of others: its next step is planned before the last one completes.
#[test]
fn a_sequence_alone_is_planned_ahead() {
    let mut world = World::new(Limits {
        depth: 4,
        plans_ahead: true,
        ..plain_limits()
    });
    world.submit(Job {
        prompt: vec![1; 2],
        max_positions: 30,
        ..Job::default()
    });
    assert_eq!((0..4).filter(|_| world.begin()).count(), 4);
    world.run();
    world.check_answers();
}

#[test]
fn plans_with_room_do_not_allocate() {
    let mut world = World::new(plain_limits());
    for n_prompt in 1..50 {
        world.submit(Job {
            prompt: vec![1; n_prompt],
            max_positions: 100,
            ..Job::default()
        });
    }
    let memory = |plan: &StepPlan| {
        [
            plan.tokens.capacity(),
            plan.positions.capacity(),
            plan.chunks.capacity(),
            plan.tables.capacity(),
            plan.logits.capacity(),
        ]
    };
    world.scheduler.make_room_to_plan(&mut world.plan).unwrap();
    let first = memory(&world.plan);
    while world.step() {
        assert_eq!(memory(&world.plan), first);
    }
    world.check_answers();
}

/// Limits under which beginnings are shared.
fn sharing(limits: Limits) -> Limits {
    Limits {
        share_beginnings: true,
        ..limits
    }
}

/// A prompt, and an answer of so many tokens that ends at its last position.
fn answered(prompt: Vec<u32>, tokens: usize) -> Job {
    Job {
        max_positions: prompt.len() + tokens - 1,
        prompt,
        ..Job::default()
    }
}

fn counting(from: u32, tokens: usize) -> Vec<u32> {
    (from..).take(tokens).collect()
}

#[test]
fn who_comes_second_waits_for_a_beginning_and_does_not_compute_it() {
    let mut world = World::new(sharing(Limits {
        sliding_window: 20,
        ..plain_limits()
    }));
    let beginning = counting(0, 100);
    for tail in [1000, 2000, 3000] {
        world.submit(answered([beginning.clone(), counting(tail, 5)].concat(), 8));
    }
    // The first one computes its 105 tokens in four steps, the others what is behind the sixth block in the next.
    let mut rows = Vec::new();
    for _ in 0..5 {
        assert!(world.step());
        rows.push(world.plan.chunks.iter().map(|chunk| chunk.rows).collect::<Vec<_>>());
    }
    assert_eq!(rows, [vec![32], vec![32], vec![32], vec![9, 9, 9], vec![1, 1, 1]]);
    assert_eq!(world.device.shared, 2 * 96);
    assert_eq!(world.scheduler.take_shared_tokens(), 2 * 96);
    // One sequence of 112 positions has seven blocks, and each of the others one of its own; the rings of three blocks
    // share two.
    assert_eq!(world.scheduler.free_blocks(), 128 - 9 - 5);
    world.run();
    world.check_answers();
}

#[test]
fn a_conversation_goes_on_behind_its_last_answer() {
    for window in [0, 1, 15, 16, 17, 33] {
        let mut world = World::new(sharing(Limits {
            sliding_window: window,
            ..plain_limits()
        }));
        let mut text = counting(0, 40);
        for turn in 0..4 {
            world.submit(answered(text.clone(), 30));
            world.run();
            // The last token of an answer is not fed, and the last row of a prompt is always computed.
            text.extend(world.answers[turn].as_ref().unwrap());
            text.extend(counting(1000 * turn as u32 + 1000, 10));
            // As an engine does between two inferences.
            let cache = std::mem::replace(&mut world.scheduler, Scheduler::new(plain_limits()).unwrap()).into_cache();
            world.scheduler = Scheduler::with_cache(world.device.limits.clone(), cache.unwrap()).unwrap();
        }
        world.check_answers();
        assert_eq!(world.device.shared, 64 + 96 + 144, "window {window}");
    }
}

/// The blocks of its prompt may be shared, those that it was decoded into not.
#[test]
fn an_answer_is_no_beginning_where_decoding_gives_other_bits() {
    let mut world = World::new(Limits {
        share_answers: false,
        ..sharing(plain_limits())
    });
    let first = counting(0, 40);
    world.submit(answered(first.clone(), 30));
    world.run();
    let answer = world.answers[0].clone().unwrap();
    world.submit(answered([first, answer, counting(1000, 10)].concat(), 30));
    world.run();
    world.check_answers();
    assert_eq!(world.device.shared, 32);
}

#[test]
fn who_waits_for_a_beginning_computes_it_when_the_first_one_is_cancelled() {
    let mut world = World::new(sharing(plain_limits()));
    let beginning = counting(0, 100);
    for tail in [1000, 2000, 3000] {
        world.submit(answered([beginning.clone(), counting(tail, 5)].concat(), 8));
    }
    assert!(world.step());
    assert!(world.step());
    assert!(world.cancel(0));
    assert_eq!((world.scheduler.running(), world.scheduler.waiting()), (0, 2));
    // Four of the six blocks are there.
    assert!(world.step());
    assert_eq!(world.plan.chunks[0].first_position, 64);
    world.run();
    world.check_answers();
    assert_eq!(world.device.shared, 64 + 96);
}

#[test]
fn more_run_where_they_share_their_beginning() {
    // Each needs ten blocks, nine of them of the beginning: three alone. Together, as many as block tables have room
    // for.
    let limits = Limits {
        max_batch: 16,
        step_tokens: 64,
        max_logits_rows: 16,
        blocks: 30,
        sliding_window: 0,
        ..plain_limits()
    };
    let most_tables = FULL_TABLES * 30;
    for (limits, most) in [(limits.clone(), 3), (sharing(limits), 1 + (most_tables - 30) / 9)] {
        let mut world = World::new(limits);
        for tail in 0..16 {
            world.submit(answered(
                [counting(0, 144), counting(1000 * tail + 1000, 2)].concat(),
                14,
            ));
        }
        let mut running = 0;
        while world.step() {
            running = running.max(world.scheduler.running());
        }
        world.check_idle();
        world.check_answers();
        assert_eq!(running, most);
    }
}

/// What two sequences hold is free when the younger one has ended; when that ends first, when the older one does.
#[test]
fn shared_blocks_are_counted_for_the_youngest_that_holds_them() {
    let mut world = World::new(sharing(Limits {
        blocks: 20,
        sliding_window: 0,
        ..plain_limits()
    }));
    let beginning = counting(0, 144);
    world.submit(answered([beginning.clone(), counting(1000, 1)].concat(), 40));
    world.submit(answered([beginning, counting(2000, 1)].concat(), 3));
    while world.answers[1].is_none() {
        assert!(world.step());
    }
    // Ten blocks of 20 are free: eleven more may be asked for, since the older sequence will have left by then.
    world.submit(answered(counting(3000, 16), 177));
    assert!(world.step());
    assert_eq!(world.scheduler.running(), 2);
    world.run();
    world.check_answers();
}

/// Jobs whose prompts begin as others do: with a part of a document, or with what another job was asked and answered.
fn related(rng: &mut ChaCha8Rng, jobs: &mut [Job]) {
    let documents: Vec<_> = (0..3)
        .map(|_| (0..200).map(|_| rng.random_range(0..3)).collect::<Vec<u32>>())
        .collect();
    for i in 0..jobs.len() {
        let others = (rng.random_bool(0.3) && i > 0).then(|| rng.random_range(0..i));
        let beginning = match others {
            Some(other) => [jobs[other].prompt.clone(), jobs[other].answer(other)].concat(),
            None => documents[rng.random_range(0..3)].clone(),
        };
        let job = &mut jobs[i];
        let shared = if rng.random_bool(0.6) {
            job.prompt.len()
        } else {
            rng.random_range(0..=job.prompt.len())
        };
        let shared = shared.min(beginning.len());
        job.prompt[..shared].copy_from_slice(&beginning[..shared]);
    }
}

/// Limits under which windowed blocks of a prompt do not stay behind a long answer.
fn few_blocks() -> Limits {
    Limits {
        blocks: 40,
        sliding_window: 33,
        share_answers: false,
        ..sharing(plain_limits())
    }
}

/// Reads ten blocks that others read, too, and tokens of its own.
fn reader(tail: u32, answer: usize) -> Job {
    answered([counting(0, 160), counting(tail, 5)].concat(), answer)
}

/// A beginning whose windowed blocks others have taken is computed once more, by one for all, into the same blocks.
#[test]
fn a_beginning_whose_windows_are_gone_is_computed_once_more() {
    let mut world = World::new(few_blocks());
    // Long answers need all blocks, also those of windows behind them.
    world.submit(reader(10_000, 200));
    world.submit(answered(counting(50_000, 3), 200));
    world.run();
    assert_eq!(world.device.shared, 0);
    for round in 0..3 {
        let before = world.device.shared;
        for tail in 0..3 {
            world.submit(reader(20_000 + 100 * (3 * round + tail), 4));
        }
        assert!(world.step());
        // The ten blocks, one for each reader's own tokens, and rings, which begin alike from the second round on.
        let held = world.device.limits.blocks - world.scheduler.free_blocks();
        let apart = 10 + 3 + world.scheduler.blocks_for_rings();
        assert_eq!(held, if round == 0 { apart } else { apart - 4 }, "round {round}");
        world.run();
        let readers = if round == 0 { 2 } else { 3 };
        assert_eq!(world.device.shared - before, readers * 160, "round {round}");
    }
    world.check_answers();
}

/// Who computed a beginning may end while another one computes it once more, and that one may be cancelled.
#[test]
fn a_beginning_computed_once_more_stays_whoever_ends() {
    for ends in [0, 4] {
        let mut world = World::new(few_blocks());
        world.submit(reader(10_000, 60));
        for other in 0..3 {
            (0..8).for_each(|_| assert!(world.step()));
            world.submit(answered(counting(1_000 * (other + 1), 160), 4));
        }
        (0..10).for_each(|_| assert!(world.step()));
        world.submit(reader(20_000, 4));
        assert!(world.step());
        assert_eq!((world.scheduler.running(), world.device.shared), (2, 0));
        // One has answered for some time, the other one has read 32 tokens.
        assert!(world.cancel(ends));
        for (tail, shares) in [(30_000, if ends == 0 { 160 } else { 16 }), (40_000, 160)] {
            let before = world.device.shared;
            world.submit(reader(tail, 4));
            world.run();
            assert_eq!(world.device.shared - before, shares, "{ends} ends");
        }
        world.check_answers();
    }
}

/// A world of few blocks with prompts that begin alike; `None` if it shares nothing, as all logits are recorded.
fn related_world(rng: &mut ChaCha8Rng) -> Option<World> {
    let n = rng.random_range(1..60);
    let (limits, mut jobs) = scarce(rng, n);
    if limits.record_all {
        return None;
    }
    related(rng, &mut jobs);
    let mut world = World::new(sharing(limits));
    jobs.into_iter().for_each(|job| world.add(job));
    Some(world)
}

/// As `scarce_blocks_are_enough_for_all`, with prompts that begin alike, from one inference to the next, and with some
/// that make way.
#[test]
fn beginnings_are_shared_where_blocks_are_scarce() {
    let (mut shared, mut all, mut recomputed) = (0, 0, 0);
    let [shared, all, recomputed] = [&mut shared, &mut all, &mut recomputed].map(std::sync::Mutex::new);
    for_seeds(3000, |rng| {
        let Some(mut world) = related_world(rng) else {
            return;
        };
        let n = world.jobs.len();
        let [cancel, fail, turn] = [(); 3].map(|()| [0.0, 0.0, 0.01, 0.1][rng.random_range(0..4)]);
        world.looks_ahead = rng.random_bool(0.5);
        world.preempts_every = [0, 0, 3, 20][rng.random_range(0..4)];
        let mut failures = 0;
        let mut later: VecDeque<_> = (0..n).collect();
        while !later.is_empty() {
            let now = rng.random_range(1..=later.len());
            let mut queue: VecDeque<_> = later.drain(..now).collect();
            while world.serve(&mut queue) {
                if rng.random_bool(cancel) {
                    let request = rng.random_range(0..n);
                    world.cancel(request);
                }
                if rng.random_bool(turn) {
                    let plans_ahead = rng.random_bool(0.5);
                    world.plan_ahead(plans_ahead);
                }
                if failures < 4 && rng.random_bool(fail * 0.3) {
                    failures += 1;
                    world.fail(rng, &mut queue);
                }
            }
            world.check_idle();
            let limits = world.device.limits.clone();
            let scheduler = std::mem::replace(&mut world.scheduler, Scheduler::new(limits.clone()).unwrap());
            world.scheduler = Scheduler::with_cache(limits, scheduler.into_cache().unwrap()).unwrap();
        }
        world.check_answers();
        **shared.lock().unwrap() += world.device.shared;
        **all.lock().unwrap() += world.jobs.iter().map(|job| job.prompt.len()).sum::<usize>();
        **recomputed.lock().unwrap() += world.device.recomputed;
    });
    let [shared, all, recomputed] = [shared, all, recomputed].map(|count| *count.into_inner().unwrap());
    println!("{shared} of {all} tokens of prompts were shared, {recomputed} rows computed again");
    assert!(shared * 30 > all && recomputed * 10 > all);
}

/// The tokens that are shared and those computed again are the difference between the tokens of all requests and the
/// rows of all steps, those of devices that fail among them. Some requests make way before they have computed a row
/// behind what they share, and find less of it then.
#[test]
fn what_is_shared_and_computed_again_adds_up() {
    let [all_shared, all_recomputed, all_failures] = [(); 3].map(|()| AtomicUsize::new(0));
    for_seeds(3000, |rng| {
        let Some(mut world) = related_world(rng) else {
            return;
        };
        // Rows behind a token that was left to the host are computed again, too, and not counted.
        world.jobs.iter_mut().for_each(|job| job.host_every = 0);
        world.looks_ahead = rng.random_bool(0.5);
        world.preempts_every = [0, 3, 7, 20][rng.random_range(0..4)];
        let fail = [0.0, 0.0, 0.01, 0.1][rng.random_range(0..4)];
        let mut failures = 0;
        let mut queue: VecDeque<_> = (0..world.jobs.len()).collect();
        while world.serve(&mut queue) {
            if failures < 4 && rng.random_bool(fail) {
                failures += 1;
                world.fail(rng, &mut queue);
            }
        }
        world.check_answers();
        let shared = world.scheduler.take_shared_tokens() as usize;
        let recomputed = (world.device.counted + world.scheduler.take_recomputed()) as usize;
        all_failures.fetch_add(failures, Ordering::Relaxed);
        let answers = world.answers.iter().map(|answer| answer.as_ref().unwrap().len());
        // The last token of an answer is not fed.
        let fed = |(job, answer): (&Job, usize)| job.prompt.len() - job.answered + answer - 1;
        let to_compute: usize = world.jobs.iter().zip(answers).map(fed).sum();
        assert_eq!(to_compute + recomputed, world.rows + shared);
        all_shared.fetch_add(shared, Ordering::Relaxed);
        all_recomputed.fetch_add(recomputed, Ordering::Relaxed);
    });
    let [all_shared, all_recomputed] = [all_shared, all_recomputed].map(AtomicUsize::into_inner);
    assert!(all_shared > 10_000 && all_recomputed > 10_000 && all_failures.into_inner() > 500);
}

/// Requests with equal beginnings all at once, many cancelled together, plans that are dropped, and limits that change
/// from one inference to the next while the cache stays.
#[test]
fn beginnings_outlive_dropped_plans_cancellations_and_new_limits() {
    for_seeds(600, |rng| {
        let n = rng.random_range(1..80);
        let (mut limits, mut jobs) = scarce(rng, n);
        limits.record_all = false;
        if rng.random_bool(0.5) {
            limits.blocks *= rng.random_range(1..6);
        }
        if rng.random_bool(0.5) {
            // Prompts take many steps, and whoever shares them waits as long.
            (limits.step_tokens, limits.chunk_tokens) = (limits.max_batch, rng.random_range(1..4));
        }
        let block_tokens = limits.block_tokens;
        related(rng, &mut jobs);
        if rng.random_bool(0.5) {
            for job in &mut jobs {
                // Whole blocks.
                let whole = job.prompt.len() / block_tokens * block_tokens;
                job.prompt.truncate(whole.max(1));
            }
        }
        if rng.random_bool(0.5) {
            for i in 1..n {
                let other = rng.random_range(0..i);
                if jobs[other].prompt.len() <= jobs[i].max_positions {
                    jobs[i].prompt = jobs[other].prompt.clone();
                }
            }
        }
        let need = |job: &Job| job.max_positions.div_ceil(block_tokens) + Ledger::ring(&limits, &job.largest());
        limits.blocks = limits.blocks.max(jobs.iter().map(need).max().unwrap_or(0));
        // A later inference may have smaller chunks: then its rings are smaller, too.
        let (most_batch, most_step, most_chunk) = (limits.max_batch, limits.step_tokens, limits.chunk_tokens);
        let mut world = World::new(sharing(limits));
        jobs.into_iter().for_each(|job| world.add(job));
        let [cancel, fail, turn, drop] = [(); 4].map(|()| [0.0, 0.01, 0.1, 0.5][rng.random_range(0..4)]);
        let mut later: VecDeque<_> = (0..n).collect();
        while !later.is_empty() {
            let now = rng.random_range(1..=later.len());
            let mut queue: VecDeque<_> = later.drain(..now).collect();
            let direct = rng.random_bool(0.7);
            if direct {
                queue.drain(..).for_each(|request| world.submit_number(request));
            }
            let mut failures = 0;
            loop {
                let more = if direct { world.step() } else { world.serve(&mut queue) };
                if !more {
                    break;
                }
                if rng.random_bool(drop) && world.under_way.len() < world.device.limits.depth {
                    let planned = world.scheduler.plan(&mut world.plan);
                    let first = world.plan.clone();
                    assert_eq!(world.scheduler.plan(&mut world.plan), planned);
                    let rows = |plan: &StepPlan| (plan.tokens.clone(), plan.positions.clone(), plan.tables.clone());
                    assert_eq!(rows(&world.plan), rows(&first));
                }
                if rng.random_bool(cancel) {
                    // One that runs, which others may wait for, or several.
                    let slots = 0..world.device.limits.max_batch;
                    let running: Vec<_> = slots.filter_map(|slot| world.scheduler.request(slot)).collect();
                    let (from, to) = if running.is_empty() || rng.random_bool(0.5) {
                        let from = rng.random_range(0..n);
                        (from, (from + rng.random_range(1..20)).min(n))
                    } else {
                        let one = running[rng.random_range(0..running.len())];
                        (one, one + 1)
                    };
                    let there: Vec<_> = (from..to).filter(|&request| world.answers[request].is_none()).collect();
                    let mut gone = Vec::new();
                    world.scheduler.cancel(|number| {
                        let is = there.contains(&number);
                        if is {
                            gone.push(number);
                        }
                        is
                    });
                    for request in gone {
                        world.device.leave(request);
                        world.cancelled.insert(request);
                    }
                }
                if rng.random_bool(turn) {
                    let plans_ahead = rng.random_bool(0.5);
                    world.plan_ahead(plans_ahead);
                }
                if failures < 3 && rng.random_bool(fail * 0.1) {
                    failures += 1;
                    world.fail(rng, &mut queue);
                    if direct {
                        queue.drain(..).for_each(|request| world.submit_number(request));
                    }
                }
            }
            world.check_idle();
            let old = std::mem::replace(&mut world.scheduler, Scheduler::new(plain_limits()).unwrap());
            let cache = old.into_cache().unwrap();
            let mut limits = world.device.limits.clone();
            if rng.random_bool(0.7) {
                limits.depth = rng.random_range(1..=5.min(block_tokens + 1));
                limits.max_batch = rng.random_range(1..=most_batch);
                limits.step_tokens = rng.random_range(limits.max_batch..=most_step.max(limits.max_batch));
                limits.max_logits_rows = limits.max_logits_rows.max(limits.max_batch);
                limits.chunk_tokens = rng.random_range(1..=most_chunk);
            }
            world.device.limits = limits.clone();
            world.device.last_tokens.resize(most_batch, None);
            world.scheduler = Scheduler::with_cache(limits, cache).unwrap();
        }
        world.check_answers();
    });
}
