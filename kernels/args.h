// What host and device agree on: one argument struct a kernel, and the layout of everything in device memory.
//
// Every kernel takes one struct by value. `src/backend/gpu/args.rs` mirrors this file; both assert each size.
//
//   Activations  [terms][K / 64][rows][64] of 16 bits ("tiled"): K in slabs of 64, a row's 128 bytes of a slab in eight
//                pieces of 16 bytes, piece p at place p ^ (row % 8). A run of rows of one slab is contiguous and, where
//                it starts at a multiple of 8, lies as a matrix unit's shared memory wants it. K is filled up with zeros.
//   Terms        `fast` has one. `exact` has x = hi + lo (FP16) or hi + mid + lo (BF16), each term `in_term` elements
//                behind the last; see store_terms in gpu/gpu.h for the scale of the later ones.
//   KV cache     a page holds KV_PAGE positions of one layer: [kv head][K: KV_PAGE rows | V: KV_PAGE rows], a row being
//                head_dim elements in pieces of 8, piece p at place p ^ (position % the largest power of two that divides
//                head_dim / 8).
//   Weights      as the pack_* kernels of a target write them; on the host and on the wire row-major in tiles of 32 rows.
#pragma once

enum : int {
  KV_PAGE = 64,        // positions in a page of the KV cache
  SLAB = 64,           // K elements in a slab of tiled activations and in a k block of packed weights
  GROUP_ALIGN = 8,     // an expert's rows start at a multiple of this
  WIRE_ROWS = 32,      // rows in a tile of weights as the host sends them
};

// Formats of weights, activations and KV.
enum : int { FORMAT_F16 = 0, FORMAT_BF16 = 1, FORMAT_F32 = 2, FORMAT_MXFP4 = 3 };

// Counts of the step under way; the first thing uploaded.
struct StepHeader {
  int rows;            // rows in the step; those that decode (chunks of one row) come first
  int decode_rows;     // chunks of one row
  int chunks;
  int logits_rows;     // rows whose logits are wanted
  int full_items;      // attention work of the rows that decode, full layers
  int window_items;    // the same, windowed layers
  int prefill_tiles;   // attention work of the chunks of several rows
  int turn;            // which of the host's buffers this step answers into
  float temperature;   // that rows are drawn at
  float topp;          // the mass of the nucleus; 0: all tokens
  float least;         // a token of less probability is no part of a nucleus, or there may be more than DRAW_TOKENS of them
  int reserved;
};
static_assert(sizeof(StepHeader) == 48, "mirrored in args.rs");

// Consecutive rows of one sequence; chunks are in order of their rows. Position p lies in the page
// tables[full + p / KV_PAGE] of the full layers and tables[window + p / KV_PAGE % window_pages] of the windowed ones.
struct ChunkInfo {
  int first_row;
  int rows;
  int first_position;
  int slot;            // the sequence's, where its last token is kept
  int full;
  int window;
  int window_pages;
  int reserved;
};
static_assert(sizeof(ChunkInfo) == 32, "mirrored in args.rs");

// A row whose logits are wanted; slot -1: its token is not kept. The coin is what a token is drawn by.
struct LogitsRowInfo { int row; int slot; float coin; };
static_assert(sizeof(LogitsRowInfo) == 12, "mirrored in args.rs");

// Part of one decoding row's attention: `tokens` visible keys, the first of them in unit `first_unit`. Unit u is the keys
// ATTENTION_UNIT * u and on, by absolute position; ATTENTION_GROUP * g and on are the units of group g. One of `parts`
// parts; where these are several, each is (at most) the `run` units from a multiple of `run` on (1, 4 or 16) and leaves
// partial sums: of its unit if `run` is 1, else of each of its groups. The row's first unit's (group's) is slot `partial`
// of the workspace, the next one's slot `partial` + 1. An item's keys are in at most 32 pages.
struct AttentionItem { int row; int first_unit; int tokens; int parts; int partial; int run; int reserved[2]; };
static_assert(sizeof(AttentionItem) == 32, "mirrored in args.rs");
enum : int { ATTENTION_UNIT = 128, ATTENTION_GROUP = 4 };

// Query rows of one chunk that one block takes: `rows` rows from the chunk's row `first` on.
struct PrefillTile { int chunk; int first; int rows; int reserved; };

// The step's plan on the device, at addresses that never change.
struct Step {
  const StepHeader* header;
  const int* tokens;             // [rows]; -1 - slot: the token sampled last in that slot
  const int* positions;          // [rows]
  const int* row_chunk;          // [rows]
  const ChunkInfo* chunks;
  const int* tables;             // page numbers
  const LogitsRowInfo* logits;   // [logits_rows]
  const AttentionItem* full_items;
  const AttentionItem* window_items;
  const PrefillTile* prefill_tiles;
  int* last_tokens;              // [slots]: the token sampled last
};
static_assert(sizeof(Step) == 88, "mirrored in args.rs");

// upload: brings the plan from pinned host memory, where there are `copies` of it, used in turn by themselves. Each starts
// with an UploadList.
struct UploadSection { unsigned from; unsigned to; unsigned bytes; unsigned reserved; };   // multiples of 16
struct UploadList { unsigned sections; unsigned reserved[3]; UploadSection section[12]; };
struct UploadArgs {
  const unsigned char* host;     // [copies][copy_bytes]
  unsigned char* device;
  unsigned* turn;                // two numbers, zeros at first: the copy to read, blocks of this step that are done
  unsigned copies;
  unsigned copy_bytes;
};
static_assert(sizeof(UploadArgs) == 32, "mirrored in args.rs");

// embed: x[rows][hidden] (float32) = the table's rows named by the tokens.
struct EmbedArgs {
  Step step;
  const void* table;             // [vocab][hidden], BF16 or F32
  float* x;
  int format;
  int hidden;
};
static_assert(sizeof(EmbedArgs) == 112, "mirrored in args.rs");

// rmsnorm (CUDA has a `norm` of its own): adds what the experts gave (if asked), norms, writes the next product's input.
struct NormArgs {
  Step step;
  float* x;                      // [rows][hidden], updated if y is not NULL and `select` is 0
  const float* weight;           // [hidden]
  const void* y;                 // [slots of routed rows][hidden], F16 or F32 (`y_format`); NULL: nothing to add
  const int* slots;              // [rows][k]: where in y a row's experts are, in order of the expert's index
  const float* shares;           // [rows][k]
  unsigned short* t;             // tiled
  long long t_term;              // elements from one term to the next
  float* t32;                    // [rows][hidden] float32 for the router; NULL: not wanted
  int y_format;
  int k;
  int hidden;
  int t_rows;                    // rows of the tiled buffer
  int select;                    // 1: row i is row step.logits[i].row, there are header->logits_rows of them
  int terms;
  int format;                    // of t: FORMAT_F16 or FORMAT_BF16
  int exact;                     // 1: sums in float64, to the letter of the float32 baseline
};
static_assert(sizeof(NormArgs) == 184, "mirrored in args.rs");

// route: the k largest of t32 w^T + bias (ties: lower index), softmax over them; written in order of the expert's index.
struct RouteArgs {
  Step step;
  const float* t32;              // [rows][hidden]
  const void* w;                 // [experts][hidden], BF16 or F32
  const float* bias;             // [experts]
  int* experts;                  // [rows][k]
  float* shares;                 // [rows][k]
  int format;
  int hidden;
  int n_experts;
  int k;
  int exact;
  int reserved;
};
static_assert(sizeof(RouteArgs) == 152, "mirrored in args.rs");

// sort: gives each (row, expert) pair a slot; an expert's slots are consecutive, in order of rows, and start at a
// multiple of GROUP_ALIGN.
struct SortArgs {
  Step step;
  const int* experts;            // [rows][k]
  int* offsets;                  // [n_experts + 1]: first slot of each expert, the end last
  int* counts;                   // [n_experts]
  int* slots;                    // [rows][k]
  int n_experts;
  int k;
};
static_assert(sizeof(SortArgs) == 128, "mirrored in args.rs");

// gather: copies tiled rows to their slots.
struct GatherArgs {
  Step step;
  const unsigned short* in;      // tiled [terms][k_blocks][in_rows][64]
  unsigned short* out;           // tiled [terms][k_blocks][out_rows][64]
  const int* slots;              // [rows][k]
  long long in_term;
  long long out_term;
  int k;
  int k_blocks;
  int in_rows;
  int out_rows;
  int terms;
  int reserved;
};
static_assert(sizeof(GatherArgs) == 152, "mirrored in args.rs");

// sort_gather: both at once, for few rows.
struct SortGatherArgs {
  SortArgs sort;
  GatherArgs gather;             // whose slots are not read
};
static_assert(sizeof(SortGatherArgs) == 280, "mirrored in args.rs");

// norm_route: rmsnorm (of rows, not of those selected) and route at once, for few rows; sort and gather, too, where the bucket
// is of one row.
struct NormRouteArgs {
  NormArgs norm;                 // whose t32 is not written
  RouteArgs route;               // whose t32 is not read
  SortArgs sort;
  GatherArgs gather;
  int alone;                     // 1: sort and gather
  int reserved;
};
static_assert(sizeof(NormRouteArgs) == 624, "mirrored in args.rs");

// rope_store: rotates queries and keys, writes q and the KV cache. Row p of cos and sin is position p.
struct RopeStoreArgs {
  Step step;
  const float* qkv;              // [rows][head_dim * (heads + 2 kv_heads)]
  const float* cos;              // [positions][head_dim / 2]
  const float* sin;
  void* q;                       // [rows][heads][head_dim]; F16/BF16 times log2(e) / sqrt(head_dim), F32 as it is
  unsigned char* kv;             // this layer's pages
  long long page_bytes;
  int head_bytes;                // from one kv head's K to the next head's K
  int format;                    // of q and the cache: F16, BF16 or F32
  int head_dim;
  int heads;
  int kv_heads;
  int windowed;
};
static_assert(sizeof(RopeStoreArgs) == 160, "mirrored in args.rs");

// attention (decode, prefill and plain): tiled output [terms][heads * head_dim / 64][out_rows][64], in `format` F16 or BF16
// (of the output; the cache's own format is kv_format).
struct AttentionArgs {
  Step step;
  const void* q;
  const unsigned char* kv;
  const float* sinks;            // [heads]
  unsigned short* out;
  float* partials;               // workspace of attention_decode
  int* arrived;                  // [rows][kv_heads] zeros, left as zeros
  long long out_term;
  long long page_bytes;
  int head_bytes;
  int kv_format;
  int head_dim;
  int heads;
  int kv_heads;
  int windowed;
  int window;                    // keys a row of a windowed layer sees, its own among them
  int out_rows;
  int terms;
  int format;
};
static_assert(sizeof(AttentionArgs) == 192, "mirrored in args.rs");

// The matrix products. Weights are [groups] matrices of n rows and k_blocks * 64 columns, packed by the target's pack
// kernels; row_blocks is the number of the target's row blocks. Group g has rows[g] input rows from offsets[g] on;
// dense products have one group, offsets NULL, and rows points to their count. What an epilogue does not use is NULL or 0.
struct GemmArgs {
  const unsigned char* weights;
  const float* bias;             // [groups][n]
  const unsigned short* in;      // tiled [terms][k_blocks][in_rows][64]
  long long in_term;
  const int* rows;
  const int* offsets;
  float* out;                    // qkv: [rows][n] written; attn_out: x [rows][n] added to; logits: [rows][n] written
  unsigned short* tiled;         // mlp1: gated unit, tiled [terms][n / 2 / 64 rounded up][tiled_rows][64]
  long long tiled_term;
  void* y;                       // mlp2: [slots][n], F16 (fast) or F32 (exact)
  float* best;                   // greedy: [row blocks of the launch's tiles][best_rows] largest logit ...
  int* best_index;               // ... and its lowest index
  int groups;
  int n;
  int k_blocks;
  int row_blocks;
  int in_rows;
  int tiled_rows;
  int best_rows;
  float scale;                   // a power of two taken out of the weights: products are multiplied by it
  float limit;                   // of the gated unit
  int format;                    // of `tiled` and of the input: F16 or BF16
  int cols;                      // plain_* only, whose weights are wire tiles: elements of a row,
  short weight_format;           // BF16 or F32,
  short terms;                   // and the terms of `in` and `tiled`; y is F16 with one, F32 with more
};
static_assert(sizeof(GemmArgs) == 144, "mirrored in args.rs");

// argmax: the largest of each logits row's candidates (ties: lowest index; all NaN: 0), to the host and to last_tokens.
struct Greedy { unsigned token; float logit; };
struct ArgmaxArgs {
  Step step;
  const float* best;             // [candidates][best_rows]; argmax_logits: whole rows [logits_rows][candidates]
  const int* best_index;         // argmax_logits: not read
  Greedy* host;                  // pinned, [turns][best_rows]
  int candidates;
  int best_rows;
};
static_assert(sizeof(ArgmaxArgs) == 120, "mirrored in args.rs");

// draw: a token from each row of logits, to the host and to last_tokens; -1 where the host is to draw it, and the largest
// logit's token stays in last_tokens.
enum : int { DRAW_TOKENS = 2048 };
struct DrawArgs {
  Step step;                     // whose last_tokens are those with the rows' largest logits
  const float* logits;           // [logits_rows][vocab]
  int* host;                     // pinned, [turns][host_rows]
  long long host_rows;
  const unsigned long long* powers;   // [32]: bits of 2^(i / 32) less i << 47
  double* sums;                  // [logits_rows]: of each row's exponentials, for tests; NULL: not wanted
  int vocab;
  int reserved;
};
static_assert(sizeof(DrawArgs) == 136, "mirrored in args.rs");

// range: smallest and largest exponents (value = m * 2^e, 1 <= m < 2) among the non-zero weights of a tensor on the wire:
// BF16 values, or the E8M0 scales (minus 127) of MXFP4 blocks; of BF16 also the least of the rows' largest exponents.
// result: {smallest, largest, weakest row}, atomically; start with {INT_MAX, INT_MIN, INT_MAX}.
struct RangeArgs {
  const unsigned char* wire;
  int* result;
  long long tiles;               // tiles of WIRE_ROWS rows
  int rows;                      // of one matrix; the last tile of each matrix is filled up with zeros
  int cols;
  int format;                    // FORMAT_BF16 or FORMAT_MXFP4
  int reserved;
};
static_assert(sizeof(RangeArgs) == 40, "mirrored in args.rs");

// pack_*: from the wire to what a target's products read. A wire tile is WIRE_ROWS rows: BF16 and F32 row-major; MXFP4
// codes (two a byte, low nibble first) of all rows, then E8M0 scales of all rows. Values become value * 2^shift.
struct PackArgs {
  const unsigned char* wire;     // [members][rows / WIRE_ROWS rounded up] tiles
  unsigned char* out;
  int members;
  int rows;
  int cols;
  int row_blocks;                // of the target, a member
  int k_blocks;
  int shift;
  int format;                    // to become: FORMAT_F16 or FORMAT_BF16
  int gated;                     // rows alternate gate and up
};
static_assert(sizeof(PackArgs) == 48, "mirrored in args.rs");

// synthesize_*: a tensor on the wire from a seed, for measuring without a checkpoint. BF16: normal with the given
// standard deviation (in steps of bfloat16), plus `mean`; MXFP4: random codes, scales 2^exponent or 2^(exponent - 1);
// F32: normal.
struct SynthesizeArgs {
  unsigned char* wire;
  long long tiles;
  int rows;                      // of one matrix
  int cols;
  unsigned seed;
  float deviation;
  float mean;
  int exponent;
  int format;
  int reserved;
};
static_assert(sizeof(SynthesizeArgs) == 48, "mirrored in args.rs");

// matrix_peak: products of random 16-bit operands that never leave the multiprocessor, for a ceiling. A block does
// MATRIX_PEAK_FLOPS * iterations operations.
struct MatrixPeakArgs {
  float* out;                    // never written; the compiler does not know
  int iterations;
  int never;                     // 0
};
static_assert(sizeof(MatrixPeakArgs) == 16, "mirrored in args.rs");
enum : int { MATRIX_PEAK_FLOPS = 1 << 22 };
