"""A coding agent's turns: the time to the first token, and how much of each prompt is in the prefix cache.

The conversation begins with a system prompt and 36 tools, 20,000 tokens together. In each of five turns the user or a
tool adds a text, and the model answers with at most 48 tokens. If it calls no tool, a call is added to its answer, so
that each further turn begins with a tool's output: about 1,000 tokens of a file of Python's standard library. Requests
go through the chat route, from inside the process. first_token_s: from the request to the first event with content;
first_token_processor_s: the processor time of all threads until then.
Afterwards, a conversation that is longer than the context shows the error that an agent gets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `tools`, however the script is started

from fastapi import FastAPI
from tools import real_models

from speculant import AsyncEngine
from speculant.lab.bench import Benchmark
from speculant.serving import InsideRequest, ResponseHead, ServerOptions, make_app, responses
from speculant.text import Tokenizer

TURNS, ANSWER, OUTPUT = 5, 48, 1000  # turns; tokens of an answer, and of a tool's output
VERBS = ("read", "write", "list", "search", "rename", "delete")
THINGS = ("file", "folder", "branch", "issue", "test", "page")
FILES = ("heapq.py", "textwrap.py", "bisect.py", "queue.py", "shlex.py")
SUBJECTS = ("Functions", "Tests", "Names", "Comments", "Commits", "Errors", "Modules", "Types", "Constants", "Logs")
RULES = ("are short", "say why", "come with each change", "are checked", "have one subject", "stay in their folder")
CASES = ("in the library", "in tests", "in scripts", "for users", "of the server", "that others import", "on Windows")
QUESTION = "The test of the priority queue fails since yesterday. Find the reason, and mend it."


def tools() -> list[dict[str, Any]]:
    """Return the tools, with the schemas that such tools have."""
    made = []
    for verb in VERBS:
        for thing in THINGS:
            about = f"{verb.title()} a {thing} of the project. Use it when the user speaks of this {thing} by name."
            properties = {
                "path": {"type": "string", "description": f"The path of the {thing}, from the project's folder on."},
                "first": {"type": "integer", "description": f"The first line of the {thing} to {verb}, from 1 on."},
                "mode": {"enum": ["fast", "careful", "ask"], "description": "How to act when the answer is unclear."},
                "reason": {"type": "string", "description": f"Why you {verb} the {thing}, in a sentence for the user."},
            }
            schema = {"type": "object", "properties": properties, "required": ["path", "reason"]}
            function = {"name": f"{verb}_{thing}", "description": about, "parameters": schema}
            made.append({"type": "function", "function": function})
    return made


class Agent:
    """A conversation with an application."""

    def __init__(self, engine: AsyncEngine, tokens: int) -> None:
        """tokens: of the system prompt and the tools."""
        self.engine, self.app = engine, make_app(engine, ServerOptions())
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": ""}, {"role": "user", "content": QUESTION}]
        chance, rules = random.Random("rules"), ["You are a programmer who works with tools.\n"]
        missing = tokens - self._length()
        while missing > 0:
            texts = (SUBJECTS, RULES, CASES, CASES)
            rules += ["- {} {} {}, and {}.\n".format(*map(chance.choice, texts)) for _ in range(missing // 12 + 1)]
            self.messages[0]["content"] = "".join(rules)
            missing = tokens - self._length()

    def _length(self) -> int:
        rendered = self.engine.render_chat(self.messages, tools())
        return len(self.engine.tokenizer.encode(rendered.text, add_special_tokens=False))

    async def turn(self) -> dict[str, Any]:
        """Send the conversation, append the answer to it, and return the times and token counts."""
        body = {"messages": self.messages, "tools": tools(), "max_tokens": ANSWER, "temperature": 0}
        started, used, first, usage, text = time.perf_counter(), time.process_time(), 0.0, {}, ""
        calls, processor = list[dict[str, Any]](), 0.0
        async for chunk in events(self.app, body):
            for choice in chunk.get("choices", ()):
                delta = choice["delta"]
                if delta.get("content") or delta.get("tool_calls"):
                    first, processor = first or time.perf_counter() - started, processor or time.process_time() - used
                text += delta.get("content") or ""
                calls += delta.get("tool_calls", ())
            usage = chunk.get("usage") or usage
        self.messages.append({"role": "assistant", "content": text})
        cached, prompt = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
        return {
            "first_token_s": round(first, 3),
            "first_token_processor_s": round(processor, 3),
            "seconds": round(time.perf_counter() - started, 3),
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "new_tokens": prompt - cached,
            "answer_tokens": usage["completion_tokens"],
            "calls": sum("id" in call for call in calls),
        }

    def go_on(self, number: int) -> None:
        """Add a call to the answer, and its output."""
        call = {"name": "read_file", "arguments": json.dumps({"path": FILES[number], "reason": "It may be the cause."})}
        self.messages[-1]["tool_calls"] = [{"id": f"call_{number}", "type": "function", "function": call}]
        content = beginning(FILES[number], self.engine.tokenizer)
        self.messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": content})

    async def overflow(self) -> dict[str, Any]:
        """Return the error of a conversation that is too long."""
        longest = {"role": "user", "content": QUESTION * (self.engine.limits.max_model_len // 10)}
        body = {"messages": [*self.messages, longest], "tools": tools()}
        *_, error = [each async for each in events(self.app, body)]
        return dict(error["error"])


def beginning(file: str, tokenizer: Tokenizer, most: int = OUTPUT) -> str:
    """Return the beginning of a file of the standard library, up to `most` tokens."""
    text = (Path(sysconfig.get_path("stdlib")) / file).read_text(encoding="utf-8")
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:most])


async def events(app: FastAPI, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the documents of a streamed chat, or the error in its place."""
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    headers = ((b"content-type", b"application/json"),)
    request = InsideRequest("POST", "/v1/chat/completions", json.dumps(streamed).encode(), headers)
    status, waiting = 0, b""
    async for piece in responses(app, request):
        if isinstance(piece, ResponseHead):
            status = piece.status
            continue
        *lines, waiting = (waiting + piece).split(b"\n\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    if status != 200:
        yield json.loads(waiting)


async def run(engine: AsyncEngine, tokens: int) -> dict[str, Any]:
    """Return the figures of all turns."""
    agent, turns = Agent(engine, tokens), list[dict[str, Any]]()
    for number in range(TURNS):
        turns.append(await agent.turn())
        print(turns[-1], flush=True)
        agent.go_on(number)
    first, last, error = turns[0], turns[-1], await agent.overflow()
    await engine.shutdown(drain=False)
    return {
        "context": engine.limits.max_model_len,
        "speculation": engine.speculation,
        "turns": turns,
        "fifth / first": round(last["first_token_s"] / first["first_token_s"], 4),
        "cached share of the fifth": round(last["cached_tokens"] / last["prompt_tokens"], 4),
        "too_long": error,
    }


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure each model."""
    found: dict[str, Any] = {}
    for name in arguments.models:
        known = real_models.MODELS.get(name)
        path = name if known is None else str(real_models.folder() / known.file)
        engine = AsyncEngine(path, max_num_seqs=1, max_model_len=arguments.context, find_drafts=False)
        found[name] = asyncio.run(run(engine, arguments.tokens))
        yield found


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="The fifth turn has at least 0.93 of its prompt from the cache, and its first token comes in a tenth of "
    "the first turn's time: it reads about 1,100 tokens in place of 20,000.",
    measure=measure,
    options={
        "models": {"nargs": "+", "default": ["qwen_0.5b"],
                   "help": "folders, GGUF files or names of tools/real_models.py"},
        "tokens": 20_000, "context": 32_768,
    },
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
