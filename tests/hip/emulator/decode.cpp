// From the text that llvm-objdump has for an instruction to its record, once when a code object is loaded.
#include <cstdlib>
#include <map>
#include <optional>

#include "program.h"

namespace emulator {
namespace {

[[noreturn]] void unknown(const std::string& what) { throw std::runtime_error(what); }

bool starts(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }
bool ends(const std::string& text, const std::string& with) {
  return text.size() > with.size() && text.compare(text.size() - with.size(), with.size(), with) == 0;
}
// What is between an opening word and a closing one, if the text has both.
std::optional<std::string> inside(const std::string& text, const std::string& open, const std::string& close) {
  if (text.size() < open.size() + close.size() || !starts(text, open.c_str()) || !ends(text, close)) return {};
  return text.substr(open.size(), text.size() - open.size() - close.size());
}

// Parts divided by a sign outside of brackets, without the spaces around them.
std::vector<std::string> split(const std::string& text, char sign) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (const char c : text) {
    depth += (c == '[' || c == '(') - (c == ']' || c == ')');
    if (c == sign && depth == 0) {
      parts.emplace_back();
    } else if (c != ' ' || !parts.back().empty()) {
      parts.back() += c;
    }
  }
  std::vector<std::string> filled;
  for (std::string& part : parts) {
    while (ends(part, " ")) part.pop_back();
    if (!part.empty()) filled.push_back(part);
  }
  return filled;
}

i64 integer(const std::string& text) { return static_cast<i64>(std::strtoull(text.c_str(), nullptr, 0)); }

// [0,1,1]: a bit for each source.
u8 bits(const std::string& text) {
  u8 made = 0;
  int k = 0;
  for (const char c : text) {
    if (c == '0' || c == '1') made |= static_cast<u8>((c - '0') << k++);
  }
  return made;
}

Part part(const std::string& text) {
  static const std::map<std::string, Part> parts = {
      {"DWORD", Part::DWORD},   {"BYTE_0", Part::BYTE_0}, {"BYTE_1", Part::BYTE_1}, {"BYTE_2", Part::BYTE_2},
      {"BYTE_3", Part::BYTE_3}, {"WORD_0", Part::WORD_0}, {"WORD_1", Part::WORD_1}};
  const auto found = parts.find(text);
  if (found == parts.end()) unknown("the part " + text);
  return found->second;
}

Rest rest(const std::string& text) {
  if (text == "UNUSED_PAD") return Rest::ZERO;
  if (text == "UNUSED_SEXT") return Rest::SIGN;
  if (text == "UNUSED_PRESERVE") return Rest::KEEP;
  unknown("the rest " + text);
}

// A constant by the type that its instruction takes. An inline integer is a number of that size; a literal is 32 bits,
// the upper ones of a float64.
u64 constant(const std::string& text, Type type) {
  const bool hexadecimal = starts(text, "0x");
  if (!hexadecimal && text.find('.') != std::string::npos) {
    // Printed with fewer digits than it has: 1 / (2 pi).
    const f64 value = starts(text, "0.15915494") ? 0.15915494309189532 : std::strtod(text.c_str(), nullptr);
    switch (type) {
      case Type::F64:
      case Type::TWO_WORDS: return bit_cast<u64>(value);
      case Type::F16: return to_f16(static_cast<f32>(value)).bits;
      default: return bit_cast<u32>(static_cast<f32>(value));
    }
  }
  const i64 value = integer(text);
  switch (type) {
    case Type::F64: return static_cast<u64>(hexadecimal ? value << 32 : value);
    case Type::TWO_WORDS: return static_cast<u64>(value);
    case Type::SIGNED_16: return static_cast<u32>(static_cast<i16>(value));
    case Type::UNSIGNED_16: return static_cast<u16>(value);
    default: return static_cast<u32>(value);
  }
}

struct Register {
  Operand::Kind kind;
  u16 reg;
};

// v1, v[2:3], a4, s[6:7], vcc, exec_lo and so on.
std::optional<Register> named_register(const std::string& text) {
  static const std::map<std::string, u16> names = {{"vcc", VCC},
                                                   {"vcc_lo", VCC},
                                                   {"vcc_hi", VCC + 1},
                                                   {"m0", M0},
                                                   {"src_scc", SCC},
                                                   {"exec", EXEC},
                                                   {"exec_lo", EXEC},
                                                   {"exec_hi", EXEC + 1},
                                                   {"scc", SCC},
                                                   {"flat_scratch", FLAT_SCRATCH},
                                                   {"flat_scratch_lo", FLAT_SCRATCH},
                                                   {"flat_scratch_hi", FLAT_SCRATCH + 1}};
  const auto found = names.find(text);
  if (found != names.end()) return Register{Operand::SCALAR, found->second};
  const size_t digits = text.size() > 1 && text[1] == '[' ? 2 : 1;
  if (text.size() <= digits || !std::isdigit(text[digits])) return {};
  const auto number = static_cast<u16>(std::atoi(text.c_str() + digits));
  switch (text[0]) {
    case 'v': return Register{Operand::VECTOR, number};
    case 'a': return Register{Operand::VECTOR, static_cast<u16>(ACCUMULATORS + number)};
    case 's': return Register{Operand::SCALAR, number};
    default: return {};
  }
}

Operand operand(std::string text, Type type) {
  Operand made;
  if (text == "off") return made;
  if (const auto within = inside(text, "sext(", ")")) {
    made.signed_part = true;
    text = *within;
  }
  if (text[0] == '-' && text.size() > 1 && !std::isdigit(text[1])) {
    made.negative = true;
    text.erase(0, 1);
  }
  if (const auto within = inside(text, "|", "|")) {
    made.absolute = true;
    text = *within;
  }
  if (const auto found = named_register(text)) {
    made.kind = found->kind;
    made.reg = found->reg;
  } else if (std::isdigit(text[0]) || text[0] == '-') {
    made.kind = Operand::CONSTANT;
    made.constant = constant(text, type);
  } else if (text == "gpr_idx(SRC0)") {
    made.kind = Operand::CONSTANT;
  } else {
    unknown("the operand " + text);
  }
  return made;
}

// What follows the operands: `offset:16`, `clamp`, `op_sel:[0,1]`.
void modify(Instruction& in, const std::string& modifier, const Operation& operation) {
  const size_t colon = modifier.find(':');
  const std::string name = modifier.substr(0, colon);
  const std::string value = colon == std::string::npos ? "" : modifier.substr(colon + 1);
  if (name == "offset" || name == "offset0" || name == "bitop3") {
    in.offset = integer(value);
  } else if (name == "offset1") {
    in.second_offset = static_cast<u32>(integer(value));
  } else if (operation.halves && name == "op_sel") {
    in.op_sel = bits(value);
  } else if (operation.halves && name == "op_sel_hi") {
    in.op_sel_hi = bits(value);
  } else if (operation.halves && name == "neg_lo") {
    in.neg_lo = bits(value);
  } else if (operation.halves && name == "neg_hi") {
    in.neg_hi = bits(value);
  } else if (name == "dst_sel") {
    in.part = part(value);
  } else if (name == "dst_unused") {
    in.rest = rest(value);
  } else if (name == "src0_sel") {
    in.source[0].part = part(value);
  } else if (name == "src1_sel") {
    in.source[1].part = part(value);
  } else if (name == "clamp") {
    in.clamp = true;
  } else if (name == "glc" || name == "sc1") {
    in.scope = in.scope == Scope::BLOCK ? Scope::SYSTEM : Scope::DEVICE;
  } else if (name == "sc0") {
    in.scope = in.scope == Scope::DEVICE ? Scope::SYSTEM : Scope::BLOCK;
  } else if (name != "nt" && name != "slc") {
    unknown("the modifier " + modifier);
  }
}

}  // namespace

Instruction decode(const std::string& text, u32 encoding, const std::string& target) {
  const size_t space = text.find(' ');
  std::string name = text.substr(0, space);
  for (const char* suffix : {"_e32", "_e64", "_sdwa"}) {
    if (ends(name, suffix)) name.resize(name.size() - std::strlen(suffix));
  }
  std::vector<std::string> operands = split(space == std::string::npos ? "" : text.substr(space), ',');
  // Modifiers are behind the last operand, or where there is none.
  std::vector<std::string> modifiers;
  if (!operands.empty()) {
    modifiers = split(operands.back(), ' ');
    operands.back() = modifiers.front();
    modifiers.erase(modifiers.begin());
  }

  const Row* row = find_row(name, target);
  const bool clamp = std::find(modifiers.begin(), modifiers.end(), "clamp") != modifiers.end();
  if (row && clamp && !row->operation.clamps) row = find_row(name + " clamp", target);
  if (!row) unknown("no such instruction on " + target);
  const Operation& operation = row->operation;

  Instruction in;
  in.execute = operation.execute;
  if (name == "v_fma_mix_f32") in.op_sel_hi = 0;
  for (const std::string& modifier : modifiers) {
    // An atomic operation gives the old value; of others this is about caches.
    if (modifier == "glc" || modifier == "sc0") in.returns = operation.atomic;
  }
  std::string places = in.returns ? "d" : "";
  places += operation.operands;
  size_t next = 0;
  for (const char place : places) {
    const bool more = next < operands.size();
    switch (place) {
      case 'a': in.source[2] = in.to; break;
      case 'A': in.source[0] = in.to; break;
      case 'd': in.to = operand(more ? operands[next++] : "", Type::WORD); break;
      case 'm': in.to_mask = operand(more ? operands[next++] : "", Type::WORD); break;
      // Words that follow this instruction's four bytes.
      case 'j': in.offset = 4 + 4 * i64{static_cast<i16>(encoding)}, next = operands.size(); break;
      case 'c':
        if (more) modifiers.insert(modifiers.begin(), operands[next++]);
        break;
      // vmcnt, in two parts.
      case 'w': in.offset = (encoding & 0xf) | (encoding >> 10 & 0x30); return in;
      case '*': return in;
      default:
        if (more) in.source[place - '0'] = operand(operands[next++], operation.types[place - '0']);
    }
  }
  if (next != operands.size()) unknown("more operands than the emulator knows");
  // Behind the operands, as some say something of them.
  for (const std::string& modifier : modifiers) modify(in, modifier, operation);
  return in;
}

}  // namespace emulator
