// Operations on single rows: norms, gates, rotary embedding, and storing keys and values in the cache.
#pragma once
#include "coded.h"
#include "groups.h"

namespace SP_NAMESPACE {

static inline float mean_square(const float *x, int64_t n) {
  Vec sum = zero();
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) sum = fma(load(x + i), load(x + i), sum);
  if (i < n) {
    Vec rest = load_part(x + i, n - i);
    sum = fma(rest, rest, sum);
  }
  return sum_lanes(sum) / (float)n;
}

// out may be x.
static inline void norm_row(const float *x, const float *scale, float eps, int64_t n, float *out) {
  const Vec factor = splat(1.0f / sqrtf(mean_square(x, n) + eps));
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(out + i, mul(load(scale + i), mul(load(x + i), factor)));
  if (i < n) store_part(out + i, mul(load_part(scale + i, n - i), mul(load_part(x + i, n - i), factor)), n - i);
}

static void run_copy(const SpOp &op, int64_t t) { memcpy(op.out + t * op.n, op.in + t * op.n, op.n * sizeof(float)); }

static void run_gate(const SpOp &op, int64_t t) {
  const float *gate = op.in + t * op.n;
  float *out = op.out + t * op.n;
  int64_t i = 0;
  for (; i + LANES <= op.n; i += LANES) store(out + i, mul(silu(load(gate + i)), load(out + i)));
  if (i < op.n) store_part(out + i, mul(silu(load_part(gate + i, op.n - i)), load_part(out + i, op.n - i)), op.n - i);
}

static void run_norm(const SpOp &op, int64_t t) {
  if (op.copy) memcpy(op.copy + t * op.n, op.in + t * op.n, op.n * sizeof(float));
  norm_row(op.in + t * op.n, op.scale, op.eps, op.n, op.out + t * op.n);
}

// Dimension i is paired with i + dim / 2.
static inline void rotate_head(float *x, const float *cosine, const float *sine, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i] + a * sine[i];
  }
}

static inline void put_cache(const SpOp &op, void *storage, int64_t slot, int64_t head, const float *x) {
  const int64_t at = (slot * op.kv_heads + head) * op.dim;
  if (op.type == SP_F32) {
    memcpy((float *)storage + at, x, op.dim * sizeof(float));
  } else {
    uint16_t *to = (uint16_t *)storage + at;
    for (int64_t i = 0; i < op.dim; i++) to[i] = to_bf16(x[i]);
  }
}

static inline int64_t real_size(int type) { return type == SP_F32 ? 4 : 2; }

static inline void *layer_of(void *storage, const SpOp &op, const SpPass &pass) {
  return (char *)storage + op.layer * pass.layer_stride;
}

// Norm (if there are scales) and rotate one row's queries and keys in place; store its keys and values in the cache.
static void run_rotate(const SpOp &op, const SpPass &pass, int64_t t) {
  const int64_t half = op.dim / 2;
  const float *cosine = pass.cosines + pass.positions[t] * half, *sine = pass.sines + pass.positions[t] * half;
  float *x = (float *)op.in + t * (op.heads + 2 * op.kv_heads) * op.dim;
  for (int64_t head = 0; head < op.heads + op.kv_heads; head++, x += op.dim) {
    const float *scale = head < op.heads ? op.scale : op.bias;
    if (scale) norm_row(x, scale, op.eps, op.dim, x);
    rotate_head(x, cosine, sine, half);
    if (head >= op.heads) put_cache(op, layer_of(pass.keys, op, pass), pass.slots[t], head - op.heads, x);
  }
  for (int64_t head = 0; head < op.kv_heads; head++, x += op.dim)
    put_cache(op, layer_of(pass.values, op, pass), pass.slots[t], head, x);
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
  if (is_grouped(type)) return decode_row(type, panel, i, width, out);
  const Steps steps = steps_of(type, width);
  for (int64_t j = 0; j < width; j++) {
    const char *step = panel + steps.at(type == SP_F32 ? j : j / 2);
    out[j] = read_weight(type, step, type == SP_F32 ? i : type == SP_F16 ? j % 2 * WIDTH + i : 2 * i + j % 2);
  }
}

// Copy the input embedding that a row brings, or look up a row of the packed table [vocabulary, n].
static void run_embed(const SpOp &op, const SpPass &pass, int64_t t) {
  if (pass.inputs && pass.inputs[t])
    memcpy(op.out + t * op.n, pass.inputs[t], op.n * sizeof(float));
  else
    read_packed_row(op, pass.tokens[t], op.out + t * op.n);
}

}  // namespace SP_NAMESPACE
