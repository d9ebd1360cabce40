"""SmolLM2-135M-Instruct in Q4_1: it writes llama.cpp's greedy texts, chats, calls tools and writes JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jsonschema import validate

from speculant import LLM, AsyncEngine, SamplingParams
from speculant.models import CausalLM, load_model
from speculant.text import Tokenizer
from tests.real.llama_cpp import END, LlamaCpp
from tests.real.test_drafters import GREEDY, SEEDED, smollm2_texts, tokens_of
from tests.real.test_logits import logits_of
from tests.real.texts import SUBJECTS
from tests.servers import LiveServer

TIE = 0.5  # between log-probabilities; rounding moves each by about 0.08: half its square is the divergence, 0.0035
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "What is the capital of Germany?"}]  # no token of the answer is nearly a tie


class Reader:
    """Measures how much a model in float32 prefers our text to another one at the first difference."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer.load(path)
        self.model: CausalLM = load_model(str(path), "float32", kernels="reference").model

    def text(self, tokens: list[int]) -> str:
        """Return the text of tokens, with END for a token that ends it."""
        end = self.tokenizer.eos_id
        if end not in tokens:
            return self.tokenizer.decode(tokens)
        return self.tokenizer.decode(tokens[: tokens.index(end)]) + END

    def compare(self, prompt: str, ours: list[int], theirs: str) -> tuple[int, float | None]:
        """Return the number of equal tokens, and how much our next one is preferred; None if no token differs."""
        same = next((n for n in range(len(ours)) if not theirs.startswith(self.text(ours[: n + 1]))), len(ours))
        if same == len(ours) or END in self.text(ours[:same]):
            return same, None
        for first in range(same, -1, -1):  # a token of ours can be the begin of one of theirs
            if (preference := self.preference(prompt, ours[: first + 1], theirs)) is not None:
                return first, preference
        raise AssertionError((self.text(ours), theirs))

    def preference(self, prompt: str, ours: list[int], theirs: str) -> float | None:
        """Return by how much our last token is preferred to another text's; None if none of the likely ones fits."""
        *before, own = ours
        rest = theirs.removeprefix(self.text(before))
        log_probs = torch.log_softmax(logits_of(self.model, [*self.tokenizer.encode(prompt), *before])[-1], 0)
        likely = [token for token in log_probs.topk(50).indices.tolist() if token != own]
        others = [token for token in likely if (text := self.text([token])) and rest.startswith(text)]
        return float(log_probs[own] - max(log_probs[token] for token in others)) if others else None


def test_greedy_texts_are_llama_cpps_up_to_ties(smollm2: Path, llama_cpp: LlamaCpp) -> None:
    reader, own = Reader(smollm2), smollm2_texts()
    ours = tokens_of(
        own.llm(max_num_seqs=1, use_speculative_decoding=False).generate([*SUBJECTS], own.params("greedy"))
    )
    theirs = [llama_cpp.complete(smollm2, prompt, own.tokens) for prompt in SUBJECTS]
    found = [reader.compare(*each) for each in zip(SUBJECTS, ours, theirs, strict=True)]
    parted = sorted(abs(preference) for _, preference in found if preference is not None)
    equal, most = sum(same for same, _ in found), max(parted, default=0.0)
    print(f"\n{len(parted)} of {len(SUBJECTS)} texts differ from llama.cpp's, after {equal} equal tokens in all")
    print(f"at the first difference, log-probabilities differ by {parted}")
    assert most < TIE
    assert len(parted) < 0.05 * equal


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> LLM:
    return smollm2_texts().llm()


def test_it_chats_by_its_template(llm: LLM) -> None:
    rendered = llm.render_chat(QUESTION).text
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert rendered.endswith("<|im_start|>user\nWhat is the capital of Germany?<|im_end|>\n<|im_start|>assistant\n")
    (answer,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=60))
    (sample,) = answer.outputs
    assert sample.text == "The capital of Germany is Berlin."
    assert "<|" not in sample.text
    assert sample.finish_reason == "stop", "the template's end of a turn ends the text"


@pytest.mark.parametrize("kind", [GREEDY, {**SEEDED, "repetition_penalty": 1.1}], ids=["greedy", "seeded"])
def test_it_writes_json(llm: LLM, kind: dict[str, float]) -> None:
    messages = [{"role": "user", "content": "Describe a cat called Mia as JSON with name, age and kind."}]
    settings = SamplingParams(**kind, seed=5, max_tokens=120, structured_outputs={"json": SCHEMA})
    (answer,) = llm.chat(messages, settings)
    validate(json.loads(answer.outputs[0].text), SCHEMA)


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[LiveServer]:
    live = LiveServer(AsyncEngine(str(smollm2), max_model_len=1024)).ready()
    live.http.timeout = 120
    yield live
    live.stop()


def test_it_calls_a_tool_that_is_required(server: LiveServer) -> None:
    kind = {"kind": SCHEMA["properties"]["kind"]}
    parameters = {"type": "object", "properties": kind, "required": ["kind"], "additionalProperties": False}
    tools = [
        {"type": "function", "function": {"name": "feed", "description": "Feed an animal", "parameters": parameters}}
    ]
    body = {"messages": [{"role": "user", "content": "Feed the cat."}], "tools": tools, "temperature": 0}
    (choice,) = server.post("/v1/chat/completions", **body, max_tokens=120, tool_choice="required")["choices"]
    call, *_ = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "feed"
    assert json.loads(call["function"]["arguments"])["kind"] in ("cat", "dog")
