// One step of a decoder on the CPU in float32: every operation between a batch of tokens and its logits.
//
// Written with the compilers' vector extensions, so one source serves AVX-512, AVX2 and NEON.

#include "model.h"

#ifdef _OPENMP
#include <omp.h>
#endif

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

static void turned(const float *x, const float *weight, const float *cosines, const float *sines, int64_t dim, float eps,
                   float factor, float *out) {
  int64_t half = dim / 2;
  float scale = weight ? scale_of(x, dim, eps) : 1.0f;
  for (int64_t i = 0; i < half; i++) {
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

#define BARRIER _Pragma("omp barrier")

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

static void run(const Model *model, const Step *step, int64_t me, int64_t threads) {
  int64_t m = step->num_tokens, width = model->width, inner = model->inner, halves = model->halves;
  int64_t across = model->heads * model->head_dim, rows = across + 2 * model->kv_heads * model->head_dim;
  int64_t from = m * me / threads, to = m * (me + 1) / threads;
  float *scratch = step->scratch + me * step->scratch_floats;
  for (int64_t t = from; t < to; t++)
    memcpy(step->x + t * width, model->embedding + step->tokens[t] * width, (size_t)width * 4);
  for (int64_t index = 0; index < model->layers; index++) {
    const Layer *layer = model->layer + index;
    for (int64_t t = from; t < to; t++) normed(step->x + t * width, layer->norm, width, model->eps, step->h + t * width);
    BARRIER
    product(halves, step->h, width, m, width, layer->qkv, rows, step->qkv, layer->qkv_bias, 0, me, threads, scratch);
    BARRIER
    store_keys(model, step, index, layer, from, to);
    BARRIER
    attention(model, step, index, threads, scratch);
    BARRIER
    product(halves, step->mixed, across, m, across, layer->out, width, step->x, layer->out_bias, 1, me, threads, scratch);
    BARRIER
    for (int64_t t = from; t < to; t++) normed(step->x + t * width, layer->mlp_norm, width, model->eps, step->h + t * width);
    BARRIER
    product(halves, step->h, width, m, width, layer->gate_up, 2 * inner, step->both, layer->gate_up_bias, 0, me, threads, scratch);
    BARRIER
    for (int64_t t = from; t < to; t++) gated(step->both + t * 2 * inner, inner, step->both + t * 2 * inner);
    BARRIER
    // the gated row lies at the front of its 2 * inner floats
    product(halves, step->both, 2 * inner, m, inner, layer->down, width, step->x, layer->down_bias, 1, me, threads, scratch);
    BARRIER
  }
  for (int64_t i = step->num_wanted * me / threads; i < step->num_wanted * (me + 1) / threads; i++)
    normed(step->x + step->wanted[i] * width, model->norm, width, model->eps, step->hidden + i * width);
}

EXPORT void atts_forward(const Model *model, const Step *step) {
#ifdef _OPENMP
  if (step->threads > 1) {
#pragma omp parallel num_threads((int)step->threads)
    run(model, step, omp_get_thread_num(), omp_get_num_threads());
    return;
  }
#endif
  run(model, step, 0, 1);
}

// logits[n, vocabulary] of hidden[n, width]
EXPORT void atts_head(const Model *model, const float *hidden, int64_t n, float *logits, int64_t threads, float *scratch,
               int64_t scratch_floats) {
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads((int)threads)
    product(model->halves, hidden, model->width, n, model->width, model->head, model->vocabulary, logits, 0, 0, omp_get_thread_num(), omp_get_num_threads(),
            scratch + omp_get_thread_num() * scratch_floats);
    return;
  }
#endif
  product(model->halves, hidden, model->width, n, model->width, model->head, model->vocabulary, logits, 0, 0, 0, 1, scratch);
}
