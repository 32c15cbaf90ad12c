// The structures Python fills (the same fields, in the same order, as in native_model.py and native_weights.py), and the
// functions kernels share.

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

// How a packed matrix is kept: float32, bfloat16 that is read as float32, or pairs of bfloat16 to multiply as they are
enum { FULL, HALF, PAIRS_OF_K, KINDS };

// What an adapter adds to a product: up[n, rank] * down[rank, k], packed as float32; rank 0: nothing
typedef struct {
  const void *down, *up;
  int64_t rank;
} Delta;
enum { QKV, OUT, GATE_UP, DOWN, MATRICES };

typedef struct {
  int64_t from, to;
} Range;

// Rows of a step, and of its logit_rows, to which an adapter adds
typedef struct {
  Range rows, logits;
  const Delta *deltas;  // [layers, MATRICES]
} Segment;

typedef struct {
  const float *norm, *qkv_bias, *query_norm, *key_norm, *out_bias, *mlp_norm, *gate_up_bias, *down_bias;
  const void *qkv, *out, *gate_up, *down;  // packed panels, float32 or bfloat16
  const void *qkv_pairs, *out_pairs, *gate_up_pairs, *down_pairs;  // the same for rows that are rounded, or none
  const float *cosines, *sines;  // [positions, head_dim / 2]
  float *keys, *values;  // of its heads in slot 0; those of the next slot are `stride` floats on
  int64_t stride, window;  // window: how many tokens back it sees, itself included; 0: all
  int64_t num_heads, num_kv_heads;  // that attend here: those of a group's layers at its first, none at the others
  int64_t across, place;  // floats of a token's attended heads, and where those begin that `out` reads
  int64_t attention_bf16, mlp_bf16;  // whether packed panels are bfloat16
} Layer;

typedef struct {
  int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocabulary;
  int64_t is_bf16;  // whether the head's packed panels are bfloat16
  float eps, query_scale;
  const float *embedding, *norm;
  const void *head, *head_pairs;
  const Layer *layers;
} Model;

typedef struct {
  int64_t table_width, threads;
  Range rows, sequences, logits;  // what is computed of the arrays below
  const int64_t *tokens, *positions, *slots;  // per token
  const int64_t *table_rows, *query_starts, *context_lens, *num_logits;  // per sequence
  const int64_t *logit_rows;  // tokens whose hidden state is returned
  const int32_t *table;  // slot table, [rows, table_width]
  float *x, *normed, *qkv, *attended, *gate_up, *hidden, *scratch;  // normed and gate_up hold ROW_BLOCK rows
  int64_t scratch_floats;  // per thread
  int32_t *next_items;  // one per layer: attention's work is taken from there
  int64_t first_unit, last_unit;  // what they pass: 0 embedding, 1 + 2 * layer attention, 2 + 2 * layer MLP, then norm
  int64_t num_segments;
  const Segment *segments;
  float *low;  // [ROW_BLOCK, rank] for the narrow products of adapters
  int64_t rounded_row, rounded_logit;  // rows, and logit rows, from there on are rounded to bfloat16 for products
  uint32_t *pairs;  // [ROW_BLOCK, half of the widest] for them
} Step;

// Units of a model for some of a step's rows, and where slots and table of their layers begin among the step's
typedef struct {
  const Model *model;
  int64_t first_unit, last_unit, slots, table;
  Range rows, sequences, logits;
} Part;

typedef struct {
  const Model *model;
  int64_t num_rows, num_kept;
  const float *hidden;
  const int64_t *tokens, *kept_rows;  // kept_rows: in rising order
  float *logprobs, *kept_logits, *logits;  // kept_logits: [num_kept, vocabulary]; logits: of ROW_BLOCK rows
  uint32_t *pairs;  // as of a step, where rows are rounded
} Scoring;

typedef struct {
  int64_t num_rows, vocabulary;
  const float *logits;
  const double *temperatures, *uniforms;
  int64_t *tokens;
  float *logprobs, *scratch;  // no logprobs: they are not wanted
  const uint8_t *ends;        // [vocabulary] tokens that may be a text's last; none: nobody asks
} Sampling;
void atts_sample(const Sampling *sampling);

// Calls `work` once in each of `threads` threads, as number `thread`
typedef void Work(const void *task, int64_t thread, int64_t threads);
void parallel(int64_t threads, Work *work, const void *task);
#define BARRIER _Pragma("omp barrier")

// out[m, n] (+)= a[m, k] * weights + bias, rows of a `stride` apart; every thread does its share of the columns.
// With weights in pairs, a is what round_to_pairs made of it
void matmul(int64_t kind, const void *a, int64_t stride, int64_t m, int64_t k, const void *weights, int64_t n,
             float *out, const float *bias, int accumulate, int64_t thread, int64_t threads);

// pairs[rows, k / 2]: a[rows, k] rounded to bfloat16, rows of a `stride` apart; every thread does its share of the rows
void round_to_pairs(const float *a, int64_t stride, int64_t rows, int64_t k, uint32_t *pairs, int64_t thread, int64_t threads);

// logits[rows, vocabulary] of hidden[rows, hidden_size]; every thread does its share of the columns
void compute_logits(const Model *model, const float *hidden, int64_t rows, float *logits, int64_t thread, int64_t threads);

// attended = attention of every token of the step, in the last layer of logit_rows alone; threads take sequences, or heads
// of them, as they come
void attention(const Model *model, const Step *step, int64_t index, int64_t threads, float *scratch);

#endif
