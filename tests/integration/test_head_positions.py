"""A head with fewer positions than its target drafts beyond them."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.kernels import usable_sets
from speculant.models import resolve_source
from speculant.types import RequestOutput

REFERENCE_SLOW = [pytest.param("reference", marks=pytest.mark.slow), *(["native"] if usable_sets() else [])]
KINDS = ["eagle", "eagle3"]
POSITIONS = 32
PROMPT = "def read(path):\n    with open(path) as file:\n"
LONG = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
PROMPTS = [PROMPT * 6 + tail for tail in ("    return file", "    data = file", "    for line in file:")]
PARAMS = [
    SamplingParams(temperature=0 if index != 1 else 0.8, seed=index, max_tokens=60, ignore_eos=True)
    for index in range(3)
]


def head_of(kind: str, positions: int | None, folder: Path) -> str:
    """Copy an embedded head with a number of positions in its config.json."""
    shutil.copytree(resolve_source("demo", f"heads/{kind}"), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}), encoding="utf-8")
    return str(folder)


def make(kind: str, head: str, kernels: str, tree: Any = None, **arguments: Any) -> LLM:
    speculative = {"method": kind, "model": head, "num_speculative_tokens": 3, "draft_length": "fixed", "tree": tree}
    same = {"kernels": kernels, "draft_quantization": "none"}  # all heads of a test have one type
    return LLM("demo", dtype="float32", speculative_config=speculative, **same, **arguments)


@functools.cache
def plain_texts(kernels: str) -> tuple[list[int], list[list[int]]]:
    """Return the text of PROMPT and those of PROMPTS, without speculation."""
    llm = LLM("demo", dtype="float32", kernels=kernels, use_speculative_decoding=False)
    (long,), several = llm.generate(PROMPT, LONG), llm.generate(PROMPTS, PARAMS)
    return long.outputs[0].token_ids, [each.outputs[0].token_ids for each in several]


def accepted(results: Sequence[RequestOutput]) -> int:
    return sum(each.metrics.speculative_decoding.num_accepted_draft_tokens for each in results)


@pytest.mark.parametrize("kernels", REFERENCE_SLOW)
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_few_positions_drafts_to_the_end(kind: str, kernels: str, tmp_path: Path) -> None:
    """It accepts nearly as much of a text of 200 tokens as the same head without a bound."""
    expected, _ = plain_texts(kernels)
    whole = make(kind, "demo", kernels).generate(PROMPT, LONG)
    short = make(kind, head_of(kind, POSITIONS, tmp_path / kind), kernels).generate(PROMPT, LONG)
    for (result,) in (whole, short):
        assert result.outputs[0].token_ids == expected
    assert accepted(short) > 0.9 * accepted(whole) > 50
    (result,) = short
    assert result.metrics.speculative_decoding.num_accepted_draft_tokens > 2 * POSITIONS


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", ["reference", *(["native"] if usable_sets() else [])])
@pytest.mark.parametrize("kind", KINDS)
def test_positions_given_as_null_are_the_target_s(kind: str, kernels: str, tmp_path: Path) -> None:
    llm = make(kind, head_of(kind, None, tmp_path / kind), kernels)
    assert accepted(llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40))) > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("tree", [None, [2, 1]], ids=["chain", "tree"])
@pytest.mark.parametrize("kernels", REFERENCE_SLOW)
@pytest.mark.parametrize("kind", KINDS)
def test_few_positions_with_prefix_hits_and_preemption(
    kind: str, kernels: str, tree: list[int] | None, tmp_path: Path
) -> None:
    head = head_of(kind, 24, tmp_path / kind)
    _, expected = plain_texts(kernels)
    llm = make(kind, head, kernels, tree, kv_memory="2MiB", block_size=8, max_model_len=192)
    for _ in range(2):
        results = llm.generate(PROMPTS, PARAMS)
        assert [each.outputs[0].token_ids for each in results] == expected
        assert accepted(results) > 20
    assert llm.engine.metrics.preemptions > 0
    assert results[0].metrics.cached_tokens > 24
    llm.engine.check()
