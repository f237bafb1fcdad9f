// norm_qkv: rmsnorm_few and qkv_store at once, to the bit, for a single row in `fast`. Every block norms the row for
// itself while its first weights are on their way, so no product waits for a norm to end, and there is a launch less.
//
// Work   The first NORM_WAVES warps norm the row, to shared memory, in the order of rmsnorm_few. Each of the others
//        multiplies it by a unit of 16 weight rows.
// Stream All blocks read x. The last one that has read it stores it with the experts' outputs.
// Grid   blocks of WARPS units. The limits are those of rmsnorm_few; y and t are FP16.
#include "../mma/qkv_store.h"
#include "../norm.h"
#include "few.h"

enum : int {
  THREADS = NORM_QKV_THREADS,
  WARPS = THREADS / WAVE - NORM_WAVES,
  EXPERTS = NORM_QKV_MOST_EXPERTS_PER_TOKEN,
  HIDDEN = NORM_QKV_MOST_HIDDEN,
};
static_assert(NORM_THREADS * 8 == HIDDEN, "a thread of the norm's has a piece");

// A warp's unit in few.h, whose token is not in the stages.
struct Unit {
  enum : bool { IS_W16 = true };
  enum : int {
    ELEMENTS = FORMAT_F16,
    THREADS = WAVE,
    BLOCK_BYTES = W16::BLOCK_BYTES,
    TOKEN_BYTES = 0,
    WEIGHT_BYTES = W16::UNIT_BYTES,
    STAGE_BYTES = WEIGHT_BYTES,
    STAGES = NORM_QKV_SHARED_BYTES / (WARPS * STAGE_BYTES),
  };
  using Mine = Units<W16, FORMAT_F16, 1>;
};

struct Shared {
  alignas(ROW_BYTES) u16 row[HIDDEN + SLAB];               // behind it what few.h loads behind the last slab
  float sums[NORM_WAVES];
  int last;
};

DEV void norm_barrier() { asm volatile("bar.sync 1, %0;" ::"n"((int)NORM_THREADS) : "memory"); }

DEV void norm(const NormQkvArgs& a, Shared& s) {
  const NormArgs& n = a.norm;
  const int k = TID * 8;
  const bool exists = k < n.hidden;
  float w[8] = {}, x[8] = {}, shares[EXPERTS] = {};
  if (exists) {
    u32x4 packed[EXPERTS];
    UNROLL for (int i = 0; i < EXPERTS; i++)
      if (i < n.k) {
        packed[i] = *(const u32x4*)((const u16*)n.y + (i64)n.slots[i] * n.hidden + k);
        shares[i] = n.shares[i];
      }
    load8_aligned<FORMAT_F32>(n.x, k, x);
    load8_aligned<FORMAT_F32>(n.weight, k, w);
    float sum[8] = {};
    UNROLL for (int i = 0; i < EXPERTS; i++)
      if (i < n.k)
        UNROLL for (int j = 0; j < 8; j++)
          sum[j] = fma_rn(shares[i], from_16<FORMAT_F16>((u16)(packed[i][j / 2] >> j % 2 * 16)), sum[j]);
    UNROLL for (int j = 0; j < 8; j++) x[j] = add_rn(x[j], sum[j]);
  }
  const float scale = inverse_root(block_sum<NORM_WAVES>(sum_of_squares(x), s.sums), n.hidden);
  float t[8];
  norm_piece(x, w, scale, exists, t);
  store_terms8<FORMAT_F16>(s.row + k, 0, 1, t);
  barrier();
  if (TID == 0) {
    __threadfence();                                       // this block has read x
    s.last = atomic_add(a.arrived, 1) == GRID - 1;
  }
  norm_barrier();
  if (!s.last) return;
  if (TID == 0) *a.arrived = 0;
  if (exists && *a.qkv.product.rows > 0) store8(n.x + k, 8, x);
}

DEV void multiply(const NormQkvArgs& a, Shared& s) {
  const GemmArgs& p = a.qkv.product;
  const int warp = TID / WAVE - NORM_WAVES, unit = BID * WARPS + warp;
  const Chunk c = {0, 0, p.rows[0], unit, unit < p.row_blocks * 4};
  Few<Unit>::Source source(p, c);
  source.row = shared_address(s.row);
  const u32 stages = shared_address(DYNAMIC_SHARED) + warp * Unit::STAGES * Unit::STAGE_BYTES;
  source.start(stages);
  Place place = {c, unit * 16 + LANE / 4 * 2, LANE % 4, {}, nullptr, nullptr};
  place.bias = QkvStore::bias(p, 0, place.row);
  QkvStore::Tokens<1> tokens;
  tokens.load(p, place);
  barrier();
  barrier();                                               // the row is there
  float sum[1][4] = {};
  Few<Unit>::multiply(stages, 0, p.k_blocks, source, sum);
  QkvStore::store_tokens<1, FORMAT_F16>(p, place, sum[0], tokens);
}

KERNEL(norm_qkv_f16, NormQkvArgs, THREADS, 1, 0) {
  SHARED Shared s;
  if (TID < NORM_THREADS) norm(a, s);
  else multiply(a, s);
}
