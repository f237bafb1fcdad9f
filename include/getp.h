/* getp: offline batched inference of gpt-oss. Made from src/abi by cbindgen; do not edit.
 *
 * A program that has the eval program's structs of its own defines GETP_NO_DRIVER_STRUCTS and declares them before it
 * includes this file:
 *
 *     typedef struct { ... } Transformer;   and so Tokenizer, Sampler, Requests
 *     #define GETP_NO_DRIVER_STRUCTS
 *     #include "getp.h"
 *
 * In C++ this file then leaves warm_up, inference and finish to the program too, which declares them without
 * extern "C"; the library exports both names of each.
 *
 * A pointer passed in is NULL, which is refused, or points to what its type says, as many as the comment says. A handle
 * is what its open function returned, and not closed yet.
 *
 * Every function may be called from any thread. One transformer is used by one call at a time, and later callers wait;
 * different ones run side by side. README.md says what a program must not do meanwhile. Nothing ends or aborts the
 * program: a failure is one line on stderr, the value each comment names, and the text behind getp_last_error. */


#ifndef GETP_H
#define GETP_H

#include <stddef.h>
#include <stdint.h>

/* Sets all fields of *options to their defaults, and its size: that of the program's own struct, so that program and
 * library may be of different versions. */
#define getp_options_init(options) getp_options_init_sized((options), sizeof *(options))

// A switch of `getp_options` that is on.
#define GETP_ON 1

// A switch of `getp_options` that is off.
#define GETP_OFF 2

// `getp_options.print`: only answers, each behind its request's number.
#define GETP_ANSWER 3

// `getp_options.precision`: float64 sums in the program's own order.
#define GETP_EXACT 1

// `getp_options.precision`: what the hardware does best.
#define GETP_FAST 2

// An open model. What the program and calls on other threads may write to lies behind the pointer alone.
typedef struct getp_model getp_model;

// Prompts and answers: the struct, and the memory its pointers point to.
typedef struct getp_requests getp_requests;

// A sampler in the eval program's layout.
typedef struct getp_sampler getp_sampler;

// An open vocabulary: the struct, and the memory its pointers point to.
typedef struct getp_tokenizer getp_tokenizer;

#if !defined(GETP_NO_DRIVER_STRUCTS)
// The model's dimensions.
typedef struct {
  // Tokens in the vocabulary.
  int vocab_size;
  // Width of the residual stream.
  int hidden_dim;
  // Experts in each layer.
  int n_experts;
  // Experts each token is sent to.
  int experts_per_token;
  // Width inside an expert.
  int intermediate_dim;
  // Layers.
  int n_layers;
  // Width of an attention head.
  int head_dim;
  // Query heads.
  int n_attn_heads;
  // Key and value heads.
  int n_kv_heads;
  // Positions the checkpoint was exported for.
  int seq_len;
  // Context length before YaRN's scaling; the most tokens a prompt may have.
  int initial_context_length;
  // Base of the rotary frequencies.
  float rope_theta;
  // YaRN's scaling factor.
  float rope_scaling_factor;
  // Width of the windowed layers' attention; 0 if no layer is windowed.
  int sliding_window;
  // Clamp of the gated unit's inputs.
  float swiglu_limit;
} Config;
#endif

#if !defined(GETP_NO_DRIVER_STRUCTS)
// The weights, float32, row-major, outputs before inputs. While the model is warmed up these are addresses
// in the first replica, in its own formats, or NULL; `finish` puts the program's own back. On a GPU they are
// the first device's, not for the host to read: of the arrays that have layers those of layer 0; vectors
// float32, `token_embedding_table` and `w_router` BF16 (float32 where that is not exact) in row-major tiles
// of 32 rows, the other matrices MXFP4, FP16 or BF16 in the order of the device's matrix cores.
typedef struct {
  // `[vocab_size, hidden_dim]`
  float *token_embedding_table;
  // `[n_layers, hidden_dim]`
  float *rms_attn_w;
  // `[n_layers, hidden_dim]`
  float *rms_ffn_w;
  // `[n_layers, head_dim * (n_attn_heads + 2 * n_kv_heads), hidden_dim]`: all queries, then keys, then values
  float *w_qkv;
  // `[n_layers, hidden_dim, head_dim * n_attn_heads]`
  float *w_o;
  // `[n_layers, head_dim * (n_attn_heads + 2 * n_kv_heads)]`
  float *b_qkv;
  // `[n_layers, hidden_dim]`
  float *b_o;
  // `[n_layers, n_attn_heads]`
  float *attn_sinks;
  // `[n_layers, n_experts, hidden_dim]`
  float *w_router;
  // `[n_layers, n_experts]`
  float *b_router;
  // `[n_layers, n_experts, 2 * intermediate_dim, hidden_dim]`: rows alternate gate, up
  float *w_mlp1;
  // `[n_layers, n_experts, hidden_dim, intermediate_dim]`
  float *w_mlp2;
  // `[n_layers, n_experts, 2 * intermediate_dim]`
  float *b_mlp1;
  // `[n_layers, n_experts, hidden_dim]`
  float *b_mlp2;
  // `[hidden_dim]`
  float *rms_out_w;
  // `[vocab_size, hidden_dim]`
  float *out;
} TransformerWeights;
#endif

#if !defined(GETP_NO_DRIVER_STRUCTS)
// The program's own scratch memory for one token. Never read; while the model is warmed up these are
// addresses in the first replica, or NULL. On a GPU `x`, `t`, `tb`, `mlp1_out` and `qkv` are the activations
// of a step on the first device, `key_cache` its KV cache, and the others NULL.
typedef struct {
  // `[hidden_dim]`
  float *x;
  // `[hidden_dim]`
  float *t;
  // `[head_dim * n_attn_heads]`
  float *tb;
  // `[hidden_dim]`
  float *tb2;
  // `[n_experts]`
  float *router_score;
  // `[experts_per_token]`
  float *topk_v;
  // `[experts_per_token]`
  int *topk_i;
  // `[2 * intermediate_dim]`
  float *mlp1_out;
  // `[intermediate_dim]`
  float *gate;
  // `[intermediate_dim]`
  float *up;
  // `[intermediate_dim]`
  float *gate_up;
  // `[hidden_dim]`
  float *e_agg;
  // `[head_dim * (n_attn_heads + 2 * n_kv_heads)]`
  float *qkv;
  // `[head_dim * n_attn_heads]`
  float *q;
  // `[head_dim * n_kv_heads]`
  float *k;
  // `[head_dim * n_kv_heads]`
  float *v;
  // `[n_attn_heads, seq_len]`
  float *att;
  // `[vocab_size]`
  float *logits;
  // `[n_layers, seq_len, head_dim * n_kv_heads]`
  float *key_cache;
  // `[n_layers, seq_len, head_dim * n_kv_heads]`
  float *value_cache;
  // `[seq_len, seq_len]`; NULL if `sliding_window` is 0
  float *mask;
} RunState;
#endif

#if !defined(GETP_NO_DRIVER_STRUCTS)
// A model. Its address is the handle of everything `warm_up` makes for it.
typedef struct {
  // The dimensions.
  Config config;
  // The weights.
  TransformerWeights weights;
  // The scratch memory.
  RunState state;
  // The program's file descriptor of the mapped checkpoint; only asked how long the file is.
  int fd;
  // The program's mapping of the checkpoint, or NULL: weights that begin within it must end within it.
  float *data;
  // Bytes in the program's mapping.
  ptrdiff_t file_size;
} Transformer;
#endif

#if !defined(GETP_NO_DRIVER_STRUCTS)
// An entry of the sorted vocabulary.
typedef struct {
  // The token's bytes, `[len]`.
  const char *str;
  // How many.
  int len;
  // The token.
  int id;
} TokenIndex;
#endif

#if !defined(GETP_NO_DRIVER_STRUCTS)
// The vocabulary. Only `vocab`, `lengths`, `scores`, `vocab_size` and `max_token_length` are read.
typedef struct {
  // `[vocab_size]` pointers to each token's bytes.
  char **vocab;
  // `[vocab_size]` numbers of bytes.
  int *lengths;
  // `[vocab_size]`; special tokens have -1e30.
  float *scores;
  // Tokens in the vocabulary.
  int vocab_size;
  // Bytes of the longest token.
  int max_token_length;
  // `[vocab_size]`, sorted by bytes, then length.
  TokenIndex *sorted_vocab;
  // The token of each single byte.
  int byte_tokens[256];
  // Each byte as a string: `[256, 2]`, byte and NUL.
  unsigned char byte_pieces[512];
} Tokenizer;
#endif

#if !defined(GETP_NO_DRIVER_STRUCTS)
// An entry of the sampler's scratch memory.
typedef struct {
  // A token's probability.
  float prob;
  // The token.
  int index;
} ProbIndex;
#endif

#if !defined(GETP_NO_DRIVER_STRUCTS)
// How to sample.
typedef struct {
  // Tokens in the vocabulary.
  int vocab_size;
  // `[vocab_size]` of scratch memory; never used.
  ProbIndex *probindex;
  // 0 takes the most likely token.
  float temperature;
  // The mass of the nucleus; all tokens count unless it lies within (0, 1).
  float topp;
  // State of the random numbers. `inference` leaves here what request 0 left.
  unsigned long long rng_state;
} Sampler;
#endif

#if !defined(GETP_NO_DRIVER_STRUCTS)
// The prompts, and room for the answers.
typedef struct {
  // How many.
  int num_reqs;
  // Bytes set aside for each token of a prompt.
  int max_token_len;
  // The most positions of a request, prompt and answer.
  int max_seq_len;
  // `[num_reqs, max_token_len * (max_seq_len + 1)]`: the prompts, filled up with NUL.
  char *str_reqs;
  // `[num_reqs, max_seq_len + 1]`: the answers, each ended by -1. `inference` writes them.
  int *tok_gens;
} Requests;
#endif

// What a model has done since it was warmed up.
typedef struct {
  // Tokens stored in answers.
  uint64_t tokens;
  // Tokens of the prompts that could be queued.
  uint64_t prompt_tokens;
  // Steps.
  uint64_t steps;
  // Seconds in `inference`.
  double seconds;
  // Bytes of the packed weights.
  uint64_t packed_bytes;
  // Bytes of the KV cache.
  uint64_t kv_bytes;
} getp_stats_t;

// How to run a model. A field that is 0 or NULL takes its GETP_* variable of the environment, and the default if
// that is not set. Begin with `getp_options_init`.
typedef struct {
  // sizeof(getp_options) as the program knows it, set by `getp_options_init`.
  size_t size;
  // GETP_EXACT or GETP_FAST; by default the backend chooses (GETP_PRECISION=exact|fast).
  int precision;
  // Worker threads of the CPU backend; by default one a core (GETP_THREADS).
  int threads;
  // The most sequences in one step; by default 128 on the CPU, 1024 on GPUs (GETP_MAX_BATCH).
  int max_batch;
  // The most tokens in one step; by default 512 on the CPU, 8192 on GPUs (GETP_STEP_TOKENS).
  int step_tokens;
  // The most memory for the KV cache in MiB; by default as free memory allows (GETP_KV_MB).
  int kv_mb;
  // Print the text of each request on stdout: GETP_ON, the default, prompt and answer; GETP_ANSWER, the answer
  // behind the request's number; GETP_OFF, nothing (GETP_PRINT=0|1|answer).
  int print;
  // A progress bar if stderr is a terminal: GETP_ON, the default, or GETP_OFF (GETP_PROGRESS=0|1).
  int progress;
  // Time each stage and print a table: GETP_ON or GETP_OFF, the default (GETP_PROFILE=0|1).
  int profile;
  // The path of a file for the logits of every position fed; by default none (GETP_LOGITS).
  const char *logits;
  // Where to run: "auto", the default, is every GPU that can be used or else the CPU; "cpu"; "hip" or "cuda", all
  // devices of it or some as in "cuda:0,2" (GETP_DEVICE).
  const char *device;
  // Weights that are not finite are an error, not a warning, and prompts that would be cut are refused: GETP_ON, or
  // GETP_OFF, the default (GETP_STRICT=0|1).
  int strict;
} getp_options;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

#if !(defined(GETP_NO_DRIVER_STRUCTS) && defined(__cplusplus))
// Packs the transformer's weights and makes room to run it, as the environment's GETP_* variables say or the options
// it was opened with. Does nothing if it is warmed up already. While it is, `weights` and `state` belong to the
// library.
//
// On failure: one line on stderr and the last error, and the struct is as it was. `inference` then tries again.
void warm_up(Transformer *transformer, Tokenizer *tokenizer);
#endif

#if !(defined(GETP_NO_DRIVER_STRUCTS) && defined(__cplusplus))
// Answers every request into its own row, warming up first if need be, and returns the number of tokens stored.
// Prints each request's text on stdout, as GETP_PRINT says. The sampler's random state becomes what request 0 left.
//
// On failure: one line on stderr and the last error. Rows not answered hold -1 alone, and the tokens of those
// answered count; if nothing could be done, -1 is returned. A request that cannot be answered by itself (empty, or
// longer than the steps or than a directory says its model is) gets -1 alone and a line, and is no failure. Rows that
// another call is writing to are left to it: the call fails.
long long inference(Transformer *transformer, Tokenizer *tokenizer, Sampler *sampler, Requests *requests);
#endif

#if !(defined(GETP_NO_DRIVER_STRUCTS) && defined(__cplusplus))
// Gives everything back and the struct as it was. Does nothing if the transformer is not warmed up. The tokenizer is
// not looked at.
//
// On failure, which only a bad pointer or a copy of the struct is: one line on stderr and the last error.
void finish(Transformer *transformer, Tokenizer *tokenizer);
#endif

// The library's version, for example "0.1.0". Never fails.
const char *getp_version(void);

// What went wrong in the calling thread's latest call of warm_up, inference, finish, getp_stats or an open function,
// or in an accessor or a close function since; NULL if nothing. One line without its newline. It stays valid until
// the thread's next call of a function of this library other than this one. NULL too where the thread ends and its
// thread_local objects are gone, as in functions passed to atexit. Never fails.
const char *getp_last_error(void);

// Writes what `transformer` has done since it was warmed up to `stats`; returns 0.
//
// On failure, a NULL or a transformer that is not warmed up: one line on stderr and the last error, returns -1, and
// `stats` is as it was.
int getp_stats(const Transformer *transformer, getp_stats_t *stats);

// Opens the model at `path`: a `.bin` file, or a directory with `config.json` and safetensors files. The files must
// not change while it is open. `options` may be NULL for the environment's and the defaults.
//
// On failure: one line on stderr and the last error, returns NULL.
getp_model *getp_model_open(const char *path, const getp_options *options);

// The model as `warm_up`, `inference` and `finish` take it. It belongs to `model` and lives as long. Its weights and
// state are NULL until `warm_up`, which reads the file.
//
// On failure, a NULL: one line on stderr and the last error, returns NULL.
Transformer *getp_model_transformer(getp_model *model);

// Closes a model, finishing it first if it is warmed up. NULL is nothing to close. Using it afterwards, or closing it
// twice, is an error nobody can notice.
//
// On failure, which only a defect of the library is: one line on stderr and the last error.
void getp_model_close(getp_model *model);

// Sets all fields of `options`, which has `size` bytes, to their defaults, and its size. The header's macro
// `getp_options_init(options)` calls it with `sizeof *options`, so that a program and a library may be of different
// versions.
//
// On failure, a NULL or a size that no version of the struct has: one line on stderr and the last error.
void getp_options_init_sized(getp_options *options, size_t size);

// Reads the prompts at `path`, whose first line is their number and each line behind it a prompt; a request may take
// `steps` positions, prompt and answer together.
//
// On failure: one line on stderr and the last error, returns NULL.
getp_requests *getp_requests_open(const char *path, int steps, const getp_tokenizer *tokenizer);

// The requests as `inference` takes them. They belong to `requests` and live as long.
//
// On failure, a NULL: one line on stderr and the last error, returns NULL.
Requests *getp_requests_get(getp_requests *requests);

// How many requests there are.
//
// On failure, a NULL: one line on stderr and the last error, returns -1.
int getp_requests_count(const getp_requests *requests);

// The prompt of request `index`, `*length` bytes. It belongs to `requests`.
//
// On failure, a NULL or an index out of range: one line on stderr and the last error, returns NULL; `*length` is 0 if
// it can be.
const char *getp_requests_prompt(const getp_requests *requests, int index, size_t *length);

// The tokens `inference` has stored for request `index`, `*length` of them; none before it ran. They belong to
// `requests`.
//
// On failure, a NULL or an index out of range: one line on stderr and the last error, returns NULL; `*length` is 0 if
// it can be.
const int *getp_requests_tokens(const getp_requests *requests, int index, size_t *length);

// Closes requests. NULL is nothing to close.
//
// On failure, which only a defect of the library is: one line on stderr and the last error.
void getp_requests_close(getp_requests *requests);

// Makes a sampler for `model`: temperature 0 takes the most likely token, `topp` within (0, 1) draws from the nucleus,
// `seed` begins the random numbers.
//
// On failure, a NULL: one line on stderr and the last error, returns NULL.
getp_sampler *getp_sampler_open(const getp_model *model, float temperature, float topp, uint64_t seed);

// The sampler as `inference` takes it. It belongs to `sampler` and lives as long.
//
// On failure, a NULL: one line on stderr and the last error, returns NULL.
Sampler *getp_sampler_get(getp_sampler *sampler);

// Closes a sampler. NULL is nothing to close.
//
// On failure, which only a defect of the library is: one line on stderr and the last error.
void getp_sampler_close(getp_sampler *sampler);

// Reads the vocabulary at `path`, a `tokenizer.bin`.
//
// On failure: one line on stderr and the last error, returns NULL.
getp_tokenizer *getp_tokenizer_open(const char *path);

// The vocabulary as `warm_up`, `inference` and `finish` take it. It belongs to `tokenizer` and lives as long.
//
// On failure, a NULL: one line on stderr and the last error, returns NULL.
Tokenizer *getp_tokenizer_get(getp_tokenizer *tokenizer);

// The bytes to print for token `id`, `*length` of them and no NUL behind them; none for an id outside the
// vocabulary. They belong to `tokenizer`.
//
// On failure, a NULL: one line on stderr and the last error, returns NULL; `*length` is 0 if it can be.
const char *getp_tokenizer_piece(const getp_tokenizer *tokenizer, int id, size_t *length);

// Closes a vocabulary. NULL is nothing to close.
//
// On failure, which only a defect of the library is: one line on stderr and the last error.
void getp_tokenizer_close(getp_tokenizer *tokenizer);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GETP_H */
