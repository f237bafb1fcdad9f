//! The interface of host and kernels: one argument struct per kernel, passed by value, and the layout of all data in
//! device memory.
//!
//! ```text
//! Activations  [terms][K / 64][rows][64] of 16 bits ("tiled"): K in slabs of 64, a row's 128 bytes of a slab in
//!              eight pieces of 16 bytes, piece p at position p ^ (row % 8). A run of rows of one slab is contiguous;
//!              if it starts at a multiple of 8 it has the swizzle that the matrix cores expect in shared memory. K is
//!              filled up with zeros.
//! Terms        `fast` has one. `exact` has x = hi + lo (FP16) or hi + mid + lo (BF16), each term `in_term` elements
//!              after the one before; store_terms in gpu/gpu.h says how the later ones are scaled.
//! KV cache     a page has KV_PAGE positions of one layer: [kv head][K: KV_PAGE rows | V: KV_PAGE rows], a row being
//!              head_dim elements in pieces of 8, piece p at position p ^ (position in the sequence % the largest power
//!              of two that divides head_dim / 8).
//! Weights      on the device in the layout that a family's pack_* kernels write. On the host and in transfers in the
//!              wire format, row-major tiles of WIRE_ROWS rows: BF16 and F32 row-major; MXFP4 codes (two per byte, low
//!              nibble first) of all rows, then E8M0 scales of all rows, one for each MXFP4_BLOCK values.
//! ```

use super::catalogue::{self, Elements};
use super::layout::{CType, Number, Shared, Struct, StructField, shared};
use crate::weights::{RowMajor, WeightFormat};
use crate::{batch, dtype, sampler};
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
        /// TERM_SHIFT of `gpu/gpu.h` where the matrix cores flush subnormals
        FLUSHING_TERM_SHIFT: usize = catalogue::FLUSHING_TERM_SHIFT;

        /// rows in a tile of the wire format of weights
        WIRE_ROWS: usize = RowMajor::ROWS;
        /// MXFP4 values that share a scale
        MXFP4_BLOCK: usize = dtype::MXFP4_BLOCK;
        /// bytes of a row's slab of packed MXFP4 weights: codes, two per byte, and one byte per scale
        MXFP4_SLAB_BYTES: usize = SLAB / 2 + SLAB / MXFP4_BLOCK;
        /// bytes of a row's slab of packed 16-bit weights
        W16_SLAB_BYTES: usize = 2 * SLAB;

        /// keys in a unit of decode attention
        ATTENTION_UNIT: usize = 128;
        /// units of decode attention in a group
        ATTENTION_GROUP: usize = 4;
        /// units of decode attention in a span
        ATTENTION_SPAN: usize = 16;
        /// the most pages that the keys of an AttentionItem lie in, but for whole rows of any length: NVIDIA's lanes
        /// have the number of one each
        ITEM_PAGES: usize = 32;
        /// floats of a partial sum of decode attention: for each of 8 query heads 64 values, a maximum and a sum of
        /// weights
        PARTIAL_FLOATS: usize = 8 * (64 + 2);

        /// of the experts' blocks so many neighbours run on one die, where a device has several: a few times an
        /// expert's tiles
        DIE_BLOCKS: usize = 8;

        /// bytes of a piece: the plan is copied in pieces, and its sections start at multiples of it
        UPLOAD_PIECE: usize = 16;
        /// the most sections of a plan
        UPLOAD_SECTIONS: usize = 12;
        /// the most tokens of a nucleus that draw samples from
        DRAW_TOKENS: usize = 2048;
        /// the most tokens of a row that score gives
        MOST_TOP: usize = batch::MOST_TOP;
        /// entries 2^(i / POWERS) of the table that exponentials are computed from
        POWERS: usize = sampler::EXPONENTIAL_POWERS;
        /// see PeakArgs
        PEAK_FLOPS: usize = 1 << 22;

        /// copies of a row's logits in one launch, so that blocks do not all poll one line
        ONE_LAUNCH_LOGITS: usize = 8;
        /// slabs of a product that one launch of a row multiplies, at least: a ring buffer's
        ONE_LAUNCH_LEAST_SLABS: usize = 18;
        /// and at most: there is room for so many in shared memory
        ONE_LAUNCH_MOST_SLABS: usize = 64;
        /// room for a command's arguments, in 8 bytes
        COMMAND_WORDS: usize = 96;
        /// rmsnorm_few, of NormArgs
        COMMAND_NORM: i32 = 1;
        /// qkv_store, of QkvStoreArgs
        COMMAND_QKV: i32 = 2;
        /// attention_decode, of AttentionArgs
        COMMAND_ATTENTION: i32 = 3;
        /// attn_out, of GemmArgs
        COMMAND_ATTN_OUT: i32 = 4;
        /// norm_route, of NormRouteArgs
        COMMAND_ROUTE: i32 = 5;
        /// sort_mlp1, of SortMlp1Args; of a single row on NVIDIA mlp1, of GemmArgs
        COMMAND_MLP1: i32 = 6;
        /// mlp2, of GemmArgs
        COMMAND_MLP2: i32 = 7;
    }

    /// Formats of weights, activations and KV.
    formats {
        F16 = 0,
        Bf16 = 1,
        F32 = 2,
        Mxfp4 = 3,
    }

    structs {
        /// Counts of the current step; the first section of the plan.
        #[derive(Pod, Zeroable, PartialEq)]
        StepHeader {
            /// rows in the step; decoding rows (chunks of one row) come first
            rows: i32,
            chunks: i32,
            /// rows whose logits are wanted
            logits_rows: i32,
            /// attention items of decoding rows, in full layers
            full_items: i32,
            /// attention items of decoding rows, in sliding-window layers
            window_items: i32,
            /// attention tiles of chunks with several rows
            prefill_tiles: i32,
            /// which of the host's result buffers this step writes
            turn: i32,
            /// attention items of keys that several decoding rows see, in full layers
            shared_items: i32,
            /// so many of `full_items`, the first ones, are whole rows of any length, which the warps of a block share
            /// out; 0: there are none, and no such kernel is launched
            whole_items: i32,
        }

        /// Consecutive rows of one sequence; chunks are in order of their rows. Position p is in the page `tables[full
        /// + p / KV_PAGE]` of the full layers and `tables[window + p / KV_PAGE % window_pages]` of the sliding-window
        /// layers.
        #[derive(Pod, Zeroable)]
        ChunkInfo {
            first_row: i32,
            rows: i32,
            first_position: i32,
            /// the sequence's slot in `last_tokens`
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
            /// where its token is stored in `last_tokens`; -1: nowhere
            slot: i32,
            /// the random number in [0, 1) that its token is sampled with
            coin: f32,
            /// the temperature of sampling; 0: its token is the argmax
            temperature: f32,
            /// top-p: the probability mass of the nucleus; 0: sample from all tokens
            topp: f32,
            /// tokens of less probability are not sorted by draw: they are not in the nucleus, or it has more than
            /// DRAW_TOKENS tokens
            least: f32,
            /// the token to be scored; -1: the one sampled, which is in `last_tokens`
            next: i32,
            /// how many of the most probable tokens are wanted with it; -1: the row is not scored
            top: i32,
        }

        /// A work item of decode attention (split-KV): `tokens` visible keys of one decoding row, the first of them in
        /// unit `first_unit`. Unit u has the keys from ATTENTION_UNIT * u on, by absolute position; group g has the
        /// units from ATTENTION_GROUP * g on, and span s those from ATTENTION_SPAN * s on. The row has `row_items` of
        /// them. If there are several, each has the units of one run of `run` units (a unit, a group or a span), and
        /// stores its sum. That of the row's first item is at index `partial` of the workspace, the next one's at
        /// `partial` + 1. An item's keys are in at most ITEM_PAGES pages, but for the first `whole_items` (StepHeader)
        /// of full layers, which blocks share out among their warps. If `second` is not negative, another decoding row
        /// sees the same keys, in the same pages, and the item is one of its as well; that of its first item is at
        /// index `second_partial`. Of such rows each item has the units of a group, and this one's are all there.
        #[derive(Pod, Zeroable, Default, PartialEq, Eq)]
        AttentionItem {
            row: i32,
            first_unit: i32,
            tokens: i32,
            row_items: i32,
            partial: i32,
            run: i32,
            second: i32,
            second_partial: i32,
        }

        /// A run of units, a group or a span, that several decoding rows see in the same pages, `pages` of them from
        /// `table` in the plan's tables on. It is run number `part` of each of these rows, `sharers` of them from
        /// `first_sharer` in the plan's list on; their AttentionItems leave it out, but count it.
        #[derive(Pod, Zeroable, Default, PartialEq, Eq)]
        SharedItem {
            table: i32,
            pages: i32,
            part: i32,
            first_sharer: i32,
            sharers: i32,
        }

        /// A row that shares keys; the sum of its first run is at index `partial` of the workspace.
        #[derive(Pod, Zeroable, Default, PartialEq, Eq)]
        Sharer {
            row: i32,
            partial: i32,
        }

        /// A tile of prefill attention, the query rows of one block: `rows` rows from row `first` of the chunk on.
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
            /// `[rows]`; -1 - slot: the token last sampled for that slot
            tokens: *const i32,
            /// `[rows]`
            positions: *const i32,
            /// `[rows]`
            row_chunk: *const i32,
            chunks: *const ChunkInfo,
            /// page tables of all chunks
            tables: *const i32,
            /// `[logits_rows]`
            logits: *const LogitsRowInfo,
            full_items: *const AttentionItem,
            window_items: *const AttentionItem,
            shared_items: *const SharedItem,
            sharers: *const Sharer,
            prefill_tiles: *const PrefillTile,
            /// `[slots]`: the token last sampled
            last_tokens: *mut i32,
        }

        /// A section of the plan: `bytes` bytes at offset `from` of the host's copy, `to` on the device. Multiples of
        /// UPLOAD_PIECE.
        #[derive(Pod, Zeroable, Default)]
        UploadSection {
            from: u32,
            to: u32,
            bytes: u32,
            reserved: u32,
        }

        /// The head of each of the host's copies of a plan.
        #[derive(Pod, Zeroable, Default)]
        UploadList {
            sections: u32,
            reserved: [u32; 3],
            section: [UploadSection; UPLOAD_SECTIONS],
        }

        /// upload: copies the plan from pinned host memory. There are `copies` plans, which the kernel reads in turn.
        /// Each starts with an UploadList.
        #[derive(Pod, Zeroable)]
        UploadArgs {
            /// `[copies][copy_bytes]`
            host: *const u8,
            device: *mut u8,
            /// two numbers that start as zeros: the copy to read, and how many blocks of this launch are done
            turn: *mut u32,
            copies: u32,
            copy_bytes: u32,
        }

        /// embed: `x[rows][hidden]` (float32) = the tokens' rows of the table.
        #[derive(NoUninit)]
        EmbedArgs {
            step: Step,
            /// `[vocab][hidden]`, BF16 or F32
            table: *const c_void,
            x: *mut f32,
            format: Format,
            hidden: i32,
        }

        /// rmsnorm and settle: add the weighted sum of the row's expert outputs to x, if y is not NULL. rmsnorm then
        /// norms x and writes the next product's input; settle only adds, and needs neither weight nor t.
        #[derive(NoUninit)]
        NormArgs {
            step: Step,
            /// `[rows][hidden]`, updated if y is not NULL and `select` is 0
            x: *mut f32,
            /// `[hidden]`
            weight: *const f32,
            /// expert outputs `[slots of routed rows][hidden]`, F16 or F32 (`y_format`); NULL: nothing to add
            y: *const c_void,
            /// `[rows][k]`: rows of y with a row's expert outputs, in order of the expert's index
            slots: *const i32,
            /// `[rows][k]`
            shares: *const f32,
            /// output, tiled
            t: *mut u16,
            /// elements from one term to the next
            t_term: i64,
            /// output in float32 `[rows][hidden]`, for the router; NULL: not wanted
            t32: *mut f32,
            y_format: Format,
            k: i32,
            hidden: i32,
            /// rows of the tiled buffer
            t_rows: i32,
            /// 1: output row i is row `step.logits[i].row` of x; there are `header->logits_rows` of them
            select: i32,
            terms: i32,
            /// of t: FORMAT_F16 or FORMAT_BF16
            format: Format,
            /// 1: sums in float64, rounded as the float32 baseline rounds
            exact: i32,
        }

        /// route: the k largest of t32 w^T + bias (of equal ones the lower index) and their softmax, in order of the
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

        /// An expert, and the tiles that its rows are cut into.
        #[derive(Pod, Zeroable)]
        ExpertCut {
            expert: i32,
            tiles: i32,
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
            /// sort alone: the row of each slot that has one; NULL: not wanted
            slot_rows: *mut i32,
            /// sort alone: `[n_experts]`, of GemmArgs of mlp1 and of mlp2; NULL: not wanted
            mlp1_cuts: *mut ExpertCut,
            mlp2_cuts: *mut ExpertCut,
            /// for the cuts: of each of an expert's tiles so many blocks share its weight rows
            mlp1_spans: i32,
            mlp2_spans: i32,
            /// for the cuts: the most steps of 16 rows of a tile
            tile_steps: i32,
            /// for the cuts: blocks that the device works on at once
            places: i32,
        }

        /// gather: copies each tiled row to its slots.
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

        /// sort_gather: sort and gather fused, for few rows. `gather.slots` is unused.
        #[derive(Pod, Zeroable)]
        SortGatherArgs {
            sort: SortArgs,
            /// `slots` is unused
            gather: GatherArgs,
        }

        /// norm_route: rmsnorm (without `select`) and route fused; sort and gather, too, where the bucket is of one
        /// row.
        #[derive(NoUninit)]
        NormRouteArgs {
            /// `t32` is unused
            norm: NormArgs,
            /// `t32` is unused
            route: RouteArgs,
            sort: SortArgs,
            gather: GatherArgs,
            /// 1: sort and gather, too, for a step's only row
            sends: i32,
            reserved: i32,
            /// norm_route_cluster*, `sends`: `picks` of mlp1's GemmArgs; NULL: not wanted
            picks: *mut u64,
        }

        /// rope_store: rotary embedding of queries and keys; writes q and the KV cache. Row p of cos and sin is
        /// position p.
        #[derive(NoUninit)]
        RopeStoreArgs {
            step: Step,
            /// `[rows][head_dim * (heads + 2 kv_heads)]`
            qkv: *const f32,
            /// `[positions][head_dim / 2]`
            cos: *const f32,
            sin: *const f32,
            /// `[rows][heads][head_dim]`; F16 and BF16 are scaled by log2(e) / sqrt(head_dim), F32 is not
            q: *mut c_void,
            /// this layer's pages of the KV cache
            kv: *mut u8,
            page_bytes: i64,
            /// bytes from one kv head's K to the next head's K
            head_bytes: i32,
            /// format of q and the cache: F16, BF16 or F32
            format: Format,
            head_dim: i32,
            heads: i32,
            kv_heads: i32,
            windowed: i32,
            /// 1: `qkv` has element i of a head's first half at 2 i, of its second half at 2 i + 1
            paired: i32,
            reserved: i32,
        }

        /// attention_*: output tiled `[terms][heads * head_dim / 64][out_rows][64]` in `format`, F16 or BF16;
        /// the cache has the kernel's format.
        #[derive(NoUninit)]
        AttentionArgs {
            step: Step,
            q: *const c_void,
            kv: *const u8,
            /// `[heads]`
            sinks: *const f32,
            out: *mut u16,
            /// workspace of attention_decode: `[partial sums][kv_heads][PARTIAL_FLOATS]`
            partials: *mut f32,
            /// `[rows][kv_heads]` counters: of stored partial sums (decode), of items (persistent blocks of prefill:
            /// the first one); zeros before and after each launch
            arrived: *mut i32,
            out_term: i64,
            page_bytes: i64,
            head_bytes: i32,
            head_dim: i32,
            heads: i32,
            kv_heads: i32,
            windowed: i32,
            /// keys that a row of a sliding-window layer sees, its own included
            window: i32,
            out_rows: i32,
            terms: i32,
            format: Format,
            reserved: i32,
        }

        /// The matrix products. Weights are `[groups]` matrices of n rows and k_blocks * 64 columns, packed by the
        /// family's pack kernels; row_blocks is the number of the family's row blocks. A group is one expert: group g
        /// has `rows[g]` input rows from `offsets[g]` on. Dense products have one group; offsets is NULL, and rows
        /// points to the number of rows. What an epilogue does not use is NULL or 0.
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
            /// unembedding: `[candidates][best_rows]`, the largest logit of each candidate, which is what one block
            /// found ...
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
            /// a power of two that packing took out of the weights: products are multiplied by it
            scale: f32,
            /// clamping limit of the gated unit
            limit: f32,
            /// format of `tiled` and of the input: F16 or BF16
            format: Format,
            /// plain_* only, whose weights are in the wire format: elements of a row
            cols: i32,
            /// plain_* only: format of the weights: BF16 or F32, of experts also MXFP4
            weight_format: i16,
            /// plain_* only: terms of `input` and `tiled`; y is F16 with one, F32 with more
            terms: i16,
            /// qkv: as in PackArgs; `out` then has element i of a head's first half at 2 i, of its second half at
            /// 2 i + 1
            half: i32,
            /// experts in `picks`
            picked: i32,
            /// mlp1 and mlp2 of a single row whose experts the router tells: these. mlp1 need not wait for the end of
            /// the router, but for this word. Its upper half is 0 when the row is stored, which is row 0 of mlp1's
            /// `input` for all its experts, and when the lower half has the experts: a byte each, in order of their
            /// index, 255 where there is no row. Expert i has row GROUP_ALIGN * i of `tiled` and `y`. NULL: `rows` and
            /// `offsets` tell.
            picks: *const u64,
            /// mlp1 of a family that indexes rows: the row of each slot, which is there in `input`
            slot_rows: *const i32,
            /// mlp1 and mlp2 of a family that cuts experts' rows: `[groups]`, in the order in which blocks take them.
            /// NULL: their own order, and the fewest tiles.
            cuts: *const ExpertCut,
        }

        /// qkv_store: qkv and rope_store fused.
        #[derive(NoUninit)]
        QkvStoreArgs {
            /// `out` is unused
            product: GemmArgs,
            /// `qkv` is unused
            store: RopeStoreArgs,
        }

        /// norm_qkv: rmsnorm and qkv_store fused, for a single row.
        #[derive(NoUninit)]
        NormQkvArgs {
            /// `input` of the product is unused
            qkv: QkvStoreArgs,
            /// `t` and `t32` are unused
            norm: NormArgs,
            /// how many blocks have read the row; 0 before and after each launch
            arrived: *mut i32,
        }

        /// A row's argmax as the device writes it.
        #[derive(Pod, Zeroable)]
        Greedy {
            token: u32,
            logit: f32,
        }

        /// argmax: each logits row's largest logit (of equal ones the lowest index; all NaN: 0), to the host and to
        /// last_tokens.
        #[derive(Pod, Zeroable)]
        ArgmaxArgs {
            step: Step,
            /// `[candidates][best_rows]`; argmax_logits: whole rows of logits `[logits_rows][candidates]`
            best: *const f32,
            /// `[candidates][best_rows]`; argmax_logits: unused
            best_index: *const i32,
            /// pinned, `[turns][best_rows]`
            host: *mut Greedy,
            candidates: i32,
            best_rows: i32,
            /// argmax_logits: the first candidates, which are tokens that may be sampled
            drawable: i32,
            reserved: i32,
        }

        /// draw, draw_wide: sample a token from each row of logits, to the host and to last_tokens. Where the host must
        /// sample the row -1 goes to the host, and the argmax stays in last_tokens.
        #[derive(Pod, Zeroable)]
        DrawArgs {
            /// `last_tokens` has the rows' argmax already
            step: Step,
            /// `[logits_rows][vocab]`
            logits: *const f32,
            /// pinned, `[turns][host_rows]`
            host: *mut i32,
            host_rows: i64,
            /// `[POWERS]`: bits of 2^(i / POWERS), minus i << 47
            powers: *const u64,
            /// `[logits_rows]`: the sum of each row's exponentials, negative where draw has sampled a token; NaN where
            /// it is not finite
            sums: *mut f64,
            vocab: i32,
            /// the first tokens, which may be sampled
            drawable: i32,
        }

        /// What score gives of a row.
        #[derive(Pod, Zeroable)]
        Scored {
            /// of e^(logit - largest) over the row; NaN: the host must compute it all
            sum: f64,
            largest: f32,
            token: i32,
            /// of `token`
            logit: f32,
            reserved: i32,
            /// the most probable tokens, of equal ones the lowest first
            top_tokens: [i32; MOST_TOP],
            top_logits: [f32; MOST_TOP],
        }

        /// score: a token's logit, the row's largest ones and its sum of exponentials, of each row of logits that is
        /// scored, to the host.
        #[derive(Pod, Zeroable)]
        ScoreArgs {
            /// `last_tokens` has the tokens sampled already
            step: Step,
            /// `[logits_rows][vocab]`
            logits: *const f32,
            /// pinned, `[turns][host_rows]`
            host: *mut Scored,
            host_rows: i64,
            vocab: i32,
            reserved: i32,
        }

        /// range: smallest and largest exponent (value = m * 2^e, 1 <= m < 2) among the non-zero weights of a tensor in
        /// the wire format: of BF16 values, or of the E8M0 scales (minus 127) of MXFP4 blocks. For BF16 also the
        /// smallest of the rows' largest exponents.
        #[derive(NoUninit)]
        RangeArgs {
            wire: *const u8,
            /// {smallest, largest, smallest of the rows' largest}, updated atomically; start with {INT_MAX, INT_MIN,
            /// INT_MAX}
            result: *mut i32,
            /// tiles of WIRE_ROWS rows
            tiles: i64,
            /// rows of one matrix; the last tile of each matrix is filled up with zeros
            rows: i32,
            cols: i32,
            /// FORMAT_BF16 or FORMAT_MXFP4
            format: Format,
            reserved: i32,
        }

        /// pack_*: weights from the wire format to the layout that a family's products read. Values become value *
        /// 2^shift.
        #[derive(NoUninit)]
        PackArgs {
            /// `[members][rows / WIRE_ROWS rounded up]` tiles
            wire: *const u8,
            out: *mut u8,
            members: i32,
            rows: i32,
            cols: i32,
            /// the family's row blocks, per member
            row_blocks: i32,
            k_blocks: i32,
            shift: i32,
            /// format of the activations that the weights will be multiplied with: FORMAT_F16 or FORMAT_BF16
            format: Format,
            /// half of head_dim, if rows are packed in pairs half a head apart; 0: they are in their own order
            half: i32,
        }

        /// matrix_peak and attention_peak: products of random 16-bit operands that never leave the multiprocessor, to
        /// measure the peak throughput. A block does PEAK_FLOPS * iterations operations.
        #[derive(Pod, Zeroable)]
        PeakArgs {
            /// never written, which the compiler does not know
            out: *mut f32,
            iterations: i32,
            /// 0
            never: i32,
        }

        /// sort_mlp1: sort and mlp1 fused, for few rows. Between an expert's slots and the next one's more are left
        /// empty than sort leaves.
        #[derive(NoUninit)]
        SortMlp1Args {
            /// `rows` and `offsets` are unused; `input` has the step's rows in their order
            product: GemmArgs,
            sort: SortArgs,
            /// rows of the bucket
            most_rows: i32,
            reserved: i32,
        }

        /// What the blocks of one_launch do one after the other: a kernel of a layer each.
        #[derive(Pod, Zeroable)]
        LayerCommand {
            /// COMMAND_*
            op: i32,
            /// blocks that the kernel has by itself
            blocks: i32,
            /// attn_out: the rows that it adds to
            from: *const f32,
            /// norm: where the rows go, the experts' outputs added; attn_out: where they go for later launches, or
            /// NULL; on NVIDIA norm_route: where the logits go, in several copies
            to: *mut f32,
            /// qkv_store and attention: each row's key and value of the step, `[rows][keys of all kv heads, their
            /// values][head_dim]`
            newest: *mut u16,
            /// the kernel's argument struct
            args: [u64; COMMAND_WORDS],
        }

        /// one_launch: a step's layers. What its blocks hand on to each other has not been written since it was wiped:
        /// filled with ones.
        #[derive(NoUninit)]
        OneLaunchArgs {
            commands: *const LayerCommand,
            /// memory that the next step's blocks hand on through, which this launch wipes
            wiped: *mut u8,
            /// set to 1 if blocks have waited for a value longer than they should, and go on without it
            in_vain: *mut u32,
            /// commands
            count: i32,
            /// of that memory, 16 bytes each
            pieces: i32,
            /// how long they wait, in units of 10 ns
            patience: i32,
            reserved: i32,
        }
    }
}

impl From<Elements> for Format {
    fn from(elements: Elements) -> Self {
        match elements {
            Elements::F16 => Self::F16,
            Elements::Bf16 => Self::Bf16,
            Elements::F32 => Self::F32,
        }
    }
}

impl From<WeightFormat> for Format {
    fn from(weights: WeightFormat) -> Self {
        match weights {
            WeightFormat::Mxfp4 => Self::Mxfp4,
            WeightFormat::Bf16 => Self::Bf16,
            WeightFormat::F32 => Self::F32,
        }
    }
}
