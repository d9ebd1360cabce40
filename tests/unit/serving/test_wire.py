"""JSON in parts is the same JSON, and other tasks run in between."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from speculant.serving import Deferred, encode, encode_in_parts, wire

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
DOCUMENTS = st.recursive(
    LEAVES | st.lists(st.integers(), min_size=30, max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(DOCUMENTS)
def test_parts_make_the_same_document(value: Any) -> None:
    assert json.loads(asyncio.run(encode_in_parts(value))) == json.loads(encode(value))


@pytest.mark.parametrize("value", [{"a": {1: 2}, "b": []}, [{}, [], "\ud800", "ä"], {"t": (1, 2)}], ids=str)
def test_parts_have_the_same_bytes(value: Any) -> None:
    assert asyncio.run(encode_in_parts(value)).decode() == encode(value).decode().replace("\\u00e4", "ä")


def test_deferred_part_is_made_when_it_is_written() -> None:
    made = list[int]()

    def make(number: int) -> dict[str, int]:
        made.append(number)
        return {"number": number}

    value = {"rows": [None, *(Deferred(lambda number=number: make(number)) for number in range(50))]}  # type: ignore[misc]
    assert not made
    found = json.loads(asyncio.run(encode_in_parts(value)))
    assert found == json.loads(encode(value)) == {"rows": [None, *({"number": number} for number in range(50))]}


def test_a_value_outside_json_is_an_error() -> None:
    with pytest.raises(TypeError, match="object can't be written"):
        encode({"a": object()})


def test_other_tasks_run_while_a_long_document_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It pauses wherever it may; between two pauses it writes one item of the list."""
    monkeypatch.setattr(wire, "LONGEST_TURN", 0.0)
    monkeypatch.setattr(wire, "PAUSE", 0.0)
    order: list[str] = []

    async def beat() -> None:
        while True:
            order.append("other")
            await asyncio.sleep(0)

    async def test() -> None:
        beating = asyncio.create_task(beat())
        items = [Deferred(lambda: order.append("item")) for _ in range(100)]
        await encode_in_parts({"rows": items})
        beating.cancel()

    asyncio.run(test())
    longest = max(map(len, "".join(name[0] for name in order).split("o")))
    assert order.count("item") == 100
    assert longest <= 1
