"""Which models and settings count as the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from speculant.config import EngineConfig
from speculant.scale import Origin
from speculant.serving import ServerOptions
from tests.models import Checkpoints, checkpoints

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
