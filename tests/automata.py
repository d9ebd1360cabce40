"""A grammar for tests: a small automaton over tokens, which is a `Constraint` that checks how it is used."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from speculant.constraints import Constraint, unpacked


@dataclass(frozen=True)
class Automaton:
    """edges: by state, which tokens may come and where each leads. It starts in state 0; one without edges ends it."""

    edges: Mapping[int, Mapping[int, int]]

    def state_after(self, tokens: Iterable[int], state: int | None = 0) -> int | None:
        """Return the state after tokens; None if one of them is forbidden."""
        for token in tokens:
            state = None if state is None else self.edges[state].get(token)
        return state

    def allowed_after(self, tokens: Iterable[int]) -> Collection[int]:
        """Return the tokens that may follow."""
        state = self.state_after(tokens)
        return () if state is None else self.edges[state].keys()

    def constrain(self) -> AutomatonConstraint:
        """Make the constraint of one sequence."""
        return AutomatonConstraint(self)


@dataclass(frozen=True)
class ForcingAutomaton(Automaton):
    """One whose constraints know where there is no choice."""

    @override
    def constrain(self) -> AutomatonConstraint:
        return ForcingConstraint(self)


class AutomatonConstraint(Constraint):
    """A constraint whose masks are as short as they can be; `taken` are the tokens that it was advanced by."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self.taken: list[int] = []
        self._states = [0]

    @override
    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        state = self.automaton.state_after(tokens, self._states[-1])
        return bitset(() if state is None else self.automaton.edges[state])

    @override
    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            state = self.automaton.state_after([token], self._states[-1])
            assert state is not None, f"{token} was committed behind {self.taken} and is forbidden"
            self._states.append(state)
            self.taken.append(token)

    @override
    def rollback(self, n: int) -> None:
        assert 0 <= n <= len(self.taken), "more is rolled back than was taken"
        del self._states[len(self._states) - n :]
        del self.taken[len(self.taken) - n :]

    @property
    @override
    def is_done(self) -> bool:
        return not self.automaton.edges[self._states[-1]]


class ForcingConstraint(AutomatonConstraint):
    """A constraint that reports forced tokens."""

    @override
    def forced(self) -> list[int]:
        """The tokens up to the next choice or a state once passed."""
        state, passed, tokens = self._states[-1], set[int](), list[int]()
        while len(self.automaton.edges[state]) == 1 and state not in passed:
            passed.add(state)
            ((token, state),) = self.automaton.edges[state].items()
            tokens.append(token)
        return tokens


def allowed(mask: Tensor | None, size: int) -> list[int]:
    """Return the tokens of a vocabulary that a mask allows, ascending; None = all."""
    return list(range(size)) if mask is None else unpacked(mask, size).nonzero().flatten().tolist()


def bitset(tokens: Iterable[int]) -> Tensor:
    """Return a mask [words] int32 that allows these tokens and has no word behind the last of them."""
    bits = sum(1 << token for token in tokens)
    words = -(-bits.bit_length() // 32)
    return torch.frombuffer(bytearray(bits.to_bytes(4 * words, "little")), dtype=torch.int32) if words else NOTHING


NOTHING = torch.empty(0, dtype=torch.int32)
