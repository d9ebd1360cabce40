"""A server under mixed load for a long time: `python -m tests.soak_server --seconds 3600`.

Several clients with keys of their own send random requests: short and long texts, streams that are left early, forms,
beams, stored responses, invalid bodies. Every minute a line has the server's memory, its open files and threads. The
run fails if a status of 500 or above is answered, other than one of overload, if a text changes, or if memory in the
last quarter of the run is over 5% above that in the second quarter: all resident memory, or its anonymous part, which
has no pages of files.

A server fills some memory and keeps it: the pages of the KV cache, the prefixes that it knows, the words that the
tokenizer has met, the texts that drafts continue, and stored responses. The last two would grow for most of an hour, so
their bounds are small here. All of this is full after 2,000 requests, which have to be answered in the first quarter.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.servers import ServerProcess

KEYS = ("first", "second", "third", "fourth")
OVERLOADED = (429, 503)
PATIENCE = 600.0  # seconds for an answer on a machine that does much else
LEAK = 1.05
SUFFIX = {"method": "suffix", "suffix_decoding_corpus_tokens": 2**14}
DRAFTERS = {"method": "fallback", "members": [SUFFIX, "prompt_lookup", "draft_model"]}
BOUNDS = ["--max-waiting", "64", "--max-stored-bytes", str(2**18), "--speculative-config", json.dumps(DRAFTERS)]
MEMORY = {"resident": "VmRSS", "anonymous": "RssAnon"}  # the kernel's name of each kind
FORM = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "f", "schema": FORM}}


class Client:
    """Sends random requests with one key until it is told to stop. texts: those of seeds, which all clients share."""

    def __init__(
        self, url: str, key: str, seed: int, counts: Counter[str], stop: threading.Event, texts: dict[int, str]
    ) -> None:
        self._chance, self._counts, self._stop, self._texts = random.Random(seed), counts, stop, texts
        headers = {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=PATIENCE, trust_env=False)
        self.problem: str | None = None

    @property
    def kinds(self) -> list[Callable[[], None]]:
        """What it may send."""
        kinds: list[Callable[[], None]] = [self._text, self._text, self._stream, self._leave, self._form, self._beams]
        return [*kinds, self._respond, self._refused, self._many, self._read]

    def run(self) -> None:
        """Send requests; the first problem ends it."""
        try:
            while not self._stop.is_set():
                self._chance.choice(self.kinds)()
        except Exception as error:  # noqa: BLE001 - it is reported by the main thread
            self.problem = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def _post(self, path: str, **body: Any) -> httpx.Response:
        response = self._http.post(path, json=body)
        self._counts[str(response.status_code)] += 1
        assert response.status_code < 500 or response.status_code in OVERLOADED, response.text[:300]
        return response

    def _text(self) -> None:
        """A seed gives the same text each time, whatever runs beside it."""
        seed = self._chance.randrange(50)
        prompt, tokens = f"def f{seed}(a, b):\n", 4 + seed
        answer = self._post("/v1/completions", prompt=prompt, seed=seed, temperature=0.8, max_tokens=tokens)
        if answer.status_code == 200:
            text = answer.json()["choices"][0]["text"]
            assert self._texts.setdefault(seed, text) == text, f"the text of seed {seed} changed"

    def _stream(self, most: int = 10**6) -> None:
        body = {"prompt": self._prompt(), "max_tokens": self._chance.randrange(1, 128), "stream": True}
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            self._counts[str(response.status_code)] += 1
            for number, _ in enumerate(response.iter_lines()):
                if number >= most:
                    self._counts["left"] += 1
                    return

    def _leave(self) -> None:
        self._stream(most=self._chance.randrange(20))

    def _form(self) -> None:
        self._post("/v1/completions", prompt=self._prompt(), max_tokens=64, response_format=FORMAT)

    def _beams(self) -> None:
        self._post("/v1/completions", prompt=self._prompt(), max_tokens=8, beam_width=3, n=2)

    def _many(self) -> None:
        self._post("/v1/completions", prompt=[self._prompt()] * 4, max_tokens=16, n=self._chance.randrange(1, 5))

    def _respond(self) -> None:
        answer = self._post("/v1/responses", input=self._prompt(), max_output_tokens=16)
        if answer.status_code == 200 and self._chance.random() < 0.5:
            self._http.delete(f"/v1/responses/{answer.json()['id']}")

    def _refused(self) -> None:
        self._post("/v1/completions", prompt="a" * self._chance.randrange(200_000), max_tokens=10**9)

    def _read(self) -> None:
        for path in ("/metrics", "/v1/models", "/health"):
            self._counts[str(self._http.get(path).status_code)] += 1

    def _prompt(self) -> str:
        return "".join(self._chance.choices("abcdef ():\n", k=self._chance.randrange(1, 600)))


def facts(process: int) -> dict[str, int]:
    """Return a process's memory of each kind in KiB, and the numbers of its open files and threads."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    read = dict(line.split(":", 1) for line in lines)
    memory = {kind: int(read[name].split()[0]) for kind, name in MEMORY.items()}
    files = len(list(Path(f"/proc/{process}/fd").iterdir()))
    return {**memory, "files": files, "threads": int(read["Threads"])}


def is_flat(kind: str, seen: Sequence[int]) -> bool:
    """Compare the last quarter of a run with the second one, and print both. seen: KiB, at equal intervals."""
    quarter = len(seen) // 4
    before, after = (statistics.median(part) for part in (seen[quarter : 2 * quarter], seen[-quarter:]))
    print(f"{kind} memory: {before / 1024:.0f} MiB in the second quarter, {after / 1024:.0f} in the last", flush=True)
    return after <= LEAK * before


def soak(seconds: float, every: float) -> bool:
    """Run the load; return whether nothing was wrong."""
    keys = [part for key in KEYS for part in ("--api-key", key)]
    server = ServerProcess("demo", "--draft-model", "demo", *BOUNDS, *keys)
    server.ready()
    counts, stop, texts, seen = Counter[str](), threading.Event(), dict[int, str](), list[dict[str, int]]()
    clients = [Client(server.url, key, seed, counts, stop, texts) for seed, key in enumerate(KEYS * 3)]
    threads = [threading.Thread(target=each.run, daemon=True) for each in clients]
    for thread in threads:
        thread.start()
    started = time.monotonic()
    while time.monotonic() - started < seconds and all(each.problem is None for each in clients):
        time.sleep(every)
        seen.append(facts(server.process.pid))
        print(f"{time.monotonic() - started:6.0f} s  {seen[-1]}  {dict(counts)}", flush=True)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE + 10)
    problems = [each.problem for each in clients if each.problem is not None]
    if problems:
        print(f"problems: {problems}")
        server.stop()
        return False
    flat = [is_flat(kind, [each[kind] for each in seen]) for kind in MEMORY]
    server.signal()
    return all(flat) and server.wait(60) == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--every", type=float, help="seconds between two lines; else a sixtieth of all")
    arguments = parser.parse_args()
    sys.exit(not soak(arguments.seconds, arguments.every or arguments.seconds / 60))
