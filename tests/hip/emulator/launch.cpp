#include "launch.h"

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
static_assert(sizeof(HiddenArguments) == 256 && offsetof(HiddenArguments, dimensions) == 64);

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

// A number of steps after which a wave gives way, in a random order; in others a barrier or the end.
u64 turn(Random& random) {
  constexpr u64 MOST = 200;
  return settings().order == Order::RANDOM ? 1 + random() % MOST : ~u64{0};
}

void arrange(std::vector<u32>& what, Random& random) {
  std::iota(what.begin(), what.end(), 0);
  if (settings().order == Order::BACKWARD) std::reverse(what.begin(), what.end());
  if (settings().order == Order::RANDOM) std::shuffle(what.begin(), what.end(), random);
}

// Until a wave gives way, waits or ends. A fault says where it was.
void take_turn(Wave& w, const Program& program, u64 steps) {
  try {
    for (; steps && !w.ended && !w.at_barrier; steps--) step(w, program);
  } catch (const Fault& fault) {
    throw Fault("block " + std::to_string(w.block->id) + ", wave " + std::to_string(w.number) + ", " +
                program.text[w.next - 1] + ": " + fault.what());
  }
}

void run_block(const Program& program, Block& block, std::vector<std::unique_ptr<Wave>>& waves, Random& random) {
  std::vector<u32> order(waves.size());
  for (;;) {
    arrange(order, random);
    bool runs = false, waits = false;
    for (const u32 number : order) {
      Wave& w = *waves[number];
      take_turn(w, program, turn(random));
      runs |= !w.ended && !w.at_barrier;
      waits |= w.at_barrier;
    }
    if (runs) continue;
    if (!waits) return;
    // All that have not ended are there.
    for (auto& w : waves) w->at_barrier = false;
    block.lds.barrier();
  }
}

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
  std::vector<std::unique_ptr<Wave>> waves(count);
  for (auto& w : waves) {
    w = std::make_unique_for_overwrite<Wave>();
    // Also registers that the kernel has not, which a block does not begin with.
    std::memset(w->v, POISON, sizeof w->v);
  }
  Block block;
  block.memory = &memory;
  block.peers = &peers;
  block.flushes_matrix_operands = program.target == "gfx90a";
  block.code = reinterpret_cast<u64>(program.image);
  block.indices = &program.index;

  Random random(static_cast<Random::result_type>(settings().seed + kernel.launches));
  std::vector<u32> order(launch.blocks);
  arrange(order, random);
  for (const u32 id : order) {
    block.id = id;
    block.lds.reset(kernel.lds + launch.dynamic_lds, static_cast<int>(count));
    for (u32 i = 0; i < count; i++) start(*waves[i], static_cast<int>(i), block, launch, *arguments);
    run_block(program, block, waves, random);
    for (const auto& w : waves) kernel.instructions += w->executed;
  }
  kernel.launches++;
  kernel.blocks += launch.blocks;
  kernel.seconds += thread_seconds() - begin;
}

}  // namespace emulator
