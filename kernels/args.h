// The interface of host and kernels: one argument struct per kernel, passed by value, and the layout of all data in
// device memory.
//
// Activations  [terms][K / 64][rows][64] of 16 bits ("tiled"): K in slabs of 64, a row's 128 bytes of a slab in
//              eight pieces of 16 bytes, piece p at position p ^ (row % 8). A run of rows of one slab is contiguous;
//              if it starts at a multiple of 8 it has the swizzle that the matrix cores expect in shared memory. K is
//              filled up with zeros.
// Terms        `fast` has one. `exact` has x = hi + lo (FP16) or hi + mid + lo (BF16), each term `in_term` elements
//              after the one before; store_terms in gpu/gpu.h says how the later ones are scaled.
// KV cache     a page has KV_PAGE positions of one layer: [kv head][K: KV_PAGE rows | V: KV_PAGE rows], a row being
//              head_dim elements in pieces of 8, piece p at position p ^ (position in the sequence % the largest power
//              of two that divides head_dim / 8).
// Weights      on the device in the layout that a family's pack_* kernels write. On the host and in transfers in the
//              wire format, row-major tiles of WIRE_ROWS rows: BF16 and F32 row-major; MXFP4 codes (two per byte, low
//              nibble first) of all rows, then E8M0 scales of all rows, one for each MXFP4_BLOCK values.
//
// Made from src/backend/gpu/args.rs (fingerprint d4f35af41d5baf3c) by the test `kernels_header_is_current`;
// do not edit. GETP_BLESS=1 cargo test --test header
#pragma once

enum : int {
  KV_PAGE = 64,                 // positions in a page of the KV cache
  SLAB = 64,                    // K elements in a slab of tiled activations and in a k block of packed weights
  GROUP_ALIGN = 8,              // an expert's rows start at a multiple of this
  FLUSHING_TERM_SHIFT = 11,     // TERM_SHIFT of gpu/gpu.h where the matrix cores flush subnormals
  WIRE_ROWS = 32,               // rows in a tile of the wire format of weights
  MXFP4_BLOCK = 32,             // MXFP4 values that share a scale
  MXFP4_SLAB_BYTES = 34,        // bytes of a row's slab of packed MXFP4 weights: codes, two per byte, and one byte per
                                // scale
  W16_SLAB_BYTES = 128,         // bytes of a row's slab of packed 16-bit weights
  ATTENTION_UNIT = 128,         // keys in a unit of decode attention
  ATTENTION_GROUP = 4,          // units of decode attention in a group
  ATTENTION_SPAN = 16,          // units of decode attention in a span
  ITEM_PAGES = 32,              // the most pages that the keys of an AttentionItem lie in, but for whole rows of any
                                // length: NVIDIA's lanes have the number of one each
  PARTIAL_FLOATS = 528,         // floats of a partial sum of decode attention: for each of 8 query heads 64 values, a
                                // maximum and a sum of weights
  DIE_BLOCKS = 8,               // of the experts' blocks so many neighbours run on one die, where a device has several:
                                // a few times an expert's tiles
  UPLOAD_PIECE = 16,            // bytes of a piece: the plan is copied in pieces, and its sections start at multiples
                                // of it
  UPLOAD_SECTIONS = 12,         // the most sections of a plan
  DRAW_TOKENS = 2048,           // the most tokens of a nucleus that draw samples from
  MOST_TOP = 20,                // the most tokens of a row that score gives
  POWERS = 32,                  // entries 2^(i / POWERS) of the table that exponentials are computed from
  PEAK_FLOPS = 4194304,         // see PeakArgs
  ONE_LAUNCH_LOGITS = 8,        // copies of a row's logits in one launch, so that blocks do not all poll one line
  ONE_LAUNCH_LEAST_SLABS = 18,  // slabs of a product that one launch of a row multiplies, at least: a ring buffer's
  ONE_LAUNCH_MOST_SLABS = 64,   // and at most: there is room for so many in shared memory
  COMMAND_WORDS = 96,           // room for a command's arguments, in 8 bytes
  COMMAND_NORM = 1,             // rmsnorm_few, of NormArgs
  COMMAND_QKV = 2,              // qkv_store, of QkvStoreArgs
  COMMAND_ATTENTION = 3,        // attention_decode, of AttentionArgs
  COMMAND_ATTN_OUT = 4,         // attn_out, of GemmArgs
  COMMAND_ROUTE = 5,            // norm_route, of NormRouteArgs
  COMMAND_MLP1 = 6,             // sort_mlp1, of SortMlp1Args; of a single row on NVIDIA mlp1, of GemmArgs
  COMMAND_MLP2 = 7,             // mlp2, of GemmArgs
};

// Formats of weights, activations and KV.
enum : int {
  FORMAT_F16 = 0,
  FORMAT_BF16 = 1,
  FORMAT_F32 = 2,
  FORMAT_MXFP4 = 3,
};

// Counts of the current step; the first section of the plan.
struct StepHeader {
  int rows;           // rows in the step; decoding rows (chunks of one row) come first
  int chunks;
  int logits_rows;    // rows whose logits are wanted
  int full_items;     // attention items of decoding rows, in full layers
  int window_items;   // attention items of decoding rows, in sliding-window layers
  int prefill_tiles;  // attention tiles of chunks with several rows
  int turn;           // which of the host's result buffers this step writes
  int shared_items;   // attention items of keys that several decoding rows see, in full layers
  int whole_items;    // so many of `full_items`, the first ones, are whole rows of any length, which the warps of a
                      // block share out; 0: there are none, and no such kernel is launched
};

// Consecutive rows of one sequence; chunks are in order of their rows. Position p is in the page tables[full + p /
// KV_PAGE] of the full layers and tables[window + p / KV_PAGE % window_pages] of the sliding-window layers.
struct ChunkInfo {
  int first_row;
  int rows;
  int first_position;
  int slot;  // the sequence's slot in `last_tokens`
  int full;
  int window;
  int window_pages;
  int reserved;
};

// A row whose logits are wanted.
struct LogitsRowInfo {
  int row;
  int slot;           // where its token is stored in `last_tokens`; -1: nowhere
  float coin;         // the random number in [0, 1) that its token is sampled with
  float temperature;  // the temperature of sampling; 0: its token is the argmax
  float topp;         // top-p: the probability mass of the nucleus; 0: sample from all tokens
  float least;        // tokens of less probability are not sorted by draw: they are not in the nucleus, or it has more
                      // than DRAW_TOKENS tokens
  int next;           // the token to be scored; -1: the one sampled, which is in `last_tokens`
  int top;            // how many of the most probable tokens are wanted with it; -1: the row is not scored
};

// A work item of decode attention (split-KV): `tokens` visible keys of one decoding row, the first of them in unit
// `first_unit`. Unit u has the keys from ATTENTION_UNIT * u on, by absolute position; group g has the units from
// ATTENTION_GROUP * g on, and span s those from ATTENTION_SPAN * s on. The row has `row_items` of them. If there are
// several, each has the units of one run of `run` units (a unit, a group or a span), and stores its sum. That of the
// row's first item is at index `partial` of the workspace, the next one's at `partial` + 1. An item's keys are in at
// most ITEM_PAGES pages, but for the first `whole_items` (StepHeader) of full layers, which blocks share out among
// their warps. If `second` is not negative, another decoding row sees the same keys, in the same pages, and the item is
// one of its as well; that of its first item is at index `second_partial`. Of such rows each item has the units of a
// group, and this one's are all there.
struct AttentionItem {
  int row;
  int first_unit;
  int tokens;
  int row_items;
  int partial;
  int run;
  int second;
  int second_partial;
};

// A run of units, a group or a span, that several decoding rows see in the same pages, `pages` of them from `table` in
// the plan's tables on. It is run number `part` of each of these rows, `sharers` of them from `first_sharer` in the
// plan's list on; their AttentionItems leave it out, but count it.
struct SharedItem {
  int table;
  int pages;
  int part;
  int first_sharer;
  int sharers;
};

// A row that shares keys; the sum of its first run is at index `partial` of the workspace.
struct Sharer {
  int row;
  int partial;
};

// A tile of prefill attention, the query rows of one block: `rows` rows from row `first` of the chunk on.
struct PrefillTile {
  int chunk;
  int first;
  int rows;
  int reserved;
};

// The step's plan on the device, at addresses that never change.
struct Step {
  const StepHeader* header;
  const int* tokens;            // [rows]; -1 - slot: the token last sampled for that slot
  const int* positions;         // [rows]
  const int* row_chunk;         // [rows]
  const ChunkInfo* chunks;
  const int* tables;            // page tables of all chunks
  const LogitsRowInfo* logits;  // [logits_rows]
  const AttentionItem* full_items;
  const AttentionItem* window_items;
  const SharedItem* shared_items;
  const Sharer* sharers;
  const PrefillTile* prefill_tiles;
  int* last_tokens;             // [slots]: the token last sampled
};

// A section of the plan: `bytes` bytes at offset `from` of the host's copy, `to` on the device. Multiples of
// UPLOAD_PIECE.
struct UploadSection {
  unsigned from;
  unsigned to;
  unsigned bytes;
  unsigned reserved;
};

// The head of each of the host's copies of a plan.
struct UploadList {
  unsigned sections;
  unsigned reserved[3];
  UploadSection section[12];
};

// upload: copies the plan from pinned host memory. There are `copies` plans, which the kernel reads in turn. Each
// starts with an UploadList.
struct UploadArgs {
  const unsigned char* host;  // [copies][copy_bytes]
  unsigned char* device;
  unsigned* turn;             // two numbers that start as zeros: the copy to read, and how many blocks of this launch
                              // are done
  unsigned copies;
  unsigned copy_bytes;
};

// embed: x[rows][hidden] (float32) = the tokens' rows of the table.
struct EmbedArgs {
  Step step;
  const void* table;  // [vocab][hidden], BF16 or F32
  float* x;
  int format;
  int hidden;
};

// rmsnorm and settle: add the weighted sum of the row's expert outputs to x, if y is not NULL. rmsnorm then norms x and
// writes the next product's input; settle only adds, and needs neither weight nor t.
struct NormArgs {
  Step step;
  float* x;             // [rows][hidden], updated if y is not NULL and `select` is 0
  const float* weight;  // [hidden]
  const void* y;        // expert outputs [slots of routed rows][hidden], F16 or F32 (`y_format`); NULL: nothing to add
  const int* slots;     // [rows][k]: rows of y with a row's expert outputs, in order of the expert's index
  const float* shares;  // [rows][k]
  unsigned short* t;    // output, tiled
  long long t_term;     // elements from one term to the next
  float* t32;           // output in float32 [rows][hidden], for the router; NULL: not wanted
  int y_format;
  int k;
  int hidden;
  int t_rows;           // rows of the tiled buffer
  int select;           // 1: output row i is row step.logits[i].row of x; there are header->logits_rows of them
  int terms;
  int format;           // of t: FORMAT_F16 or FORMAT_BF16
  int exact;            // 1: sums in float64, rounded as the float32 baseline rounds
};

// route: the k largest of t32 w^T + bias (of equal ones the lower index) and their softmax, in order of the expert's
// index.
struct RouteArgs {
  Step step;
  const float* t32;   // [rows][hidden]
  const void* w;      // [experts][hidden], BF16 or F32
  const float* bias;  // [experts]
  int* experts;       // [rows][k]
  float* shares;      // [rows][k]
  int format;
  int hidden;
  int n_experts;
  int k;
  int exact;
  int reserved;
};

// An expert, and the tiles that its rows are cut into.
struct ExpertCut {
  int expert;
  int tiles;
};

// sort: gives each (row, expert) pair a slot; an expert's slots are consecutive, in order of rows, and start at a
// multiple of GROUP_ALIGN.
struct SortArgs {
  Step step;
  const int* experts;    // [rows][k]
  int* offsets;          // [n_experts + 1]: first slot of each expert, the end last
  int* counts;           // [n_experts]
  int* slots;            // [rows][k]
  int n_experts;
  int k;
  int* slot_rows;        // sort alone: the row of each slot that has one; NULL: not wanted
  ExpertCut* mlp1_cuts;  // sort alone: [n_experts], of GemmArgs of mlp1 and of mlp2; NULL: not wanted
  ExpertCut* mlp2_cuts;
  int mlp1_spans;        // for the cuts: of each of an expert's tiles so many blocks share its weight rows
  int mlp2_spans;
  int tile_steps;        // for the cuts: the most steps of 16 rows of a tile
  int places;            // for the cuts: blocks that the device works on at once
};

// gather: copies each tiled row to its slots.
struct GatherArgs {
  Step step;
  const unsigned short* input;  // tiled [terms][k_blocks][in_rows][64]
  unsigned short* out;          // tiled [terms][k_blocks][out_rows][64]
  const int* slots;             // [rows][k]
  long long in_term;
  long long out_term;
  int k;
  int k_blocks;
  int in_rows;
  int out_rows;
  int terms;
  int reserved;
};

// sort_gather: sort and gather fused, for few rows. gather.slots is unused.
struct SortGatherArgs {
  SortArgs sort;
  GatherArgs gather;  // `slots` is unused
};

// norm_route: rmsnorm (without `select`) and route fused; sort and gather, too, where the bucket is of one row.
struct NormRouteArgs {
  NormArgs norm;              // `t32` is unused
  RouteArgs route;            // `t32` is unused
  SortArgs sort;
  GatherArgs gather;
  int sends;                  // 1: sort and gather, too, for a step's only row
  int reserved;
  unsigned long long* picks;  // norm_route_cluster*, `sends`: `picks` of mlp1's GemmArgs; NULL: not wanted
};

// rope_store: rotary embedding of queries and keys; writes q and the KV cache. Row p of cos and sin is position p.
struct RopeStoreArgs {
  Step step;
  const float* qkv;   // [rows][head_dim * (heads + 2 kv_heads)]
  const float* cos;   // [positions][head_dim / 2]
  const float* sin;
  void* q;            // [rows][heads][head_dim]; F16 and BF16 are scaled by log2(e) / sqrt(head_dim), F32 is not
  unsigned char* kv;  // this layer's pages of the KV cache
  long long page_bytes;
  int head_bytes;     // bytes from one kv head's K to the next head's K
  int format;         // format of q and the cache: F16, BF16 or F32
  int head_dim;
  int heads;
  int kv_heads;
  int windowed;
  int paired;         // 1: `qkv` has element i of a head's first half at 2 i, of its second half at 2 i + 1
  int reserved;
};

// attention_*: output tiled [terms][heads * head_dim / 64][out_rows][64] in `format`, F16 or BF16; the cache has the
// kernel's format.
struct AttentionArgs {
  Step step;
  const void* q;
  const unsigned char* kv;
  const float* sinks;  // [heads]
  unsigned short* out;
  float* partials;     // workspace of attention_decode: [partial sums][kv_heads][PARTIAL_FLOATS]
  int* arrived;        // [rows][kv_heads] counters: of stored partial sums (decode), of items (persistent blocks of
                       // prefill: the first one); zeros before and after each launch
  long long out_term;
  long long page_bytes;
  int head_bytes;
  int head_dim;
  int heads;
  int kv_heads;
  int windowed;
  int window;          // keys that a row of a sliding-window layer sees, its own included
  int out_rows;
  int terms;
  int format;
  int reserved;
};

// The matrix products. Weights are [groups] matrices of n rows and k_blocks * 64 columns, packed by the family's pack
// kernels; row_blocks is the number of the family's row blocks. A group is one expert: group g has rows[g] input rows
// from offsets[g] on. Dense products have one group; offsets is NULL, and rows points to the number of rows. What an
// epilogue does not use is NULL or 0.
struct GemmArgs {
  const unsigned char* weights;
  const float* bias;                // [groups][n]
  const unsigned short* input;      // tiled [terms][k_blocks][in_rows][64]
  long long in_term;
  const int* rows;
  const int* offsets;
  float* out;                       // qkv: [rows][n] written; attn_out: x [rows][n] added to; logits: [rows][n] written
  unsigned short* tiled;            // mlp1: gated unit, tiled [terms][n / 2 / 64 rounded up][tiled_rows][64]
  long long tiled_term;
  void* y;                          // mlp2: [slots][n], F16 (fast) or F32 (exact)
  float* best;                      // unembedding: [candidates][best_rows], the largest logit of each candidate, which
                                    // is what one block found ...
  int* best_index;                  // ... and its lowest index
  int groups;
  int n;
  int k_blocks;
  int row_blocks;
  int in_rows;
  int tiled_rows;
  int best_rows;
  float scale;                      // a power of two that packing took out of the weights: products are multiplied by
                                    // it
  float limit;                      // clamping limit of the gated unit
  int format;                       // format of `tiled` and of the input: F16 or BF16
  int cols;                         // plain_* only, whose weights are in the wire format: elements of a row
  short weight_format;              // plain_* only: format of the weights: BF16 or F32, of experts also MXFP4
  short terms;                      // plain_* only: terms of `input` and `tiled`; y is F16 with one, F32 with more
  int half;                         // qkv: as in PackArgs; `out` then has element i of a head's first half at 2 i, of
                                    // its second half at 2 i + 1
  int picked;                       // experts in `picks`
  const unsigned long long* picks;  // mlp1 and mlp2 of a single row whose experts the router tells: these. mlp1 need
                                    // not wait for the end of the router, but for this word. Its upper half is 0 when
                                    // the row is stored, which is row 0 of mlp1's `input` for all its experts, and when
                                    // the lower half has the experts: a byte each, in order of their index, 255 where
                                    // there is no row. Expert i has row GROUP_ALIGN * i of `tiled` and `y`. NULL:
                                    // `rows` and `offsets` tell.
  const int* slot_rows;             // mlp1 of a family that indexes rows: the row of each slot, which is there in
                                    // `input`
  const ExpertCut* cuts;            // mlp1 and mlp2 of a family that cuts experts' rows: [groups], in the order in
                                    // which blocks take them. NULL: their own order, and the fewest tiles.
};

// qkv_store: qkv and rope_store fused.
struct QkvStoreArgs {
  GemmArgs product;     // `out` is unused
  RopeStoreArgs store;  // `qkv` is unused
};

// norm_qkv: rmsnorm and qkv_store fused, for a single row.
struct NormQkvArgs {
  QkvStoreArgs qkv;  // `input` of the product is unused
  NormArgs norm;     // `t` and `t32` are unused
  int* arrived;      // how many blocks have read the row; 0 before and after each launch
};

// A row's argmax as the device writes it.
struct Greedy {
  unsigned token;
  float logit;
};

// argmax: each logits row's largest logit (of equal ones the lowest index; all NaN: 0), to the host and to last_tokens.
struct ArgmaxArgs {
  Step step;
  const float* best;      // [candidates][best_rows]; argmax_logits: whole rows of logits [logits_rows][candidates]
  const int* best_index;  // [candidates][best_rows]; argmax_logits: unused
  Greedy* host;           // pinned, [turns][best_rows]
  int candidates;
  int best_rows;
  int drawable;           // argmax_logits: the first candidates, which are tokens that may be sampled
  int reserved;
};

// draw, draw_wide: sample a token from each row of logits, to the host and to last_tokens. Where the host must sample
// the row -1 goes to the host, and the argmax stays in last_tokens.
struct DrawArgs {
  Step step;                         // `last_tokens` has the rows' argmax already
  const float* logits;               // [logits_rows][vocab]
  int* host;                         // pinned, [turns][host_rows]
  long long host_rows;
  const unsigned long long* powers;  // [POWERS]: bits of 2^(i / POWERS), minus i << 47
  double* sums;                      // [logits_rows]: the sum of each row's exponentials, negative where draw has
                                     // sampled a token; NaN where it is not finite
  int vocab;
  int drawable;                      // the first tokens, which may be sampled
};

// What score gives of a row.
struct Scored {
  double sum;          // of e^(logit - largest) over the row; NaN: the host must compute it all
  float largest;
  int token;
  float logit;         // of `token`
  int reserved;
  int top_tokens[20];  // the most probable tokens, of equal ones the lowest first
  float top_logits[20];
};

// score: a token's logit, the row's largest ones and its sum of exponentials, of each row of logits that is scored, to
// the host.
struct ScoreArgs {
  Step step;            // `last_tokens` has the tokens sampled already
  const float* logits;  // [logits_rows][vocab]
  Scored* host;         // pinned, [turns][host_rows]
  long long host_rows;
  int vocab;
  int reserved;
};

// range: smallest and largest exponent (value = m * 2^e, 1 <= m < 2) among the non-zero weights of a tensor in the wire
// format: of BF16 values, or of the E8M0 scales (minus 127) of MXFP4 blocks. For BF16 also the smallest of the rows'
// largest exponents.
struct RangeArgs {
  const unsigned char* wire;
  int* result;      // {smallest, largest, smallest of the rows' largest}, updated atomically; start with {INT_MAX,
                    // INT_MIN, INT_MAX}
  long long tiles;  // tiles of WIRE_ROWS rows
  int rows;         // rows of one matrix; the last tile of each matrix is filled up with zeros
  int cols;
  int format;       // FORMAT_BF16 or FORMAT_MXFP4
  int reserved;
};

// pack_*: weights from the wire format to the layout that a family's products read. Values become value * 2^shift.
struct PackArgs {
  const unsigned char* wire;  // [members][rows / WIRE_ROWS rounded up] tiles
  unsigned char* out;
  int members;
  int rows;
  int cols;
  int row_blocks;             // the family's row blocks, per member
  int k_blocks;
  int shift;
  int format;                 // format of the activations that the weights will be multiplied with: FORMAT_F16 or
                              // FORMAT_BF16
  int half;                   // half of head_dim, if rows are packed in pairs half a head apart; 0: they are in their
                              // own order
};

// matrix_peak and attention_peak: products of random 16-bit operands that never leave the multiprocessor, to measure
// the peak throughput. A block does PEAK_FLOPS * iterations operations.
struct PeakArgs {
  float* out;  // never written, which the compiler does not know
  int iterations;
  int never;   // 0
};

// sort_mlp1: sort and mlp1 fused, for few rows. Between an expert's slots and the next one's more are left empty than
// sort leaves.
struct SortMlp1Args {
  GemmArgs product;  // `rows` and `offsets` are unused; `input` has the step's rows in their order
  SortArgs sort;
  int most_rows;     // rows of the bucket
  int reserved;
};

// What the blocks of one_launch do one after the other: a kernel of a layer each.
struct LayerCommand {
  int op;                       // COMMAND_*
  int blocks;                   // blocks that the kernel has by itself
  const float* from;            // attn_out: the rows that it adds to
  float* to;                    // norm: where the rows go, the experts' outputs added; attn_out: where they go for
                                // later launches, or NULL; on NVIDIA norm_route: where the logits go, in several copies
  unsigned short* newest;       // qkv_store and attention: each row's key and value of the step, [rows][keys of all kv
                                // heads, their values][head_dim]
  unsigned long long args[96];  // the kernel's argument struct
};

// one_launch: a step's layers. What its blocks hand on to each other has not been written since it was wiped: filled
// with ones.
struct OneLaunchArgs {
  const LayerCommand* commands;
  unsigned char* wiped;  // memory that the next step's blocks hand on through, which this launch wipes
  unsigned* in_vain;     // set to 1 if blocks have waited for a value longer than they should, and go on without it
  int count;             // commands
  int pieces;            // of that memory, 16 bytes each
  int patience;          // how long they wait, in units of 10 ns
  int reserved;
};

// Where the host has all of it.
#define SIZE(Struct, bytes) static_assert(sizeof(Struct) == bytes, "the host has another size");
#define AT(Struct, field, bytes) \
  static_assert(__builtin_offsetof(Struct, field) == bytes, "the host has it elsewhere");
SIZE(StepHeader, 36) AT(StepHeader, rows, 0) AT(StepHeader, chunks, 4) AT(StepHeader, logits_rows, 8)
  AT(StepHeader, full_items, 12) AT(StepHeader, window_items, 16) AT(StepHeader, prefill_tiles, 20)
  AT(StepHeader, turn, 24) AT(StepHeader, shared_items, 28) AT(StepHeader, whole_items, 32)
SIZE(ChunkInfo, 32) AT(ChunkInfo, first_row, 0) AT(ChunkInfo, rows, 4) AT(ChunkInfo, first_position, 8)
  AT(ChunkInfo, slot, 12) AT(ChunkInfo, full, 16) AT(ChunkInfo, window, 20) AT(ChunkInfo, window_pages, 24)
  AT(ChunkInfo, reserved, 28)
SIZE(LogitsRowInfo, 32) AT(LogitsRowInfo, row, 0) AT(LogitsRowInfo, slot, 4) AT(LogitsRowInfo, coin, 8)
  AT(LogitsRowInfo, temperature, 12) AT(LogitsRowInfo, topp, 16) AT(LogitsRowInfo, least, 20)
  AT(LogitsRowInfo, next, 24) AT(LogitsRowInfo, top, 28)
SIZE(AttentionItem, 32) AT(AttentionItem, row, 0) AT(AttentionItem, first_unit, 4) AT(AttentionItem, tokens, 8)
  AT(AttentionItem, row_items, 12) AT(AttentionItem, partial, 16) AT(AttentionItem, run, 20)
  AT(AttentionItem, second, 24) AT(AttentionItem, second_partial, 28)
SIZE(SharedItem, 20) AT(SharedItem, table, 0) AT(SharedItem, pages, 4) AT(SharedItem, part, 8)
  AT(SharedItem, first_sharer, 12) AT(SharedItem, sharers, 16)
SIZE(Sharer, 8) AT(Sharer, row, 0) AT(Sharer, partial, 4)
SIZE(PrefillTile, 16) AT(PrefillTile, chunk, 0) AT(PrefillTile, first, 4) AT(PrefillTile, rows, 8)
  AT(PrefillTile, reserved, 12)
SIZE(Step, 104) AT(Step, header, 0) AT(Step, tokens, 8) AT(Step, positions, 16) AT(Step, row_chunk, 24)
  AT(Step, chunks, 32) AT(Step, tables, 40) AT(Step, logits, 48) AT(Step, full_items, 56) AT(Step, window_items, 64)
  AT(Step, shared_items, 72) AT(Step, sharers, 80) AT(Step, prefill_tiles, 88) AT(Step, last_tokens, 96)
SIZE(UploadSection, 16) AT(UploadSection, from, 0) AT(UploadSection, to, 4) AT(UploadSection, bytes, 8)
  AT(UploadSection, reserved, 12)
SIZE(UploadList, 208) AT(UploadList, sections, 0) AT(UploadList, reserved, 4) AT(UploadList, section, 16)
SIZE(UploadArgs, 32) AT(UploadArgs, host, 0) AT(UploadArgs, device, 8) AT(UploadArgs, turn, 16)
  AT(UploadArgs, copies, 24) AT(UploadArgs, copy_bytes, 28)
SIZE(EmbedArgs, 128) AT(EmbedArgs, step, 0) AT(EmbedArgs, table, 104) AT(EmbedArgs, x, 112) AT(EmbedArgs, format, 120)
  AT(EmbedArgs, hidden, 124)
SIZE(NormArgs, 200) AT(NormArgs, step, 0) AT(NormArgs, x, 104) AT(NormArgs, weight, 112) AT(NormArgs, y, 120)
  AT(NormArgs, slots, 128) AT(NormArgs, shares, 136) AT(NormArgs, t, 144) AT(NormArgs, t_term, 152)
  AT(NormArgs, t32, 160) AT(NormArgs, y_format, 168) AT(NormArgs, k, 172) AT(NormArgs, hidden, 176)
  AT(NormArgs, t_rows, 180) AT(NormArgs, select, 184) AT(NormArgs, terms, 188) AT(NormArgs, format, 192)
  AT(NormArgs, exact, 196)
SIZE(RouteArgs, 168) AT(RouteArgs, step, 0) AT(RouteArgs, t32, 104) AT(RouteArgs, w, 112) AT(RouteArgs, bias, 120)
  AT(RouteArgs, experts, 128) AT(RouteArgs, shares, 136) AT(RouteArgs, format, 144) AT(RouteArgs, hidden, 148)
  AT(RouteArgs, n_experts, 152) AT(RouteArgs, k, 156) AT(RouteArgs, exact, 160) AT(RouteArgs, reserved, 164)
SIZE(ExpertCut, 8) AT(ExpertCut, expert, 0) AT(ExpertCut, tiles, 4)
SIZE(SortArgs, 184) AT(SortArgs, step, 0) AT(SortArgs, experts, 104) AT(SortArgs, offsets, 112)
  AT(SortArgs, counts, 120) AT(SortArgs, slots, 128) AT(SortArgs, n_experts, 136) AT(SortArgs, k, 140)
  AT(SortArgs, slot_rows, 144) AT(SortArgs, mlp1_cuts, 152) AT(SortArgs, mlp2_cuts, 160) AT(SortArgs, mlp1_spans, 168)
  AT(SortArgs, mlp2_spans, 172) AT(SortArgs, tile_steps, 176) AT(SortArgs, places, 180)
SIZE(GatherArgs, 168) AT(GatherArgs, step, 0) AT(GatherArgs, input, 104) AT(GatherArgs, out, 112)
  AT(GatherArgs, slots, 120) AT(GatherArgs, in_term, 128) AT(GatherArgs, out_term, 136) AT(GatherArgs, k, 144)
  AT(GatherArgs, k_blocks, 148) AT(GatherArgs, in_rows, 152) AT(GatherArgs, out_rows, 156) AT(GatherArgs, terms, 160)
  AT(GatherArgs, reserved, 164)
SIZE(SortGatherArgs, 352) AT(SortGatherArgs, sort, 0) AT(SortGatherArgs, gather, 184)
SIZE(NormRouteArgs, 736) AT(NormRouteArgs, norm, 0) AT(NormRouteArgs, route, 200) AT(NormRouteArgs, sort, 368)
  AT(NormRouteArgs, gather, 552) AT(NormRouteArgs, sends, 720) AT(NormRouteArgs, reserved, 724)
  AT(NormRouteArgs, picks, 728)
SIZE(RopeStoreArgs, 184) AT(RopeStoreArgs, step, 0) AT(RopeStoreArgs, qkv, 104) AT(RopeStoreArgs, cos, 112)
  AT(RopeStoreArgs, sin, 120) AT(RopeStoreArgs, q, 128) AT(RopeStoreArgs, kv, 136) AT(RopeStoreArgs, page_bytes, 144)
  AT(RopeStoreArgs, head_bytes, 152) AT(RopeStoreArgs, format, 156) AT(RopeStoreArgs, head_dim, 160)
  AT(RopeStoreArgs, heads, 164) AT(RopeStoreArgs, kv_heads, 168) AT(RopeStoreArgs, windowed, 172)
  AT(RopeStoreArgs, paired, 176) AT(RopeStoreArgs, reserved, 180)
SIZE(AttentionArgs, 208) AT(AttentionArgs, step, 0) AT(AttentionArgs, q, 104) AT(AttentionArgs, kv, 112)
  AT(AttentionArgs, sinks, 120) AT(AttentionArgs, out, 128) AT(AttentionArgs, partials, 136)
  AT(AttentionArgs, arrived, 144) AT(AttentionArgs, out_term, 152) AT(AttentionArgs, page_bytes, 160)
  AT(AttentionArgs, head_bytes, 168) AT(AttentionArgs, head_dim, 172) AT(AttentionArgs, heads, 176)
  AT(AttentionArgs, kv_heads, 180) AT(AttentionArgs, windowed, 184) AT(AttentionArgs, window, 188)
  AT(AttentionArgs, out_rows, 192) AT(AttentionArgs, terms, 196) AT(AttentionArgs, format, 200)
  AT(AttentionArgs, reserved, 204)
SIZE(GemmArgs, 176) AT(GemmArgs, weights, 0) AT(GemmArgs, bias, 8) AT(GemmArgs, input, 16) AT(GemmArgs, in_term, 24)
  AT(GemmArgs, rows, 32) AT(GemmArgs, offsets, 40) AT(GemmArgs, out, 48) AT(GemmArgs, tiled, 56)
  AT(GemmArgs, tiled_term, 64) AT(GemmArgs, y, 72) AT(GemmArgs, best, 80) AT(GemmArgs, best_index, 88)
  AT(GemmArgs, groups, 96) AT(GemmArgs, n, 100) AT(GemmArgs, k_blocks, 104) AT(GemmArgs, row_blocks, 108)
  AT(GemmArgs, in_rows, 112) AT(GemmArgs, tiled_rows, 116) AT(GemmArgs, best_rows, 120) AT(GemmArgs, scale, 124)
  AT(GemmArgs, limit, 128) AT(GemmArgs, format, 132) AT(GemmArgs, cols, 136) AT(GemmArgs, weight_format, 140)
  AT(GemmArgs, terms, 142) AT(GemmArgs, half, 144) AT(GemmArgs, picked, 148) AT(GemmArgs, picks, 152)
  AT(GemmArgs, slot_rows, 160) AT(GemmArgs, cuts, 168)
SIZE(QkvStoreArgs, 360) AT(QkvStoreArgs, product, 0) AT(QkvStoreArgs, store, 176)
SIZE(NormQkvArgs, 568) AT(NormQkvArgs, qkv, 0) AT(NormQkvArgs, norm, 360) AT(NormQkvArgs, arrived, 560)
SIZE(Greedy, 8) AT(Greedy, token, 0) AT(Greedy, logit, 4)
SIZE(ArgmaxArgs, 144) AT(ArgmaxArgs, step, 0) AT(ArgmaxArgs, best, 104) AT(ArgmaxArgs, best_index, 112)
  AT(ArgmaxArgs, host, 120) AT(ArgmaxArgs, candidates, 128) AT(ArgmaxArgs, best_rows, 132) AT(ArgmaxArgs, drawable, 136)
  AT(ArgmaxArgs, reserved, 140)
SIZE(DrawArgs, 152) AT(DrawArgs, step, 0) AT(DrawArgs, logits, 104) AT(DrawArgs, host, 112) AT(DrawArgs, host_rows, 120)
  AT(DrawArgs, powers, 128) AT(DrawArgs, sums, 136) AT(DrawArgs, vocab, 144) AT(DrawArgs, drawable, 148)
SIZE(Scored, 184) AT(Scored, sum, 0) AT(Scored, largest, 8) AT(Scored, token, 12) AT(Scored, logit, 16)
  AT(Scored, reserved, 20) AT(Scored, top_tokens, 24) AT(Scored, top_logits, 104)
SIZE(ScoreArgs, 136) AT(ScoreArgs, step, 0) AT(ScoreArgs, logits, 104) AT(ScoreArgs, host, 112)
  AT(ScoreArgs, host_rows, 120) AT(ScoreArgs, vocab, 128) AT(ScoreArgs, reserved, 132)
SIZE(RangeArgs, 40) AT(RangeArgs, wire, 0) AT(RangeArgs, result, 8) AT(RangeArgs, tiles, 16) AT(RangeArgs, rows, 24)
  AT(RangeArgs, cols, 28) AT(RangeArgs, format, 32) AT(RangeArgs, reserved, 36)
SIZE(PackArgs, 48) AT(PackArgs, wire, 0) AT(PackArgs, out, 8) AT(PackArgs, members, 16) AT(PackArgs, rows, 20)
  AT(PackArgs, cols, 24) AT(PackArgs, row_blocks, 28) AT(PackArgs, k_blocks, 32) AT(PackArgs, shift, 36)
  AT(PackArgs, format, 40) AT(PackArgs, half, 44)
SIZE(PeakArgs, 16) AT(PeakArgs, out, 0) AT(PeakArgs, iterations, 8) AT(PeakArgs, never, 12)
SIZE(SortMlp1Args, 368) AT(SortMlp1Args, product, 0) AT(SortMlp1Args, sort, 176) AT(SortMlp1Args, most_rows, 360)
  AT(SortMlp1Args, reserved, 364)
SIZE(LayerCommand, 800) AT(LayerCommand, op, 0) AT(LayerCommand, blocks, 4) AT(LayerCommand, from, 8)
  AT(LayerCommand, to, 16) AT(LayerCommand, newest, 24) AT(LayerCommand, args, 32)
SIZE(OneLaunchArgs, 40) AT(OneLaunchArgs, commands, 0) AT(OneLaunchArgs, wiped, 8) AT(OneLaunchArgs, in_vain, 16)
  AT(OneLaunchArgs, count, 24) AT(OneLaunchArgs, pieces, 28) AT(OneLaunchArgs, patience, 32)
  AT(OneLaunchArgs, reserved, 36)
#undef SIZE
#undef AT
