//! The plan of a step on its way to the device: laid out in pinned memory, fetched by the step's first kernel.
//!
//! Each part of the plan has a place in device memory that never changes, so that a captured graph serves every step of
//! its shape. Of each part only what is used travels. There are several host copies in turn, one a step under way, as
//! the host writes the plan of a step while devices may still read those of the steps before. Where a replica has
//! several devices, all of them fetch the same copy.

use super::args::{
    ATTENTION_GROUP, ATTENTION_SPAN, ATTENTION_UNIT, AttentionItem, ChunkInfo, KV_PAGE, LogitsRowInfo, PrefillTile,
    SharedItem, Sharer, Step, StepHeader, UPLOAD_PIECE, UPLOAD_SECTIONS, UploadArgs, UploadList, UploadSection,
};
use super::attention_plan::{Cuts, Planned, Sharing, plan_decode, plan_prefill, plan_shared, won_by_sharing};
use super::attention_runs::{Load, least_run};
use super::layout::TypedPtr;
use super::memory::{DeviceBuffer, PinnedBuffer, Stream};
use super::shared_keys::{self, GROUP_KEYS, PagedRow, Pair, SharedPrefixes, pairs};
use crate::batch::{Chunk, Draw, StepPlan};
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::sampler::{has_nucleus, least_probable};
use bytemuck::NoUninit;
use std::iter::repeat_n;
use std::marker::PhantomData;

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
    /// Items of decode attention that run at once where all multiprocessors are busy.
    pub items_at_once: usize,
    /// Decoding rows up to which whole groups of units are shared out by the kernel.
    pub team_rows: usize,
    /// Whether attention runs on the matrix cores.
    pub on_cores: bool,
    /// Whether an item may be of two rows there.
    pub two_rows: bool,
    /// Rows of an item of the kernel for keys that many rows see; 0: there is none.
    pub shared_rows: usize,
    /// Whether there is a kernel for items of whole rows of any length.
    pub whole_rows: bool,
    /// Partial sums of split rows that there is room for.
    pub partials: usize,
    /// Query rows a block of the prefill kernel takes.
    pub prefill_rows: usize,
}

/// Makes [`Sections`] and [`Contents`] of a list of sections: name in [`Step`], element, and the most elements that a
/// step can have.
macro_rules! sections {
    (|$capacity:ident, $attention:ident| { $($name:ident: [$element:ty; $most:expr],)* }) => {
        /// Where each section of the plan lies.
        struct Sections {
            $($name: Section<$element>,)*
        }

        /// What goes into each section in a step.
        struct Contents<'a> {
            $($name: &'a [$element],)*
        }

        const SECTIONS: usize = [$(stringify!($name)),*].len();

        impl Sections {
            /// One behind the other, and the bytes of all.
            fn new($capacity: &Capacity, $attention: &AttentionShape) -> (Self, usize) {
                let mut end = 0;
                let sections = Self { $($name: Section::behind(&mut end, stringify!($name), $most),)* };
                (sections, end)
            }

            /// Where kernels find them in a plan that begins at `plan`.
            fn step(&self, plan: TypedPtr<u8>, last_tokens: TypedPtr<i32>) -> Step {
                Step { $($name: self.$name.at(plan),)* last_tokens }
            }

            fn write(&self, contents: &Contents<'_>, out: &mut Blob<'_>) -> Result<()> {
                $(out.section(&self.$name, contents.$name)?;)*
                Ok(())
            }
        }
    };
}

sections! {
    |capacity, attention| {
        header: [StepHeader; 1],
        tokens: [i32; capacity.rows],
        positions: [i32; capacity.rows],
        row_chunk: [i32; capacity.rows],
        chunks: [ChunkInfo; capacity.sequences],
        tables: [i32; capacity.pages],
        logits: [LogitsRowInfo; capacity.logits_rows],
        // A decoding row has at most one item for each unit of two pages it has begun.
        full_items: [AttentionItem; capacity.pages / 2 + 2 * capacity.sequences],
        window_items: [AttentionItem; capacity.sequences * (attention.window / KV_PAGE + 2)],
        // An item has two rows at least, and for each a group's pages.
        shared_items: [SharedItem; capacity.pages * KV_PAGE / (2 * GROUP_KEYS)],
        sharers: [Sharer; most_sharers(capacity)],
        prefill_tiles: [PrefillTile; capacity.rows],
    }
}

/// Rows of all prefixes of a step, where each row is in some, one behind the other.
fn most_sharers(capacity: &Capacity) -> usize {
    4 * capacity.sequences
}

const _: () = assert!(
    SECTIONS <= UPLOAD_SECTIONS,
    "an UploadList has no room for so many sections"
);

/// A section's place in the plan, which never changes.
struct Section<T> {
    name: &'static str,
    at: usize,
    most: usize,
    holds: PhantomData<T>,
}

impl<T> Section<T> {
    /// Room for `most` elements from `end` on, which moves behind them.
    fn behind(end: &mut usize, name: &'static str, most: usize) -> Self {
        let at = *end;
        *end += (size_of::<T>() * most).next_multiple_of(UPLOAD_PIECE);
        Self {
            name,
            at,
            most,
            holds: PhantomData,
        }
    }

    fn at(&self, plan: TypedPtr<u8>) -> TypedPtr<T> {
        TypedPtr::new(plan.raw().add(self.at))
    }
}

/// The token sampled last in each slot.
enum LastTokens {
    /// In the memory of the only device.
    Own(DeviceBuffer<i32>),
    /// In pinned memory, as the last device finds tokens and the first one embeds them.
    Shared(PinnedBuffer<i32>),
}

impl LastTokens {
    fn values(&self) -> TypedPtr<i32> {
        match self {
            Self::Own(memory) => memory.values(),
            Self::Shared(memory) => memory.values(),
        }
    }
}

/// The plans on the host, and what goes from one step to another.
pub struct Plans {
    capacity: Capacity,
    attention: AttentionShape,
    last_tokens: LastTokens,
    /// Copies of the plan, one a turn, `host_bytes` from each to the next.
    host: PinnedBuffer,
    host_bytes: usize,
    sections: Sections,
    /// Bytes of all sections.
    end: usize,
    /// Reused from step to step.
    scratch: Scratch,
}

/// The plan of a step on a device.
pub struct StepMemory {
    step: Step,
    upload: UploadArgs,
    // Whose addresses these have.
    _device: DeviceBuffer,
    _turn: DeviceBuffer<u32>,
}

#[derive(Default)]
struct Scratch {
    row_chunk: Vec<i32>,
    chunks: Vec<ChunkInfo>,
    logits: Vec<LogitsRowInfo>,
    full_items: Vec<AttentionItem>,
    /// See [`StepHeader`].
    whole_items: usize,
    window_items: Vec<AttentionItem>,
    shared_items: Vec<SharedItem>,
    sharers: Vec<Sharer>,
    prefill_tiles: Vec<PrefillTile>,
    // What attention's planning needs.
    pairing: shared_keys::Scratch,
    pairs: Vec<Pair>,
    /// Of groups and of spans.
    prefixes: [SharedPrefixes; 2],
    cuts: Cuts,
}

impl StepMemory {
    /// Memory on another device for these plans.
    pub fn new(stream: &Stream, plans: &Plans) -> Result<Self> {
        let device = DeviceBuffer::zeroed(stream, plans.end)?;
        let turn = DeviceBuffer::zeroed(stream, 2)?;
        let upload = UploadArgs {
            host: plans.host.values(),
            device: device.values(),
            turn: turn.values(),
            copies: (plans.host.bytes() / plans.host_bytes) as u32,
            copy_bytes: plans.host_bytes as u32,
        };
        Ok(Self {
            step: plans.sections.step(device.values(), plans.last_tokens.values()),
            upload,
            _device: device,
            _turn: turn,
        })
    }

    /// Where kernels find the plan.
    pub fn step(&self) -> Step {
        self.step
    }

    /// What the step's first kernel is told.
    pub fn upload_args(&self) -> UploadArgs {
        self.upload
    }
}

impl Plans {
    /// Memory for steps within `capacity`, `turns` of which may be under way. `shared` by several devices, the stream
    /// being the first one's.
    pub fn new(
        stream: &Stream,
        capacity: Capacity,
        attention: AttentionShape,
        turns: usize,
        shared: bool,
    ) -> Result<Self> {
        let last_tokens = if shared {
            LastTokens::Shared(PinnedBuffer::zeroed(&stream.driver, capacity.sequences)?)
        } else {
            LastTokens::Own(DeviceBuffer::zeroed(stream, capacity.sequences)?)
        };
        let (sections, end) = Sections::new(&capacity, &attention);
        let host_bytes = size_of::<UploadList>() + end;
        Ok(Self {
            capacity,
            attention,
            last_tokens,
            host: PinnedBuffer::zeroed(&stream.driver, turns * host_bytes)?,
            host_bytes,
            sections,
            end,
            scratch: Scratch::default(),
        })
    }

    /// Lays out a plan in the host copy of this turn, which the device has fetched the last time it was written;
    /// returns its counts.
    pub fn write(&mut self, plan: &StepPlan, turn: usize) -> Result<StepHeader> {
        self.check(plan)?;
        let vocab = plan.drawable_of(self.capacity.vocab);
        self.scratch
            .fill(plan, &self.attention, vocab, most_sharers(&self.capacity))?;
        let Self { scratch, sections, .. } = self;
        let header = StepHeader {
            rows: plan.rows() as i32,
            chunks: plan.chunks.len() as i32,
            logits_rows: plan.logits.len() as i32,
            full_items: scratch.full_items.len() as i32,
            window_items: scratch.window_items.len() as i32,
            prefill_tiles: scratch.prefill_tiles.len() as i32,
            turn: turn as i32,
            shared_items: scratch.shared_items.len() as i32,
            whole_items: scratch.whole_items as i32,
        };
        // SAFETY: the device has read this copy: the step that used it last has been waited for.
        let copies = unsafe { self.host.write() };
        let contents = Contents {
            header: &[header],
            tokens: &plan.tokens,
            positions: bytemuck::cast_slice(&plan.positions),
            row_chunk: &scratch.row_chunk,
            chunks: &scratch.chunks,
            tables: bytemuck::cast_slice(&plan.tables),
            logits: &scratch.logits,
            full_items: &scratch.full_items,
            window_items: &scratch.window_items,
            shared_items: &scratch.shared_items,
            sharers: &scratch.sharers,
            prefill_tiles: &scratch.prefill_tiles,
        };
        let mut out = Blob::new(&mut copies[turn * self.host_bytes..][..self.host_bytes]);
        sections.write(&contents, &mut out)?;
        out.finish();
        Ok(header)
    }

    fn check(&self, plan: &StepPlan) -> Result<()> {
        let c = &self.capacity;
        let fits = plan.rows() <= c.rows
            && plan.chunks.len() <= c.sequences
            && plan.chunks.iter().all(|chunk| chunk.slot < c.sequences)
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
    fn fill(&mut self, plan: &StepPlan, shape: &AttentionShape, vocab: usize, most_sharers: usize) -> Result<()> {
        self.row_chunk.clear();
        self.chunks.clear();
        for (index, chunk) in plan.chunks.iter().enumerate() {
            memory::extend(&mut self.row_chunk, repeat_n(index as i32, chunk.rows), Purpose::Step)?;
            let info = ChunkInfo {
                first_row: chunk.first_row as i32,
                rows: chunk.rows as i32,
                first_position: chunk.first_position as i32,
                slot: chunk.slot as i32,
                full: chunk.full.start as i32,
                window: chunk.window.start as i32,
                window_pages: chunk.window.len() as i32,
                reserved: 0,
            };
            memory::push(&mut self.chunks, info, Purpose::Step)?;
        }
        self.logits.clear();
        let rows = plan.logits.iter().map(|wanted| {
            let Draw {
                temperature,
                topp,
                coin,
            } = wanted.draw;
            LogitsRowInfo {
                row: wanted.row as i32,
                slot: if wanted.sample { wanted.slot as i32 } else { -1 },
                coin,
                temperature,
                // 0 stands for all that is no nucleus: NaN has no place in the kernel.
                topp: if has_nucleus(topp) { topp } else { 0.0 },
                least: least_probable(vocab, topp),
                next: wanted.score.and_then(|score| score.next).map_or(-1, u32::cast_signed),
                top: wanted.score.map_or(-1, |score| score.top as i32),
            }
        });
        memory::extend(&mut self.logits, rows, Purpose::Step)?;
        self.plan_decode(plan, shape, most_sharers)?;
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

    /// The items of decoding rows.
    fn plan_decode(&mut self, plan: &StepPlan, shape: &AttentionShape, most_sharers: usize) -> Result<()> {
        let chunks = &plan.chunks[..plan.decode_chunks];
        let keys = chunks.iter().map(|chunk| chunk.first_position + 1);
        let mut load = Load {
            kv_heads: shape.kv_heads,
            at_once: shape.items_at_once,
            least_run: least_run(chunks.len(), shape.team_rows),
            most_partials: shape.partials,
            by_position: false,
            whole_rows: shape.on_cores && shape.whole_rows,
        };
        let paged = |chunk: &Chunk| PagedRow {
            position: chunk.first_position,
            pages: &plan.tables[chunk.full.clone()],
        };
        let rows = || memory::collect(chunks.iter().map(paged), Purpose::Step);
        let teams = chunks.len() <= shape.team_rows;
        self.pairs.clear();
        let mut sharing = Sharing::Pairs(&[]);
        if shape.on_cores && shape.shared_rows > 0 && chunks.len() > 1 {
            let rows = rows()?;
            let mut most_won = 0;
            for (run, prefixes) in [ATTENTION_GROUP, ATTENTION_SPAN].into_iter().zip(&mut self.prefixes) {
                prefixes.find(&rows, run * ATTENTION_UNIT / KV_PAGE, most_sharers)?;
                let won = won_by_sharing(&load, prefixes, shape.shared_rows, chunks.len());
                if won > most_won {
                    most_won = won;
                    sharing = Sharing::Prefixes(prefixes);
                }
            }
        } else if shape.on_cores && shape.shared_rows == 0 && !teams {
            pairs(&rows()?, &mut self.pairing, &mut self.pairs)?;
            let shared = self.pairs.iter().map(Pair::keys).sum::<usize>();
            // What another row reads as well, where it is a quarter of all, is read one row behind the other.
            load.by_position = shared > 0 && 4 * shared >= keys.sum();
            if shape.two_rows {
                sharing = Sharing::Pairs(&self.pairs);
            }
        }
        let full = chunks
            .iter()
            .map(|chunk| (chunk.first_row, 0, chunk.first_position + 1));
        let Planned { whole, .. } = plan_decode(full, sharing, &load, &mut self.cuts, &mut self.full_items)?;
        self.whole_items = whole;
        self.shared_items.clear();
        self.sharers.clear();
        if let Sharing::Prefixes(prefixes) = sharing {
            let table = |place: usize| chunks[place].full.start;
            let (items, sharers) = (&mut self.shared_items, &mut self.sharers);
            plan_shared(&self.cuts, prefixes, shape.shared_rows, table, items, sharers)?;
        }
        self.window_items.clear();
        if shape.window > 0 {
            let rows = chunks.iter().map(|chunk| {
                let keys = shape.window.min(chunk.first_position + 1);
                (chunk.first_row, chunk.first_position + 1 - keys, keys)
            });
            load.whole_rows = false;
            plan_decode(rows, Sharing::Pairs(&[]), &load, &mut self.cuts, &mut self.window_items)?;
        }
        Ok(())
    }
}

/// What of the sections a step uses, one behind the other, with their list in front.
struct Blob<'a> {
    bytes: &'a mut [u8],
    list: UploadList,
    end: usize,
}

impl<'a> Blob<'a> {
    fn new(bytes: &'a mut [u8]) -> Self {
        Self {
            bytes,
            list: UploadList::default(),
            end: size_of::<UploadList>(),
        }
    }

    fn section<T: NoUninit>(&mut self, section: &Section<T>, values: &[T]) -> Result<()> {
        if values.len() > section.most {
            return Err(Error::Internal(format!(
                "a step with {} of {}, where there is room for {}",
                values.len(),
                section.name,
                section.most
            )));
        }
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let copied = bytes.len().next_multiple_of(UPLOAD_PIECE);
        self.list.section[self.list.sections as usize] = UploadSection {
            from: self.end as u32,
            to: section.at as u32,
            bytes: copied as u32,
            reserved: 0,
        };
        self.list.sections += 1;
        self.bytes[self.end..][..bytes.len()].copy_from_slice(bytes);
        self.end += copied;
        Ok(())
    }

    fn finish(self) {
        self.bytes[..size_of::<UploadList>()].copy_from_slice(bytemuck::bytes_of(&self.list));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::gpu::driver::DevicePtr;
    use crate::batch::Chunk;
    use std::mem::offset_of;

    const CAPACITY: Capacity = Capacity {
        rows: 5,
        sequences: 3,
        logits_rows: 3,
        pages: 7,
        positions: 64,
        vocab: 10,
    };
    const ATTENTION: AttentionShape = AttentionShape {
        kv_heads: 1,
        window: 128,
        items_at_once: 1,
        team_rows: 0,
        on_cores: false,
        two_rows: false,
        shared_rows: 0,
        whole_rows: false,
        partials: 0,
        prefill_rows: 16,
    };
    const HEADER: StepHeader = StepHeader {
        rows: 4,
        chunks: 2,
        logits_rows: 1,
        full_items: 0,
        window_items: 0,
        prefill_tiles: 0,
        turn: 0,
        shared_items: 0,
        whole_items: 0,
    };

    fn contents<'a>(tokens: &'a [i32], tables: &'a [i32]) -> Contents<'a> {
        Contents {
            header: &[HEADER],
            tokens,
            positions: &[],
            row_chunk: &[],
            chunks: &[],
            tables,
            logits: &[],
            full_items: &[],
            window_items: &[],
            shared_items: &[],
            sharers: &[],
            prefill_tiles: &[],
        }
    }

    /// What the device has after `upload` has copied the sections of `blob`.
    fn uploaded(blob: &[u8], bytes: usize) -> Vec<u8> {
        let (mut device, word) = (vec![0; bytes], |at| {
            u32::from_ne_bytes(blob[at..][..4].try_into().unwrap())
        });
        for section in 0..word(0) as usize {
            let at = offset_of!(UploadList, section) + section * size_of::<UploadSection>();
            let [from, to, bytes] = [0, 4, 8].map(|field| word(at + field) as usize);
            device[to..][..bytes].copy_from_slice(&blob[from..][..bytes]);
        }
        device
    }

    fn integers(bytes: &[u8]) -> Vec<i32> {
        bytes.as_chunks().0.iter().map(|&b| i32::from_ne_bytes(b)).collect()
    }

    /// Each section is found through the field of [`Step`] that bears its name.
    #[test]
    fn sections_arrive_where_the_step_says() {
        let (sections, bytes) = Sections::new(&CAPACITY, &ATTENTION);
        let step = sections.step(TypedPtr::new(DevicePtr(0)), TypedPtr::NULL);
        let mut blob = vec![0; size_of::<UploadList>() + bytes];
        let mut out = Blob::new(&mut blob);
        sections
            .write(&contents(&[11, 12, 13, 14, 15], &[21, 22]), &mut out)
            .unwrap();
        out.finish();
        let device = uploaded(&blob, bytes);
        let words = |at: DevicePtr, n: usize| integers(&device[at.0 as usize..][..4 * n]);
        assert_eq!(words(step.header.raw(), 4), [4, 2, 1, 0]);
        assert_eq!(words(step.tokens.raw(), 5), [11, 12, 13, 14, 15]);
        assert_eq!(words(step.tables.raw(), 2), [21, 22]);
        let tokens = size_of::<StepHeader>().next_multiple_of(UPLOAD_PIECE);
        assert_eq!(step.tokens.raw().0 as usize, tokens);
        assert_eq!(
            step.positions.raw().0 as usize,
            tokens + 32,
            "20 bytes end within the second piece"
        );
    }

    /// Rows whose tables begin alike have items of both, where the kernel takes two rows in a step of more than teams
    /// take, or items of all, where there is a kernel for these; of full layers alone.
    #[test]
    fn rows_share_items_where_a_kernel_takes_them() {
        let pages = |own: u32| (0..321).chain(own..own + 3).collect::<Vec<u32>>();
        let chunk = |slot: usize| Chunk {
            slot,
            first_row: slot,
            rows: 1,
            first_position: 20_668,
            full: 324 * slot..324 * slot + 324,
            window: 0..3,
        };
        let plan = StepPlan {
            decode_chunks: 3,
            chunks: (0..3).map(chunk).collect(),
            tables: (1..4).flat_map(|row| pages(1000 * row)).collect(),
            ..StepPlan::default()
        };
        let written = |on_cores, two_rows, team_rows, shared_rows, most_sharers| {
            let shape = AttentionShape {
                kv_heads: 8,
                items_at_once: 1000,
                on_cores,
                two_rows,
                team_rows,
                shared_rows,
                partials: 1000,
                ..ATTENTION
            };
            let mut scratch = Scratch::default();
            scratch.fill(&plan, &shape, 10, most_sharers).unwrap();
            assert!(scratch.window_items.iter().all(|item| item.second < 0));
            scratch
        };
        let seconds = |on_cores, two_rows, team_rows| {
            let scratch = written(on_cores, two_rows, team_rows, 0, 12);
            assert!(scratch.shared_items.is_empty() && scratch.sharers.is_empty());
            let seconds = scratch.full_items.iter().filter(|item| item.second >= 0);
            (seconds.count(), scratch.pairs.len())
        };
        assert_eq!(seconds(true, true, 1), (40, 1));
        assert_eq!(seconds(true, false, 1), (0, 1), "where no kernel takes both");
        assert_eq!([seconds(false, true, 1), seconds(true, true, 3)], [(0, 0); 2]);

        let scratch = written(true, false, 8, 16, 12);
        let item = |part| SharedItem {
            table: 8 * part,
            pages: 8,
            part,
            first_sharer: 0,
            sharers: 3,
        };
        assert!(scratch.shared_items.iter().copied().eq((0..40).map(item)));
        let sharer = |row| Sharer { row, partial: 41 * row };
        assert_eq!(scratch.sharers, [0, 1, 2].map(sharer));
        let own = |item: &AttentionItem| (item.first_unit, item.tokens, item.row_items);
        assert!(scratch.full_items.iter().map(own).eq([(160, 189, 41); 3]));
        let without = [
            written(false, false, 8, 16, 12),
            written(true, false, 8, 16, 2),
            written(true, false, 1, 16, 12),
        ];
        assert!(without.iter().all(|scratch| scratch.shared_items.is_empty()));
    }

    /// What does not fit its own section would be copied over the next one.
    #[test]
    fn a_section_that_is_too_long_is_refused_by_name() {
        let (sections, bytes) = Sections::new(&CAPACITY, &ATTENTION);
        let mut blob = vec![0; size_of::<UploadList>() + bytes];
        let wrong = sections.write(&contents(&[0; 6], &[]), &mut Blob::new(&mut blob));
        let text = wrong.unwrap_err().to_string();
        assert!(text.contains("6 of tokens") && text.contains("room for 5"), "{text}");
    }
}
