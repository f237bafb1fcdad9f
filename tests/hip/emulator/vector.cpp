// Vector instructions: 64 lanes at once.
#include "lanes.h"

namespace emulator {
namespace {

// ---- Numbers
// ----------------------------------------------------------------------------------------------------------

// A NaN gives way to a number, and -0 is less than +0.
template <class T>
T minimum(T a, T b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  return a < b || (a == b && std::signbit(a)) ? a : b;
}
template <class T>
T maximum(T a, T b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}
f32 middle(f32 a, f32 b, f32 c) {
  if (std::isnan(a) || std::isnan(b) || std::isnan(c)) return minimum(minimum(a, b), c);
  return maximum(minimum(a, b), minimum(maximum(a, b), c));
}
template <class T>
T middle_integer(T a, T b, T c) {
  return std::max(std::min(a, b), std::min(std::max(a, b), c));
}

// Towards zero, to the nearest there is, NaN to 0.
template <class To, class From>
To truncated(From value) {
  if (std::isnan(value)) return 0;
  if (value <= static_cast<From>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (value >= static_cast<From>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  return static_cast<To>(value);
}

// Results of the transcendental unit are accurate to 1 ULP, here to half of one or so; subnormals, in and out, are
// zeros.
template <f32 (*Function)(f32)>
Operation transcendental() {
  return lanes([](f32 a) { return flush(Function(flush(a))); });
}
f32 power_of_two(f32 a) { return std::exp2(a); }
f32 logarithm(f32 a) { return std::log2(a); }
f32 reciprocal(f32 a) { return 1 / a; }
f32 root(f32 a) { return std::sqrt(a); }
f32 reciprocal_root(f32 a) { return 1 / std::sqrt(a); }
// Accurate to 2^29 ULP: so many bits are left out.
f64 rough_reciprocal(f64 a) { return bit_cast<f64>(bit_cast<u64>(1 / a) & ~((u64{1} << 28) - 1)); }

u32 low_24(u32 a) { return a & 0xffffff; }
i32 low_24(i32 a) { return static_cast<i32>(static_cast<u32>(a) << 8) >> 8; }
i32 multiply_add(i32 a, i32 b, i32 c) {
  return static_cast<i32>(static_cast<u32>(a) * static_cast<u32>(b) + static_cast<u32>(c));
}

u32 reverse(u32 a) {
  a = (a >> 1 & 0x55555555) | (a & 0x55555555) << 1;
  a = (a >> 2 & 0x33333333) | (a & 0x33333333) << 2;
  a = (a >> 4 & 0x0f0f0f0f) | (a & 0x0f0f0f0f) << 4;
  return __builtin_bswap32(a);
}

i32 signed_field(i32 a, u32 from, u32 width) {
  width &= 31;
  if (width == 0) return 0;
  return static_cast<i32>(static_cast<u32>(a >> (from & 31)) << (32 - width)) >> (32 - width);
}

// A byte of the result: one of the eight, the sign of a half of them four times over, 0 or 255.
u32 permuted(u32 a, u32 b, u32 selectors) {
  const u64 bytes = static_cast<u64>(a) << 32 | b;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    const u32 which = selectors >> 8 * i & 0xff;
    u32 byte = 0xff;
    if (which < 8) {
      byte = bytes >> 8 * which & 0xff;
    } else if (which < 12) {
      byte = bytes >> (16 * (which - 8) + 15) & 1 ? 0xff : 0;
    } else if (which == 12) {
      byte = 0;
    }
    result |= byte << 8 * i;
  }
  return result;
}

// ---- Division
// ---------------------------------------------------------------------------------------------------------

template <class T>
struct Division;
template <>
struct Division<f32> {
  static constexpr int FAR = 96, TINY = 23, SCALE = 64, BIAS = 127, LEAST = -150;
};
template <>
struct Division<f64> {
  static constexpr int FAR = 768, TINY = 53, SCALE = 128, BIAS = 1023, LEAST = -1075;
};

template <class T>
struct Scaled {
  T value;
  bool undo;
};

// Scales a numerator or denominator (`value`, which equals one of them) so that a quotient can be refined.
template <class T>
Scaled<T> division_scale(T value, T denominator, T numerator) {
  using D = Division<T>;
  const auto scaled = [&](int by) { return std::ldexp(value, by); };
  if (numerator == 0 || denominator == 0) return {std::numeric_limits<T>::quiet_NaN(), false};
  if (exponent(numerator) - exponent(denominator) >= D::FAR) {
    return {value == denominator ? scaled(D::SCALE) : value, true};
  }
  if (subnormal(denominator)) return {scaled(D::SCALE), false};
  const bool small_reciprocal = subnormal(1 / denominator), small_quotient = subnormal(numerator / denominator);
  // The document has a positive scale here, with which such a denominator would overflow.
  if (small_reciprocal && small_quotient) return {value == denominator ? scaled(-D::SCALE) : value, true};
  if (small_reciprocal) return {scaled(-D::SCALE), false};
  if (small_quotient) return {value == numerator ? scaled(D::SCALE) : value, true};
  if (exponent(numerator) <= D::TINY) return {scaled(D::SCALE), false};
  return {value, false};
}

template <class T>
void div_scale(Wave& w, const Instruction& in) {
  const Source<T> value(w, in.source[0]), denominator(w, in.source[1]), numerator(w, in.source[2]);
  Values<T> results;
  Values<bool> undo;
  for (int i = 0; i < LANES; i++) {
    const auto scaled = division_scale(value[i], denominator[i], numerator[i]);
    results[i] = scaled.value;
    undo[i] = scaled.undo;
  }
  write<T>(w, in, results);
  write_mask(w, in.to_mask, undo);
}

// A fused multiply-add whose result is scaled back where VCC says so.
template <class T>
void div_fmas(Wave& w, const Instruction& in) {
  const Source<T> a(w, in.source[0]), b(w, in.source[1]), c(w, in.source[2]);
  Values<T> results;
  for (int i = 0; i < LANES; i++) {
    results[i] = std::fma(a[i], b[i], c[i]);
    const int by = exponent(c[i]) > Division<T>::BIAS ? Division<T>::SCALE : -Division<T>::SCALE;
    if (w.vcc() >> i & 1) results[i] = std::ldexp(results[i], by);
  }
  write<T>(w, in, results);
}

// The quotient, with what is special of a division.
template <class T>
T division_fixup(T quotient, T denominator, T numerator) {
  const T sign = std::signbit(denominator) != std::signbit(numerator) ? T{-1} : T{1};
  const T nan = std::numeric_limits<T>::quiet_NaN(), infinity = std::numeric_limits<T>::infinity();
  if (std::isnan(numerator)) return numerator;
  if (std::isnan(denominator)) return denominator;
  if (denominator == 0 && numerator == 0) return nan;
  if (std::isinf(denominator) && std::isinf(numerator)) return nan;
  if (denominator == 0 || std::isinf(numerator)) return sign * infinity;
  if (std::isinf(denominator) || numerator == 0) return sign * T{0};
  if (exponent(numerator) - exponent(denominator) < Division<T>::LEAST) return sign * T{0};
  if (std::isnan(quotient)) return sign * infinity;
  return sign * std::fabs(quotient);
}

// ---- Carries
// ----------------------------------------------------------------------------------------------------------

// A function of two words and a carry or borrow, exact in 64 bits; what leaves 32 bits is the next carry.
template <class F>
void carry(Wave& w, const Instruction& in) {
  const Source<u32> a(w, in.source[0]), b(w, in.source[1]);
  const u64 carries = in.source[2].kind == Operand::NONE ? 0 : w.two_words(in.source[2]);
  Values<u32> results;
  Values<bool> out;
  for (int i = 0; i < LANES; i++) {
    const u64 exact = function<F>(u64{a[i]}, u64{b[i]}, carries >> i & 1);
    results[i] = low_word(exact);
    out[i] = high_word(exact) != 0;
  }
  write<u32>(w, in, results);
  write_mask(w, in.to_mask, out);
}
template <class F>
Operation with_carry(const char* operands, F) {
  return {carry<F>, operands, {Type::WORD, Type::WORD, Type::TWO_WORDS}};
}

template <class Factor, class Sum>
void multiply_add_wide(Wave& w, const Instruction& in) {
  const Source<Factor> a(w, in.source[0]), b(w, in.source[1]);
  const Source<u64> c(w, in.source[2]);
  Values<u64> results;
  Values<bool> out;
  for (int i = 0; i < LANES; i++) {
    const u64 product = static_cast<u64>(static_cast<Sum>(a[i]) * b[i]);
    results[i] = product + c[i];
    out[i] = results[i] < product;
  }
  write<u64>(w, in, results);
  write_mask(w, in.to_mask, out);
}
template <class Factor, class Sum>
Operation wide() {
  return {multiply_add_wide<Factor, Sum>, "dm012", {Type::WORD, Type::WORD, Type::TWO_WORDS}};
}

// ---- What is not lane by lane
// -----------------------------------------------------------------------------------------

void select(Wave& w, const Instruction& in) {
  const Source<u32> a(w, in.source[0]), b(w, in.source[1]);
  const u64 second = w.two_words(in.source[2]);
  Values<u32> results;
  for (int i = 0; i < LANES; i++) results[i] = second >> i & 1 ? b[i] : a[i];
  write<u32>(w, in, results);
}

// How many bits of a mask are set below each lane, in its lower or upper half.
template <bool UPPER>
void count_below(Wave& w, const Instruction& in) {
  const Source<u32> mask(w, in.source[0]), plus(w, in.source[1]);
  Values<u32> results;
  for (int i = 0; i < LANES; i++) {
    const u64 below = (u64{1} << i) - 1;
    results[i] = plus[i] + static_cast<u32>(std::popcount(mask[i] & (UPPER ? high_word(below) : low_word(below))));
  }
  write<u32>(w, in, results);
}

// Of the first lane that is active; of lane 0 if none is.
void read_first_lane(Wave& w, const Instruction& in) {
  const u64 active = w.exec();
  w.s[in.to.reg] = Source<u32>(w, in.source[0])[active ? std::countr_zero(active) : 0];
}
void read_lane(Wave& w, const Instruction& in) {
  w.s[in.to.reg] = Source<u32>(w, in.source[0])[w.word(in.source[1]) & 63];
}
void write_lane(Wave& w, const Instruction& in) {
  w.v[in.to.reg].lane[w.word(in.source[1]) & 63] = w.word(in.source[0]);
}

// The upper half of one register changes places with the lower half of the other.
void swap_halves(Wave& w, const Instruction& in) {
  u32 *to = w.v[in.to.reg].lane, *other = w.v[in.source[0].reg].lane;
  std::swap_ranges(to + LANES / 2, to + LANES, other);
}

// Each bit of the three sources names a bit of a table of eight.
void by_table(Wave& w, const Instruction& in) {
  const Source<u32> a(w, in.source[0]), b(w, in.source[1]), c(w, in.source[2]);
  Values<u32> results{};
  for (int row = 0; row < 8; row++) {
    if (!(in.offset >> row & 1)) continue;
    const u32 not_a = row & 4 ? 0 : ~0u, not_b = row & 2 ? 0 : ~0u, not_c = row & 1 ? 0 : ~0u;
    for (int i = 0; i < LANES; i++) results[i] |= (a[i] ^ not_a) & (b[i] ^ not_b) & (c[i] ^ not_c);
  }
  write<u32>(w, in, results);
}

}  // namespace

std::vector<Group> vector_instructions() {
  constexpr auto shift_left = [](u32 a, u32 b) { return b << (a & 31); };
  constexpr auto fused = [](f32 a, f32 b, f32 c) { return std::fma(a, b, c); };
  return {
      {"AMD Instinct MI200 ISA, 12: VOP1",
       {
           {"v_mov_b32", lanes([](u32 a) { return a; })},
           {"v_not_b32", lanes([](u32 a) { return ~a; })},
           {"v_bfrev_b32", lanes([](u32 a) { return reverse(a); })},
           {"v_ffbh_u32", lanes([](u32 a) { return a ? static_cast<u32>(std::countl_zero(a)) : ~0u; })},
           {"v_ffbl_b32", lanes([](u32 a) { return a ? static_cast<u32>(std::countr_zero(a)) : ~0u; })},
           {"v_cvt_f64_f32", lanes([](f32 a) { return static_cast<f64>(a); })},
           {"v_cvt_f32_f64", lanes([](f64 a) { return static_cast<f32>(a); })},
           {"v_cvt_f32_f16", lanes([](f16 a) { return to_f32(a); })},
           {"v_cvt_f16_f32", lanes([](f32 a) { return to_f16(a); })},
           {"v_cvt_f32_u32", lanes([](u32 a) { return static_cast<f32>(a); })},
           {"v_cvt_f32_i32", lanes([](i32 a) { return static_cast<f32>(a); })},
           {"v_cvt_u32_f32", lanes([](f32 a) { return truncated<u32>(a); })},
           {"v_cvt_i32_f32", lanes([](f32 a) { return truncated<i32>(a); })},
           {"v_cvt_f64_u32", lanes([](u32 a) { return static_cast<f64>(a); })},
           {"v_cvt_f64_i32", lanes([](i32 a) { return static_cast<f64>(a); })},
           {"v_cvt_u32_f64", lanes([](f64 a) { return truncated<u32>(a); })},
           {"v_cvt_i32_f64", lanes([](f64 a) { return truncated<i32>(a); })},
           {"v_exp_f32", transcendental<power_of_two>()},
           {"v_log_f32", transcendental<logarithm>()},
           {"v_rcp_f32", transcendental<reciprocal>()},
           {"v_rcp_iflag_f32", transcendental<reciprocal>()},
           {"v_rcp_f64", lanes([](f64 a) { return rough_reciprocal(a); })},
           {"v_rsq_f32", transcendental<reciprocal_root>()},
           {"v_sqrt_f32", transcendental<root>()},
           {"v_trunc_f32", lanes([](f32 a) { return std::trunc(a); })},
           {"v_floor_f32", lanes([](f32 a) { return std::floor(a); })},
           {"v_rndne_f32", lanes([](f32 a) { return std::nearbyint(a); })},
           {"v_rndne_f64", lanes([](f64 a) { return std::nearbyint(a); })},
           {"v_readfirstlane_b32", {read_first_lane, "d0"}},
       }},
      {"AMD Instinct MI300 ISA, 12: VOP1", {{"v_mov_b64", lanes([](u64 a) { return a; }), "gfx942 gfx950"}}},
      {"AMD CDNA4 ISA: VOP1", {{"v_permlane32_swap_b32", {swap_halves, "d0"}, "gfx950"}}},
      {"AMD Instinct MI200 ISA, 12: VOP2",
       {
           {"v_add_f32", lanes([](f32 a, f32 b) { return a + b; })},
           {"v_sub_f32", lanes([](f32 a, f32 b) { return a - b; })},
           {"v_subrev_f32", lanes([](f32 a, f32 b) { return b - a; })},
           {"v_mul_f32", lanes([](f32 a, f32 b) { return a * b; })},
           {"v_min_f32", lanes([](f32 a, f32 b) { return minimum(a, b); })},
           {"v_max_f32", lanes([](f32 a, f32 b) { return maximum(a, b); })},
           {"v_mac_f32", accumulated([](f32 a, f32 b, f32 c) { return a * b + c; }), "gfx90a"},
           {"v_fmac_f32", accumulated(fused)},
           {"v_fmac_f64", accumulated([](f64 a, f64 b, f64 c) { return std::fma(a, b, c); })},
           {"v_add_u32", lanes([](u32 a, u32 b) { return a + b; })},
           {"v_sub_u32", lanes([](u32 a, u32 b) { return a - b; })},
           {"v_subrev_u32", lanes([](u32 a, u32 b) { return b - a; })},
           {"v_add_u32 clamp", lanes([](u32 a, u32 b) { return a + b < a ? ~0u : a + b; })},
           {"v_sub_u32 clamp", lanes([](u32 a, u32 b) { return a < b ? 0u : a - b; })},
           {"v_subrev_u32 clamp", lanes([](u32 a, u32 b) { return b < a ? 0u : b - a; })},
           {"v_add_u16", lanes([](u16 a, u16 b) { return static_cast<u16>(a + b); })},
           {"v_sub_u16", lanes([](u16 a, u16 b) { return static_cast<u16>(a - b); })},
           {"v_subrev_u16", lanes([](u16 a, u16 b) { return static_cast<u16>(b - a); })},
           {"v_mul_lo_u16", lanes([](u16 a, u16 b) { return static_cast<u16>(u32{a} * b); })},
           {"v_lshlrev_b16", lanes([](u16 a, u16 b) { return static_cast<u16>(b << (a & 15)); })},
           {"v_lshrrev_b16", lanes([](u16 a, u16 b) { return static_cast<u16>(b >> (a & 15)); })},
           {"v_ashrrev_i16", lanes([](u16 a, i16 b) { return static_cast<i16>(b >> (a & 15)); })},
           {"v_add_f16", lanes([](f16 a, f16 b) { return to_f16(to_f32(a) + to_f32(b)); })},
           {"v_sub_f16", lanes([](f16 a, f16 b) { return to_f16(to_f32(a) - to_f32(b)); })},
           {"v_mul_f16", lanes([](f16 a, f16 b) { return to_f16(to_f32(a) * to_f32(b)); })},
           {"v_and_b32", lanes([](u32 a, u32 b) { return a & b; })},
           {"v_or_b32", lanes([](u32 a, u32 b) { return a | b; })},
           {"v_xor_b32", lanes([](u32 a, u32 b) { return a ^ b; })},
           {"v_xnor_b32", lanes([](u32 a, u32 b) { return ~(a ^ b); })},
           {"v_lshlrev_b32", lanes(shift_left)},
           {"v_lshrrev_b32", lanes([](u32 a, u32 b) { return b >> (a & 31); })},
           {"v_ashrrev_i32", lanes([](u32 a, i32 b) { return b >> (a & 31); })},
           {"v_min_i32", lanes([](i32 a, i32 b) { return std::min(a, b); })},
           {"v_max_i32", lanes([](i32 a, i32 b) { return std::max(a, b); })},
           {"v_min_u32", lanes([](u32 a, u32 b) { return std::min(a, b); })},
           {"v_max_u32", lanes([](u32 a, u32 b) { return std::max(a, b); })},
           {"v_mul_u32_u24", lanes([](u32 a, u32 b) { return low_24(a) * low_24(b); })},
           {"v_mul_i32_i24", lanes([](i32 a, i32 b) { return multiply_add(low_24(a), low_24(b), 0); })},
           {"v_mul_hi_u32_u24", lanes([](u32 a, u32 b) { return high_word(u64{low_24(a)} * low_24(b)); })},
           {"v_cndmask_b32", {select, "d012", {Type::WORD, Type::WORD, Type::TWO_WORDS}}},
           {"v_add_co_u32", with_carry("dm01", [](u64 a, u64 b, u64) { return a + b; })},
           {"v_sub_co_u32", with_carry("dm01", [](u64 a, u64 b, u64) { return a - b; })},
           {"v_subrev_co_u32", with_carry("dm01", [](u64 a, u64 b, u64) { return b - a; })},
           {"v_addc_co_u32", with_carry("dm012", [](u64 a, u64 b, u64 c) { return a + b + c; })},
           {"v_subb_co_u32", with_carry("dm012", [](u64 a, u64 b, u64 c) { return a - b - c; })},
           {"v_subbrev_co_u32", with_carry("dm012", [](u64 a, u64 b, u64 c) { return b - a - c; })},
       }},
      {"AMD Instinct MI200 ISA, 12: VOP3A and VOP3B",
       {
           {"v_fma_f32", lanes(fused)},
           {"v_fma_f64", lanes([](f64 a, f64 b, f64 c) { return std::fma(a, b, c); })},
           {"v_add_f64", lanes([](f64 a, f64 b) { return a + b; })},
           {"v_mul_f64", lanes([](f64 a, f64 b) { return a * b; })},
           {"v_min_f64", lanes([](f64 a, f64 b) { return minimum(a, b); })},
           {"v_max_f64", lanes([](f64 a, f64 b) { return maximum(a, b); })},
           {"v_min3_f32", lanes([](f32 a, f32 b, f32 c) { return minimum(minimum(a, b), c); })},
           {"v_max3_f32", lanes([](f32 a, f32 b, f32 c) { return maximum(maximum(a, b), c); })},
           {"v_med3_f32", lanes([](f32 a, f32 b, f32 c) { return middle(a, b, c); })},
           {"v_min3_i32", lanes([](i32 a, i32 b, i32 c) { return std::min(std::min(a, b), c); })},
           {"v_max3_i32", lanes([](i32 a, i32 b, i32 c) { return std::max(std::max(a, b), c); })},
           {"v_med3_i32", lanes([](i32 a, i32 b, i32 c) { return middle_integer(a, b, c); })},
           {"v_min3_u32", lanes([](u32 a, u32 b, u32 c) { return std::min(std::min(a, b), c); })},
           {"v_max3_u32", lanes([](u32 a, u32 b, u32 c) { return std::max(std::max(a, b), c); })},
           {"v_med3_u32", lanes([](u32 a, u32 b, u32 c) { return middle_integer(a, b, c); })},
           {"v_ldexp_f32", lanes([](f32 a, i32 b) { return std::ldexp(a, b); })},
           {"v_ldexp_f64", lanes([](f64 a, i32 b) { return std::ldexp(a, b); })},
           {"v_mul_lo_u32", lanes([](u32 a, u32 b) { return a * b; })},
           {"v_mul_hi_u32", lanes([](u32 a, u32 b) { return high_word(u64{a} * b); })},
           {"v_mul_hi_i32", lanes([](i32 a, i32 b) { return static_cast<i32>(i64{a} * b >> 32); })},
           {"v_mad_u32_u24", lanes([](u32 a, u32 b, u32 c) { return low_24(a) * low_24(b) + c; })},
           {"v_mad_i32_i24", lanes([](i32 a, i32 b, i32 c) { return multiply_add(low_24(a), low_24(b), c); })},
           {"v_mad_u64_u32", wide<u32, u64>()},
           {"v_mad_i64_i32", wide<i32, i64>()},
           {"v_add3_u32", lanes([](u32 a, u32 b, u32 c) { return a + b + c; })},
           {"v_lshl_add_u32", lanes([](u32 a, u32 b, u32 c) { return (a << (b & 31)) + c; })},
           {"v_add_lshl_u32", lanes([](u32 a, u32 b, u32 c) { return (a + b) << (c & 31); })},
           {"v_lshl_or_b32", lanes([](u32 a, u32 b, u32 c) { return a << (b & 31) | c; })},
           {"v_and_or_b32", lanes([](u32 a, u32 b, u32 c) { return (a & b) | c; })},
           {"v_or3_b32", lanes([](u32 a, u32 b, u32 c) { return a | b | c; })},
           {"v_xad_u32", lanes([](u32 a, u32 b, u32 c) { return (a ^ b) + c; })},
           {"v_lshlrev_b64", lanes([](u32 a, u64 b) { return b << (a & 63); })},
           {"v_lshrrev_b64", lanes([](u32 a, u64 b) { return b >> (a & 63); })},
           {"v_ashrrev_i64", lanes([](u32 a, i64 b) { return b >> (a & 63); })},
           {"v_bfe_u32", lanes([](u32 a, u32 b, u32 c) { return a >> (b & 31) & ((1u << (c & 31)) - 1); })},
           {"v_bfe_i32", lanes([](i32 a, u32 b, u32 c) { return signed_field(a, b, c); })},
           {"v_bfi_b32", lanes([](u32 a, u32 b, u32 c) { return (a & b) | (~a & c); })},
           {"v_alignbit_b32", lanes([](u32 a, u32 b, u32 c) { return low_word((u64{a} << 32 | b) >> (c & 31)); })},
           {"v_alignbyte_b32", lanes([](u32 a, u32 b, u32 c) { return low_word((u64{a} << 32 | b) >> 8 * (c & 3)); })},
           {"v_perm_b32", lanes([](u32 a, u32 b, u32 c) { return permuted(a, b, c); })},
           {"v_bcnt_u32_b32", lanes([](u32 a, u32 b) { return static_cast<u32>(std::popcount(a)) + b; })},
           {"v_mbcnt_lo_u32_b32", {count_below<false>, "d01"}},
           {"v_mbcnt_hi_u32_b32", {count_below<true>, "d01"}},
           {"v_readlane_b32", {read_lane, "d01"}},
           {"v_writelane_b32", {write_lane, "d01"}},
           {"v_div_scale_f32", {div_scale<f32>, "dm012", {Type::F32, Type::F32, Type::F32}}},
           {"v_div_scale_f64", {div_scale<f64>, "dm012", {Type::F64, Type::F64, Type::F64}}},
           {"v_div_fmas_f32", {div_fmas<f32>, "d012", {Type::F32, Type::F32, Type::F32}}},
           {"v_div_fmas_f64", {div_fmas<f64>, "d012", {Type::F64, Type::F64, Type::F64}}},
           {"v_div_fixup_f32", lanes([](f32 a, f32 b, f32 c) { return division_fixup(a, b, c); })},
           {"v_div_fixup_f64", lanes([](f64 a, f64 b, f64 c) { return division_fixup(a, b, c); })},
       }},
      {"AMD Instinct MI300 ISA, 12: VOP2",
       {
           {"v_fmamk_f32", lanes(fused), "gfx942 gfx950"},
           {"v_fmaak_f32", lanes(fused), "gfx942 gfx950"},
       }},
      {"AMD Instinct MI300 ISA, 12: VOP3A",
       {{"v_lshl_add_u64", lanes([](u64 a, u32 b, u64 c) { return (a << (b & 7)) + c; }), "gfx942 gfx950"}}},
      {"AMD CDNA4 ISA: VOP3A",
       {
           {"v_bitop3_b32", {by_table, "d012"}, "gfx950"},
           {"v_cvt_pk_f16_f32", lanes([](f32 a, f32 b) { return u32{to_f16(b).bits} << 16 | to_f16(a).bits; }),
            "gfx950"},
       }},
      {"AMD Instinct MI200 ISA, 12: VOP3P (moves between VGPRs and AccVGPRs)",
       {
           {"v_accvgpr_read_b32", lanes([](u32 a) { return a; })},
           {"v_accvgpr_write_b32", lanes([](u32 a) { return a; })},
           {"v_accvgpr_mov_b32", lanes([](u32 a) { return a; })},
       }},
  };
}

}  // namespace emulator
