// The instructions: of each its name, how its text is read, and what it does.
#pragma once
#include <initializer_list>
#include <string>
#include <vector>

#include "wave.h"

namespace emulator {

// As what an instruction takes a constant.
enum class Type : u8 { WORD, TWO_WORDS, F16, F32, F64, SIGNED_16, UNSIGNED_16 };

// What an instruction does, and what its operands are in the order of its text:
//
//   d      a destination
//   m      a second one, a bit for each lane
//   0 1 2  a source
//   a, A   none in the text: the destination is also source 2, or source 0
//   j      where it jumps to, which is taken from its encoding
//   w      how many accesses to memory may be on their way, which is taken from its encoding
//   c      none, but modifiers that say whose caches
//   *      whatever follows does nothing here
//
// An operand that the text may lack stands last. An atomic operation that returns the old value has `d` before its
// others.
struct Operation {
  Execute execute = nullptr;
  const char* operands = "";
  Type types[3] = {Type::WORD, Type::WORD, Type::WORD};
  bool atomic = false;
  bool halves = false;  // modifiers may say which halves of its sources it takes
  bool clamps = false;  // its result may be clamped: that of a float to 0..1
};

struct Row {
  std::string name;
  Operation operation;
  const char* only_on = nullptr;  // targets, where others have no such instruction
};

// Rows that have one source: a document and its section.
struct Group {
  const char* source;
  std::vector<Row> rows;
};

// One function a file of instructions.
std::vector<Group> scalar_instructions();
std::vector<Group> vector_instructions();
std::vector<Group> compare_instructions();
std::vector<Group> packed_instructions();
std::vector<Group> memory_instructions();

// All of them, by name without the suffix of an encoding; NULL: there is none on this target.
const Row* find_row(const std::string& name, const std::string& target);
std::vector<std::string> names_of_rows(const std::string& target);

}  // namespace emulator
