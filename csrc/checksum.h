// A checksum of memory at the speed of reading, equal on every instruction set and for any number of threads. It finds damage, not
// forgery.
//
// Threads share pieces of the memory. The words of 64 bits of a piece go to LINES sums in turn. Each word is mixed into its sum by a
// one-to-one function, and so are the sums in the end: a change of one word always changes the result.
#pragma once
#include "parallel.h"
#include "reals.h"

namespace SP_NAMESPACE {

constexpr int64_t LINES = 32, LINE_VECTORS = LINES / REALS, ROUND = LINES * 8, PIECE = 1 << 20;  // bytes of a round and of a piece
constexpr uint64_t ODD = 0x9e3779b97f4a7c15;

template <typename T>
static inline __attribute__((always_inline)) T mix(T sum, T word) {
  const T x = (sum ^ word) * ODD;
  return x << 29 | x >> 35;
}

static inline __attribute__((always_inline)) void mix_round(Words *sums, const char *data) {
#pragma GCC unroll 16
  for (int v = 0; v < LINE_VECTORS; v++) {
    Words words;
    memcpy(&words, data + v * sizeof words, sizeof words);
    sums[v] = mix(sums[v], words);
  }
}

static uint64_t sum_piece(const char *data, int64_t bytes) {
  Words sums[LINE_VECTORS];
  char last[ROUND] = {0};
  for (int64_t i = 0; i < LINES; i++) sums[i / REALS][i % REALS] = (uint64_t)i;
  int64_t at = 0;
  for (; at + ROUND <= bytes; at += ROUND) {
    prefetch(data + at + 8 * ROUND);
    mix_round(sums, data + at);
  }
  memcpy(last, data + at, bytes - at);
  mix_round(sums, last);
  uint64_t sum = (uint64_t)bytes;
  for (int64_t i = 0; i < LINES; i++) sum = mix(sum, (uint64_t)sums[i / REALS][i % REALS]);
  return sum;
}

static uint64_t checksum(const void *data, int64_t bytes, int threads) {
  const int64_t pieces = (bytes + PIECE - 1) / PIECE;
  List<uint64_t> sums;
  sums.resize(pieces);
  share_out(pieces, threads, [&](int64_t i) {
    sums[i] = sum_piece((const char *)data + i * PIECE, bytes - i * PIECE < PIECE ? bytes - i * PIECE : PIECE);
  });
  uint64_t sum = (uint64_t)bytes;
  for (int64_t i = 0; i < pieces; i++) sum = mix(sum, sums[i]);
  return sum;
}

}  // namespace SP_NAMESPACE
