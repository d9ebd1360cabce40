"""The nouns that every part of the package shares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Protocol

import torch
from torch import Tensor

from speculant.beams import Beams, Hypothesis, Text
from speculant.metrics import RequestMetrics
from speculant.params import SamplingParams


@dataclass(frozen=True)
class DraftTree:
    """Proposed tokens in prefix order; the root is the last committed token and not part of it.

    A chain is a tree whose node i has parent i - 1.
    """

    tokens: Tensor  # [n] int64
    parents: Tensor  # [n] int64; parents come before children; -1 = child of the root
    probs: Tensor | None = None  # [n, V]: the law each node was really drawn from; None = deterministic

    @classmethod
    def chain(cls, tokens: list[int], probs: Tensor | None = None) -> DraftTree:
        """Make a tree without branches."""
        return cls(torch.tensor(tokens, dtype=torch.int64), torch.arange(-1, len(tokens) - 1), probs)

    @staticmethod
    @cache
    def empty() -> DraftTree:
        """Return the tree of no nodes: plain decoding."""
        return DraftTree.chain([])

    @classmethod
    def of_paths(cls, paths: Iterable[Sequence[int]], most: float = math.inf) -> DraftTree:
        """Make the prefix tree of paths, leaving out those for which `most` nodes are too few."""
        nodes: dict[tuple[int, ...], int] = {(): -1}
        for path in paths:
            prefixes = [tuple(path[: end + 1]) for end in range(len(path))]
            missing = [prefix for prefix in prefixes if prefix not in nodes]
            if len(nodes) - 1 + len(missing) <= most:
                nodes.update({prefix: len(nodes) - 1 + place for place, prefix in enumerate(missing)})
        del nodes[()]
        tokens = torch.tensor([path[-1] for path in nodes], dtype=torch.int64)
        return cls(tokens, torch.tensor([nodes.get(path[:-1], -1) for path in nodes], dtype=torch.int64))

    @property
    def size(self) -> int:
        """The number of nodes."""
        return len(self.token_list)

    @cached_property
    def token_list(self) -> list[int]:
        """The tokens as Python integers."""
        return [int(token) for token in self.tokens.tolist()]

    @cached_property
    def parent_list(self) -> list[int]:
        """The parents as Python integers."""
        return [int(parent) for parent in self.parents.tolist()]

    @cached_property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.parent_list == list(range(-1, self.size - 1))

    @cached_property
    def depths(self) -> list[int]:
        """Each node's distance from the root, 1 for its children."""
        depths: list[int] = []
        for parent in self.parent_list:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @cached_property
    def ancestor_mask(self) -> Tensor:
        """[n, n] bool: entry (i, j) says that node j is node i or one of its ancestors."""
        mask = torch.eye(self.size, dtype=torch.bool)
        for node, parent in enumerate(self.parent_list):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    def children(self, node: int) -> list[int]:
        """Return the children of a node in drawing order; -1 asks for the root's."""
        return [child for child, parent in enumerate(self.parent_list) if parent == node]

    def tokens_to(self, node: int) -> list[int]:
        """Return the tokens from the root's child down to `node`; empty for the root (-1)."""
        return tokens_to(node, self.token_list, self.parent_list)

    def path_along(self, tokens: Iterable[int]) -> list[int]:
        """Return the nodes that tokens lead through from the root on, as far as there are any."""
        path: list[int] = []
        for token in tokens:
            found = [child for child in self.children(path[-1] if path else -1) if self.token_list[child] == token]
            if not found:
                break
            path.append(found[0])
        return path


def tokens_to(node: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return the tokens of a tree from the root's child down to `node`; empty for the root (-1)."""
    path: list[int] = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


@dataclass(frozen=True)
class Verdict:
    """What a rule decided: the accepted nodes, root to leaf, and the one token that follows them."""

    path: tuple[int, ...]
    token: int  # the correction or bonus token


class StopWatch(Protocol):
    """Sees every committed token in order; the engine's only link to text."""

    def push(self, token: int) -> str | None:
        """Take one token; return the stop string that it completes, if any."""
        ...


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of a token under the model's own law, before any sampling parameter."""

    logprob: float
    rank: int  # 1 = the most likely
    decoded_token: str | None = None


Logprobs = Mapping[int, Logprob]  # at one position: the chosen token and the most likely ones, by token id


@dataclass(eq=False)
class Request:
    """One sequence being generated: one of the `n` samples that a prompt asked for.

    `commit` is the only place that changes it. `coupled` says that draft and target draws share
    keyed noise, which the `match` rule wants and ratio rules forbid.

    A beam search is one sequence too. Its `tokens` are the trunk, what all live hypotheses begin with if one
    pass can hold them; what lies behind is fed anew in every pass, as a tree. In the end its best hypothesis
    becomes its tokens.
    """

    seq: int
    request_id: str
    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    end_token_ids: frozenset[int]
    metrics: RequestMetrics
    rule: str = "match"  # the verification rule's name
    coupled: bool = True
    watch: StopWatch | None = None
    priority: int = 0  # lower is served sooner
    salt: str = ""  # prefixes are shared among requests of one salt alone
    tokens: list[int] = field(default_factory=list)  # prompt and output
    rounds: int = 0  # verifications so far; keys the random streams
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # from the second token on
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None  # the end token or stop string
    error: Exception | None = None  # what ended it, if that was an error
    beams: Beams | None = None  # the beam search, if it is one
    runners_up: tuple[Request, ...] = ()  # get the search's next best hypotheses
    hypothesis: Hypothesis | None = None  # what it got of a beam search

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_output(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - len(self.prompt)

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether some of the prompt's log-probabilities are asked for and not known yet; the first sample has them."""
        asked = self.params.prompt_logprobs is not None and self.index == 0
        return asked and len(self.prompt_logprobs) < len(self.prompt) - 1

    @property
    def is_runner_up(self) -> bool:
        """Whether it waits for what the first of a prompt's samples searches, and takes part in no pass."""
        return self.params.beam_width is not None and self.index > 0

    @property
    def outcomes(self) -> tuple[Request, ...]:
        """The requests that end when this one does."""
        return self, *self.runners_up

    @property
    def reached(self) -> int:
        """How long the text is that the next token follows: the live hypotheses of a beam search are ahead of it."""
        return len(self.tokens) if self.beams is None else len(self.prompt) + self.beams.rounds

    def live_tree(self) -> DraftTree:
        """Return the tree of the live hypotheses behind the trunk, which is empty if it is no beam search."""
        return self._tree_of([each.tokens for each in self.beams.live] if self.beams else [])

    def waiting_tree(self, most: float = math.inf) -> DraftTree:
        """Return the tree of those among them that wait to be scored, as far as `most` nodes hold them."""
        return self._tree_of(self.beams.unscored if self.beams else [], most)

    def _tree_of(self, texts: Sequence[Text], most: float = math.inf) -> DraftTree:
        if not texts:
            return DraftTree.empty()
        trunk = tuple(self.output)
        return DraftTree.of_paths([text[len(trunk) :] for text in texts if text[: len(trunk)] == trunk], most)

    @property
    def score(self) -> float | None:
        """The score of its hypothesis: the sum of log-probabilities / length ** length_penalty."""
        return None if self.hypothesis is None else self.hypothesis.score(self.params.length_penalty)

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the output's log-probabilities, where they are known."""
        if self.hypothesis is not None:
            return self.hypothesis.logprob
        if self.params.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.output, self.logprobs, strict=True))

    @property
    def finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class StepOutput:
    """One committed token. A request may have several of these per step (seed 001).

    A request that ends by an error has no token to tell; the error is in its `Request`.
    """

    request_id: str
    index: int
    token: int | None
    drafted: bool  # an accepted draft token; False = correction, bonus or plain
    finish_reason: str | None = None
    acceptance_rate: float | None = None  # on the last one: accepted / drafted


@dataclass(frozen=True)
class CompletionOutput:
    """One finished or growing sample of a request.

    cumulative_logprob: the sum of its log-probabilities, if they were asked for or it is of a beam search.
    score: what a beam search ranks by, that sum / length ** length_penalty.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """What a prompt gave: `n` samples and the pooled figures."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[Logprobs | None] | None = None
    error: str | None = None  # why a sample ended with finish_reason "error"

    @property
    def lossless(self) -> bool:
        """Whether the output's law is the target's own, as it is unless a lenient rule was asked for."""
        return self.metrics.lossless
