"""Chats over HTTP with targets that have states: each token is read once, and no draft or prefix changes a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from speculant import AsyncEngine
from tests.examples import examples
from tests.heads import QWEN35, write_with_head
from tests.models import PRINTABLE, Shape, write_checkpoint
from tests.servers import LiveServer, in_background, serve
from tests.small_models import NATIVE
from tests.unit.models.families import VARIANTS

__all__ = ["serve"]
BLOCK = 16
TURNS = examples(10, least=4)
TEMPLATE = (
    "{% for each in messages %}<{{each.role}}>{{each.content}}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SYSTEM = {"role": "system", "content": "Answer in riddles, and briefly, whatever the question is. " * 3}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"use_speculative_decoding": False},
    "default": {},
    "draft": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 5}},
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
Reply = tuple[list[str], int, int]  # the texts, the prompt's tokens, and how many of them were not computed


class Chats:
    """Chats with one server, one request after the other unless a test says otherwise."""

    def __init__(self, live: LiveServer) -> None:
        self.live, self.replies = live, list[Reply]()

    def ask(self, messages: list[Any], size: int = 24, **own: Any) -> str:
        """Answer a chat; return the first text."""
        body = {"seed": len(messages), "temperature": 0.8, "max_tokens": size, "allowed_token_ids": PRINTABLE, **own}
        reply = self.live.post("/v1/chat/completions", messages=messages, **body)
        usage, texts = reply["usage"], [each["message"]["content"] for each in reply["choices"]]
        known = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        self.replies.append((texts, usage["prompt_tokens"], known))
        return str(texts[0])

    def stream(self, messages: list[Any]) -> str:
        """As `ask`, in a stream."""
        text, body = "", {"seed": len(messages), "temperature": 0.8, "max_tokens": 24, "allowed_token_ids": PRINTABLE}
        chunks = self.live.chunks(
            "/v1/chat/completions", messages=messages, stream_options={"include_usage": True}, **body
        )
        for chunk in chunks[:-1]:
            text += chunk["choices"][0]["delta"].get("content") or ""
        usage = chunks[-1]["usage"]
        known = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        self.replies.append(([text], usage["prompt_tokens"], known))
        return text

    def talk(self, messages: list[Any], turns: int, say: str = "What is {} times 7919, in few words?") -> list[Any]:
        """Continue a chat by some turns, every other one in a stream; return its messages."""
        for turn in range(turns):
            messages = [*messages, {"role": "user", "content": say.format(turn)}]
            answer = (self.stream if turn % 2 else self.ask)(messages)
            messages.append({"role": "assistant", "content": answer})
        return messages

    def abort(self, messages: list[Any]) -> None:
        """Leave after a part of an answer."""
        events = self.live.events("/v1/chat/completions", messages=messages, max_tokens=200, ignore_eos=True)
        assert len([next(events) for _ in range(20)]) == 20
        events.close()  # type: ignore[attr-defined]


def script(live: LiveServer) -> list[Reply]:
    """Run chats that grow, branch at once, are edited, aborted and repeated; return all replies in a fixed order."""
    chats, branches = Chats(live), [Chats(live) for _ in range(3)]
    whole = chats.talk([SYSTEM], TURNS)
    for turn in range(45):  # more than memory keeps states of
        chats.ask([{"role": "user", "content": f"{turn} of many others, which have nothing in common"}], size=1)
    chats.replies = chats.replies[:TURNS]
    again = chats.talk(whole, 2, "Once more {}")
    chats.talk(again[:4], 1, "An edited message {}")
    with in_background(
        [lambda k=k, each=each: each.talk(again, 2, f"Branch {k} {{}}") for k, each in enumerate(branches)]
    ):  # type: ignore[misc]
        pass
    asked = [*again, {"role": "user", "content": "Three"}]
    chats.abort(asked)
    chats.ask(asked, n=3)
    chats.ask([*again, {"role": "user", "content": "A form"}], allowed_token_ids=None, **FORM)
    return [*chats.replies, *(reply for each in branches for reply in each.replies)]


def with_template(folder: str) -> str:
    path = Path(folder) / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return folder


@NATIVE
@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_a_chat_reads_each_token_once(family: str, way: str, serve: Callable[..., LiveServer], tmp_path: Path) -> None:
    shape: dict[str, Any] = {"family": family, "layers": 3, "max_positions": 4096}
    settings = tuple((VARIANTS[family]["plain"] if family == "lfm2" else QWEN35).items())
    if family == "lfm2":
        target = write_checkpoint(tmp_path / "target", Shape(**shape, settings=settings))
    else:
        target = write_with_head(tmp_path, max_positions=4096)
    common = {
        "model": with_template(target), "dtype": "float32", "kernels": "native", "kv_memory": "3MiB",
        "max_model_len": 2048, "max_num_seqs": 4, "draft_quantization": "none", "block_size": BLOCK,
    }  # fmt: skip
    drafting = WAYS[way]
    if way == "draft":
        near = write_checkpoint(tmp_path / "near", Shape(**shape, noise=0.02, settings=settings))
        drafting = {**drafting, "draft_model": near}
    engine = AsyncEngine(**common, **drafting)
    found = script(serve(engine).ready())
    want = script(serve(AsyncEngine(**common, **WAYS["plain"], enable_prefix_caching=False)).ready())
    assert [reply[:2] for reply in found] == [reply[:2] for reply in want]
    assert engine._runtime.engine.metrics.drafter_errors == 0
    for (texts, before, _), (_, _, known) in pairwise(found[:TURNS]):  # a draft's last tokens may end within a block
        assert known >= (before + len(texts[0]) - 1) // BLOCK * BLOCK - (way != "plain") * BLOCK
    assert found[TURNS][2] < found[TURNS - 1][1], "the states were not lost"
