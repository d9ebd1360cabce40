"""All instruction sets compute the same bits in each stage of a pass over weights of integers, and of drawing tokens.

tests/exactness/test_same_bits.py compares whole models, also with sets that this processor lacks.
"""

from __future__ import annotations

import pytest
import torch

from tests.native import SETS, needs_kernels, on, same
from tests.stage_bits import ALIKE

pytestmark = needs_kernels


@pytest.mark.parametrize("stage", ALIKE)
@torch.inference_mode()
def test_sets_compute_the_same_bits(stage: str) -> None:
    expected = [*ALIKE[stage](on(SETS[-1]))]
    assert expected
    for isa in SETS[:-1]:
        for place, (found, own) in enumerate(zip(ALIKE[stage](on(isa)), expected, strict=True)):
            assert same(found, own), f"{isa} differs from {SETS[-1]} in result {place}"
