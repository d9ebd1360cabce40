"""Weights are stored in the faster way on this machine, or in the way that the user names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from speculant import LLM, SamplingParams, files
from speculant.errors import ConfigError
from speculant.files import Run, cache_folder
from speculant.kernels import Kernels, open_kernels, usable_sets
from speculant.models import (
    AS_STORED,
    AUTO,
    CODED,
    PLAIN,
    NativeBackend,
    Packing,
    choose,
    choose_backend,
    fastest_packing,
    gains_of,
    kept_gains,
    matrix_weights,
    narrow_weights,
    packing_of,
    time_packings,
)
from speculant.models.native import speeds
from tests.contracts.test_backends import CONFIG, SIZES
from tests.descriptions import describe
from tests.exactness.test_native_decoder import make_decoder
from tests.models import Checkpoints
from tests.stored_weights import ModuleWeights, StoredAs

native = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
CPU = torch.device("cpu")
LARGE = describe(**{**SIZES, "hidden_size": 4096, "intermediate_size": 8192, "vocab_size": 9000})


@pytest.fixture
def kernels() -> Kernels:
    found = open_kernels(threads=1)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("gains", "name"),
    [
        ({1: 1.28, 5: 1.1, 8: 1.0}, CODED),
        ({1: 1.28, 5: 1.1, 8: 0.98}, CODED),
        ({1: 1.28, 5: 1.1, 8: 0.9}, PLAIN),
        ({1: 1.01, 5: 1.1, 8: 1.2}, PLAIN),
    ],
)
def test_packing_is_chosen_where_it_pays(gains: dict[int, float], name: str) -> None:
    chosen = choose(gains)
    assert chosen.name == name
    assert f"{gains[1]:.2f} x at 1 row, {gains[5]:.2f} x at 5 rows" in str(chosen)


@native
def test_gains_are_measured_for_all_rows(kernels: Kernels) -> None:
    gains = gains_of(time_packings(kernels, [64, 300], 2**20))
    assert list(gains) == [*speeds.ROWS]
    assert all(0.01 < gain < 100 for gain in gains.values())


@native
def test_small_and_quantised_models_are_not_timed(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "kept_gains", None)  # a call fails
    assert fastest_packing(kernels, CONFIG, None).name == PLAIN
    assert "int8" in fastest_packing(kernels, LARGE, "int8").why


@native
def test_weights_in_blocks_are_not_timed(kernels: Kernels) -> None:
    """Only matrices in bfloat16 are stored in 12 bits; a mixed model counts these, and one of blocks has none."""
    decoder = make_decoder(torch.bfloat16)
    weights = StoredAs(ModuleWeights(decoder), {"down_proj.weight": "BF16", "": "Q8_0"})
    assert narrow_weights(decoder.config, weights) == 2 * 64 * 32
    assert narrow_weights(decoder.config, ModuleWeights(decoder)) == matrix_weights(decoder.config)
    blocks = StoredAs(ModuleWeights(decoder), {"": "Q8_0"})
    assert fastest_packing(kernels, decoder.config, None, blocks) == AS_STORED
    for dtype in (torch.float32, torch.bfloat16):
        chosen, _ = choose_backend("native", None, decoder.config, dtype, CPU, weights=blocks)
        assert str(packing_of(chosen)) == "plain (each matrix has the type of the file)"


@native
@pytest.mark.parametrize(("gain", "name"), [(1.3, CODED), (0.7, PLAIN)])
def test_auto_takes_the_faster_packing(monkeypatch: pytest.MonkeyPatch, gain: float, name: str) -> None:
    monkeypatch.setattr(speeds, "kept_gains", lambda *_: dict.fromkeys(speeds.ROWS, gain))
    backend, says = choose_backend("native", None, LARGE, torch.bfloat16, CPU)
    assert packing_of(backend).name == name
    assert f"{gain:.2f} x at 1 row" in packing_of(backend).why
    assert ("12 bits" in says) == (name == CODED)


@native
@pytest.mark.parametrize(("typical", "is_steady"), [(1.1, True), (2.0, False)])
def test_gains_are_kept_a_while_if_the_machine_was_busy(
    kernels: Kernels, typical: float, is_steady: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> speeds.Times:
        runs = [Run(each, 1.0) for each in (1.0, typical, typical)]
        return {(name, rows): {64: runs} for name in (PLAIN, CODED) for rows in speeds.ROWS}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(files, "STEADY", 1.5)
    monkeypatch.setattr(speeds, "time_packings", measured)
    gains = kept_gains(kernels, [64], 2**20)
    assert gains == dict.fromkeys(speeds.ROWS, 1.0)
    [file] = cache_folder("costs").glob("*")
    monkeypatch.setattr(speeds, "time_packings", lambda *_: {})
    assert kept_gains(kernels, [64], 2**20) == gains, "a start soon after takes the same packing"
    os.utime(file, (0, 0))
    if is_steady:
        assert kept_gains(kernels, [64], 2**20) == gains
        file.write_text('{"gains": {"1": -1}, "spread": 1}')
    with pytest.raises(KeyError):  # they are measured again
        kept_gains(kernels, [64], 2**20)


@native
def test_the_named_packing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "kept_gains", None)
    for name in (PLAIN, CODED):
        backend, _ = choose_backend("auto", None, LARGE, torch.bfloat16, CPU, name)
        assert packing_of(backend) == Packing(name)


@native
def test_float32_weights_are_plain() -> None:
    backend, says = choose_backend("native", None, LARGE, torch.float32, CPU, AUTO)
    assert isinstance(backend, NativeBackend)
    assert packing_of(backend).name == PLAIN
    assert "12 bits" not in says
    with pytest.raises(ConfigError, match="12bit.* float32 weights on the native kernels"):
        choose_backend("native", None, LARGE, torch.float32, CPU, CODED)


def test_reference_kernels_have_only_plain_weights() -> None:
    assert packing_of(choose_backend("reference", None, CONFIG, torch.bfloat16, CPU)[0]) == Packing()
    with pytest.raises(ConfigError, match="12bit.* on the reference kernels"):
        choose_backend("reference", None, CONFIG, torch.bfloat16, CPU, CODED)


@native
def test_engine_says_how_weights_are_stored(checkpoints: Checkpoints) -> None:
    texts = []
    for wanted, stored in ((PLAIN, "plain"), (CODED, "in 12 bits"), (AUTO, "plain (")):
        llm = LLM(checkpoints.target, checkpoints.near, dtype="bfloat16", kernels="native", weight_packing=wanted)
        assert llm.weight_packing.startswith(stored)
        texts.append(llm.generate("import os", SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].token_ids)
    assert texts[0] == texts[1] == texts[2]


def test_an_unknown_packing_is_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="weight_packing='12bits' is unknown") as caught:
        LLM(checkpoints.target, weight_packing="12bits")
    assert "12bit" in caught.value.fix
