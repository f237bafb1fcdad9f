/* A program compiled with the header of before getp_options had `device`, whose declarations are here as they were. */

#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef struct getp_model getp_model;

typedef struct {
  size_t size;
  int precision;
  int threads;
  int max_batch;
  int step_tokens;
  int kv_mb;
  int print;
  int progress;
  int profile;
  const char *logits;
} getp_options;

void getp_options_init(getp_options *options);
getp_model *getp_model_open(const char *path, const getp_options *options);
void getp_model_close(getp_model *model);
const char *getp_last_error(void);

int main(int argc, char **argv) {
  struct {
    getp_options options;
    char behind[64];
  } mine;
  char untouched[sizeof mine.behind];
  getp_model *model;

  if (argc != 4) return 2;
  memset(&mine, 0xa5, sizeof mine);
  memset(untouched, 0xa5, sizeof untouched);
  getp_options_init(&mine.options);
  if (memcmp(mine.behind, untouched, sizeof untouched) != 0 || mine.options.threads != 0 ||
      mine.options.logits != NULL) {
    fputs("FAILED: getp_options_init sets the program's struct and no more\n", stderr);
    return 1;
  }
  mine.options.threads = -1;
  model = getp_model_open(argv[1], &mine.options);
  if (model != NULL || strstr(getp_last_error(), "getp_options.threads=-1") == NULL) {
    fputs("FAILED: the struct's fields are read\n", stderr);
    return 1;
  }
  mine.options.threads = 1;
  model = getp_model_open(argv[1], &mine.options);
  if (model == NULL) {
    fprintf(stderr, "FAILED: a model opens: %s\n", getp_last_error());
    return 1;
  }
  getp_model_close(model);
  fputs("ok: options of an older header\n", stderr);
  return 0;
}
