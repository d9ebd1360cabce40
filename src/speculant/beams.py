"""Beam search as a value: hypotheses, and how distributions advance them (arXiv 2211.17192, A.4). No model, no cache.

A round takes the likeliest continuations of all live hypotheses, over all of them:

    rank   0 .. width - 1   those that end (an end token, or the last place) are finished
           0 ..             of the others the first `width` live on

Scores are sums of log-probabilities divided by length ** length_penalty. The search is over when `width` are finished
and no live one has a better score, as it stands, than the worst of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

Text = tuple[int, ...]  # tokens behind the prompt
Continuations = Sequence[tuple[int, float]]  # a text's likeliest next tokens and their log-probabilities, best first


@dataclass(frozen=True)
class Hypothesis:
    """One text of a beam search, and the sum of its tokens' log-probabilities."""

    tokens: Text = ()
    logprob: float = 0.0

    def score(self, length_penalty: float) -> float:
        """Return what finished hypotheses are compared by; there is at least one token."""
        return float(self.logprob / len(self.tokens) ** length_penalty)


@dataclass(frozen=True)
class Beams:
    """A beam search after `rounds` rounds: each live hypothesis has that many tokens.

    longest: tokens a hypothesis may have. reach: how many of them a pass can feed behind the trunk, one text alone.
    live: best first, none = the search is over. finished: best score first. scored: the continuations of those live
    hypotheses that have been scored; the others wait for theirs.
    """

    width: int
    length_penalty: float
    end_token_ids: frozenset[int]
    longest: int
    reach: int
    rounds: int = 0
    live: tuple[Hypothesis, ...] = (Hypothesis(),)
    finished: tuple[Hypothesis, ...] = ()
    scored: Mapping[Text, Continuations] = field(default_factory=dict)

    @property
    def num_continuations(self) -> int:
        """How many continuations of a text can matter: those that end it, and `width` others."""
        return self.width + len(self.end_token_ids)

    @property
    def trunk(self) -> Text:
        """The tokens to feed before the tree of hypotheses: those that all live ones begin with.

        Where these lie apart by more than `reach`, it is longer, and only those behind it can be fed with it.
        """
        return self.unscored[0][: max(self._num_common, self.rounds - self.reach)]

    @property
    def together(self) -> bool:
        """Whether all live hypotheses lie behind the trunk."""
        return self.rounds - self._num_common <= self.reach

    @property
    def _num_common(self) -> int:
        texts = [hypothesis.tokens for hypothesis in self.live]
        agreed = [mine == theirs for mine, theirs in zip(min(texts), max(texts), strict=True)]
        return [*agreed, False].index(False)

    @property
    def unscored(self) -> list[Text]:
        """The live hypotheses that wait for their continuations, best first."""
        return [hypothesis.tokens for hypothesis in self.live if hypothesis.tokens not in self.scored]

    def advance(self, scored: Mapping[Text, Continuations]) -> Beams:
        """Return the search after all rounds that can be taken when these texts' continuations are known too."""
        beams = replace(self, scored={**self.scored, **scored})
        while beams.live and not beams.unscored:
            beams = beams._next()
        known = {each.tokens: beams.scored[each.tokens] for each in beams.live if each.tokens in beams.scored}
        return replace(beams, scored=known)

    def _next(self) -> Beams:
        """Take one round; ties go to the better hypothesis, then to its better continuation."""
        candidates = [
            Hypothesis((*each.tokens, token), each.logprob + logprob)
            for each in self.live
            for token, logprob in self.scored[each.tokens]
        ]
        candidates.sort(key=lambda candidate: -candidate.logprob)
        ended = [each for each in candidates[: self.width] if self._ends(each)]
        finished = sorted([*self.finished, *ended], key=lambda each: -each.score(self.length_penalty))[: self.width]
        live = [each for each in candidates if not self._ends(each)][: self.width]
        if len(finished) == self.width and live:
            live = live if self._may_improve(live[0], finished[-1]) else []
        return replace(self, rounds=self.rounds + 1, live=tuple(live), finished=tuple(finished))

    def _ends(self, hypothesis: Hypothesis) -> bool:
        return hypothesis.tokens[-1] in self.end_token_ids or len(hypothesis.tokens) == self.longest

    def _may_improve(self, best: Hypothesis, worst: Hypothesis) -> bool:
        return best.score(self.length_penalty) > worst.score(self.length_penalty)
