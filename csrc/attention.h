// Attention over a cache, walking the block table. Scores, maxima and sums of a query run over its own keys in order of
// position, in tiles and spans that begin at fixed positions; so it does not matter which rows are beside it, how a prompt
// was cut, or which thread does what.
//
//   keys   | tile 0 | tile 1 | ...          TILE positions: one step of the running softmax
//          |       span 0        | span 1   SPAN positions: a result of its own, merged in order
//
// A node of a tree sees the chain before it and then its own ancestors: key p is the ancestor at that depth.
#pragma once
#include "rows.h"

namespace SP_NAMESPACE {

constexpr int64_t TILE = 64, SPAN = 512, MOST_DIM = 256, BLOCK_ROWS = 8, MOST_GROUP = 32;
constexpr int TILE_VECS = TILE / LANES;

// Successive rows of one sequence that are computed together, of its chain and of its tree.
struct RowBlock {
  const SpSegment *segment;
  int64_t first, rows;  // within the segment
};

// A node of a tree. Links from tile to tile let a path be followed without a step for each of its nodes.
struct Node {
  int64_t position;
  int64_t before;  // the nearest ancestor in an earlier tile; -1 = none
};

struct Plan {
  List<RowBlock> blocks;
  List<Node> nodes;     // of all trees, as pass.parents has them
  List<float> partial;  // results of spans: maximum, sum, values
  int64_t most_spans = 0, padded = 0, threads = 1;
  bool split = false;  // whether the spans of a row are pieces of their own
};

static inline int64_t chain_of(const SpSegment &segment) { return segment.tree < 0 ? segment.rows : segment.chain; }

// Work out a tree's nodes, parents first; returns the position behind its deepest one.
static int64_t plan_nodes(const SpPass &pass, const SpSegment &segment, Plan &plan) {
  const int64_t count = segment.rows - segment.chain, tree_start = segment.start + segment.chain;
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

static void plan_attention(const SpOp &op, const SpPass &pass, int threads, Plan &plan) {
  plan.blocks.size = plan.nodes.size = 0;
  int64_t longest = 0;
  for (int64_t s = 0; s < pass.num_segments; s++) {
    const SpSegment &segment = pass.segments[s];
    for (int64_t r = 0; r < segment.rows; r += BLOCK_ROWS)
      plan.blocks.push({&segment, r, segment.rows - r < BLOCK_ROWS ? segment.rows - r : BLOCK_ROWS});
    const int64_t end = segment.tree < 0 ? segment.start + segment.rows : plan_nodes(pass, segment, plan);
    if (end > longest) longest = end;
  }
  plan.padded = (op.dim + LANES - 1) / LANES * LANES;
  plan.most_spans = (longest + SPAN - 1) / SPAN;
  plan.threads = threads;
  plan.split = plan.most_spans > 1 && plan.blocks.size < 4 * threads;
  if (plan.split) plan.partial.resize(pass.rows * op.heads * plan.most_spans * (plan.padded + 2));
}

// What one query's softmax has seen so far.
struct Running {
  float *values, *maximum, *sum;  // values [padded], not divided by the sum yet
};

static inline Running running_at(float *memory, int64_t padded) { return {memory, memory + padded, memory + padded + 1}; }

static inline void begin_running(Running run, int64_t padded) {
  for (int64_t i = 0; i < padded; i++) run.values[i] = 0.0f;
  *run.maximum = -INFINITY, *run.sum = 0.0f;
}

static inline float exp_one(float x) { return x == -INFINITY ? 0.0f : (float)first_lane(exp(splat(x))); }

static inline void scale_values(float *values, float factor, int64_t padded) {
  for (int64_t i = 0; i < padded; i += LANES) store(values + i, mul(load(values + i), splat(factor)));
}

// Add a later span's result to what came before it.
static inline void merge(Running all, Running span, int64_t padded) {
  const float maximum = *all.maximum > *span.maximum ? *all.maximum : *span.maximum;
  const float before = exp_one(*all.maximum - maximum), factor = exp_one(*span.maximum - maximum);
  for (int64_t i = 0; i < padded; i += LANES)
    store(all.values + i, fma(load(span.values + i), splat(factor), mul(load(all.values + i), splat(before))));
  *all.sum = *span.sum * factor + *all.sum * before;
  *all.maximum = maximum;
}

// The positions that each row of a block sees, and where their keys are. A node's last keys are its ancestors' and its own.
struct Keys {
  const SpOp &op;
  const SpPass &pass;
  const SpSegment &segment;
  const Node *nodes;
  int64_t first_node, tree_start;                 // the block's first row as a node (negative = of the chain); the first position of a node
  int64_t rows, begin[BLOCK_ROWS], end[BLOCK_ROWS];  // row r sees positions begin[r] .. end[r] - 1
  int64_t least = INT64_MAX, most = 0;               // the least begin, and the last end

  Keys(const SpOp &o, const SpPass &p, const Plan &plan, const RowBlock &block)
      : op(o), pass(p), segment(*block.segment), nodes(segment.tree < 0 ? nullptr : plan.nodes.items + segment.tree),
        first_node(block.first - chain_of(segment)), tree_start(segment.start + chain_of(segment)), rows(block.rows) {
    for (int64_t r = 0; r < rows; r++) {
      end[r] = (first_node + r < 0 ? segment.start + block.first + r : nodes[first_node + r].position) + 1;
      begin[r] = op.window && end[r] > op.window ? end[r] - op.window : 0;
      least = begin[r] < least ? begin[r] : least, most = end[r] > most ? end[r] : most;
    }
  }

  // The node at a position of the tree on the path to row r.
  int64_t node_at(int64_t r, int64_t position) const {
    int64_t node = first_node + r;
    while (nodes[node].position / TILE > position / TILE) node = nodes[node].before;
    while (nodes[node].position > position) node = pass.parents[segment.tree + node];
    return node;
  }

  // The rows, as bits, that see keys of the tile at `from`.
  uint32_t rows_at(int64_t from) const {
    uint32_t found = 0;
    for (int64_t r = 0; r < rows; r++) found |= (uint32_t)(begin[r] < from + TILE && from < end[r]) << r;
    return found;
  }

  // Whether all keys of the tile at `from` that row r sees are also keys of row `other`: the last one decides, for a node has but
  // one path.
  bool shares(int64_t r, int64_t other, int64_t from) const {
    const int64_t last = (end[r] < from + TILE ? end[r] : from + TILE) - 1;
    return last < end[other] && (last < tree_start || node_at(r, last) == node_at(other, last));
  }
};

// A tile as some rows of a block see it, and where the keys and values are, those of the first head.
struct TileSlots {
  static constexpr int64_t RUNS = 2;  // of keys, and as many of values
  const char *keys[TILE], *values[TILE];
  const char *in_turn[2 * TILE + 2];  // all of them, so that several runs take turns, as linear layers' streams do; behind them 0
  int64_t from = 0, count = 0;  // its first position, and how many there are
  uint32_t rows = 0;            // as bits
};

// The order in which slots are prefetched.
static inline void order_slots(TileSlots &slots) {
  constexpr int64_t RUNS = TileSlots::RUNS;
  int64_t all = 0;
  for (int64_t i = 0; i < TILE; i++) {
    const int64_t at = i % RUNS * (TILE / RUNS) + i / RUNS;
    if (at < slots.count) slots.in_turn[all++] = slots.keys[at], slots.in_turn[all++] = slots.values[at];
  }
  if (!all) slots.in_turn[all++] = (const char *)&slots;  // there is nothing to prefetch
  slots.in_turn[all] = nullptr;
}

// Find the slots of the tile at `from` along the path to row r.
static inline void find_slots(const Keys &keys, int64_t r, int64_t from, TileSlots &slots) {
  const char *key = (const char *)layer_of(keys.pass.keys, keys.op, keys.pass);
  const char *value = (const char *)layer_of(keys.pass.values, keys.op, keys.pass);
  const int64_t size = keys.pass.block, stride = keys.op.kv_heads * keys.op.dim * real_size(keys.op.type);
  const int64_t *table = keys.segment.table;
  const auto put = [&](int64_t i, int64_t slot) { slots.keys[i] = key + slot * stride, slots.values[i] = value + slot * stride; };
  slots.from = from, slots.count = keys.end[r] - from < TILE ? keys.end[r] - from : TILE;
  int64_t i = 0, block = from / size, place = from % size;
  for (; i < slots.count && from + i < keys.tree_start; i++) {
    put(i, table[block] * size + place);
    if (++place == size) place = 0, block++;
  }
  if (i == slots.count) return;
  int64_t node = keys.node_at(r, from + slots.count - 1);
  for (int64_t j = slots.count - 1; j >= i; j--, node = keys.pass.parents[keys.segment.tree + node])
    put(j, table[(keys.tree_start + node) / size] * size + (keys.tree_start + node) % size);
}

// Goes through a span tile by tile, and through a tile once for all rows of the block that find the same keys there: those below a
// tree are loaded once, and those of a path once for all nodes along it.
struct TileWalk {
  const Keys &keys;
  int64_t from, end;     // positions: of the tile, and behind the last one
  uint32_t waiting = 0;  // rows that have not had it

  TileWalk(const Keys &k, int64_t span) : keys(k) {
    const int64_t begin = k.least > span * SPAN ? k.least : span * SPAN;
    from = begin / TILE * TILE - TILE;
    end = (span + 1) * SPAN < k.most ? (span + 1) * SPAN : k.most;
  }

  // Find the next slots; whether there are any. Parents come before children, so the last row takes those of its path along.
  bool next(TileSlots &slots) {
    slots.count = 0, slots.rows = 0;
    while (!waiting) {
      if ((from += TILE) >= end) return false;
      waiting = keys.rows_at(from);
    }
    const int64_t last = 31 - __builtin_clz(waiting);
    for (int64_t r = 0; r <= last; r++)
      if ((waiting >> r & 1) && keys.shares(r, last, from)) slots.rows |= 1u << r;
    waiting &= ~slots.rows;
    find_slots(keys, last, from, slots);
    return true;
  }
};

// The next tile, asked for line by line while this one is computed: a head's rows are too far apart for the processor to guess
// them, and all of them at once would only wait for one another. Behind the last row comes that again.
struct Ahead {
  const char *line, *stop, *const *next;
  int64_t begin, bytes;  // of a row

  Ahead(const TileSlots &slots, int64_t from, int64_t to) : next(slots.in_turn), begin(from), bytes(to - from) { go_on(); }

  void go_on() {
    line = *next + begin, stop = line + bytes;
    if (next[1]) next++;
  }

  void prefetch_next() {
    prefetch(line), prefetch(line + 64);
    if ((line += 128) >= stop) go_on();
  }
};

// A tile's keys transposed round, so that a vector holds several positions, and where its values are.
struct KeyTile {
  alignas(64) float transposed[MOST_DIM * TILE];  // [dim][TILE]; or [dim / 2][TILE], two bfloat16 in a dword
  alignas(64) float copied[TILE * MOST_DIM];  // values that could not be read in place
  const char *copies[TILE];
  const char *const *values;
  int64_t offset;      // of a head's values in their row, in bytes
  bool pairs, narrow;  // whether keys are pairs of bfloat16, and values
};

alignas(64) static const float NOTHING[MOST_DIM] = {};

// Turn `words` dwords of each key, from rows that are whole vectors.
static inline void transpose_keys(const float *const *rows, int64_t words, Ahead &ahead, float *to) {
  const float *at[LANES];
  for (int64_t d = 0; d < words; d += LANES) {
    for (int j = 0; j < LANES; j++) at[j] = rows[j] + d;
    for (int i = 0; i < 4; i++) ahead.prefetch_next();
    transpose(at, to + d * TILE, TILE);
  }
}

static inline void load_row(const SpOp &op, const char *row, int64_t padded, float *to) {
  int64_t i = 0;
  if (op.type == SP_F32)
    for (; i + LANES <= op.dim; i += LANES) store(to + i, load((const float *)row + i));
  else
    for (; i + LANES <= op.dim; i += LANES) store(to + i, load_bf16((const uint16_t *)row + i));
  for (; i < op.dim; i++) to[i] = read_weight(op.type, row, i);
  for (; i < padded; i++) to[i] = 0.0f;
}

static void load_keys(const SpOp &op, const TileSlots &from, int64_t head, int64_t padded, Ahead &ahead, KeyTile &tile) {
  alignas(64) float copied[LANES * MOST_DIM];
  const int64_t offset = head * op.dim * real_size(op.type), words = op.type == SP_F32 ? op.dim : op.dim / 2;
  const bool whole = (op.type == SP_F32 || op.dim % 2 == 0) && words % LANES == 0;  // else there are tails to fill up
  tile.pairs = whole && op.type != SP_F32;
  for (int64_t i = 0; i < from.count; i += LANES) {
    const float *rows[LANES];
    const int64_t some = from.count - i < LANES ? from.count - i : LANES;
    for (int64_t j = 0; j < some; j++) {
      rows[j] = whole ? (const float *)(from.keys[i + j] + offset) : copied + j * padded;
      if (!whole) load_row(op, from.keys[i + j] + offset, padded, copied + j * padded);
    }
    for (int64_t j = some; j < LANES; j++) rows[j] = NOTHING;
    transpose_keys(rows, whole ? words : padded, ahead, tile.transposed + i);
  }
}

// Values are read in place where they are whole vectors.
static void load_values(const SpOp &op, const TileSlots &from, int64_t head, int64_t padded, KeyTile &tile) {
  const int64_t offset = head * op.dim * real_size(op.type);
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

// Queries of a group are taken together, so that a key is loaded once for several; each has sums of its own. (Loops
// over them that the compiler unrolled later would leave them in memory.)
template <int COUNT, bool PAIRS>
static inline void score_tile(const float *queries, const float *transposed, int64_t dim, float factor, Ahead &all, float *scores) {
  Ahead ahead = all;  // in registers
  Vec sums[COUNT][TILE_VECS];
  for (int q = 0; q < COUNT; q++)
    for (int v = 0; v < TILE_VECS; v++) sums[q][v] = zero();
  for (int64_t d = 0; d < dim; d += PAIRS ? 2 : 1, queries += PAIRS ? 2 : 1, transposed += TILE) {
    ahead.prefetch_next();
    if (!PAIRS) ahead.prefetch_next();
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
  all = ahead;
#pragma GCC unroll 8
  for (int q = 0; q < COUNT; q++)
#pragma GCC unroll 8
    for (int v = 0; v < TILE_VECS; v++) store(scores + q * TILE + v * LANES, mul(sums[q][v], splat(factor)));
}

// Turn scores of keys low .. high of a tile into weights, and rescale what the queries' running softmaxes have seen. What
// is done for one query waits for its maximum, so that the others' turn comes between.
template <int COUNT>
static inline void weigh_tile(float *scores, int64_t low, int64_t high, int64_t padded, Running *runs) {
  const auto fill = [&](float nothing) {
    if (low == 0 && high == TILE) return;
    for (int q = 0; q < COUNT; q++) {
      for (int64_t i = 0; i < low; i++) scores[q * TILE + i] = nothing;
      for (int64_t i = high; i < TILE; i++) scores[q * TILE + i] = nothing;
    }
  };
  float maximum[COUNT];
  fill(-INFINITY);
  for (int q = 0; q < COUNT; q++) {
    Vec best = load(scores + q * TILE);
    for (int v = 1; v < TILE_VECS; v++) best = max(best, load(scores + q * TILE + v * LANES));
    const float highest = max_lanes(best);
    maximum[q] = *runs[q].maximum > highest ? *runs[q].maximum : highest;
  }
  for (int q = 0; q < COUNT; q++)
    for (int v = 0; v < TILE_VECS; v++) {
      float *at = scores + q * TILE + v * LANES;
      store(at, exp(sub(load(at), splat(maximum[q]))));
    }
  fill(0.0f);
  for (int q = 0; q < COUNT; q++) {
    if (*runs[q].maximum != maximum[q]) {
      const float before = exp_one(*runs[q].maximum - maximum[q]);
      scale_values(runs[q].values, before, padded);
      *runs[q].sum *= before;
      *runs[q].maximum = maximum[q];
    }
    Vec sum = zero();
    for (int v = 0; v < TILE_VECS; v++) sum = add(sum, load(scores + q * TILE + v * LANES));
    *runs[q].sum += sum_lanes(sum);
  }
}

// Add the values of keys low .. high, WIDE vectors of them at a time. Of pairs of bfloat16, the first of all pairs in a vector
// come before the second (`part_pairs` undoes it).
template <int COUNT, int WIDE, bool NARROW>
static inline void add_values(const float *weights, const KeyTile &tile, int64_t low, int64_t high, int64_t d, Ahead &all,
                              Running *runs) {
  Ahead ahead = all;
  Vec acc[COUNT][WIDE];
  for (int q = 0; q < COUNT; q++)
    for (int v = 0; v < WIDE; v++) acc[q][v] = load(runs[q].values + d + v * LANES);
  const int64_t offset = tile.offset + d * (NARROW ? 2 : 4);
  for (int64_t i = low; i < high; i++) {
    ahead.prefetch_next();
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
  all = ahead;
  for (int q = 0; q < COUNT; q++)
    for (int v = 0; v < WIDE; v++) store(runs[q].values + d + v * LANES, acc[q][v]);
}

template <int COUNT, bool NARROW>
static inline void add_all_values(const float *weights, const KeyTile &tile, int64_t low, int64_t high, int64_t padded, Ahead &ahead,
                                  Running *runs) {
  constexpr int REST = NARROW ? 2 : 1;
  int64_t d = 0;
  for (; d + 4 * LANES <= padded; d += 4 * LANES) add_values<COUNT, 4, NARROW>(weights, tile, low, high, d, ahead, runs);
  for (; d < padded; d += REST * LANES) add_values<COUNT, REST, NARROW>(weights, tile, low, high, d, ahead, runs);
}

static inline void part_pairs(float *values, int64_t padded) {
  float pairs[2 * LANES];
  for (int64_t d = 0; d < padded; d += 2 * LANES) {
    memcpy(pairs, values + d, sizeof pairs);
    for (int i = 0; i < LANES; i++) values[d + 2 * i] = pairs[i], values[d + 2 * i + 1] = pairs[LANES + i];
  }
}

template <int COUNT>
static void attend_tile(const SpOp &op, const float *queries, const KeyTile &tile, int64_t low, int64_t high, int64_t padded,
                        Ahead &ahead, Running *runs) {
  alignas(64) float scores[COUNT * TILE];
  if (tile.pairs)
    score_tile<COUNT, true>(queries, tile.transposed, op.dim, op.factor, ahead, scores);
  else
    score_tile<COUNT, false>(queries, tile.transposed, op.dim, op.factor, ahead, scores);
  weigh_tile<COUNT>(scores, low, high, padded, runs);
  if (tile.narrow)
    add_all_values<COUNT, true>(scores, tile, low, high, padded, ahead, runs);
  else
    add_all_values<COUNT, false>(scores, tile, low, high, padded, ahead, runs);
}

typedef void (*AttendTile)(const SpOp &, const float *, const KeyTile &, int64_t, int64_t, int64_t, Ahead &, Running *);
constexpr int TOGETHER = TILE_VECS == 4 ? 4 : 1;  // queries whose sums fit the registers
static const AttendTile ATTEND_TILES[] = {nullptr, attend_tile<1>, attend_tile<2>, attend_tile<3>, attend_tile<4>};

// Whether bfloat16 values are read in place. They are copied as float32 where so many queries take them that widening them again
// for each costs more.
static inline bool reads_narrow(const SpOp &op, int64_t rows) {
  return op.type != SP_F32 && op.dim % (2 * LANES) == 0 && rows * (op.heads / op.kv_heads) <= 2 * TOGETHER;
}

// One tile and key head for the rows that see it; `run_at(row, head)` is a query's running softmax.
template <typename RunAt>
static void attend_rows(const Keys &keys, const RowBlock &block, const TileSlots &slots, int64_t kv_head, int64_t padded,
                        Ahead &ahead, KeyTile &tile, RunAt run_at) {
  const SpOp &op = keys.op;
  const int64_t group = op.heads / op.kv_heads, width = (op.heads + 2 * op.kv_heads) * op.dim;
  load_keys(op, slots, kv_head, padded, ahead, tile);
  load_values(op, slots, kv_head, padded, tile);
  for (uint32_t rows = slots.rows; rows; rows &= rows - 1) {
    const int64_t r = __builtin_ctz(rows), begin = keys.begin[r] - slots.from, end = keys.end[r] - slots.from;
    const int64_t low = begin > 0 ? begin : 0, high = end < TILE ? end : TILE;
    const float *queries = op.in + (block.segment->first + block.first + r) * width;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head += TOGETHER) {
      const int64_t rest = (kv_head + 1) * group - head, some = rest < TOGETHER ? rest : TOGETHER;
      Running runs[TOGETHER];
      for (int64_t i = 0; i < some; i++) runs[i] = run_at(r, head + i);
      ATTEND_TILES[some](op, queries + head * op.dim, tile, low, high, padded, ahead, runs);
    }
  }
}

// One span of a block for key heads first .. first + count, a tile at a time: positions lie one after the other in memory,
// heads within them. Running softmaxes are begun here; `next_span` is the one that this thread probably takes next.
template <typename RunAt>
static void attend_span(const Keys &keys, const RowBlock &block, int64_t first, int64_t count, int64_t span, int64_t next_span,
                        int64_t padded, RunAt run_at) {
  KeyTile tile;
  TileSlots found[2];
  const SpOp &op = keys.op;
  const int64_t group = op.heads / op.kv_heads, row_bytes = op.dim * real_size(op.type);
  const auto each_run = [&](auto visit) {
    for (int64_t r = 0; r < block.rows; r++)
      for (int64_t head = first * group; head < (first + count) * group; head++) visit(run_at(r, head));
  };
  each_run([&](Running run) { begin_running(run, padded); });
  tile.narrow = reads_narrow(op, block.rows);
  TileWalk walk(keys, span);
  bool more = walk.next(found[0]);
  for (int turn = 0; more; turn ^= 1) {
    TileSlots &next = found[turn ^ 1];
    more = walk.next(next);
    if (!more) TileWalk(keys, next_span).next(next);
    order_slots(next);
    Ahead ahead(next, first * row_bytes, (first + count) * row_bytes);
    for (int64_t kv_head = first; kv_head < first + count; kv_head++)
      attend_rows(keys, block, found[turn], kv_head, padded, ahead, tile, run_at);
  }
  if (tile.narrow) each_run([&](Running run) { part_pairs(run.values, padded); });
}

static inline void put_attended(const SpOp &op, int64_t row, int64_t head, Running run) {
  float *out = op.out + (row * op.heads + head) * op.dim;
  for (int64_t i = 0; i < op.dim; i++) out[i] = run.values[i] / *run.sum;
}

static inline float *partial_at(Plan &plan, const SpOp &op, int64_t row, int64_t head, int64_t span) {
  return plan.partial.items + ((row * op.heads + head) * plan.most_spans + span) * (plan.padded + 2);
}

// All spans of a block and key head, one after the other.
static void attend_block(const Keys &keys, const RowBlock &block, int64_t head, int64_t padded) {
  alignas(64) float memory[2][BLOCK_ROWS * MOST_GROUP * (MOST_DIM + 2)];
  const SpOp &op = keys.op;
  const int64_t group = op.heads / op.kv_heads, count = block.rows * group;
  Running all[BLOCK_ROWS * MOST_GROUP], one[BLOCK_ROWS * MOST_GROUP];
  for (int64_t i = 0; i < count; i++) {
    all[i] = running_at(memory[0] + i * (padded + 2), padded), one[i] = running_at(memory[1] + i * (padded + 2), padded);
    begin_running(all[i], padded);
  }
  const auto run_at = [&](int64_t row, int64_t query) { return one[row * group + query - head * group]; };
  for (int64_t span = 0; span * SPAN < keys.most; span++) {
    attend_span(keys, block, head, 1, span, span + 1, padded, run_at);
    for (int64_t i = 0; i < count; i++)
      if (*one[i].sum != 0.0f) merge(all[i], one[i], padded);
  }
  for (int64_t i = 0; i < count; i++)
    put_attended(op, block.segment->first + block.first + i / group, head * group + i % group, all[i]);
}

// A piece of work is a block and a key head, or, split, a block and a span with all its heads.
static inline int64_t attend_pieces(const SpOp &op, const Plan &plan) {
  return plan.blocks.size * (plan.split ? plan.most_spans : op.kv_heads);
}

static void run_attend(const SpOp &op, const SpPass &pass, Plan &plan, int64_t piece) {
  const int64_t shares = plan.split ? plan.most_spans : op.kv_heads, share = piece % shares;
  const RowBlock &block = plan.blocks[piece / shares];
  const Keys keys(op, pass, plan, block);
  if (!plan.split) return attend_block(keys, block, share, plan.padded);
  attend_span(keys, block, 0, op.kv_heads, share, share + plan.threads, plan.padded, [&](int64_t row, int64_t head) {
    return running_at(partial_at(plan, op, block.segment->first + block.first + row, head, share), plan.padded);
  });
}

// After a split: merge a row's spans in order. A span without keys changes nothing.
static void run_merge(const SpOp &op, Plan &plan, int64_t piece) {
  alignas(64) float memory[MOST_DIM + 2];
  const int64_t row = piece / op.heads, head = piece % op.heads;
  Running all = running_at(memory, plan.padded);
  begin_running(all, plan.padded);
  for (int64_t span = 0; span < plan.most_spans; span++) {
    Running one = running_at(partial_at(plan, op, row, head, span), plan.padded);
    if (*one.sum != 0.0f) merge(all, one, plan.padded);
  }
  put_attended(op, row, head, all);
}

}  // namespace SP_NAMESPACE
