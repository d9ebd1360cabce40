// Operations on single rows: norms, gates, rotary embedding, and storing keys and values in the cache.
#pragma once
#include "coded.h"
#include "integers.h"

namespace SP_NAMESPACE {

static inline float mean_square(const float *x, int64_t n) {
  return sum_over(x, n, [](Vec sum, Vec own) { return fma(own, own, sum); }) / (float)n;
}

static inline float mean_of(const float *x, int64_t n) { return sum_over(x, n, add) / (float)n; }

static inline void centre_row(const float *x, int64_t n, float *out) {
  const float mean = mean_of(x, n);
  for (int64_t i = 0; i < n; i++) out[i] = x[i] - mean;
}

// A norm's vectors, each of as many numbers as it normalises; bias NULL = none. centred: the mean is subtracted first.
struct NormVectors {
  const float *scale, *bias;
  bool centred;
  float eps;
};

// out may be x.
static inline void norm_row(const float *x, const NormVectors &norm, int64_t n, float *out) {
  if (norm.centred) {
    centre_row(x, n, out);
    x = out;
  }
  const Vec factor = splat(1.0f / sqrtf(mean_square(x, n) + norm.eps));
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(out + i, mul(load(norm.scale + i), mul(load(x + i), factor)));
  if (i < n) store_part(out + i, mul(load_part(norm.scale + i, n - i), mul(load_part(x + i, n - i), factor)), n - i);
  if (norm.bias)
    for (i = 0; i < n; i++) out[i] += norm.bias[i];
}

// out may be in.
static void run_copy(const SpOp &op, int64_t t) {
  const float factor = factor_of(op), *in = op.in + t * op.n;
  float *out = op.out + t * op.n;
  if (factor == 1.0f) memcpy(out, in, op.n * sizeof(float));
  for (int64_t i = 0; factor != 1.0f && i < op.n; i++) out[i] = factor * in[i];
}

static void run_gate(const SpOp &op, int64_t t) {
  const bool each = op.flags & SP_EACH;
  const float *gate = op.in + t * (each ? 1 : op.n);
  float *out = op.out + t * op.n;
  int64_t i = 0;
  for (; i + LANES <= op.n; i += LANES) store(out + i, gated_of(op, each ? splat(*gate) : load(gate + i), load(out + i)));
  if (i == op.n) return;
  store_part(out + i, gated_of(op, each ? splat(*gate) : load_part(gate + i, op.n - i), load_part(out + i, op.n - i)), op.n - i);
}

static inline NormVectors vectors_of(const SpOp &op) { return {op.scale, op.bias, (op.flags & SP_CENTRED) != 0, op.eps}; }

static void run_norm(const SpOp &op, int64_t t) {
  static thread_local List<float> normed;
  const float *in = op.in + t * op.n;
  float *out = op.out + t * op.n;
  const NormVectors norm = vectors_of(op);
  if (op.copy) memcpy(op.copy + t * op.n, in, op.n * sizeof(float));
  if (!(op.flags & SP_ADD)) return norm_row(in, norm, op.n, out);
  normed.resize(op.n);
  norm_row(in, norm, op.n, normed.items);
  const float factor = factor_of(op);
  for (int64_t i = 0; i < op.n; i++) out[i] += factor * normed[i];
}

// Dimension i is paired with i + half.
static inline void rotate_head(float *x, const float *cosine, const float *sine, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i] + a * sine[i];
  }
}

// The bytes of a head's key or value in the cache. SP_INT8: `dim` integers, then their scale, whose address is not aligned.
static inline int64_t cached_bytes(const SpOp &op) {
  return op.type == SP_INT8 ? op.dim + (int64_t)sizeof(float) : op.dim * (op.type == SP_F32 ? 4 : 2);
}

// Round a head to integers and a scale, as round_group rounds a group; cache/storage.py defines it.
static inline void round_head(const float *x, int64_t dim, char *to) {
  const auto part = [&](int64_t i) { return dim - i < LANES ? load_part(x + i, dim - i) : load(x + i); };
  Vec largest = zero();
  bool finite = true;
  for (int64_t i = 0; i < dim; i += LANES) {
    const Vec some = part(i);
    finite &= all_finite(some), largest = max(largest, max(some, sub(zero(), some)));
  }
  const bool is_zero = max_lanes(largest) == 0.0f;
  const float most = max_lanes(max(largest, splat(LEAST_ROUNDED))), scale = finite ? is_zero ? 0.0f : most / 127.0f : NAN;
  for (int64_t i = 0; i < dim; i += LANES) {
    int8_t rounded[LANES];
    store_bytes(rounded, finite ? nearest(mul(part(i), splat(127.0f / most))) : zero());
    memcpy(to + i, rounded, dim - i < LANES ? dim - i : LANES);
  }
  memcpy(to + dim, &scale, sizeof scale);
}

static inline void put_cache(const SpOp &op, void *storage, int64_t slot, int64_t head, const float *x) {
  char *to = (char *)storage + (slot * op.kv_heads + head) * cached_bytes(op);
  if (op.type == SP_INT8)
    round_head(x, op.dim, to);
  else if (op.type == SP_F32)
    memcpy(to, x, op.dim * sizeof(float));
  else
    for (int64_t i = 0; i < op.dim; i++) ((uint16_t *)to)[i] = to_bf16(x[i]);
}

// From a row of queries, keys and values to the next one.
static inline int64_t qkv_stride(const SpOp &op) { return op.stride ? op.stride : (op.heads + 2 * op.kv_heads) * op.dim; }

// Norm `heads` heads, each alone or all together.
static inline void norm_heads(const SpOp &op, const float *scale, const float *bias, int64_t heads, float *x) {
  if (!scale || !heads) return;
  const NormVectors norm = {scale, bias, (op.flags & SP_CENTRED) != 0, op.eps};
  if (op.flags & SP_ALL_HEADS) return norm_row(x, norm, heads * op.dim, x);
  for (int64_t head = 0; head < heads; head++, x += op.dim) norm_row(x, norm, op.dim, x);
}

// Rotate the first dimensions of each of some heads by the tables of the operation's rope.
static inline void rotate_heads(const SpOp &op, const SpPass &pass, int64_t t, int64_t heads, float *x) {
  const int64_t half = op.rotated / 2, row = (pass.angles ? pass.angles : pass.positions)[t];
  const float *cosine = pass.cosines[op.rope] + row * half, *sine = pass.sines[op.rope] + row * half;
  for (int64_t head = 0; head < heads; head++) rotate_head(x + head * op.dim, cosine, sine, half);
}

static inline void scale_queries(const SpOp &op, const SpPass &pass, int64_t t, int64_t heads, float *x) {
  const float *factors = pass.query_factors ? pass.query_factors[op.rope] : nullptr;
  const int64_t row = (pass.angles ? pass.angles : pass.positions)[t];
  for (int64_t i = 0; factors && i < heads * op.dim; i++) x[i] *= factors[row];
}

// A work item is a row. Of a single row, it is a key head and the queries that share it, unless one norm covers all
// heads.
static inline int64_t rotation_parts(const SpOp &op, int64_t rows) {
  return rows > 1 || op.kv_heads < 2 || op.flags & SP_ALL_HEADS ? 1 : op.kv_heads;
}

// Norm (if there are scales) and rotate a row's queries and keys in place; store its keys and values in the cache. If
// there are several parts of the heads, do this for one of them.
static void run_rotate(const SpOp &op, const SpPass &pass, int64_t t, int64_t part, int64_t parts) {
  const int64_t heads = op.heads / parts, kv_heads = op.kv_heads / parts, first = part * kv_heads;
  float *x = (float *)op.in + t * qkv_stride(op), *queries = x + part * heads * op.dim;
  float *keys = x + (op.heads + first) * op.dim, *values = keys + op.kv_heads * op.dim;
  norm_heads(op, op.scale, op.bias, heads, queries);
  norm_heads(op, op.key_scale, op.key_bias, kv_heads, keys);
  if (op.rotated) {
    rotate_heads(op, pass, t, heads, queries), rotate_heads(op, pass, t, kv_heads, keys);
    scale_queries(op, pass, t, heads, queries);
  }
  if (!kv_heads) return;
  const int64_t slot = pass.slots[op.group * pass.rows + t];
  for (int64_t head = 0; head < kv_heads; head++) {
    put_cache(op, pass.keys[op.layer], slot, first + head, keys + head * op.dim);
    put_cache(op, pass.values[op.layer], slot, first + head, values + head * op.dim);
  }
}

// Row `token` of a table packed with depth `width` (pack_panel, coded.h and groups.h have the layouts).
static void read_packed_row(const SpOp &op, int64_t token, float *out) {
  const int64_t width = op.n, i = token % WIDTH;
  int type = op.type;
  const char *panel;
  if (type == SP_BF12) {
    const CodedPanel &coded = ((const CodedPanel *)op.weight)[token / WIDTH];
    if (coded.escapes) return read_coded_row(coded, i, width, out);
    panel = coded.at(coded.data), type = SP_BF16;
  } else {
    panel = (const char *)op.weight + token / WIDTH * bytes_of_panel(type, width);
  }
  if (type == SP_FP8) return read_fp8_row(panel, i, width, out);
  if (is_grouped(type)) return decode_row(type, panel, i, width, out);
  const Steps steps = steps_of(type, width);
  for (int64_t j = 0; j < width; j++) {
    const char *step = panel + steps.at(type == SP_F32 ? j : j / 2);
    out[j] = read_weight(type, step, type == SP_F32 ? i : type == SP_F16 ? j % 2 * WIDTH + i : 2 * i + j % 2);
  }
}

// Copy the input embedding that a row brings, or look up a row of the packed table [vocabulary, n]. Add the row of its position.
static void run_embed(const SpOp &op, const SpPass &pass, int64_t t) {
  float *out = op.out + t * op.n;
  const float factor = factor_of(op);
  if (pass.inputs && pass.inputs[t] && !(op.flags & SP_TOKENS)) {
    memcpy(out, pass.inputs[t], op.n * sizeof(float));
  } else {
    read_packed_row(op, pass.tokens[t], out);
    for (int64_t i = 0; factor != 1.0f && i < op.n; i++) out[i] *= factor;
  }
  const float *learned = op.learned ? op.learned + pass.positions[t] * op.n : nullptr;
  for (int64_t i = 0; learned && i < op.n; i++) out[i] += learned[i];
}

}  // namespace SP_NAMESPACE
