"""Two clients that send large texts all the time hardly delay a third one, who asks for eight tokens."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from speculant.serving import MOST_MESSAGES
from tests.raw_clients import Reply, exchange
from tests.servers import ServerProcess, in_background, serve_process

pytestmark = pytest.mark.slow

__all__ = ["serve_process"]
SECONDS, ATTACKERS, MOST_MORE = 2.0, 2, 0.25
TEMPLATE = """{%- set ns = namespace(last=0) %}{% for m in messages[::-1] %}{% if m.role == 'user' and not ns.last %}
{%- set ns.last = loop.index %}{% endif %}{% endfor %}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for document in documents or [] %}{{ document | tojson }}{% endfor %}{% for m in messages %}
{{- '<|' + m.role + '|>' + m.content.split('</think>')[-1] | trim + '<|end|>' }}{% endfor %}"""
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, INFILL = "/v1/messages", "/infill"


def messages(count: int, text: str = "a") -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i in range(count)]


def tools(count: int) -> list[dict[str, Any]]:
    properties = {f"p{i}": {"type": "string", "enum": ["a", "b"], "description": "x" * 20} for i in range(250)}
    schema = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(count)]


def flat(key: str, count: int = 128) -> list[dict[str, Any]]:
    """Return tools in the shape of Responses or Messages. key: of their schemas."""
    functions = [each["function"] for each in tools(count)]
    kind = {"type": "function"} if key == "parameters" else {}
    return [{**kind, "name": each["name"], key: each["parameters"]} for each in functions]


def nested(depth: int) -> dict[str, Any]:
    """Return a schema of objects within objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def joined(first: str, item: str, count: int, last: str) -> str:
    return f"{first}{f'{item},' * count}{item}{last}"


BLOCK = {"type": "text", "text": "a"}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
FILE = {"filename": "a.py", "text": "word " * 300}
ATTACKS: dict[str, tuple[str, dict[str, Any] | str]] = {
    "words": (COMPLETIONS, {"prompt": "word " * 200_000}),
    "one word": (COMPLETIONS, {"prompt": "ab" * 500_000}),
    "cut text": (COMPLETIONS, {"prompt": "word " * 200_000, "truncate_prompt_tokens": 4}),
    "many prompts": (COMPLETIONS, {"prompt": ["word " * 3000] * 256}),
    "token ids": (COMPLETIONS, joined('{"prompt":[', "1", 1_000_000, "]}")),
    "tokenize": ("/tokenize", {"prompt": "word " * 200_000}),
    "token texts": ("/tokenize", {"prompt": "a\n" * 500_000, "return_token_strs": True}),
    "detokenize": ("/detokenize", {"tokens": [5000] * 131_000}),
    "unknown objects": (COMPLETIONS, joined('{"prompt":"a","max_tokens":1,"x":[', '{"a":{}}', 65_000, "]}")),
    "more unknown objects": (COMPLETIONS, joined('{"prompt":"a","x":[', "{}", 1_300_000, "]}")),
    "unknown fields": (COMPLETIONS, {"prompt": "a", "max_tokens": 1, **{f"k{i}": 1 for i in range(250_000)}}),
    "wrong biases": (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(250_000)}}),
    "stop strings": (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 130_000}),
    "long number": (COMPLETIONS, '{"prompt":"a","max_tokens":1,"x":' + "9" * 4_000_000 + "}"),
    "long numbers": (COMPLETIONS, joined('{"prompt":"a","max_tokens":1,"x":[', "9" * 4000, 900, "]}")),
    "long fraction": (COMPLETIONS, '{"prompt":"a","max_tokens":1,"x":0.' + "9" * 4_000_000 + "}"),
    "escapes": (COMPLETIONS, '{"prompt":"' + "\\u0041" * 650_000 + '"}'),
    "backslashes": (COMPLETIONS, '{"prompt":"a","max_tokens":1,"x":"' + "\\\\" * 1_900_000 + '"}'),
    "quotes": (COMPLETIONS, joined('{"prompt":"a","x":[', '""', 1_300_000, "]}")),
    "deep documents": (CHATS, '{"messages":[],"documents":[' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "]}"),
    "long messages": (CHATS, {"messages": messages(2048, "word " * 380)}),
    "short messages": (CHATS, {"messages": messages(2048)}),
    "too many messages": (CHATS, {"messages": messages(30_000)}),
    "parts": (CHATS, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 80_000}]}),
    "tools": (CHATS, {"messages": messages(1), "max_tokens": 1, "tools": tools(128)}),
    "required tools": (CHATS, {"messages": messages(1), "tools": tools(128), "tool_choice": "required"}),
    "documents": (CHATS, {"messages": messages(1), "max_tokens": 1, "documents": [{"t": "x"}] * 125_000}),
    "template variables": (CHATS, {"messages": messages(1), "chat_template_kwargs": {"x": [[1] * 10] * 12_000}}),
    "items": (RESPONSES, {"input": messages(60_000)}),
    "long items": (RESPONSES, {"input": messages(2048, "word " * 380)}),
    "response tools": (RESPONSES, {"input": "a", "max_output_tokens": 1, "tools": flat("parameters", 12)}),
    "required response tools": (RESPONSES, {"input": "a", "tools": flat("parameters", 12), "tool_choice": "required"}),
    "turns": (MESSAGES, {"max_tokens": 1, "messages": messages(2048, "word " * 380)}),
    "blocks": (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [BLOCK] * 40_000}]}),
    "system blocks": (MESSAGES, {"max_tokens": 1, "messages": messages(1), "system": [BLOCK] * 40_000}),
    "calls": (MESSAGES, {"max_tokens": 1, "messages": [{"role": "assistant", "content": [USE] * 20_000}]}),
    "message tools": (MESSAGES, {"max_tokens": 1, "messages": messages(1), "tools": flat("input_schema")}),
    "required message tools": (
        MESSAGES,
        {"max_tokens": 1, "messages": messages(1), "tools": flat("input_schema"), "tool_choice": {"type": "any"}},
    ),
    "deep tools": (
        MESSAGES,
        {
            "max_tokens": 1,
            "messages": messages(1),
            "tools": [{"name": f"f{i}", "input_schema": nested(60)} for i in range(128)],
            "tool_choice": {"type": "any"},
        },
    ),
    "counted turns": (f"{MESSAGES}/count_tokens", {"messages": messages(1, "word " * 200_000)}),
    "counted tools": (f"{MESSAGES}/count_tokens", {"messages": messages(1), "tools": flat("input_schema")}),
    "a large hole": (INFILL, {"input_prefix": "word " * 90_000, "input_suffix": "word " * 90_000}),
    "files": (INFILL, {"input_prefix": "a", "input_suffix": "b", "input_extra": [FILE] * 600}),
    "many files": (INFILL, {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "a"}] * MOST_MESSAGES}),
    "a large suffix": (COMPLETIONS, {"prompt": "a", "suffix": "word " * 180_000}),
    "prediction": (COMPLETIONS, {"prompt": "a", "prediction": {"type": "content", "content": "a\n" * 65_000}}),
    "banned words": (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "bad_words": ["abcdefghijklmno"] * 1024}),
}


def with_marks(folder: Path) -> None:
    """Let three tokens of a checkpoint be the marks for filling in the middle."""
    vocabulary = Backend.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    names = ("fim_pre_token", "fim_suf_token", "fim_mid_token")
    settings |= {name: vocabulary.id_to_token(8000 + place) for place, name in enumerate(names)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture
def server(serve_process: Callable[..., ServerProcess], tmp_path: Path) -> ServerProcess:
    """Return a server of the embedded pair, with a template, marks for the cursor, and with a key for each client."""
    with as_file(files("speculant") / "assets" / "demo" / "target") as demo:
        shutil.copytree(demo, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    with_marks(tmp_path / "model")
    keys = [flag for client in range(ATTACKERS + 1) for flag in ("--api-key", f"key{client}")]
    return serve_process(str(tmp_path / "model"), "--draft-model", "demo", *keys).ready()


def request(path: str, body: Mapping[str, Any] | str, client: int) -> bytes:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer key{client}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


def worst_wait(url: str) -> float:
    """Return the longest time of a small request in a few seconds."""
    small = request(COMPLETIONS, {"prompt": "import os", "max_tokens": 8, "temperature": 0}, ATTACKERS)
    replies, over = list[Reply](), time.monotonic() + SECONDS
    while time.monotonic() < over:
        replies.append(asyncio.run(exchange(url, small)))
        assert replies[-1].status == 200, replies[-1].body
    return max(reply.seconds for reply in replies)


@contextmanager
def attacked(url: str, path: str, body: Mapping[str, Any] | str) -> Iterator[list[int]]:
    """Yield the statuses of requests that two clients send, each as soon as its last one was answered."""
    over, statuses = threading.Event(), list[int]()

    def attack(client: int) -> None:
        data = request(path, body, client)
        while not over.is_set():
            statuses.append(asyncio.run(exchange(url, data)).status)

    with in_background([partial(attack, client) for client in range(ATTACKERS)]):
        try:
            yield statuses
        finally:
            over.set()


def test_large_texts_hardly_delay_a_neighbour(server: ServerProcess) -> None:
    """Other programs delay it too: a wait that is too long is measured again, alone as well."""
    worst_wait(server.url)
    late = dict[str, float]()
    for name, (path, body) in ATTACKS.items():
        more = float("inf")
        for _ in range(3):
            alone = worst_wait(server.url)
            with attacked(server.url, path, body) as statuses:
                more = min(more, worst_wait(server.url) - alone)
            assert statuses
            assert set(statuses) <= {200, 400}, name
            if more < MOST_MORE:
                break
        print(f"{name}: {1e3 * more:.0f} ms more than alone; {len(statuses)} requests, {sorted(set(statuses))}")
        if more >= MOST_MORE:
            late[name] = more
    assert not late
