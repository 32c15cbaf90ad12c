// What Python hands over (the same fields, in the same order, as in native.py), and what the kernels ask of each other.

#ifndef ATTS_MODEL_H
#define ATTS_MODEL_H

#include "vectors.h"

#define PANEL (2 * LANES)  // columns of a packed panel
#if LANES == 16
#define TILE_ROWS 12
#elif LANES == 8
#define TILE_ROWS 6
#else
#define TILE_ROWS 8
#endif
#define ROW_BLOCK (8 * TILE_ROWS)  // rows that stay in the second-level cache from one product to the next
#define EXPORT __attribute__((visibility("default")))

typedef struct {
  const float *norm, *qkv_bias, *query_norm, *key_norm, *out_bias, *mlp_norm, *gate_up_bias, *down_bias;
  const void *qkv, *out, *gate_up, *down;  // packed panels, float32 or bfloat16
} Layer;

typedef struct {
  int64_t layers, width, heads, kv_heads, head_dim, inner, vocabulary, halves;  // halves: panels are bfloat16
  float eps;
  const float *embedding, *norm, *cosines, *sines;  // [positions, head_dim / 2]
  const void *head;
  const Layer *layer;
  float *cache;  // [layers, 2, slots, kv_heads, head_dim]
  int64_t slots;
} Model;

typedef struct {
  int64_t num_tokens, num_sequences, num_wanted, table_width, threads;
  const int64_t *tokens, *positions, *slots, *rows, *starts, *lengths, *tails, *wanted;  // tails: wanted, per sequence
  const int32_t *table;
  float *x, *h, *qkv, *mixed, *both, *hidden, *scratch;  // h and both hold ROW_BLOCK rows
  int64_t scratch_floats;  // per thread
  int32_t *counters;  // one per layer, zeroed by the caller
} Step;

typedef struct {
  const Model *model;
  int64_t rows, num_ends;
  const float *hidden;
  const int64_t *tokens, *ends;  // ends: rows in rising order
  float *logprobs, *kept, *logits;  // kept: [num_ends, vocabulary]; logits: of ROW_BLOCK rows
} Scoring;

// Calls `work` once in each of `threads` threads, as number `me` of `all`
typedef void Work(const void *task, int64_t me, int64_t all);
void together(int64_t threads, Work *work, const void *task);
#define BARRIER _Pragma("omp barrier")

// out[m, n] (+)= a[m, k] * weights + bias, rows of a `stride` apart; thread `me` of `threads` does its share of the columns
void product(int64_t halves, const float *a, int64_t stride, int64_t m, int64_t k, const void *weights, int64_t n,
             float *out, const float *bias, int accumulate, int64_t me, int64_t threads);

// logits[rows, vocabulary] of hidden[rows, width]; thread `me` of `threads` makes its share of the columns
void make_logits(const Model *model, const float *hidden, int64_t rows, float *logits, int64_t me, int64_t threads);

// mixed = attention of every token of the step, in the last layer of those wanted; threads take sequences, or heads of
// them, as they come
void attention(const Model *model, const Step *step, int64_t layer, int64_t threads, float *scratch);

#endif
