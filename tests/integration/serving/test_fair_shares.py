"""Fair shares over HTTP: a client with its own key is served beside any other, and alone may use everything."""

from __future__ import annotations

import re
import stat
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from speculant import AsyncEngine
from speculant.cli import ServerFlags
from speculant.errors import ConfigError
from speculant.serving import client_of, key_digest, read_weights
from tests.integration.serving.test_ends import LONG, SlowEngine
from tests.models import Checkpoints, checkpoints
from tests.servers import LiveServer, ServerProcess, in_background, serve, serve_process

__all__ = ["checkpoints", "serve", "serve_process"]
SHORT = {**LONG, "max_tokens": 8}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(server: LiveServer | ServerProcess, key: str, **body: Any) -> httpx.Response:
    return ask_as(server, bearer(key), **body)


def ask_as(server: LiveServer | ServerProcess, headers: dict[str, str], **body: Any) -> httpx.Response:
    with httpx.Client(base_url=server.url, timeout=300, trust_env=False, verify=False) as client:
        return client.post("/v1/completions", json=body, headers=headers)


# --- places


NAMED = {"trusted_proxies": ("127.0.0.1",), "client_header": "X-User"}


@pytest.mark.parametrize(
    ("options", "one", "two"),
    [
        ({"api_keys": ("one", "two")}, bearer("one"), bearer("two")),
        (NAMED, {"X-User": "one"}, {"X-User": "two"}),
        ({"api_keys": ("front",), **NAMED}, {**bearer("front"), "X-User": "one"}, {**bearer("front"), "X-User": "two"}),
    ],
    ids=["keys", "users", "users of a key"],
)
def test_a_client_finds_room_beside_one_that_fills_it(
    options: dict[str, Any],
    one: dict[str, str],
    two: dict[str, str],
    serve: Any,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One client fills every place. A second one still gets its half, and its answer comes first."""
    engine = AsyncEngine(checkpoints.target, max_num_seqs=2, max_waiting=2, dtype="float32")
    slow = SlowEngine(engine, monkeypatch)
    server: LiveServer = serve(engine, **options).ready()
    done: list[str] = []

    def fill() -> None:
        long = {**LONG, "max_tokens": 60, "n": 2, "temperature": 1, "seed": 1}
        assert ask_as(server, one, **long).status_code == 200
        done.append("one")

    with in_background([fill, fill]):
        server.until(lambda: server.state.admission.count == 4 and engine.metrics.running == 2)
        refused = ask_as(server, one, **SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "4 of this client's sequences run or wait" in refused.json()["error"]["message"]
        assert ask_as(server, two, **SHORT).status_code == 200
        assert done == []
        assert ask_as(server, two, **SHORT, n=3).status_code == 429
        assert ask_as(server, two, **SHORT, beam_width=3).status_code == 429, "beams count, too"
        slow.seconds = 0
    assert engine.metrics.preemptions > 0
    assert server.state.admission.count == 0


# --- requests of one client


@pytest.mark.parametrize("many", [{"n": 32, "temperature": 1}, {"prompt": ["ab"] * 32}], ids=["n", "prompts"])
def test_a_small_request_does_not_wait_for_a_large_one(
    many: dict[str, Any], serve: Any, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are of one client. The small one comes in the middle, and ends while most of the others wait."""
    engine = AsyncEngine(checkpoints.target, max_num_seqs=2, dtype="float32")
    slow = SlowEngine(engine, monkeypatch)
    server: LiveServer = serve(engine, api_keys=("one",)).ready()

    with in_background([lambda: ask(server, "one", **{**LONG, "max_tokens": 20, **many})]):
        server.until(lambda: engine.metrics.running == 2)
        assert ask(server, "one", **SHORT).status_code == 200
        assert server.state.admission.count == 32
        assert engine.metrics.waiting > 24
        slow.seconds = 0
    assert engine.metrics.preemptions == 1


# --- priorities


def test_priorities_have_no_effect_without_a_range(demo: LiveServer) -> None:
    for priority in (0, 5, -1_000_000):
        assert demo.post("/v1/completions", **SHORT, priority=priority)["usage"]["completion_tokens"] == 8


def test_priorities_are_checked_against_the_range(serve: Any, checkpoints: Checkpoints) -> None:
    server = serve(AsyncEngine(checkpoints.target), priority_range=(-5, 5)).ready()
    for priority, status in ((-5, 200), (5, 200), (6, 400), (-1_000_000, 400)):
        reply = server.http.post("/v1/completions", json={**SHORT, "priority": priority})
        assert reply.status_code == status
        if status == 400:
            assert reply.json()["error"]["param"] == "priority"
            assert "from -5 to 5" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("text", "expected"), [("-3:4", (-3, 4)), ("0:0", (0, 0))])
def test_a_range_of_priorities_is_read(text: str, expected: tuple[int, int]) -> None:
    assert flags(priority_range=text).options().priority_range == expected


@pytest.mark.parametrize("text", ["", "3", "a:b", "1:2:3", "4:-3"])
def test_a_range_without_numbers_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="priority.range"):
        flags(priority_range=text or ":").options()


def flags(**given: Any) -> ServerFlags:
    names = [ServerFlags.renamed.get(name, name) for name in ServerFlags.names()]
    return ServerFlags({**dict.fromkeys(names), **given})


# --- weights


def test_weights_belong_to_keys(tmp_path: Path) -> None:
    path = tmp_path / "weights.json"
    path.write_text('{"one": 2.5, "two": 1}')
    weights = read_weights(str(path), ("one", "two", "three"))
    assert weights == {f"key:{key_digest('one')}": 2.5, f"key:{key_digest('two')}": 1.0}
    assert client_of({"speculant.api_key": "one"}) in weights
    assert read_weights(None, ("one",)) == {}


def test_others_who_may_read_weights_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "weights.json"
    path.write_text('{"secret": 2}')
    path.chmod(stat.S_IRUSR)
    read_weights(str(path), ("secret",))
    assert caplog.text == ""
    path.chmod(stat.S_IRUSR | stat.S_IROTH)
    read_weights(str(path), ("secret",))
    assert "other users may read" in caplog.text
    assert '"secret"' not in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '["secret"]', "7", '{"secret": 1', '{"secret": "1"}', '{"secret": true}', '{"secret": 0}'),
        *('{"secret": -1}', '{"secret": NaN}', '{"secret": 1e9}', '{"secret": 1, "secret": 2}', '{"secretive": 1}'),
        *('{"secret": {"secret": 1}}', "{" * 100_000, '{"secret": [' + "[" * 100_000),
    ],
    ids=lambda text: text[:24],
)
def test_faulty_weights_are_refused_without_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "weights.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_weights(str(path), ("secret", "secret too"))
    assert "secret" not in str(caught.value)
    assert "weights.json" in str(caught.value)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("none", "bytes", "."):
        with pytest.raises(ConfigError, match="can't be read"):
            read_weights(str(tmp_path / name), ())


# --- attacks, measured

BOUND = 0.25  # seconds that a neighbour's first token takes more than alone, unless EXTRA steps take longer
EXTRA = 3
KEYS = {f"key{number}": {"type": "string"} for number in range(6)}
SCHEMA = {"type": "object", "properties": KEYS, "required": [*KEYS]}
FORM = {"type": "json_schema", "json_schema": {"name": "keys", "schema": SCHEMA}}
ATTACKS: dict[str, list[dict[str, Any]]] = {
    "128 answers": [{"n": 128}],
    "three with a low priority": [{"n": 16, "priority": -1_000_000}] * 3,
    "many requests": [{}] * 48,
    "long prompts": [{"prompt": "word " * 100}] * 24,
    "beam searches": [{"n": 16, "beam_width": 16, "temperature": 0, "max_tokens": 20}] * 3,
    "wide beams": [{"beam_width": 128, "temperature": 0, "max_tokens": 20}] * 3,
    "long drafts": [{"speculation": {"num_speculative_tokens": 512}}] * 8,
    "long drafts of forms": [{"speculation": {"num_speculative_tokens": 512}, "n": 8, "response_format": FORM}] * 3,
    "banned words": [{"n": 128, "bad_words": [[97] * 15 + [number] for number in range(1024)]}],
    "log-probabilities of prompts": [{"prompt_logprobs": 100, "prompt": ["ab " * 99] * 16, "stream": False}] * 3,
}


def token_times(client: httpx.Client, key: str) -> list[float]:
    """Stream eight tokens; return the seconds until the first one, and between them."""
    body, times = {**SHORT, "stream": True, "speculation": False}, [time.perf_counter()]
    with client.stream("POST", "/v1/completions", json=body, headers=bearer(key)) as response:
        times += [time.perf_counter() for line in response.iter_lines() if line.startswith('data: {"')]
    assert len(times) > 8, "not every token was streamed"
    return [after - before for before, after in pairwise(times)]


def until_many_run(server: ServerProcess, key: str) -> None:
    """Wait until the engine has the attacker's requests."""
    for _ in range(6000):
        page = server.http.get("/metrics", headers=bearer(key)).text
        (running,) = re.findall(r"^speculant:num_requests_running{.*} (.*)$", page, re.MULTILINE)
        if float(running) > 2:
            return
        time.sleep(0.01)
    raise AssertionError("the attack did not begin")


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_neighbour_does_not_wait_for_an_attacker(serve_process: Any, attack: str) -> None:
    """Its later tokens show how long a step takes beside the attack, on a machine that may do other things as well."""
    keys = ["neighbour", *(f"attacker {number}" for number in range(3))]
    server: ServerProcess = serve_process(
        "demo", "--draft-model", "demo", *(flag for key in keys for flag in ("--api-key", key))
    ).ready()

    with httpx.Client(base_url=server.url, timeout=300, trust_env=False, verify=False) as client:

        def attacker(number: int, body: dict[str, Any]) -> Callable[[], object]:
            sampled = {**LONG, "temperature": 1, "seed": number, "max_tokens": 60, **body}
            return lambda: client.post("/v1/completions", json=sampled, headers=bearer(keys[1 + number % 3]))

        token_times(client, keys[0])
        alone = max(token_times(client, keys[0])[0] for _ in range(5))
        with in_background([attacker(*each) for each in enumerate(ATTACKS[attack])]):
            until_many_run(server, keys[0])
            beside = [token_times(client, keys[0]) for _ in range(8)]
    first, step = max(times[0] for times in beside), max(max(times[1:]) for times in beside)
    print(f"{attack}: first token alone {alone:.3f} s, beside {first:.3f} s; a step takes up to {step:.3f} s")
    assert first < alone + max(BOUND, (1 + EXTRA) * step), "the step under way, and three more"
