"""Beam search with a draft model, ahead of the target's (arXiv 2211.17192, A.4): it continues the target's hypotheses.

The live hypotheses and what is drafted behind them are one tree. Each pass feeds it so far anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

from torch import Tensor

from speculant.beams import Beams, Text
from speculant.drafting.growth.chains import fit_vocabulary
from speculant.drafting.growth.runner import DraftModelRunner
from speculant.kernels.native import Kernels
from speculant.models.base import Chain, SequenceInput, build_batch, known
from speculant.sampling.distribution import Node, distribution
from speculant.sampling.ranking import rank
from speculant.types import DraftTree, Request


@dataclass(eq=False)
class _Search:
    """One request's share of a round. `texts` are the paths of its tree behind the trunk, as they were found.

    feed: committed tokens that the next pass begins with. It may have `most` nodes and take `rounds` rounds.
    """

    request: Request
    feed: list[int]
    beams: Beams
    texts: list[Text]
    most: int
    rounds: int

    @property
    def tree(self) -> DraftTree:
        """The target's live hypotheses, then what was drafted behind them."""
        return DraftTree.of_paths(self.texts, self.most)

    @property
    def tips(self) -> list[Text]:
        """What those of its hypotheses add to the trunk that wait for their continuations."""
        return [text[self.request.num_output :] for text in self.beams.unscored]

    @property
    def grows(self) -> bool:
        """Whether another round could add something."""
        return self.rounds > 0 and bool(self.beams.live) and self.tree.size < self.most

    def advance(self, probs: Tensor) -> None:
        """Take a round with the probs [r, V] after the tips; hypotheses that the tree has no room for are dropped."""
        ranked = rank(probs, self.beams.num_continuations)
        beams = self.beams.advance(dict(zip(self.beams.unscored, ranked, strict=True)))
        texts = [each.tokens[self.request.num_output :] for each in beams.live]
        self.texts, self.rounds = [*self.texts, *texts], self.rounds - 1
        tree = self.tree
        held = [len(tree.path_along(text)) == len(text) for text in texts]
        self.beams = replace(beams, live=tuple(compress(beams.live, held)))


def draft_beams(
    runner: DraftModelRunner,
    drafting: Sequence[tuple[Request, int]],
    nodes_per_beam: int,
    vocab_size: int,
    kernels: Kernels | None = None,
) -> dict[int, DraftTree]:
    """Return, by sequence, each search's live hypotheses with at most so many drafted nodes behind them.

    The draft keeps `nodes_per_beam` times as many beams as the target. Who is behind, or finds no room in the
    runner's cache, only catches up.
    """
    wanted = [(request, request.live_tree().size + limit) for request, limit in drafting]
    searches = [_begin(plan, nodes_per_beam) for plan in runner.plan(wanted)]
    drafted = [search for search in searches if search.grows]
    growing = _take_round(runner, searches, vocab_size, kernels)
    for search in searches:
        runner.note(search.request, search.feed)
    while growing:
        for search in growing:
            search.feed = search.request.tokens[-1:]
            runner.cache.truncate_to(search.request.seq_id, len(search.request.tokens) - 1)
        growing = _take_round(runner, growing, vocab_size, kernels)
    for search in drafted:
        runner.cache.truncate_to(search.request.seq_id, len(search.request.tokens))
    return {search.request.seq_id: search.tree for search in drafted}


def _begin(plan: Chain, nodes_per_beam: int) -> _Search:
    request, beams = plan.request, plan.request.beams
    assert beams is not None, "this is no beam search"
    width, room = nodes_per_beam * beams.width, plan.limit - request.live_tree().size
    texts = [each.tokens[request.num_output :] for each in beams.live]
    return _Search(request, plan.feed, replace(beams, width=width), texts, plan.limit, -(-room // width))


def _take_round(
    runner: DraftModelRunner, searches: Sequence[_Search], vocab_size: int, kernels: Kernels | None
) -> list[_Search]:
    """Feed what searches have to feed, and the trees of those that grow; return those that want another round."""
    if not searches:
        return []
    model, cache = runner.model, runner.cache
    growing = [search for search in searches if search.grows]
    feeds, rows, nodes, end = list[SequenceInput](), list[int](), list[Node](), 0
    for search in searches:
        tree = search.tree if search.grows else DraftTree.empty()
        fed = DraftTree.of(known(tree.token_list, model.vocab_size), tree.parent_list)
        feeds.append(SequenceInput(search.request.seq_id, known(search.feed, model.vocab_size), fed))
        root, end = end + len(search.feed) - 1, end + len(search.feed) + tree.size
        for text in search.tips if search.grows else ():
            rows.append(root + 1 + [-1, *tree.path_along(text)][-1])
            nodes.append(Node(search.request, text))
    hidden = model.forward(build_batch(feeds, cache, model.cache_shape.device), cache)
    if rows:
        probs = distribution(fit_vocabulary(model.logits(hidden[rows]), vocab_size), nodes, kernels)
        for search in growing:
            own, probs = probs[: len(search.tips)], probs[len(search.tips) :]
            search.advance(own)
    return [search for search in growing if search.grows]
