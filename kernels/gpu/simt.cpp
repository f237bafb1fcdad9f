// The implementation of simt.h: fibers, waves, blocks, matrix instructions.
#include "simt.h"

#include <link.h>
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#ifdef SIMT_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef __clang__
#pragma GCC optimize("O3")                           // vectorized matrix instructions, whatever the kernels' options
#endif

namespace simt {
namespace {

// What all launches have in common: one object of each type. It is never destroyed, since other threads may launch
// kernels until the process ends.
template <class T> T& kept() {
  static T* one = new T;
  return *one;
}

constexpr int LANES = 64;
constexpr int MAX_WAVES = MAX_THREADS / LANES;
constexpr size_t STACK_BYTES = 128 << 10, PAGE_BYTES = 4096;
constexpr size_t HEADER_BYTES = 1 << 20;             // of the arena, for the machine; stacks follow
constexpr size_t COLOUR_BYTES = 832;                 // offset between stacks, against conflicts in cache sets
constexpr int GUARD_BYTES = 64;                      // behind dynamic shared memory, checked after each block
constexpr unsigned char POISON = 0xff;               // NaN in every format
constexpr char SHARED_GUARD = 0x5a;

enum Collective { SHUFFLE, VOTE, UNIFORM, MFMA_16_F16, MFMA_16_BF16, MFMA_32_F16, MFMA_32_BF16 };
const char* const COLLECTIVE_NAMES[] = {"shfl", "wave_any", "readfirstlane", "mfma_16x16x16_f16", "mfma_16x16x16_bf16",
                                        "mfma_32x32x8_f16", "mfma_32x32x8_bf16"};

// Bit masks of lanes. A live lane is ready (or running), waits in a collective, or waits at the barrier.
struct Wave {
  uint64_t live, ready, waiting;
  uint64_t after_predecessor;       // lanes that have called it
  Collective collective;            // the one under way
  bool vote, voted;
  // Values of shuffles, double-buffered: a lane that runs ahead writes one half while others still read the other.
  int turn;
  uint64_t values[2][LANES];
  uint64_t present[2];
  // Operands; a lane's result replaces its C.
  alignas(64) s16x4 a[LANES];
  alignas(64) s16x4 b[LANES];
  union {
    alignas(64) f32x4v c4[LANES];
    alignas(64) f32x16v c16[LANES];
  };
};

struct Launch {
  simt_kernel kernel;
  const char* name;
  int grid, threads, shared_bytes, policy;
  bool overlaps;
  uint64_t seed;
  const void* args;
  std::atomic<int> next_block{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  char* message;
  int message_bytes;
};

struct Machine : Block {
  Launch* launch;
  int live, at_barrier, waves, favoured;
  bool in_order;
  uint64_t random;
  void* scheduler;                  // the stack pointer of run_block
  void* saved[MAX_THREADS];         // stack pointers of the fibers
  Wave wave[MAX_WAVES];
  int guarded;                      // stacks that have their guard page
  unsigned char* shared_memory;
  const void* scheduler_bottom;     // for AddressSanitizer
  size_t scheduler_bytes;
  void* fake_stack[MAX_THREADS];
  void* scheduler_fake_stack;

  char* stack(int tid) { return (char*)this + HEADER_BYTES + (size_t)tid * STACK_BYTES; }
};
static_assert(sizeof(Machine) <= HEADER_BYTES, "fits the arena");
static_assert(HEADER_BYTES + MAX_THREADS * STACK_BYTES <= ARENA_BYTES, "fit the arena");

Machine& machine() { return static_cast<Machine&>(block()); }

// --- Switching -------------------------------------------------------------------------------------------------------

// AddressSanitizer must know on which stack the program runs; without it these do nothing. `fake_stack` keeps its data
// for the stack that is left; NULL if that stack is not used again.
#ifdef SIMT_ASAN
void leave_stack(void** fake_stack, const void* to_bottom, size_t to_bytes) {
  __sanitizer_start_switch_fiber(fake_stack, to_bottom, to_bytes);
}
void enter_stack(Machine& m, void* fake_stack) {
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(fake_stack, &bottom, &bytes);
  if (m.scheduler_bottom) return;
  m.scheduler_bottom = bottom;                       // the first switch comes from the scheduler
  m.scheduler_bytes = bytes;
}
#else
void leave_stack(void**, const void*, size_t) {}
void enter_stack(Machine&, void*) {}
#endif

// In order, thread `tid` is most likely the one after the next. What it saved lies on a page of its own.
void prefetch_stack(const Machine& m, int tid) {
  const char* top = (const char*)m.saved[tid % MAX_THREADS];
  __builtin_prefetch(top);
  __builtin_prefetch(top + 64);
  __builtin_prefetch(top + 128);
}

void start_threads(Machine& m) {
  leave_stack(&m.scheduler_fake_stack, m.stack(m.tid), STACK_BYTES);
  switch_stacks({&m.scheduler, m.saved[m.tid]});
  enter_stack(m, m.scheduler_fake_stack);
}

// To another thread, for the calling one to do.
Switch switch_to(Machine& m, int to) {
  const int from = m.tid;
  if (to == from) return {nullptr, nullptr};
  prefetch_stack(m, to + 1);
  leave_stack(&m.fake_stack[from], m.stack(to), STACK_BYTES);
  m.tid = to;
  return {&m.saved[from], m.saved[to]};
}

// A thread's last switch: to another thread, or below to the scheduler.
[[noreturn]] void switch_for_good(Machine& m, int to) {
  void* unused;
  leave_stack(nullptr, m.stack(to), STACK_BYTES);
  m.tid = to;
  switch_stacks({&unused, m.saved[to]});
  __builtin_unreachable();
}
[[noreturn]] void stop_threads(Machine& m) {
  void* unused;
  leave_stack(nullptr, m.scheduler_bottom, m.scheduler_bytes);
  switch_stacks({&unused, m.scheduler});
  __builtin_unreachable();
}

// --- Failing ---------------------------------------------------------------------------------------------------------

void report(Launch& l, int bid, int tid, const char* format, va_list list) {
  std::lock_guard<std::mutex> lock(l.mutex);
  if (l.failed.exchange(true) || l.message_bytes <= 0) return;
  char what[384];
  vsnprintf(what, sizeof what, format, list);
  snprintf(l.message, (size_t)l.message_bytes, "kernel %s, block %d, thread %d: %s", l.name, bid, tid, what);
}

// Ends the launch from within a fiber and abandons the fiber's stack.
[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(Machine& m, const char* format, ...) {
  va_list list;
  va_start(list, format);
  report(*m.launch, m.bid, m.tid, format, list);
  va_end(list);
  stop_threads(m);
}

// No thread can run: reports which threads wait for what.
[[noreturn]] void fail_deadlock(Machine& m) {
  int in_collective = -1, at_barrier = -1;
  for (int t = m.launch->threads - 1; t >= 0; t--) {
    const Wave& w = m.wave[t / LANES];
    const uint64_t bit = 1ull << t % LANES;
    if (w.waiting & bit) in_collective = t;
    else if (w.live & bit) at_barrier = t;
  }
  m.tid = in_collective;
  fail(m, "divergence: waits in %s for lanes of its wave that stand at a barrier (thread %d)",
       COLLECTIVE_NAMES[m.wave[in_collective / LANES].collective], at_barrier);
}

// --- Scheduling ------------------------------------------------------------------------------------------------------

uint32_t next_random(Machine& m) {                   // xorshift64*
  m.random ^= m.random >> 12, m.random ^= m.random << 25, m.random ^= m.random >> 27;
  return (uint32_t)(m.random * 0x2545f4914f6cdd1dull >> 32);
}

// The next set bit after `lane`, cyclically.
int next_bit(uint64_t mask, int lane) {
  const uint64_t behind = lane == LANES - 1 ? 0 : mask & ~0ull << (lane + 1);
  return __builtin_ctzll(behind ? behind : mask);
}

// The next wave from `wave` on, cyclically, that can run; -1 if none can.
int next_wave(const Machine& m, int wave) {
  for (int i = 0; i < m.waves; i++, wave++) {
    if (wave == m.waves) wave = 0;
    if (m.wave[wave].ready) return wave;
  }
  return -1;
}

int pick(Machine& m) {
  int from = m.tid / LANES, lane = m.tid % LANES;
  if (!m.in_order) {
    lane = (int)(next_random(m) % LANES);
    if (m.launch->policy == SIMT_RANDOM || !m.wave[m.favoured].ready)
      m.favoured = (int)(next_random(m) % (unsigned)m.waves);
    from = m.favoured;
  }
  const int wave = next_wave(m, from);
  if (wave < 0) return -1;
  m.favoured = wave;
  return wave * LANES + next_bit(m.wave[wave].ready, lane);
}

// To a runnable thread, until the calling one is chosen again.
Switch run_another(Machine& m) {
  const int next = pick(m);
  if (next < 0) fail_deadlock(m);
  return switch_to(m, next);
}

void release_barrier(Machine& m) {
  m.at_barrier = 0;
  for (int w = 0; w < m.waves; w++) m.wave[w].ready = m.wave[w].live;
}

// --- Matrix instructions ---------------------------------------------------------------------------------------------

float flushed_f16(uint16_t v) {
  const uint32_t magnitude = (uint32_t)(v & 0x7fff) << 13, exponent = v & 0x7c00;
  const uint32_t bias = exponent == 0x7c00 ? 224u << 23 : 112u << 23;
  return bits<float>((exponent ? magnitude + bias : 0) | (uint32_t)(v & 0x8000) << 16);
}
float flushed_bf16(uint16_t v) { return bits<float>((uint32_t)(v & 0x7f80 ? v : v & 0x8000) << 16); }

// Products of two 16-bit values are exact in float32, so with or without fused multiply-add the result is the same.
template <int M, bool BF16, class C> __attribute__((always_inline)) inline void mfma(Wave& w, C* c) {
  constexpr int GROUPS = LANES / M, K = GROUPS * 4, OUTPUTS = M * M / LANES;
  typedef float Row __attribute__((vector_size(M * 4)));
  alignas(64) float a[LANES * 4], b[LANES * 4], columns[K][M], d[M][M];
  const uint16_t *a16 = (const uint16_t*)w.a, *b16 = (const uint16_t*)w.b;
  for (int i = 0; i < LANES * 4; i++) a[i] = BF16 ? flushed_bf16(a16[i]) : flushed_f16(a16[i]);
  for (int i = 0; i < LANES * 4; i++) b[i] = BF16 ? flushed_bf16(b16[i]) : flushed_f16(b16[i]);
  for (int k = 0; k < K; k++)
    for (int n = 0; n < M; n++) columns[k][n] = b[(k / 4 * M + n) * 4 + k % 4];
  float* flat = (float*)c;
  const auto row_of = [](int group, int i) { return i / 4 * 4 * GROUPS + group * 4 + i % 4; };
  for (int group = 0; group < GROUPS; group++)
    for (int i = 0; i < OUTPUTS; i++) {
      float* row = d[row_of(group, i)];
      for (int n = 0; n < M; n++) row[n] = flat[(group * M + n) * OUTPUTS + i];
    }
  for (int r = 0; r < M; r++) {
    Row sum;
    memcpy(&sum, d[r], sizeof sum);
    for (int k = 0; k < K; k++) {
      Row column;
      memcpy(&column, columns[k], sizeof column);
      sum += column * a[(k / 4 * M + r) * 4 + k % 4];
    }
    memcpy(d[r], &sum, sizeof sum);
  }
  for (int group = 0; group < GROUPS; group++)
    for (int n = 0; n < M; n++)
      for (int i = 0; i < OUTPUTS; i++) flat[(group * M + n) * OUTPUTS + i] = d[row_of(group, i)][n];
}

__attribute__((always_inline)) inline void multiply_any(Wave& w) {
  switch (w.collective) {
    case MFMA_16_F16: return mfma<16, false>(w, w.c4);
    case MFMA_16_BF16: return mfma<16, true>(w, w.c4);
    case MFMA_32_F16: return mfma<32, false>(w, w.c16);
    default: return mfma<32, true>(w, w.c16);
  }
}
__attribute__((target("avx2,fma"))) void multiply_avx2(Wave& w) { multiply_any(w); }
void multiply_plain(Wave& w) { multiply_any(w); }

void multiply(Wave& w) {
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  avx2 ? multiply_avx2(w) : multiply_plain(w);
}

// --- Collectives -----------------------------------------------------------------------------------------------------

// Executes the collective, after all live lanes of the wave have arrived.
void complete(Machine& m, Wave& w) {
  switch (w.collective) {
    case SHUFFLE:
    case UNIFORM:
      w.present[w.turn] = w.live;
      w.turn ^= 1;
      break;
    case VOTE:
      w.voted = w.vote;
      break;
    default:
      if (w.live != ~0ull) fail(m, "%s without all lanes of its wave", COLLECTIVE_NAMES[w.collective]);
      multiply(w);
  }
  w.waiting = 0;
  w.ready = w.live;
}

Switch meet(Machine& m, Wave& w, Collective collective) {
  const uint64_t self = 1ull << m.tid % LANES;
  if (!w.waiting) w.collective = collective;
  else if (w.collective != collective)
    fail(m, "divergent collectives: %s here, %s in lane %d", COLLECTIVE_NAMES[collective],
         COLLECTIVE_NAMES[w.collective], __builtin_ctzll(w.waiting));
  w.waiting |= self;
  w.ready &= ~self;
  if (w.waiting == w.live) {
    complete(m, w);
    if (m.in_order) return {nullptr, nullptr};
  } else if (m.in_order && w.ready) {                // the most frequent case, at once
    return switch_to(m, (m.tid & -LANES) + next_bit(w.ready, m.tid % LANES));
  }
  return run_another(m);
}

Wave& own_wave(Machine& m) { return m.wave[(unsigned)m.tid / LANES]; }
unsigned own_lane(const Machine& m) { return (unsigned)m.tid % LANES; }

template <class C> Switch bring(Collective collective, s16x4 a, s16x4 b, const C& c, C (Wave::*operands)[LANES]) {
  Machine& m = machine();
  Wave& w = own_wave(m);
  const unsigned lane = own_lane(m);
  w.a[lane] = a;
  w.b[lane] = b;
  (w.*operands)[lane] = c;
  return meet(m, w, collective);
}

// The half of `values` that was filled last: no lane has come to the next collective's end.
int last_turn(const Wave& w) { return w.turn ^ 1; }

// --- Blocks ----------------------------------------------------------------------------------------------------------

[[noreturn]] void end_thread(Machine& m) {
  Wave& w = m.wave[m.tid / LANES];
  const uint64_t self = 1ull << m.tid % LANES;
  if (m.launch->overlaps && !(w.after_predecessor & self)) fail(m, "ended without after_predecessor()");
  w.live &= ~self;
  w.ready &= ~self;
  if (--m.live == 0) stop_threads(m);
  if (w.waiting && w.waiting == w.live) complete(m, w);
  if (m.at_barrier == m.live) release_barrier(m);
  const int next = pick(m);
  if (next < 0) fail_deadlock(m);
  switch_for_good(m, next);
}

// A fiber's entry.
void thread_main() {
  Machine& m = machine();
  enter_stack(m, nullptr);
  m.launch->kernel(m.launch->args);
  end_thread(m);
}

void prepare_thread(Machine& m, int tid) {
  char* bottom = m.stack(tid);
  if (tid >= m.guarded) {
    mprotect(bottom, PAGE_BYTES, PROT_NONE);
    m.guarded = tid + 1;
  }
#ifdef SIMT_ASAN
  __asan_unpoison_memory_region(bottom + PAGE_BYTES, STACK_BYTES - PAGE_BYTES);
#endif
  void** top = (void**)(((uintptr_t)(bottom + STACK_BYTES) - (size_t)(tid % LANES) * COLOUR_BYTES) & ~(uintptr_t)63);
  *--top = nullptr;  // as if thread_main had been called: the stack is 8 bytes off a multiple of 16
  *--top = (void*)thread_main;
  m.saved[tid] = top;
}

// --- Kernels ---------------------------------------------------------------------------------------------------------

struct Kernel { simt_kernel kernel; const char* name; int threads, args_bytes; };
std::vector<Kernel>& kernels() { return kept<std::vector<Kernel>>(); }

const Kernel* find_kernel(simt_kernel kernel) {
  for (const Kernel& k : kernels())
    if (k.kernel == kernel) return &k;
  return nullptr;
}

bool is_kernel(const std::string& name) {
  for (const Kernel& k : kernels())
    if (name == k.name) return true;
  return false;
}

// --- SHARED variables ------------------------------------------------------------------------------------------------

#ifndef SIMT_ASAN
// The object that this code is in, and this OS thread's copy of its thread-local memory: the SHARED variables of all
// kernels.
struct Object { const char* path; unsigned char* thread_local_memory; size_t bytes; };
thread_local char touched;                           // makes sure the memory exists

int find_object(dl_phdr_info* info, size_t, void* result) {
  const uintptr_t here = (uintptr_t)&find_object;
  bool ours = false;
  size_t bytes = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr)& p = info->dlpi_phdr[i];
    if (p.p_type == PT_LOAD) ours |= here - (info->dlpi_addr + p.p_vaddr) < p.p_memsz;
    if (p.p_type == PT_TLS) bytes = p.p_memsz;
  }
  if (ours) *(Object*)result = {info->dlpi_name, (unsigned char*)info->dlpi_tls_data, bytes};
  return ours;
}
Object object() {
  Object o{nullptr, nullptr, 0};
  *(volatile char*)&touched = 0;
  dl_iterate_phdr(find_object, &o);
  return o;
}

// A thread-local variable, and the kernel that it is local to. An empty name, or one that is no kernel's: any kernel
// may use it.
struct Variable { std::string kernel; size_t at, bytes; };

// "test_reduce" of "_ZZL16test_reduce_bodyRK10ReduceArgsE4part".
std::string kernel_of(const char* symbol) {
  if (strncmp(symbol, "_ZZL", 4)) return "";
  char* name;
  const size_t length = strtoul(symbol + 4, &name, 10), suffix = strlen("_body");
  if (strlen(name) < length || length <= suffix || strncmp(name + length - suffix, "_body", suffix)) return "";
  return std::string(name, length - suffix);
}

// The thread-local variables in an ELF file's symbol table; empty if the file has none.
std::vector<Variable> read_variables(const std::string& path) {
  std::vector<Variable> all;
  std::ifstream file(path, std::ios::binary);
  const std::string image{std::istreambuf_iterator<char>(file), {}};
  if (image.size() < sizeof(ElfW(Ehdr))) return all;
  const char* at = image.data();
  const auto* header = (const ElfW(Ehdr)*)at;
  const auto* sections = (const ElfW(Shdr)*)(at + header->e_shoff);
  for (int s = 0; s < header->e_shnum; s++) {
    if (sections[s].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = (const ElfW(Sym)*)(at + sections[s].sh_offset);
    const char* names = at + sections[sections[s].sh_link].sh_offset;
    for (size_t i = 0; i < sections[s].sh_size / sizeof *symbols; i++)
      if (ELF64_ST_TYPE(symbols[i].st_info) == STT_TLS && symbols[i].st_shndx != SHN_UNDEF)
        all.push_back({kernel_of(names + symbols[i].st_name), symbols[i].st_value, symbols[i].st_size});
  }
  return all;
}

typedef std::vector<Variable> Variables;

// The SHARED variables that each kernel may use. Those of other kernels are left out: they are megabytes per block.
class KernelVariables {
  const Object here = object();
  const Variables all = read_variables(*here.path ? here.path : "/proc/self/exe");
  std::mutex mutex;
  std::map<const char*, Variables> known;            // by the address of the kernel's name

 public:
  const Variables& of(const char* kernel) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto [at, is_new] = known.try_emplace(kernel);
    if (!is_new) return at->second;
    for (const Variable& v : all)
      if (v.kernel == kernel || !is_kernel(v.kernel)) at->second.push_back(v);
    if (all.empty()) at->second.push_back({"", 0, here.bytes});
    return at->second;
  }
};

// Poisons a kernel's SHARED variables.
struct Poison {
  const Object here = object();
  const Variables* variables;

  explicit Poison(const char* kernel) : variables(&kept<KernelVariables>().of(kernel)) {}
  void shared_variables() {
    for (const Variable& v : *variables) memset(here.thread_local_memory + v.at, POISON, v.bytes);
  }
};
#else
struct Poison {
  explicit Poison(const char*) {}
  void shared_variables() {}
};
#endif

// --- Launches --------------------------------------------------------------------------------------------------------

bool guard_is_whole(const Machine& m) {
  for (int i = 0; i < GUARD_BYTES; i++)
    if (m.shared[m.launch->shared_bytes + i] != SHARED_GUARD) return false;
  return true;
}

void run_block(Machine& m, Poison& poison, int bid) {
  Launch& l = *m.launch;
  m.bid = bid;
  m.live = l.threads;
  m.at_barrier = 0;
  m.waves = (l.threads + LANES - 1) / LANES;
  m.random = (l.seed + 1) * 0x9e3779b97f4a7c15ull ^ ((uint64_t)bid + 1) * 0xbf58476d1ce4e5b9ull;
  m.random |= m.random == 0;
  for (int w = 0; w < m.waves; w++) {
    const int lanes = l.threads - w * LANES;
    m.wave[w].live = m.wave[w].ready = lanes >= LANES ? ~0ull : (1ull << lanes) - 1;
    m.wave[w].waiting = m.wave[w].after_predecessor = 0;
    m.wave[w].turn = 0;
    m.wave[w].vote = false;
  }
  for (int t = 0; t < l.threads; t++) prepare_thread(m, t);
  poison.shared_variables();
  memset(m.shared, POISON, (size_t)l.shared_bytes);
  m.favoured = 0;
  m.tid = l.threads - 1;                             // in order, thread 0 is next after the last
  m.tid = pick(m);
  start_threads(m);
}

// Machines are reused, since their stacks are many pages.
struct Machines {
  std::mutex mutex;
  std::vector<Machine*> idle;

  Machine* take() {
    std::lock_guard<std::mutex> lock(mutex);
    if (idle.empty()) return create();
    Machine* m = idle.back();
    idle.pop_back();
    return m;
  }
  void give(Machine* m) {
    std::lock_guard<std::mutex> lock(mutex);
    idle.push_back(m);
  }
  void trim() {
    std::lock_guard<std::mutex> lock(mutex);
    for (Machine* m : idle) munmap(m, ARENA_BYTES);
    idle.clear();
  }

 private:
  static Machine* create() {                         // reserves twice the arena, keeps the aligned part
    char* at = (char*)mmap(nullptr, 2 * ARENA_BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return nullptr;
    char* aligned = (char*)(((uintptr_t)at + ARENA_BYTES - 1) & ~(ARENA_BYTES - 1));
    if (aligned > at) munmap(at, (size_t)(aligned - at));
    munmap(aligned + ARENA_BYTES, (size_t)(at + ARENA_BYTES - aligned));
    madvise(aligned, ARENA_BYTES, MADV_NOHUGEPAGE);
    return (Machine*)aligned;
  }
};

__attribute__((format(printf, 4, 5))) void fail_launch(Launch& l, int bid, int tid, const char* format, ...) {
  va_list list;
  va_start(list, format);
  report(l, bid, tid, format, list);
  va_end(list);
}

// One OS thread's share of a launch.
void run_blocks(Launch& l) {
  Machine* m = kept<Machines>().take();
  if (!m) return fail_launch(l, 0, 0, "no memory for stacks");
#ifdef SIMT_ASAN
  const int guard = 0;                               // AddressSanitizer watches the end
#else
  const int guard = GUARD_BYTES;
#endif
  m->scheduler_bottom = nullptr;
  Poison poison(l.name);
  void* shared = nullptr;
  if (posix_memalign(&shared, 1024, (size_t)(l.shared_bytes + guard + (l.shared_bytes + guard == 0)))) abort();
  m->launch = &l;
  m->grid = l.grid;
  m->in_order = l.policy == SIMT_IN_ORDER;
  m->shared = (unsigned char*)shared;
  if (guard) memset(m->shared + l.shared_bytes, SHARED_GUARD, (size_t)guard);
  for (int b; !l.failed && (b = l.next_block++) < l.grid;) {
    run_block(*m, poison, b);
    if (guard && !guard_is_whole(*m))
      fail_launch(l, b, 0, "wrote behind its %d bytes of shared memory", l.shared_bytes);
  }
  free(shared);
  kept<Machines>().give(m);
}

// Whether the launch has the kernel's number of threads.
bool fits(Launch& l, const Kernel* k, int args_bytes) {
  if (!k) fail_launch(l, 0, 0, "not a kernel of this library");
  else if (l.threads != k->threads)
    fail_launch(l, 0, 0, "launched with %d threads, made for %d", l.threads, k->threads);
  else if (args_bytes != k->args_bytes)
    fail_launch(l, 0, 0, "%d bytes of arguments, wants %d", args_bytes, k->args_bytes);
  else if (l.grid < 1) fail_launch(l, 0, 0, "a grid of %d blocks", l.grid);
  else if (l.threads < 1 || l.threads > MAX_THREADS) fail_launch(l, 0, 0, "%d threads a block", l.threads);
  else if (l.shared_bytes < 0 || l.shared_bytes > MAX_SHARED_BYTES)
    fail_launch(l, 0, 0, "%d bytes of shared memory, there are %d", l.shared_bytes, MAX_SHARED_BYTES);
  return !l.failed;
}

}  // namespace

Registration::Registration(simt_kernel kernel, const char* name, int threads, int args_bytes) {
  kernels().push_back({kernel, name, threads, args_bytes});
}

void note_after_predecessor() {
  Machine& m = machine();
  m.wave[m.tid / LANES].after_predecessor |= 1ull << m.tid % LANES;
}

Switch bring_barrier() {
  Machine& m = machine();
  own_wave(m).ready &= ~(1ull << own_lane(m));
  if (++m.at_barrier == m.live) {
    release_barrier(m);
    if (m.in_order) return {nullptr, nullptr};
  }
  return run_another(m);
}

Switch bring_value(uint64_t value) {
  Machine& m = machine();
  Wave& w = own_wave(m);
  w.values[w.turn][own_lane(m)] = value;
  return meet(m, w, SHUFFLE);
}
uint64_t take_value(int from_lane) {
  Machine& m = machine();
  const Wave& w = own_wave(m);
  const int turn = last_turn(w), from = from_lane & (LANES - 1);
  if (!(w.present[turn] >> from & 1)) fail(m, "shfl from lane %d, which has ended", from);
  return w.values[turn][from];
}

Switch bring_vote(bool value) {
  Machine& m = machine();
  Wave& w = own_wave(m);
  w.vote = w.waiting ? w.vote || value : value;
  return meet(m, w, VOTE);
}
bool take_vote() { return own_wave(machine()).voted; }

Switch bring_uniform(uint32_t value) {
  Machine& m = machine();
  if (m.in_order) return {nullptr, nullptr};
  Wave& w = own_wave(m);
  w.values[w.turn][own_lane(m)] = value;
  return meet(m, w, UNIFORM);
}
void take_uniform(uint32_t value) {
  Machine& m = machine();
  if (m.in_order) return;
  const Wave& w = own_wave(m);
  const int turn = last_turn(w), first = __builtin_ctzll(w.present[turn]);
  if (w.values[turn][first] != value)
    fail(m, "readfirstlane: lane %d has %#x, this one %#x", first, (uint32_t)w.values[turn][first], value);
}

Switch bring_16x16x16(bool bf16, s16x4 a, s16x4 b, const f32x4v& c) {
  return bring(bf16 ? MFMA_16_BF16 : MFMA_16_F16, a, b, c, &Wave::c4);
}
f32x4v take_16x16x16() {
  Machine& m = machine();
  return own_wave(m).c4[own_lane(m)];
}
Switch bring_32x32x8(bool bf16, s16x4 a, s16x4 b, const f32x16v& c) {
  return bring(bf16 ? MFMA_32_BF16 : MFMA_32_F16, a, b, c, &Wave::c16);
}
void take_32x32x8(f32x16v* d) {
  Machine& m = machine();
  *d = own_wave(m).c16[own_lane(m)];
}

#ifdef SIMT_ASAN
// A thread is back on its stack.
void arrived() {
  Machine& m = machine();
  enter_stack(m, m.fake_stack[m.tid]);
}
#endif

}  // namespace simt

// Gives the name and threads of the library's kernel number `index`; 0 if there are fewer kernels. For tests
// (driver/simt/library.rs).
extern "C" __attribute__((visibility("default"))) int simt_kernel_made(int index, const char** name, int* threads) {
  const auto& all = simt::kernels();
  if (index >= (int)all.size()) return 0;
  *name = all[index].name, *threads = all[index].threads;
  return 1;
}

// Frees the stacks that no launch uses: to be called before the library may be unloaded.
extern "C" __attribute__((visibility("default"))) void simt_trim() { simt::kept<simt::Machines>().trim(); }

__attribute__((visibility("default"))) int simt_launch(simt_kernel kernel, int grid, int block, int shared_bytes,
                                                       const void* args, int args_bytes, int os_threads, int policy,
                                                       unsigned long long seed, char* message, int message_bytes) {
  using namespace simt;
  Launch l;
  const Kernel* k = find_kernel(kernel);
  l.kernel = kernel;
  l.name = k ? k->name : "?";
  l.grid = grid, l.threads = block, l.shared_bytes = shared_bytes, l.seed = seed;
  l.policy = policy & ~SIMT_OVERLAPS, l.overlaps = policy & SIMT_OVERLAPS;
  l.message = message, l.message_bytes = message_bytes;
  std::vector<std::max_align_t> copy((size_t)args_bytes / sizeof(std::max_align_t) + 1);
  memcpy(copy.data(), args, (size_t)args_bytes);
  l.args = copy.data();
  if (!fits(l, k, args_bytes)) return 1;
#ifdef SIMT_ASAN
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  os_threads = 1;
#endif
  std::vector<std::thread> helpers;
  for (int i = 1; i < os_threads && i < grid; i++) helpers.emplace_back([&l] { run_blocks(l); });
  run_blocks(l);
  for (std::thread& t : helpers) t.join();
  return l.failed;
}
