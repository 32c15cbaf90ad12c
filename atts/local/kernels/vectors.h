// Vectors of floats as wide as the processor's, and the few operations on them that every kernel uses.

#ifndef ATTS_VECTORS_H
#define ATTS_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define UNROLL _Pragma("GCC unroll 32")
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint32_t vu __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

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

#endif
