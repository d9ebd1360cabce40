// Linear layers that do not multiply float32. A stage before such a layer makes of each row what its instruction takes:
//
//   int8 and int4 weights   the row in int8 (quantized.h)
//   bfloat16 weights        the row rounded to bfloat16, where the processor multiplies pairs of them (linear.h)
#pragma once
#include "quantized.h"

namespace SP_NAMESPACE {

// A layer's rows, prepared.
struct Prepared {
  Quantized quantized;
  List<uint16_t> rounded;  // [T, even_depth(k)] bfloat16
};

static inline bool is_prepared(const SpOp &op) {
  return op.code == SP_LINEAR && (op.type == SP_INT8 || op.type == SP_INT4 || (op.type == SP_BF16 && ROUNDS));
}

static inline int64_t even_depth(int64_t k) { return (k + 1) / 2 * 2; }

static void round_row(const float *x, int64_t k, uint16_t *rounded) {
  for (int64_t i = 0; i < k; i++) rounded[i] = to_bf16(x[i]);
  if (k % 2) rounded[k] = 0;
}

static void make_room(const SpOp *ops, int count, int64_t rows, Prepared &x) {
  for (int i = 0; i < count; i++) {
    if (!is_prepared(ops[i])) continue;
    if (ops[i].type == SP_BF16)
      x.rounded.resize(rows * even_depth(ops[i].k));
    else
      x.quantized.resize(rows, ops[i].k);
  }
}

static inline void prepare_row(const SpOp &op, Prepared &x, int64_t t) {
  if (op.type == SP_BF16)
    round_row(op.in + t * op.k, op.k, x.rounded.items + t * even_depth(op.k));
  else
    run_quantize(op, x.quantized, t);
}

static inline int64_t prepared_pieces(const SpOp &op, int64_t rows) {
  return linear_pieces(op, rows, op.type == SP_BF16 ? MOST_ROWS : MOST_QUANTIZED_ROWS);
}

static inline void run_prepared(const SpOp &op, int64_t rows, Prepared &x, int64_t piece) {
#if defined(SP_BF16_PAIRS)
  if (op.type == SP_BF16) return run_linear(op, x.rounded.items, even_depth(op.k), rows, piece);
#endif
  run_quantized(op, rows, x.quantized, piece);
}

}  // namespace SP_NAMESPACE
