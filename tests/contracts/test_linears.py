"""Matrices beside a model's own: the same results on each backend, and the same bits in any batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculant.kernels import usable_sets
from speculant.models import CausalLM, linears_of, load_model
from tests.models import write_checkpoint

KERNELS = ["reference", *(["native"] if usable_sets() else [])]
COUNT, N, K = 3, 50, 37
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(params=KERNELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> CausalLM:
    return load_model(write_checkpoint(tmp_path / "model"), "float32", kernels=request.param).model


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("count", [1, COUNT])
def test_each_matrix_multiplies_its_own_rows(model: CausalLM, count: int, has_bias: bool) -> None:
    weight, bias, x = random(COUNT, N, K), random(COUNT, N), random(count, 5, K)
    found = linears_of(model, [*weight], bias if has_bias else None)(x)
    expected = torch.stack([x[i] @ weight[i].T + (bias[i] if has_bias else 0) for i in range(count)])
    torch.testing.assert_close(found, expected, **CLOSE)


def test_later_rows_change_no_earlier_result(model: CausalLM) -> None:
    """Results belong to the caller, and a call takes any number of rows, also more than before."""
    weight = random(1, N, K)
    linears, given = linears_of(model, [*weight]), [random(1, rows, K) for rows in (1, 40, 3, 200)]
    found = [linears(x) for x in given]
    for x, own in zip(given, found, strict=True):
        torch.testing.assert_close(own[0], x[0] @ weight[0].T, **CLOSE)


@pytest.mark.skipif("native" not in KERNELS, reason="no native kernels here")
def test_native_rows_do_not_depend_on_their_neighbours(tmp_path: Path) -> None:
    model = load_model(write_checkpoint(tmp_path / "model"), "float32", kernels="native").model
    linears, x = linears_of(model, [*random(COUNT, N, K)], random(COUNT, N)), random(COUNT, 23, K)
    together = linears(x)
    for row in range(x.shape[1]):
        assert torch.equal(linears(x[:, row : row + 1])[:, 0], together[:, row])
