"""Engines over the small checkpoints, made once for each configuration and left idle by every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from speculant import LLM
from tests.models import EXACT_DTYPE, Checkpoints, checkpoints

__all__ = ["checkpoints", "llm_of", "made"]

MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="session")
def made() -> dict[str, LLM]:
    """Return the engines that exist, by their arguments."""
    return {}


@pytest.fixture
def llm_of(made: dict[str, LLM], checkpoints: Checkpoints) -> Iterator[MakeLLM]:
    """Make an engine over the usual target, in a type that keeps texts exact; `draft` names another checkpoint."""
    used: list[LLM] = []

    def make(draft: str | None = None, **arguments: Any) -> LLM:
        if draft is not None:
            arguments |= {"draft_model": getattr(checkpoints, draft), "draft_quantization": "none"}
        arguments = {"model": checkpoints.target, "dtype": EXACT_DTYPE, **arguments}
        key = repr(sorted(arguments.items()))
        if key not in made:
            made[key] = LLM(**arguments)
        used.append(made[key])
        return made[key]

    yield make
    for llm in used:
        assert not llm.engine.has_unfinished(), "a test left requests behind"
        llm.engine.check()
        for cache in (llm.engine._context.cache, *llm.engine._drafters.caches):
            assert cache.free_tokens() == cache.num_blocks * cache.block_size, "a test left cache in use"
