// A code object that is loaded: its instructions as records, and its kernels.
#pragma once
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "table.h"

namespace emulator {

struct Program;

struct Kernel {
  std::string name;
  u64 entry = 0;                      // its first instruction, in the code object
  u32 lds = 0, arguments = 0;         // bytes
  u32 vectors = 0, accumulators = 0;  // registers
  u64 descriptor = 0;                 // where that is in memory
  u16 properties = 0;                 // which scalar registers are set
  u32 user_registers = 0;
  bool block_id[3] = {};
  u64 launches = 0, blocks = 0, instructions = 0;
  double seconds = 0;
  Program* program = nullptr;
};

struct Program {
  std::string target, object;
  std::vector<Instruction> code;
  std::vector<std::string> text;       // of each
  std::unordered_map<u64, u32> index;  // by address in the code object
  std::map<std::string, Kernel> kernels;
  std::string problem;  // why its instructions cannot be run
  u8* image = nullptr;  // the code object as it is loaded
  u64 bytes = 0;
};

// A code object's bytes, from where it begins: it says itself how long it is. Empty: it is none.
std::string object_bytes(const u8* object);
// Loads a code object; NULL: it is not for this target. Throws a std::runtime_error that says what
// is wrong with it.
Program* load_program(const std::string& object, const std::string& target);
// Reads its instructions, if that has not been done; before the first launch, as most kernels are never launched.
// Throws as above.
void disassemble(Program& program);

// The record of an instruction's text. Throws a std::runtime_error where the emulator does not know it.
Instruction decode(const std::string& text, u32 encoding, const std::string& target);

}  // namespace emulator
