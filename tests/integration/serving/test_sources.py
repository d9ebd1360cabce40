"""Completions of encoder-decoder models: their prompts, their usage, which counts sources, and their errors."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from speculant import LLM, AsyncEngine, SamplingParams
from tests.encoder_decoders import make_t5, write_t5
from tests.models import BEGIN, END
from tests.servers import LiveServer

PATH = "/v1/completions"
LONGEST = 64
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a small model."""
    return write_t5(tmp_path_factory.mktemp("t5") / "t5", make_t5())


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    """Return the library with the model."""
    return LLM(folder, dtype="float64", max_model_len=LONGEST)


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[LiveServer]:
    """Return a server of the model."""
    engine = AsyncEngine(folder, dtype="float64", max_model_len=LONGEST, max_num_seqs=4)
    live = LiveServer(engine, max_prompt_characters=1000, access_log="json").ready()
    yield live
    live.stop()


PROMPTS: list[Any] = [
    "hello world",
    [1, 2, 3],
    {"prompt": "hello world"},
    {"encoder_prompt": "hello world"},
    {"encoder_prompt": [1, 2, 3], "decoder_prompt": None},
    {"encoder_prompt": "hello", "decoder_prompt": "ab"},
    {"encoder_prompt": {"prompt_token_ids": [1, 2, 3]}, "decoder_prompt": [BEGIN, 5]},
    {"encoder_prompt": "hello", "decoder_prompt": [5]},
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
def test_an_answer_is_the_library_s(server: LiveServer, llm: LLM, prompt: Any) -> None:
    """The usage counts the source and the decoder's prompt; ids of both can be returned."""
    (known,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=6, logprobs=2))
    answer = server.post(PATH, prompt=prompt, logprobs=2, return_token_ids=True, **GREEDY)
    (choice,), sample = answer["choices"], known.outputs[0]
    assert (choice["text"], choice["token_ids"]) == (sample.text, sample.token_ids)
    assert choice["prompt_token_ids"] == known.prompt_token_ids
    assert choice["encoder_prompt_token_ids"] == known.encoder_prompt_token_ids
    assert sample.logprobs is not None
    expected = [entry[token].logprob for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-9)
    count = len(known.encoder_prompt_token_ids or []) + len(known.prompt_token_ids)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (count, 6)


def test_prompts_of_one_request_are_answered_apart(server: LiveServer) -> None:
    objects = [each for each in PROMPTS if isinstance(each, dict)]
    for together in (objects, ["hello world", "a"], [[1, 2, 3], [4]]):
        asked = {"n": 2, "best_of": 2, "seed": 3, "max_tokens": 6}
        answer = server.post(PATH, prompt=together, **asked)
        alone = [server.post(PATH, prompt=[each] if isinstance(each, list) else each, **asked) for each in together]
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [choice["text"] for each in alone for choice in each["choices"]]
        assert answer["usage"]["prompt_tokens"] == sum(each["usage"]["prompt_tokens"] for each in alone)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_has_the_same_text_and_usage(server: LiveServer, echo: bool) -> None:
    asked = {"prompt": PROMPTS[5], "echo": echo, "return_token_ids": True, "max_tokens": 6, "seed": 1}
    whole = server.post(PATH, **asked)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = server.chunks(PATH, stream_options=options, **asked)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert whole["choices"][0]["text"].startswith("ab") == echo
    ids = "encoder_prompt_token_ids", "prompt_token_ids"
    assert [choices[0][name] for name in ids] == [whole["choices"][0][name] for name in ids]
    counts = [each["usage"]["prompt_tokens"] for each in (whole, *chunks, last)]
    assert set(counts) == {len("hello") + 1 + 1 + len("ab")}


def test_echo_repeats_the_prompt_of_the_decoder(server: LiveServer, llm: LLM) -> None:
    (known,) = llm.generate([PROMPTS[5]], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    answer = server.post(PATH, prompt=PROMPTS[5], echo=True, logprobs=1, temperature=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["<begin>", "a", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]
    assert known.prompt_logprobs is not None
    expected = [
        entry[token].logprob for entry, token in zip(known.prompt_logprobs, [BEGIN, 64, 65], strict=True) if entry
    ]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-9)
    plain = server.post(PATH, prompt="hello", **GREEDY)["choices"]
    assert server.post(PATH, prompt="hello", echo=True, **GREEDY)["choices"] == plain, "a source is not repeated"


def test_settings_have_their_effect_on_outputs(server: LiveServer) -> None:
    asked = {"prompt": "hello", "allowed_token_ids": [64, 65, 66], **GREEDY}
    text = server.post(PATH, **asked)["choices"][0]["text"]
    stopped = server.post(PATH, stop=[text[2:4]], **asked)["choices"][0]
    assert (stopped["text"], stopped["stop_reason"]) == (text[: text.index(text[2:4])], text[2:4])
    known = server.post(PATH, prompt=PROMPTS[5], prompt_logprobs=1, **GREEDY)["choices"][0]["prompt_logprobs"]
    assert [entry is None for entry in known] == [True, False, False]
    formed = server.post(PATH, prompt="hello", structured_outputs={"regex": "(yes|no)!"}, **GREEDY)
    assert formed["choices"][0]["text"] in ("yes!", "no!")
    assert server.post(PATH, prompt="hello", beam_width=2, n=2, max_tokens=4)["choices"][1]["index"] == 1
    plain = server.post(PATH, prompt="hello", **GREEDY)["choices"]
    assert server.post(PATH, prompt="hello", speculation=False, **GREEDY)["choices"] == plain


@pytest.mark.parametrize(("most", "side", "kept"), [(4, "left", slice(-4, None)), (4, "right", slice(4)),
                                                    (-1, None, slice(-LONGEST, None))])  # fmt: skip
def test_a_source_is_cut(server: LiveServer, most: int, side: str | None, kept: slice) -> None:
    tokens = list(range(60, 60 + LONGEST + 20))
    asked = {"truncate_prompt_tokens": most, "truncation_side": side, "return_token_ids": True}
    answer = server.post(PATH, prompt={"encoder_prompt": tokens, "decoder_prompt": "abcdef"}, **asked)
    assert answer["choices"][0]["encoder_prompt_token_ids"] == tokens[kept]
    assert len(answer["choices"][0]["prompt_token_ids"]) == 7


REFUSALS: list[tuple[Any, str]] = [
    ({"encoder_prompt": []}, "The source has no tokens"),
    ([1, 9999], "The source has 9999, which is not a token id"),
    ({"encoder_prompt": [-1], "decoder_prompt": "x"}, "The source has -1"),
    ({"encoder_prompt": "x", "decoder_prompt": [9999]}, "prompt has 9999"),
    ({"encoder_prompt": "x", "decoder_prompt": [1.5]}, "has 1.5, which is not a token id"),
    ("x" * LONGEST, f"The source has {LONGEST + 1} tokens and at most {LONGEST} are encoded"),
    ({"encoder_prompt": "x", "decoder_prompt": "y" * LONGEST}, f"The prompt is too long: {LONGEST + 1} tokens"),
    ({"encoder_prompt": "x" * 600, "decoder_prompt": "y" * 600}, "1200 characters and at most 1000"),
    ({"decoder_prompt": "x"}, "a decoder_prompt and no encoder_prompt"),
    ({"encoder_prompt": "x", "text": "y"}, "the unknown key 'text'"),
    ({"encoder_prompt": {"encoder_prompt": "x"}}, "the unknown key 'encoder_prompt'"),
    ({"encoder_prompt": "x", "multi_modal_data": {"image": 1}}, "images, audio and video are not supported"),
    ({"encoder_prompt": "x", "cache_salt": "a"}, "send it beside the prompt"),
    ({"encoder_prompt": {"prompt": "x", "cache_salt": "a"}}, "send it beside the prompt"),
    ({"encoder_prompt": "x", "decoder_prompt": {"prompt": "x", "cache_salt": "a"}}, "send it beside the prompt"),
    ({"encoder_prompt": 7}, "A prompt is a int"),
    ([{"encoder_prompt": "x"}, "y"], "Input should be"),
    ([{"encoder_prompt": "x"}, {"encoder_prompt": []}], "The source has no tokens"),
]


GOOD = {"prompt": "hello world", "temperature": 0, "max_tokens": 20}


@pytest.fixture(scope="module")
def expected(server: LiveServer) -> Any:
    """Return the answer to GOOD alone."""
    return server.post(PATH, **GOOD)["choices"]


@pytest.mark.parametrize(("prompt", "words"), REFUSALS, ids=[words for _, words in REFUSALS])
def test_a_wrong_prompt_harms_no_neighbour(server: LiveServer, expected: Any, prompt: Any, words: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(server.post, PATH, **GOOD)
        replies = [server.http.post(PATH, json={"prompt": prompt}) for _ in range(3)]
    for reply in replies:
        error = reply.json()["error"]
        assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "prompt")
        assert words in error["message"]
    assert neighbour.result()["choices"] == expected
    assert server.http.get("/load").json() == {"server_load": 0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/chat/completions", {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("/v1/responses", {"input": "hello", "tools": [{"type": "function", "name": "f"}]}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/responses", {"input": "hello", "background": True}),
        ("/tokenize", {"messages": CHAT}),
    ],
)
def test_a_chat_with_an_encoder_decoder_is_refused(server: LiveServer, path: str, body: Any) -> None:
    reply = server.http.post(path, json=body)
    assert reply.status_code == 400
    assert "an encoder-decoder, which has no conversations. Fix: give the text" in reply.json()["error"]["message"]


@pytest.mark.parametrize("name", ["encoder_prompt", "decoder_prompt"])
def test_a_part_of_a_prompt_beside_it_is_refused(server: LiveServer, demo: LiveServer, name: str) -> None:
    for each in (server, demo):
        error = each.http.post(PATH, json={"prompt": "x", name: "y"}).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert 'use prompt={"encoder_prompt"' in error["message"]


def test_a_model_without_encoder_takes_no_source(demo: LiveServer) -> None:
    for prompt in ({"encoder_prompt": "x"}, [{"prompt": "a"}, {"encoder_prompt": "x", "decoder_prompt": "y"}]):
        error = demo.http.post(PATH, json={"prompt": prompt}).json()["error"]
        assert error["message"].startswith("A prompt has an encoder_prompt, and the model has no encoder.")
    plain = demo.post(PATH, prompt="import os", **GREEDY)["choices"]
    assert demo.post(PATH, prompt={"prompt": "import os"}, **GREEDY)["choices"] == plain
    returned = demo.post(PATH, prompt="import os", return_token_ids=True, **GREEDY)["choices"][0]
    assert "encoder_prompt_token_ids" not in returned


def test_other_routes_describe_the_model(server: LiveServer) -> None:
    made = server.post("/tokenize", prompt="hello")
    assert (made["count"], made["tokens"][-1]) == (6, END), "as a source is tokenised"
    assert server.post("/detokenize", tokens=made["tokens"], skip_special_tokens=True) == {"prompt": "hello"}
    assert server.http.get("/v1/models").json()["data"][0]["chat"] is False
    assert server.http.get("/props").json()["default_generation_settings"]["n_ctx"] == LONGEST
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    prompt: Any = {"encoder_prompt": "hello", "decoder_prompt": "ab"}
    assert client.completions.create(model=server.http.get("/props").json()["model_alias"], prompt=prompt).usage


def test_metrics_and_the_log_count_sources(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    def figures() -> dict[str, float]:
        page = server.http.get("/metrics").text
        names = "prompt_tokens_total", "request_prompt_tokens_sum", "request_prefill_kv_computed_tokens_sum"
        found = {name: re.search(rf"^speculant:{name}{{.*}} (\S+)$", page, re.MULTILINE) for name in names}
        return {name: float(match[1]) if match else 0.0 for name, match in found.items()}

    def logged() -> list[int | None]:  # also of the requests for metrics, which have none
        return [json.loads(record.getMessage())["prompt_tokens"] for record in caplog.records]

    before = figures()
    with caplog.at_level(logging.INFO, logger="speculant.serving.access_log"):
        server.post(PATH, prompt={"encoder_prompt": [7] * 30, "decoder_prompt": [BEGIN, 8, 9]}, cache_salt="own")
        server.until(lambda: any(logged()))
    assert [count for count in logged() if count] == [33]
    server.until(lambda: figures()["prompt_tokens_total"] > before["prompt_tokens_total"])
    assert {name: count - before[name] for name, count in figures().items()} == dict.fromkeys(before, 33)
