"""A state machine over the real engine and oracle models: one thing happens, then everything is checked.

What happens is admit, step, abort, and passes that break; finish, preempt, evict, fork, copy and refuse
follow from it, for the caches are as small as they may be.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest

from speculant.cache import KVCache, TensorStorage, slotted_cache
from speculant.drafting import Drafter, Drafters, DraftModelRunner
from speculant.engine import Engine, EngineOptions, Need, load_verifiers
from speculant.errors import CapacityError, RequestError
from speculant.lengths import Fixed
from speculant.params import SamplingParams
from speculant.scheduling import PREPARED
from speculant.types import ANYONE, Client, Request, Sender, StepOutput
from tests.beams import found_by, is_fed
from tests.blocks import table_of
from tests.caches import seen_from
from tests.exactness.plain_beams import Found, exact_distribution, plain_beams
from tests.figures import assert_figures
from tests.oracle import (
    END,
    Mismatch,
    PlainChances,
    V,
    assert_holds,
    assert_own_tokens,
    assert_prompt_logprobs,
    logits_after,
    origin,
    prefix_hashes,
)
from tests.schedules import MAX_LEN, Digits, Kind, Setup, drawn_params, drawn_prompt, drawn_source, read_schedule
from tests.watched import (
    CountedCache,
    Fault,
    FragileModel,
    Guesser,
    InjectedError,
    Raised,
    WatchedDrafter,
)

PATIENCE = 3000  # steps in which whoever is left at the end must end
VERIFIERS = load_verifiers()
USUAL = SamplingParams()
CLIENTS = (ANYONE, ANYONE, Client("one"), Client("two", 2.0))

ERRORS: tuple[Callable[[], BaseException], ...] = (
    InjectedError,
    lambda: CapacityError("there is no room, says the test", "wait."),
    KeyboardInterrupt,
)


class Ledger:
    """The requests that are not over, and the tokens that each has got."""

    def __init__(self, tally: Counter[str]) -> None:
        self.live: dict[int, Request] = {}
        self.raised: list[Raised] = []
        self.tally = tally
        self._told: dict[int, list[int]] = {}
        self._steps: dict[int, list[list[StepOutput]]] = {}  # what each step gave a sequence

    def open(self, requests: Sequence[Request]) -> None:
        """Note new requests."""
        self.live.update({request.seq_id: request for request in requests})
        self._told.update({request.seq_id: [] for request in requests})
        self._steps.update({request.seq_id: [] for request in requests})

    def hear(self, outputs: Sequence[StepOutput]) -> None:
        """Note a step's outputs: exactly the committed tokens, in order, and every end once."""
        seq_ids = {(request.request_id, request.index): request.seq_id for request in self.live.values()}
        gained: dict[int, list[StepOutput]] = {}
        for output in outputs:
            request = self.live[seq_ids[output.request_id, output.index]]
            said = self._told[request.seq_id]
            if output.token is not None:
                said.append(output.token)
                gained.setdefault(request.seq_id, []).append(output)
            ends = request.finished and len(said) == request.num_output
            assert output.finish_reason == (request.ending.reason if ends else None), "an end in the wrong place"
        for seq_id, step in gained.items():
            self._steps[seq_id].append(step)
        for request in list(self.live.values()):
            searches = request.search is not None and not request.finished
            assert self._told[request.seq_id] == ([] if searches else request.output), "the caller heard something else"
            if request.finished:
                self.close(request)

    def close(self, request: Request) -> None:
        """Check a request that is over, and forget it."""
        del self.live[request.seq_id]
        assert_own_beam(request) if request.params.beam_width else assert_own_tokens(request)
        reason, ends = request.ending.reason, [token in request.stops.end_token_ids for token in request.output]
        assert not any(ends[:-1]), "tokens behind an end"
        if request.search is None:
            assert_figures(request.metrics, self._steps[request.seq_id])
        if reason in ("stop", "length"):
            assert_prompt_logprobs(request)
            full = request.num_output == request.params.max_tokens or len(request.tokens) == MAX_LEN
            assert (ends[-1], ends[-1] or full) == (reason == "stop", True), f"it ended for no {reason}"
        elif reason == "error":
            blame = [seq_ids for error, seq_ids in self.raised if error is request.ending.error]
            culprit = request.seq_id if is_fed(request) else request.seq_id - request.index
            assert blame in ([[culprit]], [[request.source]]), (
                f"ended by another's error, or by one of its own: {request.ending.error!r}"
            )
        self.tally[f"ended by {reason}"] += 1
        self.tally["preemptions"] += request.metrics.num_preemptions


def assert_own_beam(request: Request) -> None:
    """Assert that a sample of a search that came to its end is what the plain search finds, and else nothing."""
    if request.ending.reason in ("stop", "length"):
        params, longest = request.params, MAX_LEN - len(request.prompt)
        longest = min(longest, params.max_tokens or longest)
        assert params.beam_width is not None
        found = found_beams(
            request.source,
            request.prompt,
            params.beam_width,
            longest,
            request.stops.end_token_ids,
            params.length_penalty,
        )
        told = (tuple(request.output), *found_by(request))
        assert told == found[request.index], "not the beams of this prompt alone"
    elif request.ending.reason == "error":
        assert not request.output, "a search that failed said something"


@functools.lru_cache(maxsize=2**12)
def found_beams(
    source: tuple[int, ...], prompt: tuple[int, ...], width: int, longest: int, ends: frozenset[int], penalty: float
) -> Sequence[Found]:
    """Return the results of a search of this prompt."""
    distribution = exact_distribution(lambda history: logits_after(prefix_hashes(history, origin(source))[-1]))
    return plain_beams(distribution, prompt, width, longest, ends, penalty)


class Machine:
    """An engine beside a ledger; `act` is one step of the state machine."""

    def __init__(self, setup: Setup, tally: Counter[str]) -> None:
        self.setup, self.tally = setup, tally
        self.story: list[tuple[object, ...]] = [(setup,)]
        self.ledger = Ledger(tally)
        self.target = FragileModel(MAX_LEN, self.ledger.raised, windows=setup.windows, has_source=setup.kind.sources)
        self.draft = FragileModel(MAX_LEN, self.ledger.raised, setup.astray, setup.windows)
        self.num_added = self.num_actions = 0
        self._origins: dict[int, int] = {}  # of the texts, by sequence
        self._prepared: list[list[int]] = []  # prompts
        drafter = self._make_drafter()
        most = setup.limits.max_num_batched_tokens
        self.caches = (
            self._make_cache(setup.spare_blocks[0], most, self._max_source),
            *(drafter.caches if drafter else ()),
        )
        self.engine = Engine(
            EngineOptions(setup.limits, 0, frozenset({END}), setup.verification),
            self.target,
            self.caches[0],
            PlainChances(),
            VERIFIERS,
            Fixed(setup.spec_length),
            Drafters.of(drafter),
        )

    @property
    def _max_source(self) -> int:
        """The most tokens of a source; 0 = there are none."""
        return self.setup.limits.max_source_len if self.setup.kind.sources else 0

    def _make_cache(self, spare_blocks: int, rows: int, source: int = 0) -> KVCache:
        """Make a cache in which one sequence, and a source of so many tokens, find room for certain.

        Layers with a window have no more blocks than can be in use at once, with so many rows that are not committed.
        """
        setup, shape = self.setup, self.target.cache_shape
        if setup.kind.cache == "slotted":
            return slotted_cache(shape, setup.limits.max_num_seqs * (2 if source else 1), MAX_LEN)
        size, limits = setup.block_size, setup.limits
        need = Need(shape, size, limits.max_num_seqs, rows, rows)
        counts = need.counts(need.blocks_for(MAX_LEN) + -(-source // size) + spare_blocks)
        windows = [group.window for group in shape.groups]
        storage = TensorStorage(shape, [count * size for count in counts], "lower the test's size.")
        cache = CountedCache(storage, counts, size, setup.keep_prefixes, windows)
        return cache.watch(self.ledger.live, self.tally)

    def _make_drafter(self) -> Drafter | None:
        setup = self.setup
        if setup.kind.drafter == "model":
            cache = self._make_cache(
                setup.spare_blocks[1], 2 * setup.limits.max_num_batched_tokens * setup.limits.max_num_seqs
            )
            runner = DraftModelRunner(self.draft, cache, PlainChances(), setup.limits.max_num_batched_tokens)
            return WatchedDrafter(runner, V)
        return None if setup.kind.drafter == "none" else Guesser(setup.kind.drafter == "tree")

    def act(self, digits: Digits) -> None:
        """Do one thing and check everything."""
        digits.pick(ACTIONS)(self, digits)
        self.num_actions += 1
        self.tally["actions"] += 1
        self.check()

    def step(self, digits: Digits) -> None:
        """Let the engine go on; if it is interrupted, no text has changed."""
        before = {seq_id: list(request.tokens) for seq_id, request in self.live.items()}
        num_passes, num_raised = self.target.num_passes, len(self.ledger.raised)
        self._origins = {seq_id: origin(request.source) for seq_id, request in self.live.items()}
        self.target.fed.clear()
        try:
            outputs = self.engine.step()
        except KeyboardInterrupt:
            self.story.append(("step, interrupted",))
            self.tally["interrupts"] += 1
            assert before == {seq_id: request.tokens for seq_id, request in self.live.items()}, (
                "an interrupt changed a text"
            )
            return
        if before:
            self.story.append(("step", *((output.request_id, output.index, output.token) for output in outputs)))
            self.tally["steps"] += 1
        elif self.target.fed:
            self.tally["parts prepared"] += 1
        calm = len(self.ledger.raised) == num_raised
        assert not calm or self.target.num_passes <= num_passes + 1, "a pass failed, though nobody broke it"
        self.ledger.hear(outputs)
        self._check_texts(before)

    def _check_texts(self, before: Mapping[int, list[int]]) -> None:
        """Assert that each request was fed its own text, and holds all but its newest token."""
        for seq_id, (count, prefix) in self.target.fed.items():
            texts = self._prepared if seq_id == PREPARED else [before[seq_id]]
            assert seq_id != PREPARED or not before, "a prompt was prepared while requests ran or waited"
            fed = [prefix_hashes(text[:count], self._origins.get(seq_id, origin(()))) for text in texts]
            assert [prefix] in [each[-1:] for each in fed], "a request was fed another text than its own"
        for seq_id in before.keys() & self.live.keys():
            tokens = self.live[seq_id].tokens
            grown = len(tokens) > len(before[seq_id]) and self.live[seq_id].search is None
            assert not grown or self.caches[0].length(seq_id) == len(tokens) - 1, (
                "not all but the newest token are held"
            )

    def add(self, digits: Digits) -> None:
        """Send a prompt, perhaps one that begins like others."""
        prompt, params = drawn_prompt(digits), drawn_params(digits)
        cache_salt, priority, request_id = (
            digits.pick(("", "", "other")),
            digits.pick((0, 0, 1, -1)),
            str(self.num_added),
        )
        client = digits.pick(CLIENTS)
        source = drawn_source(digits, self._max_source) if self._max_source else []
        self.story.append(("add", request_id, prompt, params, cache_salt, priority, client, source))
        vacant = self.engine.accepts(params.n, client)
        try:
            self.ledger.open(
                self.engine.add_request(
                    prompt,
                    params,
                    request_id,
                    priority=priority,
                    cache_salt=cache_salt,
                    client=client,
                    source=source,
                )
            )
        except CapacityError:
            assert not vacant, "refused although there was room"
            self.tally["refused"] += 1
        self.num_added += 1

    def prepare(self, digits: Digits) -> None:
        """Have a prompt read ahead, where prompts are kept."""
        prompt, client = drawn_prompt(digits), digits.pick(CLIENTS)
        sender = Sender(client, 0, digits.pick(("", "", "other")))
        self.story.append(("prepare", prompt, sender))
        if not self._max_source and self.caches[0].keeps_prefixes:
            self._prepared.append(prompt)
            self.engine.prepare(prompt, sender)

    def forget(self, digits: Digits) -> None:
        """Empty the prefix index, or end all preparations."""
        self.story.append(("forget",))
        (self.engine.reset_prefix_cache, self.engine.drop_preparations)[digits.below(2)]()

    def abort(self, digits: Digits) -> None:
        """End a request from outside."""
        if self.live:
            self._abort(digits.pick(list(self.live.values())).request_id)

    def _abort(self, request_id: str) -> None:
        self.story.append(("abort", request_id))
        self.engine.abort(request_id)
        for request in [request for request in self.live.values() if request.request_id == request_id]:
            assert request.ending.reason == "abort"
            self.ledger.close(request)

    def break_passes(self, digits: Digits) -> None:
        """Let the target or the draft model fail: once for any sequence, or in every pass that feeds a certain one."""
        model, error = digits.pick((self.target, self.target, self.draft)), digits.pick(ERRORS)
        victim, early = digits.pick([None, *self.live]), digits.below(2) == 0
        source = self.live[victim].source if victim is not None and digits.below(2) else ()
        self.target.fault = self.draft.fault = None  # one at a time: an interrupt within a retry loses outputs
        times = 1 if victim is None or error is KeyboardInterrupt else 1000
        model.fault = Fault(error, times, early, source or victim)
        self.story.append(("break", "target" if model is self.target else "draft", model.fault))

    def misuse(self, digits: Digits) -> None:
        """Send impossible and unknown requests: nothing changes."""
        used = next((request.request_id for request in self.live.values()), "none")
        source = [1] if self._max_source else []
        prompt, request_id = digits.pick((([], "new"), ([1] * MAX_LEN, "new"), ([V], "new"), ([1], used)))
        if request_id == "none":
            prompt, request_id, source = [1], "new", [V] if digits.below(2) else [1] * (self._max_source + 1)
        self.engine.abort("nobody")
        with pytest.raises(RequestError):
            self.engine.add_request(prompt, USUAL, request_id, source=source)

    def close(self) -> None:
        """Let all requests end, or end them: then nothing is held."""
        self.target.fault = self.draft.fault = None
        while self.live and not self.setup.drains:
            self._abort(next(iter(self.live.values())).request_id)
        for _ in range(PATIENCE):
            if self.engine.has_unfinished() or self.engine.prepares:
                self.step(Digits(b""))
                self.check()
        assert not self.engine.has_unfinished(), "somebody does not come to an end"
        assert not self.engine.prepares, "a preparation does not come to an end"
        self.tally["prepared tokens used"] += self.engine.metrics.prepared_tokens_used
        self.check()
        pools = [pool for cache in self.caches for pool in cache.pools]
        assert all(pool.num_free == pool.num_blocks for pool in pools), "a leak"

    @property
    def live(self) -> dict[int, Request]:
        """The requests that are not over, by sequence."""
        return self.ledger.live

    def check(self) -> None:
        """Assert what holds between any two actions."""
        self.engine.check()
        assert self.engine.metrics.drafter_errors <= self.draft.num_struck, "a draft failed, though nobody broke it"
        scheduler = self.engine._scheduler
        present = [request.seq_id for request in (*scheduler.waiting, *scheduler.running)]
        fed = [seq_id for seq_id, request in self.live.items() if is_fed(request)]
        assert sorted(present) == sorted(fed), "a request was lost, doubled or kept"
        assert len(scheduler.running) <= self.setup.limits.max_num_seqs
        if self.num_actions % 4 == 0:
            self._check_memory(scheduler.running)

    def _check_memory(self, running: Sequence[Request]) -> None:
        """Assert that just the running requests hold blocks, and one of them its own slots; a leak stays till seen."""
        for cache in self.caches:
            for group, pool in enumerate(cache.pools):
                held_ids = [request.seq_id for request in running]
                if cache is self.caches[0]:
                    held_ids += [source.seq_id for source in self.engine._scheduler.sources._by_key.values()]
                tables = [self._held_blocks(cache, seq_id, group) for seq_id in held_ids]
                held = {block for table in tables for block in table}
                assert pool.num_free == pool.num_blocks - len(held), "a block is lost"
        if running:
            request = running[self.num_actions // 4 % len(running)]
            tokens = request.tokens[: self.caches[0].length(request.seq_id)]
            assert_holds(self.caches[0], request.seq_id, tokens, request.source)

    def _held_blocks(self, cache: KVCache, seq_id: int, group: int) -> list[int]:
        """Return the blocks that a sequence holds of a group: in the target's cache, those that its next row sees.

        A draft's cache has blocks of rows that were not committed when others were given back.
        """
        table = table_of(cache, seq_id, group)
        if cache is self.caches[0]:
            return table[seen_from(self.setup.windows[group], cache.length(seq_id)) // cache.block_size :]
        return table[cache._held[seq_id].tables[group].given_back :] if table else table


# each as often as it is named
ACTIONS = (
    *(Machine.step,) * 14,
    *(Machine.add,) * 7,
    *(Machine.abort,) * 2,
    *(Machine.break_passes,) * 2,
    *(Machine.prepare,) * 3,
    Machine.forget,
    Machine.misuse,
)


def run_schedule(kind: Kind, data: bytes, tally: Counter[str]) -> None:
    """Read a schedule and run it; a failure tells its story. `tally` counts what happened."""
    setup, actions = read_schedule(kind, data)
    machine = Machine(setup, tally)
    try:
        for digits in actions:
            machine.act(digits)
        machine.close()
    except (Exception, Mismatch) as error:
        error.add_note("\n".join(" ".join(map(_in_words, happening)) for happening in machine.story))
        if isinstance(error, Mismatch):
            raise AssertionError(str(error)) from error  # Hypothesis shrinks failures that are Exceptions
        raise
    tally["schedules"] += 1


def _in_words(part: object) -> str:
    if not isinstance(part, SamplingParams):
        return str(part)
    fields = ((field.name, getattr(part, field.name)) for field in dataclasses.fields(part))
    return " ".join(f"{name}={value}" for name, value in fields if value != getattr(USUAL, name))
