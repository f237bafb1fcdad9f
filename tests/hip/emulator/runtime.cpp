// The calls of libamdhip64 that the library makes. Streams are in order of the calls: everything is done at once, in
// the calling thread. What the library has no reason to ask for is refused.
#include <chrono>
#include <cstdio>
#include <memory>
#include <mutex>

#include "hip.h"
#include "launch.h"
#include "settings.h"

using namespace emulator;

namespace {

struct Graph {
  std::vector<Launch> launches;
};

struct Stream {
  std::unique_ptr<Graph> captured;  // NULL: not captured
  int launches = 0;                 // since the capture began
  bool invalidated = false;         // takes no more work, as ROCm's streams
};

struct Event {
  std::chrono::steady_clock::time_point at;
  u64 launches = 0;  // so far
};

struct Allocation {
  u64 bytes;
  int device;
};

// Everything that calls share. It is never destroyed, as other threads may call until the process ends.
struct Runtime {
  std::recursive_mutex mutex;
  Memory memory;
  std::map<void*, Allocation> allocations;
  std::map<int, u64> allocated;              // bytes, by device
  std::map<int, std::vector<int>> reach;     // devices whose memory a device's kernels may touch
  std::map<std::string, Program*> programs;  // by content; the devices share them
  int captures = 0;                          // so far
  u64 launches = 0;                          // so far
  bool lost = false;                         // a kernel had a fault
};

Runtime& runtime() {
  static auto* one = new Runtime;
  return *one;
}

thread_local int current = 0;

std::vector<int>& reach_of(int device) {
  auto& reach = runtime().reach[device];
  if (reach.empty()) reach.push_back(device);
  return reach;
}

void fail(const std::string& what) {
  std::fprintf(stderr, "hip emulator: %s\n", what.c_str());
  runtime().lost = true;
}

int perform(const Launch& launch) {
  if (runtime().lost) return LAUNCH_FAILED;
  runtime().launches++;
  try {
    run(launch, runtime().memory, reach_of(launch.device));
    return SUCCESS;
  } catch (const Fault& fault) {
    fail(launch.kernel->name + ", " + fault.what());
    return LAUNCH_FAILED;
  }
}

int take(void** at, size_t bytes, int device) {
  Runtime& all = runtime();
  const std::lock_guard lock(all.mutex);
  if (device != ANY_DEVICE && all.allocated[device] + bytes > settings().memory) return OUT_OF_MEMORY;
  *at = take_pages(bytes);
  if (!*at) return OUT_OF_MEMORY;
  all.allocations[*at] = {bytes, device};
  all.allocated[device] += bytes;
  all.memory.add({reinterpret_cast<u64>(*at), bytes, device, true});
  return SUCCESS;
}

int give(void* at) {
  if (!at) return SUCCESS;
  Runtime& all = runtime();
  const std::lock_guard lock(all.mutex);
  const auto found = all.allocations.find(at);
  if (found == all.allocations.end()) return INVALID_VALUE;
  all.allocated[found->second.device] -= found->second.bytes;
  all.memory.remove(reinterpret_cast<u64>(at));
  give_pages(at, found->second.bytes);
  all.allocations.erase(found);
  return SUCCESS;
}

// Whether bytes are allocated, on a certain device or on the host.
bool allocated(const void* at, size_t bytes, int device) {
  const Region* region = runtime().memory.find(reinterpret_cast<u64>(at), bytes);
  return bytes == 0 || (region && (region->device == device || region->device == ANY_DEVICE));
}

// `to_device`, `from_device`: whose memory it has to be; ANY_DEVICE: the program's.
int copy(void* to, int to_device, const void* from, int from_device, size_t bytes, Stream* stream) {
  Runtime& all = runtime();
  const std::lock_guard lock(all.mutex);
  if (all.lost) return LAUNCH_FAILED;
  if (stream->invalidated) return INVALIDATED;
  if (stream->captured) return ILLEGAL_STATE;
  if ((to_device != ANY_DEVICE && !allocated(to, bytes, to_device)) ||
      (from_device != ANY_DEVICE && !allocated(from, bytes, from_device))) {
    fail("a copy of " + std::to_string(bytes) + " bytes goes outside of what is allocated");
    return LAUNCH_FAILED;
  }
  std::memmove(to, from, bytes);
  return SUCCESS;
}

// Writes what has run, when the process ends.
struct Report {
  ~Report() {
    if (settings().report.empty()) return;
    FILE* file = std::fopen(settings().report.c_str(), "a");
    if (!file) return;
    std::map<std::string, Kernel> kernels;
    for (const auto& [object, program] : runtime().programs) {
      if (!program) continue;
      for (const auto& [name, kernel] : program->kernels) {
        Kernel& sum = kernels[name];
        sum.launches += kernel.launches;
        sum.blocks += kernel.blocks;
        sum.instructions += kernel.instructions;
        sum.seconds += kernel.seconds;
      }
    }
    for (const auto& [name, sum] : kernels) {
      if (!sum.launches) continue;
      std::fprintf(file, "%-9s %-32s %8llu launches %9llu blocks %12llu instructions %8.3f s\n",
                   settings().target.c_str(), name.c_str(), static_cast<unsigned long long>(sum.launches),
                   static_cast<unsigned long long>(sum.blocks), static_cast<unsigned long long>(sum.instructions),
                   sum.seconds);
    }
    std::fclose(file);
  }
} report;

}  // namespace

bool emulator::is_device(int device) { return device >= 0 && device < settings().devices; }

HIP hipRuntimeGetVersion(int* version) {
  *version = settings().version;
  return SUCCESS;
}
HIP hipGetDeviceCount(int* count) {
  *count = settings().devices;
  return SUCCESS;
}
HIP hipGetDevice(int* device) {
  *device = current;
  return SUCCESS;
}
HIP hipSetDevice(int device) {
  if (!is_device(device)) return INVALID_DEVICE;
  current = device;
  return SUCCESS;
}

HIP hipDeviceGetPCIBusId(char* at, int bytes, int device) {
  std::snprintf(at, static_cast<size_t>(bytes), "0000:%02x:00.0", device + 1);
  return is_device(device) ? SUCCESS : INVALID_DEVICE;
}
HIP hipDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return is_device(device) && is_device(peer) ? SUCCESS : INVALID_DEVICE;
}
HIP hipExtGetLinkTypeAndHopCount(int device, int peer, unsigned* kind, unsigned* hops) {
  const bool known = std::sscanf(settings().link.c_str(), "%u %u", kind, hops) == 2;
  return device != peer && known ? SUCCESS : INVALID_VALUE;
}
HIP hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  const std::lock_guard lock(runtime().mutex);
  if (!is_device(peer) || peer == current || flags != 0) return INVALID_DEVICE;
  auto& reach = reach_of(current);
  if (std::find(reach.begin(), reach.end(), peer) != reach.end()) return PEER_ACCESS_ENABLED;
  reach.push_back(peer);
  return SUCCESS;
}

HIP hipMemGetInfo(size_t* free_bytes, size_t* total) {
  const std::lock_guard lock(runtime().mutex);
  *total = settings().memory;
  *free_bytes = *total - runtime().allocated[current];
  return SUCCESS;
}
HIP hipMalloc(void** at, size_t bytes) { return take(at, bytes, current); }
HIP hipFree(void* at) { return give(at); }
HIP hipHostMalloc(void** at, size_t bytes, unsigned flags) {
  constexpr unsigned PORTABLE_AND_MAPPED = 3;
  return flags == PORTABLE_AND_MAPPED ? take(at, bytes, ANY_DEVICE) : INVALID_VALUE;
}
HIP hipHostFree(void* at) { return give(at); }
HIP hipHostGetDevicePointer(void** device, void* host, unsigned flags) {
  *device = host;
  return flags == 0 ? SUCCESS : INVALID_VALUE;
}

HIP hipMemcpyHtoDAsync(void* to, void* from, size_t bytes, Stream* stream) {
  return copy(to, current, from, ANY_DEVICE, bytes, stream);
}
HIP hipMemcpyDtoHAsync(void* to, void* from, size_t bytes, Stream* stream) {
  return copy(to, ANY_DEVICE, from, current, bytes, stream);
}
HIP hipMemcpyDtoDAsync(void* to, void* from, size_t bytes, Stream* stream) {
  return copy(to, current, from, current, bytes, stream);
}
HIP hipMemcpyPeerAsync(void* to, int device, const void* from, int peer, size_t bytes, Stream* stream) {
  if (!is_device(device) || !is_device(peer)) return INVALID_DEVICE;
  return copy(to, device, from, peer, bytes, stream);
}
HIP hipMemsetD8Async(void* to, unsigned char byte, size_t bytes, Stream* stream) {
  const std::vector<u8> filled(bytes, byte);
  return copy(to, current, filled.data(), ANY_DEVICE, bytes, stream);
}

HIP hipStreamCreateWithFlags(Stream** stream, unsigned flags) {
  constexpr unsigned NON_BLOCKING = 1;
  *stream = new Stream;
  return flags == NON_BLOCKING ? SUCCESS : INVALID_VALUE;
}
HIP hipStreamDestroy(Stream* stream) {
  delete stream;
  return SUCCESS;
}
HIP hipStreamSynchronize(Stream* stream) {
  if (runtime().lost) return LAUNCH_FAILED;
  return stream->captured || stream->invalidated ? INVALIDATED : SUCCESS;
}
HIP hipStreamQuery(Stream* stream) { return hipStreamSynchronize(stream); }
HIP hipStreamWaitEvent(Stream* stream, Event* event, unsigned flags) {
  return stream && event && flags == 0 ? SUCCESS : INVALID_VALUE;
}
HIP hipEventCreateWithFlags(Event** event, unsigned) {
  *event = new Event;
  return SUCCESS;
}
HIP hipEventDestroy(Event* event) {
  delete event;
  return SUCCESS;
}
HIP hipEventRecord(Event* event, Stream* stream) {
  if (!event || !stream) return INVALID_VALUE;
  event->at = std::chrono::steady_clock::now();
  event->launches = runtime().launches;
  return SUCCESS;
}
HIP hipEventSynchronize(Event* event) { return event ? SUCCESS : INVALID_VALUE; }
HIP hipEventElapsedTime(float* ms, Event* from, Event* to) {
  if (!from || !to) return INVALID_VALUE;
  constexpr float LAUNCH_MS = 0.005f;
  if (settings().together)
    *ms = LAUNCH_MS * static_cast<float>(to->launches - from->launches);
  else
    *ms = std::chrono::duration<float, std::milli>(to->at - from->at).count();
  return SUCCESS;
}

HIP hipModuleLoadData(Program** module, const void* image) {
  Runtime& all = runtime();
  const std::lock_guard lock(all.mutex);
  if (settings().refuse) return settings().refuse;
  try {
    const std::string object = object_bytes(static_cast<const u8*>(image));
    Program*& program = all.programs[object];
    if (!program) {
      program = load_program(object, settings().target);
      if (!program) return NO_BINARY;
      all.memory.add({reinterpret_cast<u64>(program->image), program->bytes, ANY_DEVICE, false});
    }
    *module = program;
    return SUCCESS;
  } catch (const std::runtime_error& error) {
    std::fprintf(stderr, "hip emulator: %s\n", error.what());
    return SHARED_OBJECT_INIT_FAILED;
  }
}
HIP hipModuleUnload(Program* module) { return module ? SUCCESS : INVALID_VALUE; }
HIP hipModuleGetFunction(Kernel** function, Program* module, const char* name) {
  const auto found = module->kernels.find(name);
  if (found == module->kernels.end()) return NOT_FOUND;
  *function = &found->second;
  return SUCCESS;
}

HIP hipModuleLaunchKernel(Kernel* function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                          unsigned block_z, unsigned dynamic_lds, Stream* stream, void** params, void** extra) {
  constexpr unsigned MOST_THREADS = 1024;
  // hip_runtime_api.h: HIP_LAUNCH_PARAM_BUFFER_POINTER, _SIZE and _END.
  enum : u64 { BUFFER = 1, SIZE = 2, END = 3 };
  const auto is = [&](int i, u64 mark) { return reinterpret_cast<u64>(extra[i]) == mark; };
  if (!function || !x || y != 1 || z != 1 || !block_x || block_x > MOST_THREADS || block_y != 1 || block_z != 1 ||
      params || !is(0, BUFFER) || !is(2, SIZE) || !is(4, END)) {
    return INVALID_VALUE;
  }
  const u64 most_lds = function->program->target == "gfx950" ? 160 << 10 : 64 << 10;
  if (u64{function->lds} + dynamic_lds > most_lds) return INVALID_VALUE;
  const auto* arguments = static_cast<const u8*>(extra[1]);
  Launch launch{function, current, x, block_x, dynamic_lds, {arguments, arguments + *static_cast<size_t*>(extra[3])}};
  const std::lock_guard lock(runtime().mutex);
  if (stream->invalidated) return INVALIDATED;
  if (!stream->captured) return perform(launch);
  stream->launches++;
  if (stream->launches == 2 && runtime().captures <= settings().invalidate) {
    stream->invalidated = true;
    return INVALIDATED;
  }
  if (stream->launches != settings().drop) stream->captured->launches.push_back(std::move(launch));
  return SUCCESS;
}

HIP hipDeviceGetAttribute(int* value, int attribute, int device) {
  constexpr int COOPERATIVE_LAUNCH = 10;
  if (!value || attribute != COOPERATIVE_LAUNCH || !is_device(device)) return INVALID_VALUE;
  *value = settings().together;
  return SUCCESS;
}
HIP hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel* function, int threads, size_t lds) {
  if (!blocks || !function || threads <= 0 || lds) return INVALID_VALUE;
  *blocks = 1;
  return SUCCESS;
}
// One argument, a struct.
HIP hipModuleLaunchCooperativeKernel(Kernel* function, unsigned x, unsigned y, unsigned z, unsigned block_x,
                                     unsigned block_y, unsigned block_z, unsigned dynamic_lds, Stream* stream,
                                     void** params) {
  if (!settings().together || !function || !x || y != 1 || z != 1 || !block_x || block_y != 1 || block_z != 1 ||
      dynamic_lds || !params) {
    return INVALID_VALUE;
  }
  const auto* arguments = static_cast<const u8*>(params[0]);
  const u32 bytes = function->arguments > HIDDEN_BYTES ? function->arguments - HIDDEN_BYTES : function->arguments;
  const std::lock_guard lock(runtime().mutex);
  if (stream->invalidated || stream->captured) return INVALIDATED;
  return perform({function, current, x, block_x, 0, {arguments, arguments + bytes}, true});
}

HIP hipStreamBeginCapture(Stream* stream, int mode) {
  constexpr int THREAD_LOCAL = 1;
  const std::lock_guard lock(runtime().mutex);
  if (stream->captured || mode != THREAD_LOCAL) return ILLEGAL_STATE;
  runtime().captures++;
  stream->captured = std::make_unique<Graph>();
  stream->launches = 0;
  return SUCCESS;
}
HIP hipStreamEndCapture(Stream* stream, Graph** graph) {
  *graph = nullptr;
  if (!stream->captured) return ILLEGAL_STATE;
  const auto captured = std::move(stream->captured);
  if (stream->invalidated) return INVALIDATED;
  *graph = new Graph(std::move(*captured));
  return SUCCESS;
}
HIP hipGraphGetNodes(Graph* graph, void** nodes, size_t* count) {
  if (nodes) return INVALID_VALUE;
  *count = graph->launches.size();
  return SUCCESS;
}
HIP hipGraphDestroy(Graph* graph) {
  delete graph;
  return SUCCESS;
}
HIP hipGraphInstantiate(Graph** executable, Graph* graph, void** node, char* log, size_t log_bytes) {
  if (node || log || log_bytes) return INVALID_VALUE;
  *executable = new Graph(*graph);
  return SUCCESS;
}
HIP hipGraphLaunch(Graph* executable, Stream* stream) {
  const std::lock_guard lock(runtime().mutex);
  if (stream->invalidated || stream->captured) return INVALIDATED;
  for (const Launch& launch : executable->launches) {
    if (const int code = perform(launch)) return code;
  }
  return SUCCESS;
}
HIP hipGraphExecDestroy(Graph* executable) {
  delete executable;
  return SUCCESS;
}
