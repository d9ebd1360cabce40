"""/infill answers editors as llama.cpp's server does, and /v1/completions reads `suffix`."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from speculant import AsyncEngine, SamplingParams
from speculant.serving import CompletionBody, completion_params
from speculant.text import FAMILIES, Hole, fim_prompt, find_fim
from tests.servers import FIM_MARKS, LiveServer, in_background

CODE = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef write(path, text):\n    "
HOLE: dict[str, Any] = {"input_prefix": CODE, "input_suffix": "\n    return path\n"}
GREEDY: dict[str, Any] = {**HOLE, "temperature": 0, "n_predict": 24}
FIELDS = ["content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms", "timings/predicted_n",
          "timings/prompt_per_second", "timings/predicted_ms", "timings/predicted_per_second", "truncated",
          "tokens_cached", "no/such/field"]  # fmt: skip
# The fields that llama.vim and llama.vscode send
SAMPLING = {"top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True}
TIMES = {"t_max_prompt_ms": 500, "t_max_predict_ms": 2500}
EXTRA = [{"text": "def close(file):\n    file.close()\n", "time": [1, 2], "filename": "a.py"}]
EDITORS: dict[str, dict[str, Any]] = {
    "llama.vscode": {**HOLE, "input_extra": EXTRA, "prompt": "wi", "n_predict": 16, "n_indent": 4, **SAMPLING, **TIMES},
    "llama.vim": {"id_slot": 0, **HOLE, "input_extra": EXTRA, "prompt": "wi", "n_predict": 16, "stop": [],
                  "n_indent": 4, **SAMPLING, **TIMES, "response_fields": FIELDS},
}  # fmt: skip
WARM_UP = {"id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": EXTRA, "prompt": "", "n_predict": 0,
           "temperature": 0.0, "samplers": [], "stream": False, "cache_prompt": True, "t_max_prompt_ms": 1,
           "t_max_predict_ms": 1, "response_fields": [""]}  # fmt: skip
# Stop strings of Zed, for all families at once
ZED_STOPS = ["<|endoftext|>", "<|file_separator|>", "<|fim_pad|>", "<|fim_prefix|>", "<|fim_middle|>", "<PRE>"]


def infill(server: LiveServer, **body: Any) -> Any:
    return server.post("/infill", **{**GREEDY, **body})


def streamed(server: LiveServer, **body: Any) -> list[Any]:
    return [json.loads(each) for each in server.events("/infill", **{**GREEDY, **body})]


@pytest.mark.parametrize("editor", EDITORS)
def test_requests_of_editors_succeed(demo: LiveServer, editor: str) -> None:
    answer = demo.post("/infill", **EDITORS[editor])
    assert isinstance(answer["content"], str)
    if "response_fields" in EDITORS[editor]:
        assert [*answer] == FIELDS[:-1]
        assert answer["timings/predicted_n"] > 0
    else:
        assert answer["timings"]["predicted_n"] == answer["tokens_predicted"] <= 16
        assert answer["generation_settings"]["temperature"] == 0
    assert demo.post("/infill", **WARM_UP) == {}


def test_zed_s_request_ends_at_a_special_token(demo: LiveServer) -> None:
    prompt = f"Ā{CODE}"
    zed = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0.2, "stop": ZED_STOPS}
    assert demo.post("/v1/completions", **zed)["choices"][0]["finish_reason"] in ("stop", "length")
    engine = demo.state.engine
    params = completion_params(engine, CompletionBody(prompt=prompt, stop=ZED_STOPS))
    assert [*params.stop_token_ids] == [engine.tokenizer.backend.token_to_id("<|endoftext|>")]
    shown = CompletionBody(prompt=prompt, stop=ZED_STOPS, skip_special_tokens=False)
    assert [*completion_params(engine, shown).stop_token_ids] == []


def test_a_stream_is_the_whole_answer_and_that_of_the_engine(demo: LiveServer) -> None:
    draw, tokenizer = random.Random(7), demo.state.engine.tokenizer
    marks = find_fim(tokenizer)
    assert marks is not None
    for number in range(40):
        cut, settings = draw.randrange(1, len(CODE)), {"seed": number, "temperature": draw.choice([0, 0.9])}
        stop = draw.choice([[], ["\n\n"], ["return", "("]])
        body = {"input_prefix": CODE[:cut], "input_suffix": CODE[cut:], "stop": stop, **settings}
        whole, chunks = infill(demo, **body), streamed(demo, **body)
        assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
        same = ("stop_type", "stopping_word", "tokens_predicted", "tokens_evaluated", "truncated", "has_new_line")
        assert [chunks[-1][name] for name in same] == [whole[name] for name in same]
        prompt = fim_prompt(tokenizer, marks, Hole(CODE[:cut], CODE[cut:])).tokens
        ends = {"stop": stop, "stop_token_ids": [*marks.ends]}
        plain = demo.post("/v1/completions", prompt=prompt, max_tokens=24, **ends, **settings)
        assert (plain["choices"][0]["text"], plain["usage"]["prompt_tokens"]) == (whole["content"], len(prompt))
        assert plain["usage"]["completion_tokens"] == whole["tokens_predicted"]
        hole = {"prompt": CODE[:cut], "suffix": CODE[cut:], "max_tokens": 24, "stop": stop, **settings}
        assert demo.post("/v1/completions", **hole)["choices"][0]["text"] == whole["content"]


def test_fields_of_llama_cpp_are_read(demo: LiveServer) -> None:
    whole = infill(demo, n_predict=40)
    split = infill(demo, n_predict=40, input_prefix=CODE[:-4], prompt=CODE[-4:], input_extra=[], id_slot=3, seed=-1)
    assert (split["content"], split["id_slot"]) == (whole["content"], 3)
    lines = whole["content"].split("\n")
    least = len(lines[1]) - len(lines[1].lstrip()) if len(lines) > 1 else 0
    assert infill(demo, n_predict=40, n_indent=least + 1)["content"] == lines[0]
    assert infill(demo, input_extra=EXTRA)["tokens_evaluated"] > whole["tokens_evaluated"]
    empty = infill(demo, n_predict=0)
    assert (empty["content"], empty["tokens_predicted"], empty["generation_settings"]["n_predict"]) == ("", 0, 0)
    assert infill(demo)["tokens_cached"] > 0
    assert infill(demo, n_predict=-1, max_tokens=None, stop=["\n"])["stop_type"] in ("word", "eos", "limit")
    sampled = infill(demo, samplers=["top_k"], top_k=3, top_p=0.5, seed=1)["generation_settings"]
    assert (sampled["top_k"], sampled["top_p"], sampled["temperature"]) == (3, 1.0, 1.0)
    assert infill(demo, samplers=["temperature", "infill"])["generation_settings"]["temperature"] == 0


def test_a_long_answer_ends_after_its_time_with_a_line(demo: LiveServer) -> None:
    whole = infill(demo, n_predict=400, t_max_predict_ms=0)
    for chunks in (
        [infill(demo, n_predict=400, t_max_predict_ms=1)],
        streamed(demo, n_predict=400, t_max_predict_ms=1),
    ):
        text, last = "".join(chunk["content"] for chunk in chunks), chunks[-1]
        assert text == whole["content"][: len(text)]
        assert "\n" in text
        assert (last["stop_type"], last["timings"]["predicted_n"]) == ("limit", last["tokens_predicted"])
        assert last["tokens_predicted"] < whole["tokens_predicted"]


def test_a_long_context_is_cut(demo: LiveServer) -> None:
    answer = infill(demo, input_prefix="x = 1\n" * 2000, input_suffix="y = 2\n" * 2000, input_extra=EXTRA)
    assert answer["truncated"]
    assert answer["tokens_evaluated"] == 1024 - 24
    assert not infill(demo)["truncated"]
    reply = demo.http.post("/infill", json={**GREEDY, "input_prefix": "x" * 1_000_001})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input_prefix")


@pytest.mark.parametrize(("newer", "ends"), [({}, True), ({"id_slot": 2}, False), ({"n_predict": 0}, False)])
def test_a_newer_request_ends_the_one_of_its_slot(demo: LiveServer, newer: dict[str, Any], ends: bool) -> None:
    long = {**GREEDY, "n_predict": 700, "ignore_eos": True, "id_slot": 1, "logit_bias": {"0": -100.0}}
    neighbour: list[Any] = []
    asked = {"prompt": CODE, "temperature": 0, "max_tokens": 60}
    alone = demo.post("/v1/completions", **asked)["choices"]
    with in_background([lambda: neighbour.append(demo.post("/v1/completions", **asked))]):
        pieces = demo.events("/infill", **long)
        chunks = [json.loads(next(pieces))]
        assert infill(demo, **{"id_slot": 1, **newer})["stop"]
        chunks += map(json.loads, pieces)
    assert (chunks[-1].get("superseded", False), chunks[-1]["stop_type"]) == (ends, "limit")
    assert (chunks[-1]["tokens_predicted"] < 700) == ends
    assert neighbour[0]["choices"] == alone


def test_a_whole_answer_that_is_superseded_has_what_there_is(demo: LiveServer) -> None:
    answers: list[Any] = []
    long = {"n_predict": 700, "ignore_eos": True, "id_slot": 5}
    with in_background([lambda: answers.append(infill(demo, **long))]):
        demo.until(lambda: demo.state.admission.count > 0)
        time.sleep(0.05)
        infill(demo, id_slot=5)
    assert answers[0]["superseded"]
    assert answers[0]["tokens_predicted"] < 700
    assert demo.state.admission.count == 0


def test_clients_have_slots_of_their_own(serve: Callable[..., LiveServer]) -> None:
    engine = AsyncEngine("demo", max_num_seqs=4)
    engine.tokenizer._special |= FIM_MARKS
    server = serve(engine, api_keys=("one", "two")).ready()
    ended = {}

    def ask(key: str, tokens: int) -> None:
        body = {**GREEDY, "n_predict": tokens, "ignore_eos": True, "id_slot": 0}
        reply = server.http.post("/infill", json=body, headers={"authorization": f"Bearer {key}"})
        ended[key] = reply.json()

    with in_background([lambda: ask("one", 300)]):
        server.until(lambda: server.state.admission.count > 0)
        ask("two", 4)
    assert "superseded" not in ended["one"]
    assert ended["one"]["tokens_predicted"] == 300


def test_requests_that_wait_are_superseded_too(serve: Callable[..., LiveServer]) -> None:
    engine = AsyncEngine("demo", max_num_seqs=1)
    engine.tokenizer._special |= FIM_MARKS
    server = serve(engine).ready()
    answers: list[Any] = []
    runs = {"prompt": CODE, "max_tokens": 400, "ignore_eos": True}
    with in_background([lambda: server.post("/v1/completions", **runs)]):
        server.until(lambda: server.state.admission.count == 1)
        for place in range(3):
            threading.Thread(target=lambda: answers.append(infill(server, id_slot=0))).start()
            server.until(lambda place=place: server.state.admission.count + len(answers) == place + 2)
        server.until(lambda: len(answers) == 2)
        assert [each["content"] for each in answers] == ["", ""]
        assert server.state.admission.count == 2
    server.until(lambda: len(answers) == 3)
    assert "superseded" not in answers[2]


def test_a_model_without_marks_refuses_by_name(serve: Callable[..., LiveServer]) -> None:
    server = serve(AsyncEngine("demo", max_num_seqs=2)).ready()
    for path, body in (("/infill", GREEDY), ("/v1/completions", {"prompt": "a", "suffix": "b"})):
        error = server.http.post(path, json=body)
        assert (error.status_code, error.json()["error"]["code"]) == (400, "unsupported_parameter")
        assert all(names.prefix in error.json()["error"]["message"] for names in FAMILIES.values())
    assert not server.http.get("/props").json()["infill"]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [({"input_suffix": None}, "input_suffix"), ({"input_extra": [{"filename": "a"}]}, "input_extra"),
     ({"input_extra": "x"}, "input_extra"), ({"input_extra": [{"text": ""}] * 16_385}, "input_extra"),
     ({"samplers": "edkypmxt"}, "samplers"), ({"n_predict": -2}, "n_predict"),
     ({"beam_width": 2}, "beam_width"), ({"top_p": 0}, "top_p"), ({"lora": [{"id": 0}]}, "lora")],
)  # fmt: skip
def test_wrong_fields_are_refused_by_name(demo: LiveServer, wrong: dict[str, Any], param: str) -> None:
    reply = demo.http.post("/infill", json={**GREEDY, **wrong})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_a_hole_is_measured_and_described(demo: LiveServer) -> None:
    def ended(reason: str) -> float:
        [line] = [line for line in demo.http.get("/metrics").text.splitlines()
                  if line.startswith("speculant:request_success_total") and f'"{reason}"' in line]  # fmt: skip
        return float(line.split()[-1])

    before = ended("length")
    infill(demo, n_predict=400, t_max_predict_ms=1)
    assert ended("length") == before + 1
    assert demo.http.get("/props").json()["infill"]
    document = demo.http.get("/openapi.json").json()
    assert "input_prefix" in document["components"]["schemas"]["InfillBody"]["properties"]


def test_an_ended_request_has_its_output() -> None:
    async def run() -> Any:
        async with AsyncEngine("demo", max_num_seqs=2) as engine:
            pieces, params = [], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
            async for piece in engine.stream(CODE, params, request_id="mine"):
                pieces.append(piece)
                if len(pieces) == 5:
                    engine.end("mine")
                    engine.end("unknown")
        return pieces, (engine.metrics.finished, engine.metrics.aborted)

    pieces, counts = asyncio.run(run())
    output = pieces[-1].output
    assert (pieces[-1].finish_reason, output.outputs[0].finish_reason, counts) == ("length", "length", (1, 0))
    assert output.outputs[0].text == "".join(piece.text for piece in pieces)
    assert 5 <= len(output.outputs[0].token_ids) < 500
