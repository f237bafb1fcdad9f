/* Three requests of different temperature on one model, their tokens printed as
 * they come, the last one cancelled on the way.
 *
 *     stream MODEL TOKENIZER [MAX_TOKENS]
 *
 * MODEL: a .bin file or a directory of safetensors. TOKENIZER gives the text of
 * tokens; the prompts are token ids. MAX_TOKENS: the most tokens of an answer, 32
 * by default.
 *
 * The library prints on stderr why a call failed. */

#include "getp.h"

#include <stdio.h>
#include <stdlib.h>

static const float temperatures[] = {0.0f, 0.7f, 1.0f};
enum { REQUESTS = sizeof temperatures / sizeof *temperatures, CANCEL_AFTER = 8 };

static const char *const ends[] = {"goes on",   "end token", "stop token", "length",
                                   "cancelled", "refused",   "failed"};

/* Queues request `i`; its number within the batch is `i`, too. */
static getp_status submit(getp_batch *batch, int i, size_t max_tokens) {
    const int prompt[] = {11, 7, 42, 5 + i};
    getp_request request;

    getp_request_init(&request);
    request.prompt = prompt;
    request.prompt_length = sizeof prompt / sizeof *prompt;
    request.max_tokens = max_tokens;
    request.temperature = temperatures[i];
    request.topp = 0.9f;
    request.seed = 1;
    request.tokens_per_event = 1;
    request.tag = (uint64_t)i;
    return getp_batch_submit(batch, &request, NULL);
}

static void print(const getp_tokenizer *tokenizer, const getp_event *event) {
    printf("[%llu]", (unsigned long long)event->tag);
    for (size_t i = 0; i < event->count; i++) {
        size_t length = 0;
        const char *piece = getp_tokenizer_piece(tokenizer, event->tokens[i], &length);
        printf(" %d \"%.*s\"", event->tokens[i], (int)length, piece);
    }
    if (event->end != GETP_END_NONE) {
        printf(" (%s after %zu tokens%s%s)", ends[event->end], event->answer_tokens,
               event->why != NULL ? ": " : "", event->why != NULL ? event->why : "");
    }
    putchar('\n');
    fflush(stdout);
}

/* Prints events until each request has had its last one. */
static getp_status serve(getp_batch *batch, const getp_tokenizer *tokenizer) {
    while (getp_batch_unfinished(batch) > 0) {
        const getp_event *event;
        const getp_status status = getp_batch_next(batch, -1.0, &event);
        if (status != GETP_OK) return status;
        print(tokenizer, event);
        if (event->id == REQUESTS - 1 && event->answer_tokens >= CANCEL_AFTER) {
            getp_batch_cancel(batch, event->id); /* nothing if it has just ended */
        }
        getp_event_free(event);
    }
    return GETP_OK;
}

int main(int argc, char **argv) {
    getp_tokenizer *tokenizer;
    getp_model *model = NULL;
    getp_batch *batch = NULL;
    getp_status status = GETP_BAD_ARGUMENT;

    if (argc < 3 || argc > 4) {
        fputs("usage: stream MODEL TOKENIZER [MAX_TOKENS]\n", stderr);
        return 2;
    }
    if ((tokenizer = getp_tokenizer_open(argv[2])) != NULL &&
        (model = getp_model_open(argv[1], NULL)) != NULL &&
        (batch = getp_batch_open(model, NULL)) != NULL) {
        status = GETP_OK;
        for (int i = 0; i < REQUESTS && status == GETP_OK; i++) {
            status = submit(batch, i, argc > 3 ? strtoul(argv[3], NULL, 10) : 32);
        }
        if (status == GETP_OK) status = serve(batch, tokenizer);
    }
    /* The close functions accept NULL. */
    getp_batch_close(batch);
    getp_model_close(model);
    getp_tokenizer_close(tokenizer);
    return status == GETP_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}
