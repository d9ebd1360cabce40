// Packs the rows of a linear layer into tiles, and runs the layer over them. A stage before the layer converts each row to the type
// that its weights are multiplied by:
//
//   float32, float16, bfloat16,
//   e4m3                         float32; a single row is read in place
//   bfloat16 in pairs            bfloat16, if the processor multiplies pairs of them (linear.h); rows for tiles of AMX (pair_tiles.h)
//   groups of integers           int8, with a scale for each 32 numbers (integers.h); in one piece for all rows of a block
#pragma once
#include "coded.h"
#include "integers.h"

namespace SP_NAMESPACE {

constexpr int64_t PART = 8 * LANES;        // dwords of each row that one work item packs
constexpr int64_t NARROW_PART = 512;       // the same, if rows are converted to int8 or bfloat16
constexpr int64_t SHARE = 16 * MOST_ROWS;  // rows of a block: those that one work item of a layer computes

static inline bool is_bf16(const SpOp &op) { return op.type == SP_BF16 || op.type == SP_BF12; }
static inline bool takes_pairs(const SpOp &op, const SpSums &sums) { return is_bf16(op) && sums.pairs && !(op.flags & SP_ALIKE); }
static inline int64_t scales_of(const SpOp &op) { return is_grouped(op.type) ? groups_of(op.k) : 0; }
static inline int64_t offsets_of(const SpOp &op) { return is_grouped(op.type) ? offsets_of(op.type, op.k) : 0; }

static inline int64_t tiles_of(int64_t rows) { return (rows + MOST_ROWS - 1) / MOST_ROWS; }

struct Tiles {
  SpSums sums;                      // of the running program's set: they say to which types rows are converted
  List<uint32_t> dwords, narrowed;  // tiles; rows in bfloat16 before they are packed
  List<float> scales;               // of rows in int8; see integers.h
  List<int32_t> offsets;

  // several: whether a tile may have several rows.
  void make_room(const SpOp &op, int64_t rows, bool several) {
    if (is_float(op) && !several) return;
    dwords.resize((sums.tile && !is_float(op) ? rows + sums.tile - 1 : rows) * dwords_of(op));
    scales.resize(rows * scales_of(op)), offsets.resize(rows * offsets_of(op));
    if (!is_float(op) && is_bf16(op) && !sums.tile) narrowed.resize(rows * dwords_of(op));
  }

  bool is_float(const SpOp &op) const { return is_bf16(op) ? !takes_pairs(op, sums) : !is_grouped(op.type); }
  bool is_packed(const SpOp &op, int64_t rows) const { return !is_float(op) || rows > 1; }
  bool stays_rows(const SpOp &op) const { return takes_pairs(op, sums) && sums.tile; }

  // The size of a packed row.
  int64_t dwords_of(const SpOp &op) const {
    if (stays_rows(op)) return ((op.k + 1) / 2 + sums.tile - 1) / sums.tile * sums.tile;
    return is_float(op) ? op.k : is_bf16(op) ? (op.k + 1) / 2 : padded_depth(op.k) / 4;
  }

  // A work item packs a part of a tile.
  int64_t part_of(const SpOp &op) const { return is_float(op) ? PART : NARROW_PART; }
  int64_t parts_of(const SpOp &op) const { return (dwords_of(op) + part_of(op) - 1) / part_of(op); }
  int64_t packing_pieces(const SpOp &op, int64_t rows) const { return is_packed(op, rows) ? tiles_of(rows) * parts_of(op) : 0; }
};

static inline int64_t rows_at(int64_t first, int64_t rows, int64_t most = MOST_ROWS) { return rows - first < most ? rows - first : most; }

struct Block {
  int64_t first, rows;
};
// Rows begin .. end - 1 are in blocks of SHARE. The one that contains row `row`:
static inline Block block_of(int64_t row, int64_t begin, int64_t end) {
  const int64_t first = begin + (row - begin) / SHARE * SHARE;
  return {first, rows_at(first, end, SHARE)};
}

// Pack dwords begin .. end - 1 of `count` rows. Two vectors of each row are transposed at once, the first ones into the low halves
// and the second ones into the high halves.
static void pack_rows(const uint32_t *const *rows, int64_t count, int64_t begin, int64_t end, uint32_t *tile) {
  alignas(64) uint32_t transposed[LANES][2][MOST_ROWS];
  const float *from[LANES];
  int64_t i = begin;
  for (; i + 2 * LANES <= end; i += 2 * LANES) {
    for (int r = 0; r < MOST_ROWS; r++) {
      from[r] = (const float *)(rows[r < count ? r : 0] + i);
      from[MOST_ROWS + r] = from[r] + LANES;
    }
    transpose(from, (float *)transposed, LANES);
    for (int j = 0; j < 2 * LANES; j++) {
      const uint32_t *dwords = transposed[j % LANES][j / LANES];
      uint32_t *to = tile + (i + j) * count;
      if (to + MOST_ROWS <= tile + end * count)
        memcpy(to, dwords, MOST_ROWS * 4);  // the next dwords overwrite the excess
      else
        memcpy(to, dwords, count * 4);
    }
  }
  for (; i < end; i++)
    for (int64_t r = 0; r < count; r++) tile[i * count + r] = rows[r][i];
}

static void narrow_row(const SpOp &op, const float *row, int64_t begin, int64_t end, uint16_t *to) {
  for (int64_t i = 2 * begin; i < 2 * end; i++) to[i] = i < op.k ? to_bf16(row[i]) : 0;
}

// Round a part of a row to int8: number r of a block.
static void round_row(const SpOp &op, Tiles &x, const float *row, const Block &block, int64_t r, int64_t begin, int64_t end) {
  int8_t *values = (int8_t *)(x.dwords.items + block.first * x.dwords_of(op)) + r * GROUP;
  float *scales = x.scales.items + block.first * scales_of(op) + r;
  int32_t *offsets = x.offsets.items + block.first * offsets_of(op) + r;
  round_to_int8(op.type, row, op.order, op.k, begin * 4 / GROUP, end * 4 / GROUP, values, scales, offsets, block.rows);
}

// Pack a part of the tile that begins at row `first` of a block. rows: the address of each of its `some` rows.
static void pack_part(const SpOp &op, Tiles &x, const float *const *rows, int64_t first, int64_t some, const Block &block, int64_t part) {
  const int64_t width = x.dwords_of(op), begin = part * x.part_of(op), end = begin + x.part_of(op) < width ? begin + x.part_of(op) : width;
  for (int64_t r = 0; r < some && is_grouped(op.type); r++) round_row(op, x, rows[r], block, first + r - block.first, begin, end);
  if (is_grouped(op.type)) return;
  uint32_t *packed = x.dwords.items + first * width;
  if (x.is_float(op)) return pack_rows((const uint32_t *const *)rows, some, begin, end, packed);
  const bool in_place = some == 1 || x.stays_rows(op);
  uint32_t *narrowed = in_place ? packed : x.narrowed.items + first * width;
  const uint32_t *from[MOST_ROWS];
  for (int64_t r = 0; r < some; r++) {
    from[r] = narrowed + r * width;
    narrow_row(op, rows[r], begin, end, (uint16_t *)(narrowed + r * width));
  }
  if (!in_place) pack_rows(from, some, begin, end, packed);
}

static void pack_piece(const SpOp &op, int64_t rows, Tiles &x, int64_t item) {
  const int64_t first = item / x.parts_of(op) * MOST_ROWS, some = rows_at(first, rows);
  const float *from[MOST_ROWS];
  for (int64_t r = 0; r < some; r++) from[r] = op.in + (first + r) * op.k;
  pack_part(op, x, from, first, some, block_of(first, 0, rows), item % x.parts_of(op));
}

// The packed rows of a block; `row`: its only row, if it is read in place.
static inline Rows rows_of(const SpOp &op, bool packed, const Tiles &x, const Block &block, const float *row) {
  if (!packed) return {1, row, nullptr, nullptr};
  const int64_t first = block.first;
  return {block.rows, x.dwords.items + first * x.dwords_of(op), x.scales.items + first * scales_of(op), x.offsets.items + first * offsets_of(op)};
}

// A work item of a layer is a panel (gate and up for a gated layer) for a block.
static inline int64_t linear_pieces(const SpOp &op, int64_t rows) { return panels_of(op.n) * ((rows + SHARE - 1) / SHARE); }

// Some panels of a layer; list NULL = all.
struct Panels {
  const int64_t *list;
  int64_t count;

  int64_t pieces(const SpOp &op, int64_t rows) const { return list ? linear_pieces(op, rows) / panels_of(op.n) * count : linear_pieces(op, rows); }
  int64_t item(const SpOp &op, int64_t p) const { return list ? p / count * panels_of(op.n) + list[p % count] : p; }
};

// sums[rows][WIDTH] of panel `index` of a layer's weights.
static void sum_panel(const SpOp &op, const SpSums &of, int64_t index, const Rows &rows, float *sums) {
  const char *panel = (const char *)op.weight + index * (op.type == SP_BF12 ? (int64_t)SP_INDEX_BYTES : bytes_of_panel(op.type, op.k));
  if (is_grouped(op.type)) return of.groups[op.type - SP_INT8](panel, rows, op.k, sums);
  if (takes_pairs(op, of)) return of.pairs[op.type == SP_BF12](panel, rows, op.k, sums);
  (of.quick && !(op.flags & SP_ALIKE) ? of.quick : of.floats)[op.type == SP_FP8 ? SP_BF12 + 1 : op.type](panel, rows, op.k, sums);
}

// Multiply a panel (gate and up for a gated layer) by the rows of a block.
static void run_panel(const SpOp &op, const SpSums &of, int64_t panel, const Block &block, const Rows &rows) {
  alignas(64) float sums[SHARE * WIDTH], ups[SHARE * WIDTH];
  const bool gated = op.flags & SP_GATED;
  sum_panel(op, of, gated ? 2 * panel : panel, rows, sums);
  if (gated) {
    sum_panel(op, of, 2 * panel + 1, rows, ups);
    put_gated(op, panel, block.first, block.rows, sums, ups);
  } else if (is_mapped(op)) {
    put_mapped(op, panel, block.first, block.rows, sums);
  } else {
    put_sums(op, panel, block.first, block.rows, sums);
  }
}

static void run_linear(const SpOp &op, int64_t rows, Tiles &x, int64_t item) {
  const Block block = block_of(item / panels_of(op.n) * SHARE, 0, rows);
  run_panel(op, x.sums, item % panels_of(op.n), block, rows_of(op, x.is_packed(op, rows), x, block, op.in));
}

}  // namespace SP_NAMESPACE
