// From logits to tokens and log-probabilities, as atts.decode has it for laws without filters.

#include "model.h"

// max and sum of exp(x / temperature - max / temperature); NaN where any x is
INLINE float mass(const float *x, int64_t n, float inverse, float top, float *parts) {
  vf total = {0};
  int64_t i = 0, part = 0;
  for (; i + LANES <= n; i += LANES, part++) {
    vf p = exponential((load(x + i) - splat(top)) * splat(inverse));
    if (parts) parts[part] = sum(p);
    total += p;
  }
  float rest = 0;
  for (; i < n; i++) rest += expf((x[i] - top) * inverse);
  if (parts && n % LANES) parts[part] = rest;
  return sum(total) + rest;
}

// Is the sum of zero times each number zero? Not when one of them is NaN (or infinite, which no logit may be).
INLINE int is_sound(const float *x, int64_t n) {
  vf total = {0};
  int64_t i = 0;
  float rest = 0;
  for (; i + LANES <= n; i += LANES) total += load(x + i) * splat(0.0f);
  for (; i < n; i++) rest += x[i] * 0.0f;
  return sum(total) + rest == 0.0f;
}

INLINE int64_t best(const float *x, int64_t n) {
  vf most = splat(-INFINITY);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) most = larger(load(x + i), most);
  float top = most[0];
  for (int lane = 1; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;
  for (; i < n; i++) top = x[i] > top ? x[i] : top;
  for (i = 0; i < n - 1; i++)
    if (x[i] == top) break;
  return i;
}

// One token a row from softmax(logits / temperature), by inverse CDF in token order; temperature 0 takes the first best.
EXPORT void atts_draw(const float *logits, int64_t rows, int64_t n, const double *temperatures, const double *uniforms,
               int64_t *tokens, float *logprobs, float *scratch) {
  for (int64_t r = 0; r < rows; r++) {
    const float *x = logits + r * n;
    int64_t token = best(x, n);
    float top = x[token];
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
    logprobs[r] = is_sound(x, n) ? x[token] - top - logf(mass(x, n, 1.0f, top, 0)) : NAN;
  }
}

// Log-probability of one token a row under softmax(logits)
EXPORT void atts_logprobs(const float *logits, int64_t rows, int64_t n, const int64_t *tokens, float *logprobs) {
  for (int64_t r = 0; r < rows; r++) {
    const float *x = logits + r * n;
    float top = x[best(x, n)];
    logprobs[r] = is_sound(x, n) ? x[tokens[r]] - top - logf(mass(x, n, 1.0f, top, 0)) : NAN;
  }
}
