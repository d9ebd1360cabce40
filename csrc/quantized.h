// Linear layers over int8 and int4 weights. A row of x becomes int8 by its own largest value; products are summed exactly in
// int32, so only the few float operations behind them have an order, and that is fixed.
//
//   int8   steps of 4 k: [WIDTH][4] bytes q + 128; behind them scale[WIDTH] float32      w = scale * q, q = -127 .. 127
//   int4   steps of a group, GROUP k: [GROUP / 8][WIDTH][4] bytes, then scale[WIDTH] bfloat16
//          a byte holds k + j below and k + 4 + j above, j = 0 .. 3                      w = scale * (q - 8), q = 0 .. 15
//
// Weights are stored without sign because that is what the instruction takes; the surplus is a multiple of the sum of x.
#pragma once
#include "linear.h"

namespace SP_NAMESPACE {

constexpr int64_t GROUP = 32;
constexpr int64_t GROUP_BYTES = GROUP / 2 * WIDTH + WIDTH * 2;
constexpr int MOST_QUANTIZED_ROWS = 8;

static inline int64_t padded_depth(int64_t k) { return (k + GROUP - 1) / GROUP * GROUP; }

static inline Steps int8_steps(int64_t depth) { return Steps(depth / 4, STEP); }
static inline Steps int4_steps(int64_t depth) { return Steps(depth / GROUP, GROUP_BYTES, 2); }  // four streams: there are few

static inline int64_t quantized_panel_bytes(int type, int64_t k) {
  const int64_t depth = padded_depth(k);
  return type == SP_INT8 ? int8_steps(depth).size() + WIDTH * 4 : int4_steps(depth).size();
}

// Rows of x in int8: x = scale * q; sums[group] of q.
struct Quantized {
  List<int8_t> values;
  List<float> scales;
  List<int32_t> sums;
  void resize(int64_t rows, int64_t k) {
    const int64_t depth = padded_depth(k);
    values.resize(rows * depth), scales.resize(rows), sums.resize(rows * depth / GROUP);
  }
};

static void quantize_row(const float *x, int64_t k, int8_t *values, float *scale, int32_t *sums) {
  const int64_t depth = padded_depth(k);
  float largest = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < k; i++) {
    const float size = fabsf(x[i]);
    largest = size > largest ? size : largest;
    finite &= size <= 3.402823466e38f;
  }
  const float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
  *scale = finite ? largest / 127.0f : NAN;  // what is not a number must not vanish
  for (int64_t i = 0; i < depth; i++) values[i] = i < k && finite ? (int8_t)lrintf(x[i] * factor) : 0;
  for (int64_t g = 0; g < depth / GROUP; g++) {
    sums[g] = 0;
    for (int64_t i = 0; i < GROUP; i++) sums[g] += values[g * GROUP + i];
  }
}

static void run_quantize(const SpOp &op, Quantized &x, int64_t t) {
  const int64_t depth = padded_depth(op.k);
  quantize_row(op.in + t * op.k, op.k, x.values.items + t * depth, &x.scales[t], x.sums.items + t * depth / GROUP);
}

template <int ROWS>
static void sum_int8(const char *panel, const int8_t *x, const float *scales, const int32_t *sums, int64_t depth, float *out) {
  Ints acc[ROWS][VECS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) acc[r][v] = no_ints();
  const Steps steps = int8_steps(depth);
  steps.each(panel, steps.count, [&](int64_t j, const char *weight) __attribute__((always_inline)) {
    Ints w[VECS];
    for (int v = 0; v < VECS; v++) prefetch(weight + v * LANES * 4 + steps.ahead), w[v] = load_ints(weight + v * LANES * 4);
    for (int r = 0; r < ROWS; r++) {
      const Ints four = splat_dword(x + r * depth + 4 * j);
      for (int v = 0; v < VECS; v++) acc[r][v] = add_products(acc[r][v], w[v], four);
    }
  });
  const float *factors = (const float *)(panel + steps.size());
  for (int r = 0; r < ROWS; r++) {
    int32_t surplus = 0;
    for (int64_t g = 0; g < depth / GROUP; g++) surplus += sums[r * (depth / GROUP) + g];
    for (int v = 0; v < VECS; v++) {
      const Vec exact = to_floats(sub_ints(acc[r][v], splat_ints(128 * surplus)));
      store(out + r * WIDTH + v * LANES, mul(mul(exact, splat(scales[r])), load(factors + v * LANES)));
    }
  }
}

template <int ROWS>
static void sum_int4(const char *panel, const int8_t *x, const float *scales, const int32_t *sums, int64_t depth, float *out) {
  Vec total[ROWS][VECS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) total[r][v] = zero();
  const Steps steps = int4_steps(depth);
  steps.each(panel, steps.count, [&](int64_t g, const char *weight) __attribute__((always_inline)) {
    Ints acc[ROWS][VECS];
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECS; v++) acc[r][v] = no_ints();
#pragma GCC unroll 4
    for (int64_t k = g * GROUP; k < (g + 1) * GROUP; k += 8, weight += STEP) {
      Ints low[VECS], high[VECS];
      for (int v = 0; v < VECS; v++) {
        prefetch(weight + v * LANES * 4 + steps.ahead);
        const Ints both = load_ints(weight + v * LANES * 4);
        low[v] = low_halves(both), high[v] = high_halves(both);
      }
      for (int r = 0; r < ROWS; r++) {
        const Ints four = splat_dword(x + r * depth + k), next = splat_dword(x + r * depth + k + 4);
        for (int v = 0; v < VECS; v++) acc[r][v] = add_products(add_products(acc[r][v], low[v], four), high[v], next);
      }
    }
    for (int v = 0; v < VECS; v++) {
      const Vec scale = load_bf16((const uint16_t *)weight + v * LANES);
      for (int r = 0; r < ROWS; r++) {
        const Ints exact = sub_ints(acc[r][v], splat_ints(8 * sums[r * steps.count + g]));
        total[r][v] = fma(to_floats(exact), scale, total[r][v]);
      }
    }
  });
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) store(out + r * WIDTH + v * LANES, mul(total[r][v], splat(scales[r])));
}

typedef void (*SumQuantized)(const char *, const int8_t *, const float *, const int32_t *, int64_t, float *);
static const SumQuantized SUM_INT8[] = {nullptr,     sum_int8<1>, sum_int8<2>, sum_int8<3>, sum_int8<4>,
                                        sum_int8<5>, sum_int8<6>, sum_int8<7>, sum_int8<8>};
static const SumQuantized SUM_INT4[] = {nullptr,     sum_int4<1>, sum_int4<2>, sum_int4<3>, sum_int4<4>,
                                        sum_int4<5>, sum_int4<6>, sum_int4<7>, sum_int4<8>};

static inline void sum_quantized_panel(const SpOp &op, Quantized &x, int64_t panel, int64_t row, int64_t rows, float *sums) {
  const int64_t depth = padded_depth(op.k);
  const SumQuantized *sum = op.type == SP_INT8 ? SUM_INT8 : SUM_INT4;
  sum[rows]((const char *)op.weight + panel * quantized_panel_bytes(op.type, op.k), x.values.items + row * depth,
            x.scales.items + row, x.sums.items + row * (depth / GROUP), depth, sums);
}

static void run_quantized(const SpOp &op, int64_t all, Quantized &x, int64_t piece) {
  alignas(64) float sums[2 * MOST_QUANTIZED_ROWS * WIDTH];
  linear_piece(op, all, MOST_QUANTIZED_ROWS, piece, sums, [&](int64_t panel, int64_t row, int64_t rows, float *to) {
    sum_quantized_panel(op, x, panel, row, rows, to);
  });
}

static inline float weight_at(int source, const void *weight, int64_t n, int64_t k, int64_t row, int64_t j) {
  return row < n && j < k ? read_weight(source, weight, row * k + j) : 0.0f;
}

static inline float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

static void pack_int8(int source, const void *weight, int64_t n, int64_t k, int64_t panel, char *packed) {
  const int64_t depth = padded_depth(k);
  const Steps steps = int8_steps(depth);
  for (int64_t i = 0; i < WIDTH; i++) {
    const int64_t row = panel * WIDTH + i;
    float largest = 0.0f;
    for (int64_t j = 0; j < k; j++) largest = fmaxf(largest, fabsf(weight_at(source, weight, n, k, row, j)));
    const float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (int64_t j = 0; j < depth; j++)
      packed[steps.at(j / 4) + i * 4 + j % 4] = (char)(128 + lrintf(weight_at(source, weight, n, k, row, j) * factor));
    ((float *)(packed + steps.size()))[i] = largest / 127.0f;
  }
}

// The scale of a group that leaves the least squared error, of some around largest / 8.
static float best_scale(const float *group) {
  float extreme = 0.0f, best = 0.0f, least = INFINITY;
  for (int64_t j = 0; j < GROUP; j++)
    if (fabsf(group[j]) > fabsf(extreme)) extreme = group[j];
  if (extreme == 0.0f) return 0.0f;
  for (int step = 0; step < 16; step++) {
    const float scale = read_bf16(to_bf16(-extreme / (6.5f + 0.125f * (float)step)));
    float error = 0.0f;
    for (int64_t j = 0; j < GROUP; j++) {
      const float rest = group[j] - scale * clamp(nearbyintf(group[j] / scale), -8.0f, 7.0f);
      error += rest * rest;
    }
    if (error < least) least = error, best = scale;
  }
  return best;
}

static void pack_int4(int source, const void *weight, int64_t n, int64_t k, int64_t panel, char *packed) {
  const Steps groups = int4_steps(padded_depth(k));
  memset(packed, 0, groups.size());
  for (int64_t g = 0; g < groups.count; g++) {
    char *to = packed + groups.at(g);
    for (int64_t i = 0; i < WIDTH; i++) {
      float group[GROUP];
      for (int64_t j = 0; j < GROUP; j++) group[j] = weight_at(source, weight, n, k, panel * WIDTH + i, g * GROUP + j);
      const float scale = best_scale(group);
      for (int64_t j = 0; j < GROUP; j++) {
        const int q = 8 + (int)(scale == 0.0f ? 0.0f : clamp(nearbyintf(group[j] / scale), -8.0f, 7.0f));
        to[(j / 8 * WIDTH + i) * 4 + j % 4] |= (char)(j % 8 < 4 ? q : q << 4);
      }
      ((uint16_t *)(to + GROUP / 2 * WIDTH))[i] = to_bf16(scale);
    }
  }
}

}  // namespace SP_NAMESPACE
