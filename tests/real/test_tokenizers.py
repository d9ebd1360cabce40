"""Tokenizers of real GGUF files give llama.cpp's tokens. Needs llama-cpp-python, and files to compare."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from speculant.gguf_file import GgufFile
from tests.real.compare_tokenizers import compare

FOLDER = "SPECULANT_GGUF_VOCABULARIES"
KINDS = ("gpt2", "llama")


def test_real_files_have_the_tokens_of_llama_cpp() -> None:
    if find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    if FOLDER not in os.environ:
        pytest.skip(f"{FOLDER} does not name a folder of GGUF files, such as llama.cpp's models/")
    files = sorted(Path(os.environ[FOLDER]).glob("*.gguf"))
    compared = [file for file in files if GgufFile.open(file).metadata.get("tokenizer.ggml.model") in KINDS]
    assert compared
    for file in compared:
        result = compare(file, 200)
        different = result.different if result.approximated is None else result.approximated
        assert different == 0, (file, result.example)
