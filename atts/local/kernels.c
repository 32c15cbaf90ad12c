// One step of a decoder on the CPU in float32: every operation between a batch of tokens and its logits.
//
// Written with the compilers' vector extensions, so one source serves AVX-512, AVX2 and NEON. Each output of a matrix
// product sums over k in the same order whatever the batch, so who else is in a batch does not change a bit of it.

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define TILE_ROWS 12
#elif defined(__AVX__)
#define LANES 8
#define TILE_ROWS 6
#else
#define LANES 4
#define TILE_ROWS 8
#endif
#define PANEL (2 * LANES)  // columns of a packed panel
#define ROW_BLOCK (8 * TILE_ROWS)  // rows that stay in the second-level cache while panels pass by
#define KEYS 64  // keys of one block of attention
#define BLOCK 32  // keys all heads go through before the next ones
#define AHEAD 8  // rows a prefetch runs ahead
#define UNROLL _Pragma("GCC unroll 32")
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint32_t vu __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

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

INLINE vf splat(float a) { return a - (vf){0}; }
INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf v) { *(vf *)p = v; }
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vf larger(vf a, vf b) { return pick(a > b, a, b); }

INLINE float sum(vf v) {
  float total = 0;
#if LANES == 16
  typedef float v8 __attribute__((vector_size(32)));
  typedef float v4 __attribute__((vector_size(16)));
  v8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  v4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  total = (b[0] + b[2]) + (b[1] + b[3]);
#elif LANES == 8
  typedef float v4 __attribute__((vector_size(16)));
  v4 b = __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
  total = (b[0] + b[2]) + (b[1] + b[3]);
#else
  total = (v[0] + v[2]) + (v[1] + v[3]);
#endif
  return total;
}

// exp to about one unit in the last place; 0 far below, infinity never needed by callers
INLINE vf exponential(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  vf floor = splat(-87.0f), ceiling = splat(88.0f);
  vf y = pick(x < floor, floor, x);
  y = pick(y > ceiling, ceiling, y);
  vf n = y * splat(1.44269504088896341f) + magic;
  vf whole = n - magic;
  vf r = y - whole * splat(0.693359375f);
  r = r - whole * splat(-2.12194440e-4f);
  vf p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
  vi bits = ((vi)n - (vi)magic + 127) << 23;
  vf value = p * (vf)bits;
  return pick(x < floor, splat(0.0f), value);
}

// ---------------------------------------------------------------------------------------------- matrix products

INLINE vf widen(const uint16_t *p) {
  vu wide = __builtin_convertvector(*(const vh *)p, vu) << 16;
  return (vf)wide;
}

// out[rows, columns] (+)= sums + bias
static void finish(const float *sums, int64_t rows, int64_t width, float *out, int64_t out_stride, const float *bias,
                   int accumulate, int64_t columns) {
  int64_t n = columns < width ? columns : width;
  for (int64_t i = 0; i < rows; i++) {
    const float *from = sums + i * width;
    float *to = out + i * out_stride;
    if (accumulate && bias) for (int64_t c = 0; c < n; c++) to[c] += from[c] + bias[c];
    else if (accumulate) for (int64_t c = 0; c < n; c++) to[c] += from[c];
    else if (bias) for (int64_t c = 0; c < n; c++) to[c] = from[c] + bias[c];
    else memcpy(to, from, (size_t)n * 4);
  }
}

// sums[rows, panels * PANEL] of `rows` rows of a with `panels` panels of weights, all of k in one go
INLINE void tile(const int rows, const int panels, const int halves, const float *a, int64_t stride, const void *weights,
                 int64_t k, float *sums) {
  vf acc[rows * panels * 2];
  UNROLL for (int i = 0; i < rows * panels * 2; i++) acc[i] = (vf){0};
  _Pragma("GCC unroll 1") for (int64_t j = 0; j < k; j++) {
    UNROLL for (int p = 0; p < panels; p++) {
      vf left, right;
      if (halves) {
        const uint16_t *w = (const uint16_t *)weights + (p * k + j) * PANEL;
        left = widen(w), right = widen(w + LANES);
      } else {
        const float *w = (const float *)weights + (p * k + j) * PANEL;
        left = load(w), right = load(w + LANES);
      }
      UNROLL for (int i = 0; i < rows; i++) {
        vf value = splat(a[i * stride + j]);
        acc[(i * panels + p) * 2] += value * left;
        acc[(i * panels + p) * 2 + 1] += value * right;
      }
    }
  }
  UNROLL for (int i = 0; i < rows * panels * 2; i++) store(sums + i * LANES, acc[i]);
}

typedef void Tile(const float *a, int64_t stride, const void *weights, int64_t k, float *sums);

#define TILE(R, P)                                                                                     \
  static void tile_##R##_##P##_full(const float *a, int64_t s, const void *w, int64_t k, float *sums) { \
    tile(R, P, 0, a, s, w, k, sums);                                                                   \
  }                                                                                                    \
  static void tile_##R##_##P##_half(const float *a, int64_t s, const void *w, int64_t k, float *sums) { \
    tile(R, P, 1, a, s, w, k, sums);                                                                   \
  }
#define BOTH(R, P) {tile_##R##_##P##_full, tile_##R##_##P##_half}

TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1)
#if LANES == 16
TILE(7, 1) TILE(8, 1) TILE(9, 1) TILE(10, 1) TILE(11, 1) TILE(12, 1)
TILE(1, 2) TILE(2, 2) TILE(3, 2) TILE(4, 2) TILE(5, 2) TILE(6, 2) TILE(1, 4) TILE(2, 4) TILE(3, 4)
#define WIDE_PANELS 4
#define HALF_PANELS 2
static Tile *const by_wide[][2] = {BOTH(1, 4), BOTH(2, 4), BOTH(3, 4)};
static Tile *const by_half[][2] = {BOTH(1, 2), BOTH(2, 2), BOTH(3, 2), BOTH(4, 2), BOTH(5, 2), BOTH(6, 2)};
static Tile *const by_one[][2] = {BOTH(1, 1), BOTH(2, 1), BOTH(3, 1), BOTH(4, 1), BOTH(5, 1), BOTH(6, 1),
                                  BOTH(7, 1), BOTH(8, 1), BOTH(9, 1), BOTH(10, 1), BOTH(11, 1), BOTH(12, 1)};
#else
TILE(1, 2) TILE(2, 2) TILE(3, 2)
#define WIDE_PANELS 2
#define HALF_PANELS 1
static Tile *const by_wide[][2] = {BOTH(1, 2), BOTH(2, 2), BOTH(3, 2)};
#if LANES == 4
TILE(7, 1) TILE(8, 1)
static Tile *const by_one[][2] = {BOTH(1, 1), BOTH(2, 1), BOTH(3, 1), BOTH(4, 1),
                                  BOTH(5, 1), BOTH(6, 1), BOTH(7, 1), BOTH(8, 1)};
#else
static Tile *const by_one[][2] = {BOTH(1, 1), BOTH(2, 1), BOTH(3, 1), BOTH(4, 1), BOTH(5, 1), BOTH(6, 1)};
#endif
#define by_half by_one
#endif

INLINE int64_t balanced(int64_t rows, int64_t most) {
  int64_t blocks = (rows + most - 1) / most;
  return (rows + blocks - 1) / blocks;  // 13 rows are 7 + 6, not 12 + 1
}

// out[m, n] (+)= a[m, k] * weights + bias, rows of a `stride` apart; thread `me` of `threads` does its share of the columns
static void product(int64_t halves, const float *a, int64_t stride, int64_t m, int64_t k, const void *weights, int64_t n,
                    float *out, const float *bias, int accumulate, int64_t me, int64_t threads, float *wide) {
  int64_t all = (n + PANEL - 1) / PANEL, first = all * me / threads, last = all * (me + 1) / threads;
  float sums[TILE_ROWS * 2 * PANEL] __attribute__((aligned(64)));
  const int is_tall = halves && m > 2 * TILE_ROWS;  // then a panel is widened once for many rows
  for (int64_t top = 0; top < m; top += ROW_BLOCK) {
    int64_t block = m - top < ROW_BLOCK ? m - top : ROW_BLOCK, step = balanced(block, TILE_ROWS), panels;
    for (int64_t panel = first; panel < last; panel += panels) {
      panels = step <= 3 ? WIDE_PANELS : step <= 6 ? HALF_PANELS : 1;
      if (is_tall || last - panel < panels) panels = 1;
      Tile *const (*table)[2] = panels == 1 ? by_one : panels == WIDE_PANELS ? by_wide : by_half;
      const char *w = (const char *)weights + panel * k * PANEL * (halves ? 2 : 4);
      if (is_tall) {
        for (int64_t at = 0; at < k * PANEL; at += LANES) store(wide + at, widen((const uint16_t *)w + at));
        w = (const char *)wide;
      }
      for (int64_t i = 0; i < block; i += step) {
        int64_t rows = block - i < step ? block - i : step;
        table[rows - 1][halves && !is_tall](a + (top + i) * stride, stride, w, k, sums);
        finish(sums, rows, panels * PANEL, out + (top + i) * n + panel * PANEL, n, bias ? bias + panel * PANEL : 0,
               accumulate, n - panel * PANEL);
      }
    }
  }
}

int64_t atts_packed_bytes(int64_t n, int64_t k, int64_t halves) {
  return (n + PANEL - 1) / PANEL * PANEL * k * (halves ? 2 : 4);
}

// weights[n, k] into panels; bfloat16 only where the caller knows that it loses nothing
void atts_pack(const float *weights, int64_t n, int64_t k, int64_t halves, void *packed) {
  for (int64_t panel = 0; panel * PANEL < n; panel++) {
    for (int64_t j = 0; j < k; j++) {
      for (int64_t c = 0; c < PANEL; c++) {
        int64_t row = panel * PANEL + c, at = (panel * k + j) * PANEL + c;
        float value = row < n ? weights[row * k + j] : 0.0f;
        if (halves) {
          uint32_t bits;
          memcpy(&bits, &value, 4);
          ((uint16_t *)packed)[at] = (uint16_t)(bits >> 16);
        } else {
          ((float *)packed)[at] = value;
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------ small parts

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

// ------------------------------------------------------------------------------------------------ attention

typedef struct {
  const float *keys, *values;  // of this layer and kv head
  int64_t stride, dim;  // floats from slot to slot
  const int32_t *slots;
  int64_t length;  // how many of them there are
} View;

// Rows lie where the pool put them, which no prefetcher of the processor can guess.
INLINE void fetch(const float *row, const int64_t dim) {
  UNROLL for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(row + d);
}

// to[0..4) = the sums of four vectors
INLINE void sum_four(vf a, vf b, vf c, vf d, float *to) {
#if LANES == 16
  vf ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
          __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  vf cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
          __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  vf all = __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  all += __builtin_shufflevector(all, all, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  all += __builtin_shufflevector(all, all, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  to[0] = all[0], to[1] = all[4], to[2] = all[8], to[3] = all[12];
#else
  to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
#endif
}

// scores[group, padded] of `count` keys for the `group` query heads that share them
INLINE void dots(const View *view, const int64_t dim, int64_t from, int64_t to, const float *query, int64_t group,
                 float *scores, int64_t padded) {
  for (int64_t j = from; j < to; j += 4) {
    const float *k[4];
    UNROLL for (int i = 0; i < 4; i++) {
      k[i] = view->keys + view->slots[j + i < to ? j + i : j] * view->stride;
      fetch(view->keys + view->slots[j + i + AHEAD < view->length ? j + i + AHEAD : j] * view->stride, dim);
    }
    for (int64_t g = 0; g < group; g++) {
      vf acc[4];
      UNROLL for (int i = 0; i < 4; i++) acc[i] = (vf){0};
      UNROLL for (int64_t d = 0; d < dim; d += LANES) {
        vf q = load(query + g * dim + d);
        UNROLL for (int i = 0; i < 4; i++) acc[i] += q * load(k[i] + d);
      }
      float four[4];
      sum_four(acc[0], acc[1], acc[2], acc[3], four);
      memcpy(scores + g * padded + j, four, (size_t)(to - j < 4 ? to - j : 4) * 4);
    }
  }
}

// out[group, dim] += the values weighted by scores
INLINE void mixes(const View *view, const int64_t dim, int64_t from, int64_t to, const float *scores, const int group,
                  int64_t padded, float *out) {
  vf acc[group * (dim / LANES)];
  UNROLL for (int i = 0; i < group * (dim / LANES); i++) acc[i] = load(out + i * LANES);
  for (int64_t j = from; j < to; j++) {
    const float *value = view->values + view->slots[j] * view->stride;
    fetch(view->values + view->slots[j + AHEAD < view->length ? j + AHEAD : j] * view->stride, dim);
    UNROLL for (int64_t d = 0; d < dim / LANES; d++) {
      vf v = load(value + d * LANES);
      UNROLL for (int g = 0; g < group; g++) acc[g * (dim / LANES) + d] += splat(scores[g * padded + j]) * v;
    }
  }
  UNROLL for (int i = 0; i < group * (dim / LANES); i++) store(out + i * LANES, acc[i]);
}

typedef void Dots(const View *view, int64_t from, int64_t to, const float *query, int64_t group, float *scores, int64_t padded);
typedef void Mixes(const View *view, int64_t from, int64_t to, const float *scores, int64_t padded, float *out);

#define MIXES(D, G)                                                                                               \
  static void mixes_##D##_##G(const View *view, int64_t from, int64_t to, const float *scores, int64_t padded, float *out) { \
    mixes(view, D, from, to, scores, G, padded, out);                                                             \
  }
#define ATTENDS(D)                                                                                               \
  static void dots_##D(const View *view, int64_t from, int64_t to, const float *query, int64_t group, float *scores, \
                       int64_t padded) {                                                                         \
    dots(view, D, from, to, query, group, scores, padded);                                                       \
  }                                                                                                              \
  MIXES(D, 1) MIXES(D, 2) MIXES(D, 4)
ATTENDS(16) ATTENDS(32) ATTENDS(64) ATTENDS(96) ATTENDS(128)

#define NAMES(D) {D, dots_##D, {mixes_##D##_1, mixes_##D##_2, mixes_##D##_4}}
typedef struct {
  int64_t dim;
  Dots *dots;
  Mixes *mixes[3];  // of 1, 2, 4 heads
} Attends;
static const Attends attends[] = {NAMES(16), NAMES(32), NAMES(64), NAMES(96), NAMES(128)};

// row[0..padded) becomes exp(row - max), zeros from `length` on; returns their sum
static float softened(float *row, int64_t length, int64_t padded) {
  for (int64_t j = length; j < padded; j++) row[j] = -INFINITY;
  vf most = splat(-INFINITY);
  for (int64_t j = 0; j < padded; j += LANES) most = larger(load(row + j), most);
  float top = most[0];
  for (int i = 1; i < LANES; i++) top = most[i] > top ? most[i] : top;
  vf total = {0};
  for (int64_t j = 0; j < padded; j += LANES) {
    vf p = exponential(load(row + j) - splat(top));
    store(row + j, p);
    total += p;
  }
  return sum(total);
}

// One query position, the kv heads from `head` to `last`; block by block, so that rows come from memory once.
static void attend_one(View view, const Attends *kind, int64_t heads, int64_t group, const float *query, int64_t length,
                       float *scratch, float *out) {
  int64_t dim = view.dim, padded = (length + LANES - 1) / LANES * LANES, across = group * dim;
  const float *keys = view.keys, *values = view.values;
  for (int64_t from = 0; from < length; from += BLOCK) {
    int64_t to = length - from < BLOCK ? length : from + BLOCK;
    for (int64_t h = 0; h < heads; h++) {
      view.keys = keys + h * dim;
      kind->dots(&view, from, to, query + h * across, group, scratch + h * group * padded, padded);
    }
  }
  float totals[heads * group];
  for (int64_t i = 0; i < heads * group; i++) totals[i] = softened(scratch + i * padded, length, padded);
  memset(out, 0, (size_t)(heads * across) * 4);
  for (int64_t from = 0; from < length; from += BLOCK) {
    int64_t to = length - from < BLOCK ? length : from + BLOCK;
    for (int64_t h = 0; h < heads; h++) {
      view.values = values + h * dim;
      for (int64_t g = 0; g < group;) {
        int part = group - g >= 4 ? 2 : group - g >= 2 ? 1 : 0;
        int64_t at = h * group + g;
        kind->mixes[part](&view, from, to, scratch + at * padded, padded, out + at * dim);
        g += 1 << part;
      }
    }
  }
  for (int64_t i = 0; i < heads * group; i++)
    for (int64_t d = 0; d < dim; d++) out[i * dim + d] /= totals[i];
}

// Up to LANES (query, head) pairs at once, one per lane; keys and values are broadcast.
static void attend_lanes(const View *view, int64_t dim, const float *turned_query, const int32_t *lane_positions,
                         int64_t length, float *scratch, float *out /* [dim, LANES] */) {
  float *weights = scratch;  // [KEYS, LANES]
  vf most = splat(-INFINITY), total = {0};
  vi positions = *(const vi *)lane_positions;
  int64_t least = lane_positions[0];
  for (int i = 1; i < LANES; i++) least = lane_positions[i] < least ? lane_positions[i] : least;
  for (int64_t d = 0; d < dim; d++) store(out + d * LANES, (vf){0});
  for (int64_t from = 0; from < length; from += KEYS) {
    int64_t count = length - from < KEYS ? length - from : KEYS;
    const int32_t *slots = view->slots + from;
    vf block = splat(-INFINITY);
    int64_t j = 0;
    for (; j < count; j += 4) {
      const float *k0 = view->keys + slots[j] * view->stride;
      const float *k1 = view->keys + slots[j + 1 < count ? j + 1 : j] * view->stride;
      const float *k2 = view->keys + slots[j + 2 < count ? j + 2 : j] * view->stride;
      const float *k3 = view->keys + slots[j + 3 < count ? j + 3 : j] * view->stride;
      vf s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
      for (int64_t d = 0; d < dim; d++) {
        vf q = load(turned_query + d * LANES);
        s0 += splat(k0[d]) * q, s1 += splat(k1[d]) * q, s2 += splat(k2[d]) * q, s3 += splat(k3[d]) * q;
      }
      vf all[4] = {s0, s1, s2, s3};
      for (int64_t i = 0; i < 4 && j + i < count; i++) {
        vf s = all[i];
        if (from + j + i > least) {
          vi at = (int32_t)(from + j + i) - (vi){0};
          s = pick(at > positions, splat(-INFINITY), s);
        }
        store(weights + (j + i) * LANES, s);
        block = larger(s, block);
      }
    }
    vf top = larger(most, block);
    vf shrink = exponential(most - top);
    most = top;
    vf added = {0};
    for (int64_t i = 0; i < count; i++) {
      vf p = exponential(load(weights + i * LANES) - top);
      store(weights + i * LANES, p);
      added += p;
    }
    total = total * shrink + added;
    for (int64_t d = 0; d < dim; d += 8) {
      vf acc[8];
      UNROLL for (int i = 0; i < 8; i++) acc[i] = load(out + (d + i) * LANES) * shrink;
      for (int64_t i = 0; i < count; i++) {
        const float *value = view->values + slots[i] * view->stride + d;
        vf p = load(weights + i * LANES);
        UNROLL for (int c = 0; c < 8; c++) acc[c] += splat(value[c]) * p;
      }
      UNROLL for (int i = 0; i < 8; i++) store(out + (d + i) * LANES, acc[i]);
    }
  }
  for (int64_t d = 0; d < dim; d++) store(out + d * LANES, load(out + d * LANES) / total);
}

// `count` queries of one sequence that share a kv head, the last of them at position length - 1
static void attend_many(const Model *model, const Step *step, const View *view, int64_t head, int64_t first,
                        int64_t count, int64_t length, float *scratch) {
  int64_t dim = model->head_dim, group = model->heads / model->kv_heads, pairs = count * group;
  int64_t across = model->heads * dim, row = (model->heads + 2 * model->kv_heads) * dim;
  float *query = scratch, *out = query + dim * LANES, *rest = out + dim * LANES;
  for (int64_t from = 0; from < pairs; from += LANES) {
    int64_t lanes = pairs - from < LANES ? pairs - from : LANES;
    int32_t positions[LANES];
    for (int64_t lane = 0; lane < LANES; lane++) {
      int64_t pair = from + (lane < lanes ? lane : 0);
      positions[lane] = (int32_t)(length - count + pair / group);
      const float *q = step->qkv + (first + pair / group) * row + (head * group + pair % group) * dim;
      for (int64_t d = 0; d < dim; d++) query[d * LANES + lane] = q[d];
    }
    attend_lanes(view, dim, query, positions, positions[lanes - 1] + 1, rest, out);
    for (int64_t lane = 0; lane < lanes; lane++) {
      int64_t pair = from + lane;
      float *to = step->mixed + (first + pair / group) * across + (head * group + pair % group) * dim;
      for (int64_t d = 0; d < dim; d++) to[d] = out[d * LANES + lane];
    }
  }
}

int64_t atts_supports(int64_t head_dim) {
  for (size_t at = 0; at < sizeof attends / sizeof *attends; at++)
    if (attends[at].dim == head_dim) return 1;
  return 0;
}

int64_t atts_scratch_floats(int64_t head_dim, int64_t heads, int64_t context, int64_t deepest) {
  int64_t one = heads * (context + 2 * LANES), many = 2 * head_dim * LANES + KEYS * LANES, wide = deepest * PANEL;
  int64_t most = one > many ? one : many;
  return (most > wide ? most : wide) + LANES;
}

static void attention(const Model *model, const Step *step, int64_t layer, int64_t threads, float *scratch) {
  int64_t dim = model->head_dim, kv = model->kv_heads, group = model->heads / kv, stride = kv * dim;
  int64_t row = (model->heads + 2 * kv) * dim, across = model->heads * dim;
  const float *keys = model->cache + (2 * layer) * model->slots * stride;
  const float *values = keys + model->slots * stride;
  const Attends *kind = attends;
  while (kind->dim != dim) kind++;
  int64_t parts = step->num_sequences >= 2 * threads ? 1 : kv;  // few sequences: share out their heads
  int64_t heads = kv / parts;
  for (;;) {
    int64_t item = __atomic_fetch_add(step->counters + layer, 1, __ATOMIC_RELAXED);
    if (item >= step->num_sequences * parts) return;
    int64_t sequence = item / parts, head = item % parts * heads;
    View view = {keys + head * dim, values + head * dim, stride, dim, step->table + step->rows[sequence] * step->table_width,
                 step->lengths[sequence]};
    int64_t first = step->starts[sequence], count = step->starts[sequence + 1] - first, length = step->lengths[sequence];
    if (count * group * 4 >= LANES && count > 1) {
      for (int64_t h = 0; h < heads; h++) {
        View one = {view.keys + h * dim, view.values + h * dim, stride, dim, view.slots, length};
        attend_many(model, step, &one, head + h, first, count, length, scratch);
      }
      continue;
    }
    for (int64_t i = 0; i < count; i++) {
      const float *query = step->qkv + (first + i) * row + head * group * dim;
      float *out = step->mixed + (first + i) * across + head * group * dim;
      attend_one(view, kind, heads, group, query, length - count + 1 + i, scratch, out);
    }
  }
}

// ------------------------------------------------------------------------------------------------ the step

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

void atts_forward(const Model *model, const Step *step) {
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
void atts_head(const Model *model, const float *hidden, int64_t n, float *logits, int64_t threads, float *scratch,
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

// ------------------------------------------------------------------------------------------------ drawing

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
void atts_draw(const float *logits, int64_t rows, int64_t n, const double *temperatures, const double *uniforms,
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
void atts_logprobs(const float *logits, int64_t rows, int64_t n, const int64_t *tokens, float *logprobs) {
  for (int64_t r = 0; r < rows; r++) {
    const float *x = logits + r * n;
    float top = x[best(x, n)];
    logprobs[r] = is_sound(x, n) ? x[tokens[r]] - top - logf(mass(x, n, 1.0f, top, 0)) : NAN;
  }
}
