// Reads blocks and packs them as groups (groups.h). A block holds its scales, the upper bits of its integers, and their low bits, in this
// order unless a comment says otherwise. All but those of SP_ZERO4 and SP_ZERO8 are GGUF's; these two have a float16 scale, a zero of 8 bits,
// and integers as in Q4_0, or one in each byte.
#pragma once
#include <type_traits>

#include "groups.h"

namespace SP_NAMESPACE {

constexpr int64_t block_weights(int type) { return type == SP_Q4_K || type == SP_Q5_K || type == SP_Q6_K ? SUPER : GROUP; }

constexpr int64_t block_bytes(int type) {
  switch (type) {
    case SP_Q8_0: return 34;
    case SP_Q4_0: case SP_IQ4_NL: return 18;
    case SP_Q4_1: return 20;
    case SP_Q5_0: return 22;
    case SP_Q5_1: return 24;
    case SP_Q4_K: return 144;
    case SP_Q5_K: return 176;
    case SP_Q6_K: return 210;
    case SP_MXFP4: return 17;
    case SP_ZERO4: return 19;
    case SP_ZERO8: return 35;
  }
  return 0;
}

// The blocks of a row; weights after the last one are 0.
constexpr int64_t blocks_of(int type, int64_t k) { return (k + block_weights(type) - 1) / block_weights(type); }

// q[j] gets the low half of byte j, and q[16 + j] its high half.
static inline void read_halves(const uint8_t *bytes, uint8_t *q) {
  for (int64_t j = 0; j < 16; j++) q[j] = bytes[j] & 15, q[16 + j] = bytes[j] >> 4;
}

// Add the bits of a little-endian dword to the integers of a group, as their fifth bits.
static inline void read_fifth_bits(const uint8_t *bytes, uint8_t *q) {
  uint32_t bits;
  memcpy(&bits, bytes, 4);
  for (int64_t j = 0; j < GROUP; j++) q[j] |= (uint8_t)((bits >> j & 1) << 4);
}

// The scales of Q4_K and Q5_K: two float16 factors, then 12 bytes with 6 bits for each of eight scales and eight minima. Groups 0 to 3 have
// their scales in the low 6 bits of bytes 0 to 3, and their minima in those of bytes 4 to 7. Groups 4 to 7 have the low 4 bits of scales in
// the low halves of bytes 8 to 11, those of minima in the high halves, and the upper 2 bits of both in the upper 2 of bytes 0 to 7.
static inline void read_minimum_scales(const uint8_t *block, int64_t g, Group &group) {
  const uint8_t *parts = block + 4;
  memcpy(&group.scale, block, 2), memcpy(&group.minimum, block + 2, 2);
  const int64_t j = g % 4;
  const bool later = g >= 4;
  group.parts[0] = (int8_t)(later ? (parts[8 + j] & 15) | parts[j] >> 6 << 4 : parts[j] & 63);
  group.parts[1] = (int8_t)(later ? parts[8 + j] >> 4 | parts[4 + j] >> 6 << 4 : parts[4 + j] & 63);
}

// Of Q4_K and Q5_K, groups 2 p and 2 p + 1 are the low and the high halves of the same 32 bytes.
static inline void read_pair_half(const uint8_t *bytes, int64_t g, uint8_t *q) {
  const uint8_t *from = bytes + g / 2 * 32;
  for (int64_t j = 0; j < GROUP; j++) q[j] = g % 2 ? from[j] >> 4 : from[j] & 15;
}

// Q6_K: 128 bytes with the low 4 bits, 64 with the upper 2 bits, 16 int8 scales, a float16. Four groups share 64 and 32 of these bytes:
// groups 0 and 1 are the low halves of the first and the last 32 of the 64, and groups 2 and 3 their high halves; group g has bits 2 g and
// 2 g + 1 of the 32 bytes.
static inline void read_six_bits(const uint8_t *block, int64_t g, Group &group) {
  const uint8_t *low = block + g / 4 * 64 + g % 2 * 32, *high = block + 128 + g / 4 * 32;
  const int64_t quarter = g % 4;
  for (int64_t j = 0; j < GROUP; j++)
    group.q[j] = (uint8_t)((quarter < 2 ? low[j] & 15 : low[j] >> 4) | (high[j] >> 2 * quarter & 3) << 4);
  memcpy(group.parts, block + 192 + 2 * g, 2), memcpy(&group.scale, block + 208, 2);
}

// Group g of a row of blocks.
static inline __attribute__((always_inline)) void read_block(int type, const uint8_t *row, int64_t g, Group &group) {
  const int64_t groups = block_weights(type) / GROUP;
  const uint8_t *block = row + g / groups * block_bytes(type);
  g %= groups;
  memcpy(&group.scale, block, 2);
  switch (type) {
    case SP_Q8_0:
      for (int64_t j = 0; j < GROUP; j++) group.q[j] = block[2 + j] ^ 128;  // int8 + 128
      return;
    case SP_Q4_0: case SP_IQ4_NL: return read_halves(block + 2, group.q);
    case SP_Q4_1: memcpy(&group.minimum, block + 2, 2); return read_halves(block + 4, group.q);
    case SP_Q5_0: read_halves(block + 6, group.q); return read_fifth_bits(block + 2, group.q);
    case SP_Q5_1:
      memcpy(&group.minimum, block + 2, 2), read_halves(block + 8, group.q);
      return read_fifth_bits(block + 4, group.q);
    case SP_Q4_K: read_minimum_scales(block, g, group); return read_pair_half(block + 16, g, group.q);
    case SP_Q5_K:
      read_minimum_scales(block, g, group), read_pair_half(block + 48, g, group.q);
      for (int64_t j = 0; j < GROUP; j++) group.q[j] |= (uint8_t)((block[16 + j] >> g & 1) << 4);
      return;
    case SP_Q6_K: return read_six_bits(block, g, group);
    case SP_MXFP4: group.scale = block[0]; return read_halves(block + 1, group.q);
    case SP_ZERO4: group.zero = block[2]; return read_halves(block + 3, group.q);
    case SP_ZERO8: group.zero = block[2], memcpy(group.q, block + 3, GROUP); return;
  }
}

// Rows of int8 after a float32 scale of the row.
static void pack_int8_rows(const void *rows, int64_t n, int64_t k, int64_t panel, char *packed) {
  const GroupLayout at(SP_INT8, k);
  memset(packed, 0, at.bytes);
  for (int64_t i = 0; i < WIDTH && panel * WIDTH + i < n; i++) {
    const uint8_t *row = (const uint8_t *)rows + (panel * WIDTH + i) * (k + 4);
    memcpy((float *)(packed + at.scales) + i, row, 4);
    for (int64_t g = 0; g < at.groups; g++) {
      Group group;
      for (int64_t j = 0; j < GROUP; j++) group.q[j] = g * GROUP + j < k ? row[4 + g * GROUP + j] ^ 128 : 128;  // int8 + 128
      put_group(at, packed, g, i, group);
    }
  }
}

template <int TYPE>
static void pack_blocks(const void *blocks, int64_t n, int64_t k, int64_t panel, char *packed) {
  const GroupLayout at(TYPE, k);
  const int64_t row_bytes = blocks_of(TYPE, k) * block_bytes(TYPE), first = panel * WIDTH, some = n - first < WIDTH ? n - first : WIDTH;
  const uint8_t *rows = (const uint8_t *)blocks + first * row_bytes;
  memset(packed, 0, at.bytes);
  for (int64_t begin = 0; begin < at.groups; begin += GROUPS_OF_SUPER)  // so that the panel's lines stay in the first-level cache
    for (int64_t i = 0; i < some; i++)
      for (int64_t g = begin; g < begin + GROUPS_OF_SUPER && g < at.groups; g++) {
        Group group;
        read_block(TYPE, rows + i * row_bytes, g, group);
        put_group(at, packed, g, i, group);
      }
}

// Call work(a std::integral_constant) with a type of blocks.
template <typename Work>
static void with_type(int type, Work work) {
  switch (type) {
#define SP_CASE(TYPE) case TYPE: return work(std::integral_constant<int, TYPE>());
    SP_CASE(SP_Q8_0) SP_CASE(SP_Q4_0) SP_CASE(SP_Q4_1) SP_CASE(SP_Q5_0) SP_CASE(SP_Q5_1) SP_CASE(SP_Q4_K) SP_CASE(SP_Q5_K) SP_CASE(SP_Q6_K)
    SP_CASE(SP_IQ4_NL) SP_CASE(SP_MXFP4) SP_CASE(SP_ZERO4) SP_CASE(SP_ZERO8)
#undef SP_CASE
  }
}

static void pack_any_blocks(int type, const void *blocks, int64_t n, int64_t k, int64_t panel, char *packed) {
  with_type(type, [&](auto of) { pack_blocks<of.value>(blocks, n, k, panel, packed); });
}

// Decode a row of blocks to k numbers of SP_F32 or SP_BF16.
template <int TYPE>
static void decode_blocks(const uint8_t *row, int64_t k, int target, void *out) {
  constexpr Form FORM = form_of(TYPE);
  for (int64_t g = 0; g < groups_of(k); g++) {
    Group group;
    float values[GROUP];
    read_block(TYPE, row, g, group);
    decode_group(FORM, group, 0.0f, values);
    const int64_t first = g * GROUP, some = k - first < GROUP ? k - first : GROUP;
    if (target == SP_F32)
      memcpy((float *)out + first, values, some * sizeof(float));
    else
      for (int64_t j = 0; j < some; j++) ((uint16_t *)out)[first + j] = to_bf16(values[j]);
  }
}

// The numbers [n, k] of rows of blocks.
static void decode_rows(int type, const void *blocks, int64_t n, int64_t k, int target, void *out, int threads) {
  const int64_t row_bytes = blocks_of(type, k) * block_bytes(type), size = k * (target == SP_F32 ? 4 : 2);
  with_type(type, [&](auto of) {
    share_out(n, threads, [&](int64_t row) {
      decode_blocks<of.value>((const uint8_t *)blocks + row * row_bytes, k, target, (char *)out + row * size);
    });
  });
}

}  // namespace SP_NAMESPACE
