"""Heads that were trained for fewer positions than their target has also draft beyond these."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.kernels.native import usable_sets
from speculant.models.source import resolve_source
from speculant.types import RequestOutput

KERNELS = ["reference", *(["native"] if usable_sets() else [])]
KINDS = ["eagle", "eagle3"]
POSITIONS = 64
PROMPT = "def read(path):\n    with open(path) as file:\n"
LONG = SamplingParams(temperature=0, max_tokens=360, ignore_eos=True)


def head_of(kind: str, positions: int | None, folder: Path) -> str:
    """Copy an embedded head with a number of positions in its config.json."""
    shutil.copytree(resolve_source("demo", f"heads/{kind}"), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}), encoding="utf-8")
    return str(folder)


def make(kind: str, head: str, kernels: str, tree: Any = None, **arguments: Any) -> LLM:
    speculative = {"method": kind, "model": head, "num_speculative_tokens": 3, "draft_length": "fixed", "tree": tree}
    return LLM("demo", dtype="float32", kernels=kernels, speculative_config=speculative, **arguments)


def accepted(results: Sequence[RequestOutput]) -> int:
    return sum(each.metrics.speculative_decoding.num_accepted_draft_tokens for each in results)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_few_positions_drafts_to_the_end(kind: str, kernels: str, tmp_path: Path) -> None:
    """It accepts nearly as much of a text of 400 tokens as the same head without a bound."""
    (expected,) = LLM("demo", dtype="float32", kernels=kernels, use_speculative_decoding=False).generate(PROMPT, LONG)
    whole = make(kind, "demo", kernels).generate(PROMPT, LONG)
    short = make(kind, head_of(kind, POSITIONS, tmp_path / kind), kernels).generate(PROMPT, LONG)
    for (result,) in (whole, short):
        assert result.outputs[0].token_ids == expected.outputs[0].token_ids
    assert accepted(short) > 0.9 * accepted(whole) > 100
    (result,) = short
    assert result.metrics.speculative_decoding.num_accepted_draft_tokens > 2 * POSITIONS


@pytest.mark.parametrize("kind", KINDS)
def test_positions_given_as_null_are_the_target_s(kind: str, tmp_path: Path) -> None:
    llm = make(kind, head_of(kind, None, tmp_path / kind), "reference")
    assert accepted(llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40))) > 0


@pytest.mark.parametrize("tree", [None, [2, 1]], ids=["chain", "tree"])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_few_positions_with_prefix_hits_and_preemption(
    kind: str, kernels: str, tree: list[int] | None, tmp_path: Path
) -> None:
    head = head_of(kind, 24, tmp_path / kind)
    prompts = [PROMPT * 6 + tail for tail in ("    return file", "    data = file", "    for line in file:")]
    params = [
        SamplingParams(temperature=0 if index != 1 else 0.8, seed=index, max_tokens=140, ignore_eos=True)
        for index in range(3)
    ]
    plain = LLM("demo", dtype="float32", kernels=kernels, use_speculative_decoding=False)
    expected = [each.outputs[0].token_ids for each in plain.generate(prompts, params)]
    llm = make(kind, head, kernels, tree, kv_memory="3MiB", block_size=8, max_model_len=256)
    for _ in range(2):
        results = llm.generate(prompts, params)
        assert [each.outputs[0].token_ids for each in results] == expected
        assert accepted(results) > 40
    assert llm.engine.metrics.preemptions > 0
    assert results[0].metrics.cached_tokens > 24
    llm.engine.check()
