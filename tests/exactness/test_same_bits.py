"""Small models of integers have the same logits and texts on every instruction set, here and on other processors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from speculant.kernels import Code, Flag
from speculant.models import ROUNDINGS
from tests import same_bits
from tests.exactness.selection import slow_but
from tests.exactness.test_native_decoder import VARIANTS, make_native
from tests.native import SETS, needs_kernels

pytestmark = needs_kernels
# Two roundings, blocks of a file, experts, caps, a state and int8 keys
QUICK = (
    "llama int8, keys in int8",
    "llama Q6_K",
    "gemma2 int4",
    "qwen3_moe int4",
    "qwen3_5_text int4",
    same_bits.DRAWS,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where models are written, once for all sets."""
    return tmp_path_factory.mktemp("models")


def computed(folder: Path, isa: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the digests of models, in a process of their own. With the first set, torch uses all instructions."""
    environment = {**os.environ, "SPECULANT_ISA": isa, "OMP_NUM_THREADS": "1"}
    if isa != SETS[0]:
        environment["ATEN_CPU_CAPABILITY"] = "default"
    command = [sys.executable, "-m", "tests.same_bits", str(folder), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["set"] == isa
    models: dict[str, Any] = found["models"]
    return models


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("some", slow_but(["few"], ["few", "all"]))
def test_a_set_has_the_recorded_digests(folder: Path, some: str, isa: str) -> None:
    names = QUICK if some == "few" else same_bits.NAMES
    recorded = json.loads(same_bits.RECORDED.read_text(encoding="utf-8"))
    assert {*recorded} == {*same_bits.NAMES}, "record the digests: python -m tests.same_bits FOLDER --record"
    assert computed(folder, isa, names) == {name: recorded[name] for name in names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_floats_that_decide_are_summed_alike(dtype: torch.dtype, quantization: str | None) -> None:
    """Routers stay floats beside integers; in a model of floats, a set may sum all matrices in its own way."""
    model = make_native(quantization=ROUNDINGS.get(quantization or ""), dtype=dtype, **VARIANTS["experts"])
    scores = [op for op in model.program.ops if op.code == Code.LINEAR and op.n == 6]
    assert len(scores) == model.num_layers
    assert all(bool(op.flags & Flag.ALIKE) == (quantization is not None) for op in scores)
