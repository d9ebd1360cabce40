"""Several drafters in order: per sequence and step, the first one with a draft proposes it.

A drafter is asked for the sequences that those before it have nothing for, all in one call. Verification stays exact:
whether a drafter has a draft does not depend on the tokens that it would draw, and a draft without probs is a point
mass at each node under every rule. A sampled request uses a ratio rule if any of the drafters emits probs.

Memory: that of the drafters. Cost: that of the drafters that are asked, and at most 10 microseconds per step and per
sequence and drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.checks import Proposals
from speculant.drafting.members import CompositeDrafter, build_members
from speculant.types import DraftTree, Request

METHOD = Method(default_length=8, accepts_model=True, preferred_without_model=True)


@dataclass(frozen=True)
class Options:
    """members: methods in order, by name or as mappings with `method` and its options.

    None = every method that looks drafts up in text, then the preferred draft-model method if a model is named.
    """

    members: Any = None


class FallbackDrafter(CompositeDrafter):
    """See the module's docstring."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        drafts: Proposals = {}
        waiting = list(zip(requests, limits, strict=True))
        for member in self.members:
            drafts |= self.ask(member, waiting)
            waiting = [(request, limit) for request, limit in waiting if request.seq_id not in drafts]
        return [drafts.get(request.seq_id, DraftTree.empty()) for request in requests]


def build(context: DrafterContext) -> FallbackDrafter:
    """Build the members."""
    return FallbackDrafter(build_members(context, read_options(context, Options).members), context.vocab_size)
