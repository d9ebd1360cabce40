"""`speculant train head-tokens`, from text files to a draft model with a short head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from speculant import LLM, SamplingParams
from speculant.cli.main import app
from speculant.drafting.model.head_tokens import read_head_tokens, save_head_tokens
from speculant.errors import ConfigError
from speculant.kernels.native import usable_sets
from tests.models import END, VOCAB_SIZE, Checkpoints, checkpoints

__all__ = ["checkpoints"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(seed=4, max_tokens=40, ignore_eos=True),
]
PROMPTS = ["class A:", "import os"]
ENGINES = [{"dtype": "float64"}, *([{"dtype": "float32", "kernels": "native"}] if usable_sets() else [])]


def train(*arguments: object) -> dict[str, Any]:
    command = ["train", "head-tokens", *map(str, arguments), "--json"]
    run = CliRunner().invoke(app, command, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    counted: dict[str, Any] = json.loads(run.stdout)
    return counted


@pytest.mark.covering(1)
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: str(engine["dtype"]))
@pytest.mark.parametrize("config", [{}, {"method": "cascade"}, {"tree": [2, 1]}], ids=["chain", "cascade", "tree"])
def test_short_head_is_trained_and_changes_no_text(
    checkpoints: Checkpoints, tmp_path: Path, engine: dict[str, Any], config: dict[str, Any]
) -> None:
    plain = LLM(checkpoints.target, use_speculative_decoding=False, **engine).generate(PROMPTS, PARAMS)
    outputs = tmp_path / "outputs.jsonl"
    outputs.write_text("".join(json.dumps(out.outputs[0].token_ids) + "\n" for out in plain))
    file = tmp_path / "head.json"
    counted = train(outputs, "--tokenizer", checkpoints.target, "--out", file)
    assert counted["size"] == VOCAB_SIZE // 4
    assert 0 < counted["coverage"] <= 1
    options = {"head_tokens": str(file), "draft_length": "fixed", **config}
    llm = LLM(checkpoints.target, checkpoints.near, speculative_config=options, **engine)
    drafted = llm.generate(PROMPTS, PARAMS)
    assert [out.outputs[0].token_ids for out in drafted] == [out.outputs[0].token_ids for out in plain]
    assert sum(out.metrics.speculative_decoding.num_accepted_draft_tokens for out in drafted) > 10


def test_short_head_drafts_its_own_tokens_alone(checkpoints: Checkpoints, tmp_path: Path) -> None:
    save_head_tokens(tmp_path / "head.json", [7, 5])
    config = {"head_tokens": str(tmp_path / "head.json"), "verification": "match"}
    llm = LLM(checkpoints.target, checkpoints.near, dtype="float64", speculative_config=config)
    (out,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=40, logit_bias={5: 100.0}, ignore_eos=True))
    assert set(out.outputs[0].token_ids) == {5}
    assert out.metrics.speculative_decoding.acceptance_rate == 1.0
    (out,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=40, logit_bias={9: 100.0}, ignore_eos=True))
    assert set(out.outputs[0].token_ids) == {9}
    assert out.metrics.speculative_decoding.num_accepted_draft_tokens == 0


def test_most_frequent_tokens_and_ends_are_kept(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[9, 9, 9, 4, 4, 8]\n[4, 9]\n")
    file = tmp_path / "head.json"
    found = train(tmp_path / "a.jsonl", "--tokenizer", checkpoints.target, "--out", file, "--size", 3)
    assert (found["size"], found["tokens"], found["coverage"]) == (3, 8, 7 / 8)
    assert read_head_tokens(file) == (4, 9, END)


@pytest.mark.parametrize(
    "content", [None, "", "[]", "{}", '{"head_tokens": []}', '{"head_tokens": [1.5]}', '{"head_tokens": [-1]}']
)
def test_file_without_tokens_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "head.json").write_text(content)
    with pytest.raises(ConfigError, match=r"head\.json"):
        read_head_tokens(tmp_path / "head.json")


def test_tokens_beyond_the_vocabulary_are_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"[1, {10**30}]\n")
    with pytest.raises(ConfigError, match="vocabulary"):
        train(tmp_path / "a.jsonl", "--tokenizer", checkpoints.target, "--out", tmp_path / "head.json")


def test_home_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no file of head tokens"):
        read_head_tokens("~nobody-of-this-name/head.json")


def test_option_that_names_no_file_is_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="names no file"):
        LLM(checkpoints.target, checkpoints.near, speculative_config={"head_tokens": 7})


def test_files_without_tokens_are_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match="no tokens"):
        train(tmp_path / "a.txt", "--tokenizer", checkpoints.target, "--out", tmp_path / "head.json")
    assert not (tmp_path / "head.json").exists()
