"""`speculant.ray:LLMServer` with the embedded pair behind `build_openai_app` of `ray.serve.llm`, on a local Ray.

Needs vLLM, from which Ray takes its models of requests; its protocol modules and their dependencies are enough. Needs
a FastAPI below 0.137, as vLLM does: Ray's routes fail with later ones.
Compares texts with the engine's own, and asks for errors.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

from speculant import LLM, SamplingParams

PORT = 8123
MODEL = "demo"
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Write a function."}],
    "max_tokens": 24,
    "temperature": 0,
}
http = httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120, trust_env=False)


def deploy() -> None:
    """Deploy one replica behind Ray's own routes."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=4, include_dashboard=False)
    config = LLMConfig(
        model_loading_config={"model_id": MODEL},
        server_cls="speculant.ray:LLMServer",
        engine_kwargs={"draft_model": "demo", "max_num_seqs": 4},
        deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(build_openai_app({"llm_configs": [config]}), name="llm")


def ask(path: str, body: dict[str, Any]) -> Any:
    """Return a whole answer."""
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(path: str, body: dict[str, Any]) -> list[Any]:
    """Return the chunks of a stream, which ends as it has to."""
    response = http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    *events, last = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert last == "[DONE]", last
    return [json.loads(event) for event in events]


def check_texts() -> None:
    """Completions and chats, whole and streamed, have the engine's texts."""
    llm = LLM("demo", draft_model="demo", max_num_seqs=4)
    greedy = SamplingParams(max_tokens=24, temperature=0)
    text = llm.generate([PROMPT["prompt"]], greedy)[0].outputs[0].text
    assert ask("/v1/completions", PROMPT)["choices"][0]["text"] == text
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed("/v1/completions", PROMPT)) == text
    said = llm.chat(CHAT["messages"], greedy)[0].outputs[0].text
    assert ask("/v1/chat/completions", CHAT)["choices"][0]["message"]["content"] == said
    deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in streamed("/v1/chat/completions", CHAT)]
    assert "".join(deltas) == said


def check_tokens() -> None:
    """A text becomes tokens, and these the text."""
    tokens = ask("/tokenize", {"model": MODEL, "prompt": "def add"})["tokens"]
    assert ask("/detokenize", {"model": MODEL, "tokens": tokens})["prompt"].endswith("def add")


def check_errors() -> None:
    """Requests that are refused name the reason."""
    for body in (PROMPT | {"temperature": -1}, PROMPT | {"temperature": -1, "stream": True}):
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 400, response.text
        assert "temperature" in response.text
    assert http.post("/v1/completions", json=PROMPT | {"model": "other"}).status_code == 404


if __name__ == "__main__":
    try:
        deploy()
        for check in (check_texts, check_tokens, check_errors):
            check()
            print(f"{check.__name__}: passed", flush=True)
        print(f"ray {version('ray')}, vllm {version('vllm')}")
    finally:
        serve.shutdown()
        ray.shutdown()
