// What Python hands over (the same fields, in the same order, as in native.py), and what the kernels ask of each other.

#ifndef ATTS_MODEL_H
#define ATTS_MODEL_H

#include "vectors.h"

#define PANEL (2 * LANES)  // columns of a packed panel
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
  const int64_t *tokens, *positions, *slots, *rows, *starts, *lengths, *wanted;
  const int32_t *table;
  float *x, *h, *qkv, *mixed, *both, *hidden, *scratch;
  int64_t scratch_floats;  // per thread
  int32_t *counters;  // one per layer, zeroed by the caller
} Step;

// out[m, n] (+)= a[m, k] * weights + bias, rows of a `stride` apart; thread `me` of `threads` does its share of the columns
void product(int64_t halves, const float *a, int64_t stride, int64_t m, int64_t k, const void *weights, int64_t n,
             float *out, const float *bias, int accumulate, int64_t me, int64_t threads, float *wide);

// mixed = attention of every token of the step; threads take sequences, or heads of them, as they come
void attention(const Model *model, const Step *step, int64_t layer, int64_t threads, float *scratch);

#endif
