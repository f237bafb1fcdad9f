/* What hosts do to a batch: many threads submit, cancel and wait at once, nobody reads, it is closed in the middle,
 * from within on_event, or with its model, it is opened again and again, and every field has a value that nobody can
 * mean. */

#define _GNU_SOURCE
#include <dirent.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

#include "host.h"

enum { KINDS = 24, MOST_TOKENS = 40, SUBMITTERS = 4, WAITERS = 3, OF_EACH = 150, MOST_CHAINS = 128 };

/* How often a batch is opened, and how many requests each of many threads submits; less under a slow tool. */
static int rounds = 1000, of_each = OF_EACH;

/* A request of each kind, and what it is answered with when nothing runs beside it. */
static int prompts[KINDS][16];
static getp_request kinds[KINDS];
static int expected[KINDS][MOST_TOKENS];
static size_t expected_count[KINDS];

static void make_kinds(void) {
  for (int kind = 0; kind < KINDS; kind++) {
    getp_request *r = &kinds[kind];
    for (int i = 0; i < 16; i++) prompts[kind][i] = (kind * 37 + i * 11 + 5) % 512;
    host_require(getp_request_init(r) == GETP_OK, "a request is initialized");
    r->prompt = prompts[kind];
    r->prompt_length = 1 + (size_t)kind % 16;
    r->max_tokens = 1 + (size_t)(kind * 7) % MOST_TOKENS;
    r->temperature = kind % 3 == 0 ? 0.0f : 0.5f * (float)(kind % 3);
    r->topp = kind % 2 == 0 ? 0.9f : 0.0f;
    r->seed = (uint64_t)kind;
    r->tokens_per_event = kind % 4;
    r->tag = (uint64_t)kind;
  }
}

static getp_batch *open_batch(getp_model *model, void (*on_event)(void *, const getp_event *), void *context) {
  getp_batch_options options;
  getp_batch *batch;
  host_require(getp_batch_options_init(&options) == GETP_OK, "the options are initialized");
  options.on_event = on_event;
  options.context = context;
  batch = getp_batch_open(model, &options);
  host_require(batch != NULL, "a batch opens");
  return batch;
}

static uint64_t submit(getp_batch *batch, int kind) {
  uint64_t id = UINT64_MAX;
  host_require(getp_batch_submit(batch, &kinds[kind], &id) == GETP_OK && id != UINT64_MAX, "a request is queued");
  return id;
}

/* What has been told of each request; events of one request may come to several threads. */
struct seen {
  pthread_mutex_t lock;
  size_t tokens[SUBMITTERS * OF_EACH];
  int ends[SUBMITTERS * OF_EACH];
  int kind[SUBMITTERS * OF_EACH];
  size_t ended, cancelled;
};

/* Holds one event against what the request is answered with alone. */
static void check_event(struct seen *seen, const getp_event *e) {
  const int kind = (int)e->tag;
  pthread_mutex_lock(&seen->lock);
  host_require(e->id < SUBMITTERS * OF_EACH && e->tag < KINDS, "the event is of a request");
  host_require(seen->ends[e->id] == 0, "nothing comes behind the last event");
  host_require(e->answer_tokens <= expected_count[kind] && e->count <= e->answer_tokens, "not too many tokens");
  /* Two events of one request may be taken by two threads, which come here in any order. */
  host_require(memcmp(e->tokens, &expected[kind][e->answer_tokens - e->count], e->count * sizeof(int)) == 0,
               "the tokens are those of the request alone");
  seen->tokens[e->id] += e->count;
  host_require(e->end != GETP_END_NONE || (int)e->count >= kinds[kind].tokens_per_event,
               "as many tokens as were asked for");
  host_require(e->status == GETP_OK && e->why == NULL && e->submitted >= 0, "nothing has failed");
  host_require(e->prompt_tokens == kinds[kind].prompt_length, "the prompt's tokens are counted");
  if (e->end != GETP_END_NONE) {
    seen->ends[e->id] = e->end;
    seen->kind[e->id] = kind;
    seen->ended++;
    seen->cancelled += e->end == GETP_END_CANCELLED;
    host_require(e->end == GETP_END_CANCELLED || e->answer_tokens == expected_count[kind], "the answer is whole");
  }
  pthread_mutex_unlock(&seen->lock);
}

static void answer_each_alone(getp_model *model) {
  getp_batch *batch = open_batch(model, NULL, NULL);
  for (int kind = 0; kind < KINDS; kind++) {
    const uint64_t id = submit(batch, kind);
    while (getp_batch_unfinished(batch) > 0) {
      const getp_event *e = NULL;
      host_require(getp_batch_next(batch, -1.0, &e) == GETP_OK && e->id == id, "an event comes");
      host_require(expected_count[kind] + e->count <= MOST_TOKENS, "no more tokens than asked for");
      memcpy(&expected[kind][expected_count[kind]], e->tokens, e->count * sizeof(int));
      expected_count[kind] += e->count;
      host_require(e->answer_tokens == expected_count[kind], "the event counts the tokens so far");
      getp_event_free(e);
    }
    host_require(expected_count[kind] == kinds[kind].max_tokens, "the answer is as long as asked for");
  }
  getp_batch_close(batch);
}

/* Threads that submit, cancel and wait beside each other. */

struct crowd {
  getp_batch *batch;
  struct seen seen;
  atomic_int submitted, submitting;
};

static void *submit_many(void *argument) {
  struct crowd *crowd = (struct crowd *)argument;
  uint64_t last = 0;
  for (int i = 0; i < of_each; i++) {
    const uint64_t id = submit(crowd->batch, (i * 5 + (int)last) % KINDS);
    host_require(i == 0 || id > last, "a thread's numbers ascend");
    last = id;
    crowd->submitted++;
    if (i % 7 == 3) host_require(getp_batch_cancel(crowd->batch, id) == GETP_OK, "it is cancelled");
    if (i % 13 == 5) host_require(getp_batch_cancel(crowd->batch, id / 2) == GETP_OK, "an older one, too");
    if (i == of_each / 4 && id % 2 == 0)
      host_require(getp_batch_cancel_all(crowd->batch) == GETP_OK, "all are cancelled");
  }
  crowd->submitting--;
  return NULL;
}

static void *take_events(void *argument) {
  struct crowd *crowd = (struct crowd *)argument;
  while (crowd->submitting > 0 || getp_batch_unfinished(crowd->batch) > 0) {
    const getp_event *e = NULL;
    const getp_status status = getp_batch_next(crowd->batch, 0.001, &e);
    host_require(status == GETP_OK || (status == GETP_TIMED_OUT && e == NULL), "an event, or none by the time given");
    if (status == GETP_OK) check_event(&crowd->seen, e);
    getp_event_free(e);
  }
  return NULL;
}

static void crowd_a_batch(getp_model *model) {
  static struct crowd crowd;
  pthread_t threads[SUBMITTERS + WAITERS];
  getp_stats_t stats;

  pthread_mutex_init(&crowd.seen.lock, NULL);
  crowd.batch = open_batch(model, NULL, NULL);
  crowd.submitting = SUBMITTERS;
  for (int i = 0; i < SUBMITTERS + WAITERS; i++) {
    void *(*work)(void *) = i < SUBMITTERS ? submit_many : take_events;
    host_require(pthread_create(&threads[i], NULL, work, &crowd) == 0, "a thread");
  }
  do {
    host_require(getp_stats(getp_model_transformer(model), &stats) == GETP_OK, "the statistics of a model that works");
  } while (crowd.submitting > 0);
  for (int i = 0; i < SUBMITTERS + WAITERS; i++) pthread_join(threads[i], NULL);
  host_require(crowd.seen.ended == (size_t)(SUBMITTERS * of_each) && crowd.seen.cancelled < crowd.seen.ended,
               "each request has one last event, and not all are cancelled");
  for (int id = 0; id < SUBMITTERS * of_each; id++) {
    host_require(
        crowd.seen.ends[id] == GETP_END_CANCELLED || crowd.seen.tokens[id] == expected_count[crowd.seen.kind[id]],
        "each answer has all its tokens");
  }
  getp_batch_close(crowd.batch);
  fprintf(host_log, "ok: many threads on one batch, %zu of %d requests cancelled\n", crowd.seen.cancelled,
          SUBMITTERS * of_each);
}

/* Nobody reads: what has been answered waits, all of it, and a batch that is closed is gone with it. */
static void read_nothing(getp_model *model) {
  const Transformer *transformer = getp_model_transformer(model);
  static struct seen seen;
  getp_stats_t before, now;
  uint64_t tokens = 0;
  getp_batch *batch = open_batch(model, NULL, NULL);

  pthread_mutex_init(&seen.lock, NULL);
  host_require(getp_stats(transformer, &before) == GETP_OK, "the statistics");
  for (int i = 0; i < 4 * KINDS; i++) {
    submit(batch, i % KINDS);
    tokens += expected_count[i % KINDS];
  }
  do {
    usleep(1000);
    host_require(getp_stats(transformer, &now) == GETP_OK, "the statistics");
  } while (now.tokens - before.tokens < tokens);
  host_require(getp_batch_unfinished(batch) == 4 * KINDS, "all wait to be read");
  for (int i = 0; i < 4 * KINDS; i++) {
    const getp_event *e = NULL;
    host_require(getp_batch_next(batch, 0.0, &e) == GETP_OK && e->count == e->answer_tokens, "one event has it all");
    check_event(&seen, e);
    getp_event_free(e);
  }
  host_require(seen.ended == 4 * KINDS && getp_batch_unfinished(batch) == 0, "and nothing else comes");
  for (int i = 0; i < 10 * KINDS; i++) submit(batch, i % KINDS);
  getp_batch_close(batch);
  fprintf(host_log, "ok: nobody reads, and a batch is closed in the middle\n");
}

/* on_event that calls what it likes. */

struct chain {
  getp_model *model;
  getp_batch *batch;
  struct seen seen;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int left, is_done;
  void (*at_end)(struct chain *);
};

static void go_on(void *context, const getp_event *e) {
  struct chain *chain = (struct chain *)context;
  pthread_mutex_lock(&chain->lock); /* the batch is noted once its opener has it */
  check_event(&chain->seen, e);
  if (e->end != GETP_END_NONE && --chain->left > 0) submit(chain->batch, chain->left % KINDS);
  if (chain->left == 0) {
    chain->left = -1;
    if (chain->at_end != NULL) chain->at_end(chain);
    chain->is_done = 1;
    pthread_cond_signal(&chain->changed);
  }
  pthread_mutex_unlock(&chain->lock);
}

static void chain_requests(getp_model *model, int requests, void (*at_end)(struct chain *)) {
  /* One each: the last call of on_event may not have returned when its batch is closed. */
  static struct chain chains[MOST_CHAINS];
  static int made;
  struct chain *chain = &chains[made++];
  const getp_event *e;
  host_require(made <= MOST_CHAINS, "room for the chain");
  chain->model = model;
  chain->left = requests;
  chain->at_end = at_end;
  pthread_mutex_init(&chain->seen.lock, NULL);
  pthread_mutex_init(&chain->lock, NULL);
  pthread_cond_init(&chain->changed, NULL);
  pthread_mutex_lock(&chain->lock);
  chain->batch = open_batch(model, go_on, chain);
  host_require(getp_batch_next(chain->batch, 0.0, &e) == GETP_BAD_STATE && e == NULL, "events have one way");
  submit(chain->batch, 0);
  while (!chain->is_done) pthread_cond_wait(&chain->changed, &chain->lock);
  if (at_end == NULL) getp_batch_close(chain->batch);
  pthread_mutex_unlock(&chain->lock);
  host_require(chain->seen.ended == (size_t)requests && chain->seen.cancelled == 0, "each request has one last event");
}

/* With requests that run, whose events never come. */
static void close_within(struct chain *chain) {
  for (int kind = 0; kind < KINDS; kind++) submit(chain->batch, kind);
  getp_batch_close(chain->batch);
}

static void close_and_open_within(struct chain *chain) {
  close_within(chain);
  chain->batch = open_batch(chain->model, NULL, NULL);
  submit(chain->batch, 0);
  getp_batch_close(chain->batch);
}

static void close_model_within(struct chain *chain) {
  for (int kind = 0; kind < KINDS; kind++) submit(chain->batch, kind);
  getp_model_close(chain->model);
  host_require(getp_batch_submit(chain->batch, &kinds[0], NULL) == GETP_BAD_STATE, "its model is gone");
  getp_batch_close(chain->batch);
}

/* A model closed under a batch that is open, busy, and waited for. */

static void *wait_for_ever(void *batch) {
  getp_status status;
  const getp_event *e = NULL;
  do {
    getp_event_free(e);
    status = getp_batch_next((getp_batch *)batch, -1.0, &e);
  } while (status == GETP_OK);
  host_require(status == GETP_CLOSED && e == NULL, "a model that is closed ends the waiting");
  return NULL;
}

static void close_the_model(char **argv) {
  struct host h = host_open(argv, GETP_OFF);
  getp_batch *batch = open_batch(h.model, NULL, NULL);
  const getp_event *e;
  pthread_t waiting;

  for (int i = 0; i < 10 * KINDS; i++) submit(batch, i % KINDS);
  host_require(pthread_create(&waiting, NULL, wait_for_ever, batch) == 0, "a thread");
  host_close(&h);
  pthread_join(waiting, NULL);
  host_require(getp_batch_submit(batch, &kinds[0], NULL) == GETP_BAD_STATE, "no request is taken then");
  host_require(getp_batch_next(batch, -1.0, &e) == GETP_CLOSED && e == NULL, "and no event comes");
  host_require(getp_batch_cancel_all(batch) == GETP_OK && getp_batch_unfinished(batch) == 0, "nothing is left");
  getp_batch_close(batch);
  fprintf(host_log, "ok: a model is closed under a batch that is waited for\n");
}

/* Threads that open batches on one model, and answer on it, at once. */

struct rivals {
  struct host *h;
  const struct host *answered;
  pthread_barrier_t *start;
  atomic_int opened, refused, answers;
};

/* Whether there is another round, the same in all threads, which then begin it together: who comes first is chance,
 * so there are rounds until both have gone well. */
static int goes_on(struct rivals *rivals, int round) {
  int more;
  pthread_barrier_wait(rivals->start);
  more = round < rounds / 20 || ((rivals->opened == 0 || rivals->answers == 0) && round < 10000);
  pthread_barrier_wait(rivals->start);
  return more;
}

static void *open_beside(void *argument) {
  struct rivals *rivals = (struct rivals *)argument;
  for (int round = 0; goes_on(rivals, round); round++) {
    getp_batch *batch;
    batch = getp_batch_open(rivals->h->model, NULL);
    if (batch == NULL) {
      host_require(getp_last_status() == GETP_BAD_STATE, "there is one already");
      rivals->refused++;
      continue;
    }
    rivals->opened++;
    submit(batch, round % KINDS);
    getp_batch_close(batch);
  }
  return NULL;
}

static void *answer_beside(void *argument) {
  struct rivals *rivals = (struct rivals *)argument;
  for (int round = 0; goes_on(rivals, round); round++) {
    if (host_inference(rivals->h) >= 0) {
      host_require(host_same_answers(rivals->h, rivals->answered), "the answers are those of any other time");
      rivals->answers++;
    } else {
      host_require(getp_last_status() == GETP_BAD_STATE, "a batch is open");
    }
  }
  return NULL;
}

static void open_at_once(struct host *h, const struct host *answered) {
  static struct rivals rivals;
  static pthread_barrier_t start;
  pthread_t threads[3];
  rivals.h = h;
  rivals.answered = answered;
  rivals.start = &start;
  pthread_barrier_init(&start, NULL, 3);
  for (int i = 0; i < 3; i++) {
    host_require(pthread_create(&threads[i], NULL, i < 2 ? open_beside : answer_beside, &rivals) == 0, "a thread");
  }
  for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
  host_require(rivals.opened > 0 && rivals.answers > 0, "some of each go well");
  fprintf(host_log, "ok: %d batches opened at once, %d refused, beside %d inferences\n", rivals.opened, rivals.refused,
          rivals.answers);
}

/* What a process holds. */

struct held {
  long threads, files, mappings, resident_kib;
};

static struct held held(void) {
  struct held held = {0, 0, 0, 0};
  char line[256];
  FILE *status = fopen("/proc/self/status", "r");
  FILE *maps = fopen("/proc/self/maps", "r");
  DIR *files = opendir("/proc/self/fd");
  host_require(status != NULL && maps != NULL && files != NULL, "the process's files");
  while (fgets(line, sizeof line, status) != NULL) {
    if (strncmp(line, "VmRSS:", 6) == 0) held.resident_kib = atol(line + 6);
    if (strncmp(line, "Threads:", 8) == 0) held.threads = atol(line + 8);
  }
  while (fgets(line, sizeof line, maps) != NULL) held.mappings += strchr(line, '\n') != NULL;
  while (readdir(files) != NULL) held.files++;
  closedir(files);
  fclose(maps);
  fclose(status);
  return held;
}

/* What is held once there are at most so many threads and mappings; threads about to end get half a minute for it. */
static struct held held_at_last(long threads, long mappings) {
  struct held now = held();
  for (int patience = 600; (now.threads > threads || now.mappings > mappings) && patience > 0; patience--) {
    usleep(50000);
    now = held();
  }
  return now;
}

static void nothing(void *context, const getp_event *e) {
  (void)context;
  (void)e;
}

static void open_and_close(getp_model *model) {
  struct held before = {0, 0, 0, 0}, after;
  for (int round = 0; round < rounds; round++) {
    getp_batch *batch = open_batch(model, round % 3 == 0 ? nothing : NULL, NULL);
    for (int i = 0; i < round % 4; i++) submit(batch, (round + i) % KINDS);
    getp_batch_close(batch);
    if (round == rounds / 4) before = held();
  }
  /* Those of the measured batch may have ended. */
  after = held_at_last(before.threads + 2, LONG_MAX);
  host_require(after.threads <= before.threads + 2 && after.files == before.files, "no thread or file is left open");
  host_require(after.resident_kib <= before.resident_kib + 4096, "and no memory");
  fprintf(host_log, "ok: %d batches, then %ld KiB where there were %ld\n", rounds, after.resident_kib,
          before.resident_kib);
}

/* A thread that closes its batch, and then waits for the end of all its threads, does not wait for itself, and leaves
 * no stack behind. */
static void close_within_often(getp_model *model) {
  /* Of allocators. A stack is two mappings. */
  enum { OTHERS = 8 };
  struct held before, after;
  chain_requests(model, 3 * KINDS, close_within);
  chain_requests(model, 3 * KINDS, close_and_open_within);
  before = held();
  for (int round = 0; round < rounds / 10; round++) chain_requests(model, 1, close_and_open_within);
  after = held_at_last(LONG_MAX, before.mappings + rounds / 10 + OTHERS);
  host_require(after.mappings <= before.mappings + rounds / 10 + OTHERS, "no stack is left");
  fprintf(host_log, "ok: batches closed, and others opened, in on_event\n");
}

/* An open batch has the model to itself. */
static void exclude(struct host *h, const struct host *answered) {
  getp_batch *batch = open_batch(h->model, NULL, NULL);
  host_require(host_inference(h) == -1 && getp_last_status() == GETP_BAD_STATE, "inference is refused beside a batch");
  host_require(getp_batch_open(h->model, NULL) == NULL && getp_last_status() == GETP_BAD_STATE, "and another batch");
  submit(batch, 0);
  getp_batch_close(batch);
  host_require(host_inference(h) > 0 && host_same_answers(h, answered), "behind it inference answers as before it");
  fprintf(host_log, "ok: inference beside and behind a batch\n");
}

/* Values that nobody can mean. */

static getp_batch *bad_batch;

static void refused(getp_status wanted, const char *what) {
  host_require(getp_last_status() == wanted && getp_last_error() != NULL, what);
}

static void is_bad(const getp_request *r, const char *what) {
  uint64_t id = 77;
  host_require(getp_batch_submit(bad_batch, r, &id) == GETP_BAD_ARGUMENT && id == 77, what);
  refused(GETP_BAD_ARGUMENT, what);
}

/* The last event of a request that is taken and may be refused. */
static int ends_as(const getp_request *r, const char *what) {
  const getp_event *e = NULL;
  int end;
  host_require(getp_batch_submit(bad_batch, r, NULL) == GETP_OK, what);
  host_require(getp_batch_next(bad_batch, -1.0, &e) == GETP_OK && e->end != GETP_END_NONE, what);
  end = e->end;
  host_require((end == GETP_END_REFUSED) == (e->status == GETP_REFUSED && e->why != NULL), what);
  getp_event_free(e);
  return end;
}

static void mean_nothing(char **argv) {
  getp_model *model;
  getp_options small;
  struct {
    getp_request r;
    size_t more[4];
  } later;
  getp_batch_options options;
  getp_request r = kinds[0];
  const getp_event *e;
  int outside[] = {1, 512}, negative[] = {-1}, many[1000];
  uint64_t id;
  getp_batch *batch;

  getp_options_init(&small);
  small.kv_mb = 1;
  host_require((model = getp_model_open(argv[1], &small)) != NULL, "the model opens");
  bad_batch = batch = open_batch(model, NULL, NULL);
  r.tokens_per_event = 0;
  host_require(getp_batch_options_init_sized(NULL, sizeof options) == GETP_BAD_ARGUMENT, "no options");
  host_require(getp_batch_options_init_sized(&options, 3) == GETP_BAD_ARGUMENT, "options of 3 bytes");
  host_require(getp_request_init_sized(NULL, sizeof r) == GETP_BAD_ARGUMENT, "no request");
  host_require(getp_request_init_sized(&r, SIZE_MAX) == GETP_BAD_ARGUMENT && r.prompt != NULL, "one of all memory");
  host_require(getp_batch_open(NULL, NULL) == NULL, "no model");
  refused(GETP_BAD_ARGUMENT, "no model");
  options.size = SIZE_MAX;
  getp_batch_close(batch); /* else it would be refused for another reason */
  host_require(getp_batch_open(model, &options) == NULL, "options of all memory");
  refused(GETP_BAD_ARGUMENT, "options of all memory");
  bad_batch = batch = open_batch(model, NULL, NULL);

  host_require(getp_batch_submit(NULL, &r, &id) == GETP_BAD_ARGUMENT, "submit: no batch");
  host_require(getp_batch_submit(batch, NULL, &id) == GETP_BAD_ARGUMENT, "submit: no request");
  host_require(getp_batch_next(NULL, 0.0, &e) == GETP_BAD_ARGUMENT && e == NULL, "next: no batch");
  host_require(getp_batch_next(batch, 0.0, NULL) == GETP_BAD_ARGUMENT, "next: no event");
  host_require(getp_batch_next(batch, NAN, &e) == GETP_BAD_ARGUMENT && e == NULL, "next: no number");
  host_require(getp_batch_next(batch, -NAN, &e) == GETP_BAD_ARGUMENT, "next: no negative number");
  host_require(getp_batch_next(batch, 1e-300, &e) == GETP_TIMED_OUT && e == NULL, "next: no time");
  host_require(getp_batch_next(batch, -0.0, &e) == GETP_TIMED_OUT, "next: less than no time");
  host_require(getp_batch_cancel(NULL, 0) == GETP_BAD_ARGUMENT, "cancel: no batch");
  host_require(getp_batch_cancel(batch, UINT64_MAX) == GETP_BAD_ARGUMENT, "cancel: no such request");
  host_require(getp_batch_cancel_all(NULL) == GETP_BAD_ARGUMENT, "cancel all: no batch");
  host_require(getp_batch_unfinished(NULL) == 0, "unfinished: no batch");
  refused(GETP_BAD_ARGUMENT, "unfinished: no batch");
  getp_batch_close(NULL);
  getp_event_free(NULL);

#define END(field, value, end, what)                \
  do {                                              \
    getp_request odd = r;                           \
    odd.field = value;                              \
    host_require(ends_as(&odd, what) == end, what); \
  } while (0)
#define BAD(field, value, what) \
  do {                          \
    getp_request bad = r;       \
    bad.field = value;          \
    is_bad(&bad, what);         \
  } while (0)
  BAD(size, 0, "a request of no bytes");
  BAD(size, sizeof r - 8, "a request of too few bytes");
  BAD(size, SIZE_MAX, "a request of all memory");
  BAD(prompt, NULL, "no prompt");
  BAD(prompt, (const int *)((const char *)r.prompt + 1), "a prompt that is not aligned");
  BAD(prompt_length, SIZE_MAX, "a prompt of more than all memory");
  BAD(prompt_length, SIZE_MAX / sizeof(int), "a prompt of all memory");
  BAD(stop_length, SIZE_MAX, "stops: no pointer");
  BAD(temperature, NAN, "a temperature that is no number");
  BAD(temperature, -0.5f, "a temperature below 0");
  BAD(temperature, INFINITY, "an infinite temperature");
  END(topp, NAN, GETP_END_LENGTH, "a top-p that is no number, and not looked at");
  r.temperature = 1.0f;
  BAD(topp, NAN, "a top-p that is no number");
  BAD(ignore_end, 7, "a switch with three ways");
  BAD(ignore_end, INT_MIN, "a switch with many ways");
  BAD(tokens_per_event, -1, "events of less than no token");
  BAD(tokens_per_event, INT_MIN, "events of much less");
  {
    getp_request bad = r;
    bad.stop = outside;
    bad.stop_length = SIZE_MAX;
    is_bad(&bad, "stops of more than all memory");
    bad.stop_length = 2;
    is_bad(&bad, "a stop outside the vocabulary");
    bad = r;
    bad.prompt = outside;
    bad.prompt_length = 2;
    is_bad(&bad, "a token outside the vocabulary");
    bad.prompt = negative;
    bad.prompt_length = 1;
    is_bad(&bad, "a negative token");
  }
  memset(&later, 0, sizeof later);
  later.r = r;
  later.r.size = sizeof later;
  later.more[3] = 1;
  is_bad(&later.r, "a field of another version");
  later.more[3] = 0;
  host_require(ends_as(&later.r, "a request of a later version") == GETP_END_LENGTH, "that sets nothing new");
  host_require(getp_batch_next(batch, 0.0, &e) == GETP_TIMED_OUT, "requests that are not taken have no event");

  END(prompt_length, 0, GETP_END_REFUSED, "a prompt without a token");
  END(max_tokens, SIZE_MAX, GETP_END_REFUSED, "an answer of all memory");
  END(min_tokens, SIZE_MAX, GETP_END_LENGTH, "an answer of at least all memory");
  END(tokens_per_event, INT_MAX, GETP_END_LENGTH, "events of very many tokens");
  END(seed, UINT64_MAX, GETP_END_LENGTH, "a large seed");
  END(topp, INFINITY, GETP_END_LENGTH, "an infinite top-p");
  END(topp, -1.0f, GETP_END_LENGTH, "a negative top-p");
  END(ignore_end, GETP_ON, GETP_END_LENGTH, "no end token");
  for (int i = 0; i < 1000; i++) many[i] = i % 512;
  END(prompt, many, GETP_END_LENGTH, "another prompt");
  r.prompt = many;
  END(prompt_length, 1000, GETP_END_LENGTH, "a long prompt");
  r.stop = many;
  r.max_tokens = 0; /* as many as there is room for */
  END(stop_length, 1000, GETP_END_STOP, "every token a stop");
  getp_batch_close(batch);
  getp_model_close(model);
  fprintf(host_log, "ok: values that nobody can mean are refused\n");
}

int main(int argc, char **argv) {
  struct host h, answered, own;

  if (argc != 4 && argc != 5) return 2; /* the fifth, of any value, makes it short */
  if (argc == 5) rounds = 20, of_each = 10;
  host_log = stderr;
  alarm(120); /* whoever hangs is killed */
  answered = host_open(argv, GETP_OFF);
  host_require(host_inference(&answered) > 0, "inference answers");
  h = host_open(argv, GETP_OFF);
  make_kinds();
  answer_each_alone(h.model);
  crowd_a_batch(h.model);
  read_nothing(h.model);
  exclude(&h, &answered);
  mean_nothing(argv);
  chain_requests(h.model, 3 * KINDS, NULL);
  close_within_often(h.model);
  open_and_close(h.model);
  open_at_once(&h, &answered);
  exclude(&h, &answered);
  close_the_model(argv);
  own = host_open(argv, GETP_OFF);
  chain_requests(own.model, 3 * KINDS, close_model_within);
  fprintf(host_log, "ok: a model is closed in on_event\n");
  own.model = NULL;
  host_close(&own);
  host_close(&h);
  host_close(&answered);
  return 0;
}
