"""`speculant.ray:app` behind Ray's own proxies."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import httpx
import pytest
import ray
from ray import serve

from speculant import LLM, SamplingParams
from speculant.scale import app
from tests.ray_cluster import PAIR, PATIENCE, cluster

__all__ = ["cluster"]

pytestmark = pytest.mark.slow
PROMPT = {"prompt": "def add(a, b):", "max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def http(cluster: str) -> Iterator[httpx.Client]:
    """Deploy the application as `serve run` does, and return a client of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(address=cluster, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    given = {name: str(value) for name, value in PAIR.items()}  # a command line gives text
    serve.run(app({**given, "replicas": "2", "replica_cores": "1", "api_keys": "sk-1"}), name="whole")
    headers = {"authorization": "Bearer sk-1"}
    with httpx.Client(
        base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=PATIENCE, trust_env=False
    ) as client:
        yield client
    serve.delete("whole")


def test_answers_are_those_of_one_engine(http: httpx.Client) -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    text = LLM(**PAIR).generate([PROMPT["prompt"]], params)[0].outputs[0].text
    whole = http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "own"})
    assert whole.status_code == 200
    assert whole.json()["choices"][0]["text"] == text
    assert whole.headers["x-speculant-replica"]
    assert whole.headers.get_list("x-request-id") == ["own"]
    with http.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as streamed:
        *events, last = [line.removeprefix("data: ") for line in streamed.iter_lines() if line]
    assert last == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text


def test_keys_and_errors_are_those_of_the_server(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json=PROMPT, headers={"authorization": "Bearer other"}).status_code == 401
    wrong = http.post("/v1/completions", json={**PROMPT, "max_tokens": -1})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")
    assert http.get("/nowhere").status_code == 404


def test_states_are_those_of_all_replicas(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok", "replicas": 2}
    assert http.get("/load").json()["server_load"] == 0
    assert (
        len({line for line in http.get("/metrics").text.splitlines() if line.startswith("vllm:num_requests_run")}) == 2
    )
