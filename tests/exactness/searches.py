"""Requests that search, alone and beside others, and the checks of their results."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from speculant.config import Limits
from speculant.errors import RequestError
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel
from speculant.params import SamplingParams
from speculant.types import Request
from tests.beams import found_by
from tests.exactness.plain_beams import Found
from tests.fakes import Rig, build_rig

PROMPT = (1, 0)
CROWDED = Pair(6, 4, FULL_SUPPORT)
CROWD_ENDS = frozenset({3})

CROWD: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((0, 1, 2), {"beam_width": 4, "n": 4}),
    ((1,) * 7, {"temperature": 0}),
    ((2, 3), {"beam_width": 3, "n": 2, "length_penalty": 0.3, "repetition_penalty": 1.2}),
    ((0, 1, 2, 3, 1), {"seed": 4, "n": 2}),
    ((3, 0, 3, 0, 1, 1, 2, 2, 3), {"beam_width": 2, "n": 1, "prompt_logprobs": 1}),
    ((0, 1, 2, 2, 1), {"temperature": 0.8, "seed": 6, "logprobs": 1}),
]


def add_crowd(rig: Rig) -> list[Request]:
    """Queue searches and others."""
    requests = []
    for index, (prompt, settings) in enumerate(CROWD):
        requests += rig.add(prompt, SamplingParams(**{"max_tokens": 10, **settings}), str(index))
    return requests


def told(requests: Sequence[Request]) -> list[Any]:
    """Return everything that callers get of requests."""
    return [(r.output, found_by(r), r.ending.reason, r.logprobs, r.prompt_logprobs) for r in requests]


def wide(width: int, longest: int = 6, **settings: Any) -> SamplingParams:
    """Ask for all beams of a width."""
    return SamplingParams(**{"n": width, "beam_width": width, "max_tokens": longest, **settings})


def searched(rig: Rig, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> list[Request]:
    """Search to the end."""
    requests = rig.add(prompt, params)
    rig.finish()
    return requests


def assert_found(requests: Sequence[Request], expected: Sequence[Found]) -> None:
    """Assert that the samples of a search are the expected ones; samples without a text end in errors."""
    there = [request for request in requests if request.ending.error is None]
    best = expected[: len(requests)]
    assert [tuple(request.output) for request in there] == [found.text for found in best]
    assert [found_by(request) for request in there] == [pytest.approx((found.logprob, found.score)) for found in best]
    for request in there:
        ends = request.output[-1] in request.stops.end_token_ids
        assert (request.ending.reason, request.ending.stop) == ("stop" if ends else "length", None)
    for request in requests[len(there) :]:
        assert isinstance(request.ending.error, RequestError)
        assert (request.output, found_by(request), request.ending.reason) == ([], (None, None), "error")


@functools.cache
def one_at_a_time() -> list[Any]:
    """Return the texts of the crowd's requests when each runs alone, without drafts and with room for everything."""
    rig = build_rig(TableModel(CROWDED.target, 4), limits=Limits(28, 1, 64), ends=CROWD_ENDS)
    requests = add_crowd(rig)
    rig.finish()
    return told(requests)
