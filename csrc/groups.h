// How weights in groups of 32 small integers, such as GGUF's blocks, are packed into panels (linear.h). Packing changes no number.
//
//   weight     scale * (q - OFFSET), scale * (q - zero), scale * q + minimum, or scale * table[q]; q is an unsigned integer of 4, 5, 6 or
//              8 bits
//   panel      [integers: the low 4 bits of each, or all 8][the upper 1 or 2 bits of 5 or 6][scales]; each part begins at a cache line
//
// A group has dwords for each output, as a step has. Below, k counts the weights of a group from 0, and b the bytes of a dword:
//
//   4 bits     4 steps. In step s, the low half of byte b holds k = 4 s + b, and the high half k = 16 + 4 s + b
//   8 bits     8 steps. Byte b holds k = 4 s + b in step 2 s, and k = 16 + 4 s + b in step 2 s + 1
//   5th bits   a dword. Bit s of byte b belongs to k = 4 s + b, and bit 4 + s to k = 16 + 4 s + b
//   5th, 6th   of types with 6 bits: two dwords. Bits 2 s and 2 s + 1 of byte b belong to k = 4 s + b in the first dword, and to
//              k = 16 + 4 s + b in the second
//   scales     of one group, or of the groups of SUPER weights together; see ScaleKind
//
// Weights after the last input are 0. Results of outputs after the last one are dropped.
#pragma once
#include "fp8.h"

namespace SP_NAMESPACE {

constexpr int64_t GROUP = 32, SUPER = 256;
constexpr int64_t GROUPS_OF_SUPER = SUPER / GROUP;

enum ScaleKind {
  ROW_SCALE,      // once in a panel: [WIDTH] float32
  HALF_SCALE,     // a group: [WIDTH] float16
  HALF_MINIMUM,   // a group: [WIDTH] float16, then [WIDTH] float16 minima
  HALF_ZERO,      // a group: [WIDTH] float16, then [WIDTH] uint8 zeros
  POWER_SCALE,    // a group: [WIDTH] exponents; scale = 2^(exponent - 128)
  SUPER_MINIMUM,  // SUPER weights: [3][WIDTH] dwords, then [2][WIDTH] float16, the factors of scales and of minima. A scale or minimum has
                  // 6 bits. Groups 2 p and 2 p + 1 have 24, from the lowest on: scale, minimum, scale, minimum. They are bytes 0 to 2 of
                  // dword p; those of groups 6 and 7 are bytes 3 of the three dwords
  SUPER_SIGNED,   // SUPER weights: [16][WIDTH] int8 scales of 16 weights each, then [WIDTH] float16, their factor
};

// `at`: the values that 4 bits stand for. `lifted`: the same plus the type's offset, so that none is negative.
struct Values {
  int8_t at[16];
  alignas(16) uint8_t lifted[16];
};
constexpr Values NORMAL_VALUES = {{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},  // IQ4_NL
                                  {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241}};
constexpr Values FLOAT_VALUES = {{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},  // MXFP4: twice the numbers of E2M1
                                 {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}};

// How a type stores its weights.
struct Form {
  int bits;             // of the unsigned integers that are multiplied; more than are stored if they come from a table
  int stored_bits;      // 4, 5, 6 or 8
  int offset;           // is subtracted from the integers that are multiplied
  ScaleKind scales;
  const Values *table;  // the values that the stored integers stand for, or NULL

  constexpr bool in_bytes() const { return stored_bits == 8; }
  constexpr int steps() const { return in_bytes() ? 8 : 4; }
  constexpr int high_steps() const { return in_bytes() ? 0 : stored_bits - 4; }
  constexpr bool has_minimum() const { return scales == HALF_MINIMUM || scales == SUPER_MINIMUM; }
  constexpr bool has_zero() const { return scales == HALF_ZERO; }
  constexpr bool has_sums() const { return has_minimum() || has_zero(); }  // whether the sums of x are multiplied by scales of the weights
  constexpr bool has_table() const { return table; }
  constexpr bool is_halved() const { return scales == SUPER_SIGNED; }  // a group has two scales
};

constexpr bool is_grouped(int type) { return type >= SP_INT8 && type != SP_FP8; }

constexpr Form form_of(int type) {
  switch (type) {
    case SP_INT8: return {8, 8, 128, ROW_SCALE, nullptr};
    case SP_Q8_0: return {8, 8, 128, HALF_SCALE, nullptr};
    case SP_Q4_0: return {4, 4, 8, HALF_SCALE, nullptr};
    case SP_Q4_1: return {4, 4, 0, HALF_MINIMUM, nullptr};
    case SP_Q5_0: return {5, 5, 16, HALF_SCALE, nullptr};
    case SP_Q5_1: return {5, 5, 0, HALF_MINIMUM, nullptr};
    case SP_Q4_K: return {4, 4, 0, SUPER_MINIMUM, nullptr};
    case SP_Q5_K: return {5, 5, 0, SUPER_MINIMUM, nullptr};
    case SP_Q6_K: return {6, 6, 32, SUPER_SIGNED, nullptr};
    case SP_IQ4_NL: return {8, 4, 128, HALF_SCALE, &NORMAL_VALUES};
    case SP_MXFP4: return {5, 4, 12, POWER_SCALE, &FLOAT_VALUES};
    case SP_ZERO4: return {4, 4, 0, HALF_ZERO, nullptr};
    case SP_ZERO8: return {8, 8, 0, HALF_ZERO, nullptr};
  }
  return {0, 0, 0, ROW_SCALE, nullptr};
}

static inline int64_t groups_of(int64_t k) { return (k + GROUP - 1) / GROUP; }
static inline int64_t padded_depth(int64_t k) { return groups_of(k) * GROUP; }

static inline int64_t scale_bytes(ScaleKind kind, int64_t groups) {
  const int64_t supers = (groups + GROUPS_OF_SUPER - 1) / GROUPS_OF_SUPER;
  switch (kind) {
    case ROW_SCALE: return WIDTH * 4;
    case HALF_SCALE: return groups * WIDTH * 2;
    case HALF_MINIMUM: return groups * WIDTH * 4;
    case HALF_ZERO: return groups * WIDTH * 3;
    case POWER_SCALE: return groups * WIDTH;
    case SUPER_MINIMUM: return supers * WIDTH * 16;
    case SUPER_SIGNED: return supers * WIDTH * 18;
  }
  return 0;
}

// The parts of a panel.
struct GroupLayout {
  Form form;
  int64_t groups;
  Steps steps;
  int64_t high, scales, bytes;  // offset of the fifth and sixth bits, and of the scales; size of the panel

  GroupLayout(int type, int64_t k)
      : form(form_of(type)), groups(groups_of(k)), steps(groups * form.steps(), STEP, STREAMS, sp_group_streams), high(whole_lines(steps.size())),
        scales(high + whole_lines(groups * form.high_steps() * STEP)), bytes(scales + whole_lines(scale_bytes(form.scales, groups))) {}

  // Prefetch the first bytes of each stream and part. Steps prefetch only those that follow in their stream.
  inline __attribute__((always_inline)) void prefetch_begin(const char *panel) const {
    for (int64_t stream = 0; stream < steps.streams; stream++)
      for (int64_t b = 0; b < steps.ahead; b += LINE) prefetch(panel + stream * steps.stride + b);
    for (int64_t b = 0; b < 8 * LINE; b += LINE) prefetch(panel + high + b), prefetch(panel + scales + b);
  }
};

static inline int64_t bytes_of_panel(int type, int64_t k) {
  if (type == SP_FP8) return Fp8Layout(k).bytes;
  return is_grouped(type) ? GroupLayout(type, k).bytes : panel_bytes(type, k);
}

// A group of one output: its integers, and the numbers that its scales are computed from.
struct Group {
  uint8_t q[GROUP];         // as they are stored
  uint16_t scale, minimum;  // float16; POWER_SCALE: an exponent; SUPER_...: the factors of `parts`
  uint8_t zero;             // HALF_ZERO
  int8_t parts[2];          // SUPER_MINIMUM: scale and minimum; SUPER_SIGNED: the scales of both halves
};

// Places in the packed scales of output i: float16 number g; of HALF_ZERO, the scale and the zero of group g; and the scales of the SUPER
// weights that hold group g.
static inline char *halves_at(char *scales, int64_t g, int64_t i) { return scales + (g * WIDTH + i) * 2; }
static inline char *scale_before_zeros(char *scales, int64_t g, int64_t i) { return scales + g * 3 * WIDTH + i * 2; }
static inline char *zero_at(char *scales, int64_t g, int64_t i) { return scales + (g * 3 + 2) * WIDTH + i; }
static inline char *super_at(char *scales, int64_t g, int64_t size) { return scales + g / GROUPS_OF_SUPER * WIDTH * size; }

static inline void put_minimum_parts(uint32_t *words, int64_t g, int64_t i, uint32_t scale, uint32_t minimum) {
  const uint32_t both = (scale | minimum << 6) << g % 2 * 12;  // of 24 bits for a pair of groups
  const int64_t pair = g / 2 % 4;
  if (pair < 3)
    words[pair * WIDTH + i] |= both;
  else
    for (int64_t b = 0; b < 3; b++) words[b * WIDTH + i] |= (both >> 8 * b & 255) << 24;
}

static inline uint32_t minimum_parts(const uint32_t *words, int64_t g, int64_t i) {
  const int64_t pair = g / 2 % 4;
  uint32_t both = pair < 3 ? words[pair * WIDTH + i] : 0;
  for (int64_t b = 0; pair == 3 && b < 3; b++) both |= words[b * WIDTH + i] >> 24 << 8 * b;
  return both >> g % 2 * 12 & 4095;
}

static inline void put_scales(ScaleKind kind, char *scales, int64_t g, int64_t i, const Group &group) {
  switch (kind) {
    case ROW_SCALE: return;
    case HALF_SCALE: memcpy(halves_at(scales, g, i), &group.scale, 2); return;
    case HALF_MINIMUM:
      memcpy(halves_at(scales, 2 * g, i), &group.scale, 2), memcpy(halves_at(scales, 2 * g + 1, i), &group.minimum, 2);
      return;
    case HALF_ZERO: memcpy(scale_before_zeros(scales, g, i), &group.scale, 2), *zero_at(scales, g, i) = (char)group.zero; return;
    case POWER_SCALE: scales[g * WIDTH + i] = (char)group.scale; return;
    case SUPER_MINIMUM: {
      char *own = super_at(scales, g, 16);
      put_minimum_parts((uint32_t *)own, g, i, (uint8_t)group.parts[0], (uint8_t)group.parts[1]);
      memcpy(halves_at(own + WIDTH * 12, 0, i), &group.scale, 2), memcpy(halves_at(own + WIDTH * 12, 1, i), &group.minimum, 2);
      return;
    }
    case SUPER_SIGNED: {
      char *own = super_at(scales, g, 18);
      for (int64_t half = 0; half < 2; half++) own[(g % GROUPS_OF_SUPER * 2 + half) * WIDTH + i] = (char)group.parts[half];
      memcpy(halves_at(own + WIDTH * 16, 0, i), &group.scale, 2);
    }
  }
}

static inline void get_scales(ScaleKind kind, const char *packed, int64_t g, int64_t i, Group &group) {
  char *scales = (char *)packed;
  switch (kind) {
    case ROW_SCALE: return;
    case HALF_SCALE: memcpy(&group.scale, halves_at(scales, g, i), 2); return;
    case HALF_MINIMUM:
      memcpy(&group.scale, halves_at(scales, 2 * g, i), 2), memcpy(&group.minimum, halves_at(scales, 2 * g + 1, i), 2);
      return;
    case HALF_ZERO: memcpy(&group.scale, scale_before_zeros(scales, g, i), 2), group.zero = (uint8_t)*zero_at(scales, g, i); return;
    case POWER_SCALE: group.scale = (uint8_t)scales[g * WIDTH + i]; return;
    case SUPER_MINIMUM: {
      char *own = super_at(scales, g, 16);
      const uint32_t parts = minimum_parts((const uint32_t *)own, g, i);
      group.parts[0] = (int8_t)(parts & 63), group.parts[1] = (int8_t)(parts >> 6);
      memcpy(&group.scale, halves_at(own + WIDTH * 12, 0, i), 2), memcpy(&group.minimum, halves_at(own + WIDTH * 12, 1, i), 2);
      return;
    }
    case SUPER_SIGNED: {
      char *own = super_at(scales, g, 18);
      for (int64_t half = 0; half < 2; half++) group.parts[half] = (int8_t)own[(g % GROUPS_OF_SUPER * 2 + half) * WIDTH + i];
      memcpy(&group.scale, halves_at(own + WIDTH * 16, 0, i), 2);
    }
  }
}

static inline uint32_t *dword_at(char *panel, int64_t offset, int64_t i) { return (uint32_t *)(panel + offset) + i; }

static void put_group(const GroupLayout &at, char *panel, int64_t g, int64_t i, const Group &group) {
  const Form &form = at.form;
  uint8_t first[GROUP / 2], second[GROUP / 2];
  for (int64_t j = 0; j < GROUP / 2; j++)
    first[j] = form.in_bytes() ? group.q[j] : (uint8_t)((group.q[j] & 15) | group.q[GROUP / 2 + j] << 4), second[j] = group.q[GROUP / 2 + j];
  for (int64_t s = 0; s < 4; s++)
    if (form.in_bytes()) {
      memcpy(dword_at(panel, at.steps.at(8 * g + 2 * s), i), first + 4 * s, 4);
      memcpy(dword_at(panel, at.steps.at(8 * g + 2 * s + 1), i), second + 4 * s, 4);
    } else {
      memcpy(dword_at(panel, at.steps.at(4 * g + s), i), first + 4 * s, 4);
    }
  uint8_t high[8] = {0};
  const int width = form.high_steps();  // bits of a weight
  for (int64_t j = 0; width && j < GROUP; j++) {
    const int64_t half = j / 16, s = j % 16 / 4, b = j % 4, place = width == 1 ? 4 * half + s : 2 * s;
    high[(width == 1 ? 0 : 4 * half) + b] |= (uint8_t)(group.q[j] >> 4 << place);
  }
  for (int64_t part = 0; part < width; part++) memcpy(dword_at(panel, at.high + (g * width + part) * STEP, i), high + 4 * part, 4);
  put_scales(form.scales, panel + at.scales, g, i, group);
}

static void get_group(const GroupLayout &at, const char *packed, int64_t g, int64_t i, Group &group) {
  char *panel = (char *)packed;
  const Form &form = at.form;
  for (int64_t j = 0; j < GROUP; j++) {
    const int64_t half = j / 16, s = j % 16 / 4, b = j % 4;
    const uint8_t *from = (const uint8_t *)dword_at(panel, at.steps.at(form.in_bytes() ? 8 * g + 2 * s + half : 4 * g + s), i) + b;
    group.q[j] = form.in_bytes() ? *from : half ? *from >> 4 : *from & 15;
    const int width = form.high_steps();
    if (!width) continue;
    const uint8_t *high = (const uint8_t *)dword_at(panel, at.high + (g * width + (width == 1 ? 0 : half)) * STEP, i) + b;
    group.q[j] |= (uint8_t)((*high >> (width == 1 ? 4 * half + s : 2 * s) & ((1 << width) - 1)) << 4);
  }
  get_scales(form.scales, panel + at.scales, g, i, group);
}

static inline float power_scale(uint16_t exponent) { return from_bits((exponent / 2 + 63u) << 23) * from_bits((exponent - exponent / 2 + 63u) << 23); }

// The weights of a group. The format defines the order of the operations.
static inline __attribute__((always_inline)) void decode_group(const Form &form, const Group &group, float row_scale, float *out) {
  for (int64_t j = 0; j < GROUP; j++) {
    const float value = form.table ? (float)form.table->at[group.q[j]] : (float)(group.q[j] - form.offset);
    const float factor = read_f16(group.scale);
    switch (form.scales) {
      case ROW_SCALE: out[j] = row_scale * value; break;
      case HALF_SCALE: out[j] = factor * value; break;
      case HALF_MINIMUM: out[j] = factor * value + read_f16(group.minimum); break;
      case HALF_ZERO: out[j] = factor * (value - (float)group.zero); break;
      case POWER_SCALE: out[j] = power_scale(group.scale) * value; break;
      case SUPER_MINIMUM:
        out[j] = factor * (float)group.parts[0] * value - read_f16(group.minimum) * (float)group.parts[1];
        break;
      case SUPER_SIGNED: out[j] = factor * (float)group.parts[j / 16] * value; break;
    }
  }
}

// Row i of a panel in float32.
static void decode_row(int type, const char *panel, int64_t i, int64_t k, float *out) {
  const GroupLayout at(type, k);
  const float row_scale = at.form.scales == ROW_SCALE ? ((const float *)(panel + at.scales))[i] : 0.0f;
  for (int64_t g = 0; g < at.groups; g++) {
    Group group;
    float values[GROUP];
    get_group(at, panel, g, i, group);
    decode_group(at.form, group, row_scale, values);
    const int64_t some = k - g * GROUP < GROUP ? k - g * GROUP : GROUP;
    memcpy(out + g * GROUP, values, some * sizeof(float));
  }
}

}  // namespace SP_NAMESPACE
