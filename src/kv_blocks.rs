//! Blocks of the KV cache: how many fit into memory, how many a sequence needs, and the length of the ring in
//! sliding-window layers.

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use std::ops::Range;

/// Where a cache holds the blocks of each layer.
pub struct KvLayers {
    /// The offset of each layer's first block in bytes.
    pub offsets: Vec<usize>,
    /// The size of the cache in bytes.
    pub bytes: usize,
}

/// Size in bytes of one block of these layers. A block holds its positions either for all full layers or for all
/// sliding-window layers, at different times, and has room for the more numerous. `layer_bytes` is its size in one
/// layer.
pub fn block_bytes(config: &ModelConfig, layers: &Range<usize>, layer_bytes: usize) -> usize {
    let windowed = layers.clone().filter(|&layer| config.is_windowed(layer)).count();
    windowed.max(layers.len() - windowed).saturating_mul(layer_bytes)
}

/// Blocks that hold positions for the layers of a kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    /// For the full layers.
    pub full: usize,
    /// For the sliding-window layers.
    pub window: usize,
}

impl BlockCounts {
    /// The blocks of one sequence of `positions` positions, all of which may be its prompt.
    pub fn of_sequence(config: &ModelConfig, tokens: usize, chunk_tokens: usize, positions: usize) -> Self {
        let has_full_layers = config.windowed_layers() < config.n_layers;
        let window = config.sliding_window;
        Self::of_layers(has_full_layers, window, tokens, chunk_tokens, positions, positions)
    }

    /// The blocks of a sequence with `n_prompt` prompt tokens, at most `chunk_rows` of them in a step, and
    /// `max_positions` positions, where there are full layers or not, and windowed ones if `window` is not 0.
    pub fn of_layers(
        has_full_layers: bool,
        window: usize,
        tokens: usize,
        chunk_rows: usize,
        n_prompt: usize,
        max_positions: usize,
    ) -> Self {
        Self {
            full: match has_full_layers {
                true => blocks_for(tokens, max_positions),
                false => 0,
            },
            window: match window {
                0 => 0,
                window => ring_blocks(tokens, window, chunk_rows, n_prompt, max_positions),
            },
        }
    }

    /// Blocks of both kinds.
    pub fn all(&self) -> usize {
        self.full.saturating_add(self.window)
    }
}

/// Blocks of a KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvBlocks {
    /// Positions in a block.
    pub tokens: usize,
    /// How many there are.
    pub count: usize,
}

impl KvBlocks {
    /// As many blocks as fit into `bytes`: at least those of one sequence of `seq_len` positions, and at most those of
    /// `sequences`, or of one of `longest` positions if these are more. A block has `tokens` positions and
    /// `block_bytes` bytes; a sequence has at most `chunk_tokens` rows in a step.
    pub fn within(
        config: &ModelConfig,
        tokens: usize,
        chunk_tokens: usize,
        block_bytes: usize,
        bytes: usize,
        sequences: usize,
        longest: usize,
    ) -> Self {
        let blocks = |positions| BlockCounts::of_sequence(config, tokens, chunk_tokens, positions).all();
        let one = blocks(config.seq_len);
        let wanted = sequences.saturating_mul(one).max(blocks(longest));
        Self {
            tokens,
            count: (bytes / block_bytes.max(1)).min(wanted).max(one),
        }
    }

    /// The layers of a kind one behind the other, each with all blocks. So the first full layer and the first windowed
    /// one have the same place, and so on: a block is in use for one of both. `layer_bytes` is the size of a block in
    /// one layer.
    pub fn layers(&self, config: &ModelConfig, layers: Range<usize>, layer_bytes: usize) -> Result<KvLayers> {
        let mut offsets = memory::room(layers.len(), Purpose::KvCache)?;
        let overflow = || Error::Overflow("the KV cache");
        let bytes = self.count.checked_mul(layer_bytes).ok_or_else(overflow)?;
        // By kind.
        let mut layers_before = [0_usize; 2];
        for layer in layers {
            let before = &mut layers_before[usize::from(config.is_windowed(layer))];
            offsets.push(before.checked_mul(bytes).ok_or_else(overflow)?);
            *before += 1;
        }
        let most = layers_before[0].max(layers_before[1]);
        Ok(KvLayers {
            offsets,
            bytes: most.checked_mul(bytes).ok_or_else(overflow)?,
        })
    }
}

/// The number of blocks that hold the positions `0..positions`.
pub fn blocks_for(block_tokens: usize, positions: usize) -> usize {
    positions.div_ceil(block_tokens)
}

/// The most blocks over which `positions` consecutive positions (at least one) can spread: the first may be the last
/// position of its block.
fn span_blocks(block_tokens: usize, positions: usize) -> usize {
    (positions - 1).div_ceil(block_tokens) + 1
}

/// The length of a ring in blocks of `block_tokens` positions, for a sequence with `n_prompt` prompt tokens and
/// `max_positions` positions, whose prompt is computed in chunks of at most `chunk_rows`.
///
/// A step writes a chunk's positions `s..s + c` before it attends, and the row at `s` attends to the positions after `s
/// - window`. So the positions `max(0, s + 1 - window)..s + c` must be in the ring at once. They are if they spread
/// over no more blocks than the ring has, since block `b` is entry `b % ring`. The number of positions is
///
/// - while decoding, with `c = 1`: at most `window`, anywhere;
/// - during prefill, with `c <= min(chunk_rows, n_prompt)`: at most `window - 1 + c`, anywhere, but not after the
///   prompt's last block, since `s + c <= n_prompt`;
/// - never more than all positions.
///
/// While decoding, the ring holds at least `block_tokens - 1` positions more than the window. So steps in flight may
/// write that many positions after one that is computed again because its token was wrong.
pub fn ring_blocks(
    block_tokens: usize,
    window: usize,
    chunk_rows: usize,
    n_prompt: usize,
    max_positions: usize,
) -> usize {
    let decoding = span_blocks(block_tokens, window);
    let widest = (window - 1).saturating_add(chunk_rows.min(n_prompt));
    let prefill = span_blocks(block_tokens, widest).min(blocks_for(block_tokens, n_prompt));
    prefill.max(decoding).min(blocks_for(block_tokens, max_positions))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Positions in a block: the backends', and one that is not a power of two.
    const BLOCK_TOKENS: [usize; 3] = [16, 64, 5];

    /// The most blocks needed at once, over all places of a chunk.
    fn worst_touched(
        block_tokens: usize,
        window: usize,
        chunk_rows: usize,
        n_prompt: usize,
        max_positions: usize,
    ) -> usize {
        let touched =
            |s: usize, c: usize| (s + c - 1) / block_tokens - (s + 1).saturating_sub(window) / block_tokens + 1;
        let prefill = (0..n_prompt).map(|s| touched(s, chunk_rows.min(n_prompt - s)));
        let decoding = (n_prompt..max_positions).map(|s| touched(s, 1));
        prefill.chain(decoding).max().unwrap()
    }

    #[test]
    fn ring_holds_what_any_chunk_touches() {
        for block in BLOCK_TOKENS {
            ring_holds_what_any_chunk_of_blocks_touches(block);
        }
    }

    fn ring_holds_what_any_chunk_of_blocks_touches(block: usize) {
        for window in [1, 2, 15, 16, 17, 18, 31, 32, 33, 128] {
            for chunk_rows in [1, 2, 3, 15, 16, 17, 18, 33, 64, 300] {
                for n_prompt in [1, 2, 15, 16, 17, 33, 100, 159, 160, 161] {
                    for outputs in [0, 1, 15, 40] {
                        let max_positions = n_prompt + outputs;
                        let ring = ring_blocks(block, window, chunk_rows, n_prompt, max_positions);
                        let worst = worst_touched(block, window, chunk_rows, n_prompt, max_positions);
                        assert!(
                            ring >= worst,
                            "blocks of {block}, window {window}, chunk {chunk_rows}, prompt {n_prompt}, positions \
                             {max_positions}: {worst} blocks touched, ring of {ring}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn ring_of_a_long_sequence_is_no_longer_than_needed() {
        for window in [1, 2, 15, 16, 17, 18, 31, 128] {
            for chunk_rows in [1, 2, 15, 16, 17, 18, 64, 300] {
                for block in BLOCK_TOKENS {
                    let n_prompt = window + chunk_rows + 3 * block;
                    assert_eq!(
                        ring_blocks(block, window, chunk_rows, n_prompt, n_prompt + 100),
                        worst_touched(block, window, chunk_rows, n_prompt, n_prompt + 100),
                        "blocks of {block}, window {window}, chunk {chunk_rows}"
                    );
                }
            }
        }
    }

    #[test]
    fn ring_of_the_released_models() {
        assert_eq!(ring_blocks(16, 128, 1, 1, 2048), 9);
        assert_eq!(ring_blocks(16, 128, 512, 1500, 2048), 41);
        assert_eq!(ring_blocks(16, 128, 512, 100, 2048), 9);
        assert_eq!(ring_blocks(16, 128, 512, 20, 64), 4);
        assert_eq!(ring_blocks(16, usize::MAX / 2, usize::MAX, 20, 64), 4);
        assert_eq!(ring_blocks(64, 128, 1, 1, 2048), 3);
        assert_eq!(ring_blocks(64, 128, 512, 1500, 2048), 11);
    }

    /// Blocks have 16 positions and 10 bytes. With a window of 128 and chunks of 32 rows a ring has 11.
    fn within(seq_len: usize, bytes: usize, sequences: usize, longest: usize) -> usize {
        let config = ModelConfig {
            seq_len,
            ..ModelConfig::preset_7m()
        };
        KvBlocks::within(&config, 16, 32, 10, bytes, sequences, longest).count
    }

    #[test]
    fn the_cache_holds_a_batch_and_one_long_sequence() {
        let one = 256 + 11;
        // As many sequences as fit into memory, but at least one, and no more than may run at once.
        assert_eq!(within(4096, 0, 8, 131_072), one);
        assert_eq!(within(4096, 10 * 3 * one, 8, 4096), 3 * one);
        assert_eq!(within(4096, usize::MAX / 2, 8, 4096), 8 * one);
        // With a batch of one there are blocks for a long sequence, as far as memory allows.
        assert_eq!(within(4096, usize::MAX / 2, 1, 131_072), 8192 + 11);
        assert_eq!(within(4096, 10 * (one + 1000), 1, 131_072), one + 1000);
        // The blocks of a large batch suffice for it.
        assert_eq!(within(4096, usize::MAX / 2, 128, 131_072), 128 * one);
        // A long sequence needs a longer ring than one shorter than the window.
        assert_eq!(within(16, usize::MAX / 2, 1, 131_072), 8192 + 11);
    }

    /// Layers of one kind have places of their own, and those of the other kind have the same.
    #[test]
    fn a_block_is_of_one_kind_at_a_time() {
        let config = ModelConfig {
            n_layers: 7,
            ..ModelConfig::preset_7m()
        };
        let kinds: Vec<_> = (1..6).map(|layer| config.is_windowed(layer)).collect();
        let blocks = KvBlocks { tokens: 16, count: 5 };
        let layers = blocks.layers(&config, 1..6, 10).unwrap();
        let of_kind = |windowed| (0..5_usize).filter(|&i| kinds[i] == windowed).collect::<Vec<_>>();
        let [full, windowed] = [false, true].map(of_kind);
        assert_eq!(full.len().abs_diff(windowed.len()), 1);
        for kind in [&full, &windowed] {
            let offsets: Vec<_> = kind.iter().map(|&i| layers.offsets[i]).collect();
            assert_eq!(offsets, (0..kind.len()).map(|i| 50 * i).collect::<Vec<_>>());
        }
        assert_eq!(layers.bytes, 3 * 50);
        assert_eq!(block_bytes(&config, &(1..6), 10), 3 * 10);
    }
}
