//! The paged KV cache in device memory; [`super::args`] has the layout of a page.

use super::args::KV_PAGE;
use super::catalogue::Elements;
use super::context::Context;
use super::driver::DevicePtr;
use super::memory::DeviceBuffer;
use super::target::Target;
use crate::config::ModelConfig;
use crate::error::Result;
use crate::kv_blocks::KvBlocks;
use std::ops::Range;

/// See the module.
pub struct KvCache {
    bytes: DeviceBuffer,
    first_layer: usize,
    /// The offset of each layer's first page in bytes.
    layers: Vec<usize>,
    page_bytes: usize,
    head_bytes: usize,
    blocks: KvBlocks,
}

/// Bytes of one KV head's part of a page: keys, values, and what keeps the heads apart.
fn head_bytes(config: &ModelConfig, elements: Elements, target: &Target) -> usize {
    2 * KV_PAGE * config.head_dim * elements.bytes() + target.family.kv_head_padding()
}

/// Bytes of a page, which is a block's part of one layer.
pub fn page_bytes(config: &ModelConfig, elements: Elements, target: &Target) -> usize {
    config.n_kv_heads * head_bytes(config, elements, target)
}

impl KvCache {
    /// Room for so many blocks of these layers.
    pub fn new(
        context: &Context,
        config: &ModelConfig,
        range: Range<usize>,
        elements: Elements,
        blocks: KvBlocks,
    ) -> Result<Self> {
        let page_bytes = page_bytes(config, elements, &context.target);
        let layers = blocks.layers(config, range.clone(), page_bytes)?;
        Ok(Self {
            bytes: DeviceBuffer::zeroed(&context.stream, layers.bytes)?,
            first_layer: range.start,
            layers: layers.offsets,
            page_bytes,
            head_bytes: head_bytes(config, elements, &context.target),
            blocks,
        })
    }

    /// Where a layer's pages begin; it is the layer's index in the model.
    pub fn layer(&self, layer: usize) -> DevicePtr {
        self.at().add(self.layers[layer - self.first_layer])
    }

    /// Bytes of a page of one layer.
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Bytes from one KV head of a page to the next.
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
