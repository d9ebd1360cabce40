"""Random requests to every surface: a stream is the whole answer, and both are what `LLM` says, usage included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import pytest

from speculant import LLM, AsyncEngine, RequestOutput
from tests.examples import sizes
from tests.servers import LiveServer
from tests.surfaces import CHAT, SURFACES, TAGS, Read, Surface, Wanted, draw, write_model


class Sides(NamedTuple):
    """A server that drafts, and the same model without drafts."""

    server: LiveServer
    llm: LLM


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    folder = tmp_path_factory.mktemp("surfaces")
    target, draft = (write_model(folder / name, noise) for name, noise in (("target", 0.0), ("draft", 0.1)))
    engine = AsyncEngine(target, draft_model=draft, dtype="float32", spec_length=3, max_num_seqs=8)
    server = LiveServer(engine, queue_timeout=None, first_token_timeout=None).ready()
    server.http.timeout = None  # the test has a limit of its own
    llm = LLM(target, dtype="float32", max_num_seqs=8)
    yield Sides(server, llm)
    server.stop()


@pytest.mark.parametrize("count", sizes(48, 1000))
def test_a_stream_is_the_whole_answer_and_that_of_llm(sides: Sides, count: int) -> None:
    chance, seen = Random(count), Counter[str]()
    for number in range(count):
        surface = SURFACES[number % len(SURFACES)]
        wanted = draw(chance, surface)
        seen.update(_checked(sides, surface, wanted, chance))
    print(f"{count} requests: {dict(seen)}")
    assert {"calls", "reasoning", "forced", "equal to LLM", "cut", "usage of a stream"} <= {*seen}


def _checked(sides: Sides, surface: Surface, wanted: Wanted, chance: Random) -> Iterator[str]:
    """Check the answers to a request, and yield the names of the features that occurred in them."""
    http, body = sides.server.http, surface.write(wanted)
    if chance.random() < 0.5:
        whole, streamed = surface.whole(http, body), surface.streamed(http, body)
    else:
        streamed, whole = surface.streamed(http, body), surface.whole(http, body)
    assert streamed.choices == whole.choices, (surface.path, body)
    assert whole.usage is not None
    if streamed.usage is not None:
        yield "usage of a stream"
        assert streamed.usage == whole.usage, (surface.path, body)
    outputs = wanted.output(sides.llm)
    assert whole.usage[0] == sum(len(output.prompt_token_ids) for output in outputs), (surface.path, body)
    if wanted.is_told_by_llm:
        yield from _equal_to_llm(surface, wanted, whole, outputs)
    if surface.chats and surface is not CHAT:
        chat = CHAT.whole(http, CHAT.write(wanted))
        assert (whole.shared, whole.usage) == (chat.shared, chat.usage), (surface.path, body)
    yield from (name for name in ("calls", "reasoning", "cut") if any(getattr(each, name) for each in whole.choices))
    yield from ["forced"] if wanted.forces else []


def _equal_to_llm(surface: Surface, wanted: Wanted, whole: Read, outputs: list[RequestOutput]) -> Iterator[str]:
    """Compare an answer with that of `LLM`, which leaves tags in the text."""
    samples = [sample for output in outputs for sample in output.outputs]
    before = [prompt if wanted.echo else "" for prompt in wanted.prompts or [""] for _ in range(wanted.n)]
    assert whole.usage is not None
    assert whole.usage[1] == sum(len(sample.token_ids) for sample in samples), (surface.path, wanted)
    for choice, sample, first in zip(whole.choices, samples, before, strict=True):
        if choice.tokens is not None:
            assert choice.tokens == list(sample.token_ids), (surface.path, wanted)
        if wanted.prompts or not (choice.reasoning or any(tag in sample.text for tag in TAGS)):
            yield "equal to LLM"
            assert choice.text == first + sample.text, (surface.path, wanted)
