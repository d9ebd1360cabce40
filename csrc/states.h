// What may take the place of attention: a convolution over the last positions of a sequence, and a gated delta rule (arXiv 2412.06464) or
// Mamba 2 (arXiv 2405.21060).
// A sequence has a record in each such layer. StateShape and StateRows (src/speculant/cache/base.py) say how a pass uses the record:
//
//   record   | state [heads, k, dim] | SP_MOST_PENDING updates | SP_MOST_PENDING + window - 1 columns [n] |
//   update   | keys [kv_heads, k] | d [heads, dim] | factors of S [heads] |
//
// Each row changes a head's state S [k, dim], where each key serves heads / kv_heads consecutive heads. `in` has its q, k and v:
//
//   q, k = q / |q| / sqrt(k), k / |k|;   g = rate softplus(a + its bias);   S = exp(g) S
//   d = sigmoid(b) (v - S^T k);   S = S + k d^T;   out = norm(S^T q) silu(z)
//
// Mamba 2 (SP_SCAN) corrects nothing, and has one norm for all heads that a key serves. `in` has v, k and q:
//
//   t = softplus(a + its bias), within limits;   S = exp(rate t) S;   d = t v;   S = S + k d^T;   out = norm((S^T q + D v) silu(z))
//
// A row that may be dropped changes no state in a record: its update waits in the record until a later pass adds it, or never does. Updates
// are added in the same way and order whenever that happens, so no bit depends on it. For equal inputs, results have the same bits on all
// sets of instructions: products are rounded before they are added, a lane is a column of S, and its sums run over k in order.
#pragma once
#include "activations.h"
#include "parallel.h"
#include "reals.h"

namespace SP_NAMESPACE {

constexpr int64_t MOST_KEY_DIM = 512, MOST_WINDOW = 16;
constexpr int64_t CONVOLVED = 1024;             // channels of a work item: whole vectors
constexpr int64_t STEPS_OF_BLOCK = SP_MOST_PENDING;
constexpr int TILE_COLUMNS = 4;                 // vectors of columns of S that go through the steps of a block together
constexpr float NORM_EPS = 1e-6f;               // of queries and keys

// The parts of a record, in numbers.
struct RecordShape {
  int64_t state, update, column, columns;
  explicit RecordShape(const SpOp &op)
      : state((int64_t)op.heads * op.k * op.dim), update(op.kv_heads * op.k + op.heads * ((int64_t)op.dim + 1)), column(op.n),
        columns(SP_MOST_PENDING + op.window - 1) {}
  int64_t size() const { return state + SP_MOST_PENDING * update + columns * column; }
  int64_t update_at(int64_t position) const { return state + position % SP_MOST_PENDING * update; }
  int64_t column_at(int64_t position) const { return state + SP_MOST_PENDING * update + position % columns * column; }
};

// The records of a sequence in a layer; NULL = none. pending: the one that gets the updates and columns of rows that may be dropped.
struct Records {
  RecordShape shape;
  float *read, *write, *save, *pending;

  Records(const SpOp &op, const SpPass &pass, const SpSegment &segment) : shape(op) {
    const auto at = [&](int64_t record) { return record < 0 ? nullptr : pass.states[op.layer] + record * shape.size(); };
    read = at(segment.read), write = at(segment.write), save = at(segment.save), pending = write ? write : read;
  }
};

// The first position that a pass does not add to the state, and the one after its last row.
static inline int64_t settled_end(const SpSegment &segment) { return segment.start + segment.certain; }
static inline int64_t end_of(const SpSegment &segment) { return segment.start + segment.rows; }

static inline Vec even_silu(Vec x) { return divide(x, add(splat(1.0f), exp_by<false>(negative(x)))); }

// Some channels of a sequence, whose last columns are in a thread's own memory.
struct Convolution {
  const SpOp &op;
  const SpSegment &segment;
  const Records records;
  const int64_t first, count;
  float *ring;  // [window, CONVOLVED], by position

  float *column(int64_t position) const { return ring + position % op.window * CONVOLVED; }
  const float *in(int64_t position) const { return op.in + (segment.first + position - segment.start) * op.stride + first; }

  void compute_column(int64_t position) const {
    const float *row = in(position), *x = op.flags & SP_GATED ? row + 2 * op.n : row;
    for (int64_t i = 0; i < count; i += LANES) {
      const Vec own = load_up_to(x + i, count - i);
      store(column(position) + i, op.flags & SP_GATED ? mul(load_up_to(row + i, count - i), own) : own);
    }
  }

  void read_column(int64_t position) const {
    const float *from = records.read + records.shape.column_at(position) + first;
    for (int64_t i = 0; i < count; i += LANES) store(column(position) + i, load_up_to(from + i, count - i));
  }

  void put(float *record, int64_t position) const {
    memcpy(record + records.shape.column_at(position) + first, column(position), count * sizeof(float));
  }

  // Store a column that later passes can need: each state has the columns before it, and so has each row that may be dropped.
  void keep(int64_t position) const {
    const int64_t before = op.window - 1, kept = records.write ? settled_end(segment) - before : segment.start;
    if (records.pending && position >= kept) put(records.pending, position);
    if (records.save && position < segment.saved && position >= segment.saved - before) put(records.save, position);
  }

  void convolve(int64_t position) const {
    const int64_t seen = position < op.window ? position + 1 : op.window;
    const float *columns[MOST_WINDOW], *gates = in(position) + op.n, *weights = op.scale + (op.window - seen) * op.n + first;
    for (int64_t j = 0; j < seen; j++) columns[j] = column(position - seen + 1 + j);
    float *out = op.out + (segment.first + position - segment.start) * op.n + first;
    for (int64_t i = 0; i < count; i += LANES) {
      const int64_t left = count - i;
      Vec sum = op.bias ? load_up_to(op.bias + first + i, left) : zero();
      for (int64_t j = 0; j < seen; j++) sum = add(sum, mul(load_up_to(weights + j * op.n + i, left), load(columns[j] + i)));
      if (op.activation == SP_SILU) sum = even_silu(sum);
      store_up_to(out + i, op.flags & SP_GATED ? mul(load_up_to(gates + i, left), sum) : sum, left);
    }
  }

  void run() const {
    const int64_t begin = records.save && segment.saved < segment.start ? segment.saved : segment.start;
    for (int64_t position = begin < op.window ? 0 : begin - op.window + 1; position < end_of(segment); position++) {
      position < segment.start ? read_column(position) : compute_column(position);
      keep(position);
      if (position >= segment.start) convolve(position);
    }
  }
};

static inline int64_t convolve_parts(const SpOp &op) { return (op.n + CONVOLVED - 1) / CONVOLVED; }

static void run_convolve(const SpOp &op, const SpPass &pass, int64_t item) {
  static thread_local List<float> ring;
  const SpSegment &segment = pass.segments[item / convolve_parts(op)];
  const int64_t first = item % convolve_parts(op) * CONVOLVED, left = op.n - first;
  ring.renew(op.window * CONVOLVED);
  Convolution{op, segment, Records(op, pass, segment), first, left < CONVOLVED ? left : CONVOLVED, ring.items}.run();
}

static inline float square_sum(const float *x, int64_t n) {
  return sum_over(x, n, [](Vec sum, Vec own) { return add(sum, mul(own, own)); });
}

static inline double exp_of(double x) { return exp_reals(splat_reals(x))[0]; }
static inline double log_of(double x) { return log_reals(splat_reals(x))[0]; }
static inline double softplus(double x) { return (x > 0.0 ? x : 0.0) + log_of(1.0 + exp_of(-std::fabs(x))); }
static inline double sigmoid_of(double x) {
  const double small = exp_of(-std::fabs(x));
  return (x < 0.0 ? small : 1.0) / (1.0 + small);
}

// The change of a state by one row, a vector at a time: nothing else changes one.
static inline Vec decayed(Vec state, Vec decay) { return mul(decay, state); }
static inline Vec updated(Vec state, Vec key, Vec d) { return add(state, mul(key, d)); }

// Successive steps of a head: updates that wait in a record, or rows. Columns are padded to whole vectors.
struct StepBlock {
  int64_t k, padded, count;
  float *keys, *queries;          // [count, k]
  float *values, *results;        // [count, padded]; values: v, or d once it is known
  float decays[STEPS_OF_BLOCK], betas[STEPS_OF_BLOCK];  // betas: sigmoid(b), or t
  float skip;                     // D
};

// Add updates to VECS vectors of columns from `first` on; state [k, VECS LANES].
template <int VECS>
static inline void add_updates(const StepBlock &block, int64_t first, float *state) {
  for (int64_t i = 0; i < block.k; i++, state += VECS * LANES) {
    Vec own[VECS];
    for (int v = 0; v < VECS; v++) own[v] = load(state + v * LANES);
    for (int64_t step = 0; step < block.count; step++) {
      const Vec decay = splat(block.decays[step]), key = splat(block.keys[step * block.k + i]);
      const float *d = block.values + step * block.padded + first;
      for (int v = 0; v < VECS; v++) own[v] = updated(decayed(own[v], decay), key, load(d + v * LANES));
    }
    for (int v = 0; v < VECS; v++) store(state + v * LANES, own[v]);
  }
}

// The same columns of one row: find its update, add it, and read the result.
template <int VECS>
static inline void run_step(const StepBlock &block, int64_t step, int64_t first, float *state) {
  const float *keys = block.keys + step * block.k, *queries = block.queries + step * block.k;
  float *values = block.values + step * block.padded + first, *results = block.results + step * block.padded + first;
  const Vec decay = splat(block.decays[step]), beta = splat(block.betas[step]);
  Vec d[VECS], sum[VECS];
  for (int v = 0; v < VECS; v++) d[v] = sum[v] = zero();
  for (int64_t i = 0; i < block.k; i++) {
    const Vec key = splat(keys[i]);
    for (int v = 0; v < VECS; v++) {
      float *at = state + (i * VECS + v) * LANES;
      const Vec own = decayed(load(at), decay);
      store(at, own);
      d[v] = add(d[v], mul(own, key));
    }
  }
  for (int v = 0; v < VECS; v++) store(values + v * LANES, d[v] = mul(beta, sub(load(values + v * LANES), d[v])));
  for (int64_t i = 0; i < block.k; i++) {
    const Vec key = splat(keys[i]), query = splat(queries[i]);
    for (int v = 0; v < VECS; v++) {
      float *at = state + (i * VECS + v) * LANES;
      const Vec own = updated(load(at), key, d[v]);
      store(at, own);
      sum[v] = add(sum[v], mul(own, query));
    }
  }
  for (int v = 0; v < VECS; v++) store(results + v * LANES, sum[v]);
}

// The same of Mamba 2, whose update does not depend on the state.
template <int VECS>
static inline void scan_step(const StepBlock &block, int64_t step, int64_t first, float *state) {
  const float *keys = block.keys + step * block.k, *queries = block.queries + step * block.k;
  float *values = block.values + step * block.padded + first, *results = block.results + step * block.padded + first;
  const Vec decay = splat(block.decays[step]), time = splat(block.betas[step]);
  Vec own[VECS], d[VECS], sum[VECS];
  for (int v = 0; v < VECS; v++) own[v] = load(values + v * LANES), d[v] = mul(time, own[v]), sum[v] = zero();
  for (int64_t i = 0; i < block.k; i++) {
    const Vec key = splat(keys[i]), query = splat(queries[i]);
    for (int v = 0; v < VECS; v++) {
      float *at = state + (i * VECS + v) * LANES;
      const Vec next = updated(decayed(load(at), decay), key, d[v]);
      store(at, next);
      sum[v] = add(sum[v], mul(next, query));
    }
  }
  for (int v = 0; v < VECS; v++) {
    store(results + v * LANES, add(sum[v], mul(splat(block.skip), own[v])));
    store(values + v * LANES, d[v]);
  }
}

template <bool SCAN, int VECS>
static inline void run_tile(const StepBlock &block, bool pending, int64_t first, float *state) {
  if (pending) return add_updates<VECS>(block, first, state);
  for (int64_t step = 0; step < block.count; step++)
    SCAN ? scan_step<VECS>(block, step, first, state) : run_step<VECS>(block, step, first, state);
}

// A head of a sequence. Its state is in a thread's own memory, in tiles of columns: [k, TILE_COLUMNS LANES], and [k, LANES] for the rest.
template <bool SCAN>
struct Recurrence {
  const SpOp &op;
  const SpSegment &segment;
  const Records records;
  const int64_t head, group, padded;
  float *state;
  StepBlock block;

  Recurrence(const SpOp &op, const SpPass &pass, const SpSegment &segment, int64_t head, List<float> &memory)
      : op(op), segment(segment), records(op, pass, segment), head(head), group(op.heads / op.kv_heads),
        padded((op.dim + LANES - 1) / LANES * LANES), block{op.k, padded, 0, nullptr, nullptr, nullptr, nullptr, {}, {}, 0.0f} {
    if (SCAN) block.skip = op.bias[head];
    memory.renew((op.k + 2 * STEPS_OF_BLOCK) * padded + 2 * STEPS_OF_BLOCK * op.k);
    state = memory.items, block.values = state + op.k * padded, block.results = block.values + STEPS_OF_BLOCK * padded;
    block.keys = block.results + STEPS_OF_BLOCK * padded, block.queries = block.keys + STEPS_OF_BLOCK * op.k;
  }

  // apply(column, width, tile) for each tile.
  template <typename Apply>
  void for_each_tile(Apply apply) const {
    int64_t column = 0;
    for (; column + TILE_COLUMNS * LANES <= padded; column += TILE_COLUMNS * LANES) apply(column, TILE_COLUMNS, state + column * op.k);
    for (; column < padded; column += LANES) apply(column, 1, state + column * op.k);
  }

  // apply(number in the record, floats, place in the tiles) for each vector of the state, in the record's order.
  template <typename Apply>
  void for_each_vector(Apply apply) const {
    for (int64_t i = 0; i < op.k; i++)
      for_each_tile([&](int64_t column, int64_t width, float *tile) {
        for (int64_t v = 0; v < width; v++, column += LANES)
          apply((head * op.k + i) * op.dim + column, op.dim - column, tile + (i * width + v) * LANES);
      });
  }

  void load_state() const {
    if (!records.read || !segment.settled) return (void)memset(state, 0, op.k * padded * sizeof(float));
    for_each_vector([&](int64_t from, int64_t count, float *at) { store(at, load_up_to(records.read + from, count)); });
  }

  // Past the caches if possible: until the state is read again, a pass reads all weights. Meanwhile fetch the next item's state.
  void store_state(float *record, const float *next) const {
    if (!record) return;
    const bool whole = op.dim % LANES == 0 && (uintptr_t)(record + head * op.k * op.dim) % (LANES * sizeof(float)) == 0;
    for_each_vector([&](int64_t to, int64_t count, float *at) {
      if (next) prefetch(next + to - head * op.k * op.dim);
      whole ? stream(record + to, load(at)) : store_up_to(record + to, load(at), count);
    });
    finish_streams();
  }

  float *update_of(float *record, int64_t position) const { return record + records.shape.update_at(position); }

  void read_update(int64_t step, int64_t position) {
    const float *update = update_of(records.read, position), *d = update + op.kv_heads * op.k + head * op.dim;
    memcpy(block.keys + step * op.k, update + head / group * op.k, op.k * sizeof(float));
    read_value(step, d);
    block.decays[step] = update[op.kv_heads * op.k + op.heads * op.dim + head];
  }

  void put_update(int64_t step, int64_t position) const {
    float *update = update_of(records.pending, position);
    if (head % group == 0) memcpy(update + head / group * op.k, block.keys + step * op.k, op.k * sizeof(float));
    memcpy(update + op.kv_heads * op.k + head * op.dim, block.values + step * padded, op.dim * sizeof(float));
    update[op.kv_heads * op.k + op.heads * op.dim + head] = block.decays[step];
  }

  int64_t row_of(int64_t position) const { return segment.first + position - segment.start; }
  const float *gates_of(int64_t position) const { return op.gates + row_of(position) * op.stride; }

  void scale_to(const float *from, float factor, float *to) const {
    for (int64_t i = 0; i < op.k; i += LANES) store_up_to(to + i, mul(load_up_to(from + i, op.k - i), splat(factor)), op.k - i);
  }

  void read_value(int64_t step, const float *value) {
    for (int64_t i = 0; i < op.dim; i += LANES) store(block.values + step * padded + i, load_up_to(value + i, op.dim - i));
  }

  void read_row(int64_t step, int64_t position) {
    const float *row = op.in + row_of(position) * op.n, *gates = gates_of(position) + op.heads * op.dim;
    if (SCAN) return read_scanned(step, row, gates[op.n + head]);
    const float *query = row + head / group * op.k, *key = query + op.kv_heads * op.k;
    scale_to(query, 1.0f / sqrtf(square_sum(query, op.k) + NORM_EPS) / sqrtf((float)op.k), block.queries + step * op.k);
    scale_to(key, 1.0f / sqrtf(square_sum(key, op.k) + NORM_EPS), block.keys + step * op.k);
    read_value(step, row + 2 * op.kv_heads * op.k + head * op.dim);
    block.betas[step] = (float)sigmoid_of(gates[head]);
    block.decays[step] = (float)exp_of(op.key_scale[head] * softplus(gates[op.heads + head] + op.key_bias[head]));
  }

  void read_scanned(int64_t step, const float *row, float a) {
    const float *key = row + op.heads * op.dim + head / group * op.k, *query = key + op.kv_heads * op.k;
    double time = softplus(a + op.key_bias[head]);
    if (time < op.factor) time = op.factor;
    if (op.softcap && time > op.softcap) time = op.softcap;
    memcpy(block.keys + step * op.k, key, op.k * sizeof(float)), memcpy(block.queries + step * op.k, query, op.k * sizeof(float));
    read_value(step, row + head * op.dim);
    block.betas[step] = (float)time, block.decays[step] = (float)exp_of(op.key_scale[head] * time);
  }

  void put_result(int64_t step, int64_t position) const {
    const float *result = block.results + step * padded, *z = gates_of(position) + head * op.dim;
    float *out = op.out + (row_of(position) * op.heads + head) * op.dim;
    const float *scale = SCAN ? nullptr : op.scale;
    const float factor = scale ? 1.0f / sqrtf(square_sum(result, op.dim) / (float)op.dim + op.eps) : 1.0f;
    for (int64_t i = 0; i < op.dim; i += LANES) {
      Vec own = mul(load(result + i), splat(factor));
      if (scale) own = mul(load_up_to(scale + i, op.dim - i), own);
      store_up_to(out + i, mul(own, even_silu(load_up_to(z + i, op.dim - i))), op.dim - i);
    }
  }

  // Go from a position to another one. The steps between are all pending or all rows.
  void run_block(int64_t from, int64_t to) {
    const bool pending = from < segment.start;
    block.count = to - from;
    for (int64_t step = 0; step < block.count; step++) pending ? read_update(step, from + step) : read_row(step, from + step);
    for_each_tile([&](int64_t column, int64_t width, float *tile) {
      width == 1 ? run_tile<SCAN, 1>(block, pending, column, tile) : run_tile<SCAN, TILE_COLUMNS>(block, pending, column, tile);
    });
    for (int64_t step = 0; !pending && step < block.count; step++) {
      put_result(step, from + step);
      if (records.pending && from + step >= settled_end(segment)) put_update(step, from + step);
    }
  }

  // The end of the block that begins at a position: a state may be stored there, and rows follow pending updates.
  int64_t block_end(int64_t from) const {
    int64_t end = from + STEPS_OF_BLOCK < end_of(segment) ? from + STEPS_OF_BLOCK : end_of(segment);
    const int64_t stops[] = {segment.start, settled_end(segment), segment.saved};
    for (const int64_t stop : stops)
      if (from < stop && stop < end) end = stop;
    return end;
  }

  // next(): the state that this thread will probably read next, or NULL.
  template <typename Next>
  void run(Next next) {
    load_state();
    for (int64_t position = segment.settled;; ) {
      if (position == segment.saved) store_state(records.save, nullptr);
      if (position == settled_end(segment)) store_state(records.write, next());
      if (position == end_of(segment)) return;
      const int64_t end = block_end(position);
      run_block(position, end);
      position = end;
    }
  }
};

// The state that a work item reads; NULL = none.
static inline const float *state_of(const SpOp &op, const SpPass &pass, int64_t item) {
  if (item >= pass.num_segments * op.heads) return nullptr;
  const SpSegment &segment = pass.segments[item / op.heads];
  const float *read = segment.settled ? Records(op, pass, segment).read : nullptr;
  return read ? read + item % op.heads * op.k * op.dim : nullptr;
}

template <bool SCAN>
static inline void run_head(const SpOp &op, const SpPass &pass, int64_t item, const WorkQueue &stage) {
  static thread_local List<float> memory;
  Recurrence<SCAN>(op, pass, pass.segments[item / op.heads], item % op.heads, memory).run([&] { return state_of(op, pass, stage.next()); });
}

// Norm a part of a row: the results of all heads that a key serves.
static inline void norm_part(const SpOp &op, int64_t item) {
  const int64_t n = (int64_t)op.heads / op.kv_heads * op.dim;
  const float *scale = op.scale + item % op.kv_heads * n;
  float *x = op.out + item * n;
  const Vec factor = splat(1.0f / sqrtf(square_sum(x, n) / (float)n + op.eps));
  for (int64_t i = 0; i < n; i += LANES) {
    const int64_t left = n - i;
    store_up_to(x + i, mul(load_up_to(scale + i, left), mul(load_up_to(x + i, left), factor)), left);
  }
}

// Work items are the heads of sequences; then, if they share norms, the parts of rows.
static inline void run_recur(const SpOp &op, const SpPass &pass, WorkQueue *stages) {
  const int64_t items = pass.num_segments * op.heads;
  if (!(op.flags & SP_SCAN)) return stages[0].run(items, [&](int64_t i) { run_head<false>(op, pass, i, stages[0]); });
  stages[0].run(items, [&](int64_t i) { run_head<true>(op, pass, i, stages[0]); });
  if (op.scale) stages[1].run(pass.rows * op.kv_heads, [&](int64_t i) { norm_part(op, i); });
}

}  // namespace SP_NAMESPACE
