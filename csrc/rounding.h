// Rounds weights to integers: to int8 with a scale for each output, or to Q4_0, 4 bits with a scale for each group (groups.h).
#pragma once
#include "groups.h"

namespace SP_NAMESPACE {

static inline float weight_at(int source, const void *weight, int64_t n, int64_t k, int64_t row, int64_t j) {
  return row < n && j < k ? read_weight(source, weight, row * k + j) : 0.0f;
}

static inline float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

static void round_to_rows(int source, const void *weight, int64_t n, int64_t k, int64_t panel, char *packed) {
  const GroupLayout at(SP_INT8, k);
  memset(packed, 0, at.bytes);
  for (int64_t i = 0; i < WIDTH; i++) {
    const int64_t row = panel * WIDTH + i;
    float largest = 0.0f;
    for (int64_t j = 0; j < k; j++) largest = fmaxf(largest, fabsf(weight_at(source, weight, n, k, row, j)));
    const float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
    Group group;
    for (int64_t g = 0; g < at.groups; g++) {
      for (int64_t j = 0; j < GROUP; j++)
        group.q[j] = (uint8_t)(128 + lrintf(weight_at(source, weight, n, k, row, g * GROUP + j) * factor));
      put_group(at, packed, g, i, group);
    }
    ((float *)(packed + at.scales))[i] = largest / 127.0f;
  }
}

// Round to float16, to nearest even. Larger numbers become the largest float16.
static inline uint16_t to_f16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size >= 0x477fe000) return (uint16_t)(sign | 0x7bff);  // 65,504
  if (size < 0x38800000) return (uint16_t)(sign | (uint32_t)lrintf(from_bits(size) * 0x1p24f));  // a multiple of 2^-24
  return (uint16_t)(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

// Of sixteen scales from -extreme / 6.5 to -extreme / 8.375, the one with the least squared error. extreme: the largest in magnitude.
static uint16_t best_scale(const float *group) {
  float extreme = 0.0f, least = INFINITY;
  uint16_t best = 0;
  for (int64_t j = 0; j < GROUP; j++)
    if (fabsf(group[j]) > fabsf(extreme)) extreme = group[j];
  if (extreme == 0.0f) return 0;
  for (int step = 0; step < 16; step++) {
    const uint16_t stored = to_f16(-extreme / (6.5f + 0.125f * (float)step));
    const float scale = read_f16(stored);
    float error = 0.0f;
    for (int64_t j = 0; j < GROUP && scale != 0.0f; j++) {
      const float rest = group[j] - scale * clamp(nearbyintf(group[j] / scale), -8.0f, 7.0f);
      error += rest * rest;
    }
    if (error < least && scale != 0.0f) least = error, best = stored;
  }
  return best;
}

static void round_to_groups(int source, const void *weight, int64_t n, int64_t k, int64_t panel, char *packed) {
  const GroupLayout at(SP_Q4_0, k);
  memset(packed, 0, at.bytes);
  for (int64_t g = 0; g < at.groups; g++)
    for (int64_t i = 0; i < WIDTH; i++) {
      float values[GROUP];
      for (int64_t j = 0; j < GROUP; j++) values[j] = weight_at(source, weight, n, k, panel * WIDTH + i, g * GROUP + j);
      Group group;
      group.scale = best_scale(values);
      const float scale = read_f16(group.scale);
      for (int64_t j = 0; j < GROUP; j++)
        group.q[j] = (uint8_t)(8 + (int)(scale == 0.0f ? 0.0f : clamp(nearbyintf(values[j] / scale), -8.0f, 7.0f)));
      put_group(at, packed, g, i, group);
    }
}

}  // namespace SP_NAMESPACE
