// Instructions on two numbers of each lane, and the matrix cores.
#include "lanes.h"

namespace emulator {
namespace {

Operation of_halves(Execute execute, const char* operands, Type type) {
  Operation made{execute, operands, {type, type, type}};
  made.halves = true;
  return made;
}

bool bit(u8 bits, int source) { return bits >> source & 1; }

// Of a packed source, the one of the two that the low or high result takes.
bool picked(const Instruction& in, int source, int half) { return bit(half ? in.op_sel_hi : in.op_sel, source); }
bool negated(const Instruction& in, int source, int half) { return bit(half ? in.neg_hi : in.neg_lo, source); }

// Two registers a source.
Values<u32> read_register(const Wave& w, const Operand& source, bool second) {
  Values<u32> words;
  if (source.kind == Operand::VECTOR) {
    std::memcpy(words.data(), w.v[source.reg + second].lane, sizeof words);
  } else {
    words.fill(source.kind == Operand::SCALAR ? w.s[source.reg + second] : low_word(source.constant));
  }
  return words;
}

template <class F, size_t N>
struct TwoFloats {
  template <size_t... I>
  static Values<f32> half(const Wave& w, const Instruction& in, int half, std::index_sequence<I...>) {
    Values<f32> sources[N];
    for (size_t k = 0; k < N; k++) {
      const auto words = read_register(w, in.source[k], picked(in, static_cast<int>(k), half));
      const u32 sign = negated(in, static_cast<int>(k), half) ? 0x80000000 : 0;
      for (int i = 0; i < LANES; i++) sources[k][i] = bit_cast<f32>(words[i] ^ sign);
    }
    Values<f32> results;
    for (int i = 0; i < LANES; i++) results[i] = function<F>(sources[I][i]...);
    return results;
  }
  static void execute(Wave& w, const Instruction& in) {
    constexpr auto EACH = std::make_index_sequence<N>();
    const auto low = half(w, in, 0, EACH), high = half(w, in, 1, EACH);
    write_words(w, in.to.reg, bit_cast<Values<u32>>(low).data());
    write_words(w, in.to.reg + 1, bit_cast<Values<u32>>(high).data());
  }
};
template <class F>
Operation two_floats(F) {
  constexpr size_t N = LaneFunctionOf<F>::sources;
  return of_halves(TwoFloats<F, N>::execute, N == 2 ? "d01" : "d012", Type::F32);
}

// The low result is a word of the first source, the high one of the second.
void move_two(Wave& w, const Instruction& in) {
  const auto low = read_register(w, in.source[0], bit(in.op_sel, 0)),
             high = read_register(w, in.source[1], bit(in.op_sel, 1));
  write_words(w, in.to.reg, low.data());
  write_words(w, in.to.reg + 1, high.data());
}

// Two numbers of 16 bits a source.
template <class F>
struct TwoHalvesOf : TwoHalvesOf<decltype(&F::operator())> {};
template <class F, class R, class A, class B>
struct TwoHalvesOf<R (F::*)(A, B) const> {
  static void execute(Wave& w, const Instruction& in) {
    const Source<u32> a(w, in.source[0]), b(w, in.source[1]);
    Values<u32> results{};
    for (int half = 0; half < 2; half++) {
      const int from_a = picked(in, 0, half) ? 16 : 0, from_b = picked(in, 1, half) ? 16 : 0;
      const u16 flip_a = negated(in, 0, half) ? 0x8000 : 0, flip_b = negated(in, 1, half) ? 0x8000 : 0;
      for (int i = 0; i < LANES; i++) {
        const auto x = bit_cast<A>(static_cast<u16>(a[i] >> from_a ^ flip_a));
        const auto y = bit_cast<B>(static_cast<u16>(b[i] >> from_b ^ flip_b));
        results[i] |= static_cast<u32>(bit_cast<u16>(function<F>(x, y))) << 16 * half;
      }
    }
    write_words(w, in.to.reg, results.data());
  }
};
template <class F>
Operation two_halves(F) {
  return of_halves(TwoHalvesOf<F>::execute, "d01", Type::F16);
}

void pack_halves(Wave& w, const Instruction& in) {
  const Source<u32> a(w, in.source[0]), b(w, in.source[1]);
  Values<u32> results;
  for (int i = 0; i < LANES; i++) {
    results[i] = half_of(a[i], bit(in.op_sel, 0)) | static_cast<u32>(half_of(b[i], bit(in.op_sel, 1))) << 16;
  }
  write_words(w, in.to.reg, results.data());
}

// A source is FP16 where op_sel_hi says so, of the half that op_sel names; else float32.
Values<f32> read_mixed(const Wave& w, const Instruction& in, int source) {
  Operand plain = in.source[source];
  plain.absolute = plain.negative = false;
  const Source<u32> words(w, plain);
  Values<f32> values;
  for (int i = 0; i < LANES; i++) {
    const f32 value =
        bit(in.op_sel_hi, source) ? to_f32(f16{half_of(words[i], bit(in.op_sel, source))}) : bit_cast<f32>(words[i]);
    const f32 size = in.source[source].absolute ? std::fabs(value) : value;
    values[i] = in.source[source].negative ? -size : size;
  }
  return values;
}
void fused_mixed(Wave& w, const Instruction& in) {
  const auto a = read_mixed(w, in, 0), b = read_mixed(w, in, 1), c = read_mixed(w, in, 2);
  Values<f32> results;
  for (int i = 0; i < LANES; i++) results[i] = std::fma(a[i], b[i], c[i]);
  write<f32>(w, in, results);
}

// Two FP4 numbers, those of the byte that op_sel names, times the power of two that is the second source's exponent. No
// number of the kernels' is rounded.
template <class Format>
void convert_fp4(Wave& w, const Instruction& in) {
  constexpr f32 MAGNITUDES[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const Source<u32> codes(w, in.source[0]), scales(w, in.source[1]);
  const int byte = bit(in.op_sel, 0) + 2 * bit(in.op_sel, 1);
  Values<u32> results{};
  for (int i = 0; i < LANES; i++) {
    const int power = exponent(bit_cast<f32>(scales[i])) - 127;
    for (int half = 0; half < 2; half++) {
      const u32 code = codes[i] >> (8 * byte + 4 * half);
      const f32 size = std::ldexp(MAGNITUDES[code & 7], power);
      results[i] |= static_cast<u32>(Format::bits(code & 8 ? -size : size)) << 16 * half;
    }
  }
  write_words(w, in.to.reg, results.data());
}

// ---- Matrix cores
// -----------------------------------------------------------------------------------------------------

struct Fp16 {
  static f32 value(u16 bits) { return to_f32(f16{bits}); }
  static u16 bits(f32 value) { return to_f16(value).bits; }
  static bool is_subnormal(u16 bits) { return (bits & 0x7c00) == 0; }
};
struct Bf16 {
  static f32 value(u16 bits) { return bf16_to_f32(bits); }
  // Of a value that has no more bits.
  static u16 bits(f32 value) { return half_of(bit_cast<u32>(value), 1); }
  static bool is_subnormal(u16 bits) { return (bits & 0x7f80) == 0; }
};

// An operand of 16 rows (A) or columns (B): a lane has one of them, at each of the four steps of 16 lanes DEEP values
// along K.
template <class Format, int DEEP>
void read_operand(const Wave& w, const Operand& source, f32 (&values)[4 * DEEP][16]) {
  for (int word = 0; word < DEEP / 2; word++) {
    const u32* words = w.v[source.reg + word].lane;
    for (int lane = 0; lane < LANES; lane++) {
      for (int half = 0; half < 2; half++) {
        const u16 bits = half_of(words[lane], half);
        const bool flushed = w.block->flushes_matrix_operands && Format::is_subnormal(bits);
        values[lane / 16 * DEEP + 2 * word + half][lane % 16] = flushed ? 0 : Format::value(bits);
      }
    }
  }
}

// D = A B + C on 16 rows by 16 columns, whatever EXEC is. Of C and D a lane has rows 4 (lane / 16) .. + 3 of column
// lane % 16. The order of the sums, which no document gives, is that of K; each step is rounded once.
template <class Format, int DEEP>
void multiply_matrices(Wave& w, const Instruction& in) {
  constexpr int K = 4 * DEEP;
  alignas(64) f32 a[K][16], b[K][16], d[16][16];
  read_operand<Format, DEEP>(w, in.source[0], a);
  read_operand<Format, DEEP>(w, in.source[1], b);
  for (int i = 0; i < 4; i++) {
    const auto words = read_register(w, in.source[2], false);
    const u32* c = in.source[2].kind == Operand::VECTOR ? w.v[in.source[2].reg + i].lane : words.data();
    for (int lane = 0; lane < LANES; lane++) d[lane / 16 * 4 + i][lane % 16] = bit_cast<f32>(c[lane]);
  }
  for (int row = 0; row < 16; row++) {
    for (int k = 0; k < K; k++) {
      for (int column = 0; column < 16; column++) d[row][column] = std::fma(a[k][row], b[k][column], d[row][column]);
    }
  }
  for (int i = 0; i < 4; i++) {
    u32* to = w.v[in.to.reg + i].lane;
    for (int lane = 0; lane < LANES; lane++) to[lane] = bit_cast<u32>(d[lane / 16 * 4 + i][lane % 16]);
  }
}
template <class Format, int DEEP>
Operation matrices() {
  return {multiply_matrices<Format, DEEP>, "d012", {Type::WORD, Type::WORD, Type::F32}};
}

u16 shifted_right(u16 by, u16 a) { return static_cast<u16>(a >> (by & 15)); }

}  // namespace

std::vector<Group> packed_instructions() {
  return {
      {"AMD Instinct MI200 ISA, 12: VOP3P",
       {
           {"v_pk_add_f32", two_floats([](f32 a, f32 b) { return a + b; })},
           {"v_pk_mul_f32", two_floats([](f32 a, f32 b) { return a * b; })},
           {"v_pk_fma_f32", two_floats([](f32 a, f32 b, f32 c) { return std::fma(a, b, c); })},
           {"v_pk_mov_b32", of_halves(move_two, "d01", Type::WORD)},
           {"v_pk_add_f16", two_halves([](f16 a, f16 b) { return to_f16(to_f32(a) + to_f32(b)); })},
           {"v_pk_mul_f16", two_halves([](f16 a, f16 b) { return to_f16(to_f32(a) * to_f32(b)); })},
           {"v_pk_add_u16", two_halves([](u16 a, u16 b) { return static_cast<u16>(a + b); })},
           {"v_pk_sub_i16", two_halves([](u16 a, u16 b) { return static_cast<u16>(a - b); })},
           {"v_pk_lshlrev_b16", two_halves([](u16 a, u16 b) { return static_cast<u16>(b << (a & 15)); })},
           {"v_pk_lshrrev_b16", two_halves([](u16 a, u16 b) { return shifted_right(a, b); })},
           {"v_fma_mix_f32", of_halves(fused_mixed, "d012", Type::F32)},
       }},
      {"AMD Instinct MI200 ISA, 12: VOP3A", {{"v_pack_b32_f16", of_halves(pack_halves, "d01", Type::F16)}}},
      {"AMD Instinct MI200 ISA, 12: VOP3P (MFMA)",
       {
           {"v_mfma_f32_16x16x16f16", matrices<Fp16, 4>(), "gfx90a"},
           {"v_mfma_f32_16x16x16bf16_1k", matrices<Bf16, 4>(), "gfx90a"},
       }},
      {"AMD Instinct MI300 ISA, 12: VOP3P (MFMA)",
       {
           {"v_mfma_f32_16x16x16_f16", matrices<Fp16, 4>(), "gfx942 gfx950"},
           {"v_mfma_f32_16x16x16_bf16", matrices<Bf16, 4>(), "gfx942 gfx950"},
       }},
      {"AMD CDNA4 ISA: VOP3A (conversions with a scale)",
       {
           {"v_cvt_scalef32_pk_f16_fp4", of_halves(convert_fp4<Fp16>, "d01", Type::F32), "gfx950"},
           {"v_cvt_scalef32_pk_bf16_fp4", of_halves(convert_fp4<Bf16>, "d01", Type::F32), "gfx950"},
       }},
      {"AMD CDNA4 ISA: VOP3P (MFMA)",
       {
           {"v_mfma_f32_16x16x32_f16", matrices<Fp16, 8>(), "gfx950"},
           {"v_mfma_f32_16x16x32_bf16", matrices<Bf16, 8>(), "gfx950"},
       }},
  };
}

}  // namespace emulator
