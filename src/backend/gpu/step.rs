//! The plan of a step on its way to the device: laid out in pinned memory, fetched by the step's first kernel.
//!
//! Each part of the plan has a place in device memory that never changes, so that a captured graph serves every step of
//! its shape. Of each part only what is used travels. There are several host copies in turn, one a step under way, as the
//! host writes the plan of a step while devices may still read those of the steps before.

use super::args::{ChunkInfo, KV_PAGE, LogitsRowInfo, Step, StepHeader, UploadArgs, UploadList, UploadSection};
use super::attention_plan::{AttentionItem, PrefillTile, plan_decode, plan_prefill};
use super::memory::{DeviceBuffer, PinnedBuffer, Stream};
use crate::batch::StepPlan;
use crate::batch::Want;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::sampler::{has_nucleus, least_probable};
use bytemuck::NoUninit;
use std::iter::{repeat, repeat_n};

/// The most of everything a step can have.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    /// Rows.
    pub rows: usize,
    /// Sequences.
    pub sequences: usize,
    /// Rows whose logits are wanted.
    pub logits_rows: usize,
    /// Page numbers in all tables.
    pub pages: usize,
    /// Positions of a sequence.
    pub positions: usize,
    /// Tokens to draw from.
    pub vocab: usize,
}

/// What attention's planning needs to know.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Key heads, each of which is a work item's worth of its own.
    pub kv_heads: usize,
    /// Keys a row of a windowed layer sees; 0 if there is no such layer.
    pub window: usize,
    /// Processors to keep busy.
    pub processors: usize,
    /// Query rows a block of the prefill kernel takes.
    pub prefill_rows: usize,
}

const SECTIONS: usize = 10;
/// Sections start at multiples of this, the width of the copies.
const ALIGN: usize = 16;

/// The plan's memory on host and device.
pub struct StepMemory {
    capacity: Capacity,
    attention: AttentionShape,
    device: DeviceBuffer,
    last_tokens: DeviceBuffer,
    turn: DeviceBuffer,
    /// Copies of the plan, one a turn, `host_bytes` from each to the next.
    host: PinnedBuffer,
    host_bytes: usize,
    places: [usize; SECTIONS],
    /// Reused from step to step.
    scratch: Scratch,
}

#[derive(Default)]
struct Scratch {
    row_chunk: Vec<i32>,
    chunks: Vec<ChunkInfo>,
    logits: Vec<LogitsRowInfo>,
    full_items: Vec<AttentionItem>,
    window_items: Vec<AttentionItem>,
    prefill_tiles: Vec<PrefillTile>,
}

impl StepMemory {
    /// Memory for steps within `capacity`, `turns` of which may be under way.
    pub fn new(stream: &Stream, capacity: Capacity, attention: AttentionShape, turns: usize) -> Result<Self> {
        // A decoding row has at most one item for each unit of two pages it has begun.
        let full_items = capacity.pages / 2 + 2 * capacity.sequences;
        let window_items = capacity.sequences * (attention.window / KV_PAGE + 2);
        let sizes = [
            size_of::<StepHeader>(),
            4 * capacity.rows,
            4 * capacity.rows,
            4 * capacity.rows,
            size_of::<ChunkInfo>() * capacity.sequences,
            4 * capacity.pages,
            size_of::<LogitsRowInfo>() * capacity.logits_rows,
            size_of::<AttentionItem>() * full_items,
            size_of::<AttentionItem>() * window_items,
            size_of::<PrefillTile>() * capacity.rows,
        ];
        let mut end = 0;
        let places = sizes.map(|bytes| {
            let place = end;
            end += bytes.next_multiple_of(ALIGN);
            place
        });
        let host_bytes = size_of::<UploadList>() + end;
        Ok(Self {
            capacity,
            attention,
            device: DeviceBuffer::zeroed(stream, end)?,
            last_tokens: DeviceBuffer::zeroed(stream, 4 * capacity.sequences)?,
            turn: DeviceBuffer::zeroed(stream, 16)?,
            host: PinnedBuffer::zeroed(&stream.driver, turns * host_bytes)?,
            host_bytes,
            places,
            scratch: Scratch::default(),
        })
    }

    /// Where kernels find the plan.
    pub fn step(&self) -> Step {
        let at = |section: usize| self.device.at().add(self.places[section]);
        Step {
            header: at(0),
            tokens: at(1),
            positions: at(2),
            row_chunk: at(3),
            chunks: at(4),
            tables: at(5),
            logits: at(6),
            full_items: at(7),
            window_items: at(8),
            prefill_tiles: at(9),
            last_tokens: self.last_tokens.at(),
        }
    }

    /// What the step's first kernel is told.
    pub fn upload_args(&self) -> UploadArgs {
        UploadArgs {
            host: self.host.device(),
            device: self.device.at(),
            turn: self.turn.at(),
            copies: (self.host.bytes() / self.host_bytes) as u32,
            copy_bytes: self.host_bytes as u32,
        }
    }

    /// Lays out a plan in the host copy of this turn, which the device has fetched the last time it was written.
    pub fn write(&mut self, plan: &StepPlan, turn: usize, want: Want) -> Result<StepHeader> {
        self.check(plan)?;
        self.scratch.fill(plan, &self.attention)?;
        let Self { scratch, places, .. } = self;
        let (temperature, topp) = match want {
            Want::Draws { temperature, topp } => (temperature, topp),
            Want::Greedy | Want::Logits => (0.0, 0.0),
        };
        let header = StepHeader {
            rows: plan.rows() as i32,
            decode_rows: plan.decode_chunks as i32,
            chunks: plan.chunks.len() as i32,
            logits_rows: plan.logits.len() as i32,
            full_items: scratch.full_items.len() as i32,
            window_items: scratch.window_items.len() as i32,
            prefill_tiles: scratch.prefill_tiles.len() as i32,
            turn: turn as i32,
            temperature,
            // 0 stands for all that is no nucleus: NaN has no place in the kernel.
            topp: if has_nucleus(topp) { topp } else { 0.0 },
            least: least_probable(self.capacity.vocab, topp),
            reserved: 0,
        };
        // SAFETY: the device has read this copy: the step that used it last has been waited for.
        let copies = unsafe { self.host.write() };
        let copy = &mut copies[turn * self.host_bytes..][..self.host_bytes];
        let mut out = Blob::new(copy, places);
        out.section(&[header]);
        out.section(&plan.tokens);
        out.section(&plan.positions);
        out.section(&scratch.row_chunk);
        out.section(&scratch.chunks);
        out.section(&plan.tables);
        out.section(&scratch.logits);
        out.section(&scratch.full_items);
        out.section(&scratch.window_items);
        out.section(&scratch.prefill_tiles);
        out.finish();
        Ok(header)
    }

    fn check(&self, plan: &StepPlan) -> Result<()> {
        let c = &self.capacity;
        let fits = plan.rows() <= c.rows
            && plan.chunks.len() <= c.sequences
            && plan.chunks.iter().all(|chunk| chunk.sequence < c.sequences)
            && plan.logits.len() <= c.logits_rows
            && plan.tables.len() <= c.pages
            && plan.positions.iter().all(|&position| (position as usize) < c.positions);
        if fits {
            return Ok(());
        }
        Err(Error::Internal(format!("a step larger than {c:?}")))
    }
}

impl Scratch {
    fn fill(&mut self, plan: &StepPlan, shape: &AttentionShape) -> Result<()> {
        self.row_chunk.clear();
        self.chunks.clear();
        for (index, chunk) in plan.chunks.iter().enumerate() {
            memory::extend(&mut self.row_chunk, repeat_n(index as i32, chunk.rows), Purpose::Step)?;
            let info = ChunkInfo {
                first_row: chunk.first_row as i32,
                rows: chunk.rows as i32,
                first_position: chunk.first_position as i32,
                slot: chunk.sequence as i32,
                full: chunk.full.start as i32,
                window: chunk.window.start as i32,
                window_pages: chunk.window.len() as i32,
                reserved: 0,
            };
            memory::push(&mut self.chunks, info, Purpose::Step)?;
        }
        self.logits.clear();
        let coins = plan.coins.iter().copied().chain(repeat(0.0));
        let rows = plan.logits.iter().zip(coins).map(|(wanted, coin)| LogitsRowInfo {
            row: wanted.row as i32,
            slot: if wanted.sample { wanted.sequence as i32 } else { -1 },
            coin,
        });
        memory::extend(&mut self.logits, rows, Purpose::Step)?;
        let decoding = || plan.chunks[..plan.decode_chunks].iter();
        self.full_items.clear();
        let keys = |position: usize| (0, position + 1);
        let rows = decoding().map(|chunk| (chunk.first_row, keys(chunk.first_position)));
        plan_decode(
            rows.map(|(row, (first, keys))| (row, first, keys)),
            shape.kv_heads,
            shape.processors,
            &mut self.full_items,
        )?;
        self.window_items.clear();
        if shape.window > 0 {
            let rows = decoding().map(|chunk| {
                let keys = shape.window.min(chunk.first_position + 1);
                (chunk.first_row, chunk.first_position + 1 - keys, keys)
            });
            plan_decode(rows, shape.kv_heads, shape.processors, &mut self.window_items)?;
        }
        self.prefill_tiles.clear();
        plan_prefill(
            plan.chunks[plan.decode_chunks..]
                .iter()
                .enumerate()
                .map(|(i, chunk)| (plan.decode_chunks + i, chunk.first_position, chunk.rows)),
            shape.prefill_rows,
            &mut self.prefill_tiles,
        )
    }
}

/// Sections one behind the other, with their list in front.
struct Blob<'a> {
    bytes: &'a mut [u8],
    places: &'a [usize; SECTIONS],
    list: UploadList,
    end: usize,
}

impl<'a> Blob<'a> {
    fn new(bytes: &'a mut [u8], places: &'a [usize; SECTIONS]) -> Self {
        let empty = UploadSection {
            from: 0,
            to: 0,
            bytes: 0,
            reserved: 0,
        };
        Self {
            bytes,
            places,
            list: UploadList {
                sections: 0,
                reserved: [0; 3],
                section: [empty; 12],
            },
            end: size_of::<UploadList>(),
        }
    }

    fn section<T: NoUninit>(&mut self, values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let section = self.list.sections as usize;
        self.list.section[section] = UploadSection {
            from: self.end as u32,
            to: self.places[section] as u32,
            bytes: bytes.len().next_multiple_of(ALIGN) as u32,
            reserved: 0,
        };
        self.list.sections += 1;
        self.bytes[self.end..][..bytes.len()].copy_from_slice(bytes);
        self.end += bytes.len().next_multiple_of(ALIGN);
    }

    fn finish(self) {
        self.bytes[..size_of::<UploadList>()].copy_from_slice(bytemuck::bytes_of(&self.list));
    }
}
