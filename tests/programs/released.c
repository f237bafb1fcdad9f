/* A program compiled with the header of a release, in C90: this version's library answers it, and writes to no memory
 * behind the structs as that header has them.
 *
 *     released MODEL */

#include "getp.h"

#include <stdio.h>
#include <string.h>

#define MOST_TOKENS 24

static unsigned char untouched[64];

#define WITH_MEMORY_BEHIND(type)            \
  struct {                                  \
    type it;                                \
    unsigned char behind[sizeof untouched]; \
  }

static int require(int holds, const char* what) {
  if (!holds) {
    fprintf(stderr, "FAILED: %s (last error: %s)\n", what, getp_last_error() != NULL ? getp_last_error() : "none");
  }
  return holds;
}

#define REQUIRE(holds) \
  if (!require((holds), #holds)) return 1
#define REQUIRE_UNTOUCHED(mine) REQUIRE(memcmp((mine).behind, untouched, sizeof untouched) == 0)

/* Takes the events of two requests, each with its own most tokens, and adds their tokens up. */
static int serve(getp_batch* batch, uint64_t* tokens) {
  size_t answers[2] = {0, 0};
  int ended = 0;

  while (getp_batch_unfinished(batch) > 0) {
    const getp_event* event;
    size_t i;

    REQUIRE(getp_batch_next(batch, -1.0, &event) == GETP_OK);
    REQUIRE(event->size >= sizeof *event && event->tag < 2 && event->status == GETP_OK && event->why == NULL);
    REQUIRE(event->prompt_tokens == 3 && event->submitted >= 0.0 && event->last_token >= event->first_token);
    answers[event->tag] += event->count;
    REQUIRE(event->answer_tokens == answers[event->tag]);
    for (i = 0; i < event->count; i++) {
      const getp_logprob* logprob = &event->logprobs[i];
      REQUIRE(logprob->token == event->tokens[i] && logprob->logprob <= 0.0f && logprob->top_count == 2);
      REQUIRE(logprob->top[0].logprob >= logprob->top[1].logprob);
    }
    if (event->end != GETP_END_NONE) {
      REQUIRE(event->end == GETP_END_LENGTH && event->end_token == -1);
      ended++;
    }
    getp_event_free(event);
  }
  REQUIRE(ended == 2 && answers[0] == MOST_TOKENS && answers[1] == MOST_TOKENS / 2);
  *tokens = answers[0] + answers[1];
  return 0;
}

int main(int argc, char** argv) {
  static const int prompt[] = {3, 1, 2};
  WITH_MEMORY_BEHIND(getp_options) options;
  WITH_MEMORY_BEHIND(getp_batch_options) how;
  WITH_MEMORY_BEHIND(getp_request) request;
  WITH_MEMORY_BEHIND(getp_stats_t) stats;
  getp_model* model;
  getp_batch* batch;
  uint64_t id, tokens;

  if (argc != 2) return 2;
  memset(untouched, 0xa5, sizeof untouched);
  memset(&options, 0xa5, sizeof options);
  memset(&how, 0xa5, sizeof how);
  memset(&request, 0xa5, sizeof request);
  memset(&stats, 0xa5, sizeof stats);

  REQUIRE(getp_options_init(&options.it) == GETP_OK);
  REQUIRE_UNTOUCHED(options);
  options.it.precision = GETP_EXACT;
  options.it.strict = -1;
  REQUIRE(getp_model_open(argv[1], &options.it) == NULL && getp_last_status() == GETP_BAD_ARGUMENT);
  REQUIRE(strstr(getp_last_error(), "getp_options.strict=-1") != NULL);
  options.it.strict = GETP_ON;
  model = getp_model_open(argv[1], &options.it);
  REQUIRE(model != NULL);

  REQUIRE(getp_batch_options_init(&how.it) == GETP_OK);
  REQUIRE_UNTOUCHED(how);
  batch = getp_batch_open(model, &how.it);
  REQUIRE(batch != NULL);
  REQUIRE(getp_request_init(&request.it) == GETP_OK);
  REQUIRE_UNTOUCHED(request);
  request.it.prompt = prompt;
  request.it.prompt_length = 3;
  request.it.ignore_end = GETP_ON;
  request.it.tokens_per_event = 1;
  request.it.logprobs = GETP_ON;
  request.it.top_logprobs = 2;
  for (request.it.tag = 0; request.it.tag < 2; request.it.tag++) {
    request.it.max_tokens = request.it.tag == 0 ? MOST_TOKENS : MOST_TOKENS / 2;
    REQUIRE(getp_batch_submit(batch, &request.it, &id) == GETP_OK && id == request.it.tag);
  }
  if (serve(batch, &tokens) != 0) return 1;
  getp_batch_close(batch);

  REQUIRE(getp_stats(getp_model_transformer(model), &stats.it) == GETP_OK);
  REQUIRE_UNTOUCHED(stats);
  REQUIRE(stats.it.tokens == tokens && stats.it.prompt_tokens == 6 && stats.it.devices == 1);
  getp_model_close(model);
  printf("ok: a program of getp %s with getp %s\n", GETP_VERSION, getp_version());
  return 0;
}
