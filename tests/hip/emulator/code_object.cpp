// Loads a code object as ROCm's loader does: its segments into memory, its kernels by their descriptors. The
// instructions are read from what llvm-objdump makes of them.
#include <elf.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "program.h"
#include "settings.h"

namespace emulator {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error(what); }

// From LLVM, User Guide for AMDGPU Backend, ELF Code Object: EF_AMDGPU_MACH.
constexpr u32 MACHINE_MASK = 0xff;
u32 machine_of(const std::string& target) {
  if (target == "gfx90a") return 0x3f;
  if (target == "gfx942") return 0x4c;
  if (target == "gfx950") return 0x4f;
  return 0;
}

// From the same guide, Kernel Descriptor for GFX6-GFX12.
struct Descriptor {
  u32 group_segment_bytes, private_segment_bytes, arguments_bytes;
  u8 reserved0[4];
  i64 entry_offset;
  u8 reserved1[20];
  u32 resources3, resources1, resources2;
  u16 properties, preload;
  u8 reserved2[4];
};
static_assert(sizeof(Descriptor) == 64);

template <class T>
const T* at(const u8* object, u64 offset) {
  return reinterpret_cast<const T*>(object + offset);
}

void load_segments(Program& program, const u8* object) {
  const auto* header = at<Elf64_Ehdr>(object, 0);
  const auto* segments = at<Elf64_Phdr>(object, header->e_phoff);
  for (int i = 0; i < header->e_phnum; i++) {
    if (segments[i].p_type == PT_LOAD)
      program.bytes = std::max(program.bytes, segments[i].p_vaddr + segments[i].p_memsz);
  }
  program.image = static_cast<u8*>(take_pages(program.bytes));
  if (!program.image) refuse("no memory for the code object");
  std::memset(program.image, 0, program.bytes);
  for (int i = 0; i < header->e_phnum; i++) {
    const Elf64_Phdr& segment = segments[i];
    if (segment.p_type == PT_LOAD)
      std::memcpy(program.image + segment.p_vaddr, object + segment.p_offset, segment.p_filesz);
  }
}

// What the emulator counts on: no scratch, no preloaded arguments, IEEE's rounding and subnormals.
void check(const std::string& name, const Descriptor& descriptor) {
  constexpr u32 NEAREST_WITH_SUBNORMALS = 0xf0;
  if (descriptor.private_segment_bytes) refuse(name + " has scratch, which the emulator has not");
  if (descriptor.preload) refuse(name + " has preloaded arguments, which the emulator does not know");
  if ((descriptor.resources1 >> 12 & 0xff) != NEAREST_WITH_SUBNORMALS) {
    refuse(name + " rounds, or takes subnormals, as the emulator does not");
  }
}

void add_kernel(Program& program, const std::string& name, u64 descriptor_address) {
  Descriptor descriptor;
  std::memcpy(&descriptor, program.image + descriptor_address, sizeof descriptor);
  check(name, descriptor);
  Kernel kernel;
  kernel.name = name;
  kernel.lds = descriptor.group_segment_bytes;
  kernel.arguments = descriptor.arguments_bytes;
  kernel.descriptor = reinterpret_cast<u64>(program.image) + descriptor_address;
  kernel.properties = descriptor.properties;
  // Of gfx90a and later: registers in eights, of which VGPRs come first, in fours.
  const u32 registers = ((descriptor.resources1 & 0x3f) + 1) * 8;
  kernel.vectors = std::min(((descriptor.resources3 & 0x3f) + 1) * 4, registers);
  kernel.accumulators = registers - kernel.vectors;
  kernel.user_registers = descriptor.resources2 >> 1 & 31;
  for (int i = 0; i < 3; i++) kernel.block_id[i] = descriptor.resources2 >> (7 + i) & 1;
  kernel.entry = descriptor_address + static_cast<u64>(descriptor.entry_offset);
  kernel.program = &program;
  program.kernels[name] = kernel;
}

void add_kernels(Program& program, const u8* object) {
  const auto* header = at<Elf64_Ehdr>(object, 0);
  const auto* sections = at<Elf64_Shdr>(object, header->e_shoff);
  for (int i = 0; i < header->e_shnum; i++) {
    const Elf64_Shdr& section = sections[i];
    if ((section.sh_type == SHT_RELA || section.sh_type == SHT_REL) && section.sh_size) refuse("there are relocations");
    if (section.sh_type != SHT_DYNSYM) continue;
    const auto* symbols = at<Elf64_Sym>(object, section.sh_offset);
    const char* names = at<char>(object, sections[section.sh_link].sh_offset);
    for (u64 k = 0; k < section.sh_size / sizeof *symbols; k++) {
      std::string name = names + symbols[k].st_name;
      const size_t suffix = name.rfind(".kd");
      if (suffix == std::string::npos || suffix + 3 != name.size()) continue;
      name.resize(suffix);
      add_kernel(program, name, symbols[k].st_value);
    }
  }
}

// A line of an instruction: a tab, its text, `// `, its address, `: `, its words.
void add_line(Program& program, const std::string& line) {
  const size_t comment = line.find("// ");
  if (line.empty() || line[0] != '\t' || comment == std::string::npos) return;
  std::string text = line.substr(1, comment - 1);
  text.resize(text.find_last_not_of(' ') + 1);
  char* end = nullptr;
  const u64 address = std::strtoull(line.c_str() + comment + 3, &end, 16);
  const char* words = end + 1;
  const auto encoding = static_cast<u32>(std::strtoul(words, &end, 16));
  u32 bytes = 4;
  while (std::isxdigit(end[0] == ' ' ? end[1] : '\0')) {
    std::strtoul(end, &end, 16);
    bytes += 4;
  }
  Instruction in;
  try {
    in = decode(text, encoding, program.target);
  } catch (const std::runtime_error& error) {
    refuse("the emulator does not know " + text + ": " + error.what());
  }
  in.address = static_cast<u32>(address);
  in.next = in.address + bytes;
  program.index[address] = static_cast<u32>(program.code.size());
  program.code.push_back(in);
  program.text.push_back(text);
}

}  // namespace

void disassemble(Program& program) {
  if (!program.problem.empty()) refuse(program.problem);
  if (!program.code.empty()) return;
  const std::string& object = program.object;
  char path[] = "/tmp/emulated-XXXXXX";
  const int file = mkstemp(path);
  if (file < 0 || write(file, object.data(), object.size()) != static_cast<ssize_t>(object.size())) {
    refuse("cannot write a temporary file");
  }
  close(file);
  const std::string command = settings().objdump + " -d --mcpu=" + program.target + " " + path;
  FILE* output = popen(command.c_str(), "r");
  if (!output) refuse("cannot run " + command);
  char* line = nullptr;
  size_t room = 0;
  for (ssize_t length; (length = getline(&line, &room, output)) > 0;) {
    if (line[length - 1] == '\n') line[length - 1] = '\0';
    try {
      if (program.problem.empty()) add_line(program, line);
    } catch (const std::runtime_error& error) {
      program.problem = error.what();
    }
  }
  std::free(line);
  const int status = pclose(output);
  unlink(path);
  if (!program.problem.empty()) refuse(program.problem);
  if (status != 0 || program.code.empty()) refuse(command + " failed; install llvm-22, or set HIP_EMULATOR_OBJDUMP");
  const Execute jump = decode("s_branch 0", 0, program.target).execute;
  for (size_t i = 0; i < program.code.size(); i++) {
    Instruction& in = program.code[i];
    const bool jumps = in.execute == jump || program.text[i].rfind("s_cbranch_", 0) == 0;
    if (!jumps) continue;
    const auto target = program.index.find(static_cast<u64>(in.address + in.offset));
    if (target == program.index.end()) refuse(program.text[i] + " goes to where no instruction is");
    in.target = target->second;
  }
}

std::string object_bytes(const u8* object) {
  const auto* header = at<Elf64_Ehdr>(object, 0);
  if (std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 || header->e_machine != EM_AMDGPU) return {};
  u64 bytes = header->e_shoff + u64{header->e_shnum} * header->e_shentsize;
  const auto* sections = at<Elf64_Shdr>(object, header->e_shoff);
  for (int i = 0; i < header->e_shnum; i++) {
    if (sections[i].sh_type != SHT_NOBITS) bytes = std::max(bytes, sections[i].sh_offset + sections[i].sh_size);
  }
  return {reinterpret_cast<const char*>(object), bytes};
}

Program* load_program(const std::string& object, const std::string& target) {
  const auto* bytes = reinterpret_cast<const u8*>(object.data());
  if (object.empty() || (at<Elf64_Ehdr>(bytes, 0)->e_flags & MACHINE_MASK) != machine_of(target)) return nullptr;
  auto program = std::make_unique<Program>();
  program->target = target;
  program->object = object;
  load_segments(*program, bytes);
  add_kernels(*program, bytes);
  return program.release();
}

}  // namespace emulator
