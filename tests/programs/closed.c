/* A program that closes its stdin, stdout and stderr, some or all: a file that the library opens then has none of their
 * numbers, so nothing that is printed goes into it. And two runs that record their logits in one file: the second is
 * refused, and the first one's records stay. */

#define _GNU_SOURCE
#include "host.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *logits;

/* Whether a file of logits holds whole records, of these requests, and no more than there are positions. */
static void require_records(int requests) {
  static unsigned char bytes[1 << 24];
  unsigned word[4];
  FILE *file = fopen(logits, "rb");
  size_t count = file != NULL ? fread(bytes, 1, sizeof bytes, file) : 0, record, at;
  if (file != NULL) fclose(file);
  host_require(count > 16 && memcmp(bytes, "GETPLOG1", 8) == 0, "there are logits");
  memcpy(word, bytes, sizeof word);
  record = 16 + 4 * (size_t)word[2];
  host_require((count - 16) % record == 0, "whole records");
  for (at = 16; at < count; at += record) {
    memcpy(word, bytes + at, sizeof word);
    host_require(word[0] < (unsigned)requests && word[1] < STEPS && word[3] == 0, "a record is one");
  }
}

static void answer_with_closed(char **argv, int closed) {
  struct host h;
  for (int fd = 0; fd < 3; fd++) {
    if ((closed & 1 << fd) != 0) close(fd);
  }
  h = host_open(argv, GETP_ON);
  host_require(host_inference(&h) > 0, "inference answers");
  for (int fd = 0; fd < 3; fd++) {
    host_require((closed & 1 << fd) == 0 || fcntl(fd, F_GETFD) == -1, "no file has taken a closed one's number");
  }
  require_records(getp_requests_count(h.requests));
  host_close(&h);
}

static void record_beside_another(char **argv) {
  struct host h = host_open(argv, GETP_OFF);
  struct stat before, after;
  int other;

  host_require(host_inference(&h) > 0, "inference answers");
  other = open(logits, O_RDWR);
  host_require(other >= 0 && flock(other, LOCK_EX | LOCK_NB) == 0, "the file is free behind the call");
  host_require(fstat(other, &before) == 0, "the file's size");
  host_require(host_inference(&h) == -1, "no second run records there");
  host_require(strstr(getp_last_error(), "another run records logits there") != NULL, "and it says so");
  host_require(fstat(other, &after) == 0 && after.st_size == before.st_size, "the records stay");
  close(other);
  host_require(host_inference(&h) > 0, "then it may");
  host_close(&h);
}

int main(int argc, char **argv) {
  static char folder[] = "/tmp/getp-XXXXXX";
  static char path[64];
  int saved[3];

  if (argc != 4) return 2;
  for (int fd = 0; fd < 3; fd++) saved[fd] = fcntl(fd, F_DUPFD_CLOEXEC, 50);
  host_log = fdopen(saved[2], "w");
  setvbuf(host_log, NULL, _IONBF, 0);
  host_require(mkdtemp(folder) != NULL, "a folder");
  snprintf(path, sizeof path, "%s/logits", folder);
  logits = path;
  setenv("GETP_LOGITS", logits, 1);
  for (int closed = 1; closed < 8; closed++) {
    answer_with_closed(argv, closed);
    for (int fd = 0; fd < 3; fd++) dup2(saved[fd], fd);
  }
  record_beside_another(argv);
  unlink(logits);
  rmdir(folder);
  fprintf(host_log, "ok: closed descriptors stay closed, and a file of logits has one run at a time\n");
  return 0;
}
