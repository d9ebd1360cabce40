// Forwards calls to the translation unit of an instruction set.
#include "table.h"

extern const SpTable sp_table_portable;
static bool always() { return true; }

#if defined(__x86_64__)
extern const SpTable sp_table_avx2, sp_table_avx512, sp_table_avx512vnni;
static bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
static bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
static bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#if defined(SP_BF16_PAIRS)  // the compiler has the instruction, or it is emulated
extern const SpTable sp_table_avx512bf16;
static bool has_avx512bf16() {
#if defined(SP_BF16_MODEL)
  return has_avx512vnni();
#else
  return has_avx512vnni() && __builtin_cpu_supports("avx512bf16");
#endif
}
#endif
#endif

static const struct {
  const char *name;
  const SpTable *table;
  bool (*usable)();
} SETS[] = {
#if defined(__x86_64__)
#if defined(SP_BF16_PAIRS)
    {"avx512bf16", &sp_table_avx512bf16, has_avx512bf16},
#endif
    {"avx512vnni", &sp_table_avx512vnni, has_avx512vnni},
    {"avx512", &sp_table_avx512, has_avx512},
    {"avx2", &sp_table_avx2, has_avx2},
#endif
    {"portable", &sp_table_portable, always},
};
static const int NUM_SETS = sizeof SETS / sizeof SETS[0];

static int64_t fastest_streams() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") ? 1 : 8;
#else
  return 8;
#endif
}

extern "C" {

int64_t sp_group_streams = fastest_streams();

int sp_version(void) { return 24; }

const char *sp_name(int set) { return 0 <= set && set < NUM_SETS ? SETS[set].name : nullptr; }

int sp_usable(int set) { return SETS[set].usable(); }

int64_t sp_packed_bytes(int set, int type, int64_t n, int64_t k) { return SETS[set].table->packed_bytes(type, n, k); }

void sp_pack(int set, int threads, int type, int source, const void *weight, int64_t n, int64_t k, int64_t step, void *packed) {
  SETS[set].table->pack(type, source, weight, n, k, step, packed, threads);
}

void sp_round(int set, int threads, int type, int source, const void *weights, int64_t n, int64_t k, void *blocks) {
  SETS[set].table->round(type, source, weights, n, k, (uint8_t *)blocks, threads);
}

int64_t sp_index_panels(int set, int threads, int64_t panels, int64_t k, const void *plain, void *index, int64_t data) {
  return SETS[set].table->index_panels(panels, k, plain, index, data, threads);
}

void sp_code_panels(int set, int threads, int64_t panels, int64_t k, const void *plain, void *index) {
  SETS[set].table->code_panels(panels, k, plain, index, threads);
}

void sp_touch(int set, int threads, void *memory, int64_t bytes) { SETS[set].table->touch(memory, bytes, threads); }

const char *sp_check(int set, const SpOp *ops, int count, const SpOp *head, const SpBounds *bounds, int *at) {
  return SETS[set].table->check(ops, count, head, bounds, at);
}

void sp_run(int set, int threads, const SpOp *ops, int count, const SpPass *pass) { SETS[set].table->run(ops, count, pass, threads); }

void sp_draft(int set, int threads, const SpOp *ops, int count, const SpOp *head, const SpPass *pass, const SpDraft *draft) {
  SETS[set].table->draft(ops, count, head, pass, draft, threads);
}

void sp_probs(int set, int threads, float *logits, int64_t rows, int64_t given, int64_t width, const SpSamplingSettings *settings,
              const SpEdits *const *edits, double *out) {
  SETS[set].table->probs(logits, rows, given, width, settings, edits, out, threads);
}

void sp_normalise(int set, const double *weights, int64_t n, double *out) { SETS[set].table->normalise(weights, n, out); }

int64_t sp_draw(int set, const double *weights, int64_t n, int shared_noise, uint64_t chance) {
  return SETS[set].table->draw(weights, n, shared_noise, chance);
}

void sp_draw_rows(int set, int threads, const double *weights, int64_t n, const SpRowDraw *draws, int64_t count, int64_t *tokens) {
  SETS[set].table->draw_rows(weights, n, draws, count, tokens, threads);
}

double sp_read(int set, int threads, const void *data, int64_t bytes) { return SETS[set].table->read(data, bytes, threads); }

uint64_t sp_checksum(int set, int threads, const void *data, int64_t bytes) { return SETS[set].table->checksum(data, bytes, threads); }

int64_t sp_stage_items(int set, int64_t *items, int64_t most) { return SETS[set].table->stage_items(items, most); }

}  // extern "C"
