"""Several drafters in order: per sequence and step, the first one with a draft proposes it.

Where a model follows and the draft-length policy is a judge (arms.py), a looked-up draft must also be worth more than
one that the model would draw.

A drafter is asked for the sequences that those before it have nothing for, all in one call. Verification stays exact:
whether a drafter has a draft does not depend on the tokens that it would draw, and a draft without probs is a point
mass at each node under every rule. A sampled request uses a ratio rule if any of the drafters emits probs.

Memory: that of the drafters. Cost: that of the drafters that are asked, and at most 10 microseconds per step and per
sequence and drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.checks import Proposals
from speculant.drafting.combine.composite import CompositeDrafter, Member, build_members
from speculant.drafting.judge import Arms
from speculant.types import DraftTree, Request

METHOD = Method(default_length=8, accepts_model=True, default=True, varies=True)


@dataclass(frozen=True)
class Options:
    """members: methods in order, by name or as mappings with `method` and its options.

    None = every method that looks drafts up in text, then the preferred draft-model method if a model is named.
    """

    members: Any = None


class FallbackDrafter(CompositeDrafter):
    """See the module's docstring."""

    def __init__(self, members: Sequence[Member], vocab_size: int, arms: Arms | None = None) -> None:
        super().__init__(members, vocab_size)
        models = [member.drafter.needs.own_cache for member in members]
        follows = [any(models[place + 1 :]) for place in range(len(models))]
        self._stages = list(zip(self.members, models, follows, strict=True))
        self._arms = arms or Arms()
        self.needs = replace(self.needs, asks_judge=any(follows))

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        drafts: Proposals = {}
        waiting = list(zip(requests, limits, strict=True))
        for member, is_model, model_follows in self._stages:
            bounded = [(each, self._arms.bound(each, limit)) for each, limit in waiting] if is_model else waiting
            found = self.ask(member, bounded)
            for request, _ in waiting:
                draft = found.get(request.seq_id)
                if draft is not None and (not model_follows or self._arms.take(request, draft)):
                    drafts[request.seq_id] = draft
            waiting = [(request, limit) for request, limit in waiting if request.seq_id not in drafts]
        return [drafts.get(request.seq_id, DraftTree.empty()) for request in requests]


def build(context: DrafterContext) -> FallbackDrafter:
    """Build the members."""
    members = build_members(context, read_options(context, Options).members)
    return FallbackDrafter(members, context.vocab_size, context.arms)
