/* All calls on a thread whose stack is as small as docs/host.md says that it may be, and how much of it each call
 * uses. */

#define _GNU_SOURCE
#include "host.h"

#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

/* That document's number. */
#define STACK_BYTES ((size_t)128 << 10)
/* What calls may use of it, so that as much is left to the host and to what a GPU's runtime does. */
#define MOST_BYTES (STACK_BYTES / 2)
/* What a word of the stack holds that nobody has written to. */
#define UNTOUCHED UINT64_C(0x5aa5f00d5aa5f00d)

static char** arguments;
static uint64_t *stack;
static struct host h;

/* The bytes between the deepest word written and the top of the stack. */
static size_t used(void) {
  size_t word = 0;
  while (stack[word] == UNTOUCHED) word++;
  return STACK_BYTES - word * sizeof *stack;
}

static void open_all(void) { h = host_open(arguments, GETP_ON); }
static void warm(void) {
  host_warm_up(&h);
  host_require(getp_last_error() == NULL, "warm_up");
}
static void infer(void) { host_require(host_inference(&h) > 0, "inference answers"); }
static void end(void) { host_finish(&h); }
static void close_all(void) { host_close(&h); }
static void fail_to_open(void) {
  host_require(getp_model_open("/does/not/exist", NULL) == NULL, "a model that is not there");
}

static void *call(void *function) {
  ((void (*)(void))(uintptr_t)function)();
  return NULL;
}

/* Calls `function` on a new thread, with a page below its stack that nobody may touch. */
static void on_small_stack(const char *name, void (*function)(void)) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  char *memory = mmap(NULL, page + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  pthread_attr_t attributes;
  pthread_t thread;

  host_require(memory != MAP_FAILED && mprotect(memory, page, PROT_NONE) == 0, "memory for a stack");
  stack = (uint64_t*)(void*)(memory + page);
  for (size_t word = 0; word < STACK_BYTES / sizeof *stack; word++) stack[word] = UNTOUCHED;
  host_require(pthread_attr_init(&attributes) == 0 && pthread_attr_setstack(&attributes, stack, STACK_BYTES) == 0,
               "a stack");
  host_require(
      pthread_create(&thread, &attributes, call, (void*)(uintptr_t)function) == 0 && pthread_join(thread, NULL) == 0,
      "a thread");
  fprintf(host_log, "ok: %s uses %zu KiB of a stack of %zu\n", name, (used() + 1023) >> 10, STACK_BYTES >> 10);
  host_require(used() <= MOST_BYTES, "half of the stack is left");
  pthread_attr_destroy(&attributes);
  munmap(memory, page + STACK_BYTES);
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  arguments = argv;
  host_log = fdopen(dup(STDERR_FILENO), "w");
  on_small_stack("opening", open_all);
  on_small_stack("warm_up", warm);
  on_small_stack("inference", infer);
  on_small_stack("finish", end);
  on_small_stack("inference without warm_up", infer);
  on_small_stack("closing a warm model", close_all);
  on_small_stack("a failure", fail_to_open);
  return 0;
}
