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
INLINE vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vf larger(vf a, vf b) { return select(a > b, a, b); }

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
  vf y = select(x < floor, floor, x);
  y = select(y > ceiling, ceiling, y);
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
  return select(x < floor, splat(0.0f), value);
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
                    float *out, const float *bias, int accumulate, int64_t me, int64_t threads) {
  int64_t all = (n + PANEL - 1) / PANEL, first = all * me / threads, last = all * (me + 1) / threads;
  float sums[TILE_ROWS * 2 * PANEL] __attribute__((aligned(64)));
  for (int64_t top = 0; top < m; top += ROW_BLOCK) {
    int64_t block = m - top < ROW_BLOCK ? m - top : ROW_BLOCK, step = balanced(block, TILE_ROWS), panels;
    for (int64_t panel = first; panel < last; panel += panels) {
      panels = step <= 3 ? WIDE_PANELS : step <= 6 ? HALF_PANELS : 1;
      if (last - panel < panels) panels = 1;
      Tile *const (*table)[2] = panels == 1 ? by_one : panels == WIDE_PANELS ? by_wide : by_half;
      const char *w = (const char *)weights + panel * k * PANEL * (halves ? 2 : 4);
      for (int64_t i = 0; i < block; i += step) {
        int64_t rows = block - i < step ? block - i : step;
        table[rows - 1][halves](a + (top + i) * stride, stride, w, k, sums);
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
} View;

// One query position, `group` heads that share keys: scores, softmax, weighted sum; memory is read once.
INLINE void attend_one(const View *view, const int64_t dim, const float *query, const int group, int64_t length,
                       float *scratch, float *out) {
  float *scores = scratch;  // [group, length rounded up]
  int64_t padded = (length + LANES - 1) / LANES * LANES;
  for (int64_t j = 0; j < length; j++) {
    const float *key = view->keys + view->slots[j] * view->stride;
    UNROLL for (int g = 0; g < group; g++) {
      vf dot = {0};
      UNROLL for (int64_t d = 0; d < dim; d += LANES) dot += load(query + g * dim + d) * load(key + d);
      scores[g * padded + j] = sum(dot);
    }
  }
  float totals[group];
  for (int g = 0; g < group; g++) {
    float *row = scores + g * padded;
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
    totals[g] = sum(total);
  }
  vf acc[group * (dim / LANES)];
  UNROLL for (int i = 0; i < group * (dim / LANES); i++) acc[i] = (vf){0};
  for (int64_t j = 0; j < length; j++) {
    const float *value = view->values + view->slots[j] * view->stride;
    UNROLL for (int64_t d = 0; d < dim / LANES; d++) {
      vf v = load(value + d * LANES);
      UNROLL for (int g = 0; g < group; g++) acc[g * (dim / LANES) + d] += splat(scores[g * padded + j]) * v;
    }
  }
  UNROLL for (int g = 0; g < group; g++) {
    UNROLL for (int64_t d = 0; d < dim / LANES; d++)
      store(out + g * dim + d * LANES, acc[g * (dim / LANES) + d] / splat(totals[g]));
  }
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
          s = select(at > positions, splat(-INFINITY), s);
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

INLINE int attend_group(const View *view, int64_t dim, const float *query, int64_t group, int64_t length, float *scratch,
                        float *out) {
#define ONE(D, G) if (dim == D && group == G) { attend_one(view, D, query, G, length, scratch, out); return 1; }
  ONE(64, 1) ONE(64, 2) ONE(64, 4) ONE(128, 1) ONE(128, 2) ONE(128, 4)
#undef ONE
  for (int64_t g = 0; g < group; g++) {
    if (dim == 16) attend_one(view, 16, query + g * dim, 1, length, scratch, out + g * dim);
    else if (dim == 32) attend_one(view, 32, query + g * dim, 1, length, scratch, out + g * dim);
    else if (dim == 64) attend_one(view, 64, query + g * dim, 1, length, scratch, out + g * dim);
    else if (dim == 96) attend_one(view, 96, query + g * dim, 1, length, scratch, out + g * dim);
    else if (dim == 128) attend_one(view, 128, query + g * dim, 1, length, scratch, out + g * dim);
    else return 0;
  }
  return 1;
}

int64_t atts_supports(int64_t head_dim) {
  return head_dim == 16 || head_dim == 32 || head_dim == 64 || head_dim == 96 || head_dim == 128;
}

int64_t atts_scratch_floats(int64_t head_dim, int64_t group, int64_t context) {
  int64_t one = group * (context + 2 * LANES);
  int64_t many = 2 * head_dim * LANES + KEYS * LANES;
  return (one > many ? one : many) + LANES;
}

static void attention(const Model *model, const Step *step, int64_t layer, float *scratch) {
  int64_t dim = model->head_dim, group = model->heads / model->kv_heads, stride = model->kv_heads * dim;
  int64_t row = (model->heads + 2 * model->kv_heads) * dim, across = model->heads * dim;
  const float *keys = model->cache + (2 * layer) * model->slots * stride;
  const float *values = keys + model->slots * stride;
  int64_t items = step->num_sequences * model->kv_heads;
  for (;;) {
    int64_t item = __atomic_fetch_add(step->counters + layer, 1, __ATOMIC_RELAXED);
    if (item >= items) return;
    int64_t sequence = item / model->kv_heads, head = item % model->kv_heads;
    View view = {keys + head * dim, values + head * dim, stride, dim, step->table + step->rows[sequence] * step->table_width};
    int64_t first = step->starts[sequence], count = step->starts[sequence + 1] - first, length = step->lengths[sequence];
    if (count * group * 4 >= LANES && count > 1) {
      attend_many(model, step, &view, head, first, count, length, scratch);
      continue;
    }
    for (int64_t i = 0; i < count; i++) {
      const float *query = step->qkv + (first + i) * row + head * group * dim;
      float *out = step->mixed + (first + i) * across + head * group * dim;
      attend_group(&view, dim, query, group, length - count + 1 + i, scratch, out);
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
    product(halves, step->h, width, m, width, layer->qkv, rows, step->qkv, layer->qkv_bias, 0, me, threads);
    BARRIER
    store_keys(model, step, index, layer, from, to);
    BARRIER
    attention(model, step, index, scratch);
    BARRIER
    product(halves, step->mixed, across, m, across, layer->out, width, step->x, layer->out_bias, 1, me, threads);
    BARRIER
    for (int64_t t = from; t < to; t++) normed(step->x + t * width, layer->mlp_norm, width, model->eps, step->h + t * width);
    BARRIER
    product(halves, step->h, width, m, width, layer->gate_up, 2 * inner, step->both, layer->gate_up_bias, 0, me, threads);
    BARRIER
    for (int64_t t = from; t < to; t++) gated(step->both + t * 2 * inner, inner, step->both + t * 2 * inner);
    BARRIER
    // the gated row lies at the front of its 2 * inner floats
    product(halves, step->both, 2 * inner, m, inner, layer->down, width, step->x, layer->down_bias, 1, me, threads);
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
void atts_head(const Model *model, const float *hidden, int64_t n, float *logits, int64_t threads) {
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads((int)threads)
    product(model->halves, hidden, model->width, n, model->width, model->head, model->vocabulary, logits, 0, 0, omp_get_thread_num(), omp_get_num_threads());
    return;
  }
#endif
  product(model->halves, hidden, model->width, n, model->width, model->head, model->vocabulary, logits, 0, 0, 0, 1);
}
