// From logits to tokens and log-probabilities, as atts.decode has it for laws without filters.

#include "model.h"

// sum of exp(x / temperature - top / temperature), LANES terms a part; NaN where any x is not a finite number
INLINE float mass(const float *x, int64_t n, float inverse, float top, float *parts) {
  vf total = {0}, zeros = {0};
  int64_t i = 0, part = 0;
  for (; i + LANES <= n; i += LANES, part++) {
    vf value = load(x + i), p = falling((value - splat(top)) * splat(inverse));
    if (parts) parts[part] = sum(p);
    total += p;
    zeros += value * splat(0.0f);  // not zero when one of them is NaN or infinite, which no logit may be
  }
  float rest = 0;
  for (; i < n; i++) rest += expf((x[i] - top) * inverse) + x[i] * 0.0f;
  if (parts && n % LANES) parts[part] = rest;
  return sum(total + zeros) + rest;
}

INLINE float greatest(const float *x, int64_t n) {
  vf most[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    UNROLL for (int c = 0; c < 4; c++) most[c] = larger(load(x + i + c * LANES), most[c]);
  for (; i + LANES <= n; i += LANES) most[0] = larger(load(x + i), most[0]);
  vf all = larger(larger(most[0], most[1]), larger(most[2], most[3]));
  float top = all[0];
  for (int lane = 1; lane < LANES; lane++) top = all[lane] > top ? all[lane] : top;
  for (; i < n; i++) top = x[i] > top ? x[i] : top;
  return top;
}

static float logprob_of(const float *x, int64_t n, int64_t token, float top) { return x[token] - top - logf(mass(x, n, 1.0f, top, 0)); }

// One token a row from softmax(logits / temperature), by inverse CDF in token order; temperature 0 takes the first best.
EXPORT void atts_draw(const float *logits, int64_t rows, int64_t n, const double *temperatures, const double *uniforms,
               int64_t *tokens, float *logprobs, float *scratch) {
  for (int64_t r = 0; r < rows; r++) {
    const float *x = logits + r * n;
    float top = greatest(x, n);
    int64_t token = 0;
    while (token < n - 1 && x[token] != top) token++;
    if (temperatures[r] > 0) {
      float inverse = (float)(1.0 / temperatures[r]);
      mass(x, n, inverse, top, scratch);
      int64_t parts = (n + LANES - 1) / LANES, part = 0;
      double total = 0, before = 0;
      for (int64_t i = 0; i < parts; i++) total += scratch[i];
      double wanted = uniforms[r] * total;
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
    tokens[r] = token;
    logprobs[r] = logprob_of(x, n, token, top);
  }
}

// Log-probability of one token a row under softmax(logits)
EXPORT void atts_logprobs(const float *logits, int64_t rows, int64_t n, const int64_t *tokens, float *logprobs) {
  for (int64_t r = 0; r < rows; r++) logprobs[r] = logprob_of(logits + r * n, n, tokens[r], greatest(logits + r * n, n));
}

static void score(const void *task, int64_t me, int64_t all) {
  const Scoring *scoring = task;
  const Model *model = scoring->model;
  int64_t n = model->vocabulary, end = 0;
  for (int64_t top = 0; top < scoring->rows; top += ROW_BLOCK) {
    int64_t count = scoring->rows - top < ROW_BLOCK ? scoring->rows - top : ROW_BLOCK;
    make_logits(model, scoring->hidden + top * model->width, count, scoring->logits, me, all);
    BARRIER
    int64_t from = count * me / all, to = count * (me + 1) / all, at = top + from;
    atts_logprobs(scoring->logits + from * n, to - from, n, scoring->tokens + at, scoring->logprobs + at);
    for (; me == 0 && end < scoring->num_ends && scoring->ends[end] < top + count; end++)
      memcpy(scoring->kept + end * n, scoring->logits + (scoring->ends[end] - top) * n, (size_t)n * 4);
    BARRIER
  }
}

// logprobs[rows] of one token after each row of hidden, and the whole logits of the rows `ends`
EXPORT void atts_score(const Scoring *scoring, int64_t threads) { together(threads, score, scoring); }
