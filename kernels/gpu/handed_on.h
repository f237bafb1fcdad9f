// Values that kernels hand on to the kernels after them. Where each kernel is a launch of its own, these are plain
// loads and stores. Within one launch (ONE_LAUNCH, see cdna/one_launch.h) blocks hand them on to blocks that run
// meanwhile: a word of memory is NOT_YET until it is written, once, and who takes it polls. Both reach the whole
// device, past caches that do not see each other.
//
// A block waits as long as it is told (wait_at_most): if a value does not come, its waves say so and end. Who polls
// calls still_wait() each time.
//
// No value is NOT_YET: as float32 it is one of the NaNs, as two 16-bit numbers it is two, which become others. Numbers
// that are handed on are not negative.
#pragma once

enum : unsigned { NOT_YET = 0xffffffff };

#if defined(ONE_LAUNCH) && defined(__AMDGCN__)
enum : bool { WITHIN_LAUNCH = true };

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
DEV void still_wait() {
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
}

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
// What the wave has handed on or left is there for the whole device.
DEV void wait_for_stores() { asm volatile("s_waitcnt vmcnt(0)" : : : "memory"); }
#else
enum : bool { WITHIN_LAUNCH = false };
DEV void wait_at_most(int, unsigned*) {}
DEV void still_wait() {}
template <class T> DEV T peek(const T* at) { return *at; }
template <class T> DEV constexpr bool is_there(const T&) { return true; }
template <class T> DEV void leave_as_is(T* at, const T& v) { *at = v; }
template <class T> DEV void hand_on(T* at, T v) { *at = v; }
DEV void wait_for_stores() {}
#endif

template <class T> DEV T take(const T* at) {
  T v = peek(at);
  while (!is_there(v)) {
    still_wait();
    v = peek(at);
  }
  return v;
}
