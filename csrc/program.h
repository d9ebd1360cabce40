// Runs a recorded program. Every thread goes through the same stages in order and takes what pieces are left of each.
#pragma once
#include "attention.h"
#include "laws.h"
#include "pack.h"
#include "prepared.h"
#include "table.h"

namespace SP_NAMESPACE {

// Memory that a calling thread keeps between runs: nothing is allocated once it has grown.
struct Kept {
  Plan plan;
  Prepared x;
  List<Pieces> stages;  // two per operation
};

static void prepare(const SpOp *ops, int count, const SpPass &pass, int threads, Kept &kept) {
  kept.stages.resize(2 * count);
  memset((void *)kept.stages.items, 0, 2 * count * sizeof(Pieces));
  bool planned = false;  // all layers have the same shape
  for (int i = 0; i < count; i++) {
    if (ops[i].code == SP_ATTEND && !planned) plan_attention(ops[i], pass, threads, kept.plan), planned = true;
    if (is_prepared(ops[i])) make_room(ops[i], pass.rows, kept.x);
  }
}

static inline void run_linear_op(const SpOp &op, const SpPass &pass, Kept &kept, Pieces &first, Pieces &second) {
  if (is_prepared(op)) {
    first.run(pass.rows, [&](int64_t t) { prepare_row(op, kept.x, t); });
    second.run(prepared_pieces(op, pass.rows), [&](int64_t p) { run_prepared(op, pass, kept.x, p); });
  } else {
    first.run(linear_pieces(op, pass.rows, MOST_ROWS), [&](int64_t p) { run_linear(op, op.in, op.k, pass, p); });
  }
}

static inline void run_op(const SpOp &op, const SpPass &pass, Kept &kept, Pieces &first, Pieces &second) {
  switch (op.code) {
    case SP_EMBED: return first.run(pass.rows, [&](int64_t t) { run_embed(op, pass, t); });
    case SP_NORM: return first.run(pass.rows, [&](int64_t t) { run_norm(op, t); });
    case SP_LINEAR: return run_linear_op(op, pass, kept, first, second);
    case SP_ROTATE: return first.run(pass.rows, [&](int64_t t) { run_rotate(op, pass, t); });
    case SP_ATTEND:
      first.run(attend_pieces(op, kept.plan), [&](int64_t p) { run_attend(op, pass, kept.plan, p); });
      if (kept.plan.split) second.run(pass.rows * op.heads, [&](int64_t p) { run_merge(op, kept.plan, p); });
  }
}

static void run(const SpOp *ops, int count, const SpPass *pass, int threads) {
  static thread_local Kept own;
  Kept &kept = own;  // the caller's, in every thread of the team
  prepare(ops, count, *pass, threads, kept);
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (int i = 0; i < count; i++) run_op(ops[i], *pass, kept, kept.stages[2 * i], kept.stages[2 * i + 1]);
}

// Memory for the steps of a draft.
struct KeptDraft {
  List<float> rows, logits;
  List<Share> shares;
  List<int64_t> tokens, positions, slots;
  List<SpSegment> segments;
};

// The pass that feeds what the first `count` sequences drew in the step before.
static SpPass next_pass(const SpPass &first, const SpOp &head, const SpDraft &draft, int64_t step, int64_t count, KeptDraft &kept) {
  SpPass pass = first;
  kept.tokens.resize(count), kept.positions.resize(count), kept.slots.resize(count), kept.segments.resize(count);
  for (int64_t s = 0; s < count; s++) {
    const SpSegment &segment = first.segments[s];
    const int64_t token = draft.drawn[s * draft.steps + step - 1], position = segment.start + segment.rows + step - 1;
    kept.tokens[s] = token < head.n ? token : 0;  // any guess is legal, but no row of the table is beyond its end
    kept.positions[s] = position;
    kept.slots[s] = draft.slots[s * draft.steps + step - 1];
    kept.segments[s] = {s, 1, position, 1, -1, segment.table};
  }
  pass.rows = pass.num_segments = count;
  pass.tokens = kept.tokens.items, pass.positions = kept.positions.items, pass.slots = kept.slots.items;
  pass.segments = kept.segments.items;
  return pass;
}

// Logits, laws and draws of a step, behind its pass. Every thread of the team calls it.
static void draw_step(const SpOp &head, const LawJob &job, const SpDraft &draft, int64_t step, Kept &kept, Pieces *stages) {
  SpPass rows = {};
  rows.rows = job.rows;
  run_linear_op(head, rows, kept, stages[0], stages[1]);
  make_laws(job, stages + 2);
  const int64_t chunks = job.chunks();
  const auto chance = [&](int64_t s) { return draft.chances[s * draft.steps + step]; };
  stages[6].run(job.rows * chunks, [&](int64_t p) {
    const int64_t s = p / chunks;
    share_draw(job.law(s), job.width, draft.coupled[s], chance(s), p % chunks, job.of(s)[p % chunks]);
  });
  stages[7].run(job.rows, [&](int64_t s) {
    draft.drawn[s * draft.steps + step] = finish_draw(job.law(s), job.width, draft.coupled[s], chance(s), job.of(s));
  });
}

static void draft_tokens(const SpOp *ops, int count, const SpOp *given_head, const SpPass *first, const SpDraft *draft, int threads) {
  static thread_local KeptDraft own;
  static thread_local Kept head_kept;
  KeptDraft &kept = own;
  Kept &for_head = head_kept;
  const float *hidden = ops[count - 1].out;
  SpOp head = *given_head;
  int64_t drawing = draft->sequences;
  kept.rows.resize(drawing * head.k), kept.logits.resize(drawing * head.n);
  kept.shares.resize(drawing * chunks_of(draft->width));
  head.in = kept.rows.items, head.out = kept.logits.items;
  for (int64_t step = 0; step < draft->steps; step++) {
    while (drawing && draft->limits[drawing - 1] <= step) drawing--;
    const SpPass pass = step ? next_pass(*first, head, *draft, step, drawing, kept) : *first;
    run(ops, count, &pass, threads);
    for (int64_t s = 0; s < drawing; s++) {
      const float *last = hidden + (pass.segments[s].first + pass.segments[s].rows - 1) * head.k;
      memcpy(kept.rows.items + s * head.k, last, head.k * sizeof(float));
    }
    const LawJob job = {head.out,    drawing, head.n, draft->width, draft->laws, draft->out + step * draft->width,
                        draft->steps * draft->width, kept.shares.items};
    if (is_prepared(head)) make_room(head, drawing, for_head.x);
    Pieces stages[8] = {};
#pragma omp parallel num_threads(threads) if (threads > 1)
    draw_step(head, job, *draft, step, for_head, stages);
  }
}

static double read_all(const void *data, int64_t bytes, int threads) {
  const int64_t size = 1 << 20;
  const double started = omp_get_wtime();
  Pieces pieces = {0, 0};
  float total = 0.0f;
#pragma omp parallel num_threads(threads) reduction(+ : total) if (threads > 1)
  pieces.run(bytes / size, [&](int64_t piece) {
    const char *from = (const char *)data + piece * size;
    Vec sums[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0; i < size; i += 4 * LANES * 4)
      for (int v = 0; v < 4; v++) {
        prefetch(from + i + v * LANES * 4 + 4096);
        sums[v] = max(sums[v], load((const float *)(from + i) + v * LANES));
      }
    total += first_lane(max(max(sums[0], sums[1]), max(sums[2], sums[3])));
  });
  const double seconds = omp_get_wtime() - started;
  return total == -1.0f ? -seconds : seconds;  // the sum must be used, or nothing would be read
}

}  // namespace SP_NAMESPACE

extern const SpTable SP_TABLE_NAME = {SP_NAMESPACE::run, SP_NAMESPACE::pack, SP_NAMESPACE::packed_bytes,
                                      SP_NAMESPACE::draft_tokens, SP_NAMESPACE::laws, SP_NAMESPACE::draw, SP_NAMESPACE::read_all};
