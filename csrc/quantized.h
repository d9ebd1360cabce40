// Linear layers over int8 and int4 weights. A row of x is quantized to int8 by its largest magnitude. Products are summed exactly
// in int32, so only the few float operations after them depend on order, and that order is fixed.
//
//   int8   steps of 4 k: [WIDTH][4] bytes q + 128; after the steps scale[WIDTH] float32            w = scale * q, |q| < 128
//   int4   steps of 8 k: [WIDTH][4] bytes; after the steps scale[groups of k][WIDTH] bfloat16      w = scale * (q - 8), q < 16
//          a byte holds k + j in its low half and k + 4 + j in its high half, j = 0 .. 3
//   tile   [k / 4][rows][4] int8
//
// Weights are stored as unsigned bytes, the operand of the instruction. Sums start at a compensation for the offset of 128 or 8: a
// multiple of the sum of x.
#pragma once
#include "linear.h"

namespace SP_NAMESPACE {

constexpr int64_t GROUP = 32;
constexpr int GROUP_STEPS = GROUP / 8;
constexpr int UNROLLED = LANES == 16 ? GROUP_STEPS : 1;  // steps of a group; 16 registers have room for one only

static inline int64_t padded_depth(int64_t k) { return (k + GROUP - 1) / GROUP * GROUP; }
static inline int64_t groups_of(int64_t k) { return padded_depth(k) / GROUP; }

static inline Steps quantized_steps(int type, int64_t k) { return Steps(padded_depth(k) / (type == SP_INT8 ? 4 : 8)); }

static inline int64_t quantized_panel_bytes(int type, int64_t k) {
  const int64_t scales = type == SP_INT8 ? WIDTH * 4 : groups_of(k) * WIDTH * 2;
  return quantized_steps(type, k).size() + (scales + 63) / 64 * 64;
}

static inline int64_t bytes_of_panel(int type, int64_t k) {
  return type == SP_F32 || type == SP_BF16 ? panel_bytes(type, k) : quantized_panel_bytes(type, k);
}

// Quantize a row to int8: x = scale * q. The compensations of its groups are `stride` apart, because a tile's rows are interleaved.
static void quantize_row(int type, const float *x, int64_t k, int8_t *values, float *scale, int64_t stride, int32_t *compensation) {
  float largest = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < k; i++) {
    const float size = fabsf(x[i]);
    largest = size > largest ? size : largest;
    finite &= size <= 3.402823466e38f;
  }
  const float factor = finite && largest > 0.0f ? 127.0f / largest : 0.0f;
  *scale = finite ? largest / 127.0f : NAN;  // so that infinities and NaN reach the output
  int32_t all = 0;
  for (int64_t g = 0; g < groups_of(k); g++) {
    const int64_t first = g * GROUP, some = k - first < GROUP ? k - first : GROUP;
    int8_t *group = values + first;
    int32_t sum = 0;
    for (int64_t i = 0; i < some; i++) group[i] = finite ? (int8_t)lrintf(x[first + i] * factor) : 0;
    for (int64_t i = some; i < GROUP; i++) group[i] = 0;
    for (int64_t i = 0; i < GROUP; i++) sum += group[i];
    if (type == SP_INT4) compensation[g * stride] = -8 * sum;
    all += sum;
  }
  if (type == SP_INT8) *compensation = -128 * all;
}

template <int ROWS>
static void sum_int8(const char *panel, const Tile &tile, int64_t k, float *sums) {
  Ints acc[ROWS][VECS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) acc[r][v] = splat_ints(tile.compensation[r]);
  const Steps steps = quantized_steps(SP_INT8, k);
  const char *x = (const char *)tile.dwords;
  steps.each_group<GROUP_STEPS>(panel, [&](const char *weight) __attribute__((always_inline)) {
#pragma GCC unroll UNROLLED
    for (int s = 0; s < GROUP_STEPS; s++, weight += steps.stride, x += 4 * ROWS) {
      Ints w[VECS];
      prefetch_step(weight, steps.ahead);
      for (int v = 0; v < VECS; v++) w[v] = load_ints(weight + v * LANES * 4);
      for (int r = 0; r < ROWS; r++) {
        const Ints four = splat_dword(x + 4 * r);
        for (int v = 0; v < VECS; v++) acc[r][v] = add_products(acc[r][v], w[v], four);
      }
    }
  });
  const float *scales = (const float *)(panel + steps.size());
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++)
      store(sums + r * WIDTH + v * LANES, mul(mul(to_floats(acc[r][v]), splat(tile.scales[r])), load(scales + v * LANES)));
}

template <int ROWS>
static void sum_int4(const char *panel, const Tile &tile, int64_t k, float *sums) {
  Vec total[ROWS][VECS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) total[r][v] = zero();
  const Steps steps = quantized_steps(SP_INT4, k);
  const uint16_t *scales = (const uint16_t *)(panel + steps.size());
  const int32_t *compensation = tile.compensation;
  const char *x = (const char *)tile.dwords;
  steps.each_group<GROUP_STEPS>(panel, [&](const char *weight) __attribute__((always_inline)) {
    Ints acc[ROWS][VECS];
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECS; v++) acc[r][v] = splat_ints(compensation[r]);
#pragma GCC unroll UNROLLED
    for (int s = 0; s < GROUP_STEPS; s++, weight += steps.stride, x += 8 * ROWS) {
      Ints low[VECS], high[VECS];
      prefetch_step(weight, steps.ahead);
      for (int v = 0; v < VECS; v++) {
        const Ints both = load_ints(weight + v * LANES * 4);
        low[v] = low_halves(both), high[v] = high_halves(both);
      }
      for (int r = 0; r < ROWS; r++) {
        const Ints four = splat_dword(x + 4 * r), next = splat_dword(x + 4 * (ROWS + r));
        for (int v = 0; v < VECS; v++) acc[r][v] = add_products(add_products(acc[r][v], low[v], four), high[v], next);
      }
    }
    prefetch(scales + AHEAD / 16), prefetch(scales + AHEAD / 16 + 32);
    for (int v = 0; v < VECS; v++, scales += LANES) {
      const Vec scale = load_bf16(scales);
      for (int r = 0; r < ROWS; r++) total[r][v] = fma(to_floats(acc[r][v]), scale, total[r][v]);
    }
    compensation += ROWS;
  });
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) store(sums + r * WIDTH + v * LANES, mul(total[r][v], splat(tile.scales[r])));
}

static const SumTile SUM_INT8[] = {nullptr,     sum_int8<1>, sum_int8<2>, sum_int8<3>, sum_int8<4>,
                                   sum_int8<5>, sum_int8<6>, sum_int8<7>, sum_int8<8>};
static const SumTile SUM_INT4[] = {nullptr,     sum_int4<1>, sum_int4<2>, sum_int4<3>, sum_int4<4>,
                                   sum_int4<5>, sum_int4<6>, sum_int4<7>, sum_int4<8>};

static inline float weight_at(int source, const void *weight, int64_t n, int64_t k, int64_t row, int64_t j) {
  return row < n && j < k ? read_weight(source, weight, row * k + j) : 0.0f;
}

static inline float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

static void pack_int8(int source, const void *weight, int64_t n, int64_t k, int64_t panel, char *packed) {
  const Steps steps = quantized_steps(SP_INT8, k);
  for (int64_t i = 0; i < WIDTH; i++) {
    const int64_t row = panel * WIDTH + i;
    float largest = 0.0f;
    for (int64_t j = 0; j < k; j++) largest = fmaxf(largest, fabsf(weight_at(source, weight, n, k, row, j)));
    const float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (int64_t j = 0; j < 4 * steps.count; j++)
      packed[steps.at(j / 4) + i * 4 + j % 4] = (char)(128 + lrintf(weight_at(source, weight, n, k, row, j) * factor));
    ((float *)(packed + steps.size()))[i] = largest / 127.0f;
  }
}

// The scale of a group with the least squared error, of sixteen near -extreme / 8 (the extreme has the largest magnitude).
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
  const Steps steps = quantized_steps(SP_INT4, k);
  memset(packed, 0, quantized_panel_bytes(SP_INT4, k));
  for (int64_t g = 0; g < groups_of(k); g++)
    for (int64_t i = 0; i < WIDTH; i++) {
      float group[GROUP];
      for (int64_t j = 0; j < GROUP; j++) group[j] = weight_at(source, weight, n, k, panel * WIDTH + i, g * GROUP + j);
      const float scale = best_scale(group);
      for (int64_t j = 0; j < GROUP; j++) {
        const int q = 8 + (int)(scale == 0.0f ? 0.0f : clamp(nearbyintf(group[j] / scale), -8.0f, 7.0f));
        packed[steps.at(g * GROUP_STEPS + j / 8) + i * 4 + j % 4] |= (char)(j % 8 < 4 ? q : q << 4);
      }
      ((uint16_t *)(packed + steps.size()))[g * WIDTH + i] = to_bf16(scale);
    }
}

}  // namespace SP_NAMESPACE
