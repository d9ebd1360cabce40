// Linear layers over packed weights: y = x W^T. A row is always summed in the same order.
//
//   panel p   outputs p * WIDTH .. p * WIDTH + WIDTH - 1, step by step of k:   [k][WIDTH]        float32
//                                                                              [k / 2][WIDTH][2] bfloat16, a pair of k in a dword
//                                                                              [k / 2][2][WIDTH] float16
//                                                                              groups.h          groups of integers
//   tile      up to MOST_ROWS packed rows of x, in dwords too:                 [k][rows]         float32
//                                                                              [k / 2][rows][2]  pairs of bfloat16
//
// A step of a panel is multiplied by the same step of a tile. An output has one accumulator that runs over k in order, for any number
// of rows in the tile. With tiles a weight is loaded once for several rows. A panel that has to be decoded is decoded in parts, each of
// which is multiplied by all tiles in turn.
//
// The steps of a large panel are stored in several streams, successive steps in successive streams. Memory is then read at several
// addresses in turn, and the hardware prefetchers follow each of them, which gives a quarter more bytes per second than one stream.
//
//   4 streams of 10 steps   0 4 8 | 1 5 9 | 2 6 . | 3 7 .      . = padding
//
// x is float32, and bfloat16 and float16 weights are widened to it. But if the processor multiplies pairs of bfloat16 (SP_BF16_PAIRS), x
// is rounded to bfloat16 for bfloat16 weights (tiles.h), and accumulators take k in pairs, the second of each pair first; tiles of AMX have
// an order of their own (pair_tiles.h). Groups of integers are multiplied by int8 (integers.h).
#pragma once
#include "activations.h"
#include "table.h"
#include "parallel.h"

namespace SP_NAMESPACE {

constexpr int VECS = 3;                          // vectors across a panel
constexpr int WIDTH = VECS * LANES;              // outputs of a panel
constexpr int MOST_ROWS = LANES / 2;             // rows of a tile: its accumulators and a step of the panel fit in the registers
constexpr int STEP = WIDTH * 4;                  // bytes of a step: a dword for each output
constexpr int STREAMS = 8;                       // of a panel of at least LEAST_STREAMED bytes
constexpr int64_t LEAST_STREAMED = 1 << 15;
constexpr int64_t LINE = 64;                     // bytes of a line of the processor's caches
constexpr int AHEAD = 4096;                      // bytes to prefetch ahead, in all streams together

static inline int64_t whole_lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }
static inline int64_t panels_of(int64_t n) { return (n + WIDTH - 1) / WIDTH; }

// The steps of a panel and their layout. A small panel has one stream, because it is read from a processor cache.
struct Steps {
  int64_t count, streams;
  int64_t round;                 // successive steps: one of each stream
  int64_t stride, advance;       // bytes from a step to the next one of its round, and from a round to the next. The stride between
                                 // streams is an odd number of lines, else steps read together share a set of the first-level cache
  int64_t ahead;                 // bytes to prefetch ahead
  int64_t bytes;                 // of a step

  // most: streams of a large panel, and steps of a round. wanted: streams of a large panel instead; 0 = `most`.
  explicit Steps(int64_t n, int64_t step = STEP, int64_t most = STREAMS, int64_t wanted = 0) : count(n), round(most), bytes(step) {
    streams = n * step < LEAST_STREAMED ? 1 : wanted ? wanted : most;
    stride = streams == 1 ? step : (whole_lines((n + most - 1) / most * step) / LINE | 1) * LINE;
    advance = most / streams * step, ahead = AHEAD / streams;
  }

  // The same steps without streams.
  Steps in_order() const {
    Steps steps = *this;
    steps.streams = 1, steps.stride = bytes, steps.advance = round * bytes, steps.ahead = AHEAD;
    return steps;
  }
  int64_t size() const { return streams == 1 ? count * bytes : streams * stride; }
  int64_t at(int64_t j) const { return j / round * advance + j % round * stride; }

  // Clear the bytes of a panel after the last step of each stream.
  void clear_padding(char *panel) const {
    for (int64_t s = 0; streams > 1 && s < streams; s++) {
      const int64_t used = (count - s + streams - 1) / streams * bytes;
      memset(panel + s * stride + used, 0, stride - used);
    }
  }

  // Call step(j, its address) for the first `some` steps, in order.
  template <typename Step>
  inline __attribute__((always_inline)) void each(const char *panel, int64_t some, Step step) const {
    int64_t j = 0;
    for (; j + STREAMS <= some; panel += advance) {
      const char *from = panel;
#pragma GCC unroll 8
      for (int s = 0; s < STREAMS; s++, j++, from += stride) step(j, from);
    }
    for (; j < some; j++, panel += stride) step(j, panel);
  }

  // Call group(address) for each SIZE steps, in order; the address is that of the first one, and the others are `stride` bytes apart.
  template <int SIZE, typename Group>
  inline __attribute__((always_inline)) void each_group(const char *panel, Group group) const {
    static_assert(STREAMS % SIZE == 0, "a group lies within one round of the streams");
    int64_t j = 0;
    for (; j < count; panel += advance)
      for (int s = 0; s < STREAMS && j < count; s += SIZE, j += SIZE) group(panel + s * stride);  // inlined here alone: it is long
  }
};

static inline Steps steps_of(int type, int64_t k) { return Steps(type == SP_F32 ? k : (k + 1) / 2); }

static inline int64_t panel_bytes(int type, int64_t k) { return steps_of(type, k).size(); }

typedef SpRows Rows;

// Call work(rows, x, first) for each tile of some rows: the tile's rows, its dwords, and its first row. width: dwords of a row.
template <typename Work>
static inline void each_tile(const Rows &all, int64_t width, Work work) {
  for (int64_t first = 0; first < all.rows; first += MOST_ROWS)
    work(all.rows - first < MOST_ROWS ? all.rows - first : MOST_ROWS, (const uint32_t *)all.dwords + first * width, first);
}

// sum + a * b. Portable code for processors without an instruction rounds the product first, unless the sums are to have the bits of
// other sets (SP_FUSED).
#if defined(SP_PORTABLE) && defined(__SSE2__) && !defined(SP_FUSED)
static inline Vec add_product(Vec sum, Vec a, Vec b) { return add(sum, mul(a, b)); }
#else
static inline Vec add_product(Vec sum, Vec a, Vec b) { return fma_into(sum, a, b); }
#endif

// acc[rows][VECS] += x[rows] w[VECS]
template <int ROWS>
static inline void add_step(Vec acc[ROWS][VECS], const float *x, const Vec w[VECS]) {
  for (int r = 0; r < ROWS; r++) {
    const Vec a = splat(x[r]);
    for (int v = 0; v < VECS; v++) acc[r][v] = add_product(acc[r][v], a, w[v]);
  }
}

static inline __attribute__((always_inline)) void prefetch_step(const char *weight, int64_t ahead) {
  for (int v = 0; v < VECS; v++) prefetch(weight + v * LANES * 4 + ahead);
}

#if defined(SP_BF16_PAIRS)
constexpr bool ROUNDS = true;  // whether x is rounded to bfloat16 for bfloat16 weights

// An odd k is padded with a zero.
static inline int64_t whole_steps(int64_t depth) { return (depth + 1) / 2; }

// acc[rows][VECS] += x w for step j of a tile and the weights of that step.
template <int ROWS>
static inline __attribute__((always_inline)) void add_pair_step(const Ints w[VECS], const void *x, int64_t j, Vec acc[ROWS][VECS]) {
  for (int r = 0; r < ROWS; r++) {
    const Ints pair = splat_dword((const char *)x + 4 * (j * ROWS + r));
    for (int v = 0; v < VECS; v++) acc[r][v] = add_pairs(acc[r][v], w[v], pair);
  }
}

template <int ROWS>
static inline void add_half_step(const char *, const void *, int64_t, Vec[ROWS][VECS]) {}
#else
constexpr bool ROUNDS = false;

static inline int64_t whole_steps(int64_t depth) { return depth / 2; }

template <int ROWS>
static inline __attribute__((always_inline)) void add_pair_step(const Ints pairs[VECS], const void *x, int64_t j, Vec acc[ROWS][VECS]) {
  Vec w[VECS];
  for (int v = 0; v < VECS; v++) w[v] = low_bf16(pairs[v]);
  add_step<ROWS>(acc, (const float *)x + 2 * j * ROWS, w);
  for (int v = 0; v < VECS; v++) w[v] = high_bf16(pairs[v]);
  add_step<ROWS>(acc, (const float *)x + (2 * j + 1) * ROWS, w);
}

// The last step of an odd k has one element of a pair.
template <int ROWS>
static inline __attribute__((always_inline)) void add_half_step(const char *weight, const void *x, int64_t depth, Vec acc[ROWS][VECS]) {
  if (depth % 2 == 0) return;
  Vec w[VECS];
  for (int v = 0; v < VECS; v++) w[v] = low_bf16(load_ints(weight + v * LANES * 4));
  add_step<ROWS>(acc, (const float *)x + (depth - 1) * ROWS, w);
}
#endif

template <int ROWS>
static inline __attribute__((always_inline)) void add_bf16_step(const char *weight, const void *x, int64_t j, Vec acc[ROWS][VECS]) {
  Ints w[VECS];
  for (int v = 0; v < VECS; v++) w[v] = load_ints(weight + v * LANES * 4);
  add_pair_step<ROWS>(w, x, j, acc);
}

// float16 weights, number k of all outputs. A step has those of an even k, then those of the next one; the last step of an odd depth has one.
template <int ROWS>
static inline __attribute__((always_inline)) void add_f16(const char *weight, const float *x, int64_t k, Vec acc[ROWS][VECS]) {
  Vec w[VECS];
  for (int v = 0; v < VECS; v++) w[v] = load_f16((const uint16_t *)weight + k % 2 * WIDTH + v * LANES);
  add_step<ROWS>(acc, x + k * ROWS, w);
}

// Step j of a panel.
template <int TYPE, int ROWS>
static inline __attribute__((always_inline)) void add_real_step(const char *weight, const void *x, int64_t j, Vec acc[ROWS][VECS]) {
  if (TYPE == SP_BF16) return add_bf16_step<ROWS>(weight, x, j, acc);
  if (TYPE == SP_F16) {
    add_f16<ROWS>(weight, (const float *)x, 2 * j, acc);
    return add_f16<ROWS>(weight, (const float *)x, 2 * j + 1, acc);
  }
  Vec w[VECS];
  for (int v = 0; v < VECS; v++) w[v] = load((const float *)weight + v * LANES);
  add_step<ROWS>(acc, (const float *)x + j * ROWS, w);
}

template <int ROWS>
static inline __attribute__((always_inline)) void clear(Vec acc[ROWS][VECS]) {
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) acc[r][v] = zero();
}

template <int ROWS>
static inline __attribute__((always_inline)) void get_acc(const float *sums, Vec acc[ROWS][VECS]) {
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) acc[r][v] = load(sums + r * WIDTH + v * LANES);
}

template <int ROWS>
static inline __attribute__((always_inline)) void put_acc(const Vec acc[ROWS][VECS], float *sums) {
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) store(sums + r * WIDTH + v * LANES, acc[r][v]);
}

// Some whole steps of a panel, from step `first` at `from` on. rest: the step after them, if it is half a step because
// the depth is odd, else NULL.
struct Part {
  const char *from, *rest;
  const Steps &steps;
  int64_t first, some, depth;
};

// Multiply a part by a tile. sums[ROWS][WIDTH] is set by a panel's first part, and others add to it.
template <int TYPE, int ROWS>
static void add_part(const Part &part, const void *x, float *sums) {
  Vec acc[ROWS][VECS];
  part.first ? get_acc<ROWS>(sums, acc) : clear<ROWS>(acc);
  part.steps.each(part.from, part.some, [&](int64_t j, const char *weight) __attribute__((always_inline)) {
    prefetch_step(weight, part.steps.ahead);
    add_real_step<TYPE, ROWS>(weight, x, part.first + j, acc);
  });
  if (TYPE == SP_BF16 && part.rest) add_half_step<ROWS>(part.rest, x, part.depth, acc);
  if (TYPE == SP_F16 && part.rest) add_f16<ROWS>(part.rest, (const float *)x, part.depth - 1, acc);
  put_acc<ROWS>(acc, sums);
}

typedef void AddPart(const Part &part, const void *x, float *sums);
template <int TYPE>
static constexpr AddPart *ADD_PART[] = {nullptr, add_part<TYPE, 1>, add_part<TYPE, 2>, add_part<TYPE, 3>, add_part<TYPE, 4>,
#if defined(SP_AVX512)
                                        add_part<TYPE, 5>, add_part<TYPE, 6>, add_part<TYPE, 7>, add_part<TYPE, 8>,
#endif
};

// sums[rows][WIDTH] of one panel and some rows, over k inputs. Smaller parts for all tiles in turn take 3% to 9% more time.
template <int TYPE>
static void sum_reals(const char *panel, const Rows &rows, int64_t k, float *sums) {
  const Steps steps = steps_of(TYPE, k);
  const int64_t whole = TYPE == SP_F32 ? k : TYPE == SP_BF16 ? whole_steps(k) : k / 2;
  const Part part = {panel, whole < steps.count ? panel + steps.at(whole) : nullptr, steps, 0, whole, k};
  each_tile(rows, TYPE == SP_BF16 && ROUNDS ? (k + 1) / 2 : k, [&](int64_t count, const void *x, int64_t row) {
    ADD_PART<TYPE>[count](part, x, sums + row * WIDTH);
  });
}

static inline int64_t stride_of(const SpOp &op) { return op.stride ? op.stride : op.n; }

static inline int64_t count_of(const SpOp &op, int64_t panel) {
  return op.n - panel * WIDTH < WIDTH ? op.n - panel * WIDTH : WIDTH;
}

static inline void put_sums(const SpOp &op, int64_t panel, int64_t row, int64_t rows, const float *sums) {
  int64_t first = panel * WIDTH, count = count_of(op, panel);
  for (int64_t r = 0; r < rows; r++) {
    float *out = op.out + (row + r) * stride_of(op) + first;
    const float *sum = sums + r * WIDTH;
    for (int64_t i = 0; i < count; i++) {
      float y = op.bias ? sum[i] + op.bias[first + i] : sum[i];
      out[i] = op.flags & SP_ADD ? out[i] + y : y;
    }
  }
}

// Whether sums are changed by more than a bias before they are put.
static inline bool is_mapped(const SpOp &op) { return op.activation || factor_of(op) != 1.0f || op.softcap != 0.0f; }

// Replace sums[rows][WIDTH] of a panel by the layer's results, to which nothing but the array `out` has to be added.
static inline void map_sums(const SpOp &op, int64_t panel, int64_t rows, float *sums) {
  float biases[WIDTH] = {0};
  if (op.bias) memcpy(biases, op.bias + panel * WIDTH, count_of(op, panel) * sizeof(float));
  for (int64_t r = 0; r < rows; r++)
    for (int v = 0; v < VECS; v++) {
      float *at = sums + r * WIDTH + v * LANES;
      Vec y = load(at);
      if (op.bias) y = add(y, load(biases + v * LANES));
      if (factor_of(op) != 1.0f) y = mul(y, splat(factor_of(op)));
      y = activate(op.activation, y);
      store(at, op.softcap != 0.0f ? soft_cap(op.softcap, y) : y);
    }
}

static inline void put_mapped(const SpOp &op, int64_t panel, int64_t row, int64_t rows, float *sums) {
  map_sums(op, panel, rows, sums);
  SpOp plain = op;
  plain.bias = nullptr;
  put_sums(plain, panel, row, rows, sums);
}

// The result of a gated layer.
static inline Vec gated_of(const SpOp &op, Vec gate, Vec up) {
  if (op.activation == SP_CLAMPED) return clamped(op.factor, op.softcap, gate, up);
  return mul(activate(op.activation, gate), up);
}

static inline void put_gated(const SpOp &op, int64_t panel, int64_t row, int64_t rows, const float *gates, const float *ups) {
  int64_t first = panel * WIDTH, count = count_of(op, panel);
  float biases[2][WIDTH] = {{0}};  // the gate's and up's
  if (op.bias)
    for (int half = 0; half < 2; half++) memcpy(biases[half], op.bias + half * op.n + first, count * sizeof(float));
  for (int64_t r = 0; r < rows; r++) {
    float gated[WIDTH];
    for (int v = 0; v < VECS; v++) {
      Vec gate = load(gates + r * WIDTH + v * LANES), up = load(ups + r * WIDTH + v * LANES);
      if (op.bias) gate = add(gate, load(biases[0] + v * LANES)), up = add(up, load(biases[1] + v * LANES));
      store(gated + v * LANES, gated_of(op, gate, up));
    }
    memcpy(op.out + (row + r) * stride_of(op) + first, gated, count * sizeof(float));
  }
}

static inline float read_bf16(uint16_t stored) {
  uint32_t bits = (uint32_t)stored << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline float read_weight(int source, const void *weight, int64_t i) {
  if (source == SP_F32) return ((const float *)weight)[i];
  const uint16_t stored = ((const uint16_t *)weight)[i];
  return source == SP_F16 ? read_f16(stored) : read_bf16(stored);
}

// Round to nearest even; a NaN stays a NaN.
static inline uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Pack a whole panel of bfloat16 weights of even depth: dwords are moved as they are, LANES rows by LANES steps at once. LANES rows are
// read to their end before the next ones: prefetchers do not follow many more streams.
static void move_panel(const uint16_t *rows, int64_t k, char *packed) {
  alignas(64) float moved[LANES * LANES];
  const Steps steps = steps_of(SP_BF16, k);
  steps.clear_padding(packed);
  for (int64_t i = 0; i < WIDTH; i += LANES)
    for (int64_t j = 0; j < steps.count; j += LANES) {
      const int64_t first = steps.count - j < LANES ? steps.count - LANES : j;  // the last ones overlap
      const float *from[LANES];
      for (int64_t r = 0; r < LANES; r++) from[r] = (const float *)(rows + (i + r) * k) + first;
      transpose(from, moved, LANES);
      for (int64_t s = 0; s < LANES; s++) memcpy(packed + steps.at(first + s) + i * 4, moved + s * LANES, LANES * 4);
    }
}

static void pack_panel(int type, int source, const void *weight, int64_t n, int64_t k, int64_t panel, char *packed) {
  if (type == SP_BF16 && source == SP_BF16 && k % 2 == 0 && k >= 2 * LANES && (panel + 1) * WIDTH <= n && (uintptr_t)weight % 4 == 0)
    return move_panel((const uint16_t *)weight + panel * WIDTH * k, k, packed);
  const Steps steps = steps_of(type, k);
  memset(packed, 0, steps.size());
  for (int64_t j = 0; j < k; j++) {
    char *to = packed + steps.at(type == SP_F32 ? j : j / 2);
    for (int64_t i = 0; i < WIDTH && panel * WIDTH + i < n; i++) {
      const float value = read_weight(source, weight, (panel * WIDTH + i) * k + j);
      if (type == SP_F32)
        ((float *)to)[i] = value;
      else if (type == SP_F16)
        ((uint16_t *)to)[j % 2 * WIDTH + i] = ((const uint16_t *)weight)[(panel * WIDTH + i) * k + j];
      else
        ((uint16_t *)to)[2 * i + j % 2] = to_bf16(value);
    }
  }
}

}  // namespace SP_NAMESPACE
