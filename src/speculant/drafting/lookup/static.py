"""Unigram and bigram tables of a corpus, with their probabilities as q (arXiv 2211.17192, section 4.2).

`speculant train static FILES --tokenizer MODEL --out FILE.safetensors` counts and smooths them (tables.py).
Each token of a chain is drawn from the row of the token before it, with the request's sampling parameters applied as
for a draft model: temperature, filters, penalties, bias and constraint. A greedy request drafts the likeliest token.

Memory: 16 bytes for each token of the vocabulary and 12 for each continuation that the file keeps, shared by all
requests. Cost: a distribution and a draw over V tokens for each drafted token, at V = 8192 110 microseconds, 145 with
top_p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from speculant.drafting.base import DrafterContext, DrafterNeeds, Method, StatelessDrafter, read_options
from speculant.drafting.growth import draw_chains, new_chains
from speculant.drafting.lookup.tables import BigramTables
from speculant.errors import ConfigError
from speculant.kernels import REFERENCE, Sampler
from speculant.sampling import Chances, Node, distribution
from speculant.types import DraftTree, Request

METHOD = Method(default_length=2)  # a bigram hardly ever guesses three tokens


@dataclass(frozen=True)
class StaticOptions:
    """tables: the file that `speculant train static` wrote, as text or a Path."""

    tables: Any = None


class StaticDrafter(StatelessDrafter):
    """Draws chains from `tables`, which all requests share."""

    needs = DrafterNeeds(emits_probs=True)

    def __init__(self, tables: BigramTables, chances: Chances, sampler: Sampler = REFERENCE) -> None:
        self._tables, self._chances, self._sampler = tables, chances, sampler

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        drafts = draw_chains(new_chains(zip(requests, limits, strict=True), self._chances), self._next_probs)
        return [self._scored(request, draft) for request, draft in zip(requests, drafts, strict=True)]

    def _next_probs(self, nodes: Sequence[Node]) -> Tensor:
        previous = [node.drafted[-1] if node.drafted else node.request.tokens[-1] for node in nodes]
        return distribution(self._tables.log_probs(previous), nodes, self._sampler)

    def _scored(self, request: Request, draft: DraftTree) -> DraftTree:
        """Add the tables' probabilities to a greedy draft; the length of a draft must not depend on drawn tokens."""
        if not draft.size or not request.params.greedy:
            return draft
        pairs = zip([request.tokens[-1], *draft.token_list], draft.token_list, strict=False)
        scores = [self._tables.probability(previous, token) for previous, token in pairs]
        return DraftTree.chain(draft.token_list, draft.probs, scores)


def build(context: DrafterContext) -> StaticDrafter:
    """Load the tables; raises ConfigError for a file that does not fit the target."""
    path = read_options(context, StaticOptions).tables
    if not isinstance(path, str | Path) or not str(path):
        raise ConfigError(
            f"this method drafts from a file of tables, and tables={path!r} names none",
            'make them by `speculant train` and set "tables": "FILE.safetensors" in speculative_config.',
        )
    tables = BigramTables.load(Path(path).expanduser(), context.vocab_size).to(context.device)
    return StaticDrafter(tables, context.chances, context.sampler)
