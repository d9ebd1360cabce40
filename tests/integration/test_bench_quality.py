"""`speculant bench quality`, as it is typed, with tiny random models and the embedded target."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from speculant.errors import ConfigError, PairError, RequestError
from speculant.kernels import usable_sets
from speculant.lab.bench import ChunkScores, Compared, QualityText
from tests.commands import invoke, json_of
from tests.gguf_models import convert
from tests.models import ALPHABET, Checkpoints, write_checkpoint

TEXT = "Each line of this text is read by two models, one after the other. " * 3


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


_invoke, _json = partial(invoke, "bench", "quality"), partial(json_of, "bench", "quality")


def test_the_report_names_both_models(checkpoints: Checkpoints, path: str) -> None:
    arguments = (checkpoints.target, checkpoints.near, "--text", path, "--context", "16")
    shown, value = _invoke(*arguments).stdout, _json(*arguments)
    lines = shown.splitlines()
    assert lines[0].startswith("A: target, float32, kernels: ")
    assert lines[1].startswith("B: near, float32, kernels: ")
    assert lines[1].endswith(", 1.00 of A's")
    assert lines[2] == f"{path}: 12 chunks of 16 tokens, 84 scored positions"
    for name, figures in (
        ("mean KL(A || B)", value["kl"]),
        ("same likeliest token", value["top_1"]),
        ("perplexity of A", value["perplexity"]["reference"]),
        ("perplexity of B / A", value["perplexity"]["ratio"]),
    ):
        [line] = [line for line in lines if line.startswith(f"{name}  ")]
        interval = [f"{figures['low']:.5g}", "to", f"{figures['high']:.5g}"]
        assert line.split()[-5:] == [f"{figures['mean']:.5g}", f"{figures['error']:.2g}", *interval]
    assert f"maximum {value['kl']['max']:.3g}" in lines[-1]
    assert "\x1b[" not in shown


@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
def test_more_bits_are_nearer(tmp_path: Path) -> None:
    """The embedded target's own texts are code."""
    code = tmp_path / "code.py"
    code.write_text(Path(subprocess.__file__).read_text(encoding="utf-8")[:8000], encoding="utf-8")
    small = ("demo", "--text", str(code), "--context", "64", "--tokens", "320")
    found = {kind: _json(*small, "--quantization-b", kind) for kind in ("int8", "int4")}
    itself, rounded_keys = _json(*small), _json(*small, "--kv-cache-dtype-b", "int8")
    assert itself["kl"]["max"] == 0
    assert 0 < found["int8"]["kl"]["high"] < found["int4"]["kl"]["low"]
    assert found["int8"]["top_1"]["mean"] > found["int4"]["top_1"]["mean"]
    sizes = [value["judged"]["weight_bytes"] for value in (itself, found["int8"], found["int4"])]
    assert sizes[0] > sizes[1] > sizes[2]
    assert "int4 weights" in found["int4"]["judged"]["kernels"]
    assert 0 < rounded_keys["kl"]["high"] < found["int4"]["kl"]["low"]
    assert rounded_keys["judged"]["kernels"].endswith("keys and values in int8")


def test_a_file_is_compared_with_its_folder(checkpoints: Checkpoints, path: str, tmp_path: Path) -> None:
    files = {kind: str(convert(checkpoints.target, tmp_path / f"{kind}.gguf", kind)) for kind in ("F32", "Q8_0")}
    sides = ("--text", path, "--context", "32", "--dtype-a", "float64", "--kernels-a", "reference")
    same, rounded = (_json(checkpoints.target, file, *sides, "--dtype-b", "float32") for file in files.values())
    assert same["kl"]["max"] < 1e-9 < rounded["kl"]["mean"] < 0.01
    assert (same["reference"]["dtype"], same["judged"]["dtype"]) == ("float64", "float32")
    assert same["judged"]["parameters"] == same["reference"]["parameters"]


def test_one_chunk_has_no_interval(checkpoints: Checkpoints, path: str) -> None:
    arguments = (checkpoints.target, checkpoints.near, "--text", path, "--context", "200")
    assert _json(*arguments)["kl"]["error"] is None
    assert "one chunk gives no intervals" in _invoke(*arguments).stdout


def test_what_cannot_be_compared_is_an_error(checkpoints: Checkpoints, path: str, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", tokens=[*reversed(ALPHABET)])
    for error, problem, arguments in (
        (ConfigError, "no text was given", ()),
        (RequestError, "can't be read", ("--text", str(tmp_path / "missing.txt"))),
        (RequestError, "has 201 tokens, and a chunk has 512", ("--text", path)),
        (ConfigError, "dtype='float8'", ("--text", path, "--dtype-b", "float8")),
        (ConfigError, "quantization='int3'", ("--text", path, "--context", "32", "--quantization-b", "int3")),
        (ConfigError, "kv_cache_dtype='fp8' is not supported", ("--text", path, "--kv-cache-dtype-b", "fp8")),
        (PairError, "different vocabularies", (other, "--text", path, "--context", "32")),
    ):
        with pytest.raises(error, match=problem):
            _invoke(checkpoints.target, *arguments)


def test_ctrl_c_shows_the_figures_so_far(checkpoints: Checkpoints, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = Compared.scores

    def stopped(self: Compared, text: QualityText) -> Iterator[ChunkScores]:
        for number, each in enumerate(scores(self, text)):
            if number == 3:
                raise KeyboardInterrupt
            yield each

    arguments = (checkpoints.target, checkpoints.near, "--text", path, "--context", "16")
    monkeypatch.setattr(Compared, "scores", stopped)
    assert "3 of 12 chunks of 16 tokens, 21 scored positions" in _invoke(*arguments, code=130).stdout
    value = json.loads(_invoke(*arguments, "--json", code=130).stdout)
    monkeypatch.undo()
    assert (value["text"]["chunks"], value["text"]["chunks_of_text"]) == (3, 12)
    assert value["kl"] == _json(*arguments, "--tokens", "48")["kl"]
