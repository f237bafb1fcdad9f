/* How a process with an open batch ends, and how it forks: it exits while requests run, while events are waited for and
 * handed over, and from within on_event; a process forked from it is refused the batch and can open its own, and the
 * parent goes on. */

#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "host.h"

enum { REQUESTS = 200, TOKENS = 60 };

static char **arguments;
static int expected[TOKENS];
static struct host h;
static getp_batch *batch;
static atomic_int events;

static void submit_to(getp_batch *to) {
  static const int prompt[] = {1, 2, 3, 4, 5};
  getp_request r;
  getp_request_init(&r);
  r.prompt = prompt;
  r.prompt_length = 5;
  r.max_tokens = TOKENS;
  r.temperature = 1.0f;
  r.tokens_per_event = 1;
  host_require(getp_batch_submit(to, &r, NULL) == GETP_OK, "a request is queued");
}

static getp_batch *open_on(getp_model *model, void (*on_event)(void *, const getp_event *)) {
  getp_batch_options options;
  getp_batch *opened;
  getp_batch_options_init(&options);
  options.on_event = on_event;
  opened = getp_batch_open(model, &options);
  host_require(opened != NULL, "a batch opens");
  return opened;
}

static void open_busy(void (*on_event)(void *, const getp_event *)) {
  h = host_open(arguments, GETP_OFF);
  batch = open_on(h.model, on_event);
  for (int i = 0; i < REQUESTS; i++) submit_to(batch);
}

/* Takes the events of one request after another and holds them against what it is answered with alone. */
static size_t take_all(getp_batch *from) {
  static size_t tokens[REQUESTS];
  size_t ended = 0;
  memset(tokens, 0, sizeof tokens);
  while (getp_batch_unfinished(from) > 0) {
    const getp_event *e = NULL;
    host_require(getp_batch_next(from, -1.0, &e) == GETP_OK, "an event comes");
    host_require(tokens[e->id] + e->count == e->answer_tokens, "no token is missing");
    host_require(memcmp(e->tokens, &expected[tokens[e->id]], e->count * sizeof(int)) == 0, "the tokens are as alone");
    tokens[e->id] = e->answer_tokens;
    ended += e->end != GETP_END_NONE;
    getp_event_free(e);
  }
  return ended;
}

static void answer_alone(void) {
  size_t count = 0;
  h = host_open(arguments, GETP_OFF);
  batch = open_on(h.model, NULL);
  submit_to(batch);
  while (getp_batch_unfinished(batch) > 0) {
    const getp_event *e = NULL;
    host_require(getp_batch_next(batch, -1.0, &e) == GETP_OK && count + e->count <= TOKENS, "an event comes");
    memcpy(&expected[count], e->tokens, e->count * sizeof(int));
    count += e->count;
    getp_event_free(e);
  }
  host_require(count == TOKENS, "the answer is whole");
  getp_batch_close(batch);
  host_close(&h);
}

static void require_good_end(pid_t child, const char *what) {
  int status = -1, patience = 1200;
  pid_t ended = 0;
  host_require(child > 0, "fork");
  while ((ended = waitpid(child, &status, WNOHANG)) == 0 && patience-- > 0) usleep(50000);
  if (ended == 0) kill(child, SIGKILL), waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) fprintf(host_log, "killed by signal %d\n", WTERMSIG(status));
  host_require(status == 0, what);
  fprintf(host_log, "ok: %s\n", what);
}

/* Ways to exit. */

static void count_event(void *context, const getp_event *e) {
  (void)context;
  (void)e;
  events++;
}

static void exit_at_once(void *context, const getp_event *e) {
  count_event(context, e);
  exit(0);
}

static void *take_for_ever(void *nothing) {
  for (;;) {
    const getp_event *e;
    if (getp_batch_next(batch, -1.0, &e) == GETP_OK) count_event(NULL, e);
    getp_event_free(e);
  }
  return nothing;
}

static void finish_at_exit(void) {
  host_require(take_all(batch) == REQUESTS, "every request is answered behind main");
  getp_batch_close(batch);
  getp_model_close(h.model);
}

static void exit_busy(void) {
  open_busy(NULL);
  exit(0);
}

static void exit_beside_a_waiting_thread(void) {
  pthread_t thread;
  open_busy(NULL);
  host_require(pthread_create(&thread, NULL, take_for_ever, NULL) == 0, "a thread");
  while (events < 20) usleep(100);
  exit(0);
}

static void exit_beside_on_event(void) {
  open_busy(count_event);
  while (events < 20) usleep(100);
  exit(0);
}

static void exit_in_on_event(void) {
  open_busy(exit_at_once);
  for (;;) pause();
}

static void answer_at_exit(void) {
  host_require(atexit(finish_at_exit) == 0, "atexit");
  open_busy(NULL);
  exit(0);
}

static void exit_with_what_is_left(void) {
  const getp_event *e;
  open_busy(NULL);
  host_require(getp_batch_next(batch, -1.0, &e) == GETP_OK, "an event, which nobody frees");
  getp_model_close(h.model);
  exit(0);
}

/* Ways to fork. */

static void is_refused(getp_status status, const char *what) {
  host_require(status == GETP_BAD_STATE && getp_last_status() == GETP_BAD_STATE, what);
}

/* What a forked process does with its parent's batch. `kept` is an event of the parent's. */
static void in_child(const getp_event *kept, int is_in_on_event) {
  const getp_event *e;
  getp_request r;
  const int prompt[] = {1};
  getp_stats_t stats;
  struct host own;
  getp_batch *owns;

  getp_request_init(&r);
  r.prompt = prompt;
  r.prompt_length = 1;
  is_refused(getp_batch_submit(batch, &r, NULL), "the parent's batch takes no request");
  is_refused(getp_batch_next(batch, -1.0, &e), "and gives no event");
  is_refused(getp_batch_cancel(batch, 0), "and cancels none");
  is_refused(getp_batch_cancel_all(batch), "nor all");
  host_require(getp_batch_unfinished(batch) == 0 && getp_last_status() == GETP_BAD_STATE, "and counts none");
  is_refused(getp_stats(getp_model_transformer(h.model), &stats), "nor has the model statistics");
  host_require(getp_batch_open(h.model, NULL) == NULL && getp_last_status() == GETP_BAD_STATE, "nor opens another one");
  getp_event_free(kept);
  getp_batch_close(batch);
  if (!is_in_on_event) {
    own = host_open(arguments, GETP_OFF);
    owns = open_on(own.model, NULL);
    for (int i = 0; i < 3; i++) submit_to(owns);
    host_require(take_all(owns) == 3, "a model of the child's own answers");
    getp_batch_close(owns);
    host_close(&own);
    host_finish(&h);
    owns = open_on(h.model, NULL);
    submit_to(owns);
    host_require(take_all(owns) == 1, "the parent's model can be warmed up here");
    getp_model_close(h.model);
    getp_batch_close(owns);
  }
  _exit(0);
}

static void fork_busy(void) {
  const getp_event *e = NULL;
  pid_t child;
  open_busy(NULL);
  host_require(getp_batch_next(batch, -1.0, &e) == GETP_OK, "an event");
  child = fork();
  if (child == 0) in_child(e, 0);
  require_good_end(child, "a process forked with an open batch");
  host_require(e->id == 0 && memcmp(e->tokens, expected, e->count * sizeof(int)) == 0, "the event is the parent's");
  getp_event_free(e);
  while (getp_batch_unfinished(batch) > 0) {
    host_require(getp_batch_next(batch, -1.0, &e) == GETP_OK, "the parent's events come");
    getp_event_free(e);
  }
  for (int i = 0; i < 3; i++) submit_to(batch);
  for (int ended = 0; ended < 3; ended += e->end == GETP_END_LENGTH, getp_event_free(e)) {
    host_require(getp_batch_next(batch, -1.0, &e) == GETP_OK, "and others");
  }
  getp_batch_close(batch);
  host_close(&h);
}

static atomic_int child_of_on_event;

static void fork_once(void *context, const getp_event *e) {
  pid_t child;
  count_event(context, e);
  if (child_of_on_event != 0) return;
  child = fork();
  if (child == 0) in_child(NULL, 1);
  child_of_on_event = child;
}

static void fork_in_on_event(void) {
  open_busy(fork_once);
  while (getp_batch_unfinished(batch) > 0) usleep(1000);
  require_good_end(child_of_on_event, "a process forked in on_event");
  getp_batch_close(batch);
  host_close(&h);
}

int main(int argc, char **argv) {
  static const struct {
    void (*exits)(void);
    const char *name;
  } ways[] = {
      {exit_busy, "exit while requests run"},
      {exit_beside_a_waiting_thread, "exit while a thread waits for events"},
      {exit_beside_on_event, "exit beside on_event"},
      {exit_in_on_event, "exit in on_event"},
      {answer_at_exit, "answers while the process exits"},
      {exit_with_what_is_left, "exit with a batch and an event that are left"},
  };

  if (argc != 4) return 2;
  host_log = stderr;
  arguments = argv;
  alarm(120); /* whoever hangs is killed */
  answer_alone();
  for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
    const pid_t child = fork();
    if (child == 0) ways[way].exits();
    require_good_end(child, ways[way].name);
  }
  fork_busy();
  fork_in_on_event();
  return 0;
}
