// Attention over a KV cache, read through the block table. A query's scores, maximum and sum run over its own keys in order of
// position, in tiles and spans that begin at fixed positions. So its result does not depend on other rows, on the chunks of a
// prompt or on threads.
//
//   keys   | tile 0 | tile 1 | ...          TILE positions: one step of the online softmax (arXiv:1805.02867)
//          |       span 0        | span 1   SPAN positions: a softmax of their own, merged in order
//
// A tree node sees the chain before the tree, its ancestors and itself. The node at a position is the ancestor at that depth.
// With SP_AHEAD, rows of a chain see one another.
#pragma once
#include "rows.h"

namespace SP_NAMESPACE {

constexpr int64_t TILE = 64, SPAN = 512, MOST_DIM = 512, BLOCK_ROWS = 8;
constexpr int64_t MOST_PARTIAL = 1 << 24;  // floats of the softmaxes of spans, 64 MiB, which a thread keeps for its next pass
constexpr int TILE_VECS = TILE / LANES;

// Successive rows of one sequence, chain rows and tree nodes alike, that are computed together.
struct RowBlock {
  const SpSegment *segment;
  int64_t first, rows;  // within the segment
};

// A tree node. `before` skips a tile, so that finding an ancestor takes one step per tile and not one per node.
struct Node {
  int64_t position;
  int64_t before;  // the nearest ancestor in an earlier tile; -1 = none
};

struct Plan {
  List<RowBlock> blocks;
  List<Node> nodes;     // of all trees, indexed like pass.parents
  float *partial;       // the softmaxes of single spans: [rows, heads, most_spans, padded + 2]
  int64_t most_spans = 0, threads = 1;
  bool split = false;  // whether spans are computed in parallel and merged afterwards
};

// The dimensions of a head, rounded up to whole vectors.
static inline int64_t padded_of(const SpOp &op) { return (op.dim + LANES - 1) / LANES * LANES; }

static inline int64_t chain_of(const SpSegment &segment) { return segment.tree < 0 ? segment.rows : segment.chain; }

// Fill in a tree's nodes, which come parents first. Returns the position after the deepest one.
static int64_t plan_nodes(const SpPass &pass, const SpSegment &segment, Plan &plan) {
  const int64_t count = segment.done + segment.rows - segment.chain, tree_start = segment.start + segment.chain;
  const int64_t *parents = pass.parents + segment.tree;
  if (plan.nodes.size < segment.tree + count) plan.nodes.resize(segment.tree + count);
  Node *nodes = plan.nodes.items + segment.tree;
  int64_t end = tree_start;
  for (int64_t n = 0; n < count; n++) {
    const int64_t parent = parents[n], position = parent < 0 ? tree_start : nodes[parent].position + 1;
    nodes[n] = {position, parent < 0 || position % TILE == 0 ? parent : nodes[parent].before};
    if (position >= end) end = position + 1;
  }
  return end;
}

// The plan serves all layers. most: the largest number of floats that a row's softmaxes of one span take in a layer. partial: memory for
// the softmaxes of spans. Without room for all of them, spans are computed one after the other.
static void plan_attention(int64_t most, const SpPass &pass, int threads, Plan &plan, List<float> &partial) {
  plan.blocks.size = plan.nodes.size = 0;
  int64_t longest = 0;
  for (int64_t s = 0; s < pass.num_segments; s++) {
    const SpSegment &segment = pass.segments[s];
    for (int64_t r = 0; r < segment.rows; r += BLOCK_ROWS)
      plan.blocks.push({&segment, r, segment.rows - r < BLOCK_ROWS ? segment.rows - r : BLOCK_ROWS});
    const int64_t end = segment.tree < 0 ? segment.start + segment.rows : plan_nodes(pass, segment, plan);
    if (end > longest) longest = end;
  }
  plan.most_spans = (longest + SPAN - 1) / SPAN;
  plan.threads = threads;
  const int64_t room = pass.rows * most * plan.most_spans;
  plan.split = plan.most_spans > 1 && plan.blocks.size < 4 * threads && room <= MOST_PARTIAL;
  if (plan.split) partial.renew(room);
  plan.partial = partial.items;
}

// The online softmax of one query over the keys so far.
struct Softmax {
  float *values, *maximum, *sum;  // values [padded] are not divided by the sum yet
};

static inline Softmax softmax_at(float *memory, int64_t padded) { return {memory, memory + padded, memory + padded + 1}; }

static inline void clear_softmax(Softmax softmax, int64_t padded) {
  for (int64_t i = 0; i < padded; i++) softmax.values[i] = 0.0f;
  *softmax.maximum = -INFINITY, *softmax.sum = 0.0f;
}

static inline float exp_one(float x) { return x == -INFINITY ? 0.0f : (float)first_lane(exp(splat(x))); }

static inline void scale_values(float *values, float factor, int64_t padded) {
  for (int64_t i = 0; i < padded; i += LANES) store(values + i, mul(load(values + i), splat(factor)));
}

// Merge the softmax of a span into that of the keys before it.
static inline void merge(Softmax all, Softmax span, int64_t padded) {
  const float maximum = *all.maximum > *span.maximum ? *all.maximum : *span.maximum;
  const float before = exp_one(*all.maximum - maximum), factor = exp_one(*span.maximum - maximum);
  for (int64_t i = 0; i < padded; i += LANES)
    store(all.values + i, fma(load(span.values + i), splat(factor), mul(load(all.values + i), splat(before))));
  *all.sum = *span.sum * factor + *all.sum * before;
  *all.maximum = maximum;
}

// The positions that each row of a block sees, and the tree nodes at them.
struct Keys {
  const SpOp &op;
  const SpPass &pass;
  const SpSegment &segment;
  const Node *nodes;
  const int64_t *parents;                                // of the nodes
  int64_t first_row, first_node;                         // the block's first row: in the pass; as a node, or negative in the chain
  int64_t tree_start;                                    // nodes are at this position and after it
  int64_t rows, begin[BLOCK_ROWS], end[BLOCK_ROWS];      // row r sees positions begin[r] .. end[r] - 1
  int64_t first_position = INT64_MAX, end_position = 0;  // of all rows

  Keys(const SpOp &o, const SpPass &p, const Plan &plan, const RowBlock &block)
      : op(o), pass(p), segment(*block.segment), nodes(segment.tree < 0 ? nullptr : plan.nodes.items + segment.tree),
        parents(segment.tree < 0 ? nullptr : p.parents + segment.tree), first_row(segment.first + block.first),
        first_node(segment.done + block.first - chain_of(segment)), tree_start(segment.start + chain_of(segment)), rows(block.rows) {
    for (int64_t r = 0; r < rows; r++) {
      const int64_t position = first_node + r < 0 ? segment.start + block.first + r : nodes[first_node + r].position;
      const int64_t after = (op.flags & SP_FIXED ? segment.start : position) + 1;  // of the row that has the window
      end[r] = op.flags & SP_AHEAD ? segment.start + segment.rows : position + 1;
      begin[r] = op.window && after > op.window ? after - op.window : 0;
      if (begin[r] < first_position) first_position = begin[r];
      if (end[r] > end_position) end_position = end[r];
    }
  }

  // The node at `position` >= tree_start on the path to row r.
  int64_t node_at(int64_t r, int64_t position) const {
    int64_t node = first_node + r;
    while (nodes[node].position / TILE > position / TILE) node = nodes[node].before;
    while (nodes[node].position > position) node = parents[node];
    return node;
  }

  // The rows that see keys of the tile at `from`; a bit for each.
  uint32_t rows_at(int64_t from) const {
    uint32_t found = 0;
    for (int64_t r = 0; r < rows; r++) found |= (uint32_t)(begin[r] < from + TILE && from < end[r]) << r;
    return found;
  }

  // The first position of the tile at `from` that some of the rows see.
  int64_t first_seen(uint32_t some, int64_t from) const {
    int64_t first = INT64_MAX;
    for (int64_t r = 0; r < rows; r++)
      if ((some >> r & 1) && begin[r] < first) first = begin[r];
    return first > from ? first : from;
  }

  // Whether row `other` also sees all keys of the tile at `from` that row r sees. Comparing the last one is enough, because a node
  // has only one path to the root.
  bool shares(int64_t r, int64_t other, int64_t from) const {
    const int64_t last = (end[r] < from + TILE ? end[r] : from + TILE) - 1;
    return last < end[other] && (last < tree_start || node_at(r, last) == node_at(other, last));
  }
};

// The cache slots of a tile for some rows of a block: addresses of the first head's keys and values.
struct TileSlots {
  static constexpr int64_t RUNS = 2;  // of keys, and as many of values
  const char *keys[TILE], *values[TILE];
  const char *prefetch_order[2 * TILE + 2];  // keys and values of all runs interleaved; then NULL
  int64_t from = 0, count = 0;               // first position; number of positions
  uint32_t rows = 0;                         // a bit for each
};

static inline void order_slots(TileSlots &slots) {
  constexpr int64_t RUNS = TileSlots::RUNS;
  int64_t all = 0;
  for (int64_t i = 0; i < TILE; i++) {
    const int64_t at = i % RUNS * (TILE / RUNS) + i / RUNS;
    if (at < slots.count) slots.prefetch_order[all++] = slots.keys[at], slots.prefetch_order[all++] = slots.values[at];
  }
  if (!all) slots.prefetch_order[all++] = (const char *)&slots;  // any address that may be read
  slots.prefetch_order[all] = nullptr;
}

// Find the slots of the tile at `from` along the path to row r, for slots.rows. The block table is read for positions alone that one of
// them sees: blocks before a window may have other contents.
static inline void find_slots(const Keys &keys, int64_t r, int64_t from, TileSlots &slots) {
  const char *key = (const char *)keys.pass.keys[keys.op.layer], *value = (const char *)keys.pass.values[keys.op.layer];
  const int64_t size = keys.pass.block, stride = keys.op.kv_heads * cached_bytes(keys.op);
  const int64_t *table = keys.segment.table + keys.op.group * keys.segment.blocks, tree_start = keys.tree_start;
  const auto put = [&](int64_t i, int64_t slot) { slots.keys[i] = key + slot * stride, slots.values[i] = value + slot * stride; };
  slots.from = from, slots.count = keys.end[r] - from < TILE ? keys.end[r] - from : TILE;
  const int64_t first = keys.first_seen(slots.rows, from);
  int64_t i = first - from, block = first / size, offset = first % size;
  for (; i < slots.count && from + i < tree_start; i++) {
    put(i, table[block] * size + offset);
    if (++offset == size) offset = 0, block++;
  }
  if (i < slots.count) {
    int64_t node = keys.node_at(r, from + slots.count - 1);
    for (int64_t j = slots.count - 1; j >= i; j--, node = keys.parents[node])
      put(j, table[(tree_start + node) / size] * size + (tree_start + node) % size);
  }
  for (i = 0; i < first - from; i++) slots.keys[i] = slots.keys[first - from], slots.values[i] = slots.values[first - from];
}

// Visits the tiles of a span in order. A tile is visited once for all rows of the block that see the same keys in it: all rows
// before the tree, the rows of one path in the tree.
struct TileWalk {
  const Keys &keys;
  int64_t from, end;     // first position of the tile; end of the span
  uint32_t pending = 0;  // rows that still need this tile

  TileWalk(const Keys &k, int64_t span) : keys(k) {
    const int64_t begin = k.first_position > span * SPAN ? k.first_position : span * SPAN;
    from = begin / TILE * TILE - TILE;
    end = (span + 1) * SPAN < k.end_position ? (span + 1) * SPAN : k.end_position;
  }

  // Find the slots of the next visit, in prefetch order too. Returns false, with no slots, after the last one. Parents come before
  // children, so the last pending row is the end of a path.
  bool next(TileSlots &slots) {
    slots.count = 0, slots.rows = 0;
    while (!pending && (from += TILE) < end) pending = keys.rows_at(from);
    if (pending) {
      const int64_t last = 31 - __builtin_clz(pending);
      for (int64_t r = 0; r <= last; r++)
        if ((pending >> r & 1) && keys.shares(r, last, from)) slots.rows |= 1u << r;
      pending &= ~slots.rows;
      find_slots(keys, last, from, slots);
    }
    order_slots(slots);
    return slots.rows != 0;
  }
};

// Prefetches the slots of the next tile a cache line at a time, while this tile is computed. The hardware prefetchers do not follow
// one head's slots, which are too far apart, and many prefetches at once would queue. After the last slot it repeats that slot.
struct Prefetcher {
  const char *line, *stop, *const *next;
  int64_t begin, bytes;  // within a slot

  Prefetcher(const TileSlots &slots, int64_t from, int64_t to) : next(slots.prefetch_order), begin(from), bytes(to - from) {
    next_slot();
  }

  void next_slot() {
    line = *next + begin, stop = line + bytes;
    if (next[1]) next++;
  }

  void prefetch_next() {
    prefetch(line), prefetch(line + 64);
    if ((line += 128) >= stop) next_slot();
  }
};

// Memory of a thread for one work item. It is not on the stack, which may be small, because it grows with a model's shape.
struct AttentionRoom {
  List<float> tile, softmaxes;

  static AttentionRoom &own() {
    static thread_local AttentionRoom room;
    return room;
  }

  // Return memory for this many softmaxes.
  float *take_softmaxes(int64_t count, int64_t padded) {
    softmaxes.renew(count * (padded + 2));
    return softmaxes.items;
  }
};

// The keys of a tile, transposed so that a vector holds the same dimension of several positions, and its values.
struct KeyTile {
  float *transposed;  // [dim][TILE] float32, or [dim / 2][TILE] pairs of bfloat16
  float *copied;      // [TILE][padded] keys, then values, if they cannot be read in place
  const char *copies[TILE];
  const char *const *values;
  int64_t offset;      // of a head's values in a slot, in bytes
  bool pairs, narrow;  // whether keys are pairs of bfloat16; whether values are
  alignas(64) float key_factors[TILE], value_scales[TILE];  // of scores; of SP_INT8

  KeyTile(List<float> &room, int64_t padded) {
    room.renew(2 * TILE * padded);
    transposed = room.items, copied = room.items + TILE * padded;
  }
};

alignas(64) static const float ZEROS[MOST_DIM] = {};

// Transpose `words` dwords of each key; rows are whole vectors.
static inline void transpose_keys(const float *const *rows, int64_t words, Prefetcher &prefetcher, float *to) {
  const float *at[LANES];
  for (int64_t d = 0; d < words; d += LANES) {
    for (int j = 0; j < LANES; j++) at[j] = rows[j] + d;
    for (int i = 0; i < 4; i++) prefetcher.prefetch_next();
    transpose(at, to + d * TILE, TILE);
  }
}

static inline void load_row(const SpOp &op, const char *row, int64_t padded, float *to) {
  int64_t i = 0;
  if (op.type == SP_INT8)
    for (; i + LANES <= op.dim; i += LANES) store(to + i, to_floats(load_signed((const int8_t *)row + i)));
  else if (op.type == SP_F32)
    for (; i + LANES <= op.dim; i += LANES) store(to + i, load((const float *)row + i));
  else
    for (; i + LANES <= op.dim; i += LANES) store(to + i, load_bf16((const uint16_t *)row + i));
  for (; i < op.dim; i++) to[i] = op.type == SP_INT8 ? (float)((const int8_t *)row)[i] : read_weight(op.type, row, i);
  for (; i < padded; i++) to[i] = 0.0f;
}

// The scales of a tile's keys or values times `factor`; those of positions without a slot are `factor`.
static inline void load_scales(const SpOp &op, const char *const *slots, int64_t count, int64_t head, float factor, float *scales) {
  const int64_t offset = head * cached_bytes(op) + op.dim;
  for (int64_t i = 0; i < TILE; i++) {
    float scale = 1.0f;
    if (op.type == SP_INT8 && i < count) memcpy(&scale, slots[i] + offset, sizeof scale);
    scales[i] = factor * scale;
  }
}

static void load_keys(const SpOp &op, const TileSlots &from, int64_t head, int64_t padded, Prefetcher &prefetcher, KeyTile &tile) {
  const int64_t offset = head * cached_bytes(op), words = op.type == SP_F32 ? op.dim : op.dim / 2;
  const bool whole = op.type != SP_INT8 && (op.type == SP_F32 || op.dim % 2 == 0) && words % LANES == 0;  // else rows need padding
  tile.pairs = whole && op.type != SP_F32;
  load_scales(op, from.keys, from.count, head, op.factor, tile.key_factors);
  for (int64_t i = 0; i < from.count; i += LANES) {
    const float *rows[LANES];
    const int64_t some = from.count - i < LANES ? from.count - i : LANES;
    for (int64_t j = 0; j < some; j++) {
      rows[j] = whole ? (const float *)(from.keys[i + j] + offset) : tile.copied + j * padded;
      if (!whole) load_row(op, from.keys[i + j] + offset, padded, tile.copied + j * padded);
    }
    for (int64_t j = some; j < LANES; j++) rows[j] = ZEROS;
    transpose_keys(rows, whole ? words : padded, prefetcher, tile.transposed + i);
  }
}

// Values that are whole vectors are read in place, unless they are widened first (tile.narrow).
static void load_values(const SpOp &op, const TileSlots &from, int64_t head, int64_t padded, KeyTile &tile) {
  const int64_t offset = head * cached_bytes(op);
  if (op.type == SP_INT8) load_scales(op, from.values, from.count, head, 1.0f, tile.value_scales);
  if (tile.narrow || (op.type == SP_F32 && op.dim % LANES == 0)) {
    tile.values = from.values, tile.offset = offset;
    return;
  }
  for (int64_t i = 0; i < from.count; i++) {
    tile.copies[i] = (const char *)(tile.copied + i * padded);
    load_row(op, from.values[i] + offset, padded, tile.copied + i * padded);
  }
  tile.values = tile.copies, tile.offset = 0;
}

// Scores of COUNT queries of a group: a vector of keys is loaded once for all of them. The loops over queries are unrolled by
// pragma because GCC otherwise unrolls them too late to keep the sums in registers.
template <int COUNT, bool PAIRS>
static inline void score_tile(const float *queries, const float *transposed, int64_t dim, const float *factors,
                              Prefetcher &shared, float *scores) {
  Prefetcher prefetcher = shared;  // in registers
  Vec sums[COUNT][TILE_VECS];
  for (int q = 0; q < COUNT; q++)
    for (int v = 0; v < TILE_VECS; v++) sums[q][v] = zero();
  for (int64_t d = 0; d < dim; d += PAIRS ? 2 : 1, queries += PAIRS ? 2 : 1, transposed += TILE) {
    prefetcher.prefetch_next();
    if (!PAIRS) prefetcher.prefetch_next();
    for (int half = 0; half < (PAIRS ? 2 : 1); half++) {
      Vec keys[TILE_VECS];
      for (int v = 0; v < TILE_VECS; v++) {
        const float *at = transposed + v * LANES;
        keys[v] = !PAIRS ? load(at) : half ? high_bf16(load_ints(at)) : low_bf16(load_ints(at));
      }
#pragma GCC unroll 8
      for (int q = 0; q < COUNT; q++) {
        const Vec query = splat(queries[q * dim + half]);
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECS; v++) sums[q][v] = fma_into(sums[q][v], query, keys[v]);
      }
    }
  }
  shared = prefetcher;
#pragma GCC unroll 8
  for (int q = 0; q < COUNT; q++)
#pragma GCC unroll 8
    for (int v = 0; v < TILE_VECS; v++) store(scores + q * TILE + v * LANES, mul(sums[q][v], load(factors + v * LANES)));
}

// Replace the scores of keys low .. high - 1 of a tile by softmax weights, and rescale the queries' softmaxes to the new maxima.
// Each step is a loop over queries, because the steps of a single query wait for one another.
template <int COUNT>
static inline void weigh_tile(float *scores, int64_t low, int64_t high, int64_t padded, Softmax *softmaxes) {
  const auto fill = [&](float value) {
    if (low == 0 && high == TILE) return;
    for (int q = 0; q < COUNT; q++) {
      for (int64_t i = 0; i < low; i++) scores[q * TILE + i] = value;
      for (int64_t i = high; i < TILE; i++) scores[q * TILE + i] = value;
    }
  };
  float maximum[COUNT];
  fill(-INFINITY);
  for (int q = 0; q < COUNT; q++) {
    Vec best = load(scores + q * TILE);
    for (int v = 1; v < TILE_VECS; v++) best = max(best, load(scores + q * TILE + v * LANES));
    const float highest = max_lanes(best);
    maximum[q] = *softmaxes[q].maximum > highest ? *softmaxes[q].maximum : highest;
  }
  for (int q = 0; q < COUNT; q++)
    for (int v = 0; v < TILE_VECS; v++) {
      float *at = scores + q * TILE + v * LANES;
      store(at, exp(sub(load(at), splat(maximum[q]))));
    }
  fill(0.0f);
  for (int q = 0; q < COUNT; q++) {
    if (*softmaxes[q].maximum != maximum[q]) {
      const float before = exp_one(*softmaxes[q].maximum - maximum[q]);
      scale_values(softmaxes[q].values, before, padded);
      *softmaxes[q].sum *= before;
      *softmaxes[q].maximum = maximum[q];
    }
    Vec sum = zero();
    for (int v = 0; v < TILE_VECS; v++) sum = add(sum, load(scores + q * TILE + v * LANES));
    *softmaxes[q].sum += sum_lanes(sum);
  }
}

// Add the weighted values of keys low .. high - 1, WIDE vectors at a time. A vector of bfloat16 pairs becomes two: the low halves,
// then the high ones. Softmaxes hold their values in that order until `interleave_pairs` restores it.
template <int COUNT, int WIDE, bool NARROW>
static inline void add_values(const float *weights, const KeyTile &tile, int64_t low, int64_t high, int64_t d, Prefetcher &shared,
                              Softmax *softmaxes) {
  Prefetcher prefetcher = shared;  // in registers
  Vec acc[COUNT][WIDE];
  for (int q = 0; q < COUNT; q++)
    for (int v = 0; v < WIDE; v++) acc[q][v] = load(softmaxes[q].values + d + v * LANES);
  const int64_t offset = tile.offset + d * (NARROW ? 2 : 4);
  for (int64_t i = low; i < high; i++) {
    prefetcher.prefetch_next();
    const char *from = tile.values[i] + offset;
    Vec value[WIDE];
    for (int v = 0; v < WIDE; v++) {
      if (!NARROW)
        value[v] = load((const float *)from + v * LANES);
      else if (v % 2 == 0)
        value[v] = low_bf16(load_ints(from + v * LANES * 2));
      else
        value[v] = high_bf16(load_ints(from + (v - 1) * LANES * 2));
    }
    for (int q = 0; q < COUNT; q++) {
      const Vec weight = splat(weights[q * TILE + i]);
      for (int v = 0; v < WIDE; v++) acc[q][v] = fma(weight, value[v], acc[q][v]);
    }
  }
  shared = prefetcher;
  for (int q = 0; q < COUNT; q++)
    for (int v = 0; v < WIDE; v++) store(softmaxes[q].values + d + v * LANES, acc[q][v]);
}

template <int COUNT, bool NARROW>
static inline void add_all_values(const float *weights, const KeyTile &tile, int64_t low, int64_t high, int64_t padded,
                                  Prefetcher &prefetcher, Softmax *softmaxes) {
  constexpr int REST = NARROW ? 2 : 1;
  int64_t d = 0;
  for (; d + 4 * LANES <= padded; d += 4 * LANES) add_values<COUNT, 4, NARROW>(weights, tile, low, high, d, prefetcher, softmaxes);
  for (; d < padded; d += REST * LANES) add_values<COUNT, REST, NARROW>(weights, tile, low, high, d, prefetcher, softmaxes);
}

static inline void interleave_pairs(float *values, int64_t padded) {
  float pairs[2 * LANES];
  for (int64_t d = 0; d < padded; d += 2 * LANES) {
    memcpy(pairs, values + d, sizeof pairs);
    for (int i = 0; i < LANES; i++) values[d + 2 * i] = pairs[i], values[d + 2 * i + 1] = pairs[LANES + i];
  }
}

static inline void cap_scores(float *scores, int64_t count, float cap) {
  for (int64_t i = 0; i < count; i += LANES) store(scores + i, soft_cap(cap, load(scores + i)));
}

template <int COUNT>
static void attend_tile(const SpOp &op, const float *queries, const KeyTile &tile, int64_t low, int64_t high, int64_t padded,
                        Prefetcher &prefetcher, Softmax *softmaxes) {
  alignas(64) float scores[COUNT * TILE];
  if (tile.pairs)
    score_tile<COUNT, true>(queries, tile.transposed, op.dim, tile.key_factors, prefetcher, scores);
  else
    score_tile<COUNT, false>(queries, tile.transposed, op.dim, tile.key_factors, prefetcher, scores);
  if (op.softcap != 0.0f) cap_scores(scores, COUNT * TILE, op.softcap);
  weigh_tile<COUNT>(scores, low, high, padded, softmaxes);
  for (int64_t i = 0; op.type == SP_INT8 && i < COUNT * TILE; i += LANES)
    store(scores + i, mul(load(scores + i), load(tile.value_scales + i % TILE)));
  if (tile.narrow)
    add_all_values<COUNT, true>(scores, tile, low, high, padded, prefetcher, softmaxes);
  else
    add_all_values<COUNT, false>(scores, tile, low, high, padded, prefetcher, softmaxes);
}

typedef void (*AttendTile)(const SpOp &, const float *, const KeyTile &, int64_t, int64_t, int64_t, Prefetcher &, Softmax *);
constexpr int MOST_QUERIES = TILE_VECS == 4 ? 4 : 1;  // of a call, so that their sums fit in the registers
static const AttendTile ATTEND_TILES[] = {nullptr, attend_tile<1>, attend_tile<2>, attend_tile<3>, attend_tile<4>};

// Whether bfloat16 values are widened each time they are used. Many queries share a float32 copy instead.
static inline bool reads_narrow(const SpOp &op, int64_t rows) {
  return op.type == SP_BF16 && op.dim % (2 * LANES) == 0 && rows * (op.heads / op.kv_heads) <= 2 * MOST_QUERIES;
}

// One tile and key head, for the rows that share its slots. softmax_of(row, head) is a query's softmax.
template <typename SoftmaxOf>
static void attend_rows(const Keys &keys, const TileSlots &slots, int64_t kv_head, int64_t padded, Prefetcher &prefetcher,
                        KeyTile &tile, SoftmaxOf softmax_of) {
  const SpOp &op = keys.op;
  const int64_t group = op.heads / op.kv_heads, width = qkv_stride(op);
  load_keys(op, slots, kv_head, padded, prefetcher, tile);
  load_values(op, slots, kv_head, padded, tile);
  for (uint32_t rows = slots.rows; rows; rows &= rows - 1) {
    const int64_t r = __builtin_ctz(rows), begin = keys.begin[r] - slots.from, end = keys.end[r] - slots.from;
    const int64_t low = begin > 0 ? begin : 0, high = end < TILE ? end : TILE;
    const float *queries = op.in + (keys.first_row + r) * width;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head += MOST_QUERIES) {
      const int64_t rest = (kv_head + 1) * group - head, some = rest < MOST_QUERIES ? rest : MOST_QUERIES;
      Softmax softmaxes[MOST_QUERIES];
      for (int64_t i = 0; i < some; i++) softmaxes[i] = softmax_of(r, head + i);
      ATTEND_TILES[some](op, queries + head * op.dim, tile, low, high, padded, prefetcher, softmaxes);
    }
  }
}

// One span of a block for key heads first .. first + count - 1. All heads of a tile come before the next tile, because a slot's
// heads are contiguous in memory. Softmaxes are cleared first. `next_span` is the span that this thread will probably compute next.
template <typename SoftmaxOf>
static void attend_span(const Keys &keys, int64_t first, int64_t count, int64_t span, int64_t next_span, int64_t padded,
                        SoftmaxOf softmax_of) {
  KeyTile tile(AttentionRoom::own().tile, padded);
  TileSlots slots[2];
  const SpOp &op = keys.op;
  const int64_t group = op.heads / op.kv_heads, bytes = cached_bytes(op);
  const auto for_each_softmax = [&](auto apply) {
    for (int64_t r = 0; r < keys.rows; r++)
      for (int64_t head = first * group; head < (first + count) * group; head++) apply(softmax_of(r, head));
  };
  for_each_softmax([&](Softmax softmax) { clear_softmax(softmax, padded); });
  tile.narrow = reads_narrow(op, keys.rows);
  TileWalk walk(keys, span);
  bool more = walk.next(slots[0]);
  for (int current = 0; more; current ^= 1) {
    TileSlots &next = slots[current ^ 1];
    more = walk.next(next);
    if (!more) TileWalk(keys, next_span).next(next);
    Prefetcher prefetcher(next, first * bytes, (first + count) * bytes);
    for (int64_t kv_head = first; kv_head < first + count; kv_head++)
      attend_rows(keys, slots[current], kv_head, padded, prefetcher, tile, softmax_of);
  }
  if (tile.narrow) for_each_softmax([&](Softmax softmax) { interleave_pairs(softmax.values, padded); });
}

// A sink's score takes part in the softmax like that of a key whose values are zeros.
static inline void add_sink(float sink, Softmax softmax, int64_t padded) {
  const float maximum = *softmax.maximum > sink ? *softmax.maximum : sink, before = exp_one(*softmax.maximum - maximum);
  scale_values(softmax.values, before, padded);
  *softmax.sum = *softmax.sum * before + exp_one(sink - maximum);
}

static inline void put_attended(const SpOp &op, int64_t row, int64_t head, Softmax softmax) {
  if (op.sinks) add_sink(op.sinks[head], softmax, padded_of(op));
  float *out = op.out + (row * op.heads + head) * op.dim;
  for (int64_t i = 0; i < op.dim; i++) out[i] = softmax.values[i] / *softmax.sum;
}

static inline float *partial_at(Plan &plan, const SpOp &op, int64_t row, int64_t head, int64_t span) {
  return plan.partial + ((row * op.heads + head) * plan.most_spans + span) * (padded_of(op) + 2);
}

// All spans of a block and key head, in order.
static void attend_block(const Keys &keys, int64_t kv_head, int64_t padded) {
  const int64_t group = keys.op.heads / keys.op.kv_heads, count = keys.rows * group, first_head = kv_head * group;
  float *memory = AttentionRoom::own().take_softmaxes(2 * count, padded);
  const auto all = [&](int64_t i) { return softmax_at(memory + i * (padded + 2), padded); };
  const auto one = [&](int64_t i) { return all(count + i); };
  for (int64_t i = 0; i < count; i++) clear_softmax(all(i), padded);
  const auto softmax_of = [&](int64_t row, int64_t head) { return one(row * group + head - first_head); };
  for (int64_t span = keys.first_position / SPAN; span * SPAN < keys.end_position; span++) {
    attend_span(keys, kv_head, 1, span, span + 1, padded, softmax_of);
    for (int64_t i = 0; i < count; i++)
      if (*one(i).sum != 0.0f) merge(all(i), one(i), padded);
  }
  for (int64_t i = 0; i < count; i++) put_attended(keys.op, keys.first_row + i / group, first_head + i % group, all(i));
}

// Work items are blocks times key heads, or blocks times spans if spans are split.
static inline int64_t attend_pieces(const SpOp &op, const Plan &plan) {
  return plan.blocks.size * (plan.split ? plan.most_spans : op.kv_heads);
}

static void run_attend(const SpOp &op, const SpPass &pass, Plan &plan, int64_t item) {
  const int64_t items = plan.split ? plan.most_spans : op.kv_heads, index = item % items;  // of a block
  const Keys keys(op, pass, plan, plan.blocks[item / items]);
  const int64_t padded = padded_of(op);
  if (!plan.split) return attend_block(keys, index, padded);
  attend_span(keys, 0, op.kv_heads, index, index + plan.threads, padded, [&](int64_t row, int64_t head) {
    return softmax_at(partial_at(plan, op, keys.first_row + row, head, index), padded);
  });
}

// If spans are split: merge the spans of a row and head in order. A span without keys of the row is left out.
static void run_merge(const SpOp &op, Plan &plan, int64_t item) {
  const int64_t row = item / op.heads, head = item % op.heads, padded = padded_of(op);
  const Softmax all = softmax_at(AttentionRoom::own().take_softmaxes(1, padded), padded);
  clear_softmax(all, padded);
  for (int64_t span = 0; span < plan.most_spans; span++) {
    const Softmax one = softmax_at(partial_at(plan, op, row, head, span), padded);
    if (*one.sum != 0.0f) merge(all, one, padded);
  }
  put_attended(op, row, head, all);
}

}  // namespace SP_NAMESPACE
