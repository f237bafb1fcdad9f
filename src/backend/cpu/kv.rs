//! The paged KV cache on the CPU.
//!
//! A block holds sixteen positions of one layer. Keys lie column by column, so that sixteen positions fill a vector
//! and a score's sum over the columns stays in its lane; values lie position by position, so that the weighted sum
//! over positions stays in the column's lane:
//!
//! ```text
//! [layer][block][kv head] { keys [D][16], values [16][D rounded up to 16] }
//! ```
//!
//! `exact` holds float32, `fast` float16.

use crate::batch::{Chunk, StepPlan};
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::model::ModelConfig;
use crate::replica::KvBlocks;
use crate::simd::{LANES, Simd};
use crate::weights::Bytes;
use half::f16;

/// Positions in a block: they fill one vector register of keys.
pub const BLOCK_TOKENS: usize = LANES;

/// An element of the cache.
pub trait Element: Copy + Send + Sync + 'static {
    /// Bytes.
    const BYTES: usize = size_of::<Self>();
    /// Sixteen of them as float32.
    ///
    /// # Safety
    /// As for [`Simd::load`].
    unsafe fn load<S: Simd>(p: *const Self) -> S::F;
    /// Sixteen of them, rounded from float32.
    ///
    /// # Safety
    /// As for [`Simd::store`].
    unsafe fn store<S: Simd>(p: *mut Self, values: &[f32; LANES]);
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f32) -> S::F {
        // SAFETY: handed on.
        unsafe { S::load(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut f32, values: &[f32; LANES]) {
        // SAFETY: handed on.
        unsafe { S::store(p, S::load(values.as_ptr())) }
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f16) -> S::F {
        // SAFETY: handed on.
        unsafe { S::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut f16, values: &[f32; LANES]) {
        // Saturated: a finite key or value must not become infinite.
        let fit = values.map(|v| if v.is_finite() { v.clamp(-65504.0, 65504.0) } else { v });
        // SAFETY: handed on.
        unsafe { S::store_f16(p, S::load(fit.as_ptr())) }
    }
}

/// See the module.
pub struct KvCache {
    bytes: Bytes,
    /// Where each layer's blocks begin, in bytes.
    layers: Vec<usize>,
    windowed: Vec<bool>,
    /// Sizes in elements.
    head_dim: usize,
    padded_dim: usize,
    kv_heads: usize,
    blocks: KvBlocks,
}

/// Bytes of one block of each kind, over all layers of the kind.
pub fn block_bytes(config: &ModelConfig, element_bytes: usize) -> (usize, usize) {
    let per_layer = config.n_kv_heads * head_elements(config.head_dim) * element_bytes;
    let windowed = config.windowed_layers();
    ((config.n_layers - windowed) * per_layer, windowed * per_layer)
}

/// Elements of one KV head in a block.
fn head_elements(head_dim: usize) -> usize {
    BLOCK_TOKENS * (head_dim + head_dim.next_multiple_of(LANES))
}

impl KvCache {
    /// A cache of so many blocks. Its memory is touched only as positions are written.
    pub fn new(config: &ModelConfig, blocks: KvBlocks, element_bytes: usize) -> Result<Self> {
        let block = config.n_kv_heads * head_elements(config.head_dim) * element_bytes;
        let mut layers = memory::room(config.n_layers, Purpose::KvCache)?;
        let mut windowed = memory::room(config.n_layers, Purpose::KvCache)?;
        let mut len = 0_usize;
        for layer in 0..config.n_layers {
            layers.push(len);
            windowed.push(config.window(layer).is_some());
            let count = if windowed[layer] { blocks.window } else { blocks.full };
            len = count
                .checked_mul(block)
                .and_then(|b| b.checked_add(len))
                .ok_or(Error::Overflow("the KV cache"))?;
        }
        Ok(Self {
            bytes: Bytes::zeroed(len, Purpose::KvCache)?,
            layers,
            windowed,
            head_dim: config.head_dim,
            padded_dim: config.head_dim.next_multiple_of(LANES),
            kv_heads: config.n_kv_heads,
            blocks,
        })
    }

    /// Bytes of all blocks.
    pub fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// How many blocks there are.
    pub fn blocks(&self) -> KvBlocks {
        self.blocks
    }

    /// Where the cache lies, for the program's struct.
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

    /// Writes one position's key and value of a head.
    ///
    /// # Safety
    /// As for [`Simd`].
    #[inline(always)]
    pub unsafe fn store<S: Simd, E: Element>(
        &mut self,
        layer: usize,
        block: usize,
        head: usize,
        slot: usize,
        key: &[f32],
        value: &[f32],
    ) {
        let elements = head_elements(self.head_dim);
        let start = self.layers[layer] + (block * self.kv_heads + head) * elements * E::BYTES;
        let bytes = &mut self.bytes[start..start + elements * E::BYTES];
        // SAFETY: as in `head`, and borrowed mutably.
        let all = unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast::<E>(), elements) };
        let (keys, values) = all.split_at_mut(BLOCK_TOKENS * self.head_dim);
        let values = &mut values[slot * self.padded_dim..][..self.padded_dim];
        for (c, out) in values.chunks_exact_mut(LANES).enumerate() {
            let from = c * LANES;
            let n = LANES.min(self.head_dim - from);
            let (mut k, mut v) = ([0.0; LANES], [0.0; LANES]);
            k[..n].copy_from_slice(&key[from..from + n]);
            v[..n].copy_from_slice(&value[from..from + n]);
            // A padded key's columns are not stored, so the row of rounded ones needs no place in the cache.
            let mut rounded = std::mem::MaybeUninit::<[E; LANES]>::uninit();
            // SAFETY: both have room for sixteen elements; the first is initialized by it.
            let rounded = unsafe {
                E::store::<S>(rounded.as_mut_ptr().cast(), &k);
                E::store::<S>(out.as_mut_ptr(), &v);
                rounded.assume_init()
            };
            let columns = keys[from * BLOCK_TOKENS + slot..].iter_mut().step_by(BLOCK_TOKENS);
            columns.zip(&rounded[..n]).for_each(|(column, k)| *column = *k);
        }
    }
}
