// Runs a recorded program. Every thread goes through the same stages in order and takes work items from the queue of each.
#pragma once
#include "attention.h"
#include "experts.h"
#include "probs.h"
#include "pack.h"
#include "table.h"
#include "tiles.h"

#include <time.h>

namespace SP_NAMESPACE {

static void plan_pass(const SpOp *ops, int count, const SpPass &pass, int threads, Plan &plan, List<float> &partial) {
  int64_t most = 0;
  for (int i = 0; i < count; i++) {
    const int64_t floats = ops[i].code == SP_ATTEND ? ops[i].heads * (padded_of(ops[i]) + 2) : 0;
    if (floats > most) most = floats;
  }
  if (most) plan_attention(most, pass, threads, plan, partial);
}

static inline void run_linear_op(const SpOp &op, int64_t rows, Tiles &x, WorkQueue *stages) {
  stages[0].run(packing_pieces(op, rows), [&](int64_t p) { pack_piece(op, rows, x, p); });
  stages[1].run(linear_pieces(op, rows), [&](int64_t p) { run_linear(op, rows, x, p); });
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
      stages[0].run(routed->found[0] * parts_of(op), [&](int64_t p) { pack_pairs(op, routing, memory.x, p); });
      return stages[1].run(routed->found[1] * panels_of(op.n), [&](int64_t p) { run_experts(op, routing, memory.x, p); });
    case SP_COMBINE: return stages[0].run(pass.rows * combined_parts(op), [&](int64_t p) { run_combine(op, routing, p); });
    case SP_EMBED: return stages[0].run(pass.rows, [&](int64_t t) { run_embed(op, pass, t); });
    case SP_COPY: return stages[0].run(pass.rows, [&](int64_t t) { run_copy(op, t); });
    case SP_GATE: return stages[0].run(pass.rows, [&](int64_t t) { run_gate(op, t); });
    case SP_NORM: return stages[0].run(pass.rows, [&](int64_t t) { run_norm(op, t); });
    case SP_LINEAR: return run_linear_op(op, pass.rows, memory.x, stages);
    case SP_ROTATE: return stages[0].run(pass.rows, [&](int64_t t) { run_rotate(op, pass, t); });
    case SP_ATTEND:
      stages[0].run(attend_pieces(op, plan), [&](int64_t p) { run_attend(op, pass, plan, p); });
      if (plan.split) stages[1].run(pass.rows * op.heads, [&](int64_t p) { run_merge(op, plan, p); });
  }
}

// Every thread of a parallel region calls this; stages are two per operation.
static inline void run_ops(const SpOp *ops, int count, const SpPass &pass, Plan &plan, Memory &memory, WorkQueue *stages) {
  const WorkQueue *routed = nullptr;
  for (int i = 0; i < count; i++) {
    run_op(ops[i], pass, plan, memory, stages + 2 * i, routed);
    if (ops[i].code == SP_ROUTE) routed = stages + 2 * i + 1;
  }
}

// Scratch of a calling thread, reused between runs: nothing is allocated once it has grown.
struct Scratch {
  Plan plan;
  List<float> partial;  // see Plan
  Memory memory;
  List<WorkQueue> stages;
};

static void run(const SpOp *ops, int count, const SpPass *pass, int threads) {
  static thread_local Scratch own;
  Scratch &scratch = own;  // that of the calling thread, in every thread that works
  clear_stages(scratch.stages, 2 * count);
  plan_pass(ops, count, *pass, threads, scratch.plan, scratch.partial);
  scratch.memory.make_room(ops, count, pass->rows);
  run_together(threads, [&] { run_ops(ops, count, *pass, scratch.plan, scratch.memory, scratch.stages.items); });
}

// A draft: steps of a pass, distributions and draws. All steps run in one parallel region: entering one is the largest cost while other
// programs use the processors. A thread may still read a step's data while another prepares the next step, so each step has its own.
struct Drafting {
  struct Step {
    int64_t drawing;  // sequences
    SpPass pass;
    Plan plan;
    List<double *> probs;
    List<SpEdits> edits;  // with the tokens drawn so far as `drafted`
    List<const SpEdits *> edits_of;
  };
  const SpOp *ops;
  int count, threads;
  SpOp head;
  const SpPass *first;
  const SpDraft *draft;
  List<float> rows, logits, head_out;  // head_out: the logits of a head whose rows are `head_tokens`
  List<float> partial;  // see Plan: of the running step; no thread reads an earlier step's
  List<double> unread;  // distributions of sequences that return none
  List<Share> shares;
  Memory memory;
  List<int64_t> tokens, positions, angles, slots, ended;  // ended[s]: whether no token follows
  List<SpSegment> segments;
  List<WorkQueue> stages;
  Step *steps = nullptr;
  int64_t num_steps = 0;
  ~Drafting() { delete[] steps; }

  int num_stages() const { return 2 * count + 12; }
  int64_t groups() const { return first->groups ? first->groups : 1; }

  void begin() {
    const int64_t most = draft->sequences, all = most * draft->steps;
    rows.resize(most * head.k), logits.resize(most * draft->num_logits), shares.resize(most * chunks_of(draft->width));
    for (int64_t s = 0; s < most; s++)
      if (!draft->out[s]) unread.resize(most * draft->width);
    ended.resize(most);
    for (int64_t s = 0; s < most; s++) ended[s] = 0;
    for (int64_t i = 0; i < all; i++) draft->drawn[i] = -1;
    tokens.resize(all), positions.resize(all), angles.resize(all), slots.resize(all * groups()), segments.resize(all);
    memory.make_room(ops, count, first->rows), memory.make_room(&head, 1, most);
    head.in = rows.items, head.out = logits.items;
    if (draft->head_tokens) {
      head_out.resize(most * head.n), head.out = head_out.items;
      for (int64_t i = 0; i < most * draft->num_logits; i++) logits[i] = -INFINITY;
    }
    clear_stages(stages, num_stages() * draft->steps);
    if (draft->steps > num_steps) {
      delete[] steps;
      steps = new Step[num_steps = draft->steps];
    }
  }

  // The pass whose input is the token that each of the first `drawing` sequences drew in the step before.
  SpPass next_pass(int64_t step, int64_t drawing) {
    SpPass pass = *first;
    const int64_t from = step * draft->sequences;
    for (int64_t s = 0; s < drawing; s++) {
      const SpSegment &segment = first->segments[s];
      const int64_t token = draft->drawn[s * draft->steps + step - 1], position = segment.start + segment.rows + step - 1;
      tokens[from + s] = 0 <= token && token < draft->num_logits ? token : 0;  // a draft may be any token, but the table has no other rows
      positions[from + s] = position;
      if (first->angles) angles[from + s] = first->angles[segment.first + segment.rows - 1] + step;
      segments[from + s] = {s, 1, position, 1, -1, segment.table, segment.blocks};
      for (int64_t g = 0; g < groups(); g++)
        slots[from * groups() + g * drawing + s] =
            segment.table[g * segment.blocks + position / first->block] * first->block + position % first->block;
    }
    pass.rows = pass.num_segments = drawing;
    pass.inputs = nullptr;
    pass.tokens = &tokens[from], pass.positions = &positions[from], pass.segments = &segments[from];
    pass.slots = &slots[from * groups()], pass.angles = first->angles ? &angles[from] : nullptr;
    return pass;
  }

  void prepare(int64_t step) {
    int64_t drawing = draft->sequences;
    while (drawing && (draft->limits[drawing - 1] <= step || ended[drawing - 1])) drawing--;
    Step &now = steps[step];
    now.drawing = drawing;
    if (!drawing) return;
    now.pass = step ? next_pass(step, drawing) : *first;
    plan_pass(ops, count, now.pass, threads, now.plan, partial);
    now.probs.resize(drawing);
    for (int64_t s = 0; s < drawing; s++)
      now.probs[s] = draft->out[s] ? draft->out[s] + step * draft->width : unread.items + s * draft->width;
    if (draft->edits) prepare_edits(step, now);
  }

  void prepare_edits(int64_t step, Step &now) {
    now.edits.resize(now.drawing), now.edits_of.resize(now.drawing);
    for (int64_t s = 0; s < now.drawing; s++) {
      now.edits_of[s] = draft->edits[s] ? now.edits.items + s : nullptr;
      if (!draft->edits[s]) continue;
      now.edits[s] = *draft->edits[s];
      now.edits[s].drafted = draft->drawn + s * draft->steps, now.edits[s].num_drafted = step;
    }
  }

  // Distributions and draws, after the pass.
  void draw(int64_t step, WorkQueue *stages) {
    const Step &now = steps[step];
    const SpEdits *const *edits = draft->edits ? now.edits_of.items : nullptr;
    const ProbsJob job = {logits.items, now.drawing, draft->num_logits, draft->width, draft->settings, edits, now.probs.items, shares.items};
    make_probs(job, stages);
    const int64_t chunks = job.chunks();
    const auto chance = [&](int64_t s) { return mix_in(draft->chances[2 * s], draft->chances[2 * s + 1] + step); };
    stages[5].run(job.rows * chunks, [&](int64_t p) {
      const int64_t s = p / chunks;
      share_draw(job.probs_of(s), job.width, draft->noise[s], chance(s), p % chunks, job.of(s)[p % chunks]);
    });
    stages[6].run(job.rows, [&](int64_t s) {
      const bool drawable = draft->noise[s] || is_distribution(job.of(s), chunks);  // a race without a winner returns -1 by itself
      int64_t token = -1;
      if (drawable && !ended[s]) token = finish_draw(job.probs_of(s), job.width, draft->noise[s], chance(s), job.of(s));
      ended[s] = token < 0 || job.probs_of(s)[token] < draft->stop_below;
      draft->drawn[s * draft->steps + step] = token;
    });
  }

  // Every thread of the parallel region calls it.
  void run_step(int64_t step) {
    WorkQueue *own = stages.items + step * num_stages(), *after = own + 1 + 2 * count;
    own[0].run(1, [&](int64_t) { prepare(step); });
    Step &now = steps[step];
    if (!now.drawing) return;
    run_ops(ops, count, now.pass, now.plan, memory, own + 1);
    after[0].run(now.drawing, [&](int64_t s) {
      const int64_t last = now.pass.segments[s].first + now.pass.segments[s].rows - 1;
      memcpy(rows.items + s * head.k, ops[count - 1].out + last * head.k, head.k * sizeof(float));
      if (draft->carried) memcpy(draft->states + s * draft->state_size, draft->carried + last * draft->state_size, draft->state_size * sizeof(float));
    });
    run_linear_op(head, now.drawing, memory.x, after + 1);
    if (draft->head_tokens)
      after[10].run(now.drawing, [&](int64_t s) {
        for (int64_t i = 0; i < head.n; i++) logits[s * draft->num_logits + draft->head_tokens[i]] = head_out[s * head.n + i];
      });
    draw(step, after + 3);
  }
};

static void draft_tokens(const SpOp *ops, int count, const SpOp *head, const SpPass *first, const SpDraft *draft, int threads) {
  static thread_local Drafting own;
  Drafting &drafting = own;
  drafting.ops = ops, drafting.count = count, drafting.threads = threads;
  drafting.head = *head, drafting.first = first, drafting.draft = draft;
  drafting.begin();
  run_together(threads, [&] {
    for (int64_t step = 0; step < draft->steps; step++) drafting.run_step(step);
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
    asm volatile("" ::"x"(largest));  // it must be used, or nothing would be read
  });
  clock_gettime(CLOCK_MONOTONIC, &ended);
  return (double)(ended.tv_sec - started.tv_sec) + (double)(ended.tv_nsec - started.tv_nsec) / 1e9;
}

}  // namespace SP_NAMESPACE

extern const SpTable SP_TABLE_NAME = {SP_NAMESPACE::run, SP_NAMESPACE::pack, SP_NAMESPACE::packed_bytes,
                                      SP_NAMESPACE::index_panels, SP_NAMESPACE::code_panels, SP_NAMESPACE::touch,
                                      SP_NAMESPACE::draft_tokens, SP_NAMESPACE::probs, SP_NAMESPACE::draw, SP_NAMESPACE::read_all,
                                      SP_NAMESPACE::checksum};
