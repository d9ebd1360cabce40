"""Engines whose target's first layers draft on the target's keys and values, alone and within other methods."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.files import costs_folder
from speculant.kernels import usable_sets
from speculant.lengths import measuring, read_curves
from tests.examples import examples
from tests.models import Checkpoints, Shape, write_checkpoint

ENGINES = [{"dtype": "float64"}, *([{"dtype": "bfloat16", "kernels": "native"}] if usable_sets() else [])]
EXIT = {"method": "early_exit", "layers": 3}
WAYS: dict[str, dict[str, Any]] = {
    "alone": EXIT,
    "tree": {**EXIT, "tree": [2, 1, 1]},
    "merge": {"method": "merge", "members": ["suffix", EXIT]},
    "fallback": {"method": "fallback", "members": ["prompt_lookup", EXIT]},
    "inner": {"method": "cascade", "inner": EXIT},
}
PROMPTS = ["def f(a, b):", "import os, re", "def f(a, b): return", "x"]
NUM_TOKENS = examples(24, least=14)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(seed=5, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(seed=6, max_tokens=NUM_TOKENS, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("early") / "target", Shape(layers=4))


@pytest.mark.covering(1)
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: str(engine["dtype"]))
@pytest.mark.parametrize("backend", ["paged", "slotted"])
@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
@pytest.mark.parametrize("way", WAYS)
def test_no_text_changes_in_any_engine(
    checkpoints: Checkpoints, target: str, way: str, policy: str, backend: str, engine: dict[str, Any]
) -> None:
    common = {**engine, "max_num_seqs": 3, "kv_cache_backend": backend, "max_num_batched_tokens": 16}
    plain = LLM(target, use_speculative_decoding=False, **common).generate(PROMPTS, PARAMS)
    draft = checkpoints.near if way == "inner" else None
    llm = LLM(target, draft, speculative_config={**WAYS[way], "draft_length": policy}, **common)
    drafted = llm.generate(PROMPTS, PARAMS)
    assert [out.outputs[0].token_ids for out in drafted] == [out.outputs[0].token_ids for out in plain]
    assert llm.engine.metrics.drafter_errors == 0
    if policy == "fixed":
        assert sum(out.metrics.speculative_decoding.num_accepted_draft_tokens for out in drafted) > 10


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: str(engine["dtype"]))
def test_costs_of_its_drafts_are_measured(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any]
) -> None:
    """Sequences that are measured have keys and values in the target's cache, and leave none there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "is_steady", lambda rounds: True)  # however busy the machine is
    llm = LLM(target, speculative_config={**EXIT, "draft_length": "adaptive"}, **engine)
    (file,) = costs_folder().glob("*.json")
    kept = read_curves(file)
    assert kept is not None
    assert kept["drafts"]["early_exit"]["1"], "no draft was measured"
    assert kept["readings"] == {}, "it has no text to read"
    assert llm.engine.free_kv_tokens() == LLM(target, use_speculative_decoding=False, **engine).engine.free_kv_tokens()


def test_all_memory_is_the_target_s(target: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "speculant"):
        LLM(target, dtype="float64", speculative_config={**EXIT, "draft_length": "fixed"})
    caches = [record.getMessage() for record in caplog.records if "cache: " in record.getMessage()]
    assert len(caches) == 1, "the drafter has a cache"
