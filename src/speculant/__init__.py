"""Exact speculative decoding: the same text from the same model, faster."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speculant.config import EngineConfig
    from speculant.engine import (
        LLM,
        AsyncEngine,
        BeamSearchOutput,
        BeamSearchParams,
        BeamSearchSequence,
        ExplicitEncoderDecoderPrompt,
        StreamPiece,
        TextPrompt,
        TokensPrompt,
    )
    from speculant.errors import SpeculantError
    from speculant.metrics import Counter, Gauge, Histogram, Metric, Vector
    from speculant.params import SamplingParams
    from speculant.structured import StructuredOutputs, StructuredOutputs as StructuredOutputsParams
    from speculant.types import Client, CompletionOutput, DraftTree, Logprob, RequestOutput, Verdict
    from speculant.verification import Speculated, iterative_speculative_sample, speculate

__version__ = "0.1.0"

_HOMES = {
    "AsyncEngine": "speculant.engine.async_engine",
    **dict.fromkeys(("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"), "speculant.engine.llm"),
    **dict.fromkeys(("Counter", "Gauge", "Histogram", "Metric", "Vector"), "speculant.metrics"),
    **dict.fromkeys(("ExplicitEncoderDecoderPrompt", "TextPrompt", "TokensPrompt"), "speculant.engine.generation"),
    "LLM": "speculant.engine.llm",
    "StreamPiece": "speculant.engine.generation",
    "EngineConfig": "speculant.config",
    "SamplingParams": "speculant.params",
    "SpeculantError": "speculant.errors",
    "StructuredOutputs": "speculant.structured.spec",
    "StructuredOutputsParams": "speculant.structured.spec",
    "Speculated": "speculant.verification.execution",
    "Client": "speculant.types",
    "CompletionOutput": "speculant.types",
    "DraftTree": "speculant.types",
    "Logprob": "speculant.types",
    "RequestOutput": "speculant.types",
    "Verdict": "speculant.types",
    "iterative_speculative_sample": "speculant.verification.multi_draft",
    "speculate": "speculant.verification.execution",
}
_OTHER_NAMES = {"StructuredOutputsParams": "StructuredOutputs"}  # as vLLM calls it
__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "Client",
    "CompletionOutput",
    "Counter",
    "DraftTree",
    "EngineConfig",
    "ExplicitEncoderDecoderPrompt",
    "Gauge",
    "Histogram",
    "Logprob",
    "Metric",
    "RequestOutput",
    "SamplingParams",
    "SpeculantError",
    "Speculated",
    "StreamPiece",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
    "Verdict",
    "iterative_speculative_sample",
    "speculate",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import speculant` alone does not load torch."""
    if name in _HOMES:
        home = importlib.import_module(_HOMES[name])
        return getattr(home, _OTHER_NAMES.get(name, name))
    raise AttributeError(f"module 'speculant' has no attribute {name!r}")
