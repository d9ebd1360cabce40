// Attention over a KV cache, read through the block table. A query's scores, maximum and sum run over its own keys in order of
// position, in tiles and spans that begin at fixed positions. So its result does not depend on other rows, on the chunks of a
// prompt or on threads.
//
//   keys   | tile 0 | tile 1 | ...          TILE positions: one step of the online softmax (arXiv:1805.02867)
//          |       span 0        | span 1   SPAN positions: a softmax of their own, merged in order
//
// A tree node sees the chain before the tree, its ancestors and itself. The node at a position is the ancestor at that depth.
// With SP_AHEAD, rows of a chain see one another. With SP_SOURCE, every row sees all positions of another sequence: the source of
// its own one.
#pragma once
#include "rows.h"

namespace SP_NAMESPACE {

constexpr int64_t TILE = 64, SPAN = 512, MOST_DIM = 512;
constexpr int64_t MOST_BLOCK_ROWS = 64, FEW_BLOCK_ROWS = 8;  // a row is a bit of a word
constexpr int64_t MOST_BLOCK_REALS = 1 << 14;  // of a work item's softmaxes, 64 KiB: in the second-level cache
constexpr int64_t MOST_PARTIAL = 1 << 22;      // floats of the softmaxes of spans, 16 MiB, which a thread keeps for its next pass
constexpr int64_t BALANCE = 2;                 // work items per thread, so that threads end at about the same time
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

// The dimensions of a head, rounded up to whole vectors.
static inline int64_t padded_of(const SpOp &op) { return (op.dim + LANES - 1) / LANES * LANES; }

// The floats of a row's softmaxes for one key head.
static inline int64_t reals_of_row(const SpOp &op) { return op.heads / op.kv_heads * (padded_of(op) + 2); }

struct Plan {
  List<RowBlock> blocks;
  List<Node> nodes;  // of all trees, indexed like pass.parents
  float *partial;    // the softmaxes of single spans, by row, head and span: values [padded]; after all of them, states [2]
  int64_t rows = 0, most_spans = 0, threads = 1;
  int64_t most_rows = 0;  // of a block
  bool uneven = false;    // whether a block is too large a share of the work of all threads

  // The number of softmaxes of single spans, and the floats that they take.
  int64_t count_partial(const SpOp &op) const { return rows * op.heads * most_spans; }
  int64_t room_of(const SpOp &op) const { return count_partial(op) * (padded_of(op) + 2); }

  // Whether a block's spans are computed in parallel and merged afterwards.
  bool splits(const SpOp &op) const { return uneven && most_spans > 1 && room_of(op) <= MOST_PARTIAL; }

  // A work item is a part of the key heads, of a block or, if blocks are split, of a block's span. The heads of a slot
  // are contiguous in memory, so a part has as many of them as fit, or fewer if threads would have too few items.
  int64_t shares_of(const SpOp &op) const { return blocks.size * (splits(op) ? most_spans : 1); }
  int64_t heads_of_part(const SpOp &op) const {
    const int64_t fitting = MOST_BLOCK_REALS / (most_rows * reals_of_row(op)), shares = shares_of(op);
    const int64_t parts = threads > 1 ? (BALANCE * threads + shares - 1) / shares : 1, balanced = op.kv_heads / parts;
    const int64_t most = balanced < fitting ? balanced : fitting;
    return most > 1 ? most : 1;
  }
  int64_t parts_of(const SpOp &op) const { return (op.kv_heads + heads_of_part(op) - 1) / heads_of_part(op); }
};

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

// The most rows of a block, for all layers of a pass: fewer if threads would have too few items. 0 = no layer has
// attention.
static int64_t most_block_rows(const SpOp *ops, int count, int64_t rows, int threads) {
  int64_t most = MOST_BLOCK_ROWS, kv_heads = 0;
  for (int i = 0; i < count; i++) {
    if (ops[i].code != SP_ATTEND) continue;
    const int64_t fitting = MOST_BLOCK_REALS / reals_of_row(ops[i]);
    if (fitting < most) most = fitting;
    if (!kv_heads || ops[i].kv_heads < kv_heads) kv_heads = ops[i].kv_heads;
  }
  while (kv_heads && threads > 1 && most > FEW_BLOCK_ROWS && rows * kv_heads < BALANCE * threads * most) most /= 2;
  return !kv_heads ? 0 : most > 1 ? most : 1;
}

// The plan serves all layers: work and spans are those of the layer that sees the most positions. partial: memory for the softmaxes of
// spans.
static void plan_attention(const SpOp *ops, int count, const SpPass &pass, int threads, Plan &plan, List<float> &partial) {
  const int64_t most_rows = most_block_rows(ops, count, pass.rows, threads);
  plan.blocks.size = plan.nodes.size = plan.most_rows = 0;
  if (!most_rows) return;
  bool sources = false;
  for (int i = 0; i < count; i++) sources |= ops[i].code == SP_ATTEND && ops[i].flags & SP_SOURCE;
  int64_t longest = 0, room = 0, work = 0, most_work = 0;  // work: about the number of pairs of rows and keys
  for (int64_t s = 0; s < pass.num_segments; s++) {
    const SpSegment &segment = pass.segments[s];
    for (int64_t r = 0; r < segment.rows; r += most_rows)
      plan.blocks.push({&segment, r, segment.rows - r < most_rows ? segment.rows - r : most_rows});
    const int64_t own = segment.tree < 0 ? segment.start + segment.rows : plan_nodes(pass, segment, plan);
    const int64_t end = sources && segment.source_length > own ? segment.source_length : own;
    const int64_t rows = segment.rows < most_rows ? segment.rows : most_rows;
    if (rows > plan.most_rows) plan.most_rows = rows;
    if (end > longest) longest = end;
    if (rows * end > most_work) most_work = rows * end;
    work += segment.rows * end;
  }
  plan.rows = pass.rows, plan.threads = threads;
  plan.most_spans = (longest + SPAN - 1) / SPAN;
  plan.uneven = threads > 1 && most_work * BALANCE * threads > work;
  for (int i = 0; i < count; i++)
    if (ops[i].code == SP_ATTEND && plan.splits(ops[i]) && plan.room_of(ops[i]) > room) room = plan.room_of(ops[i]);
  partial.renew(room);
  plan.partial = partial.items;
}

// The online softmax of one query over the keys so far.
struct Softmax {
  float *values, *state;  // values [padded] are not divided by the sum yet

  float &maximum() const { return state[0]; }
  float &sum() const { return state[1]; }
};

// Softmax i of `count`. In memory, the values of all come before the states of all.
static inline Softmax softmax_at(float *memory, int64_t count, int64_t i, int64_t padded) {
  return {memory + i * padded, memory + count * padded + 2 * i};
}

static inline void clear_softmax(Softmax softmax, int64_t padded) {
  for (int64_t i = 0; i < padded; i++) softmax.values[i] = 0.0f;
  softmax.maximum() = -INFINITY, softmax.sum() = 0.0f;
}

static inline float exp_one(float x) { return x == -INFINITY ? 0.0f : (float)first_lane(exp(splat(x))); }

static inline void scale_values(float *values, float factor, int64_t padded) {
  for (int64_t i = 0; i < padded; i += LANES) store(values + i, mul(load(values + i), splat(factor)));
}

// Merge the softmax of a span into that of the keys before it. A span in which the query sees no key changes nothing.
static inline void merge(Softmax all, Softmax span, int64_t padded) {
  if (span.sum() == 0.0f) return;
  const float maximum = all.maximum() > span.maximum() ? all.maximum() : span.maximum();
  const float before = exp_one(all.maximum() - maximum), factor = exp_one(span.maximum() - maximum);
  for (int64_t i = 0; i < padded; i += LANES)
    store(all.values + i, fma(load(span.values + i), splat(factor), mul(load(all.values + i), splat(before))));
  all.sum() = span.sum() * factor + all.sum() * before;
  all.maximum() = maximum;
}

// The positions that each row of a block sees, and the tree nodes at them.
struct Keys {
  const SpOp &op;
  const SpPass &pass;
  const SpSegment &segment;
  const Node *nodes;
  const int64_t *parents;         // of the nodes
  const int64_t *table;           // the block table of the positions before tree_start
  int64_t first_row, first_node;  // the block's first row: in the pass; as a node, or negative in the chain
  int64_t first_place;            // its position, if it is in the chain
  int64_t tree_start;             // nodes are at this position and after it
  int64_t rows, begin[MOST_BLOCK_ROWS], end[MOST_BLOCK_ROWS];  // row r sees positions begin[r] .. end[r] - 1
  int64_t first_position = INT64_MAX, end_position = 0;        // of all rows

  Keys(const SpOp &o, const SpPass &p, const Plan &plan, const RowBlock &block)
      : op(o), pass(p), segment(*block.segment), nodes(segment.tree < 0 ? nullptr : plan.nodes.items + segment.tree),
        parents(segment.tree < 0 ? nullptr : p.parents + segment.tree), first_row(segment.first + block.first),
        first_node(segment.done + block.first - chain_of(segment)), first_place(segment.start + block.first),
        tree_start(segment.start + chain_of(segment)), rows(block.rows) {
    const bool source = op.flags & SP_SOURCE;
    table = source ? segment.source : segment.table + op.group * segment.blocks;
    if (source) tree_start = segment.source_length;
    for (int64_t r = 0; r < rows; r++) {
      const int64_t position = position_of(r);
      const int64_t after = (op.flags & SP_FIXED ? segment.start : position) + 1;  // of the row that has the window
      end[r] = source ? segment.source_length : op.flags & SP_AHEAD ? segment.start + segment.rows : position + 1;
      begin[r] = op.window && after > op.window ? after - op.window : 0;
      if (begin[r] < first_position) first_position = begin[r];
      if (end[r] > end_position) end_position = end[r];
    }
  }

  int64_t position_of(int64_t r) const { return first_node + r < 0 ? first_place + r : nodes[first_node + r].position; }

  // The node at `position` >= tree_start on the path to row r.
  int64_t node_at(int64_t r, int64_t position) const {
    int64_t node = first_node + r;
    while (nodes[node].position / TILE > position / TILE) node = nodes[node].before;
    while (nodes[node].position > position) node = parents[node];
    return node;
  }

  // The rows that see keys of the tile at `from`; a bit for each.
  uint64_t rows_at(int64_t from) const {
    uint64_t found = 0;
    for (int64_t r = 0; r < rows; r++) found |= (uint64_t)(begin[r] < from + TILE && from < end[r]) << r;
    return found;
  }

  // The first position of the tile at `from` that some of the rows see.
  int64_t first_seen(uint64_t some, int64_t from) const {
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

// The cache slots of a tile for some rows of a block.
struct TileSlots {
  struct Slot {
    const char *keys, *values;  // of the first head
  };
  Slot at[TILE];
  int64_t from = 0, count = 0;  // first position; number of positions
  uint64_t rows = 0;            // a bit for each
};

// Find the slots of the tile at `from` along the path to row r, for slots.rows. The block table is read for positions alone that one of
// them sees: blocks before a window may have other contents.
static inline void find_slots(const Keys &keys, int64_t r, int64_t from, TileSlots &slots) {
  const char *key = (const char *)keys.pass.keys[keys.op.layer], *value = (const char *)keys.pass.values[keys.op.layer];
  const int64_t size = keys.pass.block, stride = keys.op.kv_heads * cached_bytes(keys.op);
  const int64_t *table = keys.table, tree_start = keys.tree_start;
  const auto put = [&](int64_t i, int64_t slot) { slots.at[i] = {key + slot * stride, value + slot * stride}; };
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
  for (i = 0; i < first - from; i++) slots.at[i] = slots.at[first - from];
}

// Visits the tiles of a span in order. A tile is visited once for all rows of the block that see the same keys in it: all rows
// before the tree, the rows of one path in the tree.
struct TileWalk {
  const Keys &keys;
  int64_t from, end;     // first position of the tile; end of the span
  uint64_t pending = 0;  // rows that still need this tile

  TileWalk(const Keys &k, int64_t span) : keys(k) {
    const int64_t begin = k.first_position > span * SPAN ? k.first_position : span * SPAN;
    from = begin / TILE * TILE - TILE;
    end = (span + 1) * SPAN < k.end_position ? (span + 1) * SPAN : k.end_position;
  }

  // Find the slots of the next visit. Returns false, with no slots, after the last one. Parents come before children, so the last
  // pending row is the end of a path.
  bool next(TileSlots &slots) {
    slots.count = 0, slots.rows = 0;
    while (!pending && (from += TILE) < end) pending = keys.rows_at(from);
    if (pending) {
      const int64_t last = 63 - __builtin_clzll(pending);
      for (int64_t r = 0; r <= last; r++)
        if ((pending >> r & 1) && keys.shares(r, last, from)) slots.rows |= (uint64_t)1 << r;
      pending &= ~slots.rows;
      find_slots(keys, last, from, slots);
    }
    return slots.rows != 0;
  }
};

// Prefetches the slots of the next tile two cache lines at a time, while this tile is computed. The hardware prefetchers do not follow
// one head's slots, which are too far apart, and many prefetches at once would queue.
struct Prefetcher {
  const char *line = nullptr, *stop = nullptr;
  const char *const *next, *const *end;  // keys and values of all slots in turn
  int64_t begin, bytes;                  // within a slot

  Prefetcher(const TileSlots &slots, int64_t from, int64_t to)
      : next(&slots.at[0].keys), end(next + 2 * slots.count), begin(from), bytes(to - from) {}

  void prefetch_next() {
    if (line >= stop) {
      if (next == end) return;
      line = *next++ + begin, stop = line + bytes;
    }
    prefetch_far(line), prefetch_far(line + 64);
    line += 128;
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

enum class Stored { FLOATS, PAIRS, BYTES };  // float32; bfloat16, of which a vector becomes two of float32; int8

// The keys of a tile, transposed so that a vector holds the same dimension of several positions, and its values.
struct KeyTile {
  float *transposed;  // [dim][TILE] float32, or [dim / 2][TILE] pairs of bfloat16
  float *copied;      // [TILE][padded] keys, then values, if they are not read in place
  const char *values[TILE];
  bool pairs;                                                   // whether keys are pairs of bfloat16
  Stored stored;                                                // how values are stored
  alignas(64) float score_factors[TILE], value_scales[TILE];  // by position; scales for SP_INT8

  KeyTile(List<float> &room, int64_t padded, float factor) {
    room.renew(2 * TILE * padded);
    transposed = room.items, copied = room.items + TILE * padded;
    for (float &each : score_factors) each = factor;
  }
};

alignas(64) static const float ZEROS[MOST_DIM] = {};

// Transpose `words` dwords of each key; rows are whole vectors.
static inline void transpose_keys(const float *const *rows, int64_t words, Prefetcher &prefetcher, float *to) {
  const float *at[LANES];
  for (int64_t d = 0; d < words; d += LANES) {
    for (int j = 0; j < LANES; j++) at[j] = rows[j] + d;
    prefetcher.prefetch_next(), prefetcher.prefetch_next();
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

// Each vector of `words` has dword W of LANES keys, for successive W. Store their dimensions 4 W + BYTE as float32.
template <int BYTE>
static inline void widen_keys(const float *words, int64_t dims, float *to) {
  for (int64_t d = BYTE; d < dims; d += 4, words += LANES) {
    const Ints all = load_ints(words);
    store(to + d * TILE, to_floats(shift_right_signed<24>(shift_left<24 - 8 * BYTE>(all))));
  }
}

// Transpose keys in dwords of four int8, and widen them to float32.
static void load_rounded_keys(const SpOp &op, const TileSlots &from, int64_t offset, Prefetcher &prefetcher, KeyTile &tile) {
  constexpr int64_t DIMS = 4 * LANES;
  alignas(64) float words[LANES * LANES];
  alignas(64) int8_t copies[LANES][DIMS];  // of rows that end within DIMS, or are not aligned
  for (int64_t i = 0; i < from.count; i += LANES) {
    const int64_t some = from.count - i < LANES ? from.count - i : LANES;
    for (int64_t d = 0; d < op.dim; d += DIMS) {
      const float *rows[LANES];
      const int64_t dims = op.dim - d < DIMS ? op.dim - d : DIMS;
      for (int64_t j = 0; j < LANES; j++) {
        const char *row = j < some ? from.at[i + j].keys + offset + d : (const char *)ZEROS;
        if (dims < DIMS || op.dim % 4 != 0) row = (const char *)memcpy(copies[j], row, dims);
        rows[j] = (const float *)row;
      }
      prefetcher.prefetch_next();
      transpose(rows, words, LANES);
      float *to = tile.transposed + d * TILE + i;
      widen_keys<0>(words, dims, to), widen_keys<1>(words, dims, to), widen_keys<2>(words, dims, to), widen_keys<3>(words, dims, to);
    }
  }
}

// The scales of rounded keys or values, which follow a head's numbers, times `factor`.
template <typename HeadOf>
static inline void load_scales(const SpOp &op, int64_t count, float factor, float *scales, HeadOf head_of) {
  for (int64_t i = 0; i < count; i++) {
    memcpy(scales + i, head_of(i) + op.dim, sizeof(float));
    scales[i] *= factor;
  }
  for (int64_t i = count; i < TILE; i++) scales[i] = 0.0f;
}

static void load_keys(const SpOp &op, const TileSlots &from, int64_t head, int64_t padded, Prefetcher &prefetcher, KeyTile &tile) {
  const int64_t offset = head * cached_bytes(op), words = op.type == SP_F32 ? op.dim : op.dim / 2;
  tile.pairs = false;
  if (op.type == SP_INT8) {
    load_scales(op, from.count, op.factor, tile.score_factors, [&](int64_t i) { return from.at[i].keys + offset; });
    return load_rounded_keys(op, from, offset, prefetcher, tile);
  }
  const bool whole = (op.type == SP_F32 || op.dim % 2 == 0) && words % LANES == 0;  // else rows need padding
  tile.pairs = whole && op.type != SP_F32;
  for (int64_t i = 0; i < from.count; i += LANES) {
    const float *rows[LANES];
    const int64_t some = from.count - i < LANES ? from.count - i : LANES;
    for (int64_t j = 0; j < some; j++) {
      rows[j] = whole ? (const float *)(from.at[i + j].keys + offset) : tile.copied + j * padded;
      if (!whole) load_row(op, from.at[i + j].keys + offset, padded, tile.copied + j * padded);
    }
    for (int64_t j = some; j < LANES; j++) rows[j] = ZEROS;
    transpose_keys(rows, whole ? words : padded, prefetcher, tile.transposed + i);
  }
}

// Whether bfloat16 values are widened each time they are used.
static inline bool reads_pairs(const SpOp &op) { return op.type == SP_BF16 && op.dim % (2 * LANES) == 0; }

// Values that fill whole vectors are read in place. If many queries read them, they are first copied without gaps, int8
// as float32.
static void load_values(const SpOp &op, const TileSlots &from, int64_t head, int64_t padded, bool copies, KeyTile &tile) {
  const int64_t bytes = cached_bytes(op);
  const bool rounded = op.type == SP_INT8;
  const bool whole = reads_pairs(op) || (op.type != SP_BF16 && op.dim % LANES == 0 && !(rounded && copies));  // else rows need padding
  tile.stored = reads_pairs(op) ? Stored::PAIRS : rounded && whole ? Stored::BYTES : Stored::FLOATS;
  if (rounded) load_scales(op, from.count, 1.0f, tile.value_scales, [&](int64_t i) { return from.at[i].values + head * bytes; });
  for (int64_t i = 0; i < from.count; i++) {
    const char *values = from.at[i].values + head * bytes;
    tile.values[i] = whole && !copies ? values : (const char *)(tile.copied + i * padded);
    if (!whole) load_row(op, values, padded, tile.copied + i * padded);
    else if (copies) memcpy(tile.copied + i * padded, values, bytes);
  }
}

// A query of a tile.
struct Query {
  const float *at;
  int64_t low, high;  // it sees positions low .. high - 1 of the tile
  Softmax softmax;
  const float *distances;  // of its head; NULL = none
  int64_t first;           // the index in it that the tile's first position has, before it is clamped
};

// Queries are computed together, so that a vector of keys or values is loaded once for all of them. Their sums fit in the registers.
constexpr int MOST_QUERIES = 6;
constexpr int wide_of(int queries) { return queries == 1 ? 8 : queries <= 3 ? 4 : REGISTERS < 32 ? 2 : 4; }  // vectors of each
constexpr int64_t STRETCH = 8;  // dimensions between prefetches
constexpr int at_most(int a, int b) { return a < b ? a : b; }

// Scores of COUNT queries for some vectors of keys. The loops over queries are unrolled by pragma because GCC otherwise unrolls them
// too late to keep the sums in registers.
template <int COUNT, bool PAIRS>
static inline void score_tile(const Query *queries, const float *transposed, int64_t dim, const float *factors, int first, int end,
                              Prefetcher &shared, float *scores) {
  constexpr int WIDE = at_most(wide_of(COUNT), TILE_VECS), DIMS = PAIRS ? 2 : 1;
  Prefetcher prefetcher = shared;  // in registers
  const float *at[COUNT];
  for (int q = 0; q < COUNT; q++) at[q] = queries[q].at;
  for (int from = first / WIDE * WIDE; from < end; from += WIDE) {
    Vec sums[COUNT][WIDE];
    for (int q = 0; q < COUNT; q++)
      for (int v = 0; v < WIDE; v++) sums[q][v] = zero();
    const float *keys = transposed + from * LANES;
    for (int64_t begin = 0; begin < dim; begin += STRETCH) {
      prefetcher.prefetch_next(), prefetcher.prefetch_next();
      const int64_t stop = begin + STRETCH < dim ? begin + STRETCH : dim;
      for (int64_t d = begin; d < stop; d += DIMS, keys += TILE)
        for (int half = 0; half < DIMS; half++) {
          Vec key[WIDE];
          for (int v = 0; v < WIDE; v++) {
            const float *own = keys + v * LANES;
            key[v] = !PAIRS ? load(own) : half ? high_bf16(load_ints(own)) : low_bf16(load_ints(own));
          }
#pragma GCC unroll 8
          for (int q = 0; q < COUNT; q++) {
            const Vec query = splat(at[q][d + half]);
#pragma GCC unroll 8
            for (int v = 0; v < WIDE; v++) sums[q][v] = fma_into(sums[q][v], query, key[v]);
          }
        }
    }
#pragma GCC unroll 8
    for (int q = 0; q < COUNT; q++)
#pragma GCC unroll 8
      for (int v = 0; v < WIDE; v++) store(scores + q * TILE + (from + v) * LANES, mul(sums[q][v], load(factors + (from + v) * LANES)));
  }
  shared = prefetcher;
}

// Replace the scores of the keys that each query sees by softmax weights, and rescale the softmaxes to the new maxima. Vectors of scores
// before `first` and from `end` on are not used; both are multiples of SUMS, so that sums over lanes begin alike on all sets. Each step is a
// loop over queries, because the steps of a single one wait for one another.
template <int COUNT>
static inline void weigh_tile(float *scores, const Query *queries, int first, int end, int64_t padded) {
  float maximum[COUNT];
  const auto fill = [&](float value) {
    for (int q = 0; q < COUNT; q++) {
      for (int64_t i = first * LANES; i < queries[q].low; i++) scores[q * TILE + i] = value;
      for (int64_t i = queries[q].high; i < end * LANES; i++) scores[q * TILE + i] = value;
    }
  };
  fill(-INFINITY);
  for (int q = 0; q < COUNT; q++) {
    Vec best = load(scores + q * TILE + first * LANES);
    for (int v = first + 1; v < end; v++) best = max(best, load(scores + q * TILE + v * LANES));
    const float highest = max_lanes(best), before = queries[q].softmax.maximum();
    maximum[q] = before > highest ? before : highest;
  }
  for (int q = 0; q < COUNT; q++)
    for (int v = first; v < end; v++) {
      float *at = scores + q * TILE + v * LANES;
      store(at, exp(sub(load(at), splat(maximum[q]))));
    }
  fill(0.0f);
  for (int q = 0; q < COUNT; q++) {
    const Softmax softmax = queries[q].softmax;
    if (softmax.maximum() != maximum[q]) {
      const float before = exp_one(softmax.maximum() - maximum[q]);
      scale_values(softmax.values, before, padded);
      softmax.sum() *= before;
      softmax.maximum() = maximum[q];
    }
    Vec sums[SUMS];
    for (Vec &sum : sums) sum = zero();
    for (int v = first; v < end; v += SUMS)
      for (int s = 0; s < SUMS; s++) sums[s] = add(sums[s], load(scores + q * TILE + (v + s) * LANES));
    softmax.sum() += sum_all(sums);
  }
}

// Add the weighted values of keys low .. high - 1, WIDE vectors at a time. A vector of bfloat16 pairs becomes two: the low halves,
// then the high ones. Softmaxes hold their values in that order until `interleave_pairs` restores it.
template <int COUNT, int WIDE, Stored STORED>
static inline void add_values(const float *weights, const Query *queries, const KeyTile &tile, int64_t low, int64_t high, int64_t d,
                              Prefetcher &shared) {
  Prefetcher prefetcher = shared;  // in registers
  Vec acc[COUNT][WIDE];
  for (int q = 0; q < COUNT; q++)
    for (int v = 0; v < WIDE; v++) acc[q][v] = load(queries[q].softmax.values + d + v * LANES);
  const int64_t offset = d * (STORED == Stored::FLOATS ? 4 : STORED == Stored::PAIRS ? 2 : 1);
  for (int64_t i = low; i < high; i++) {
    if (COUNT <= 3) prefetcher.prefetch_next();  // more queries prefetch enough with the scores
    const char *from = tile.values[i] + offset;
    Vec value[WIDE];
    for (int v = 0; v < WIDE; v++) {
      if (STORED == Stored::FLOATS)
        value[v] = load((const float *)from + v * LANES);
      else if (STORED == Stored::BYTES)
        value[v] = to_floats(load_signed((const int8_t *)from + v * LANES));
      else if (v % 2 == 0)
        value[v] = low_bf16(load_ints(from + v * LANES * 2));
      else
        value[v] = high_bf16(load_ints(from + (v - 1) * LANES * 2));
    }
#pragma GCC unroll 8
    for (int q = 0; q < COUNT; q++) {
      const Vec weight = splat(weights[q * TILE + i]);
#pragma GCC unroll 8
      for (int v = 0; v < WIDE; v++) acc[q][v] = fma_into(acc[q][v], weight, value[v]);
    }
  }
  shared = prefetcher;
  for (int q = 0; q < COUNT; q++)
    for (int v = 0; v < WIDE; v++) store(queries[q].softmax.values + d + v * LANES, acc[q][v]);
}

template <int COUNT, Stored STORED>
static inline void add_some_values(const float *weights, const Query *queries, const KeyTile &tile, int64_t low, int64_t high,
                                   int64_t padded, Prefetcher &prefetcher) {
  constexpr int WIDE = wide_of(COUNT), REST = STORED == Stored::PAIRS ? 2 : 1;
  int64_t d = 0;
  for (; d + WIDE * LANES <= padded; d += WIDE * LANES) add_values<COUNT, WIDE, STORED>(weights, queries, tile, low, high, d, prefetcher);
  for (; d < padded; d += REST * LANES) add_values<COUNT, REST, STORED>(weights, queries, tile, low, high, d, prefetcher);
}

// Add the weighted values of the keys that each query sees. Keys that all queries see are added for all at once, other
// keys for one query at a time. Each query adds its own keys in order, and no others: 0 times an infinite value would
// not be 0.
template <int COUNT, Stored STORED>
static inline void add_all_values(const float *weights, const Query *queries, const KeyTile &tile, int64_t padded, Prefetcher &prefetcher) {
  int64_t low = 0, high = TILE;
  for (int q = 0; q < COUNT; q++) {
    if (queries[q].low > low) low = queries[q].low;
    if (queries[q].high < high) high = queries[q].high;
  }
  if (high < low) high = low;
  const auto add_one = [&](int q, int64_t begin, int64_t end) {
    if (begin < end) add_some_values<1, STORED>(weights + q * TILE, queries + q, tile, begin, end, padded, prefetcher);
  };
  for (int q = 0; q < COUNT; q++) add_one(q, queries[q].low, low < queries[q].high ? low : queries[q].high);
  if (low < high) add_some_values<COUNT, STORED>(weights, queries, tile, low, high, padded, prefetcher);
  for (int q = 0; q < COUNT; q++) add_one(q, high > queries[q].low ? high : queries[q].low, queries[q].high);
}

static inline void interleave_pairs(float *values, int64_t padded) {
  float pairs[2 * LANES];
  for (int64_t d = 0; d < padded; d += 2 * LANES) {
    memcpy(pairs, values + d, sizeof pairs);
    for (int i = 0; i < LANES; i++) values[d + 2 * i] = pairs[i], values[d + 2 * i + 1] = pairs[LANES + i];
  }
}

// Numbers i .. i + LANES - 1 of a table, whose ends stand for all indices outside of it.
static inline Vec clamped_part(const float *table, int64_t size, int64_t i) {
  if (i >= 0 && i + LANES <= size) return load(table + i);
  if (i + LANES <= 1 || i >= size - 1) return splat(table[i < 0 ? 0 : size - 1]);
  alignas(64) float some[LANES];
  for (int64_t j = 0; j < LANES; j++) some[j] = table[i + j < 0 ? 0 : i + j < size ? i + j : size - 1];
  return load(some);
}

// Add the number of each key's distance to its score.
template <int COUNT>
static inline void add_distances(const SpOp &op, const Query *queries, int first, int end, float *scores) {
  const int64_t size = op.before + 1 + op.after;
  for (int q = 0; q < COUNT; q++)
    for (int v = first; v < end; v++) {
      float *at = scores + q * TILE + v * LANES;
      store(at, add(load(at), clamped_part(queries[q].distances, size, queries[q].first + v * LANES)));
    }
}

template <int COUNT>
static void attend_tile(const SpOp &op, const Query *queries, const KeyTile &tile, int64_t padded, Prefetcher &prefetcher) {
  alignas(64) float scores[COUNT * TILE];
  int64_t low = TILE, high = 0;
  for (int q = 0; q < COUNT; q++) {
    if (queries[q].low < low) low = queries[q].low;
    if (queries[q].high > high) high = queries[q].high;
  }
  const int first = (int)(low / SUMMED) * SUMS, end = (int)((high + SUMMED - 1) / SUMMED) * SUMS;
  if (tile.pairs)
    score_tile<COUNT, true>(queries, tile.transposed, op.dim, tile.score_factors, first, end, prefetcher, scores);
  else
    score_tile<COUNT, false>(queries, tile.transposed, op.dim, tile.score_factors, first, end, prefetcher, scores);
  for (int q = 0; op.softcap != 0.0f && q < COUNT; q++)
    for (int v = first; v < end; v++) store(scores + q * TILE + v * LANES, soft_cap(op.softcap, load(scores + q * TILE + v * LANES)));
  if (op.distances) add_distances<COUNT>(op, queries, first, end, scores);
  weigh_tile<COUNT>(scores, queries, first, end, padded);
  for (int q = 0; op.type == SP_INT8 && q < COUNT; q++)
    for (int v = first; v < end; v++)
      store(scores + q * TILE + v * LANES, mul(load(scores + q * TILE + v * LANES), load(tile.value_scales + v * LANES)));
  if (tile.stored == Stored::PAIRS)
    add_all_values<COUNT, Stored::PAIRS>(scores, queries, tile, padded, prefetcher);
  else if (tile.stored == Stored::BYTES)
    add_all_values<COUNT, Stored::BYTES>(scores, queries, tile, padded, prefetcher);
  else
    add_all_values<COUNT, Stored::FLOATS>(scores, queries, tile, padded, prefetcher);
}

typedef void (*AttendTile)(const SpOp &, const Query *, const KeyTile &, int64_t, Prefetcher &);
static const AttendTile ATTEND_TILES[MOST_QUERIES + 1] = {nullptr,        attend_tile<1>, attend_tile<2>, attend_tile<3>,
                                                          attend_tile<4>, attend_tile<5>, attend_tile<6>};

// One tile and key head, for the rows that share its slots. softmax_of(row, head) is a query's softmax.
template <typename SoftmaxOf>
static void attend_rows(const Keys &keys, const TileSlots &slots, int64_t kv_head, int64_t padded, Prefetcher &prefetcher,
                        KeyTile &tile, SoftmaxOf softmax_of) {
  const SpOp &op = keys.op;
  const int64_t group = op.heads / op.kv_heads, width = qkv_stride(op);
  int64_t left = __builtin_popcountll(slots.rows) * group, calls = (left + MOST_QUERIES - 1) / MOST_QUERIES, some = 0;
  load_keys(op, slots, kv_head, padded, prefetcher, tile);
  load_values(op, slots, kv_head, padded, calls > 2, tile);
  Query queries[MOST_QUERIES];
  for (uint64_t rows = slots.rows; rows; rows &= rows - 1) {
    const int64_t r = __builtin_ctzll(rows), begin = keys.begin[r] - slots.from, end = keys.end[r] - slots.from;
    const int64_t first = op.distances ? slots.from - keys.position_of(r) + op.before : 0;
    const float *row = op.in + (keys.first_row + r) * width;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
      const float *distances = op.distances ? op.distances + head * (op.before + 1 + op.after) : nullptr;
      queries[some++] = {row + head * op.dim, begin > 0 ? begin : 0, end < TILE ? end : TILE, softmax_of(r, head), distances, first};
      if (some * calls < left) continue;  // calls have equal numbers of queries, or nearly
      ATTEND_TILES[some](op, queries, tile, padded, prefetcher);
      left -= some, calls--, some = 0;
    }
  }
}

// Key heads first .. first + count - 1 of a span.
struct HeadPart {
  int64_t span, first, count;
};

// A part of a block, for all its rows. Softmaxes are cleared first. `next` is the part that this thread will probably compute next.
template <typename SoftmaxOf>
static void attend_part(const Keys &keys, const HeadPart &part, const HeadPart &next, int64_t padded, SoftmaxOf softmax_of) {
  KeyTile tile(AttentionRoom::own().tile, padded, keys.op.factor);
  TileSlots slots[2];
  const SpOp &op = keys.op;
  const int64_t group = op.heads / op.kv_heads, bytes = cached_bytes(op);
  const auto for_each_softmax = [&](auto apply) {
    for (int64_t r = 0; r < keys.rows; r++)
      for (int64_t head = part.first * group; head < (part.first + part.count) * group; head++) apply(softmax_of(r, head));
  };
  for_each_softmax([&](Softmax softmax) { clear_softmax(softmax, padded); });
  TileWalk walk(keys, part.span);
  bool more = walk.next(slots[0]);
  for (int current = 0; more; current ^= 1) {
    TileSlots &following = slots[current ^ 1];
    more = walk.next(following);
    if (!more) TileWalk(keys, next.span).next(following);
    const int64_t first = more ? part.first : next.first;
    Prefetcher prefetcher(following, first * bytes, (first + part.count) * bytes);
    for (int64_t kv_head = part.first; kv_head < part.first + part.count; kv_head++)
      attend_rows(keys, slots[current], kv_head, padded, prefetcher, tile, softmax_of);
  }
  if (reads_pairs(op)) for_each_softmax([&](Softmax softmax) { interleave_pairs(softmax.values, padded); });
}

// A sink's score takes part in the softmax like that of a key whose values are zeros.
static inline void add_sink(float sink, Softmax softmax, int64_t padded) {
  const float maximum = softmax.maximum() > sink ? softmax.maximum() : sink, before = exp_one(softmax.maximum() - maximum);
  scale_values(softmax.values, before, padded);
  softmax.sum() = softmax.sum() * before + exp_one(sink - maximum);
}

static inline void put_attended(const SpOp &op, int64_t row, int64_t head, Softmax softmax) {
  if (op.sinks) add_sink(op.sinks[head], softmax, padded_of(op));
  float *out = op.out + (row * op.heads + head) * op.dim;
  for (int64_t i = 0; i < op.dim; i++) out[i] = softmax.values[i] / softmax.sum();
}

static inline Softmax partial_at(const Plan &plan, const SpOp &op, int64_t row, int64_t head, int64_t span) {
  const int64_t i = (row * op.heads + head) * plan.most_spans + span;
  return softmax_at(plan.partial, plan.count_partial(op), i, padded_of(op));
}

// All spans of a block for some key heads, in order.
static void attend_block(const Keys &keys, int64_t first, int64_t heads, int64_t padded) {
  const int64_t group = keys.op.heads / keys.op.kv_heads, of_row = heads * group, count = keys.rows * of_row;
  float *memory = AttentionRoom::own().take_softmaxes(2 * count, padded);
  const auto all = [&](int64_t i) { return softmax_at(memory, 2 * count, i, padded); };
  const auto one = [&](int64_t i) { return softmax_at(memory, 2 * count, count + i, padded); };
  for (int64_t i = 0; i < count; i++) clear_softmax(all(i), padded);
  const auto softmax_of = [&](int64_t row, int64_t head) { return one(row * of_row + head - first * group); };
  for (int64_t span = keys.first_position / SPAN; span * SPAN < keys.end_position; span++) {
    attend_part(keys, {span, first, heads}, {span + 1, first, heads}, padded, softmax_of);
    for (int64_t i = 0; i < count; i++) merge(all(i), one(i), padded);
  }
  for (int64_t i = 0; i < count; i++) put_attended(keys.op, keys.first_row + i / of_row, first * group + i % of_row, all(i));
}

static inline int64_t attend_pieces(const SpOp &op, const Plan &plan) {
  return plan.blocks.size ? plan.shares_of(op) * plan.parts_of(op) : 0;
}

static void run_attend(const SpOp &op, const SpPass &pass, Plan &plan, int64_t item) {
  const int64_t padded = padded_of(op), parts = plan.parts_of(op), most = plan.heads_of_part(op);
  const auto part_of = [&](int64_t i) -> HeadPart {
    const int64_t first = i % parts * most;
    return {i / parts, first, op.kv_heads - first < most ? op.kv_heads - first : most};
  };
  if (!plan.splits(op)) {
    const HeadPart part = part_of(item);
    const Keys keys(op, pass, plan, plan.blocks[plan.blocks.size - 1 - part.span]);  // later blocks come first: they see more keys
    return attend_block(keys, part.first, part.count, padded);
  }
  const int64_t items = plan.most_spans * parts, index = item % items;  // of a block
  const Keys keys(op, pass, plan, plan.blocks[item / items]);
  const HeadPart part = part_of(index);
  attend_part(keys, part, part_of(index + plan.threads), padded,
              [&](int64_t row, int64_t head) { return partial_at(plan, op, keys.first_row + row, head, part.span); });
}

// If spans are split: merge the spans of a row and head in order.
static void run_merge(const SpOp &op, const Plan &plan, int64_t item) {
  const int64_t row = item / op.heads, head = item % op.heads, padded = padded_of(op);
  const Softmax all = softmax_at(AttentionRoom::own().take_softmaxes(1, padded), 1, 0, padded);
  clear_softmax(all, padded);
  for (int64_t span = 0; span < plan.most_spans; span++) merge(all, partial_at(plan, op, row, head, span), padded);
  put_attended(op, row, head, all);
}

}  // namespace SP_NAMESPACE
