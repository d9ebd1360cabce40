"""Checkpoints that hold the tensors of a language model under longer or shorter names, or beside other tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculant.errors import ModelError
from speculant.models import (
    Columns,
    Mapped,
    Plus,
    Rows,
    TensorMap,
    Transposed,
    Unpaired,
    WeightSource,
    kind_of,
    load_model,
    map_modules,
    read_plain,
    stored_shape,
)
from tests.unit.models.families import Session, make_pair, random_tokens

pytestmark = pytest.mark.usefixtures("families_are_looked_up_once")
Rename = Callable[[str], str]
VISION = "vision_tower.blocks.7.weight"
LARGER: dict[str, Rename] = {
    "older": lambda name: f"language_model.{name}",
    "newer": lambda name: name.replace("model.", "model.language_model.", 1),
}


def logits(folder: Path) -> Tensor:
    """Return the logits of a prompt."""
    return Session(load_model(str(folder)).model).extend(random_tokens(9))


def rewrite(source: Path, folder: Path, rename: Rename, config: dict[str, Any], **more: Tensor) -> None:
    """Write the tensors of a checkpoint under other names, with another config.json."""
    folder.mkdir()
    tensors = {rename(name): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors | more, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", LARGER)
@pytest.mark.parametrize(
    ("family", "variant"), [("gemma3_text", "plain"), ("gemma3_text", "capped"), ("qwen3_5_moe_text", "plain")]
)
def test_a_language_model_within_a_larger_one(tmp_path: Path, form: str, family: str, variant: str) -> None:
    make_pair(tmp_path / "plain", family, variant)
    inner = json.loads((tmp_path / "plain" / "config.json").read_text())
    outer = {"model_type": "gemma3", "vision_config": {"num_hidden_layers": 9}, "text_config": inner}
    rewrite(tmp_path / "plain", tmp_path / "larger", LARGER[form], outer, **{VISION: torch.zeros(3)})
    assert torch.equal(logits(tmp_path / "larger"), logits(tmp_path / "plain"))


def test_experts_that_are_stacked_or_apart(tmp_path: Path) -> None:
    """Files that Qwen published have one tensor for all experts' gates and ups; transformers writes them apart."""
    make_pair(tmp_path / "apart", "qwen3_5_moe_text", "plain")
    tensors, parts = load_file(tmp_path / "apart" / "model.safetensors"), dict[str, list[Tensor]]()
    for name in [name for name in tensors if ".experts." in name]:
        layer, number, part, _ = name.removeprefix("model.layers.").replace("mlp.experts.", "").split(".")
        parts.setdefault(f"model.layers.{layer}.mlp.experts.{part}", []).insert(int(number), tensors.pop(name))
    stacks = {name: torch.stack(own) for name, own in parts.items()}
    for name in [name for name in stacks if name.endswith("gate_proj")]:
        both = stacks.pop(name), stacks.pop(name.replace("gate_proj", "up_proj"))
        stacks[name.replace("gate_proj", "gate_up_proj")] = torch.cat(both, dim=1)
    (tmp_path / "stacked").mkdir()
    shutil.copy(tmp_path / "apart" / "config.json", tmp_path / "stacked")
    save_file({**tensors, **stacks}, tmp_path / "stacked" / "model.safetensors")
    assert torch.equal(logits(tmp_path / "stacked"), logits(tmp_path / "apart"))


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "opt", "llama"])
def test_a_model_without_its_first_name(tmp_path: Path, family: str) -> None:
    make_pair(
        tmp_path / "plain", family, {"gpt2": "untied", "gpt_neox": "pythia", "opt": "untied"}.get(family, "llama2")
    )
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    masks = {"h.0.attn.bias": torch.ones(1, 1, 4, 4)} if family == "gpt2" else {}
    heads = ("lm_head.", "embed_out.")
    rewrite(
        tmp_path / "plain", tmp_path / "base",
        lambda name: name if name.startswith(heads) else name.partition(".")[2], config, **masks,
    )  # fmt: skip
    assert torch.equal(logits(tmp_path / "base"), logits(tmp_path / "plain"))


def test_an_unknown_tensor_is_still_refused(tmp_path: Path) -> None:
    make_pair(tmp_path / "plain", "llama", "llama2")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    rewrite(tmp_path / "plain", tmp_path / "more", lambda name: name, config, other=torch.zeros(3))
    with pytest.raises(ModelError, match="other"):
        load_model(str(tmp_path / "more"))


# --- expressions


class Stored(WeightSource):
    """A source of one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def names(self) -> list[str]:
        return ["stored"]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    def kind(self, name: str) -> str:
        return kind_of(self._tensor)

    def read(self, name: str) -> Tensor:
        assert name == "stored"
        return self._tensor


TWELVE = torch.arange(24.0).view(12, 2)
MADE = {
    "taken": ("stored", TWELVE),
    "rows": (Rows("stored", 3, 4, 12), TWELVE[3:7]),
    "rows of each period": (Rows("stored", 1, 2, 6), TWELVE[[1, 2, 7, 8]]),
    "transposed": (Transposed("stored"), TWELVE.T),
    "rows of columns": (Rows(Transposed("stored"), 1, 1, 2), TWELVE.T[1:]),
    "columns": (Columns("stored", 1, 1, 2), TWELVE[:, 1:]),
    "columns of rows": (Rows(Columns("stored", 0, 1, 2), 3, 2, 6), TWELVE[[3, 4, 9, 10], :1]),
    "sum": (Plus("stored", -1.0), TWELVE - 1),
    "unpaired": (Unpaired("stored", 2), TWELVE[[0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]]),
}


@pytest.mark.parametrize("name", MADE)
def test_a_tensor_is_made_of_a_stored_one(name: str) -> None:
    made, expected = MADE[name]
    shape = tuple(expected.shape)
    assert stored_shape(made, shape) == (12, 2)
    found = read_plain(Mapped(Stored(TWELVE), {"own": shape}, TensorMap((("own", made),))), "own")
    assert torch.equal(found, expected)


def test_modules_are_mapped_with_their_biases() -> None:
    names = map_modules("layers.{}.", "h.{}.", {"up": Rows("fc", 0, 2, 4)}, {"norm": "ln"})
    assert names.expression("layers.12.up.bias") == Rows("h.12.fc.bias", 0, 2, 4)
    assert names.expression("layers.12.up.weight") == Rows("h.12.fc.weight", 0, 2, 4)
    assert names.stored("norm.bias") == "ln.bias"
    assert names.stored("layers.12.down.weight") == "layers.12.down.weight"
