"""Table models, and a `Chance` that follows every branch, so that the exact distribution of a random result is summed.

The next token's distribution of a table model is a function of the whole prefix. `Pair` has random tables of a target
and a draft; `joint_distribution` is the target's own, without speculation. `enumerate_case` runs every branch of a
request's first speculative steps through the real engine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, islice
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from speculant.cache import MOST_PENDING, NO_KEYS, CacheShape, KVCache, KVStorage, LayerShape
from speculant.config import Limits
from speculant.metrics import RequestMetrics, TimingMetrics
from speculant.models import (
    Batch,
    Chain,
    Hidden,
    ModelNeeds,
    Segment,
    State,
    StateInputs,
    StoredKeys,
    check_embeddings,
    check_taps,
    check_tokens,
    context_slots,
    state_shape,
    visible_keys,
)
from speculant.params import SamplingParams
from speculant.sampling import Chance, Chances, Node, distribution
from speculant.types import NO_WORK, Request, StepOutput, Stops

History = tuple[int, ...]
Table = Callable[[History], Sequence[float]]  # all tokens so far -> logits of the next


class TableModel:
    """A `CausalLM` whose next token's logits are a function of the whole prefix, read back from the storage.

    A position's key is its token and its value is its position. Each row gathers its visible positions and
    asserts that they are a whole prefix, in order, that ends with the row's own token: a stale slot, a wrong
    truncation or another sequence's slot causes an error here, or another history and so another distribution.

    masks: it has a mask token beside its vocabulary, which is part of histories as any token is.
    has_source: it is an encoder-decoder model. Its table reads `after_source(source, history)`, of the source that the
    storage holds. has_states: it has a layer with a state too, and reads the newest tokens from that.
    """

    def __init__(
        self,
        table: Table,
        vocab_size: int,
        max_positions: int = 1024,
        masks: bool = False,
        has_source: bool = False,
        has_states: bool = False,
    ) -> None:
        self.needs = ModelNeeds(source=has_source, most_nodes=MOST_PENDING - 1 if has_states else None)
        self.vocab_size, self.mask_token = vocab_size, vocab_size if masks else None
        self.max_positions = max_positions
        self.num_layers, self.hidden_size = 1, vocab_size
        self.cache_shape = CacheShape(1, 1, 1, torch.float64, torch.device("cpu"))
        if has_states:
            assert vocab_size < DIGIT - 1, "tokens are digits"
            self.cache_shape = replace(
                self.cache_shape, num_layers=2, own=(LayerShape(1, 1), NO_KEYS), states=(None, state_shape(STATE))
            )
        self.num_rows: list[int] = []  # of each pass
        self.num_encoded: list[int] = []  # rows of each pass of the encoder
        self._table = table
        self._known: dict[History, Tensor] = {}

    def embed(self, tokens: Tensor) -> Tensor:
        """See `CausalLM.embed`; a token is a one-hot vector."""
        check_tokens(tokens, self.vocab_size)
        return torch.eye(self.vocab_size, dtype=torch.float64)[tokens]

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """See `CausalLM.forward`; one layer maps one-hot tokens to logits, and the final norm is the identity."""
        check_taps(taps, self.num_layers)
        assert int(batch.positions.max()) < self.max_positions, "beyond the model's positions"
        batch = self._looked_up(batch)
        storage.write(0, batch.slot_mapping, _column(batch.tokens), _column(batch.positions))
        self.num_rows.append(len(batch.tokens))
        last = torch.stack([self._logits(history) for history in self._histories(batch, storage)])
        return Hidden(last, tuple(last if tap else self.embed(batch.tokens) for tap in taps))

    def encode(self, batch: Batch, storage: KVStorage) -> Tensor:
        """See `EncodesSources.encode`; the values are -1 - position, and the result is the one-hot tokens.

        Another encoder's result must be that of the same source.
        """
        assert self.needs.source, "the model has no encoder"
        assert batch.hidden is None or torch.equal(batch.hidden, self.embed(batch.tokens)), "another source's result"
        for segment in batch.segments:
            assert segment.start == 0 and not segment.parents, "not a whole source"  # noqa: PT018
        storage.write(0, batch.slot_mapping, _column(batch.tokens), _column(-1 - batch.positions))
        self.num_encoded.append(len(batch.tokens))
        return self.embed(batch.tokens)

    def _histories(self, batch: Batch, storage: KVStorage) -> Iterator[History]:
        """Yield what each row's distribution depends on: the visible prefix, after the source if there is one."""
        prefixes = _prefixes(batch, storage)
        if self.needs.most_nodes is not None:
            prefixes = map(_with_newest, prefixes, _newest(batch, storage))
        for segment in batch.segments:
            assert bool(segment.source_length) == self.needs.source, "a text without its source"
            source = _stored_source(segment, batch.block_size, storage) if self.needs.source else None
            for prefix in islice(prefixes, segment.num_rows):
                yield prefix if source is None else after_source(source, prefix)

    def _looked_up(self, batch: Batch) -> Batch:
        """Return the batch with the tokens of rows that have input embeddings, which must be one-hot."""
        if batch.embeddings is None:
            return batch
        check_embeddings(batch, self.hidden_size)
        tokens = batch.embeddings.argmax(-1)
        assert torch.equal(self.embed(tokens), batch.embeddings), "an input embedding is not a token's"
        return replace(batch, tokens=batch.tokens.index_copy(0, batch.embedded_rows, tokens), embeddings=None)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return hidden

    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> Sequence[Chain]:
        """See `CausalLM.grow`: none are drawn here."""
        return chains

    def _logits(self, history: History) -> Tensor:
        if history not in self._known:
            self._known[history] = torch.tensor(self._table(history), dtype=torch.float64)
        return self._known[history]


STATE = State(width=3, conv=3, heads=1, key_heads=1, key_dim=1, head_dim=1)  # its convolution sees three tokens
DIGIT, DIGITS = 16, 12  # the base of the number in a state, and how many tokens the number holds exactly
SMALL = 2.0**-30  # keys, whose squares are too small to count


def _newest(batch: Batch, storage: KVStorage) -> Iterator[History]:
    """Yield the newest tokens of each row's text as records hold them; a digit is a token plus 1, and 0 is none.

    The convolution hands on the row's token and the two before it. The last of these changes the state:
    S = S / DIGIT + digit, without rounding.
    """
    states, digits = StoredKeys(batch, storage, {}, {}), (batch.tokens + 1).to(torch.float64)
    columns = digits[:, None].expand(-1, STATE.width)
    seen = states.convolve(1, STATE, columns, torch.eye(STATE.conv, dtype=torch.float64).flip(0))
    one = torch.ones(len(digits), 1, dtype=torch.float64)
    rows = StateInputs(SMALL * one[..., None], seen[:, None, -1:] / SMALL, one / DIGIT, one, one[..., None])
    for (*newest, _), total in zip(seen.tolist(), states.recur(1, STATE, rows).flatten().tolist(), strict=True):
        while total > 0 and len(newest) < DIGITS:
            digit, rest = divmod(total, 1)
            total = DIGIT * rest
            newest.append(digit)
        yield tuple(int(digit) - 1 for digit in reversed(newest) if digit)


def _with_newest(prefix: History, newest: History) -> History:
    """Return a text whose newest tokens are those that its state holds."""
    assert len(newest) == min(len(prefix), DIGITS), "the state of another text"
    return (*prefix[: len(prefix) - len(newest)], *newest)


def after_source(source: Sequence[int], history: History) -> History:
    """Return a source and a text after it as one history; no other source and text have the same one."""
    return (len(source), *source, *history)


def conditioned(table: Table, source: Sequence[int]) -> Table:
    """Return the table of an encoder-decoder model's texts for one source."""
    return lambda history: table(after_source(source, history))


def _column(values: Tensor) -> Tensor:
    return values.to(torch.float64)[:, None, None]


def _stored_source(segment: Segment, block_size: int, storage: KVStorage) -> History:
    """Read a sequence's encoded source back from the storage; it must be whole and in order."""
    length = segment.source_length
    slots = [segment.source_table[place // block_size] * block_size + place % block_size for place in range(length)]
    tokens, places = (part.flatten().tolist() for part in storage.read(0, torch.tensor(slots)))
    assert places == [-1 - place for place in range(length)], "not a whole source in order"
    return tuple(int(token) for token in tokens)


def _prefixes(batch: Batch, storage: KVStorage) -> Iterator[History]:
    first = 0
    for segment, slots in zip(batch.segments, context_slots(batch), strict=True):
        rows = slice(first, first + segment.num_rows)
        first = rows.stop
        visible = visible_keys(segment, batch.positions[rows], None).tolist()
        tokens, positions = (part.flatten().to(torch.int64).tolist() for part in storage.read(0, slots))
        for own, position, mask in zip(
            batch.tokens[rows].tolist(), batch.positions[rows].tolist(), visible, strict=True
        ):
            assert [*compress(positions, mask)] == [*range(position + 1)], "not a whole prefix in order"
            prefix = tuple(compress(tokens, mask))
            assert prefix[-1] == own, "the row's own token is not its last visible one"
            yield prefix


NextProbs = Callable[[History], Sequence[float]]  # all tokens so far -> the next token's distribution
Joint = dict[tuple[int, ...], float]  # sequences of tokens -> probability

EXACT = 1e-12  # largest difference of probabilities that rounding explains

NODE_KINDS = ("dense", "rational", "zeros", "equal supports", "disjoint", "tie", "near", "one-hot", "both one-hot")
FULL_SUPPORT = ("dense", "rational", "tie", "near")  # kinds without zeros
MIXED = ("dense",) * 6 + NODE_KINDS


@dataclass(frozen=True)
class Pair:
    """Target and draft distributions for every context; the context determines their kind.

    kinds: the `NODE_KINDS` that occur; repeated ones occur more often.
    """

    seed: int
    vocab_size: int
    kinds: tuple[str, ...] = MIXED

    def target(self, history: History) -> Sequence[float]:
        """Return the target's logits."""
        return _logits(self, history)[0]

    def draft(self, history: History) -> Sequence[float]:
        """Return the draft's logits."""
        return _logits(self, history)[1]


@functools.lru_cache(maxsize=1 << 14)
def _logits(pair: Pair, history: History) -> tuple[tuple[float, ...], ...]:
    """Return the target's logits after a history, and the draft's. Cached: an enumeration needs the same ones often."""
    rng = np.random.default_rng([pair.seed, pair.vocab_size, *history])
    kind = pair.kinds[rng.integers(len(pair.kinds))]
    shift = rng.uniform(-1, 2)  # logits of both signs, for penalties that look at the sign
    distributions = two_distributions(kind, pair.vocab_size, rng)
    return tuple(tuple(math.log(p) + shift if p > 0 else -math.inf for p in each.tolist()) for each in distributions)


def two_distributions(kind: str, vocab_size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw one (p, q) of a kind."""
    p, q = rng.dirichlet(np.ones(vocab_size), size=2)
    mask = _proper_subset(vocab_size, rng)
    match kind:
        case "rational":
            p, q = (rng.integers(1, 4, vocab_size).astype(float) for _ in range(2))
        case "zeros":
            p, q = p * mask, q * _proper_subset(vocab_size, rng)
        case "equal supports":
            p, q = p * mask, q * mask
        case "disjoint":
            p, q = p * mask, q * ~mask
        case "tie":
            q = p
        case "near":
            q = p + 0.02 * q
        case "one-hot":
            p, q = (p, _one_hot(vocab_size, rng)) if rng.random() < 0.5 else (_one_hot(vocab_size, rng), q)
        case "both one-hot":
            p, q = _one_hot(vocab_size, rng), _one_hot(vocab_size, rng)
    return p / p.sum(), q / q.sum()


def _proper_subset(size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a mask with at least one True and one False."""
    mask = np.zeros(size, dtype=bool)
    mask[rng.permutation(size)[: rng.integers(1, size)]] = True
    return mask


def _one_hot(size: int, rng: np.random.Generator) -> np.ndarray:
    mask = np.zeros(size)
    mask[rng.integers(size)] = 1.0
    return mask


def softmax(logits: Sequence[float]) -> list[float]:
    """Return the distribution of logits."""
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def joint_distribution(
    distribution: NextProbs, start: History, length: int, is_over: Callable[[History], bool]
) -> Joint:
    """Return the distribution of the next `length` tokens after `start`, drawn one by one up to an end."""
    return completed({(): 1.0}, distribution, start, length, is_over)


def completed(
    outcomes: Mapping[tuple[int, ...], float],
    distribution: NextProbs,
    start: History,
    length: int,
    is_over: Callable[[History], bool],
) -> Joint:
    """Continue every outcome with `distribution` until it has `length` tokens or is over."""
    joint: Joint = {}
    pending = list(outcomes.items())
    while pending:
        tokens, probability = pending.pop()
        if len(tokens) >= length or (tokens and is_over(tokens)):
            joint[tokens] = joint.get(tokens, 0.0) + probability
            continue
        for token, weight in enumerate(distribution((*start, *tokens))):
            if weight > 0:
                pending.append(((*tokens, token), probability * weight))
    return joint


def deviation(first: Mapping[tuple[int, ...], float], second: Mapping[tuple[int, ...], float]) -> float:
    """Return the largest difference of two distributions' probabilities."""
    return max(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in {*first, *second})


Outcome = TypeVar("Outcome", bound=Hashable)


class TooManyWaysError(Exception):
    """The enumeration has more branches than allowed."""


@dataclass
class Branches:
    """One path through a tree of random decisions: first those of the script, then always the first option.

    `probability` is that of the path. Options of probability 0 are skipped.
    """

    script: tuple[int, ...] = ()
    probability: float = 1.0
    taken: list[int] = field(default_factory=list)
    untaken: list[tuple[int, ...]] = field(default_factory=list)

    def decide(self, weights: Sequence[float]) -> int:
        """Return the index of an option, chosen with probability proportional to its weight."""
        options = [index for index, weight in enumerate(weights) if weight > 0]
        if len(self.taken) < len(self.script):
            choice = self.script[len(self.taken)]
        else:
            choice = options[0]
            self.untaken += [(*self.taken, other) for other in options[1:]]
        self.taken.append(choice)
        self.probability *= weights[choice] / sum(weights)
        return choice


class EnumeratingChance(Chance):
    """A `Chance` whose decisions come from `Branches`."""

    def __init__(self, branches: Branches) -> None:
        self._branches = branches

    @override
    def accept(self, probability: float) -> bool:
        assert 0 <= probability <= 1, f"{probability} is not a probability"
        return self._branches.decide([1 - probability, probability]) == 1

    @override
    def draw(self, weights: Tensor) -> int:
        values = [float(weight) for weight in weights.tolist()]
        assert all(value >= 0 for value in values), f"{values} are not weights"
        assert sum(values) > 0, "nothing to draw from"
        return self._branches.decide(values)


class EnumeratingChances(Chances):
    """A `Chances` whose decisions come from the branches set for the request's id."""

    def __init__(self) -> None:
        self.branches: dict[str, Branches] = {}

    @override
    def draft(self, request: Request) -> EnumeratingChance:
        return EnumeratingChance(self.branches[request.request_id])

    @override
    def verify(self, request: Request) -> EnumeratingChance:
        return EnumeratingChance(self.branches[request.request_id])


def enumerate_outcomes(run: Callable[[Branches], Outcome]) -> dict[Outcome, float]:
    """Run once per branch; return each outcome's probability."""
    return enumerate_side_by_side(lambda ways: [run(branches) for branches in ways], width=1)


def enumerate_side_by_side(
    run: Callable[[list[Branches]], list[Outcome]], width: int, most: int | None = None
) -> dict[Outcome, float]:
    """Like `enumerate_outcomes`, for a `run` that follows up to `width` branches at a time.

    Raises TooManyWaysError as soon as there are more than `most`; None = any number.
    """
    outcomes: dict[Outcome, float] = {}
    pending: list[tuple[int, ...]] = [()]
    followed = 0
    while pending:
        ways = [Branches(script) for script in pending[-width:]]
        del pending[-width:]
        for outcome, branches in zip(run(ways), ways, strict=True):
            outcomes[outcome] = outcomes.get(outcome, 0.0) + branches.probability
            pending += branches.untaken
        followed += len(ways)
        if most is not None and followed + len(pending) > most:
            raise TooManyWaysError
    return outcomes


Result = tuple[tuple[int, ...], int]  # output, accepted draft tokens
ENDLESS = SamplingParams(max_tokens=None)
ROOM = 24  # tokens after the prompt that fit; more than any enumeration reaches


@dataclass(frozen=True)
class Case:
    """A request whose first speculative steps are enumerated.

    length: draft nodes. steps: verifications with a draft. idle: the most verifications without one; None = the number
    that a long prompt may need. width: branches followed in one batch. budget: the most rows of a step. The caches must
    not keep prefixes, or one branch would change the steps of the next. source: what an encoder-decoder model reads,
    whose decoder has the prompt; () = the model is a decoder alone.
    """

    pair: Pair
    length: int
    params: SamplingParams = ENDLESS
    verification: str = "rejection"
    prompt: History = (0,)
    ends: frozenset[int] = frozenset()
    steps: int = 1
    width: int = 1
    budget: int = 1024
    idle: int | None = None
    source: History = ()

    @property
    def limits(self) -> Limits:
        """The sizes of the engine that runs it."""
        return Limits(len(self.prompt) + ROOM, self.width, self.budget)

    @property
    def rounds(self) -> int:
        """The most verifications; after a prompt of several tokens the first ones may have no draft."""
        needed = 0 if len(self.prompt) == 1 else len(self.prompt) + 1
        return self.steps + (needed if self.idle is None else self.idle)

    @property
    def distribution(self) -> NextProbs:
        """The target's own distribution, one token at a time."""
        return self.distribution_of(conditioned(self.pair.target, self.source) if self.source else self.pair.target)

    def distribution_of(self, table: Table) -> NextProbs:
        """Return the distribution of a table's logits under this request's settings."""
        known: dict[History, list[float]] = {}

        def distribution(history: History) -> list[float]:
            if history not in known:
                known[history] = self.transformed(table(history), history)
            return known[history]

        return distribution

    def transformed(self, logits: Sequence[float], history: History) -> list[float]:
        """Return the distribution of one context's logits under this request's settings."""
        request = Request(
            seq_id=0,
            request_id="",
            index=0,
            prompt=self.prompt,
            params=self.params,
            seed=0,
            metrics=RequestMetrics(TimingMetrics(arrival=0.0)),
            stops=Stops(self.ends),
            tokens=list(history),
        )
        probs = distribution(torch.tensor([logits], dtype=torch.float64), [Node(request)])[0]
        return [float(each) for each in probs.tolist()]

    def is_over(self, output: History) -> bool:
        """Whether an output ends its request."""
        return len(output) >= self.params.min_tokens and output[-1] in self.ends


@dataclass(frozen=True)
class Enumerated:
    """Every outcome of a case with its probability."""

    case: Case
    results: Mapping[Result, float] = field(repr=False)

    @property
    def tokens(self) -> Joint:
        """The distribution of the output."""
        joint: Joint = {}
        for (output, _), probability in self.results.items():
            joint[output] = joint.get(output, 0.0) + probability
        return joint

    @property
    def mean_accepted(self) -> float:
        """The expected number of accepted draft tokens."""
        return sum(accepted * probability for (_, accepted), probability in self.results.items())

    def deviation(self) -> float:
        """Return the largest difference of the joint distribution, completed by the target, from the target's own."""
        case, outcomes = self.case, self.tokens
        distribution, depth = case.distribution, max(len(output) for output in outcomes)
        ours = completed(outcomes, distribution, case.prompt, depth, case.is_over)
        return deviation(ours, joint_distribution(distribution, case.prompt, depth, case.is_over))


class Stepping(Protocol):
    """Runs a case: an `Engine`, or a wrapper that also observes it."""

    def add_request(
        self, prompt: Sequence[int], params: SamplingParams, request_id: str, *, source: Sequence[int] = ()
    ) -> list[Request]:
        """See `Engine.add_request`."""
        ...

    def step(self) -> list[StepOutput]:
        """See `Engine.step`."""
        ...

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        ...


def enumerate_case(case: Case, build: Callable[[EnumeratingChances], Stepping], most: int | None = None) -> Enumerated:
    """Follow every branch of a case through one engine, which serves all of them.

    Raises TooManyWaysError if there are more than `most`.
    """
    chances = EnumeratingChances()
    engine = build(chances)
    results = enumerate_side_by_side(lambda ways: _run(case, engine, chances, ways), case.width, most)
    assert abs(sum(results.values()) - 1) < 1e-12, "branches were lost"
    return Enumerated(case, results)


def _run(case: Case, engine: Stepping, chances: EnumeratingChances, ways: list[Branches]) -> list[Result]:
    chances.branches = {str(index): branches for index, branches in enumerate(ways)}
    requests = list[Request]()
    for name in chances.branches:
        requests += engine.add_request(case.prompt, case.params, name, source=case.source)
    for request in requests:
        request.work = NO_WORK  # each way through the engine has the same steps, however busy the machine is
    running = list(requests)
    while running:
        engine.step()
        for request in [request for request in running if _is_done(request, case)]:
            running.remove(request)
            engine.abort(request.request_id)
    return [_result(request) for request in requests]


def _is_done(request: Request, case: Case) -> bool:
    if request.ending.error is not None:
        raise request.ending.error
    speculated = request.metrics.speculative_decoding.num_spec_steps
    return request.finished or speculated >= case.steps or request.rounds >= case.rounds


def _result(request: Request) -> Result:
    return tuple(request.output), request.metrics.speculative_decoding.num_accepted_draft_tokens
