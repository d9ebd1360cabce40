"""Beam search in its simplest form: every token of every hypothesis, round by round, over plain functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from speculant.lab.exactness.tables import History, NextProbs, Pair, Table
from speculant.params import SamplingParams
from tests.exactness.distributions import transformed


class Found(NamedTuple):
    """A finished text, the sum of its log-probabilities, and that sum over length ** length_penalty."""

    text: tuple[int, ...]
    logprob: float
    score: float


def plain_beams(
    distribution: NextProbs,
    prompt: History,
    width: int,
    longest: int,
    ends: frozenset[int] = frozenset(),
    penalty: float = 1.0,
) -> list[Found]:
    """Return what transformers' beam search finds (early_stopping=False), best first, for vocabularies of any size."""
    live: list[tuple[History, float]] = [((), 0.0)]
    found: list[Found] = []
    for length in range(1, longest + 1):
        everything = []
        for order, (text, total) in enumerate(live):
            for token, probability in enumerate(distribution(prompt + text)):
                if probability > 0:
                    everything.append((-(total + math.log(probability)), order, token, (*text, token)))
        everything.sort()
        for minus, _, token, text in everything[:width]:
            if token in ends or length == longest:
                found.append(Found(text, -minus, -minus / length**penalty))
        found = sorted(found, key=lambda each: -each.score)[:width]
        live = [(text, -minus) for minus, _, token, text in everything if token not in ends][:width]
        if not live or (len(found) == width and live[0][1] / length**penalty <= found[-1].score):
            break
    return found


def every_text(
    distribution: NextProbs, prompt: History, longest: int, ends: frozenset[int] = frozenset(), penalty: float = 1.0
) -> Iterator[Found]:
    """Yield every possible text that ends: with an end token, or as long as may be."""
    for length in range(1, longest + 1):
        for text in itertools.product(range(len(distribution(prompt))), repeat=length):
            if not ends.isdisjoint(text[:-1]) or (text[-1] not in ends and length < longest):
                continue
            chances = [distribution((*prompt, *text[:place]))[token] for place, token in enumerate(text)]
            if all(chances):
                total = sum(map(math.log, chances))
                yield Found(text, total, total / length**penalty)


def exact_distribution(table: Table) -> NextProbs:
    """Return a table's distribution with the engine's bits, so that ties are ties in both."""
    return lambda history: torch.softmax(torch.tensor(table(history), dtype=torch.float64), -1).tolist()


def edited_distribution(pair: Pair, params: SamplingParams, num_prompt: int, ends: frozenset[int]) -> NextProbs:
    """Return the target's distribution as a request edits it, worked out token by token."""
    return lambda history: transformed(pair.target(history), params, history, num_prompt, ends)
