// Vectors of doubles for distributions and draws, written once with the compiler's vector extensions.
#pragma once
#include "simd.h"

namespace SP_NAMESPACE {

#if defined(SP_PORTABLE)
constexpr int REALS = 2;  // every 64-bit processor has vectors of two
#else
constexpr int REALS = LANES / 2;
#endif
typedef double Reals __attribute__((vector_size(REALS * 8)));
typedef int64_t Longs __attribute__((vector_size(REALS * 8)));
typedef uint64_t Words __attribute__((vector_size(REALS * 8)));
typedef float Halves __attribute__((vector_size(REALS * 4)));

static inline Reals splat_reals(double x) { return x - Reals{}; }
static inline Reals load_reals(const double *p) {
  Reals x;
  memcpy(&x, p, sizeof x);
  return x;
}
static inline void store_reals(double *p, Reals x) { memcpy(p, &x, sizeof x); }
static inline Reals load_floats(const float *p) {
  Halves x;
  memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, Reals);
}
// As sums of floats, those of doubles have one order on all sets of instructions: in 8 lanes, which are added in turn.
constexpr int REAL_SUMS = 8 / REALS;
struct RealSums {
  Reals of[REAL_SUMS] = {};

  double all() const {
    double sum = 0.0;
    for (int i = 0; i < 8; i++) sum += of[i / REALS][i % REALS];
    return sum;
  }
};
static inline bool is_zero(Reals x) {  // of numbers that are not negative
  double sum = 0.0;
  for (int i = 0; i < REALS; i++) sum += x[i];
  return sum == 0.0;
}
static inline float most_lane(Vec x) {
  float lanes[LANES];
  store(lanes, x);
  float most = lanes[0];
  for (int i = 1; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

constexpr double WHOLE = 0x1.8p52;  // added to a small double, it leaves the nearest integer in the lowest bits
constexpr double LN2_HIGH = 0x1.62e42feep-1, LN2_LOW = 0x1.a39ef35793c76p-33;

// e^x for x <= 0, within two units in the last place; 0 below -708.
static inline Reals exp_reals(Reals x) {
  const Reals shifted = x * 0x1.71547652b82fep+0 + WHOLE, n = shifted - WHOLE;
  const Reals r = (x - n * LN2_HIGH) - n * LN2_LOW;
  Reals y = splat_reals(1.0 / 6227020800.0);  // the Taylor coefficients 1 / 13! .. 1 / 0!
  y = y * r + 1.0 / 479001600.0;
  y = y * r + 1.0 / 39916800.0;
  y = y * r + 1.0 / 3628800.0;
  y = y * r + 1.0 / 362880.0;
  y = y * r + 1.0 / 40320.0;
  y = y * r + 1.0 / 5040.0;
  y = y * r + 1.0 / 720.0;
  y = y * r + 1.0 / 120.0;
  y = y * r + 1.0 / 24.0;
  y = y * r + 1.0 / 6.0;
  y = y * r + 0.5;
  y = y * r + 1.0;
  y = y * r + 1.0;
  const Reals power = (Reals)(((Longs)shifted + 1023) << 52);
  return x < -708.0 ? Reals{} : y * power;
}

// The natural logarithm of a normal positive number, within one unit in the last place: x = 2^n m, and log m is a series in
// (m - 1) / (m + 1) with the coefficients of fdlibm's log.
static inline Reals log_reals(Reals x) {
  const Longs bits = (Longs)x, n = (bits - 0x3fe6a09e667f3bcd) >> 52;
  const Reals f = (Reals)(bits - (n << 52)) - 1.0;
  const Reals power = (Reals)(n + 0x4338000000000000) - WHOLE;
  const Reals s = f / (2.0 + f), z = s * s, w = z * z;
  const Reals even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  const Reals odd = z * (6.666666666666735130e-01 +
                         w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  const Reals half = 0.5 * f * f;
  return power * LN2_HIGH - ((half - (s * (half + even + odd) + power * LN2_LOW)) - f);
}

}  // namespace SP_NAMESPACE
