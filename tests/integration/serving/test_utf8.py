"""Streamed text equals unstreamed text for any bytes of a token: each token of this model is one byte."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from speculant import AsyncEngine
from tests.examples import sizes
from tests.models import PRINTABLE, Shape
from tests.raw_clients import Reply, encoded, exchange
from tests.servers import LiveServer
from tests.tagged import write_tagged

TEMPLATE = "{%- for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor -%}"
FORMS = [
    "[😀-🙏]{1,12}",
    "[一-龥]{1,16}",
    "[가-힣ぁ-んァ-ン]{1,16}",
    "[à-ÿА-яα-ω ]{1,24}",
    "[a-z 一-龥😀-🙏é]{1,20}",
    "(👩\u200d👩\u200d👧|🇩🇪|e\u0301|👍🏽|\u200f|\ufeff|\x00|\U0010ffff){1,8}",
    "[\U00010000-\U0010ffff]{1,10}",
    "(ab?|[é€𝄞]c?){1,20}",
]
STOPS = ["😀", "é", "€", "的", "a", "\ufffd", "\u0301", "b😀"]
OTHERS = [token for token in range(256) if token not in PRINTABLE]  # parts of characters, and control characters


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("utf8")
    shapes = {"target": Shape(), "near": Shape(noise=0.1)}
    paths = [write_tagged(folder / name, TEMPLATE, (), shape) for name, shape in shapes.items()]
    engine = AsyncEngine(paths[0], draft_model=paths[1], dtype="float32", max_num_seqs=16, spec_length=3)
    live = LiveServer(engine).ready()
    yield live
    live.stop()


def draw_case(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a path and a body: text of a form, or arbitrary bytes that may not be whole characters."""
    body: dict[str, Any] = {"seed": chance.getrandbits(32), "n": chance.choice([1, 1, 1, 2])}
    if chance.random() < 0.6:
        body["structured_outputs"] = {"regex": chance.choice(FORMS)}
    else:
        likely = chance.sample(OTHERS, chance.choice([8, 32, 120]))
        body["logit_bias"] = {str(token): chance.choice([2, 6]) for token in likely}
    if chance.random() < 0.4:
        body["stop"] = chance.sample(STOPS, chance.choice([1, 3]))
        body["include_stop_str_in_output"] = chance.random() < 0.5
    limit, text = chance.randrange(1, 40), "".join(chance.choices("aé的😀", k=4))
    path = chance.choice(["/v1/completions", "/v1/chat/completions", "/v1/responses"])
    if path == "/v1/responses":
        del body["n"]
        return path, {**body, "input": text, "max_output_tokens": limit}
    if path == "/v1/completions":
        return path, {**body, "prompt": text, "max_tokens": limit, "logprobs": chance.choice([None, 1])}
    return path, {**body, "messages": [{"role": "user", "content": text}], "max_completion_tokens": limit}


Answers = dict[int, tuple[str, str | None]]  # by choice: its text, and why it ended


def whole(path: str, reply: Reply) -> Answers:
    value = reply.value
    if path == "/v1/responses":
        return {0: (value["output"][0]["content"][0]["text"], value["status"])}
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in value["choices"]]
    return {
        i: (text, choice["finish_reason"]) for i, (text, choice) in enumerate(zip(texts, value["choices"], strict=True))
    }


def streamed(path: str, reply: Reply) -> Answers:
    if path == "/v1/responses":
        return _of_events(reply)
    answers: Answers = {}
    for chunk in reply.chunks:
        for choice in chunk["choices"]:
            before, reason = answers.get(choice["index"], ("", None))
            assert reason is None, "something followed the end of a choice"
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            answers[choice["index"]] = before + text, choice["finish_reason"]
    return answers


def _of_events(reply: Reply) -> Answers:
    events = [json.loads(event) for event in reply.events]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    last = events[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == text
    return {0: (text, last["status"])}


@pytest.mark.parametrize("count", sizes(40, 2000))
def test_streamed_utf8_equals_unstreamed(server: LiveServer, count: int) -> None:
    chance = random.Random(count)
    cases = iter([draw_case(chance) for _ in range(count)])
    seen = ""

    async def some() -> None:
        nonlocal seen
        for path, body in cases:
            first = await exchange(server.url, encoded(path, body))
            assert first.status == 200, (body, first.body)
            second = await exchange(server.url, encoded(path, {**body, "stream": True}))
            expected = whole(path, first)
            assert streamed(path, second) == expected, body
            seen = seen + expected[0][0] if len(seen) < 100_000 else seen

    async def all_cases() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(some())

    asyncio.run(all_cases())
    for kind in ("😀", "的", "\ufffd"):  # the cases are the intended ones
        low, high = {"😀": ("😀", "🙏"), "的": ("一", "龥"), "\ufffd": ("\ufffd", "\ufffd")}[kind]
        assert any(low <= character <= high for character in seen), kind
