// One step of a decoder on the CPU in float32: every operation between a batch of tokens and its logits.
//
// Written with the compilers' vector extensions, so one source serves AVX-512, AVX2 and NEON.

#include "model.h"

#ifdef _OPENMP
#include <omp.h>
#endif

void together(int64_t threads, Work *work, const void *task) {
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

static void normed(const float *x, const float *weight, int64_t n, float eps, float *out) {
  float scale = scale_of(x, n, eps);
  for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

// A head turned to its position, normed first where there is a weight; out may be x
static void turned(const float *x, const float *weight, const float *cosines, const float *sines, int64_t dim, float eps,
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

static void gated(const float *both, int64_t inner, float *out) {
  int64_t i = 0;
  for (; i + LANES <= inner; i += LANES) {
    vf gate = load(both + i), up = load(both + inner + i);
    store(out + i, gate / (splat(1.0f) + exponential(-gate)) * up);
  }
  for (; i < inner; i++) out[i] = both[i] / (1.0f + expf(-both[i])) * both[inner + i];
}

static void store_keys(const Model *model, const Step *step, int64_t index, const Layer *layer, int64_t from, int64_t to) {
  int64_t dim = model->head_dim, heads = model->heads, kv = model->kv_heads, half = dim / 2;
  float factor = 1.0f / sqrtf((float)dim);
  float *keys = model->cache + 2 * index * model->slots * kv * dim, *values = keys + model->slots * kv * dim;
  for (int64_t t = from; t < to; t++) {
    float *row = step->qkv + t * (heads + 2 * kv) * dim;
    const float *cosines = model->cosines + step->positions[t] * half, *sines = model->sines + step->positions[t] * half;
    for (int64_t h = 0; h < heads; h++)
      turned(row + h * dim, layer->query_norm, cosines, sines, dim, model->eps, factor, row + h * dim);
    float *key = keys + step->slots[t] * kv * dim;
    for (int64_t h = 0; h < kv; h++)
      turned(row + (heads + h) * dim, layer->key_norm, cosines, sines, dim, model->eps, 1.0f, key + h * dim);
    memcpy(values + step->slots[t] * kv * dim, row + (heads + kv) * dim, (size_t)(kv * dim) * 4);
  }
}

typedef struct {
  const Model *model;
  const Step *step;
  int64_t me, threads;
  float *scratch;
} Worker;

// Queries, keys and values of `count` tokens from `top` on
static void prepare(const Worker *w, int64_t index, int64_t top, int64_t count) {
  const Model *model = w->model;
  const Step *step = w->step;
  const Layer *layer = model->layer + index;
  int64_t width = model->width, row = (model->heads + 2 * model->kv_heads) * model->head_dim;
  int64_t from = count * w->me / w->threads, to = count * (w->me + 1) / w->threads;
  for (int64_t t = from; t < to; t++) normed(step->x + (top + t) * width, layer->norm, width, model->eps, step->h + t * width);
  BARRIER
  product(model->halves, step->h, width, count, width, layer->qkv, row, step->qkv + top * row, layer->qkv_bias, 0, w->me,
          w->threads);
  BARRIER
  store_keys(model, step, index, layer, top + from, top + to);
}

// What attention mixed and the feed-forward block are added to `count` rows of x
static void complete(const Worker *w, const Layer *layer, const float *mixed, float *x, int64_t count) {
  const Model *model = w->model;
  const Step *step = w->step;
  int64_t width = model->width, inner = model->inner, across = model->heads * model->head_dim;
  int64_t from = count * w->me / w->threads, to = count * (w->me + 1) / w->threads;
  product(model->halves, mixed, across, count, across, layer->out, width, x, layer->out_bias, 1, w->me, w->threads);
  BARRIER
  for (int64_t t = from; t < to; t++) normed(x + t * width, layer->mlp_norm, width, model->eps, step->h + t * width);
  BARRIER
  product(model->halves, step->h, width, count, width, layer->gate_up, 2 * inner, step->both, layer->gate_up_bias, 0, w->me,
          w->threads);
  BARRIER
  for (int64_t t = from; t < to; t++) gated(step->both + t * 2 * inner, inner, step->both + t * 2 * inner);
  BARRIER
  // the gated row lies at the front of its 2 * inner floats
  product(model->halves, step->both, 2 * inner, count, inner, layer->down, width, x, layer->down_bias, 1, w->me, w->threads);
  BARRIER
}

// Only the wanted tokens go on from the last attention: side by side in `hidden`, what was mixed for them in `qkv`
static void gather(const Worker *w, int64_t across) {
  const Step *step = w->step;
  int64_t width = w->model->width, count = step->num_wanted;
  for (int64_t i = count * w->me / w->threads; i < count * (w->me + 1) / w->threads; i++) {
    memcpy(step->hidden + i * width, step->x + step->wanted[i] * width, (size_t)width * 4);
    memcpy(step->qkv + i * across, step->mixed + step->wanted[i] * across, (size_t)across * 4);
  }
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct {
  const Model *model;
  const Step *step;
} Job;

static void run(const void *task, int64_t me, int64_t threads) {
  const Model *model = ((const Job *)task)->model;
  const Step *step = ((const Job *)task)->step;
  int64_t m = step->num_tokens, width = model->width, across = model->heads * model->head_dim;
  Worker w = {model, step, me, threads, step->scratch + me * step->scratch_floats};
  for (int64_t t = m * me / threads; t < m * (me + 1) / threads; t++)
    memcpy(step->x + t * width, model->embedding + step->tokens[t] * width, (size_t)width * 4);
  BARRIER
  for (int64_t index = 0; index < model->layers; index++) {
    const int is_last = index + 1 == model->layers;
    for (int64_t top = 0; top < m; top += ROW_BLOCK) prepare(&w, index, top, least(ROW_BLOCK, m - top));
    BARRIER
    attention(model, step, index, threads, w.scratch);
    BARRIER
    if (is_last) gather(&w, across);
    BARRIER
    int64_t count = is_last ? step->num_wanted : m;
    float *x = is_last ? step->hidden : step->x, *mixed = is_last ? step->qkv : step->mixed;
    for (int64_t top = 0; top < count; top += ROW_BLOCK)
      complete(&w, model->layer + index, mixed + top * across, x + top * width, least(ROW_BLOCK, count - top));
  }
  float *hidden = step->hidden;
  for (int64_t i = step->num_wanted * me / threads; i < step->num_wanted * (me + 1) / threads; i++)
    normed(hidden + i * width, model->norm, width, model->eps, hidden + i * width);
}

EXPORT int64_t atts_row_block(void) { return ROW_BLOCK; }

EXPORT void atts_forward(const Model *model, const Step *step) {
  Job job = {model, step};
  together(step->threads, run, &job);
}

void make_logits(const Model *model, const float *hidden, int64_t rows, float *logits, int64_t me, int64_t threads) {
  int64_t width = model->width;
  product(model->halves, hidden, width, rows, width, model->head, model->vocabulary, logits, 0, 0, me, threads);
}

static void head(const void *task, int64_t me, int64_t all) {
  const Scoring *logits = task;
  make_logits(logits->model, logits->hidden, logits->rows, logits->logits, me, all);
}

// logits[n, vocabulary] of hidden[n, width]
EXPORT void atts_head(const Model *model, const float *hidden, int64_t n, float *logits, int64_t threads) {
  Scoring task = {.model = model, .rows = n, .hidden = hidden, .logits = logits};
  together(threads, head, &task);
}
