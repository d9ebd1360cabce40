"""The nouns that every part of the package shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Protocol

import torch
from torch import Tensor

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
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.token_list[node])
            node = self.parent_list[node]
        return tokens[::-1]


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
    """One finished or growing sample of a request."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log-probabilities, if they were asked for."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.token_ids, self.logprobs, strict=True))


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
