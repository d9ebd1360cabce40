// Runs a recorded program. Every thread goes through the same stages in order and takes work items from the queue of each.
#pragma once
#include "attention.h"
#include "experts.h"
#include "probs.h"
#include "states.h"
#include "check.h"
#include "table.h"
#include "tiles.h"

#include <time.h>

namespace SP_NAMESPACE {

static inline bool overlap(const float *a, int64_t n, const float *b, int64_t m) { return a && b && a < b + m && b < a + n; }

// Whether a layer of one row can norm its input itself, which no work item of the layer may overwrite.
static inline bool norms_input(const SpOp &norm, const SpOp &op) {
  if (norm.code != SP_NORM || norm.flags & SP_ADD || op.code != SP_LINEAR || op.in != norm.out || op.k != norm.n) return false;
  return !overlap(norm.in, norm.n, norm.out, norm.n) && !overlap(norm.in, norm.n, norm.copy, norm.n) &&
         !overlap(norm.in, norm.n, op.out, op.n) && !overlap(norm.copy, norm.n, op.out, op.n);
}

constexpr Block ONE = {0, 1};

// The only row of a layer, in a thread's own memory.
struct OwnRow {
  List<float> normed;
  Tiles packed;

  Rows prepare(const SpOp *norm, const SpOp &op, const SpSums &sums) {
    const float *row = op.in;
    packed.sums = sums;
    if (norm) {
      normed.resize(norm->n);
      norm_row(norm->in, vectors_of(*norm), norm->n, normed.items);
      row = normed.items;
    }
    packed.make_room(op, 1, false);
    for (int64_t part = 0; part < packed.packing_pieces(op, 1); part++) pack_part(op, packed, &row, 0, 1, ONE, part);
    return rows_of(op, packed.is_packed(op, 1), packed, ONE, row);
  }

  // Store the normed row for later operations.
  void put(const SpOp &norm) {
    memcpy(norm.out, normed.items, norm.n * sizeof(float));
    if (norm.copy) memcpy(norm.copy, norm.in, norm.n * sizeof(float));
  }
};

// A layer of one row, and the norm before it (NULL = none). Each thread does both for itself, which takes less time
// than to wait for another thread. It does so within its first work item: until that is done, no thread can leave the
// layer and overwrite the row.
static inline void run_one_row(const SpOp *norm, const SpOp &op, const SpSums &sums, WorkQueue &stage, const Panels &panels = {}) {
  static thread_local OwnRow row;
  Rows own = {};
  stage.run(panels.pieces(op, 1), [&](int64_t p) {
    if (!own.dwords) own = row.prepare(norm, op, sums);
    if (norm && !p) row.put(*norm);
    run_panel(op, sums, panels.item(op, p), ONE, own);
  });
}

static inline void run_linear_op(const SpOp &op, int64_t rows, Tiles &x, WorkQueue *stages, const Panels &panels = {}) {
  if (rows == 1) return run_one_row(nullptr, op, x.sums, stages[1], panels);
  stages[0].run(x.packing_pieces(op, rows), [&](int64_t p) { pack_piece(op, rows, x, p); });
  stages[1].run(panels.pieces(op, rows), [&](int64_t p) { run_linear(op, rows, x, panels.item(op, p)); });
}

// Memory that the operations of a pass use, one after the other.
struct Memory {
  Tiles x;
  Routing routing;

  void make_room(const SpOp *ops, int count, int64_t rows) {
    for (int i = 0; i < count; i++) {
      if (ops[i].code == SP_LINEAR) x.make_room(ops[i], rows, rows > 1);
      if (ops[i].code == SP_EXPERTS) x.make_room(ops[i], rows * ops[i].used, rows > 1);
      if (ops[i].code == SP_ROUTE) routing.make_room(ops[i], rows);
    }
  }
};

// routed: the stage of the last SP_ROUTE that counted work items.
static inline void run_op(const SpOp &op, const SpPass &pass, Plan &plan, Memory &memory, WorkQueue *stages, const WorkQueue *routed) {
  Routing &routing = memory.routing;
  switch (op.code) {
    case SP_ROUTE:
      stages[0].run(pass.rows, [&](int64_t t) { route_row(op, routing, t); });
      return stages[1].run(1, [&](int64_t) { sort_pairs(op, pass.rows, routing, stages[1]); });
    case SP_EXPERTS:
      stages[0].run(routed->found[0] * memory.x.parts_of(op), [&](int64_t p) { pack_pairs(op, routing, memory.x, p); });
      return stages[1].run(routed->found[1] * panels_of(op.n), [&](int64_t p) { run_experts(op, routing, memory.x, p); });
    case SP_COMBINE: return stages[0].run(pass.rows * combined_parts(op), [&](int64_t p) { run_combine(op, routing, p); });
    case SP_EMBED: return stages[0].run(pass.rows, [&](int64_t t) { run_embed(op, pass, t); });
    case SP_COPY: return stages[0].run(pass.rows, [&](int64_t t) { run_copy(op, t); });
    case SP_GATE: return stages[0].run(pass.rows, [&](int64_t t) { run_gate(op, t); });
    case SP_NORM: return stages[0].run(pass.rows, [&](int64_t t) { run_norm(op, t); });
    case SP_LINEAR: return run_linear_op(op, pass.rows, memory.x, stages);
    case SP_ROTATE: {
      const int64_t parts = rotation_parts(op, pass.rows);
      return stages[0].run(pass.rows * parts, [&](int64_t p) { run_rotate(op, pass, p / parts, p % parts, parts); });
    }
    case SP_CONVOLVE:
      return stages[0].run(pass.num_segments * convolve_parts(op), [&](int64_t p) { run_convolve(op, pass, p); });
    case SP_RECUR: return run_recur(op, pass, stages);
    case SP_ATTEND:
      stages[0].run(attend_pieces(op, plan), [&](int64_t p) { run_attend(op, pass, plan, p); });
      if (plan.splits(op)) stages[1].run(pass.rows * op.heads, [&](int64_t p) { run_merge(op, plan, p); });
  }
}

// Every thread of a parallel region calls this; stages are two per operation.
static inline void run_ops(const SpOp *ops, int count, const SpPass &pass, Plan &plan, Memory &memory, WorkQueue *stages) {
  const WorkQueue *routed = nullptr;
  for (int i = 0; i < count; i++) {
    if (pass.rows == 1 && i + 1 < count && norms_input(ops[i], ops[i + 1])) {
      run_one_row(ops + i, ops[i + 1], memory.x.sums, stages[2 * i + 3]);
      i++;
      continue;
    }
    run_op(ops[i], pass, plan, memory, stages + 2 * i, routed);
    if (ops[i].code == SP_ROUTE) routed = stages + 2 * i + 1;
  }
}

// A calling thread's memory for softmaxes of spans, which its runs and its drafts share.
static List<float> &own_partial() {
  static thread_local List<float> partial;
  return partial;
}

// Scratch of a calling thread, reused between runs: nothing is allocated once it has grown.
struct Scratch {
  Plan plan;
  Memory memory;
  List<WorkQueue> stages;
};

static Scratch &own_scratch() {
  static thread_local Scratch own;
  return own;
}

static void run(const SpOp *ops, int count, const SpPass *pass, const SpSums &sums, int threads) {
  Scratch &scratch = own_scratch();  // that of the calling thread, in every thread that works
  clear_stages(scratch.stages, 2 * count);
  plan_attention(ops, count, *pass, threads, scratch.plan, own_partial());
  scratch.memory.x.sums = sums, scratch.memory.make_room(ops, count, pass->rows);
  run_together(threads, [&] { run_ops(ops, count, *pass, scratch.plan, scratch.memory, scratch.stages.items); });
}

static int64_t stage_items(int64_t *items, int64_t most) {
  List<WorkQueue> &stages = own_scratch().stages;
  int64_t count = 0;
  for (int64_t i = 0; i < stages.size; i++)
    if (stages[i].done && count++ < most) items[count - 1] = stages[i].done;
  return count;
}

// The root of a draft, or a node that has children. Those of all sequences are numbered together, each tree's in order of depth.
struct Inner {
  int64_t node;          // its number in its tree; -1 = the root
  int64_t parent;        // the inner node that it is a child of
  int64_t first, width;  // its children in the tree
};
constexpr int64_t NO_NODE = -2;  // of a dynamic tree with fewer nodes

// A row whose children are drawn in a step.
struct DrawingRow {
  int64_t sequence, inner;
  int64_t parent;  // its parent's row in the step before
  int64_t row;     // of the step's pass
};

// A draft: steps of a pass, distributions and draws, one step for each depth of the trees. All steps run in one parallel region: entering
// one is the largest cost while other programs use the processors. A thread may still read a step's data while another prepares the next
// step, so each step has its own.
struct Drafting {
  struct Step {
    int64_t first_row;  // in the lists of all steps' rows
    int64_t most_width; // children of a row
    SpPass pass;
    Plan plan;
    List<DrawingRow> rows;
    List<double *> probs;  // of each row's first child
    List<SpSamplingSettings> settings;
    List<SpEdits> edits;  // with `paths` as drafted tokens
    List<const SpEdits *> edits_of;
    List<int64_t> paths;  // [rows, step] the tokens from the root's child to the row's
    List<int64_t> index;  // of each row's first draw
    List<double> sums;    // of the weights left for the next child
    List<double> left;    // their share of all weights
    List<double> totals;  // of all values in the first child's race
  };
  const SpOp *ops;
  int count, threads;
  SpOp head;
  const SpPass *first;
  const SpDraft *draft;
  List<float> rows, logits, head_out;  // head_out: the logits of a head whose rows are `head_tokens`
  List<float> *partial;  // see Plan: of the running step; no thread reads an earlier step's
  List<double> unread;  // distributions of sequences that return none
  List<Share> shares;
  Memory memory;
  List<Inner> inner;
  List<int64_t> roots, parents;  // each sequence's root, and the end; as `pass.parents`, by inner node
  List<int64_t> row_of;          // by inner node: its row in its step
  List<int64_t> begins, ends;    // by sequence: the inner nodes of the last step
  List<int64_t> draws;           // by sequence: draws so far
  List<double> confidences;      // [sequence, node] of dynamic trees
  List<int64_t> tokens, positions, angles, slots, ended;  // ended[sequence, node]: whether no token follows
  List<SpSegment> segments;
  List<WorkQueue> stages;
  Step *steps = nullptr;
  int64_t num_steps = 0, depth = 0, most_rows = 0, most_width = 0;  // the last three: of this draft
  ~Drafting() { delete[] steps; }

  int num_stages() const { return 2 * count + 12 + 4 * most_width; }
  int64_t groups() const { return first->groups ? first->groups : 1; }
  int64_t &drawn(int64_t s, int64_t node) const { return draft->drawn[s * draft->nodes + node]; }
  int64_t token_of(const DrawingRow &row) { return inner[row.inner].node < 0 ? -1 : drawn(row.sequence, inner[row.inner].node); }
  int64_t topk(int64_t s) const { return draft->topk ? draft->topk[s] : 0; }
  bool has_ended(int64_t s, const Inner &node) {
    return node.node == NO_NODE || (node.node >= 0 && ended[s * draft->nodes + node.node]);
  }

  void find_inner(int64_t s) {
    const int64_t limit = draft->limits[s], root = inner.size, k = topk(s);
    roots.push(root);
    if (k) {
      for (int64_t first = 0; first < limit; first += k) inner.push({first ? NO_NODE : -1, root, first, k});
    } else {
      const int64_t *widths = draft->widths ? draft->widths[s] : nullptr;
      for (int64_t node = -1, child = 0, parent = root; node < limit; node++) {
        const int64_t width = widths ? widths[node + 1] : node + 1 < limit;
        while (node >= 0 && node >= inner[parent].first + inner[parent].width) parent++;
        if (width) inner.push({node, parent, child, width});
        child += width;
      }
    }
    for (int64_t i = root; i < inner.size; i++) most_width = inner[i].width > most_width ? inner[i].width : most_width;
    parents.resize(inner.size);
    measure(s, root);
  }

  // The end of the inner nodes at the next depth, which begin at `begin`.
  int64_t next_end(int64_t s, int64_t begin, int64_t last) {
    if (topk(s)) return begin + topk(s) < last ? begin + topk(s) : last;
    int64_t end = begin;
    while (end < last && inner[end].parent < begin) end++;
    return end;
  }

  // Add a tree to the depth and the most rows of a step.
  void measure(int64_t s, int64_t root) {
    int64_t levels = 0, most = 0;
    for (int64_t begin = root, end = root + 1; begin < end; levels++) {
      const int64_t next = next_end(s, end, inner.size);
      if (end - begin > most) most = end - begin;
      begin = end, end = next;
    }
    if (levels > depth) depth = levels;
    most_rows += most;
  }

  void begin() {
    const int64_t sequences = draft->sequences, all = sequences * draft->nodes;
    depth = most_rows = most_width = 0;
    inner.resize(0), roots.resize(0);
    for (int64_t s = 0; s < sequences; s++) find_inner(s);
    roots.push(inner.size);
    rows.resize(most_rows * head.k), logits.resize(most_rows * draft->num_logits), shares.resize(most_rows * chunks_of(draft->width));
    for (int64_t s = 0; s < sequences; s++)
      if (!draft->out[s]) unread.resize(most_rows * draft->width);
    ended.resize(all), confidences.resize(draft->topk || draft->stop_path > 0 ? all : 0), row_of.resize(inner.size);
    draws.resize(sequences), begins.resize(sequences), ends.resize(sequences);
    for (int64_t i = 0; i < all; i++) draft->drawn[i] = -1, ended[i] = 1;
    for (int64_t s = 0; s < sequences; s++) draws[s] = 0, begins[s] = roots[s], ends[s] = roots[s] + 1;
    tokens.resize(inner.size), positions.resize(inner.size), angles.resize(inner.size), slots.resize(inner.size * groups());
    segments.resize(sequences * depth);
    memory.make_room(ops, count, first->rows > most_rows ? first->rows : most_rows), memory.make_room(&head, 1, most_rows);
    head.in = rows.items, head.out = logits.items;
    if (draft->head_tokens) {
      head_out.resize(most_rows * head.n), head.out = head_out.items;
    }
    for (int64_t i = 0; (draft->head_tokens || draft->panels) && i < most_rows * draft->num_logits; i++) logits[i] = -INFINITY;
    clear_stages(stages, num_stages() * depth);
    if (depth > num_steps) {
      delete[] steps;
      steps = new Step[num_steps = depth];
    }
  }

  // The roots; later the inner nodes of the next depth, of the sequences in which some of them were drawn.
  void find_rows(int64_t step, Step &now) {
    now.rows.resize(0);
    now.first_row = step ? steps[step - 1].first_row + steps[step - 1].rows.size : 0;
    for (int64_t s = 0; s < draft->sequences; s++) {
      if (step) {
        const int64_t begin = begins[s];
        begins[s] = ends[s], ends[s] = next_end(s, ends[s], roots[s + 1]);
        if (topk(s)) select_nodes(s, begin);
      }
      bool drawn = false;
      for (int64_t i = begins[s]; i < ends[s]; i++) drawn = drawn || !has_ended(s, inner[i]);
      for (int64_t i = begins[s]; drawn && i < ends[s]; i++) {
        const SpSegment &segment = first->segments[s];
        row_of[i] = now.rows.size;
        parents[i] = inner[i].parent - roots[s] - 1;
        now.rows.push({s, i, row_of[inner[i].parent], step ? now.rows.size : segment.first + segment.rows - 1});
      }
    }
  }

  // Select the most confident nodes of the depth below the inner nodes from `begin` on: those at the next depth.
  void select_nodes(int64_t s, int64_t begin) {
    const int64_t offset = s * draft->nodes;
    for (int64_t i = begins[s]; i < ends[s]; i++) {
      inner[i].node = NO_NODE, inner[i].parent = begin;
      double most = 0.0;
      for (int64_t parent = begin; parent < begins[s]; parent++)
        for (int64_t node = inner[parent].first; node < inner[parent].first + inner[parent].width; node++) {
          if (ended[offset + node] || !(confidences[offset + node] > most)) continue;
          bool is_new = true;
          for (int64_t other = begins[s]; other < i; other++) is_new = is_new && inner[other].node != node;
          if (is_new) most = confidences[offset + node], inner[i].node = node, inner[i].parent = parent;
        }
    }
  }

  // The pass over the rows of a step. Earlier nodes are in the cache.
  SpPass next_pass(const Step &last, Step &now, SpSegment *segment) {
    SpPass pass = *first;
    const int64_t from = now.first_row, size = now.rows.size, step = &now - steps;
    SpSegment *const first_segment = segment;
    for (int64_t r = 0; r < size; r++) {
      const DrawingRow &row = now.rows[r];
      const SpSegment &before = first->segments[row.sequence];
      const int64_t token = token_of(row), place = row.inner - roots[row.sequence] - 1;
      const int64_t start = before.start + before.rows, slot = start + place;
      tokens[from + r] = 0 <= token && token < draft->num_logits ? token : 0;  // a draft may be any token, but the table has no other rows
      positions[from + r] = start + step - 1;
      if (first->angles) angles[from + r] = first->angles[before.first + before.rows - 1] + step;
      if (!r || now.rows[r - 1].sequence != row.sequence) {
        const bool tree = topk(row.sequence) || (draft->widths && draft->widths[row.sequence]);
        const bool is_written = before.write >= 0;  // by the first step; later ones add updates to the same record
        *segment++ = {r, 0, tree ? start : slot, !tree, tree ? roots[row.sequence] + 1 : -1, before.table, before.blocks, tree ? place : 0,
                      before.source, before.source_length, is_written ? before.write : before.read,
                      is_written ? settled_end(before) : before.settled, -1, 0, -1, 0};
      }
      segment[-1].rows++;
      for (int64_t g = 0; g < groups(); g++)
        slots[from * groups() + g * size + r] = before.table[g * before.blocks + slot / first->block] * first->block + slot % first->block;
      if (draft->carried)
        memcpy(draft->states + r * draft->state_size, draft->carried + last.rows.items[row.parent].row * draft->state_size,
               draft->state_size * sizeof(float));
    }
    pass.rows = size, pass.num_segments = segment - first_segment;
    pass.inputs = nullptr, pass.parents = parents.items;
    pass.tokens = &tokens[from], pass.positions = &positions[from], pass.segments = first_segment;
    pass.slots = &slots[from * groups()], pass.angles = first->angles ? &angles[from] : nullptr;
    return pass;
  }

  void prepare(int64_t step) {
    Step &now = steps[step];
    find_rows(step, now);
    const int64_t size = now.rows.size;
    if (!size) return;
    now.pass = step ? next_pass(steps[step - 1], now, &segments[step * draft->sequences]) : *first;
    plan_attention(ops, count, now.pass, threads, now.plan, *partial);
    now.probs.resize(size), now.settings.resize(size), now.index.resize(size);
    now.sums.resize(size), now.left.resize(size), now.totals.resize(size);
    now.most_width = 0;
    for (int64_t r = 0; r < size; r++) {
      const int64_t s = now.rows[r].sequence;
      const Inner &node = inner[now.rows[r].inner];
      now.probs[r] = draft->out[s] ? draft->out[s] + node.first * draft->width : unread.items + r * draft->width;
      now.settings[r] = draft->settings[s], now.left[r] = 1.0;
      if (node.width > now.most_width) now.most_width = node.width;
    }
    if (draft->edits) prepare_edits(step, now);
  }

  void prepare_edits(int64_t step, Step &now) {
    const int64_t size = now.rows.size;
    now.edits.resize(size), now.edits_of.resize(size), now.paths.resize(size * step);
    for (int64_t r = 0; r < size; r++) {
      const DrawingRow &row = now.rows[r];
      int64_t *path = now.paths.items + r * step;
      if (step) {
        if (step > 1) memcpy(path, steps[step - 1].paths.items + row.parent * (step - 1), (step - 1) * sizeof(int64_t));
        path[step - 1] = token_of(row);
      }
      now.edits_of[r] = draft->edits[row.sequence] ? now.edits.items + r : nullptr;
      if (!draft->edits[row.sequence]) continue;
      now.edits[r] = *draft->edits[row.sequence];
      now.edits[r].drafted = path, now.edits[r].num_drafted = step;
    }
  }

  // Whether a row draws a child of this rank, as far as tokens are left.
  bool draws_child(const DrawingRow &row, int64_t rank) {
    const Inner &node = inner[row.inner];
    return rank < node.width && (rank ? drawn(row.sequence, node.first + rank - 1) >= 0 : !has_ended(row.sequence, node));
  }

  // The distribution of a row's child. Where none is returned, siblings share the memory.
  double *probs_of(const Step &now, int64_t r, int64_t rank) const {
    return now.probs.items[r] + (draft->out[now.rows.items[r].sequence] ? rank * draft->width : 0);
  }

  uint64_t chance(const Step &now, int64_t step, int64_t r, int64_t rank) const {
    const int64_t s = now.rows.items[r].sequence;
    return mix_in(draft->chances[2 * s], draft->chances[2 * s + 1] + (draft->noise[s] ? step : now.index.items[r] + rank));
  }

  // Number the draws in order of nodes: a row draws as many children as tokens are possible.
  void number_draws(Step &now, int64_t chunks) {
    for (int64_t r = 0; r < now.rows.size; r++) {
      const DrawingRow &row = now.rows[r];
      const int64_t width = draws_child(row, 0) ? inner[row.inner].width : 0;
      int64_t possible = draft->widths ? 0 : width;
      for (int64_t chunk = 0; draft->widths && chunk < chunks; chunk++) possible += shares[r * chunks + chunk].at;
      now.index[r] = draws[row.sequence];
      draws[row.sequence] += possible < width ? possible : width;
    }
  }

  // Distributions and draws, after the pass.
  void draw(int64_t step, WorkQueue *stages) {
    Step &now = steps[step];
    const SpEdits *const *edits = draft->edits ? now.edits_of.items : nullptr;
    const int64_t size = now.rows.size, width = draft->width;
    const ProbsJob job = {logits.items, size, draft->num_logits, width, now.settings.items, edits, now.probs.items, shares.items};
    make_probs(job, stages);
    const int64_t chunks = job.chunks();
    stages[5].run(draft->widths ? size * chunks : 0, [&](int64_t p) {
      job.shares[p].at = count_possible(now.probs[p / chunks], p % chunks * CHUNK, end_of(p % chunks, width));
    });
    stages[6].run(1, [&](int64_t) { number_draws(now, chunks); });
    for (int64_t rank = 0; rank < now.most_width; rank++) draw_children(step, rank, chunks, stages + 7 + 4 * rank);
  }

  // Draw the child of a rank of every row.
  void draw_children(int64_t step, int64_t rank, int64_t chunks, WorkQueue *stages) {
    Step &now = steps[step];
    const int64_t size = now.rows.size, width = draft->width;
    const auto begin = [&](int64_t p) { return p % chunks * CHUNK; };
    const auto end = [&](int64_t p) { return end_of(p % chunks, width); };
    stages[0].run(rank ? size * chunks : 0, [&](int64_t p) {
      const DrawingRow &row = now.rows[p / chunks];
      if (!draws_child(row, rank)) return;
      const int64_t elder = drawn(row.sequence, inner[row.inner].first + rank - 1);
      leave_out(probs_of(now, p / chunks, rank - 1), begin(p), end(p), elder, probs_of(now, p / chunks, rank), shares[p]);
    });
    stages[1].run(rank ? size : 0, [&](int64_t r) { now.left[r] *= now.sums[r] = sum_of(&shares[r * chunks], chunks); });
    stages[2].run(size * chunks, [&](int64_t p) {
      const int64_t r = p / chunks, noise = draft->noise[now.rows[r].sequence];
      if (!draws_child(now.rows[r], rank)) return;
      double *probs = probs_of(now, r, rank);
      if (rank) divide(probs, begin(p), end(p), now.sums[r]);
      share_draw(probs, width, noise, chance(now, step, r, rank), p % chunks, shares[p]);
    });
    stages[3].run(size, [&](int64_t r) {
      const DrawingRow &row = now.rows[r];
      const int64_t noise = draft->noise[row.sequence], node = inner[row.inner].first + rank;
      const Share *own = &shares[r * chunks];
      if (!draws_child(row, rank) || !(noise || is_distribution(own, chunks))) return;  // a race without a winner returns -1 by itself
      const double *probs = probs_of(now, r, rank);
      const int64_t token = finish_draw(probs, width, noise, chance(now, step, r, rank), own);
      int64_t &last = ended[row.sequence * draft->nodes + node];
      last = token < 0 || probs[token] < draft->stop_below;
      drawn(row.sequence, node) = token;
      if (token < 0 || (!topk(row.sequence) && !(draft->stop_path > 0))) return;
      const bool raced = noise == 1;
      const double path = score(now, r, rank, raced ? best_of(own, chunks) : probs[token], raced ? sum_of(own, chunks) : 1.0);
      last = last || path < draft->stop_path;
    });
  }

  // Score a node, and return its confidence. value: of its token, among the weights left; total: of all values in its draw.
  double score(Step &now, int64_t r, int64_t rank, double value, double total) {
    const DrawingRow &row = now.rows[r];
    const Inner &parent = inner[row.inner];
    const int64_t offset = row.sequence * draft->nodes, node = offset + parent.first + rank;
    if (!rank) now.totals[r] = total;
    const double own = now.left[r] * value / now.totals[r];
    if (draft->parents) draft->parents[node] = parent.node;
    if (draft->scores) draft->scores[node] = own;
    return confidences[node] = own * (parent.node < 0 ? 1.0 : confidences[offset + parent.node]);
  }

  // Every thread of the parallel region calls it.
  void run_step(int64_t step) {
    WorkQueue *own = stages.items + step * num_stages(), *after = own + 1 + 2 * count;
    own[0].run(1, [&](int64_t) { prepare(step); });
    Step &now = steps[step];
    const Panels panels = {draft->panels, draft->num_panels};
    if (!now.rows.size) return;
    run_ops(ops, count, now.pass, now.plan, memory, own + 1);
    if (now.rows.size == 1) {
      SpOp last = head;
      last.in = ops[count - 1].out + now.rows[0].row * head.k;
      run_one_row(nullptr, last, memory.x.sums, after[2], panels);
    } else {
      after[0].run(now.rows.size, [&](int64_t r) {
        memcpy(rows.items + r * head.k, ops[count - 1].out + now.rows[r].row * head.k, head.k * sizeof(float));
      });
      run_linear_op(head, now.rows.size, memory.x, after + 1, panels);
    }
    after[3].run(draft->head_tokens ? now.rows.size : 0, [&](int64_t r) {
      for (int64_t i = 0; i < head.n; i++) logits[r * draft->num_logits + draft->head_tokens[i]] = head_out[r * head.n + i];
    });
    draw(step, after + 4);
  }
};

static void draft_tokens(const SpOp *ops, int count, const SpOp *head, const SpPass *first, const SpDraft *draft, const SpSums &sums,
                         int threads) {
  static thread_local Drafting own;
  Drafting &drafting = own;
  drafting.ops = ops, drafting.count = count, drafting.threads = threads;
  drafting.head = *head, drafting.first = first, drafting.draft = draft, drafting.partial = &own_partial(), drafting.memory.x.sums = sums;
  drafting.begin();
  run_together(threads, [&] {
    for (int64_t step = 0; step < drafting.depth; step++) drafting.run_step(step);
  });
}

// Read memory with the access pattern of linear layers, and nothing else.
static double read_all(const void *data, int64_t bytes, int threads) {
  const Steps steps(1023 * STREAMS);
  const int64_t size = steps.size();
  timespec started, ended;
  clock_gettime(CLOCK_MONOTONIC, &started);
  share_out(bytes / size, threads, [&](int64_t piece) {
    Vec sums[VECS];
    for (int v = 0; v < VECS; v++) sums[v] = zero();
    steps.each((const char *)data + piece * size, steps.count, [&](int64_t, const char *at) __attribute__((always_inline)) {
      prefetch_step(at, steps.ahead);
      for (int v = 0; v < VECS; v++) sums[v] = max(sums[v], load((const float *)at + v * LANES));
    });
    float largest = 0.0f;
    for (int v = 0; v < VECS; v++) largest += first_lane(sums[v]);
    asm volatile("" ::"m"(largest));  // it must be used, or nothing would be read
  });
  clock_gettime(CLOCK_MONOTONIC, &ended);
  return (double)(ended.tv_sec - started.tv_sec) + (double)(ended.tv_nsec - started.tv_nsec) / 1e9;
}

}  // namespace SP_NAMESPACE
