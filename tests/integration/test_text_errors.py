"""Text that can't be decoded ends its own request alone."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, AsyncEngine, RequestOutput, SamplingParams
from speculant.errors import RequestError
from speculant.text import stream as stop_module
from tests.integration.conftest import MakeLLM
from tests.models import ALPHABET, write_checkpoint

BROKEN, HELD, FINE = ALPHABET.index("!"), ALPHABET.index("A"), ALPHABET.index("a")
PROMPT = [FINE] * 3
STRIP = {"type": "Strip", "content": "!", "start": 0, "stop": 2}  # panics on a token of one "!"
DECODERS = {"at a token": STRIP, "at the end": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, STRIP]}}


@pytest.fixture(params=list(DECODERS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint whose decoder panics on BROKEN, and with byte fallback on HELD once its run of bytes has ended."""
    tokens = ["<0x21>" if index == HELD else token for index, token in enumerate(ALPHABET)]
    folder = Path(write_checkpoint(tmp_path / "model", tokens=tokens))
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["decoder"] = DECODERS[request.param]
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture
def broken(folder: Path) -> SamplingParams:
    """Settings under which the text can't be decoded."""
    held = "ByteFallback" in (folder / "tokenizer.json").read_text(encoding="utf-8")
    return forced(HELD if held else BROKEN, max_tokens=1)


def forced(token: int, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 4, "logit_bias": {token: 1000.0}, **settings})


def assert_one_failed(failed: RequestOutput, fine: RequestOutput) -> None:
    assert failed.outputs[0].finish_reason == "error"
    assert "can't decode" in str(failed.error)
    assert (fine.outputs[0].text, fine.outputs[0].finish_reason, fine.error) == ("aaaa", "length", None)


def test_a_panic_of_the_decoder_ends_one_request(folder: Path, broken: SamplingParams) -> None:
    llm = LLM(str(folder))
    failed, fine = llm.generate([PROMPT, PROMPT], [broken, forced(FINE)])
    assert_one_failed(failed, fine)
    assert not llm.engine.has_unfinished()
    with pytest.raises(RequestError, match="can't decode"):
        llm.generate(PROMPT, broken)
    with pytest.raises(RequestError, match="can't decode"):
        list(llm.stream(PROMPT, broken))


def test_a_panic_of_the_decoder_leaves_the_thread_alive(folder: Path, broken: SamplingParams) -> None:
    async def run() -> list[Any]:
        async with AsyncEngine(str(folder)) as engine:
            both = (engine.generate(PROMPT, params) for params in (broken, forced(FINE)))
            results = await asyncio.gather(*both, return_exceptions=True)
            engine.check_health()
            return [*results, await engine.generate(PROMPT, forced(FINE))]

    failed, fine, later = asyncio.run(run())
    assert isinstance(failed, RequestError)
    assert fine.outputs[0].text == later.outputs[0].text == "aaaa"


def test_a_token_that_can_t_be_decoded_alone_has_no_text(folder: Path) -> None:
    (result,) = LLM(str(folder)).generate([FINE, BROKEN, FINE], forced(FINE, prompt_logprobs=0))
    _, broken, fine = result.prompt_logprobs or []
    assert (broken[BROKEN].decoded_token, fine[FINE].decoded_token) == (None, "a")


def test_a_prompt_that_can_t_be_encoded_is_refused(llm_of: MakeLLM) -> None:
    with pytest.raises(RequestError, match="can't encode"):
        llm_of().generate("\ud800", SamplingParams(max_tokens=1))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads in which stop strings were compiled."""
    threads: list[str] = []
    compile_them = stop_module.beginnings_of

    def note(stops: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compile_them(stops)

    monkeypatch.setattr(stop_module, "beginnings_of", note)
    return threads


def test_stop_strings_are_compiled_once_for_all_samples(llm_of: MakeLLM, compiled: list[str]) -> None:
    params = SamplingParams(n=4, max_tokens=4, stop=["no such text", "nor this one"])
    results = llm_of().generate([PROMPT, PROMPT], params)
    assert [len(result.outputs) for result in results] == [4, 4]
    assert len(compiled) == 1


def test_stop_strings_are_compiled_by_the_caller(folder: Path, compiled: list[str]) -> None:
    async def run() -> None:
        async with AsyncEngine(str(folder)) as engine:
            await engine.generate(PROMPT, forced(FINE, n=4, stop=["aaaaa"]))

    asyncio.run(run())
    assert compiled == [threading.current_thread().name]


class TroubleError(Exception):
    """What goes wrong."""


def test_a_failed_commit_leaves_no_text_behind(llm_of: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache fails after the step's tokens were pushed to the stop checker."""
    llm = llm_of("target", spec_length=3)
    cache = llm.engine._context.cache
    insert_prefix = cache.insert_prefix

    def fail(seq_id: int, tokens: Sequence[int]) -> None:
        if list(tokens[: len(PROMPT)]) == PROMPT and len(tokens) > len(PROMPT) + 6:
            raise TroubleError
        insert_prefix(seq_id, tokens)

    monkeypatch.setattr(cache, "insert_prefix", fail)
    settings = SamplingParams(temperature=0, max_tokens=16, stop=["not to be found"])
    failed, fine = llm.generate([PROMPT, [FINE, FINE]], settings)
    (sample,) = failed.outputs
    assert (sample.finish_reason, fine.outputs[0].finish_reason) == ("error", "length")
    assert 0 < len(sample.token_ids) <= 6
    assert sample.text == llm.tokenizer.decode(sample.token_ids)
