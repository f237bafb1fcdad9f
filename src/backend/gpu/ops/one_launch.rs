//! A step's layers in one launch (`kernels/cdna/one_launch.h`): the kernels that the layers' operations would queue
//! become a list of commands, each with memory of its own for what it hands on.

use super::GpuOps;
use super::queue::Listed;
use super::values::Residual;
use crate::backend::gpu::args::{
    AttentionArgs, COMMAND_ATTENTION, COMMAND_ATTN_OUT, COMMAND_MLP1, COMMAND_MLP2, COMMAND_NORM, COMMAND_QKV,
    COMMAND_ROUTE, Format, GemmArgs, LayerCommand, NormArgs, NormQkvArgs, NormRouteArgs, ONE_LAUNCH_LEAST_SLABS,
    ONE_LAUNCH_LOGITS, ONE_LAUNCH_MOST_SLABS, OneLaunchArgs, QkvStoreArgs, RopeStoreArgs, RouteArgs, SLAB, SortArgs,
    SortMlp1Args,
};
use crate::backend::gpu::catalogue::{Kernel, Op, PackedFormat, Workers};
use crate::backend::gpu::driver::DevicePtr;
use crate::backend::gpu::launch::Launch;
use crate::backend::gpu::layout::TypedPtr;
use crate::config::ModelConfig;
use crate::error::Result;
use crate::memory::{self, Purpose};
use bytemuck::{NoUninit, Zeroable};
use std::mem::offset_of;

/// The commands of a layer in their order, and the kernels whose work they do.
const LAYER: [(i32, Op); 7] = [
    (COMMAND_NORM, Op::Norm),
    (COMMAND_QKV, Op::QkvStore),
    (COMMAND_ATTENTION, Op::AttentionDecode),
    (COMMAND_ATTN_OUT, Op::AttnOut),
    (COMMAND_ROUTE, Op::NormRoute),
    (COMMAND_MLP1, Op::SortMlp1),
    (COMMAND_MLP2, Op::Mlp2),
];

/// A kernel that a layer has otherwise, or a part of one.
struct Part<'l> {
    op: Op,
    of: &'l Listed,
    args: &'l [u8],
}

impl Part<'_> {
    /// Whether a product's row fits the ring buffers and the shared memory of one launch of a row
    /// (`kernels/ampere/one_launch.h`). Behind attention's outputs there are no zeros for half of two slabs.
    fn has_room(&self) -> bool {
        let product = match self.op {
            Op::QkvStore => offset_of!(QkvStoreArgs, product),
            Op::AttnOut | Op::Mlp1 | Op::Mlp2 => 0,
            _ => return true,
        };
        let at = product + offset_of!(GemmArgs, k_blocks);
        let slabs: i32 = bytemuck::pod_read_unaligned(&self.args[at..][..size_of::<i32>()]);
        let held = ONE_LAUNCH_LEAST_SLABS as i32..=ONE_LAUNCH_MOST_SLABS as i32;
        held.contains(&slabs) && (self.op != Op::AttnOut || slabs % 2 == 0)
    }
}

/// What has been listed, norm and product apart.
fn parts(listed: &[Listed]) -> Result<Vec<Part<'_>>> {
    let mut parts = memory::room(2 * listed.len(), Purpose::Step)?;
    for of in listed {
        let part = |op, args| Part { op, of, args };
        if of.launch.kernel.op == Op::NormQkv {
            let norm = offset_of!(NormQkvArgs, norm);
            parts.push(part(Op::Norm, &of.args[norm..norm + size_of::<NormArgs>()]));
            parts.push(part(Op::QkvStore, &of.args[..size_of::<QkvStoreArgs>()]));
        } else {
            parts.push(part(of.launch.kernel.op, &of.args[..]));
        }
    }
    Ok(parts)
}

/// Where a layer hands its values on, in bytes behind the beginning of its memory.
struct Places {
    sums: usize,
    out: usize,
    t: usize,
    routed: usize,
    q: usize,
    newest: usize,
    attention: usize,
    experts: usize,
    shares: usize,
    logits: usize,
    slots: usize,
    counts: usize,
    offsets: usize,
    h: usize,
    y: usize,
    /// Of all.
    bytes: usize,
}

impl Places {
    /// Of so many rows.
    fn new(config: &ModelConfig, rows: usize) -> Self {
        /// Lines of the caches are not shared.
        const ALIGN: usize = 256;
        let mut end = 0;
        let mut take = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(ALIGN);
            at
        };
        let tiled = |rows: usize, width: usize| 2 * rows * width.next_multiple_of(SLAB);
        let (hidden, picks) = (config.hidden_dim, rows * config.experts_per_token);
        Self {
            sums: take(4 * rows * hidden),
            out: take(4 * rows * hidden),
            t: take(tiled(rows, hidden)),
            routed: take(tiled(rows, hidden)),
            q: take(2 * rows * config.q_dim()),
            newest: take(2 * rows * (config.qkv_dim() - config.q_dim())),
            attention: take(tiled(rows, config.q_dim())),
            experts: take(4 * picks),
            shares: take(4 * picks),
            logits: take(4 * ONE_LAUNCH_LOGITS * config.n_experts),
            slots: take(4 * picks),
            counts: take(4 * config.n_experts),
            offsets: take(4 * (config.n_experts + 1)),
            h: take(tiled(picks, config.intermediate_dim)),
            y: take(2 * picks * hidden),
            bytes: end,
        }
    }
}

/// Bytes through which so many layers hand on what so many rows are.
pub fn handed_bytes(config: &ModelConfig, layers: usize, rows: usize) -> usize {
    layers * Places::new(config, rows).bytes
}

/// A command's arguments, whose fields are known by their offsets.
struct Fields<'a>(&'a mut LayerCommand);

impl Fields<'_> {
    fn set<T: NoUninit>(&mut self, offset: usize, value: T) {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.0.args);
        bytes[offset..][..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&value));
    }

    fn number(&self, offset: usize) -> i32 {
        let bytes: &[u8] = bytemuck::cast_slice(&self.0.args);
        bytemuck::pod_read_unaligned(&bytes[offset..][..size_of::<i32>()])
    }

    fn address(&self, offset: usize) -> DevicePtr {
        let bytes: &[u8] = bytemuck::cast_slice(&self.0.args);
        bytemuck::pod_read_unaligned(&bytes[offset..][..size_of::<DevicePtr>()])
    }
}

impl GpuOps {
    /// Commands of a layer.
    pub const COMMANDS: usize = LAYER.len();

    /// The kernel that runs layers whose experts are in this format, if there is one.
    pub fn one_launch(&self, experts: Option<PackedFormat>) -> Option<&'static Kernel> {
        self.target.one_launch(&self.args.config, &self.args.numbers, experts)
    }

    /// The list of `kernel`'s commands for the layers whose operations `queue` queues, of a step of the shape begun,
    /// which hand on through memory at `at`. `None`: they are not the kernels whose work the commands do.
    pub fn commands(
        &mut self,
        kernel: &Kernel,
        at: DevicePtr,
        queue: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<Option<Vec<LayerCommand>>> {
        self.queue.begin_list();
        let queued = queue(self);
        let listed = self.queue.end_list();
        queued?;
        let parts = parts(&listed)?;
        // A single row's experts are sorted by the router.
        let by_teams = kernel.workers == Workers::Team;
        let expected = |(part, &(_, op)): (&Part<'_>, &(i32, Op))| {
            let of = part.of.launch.kernel;
            let weights = match part.op {
                Op::QkvStore | Op::AttnOut => Some(PackedFormat::W16),
                Op::SortMlp1 | Op::Mlp1 | Op::Mlp2 => kernel.weights,
                _ => None,
            };
            let streams = of.op == Op::NormQkv || of.tokens == weights.map_or(0, |_| kernel.tokens);
            let alike = of.elements.is_none() || of.elements == kernel.elements;
            let held = of.op == Op::NormQkv || of.weights == weights;
            let op = if by_teams && op == Op::SortMlp1 { Op::Mlp1 } else { op };
            part.op == op && held && streams && alike && (!by_teams || part.has_room())
        };
        let mut layers = parts.chunks(LAYER.len());
        if !layers.all(|layer| layer.len() == LAYER.len() && layer.iter().zip(&LAYER).all(expected)) {
            return Ok(None);
        }
        let places = Places::new(&self.args.config, self.shape.rows);
        let count = parts.len() / LAYER.len();
        let mut commands = memory::room(parts.len(), Purpose::Step)?;
        for (i, part) in parts.iter().enumerate() {
            let (layer, which) = (i / LAYER.len(), i % LAYER.len());
            let mut command = LayerCommand {
                op: LAYER[which].0,
                blocks: part.of.launch.blocks as i32,
                ..LayerCommand::zeroed()
            };
            let room: &mut [u8] = bytemuck::cast_slice_mut(&mut command.args);
            let bytes = part.args.len().min(room.len());
            room[..bytes].copy_from_slice(&part.args[..bytes]);
            let memory = |layer: usize| at.add(layer * places.bytes);
            let before = layer.checked_sub(1).map(memory);
            let sorts = part.op == Op::SortMlp1;
            if !self.hand_on(&mut command, sorts, &places, memory(layer), before, layer + 1 == count) {
                return Ok(None);
            }
            commands.push(command);
        }
        Ok(Some(commands))
    }

    /// Sets where a command of the layer whose memory is at `here` hands values on, and where it takes them, which may
    /// be in the memory of the layer `before`. `sorts`: of mlp1 that sorts rows, too. What later launches read stays
    /// where it was. Whether it can be done.
    fn hand_on(
        &self,
        command: &mut LayerCommand,
        sorts: bool,
        places: &Places,
        here: DevicePtr,
        before: Option<DevicePtr>,
        last: bool,
    ) -> bool {
        const NORM: usize = offset_of!(NormRouteArgs, norm);
        const ROUTE: usize = offset_of!(NormRouteArgs, route);
        const PRODUCT: usize = offset_of!(QkvStoreArgs, product);
        const STORE: usize = offset_of!(QkvStoreArgs, store);
        const MLP1: usize = offset_of!(SortMlp1Args, product);
        const SORT: usize = offset_of!(SortMlp1Args, sort);
        let rows = self.shape.rows as i32;
        let slots = rows * self.args.config.experts_per_token as i32;
        let place = |offset: usize| here.add(offset);
        let op = command.op;
        match op {
            COMMAND_NORM => command.to = TypedPtr::new(place(places.sums)),
            COMMAND_QKV | COMMAND_ATTENTION => command.newest = TypedPtr::new(place(places.newest)),
            COMMAND_ATTN_OUT => command.from = TypedPtr::new(place(places.sums)),
            COMMAND_ROUTE => command.to = TypedPtr::new(place(places.logits)),
            _ => {}
        }
        let mut args = Fields(command);
        match op {
            COMMAND_NORM => {
                match before {
                    Some(before) => {
                        args.set(offset_of!(NormArgs, x), before.add(places.out));
                        args.set(offset_of!(NormArgs, y), before.add(places.y));
                        args.set(offset_of!(NormArgs, slots), before.add(places.slots));
                        args.set(offset_of!(NormArgs, shares), before.add(places.shares));
                    }
                    // There are no outputs to add, and x is of an earlier launch.
                    None => {
                        args.set(offset_of!(NormArgs, k), 0);
                        args.set(offset_of!(NormArgs, select), -1);
                    }
                }
                args.set(offset_of!(NormArgs, t), place(places.t));
                args.set(offset_of!(NormArgs, t_rows), rows);
            }
            COMMAND_QKV => {
                args.set(PRODUCT + offset_of!(GemmArgs, input), place(places.t));
                args.set(PRODUCT + offset_of!(GemmArgs, in_rows), rows);
                args.set(STORE + offset_of!(RopeStoreArgs, q), place(places.q));
            }
            COMMAND_ATTENTION => {
                args.set(offset_of!(AttentionArgs, q), place(places.q));
                args.set(offset_of!(AttentionArgs, out), place(places.attention));
                args.set(offset_of!(AttentionArgs, out_rows), rows);
            }
            COMMAND_ATTN_OUT => {
                let x = args.address(offset_of!(GemmArgs, out));
                args.set(offset_of!(GemmArgs, input), place(places.attention));
                args.set(offset_of!(GemmArgs, in_rows), rows);
                args.set(offset_of!(GemmArgs, out), place(places.out));
                command.to = TypedPtr::new(x).only_if(last);
            }
            COMMAND_ROUTE => {
                if args.number(ROUTE + offset_of!(RouteArgs, format)) != Format::Bf16 as i32 {
                    return false;
                }
                args.set(NORM + offset_of!(NormArgs, x), place(places.out));
                args.set(NORM + offset_of!(NormArgs, k), 0);
                args.set(NORM + offset_of!(NormArgs, t), place(places.routed));
                args.set(NORM + offset_of!(NormArgs, t_rows), rows);
                args.set(ROUTE + offset_of!(RouteArgs, experts), place(places.experts));
                if !last {
                    args.set(ROUTE + offset_of!(RouteArgs, shares), place(places.shares));
                }
            }
            COMMAND_MLP1 => {
                args.set(MLP1 + offset_of!(GemmArgs, input), place(places.routed));
                args.set(MLP1 + offset_of!(GemmArgs, in_rows), rows);
                args.set(MLP1 + offset_of!(GemmArgs, tiled), place(places.h));
                args.set(MLP1 + offset_of!(GemmArgs, tiled_rows), slots);
                if sorts {
                    args.set(SORT + offset_of!(SortArgs, experts), place(places.experts));
                    args.set(SORT + offset_of!(SortArgs, offsets), place(places.offsets));
                    args.set(SORT + offset_of!(SortArgs, counts), place(places.counts));
                    if !last {
                        args.set(SORT + offset_of!(SortArgs, slots), place(places.slots));
                    }
                }
            }
            _ => {
                args.set(offset_of!(GemmArgs, input), place(places.h));
                args.set(offset_of!(GemmArgs, in_rows), slots);
                args.set(offset_of!(GemmArgs, rows), place(places.counts));
                args.set(offset_of!(GemmArgs, offsets), place(places.offsets));
                if !last {
                    args.set(offset_of!(GemmArgs, y), place(places.y));
                }
            }
        }
        true
    }

    /// Queues all layers at once.
    pub fn layers_at_once<'x>(
        &mut self,
        x: Residual<'x>,
        launch: Launch,
        args: &OneLaunchArgs,
    ) -> Result<Residual<'x>> {
        self.queue.launch_together(launch, args)?;
        Ok(Residual {
            memory: x.memory,
            outstanding: true,
        })
    }
}
