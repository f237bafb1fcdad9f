//! What lies in device memory, as float32 on the host, and stale values put there: for tests and tools. All of it waits
//! for the device. Modules of this name are public because tests and benches are crates of their own; the library's
//! exports do not reach them, so the linker leaves them out of it, which `tests/programs/simt.sh` checks.

use super::values::{Buffer, Normed, Projected, Routes, y_elements};
use super::{GpuOps, KvCache};
use crate::backend::gpu::args::{KV_PAGE, SLAB};
use crate::backend::gpu::catalogue::Elements;
use crate::backend::gpu::driver::DevicePtr;
use crate::backend::gpu::memory::{DeviceBuffer, to_host};
use crate::error::Result;
use half::{bf16, f16};

/// What became of a step's rows on their way to the experts.
#[derive(Debug, PartialEq)]
pub struct Sent {
    /// `[rows, K]`, in order of the expert's index.
    pub experts: Vec<i32>,
    /// `[rows, K]`
    pub shares: Vec<f32>,
    /// `[rows, K]`: where each is in what follows.
    pub slots: Vec<i32>,
    /// `[E + 1]`: the first slot of each expert.
    pub offsets: Vec<i32>,
    /// `[E]`
    pub counts: Vec<i32>,
}

/// One layer's pages of keys and values.
pub struct Pages {
    bytes: Vec<u8>,
    page_bytes: usize,
    head_bytes: usize,
    head_dim: usize,
    elements: Elements,
}

impl Pages {
    /// A KV head's key and value of a position, which lies in `page`.
    pub fn key_value(&self, page: usize, head: usize, position: usize) -> [Vec<f32>; 2] {
        let half = KV_PAGE * self.head_dim;
        let head = &self.bytes[page * self.page_bytes + head * self.head_bytes..];
        let head = widen(&head[..2 * half * self.elements.bytes()], self.elements);
        [0, half].map(|begin| {
            (0..self.head_dim)
                .map(|d| head[begin + self.place(position, d)])
                .collect()
        })
    }

    /// See [`super::super::args`].
    fn place(&self, position: usize, d: usize) -> usize {
        let pieces = self.head_dim / 8;
        let turn = 1 << pieces.trailing_zeros();
        position % KV_PAGE * self.head_dim + ((d / 8) ^ (position % turn)) * 8 + d % 8
    }
}

/// Little-endian values of a format.
fn widen(bytes: &[u8], elements: Elements) -> Vec<f32> {
    match elements {
        Elements::F16 => bytes
            .as_chunks()
            .0
            .iter()
            .map(|&b| f16::from_le_bytes(b).to_f32())
            .collect(),
        Elements::Bf16 => bytes
            .as_chunks()
            .0
            .iter()
            .map(|&b| bf16::from_le_bytes(b).to_f32())
            .collect(),
        _ => bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
    }
}

fn integers(bytes: &[u8]) -> Vec<i32> {
    bytes.as_chunks().0.iter().map(|&b| i32::from_le_bytes(b)).collect()
}

impl Normed<'_> {
    /// Whether the rows are in memory. Where the kernel that multiplies them norms them, too, it keeps them to itself.
    pub fn is_in_memory(&self) -> bool {
        self.outstanding.is_none()
    }
}

impl GpuOps {
    /// The first rows of a buffer `[rows, width]`, the sum of its terms.
    pub fn read(&self, buffer: &Buffer, rows: usize, width: usize) -> Result<Vec<f32>> {
        if buffer.term == 0 {
            let bytes = self.bytes(buffer.bytes.at(), 4 * rows * width)?;
            return Ok(widen(&bytes, Elements::F32));
        }
        let terms = widen(
            &self.bytes(buffer.bytes.at(), buffer.bytes.bytes())?,
            self.args.numbers.elements,
        );
        let later = match self.args.numbers.elements {
            Elements::F16 => 1.0 / (1 << self.target.family.table().term_shift) as f32,
            _ => 1.0,
        };
        let value = |row: usize, k: usize| {
            let piece = (k % SLAB / 8) ^ (row % 8);
            let at = (k / SLAB * buffer.rows + row) * SLAB + piece * 8 + k % 8;
            terms
                .rchunks_exact(buffer.term)
                .fold(0.0, |rest, term| term[at] + later * rest)
        };
        Ok((0..rows * width).map(|i| value(i / width, i % width)).collect())
    }

    /// The first rows of queries, keys and values before their rotation, unless the product is outstanding.
    pub fn projected(&self, qkv: &Projected<'_>, rows: usize) -> Result<Option<Vec<f32>>> {
        if qkv.outstanding.is_some() {
            return Ok(None);
        }
        let mut values = self.read(qkv.qkv, rows, self.args.config.qkv_dim())?;
        if qkv.paired {
            for head in values.chunks_exact_mut(self.args.config.head_dim) {
                let pairs = head.to_vec();
                let (first, second) = head.split_at_mut(pairs.len() / 2);
                for (i, pair) in pairs.chunks_exact(2).enumerate() {
                    (first[i], second[i]) = (pair[0], pair[1]);
                }
            }
        }
        Ok(Some(values))
    }

    /// Writes the first rows of a float32 buffer.
    pub fn write(&self, buffer: &mut Buffer, values: &[f32]) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        assert!(buffer.term == 0 && bytes.len() <= buffer.bytes.bytes());
        let stream = &self.queue.context.stream;
        // SAFETY: the buffer has room for them, and the stream is waited for.
        unsafe {
            self.queue
                .context
                .driver
                .copy_to_device(buffer.bytes.at(), bytes.as_ptr(), bytes.len(), stream.handle)
        }?;
        stream.synchronize()
    }

    /// Fills a buffer with what is NaN in every format.
    pub fn spoil(&self, buffer: &mut Buffer) -> Result<()> {
        self.fill(&buffer.bytes, 0xff)
    }

    /// Spoils what operations hand to one another outside of buffers: queries, and the router's input.
    pub fn spoil_workspace(&mut self) -> Result<()> {
        self.fill(&self.args.workspace.q, 0xff)?;
        self.fill(&self.args.workspace.t32, 0xff)
    }

    /// Spoils routes, the experts' inputs and outputs among them. Slots and experts become -1.
    pub fn spoil_routes(&self, routes: &mut Routes) -> Result<()> {
        let r = routes;
        for numbers in [&r.experts, &r.slots, &r.offsets, &r.counts] {
            self.fill(numbers, 0xff)?;
        }
        self.fill(&r.shares, 0xff)?;
        self.fill(&r.y, 0xff)?;
        self.fill(&r.gathered.bytes, 0xff)
    }

    /// Fills a whole cache with one byte.
    pub fn fill_kv(&self, kv: &mut KvCache, byte: u8) -> Result<()> {
        // SAFETY: the cache's own bytes, and the stream is waited for.
        unsafe {
            self.queue
                .context
                .driver
                .fill(kv.at(), byte, kv.bytes(), self.queue.context.stream.handle)
        }?;
        self.queue.context.stream.synchronize()
    }

    /// The rotated queries `[rows, q_dim]`, as they are multiplied with keys: in 16 bits they hold a factor of
    /// `log2(e) / sqrt(D)`.
    pub fn queries(&self, rows: usize) -> Result<Vec<f32>> {
        let elements = self.args.numbers.kv;
        let bytes = self.bytes(
            self.args.workspace.q.at(),
            rows * self.args.config.q_dim() * elements.bytes(),
        )?;
        Ok(widen(&bytes, elements))
    }

    /// The router's input `[rows, H]`.
    pub fn router_input(&self, rows: usize) -> Result<Vec<f32>> {
        let bytes = self.bytes(self.args.workspace.t32.at(), 4 * rows * self.args.config.hidden_dim)?;
        Ok(widen(&bytes, Elements::F32))
    }

    /// What became of the rows.
    pub fn sent(&self, routes: &Routes, rows: usize) -> Result<Sent> {
        let (e, picks) = (self.args.config.n_experts, rows * self.args.config.experts_per_token);
        let of = |at: DevicePtr, n: usize| self.bytes(at, 4 * n);
        Ok(Sent {
            experts: integers(&of(routes.experts.at(), picks)?),
            shares: widen(&of(routes.shares.at(), picks)?, Elements::F32),
            slots: integers(&of(routes.slots.at(), picks)?),
            offsets: integers(&of(routes.offsets.at(), e + 1)?),
            counts: integers(&of(routes.counts.at(), e)?),
        })
    }

    /// The experts' inputs by slot `[slots, H]`.
    pub fn gathered(&self, routes: &Routes, slots: usize) -> Result<Vec<f32>> {
        self.read(&routes.gathered, slots, self.args.config.hidden_dim)
    }

    /// The experts' outputs by slot `[slots, H]`.
    pub fn expert_outputs(&self, routes: &Routes, slots: usize) -> Result<Vec<f32>> {
        let elements = y_elements(&self.args.numbers);
        let bytes = self.bytes(routes.y.at(), slots * self.args.config.hidden_dim * elements.bytes())?;
        Ok(widen(&bytes, elements))
    }

    /// A layer's keys and values.
    pub fn pages(&self, kv: &KvCache, layer: usize) -> Result<Pages> {
        Ok(Pages {
            bytes: self.bytes(kv.layer(layer), kv.blocks().count * kv.page_bytes())?,
            page_bytes: kv.page_bytes(),
            head_bytes: kv.head_bytes(),
            head_dim: self.args.config.head_dim,
            elements: self.args.numbers.kv,
        })
    }

    /// Whole rows of logits, of a step that wants them.
    pub fn logits(&self, rows: usize) -> Result<Vec<f32>> {
        let bytes = self.bytes(self.args.logits.rows.raw(), 4 * rows * self.args.config.vocab_size)?;
        Ok(widen(&bytes, Elements::F32))
    }

    fn bytes(&self, at: DevicePtr, n: usize) -> Result<Vec<u8>> {
        // SAFETY: our callers stay within their buffers.
        unsafe { to_host(&self.queue.context.stream, at, n) }
    }

    fn fill<T>(&self, buffer: &DeviceBuffer<T>, byte: u8) -> Result<()> {
        let stream = &self.queue.context.stream;
        // SAFETY: the buffer's own bytes, and the stream is waited for.
        unsafe {
            self.queue
                .context
                .driver
                .fill(buffer.at(), byte, buffer.bytes(), stream.handle)
        }?;
        stream.synchronize()
    }
}
