"""The page on adding a model works as written: its code is a family that the contract tests hold for."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields as fields_of, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from speculant import models, plugins
from speculant.kernels import usable_sets
from speculant.models import description
from tests.contracts import test_model_families as contracts
from tests.unit.models import families
from tests.unit.models.families import Pair, Session, cases, make_pair, random_tokens

PAGE = (Path(__file__).parents[3] / "docs" / "adding-a-model.md").read_text()
FAMILY, ENTRY = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Follow the page: put its family where the package looks for it, and add the variants to those of the tests."""
    (tmp_path / "example.py").write_text(FAMILY)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    variants: dict[str, Any] = {**families.VARIANTS}
    exec(ENTRY, {"VARIANTS": variants})
    monkeypatch.setattr(families, "VARIANTS", variants)
    return make_pair(tmp_path, "example", "windows")


def test_the_page_s_family_is_found_and_described(pair: Pair) -> None:
    assert {("example", "windows"), ("example", "full")} <= set(cases())
    config = plugins.load("speculant.models", "example").read_config({**families.SMALL, "sliding_window": 6})
    assert [layer.attention.window for layer in config.layers] == [None, 6, None]


def test_the_page_s_family_is_read_by_its_tensor_map(pair: Pair) -> None:
    with safe_open(pair.folder / "model.safetensors", framework="pt") as opened:
        names = set(opened.keys())
        stored = opened.get_tensor("model.layers.1.attention.output.weight")
    assert "model.final_norm.weight" in names
    assert "model.norm.weight" not in names
    read = dict(pair.ours.named_parameters())  # type: ignore[attr-defined]
    assert torch.equal(read["model.layers.1.self_attn.o_proj.weight"], stored)


def test_the_contracts_hold_for_the_page_s_family(pair: Pair) -> None:
    """Those that need no model of transformers; those that do say why they are skipped."""
    for steady in (pair.in_float64(), *([pair.on_native()] if usable_sets() else [])):
        contracts.test_each_tree_path_equals_that_path_alone(steady, 4)
        contracts.test_after_keep_path_the_next_step_equals_a_fresh_prompt(steady, 5)
    with pytest.raises(pytest.skip.Exception, match="transformers has no model of this type"):
        contracts.test_whole_prompt(pair)


@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
def test_both_backends_agree_on_the_page_s_family(pair: Pair) -> None:
    tokens = random_tokens(24)
    ours, native = Session(pair.ours).extend(tokens), Session(pair.on_native().ours).extend(tokens)
    torch.testing.assert_close(native, ours, atol=1e-4, rtol=0)


def _row(part: type) -> str:
    """Return a part's row: the fields that have no default, then the others."""
    own = [(each.name, each.default is MISSING and each.default_factory is MISSING) for each in fields_of(part)]
    cells = [", ".join(f"`{name}`" for name, required in own if required is wanted) for wanted in (True, False)]
    return f"| `{part.__name__}` | {cells[0]} | {cells[1]} |".replace("|  |", "| |")


def test_the_page_s_table_has_every_part_and_field() -> None:
    """A part is a dataclass of the description that is neither a tensor map nor an operation on tensors."""
    parts = {
        each.__name__: each
        for each in vars(description).values()
        if isinstance(each, type)
        and is_dataclass(each)
        and each.__module__ == description.__name__
        and not issubclass(each, description.Operation | description.TensorMap)
    }
    rows = re.findall(r"^(\| `(\w+)` \|.*)$", PAGE, flags=re.MULTILINE)
    assert {name for _, name in rows} == parts.keys()
    assert [row for row, _ in rows] == [_row(parts[name]) for _, name in rows]
