"""Compiled grammars over a tokenizer whose tokens are bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculant.structured import Grammars
from speculant.text import Tokenizer
from tests.models import END, Checkpoints


@pytest.fixture(scope="session")
def tokenizer(checkpoints: Checkpoints) -> Tokenizer:
    """Return the tokenizer of the small checkpoints: 256 bytes, an end token and another one."""
    return Tokenizer.from_folder(Path(checkpoints.target))


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    """Compile over that tokenizer."""
    pytest.importorskip("llguidance")
    return Grammars(tokenizer, {END})
