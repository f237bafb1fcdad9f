//! A stage's captured graphs, one for each shape of step. Graphs take device memory, and shapes can be many: where
//! memory becomes little, the graphs launched longest ago are given up.

use super::super::args::StepHeader;
use super::super::attention_runs::most_items;
use super::super::context::Capture;
use super::super::logits::LogitsAt;
use super::super::memory::Graph;
use super::super::shapes::StepShape;
use super::super::step::AttentionShape;
use super::{Stage, reserved_bytes};
use crate::backend::gpu::driver::DeviceMemory;
use crate::batch::{StepPlan, Want};
use crate::error::{Error, GpuFault, Result};
use crate::memory::{self, Purpose};
use crate::report;
use std::collections::HashMap;

/// Positions of the decoding steps whose graphs are captured ahead. Only where a shape counts items of attention do
/// they matter: longer rows have more.
const SHORT_POSITIONS: usize = 1024;

/// The graphs launched last, so many or those of all steps under way, are kept whatever memory there is: decoding up to
/// 1,024 rows takes 20.
const KEPT: usize = 32;
/// More are not kept even where there is device memory, so that the host memory that a runtime holds for each has a
/// bound.
const MOST: usize = 1024;
/// Where there is no memory for a graph, the driver is asked again only so many launches later.
const PAUSE: u64 = 64;

/// See the module.
pub struct Graphs {
    /// By the shape and the buffer of logits that it writes; nothing else depends on the turn.
    by_shape: HashMap<(StepShape, usize), CachedGraph>,
    /// The most steps under way.
    depth: usize,
    /// Captures and launches so far.
    clock: u64,
    /// How many may be captured in the place of others, whose memory the runtime has but may not have given back.
    places: usize,
    /// Until when no graph is captured, for lack of memory.
    paused_until: u64,
    /// Captures fail for good: the runtime leaves kernels out.
    incomplete: bool,
    /// What a line has told of.
    warnings: Warnings,
}

struct CachedGraph {
    graph: Graph,
    /// When it was captured or launched last.
    used: u64,
}

#[derive(Default)]
struct Warnings {
    invalidated: bool,
    no_memory: bool,
}

impl Graphs {
    /// None, for at most so many steps under way.
    pub fn new(depth: usize) -> Self {
        Self {
            by_shape: HashMap::new(),
            depth,
            clock: 0,
            places: 0,
            paused_until: 0,
            incomplete: false,
            warnings: Warnings::default(),
        }
    }

    fn launched(&mut self, of: (StepShape, usize)) -> Option<&Graph> {
        self.clock += 1;
        let held = self.by_shape.get_mut(&of)?;
        held.used = self.clock;
        Some(&held.graph)
    }

    fn insert(&mut self, of: (StepShape, usize), graph: Graph) -> Result<()> {
        let more = self.by_shape.try_reserve(1);
        more.map_err(|_| memory::lacking::<CachedGraph>(self.by_shape.len() + 1, Purpose::Step))?;
        self.clock += 1;
        let used = self.clock;
        self.by_shape.insert(of, CachedGraph { graph, used });
        self.places = self.places.saturating_sub(1);
        Ok(())
    }

    /// Gives up half of the graphs that are not kept, those launched longest ago.
    fn give_up(&mut self) -> Result<()> {
        let before = self.by_shape.len();
        let mut times = memory::room(before, Purpose::Step)?;
        times.extend(self.by_shape.values().map(|held| held.used));
        times.sort_unstable();
        if let Some(&oldest) = times.get(before.saturating_sub(KEPT.max(self.depth)).div_ceil(2)) {
            self.by_shape.retain(|_, held| held.used >= oldest);
        }
        self.places = before - self.by_shape.len();
        Ok(())
    }

    /// Whether a capture may succeed, if there is room.
    fn may_capture(&self) -> bool {
        !self.incomplete && self.clock >= self.paused_until
    }

    /// No graph is captured for a while.
    fn pause(&mut self, name: &str) {
        self.paused_until = self.clock + PAUSE;
        if !std::mem::replace(&mut self.warnings.no_memory, true) {
            let why = "there is no device memory for more graphs; lower GETP_KV_MB or GETP_MAX_BATCH";
            report::warning(format_args!("{name}: some steps run without a graph, slower: {why}"));
        }
    }
}

impl Stage {
    /// Captures the graphs of steps that only decode, which are most, so that no run waits for them.
    pub(super) fn prepare(&mut self) -> Result<()> {
        if self.ops.queue.timeline.is_some() || self.whole_rows(&StepPlan::default(), Want::Tokens) {
            return Ok(());
        }
        for shape in self.decoding_shapes()? {
            if self.graphs.incomplete || !self.has_memory()? {
                break;
            }
            self.capture(&StepPlan::default(), (shape, 0), Want::Tokens, LogitsAt::default())?;
        }
        Ok(())
    }

    /// Whether there is memory for one more graph: a quarter of the runtime's is left beside what logits will ask for.
    fn has_memory(&self) -> Result<bool> {
        if self.graphs.by_shape.len() >= MOST {
            return Ok(false);
        }
        let DeviceMemory { free, total } = self.context.driver.memory()?;
        Ok(free >= reserved_bytes(total) / 4 + self.awaited_bytes)
    }

    /// Whether one more graph may be captured, in the place of others if need be.
    fn has_room(&mut self) -> Result<bool> {
        if self.graphs.places > 0 || self.has_memory()? {
            return Ok(true);
        }
        self.graphs.give_up()?;
        Ok(self.graphs.places > 0)
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
                    shares_keys: false,
                    whole_rows: false,
                    prefill_tiles: 0,
                    logits: false,
                    drawable: None,
                    draws: false,
                    scores: false,
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
        let rows = bucket(plan.rows(), self.capacity.rows);
        let logits_rows = self.unembedding().map_or(0, |_| plan.logits.len());
        let is_last = self.unembedding().is_some();
        StepShape {
            rows,
            logits_rows: bucket(logits_rows, self.capacity.logits_rows),
            decode_items: match header.full_items.max(header.window_items) as usize {
                0 => 0,
                items => bucket(self.context.target.decode_items(items), usize::MAX),
            },
            shares_keys: header.shared_items > 0,
            whole_rows: header.whole_items > 0,
            prefill_tiles: match header.prefill_tiles as usize {
                0 => 0,
                tiles => bucket(tiles, self.capacity.rows),
            },
            logits: self.whole_rows(plan, want),
            drawable: plan.drawable.filter(|_| is_last),
            draws: is_last && want.draws(plan),
            scores: is_last && want.scores(plan),
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
        if self.ops.queue.timeline.is_some() {
            return self.run(plan, shape, want, logits);
        }
        if self.launch_at_once(plan, shape, want, logits)? {
            return Ok(());
        }
        let of = (shape, if shape.logits { turn } else { 0 });
        if !self.graphs.by_shape.contains_key(&of) && self.graphs.may_capture() {
            if self.has_room()? {
                self.capture(plan, of, want, logits)?;
            } else {
                self.graphs.pause(&self.context.name());
            }
        }
        match self.graphs.launched(of) {
            // SAFETY: the replica owns all memory its kernels use and waits for the stream before it drops any.
            Some(graph) => unsafe { graph.launch(&self.context.stream) },
            None => self.run(plan, shape, want, logits),
        }
    }

    /// Captures the graph of a shape. Without it a step runs, too.
    fn capture(&mut self, plan: &StepPlan, of: (StepShape, usize), want: Want, logits: LogitsAt) -> Result<()> {
        let context = self.context.clone();
        match context.capture(|| self.run(plan, of.0, want, logits)) {
            Ok(Capture::Graph(graph)) => self.graphs.insert(of, graph)?,
            Ok(Capture::Invalidated) => {
                if !std::mem::replace(&mut self.graphs.warnings.invalidated, true) {
                    let why = "other threads' calls invalidate the capture of its graph";
                    report::warning(format_args!(
                        "{}: a step runs without a graph, slower: {why}",
                        context.name()
                    ));
                }
            }
            Ok(Capture::Incomplete { nodes, launches }) => {
                self.graphs.incomplete = true;
                let why = format!("the runtime has captured {nodes} of {launches} kernels");
                report::warning(format_args!(
                    "{}: steps run without graphs, slower: {why}",
                    context.name()
                ));
            }
            Err(Error::Gpu {
                fault: GpuFault::OutOfMemory,
                ..
            }) => {
                self.graphs.give_up()?;
                self.graphs.pause(&context.name());
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// The most items of decode attention that a layer has, full or windowed, if each row sees at most `keys` keys.
fn most_decode_items(rows: usize, keys: usize, attention: &AttentionShape) -> usize {
    let most = |keys, whole| most_items(rows, keys, whole, attention.kv_heads, attention.items_at_once);
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
