// Attention over keys and values that lie where the pool put them: one query at a time while decoding, many in a prefill.

#include "model.h"

#define KEYS 64  // keys of one block of a prefill's attention
#define SUMS (LANES == 8 ? 8 : 16)  // vectors that stay in registers while values pass by

typedef struct {
  const float *keys, *values;  // of this layer and kv head
  int64_t stride, dim;  // floats from slot to slot
  const int32_t *slots;
  int64_t length;  // how many of them there are
} View;

// ------------------------------------------------------------------------------------------------ one query
//
// Up to four query heads go through the keys together: each row is read once, from its first byte to its last, which the
// processor's own prefetching likes best, and the four scores of a key lie side by side.

// to[0..4) = the sums of four vectors
INLINE void sum_four(vf a, vf b, vf c, vf d, float *to) {
#if LANES == 16
  typedef float v4 __attribute__((vector_size(16)));
  vf ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
          __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  vf cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
          __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  vf all = __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  all += __builtin_shufflevector(all, all, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  all += __builtin_shufflevector(all, all, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  v4 four = __builtin_shufflevector(all, all, 0, 4, 8, 12);
  memcpy(to, &four, sizeof four);
#else
  to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
#endif
}

// scores[keys, 4] of the `group` query heads of each of `kv` neighbouring kv heads
INLINE void dots(const View *view, const int64_t dim, const int kv, const int group, const float *query, float *scores) {
  vf asked[kv * group * (dim / LANES)];
  UNROLL for (int i = 0; i < kv * group * (dim / LANES); i++) asked[i] = load(query + i * LANES);
  for (int64_t j = 0; j < view->length; j++) {
    const float *key = view->keys + view->slots[j] * view->stride;
    vf acc[4];
    UNROLL for (int i = 0; i < 4; i++) acc[i] = (vf){0};
    UNROLL for (int h = 0; h < kv; h++) {
      UNROLL for (int64_t d = 0; d < dim / LANES; d++) {
        vf k = load(key + h * dim + d * LANES);
        UNROLL for (int g = 0; g < group; g++) acc[h * group + g] += asked[(h * group + g) * (dim / LANES) + d] * k;
      }
    }
    sum_four(acc[0], acc[1], acc[2], acc[3], scores + 4 * j);
  }
}

// scores[length, 4] becomes exp(score - the largest of its head); totals[4] are their sums
static void soften(float *scores, int64_t length, float *totals) {
  int64_t count = 4 * length, padded = (count + LANES - 1) / LANES * LANES;
  for (int64_t i = count; i < padded; i++) scores[i] = -INFINITY;
  vf most = splat(-INFINITY), total = {0};
  for (int64_t i = 0; i < padded; i += LANES) most = larger(load(scores + i), most);
  for (int lane = 4; lane < LANES; lane++) most[lane % 4] = most[lane] > most[lane % 4] ? most[lane] : most[lane % 4];
  for (int lane = 4; lane < LANES; lane++) most[lane] = most[lane % 4];
  for (int64_t i = 0; i < padded; i += LANES) {
    vf p = exponential(load(scores + i) - most);
    store(scores + i, p);
    total += p;
  }
  for (int h = 0; h < 4; h++) totals[h] = 0;
  for (int lane = 0; lane < LANES; lane++) totals[lane % 4] += total[lane];
}

// out[kv * group, dim] = the values weighted by scores[keys, 4], over totals
INLINE void mixes(const View *view, const int64_t dim, const int kv, const int group, const float *scores,
                  const float *totals, float *out) {
  const int vectors = dim / LANES, most = SUMS / (kv * group == 3 ? 4 : kv * group);
  const int step = vectors <= most ? vectors : vectors % most == 0 ? most : vectors % 3 == 0 ? 3 : 1;
  for (int64_t from = 0; from < vectors; from += step) {
    vf acc[kv * group * step];
    UNROLL for (int i = 0; i < kv * group * step; i++) acc[i] = (vf){0};
    for (int64_t j = 0; j < view->length; j++) {
      const float *value = view->values + view->slots[j] * view->stride + from * LANES;
      UNROLL for (int h = 0; h < kv; h++) {
        UNROLL for (int d = 0; d < step; d++) {
          vf v = load(value + h * dim + d * LANES);
          UNROLL for (int g = 0; g < group; g++) acc[(h * group + g) * step + d] += splat(scores[4 * j + h * group + g]) * v;
        }
      }
    }
    UNROLL for (int i = 0; i < kv * group; i++)
      UNROLL for (int d = 0; d < step; d++) store(out + i * dim + (from + d) * LANES, acc[i * step + d] / splat(totals[i]));
  }
}

INLINE void attend_one(const View *view, const int64_t dim, const int kv, const int group, const float *query,
                       float *scratch, float *out) {
  float totals[4];
  dots(view, dim, kv, group, query, scratch);
  soften(scratch, view->length, totals);
  mixes(view, dim, kv, group, scratch, totals, out);
}

typedef void One(const View *view, const float *query, float *scratch, float *out);

#define ONE(D, H, G)                                                                                    \
  static void one_##D##_##H##_##G(const View *view, const float *query, float *scratch, float *out) {   \
    attend_one(view, D, H, G, query, scratch, out);                                                     \
  }
#define ALL(D) ONE(D, 1, 1) ONE(D, 1, 2) ONE(D, 1, 3) ONE(D, 1, 4) ONE(D, 2, 2) ONE(D, 4, 1)
ALL(16) ALL(32) ALL(64) ALL(96) ALL(128)

#define NAMES(D) {D, {one_##D##_1_1, one_##D##_1_2, one_##D##_1_3, one_##D##_1_4}, one_##D##_2_2, one_##D##_4_1}
typedef struct {
  int64_t dim;
  One *single[4];  // 1 to 4 query heads of one kv head
  One *pair, *quad;  // two heads each of two kv heads, one each of four
} Kind;
static const Kind kinds[] = {NAMES(16), NAMES(32), NAMES(64), NAMES(96), NAMES(128)};

// Query heads that are served together
typedef struct {
  int64_t kv, head, within;  // how many kv heads, the first of them, and the first query head of its group
  One *one;
} Bundle;

static int64_t num_bundles(int64_t kv, int64_t group) {
  return group == 1 ? kv / 4 + kv % 4 : group == 2 ? kv / 2 + kv % 2 : kv * ((group + 3) / 4);
}

static Bundle bundle(const Kind *kind, int64_t kv, int64_t group, int64_t index) {
  int64_t wide = group == 1 ? 4 : group == 2 ? 2 : 1, whole = wide > 1 ? kv / wide : 0;
  if (index < whole) return (Bundle){wide, index * wide, 0, wide == 4 ? kind->quad : kind->pair};
  if (wide > 1) return (Bundle){1, index - whole + whole * wide, 0, kind->single[group - 1]};
  int64_t parts = (group + 3) / 4, within = index % parts * 4, left = group - within;
  return (Bundle){1, index / parts, within, kind->single[left < 4 ? left - 1 : 3]};
}

// ------------------------------------------------------------------------------------------------ many queries

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

// ------------------------------------------------------------------------------------------------ sharing out

EXPORT int64_t atts_supports(int64_t head_dim) {
  for (size_t at = 0; at < sizeof kinds / sizeof *kinds; at++)
    if (kinds[at].dim == head_dim) return 1;
  return 0;
}

// What one thread needs, for attention over a whole context or a widened panel `deepest` deep
EXPORT int64_t atts_scratch_floats(int64_t head_dim, int64_t context, int64_t deepest) {
  int64_t one = 4 * context + LANES, many = 2 * head_dim * LANES + KEYS * LANES, wide = deepest * PANEL;
  int64_t most = one > many ? one : many;
  return (most > wide ? most : wide) + LANES;
}

static void attend(const Model *model, const Step *step, const View *all, int64_t sequence, Bundle bundle, float *scratch) {
  int64_t dim = model->head_dim, group = model->heads / model->kv_heads, across = model->heads * dim;
  int64_t first = step->starts[sequence], count = step->starts[sequence + 1] - first, length = step->lengths[sequence];
  View view = *all;
  view.slots = step->table + step->rows[sequence] * step->table_width;
  if (count > 1 && count * group * 4 >= LANES) {
    view.length = length;
    for (int64_t head = bundle.head; bundle.within == 0 && head < bundle.head + bundle.kv; head++) {
      view.keys = all->keys + head * dim, view.values = all->values + head * dim;
      attend_many(model, step, &view, head, first, count, length, scratch);
    }
    return;
  }
  view.keys += bundle.head * dim, view.values += bundle.head * dim;
  int64_t at = (bundle.head * group + bundle.within) * dim;
  for (int64_t i = 0; i < count; i++) {
    view.length = length - count + 1 + i;
    bundle.one(&view, step->qkv + (first + i) * (across + 2 * all->stride) + at, scratch, step->mixed + (first + i) * across + at);
  }
}

void attention(const Model *model, const Step *step, int64_t layer, int64_t threads, float *scratch) {
  int64_t kv = model->kv_heads, group = model->heads / kv, stride = kv * model->head_dim;
  const float *keys = model->cache + 2 * layer * model->slots * stride;
  View all = {keys, keys + model->slots * stride, stride, model->head_dim, 0, 0};
  const Kind *kind = kinds;
  while (kind->dim != model->head_dim) kind++;
  int64_t bundles = num_bundles(kv, group), parts = step->num_sequences >= 2 * threads ? 1 : bundles;
  for (;;) {
    int64_t item = __atomic_fetch_add(step->counters + layer, 1, __ATOMIC_RELAXED);
    if (item >= step->num_sequences * parts) return;
    int64_t each = bundles / parts, from = item % parts * each;
    for (int64_t index = from; index < from + each; index++)
      attend(model, step, &all, item / parts, bundle(kind, kv, group, index), scratch);
  }
}
