// Matrix products of a batch of rows with packed weights.
//
// Each output sums over k in the same order whatever the batch, so who else is in a batch does not change a bit of it.

#include "model.h"

typedef int32_t vi_one __attribute__((may_alias));

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

INLINE vf add_products(const int kind, vf total, const float *a, vf weights) {
#if HAS_PAIRS
  if (kind == PAIRS_OF_K) {  // numbers 2 j and 2 j + 1 of k in a word
    __m512i words = _mm512_set1_epi32(*(const vi_one *)a);
    return (vf)_mm512_dpbf16_ps((__m512)total, (__m512bh)words, (__m512bh)weights);
  }
#endif
  (void)kind;
  return total + splat(*a) * weights;
}

// sums[rows, panels * PANEL] of `rows` rows of a with `panels` panels of weights, all of k in one go
INLINE void tile(const int rows, const int panels, const int kind, const float *a, int64_t stride, const void *weights,
                 int64_t k, float *sums) {
  vf acc[rows * panels * 2];
  UNROLL for (int i = 0; i < rows * panels * 2; i++) acc[i] = (vf){0};
  _Pragma("GCC unroll 1") for (int64_t j = 0; j < k; j++) {
    UNROLL for (int p = 0; p < panels; p++) {
      vf left, right;
      if (kind == HALF) {  // two bfloat16 numbers a word: the left half of the panel low, the right half high
        vu both = *(const vu *)((const uint32_t *)weights + (p * k + j) * LANES);
        left = (vf)(both << 16), right = (vf)(both & 0xffff0000u);
      } else {
        const float *w = (const float *)weights + (p * k + j) * PANEL;
        left = load(w), right = load(w + LANES);
      }
      UNROLL for (int i = 0; i < rows; i++) {
        vf *to = acc + (i * panels + p) * 2;
        to[0] = add_products(kind, to[0], a + i * stride + j, left);
        to[1] = add_products(kind, to[1], a + i * stride + j, right);
      }
    }
  }
  UNROLL for (int i = 0; i < rows * panels * 2; i++) store(sums + i * LANES, acc[i]);
}

typedef void Tile(const float *a, int64_t stride, const void *weights, int64_t k, float *sums);

#define TILE_OF(R, P, KIND)                                                                              \
  static void tile_##R##_##P##_##KIND(const float *a, int64_t s, const void *w, int64_t k, float *sums) { \
    tile(R, P, KIND, a, s, w, k, sums);                                                                  \
  }
#define TILE(R, P) TILE_OF(R, P, FULL) TILE_OF(R, P, HALF) TILE_OF(R, P, PAIRS_OF_K)
#define EACH(R, P) {tile_##R##_##P##_FULL, tile_##R##_##P##_HALF, tile_##R##_##P##_PAIRS_OF_K}

TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1)
#if LANES == 16
TILE(7, 1) TILE(8, 1) TILE(9, 1) TILE(10, 1) TILE(11, 1) TILE(12, 1)
TILE(1, 2) TILE(2, 2) TILE(3, 2) TILE(4, 2) TILE(5, 2) TILE(6, 2) TILE(1, 4) TILE(2, 4) TILE(3, 4)
#define WIDE_PANELS 4
#define HALF_PANELS 2
static Tile *const by_wide[][KINDS] = {EACH(1, 4), EACH(2, 4), EACH(3, 4)};
static Tile *const by_half[][KINDS] = {EACH(1, 2), EACH(2, 2), EACH(3, 2), EACH(4, 2), EACH(5, 2), EACH(6, 2)};
static Tile *const by_one[][KINDS] = {EACH(1, 1), EACH(2, 1), EACH(3, 1), EACH(4, 1), EACH(5, 1), EACH(6, 1),
                                  EACH(7, 1), EACH(8, 1), EACH(9, 1), EACH(10, 1), EACH(11, 1), EACH(12, 1)};
#else
TILE(1, 2) TILE(2, 2) TILE(3, 2)
#define WIDE_PANELS 2
#define HALF_PANELS 1
static Tile *const by_wide[][KINDS] = {EACH(1, 2), EACH(2, 2), EACH(3, 2)};
#if LANES == 4
TILE(7, 1) TILE(8, 1)
static Tile *const by_one[][KINDS] = {EACH(1, 1), EACH(2, 1), EACH(3, 1), EACH(4, 1),
                                  EACH(5, 1), EACH(6, 1), EACH(7, 1), EACH(8, 1)};
#else
static Tile *const by_one[][KINDS] = {EACH(1, 1), EACH(2, 1), EACH(3, 1), EACH(4, 1), EACH(5, 1), EACH(6, 1)};
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
INLINE int64_t panels_for(int64_t rows, int64_t kind) {
  return rows <= (kind == HALF && LANES < 16 ? 2 : 3) ? WIDE_PANELS : rows <= 6 ? HALF_PANELS : 1;
}

void matmul(int64_t kind, const void *rows_of_a, int64_t stride, int64_t m, int64_t k, const void *weights, int64_t n,
             float *out, const float *bias, int accumulate, int64_t thread, int64_t threads) {
  int64_t all = (n + PANEL - 1) / PANEL, first = all * thread / threads, last = all * (thread + 1) / threads;
  const float *a = rows_of_a;  // or words of pairs, which are as long
  int64_t words = kind == PAIRS_OF_K ? k / 2 : k;
  float sums[TILE_ROWS * 2 * PANEL] __attribute__((aligned(64)));
  for (int64_t top = 0; top < m; top += ROW_BLOCK) {
    int64_t block = m - top < ROW_BLOCK ? m - top : ROW_BLOCK, step = tile_rows(block), panels;
    for (int64_t panel = first; panel < last; panel += panels) {
      panels = panels_for(step, kind);
      if (last - panel < panels) panels = step <= 6 && last - panel >= HALF_PANELS ? HALF_PANELS : 1;
      Tile *const (*table)[KINDS] = panels == 1 ? by_one : panels == WIDE_PANELS ? by_wide : by_half;
      const char *w = (const char *)weights + panel * k * PANEL * (kind == FULL ? 4 : 2);
      for (int64_t i = 0; i < block; i += step) {
        int64_t rows = block - i < step ? block - i : step;
        table[rows - 1][kind](a + (top + i) * stride, stride, w, words, sums);
        finish(sums, rows, panels * PANEL, out + (top + i) * n + panel * PANEL, n, bias ? bias + panel * PANEL : 0,
               accumulate, n - panel * PANEL);
      }
    }
  }
}

static uint16_t rounded(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void round_to_pairs(const float *a, int64_t stride, int64_t rows, int64_t k, uint32_t *pairs, int64_t thread, int64_t threads) {
  for (int64_t i = rows * thread / threads; i < rows * (thread + 1) / threads; i++) {
    const float *from = a + i * stride;
    uint16_t *to = (uint16_t *)(pairs + i * (k / 2));
    int64_t j = 0;
#if HAS_PAIRS
    for (; j + 2 * LANES <= k; j += 2 * LANES) {
      __m512bh both = _mm512_cvtne2ps_pbh((__m512)load(from + j + LANES), (__m512)load(from + j));
      memcpy(to + j, &both, sizeof both);
    }
#endif
    for (; j < k; j++) to[j] = rounded(from[j]);
  }
}

// Whether this processor multiplies pairs of bfloat16 numbers
EXPORT int64_t atts_has_pairs(void) { return HAS_PAIRS; }

EXPORT int64_t atts_packed_bytes(int64_t n, int64_t k, int64_t kind) {
  return (n + PANEL - 1) / PANEL * PANEL * k * (kind == FULL ? 4 : 2);
}

// weights[n, k] into panels; HALF only where the caller knows that it loses nothing, pairs only of an even k
EXPORT void atts_pack(const float *weights, int64_t n, int64_t k, int64_t kind, void *packed) {
  for (int64_t panel = 0; panel * PANEL < n; panel++) {
    for (int64_t j = 0; j < k; j++) {
      for (int64_t c = 0; c < PANEL; c++) {
        int64_t row = panel * PANEL + c, at = (panel * k + j) * PANEL;
        float value = row < n ? weights[row * k + j] : 0.0f;
        if (kind == PAIRS_OF_K) {
          ((uint16_t *)packed)[(panel * k + j / 2 * 2) * PANEL + c * 2 + j % 2] = rounded(value);
        } else if (kind == HALF) {
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
