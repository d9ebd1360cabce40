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
  int64_t most_spans = 0, padded = 0;
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
  plan.split = plan.most_spans > 1 && plan.blocks.size * op.kv_heads < 4 * threads;
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

static inline void load_row(const SpOp &op, const void *storage, int64_t slot, int64_t head, int64_t padded, float *to) {
  const int64_t at = (slot * op.kv_heads + head) * op.dim;
  int64_t i = 0;
  if (op.type == SP_F32)
    for (; i + LANES <= op.dim; i += LANES) store(to + i, load((const float *)storage + at + i));
  else
    for (; i + LANES <= op.dim; i += LANES) store(to + i, load_bf16((const uint16_t *)storage + at + i));
  for (; i < op.dim; i++) to[i] = read_weight(op.type, storage, at + i);
  for (; i < padded; i++) to[i] = 0.0f;
}

// Keys turned round, [padded][TILE], and values as they are, [TILE][padded], of positions from .. from + count.
static void load_tile(const Keys &keys, int64_t head, int64_t from, int64_t count, int64_t padded, float *turned, float *values) {
  alignas(64) float rows[LANES * MOST_DIM];
  const void *key_storage = layer_of(keys.pass.keys, keys.op, keys.pass);
  const void *value_storage = layer_of(keys.pass.values, keys.op, keys.pass);
  for (int64_t i = 0; i < count; i += LANES) {
    const int64_t some = count - i < LANES ? count - i : LANES;
    for (int64_t j = 0; j < some; j++) {
      const int64_t slot = keys.slot(from + i + j);
      load_row(keys.op, key_storage, slot, head, padded, rows + j * padded);
      load_row(keys.op, value_storage, slot, head, padded, values + (i + j) * padded);
    }
    for (int64_t j = some; j < LANES; j++) memset(rows + j * padded, 0, padded * sizeof(float));
    for (int64_t d = 0; d < padded; d += LANES) turn(rows + d, padded, turned + d * TILE + i, TILE);
  }
}

static inline void score_tile(const float *query, const float *turned, int64_t dim, float factor, float *scores) {
  Vec sums[TILE_VECS];
  for (int v = 0; v < TILE_VECS; v++) sums[v] = zero();
  for (int64_t d = 0; d < dim; d++) {
    const Vec q = splat(query[d]);
    for (int v = 0; v < TILE_VECS; v++) sums[v] = fma(q, load(turned + d * TILE + v * LANES), sums[v]);
  }
  for (int v = 0; v < TILE_VECS; v++) store(scores + v * LANES, mul(sums[v], splat(factor)));
}

// Take keys low .. high of a tile into a query's running softmax.
static inline void add_tile(float *scores, const float *values, int64_t low, int64_t high, int64_t padded, Running run) {
  for (int64_t i = 0; i < low; i++) scores[i] = -INFINITY;
  for (int64_t i = high; i < TILE; i++) scores[i] = -INFINITY;
  Vec best = load(scores);
  for (int v = 1; v < TILE_VECS; v++) best = max(best, load(scores + v * LANES));
  const float highest = max_lanes(best), maximum = *run.maximum > highest ? *run.maximum : highest;
  scale_values(run.values, exp_one(*run.maximum - maximum), padded);
  Vec sum = zero();
  for (int v = 0; v < TILE_VECS; v++) store(scores + v * LANES, exp(sub(load(scores + v * LANES), splat(maximum))));
  for (int64_t i = 0; i < low; i++) scores[i] = 0.0f;
  for (int64_t i = high; i < TILE; i++) scores[i] = 0.0f;
  for (int v = 0; v < TILE_VECS; v++) sum = add(sum, load(scores + v * LANES));
  *run.sum = *run.sum * exp_one(*run.maximum - maximum) + sum_lanes(sum);
  *run.maximum = maximum;
  for (int64_t d = 0; d < padded; d += 4 * LANES) {
    const int vecs = padded - d < 4 * LANES ? (int)((padded - d) / LANES) : 4;
    Vec acc[4];
    for (int v = 0; v < vecs; v++) acc[v] = load(run.values + d + v * LANES);
    for (int64_t i = low; i < high; i++) {
      const Vec weight = splat(scores[i]);
      for (int v = 0; v < vecs; v++) acc[v] = fma(weight, load(values + i * padded + d + v * LANES), acc[v]);
    }
    for (int v = 0; v < vecs; v++) store(run.values + d + v * LANES, acc[v]);
  }
}

// One span of one block and key head; runs[row * group + head] are begun here. `position` is the block's first row's.
static void attend_span(const SpOp &op, const RowBlock &block, const Keys &keys, int64_t head, int64_t position, int64_t span,
                        int64_t padded, Running *runs) {
  alignas(64) float turned[MOST_DIM * TILE], values[TILE * MOST_DIM], scores[TILE];
  const int64_t group = op.heads / op.kv_heads, width = (op.heads + 2 * op.kv_heads) * op.dim;
  const int64_t last = position + block.rows;  // keys end here
  for (int64_t i = 0; i < block.rows * group; i++) begin_running(runs[i], padded);
  for (int64_t from = span * SPAN; from < (span + 1) * SPAN && from < last; from += TILE) {
    if (op.window && from + TILE <= position + 1 - op.window) continue;
    load_tile(keys, head, from, last - from < TILE ? last - from : TILE, padded, turned, values);
    for (int64_t r = 0; r < block.rows; r++) {
      const int64_t end = position + r + 1, begin = op.window && end > op.window ? end - op.window : 0;
      const int64_t low = begin > from ? begin - from : 0, high = end - from < TILE ? end - from : TILE;
      if (low >= high) continue;
      const float *query = op.in + (block.segment->first + block.first + r) * width + head * group * op.dim;
      for (int64_t g = 0; g < group; g++) {
        score_tile(query + g * op.dim, turned, op.dim, op.factor, scores);
        add_tile(scores, values, low, high, padded, runs[r * group + g]);
      }
    }
  }
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
  for (int64_t span = 0; span * SPAN < position + block.rows; span++) {
    attend_span(op, block, keys, head, position, span, padded, one);
    for (int64_t i = 0; i < count; i++)
      if (*one[i].sum != 0.0f) merge(all[i], one[i], padded);
  }
  for (int64_t i = 0; i < count; i++)
    put_attended(op, block.segment->first + block.first + i / group, head * group + i % group, all[i]);
}

static inline int64_t attend_pieces(const SpOp &op, const Plan &plan) {
  return plan.blocks.size * op.kv_heads * (plan.split ? plan.most_spans : 1);
}

static void run_attend(const SpOp &op, const SpPass &pass, Plan &plan, int64_t piece) {
  const int64_t group = op.heads / op.kv_heads, spans = plan.split ? plan.most_spans : 1;
  const RowBlock &block = plan.blocks[piece / spans / op.kv_heads];
  const int64_t head = piece / spans % op.kv_heads, span = piece % spans;
  Keys keys(op, pass, *block.segment);
  const int64_t position = find_keys(block, keys);
  if (!plan.split) return attend_block(op, block, keys, head, position, plan.padded);
  Running runs[BLOCK_ROWS * MOST_GROUP];
  for (int64_t i = 0; i < block.rows * group; i++) {
    const int64_t row = block.segment->first + block.first + i / group;
    runs[i] = running_at(partial_at(plan, op, row, head * group + i % group, span), plan.padded);
  }
  attend_span(op, block, keys, head, position, span, plan.padded, runs);
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
