//! Times on the device: an event before and after each stage of a step, or each step, read when the step is done.

use super::context::Context;
use super::memory::{Event, Stream};
use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::profile::{Cost, Profile, Roof, Stage, StepTimes};
use std::collections::VecDeque;
use std::time::Duration;

/// The stages of the steps under way, and the sums of those that are done.
#[derive(Default)]
pub struct Timeline {
    /// Events not in use.
    free: Vec<Event>,
    running: Vec<(Stage, Cost, Event, Event)>,
    /// Sums so far.
    pub profile: Profile,
}

impl Timeline {
    /// Nothing is timed yet; shares will be those of `roof`.
    pub fn new(roof: Option<Roof>) -> Self {
        let mut timeline = Self::default();
        timeline.profile.roof = roof;
        timeline
    }

    /// Queues a stage between two events.
    pub fn time(
        &mut self,
        context: &Context,
        stage: Stage,
        cost: Cost,
        queue: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let (start, end) = (self.event(context)?, self.event(context)?);
        start.record(&context.stream)?;
        queue()?;
        end.record(&context.stream)?;
        memory::push(&mut self.running, (stage, cost, start, end), Purpose::Step)
    }

    /// Waits for the stages queued so far and counts them.
    pub fn settle(&mut self, stream: &Stream) -> Result<()> {
        stream.synchronize()?;
        for (stage, cost, start, end) in self.running.drain(..) {
            let us = end.since_us(&start)?;
            self.profile.add(stage, duration(us), cost);
            memory::extend(&mut self.free, [start, end], Purpose::Step)?;
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

    /// Counts the oldest step under way; it and its copies are done, which `done` tells, an event with a time.
    pub fn settle(&mut self, done: &Event) -> Result<()> {
        let Some((start, end)) = self.running.pop_front() else {
            return Ok(());
        };
        let times = &mut self.times;
        times.steps += 1;
        times.computing += duration(end.since_us(&start)?);
        times.copying += duration(done.since_us(&end)?);
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
