// Changes to the logits of single tokens before the distribution is computed, defined by `edit` in kernels/reference.py, in
// float32 and in the same order. `known` is the number of logits; tokens outside 0 .. known - 1 are skipped.
#pragma once
#include <math.h>
#include "parallel.h"
#include "speculant.h"

namespace SP_NAMESPACE {

static inline bool is_known(int64_t token, int64_t known) { return 0 <= token && token < known; }

static void forbid(const SpEdits &edits, float *scores, int64_t known) {
  for (int64_t word = 0; 32 * word < known; word++) {
    const uint32_t allowed = word < edits.words ? edits.allowed[word] : 0;
    if (allowed == 0xffffffffu) continue;
    const int64_t begin = 32 * word, end = begin + 32 < known ? begin + 32 : known;
    for (int64_t token = begin; token < end; token++)
      if (!(allowed >> (token - begin) & 1)) scores[token] = -INFINITY;
  }
}

// Repetition applies to tokens of prompt and output, presence and frequency to tokens of the output, drafted ones included.
static inline float penalised(const SpEdits &edits, float score, int64_t count) {
  score = score > 0 ? score / edits.repetition : score * edits.repetition;
  return count ? score - (edits.presence + edits.frequency * (float)count) : score;
}

static inline int64_t count_drafted(const SpEdits &edits, int64_t token) {
  int64_t count = 0;
  for (int64_t i = 0; i < edits.num_drafted; i++) count += edits.drafted[i] == token;
  return count;
}

static void penalise(const SpEdits &edits, float *scores, int64_t known) {
  static thread_local List<int64_t> pending;  // distinct drafted tokens that are not in `seen`
  pending.resize(0);
  uint64_t drafted = 0;  // residues modulo 64 of the drafted tokens: a filter before the search
  for (int64_t i = 0; i < edits.num_drafted; i++) {
    const int64_t token = edits.drafted[i];
    bool is_new = is_known(token, known);
    for (int64_t j = 0; j < i; j++) is_new = is_new && edits.drafted[j] != token;
    if (is_new) pending.push(token);
    drafted |= (uint64_t)1 << (token & 63);
  }
  for (int64_t i = 0; i < edits.num_seen; i++) {
    const int64_t token = edits.seen[i];
    int64_t count = edits.counts[i];
    if (drafted >> (token & 63) & 1) {
      count += count_drafted(edits, token);
      for (int64_t j = 0; j < pending.size; j++)
        if (pending[j] == token) pending[j--] = pending[--pending.size];
    }
    if (is_known(token, known)) scores[token] = penalised(edits, scores[token], count);
  }
  for (int64_t j = 0; j < pending.size; j++) scores[pending[j]] = penalised(edits, scores[pending[j]], count_drafted(edits, pending[j]));
}

static void edit(const SpEdits &edits, float *scores, int64_t known) {
  if (edits.masked) forbid(edits, scores, known);
  for (int64_t i = 0; i < edits.num_biased; i++)
    if (is_known(edits.biased[i], known)) scores[edits.biased[i]] += edits.biases[i];
  if (edits.num_drafted < edits.ban_below)
    for (int64_t i = 0; i < edits.num_banned; i++)
      if (is_known(edits.banned[i], known)) scores[edits.banned[i]] = -INFINITY;
  if (edits.penalises) penalise(edits, scores, known);
}

}  // namespace SP_NAMESPACE
