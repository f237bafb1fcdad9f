// A library whose static object uses the model while dlopen loads that library: the dynamic loader then holds a lock
// that new threads may need. Compiled with PLUGIN it is that library, else the program that loads it.
//
//     PROGRAM MODEL TOKENIZER REQUESTS LIBRARY

#include "host.h"

#include <dlfcn.h>
#include <unistd.h>

#ifdef PLUGIN

static char *arguments[] = {nullptr, getenv("HOST_MODEL"), getenv("HOST_TOKENIZER"), getenv("HOST_REQUESTS")};

// Warm from its constructor to its destructor.
struct Engine {
  host h;
  long long tokens;

  Engine() {
    host_log = stderr;
    h = host_open(arguments, GETP_OFF);
    host_warm_up(&h);
    host_require(getp_last_error() == nullptr, "warm_up in a constructor");
    tokens = host_inference(&h);
    host_require(tokens > 0, "inference in a constructor");
  }

  ~Engine() {
    host_require(host_inference(&h) == tokens, "inference in a destructor");
    host_finish(&h);
    host_close(&h);
  }
};

static Engine engine;

extern "C" long long answer() { return host_inference(&engine.h); }

#else

int main(int argc, char **argv) {
  if (argc != 5) return 2;
  host_log = stderr;
  setenv("HOST_MODEL", argv[1], 1);
  setenv("HOST_TOKENIZER", argv[2], 1);
  setenv("HOST_REQUESTS", argv[3], 1);
  alarm(120);  // whoever hangs is killed
  for (int again = 0; again < 2; again++) {
    void *library = dlopen(argv[4], RTLD_NOW);
    host_require(library != nullptr, "the library loads");
    auto answer = reinterpret_cast<long long (*)()>(dlsym(library, "answer"));
    host_require(answer != nullptr && answer() > 0, "it answers behind dlopen");
    host_require(dlclose(library) == 0, "it is unloaded");
  }
  fprintf(host_log, "ok: a library's constructor warms up, its destructor finishes\n");
  return 0;
}

#endif
