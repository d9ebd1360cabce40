"""Beam search as a value: hypotheses, and how the target's distributions advance them (arXiv:2211.17192, A.4).

A round ranks the likeliest continuations of all live hypotheses together:

    rank   0 .. width - 1   continuations that end (by an end token or the greatest length) are finished
           0 ..             of the others the first `width` stay live

Scores are sums of log-probabilities divided by length ** length_penalty. The search is over when `width` hypotheses are
finished and no live one has a better current score than the worst of them.

Hypotheses are linked: each refers to its parent, which is one token shorter. Common prefixes are stored once. A round
costs width * continuations; every other operation visits each hypothesis after the trunk at most once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Generic, TypeVar

from speculant.tree import DraftTree

Continuations = Sequence[tuple[int, float]]  # a text's likeliest next tokens and their log-probabilities, best first
Sample = TypeVar("Sample")


@dataclass(frozen=True, eq=False, slots=True)
class Hypothesis:
    """A text after the prompt: `parent` and one more token. A search begins with the empty one, which has neither.

    length: its number of tokens; logprob: the sum of their log-probabilities. Two hypotheses of a search are equal if
    they are the same object.
    """

    parent: Hypothesis | None = field(default=None, repr=False)
    token: int = 0
    logprob: float = 0.0
    length: int = 0

    def continued(self, token: int, logprob: float) -> Hypothesis:
        """Return the text with one more token; `logprob` belongs to the whole text."""
        return Hypothesis(self, token, logprob, self.length + 1)

    def lineage(self, start: int = 0) -> Iterator[Hypothesis]:
        """Yield the text and its ancestors that have more than `start` tokens, longest first."""
        each = self
        while each.parent is not None and each.length > start:
            yield each
            each = each.parent

    def tokens(self, start: int = 0) -> list[int]:
        """Return its tokens without the first `start`."""
        return [each.token for each in self.lineage(start)][::-1]

    def prefix(self, length: int) -> Hypothesis:
        """Return its prefix of at most `length` tokens."""
        each = self
        while each.parent is not None and each.length > length:
            each = each.parent
        return each

    def score(self, length_penalty: float) -> float:
        """Return the score that ranks finished hypotheses; there must be at least one token."""
        return float(self.logprob / self.length**length_penalty)


def common_prefix(hypotheses: Collection[Hypothesis]) -> Hypothesis:
    """Return the longest common prefix of hypotheses of one search."""
    shortest = min(each.length for each in hypotheses)
    texts = {each.prefix(shortest) for each in hypotheses}
    while len(texts) > 1:
        texts = {each.parent for each in texts if each.parent is not None}
    return texts.pop()


def texts_after(trunk: Hypothesis, tips: Iterable[Hypothesis], most: float = math.inf) -> list[Hypothesis]:
    """Return the tips and their ancestors after the trunk, parents first.

    Tips that do not continue the trunk are left out, and so are tips that would exceed `most` texts.
    """
    found: dict[Hypothesis, None] = {}
    for tip in tips:
        missing = list(takewhile(lambda text: text not in found, tip.lineage(trunk.length)))
        start = missing[-1].parent if missing else tip
        if (start is trunk or start in found) and len(found) + len(missing) <= most:
            found.update(dict.fromkeys(reversed(missing)))
    return list(found)


def tree_of(texts: Collection[Hypothesis]) -> DraftTree:
    """Return texts as a tree, in their order, parents first; texts without their parent are the root's children."""
    nodes: dict[Hypothesis | None, int] = {text: node for node, text in enumerate(texts)}
    return DraftTree.of([text.token for text in texts], [nodes.get(text.parent, -1) for text in texts])


@dataclass(frozen=True)
class Scored:
    """A text's continuations. `longer` maps a next token to the longer text's continuations, where they are known."""

    continuations: Continuations
    longer: Mapping[int, Scored] = field(default_factory=dict)


def _linked(tree: DraftTree, ranked: Mapping[int, Continuations]) -> dict[int, Scored]:
    """Return the scored nodes of a tree, -1 = the root, each linked to its scored descendants."""
    longer: dict[int, dict[int, Scored]] = {node: {} for node in ranked}
    known = {node: Scored(continuations, longer[node]) for node, continuations in ranked.items()}
    for node, scored in known.items():
        if node >= 0 and (parent := tree.parent_list[node]) in longer:
            longer[parent].setdefault(tree.token_list[node], scored)
    return known


@dataclass(frozen=True)
class Beams:
    """A beam search after `rounds` rounds: each live hypothesis has that many tokens.

    longest: the most tokens of a hypothesis. reach: most tokens of one text that a pass can compute after the trunk.
    live: best first, none = the search is over. finished: best score first. scored: the continuations of the live
    hypotheses that have been scored.
    """

    width: int
    length_penalty: float
    end_token_ids: frozenset[int]
    longest: int
    reach: int
    rounds: int = 0
    live: tuple[Hypothesis, ...] = (Hypothesis(),)
    finished: tuple[Hypothesis, ...] = ()
    scored: Mapping[Hypothesis, Scored] = field(default_factory=dict)

    @cached_property
    def trunk(self) -> Hypothesis:
        """The text before the tree of hypotheses: the common prefix of all live ones.

        If they diverge more than `reach` tokens back, the trunk is longer than that prefix, and a pass computes only
        the hypotheses that continue it.
        """
        return self.unscored[0].prefix(max(self._shared.length, self.rounds - self.reach))

    @property
    def together(self) -> bool:
        """Whether all live hypotheses continue the trunk."""
        return self.rounds - self._shared.length <= self.reach

    @cached_property
    def _shared(self) -> Hypothesis:
        return common_prefix(self.live)

    @cached_property
    def unscored(self) -> tuple[Hypothesis, ...]:
        """The live hypotheses that are not scored yet, best first."""
        return tuple(each for each in self.live if each not in self.scored)

    @cached_property
    def live_texts(self) -> list[Hypothesis]:
        """The live hypotheses and their ancestors after the trunk, parents first."""
        return texts_after(self.trunk, self.live)

    @cached_property
    def live_tree(self) -> DraftTree:
        """The tree of `live_texts`; its root is the trunk's newest token."""
        return tree_of(self.live_texts)

    @cached_property
    def _waiting_tree(self) -> DraftTree:
        return tree_of(texts_after(self.trunk, self.unscored)) if self.scored else self.live_tree

    def waiting_tree(self, most: float = math.inf) -> DraftTree:
        """Return the tree of the unscored live hypotheses, as many of them as fit into `most` nodes."""
        whole = self._waiting_tree
        return whole if whole.size <= most else tree_of(texts_after(self.trunk, self.unscored, most))

    def completed_by(self, tree: DraftTree) -> bool:
        """Whether all live hypotheses are scored after a pass over the trunk and this `waiting_tree`."""
        return self.together and tree.size == self._waiting_tree.size

    def scored_by(self, tree: DraftTree, ranked: Mapping[int, Continuations]) -> dict[Hypothesis, Scored]:
        """Return the live hypotheses that a pass scored; `ranked` has the continuations of the tree's nodes, -1 = root.

        The tree's root is the trunk, and it may extend beyond the hypotheses.
        """
        known, nodes = _linked(tree, ranked), self._nodes_in(tree)
        return {each: known[nodes[each]] for each in self.live if each in nodes and nodes[each] in known}

    def _nodes_in(self, tree: DraftTree) -> dict[Hypothesis | None, int]:
        """Return the nodes of the live hypotheses and their ancestors in a tree after the trunk."""
        nodes: dict[Hypothesis | None, int] = {self.trunk: -1}
        for text in self.live_texts:
            node = tree.child(nodes[text.parent], text.token) if text.parent in nodes else None
            if node is not None:
                nodes[text] = node
        return nodes

    def advance(self, scored: Mapping[Hypothesis, Scored]) -> Beams:
        """Return the search after all rounds that are possible once these hypotheses are scored too."""
        known = {**self.scored, **scored}
        beams = replace(self, scored={each: known[each] for each in self.live if each in known})
        while beams.live and not beams.unscored:
            beams = beams._next()
        return beams

    def _next(self) -> Beams:
        """Take one round; ties go to the better hypothesis, then to its better continuation."""
        candidates = [
            (each, token, each.logprob + logprob)
            for each in self.live
            for token, logprob in self.scored[each].continuations
        ]
        candidates.sort(key=lambda candidate: -candidate[2])
        ended = [each.continued(token, total) for each, token, total in candidates[: self.width] if self._ends(token)]
        finished = sorted([*self.finished, *ended], key=lambda each: -each.score(self.length_penalty))[: self.width]
        going_on = [candidate for candidate in candidates if not self._ends(candidate[1])][: self.width]
        live = tuple(each.continued(token, total) for each, token, total in going_on)
        if len(finished) == self.width and live and not self._may_improve(live[0], finished[-1]):
            live = ()
        return replace(self, rounds=self.rounds + 1, live=live, finished=tuple(finished), scored=self._known_of(live))

    def _known_of(self, live: Iterable[Hypothesis]) -> dict[Hypothesis, Scored]:
        """Return the next round's hypotheses that are scored already."""
        parents = [(each, self.scored[each.parent]) for each in live if each.parent is not None]
        return {each: scored.longer[each.token] for each, scored in parents if each.token in scored.longer}

    def _ends(self, token: int) -> bool:
        """Whether a live hypothesis is finished by this token."""
        return token in self.end_token_ids or self.rounds + 1 == self.longest

    def _may_improve(self, best: Hypothesis, worst: Hypothesis) -> bool:
        return best.score(self.length_penalty) > worst.score(self.length_penalty)


@dataclass(eq=False)
class BeamSearch(Generic[Sample]):
    """The search that a prompt's samples share. The first sample runs it, and each gets one hypothesis as its result.

    results: the samples' hypotheses, in their order; empty before the search is over, and if it failed.
    """

    beams: Beams
    samples: Sequence[Sample]
    results: tuple[Hypothesis, ...] = ()

    def result(self, index: int) -> Hypothesis | None:
        """Return the hypothesis of the sample with this index, if it has one."""
        return self.results[index] if index < len(self.results) else None

    def score(self, index: int) -> float | None:
        """Return the score of that hypothesis."""
        result = self.result(index)
        return None if result is None else result.score(self.beams.length_penalty)
