// A plugin is loaded, works and is unloaded by a thread that ends only then: what the library has to call when a thread
// ends must still be there. Compiled with PLUGIN it is that plugin, else the program.
//
//     PROGRAM MODEL TOKENIZER REQUESTS PLUGIN

#include "host.h"

#ifdef PLUGIN

extern "C" long long work(char **argv) {
  host_log = stderr;
  host h = host_open(argv, GETP_OFF);
  host_warm_up(&h);
  long long tokens = host_inference(&h);
  host_finish(&h);
  host_close(&h);
  finish(nullptr, nullptr);  // fails, and so leaves an error
  return tokens;
}

#else

#include <dlfcn.h>

#include <thread>

static void require(bool holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "FAILED: %s\n", what);
  _Exit(1);
}

static void load_work_unload(char **argv) {
  void *plugin = dlopen(argv[4], RTLD_NOW);
  require(plugin != nullptr, "the plugin loads");
  auto work = reinterpret_cast<long long (*)(char **)>(dlsym(plugin, "work"));
  require(work != nullptr && work(argv) > 0, "it answers");
  require(dlclose(plugin) == 0 && dlopen(argv[4], RTLD_NOW | RTLD_NOLOAD) == nullptr, "it is unloaded");
}

int main(int argc, char **argv) {
  if (argc != 5) return 2;
  for (int again = 0; again < 2; again++) std::thread(load_work_unload, argv).join();
  fprintf(stderr, "ok: threads end behind the unloading of what they have called\n");
  return 0;
}

#endif
