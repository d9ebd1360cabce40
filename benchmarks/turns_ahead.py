"""Turns ahead: an agent's times to the first token, and a neighbour's waits while prompts are read ahead.

An agent's trace has ten turns. In each the model must call a tool, and the next turn begins with its output: `--output`
tokens of a file of Python's standard library. Between an answer and the next request are `--pause` seconds, and more if
something is still prepared: "off" prepares nothing; "on" has turns ahead; "prefill" also sends the output to
/v1/prefill at the beginning of the pause. The template writes calls in another way than the model, as many do, so
without turns ahead a call is read again in the next turn. The ways take turns, each trace with a salt of its own.
first_token_processor_s: the processor time of all threads until the first token.

A neighbour's first token: a prompt of 64 tokens arrives at a random moment, while a long prompt is prepared or not. A
neighbour's gaps: between the tokens of its answer, while long prompts wait to be prepared or not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `tools`, however the script is started

from benchmarks.agent_turns import beginning, events, tools
from fastapi import FastAPI
from tools import real_models

from speculant import AsyncEngine, SamplingParams
from speculant.lab.bench import Benchmark
from speculant.serving import InsideRequest, ServerOptions, make_app, responses

TURNS, ANSWER = 10, 160  # turns; the most tokens of an answer
WAYS, TIMES = ("off", "on", "prefill"), ("first_token_s", "first_token_processor_s")
FILES = ("heapq.py", "textwrap.py", "bisect.py", "queue.py", "shlex.py", "cmd.py", "code.py", "copy.py", "csv.py",
         "glob.py")  # fmt: skip
TEMPLATE = """{%- if tools %}<|im_start|>system
Tools: {{ tools[0] | tojson }} Call them in <tool_call></tool_call>.<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOL = tools()[0]
for name, characters in (("path", 60), ("reason", 200)):  # so that calls end: nothing is certain after half a call
    TOOL["function"]["parameters"]["properties"][name]["maxLength"] = characters


async def prefill(app: FastAPI, body: dict[str, Any]) -> None:
    """Send a prompt ahead."""
    headers = ((b"content-type", b"application/json"),)
    async for _ in responses(app, InsideRequest("POST", "/v1/prefill", json.dumps(body).encode(), headers)):
        pass


async def trace(apps: dict[str, FastAPI], way: str, number: int, size: int, pause: float) -> list[dict[str, Any]]:
    """Return the figures of each turn."""
    engine: AsyncEngine = apps[way].state.server.loaded
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Find the reason of failure {number}, and mend it."}]
    common = {"tools": [TOOL], "cache_salt": f"{way} {number}"}
    settings = {"tool_choice": "required", "max_tokens": ANSWER, "temperature": 0.7, "seed": number}
    found = list[dict[str, Any]]()
    for turn in range(TURNS):
        started, used, first, processor = time.perf_counter(), time.process_time(), 0.0, 0.0
        usage, text, calls = dict[str, Any](), "", list[dict[str, Any]]()
        async for chunk in events(apps[way], {"messages": messages, **common, **settings}):
            for choice in chunk.get("choices", ()):
                if choice["delta"].get("content") or choice["delta"].get("tool_calls"):
                    first, processor = first or time.perf_counter() - started, processor or time.process_time() - used
                calls += choice["delta"].get("tool_calls", ())
                text += choice["delta"].get("content") or ""
            usage = chunk.get("usage") or usage
        cached, prompt = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
        found.append(
            {
                "first_token_s": round(first, 3),
                "first_token_processor_s": round(processor, 3),
                "prompt_tokens": prompt,
                "missing_tokens": prompt - cached,
            }
        )
        arguments = "".join(call["function"]["arguments"] for call in calls)
        name = {"name": TOOL["function"]["name"], "arguments": arguments}
        call = {"id": f"call_{turn}", "type": "function", "function": name}
        messages.append({"role": "assistant", "content": text or None, "tool_calls": [call]})
        output = beginning(FILES[turn], engine.tokenizer, size)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
        if way == "prefill":
            await prefill(apps[way], {"messages": messages, **common})
        await asyncio.sleep(pause)
        await idle(engine)
    return found


async def neighbour(engine: AsyncEngine, app: FastAPI, chance: random.Random, prepares: bool) -> float:
    """Return the seconds until the first token of a prompt that arrives at a random moment."""
    if prepares:
        long = [chance.randrange(100, 20_000) for _ in range(3000)]
        await prefill(app, {"prompt": long, "cache_salt": str(chance.random())})
    await asyncio.sleep(0.2 + chance.random() * 0.3)
    prompt, started = [chance.randrange(100, 20_000) for _ in range(64)], time.perf_counter()
    await engine.generate(prompt, SamplingParams(max_tokens=1, temperature=0))
    return time.perf_counter() - started


async def gaps(engine: AsyncEngine, app: FastAPI, chance: random.Random, prepares: bool) -> list[float]:
    """Return the seconds between the tokens of an answer, while prompts are queued to be prepared."""
    prompt, times = [chance.randrange(100, 20_000) for _ in range(64)], list[float]()
    params = SamplingParams(max_tokens=96, temperature=0, ignore_eos=True, speculation=False)
    async for _ in engine.stream(prompt, params):
        times.append(time.perf_counter())
        if prepares and len(times) in (16, 48):
            long = [chance.randrange(100, 20_000) for _ in range(1000)]
            await engine.prefill(long, cache_salt=str(chance.random()))
    return [after - before for before, after in pairwise(times)]


async def idle(engine: AsyncEngine) -> None:
    """Wait until nothing is prepared."""
    before, since = -1, time.monotonic()
    while time.monotonic() < since + 2:
        if (now := engine.metrics.prepared_tokens) != before:
            before, since = now, time.monotonic()
        await asyncio.sleep(0.1)


async def run(engine: AsyncEngine, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    apps = {way: make_app(engine, ServerOptions(turns_ahead=way != "off")) for way in WAYS}
    traces: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in WAYS}
    for number in range(arguments.rounds):
        for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
            traces[way].append(await trace(apps, way, number, arguments.output, arguments.pause))
            print(way, [round(turn["first_token_s"], 3) for turn in traces[way][-1]], flush=True)
    prepared, used = engine.metrics.prepared_tokens, engine.metrics.prepared_tokens_used
    chance, waits, between = random.Random(0), {False: [], True: []}, {False: [], True: []}
    for _ in range(arguments.newcomers):
        for prepares in (False, True):
            await idle(engine)
            waits[prepares].append(await neighbour(engine, apps["off"], chance, prepares))
            await idle(engine)
            between[prepares] += await gaps(engine, apps["off"], chance, prepares)
    await engine.shutdown(drain=False)
    later = {way: [turn for each in traces[way] for turn in each[1:]] for way in WAYS}
    return {
        "context": engine.limits.max_model_len,
        **{
            f"{figure}, median of turns 2 - 10": {way: _median(later[way], figure) for way in WAYS}
            for figure in (*TIMES, "missing_tokens")
        },
        **{f"{way} / off, {time}": _ratio(traces, way, time) for way in WAYS[1:] for time in TIMES},
        "prepared tokens, and used": [prepared, used],
        "neighbour's first token, s": {_name(each): _spread(waits[each]) for each in waits},
        "neighbour's gaps, s": {_name(each): _spread(between[each]) for each in between},
        "traces": traces,
    }


def _median(turns: list[dict[str, Any]], name: str) -> float:
    return round(median(turn[name] for turn in turns), 4)


def _ratio(traces: dict[str, list[list[dict[str, Any]]]], way: str, name: str) -> float:
    """Return the median ratio of the same turns' times, without the first turns."""
    pairs = zip(traces[way], traces["off"], strict=True)
    each = [one[name] / other[name] for mine, plain in pairs for one, other in zip(mine[1:], plain[1:], strict=True)]
    return round(median(each), 3)


def _name(prepares: bool) -> str:
    return "while prompts are prepared" if prepares else "alone"


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    places = {"least": 0, "median": len(ordered) // 2, "p90": 9 * len(ordered) // 10, "most": len(ordered) - 1}
    return {name: round(ordered[place], 4) for name, place in places.items()}


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure a model."""
    known = real_models.MODELS.get(arguments.model)
    path = arguments.model if known is None else str(real_models.folder() / known.file)
    engine = AsyncEngine(path, max_num_seqs=4, find_drafts=False, chat_template=TEMPLATE)
    yield asyncio.run(run(engine, arguments))


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="Turns ahead save the tokens of the last call and its headers: the first token comes after 0.9 of the "
    "time. With /v1/prefill less than a block is missing, and it comes after 0.1 of the time. A newcomer waits for one "
    "part more, at most 50 ms or the time of one block; gaps stay as they are, within 3 %.",
    measure=measure, rounds=3,
    options={"model": "smollm2", "output": 1000, "pause": 1.0, "newcomers": 10},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
