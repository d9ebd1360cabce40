"""Simulated machines that judge draft-length policies: their true costs and texts are known, so the best length is too.

A machine's texts are drawn in advance, and every policy and every fixed length decodes the same ones. Costs drift with
the share of the run's tokens, so that a token costs a policy and a fixed length the same. `fixed_run` needs no policy:
a fixed length's draft depends on the text alone, so each sequence's steps are found by themselves and then added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculant.lengths import ROWS

MOST = 16  # nodes of a draft
ENDS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7)
SOME_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
FIRST_TOKENS, FIRST_STEPS = 64, 200  # tokens of each sequence that a policy may lose, and steps that it may learn in
FURTHER = 0.25  # time of a key in each further row of a sequence, as a share of that in its first row
PASSAGE = 24  # tokens of a text that a lookup finds, or not
STRAY, STRAY_NODES, STRAY_ALPHA, COPIED_ALPHA = 0.3, 4, 0.25, 0.95  # of other passages, lookups find this in a share
BURST_STEPS = 10
Array = NDArray[Any]
Count = Any  # an int, or an array with one for each step


class Work(NamedTuple):
    """The work of a step. All but `sequences` may be arrays.

    keys: of all sequences, times 1 + FURTHER for each draft node. drafting: sequences for which the model drafts, to
    `depth`. asked: sequences for which a lookup searches. drafted: sequences with a draft. read: tokens that the
    drafter's model reads first. missing: the share of the target's weights that a draft displaced from the caches.
    progress: the share of the run's tokens.
    """

    sequences: int
    rows: Count
    keys: Count
    drafting: Count
    depth: Count
    asked: Count
    drafted: Count
    read: Count
    missing: Any
    progress: Any


@dataclass(frozen=True)
class Machine:
    """The truth about a machine and its texts. Seconds of passes and drafts are shares of `floor_s`, a pass of one row.

    near: of each further row up to `knee`, where bandwidth rules; slope: of each row beyond; cliffs: of all rows from a
    number up. fixed, token: of a draft, and of its tokens; crowd: of these for each further sequence. ask: of a lookup,
    for a sequence. key, read: for each key, and for each token that the drafter's model reads. rests: seconds of the
    rest of a plain step, of one with drafts in addition, for each sequence, and for each sequence with a draft.
    cache: the time of a pass without a draft before it; lingers: the share of the difference left a step later.
    noise: of the clock's logarithm. bursts: the share of steps in which all takes 1.5 to 4 times as long.
    drifts: of passes and drafts at the end, little by little or, if it `jumps`, from the middle on.
    alpha: of a draft's first token, `decay` times this of each next one; in every other passage of `switch` tokens,
    `other`. spread: standard deviation over requests. ends: each token has an alpha of its own around this one, which
    the model's scores tell, so that chains may end by them. modesty: exponent of these scores; above 1 they are too
    low. copied: share of passages that a lookup finds; vain: the same in scores that are too high. request: tokens of
    each; None = one request lasts. tokens: of the run, for each sequence. errors: of the costs of passes and drafts as
    the policy knows them at first.
    """

    group: str
    name: str
    method: str = "model"  # or lookup, or both
    sequences: int = 1
    floor_s: float = 0.03
    near: float = 0.01
    knee: int = 12
    slope: float = 0.04
    cliffs: tuple[tuple[int, float], ...] = ()
    fixed: float = 0.02
    token: float = 0.1
    crowd: float = 0.03
    ask: float = 0.002
    key: float = 0.0
    read: float = 0.002
    rests: tuple[float, float, float, float] = (1e-4, 1e-4, 1e-5, 1e-5)
    cache: float = 1.0
    lingers: float = 0.5
    noise: float = 0.03
    bursts: float = 0.0
    drifts: tuple[float, float] = (1.0, 1.0)
    jumps: bool = False
    alpha: float = 0.7
    other: float = 0.0
    switch: int | None = None
    decay: float = 1.0
    spread: float = 0.0
    ends: bool = False
    modesty: float = 1.0
    copied: float = 0.5
    vain: float = 0.0
    prompt: int = 32
    request: int | None = None
    tokens: int = 1000
    errors: tuple[float, float] = (1.0, 1.0)
    seed: int = 0

    @cached_property
    def passes(self) -> Array:
        """Return the seconds of a pass by rows, after a draft and before drift."""
        rows = np.arange(1 + max(*ROWS, self.sequences * (self.prompt + MOST + 1)))
        shares = 1 + self.near * (rows - 1) + (self.slope - self.near) * np.maximum(0, rows - self.knee)
        return self.floor_s * (shares + sum(share * (rows >= first) for first, share in self.cliffs))

    def model_s(self, sequences: Count, depth: Count) -> Any:
        """Return the seconds in which the model drafts."""
        return self.floor_s * (sequences > 0) * (self.fixed + self.token * depth) * (1 + self.crowd * (sequences - 1))

    def seconds(self, work: Work) -> tuple[Any, Any, Any]:
        """Return the seconds of a step's draft, pass and rest."""
        late = work.progress >= 0.5 if self.jumps else work.progress
        slower_pass, slower_draft = (1 + (factor - 1) * late for factor in self.drifts)
        search = self.floor_s * (self.ask * work.asked + self.read * work.read)
        draft_s = slower_draft * (search + self.model_s(work.drafting, work.depth))
        pass_s = self.passes[work.rows] + self.floor_s * self.key * work.keys
        pass_s = slower_pass * (self.cache + (1 - self.cache) * work.missing) * pass_s
        plain, drafted, each, each_drafted = self.rests
        rest_s = plain + each * work.sequences + drafted * (work.drafted > 0) + each_drafted * work.drafted
        return draft_s, pass_s, rest_s

    @cached_property
    def texts(self) -> Texts:
        """The texts, drawn from the seed."""
        return Texts(self)


class Texts:
    """The texts of all sequences: arrays [sequences, positions] with the truth at each position.

    begins: whether a request begins. room: the most nodes of a draft. kept: how many tokens of the model's longest
    draft are accepted. found, found_kept: nodes that a lookup finds, and how many of them are accepted. scores: a
    lookup's, by token. slowness: of the clock in each step's draft, pass and rest.
    """

    def __init__(self, machine: Machine) -> None:
        rng, count = np.random.default_rng(machine.seed), machine.sequences
        size = machine.tokens * (3 if count > 1 else 1) + 2 * MOST
        places, length = np.arange(size + MOST), machine.request or size + MOST
        offsets = np.arange(count)[:, None] * length // count if machine.request else np.zeros((count, 1), int)
        number, place = np.divmod(places + offsets, length)  # requests do not end all at once
        own = machine.alpha + machine.spread * rng.standard_normal((count, number.max() + 1))
        alpha = np.clip(np.take_along_axis(own, number, 1), 0.01, 0.99)
        if machine.switch is not None:
            phases = rng.integers(0, 2 * machine.switch, (count, 1)) if count > 1 else 0
            alpha = np.where((places + phases) // machine.switch % 2, machine.other, alpha)
        if machine.ends:
            alpha = rng.beta(2 * alpha, 2 * (1 - alpha))
        self.sure = alpha**machine.modesty
        kinds = rng.random((count, 1 + size // PASSAGE + 1))[:, places // PASSAGE]
        copied, stray = kinds < machine.copied, kinds > 1 - STRAY * (1 - machine.copied)
        found_alpha = COPIED_ALPHA * copied + STRAY_ALPHA * stray
        self.begins = ((place == 0) | (places == 0))[:, :size]
        self.room = np.where(self.begins, 0, np.minimum(MOST, length - place - 1)[:, :size])
        chances = rng.random((count, size + MOST))
        self.kept = np.minimum(self.room, _runs(chances, alpha, machine.decay))
        self.found = np.minimum(self.room, (MOST * copied + STRAY_NODES * stray)[:, :size])
        self.found_kept = np.minimum(self.found, _runs(chances, found_alpha, 1.0))
        self.scores = np.clip(found_alpha + machine.vain + 0.05 * rng.standard_normal(chances.shape), 0.02, 0.98)
        slow = rng.random((4096 // BURST_STEPS + 1, 2)).repeat(BURST_STEPS, 0)[:4096]
        burst = np.where(slow[:, 0] < machine.bursts, 1.5 + 2.5 * slow[:, 1], 1.0)
        self.slowness = np.exp(machine.noise * rng.standard_normal((3, 4096))) * burst  # of drafts, passes, rests

    @cached_property
    def lists(self) -> SimpleNamespace:
        """The arrays as lists, of which single values are read faster."""
        return SimpleNamespace(**{name: array.tolist() for name, array in vars(self).items()})


def _runs(chances: Array, alpha: Array, decay: float) -> Array:
    """Return for each position how many tokens of a chain of MOST are accepted from there on."""
    size = chances.shape[1] - MOST
    alive, runs = np.ones((len(chances), size), bool), np.zeros((len(chances), size), int)
    for depth in range(MOST):
        ahead = slice(depth, depth + size)
        alive &= chances[:, ahead] < decay**depth * alpha[:, ahead]
        runs += alive
    return runs


@dataclass(frozen=True)
class Run:
    """tokens, seconds: of all sequences, after each step. drafted: steps with drafts. calls: of the policy."""

    tokens: Array
    seconds: Array
    drafted: int
    calls: int = 0

    def seconds_between(self, first: float, last: float) -> float:
        """Return the seconds from one number of tokens to another."""
        begun, ended = np.interp([first, last], [0, *self.tokens], [0.0, *self.seconds])
        return float(ended - begun)


def drawn(sure: Array, least: float) -> Array:
    """Return for each position how many tokens are drawn until their chances together are below `least`."""
    size = sure.shape[1] - MOST
    path, found = np.ones((len(sure), size)), np.zeros((len(sure), size), int)
    for depth in range(MOST):
        found += path >= least
        path *= sure[:, depth : depth + size]
    return found


class FixedChoice(NamedTuple):
    """Lengths that never change: of the model's drafts, and of lookups whose first score is at least `least`.

    Without lookups, least is the chance below which the model's chains end.
    """

    length: int
    lookup: int = 0
    least: float = 0.0


PLAIN = FixedChoice(0)


def fixed_choices(method: str, ends: bool = False) -> list[FixedChoice]:
    """Return the choices that a policy is compared with, plain decoding first. ends: see `Machine`."""
    if method == "model":
        return [FixedChoice(length, 0, least) for least in (ENDS if ends else ENDS[:1]) for length in range(MOST + 1)]
    lengths, lookups = ((0,), range(1, MOST + 1)) if method == "lookup" else (SOME_LENGTHS, SOME_LENGTHS[-3:])
    looked_up = product(lengths, lookups, (0.0, 0.5, 0.8))
    return [*map(FixedChoice, lengths), *map(FixedChoice._make, looked_up)]


def fixed_run(machine: Machine, choice: FixedChoice) -> Run:
    """Return the run of a choice."""
    texts, size = machine.texts, machine.texts.room.shape[1]
    looked_up = (texts.found > 0) & (texts.scores[:, :size] >= choice.least) & (choice.lookup > 0)
    room = np.minimum(texts.room, drawn(texts.sure, choice.least)) if machine.ends else texts.room
    most = np.where(looked_up, np.minimum(texts.found, choice.lookup), np.minimum(room, choice.length))
    gains = 1 + np.minimum(most, np.where(looked_up, texts.found_kept, texts.kept))
    paths = [_path(own) for own in gains.tolist()]
    steps = min(map(len, paths)) - 1
    at = np.array([path[: steps + 1] for path in paths])
    tokens, at = at[:, 1:].sum(0), at[:, :-1]
    nodes, is_lookup, begins, room = (
        np.take_along_axis(each, at, 1) for each in (most, looked_up, texts.begins, texts.room)
    )
    by_model = np.where(is_lookup, 0, nodes)
    follows_start = np.take_along_axis(texts.begins, np.maximum(at - 1, 0), 1) & ~begins
    has_draft, places = (by_model > 0).any(0), np.arange(steps)
    since = places - np.maximum.accumulate(np.where(has_draft, places, -1000))
    started = at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)
    work = Work(
        machine.sequences,
        (nodes + np.where(begins, machine.prompt, 1)).sum(0),
        ((machine.prompt + started) * (1 + FURTHER * nodes)).sum(0),
        (by_model > 0).sum(0),
        by_model.max(0),
        (room > 0).sum(0) * (choice.lookup > 0),
        (nodes > 0).sum(0),
        (machine.prompt * (follows_start & (by_model > 0))).sum(0),
        np.where(has_draft, 1.0, machine.lingers ** np.minimum(since, 1000)),
        tokens / (machine.sequences * machine.tokens),
    )
    return Run(tokens, np.cumsum(sum(machine.seconds(work))), int((nodes > 0).any(0).sum()))


def _path(gains: Sequence[int]) -> list[int]:
    """Return the positions at which steps begin."""
    path, position = list[int](), 0
    while position < len(gains):
        path.append(position)
        position += gains[position]
    return path
