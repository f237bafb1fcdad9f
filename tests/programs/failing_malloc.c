/* A malloc that fails, for LD_PRELOAD. Requests above 4 KiB are counted from
 * the first call of warm_up or getp_batch_open on, from the program's start if
 * FAIL_EARLY is set, from the first getp_batch_submit on if FAIL_LATE is set,
 * or, if FAIL_RANK is set, in the first call of inference, only in the rank of
 * that number and where libgetp makes them; the one numbered FAIL_AT fails,
 * and with FAIL_ON all behind it too. When it does, a byte goes to file
 * descriptor 3, unless FAIL_RANK is set. If FAIL_SMALL is set, the request of
 * that number fails, of those of at most 4 KiB that libgetp makes from then on,
 * and the C library from the start for a thread's objects, and a byte goes
 * there, too; the program has so many keys that the next one's value needs
 * memory. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SMALL = 4096, KEYS = 32 /* whose values need no memory in glibc */ };

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

static atomic_long fail_at, seen, fail_small, small_seen;
static atomic_int fail_on, armed;
static const char *fail_rank;

__attribute__((constructor)) static void read_environment(void) {
  const char *at = getenv("FAIL_AT"), *small = getenv("FAIL_SMALL");

  fail_on = getenv("FAIL_ON") != NULL;
  fail_at = at != NULL ? atol(at) : 0;
  fail_small = small != NULL ? atol(small) : 0;
  armed = getenv("FAIL_EARLY") != NULL;
  fail_rank = getenv("FAIL_RANK");
  for (int key = 0; small != NULL && key < KEYS; key++) {
    pthread_key_t taken;
    if (pthread_key_create(&taken, NULL) != 0) abort();
  }
}

/* Whether an address is the library's, and not MPI's, which may end the program. */
static int is_ours(const void *address) {
  Dl_info info;

  return dladdr(address, &info) != 0 && strstr(info.dli_fname, "libgetp") != NULL;
}

/* Whether an address is in what the C library has for destructors of a thread's objects and for its keys' values. */
static int is_for_objects(const void *address) {
  Dl_info info;

  if (dladdr(address, &info) == 0 || info.dli_sname == NULL) return 0;
  return strstr(info.dli_sname, "cxa_thread_atexit") != NULL || strstr(info.dli_sname, "setspecific") != NULL;
}

/* Whether this small request, made at that address, is to fail. */
static int small_fails(const void *caller) {
  if (fail_small == 0 || !((armed && is_ours(caller)) || is_for_objects(caller))) return 0;
  if (++small_seen != fail_small) return 0;
  if (write(3, "x", 1) < 0) abort();
  errno = ENOMEM;
  return 1;
}

/* The same of any request. */
static int fails(size_t size, const void *caller) {
  if (size <= SMALL) return small_fails(caller);
  if (!armed || fail_at == 0) return 0;
  if (fail_rank != NULL && !is_ours(caller)) return 0;
  const long number = ++seen;
  if (number != fail_at && !(fail_on && number > fail_at)) return 0;
  if (number == fail_at && fail_rank == NULL && write(3, "x", 1) < 0) abort();
  errno = ENOMEM;
  return 1;
}

#define FAILS(size) fails(size, __builtin_return_address(0))

void *malloc(size_t size) { return FAILS(size) ? NULL : __libc_malloc(size); }

void *calloc(size_t count, size_t size) {
  size_t bytes;

  if (__builtin_mul_overflow(count, size, &bytes)) return NULL;
  return FAILS(bytes) ? NULL : __libc_calloc(count, size);
}

void *realloc(void *old, size_t size) { return FAILS(size) ? NULL : __libc_realloc(old, size); }

void *memalign(size_t alignment, size_t size) { return FAILS(size) ? NULL : __libc_memalign(alignment, size); }

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **out, size_t alignment, size_t size) {
  void *memory = memalign(alignment, size);

  if (memory == NULL) return ENOMEM;
  *out = memory;
  return 0;
}

void *mmap(void *at, size_t size, int protection, int flags, int file, off_t offset) {
  static void *(*next)(void *, size_t, int, int, int, off_t);

  if (next == NULL) *(void **)&next = dlsym(RTLD_NEXT, "mmap");
  return FAILS(size) ? MAP_FAILED : next(at, size, protection, flags, file, offset);
}

void *mmap64(void *at, size_t size, int protection, int flags, int file, off_t offset) {
  return mmap(at, size, protection, flags, file, offset);
}

void warm_up(void *transformer, void *tokenizer) {
  void (*next)(void *, void *);

  if (fail_rank == NULL) armed = 1;
  *(void **)&next = dlsym(RTLD_NEXT, "warm_up");
  next(transformer, tokenizer);
}

void *getp_batch_open(void *model, const void *options) {
  void *(*next)(void *, const void *);

  if (fail_rank == NULL && getenv("FAIL_LATE") == NULL) armed = 1;
  *(void **)&next = dlsym(RTLD_NEXT, "getp_batch_open");
  return next(model, options);
}

int getp_batch_submit(void *batch, const void *request, void *id) {
  int (*next)(void *, const void *, void *);

  if (fail_rank == NULL) armed = 1;
  *(void **)&next = dlsym(RTLD_NEXT, "getp_batch_submit");
  return next(batch, request, id);
}

long long inference(void *transformer, void *tokenizer, void *sampler, void *requests) {
  long long (*next)(void *, void *, void *, void *);
  const char *open_mpi = getenv("OMPI_COMM_WORLD_RANK"), *mpich = getenv("PMI_RANK");
  const char *rank = open_mpi != NULL ? open_mpi : mpich;

  if (fail_rank != NULL && rank != NULL && strcmp(rank, fail_rank) == 0) armed = 1;
  *(void **)&next = dlsym(RTLD_NEXT, "inference");
  const long long tokens = next(transformer, tokenizer, sampler, requests);
  if (fail_rank != NULL) armed = fail_at = 0;
  return tokens;
}
