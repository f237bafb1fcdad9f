//! `kernels/args.h` in Rust: what host and device agree on. The documentation stands there; both sides assert each size.

use super::driver::DevicePtr;
use bytemuck::{Pod, Zeroable};

/// Positions in a page of the KV cache.
pub const KV_PAGE: usize = 64;
/// Elements along K in a slab of tiled activations and in a k block of packed weights.
pub const SLAB: usize = 64;
/// An expert's rows start at a multiple of this.
pub const GROUP_ALIGN: usize = 8;
/// Rows in a tile of weights as the host sends them.
pub const WIRE_ROWS: usize = 32;

/// Formats of weights, activations and KV.
#[allow(missing_docs)] // their names say it
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Format {
    F16 = 0,
    Bf16 = 1,
    F32 = 2,
    Mxfp4 = 3,
}

impl Format {
    /// Bytes of an element; MXFP4 has no whole ones.
    pub fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::Mxfp4 => unreachable!("MXFP4 elements are parts of blocks"),
        }
    }
}

macro_rules! mirrored {
    ($($(#[$doc:meta])* $name:ident [$size:literal] { $($field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[allow(missing_docs)] // see kernels/args.h
        #[derive(Clone, Copy, Debug, Pod, Zeroable)]
        #[repr(C)]
        pub struct $name { $(pub $field: $type),* }
        const _: () = assert!(size_of::<$name>() == $size);
    )*};
}

mirrored! {
    /// Counts of the step under way.
    StepHeader [48] {
        rows: i32, decode_rows: i32, chunks: i32, logits_rows: i32,
        full_items: i32, window_items: i32, prefill_tiles: i32, turn: i32,
        temperature: f32, topp: f32, least: f32, reserved: i32,
    }
    /// Consecutive rows of one sequence.
    ChunkInfo [32] {
        first_row: i32, rows: i32, first_position: i32, slot: i32,
        full: i32, window: i32, window_pages: i32, reserved: i32,
    }
    /// A row whose logits are wanted.
    LogitsRowInfo [12] { row: i32, slot: i32, coin: f32 }
    /// The step's plan on the device.
    Step [88] {
        header: DevicePtr, tokens: DevicePtr, positions: DevicePtr, row_chunk: DevicePtr, chunks: DevicePtr,
        tables: DevicePtr, logits: DevicePtr, full_items: DevicePtr, window_items: DevicePtr,
        prefill_tiles: DevicePtr, last_tokens: DevicePtr,
    }
    /// One run of bytes of the plan.
    UploadSection [16] { from: u32, to: u32, bytes: u32, reserved: u32 }
    /// What `upload` copies.
    UploadList [208] { sections: u32, reserved: [u32; 3], section: [UploadSection; 12] }
    /// See `upload`.
    UploadArgs [32] { host: DevicePtr, device: DevicePtr, turn: DevicePtr, copies: u32, copy_bytes: u32 }
    /// See `embed`.
    EmbedArgs [112] { step: Step, table: DevicePtr, x: DevicePtr, format: i32, hidden: i32 }
    /// See `norm`.
    NormArgs [184] {
        step: Step, x: DevicePtr, weight: DevicePtr, y: DevicePtr, slots: DevicePtr, shares: DevicePtr,
        t: DevicePtr, t_term: i64, t32: DevicePtr, y_format: i32, k: i32, hidden: i32, t_rows: i32, select: i32,
        terms: i32, format: i32, exact: i32,
    }
    /// See `route`.
    RouteArgs [152] {
        step: Step, t32: DevicePtr, w: DevicePtr, bias: DevicePtr, experts: DevicePtr, shares: DevicePtr,
        format: i32, hidden: i32, n_experts: i32, k: i32, exact: i32, reserved: i32,
    }
    /// See `sort`.
    SortArgs [128] {
        step: Step, experts: DevicePtr, offsets: DevicePtr, counts: DevicePtr, slots: DevicePtr,
        n_experts: i32, k: i32,
    }
    /// See `gather`.
    GatherArgs [152] {
        step: Step, input: DevicePtr, out: DevicePtr, slots: DevicePtr, in_term: i64, out_term: i64,
        k: i32, k_blocks: i32, in_rows: i32, out_rows: i32, terms: i32, reserved: i32,
    }
    /// See `sort_gather`.
    SortGatherArgs [280] { sort: SortArgs, gather: GatherArgs }
    /// See `norm_route`.
    NormRouteArgs [624] {
        norm: NormArgs, route: RouteArgs, sort: SortArgs, gather: GatherArgs, alone: i32, reserved: i32,
    }
    /// See `rope_store`.
    RopeStoreArgs [160] {
        step: Step, qkv: DevicePtr, cos: DevicePtr, sin: DevicePtr, q: DevicePtr, kv: DevicePtr, page_bytes: i64,
        head_bytes: i32, format: i32, head_dim: i32, heads: i32, kv_heads: i32, windowed: i32,
    }
    /// See `attention`.
    AttentionArgs [192] {
        step: Step, q: DevicePtr, kv: DevicePtr, sinks: DevicePtr, out: DevicePtr, partials: DevicePtr,
        arrived: DevicePtr, out_term: i64, page_bytes: i64, head_bytes: i32, kv_format: i32, head_dim: i32,
        heads: i32, kv_heads: i32, windowed: i32, window: i32, out_rows: i32, terms: i32, format: i32,
    }
    /// See the matrix products.
    GemmArgs [144] {
        weights: DevicePtr, bias: DevicePtr, input: DevicePtr, in_term: i64, rows: DevicePtr, offsets: DevicePtr,
        out: DevicePtr, tiled: DevicePtr, tiled_term: i64, y: DevicePtr, best: DevicePtr, best_index: DevicePtr,
        groups: i32, n: i32, k_blocks: i32, row_blocks: i32, in_rows: i32, tiled_rows: i32, best_rows: i32,
        scale: f32, limit: f32, format: i32, cols: i32, weight_format: i16, terms: i16,
    }
    /// A row's largest logit as the device writes it.
    Greedy [8] { token: u32, logit: f32 }
    /// See `argmax`.
    ArgmaxArgs [120] {
        step: Step, best: DevicePtr, best_index: DevicePtr, host: DevicePtr, candidates: i32, best_rows: i32,
    }
    /// See `draw`.
    DrawArgs [136] {
        step: Step, logits: DevicePtr, host: DevicePtr, host_rows: i64, powers: DevicePtr, sums: DevicePtr, vocab: i32,
        reserved: i32,
    }
    /// See `range`.
    RangeArgs [40] {
        wire: DevicePtr, result: DevicePtr, tiles: i64, rows: i32, cols: i32, format: i32, reserved: i32,
    }
    /// See `pack_*`.
    PackArgs [48] {
        wire: DevicePtr, out: DevicePtr, members: i32, rows: i32, cols: i32, row_blocks: i32, k_blocks: i32,
        shift: i32, format: i32, gated: i32,
    }
    /// See `synthesize`.
    SynthesizeArgs [48] {
        wire: DevicePtr, tiles: i64, rows: i32, cols: i32, seed: u32, deviation: f32, mean: f32, exponent: i32,
        format: i32, reserved: i32,
    }
    /// See `matrix_peak`.
    MatrixPeakArgs [16] { out: DevicePtr, iterations: i32, never: i32 }
}

/// Operations of a block of `matrix_peak` in one iteration.
pub const MATRIX_PEAK_FLOPS: usize = 1 << 22;
