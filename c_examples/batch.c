/* Answers a file of requests, using only getp.h.
 *
 *     batch MODEL TOKENIZER REQUESTS STEPS [TEMPERATURE [TOPP [SEED]]]
 *
 * MODEL: a .bin file or a directory of safetensors. REQUESTS: the number of
 * requests, then one a line. STEPS: a prompt of n tokens gets an answer of up to
 * STEPS - n + 1 tokens, or, with GETP_STEPS=tokens, of up to STEPS - n. Each
 * answer is printed on stdout after its number, in the order of requests.
 *
 * The library prints on stderr why a call failed, so this program only adds what
 * it was doing. */

#include "getp.h"

#include <stdio.h>
#include <stdlib.h>

static const char usage[] =
    "usage: batch MODEL TOKENIZER REQUESTS STEPS [TEMPERATURE [TOPP [SEED]]]\n";

/* Everything that is open. The close functions accept NULL, so that close_batch
 * works after any failure. */
struct batch {
    getp_model *model;
    getp_tokenizer *tokenizer;
    getp_requests *requests;
    getp_sampler *sampler;
};

static int open_batch(struct batch *b, int argc, char **argv) {
    const float temperature = argc > 5 ? strtof(argv[5], NULL) : 0.0f;
    const float topp = argc > 6 ? strtof(argv[6], NULL) : 0.9f;
    const uint64_t seed = argc > 7 ? strtoull(argv[7], NULL, 10) : 1;
    getp_options options;

    getp_options_init(&options);
    options.print = GETP_OFF; /* print_answers prints them */
    return (b->tokenizer = getp_tokenizer_open(argv[2])) != NULL &&
           (b->requests = getp_requests_open(argv[3], atoi(argv[4]), b->tokenizer)) != NULL &&
           (b->model = getp_model_open(argv[1], &options)) != NULL &&
           (b->sampler = getp_sampler_open(b->model, temperature, topp, seed)) != NULL;
}

static void close_batch(struct batch *b) {
    getp_sampler_close(b->sampler);
    getp_requests_close(b->requests);
    getp_tokenizer_close(b->tokenizer);
    getp_model_close(b->model);
}

/* An error may have left requests without an answer although inference returned
 * a number of tokens, so the last error is checked too. */
static int run(struct batch *b) {
    Transformer *transformer = getp_model_transformer(b->model);
    Tokenizer *tokenizer = getp_tokenizer_get(b->tokenizer);
    getp_stats_t stats;

    warm_up(transformer, tokenizer);
    if (getp_last_error() != NULL) return 0;
    if (inference(transformer, tokenizer, getp_sampler_get(b->sampler),
                  getp_requests_get(b->requests)) < 0 ||
        getp_last_error() != NULL || getp_stats(transformer, &stats) != 0) {
        return 0;
    }
    fprintf(stderr, "batch: %llu tokens in %.2f s\n", (unsigned long long)stats.tokens,
            stats.seconds);
    finish(transformer, tokenizer);
    return getp_last_error() == NULL;
}

static void print_answer(const struct batch *b, int request) {
    size_t n_tokens = 0;
    const int *tokens = getp_requests_tokens(b->requests, request, &n_tokens);

    printf("[%d] ", request);
    for (size_t i = 0; i < n_tokens; i++) {
        size_t length = 0;
        const char *piece = getp_tokenizer_piece(b->tokenizer, tokens[i], &length);
        fwrite(piece, 1, length, stdout);
    }
    putchar('\n');
}

static int print_answers(const struct batch *b) {
    for (int request = 0; request < getp_requests_count(b->requests); request++) {
        print_answer(b, request);
    }
    return fflush(stdout) == 0 && !ferror(stdout);
}

int main(int argc, char **argv) {
    struct batch b = {NULL, NULL, NULL, NULL};
    int status = EXIT_FAILURE;

    if (argc < 5 || argc > 8) {
        fputs(usage, stderr);
        return 2;
    }
    if (!open_batch(&b, argc, argv)) {
        fputs("batch: a file cannot be used\n", stderr);
    } else if (!run(&b)) {
        fputs("batch: not every request has its answer\n", stderr);
    } else if (!print_answers(&b)) {
        perror("batch: stdout");
    } else {
        status = EXIT_SUCCESS;
    }
    close_batch(&b);
    return status;
}
