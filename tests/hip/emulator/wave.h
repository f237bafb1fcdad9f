// A wave of 64 lanes, its instructions as records, and what is wrong with a launch.
#pragma once
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "caches.h"
#include "lds.h"
#include "memory.h"
#include "numbers.h"

namespace emulator {

constexpr int LANES = 64;

// A vector register.
struct alignas(64) Lanes {
  u32 lane[LANES];
};

// What an operand names, by the numbers that the encoding has for scalar registers.
enum Scalar : u16 { FLAT_SCRATCH = 102, VCC = 106, M0 = 124, EXEC = 126, SCALARS = 128, SCC = 253 };
constexpr int VECTORS = 512;       // AccVGPRs follow the VGPRs, as in the register file
constexpr int ACCUMULATORS = 256;  // the first of them

// The part of a register that an SDWA operand takes.
enum class Part : u8 { DWORD, BYTE_0, BYTE_1, BYTE_2, BYTE_3, WORD_0, WORD_1 };
// What SDWA does to the rest of a destination.
enum class Rest : u8 { ZERO, SIGN, KEEP };

struct Operand {
  enum Kind : u8 { NONE, VECTOR, SCALAR, CONSTANT };
  Kind kind = NONE;
  bool negative = false, absolute = false, signed_part = false;
  Part part = Part::DWORD;
  u16 reg = 0;
  u64 constant = 0;  // by the type that the instruction reads
};

struct Wave;
struct Instruction;
using Execute = void (*)(Wave&, const Instruction&);

struct Instruction {
  Execute execute = nullptr;
  Operand to, to_mask;        // a result; a carry or a condition of each lane that is a second result
  Operand source[3];          // of a memory access: address, data, base (for LDS: more data)
  i64 offset = 0;             // of an address; of a branch: the address it goes to; the table of bitop3
  u32 second_offset = 0;      // of LDS operations on two addresses
  u32 target = 0;             // of a branch: the instruction's index
  u32 address = 0, next = 0;  // in the code object, and of what follows
  u8 op_sel = 0, op_sel_hi = 7, neg_lo = 0, neg_hi = 0;  // a bit for each source
  Part part = Part::DWORD;                               // of the destination
  Rest rest = Rest::ZERO;
  bool clamp = false, returns = false;
  Scope scope = Scope::WAVE;
};

// What has gone wrong in a kernel: the launch fails, and the device is lost.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a wave shares with others of its block, and of its launch.
struct Block {
  const Memory* memory = nullptr;
  const std::vector<int>* peers = nullptr;                // devices whose memory this one may touch
  bool flushes_matrix_operands = false;                   // gfx90a takes subnormal ones of MFMA as zeros
  u64 code = 0;                                           // the address of the code object
  const std::unordered_map<u64, u32>* indices = nullptr;  // of its instructions, by their address in it
  u32 id = 0;
  Lds lds;
  View* view = nullptr;    // through caches, if there are any
  u64* changes = nullptr;  // how often anything has been stored in this launch

  u32 index_at(u64 address) const {
    const auto found = indices->find(address);
    if (found == indices->end()) throw Fault("jumps to where no instruction is");
    return found->second;
  }
};

struct Wave {
  Lanes v[VECTORS];
  alignas(16) u32 s[SCALARS];
  bool scc = false;
  bool ended = false, at_barrier = false;
  bool indexed_source = false;  // s_set_gpr_idx_on: a vector register as first source is M0 further on
  u32 next = 0;                 // the index of the instruction to execute
  int number = 0;
  u64 executed = 0;
  Block* block = nullptr;
  Stores stores;

  // Until no more than so many of its accesses to memory are on their way.
  void wait(u64 most) {
    if (stores.none()) return;
    ++*block->changes;
    stores.wait(*block->view, most);
  }

  u64 pair(int reg) const { return static_cast<u64>(s[reg + 1]) << 32 | s[reg]; }
  void set_pair(int reg, u64 value) {
    s[reg] = low_word(value);
    s[reg + 1] = high_word(value);
  }
  u64 exec() const { return pair(EXEC); }
  u64 vcc() const { return pair(VCC); }

  u32 word(const Operand& scalar) const {
    return scalar.kind == Operand::CONSTANT ? low_word(scalar.constant) : scalar.reg == SCC ? scc : s[scalar.reg];
  }
  u64 two_words(const Operand& scalar) const {
    return scalar.kind == Operand::CONSTANT ? scalar.constant : scalar.reg == SCC ? scc : pair(scalar.reg);
  }

  // For each lane all bits if it is active, else none.
  const u32* active() {
    if (mask_of_ != exec()) {
      mask_of_ = exec();
      for (int i = 0; i < LANES; i++) mask_.lane[i] = mask_of_ >> i & 1 ? ~0u : 0;
    }
    return mask_.lane;
  }

  // Bytes of global memory or of the block's LDS; throws a Fault if they are not to be touched.
  u8* global(u64 address, u32 bytes, bool write) {
    if (!last_.holds(address, bytes) || (write && !last_.writable)) look_up(address, bytes, write);
    return reinterpret_cast<u8*>(address);
  }
  u8* local(u64 address, u32 bytes, Access access) {
    Lds& lds = block->lds;
    if (address > lds.size() || bytes > lds.size() - address) outside(address, bytes, access);
    const u32 at = static_cast<u32>(address);
    if (lds.races(at, bytes, number, access)) race(address, bytes, access);
    return lds.at(at);
  }
  // What is allocated has changed.
  void forget_region() { last_ = {}; }

 private:
  void look_up(u64 address, u32 bytes, bool write);
  [[noreturn]] void outside(u64 address, u32 bytes, Access access) const;
  [[noreturn]] void race(u64 address, u32 bytes, Access access) const;

  Region last_;
  u64 mask_of_ = 0;
  Lanes mask_{};
};

}  // namespace emulator
