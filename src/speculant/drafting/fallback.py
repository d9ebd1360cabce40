"""Several drafters in order: per sequence and step, the first one with a draft proposes it.

If a drafter with a model comes later and the draft-length policy selects (`Selector`), a looked-up draft
must also be worth more than the model's draft.

Each drafter proposes for the sequences that have no draft yet, in one call. Verification stays exact: whether a drafter
has a draft does not depend on the tokens that it would draw, and a draft without probs is a point mass at each node
under every rule. A sampled request uses a ratio rule if any of the drafters emits probs.

Memory: the drafters'. Cost: the drafters that are called, and at most 10 microseconds per step and per sequence and
drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from speculant.drafting.base import DrafterContext, Method, Selector, read_options
from speculant.drafting.composite import CompositeDrafter, Proposals, SubDrafter, build_sub_drafters
from speculant.types import DraftTree, Request

METHOD = Method(default_length=8, accepts_model=True, varies=True)


@dataclass(frozen=True)
class FallbackOptions:
    """members: the sub-drafters in order, by name or as mappings with `method` and its options.

    None = every method that looks drafts up in text, then the one that drafts with a model if a model is named.
    """

    members: Any = None


class FallbackDrafter(CompositeDrafter):
    """See the module's docstring."""

    def __init__(self, sub_drafters: Sequence[SubDrafter], vocab_size: int) -> None:
        super().__init__(sub_drafters, vocab_size)
        needs = [each.drafter.needs for each in sub_drafters]
        models = [each.own_cache or each.reads.target_cache for each in needs]
        follows = [any(models[place + 1 :]) for place in range(len(models))]
        self._stages = list(zip(self.guarded, models, follows, strict=True))
        self.needs = replace(self.needs, selects=any(follows))

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        return self.propose_selected(requests, limits, None)

    @override
    def propose_selected(
        self, requests: Sequence[Request], limits: Sequence[int], selector: Selector | None
    ) -> list[DraftTree]:
        drafts, empty, waiting = Proposals(), DraftTree.empty(), list(zip(requests, limits, strict=True))
        for guarded, is_model, model_follows in self._stages:
            if not waiting:
                break
            bounded = waiting
            if is_model and selector is not None:
                bounded = [(request, _bound(selector, request, limit)) for request, limit in waiting]
            found, left = self.propose_with(guarded, bounded, selector), list[tuple[Request, int]]()
            for pair in waiting:
                draft = found.get(pair[0].seq_id)
                if draft is not None and (not model_follows or selector is None or _accepts(selector, pair[0], draft)):
                    drafts[pair[0].seq_id] = draft
                else:
                    left.append(pair)
            waiting = left
        return [drafts.get(request.seq_id, empty) for request in requests]


def _accepts(selector: Selector, request: Request, tree: DraftTree) -> bool:
    """Whether a draft is selected although a drafter with a model remains."""
    if tree.scores is None or tree.probs is not None or request.search is not None:
        return True
    return selector.prefers(request, tree.scores, tree.parent_list)


def _bound(selector: Selector, request: Request, limit: int) -> int:
    """Return a limit cut to the nodes that a model should draw."""
    longest = selector.longest_unscored(request)
    return limit if longest is None else min(limit, longest)


def build(context: DrafterContext) -> FallbackDrafter:
    """Build the sub-drafters."""
    sub_drafters = build_sub_drafters(context, read_options(context, FallbackOptions).members)
    return FallbackDrafter(sub_drafters, context.target.vocab_size)
