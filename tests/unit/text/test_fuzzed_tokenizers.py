"""Corrupted tokenizer files give a tokenizer or a ModelError, and then a text or a RequestError."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speculant.errors import ModelError, RequestError
from speculant.params import SamplingParams
from speculant.text.stream import TextStream, compile_stops
from speculant.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.json_faults import changed, changed_deep, values
from tests.unit.text.tokenizers_for_tests import byte_level, metaspace_style, sentencepiece_style

STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 2}
# derandomized: some values make the library allocate without bound, which no exception reports
quick = settings(
    max_examples=examples(60),
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def contents() -> list[dict[str, Any]]:
    """Return the content of tokenizer.json for each kind of tokenizer, and one with every possible part."""
    plain = [json.loads(make().backend.to_str()) for make in (byte_level, sentencepiece_style, metaspace_style)]
    full = json.loads(byte_level().backend.to_str())
    full["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 2}
    full["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<s>",
    }  # fmt: skip
    full["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
    full["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "ByteLevel"}, STRIP]}
    return [*plain, full]


CONTENTS = contents()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level().backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def use(folder: Path) -> None:
    """Load a tokenizer and use it in every way that a request does."""
    with suppress(ModelError):
        tokenizer = Tokenizer.from_folder(folder)
        for text in ("a  fox 👍", "", " "):
            with suppress(RequestError):
                stream_all(tokenizer, [*range(40), *tokenizer.encode(text)])
        with suppress(RequestError):
            tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
        assert all(each is None or each < 2**32 for each in (tokenizer.eos_id, tokenizer.bos_id))


def stream_all(tokenizer: Tokenizer, ids: list[int]) -> None:
    params = SamplingParams(stop=["fox"])
    stream = TextStream(tokenizer, params, compile_stops(params.stop))
    for token_id in ids:
        stream.push(token_id)
    stream.finish()
    tokenizer.decode(ids)


@quick
@given(content=st.sampled_from(CONTENTS).flatmap(changed_deep))
def test_a_changed_tokenizer_is_usable_or_refused(folder: Path, content: dict[str, Any]) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    use(folder)


@quick
@given(data=st.data())
def test_a_tokenizer_cut_short_is_refused(folder: Path, data: st.DataObject) -> None:
    raw = bytearray(json.dumps(CONTENTS[0]).encode())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (folder / "tokenizer.json").write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    use(folder)


SETTINGS = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True},
    "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "added_tokens_decoder": {"0": {"content": "<s>"}},
}
TEMPLATES = [
    "{" * 3000,
    "{{ " + "(" * 3000 + " }}",
    "{{ '" + "9" * 5000 + "' | int }}",
    "{{ 1/0 }}",
    "{{ messages.a.b.c }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    [{"name": "default"}],
    [{"template": "x"}],
    [{"name": ["x"], "template": "y"}],
    ["x"],
]


@quick
@given(content=values | changed(SETTINGS) | st.sampled_from(TEMPLATES).map(lambda t: {**SETTINGS, "chat_template": t}))
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_changed_settings_are_usable_or_refused(folder: Path, file: str, content: Any) -> None:
    (folder / file).write_text(json.dumps(content), encoding="utf-8")
    use(folder)


@pytest.mark.parametrize("text", ["[" * 10**5, '{"a":' * 500 + "1" + "}" * 500, '{"eos_token": "\\ud800"}', "[]", "1"])
def test_unusable_settings_are_refused(folder: Path, text: str) -> None:
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match="tokenizer_config.json"):
        Tokenizer.from_folder(folder)


def test_a_template_that_is_not_text_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="chat_template.jinja"):
        Tokenizer.from_folder(folder)
