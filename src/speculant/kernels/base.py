"""The sampler protocol: distributions from logits, and draws from them, for every device."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from speculant.counts import TokenCounts

VERSION = 30  # of the native library's calls, and of the bits that it computes
NO_TOKEN = -1  # the draw of a row without a distribution


class SamplingSettings(NamedTuple):
    """How a row's logits become its distribution. temperature 0 is greedy: all probability on the best token."""

    temperature: float
    top_p: float = 1.0  # 1 = not used
    min_p: float = 0.0  # 0 = not used
    top_k: int = 0  # 0 = not used

    @property
    def greedy(self) -> bool:
        """Whether the distribution is a point mass."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p may exclude tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes to a row's logits before its distribution is computed, in this order.

    mask: bitset [words] int32 of the allowed tokens; None = all are. biases are added to the logits of the `biased`
    tokens. banned tokens are impossible while fewer than `ban_below` tokens are drafted. Penalties use `counts`
    (None = no penalties) and the `drafted` tokens before the row.
    """

    drafted: Sequence[int] = ()
    mask: Tensor | None = None
    biased: array[int] | None = None
    biases: array[float] | None = None
    banned: Collection[int] = ()
    ban_below: int = 0
    counts: TokenCounts | None = None
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


class RowDraw(NamedTuple):
    """A draw from one row of weights; see `Sampler.draw` for its noise and its key."""

    row: int
    shared_noise: bool
    key: int


class Sampler(Protocol):
    """Computes distributions from logits, and draws tokens. A row's result depends only on that row."""

    def distribution(
        self, logits: Tensor, settings: Sequence[SamplingSettings], edits: Sequence[Edits | None]
    ) -> Tensor:
        """Return distributions [r, V] in float64 for logits [r, V], with one entry of `settings` and `edits` per row.

        Order: edits, temperature, top-k, top-p, min-p. Ties go to the lowest token ids. A row without a possible token
        is all zeros; one whose logits have NaN or +infinity is all NaN. The logits are not changed.
        """
        ...

    def draw(self, weights: Tensor, shared_noise: bool, key: int) -> int:
        """Return a token drawn with probability proportional to weights [V].

        key has 64 random bits. With shared_noise they key Gumbel noise for every token id, and the token is the argmax
        of log weight + noise. Otherwise they select a share of the sum, and the token is the first whose cumulative sum
        exceeds it.
        """
        ...

    def draw_rows(self, weights: Tensor, draws: Sequence[RowDraw]) -> list[int]:
        """Return the token of each draw from rows of weights [r, V]: that of `draw`, or -1 from a row of zeros or NaN.

        One call for many rows, because a call costs more than a draw.
        """
        ...

    def normalise(self, weights: Tensor) -> Tensor:
        """Return weights [V] divided by their sum."""
        ...
