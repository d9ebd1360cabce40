"""Exact speculative decoding: the same text from the same model, faster."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import lazy_loader  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from speculant.config import EngineConfig as EngineConfig
    from speculant.engine import (
        LLM as LLM,
        AsyncEngine as AsyncEngine,
        BeamSearchOutput as BeamSearchOutput,
        BeamSearchParams as BeamSearchParams,
        BeamSearchSequence as BeamSearchSequence,
        ExplicitEncoderDecoderPrompt as ExplicitEncoderDecoderPrompt,
        StreamPiece as StreamPiece,
        TextPrompt as TextPrompt,
        TokensPrompt as TokensPrompt,
    )
    from speculant.errors import SpeculantError as SpeculantError
    from speculant.metrics import (
        Counter as Counter,
        Gauge as Gauge,
        Histogram as Histogram,
        Metric as Metric,
        Vector as Vector,
    )
    from speculant.params import SamplingParams as SamplingParams
    from speculant.structured import (
        StructuredOutputs as StructuredOutputs,
        StructuredOutputsParams as StructuredOutputsParams,
    )
    from speculant.types import (
        Client as Client,
        CompletionOutput as CompletionOutput,
        DraftTree as DraftTree,
        Logprob as Logprob,
        RequestOutput as RequestOutput,
        Verdict as Verdict,
    )
    from speculant.verification import (
        Speculated as Speculated,
        iterative_speculative_sample as iterative_speculative_sample,
        speculate as speculate,
    )

__version__ = "0.1.0"
# A name is imported when it is first used, so that `import speculant` alone does not load torch.
_attached, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "config": ["EngineConfig"],
        "engine": [
            *("LLM", "AsyncEngine", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"),
            *("ExplicitEncoderDecoderPrompt", "StreamPiece", "TextPrompt", "TokensPrompt"),
        ],
        "errors": ["SpeculantError"],
        "metrics": ["Counter", "Gauge", "Histogram", "Metric", "Vector"],
        "params": ["SamplingParams"],
        "structured": ["StructuredOutputs", "StructuredOutputsParams"],
        "types": ["Client", "CompletionOutput", "DraftTree", "Logprob", "RequestOutput", "Verdict"],
        "verification": ["Speculated", "iterative_speculative_sample", "speculate"],
    },
)
_ABSENT = {  # classes of vLLM that scripts import, and what takes their place
    "AsyncEngineArgs": "give its arguments to AsyncEngine",
    "AsyncLLM": "use AsyncEngine, whose `stream` and `generate` answer requests",
    "AsyncLLMEngine": "use AsyncEngine, whose `stream` and `generate` answer requests",
    "EngineArgs": "give its arguments to LLM",
    "GuidedDecodingParams": "use StructuredOutputsParams",
    "KVTransferConfig": "keys and values stay in this process",
    "LLMEngine": "use LLM.generate, LLM.stream or AsyncEngine",
    "LoRARequest": "merge the adapter into the weights and load those",
    "PoolingParams": "models here complete text, and do nothing else",
    "RequestOutputKind": "use LLM.stream or AsyncEngine.stream for single tokens",
}


def __getattr__(name: str) -> object:
    if name not in _ABSENT:
        from speculant.models import without_collections

        with without_collections():
            return _attached(name)
    says = f"speculant has no {name}: {_ABSENT[name]} (docs/vllm.md)"
    # `from speculant import name` looks the name up first, and would replace the message of an AttributeError.
    if sys._getframe(1).f_code.co_name == "_handle_fromlist":
        raise ImportError(says, name=__name__)
    raise AttributeError(says, name=name, obj=sys.modules[__name__])
