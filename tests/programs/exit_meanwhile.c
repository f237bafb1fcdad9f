/* The program exits while another thread answers requests. That thread goes on until the process ends, which here is
 * not before it has its answers: a function passed to atexit waits for them, and asks for others. It is called behind
 * the destructors of all that was loaded later. */

#include "host.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

static struct host expected, h;
static long long n_expected;
static pthread_t thread;
static atomic_int is_ending;
static int has_thread;

static void *answer(void *nothing) {
  /* Some calls before the exit begins, and one that begins behind it. */
  int behind;
  do {
    behind = is_ending;
    host_require(host_inference(&h) == n_expected && host_same_answers(&h, &expected), "the answers of any other time");
  } while (!behind);
  return nothing;
}

static void wait_for_answers(void) {
  if (!has_thread) return;
  is_ending = 1;
  pthread_join(thread, NULL);
  host_require(host_inference(&h) == n_expected && host_same_answers(&h, &expected), "answers behind all destructors");
  fprintf(host_log, "ok: answers while the program exits\n");
}

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  host_log = stderr;
  host_require(atexit(wait_for_answers) == 0, "atexit");
  alarm(120); /* whoever hangs is killed */
  expected = host_open(argv, GETP_OFF);
  n_expected = host_inference(&expected);
  host_require(n_expected > 0, "inference answers");
  h = host_open(argv, GETP_OFF);
  host_warm_up(&h);
  host_require(pthread_create(&thread, NULL, answer, NULL) == 0, "a thread");
  has_thread = 1;
  exit(0);
}
