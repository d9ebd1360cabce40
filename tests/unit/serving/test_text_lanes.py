"""Work on the texts of one client does not delay that of others."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from speculant.serving import LARGE, ApiError, TextLanes

PATIENCE = 30.0


def test_a_client_may_have_as_many_small_texts_as_requests() -> None:
    """As many as wait in an engine by default: a burst of one client is served."""
    lanes, go = TextLanes(most_large=1), threading.Event()
    held = [lanes.submit("a", 1, lambda: go.wait(PATIENCE)) for _ in range(1024)]
    with pytest.raises(ApiError, match="At most 1024 requests") as caught:
        lanes.submit("a", 1, lambda: None)
    assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "1")
    go.set()
    assert all(each.result(PATIENCE) for each in held)
    lanes.close()


def test_closed_lanes_cancel_what_waits() -> None:
    lanes, go, begun = TextLanes(most_large=3), threading.Event(), threading.Event()
    first = lanes.submit("a", 1, lambda: (begun.set(), go.wait(PATIENCE)))
    assert begun.wait(PATIENCE)
    waiting = lanes.submit("a", 1, lambda: None)
    lanes.close()
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE)
    for size in (1, LARGE + 1):
        with pytest.raises(ApiError) as caught:
            lanes.submit("b", size, lambda: None)
        assert caught.value.status == 503
    go.set()
    assert first.result(PATIENCE)


def test_small_work_does_not_wait_for_large() -> None:
    lanes, go, begun = TextLanes(most_large=2), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go.wait(PATIENCE)

    large = lanes.submit("a", LARGE + 1, wait)
    assert begun.wait(PATIENCE)
    assert lanes.submit("a", LARGE, lambda: "small").result(PATIENCE) == "small"
    assert not large.done()
    lanes.submit("a", LARGE + 1, lambda: None)
    with pytest.raises(ApiError):
        lanes.submit("a", LARGE + 1, lambda: None)
    go.set()
    lanes.close()
