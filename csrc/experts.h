// Layers of experts: each row is multiplied by the matrices of the few experts that its router selects.
//
//   pair    a row and one of its experts: T * used in all. The pairs of an expert are neighbours, in the order of their rows; experts
//           are in the order of their indices. A pair's index in this order is its place
//   tile    up to MOST_ROWS pairs of one expert, packed for its matrices (tiles.h)
//   block   up to SHARE pairs of one expert. A work item multiplies a block by a panel
//
// So a pass reads the matrices of each expert that any row uses once. A pair's result depends on its row and its expert alone.
#pragma once
#include "tiles.h"

namespace SP_NAMESPACE {

constexpr int64_t COMBINED = 512;     // numbers of a row that one work item sums
constexpr int64_t MOST_EXPERTS = 4096;  // of a layer

// Some pairs of an expert: those at places first .. first + count - 1.
struct Pairs {
  int64_t expert, first, count;
};

struct Routing {
  List<int32_t> experts, places;  // [T, used], a row's most probable expert first
  List<float> weights;            // [T, used]
  List<int32_t> rows;             // by place
  List<int64_t> starts;           // by expert: the place of its first pair, while pairs are sorted; then the place after its last one
  List<Pairs> tiles, blocks;

  void make_room(const SpOp &op, int64_t rows_of_pass) {
    const int64_t pairs = rows_of_pass * op.used;
    experts.resize(pairs), places.resize(pairs), weights.resize(pairs), rows.resize(pairs);
    starts.resize(op.n + 1), tiles.resize(pairs), blocks.resize(pairs);
  }
};

static inline float exp_of(float x) { return first_lane(exp(splat(x))); }

// The largest of n sums that is not taken, the first among equals; bias NULL = all 0. It exists, whatever the numbers are.
static inline int64_t largest(const float *x, const float *bias, int64_t n, const uint64_t *taken) {
  int64_t best = -1;
  float most = 0.0f;
  for (int64_t i = 0; i < n; i++) {
    const float own = bias ? x[i] + bias[i] : x[i];
    if (!(taken[i / 64] >> i % 64 & 1) && (best < 0 || own > most)) best = i, most = own;
  }
  return best;
}

// Compute the weights of a row's experts from its scores.
static inline void weigh(const SpOp &op, const float *x, const int32_t *experts, float *weights) {
  const bool plain = op.flags & SP_WEIGHTS, renormalised = op.flags & SP_RENORMALISE;
  const float most = x[experts[0]];
  float sum = plain ? renormalised ? 1e-6f : 1.0f : 0.0f;
  for (int64_t j = 0; j < op.used; j++) weights[j] = plain ? x[experts[j]] : exp_of(x[experts[j]] - most);
  if (renormalised)
    for (int64_t j = 0; j < op.used; j++) sum += weights[j];
  else
    for (int64_t i = 0; !plain && i < op.n; i++) sum += exp_of(x[i] - most);
  for (int64_t j = 0; j < op.used; j++) weights[j] /= sum;
  for (int64_t j = 0; factor_of(op) != 1.0f && j < op.used; j++) weights[j] *= factor_of(op);
}

// Select the experts of row t, and compute their weights.
static void route_row(const SpOp &op, Routing &routing, int64_t t) {
  const float *x = op.in + t * op.n;
  int32_t *experts = routing.experts.items + t * op.used;
  uint64_t taken[MOST_EXPERTS / 64] = {0};
  for (int64_t j = 0; j < op.used; j++) {
    const int64_t expert = largest(x, op.bias, op.n, taken);
    taken[expert / 64] |= (uint64_t)1 << expert % 64, experts[j] = (int32_t)expert;
  }
  weigh(op, x, experts, routing.weights.items + t * op.used);
}

static inline void add_pairs_of(int64_t expert, int64_t first, int64_t end, int64_t most, List<Pairs> &list) {
  for (; first < end; first += most) list.push({expert, first, end - first < most ? end - first : most});
}

// Sort the pairs, and list tiles and blocks. stage.found: the number of tiles, and that of blocks.
static void sort_pairs(const SpOp &op, int64_t rows, Routing &routing, WorkQueue &stage) {
  const int64_t pairs = rows * op.used;
  int64_t *starts = routing.starts.items;
  memset(starts, 0, (op.n + 1) * sizeof(int64_t));
  for (int64_t i = 0; i < pairs; i++) starts[routing.experts[i] + 1]++;
  routing.tiles.size = routing.blocks.size = 0;
  for (int64_t expert = 0; expert < op.n; expert++) {
    starts[expert + 1] += starts[expert];
    add_pairs_of(expert, starts[expert], starts[expert + 1], MOST_ROWS, routing.tiles);
    add_pairs_of(expert, starts[expert], starts[expert + 1], SHARE, routing.blocks);
  }
  for (int64_t i = 0; i < pairs; i++) {
    const int64_t place = starts[routing.experts[i]]++;
    routing.places[i] = (int32_t)place, routing.rows[place] = (int32_t)(i / op.used);
  }
  stage.found[0] = routing.tiles.size, stage.found[1] = routing.blocks.size;
}

static inline const float *row_of(const SpOp &op, const Routing &routing, int64_t place) {
  return op.in + (op.flags & SP_GATHER ? routing.rows.items[place] : place) * op.k;
}

// Pack a part of a tile.
static void pack_pairs(const SpOp &op, Routing &routing, Tiles &x, int64_t item) {
  const Pairs &tile = routing.tiles[item / x.parts_of(op)];
  const Block block = block_of(tile.first, tile.expert ? routing.starts[tile.expert - 1] : 0, routing.starts[tile.expert]);
  if (!x.is_packed(op, block.rows)) return;
  const float *rows[MOST_ROWS];
  for (int64_t r = 0; r < tile.count; r++) rows[r] = row_of(op, routing, tile.first + r);
  pack_part(op, x, rows, tile.first, tile.count, block, item % x.parts_of(op));
}

// Multiply a block by a panel of its expert.
static void run_experts(const SpOp &op, Routing &routing, Tiles &x, int64_t item) {
  const Pairs &pairs = routing.blocks[item / panels_of(op.n)];
  SpOp own = op;
  own.weight = ((const void *const *)op.weight)[pairs.expert];
  if (op.bias) own.bias = op.bias + pairs.expert * (op.flags & SP_GATED ? 2 : 1) * op.n;
  const Block block = {pairs.first, pairs.count};
  const Rows rows = rows_of(op, x.is_packed(op, pairs.count), x, block, row_of(op, routing, block.first));
  run_panel(own, x.sums, item % panels_of(op.n), block, rows);
}

static inline int64_t combined_parts(const SpOp &op) { return (op.n + COMBINED - 1) / COMBINED; }

// The weighted sum of a row's results from number i on; count: LANES, or fewer at the end of a row.
static inline Vec combined(const SpOp &op, const float *weights, const int32_t *places, int64_t i, int64_t count) {
  Vec sum = zero();
  for (int64_t j = 0; j < op.used; j++) {
    const float *x = op.in + places[j] * op.n + i;
    sum = fma(splat(weights[j]), count == LANES ? load(x) : load_part(x, count), sum);
  }
  return sum;
}

// Sum a part of a row's results, the most probable expert's first.
static void run_combine(const SpOp &op, const Routing &routing, int64_t item) {
  const int64_t t = item / combined_parts(op), begin = item % combined_parts(op) * COMBINED;
  const int64_t end = begin + COMBINED < op.n ? begin + COMBINED : op.n;
  const float *weights = routing.weights.items + t * op.used;
  const int32_t *places = routing.places.items + t * op.used;
  float *out = op.out + t * op.n;
  const auto put = [&](int64_t at, int64_t count) {
    Vec sum = combined(op, weights, places, at, count);
    if (factor_of(op) != 1.0f) sum = mul(sum, splat(factor_of(op)));
    if (op.flags & SP_ADD) sum = add(count == LANES ? load(out + at) : load_part(out + at, count), sum);
    count == LANES ? store(out + at, sum) : store_part(out + at, sum, count);
  };
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) put(i, LANES);
  if (i < end) put(i, end - i);
}

}  // namespace SP_NAMESPACE
