/* A program elsewhere, compiled with an installed header: in C90, so that every standard takes it. */

#include <getp.h>
#include <stdio.h>
#include <string.h>

#if GETP_VERSION_MAJOR < 0 || GETP_VERSION_MINOR < 0 || GETP_VERSION_PATCH < 0
#error "the header has a version"
#endif

int main(void) {
  getp_options options;
  char numbers[64];
  uint64_t state = GETP_STATE_OF_SEED_0;

  sprintf(numbers, "%d.%d.%d", GETP_VERSION_MAJOR, GETP_VERSION_MINOR, GETP_VERSION_PATCH);
  if (strcmp(numbers, GETP_VERSION) != 0 || strcmp(getp_version(), GETP_VERSION) != 0 || state == 0) {
    fprintf(stderr, "FAILED: header %s (%s), library %s\n", GETP_VERSION, numbers, getp_version());
    return 1;
  }
  getp_options_init(&options);
  options.precision = GETP_EXACT;
  if (getp_model_open("/does/not/exist.bin", &options) != NULL || getp_last_error() == NULL ||
      strstr(getp_last_error(), "/does/not/exist.bin") == NULL) {
    fputs("FAILED: a file that is not there is named\n", stderr);
    return 1;
  }
  printf("getp %s: %s\n", getp_version(), getp_features());
  return 0;
}
