"""A tokenizer that a GGUF file describes gives the tokens of the tokenizer.json that it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from speculant.models.source import resolve_source
from speculant.text.gguf_tokenizer import read_gguf_tokenizer
from speculant.text.tokenizer import Tokenizer
from tests.gguf_tokenizers import metadata_of

TEXTS = ("def f(x):\n    return x  # it's", "größer, naïve café", "\n\n1 12 123", "a<|endoftext|>b", "👍🏽", "")


def demo() -> tuple[Tokenizer, dict[str, Any]]:
    """The embedded target's tokenizer, and the metadata of a GGUF file with it."""
    folder = resolve_source("demo")
    content = json.loads(Path(folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads(Path(folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    return Tokenizer.from_folder(folder), metadata_of(content, settings)


def test_the_demo_pair_has_the_same_tokens_from_a_gguf_file() -> None:
    original, metadata = demo()
    read = read_gguf_tokenizer(metadata)
    for text in TEXTS:
        ids = original.encode(text)
        assert read.backend.encode(text).ids == ids
        assert read.backend.decode(ids) == original.decode(ids)
    assert read.backend.get_vocab() == original.vocab()
    assert {name: read.settings[name] for name in ("bos_token", "eos_token", "chat_template")} == {
        name: original.settings[name] for name in ("bos_token", "eos_token", "chat_template")
    }
