/* A process forked from one that has a warm transformer: it is told so and does not hang, it can finish the transformer
 * and warm it up itself, and what it opens itself works. Also if another thread was in the middle of a call, if the
 * process was made without the C library, and if the kernel is too old to empty pages in new processes. */

#define _GNU_SOURCE
#include "host.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static struct host expected;
static long long n_expected;
static int kernel_is_old;

/* The library's calls come here, too. */
int madvise(void *start, size_t size, int advice) {
  if (kernel_is_old && advice == MADV_WIPEONFORK) {
    errno = EINVAL;
    return -1;
  }
  return (int)syscall(SYS_madvise, start, size, advice);
}

/* Forks without the C library, and so without what it was asked to call then. */
static pid_t clone_alone(unsigned long flags) {
  return (pid_t)syscall(SYS_clone, flags | SIGCHLD, NULL, NULL, NULL, NULL);
}

static void require_error(const char *word, const char *what) {
  const char *error = getp_last_error();
  host_require(error != NULL && strstr(error, word) != NULL, what);
}

/* What the new process does with a transformer that its parent has warmed up. */
static void in_child(struct host *h, char **argv, const TransformerWeights *original) {
  Transformer *transformer = getp_model_transformer(h->model);
  struct host own;
  getp_stats_t stats;

  host_require(host_inference(h) == -1, "inference on the parent's transformer fails");
  require_error("before fork", "inference says that the transformer is the parent's");
  host_warm_up(h);
  require_error("before fork", "warm_up says so too");
  host_require(getp_stats(transformer, &stats) == GETP_BAD_STATE, "and getp_stats");
  host_finish(h);
  host_require(getp_last_error() == NULL, "finish does not fail");
  host_require(memcmp(&transformer->weights, original, sizeof *original) == 0, "finish puts the struct back");
  host_finish(h);
  host_require(getp_last_error() == NULL, "finish twice is once");
  host_warm_up(h);
  host_require(getp_last_error() == NULL, "it can be warmed up here");
  host_require(host_inference(h) == n_expected && host_same_answers(h, &expected), "and answers as ever");
  own = host_open(argv, GETP_OFF);
  host_require(host_inference(&own) == n_expected && host_same_answers(&own, &expected), "so does another one");
  host_close(&own);
  host_close(h);
  _exit(0);
}

static void require_good_end(pid_t child, const char *what) {
  int status = -1, patience = 1200;
  pid_t ended = 0;
  host_require(child > 0, "fork");
  /* alarm does not kill the first process of a PID namespace. */
  while ((ended = waitpid(child, &status, WNOHANG)) == 0 && patience-- > 0) usleep(100000);
  if (ended == 0) kill(child, SIGKILL), waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) fprintf(host_log, "killed by signal %d\n", WTERMSIG(status));
  host_require(status == 0, what);
  fprintf(host_log, "ok: %s\n", what);
}

static void *answer(void *h) {
  host_require(host_inference((struct host *)h) == n_expected, "the parent's call goes on");
  return NULL;
}

static void *read_all(void *end) {
  char bytes[4096];
  while (read(*(int *)end, bytes, sizeof bytes) > 0) {
  }
  return NULL;
}

/* Forks while another thread is within inference: it cannot end, as nobody reads what it prints, and the pipe has room
 * for the first answers and no more. */
static void fork_beside_a_call(char **argv, const TransformerWeights *original) {
  struct host printing = host_open(argv, GETP_ON);
  pthread_t thread, reader;
  pid_t child;
  int ends[2];
  static char filling[3700];
  int in_pipe = 0;

  host_require(pipe(ends) == 0 && fcntl(ends[1], F_SETPIPE_SZ, 4096) >= 4096, "a small pipe");
  host_require(dup2(ends[1], STDOUT_FILENO) == STDOUT_FILENO && close(ends[1]) == 0, "as stdout");
  host_require(write(STDOUT_FILENO, filling, sizeof filling) == (ssize_t)sizeof filling, "nearly full");
  host_warm_up(&printing);
  host_require(getp_last_error() == NULL, "warm_up");
  host_require(pthread_create(&thread, NULL, answer, &printing) == 0, "a thread");
  do {
    host_require(ioctl(ends[0], FIONREAD, &in_pipe) == 0, "the number of bytes in the pipe");
  } while (in_pipe <= (int)sizeof filling);
  child = fork();
  if (child == 0) {
    int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, STDOUT_FILENO);
    in_child(&printing, argv, original);
  }
  require_good_end(child, "a process forked while another thread answers");
  /* The last writing end goes with stdout, once the thread is done: it is read to its end here. */
  host_require(pthread_create(&reader, NULL, read_all, &ends[0]) == 0, "a thread that reads");
  pthread_join(thread, NULL);
  close(STDOUT_FILENO);
  pthread_join(reader, NULL);
  host_require(host_same_answers(&printing, &expected), "the parent's answers are whole");
  host_close(&printing);
}

/* A process with the number of its parent, as the first of a PID namespace of its own. Not every system lets a program
 * make namespaces: then a line says that this is not tried. */
static void fork_with_the_parents_number(char **argv) {
  pid_t first = 0, second;
  host_require(fflush(NULL) == 0, "nothing is written twice");
  if (unshare(CLONE_NEWPID) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) {
    fprintf(host_log, "ok: not tried without the right to make a PID namespace: a child with its parent's number\n");
    return;
  }
  first = fork();
  if (first == 0) {
    struct host h = host_open(argv, GETP_OFF);
    TransformerWeights original = getp_model_transformer(h.model)->weights;
    host_warm_up(&h);
    host_require(getpid() == 1, "it is the first of its PID namespace");
    if (!kernel_is_old) {
      second = clone_alone(CLONE_NEWPID);
      if (second == 0) {
        host_require(getpid() == 1, "the child has its parent's number");
        in_child(&h, argv, &original);
      }
      require_good_end(second, "a process cloned with its parent's number");
    }
    host_require(unshare(CLONE_NEWPID) == 0, "a second PID namespace");
    second = fork();
    if (second == 0) {
      host_require(getpid() == 1, "the child has its parent's number");
      in_child(&h, argv, &original);
    }
    require_good_end(second, "a process forked with its parent's number");
    host_finish(&h);
    host_close(&h);
    _exit(0);
  }
  require_good_end(first, "a process that has forked one with its own number");
}

/* Calls it in a process of its own, since a process that has made a PID namespace can start no threads. */
static void fork_with_the_parents_number_aside(char **argv) {
  pid_t child = fork();
  if (child == 0) {
    fork_with_the_parents_number(argv);
    _exit(0);
  }
  require_good_end(child, "processes of one number");
}

/* Tries what works on every kernel. */
static void fork_and_clone(char **argv, const TransformerWeights *original) {
  struct host h = host_open(argv, GETP_OFF);
  pid_t child;

  host_warm_up(&h);
  child = fork();
  if (child == 0) in_child(&h, argv, original);
  require_good_end(child, "a process forked with a warm transformer");
  child = clone_alone(0);
  if (child == 0) in_child(&h, argv, original);
  require_good_end(child, "a process cloned with a warm transformer");
  host_require(host_inference(&h) == n_expected && host_same_answers(&h, &expected), "the parent's works on");
  host_close(&h);
}

/* Opens the model whose answers the others must have. */
static TransformerWeights open_expected(char **argv) {
  expected = host_open(argv, GETP_OFF);
  TransformerWeights original = getp_model_transformer(expected.model)->weights;
  n_expected = host_inference(&expected);
  host_require(n_expected > 0, "inference answers");
  return original;
}

/* In a process of its own, as the library asks the kernel once. */
static void fork_and_clone_on_an_old_kernel(char **argv) {
  pid_t child = fork();
  if (child == 0) {
    kernel_is_old = 1;
    TransformerWeights original = open_expected(argv);
    fork_and_clone(argv, &original);
    fork_with_the_parents_number_aside(argv);
    _exit(0);
  }
  require_good_end(child, "processes on a kernel that empties no pages");
}

int main(int argc, char **argv) {
  TransformerWeights original;

  if (argc != 4) return 2;
  host_log = stderr;
  fork_and_clone_on_an_old_kernel(argv);
  original = open_expected(argv);
  fork_and_clone(argv, &original);
  fork_beside_a_call(argv, &original);
  fork_with_the_parents_number_aside(argv);
  host_close(&expected);
  return 0;
}
