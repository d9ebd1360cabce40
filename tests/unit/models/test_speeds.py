"""The time of a pass is estimated from the bytes of its weights and from speeds that are measured once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from speculant import files
from speculant.files import cache_folder
from speculant.kernels import Kernels, Type, likely_bytes, open_kernels, usable_sets
from speculant.models import ROUNDINGS, Experts, matrix_weights, pass_matrices
from speculant.models.native import speeds
from tests.descriptions import describe, describe_pair
from tests.exactness.test_native_decoder import make_decoder
from tests.stored_weights import ModuleWeights

native = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(speeds, "timed_bytes", lambda: 2**22)
    monkeypatch.setattr(speeds, "MATRIX_BYTES", 2**16)
    found = open_kernels(threads=1)
    assert found is not None
    return found


def test_a_pass_reads_its_matrices_once() -> None:
    for config in (describe(), describe(tie_embeddings=True), describe_pair()):
        assert sum(n * k for _, (n, k), _ in pass_matrices(config)) == matrix_weights(config)
    shares = {name: share for name, _, share in pass_matrices(describe(experts=Experts(8, 2, 40)))}
    assert {share for name, share in shares.items() if ".experts." in name} == {2 / 8}
    assert {share for name, share in shares.items() if ".experts." not in name} == {1.0}


@native
def test_seconds_add_up_bytes_of_each_type(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make_decoder(torch.bfloat16)
    seconds = {Type.BF16: 1.0, Type.Q8_0: 10.0}
    monkeypatch.setattr(speeds, "kept_speeds", lambda own, kinds: {kind: seconds[kind[0]] for kind in kinds})
    weights = ModuleWeights(decoder)
    plain, rounded = speeds.row_seconds(kernels, decoder.config, weights, torch.bfloat16, [None, ROUNDINGS["int8"]])
    shapes = [shape for _, shape, _ in pass_matrices(decoder.config)]
    assert plain == sum(likely_bytes(kernels, Type.BF16, *shape) for shape in shapes)
    assert rounded == 10 * sum(likely_bytes(kernels, Type.Q8_0, *shape) for shape in shapes)


@native
def test_speeds_are_measured_once(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each type of weights has one, and a damaged file is measured again."""
    kinds = [(type_, 512) for type_ in (Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_K, Type.Q6_K, Type.Q5_0)]
    found = speeds.kept_speeds(kernels, kinds)
    assert found.keys() == set(kinds)
    assert all(1e-13 < each < 1e-6 for each in found.values()), "seconds per byte"
    (file,) = cache_folder("costs").glob("*.speeds.json")
    monkeypatch.setattr(speeds, "measure_speeds", lambda own, kinds: ([7.0] * len(kinds), 1.0))
    assert speeds.kept_speeds(kernels, kinds) == found
    assert speeds.kept_speeds(kernels, [*kinds, (Type.Q5_1, 512)])[Type.Q5_1, 512] == 7.0
    assert len(json.loads(file.read_text())["seconds"]) == len(kinds) + 1
    for damaged in ("", "[]", "[" * 100_000, '{"seconds": {"F32 512": null}, "spread": 1}', '{"spread": 1}'):
        file.write_text(damaged)
        assert speeds.kept_speeds(kernels, kinds) == dict.fromkeys(kinds, 7.0)


@native
@pytest.mark.parametrize("spread", [1.1, 2.0])
def test_speeds_of_a_busy_machine_are_kept_a_while(
    kernels: Kernels, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft's weights are packed in the type that they choose, so the next starts choose the same."""
    monkeypatch.setattr(files, "STEADY", 1.5)
    kinds, measured = [(Type.F32, 512)], iter([(7.0, spread), (5.0, 1.0)])
    monkeypatch.setattr(speeds, "measure_speeds", lambda own, kinds: (lambda s, own: ([s], own))(*next(measured)))
    for _ in range(2):
        assert speeds.kept_speeds(kernels, kinds) == {kinds[0]: 7.0}
    (file,) = cache_folder("costs").glob("*.speeds.json")
    os.utime(file, (0, 0))
    assert speeds.kept_speeds(kernels, kinds) == {kinds[0]: 7.0 if spread < 1.5 else 5.0}
