"""Beam search with a draft model, starting from the target's live hypotheses and their scores.

See arXiv:2211.17192, A.4.
The live hypotheses and their drafted continuations form one tree. Each pass computes the whole tree again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from speculant.beams import Beams, Hypothesis, Scored, tree_of
from speculant.drafting.model.runner import DraftModelRunner, fit_vocabulary
from speculant.kernels.base import Sampler
from speculant.kernels.reference_sampler import REFERENCE
from speculant.models.base import Chain, SequenceInput, build_batch, known
from speculant.sampling.distribution import Node, distribution, rank
from speculant.types import DraftTree, Request


@dataclass(eq=False)
class _Search:
    """The state of one request's draft. `texts` maps each hypothesis in its tree to its node.

    input_tokens: committed tokens that the next pass begins with. most: bound on the nodes. rounds: rounds left.
    """

    request: Request
    input_tokens: list[int]
    beams: Beams
    texts: dict[Hypothesis, int]
    most: int
    rounds: int

    @property
    def tree(self) -> DraftTree:
        """The target's live hypotheses, then the drafted ones."""
        return tree_of(self.texts)

    @property
    def tips(self) -> list[int]:
        """The nodes, -1 = the root, of the hypotheses that are not scored yet."""
        return [self.texts.get(each, -1) for each in self.beams.unscored]

    @property
    def grows(self) -> bool:
        """Whether another round could add nodes."""
        return self.rounds > 0 and bool(self.beams.live) and len(self.texts) < self.most

    def advance(self, probs: Tensor) -> None:
        """Take a round with the probs [r, V] after the tips; hypotheses that the tree has no room for are dropped."""
        best = rank(probs, self.beams.width, self.beams.end_token_ids)
        ranked = [Scored(continuations) for continuations in best]
        beams = self.beams.advance(dict(zip(self.beams.unscored, ranked, strict=True)))
        self.beams = replace(beams, live=beams.live[: self.most - len(self.texts)])
        self.texts |= {each: node for node, each in enumerate(self.beams.live, len(self.texts))}
        self.rounds -= 1


def draft_beams(
    runner: DraftModelRunner,
    drafting: Sequence[tuple[Request, int]],
    nodes_per_beam: int,
    vocab_size: int,
    sampler: Sampler = REFERENCE,
) -> dict[int, DraftTree]:
    """Return, by sequence, the tree of each search's live hypotheses and drafted nodes; drafting has their limits.

    The draft's beam is `nodes_per_beam` times as wide as the target's. A request with a backlog, or without room in
    the runner's cache, only catches up.
    """
    states = {request.seq_id: request.search.beams for request, _ in drafting if request.search is not None}
    wanted = [(request, states[request.seq_id].live_tree.size + limit) for request, limit in drafting]
    searches = [_begin(plan, states[plan.request.seq_id], nodes_per_beam) for plan in runner.plan(wanted)]
    drafted = [search for search in searches if search.grows]
    started = time.perf_counter()
    growing = _take_round(runner, searches, vocab_size, sampler)
    for search in searches:
        runner.note(search.request, search.input_tokens)
    while growing:
        for search in growing:
            search.input_tokens = runner.root(search.request)
        growing = _take_round(runner, growing, vocab_size, sampler)
    for search in drafted:
        runner.finish(search.request)
    if drafted:
        node_s = (time.perf_counter() - started) / max(1, sum(limit for _, limit in drafting))
        for search in drafted:
            search.request.work.drafts.follow(node_s)
    return {search.request.seq_id: search.tree for search in drafted}


def _begin(plan: Chain, beams: Beams, nodes_per_beam: int) -> _Search:
    texts = {text: node for node, text in enumerate(beams.live_texts)}
    width, room = nodes_per_beam * beams.width, plan.limit - len(texts)
    wider = replace(beams, width=width)
    return _Search(plan.request, plan.input_tokens, wider, texts, plan.limit, -(-room // width))


def _take_round(
    runner: DraftModelRunner, searches: Sequence[_Search], vocab_size: int, sampler: Sampler
) -> list[_Search]:
    """Run one pass over the searches' input tokens and growing trees; return those that need another round."""
    if not searches:
        return []
    model, cache = runner.model, runner.cache
    growing = [search for search in searches if search.grows]
    inputs, rows, nodes, end = list[SequenceInput](), list[int](), list[Node](), 0
    for search in searches:
        tree = search.tree if search.grows else DraftTree.empty()
        input_tokens = known(search.input_tokens, model.vocab_size)
        input_tree = DraftTree.of(known(tree.token_list, model.vocab_size), tree.parent_list)
        length = search.request.num_positions
        source = runner.sources.id_of(search.request)
        inputs.append(SequenceInput(search.request.seq_id, input_tokens, input_tree, length=length, source=source))
        root, end = end + len(input_tokens) - 1, end + len(input_tokens) + tree.size
        for tip in search.tips if search.grows else ():
            rows.append(root + 1 + tip)
            nodes.append(Node(search.request, tree.tokens_to(tip)))
    hidden = model.forward(build_batch(inputs, cache, model.cache_shape.device), cache.storage).last
    if rows:
        probs = distribution(fit_vocabulary(model.logits(hidden[rows]), vocab_size), nodes, sampler)
        for search in growing:
            own, probs = probs[: len(search.tips)], probs[len(search.tips) :]
            search.advance(own)
    return [search for search in growing if search.grows]
