"""The cache of a simulated replica never holds more blocks than it has, and evicts the oldest."""

from __future__ import annotations

import random

from speculant.lab.fleet.replica import PrefixStore


def _serve(store: PrefixStore, own: int, prefix: str, size: int) -> None:
    """Let a request compute a prefix that is not known, and end."""
    store.take(own + size)
    store.publish(prefix, size)
    store.release(own, prefix)
    store.check()


def test_the_oldest_prefix_is_evicted_first() -> None:
    store = PrefixStore(10)
    _serve(store, 0, "a", 4)
    _serve(store, 0, "b", 4)
    store.pin("a", 4)
    store.release(0, "a")
    _serve(store, 0, "c", 4)
    assert [store.knows(prefix) for prefix in "abc"] == [True, False, True]


def test_a_pinned_prefix_stays() -> None:
    store = PrefixStore(10)
    _serve(store, 0, "a", 4)
    store.pin("a", 4)
    assert not store.fits(7, None)
    assert store.fits(6, None)
    store.take(6)
    assert store.knows("a")
    store.check()


def test_blocks_of_ended_requests_take_room() -> None:
    store = PrefixStore(10)
    _serve(store, 5, "a", 2)
    _serve(store, 0, "b", 4)
    assert store.knows("a")  # the five blocks were older
    _serve(store, 0, "c", 6)
    assert [store.knows(prefix) for prefix in "abc"] == [False, True, True]


def test_counts_agree_after_any_sequence() -> None:
    rng = random.Random(0)
    store, running = PrefixStore(50), list[tuple[int, str, bool]]()
    for _ in range(3000):
        if running and rng.random() < 0.5:
            own, prefix, holds = running.pop(rng.randrange(len(running)))
            if not holds:
                store.publish(prefix, 3)
                own -= 3
            store.release(own, prefix)
        else:
            prefix, own = f"p{rng.randrange(8)}", 3 + rng.randrange(6)
            holds = store.knows(prefix)
            if store.fits(own, prefix if holds else None):
                if holds:
                    store.pin(prefix, 3)
                store.take(own)
                running.append((own, prefix, holds))
        store.check()
