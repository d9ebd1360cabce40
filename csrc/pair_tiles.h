// Sums over bfloat16 weights by tiles of AMX, for any number of rows of x, which are rounded to bfloat16 (tiles.h).
//
// An output takes k in blocks of 32; zeros complete the last one. Its even k have a chain of fused products from 0 on, and its odd k another
// one. The total of both is added to the output. So it is the instruction's own arithmetic for one row as for many.
//
// A part of a panel is decoded, or copied from its streams, and multiplied by all rows, 16 at a time. A row of a tile is a step of the
// panel, or 16 dwords of a row of x.
#pragma once
#include "amx.h"
#include "coded.h"
#include "integers.h"

namespace SP_NAMESPACE {

static_assert(PART_STEPS % TILE_STEPS == 0 && PART_STEPS % STREAMS == 0, "parts are whole tiles and whole rounds of streams");
constexpr int PAIR_SUMS = 0, PAIR_WEIGHTS = VECS, PAIR_ROWS = 2 * VECS;  // numbers of tiles: a sum and weights for each vector

static inline int64_t whole_tiles(int64_t steps) { return (steps + TILE_STEPS - 1) / TILE_STEPS * TILE_STEPS; }

// Of more than TILE_ROWS rows, all tiles have TILE_ROWS: what follows the last row in memory is multiplied too.
static inline void shape_pair_tiles(int64_t rows) {
  const int64_t some = rows < TILE_ROWS ? rows : TILE_ROWS;
  TileShapes shapes;
  for (int v = 0; v < VECS; v++) shapes.set(PAIR_SUMS + v, some, VECTOR_BYTES), shapes.set(PAIR_WEIGHTS + v, TILE_STEPS, VECTOR_BYTES);
  shapes.set(PAIR_ROWS, some, TILE_STEPS * 4);
  shape_tiles(shapes);
}

// sums[rows][WIDTH] += products of some whole tiles of plain steps and the same dwords of each row. width: dwords of a row. The first part
// of a panel sets the sums.
static void add_pair_tiles(const char *plain, int64_t some, const uint32_t *x, int64_t width, int64_t rows, bool is_first, float *sums) {
  for (int64_t row = 0; row < rows; row += TILE_ROWS, x += TILE_ROWS * width, sums += TILE_ROWS * WIDTH) {
    unrolled<0, VECS>([&](auto v) __attribute__((always_inline)) {
      constexpr int V = decltype(v)::value;
      is_first ? clear_tile<PAIR_SUMS + V>() : load_tile<PAIR_SUMS + V>(sums + V * LANES, WIDTH * 4);
    });
    for (int64_t j = 0; j < some; j += TILE_STEPS) {
      load_tile<PAIR_ROWS>(x + j, width * 4);
      unrolled<0, VECS>([&](auto v) __attribute__((always_inline)) {
        constexpr int V = decltype(v)::value;
        load_tile<PAIR_WEIGHTS + V>(plain + j * STEP + V * VECTOR_BYTES, STEP);
        multiply_pairs<PAIR_SUMS + V, PAIR_ROWS, PAIR_WEIGHTS + V>();
      });
    }
    unrolled<0, VECS>([&](auto v) __attribute__((always_inline)) {
      constexpr int V = decltype(v)::value;
      store_tile<PAIR_SUMS + V>(sums + V * LANES, WIDTH * 4);
    });
  }
}

// decode(first, some, to): store some steps of a panel, from step `first` on, at `to`; it may store more, up to a multiple of TILE_STEPS.
template <typename Decode>
static inline __attribute__((always_inline)) void sum_pair_tiles(const Rows &rows, int64_t k, Decode decode, float *sums) {
  alignas(64) char plain[PART_STEPS * STEP];
  const int64_t count = (k + 1) / 2, width = whole_tiles(count);
  shape_pair_tiles(rows.rows);
  for (int64_t first = 0; first < count; first += PART_STEPS) {
    const int64_t some = count - first < PART_STEPS ? count - first : PART_STEPS, whole = whole_tiles(some);
    decode(first, some, plain);
    memset(plain + some * STEP, 0, (whole - some) * STEP);
    add_pair_tiles(plain, whole, (const uint32_t *)rows.dwords + first, width, rows.rows, !first, sums);
  }
  release_tiles();
}

// sums[rows][WIDTH] of one panel and some rows, over k inputs.
static void sum_bf16_tiles(const char *panel, const Rows &rows, int64_t k, float *sums) {
  const Steps steps = steps_of(SP_BF16, k);
  sum_pair_tiles(rows, k, [&](int64_t first, int64_t some, char *to) __attribute__((always_inline)) {
    steps.each(panel + steps.at(first), some, [&](int64_t j, const char *step) __attribute__((always_inline)) {
      prefetch_step(step, steps.ahead);
      for (int v = 0; v < VECS; v++) store_ints(to + j * STEP + v * VECTOR_BYTES, load_ints(step + v * VECTOR_BYTES));
    });
  }, sums);
}

static void sum_bf12_tiles(const char *entry, const Rows &rows, int64_t k, float *sums) {
  const CodedPanel &coded = *(const CodedPanel *)entry;
  if (!coded.escapes) return sum_bf16_tiles(coded.at(coded.data), rows, k, sums);
  const Ints table = load_table(coded.table);
  const uint32_t *next = coded.first_escape();
  const Steps blocks = blocks_of(k);
  sum_pair_tiles(rows, k, [&](int64_t first, int64_t some, char *to) __attribute__((always_inline)) {
    const int64_t begin = first / BLOCK_STEPS, end = (first + some + BLOCK_STEPS - 1) / BLOCK_STEPS;
    for (int64_t round = begin; round < end; round += BLOCK_STREAMS)
      each_of_round(coded, blocks, round, [&](int64_t b, const char *block) __attribute__((always_inline)) {
        decode_block(block, b, table, next, to + (b - begin) * BLOCK_STEPS * STEP);
      });
  }, sums);
}

}  // namespace SP_NAMESPACE
