// Values that kernels hand on to the kernels after them. Where each kernel is a launch of its own, these are plain
// loads and stores. Within one launch (ONE_LAUNCH, see cdna/one_launch.h and ampere/one_launch.h) blocks hand them on
// to blocks that run meanwhile: a word of memory is NOT_YET until it is written, once, and who takes it polls. Both
// reach the whole device, past caches that do not see each other.
//
// A block waits as long as it is told (wait_at_most). If a value does not come the host is told, and nobody waits any
// longer: AMD's waves end, NVIDIA's, which meet others at barriers, go on with what is there. Who polls calls
// still_wait() each time; false: it takes what is there.
//
// No value is NOT_YET: as float32 it is one of the NaNs, as two 16-bit numbers it is two, which become others. Numbers
// that are handed on are not negative.
#pragma once

enum : unsigned { NOT_YET = 0xffffffff };

#if defined(ONE_LAUNCH) && (defined(__AMDGCN__) || defined(__CUDACC__))
enum : bool { WITHIN_LAUNCH = true };

#if defined(__AMDGCN__)
// A value's words, in the pieces that are loaded and stored in one access.
template <int BYTES> struct Handed {
  enum : int { PIECES = BYTES / 8 };
  unsigned long long of[PIECES];
  DEV void load(const void* at) {
    for (int i = 0; i < PIECES; i++)
      of[i] = __hip_atomic_load((const __attribute__((address_space(1))) unsigned long long*)at + i, __ATOMIC_RELAXED,
                                __HIP_MEMORY_SCOPE_AGENT);
  }
  DEV void store(void* at) const {
    for (int i = 0; i < PIECES; i++)
      __hip_atomic_store((__attribute__((address_space(1))) unsigned long long*)at + i, of[i], __ATOMIC_RELAXED,
                         __HIP_MEMORY_SCOPE_AGENT);
  }
  DEV unsigned word(int i) const { return (unsigned)(of[i / 2] >> i % 2 * 32); }
  DEV void give(const unsigned* words) {
    for (int i = 0; i < PIECES; i++) of[i] = (unsigned long long)words[2 * i + 1] << 32 | words[2 * i];
  }
};
template <> struct Handed<4> {
  unsigned of;
  DEV void load(const void* at) {
    of = __hip_atomic_load((const __attribute__((address_space(1))) unsigned*)at, __ATOMIC_RELAXED,
                           __HIP_MEMORY_SCOPE_AGENT);
  }
  DEV void store(void* at) const {
    __hip_atomic_store((__attribute__((address_space(1))) unsigned*)at, of, __ATOMIC_RELAXED,
                       __HIP_MEMORY_SCOPE_AGENT);
  }
  DEV unsigned word(int) const { return of; }
  DEV void give(const unsigned* words) { of = words[0]; }
};

// Until when the block waits, by the low word of a clock of 100 MHz, and where it says that it has waited longer.
struct Patience {
  unsigned until;
  unsigned* in_vain;
};
static SHARED Patience patience;

DEV unsigned clock_now() { return (unsigned)__builtin_amdgcn_s_memrealtime(); }
// All threads call it before they wait.
DEV void wait_at_most(int ticks, unsigned* in_vain) {
  if (TID == 0) patience = {clock_now() + (unsigned)ticks, in_vain};
  barrier();
}
// In assembly, whose only scalar register is vcc: the compiler would take others, and the kernel has none left.
DEV bool still_wait() {
  unsigned until = patience.until;
  asm volatile(
      "s_memrealtime vcc\n"
      "s_waitcnt lgkmcnt(0)\n"
      "v_sub_u32 %0, vcc_lo, %0\n"
      "v_cmp_lt_i32 vcc, 0, %0\n"
      "s_cbranch_vccz 1f\n"
      "v_mov_b32 %0, 1\n"
      "global_store_dword %1, %0, off\n"
      "s_endpgm\n"
      "1:"
      : "+&v"(until)
      : "v"(patience.in_vain)
      : "vcc", "memory");
  return true;
}
// What the wave has handed on or left is there for the whole device.
DEV void wait_for_stores() { asm volatile("s_waitcnt vmcnt(0)" : : : "memory"); }
#else
// A value's words. The accesses are of the device's scope, which is the L2; each word of one stands for itself.
template <int BYTES> struct Handed;
template <> struct Handed<4> {
  unsigned of[1];
  DEV void load(const void* at) {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(of[0]) : "l"(at) : "memory");
  }
  DEV void store(void* at) const {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(of[0]) : "memory");
  }
  DEV unsigned word(int i) const { return of[i]; }
  DEV void give(const unsigned* words) { of[0] = words[0]; }
};
template <> struct Handed<8> {
  unsigned of[2];
  DEV void load(const void* at) {
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(of[0]), "=r"(of[1]) : "l"(at) : "memory");
  }
  DEV void store(void* at) const {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(of[0]), "r"(of[1]) : "memory");
  }
  DEV unsigned word(int i) const { return of[i]; }
  DEV void give(const unsigned* words) { for (int i = 0; i < 2; i++) of[i] = words[i]; }
};
template <> struct Handed<16> {
  unsigned of[4];
  DEV void load(const void* at) {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(of[0]), "=r"(of[1]), "=r"(of[2]), "=r"(of[3]) : "l"(at) : "memory");
  }
  DEV void store(void* at) const {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(at), "r"(of[0]), "r"(of[1]), "r"(of[2]), "r"(of[3]) : "memory");
  }
  DEV unsigned word(int i) const { return of[i]; }
  DEV void give(const unsigned* words) { for (int i = 0; i < 4; i++) of[i] = words[i]; }
};

// Until when the block waits, in nanoseconds of the device's clock; 0: it waits no longer. And where it says so.
struct Patience {
  unsigned long long until;
  unsigned* in_vain;
};
static SHARED volatile Patience patience;

DEV unsigned long long clock_now() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
// All threads call it before they wait; `ticks` are 10 ns.
DEV void wait_at_most(int ticks, unsigned* in_vain) {
  if (TID == 0) patience.until = clock_now() + ticks * 10ll, patience.in_vain = in_vain;
  barrier();
}
DEV bool still_wait() {
  const unsigned long long until = patience.until;
  if (clock_now() < until) return true;
  if (until) *patience.in_vain = 1, patience.until = 0;
  return false;
}
#endif

// What is there now.
template <class T> DEV T peek(const T* at) {
  Handed<sizeof(T)> handed;
  handed.load(at);
  return __builtin_bit_cast(T, handed);
}
template <class T> DEV bool is_there(const T& v) {
  const auto handed = __builtin_bit_cast(Handed<sizeof(T)>, v);
  unsigned most = 0;
  for (int i = 0; i < (int)sizeof(T) / 4; i++) most = handed.word(i) > most ? handed.word(i) : most;
  return most != NOT_YET;
}
// Leaves a value as it is, for those who know otherwise that it is there.
template <class T> DEV void leave_as_is(T* at, const T& v) { __builtin_bit_cast(Handed<sizeof(T)>, v).store(at); }
template <class T> DEV void hand_on(T* at, const T& v) {
  auto handed = __builtin_bit_cast(Handed<sizeof(T)>, v);
  unsigned words[sizeof(T) / 4];
  for (int i = 0; i < (int)sizeof(T) / 4; i++)
    words[i] = handed.word(i) < NOT_YET ? handed.word(i) : (unsigned)NOT_YET - 1;
  handed.give(words);
  handed.store(at);
}
#else
enum : bool { WITHIN_LAUNCH = false };
DEV void wait_at_most(int, unsigned*) {}
DEV bool still_wait() { return true; }
template <class T> DEV T peek(const T* at) { return *at; }
template <class T> DEV constexpr bool is_there(const T&) { return true; }
template <class T> DEV void leave_as_is(T* at, const T& v) { *at = v; }
template <class T> DEV void hand_on(T* at, T v) { *at = v; }
DEV void wait_for_stores() {}
#endif

template <class T> DEV T take(const T* at) {
  T v = peek(at);
  while (!is_there(v) && still_wait()) v = peek(at);
  return v;
}
