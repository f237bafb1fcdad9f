// Records the logits of an unchanged eval program. It is compiled in place of
// the program's run.cpp, which it includes. The program then runs its own
// forward() and sample() and, in getp mode, writes the logits of every position
// to the file that GETP_LOGITS names, in the library's format. GETP_STEPS=tokens
// is for a program whose own getp_run.cpp has `while (pos + 1 < steps)`.
//
// Copy this file beside the program's run.cpp, and build the target whose logits
// you want:
//
//     make runomp CPP_FILES="record_logits.cpp tokenizer.cpp"
//     GETP_LOGITS=reference.logits ./run model.bin -m getp -i IN -o OUT

#define GETP_RUN  // leaves out the program's own inference
#include "run.cpp"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static void write_logits_file(FILE *file, const void *bytes, size_t count) {
    if (fwrite(bytes, 1, count, file) == count) return;
    perror("record_logits: GETP_LOGITS");
    exit(EXIT_FAILURE);
}

static FILE *open_logits_file(int vocab_size) {
    const char *path = getenv("GETP_LOGITS");
    if (!path || !*path) {
        fprintf(stderr, "record_logits: GETP_LOGITS names no file for the logits\n");
        exit(EXIT_FAILURE);
    }
    FILE *file = fopen(path, "wb");
    if (!file) {
        perror("record_logits: GETP_LOGITS");
        exit(EXIT_FAILURE);
    }
    const uint32_t sizes[2] = {static_cast<uint32_t>(vocab_size), 0};
    write_logits_file(file, "GETPLOG1", 8);
    write_logits_file(file, sizes, sizeof sizes);
    return file;
}

// The most positions of a request: two versions of the program differ.
static int recorded_positions(int steps) {
    const char *rule = getenv("GETP_STEPS");
    if (!rule || !*rule || strcmp(rule, "positions") == 0) return steps;
    if (strcmp(rule, "tokens") == 0) return steps - 1;
    fprintf(stderr, "record_logits: GETP_STEPS=%s is not known; use positions or tokens\n", rule);
    exit(EXIT_FAILURE);
}

// Answers a request as the program does, one token after the other, and records
// the logits of each position before sample() overwrites them.
static int record_request(Transformer *transformer, Tokenizer *tokenizer, Sampler *sampler,
                          Requests *requests, int request, FILE *file) {
    const char *text = get_str_req_ptr(requests, request);
    int *answer = get_tok_gen_ptr(requests, request);
    std::vector<int> prompt(strlen(text) + 3);
    int n_prompt = 0;
    encode(tokenizer, text, -1, -1, prompt.data(), &n_prompt,
           transformer->config.initial_context_length);
    int n_answer = 0;
    int token = prompt[0];
    // Of a prompt that leaves no room for an answer nothing is recorded, as in the library.
    const int positions = recorded_positions(requests->max_seq_len);
    const bool has_answer = n_prompt > 0 && n_prompt <= positions;
    for (int pos = 0; has_answer && pos < positions; pos++) {
        float *logits = forward(transformer, token, pos);
        const uint32_t header[4] = {static_cast<uint32_t>(request), static_cast<uint32_t>(pos),
                                    static_cast<uint32_t>(token), 0};
        write_logits_file(file, header, sizeof header);
        write_logits_file(file, logits,
                          sizeof(float) * static_cast<size_t>(transformer->config.vocab_size));
        if (pos + 1 < n_prompt) {
            token = prompt[static_cast<size_t>(pos) + 1];
            continue;
        }
        token = sample(sampler, logits);
        answer[n_answer++] = token;
        if (token == 199999 || token == 200002) break;
    }
    answer[n_answer] = -1;
    return n_answer;
}

void warm_up(Transformer *, Tokenizer *) {}
void finish(Transformer *, Tokenizer *) {}

long long inference(Transformer *transformer, Tokenizer *tokenizer, Sampler *sampler,
                    Requests *requests) {
    FILE *file = open_logits_file(transformer->config.vocab_size);
    long long n_tokens = 0;
    for (int request = 0; request < requests->num_reqs; request++) {
        n_tokens += record_request(transformer, tokenizer, sampler, requests, request, file);
    }
    if (fclose(file) != 0) {
        perror("record_logits: GETP_LOGITS");
        exit(EXIT_FAILURE);
    }
    return n_tokens;
}
