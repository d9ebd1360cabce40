"""`speculant train head-tokens`, from text files to a draft model with a short head."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from speculant import LLM, SamplingParams
from speculant.cli import app
from speculant.config import EngineConfig
from speculant.drafting import read_head_tokens, save_head_tokens
from speculant.errors import ConfigError
from speculant.kernels import usable_sets
from speculant.lab.bench import HeadSize, best_size, drafting, overlaps, sizes_of
from tests.heads import write_eagle
from tests.models import END, HIDDEN_SIZE, VOCAB_SIZE, Checkpoints, checkpoints
from tests.unit.lab.training.runs import command

__all__ = ["checkpoints"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(seed=4, max_tokens=40, ignore_eos=True),
]
PROMPTS = ["class A:", "import os"]
ENGINES = [{"dtype": "float64"}, *([{"dtype": "float32", "kernels": "native"}] if usable_sets() else [])]


train = partial(command, "head-tokens")


@pytest.mark.covering(1)
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: str(engine["dtype"]))
@pytest.mark.parametrize(
    "config",
    [{}, {"method": "cascade"}, pytest.param({"tree": [2, 1]}, marks=pytest.mark.slow)],
    ids=["chain", "cascade", "tree"],
)
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


def head_size(size: int, speed: float) -> HeadSize:
    return HeadSize(size, 1.0, 0.5, 0.001, 0.001, speed)


def test_fastest_size_is_best_and_must_gain_something() -> None:
    whole = head_size(64, 100.0)
    assert best_size([whole, head_size(32, 110.0), head_size(16, 120.0), head_size(8, 90.0)]).size == 16
    assert best_size([whole, head_size(32, 101.0)]).size == 64, "the gain may be chance"


@pytest.mark.parametrize(
    ("vocab_size", "least", "expected"),
    [(264, 1, [264, 132, 66, 33]), (8192, 300, [8192, 4096, 2048, 1024, 512]), (16, 1, [16])],
)
def test_sizes_are_halves_of_the_vocabulary(vocab_size: int, least: int, expected: list[int]) -> None:
    assert sizes_of(vocab_size, least) == expected


def test_overlap_is_that_of_the_renormalised_draft() -> None:
    p, q, order = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.0, 0.1, 0.5]), torch.tensor([1, 3, 0, 2])
    expected = [0.0, 0.4, 0.1 + 0.4, 0.1 + 0.1 + 0.4]  # q_2 = [0, 0, 0, 1], q_3 = [4/9, 0, 0, 5/9]
    assert overlaps(p, q, order, [1, 2, 3, 4]) == pytest.approx(expected)


@pytest.mark.parametrize("method", [None, pytest.param("eagle", marks=pytest.mark.slow)])
def test_acceptance_is_that_of_drafts_with_a_short_head(
    checkpoints: Checkpoints, tmp_path: Path, method: str | None
) -> None:
    """Acceptance by size, computed from drafts of the whole head, is measured again with a head of each size."""
    draft = checkpoints.near if method is None else write_eagle(tmp_path / "head", HIDDEN_SIZE, VOCAB_SIZE)
    spec = {} if method is None else {"method": method}
    config = EngineConfig(
        checkpoints.target, draft, speculative_config=spec, dtype="float64", draft_quantization="none"
    )
    target, order = drafting.load_target(config), torch.randperm(VOCAB_SIZE).tolist()
    text = torch.randint(0, 256, (24,)).tolist()
    found, sample = drafting._acceptance(config, target, [text], order, [VOCAB_SIZE, 40])
    for tokens, own in zip(((), order[:40]), found, strict=True):
        drafter = drafting._drafter(config, target, tokens, len(text))
        with torch.inference_mode():
            assert sample.measure(None, drafter, []).acceptance == pytest.approx(own, abs=1e-9)
    assert found[0] > found[1] > 0


def test_head_that_is_limited_already_is_not_measured(checkpoints: Checkpoints, tmp_path: Path) -> None:
    head = write_eagle(tmp_path / "head", HIDDEN_SIZE, VOCAB_SIZE)
    save_head_tokens(tmp_path / "head" / "head_tokens.json", [1, 2, 3])
    command = ["--target", checkpoints.target, "--draft", head, "--method", "eagle", "--out", tmp_path / "head.json"]
    with pytest.raises(ConfigError, match="limits the head"):
        train(texts_in(tmp_path), *command)


def texts_in(folder: Path) -> Path:
    file = folder / "outputs.jsonl"
    sequence = [65 + place % 30 for place in range(40)]
    file.write_text(f"{sequence}\n{sequence[5:]}\n")
    return file


def test_size_for_a_draft_is_the_fastest(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "LEAST_GAIN", -1.0)  # the fastest of all, however little it gains
    file = tmp_path / "head.json"
    found = train(texts_in(tmp_path), "--target", checkpoints.target, "--draft", checkpoints.near, "--out", file)
    assert [each["size"] for each in found["sizes"]] == [264, 132, 66, 33]
    assert found["size"] == max(found["sizes"], key=lambda each: each["speed"])["size"]
    for wider, shorter in itertools.pairwise(found["sizes"]):
        assert wider["coverage"] >= shorter["coverage"]
        assert wider["token_s"] > 0
    assert found["written"] == (found["size"] < VOCAB_SIZE) == file.exists()
    if found["written"]:
        assert len(read_head_tokens(file)) == found["size"]


@pytest.mark.parametrize(("short_s", "written"), [(1.0, True), (3.0, False)])
def test_head_that_is_not_faster_is_not_written(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_s: float, written: bool
) -> None:
    sizes = [head_size(VOCAB_SIZE, 1 / 2.0), head_size(40, 1 / short_s)]
    monkeypatch.setattr("speculant.lab.bench.measure_sizes", lambda *arguments: sizes)
    file = tmp_path / "head.json"
    command = ["--target", checkpoints.target, "--draft", checkpoints.near, "--out", str(file)]
    run = CliRunner().invoke(app, ["train", "head-tokens", str(texts_in(tmp_path)), *command], catch_exceptions=False)
    assert run.exit_code == 0
    assert file.exists() == written
    assert ("leave head_tokens out" in run.output) != written
    assert "best" in run.output
    assert str(VOCAB_SIZE) in run.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--method", "eagle"], "names no draft"), (["--draft", "demo", "--size", "9"], "leave out")],
)
def test_options_that_exclude_each_other_are_refused(
    checkpoints: Checkpoints, tmp_path: Path, arguments: list[str], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        train(texts_in(tmp_path), "--target", checkpoints.target, "--out", tmp_path / "head.json", *arguments)
    assert says in f"{caught.value.problem} {caught.value.fix}"


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
