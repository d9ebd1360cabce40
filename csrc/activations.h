// Activations and soft caps, a vector at a time. Each lane's result depends on that lane alone. Errors are below 3e-7 of a result, or for
// the GELUs of x. A NaN stays one.
#pragma once
#include "simd.h"
#include "speculant.h"

namespace SP_NAMESPACE {

static inline Vec negative(Vec x) { return sub(zero(), x); }

static inline Vec sigmoid(Vec x) { return divide(splat(1.0f), add(splat(1.0f), exp(negative(x)))); }

static inline Vec silu(Vec x) { return divide(x, add(splat(1.0f), exp(negative(x)))); }

// tanh(u) = e / (e + 2) with e = exp(2 u) - 1, which is accurate near 0 too.
static inline Vec tanh(Vec u) {
  const Vec e = exp_minus_1(min(splat(40.0f), max(splat(-40.0f), add(u, u))));
  return divide(e, add(e, splat(2.0f)));
}

// 1 - erf(z) for z >= 0: exp(-z^2) t R(t) with t = 1 / (1 + 0.4 z). R is the polynomial with the least relative error, 2.4e-8, for z <= 6.
static inline Vec erfc(Vec z) {
  const Vec t = divide(splat(1.0f), fma(splat(0.4f), z, splat(1.0f)));
  Vec p = splat(0.02757309190928936f);
  p = fma(p, t, splat(-0.07067391276359558f));
  p = fma(p, t, splat(-0.06762292981147766f));
  p = fma(p, t, splat(0.27199721336364746f));
  p = fma(p, t, splat(-0.05627625063061714f));
  p = fma(p, t, splat(0.25600486993789673f));
  p = fma(p, t, splat(0.1843847632408142f));
  p = fma(p, t, splat(0.2291577309370041f));
  p = fma(p, t, splat(0.22545546293258667f));
  return mul(mul(p, t), exp(negative(mul(z, z))));
}

static inline Vec relu(Vec x) { return max(zero(), x); }  // x if it is NaN

// x P(x), where P is the normal distribution's integral: for x < 0 it is erfc(|x| / sqrt(2)) / 2, else 1 minus that.
static inline Vec gelu(Vec x) {
  const Vec size = max(x, negative(x));
  return sub(relu(x), mul(mul(size, splat(0.5f)), erfc(mul(size, splat(0.70710678118654752f)))));
}

// x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3).
static inline Vec gelu_tanh(Vec x) {
  const Vec u = mul(x, fma(mul(splat(0.044715f), x), x, splat(1.0f)));
  return divide(x, add(splat(1.0f), exp(mul(splat(-1.5957691216057308f), u))));
}

static inline Vec activate(int activation, Vec x) {
  switch (activation) {
    case SP_SILU: return silu(x);
    case SP_GELU: return gelu(x);
    case SP_GELU_TANH: return gelu_tanh(x);
    case SP_RELU: return relu(x);
    case SP_SIGMOID: return sigmoid(x);
  }
  return x;
}

// (up + 1) gate sigmoid(gain * gate), of gate <= limit and |up| <= limit.
static inline Vec clamped(float gain, float limit, Vec gate, Vec up) {
  gate = min(splat(limit), gate), up = max(splat(-limit), min(splat(limit), up));
  return divide(mul(add(up, splat(1.0f)), gate), add(splat(1.0f), exp(mul(splat(-gain), gate))));
}

// c tanh(y / c)
static inline Vec soft_cap(float c, Vec y) { return mul(splat(c), tanh(divide(y, splat(c)))); }

static inline float factor_of(const SpOp &op) { return op.factor != 0.0f ? op.factor : 1.0f; }

}  // namespace SP_NAMESPACE
