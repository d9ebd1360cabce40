"""`speculant inflate`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from speculant import LLM, SamplingParams
from speculant.cli import app
from speculant.errors import ConfigError


def inflate(*arguments: str) -> dict[str, Any]:
    """Return the JSON that the command prints."""
    result = CliRunner().invoke(app, ["inflate", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_inflate_writes_a_model_of_other_sizes(tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    said = inflate("demo", str(folder), "--role", "draft", "--hidden-size", "256", "--layers", "3")
    assert (said["hidden_size"], said["num_hidden_layers"], said["intermediate_size"]) == (256, 3, 240)
    assert said["bytes"] == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    params = SamplingParams(temperature=0, max_tokens=8)
    [output] = LLM(str(folder), use_speculative_decoding=False).generate(["import os\n"], params)
    assert len(output.outputs[0].token_ids) == 8


def test_inflate_writes_a_head(tmp_path: Path) -> None:
    said = inflate("demo", str(tmp_path / "wide"), "--role", "medusa", "--hidden-size", "512")
    assert said["hidden_size"] == 512
    assert "num_hidden_layers" not in said
    again = inflate(str(tmp_path / "wide"), str(tmp_path / "wider"), "--shape", "50m", "--hidden-size", "1024")
    assert again["hidden_size"] == 1024
    assert again["bytes"] > 3.9 * said["bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no shape was named"),
        (("--shape", "2b"), "the shape '2b' is unknown"),
        (("--layers", "1"), "num_hidden_layers 1 is below"),
        (("--shape", "50m", "--role", "both"), "the role 'both' is unknown"),
        (("--shape", "50m", "--role", "medusa", "--layers", "2"), "a head keeps its number of layers"),
    ],
)
def test_inflate_explains_mistakes(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["inflate", "demo", str(tmp_path / "x"), *arguments], catch_exceptions=False)
    assert not (tmp_path / "x").exists()
