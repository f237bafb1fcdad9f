//! Times on the device: an event before and after each operation of a step, or each step, read when the step is done.

use super::catalogue::Kernel;
use super::context::Context;
use super::memory::Event;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::profile::{Cost, KernelCalls, Operation, Profile, Roofline, StepTimes};
use std::collections::VecDeque;
use std::time::Duration;

/// The operations of the steps under way, and the sums of those that are done.
#[derive(Default)]
pub struct Timeline {
    /// Events not in use.
    free: Vec<Event>,
    /// The steps under way, each with its operations.
    running: VecDeque<Vec<(Operation, Cost, Event, Event)>>,
    /// The operation being queued, and the event before it.
    open: Option<(Operation, Cost, Event)>,
    /// The end of the step that was counted last.
    last_end: Option<Event>,
    /// Sums so far.
    pub profile: Profile,
}

impl Timeline {
    /// Nothing is timed yet; shares will be those of `roofline`.
    pub fn new(roofline: Option<Roofline>) -> Self {
        let mut timeline = Self::default();
        timeline.profile.roofline = roofline;
        timeline
    }

    /// What is queued from now on is another step's.
    pub fn begin_step(&mut self) {
        self.running.push_back(Vec::new());
    }

    /// Queues the event before an operation.
    pub fn begin(&mut self, context: &Context, operation: Operation, cost: Cost) -> Result<()> {
        let start = self.event(context)?;
        start.record(&context.stream)?;
        self.open = Some((operation, cost, start));
        Ok(())
    }

    /// A kernel is queued; only those of operations count.
    pub fn launched(&mut self, kernel: &Kernel) -> Result<()> {
        let Some((operation, ..)) = self.open else {
            return Ok(());
        };
        let name = kernel.name();
        let kernels = &mut self.profile.kernels;
        match kernels
            .iter_mut()
            .find(|known| known.operation == operation && known.name == name)
        {
            Some(known) => known.calls += 1,
            None => memory::push(
                kernels,
                KernelCalls {
                    operation,
                    name,
                    calls: 1,
                },
                Purpose::Step,
            )?,
        }
        Ok(())
    }

    /// Queues the event after the operation.
    pub fn end(&mut self, context: &Context) -> Result<()> {
        let end = self.event(context)?;
        end.record(&context.stream)?;
        match (self.running.back_mut(), self.open.take()) {
            (Some(step), Some((operation, cost, start))) => {
                memory::push(step, (operation, cost, start, end), Purpose::Step)
            }
            _ => Err(Error::Internal("an operation that did not begin, or in no step".into())),
        }
    }

    /// Waits for the operations of the oldest step and counts them.
    pub fn count_times(&mut self) -> Result<()> {
        let operations = self.running.pop_front().unwrap_or_default();
        let Some((_, _, _, end)) = operations.last() else {
            return Ok(());
        };
        end.synchronize()?;
        let (_, _, begin, _) = &operations[0];
        let times = &mut self.profile.steps;
        times.steps += 1;
        times.computing += duration(end.since_us(begin)?);
        if let Some(last_end) = &self.last_end {
            times.idle += duration(begin.since_us(last_end)?);
        }
        for (operation, cost, start, end) in operations {
            let us = end.since_us(&start)?;
            self.profile.add(operation, duration(us), cost);
            memory::push(&mut self.free, start, Purpose::Step)?;
            if let Some(before) = self.last_end.replace(end) {
                memory::push(&mut self.free, before, Purpose::Step)?;
            }
        }
        Ok(())
    }

    fn event(&mut self, context: &Context) -> Result<Event> {
        match self.free.pop() {
            Some(event) => Ok(event),
            None => Event::new(&context.driver, true),
        }
    }
}

/// Whole steps: when they began and ended on the device, and when what they gave was on the host.
#[derive(Default)]
pub struct StepClock {
    /// Events not in use.
    free: Vec<Event>,
    /// Starts and ends of the steps under way.
    running: VecDeque<(Event, Event)>,
    /// The end of the step that came back last.
    last_end: Option<Event>,
    /// Sums so far.
    pub times: StepTimes,
}

impl StepClock {
    /// Queues a step's kernels between two events.
    pub fn time(&mut self, context: &Context, queue: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut event = || self.free.pop().map_or_else(|| Event::new(&context.driver, true), Ok);
        let (start, end) = (event()?, event()?);
        start.record(&context.stream)?;
        queue()?;
        end.record(&context.stream)?;
        self.running.push_back((start, end));
        Ok(())
    }

    /// Counts the oldest step under way, which is done; `copied`, an event with a time, marks the end of its copies.
    pub fn count_times(&mut self, copied: Option<&Event>) -> Result<()> {
        let Some((start, end)) = self.running.pop_front() else {
            return Ok(());
        };
        let times = &mut self.times;
        times.steps += 1;
        times.computing += duration(end.since_us(&start)?);
        if let Some(copied) = copied {
            times.copying += duration(copied.since_us(&end)?);
        }
        if let Some(last) = self.last_end.replace(end) {
            times.idle += duration(start.since_us(&last)?);
            self.free.push(last);
        }
        self.free.push(start);
        Ok(())
    }
}

fn duration(us: f64) -> Duration {
    Duration::from_secs_f64(us.max(0.0) * 1e-6)
}
