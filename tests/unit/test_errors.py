"""Errors of foreign code become errors of ours; other errors pass unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend, decoders, models

from speculant.errors import Converts, ModelError, RequestError
from speculant.text import Tokenizer

READING = Converts(ModelError, "it can't be read", "download it again.")


def panic(*_: Any) -> str:
    """Let the Rust code of `tokenizers` panic: it looks for two spaces at the end of a token of one."""
    backend = Backend(models.WordLevel({" ": 0}, unk_token=" "))
    backend.decoder = decoders.Strip(" ", 0, 2)
    text: str = backend.decode([0])
    return text


@pytest.mark.parametrize("fail", [panic, lambda: int("x"), lambda: {}["x"]])
def test_errors_and_panics_are_converted(fail: Any) -> None:
    with pytest.raises(ModelError, match="it can't be read: .+\n.*download") as caught, READING:
        fail()
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit(), RequestError("no", "none")])
def test_other_errors_pass_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, READING:
        raise error
    assert caught.value is error


def test_a_panic_while_a_tokenizer_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("speculant.text.tokenizer.Backend.from_file", panic, raising=True)
    with pytest.raises(ModelError, match="tokenizer.json can't be read"):
        Tokenizer.from_folder(tmp_path)
