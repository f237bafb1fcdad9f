/* Answers requests through a batch and prints the answers in their order, whatever the order of the events.
 *
 *     batch_answers MODEL TOKENIZER REQUESTS STEPS [TEMPERATURE TOPP]
 *
 * The requests are its own; TOKENIZER and REQUESTS are not read. The exit status is 1 if a call or a request fails. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "getp.h"

enum { REQUESTS = 16, TOKENS = 64 };

static int answers[REQUESTS][TOKENS];
static size_t counts[REQUESTS];
static int ends[REQUESTS];

static getp_status submit(getp_batch *batch, int number, int argc, char **argv) {
  int prompt[9];
  getp_request r;
  getp_status status;
  uint64_t id;

  for (int i = 0; i < 9; i++) prompt[i] = (number * 31 + i * 7) % 512;
  getp_request_init(&r);
  r.prompt = prompt;
  r.prompt_length = 3 + (size_t)number % 7;
  r.max_tokens = (size_t)atoi(argv[4]);
  if (argc == 7) {
    r.temperature = strtof(argv[5], NULL);
    r.topp = strtof(argv[6], NULL);
  }
  r.seed = (uint64_t)number;
  r.tokens_per_event = number % 3;
  status = getp_batch_submit(batch, &r, &id);
  return status == GETP_OK && number % 6 == 5 ? getp_batch_cancel(batch, id) : status;
}

/* Takes all events; gives the failure of a call or a request. */
static getp_status take(getp_batch *batch) {
  getp_status failure = GETP_OK;
  while (getp_batch_unfinished(batch) > 0) {
    const getp_event *e;
    const getp_status status = getp_batch_next(batch, -1.0, &e);
    if (status != GETP_OK) return status;
    if (counts[e->id] + e->count <= TOKENS) {
      memcpy(&answers[e->id][counts[e->id]], e->tokens, e->count * sizeof(int));
      counts[e->id] += e->count;
    }
    ends[e->id] = e->end;
    if (e->status != GETP_OK) failure = e->status;
    getp_event_free(e);
  }
  return failure;
}

int main(int argc, char **argv) {
  getp_model *model;
  getp_batch *batch = NULL;
  getp_status status = GETP_BAD_FILE;

  if (argc != 5 && argc != 7) return 2;
  if ((model = getp_model_open(argv[1], NULL)) != NULL && (batch = getp_batch_open(model, NULL)) != NULL) {
    status = GETP_OK;
    for (int number = 0; number < REQUESTS && status == GETP_OK; number++) {
      status = submit(batch, number, argc, argv);
    }
    if (status == GETP_OK) status = take(batch);
  }
  getp_batch_close(batch);
  getp_model_close(model);
  for (int number = 0; number < REQUESTS && status == GETP_OK; number++) {
    printf("%d ends with %d:", number, ends[number]);
    for (size_t i = 0; ends[number] != GETP_END_CANCELLED && i < counts[number]; i++) {
      printf(" %d", answers[number][i]);
    }
    putchar('\n');
  }
  return status == GETP_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}
