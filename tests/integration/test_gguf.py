"""Engines of GGUF files write the text of the same weights in safetensors, with drafts of either format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.errors import ConfigError
from speculant.lab.bench import pair
from tests.commands import json_of as command
from tests.gguf_models import convert, decoded
from tests.heads import write_medusa
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Checkpoints

TEXTS = ["def read(path):", "class A:", "hello world " * 4]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.8, seed=3, max_tokens=24)


@pytest.fixture(scope="module")
def files(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The target in several kinds, and drafts."""
    folder = tmp_path_factory.mktemp("gguf")
    made = {kind: convert(checkpoints.target, folder / f"target-{kind}.gguf", kind) for kind in ("F32", "F16", "Q4_0")}
    made["near"] = convert(checkpoints.near, folder / "near.gguf", "Q8_0", parts=2)
    made["decoded"] = decoded(made["Q4_0"], checkpoints.target, folder / "decoded")
    made["medusa"] = Path(write_medusa(folder / "medusa", HIDDEN_SIZE, VOCAB_SIZE))
    return {name: str(path) for name, path in made.items()}


def texts(model: str, params: SamplingParams, **arguments: Any) -> list[str]:
    llm = LLM(model, **{"dtype": "float32", "seed": 0, **arguments})
    return [out.outputs[0].text for out in llm.generate(TEXTS, params)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_text_is_that_of_safetensors(
    checkpoints: Checkpoints, files: dict[str, str], params: SamplingParams, kernels: str
) -> None:
    assert texts(files["F32"], params, kernels=kernels) == texts(checkpoints.target, params, kernels=kernels)


def test_text_of_blocks_is_that_of_their_weights(files: dict[str, str]) -> None:
    assert texts(files["Q4_0"], GREEDY, kernels="reference") == texts(files["decoded"], GREEDY, kernels="reference")


@pytest.mark.covering(1)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
def test_drafts_change_no_text(
    checkpoints: Checkpoints, files: dict[str, str], kind: str, params: SamplingParams
) -> None:
    plain = texts(files[kind], params, use_speculative_decoding=False)
    for draft in (files["near"], checkpoints.near, files[kind]):
        assert texts(files[kind], params, draft_model=draft, spec_length=4) == plain
    head = {"method": "medusa", "model": files["medusa"]}
    assert texts(files[kind], params, speculative_config=head) == plain


def test_a_file_drafts_for_safetensors(checkpoints: Checkpoints, files: dict[str, str]) -> None:
    plain = texts(checkpoints.target, GREEDY, use_speculative_decoding=False)
    assert texts(checkpoints.target, GREEDY, draft_model=files["near"]) == plain


def test_blocks_of_a_target_are_not_rounded(files: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="quantised already"):
        LLM(files["Q4_0"], kernels="native", quantization="int8")


@pytest.mark.parametrize("rounded", ["int8", "int4"])
def test_blocks_of_a_draft_are_rounded(checkpoints: Checkpoints, files: dict[str, str], rounded: str) -> None:
    plain = texts(checkpoints.target, GREEDY, use_speculative_decoding=False)
    drafting = {"draft_model": files["Q4_0"], "draft_quantization": rounded, "kernels": "native"}
    assert texts(checkpoints.target, GREEDY, spec_length=4, **drafting) == plain


def test_commands_take_files(files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "_COST_SECONDS", 0.01)
    monkeypatch.setattr(pair, "SPEED_SECONDS", 0.01)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def read(path):\nimport os\n")
    flags = ("--dtype", "float32", "--kernels", "native")
    value = command(
        "generate", "Hi", "--model", files["Q4_0"], "--draft-model", files["near"], "--max-tokens", "8", *flags
    )
    assert value["usage"]["completion_tokens"] <= 8
    value = command("check-pair", files["Q4_0"], files["near"], "--prompts", str(prompts), "--tokens", "12", *flags)
    assert value["target"]["parameters"] == value["draft"]["parameters"] > 10_000
    assert list(value["precisions"]) == ["none"], "blocks are not rounded to other types"
    tables = str(tmp_path / "tables.safetensors")
    assert (
        command("train", "static", str(prompts), "--tokenizer", files["Q4_0"], "--out", tables)["vocab_size"]
        == VOCAB_SIZE
    )
    tokens = str(tmp_path / "tokens.json")
    assert command("train", "head-tokens", str(prompts), "--tokenizer", files["near"], "--out", tokens)["size"] > 0
    config = json.dumps({"method": "draft_model", "model": files["near"], "head_tokens": tokens})
    assert command("generate", "Hi", "--model", files["F16"], "--speculative-config", config, *flags)["text"]
