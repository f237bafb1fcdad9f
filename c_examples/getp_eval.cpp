// The request side of the eval program: the requests that it shares with
// libgetp, the files they are read from and written to, and the three timed
// calls.
//
// Transformer, Tokenizer and Sampler are declared before this file is included.
// A program with a getp_eval.cpp of its own keeps that; this one is for eval.cpp.

#ifndef GETP_EVAL
#define GETP_EVAL

#include <chrono>
#include <climits>
#include <fstream>

typedef struct {
    int num_reqs;
    int max_token_len;  // bytes allocated for each token of a request's text
    int max_seq_len;    // steps of a request; GETP_STEPS says what they count
    char *str_reqs;     // [num_reqs, max_token_len * (max_seq_len + 1)]
    int *tok_gens;      // [num_reqs, max_seq_len + 1], each ended by -1
} Requests;

void warm_up(Transformer *transformer, Tokenizer *tokenizer);
long long inference(Transformer *transformer, Tokenizer *tokenizer, Sampler *sampler,
                    Requests *requests);
void finish(Transformer *transformer, Tokenizer *tokenizer);

inline int64_t text_bytes(const Requests &requests) {
    return product({requests.max_token_len, int64_t{requests.max_seq_len} + 1});
}

inline int64_t answer_tokens(const Requests &requests) { return int64_t{requests.max_seq_len} + 1; }

inline char *get_str_req_ptr(const Requests *requests, int64_t request) {
    return requests->str_reqs + request * text_bytes(*requests);
}

inline int *get_tok_gen_ptr(const Requests *requests, int64_t request) {
    return requests->tok_gens + request * answer_tokens(*requests);
}

// ---------------------------------------------------------------------------
// Files

inline int parse_count(const std::string &line, const std::string &path) {
    char *end = nullptr;
    errno = 0;
    long count = std::strtol(line.c_str(), &end, 10);
    const bool blank_rest = std::strspn(end, " \t\r") == std::strlen(end);
    if (end == line.c_str() || !blank_rest || errno != 0 || count < 0 || count > INT_MAX) {
        fail(path + ": the first line is not a number of requests");
    }
    return static_cast<int>(count);
}

// A text that does not fit its slot has more tokens than steps + 1. Such a request
// gets no answer, clipped or not.
inline void store_text(Requests *requests, int request, const std::string &line) {
    const size_t slot_bytes = static_cast<size_t>(text_bytes(*requests));
    if (line.size() > slot_bytes) {
        std::fprintf(stderr, "eval: request %d clipped from %zu to %zu bytes\n", request,
                     line.size(), slot_bytes);
    }
    std::memcpy(get_str_req_ptr(requests, request), line.data(), std::min(line.size(), slot_bytes));
}

// Reads the number of requests from the first line, then one request a line.
inline void read_requests(Requests *requests, const std::string &path, int max_token_len,
                          int max_seq_len) {
    std::ifstream file(path, std::ios::binary);
    std::string line;
    if (!file) fail_errno(path);
    if (!std::getline(file, line)) fail(path + ": is empty");

    requests->num_reqs = parse_count(line, path);
    requests->max_token_len = max_token_len;
    requests->max_seq_len = max_seq_len;
    if (text_bytes(*requests) > INT_MAX) fail(path + ": too many steps for tokens this long");
    requests->str_reqs = allocate<char>({requests->num_reqs, text_bytes(*requests)});
    requests->tok_gens = allocate<int>({requests->num_reqs, answer_tokens(*requests)});

    int request = 0;
    while (request < requests->num_reqs && std::getline(file, line)) {
        store_text(requests, request++, line);
    }
    if (request < requests->num_reqs) {
        std::fprintf(stderr, "eval: %s announces %d requests and holds %d; the rest are empty\n",
                     path.c_str(), requests->num_reqs, request);
    }
}

inline void free_requests(Requests *requests) {
    std::free(requests->str_reqs);
    std::free(requests->tok_gens);
}

// Writes a line per request: its tokens up to the first negative one.
inline void write_answers(const Requests &requests, const std::string &path) {
    std::ofstream file(path);
    for (int request = 0; request < requests.num_reqs; request++) {
        const int *answer = get_tok_gen_ptr(&requests, request);
        for (int64_t i = 0; i < answer_tokens(requests) && answer[i] >= 0; i++) {
            if (i > 0) file << ' ';
            file << answer[i];
        }
        file << '\n';
    }
    file.close();
    if (!file) fail_errno(path);
}

// ---------------------------------------------------------------------------
// The timed run

template <typename Work>
double seconds_of(Work work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline void print_throughput(double elapsed_s, long long n_tokens) {
    std::printf("total tokens: %lld\n", n_tokens);
    std::printf("elapsed time(s): %f, achieved throughput TPS (tok/s): %f\n", elapsed_s,
                static_cast<double>(n_tokens) / elapsed_s);
    std::fflush(stdout);
}

inline void answer(Transformer *transformer, Tokenizer *tokenizer, Sampler *sampler,
                   Requests *requests, const std::string &output_path) {
    long long n_tokens = 0;
    const double inference_s =
        seconds_of([&] { n_tokens = inference(transformer, tokenizer, sampler, requests); });
    if (n_tokens < 0) fail("inference failed");
    print_throughput(inference_s, n_tokens);
    write_answers(*requests, output_path);
}

inline void getp(Transformer *transformer, Tokenizer *tokenizer, Sampler *sampler,
                 Requests *requests, const std::string &output_path) {
    const double warm_up_s = seconds_of([&] { warm_up(transformer, tokenizer); });
    std::printf("warm up elapsed time(s): %f\n", warm_up_s);
    std::fflush(stdout);

    try {
        answer(transformer, tokenizer, sampler, requests, output_path);
    } catch (...) {
        // The program will free its own pointers; finish restores them.
        finish(transformer, tokenizer);
        throw;
    }

    const double finish_s = seconds_of([&] { finish(transformer, tokenizer); });
    std::printf("finish elapsed time(s): %f\n", finish_s);
    std::fflush(stdout);
}

#endif  // GETP_EVAL
