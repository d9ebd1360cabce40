// Forwards calls to the kernels of an instruction set. CMakeLists.txt defines the sets that are built.
#include "processor.h"
#include "table.h"

namespace portable { extern const SpTable TABLE; extern const SpSum FLOATS[], GROUPS[]; }
namespace fused { extern const SpSum FLOATS[]; }  // portable::FLOATS, where products are not rounded before they are added
namespace avx2 { extern const SpTable TABLE; extern const SpSum FLOATS[], GROUPS[]; }
namespace avxvnni { extern const SpSum GROUPS[]; }  // the instruction adds products of integers, and nothing else differs
namespace avx512 { extern const SpTable TABLE; extern const SpSum FLOATS[], GROUPS[]; }
namespace avx512vnni { extern const SpSum GROUPS[]; }  // the same
namespace avx512bf16 { extern const SpSum FLOATS[]; }  // this one multiplies pairs of bfloat16
namespace amx { extern const SpSum FLOATS[], GROUPS[]; }  // tiles, for pairs of bfloat16 and for several rows of integers
namespace neon { extern const SpTable TABLE; extern const SpSum FLOATS[], GROUPS[]; }
namespace neondot { extern const SpSum GROUPS[]; }  // products of signed integers
namespace neoni8mm { extern const SpSum GROUPS[]; }  // products of unsigned and signed ones

static const struct {
  const char *name;
  const SpTable *table;
  SpSums sums;
  bool (*usable)();
  bool by_default;  // used without being named: its speed was measured, or (ARM) there is only `portable` otherwise
} SETS[] = {
#if defined(SP_WITH_AMX) && defined(SP_MODELS)
    {"amx", &avx2::TABLE, {avx2::FLOATS, amx::FLOATS, amx::GROUPS, 16}, has_amx, false},
#elif defined(SP_WITH_AMX)
    {"amx", &avx512::TABLE, {avx512::FLOATS, amx::FLOATS, amx::GROUPS, 16}, has_amx, false},
#endif
#if defined(SP_WITH_AVX512BF16)
    {"avx512bf16", &avx512::TABLE, {avx512::FLOATS, avx512bf16::FLOATS, avx512vnni::GROUPS}, has_avx512bf16, true},
#endif
#if defined(SP_WITH_AVX512VNNI)
    {"avx512vnni", &avx512::TABLE, {avx512::FLOATS, nullptr, avx512vnni::GROUPS}, has_avx512vnni, true},
#endif
#if defined(SP_WITH_AVX512)
    {"avx512", &avx512::TABLE, {avx512::FLOATS, nullptr, avx512::GROUPS}, has_avx512, true},
#endif
#if defined(SP_WITH_AVXVNNI)
    {"avxvnni", &avx2::TABLE, {avx2::FLOATS, nullptr, avxvnni::GROUPS}, has_avxvnni, false},
#endif
#if defined(SP_WITH_AVX2)
    {"avx2", &avx2::TABLE, {avx2::FLOATS, nullptr, avx2::GROUPS}, has_avx2, true},
#endif
#if defined(SP_WITH_NEONI8MM)
    {"neoni8mm", &neon::TABLE, {neon::FLOATS, nullptr, neoni8mm::GROUPS}, has_neoni8mm, true},
#endif
#if defined(SP_WITH_NEONDOT)
    {"neondot", &neon::TABLE, {neon::FLOATS, nullptr, neondot::GROUPS}, has_neondot, true},
#endif
#if defined(SP_WITH_NEON)
    {"neon", &neon::TABLE, {neon::FLOATS, nullptr, neon::GROUPS}, has_neon, true},
#endif
#if defined(SP_WITH_PORTABLE)
    {"portable", &portable::TABLE, {fused::FLOATS, nullptr, portable::GROUPS, 0, portable::FLOATS}, always, true},
#endif
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

int sp_version(void) { return 30; }

const char *sp_name(int set) { return 0 <= set && set < NUM_SETS ? SETS[set].name : nullptr; }

int sp_usable(int set) { return SETS[set].usable(); }

int sp_by_default(int set) { return SETS[set].by_default; }

int64_t sp_packed_bytes(int set, int type, int64_t n, int64_t k) { return SETS[set].table->packed_bytes(type, n, k); }

void sp_pack(int set, int threads, int type, int source, const void *weight, int64_t n, int64_t k, int64_t step, void *packed) {
  SETS[set].table->pack(type, source, weight, n, k, step, packed, threads);
}

void sp_round(int set, int threads, int type, int source, const void *weights, int64_t n, int64_t k, void *blocks) {
  SETS[set].table->round(type, source, weights, n, k, (uint8_t *)blocks, threads);
}

void sp_decode(int set, int threads, int type, const void *blocks, int64_t n, int64_t k, int target, void *out) {
  SETS[set].table->decode(type, blocks, n, k, target, out, threads);
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

void sp_run(int set, int threads, const SpOp *ops, int count, const SpPass *pass) { SETS[set].table->run(ops, count, pass, SETS[set].sums, threads); }

void sp_draft(int set, int threads, const SpOp *ops, int count, const SpOp *head, const SpPass *pass, const SpDraft *draft) {
  SETS[set].table->draft(ops, count, head, pass, draft, SETS[set].sums, threads);
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
