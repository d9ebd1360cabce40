"""Plain and speculative decoding of the same prompts: the runs and their figures."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speculant.metrics import SpeculationMetrics

if TYPE_CHECKING:
    from speculant.engine.generation import StreamPiece
    from speculant.engine.llm import LLM
    from speculant.params import SamplingParams


@dataclass(frozen=True)
class Run:
    """One prompt decoded once.

    seconds: the engine's time, without that of the display. sampled_passes: see `TimingMetrics`.
    """

    text: str
    token_ids: list[int]
    seconds: float
    target_passes: int
    sampled_passes: int
    speculation: SpeculationMetrics


@dataclass(frozen=True)
class RunPair:
    """One prompt decoded both ways."""

    prompt: str
    plain: Run
    speculative: Run

    @property
    def identical(self) -> bool:
        """Whether both gave the same tokens."""
        return self.plain.token_ids == self.speculative.token_ids


@dataclass(frozen=True)
class Total:
    """The sums over several runs of one kind."""

    tokens: int
    seconds: float
    target_passes: int
    sampled_passes: int
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, prompts included in the time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per target pass that sampled them."""
        return self.tokens / self.sampled_passes if self.sampled_passes else 0.0


def pool(runs: Sequence[Run]) -> Total:
    """Add runs up."""
    speculation = SpeculationMetrics()
    for run in runs:
        speculation.add(run.speculation)
    return Total(
        tokens=sum(len(run.token_ids) for run in runs),
        seconds=sum(run.seconds for run in runs),
        target_passes=sum(run.target_passes for run in runs),
        sampled_passes=sum(run.sampled_passes for run in runs),
        speculation=speculation,
    )


def run(llm: LLM, prompt: str, params: SamplingParams, show: Callable[[StreamPiece], None]) -> Run:
    """Decode one prompt and pass each piece to `show` when it arrives.

    Each run has a cache salt of its own. So none finds its prompt in the cache, or looks its drafts up in the text of
    an earlier run, which would make the second run of a prompt faster than the first.
    """
    stream, seconds, text = llm.stream(prompt, params, cache_salt=uuid.uuid4().hex), 0.0, ""
    while True:
        started = time.perf_counter()
        piece = next(stream, None)
        seconds += time.perf_counter() - started
        assert piece is not None, "a stream ends with its output"
        text += piece.text
        show(piece)
        if piece.output is not None:
            metrics = piece.output.metrics
            tokens = piece.output.outputs[0].token_ids
            passes = metrics.timing.target_passes, metrics.timing.sampled_passes
            return Run(text, tokens, seconds, *passes, metrics.speculative_decoding)


def summary(pairs: Sequence[RunPair]) -> dict[str, Any]:
    """Return the figures over all prompts."""
    plain, fast = pool([pair.plain for pair in pairs]), pool([pair.speculative for pair in pairs])
    return {
        "prompts": len(pairs),
        "tokens": fast.tokens,
        "plain_tokens_per_s": plain.tokens_per_s,
        "speculative_tokens_per_s": fast.tokens_per_s,
        "speedup": fast.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else 0.0,
        "plain_target_passes": plain.target_passes,
        "speculative_target_passes": fast.target_passes,
        "tokens_per_pass": fast.tokens_per_pass,
        "mean_acceptance_length": fast.speculation.mean_acceptance_length,
        "acceptance_rate": fast.speculation.acceptance_rate,
        "draft_acceptance_rate": fast.speculation.draft_acceptance_rate,
        "identical_outputs": sum(pair.identical for pair in pairs),
    }
