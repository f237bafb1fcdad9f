//! What host and device agree on: one argument struct a kernel, and the layout of everything in device memory.
//!
//! Every kernel takes one struct by value.
//!
//! ```text
//! Activations  [terms][K / 64][rows][64] of 16 bits ("tiled"): K in slabs of 64, a row's 128 bytes of a slab in
//!              eight pieces of 16 bytes, piece p at place p ^ (row % 8). A run of rows of one slab is contiguous and,
//!              where it starts at a multiple of 8, lies as a matrix unit's shared memory wants it. K is filled up
//!              with zeros.
//! Terms        `fast` has one. `exact` has x = hi + lo (FP16) or hi + mid + lo (BF16), each term `in_term` elements
//!              behind the last; see store_terms in gpu/gpu.h for the scale of the later ones.
//! KV cache     a page holds KV_PAGE positions of one layer: [kv head][K: KV_PAGE rows | V: KV_PAGE rows], a row being
//!              head_dim elements in pieces of 8, piece p at place p ^ (position % the largest power of two that
//!              divides head_dim / 8).
//! Weights      as the pack_* kernels of a family write them; on the host and on the wire row-major in tiles of
//!              WIRE_ROWS rows: BF16 and F32 row-major; MXFP4 codes (two a byte, low nibble first) of all rows, then
//!              E8M0 scales of all rows, one for each MXFP4_BLOCK values.
//! ```

use super::catalogue;
use super::layout::{CType, Field, Number, Shared, Struct, shared};
use crate::{dtype, sampler};
use bytemuck::{NoUninit, Pod, Zeroable};
use std::ffi::c_void;
use std::mem::offset_of;

shared! {
    constants {
        /// positions in a page of the KV cache
        KV_PAGE: usize = 64;
        /// K elements in a slab of tiled activations and in a k block of packed weights
        SLAB: usize = 64;
        /// an expert's rows start at a multiple of this
        GROUP_ALIGN: usize = 8;
        /// TERM_SHIFT of `gpu/gpu.h` where the matrix cores flush subnormals: on AMD, and on the CPU that plays it
        FLUSHING_TERM_SHIFT: usize = catalogue::cdna::FAMILY.term_shift;

        /// rows in a tile of weights as the host sends them
        WIRE_ROWS: usize = 32;
        /// MXFP4 values that share a scale
        MXFP4_BLOCK: usize = dtype::MXFP4_BLOCK;
        /// bytes of a packed row's slab in MXFP4: codes, two a byte, and a byte for each scale
        MXFP4_SLAB_BYTES: usize = SLAB / 2 + SLAB / MXFP4_BLOCK;
        /// the same in 16 bits a value
        DENSE_SLAB_BYTES: usize = 2 * SLAB;

        /// keys in a unit of decode attention
        ATTENTION_UNIT: usize = 128;
        /// units in a group
        ATTENTION_GROUP: usize = 4;
        /// the most pages that the keys of an AttentionItem lie in
        ITEM_PAGES: usize = 32;
        /// floats of a partial sum of decode attention: for each of 8 query heads 64 values, a maximum and a sum
        PARTIAL_FLOATS: usize = 8 * (64 + 2);

        /// the plan is copied in pieces of so many bytes, and its sections start at multiples of them
        UPLOAD_PIECE: usize = 16;
        /// the most sections of a plan
        UPLOAD_SECTIONS: usize = 12;
        /// the most tokens of a nucleus that a kernel draws from
        DRAW_TOKENS: usize = 2048;
        /// powers of two, evenly spaced from 1 to 2, that exponentials start from
        POWERS: usize = sampler::EXPONENTIAL_POWERS;
        /// see MatrixPeakArgs
        MATRIX_PEAK_FLOPS: usize = 1 << 22;
    }

    /// Formats of weights, activations and KV.
    formats {
        F16 = 0,
        Bf16 = 1,
        F32 = 2,
        Mxfp4 = 3,
    }

    structs {
        /// Counts of the step under way; the first thing uploaded.
        #[derive(Pod, Zeroable, PartialEq)]
        StepHeader {
            /// rows in the step; those that decode (chunks of one row) come first
            rows: i32,
            /// chunks of one row
            decode_rows: i32,
            chunks: i32,
            /// rows whose logits are wanted
            logits_rows: i32,
            /// attention work of the rows that decode, full layers
            full_items: i32,
            /// the same, windowed layers
            window_items: i32,
            /// attention work of the chunks of several rows
            prefill_tiles: i32,
            /// which of the host's buffers this step answers into
            turn: i32,
            /// that rows are drawn at
            temperature: f32,
            /// the mass of the nucleus; 0: all tokens
            topp: f32,
            /// a token of less probability is no part of a nucleus, or there may be more than DRAW_TOKENS of them
            least: f32,
            reserved: i32,
        }

        /// Consecutive rows of one sequence; chunks are in order of their rows. Position p lies in the page
        /// `tables[full + p / KV_PAGE]` of the full layers and `tables[window + p / KV_PAGE % window_pages]` of the
        /// windowed ones.
        #[derive(Pod, Zeroable)]
        ChunkInfo {
            first_row: i32,
            rows: i32,
            first_position: i32,
            /// the sequence's, where its last token is kept
            slot: i32,
            full: i32,
            window: i32,
            window_pages: i32,
            reserved: i32,
        }

        /// A row whose logits are wanted.
        #[derive(Pod, Zeroable)]
        LogitsRowInfo {
            row: i32,
            /// -1: its token is not kept
            slot: i32,
            /// what a token is drawn by
            coin: f32,
        }

        /// Part of one decoding row's attention: `tokens` visible keys, the first of them in unit `first_unit`. Unit u
        /// is the keys ATTENTION_UNIT * u and on, by absolute position; ATTENTION_GROUP * g and on are the units of
        /// group g. One of `parts` parts; where these are several, each is (at most) the `run` units from a multiple of
        /// `run` on (1, 4 or 16) and leaves partial sums: of its unit if `run` is 1, else of each of its groups. The
        /// row's first unit's (group's) is slot `partial` of the workspace, the next one's slot `partial` + 1. An
        /// item's keys are in at most ITEM_PAGES pages.
        #[derive(Pod, Zeroable, Default, PartialEq, Eq)]
        AttentionItem {
            row: i32,
            first_unit: i32,
            tokens: i32,
            parts: i32,
            partial: i32,
            run: i32,
            reserved: [i32; 2],
        }

        /// Query rows of one chunk that one block takes: `rows` rows from the chunk's row `first` on.
        #[derive(Pod, Zeroable, Default, PartialEq, Eq)]
        PrefillTile {
            chunk: i32,
            first: i32,
            rows: i32,
            reserved: i32,
        }

        /// The step's plan on the device, at addresses that never change.
        #[derive(Pod, Zeroable)]
        Step {
            header: *const StepHeader,
            /// `[rows]`; -1 - slot: the token sampled last in that slot
            tokens: *const i32,
            /// `[rows]`
            positions: *const i32,
            /// `[rows]`
            row_chunk: *const i32,
            chunks: *const ChunkInfo,
            /// page numbers
            tables: *const i32,
            /// `[logits_rows]`
            logits: *const LogitsRowInfo,
            full_items: *const AttentionItem,
            window_items: *const AttentionItem,
            prefill_tiles: *const PrefillTile,
            /// `[slots]`: the token sampled last
            last_tokens: *mut i32,
        }

        /// A run of bytes of the plan: where it is in the copy, and where it belongs on the device. Multiples of
        /// UPLOAD_PIECE.
        #[derive(Pod, Zeroable, Default)]
        UploadSection {
            from: u32,
            to: u32,
            bytes: u32,
            reserved: u32,
        }

        /// What each of the host's copies of a plan starts with.
        #[derive(Pod, Zeroable, Default)]
        UploadList {
            sections: u32,
            reserved: [u32; 3],
            section: [UploadSection; UPLOAD_SECTIONS],
        }

        /// upload: brings the plan from pinned host memory, where there are `copies` of it, used in turn by themselves.
        /// Each starts with an UploadList.
        #[derive(Pod, Zeroable)]
        UploadArgs {
            /// `[copies][copy_bytes]`
            host: *const u8,
            device: *mut u8,
            /// two numbers, zeros at first: the copy to read, blocks of this step that are done
            turn: *mut u32,
            copies: u32,
            copy_bytes: u32,
        }

        /// embed: `x[rows][hidden]` (float32) = the table's rows named by the tokens.
        #[derive(NoUninit)]
        EmbedArgs {
            step: Step,
            /// `[vocab][hidden]`, BF16 or F32
            table: *const c_void,
            x: *mut f32,
            format: Format,
            hidden: i32,
        }

        /// rmsnorm and settle: adds what the experts gave (if asked), norms, writes the next product's input. settle only
        /// adds, and needs neither weight nor t.
        #[derive(NoUninit)]
        NormArgs {
            step: Step,
            /// `[rows][hidden]`, updated if y is not NULL and `select` is 0
            x: *mut f32,
            /// `[hidden]`
            weight: *const f32,
            /// `[slots of routed rows][hidden]`, F16 or F32 (`y_format`); NULL: nothing to add
            y: *const c_void,
            /// `[rows][k]`: where in y a row's experts are, in order of the expert's index
            slots: *const i32,
            /// `[rows][k]`
            shares: *const f32,
            /// tiled
            t: *mut u16,
            /// elements from one term to the next
            t_term: i64,
            /// `[rows][hidden]` float32 for the router; NULL: not wanted
            t32: *mut f32,
            y_format: Format,
            k: i32,
            hidden: i32,
            /// rows of the tiled buffer
            t_rows: i32,
            /// 1: row i is row `step.logits[i].row`, there are `header->logits_rows` of them
            select: i32,
            terms: i32,
            /// of t: FORMAT_F16 or FORMAT_BF16
            format: Format,
            /// 1: sums in float64, to the letter of the float32 baseline
            exact: i32,
        }

        /// route: the k largest of t32 w^T + bias (ties: lower index), softmax over them; written in order of the
        /// expert's index.
        #[derive(NoUninit)]
        RouteArgs {
            step: Step,
            /// `[rows][hidden]`
            t32: *const f32,
            /// `[experts][hidden]`, BF16 or F32
            w: *const c_void,
            /// `[experts]`
            bias: *const f32,
            /// `[rows][k]`
            experts: *mut i32,
            /// `[rows][k]`
            shares: *mut f32,
            format: Format,
            hidden: i32,
            n_experts: i32,
            k: i32,
            exact: i32,
            reserved: i32,
        }

        /// sort: gives each (row, expert) pair a slot; an expert's slots are consecutive, in order of rows, and start
        /// at a multiple of GROUP_ALIGN.
        #[derive(Pod, Zeroable)]
        SortArgs {
            step: Step,
            /// `[rows][k]`
            experts: *const i32,
            /// `[n_experts + 1]`: first slot of each expert, the end last
            offsets: *mut i32,
            /// `[n_experts]`
            counts: *mut i32,
            /// `[rows][k]`
            slots: *mut i32,
            n_experts: i32,
            k: i32,
        }

        /// gather: copies tiled rows to their slots.
        #[derive(Pod, Zeroable)]
        GatherArgs {
            step: Step,
            /// tiled `[terms][k_blocks][in_rows][64]`
            input: *const u16,
            /// tiled `[terms][k_blocks][out_rows][64]`
            out: *mut u16,
            /// `[rows][k]`
            slots: *const i32,
            in_term: i64,
            out_term: i64,
            k: i32,
            k_blocks: i32,
            in_rows: i32,
            out_rows: i32,
            terms: i32,
            reserved: i32,
        }

        /// sort_gather: both at once, for few rows.
        #[derive(Pod, Zeroable)]
        SortGatherArgs {
            sort: SortArgs,
            /// whose slots are not read
            gather: GatherArgs,
        }

        /// norm_route: rmsnorm (of rows, not of those selected) and route at once, for few rows; sort and gather, too,
        /// where the bucket is of one row.
        #[derive(NoUninit)]
        NormRouteArgs {
            /// whose t32 is not written
            norm: NormArgs,
            /// whose t32 is not read
            route: RouteArgs,
            sort: SortArgs,
            gather: GatherArgs,
            /// 1: sort and gather
            alone: i32,
            reserved: i32,
        }

        /// rope_store: rotates queries and keys, writes q and the KV cache. Row p of cos and sin is position p.
        #[derive(NoUninit)]
        RopeStoreArgs {
            step: Step,
            /// `[rows][head_dim * (heads + 2 kv_heads)]`
            qkv: *const f32,
            /// `[positions][head_dim / 2]`
            cos: *const f32,
            sin: *const f32,
            /// `[rows][heads][head_dim]`; F16/BF16 times log2(e) / sqrt(head_dim), F32 as it is
            q: *mut c_void,
            /// this layer's pages
            kv: *mut u8,
            page_bytes: i64,
            /// from one kv head's K to the next head's K
            head_bytes: i32,
            /// of q and the cache: F16, BF16 or F32
            format: Format,
            head_dim: i32,
            heads: i32,
            kv_heads: i32,
            windowed: i32,
        }

        /// attention (decode, prefill and plain): tiled output `[terms][heads * head_dim / 64][out_rows][64]`, in
        /// `format` F16 or BF16 (of the output; the cache's own format is kv_format).
        #[derive(NoUninit)]
        AttentionArgs {
            step: Step,
            q: *const c_void,
            kv: *const u8,
            /// `[heads]`
            sinks: *const f32,
            out: *mut u16,
            /// workspace of attention_decode: `[slots][kv_heads][PARTIAL_FLOATS]`
            partials: *mut f32,
            /// `[rows][kv_heads]` zeros, left as zeros
            arrived: *mut i32,
            out_term: i64,
            page_bytes: i64,
            head_bytes: i32,
            kv_format: Format,
            head_dim: i32,
            heads: i32,
            kv_heads: i32,
            windowed: i32,
            /// keys a row of a windowed layer sees, its own among them
            window: i32,
            out_rows: i32,
            terms: i32,
            format: Format,
        }

        /// The matrix products. Weights are `[groups]` matrices of n rows and k_blocks * 64 columns, packed by the
        /// family's pack kernels; row_blocks is the number of the family's row blocks. Group g has `rows[g]` input rows
        /// from `offsets[g]` on; dense products have one group, offsets NULL, and rows points to their count. What an
        /// epilogue does not use is NULL or 0.
        #[derive(NoUninit)]
        GemmArgs {
            weights: *const u8,
            /// `[groups][n]`
            bias: *const f32,
            /// tiled `[terms][k_blocks][in_rows][64]`
            input: *const u16,
            in_term: i64,
            rows: *const i32,
            offsets: *const i32,
            /// qkv: `[rows][n]` written; attn_out: x `[rows][n]` added to; logits: `[rows][n]` written
            out: *mut f32,
            /// mlp1: gated unit, tiled `[terms][n / 2 / 64 rounded up][tiled_rows][64]`
            tiled: *mut u16,
            tiled_term: i64,
            /// mlp2: `[slots][n]`, F16 (fast) or F32 (exact)
            y: *mut c_void,
            /// greedy: `[row blocks of the launch's tiles][best_rows]` largest logit ...
            best: *mut f32,
            /// ... and its lowest index
            best_index: *mut i32,
            groups: i32,
            n: i32,
            k_blocks: i32,
            row_blocks: i32,
            in_rows: i32,
            tiled_rows: i32,
            best_rows: i32,
            /// a power of two taken out of the weights: products are multiplied by it
            scale: f32,
            /// of the gated unit
            limit: f32,
            /// of `tiled` and of the input: F16 or BF16
            format: Format,
            /// plain_* only, whose weights are wire tiles: elements of a row,
            cols: i32,
            /// BF16 or F32,
            weight_format: i16,
            /// and the terms of `input` and `tiled`; y is F16 with one, F32 with more
            terms: i16,
        }

        /// A row's largest logit as the device writes it.
        #[derive(Pod, Zeroable)]
        Greedy {
            token: u32,
            logit: f32,
        }

        /// argmax: the largest of each logits row's candidates (ties: lowest index; all NaN: 0), to the host and to
        /// last_tokens.
        #[derive(Pod, Zeroable)]
        ArgmaxArgs {
            step: Step,
            /// `[candidates][best_rows]`; argmax_logits: whole rows `[logits_rows][candidates]`
            best: *const f32,
            /// argmax_logits: not read
            best_index: *const i32,
            /// pinned, `[turns][best_rows]`
            host: *mut Greedy,
            candidates: i32,
            best_rows: i32,
        }

        /// draw: a token from each row of logits, to the host and to last_tokens; -1 where the host is to draw it, and
        /// the largest logit's token stays in last_tokens.
        #[derive(Pod, Zeroable)]
        DrawArgs {
            /// whose last_tokens are those with the rows' largest logits
            step: Step,
            /// `[logits_rows][vocab]`
            logits: *const f32,
            /// pinned, `[turns][host_rows]`
            host: *mut i32,
            host_rows: i64,
            /// `[POWERS]`: bits of 2^(i / POWERS) less i << 47
            powers: *const u64,
            /// `[logits_rows]`: of each row's exponentials, for tests; NULL: not wanted
            sums: *mut f64,
            vocab: i32,
            reserved: i32,
        }

        /// range: smallest and largest exponents (value = m * 2^e, 1 <= m < 2) among the non-zero weights of a tensor
        /// on the wire: BF16 values, or the E8M0 scales (minus 127) of MXFP4 blocks; of BF16 also the least of the
        /// rows' largest exponents.
        #[derive(NoUninit)]
        RangeArgs {
            wire: *const u8,
            /// {smallest, largest, weakest row}, atomically; start with {INT_MAX, INT_MIN, INT_MAX}
            result: *mut i32,
            /// tiles of WIRE_ROWS rows
            tiles: i64,
            /// of one matrix; the last tile of each matrix is filled up with zeros
            rows: i32,
            cols: i32,
            /// FORMAT_BF16 or FORMAT_MXFP4
            format: Format,
            reserved: i32,
        }

        /// pack_*: from the wire to what a family's products read. Values become value * 2^shift.
        #[derive(NoUninit)]
        PackArgs {
            /// `[members][rows / WIRE_ROWS rounded up]` tiles
            wire: *const u8,
            out: *mut u8,
            members: i32,
            rows: i32,
            cols: i32,
            /// of the family, a member
            row_blocks: i32,
            k_blocks: i32,
            shift: i32,
            /// to become: FORMAT_F16 or FORMAT_BF16
            format: Format,
            reserved: i32,
        }

        /// synthesize: a tensor on the wire from a seed, for measuring without a checkpoint. BF16: normal with the
        /// given standard deviation (in steps of bfloat16), plus `mean`; MXFP4: random codes, scales 2^exponent or
        /// 2^(exponent - 1); F32: normal.
        #[derive(NoUninit)]
        SynthesizeArgs {
            wire: *mut u8,
            tiles: i64,
            /// of one matrix
            rows: i32,
            cols: i32,
            seed: u32,
            deviation: f32,
            mean: f32,
            exponent: i32,
            format: Format,
            reserved: i32,
        }

        /// matrix_peak: products of random 16-bit operands that never leave the multiprocessor, for a ceiling. A block
        /// does MATRIX_PEAK_FLOPS * iterations operations.
        #[derive(Pod, Zeroable)]
        MatrixPeakArgs {
            /// never written; the compiler does not know
            out: *mut f32,
            iterations: i32,
            /// 0
            never: i32,
        }
    }
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
