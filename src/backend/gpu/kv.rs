//! The paged KV cache in device memory; [`super::args`] has the layout of a page.

use super::args::{Format, KV_PAGE};
use super::context::Context;
use super::driver::DevicePtr;
use super::memory::DeviceBuffer;
use super::target::Target;
use crate::config::ModelConfig;
use crate::error::Result;
use crate::kv_blocks::KvBlocks;
use crate::memory::{self, Purpose};

/// See the module.
pub struct KvCache {
    bytes: DeviceBuffer,
    /// Where each layer's pages begin.
    layers: Vec<DevicePtr>,
    page_bytes: usize,
    head_bytes: usize,
    blocks: KvBlocks,
}

/// Bytes of one key head's part of a page: keys, values, and what keeps the heads apart.
fn head_bytes(config: &ModelConfig, format: Format, target: &Target) -> usize {
    2 * KV_PAGE * config.head_dim * format.bytes() + target.family.kv_head_padding()
}

/// Bytes of one block of each kind over all layers of the kind.
pub fn block_bytes(config: &ModelConfig, format: Format, target: &Target) -> (usize, usize) {
    let page = config.n_kv_heads * head_bytes(config, format, target);
    let windowed = config.windowed_layers();
    ((config.n_layers - windowed) * page, windowed * page)
}

impl KvCache {
    /// Room for so many blocks.
    pub fn new(context: &Context, config: &ModelConfig, format: Format, blocks: KvBlocks) -> Result<Self> {
        let head_bytes = head_bytes(config, format, &context.target);
        let page_bytes = config.n_kv_heads * head_bytes;
        let (full, window) = block_bytes(config, format, &context.target);
        let bytes = DeviceBuffer::zeroed(&context.stream, blocks.full * full + blocks.window * window)?;
        let mut at = bytes.at();
        let layers = (0..config.n_layers).map(|layer| {
            let windowed = config.is_windowed(layer);
            let pages = if windowed { blocks.window } else { blocks.full };
            let begin = at;
            at = begin.add(pages * page_bytes);
            begin
        });
        let layers = memory::collect(layers, Purpose::KvCache)?;
        Ok(Self {
            layers,
            bytes,
            page_bytes,
            head_bytes,
            blocks,
        })
    }

    /// Where a layer's pages begin.
    pub fn layer(&self, layer: usize) -> DevicePtr {
        self.layers[layer]
    }

    /// Bytes of a page of one layer.
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Bytes from one key head of a page to the next.
    pub fn head_bytes(&self) -> usize {
        self.head_bytes
    }

    /// Blocks.
    pub fn blocks(&self) -> KvBlocks {
        self.blocks
    }

    /// Bytes in all.
    pub fn bytes(&self) -> usize {
        self.bytes.bytes()
    }

    /// Where it begins.
    pub fn at(&self) -> DevicePtr {
        self.bytes.at()
    }
}
