"""Layers with experts on the native kernels: which experts rows use, and every pair's result, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from speculant.kernels import Activation, Code, Flag, Kernels, Op, Pass, Type, Weight
from speculant.models import gating, linear, make_op
from tests.native import SETS, needs_kernels, on, random, rows_of

pytestmark = needs_kernels
TYPES = [Type.F32, Type.F16, Type.BF16, Type.BF12, Type.INT8, Type.Q4_0, Type.Q6_K, Type.MXFP4, Type.FP8]
COUNT, USED, HIDDEN, SIZE = 7, 3, 256, 100
MOST_PAIRS = 300  # of one expert, more than a block
BIT_BY_BIT = torch.int32


@functools.cache
def matrices(isa: str, type_: Type, interleaved: bool) -> tuple[Weight, ...]:
    """Return a matrix [SIZE, HIDDEN] of each expert, or two that are interleaved."""
    seeds = [(expert, COUNT + expert) if interleaved else (expert,) for expert in range(COUNT)]
    made = (tuple(rows_of(type_, random(SIZE, HIDDEN, seed=seed, scale=0.1)) for seed in own) for own in seeds)
    return tuple(on(isa).pack(type_, *own) for own in made)


def run(kernels: Kernels, rows: int, *ops: Op) -> None:
    kernels.run((Op * len(ops))(*ops), Pass(rows=rows))


def routed(scores: Tensor, flags: Flag = Flag.RENORMALISE) -> Op:
    return make_op(Code.ROUTE, n=scores.shape[1], source=scores, used=USED, flags=flags)


def multiplied(weights: Sequence[Weight], addresses: Tensor, x: Tensor, out: Tensor, bias: Tensor, flags: Flag) -> Op:
    one = weights[0]
    return make_op(
        Code.EXPERTS, one.type, n=one.n, k=one.k, weight=addresses, source=x, out=out, bias=bias, used=USED,
        flags=flags, activation=Activation.SILU if flags & Flag.GATED else Activation.NONE,
    )  # fmt: skip


def pairs_of(scores: Tensor) -> list[tuple[int, int]]:
    """Return the pairs of a row and an expert in the kernels' order."""
    used = scores.sort(dim=1, descending=True, stable=True).indices[:, :USED]
    pairs = [(expert, row) for row, own in enumerate(used.tolist()) for expert in own]
    return [(row, expert) for expert, row in sorted(pairs)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 9, MOST_PAIRS])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("isa", SETS)
def test_each_pair_is_its_row_times_its_expert(isa: str, type_: Type, gated: bool, rows: int, threads: int) -> None:
    """The bits are those of a linear layer over the row alone; the scores let all rows share an expert."""
    torch.manual_seed(rows)
    kernels, weights = on(isa, threads), matrices(isa, type_, gated)
    x, scores = torch.randn(rows, HIDDEN), torch.randn(rows, COUNT)
    scores[:, 4] += 5
    bias, out = torch.randn(COUNT, 2 if gated else 1, SIZE), torch.full((rows * USED, SIZE), torch.nan)
    addresses = torch.tensor([weight.address for weight in weights])
    flags = Flag.GATHER | (Flag.GATED if gated else Flag.NONE)
    run(kernels, rows, routed(scores), multiplied(weights, addresses, x, out, bias, flags))
    activation = Activation.SILU if gated else Activation.NONE
    alone = torch.empty(SIZE)
    for place, (row, expert) in enumerate(pairs_of(scores)):
        flag = Flag.GATED if gated else Flag.NONE
        run(kernels, 1, linear(weights[expert], x[row], alone, bias[expert], flag, activation=activation))
        assert torch.equal(alone.view(BIT_BY_BIT), out[place].view(BIT_BY_BIT)), (row, expert)


@pytest.mark.parametrize("isa", SETS)
def test_without_gathering_each_pair_has_a_row(isa: str) -> None:
    torch.manual_seed(0)
    kernels, weights, rows = on(isa), matrices(isa, Type.BF16, False), 5
    x, scores, out = torch.randn(rows * USED, HIDDEN), torch.randn(rows, COUNT), torch.empty(rows * USED, SIZE)
    bias, alone = torch.randn(COUNT, SIZE), torch.empty(SIZE)
    addresses = torch.tensor([weight.address for weight in weights])
    run(kernels, rows, routed(scores), multiplied(weights, addresses, x, out, bias, Flag.NONE))
    for place, (_, expert) in enumerate(pairs_of(scores)):
        run(kernels, 1, linear(weights[expert], x[place], alone, bias[expert]))
        assert torch.equal(alone, out[place])


@pytest.mark.parametrize("flags", [Flag.NONE, Flag.RENORMALISE])
@pytest.mark.parametrize("isa", SETS)
def test_results_are_weighted_by_a_softmax(isa: str, flags: Flag) -> None:
    torch.manual_seed(0)
    rows, width = 33, 1037
    scores, results, added = 2 * torch.randn(rows, COUNT), torch.randn(rows * USED, width), torch.randn(rows, width)
    out, kernels = added.clone(), on(isa)
    combined = make_op(Code.COMBINE, n=width, source=results, out=out, used=USED, flags=Flag.ADD, factor=0.5)
    run(kernels, rows, routed(scores, flags), combined)
    probs = scores.double().softmax(dim=1)
    expected = torch.zeros(rows, width, dtype=torch.float64)
    for place, (row, expert) in enumerate(pairs_of(scores)):
        whole = probs[row].topk(USED).values.sum() if flags else 1.0
        expected[row] += probs[row, expert] / whole * results[place]
    torch.testing.assert_close(out.double(), added + 0.5 * expected, atol=1e-5, rtol=1e-5)
    alone = added[7:8].clone()
    own = torch.stack([results[place] for place, (row, _) in enumerate(pairs_of(scores)) if row == 7])
    last = make_op(Code.COMBINE, n=width, source=own, out=alone, used=USED, flags=Flag.ADD, factor=0.5)
    run(kernels, 1, routed(scores[7:8], flags), last)
    assert torch.equal(alone[0], out[7]), "a row's bits depend on the other rows"


@pytest.mark.parametrize("flags", [Flag.WEIGHTS, Flag.WEIGHTS | Flag.RENORMALISE])
@pytest.mark.parametrize("isa", SETS)
def test_favoured_experts_are_used_with_their_own_weights(isa: str, flags: Flag) -> None:
    torch.manual_seed(0)
    scores, bias, out = torch.rand(33, COUNT), torch.randn(COUNT), torch.zeros(33, 5)
    used = (scores + bias).sort(dim=1, descending=True, stable=True).indices[:, :USED]
    weights = scores.gather(1, used)
    weights = weights / (weights.sum(1, keepdim=True) + 1e-6) if flags & Flag.RENORMALISE else weights
    results = torch.randn(33 * USED, 5)
    combined = make_op(Code.COMBINE, n=5, source=results, out=out, used=USED)
    route = make_op(Code.ROUTE, n=COUNT, source=scores, used=USED, flags=flags, bias=bias, factor=1.5)
    run(on(isa), 33, route, combined)
    expected = torch.zeros(33, 5)
    for place, (row, expert) in enumerate(pairs_of(scores + bias)):
        expected[row] += 1.5 * weights[row, used[row] == expert] * results[place]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 100])
@pytest.mark.parametrize("isa", SETS)
def test_a_row_is_gated_by_one_number(isa: str, n: int) -> None:
    torch.manual_seed(0)
    gates, x = torch.randn(9), torch.randn(9, n)
    out = x.clone()
    run(on(isa), 9, gating(gates[:, None], out, n, Activation.SIGMOID, Flag.EACH))
    torch.testing.assert_close(out, x * gates[:, None].sigmoid())


@pytest.mark.parametrize("isa", SETS)
def test_the_lowest_index_wins_among_equal_scores(isa: str) -> None:
    scores, out = torch.tensor([[1.0, 2, 2, 1, 2, 1, 2]]), torch.zeros(1, 3)
    results = torch.eye(3)  # pairs are in the order of the experts
    combined = make_op(Code.COMBINE, n=3, source=results, out=out, used=USED)
    run(on(isa), 1, routed(scores, Flag.NONE), combined)
    share = float(scores.softmax(dim=1)[0, 1])
    torch.testing.assert_close(out, torch.full((1, 3), share))
    weights, chosen = matrices(isa, Type.F32, False), torch.empty(USED, SIZE)
    x, bias, alone = torch.randn(1, HIDDEN), torch.zeros(COUNT, SIZE), torch.empty(SIZE)
    addresses = torch.tensor([weight.address for weight in weights])
    run(on(isa), 1, routed(scores), multiplied(weights, addresses, x, chosen, bias, Flag.GATHER))
    for place, expert in enumerate((1, 2, 4)):
        run(on(isa), 1, linear(weights[expert], x, alone))
        assert torch.equal(chosen[place], alone)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("isa", SETS)
def test_scores_that_are_not_finite_give_results_that_are_not(isa: str, value: float) -> None:
    """No row uses an expert twice, so every pair has a place; other rows are as before."""
    torch.manual_seed(0)
    scores, results = torch.randn(4, COUNT), torch.randn(4 * USED, 5)
    scores[2] = value
    out = torch.zeros(4, 5)
    combined = make_op(Code.COMBINE, n=5, source=results, out=out, used=USED)
    run(on(isa), 4, routed(scores), combined)
    assert out.isfinite().all(dim=1).tolist() == [True, True, False, True]
