"""Lines of batch files, and what results were made with."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from speculant.config import EngineConfig
from speculant.scale import (
    MOST_BYTES,
    LineAnswer,
    LineError,
    Origin,
    custom_id_of,
    digest_of,
    failure,
    is_torn,
    raw_lines,
    read_line,
    read_record,
    success,
)
from speculant.serving import ServerOptions
from tests.batches import request
from tests.models import Checkpoints, checkpoints

MADE_WITH = Origin("01234567", "89abcdef")


def _line(**fields: Any) -> bytes:
    return json.dumps(request(1, **fields)).encode()


def test_request_is_read() -> None:
    line = read_line(7, _line(prompt="hi", extra=1))
    assert (line.number, line.custom_id, line.url, line.problem) == (7, "r1", "/v1/completions", None)
    assert json.loads(line.body) == {"prompt": "hi", "max_tokens": 4, "temperature": 0}


@pytest.mark.parametrize(
    ("data", "code", "named"),
    [
        (b"nonsense", "invalid_json", "line 7: it is not valid JSON"),
        (b"[1]", "invalid_json", "not a JSON object"),
        (b"\xff\xfe", "invalid_json", "UTF-8"),
        (b"[" * 100_000, "invalid_json", "nested too deep"),
        (b'{"custom_id": NaN}', "invalid_json", "NaN is not a number of JSON"),
        (_line(custom_id=None), "missing_custom_id", "custom_id is missing"),
        (_line(custom_id=17), "missing_custom_id", "custom_id is missing"),
        (_line(method="GET"), "invalid_method", "method is 'GET'; write POST"),
        (_line(url="/v1/embeddings"), "invalid_url", "write /v1/chat/completions or /v1/completions"),
        (_line(url=None), "invalid_url", "url is missing"),
        (_line(body="x"), "invalid_body", "body is 'x'"),
        (_line(body={"stream": True}), "invalid_body", "body.stream"),
        (b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"top_p":1e999}}', "invalid_json", "number"),
        (b" " * (MOST_BYTES + 1), "line_too_long", "split it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_line_says_what_is_wrong(data: bytes, code: str, named: str) -> None:
    line = read_line(7, data)
    assert line.problem is not None
    assert line.problem.code == code
    assert line.problem.message.startswith("line 7: ")
    assert named in line.problem.message


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1], [2]], "best_of": 2}, 4),
        ({"messages": [], "n": 5}, 5),
        ({"prompt": [], "n": -3}, 1),
        ({"prompt": "a", "n": "many"}, 1),
    ],
)
def test_sequences_are_counted(body: dict[str, Any], count: int) -> None:
    assert read_line(1, _line(body=body)).sequences == count


def test_order_puts_shared_beginnings_together() -> None:
    system = [{"role": "system", "content": "long " * 20}]
    bodies = [
        {"messages": [*system, {"role": "user", "content": "a"}]},
        {"messages": [{"role": "user", "content": "m"}]},
        {"messages": [*system, {"role": "user", "content": "b"}]},
    ]
    lines = [read_line(place, _line(body=body)) for place, body in enumerate(bodies)]
    assert [line.number for line in sorted(lines, key=lambda line: line.order)] in ([0, 2, 1], [1, 0, 2])


def test_digest_ignores_only_space_around() -> None:
    line = _line()
    assert digest_of(line) == digest_of(b"\xef\xbb\xbf" + line + b"\r\n") != 0
    assert digest_of(line) != digest_of(line.replace(b"r1", b"r2"))
    assert digest_of(b"  \r\n") == 0


def test_custom_id_of_a_bad_line_counts() -> None:
    assert custom_id_of(_line(url="/elsewhere")) == "r1"
    assert custom_id_of(b"nonsense") is None


def test_results_have_the_shape_of_openai() -> None:
    line = read_line(3, _line(custom_id="ä\nb"))
    answered = success(line, LineAnswer(200, "req", b'{\n "choices": []}'), MADE_WITH)
    assert json.loads(answered) == {
        "id": f"batch_req_3_{line.digest:016x}_0123456789abcdef",
        "custom_id": "ä\nb",
        "response": {"status_code": 200, "request_id": "req", "body": {"choices": []}},
        "error": None,
    }
    failed = failure(line, LineError("code", "why"), MADE_WITH)
    assert json.loads(failed)["error"] == {"code": "code", "message": "why", "line": 3}
    for record in (answered, failed):
        assert record.count(b"\n") == 1
        assert read_record(record) == (3, line.digest, MADE_WITH)


def test_every_beginning_of_a_result_is_torn() -> None:
    record = failure(read_line(3, _line()), LineError("code", "why"), MADE_WITH)
    assert all(is_torn(record[:size]) for size in range(len(record)))
    assert is_torn(record[:30] + bytes(100))
    assert not any(map(is_torn, (b"hello", b'{"id":"batch', b'{"id": "x"')[:1]))
    assert not is_torn(b'{"name": 1')


def test_long_lines_are_skipped_in_pieces() -> None:
    found = list(raw_lines(io.BytesIO(b"abcdef\n\nxyz"), 4))
    assert [(line.offset, line.data, line.size, line.whole) for line in found] == [
        (0, b"abcd", 7, True),
        (7, b"\n", 1, True),
        (8, b"xyz", 3, False),
    ]


# --- which models and settings count as the same


__all__ = ["checkpoints"]


def origin(model: str | Path, tool_parser: str | None = None, **values: Any) -> Origin:
    config = EngineConfig.from_arguments(model=str(model), **values)
    places = [Path(each) for each in (model, config.tokenizer) if each is not None]
    return Origin.of(places, config, ServerOptions(tool_parser=tool_parser))


def test_the_content_of_a_model_counts_and_not_its_place(checkpoints: Checkpoints, tmp_path: Path) -> None:
    first = origin(checkpoints.target)
    assert origin(checkpoints.near).model != first.model
    copied = shutil.copytree(checkpoints.target, tmp_path / "copy")
    assert origin(copied) == first
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        path = copied / name
        before = path.read_bytes()
        path.write_bytes(before[:-2] + bytes([before[-2] ^ 1]) + before[-1:])
        assert origin(copied).model != first.model, name
        path.write_bytes(before)
    (copied / "README.md").write_text("notes")
    assert origin(copied) == first
    (copied / "generation_config.json").write_text("{}")
    assert origin(copied).model != first.model


def test_another_tokenizer_is_another_model(checkpoints: Checkpoints) -> None:
    assert origin(checkpoints.target, tokenizer=checkpoints.near).model != origin(checkpoints.target).model


@pytest.mark.parametrize(
    "other",
    [{"dtype": "float64"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}, {"kernels": "reference"}, {"seed": 1},
     {"model_backend": "transformers"}, {"speculative_config": {"verification": "lenient"}}, {"tool_parser": "hermes"}],
    ids=str,
)  # fmt: skip
def test_settings_that_change_texts_count(checkpoints: Checkpoints, other: dict[str, Any]) -> None:
    first, second = origin(checkpoints.target), origin(checkpoints.target, **other)
    assert first.model == second.model
    assert first.settings != second.settings


@pytest.mark.parametrize(
    "other",
    [{"max_num_seqs": 3}, {"use_speculative_decoding": False}, {"spec_length": 3}, {"kv_memory": "1GiB"},
     {"block_size": 32}, {"max_model_len": 100}, {"enable_prefix_caching": False}],
    ids=str,
)  # fmt: skip
def test_settings_of_speed_do_not(checkpoints: Checkpoints, other: dict[str, Any]) -> None:
    assert origin(checkpoints.target) == origin(checkpoints.target, **other)
