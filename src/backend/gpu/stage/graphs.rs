//! A stage's captured graphs, one for each shape of step.

use super::super::attention_plan::most_items;
use super::super::context::Capture;
use super::super::logits::LogitsAt;
use super::super::memory::Graph;
use super::super::ops::StepShape;
use super::super::step::AttentionShape;
use super::{Stage, StepHeader};
use crate::batch::{StepPlan, Want};
use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::report;
use std::collections::HashMap;

/// Positions of the decoding steps whose graphs are captured ahead. Only where a shape counts items of attention do
/// they matter: longer rows have more.
const SHORT_POSITIONS: usize = 1024;

/// See the module.
#[derive(Default)]
pub struct Graphs {
    /// By the shape and the buffer of logits that it writes; nothing else depends on the turn.
    by_shape: HashMap<(StepShape, usize), Graph>,
    trouble: Trouble,
}

/// What has kept graphs from being captured.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Trouble {
    #[default]
    None,
    /// Other threads' calls, of which a line has told. The next capture may succeed.
    Invalidated,
    /// The runtime leaves kernels out: no more captures.
    Incomplete,
}

impl Stage {
    /// Captures the graphs of steps that only decode, which are most, so that no run waits for them.
    pub(super) fn prepare(&mut self) -> Result<()> {
        if self.ops.timeline.is_some() || self.whole_rows(Want::Greedy) {
            return Ok(());
        }
        for shape in self.decoding_shapes()? {
            self.capture(&StepPlan::default(), shape, Want::Greedy, 0, LogitsAt::default())?;
        }
        Ok(())
    }

    /// The shapes of greedy steps that only decode; where they count items, of rows of at most [`SHORT_POSITIONS`].
    fn decoding_shapes(&self) -> Result<Vec<StepShape>> {
        let mut shapes = Vec::new();
        let keys = SHORT_POSITIONS.min(self.capacity.positions);
        let mut rows = 0;
        while rows < self.capacity.logits_rows {
            let least = rows + 1;
            rows = bucket(least, self.capacity.logits_rows);
            let target = &self.context.target;
            let most = target.decode_items(most_decode_items(rows, keys, &self.attention));
            let mut items = target.decode_items(least);
            loop {
                items = bucket(items, usize::MAX);
                let shape = StepShape {
                    rows: bucket(least, self.capacity.rows),
                    logits_rows: self.unembedding().map_or(0, |_| rows),
                    decode_items: items,
                    prefill_tiles: 0,
                    logits: false,
                    draws: false,
                };
                memory::push(&mut shapes, shape, Purpose::Step)?;
                if items >= most {
                    break;
                }
                items += 1;
            }
        }
        Ok(shapes)
    }

    /// The shape of a step; the stages before the last one have nothing to do with logits.
    pub fn shape(&self, plan: &StepPlan, header: &StepHeader, want: Want) -> StepShape {
        let logits_rows = self.unembedding().map_or(0, |_| plan.logits.len());
        StepShape {
            rows: bucket(plan.rows(), self.capacity.rows),
            logits_rows: bucket(logits_rows, self.capacity.logits_rows),
            decode_items: match header.full_items.max(header.window_items) as usize {
                0 => 0,
                items => bucket(self.context.target.decode_items(items), usize::MAX),
            },
            prefill_tiles: match header.prefill_tiles as usize {
                0 => 0,
                tiles => bucket(tiles, self.capacity.rows),
            },
            logits: self.whole_rows(want),
            draws: self.unembedding().is_some() && matches!(want, Want::Draws { .. }),
        }
    }

    /// Queues a step's kernels: a captured graph of its shape, or one by one where they are timed or there is no graph.
    pub(super) fn launch(
        &mut self,
        plan: &StepPlan,
        shape: StepShape,
        want: Want,
        turn: usize,
        logits: LogitsAt,
    ) -> Result<()> {
        if self.ops.timeline.is_some() {
            return self.run(plan, shape, want, logits);
        }
        let buffer = if shape.logits { turn } else { 0 };
        if !self.graphs.by_shape.contains_key(&(shape, buffer)) {
            self.capture(plan, shape, want, buffer, logits)?;
        }
        match self.graphs.by_shape.get(&(shape, buffer)) {
            // SAFETY: the replica owns all memory its kernels use and waits for the stream before it drops any.
            Some(graph) => unsafe { graph.launch(&self.context.stream) },
            None => self.run(plan, shape, want, logits),
        }
    }

    /// Captures the graph of a shape, if captures work now.
    fn capture(
        &mut self,
        plan: &StepPlan,
        shape: StepShape,
        want: Want,
        buffer: usize,
        logits: LogitsAt,
    ) -> Result<()> {
        if self.graphs.trouble == Trouble::Incomplete {
            return Ok(());
        }
        let context = self.context.clone();
        let trouble = match context.capture(|| self.run(plan, shape, want, logits))? {
            Capture::Graph(graph) => {
                let graphs = &mut self.graphs.by_shape;
                let more = graphs.try_reserve(1);
                more.map_err(|_| memory::lacking::<Graph>(graphs.len() + 1, Purpose::Step))?;
                graphs.insert((shape, buffer), graph);
                return Ok(());
            }
            Capture::Invalidated if self.graphs.trouble == Trouble::Invalidated => return Ok(()),
            Capture::Invalidated => {
                let why = "other threads' calls invalidate the capture of its graph";
                report::line(format_args!(
                    "{}: a step runs without a graph, slower: {why}",
                    context.name()
                ));
                Trouble::Invalidated
            }
            Capture::Incomplete { nodes, launches } => {
                let why = format!("the runtime has captured {nodes} of {launches} kernels");
                report::line(format_args!(
                    "{}: steps run without graphs, slower: {why}",
                    context.name()
                ));
                Trouble::Incomplete
            }
        };
        self.graphs.trouble = trouble;
        Ok(())
    }
}

/// The most items of decode attention that a layer has, full or windowed, if each row sees at most `keys` keys.
fn most_decode_items(rows: usize, keys: usize, attention: &AttentionShape) -> usize {
    let most = |keys, whole| most_items(rows, keys, whole, attention.kv_heads, attention.processors);
    match attention.window {
        0 => most(keys, true),
        window => most(keys, true).max(most(window.min(keys), false)),
    }
}

/// The next of 1, 2, 3, 4, 6, 8, 12, ...: a third of the work at most is in vain, and there are few shapes.
pub fn bucket(n: usize, most: usize) -> usize {
    let power = n.next_power_of_two();
    let between = power / 4 * 3;
    if between >= n { between } else { power }.min(most)
}
