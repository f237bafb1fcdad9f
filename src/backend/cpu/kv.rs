//! The paged KV cache on the CPU.
//!
//! A block holds sixteen positions of one layer. Keys are stored column by column: a vector holds a column of sixteen
//! positions, and the sum of a score over the columns stays in the position's lane. Values are stored position by
//! position: a vector holds sixteen columns, and the weighted sum over positions stays in the column's lane.
//!
//! ```text
//! [layer][block][kv head] { keys [D][16], values [16][D rounded up to 16] }
//! ```
//!
//! Elements are float32 in `exact` and float16 in `fast`.

use crate::batch::{Chunk, StepPlan};
use crate::config::ModelConfig;
use crate::error::Result;
use crate::kv_blocks::KvBlocks;
use crate::memory::{self, Purpose};
use crate::simd::{LANES, Simd};
use crate::weights::Bytes;
use half::f16;

/// Positions in a block: as many as a vector has lanes.
pub const BLOCK_TOKENS: usize = LANES;

/// An element of the cache.
pub trait Element: Copy + Send + Sync + 'static {
    /// Size in bytes.
    const BYTES: usize = size_of::<Self>();
    /// Loads sixteen elements, widened to float32.
    ///
    /// # Safety
    /// Same requirements as [`Simd::load`].
    unsafe fn load<S: Simd>(p: *const Self) -> S::F;
    /// Stores sixteen elements, rounded from float32.
    ///
    /// # Safety
    /// Same requirements as [`Simd::store`].
    unsafe fn store<S: Simd>(p: *mut Self, values: &[f32; LANES]);
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f32) -> S::F {
        // SAFETY: guaranteed by our caller.
        unsafe { S::load(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut f32, values: &[f32; LANES]) {
        // SAFETY: guaranteed by our caller.
        unsafe { S::store(p, S::load(values.as_ptr())) }
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f16) -> S::F {
        // SAFETY: guaranteed by our caller.
        unsafe { S::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut f16, values: &[f32; LANES]) {
        // Clamped to the largest float16: a finite key or value must not become infinite.
        let fit = values.map(|v| if v.is_finite() { v.clamp(-65504.0, 65504.0) } else { v });
        // SAFETY: guaranteed by our caller.
        unsafe { S::store_f16(p, S::load(fit.as_ptr())) }
    }
}

/// The cache of all layers, in the layout above.
pub struct KvCache {
    bytes: Bytes,
    /// Offset of each layer's blocks in bytes.
    layers: Vec<usize>,
    /// Whether each layer attends to a sliding window.
    windowed: Vec<bool>,
    /// D.
    head_dim: usize,
    /// D rounded up to 16.
    padded_dim: usize,
    kv_heads: usize,
    blocks: KvBlocks,
}

/// Size in bytes of a block in one layer.
pub fn layer_bytes(config: &ModelConfig, element_bytes: usize) -> usize {
    config.n_kv_heads * head_elements(config.head_dim) * element_bytes
}

/// Number of elements of one KV head in a block.
fn head_elements(head_dim: usize) -> usize {
    BLOCK_TOKENS * (head_dim + head_dim.next_multiple_of(LANES))
}

impl KvCache {
    /// Allocates a cache. The system provides its pages only when positions are written.
    pub fn new(config: &ModelConfig, blocks: KvBlocks, element_bytes: usize) -> Result<Self> {
        let layers = blocks.layers(config, 0..config.n_layers, layer_bytes(config, element_bytes))?;
        let windowed = (0..config.n_layers).map(|layer| config.is_windowed(layer));
        Ok(Self {
            bytes: Bytes::zeroed(layers.bytes, Purpose::KvCache)?,
            layers: layers.offsets,
            windowed: memory::collect(windowed, Purpose::KvCache)?,
            head_dim: config.head_dim,
            padded_dim: config.head_dim.next_multiple_of(LANES),
            kv_heads: config.n_kv_heads,
            blocks,
        })
    }

    /// Size in bytes.
    pub fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Number of blocks.
    pub fn blocks(&self) -> KvBlocks {
        self.blocks
    }

    /// The cache's address, for the program's struct.
    pub fn address(&self) -> *mut std::ffi::c_void {
        self.bytes.as_ptr().cast_mut().cast()
    }

    /// The block of a chunk's sequence that holds `position` in `layer`.
    #[inline(always)]
    pub fn block(&self, plan: &StepPlan, chunk: &Chunk, layer: usize, position: usize) -> usize {
        let index = position / BLOCK_TOKENS;
        let at = if self.windowed[layer] {
            chunk.window.start + index % chunk.window.len()
        } else {
            chunk.full.start + index
        };
        plan.tables[at] as usize
    }

    /// Keys `[D][16]` of a KV head in a block of a layer; the values `[16][padded D]` follow.
    #[inline(always)]
    pub fn head<E: Element>(&self, layer: usize, block: usize, head: usize) -> (&[E], &[E]) {
        let elements = head_elements(self.head_dim);
        let start = self.layers[layer] + (block * self.kv_heads + head) * elements * E::BYTES;
        let bytes = &self.bytes[start..start + elements * E::BYTES];
        // SAFETY: in bounds by the slice above, aligned because every size is a multiple of 16 elements, and both
        // element types are plain bits.
        let all = unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<E>(), elements) };
        all.split_at(BLOCK_TOKENS * self.head_dim)
    }

    /// Writes a head's key and value of the position at `offset` in a block.
    ///
    /// # Safety
    /// Same requirements as the methods of [`Simd`].
    #[inline(always)]
    pub unsafe fn store<S: Simd, E: Element>(
        &mut self,
        layer: usize,
        block: usize,
        head: usize,
        offset: usize,
        key: &[f32],
        value: &[f32],
    ) {
        let elements = head_elements(self.head_dim);
        let start = self.layers[layer] + (block * self.kv_heads + head) * elements * E::BYTES;
        let bytes = &mut self.bytes[start..start + elements * E::BYTES];
        // SAFETY: as in `head`, and borrowed mutably.
        let all = unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast::<E>(), elements) };
        let (keys, values) = all.split_at_mut(BLOCK_TOKENS * self.head_dim);
        let values = &mut values[offset * self.padded_dim..][..self.padded_dim];
        for (c, out) in values.chunks_exact_mut(LANES).enumerate() {
            let from = c * LANES;
            let n = LANES.min(self.head_dim - from);
            let (mut k, mut v) = ([0.0; LANES], [0.0; LANES]);
            k[..n].copy_from_slice(&key[from..from + n]);
            v[..n].copy_from_slice(&value[from..from + n]);
            // Keys have no padding columns, so sixteen of them are rounded into a temporary, and the first `n` stored.
            let mut rounded = std::mem::MaybeUninit::<[E; LANES]>::uninit();
            // SAFETY: both have sixteen elements; `E::store` initializes all of `rounded`.
            let rounded = unsafe {
                E::store::<S>(rounded.as_mut_ptr().cast(), &k);
                E::store::<S>(out.as_mut_ptr(), &v);
                rounded.assume_init()
            };
            let columns = keys[from * BLOCK_TOKENS + offset..].iter_mut().step_by(BLOCK_TOKENS);
            columns.zip(&rounded[..n]).for_each(|(column, k)| *column = *k);
        }
    }
}
