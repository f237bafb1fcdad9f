//! A replica that notes what each step sampled and when, and ends answers where a workload says.
//!
//! An answer ends by an end token in the place of the token sampled, which neither the scheduler nor the device
//! foresees: as with a trained model, the scheduler knows a request's limit alone, and the row planned meanwhile is
//! discarded.

use crate::workload::Lengths;
use getp::backend::gpu::replica::GpuReplica;
use getp::batch::{StepOutput, StepPlan, Want};
use getp::error::Result;
use getp::kv_blocks::KvBlocks;
use getp::profile::Profile;
use getp::replica::{Pointers, Replica, StageReport};
use getp::request::EndTokens;
use getp::weights::PackReport;
use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How many of a prompt's first tokens say which request it is; see [`write_number`].
const DIGITS: usize = 3;
/// Prompts have no byte 0.
const BASE: usize = 255;

/// What all replicas of an engine note.
#[derive(Default)]
pub struct Notes {
    /// Of requests whose answers end before their limit; their prompts begin with their number.
    pub ends: Vec<Lengths>,
    /// The steps collected.
    pub steps: Vec<Step>,
}

/// A step that was collected.
pub struct Step {
    at: Instant,
    /// Requests whose first token it was fed.
    starts: usize,
    /// Tokens sampled.
    tokens: usize,
}

/// What ran until the last request started: behind it come steps of fewer and fewer rows.
pub struct WithoutTail {
    pub time: Duration,
    pub tokens: usize,
    pub steps: usize,
}

impl fmt::Display for WithoutTail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, steps) = (self.time.as_secs_f64(), self.steps as f64);
        write!(
            f,
            "without its tail (until the last request started, {seconds:.1} s): {:.1} tokens/s; a step: {:.1} tokens, \
             {:.2} ms",
            self.tokens as f64 / seconds,
            self.tokens as f64 / steps,
            1e3 * seconds / steps
        )
    }
}

impl Notes {
    /// `None` if less than half of the tokens were sampled by then.
    pub fn without_tail(&self, start: Instant) -> Option<WithoutTail> {
        let last = self.steps.iter().rposition(|step| step.starts > 0)?;
        let tokens = |steps: &[Step]| steps.iter().map(|step| step.tokens).sum::<usize>();
        let so_far = tokens(&self.steps[..=last]);
        (2 * so_far >= tokens(&self.steps)).then(|| WithoutTail {
            time: self.steps[last].at - start,
            tokens: so_far,
            steps: last + 1,
        })
    }
}

/// Shared by an engine's replicas and the benchmark.
#[derive(Clone, Default)]
pub struct SharedNotes(Arc<Mutex<Notes>>);

impl SharedNotes {
    pub fn lock(&self) -> MutexGuard<'_, Notes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes a prompt begin with the request's number.
pub fn write_number(prompt: &mut [u8], request: usize) {
    let mut rest = request;
    for byte in &mut prompt[..DIGITS] {
        *byte = (rest % BASE) as u8 + 1;
        rest /= BASE;
    }
}

/// A replica on a GPU that is watched.
pub fn gpu(replica: &dyn Replica) -> Option<&GpuReplica> {
    let watched: &Watched = (replica as &dyn Any).downcast_ref()?;
    GpuReplica::of(&*watched.replica)
}

/// See the module.
pub struct Watched {
    replica: Box<dyn Replica>,
    notes: SharedNotes,
    /// Of each slot, the request's number as far as it has been read, and the position whose token ends its answer.
    sequences: Vec<(usize, usize)>,
    in_flight: VecDeque<InFlight>,
}

#[derive(Default)]
struct InFlight {
    starts: usize,
    tokens: usize,
    /// The logits rows that end answers.
    ends: Vec<usize>,
}

impl Watched {
    pub fn new(replica: Box<dyn Replica>, notes: SharedNotes) -> Self {
        Self {
            replica,
            notes,
            sequences: Vec::new(),
            in_flight: VecDeque::new(),
        }
    }

    fn note(&mut self, plan: &StepPlan) -> InFlight {
        let mut step = InFlight::default();
        for chunk in &plan.chunks[plan.decode_chunks..] {
            step.starts += usize::from(chunk.first_position == 0);
            let positions = chunk.first_position..chunk.first_position + chunk.rows;
            let tokens = &plan.tokens[chunk.first_row..];
            for (position, &token) in positions.zip(tokens).take_while(|(position, _)| *position < DIGITS) {
                self.read_digit(chunk.slot, position, token);
            }
        }
        for (place, row) in plan.logits.iter().enumerate().filter(|(_, row)| row.sample) {
            let end = self.sequences.get(row.slot).map_or(usize::MAX, |sequence| sequence.1);
            // What comes behind the end is discarded.
            step.tokens += usize::from(row.position <= end);
            if row.position >= end {
                step.ends.push(place);
            }
        }
        step
    }

    fn read_digit(&mut self, slot: usize, position: usize, token: i32) {
        if self.sequences.len() <= slot {
            self.sequences.resize(slot + 1, (0, usize::MAX));
        }
        let (request, end) = &mut self.sequences[slot];
        if position == 0 {
            *request = 0;
        }
        *request += (token - 1).max(0) as usize * BASE.pow(position as u32);
        let lengths = self.notes.lock().ends.get(*request).copied();
        *end = lengths.map_or(usize::MAX, |lengths| lengths.prompt + lengths.output - 2);
    }
}

impl Replica for Watched {
    fn submit(&mut self, plan: &StepPlan, want: Want) -> Result<()> {
        let step = self.note(plan);
        self.replica.submit(plan, want)?;
        self.in_flight.push_back(step);
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<()> {
        self.replica.collect(output)?;
        let Some(step) = self.in_flight.pop_front() else {
            return Ok(());
        };
        for place in step.ends {
            output.greedy[place].token = EndTokens::RELEASED[0];
            // A token that the host samples stays as it is; the next one ends the answer.
            if let Some(Some(drawn)) = output.drawn.get_mut(place) {
                *drawn = EndTokens::RELEASED[0];
            }
        }
        self.notes.lock().steps.push(Step {
            at: Instant::now(),
            starts: step.starts,
            tokens: step.tokens,
        });
        Ok(())
    }

    fn fetch(&mut self, rows: &[usize], output: &mut StepOutput) -> Result<()> {
        self.replica.fetch(rows, output)
    }

    fn describe(&self) -> String {
        self.replica.describe()
    }

    fn pack_report(&self) -> &PackReport {
        self.replica.pack_report()
    }

    fn kv_blocks(&self) -> KvBlocks {
        self.replica.kv_blocks()
    }

    fn kv_bytes(&self) -> u64 {
        self.replica.kv_bytes()
    }

    fn max_step_tokens(&self) -> usize {
        self.replica.max_step_tokens()
    }

    fn chunk_tokens(&self) -> usize {
        self.replica.chunk_tokens()
    }

    fn max_logits_rows(&self) -> usize {
        self.replica.max_logits_rows()
    }

    fn max_positions(&self) -> usize {
        self.replica.max_positions()
    }

    fn depth(&self) -> usize {
        self.replica.depth()
    }

    fn draws(&self) -> bool {
        self.replica.draws()
    }

    fn scores(&self) -> bool {
        self.replica.scores()
    }

    fn decodes_as_prompts(&self) -> bool {
        self.replica.decodes_as_prompts()
    }

    fn profile(&self) -> Option<&Profile> {
        self.replica.profile()
    }

    fn stages(&self) -> Vec<StageReport<'_>> {
        self.replica.stages()
    }

    fn pointers(&self) -> Pointers {
        self.replica.pointers()
    }
}
