/* A program that rounds upward, lets subnormal numbers count as zero, or lets each exception raise SIGFPE: the logits
 * are those of the default environment to the bit, and the program's environment is as it was. The model's logits
 * depend on all of that: those of a copy are subnormal. */

#define _GNU_SOURCE
#include "host.h"

#include <fcntl.h>
#include <fenv.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xmmintrin.h>

struct bytes {
  unsigned char *at;
  size_t count;
};

static struct bytes read_file(const char *path) {
  struct bytes all = {NULL, 0};
  struct stat status;
  FILE *file = fopen(path, "rb");
  host_require(file != NULL && fstat(fileno(file), &status) == 0, path);
  all.count = (size_t)status.st_size;
  all.at = malloc(all.count + 1);
  host_require(all.at != NULL && fread(all.at, 1, all.count, file) == all.count, path);
  fclose(file);
  return all;
}

/* A copy of the model whose unembedding, behind 15 numbers and the embedding, is so small that logits are subnormal. */
static void write_small(const char *path, const char *model) {
  struct bytes all = read_file(model);
  const int *config = (const int *)all.at;
  size_t table = (size_t)config[0] * (size_t)config[1];
  float *out = (float *)all.at + 15 + table;
  FILE *file = fopen(path, "wb");
  for (size_t i = 0; i < table; i++) out[i] = ldexpf(out[i], -128);
  host_require(file != NULL && fwrite(all.at, 1, all.count, file) == all.count && fclose(file) == 0, path);
  free(all.at);
}

static size_t record_bytes;

static int by_key(const void *a, const void *b) { return memcmp(a, b, 2 * sizeof(unsigned)); }

/* The records of a file of logits, in order of their keys: they lie in the order in which they were computed. */
static struct bytes read_records(const char *path) {
  struct bytes all = read_file(path);
  record_bytes = 16 + 4 * (size_t)((unsigned *)all.at)[2];
  host_require(all.count > 16 && (all.count - 16) % record_bytes == 0, "whole records");
  memmove(all.at, all.at + 16, all.count -= 16);
  qsort(all.at, all.count / record_bytes, record_bytes, by_key);
  return all;
}

enum mode { DEFAULT, UPWARD, FLUSH, TRAPS, MODES };
static const char *const names[] = {"default", "rounds upward", "takes subnormal numbers for zero", "traps"};

static void set(enum mode mode) {
  fesetenv(FE_DFL_ENV);
  if (mode == UPWARD) fesetround(FE_UPWARD);
  if (mode == FLUSH) _mm_setcsr(_mm_getcsr() | 0x8040);
  if (mode == TRAPS) feenableexcept(FE_ALL_EXCEPT);
}

static const char *logits;

/* Warms up, answers and finishes; `before` is the environment until inference, `within` that of inference. */
static struct bytes run(char **argv, enum mode before, enum mode within) {
  unsigned control[2];
  struct bytes records;
  struct host h;

  set(before);
  h = host_open(argv, GETP_OFF);
  host_warm_up(&h);
  set(within);
  control[0] = _mm_getcsr();
  host_require(host_inference(&h) > 0, "inference answers");
  control[1] = _mm_getcsr();
  host_require(control[0] == control[1], "the program's environment is as it was, and so are its flags");
  host_finish(&h);
  host_close(&h);
  set(DEFAULT);
  records = read_records(logits);
  unlink(logits);
  return records;
}

static void compare(char **argv, const char *precision, const char *model) {
  char what[128];
  struct bytes expected;

  setenv("GETP_PRECISION", precision, 1);
  argv[1] = (char *)model;
  expected = run(argv, DEFAULT, DEFAULT);
  for (int mode = UPWARD; mode < MODES; mode++) {
    for (int all = 0; all < 2; all++) {
      struct bytes records = run(argv, all ? (enum mode)mode : DEFAULT, (enum mode)mode);
      snprintf(what, sizeof what, "%s, the program %s", precision, names[mode]);
      host_require(records.count == expected.count && memcmp(records.at, expected.at, records.count) == 0, what);
      free(records.at);
    }
  }
  free(expected.at);
}

int main(int argc, char **argv) {
  static char folder[] = "/tmp/getp-XXXXXX";
  char small[64], records[64];
  char *model;

  if (argc != 4) return 2;
  host_log = stderr;
  model = argv[1];
  host_require(mkdtemp(folder) != NULL, "a folder");
  snprintf(small, sizeof small, "%s/small.bin", folder);
  snprintf(records, sizeof records, "%s/logits", folder);
  logits = records;
  setenv("GETP_LOGITS", logits, 1);
  write_small(small, model);
  compare(argv, "exact", model);
  compare(argv, "exact", small);
  compare(argv, "fast", model);
  compare(argv, "fast", small);
  unlink(small);
  rmdir(folder);
  fprintf(host_log, "ok: the program's rounding, subnormal numbers and traps change no logit\n");
  return 0;
}
