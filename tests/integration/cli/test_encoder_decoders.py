"""Commands with an encoder-decoder model, as they are typed: prompts are sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.errors import ConfigError, RequestError
from speculant.kernels import usable_sets
from speculant.lab.quantize import quantize
from speculant.models import CheckpointFiles, QuantizedBlocks, read_plain
from tests.commands import invoke
from tests.encoder_decoders import make_t5, write_t5

TEXT = "hello world"
SHORT = ("--temperature", "0", "--max-tokens", "6", "--max-model-len", "64")
NATIVE = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a small model."""
    return write_t5(tmp_path_factory.mktemp("t5") / "t5", make_t5().float())


def run(*arguments: str) -> str:
    return invoke(*arguments).stdout


def document(*arguments: str) -> dict[str, Any]:
    return dict(json.loads(run(*arguments, "--json")))


@pytest.mark.parametrize("decoder_prompt", [None, "ab"])
def test_the_prompt_of_generate_is_the_source(t5: str, decoder_prompt: str | None) -> None:
    flags = () if decoder_prompt is None else ("--decoder-prompt", decoder_prompt)
    made = document("generate", TEXT, "--model", t5, *SHORT, *flags)
    given: Any = TEXT if decoder_prompt is None else {"encoder_prompt": TEXT, "decoder_prompt": decoder_prompt}
    (known,) = LLM(t5, max_model_len=64).generate([given], SamplingParams(temperature=0, max_tokens=6))
    assert (made["text"], made["token_ids"]) == (known.outputs[0].text, known.outputs[0].token_ids)
    assert made["usage"]["prompt_tokens"] == len(TEXT) + 1 + 1 + len(decoder_prompt or "")
    assert made["metrics"]["timing"]["encode_s"] > 0
    assert run("generate", TEXT, "--model", t5, *SHORT, *flags) == made["text"] + "\n"


def test_a_beginning_of_the_output_needs_an_encoder(t5: str) -> None:
    with pytest.raises(RequestError, match="--decoder-prompt is for encoder-decoder models"):
        run("generate", TEXT, "--model", "demo", "--decoder-prompt", "x")
    with pytest.raises(RequestError, match="--decoder-prompt has no meaning with --chat"):
        run("generate", TEXT, "--model", t5, "--decoder-prompt", "x", "--chat")


def test_conversations_in_the_terminal_are_refused(t5: str) -> None:
    for command in (["generate", TEXT, "--chat"], ["chat"]):
        with pytest.raises(RequestError, match="an encoder-decoder, which has no conversations"):
            run(*command, "--model", t5, *SHORT)


@pytest.mark.parametrize("benchmark", ["throughput", "latency"])
def test_a_benchmark_tells_the_encoder_s_time(t5: str, benchmark: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\nthe same words\n", encoding="utf-8")
    flags = ("--model", t5, *SHORT, "--rounds", "1", "--prompts", str(prompts))
    found = document("bench", benchmark, *flags)["cases"][0]
    assert found["prompt_tokens"] == {"min": 6, "median": 10.5, "max": 15}, "with the end token of each source"
    assert found["sources"] is True
    assert all(figures["encode_s"]["median"] > 0 for figures in found["runs"].values())
    shown = run("bench", benchmark, *flags)
    assert "2 sources (" in shown
    assert "encoder (ms)" in shown
    demo = document("bench", benchmark, "--model", "demo", *SHORT, "--rounds", "1", "--prompts", str(prompts))
    assert "encode_s" not in demo["cases"][0]["runs"]["plain"]


def test_a_source_that_is_too_long_for_a_benchmark(t5: str) -> None:
    longest = (
        "bench",
        "throughput",
        "--model",
        t5,
        *SHORT,
        "--prompts",
        "random",
        "--num-prompts",
        "1",
        "--rounds",
        "1",
    )
    run(*longest, "--prompt-length", "64")
    with pytest.raises(RequestError, match="a source has 65 tokens, and at most 64 are encoded in one pass"):
        run(*longest, "--prompt-length", "65")


def test_quality_along_a_text_needs_no_encoder(t5: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a text of some length", encoding="utf-8")
    with pytest.raises(RequestError, match="t5 is an encoder-decoder: its distributions depend on a source"):
        run("bench", "quality", t5, "--text", str(text), "--context", "8")


def test_doctor_tells_what_a_source_takes(t5: str) -> None:
    found = document("doctor", t5)
    assert (found["model"]["layers"], found["model"]["encoder_layers"]) == (2, 2)
    assert 0 < found["kernels"]["read_to_encode_mib"] < found["kernels"]["weights_mib"]
    demo = document("doctor", "demo")
    assert "encoder_layers" not in demo["model"]
    assert "read_to_encode_mib" not in demo["kernels"]


@NATIVE
@pytest.mark.parametrize(("type_", "most"), [("int4", 0.1), ("int8", 0.01)])
def test_a_rounded_folder_holds_the_model(t5: str, tmp_path: Path, type_: str, most: float) -> None:
    shown = run("quantize", t5, str(tmp_path / "rounded"), "--type", type_)
    assert "bench quality" not in shown
    before, after = CheckpointFiles.open(Path(t5)), CheckpointFiles.open(tmp_path / "rounded")
    for name in before.weights.names():
        old, stored = read_plain(before.weights, name), after.weights.read(name)
        if old.dim() == 2 and "layers." in name and "distances" not in name:
            assert isinstance(stored, QuantizedBlocks), name
            assert 0 < float((read_plain(after.weights, name).float() - old).norm() / old.norm()) < most, name
        else:
            assert not isinstance(stored, QuantizedBlocks), name
    own = document("generate", TEXT, "--model", str(tmp_path / "rounded"), *SHORT)
    assert len(own["token_ids"]) > 0


@NATIVE
def test_weights_in_float64_are_rounded_too(tmp_path: Path) -> None:
    wide = Path(write_t5(tmp_path / "wide", make_t5()))
    assert quantize(wide, tmp_path / "rounded", "int8", lambda name: None) > 0
    with pytest.raises(ConfigError, match="exists"):
        quantize(wide, tmp_path / "rounded", "int8", lambda name: None)
