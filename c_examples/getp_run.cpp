// The drop-in: replaces the file with an eval program's own implementation of
// warm_up(), inference() and finish(), and calls libgetp's instead.
//
// Copy this file to getp-csrc/getp_run.cpp, or to src/getp/run.cpp in a version
// of the program that has it there, and give the library to the linker as one
// more source. Nothing else is changed. With $GETP the absolute path of the
// folder of libgetp.so:
//
//     LD_RUN_PATH=$GETP make runomp CPP_FILES="run.cpp tokenizer.cpp $GETP/libgetp.so"
//
// If the loop in the file that this one replaces is `while (pos + 1 < steps)`, as
// in newer versions, say "tokens" here: their answers have one token fewer than
// those of `while (pos < steps)`, which is "positions".
#define GETP_STEPS "positions"

// The library reads the program's structs in place. A program with other structs
// does not compile with this file; one with another stride between requests ends
// in warm_up(), before anything is answered.

#if __has_include("getp_eval.cpp")
#include "getp_eval.cpp"
#else
#include "eval.cpp"
#endif

#ifndef GETP_RUN
#define GETP_RUN

#if !__has_include("getp_eval.cpp")
// The run.cpp of such a version may call this function, which no file defines.
template <typename Flag>
inline void set_profiling_enabled(Flag) {}
#endif

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <type_traits>

// ---------------------------------------------------------------------------
// The structs' layout that libgetp expects

#define GETP_SIZE(type, bytes) \
    static_assert(sizeof(type) == bytes, "libgetp expects a " #type " of " #bytes " bytes")

#define GETP_FIELD(type, field, kind, offset)                                                \
    static_assert(                                                                           \
        std::is_same<decltype(type::field), kind>::value && offsetof(type, field) == offset, \
        "libgetp expects " #type "." #field " as " #kind " at byte " #offset)

GETP_SIZE(Config, 60);
GETP_FIELD(Config, vocab_size, int, 0);
GETP_FIELD(Config, hidden_dim, int, 4);
GETP_FIELD(Config, n_experts, int, 8);
GETP_FIELD(Config, experts_per_token, int, 12);
GETP_FIELD(Config, intermediate_dim, int, 16);
GETP_FIELD(Config, n_layers, int, 20);
GETP_FIELD(Config, head_dim, int, 24);
GETP_FIELD(Config, n_attn_heads, int, 28);
GETP_FIELD(Config, n_kv_heads, int, 32);
GETP_FIELD(Config, seq_len, int, 36);
GETP_FIELD(Config, initial_context_length, int, 40);
GETP_FIELD(Config, rope_theta, float, 44);
GETP_FIELD(Config, rope_scaling_factor, float, 48);
GETP_FIELD(Config, sliding_window, int, 52);
GETP_FIELD(Config, swiglu_limit, float, 56);

GETP_SIZE(TransformerWeights, 128);
GETP_FIELD(TransformerWeights, token_embedding_table, float *, 0);
GETP_FIELD(TransformerWeights, rms_attn_w, float *, 8);
GETP_FIELD(TransformerWeights, rms_ffn_w, float *, 16);
GETP_FIELD(TransformerWeights, w_qkv, float *, 24);
GETP_FIELD(TransformerWeights, w_o, float *, 32);
GETP_FIELD(TransformerWeights, b_qkv, float *, 40);
GETP_FIELD(TransformerWeights, b_o, float *, 48);
GETP_FIELD(TransformerWeights, attn_sinks, float *, 56);
GETP_FIELD(TransformerWeights, w_router, float *, 64);
GETP_FIELD(TransformerWeights, b_router, float *, 72);
GETP_FIELD(TransformerWeights, w_mlp1, float *, 80);
GETP_FIELD(TransformerWeights, w_mlp2, float *, 88);
GETP_FIELD(TransformerWeights, b_mlp1, float *, 96);
GETP_FIELD(TransformerWeights, b_mlp2, float *, 104);
GETP_FIELD(TransformerWeights, rms_out_w, float *, 112);
GETP_FIELD(TransformerWeights, out, float *, 120);

// The library saves and restores the run state, and does not read it.
GETP_SIZE(RunState, 168);

GETP_SIZE(Transformer, 384);
GETP_FIELD(Transformer, config, Config, 0);
GETP_FIELD(Transformer, weights, TransformerWeights, 64);
GETP_FIELD(Transformer, state, RunState, 192);
GETP_FIELD(Transformer, fd, int, 360);
GETP_FIELD(Transformer, data, float *, 368);
GETP_FIELD(Transformer, file_size, ssize_t, 376);

GETP_SIZE(TokenIndex, 16);
GETP_FIELD(TokenIndex, str, const char *, 0);
GETP_FIELD(TokenIndex, len, int, 8);
GETP_FIELD(TokenIndex, id, int, 12);

GETP_SIZE(Tokenizer, 1576);
GETP_FIELD(Tokenizer, vocab, char **, 0);
GETP_FIELD(Tokenizer, lengths, int *, 8);
GETP_FIELD(Tokenizer, scores, float *, 16);
GETP_FIELD(Tokenizer, vocab_size, int, 24);
GETP_FIELD(Tokenizer, max_token_length, int, 28);
GETP_FIELD(Tokenizer, sorted_vocab, TokenIndex *, 32);
GETP_FIELD(Tokenizer, byte_tokens, int[256], 40);
GETP_FIELD(Tokenizer, byte_pieces, unsigned char[512], 1064);

GETP_SIZE(ProbIndex, 8);
GETP_FIELD(ProbIndex, prob, float, 0);
GETP_FIELD(ProbIndex, index, int, 4);

GETP_SIZE(Sampler, 32);
GETP_FIELD(Sampler, vocab_size, int, 0);
GETP_FIELD(Sampler, probindex, ProbIndex *, 8);
GETP_FIELD(Sampler, temperature, float, 16);
GETP_FIELD(Sampler, topp, float, 20);
GETP_FIELD(Sampler, rng_state, unsigned long long, 24);

GETP_SIZE(Requests, 32);
GETP_FIELD(Requests, num_reqs, int, 0);
GETP_FIELD(Requests, max_token_len, int, 4);
GETP_FIELD(Requests, max_seq_len, int, 8);
GETP_FIELD(Requests, str_reqs, char *, 16);
GETP_FIELD(Requests, tok_gens, int *, 24);

#undef GETP_FIELD
#undef GETP_SIZE

// ---------------------------------------------------------------------------
// Options

// Before main(), where no other thread reads the environment. The user's own
// value goes before the file's.
static bool getp_set_steps() {
    const char *set = getenv("GETP_STEPS");
    return (set && *set) || setenv("GETP_STEPS", GETP_STEPS, 1) == 0;
}
[[maybe_unused]] static const bool getp_has_steps = getp_set_steps();

// ---------------------------------------------------------------------------
// warm_up; inference and finish are found in the library under their C++ names

namespace libgetp {
extern "C" void warm_up(Transformer *transformer, Tokenizer *tokenizer);
}

// Ends the program unless the stride between requests is max_token_len *
// (max_seq_len + 1) bytes and max_seq_len + 1 ints: answers would be garbled.
static void getp_check_requests() {
    char texts[32] = {};
    int tokens[32] = {};
    Requests requests = {};
    requests.num_reqs = 2;
    requests.max_token_len = 5;
    requests.max_seq_len = 3;
    requests.str_reqs = texts;
    requests.tok_gens = tokens;
    const long text_bytes = get_str_req_ptr(&requests, 1) - texts;
    const long answer_ints = get_tok_gen_ptr(&requests, 1) - tokens;
    if (text_bytes == 20 && answer_ints == 4) return;
    fprintf(stderr,
            "getp: error: this program's requests lie %ld bytes and %ld ints apart where libgetp "
            "expects "
            "20 and 4; its get_str_req_ptr and get_tok_gen_ptr must count max_seq_len + 1, so take "
            "a newer getp_eval.cpp\n",
            text_bytes, answer_ints);
    exit(EXIT_FAILURE);
}

void warm_up(Transformer *transformer, Tokenizer *tokenizer) {
    getp_check_requests();
    libgetp::warm_up(transformer, tokenizer);
}

// For versions of the program that pass three more arguments, which are ignored:
// the GETP_* environment variables are the options.
void warm_up(Transformer *transformer, Tokenizer *tokenizer, int /* batch_size */,
             int /* use_kv16 */, int /* odd_window */) {
    warm_up(transformer, tokenizer);
}

#endif  // GETP_RUN
