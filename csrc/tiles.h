// Packs the rows of a linear layer into tiles, and runs the layer over them. A stage before the layer converts each row to the type
// that its weights are multiplied by:
//
//   float32, float16, bfloat16,
//   e4m3                         float32; a single row is read in place
//   bfloat16 in pairs            bfloat16, if the processor multiplies pairs of them (linear.h)
//   groups of integers           int8, with a scale for each 32 numbers (integers.h)
#pragma once
#include "coded.h"
#include "integers.h"

#if defined(SP_BF16_PAIRS)
#define SP_GROUP_SUMS sp_group_sums_avx512vnni  // the same code: avx512bf16 adds instructions for bfloat16 alone
#endif
extern const SpSum *const SP_GROUP_SUMS[];  // by SpType, from SP_INT8 on

namespace SP_NAMESPACE {

constexpr int64_t PART = 8 * LANES;        // dwords of each row that one work item packs
constexpr int64_t NARROW_PART = 512;       // the same, if rows are converted to int8 or bfloat16
constexpr int64_t SHARE = 16 * MOST_ROWS;  // rows that one work item of a layer computes

static inline const SumTile *sums_of(int type) {
  if (is_grouped(type)) return SP_GROUP_SUMS[type - SP_INT8];
  return type == SP_F32 ? SUM_REALS<SP_F32> : type == SP_F16 ? SUM_REALS<SP_F16> : SUM_REALS<SP_BF16>;
}

static inline bool is_bf16(const SpOp &op) { return op.type == SP_BF16 || op.type == SP_BF12; }
static inline bool is_float(const SpOp &op) {
  return op.type == SP_F32 || op.type == SP_F16 || op.type == SP_FP8 || (is_bf16(op) && !ROUNDS);
}
static inline bool is_packed(const SpOp &op, int64_t rows) { return !is_float(op) || rows > 1; }

// The size of a packed row.
static inline int64_t dwords_of(const SpOp &op) {
  return is_float(op) ? op.k : is_bf16(op) ? (op.k + 1) / 2 : padded_depth(op.k) / 4;
}
static inline int64_t scales_of(const SpOp &op) { return is_grouped(op.type) ? groups_of(op.k) : 0; }
static inline int64_t offsets_of(const SpOp &op) { return is_grouped(op.type) ? offsets_of(op.type, op.k) : 0; }

struct Tiles {
  List<uint32_t> dwords, narrowed;  // tiles; rows in int8 or bfloat16 before they are packed
  List<float> scales;               // of rows in int8; see integers.h
  List<int32_t> offsets;

  // several: whether a tile may have several rows.
  void make_room(const SpOp &op, int64_t rows, bool several) {
    if (is_float(op) && !several) return;
    dwords.resize(rows * dwords_of(op));
    scales.resize(rows * scales_of(op)), offsets.resize(rows * offsets_of(op));
    if (!is_float(op)) narrowed.resize(rows * dwords_of(op));
  }
};

static inline int64_t tiles_of(int64_t rows) { return (rows + MOST_ROWS - 1) / MOST_ROWS; }
static inline int64_t rows_at(int64_t first, int64_t rows) { return rows - first < MOST_ROWS ? rows - first : MOST_ROWS; }

// A work item packs a part of a tile.
static inline int64_t part_of(const SpOp &op) { return is_float(op) ? PART : NARROW_PART; }
static inline int64_t parts_of(const SpOp &op) { return (dwords_of(op) + part_of(op) - 1) / part_of(op); }
static inline int64_t packing_pieces(const SpOp &op, int64_t rows) { return is_packed(op, rows) ? tiles_of(rows) * parts_of(op) : 0; }

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

// Convert dwords begin .. end - 1 of a row: number r of the tile that begins at row `first` and has `some` rows.
static void narrow_row(const SpOp &op, Tiles &x, const float *row, int64_t first, int64_t some, int64_t r, int64_t begin, int64_t end, uint32_t *to) {
  if (is_bf16(op)) {
    uint16_t *rounded = (uint16_t *)to;
    for (int64_t i = 2 * begin; i < 2 * end; i++) rounded[i] = i < op.k ? to_bf16(row[i]) : 0;
  } else {
    float *scales = x.scales.items + first * scales_of(op) + r;
    int32_t *offsets = x.offsets.items + first * offsets_of(op) + r;
    round_to_int8(op.type, row, op.order, op.k, begin * 4 / GROUP, end * 4 / GROUP, (int8_t *)to, scales, offsets, some);
  }
}

// Pack a part of the tile that begins at row `first`. rows: the address of each of its `some` rows.
static void pack_part(const SpOp &op, Tiles &x, const float *const *rows, int64_t first, int64_t some, int64_t part) {
  const int64_t width = dwords_of(op), begin = part * part_of(op), end = begin + part_of(op) < width ? begin + part_of(op) : width;
  uint32_t *tile = x.dwords.items + first * width;
  if (is_float(op)) return pack_rows((const uint32_t *const *)rows, some, begin, end, tile);
  uint32_t *narrowed = some == 1 ? tile : x.narrowed.items + first * width;
  const uint32_t *from[MOST_ROWS];
  for (int64_t r = 0; r < some; r++) {
    from[r] = narrowed + r * width;
    narrow_row(op, x, rows[r], first, some, r, begin, end, narrowed + r * width);
  }
  if (some > 1) pack_rows(from, some, begin, end, tile);
}

static void pack_piece(const SpOp &op, int64_t rows, Tiles &x, int64_t item) {
  const int64_t first = item / parts_of(op) * MOST_ROWS, some = rows_at(first, rows);
  const float *from[MOST_ROWS];
  for (int64_t r = 0; r < some; r++) from[r] = op.in + (first + r) * op.k;
  pack_part(op, x, from, first, some, item % parts_of(op));
}

// The tile that begins at row `first`, packed; `row`: its only row, if it is read in place.
static inline Tile tile_at(const SpOp &op, int64_t rows, Tiles &x, int64_t first, const float *row) {
  if (!is_packed(op, rows)) return {row, nullptr, nullptr, nullptr};
  return {x.dwords.items + first * dwords_of(op), x.scales.items + first * scales_of(op), x.offsets.items + first * offsets_of(op), nullptr};
}

// A work item of a layer is a panel (gate and up for a gated layer) for SHARE rows.
static inline int64_t linear_pieces(const SpOp &op, int64_t rows) { return panels_of(op.n) * ((rows + SHARE - 1) / SHARE); }

struct Panel {
  const char *at;
  const SumTile *sums;
  char *room;            // for its decoded steps, or NULL
  const SumTile *later;  // with a room: sums of the tiles after the first, which read it

  // Sum a tile of rows. Of several tiles, the first decodes a panel for all.
  void sum(Tile tile, int64_t rows, int64_t k, float *out) {
    tile.room = room;
    sums[rows](at, tile, k, out);
    if (room) sums = later;
  }
};

// Panel `index` of a layer's weights, for a work item of some rows.
static Panel panel_at(const SpOp &op, int64_t index, int64_t rows, List<char> &room) {
  const auto room_of = [&](int64_t bytes) {
    if (rows > MOST_ROWS) room.resize(bytes);
    return rows > MOST_ROWS ? room.items : nullptr;
  };
  if (op.type == SP_BF12) {
    const CodedPanel &coded = ((const CodedPanel *)op.weight)[index];
    if (!coded.escapes) return {coded.at(coded.data), SUM_REALS<SP_BF16>, nullptr, nullptr};
    return {(const char *)&coded, SUM_CODED, room_of(decoded_bytes(op.k)), SUM_DECODED};
  }
  const char *at = (const char *)op.weight + index * bytes_of_panel(op.type, op.k);
  if (op.type == SP_FP8) return {at, SUM_FP8<false>, room_of(fp8_room(op.k)), SUM_FP8<true>};
  return {at, sums_of(op.type), nullptr, nullptr};
}

// Multiply a panel (gate and up for a gated layer) by rows begin .. end - 1. tile_of(row, count): the tile of some of these rows.
template <typename TileOf>
static inline void run_panel(const SpOp &op, int64_t panel, int64_t begin, int64_t end, TileOf tile_of) {
  static thread_local List<char> rooms[2];
  alignas(64) float sums[MOST_ROWS * WIDTH], ups[MOST_ROWS * WIDTH];
  const bool gated = op.flags & SP_GATED;
  Panel first = panel_at(op, gated ? 2 * panel : panel, end - begin, rooms[0]);
  Panel up = gated ? panel_at(op, 2 * panel + 1, end - begin, rooms[1]) : first;
  for (int64_t row = begin; row < end; row += MOST_ROWS) {
    const int64_t some = rows_at(row, end);
    const Tile tile = tile_of(row, some);
    first.sum(tile, some, op.k, sums);
    if (gated) {
      up.sum(tile, some, op.k, ups);
      put_gated(op, panel, row, some, sums, ups);
    } else if (is_mapped(op)) {
      put_mapped(op, panel, row, some, sums);
    } else {
      put_sums(op, panel, row, some, sums);
    }
  }
}

static void run_linear(const SpOp &op, int64_t rows, Tiles &x, int64_t item) {
  const int64_t panel = item % panels_of(op.n), begin = item / panels_of(op.n) * SHARE;
  const int64_t end = begin + SHARE < rows ? begin + SHARE : rows;
  run_panel(op, panel, begin, end, [&](int64_t row, int64_t) { return tile_at(op, rows, x, row, op.in); });
}

}  // namespace SP_NAMESPACE
