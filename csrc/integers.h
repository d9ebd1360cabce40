// Linear layers over weights in groups of small integers (groups.h). Each 32 numbers of a row of x are rounded to int8 with a scale of
// their own, so a large number costs only the other 31 precision:
//
//   x = scale_x * v, |v| < 128      y = sum over groups of scale_x * (scale_w * (sum of q v - OFFSET * sum of v) + minimum_w * sum of v)
//
// Products of integers are summed exactly in int32. Groups are added in order, in float32. A zero takes the place of OFFSET. Its product with
// the sum of v is subtracted in float32, exactly too: all are whole numbers below 2^24. So a zero that equals a type's OFFSET gives the bits
// of that type.
//
//   rows     [groups][rows][GROUP] int8
//   scales   [groups][rows] float32: scale_x
//   offsets  [groups][1 or 2 halves][rows], for weights with minima or zeros: float32, sum of v
//                                           for others: int32, -OFFSET * sum of v, to which the products are added
#pragma once
#include "groups.h"
#if defined(SP_AMX)
#include "amx.h"
#endif

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

// Round groups begin .. end - 1 of one of `rows` rows. values, scales, offsets: the row's first ones. order: see SpOp.
static void round_to_int8(int type, const float *x, const int32_t *order, int64_t k, int64_t begin, int64_t end, int8_t *values, float *scales,
                          int32_t *offsets, int64_t rows) {
  const Form form = form_of(type);
  const int64_t halves = form.is_halved() ? 2 : 1;
  for (int64_t g = begin; g < end; g++) {
    float part[GROUP], sums[2];
    scales[g * rows] = round_group(group_of(x, order, k, g, part), values + g * rows * GROUP, sums);
    if (!form.is_halved()) sums[0] += sums[1];
    for (int64_t half = 0; half < halves; half++) {
      int32_t *offset = offsets + (g * halves + half) * rows;
      if (form.has_sums())
        memcpy(offset, &sums[half], 4);
      else
        *offset = -form.offset * (int32_t)sums[half];
    }
  }
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

// Bytes are multiplied by int8, four products in each dword. With VNNI, or ARM's dot products, they are summed in 32 bits at once. Without
// these, sums of pairs have 16 bits: those of fitting(BITS) steps are exact. Integers of 8 bits are then multiplied in two parts of 4 bits.
#if defined(SP_VNNI) || defined(SP_DOT) || defined(SP_PORTABLE)
constexpr bool SHORTS = false;
#else
constexpr bool SHORTS = true;
#endif
constexpr int parts_of_bits(int bits) { return SHORTS && bits == 8 ? 2 : 1; }
constexpr int fitting(int bits) { return SHORTS && bits == 5 ? 4 : SHORTS && bits == 6 ? 2 : 8; }
constexpr int STEPS = GROUP / 4;  // of a group whose integers are bytes

// A constant in the type of an argument.
template <int N>
struct Number {
  static constexpr int value = N;
};

// FIRST .. END - 1, in steps of BY. They are types, because compilers take longer to inline a call within a call within a call.
template <int... NUMBERS>
struct Numbers {};
template <int FIRST, int END, int BY, int... BEFORE>
static constexpr auto numbers() {
  if constexpr (FIRST < END)
    return numbers<FIRST + BY, END, BY, BEFORE..., FIRST>();
  else
    return Numbers<BEFORE...>();
}
template <typename Work, int... NUMBERS>
static inline __attribute__((always_inline)) void call_each([[maybe_unused]] Work work, Numbers<NUMBERS...>) {
  (work(Number<NUMBERS>()), ...);
}

// Call work(Number<i>()) for i = FIRST .. END - 1, in steps of BY.
template <int FIRST, int END, int BY = 1, typename Work>
static inline __attribute__((always_inline)) void unrolled(Work work) {
  call_each(work, decltype(numbers<FIRST, END, BY>())());
}

// sums[ROWS][VECS] += products of steps FIRST .. END - 1. weights(step, part, v): vector v of a part of the weights. x: [ROWS][GROUP].
#if defined(SP_VNNI) || defined(SP_DOT) || defined(SP_PORTABLE)
template <int BITS, int ROWS, int FIRST, int END, typename Weights>
static inline __attribute__((always_inline)) void add_products(Weights weights, const char *x, Ints sums[ROWS][VECS]) {
  unrolled<FIRST, END>([&](auto step) __attribute__((always_inline)) {
    Ints w[VECS];
    for (int v = 0; v < VECS; v++) w[v] = weights(step, Number<0>(), v);
    for (int r = 0; r < ROWS; r++) {
      const Ints four = splat_dword(x + r * GROUP + 4 * step.value);
      for (int v = 0; v < VECS; v++) sums[r][v] = add_four_of<BITS>(sums[r][v], w[v], four);
    }
  });
}
#else
// The same for FIT steps of a part, whose products fit in 16 bits.
template <int FIRST, int FIT, int PART, int ROWS, typename Weights>
static inline __attribute__((always_inline)) void add_fitting(Weights weights, const char *x, Ints sums[ROWS][VECS]) {
  Ints shorts[ROWS][VECS];
  unrolled<0, FIT>([&](auto i) __attribute__((always_inline)) {
    Ints w[VECS];
    for (int v = 0; v < VECS; v++) w[v] = weights(Number<FIRST + decltype(i)::value>(), Number<PART>(), v);
    for (int r = 0; r < ROWS; r++) {
      const Ints four = splat_dword(x + r * GROUP + 4 * (FIRST + i.value));
      for (int v = 0; v < VECS; v++) {
        const Ints products = pair_products(w[v], four);
        shorts[r][v] = i.value ? add_shorts(shorts[r][v], products) : products;
      }
    }
  });
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) sums[r][v] = add_short_pairs<PART ? 16 : 1>(sums[r][v], shorts[r][v]);
}

// The same for two steps, with fewer sums at a time.
template <int FIRST, int ROWS, typename Weights>
static inline __attribute__((always_inline)) void add_two_steps(Weights weights, const char *x, Ints sums[ROWS][VECS]) {
  for (int r = 0; r < ROWS; r++) {
    const Ints one = splat_dword(x + r * GROUP + 4 * FIRST), two = splat_dword(x + r * GROUP + 4 * FIRST + 4);
    for (int v = 0; v < VECS; v++) {
      const Ints first = pair_products(weights(Number<FIRST>(), Number<0>(), v), one);
      const Ints both = add_shorts(first, pair_products(weights(Number<FIRST + 1>(), Number<0>(), v), two));
      sums[r][v] = add_short_pairs<1>(sums[r][v], both);
    }
  }
}

template <int BITS, int ROWS, int FIRST, int END, typename Weights>
static inline __attribute__((always_inline)) void add_products(Weights weights, const char *x, Ints sums[ROWS][VECS]) {
  constexpr int FIT = fitting(BITS) < END - FIRST ? fitting(BITS) : END - FIRST;
  unrolled<0, parts_of_bits(BITS)>([&](auto part) __attribute__((always_inline)) {
    constexpr int PART = decltype(part)::value;
    unrolled<FIRST, END, FIT>([&](auto begin) __attribute__((always_inline)) {
      if (PART) asm volatile("" ::: "memory");  // else gcc keeps the weights of the first part, in too many registers
      if constexpr (FIT == 2)
        add_two_steps<decltype(begin)::value, ROWS>(weights, x, sums);
      else
        add_fitting<decltype(begin)::value, FIT, PART, ROWS>(weights, x, sums);
    });
  });
}
#endif

// A group of a panel.
struct GroupAt {
  const char *weight, *high_bits;
  const Steps &steps;
  Ints table;
};

// Vector v of a part of the integers of step S: see add_products.
template <int TYPE, int S, int PART>
static inline __attribute__((always_inline)) Ints load_step(const GroupAt &group, int v) {
  constexpr Form FORM = form_of(TYPE);
  const int at = v * LANES * 4;
  const Ints w = load_integers<TYPE, S % 4, S / 4>(group.weight + at, group.high_bits + at, group.steps.stride, group.table);
  if constexpr (parts_of_bits(FORM.bits) == 1) return w;
  return PART ? high_halves(w) : low_halves(w);
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

// How the sum of a group is scaled; see Form.
struct Scaling {
  bool offset, scale, zero, minimum, halved;

  constexpr explicit Scaling(const Form &form)
      : offset(!form.has_sums()), scale(form.scales != ROW_SCALE), zero(form.has_zero()), minimum(form.has_minimum()), halved(form.is_halved()) {}
  constexpr int number() const { return offset + 2 * scale + 4 * zero + 8 * minimum + 16 * halved; }
  constexpr explicit Scaling(int number)
      : offset(number & 1), scale(number & 2), zero(number & 4), minimum(number & 8), halved(number & 16) {}
};

// total + scale_x * (scale * (sum + second * sum of x)), or scale_x * (scale * sum + second * sum of x), of one row
template <int SCALING>
static inline __attribute__((always_inline)) Vec add_scaled(Ints integers, const float *x_scale, const int32_t *x_sum, Vec scale, Vec second,
                                                            Vec total) {
  constexpr Scaling HOW(SCALING);
  Vec sum = to_floats(integers);
  if (HOW.zero) sum = fma(as_floats(splat_ints(*x_sum)), second, sum);
  if (HOW.scale) sum = mul(sum, scale);
  if (HOW.minimum) sum = fma(as_floats(splat_ints(*x_sum)), second, sum);
  return fma(sum, splat(*x_scale), total);
}

// The same for each row and output.
template <int SCALING, int ROWS>
static inline __attribute__((always_inline)) void add_scaled_rows(const Ints sums[ROWS][VECS], const float *x_scales, const int32_t *x_sums,
                                                                  const Vec *scale, const Vec *second, Vec total[ROWS][VECS]) {
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) total[r][v] = add_scaled<SCALING>(sums[r][v], x_scales + r, x_sums + r, scale[v], second[v], total[r][v]);
}

// Rows of x in a group: their integers, scales and offsets. The offsets of the halves are `rows` apart.
struct GroupRows {
  const char *x;
  const float *scales;
  const int32_t *offsets;
  int64_t rows;
};

// Add the products of a group to the totals of ROWS rows. second: its minima, its negative zeros, or the scales of its second half.
template <int BITS, int SCALING, int ROWS, typename Weights>
static inline __attribute__((always_inline)) void add_group(Weights weights, const GroupRows &x, const Vec *scale, const Vec *second,
                                                            Vec total[ROWS][VECS]) {
  constexpr Scaling HOW(SCALING);
  Ints sums[ROWS][VECS];
  const auto begin = [&](const int32_t *first) __attribute__((always_inline)) {
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECS; v++) sums[r][v] = splat_ints(HOW.offset ? first[r] : 0);
  };
  begin(x.offsets);
  if constexpr (HOW.halved) {
    add_products<BITS, ROWS, 0, STEPS / 2>(weights, x.x, sums);
    add_scaled_rows<SCALING, ROWS>(sums, x.scales, x.offsets, scale, scale, total);
    begin(x.offsets + x.rows);
    add_products<BITS, ROWS, STEPS / 2, STEPS>(weights, x.x, sums);
    return add_scaled_rows<SCALING, ROWS>(sums, x.scales, x.offsets, second, second, total);
  }
  add_products<BITS, ROWS, 0, STEPS>(weights, x.x, sums);
  add_scaled_rows<SCALING, ROWS>(sums, x.scales, x.offsets, scale, second, total);
}

// The place of a part of a step in a decoded group, [part][step][WIDTH] dwords.
static inline constexpr int decoded_at(int step, int part, int v) { return (part * STEPS + step) * STEP + v * LANES * 4; }

// The same for a group that is decoded at the same time. KEEP: its integers are stored in `bytes` too.
template <int TYPE, int ROWS, bool KEEP>
static inline __attribute__((always_inline)) void add_first(const GroupAt &group, char *bytes, const GroupRows &x, const Vec *scale, const Vec *second,
                                                            Vec total[ROWS][VECS]) {
  constexpr Form FORM = form_of(TYPE);
  add_group<FORM.bits, Scaling(FORM).number(), ROWS>([&](auto step, auto part, int v) __attribute__((always_inline)) {
    constexpr int S = decltype(step)::value, PART = decltype(part)::value;
    const Ints w = load_step<TYPE, S, PART>(group, v);
    if (KEEP) store_ints(bytes + decoded_at(S, PART, v), w);
    return w;
  }, x, scale, second, total);
}

#if defined(SP_PORTABLE)
constexpr int ROWS_AT_ONCE = 1, FEW_ROWS = 1;
#else
constexpr int ROWS_AT_ONCE = REGISTERS == 32 ? 4 : 3;  // their sums and a step of weights fit in the registers
constexpr int FEW_ROWS = 5;                            // these or fewer need no decoded copy, though not all sums fit
#endif
// More of those few are summed in two halves, each of which decodes a group: where one instruction adds a product and registers are few,
// this takes less time than to spill the sums.
constexpr int MOST_SUMMED = !SHORTS && REGISTERS == 16 ? 4 : FEW_ROWS;

// The same for rows `row` .. rows - 1 and a group that is decoded. Not inlined, so that the sums stay in the registers.
template <int BITS, int SCALING>
static __attribute__((noinline)) void add_decoded(const char *bytes, const GroupRows &x, int64_t row, const Vec *scale, const Vec *second,
                                                  float *totals) {
  const auto add = [&](auto count) __attribute__((always_inline)) {
    constexpr int ROWS = decltype(count)::value;
    const GroupRows own = {x.x + row * GROUP, x.scales + row, x.offsets + row, x.rows};
    Vec total[ROWS][VECS];
    get_acc<ROWS>(totals + row * WIDTH, total);
    add_group<BITS, SCALING, ROWS>([&](auto step, auto part, int v) __attribute__((always_inline)) {
      return load_ints(bytes + decoded_at(step.value, part.value, v));
    }, own, scale, second, total);
    put_acc<ROWS>(total, totals + row * WIDTH);
    row += ROWS;
  };
  while (row + ROWS_AT_ONCE <= x.rows) add(Number<ROWS_AT_ONCE>());
  const int64_t left = x.rows - row;
  unrolled<1, ROWS_AT_ONCE>([&](auto count) __attribute__((always_inline)) {
    if (left == count.value) add(count);
  });
}

// Call group(GroupAt, scale, second) for each group of a panel, in order.
template <int TYPE, typename Work>
static inline __attribute__((always_inline)) void each_group_of(const char *panel, const GroupLayout &at, Work work) {
  constexpr Form FORM = form_of(TYPE);
  const Ints table = FORM.has_table() ? load_table(FORM.table->lifted) : splat_ints(0);
  at.prefetch_begin(panel);
  Scales<FORM.scales> scales(panel + at.scales);
  const char *high = panel + at.high;
  at.steps.template each_group<FORM.steps()>(panel, [&](const char *weight) __attribute__((always_inline)) {
    Vec scale[VECS], second[VECS];
    for (int step = 0; step < FORM.steps(); step++) prefetch_step(weight + step * at.steps.stride, at.steps.ahead);
    for (int part = 0; part < FORM.high_steps(); part++) prefetch_step(high + part * STEP, AHEAD / 4 * FORM.high_steps());
    scales.next(scale, second);
    const GroupAt group = {weight, high, at.steps, table};
    work(group, scale, second);
    high += FORM.high_steps() * STEP;
  });
}

// sums[ROWS][WIDTH]: each group is decoded in the registers, once for up to MOST_SUMMED rows.
template <int TYPE, int ROWS>
static void sum_few(const char *panel, const Rows &given, int64_t k, float *sums) {
  Vec total[ROWS][VECS];
  clear<ROWS>(total);
  GroupRows x = {(const char *)given.dwords, given.scales, given.offsets, ROWS};
  each_group_of<TYPE>(panel, GroupLayout(TYPE, k), [&](const GroupAt &group, const Vec *scale, const Vec *second) __attribute__((always_inline)) {
    constexpr int FIRST = ROWS <= MOST_SUMMED ? ROWS : (ROWS + 1) / 2;
    add_first<TYPE, FIRST, false>(group, nullptr, x, scale, second, total);
    if constexpr (FIRST < ROWS) {
      asm volatile("" ::: "memory");  // else gcc keeps the decoded integers, in too many registers
      const GroupRows rest = {x.x + FIRST * GROUP, x.scales + FIRST, x.offsets + FIRST, ROWS};
      add_first<TYPE, ROWS - FIRST, false>(group, nullptr, rest, scale, second, total + FIRST);
    }
    x.x += GROUP * ROWS, x.scales += ROWS, x.offsets += form_of(TYPE).is_halved() ? 2 * ROWS : ROWS;
  });
  put_acc<ROWS>(total, sums);
}

#if defined(SP_AMX)
// More rows: CHUNK groups are decoded at a time, and multiplied by tiles of rows. The product of a tile has a column for each output of a
// vector. Its totals stay in the registers while it runs over the chunk. A product takes longer to compute and to store than to scale, so
// EARLY of them are computed before one is scaled; each of these has a tile and memory of its own.
constexpr int64_t CHUNK = 8;  // groups, in 15 KB: they stay in the first-level cache for all rows
constexpr int EARLY = 3, PRODUCTS = EARLY + 1, FEWEST_SCALED = 4;
constexpr int PRODUCT_TILE = 0, X_TILE = PRODUCTS, W_TILE = X_TILE + 2;  // numbers of tiles; there are two of x and of w

struct Chunk {
  alignas(64) char integers[CHUNK][VECS][STEPS][VECTOR_BYTES];  // less OFFSET, or unsigned if the type has sums
  Vec scale[CHUNK][VECS], second[CHUNK][VECS];
  int64_t groups = 0;

  template <int TYPE>
  inline __attribute__((always_inline)) void add(const GroupAt &group, const Vec *its_scale, const Vec *its_second) {
    constexpr Form FORM = form_of(TYPE);
    unrolled<0, STEPS>([&](auto step) __attribute__((always_inline)) {
      constexpr int S = decltype(step)::value;
      for (int v = 0; v < VECS; v++) {
        const Ints w = load_step<TYPE, S, 0>(group, v);
        store_ints(integers[groups][v][S], FORM.offset ? sub_bytes(w, splat_byte((uint8_t)FORM.offset)) : w);
      }
    });
    constexpr Scaling HOW(FORM);
    for (int v = 0; v < VECS; v++) {
      if (HOW.scale) scale[groups][v] = its_scale[v];
      if (HOW.zero || HOW.minimum || HOW.halved) second[groups][v] = its_second[v];
    }
    groups++;
  }
};

// Of more than TILE_ROWS rows, all tiles have TILE_ROWS: what follows the last row in memory is multiplied too. depth: bytes of a row of x.
static inline void shape_int8_tiles(int64_t rows, int64_t depth) {
  const int64_t some = rows < TILE_ROWS ? rows : TILE_ROWS;
  TileShapes shapes;
  for (int i = 0; i < PRODUCTS; i++) shapes.set(PRODUCT_TILE + i, some, VECTOR_BYTES);
  for (int i = 0; i < 2; i++) shapes.set(X_TILE + i, some, depth), shapes.set(W_TILE + i, depth / 4, VECTOR_BYTES);
  shape_tiles(shapes);
}

// A tile's scales and sums of x in each group, with zeros after the last row.
struct TileScales {
  alignas(64) float scales[CHUNK][TILE_ROWS] = {{0}};
  int32_t sums[CHUNK][TILE_ROWS] = {{0}};

  TileScales(const GroupRows &x, int64_t row, int64_t some, int64_t groups, bool has_sums) {
    for (int64_t g = 0; g < groups; g++) {
      const int64_t first = g * x.rows + row;
      if (some == TILE_ROWS) {  // of a constant size, which the compiler copies by itself
        memcpy(scales[g], x.scales + first, sizeof scales[g]);
        if (has_sums) memcpy(sums[g], x.offsets + first, sizeof sums[g]);
      } else {
        memcpy(scales[g], x.scales + first, some * 4);
        if (has_sums) memcpy(sums[g], x.offsets + first, some * 4);
      }
    }
  }
};

// Add the products of a chunk and `some` rows from row `row` on, of which ROWS are scaled, to their totals.
template <int SCALING, int ROWS>
static __attribute__((noinline)) void add_tile(const Chunk &chunk, const GroupRows &x, int64_t row, int64_t some, float *totals) {
  constexpr Scaling HOW(SCALING);
  constexpr int64_t HALVES = HOW.halved ? 2 : 1, DEPTH = GROUP / HALVES;
  constexpr int WIDER = VECTOR_BYTES / GROUP;  // a row of w or of the product than a row of x
  const int64_t parts = chunk.groups * HALVES, rounds = (parts + PRODUCTS - 1) / PRODUCTS * PRODUCTS;  // a part has a scale of its own
  const int64_t stride = x.rows * GROUP;
  const char *const rows = x.x + row * GROUP;
  const TileScales own(x, row, some, chunk.groups, HOW.zero || HOW.minimum);
  alignas(64) char products[PRODUCTS][TILE_ROWS][VECTOR_BYTES];
  float *at = totals + row * WIDTH;

  const auto multiply = [&](auto which, int64_t part, int64_t v) __attribute__((always_inline)) {
    constexpr int WHICH = decltype(which)::value, PRODUCT = PRODUCT_TILE + WHICH, X = X_TILE + WHICH % 2, W = W_TILE + WHICH % 2;
    if (part >= rounds) part -= rounds, v++;
    if (part >= parts || v >= VECS) return;
    clear_tile<PRODUCT>();
    load_tile<X>(rows + part / HALVES * stride + part % HALVES * DEPTH, GROUP);
    load_tile<W, WIDER>(chunk.integers[part / HALVES][v][part % HALVES * STEPS / 2], GROUP);
    multiply_bytes<HOW.offset, PRODUCT, X, W>();
    store_tile<PRODUCT, WIDER>(products[WHICH], GROUP);
  };

  unrolled<0, EARLY>([&](auto which) __attribute__((always_inline)) { multiply(which, which.value, 0); });
  for (int64_t v = 0; v < VECS; v++, at += LANES) {
    Vec total[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) total[r] = load(at + r * WIDTH);
    for (int64_t begin = 0; begin < rounds; begin += PRODUCTS)
      unrolled<0, PRODUCTS>([&](auto which) __attribute__((always_inline)) {
        const int64_t part = begin + which.value, group = part / HALVES;
        multiply(Number<(decltype(which)::value + EARLY) % PRODUCTS>(), part + EARLY, v);
        if (part >= parts) return;
        const Vec second = chunk.second[group][v], scale = part % HALVES ? second : chunk.scale[group][v];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          const Ints product = load_ints(products[which.value][r]);
          total[r] = add_scaled<SCALING>(product, own.scales[group] + r, own.sums[group] + r, scale, second, total[r]);
        }
      });
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) store(at + r * WIDTH, total[r]);
  }
}

typedef void AddTile(const Chunk &chunk, const GroupRows &x, int64_t row, int64_t some, float *totals);
template <int SCALING, int... ROWS>
static void add_tiles(const Chunk &chunk, const GroupRows &x, float *totals, Numbers<ROWS...>) {
  static constexpr AddTile *ADD[] = {add_tile<SCALING, ROWS>...};
  for (int64_t row = 0; row < x.rows; row += TILE_ROWS) {
    const int64_t some = x.rows - row < TILE_ROWS ? x.rows - row : TILE_ROWS;
    ADD[(some - 1) / FEWEST_SCALED](chunk, x, row, some, totals);
  }
}

template <int TYPE>
static void sum_many(const char *panel, const Rows &given, int64_t k, float *sums) {
  constexpr Form FORM = form_of(TYPE);
  Chunk chunk;
  const int64_t rows = given.rows;
  GroupRows x = {(const char *)given.dwords, given.scales, given.offsets, rows};
  memset(sums, 0, (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * WIDTH * sizeof(float));
  shape_int8_tiles(rows, FORM.is_halved() ? GROUP / 2 : GROUP);
  const auto add_chunk = [&] {
    add_tiles<Scaling(FORM).number()>(chunk, x, sums, decltype(numbers<FEWEST_SCALED, TILE_ROWS + 1, FEWEST_SCALED>())());
    x.x += chunk.groups * rows * GROUP, x.scales += chunk.groups * rows, x.offsets += chunk.groups * (FORM.is_halved() ? 2 * rows : rows);
    chunk.groups = 0;
  };
  each_group_of<TYPE>(panel, GroupLayout(TYPE, k), [&](const GroupAt &group, const Vec *scale, const Vec *second) __attribute__((always_inline)) {
    if (chunk.groups == CHUNK) add_chunk();
    chunk.add<TYPE>(group, scale, second);
  });
  add_chunk();
  release_tiles();
}
#else
// More rows: each group is decoded once, with the first ROWS_AT_ONCE rows.
template <int TYPE>
static void sum_many(const char *panel, const Rows &given, int64_t k, float *sums) {
  constexpr Form FORM = form_of(TYPE);
  constexpr int SCALING = Scaling(FORM).number();
  alignas(64) char bytes[parts_of_bits(FORM.bits) * STEPS * STEP];
  const int64_t rows = given.rows;
  GroupRows x = {(const char *)given.dwords, given.scales, given.offsets, rows};
  memset(sums, 0, rows * WIDTH * sizeof(float));
  each_group_of<TYPE>(panel, GroupLayout(TYPE, k), [&](const GroupAt &group, const Vec *scale, const Vec *second) __attribute__((always_inline)) {
    Vec total[ROWS_AT_ONCE][VECS];
    get_acc<ROWS_AT_ONCE>(sums, total);
    add_first<TYPE, ROWS_AT_ONCE, true>(group, bytes, x, scale, second, total);
    put_acc<ROWS_AT_ONCE>(total, sums);
    add_decoded<FORM.bits, SCALING>(bytes, x, ROWS_AT_ONCE, scale, second, sums);
    x.x += rows * GROUP, x.scales += rows, x.offsets += FORM.is_halved() ? 2 * rows : rows;
  });
}
#endif

// sums[rows][WIDTH] of one panel and some rows, over k inputs.
template <int TYPE>
void sum_groups(const char *panel, const Rows &given, int64_t k, float *sums) {
#if defined(SP_PORTABLE)
  static constexpr SpSum FEW[] = {nullptr, sum_few<TYPE, 1>};
#else
  static constexpr SpSum FEW[] = {nullptr, sum_few<TYPE, 1>, sum_few<TYPE, 2>, sum_few<TYPE, 3>, sum_few<TYPE, 4>, sum_few<TYPE, 5>};
#endif
  (given.rows <= FEW_ROWS ? FEW[given.rows] : sum_many<TYPE>)(panel, given, k, sums);
  if (form_of(TYPE).scales != ROW_SCALE) return;
  const float *scales = (const float *)(panel + GroupLayout(TYPE, k).scales);
  for (int64_t i = 0; i < given.rows * WIDTH; i += LANES) store(sums + i, mul(load(sums + i), load(scales + i % WIDTH)));
}

}  // namespace SP_NAMESPACE
