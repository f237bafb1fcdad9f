// Scalar instructions: a wave's own registers, SCC, jumps and barriers.
#include "lanes.h"

namespace emulator {
namespace {

// A result, and what becomes of SCC.
template <class T>
struct WithScc {
  T value;
  bool scc;
};

template <class T>
WithScc<T> not_zero(T value) {
  return {value, value != 0};
}

// A function on scalars. An argument of type bool is SCC, and a result of type bool becomes SCC.
template <class F>
struct ScalarFunctionOf : ScalarFunctionOf<decltype(&F::operator())> {};
template <class F, class R, class... A>
struct ScalarFunctionOf<R (F::*)(A...) const> {
  template <class T>
  static T argument(const Wave& w, const Instruction& in, size_t i) {
    if constexpr (std::is_same_v<T, bool>) {
      return w.scc;
    } else if constexpr (sizeof(T) == 8) {
      return static_cast<T>(w.two_words(in.source[i]));
    } else {
      return static_cast<T>(w.word(in.source[i]));
    }
  }
  template <class T>
  static void store(Wave& w, int reg, T value) {
    if constexpr (sizeof(T) == 8) {
      w.set_pair(reg, static_cast<u64>(value));
    } else {
      w.s[reg] = static_cast<u32>(value);
    }
  }
  template <size_t... I>
  static R call(const Wave& w, const Instruction& in, std::index_sequence<I...>) {
    return function<F>(argument<A>(w, in, I)...);
  }
  static void execute(Wave& w, const Instruction& in) {
    const R result = call(w, in, std::index_sequence_for<A...>());
    if constexpr (std::is_same_v<R, bool>) {
      w.scc = result;
    } else if constexpr (std::is_integral_v<R>) {
      store(w, in.to.reg, result);
    } else {
      store(w, in.to.reg, result.value);
      w.scc = result.scc;
    }
  }
  static Operation operation(const char* operands) {
    Operation made{execute, operands};
    size_t k = 0;
    ((made.types[k++] = type_of<A>()), ...);
    return made;
  }
};

template <class F>
Operation one(F) {
  return ScalarFunctionOf<F>::operation("d0");
}
template <class F>
Operation two(F) {
  return ScalarFunctionOf<F>::operation("d01");
}
// A result in SCC alone.
template <class F>
Operation test(F) {
  return ScalarFunctionOf<F>::operation("01");
}
// SOPK: the second source is a constant of 16 bits, and the destination is the first.
template <class F>
Operation with_constant(F) {
  Operation made = ScalarFunctionOf<F>::operation("dA1");
  made.types[1] = Type::SIGNED_16;
  return made;
}
template <class F>
Operation test_constant(Type type, F) {
  Operation made = ScalarFunctionOf<F>::operation("01");
  made.types[1] = type;
  return made;
}

Operation move_constant() {
  Operation made = one([](u32 a) { return a; });
  made.types[0] = Type::SIGNED_16;
  return made;
}

// EXEC becomes a function of the source and of EXEC, whose old value is kept.
template <class F>
Operation save_exec(F) {
  const auto execute = [](Wave& w, const Instruction& in) {
    const u64 source = w.two_words(in.source[0]), old = w.exec();
    w.set_pair(in.to.reg, old);
    w.set_pair(EXEC, function<F>(source, old));
    w.scc = w.exec() != 0;
  };
  return {execute, "d0", {Type::TWO_WORDS}};
}

template <class F>
Operation jump_if(F) {
  const auto execute = [](Wave& w, const Instruction& in) {
    if (function<F>(w)) w.next = in.target;
  };
  return {execute, "j"};
}

void nothing(Wave&, const Instruction&) {}
void end_program(Wave& w, const Instruction&) {
  w.wait(0);
  w.ended = true;
}
void barrier(Wave& w, const Instruction&) {
  w.wait(0);
  w.at_barrier = true;
}
// Stores alone may be on their way.
void wait_for_memory(Wave& w, const Instruction& in) { w.wait(static_cast<u64>(in.offset)); }
void get_pc(Wave& w, const Instruction& in) { w.set_pair(in.to.reg, w.block->code + in.next); }
void set_pc(Wave& w, const Instruction& in) { w.next = w.block->index_at(w.two_words(in.source[0]) - w.block->code); }

// Only SRC0 of the operands that may be indexed is known; decode() refuses the others.
void index_on(Wave& w, const Instruction& in) {
  constexpr u32 SRC0 = 1;
  w.s[M0] = (w.s[M0] & 0xffff0f00) | SRC0 << 12 | (w.word(in.source[0]) & 0xff);
  w.indexed_source = true;
}
void index_off(Wave& w, const Instruction&) { w.indexed_source = false; }

WithScc<u32> add(u32 a, u32 b, bool carry) {
  const u64 sum = u64{a} + b + carry;
  return {low_word(sum), high_word(sum) != 0};
}
WithScc<u32> subtract(u32 a, u32 b, bool borrow) {
  const u64 difference = u64{a} - b - borrow;
  return {low_word(difference), high_word(difference) != 0};
}
WithScc<u32> shift_and_add(u32 a, int by, u32 b) {
  const u64 sum = (u64{a} << by) + b;
  return {low_word(sum), high_word(sum) != 0};
}
// SCC is signed overflow.
WithScc<i32> fits(i64 exact) { return {static_cast<i32>(exact), exact != static_cast<i32>(exact)}; }

// A field of bits: where it begins in the lower half, how wide it is in the upper.
WithScc<u32> extract(u32 a, u32 field) {
  const u32 width = std::min(field >> 16 & 0x7f, 32u);
  const u64 mask = (u64{1} << width) - 1;
  return not_zero(static_cast<u32>(a >> (field & 31) & mask));
}
WithScc<i32> extract_signed(i32 a, u32 field) {
  const u32 width = std::min(field >> 16 & 0x7f, 32u);
  if (width == 0) return not_zero(0);
  const i32 from = a >> (field & 31);
  return not_zero(static_cast<i32>(static_cast<u32>(from) << (32 - width)) >> (32 - width));
}

// -1 where there is none.
template <class T>
u32 first_one(T a) {
  return a ? static_cast<u32>(std::countr_zero(a)) : ~0u;
}
template <class T>
u32 leading_zeros(T a) {
  return a ? static_cast<u32>(std::countl_zero(a)) : ~0u;
}
template <class T>
T reverse(T a) {
  T reversed = 0;
  for (size_t i = 0; i < 8 * sizeof(T); i++) reversed |= (a >> i & 1) << (8 * sizeof(T) - 1 - i);
  return reversed;
}

}  // namespace

std::vector<Group> scalar_instructions() {
  return {
      {"AMD Instinct MI200 ISA, 12: SOP1",
       {
           {"s_mov_b32", one([](u32 a) { return a; })},
           {"s_mov_b64", one([](u64 a) { return a; })},
           {"s_not_b32", one([](u32 a) { return not_zero(~a); })},
           {"s_not_b64", one([](u64 a) { return not_zero(~a); })},
           {"s_brev_b32", one([](u32 a) { return reverse(a); })},
           {"s_brev_b64", one([](u64 a) { return reverse(a); })},
           {"s_abs_i32", one([](i32 a) { return not_zero(a < 0 ? 0 - static_cast<u32>(a) : static_cast<u32>(a)); })},
           {"s_sext_i32_i8", one([](u32 a) { return static_cast<i32>(static_cast<i8>(a)); })},
           {"s_sext_i32_i16", one([](u32 a) { return static_cast<i32>(static_cast<i16>(a)); })},
           {"s_ff1_i32_b32", one([](u32 a) { return first_one(a); })},
           {"s_ff1_i32_b64", one([](u64 a) { return first_one(a); })},
           {"s_flbit_i32_b32", one([](u32 a) { return leading_zeros(a); })},
           {"s_flbit_i32_b64", one([](u64 a) { return leading_zeros(a); })},
           {"s_bcnt1_i32_b32", one([](u32 a) { return not_zero(std::popcount(a)); })},
           {"s_bcnt1_i32_b64", one([](u64 a) { return not_zero(std::popcount(a)); })},
           {"s_and_saveexec_b64", save_exec([](u64 a, u64 exec) { return a & exec; })},
           {"s_or_saveexec_b64", save_exec([](u64 a, u64 exec) { return a | exec; })},
           {"s_xor_saveexec_b64", save_exec([](u64 a, u64 exec) { return a ^ exec; })},
           {"s_andn2_saveexec_b64", save_exec([](u64 a, u64 exec) { return a & ~exec; })},
           {"s_orn2_saveexec_b64", save_exec([](u64 a, u64 exec) { return a | ~exec; })},
           {"s_getpc_b64", {get_pc, "d"}},
           {"s_setpc_b64", {set_pc, "0", {Type::TWO_WORDS}}},
       }},
      {"AMD Instinct MI200 ISA, 12: SOP2",
       {
           {"s_add_u32", two([](u32 a, u32 b) { return add(a, b, false); })},
           {"s_addc_u32", two([](u32 a, u32 b, bool scc) { return add(a, b, scc); })},
           {"s_sub_u32", two([](u32 a, u32 b) { return subtract(a, b, false); })},
           {"s_subb_u32", two([](u32 a, u32 b, bool scc) { return subtract(a, b, scc); })},
           {"s_add_i32", two([](i32 a, i32 b) { return fits(i64{a} + b); })},
           {"s_sub_i32", two([](i32 a, i32 b) { return fits(i64{a} - b); })},
           {"s_mul_i32", two([](u32 a, u32 b) { return a * b; })},
           {"s_mul_hi_u32", two([](u32 a, u32 b) { return high_word(u64{a} * b); })},
           {"s_mul_hi_i32", two([](i32 a, i32 b) { return static_cast<i32>(i64{a} * b >> 32); })},
           {"s_min_i32", two([](i32 a, i32 b) { return WithScc<i32>{std::min(a, b), a < b}; })},
           {"s_max_i32", two([](i32 a, i32 b) { return WithScc<i32>{std::max(a, b), a > b}; })},
           {"s_min_u32", two([](u32 a, u32 b) { return WithScc<u32>{std::min(a, b), a < b}; })},
           {"s_max_u32", two([](u32 a, u32 b) { return WithScc<u32>{std::max(a, b), a > b}; })},
           {"s_and_b32", two([](u32 a, u32 b) { return not_zero(a & b); })},
           {"s_and_b64", two([](u64 a, u64 b) { return not_zero(a & b); })},
           {"s_or_b32", two([](u32 a, u32 b) { return not_zero(a | b); })},
           {"s_or_b64", two([](u64 a, u64 b) { return not_zero(a | b); })},
           {"s_xor_b32", two([](u32 a, u32 b) { return not_zero(a ^ b); })},
           {"s_xor_b64", two([](u64 a, u64 b) { return not_zero(a ^ b); })},
           {"s_andn2_b32", two([](u32 a, u32 b) { return not_zero(a & ~b); })},
           {"s_andn2_b64", two([](u64 a, u64 b) { return not_zero(a & ~b); })},
           {"s_orn2_b32", two([](u32 a, u32 b) { return not_zero(a | ~b); })},
           {"s_orn2_b64", two([](u64 a, u64 b) { return not_zero(a | ~b); })},
           {"s_nand_b32", two([](u32 a, u32 b) { return not_zero(~(a & b)); })},
           {"s_nand_b64", two([](u64 a, u64 b) { return not_zero(~(a & b)); })},
           {"s_nor_b32", two([](u32 a, u32 b) { return not_zero(~(a | b)); })},
           {"s_nor_b64", two([](u64 a, u64 b) { return not_zero(~(a | b)); })},
           {"s_xnor_b32", two([](u32 a, u32 b) { return not_zero(~(a ^ b)); })},
           {"s_xnor_b64", two([](u64 a, u64 b) { return not_zero(~(a ^ b)); })},
           {"s_lshl_b32", two([](u32 a, u32 b) { return not_zero(a << (b & 31)); })},
           {"s_lshl_b64", two([](u64 a, u32 b) { return not_zero(a << (b & 63)); })},
           {"s_lshr_b32", two([](u32 a, u32 b) { return not_zero(a >> (b & 31)); })},
           {"s_lshr_b64", two([](u64 a, u32 b) { return not_zero(a >> (b & 63)); })},
           {"s_ashr_i32", two([](i32 a, u32 b) { return not_zero(a >> (b & 31)); })},
           {"s_ashr_i64", two([](i64 a, u32 b) { return not_zero(a >> (b & 63)); })},
           {"s_lshl1_add_u32", two([](u32 a, u32 b) { return shift_and_add(a, 1, b); })},
           {"s_lshl2_add_u32", two([](u32 a, u32 b) { return shift_and_add(a, 2, b); })},
           {"s_lshl3_add_u32", two([](u32 a, u32 b) { return shift_and_add(a, 3, b); })},
           {"s_lshl4_add_u32", two([](u32 a, u32 b) { return shift_and_add(a, 4, b); })},
           {"s_bfe_u32", two([](u32 a, u32 b) { return extract(a, b); })},
           {"s_bfe_i32", two([](i32 a, u32 b) { return extract_signed(a, b); })},
           {"s_bfm_b32", two([](u32 a, u32 b) { return ((1u << (a & 31)) - 1) << (b & 31); })},
           {"s_pack_ll_b32_b16", two([](u32 a, u32 b) { return (a & 0xffff) | b << 16; })},
           {"s_pack_lh_b32_b16", two([](u32 a, u32 b) { return (a & 0xffff) | (b & 0xffff0000); })},
           {"s_pack_hh_b32_b16", two([](u32 a, u32 b) { return a >> 16 | (b & 0xffff0000); })},
           {"s_cselect_b32", two([](u32 a, u32 b, bool scc) { return scc ? a : b; })},
           {"s_cselect_b64", two([](u64 a, u64 b, bool scc) { return scc ? a : b; })},
       }},
      {"AMD Instinct MI200 ISA, 12: SOPC",
       {
           {"s_cmp_eq_i32", test([](i32 a, i32 b) { return a == b; })},
           {"s_cmp_lg_i32", test([](i32 a, i32 b) { return a != b; })},
           {"s_cmp_gt_i32", test([](i32 a, i32 b) { return a > b; })},
           {"s_cmp_ge_i32", test([](i32 a, i32 b) { return a >= b; })},
           {"s_cmp_lt_i32", test([](i32 a, i32 b) { return a < b; })},
           {"s_cmp_le_i32", test([](i32 a, i32 b) { return a <= b; })},
           {"s_cmp_eq_u32", test([](u32 a, u32 b) { return a == b; })},
           {"s_cmp_lg_u32", test([](u32 a, u32 b) { return a != b; })},
           {"s_cmp_gt_u32", test([](u32 a, u32 b) { return a > b; })},
           {"s_cmp_ge_u32", test([](u32 a, u32 b) { return a >= b; })},
           {"s_cmp_lt_u32", test([](u32 a, u32 b) { return a < b; })},
           {"s_cmp_le_u32", test([](u32 a, u32 b) { return a <= b; })},
           {"s_cmp_eq_u64", test([](u64 a, u64 b) { return a == b; })},
           {"s_cmp_lg_u64", test([](u64 a, u64 b) { return a != b; })},
           {"s_bitcmp0_b32", test([](u32 a, u32 b) { return (a >> (b & 31) & 1) == 0; })},
           {"s_bitcmp1_b32", test([](u32 a, u32 b) { return (a >> (b & 31) & 1) == 1; })},
           {"s_set_gpr_idx_on", {index_on, "01"}},
       }},
      {"AMD Instinct MI200 ISA, 12: SOPK",
       {
           {"s_movk_i32", move_constant()},
           {"s_addk_i32", with_constant([](i32 a, i32 b) { return fits(i64{a} + b); })},
           {"s_mulk_i32", with_constant([](u32 a, u32 b) { return a * b; })},
           {"s_cmpk_eq_i32", test_constant(Type::SIGNED_16, [](i32 a, i32 b) { return a == b; })},
           {"s_cmpk_lg_i32", test_constant(Type::SIGNED_16, [](i32 a, i32 b) { return a != b; })},
           {"s_cmpk_gt_i32", test_constant(Type::SIGNED_16, [](i32 a, i32 b) { return a > b; })},
           {"s_cmpk_ge_i32", test_constant(Type::SIGNED_16, [](i32 a, i32 b) { return a >= b; })},
           {"s_cmpk_lt_i32", test_constant(Type::SIGNED_16, [](i32 a, i32 b) { return a < b; })},
           {"s_cmpk_le_i32", test_constant(Type::SIGNED_16, [](i32 a, i32 b) { return a <= b; })},
           {"s_cmpk_eq_u32", test_constant(Type::UNSIGNED_16, [](u32 a, u32 b) { return a == b; })},
           {"s_cmpk_lg_u32", test_constant(Type::UNSIGNED_16, [](u32 a, u32 b) { return a != b; })},
           {"s_cmpk_gt_u32", test_constant(Type::UNSIGNED_16, [](u32 a, u32 b) { return a > b; })},
           {"s_cmpk_ge_u32", test_constant(Type::UNSIGNED_16, [](u32 a, u32 b) { return a >= b; })},
           {"s_cmpk_lt_u32", test_constant(Type::UNSIGNED_16, [](u32 a, u32 b) { return a < b; })},
           {"s_cmpk_le_u32", test_constant(Type::UNSIGNED_16, [](u32 a, u32 b) { return a <= b; })},
       }},
      {"AMD Instinct MI200 ISA, 12: SOPP",
       {
           {"s_endpgm", {end_program, ""}},
           {"s_barrier", {barrier, ""}},
           {"s_branch", jump_if([](const Wave&) { return true; })},
           {"s_cbranch_scc0", jump_if([](const Wave& w) { return !w.scc; })},
           {"s_cbranch_scc1", jump_if([](const Wave& w) { return w.scc; })},
           {"s_cbranch_vccz", jump_if([](const Wave& w) { return w.vcc() == 0; })},
           {"s_cbranch_vccnz", jump_if([](const Wave& w) { return w.vcc() != 0; })},
           {"s_cbranch_execz", jump_if([](const Wave& w) { return w.exec() == 0; })},
           {"s_cbranch_execnz", jump_if([](const Wave& w) { return w.exec() != 0; })},
           {"s_set_gpr_idx_off", {index_off, ""}},
           {"s_waitcnt", {wait_for_memory, "w"}},
           // What they order has always happened here; they can be left out without a fault.
           {"s_nop", {nothing, "*"}},
           {"s_setprio", {nothing, "*"}},
           {"s_sleep", {nothing, "*"}},
       }},
  };
}

}  // namespace emulator
