// Stands in for the SIMT machine of kernels/gpu/simt.h: the kernels' own tests, linked to this, run AMD's machine code.
//
// They name a kernel by a function of its name; test-amd makes empty ones. What they have on the heap is a kernel's
// memory, each piece for itself; so is the stack, as a whole. The environment says more in KERNEL_OBJECTS: code
// objects, with colons between them.
#include <dlfcn.h>
#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <mutex>
#include <new>
#include <sstream>

#include "emulator/launch.h"
#include "emulator/settings.h"

using namespace emulator;

namespace {

// Set while this library works, whose own memory is no kernel's.
thread_local bool inside = false;
struct Inside {
  Inside() { inside = true; }
  ~Inside() { inside = false; }
};

// Neither is ever destroyed, as memory is given back until the process ends.
Memory& memory() {
  static auto* one = new Memory;
  return *one;
}
std::mutex& mutex() {
  static auto* one = new std::mutex;
  return *one;
}

std::vector<Program*> load_all() {
  std::vector<Program*> programs;
  std::istringstream paths(std::getenv("KERNEL_OBJECTS") ? std::getenv("KERNEL_OBJECTS") : "");
  for (std::string path; std::getline(paths, path, ':');) {
    std::ifstream file(path, std::ios::binary);
    Program* program = load_program(std::string(std::istreambuf_iterator<char>(file), {}), settings().target);
    if (!program) throw std::runtime_error(path + " is not for " + settings().target);
    memory().add({reinterpret_cast<u64>(program->image), program->bytes, ANY_DEVICE, false});
    programs.push_back(program);
  }
  return programs;
}

Kernel& kernel_of(const std::string& name) {
  static const auto programs = load_all();
  for (Program* program : programs) {
    const auto found = program->kernels.find(name);
    if (found != program->kernels.end()) return found->second;
  }
  throw std::runtime_error("no code object has " + name);
}

void add_stack() {
  pthread_attr_t attributes;
  void* from = nullptr;
  size_t bytes = 0;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &from, &bytes);
  pthread_attr_destroy(&attributes);
  memory().add({reinterpret_cast<u64>(from), bytes, ANY_DEVICE, true});
}

// Appends the names of what has run to the report.
void note(const Kernel& kernel) {
  if (kernel.launches != 1 || settings().report.empty()) return;
  std::ofstream(settings().report, std::ios::app) << settings().target << " " << kernel.name << "\n";
}

}  // namespace

void* operator new(size_t bytes) {
  void* at = std::malloc(bytes);
  if (!at) throw std::bad_alloc();
  if (!inside) {
    const Inside now;
    const std::lock_guard lock(mutex());
    memory().add({reinterpret_cast<u64>(at), bytes, ANY_DEVICE, true});
  }
  return at;
}
void operator delete(void* at) noexcept {
  if (!inside && at) {
    const Inside now;
    const std::lock_guard lock(mutex());
    memory().remove(reinterpret_cast<u64>(at));
  }
  std::free(at);
}
void operator delete(void* at, size_t) noexcept { operator delete(at); }

extern "C" __attribute__((visibility("default"))) int simt_launch(void (*function)(const void*), int grid, int block,
                                                                  int shared_bytes, const void* arguments,
                                                                  int argument_bytes, int, int, unsigned long long,
                                                                  char* message, int message_bytes) {
  const Inside now;
  const std::lock_guard lock(mutex());
  try {
    Dl_info info;
    if (!dladdr(reinterpret_cast<void*>(function), &info) || !info.dli_sname)
      throw std::runtime_error("no such kernel");
    Kernel& kernel = kernel_of(info.dli_sname);
    add_stack();
    const auto* bytes = static_cast<const u8*>(arguments);
    run({&kernel,
         0,
         static_cast<u32>(grid),
         static_cast<u32>(block),
         static_cast<u32>(shared_bytes),
         {bytes, bytes + argument_bytes}},
        memory(), {0});
    note(kernel);
    return 0;
  } catch (const std::runtime_error& error) {
    std::snprintf(message, static_cast<size_t>(message_bytes), "%s", error.what());
    return 1;
  }
}
