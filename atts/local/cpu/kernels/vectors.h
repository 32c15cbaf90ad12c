// Vectors of floats as wide as the processor's, and the few operations on them that every kernel uses.

#ifndef ATTS_VECTORS_H
#define ATTS_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX__)
#include <immintrin.h>
#define LANES 8
#else
#define LANES 4
#endif
#ifdef __AVX512BF16__
#define HAS_PAIRS 1  // products of two pairs of bfloat16 numbers at a time, summed in float32
#else
#define HAS_PAIRS 0
#endif
#define UNROLL _Pragma("GCC unroll 32")
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE vf splat(float a) { return a - (vf){0}; }
INLINE vf load(const float *p) { return *(const vf *)p; }
// Stays in a register, where the compiler would rather read it from memory again for every use
INLINE vf in_register(vf v) {
#if defined(__x86_64__) && LANES > 4
  __asm__("" : "+v"(v));
#endif
  return v;
}
INLINE void store(float *p, vf v) { *(vf *)p = v; }
INLINE vf vselect(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

// a > b ? a : b, hence b where either is NaN
INLINE vf vmax(vf a, vf b) {
#if LANES == 16
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return vselect(a > b, a, b);
#endif
}

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

// exp of numbers not above 88, to about one unit in the last place; below -87.7 it is 0, and NaN stays NaN
INLINE vf vexp(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  vf y = vmax(splat(-88.0f), x);
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
  return p * (vf)(((vi)n - (vi)magic + 127) << 23);  // 2^-127 counts as 0
}

// exp of anything; callers never need infinity
INLINE vf vexp_any(vf x) { return vexp(vselect(x > splat(88.0f), splat(88.0f), x)); }

#endif
