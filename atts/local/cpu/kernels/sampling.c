// Sampling from logits and log-probabilities, as in atts.sampling, for settings without filters.

#include "model.h"

// sum of exp(x / temperature - top / temperature), LANES terms a part; NaN where any x is not a finite number
INLINE float exp_sum(const float *x, int64_t n, float inverse, float top, float *parts) {
  vf total = {0}, zeros = {0};
  int64_t i = 0, part = 0;
  for (; i + LANES <= n; i += LANES, part++) {
    vf value = load(x + i), p = vexp((value - splat(top)) * splat(inverse));
    if (parts) parts[part] = sum(p);
    total += p;
    zeros += value * splat(0.0f);  // not zero when one of them is NaN or infinite, which no logit may be
  }
  float rest = 0;
  for (; i < n; i++) rest += expf((x[i] - top) * inverse) + x[i] * 0.0f;
  if (parts && n % LANES) parts[part] = rest;
  return sum(total + zeros) + rest;
}

INLINE float max_of(const float *x, int64_t n) {
  vf most[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    UNROLL for (int c = 0; c < 4; c++) most[c] = vmax(load(x + i + c * LANES), most[c]);
  for (; i + LANES <= n; i += LANES) most[0] = vmax(load(x + i), most[0]);
  vf all = vmax(vmax(most[0], most[1]), vmax(most[2], most[3]));
  float top = all[0];
  for (int lane = 1; lane < LANES; lane++) top = all[lane] > top ? all[lane] : top;
  for (; i < n; i++) top = x[i] > top ? x[i] : top;
  return top;
}

static float logprob_of(const float *x, int64_t n, int64_t token, float top) { return x[token] - top - logf(exp_sum(x, n, 1.0f, top, 0)); }

// One token a row from softmax(logits / temperature), by inverse CDF in token order; temperature 0 takes the first best.
EXPORT void atts_sample(const Sampling *sampling) {
  int64_t n = sampling->vocabulary;
  float *scratch = sampling->scratch;
  for (int64_t r = 0; r < sampling->num_rows; r++) {
    const float *x = sampling->logits + r * n;
    float top = max_of(x, n);
    int64_t token = 0;
    while (token < n - 1 && x[token] != top) token++;
    if (sampling->temperatures[r] > 0) {
      float inverse = (float)(1.0 / sampling->temperatures[r]);
      exp_sum(x, n, inverse, top, scratch);
      int64_t parts = (n + LANES - 1) / LANES, part = 0;
      double total = 0, before = 0;
      for (int64_t i = 0; i < parts; i++) total += scratch[i];
      double wanted = sampling->uniforms[r] * total;
      while (part < parts - 1 && before + scratch[part] <= wanted) before += scratch[part++];
      int64_t i = part * LANES, last = -1, end = i + LANES < n ? i + LANES : n;
      for (; i < end; i++) {
        float p = expf((x[i] - top) * inverse);
        if (p > 0) last = i;
        before += p;
        if (before > wanted) break;
      }
      if (last >= 0) token = last;  // rounding can leave `wanted` just unreached
    }
    sampling->tokens[r] = token;
    if (sampling->logprobs) sampling->logprobs[r] = logprob_of(x, n, token, top);
  }
}

// Log-probability of one token a row under softmax(logits)
EXPORT void atts_logprobs(const float *logits, int64_t rows, int64_t n, const int64_t *tokens, float *logprobs) {
  for (int64_t r = 0; r < rows; r++) logprobs[r] = logprob_of(logits + r * n, n, tokens[r], max_of(logits + r * n, n));
}

static void score(const void *task, int64_t thread, int64_t threads) {
  const Scoring *scoring = task;
  const Model *model = scoring->model;
  int64_t n = model->vocabulary, end = 0;
  for (int64_t top = 0; top < scoring->num_rows; top += ROW_BLOCK) {
    int64_t count = scoring->num_rows - top < ROW_BLOCK ? scoring->num_rows - top : ROW_BLOCK;
    const float *hidden = scoring->hidden + top * model->hidden_size;
    if (scoring->pairs) {
      int64_t k = model->hidden_size;
      round_to_pairs(hidden, k, count, k, scoring->pairs, thread, threads);
      BARRIER
      matmul(PAIRS_OF_K, scoring->pairs, k / 2, count, k, model->head_pairs, n, scoring->logits, 0, 0, thread, threads);
    } else {
      compute_logits(model, hidden, count, scoring->logits, thread, threads);
    }
    BARRIER
    int64_t from = count * thread / threads, to = count * (thread + 1) / threads, at = top + from;
    atts_logprobs(scoring->logits + from * n, to - from, n, scoring->tokens + at, scoring->logprobs + at);
    for (; thread == 0 && end < scoring->num_kept && scoring->kept_rows[end] < top + count; end++)
      memcpy(scoring->kept_logits + end * n, scoring->logits + (scoring->kept_rows[end] - top) * n, (size_t)n * 4);
    BARRIER
  }
}

// logprobs[rows] of one token after each row of hidden, and the whole logits of kept_rows
EXPORT void atts_score(const Scoring *scoring, int64_t threads) { parallel(threads, score, scoring); }
