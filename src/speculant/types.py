"""The types that every part of the package shares."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Protocol, overload

from torch import Tensor

from speculant.beams import BeamSearch
from speculant.constraints import Constraint
from speculant.counts import TokenCounts
from speculant.errors import RequestError
from speculant.metrics import RequestMetrics
from speculant.params import SamplingParams
from speculant.tree import DraftTree as DraftTree

FIRST_S = 2e-3  # per row, at least, of a sequence's first step: the first mask of a form takes longer than later ones
NEWEST = 0.3  # weight of the newest step in a mean
MOST_RISE = 4.0  # a step counts as at most this many times the mean: the machine may have been stopped


class Verdict(NamedTuple):
    """A verifier's decision: the accepted nodes, root to leaf, and the one token that follows them."""

    path: tuple[int, ...]
    token: int  # the correction or bonus token


class StopChecker(Protocol):
    """Receives every committed token in order; the engine's only link to text."""

    def push(self, token: int) -> str | None:
        """Add one token; return the stop string that it completes, if any."""
        ...

    def push_end(self, token: int) -> None:
        """Add an end token, which is the last one."""
        ...

    def checkpoint(self) -> None:
        """Save this state for `rollback`; called before a step commits."""
        ...

    def rollback(self) -> None:
        """Return to the last checkpoint, or to the beginning if there is none; valid even after a push has raised."""
        ...


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of a token under the model's own distribution, before any sampling parameter."""

    logprob: float
    rank: int  # 1 = the most likely
    decoded_token: str | None = None  # None if the tokenizer can't decode the token by itself


class LayerStates(Sequence[Tensor]):
    """The hidden states of several layers: item i holds the states of the i-th layer, [n, hidden].

    They are the rows `first` to `end` - 1 of `memory` [layers, rows, hidden]. A tensor is made only when an item is
    read: making it takes microseconds, and a paused drafter reads many rows at once.
    """

    __slots__ = ("end", "first", "memory")

    def __init__(self, memory: Tensor, first: int, end: int) -> None:
        self.memory, self.first, self.end = memory, first, end

    def __len__(self) -> int:
        return self.memory.shape[0]

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Tensor, ...]: ...

    def __getitem__(self, index: int | slice) -> Tensor | tuple[Tensor, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return self.memory[index, self.first : self.end]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.memory[:, self.first : self.end].unbind())

    def part(self, first: int, end: int) -> LayerStates:
        """Return rows first .. end - 1 of these."""
        return LayerStates(self.memory, self.first + first, self.first + end)

    def grow(self, following: LayerStates) -> bool:
        """Add the rows that follow, if they come next in memory; return whether they do."""
        if following.memory is not self.memory or following.first != self.end:
            return False
        self.end = following.end
        return True


def state_rows(layers: Sequence[Tensor], first: int, end: int) -> Sequence[Tensor]:
    """Return rows first .. end - 1 of each layer's states."""
    if isinstance(layers, LayerStates):
        return layers.part(first, end)
    return tuple([states[first:end] for states in layers])


Successors = Sequence[tuple[int, Sequence[int]]]  # tokens, each with the most likely next ones


class CommittedRows(NamedTuple):
    """The rows of a pass that one sequence has committed: `tokens` at positions start, start + 1, ...

    hidden: for each layer that the drafter announced, the hidden states [n, hidden] of these tokens, then of the
    look-ahead rows below the last token, if the pass had some. gained: the tokens that the pass added to the sequence;
    its newest token is not among `tokens`, as it is not computed yet.

    successors: for each row of the pass that has logits, rejected drafts' rows included, the input token
    and the `DrafterReads.top_k` most likely next tokens by the target's logits, best first. In a prompt, only
    the last row has logits.
    """

    start: int
    tokens: Sequence[int]
    gained: Sequence[int] = ()
    hidden: Sequence[Tensor] = ()
    successors: Successors = ()


Logprobs = Mapping[int, Logprob]  # at one position: the chosen token and the most likely ones, by token id


WEIGHTS = (0.001, 1000.0)  # the lowest and the highest weight of a client


@dataclass(frozen=True)
class Client:
    """Who sends requests. Clients share an engine by weight (scheduling/order.py).

    weight: twice the weight gets twice as much where clients compete. call: the client's prompts of the same call count
    as one request when it shares its part among its requests; "" = each prompt is a request. Raises RequestError for a
    weight outside of WEIGHTS.
    """

    name: str = ""
    weight: float = 1.0
    call: str = ""

    def __post_init__(self) -> None:
        given: tuple[object, ...] = self.weight, self.name, self.call
        is_number = isinstance(given[0], int | float) and not isinstance(given[0], bool)
        is_text = all(isinstance(text, str) for text in given[1:])
        if not (is_text and is_number and WEIGHTS[0] <= self.weight <= WEIGHTS[1]):
            raise RequestError(
                f"a client has the name {self.name!r:.80} and the weight {self.weight!r:.80}",
                f"give the name as str and the weight as a number from {WEIGHTS[0]} to {WEIGHTS[1]}.",
            )


ANYONE = Client()  # sends requests without a client's name


@dataclass(slots=True)
class WorkRate:
    """The mean time per row with results, in seconds."""

    row_s: float = FIRST_S

    def follow(self, row_s: float) -> None:
        """Follow the time per row of a step."""
        self.row_s += NEWEST * (min(row_s, MOST_RISE * self.row_s + FIRST_S) - self.row_s)


class StepWork:
    """The time that one sequence adds to a step beside the rows of its pass; it is a context around that work.

    Masks, edits of logits, log-probabilities, beams and stop strings take time on the engine's thread, so every other
    sequence of the step waits for it. It is measured where it is spent, and `WorkBudget` limits it. A nested use counts
    once.

    kind: the rate of sequences with the same settings; None = the settings add no work, and nothing is measured. Its
    own rate starts there, or at FIRST_S if that is more. The clock runs while masks are awaited from another thread.
    """

    __slots__ = ("_depth", "_kind", "_rate", "_spent_s", "_started", "drafts", "last_s")

    def __init__(self, kind: WorkRate | None = None) -> None:
        self._kind, self._rate = kind, WorkRate(0.0 if kind is None else max(FIRST_S, kind.row_s))
        self._depth, self._started, self._spent_s = 0, 0.0, 0.0
        self.last_s = 0.0  # in the last step
        self.drafts = WorkRate(0.0 if kind is None else FIRST_S)  # of drafting for a beam search, per drafted node

    def __deepcopy__(self, memo: object) -> StepWork:
        """Return itself: a copy of a request is no other sequence."""
        return self

    def __enter__(self) -> None:
        if self._kind is not None:
            if not self._depth:
                self._started = time.perf_counter()
            self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._kind is not None:
            self._depth -= 1
            if not self._depth:
                self._spent_s += time.perf_counter() - self._started

    @property
    def row_s(self) -> float:
        """The estimated time of a row with results, in seconds."""
        return self._rate.row_s

    def settle(self, rows: int) -> None:
        """End a step that gave results for a number of rows."""
        if self._kind is not None:
            self.last_s, self._spent_s = self._spent_s, 0.0
            if rows:
                self._rate.follow(self.last_s / rows)
                self._kind.follow(self.last_s / rows)


NO_WORK = StepWork()


@dataclass(frozen=True)
class Sender:
    """Who sent a request, and what that decides: of the same client's requests, a lower priority is served sooner.

    cache_salt: only requests of the same salt share prefixes.
    """

    client: Client = ANYONE
    priority: int = 0
    cache_salt: str = ""


NOBODY = Sender()


@dataclass(frozen=True)
class DraftRules:
    """How a sequence's drafts are made and verified.

    method: the drafting method's name; None = no speculation. num_tokens: the request's own draft length; None = the
    engine's. verifier: the verification rule's name. shared_noise: draft and target draws share keyed noise, which
    `match` uses and ratio rules forbid. prediction: the caller's guess of the output, for a drafter that reads it.
    """

    method: str | None = None
    num_tokens: int | None = None
    verifier: str = "match"
    shared_noise: bool = True
    prediction: tuple[int, ...] = ()


NO_DRAFTS = DraftRules()


@dataclass
class DraftPrice:
    """What a further token of a draft costs in this step; the draft-length policy says so to drafters of chains.

    least: the chain ends after a token where the product of the scores so far is below it; 0 = nowhere.
    """

    least: float = 0.0


@dataclass(frozen=True)
class Stops:
    """What ends a text before its greatest length.

    end_token_ids: the model's own and those that the caller named. named: the caller's, without the model's own.
    checker: finds stop strings; None = nobody reads the text.
    """

    end_token_ids: frozenset[int] = frozenset()
    named: frozenset[int] = frozenset()
    checker: StopChecker | None = None

    def reason(self, token: int) -> int | None:
        """Return the stop reason of an end token: the token if the caller named it, else None."""
        return token if token in self.named else None


NO_STOPS = Stops()


class Ending(NamedTuple):
    """Why a sequence ended.

    reason: stop, length, abort or error; None = it has not ended. stop: the named end token or the stop string; None at
    any other end. error: the error that ended it.
    """

    reason: str | None = None
    stop: int | str | None = None
    error: Exception | None = None


NOT_ENDED = Ending()


@dataclass(eq=False)
class Request:
    """One sequence being generated: one of the `n` samples of a prompt. Only `commit` changes it.

    A beam search is one sequence too, the first of its samples. Its `tokens` are the prompt and the trunk: the common
    prefix of all live hypotheses, if one pass can hold them. Every pass computes the other tokens again, as a tree.
    In the end each sample gets a hypothesis.
    """

    seq_id: int
    request_id: str
    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    metrics: RequestMetrics
    sender: Sender = NOBODY
    drafts: DraftRules = NO_DRAFTS
    stops: Stops = NO_STOPS
    source: tuple[int, ...] = ()  # the text that the encoder of an encoder-decoder model reads
    constraint: Constraint | None = None  # restricts the output; it has been advanced by the output so far
    tokens: list[int] = field(default_factory=list)  # prompt and output
    num_drafted: int = (
        0  # tokens at the end that are not committed; only in requests that one drafter passes on to another
    )
    rounds: int = 0  # verifications so far; keys the random streams
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # from the second token on
    ending: Ending = NOT_ENDED
    search: BeamSearch[Request] | None = None  # the beam search that it is a sample of
    work: StepWork = NO_WORK  # the time that its settings add to steps
    counts: TokenCounts | None = field(init=False, default=None)  # of its tokens, if penalties need them
    call: tuple[str, ...] = field(init=False)  # all sequences of the same one share a request's part of the engine
    full_salt: str = field(init=False)  # of its keys and values: those of a decoder depend on the source too

    def __post_init__(self) -> None:
        client, salt = self.sender.client, self.sender.cache_salt
        self.call = (client.name, client.call) if client.call else (self.request_id,)
        self.full_salt = f"{salt}\0{self.source}" if self.source else salt
        if self.params.penalised:
            self.counts = TokenCounts(self.prompt, self.output)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output."""
        self.tokens += tokens
        if self.counts is not None:
            self.counts.add(tokens)

    def shorten(self, length: int) -> None:
        """Drop output tokens, so that prompt and output have `length` tokens."""
        if self.counts is not None:
            self.counts.remove(self.tokens[length:])
        del self.tokens[length:]

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_output(self) -> int:
        """The number of generated tokens."""
        return len(self.tokens) - len(self.prompt)

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether log-probabilities of the prompt are requested and not known yet; the first sample records them."""
        wanted = self.params.prompt_logprobs is not None and self.index == 0
        return wanted and len(self.prompt_logprobs) < len(self.prompt) - 1

    @property
    def num_positions(self) -> int:
        """The length of the text before the next token; a beam search's live hypotheses are longer than `tokens`."""
        return len(self.tokens) if self.search is None else len(self.prompt) + self.search.beams.rounds

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the output's log-probabilities, if they were requested."""
        if self.params.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.output, self.logprobs, strict=True))

    @property
    def finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.ending.reason is not None


@dataclass(slots=True)
class StepOutput:
    """One committed token. A request may have several of these per step (docs/references.md, several outputs).

    A request that ends by an error has token None; the error is in its `Request`.
    """

    request_id: str
    index: int
    token: int | None
    drafted: bool  # an accepted draft token; False = correction, bonus or plain
    finish_reason: str | None = None
    acceptance_rate: float | None = None  # on the last one: accepted / drafted
    rejected: tuple[int, ...] = ()  # the draft tokens that were tested in its place and rejected

    @property
    def corrected(self) -> bool:
        """Whether it is the target's own token, in place of a rejected draft token."""
        return bool(self.rejected)


@dataclass(frozen=True)
class CompletionOutput:
    """One finished or growing sample of a request.

    cumulative_logprob: the sum of its log-probabilities, if they were requested or it is of a beam search.
    score: that sum / length ** length_penalty; a beam search ranks samples by it. metrics: the figures of this sample
    alone. stop_reason: the stop string or the id of `stop_token_ids` that ended it; None at the model's own end token.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    metrics: RequestMetrics | None = field(default=None, compare=False, repr=False)

    def finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt's result: `n` samples, and the figures of all of them together (`RequestMetrics.pooled`).

    encoder_prompt, encoder_prompt_token_ids: the source of an encoder-decoder model, whose `prompt` is the decoder's.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[Logprobs | None] | None = None
    error: str | None = None  # the reason of a finish_reason "error"
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of the prompt, and of the source if there is one."""
        return len(self.encoder_prompt_token_ids or ()) + len(self.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """How many of the prompt's tokens were found in the prefix cache."""
        return self.metrics.cached_tokens

    @property
    def lossless(self) -> bool:
        """Whether the output has the target's distribution; False only for a lenient verifier."""
        return self.metrics.lossless
