// Checks a program once, when it is built: whether every operation stays within the memory that its pointers have, for any pass within
// some bounds. Kernels check nothing themselves.
#pragma once
#include "experts.h"
#include "pack.h"
#include "states.h"

namespace SP_NAMESPACE {

// The first thing that is wrong with an operation.
struct Finding {
  const char *what = nullptr;

  void need(bool fine, const char *otherwise) {
    if (!fine && !what) what = otherwise;
  }
  // An array of at least `count` items.
  void array(const void *at, int64_t has, int64_t count, const char *otherwise) { need(at && count >= 0 && has >= count, otherwise); }
  // The same, or none.
  void option(const void *at, int64_t has, int64_t count, const char *otherwise) {
    if (at) array(at, has, count, otherwise);
  }
};

static inline int64_t lanes_of(const SpOp &op) { return op.flags & SP_GATED ? 2 : 1; }

// The bytes of a packed matrix [n, k], or of two that are interleaved. Of coded panels, those of the index: the panels follow it.
static inline int64_t least_bytes(int type, int64_t n, int64_t k, int64_t lanes) {
  return lanes * (type == SP_BF12 ? panels_of(n) * SP_INDEX_BYTES : packed_bytes(type, n, k));
}

static void check_sizes(const SpOp &op, Finding &found) {
  constexpr int64_t MOST = (int64_t)1 << 40;
  found.need(op.n >= 0 && op.n < MOST && op.k >= 0 && op.k < MOST && op.stride >= 0 && op.stride < MOST, "sizes out of range");
  found.need(op.type >= SP_F32 && op.type <= SP_FP8, "an unknown type");
}

static void check_norm(const SpOp &op, int64_t width, int64_t key_width, Finding &found) {
  found.option(op.scale, op.has.scale, width, "a norm with fewer scales than it multiplies");
  found.option(op.bias, op.has.bias, width, "a norm with a shorter bias");
  found.option(op.key_scale, op.has.key_scale, key_width, "a norm of keys with fewer scales than it multiplies");
  found.option(op.key_bias, op.has.key_bias, key_width, "a norm of keys with a shorter bias");
}

// ends: whether it has an input and an output.
static void check_linear(const SpOp &op, int64_t rows, bool ends, Finding &found) {
  const int64_t lanes = lanes_of(op), stride = op.stride ? op.stride : op.n;
  found.array(op.weight, op.has.weight, least_bytes(op.type, op.n, op.k, lanes), "a smaller matrix");
  found.option(op.bias, op.has.bias, lanes * op.n, "a shorter bias");
  found.option(op.order, op.has.order, op.k, "a shorter order of inputs");
  for (int64_t i = 0; !found.what && op.order && i < op.k; i++)
    found.need(op.order[i] >= 0 && op.order[i] < op.k, "an order of inputs that it does not have");
  if (!ends) return;
  found.array(op.in, op.has.in, rows * op.k, "a smaller input");
  found.array(op.out, op.has.out, (rows - 1) * stride + op.n, "a smaller output");
}

// The heads of SP_ROTATE and SP_ATTEND.
static void check_heads(const SpOp &op, const SpBounds &bounds, Finding &found) {
  found.need(op.dim > 0 && op.dim <= MOST_DIM && op.heads >= 0 && op.kv_heads >= 0, "heads of a size that kernels don't have");
  if (!op.kv_heads) return;
  found.need(op.layer >= 0 && op.layer < bounds.layers, "a layer that the cache does not have");
  found.need(op.group >= 0 && op.group < bounds.groups, "a group of layers that the cache does not have");
  found.need(op.type == SP_F32 || op.type == SP_BF16 || op.type == SP_INT8, "keys of a type that the cache does not have");
  if (!found.what) found.need(op.kv_heads * cached_bytes(op) == bounds.slots[op.layer], "heads other than those of the cache");
}

static void check_rotate(const SpOp &op, const SpBounds &bounds, Finding &found) {
  check_heads(op, bounds, found);
  const bool all = op.flags & SP_ALL_HEADS;
  check_norm(op, all ? op.heads * op.dim : op.dim, all ? op.kv_heads * op.dim : op.dim, found);
  const int64_t width = (op.heads + 2 * op.kv_heads) * op.dim;
  found.array(op.in, op.has.in, (bounds.rows - 1) * qkv_stride(op) + width, "fewer queries, keys and values");
  found.need(op.rotated >= 0 && op.rotated <= op.dim && op.rotated % 2 == 0, "a rotation of dimensions that a head does not have in pairs");
  if (found.what || !op.rotated) return;
  found.need(op.rope >= 0 && op.rope < bounds.ropes, "angles that the model does not have");
  if (!found.what) found.need(bounds.angles[op.rope] == op.rotated / 2, "a table of angles of another width");
}

static void check_attend(const SpOp &op, const SpBounds &bounds, Finding &found) {
  check_heads(op, bounds, found);
  found.need(op.kv_heads > 0 && op.heads > 0 && op.heads % op.kv_heads == 0 && op.window >= 0, "queries that share no key heads");
  found.array(op.in, op.has.in, (bounds.rows - 1) * qkv_stride(op) + op.heads * op.dim, "fewer queries");
  found.array(op.out, op.has.out, bounds.rows * op.heads * op.dim, "a smaller output");
  found.option(op.sinks, op.has.sinks, op.heads, "fewer sinks than heads");
  found.need(op.before >= 0 && op.after >= 0, "a table of negative length");
  found.option(op.distances, op.has.distances, op.heads * (op.before + 1 + op.after), "a shorter table of distances");
}

// routed: the last SP_ROUTE before it, or NULL.
static void check_experts(const SpOp &op, const SpOp *routed, int64_t rows, Finding &found) {
  const int64_t lanes = lanes_of(op), pairs = rows * op.used;
  found.need(routed && routed->used == op.used, "pairs other than those that were selected");
  if (found.what) return;
  if (op.code == SP_COMBINE) {
    found.array(op.in, op.has.in, pairs * op.n, "fewer results");
    return found.array(op.out, op.has.out, rows * op.n, "a smaller output");
  }
  found.array(op.weight, op.has.weight, routed->n, "fewer matrices than experts");
  found.need(op.has.matrix >= least_bytes(op.type, op.n, op.k, lanes), "smaller matrices");
  found.option(op.bias, op.has.bias, routed->n * lanes * op.n, "a shorter bias");
  found.array(op.in, op.has.in, (op.flags & SP_GATHER ? rows : pairs) * op.k, "a smaller input");
  found.array(op.out, op.has.out, pairs * op.n, "a smaller output");
}

// What SP_CONVOLVE and SP_RECUR have in common: the sizes of a record.
static void check_record(const SpOp &op, const SpBounds &bounds, Finding &found) {
  found.need(op.layer >= 0 && op.layer < bounds.layers && bounds.records, "a layer that has no states");
  found.need(op.window > 0 && op.window <= MOST_WINDOW && op.n > 0, "a convolution of a size that kernels don't have");
  found.need(op.heads >= 0 && op.kv_heads >= 0 && op.k <= MOST_KEY_DIM && op.dim >= 0 && op.dim <= MOST_DIM, "states of a size that kernels don't have");
  if (!found.what) found.need(RecordShape(op).size() == bounds.records[op.layer], "states other than those of the cache");
}

static void check_convolve(const SpOp &op, const SpBounds &bounds, Finding &found) {
  check_record(op, bounds, found);
  if (found.what) return;
  found.array(op.in, op.has.in, (bounds.rows - 1) * op.stride + (op.flags & SP_GATED ? 3 : 1) * op.n, "a smaller input");
  found.array(op.scale, op.has.scale, op.window * op.n, "fewer weights");
  found.option(op.bias, op.has.bias, op.n, "a shorter bias");
  found.array(op.out, op.has.out, bounds.rows * op.n, "a smaller output");
}

static void check_recur(const SpOp &op, const SpBounds &bounds, Finding &found) {
  check_record(op, bounds, found);
  found.need(op.k > 0 && op.dim > 0 && op.heads > 0 && op.kv_heads > 0 && op.heads % op.kv_heads == 0, "states that share no keys");
  if (found.what) return;
  const int64_t width = (int64_t)op.heads * op.dim;
  const bool scans = op.flags & SP_SCAN;
  found.need(op.n == 2 * op.kv_heads * op.k + width, "rows of another width than queries, keys and values");
  found.array(op.in, op.has.in, bounds.rows * op.n, "fewer queries, keys and values");
  found.array(op.gates, op.has.gates, (bounds.rows - 1) * op.stride + width + (scans ? op.n : op.heads) + op.heads, "fewer gates");
  found.option(op.scale, op.has.scale, scans ? width : op.dim, "a norm with fewer scales than it multiplies");
  if (scans) found.array(op.bias, op.has.bias, op.heads, "fewer factors of values than states");
  found.array(op.key_scale, op.has.key_scale, op.heads, "fewer rates than states");
  found.array(op.key_bias, op.has.key_bias, op.heads, "a shorter bias of rates");
  found.array(op.out, op.has.out, bounds.rows * width, "a smaller output");
}

static void check_op(const SpOp &op, const SpOp *routed, const SpBounds &bounds, Finding &found) {
  const int64_t rows = bounds.rows, numbers = rows * op.n;
  check_sizes(op, found);
  if (found.what) return;
  switch (op.code) {
    case SP_EMBED:
      found.array(op.weight, op.has.weight, least_bytes(op.type, op.k, op.n, 1), "a smaller table");
      found.need(op.k >= bounds.tokens, "a table without all tokens");
      found.option(op.learned, op.has.learned, bounds.positions * op.n, "a table without all positions");
      found.need(!op.learned || bounds.positions, "learned positions that passes don't have");
      return found.array(op.out, op.has.out, numbers, "a smaller output");
    case SP_NORM:
      found.need(op.scale, "no scales");
      check_norm(op, op.n, 0, found);
      found.option(op.copy, op.has.copy, numbers, "a smaller copy");
      break;
    case SP_COPY: break;
    case SP_GATE:
      found.array(op.in, op.has.in, op.flags & SP_EACH ? rows : numbers, "a smaller input");
      return found.array(op.out, op.has.out, numbers, "a smaller output");
    case SP_LINEAR: return check_linear(op, rows, true, found);
    case SP_ROTATE: return check_rotate(op, bounds, found);
    case SP_ATTEND: return check_attend(op, bounds, found);
    case SP_CONVOLVE: return check_convolve(op, bounds, found);
    case SP_RECUR: return check_recur(op, bounds, found);
    case SP_ROUTE:
      found.need(op.used >= 1 && op.used <= op.n && op.n <= MOST_EXPERTS, "experts out of range");
      found.option(op.bias, op.has.bias, op.n, "a shorter bias");
      return found.array(op.in, op.has.in, numbers, "fewer scores");
    case SP_EXPERTS:
    case SP_COMBINE: return check_experts(op, routed, rows, found);
    default: return found.need(false, "an unknown code");
  }
  found.array(op.in, op.has.in, numbers, "a smaller input");
  found.array(op.out, op.has.out, numbers, "a smaller output");
}

// The head of a draft reads the result of the last operation; its logits are of all tokens, or of `head_tokens`.
static void check_head(const SpOp &head, const SpOp &last, const SpBounds &bounds, Finding &found) {
  check_sizes(head, found);
  found.need(head.code == SP_LINEAR && head.k == last.n, "a head of another width");
  if (!found.what) check_linear(head, bounds.rows, false, found);
  found.need(head.n == (bounds.head_tokens ? bounds.num_head_tokens : bounds.tokens), "a head with other rows than tokens");
  for (int64_t i = 0; !found.what && bounds.head_tokens && i < head.n; i++)
    found.need(bounds.head_tokens[i] >= 0 && bounds.head_tokens[i] < bounds.tokens, "a head with a token that the model does not have");
}

static const char *check(const SpOp *ops, int count, const SpOp *head, const SpBounds *bounds, int *at) {
  const SpOp *routed = nullptr;
  Finding found;
  found.need(bounds->rows > 0, "no rows");
  for (*at = 0; *at < count && !found.what; ++*at) {
    check_op(ops[*at], routed, *bounds, found);
    if (found.what) return found.what;
    if (ops[*at].code == SP_ROUTE) routed = ops + *at;
  }
  if (head && count && !found.what) check_head(*head, ops[count - 1], *bounds, found);
  return found.what;
}

}  // namespace SP_NAMESPACE
