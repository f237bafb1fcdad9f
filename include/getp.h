/* getp: offline batched inference of gpt-oss. Generated from src/abi by cbindgen; do not edit.
 *
 * A program that declares the eval program's structs itself does so before it includes this file, and defines
 * GETP_NO_DRIVER_STRUCTS:
 *
 *     typedef struct { ... } Transformer;   likewise Tokenizer, Sampler, Requests
 *     #define GETP_NO_DRIVER_STRUCTS
 *     #include "getp.h"
 *
 * In C++ this file then does not declare warm_up, inference and finish either: such a program declares them itself,
 * without extern "C". The library exports them under both their C and their C++ names.
 *
 * A pointer passed in may be NULL, which is an error unless its comment allows it; else it points to valid objects of
 * its type, as many as the comment says. A handle comes from its open function and has not been closed.
 *
 * Every function may be called from any thread. Calls on one transformer run one after another, calls on different ones
 * concurrently. docs/host.md says what a program must not do while a transformer is warmed up. No function exits or
 * aborts the program. A failure is one line on stderr, the return value named in the function's comment, the text of
 * getp_last_error, and the number of getp_last_status. */


#ifndef GETP_H
#define GETP_H

#include <stddef.h>
#include <stdint.h>

/* C90 and C++98 have no long long, which the eval program's structs and functions have. */
#ifdef __GNUC__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wlong-long"
#endif

/* Sets all fields of *options to their defaults, and its size to the one in this header, so that the program and the
 * library may be of different versions. */
#define getp_options_init(options) getp_options_init_sized((options), sizeof *(options))
#define getp_request_init(request) getp_request_init_sized((request), sizeof *(request))
#define getp_batch_options_init(options) getp_batch_options_init_sized((options), sizeof *(options))
#define getp_text_options_init(options) getp_text_options_init_sized((options), sizeof *(options))

/* Writes a transformer's counters to *stats, as many as this header has. */
#define getp_stats(transformer, stats) getp_stats_sized((transformer), (stats), sizeof *(stats))

/* Writes what a model's files say of its answers to *defaults, as much as this header has. */
#define getp_model_defaults(model, defaults) getp_model_defaults_sized((model), (defaults), sizeof *(defaults))

/* The version of this header; getp_version() is the library's. */
#define GETP_VERSION "0.1.0"
#define GETP_VERSION_MAJOR 0
#define GETP_VERSION_MINOR 1
#define GETP_VERSION_PATCH 0

/* `getp_request.temperature` and `topp`: what the model's files say. */
#define GETP_OF_MODEL -1.0

/* The most that `getp_request.top_logprobs` may be. */
#define GETP_MOST_TOP_LOGPROBS 20

/* `getp_event.end`: the request goes on, and more events come. */
#define GETP_END_NONE 0

/* `getp_event.end`: the answer ends with one of the model's end tokens, `end_token`. */
#define GETP_END_TOKEN 1

/* `getp_event.end`: the answer ends with one of the request's stop tokens, `end_token`. */
#define GETP_END_STOP 2

/* `getp_event.end`: the answer has as many tokens as it may have. */
#define GETP_END_LENGTH 3

/* `getp_event.end`: the request was cancelled. */
#define GETP_END_CANCELLED 4

/* `getp_event.end`: the request cannot be answered; `status` and `why` say why. */
#define GETP_END_REFUSED 5

/* `getp_event.end`: the request could not be answered to its end; `status` and `why` say why. */
#define GETP_END_FAILED 6

/* A switch of `getp_options` that is on. */
#define GETP_ON 1

/* A switch of `getp_options` that is off. */
#define GETP_OFF 2

/* `getp_options.print`: only answers, each after its request's number. */
#define GETP_ANSWER 3

/* `getp_options.precision`: the eval program's logits, on the CPU bit for bit, on GPUs within a tolerance. */
#define GETP_EXACT 1

/* `getp_options.precision`: the fastest arithmetic within the tolerances that docs/precision.md states. */
#define GETP_FAST 2

/* `getp_options.steps`: a request's steps are the positions that are computed. */
#define GETP_POSITIONS 1

/* `getp_options.steps`: a request's steps are the tokens of its prompt and answer together. */
#define GETP_TOKENS 2

/* The generator's first state for the seed 0: with a state of 0 it would give the number 0 again and again. */
#define GETP_STATE_OF_SEED_0 UINT64_C(11400714819323198485)

/* Requests on their way through a model. */
typedef struct getp_batch getp_batch;

/* Decodes the tokens of one answer while they come. */
typedef struct getp_decoder getp_decoder;

/* An open model. */
typedef struct getp_model getp_model;

/* Reads the tokens of one answer while they come. */
typedef struct getp_harmony_reader getp_harmony_reader;

/* Requests read from a file: the program's struct, and the memory that it points to. */
typedef struct getp_requests getp_requests;

/* How tokens are sampled. */
typedef struct getp_sampler getp_sampler;

/* A vocabulary read from a file: the program's struct, and the memory that it points to. */
typedef struct getp_tokenizer getp_tokenizer;

/* The result of a call. Failures are negative. */
typedef int getp_status;

/* One of the most probable tokens. It gets no more fields, since there are arrays of it. */
typedef struct {
  /* The token. */
  int token;
  /* Its log-probability. */
  float logprob;
} getp_top_logprob;

/* The log-probability of a token: the natural logarithm of its share in the softmax of the logits, whatever the
 * request's temperature is. It gets no more fields, since events have arrays of it. */
typedef struct {
  /* The token. */
  int token;
  /* Its log-probability. */
  float logprob;
  /* The most probable tokens, the most probable one first: `top_count`. */
  const getp_top_logprob *top;
  /* How many. */
  size_t top_count;
} getp_logprob;

/* What a program is told of a request. The library makes it, so that it can grow: a program takes only pointers to it.
 */
typedef struct {
  /* sizeof(getp_event) as the library knows it: an older one has no field behind so many bytes. */
  size_t size;
  /* The request's number within the batch. */
  uint64_t id;
  /* The request's `tag`. */
  uint64_t tag;
  /* The tokens of the answer since the request's event before: `count` ids, the token that ends the answer included. */
  const int *tokens;
  /* How many. */
  size_t count;
  /* GETP_END_NONE, or how the request has ended; then this is its last event. */
  int end;
  /* The token that ended the answer, or -1. */
  int end_token;
  /* GETP_OK, or what a request that was refused or has failed came to. */
  getp_status status;
  /* 0: a later version may use it. */
  int reserved;
  /* The reason in words, one line; NULL if `status` is GETP_OK. */
  const char *why;
  /* Tokens of the prompt. */
  size_t prompt_tokens;
  /* Tokens of the answer so far. */
  size_t answer_tokens;
  /* When the request was submitted, in seconds since the batch was opened, as the times below. -1 for what has not
   * happened. */
  double submitted;
  /* When a device began with it. */
  double started;
  /* When its first token came. */
  double first_token;
  /* When its last token so far came. */
  double last_token;
  /* The log-probabilities of `tokens`, `count` of them, if the request wants these; otherwise NULL. */
  const getp_logprob *logprobs;
  /* Those of the prompt's tokens since the request's event before, from its second token on: `prompt_count`, if the
   * request wants these. */
  const getp_logprob *prompt_logprobs;
  /* How many. */
  size_t prompt_count;
} getp_event;

/* How to open a batch. Call `getp_batch_options_init` before setting fields. */
typedef struct {
  /* sizeof(getp_batch_options) as the program knows it, set by `getp_batch_options_init`. */
  size_t size;
  /* Called with each event, on one thread of the library. It may call any function, must not throw, and has the
   * event until it returns. With NULL, the default, `getp_batch_next` gives the events. */
  void (*on_event)(void *context, const getp_event *event);
  /* Passed to `on_event`. */
  void *context;
  /* If it is not NULL, ids that the model has and this vocabulary does not, with which the model's is padded, are
   * never sampled. With NULL, the default, all may be. Log-probabilities are over all of the model's ids in any
   * case, and prompts may have them. It is read while the batch is opened alone. */
  const getp_tokenizer *tokenizer;
} getp_batch_options;

/* What is asked of a model. Call `getp_request_init` before setting fields; all that is pointed to is read during
 * `getp_batch_submit` alone. */
typedef struct {
  /* sizeof(getp_request) as the program knows it, set by `getp_request_init`. */
  size_t size;
  /* The prompt: `prompt_length` ids, each within the model's vocabulary. An empty one is refused by an event. */
  const int *prompt;
  /* Tokens of the prompt. */
  size_t prompt_length;
  /* The most tokens of the answer, the one that ends it included; 0, the default: as many as the model's context (of
   * a .bin file, its seq_len) and the KV cache have room for, and at least one, but no more than
   * `getp_defaults.max_tokens`. A .bin file's seq_len is no limit for other numbers. */
  size_t max_tokens;
  /* Before the answer has so many tokens, no token ends it: end and stop tokens are tokens like others till then. */
  size_t min_tokens;
  /* 0 is greedy decoding. Finite and not negative, or GETP_OF_MODEL, the default: that of `getp_defaults`. */
  float temperature;
  /* Within (0, 1): top-p (nucleus) sampling; with any other number all tokens can be sampled. GETP_OF_MODEL, the
   * default: that of `getp_defaults`. */
  float topp;
  /* The first state of the request's random number generator, GETP_STATE_OF_SEED_0 for 0, the default: the request
   * draws what request 0 of `inference` draws from a sampler with that seed. */
  uint64_t seed;
  /* Tokens that end the answer beside the model's end tokens, those of `getp_defaults`: `stop_length` ids. */
  const int *stop;
  /* How many. */
  size_t stop_length;
  /* GETP_ON: the model's end tokens end no answer. */
  int ignore_end;
  /* The fewest tokens of an event that does not end the request. 0, the default: the only event is the last one,
   * with the whole answer; 1: each token is an event, unless several have come before the program takes it. */
  int tokens_per_event;
  /* Given back with each event. */
  uint64_t tag;
  /* GETP_ON: events have the log-probability of each token of the answer. */
  int logprobs;
  /* GETP_ON: events have the log-probability of each token of the prompt but the first. */
  int prompt_logprobs;
  /* How many of the most probable tokens events have for each of those: 0, the default, to GETP_MOST_TOP_LOGPROBS. */
  int top_logprobs;
  /* 0: a later version may use it. */
  int reserved;
} getp_request;

#if !defined(GETP_NO_DRIVER_STRUCTS)
/* The model's dimensions. */
typedef struct {
  /* Tokens in the vocabulary. */
  int vocab_size;
  /* Width of the residual stream. */
  int hidden_dim;
  /* Experts in each layer. */
  int n_experts;
  /* Experts that the router selects for each token. */
  int experts_per_token;
  /* Width of an expert's inner activations. */
  int intermediate_dim;
  /* Layers. */
  int n_layers;
  /* Width of an attention head. */
  int head_dim;
  /* Query heads. */
  int n_attn_heads;
  /* Key and value heads. */
  int n_kv_heads;
  /* Positions the checkpoint was exported for. */
  int seq_len;
  /* Context length before YaRN's scaling; in `inference`, the most tokens a prompt may have. */
  int initial_context_length;
  /* Base of the rotary frequencies. */
  float rope_theta;
  /* YaRN's scaling factor. */
  float rope_scaling_factor;
  /* Positions that a sliding-window layer attends to; 0 if there is no such layer. */
  int sliding_window;
  /* Limit that gate and up are clamped to in the experts' SwiGLU. */
  float swiglu_limit;
} Config;
#endif

#if !defined(GETP_NO_DRIVER_STRUCTS)
/* The weights, float32, row-major, outputs before inputs.
 *
 * Between `warm_up` and `finish` these are addresses of the first replica's packed weights, not for the program to
 * use; `finish` restores the program's own. On a GPU they are device addresses. For arrays with a layer dimension it
 * is layer 0's. Vectors are float32. `token_embedding_table` and `w_router` are BF16 in row-major tiles of 32 rows on
 * a GPU; the other matrices there are MXFP4, FP16 or BF16 in the layout of the matrix cores. A matrix that no narrower
 * format holds exactly is float32 in row-major tiles of 32 rows. */
typedef struct {
  /* `[vocab_size, hidden_dim]` */
  float *token_embedding_table;
  /* `[n_layers, hidden_dim]` */
  float *rms_attn_w;
  /* `[n_layers, hidden_dim]` */
  float *rms_ffn_w;
  /* `[n_layers, head_dim * (n_attn_heads + 2 * n_kv_heads), hidden_dim]`: all queries, then keys, then values */
  float *w_qkv;
  /* `[n_layers, hidden_dim, head_dim * n_attn_heads]` */
  float *w_o;
  /* `[n_layers, head_dim * (n_attn_heads + 2 * n_kv_heads)]` */
  float *b_qkv;
  /* `[n_layers, hidden_dim]` */
  float *b_o;
  /* `[n_layers, n_attn_heads]` */
  float *attn_sinks;
  /* `[n_layers, n_experts, hidden_dim]` */
  float *w_router;
  /* `[n_layers, n_experts]` */
  float *b_router;
  /* `[n_layers, n_experts, 2 * intermediate_dim, hidden_dim]`: rows alternate gate, up */
  float *w_mlp1;
  /* `[n_layers, n_experts, hidden_dim, intermediate_dim]` */
  float *w_mlp2;
  /* `[n_layers, n_experts, 2 * intermediate_dim]` */
  float *b_mlp1;
  /* `[n_layers, n_experts, hidden_dim]` */
  float *b_mlp2;
  /* `[hidden_dim]` */
  float *rms_out_w;
  /* `[vocab_size, hidden_dim]` */
  float *out;
} TransformerWeights;
#endif

#if !defined(GETP_NO_DRIVER_STRUCTS)
/* The program's scratch memory for one token, which the library does not use.
 *
 * Between `warm_up` and `finish`, `x`, `t`, `tb`, `mlp1_out` and `qkv` are addresses of the first replica's
 * activations, `key_cache` that of its KV cache, and the others NULL. On a GPU they are device addresses. */
typedef struct {
  /* `[hidden_dim]` */
  float *x;
  /* `[hidden_dim]` */
  float *t;
  /* `[head_dim * n_attn_heads]` */
  float *tb;
  /* `[hidden_dim]` */
  float *tb2;
  /* `[n_experts]` */
  float *router_score;
  /* `[experts_per_token]` */
  float *topk_v;
  /* `[experts_per_token]` */
  int *topk_i;
  /* `[2 * intermediate_dim]` */
  float *mlp1_out;
  /* `[intermediate_dim]` */
  float *gate;
  /* `[intermediate_dim]` */
  float *up;
  /* `[intermediate_dim]` */
  float *gate_up;
  /* `[hidden_dim]` */
  float *e_agg;
  /* `[head_dim * (n_attn_heads + 2 * n_kv_heads)]` */
  float *qkv;
  /* `[head_dim * n_attn_heads]` */
  float *q;
  /* `[head_dim * n_kv_heads]` */
  float *k;
  /* `[head_dim * n_kv_heads]` */
  float *v;
  /* `[n_attn_heads, seq_len]` */
  float *att;
  /* `[vocab_size]` */
  float *logits;
  /* `[n_layers, seq_len, head_dim * n_kv_heads]` */
  float *key_cache;
  /* `[n_layers, seq_len, head_dim * n_kv_heads]` */
  float *value_cache;
  /* `[seq_len, seq_len]`; NULL if `sliding_window` is 0 */
  float *mask;
} RunState;
#endif

#if !defined(GETP_NO_DRIVER_STRUCTS)
/* A model. The struct's address is the handle by which `inference` and `finish` find what `warm_up` made. */
typedef struct {
  /* The dimensions. */
  Config config;
  /* The weights. */
  TransformerWeights weights;
  /* The scratch memory. */
  RunState state;
  /* The program's file descriptor of the mapped checkpoint, used only to ask for the file's size. */
  int fd;
  /* The program's mapping of the checkpoint, or NULL. If the embedding lies in it, all weights must. */
  float *data;
  /* Size of the mapping in bytes. */
  ptrdiff_t file_size;
} Transformer;
#endif

#if !defined(GETP_NO_DRIVER_STRUCTS)
/* An entry of `Tokenizer.sorted_vocab`. */
typedef struct {
  /* The token's bytes, `[len]`. */
  const char *str;
  /* Number of bytes. */
  int len;
  /* The token's id. */
  int id;
} TokenIndex;
#endif

#if !defined(GETP_NO_DRIVER_STRUCTS)
/* The vocabulary. Only `vocab`, `lengths`, `scores`, `vocab_size` and `max_token_length` are read. */
typedef struct {
  /* `[vocab_size]`: pointers to the tokens' bytes. */
  char **vocab;
  /* `[vocab_size]`: the tokens' lengths in bytes. */
  int *lengths;
  /* `[vocab_size]`: -1e30 for special tokens, which encoding never produces. */
  float *scores;
  /* Tokens in the vocabulary. */
  int vocab_size;
  /* Length in bytes of the longest token that encoding may produce. */
  int max_token_length;
  /* `[vocab_size]`: sorted by bytes, then by length. */
  TokenIndex *sorted_vocab;
  /* The id of each single byte's token. */
  int byte_tokens[256];
  /* Each byte as a string: `[256, 2]`, byte and NUL. */
  unsigned char byte_pieces[512];
} Tokenizer;
#endif

#if !defined(GETP_NO_DRIVER_STRUCTS)
/* An entry of `Sampler.probindex`. */
typedef struct {
  /* A token's probability. */
  float prob;
  /* The token's id. */
  int index;
} ProbIndex;
#endif

#if !defined(GETP_NO_DRIVER_STRUCTS)
/* How tokens are sampled. */
typedef struct {
  /* Tokens in the vocabulary. */
  int vocab_size;
  /* `[vocab_size]`: the program's scratch memory, which the library does not use. */
  ProbIndex *probindex;
  /* 0 is greedy decoding. What the evaluation program's `main` would replace `inference` replaces, with a line: a
   * negative number by 0. NaN is refused. */
  float temperature;
  /* Within (0, 1): top-p (nucleus) sampling. 0 and 1: all tokens can be sampled. Another number is replaced by 0.9,
   * as `main` would, and NaN refused, unless `temperature` is 0. */
  float topp;
  /* State of the random number generator. `inference` stores here the state after request 0's last token. With 0,
   * which the generator never leaves, request 0 draws the number 0 for every token, as in the program; a line says
   * so. */
  unsigned long long rng_state;
} Sampler;
#endif

#if !defined(GETP_NO_DRIVER_STRUCTS)
/* The prompts, and memory for the answers. */
typedef struct {
  /* Number of requests. */
  int num_reqs;
  /* Bytes allocated for each position of a prompt. */
  int max_token_len;
  /* The steps of a request; `getp_options.steps` says what they count. */
  int max_seq_len;
  /* `[num_reqs, max_token_len * (max_seq_len + 1)]`: the prompts, padded with NUL. */
  char *str_reqs;
  /* `[num_reqs, max_seq_len + 1]`: the answers, each ended by -1. `inference` writes them. */
  int *tok_gens;
} Requests;
#endif

/* Tokens that the library has made. A program takes only pointers to it, so that it can grow. */
typedef struct {
  /* sizeof(getp_tokens) as the library knows it. */
  size_t size;
  /* `count` ids. */
  const int *ids;
  /* How many. */
  size_t count;
} getp_tokens;

/* A text that the library has made. A program takes only pointers to it, so that it can grow. */
typedef struct {
  /* sizeof(getp_text) as the library knows it. */
  size_t size;
  /* `length` bytes, and a NUL behind them. There may be NULs among them. */
  const char *bytes;
  /* How many. */
  size_t length;
} getp_text;

/* Counters of a model since it was warmed up, and its memory. */
typedef struct {
  /* Tokens stored in answers. */
  uint64_t tokens;
  /* Prompt tokens of the requests that were accepted. */
  uint64_t prompt_tokens;
  /* Forward passes over a batch, on all devices. */
  uint64_t steps;
  /* Seconds in `inference`, tokenization and printing included, and seconds with requests in an open batch. */
  double seconds;
  /* Bytes of the packed weights on all devices. */
  uint64_t packed_bytes;
  /* Bytes of the KV caches of all devices. */
  uint64_t kv_bytes;
  /* Devices that work, or groups of devices that work together. */
  uint64_t devices;
  /* Devices, or groups, that have failed; others have gone on with their requests. */
  uint64_t lost_devices;
  /* Of the prompt tokens: those that were not computed, since an earlier prompt or answer had begun with the same
   * ones. */
  uint64_t shared_tokens;
  /* Tokens that were computed again: where answers become longer than those before, the sequences that began last
   * may have to give their blocks of the KV cache to others; and where a device has failed, others begin anew with
   * its requests. */
  uint64_t recomputed_tokens;
} getp_stats_t;

/* How to run a model. A field that is 0 or NULL takes the value of its GETP_* environment variable, or the default if
 * that is not set. Call `getp_options_init` before setting fields. */
typedef struct {
  /* sizeof(getp_options) as the program knows it, set by `getp_options_init`. */
  size_t size;
  /* GETP_EXACT, the default on the CPU, or GETP_FAST, the default on GPUs (GETP_PRECISION=exact|fast). */
  int precision;
  /* Worker threads on the host; by default one a core (GETP_THREADS). */
  int threads;
  /* The most sequences in one step; by default 128 on the CPU, 1024 on GPUs (GETP_MAX_BATCH). */
  int max_batch;
  /* The most tokens in one step; by default 512 on the CPU, on GPUs 8192, or 16384 with much room
   * (GETP_STEP_TOKENS). */
  int step_tokens;
  /* The most memory for a device's KV cache in MiB; by default at most half of free memory, on a GPU nearly all of
   * it (GETP_KV_MB). */
  int kv_mb;
  /* What to print of each request on stdout. GETP_ON, the default: prompt and answer; GETP_ANSWER: the request's
   * number and its answer; GETP_OFF: nothing (GETP_PRINT=0|1|answer). */
  int print;
  /* A progress bar if stderr is a terminal: GETP_ON, the default, or GETP_OFF (GETP_PROGRESS=0|1). */
  int progress;
  /* Time each operation and print a table: GETP_ON, or GETP_OFF, the default (GETP_PROFILE=0|1). */
  int profile;
  /* The path of a file to write the logits of every position to, prompts included; by default none (GETP_LOGITS). */
  const char *logits;
  /* Where to run: "auto", the default, is every GPU that can be used or else the CPU; "cpu"; "hip" or "cuda", all
   * devices of it or some as in "cuda:0,2" (GETP_DEVICE). */
  const char *device;
  /* Weights that are not finite are an error, not a warning, and prompts that would be cut are refused: GETP_ON, or
   * GETP_OFF, the default (GETP_STRICT=0|1). */
  int strict;
  /* 0: a later version may use it. */
  int reserved;
  /* GPUs that make a replica together, each with some of the layers; by default as few as have room
   * (GETP_GROUP=auto|N). */
  int group;
  /* The most memory to use on each GPU in MiB; by default what is free (GETP_DEVICE_MB). */
  int device_mb;
  /* What the steps of a request, its `max_seq_len`, count. GETP_POSITIONS, the default: the positions that are
   * computed, so that a prompt of n tokens gets up to max_seq_len - n + 1. GETP_TOKENS: the tokens of prompt and
   * answer together, so that there are up to max_seq_len - n (GETP_STEPS=positions|tokens). */
  int steps;
  /* 0: a later version may use it. */
  int reserved_2;
} getp_options;

/* What a model's files say of its answers: how a request is answered whose fields are left at their defaults. */
typedef struct {
  /* The tokens that end an answer: `end_count` ids, which belong to the model. */
  const int *ends;
  /* How many. */
  size_t end_count;
  /* The most tokens of an answer; 0: as many as there is room for. */
  size_t max_tokens;
  /* 0 is greedy. */
  float temperature;
  /* 1: all tokens can be sampled. */
  float topp;
} getp_defaults;

/* How text is encoded and tokens are decoded. Call `getp_text_options_init` before setting fields. */
typedef struct {
  /* sizeof(getp_text_options) as the program knows it, set by `getp_text_options_init`. */
  size_t size;
  /* GETP_OFF, the default: the names of special tokens in a text, such as "<|start|>", are text like any other, and
   * special tokens are decoded to nothing. So what users write never becomes part of the frame. GETP_ON: these names
   * are the tokens, and the tokens are decoded to their names. */
  int specials;
  /* 0: a later version may use it. */
  int reserved;
} getp_text_options;

/* The call has done its work. */
#define GETP_OK 0

/* There was nothing by the time given. It is no failure. */
#define GETP_TIMED_OUT 1

/* The batch was closed since its model was. It is no failure. */
#define GETP_CLOSED 2

/* An argument, an option or a field of a struct is NULL, or has a value that nobody can mean. */
#define GETP_BAD_ARGUMENT -1

/* There is not enough memory, on the host or on a device. */
#define GETP_NO_MEMORY -2

/* There is no device to run on, or no driver or code for it. */
#define GETP_NO_DEVICE -3

/* A device has failed, and no other one could take over. */
#define GETP_DEVICE_LOST -4

/* A file cannot be read or written, or is not what it should be. */
#define GETP_BAD_FILE -5

/* The file is a model, but not one that the library runs. */
#define GETP_UNSUPPORTED_MODEL -6

/* The request cannot be answered by this model on these devices. */
#define GETP_REFUSED -7

/* The call is not possible now, for example since another one runs, or since the process has forked. */
#define GETP_BAD_STATE -8

/* A defect of the library. */
#define GETP_DEFECT -9

#ifdef __cplusplus
extern "C" {
#endif /* __cplusplus */

/* Sets `options->size` to `size` and all other fields to their defaults; the macro `getp_batch_options_init(options)`
 * passes `sizeof *options`.
 *
 * Fails for a NULL or a size that no version of the struct can have: one line on stderr and the last error, returns
 * the failure. */
getp_status getp_batch_options_init_sized(getp_batch_options *options, size_t size);

/* Sets `request->size` to `size` and all other fields to their defaults; the macro `getp_request_init(request)` passes
 * `sizeof *request`.
 *
 * Fails for a NULL or a size that no version of the struct can have: one line on stderr and the last error, returns
 * the failure. */
getp_status getp_request_init_sized(getp_request *request, size_t size);

/* Opens a batch on `model`, and warms the model up if it is not. From here to `getp_batch_close` its requests run on a
 * thread of the library, and `inference` refuses the model's transformer; `finish` and `getp_model_close` close the
 * batch. `options` may be NULL.
 *
 * On failure: one line on stderr and the last error, returns NULL. It fails if the model has an open batch, and where
 * several processes share the requests (MPI). */
getp_batch *getp_batch_open(getp_model *model, const getp_batch_options *options);

/* Queues a request. If `id` is not NULL, `*id` becomes its number within the batch, from 0 on. May be called from any
 * thread, also from `on_event`. It does not wait for other requests. Events may come before it has returned: `tag`
 * tells whose they are.
 *
 * Requests start in the order in which they are submitted, each as soon as the KV cache has room for it, by its
 * prompt's length and its `max_tokens`, beside those that run. So one that may become long holds up those behind it;
 * who serves strangers gives each a `max_tokens`. Prompts are computed one after the other, beside the answers'
 * tokens.
 *
 * A request that the model's devices have no room for is not a failure: its only event says so.
 *
 * Fails for a NULL, a bad field, a closed model, or a lack of memory: one line on stderr and the last error, returns
 * the failure. */
getp_status getp_batch_submit(getp_batch *batch, const getp_request *request, uint64_t *id);

/* Gives the next event: `*event` is the program's until it passes it to `getp_event_free`. Waits for one up to
 * `seconds`, for ever if that is negative, and not at all if it is 0; returns GETP_TIMED_OUT, and `*event` is NULL,
 * if there is none by then, and GETP_CLOSED if the model has been closed, which leaves the batch to be closed.
 * Several threads may wait. A thread that is to end needs a time-out: nothing else wakes it, and the batch may be
 * closed only when nobody waits.
 *
 * Fails for a NULL, `seconds` that are NaN, and a batch with an `on_event`: one line on stderr and the last error,
 * returns the failure. */
getp_status getp_batch_next(getp_batch *batch, double seconds, const getp_event **event);

/* Cancels a request: its last event comes at once, with tokens that have come and without those of steps that are
 * under way. Does nothing to one that has ended.
 *
 * Fails for a NULL, for an `id` that the batch has not given, and for a lack of memory, when the request goes on:
 * one line on stderr and the last error, returns the failure. */
getp_status getp_batch_cancel(getp_batch *batch, uint64_t id);

/* Cancels all requests that have not ended.
 *
 * Fails for a NULL or a lack of memory: one line on stderr and the last error, returns the failure. */
getp_status getp_batch_cancel_all(getp_batch *batch);

/* The most tokens that the answer to a prompt of `prompt_length` tokens may have, by the KV cache and the model's
 * context, which a .bin file does not have; 0 if such a prompt has no room.
 *
 * Fails for a NULL: one line on stderr and the last error, returns 0. */
size_t getp_batch_most_tokens(const getp_batch *batch, size_t prompt_length);

/* Requests whose last event the program has not been given.
 *
 * Fails for a NULL: one line on stderr and the last error, returns 0. */
size_t getp_batch_unfinished(const getp_batch *batch);

/* Closes a batch and drops what has not ended. It waits for no request: the step under way ends later, and whoever
 * uses the model next waits for that. Unless `on_event` calls this, it waits for a call of `on_event` that runs; there
 * is none afterwards. Does nothing for NULL. The model stays warmed up.
 *
 * `on_event` may still run for an event that was taken before, so what it uses must live on: whoever uses the model
 * next, or closes it, on another thread, waits for its return. No other call may use the batch meanwhile or
 * afterwards.
 *
 * Fails only by a defect of the library: one line on stderr and the last error. */
void getp_batch_close(getp_batch *batch);

#if !(defined(GETP_NO_DRIVER_STRUCTS) && defined(__cplusplus))
/* Packs the transformer's weights for the devices and allocates their KV caches. Options are those given to
 * getp_model_open; for a struct of the program's own they are the GETP_* environment variables. Does nothing if the
 * transformer is warmed up already. From here to `finish` the library owns `weights` and `state`.
 *
 * On failure: one line on stderr and the last error; the struct is unchanged, and `inference` warms up again. */
void warm_up(Transformer *transformer, Tokenizer *tokenizer);
#endif

#if !(defined(GETP_NO_DRIVER_STRUCTS) && defined(__cplusplus))
/* Writes each request's answer to its row of `tok_gens` and returns the number of tokens stored. Warms up first if
 * that has not been done. Prints each request's text on stdout, as GETP_PRINT says.
 *
 * Request 0 draws from the sampler's `rng_state`, which becomes the state after its last token. Every other request
 * draws from a state of its own, derived from that one, so that its answer depends neither on the requests before it
 * nor on the batch. In the evaluation program one state goes through all requests in turn: of sampled answers only
 * request 0's is the same.
 *
 * On failure: one line on stderr and the last error. Rows without an answer hold only -1. The return value is the
 * number of tokens in the other rows, or -1 if there are none. The call fails, and leaves the rows alone, if another
 * call is writing to them, or if a field of `requests` cannot be what it should be.
 *
 * A request that cannot be answered does not fail the call: it gets a row of only -1 and a line on stderr. This holds
 * for an empty prompt, a prompt that takes up all of `max_seq_len`, one longer than the context of a model opened from
 * a directory, and for more positions than the KV cache can hold. */
long long inference(Transformer *transformer, Tokenizer *tokenizer, Sampler *sampler, Requests *requests);
#endif

#if !(defined(GETP_NO_DRIVER_STRUCTS) && defined(__cplusplus))
/* Frees what `warm_up` allocated and restores `weights` and `state`. Does nothing if the transformer is not warmed up.
 * `tokenizer` is not used.
 *
 * Fails only for a bad pointer or a copy of the struct: one line on stderr and the last error. */
void finish(Transformer *transformer, Tokenizer *tokenizer);
#endif

/* Frees an event of `getp_batch_next`. Does nothing for NULL.
 *
 * Fails only by a defect of the library: one line on stderr and the last error. */
void getp_event_free(const getp_event *event);

/* The tokens of a conversation as gpt-oss was trained on them, with the beginning of the assistant's answer behind
 * them, for `getp_tokens_free`. `json` has `length` bytes: a list of messages as chat completions have them, or the
 * body of such a request, of which `messages`, `tools`, `tool_choice` and `reasoning_effort` are used. With
 * `continue_final_message` the last message is left open instead; with `add_generation_prompt` false nothing is
 * behind the messages. `date`, `knowledge_cutoff` and `model_identity` are what the system message says; there is no
 * date unless it is given. docs/harmony.md has the rules.
 *
 * Whatever the texts hold, they are encoded as text. `tokenizer` must be of a `tokenizer.json`.
 *
 * On failure, as for a field that is not known: one line on stderr and the last error, returns NULL. */
const getp_tokens *getp_harmony_render(const getp_tokenizer *tokenizer, const char *json, size_t length);

/* What an answer of `count` tokens says, as JSON text for `getp_text_free`: an object with `message`, the assistant's
 * message of chat completions (`content`, `reasoning`, `tool_calls`), `finish_reason`, which is "stop", "tool_calls"
 * or "length", and `messages`, those of harmony that it was made of (`role`, `channel`, `recipient`, `content_type`,
 * `content`). `ids` are an event's, the token that ends the answer included.
 *
 * It takes whatever the model has written: a message whose header the form does not have is text, with its `ids`.
 *
 * On failure: one line on stderr and the last error, returns NULL. */
const getp_text *getp_harmony_read(const getp_tokenizer *tokenizer, const int *ids, size_t count);

/* Makes a reader for the tokens of one answer. `tokenizer` may be closed before it.
 *
 * On failure: one line on stderr and the last error, returns NULL. */
getp_harmony_reader *getp_harmony_reader_open(const getp_tokenizer *tokenizer);

/* Makes a reader for the tokens of the answer to a conversation, `length` bytes of JSON as `getp_harmony_render` takes
 * them. With `continue_final_message` the answer goes on with the last message, and what is read is text of that one;
 * otherwise it is the reader that `getp_harmony_reader_open` makes.
 *
 * On failure: one line on stderr and the last error, returns NULL. */
getp_harmony_reader *getp_harmony_reader_open_for(const getp_tokenizer *tokenizer, const char *json, size_t length);

/* What the answer's next `count` tokens add to it, as JSON text for `getp_text_free`: a list of pieces, each with the
 * number of its `message`, that one's `channel` and `recipient`, and the `content` that follows the piece before.
 * Characters are whole. The list is empty while a header is read.
 *
 * On failure: one line on stderr and the last error, returns NULL. */
const getp_text *getp_harmony_reader_next(getp_harmony_reader *reader, const int *ids, size_t count);

/* What only the answer's end shows to be text, as `getp_harmony_reader_next` gives it: the rest of a character, or all
 * of an answer that has no header. To be called once the answer has ended, before `getp_harmony_reader_end`.
 *
 * On failure: one line on stderr and the last error, returns NULL. */
const getp_text *getp_harmony_reader_finish(getp_harmony_reader *reader);

/* What the whole answer says, once it has ended, as `getp_harmony_read` gives it. Afterwards the reader is as new.
 *
 * On failure: one line on stderr and the last error, returns NULL. */
const getp_text *getp_harmony_reader_end(getp_harmony_reader *reader);

/* Closes a reader. Does nothing for NULL.
 *
 * Fails only by a defect of the library: one line on stderr and the last error. */
void getp_harmony_reader_close(getp_harmony_reader *reader);

/* The library's version, for example "0.1.0". GETP_VERSION is that of the header. Never fails. */
const char *getp_version(void);

/* What the library was built with: "cpu", and behind it each feature, with the architectures that it has kernels for,
 * for example "cpu hip=gfx90a,gfx942 mpi", with a space between two of them. Never fails. */
const char *getp_features(void);

/* The calling thread's last error, one line without a newline, or NULL if there is none. warm_up, inference, finish,
 * getp_stats, the open functions, getp_batch_submit, getp_batch_next, getp_batch_cancel, getp_batch_cancel_all,
 * getp_tokenizer_encode, getp_tokenizer_decode, getp_decoder_next, getp_decoder_end, and getp_harmony_render, _read,
 * _reader_next and _reader_end clear it when they begin; the other functions keep it, and replace it if they fail. The
 * string is valid until the thread calls another function of this library. Of a text of more than 4095 bytes it is the
 * beginning; stderr has all of it. Never fails. */
const char *getp_last_error(void);

/* What kind of failure the calling thread's last error is; GETP_OK if it has none, as getp_last_error says. Never
 * fails. */
getp_status getp_last_status(void);

/* Writes the statistics of `transformer` to `*stats`, of which the program knows `size` bytes; the macro
 * `getp_stats(transformer, stats)` passes `sizeof *stats`. May be called while other calls use the transformer, or a
 * batch is open on it. Returns GETP_OK.
 *
 * Fails for a NULL, a size that no version of the struct can have, or a transformer that is not warmed up: one line on
 * stderr and the last error, returns the failure, and `*stats` is unchanged. */
getp_status getp_stats_sized(const Transformer *transformer, getp_stats_t *stats, size_t size);

/* Opens the model at `path`: a `.bin` file, or a directory with `config.json` and safetensors files. The files must
 * not change while the model is open. With `options` NULL all options come from the environment, or are defaults.
 *
 * On failure: one line on stderr and the last error, returns NULL. */
getp_model *getp_model_open(const char *path, const getp_options *options);

/* The struct to pass to `warm_up`, `inference` and `finish`. It belongs to `model` and is valid until that is closed.
 * Its weights and state are NULL until `warm_up`, which reads the file.
 *
 * Fails for a NULL: one line on stderr and the last error, returns NULL. */
Transformer *getp_model_transformer(getp_model *model);

/* Writes to `*defaults`, of which the program knows `size` bytes, what the model's files say of its answers; the macro
 * `getp_model_defaults(model, defaults)` passes `sizeof *defaults`. In a directory that is `generation_config.json`,
 * whose `eos_token_id` may also stand in `config.json`. Without them, and of a .bin file: greedy, and the end tokens
 * 199999 and 200002. Returns GETP_OK.
 *
 * Fails for a NULL or a size that no version of the struct can have: one line on stderr and the last error, returns
 * the failure, and `*defaults` is unchanged. */
getp_status getp_model_defaults_sized(const getp_model *model, getp_defaults *defaults, size_t size);

/* Closes a model, and finishes it first if it is warmed up. Does nothing for NULL. Using the model afterwards, or
 * closing it twice, is undefined behaviour.
 *
 * Fails only by a defect of the library: one line on stderr and the last error. */
void getp_model_close(getp_model *model);

/* Sets `options->size` to `size` and all other fields to their defaults. The macro `getp_options_init(options)` passes
 * `sizeof *options`, the size in the header that the program was compiled with; the library's version may be another.
 *
 * Fails for a NULL or a size that no version of the struct can have: one line on stderr and the last error, returns
 * the failure. */
getp_status getp_options_init_sized(getp_options *options, size_t size);

/* Reads a file of prompts: its first line is their number, and each further line is a prompt. `steps` becomes
 * `max_seq_len`: a prompt of n tokens gets an answer of up to `steps` - n + 1 tokens, or, with GETP_TOKENS in
 * `getp_options.steps`, of up to `steps` - n. For one token and one step that is one token, or none. `tokenizer` is
 * needed only for this call.
 *
 * Lines end in LF, or all of them in CR LF. A UTF-8 byte order mark and empty lines behind the last prompt are
 * skipped. Refused are files with both ends of lines, in UTF-16, with a NUL byte in a prompt, or with more or fewer
 * prompts than the first line says.
 *
 * On failure: one line on stderr and the last error, returns NULL. */
getp_requests *getp_requests_open(const char *path, int steps, const getp_tokenizer *tokenizer);

/* The struct to pass to `inference`. It belongs to `requests` and is valid until those are closed.
 *
 * Fails for a NULL: one line on stderr and the last error, returns NULL. */
Requests *getp_requests_get(getp_requests *requests);

/* The number of requests.
 *
 * Fails for a NULL: one line on stderr and the last error, returns -1. */
int getp_requests_count(const getp_requests *requests);

/* The prompt of request `index`: `*length` bytes, which a NUL need not follow. It belongs to `requests`.
 *
 * Fails for a NULL or an index out of range: one line on stderr and the last error, returns NULL; unless `length`
 * itself is NULL, `*length` is 0. */
const char *getp_requests_prompt(const getp_requests *requests, int index, size_t *length);

/* The answer to request `index`: `*length` tokens, none before `inference` has stored them. They belong to `requests`.
 *
 * Fails for a NULL or an index out of range: one line on stderr and the last error, returns NULL; unless `length`
 * itself is NULL, `*length` is 0. */
const int *getp_requests_tokens(const getp_requests *requests, int index, size_t *length);

/* Closes requests. Does nothing for NULL.
 *
 * Fails only by a defect of the library: one line on stderr and the last error. */
void getp_requests_close(getp_requests *requests);

/* Makes a sampler for `model`.
 *
 * `temperature` 0 is greedy decoding. It must be finite and not negative. Where it is so small that a row's largest
 * logit divided by it is infinite, that row is greedy, too. `topp` within (0, 1) is top-p (nucleus) sampling; with any
 * other number all tokens can be sampled. At a temperature of 0 it is not looked at.
 *
 * `seed` is the first state of request 0's random number generator, GETP_STATE_OF_SEED_0 for the seed 0. The states of
 * the other requests are derived from it.
 *
 * Fails for a NULL, a temperature that is negative, infinite or NaN, or a `topp` that is NaN: one line on stderr and
 * the last error, returns NULL. */
getp_sampler *getp_sampler_open(const getp_model *model, float temperature, float topp, uint64_t seed);

/* The struct to pass to `inference`. It belongs to `sampler` and is valid until that is closed.
 *
 * Fails for a NULL: one line on stderr and the last error, returns NULL. */
Sampler *getp_sampler_get(getp_sampler *sampler);

/* Closes a sampler. Does nothing for NULL.
 *
 * Fails only by a defect of the library: one line on stderr and the last error. */
void getp_sampler_close(getp_sampler *sampler);

/* Sets `options->size` to `size` and all other fields to their defaults; the macro `getp_text_options_init(options)`
 * passes `sizeof *options`.
 *
 * Fails for a NULL or a size that no version of the struct can have: one line on stderr and the last error, returns
 * the failure. */
getp_status getp_text_options_init_sized(getp_text_options *options, size_t size);

/* The tokens of a text of `length` bytes, for `getp_tokens_free`. `options` may be NULL. With a `tokenizer.json` the
 * text must be UTF-8.
 *
 * On failure: one line on stderr and the last error, returns NULL. */
const getp_tokens *getp_tokenizer_encode(const getp_tokenizer *tokenizer,
                                         const char *text,
                                         size_t length,
                                         const getp_text_options *options);

/* The bytes of `count` tokens, for `getp_text_free`. They need not be UTF-8: a token may end within a character. An id
 * without a token has no bytes. `options` may be NULL.
 *
 * On failure: one line on stderr and the last error, returns NULL. */
const getp_text *getp_tokenizer_decode(const getp_tokenizer *tokenizer,
                                       const int *ids,
                                       size_t count,
                                       const getp_text_options *options);

/* Makes a decoder for the tokens of one answer. `options` may be NULL, and `tokenizer` may be closed before it.
 *
 * On failure: one line on stderr and the last error, returns NULL. */
getp_decoder *getp_decoder_open(const getp_tokenizer *tokenizer, const getp_text_options *options);

/* The text of the answer's next `count` tokens, as far as its characters are whole: `*length` bytes of UTF-8, and a
 * NUL behind them. The beginning of a character is kept back until the rest comes. Bytes that are no UTF-8 become
 * U+FFFD. The bytes belong to `decoder`, until its next call.
 *
 * Fails for a NULL or a lack of memory: one line on stderr and the last error, returns NULL; unless `length` itself is
 * NULL, `*length` is 0. */
const char *getp_decoder_next(getp_decoder *decoder, const int *ids, size_t count, size_t *length);

/* The text of what was kept back, once the answer has ended: a U+FFFD, or nothing. As `getp_decoder_next` gives it;
 * afterwards the decoder is as new.
 *
 * Fails for a NULL or a lack of memory: one line on stderr and the last error, returns NULL; unless `length` itself is
 * NULL, `*length` is 0. */
const char *getp_decoder_end(getp_decoder *decoder, size_t *length);

/* Closes a decoder. Does nothing for NULL.
 *
 * Fails only by a defect of the library: one line on stderr and the last error. */
void getp_decoder_close(getp_decoder *decoder);

/* Frees tokens. Does nothing for NULL.
 *
 * Fails only by a defect of the library: one line on stderr and the last error. */
void getp_tokens_free(const getp_tokens *tokens);

/* Frees a text. Does nothing for NULL.
 *
 * Fails only by a defect of the library: one line on stderr and the last error. */
void getp_text_free(const getp_text *text);

/* Reads a vocabulary: the evaluation program's `tokenizer.bin`, a model's `tokenizer.json`, or the directory that has
 * one, such as Hugging Face's. A `tokenizer.bin` encodes by the program's rule, which gives most texts other tokens
 * than the model was trained on; a `tokenizer.json` encodes as the model was trained. `inference` encodes its prompts
 * by the program's rule with both.
 *
 * A `tokenizer.json` takes about a second, in which another thread may warm up the model, and a library with the
 * feature tokenizer-json.
 *
 * On failure: one line on stderr and the last error, returns NULL. */
getp_tokenizer *getp_tokenizer_open(const char *path);

/* The struct to pass to `warm_up`, `inference` and `finish`. It belongs to `tokenizer` and is valid until that is
 * closed.
 *
 * Fails for a NULL: one line on stderr and the last error, returns NULL. */
Tokenizer *getp_tokenizer_get(getp_tokenizer *tokenizer);

/* The text of token `id`, a special one's name: `*length` bytes without a NUL after them, 0 for an id outside the
 * vocabulary. They belong to `tokenizer`.
 *
 * Fails for a NULL: one line on stderr and the last error, returns NULL; unless `length` itself is NULL, `*length` is
 * 0. */
const char *getp_tokenizer_piece(const getp_tokenizer *tokenizer, int id, size_t *length);

/* Closes a vocabulary. Does nothing for NULL.
 *
 * Fails only by a defect of the library: one line on stderr and the last error. */
void getp_tokenizer_close(getp_tokenizer *tokenizer);

#ifdef __cplusplus
}  /* extern "C" */
#endif  /* __cplusplus */

#ifdef __GNUC__
#pragma GCC diagnostic pop
#endif

#endif  /* GETP_H */
