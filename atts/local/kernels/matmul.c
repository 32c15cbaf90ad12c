// Matrix products of a batch of rows with packed weights.
//
// Each output sums over k in the same order whatever the batch, so who else is in a batch does not change a bit of it.

#include "model.h"

// out[rows, columns] (+)= sums + bias
static void finish(const float *sums, int64_t rows, int64_t width, float *out, int64_t out_stride, const float *bias,
                   int accumulate, int64_t columns) {
  int64_t n = columns < width ? columns : width;
  for (int64_t i = 0; i < rows; i++) {
    const float *from = sums + i * width;
    float *to = out + i * out_stride;
    int64_t c = 0;
    for (; c + LANES <= n; c += LANES) {
      vf value = load(from + c);
      if (bias) value += load(bias + c);
      if (accumulate) value += load(to + c);
      store(to + c, value);
    }
    for (; c < n; c++) to[c] = (accumulate ? to[c] : 0) + (from[c] + (bias ? bias[c] : 0));
  }
}

// sums[rows, panels * PANEL] of `rows` rows of a with `panels` panels of weights, all of k in one go
INLINE void tile(const int rows, const int panels, const int is_bf16, const float *a, int64_t stride, const void *weights,
                 int64_t k, float *sums) {
  vf acc[rows * panels * 2];
  UNROLL for (int i = 0; i < rows * panels * 2; i++) acc[i] = (vf){0};
  _Pragma("GCC unroll 1") for (int64_t j = 0; j < k; j++) {
    UNROLL for (int p = 0; p < panels; p++) {
      vf left, right;
      if (is_bf16) {  // two bfloat16 numbers a word: the left half of the panel low, the right half high
        vu both = *(const vu *)((const uint32_t *)weights + (p * k + j) * LANES);
        left = (vf)(both << 16), right = (vf)(both & 0xffff0000u);
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

// Rows that go through a tile together. Up to a dozen rows are mostly the wait for weights: half as many at a time with
// two panels read them in longer runs, and the second half finds them in the cache
INLINE int64_t tile_rows(int64_t block) {
  return balanced(block, LANES == 16 && block <= TILE_ROWS ? TILE_ROWS / 2 : TILE_ROWS);
}

// Panels beside each other for so many rows. Unpacking takes registers too: with 16 of them three rows of two panels
// would spill
INLINE int64_t panels_for(int64_t rows, int64_t is_bf16) {
  return rows <= (is_bf16 && LANES < 16 ? 2 : 3) ? WIDE_PANELS : rows <= 6 ? HALF_PANELS : 1;
}

void matmul(int64_t is_bf16, const float *a, int64_t stride, int64_t m, int64_t k, const void *weights, int64_t n,
             float *out, const float *bias, int accumulate, int64_t thread, int64_t threads) {
  int64_t all = (n + PANEL - 1) / PANEL, first = all * thread / threads, last = all * (thread + 1) / threads;
  float sums[TILE_ROWS * 2 * PANEL] __attribute__((aligned(64)));
  for (int64_t top = 0; top < m; top += ROW_BLOCK) {
    int64_t block = m - top < ROW_BLOCK ? m - top : ROW_BLOCK, step = tile_rows(block), panels;
    for (int64_t panel = first; panel < last; panel += panels) {
      panels = panels_for(step, is_bf16);
      if (last - panel < panels) panels = step <= 6 && last - panel >= HALF_PANELS ? HALF_PANELS : 1;
      Tile *const (*table)[2] = panels == 1 ? by_one : panels == WIDE_PANELS ? by_wide : by_half;
      const char *w = (const char *)weights + panel * k * PANEL * (is_bf16 ? 2 : 4);
      for (int64_t i = 0; i < block; i += step) {
        int64_t rows = block - i < step ? block - i : step;
        table[rows - 1][is_bf16](a + (top + i) * stride, stride, w, k, sums);
        finish(sums, rows, panels * PANEL, out + (top + i) * n + panel * PANEL, n, bias ? bias + panel * PANEL : 0,
               accumulate, n - panel * PANEL);
      }
    }
  }
}

EXPORT int64_t atts_packed_bytes(int64_t n, int64_t k, int64_t is_bf16) {
  return (n + PANEL - 1) / PANEL * PANEL * k * (is_bf16 ? 2 : 4);
}

// weights[n, k] into panels; bfloat16 only where the caller knows that it loses nothing
EXPORT void atts_pack(const float *weights, int64_t n, int64_t k, int64_t is_bf16, void *packed) {
  for (int64_t panel = 0; panel * PANEL < n; panel++) {
    for (int64_t j = 0; j < k; j++) {
      for (int64_t c = 0; c < PANEL; c++) {
        int64_t row = panel * PANEL + c, at = (panel * k + j) * PANEL;
        float value = row < n ? weights[row * k + j] : 0.0f;
        if (is_bf16) {
          uint32_t bits;
          memcpy(&bits, &value, 4);
          uint32_t *word = (uint32_t *)packed + at / 2 + c % LANES;
          *word = c < LANES ? bits >> 16 : *word | (bits & 0xffff0000u);
        } else {
          ((float *)packed)[at + c] = value;
        }
      }
    }
  }
}
