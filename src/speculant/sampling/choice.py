"""How a token is chosen: from logits to its distribution, and from the distribution to a token by a `Chance`.

Distributions come from one function, for draft and target alike. They are float64, whatever the logits are, and each
row's distribution depends on that row alone.

Every random number comes from a `Chance`. Every production stream is a counter-based hash of (seed, purpose, round) or
of (seed, position), so a draw does not depend on the batch, on other requests or on how many numbers other streams have
drawn.

Largest entries and copies of rows [m, V] are left to numpy on a CPU. torch would divide this work among threads of its
own. Those threads then spin while they wait for more work. They compete with the kernels' threads, and the target's
next pass takes up to half as long again. numpy starts no threads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from copy import copy
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from speculant.beams import Continuations
from speculant.constraints import checked_mask
from speculant.counts import TokenCounts
from speculant.errors import ConstraintError
from speculant.kernels import REFERENCE, Edits, Sampler, SamplingSettings, gumbel
from speculant.params import SamplingParams
from speculant.types import Request

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
GROUP = 64  # logits of which only the largest is ranked at first
FEW = 2**15  # logits that are ranked at once: torch shares out more of them among its own threads


class Chance(Protocol):
    """The two random operations of drafting and verification."""

    def accept(self, probability: float) -> bool:
        """Return True with the given probability; never for 0, always for 1."""
        ...

    def draw(self, weights: Tensor) -> int:
        """Return a token drawn with probability proportional to weights [V] (any positive sum)."""
        ...


class Chances(Protocol):
    """Makes the `Chance` of a request's next step."""

    def draft(self, request: Request) -> Chance:
        """Return the chance with which the request's next draft is drawn."""
        ...

    def verify(self, request: Request) -> Chance:
        """Return the chance with which the request's next draft is verified."""
        ...


class Purpose(IntEnum):
    """The purpose of a stream. Streams of different purposes are independent."""

    DRAFT = 1
    ACCEPT = 2
    DRAW = 3
    NOISE = 4
    REQUEST = 5


class Noise(IntEnum):
    """How a token is drawn from weights; the numbers are those of csrc/speculant.h."""

    INDEPENDENT = 0  # the inverse of the cumulative sum
    SHARED = 1  # Gumbel noise
    NONE = 2  # the largest weight


class Stream(Chance):
    """Independent uniforms, keyed by (seed, purpose, round) and counted from 0."""

    noise = Noise.INDEPENDENT

    def __init__(self, seed: int, purposes: tuple[Purpose, Purpose], round_: int, sampler: Sampler = REFERENCE) -> None:
        self._sampler = sampler
        accept, draw = purposes
        self._accept_key = mix_in(0, mix_in(mix(seed, accept), round_))
        self._draw_key = self._accept_key if draw == accept else mix_in(0, mix_in(mix(seed, draw), round_))
        self._count = 0

    @override
    def accept(self, probability: float) -> bool:
        """Return whether u < probability, strictly, with u in [0, 1)."""
        return self._uniform(self._accept_key) < probability

    @override
    def draw(self, weights: Tensor) -> int:
        """The inverse of the cumulative sum, in float64."""
        return self._sampler.draw(weights, False, mix_in(*self.take_keys(1)))

    def take_keys(self, n: int) -> tuple[int, int]:
        """Skip n draws; return (key, count): skipped draw i has the random bits `mix_in(key, count + i)`."""
        self._count += n
        return self._draw_key, self._count - n + 1

    def _uniform(self, key: int) -> float:
        self._count += 1
        return (mix_in(key, self._count) >> 11) * 2.0**-53


class KeyedNoise(Chance):
    """Gumbel noise keyed by (seed, absolute position, token id): argmax(log w + G) is a draw from w.

    Draft and target use the same noise at the same position and so mostly draw the same token
    (`match`); a draw depends on its own position alone. A ratio rule must not use it.
    """

    noise = Noise.SHARED

    def __init__(self, seed: int, position: int, sampler: Sampler = REFERENCE) -> None:
        self._key, self._position, self._sampler = mix(seed, Purpose.NOISE), position, sampler

    @override
    def accept(self, probability: float) -> bool:
        """See `Chance.accept`; `match` does not need it, and it raises TypeError."""
        raise TypeError("keyed noise is shared with the draft and must not decide a p/q ratio test")

    @override
    def draw(self, weights: Tensor) -> int:
        """Each call advances by one position. Ties go to the lowest id."""
        self._position += 1
        return self._sampler.draw(weights, True, mix_in(self._key, self._position - 1))

    def scores(self, weights: Tensor) -> Tensor:
        """Return each token's share [V] of all w e^G, with weights w and noise G; `draw` takes the largest."""
        tokens = torch.arange(len(weights), device=weights.device)
        return torch.softmax(weights.log() + gumbel(mix_in(self._key, self._position), tokens), 0)

    def moved(self, places: int) -> KeyedNoise:
        """Return the noise that begins `places` positions later; draws from either do not affect the other."""
        moved = copy(self)
        moved._position += places
        return moved

    def take_keys(self, n: int) -> tuple[int, int]:
        """Skip n draws; return (key, count): skipped draw i has the noise of `mix_in(key, count + i)`."""
        self._position += n
        return self._key, self._position - n


class MostLikely(Chance):
    """No randomness: the token with the largest weight, the lowest id among equals."""

    noise = Noise.NONE

    @override
    def accept(self, probability: float) -> bool:
        """It raises TypeError."""
        raise TypeError("the most likely token is no draw and must not decide a p/q ratio test")

    @override
    def draw(self, weights: Tensor) -> int:
        """Without chance."""
        return int(weights.argmax())

    def take_keys(self, n: int) -> tuple[int, int]:
        """Return (key, count), which mean nothing here."""
        return 0, 0


class KeyedChances(Chances):
    """The production source: keyed noise where draft and target share noise, else separate streams."""

    def __init__(self, sampler: Sampler = REFERENCE) -> None:
        self._sampler = sampler

    @override
    def draft(self, request: Request) -> Chance:
        if request.shared_noise:
            return KeyedNoise(request.seed, len(request.tokens), self._sampler)
        return Stream(request.seed, (Purpose.DRAFT, Purpose.DRAFT), request.rounds, self._sampler)

    @override
    def verify(self, request: Request) -> Chance:
        if request.shared_noise:
            return KeyedNoise(request.seed, len(request.tokens), self._sampler)
        return Stream(request.seed, (Purpose.ACCEPT, Purpose.DRAW), request.rounds, self._sampler)


def foresee(chance: Stream | KeyedNoise, count: int) -> list[int]:
    """Return the keys of the next `count` draws of a chance (`Sampler.draw`), and skip these draws."""
    key, first = chance.take_keys(count)
    return [mix_in(key, first + draw) for draw in range(count)]


@lru_cache(maxsize=1024)  # every step hashes a request's values again
def mix(*values: int) -> int:
    """Hash integers to 64 bits: one splitmix64 round per value."""
    state = 0
    for value in values:
        state = mix_in(state, value)
    return state


def mix_in(state: int, value: int) -> int:
    """Hash one more integer into a state of 64 bits."""
    x = (state ^ (value & _MASK)) + _GOLDEN & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class Node(NamedTuple):
    """A place where a token is chosen: a request's last token followed by `drafted` ancestors.

    softened: a greedy request's distribution is that at temperature 1, so that tokens can be ranked. A beam search's
    always is.
    """

    request: Request
    drafted: Sequence[int] = ()
    softened: bool = False

    @property
    def params(self) -> SamplingParams:
        """The settings that make the distribution."""
        softened = self.softened or self.request.search is not None
        return self.request.params.softened if softened else self.request.params

    @property
    def edited(self) -> bool:
        """Whether the logits of single tokens change before the distribution is made."""
        if self.request.constraint is not None:
            return True
        params = self.request.params
        return params.edits and (bool(params.logit_bias) or params.penalised or self.ends_banned)

    @property
    def ends_banned(self) -> bool:
        """Whether fewer than min_tokens output tokens precede it, so that end tokens are banned."""
        return self.request.num_output + len(self.drafted) < self.params.min_tokens


def distribution(logits: Tensor, nodes: Sequence[Node], sampler: Sampler = REFERENCE) -> Tensor:
    """Return distributions [r, V] in float64 for logits [r, V], one node per row (arXiv 2211.17192, section 2.2).

    Order: constraint, bias, end tokens below min_tokens, penalties, temperature, top-k, top-p, min-p. A row without a
    possible token, as after an error of a constraint, is all zeros; one whose logits have NaN or +infinity is all NaN.
    """
    settings, edits, node, params = list[SamplingSettings](), list[Edits | None](), None, None
    for each in nodes:
        if each is not node:  # equal rows may share a node, and requests their parameters
            node, own, now = each, edits_of(each) if each.edited else None, each.params
            if now is not params:
                params, setting = now, sampling_settings(now)
        settings.append(setting)
        edits.append(own)
    return sampler.distribution(logits, settings, edits)


def row_maxima(probs: Tensor) -> list[float]:
    """Return the largest probability of each row [r, V]; 0 or NaN for a row that is not a distribution."""
    maxima: list[float] = (probs.numpy().max(axis=1) if is_numpys(probs) else probs.amax(-1)).tolist()
    return maxima


def is_numpys(tensor: Tensor) -> bool:
    """Whether numpy can read the tensor in place."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def sampling_settings(params: SamplingParams) -> SamplingSettings:
    """Return the settings by which a sampler turns edited logits into a distribution."""
    return SamplingSettings(params.temperature, params.top_p, params.min_p, params.top_k)


def edits_of(node: Node) -> Edits:
    """Return the edits of single logits in a node's row: those of its request, with the drafted ancestors."""
    params, request = node.params, node.request
    with request.work:
        return Edits(
            drafted=node.drafted,
            mask=_mask_of(node),
            biased=params.biased if params.logit_bias else None,
            biases=params.biases if params.logit_bias else None,
            banned=request.end_token_ids,
            ban_below=params.min_tokens - request.num_output,
            counts=_counts(request) if params.penalised else None,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )


def _mask_of(node: Node) -> Tensor | None:
    """Return a constraint's mask. One that fails allows no token, so that rows of other requests are not affected."""
    request = node.request
    if request.constraint is None:
        return None
    try:
        return checked_mask(request.constraint, node.drafted)
    except ConstraintError:
        return torch.zeros(1, dtype=torch.int32)


def _counts(request: Request) -> TokenCounts:
    counts = request.counts
    assert counts is not None, "its tokens are not counted"
    assert counts.num_tokens == len(request.tokens), "its counts are not those of its tokens"
    return counts


def top_tokens(logits: Tensor, count: int) -> Tensor:
    """Return the ids [m, count] of the largest logits [m, V] of each row, best first; fewer if V is smaller.

    The largest are among the groups with the largest maxima: for V = 151,936 that takes a seventh of topk's time. The
    ids of a group are the same modulo the number of groups, so that maxima of many groups are computed side by side.
    """
    if logits.numel() <= FEW:
        return logits.topk(min(count, logits.shape[-1]), dim=-1).indices
    num_groups = logits.shape[-1] // GROUP
    ids = torch.arange(num_groups * GROUP, logits.shape[-1], device=logits.device).expand(len(logits), -1)
    if num_groups:
        groups = _group_maxima(logits, num_groups).topk(min(count, num_groups), dim=-1).indices
        within = num_groups * torch.arange(GROUP, device=logits.device)
        ids = torch.cat([(groups.unsqueeze(-1) + within).flatten(1), ids], dim=1)
    return ids.gather(1, logits.gather(1, ids).topk(min(count, ids.shape[1]), dim=-1).indices)


def _group_maxima(logits: Tensor, num_groups: int) -> Tensor:
    """Return the largest logit of each group, [m, num_groups]."""
    groups = logits[:, : num_groups * GROUP].view(-1, GROUP, num_groups)
    return torch.from_numpy(groups.numpy().max(axis=1)) if is_numpys(groups) else groups.amax(1)


def most_likely(logits: Tensor) -> tuple[list[int], list[float]]:
    """Return the token with the largest logit of each row [m, V], the lowest id among equals, and that logit.

    The logit is NaN if any of the row's is.
    """
    if not is_numpys(logits):
        best = logits.argmax(-1, keepdim=True)
        return best[:, 0].tolist(), logits.gather(1, best)[:, 0].tolist()
    rows = logits.numpy()
    tokens = rows.argmax(axis=1)
    return tokens.tolist(), rows[np.arange(len(rows)), tokens].tolist()


def copied(matrix: Tensor) -> Tensor:
    """Return a copy of a matrix [m, V]."""
    return torch.from_numpy(matrix.numpy().copy()) if is_numpys(matrix) else matrix.clone()


def take_rows(matrix: Tensor, rows: Sequence[int]) -> Tensor:
    """Return copies [len(rows), V] of rows of a matrix [m, V]."""
    return torch.from_numpy(matrix.numpy()[list(rows)]) if is_numpys(matrix) else matrix[list(rows)]


def rank(probs: Tensor, count: int, ends: Collection[int] = ()) -> list[Continuations]:
    """Return the continuations of each row of probs [r, V] in float64 that a search of width `count` may take.

    These are the `count` likeliest tokens and the `count` likeliest that are not among `ends`, with log-probabilities,
    best first. Ties go to the lowest ids. Impossible tokens are left out. A row's result depends on that row alone.
    """
    best = _best(probs, count)
    if ends:
        others = probs.index_fill(-1, torch.tensor(sorted(ends), device=probs.device), 0.0)
        best = [{**mine, **other} for mine, other in zip(best, _best(others, count), strict=True)]
    return [_ordered(each) for each in best]


def _best(probs: Tensor, count: int) -> list[dict[int, float]]:
    """Return the `count` likeliest tokens of each row with their probabilities."""
    least = probs.topk(min(count, probs.shape[-1]), dim=-1).values[:, -1:]
    rows, tokens = ((probs >= least) & (probs > 0)).nonzero(as_tuple=True)
    listed: list[list[tuple[int, float]]] = [[] for _ in range(len(probs))]
    for row, token, probability in zip(rows.tolist(), tokens.tolist(), probs[rows, tokens].tolist(), strict=True):
        listed[row].append((token, probability))
    return [dict(sorted(each, key=lambda pair: -pair[1])[:count]) for each in listed]


def _ordered(weighted: dict[int, float]) -> Continuations:
    pairs = sorted(weighted.items(), key=lambda pair: (-pair[1], pair[0]))
    return tuple((token, math.log(probability)) for token, probability in pairs)
