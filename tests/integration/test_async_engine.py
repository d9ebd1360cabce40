"""`AsyncEngine`: the tokens and texts of `LLM`, for many callers at once, and errors that stay with their request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from speculant import AsyncEngine, Client, SamplingParams, StreamPiece
from speculant.engine import Generation, PieceStream
from speculant.errors import CapacityError, ConfigError, RequestError
from speculant.text import Tokenizer
from tests.async_engines import MakeEngine, core, engine_of, read_into, run, until, until_idle
from tests.integration.conftest import MakeLLM
from tests.models import VOCAB_SIZE

__all__ = ["engine_of"]

TEXTS = ["def read(path):", "class A:", "import os", "hello world " * 4]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, seed=6, max_tokens=24)
SAMPLES = SamplingParams(n=3, seed=1, max_tokens=12, stop=["e"])
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


async def read(engine: AsyncEngine, *arguments: Any, **named: Any) -> list[StreamPiece]:
    return [piece async for piece in engine.stream(*arguments, **named)]


def shown(pieces: Sequence[StreamPiece]) -> dict[int, list[tuple[Any, ...]]]:
    """Return each sample's text. The order of the samples' pieces, and the drafts, depend on the batch."""
    samples: dict[int, list[tuple[Any, ...]]] = {}
    for piece in pieces:
        samples.setdefault(piece.index, []).append((piece.token, piece.text, piece.finish_reason))
    return samples


def result(pieces: Sequence[StreamPiece]) -> Any:
    (output,) = (piece.output for piece in pieces if piece.output is not None)
    return output.prompt, output.prompt_token_ids, output.outputs, output.finished, output.error


def test_logprob_texts_are_decoded_by_the_caller(engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token once, and not in the engine's thread, which decodes the output alone."""
    decoded: dict[bool, list[int]] = {True: [], False: []}  # by whether it was the engine's thread
    decode = Tokenizer.decode

    def noting(self: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        decoded[threading.current_thread().name == "speculant-engine"].extend(ids)
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", noting)

    async def main() -> None:
        async with engine_of() as engine:
            params = replace(GREEDY, logprobs=3, prompt_logprobs=2)
            output = await engine.generate(TEXTS[0], params)
            entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
            for entry in entries:
                for token, told in (entry or {}).items():
                    assert told.decoded_token == decode(engine.tokenizer, [token], False)
            tokens = {token for entry in entries for token in entry or ()}
            assert sorted(decoded[False]) == sorted(tokens)
            assert set(decoded[True]) <= set(output.outputs[0].token_ids)
            assert len(tokens) > len(set(output.outputs[0].token_ids)) + 5

    run(main())


# --- the same as LLM


@pytest.mark.covering(1)
@pytest.mark.parametrize("draft", [None, "near"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SAMPLES], ids=["greedy", "sampled", "samples"])
def test_streams_are_those_of_llm(
    llm_of: MakeLLM, engine_of: MakeEngine, draft: str | None, params: SamplingParams
) -> None:
    prompts = [*TEXTS, [5, 6, 7]]
    llm = llm_of(draft)
    expected = [list(llm.stream(prompt, params)) for prompt in prompts]

    async def main() -> None:
        async with engine_of(draft) as engine:
            alone = await read(engine, prompts[0], params)
            together = await asyncio.gather(*(read(engine, prompt, params) for prompt in prompts))
            outputs = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        assert shown(alone) == shown(expected[0])
        assert [shown(pieces) for pieces in together] == [shown(pieces) for pieces in expected]
        assert [result(pieces) for pieces in together] == [result(pieces) for pieces in expected]
        assert [output.outputs for output in outputs] == [result(pieces)[2] for pieces in expected]

    run(main())


def test_async_outputs_are_those_of_llm(llm_of: MakeLLM, engine_of: MakeEngine) -> None:
    async def main() -> None:
        async with engine_of("near", spec_length=3) as engine:
            llm = llm_of("near", spec_length=3)
            for name in ("speculating", "speculating_beams", "speculation", "default_params"):
                assert getattr(engine, name) == getattr(llm, name)
            assert engine.tokenizer.encode(TEXTS[0]) == llm.tokenizer.encode(TEXTS[0])
            output = await engine.generate(TEXTS[0], request_id="mine")
            assert output.request_id == "mine"
            assert len(output.outputs[0].token_ids) == SamplingParams().max_tokens
            assert (engine.metrics.finished, engine.metrics.tokens) == (1, 16)
            before = engine.metrics
            await engine.generate(TEXTS[0])
            assert (before.finished, engine.metrics.finished) == (1, 2)

    run(main())


def test_prompts_are_read_as_llm_reads_them(llm_of: MakeLLM, engine_of: MakeEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, bad_words=["e"])
    forms: list[Any] = [
        {"prompt": "one"},
        {"prompt_token_ids": torch.tensor([7, 8]), "cache_salt": "a"},
        np.array([7, 8]),
    ]

    async def main() -> None:
        async with engine_of() as engine:
            for prompt in forms:
                (expected,) = llm_of().generate([prompt], params)
                result = await engine.generate(prompt, params)
                assert (result.prompt, result.outputs) == (expected.prompt, expected.outputs)
            for wrong in (b"one", {"promt": "one"}, None, ["one", "two"]):
                with pytest.raises(RequestError):
                    await engine.generate(wrong, params)  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="different cache salts"):
                await engine.generate(forms[1], params, cache_salt="b")

    run(main())


def test_many_requests_share_the_engine(llm_of: MakeLLM, engine_of: MakeEngine) -> None:
    prompts = [[i + 1, 2 * i + 1, 5] for i in range(30)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=1 + i % 9) for i in range(30)]
    expected = llm_of().generate(prompts, params)

    async def main() -> None:
        async with engine_of("near", max_num_seqs=4, max_num_batched_tokens=32) as engine:
            outputs = await asyncio.gather(*map(engine.generate, prompts, params))
            assert core(engine).metrics.steps < sum(each.max_tokens or 0 for each in params)
        assert [output.outputs for output in outputs] == [output.outputs for output in expected]

    run(main())


def test_priority_and_salt_arrive(engine_of: MakeEngine) -> None:
    async def main() -> None:
        async with engine_of(max_num_seqs=1) as engine:
            ended: list[int] = []

            async def ask(priority: int) -> None:
                await engine.generate(TEXTS[0], GREEDY, priority=priority)
                ended.append(priority)

            await asyncio.gather(*map(ask, (7, 9, 1, 5)))
            assert ended[0] == 7
            assert ended[1:] == [1, 5, 9]
            cached = [
                (await engine.generate(TEXTS[3], GREEDY, cache_salt=cache_salt)).metrics.cached_tokens
                for cache_salt in "aab"
            ]
            assert [tokens > 0 for tokens in cached] == [False, True, False]

    run(main())


def test_a_client_is_served_beside_a_flood(engine_of: MakeEngine) -> None:
    """Its answers come before those of another client's long requests, though these have a lower priority."""

    async def main() -> None:
        async with engine_of(max_num_seqs=2) as engine:
            flood, ended = Client("flood"), list[str]()

            async def ask(client: Client, params: SamplingParams, priority: int) -> None:
                await engine.generate(TEXTS[0], params, priority=priority, client=client)
                ended.append(client.name)

            asked = [asyncio.create_task(ask(flood, replace(LONG, max_tokens=100), -1_000_000)) for _ in range(6)]
            await asyncio.sleep(0)
            await asyncio.gather(*(ask(Client("other"), GREEDY, 7) for _ in range(3)))
            assert ended == ["other"] * 3
            await asyncio.gather(*asked)

    run(main())


def test_loops_in_several_threads_share_the_engine(llm_of: MakeLLM, engine_of: MakeEngine) -> None:
    expected = [output.outputs for output in llm_of().generate(TEXTS, GREEDY)]
    engine, said = engine_of("near"), dict[int, Any]()

    async def ask() -> list[Any]:
        return [output.outputs for output in await asyncio.gather(*(engine.generate(text, GREEDY) for text in TEXTS))]

    def work(place: int) -> None:
        said[place] = asyncio.run(ask())

    threads = [threading.Thread(target=work, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run(engine.shutdown(drain=True))
    assert said == dict.fromkeys(range(3), expected)


# --- how it wakes and sleeps


def test_a_reader_is_woken_once_a_step(engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    send = PieceStream.send
    monkeypatch.setattr(PieceStream, "send", lambda stream, pieces: told.append(len(pieces)) or send(stream, pieces))

    async def main() -> None:
        async with engine_of("target", spec_length=7) as engine:
            pieces = await read(engine, TEXTS[0], SamplingParams(temperature=0, n=2, max_tokens=40, ignore_eos=True))
            assert sum(told) == len(pieces) + 1
            assert len(told) <= engine.metrics.steps <= 12

    run(main())


def test_a_slow_reader_misses_nothing(llm_of: MakeLLM, engine_of: MakeEngine) -> None:
    expected = list(llm_of("near").stream(TEXTS[0], GREEDY))

    async def main() -> None:
        pieces = []
        async with engine_of("near") as engine:
            async for piece in engine.stream(TEXTS[0], GREEDY):
                if len(pieces) in (0, 7):
                    time.sleep(0.1)  # the whole loop stands still
                pieces.append(piece)
        assert shown(pieces) == shown(expected)

    run(main())


def test_an_idle_engine_sleeps(engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with engine_of() as engine:
            await engine.generate(TEXTS[0], GREEDY)
            await asyncio.sleep(0.05)  # the reader's good-bye
            asked: list[None] = []
            has_unfinished = core(engine).has_unfinished
            monkeypatch.setattr(core(engine), "has_unfinished", lambda: asked.append(None) or has_unfinished())
            await asyncio.sleep(0.2)
            assert not asked
            await engine.generate(TEXTS[0], GREEDY)
            assert asked

    run(main())


# --- errors of a request


BAD: list[Any] = [
    ({"prompt": ""}, RequestError),
    pytest.param({"prompt": "x" * 256}, RequestError, marks=pytest.mark.slow),
    pytest.param({"prompt": [1, VOCAB_SIZE]}, RequestError, marks=pytest.mark.slow),
    ({"prompt": None}, RequestError),
    pytest.param({"prompt": [1.5]}, RequestError, marks=pytest.mark.slow),
    pytest.param(
        {"sampling_params": SamplingParams(logit_bias={VOCAB_SIZE: 1.0})}, RequestError, marks=pytest.mark.slow
    ),
    ({"sampling_params": SamplingParams(speculation={"verification": "macht"})}, ConfigError),
    ({"sampling_params": {"temperature": 0}}, AttributeError),
    ({"request_id": "taken"}, RequestError),
    pytest.param({"request_id": ["x"]}, RequestError, marks=pytest.mark.slow),
    ({"priority": "high"}, RequestError),
    ({"cache_salt": ["x"]}, RequestError),
    ({"cache_salt": "s\0long"}, RequestError),
    ({"client": "somebody"}, RequestError),
]


@pytest.mark.parametrize(("wrong", "kind"), BAD, ids=lambda value: str(value)[:40])
def test_a_wrong_request_is_refused_and_the_others_go_on(
    llm_of: MakeLLM, engine_of: MakeEngine, wrong: dict[str, Any], kind: type[Exception]
) -> None:
    (expected,) = llm_of().generate(TEXTS[1], GREEDY)

    async def main() -> None:
        async with engine_of("near") as engine:
            neighbour = engine.stream(TEXTS[1], GREEDY, request_id="taken")
            pieces = [await anext(neighbour)]
            for call in (engine.generate, lambda **named: anext(engine.stream(**named))):
                with pytest.raises(kind):
                    await call(**{"prompt": TEXTS[0], "sampling_params": GREEDY, **wrong})
            pieces += [piece async for piece in neighbour]
            assert result(pieces)[2] == expected.outputs
            engine.check_health()
            await until_idle(engine)
            assert engine.metrics.finished == 1

    run(main())


def test_a_full_queue_refuses_at_once_and_recovers(engine_of: MakeEngine) -> None:
    async def main() -> None:
        async with engine_of(max_num_seqs=1, max_waiting=2) as engine:
            running = engine.stream(TEXTS[0], LONG)
            await anext(running)
            waiting = [asyncio.create_task(engine.generate(TEXTS[1], GREEDY)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(CapacityError, match="max_waiting is 3"):
                await engine.generate(TEXTS[2], GREEDY)
            waiting[0].cancel()
            await asyncio.wait(waiting[:1])
            with pytest.raises(CapacityError):
                await engine.generate(TEXTS[2], replace(GREEDY, n=2))
            later = asyncio.create_task(engine.generate(TEXTS[2], GREEDY))
            await asyncio.sleep(0)
            await running.aclose()
            for task in (waiting[1], later):
                assert (await task).finished
            assert (engine.metrics.finished, engine.metrics.aborted) == (2, 2)

    run(main())


def break_target(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, request_id: str, position: int) -> None:
    """Make the target fail for every pass that feeds a request's tokens from a position on."""
    target, by_id = core(engine)._context.target, core(engine)._by_id
    forward = target.forward

    def failing(batch: Any, storage: Any, taps: Any = ()) -> Any:
        own = {request.seq_id for request in by_id.get(request_id, ())}
        for segment in batch.segments:
            if segment.seq_id in own and segment.end > position:
                raise ArithmeticError("this sequence breaks the target")
        return forward(batch, storage, taps)

    monkeypatch.setattr(target, "forward", failing)


@pytest.mark.covering(1)
@pytest.mark.parametrize("draft", [None, "near"])
@pytest.mark.parametrize("position", [3, 25])
def test_a_failing_request_fails_alone(
    llm_of: MakeLLM, engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch, draft: str | None, position: int
) -> None:
    llm = llm_of(draft)
    expected = [list(llm.stream(text, GREEDY)) for text in TEXTS]

    async def main() -> None:
        async with engine_of(draft) as engine:
            break_target(engine, monkeypatch, "broken", position)
            neighbours = [asyncio.create_task(read(engine, text, GREEDY)) for text in TEXTS]
            had: list[StreamPiece] = []
            with pytest.raises(ArithmeticError, match="breaks the target"):
                await read_into(had, engine.stream(TEXTS[0], GREEDY, request_id="broken"))
            assert shown(had[:-1]) == shown(expected[0][: len(had) - 1])
            assert bool(had[:-1]) == (position > 20)
            assert had[-1].finish_reason == "error"
            assert had[-1].output is not None
            assert [shown(pieces) for pieces in await asyncio.gather(*neighbours)] == [
                shown(pieces) for pieces in expected
            ]
            with pytest.raises(ArithmeticError):
                await engine.generate(TEXTS[0], GREEDY, request_id="broken")
            engine.check_health()
            assert (engine.metrics.finished, engine.metrics.failed) == (4, 2)

    run(main())


def test_undecodable_text_ends_its_request_alone(
    llm_of: MakeLLM, engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = llm_of().generate(TEXTS[1], GREEDY)
    make = Generation.piece

    def failing(generation: Generation, output: Any) -> StreamPiece:
        if generation.request_id == "broken":
            raise UnicodeError("no text")
        return make(generation, output)

    monkeypatch.setattr(Generation, "piece", failing)

    async def main() -> None:
        async with engine_of("near") as engine:
            neighbour = asyncio.create_task(engine.generate(TEXTS[1], GREEDY))
            with pytest.raises(UnicodeError):
                await engine.generate(TEXTS[0], LONG, request_id="broken")
            assert (await neighbour).outputs == expected.outputs
            await until(lambda: not core(engine).has_unfinished())

    run(main())
