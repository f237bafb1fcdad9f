//! The values of a step: what each operation leaves in device memory, and in which form the next one takes it.

use crate::backend::gpu::args::{ExpertCut, GROUP_ALIGN, GemmArgs, NormArgs, SLAB};
use crate::backend::gpu::catalogue::Elements;
use crate::backend::gpu::context::Context;
use crate::backend::gpu::driver::DevicePtr;
use crate::backend::gpu::launch::Launch;
use crate::backend::gpu::layout::TypedPtr;
use crate::backend::gpu::memory::{DeviceBuffer, Stream, to_host};
use crate::backend::gpu::shapes::{ExpertCuts, Numbers};
use crate::config::ModelConfig;
use crate::error::Result;
use crate::profile::Cost;
use std::ffi::c_void;

/// Rows that a product may read behind a buffer's last one: its largest tile.
pub const SLACK_ROWS: usize = 256;

/// Activations on the device.
pub struct Buffer {
    pub(super) bytes: DeviceBuffer,
    /// Rows it has room for; tiled ones have slack behind them.
    pub(super) rows: usize,
    /// Elements from one term to the next; 0 in a float32 buffer.
    pub(super) term: usize,
}

impl Buffer {
    /// Float32 `[rows, width]`.
    pub fn plain(context: &Context, rows: usize, width: usize) -> Result<Self> {
        Ok(Self {
            bytes: DeviceBuffer::zeroed(&context.stream, 4 * rows * width)?,
            rows,
            term: 0,
        })
    }

    /// Tiled 16-bit terms `[terms][width / 64][rows][64]`.
    pub fn tiled(context: &Context, rows: usize, width: usize, terms: usize) -> Result<Self> {
        let rows = (rows + SLACK_ROWS).next_multiple_of(GROUP_ALIGN);
        let term = width.div_ceil(SLAB) * rows * SLAB;
        Ok(Self {
            // Zeroed: what a product reads behind the last row is thrown away, but must not be trapped as
            // uninitialized.
            bytes: DeviceBuffer::zeroed(&context.stream, 2 * terms * term)?,
            rows,
            term,
        })
    }

    /// Its address.
    pub fn at(&self) -> DevicePtr {
        self.bytes.at()
    }

    /// The address of float32 values.
    pub(super) fn floats(&self) -> TypedPtr<f32> {
        debug_assert_eq!(self.term, 0, "tiled terms taken for float32 values");
        TypedPtr::new(self.at())
    }

    /// Where its rows lie.
    pub(super) fn tiles(&self) -> Rows {
        Rows {
            terms: self.terms(),
            term: self.term as i64,
            buffer_rows: self.rows as i32,
        }
    }

    /// The address of tiled terms.
    pub(super) fn terms(&self) -> TypedPtr<u16> {
        debug_assert_ne!(self.term, 0, "float32 values taken for tiled terms");
        TypedPtr::new(self.at())
    }
}

/// Where a step's normed rows lie in their order. They are not overwritten before mlp1.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) terms: TypedPtr<u16>,
    pub(super) term: i64,
    pub(super) buffer_rows: i32,
}

/// Memory of the residual stream, and of the way of its rows through the experts.
pub struct ResidualMemory {
    /// `[T, H]` in float32.
    pub x: Buffer,
    /// Of the layer that ran last.
    pub routes: Routes,
}

impl ResidualMemory {
    /// Room for `rows` rows.
    pub fn new(context: &Context, config: &ModelConfig, rows: usize, numbers: &Numbers) -> Result<Self> {
        Ok(Self {
            x: Buffer::plain(context, rows, config.hidden_dim)?,
            routes: Routes::new(context, config, rows, numbers)?,
        })
    }
}

/// The residual stream, to which the kernel that reads it next may have a sum to add.
pub struct Residual<'x> {
    pub(super) memory: &'x mut ResidualMemory,
    /// Whether the outputs that the experts left in the stream's [`Routes`] are to be added.
    pub(super) outstanding: bool,
}

impl Residual<'_> {
    /// Its memory.
    pub fn memory(&mut self) -> &mut ResidualMemory {
        self.memory
    }
}

/// The residual stream, complete in its memory.
pub struct Settled<'x> {
    pub(super) memory: &'x mut ResidualMemory,
}

impl Settled<'_> {
    /// Its memory.
    pub fn memory(&mut self) -> &mut ResidualMemory {
        self.memory
    }
}

/// The residual stream, whose rows have been sent to their experts.
pub struct Routed<'x> {
    pub(super) memory: &'x mut ResidualMemory,
    pub(super) sent: Sending,
}

impl Routed<'_> {
    /// Its memory.
    pub fn memory(&mut self) -> &mut ResidualMemory {
        self.memory
    }
}

/// How the experts get their rows.
#[derive(Clone, Copy)]
pub(super) enum Sending {
    /// Each has copies.
    Gathered,
    /// A single row, whose experts mlp1 reads from the router's picks before that kernel ends.
    ByPicks(Rows),
    /// mlp1 finds them, or reads them by an index, or a kernel before it sends them.
    Outstanding(Rows),
}

/// Rows after attention's norm.
pub struct Normed<'m> {
    pub(super) t: &'m Buffer,
    /// The norm, if the kernel that multiplies may do it, too.
    pub(super) outstanding: Option<Norm>,
}

impl<'m> From<&'m Buffer> for Normed<'m> {
    fn from(t: &'m Buffer) -> Self {
        Self { t, outstanding: None }
    }
}

/// A norm that is not queued yet.
pub(super) struct Norm {
    pub(super) launch: Launch,
    pub(super) args: NormArgs,
    pub(super) cost: Cost,
}

/// Queries, keys and values before their rotation.
pub struct Projected<'m> {
    pub(super) qkv: &'m Buffer,
    /// Whether the elements of a head are in pairs.
    pub(super) paired: bool,
    /// The product, if the kernel that multiplies also rotates and stores.
    pub(super) outstanding: Option<Multiplication<'m>>,
}

/// A product that is not queued yet.
pub(super) struct Multiplication<'m> {
    pub(super) launch: Launch,
    pub(super) args: GemmArgs,
    /// That of its input, if the kernel also norms.
    pub(super) norm: Option<NormArgs>,
    pub(super) cost: Cost,
    /// As long as it is borrowed it is not overwritten.
    pub(super) _input: &'m Buffer,
}

/// Rotated queries, in 16 bits with attention's factor.
pub struct Queries<'m> {
    pub(super) at: TypedPtr<c_void>,
    /// The layer whose cache has their keys and values.
    pub(super) layer: usize,
    /// What they were made of: as long as it is borrowed, no others are made.
    pub(super) _qkv: &'m Buffer,
}

/// The gated units inside the experts.
#[derive(Clone, Copy)]
pub struct Gated<'m> {
    pub(super) h: &'m Buffer,
    /// How sort has cut the experts' rows into tiles, if it has.
    pub(super) cuts: Option<ExpertCuts>,
}

impl Gated<'_> {
    /// Their memory.
    pub fn memory(&self) -> &Buffer {
        self.h
    }
}

/// Where each row's experts are computed.
pub struct Routes {
    /// `[rows, K]`, in order of the expert's index.
    pub(super) experts: DeviceBuffer<i32>,
    /// `[rows, K]`
    pub(super) shares: DeviceBuffer<f32>,
    /// `[rows, K]`: the slot of each.
    pub(super) slots: DeviceBuffer<i32>,
    /// `[E + 1]`: the first slot of each expert.
    pub(super) offsets: DeviceBuffer<i32>,
    /// `[E]`
    pub(super) counts: DeviceBuffer<i32>,
    /// A single row's experts, see [`GemmArgs`].
    pub(super) picks: DeviceBuffer<u64>,
    /// The row of each slot that has one, where mlp1 reads rows so.
    pub(super) slot_rows: DeviceBuffer<i32>,
    /// `[E]` of mlp1 and of mlp2, where these take experts so.
    pub(super) mlp1_cuts: DeviceBuffer<ExpertCut>,
    pub(super) mlp2_cuts: DeviceBuffer<ExpertCut>,
    /// The experts' inputs by slot.
    pub(super) gathered: Buffer,
    /// Their outputs by slot `[slots, H]`.
    pub(super) y: DeviceBuffer,
}

impl Routes {
    /// Routes of at most `rows` rows.
    pub fn new(context: &Context, config: &ModelConfig, rows: usize, numbers: &Numbers) -> Result<Self> {
        let (e, k) = (config.n_experts, config.experts_per_token);
        let slots = slots(config, rows);
        let stream = &context.stream;
        Ok(Self {
            experts: DeviceBuffer::zeroed(stream, rows * k)?,
            shares: DeviceBuffer::zeroed(stream, rows * k)?,
            slots: DeviceBuffer::zeroed(stream, rows * k)?,
            offsets: DeviceBuffer::zeroed(stream, e + 1)?,
            counts: DeviceBuffer::zeroed(stream, e)?,
            picks: DeviceBuffer::zeroed(stream, 1)?,
            slot_rows: DeviceBuffer::zeroed(stream, slots)?,
            mlp1_cuts: DeviceBuffer::zeroed(stream, e)?,
            mlp2_cuts: DeviceBuffer::zeroed(stream, e)?,
            gathered: Buffer::tiled(context, slots, config.hidden_dim, numbers.terms)?,
            y: DeviceBuffer::zeroed(stream, slots * config.hidden_dim * y_elements(numbers).bytes())?,
        })
    }

    /// Rows of each expert in the layer that ran last. Waits for the device.
    pub fn rows_by_expert(&self, stream: &Stream) -> Result<Vec<u32>> {
        // SAFETY: it was zeroed when it was made.
        unsafe { to_host(stream, self.counts.at(), self.counts.bytes() / 4) }
    }
}

/// Slots that the experts of `rows` rows may need: each expert's begin at a multiple of [`GROUP_ALIGN`].
pub fn slots(config: &ModelConfig, rows: usize) -> usize {
    rows * config.experts_per_token + config.n_experts * (GROUP_ALIGN - 1)
}

/// The format of the experts' outputs.
pub fn y_elements(numbers: &Numbers) -> Elements {
    if numbers.exact { Elements::F32 } else { Elements::F16 }
}
