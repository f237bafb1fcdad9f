// Tests of the emulated SIMT machine. The first argument names one, none runs all. tests/simt/machine.rs builds and
// runs this, plain and with AddressSanitizer, which ends the program in the tests of the two overflows.
#include "gpu.h"

#include <cmath>
#include <cstdio>
#include <vector>

namespace {

struct ReduceArgs { const float* in; float* out; int n; int missing_barrier; };
struct MfmaArgs { const u16* a; const u16* b; const float* c; float* d; int bf16; int reserved; };
struct CaseArgs { int which; int reserved; int* out; };

}  // namespace

// Sums each block's share: waves by shuffles, then through shared memory.
KERNEL(test_reduce, ReduceArgs, 256, 1, 1) {
  SHARED float part[4];
  after_predecessor();
  const int i = BID * 256 + TID;
  const float sum = wave_sum(i < a.n ? a.in[i] : 0.f);
  if (LANE == 0) part[TID / WAVE] = sum;
  if (!a.missing_barrier) barrier();
  if (TID == 0) a.out[BID] = part[0] + part[1] + part[2] + part[3];
  if (TID == 255 && a.missing_barrier) a.out[BID] += part[0] * 0;
}

KERNEL(test_mfma_16, MfmaArgs, 64, 1, 1) {
  const int at = LANE % 16 * 16 + LANE / 16 * 4;
  const auto x = *(const simt::s16x4*)(a.a + at), y = *(const simt::s16x4*)(a.b + at);
  simt::f32x4v d;
  for (int i = 0; i < 4; i++) d[i] = a.c[(LANE / 16 * 4 + i) * 16 + LANE % 16];
  d = a.bf16 ? simt::mfma_16x16x16_bf16(x, y, d) : simt::mfma_16x16x16_f16(x, y, d);
  for (int i = 0; i < 4; i++) a.d[(LANE / 16 * 4 + i) * 16 + LANE % 16] = d[i];
}

KERNEL(test_mfma_32, MfmaArgs, 64, 1, 1) {
  const int at = LANE % 32 * 8 + LANE / 32 * 4;
  const auto x = *(const simt::s16x4*)(a.a + at), y = *(const simt::s16x4*)(a.b + at);
  const auto index = [](int i) { return (8 * (i / 4) + 4 * (LANE / 32) + i % 4) * 32 + LANE % 32; };
  simt::f32x16v d;
  for (int i = 0; i < 16; i++) d[i] = a.c[index(i)];
  d = a.bf16 ? simt::mfma_32x32x8_bf16(x, y, d) : simt::mfma_32x32x8_f16(x, y, d);
  for (int i = 0; i < 16; i++) a.d[index(i)] = d[i];
}

enum Case {
  DIVERGENT_COLLECTIVE, DIVERGENT_BARRIER, DIFFERENT_COLLECTIVES, SHUFFLE_FROM_ENDED, NO_AFTER_PREDECESSOR,
  SHARED_OVERFLOW, FIXED_SHARED_OVERFLOW, DEEP_STACK, NOT_UNIFORM,
  EARLY_EXIT, VOTES, POISONED, SHUFFLES, ATOMICS,
};
KERNEL(test_case, CaseArgs, 192, 1, 1) {
  SHARED float fixed[4];
  if (a.which != NO_AFTER_PREDECESSOR || TID != 100) after_predecessor();
  switch (a.which) {
    case DIVERGENT_COLLECTIVE: if (TID == 70) shfl(1, 0); else barrier(); break;
    case DIVERGENT_BARRIER: if (TID % 2) barrier(); else wave_any(true); break;
    case DIFFERENT_COLLECTIVES: if (TID % 2) shfl(1, 0); else wave_any(true); break;
    case SHUFFLE_FROM_ENDED: if (LANE != 3) shfl(1, 3); break;
    case SHARED_OVERFLOW: if (TID == 0) DYNAMIC_SHARED[1024] = 1; break;
    case FIXED_SHARED_OVERFLOW: if (TID == 0) fixed[a.out[0] + 4] = 1; break;
    case NOT_UNIFORM: __builtin_amdgcn_readfirstlane(TID / 100); break;
    case DEEP_STACK: {                                 // fills much of every fiber's stack, block after block
      volatile char deep[32 << 10];
      for (int i = 0; i < (int)sizeof deep; i += 64) deep[i] = (char)i;
      barrier();
      if (deep[64] != 64) a.out[0] = 1;
      break;
    }
    case EARLY_EXIT:                                   // the rest goes on without those that ended
      if (TID >= 128) return;
      barrier();
      if (TID >= 64 && LANE >= 32) return;
      if (wave_any(TID == 127)) a.out[0] = 1;
      barrier();
      if (TID == 0) a.out[1] = 5;
      break;
    case VOTES:
      if (wave_any(TID == 64) != (TID / WAVE == 1) || wave_any(false)) a.out[0] = 1;
      break;
    case POISONED:
      if (TID == 0 && (fixed[3] == fixed[3] || DYNAMIC_SHARED[1023] != 0xff)) a.out[0] = 1;
      barrier();
      fixed[TID % 4] = 0, DYNAMIC_SHARED[1023] = 0;
      break;
    case SHUFFLES:
      for (int o = 0; o < 64; o++)
        if (shfl(TID, o) != TID / WAVE * WAVE + o || shfl_xor(TID, o) != (TID ^ o)) a.out[0] = 1;
      if (wave_sum((double)TID) != TID / WAVE * 4096 + 2016) a.out[0] = 1;
      break;
    case ATOMICS:
      atomic_add(&a.out[1], 1);
      atomic_min(&a.out[2], -TID);
      atomic_max(&a.out[3], TID);
      break;
  }
}

namespace {

const int POLICIES[] = {SIMT_IN_ORDER, SIMT_RANDOM, SIMT_ONE_WAVE_FIRST};
char message[512];

template <class Args>
bool launch(simt_kernel kernel, int grid, int block, int shared, const Args& args, int policy, int seed) {
  message[0] = 0;
  return !simt_launch(kernel, grid, block, shared, &args, sizeof args, 2, policy, (unsigned)seed, message,
                      sizeof message);
}

bool expect(bool ok, const char* what) {
  if (!ok) printf("FAILED %s %s\n", what, message);
  return ok;
}

bool reduce_gives(bool missing_barrier, int policy, int seed, bool* right) {
  const int n = 1500, blocks = 6;
  std::vector<float> in(n), out(blocks, NAN);
  for (int i = 0; i < n; i++) in[i] = (float)(i % 17);
  const ReduceArgs args{in.data(), out.data(), n, missing_barrier};
  if (!launch(test_reduce, blocks, 256, 0, args, policy | SIMT_OVERLAPS, seed)) return false;
  *right = true;
  for (int b = 0; b < blocks; b++) {
    float want = 0;
    for (int i = b * 256; i < (b + 1) * 256 && i < n; i++) want += in[i];
    *right &= out[b] == want;
  }
  return true;
}

bool reduce() {
  bool ok = true, right;
  for (int policy : POLICIES)
    for (int seed = 0; seed < 10; seed++) ok &= expect(reduce_gives(false, policy, seed, &right) && right, "reduce");
  for (int policy : {SIMT_RANDOM, SIMT_ONE_WAVE_FIRST}) {
    int wrong = 0;
    for (int seed = 0; seed < 10; seed++)
      ok &= expect(reduce_gives(true, policy, seed, &right), "reduce"), wrong += !right;
    ok &= expect(wrong == 10, "a missing barrier gives right sums");
  }
  return ok;
}

// Small integers, whose sums are exact in either format and in any order; and subnormals, which count as zeros.
bool mfma(int m, int k, bool bf16) {
  std::vector<float> a(m * k), b(m * k), c(m * m), d(m * m, NAN);
  std::vector<u16> a16(m * k), b16(m * k);
  const auto to_16_bits = [&](float v) { return bf16 ? to_bf16(v) : to_f16(v); };
  for (int i = 0; i < m * k; i++) {
    a[i] = (float)(i * 7 % 31 - 15), b[i] = (float)(i * 11 % 29 - 14);
    a16[i] = to_16_bits(a[i]), b16[i] = to_16_bits(b[i]);
    if (i % 13 == 5) a16[i] = (u16)(i % 2 ? 0x8003 : 0x007f), a[i] = 0;
  }
  for (int i = 0; i < m * m; i++) c[i] = (float)(i % 101);
  const MfmaArgs args{a16.data(), b16.data(), c.data(), d.data(), bf16, 0};
  bool ok = true;
  for (int policy : POLICIES) {
    ok &= launch(m == 16 ? test_mfma_16 : test_mfma_32, 1, 64, 0, args, policy, 3);
    for (int i = 0; i < m; i++)
      for (int j = 0; j < m; j++) {
        float want = c[i * m + j];
        for (int l = 0; l < k; l++) want += a[i * k + l] * b[j * k + l];
        ok &= d[i * m + j] == want;
      }
  }
  return expect(ok, "mfma");
}

bool mfma_all() { return mfma(16, 16, false) && mfma(16, 16, true) && mfma(32, 8, false) && mfma(32, 8, true); }

bool run_case(Case which, int policy, int (&out)[4]) {
  const CaseArgs args{which, 0, out};
  return launch(test_case, 3, 192, 1024, args, policy, 11);
}

bool fails(Case which, const char* kernel_and_words, int policies_from = 0) {
  bool ok = true;
  for (int policy : POLICIES) {
    if (policy < policies_from) continue;
    int out[4] = {};
    ok &= expect(!run_case(which, policy | SIMT_OVERLAPS, out) && strstr(message, "kernel test_case, block ") &&
                     strstr(message, kernel_and_words), kernel_and_words);
  }
  return ok;
}

bool errors() {
  bool ok = fails(DIVERGENT_COLLECTIVE, "thread 70: divergence: waits in shfl");
  ok &= fails(DIVERGENT_BARRIER, "waits in wave_any");
  ok &= fails(DIFFERENT_COLLECTIVES, "divergent collectives");
  ok &= fails(SHUFFLE_FROM_ENDED, "shfl from lane 3, which has ended");
  ok &= fails(NO_AFTER_PREDECESSOR, "thread 100: ended without after_predecessor()");
  ok &= fails(NOT_UNIFORM, "readfirstlane", SIMT_RANDOM);
  int out[4] = {};
  const CaseArgs args{VOTES, 0, out};
  ok &= expect(!launch(test_case, 1, 128, 0, args, 0, 0) && strstr(message, "launched with 128 threads, made for 192"),
               "threads");
  ok &= expect(!launch(test_case, 1, 192, 65537, args, 0, 0) && strstr(message, "shared memory"), "shared bytes");
  ok &= expect(!launch(test_case, 1, 192, 0, 'x', 0, 0) && strstr(message, "1 bytes of arguments, wants 16"),
               "argument bytes");
  ok &= expect(!launch(test_case, 0, 192, 0, args, 0, 0) && strstr(message, "grid"), "grid");
  return ok && expect(launch(test_case, 1, 192, 0, args, 0, 0) && !out[0], "a launch after failed ones");
}

bool works(Case which, const char* what) {
  bool ok = true;
  for (int policy : POLICIES) {
    int out[4] = {};
    ok &= expect(run_case(which, policy, out) && out[0] == 0, what);
    if (which == EARLY_EXIT) ok &= expect(out[1] == 5, what);
    if (which == ATOMICS) ok &= expect(out[1] == 3 * 192 && out[2] == -191 && out[3] == 191, what);
  }
  return ok;
}

bool words() {
  return works(VOTES, "votes") && works(SHUFFLES, "shuffles") && works(ATOMICS, "atomics") &&
         works(EARLY_EXIT, "early exit");
}

bool poison() {
#ifdef SIMT_ASAN
  return true;                                         // SHARED is not poisoned there
#else
  return works(POISONED, "poison");
#endif
}

bool stack_reuse() {
  return works(DEEP_STACK, "deep stack") && fails(DIVERGENT_BARRIER, "wave_any") && works(DEEP_STACK, "deep stack");
}

bool shared_overflow() { return fails(SHARED_OVERFLOW, "wrote behind its 1024 bytes of shared memory"); }

// Detected by AddressSanitizer alone, which ends the program.
bool fixed_shared_overflow() {
#ifdef SIMT_ASAN
  return !works(FIXED_SHARED_OVERFLOW, "fixed shared overflow");
#else
  return true;
#endif
}

bool formats() {
  bool ok = true;
  for (unsigned h = 0; h < 65536; h++) {
    const float f = f16_to_f32((u16)h), g = bf16_to_f32((u16)h);
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                            : exponent     ? std::ldexp((float)(1024 + fraction), exponent - 25)
                                           : std::ldexp((float)fraction, -24);
    ok &= std::isnan(magnitude) ? std::isnan(f) && std::isnan(f16_to_f32(to_f16(f)))
                                : f == (h >> 15 ? -magnitude : magnitude) && to_f16(f) == h;
    ok &= std::isnan(g) || to_bf16(g) == h;
    if (exponent >= 30) continue;                      // halfway to the next: to even
    const float next = f16_to_f32((u16)(h + 1)), half = (f + next) / 2;
    ok &= to_f16(half) == (h % 2 ? h + 1 : h);
    ok &= to_f16(std::nextafter(half, next)) == h + 1 && to_f16(std::nextafter(half, f)) == h;
  }
  ok &= to_f16(65519.f) == 0x7bff && to_f16(-1e30f) == 0xfbff && to_f16(INFINITY) == 0x7c00;
  ok &= pack_f16(1.f, 2.f) == 0x40003c00;
  ok &= __builtin_amdgcn_perm(0x07060504, 0x03020100, 0x0c0d0700) == 0x00ff0700;
  ok &= __builtin_amdgcn_alignbit(0x12345678, 0x9abcdef0, 16) == 0x56789abc;
  return expect(ok, "formats");
}

const struct { const char* name; bool (*run)(); } TESTS[] = {
    {"reduce", reduce}, {"mfma", mfma_all}, {"errors", errors}, {"words", words}, {"poison", poison},
    {"stack_reuse", stack_reuse}, {"formats", formats},
    {"shared_overflow", shared_overflow}, {"fixed_shared_overflow", fixed_shared_overflow},
};

}  // namespace

int main(int argc, char** argv) {
  int failed = 0;
  for (const auto& test : TESTS) {
    if (argc > 1 && strcmp(argv[1], test.name) != 0) continue;
    const bool ok = test.run();
    printf("%s %s\n", test.name, ok ? "ok" : "FAILED");
    failed += !ok;
  }
  return failed != 0;
}
