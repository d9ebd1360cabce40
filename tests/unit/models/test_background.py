"""What waits until an engine has started."""

from __future__ import annotations

import gc
from threading import Thread

import pytest

from speculant.models import background


def test_a_thread_starts_at_once_outside_of_a_block() -> None:
    done: list[int] = []
    background.start(thread := Thread(target=done.append, args=(1,)))
    thread.join()
    assert done == [1]


def test_a_postponed_thread_starts_when_the_block_ends() -> None:
    done: list[int] = []
    thread = Thread(target=done.append, args=(1,))
    with background.postponed():
        background.start(thread)
        assert thread.ident is None
    thread.join()
    assert done == [1]


def test_a_postponed_thread_starts_even_if_the_block_raises() -> None:
    done: list[int] = []
    thread = Thread(target=done.append, args=(1,))

    @background.postponed()
    def build() -> None:
        background.start(thread)
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        build()
    thread.join()
    assert done == [1]
    background.start(later := Thread(target=done.append, args=(2,)))  # nothing is postponed any more
    later.join()
    assert done == [1, 2]


@pytest.mark.parametrize("is_on", [True, False])
def test_collections_are_as_before_after_a_block_without(is_on: bool) -> None:
    was = gc.isenabled()

    @background.without_collections()
    def build() -> None:
        assert not gc.isenabled()
        raise ValueError("no model")

    try:
        (gc.enable if is_on else gc.disable)()
        with pytest.raises(ValueError, match="no model"):
            build()
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was else gc.disable)()
