// Attention over keys and values scattered over cache slots: one query at a time while decoding, many in a prefill.

#include "model.h"

#define KEYS 64  // keys of one block of a prefill's attention
#define SUMS (LANES == 8 ? 8 : 16)  // vectors that stay in registers while values pass by

typedef struct {
  const float *keys, *values;  // of this layer and kv head
  int64_t stride, dim;  // floats from slot to slot
  const int32_t *slots;
  int64_t length;  // how many of them there are
  int64_t window;  // how many tokens back a query sees, itself included; 0: all
} View;

// ------------------------------------------------------------------------------------------------ one query
//
// Up to four query heads go through the keys parallel: each row is read once, from its first byte to its last, which the
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
INLINE void key_scores(const View *view, const int64_t dim, const int kv, const int group, const float *query, float *scores) {
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
static void softmax_four(float *scores, int64_t length, float *totals) {
  int64_t count = 4 * length, padded = (count + LANES - 1) / LANES * LANES;
  for (int64_t i = count; i < padded; i++) scores[i] = -INFINITY;
  vf most = splat(-INFINITY), total = {0};
  for (int64_t i = 0; i < padded; i += LANES) most = vmax(load(scores + i), most);
  for (int lane = 4; lane < LANES; lane++) most[lane % 4] = most[lane] > most[lane % 4] ? most[lane] : most[lane % 4];
  for (int lane = 4; lane < LANES; lane++) most[lane] = most[lane % 4];
  for (int64_t i = 0; i < padded; i += LANES) {
    vf p = vexp(load(scores + i) - most);
    store(scores + i, p);
    total += p;
  }
  for (int h = 0; h < 4; h++) totals[h] = 0;
  for (int lane = 0; lane < LANES; lane++) totals[lane % 4] += total[lane];
}

// out[kv * group, dim] = the values weighted by scores[keys, 4], over totals
INLINE void weighted_values(const View *view, const int64_t dim, const int kv, const int group, const float *scores,
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
  key_scores(view, dim, kv, group, query, scratch);
  softmax_four(scratch, view->length, totals);
  weighted_values(view, dim, kv, group, scratch, totals, out);
}

typedef void One(const View *view, const float *query, float *scratch, float *out);

#define ONE(D, H, G)                                                                                    \
  static void one_##D##_##H##_##G(const View *view, const float *query, float *scratch, float *out) {   \
    attend_one(view, D, H, G, query, scratch, out);                                                     \
  }
#define ALL(D) ONE(D, 1, 1) ONE(D, 1, 2) ONE(D, 1, 3) ONE(D, 1, 4) ONE(D, 2, 2) ONE(D, 2, 1) ONE(D, 3, 1) ONE(D, 4, 1)
ALL(16) ALL(32) ALL(64) ALL(96) ALL(128)

#define NAMES(D)                                                          \
  {D,                                                                     \
   {one_##D##_1_1, one_##D##_1_2, one_##D##_1_3, one_##D##_1_4},          \
   {one_##D##_1_1, one_##D##_2_1, one_##D##_3_1, one_##D##_4_1},          \
   {one_##D##_1_2, one_##D##_2_2}}
typedef struct {
  int64_t dim;
  One *single[4], *ones[4], *twos[2];  // 1 to 4 query heads of one kv head, one each of so many kv heads, two each
} Kind;
static const Kind kinds[] = {NAMES(16), NAMES(32), NAMES(64), NAMES(96), NAMES(128)};

// Query heads that are served parallel
typedef struct {
  int64_t kv, head, within;  // how many kv heads, the first of them, and the first query head of its group
  One *one;
} HeadGroup;

static int64_t num_head_groups(int64_t kv, int64_t group) {
  return group == 1 ? (kv + 3) / 4 : group == 2 ? (kv + 1) / 2 : kv * ((group + 3) / 4);
}

static HeadGroup head_group(const Kind *kind, int64_t kv, int64_t group, int64_t index) {
  if (group <= 2) {
    int64_t head = index * 4 / group, beside = kv - head < 4 / group ? kv - head : 4 / group;
    return (HeadGroup){beside, head, 0, (group == 1 ? kind->ones : kind->twos)[beside - 1]};
  }
  int64_t parts = (group + 3) / 4, within = index % parts * 4, left = group - within;
  return (HeadGroup){1, index / parts, within, kind->single[left < 4 ? left - 1 : 3]};
}

// ------------------------------------------------------------------------------------------------ many queries
//
// One (query, head) pair a lane, one or two vectors of pairs parallel: keys and values are broadcast, each to all of them.

#define AHEAD 16  // keys, from asking for one to reading it
#define VECTORS 2  // of pairs at most
#define PAIRS (VECTORS * LANES)
#define DEEP (LANES == 16 ? 8 : 4)  // dimensions of the values that stay in registers

#if LANES == 16
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#endif

// rows of a square become its columns
INLINE void transpose(vf *rows) {
#if LANES > 4
  for (int round = 1; round < LANES; round *= 2) {  // zipping the is_bf16 log2(LANES) times
    vf zipped[LANES];
    UNROLL for (int i = 0; i < LANES / 2; i++) {
      zipped[2 * i] = __builtin_shufflevector(rows[i], rows[i + LANES / 2], ZIP_LOW);
      zipped[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + LANES / 2], ZIP_HIGH);
    }
    UNROLL for (int i = 0; i < LANES; i++) rows[i] = zipped[i];
  }
#else
  float square[LANES * LANES], turned[LANES * LANES];
  memcpy(square, rows, sizeof square);
  for (int i = 0; i < LANES * LANES; i++) turned[i] = square[i % LANES * LANES + i / LANES];
  memcpy(rows, turned, sizeof turned);
#endif
}

// Asks for a row before it is read: rows lie too far apart for the processor to guess the next one
INLINE void fetch(const float *row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(row + d);
}

// out[dim, pairs] of query[dim, pairs], pair i reading the keys up to positions[i] in its window; `length` covers all
INLINE void attend_lanes(const int vectors, const View *view, int64_t dim, const float *query, const int32_t *positions,
                         int64_t length, float *weights /* [KEYS, pairs] */, float *out) {
  const int64_t pairs = vectors * LANES;
  vf most[VECTORS], total[VECTORS];
  int64_t least = positions[0], last = positions[0];
  for (int64_t i = 1; i < pairs; i++) least = positions[i] < least ? positions[i] : least;
  for (int64_t i = 1; i < pairs; i++) last = positions[i] > last ? positions[i] : last;
  const int32_t back = (int32_t)(view->window && view->window < length ? view->window : length);
  // not minus infinity: a query may see no key of the first block, and infinities have no difference
  UNROLL for (int v = 0; v < vectors; v++) most[v] = splat(-1e30f), total[v] = (vf){0};
  for (int64_t at = 0; at < dim * pairs; at += LANES) store(out + at, (vf){0});
  for (int64_t from = least >= back ? least - back + 1 : 0; from < length; from += KEYS) {
    int64_t count = length - from < KEYS ? length - from : KEYS;
    const int32_t *slots = view->slots + from;
    vf top[VECTORS], shrink[VECTORS];
    UNROLL for (int v = 0; v < vectors; v++) top[v] = most[v];
    for (int64_t j = 0; j < count; j += 4) {
      const float *key[4];
      vf s[4 * VECTORS];
      UNROLL for (int i = 0; i < 4; i++) key[i] = view->keys + slots[j + i < count ? j + i : j] * view->stride;
      UNROLL for (int i = 0; i < 4 * vectors; i++) s[i] = (vf){0};
      for (int64_t i = 0; i < 4 && j + i < count; i++) {
        fetch(view->values + slots[j + i] * view->stride, dim);
        if (from + j + i + AHEAD < length) fetch(view->keys + slots[j + i + AHEAD] * view->stride, dim);
      }
      for (int64_t d = 0; d < dim; d++) {
        vf q[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) q[v] = in_register(load(query + d * pairs + v * LANES));
        UNROLL for (int i = 0; i < 4; i++) {
          vf k = splat(key[i][d]);
          UNROLL for (int v = 0; v < vectors; v++) s[i * vectors + v] += k * q[v];
        }
      }
      UNROLL for (int i = 0; i < 4; i++) {  // beyond the last key, the first of the four stands in and is not read again
        int32_t at = (int32_t)(from + j + i);
        UNROLL for (int v = 0; v < vectors; v++) {
          vf score = s[i * vectors + v];
          vi place = *(const vi *)(positions + v * LANES);
          if (at > least) score = vselect(at - (vi){0} > place, splat(-INFINITY), score);
          if (at <= last - back) score = vselect(at - (vi){0} <= place - back, splat(-INFINITY), score);
          store(weights + (j + i) * pairs + v * LANES, score);
          top[v] = vmax(score, top[v]);
        }
      }
    }
    UNROLL for (int v = 0; v < vectors; v++) {
      vf added = {0};
      for (int64_t i = 0; i < count; i++) {
        float *weight = weights + i * pairs + v * LANES;
        vf p = vexp(load(weight) - top[v]);
        store(weight, p);
        added += p;
      }
      shrink[v] = vexp(most[v] - top[v]);
      total[v] = total[v] * shrink[v] + added;
      most[v] = top[v];
    }
    for (int64_t d = 0; d < dim; d += DEEP) {
      vf acc[DEEP * VECTORS];
      UNROLL for (int i = 0; i < DEEP * vectors; i++) acc[i] = load(out + d * pairs + i * LANES) * shrink[i % vectors];
      for (int64_t i = 0; i < count; i++) {
        const float *value = view->values + slots[i] * view->stride + d;
        vf p[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) p[v] = load(weights + i * pairs + v * LANES);
        UNROLL for (int c = 0; c < DEEP; c++) {
          vf one = splat(value[c]);
          UNROLL for (int v = 0; v < vectors; v++) acc[c * vectors + v] += one * p[v];
        }
      }
      UNROLL for (int i = 0; i < DEEP * vectors; i++) store(out + d * pairs + i * LANES, acc[i]);
    }
  }
  for (int64_t d = 0; d < dim; d++)
    UNROLL for (int v = 0; v < vectors; v++) {
      float *sums = out + d * pairs + v * LANES;
      store(sums, load(sums) / total[v]);
    }
}

typedef struct {
  const float *query;
  float *attended;
  int64_t query_row, attended_row, group, dim;  // floats from token to token, heads of the group
} Chunk;

INLINE int64_t place(const Chunk *chunk, int64_t pair, int64_t row) {
  return pair / chunk->group * row + pair % chunk->group * chunk->dim;
}

// The pairs `from` to `from + lanes` of a chunk whose first token stands at position `start`
INLINE void attend_pairs(const int vectors, const View *view, const Chunk *chunk, int64_t from, int64_t lanes, int64_t start,
                         float *scratch) {
  const int64_t dim = chunk->dim, pairs = vectors * LANES;
  float *query = scratch, *out = query + dim * pairs, *weights = out + dim * pairs;
  int32_t positions[PAIRS];
  for (int64_t lane = 0; lane < pairs; lane++)  // spare lanes repeat the first
    positions[lane] = (int32_t)(start + (from + (lane < lanes ? lane : 0)) / chunk->group);
  for (int64_t lane = 0; lane < pairs; lane += LANES) {
    const float *at[LANES];
    for (int64_t i = 0; i < LANES; i++) at[i] = chunk->query + place(chunk, from + (lane + i < lanes ? lane + i : 0), chunk->query_row);
    for (int64_t d = 0; d < dim; d += LANES) {
      vf square[LANES];
      UNROLL for (int i = 0; i < LANES; i++) square[i] = load(at[i] + d);
      transpose(square);
      UNROLL for (int i = 0; i < LANES; i++) store(query + (d + i) * pairs + lane, square[i]);
    }
  }
  attend_lanes(vectors, view, dim, query, positions, positions[lanes - 1] + 1, weights, out);
  for (int64_t lane = 0; lane < lanes; lane += LANES) {
    for (int64_t d = 0; d < dim; d += LANES) {
      vf square[LANES];
      UNROLL for (int i = 0; i < LANES; i++) square[i] = load(out + (d + i) * pairs + lane);
      transpose(square);
      for (int64_t i = 0; i < LANES && lane + i < lanes; i++)
        store(chunk->attended + place(chunk, from + lane + i, chunk->attended_row) + d, square[i]);
    }
  }
}

static void attend_one_vector(const View *view, const Chunk *chunk, int64_t from, int64_t lanes, int64_t start, float *scratch) {
  attend_pairs(1, view, chunk, from, lanes, start, scratch);
}

static void attend_two_vectors(const View *view, const Chunk *chunk, int64_t from, int64_t lanes, int64_t start, float *scratch) {
  attend_pairs(2, view, chunk, from, lanes, start, scratch);
}

// `count` queries of one sequence that share a kv head, from token `first` on, the last of them at position length - 1
static void attend_many(const Layer *layer, const Step *step, const View *view, int64_t head, int64_t first,
                        int64_t count, int64_t length, float *scratch) {
  int64_t dim = view->dim, group = layer->num_heads / layer->num_kv_heads, pairs = count * group;
  int64_t attn_size = layer->num_heads * dim, row = (layer->num_heads + 2 * layer->num_kv_heads) * dim;
  int64_t at = head * group * dim;
  Chunk chunk = {step->qkv + first * row + at, step->attended + first * attn_size + at, row, attn_size, group, dim};
  for (int64_t from = 0; from < pairs; from += PAIRS) {
    int64_t lanes = pairs - from < PAIRS ? pairs - from : PAIRS;
    (lanes > LANES ? attend_two_vectors : attend_one_vector)(view, &chunk, from, lanes, length - count, scratch);
  }
}

// ------------------------------------------------------------------------------------------------ sharing out

EXPORT int64_t atts_supports(int64_t head_dim) {
  for (size_t at = 0; at < sizeof kinds / sizeof *kinds; at++)
    if (kinds[at].dim == head_dim) return 1;
  return 0;
}

// What one thread needs, for attention over a whole context
EXPORT int64_t atts_scratch_floats(int64_t head_dim, int64_t context) {
  int64_t one = 4 * context + LANES, many = (2 * head_dim + KEYS) * PAIRS;
  return (one > many ? one : many) + LANES;
}

// `count` last tokens of a sequence, for the query heads of one group
static void attend(const Layer *layer, const Step *step, const View *all, int64_t sequence, int64_t count, HeadGroup heads,
                   float *scratch) {
  int64_t dim = all->dim, group = layer->num_heads / layer->num_kv_heads, attn_size = layer->num_heads * dim;
  int64_t row = attn_size + 2 * layer->num_kv_heads * dim;
  int64_t first = step->query_starts[sequence + 1] - count, length = step->context_lens[sequence];
  View view = *all;
  const int32_t *slots = view.slots = step->table + step->table_rows[sequence] * step->table_width;
  if (count > 1 && count * group * 4 >= LANES) {
    view.length = length;
    for (int64_t head = heads.head; heads.within == 0 && head < heads.head + heads.kv; head++) {
      view.keys = all->keys + head * dim, view.values = all->values + head * dim;
      attend_many(layer, step, &view, head, first, count, length, scratch);
    }
    return;
  }
  view.keys += heads.head * dim, view.values += heads.head * dim;
  int64_t at = (heads.head * group + heads.within) * dim;
  for (int64_t i = 0; i < count; i++) {
    view.length = length - count + 1 + i, view.slots = slots;
    if (view.window && view.length > view.window) view.slots += view.length - view.window, view.length = view.window;
    heads.one(&view, step->qkv + (first + i) * row + at, scratch,
              step->attended + (first + i) * attn_size + at);
  }
}

void attention(const Model *model, const Step *step, int64_t index, int64_t threads, float *scratch) {
  const Layer *layer = model->layers + index;
  int64_t kv = layer->num_kv_heads, group = layer->num_heads / kv;
  View all = {layer->keys, layer->values, layer->stride, model->head_dim, 0, 0, layer->window};
  const Kind *kind = kinds;
  while (kind->dim != model->head_dim) kind++;
  int64_t sequences = step->sequences.to - step->sequences.from;
  int64_t groups = num_head_groups(kv, group), parts = sequences >= 2 * threads ? 1 : groups;
  const int is_last = index + 1 == model->num_layers;  // the others' output is not needed there
  for (;;) {
    int64_t item = __atomic_fetch_add(step->next_items + index, 1, __ATOMIC_RELAXED);
    if (item >= sequences * parts) return;
    int64_t each = groups / parts, from = item % parts * each, sequence = step->sequences.from + item / parts;
    int64_t count = is_last ? step->num_logits[sequence] : step->query_starts[sequence + 1] - step->query_starts[sequence];
    for (int64_t at = from; count && at < from + each; at++)
      attend(layer, step, &all, sequence, count, head_group(kind, kv, group, at), scratch);
  }
}
