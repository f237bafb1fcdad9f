/* The reader of stdout or stderr is gone: the program lives, with all its answers, and its signals are as it left
 * them. */

#define _GNU_SOURCE
#include "host.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

/* Puts the writing end of a pipe that nobody reads in the place of `fd`. */
static void break_pipe(int fd) {
  int ends[2];
  host_require(pipe(ends) == 0 && dup2(ends[1], fd) == fd, "a pipe");
  close(ends[0]);
  close(ends[1]);
}

static int is_pending(void) {
  sigset_t pending;
  sigpending(&pending);
  return sigismember(&pending, SIGPIPE);
}

static int is_blocked(void) {
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, NULL, &blocked);
  return sigismember(&blocked, SIGPIPE);
}

static void answers_are_whole(char **argv, const struct host *expected, const char *what) {
  struct host h = host_open(argv, GETP_ON);
  struct sigaction action;
  const int blocked = is_blocked(), pending = is_pending();

  host_warm_up(&h); /* prints lines on stderr */
  host_require(getp_last_error() == NULL, "warm_up");
  host_require(host_inference(&h) > 0 && host_same_answers(&h, expected), what);
  host_finish(&h);
  host_require(getp_model_open("/does/not/exist", NULL) == NULL, "a failure, which has a line");
  host_close(&h);
  host_require(is_blocked() == blocked && is_pending() == pending, "the signal is as it was");
  host_require(sigaction(SIGPIPE, NULL, &action) == 0 && action.sa_handler == SIG_DFL, "and what it does");
  fprintf(host_log, "ok: %s\n", what);
}

int main(int argc, char **argv) {
  const struct timespec now = {0, 0};
  struct host expected;
  sigset_t sigpipe;

  if (argc != 4) return 2;
  host_log = fdopen(dup(STDERR_FILENO), "w");
  signal(SIGPIPE, SIG_DFL); /* whoever started us may ignore it */
  sigemptyset(&sigpipe);
  sigaddset(&sigpipe, SIGPIPE);
  pthread_sigmask(SIG_UNBLOCK, &sigpipe, NULL);
  expected = host_open(argv, GETP_OFF);
  host_require(host_inference(&expected) > 0, "inference answers");

  break_pipe(STDOUT_FILENO);
  answers_are_whole(argv, &expected, "nobody reads stdout");
  break_pipe(STDERR_FILENO);
  answers_are_whole(argv, &expected, "nobody reads stderr either");

  /* One that the program has blocked and that is pending is not ours to take. */
  pthread_sigmask(SIG_BLOCK, &sigpipe, NULL);
  answers_are_whole(argv, &expected, "the signal is blocked");
  raise(SIGPIPE);
  answers_are_whole(argv, &expected, "the signal is pending");
  host_require(sigtimedwait(&sigpipe, NULL, &now) == SIGPIPE, "the program's own signal comes");
  host_close(&expected);
  return 0;
}
