//! What queues kernels: behind one another on the device's stream, or between two events if operations are timed.

use crate::backend::gpu::catalogue::Op;
use crate::backend::gpu::context::Context;
use crate::backend::gpu::launch::Launch;
use crate::backend::gpu::profile::Timeline;
use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::profile::{Cost, Operation};
use std::sync::Arc;

/// See the module.
pub struct Queue {
    pub(super) context: Arc<Context>,
    /// Whether the kernel queued last fetches the plan.
    fetching: bool,
    /// Measures instead of only queueing, if asked to.
    pub timeline: Option<Timeline>,
    /// Where kernels go instead while a list of them is made.
    listed: Option<Vec<Listed>>,
}

/// A kernel that would have been queued.
pub struct Listed {
    /// The kernel.
    pub launch: Launch,
    /// The bytes of its argument struct.
    pub args: Vec<u8>,
}

impl Queue {
    /// A device's.
    pub(super) fn new(context: &Arc<Context>) -> Self {
        Self {
            context: context.clone(),
            fetching: false,
            timeline: None,
            listed: None,
        }
    }

    /// From now on kernels are listed and not queued.
    pub(super) fn begin_list(&mut self) {
        self.listed = Some(Vec::new());
    }

    /// The kernels listed; further ones are queued.
    pub(super) fn end_list(&mut self) -> Vec<Listed> {
        self.listed.take().unwrap_or_default()
    }

    /// Queues a kernel whose blocks wait for each other.
    pub(super) fn launch_together<A: bytemuck::NoUninit>(&mut self, launch: Launch, args: &A) -> Result<()> {
        self.fetching = false;
        // SAFETY: as in `launch`.
        unsafe { self.context.launch_together(launch, args) }
    }

    /// Queues a kernel. Most read the plan before their predecessor has ended, so not while that fetches it.
    pub(super) fn launch<A: bytemuck::NoUninit>(&mut self, launch: Launch, args: &A) -> Result<()> {
        if let Some(listed) = &mut self.listed {
            let args = memory::collect(bytemuck::bytes_of(args).iter().copied(), Purpose::Step)?;
            return memory::push(listed, Listed { launch, args }, Purpose::Step);
        }
        let fetching = std::mem::replace(&mut self.fetching, launch.kernel.op == Op::Upload);
        let apart = fetching && !launch.kernel.plan_after_predecessor;
        let launch = if apart { launch.apart() } else { launch };
        if let Some(timeline) = &mut self.timeline {
            timeline.launched(launch.kernel)?;
        }
        // SAFETY: all addresses are of buffers that the replica keeps until its stream is done, sized for the largest
        // step; the structs are those of args.rs.
        unsafe { self.context.launch(launch, args) }
    }

    /// Queues an operation that is one kernel.
    pub(super) fn operation<A: bytemuck::NoUninit>(
        &mut self,
        operation: Operation,
        cost: Cost,
        launch: Launch,
        args: &A,
    ) -> Result<()> {
        self.timed(operation, cost, |queue| queue.launch(launch, args))
    }

    /// Queues an operation.
    pub(super) fn timed(
        &mut self,
        operation: Operation,
        cost: Cost,
        kernels: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        if let Some(timeline) = &mut self.timeline {
            timeline.begin(&self.context, operation, cost)?;
        }
        kernels(self)?;
        match &mut self.timeline {
            Some(timeline) => timeline.end(&self.context),
            None => Ok(()),
        }
    }

    /// What is queued from now on is another step's.
    pub(super) fn begin_step(&mut self) {
        if let Some(timeline) = &mut self.timeline {
            timeline.begin_step();
        }
    }
}
