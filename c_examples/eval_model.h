// The model side of the eval program: the structs whose layout it shares with
// libgetp, and the checkpoint and tokenizer files that fill them.
//
// The structs are declared here and not taken from getp's header, since real
// evaluation programs do not have that header. getp_run.cpp checks that both
// sides have the same layout (x86-64 Linux, LP64, little endian).

#ifndef EVAL_MODEL_H
#define EVAL_MODEL_H

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

// ---------------------------------------------------------------------------
// Structs

typedef struct {
    int vocab_size;
    int hidden_dim;
    int n_experts;
    int experts_per_token;
    int intermediate_dim;
    int n_layers;
    int head_dim;
    int n_attn_heads;
    int n_kv_heads;
    int seq_len;
    int initial_context_length;
    float rope_theta;
    float rope_scaling_factor;
    int sliding_window;  // 0: no sliding-window layers
    float swiglu_limit;
} Config;

// Shapes are row-major, [rows..., inputs].
typedef struct {
    float *token_embedding_table;  // [vocab, hidden]
    float *rms_attn_w;             // [layers, hidden]
    float *rms_ffn_w;              // [layers, hidden]
    float *w_qkv;                  // [layers, head_dim * (heads + 2 * kv_heads), hidden]: q, k, v
    float *w_o;                    // [layers, hidden, head_dim * heads]
    float *b_qkv;                  // [layers, head_dim * (heads + 2 * kv_heads)]
    float *b_o;                    // [layers, hidden]
    float *attn_sinks;             // [layers, heads]
    float *w_router;               // [layers, experts, hidden]
    float *b_router;               // [layers, experts]
    float *w_mlp1;                 // [layers, experts, 2 * intermediate, hidden]: gate, up, gate...
    float *w_mlp2;                 // [layers, experts, hidden, intermediate]
    float *b_mlp1;                 // [layers, experts, 2 * intermediate]
    float *b_mlp2;                 // [layers, experts, hidden]
    float *rms_out_w;              // [hidden]
    float *out;                    // [vocab, hidden]
} TransformerWeights;

typedef struct {
    float *x;             // [hidden], the residual stream
    float *t;             // [hidden], normalized
    float *tb;            // [heads, head_dim], attention output
    float *tb2;           // [hidden], output of a block's last projection
    float *router_score;  // [experts]
    float *topk_v;        // [experts_per_token]
    int *topk_i;          // [experts_per_token]
    float *mlp1_out;      // [2 * intermediate]
    float *gate;          // [intermediate]
    float *up;            // [intermediate]
    float *gate_up;       // [intermediate]
    float *e_agg;         // [hidden], weighted sum over the experts
    float *qkv;           // [head_dim * (heads + 2 * kv_heads)]
    float *q;             // [heads, head_dim]
    float *k;             // the current position's row of key_cache
    float *v;             // the current position's row of value_cache
    float *att;           // [heads, seq_len + 1], the last column for the sink
    float *logits;        // [vocab]
    float *key_cache;     // [layers, seq_len, kv_heads * head_dim]
    float *value_cache;   // [layers, seq_len, kv_heads * head_dim]
    float *mask;          // [seq_len, seq_len], NULL without a sliding window
} RunState;

typedef struct {
    Config config;
    TransformerWeights weights;
    RunState state;
    int fd;
    float *data;        // the mapped checkpoint
    ssize_t file_size;  // bytes
} Transformer;

typedef struct {
    const char *str;
    int len;
    int id;
} TokenIndex;

typedef struct {
    char **vocab;  // [vocab_size], each with a NUL after its bytes
    int *lengths;  // [vocab_size], bytes
    float *scores;
    int vocab_size;
    int max_token_length;      // bytes
    TokenIndex *sorted_vocab;  // vocab by bytes, then by length
    int byte_tokens[256];
    unsigned char byte_pieces[512];  // 256 strings of one byte
} Tokenizer;

typedef struct {
    float prob;
    int index;
} ProbIndex;

typedef struct {
    int vocab_size;
    ProbIndex *probindex;  // [vocab_size], scratch of nucleus sampling
    float temperature;
    float topp;
    unsigned long long rng_state;
} Sampler;

// ---------------------------------------------------------------------------
// Helpers

// Any error in a file or an argument; main() prints it as one line.
[[noreturn]] inline void fail(const std::string &what) { throw std::runtime_error(what); }

[[noreturn]] inline void fail_errno(const std::string &path) {
    fail(path + ": " + std::strerror(errno));
}

struct CloseFile {
    void operator()(std::FILE *file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

inline File open_file(const std::string &path, const char *mode) {
    File file(std::fopen(path.c_str(), mode));
    if (!file) fail_errno(path);
    return file;
}

// Fails if nothing can be written to `path`, as far as that can be told without
// writing. Leaves what is there as it is, and nothing where nothing was.
inline void require_writable(const std::string &path) {
    struct stat status;
    const bool exists = stat(path.c_str(), &status) == 0;
    if (exists && S_ISFIFO(status.st_mode)) return;  // opening it would wait for a reader
    const int made = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0666);
    const int fd = made < 0 && errno == EEXIST ? open(path.c_str(), O_WRONLY) : made;
    // A link to nothing: the file will be made where it leads.
    if (fd < 0 && !(errno == ENOENT && lstat(path.c_str(), &status) == 0)) fail_errno(path);
    if (fd >= 0) close(fd);
    if (made >= 0) std::remove(path.c_str());
}

// The sizes come from files, so even a 64-bit product may overflow.
inline int64_t product(std::initializer_list<int64_t> factors) {
    int64_t result = 1;
    for (int64_t factor : factors) {
        if (__builtin_mul_overflow(result, factor, &result)) fail("a size overflows 64 bits");
    }
    return result;
}

// Zeroed; the pages of large arrays are not touched before their first use.
template <typename T>
T *allocate(std::initializer_list<int64_t> shape) {
    int64_t count = product(shape);
    void *memory = std::calloc(static_cast<size_t>(std::max<int64_t>(count, 1)), sizeof(T));
    if (!memory) fail("out of memory for " + std::to_string(count) + " elements");
    return static_cast<T *>(memory);
}

// ---------------------------------------------------------------------------
// Checkpoint

struct Tensor {
    float *TransformerWeights::*weights;
    int64_t count;
};

inline void check_config(const Config &c, const std::string &path) {
    for (int dim : {c.vocab_size, c.hidden_dim, c.n_experts, c.experts_per_token,
                    c.intermediate_dim, c.n_layers, c.head_dim, c.n_attn_heads, c.n_kv_heads,
                    c.seq_len, c.initial_context_length}) {
        if (dim <= 0) fail(path + ": not a checkpoint: a dimension is " + std::to_string(dim));
    }
    if (c.sliding_window < 0) fail(path + ": sliding_window is negative");
    if (c.head_dim % 2 != 0) fail(path + ": head_dim is odd");
    if (c.n_attn_heads % c.n_kv_heads != 0) fail(path + ": heads are no multiple of kv heads");
    if (c.experts_per_token > c.n_experts) fail(path + ": fewer experts than experts per token");
}

// Prints the original's lines about an opened checkpoint.
inline void print_config(const Config &c) {
    const std::pair<const char *, int> counts[] = {
        {"vocab_size", c.vocab_size},
        {"hidden_dim", c.hidden_dim},
        {"n_experts", c.n_experts},
        {"experts_per_token", c.experts_per_token},
        {"intermediate_dim", c.intermediate_dim},
        {"n_layers", c.n_layers},
        {"head_dim", c.head_dim},
        {"n_attn_heads", c.n_attn_heads},
        {"n_kv_heads", c.n_kv_heads},
        {"max_seq_len", c.seq_len},
        {"init context len", c.initial_context_length},
    };
    for (const auto &[name, count] : counts) std::printf("%s: %d\n", name, count);
    std::printf("rope theta: %f\n", static_cast<double>(c.rope_theta));
    std::printf("rope_scaling_factor: %f\n", static_cast<double>(c.rope_scaling_factor));
    std::printf("sliding window: %d\n", c.sliding_window);
    std::printf("swiglu_limit: %f\n", static_cast<double>(c.swiglu_limit));
}

// Takes the tensors in the order of the file, so that one list gives both the
// pointers and the size that the file must have.
template <typename Visit>
void for_each_tensor(const Config &c, Visit visit) {
    using W = TransformerWeights;
    const int64_t vocab = c.vocab_size, hidden = c.hidden_dim, layers = c.n_layers;
    const int64_t experts = c.n_experts, intermediate = c.intermediate_dim;
    const int64_t q_dim = product({c.head_dim, c.n_attn_heads});
    const int64_t qkv_dim = q_dim + product({2, c.head_dim, c.n_kv_heads});
    const Tensor tensors[] = {
        {&W::token_embedding_table, product({vocab, hidden})},
        {&W::out, product({vocab, hidden})},
        {&W::rms_attn_w, product({layers, hidden})},
        {&W::rms_ffn_w, product({layers, hidden})},
        {&W::rms_out_w, hidden},
        {&W::w_qkv, product({layers, qkv_dim, hidden})},
        {&W::b_qkv, product({layers, qkv_dim})},
        {&W::w_o, product({layers, hidden, q_dim})},
        {&W::b_o, product({layers, hidden})},
        {&W::attn_sinks, product({layers, c.n_attn_heads})},
        {&W::w_router, product({layers, experts, hidden})},
        {&W::b_router, product({layers, experts})},
        {&W::w_mlp1, product({layers, experts, 2, intermediate, hidden})},
        {&W::b_mlp1, product({layers, experts, 2, intermediate})},
        {&W::w_mlp2, product({layers, experts, hidden, intermediate})},
        {&W::b_mlp2, product({layers, experts, hidden})},
    };
    for (const Tensor &tensor : tensors) visit(tensor);
}

inline int64_t checkpoint_bytes(const Config &c) {
    int64_t bytes = sizeof(Config);
    for_each_tensor(c, [&](const Tensor &tensor) {
        int64_t tensor_bytes = product({tensor.count, sizeof(float)});
        if (__builtin_add_overflow(bytes, tensor_bytes, &bytes)) fail("a size overflows 64 bits");
    });
    return bytes;
}

inline void map_checkpoint(Transformer *transformer, const std::string &path) {
    transformer->fd = open(path.c_str(), O_RDONLY);
    if (transformer->fd < 0) fail_errno(path);
    struct stat status;
    if (fstat(transformer->fd, &status) != 0) fail_errno(path);
    transformer->file_size = status.st_size;

    Config &config = transformer->config;
    if (pread(transformer->fd, &config, sizeof config, 0) != static_cast<ssize_t>(sizeof config)) {
        fail(path + ": too short for a checkpoint's header");
    }
    check_config(config, path);
    const int64_t expected = checkpoint_bytes(config);
    if (transformer->file_size != expected) {
        fail(path + ": has " + std::to_string(transformer->file_size) +
             " bytes, its header asks for " + std::to_string(expected));
    }

    void *data = mmap(nullptr, static_cast<size_t>(transformer->file_size), PROT_READ, MAP_PRIVATE,
                      transformer->fd, 0);
    if (data == MAP_FAILED) fail_errno(path);
    transformer->data = static_cast<float *>(data);
    float *next = transformer->data + sizeof(Config) / sizeof(float);
    for_each_tensor(config, [&](const Tensor &tensor) {
        transformer->weights.*tensor.weights = next;
        next += tensor.count;
    });
}

inline void fill_mask(float *mask, int64_t seq_len, int64_t window) {
    for (int64_t query = window; query < seq_len; query++) {
        std::fill_n(mask + query * seq_len, query - window + 1, -INFINITY);
    }
}

// k and v stay NULL: they point into the caches and are set at each position.
inline void allocate_run_state(RunState *s, const Config &c) {
    const int64_t q_dim = int64_t{c.head_dim} * c.n_attn_heads;
    const int64_t kv_dim = int64_t{c.head_dim} * c.n_kv_heads;
    s->x = allocate<float>({c.hidden_dim});
    s->t = allocate<float>({c.hidden_dim});
    s->tb = allocate<float>({q_dim});
    s->tb2 = allocate<float>({c.hidden_dim});
    s->router_score = allocate<float>({c.n_experts});
    s->topk_v = allocate<float>({c.experts_per_token});
    s->topk_i = allocate<int>({c.experts_per_token});
    s->mlp1_out = allocate<float>({2, c.intermediate_dim});
    s->gate = allocate<float>({c.intermediate_dim});
    s->up = allocate<float>({c.intermediate_dim});
    s->gate_up = allocate<float>({c.intermediate_dim});
    s->e_agg = allocate<float>({c.hidden_dim});
    s->qkv = allocate<float>({q_dim + 2 * kv_dim});
    s->q = allocate<float>({q_dim});
    s->att = allocate<float>({c.n_attn_heads, int64_t{c.seq_len} + 1});
    s->logits = allocate<float>({c.vocab_size});
    s->key_cache = allocate<float>({c.n_layers, c.seq_len, kv_dim});
    s->value_cache = allocate<float>({c.n_layers, c.seq_len, kv_dim});
    if (c.sliding_window > 0) {
        s->mask = allocate<float>({c.seq_len, c.seq_len});
        fill_mask(s->mask, c.seq_len, c.sliding_window);
    }
}

inline void build_transformer(Transformer *transformer, const std::string &path) {
    map_checkpoint(transformer, path);
    allocate_run_state(&transformer->state, transformer->config);
}

// Like the other free functions, it accepts a struct that is only partly built.
inline void free_transformer(Transformer *transformer) {
    RunState &s = transformer->state;
    for (float *buffer :
         {s.x, s.t, s.tb, s.tb2, s.router_score, s.topk_v, s.mlp1_out, s.gate, s.up, s.gate_up,
          s.e_agg, s.qkv, s.q, s.att, s.logits, s.key_cache, s.value_cache, s.mask}) {
        std::free(buffer);
    }
    std::free(s.topk_i);
    if (transformer->data) {
        munmap(transformer->data, static_cast<size_t>(transformer->file_size));
    }
    if (transformer->fd >= 0) close(transformer->fd);
}

// ---------------------------------------------------------------------------
// Tokenizer

inline int compare_bytes(const TokenIndex &a, const TokenIndex &b) {
    int order = std::memcmp(a.str, b.str, static_cast<size_t>(std::min(a.len, b.len)));
    return order != 0 ? order : a.len - b.len;
}

inline bool token_less(const TokenIndex &a, const TokenIndex &b) { return compare_bytes(a, b) < 0; }

// The id of exactly these bytes, or -1.
inline int find_token(const Tokenizer &tokenizer, const char *bytes, int len) {
    const TokenIndex key = {bytes, len, -1};
    const TokenIndex *end = tokenizer.sorted_vocab + tokenizer.vocab_size;
    const TokenIndex *found = std::lower_bound(
        static_cast<const TokenIndex *>(tokenizer.sorted_vocab), end, key, token_less);
    return found != end && compare_bytes(*found, key) == 0 ? found->id : -1;
}

inline void read_exactly(void *into, size_t bytes, std::FILE *file, const std::string &path) {
    if (std::fread(into, 1, bytes, file) != bytes) fail(path + ": ends too early");
}

inline void read_token(Tokenizer *tokenizer, int id, std::FILE *file, const std::string &path) {
    int len = 0;
    read_exactly(&tokenizer->scores[id], sizeof(float), file, path);
    read_exactly(&len, sizeof len, file, path);
    // A length this large means another format; do not try to allocate it.
    if (len < 0 || len > 1 << 20) {
        fail(path + ": token " + std::to_string(id) + " has length " + std::to_string(len));
    }
    tokenizer->vocab[id] = allocate<char>({int64_t{len} + 1});
    read_exactly(tokenizer->vocab[id], static_cast<size_t>(len), file, path);
    tokenizer->lengths[id] = len;
    tokenizer->sorted_vocab[id] = {tokenizer->vocab[id], len, id};
}

// The token of a byte: the entry "<0xHH>" if there is one, else the entry of the
// byte itself if it is printable or common white space, else none (-1).
inline int byte_token(const Tokenizer &tokenizer, int byte) {
    char name[8];
    int len = std::snprintf(name, sizeof name, "<0x%02X>", byte);
    int id = find_token(tokenizer, name, len);
    const char itself = static_cast<char>(byte);
    const bool plain = (byte >= 32 && byte <= 126) || byte == '\t' || byte == '\n' || byte == '\r';
    return id < 0 && plain ? find_token(tokenizer, &itself, 1) : id;
}

inline void build_tokenizer(Tokenizer *tokenizer, const std::string &path, int vocab_size) {
    File file = open_file(path, "rb");
    read_exactly(&tokenizer->max_token_length, sizeof(int), file.get(), path);
    if (tokenizer->max_token_length <= 0) fail(path + ": not a tokenizer file");
    tokenizer->vocab_size = vocab_size;
    tokenizer->vocab = allocate<char *>({vocab_size});
    tokenizer->lengths = allocate<int>({vocab_size});
    tokenizer->scores = allocate<float>({vocab_size});
    tokenizer->sorted_vocab = allocate<TokenIndex>({vocab_size});
    for (int id = 0; id < vocab_size; id++) read_token(tokenizer, id, file.get(), path);
    if (std::fgetc(file.get()) != EOF) {
        std::fprintf(stderr, "eval: %s holds more than the model's %d tokens\n", path.c_str(),
                     vocab_size);
    }

    std::stable_sort(tokenizer->sorted_vocab, tokenizer->sorted_vocab + vocab_size, token_less);
    for (int byte = 0; byte < 256; byte++) {
        tokenizer->byte_tokens[byte] = byte_token(*tokenizer, byte);
        tokenizer->byte_pieces[2 * byte] = static_cast<unsigned char>(byte);
    }
}

inline void free_tokenizer(Tokenizer *tokenizer) {
    for (int id = 0; tokenizer->vocab && id < tokenizer->vocab_size; id++) {
        std::free(tokenizer->vocab[id]);
    }
    std::free(tokenizer->vocab);
    std::free(tokenizer->lengths);
    std::free(tokenizer->scores);
    std::free(tokenizer->sorted_vocab);
}

// ---------------------------------------------------------------------------
// Sampler

inline void build_sampler(Sampler *sampler, int vocab_size, float temperature, float topp,
                          unsigned long long seed) {
    sampler->vocab_size = vocab_size;
    sampler->probindex = allocate<ProbIndex>({vocab_size});
    sampler->temperature = temperature;
    sampler->topp = topp;
    sampler->rng_state = seed;
}

inline void free_sampler(Sampler *sampler) { std::free(sampler->probindex); }

#endif  // EVAL_MODEL_H
