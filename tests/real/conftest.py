"""Trained models, where `make real-models` has put them. Tests of a model that is not there are skipped, with a reason.

All tests here are marked slow: `make test` never runs them, `make real` does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.real_models import MODELS, folder

from tests.real.llama_cpp import LlamaCpp


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests here as slow, and give them no limit of a quick test's time."""
    here = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(3600))


def file_of(name: str) -> Path:
    """Return the file of a model; skip the test if it is not there."""
    path = folder() / MODELS[name].file
    if not path.exists():
        pytest.skip(f"{path} is not there; `make real-models` gets it")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return file_of("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    return file_of("gemma3")


@pytest.fixture(scope="session")
def llama_cpp() -> LlamaCpp:
    found = LlamaCpp.find()
    if found is None:
        pytest.skip("LLAMA_CPP names no folder with llama.cpp's programs")
    return found
