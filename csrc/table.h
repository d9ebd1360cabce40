// The functions of each width of vectors, and the sums of each instruction set, for the dispatcher.
#pragma once
#include "speculant.h"

// Packed rows of x, converted to the type that the weights are multiplied by (tiles.h).
struct SpRows {
  int64_t rows;
  const void *dwords;      // in tiles, see linear.h, or rows, see SpSums; for weights in groups: [groups][rows][32] int8
  const float *scales;     // for weights in groups: see integers.h
  const int32_t *offsets;
};

// sums[rows][WIDTH] of one panel and some rows, over k inputs. Of SP_BF12, `panel` is its entry in the index.
typedef void (*SpSum)(const char *panel, const SpRows &rows, int64_t k, float *sums);

// The functions that multiply weights. Two sets may have the same functions.
struct SpSums {
  const SpSum *floats;  // by SpType, and SP_FP8 after SP_BF12; for layers with SP_ALIKE in any case
  const SpSum *pairs;   // SP_BF16 and SP_BF12 by rows that are rounded to bfloat16, in place of those in `floats`; or NULL
  const SpSum *groups;  // by SpType, from SP_INT8 on
  int64_t tile = 0;     // of AMX: rows for `pairs` are not packed in the tiles of linear.h but stay rows, of a multiple of `tile` dwords, and
                        // the number of rows for `pairs` and `groups` is read as a multiple of `tile`. 0 = there are no such tiles
  const SpSum *quick = nullptr;  // in place of `floats`, and faster: products are rounded before they are added
};

struct SpTable {
  const char *(*check)(const SpOp *ops, int count, const SpOp *head, const SpBounds *bounds, int *at);
  void (*run)(const SpOp *ops, int count, const SpPass *pass, const SpSums &sums, int threads);
  void (*pack)(int type, int source, const void *weight, int64_t n, int64_t k, int64_t step, void *packed, int threads);
  void (*round)(int type, int source, const void *weights, int64_t n, int64_t k, uint8_t *blocks, int threads);
  void (*decode)(int type, const void *blocks, int64_t n, int64_t k, int target, void *out, int threads);
  int64_t (*packed_bytes)(int type, int64_t n, int64_t k);
  int64_t (*index_panels)(int64_t panels, int64_t k, const void *plain, void *index, int64_t data, int threads);
  void (*code_panels)(int64_t panels, int64_t k, const void *plain, void *index, int threads);
  void (*touch)(void *memory, int64_t bytes, int threads);
  void (*draft)(const SpOp *ops, int count, const SpOp *head, const SpPass *pass, const SpDraft *draft, const SpSums &sums, int threads);
  void (*probs)(float *logits, int64_t rows, int64_t given, int64_t width, const SpSamplingSettings *settings,
                const SpEdits *const *edits, double *out, int threads);
  int64_t (*draw)(const double *weights, int64_t n, int shared_noise, uint64_t chance);
  void (*draw_rows)(const double *weights, int64_t n, const SpRowDraw *draws, int64_t count, int64_t *tokens, int threads);
  void (*normalise)(const double *weights, int64_t n, double *out);
  double (*read)(const void *data, int64_t bytes, int threads);
  uint64_t (*checksum)(const void *data, int64_t bytes, int threads);
  int64_t (*stage_items)(int64_t *items, int64_t most);
};
