// The forward pass of one step on the CPU in float32: every operation between a batch of tokens and its logits.
//
// Written with the compilers' vector extensions, so one source serves AVX-512, AVX2 and NEON.

#include "model.h"

#ifdef _OPENMP
#include <omp.h>
#endif

void parallel(int64_t threads, Work *work, const void *task) {
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads((int)threads)
    work(task, omp_get_thread_num(), omp_get_num_threads());
    return;
  }
#endif
  (void)threads;
  work(task, 0, 1);
}

INLINE float scale_of(const float *x, int64_t n, float eps) {
  vf total = {0};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) { vf v = load(x + i); total += v * v; }
  float squares = sum(total);
  for (; i < n; i++) squares += x[i] * x[i];
  return 1.0f / sqrtf(squares / (float)n + eps);
}

static void rms_norm(const float *x, const float *weight, int64_t n, float eps, float *out) {
  float scale = scale_of(x, n, eps);
  for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

// The rotary embedding of one head, normed first where there is a weight; out may be x
static void apply_rope(const float *x, const float *weight, const float *cosines, const float *sines, int64_t dim, float eps,
                   float factor, float *out) {
  int64_t half = dim / 2, i = 0;
  float scale = weight ? scale_of(x, dim, eps) : 1.0f;
  for (; i + LANES <= half; i += LANES) {
    vf a = load(x + i) * splat(scale), b = load(x + i + half) * splat(scale), c = load(cosines + i), s = load(sines + i);
    if (weight) a *= load(weight + i), b *= load(weight + i + half);
    store(out + i, (a * c - b * s) * splat(factor));
    store(out + i + half, (b * c + a * s) * splat(factor));
  }
  for (; i < half; i++) {
    float a = x[i] * scale, b = x[i + half] * scale;
    if (weight) a *= weight[i], b *= weight[i + half];
    out[i] = (a * cosines[i] - b * sines[i]) * factor;
    out[i + half] = (b * cosines[i] + a * sines[i]) * factor;
  }
}

static void silu_mul(const float *gate_up, int64_t inner, float *out) {
  int64_t i = 0;
  for (; i + LANES <= inner; i += LANES) {
    vf gate = load(gate_up + i), up = load(gate_up + inner + i);
    store(out + i, gate / (splat(1.0f) + vexp_any(-gate)) * up);
  }
  for (; i < inner; i++) out[i] = gate_up[i] / (1.0f + expf(-gate_up[i])) * gate_up[inner + i];
}

// The norm of a head, those of a group's layers one after the other
INLINE const float *norm_of(const float *norms, int64_t layer, int64_t dim) { return norms ? norms + layer * dim : 0; }

static void store_kv(const Model *model, const Step *step, const Layer *layer, int64_t from, int64_t to) {
  int64_t dim = model->head_dim, heads = layer->num_heads, kv = layer->num_kv_heads, half = dim / 2;
  float factor = model->query_scale;
  for (int64_t t = from; t < to; t++) {
    float *row = step->qkv + t * (heads + 2 * kv) * dim;
    const float *cosines = layer->cosines + step->positions[t] * half, *sines = layer->sines + step->positions[t] * half;
    for (int64_t h = 0; h < heads; h++)
      apply_rope(row + h * dim, norm_of(layer->query_norm, h / model->num_heads, dim), cosines, sines, dim, model->eps,
                 factor, row + h * dim);
    float *key = layer->keys + step->slots[t] * layer->stride;
    for (int64_t h = 0; h < kv; h++)
      apply_rope(row + (heads + h) * dim, norm_of(layer->key_norm, h / model->num_kv_heads, dim), cosines, sines, dim,
                 model->eps, 1.0f, key + h * dim);
    memcpy(layer->values + step->slots[t] * layer->stride, row + (heads + kv) * dim, (size_t)(kv * dim) * 4);
  }
}

typedef struct {
  const Model *model;
  const Step *step;
  int64_t thread, threads;
} Worker;

// Adds what adapters add to a product of `count` rows of `a` from row `top` on, all of one block
static void add_deltas(const Worker *w, int64_t matrix, int are_logits, const float *a, int64_t stride, int64_t k, int64_t n,
                       float *out, int64_t top, int64_t count) {
  const Step *step = w->step;
  for (int64_t s = 0; s < step->num_segments; s++) {
    const Segment *segment = step->segments + s;
    const Delta *delta = segment->deltas + matrix;
    Range its = are_logits ? segment->logits : segment->rows;
    int64_t from = its.from < top ? 0 : its.from - top, to = its.to - top < count ? its.to - top : count;
    if (from >= to || !delta->rank) continue;
    matmul(FULL, a + from * stride, stride, to - from, k, delta->down, delta->rank, step->low, 0, 0, w->thread, w->threads);
    BARRIER
    matmul(FULL, step->low, delta->rank, to - from, delta->rank, delta->up, n, out + from * n, 0, 1, w->thread, w->threads);
    BARRIER
  }
}

// What a thread does of some rows
static Range share(Range rows, const Worker *w) {
  int64_t count = rows.to - rows.from;
  return (Range){rows.from + count * w->thread / w->threads, rows.from + count * (w->thread + 1) / w->threads};
}

// A matrix of a layer, with what it adds to
typedef struct {
  int64_t is_bf16;
  const void *weights, *pairs;
  int64_t k, n;
  const float *bias;
} Matrix;

// out[count, n] (+)= a[count, k] * weights + bias, for rows of a step, or of its logits, from `top` on: as they are, or
// rounded
static void product(const Worker *w, Matrix matrix, const float *a, int64_t stride, float *out, int accumulate, int64_t top,
                    int64_t count, int are_logits) {
  const Step *step = w->step;
  int64_t exact = (are_logits ? step->rounded_logit : step->rounded_row) - top, k = matrix.k, n = matrix.n;
  exact = exact < 0 ? 0 : exact < count ? exact : count;
  matmul(matrix.is_bf16 ? HALF : FULL, a, stride, exact, k, matrix.weights, n, out, matrix.bias, accumulate, w->thread, w->threads);
  if (exact < count) {
    round_to_pairs(a + exact * stride, stride, count - exact, k, step->pairs, w->thread, w->threads);
    BARRIER
    matmul(PAIRS_OF_K, step->pairs, k / 2, count - exact, k, matrix.pairs, n, out + exact * n, matrix.bias, accumulate,
           w->thread, w->threads);
  }
  BARRIER
}

// Queries, keys and values of `count` tokens from `top` on, rotated; keys and values go into the cache
static void project_qkv(const Worker *w, int64_t index, int64_t top, int64_t count) {
  const Model *model = w->model;
  const Step *step = w->step;
  const Layer *layer = model->layers + index;
  int64_t width = model->hidden_size, row = (layer->num_heads + 2 * layer->num_kv_heads) * model->head_dim;
  int64_t from = count * w->thread / w->threads, to = count * (w->thread + 1) / w->threads;
  for (int64_t t = from; t < to; t++)
    rms_norm(step->x + (top + t) * width, layer->norm, width, model->eps, step->normed + t * width);
  BARRIER
  Matrix qkv = {layer->attention_bf16, layer->qkv, layer->qkv_pairs, width, row, layer->qkv_bias};
  product(w, qkv, step->normed, width, step->qkv + top * row, 0, top, count, 0);
  add_deltas(w, index * MATRICES + QKV, 0, step->normed, width, width, row, step->qkv + top * row, top, count);
  store_kv(model, step, layer, top + from, top + to);
}

// Some rows on their way through a layer: all of a step's, or its logit_rows alone
typedef struct {
  float *x;
  const float *attended;
  int64_t top, count;
  int are_logits;
} Rows;

// The attention output's projection is added to x
static void project_out(const Worker *w, int64_t index, const Rows *rows) {
  const Layer *layer = w->model->layers + index;
  int64_t width = w->model->hidden_size, attn_size = w->model->num_heads * w->model->head_dim;
  const float *attended = rows->attended + layer->place;
  Matrix out = {layer->attention_bf16, layer->out, layer->out_pairs, attn_size, width, layer->out_bias};
  product(w, out, attended, layer->across, rows->x, 1, rows->top, rows->count, rows->are_logits);
  add_deltas(w, index * MATRICES + OUT, rows->are_logits, attended, layer->across, attn_size, width, rows->x, rows->top,
             rows->count);
}

// The feed-forward block is added to x
static void feed_forward(const Worker *w, int64_t index, const Rows *rows) {
  const Model *model = w->model;
  const Step *step = w->step;
  const Layer *layer = model->layers + index;
  int64_t width = model->hidden_size, inner = model->intermediate_size, count = rows->count;
  int64_t from = count * w->thread / w->threads, to = count * (w->thread + 1) / w->threads;
  for (int64_t t = from; t < to; t++)
    rms_norm(rows->x + t * width, layer->mlp_norm, width, model->eps, step->normed + t * width);
  BARRIER
  Matrix gate_up = {layer->mlp_bf16, layer->gate_up, layer->gate_up_pairs, width, 2 * inner, layer->gate_up_bias};
  product(w, gate_up, step->normed, width, step->gate_up, 0, rows->top, count, rows->are_logits);
  add_deltas(w, index * MATRICES + GATE_UP, rows->are_logits, step->normed, width, width, 2 * inner, step->gate_up, rows->top,
             count);
  for (int64_t t = from; t < to; t++) silu_mul(step->gate_up + t * 2 * inner, inner, step->gate_up + t * 2 * inner);
  BARRIER
  // the gated row lies at the front of its 2 * inner floats
  Matrix down = {layer->mlp_bf16, layer->down, layer->down_pairs, inner, width, layer->down_bias};
  product(w, down, step->gate_up, 2 * inner, rows->x, 1, rows->top, count, rows->are_logits);
  add_deltas(w, index * MATRICES + DOWN, rows->are_logits, step->gate_up, 2 * inner, inner, width, rows->x, rows->top, count);
}

// Only logit_rows go on from the last attention: side by side in `hidden`, their attention output in `qkv`
static void gather_logit_rows(const Worker *w, int64_t attn_size) {
  const Step *step = w->step;
  int64_t width = w->model->hidden_size;
  Range mine = share(step->logits, w);
  for (int64_t i = mine.from; i < mine.to; i++) {
    memcpy(step->hidden + i * width, step->x + step->logit_rows[i] * width, (size_t)width * 4);
    memcpy(step->qkv + i * attn_size, step->attended + step->logit_rows[i] * attn_size, (size_t)attn_size * 4);
  }
}

static int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct {
  const Model *model;
  const Step *step;
} Job;

static void forward(const void *task, int64_t thread, int64_t threads) {
  const Model *model = ((const Job *)task)->model;
  const Step *step = ((const Job *)task)->step;
  int64_t width = model->hidden_size;
  Worker w = {model, step, thread, threads};
  Range all = step->rows, mine = share(all, &w);
  int64_t first = step->first_unit, last = step->last_unit, layers = model->num_layers;
  if (first == 0)
    for (int64_t t = mine.from; t < mine.to; t++)
      memcpy(step->x + t * width, model->embedding + step->tokens[t] * width, (size_t)width * 4);
  BARRIER
  for (int64_t index = first ? (first - 1) / 2 : 0; index < layers && 1 + 2 * index < last; index++) {
    const int is_last = index + 1 == layers, attends = 1 + 2 * index >= first, feeds = 2 + 2 * index < last;
    const Layer *layer = model->layers + index;
    if (attends && layer->num_heads) {
      for (int64_t top = all.from; top < all.to; top += ROW_BLOCK) project_qkv(&w, index, top, min_of(ROW_BLOCK, all.to - top));
      BARRIER
      attention(model, step, index, threads, step->scratch + thread * step->scratch_floats);
      BARRIER
      if (is_last) gather_logit_rows(&w, layer->across);
      BARRIER
    }
    Range left = is_last ? step->logits : all;
    float *x = is_last ? step->hidden : step->x, *attended = is_last ? step->qkv : step->attended;
    for (int64_t top = left.from; top < left.to; top += ROW_BLOCK) {
      Rows rows = {x + top * width, attended + top * layer->across, top, min_of(ROW_BLOCK, left.to - top), is_last};
      if (attends) project_out(&w, index, &rows);
      if (feeds) feed_forward(&w, index, &rows);
    }
  }
  float *hidden = step->hidden;
  mine = share(step->logits, &w);
  if (last > 1 + 2 * layers)
    for (int64_t i = mine.from; i < mine.to; i++)
      rms_norm(hidden + i * width, model->norm, width, model->eps, hidden + i * width);
}

EXPORT int64_t atts_row_block(void) { return ROW_BLOCK; }

EXPORT void atts_forward(const Model *model, const Step *step) {
  Job job = {model, step};
  memset(step->next_items, 0, (size_t)model->num_layers * sizeof *step->next_items);
  parallel(step->threads, forward, &job);
}

// Parts of a step one after the other
EXPORT void atts_forward_parts(const Step *step, const Part *parts, int64_t count) {
  for (const Part *part = parts; part < parts + count; part++) {
    Step own = *step;
    own.first_unit = part->first_unit, own.last_unit = part->last_unit;
    own.slots += part->slots, own.table += part->table;
    own.rows = part->rows, own.sequences = part->sequences, own.logits = part->logits;
    atts_forward(part->model, &own);
  }
}

void compute_logits(const Model *model, const float *hidden, int64_t rows, float *logits, int64_t thread, int64_t threads) {
  int64_t width = model->hidden_size;
  matmul(model->is_bf16 ? HALF : FULL, hidden, width, rows, width, model->head, model->vocabulary, logits, 0, 0, thread, threads);
}

static void all_logits(const void *task, int64_t thread, int64_t threads) {
  const Scoring *scoring = task;
  compute_logits(scoring->model, scoring->hidden, scoring->num_rows, scoring->logits, thread, threads);
}

// logits[n, vocabulary] of hidden[n, hidden_size]
EXPORT void atts_logits(const Model *model, const float *hidden, int64_t n, float *logits, int64_t threads) {
  Scoring task = {.model = model, .num_rows = n, .hidden = hidden, .logits = logits};
  parallel(threads, all_logits, &task);
}

// Draws `turns` tokens for each sequence of `first`, which feeds what it was not fed yet; every token is fed, as a row of
// `next`, to draw the one after, which the model `later` computes. Turn after turn: uniforms and tokens, as many as there
// are sequences; `counts` go on. The logits of a turn lie `apart` numbers after those of the one before. The last turn is
// one in which a token among `ends` was drawn, if that comes earlier; how many there were.
EXPORT int64_t atts_draw_ahead(const Model *model, const Model *later, const Step *first, const Step *next,
                               const Sampling *sampling, int64_t turns, const int64_t *counts, int64_t apart) {
  Step step = *first;
  Sampling own = *sampling;
  for (int64_t turn = 0; turn < turns; turn++) {
    int64_t count = counts[turn];
    atts_forward(model, &step);
    atts_logits(model, step.hidden, count, (float *)own.logits, step.threads);
    own.num_rows = count;
    atts_sample(&own);
    int is_last = turn + 1 == turns;
    for (int64_t i = 0; own.ends && i < count; i++) is_last |= own.ends[own.tokens[i]];
    if (is_last) return turn + 1;
    own.uniforms += sampling->num_rows, own.tokens += sampling->num_rows, own.logits += apart;
    if (own.logprobs) own.logprobs += sampling->num_rows;
    if (turn == 0) step = *next, model = later;
    step.tokens = own.tokens - sampling->num_rows;
    step.rows.to = step.sequences.to = step.logits.to = counts[turn + 1];
    for (int64_t i = 0; turn && i < counts[turn + 1]; i++) {
      int64_t place = ((int64_t *)step.context_lens)[i]++;
      ((int64_t *)step.positions)[i]++;
      ((int64_t *)step.slots)[i] = step.table[step.table_rows[i] * step.table_width + place];
    }
  }
  return turns;
}
