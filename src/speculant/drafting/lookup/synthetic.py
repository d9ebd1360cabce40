"""Drafts with a chosen acceptance rate, for benchmarks.

The drafter records a prompt's continuation the first time it is generated and replays it afterwards,
with wrong tokens at positions that a keyed coin selects. Run each prompt once before measuring. A prompt
without a recorded continuation gets no draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from speculant.drafting.base import DrafterContext, Method, StatelessDrafter, read_options
from speculant.errors import ConfigError
from speculant.sampling import mix
from speculant.types import DraftTree, Request

METHOD = Method(default_length=5, learns=True, on_request=False, varies=True)


@dataclass(frozen=True)
class SyntheticOptions:
    """acceptance_rate: the probability with which each draft token is the remembered one."""

    acceptance_rate: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance_rate <= 1:
            raise ConfigError(
                f"acceptance_rate={self.acceptance_rate} is not a probability", "use a number from 0 to 1."
            )


class SyntheticDrafter(StatelessDrafter):
    """Replays recorded continuations, with wrong tokens at a chosen rate."""

    def __init__(self, options: SyntheticOptions, vocab_size: int) -> None:
        self._rate = options.acceptance_rate
        self._vocab_size = vocab_size
        self._scripts: dict[tuple[tuple[int, ...], ...], list[int]] = {}  # by source and prompt

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        return [self._propose_one(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _propose_one(self, request: Request, limit: int) -> DraftTree:
        script = self._scripts.get((request.source, request.prompt), [])
        ahead = script[request.num_output : request.num_output + limit]
        return DraftTree.chain([self._spoil(token, request.num_output + i) for i, token in enumerate(ahead)])

    def _spoil(self, token: int, position: int) -> int:
        keep = mix(position) < self._rate * 2**64
        return token if keep else (token + 1) % self._vocab_size

    @override
    def end(self, request: Request) -> None:
        """Remember the longest continuation of each prompt."""
        key = request.source, request.prompt
        if request.finished and request.num_output >= len(self._scripts.get(key, [])):
            self._scripts[key] = request.output


def build(context: DrafterContext) -> SyntheticDrafter:
    """Make the drafter; it needs no model."""
    return SyntheticDrafter(read_options(context, SyntheticOptions), context.target.vocab_size)
