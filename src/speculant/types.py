"""The nouns that every part of the package shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from speculant.beams import BeamSearch
from speculant.constraints import Constraint
from speculant.counts import TokenCounts
from speculant.metrics import RequestMetrics
from speculant.params import SamplingParams
from speculant.tree import DraftTree as DraftTree


@dataclass(frozen=True)
class Verdict:
    """What a rule decided: the accepted nodes, root to leaf, and the one token that follows them."""

    path: tuple[int, ...]
    token: int  # the correction or bonus token


class StopChecker(Protocol):
    """Sees every committed token in order; the engine's only link to text."""

    def push(self, token: int) -> str | None:
        """Take one token; return the stop string that it completes, if any."""
        ...

    def checkpoint(self) -> None:
        """Remember this state for `rollback`; called before a step commits."""
        ...

    def rollback(self) -> None:
        """Return to the last checkpoint, to the beginning without one, also when a push has raised."""
        ...


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of a token under the model's own distribution, before any sampling parameter."""

    logprob: float
    rank: int  # 1 = the most likely
    decoded_token: str | None = None  # None if the tokenizer can't decode the token by itself


@dataclass(frozen=True)
class CommittedRows:
    """What a pass computed of one sequence and is committed: `tokens` at positions start, start + 1, ...

    hidden: for each layer that the drafter announced, the hidden states [n, hidden] of these tokens. gained: the tokens
    that the sequence has more than before the pass; the newest of them is not among `tokens`, as it was not fed yet.
    """

    start: int
    tokens: Sequence[int]
    gained: Sequence[int] = ()
    hidden: tuple[Tensor, ...] = ()


Logprobs = Mapping[int, Logprob]  # at one position: the chosen token and the most likely ones, by token id


@dataclass(eq=False)
class Request:
    """One sequence being generated: one of the `n` samples that a prompt asked for.

    `commit` is the only place that changes it. `shared_noise` says that draft and target draws share
    keyed noise, which the `match` rule wants and ratio rules forbid.

    A beam search is one sequence too, the first of its samples. Its `tokens` are the prompt and the trunk, what all
    live hypotheses begin with if one pass can hold them; what lies behind is fed anew in every pass, as a tree. In the
    end each sample gets a hypothesis.
    """

    seq_id: int
    request_id: str
    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    end_token_ids: frozenset[int]
    metrics: RequestMetrics
    verifier: str = "match"  # the verification rule's name
    drafter: str | None = None  # the drafting method's name; None = no speculation
    num_speculative_tokens: int | None = None  # the length that the request asks for; None = the engine's
    shared_noise: bool = True
    stop_checker: StopChecker | None = None
    priority: int = 0  # lower is served sooner
    cache_salt: str = ""  # prefixes are shared among requests of one salt alone
    constraint: Constraint | None = None  # what its output has to follow; it has taken the output so far
    tokens: list[int] = field(default_factory=list)  # prompt and output
    rounds: int = 0  # verifications so far; keys the random streams
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # from the second token on
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None  # the end token or stop string
    error: Exception | None = None  # what ended it, if that was an error
    search: BeamSearch[Request] | None = None  # the beam search that it is a sample of
    counts: TokenCounts | None = field(init=False, default=None)  # of its tokens, if penalties ask for them

    def __post_init__(self) -> None:
        if self.params.penalised:
            self.counts = TokenCounts(self.prompt, self.output)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output."""
        self.tokens += tokens
        if self.counts is not None:
            self.counts.add(tokens)

    def shorten(self, length: int) -> None:
        """Forget the tokens of the output behind the first `length` of prompt and output."""
        if self.counts is not None:
            self.counts.remove(self.tokens[length:])
        del self.tokens[length:]

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
    def num_positions(self) -> int:
        """The length of the text that the next token follows: the live hypotheses of a search are ahead of `tokens`."""
        return len(self.tokens) if self.search is None else len(self.prompt) + self.search.beams.rounds

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the output's log-probabilities, where they were asked for."""
        if self.params.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.output, self.logprobs, strict=True))

    @property
    def finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class StepOutput:
    """One committed token. A request may have several of these per step (docs/references.md, several outputs).

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
        """Whether the output's distribution is the target's own, as it is unless a lenient rule was asked for."""
        return self.metrics.lossless
