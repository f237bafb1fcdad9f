// What the files of the runtime's calls share.
#pragma once

#define HIP extern "C" __attribute__((visibility("default"))) int

namespace emulator {

// hipError_t.
enum Code : int {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE = 101,
  NO_BINARY = 209,
  SHARED_OBJECT_INIT_FAILED = 303,
  ILLEGAL_STATE = 401,
  NOT_FOUND = 500,
  PEER_ACCESS_ENABLED = 704,
  LAUNCH_FAILED = 719,
  INVALIDATED = 901,
};

bool is_device(int device);

}  // namespace emulator
