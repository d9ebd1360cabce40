"""The page on adding a model is true: its code block is a family that loads and runs."""

from __future__ import annotations

import json
import re
from dataclasses import fields as fields_of
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from speculant import models, plugins
from speculant.models.config import DecoderConfig
from speculant.models.reference.decoder import Decoder
from speculant.models.weights.load import load_model
from tests.unit.models.families import SMALL, Session, random_tokens, spread_weights

PAGE = Path(__file__).parents[3] / "docs" / "adding-a-model.md"


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put the page's code where the package looks for families."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    return plugins.load("speculant.models", "example")


def test_the_page_s_family_is_found_loaded_and_run(family: ModuleType, tmp_path: Path) -> None:
    hf = {**SMALL, "model_type": "example", "sliding_window": 4}
    config = family.read_config(hf)
    assert config.windows == (None, 4, None)
    original = Decoder(config).eval()
    spread_weights(original)
    save_file(original.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hf))
    tokens = random_tokens(12)
    loaded = Session(load_model(str(tmp_path)).model)
    assert torch.equal(loaded.extend(tokens), Session(original).extend(tokens))


def test_the_page_s_table_names_real_fields() -> None:
    fields = re.findall(r"^\| `(\w+)`", PAGE.read_text(), flags=re.MULTILINE)
    assert fields
    assert set(fields) <= set({field.name for field in fields_of(DecoderConfig)})
