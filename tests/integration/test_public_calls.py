"""Every public member of `LLM` and `AsyncEngine`, called by other threads while a cache is amid a change."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from speculant import LLM, AsyncEngine, SamplingParams, cache
from speculant.engine import BeamSearchParams, PlainPrompt
from tests.async_engines import MakeEngine, core, engine_of, until_idle
from tests.examples import examples
from tests.models import EXACT_DTYPE, Checkpoints

__all__ = ["engine_of"]

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CHAT = [{"role": "user", "content": "class A:"}]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
PROMPTS = ["def read(path, mode):", "def read(path, mode):\n    import os", "class Reader: pass"]
SETTINGS: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "max_model_len": 96, "chat_template": TEMPLATE}
PAUSE = 2e-5  # seconds at each line of a cache, so that another thread runs there
LONGEST_WAIT = 120.0
ROUNDS = examples(3, least=1)

SHARED: dict[str, Callable[[Any], object]] = {
    "check_chats": lambda user: user.check_chats(),
    "decoder_tokens": lambda user: user.decoder_tokens(PlainPrompt("a", None)),
    "get_default_sampling_params": lambda user: user.get_default_sampling_params(),
    "get_tokenizer": lambda user: user.get_tokenizer().encode("class"),
    "guard_forms": lambda user: user.guard_forms(),
    "prepare": lambda user: user.prepare(SamplingParams(stop=["e"], bad_words=["b"])),
    "read_prompt": lambda user: user.read_prompt("class"),
    "render_chat": lambda user: user.render_chat(CHAT),
}
OF_LLM: dict[str, Callable[[LLM], object]] = SHARED | {
    "beam_search": lambda llm: llm.beam_search(["class"], BeamSearchParams(beam_width=2, max_tokens=2)),
    "chat": lambda llm: llm.chat(CHAT, SHORT),
    "generate": lambda llm: llm.generate(PROMPTS[0], SHORT),
    "get_metrics": lambda llm: llm.get_metrics(),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "stream": lambda llm: next(llm.stream(PROMPTS[1], SHORT)),  # dropped after a piece
    "stream_chat": lambda llm: list(llm.stream_chat(CHAT, SHORT)),
}
OF_ASYNC: dict[str, Callable[[AsyncEngine], object]] = SHARED | {
    "chat": lambda engine: asyncio.run(engine.chat(CHAT, SHORT)),
    "check_health": lambda engine: engine.check_health(),
    "end": lambda engine: engine.end("unknown"),
    "generate": lambda engine: asyncio.run(engine.generate(PROMPTS[0], SHORT)),
    "has_begun": lambda engine: engine.has_begun("own-0"),
    "prefill": lambda engine: asyncio.run(engine.prefill(PROMPTS[2])),
    "shutdown": lambda engine: None,  # the test's end
    "stream": lambda engine: asyncio.run(read_one(engine.stream(PROMPTS[1], SHORT))),
    "stream_chat": lambda engine: asyncio.run(read_one(engine.stream_chat(CHAT, SHORT))),
}


async def read_one(pieces: Any) -> object:
    piece = await anext(pieces)
    await pieces.aclose()
    return piece


def members(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def calls_of(kind: type, methods: dict[str, Callable[[Any], object]]) -> list[Callable[[Any], object]]:
    """Return a call of every public method, as the table has it, and a read of every property."""
    values = {name for name in members(kind) if isinstance(getattr(kind, name), property)}
    assert members(kind) - values == set(methods), "each public method needs a call here"
    return [*methods.values(), *(lambda user, name=name: getattr(user, name) for name in sorted(values))]


@contextmanager
def slow_caches() -> Iterator[None]:
    """Let other threads run at each line of the caches' code, in the threads that are started in this block."""
    (folder,) = cache.__path__

    def on_call(frame: Any, event: str, argument: object) -> Any:
        return on_line if frame.f_code.co_filename.startswith(folder) else None

    def on_line(frame: Any, event: str, argument: object) -> Any:
        if event == "line":
            time.sleep(PAUSE)
        return on_line

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threading.settrace(on_call)
    try:
        yield
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
        sys.setswitchinterval(interval)


def disturbed(user: Any, calls: list[Callable[[Any], object]], run: Callable[[], list[str]], rounds: int) -> list[str]:
    """Return the texts of `run`, repeated in a thread of its own while three others make the calls without end."""
    over = threading.Event()

    def disturb(own: list[Callable[[Any], object]]) -> None:
        while True:
            for call in own:
                call(user)
            if over.is_set():
                return

    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(disturb, calls[first::3]) for first in range(3)]
        try:
            texts = [text for _ in range(rounds) for text in pool.submit(run).result(LONGEST_WAIT)]
        finally:
            over.set()
        for other in others:
            other.result(LONGEST_WAIT)
    return texts


@pytest.mark.parametrize("backend", ["paged", "slotted"])
def test_no_call_disturbs_a_generation_of_another_thread(checkpoints: Checkpoints, backend: str) -> None:
    llm = LLM(
        checkpoints.target, checkpoints.near, dtype=EXACT_DTYPE, draft_quantization="none", kv_cache_backend=backend,
        kv_memory=2**20, **SETTINGS,
    )  # fmt: skip
    calls = calls_of(LLM, OF_LLM)

    def run() -> list[str]:
        return [each.outputs[0].text for each in llm.generate(PROMPTS, GREEDY)]

    expected = run()
    with slow_caches():
        assert disturbed(llm, calls, run, ROUNDS) == ROUNDS * expected
    llm.engine.check()
    assert llm.reset_prefix_cache()
    assert not llm.engine.has_unfinished()
    figures: dict[str, Any] = {metric.name: metric for metric in llm.get_metrics()}
    assert figures["speculant:blocks_used"].value == 0
    for own in (llm.engine._context.cache, *llm.engine._drafters.caches):
        assert own.free_tokens() == own.num_blocks * own.block_size


def test_no_call_disturbs_an_async_engine(engine_of: MakeEngine) -> None:
    with slow_caches():  # the engine's thread too
        engine = engine_of("near", **SETTINGS)

        async def each(number: int) -> str:
            return (await engine.generate(PROMPTS[number], GREEDY, request_id=f"own-{number}")).outputs[0].text

        async def all_texts() -> list[str]:
            return await asyncio.gather(*map(each, range(len(PROMPTS))))

        expected = asyncio.run(all_texts())
        texts = disturbed(engine, calls_of(AsyncEngine, OF_ASYNC), lambda: asyncio.run(all_texts()), ROUNDS)
        assert texts == ROUNDS * expected

    async def end() -> None:
        await until_idle(engine)
        await engine.shutdown(drain=True)

    asyncio.run(end())
    core(engine).check()
    assert core(engine).reset_prefix_cache()
