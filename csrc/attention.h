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

constexpr int64_t TILE = 64, SPAN = 512, MOST_DIM = 256, BLOCK_ROWS = 8, MOST_GROUP = 32, MOST_DEPTH = 512;
constexpr int TILE_VECS = TILE / LANES;

// Rows of one sequence that are computed together: several of a chain, or one node of a tree.
struct RowBlock {
  const SpSegment *segment;
  int64_t first, rows;  // within the segment
};

struct Plan {
  List<RowBlock> blocks;
  List<float> partial;  // results of spans: maximum, sum, values
  int64_t most_spans = 0, padded = 0, threads = 1;
  bool split = false;  // whether the spans of a row are pieces of their own
};

static void plan_attention(const SpOp &op, const SpPass &pass, int threads, Plan &plan) {
  plan.blocks.size = 0;
  int64_t longest = 0;
  for (int64_t s = 0; s < pass.num_segments; s++) {
    const SpSegment &segment = pass.segments[s];
    const int64_t chain = segment.tree < 0 ? segment.rows : segment.chain;
    for (int64_t r = 0; r < chain; r += BLOCK_ROWS)
      plan.blocks.push({&segment, r, chain - r < BLOCK_ROWS ? chain - r : BLOCK_ROWS});
    for (int64_t r = chain; r < segment.rows; r++) plan.blocks.push({&segment, r, 1});
    if (segment.start + segment.rows > longest) longest = segment.start + segment.rows;
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

// Where the keys of one row block are. A tree node's last keys are its ancestors'.
struct Keys {
  const SpOp &op;
  const SpPass &pass;
  const SpSegment &segment;
  int64_t tree_start;              // the first position whose key is a tree node's
  int64_t ancestors[MOST_DEPTH];   // nodes, by depth

  Keys(const SpOp &o, const SpPass &p, const SpSegment &s) : op(o), pass(p), segment(s), tree_start(INT64_MAX) {}

  int64_t slot(int64_t position) const {
    const int64_t place = position < tree_start ? position : tree_start + ancestors[position - tree_start];
    return segment.table[place / pass.block] * pass.block + place % pass.block;
  }
};

static inline int64_t depth_of(const SpPass &pass, const SpSegment &segment, int64_t node) {
  int64_t depth = 0;
  for (; node >= 0; node = pass.parents[segment.tree + node]) depth++;
  return depth;
}

// Work out a block's keys; returns the position of its first row.
static inline int64_t find_keys(const RowBlock &block, Keys &keys) {
  const SpSegment &segment = *block.segment;
  if (segment.tree < 0 || block.first < segment.chain) {
    keys.tree_start = INT64_MAX;
    return segment.start + block.first;
  }
  keys.tree_start = segment.start + segment.chain;
  int64_t node = block.first - segment.chain, depth = depth_of(keys.pass, segment, node);
  const int64_t position = keys.tree_start + depth - 1;
  for (; node >= 0; node = keys.pass.parents[segment.tree + node]) keys.ancestors[--depth] = node;
  return position;
}

// Where the keys and values of a tile are, those of the first head.
struct Rows {
  static constexpr int64_t RUNS = 2;  // of keys, and as many of values
  const char *keys[TILE], *values[TILE];
  const char *in_turn[2 * TILE + 2];  // all of them, so that several runs take turns, as linear layers' streams do; behind them 0
  int64_t count = 0;
};

static inline void find_rows(const Keys &keys, int64_t from, int64_t end, Rows &rows) {
  const char *key = (const char *)layer_of(keys.pass.keys, keys.op, keys.pass);
  const char *value = (const char *)layer_of(keys.pass.values, keys.op, keys.pass);
  const int64_t size = keys.pass.block, stride = keys.op.kv_heads * keys.op.dim * real_size(keys.op.type);
  int64_t block = from / size, place = from % size, all = 0;
  rows.count = end - from < TILE ? end - from : TILE;
  for (int64_t i = 0; i < rows.count; i++) {
    const int64_t slot = from + i < keys.tree_start ? keys.segment.table[block] * size + place : keys.slot(from + i);
    rows.keys[i] = key + slot * stride, rows.values[i] = value + slot * stride;
    if (++place == size) place = 0, block++;
  }
  for (int64_t i = 0; i < TILE; i++) {
    const int64_t row = i % Rows::RUNS * (TILE / Rows::RUNS) + i / Rows::RUNS;
    if (row < rows.count) rows.in_turn[all++] = rows.keys[row], rows.in_turn[all++] = rows.values[row];
  }
  if (!all) rows.in_turn[all++] = (const char *)&rows;  // there is nothing to ask for
  rows.in_turn[all] = nullptr;
}

// The next tile, asked for line by line while this one is computed: a head's rows are too far apart for the processor to guess
// them, and all of them at once would only wait for one another. Behind the last row comes that again.
struct Ahead {
  const char *line, *stop, *const *next;
  int64_t begin, bytes;  // of a row

  Ahead(const Rows &rows, int64_t from, int64_t to) : next(rows.in_turn), begin(from), bytes(to - from) { go_on(); }

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

static void load_keys(const SpOp &op, const Rows &from, int64_t head, int64_t padded, Ahead &ahead, KeyTile &tile) {
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

// Values are read in place where they are whole vectors; bfloat16 only if it is not widened `again` and again.
static void load_values(const SpOp &op, const Rows &from, int64_t head, int64_t padded, bool again, KeyTile &tile) {
  const int64_t offset = head * op.dim * real_size(op.type);
  tile.narrow = op.type != SP_F32 && op.dim % (2 * LANES) == 0 && !again;
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

// One span of a block for key heads first .. first + count, a tile at a time: positions lie one after the other in memory,
// heads within them. `run_at(row, head)` is a query's running softmax, begun here; `position` is the block's first row's;
// `next_span` is the one that this thread probably takes next.
template <typename RunAt>
static void attend_span(const SpOp &op, const RowBlock &block, const Keys &keys, int64_t first, int64_t count, int64_t position,
                        int64_t span, int64_t next_span, int64_t padded, RunAt run_at) {
  KeyTile tile;
  Rows found[2];
  const int64_t group = op.heads / op.kv_heads, width = (op.heads + 2 * op.kv_heads) * op.dim;
  const int64_t row_bytes = op.dim * real_size(op.type), last = position + block.rows;  // keys end here
  const int64_t oldest = op.window && position + 1 > op.window ? position + 1 - op.window : 0, seen = oldest / TILE * TILE;
  const int64_t begin = span * SPAN > seen ? span * SPAN : seen, end = (span + 1) * SPAN < last ? (span + 1) * SPAN : last;
  for (int64_t r = 0; r < block.rows; r++)
    for (int64_t head = first * group; head < (first + count) * group; head++) begin_running(run_at(r, head), padded);
  find_rows(keys, begin, last, found[0]);
  for (int64_t from = begin, turn = 0; from < end; from += TILE, turn ^= 1) {
    const Rows &rows = found[turn];
    find_rows(keys, from + TILE < (span + 1) * SPAN ? from + TILE : next_span * SPAN, last, found[turn ^ 1]);
    Ahead ahead(found[turn ^ 1], first * row_bytes, (first + count) * row_bytes);
    for (int64_t kv_head = first; kv_head < first + count; kv_head++) {
      load_keys(op, rows, kv_head, padded, ahead, tile);
      load_values(op, rows, kv_head, padded, block.rows * group > 2 * TOGETHER, tile);
      for (int64_t r = 0; r < block.rows; r++) {
        const int64_t stop = position + r + 1, start = op.window && stop > op.window ? stop - op.window : 0;
        const int64_t low = start > from ? start - from : 0, high = stop - from < TILE ? stop - from : TILE;
        if (low >= high) continue;
        const float *queries = op.in + (block.segment->first + block.first + r) * width;
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head += TOGETHER) {
          const int64_t rest = (kv_head + 1) * group - head, some = rest < TOGETHER ? rest : TOGETHER;
          Running runs[TOGETHER];
          for (int64_t i = 0; i < some; i++) runs[i] = run_at(r, head + i);
          ATTEND_TILES[some](op, queries + head * op.dim, tile, low, high, padded, ahead, runs);
        }
      }
    }
  }
  if (begin >= end || !tile.narrow) return;
  for (int64_t r = 0; r < block.rows; r++)
    for (int64_t head = first * group; head < (first + count) * group; head++) part_pairs(run_at(r, head).values, padded);
}

static inline void put_attended(const SpOp &op, int64_t row, int64_t head, Running run) {
  float *out = op.out + (row * op.heads + head) * op.dim;
  for (int64_t i = 0; i < op.dim; i++) out[i] = run.values[i] / *run.sum;
}

static inline float *partial_at(Plan &plan, const SpOp &op, int64_t row, int64_t head, int64_t span) {
  return plan.partial.items + ((row * op.heads + head) * plan.most_spans + span) * (plan.padded + 2);
}

// All spans of a block and key head, one after the other.
static void attend_block(const SpOp &op, const RowBlock &block, const Keys &keys, int64_t head, int64_t position, int64_t padded) {
  alignas(64) float memory[2][BLOCK_ROWS * MOST_GROUP * (MOST_DIM + 2)];
  const int64_t group = op.heads / op.kv_heads, count = block.rows * group;
  Running all[BLOCK_ROWS * MOST_GROUP], one[BLOCK_ROWS * MOST_GROUP];
  for (int64_t i = 0; i < count; i++) {
    all[i] = running_at(memory[0] + i * (padded + 2), padded), one[i] = running_at(memory[1] + i * (padded + 2), padded);
    begin_running(all[i], padded);
  }
  const auto run_at = [&](int64_t row, int64_t query) { return one[row * group + query - head * group]; };
  for (int64_t span = 0; span * SPAN < position + block.rows; span++) {
    attend_span(op, block, keys, head, 1, position, span, span + 1, padded, run_at);
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
  Keys keys(op, pass, *block.segment);
  const int64_t position = find_keys(block, keys);
  if (!plan.split) return attend_block(op, block, keys, share, position, plan.padded);
  attend_span(op, block, keys, 0, op.kv_heads, position, share, share + plan.threads, plan.padded, [&](int64_t row, int64_t head) {
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
