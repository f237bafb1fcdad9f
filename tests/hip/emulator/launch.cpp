#include "launch.h"

#include <bit>
#include <ctime>
#include <memory>
#include <numeric>
#include <random>

#include "settings.h"

namespace emulator {
namespace {

// From the HSA Platform System Architecture Specification, 2.9.6: what a kernel may read of its dispatch.
struct DispatchPacket {
  u16 header, dimensions, block[3], reserved0;
  u32 grid[3], private_bytes, group_bytes;
  u64 kernel, arguments, reserved1, signal;
};
static_assert(sizeof(DispatchPacket) == 64);

// From LLVM, User Guide for AMDGPU Backend, Code Object V5 Metadata: what follows the arguments that are written down.
struct HiddenArguments {
  u32 blocks[3];
  u16 threads[3], remainder[3];
  u8 reserved[40];
  u16 dimensions;
  u8 others[190];
};
static_assert(sizeof(HiddenArguments) == HIDDEN_BYTES && offsetof(HiddenArguments, dimensions) == 64);

// A launch's memory beside what the program has allocated.
class Arguments {
 public:
  Arguments(const Launch& launch, Memory& memory) : memory_(memory) {
    const Kernel& kernel = *launch.kernel;
    const u64 written = (launch.arguments.size() + 7) / 8 * 8;
    const bool hidden = kernel.arguments == written + sizeof(HiddenArguments);
    if (!hidden && kernel.arguments != written && kernel.arguments != launch.arguments.size()) {
      throw Fault("takes " + std::to_string(kernel.arguments) + " bytes of arguments, and not the " +
                  std::to_string(launch.arguments.size()) + " that there are");
    }
    std::copy(launch.arguments.begin(), launch.arguments.end(), bytes_);
    if (hidden) {
      HiddenArguments more{};
      more.blocks[0] = launch.blocks;
      more.blocks[1] = more.blocks[2] = 1;
      more.threads[0] = static_cast<u16>(launch.threads);
      more.threads[1] = more.threads[2] = 1;
      more.dimensions = 1;
      std::memcpy(bytes_ + written, &more, sizeof more);
    }
    packet_.dimensions = 1;
    packet_.block[0] = static_cast<u16>(launch.threads);
    packet_.block[1] = packet_.block[2] = 1;
    packet_.grid[0] = launch.blocks * launch.threads;
    packet_.grid[1] = packet_.grid[2] = 1;
    packet_.group_bytes = kernel.lds + launch.dynamic_lds;
    packet_.kernel = kernel.descriptor;
    packet_.arguments = address();
    if (kernel.arguments) memory_.add({address(), kernel.arguments, ANY_DEVICE, false});
    memory_.add({packet_address(), sizeof packet_, ANY_DEVICE, false});
  }
  ~Arguments() {
    memory_.remove(address());
    memory_.remove(packet_address());
  }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  u64 address() const { return reinterpret_cast<u64>(bytes_); }
  u64 packet_address() const { return reinterpret_cast<u64>(&packet_); }

 private:
  Memory& memory_;
  alignas(64) u8 bytes_[4096] = {};
  alignas(64) DispatchPacket packet_{};
};

// Registers as a kernel finds them: LLVM, User Guide for AMDGPU Backend, Initial Kernel Execution State.
void start(Wave& w, int number, Block& block, const Launch& launch, const Arguments& arguments) {
  const Kernel& kernel = *launch.kernel;
  std::memset(w.v, POISON, sizeof(Lanes) * kernel.vectors);
  std::memset(w.v + ACCUMULATORS, POISON, sizeof(Lanes) * kernel.accumulators);
  std::memset(w.s, POISON, sizeof w.s);
  w.scc = w.ended = w.at_barrier = w.indexed_source = false;
  w.next = block.index_at(kernel.entry);
  w.number = number;
  w.block = &block;
  w.executed = 0;
  w.stores = Stores(settings().seed + 1'000'003 * (u64{block.id} * launch.threads + static_cast<u64>(number)));
  w.forget_region();
  const u32 left = launch.threads - static_cast<u32>(number) * LANES;
  w.set_pair(EXEC, left >= LANES ? ~u64{0} : (u64{1} << left) - 1);
  // X; Y and Z, which are 0, have the bits above 10.
  for (int i = 0; i < LANES; i++) w.v[0].lane[i] = static_cast<u32>(number * LANES + i);

  enum : u16 {
    PRIVATE_BUFFER = 1,
    DISPATCH = 2,
    QUEUE = 4,
    ARGUMENTS = 8,
    DISPATCH_ID = 16,
    SCRATCH = 32,
    PRIVATE = 64
  };
  int next = 0;
  const auto set = [&](u16 property, int count, u64 value) {
    if (!(kernel.properties & property)) return;
    if (count >= 2) w.set_pair(next, value);
    next += count;
  };
  set(PRIVATE_BUFFER, 4, 0);
  set(DISPATCH, 2, arguments.packet_address());
  set(QUEUE, 2, 0);
  set(ARGUMENTS, 2, arguments.address());
  set(DISPATCH_ID, 2, 0);
  set(SCRATCH, 2, 0);
  set(PRIVATE, 1, 0);
  next = static_cast<int>(kernel.user_registers);
  for (int i = 0; i < 3; i++) {
    if (kernel.block_id[i]) w.s[next++] = i == 0 ? block.id : 0;
  }
}

void step(Wave& w, const Program& program) {
  if (w.next >= program.code.size()) throw Fault("goes on behind the code");
  const Instruction& in = program.code[w.next++];
  w.executed++;
  if (!w.indexed_source || in.source[0].kind != Operand::VECTOR) {
    in.execute(w, in);
    return;
  }
  Instruction indexed = in;
  indexed.source[0].reg = static_cast<u16>(in.source[0].reg + (w.s[M0] & 0xff));
  if (indexed.source[0].reg >= VECTORS) throw Fault("reads a register that is not there");
  in.execute(w, indexed);
}

// Of processor time, which does not depend on what else runs.
double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

using Random = std::minstd_rand;

// A number of steps after which a wave gives way: in a random order a random one, which is small; so is that of blocks
// that run at once. Else it is a barrier, the end, or enough to be suspected of waiting for ever.
u64 turn(Random& random, bool several) {
  constexpr u64 SHORT = 200, LONG = 1 << 16;
  if (settings().order == Order::RANDOM) return 1 + random() % SHORT;
  return several ? SHORT : LONG;
}

// How many turns a wave misses after this one: of blocks that run at once, in a random order, some wait for long.
u32 pause(Random& random, bool several) {
  constexpr u32 SELDOM = 32, MOST = 64;
  const bool any = settings().order == Order::RANDOM && several && random() % SELDOM == 0;
  return any ? static_cast<u32>(random() % MOST) : 0;
}

void arrange(std::vector<u32>& what, Random& random) {
  std::iota(what.begin(), what.end(), 0);
  if (settings().order == Order::BACKWARD) std::reverse(what.begin(), what.end());
  if (settings().order == Order::RANDOM) std::shuffle(what.begin(), what.end(), random);
}

std::string place_of(const Wave& w, const Program& program) {
  return "block " + std::to_string(w.block->id) + ", wave " + std::to_string(w.number) + ", " +
         program.text[w.next - 1];
}

// Until a wave gives way, waits or ends. A fault says where it was.
void take_turn(Wave& w, const Program& program, u64 steps) {
  try {
    for (; steps && !w.ended && !w.at_barrier; steps--) step(w, program);
  } catch (const Fault& fault) {
    throw Fault(place_of(w, program) + ": " + fault.what());
  }
}

// Whether a wave only waits: its registers and its place are as they were, and nobody has stored anything in between.
class Rounds {
 public:
  // After a turn in which the wave has neither ended nor come to a barrier.
  void look(const Wave& w) {
    constexpr u64 FEW = 16;
    if (changes_ != *w.block->changes) changes_ = *w.block->changes, turns_ = 0, done_ = false;
    if (++turns_ < FEW || done_) return;
    if (again_ || std::has_single_bit(turns_)) {
      if (!before_) before_ = std::make_unique_for_overwrite<Wave>();
      *before_ = w;
      again_ = false;
    } else {
      done_ = same(w, *before_);
    }
  }
  // Whether it has gone round, and since then there has been no other change.
  bool done(u64 changes) const { return done_ && changes_ == changes; }
  void begin_again() { done_ = false, again_ = true; }

 private:
  static bool same(const Wave& a, const Wave& b) {
    return a.next == b.next && a.scc == b.scc && a.indexed_source == b.indexed_source &&
           std::memcmp(a.s, b.s, sizeof a.s) == 0 && std::memcmp(a.v, b.v, sizeof a.v) == 0;
  }

  std::unique_ptr<Wave> before_;  // as it was when its turns were last a power of two
  u64 turns_ = 0, changes_ = 0;   // since the last change; how many changes there have been
  bool done_ = false, again_ = false;
};

// A block on the device, and its waves.
struct Resident {
  Block block;
  View view;
  std::vector<std::unique_ptr<Wave>> waves;
  std::vector<Rounds> rounds;
  std::vector<u32> pauses;  // turns that each wave still misses
  bool runs = false, several = false;

  // A turn of each wave that can have one. Whether the block has not ended.
  bool take_turns(const Program& program, Random& random) {
    std::vector<u32> order(waves.size());
    arrange(order, random);
    bool some_run = false, some_wait = false;
    for (const u32 number : order) {
      Wave& w = *waves[number];
      if (pauses[number]) {
        pauses[number]--;
      } else if (!w.ended && !w.at_barrier) {
        take_turn(w, program, turn(random, several));
        pauses[number] = pause(random, several);
        if (!w.ended && !w.at_barrier) rounds[number].look(w);
      }
      some_run |= !w.ended && !w.at_barrier;
      some_wait |= w.at_barrier;
    }
    if (some_run) return true;
    if (!some_wait) return false;
    // All that have not ended are there.
    for (auto& w : waves) w->at_barrier = false;
    block.lds.barrier();
    ++*block.changes;
    return true;
  }
};

// Blocks that are on the device at once.
struct Device {
  std::vector<Resident> residents;
  u64 changes = 0;  // how often anything has been stored
  int rounds = 0;   // how often all waves have gone round
  u64 since = 0;    // the changes at the first of them

  // Throws a Fault if nothing is left but waiting: all waves that are not at a barrier go round, for the third time. In
  // the first L2 may have been made current, and in the second L1. A wave that counts as it waits is not found, nor one
  // that comes to a barrier at each round.
  void check(const Program& program) {
    const Wave* waiting = nullptr;
    if (since != changes) since = changes, rounds = 0;
    for (const Resident& resident : residents) {
      for (size_t i = 0; resident.runs && i < resident.waves.size(); i++) {
        const Wave& w = *resident.waves[i];
        if (w.ended || w.at_barrier) continue;
        if (!resident.rounds[i].done(changes) || !w.stores.none()) return;
        waiting = &w;
      }
    }
    if (!waiting) return;
    constexpr int LEVELS = 2;
    if (rounds++ == LEVELS) throw Fault(place_of(*waiting, program) + ": nothing is left but waiting");
    for (Resident& resident : residents) {
      for (Rounds& one : resident.rounds) one.begin_again();
    }
  }
};

}  // namespace

void run(const Launch& launch, Memory& memory, const std::vector<int>& peers) {
  const double begin = thread_seconds();
  Kernel& kernel = *launch.kernel;
  try {
    disassemble(*kernel.program);
  } catch (const std::runtime_error& error) {
    throw Fault(error.what());
  }
  const Program& program = *kernel.program;
  // Not on the stack, which may be memory of a kernel as a whole.
  const auto arguments = std::make_unique<const Arguments>(launch, memory);
  const u32 count = (launch.threads + LANES - 1) / LANES;
  const u32 at_once = launch.together ? launch.blocks : std::min(settings().residents, launch.blocks);
  Caches caches(program.target == "gfx90a" ? 1 : 8, at_once);
  Device device;
  device.residents.resize(at_once);
  for (Resident& resident : device.residents) {
    resident.several = at_once > 1;
    resident.rounds.resize(count);
    resident.pauses.resize(count);
    resident.waves.resize(count);
    for (auto& w : resident.waves) {
      w = std::make_unique_for_overwrite<Wave>();
      // Also registers that the kernel has not, which a block does not begin with.
      std::memset(w->v, POISON, sizeof w->v);
    }
    Block& block = resident.block;
    block.memory = &memory;
    block.peers = &peers;
    block.flushes_matrix_operands = program.target == "gfx90a";
    block.code = reinterpret_cast<u64>(program.image);
    block.indices = &program.index;
    block.changes = &device.changes;
    if (settings().caches) block.view = &resident.view;
  }

  Random random(static_cast<Random::result_type>(settings().seed + kernel.launches));
  std::vector<u32> order(launch.blocks), turns(at_once);
  arrange(order, random);
  auto next = order.begin();
  const auto begin_next = [&](u32 place) {
    Resident& resident = device.residents[place];
    resident.runs = next != order.end();
    if (!resident.runs) return;
    resident.block.id = *next++;
    resident.view = caches.view(place, resident.block.id);
    resident.block.lds.reset(kernel.lds + launch.dynamic_lds, static_cast<int>(count));
    for (u32 i = 0; i < count; i++) {
      start(*resident.waves[i], static_cast<int>(i), resident.block, launch, *arguments);
    }
    device.changes++;
  };
  for (u32 place = 0; place < at_once; place++) begin_next(place);
  for (u32 left = launch.blocks; left;) {
    arrange(turns, random);
    for (const u32 place : turns) {
      Resident& resident = device.residents[place];
      if (!resident.runs || resident.take_turns(program, random)) continue;
      for (const auto& w : resident.waves) kernel.instructions += w->executed;
      left--;
      begin_next(place);
    }
    device.check(program);
  }
  caches.write_back();
  kernel.launches++;
  kernel.blocks += launch.blocks;
  kernel.seconds += thread_seconds() - begin;
}

}  // namespace emulator
