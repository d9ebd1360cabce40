// Linear layers over packed weights: y = x W^T, one summation order per row, always.
//
//   panel p   outputs p * WIDTH .. p * WIDTH + WIDTH - 1, step by step of k:   [k][WIDTH]        float32
//                                                                              [k / 2][WIDTH][2] bfloat16, a pair of k in a dword
//
// The steps of a large panel lie in several streams, and successive ones in successive streams. So memory is read at several places in
// turn: the processor's prefetchers follow each of them, and it gives a quarter more than to a reader of one.
//
//   4 streams of 10 steps   0 4 8 | 1 5 9 | 2 6 . | 3 7 .      . = padding
//
// An output is one accumulator that runs over k in order, whatever the number of rows beside it; rows are only taken
// together so that a weight is loaded once for several.
//
// x is float32 and bfloat16 weights are widened; but where the processor multiplies pairs of bfloat16 (SP_BF16_PAIRS), x is
// rounded to bfloat16 before it meets them (prepared.h), and accumulators take k by pairs: of each, the second goes first.
#pragma once
#include "simd.h"
#include "speculant.h"
#include "team.h"

namespace SP_NAMESPACE {

constexpr int VECS = 2;                 // vectors across a panel
constexpr int WIDTH = VECS * LANES;     // outputs of a panel
constexpr int MOST_ROWS = 12;           // rows taken together: MOST_ROWS * VECS accumulators fit the registers
constexpr int STEP = WIDTH * 4;         // bytes of a step: a dword for each output
constexpr int STREAM_SHIFT = 3;         // eight streams, of a panel of so many bytes:
constexpr int64_t LEAST_STREAMED = 1 << 15;
constexpr int AHEAD = 4096;             // bytes to prefetch ahead, in all streams together

static inline int64_t panels_of(int64_t n) { return (n + WIDTH - 1) / WIDTH; }

// The steps of a panel, and where they lie. A small panel is read from a cache, and one stream is best.
struct Steps {
  int64_t count, bytes;  // of one
  int shift;             // 1 << shift streams
  int64_t length;        // steps of a stream: an odd number, or those read together want the same places in the first cache
  int64_t ahead;         // bytes to prefetch ahead

  Steps(int64_t n, int64_t size, int most_shift = STREAM_SHIFT) : count(n), bytes(size) {
    shift = n * size < LEAST_STREAMED ? 0 : most_shift;
    length = (n + (1 << shift) - 1) >> shift | 1, ahead = AHEAD >> shift;
  }

  int64_t size() const { return (length << shift) * bytes; }
  int64_t at(int64_t j) const { return ((j & ((1 << shift) - 1)) * length + (j >> shift)) * bytes; }

  // Call step(j, where it lies) for the first `some` of them, in order.
  template <typename Step>
  void each(const char *panel, int64_t some, Step step) const {
    const int64_t together = shift ? 1 << shift : some, apart = shift ? length * bytes : bytes;
    for (int64_t first = 0; first < some; first += together, panel += bytes) {
      const int64_t end = first + together < some ? first + together : some;
      const char *from = panel;
      for (int64_t j = first; j < end; j++, from += apart) step(j, from);
    }
  }
};

static inline Steps steps_of(int type, int64_t k) { return Steps(type == SP_F32 ? k : (k + 1) / 2, STEP); }

static inline int64_t panel_bytes(int type, int64_t k) { return steps_of(type, k).size(); }

template <int ROWS>
static inline void add_f32(const char *panel, const float *x, int64_t depth, Vec acc[ROWS][VECS]) {
  const Steps steps = steps_of(SP_F32, depth);
  steps.each(panel, depth, [&](int64_t k, const char *weight) __attribute__((always_inline)) {
    Vec w[VECS];
    for (int v = 0; v < VECS; v++) {
      prefetch(weight + v * LANES * 4 + steps.ahead);
      w[v] = load((const float *)weight + v * LANES);
    }
    for (int r = 0; r < ROWS; r++) {
      Vec a = splat(x[r * depth + k]);
      for (int v = 0; v < VECS; v++) acc[r][v] = fma(a, w[v], acc[r][v]);
    }
  });
}

template <int ROWS>
static inline void add_bf16(const char *panel, const float *x, int64_t depth, Vec acc[ROWS][VECS]) {
  const Steps steps = steps_of(SP_BF16, depth);
  steps.each(panel, depth / 2, [&](int64_t j, const char *weight) __attribute__((always_inline)) {
    Vec low[VECS], high[VECS];
    for (int v = 0; v < VECS; v++) {
      prefetch(weight + v * LANES * 4 + steps.ahead);
      Ints pair = load_ints(weight + v * LANES * 4);
      low[v] = low_bf16(pair), high[v] = high_bf16(pair);
    }
    for (int r = 0; r < ROWS; r++) {
      Vec a = splat(x[r * depth + 2 * j]), b = splat(x[r * depth + 2 * j + 1]);
      for (int v = 0; v < VECS; v++) acc[r][v] = fma(a, low[v], acc[r][v]);
      for (int v = 0; v < VECS; v++) acc[r][v] = fma(b, high[v], acc[r][v]);
    }
  });
  if (depth % 2)
    for (int v = 0; v < VECS; v++) {
      Vec low = low_bf16(load_ints(panel + steps.at(depth / 2) + v * LANES * 4));
      for (int r = 0; r < ROWS; r++) acc[r][v] = fma(splat(x[r * depth + depth - 1]), low, acc[r][v]);
    }
}

template <int ROWS>
static inline void add_any(int type, const char *panel, const float *x, int64_t depth, Vec acc[ROWS][VECS]) {
  if (type == SP_F32)
    add_f32<ROWS>(panel, x, depth, acc);
  else
    add_bf16<ROWS>(panel, x, depth, acc);
}

#if defined(SP_BF16_PAIRS)
constexpr bool ROUNDS = true;  // whether x becomes bfloat16 where the weights are

// Rows of bfloat16 have an even depth: where k is odd, a zero is behind it.
template <int ROWS>
static inline void add_any(int, const char *panel, const uint16_t *x, int64_t depth, Vec acc[ROWS][VECS]) {
  const Steps steps = steps_of(SP_BF16, depth);
  steps.each(panel, depth / 2, [&](int64_t j, const char *weight) __attribute__((always_inline)) {
    Ints w[VECS];
    for (int v = 0; v < VECS; v++) prefetch(weight + v * LANES * 4 + steps.ahead), w[v] = load_ints(weight + v * LANES * 4);
    for (int r = 0; r < ROWS; r++) {
      const Ints pair = splat_dword(x + r * depth + 2 * j);
      for (int v = 0; v < VECS; v++) acc[r][v] = add_pairs(acc[r][v], w[v], pair);
    }
  });
}
#else
constexpr bool ROUNDS = false;
#endif

// sums[ROWS][WIDTH] of one panel, for rows of x [rows, k].
template <int ROWS, typename X>
static void sum_rows(int type, const char *panel, const X *x, int64_t k, float *sums) {
  Vec acc[ROWS][VECS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) acc[r][v] = zero();
  add_any<ROWS>(type, panel, x, k, acc);
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) store(sums + r * WIDTH + v * LANES, acc[r][v]);
}

template <typename X>
using SumRows = void (*)(int, const char *, const X *, int64_t, float *);
template <typename X>
static const SumRows<X> SUM_ROWS[MOST_ROWS + 1] = {nullptr,        sum_rows<1, X>, sum_rows<2, X>,  sum_rows<3, X>,  sum_rows<4, X>,
                                                   sum_rows<5, X>, sum_rows<6, X>, sum_rows<7, X>,  sum_rows<8, X>,  sum_rows<9, X>,
                                                   sum_rows<10, X>, sum_rows<11, X>, sum_rows<12, X>};

template <typename X>
static inline void sum_panel(const SpOp &op, int64_t panel, const X *x, int64_t k, int64_t rows, float *sums) {
  SUM_ROWS<X>[rows](op.type, (const char *)op.weight + panel * panel_bytes(op.type, k), x, k, sums);
}

static inline void put_sums(const SpOp &op, int64_t panel, int64_t row, int64_t rows, const float *sums) {
  int64_t first = panel * WIDTH, count = op.n - first < WIDTH ? op.n - first : WIDTH;
  for (int64_t r = 0; r < rows; r++) {
    float *out = op.out + (row + r) * op.n + first;
    const float *sum = sums + r * WIDTH;
    for (int64_t i = 0; i < count; i++) {
      float y = op.bias ? sum[i] + op.bias[first + i] : sum[i];
      out[i] = op.flags & SP_ADD ? out[i] + y : y;
    }
  }
}

static inline void put_gated(const SpOp &op, int64_t panel, int64_t row, int64_t rows, const float *gates, const float *ups) {
  int64_t first = panel * WIDTH, count = op.n - first < WIDTH ? op.n - first : WIDTH;
  for (int64_t r = 0; r < rows; r++) {
    float gated[WIDTH];
    for (int v = 0; v < VECS; v++) {
      Vec gate = load(gates + r * WIDTH + v * LANES);
      store(gated + v * LANES, mul(divide(gate, add(splat(1.0f), exp(sub(zero(), gate)))), load(ups + r * WIDTH + v * LANES)));
    }
    memcpy(op.out + (row + r) * op.n + first, gated, count * sizeof(float));
  }
}

// One piece of work is a panel (or gate and up of one) for a share of the rows.
static inline int64_t linear_pieces(const SpOp &op, int64_t rows, int64_t together) {
  return panels_of(op.n) * ((rows + 16 * together - 1) / (16 * together));
}

// Sum one piece, `together` rows at a time, by sum(panel, row, rows, sums).
template <typename Sum>
static inline void linear_piece(const SpOp &op, int64_t all_rows, int64_t together, int64_t piece, float *sums, Sum sum) {
  const int64_t panel = piece % panels_of(op.n), begin = piece / panels_of(op.n) * 16 * together;
  const int64_t end = begin + 16 * together < all_rows ? begin + 16 * together : all_rows;
  float *ups = sums + together * WIDTH;
  for (int64_t row = begin; row < end; row += together) {
    const int64_t rows = end - row < together ? end - row : together;
    if (op.flags & SP_SILU) {
      sum(2 * panel, row, rows, sums), sum(2 * panel + 1, row, rows, ups);
      put_gated(op, panel, row, rows, sums, ups);
    } else {
      sum(panel, row, rows, sums);
      put_sums(op, panel, row, rows, sums);
    }
  }
}

// x [T, k]; its k may be padded.
template <typename X>
static void run_linear(const SpOp &op, const X *x, int64_t k, int64_t all, int64_t piece) {
  alignas(64) float sums[2 * MOST_ROWS * WIDTH];
  linear_piece(op, all, MOST_ROWS, piece, sums, [&](int64_t panel, int64_t row, int64_t rows, float *to) {
    sum_panel(op, panel, x + row * k, k, rows, to);
  });
}

static inline float read_bf16(uint16_t stored) {
  uint32_t bits = (uint32_t)stored << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline float read_weight(int source, const void *weight, int64_t i) {
  return source == SP_F32 ? ((const float *)weight)[i] : read_bf16(((const uint16_t *)weight)[i]);
}

// Round to nearest even; a NaN stays one.
static inline uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void pack_panel(int type, int source, const void *weight, int64_t n, int64_t k, int64_t panel, char *packed) {
  const Steps steps = steps_of(type, k);
  memset(packed, 0, steps.size());
  for (int64_t j = 0; j < k; j++) {
    char *to = packed + steps.at(type == SP_F32 ? j : j / 2);
    for (int64_t i = 0; i < WIDTH && panel * WIDTH + i < n; i++) {
      const float value = read_weight(source, weight, (panel * WIDTH + i) * k + j);
      if (type == SP_F32)
        ((float *)to)[i] = value;
      else
        ((uint16_t *)to)[2 * i + j % 2] = to_bf16(value);
    }
  }
}

// A row of the packed table: what pack_panel put there.
static void run_embed(const SpOp &op, const SpPass &pass, int64_t t) {
  const int64_t token = pass.tokens[t], width = op.n;  // the table is [vocabulary, n]: packed with k = n
  const char *panel = (const char *)op.weight + token / WIDTH * panel_bytes(op.type, width);
  const int64_t i = token % WIDTH;
  const Steps steps = steps_of(op.type, width);
  for (int64_t j = 0; j < width; j++)
    op.out[t * width + j] = op.type == SP_F32 ? ((const float *)(panel + steps.at(j)))[i]
                                              : read_weight(SP_BF16, panel + steps.at(j / 2), 2 * i + j % 2);
}

}  // namespace SP_NAMESPACE
