"""One server with two trained models, of which there is room for one: under load no text is wrong, and none is lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from tests.real.texts import SUBJECTS
from tests.servers import ServerProcess, serve_process

__all__ = ["serve_process"]

CLIENTS, TURNS = 6, 6
BOUND = 850 * 2**20  # of models and caches; with scratch memory SmolLM2 takes 500 MiB, Gemma 3 more
SETTINGS = {"max_tokens": 24, "temperature": 0}


@pytest.mark.parametrize("keeps", [False, True], ids=["", "prompts on disk"])
def test_two_models_alternate_under_load(
    keeps: bool, smollm2: Path, gemma3: Path, serve_process: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    files, expected = {"smollm2": smollm2, "gemma3": gemma3}, dict[tuple[str, str], str]()
    for name, file in files.items():
        outputs = LLM(str(file), kv_memory="64MiB").generate(SUBJECTS, SamplingParams(**SETTINGS))
        expected |= {(name, prompt): each.outputs[0].text for prompt, each in zip(SUBJECTS, outputs, strict=True)}
    models = [f"{name}={file}" for name, file in files.items()]
    flags = ["--prompt-cache", str(tmp_path / "prompts")] if keeps else []
    server = serve_process(*models, "--memory", str(BOUND), "--kv-memory", "128MiB", "--log-level", "info", *flags)
    server.http.timeout = 300
    empty, most = server.memory, 0

    def ask(number: int) -> list[Any]:
        nonlocal most
        wrong = list[Any]()
        for turn in range(TURNS):
            name, prompt = [*files][(number + turn) % 2], SUBJECTS[(number + 7 * turn) % len(SUBJECTS)]
            answer = server.http.post("/v1/completions", json={"model": name, "prompt": prompt, **SETTINGS})
            text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
            if text != expected[name, prompt]:
                wrong.append((name, prompt, text))
            most = max(most, server.memory)
        return wrong

    with ThreadPoolExecutor(CLIENTS) as clients:
        assert [wrong for each in clients.map(ask, range(CLIENTS)) for wrong in each] == []
    put_away = sum("put away" in message for message in server.messages)
    print(f"\n{put_away} models put away; at most {(most - empty) / 2**20:.0f} MiB of {BOUND / 2**20:.0f}")
    assert put_away
    assert most - empty < BOUND, "the models took more memory than they may"
    server.signal()
    assert server.wait() == 0
