// one_launch: the layers of a step of one decoding row in one launch, in `fast`. A step of one row takes as long as its
// launches: at each one the memory idles from the last bytes that a kernel asks for to the first ones of the next.
//
// Commands. LayerCommand, one for each kernel that a layer has otherwise: norm, qkv_store, attention_decode, attn_out,
//           norm_route, mlp1, mlp2. All sums are those of these kernels, to the bit.
// Warps     have parts of their own, and go from layer to layer by themselves. Some multiply for queries, keys and
//           values, some what attention gives. Each of these has a ring buffer, and asks for its next weights as soon
//           as there is room: they are on their way while it waits for its row. The row's warps, as many as a norm
//           has, do the rest; only the experts' weights are not known ahead.
// Values    cross blocks without a barrier: gpu/handed_on.h says how. Each has memory of its own within the step, which
//           is written once; there are two such memories, and a launch uses one and wipes the other. Every block norms
//           the row for itself.
// Waiting.  A part waits for values of parts before it alone, and all blocks are on the device at once. So some block
//           always goes on. Warps that would poll for long wait for warps of their own block first, who are about to
//           have done the same as others: polling takes the L2 from the weights.
// Cache.    Keys and values of earlier steps were written before the launch. The newest are stored for later steps, and
//           handed on to attention beside it.
// Code      runs once a layer, and fetching it from memory takes longer than running it: loops are not unrolled where
//           nothing is won, and what the commands say lies in shared memory before it is needed.
//
// Grid: one block a multiprocessor. Slabs of a row: 18 to 64 in all products, of attention's outputs an even number.
#pragma once
#include "row_attention.h"
#include "row_stream.h"

// Who multiplies: the third of the dense warps has units of attn_out in the last blocks, as many as are left when each
// block has one, and of qkv in the others.
struct Dense {
  int warp, out_too;                                       // so many blocks
  DEV Dense(int warp) : warp(warp), out_too(max(0, min(GRID, units_of(s.layers[0].out) - GRID))) {}
  DEV int from_last() const { return GRID - 1 - BID; }
  DEV bool is_out() const { return warp == 3 || (warp == 2 && from_last() < out_too); }
  DEV int qkv_first() const { return warp * GRID + BID; }
  DEV int qkv_stride() const { return 3 * GRID - out_too; }
  DEV int out_first() const { return (3 - warp) * GRID + from_last(); }
  DEV int out_stride() const { return GRID + out_too; }
  DEV int out_warps() const { return from_last() < out_too ? 2 : 1; }  // of this block
};
enum : int {
  ROW_RINGS_BYTES = ROW_WARPS * ExpertStream::BYTES,
  QKV_RING_BYTES = QkvStream::BYTES,                       // of the first two dense warps
  OUT_RING_BYTES = OutStream::BYTES,                       // of the others
  RINGS_BYTES = ROW_RINGS_BYTES + 2 * (QKV_RING_BYTES + OUT_RING_BYTES),
};

// Fetches the layer after the one that is about to begin. All threads see it behind its norm.
DEV void fetch_next(const LayerCommand* commands, int layer, int layers, int warp) {
  if (layer + 1 < layers) fetch_layer(commands, layer + 1, warp * WAVE + LANE, DENSE_WARPS * WAVE);
}

// ---- queries, keys and values

DEV void store_qkv(const QkvStoreArgs& a, const Place& p, const float* acc, const QkvStore::Tokens<1>& tokens,
                   u16* newest) {
  const RopeStoreArgs& s = a.store;
  const QkvStore::Unit unit(s, p.row);
  u32 low, high;
  QkvStore::finish<FORMAT_F16>(a.product, p, unit, QkvStore::scale_of(s, unit), acc, tokens.cos[0], tokens.sin[0], low,
                               high);
  if (tokens.to[0] == nullptr) return;
  u32* const at = (u32*)tokens.to[0];
  u32* const further = (u32*)(tokens.to[0] + tokens.further[0]);
  if (unit.query) {
    hand_on(at, low), hand_on(further, high);
  } else {
    // Keys' heads come first, then values'.
    u32* const fresh = (u32*)(newest + (unit.head - s.heads) * s.head_dim + unit.element) + LANE % 4;
    hand_on(fresh, low), hand_on(fresh + s.head_dim / 4, high);
    *at = low, *further = high;
  }
}

DEV void multiply_qkv(const LayerCommand* commands, int layers, const Dense& d, u32 ring) {
  QkvStream stream(ring);
  const int first = d.qkv_first(), stride = d.qkv_stride(), units = units_of(s.layers[0].qkv.product);
  if (first < units) stream.then(s.layers[0].qkv.product, 0, first);
  stream.start();
  for (int layer = 0; layer < layers; layer++) {
    const QkvStoreArgs& a = layer_of(layer).qkv;
    const GemmArgs& p = a.product;
    fetch_next(commands, layer, layers, d.warp);
    int unit = first;
    const Chunk one_row = {0, 0, 1, 0, 1};
    Place place = place_of(one_row, unit);
    QkvStore::Tokens<1> tokens = {};
    const auto load = [&] { place.bias = QkvStore::bias(p, 0, place.row), tokens.load(p, place); };
    if (unit < units) load();
    meet(NORMED_BARRIER, THREADS);
    while (unit < units) {
      const int next = unit + stride;
      if (next < units) stream.then(p, 0, next);
      else if (layer + 1 < layers) stream.then(layer_of(layer + 1).qkv.product, 0, first);
      float sum[4] = {};
      stream.multiply(shared_address(s.t), p.k_blocks, sum);
      store_qkv(a, place, sum, tokens, layer_of(layer).newest);
      unit = next, place.row = row_of(unit);
      if (unit < units) load();
    }
    tell(DENSE_BARRIER, THREADS);
  }
}

// ---- what attention gives

DEV float add_flushing(float a, float b) {                 // as reductions in the L2 do, which attn_out is otherwise
  float sum;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}

DEV void multiply_out(const LayerCommand* commands, int layers, const Dense& d, u32 ring) {
  OutStream stream(ring);
  const int first = d.out_first(), stride = d.out_stride(), units = units_of(s.layers[0].out);
  const int rank = 3 - d.warp, warps = d.out_warps();
  if (first < units) stream.then(s.layers[0].out, 0, first);
  stream.start();
  for (int layer = 0; layer < layers; layer++) {
    const GemmArgs& a = layer_of(layer).out;
    fetch_next(commands, layer, layers, d.warp);
    meet(NORMED_BARRIER, THREADS);                         // the residual row is there
    float2 bias = bias_pair(a, 0, row_of(first));
    if (first < units) {
      const u32x4* from = (const u32x4*)a.input;
      const int pieces = a.k_blocks * SLAB / 8;
      for (int i = rank * WAVE + LANE; i < pieces; i += 4 * warps * WAVE) {
        u32x4 v[4] = {};
        for (;;) {
          bool all = true;
          UNROLL for (int j = 0; j < 4; j++) v[j] = peek(from + min(i + j * warps * WAVE, pieces - 1));
          UNROLL for (int j = 0; j < 4; j++) all &= is_there(v[j]);
          if (all || !still_wait()) break;
        }
        UNROLL for (int j = 0; j < 4; j++)
          if (i + j * warps * WAVE < pieces) ((u32x4*)s.wide)[i + j * warps * WAVE] = v[j];
      }
    }
    meet(OUT_BARRIER, warps * WAVE);
    for (int unit = first; unit < units; unit += stride) {
      const int row = row_of(unit);
      if (unit != first) bias = bias_pair(a, 0, row);
      if (unit + stride < units) stream.then(a, 0, unit + stride);
      else if (layer + 1 < layers) stream.then(layer_of(layer + 1).out, 0, first);
      float sum[4] = {};
      stream.multiply(shared_address(s.wide), a.k_blocks, sum);
      if (row >= a.n || !stores()) continue;
      const float v0 = sum[0] * a.scale, v1 = sum[2] * a.scale;
      const float2 x = make_float2(add_flushing(s.x[row], v0 + bias.x), add_flushing(s.x[row + 1], v1 + bias.y));
      hand_on((float2*)(a.out + row), x);
      float* const also = layer_of(layer).out_also;
      if (also) *(float2*)(also + row) = x;
    }
    tell(DENSE_BARRIER, THREADS);
  }
}

// ---- the router

// An expert's weights, on their way to shared memory while the row is waited for. One warp's.
DEV void copy_router(const RouteArgs& a, int expert) {
  const u16* row = (const u16*)a.w + (i64)expert * a.hidden;
  ROLLED for (int k = LANE * 8; k < a.hidden; k += ROUTE_K_TILE) copy16(shared_address(s.router + k), row + k);
  commit_copies();
}
// In the order of multiply_row() and wave_sums(), for the first lane.
DEV float multiply_router(const RouteArgs& a) {
  float sum = 0.f;
#pragma unroll 2
  for (int k = LANE * 8; k < a.hidden; k += ROUTE_K_TILE) {
    const u32x4 w = *(const u32x4*)(s.router + k);
    UNROLL for (int half = 0; half < 2; half++) {
      const f32x4 t = *(const f32x4*)(s.x + k + half * 4);
      UNROLL for (int j = 0; j < 4; j++)
        add_product(sum, from_16<FORMAT_BF16>((u16)(w[half * 2 + j / 2] >> j % 2 * 16)), t[j]);
    }
  }
  constexpr int TREE[] = {8, 4, 2, 1, 16};
  UNROLL for (int o : TREE) sum = add_rn(sum, shfl_xor(sum, o));
  return shfl(sum, 0);
}

// One warp's: the picks, to shared memory in order of the experts. Lane i has logits i, i + 32 and so on. Lane i gets
// the i-th largest and where it is among the picks.
struct Picked { int place; float logit; };
template <int MINE> DEV Picked pick(const float* logits, int n, int k) {
  float logit[MINE] = {};
  u32 order[MINE];
  UNROLL for (int i = 0; i < MINE; i++) {
    const int expert = LANE + i * WAVE;
    order[i] = 0;
    if (expert < n) logit[i] = take(logits + expert), order[i] = order_of(logit[i]) + 1;
  }
  int mine = n;
  Picked picked = {0, 0.f};
  ROLLED for (int rank = 0; rank < k; rank++) {
    u32 best = 0;
    UNROLL for (int i = 0; i < MINE; i++) best = max(best, order[i]);
    best = __reduce_max_sync(~0u, best);
    u32 expert = n;                                        // the lowest of equal ones
    UNROLL for (int i = MINE - 1; i >= 0; i--) if (order[i] == best) expert = LANE + i * WAVE;
    expert = __reduce_min_sync(~0u, expert);
    float value = 0.f;
    UNROLL for (int i = 0; i < MINE; i++)
      if ((int)expert == LANE + i * WAVE) value = logit[i], order[i] = 0;
    value = shfl(value, expert % WAVE);
    if (LANE == rank) mine = expert, picked.logit = value;
  }
  ROLLED for (int i = 0; i < k; i++) picked.place += shfl(mine, i) < mine;
  if (LANE < k) s.picks[picked.place] = mine;
  return picked;
}
// Their shares, by the sums of share_experts() in route.h.
DEV void share(const Picked& picked, int k) {
  const float largest = shfl(picked.logit, 0), exponential = exp_f32((float)((double)picked.logit - (double)largest));
  double sum = 0;
  ROLLED for (int i = 0; i < k; i++) sum += (double)shfl(exponential, i);
  if (LANE < k) s.shares[picked.place] = (float)((double)exponential / sum);
}

// ---- the row's way through the layers

// `turn`: sums of one norm are still read when the next one's are stored.
DEV float row_sum(float v, int turn) { return block_sum<NORM_WAVES>(v, s.sums[turn], [] { meet_row(); }); }
DEV void store_row(int k, const float (&t)[8]) {
  u32x4 packed;
  UNROLL for (int j = 0; j < 8; j += 2) packed[j / 2] = leading_terms<FORMAT_F16>(t[j], t[j + 1]);
  *(u32x4*)(s.t + k) = packed;
}
DEV void store_wide_row(int k, const float (&t)[8]) {
  *(f32x4*)(s.x + k) = four_of(t), *(f32x4*)(s.x + k + 4) = four_of(t + 4);
}

// Adds the experts' outputs of the layer before.
DEV void add_experts(const NormArgs& n, int k, float (&x)[8]) {
  u32x4 packed[EXPERTS] = {};                              // else they live from layer to layer
  const u16* y = (const u16*)n.y + k;
  for (;;) {
    bool all = true;
    UNROLL for (int i = 0; i < EXPERTS; i++) if (i < n.k) packed[i] = peek((const u32x4*)(y + (i64)i * n.hidden));
    UNROLL for (int i = 0; i < EXPERTS; i++) if (i < n.k) all &= is_there(packed[i]);
    if (all || !still_wait()) break;
  }
  float sum[8] = {};
  UNROLL for (int i = 0; i < EXPERTS; i++)
    if (i < n.k)
      UNROLL for (int j = 0; j < 8; j++)
        sum[j] = fma_rn(s.shares[i], from_16<FORMAT_F16>((u16)(packed[i][j / 2] >> j % 2 * 16)), sum[j]);
  UNROLL for (int j = 0; j < 8; j++) x[j] = add_rn(x[j], sum[j]);
}

// The row with the experts' outputs of the layer before, and its norm, which the dense warps wait for.
DEV void norm(int layer) {
  const NormArgs& n = layer_of(layer).norm;
  const int k = TID * 8;
  const bool exists = k < n.hidden;
  float w[8] = {}, x[8] = {};
  if (exists) {
    load8_aligned<FORMAT_F32>(n.weight, k, w);
    if (n.k == 0) load8_aligned<FORMAT_F32>(n.x, k, x);    // of an earlier launch
    else take8(n.x + k, x), add_experts(n, k, x);
  }
  const float scale = inverse_root(row_sum(sum_of_squares(x), 0), n.hidden);
  float t[8];
  norm_piece(x, w, scale, exists, t);
  store_row(k, t);
  store_wide_row(k, x);
  tell(NORMED_BARRIER, THREADS);
}

// The row with what attention gives, its norm, and the experts that the router picks.
DEV void route(const LayerCommand* commands, int layer, bool last) {
  const Layer& l = layer_of(layer);
  const NormArgs& n = l.router.norm;
  const int thread = TID, k = thread * 8;
  const bool exists = k < n.hidden, picks = thread / WAVE == ROW_WARPS - 1;
  const int experts = l.router.route.n_experts, first = GRID - 1 - BID;
  float w[8] = {}, bias = 0.f;
  if (exists) load8_aligned<FORMAT_F32>(n.weight, k, w);
  if (picks && first < experts) copy_router(l.router.route, first), bias = l.router.route.bias[first];
  meet(DENSE_BARRIER, THREADS);
  float x[8] = {};
  if (exists) take8(n.x + k, x);
  const float scale = inverse_root(row_sum(sum_of_squares(x), 1), n.hidden);
  float t[8];
  norm_piece(x, w, scale, exists, t);
  store_row(k, t);
  store_wide_row(k, t);
  meet_row();
  Picked picked = {};
  if (picks) {
    ROLLED for (int expert = first; expert < experts; expert += GRID) {
      if (expert != first) copy_router(l.router.route, expert), bias = l.router.route.bias[expert];
      wait_copies<0>();
      __syncwarp();
      const float logit = add_rn(multiply_router(l.router.route), bias);
      if (LANE < ONE_LAUNCH_LOGITS) hand_on(l.logits + LANE * experts + expert, logit);
    }
    const float* logits = l.logits + BID % ONE_LAUNCH_LOGITS * experts;
    if (experts <= WAVE) picked = pick<1>(logits, experts, l.router.route.k);
    else picked = pick<MOST_N_EXPERTS / WAVE>(logits, experts, l.router.route.k);
  }
  meet_row();
  if (!picks) return;
  share(picked, l.router.route.k);
  if (last && BID == 0) {
    // What later launches read.
    __syncwarp();
    const NormRouteArgs& a = *(const NormRouteArgs*)commands[layer * OF_LAYER + ROUTE].args;
    place_alone<WAVE>(a, s.picks, LANE);
    if (LANE < l.router.route.k) a.route.shares[LANE] = s.shares[LANE];
  }
}

// ---- the experts' products

// Units of both products, one after the other: of mlp1 of all picked experts, then of mlp2 of the block's one.
DEV void multiply_experts(int layer, bool last, u32 rings) {
  const GemmArgs &up = layer_of(layer).mlp1, &down = layer_of(layer).mlp2;
  const int k = layer_of(layer).router.route.k, warp = TID / WAVE, width = down.k_blocks * SLAB;
  const int up_units = units_of(up), down_units = units_of(down), all_up = k * up_units;
  const int slot = BID % k, of_slot = (GRID - slot + k - 1) / k;
  const int up_stride = ROW_WARPS * GRID, down_stride = ROW_WARPS * of_slot;
  ExpertStream stream(rings + warp * ExpertStream::BYTES);
  // Units are numbered: those of mlp2 behind those of mlp1.
  const auto after = [&](int i) {
    if (i < all_up) return i + up_stride < all_up ? i + up_stride : all_up + warp * of_slot + BID / k;
    return i + down_stride;
  };
  const int first = warp * GRID + BID < all_up ? warp * GRID + BID : all_up + warp * of_slot + BID / k;
  const auto then = [&](int i) {
    if (i < all_up) {
      const int of = quotient(i, up_units);
      stream.then(up, s.picks[of], i - of * up_units);
    } else if (i - all_up < down_units) {
      stream.then(down, s.picks[slot], i - all_up);
    }
  };
  then(first);
  stream.start();
  bool gated = false;
  ROLLED for (int i = first;; i = after(i)) {
    const bool is_up = i < all_up;
    if (!is_up && !gated) {                                // the gated units of the block's expert, and zeros behind
      const int features = up.n / 2;
      const u32x4* from = (const u32x4*)((const u16*)down.input + (i64)slot * width);
      for (int i = TID; i < (width + (EXPERT_SLABS - 1) * SLAB) / 8; i += ROW_WARPS * WAVE)
        ((u32x4*)s.wide)[i] = i < features / 8 ? take(from + i) : u32x4{};
      meet_row();
      gated = true;
    }
    if (i - all_up >= down_units) break;
    const GemmArgs& a = is_up ? up : down;
    const int of = is_up ? quotient(i, up_units) : slot, unit = is_up ? i - of * up_units : i - all_up;
    const int row = row_of(unit);
    const float2 bias = bias_pair(a, s.picks[of], row);
    then(after(i));
    float sum[4] = {};
    stream.multiply(shared_address(is_up ? s.t : s.wide), a.k_blocks, sum);
    if (is_up) {
      float v[2];
      UNROLL for (int t = 0; t < 2; t++)
        v[t] = gated_unit(sum[t] * a.scale + bias.x, sum[2 + t] * a.scale + bias.y, a.limit, false,
                          [](float x) { return expf(x); });
      const u32 turned = transpose8(pack_finite(v[0], v[1]));
      const int feature = unit * 8 + LANE % 4 * 2;
      if (LANE < 4 && feature < width) hand_on((u32*)(a.tiled + (i64)of * width + feature), turned);
    } else if (row < a.n && stores()) {
      const float v0 = sum[0] * a.scale, v1 = sum[2] * a.scale;
      const u32 both = pack_finite(v0 + bias.x, v1 + bias.y);
      u16* const y = (u16*)a.y + row;
      if (last) *(u32*)(y + (i64)slot * slots_of(1) * a.n) = both;
      else hand_on((u32*)(y + (i64)slot * a.n), both);
    }
  }
  wait_copies<0>();                                        // zeros may be on their way to where attention's tiles come
  meet_row();
}

// ---- the kernel

DEV void run_row(const LayerCommand* commands, int layers, u32 rings, float* sums) {
  ROLLED for (int layer = 0; layer < layers; layer++) {
    const bool last = layer + 1 == layers;
    norm(layer);
    if (TID / WAVE < TEAM_WARPS) attend(layer, rings, sums);
    route(commands, layer, last);
    multiply_experts(layer, last, rings);
  }
}

// Fills the next step's memory with ones: pieces of 16 bytes.
DEV void wipe(const OneLaunchArgs& a) {
  for (int i = BID * THREADS + TID; i < a.pieces; i += GRID * THREADS)
    ((u32x4*)a.wiped)[i] = u32x4{NOT_YET, NOT_YET, NOT_YET, NOT_YET};
}

DEV void run_layers(const OneLaunchArgs& a) {
  static_assert(THREADS == ONE_LAUNCH_THREADS && HIDDEN == ONE_LAUNCH_MOST_HIDDEN, "as the host has it");
  static_assert(EXPERTS == ONE_LAUNCH_MOST_EXPERTS_PER_TOKEN && MOST_N_EXPERTS == ONE_LAUNCH_MOST_EXPERTS, "likewise");
  static_assert(RINGS_BYTES == ONE_LAUNCH_SHARED_BYTES, "likewise");
  static_assert(ONE_LAUNCH_LEAST_SLABS >= DENSE_SLABS * OUT_STAGES && OUT_STAGES > QKV_STAGES &&
                    DENSE_SLABS * OUT_STAGES > EXPERT_SLABS * EXPERT_STAGES,
                "the largest ring buffer is full before a unit ends");
  const int warp = TID / WAVE, layers = a.count / OF_LAYER;
  fetch_layer(a.commands, 0, TID, THREADS);
  wait_at_most(a.patience, a.in_vain);
  wipe(a);
  static_assert(ROW_RINGS_BYTES >= TEAM_WARPS * (TILE_BYTES + PARTIAL_FLOATS * 4), "attention has its tiles there");
  const u32 rings = shared_address(DYNAMIC_SHARED);
  if (warp < ROW_WARPS)
    return run_row(a.commands, layers, rings, (float*)(DYNAMIC_SHARED + TEAM_WARPS * TILE_BYTES));
  const Dense dense(warp - ROW_WARPS);
  const u32 ring = rings + ROW_RINGS_BYTES + dense.warp * QKV_RING_BYTES +
                   max(0, dense.warp - 2) * (OUT_RING_BYTES - QKV_RING_BYTES);
  if (dense.is_out()) multiply_out(a.commands, layers, dense, ring);
  else multiply_qkv(a.commands, layers, dense, ring);
}
