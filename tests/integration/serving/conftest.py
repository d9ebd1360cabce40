"""One server of the embedded pair for all tests that do not change it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from speculant import AsyncEngine
from tests.openai_schema import conforms
from tests.servers import FIM_MARKS, LiveServer, serve

__all__ = ["conforms", "demo", "serve"]


@pytest.fixture(scope="session")
def demo() -> Iterator[LiveServer]:
    """Return a server of the embedded pair, called "demo". Drafts have four tokens, however busy the machine is.

    Three tokens that no text of a test has are its marks for filling in the middle.
    """
    engine = AsyncEngine("demo", draft_model="demo", max_num_seqs=8, spec_length=4)
    engine.tokenizer._special |= FIM_MARKS
    server = LiveServer(engine, per_request_spec_decode_metrics="detailed").ready()
    yield server
    server.stop()
