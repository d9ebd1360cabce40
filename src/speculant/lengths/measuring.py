"""Measures the costs of a target pass and of a draft on this machine, for draft-length policies that need them.

The first tokens of a large model do not wait until all is measured. The measurement consists of slices, which an engine
runs between its first steps, each time for about as long as the last step took. These steps have no drafts. A slice
holds no blocks of the target's cache after its end. If the machine was not busy, the curves are kept on disk, in
$XDG_CACHE_HOME/speculant/costs, under a key of models, types and machine. The policy follows the real steps from then
on, so a curve only has to have the right shape. If the first steps take much more or less time than the curve says, the
file is deleted, and the next start measures again.

The passes of an encoder-decoder model read a source of SOURCE_LENGTH tokens, or of the longest that is possible if that
is shorter. It is encoded as one token, whose keys and values are copied. The encoder's own time is no part of a curve.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import exp, inf, log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculant.cache import KVCache, Moves, Source
from speculant.config import Limits
from speculant.drafting import Drafter
from speculant.errors import CapacityError, Guard
from speculant.files import Run, costs_folder, is_steady, key_of, read_measured, spread_of, write_file
from speculant.kernels import Sampler
from speculant.lengths.costs import UNKNOWN_COSTS, CostCurve, KeyCosts, Reading, StepCosts
from speculant.metrics import RequestMetrics, TimingMetrics
from speculant.models import CausalLM, SequenceInput, build_batch, encode_sources, relative_reads_of
from speculant.params import SamplingParams
from speculant.sampling import row_maxima, sampling_settings
from speculant.scheduling import NO_DRAFT
from speculant.types import CommittedRows, DraftTree, Request

logger = logging.getLogger(__name__)

SLICE_S = 0.05  # that every request can wait for
# The most important sizes first: there is time for few of them with a large model.
ROWS = (1, 8, 16, 4, 2, 48, 24, 6, 3, 12, 5, 7, 9, 10, 32, 14, 17, 20, 64, 40, 96, 128)
DEPTHS, SEQUENCES = (1, 4, 8, 2, 16), (1, 8)
LEAST_LONG, LONG_CONTEXT = 192, 2048  # tokens of the texts that show the cost of attention
SOURCE_LENGTH = 128  # tokens
DRAFTED_AFTER = 16  # tokens of all sequences together
MANY_ROWS = 8  # of a second pass after the longer text; the first has one row
TEXTS = (16, 64, 256, 1024)  # tokens that a drafter with a cache of its own reads; longer ones if it is fast enough
START_S = 0.3  # of the measurement of a large model, when an engine is built
BUDGET_S = 0.3  # for the target, and for each method and number of sequences
LONG_SHARE = 0.3  # of it for passes after a long text
LEAST_SIZES, LEAST_ROUNDS, MOST_ROUNDS = 2, 2, 6  # a small model: each round takes time from a short batch
LEAST_ROWS, LEAST_PASSES = 3, 4  # sizes of the target's passes, and passes in all: the cheapest size, one row, has two
COPIED = 128  # keys at a time, so that the copies take little memory
DISAGREE = 1.5  # times the spread: a ratio of steps' times to kept ones, or of kept ones to these, that is too large
PROCEDURE = "8"  # changes when the measurements change
GOLDEN = 2654435769  # the golden ratio's fraction, times 2^32
GREEDY = SamplingParams(temperature=0, max_tokens=None)


Slices = Generator[None, None, None]
Times = dict[int, list[Run]]  # the runs of each size


class Measurement:
    """Measures something in slices. active: some are left, and nothing is drafted until they have run."""

    def __init__(self) -> None:
        self._make: Callable[[], Iterator[None]] = lambda: iter(())
        self._slices: Iterator[None] = iter(())
        self._guard = Guard(logger, "and drafts have the usual costs")
        self.active = False

    def begin(self, make: Callable[[], Iterator[None]]) -> None:
        """Take over a function that makes the slices; each `next` runs one. After an interrupt they begin anew."""
        self._make, self._slices, self.active = make, make(), True

    @torch.inference_mode()
    def run(self, seconds: float) -> None:
        """Run the next slice, and further ones until `seconds` are over."""
        started = time.perf_counter()
        while self.active:
            try:
                next(self._slices)
            except StopIteration:
                self.active = False
            except BaseException as error:  # noqa: BLE001 - anything but a failure is raised again
                self._slices = self._make()
                self._guard.note("the measurement of costs", error)
                self.active = False
            if time.perf_counter() - started >= seconds:
                break

    def finish(self) -> None:
        """Run all slices that are left."""
        self.run(inf)


class Calibration(Measurement):
    """Measures the costs of a target with its cache, and of drafters by method.

    identity: texts that name models, types and kernels; together with the machine they are the key of the kept curves.
    seq_ids: yields ids of sequences that nobody else has; an engine's requests take their ids from it too.
    """

    def __init__(
        self,
        target: CausalLM,
        cache: KVCache,
        sampler: Sampler,
        drafters: Mapping[str, Drafter],
        limits: Limits,
        identity: Sequence[str],
        seq_ids: Iterator[int] | None = None,
    ) -> None:
        super().__init__()
        self._target, self._cache, self._sampler, self._drafters = target, cache, sampler, drafters
        self._limits, self._identity = limits, identity
        self._seq_ids = itertools.count(1) if seq_ids is None else seq_ids
        self._places = itertools.count()  # of the tokens in measured passes
        self._source = self._make_source()
        self._source_id = None if self._source is None else self._source.seq_id
        self._missed = list[int]()  # sizes of the runs that were left out, because requests held too many blocks
        self._runs = list[Sequence[Run]]()  # of passes and drafts, by size

    def costs(self) -> StepCosts:
        """Return the curves: from disk if they are kept there, else usual ones, until the measurement fills them in."""
        engine = str(torch.get_num_threads()), *self._identity, *sorted(self._drafters), str(self._limits)
        path, costs = costs_folder() / f"{key_of([PROCEDURE, *engine])}.json", StepCosts(CostCurve(UNKNOWN_COSTS))
        kept = read_curves(path)
        if kept is None:
            self.begin(partial(self._measured, costs, path))
        else:
            self._fill(costs, kept, path)
        return costs

    def _fill(self, costs: StepCosts, kept: Mapping[str, Any], path: Path) -> None:
        costs.passes = CostCurve(points(kept["passes"]), relative_reads_of(self._target))
        costs.passes.level.learnt = partial(drop_if_wrong, path, kept["spread"])
        costs.keys = KeyCosts(*kept["keys"])
        costs.readings = {method: Reading(*seconds) for method, seconds in kept["readings"].items()}
        costs.drafts = {
            method: {int(count): CostCurve(points(curve)) for count, curve in curves.items()}
            for method, curves in kept["drafts"].items()
        }
        costs.tables.clear()

    def _measured(self, costs: StepCosts, path: Path) -> Slices:
        """Measure everything, and keep the curves if they are complete and the machine was not busy."""
        self._missed.clear()
        self._runs.clear()
        found = dict[str, Any]({"drafts": {}, "readings": {}})
        passes = found["passes"] = yield from self._passes()
        if 1 not in passes:
            logger.info("requests left no room to measure the costs of passes: drafts have the usual costs")
            return
        found["keys"] = yield from self._keys(passes)
        guard = Guard(logger, "and its drafts count as free")
        for method, drafter in self._drafters.items():
            try:
                if curves := (yield from self._curves(drafter)):
                    found["drafts"][method] = curves
                if drafter.needs.own_cache:
                    yield from self._read(method, drafter, passes[1], found["readings"])
            except BaseException as error:  # noqa: BLE001 - anything but a failure is raised again
                guard.note(f"drafter {method!r}", error)
                self._missed.append(0)
        found["spread"] = spread_of(self._runs)
        self._fill(costs, found, path)
        if is_steady(found["spread"]) and not self._missed:
            write_file(path, found)
            logger.info("measured the costs of passes and drafts")
        else:
            why = "some are missing" if self._missed else "other programs were busy"
            logger.info("measured the costs of passes and drafts; %s: they are measured again at the next start", why)

    def _passes(self) -> Generator[None, None, dict[int, float]]:
        """Measure the seconds of a pass and its distributions, by rows."""
        nodes = self._target.needs.most_nodes
        most = min(self._limits.max_model_len, self._limits.max_num_batched_tokens, self._free_tokens())
        most = most if nodes is None else min(most, 1 + nodes)
        sizes = [rows for rows in ROWS if rows <= max(1, most)]
        times = yield from self._timing(0, sizes, least=LEAST_ROWS, runs=LEAST_PASSES)
        self._runs.extend(times.values())
        return least_seconds(times)

    def _keys(self, short_s: Mapping[int, float]) -> Generator[None, None, KeyCosts]:
        """Measure the cost of attention after a long text, which consists of copies of one key."""
        length = min(LONG_CONTEXT, self._limits.max_model_len - MANY_ROWS, self._free_tokens() - MANY_ROWS)
        sizes = [1, MANY_ROWS]
        if length < LEAST_LONG or not short_s.keys() >= {*sizes}:
            return KeyCosts()
        long_s = least_seconds((yield from self._timing(length, sizes, share=LONG_SHARE, is_warm=True)))
        if not long_s.keys() >= {*sizes}:
            return KeyCosts()
        first_s, many_s = (max(0.0, long_s[rows] - short_s[rows]) / length for rows in sizes)
        return KeyCosts(first_s / short_s[1], max(0.0, many_s - first_s) / (MANY_ROWS - 1) / short_s[1])

    def _timing(self, length: int, sizes: Sequence[int], **rounds: Any) -> Generator[None, None, Times]:
        """Time passes of some rows after a text; rounds: see `timing`."""
        own = next(self._seq_ids), length
        return timing(partial(self._decode, *own), sizes, partial(self._text, *own), self._missed, **rounds)

    @contextmanager
    def _text(self, seq_id: int, length: int) -> Iterator[None]:
        """Fill the target's cache with a text until the context ends: a key, and copies of it. It has the source."""
        with self._encoded():
            try:
                if length:
                    self._forward([SequenceInput(seq_id, [0], NO_DRAFT, source=self._source_id)])
                    self._copy_key(seq_id, length)
                yield
            finally:
                self._cache.release(seq_id)

    def _decode(self, seq_id: int, length: int, rows: int) -> None:
        """Compute a text's newest token, and a chain after it.

        No two tokens of passes are equal, as far as the vocabulary allows: equal ones would use the same experts.
        """
        places, vocab_size = itertools.islice(self._places, rows), self._target.vocab_size
        token, *chain = (spread_token(place, vocab_size) for place in places)
        inputs = SequenceInput(seq_id, [token], DraftTree.chain(chain), length=length + 1, source=self._source_id)
        logits = self._target.logits(self._forward([inputs]))
        row_maxima(self._sampler.distribution(logits, [sampling_settings(GREEDY)] * rows, [None] * rows))
        self._cache.truncate_to(seq_id, length)

    def _forward(self, inputs: Sequence[SequenceInput]) -> Tensor:
        """Run a pass of the target, and return the hidden states of its rows."""
        batch = build_batch(inputs, self._cache, self._target.cache_shape.device)
        return self._target.forward(batch, self._cache.storage).last

    def _make_source(self) -> Source | None:
        """Return the source of all measured texts; None = they have none."""
        if not self._target.needs.source:
            return None
        length = max(1, min(SOURCE_LENGTH, self._limits.max_source_len))
        tokens = tuple(spread_token(place, self._target.vocab_size) for place in range(length))
        return Source(next(self._seq_ids), tokens)

    def _free_tokens(self) -> int:
        """Return how many positions a measured text finds in the target's cache beside its source."""
        return self._cache.free_tokens() - (0 if self._source is None else len(self._source.tokens))

    @contextmanager
    def _encoded(self) -> Iterator[None]:
        """Fill the target's cache with the source until the context ends: the keys of a token, and copies of them."""
        if self._source is None:
            yield
            return
        try:
            encode_sources(self._target, self._cache, [replace(self._source, tokens=self._source.tokens[:1])])
            self._copy_key(self._source.seq_id, len(self._source.tokens))
            yield
        finally:
            self._cache.release(self._source.seq_id)

    def _copy_key(self, seq_id: int, length: int) -> None:
        """Fill a sequence of one position up to a length with copies of it."""
        cache = self._cache
        sources = [block * cache.block_size for block in cache.table(seq_id)]  # one per group of layers
        chunk = min(COPIED, self._limits.max_num_batched_tokens)
        for place in range(1, length, chunk):
            copies = cache.reserve(seq_id, min(chunk, length - place))
            targets = copies.slots, *copies.others
            first, *others = (Moves([source] * len(own), own) for source, own in zip(sources, targets, strict=True))
            cache.storage.move(replace(first, others=tuple(others)))
            sources = [slots[-1] for slots in targets]
            cache.drop_unseen(seq_id)
        cache.settle(seq_id)

    def _curves(self, drafter: Drafter) -> Generator[None, None, dict[int, dict[int, float]]]:
        """Measure the seconds of drafts by the number of sequences, and by depth."""
        curves = dict[int, dict[int, float]]()
        for count in SEQUENCES:
            if count <= max(1, self._limits.max_num_seqs):
                try:
                    curves[count] = yield from self._drafts(drafter, count)
                except CapacityError:
                    self._missed.append(count)
        return curves

    def _drafts(self, drafter: Drafter, count: int) -> Generator[None, None, dict[int, float]]:
        """Measure the seconds of a draft for `count` sequences, by depth."""
        half = self._longest(drafter) // 2
        drafting = [self._sequence(min(1 + DRAFTED_AFTER // count, half), place) for place in range(count)]
        depths = [depth for depth in DEPTHS if depth <= half]
        for each in drafting:
            self._begin(drafter, each)
            self._observe(drafter, each)
        try:
            times = timing(lambda depth: drafter.propose(drafting, [depth] * count), depths)
            if drafter.needs.reads.target_cache:
                with self._encoded():
                    self._fill_target(drafting)
                    rounds = finished(times)  # in one slice, as it takes blocks of the target's cache
            else:
                rounds = yield from times
            self._runs.extend(rounds.values())
            return least_seconds(rounds)
        finally:
            for each in drafting:
                drafter.end(each)
                self._cache.release(each.seq_id)

    def _fill_target(self, drafting: Sequence[Request]) -> None:
        """Compute the target's keys and values of all tokens but the newest."""
        source, length = self._source_id, len(drafting[0].tokens)
        if length > 1:
            ids_and_tokens = [(each.seq_id, each.tokens[:-1]) for each in drafting]
            self._forward([SequenceInput(*each, NO_DRAFT, length=length, source=source) for each in ids_and_tokens])

    def _read(self, method: str, drafter: Drafter, slice_s: float, readings: dict[str, tuple[float, float]]) -> Slices:
        """Measure how long a drafter takes to read texts, up to the longest one that it reads within a slice."""
        room, before = self._longest(drafter) - 2, (0, 0.0)
        for index, length in enumerate(min(each, room) for each in TEXTS):
            token_s, key_s = readings.get(method, (0.0, 0.0))
            if length <= before[0] or before[1] * length > max(SLICE_S, slice_s):
                break
            mean_s = self._reading_s(drafter, self._sequence(length, index + 1)) / max(1, length)
            if index:
                key_s = max(0.0, mean_s - before[1]) / ((length - before[0]) / 2)
            token_s, before = max(0.0, mean_s - key_s * length / 2), (length, mean_s)
            readings[method] = token_s, key_s
            yield

    def _longest(self, drafter: Drafter) -> int:
        """Return the longest text that the engine has and a drafter can read."""
        return min(self._limits.max_model_len, drafter.needs.max_positions or self._limits.max_model_len)

    def _reading_s(self, drafter: Drafter, text: Request) -> float:
        """Return the seconds a drafter takes to read a new text and to draft a token, once it has the source."""
        self._begin(drafter, text)
        try:
            if text.source:
                drafter.propose([replace(text, tokens=text.tokens[:1])], [1])  # it encodes the source
            started = time.perf_counter()
            self._observe(drafter, text)
            for _ in range(1 + len(text.tokens) // max(1, self._limits.max_num_batched_tokens)):
                if drafter.propose([text], [1])[0].size:
                    break
            return time.perf_counter() - started
        finally:
            drafter.end(text)

    def _sequence(self, length: int, place: int) -> Request:
        """Make a sequence to draft for; sequences at other places have other tokens."""
        source = () if self._source is None else self._source.tokens
        return make_sequence(next(self._seq_ids), usual_tokens(length, self._target.vocab_size, place), source=source)

    def _begin(self, drafter: Drafter, text: Request) -> None:
        """Begin a sequence; the values of its source's states do not matter here."""
        drafter.begin(text)
        if self._source is not None and (drafter.needs.reads.encoder or drafter.needs.reads.target_cache):
            drafter.observe_source(text, replace(self._source, states=self._zeros(len(self._source.tokens))))

    def _observe(self, drafter: Drafter, text: Request) -> None:
        """Give a drafter hidden states for a sequence's prompt; their values do not matter here."""
        needs, tokens = drafter.needs, text.tokens[:-1]
        if needs.hidden_layers:
            hidden = (self._zeros(len(tokens) + needs.target_inputs),) * len(needs.hidden_layers)
            drafter.observe(text, CommittedRows(0, tokens, text.tokens[-1:], hidden))

    def _zeros(self, rows: int) -> Tensor:
        return torch.zeros(rows, self._target.hidden_size, dtype=torch.float32, device=self._target.cache_shape.device)


def spread_token(place: int, vocab_size: int) -> int:
    """Return a token of a sequence that visits the vocabulary evenly: by multiples of the golden ratio, modulo 1."""
    return place * GOLDEN % 2**32 * vocab_size >> 32


def usual_tokens(length: int, vocab_size: int, place: int = 0) -> list[int]:
    """Return the tokens of a text; texts at other places have other tokens."""
    return [(7 * at + place) % vocab_size for at in range(length)]


def make_sequence(
    seq_id: int, tokens: Sequence[int], params: SamplingParams = GREEDY, source: tuple[int, ...] = ()
) -> Request:
    """Make a sequence that is measured, and that no caller waits for."""
    metrics = RequestMetrics(TimingMetrics(arrival=0.0))
    return Request(seq_id, "measured", 0, tuple(tokens), params, 0, metrics, source=source, tokens=[*tokens])


def timed(run: Callable[[int], object], sizes: Sequence[int], runs: list[Sequence[Run]]) -> dict[int, float]:
    """Return the seconds of `run` at sizes; only at the first ones if the time budget allows no more.

    runs: gets the runs of each size.
    """
    rounds = finished(timing(run, sizes))
    runs.extend(rounds.values())
    return least_seconds(rounds)


def timing(
    run: Callable[[int], object],
    sizes: Sequence[int],
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    missed: list[int] | None = None,
    *,
    least: int = LEAST_SIZES,
    runs: int = LEAST_SIZES,
    share: float = 1.0,
    is_warm: bool = False,
) -> Generator[None, None, Times]:
    """Return the runs of each round of `run` at the first sizes that have LEAST_ROUNDS rounds within the budget.

    Each run is a slice. around: makes a context for each run. missed: gets the sizes for which a cache has no room, and
    which are left out. None = all fit. least: the number of first sizes that are measured even if the budget is used
    up. runs: the least number of runs in all. share: of the budget. is_warm: it has run before; else a first run, which
    takes memory and fills caches, is not counted.
    """
    times, done, spent_s, budget_s, chosen = Times(), 0, 0.0, share * BUDGET_S, [*sizes]

    def run_of(size: int) -> Run | None:
        try:
            with around():
                return Run.of(partial(run, size))
        except CapacityError:
            if missed is None:
                raise
            missed.append(size)
            return None

    if not is_warm:
        run_of(sizes[0])
        yield
    for place, size in enumerate(chosen * MOST_ROUNDS):
        if place == least:
            chosen = chosen[: max(LEAST_SIZES, int(budget_s / LEAST_ROUNDS * place / max(spent_s, 1e-9)))]
        if spent_s > budget_s and done >= runs:
            break
        if size in chosen:
            own = run_of(size)
            if own is None:
                chosen.remove(size)
            else:
                times.setdefault(size, []).append(own)
                spent_s, done = spent_s + own.elapsed_s, done + 1
            yield
    return times


def finished(slices: Generator[None, None, Times]) -> Times:
    """Run all slices at once, and return the times."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            times: Times = end.value
            return times


def least_seconds(rounds: Mapping[int, Sequence[Run]]) -> dict[int, float]:
    """Return the least time of the rounds of each size and all larger sizes: other programs only add to it."""
    least, found = inf, dict[int, float]()
    for size in sorted(rounds, reverse=True):
        least = found[size] = max(min(least, *(run.elapsed_s for run in rounds[size])), 1e-9)
    return dict(sorted(found.items()))


def drop_if_wrong(path: Path, spread: float, level: float) -> None:
    """Delete kept curves that the first steps disagree with. level: the logarithm of their time over the curves'."""
    if abs(level) > log(DISAGREE * max(1.0, spread)):
        with suppress(OSError):
            path.unlink(missing_ok=True)
        logger.info("steps take %.2f of the measured time: costs are measured again at the next start", exp(level))


def points(kept: Mapping[str, float]) -> dict[int, float]:
    """Return a curve's points; in JSON their keys are text."""
    return {int(size): float(seconds) for size, seconds in kept.items()}


def read_curves(path: Path) -> dict[str, Any] | None:
    """Return kept curves; None if there are none, or the file is damaged."""
    try:
        kept = read_measured(path)
        curves = [kept["passes"], *(curve for each in kept["drafts"].values() for curve in each.values())]
        pairs = [kept["keys"], *kept["readings"].values()]
        sound = all(len(pair) == 2 and all(0 <= each < 1e6 for each in pair) for pair in pairs)
        sound = sound and all(
            curve and all(0 < seconds < 1e6 for seconds in points(curve).values()) for curve in curves
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return kept if sound else None
