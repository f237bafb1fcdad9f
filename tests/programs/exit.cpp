// Calls the library where a thread and the program are ending: from the destructors of thread_local objects, from a
// function passed to atexit and from a static object's destructor.

#include "host.h"

#include <thread>

static char **arguments;

// A model that is used and finished when it goes.
struct Ending {
  const char *where;
  host h;
  long long tokens;

  void begin(const char *place) {
    where = place;
    h = host_open(arguments, GETP_OFF);
    host_warm_up(&h);
    tokens = host_inference(&h);
    host_require(tokens > 0, "a transformer that was warmed up answers");
  }

  ~Ending() {
    host_require(host_inference(&h) == tokens, where);
    host_finish(&h);
    finish(nullptr, nullptr);
    host_require(getp_last_error() != nullptr, "an error is told where all ends");
    host_close(&h);
    fprintf(host_log, "ok: %s\n", where);
  }
};

static Ending of_static_object;
static thread_local Ending of_thread;
static Ending *of_atexit;

static void at_exit() { delete of_atexit; }

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  host_log = stderr;
  arguments = argv;
  // Made before any object of the library's, they are destroyed behind them.
  std::thread([] { of_thread.begin("the destructor of another thread's object"); }).join();
  of_thread.begin("the destructor of the main thread's object");
  of_static_object.begin("the destructor of a static object");
  of_atexit = new Ending;
  of_atexit->begin("a function passed to atexit");
  std::atexit(at_exit);
  finish(nullptr, nullptr);
  host_require(getp_last_error() != nullptr, "an error is told while the thread lives");
  return 0;
}
