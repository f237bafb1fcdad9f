// The baseline: one request after the other, one token after the other, on the
// CPU and in float32. libgetp's answers are compared with it, so its arithmetic
// matters and not its speed:
//
// - a dot product rounds each product to float32 and adds it to a float64 sum
//   in the order of the index; the sum is rounded once. Rows may run in
//   parallel, but each row's order of additions is fixed;
// - where a product is added to a float32 accumulator (values, experts,
//   rotation) the compiler may fuse both into one FMA, as GCC does by default;
// - a softmax computes its maximum and its sum in float64.
//
// With GETP_LOGITS=FILE in the environment it writes the logits of every
// position, in the library's format. GETP_STEPS says what a request's steps
// count, as for the library; -m generate counts positions, as in the original.

#ifndef BASELINE_H
#define BASELINE_H

#include <vector>

// ---------------------------------------------------------------------------
// Encoding: byte-level BPE, lowest token id first

constexpr unsigned kNoMerge = UINT_MAX;
constexpr float kNeverMerged = -1e29f;  // special tokens have lower scores

inline bool is_digit(char byte) { return byte >= '0' && byte <= '9'; }

// Length of the next piece: digits are cut in threes from the left of their run,
// and each run of other bytes is one piece.
inline int piece_length(const char *text, int len) {
    const int limit = is_digit(text[0]) ? std::min(len, 3) : len;
    int end = 1;
    while (end < limit && is_digit(text[end]) == is_digit(text[0])) end++;
    return end;
}

// The id that merging bytes [start, end) of the piece would give.
inline unsigned merge_rank(const Tokenizer &tokenizer, const char *piece, int start, int end) {
    if (end - start > tokenizer.max_token_length) return kNoMerge;
    const int id = find_token(tokenizer, piece + start, end - start);
    return id >= 0 && tokenizer.scores[id] > kNeverMerged ? static_cast<unsigned>(id) : kNoMerge;
}

// Quadratic in the piece's length: every merge searches all adjacent pairs.
inline void encode_piece(const Tokenizer &tokenizer, const char *piece, int len,
                         std::vector<int> *tokens) {
    std::vector<int> bounds(static_cast<size_t>(len) + 1);  // part i is [bounds[i], bounds[i + 1])
    for (int i = 0; i <= len; i++) bounds[i] = i;
    std::vector<unsigned> ranks;  // of merging part i with part i + 1
    auto rank_at = [&](size_t i) { return merge_rank(tokenizer, piece, bounds[i], bounds[i + 2]); };
    for (size_t i = 0; i + 2 < bounds.size(); i++) ranks.push_back(rank_at(i));

    while (!ranks.empty()) {
        const auto best = std::min_element(ranks.begin(), ranks.end());
        if (*best == kNoMerge) break;
        const auto i = best - ranks.begin();
        bounds.erase(bounds.begin() + i + 1);
        ranks.erase(best);
        if (i > 0) ranks[i - 1] = rank_at(i - 1);
        if (i < static_cast<std::ptrdiff_t>(ranks.size())) ranks[i] = rank_at(i);
    }
    for (size_t i = 0; i + 1 < bounds.size(); i++) {
        const int id = find_token(tokenizer, piece + bounds[i], bounds[i + 1] - bounds[i]);
        tokens->push_back(std::max(id, 0));
    }
}

inline std::vector<int> encode(const Tokenizer &tokenizer, const char *text, int len,
                               int max_tokens) {
    std::vector<int> tokens;
    while (len > 0 && tokens.size() < static_cast<size_t>(max_tokens)) {
        const int piece = piece_length(text, len);
        encode_piece(tokenizer, text, piece, &tokens);
        text += piece;
        len -= piece;
    }
    if (tokens.size() > static_cast<size_t>(max_tokens)) tokens.resize(max_tokens);
    return tokens;
}

// ---------------------------------------------------------------------------
// Operations

inline float dot(const float *w, const float *x, int n) {
    double sum = 0;
    for (int j = 0; j < n; j++) {
        const float term = w[j] * x[j];
        sum += static_cast<double>(term);
    }
    return static_cast<float>(sum);
}

// out[d] = w[d, n] x[n] (+ bias[d], a float32 addition, if there is one)
inline void matmul(float *out, const float *x, const float *w, const float *bias, int n, int d) {
    constexpr int64_t kWorthThreads = 1 << 15;
#pragma omp parallel for if (int64_t{n} * d >= kWorthThreads)
    for (int row = 0; row < d; row++) {
        out[row] = dot(w + int64_t{row} * n, x, n);
        if (bias) out[row] += bias[row];
    }
}

inline void rmsnorm(float *out, const float *x, const float *weight, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) {
        const float square = x[i] * x[i];
        sum += static_cast<double>(square);
    }
    const float mean = static_cast<float>(sum / n + static_cast<double>(1e-5f));
    const double scale = 1.0f / sqrtf(mean);
    for (int i = 0; i < n; i++) out[i] = static_cast<float>(weight[i] * (scale * x[i]));
}

inline void softmax(float *x, int n) {
    const double max = *std::max_element(x, x + n);
    double sum = 0;
    for (int i = 0; i < n; i++) {
        x[i] = expf(static_cast<float>(x[i] - max));
        sum += x[i];
    }
    for (int i = 0; i < n; i++) x[i] = static_cast<float>(x[i] / sum);
}

inline void add(float *x, const float *y, int n) {
    for (int i = 0; i < n; i++) x[i] += y[i];
}

inline void add_scaled(float *x, float scale, const float *y, int n) {
    for (int i = 0; i < n; i++) x[i] += scale * y[i];
}

// ---------------------------------------------------------------------------
// Rotary position embedding, with YaRN's frequencies

struct Rope {
    float concentration = 1.0f;
    std::vector<float> inv_freq;  // [head_dim / 2]
    std::vector<float> cos, sin;  // [head_dim / 2], of the current position
};

// The dimension that rotates `rotations` times within the original context.
inline float yarn_dimension(const Config &c, float rotations) {
    constexpr double kPi = 3.14159265358979323846;
    const float context = static_cast<float>(c.initial_context_length);
    const float turns = static_cast<float>(context / (rotations * 2.0f * kPi));
    return (c.head_dim / 2) * logf(turns) / logf(c.rope_theta);
}

// High frequencies are kept, low ones are divided by the scaling factor, and
// those between are interpolated by a linear ramp.
inline Rope build_rope(const Config &c) {
    const int half = c.head_dim / 2;
    const bool scaled = c.rope_scaling_factor > 1.0f;
    const float low = yarn_dimension(c, 32.0f);
    const float high = yarn_dimension(c, 1.0f);
    Rope rope;
    rope.inv_freq.resize(half);
    rope.cos.resize(half);
    rope.sin.resize(half);
    if (scaled) rope.concentration = 0.1f * logf(c.rope_scaling_factor) + 1.0f;
    for (int i = 0; i < half; i++) {
        const float freq = powf(c.rope_theta, static_cast<float>(2 * i) / c.head_dim);
        const float extrapolated = 1.0f / freq;
        const float interpolated = 1.0f / (c.rope_scaling_factor * freq);
        const float ramp = std::min(std::max((i - low) / (high - low), 0.0f), 1.0f);
        const float kept = 1.0f - ramp;
        rope.inv_freq[i] =
            scaled ? interpolated * (1.0f - kept) + extrapolated * kept : extrapolated;
    }
    return rope;
}

inline void set_position(Rope *rope, int pos) {
    for (size_t i = 0; i < rope->inv_freq.size(); i++) {
        const float angle = static_cast<float>(pos) * rope->inv_freq[i];
        rope->cos[i] = cosf(angle) * rope->concentration;
        rope->sin[i] = sinf(angle) * rope->concentration;
    }
}

// Rotates the pairs (x_i, x_{i + head_dim / 2}) of every head of x.
inline void rotate(float *x, const Rope &rope, int n_heads) {
    const int half = static_cast<int>(rope.inv_freq.size());
    for (int head = 0; head < n_heads; head++, x += 2 * half) {
        for (int i = 0; i < half; i++) {
            const float first = x[i], second = x[i + half];
            x[i] = first * rope.cos[i] - second * rope.sin[i];
            x[i + half] = second * rope.cos[i] + first * rope.sin[i];
        }
    }
}

// ---------------------------------------------------------------------------
// Forward pass of one token

// Attention of one query head over positions 0..pos. The sink counts in the
// softmax's maximum and sum, and has no value.
inline void attend_head(const Transformer &transformer, int64_t layer, int pos, int head) {
    const Config &c = transformer.config;
    const RunState &s = transformer.state;
    const int64_t kv_dim = int64_t{c.head_dim} * c.n_kv_heads;
    const int64_t kv_head = head / (c.n_attn_heads / c.n_kv_heads);
    const int64_t cache_offset = layer * c.seq_len * kv_dim + kv_head * c.head_dim;
    const float *keys = s.key_cache + cache_offset;
    const float *values = s.value_cache + cache_offset;
    const float *q = s.q + int64_t{head} * c.head_dim;
    const bool windowed = s.mask && layer % 2 == 0;
    const float *mask = windowed ? s.mask + int64_t{pos} * c.seq_len : nullptr;
    float *scores = s.att + head * (int64_t{c.seq_len} + 1);

    for (int j = 0; j <= pos; j++) {
        double score = 0;
        for (int i = 0; i < c.head_dim; i++) {
            const float term = q[i] * keys[j * kv_dim + i];
            score += static_cast<double>(term);
        }
        score /= sqrtf(static_cast<float>(c.head_dim));
        scores[j] = static_cast<float>(mask ? score + mask[j] : score);
    }
    scores[pos + 1] = transformer.weights.attn_sinks[layer * c.n_attn_heads + head];
    softmax(scores, pos + 2);

    float *out = s.tb + int64_t{head} * c.head_dim;
    std::fill_n(out, c.head_dim, 0.0f);
    for (int j = 0; j <= pos; j++) add_scaled(out, scores[j], values + j * kv_dim, c.head_dim);
}

// x += W_o attention(rmsnorm(x)) + b_o
inline void attention_block(Transformer *transformer, const Rope &rope, int64_t layer, int pos) {
    const Config &c = transformer->config;
    const TransformerWeights &w = transformer->weights;
    RunState &s = transformer->state;
    const int q_dim = c.head_dim * c.n_attn_heads;
    const int kv_dim = c.head_dim * c.n_kv_heads;
    const int64_t qkv_dim = q_dim + 2 * kv_dim;

    rmsnorm(s.t, s.x, w.rms_attn_w + layer * c.hidden_dim, c.hidden_dim);
    matmul(s.qkv, s.t, w.w_qkv + layer * qkv_dim * c.hidden_dim, w.b_qkv + layer * qkv_dim,
           c.hidden_dim, static_cast<int>(qkv_dim));
    s.k = s.key_cache + (layer * c.seq_len + pos) * kv_dim;
    s.v = s.value_cache + (layer * c.seq_len + pos) * kv_dim;
    std::copy_n(s.qkv, q_dim, s.q);
    std::copy_n(s.qkv + q_dim, kv_dim, s.k);
    std::copy_n(s.qkv + q_dim + kv_dim, kv_dim, s.v);
    rotate(s.q, rope, c.n_attn_heads);
    rotate(s.k, rope, c.n_kv_heads);

    constexpr int kWorthThreads = 1 << 12;
#pragma omp parallel for if (q_dim * (pos + 1) >= kWorthThreads)
    for (int head = 0; head < c.n_attn_heads; head++) {
        attend_head(*transformer, layer, pos, head);
    }

    matmul(s.tb2, s.tb, w.w_o + layer * c.hidden_dim * q_dim, w.b_o + layer * c.hidden_dim, q_dim,
           c.hidden_dim);
    add(s.x, s.tb2, c.hidden_dim);
}

// The experts_per_token largest scores; of equal ones the lower index first.
inline void pick_experts(RunState *s, const Config &c) {
    for (int rank = 0; rank < c.experts_per_token; rank++) {
        int best = -1;
        for (int expert = 0; expert < c.n_experts; expert++) {
            const bool picked = std::find(s->topk_i, s->topk_i + rank, expert) != s->topk_i + rank;
            if (!picked && (best < 0 || s->router_score[expert] > s->router_score[best])) {
                best = expert;
            }
        }
        s->topk_i[rank] = best;
        s->topk_v[rank] = s->router_score[best];
    }
}

// gate_up = gate * sigmoid(1.702 * gate) * (up + 1); the gate has no lower clamp.
inline void swiglu(RunState *s, const Config &c) {
    for (int i = 0; i < c.intermediate_dim; i++) {
        s->gate[i] = std::min(s->mlp1_out[2 * i], c.swiglu_limit);
        s->up[i] = std::min(std::max(s->mlp1_out[2 * i + 1], -c.swiglu_limit), c.swiglu_limit);
        float value = s->gate[i];
        value *= 1.0f / (1.0f + expf(-1.702f * value));
        value *= s->up[i] + 1.0f;
        s->gate_up[i] = value;
    }
}

// tb2 = the expert's output for the normalized token t
inline void run_expert(Transformer *transformer, int64_t layer, int expert) {
    const Config &c = transformer->config;
    const TransformerWeights &w = transformer->weights;
    RunState &s = transformer->state;
    const int64_t index = layer * c.n_experts + expert;
    const int64_t hidden = c.hidden_dim, intermediate = c.intermediate_dim;

    matmul(s.mlp1_out, s.t, w.w_mlp1 + index * 2 * intermediate * hidden,
           w.b_mlp1 + index * 2 * intermediate, c.hidden_dim, 2 * c.intermediate_dim);
    swiglu(&s, c);
    matmul(s.tb2, s.gate_up, w.w_mlp2 + index * hidden * intermediate, w.b_mlp2 + index * hidden,
           c.intermediate_dim, c.hidden_dim);
}

// x += the weighted sum of the selected experts(rmsnorm(x)), added in the order
// of the experts' index, not of their scores
inline void moe_block(Transformer *transformer, int64_t layer) {
    const Config &c = transformer->config;
    const TransformerWeights &w = transformer->weights;
    RunState &s = transformer->state;

    rmsnorm(s.t, s.x, w.rms_ffn_w + layer * c.hidden_dim, c.hidden_dim);
    matmul(s.router_score, s.t, w.w_router + layer * c.n_experts * c.hidden_dim,
           w.b_router + layer * c.n_experts, c.hidden_dim, c.n_experts);
    pick_experts(&s, c);
    softmax(s.topk_v, c.experts_per_token);

    std::fill_n(s.e_agg, c.hidden_dim, 0.0f);
    for (int expert = 0; expert < c.n_experts; expert++) {
        const int *end = s.topk_i + c.experts_per_token;
        const int *picked = std::find(static_cast<const int *>(s.topk_i), end, expert);
        if (picked == end) continue;
        run_expert(transformer, layer, expert);
        add_scaled(s.e_agg, s.topk_v[picked - s.topk_i], s.tb2, c.hidden_dim);
    }
    add(s.x, s.e_agg, c.hidden_dim);
}

// Computes the logits after `token` into state.logits.
inline void forward(Transformer *transformer, Rope *rope, int token, int pos) {
    const Config &c = transformer->config;
    const TransformerWeights &w = transformer->weights;
    RunState &s = transformer->state;

    std::copy_n(w.token_embedding_table + int64_t{token} * c.hidden_dim, c.hidden_dim, s.x);
    set_position(rope, pos);
    for (int layer = 0; layer < c.n_layers; layer++) {
        attention_block(transformer, *rope, layer, pos);
        moe_block(transformer, layer);
    }
    rmsnorm(s.x, s.x, w.rms_out_w, c.hidden_dim);
    matmul(s.logits, s.x, w.out, nullptr, c.hidden_dim, c.vocab_size);
}

// ---------------------------------------------------------------------------
// Sampling

// xorshift64*, the upper 24 of its 32 bits as a float in [0, 1)
inline float flip_coin(unsigned long long *rng) {
    *rng ^= *rng >> 12;
    *rng ^= *rng << 25;
    *rng ^= *rng >> 27;
    const unsigned bits = static_cast<unsigned>((*rng * 0x2545F4914F6CDD1DULL) >> 32);
    return static_cast<float>(bits >> 8) / 16777216.0f;
}

// Where the requests' random numbers come from.
enum class Draws {
    kOwn,     // as in the library: a state for each request
    kShared,  // as in the original: one state, which all requests advance in turn
};

// The first state of a request's own random stream, derived by splitmix64, so that
// an answer does not depend on the requests before it. Request 0 has the
// sampler's own state.
inline unsigned long long request_rng(unsigned long long base, int request) {
    if (request == 0) return base;
    unsigned long long z = base + 0x9E3779B97F4A7C15ULL * static_cast<unsigned>(request);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    z ^= z >> 31;
    return z != 0 ? z : 0x9E3779B97F4A7C15ULL;  // xorshift maps 0 to 0
}

// The index of the largest value, the lowest of several.
inline int argmax(const float *values, int n) {
    return static_cast<int>(std::max_element(values, values + n) - values);
}

inline int sample_all(const float *probs, int n, float coin) {
    float running = 0.0f;
    for (int i = 0; i < n; i++) {
        running += probs[i];
        if (coin < running) return i;
    }
    return n - 1;
}

// Nucleus sampling: samples from the most probable tokens whose sum exceeds topp.
inline int sample_nucleus(const float *probs, const Sampler &sampler, float coin) {
    ProbIndex *kept = sampler.probindex;
    int n_kept = 0;
    // Tokens with a lower probability cannot be in the nucleus.
    const float cutoff = (1.0f - sampler.topp) / (sampler.vocab_size - 1);
    for (int i = 0; i < sampler.vocab_size; i++) {
        if (probs[i] >= cutoff) kept[n_kept++] = {probs[i], i};
    }
    // With nearly uniform probabilities and a tiny topp there may be none.
    if (n_kept == 0) return argmax(probs, sampler.vocab_size);
    std::stable_sort(kept, kept + n_kept,
                     [](const ProbIndex &a, const ProbIndex &b) { return a.prob > b.prob; });

    float mass = 0.0f;
    int last = 0;
    for (; last < n_kept; last++) {
        mass += kept[last].prob;
        if (mass > sampler.topp) break;
    }
    last = std::min(last, n_kept - 1);

    const float target = coin * mass;
    float running = 0.0f;
    for (int i = 0; i < last; i++) {
        running += kept[i].prob;
        if (target < running) return kept[i].index;
    }
    return kept[last].index;
}

// Samples a token. Unless greedy, turns the logits into probabilities in place.
inline int sample(const Sampler &sampler, float *logits, unsigned long long *rng) {
    const int n = sampler.vocab_size;
    const int greedy = argmax(logits, n);
    if (sampler.temperature == 0.0f) return greedy;
    const float coin = flip_coin(rng);
    // With so small a temperature the original's probabilities are no numbers.
    const bool overflows =
        std::isfinite(logits[greedy]) && !std::isfinite(logits[greedy] / sampler.temperature);
    if (overflows) return greedy;
    for (int i = 0; i < n; i++) logits[i] /= sampler.temperature;
    softmax(logits, n);
    const bool nucleus = sampler.topp > 0.0f && sampler.topp < 1.0f;
    return nucleus ? sample_nucleus(logits, sampler, coin) : sample_all(logits, n, coin);
}

// ---------------------------------------------------------------------------
// Logits file

// A header (magic, vocab_size, 0), then for each position a record (request,
// position, token, 0, float32 logits[vocab_size]); other numbers are uint32.
class LogitsFile {
public:
    explicit LogitsFile(int vocab_size) : vocab_size_(static_cast<uint32_t>(vocab_size)) {
        const char *path = std::getenv("GETP_LOGITS");
        if (!path || !*path) return;
        path_ = path;
        file_ = open_file(path_, "wb");
        const uint32_t header[2] = {vocab_size_, 0};
        write("GETPLOG1", 8);
        write(header, sizeof header);
    }

    void record(int request, int pos, int token, const float *logits) {
        if (!file_) return;
        const uint32_t header[4] = {static_cast<uint32_t>(request), static_cast<uint32_t>(pos),
                                    static_cast<uint32_t>(token), 0};
        write(header, sizeof header);
        write(logits, sizeof(float) * vocab_size_);
    }

    // Reports errors that occur only when the buffer is written out.
    void close() {
        if (file_ && std::fclose(file_.release()) != 0) fail_errno(path_);
    }

private:
    void write(const void *bytes, size_t count) {
        if (std::fwrite(bytes, 1, count, file_.get()) != count) fail_errno(path_);
    }

    uint32_t vocab_size_;
    std::string path_;
    File file_;
};

// ---------------------------------------------------------------------------
// Generation

inline bool is_end_token(int token) { return token == 199999 || token == 200002; }

// What all requests share.
struct Baseline {
    Transformer *transformer;
    const Sampler *sampler;
    int positions;  // the most of a request
    Rope rope;
    LogitsFile logits_file;
};

// Computes the prompt, then samples tokens and passes each to `take`.
template <typename Take>
void generate(Baseline *baseline, const std::vector<int> &prompt, int request,
              unsigned long long *rng, Take take) {
    float *logits = baseline->transformer->state.logits;
    const int n_prompt = static_cast<int>(prompt.size());
    int token = prompt[0];
    for (int pos = 0; pos < baseline->positions; pos++) {
        forward(baseline->transformer, &baseline->rope, token, pos);
        baseline->logits_file.record(request, pos, token, logits);
        if (pos + 1 < n_prompt) {
            token = prompt[pos + 1];
            continue;
        }
        token = sample(*baseline->sampler, logits, rng);
        take(token);
        if (is_end_token(token)) break;
    }
}

inline std::vector<int> encode_request(const Requests &requests, int request,
                                       const Tokenizer &tokenizer, int max_tokens) {
    const char *text = get_str_req_ptr(&requests, request);
    // A text that fills its slot has no NUL after it.
    const size_t len = strnlen(text, static_cast<size_t>(text_bytes(requests)));
    return encode(tokenizer, text, static_cast<int>(len), max_tokens);
}

// The most positions of a request. The original's loop is `while (pos < steps)`,
// or in newer versions `while (pos + 1 < steps)`.
inline int most_positions(int steps) {
    const char *set = std::getenv("GETP_STEPS");
    const std::string rule = set && *set ? set : "positions";
    if (rule == "positions") return steps;
    if (rule == "tokens") return steps - 1;
    fail("GETP_STEPS=" + rule + " is not known; use positions or tokens");
}

// inference() of the baseline, with the library's arguments and result. `draws`
// says nothing about greedy requests, nor about the first one.
inline long long baseline_inference(Transformer *transformer, Tokenizer *tokenizer,
                                    Sampler *sampler, Requests *requests, Draws draws) {
    const Config &config = transformer->config;
    const int positions = most_positions(requests->max_seq_len);
    Baseline baseline = {transformer, sampler, positions, build_rope(config),
                         LogitsFile(config.vocab_size)};
    const unsigned long long base = sampler->rng_state;
    long long n_tokens = 0;
    for (int request = 0; request < requests->num_reqs; request++) {
        const std::vector<int> prompt =
            encode_request(*requests, request, *tokenizer, config.initial_context_length);
        int *answer = get_tok_gen_ptr(requests, request);
        if (prompt.empty() || prompt.size() > static_cast<size_t>(positions)) {
            std::fprintf(stderr, "eval: request %d has %zu tokens, 1 to %d fit\n", request,
                         prompt.size(), positions);
            answer[0] = -1;
            continue;
        }
        const bool shared = draws == Draws::kShared;
        unsigned long long rng = shared ? sampler->rng_state : request_rng(base, request);
        int n_answer = 0;
        generate(&baseline, prompt, request, &rng, [&](int token) { answer[n_answer++] = token; });
        answer[n_answer] = -1;
        n_tokens += n_answer;
        if (shared || request == 0) sampler->rng_state = rng;
    }
    baseline.logits_file.close();
    return n_tokens;
}

// Prints a token's text; a token written <0x0A> stands for that byte.
inline void print_piece(const Tokenizer &tokenizer, int token) {
    const char *piece = tokenizer.vocab[token];
    unsigned byte = 0;
    if (tokenizer.lengths[token] == 6 && piece[5] == '>' &&
        std::sscanf(piece, "<0x%2x", &byte) == 1) {
        piece = reinterpret_cast<const char *>(&tokenizer.byte_pieces[2 * byte]);
    }
    std::fputs(piece, stdout);
    std::fflush(stdout);
}

// Prints a prompt, and its answer token by token.
inline void generate_text(Transformer *transformer, const Tokenizer &tokenizer,
                          const Sampler &sampler, const std::string &text, int steps) {
    const Config &config = transformer->config;
    const std::vector<int> prompt = encode(tokenizer, text.c_str(), static_cast<int>(text.size()),
                                           config.initial_context_length);
    Baseline baseline = {transformer, &sampler, steps, build_rope(config),
                         LogitsFile(config.vocab_size)};
    unsigned long long rng = sampler.rng_state;
    int n_answer = 0;
    // The tokens that are fed, and the one that would be next.
    const size_t n_printed = std::min(prompt.size(), static_cast<size_t>(steps) + 1);
    for (size_t i = 0; i < n_printed; i++) print_piece(tokenizer, prompt[i]);
    const double elapsed_s = seconds_of([&] {
        generate(&baseline, prompt, 0, &rng, [&](int token) {
            n_answer++;
            if (!is_end_token(token)) print_piece(tokenizer, token);
        });
    });
    baseline.logits_file.close();
    std::printf("\n");
    const double positions = static_cast<double>(prompt.size()) + n_answer - 1;
    std::fprintf(stderr, "achieved tok/s: %f\n", positions / elapsed_s);
}

#endif  // BASELINE_H
