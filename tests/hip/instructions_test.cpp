// Runs the cases of a file like instructions.txt, which says how they are written, on one target. Every instruction of
// the emulator's table has to be in one of them.
//
// instructions_test TARGET CASES FOLDER: compilers write to FOLDER. CLANG names another clang than clang-22.

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include "emulator/launch.h"

using namespace emulator;

namespace {

constexpr int VECTOR_COUNT = 16, SCALAR_FIRST = 16, SCALAR_COUNT = 32, MEMORY_WORDS = 64;

// What a case begins with and what it leaves.
struct State {
  u32 v[VECTOR_COUNT][LANES];
  u32 s[SCALAR_COUNT];
  u32 vcc[2], exec[2], scc, unused[3];
  u32 memory[MEMORY_WORDS];
};

struct Setting {
  std::string name, value;
};

struct Case {
  int line;
  std::string text, fault;
  std::vector<Setting> before, after;
  bool differs = false;  // from `after`
  u32 threads = LANES, lds = 4096;
};

[[noreturn]] void stop(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

std::vector<std::string> split(const std::string& text, char sign) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, sign);) parts.push_back(part);
  return parts;
}
// By bars between spaces, as there are others round an absolute value.
std::vector<std::string> fields_of(const std::string& line) {
  std::vector<std::string> fields;
  size_t from = 0;
  for (size_t bar; (bar = line.find(" | ", from)) != std::string::npos; from = bar + 2) {
    fields.push_back(line.substr(from, bar - from));
  }
  fields.push_back(line.substr(from));
  return fields;
}
std::string trimmed(const std::string& text) {
  const size_t from = text.find_first_not_of(' '), to = text.find_last_not_of(' ');
  return from == std::string::npos ? "" : text.substr(from, to - from + 1);
}

std::vector<Setting> settings_of(const std::string& text) {
  std::vector<Setting> made;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    made.push_back({word.substr(0, equals), word.substr(equals + 1)});
  }
  return made;
}

std::vector<Case> cases_of(const std::string& path, const std::string& target) {
  std::ifstream file(path);
  std::vector<Case> cases;
  bool wanted = true;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    number++;
    if (line.empty() || line[0] == '#') continue;
    if (line[0] == '[') {
      wanted = line.find(target) != std::string::npos;
      continue;
    }
    if (!wanted) continue;
    const auto fields = fields_of(line);
    if (fields.size() != 3) stop(path + ":" + std::to_string(number) + ": not three fields");
    Case one{number, fields[0], "", {}, {}};
    for (const Setting& setting : settings_of(fields[1])) {
      if (setting.name == "threads") {
        one.threads = static_cast<u32>(std::stoul(setting.value));
      } else if (setting.name == "lds") {
        one.lds = static_cast<u32>(std::stoul(setting.value));
      } else {
        one.before.push_back(setting);
      }
    }
    std::string expected = trimmed(fields[2]);
    one.differs = expected.rfind("differs: ", 0) == 0;
    if (one.differs) expected = expected.substr(9);
    if (expected.rfind("fault: ", 0) == 0) {
      one.fault = expected.substr(7);
    } else {
      one.after = settings_of(expected);
    }
    cases.push_back(one);
  }
  return cases;
}

// ---- The kernels
// ------------------------------------------------------------------------------------------------------

// s[0:1] has the address of the State; v40 a lane's offset in its registers.
std::string kernel_of(const Case& one, size_t index) {
  std::ostringstream out;
  const std::string name = "case_" + std::to_string(index);
  const auto at = [](size_t offset) { return " offset:" + std::to_string(offset); };
  out << ".p2align 8\n.globl " << name << "\n.type " << name << ",@function\n" << name << ":\n";
  out << "s_load_dwordx2 s[0:1], s[0:1], 0\nv_and_b32 v40, 63, v0\nv_lshlrev_b32 v40, 2, v40\n";
  out << "s_waitcnt lgkmcnt(0)\n";
  out << "s_load_dwordx16 s[16:31], s[0:1], " << offsetof(State, s) << "\n";
  out << "s_load_dwordx16 s[32:47], s[0:1], " << offsetof(State, s) + 64 << "\n";
  out << "s_load_dwordx8 s[4:11], s[0:1], " << offsetof(State, vcc) << "\n";
  for (int i = 0; i < VECTOR_COUNT; i++) {
    out << "global_load_dword v" << i << ", v40, s[0:1]" << at(static_cast<size_t>(i) * 256) << "\n";
  }
  out << "s_waitcnt vmcnt(0) lgkmcnt(0)\n";
  out << "s_mov_b64 vcc, s[4:5]\ns_mov_b64 exec, s[6:7]\ns_cmp_lg_u32 s8, 0\n";
  for (const std::string& instruction : split(one.text, ';')) out << trimmed(instruction) << "\n";
  out << "s_mov_b64 s[6:7], exec\ns_mov_b64 exec, -1\n";
  // Waves write the same state: that of the last is checked.
  out << "s_cselect_b32 s8, 1, 0\n";
  for (int i = 0; i < VECTOR_COUNT; i++) {
    out << "global_store_dword v40, v" << i << ", s[0:1]" << at(static_cast<size_t>(i) * 256) << "\n";
  }
  const auto store = [&](const std::string& scalar, size_t offset) {
    out << "v_mov_b32 v41, " << scalar << "\nv_mov_b32 v42, " << offset << "\n";
    out << "global_store_dword v42, v41, s[0:1]\n";
  };
  for (int i = 0; i < SCALAR_COUNT; i++) {
    store("s" + std::to_string(SCALAR_FIRST + i), offsetof(State, s) + 4 * static_cast<size_t>(i));
  }
  store("vcc_lo", offsetof(State, vcc));
  store("vcc_hi", offsetof(State, vcc) + 4);
  store("s6", offsetof(State, exec));
  store("s7", offsetof(State, exec) + 4);
  store("s8", offsetof(State, scc));
  out << "s_endpgm\n";
  out << ".rodata\n.p2align 6\n.amdhsa_kernel " << name << "\n";
  out << ".amdhsa_user_sgpr_kernarg_segment_ptr 1\n.amdhsa_kernarg_size 8\n";
  out << ".amdhsa_next_free_vgpr 96\n.amdhsa_accum_offset 64\n.amdhsa_next_free_sgpr 96\n";
  out << ".amdhsa_float_denorm_mode_32 3\n";
  out << ".end_amdhsa_kernel\n.text\n";
  return out.str();
}

Program* assemble(const std::vector<Case>& cases, const std::string& target, const std::string& folder) {
  const std::string source = folder + "/cases-" + target + ".s", object = folder + "/cases-" + target + ".co";
  std::ofstream out(source);
  out << ".amdgcn_target \"amdgcn-amd-amdhsa--" << target << "\"\n.amdhsa_code_object_version 5\n.text\n";
  for (size_t i = 0; i < cases.size(); i++) out << kernel_of(cases[i], i);
  out.close();
  const char* clang = std::getenv("CLANG");
  const std::string command = std::string(clang ? clang : "clang-22") +
                              " -x assembler -target amdgcn-amd-amdhsa -mcpu=" + target + " -nostdlib " + source +
                              " -o " + object;
  if (std::system(command.c_str()) != 0) stop(command);
  std::ifstream file(object, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  Program* program = load_program(bytes, target);
  if (!program) stop(object + " is not for " + target);
  return program;
}

// ---- Values
// -----------------------------------------------------------------------------------------------------------

// 0x1f, -3, 1.5 (float32, or float64 where it has two words), h1.5 (FP16), nan, inf.
u64 number(const std::string& text, bool wide) {
  if (text[0] == 'h') return to_f16(std::strtof(text.c_str() + 1, nullptr)).bits;
  const bool hexadecimal = text.rfind("0x", 0) == 0;
  if (!hexadecimal && text.find_first_of(".n") != std::string::npos) {
    const f64 value = std::strtod(text.c_str(), nullptr);
    return wide ? bit_cast<u64>(value) : bit_cast<u32>(static_cast<f32>(value));
  }
  const u64 value = std::strtoull(text.c_str(), nullptr, 0);
  return wide ? value : low_word(value);
}

// The words that a name stands for: those of one lane or of none.
struct Place {
  std::vector<u32*> words;  // low and high
};
Place place(State& state, const std::string& name, int lane) {
  if (name == "vcc") return {{&state.vcc[0], &state.vcc[1]}};
  if (name == "exec") return {{&state.exec[0], &state.exec[1]}};
  if (name == "scc") return {{&state.scc}};
  const bool wide = name.find(':') != std::string::npos;
  const int first = std::atoi(name.c_str() + 1);
  Place made;
  for (int i = first; i <= first + wide; i++) {
    switch (name[0]) {
      case 'v': made.words.push_back(&state.v[i][lane]); break;
      case 's': made.words.push_back(&state.s[i - SCALAR_FIRST]); break;
      case 'm': made.words.push_back(&state.memory[i]); break;
      default: stop("no such name: " + name);
    }
  }
  return made;
}

// The value of a lane: the last one is that of all that follow.
std::string value_of(const Setting& setting, int lane) {
  const auto values = split(setting.value, ',');
  return values[std::min(static_cast<size_t>(lane), values.size() - 1)];
}

void apply(State& state, const std::vector<Setting>& settings) {
  for (const Setting& setting : settings) {
    for (int lane = 0; lane < LANES; lane++) {
      const Place to = place(state, setting.name, lane);
      const u64 value = number(value_of(setting, lane), to.words.size() == 2);
      for (size_t i = 0; i < to.words.size(); i++) *to.words[i] = static_cast<u32>(value >> 32 * i);
    }
  }
}

std::string difference(State& state, const std::vector<Setting>& settings) {
  for (const Setting& setting : settings) {
    for (int lane = 0; lane < LANES; lane++) {
      const Place at = place(state, setting.name, lane);
      const bool wide = at.words.size() == 2;
      const u64 found = wide ? static_cast<u64>(*at.words[1]) << 32 | *at.words[0] : *at.words[0];
      const std::string value = value_of(setting, lane);
      const bool nan = wide ? std::isnan(bit_cast<f64>(found)) : std::isnan(bit_cast<f32>(low_word(found)));
      if (value == "nan" ? nan : found == number(value, wide)) continue;
      char text[160];
      std::snprintf(text, sizeof text, "%s is %#llx in lane %d, and not %s", setting.name.c_str(),
                    static_cast<unsigned long long>(found), lane, value.c_str());
      return text;
    }
  }
  return "";
}

// ---- Running
// ----------------------------------------------------------------------------------------------------------

void begin(State& state) {
  std::memset(&state, 0, sizeof state);
  state.exec[0] = state.exec[1] = ~0u;
  for (u32 i = 0; i < MEMORY_WORDS; i++) state.memory[i] = 0x03020100 + 0x04040404 * i;
  const u64 memory = reinterpret_cast<u64>(state.memory);
  // s[44:45], and v[14:15] in each lane.
  state.s[44 - SCALAR_FIRST] = low_word(memory);
  state.s[45 - SCALAR_FIRST] = high_word(memory);
  std::fill(state.v[14], state.v[14] + LANES, low_word(memory));
  std::fill(state.v[15], state.v[15] + LANES, high_word(memory));
}

// What is wrong, or nothing.
std::string run(const Case& one, Kernel& kernel) {
  auto* state = static_cast<State*>(take_pages(sizeof(State)));
  begin(*state);
  apply(*state, one.before);
  Memory memory;
  memory.add({reinterpret_cast<u64>(state), sizeof(State), 0, true});
  memory.add({reinterpret_cast<u64>(kernel.program->image), kernel.program->bytes, ANY_DEVICE, false});
  Launch launch{&kernel, 0, 1, one.threads, one.lds, std::vector<u8>(sizeof state)};
  std::memcpy(launch.arguments.data(), &state, sizeof state);
  std::string wrong;
  try {
    run(launch, memory, {0});
    wrong = one.fault.empty() ? difference(*state, one.after) : "no fault";
    if (one.differs) wrong = wrong.empty() ? "nothing differs" : "";
  } catch (const Fault& fault) {
    const bool expected = !one.fault.empty() && std::string(fault.what()).find(one.fault) != std::string::npos;
    if (!expected) wrong = fault.what();
  }
  give_pages(state, sizeof(State));
  return wrong;
}

// A code object with an instruction that is not in the table is refused as often as it is asked for.
void check_that_others_are_refused(const std::string& target, const std::string& folder) {
  Program* program = assemble({{0, "s_branch 0 ; s_sethalt 0", "", {}, {}}}, target, folder);
  for (int time = 0; time < 2; time++) {
    try {
      disassemble(*program);
      stop(target + ": s_sethalt has no row, and is not refused");
    } catch (const std::runtime_error& error) {
      if (!std::strstr(error.what(), "does not know s_sethalt")) stop(error.what());
    }
  }
}

void check_that_all_are_there(const std::vector<Case>& cases, const std::string& target) {
  std::set<std::string> met;
  for (const Case& one : cases) {
    for (const std::string& part : split(one.text, ';')) {
      const std::string text = trimmed(part);
      std::string name = text.substr(0, text.find(' '));
      for (const char* suffix : {"_e32", "_e64", "_sdwa"}) {
        const size_t at = name.rfind(suffix);
        if (at != std::string::npos && at + std::strlen(suffix) == name.size()) name.resize(at);
      }
      met.insert(name);
      if (text.find(" clamp") != std::string::npos) met.insert(name + " clamp");
    }
  }
  std::string missing;
  for (const std::string& name : names_of_rows(target)) {
    if (!met.count(name)) missing += " " + name;
  }
  if (!missing.empty()) stop(target + ": no case has" + missing);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) stop("instructions_test TARGET CASES FOLDER");
  const std::string target = argv[1];
  const auto cases = cases_of(argv[2], target);
  check_that_others_are_refused(target, argv[3]);
  Program* program = assemble(cases, target, argv[3]);
  int failed = 0;
  for (size_t i = 0; i < cases.size(); i++) {
    const std::string wrong = run(cases[i], program->kernels.at("case_" + std::to_string(i)));
    if (wrong.empty()) continue;
    failed++;
    std::fprintf(stderr, "%s:%d on %s: %s: %s\n", argv[2], cases[i].line, target.c_str(), cases[i].text.c_str(),
                 wrong.c_str());
  }
  if (failed) stop(std::to_string(failed) + " of " + std::to_string(cases.size()) + " cases on " + target);
  check_that_all_are_there(cases, target);
  std::printf("%s: %zu cases\n", target.c_str(), cases.size());
}
