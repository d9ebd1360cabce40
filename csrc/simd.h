// One vector type per instruction set. Kernels compute through these functions alone, so their arithmetic (order and rounding) is
// written once. All sets compute the same bits, but for weights that are floats (linear.h). The compiler contracts nothing: fused
// multiply-adds are explicit.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

static inline __attribute__((always_inline)) void prefetch(const void *p) { __builtin_prefetch(p); }
static inline __attribute__((always_inline)) void prefetch_far(const void *p) { __builtin_prefetch(p, 0, 2); }  // into the second-level cache

namespace SP_NAMESPACE {
static inline float from_bits(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline float read_f16(uint16_t stored) {
  const uint32_t sign = (uint32_t)(stored & 0x8000) << 16, exponent = stored >> 10 & 31, rest = stored & 1023;
  if (exponent == 31) return from_bits(sign | 0x7f800000 | rest << 13 | (rest ? 0x400000 : 0));  // a NaN is made quiet
  if (exponent == 0) return from_bits(sign | 0x33800000) * (float)rest;  // subnormal: a multiple of 2^-24
  return from_bits(sign | (exponent + 112) << 23 | rest << 13);
}
}  // namespace SP_NAMESPACE

// Reductions over lanes, always in the same order: the high half is folded onto the low one until one lane is left.
#if defined(SP_AVX2) || defined(SP_AVX512)
#include <immintrin.h>
namespace SP_NAMESPACE {
static inline float sum_of_eight(__m256 v) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline float max_of_eight(__m256 v) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
}  // namespace SP_NAMESPACE
#endif

#if defined(SP_AVX512)
namespace SP_NAMESPACE {
constexpr int LANES = 16, REGISTERS = 32;
typedef __m512 Vec;
typedef __m512i Ints;
static inline Vec zero() { return _mm512_setzero_ps(); }
static inline Vec splat(float x) { return _mm512_set1_ps(x); }
static inline Vec load(const float *p) { return _mm512_loadu_ps(p); }
static inline void store(float *p, Vec v) { _mm512_storeu_ps(p, v); }
// Past the caches, to the address of a whole vector; threads see it after `finish_streams`.
static inline void stream(float *p, Vec v) { _mm512_stream_ps(p, v); }
static inline void finish_streams() { _mm_sfence(); }
static inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
static inline Vec divide(Vec a, Vec b) { return _mm512_div_ps(a, b); }
static inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b if either is NaN
static inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline Vec fma_into(Vec sum, Vec a, Vec b) {  // GCC copies the accumulators of the intrinsic between registers
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
static inline Vec nearest(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline Vec times_power(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }  // a * 2^n for whole n
static inline bool all_finite(Vec a) {
  return _mm512_cmp_ps_mask(_mm512_abs_ps(a), _mm512_set1_ps(3.402823466e38f), _CMP_LE_OQ) == 0xffff;
}
static inline Ints load_ints(const void *p) { return _mm512_loadu_si512(p); }
static inline Ints splat_ints(int32_t x) { return _mm512_set1_epi32(x); }
static inline Vec to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
static inline Ints low_halves(Ints a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
static inline Ints high_halves(Ints a) { return low_halves(_mm512_srli_epi16(a, 4)); }
static inline void store_ints(void *p, Ints a) { _mm512_storeu_si512(p, a); }
static inline Ints bits_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
static inline Ints bits_or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
static inline Ints bits_xor(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
static inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
static inline Ints sub_ints(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
static inline Ints sub_bytes(Ints a, Ints b) { return _mm512_sub_epi8(a, b); }
template <int N> static inline Ints shift_left(Ints a) { return _mm512_slli_epi32(a, N); }
template <int N> static inline Ints shift_right(Ints a) { return _mm512_srli_epi32(a, N); }
template <int N> static inline Ints shift_right_signed(Ints a) { return _mm512_srai_epi32(a, N); }
static inline Vec as_floats(Ints a) { return _mm512_castsi512_ps(a); }
static inline Ints load_unsigned(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline Ints load_signed(const int8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline Vec load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline void store_bytes(int8_t *p, Vec a) {  // a: whole numbers from -128 to 127
  _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
// For decoding bytes: a table repeated in each 16 bytes; its bytes at the places of `index`'s lower
// halves, 0 from index 128 on; and the bytes of a and b in turn, from the
// first or the second half of each 16 bytes.
static inline Ints load_table(const uint8_t *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)); }
static inline Ints look_up(Ints table, Ints index) { return _mm512_shuffle_epi8(table, index); }
static inline Ints zip_low(Ints a, Ints b) { return _mm512_unpacklo_epi8(a, b); }
static inline Ints zip_high(Ints a, Ints b) { return _mm512_unpackhi_epi8(a, b); }
// For coding bytes: the inverse of zipping; the number of equal bytes; a hash below 16 of each byte (its sign and last three bits); and the
// bytes of `other` where a and b are equal, else those of `found`.
static inline Ints unzip_first(Ints a, Ints b) {
  return _mm512_packus_epi16(_mm512_and_si512(a, _mm512_set1_epi16(255)), _mm512_and_si512(b, _mm512_set1_epi16(255)));
}
static inline Ints unzip_second(Ints a, Ints b) { return _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)); }
static inline Ints splat_byte(uint8_t x) { return _mm512_set1_epi8((char)x); }
static inline int count_equal(Ints a, Ints b) { return __builtin_popcountll(_mm512_cmpeq_epi8_mask(a, b)); }
static inline Ints slots_of(Ints v) {
  return _mm512_or_si512(_mm512_and_si512(v, splat_byte(7)), _mm512_and_si512(_mm512_srli_epi16(v, 4), splat_byte(8)));
}
static inline Ints pick_equal(Ints found, Ints a, Ints b, Ints other) {
  return _mm512_mask_mov_epi8(found, _mm512_cmpeq_epi8_mask(a, b), other);
}
// Add the products of four unsigned bytes of w and four signed bytes of x to each dword, exactly.
static inline Ints add_four(Ints sum, Ints w, Ints x) {
#if defined(SP_VNNI)
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));  // GCC copies the accumulators of the intrinsic between registers
  return sum;
#else
  const Ints even = _mm512_and_si512(w, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(w, 8);
  const Ints x_even = _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), x_odd = _mm512_srai_epi16(x, 8);
  return _mm512_add_epi32(sum, _mm512_add_epi32(_mm512_madd_epi16(even, x_even), _mm512_madd_epi16(odd, x_odd)));
#endif
}
#if !defined(SP_VNNI)
static inline Ints pair_products(Ints w, Ints x) { return _mm512_maddubs_epi16(w, x); }
static inline Ints add_shorts(Ints a, Ints b) {
  Ints sum = _mm512_add_epi16(a, b);
  asm("" : "+v"(sum));  // else gcc adds in the order of a tree, whose terms do not fit in the registers
  return sum;
}
template <int FACTOR> static inline Ints add_short_pairs(Ints sum, Ints a) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, _mm512_set1_epi16(FACTOR))); }
#endif
static inline Vec low_bf16(Ints v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
static inline Vec high_bf16(Ints v) { return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(0xffff0000))); }
#if defined(SP_BF16_PAIRS)
// Replace subnormal numbers by zeros of the same sign.
static inline Vec flush(Vec v) {
  const Ints bits = _mm512_castps_si512(v);
  const __mmask16 small = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
  return _mm512_castsi512_ps(_mm512_mask_and_epi32(bits, small, bits, _mm512_set1_epi32((int)0x80000000)));
}
// Add the products of a pair of bfloat16 to each lane: that of the high halves, then that of the low ones. Each sum is rounded to
// nearest even, and subnormal numbers count as zeros. The model follows Intel's manual on VDPBF16PS, for tests on processors
// without it.
static inline Vec add_pairs(Vec sum, Ints w, Ints x) {
#if defined(SP_MODELS)
  sum = flush(fma(flush(high_bf16(w)), flush(high_bf16(x)), flush(sum)));
  return flush(fma(flush(low_bf16(w)), flush(low_bf16(x)), sum));
#else
  return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
#endif
}
#endif
static inline Vec load_bf16(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
static inline float first_lane(Vec v) { return _mm512_cvtss_f32(v); }
static inline __m256 low_half(Vec v) { return _mm512_castps512_ps256(v); }
static inline __m256 high_half(Vec v) { return _mm512_extractf32x8_ps(v, 1); }
static inline float sum_lanes(Vec v) { return sum_of_eight(_mm256_add_ps(low_half(v), high_half(v))); }
static inline float max_lanes(Vec v) { return max_of_eight(_mm256_max_ps(low_half(v), high_half(v))); }
static inline Vec pick(Vec a, Vec b, bool high) {
  return high ? _mm512_shuffle_f32x4(a, b, 0xdd) : _mm512_shuffle_f32x4(a, b, 0x88);
}
// to[j][i] = from[i][j] for LANES x LANES dwords of any type; the rows of `to` are `to_stride` dwords apart.
static inline void transpose(const float *const *from, float *to, int64_t to_stride) {
  __m512d t[16];
  for (int i = 0; i < 16; i += 4) {
    Vec a = load(from[i]), b = load(from[i + 1]), c = load(from[i + 2]), d = load(from[i + 3]);
    __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
    t[i] = _mm512_unpacklo_pd(ab, cd), t[i + 1] = _mm512_unpackhi_pd(ab, cd);
    ab = _mm512_castps_pd(_mm512_unpackhi_ps(a, b)), cd = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
    t[i + 2] = _mm512_unpacklo_pd(ab, cd), t[i + 3] = _mm512_unpackhi_pd(ab, cd);
  }
  for (int c = 0; c < 4; c++)
    for (int odd = 0; odd < 2; odd++) {
      Vec x = pick(_mm512_castpd_ps(t[c]), _mm512_castpd_ps(t[4 + c]), odd);
      Vec y = pick(_mm512_castpd_ps(t[8 + c]), _mm512_castpd_ps(t[12 + c]), odd);
      store(to + (4 * odd + c) * to_stride, pick(x, y, false));
      store(to + (4 * odd + 8 + c) * to_stride, pick(x, y, true));
    }
}
}  // namespace SP_NAMESPACE

#elif defined(SP_AVX2)
namespace SP_NAMESPACE {
constexpr int LANES = 8, REGISTERS = 16;
typedef __m256 Vec;
typedef __m256i Ints;
static inline Vec zero() { return _mm256_setzero_ps(); }
static inline Vec splat(float x) { return _mm256_set1_ps(x); }
static inline Vec load(const float *p) { return _mm256_loadu_ps(p); }
static inline void store(float *p, Vec v) { _mm256_storeu_ps(p, v); }
static inline void stream(float *p, Vec v) { _mm256_stream_ps(p, v); }
static inline void finish_streams() { _mm_sfence(); }
static inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
static inline Vec divide(Vec a, Vec b) { return _mm256_div_ps(a, b); }
static inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
static inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline Vec fma_into(Vec sum, Vec a, Vec b) { return _mm256_fmadd_ps(a, b, sum); }
static inline Vec nearest(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline Vec times_power(Vec a, Vec n) {  // in two steps, so that 2^n itself need not be a float
  __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
  __m256i one = _mm256_set1_epi32(127);
  a = mul(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, one), 23)));
  return mul(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, one), 23)));
}
static inline bool all_finite(Vec a) {
  const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
  return _mm256_movemask_ps(_mm256_cmp_ps(size, _mm256_set1_ps(3.402823466e38f), _CMP_LE_OQ)) == 0xff;
}
static inline Ints load_ints(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline Ints splat_ints(int32_t x) { return _mm256_set1_epi32(x); }
static inline Vec to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
static inline Ints low_halves(Ints a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
static inline Ints high_halves(Ints a) { return low_halves(_mm256_srli_epi16(a, 4)); }
static inline void store_ints(void *p, Ints a) { _mm256_storeu_si256((__m256i *)p, a); }
static inline Ints bits_and(Ints a, Ints b) { return _mm256_and_si256(a, b); }
static inline Ints bits_or(Ints a, Ints b) { return _mm256_or_si256(a, b); }
static inline Ints bits_xor(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
static inline Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
static inline Ints sub_ints(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
static inline Ints sub_bytes(Ints a, Ints b) { return _mm256_sub_epi8(a, b); }
template <int N> static inline Ints shift_left(Ints a) { return _mm256_slli_epi32(a, N); }
template <int N> static inline Ints shift_right(Ints a) { return _mm256_srli_epi32(a, N); }
template <int N> static inline Ints shift_right_signed(Ints a) { return _mm256_srai_epi32(a, N); }
static inline Vec as_floats(Ints a) { return _mm256_castsi256_ps(a); }
static inline Ints load_unsigned(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
static inline Ints load_signed(const int8_t *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
static inline Vec load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
static inline void store_bytes(int8_t *p, Vec a) {
  const __m256i ints = _mm256_cvtps_epi32(a);
  const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(ints), _mm256_extracti128_si256(ints, 1));
  _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(shorts, shorts));
}
static inline Ints load_table(const uint8_t *p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)); }
static inline Ints look_up(Ints table, Ints index) { return _mm256_shuffle_epi8(table, index); }
static inline Ints zip_low(Ints a, Ints b) { return _mm256_unpacklo_epi8(a, b); }
static inline Ints zip_high(Ints a, Ints b) { return _mm256_unpackhi_epi8(a, b); }
static inline Ints unzip_first(Ints a, Ints b) {
  return _mm256_packus_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)), _mm256_and_si256(b, _mm256_set1_epi16(255)));
}
static inline Ints unzip_second(Ints a, Ints b) { return _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)); }
static inline Ints splat_byte(uint8_t x) { return _mm256_set1_epi8((char)x); }
static inline int count_equal(Ints a, Ints b) { return __builtin_popcount((uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(a, b))); }
static inline Ints slots_of(Ints v) {
  return _mm256_or_si256(_mm256_and_si256(v, splat_byte(7)), _mm256_and_si256(_mm256_srli_epi16(v, 4), splat_byte(8)));
}
static inline Ints pick_equal(Ints found, Ints a, Ints b, Ints other) { return _mm256_blendv_epi8(found, other, _mm256_cmpeq_epi8(a, b)); }
static inline Ints add_four(Ints sum, Ints w, Ints x) {
#if defined(SP_VNNI) && !defined(SP_MODELS)
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));  // not AVX-512's; see fma_into
  return sum;
#else
  const Ints even = _mm256_and_si256(w, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(w, 8);
  const Ints x_even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), x_odd = _mm256_srai_epi16(x, 8);
  return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(even, x_even), _mm256_madd_epi16(odd, x_odd)));
#endif
}
static inline Ints pair_products(Ints w, Ints x) { return _mm256_maddubs_epi16(w, x); }
static inline Ints add_shorts(Ints a, Ints b) {
  Ints sum = _mm256_add_epi16(a, b);
  asm("" : "+x"(sum));  // else gcc adds in the order of a tree, whose terms do not fit in the registers
  return sum;
}
template <int FACTOR> static inline Ints add_short_pairs(Ints sum, Ints a) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, _mm256_set1_epi16(FACTOR))); }
static inline Vec low_bf16(Ints v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
static inline Vec high_bf16(Ints v) { return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(0xffff0000))); }
static inline Vec load_bf16(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
static inline float first_lane(Vec v) { return _mm256_cvtss_f32(v); }
static inline float sum_lanes(Vec v) { return sum_of_eight(v); }
static inline float max_lanes(Vec v) { return max_of_eight(v); }
static inline void transpose(const float *const *from, float *to, int64_t to_stride) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 4) {
    Vec a = load(from[i]), b = load(from[i + 1]), c = load(from[i + 2]), d = load(from[i + 3]);
    Vec ab = _mm256_unpacklo_ps(a, b), cd = _mm256_unpacklo_ps(c, d);
    t[i] = _mm256_shuffle_ps(ab, cd, 0x44), t[i + 1] = _mm256_shuffle_ps(ab, cd, 0xee);
    ab = _mm256_unpackhi_ps(a, b), cd = _mm256_unpackhi_ps(c, d);
    t[i + 2] = _mm256_shuffle_ps(ab, cd, 0x44), t[i + 3] = _mm256_shuffle_ps(ab, cd, 0xee);
  }
  for (int c = 0; c < 4; c++) {
    store(to + c * to_stride, _mm256_permute2f128_ps(t[c], t[4 + c], 0x20));
    store(to + (4 + c) * to_stride, _mm256_permute2f128_ps(t[c], t[4 + c], 0x31));
  }
}
}  // namespace SP_NAMESPACE

#elif defined(SP_NEON)
#include <arm_neon.h>
namespace SP_NAMESPACE {
// Two registers stand for one of AVX2's, so that the order of sums, and thereby all bits, are the same.
constexpr int LANES = 8, REGISTERS = 16;
struct Vec { float32x4_t low, high; };
struct Ints { uint32x4_t low, high; };
typedef uint8x16_t Bytes;
static inline Bytes bytes(uint32x4_t a) { return vreinterpretq_u8_u32(a); }
static inline int8x16_t signed_bytes(uint32x4_t a) { return vreinterpretq_s8_u32(a); }
static inline int32x4_t signed_ints(uint32x4_t a) { return vreinterpretq_s32_u32(a); }
static inline Ints ints(Bytes low, Bytes high) { return {vreinterpretq_u32_u8(low), vreinterpretq_u32_u8(high)}; }
static inline Ints ints(int32x4_t low, int32x4_t high) { return {vreinterpretq_u32_s32(low), vreinterpretq_u32_s32(high)}; }
static inline Vec zero() { return {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}; }
static inline Vec splat(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
static inline Vec load(const float *p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
static inline void store(float *p, Vec v) { vst1q_f32(p, v.low), vst1q_f32(p + 4, v.high); }
static inline void stream(float *p, Vec v) { store(p, v); }
static inline void finish_streams() {}
static inline Vec add(Vec a, Vec b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
static inline Vec sub(Vec a, Vec b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
static inline Vec mul(Vec a, Vec b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
static inline Vec divide(Vec a, Vec b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
// Not FMAX and FMIN, which return NaN if either is: b is returned, as on x86, and also of two zeros.
static inline float32x4_t max_of(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline float32x4_t min_of(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline Vec max(Vec a, Vec b) { return {max_of(a.low, b.low), max_of(a.high, b.high)}; }
static inline Vec min(Vec a, Vec b) { return {min_of(a.low, b.low), min_of(a.high, b.high)}; }
static inline Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
static inline Vec fma_into(Vec sum, Vec a, Vec b) { return fma(a, b, sum); }
static inline Vec nearest(Vec a) { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }
static inline float32x4_t power_of_2(int32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
static inline float32x4_t times_power_of(float32x4_t a, float32x4_t n) {
  const int32x4_t whole = vcvtnq_s32_f32(n), half = vshrq_n_s32(whole, 1);
  return vmulq_f32(vmulq_f32(a, power_of_2(half)), power_of_2(vsubq_s32(whole, half)));
}
static inline Vec times_power(Vec a, Vec n) { return {times_power_of(a.low, n.low), times_power_of(a.high, n.high)}; }
static inline bool all_finite(Vec a) {
  const float32x4_t most = vdupq_n_f32(3.402823466e38f);
  return vminvq_u32(vandq_u32(vcaleq_f32(a.low, most), vcaleq_f32(a.high, most)));
}
static inline Ints load_ints(const void *p) { return ints(vld1q_u8((const uint8_t *)p), vld1q_u8((const uint8_t *)p + 16)); }
static inline Ints splat_ints(int32_t x) { return ints(vdupq_n_s32(x), vdupq_n_s32(x)); }
static inline Ints splat_byte(uint8_t x) { return ints(vdupq_n_u8(x), vdupq_n_u8(x)); }
static inline Vec to_floats(Ints a) { return {vcvtq_f32_s32(signed_ints(a.low)), vcvtq_f32_s32(signed_ints(a.high))}; }
static inline void store_ints(void *p, Ints a) { vst1q_u8((uint8_t *)p, bytes(a.low)), vst1q_u8((uint8_t *)p + 16, bytes(a.high)); }
static inline Ints bits_and(Ints a, Ints b) { return {vandq_u32(a.low, b.low), vandq_u32(a.high, b.high)}; }
static inline Ints bits_or(Ints a, Ints b) { return {vorrq_u32(a.low, b.low), vorrq_u32(a.high, b.high)}; }
static inline Ints bits_xor(Ints a, Ints b) { return {veorq_u32(a.low, b.low), veorq_u32(a.high, b.high)}; }
static inline Ints low_halves(Ints a) { return bits_and(a, splat_byte(15)); }
static inline Ints high_halves(Ints a) { return ints(vshrq_n_u8(bytes(a.low), 4), vshrq_n_u8(bytes(a.high), 4)); }
static inline Ints add_ints(Ints a, Ints b) { return {vaddq_u32(a.low, b.low), vaddq_u32(a.high, b.high)}; }
static inline Ints sub_ints(Ints a, Ints b) { return {vsubq_u32(a.low, b.low), vsubq_u32(a.high, b.high)}; }
template <int N> static inline Ints shift_left(Ints a) { return {vshlq_n_u32(a.low, N), vshlq_n_u32(a.high, N)}; }
// A shift by an immediate is at least by 1.
template <int N> static inline uint32x4_t right(uint32x4_t a) { if constexpr (N) return vshrq_n_u32(a, N); else return a; }
template <int N> static inline Ints shift_right(Ints a) { return {right<N>(a.low), right<N>(a.high)}; }
template <int N> static inline Ints shift_right_signed(Ints a) {
  return ints(vshrq_n_s32(signed_ints(a.low), N), vshrq_n_s32(signed_ints(a.high), N));
}
static inline Vec as_floats(Ints a) { return {vreinterpretq_f32_u32(a.low), vreinterpretq_f32_u32(a.high)}; }
static inline Ints load_unsigned(const uint8_t *p) {
  const uint16x8_t wide = vmovl_u8(vld1_u8(p));
  return {vmovl_u16(vget_low_u16(wide)), vmovl_high_u16(wide)};
}
static inline Ints load_signed(const int8_t *p) {
  const int16x8_t wide = vmovl_s8(vld1_s8(p));
  return ints(vmovl_s16(vget_low_s16(wide)), vmovl_high_s16(wide));
}
static inline Vec load_f16(const uint16_t *p) {
  const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(p));
  return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
static inline void store_bytes(int8_t *p, Vec a) {
  vst1_s8(p, vqmovn_s16(vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(a.low)), vcvtnq_s32_f32(a.high))));
}
static inline Ints load_table(const uint8_t *p) { return ints(vld1q_u8(p), vld1q_u8(p)); }
static inline Ints look_up(Ints table, Ints index) {  // TBL gives 0 from index 16 on, so that the sign keeps an index out of the table
  const Bytes kept = vdupq_n_u8(0x8f);
  return ints(vqtbl1q_u8(bytes(table.low), vandq_u8(bytes(index.low), kept)), vqtbl1q_u8(bytes(table.high), vandq_u8(bytes(index.high), kept)));
}
static inline Ints zip_low(Ints a, Ints b) { return ints(vzip1q_u8(bytes(a.low), bytes(b.low)), vzip1q_u8(bytes(a.high), bytes(b.high))); }
static inline Ints zip_high(Ints a, Ints b) { return ints(vzip2q_u8(bytes(a.low), bytes(b.low)), vzip2q_u8(bytes(a.high), bytes(b.high))); }
static inline Ints unzip_first(Ints a, Ints b) { return ints(vuzp1q_u8(bytes(a.low), bytes(b.low)), vuzp1q_u8(bytes(a.high), bytes(b.high))); }
static inline Ints unzip_second(Ints a, Ints b) { return ints(vuzp2q_u8(bytes(a.low), bytes(b.low)), vuzp2q_u8(bytes(a.high), bytes(b.high))); }
static inline Ints equal_bytes(Ints a, Ints b) { return ints(vceqq_u8(bytes(a.low), bytes(b.low)), vceqq_u8(bytes(a.high), bytes(b.high))); }
static inline int count_equal(Ints a, Ints b) {
  const Ints equal = bits_and(equal_bytes(a, b), splat_byte(1));
  return vaddvq_u8(vaddq_u8(bytes(equal.low), bytes(equal.high)));
}
static inline Ints slots_of(Ints v) { return bits_or(bits_and(v, splat_byte(7)), bits_and(high_halves(v), splat_byte(8))); }
static inline Ints pick_equal(Ints found, Ints a, Ints b, Ints other) {
  const Ints equal = equal_bytes(a, b);
  return {vbslq_u32(equal.low, other.low, found.low), vbslq_u32(equal.high, other.high, found.high)};
}
#if defined(SP_I8MM)
static inline int32x4_t add_dots(uint32x4_t sum, uint32x4_t w, uint32x4_t x) { return vusdotq_s32(signed_ints(sum), bytes(w), signed_bytes(x)); }
template <int BITS> static inline Ints add_four_of(Ints sum, Ints w, Ints x) { return ints(add_dots(sum.low, w.low, x.low), add_dots(sum.high, w.high, x.high)); }
#elif defined(SP_DOT)
// SDOT multiplies signed bytes. w - 128 is one, and the products of 128 are the same for all w: twice those of 64.
static inline int32x4_t add_dots(uint32x4_t sum, uint32x4_t w, uint32x4_t x) { return vdotq_s32(signed_ints(sum), signed_bytes(w), signed_bytes(x)); }
static inline Ints add_signed(Ints sum, Ints w, Ints x) { return ints(add_dots(sum.low, w.low, x.low), add_dots(sum.high, w.high, x.high)); }
template <int BITS> static inline Ints add_four_of(Ints sum, Ints w, Ints x) {
  if (BITS < 8) return add_signed(sum, w, x);
  const Ints half = add_signed(splat_ints(0), splat_byte(64), x);
  return add_signed(add_ints(sum, add_ints(half, half)), bits_xor(w, splat_byte(128)), x);
}
#else
static inline int16x8_t pairs_of(uint32x4_t w, uint32x4_t x) {  // w < 128
  const int8x16_t a = signed_bytes(w), b = signed_bytes(x);
  return vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b));
}
static inline Ints pair_products(Ints w, Ints x) {
  return {vreinterpretq_u32_s16(pairs_of(w.low, x.low)), vreinterpretq_u32_s16(pairs_of(w.high, x.high))};
}
static inline uint32x4_t sum_of_shorts(uint32x4_t a, uint32x4_t b) {
  return vreinterpretq_u32_u16(vaddq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
}
static inline Ints add_shorts(Ints a, Ints b) { return {sum_of_shorts(a.low, b.low), sum_of_shorts(a.high, b.high)}; }
template <int FACTOR> static inline int32x4_t add_pairs_of(uint32x4_t sum, uint32x4_t a) {
  const int16x8_t shorts = vreinterpretq_s16_u32(a);
  return FACTOR == 1 ? vpadalq_s16(signed_ints(sum), shorts) : vmlaq_n_s32(signed_ints(sum), vpaddlq_s16(shorts), FACTOR);
}
template <int FACTOR> static inline Ints add_short_pairs(Ints sum, Ints a) {
  return ints(add_pairs_of<FACTOR>(sum.low, a.low), add_pairs_of<FACTOR>(sum.high, a.high));
}
#endif
static inline Vec low_bf16(Ints v) { return as_floats(shift_left<16>(v)); }
static inline Vec high_bf16(Ints v) { return as_floats(bits_and(v, splat_ints((int32_t)0xffff0000))); }
static inline Vec load_bf16(const uint16_t *p) {
  const uint16x8_t v = vld1q_u16(p);
  return as_floats({vshll_n_u16(vget_low_u16(v), 16), vshll_high_n_u16(v, 16)});
}
static inline float first_lane(Vec v) { return vgetq_lane_f32(v.low, 0); }
static inline float sum_lanes(Vec v) {
  const float32x4_t four = vaddq_f32(v.low, v.high);
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
static inline float max_lanes(Vec v) {
  const float32x4_t four = max_of(v.low, v.high), two = max_of(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(max_of(two, vdupq_laneq_f32(two, 1)), 0);
}
static inline void transpose(const float *const *from, float *to, int64_t to_stride) {
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < LANES; j += 4) {
      const float32x4_t a = vld1q_f32(from[i] + j), b = vld1q_f32(from[i + 1] + j);
      const float32x4_t c = vld1q_f32(from[i + 2] + j), d = vld1q_f32(from[i + 3] + j);
      const float64x2_t even[2] = {vreinterpretq_f64_f32(vtrn1q_f32(a, b)), vreinterpretq_f64_f32(vtrn1q_f32(c, d))};
      const float64x2_t odd[2] = {vreinterpretq_f64_f32(vtrn2q_f32(a, b)), vreinterpretq_f64_f32(vtrn2q_f32(c, d))};
      float *at = to + j * to_stride + i;
      vst1q_f32(at, vreinterpretq_f32_f64(vtrn1q_f64(even[0], even[1])));
      vst1q_f32(at + to_stride, vreinterpretq_f32_f64(vtrn1q_f64(odd[0], odd[1])));
      vst1q_f32(at + 2 * to_stride, vreinterpretq_f32_f64(vtrn2q_f64(even[0], even[1])));
      vst1q_f32(at + 3 * to_stride, vreinterpretq_f32_f64(vtrn2q_f64(odd[0], odd[1])));
    }
}
}  // namespace SP_NAMESPACE

#else  // portable: the compiler's vectors, and loops over lanes for operations that these lack
#if defined(__SSE2__)
#include <emmintrin.h>  // every x86-64 processor has SSE2
#endif
namespace SP_NAMESPACE {
constexpr int LANES = 8, REGISTERS = 0;
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Dwords __attribute__((vector_size(LANES * 4)));
typedef int32_t Signed __attribute__((vector_size(LANES * 4)));
struct Vec { Floats at; };
struct Ints { Dwords at; };
#define SP_EACH(result, expression) \
  result out;                       \
  for (int i = 0; i < LANES; i++) out.at[i] = (expression); \
  return out;
static inline Vec zero() { return {Floats{}}; }
static inline Vec splat(float x) { return {x - Floats{}}; }
static inline Vec load(const float *p) { Vec out; memcpy(&out, p, sizeof out); return out; }
static inline void store(float *p, Vec v) { memcpy(p, &v, sizeof v); }
static inline void stream(float *p, Vec v) { store(p, v); }
static inline void finish_streams() {}
static inline Vec add(Vec a, Vec b) { return {a.at + b.at}; }
static inline Vec sub(Vec a, Vec b) { return {a.at - b.at}; }
static inline Vec mul(Vec a, Vec b) { return {a.at * b.at}; }
static inline Vec divide(Vec a, Vec b) { return {a.at / b.at}; }
static inline Vec max(Vec a, Vec b) { return {a.at > b.at ? a.at : b.at}; }
static inline Vec min(Vec a, Vec b) { return {a.at < b.at ? a.at : b.at}; }
#if defined(__SSE2__)
// Products of float32 are exact in float64. Their sum is rounded to odd: of an inexact one the last bit is 1, so that rounding it to float32
// gives the bits of one rounding.
static __attribute__((noinline, cold)) __m128 fma_by_odd(__m128 a, __m128 b, __m128 c) {
  float x[4], y[4], z[4];
  _mm_storeu_ps(x, a), _mm_storeu_ps(y, b), _mm_storeu_ps(z, c);
  for (int i = 0; i < 4; i++) {
    const double product = (double)x[i] * (double)y[i], other = z[i], sum = product + other;
    const double of_other = sum - product, error = (product - (sum - of_other)) + (other - of_other);
    int64_t bits;
    memcpy(&bits, &sum, 8);
    if (error != 0.0 && error - error == 0.0 && bits % 2 == 0) bits += (error > 0.0) == (sum > 0.0) ? 1 : -1;
    double odd;
    memcpy(&odd, &bits, 8);
    x[i] = (float)odd;
  }
  return _mm_loadu_ps(x);
}
// Rounded to float64 and then to float32, a sum can differ from one that is rounded once only if the first rounding ends halfway between
// two numbers of float32: its last 29 bits are then 100...0, unless the result is subnormal, or the least normal number, to which a subnormal one
// may be rounded. Not inlined, because the code is long.
static __attribute__((noinline)) __m128 fma_four(__m128 a, __m128 b, __m128 c) {
  const __m128d low = _mm_add_pd(_mm_mul_pd(_mm_cvtps_pd(a), _mm_cvtps_pd(b)), _mm_cvtps_pd(c));
  const __m128d high = _mm_add_pd(_mm_mul_pd(_mm_cvtps_pd(_mm_movehl_ps(a, a)), _mm_cvtps_pd(_mm_movehl_ps(b, b))),
                                  _mm_cvtps_pd(_mm_movehl_ps(c, c)));
  const __m128 sum = _mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high));
  const __m128i ends = _mm_castps_si128(_mm_shuffle_ps(_mm_castpd_ps(low), _mm_castpd_ps(high), 0x88));
  const __m128i is_half = _mm_cmpeq_epi32(_mm_and_si128(ends, _mm_set1_epi32(0x1fffffff)), _mm_set1_epi32(0x10000000));
  const __m128i size = _mm_slli_epi32(_mm_castps_si128(sum), 1);  // doubtful from 1 to 0x1000000, as unsigned numbers
  const __m128i is_subnormal = _mm_cmplt_epi32(_mm_add_epi32(size, _mm_set1_epi32(0x7fffffff)), _mm_set1_epi32(0x1000000 - 0x7fffffff - 1));
  return __builtin_expect(_mm_movemask_epi8(_mm_or_si128(is_half, is_subnormal)), 0) ? fma_by_odd(a, b, c) : sum;
}
static inline Vec fma(Vec a, Vec b, Vec c) {
  Vec out;
  for (int half = 0; half < LANES; half += 4)
    _mm_storeu_ps((float *)&out + half,
                  fma_four(_mm_loadu_ps((float *)&a + half), _mm_loadu_ps((float *)&b + half), _mm_loadu_ps((float *)&c + half)));
  return out;
}
#else
static inline Vec fma(Vec a, Vec b, Vec c) { SP_EACH(Vec, __builtin_fmaf(a.at[i], b.at[i], c.at[i])) }
#endif
static inline Vec fma_into(Vec sum, Vec a, Vec b) { return fma(a, b, sum); }
static inline Vec nearest(Vec a) { SP_EACH(Vec, nearbyintf(a.at[i])) }
static inline Vec times_power(Vec a, Vec n) { SP_EACH(Vec, ldexpf(a.at[i], n.at[i] == n.at[i] ? (int)n.at[i] : 0)) }
static inline bool all_finite(Vec a) {
  bool finite = true;
  for (int i = 0; i < LANES; i++) finite &= fabsf(a.at[i]) <= 3.402823466e38f;
  return finite;
}
static inline Ints load_ints(const void *p) { Ints out; memcpy(&out, p, sizeof out); return out; }
static inline Ints splat_ints(int32_t x) { return {(uint32_t)x + Dwords{}}; }
static inline Vec to_floats(Ints a) { return {__builtin_convertvector((Signed)a.at, Floats)}; }
static inline Ints low_halves(Ints a) { return {a.at & 0x0f0f0f0fu}; }
static inline Ints high_halves(Ints a) { return {a.at >> 4 & 0x0f0f0f0fu}; }
static inline void store_ints(void *p, Ints a) { memcpy(p, &a, sizeof a); }
static inline Ints bits_and(Ints a, Ints b) { return {a.at & b.at}; }
static inline Ints bits_or(Ints a, Ints b) { return {a.at | b.at}; }
static inline Ints bits_xor(Ints a, Ints b) { return {a.at ^ b.at}; }
static inline Ints add_ints(Ints a, Ints b) { return {a.at + b.at}; }
static inline Ints sub_ints(Ints a, Ints b) { return {a.at - b.at}; }
template <int N> static inline Ints shift_left(Ints a) { return {a.at << N}; }
template <int N> static inline Ints shift_right(Ints a) { return {a.at >> N}; }
template <int N> static inline Ints shift_right_signed(Ints a) { return {(Dwords)((Signed)a.at >> N)}; }
static inline Vec as_floats(Ints a) { return {(Floats)a.at}; }
static inline Ints load_unsigned(const uint8_t *p) { SP_EACH(Ints, p[i]) }
static inline Ints load_signed(const int8_t *p) { SP_EACH(Ints, (uint32_t)p[i]) }
static inline Vec load_f16(const uint16_t *p) { SP_EACH(Vec, read_f16(p[i])) }
static inline void store_bytes(int8_t *p, Vec a) {
  for (int i = 0; i < LANES; i++) p[i] = (int8_t)a.at[i];
}
typedef uint8_t Bytes[LANES * 4];
static inline Ints load_table(const uint8_t *p) {
  Ints out;
  for (int i = 0; i < LANES * 4; i += 16) memcpy((uint8_t *)&out + i, p, 16);
  return out;
}
static inline Ints look_up(Ints table, Ints index) {
  Bytes from, places, found;
  memcpy(from, &table, sizeof from), memcpy(places, &index, sizeof places);
  for (int i = 0; i < LANES * 4; i++) found[i] = places[i] & 0x80 ? (uint8_t)0 : from[places[i] & 15];
  return load_ints(found);
}
static inline Ints zip(Ints a, Ints b, int half) {
  Bytes first, second, zipped;
  memcpy(first, &a, sizeof first), memcpy(second, &b, sizeof second);
  for (int i = 0; i < LANES * 4; i++) {
    const uint8_t *from = i % 2 ? second : first;  // gcc 12 checks the bounds of a chosen array's index wrongly
    zipped[i] = from[i / 16 * 16 + half * 8 + i % 16 / 2];
  }
  return load_ints(zipped);
}
static inline Ints zip_low(Ints a, Ints b) { return zip(a, b, 0); }
static inline Ints zip_high(Ints a, Ints b) { return zip(a, b, 1); }
typedef uint16_t Shorts __attribute__((vector_size(16)));
typedef uint8_t Narrow __attribute__((vector_size(8)));
static inline Ints unzip(Ints a, Ints b, int shift) {
  const Ints from[2] = {a, b};
  Bytes found;
  for (int i = 0; i < LANES * 4; i += 8) {
    Shorts shorts;
    memcpy(&shorts, (const char *)&from[i / 8 % 2] + i / 16 * 16, sizeof shorts);
    const Narrow narrow = __builtin_convertvector(shorts >> shift & 255, Narrow);
    memcpy(found + i, &narrow, sizeof narrow);
  }
  return load_ints(found);
}
static inline Ints unzip_first(Ints a, Ints b) { return unzip(a, b, 0); }
static inline Ints unzip_second(Ints a, Ints b) { return unzip(a, b, 8); }
static inline Ints splat_byte(uint8_t x) { return splat_ints((int32_t)(x * 0x01010101u)); }
static inline int count_equal(Ints a, Ints b) {
  Bytes first, second;
  uint8_t equal = 0;
  memcpy(first, &a, sizeof first), memcpy(second, &b, sizeof second);
  for (int i = 0; i < LANES * 4; i++) equal = (uint8_t)(equal + (first[i] == second[i]));
  return equal;
}
static inline Ints map_bytes(Ints values, const uint8_t *map) {
  Bytes found;
  memcpy(found, &values, sizeof found);
  for (int i = 0; i < LANES * 4; i++) found[i] = map[found[i]];
  return load_ints(found);
}
#if defined(__SSE2__)
static inline Ints add_four(Ints sum, Ints w, Ints x) {
  Ints out;
  for (int half = 0; half < 2; half++) {
    const __m128i own = _mm_loadu_si128((const __m128i *)&w + half), other = _mm_loadu_si128((const __m128i *)&x + half);
    const __m128i even = _mm_madd_epi16(_mm_and_si128(own, _mm_set1_epi16(255)), _mm_srai_epi16(_mm_slli_epi16(other, 8), 8));
    const __m128i odd = _mm_madd_epi16(_mm_srli_epi16(own, 8), _mm_srai_epi16(other, 8));
    const __m128i before = _mm_loadu_si128((const __m128i *)&sum + half);
    _mm_storeu_si128((__m128i *)&out + half, _mm_add_epi32(before, _mm_add_epi32(even, odd)));
  }
  return out;
}
#else
static inline uint32_t four_products(uint32_t w, uint32_t x) {
  int32_t sum = 0;
  for (int i = 0; i < 32; i += 8) sum += (int32_t)(w >> i & 255) * (int8_t)(x >> i & 255);
  return (uint32_t)sum;
}
static inline Ints add_four(Ints sum, Ints w, Ints x) { SP_EACH(Ints, sum.at[i] + four_products(w.at[i], x.at[i])) }
#endif
static inline Vec low_bf16(Ints v) { return as_floats({v.at << 16}); }
static inline Vec high_bf16(Ints v) { return as_floats({v.at & 0xffff0000u}); }
static inline Vec load_bf16(const uint16_t *p) { SP_EACH(Vec, from_bits((uint32_t)p[i] << 16)) }
static inline float first_lane(Vec v) { return v.at[0]; }
static inline float sum_lanes(Vec v) {
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) v.at[i] += v.at[i + width];
  return v.at[0];
}
static inline float max_lanes(Vec v) {
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) v.at[i] = v.at[i] > v.at[i + width] ? v.at[i] : v.at[i + width];
  return v.at[0];
}
static inline void transpose(const float *const *from, float *to, int64_t to_stride) {
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) to[j * to_stride + i] = from[i][j];
}
}  // namespace SP_NAMESPACE
#endif

namespace SP_NAMESPACE {

#if !defined(SP_NEON)
// The same as `add_four`, for w of BITS bits.
template <int BITS> static inline Ints add_four_of(Ints sum, Ints w, Ints x) { return add_four(sum, w, x); }
#endif

// Every lane holds the four bytes at p.
static inline Ints splat_dword(const void *p) {
  int32_t dword;
  memcpy(&dword, p, 4);
  return splat_ints(dword);
}

// Load `count` < LANES floats; the other lanes are zero.
static inline Vec load_part(const float *p, int64_t count) {
  alignas(64) float lanes[LANES] = {0};
  memcpy(lanes, p, count * sizeof(float));
  return load(lanes);
}
static inline void store_part(float *p, Vec v, int64_t count) {
  alignas(64) float lanes[LANES];
  store(lanes, v);
  memcpy(p, lanes, count * sizeof(float));
}

// The first `count` floats, or a whole vector if there are more.
static inline Vec load_up_to(const float *p, int64_t count) { return count < LANES ? load_part(p, count) : load(p); }
static inline void store_up_to(float *p, Vec v, int64_t count) { count < LANES ? store_part(p, v, count) : store(p, v); }

// A sum over numbers has one order on all sets of instructions: number i is added in lane i % SUMMED of one vector or several, then
// the lanes are folded.
constexpr int SUMMED = 16, SUMS = SUMMED / LANES;
static inline float sum_all(const Vec *sums) {
  Vec sum = sums[0];
  if (SUMS == 2) sum = add(sum, sums[SUMS - 1]);
  return sum_lanes(sum);
}

// A sum over n numbers, of which add_to(sum, a vector) adds a vector.
template <typename Add>
static inline float sum_over(const float *x, int64_t n, Add add_to) {
  Vec sums[SUMS];
  for (Vec &sum : sums) sum = zero();
  int64_t i = 0;
  for (; i + SUMMED <= n; i += SUMMED)
    for (int v = 0; v < SUMS; v++) sums[v] = add_to(sums[v], load(x + i + v * LANES));
  for (int v = 0; v < SUMS && i < n; v++, i += LANES) sums[v] = add_to(sums[v], load_up_to(x + i, n - i));
  return sum_all(sums);
}

// a * b + c, rounded once or, if not FUSED, twice: the latter has the same bits on every set of instructions.
template <bool FUSED> static inline Vec times_plus(Vec a, Vec b, Vec c) { return FUSED ? fma(a, b, c) : add(mul(a, b), c); }

// x = n ln(2) + r with a whole n. Returns e^r - 1 by Cephes' polynomial.
template <bool FUSED> static inline Vec reduced_exp(Vec x, Vec &n) {
  n = nearest(mul(x, splat(1.44269504088896341f)));
  Vec r = times_plus<FUSED>(n, splat(2.12194440e-4f), times_plus<FUSED>(n, splat(-0.693359375f), x));
  Vec p = splat(1.9875691500e-4f);
  p = times_plus<FUSED>(p, r, splat(1.3981999507e-3f));
  p = times_plus<FUSED>(p, r, splat(8.3334519073e-3f));
  p = times_plus<FUSED>(p, r, splat(4.1665795894e-2f));
  p = times_plus<FUSED>(p, r, splat(1.6666665459e-1f));
  p = times_plus<FUSED>(p, r, splat(5.0000001201e-1f));
  return times_plus<FUSED>(mul(r, r), p, r);
}

// e^x to about 1e-7, 0 and infinity beyond float32's range, NaN for NaN.
template <bool FUSED> static inline Vec exp_by(Vec x) {
  Vec n, p = reduced_exp<FUSED>(min(splat(89.0f), max(splat(-104.0f), x)), n);
  return times_power(add(p, splat(1.0f)), n);
}
static inline Vec exp(Vec x) { return exp_by<true>(x); }

// e^x - 1 to about 1e-7 of it, for |x| <= 80.
static inline Vec exp_minus_1(Vec x) {
  Vec n, p = reduced_exp<true>(x, n);
  return add(times_power(p, n), sub(times_power(splat(1.0f), n), splat(1.0f)));
}

}  // namespace SP_NAMESPACE
