"""A completion that repeats its prompt, with the log-probabilities that evaluation harnesses read."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import openai
import pytest

from speculant import LLM, SamplingParams
from tests.servers import LiveServer

PROMPT = "def read(path):\n    # ä😀\n"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def llm() -> Any:
    return LLM("demo", draft_model="demo")


@pytest.mark.parametrize("as_tokens", [False, True])
def test_the_prompt_precedes_the_answer(demo: LiveServer, as_tokens: bool) -> None:
    tokens = demo.post("/tokenize", prompt=PROMPT)["tokens"]
    asked = {"prompt": tokens if as_tokens else PROMPT, "n": 2, **GREEDY}
    plain = demo.post("/v1/completions", **asked)
    echoed = demo.post("/v1/completions", echo=True, **asked)
    assert [each["text"] for each in echoed["choices"]] == [PROMPT + each["text"] for each in plain["choices"]]
    assert echoed["usage"] | {"prompt_tokens_details": 0} == plain["usage"] | {"prompt_tokens_details": 0}
    chunks = demo.chunks("/v1/completions", echo=True, **asked)
    for index in (0, 1):
        own = [each["text"] for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        assert own[0] == PROMPT
        assert "".join(own) == echoed["choices"][index]["text"]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_log_probabilities_equal_the_library_s(demo: LiveServer, llm: Any, max_tokens: int) -> None:
    tokens = demo.post("/tokenize", prompt=PROMPT)["tokens"]
    answer = demo.post("/v1/completions", prompt=tokens, echo=True, logprobs=1, temperature=0, max_tokens=max_tokens)
    choice, known = answer["choices"][0], llm.generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=1))[0]
    logprobs, count = choice["logprobs"], len(tokens)
    assert {len(each) for each in logprobs.values()} == {count + max_tokens}
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    expected = [entry[token].logprob for token, entry in zip(tokens[1:], known.prompt_logprobs[1:], strict=True)]
    assert logprobs["token_logprobs"][1:count] == expected
    best = [max(value.logprob for value in entry.values()) for entry in known.prompt_logprobs[1:]]
    assert [max(each.values()) for each in logprobs["top_logprobs"][1:count]] == best
    assert any(a == b for a, b in zip(expected, best, strict=True))
    assert any(a != b for a, b in zip(expected, best, strict=True))
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_do_not_depend_on_stop_strings(demo: LiveServer, echo: bool) -> None:
    """The text of tokens that may begin a stop string is held back; their offsets are the same."""
    body = {"prompt": "import os\n", "logprobs": 0, "temperature": 0, "max_tokens": 12, "echo": echo}
    free = demo.post("/v1/completions", **body)["choices"][0]
    offsets, text = free["logprobs"]["text_offset"], free["text"][10 if echo else 0 :]
    assert len({*offsets}) > 8
    for stop in ([text[:6] + "\0"], [text + "\0"], [each + "\0" for each in {*text}]):
        held = demo.post("/v1/completions", stop=stop, **body)["choices"][0]
        assert (held["text"], held["logprobs"]["text_offset"]) == (free["text"], offsets)
        chunks = demo.chunks("/v1/completions", stop=stop, **body) if not echo else []
        streamed = [each["logprobs"] for chunk in chunks for each in chunk["choices"] if each["logprobs"]]
        assert echo or [place for each in streamed for place in each["text_offset"]] == offsets


def test_offsets_are_positions_in_the_text(demo: LiveServer) -> None:
    choice = demo.post("/v1/completions", prompt="import os\n", echo=True, logprobs=0, **GREEDY)["choices"][0]
    logprobs, text = choice["logprobs"], choice["text"]
    ends = [*logprobs["text_offset"][1:], len(text)]
    shown = [text[a:b] for a, b in pairwise([logprobs["text_offset"][0], *ends])]
    assert shown[0] == ""  # the first token is special, and its text is not in the answer
    assert shown[1:] == logprobs["tokens"][1:]


def test_an_empty_answer_is_an_answer(demo: LiveServer) -> None:
    asked = {"prompt": PROMPT, "echo": True, "max_tokens": 0}
    answer = demo.post("/v1/completions", return_token_ids=True, **asked)
    assert answer["choices"][0]["text"] == PROMPT
    assert answer["choices"][0]["token_ids"] == []
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"]
    chunks = demo.chunks("/v1/completions", **asked)
    assert "".join(each["text"] for chunk in chunks for each in chunk["choices"]) == PROMPT
    refused = demo.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_echo_with_log_probabilities_is_not_streamed(demo: LiveServer) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "stream": True, **GREEDY}
    refused = demo.http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")


def test_a_beam_search_repeats_the_prompt_too(demo: LiveServer) -> None:
    asked = {"prompt": PROMPT, "beam_width": 2, "max_tokens": 3}
    plain = demo.post("/v1/completions", **asked)["choices"][0]["text"]
    assert demo.post("/v1/completions", echo=True, **asked)["choices"][0]["text"] == PROMPT + plain


def test_openai_s_client_reads_an_echo(demo: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(model="demo", prompt=[PROMPT, "import os"], echo=True, logprobs=2, **GREEDY)
    for choice, prompt in zip(answer.choices, (PROMPT, "import os"), strict=True):
        assert choice.text.startswith(prompt)
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt=PROMPT, extra_body={"mirostat": 2})
    assert caught.value.param == "mirostat"
    assert "temperature" in caught.value.message


def test_the_tokenizer_is_described(demo: LiveServer) -> None:
    info = demo.http.get("/tokenizer_info").json()
    assert info["eos_token"] == info["bos_token"] == "<|endoftext|>"
    assert "assistant" in info["chat_template"]
    assert info["tokenizer_class"]
