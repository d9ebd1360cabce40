"""Logarithms, powers, sines and cosines that have the same bits on every machine, for tables of a model.

torch's own depend on the instructions of the processor. These consist of sums, products and quotients in float64, which
IEEE 754 defines, and are accurate to a few units in its last place.
"""

from __future__ import annotations

import torch
from torch import Tensor

LN2_HIGH, LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
HALF_TURNS = [float.fromhex(part) for part in ("0x1.921fb54p+0", "0x1.10b4610p-30", "0x1.a62633145c06ep-58")]
"""Pi / 2 in parts: a whole number below 2^25 times either of the first two is exact."""
# The minimax polynomials of fdlibm, from the highest power down; those of e^x are Taylor's.
_EXP = [1 / 6227020800, 1 / 479001600, 1 / 39916800, 1 / 3628800, 1 / 362880, 1 / 40320, 1 / 5040, 1 / 720]
_EXP += [1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0]
_LOG = [1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01]
_LOG += [2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01]
_SIN = [1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06]
_SIN += [-1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01]
_COS = [-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07]
_COS += [2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02]
_ONE_BITS, _ROOT_HALF_BITS = 1023, 0x3FE6A09E667F3BCD
PART = 2**13  # numbers that are computed together: they stay in the processor's caches


def _polynomial(coefficients: list[float], x: Tensor) -> Tensor:
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def exponential(x: Tensor) -> Tensor:
    """Return e^x in float64; x is first limited to -708 .. 709."""
    x = x.double().clamp(-708, 709)
    n = (x / (LN2_HIGH + LN2_LOW)).round()
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    return _polynomial(_EXP, r) * ((n.nan_to_num().long() + _ONE_BITS) << 52).view(torch.float64)


def logarithm(x: Tensor) -> Tensor:
    """Return log x in float64; other numbers than normal positive ones give torch's result."""
    wide = x.double()
    usual = (wide >= torch.finfo(torch.float64).tiny) & (wide < torch.inf)
    bits = torch.where(usual, wide, 1.0).view(torch.int64)
    n = (bits - _ROOT_HALF_BITS) >> 52
    f = (bits - (n << 52)).view(torch.float64) - 1
    s = f / (f + 2)
    z, half = s * s, f * f * 0.5
    power = n.double()
    found = power * LN2_HIGH - ((half - (s * (half + z * _polynomial(_LOG, z)) + power * LN2_LOW)) - f)
    return torch.where(usual, found, wide.log())


def log_of(x: float) -> float:
    """Return log x."""
    return float(logarithm(torch.tensor(x, dtype=torch.float64)))


def powers(base: Tensor | float, exponents: Tensor) -> Tensor:
    """Return base^exponent in float64, for bases above 0."""
    base = torch.as_tensor(base, dtype=torch.float64, device=exponents.device)
    return exponential(exponents.double() * logarithm(base))


def cosines_and_sines(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines in float32 of angles up to 2^25."""
    out = torch.empty(2, angles.numel(), dtype=torch.float32, device=angles.device)
    for some, part in zip(torch.split(angles.reshape(-1), PART), torch.split(out, PART, dim=1), strict=True):
        part[0], part[1] = _cosine_and_sine(some.double())
    cosines, sines = out.view(2, *angles.shape)
    return cosines, sines


def _cosine_and_sine(x: Tensor) -> tuple[Tensor, Tensor]:
    n = (x / (HALF_TURNS[0] + HALF_TURNS[1])).round()
    r = x
    for part in HALF_TURNS:
        r = r - n * part
    z = r * r
    cosine = 1 - z * 0.5 + z * z * _polynomial(_COS, z)
    sine = r + r * z * _polynomial(_SIN, z)
    quarter = n.long() & 3
    odd = (quarter & 1).bool()
    return (
        torch.where(odd, sine, cosine) * (1 - ((quarter + 1) & 2)),
        torch.where(odd, cosine, sine) * (1 - (quarter & 2)),
    )
