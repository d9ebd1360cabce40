"""A schedule: bytes, read as an engine's setup and as actions on it.

    bytes    [ setup | action | action | ... ]

A number is read digit by digit, and 0 is the simplest of everything (a plain step, a greedy request), so
Hypothesis shrinks a failing schedule to what matters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from speculant.config import POLICIES, Limits
from speculant.params import SamplingParams
from tests.oracle import V

T = TypeVar("T")

MAX_LEN = 20
SETUP_BYTES, ACTION_BYTES = 10, 6
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None, 3), (None, 1), (None, 6), (5, 2), (4,))


class Digits:
    """A number that is read digit by digit, each in a base of its own."""

    def __init__(self, data: bytes) -> None:
        self._left = int.from_bytes(data, "little")

    def below(self, base: int) -> int:
        """Return a digit from 0 to base - 1."""
        self._left, digit = divmod(self._left, base)
        return digit

    def pick(self, choices: Sequence[T]) -> T:
        """Return one of the choices; the first is the simplest."""
        return choices[self.below(len(choices))]


@dataclass(frozen=True)
class Kind:
    """What schedules of one test have in common: the cache's class and the drafter, by name.

    sources: the target is an encoder-decoder model.
    """

    cache: str  # paged, slotted
    drafter: str  # none, model, chain, tree
    sources: bool = False

    def __str__(self) -> str:
        return f"{self.cache}-{self.drafter}{'-sources' * self.sources}"


@dataclass(frozen=True)
class Setup:
    """What one schedule's engine is made of. `spare_blocks` are beyond what one sequence needs at most."""

    kind: Kind
    limits: Limits
    block_size: int
    spare_blocks: tuple[int, int]  # the target's, the drafter's
    keep_prefixes: bool
    spec_length: int
    verification: str
    astray: int
    drains: bool  # at the end, all requests go on; else they are aborted
    windows: tuple[int | None, ...]  # of the models' layers

    @classmethod
    def read(cls, kind: Kind, digits: Digits) -> Setup:
        """Make a setup of a number."""
        num_seqs = digits.pick((3, 5, 2, 4, 3, 1))
        limits = Limits(
            max_model_len=MAX_LEN,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs + digits.pick((16, 4, 8, 2, 1, 0)),
            max_waiting=digits.pick((8, 3)),
            scheduling_policy=digits.pick(POLICIES),
        )
        return cls(
            kind,
            limits,
            block_size=digits.pick((2, 3, 4)),
            spare_blocks=(digits.pick((0, 0, 1, 2, 4)), digits.below(5)),
            keep_prefixes=digits.below(3) < 2,
            spec_length=digits.pick((2, 1, 3, 4)),
            verification=digits.pick(("auto", "auto", "match", "rejection")) if kind.drafter != "tree" else "auto",
            astray=digits.pick((0, 3)),
            drains=digits.below(2) == 0,
            windows=digits.pick(WINDOWS[:1] if kind.sources else WINDOWS),
        )


SAMPLED: tuple[dict[str, Any], ...] = (
    {"seed": 7, "temperature": 0.6},
    {"temperature": 0.6},
    {"seed": 8},
    {},
    {"seed": 9, "top_k": 3, "frequency_penalty": 0.5},
    {"beam_width": 3},
    {"beam_width": 3, "length_penalty": 0.3},
)
DISTRIBUTIONS: tuple[dict[str, Any], ...] = (
    *({"temperature": 0},) * 5,
    {"temperature": 0, "ignore_eos": True},
    *SAMPLED,
)


def drawn_prompt(digits: Digits) -> list[int]:
    """Draw a prompt of one of three families; two of them begin with the same tokens."""
    family, length = digits.below(3), digits.pick((1, 2, 3, 4, 6, 8, 9, 12, 13, MAX_LEN - 1))
    stem = [1 + (place * place * (1 + family // 2) + (family if place > 5 else 0)) % (V - 1) for place in range(length)]
    own = digits.below(4) % length
    return stem[: length - own] + [1 + digits.below(V - 1) for _ in range(own)]


def drawn_source(digits: Digits, most: int) -> list[int]:
    """Draw a source of at most `most` tokens; many are equal."""
    length, token = min(most, digits.pick((2, 1, 3, 5, 9, most))), digits.pick((1, 1, 2, 0))
    return [(token + place * place) % V for place in range(length)]


def drawn_params(digits: Digits) -> SamplingParams:
    """Draw how a prompt is continued."""
    n = digits.pick((1, 1, 1, 2, 3))
    distribution = digits.below(
        len(DISTRIBUTIONS if n == 1 else SAMPLED)
    )  # greedy samples of one prompt would all be the same
    return _made(n, distribution, digits.below(8), digits.below(6), digits.below(4))


@functools.cache
def _made(n: int, distribution: int, length: int, speculation: int, logprobs: int) -> SamplingParams:
    return SamplingParams(
        n=n,
        max_tokens=(4, 8, 12, None, 1, 2, 16, None)[length],
        speculation=(None, None, None, None, False, {"num_speculative_tokens": 1})[speculation],
        prompt_logprobs=(None, None, None, 0)[logprobs],
        **(DISTRIBUTIONS if n == 1 else SAMPLED)[distribution],
    )


def size_of(num_actions: int) -> int:
    """Return the number of bytes of a schedule with a number of actions."""
    return SETUP_BYTES + num_actions * ACTION_BYTES


def read_schedule(kind: Kind, data: bytes) -> tuple[Setup, list[Digits]]:
    """Return the setup and the digits that decide each action."""
    starts = range(SETUP_BYTES, len(data), ACTION_BYTES)
    return Setup.read(kind, Digits(data[:SETUP_BYTES])), [
        Digits(data[first : first + ACTION_BYTES]) for first in starts
    ]
