// Decode attention of many long rows, whose keys are not cut between blocks: the warps of a block share out a row's
// groups of keys, and hand sums to each other in shared memory. Sums that go through global memory are written to DRAM,
// and on an H200 writing a megabyte takes as long as reading eight.
//
// Pairs   An item times a kv head is a pair. The list has items of whole rows first, longest first, and blocks take
//         their pairs back and forth: the first GRID pairs in their order, the next GRID in the reverse one, and so on,
//         so that all have nearly as many keys. What whole rows leave uneven is evened out by rows that are cut into
//         items, last in the list. A block computes its pairs of these before the others, so that their sums, which go
//         through memory, are folded meanwhile.
// Parts   A pair's keys are cut into parts of a group. A block's parts are numbered, over all its pairs, and its warps
//         draw these numbers from a counter, two or three parts ahead of their arithmetic.
// Joints  Between a part and the next one of the same pair there is a joint. The warps of both come there: the first
//         leaves its sums and goes on with another part, the second folds and goes to the next joint. From the left
//         come the sum of the span's groups so far and that of the spans before, from the right a group's. So all is
//         folded as attention_tree.h says, whoever comes first. The warp that has folded all has the item's sum.
//         A joint's place in shared memory is used again by a later joint, whose warps wait until it is free. Both
//         parts of the earlier joint have lower numbers than theirs, and a warp computes its parts in rising order. So
//         the part with the lowest number waits for nobody, and there is no deadlock. Who comes second may have to wait
//         while the first stores its sums.
#pragma once
#include "../mma/attention_decode.h"

// A block has WARPS warps with a tile each, and places for JOINTS joints.
template <int FORMAT_, int WARPS_, int JOINTS_, template <int, int> class Ring_>
struct ByBlocks : Config<FORMAT_, WARPS_, WARPS_, 1, Ring_> {
  static constexpr int JOINTS = JOINTS_;
};

enum : int { PART_KEYS = ATTENTION_UNIT * ATTENTION_GROUP };

// A part, as a job of a warp.
struct alignas(16) Part : Job {
  int joint;                             // the number of the joint behind it
  int item_group, group, last_group;     // the first group of its item, its own, and the item's last
};

DEV int load_shared_acquire(const int* from) {
  int v;
  asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(v) : "r"(shared_address(from)) : "memory");
  return v;
}
DEV void store_shared_release(int* to, int v) {
  asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(shared_address(to)), "r"(v) : "memory");
}

// Places of joints. A word says of the joints that use a place, one after the other, what has become of them.
template <int COUNT> struct Joints {
  enum : int { EMPTY, TAKEN, LEFT, FREE };                       // FREE: the next one's EMPTY
  struct Shared {
    alignas(16) float sums[COUNT][2][PARTIAL_FLOATS];
    int words[COUNT];
  };
  Shared& shared;

  DEV void init() const { if (TID < COUNT) shared.words[TID] = EMPTY; }
  DEV float* sums(int joint) const { return shared.sums[joint % COUNT][0]; }
  static DEV int word(int joint, int what) { return joint / COUNT * FREE + what; }

  // True: the other side has not come yet, and finds `sum` at sums(joint), and behind it `total`, if there is one.
  // False: there is what the other side has left, until free(joint).
  DEV bool leave(int joint, const State& sum, const float* total) const {
    int* at = shared.words + joint % COUNT;
    const int empty = word(joint, EMPTY);
    __syncwarp();
    int was = 0;
    if (LANE == 0) {
      while (load_shared_acquire(at) < empty) {}
      was = atomicCAS(at, empty, word(joint, TAKEN));
    }
    const bool first = shfl(was, 0) == empty;
    __syncwarp();                                                // all lanes see the place free
    if (first) {
      store_partial<false>(sums(joint), sum, 0);
      if (total) copy(sums(joint) + PARTIAL_FLOATS, total);
      __syncwarp();
      if (LANE == 0) store_shared_release(at, word(joint, LEFT));
    } else {
      if (LANE == 0) while (load_shared_acquire(at) < word(joint, LEFT)) {}
      __syncwarp();
    }
    return first;
  }
  DEV void free(int joint) const {
    __syncwarp();
    if (LANE == 0) store_shared_release(shared.words + joint % COUNT, word(joint, FREE));
  }
  // A sum from one place to another.
  static DEV void copy(float* to, const float* from) {
    State s;
    __syncwarp();
    load_partial<false>(s, from, 0);
    __syncwarp();
    store_partial<false>(to, s, 0);
    __syncwarp();
  }
};

// What a block has in shared memory behind its tiles. A warp notes the parts it has drawn. When it computes the last
// page of part k, the copy of the first page of part k + 1 has been started, and part k + 2 is drawn; if part k + 1 has
// no other page, part k + 3 is, too. So four notes are in use at most, where a warp has one tile.
template <class C> struct Shared {
  static_assert(C::TILES == C::WARPS, "with more tiles there are more notes");
  enum : int { NOTES = 4 };
  typename Joints<C::JOINTS>::Shared joints;
  float totals[C::WARPS][PARTIAL_FLOATS];
  Part notes[C::WARPS][NOTES];
  int drawn;
};
template <class C> DEV Shared<C>& shared_of() { return *(Shared<C>*)(DYNAMIC_SHARED + C::Ring::ALL_BYTES); }

// The parts that a warp draws.
template <class C> struct Drawn {
  enum : int { NONE = 1 << 20 };         // more than any item's
  using Job = Part;
  const AttentionArgs& a;
  int whole, pairs;                      // pairs of whole rows, and all
  int cut;                               // the block's pairs of rows that are cut
  int base, start;                       // place of a pair in the block's list, and the number of its first part
  int end;                               // how many parts are there from `start` up to the end of pair base + LANE
  int known;                             // how many parts the warp has drawn

  // The block's place in a round of pairs.
  static DEV int in_round(int round) { return round % 2 ? GRID - 1 - BID : BID; }
  // `pairs` if there is none.
  DEV int pair_at(int place) const {
    const bool is_cut = place < cut;
    const int round = is_cut ? place : place - cut, pair = round * GRID + in_round(round);
    return is_cut ? whole + pair : pair < whole ? pair : pairs;
  }
  DEV void begin() {
    const int rounds = (pairs - whole) / GRID;
    cut = rounds + (in_round(rounds) < (pairs - whole) % GRID);
    load_ends();
  }
  DEV void load_ends() {
    const ::Job item = load_job<false>(a, pair_at(base + LANE), pairs);
    end = item.any ? item.last / PART_KEYS - item.first / PART_KEYS + 1 : NONE;
    for (int o = 1; o < WAVE; o *= 2) {
      const int before = __shfl_up_sync(~0u, end, o);
      if (LANE >= o) end += before;
    }
  }
  // The part with a number; behind the last pair any is one that is not there.
  DEV Part find(int number) {
    while (number - start >= shfl(end, WAVE - 1)) start += shfl(end, WAVE - 1), base += WAVE, load_ends();
    const int i = __popc(__ballot_sync(~0u, end <= number - start));
    const int before = i > 0 ? shfl(end, i - 1) : 0;
    Part part = {load_job<false>(a, pair_at(base + i), pairs)};
    if (!part.any) return part;
    part.item_group = part.first / PART_KEYS, part.last_group = part.last / PART_KEYS;
    part.group = part.item_group + number - start - before;
    part.joint = number - (base + i);
    part.first = max(part.first, part.group * PART_KEYS);
    part.last = min(part.last, part.group * PART_KEYS + PART_KEYS - 1);
    load_page(a, chunk_of(a, part), part);
    return part;
  }
  DEV Part* note(int n) const { return &shared_of<C>().notes[TID / WAVE][n % Shared<C>::NOTES]; }
  DEV Part draw() {
    int number = 0;
    if (LANE == 0) number = atomicAdd(&shared_of<C>().drawn, 1);
    const Part part = find(shfl(number, 0));
    __syncwarp();
    if (LANE == 0) *note(known) = part;
    __syncwarp();
    known++;
    return part;
  }
  DEV Part after(const Part&) { return draw(); }
};

// The sum of a part.
template <class Reader> DEV State attend_part(const Part& part, const Query& q, Reader& reader) {
  const int last = part.last / KV_PAGE;
  State u = nothing(), sum;
  bool first = true;
  for (int page = part.first / KV_PAGE; page <= last; page++) {
    reader.add_page(u, part, page, q);
    if (page < last && (page + 1) % UNIT_PAGES) continue;
    sum_lanes(u);
    if (first) sum = u;
    else fold(sum, u);
    first = false;
    u = nothing();
  }
  return sum;
}

// Folds the sum of a part, `sum`, with those of others of its item that are there. True: with all; false: what there is
// has been left at a joint. `total`: room for the sum of the spans before the part's.
template <class C> DEV bool join(const Part& own, const Joints<C::JOINTS>& joints, State& sum, float* total) {
  constexpr int SPAN_GROUPS = ATTENTION_SPAN / ATTENTION_GROUP;
  const int first = own.item_group, last = own.last_group;
  const auto begins_span = [](int group) { return group % SPAN_GROUPS == 0; };
  const auto ends_span = [&](int group) { return group % SPAN_GROUPS == SPAN_GROUPS - 1 || group == last; };
  const auto has_total = [&](int group) { return group / SPAN_GROUPS > first / SPAN_GROUPS; };
  int group = own.group, joint = own.joint;
  if (group > first) {
    const int left = joint - 1;
    if (joints.leave(left, sum, nullptr)) return false;
    const float* before = joints.sums(left);
    if (!begins_span(group)) fold_kept(sum, before), before += PARTIAL_FLOATS;
    if (has_total(group)) {
      if (ends_span(group)) fold_kept(sum, before);
      else joints.copy(total, before);
    }
    joints.free(left);
  }
  // `sum` is of the group's span so far, and `total` of the spans before; but of all so far where a span has ended.
  for (; group < last; group++, joint++) {
    const int next = group + 1;
    if (joints.leave(joint, sum, !begins_span(next) && has_total(next) ? total : nullptr)) return false;
    State behind;
    load_partial<false>(behind, joints.sums(joint), 0);
    joints.free(joint);
    if (begins_span(next) && !ends_span(next)) {
      keep(total, sum);
      sum = behind;
    } else {
      fold(sum, behind);
      if (!begins_span(next) && ends_span(next) && has_total(next)) fold_kept(sum, total);
    }
  }
  return true;
}

template <class C> DEV void attend_by_blocks(const AttentionArgs& a) {
  let_successor_start();
  const int pairs = load_items(a) * a.kv_heads;
  const int whole = a.windowed ? 0 : load_fresh(&a.step.header->whole_items) * a.kv_heads;
  const int warp = TID / WAVE;
  const typename C::Ring ring({warp, 1});
  const Joints<C::JOINTS> joints = {shared_of<C>().joints};
  joints.init();
  if (TID == 0) shared_of<C>().drawn = 0;
  barrier();
  Drawn<C> drawn = {a, whole, pairs};
  drawn.begin();
  const Part first = drawn.draw(), second = drawn.draw();
  Copies<C, Drawn<C>> copies = {a, ring, drawn, first, second, first.first / KV_PAGE};
  start_copies(copies);
  Query q = load_query(a, first), next_q = load_query(a, second);
  Reader<Copies<C, Drawn<C>>> reader = {copies};
  float* total = shared_of<C>().totals[warp];
  for (int n = 0;; n++) {
    // Its fields are read where they are needed: there are not enough registers.
    const Part& part = *copies.jobs.note(n);
    if (!part.any) break;
    State sum = attend_part(part, q, reader);
    if (join<C>(part, joints, sum, total)) finish_alone<C::FORMAT>(a, part, sum);
    q = next_q, next_q = load_query(a, *copies.jobs.note(n + 2));
  }
}
