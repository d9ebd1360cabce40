// Linear layers over weights in groups of small integers (groups.h). Each 32 numbers of a row of x are rounded to int8 with a scale of
// their own, so a large number costs only the other 31 precision:
//
//   x = scale_x * v, |v| < 128      y = sum over groups of scale_x * (scale_w * (sum of q v - OFFSET * sum of v) + minimum_w * sum of v)
//
// Products of integers are summed exactly in int32. Groups are added in order, in float32. A zero takes the place of OFFSET. Its product with
// the sum of v is subtracted in float32, exactly too: all are whole numbers below 2^24. So a zero that equals a type's OFFSET gives the bits
// of that type.
//
//   tile     [k / 4][rows] dwords of int8
//   scales   [groups][rows] float32: scale_x
//   offsets  [groups][1 or 2 halves][rows], for weights with minima or zeros: float32, sum of v
//                                           for others: int32, -OFFSET * sum of v, to which the products are added
#pragma once
#include "groups.h"

namespace SP_NAMESPACE {

static inline int64_t offsets_of(int type, int64_t k) { return groups_of(k) * (form_of(type).is_halved() ? 2 : 1); }

constexpr float LEAST_ROUNDED = 1e-36f;  // the least `largest` of a group that is not zero: 127 / largest must not overflow

// Round GROUP numbers. Returns the scale; it is NaN for a group with an infinity or NaN, so that outputs are NaN too. sums: of both halves.
static inline float round_group(const float *x, int8_t *values, float sums[2]) {
  constexpr int HALF = 16 / LANES;  // vectors
  Vec parts[2 * HALF], largest = zero();
  bool finite = true;
  for (int i = 0; i < 2 * HALF; i++) {
    parts[i] = load(x + i * LANES), finite &= all_finite(parts[i]);
    largest = max(largest, max(parts[i], sub(zero(), parts[i])));
  }
  const bool is_zero = max_lanes(largest) == 0.0f;  // then a scale of 0, because products with subnormal numbers are slow
  const float most = max_lanes(max(largest, splat(LEAST_ROUNDED)));
  const Vec factor = splat(127.0f / most);
  for (int half = 0; half < 2; half++) {
    Vec sum = zero();
    for (int i = half * HALF; i < (half + 1) * HALF; i++) {
      const Vec rounded = finite ? nearest(mul(parts[i], factor)) : zero();
      store_bytes(values + i * LANES, rounded), sum = add(sum, rounded);
    }
    sums[half] = sum_lanes(sum);  // exact: whole numbers below 2^11
  }
  return finite ? is_zero ? 0.0f : most / 127.0f : NAN;
}

// Group g of a row, from `x` where it is one there, else copied to `part`: its inputs are in another order, or its last ones are missing.
static inline const float *group_of(const float *x, const int32_t *order, int64_t k, int64_t g, float part[GROUP]) {
  const int64_t first = g * GROUP, some = k - first < GROUP ? k - first : GROUP;
  if (!order && some == GROUP) return x + first;
  for (int64_t j = 0; j < GROUP; j++) part[j] = j < some ? x[order ? order[first + j] : first + j] : 0.0f;
  return part;
}

// Round groups begin .. end - 1 of a row. Its scales and offsets are `stride` apart, because a tile's rows are interleaved. order: see SpOp.
static void round_to_int8(int type, const float *x, const int32_t *order, int64_t k, int64_t begin, int64_t end, int8_t *values, float *scales,
                          int32_t *offsets, int64_t stride) {
  const Form form = form_of(type);
  const int64_t halves = form.is_halved() ? 2 : 1;
  for (int64_t g = begin; g < end; g++) {
    float part[GROUP], sums[2];
    scales[g * stride] = round_group(group_of(x, order, k, g, part), values + g * GROUP, sums);
    if (!form.is_halved()) sums[0] += sums[1];
    for (int64_t half = 0; half < halves; half++) {
      int32_t *offset = offsets + (g * halves + half) * stride;
      if (form.has_sums())
        memcpy(offset, &sums[half], 4);
      else
        *offset = -form.offset * (int32_t)sums[half];
    }
  }
}

// The sum of a group: `first` plus products of unsigned integers of BITS bits with int8, four in each dword. Either begin_sum or end_sum
// adds `first`. Without VNNI, sums of products with 4 bits have 16 bits until end_sum.
template <int BITS>
static inline Ints begin_sum(Ints first) {
#if defined(SP_VNNI) || defined(SP_PORTABLE)
  return first;
#else
  return BITS <= 4 ? splat_ints(0) : first;
#endif
}

template <int BITS>
static inline Ints add_products(Ints sum, Ints w, Ints x) {
#if !defined(SP_VNNI) && !defined(SP_PORTABLE)
  if (BITS <= 4) return add_shorts(sum, pair_products(w, x));
  if (BITS <= 6) return add_short_pairs(sum, pair_products(w, x));
#endif
  return add_four(sum, w, x);
}

template <int BITS>
static inline Ints end_sum(Ints sum, Ints first) {
#if !defined(SP_VNNI) && !defined(SP_PORTABLE)
  if (BITS <= 4) return add_short_pairs(first, sum);
#endif
  (void)first;
  return sum;
}

// The integers k = 4 S .. 4 S + 3 of a group, or those 16 later for HALF 1.
template <int TYPE, int S, int HALF>
static inline __attribute__((always_inline)) Ints load_integers(const char *weight, const char *high_bits, int64_t stride, Ints table) {
  constexpr Form FORM = form_of(TYPE);
  if constexpr (FORM.in_bytes()) return load_ints(weight + (2 * S + HALF) * stride);
  const Ints both = load_ints(weight + S * stride);
  Ints integers = HALF ? high_halves(both) : low_halves(both);
  if constexpr (FORM.stored_bits == 5) {
    const Ints bits = load_ints(high_bits);
    integers = bits_or(integers, bits_and(HALF ? shift_right<S>(bits) : shift_left<4 - S>(bits), splat_byte(0x10)));
  }
  if constexpr (FORM.stored_bits == 6) {
    constexpr int LEFT = S < 2 ? 4 - 2 * S : 0, RIGHT = S < 2 ? 0 : 2 * S - 4;
    const Ints bits = load_ints(high_bits + HALF * STEP);
    integers = bits_or(integers, bits_and(shift_right<RIGHT>(shift_left<LEFT>(bits)), splat_byte(0x30)));
  }
  if constexpr (FORM.has_table()) integers = look_up(table, integers);
  return integers;
}

// A group of a panel, and of a tile.
struct GroupAt {
  const char *weight, *high_bits, *x;
  const Steps &steps;
  Ints table;
};

// Add the products of the integers that `load_integers` returns for S, in the halves FIRST .. LAST.
template <int TYPE, int ROWS, int S, int FIRST, int LAST>
static inline __attribute__((always_inline)) void add_integers(const GroupAt &group, Ints sums[ROWS][VECS]) {
  constexpr Form FORM = form_of(TYPE);
  constexpr int STEPS = FORM.in_bytes() ? 2 : 1;  // of the panel
  for (int step = STEPS * S; FIRST == 0 && step < STEPS * (S + 1); step++)
    prefetch_step(group.weight + step * group.steps.stride, group.steps.ahead);
  Ints w[2][VECS];
  for (int v = 0; v < VECS; v++) {
    const char *weight = group.weight + v * LANES * 4, *high = group.high_bits + v * LANES * 4;
    if (FIRST == 0) w[0][v] = load_integers<TYPE, S, 0>(weight, high, group.steps.stride, group.table);
    if (LAST == 1) w[1][v] = load_integers<TYPE, S, 1>(weight, high, group.steps.stride, group.table);
  }
  for (int r = 0; r < ROWS; r++)
    for (int half = FIRST; half <= LAST; half++) {
      const Ints four = splat_dword(group.x + 4 * ((4 * half + S) * ROWS + r));
      for (int v = 0; v < VECS; v++) sums[r][v] = add_products<FORM.bits>(sums[r][v], w[half][v], four);
    }
}

template <int TYPE, int ROWS, int FIRST, int LAST>
static inline __attribute__((always_inline)) void add_halves(const GroupAt &group, Ints sums[ROWS][VECS]) {
  add_integers<TYPE, ROWS, 0, FIRST, LAST>(group, sums);
  add_integers<TYPE, ROWS, 1, FIRST, LAST>(group, sums);
  add_integers<TYPE, ROWS, 2, FIRST, LAST>(group, sums);
  add_integers<TYPE, ROWS, 3, FIRST, LAST>(group, sums);
}

// Reads the scales of one group after another.
template <ScaleKind KIND>
struct Scales {
  const char *at;
  int64_t group = 0;
  Ints words[VECS];
  Vec factors[VECS], minimum_factors[VECS];

  explicit Scales(const char *first) : at(first) {}

  // The scales of the next group; and its minima, its negative zeros, or the scales of its second half.
  inline __attribute__((always_inline)) void next(Vec scale[VECS], Vec second[VECS]) {
    if (KIND == SUPER_MINIMUM || KIND == SUPER_SIGNED) {
      if (group % GROUPS_OF_SUPER == 0) begin_super();
    }
    for (int v = 0; v < VECS; v++) next_of(v, scale[v], second[v]);
    group++;
    if (KIND == HALF_SCALE) at += WIDTH * 2;
    if (KIND == HALF_MINIMUM) at += WIDTH * 4;
    if (KIND == HALF_ZERO) at += WIDTH * 3;
    if (KIND == POWER_SCALE) at += WIDTH;
    if (KIND == SUPER_MINIMUM && group % GROUPS_OF_SUPER == 0) at += WIDTH * 16;
    if (KIND == SUPER_SIGNED && group % GROUPS_OF_SUPER == 0) at += WIDTH * 18;
  }

 private:
  inline __attribute__((always_inline)) void begin_super() {
    const char *factor = at + WIDTH * (KIND == SUPER_MINIMUM ? 12 : 16);
    for (int line = 0; line < WIDTH * 18 / LINE; line++) prefetch(at + AHEAD / 4 + line * LINE);
    for (int v = 0; v < VECS; v++) {
      factors[v] = load_f16((const uint16_t *)factor + v * LANES);
      if (KIND == SUPER_MINIMUM) minimum_factors[v] = sub(zero(), load_f16((const uint16_t *)factor + WIDTH + v * LANES));
    }
  }

  inline __attribute__((always_inline)) void next_of(int v, Vec &scale, Vec &second) {
    if (KIND == HALF_SCALE || KIND == HALF_MINIMUM || KIND == HALF_ZERO) {
      const uint16_t *own = (const uint16_t *)at + v * LANES;
      prefetch(at + AHEAD / 8 + v * LANES * 2);
      scale = load_f16(own);
      if (KIND == HALF_MINIMUM) second = load_f16(own + WIDTH);
      if (KIND == HALF_ZERO) second = sub(zero(), to_floats(load_unsigned((const uint8_t *)at + 2 * WIDTH + v * LANES)));
    } else if (KIND == POWER_SCALE) {
      const Ints exponent = load_unsigned((const uint8_t *)at + v * LANES), half = shift_right<1>(exponent), bias = splat_ints(63);
      const Vec first = as_floats(shift_left<23>(add_ints(half, bias)));
      scale = mul(first, as_floats(shift_left<23>(add_ints(sub_ints(exponent, half), bias))));
    } else if (KIND == SUPER_SIGNED) {
      const int8_t *own = (const int8_t *)at + group % GROUPS_OF_SUPER * 2 * WIDTH + v * LANES;
      scale = mul(factors[v], to_floats(load_signed(own))), second = mul(factors[v], to_floats(load_signed(own + WIDTH)));
    } else if (KIND == SUPER_MINIMUM) {
      words[v] = group % 2 ? shift_right<12>(words[v]) : pair_of(v);
      scale = mul(factors[v], to_floats(bits_and(words[v], splat_ints(63))));
      second = mul(minimum_factors[v], to_floats(bits_and(shift_right<6>(words[v]), splat_ints(63))));
    }
  }

  // The scales and minima of a pair of groups, 24 bits.
  inline __attribute__((always_inline)) Ints pair_of(int v) const {
    const char *own = at + v * LANES * 4;
    const int64_t pair = group % GROUPS_OF_SUPER / 2;
    if (pair < 3) return load_ints(own + pair * STEP);
    const Ints low = shift_right<24>(load_ints(own)), middle = bits_and(shift_right<16>(load_ints(own + STEP)), splat_ints(0xff00));
    return bits_or(low, bits_or(middle, bits_and(shift_right<8>(load_ints(own + 2 * STEP)), splat_ints(0xff0000))));
  }
};

// total += scale_x * (scale * (sum + shift * sum of x) + minimum * sum of x), for each row and output; scale NULL = 1, others NULL = 0
template <int ROWS>
static inline __attribute__((always_inline)) void add_scaled(const Ints sums[ROWS][VECS], const float *x_scales, const Vec *scale,
                                                             const int32_t *x_sums, const Vec *shift, const Vec *minimum, Vec total[ROWS][VECS]) {
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) {
      Vec sum = to_floats(sums[r][v]);
      if (shift) sum = fma(as_floats(splat_ints(x_sums[r])), shift[v], sum);
      if (scale) sum = mul(sum, scale[v]);
      if (minimum) sum = fma(as_floats(splat_ints(x_sums[r])), minimum[v], sum);
      total[r][v] = fma(sum, splat(x_scales[r]), total[r][v]);
    }
}

// Add a group's products to the totals. second: its minima, its negative zeros, or the scales of its second half.
template <int TYPE, int ROWS>
static inline __attribute__((always_inline)) void add_group(const GroupAt &group, const Tile &tile, const Vec scale[VECS], const Vec second[VECS],
                                                            Vec total[ROWS][VECS]) {
  constexpr Form FORM = form_of(TYPE);
  const auto each = [&](Ints sums[ROWS][VECS], const int32_t *first, auto work) __attribute__((always_inline)) {
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECS; v++) sums[r][v] = work(sums[r][v], splat_ints(FORM.has_sums() ? 0 : first[r]));
  };
  const auto begin = [](Ints, Ints first) __attribute__((always_inline)) { return begin_sum<FORM.bits>(first); };
  const auto end = [](Ints sum, Ints first) __attribute__((always_inline)) { return end_sum<FORM.bits>(sum, first); };
  Ints sums[ROWS][VECS];
  each(sums, tile.offsets, begin);
  if (FORM.is_halved()) {  // one half after the other: the sums of both would not fit in the registers
    add_halves<TYPE, ROWS, 0, 0>(group, sums);
    each(sums, tile.offsets, end);
    add_scaled<ROWS>(sums, tile.scales, scale, nullptr, nullptr, nullptr, total);
    each(sums, tile.offsets + ROWS, begin);
    add_halves<TYPE, ROWS, 1, 1>(group, sums);
    each(sums, tile.offsets + ROWS, end);
    return add_scaled<ROWS>(sums, tile.scales, second, nullptr, nullptr, nullptr, total);
  }
  add_halves<TYPE, ROWS, 0, 1>(group, sums);
  each(sums, tile.offsets, end);
  add_scaled<ROWS>(sums, tile.scales, FORM.scales == ROW_SCALE ? nullptr : scale, tile.offsets, FORM.has_zero() ? second : nullptr,
                   FORM.has_minimum() ? second : nullptr, total);
}

// sums[ROWS][WIDTH] of one panel and a tile, over k inputs.
template <int TYPE, int ROWS>
static void sum_groups(const char *panel, const Tile &whole, int64_t k, float *sums) {
  constexpr Form FORM = form_of(TYPE);
  const GroupLayout at(TYPE, k);
  const Ints table = FORM.has_table() ? load_table(FORM.table->lifted) : splat_ints(0);
  Vec total[ROWS][VECS];
  clear<ROWS>(total);
  at.prefetch_begin(panel);
  Scales<FORM.scales> scales(panel + at.scales);
  Tile tile = whole;
  const char *high = panel + at.high, *x = (const char *)tile.dwords;
  at.steps.template each_group<FORM.steps()>(panel, [&](const char *weight) __attribute__((always_inline)) {
    const GroupAt group = {weight, high, x, at.steps, table};
    Vec scale[VECS], second[VECS];
    for (int part = 0; part < FORM.high_steps(); part++) prefetch_step(high + part * STEP, AHEAD / 4 * FORM.high_steps());
    scales.next(scale, second);
    add_group<TYPE, ROWS>(group, tile, scale, second, total);
    x += GROUP * ROWS, high += FORM.high_steps() * STEP;
    tile.scales += ROWS, tile.offsets += ROWS * (FORM.is_halved() ? 2 : 1);
  });
  const float *row_scales = (const float *)(panel + at.scales);
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS && FORM.scales == ROW_SCALE; v++) total[r][v] = mul(total[r][v], load(row_scales + v * LANES));
  put_acc<ROWS>(total, sums);
}

template <int TYPE>
static constexpr SumTile SUM_GROUPS[] = {nullptr, sum_groups<TYPE, 1>, sum_groups<TYPE, 2>, sum_groups<TYPE, 3>, sum_groups<TYPE, 4>,
#if defined(SP_AVX512)
                                         sum_groups<TYPE, 5>, sum_groups<TYPE, 6>, sum_groups<TYPE, 7>, sum_groups<TYPE, 8>,
#endif
};

}  // namespace SP_NAMESPACE
