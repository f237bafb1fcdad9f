// Attention of one row: attention_decode (../mma/attention_decode.h) by a team of warps, to the bit, with fewer
// registers. The host sees to it that a block has one job at most, whose keys lie in no more units than the team has
// warps.
#pragma once
#include "row.h"

// Adds a page to a unit's sums: read_tile(), mask_tile() and add_tile() with fewer registers. The values of keys that
// are not seen are zeros.
DEV void add_page(State& u, u32 tile, const Offsets& o, const Query& q, int first, int last) {
  const int lane = LANE;
  float s[BLOCKS][4];
  UNROLL for (int b = 0; b < BLOCKS; b++) {
    s[b][0] = s[b][1] = s[b][2] = s[b][3] = 0;
    UNROLL for (int i = 0; i < BLOCKS; i++) {
      u32 k[4];
      load_matrices(k, tile + o.k[i] + b * 16 * KEY_BYTES);
      mma<FORMAT_F16>(s[b], k, q.v[2 * i], q.v[2 * i + 1]);
    }
  }
  UNROLL for (int b = 0; b < BLOCKS; b++) UNROLL for (int half = 0; half < 2; half++) {
    const int key = 16 * b + 8 * half + lane / 4;
    if (key < first || key > last) s[b][2 * half] = s[b][2 * half + 1] = NEGATIVE_INFINITY;
  }
  raise<FORMAT_F16>(u, s);
  UNROLL for (int b = 0; b < BLOCKS; b++) {
    float w[4];
    UNROLL for (int j = 0; j < 4; j++) w[j] = exp2_fast(s[b][j] - u.m[j % 2]);
    u.sum[0] += w[0] + w[2], u.sum[1] += w[1] + w[3];
    const u32 p0 = transpose8(pack_weights<FORMAT_F16>(w[0], w[1]));
    const u32 p1 = transpose8(pack_weights<FORMAT_F16>(w[2], w[3]));
    UNROLL for (int i = 0; i < BLOCKS; i++) {
      u32 v[4];
      load_transposed(v, tile + o.v[i] + b * 16 * KEY_BYTES);
      mma<FORMAT_F16>(u.o[i], v, p0, p1);
    }
  }
}

// A job of the team's. Each of its warps has one unit of keys.
struct Team {
  const AttentionArgs& a;
  const u16* newest;                                       // the step's key and value
  u32 tiles;                                               // as many as warps
  int warp, lane;

  // The rows of a page that the job sees, and zeros for other values. The newest are not there yet, or half.
  DEV void copy(const Job& job, int page, u32 tile) const {
    const int number = shfl(job.page, page - job.first / KV_PAGE);
    const u8* from = tile_of(a, job, number) + lane * 16;
    const int first = (job.first - page * KV_PAGE) * 8, last = (job.last - page * KV_PAGE) * 8 + 7;  // pieces
#pragma unroll 2
    for (int i = 0; i < KV_PAGE * 8; i += WAVE) {
      const bool seen = i + lane >= first && i + lane <= last;
      if (seen) copy16(tile + (i + lane) * 16, from + i * 16);
      copy16_or_zeros(tile + HALF_TILE + (i + lane) * 16, from + HALF_TILE + i * 16, seen);
    }
    commit_copies();
  }
  DEV bool has_newest(const Job& job, int page) const {
    return page == job.row_last / KV_PAGE && job.last == job.row_last;
  }
  // Puts the newest key and value in their place.
  DEV void patch(const Job& job, u32 tile) const {
    const int at = job.row_last % KV_PAGE;
    const u32x4 v = ((const u32x4*)s.newest)[lane % 16];
    if (lane < 16)
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                   ::"r"(tile + (lane < 8 ? 0 : HALF_TILE) + at * 128 + (lane % 8 ^ at % 8) * 16),
                   "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
    __syncwarp();
  }

  static DEV void meet() { ::meet(TEAM_BARRIER, TEAM_WARPS * WAVE); }

  // The query, as load_query() has it. Together with it come the newest key and value, if the warp needs them: 16 lanes
  // put a piece each into s.newest.
  DEV void take_newest(const Job& job, Query& q, bool needs_key) const {
    const int kv_head = job.index % a.kv_heads;
    u32x4 piece = {};
    const u32* from = (const u32*)a.q + (kv_head * GROUP_HEADS + lane / 4) * (HEAD_DIM / 2) + lane % 4;
    const u16* from_newest = newest + (kv_head + lane / 8 * a.kv_heads) * HEAD_DIM + lane % 8 * 8;
    for (;;) {
      bool all = true;
      if (needs_key && lane < 16) piece = peek((const u32x4*)from_newest);
      UNROLL for (int i = 0; i < 2 * BLOCKS; i++) q.v[i] = peek(from + 4 * i);
      UNROLL for (int i = 0; i < 2 * BLOCKS; i++) all &= is_there(q.v[i]);
      if ((all && is_there(piece)) || !still_wait()) break;
    }
    if (needs_key && lane < 16) ((u32x4*)s.newest)[lane] = piece;
  }

  DEV void attend(const Job& job, float* sums) const {
    constexpr int COUNT = BLOCKS / TEAM_WARPS;
    const Offsets at = offsets();
    const int block = warp * COUNT, last = job.last / ATTENTION_UNIT;
    const float2 sinks = load_sinks(a, job);
    const int mine = job.first / ATTENTION_UNIT + warp;    // the warp's unit: there are no more than warps
    const auto first_page = [&](int unit) { return max(job.first / KV_PAGE, unit * UNIT_PAGES); };
    const auto last_page = [&](int unit) { return min(job.last / KV_PAGE, unit * UNIT_PAGES + UNIT_PAGES - 1); };
    // Where few units come, a warp has tiles for both pages of its own.
    const bool both = last - job.first / ATTENTION_UNIT < TEAM_WARPS / 2;
    const u32 tile = tiles + warp * (both ? 2 : 1) * TILE_BYTES;
    if (mine <= last) {
      copy(job, first_page(mine), tile);
      if (both && first_page(mine) < last_page(mine)) copy(job, last_page(mine), tile + TILE_BYTES);
    }
    Query q = {};
    take_newest(job, q, mine <= last && has_newest(job, last_page(mine)));
    if (mine <= last) {
      State u = nothing();
      ROLLED for (int page = first_page(mine); page <= last_page(mine); page++) {
        const u32 of_page = tile + (both && page > first_page(mine) ? (int)TILE_BYTES : 0);
        wait_copies<0>();
        __syncwarp();
        if (has_newest(job, page)) patch(job, of_page);
        ::add_page(u, of_page, at, q, job.first - page * KV_PAGE, job.last - page * KV_PAGE);
        __syncwarp();
        if (!both && page < last_page(mine)) copy(job, page + 1, tile);
      }
      sum_lanes(u);
      store_partial<false>(sums + warp * PARTIAL_FLOATS, u, 0);
    }
    meet();
    Tree<Sums<COUNT>> tree;
    tree.first = job.first / ATTENTION_UNIT;
    ROLLED for (int unit = tree.first; unit <= last; unit++) {
      Sums<COUNT> u;
      load_partial<false>(u, sums + (unit - tree.first) * PARTIAL_FLOATS, block);
      tree.add(u, unit, 1, unit == last);
    }
    meet();                                                // the next layer's sums come there
    if (job.row_items > 1) {
      store_part(a, job, tree.total, block);
      meet();                                              // all warps have stored
      if (!meet_any(TEAM_BARRIER, TEAM_WARPS * WAVE, warp == 0 && arrive_last(a, job))) return;
      fold_partials(a, job, tree, block);
    }
    store_row<FORMAT_F16>(a, job, tree.total, sinks, block);
  }
};

// The block's job of a layer; its tiles and its warps' sums come to shared memory.
DEV void attend(int layer, u32 tiles, float* sums) {
  const AttentionArgs& a = layer_of(layer).attention;
  const int thread = TID, block = BID;
  const Team team = {a, layer_of(layer).newest, tiles, thread / WAVE, thread % WAVE};
  const int jobs = (a.windowed ? a.step.header->window_items : a.step.header->full_items) * a.kv_heads;
  if (block < jobs) team.attend(load_job(a, block, jobs), sums);
}
