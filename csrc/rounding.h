// Rounds rows of floats to blocks (blocks.h), or to int8. Every instruction set computes the same bits: eight groups are rounded together,
// one in each lane of a vector, so that no sum depends on the width of vectors, and no product is fused with a sum.
//
//   scale * q               q from -2^(bits - 1) to 2^(bits - 1) - 1; 8 bits: from -127      Q4_0, Q5_0, Q6_K, Q8_0
//   scale * q - minimum     q from 0 to 2^bits - 1                                           Q4_K, Q5_K, Q5_1
//   scale * (q - zero)      q and zero from 0 to 2^bits - 1; the scale is a bfloat16 too     ZERO4, ZERO8
//
// The sum of (weight - rounded weight)^2 over a group is minimised. For given integers, scale and minimum are a linear least squares problem;
// for given scale and minimum, the nearest integers are best. So several grids are tried, each is solved, and the best one is improved by
// both steps in turn. The K types store scales and minima as small integers. Neighbours of these are tried too, and the integers of weights
// are chosen for the stored scales and minima.
#pragma once
#include "blocks.h"

namespace SP_NAMESPACE {

constexpr int EIGHT = 8;     // groups that are rounded together
constexpr int TRIALS = 16;   // grids that are tried; their integers reach slightly less or more far than the weights
constexpr int AT_ONCE = 2;   // grids that are tried together
constexpr int IMPROVED = 2;  // times that integers and scales are then chosen in turn
constexpr float LEAST_REACH = -1.0f, REACH_STEP = 0.125f;
typedef float Eight __attribute__((vector_size(EIGHT * 4)));
typedef int32_t EightInts __attribute__((vector_size(EIGHT * 4)));

// Weights of eight groups, in the lanes.
template <int SIZE>
struct Columns {
  Eight x[SIZE];
};

// Sums over a group of weights x and their integers q.
struct Sums {
  Eight q, qq, qx, x;
};

// scale * q - minimum. error: the sum of squared errors, less the sum of x^2.
struct Grid {
  Eight scale, minimum, error;
};

static inline Eight all_of(float x) { return x - Eight{}; }
static inline Eight pick(Eight a, Eight b, Eight x, Eight y) { return a < b ? x : y; }  // x where a < b
static inline Eight size_of(Eight x) { return pick(x, Eight{}, -x, x); }
static inline Eight ratio(Eight a, Eight b) { return b == 0.0f ? Eight{} : a / (b == 0.0f ? all_of(1.0f) : b); }  // 0 if b is

// The nearest whole number from low to high. NaN stays NaN in both branches.
static inline Eight whole(Eight x, float low, float high) {
#if defined(SP_AVX2) || defined(SP_AVX512)
  x = (Eight)_mm256_min_ps(_mm256_set1_ps(high), _mm256_max_ps(_mm256_set1_ps(low), (__m256)x));
#else
  x = x < low ? all_of(low) : x;
  x = x > high ? all_of(high) : x;
#endif
  return (x + 0x1.8p23f) - 0x1.8p23f;  // the sum has no bits for fractions
}

static inline float extreme_of(Eight x) {
  float extreme = 0.0f;
  for (int i = 0; i < EIGHT; i++) extreme = fabsf(x[i]) > fabsf(extreme) ? x[i] : extreme;
  return extreme;
}

template <int SIZE>
static Columns<SIZE> read_columns(const float *weights) {
  Columns<SIZE> of;
  for (int j = 0; j < SIZE; j++)
    for (int i = 0; i < EIGHT; i++) of.x[j][i] = weights[i * SIZE + j];
  return of;
}

// The integers nearest to (x + minimum) * inverse.
template <int SIZE>
static inline Sums add_up(const Columns<SIZE> &of, Eight minimum, Eight inverse, float low, float high) {
  Sums sums = {};
  for (int j = 0; j < SIZE; j++) {
    const Eight x = of.x[j], q = whole((x + minimum) * inverse, low, high);
    sums.q += q, sums.qq += q * q, sums.qx += q * x, sums.x += x;
  }
  return sums;
}

// The same for several inverses at once, whose sums do not wait for one another. found[i].x is known.
template <int SIZE>
static inline void add_up_each(const Columns<SIZE> &of, Eight minimum, const Eight *inverses, float low, float high, Sums *found) {
  Sums sums[AT_ONCE] = {};
  for (int j = 0; j < SIZE; j++) {
    const Eight x = of.x[j], moved = x + minimum;
    for (int i = 0; i < AT_ONCE; i++) {
      const Eight q = whole(moved * inverses[i], low, high);
      sums[i].q += q, sums[i].qq += q * q, sums[i].qx += q * x;
    }
  }
  for (int i = 0; i < AT_ONCE; i++) found[i].q = sums[i].q, found[i].qq = sums[i].qq, found[i].qx = sums[i].qx;
}

template <int SIZE>
static inline Eight error_of(const Sums &of, Eight scale, Eight minimum) {
  return scale * (scale * of.qq - 2.0f * (of.qx + minimum * of.q)) + minimum * (2.0f * of.x + minimum * (float)SIZE);
}

// Replace grids by found ones with a smaller error.
static inline void take_better(Grid &best, const Grid &found) {
  best.scale = pick(found.error, best.error, found.scale, best.scale);
  best.minimum = pick(found.error, best.error, found.minimum, best.minimum);
  best.error = pick(found.error, best.error, found.error, best.error);
}

// The best scale and minimum for integers. A minimum is not negative, because the K types can't store it.
template <int SIZE>
static inline Grid solve(const Sums &of) {
  const Eight none = {};
  Eight scale = ratio((float)SIZE * of.qx - of.q * of.x, (float)SIZE * of.qq - of.q * of.q), minimum = (scale * of.q - of.x) / (float)SIZE;
  scale = pick(minimum, none, ratio(of.qx, of.qq), scale), minimum = pick(minimum, none, none, minimum);
  return {scale, minimum, error_of<SIZE>(of, scale, minimum)};
}

// The best grid with the integers 0 to `highest`.
static Grid best_grid(const Columns<GROUP> &of, float highest) {
  Eight low = {}, high = {};
  for (int j = 0; j < GROUP; j++) low = pick(of.x[j], low, of.x[j], low), high = pick(high, of.x[j], of.x[j], high);
  const Eight reach = high - low;
  Grid best = {reach / highest, -low, all_of(INFINITY)};
  Eight inverses[TRIALS];
  Sums sums[AT_ONCE] = {};
  for (int j = 0; j < GROUP; j++) sums[0].x += of.x[j];
  for (int i = 1; i < AT_ONCE; i++) sums[i].x = sums[0].x;
  for (int trial = 0; trial < TRIALS; trial++) inverses[trial] = ratio(all_of(highest + LEAST_REACH + REACH_STEP * (float)trial), reach);
  for (int trial = 0; trial < TRIALS; trial += AT_ONCE) {
    add_up_each(of, -low, inverses + trial, 0.0f, highest, sums);
    for (const Sums &each : sums) take_better(best, solve<GROUP>(each));
  }
  for (int turn = 0; turn < IMPROVED; turn++)
    take_better(best, solve<GROUP>(add_up(of, best.minimum, ratio(all_of(1.0f), best.scale), 0.0f, highest)));
  return best;
}

// The best grid without a minimum, with the integers from `low` to `high`.
template <int SIZE>
static Grid best_scale(const Columns<SIZE> &of, float low, float high) {
  Eight extreme = {};
  for (int j = 0; j < SIZE; j++) extreme = pick(size_of(extreme), size_of(of.x[j]), of.x[j], extreme);
  Grid best = {extreme / low, Eight{}, all_of(INFINITY)};
  const auto take = [&best](const Sums &sums) {
    const Eight scale = ratio(sums.qx, sums.qq);
    take_better(best, {scale, Eight{}, -scale * sums.qx});
  };
  Eight inverses[TRIALS];
  Sums sums[AT_ONCE];
  for (int trial = 0; trial < TRIALS; trial++) inverses[trial] = ratio(all_of(low - LEAST_REACH - REACH_STEP * (float)trial), extreme);
  for (int trial = 0; trial < TRIALS; trial += AT_ONCE) {
    add_up_each(of, Eight{}, inverses + trial, low, high, sums);
    for (const Sums &each : sums) take(each);
  }
  for (int turn = 0; turn < IMPROVED; turn++) take(add_up(of, Eight{}, ratio(all_of(1.0f), best.scale), low, high));
  return best;
}

// Choose the integers of groups, [groups][SIZE], plus `lift`.
template <int SIZE>
static void choose(const Columns<SIZE> &of, const Grid &grid, float low, float high, int lift, uint8_t *q) {
  const Eight inverse = ratio(all_of(1.0f), grid.scale);
  for (int j = 0; j < SIZE; j++) {
    const EightInts found = __builtin_convertvector(whole((of.x[j] + grid.minimum) * inverse, low, high), EightInts) + lift;
    for (int i = 0; i < EIGHT; i++) q[i * SIZE + j] = (uint8_t)found[i];
  }
}

// Round to float16, to nearest even. Larger numbers become the largest float16.
static inline uint16_t to_f16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size >= 0x477fe000) return (uint16_t)(sign | 0x7bff);  // 65,504
  if (size < 0x38800000) return (uint16_t)(sign | (uint32_t)lrintf(from_bits(size) * 0x1p24f));  // a multiple of 2^-24
  return (uint16_t)(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

// Round each number to float16, and return the stored numbers.
static inline Eight to_halves(Eight x, uint16_t *stored) {
  for (int i = 0; i < EIGHT; i++) stored[i] = to_f16(x[i]), x[i] = read_f16(stored[i]);
  return x;
}

// Store the fifth bits of 32 integers as the bits of a little-endian dword.
static inline void write_fifth_bits(const uint8_t *q, uint8_t *to) {
  uint32_t bits = 0;
  for (int64_t j = 0; j < GROUP; j++) bits |= (uint32_t)(q[j] >> 4 & 1) << j;
  memcpy(to, &bits, 4);
}

static inline void write_halves(const uint8_t *low, const uint8_t *high, int64_t count, uint8_t *to) {
  for (int64_t j = 0; j < count; j++) to[j] = (uint8_t)((low[j] & 15) | high[j] << 4);
}

// Round eight groups to blocks of one group each, and store the first `some` of them.
template <int TYPE>
static void round_small(const float *weights, int64_t some, uint8_t *blocks) {
  constexpr int bits = form_of(TYPE).bits;
  constexpr bool has_minimum = form_of(TYPE).has_minimum();
  const float high = (float)((1 << (has_minimum ? bits : bits - 1)) - 1), low = has_minimum ? 0.0f : bits == 8 ? -high : -high - 1.0f;
  const Columns<GROUP> of = read_columns<GROUP>(weights);
  uint16_t scales[EIGHT], minima[EIGHT];
  uint8_t q[SUPER];
  Grid grid = has_minimum ? best_grid(of, high) : best_scale(of, low, high);
  grid.scale = to_halves(grid.scale, scales), grid.minimum = -to_halves(-grid.minimum, minima);
  choose(of, grid, low, high, has_minimum || bits == 8 ? 0 : 1 << (bits - 1), q);
  for (int64_t i = 0; i < some; i++, blocks += block_bytes(TYPE)) {
    const uint8_t *own = q + i * GROUP;
    uint8_t *to = blocks + 2;
    memcpy(blocks, scales + i, 2);
    if (has_minimum) memcpy(to, minima + i, 2), to += 2;
    if (bits == 5) write_fifth_bits(own, to), to += 4;
    if (bits == 8)
      memcpy(to, own, GROUP);
    else
      write_halves(own, own + 16, 16, to);
  }
}

// The nearest numbers that float16 and bfloat16 both hold, in float16.
static inline Eight to_short_halves(Eight x, uint16_t *stored) {
  for (int i = 0; i < EIGHT; i++) {
    uint32_t bits;
    const float wide = x[i];
    memcpy(&bits, &wide, 4);
    x[i] = from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
  }
  return to_halves(x, stored);
}

// Round eight groups to blocks with zero points, and store the first `some` of them.
template <int TYPE>
static void round_with_zeros(const float *weights, int64_t some, uint8_t *blocks) {
  constexpr bool is_long = TYPE == SP_ZERO8;
  constexpr float highest = is_long ? 255.0f : 15.0f;
  const Columns<GROUP> of = read_columns<GROUP>(weights);
  const Grid fitted = best_grid(of, highest);
  const Eight nearest = whole(ratio(fitted.minimum, fitted.scale), 0.0f, highest);
  Grid best = {Eight{}, Eight{}, all_of(INFINITY)};  // minimum: the zero point
  for (int step = -1; step <= 1; step++) {
    const Eight zero = whole(nearest + (float)step, 0.0f, highest);
    const Sums sums = add_up(of, zero * fitted.scale, ratio(all_of(1.0f), fitted.scale), 0.0f, highest);
    const Eight product = sums.qx - zero * sums.x, scale = ratio(product, sums.qq - zero * (2.0f * sums.q - (float)GROUP * zero));
    take_better(best, {scale, zero, -scale * product});
  }
  uint16_t scales[EIGHT];
  uint8_t q[SUPER];
  const Eight zeros = best.minimum;
  best.scale = to_short_halves(best.scale, scales), best.minimum = best.scale * zeros;
  choose(of, best, 0.0f, highest, 0, q);
  for (int64_t i = 0; i < some; i++, blocks += block_bytes(TYPE)) {
    memcpy(blocks, scales + i, 2), blocks[2] = (uint8_t)zeros[i];
    const uint8_t *own = q + i * GROUP;
    if (is_long)
      memcpy(blocks + 3, own, GROUP);
    else
      write_halves(own, own + 16, 16, blocks + 3);
  }
}

// Round scales and minima to integers of 6 bits. Both are stored in the block, as factors and integers; see read_minimum_scales.
static Grid store_minimum_scales(const Columns<GROUP> &of, const Grid &fitted, float highest, uint8_t *block) {
  const uint16_t stored[2] = {to_f16(extreme_of(fitted.scale) / 63.0f), to_f16(extreme_of(fitted.minimum) / 63.0f)};
  const Eight factor = all_of(read_f16(stored[0])), minimum_factor = all_of(read_f16(stored[1]));
  const Eight nearest = whole(ratio(fitted.scale, factor), 0.0f, 63.0f);
  Grid best = {Eight{}, Eight{}, all_of(INFINITY)};
  for (int step = -1; step <= 1; step++) {
    const Eight scale = factor * whole(nearest + (float)step, 0.0f, 63.0f), inverse = ratio(all_of(1.0f), scale);
    const Sums sums = add_up(of, fitted.minimum, inverse, 0.0f, highest);
    const Eight wanted = (scale * sums.q - sums.x) / (float)GROUP;
    const Eight minimum = minimum_factor * whole(ratio(wanted, minimum_factor), 0.0f, 63.0f);
    take_better(best, {scale, minimum, error_of<GROUP>(add_up(of, minimum, inverse, 0.0f, highest), scale, minimum)});
  }
  const Eight scales = ratio(best.scale, factor), minima = ratio(best.minimum, minimum_factor);
  memcpy(block, stored, 4);
  for (int i = 0; i < 4; i++) {
    const int s = (int)scales[i], m = (int)minima[i], later_s = (int)scales[4 + i], later_m = (int)minima[4 + i];
    block[4 + i] = (uint8_t)(s | later_s >> 4 << 6), block[8 + i] = (uint8_t)(m | later_m >> 4 << 6);
    block[12 + i] = (uint8_t)((later_s & 15) | (later_m & 15) << 4);
  }
  return best;
}

// Round SUPER weights to a block of Q4_K or Q5_K.
template <int TYPE>
static void round_with_minima(const float *weights, uint8_t *block) {
  constexpr int bits = form_of(TYPE).bits;
  const float highest = (float)((1 << bits) - 1);
  const Columns<GROUP> of = read_columns<GROUP>(weights);
  uint8_t q[SUPER];
  choose(of, store_minimum_scales(of, best_grid(of, highest), highest, block), 0.0f, highest, 0, q);
  for (int pair = 0; pair < 4; pair++) write_halves(q + 64 * pair, q + 64 * pair + GROUP, GROUP, block + block_bytes(TYPE) - 128 + 32 * pair);
  for (int j = 0; bits == 5 && j < GROUP; j++) {
    block[16 + j] = 0;
    for (int g = 0; g < GROUPS_OF_SUPER; g++) block[16 + j] |= (uint8_t)((q[g * GROUP + j] >> 4 & 1) << g);
  }
}

// Round SUPER weights to a block of Q6_K, with a scale for each 16; see read_six_bits.
static void round_six_bits(const float *weights, uint8_t *block) {
  Columns<16> of[2];
  Grid fitted[2];
  for (int half = 0; half < 2; half++) of[half] = read_columns<16>(weights + half * 128), fitted[half] = best_scale(of[half], -32.0f, 31.0f);
  const float one = extreme_of(fitted[0].scale), other = extreme_of(fitted[1].scale);
  const uint16_t stored = to_f16((fabsf(other) > fabsf(one) ? other : one) / -128.0f);
  const Eight factor = all_of(read_f16(stored));
  memcpy(block + 208, &stored, 2);
  for (int half = 0; half < 2; half++) {
    const Eight nearest = whole(ratio(fitted[half].scale, factor), -128.0f, 127.0f);
    Grid best = {Eight{}, Eight{}, all_of(INFINITY)};
    for (int step = -1; step <= 1; step++) {
      const Eight scale = factor * whole(nearest + (float)step, -128.0f, 127.0f);
      const Sums sums = add_up(of[half], Eight{}, ratio(all_of(1.0f), scale), -32.0f, 31.0f);
      take_better(best, {scale, Eight{}, error_of<16>(sums, scale, Eight{})});
    }
    uint8_t q[SUPER / 2];
    choose(of[half], best, -32.0f, 31.0f, 32, q);
    const Eight scales = ratio(best.scale, factor);
    for (int i = 0; i < EIGHT; i++) block[192 + half * EIGHT + i] = (uint8_t)(int8_t)scales[i];
    write_halves(q, q + 64, 64, block + 64 * half);
    for (int j = 0; j < 32; j++)
      block[128 + 32 * half + j] = (uint8_t)(q[j] >> 4 | q[32 + j] >> 4 << 2 | q[64 + j] >> 4 << 4 | q[96 + j] >> 4 << 6);
  }
}

static void round_super(int type, const float *weights, int64_t groups, uint8_t *blocks) {
  switch (type) {
    case SP_Q8_0: return round_small<SP_Q8_0>(weights, groups, blocks);
    case SP_Q4_0: return round_small<SP_Q4_0>(weights, groups, blocks);
    case SP_Q5_0: return round_small<SP_Q5_0>(weights, groups, blocks);
    case SP_Q5_1: return round_small<SP_Q5_1>(weights, groups, blocks);
    case SP_Q4_K: return round_with_minima<SP_Q4_K>(weights, blocks);
    case SP_Q5_K: return round_with_minima<SP_Q5_K>(weights, blocks);
    case SP_Q6_K: return round_six_bits(weights, blocks);
    case SP_ZERO4: return round_with_zeros<SP_ZERO4>(weights, groups, blocks);
    case SP_ZERO8: return round_with_zeros<SP_ZERO8>(weights, groups, blocks);
  }
}

// Round a row to int8, with the scale that makes its largest weight 127.
static void round_to_int8_row(int source, const void *weights, int64_t first, int64_t k, uint8_t *row) {
  float largest = 0.0f;
  for (int64_t j = 0; j < k; j++) {  // not fmaxf, over which gcc 12 fails for ARM
    const float size = fabsf(read_weight(source, weights, first + j));
    if (size > largest) largest = size;
  }
  const float scale = largest / 127.0f, factor = largest > 0.0f ? 127.0f / largest : 0.0f;
  memcpy(row, &scale, 4);
  for (int64_t j = 0; j < k; j++) row[4 + j] = (uint8_t)(int8_t)lrintf(read_weight(source, weights, first + j) * factor);
}

// Round rows [n, k] of floats to rows of blocks, or of SP_INT8. Weights after the last one of a row are 0.
static void round_rows(int type, int source, const void *weights, int64_t n, int64_t k, uint8_t *blocks, int threads) {
  const int64_t row_bytes = type == SP_INT8 ? k + 4 : blocks_of(type, k) * block_bytes(type);
  share_out(n, threads, [&](int64_t row) {
    if (type == SP_INT8) return round_to_int8_row(source, weights, row * k, k, blocks + row * row_bytes);
    for (int64_t begin = 0; begin < k; begin += SUPER) {
      const int64_t some = k - begin < SUPER ? k - begin : SUPER;
      float own[SUPER] = {0};
      for (int64_t j = 0; j < some; j++) own[j] = read_weight(source, weights, row * k + begin + j);
      round_super(type, own, groups_of(some), blocks + row * row_bytes + begin / block_weights(type) * block_bytes(type));
    }
  });
}

}  // namespace SP_NAMESPACE
