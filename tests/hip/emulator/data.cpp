// Instructions that touch memory: scalar loads, LDS, global memory. What an access is checked for is in wave.cpp.
#include <atomic>

#include "lanes.h"
#include "settings.h"

namespace emulator {
namespace {

// Calls a function with each active lane, in order.
template <class Function>
void each_active(const Wave& w, Function f) {
  for (u64 left = w.exec(); left; left &= left - 1) f(std::countr_zero(left));
}

// How data of a lane is loaded: as one or more words, or as a small number that is extended.
template <class T>
struct Small {
  static constexpr u32 bytes = sizeof(T), words = 1;
  static void load(const u8* from, u32 (&to)[1]) {
    T value;
    std::memcpy(&value, from, sizeof value);
    to[0] = static_cast<u32>(static_cast<i32>(value));
  }
};
template <u32 WORDS>
struct Whole {
  static constexpr u32 bytes = 4 * WORDS, words = WORDS;
  static void load(const u8* from, u32 (&to)[WORDS]) { std::memcpy(to, from, bytes); }
};

// Loads data of each active lane; `bytes_at(lane)` says where they are.
template <class Data, class Place>
void load_lanes(Wave& w, int reg, Place bytes_at) {
  Values<u32> loaded[Data::words] = {};
  each_active(w, [&](int lane) {
    u32 words[Data::words];
    Data::load(bytes_at(lane), words);
    for (u32 k = 0; k < Data::words; k++) loaded[k][lane] = words[k];
  });
  for (u32 k = 0; k < Data::words; k++) write_words(w, reg + static_cast<int>(k), loaded[k].data());
}

// The first bytes of registers that follow each other.
template <u32 BYTES>
void store_lane(const Wave& w, int reg, int lane, u8* to) {
  u32 words[(BYTES + 3) / 4];
  for (u32 k = 0; k < (BYTES + 3) / 4; k++) words[k] = w.v[reg + static_cast<int>(k)].lane[lane];
  std::memcpy(to, words, BYTES);
}

// Replaces the number in memory by a function of it and of a register; returns the old one.
template <class F>
u32 replace(const Wave& w, int reg, int lane, u8* at) {
  u32 old;
  std::memcpy(&old, at, sizeof old);
  const u32 made = static_cast<u32>(function<F>(old, w.v[reg].lane[lane]));
  std::memcpy(at, &made, sizeof made);
  return old;
}
constexpr auto plus = [](u32 a, u32 b) { return a + b; };
constexpr auto either = [](u32 a, u32 b) { return a | b; };
constexpr auto second = [](u32, u32 b) { return b; };
constexpr auto smaller = [](i32 a, i32 b) { return std::min(a, b); };
constexpr auto larger = [](i32 a, i32 b) { return std::max(a, b); };
constexpr auto smaller_unsigned = [](u32 a, u32 b) { return std::min(a, b); };
constexpr auto larger_unsigned = [](u32 a, u32 b) { return std::max(a, b); };

// ---- Scalar memory
// ----------------------------------------------------------------------------------------------------

template <u32 WORDS>
void load_scalars(Wave& w, const Instruction& in) {
  const u64 offset = in.source[1].kind == Operand::NONE ? 0 : w.two_words(in.source[1]);
  const u64 by = in.source[1].kind == Operand::SCALAR ? low_word(offset) : offset;
  const u64 address = (w.pair(in.source[0].reg) + by + static_cast<u64>(in.offset)) & ~u64{3};
  const u8* at = w.global(address, 4 * WORDS, false);
  auto* to = reinterpret_cast<u8*>(&w.s[in.to.reg]);
  if (View* view = w.block->view) {
    view->load_scalars(address, 4 * WORDS, to);
  } else {
    std::memcpy(to, at, 4 * WORDS);
  }
}
template <u32 WORDS>
Operation scalars() {
  return {load_scalars<WORDS>, "d01", {Type::TWO_WORDS, Type::TWO_WORDS}};
}

// A clock of 100 MHz.
void read_clock(Wave& w, const Instruction& in) {
  static std::atomic<u64> time{0};
  const u64 now = time.fetch_add(settings().ticks);
  std::memcpy(&w.s[in.to.reg], &now, sizeof now);
}

// ---- LDS
// --------------------------------------------------------------------------------------------------------------

u64 lds_address(const Wave& w, const Instruction& in, int lane, i64 offset) {
  return u64{w.v[in.source[0].reg].lane[lane]} + static_cast<u64>(offset);
}

template <class Data>
void lds_load(Wave& w, const Instruction& in) {
  load_lanes<Data>(w, in.to.reg,
                   [&](int lane) { return w.local(lds_address(w, in, lane, in.offset), Data::bytes, Access::READ); });
}
template <u32 BYTES>
void lds_store(Wave& w, const Instruction& in) {
  ++*w.block->changes;
  each_active(w, [&](int lane) {
    store_lane<BYTES>(w, in.source[1].reg, lane, w.local(lds_address(w, in, lane, in.offset), BYTES, Access::WRITE));
  });
}

// Two places, whose offsets count elements of WORDS or 64 of them.
template <u32 WORDS, u32 STEP>
void lds_load_two(Wave& w, const Instruction& in) {
  // An address that is loaded over is read by both.
  const Lanes addresses = w.v[in.source[0].reg];
  const i64 offsets[2] = {in.offset, in.second_offset};
  for (int k = 0; k < 2; k++) {
    load_lanes<Whole<WORDS>>(w, in.to.reg + k * static_cast<int>(WORDS), [&](int lane) {
      const u64 address = u64{addresses.lane[lane]} + static_cast<u64>(offsets[k]) * 4 * WORDS * STEP;
      return w.local(address, 4 * WORDS, Access::READ);
    });
  }
}
template <u32 WORDS, u32 STEP>
void lds_store_two(Wave& w, const Instruction& in) {
  ++*w.block->changes;
  const i64 offsets[2] = {in.offset, in.second_offset};
  for (int k = 0; k < 2; k++) {
    each_active(w, [&](int lane) {
      const u64 address = lds_address(w, in, lane, offsets[k] * 4 * WORDS * STEP);
      store_lane<4 * WORDS>(w, in.source[1 + k].reg, lane, w.local(address, 4 * WORDS, Access::WRITE));
    });
  }
}

template <class F>
void lds_replace(Wave& w, const Instruction& in) {
  ++*w.block->changes;
  Values<u32> old{};
  each_active(w, [&](int lane) {
    u8* at = w.local(lds_address(w, in, lane, in.offset), 4, Access::ATOMIC);
    old[lane] = replace<F>(w, in.source[1].reg, lane, at);
  });
  if (in.to.kind == Operand::VECTOR) write_words(w, in.to.reg, old.data());
}
template <class F>
Operation lds_atomic(const char* operands, F) {
  return {lds_replace<F>, operands};
}

// Each lane takes the word of the lane that its address names; 0 of one that is not active. LDS itself is not touched.
void permute(Wave& w, const Instruction& in) {
  const Source<u32> addresses(w, in.source[0]), words(w, in.source[1]);
  Values<u32> results;
  for (int lane = 0; lane < LANES; lane++) {
    const u32 from = (addresses[lane] + static_cast<u32>(in.offset)) / 4 % LANES;
    results[lane] = w.exec() >> from & 1 ? words[from] : 0;
  }
  write_words(w, in.to.reg, results.data());
}

// ---- Global memory
// ----------------------------------------------------------------------------------------------------

// A scalar base and a 32-bit offset a lane, or 64 bits a lane.
u64 global_address(const Wave& w, const Instruction& in, int lane) {
  const int reg = in.source[0].reg;
  const u64 low = w.v[reg].lane[lane];
  const u64 address =
      in.source[2].kind == Operand::SCALAR ? w.pair(in.source[2].reg) + low : u64{w.v[reg + 1].lane[lane]} << 32 | low;
  return address + static_cast<u64>(in.offset);
}

template <class Data>
void global_load(Wave& w, const Instruction& in) {
  View* view = w.block->view;
  if (view) w.stores.begin();
  u8 seen[Data::bytes];
  load_lanes<Data>(w, in.to.reg, [&](int lane) -> const u8* {
    const u64 address = global_address(w, in, lane);
    const u8* at = w.global(address, Data::bytes, false);
    if (!view) return at;
    w.stores.before(*view, address, Data::bytes);
    view->load(address, Data::bytes, in.scope, seen);
    return seen;
  });
}
template <u32 BYTES>
void global_store(Wave& w, const Instruction& in) {
  View* view = w.block->view;
  if (view) w.stores.begin();
  ++*w.block->changes;
  each_active(w, [&](int lane) {
    const u64 address = global_address(w, in, lane);
    u8* at = w.global(address, BYTES, true);
    if (!view) return store_lane<BYTES>(w, in.source[1].reg, lane, at);
    u8 data[BYTES];
    store_lane<BYTES>(w, in.source[1].reg, lane, data);
    w.stores.before(*view, address, BYTES);
    w.stores.store(*view, address, BYTES, in.scope, data);
  });
}

// Lets a function change a word in memory for each active lane. A word that stays as it is has not been stored.
template <class Function>
void change_words(Wave& w, const Instruction& in, Function change) {
  View* view = w.block->view;
  if (view) w.stores.begin();
  each_active(w, [&](int lane) {
    const u64 address = global_address(w, in, lane);
    u8* at = w.global(address, 4, true);
    u8 before[4], word[4];
    if (view) {
      w.stores.before(*view, address, 4);
      view->load(address, 4, Scope::DEVICE, before);
    } else {
      std::memcpy(before, at, 4);
    }
    std::memcpy(word, before, 4);
    change(lane, word);
    *w.block->changes += std::memcmp(before, word, 4) != 0;
    if (view) {
      view->store_far(address, 4, Scope::DEVICE, word);
    } else {
      std::memcpy(at, word, 4);
    }
  });
}
template <class F>
void global_replace(Wave& w, const Instruction& in) {
  Values<u32> old{};
  change_words(w, in, [&](int lane, u8* at) { old[lane] = replace<F>(w, in.source[1].reg, lane, at); });
  if (in.returns) write_words(w, in.to.reg, old.data());
}
template <class F>
Operation global_atomic(F) {
  Operation made{global_replace<F>, "012"};
  made.atomic = true;
  return made;
}

// The first of two words of data replaces what equals the second.
void compare_and_swap(Wave& w, const Instruction& in) {
  Values<u32> old{};
  change_words(w, in, [&](int lane, u8* at) {
    std::memcpy(&old[lane], at, 4);
    if (old[lane] == w.v[in.source[1].reg + 1].lane[lane]) std::memcpy(at, &w.v[in.source[1].reg].lane[lane], 4);
  });
  if (in.returns) write_words(w, in.to.reg, old.data());
}

Operation atomic(Execute execute) {
  Operation made{execute, "012"};
  made.atomic = true;
  return made;
}

// FLAT instructions here reach global memory alone, as no kernel makes a generic address of LDS.
void add_global(std::vector<Row>& rows, const std::string& kind) {
  const auto load = [&](const char* what, Execute execute) {
    rows.push_back({kind + "_load_" + what, {execute, "d02"}});
  };
  load("dword", global_load<Whole<1>>);
  load("dwordx2", global_load<Whole<2>>);
  load("dwordx3", global_load<Whole<3>>);
  load("dwordx4", global_load<Whole<4>>);
  load("ubyte", global_load<Small<u8>>);
  load("sbyte", global_load<Small<i8>>);
  load("ushort", global_load<Small<u16>>);
  load("sshort", global_load<Small<i16>>);
  const auto store = [&](const char* what, Execute execute) {
    rows.push_back({kind + "_store_" + what, {execute, "012"}});
  };
  store("byte", global_store<1>);
  store("short", global_store<2>);
  store("dword", global_store<4>);
  store("dwordx2", global_store<8>);
  store("dwordx3", global_store<12>);
  store("dwordx4", global_store<16>);
  rows.push_back({kind + "_atomic_add", global_atomic(plus)});
  rows.push_back({kind + "_atomic_smin", global_atomic(smaller)});
  rows.push_back({kind + "_atomic_smax", global_atomic(larger)});
  rows.push_back({kind + "_atomic_cmpswap", atomic(compare_and_swap)});
}

void invalidate(Wave& w, const Instruction& in) {
  if (View* view = w.block->view) view->invalidate(in.scope);
}
void invalidate_unit(Wave& w, const Instruction&) {
  if (View* view = w.block->view) view->invalidate(Scope::BLOCK);
}
void write_back(Wave& w, const Instruction& in) {
  w.wait(0);
  View* view = w.block->view;
  if (view && view->write_back(in.scope)) ++*w.block->changes;
}
// All blocks of a device of gfx90a have one L2.
void nothing(Wave&, const Instruction&) {}

}  // namespace

std::vector<Group> memory_instructions() {
  std::vector<Row> global, flat;
  add_global(global, "global");
  add_global(flat, "flat");
  return {
      {"AMD Instinct MI200 ISA, 12: SMEM",
       {
           {"s_load_dword", scalars<1>()},
           {"s_load_dwordx2", scalars<2>()},
           {"s_load_dwordx4", scalars<4>()},
           {"s_load_dwordx8", scalars<8>()},
           {"s_load_dwordx16", scalars<16>()},
           {"s_memrealtime", {read_clock, "d"}},
       }},
      {"AMD Instinct MI200 ISA, 12: LDS",
       {
           {"ds_read_b32", {lds_load<Whole<1>>, "d0"}},
           {"ds_read_b64", {lds_load<Whole<2>>, "d0"}},
           {"ds_read_b96", {lds_load<Whole<3>>, "d0"}},
           {"ds_read_b128", {lds_load<Whole<4>>, "d0"}},
           {"ds_read_u8", {lds_load<Small<u8>>, "d0"}},
           {"ds_read_i8", {lds_load<Small<i8>>, "d0"}},
           {"ds_read_u16", {lds_load<Small<u16>>, "d0"}},
           {"ds_read_i16", {lds_load<Small<i16>>, "d0"}},
           {"ds_read2_b32", {lds_load_two<1, 1>, "d0"}},
           {"ds_read2_b64", {lds_load_two<2, 1>, "d0"}},
           {"ds_read2st64_b32", {lds_load_two<1, 64>, "d0"}},
           {"ds_read2st64_b64", {lds_load_two<2, 64>, "d0"}},
           {"ds_write_b8", {lds_store<1>, "01"}},
           {"ds_write_b16", {lds_store<2>, "01"}},
           {"ds_write_b32", {lds_store<4>, "01"}},
           {"ds_write_b64", {lds_store<8>, "01"}},
           {"ds_write_b96", {lds_store<12>, "01"}},
           {"ds_write_b128", {lds_store<16>, "01"}},
           {"ds_write2_b32", {lds_store_two<1, 1>, "012"}},
           {"ds_write2_b64", {lds_store_two<2, 1>, "012"}},
           {"ds_write2st64_b32", {lds_store_two<1, 64>, "012"}},
           {"ds_write2st64_b64", {lds_store_two<2, 64>, "012"}},
           {"ds_add_u32", lds_atomic("01", plus)},
           {"ds_or_b32", lds_atomic("01", either)},
           {"ds_min_i32", lds_atomic("01", smaller)},
           {"ds_max_i32", lds_atomic("01", larger)},
           {"ds_min_u32", lds_atomic("01", smaller_unsigned)},
           {"ds_max_u32", lds_atomic("01", larger_unsigned)},
           {"ds_add_rtn_u32", lds_atomic("d01", plus)},
           {"ds_min_rtn_i32", lds_atomic("d01", smaller)},
           {"ds_max_rtn_i32", lds_atomic("d01", larger)},
           {"ds_wrxchg_rtn_b32", lds_atomic("d01", second)},
           {"ds_bpermute_b32", {permute, "d01"}},
       }},
      {"AMD Instinct MI200 ISA, 12: Global", global},
      {"AMD Instinct MI200 ISA, 12: FLAT", flat},
      {"LLVM, User Guide for AMDGPU Backend: Memory Model",
       {
           {"buffer_wbinvl1_vol", {invalidate_unit, "c"}, "gfx90a"},
           {"buffer_invl2", {nothing, "c"}, "gfx90a"},
           {"buffer_wbl2", {write_back, "c"}},
           {"buffer_inv", {invalidate, "c"}, "gfx942 gfx950"},
       }},
  };
}

}  // namespace emulator
