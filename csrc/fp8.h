// Weights in 8 bits, e4m3 (arXiv 2209.05433), with a float32 scale for each SCALED inputs of an output: scale * number.
//
//   panel    steps of four k, in streams like those of other types (linear.h); then the scales, [blocks][WIDTH]
//   step     the bytes of two steps of bfloat16 weights, each in the place of the low byte that it is decoded to (coded.h)
//   block    SCALED of k; the last one may have fewer
//
// Numbers are decoded to steps of bfloat16 and then to float32, exactly. Products of a block are summed in order, multiplied by its scale,
// and added to those of the blocks before. Few rows are multiplied by the decoded numbers at once; else a block is decoded into the
// first-level cache, for all tiles of a work item.
//
// A byte has a sign, 4 bits of exponent and 3 bits of mantissa. From 2^-5 on (exponents of 2 or more), its lower half becomes the upper
// half of the bfloat16's first byte, and its upper half determines the second byte. For the sixteen smaller numbers, among them the
// subnormal ones, the lower half determines both bytes.
#pragma once
#include "coded.h"

namespace SP_NAMESPACE {

constexpr int64_t SCALED = 128, STEP_DEPTH = 4, BLOCK_OF_STEPS = SCALED / STEP_DEPTH;

struct Fp8Layout {
  int64_t blocks;
  Steps steps;
  int64_t scales, bytes;  // offset of the scales; size of the panel

  explicit Fp8Layout(int64_t k)
      : blocks((k + SCALED - 1) / SCALED), steps((k + STEP_DEPTH - 1) / STEP_DEPTH, STEP, STREAMS, sp_group_streams),
        scales(whole_lines(steps.size())), bytes(scales + whole_lines(blocks * WIDTH * 4)) {}

  char *byte_at(char *panel, int64_t i, int64_t k) const {
    return panel + steps.at(k / STEP_DEPTH) + low_place(k % STEP_DEPTH / 2 * STEP_WEIGHTS + 2 * i + k % 2);
  }
  float *scale_at(char *panel, int64_t i, int64_t block) const { return (float *)(panel + scales) + block * WIDTH + i; }
};

// FIRST: the first byte, by the lower half. CHANGE: its difference for small numbers. SMALL: their second byte; index 7 is 1.75 * 2^-7,
// and index 8 is 2^-6. SECOND: the second byte of other numbers, or the sign of small ones, by the upper half.
alignas(16) constexpr uint8_t FP8_FIRST[16] = {0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70,
                                               0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0};
alignas(16) constexpr uint8_t FP8_CHANGE[16] = {0x00, 0x10, 0xa0, 0xf0, 0x40, 0x70, 0x20, 0x10};
alignas(16) constexpr uint8_t FP8_SMALL[16] = {0x00, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c,
                                               0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c};
alignas(16) constexpr uint8_t FP8_SECOND[16] = {0x00, 0x3d, 0x3e, 0x3f, 0x40, 0x41, 0x42, 0x43,
                                                0x80, 0xbd, 0xbe, 0xbf, 0xc0, 0xc1, 0xc2, 0xc3};

static inline float read_fp8(uint8_t stored) {
  const uint32_t size = stored & 0x7f, sign = (uint32_t)(stored & 0x80) << 24;
  return size < 8 ? from_bits(sign | 0x3b000000) * (float)size : from_bits((sign | size << 20) + 0x3c000000);  // 2^-9 times size
}

struct Fp8Tables {
  Ints first = load_table(FP8_FIRST), change = load_table(FP8_CHANGE), small = load_table(FP8_SMALL), second = load_table(FP8_SECOND);
};

// Decode vector p of a step to vectors 2 p and 2 p + 1 of two plain steps.
static inline __attribute__((always_inline)) Pair decode_fp8(const char *vector, const Fp8Tables &tables) {
  const Ints bytes = load_ints(vector), sizes = bits_and(bytes, splat_byte(0x7f));
  const Ints small = add_ints(sizes, splat_byte(0x70));  // from 0x80 on, a byte is not looked up: it gives 0
  const Ints first = bits_xor(look_up(tables.first, sizes), look_up(tables.change, small));
  const Ints second = bits_or(look_up(tables.second, high_halves(bytes)), look_up(tables.small, small));
  return {zip_low(first, second), zip_high(first, second)};
}

// Store two plain steps as float32, [4][WIDTH].
static inline __attribute__((always_inline)) void widen_steps(const Ints plain[2 * VECS], float *wide) {
  for (int v = 0; v < 2 * VECS; v++) {
    float *to = wide + v / VECS * 2 * WIDTH + v % VECS * LANES;
    store(to, low_bf16(plain[v])), store(to + WIDTH, high_bf16(plain[v]));
  }
}

// Decode `some` steps to float32, from step `first` on, a multiple of the streams.
static void decode_block(const char *panel, const Steps &steps, int64_t first, int64_t some, float *wide) {
  const Fp8Tables tables;
  steps.each(panel + steps.at(first), some, [&](int64_t j, const char *step) __attribute__((always_inline)) {
    Ints plain[2 * VECS];
    prefetch_step(step, steps.ahead);
    for (int p = 0; p < VECS; p++) {
      const Pair pair = decode_fp8(step + p * VECTOR, tables);
      plain[2 * p] = pair.first, plain[2 * p + 1] = pair.second;
    }
    widen_steps(plain, wide + STEP_DEPTH * j * WIDTH);
  });
}

// totals[ROWS][WIDTH] += scales[WIDTH] * acc
template <int ROWS>
static inline __attribute__((always_inline)) void add_scaled_block(const Vec acc[ROWS][VECS], const float *scales, float *totals) {
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) {
      float *total = totals + r * WIDTH + v * LANES;
      store(total, fma(acc[r][v], load(scales + v * LANES), load(total)));
    }
}

// Add the products of a block in float32. Inlined, its accumulators would not stay in the registers.
template <int ROWS>
static __attribute__((noinline)) void add_wide(const float *wide, const float *x, int64_t depth, const float *scales, float *totals) {
  Vec acc[ROWS][VECS];
  clear<ROWS>(acc);
  for (int64_t j = 0; j < depth; j++, wide += WIDTH) {
    Vec w[VECS];
    for (int v = 0; v < VECS; v++) w[v] = load(wide + v * LANES);
    add_step<ROWS>(acc, x + j * ROWS, w);
  }
  add_scaled_block<ROWS>(acc, scales, totals);
}

// acc[ROWS][VECS] += x[2][ROWS] w for a plain step.
template <int ROWS>
static inline __attribute__((always_inline)) void add_widened(Ints a, Ints b, Ints c, const float *x, Vec acc[ROWS][VECS]) {
  static_assert(VECS == 3, "a step has three vectors");
  const Vec low[VECS] = {low_bf16(a), low_bf16(b), low_bf16(c)}, high[VECS] = {high_bf16(a), high_bf16(b), high_bf16(c)};
  add_step<ROWS>(acc, x, low), add_step<ROWS>(acc, x + ROWS, high);
}

// Add the products of a whole block for few rows: its numbers stay in the registers. Steps in pairs are faster than single ones or more.
template <int ROWS>
static __attribute__((noinline)) void add_directly(const char *panel, const Steps &steps, int64_t first, const float *x, const float *scales,
                                                   float *totals) {
  const Fp8Tables tables;
  Vec acc[ROWS][VECS];
  clear<ROWS>(acc);
  panel += steps.at(first);
  for (int64_t round = 0; round < BLOCK_OF_STEPS; round += STREAMS, panel += steps.advance) {
    const char *step = panel;
#pragma GCC unroll 2
    for (int s = 0; s < STREAMS; s++, step += steps.stride, x += STEP_DEPTH * ROWS) {
      prefetch_step(step, steps.ahead);
      const Pair one = decode_fp8(step, tables), two = decode_fp8(step + VECTOR, tables);
      add_widened<ROWS>(one.first, one.second, two.first, x, acc);
      const Pair three = decode_fp8(step + 2 * VECTOR, tables);
      add_widened<ROWS>(two.second, three.first, three.second, x + 2 * ROWS, acc);
    }
  }
  add_scaled_block<ROWS>(acc, scales, totals);
}

typedef void AddWide(const float *wide, const float *x, int64_t depth, const float *scales, float *totals);
static constexpr AddWide *ADD_WIDE[] = {nullptr, add_wide<1>, add_wide<2>, add_wide<3>, add_wide<4>,
#if defined(SP_AVX512)
                                        add_wide<5>, add_wide<6>, add_wide<7>, add_wide<8>,
#endif
};
typedef void AddDirectly(const char *panel, const Steps &steps, int64_t first, const float *x, const float *scales, float *totals);
static constexpr AddDirectly *ADD_DIRECTLY[] = {nullptr, add_directly<1>, add_directly<2>, add_directly<3>, add_directly<4>,
#if defined(SP_AVX512)
                                                add_directly<5>, add_directly<6>, add_directly<7>, add_directly<8>,
#endif
};

// sums[rows][WIDTH] of one panel and some rows, over k inputs.
static void sum_fp8(const char *panel, const Rows &rows, int64_t k, float *sums) {
  alignas(64) float wide[SCALED * WIDTH];
  const Fp8Layout at(k);
  const float *scales = (const float *)(panel + at.scales);
  memset(sums, 0, rows.rows * WIDTH * sizeof(float));
  for (int64_t first = 0; first < k; first += SCALED, scales += WIDTH) {
    const int64_t depth = k - first < SCALED ? k - first : SCALED, step = first / STEP_DEPTH;
    if (rows.rows <= MOST_ROWS && fits((int)rows.rows) && depth == SCALED) {
      ADD_DIRECTLY[rows.rows](panel, at.steps, step, (const float *)rows.dwords + first * rows.rows, scales, sums);
      continue;
    }
    decode_block(panel, at.steps, step, (depth + STEP_DEPTH - 1) / STEP_DEPTH, wide);
    each_tile(rows, k, [&](int64_t count, const void *x, int64_t row) {
      ADD_WIDE[count](wide, (const float *)x + first * count, depth, scales, sums + row * WIDTH);
    });
  }
}

// A row of the source is blocks: a float32 scale, then a byte for each weight.
static void pack_fp8(const void *rows, int64_t n, int64_t k, int64_t panel, char *packed) {
  const Fp8Layout at(k);
  const int64_t row_bytes = at.blocks * 4 + k, first = panel * WIDTH, some = n - first < WIDTH ? n - first : WIDTH;
  memset(packed, 0, at.bytes);
  for (int64_t block = 0; block < at.blocks; block++)  // so that the panel's lines stay in the first-level cache
    for (int64_t i = 0; i < some; i++) {
      const char *from = (const char *)rows + (first + i) * row_bytes + block * (SCALED + 4);
      const int64_t begin = block * SCALED, depth = k - begin < SCALED ? k - begin : SCALED;
      memcpy(at.scale_at(packed, i, block), from, 4);
      for (int64_t j = 0; j < depth; j++) *at.byte_at(packed, i, begin + j) = from[4 + j];
    }
}

// Row i of a panel in float32.
static void read_fp8_row(const char *packed, int64_t i, int64_t k, float *out) {
  char *panel = (char *)packed;
  const Fp8Layout at(k);
  for (int64_t j = 0; j < k; j++) out[j] = *at.scale_at(panel, i, j / SCALED) * read_fp8((uint8_t)*at.byte_at(panel, i, j));
}

}  // namespace SP_NAMESPACE
