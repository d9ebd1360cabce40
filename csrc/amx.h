// Tiles of AMX: eight small matrices of a thread, in registers of their own, and the instructions that multiply two of them. A tile has
// up to 16 rows of up to 64 bytes. With SP_MODELS, plain C++ takes the place of the instructions, for tests on processors without them.
//
//   sum[m][n] += products of row m of x and column n of w. A dword of w has four successive numbers of its column, or a pair of bfloat16
//
// Shapes that do not fit one another are an error: an exception of the processor, or the end of the program. The rows of a tile are TIMES *
// `stride` bytes apart in memory, where TIMES is 1, 2, 4 or 8.
#pragma once
#include "simd.h"
#if defined(SP_MODELS)
#include <stdlib.h>
#endif

namespace SP_NAMESPACE {

constexpr int TILE_ROWS = 16;            // the most of a tile
constexpr int TILE_STEPS = 16;           // dwords of a row of x: the most of a tile
constexpr int VECTOR_BYTES = LANES * 4;  // a row of a sum or of w: a dword for each output

// The shapes of tiles, by number. A tile without a shape must not be used.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {0};
  uint16_t bytes[16] = {0};  // of a row
  uint8_t rows[16] = {0};

  void set(int tile, int64_t its_rows, int64_t its_bytes) { rows[tile] = (uint8_t)its_rows, bytes[tile] = (uint16_t)its_bytes; }
};
static_assert(sizeof(TileShapes) == 64, "as the processor reads it");

#if defined(SP_MODELS)
struct TileModel {
  TileShapes shapes;
  alignas(64) uint8_t at[8][TILE_ROWS][64];

  void need(bool fits) const {
    if (!fits) abort();
  }
  // Returns the rows of a sum, if the three tiles fit one another.
  int rows_of(int sum, int x, int w) const {
    need(shapes.palette == 1 && shapes.rows[sum] && shapes.rows[sum] == shapes.rows[x]);
    need(shapes.bytes[sum] == VECTOR_BYTES && shapes.bytes[w] == VECTOR_BYTES && shapes.bytes[x] == 4 * shapes.rows[w]);
    return shapes.rows[sum];
  }
};
static inline TileModel &tile_model() {
  static thread_local TileModel own;
  return own;
}

static inline void shape_tiles(const TileShapes &shapes) {
  tile_model().shapes = shapes;
  memset(tile_model().at, 0, sizeof tile_model().at);
}
static inline void release_tiles() { tile_model().shapes.palette = 0; }
template <int TILE> static inline void clear_tile() { memset(tile_model().at[TILE], 0, sizeof tile_model().at[TILE]); }
template <int TILE, int TIMES = 1> static inline void load_tile(const void *from, int64_t stride) {
  TileModel &own = tile_model();
  own.need(own.shapes.palette == 1 && own.shapes.rows[TILE]);
  clear_tile<TILE>();
  for (int r = 0; r < own.shapes.rows[TILE]; r++) memcpy(own.at[TILE][r], (const char *)from + r * TIMES * stride, own.shapes.bytes[TILE]);
}
template <int TILE, int TIMES = 1> static inline void store_tile(void *to, int64_t stride) {
  TileModel &own = tile_model();
  own.need(own.shapes.palette == 1 && own.shapes.rows[TILE]);
  for (int r = 0; r < own.shapes.rows[TILE]; r++) memcpy((char *)to + r * TIMES * stride, own.at[TILE][r], own.shapes.bytes[TILE]);
}

// x is int8; w is int8 if SIGNED, else uint8. The sums are int32.
template <bool SIGNED, int SUM, int X, int W> static inline void multiply_bytes() {
  TileModel &own = tile_model();
  const int rows = own.rows_of(SUM, X, W);
  for (int m = 0; m < rows; m++) {
    Ints sum = load_ints(own.at[SUM][m]);
    for (int j = 0; j < own.shapes.rows[W]; j++) {
      const Ints x = splat_dword(own.at[X][m] + 4 * j), w = load_ints(own.at[W][j]), half = splat_byte(0x80);
      sum = add_four(sum, SIGNED ? bits_xor(w, half) : w, x);
      if (SIGNED) sum = sub_ints(sum, add_four(splat_ints(0), half, x));  // 128 was added to each number of w
    }
    store_ints(own.at[SUM][m], sum);
  }
}

// The sum of a row and a column: fused products of the first numbers of all pairs, in order, from 0 on; the same of the second ones; and
// the total of both. Not inlined, so that all of it lies between the changes of MXCSR.
static __attribute__((noinline)) void add_pairs_model(TileModel &own, int rows, int sum, int x, int w) {
  for (int m = 0; m < rows; m++) {
    Vec first = zero(), second = zero();
    for (int j = 0; j < own.shapes.rows[w]; j++) {
      const Ints pair = splat_dword(own.at[x][m] + 4 * j), pairs = load_ints(own.at[w][j]);
      first = fma(low_bf16(pair), low_bf16(pairs), first), second = fma(high_bf16(pair), high_bf16(pairs), second);
    }
    float *to = (float *)own.at[sum][m];
    store(to, add(load(to), add(first, second)));
  }
}

// x and w are pairs of bfloat16, and the sums are float32. Each operation is rounded to nearest even; subnormal numbers, also results,
// count as zeros of the same sign.
template <int SUM, int X, int W> static inline void multiply_pairs() {
  TileModel &own = tile_model();
  const int rows = own.rows_of(SUM, X, W);
  const unsigned before = _mm_getcsr();
  _mm_setcsr((before & ~_MM_ROUND_MASK) | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
  add_pairs_model(own, rows, SUM, X, W);
  _mm_setcsr(before);
}
#else
// Intrinsics of GCC 12 let the compiler move stores past loads of tiles, and drop those of all but 8 bytes of a configuration.
static inline void shape_tiles(const TileShapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
static inline void release_tiles() { asm volatile("tilerelease"); }
template <int TILE> static inline void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(TILE)); }
template <int TILE, int TIMES = 1> static inline __attribute__((always_inline)) void load_tile(const void *from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,%c3), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE), "i"(TIMES) : "memory");
}
template <int TILE, int TIMES = 1> static inline __attribute__((always_inline)) void store_tile(void *to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,%c3)" ::"r"(to), "r"(stride), "i"(TILE), "i"(TIMES) : "memory");
}
template <bool SIGNED, int SUM, int X, int W> static inline __attribute__((always_inline)) void multiply_bytes() {
  if constexpr (SIGNED)
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
  else
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
}
template <int SUM, int X, int W> static inline __attribute__((always_inline)) void multiply_pairs() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
}
#endif

}  // namespace SP_NAMESPACE
