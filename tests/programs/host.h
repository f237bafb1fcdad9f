/* What the programs in this folder share: a model with all it takes, opened through getp.h. Each is called
 *
 *     PROGRAM MODEL TOKENIZER REQUESTS
 *
 * and says on the stderr it was started with what is wrong; its exit status is 0 if nothing is. */

#ifndef HOST_H
#define HOST_H

#include "getp.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STEPS 48

struct host {
  getp_model *model;
  getp_tokenizer *tokenizer;
  getp_requests *requests;
  getp_sampler *sampler;
};

/* The stderr that the program was started with; some tests give the library another. */
static FILE *host_log;

static inline void host_require(int holds, const char *what) {
  if (!holds) {
    const char *error = getp_last_error();
    fprintf(host_log, "FAILED: %s (last error: %s)\n", what, error != NULL ? error : "none");
    fflush(host_log);
    _Exit(1);
  }
}

static inline struct host host_open(char **argv, int print) {
  struct host h;
  getp_options options;
  getp_options_init(&options);
  options.print = print;
  h.tokenizer = getp_tokenizer_open(argv[2]);
  host_require(h.tokenizer != NULL, "the tokenizer opens");
  h.requests = getp_requests_open(argv[3], STEPS, h.tokenizer);
  host_require(h.requests != NULL, "the requests open");
  h.model = getp_model_open(argv[1], &options);
  host_require(h.model != NULL, "the model opens");
  h.sampler = getp_sampler_open(h.model, 0.0f, 0.9f, 1);
  host_require(h.sampler != NULL, "the sampler opens");
  return h;
}

static inline void host_close(struct host *h) {
  getp_sampler_close(h->sampler);
  getp_requests_close(h->requests);
  getp_model_close(h->model);
  getp_tokenizer_close(h->tokenizer);
}

static inline void host_warm_up(struct host *h) {
  warm_up(getp_model_transformer(h->model), getp_tokenizer_get(h->tokenizer));
}

static inline long long host_inference(struct host *h) {
  return inference(getp_model_transformer(h->model), getp_tokenizer_get(h->tokenizer), getp_sampler_get(h->sampler),
                   getp_requests_get(h->requests));
}

static inline void host_finish(struct host *h) {
  finish(getp_model_transformer(h->model), getp_tokenizer_get(h->tokenizer));
}

/* Whether both hold the same answers. */
static inline int host_same_answers(const struct host *a, const struct host *b) {
  int count = getp_requests_count(a->requests);
  if (count != getp_requests_count(b->requests)) return 0;
  for (int request = 0; request < count; request++) {
    size_t lengths[2] = {0, 0};
    const int *tokens[2] = {getp_requests_tokens(a->requests, request, &lengths[0]),
                            getp_requests_tokens(b->requests, request, &lengths[1])};
    if (lengths[0] != lengths[1] || memcmp(tokens[0], tokens[1], lengths[0] * sizeof(int)) != 0) return 0;
  }
  return 1;
}

#endif
