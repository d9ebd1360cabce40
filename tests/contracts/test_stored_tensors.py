"""A model's tensors, written for any family, are those of a checkpoint that transformers wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speculant.lab.checkpoints import save_tensors, stored_tensors
from speculant.models import (
    CheckpointFiles,
    Columns,
    Mapped,
    Plus,
    Rows,
    Stacked,
    TensorMap,
    Transposed,
    Unpaired,
    open_file,
)
from tests.unit.models.families import FEW, make_pair, thinned_cases


@pytest.mark.parametrize("case", thinned_cases(families=FEW))
def test_written_files_are_those_that_were_read(case: tuple[str, str], tmp_path: Path) -> None:
    """Elements that no tensor of the model reads are zero."""
    folder = make_pair(tmp_path, *case).folder
    files = CheckpointFiles.open(folder)
    weights = files.weights
    tensors = {name: weights.read(name) for name in weights.names()}
    made, stored = stored_tensors(tensors, files.decoder.tensors), load_file(folder / "model.safetensors")
    assert made.keys() == stored.keys() - ({"lm_head.weight", "embed_out.weight"} if files.decoder.head.tied else set())
    for name, tensor in made.items():
        assert tensor.shape == stored[name].shape
        unread = (tensor != stored[name]) & (tensor == 0)
        assert torch.equal(tensor + unread * stored[name], stored[name]), name
        assert unread.float().mean() < 0.05


def test_all_operations_have_an_inverse(tmp_path: Path) -> None:
    """Of each kind, and of nested ones."""
    names = TensorMap((
        ("a", Rows(Transposed("both"), 0, 4, 10)),
        ("b", Transposed(Rows(Transposed("both"), 4, 6, 10))),
        ("c", Plus(Unpaired("pairs", 2), -1.0)),
        ("d", Unpaired(Rows("rows", 1, 2, 3), 2)),
        ("e.0.a", Rows(Transposed(Stacked("stack", 2, 0)), 1, 1, 2)),
        ("e.1.a", Rows(Transposed(Stacked("stack", 2, 1)), 0, 1, 2)),
        ("f", Columns(Rows("wide", 0, 4, 8), 0, 2, 5)),
        ("g", Columns(Rows("wide", 4, 4, 8), 0, 5, 5)),
        ("h", Columns(Rows("wide", 0, 4, 8), 2, 3, 5)),
    ))  # fmt: skip
    shapes = {
        "a": (8, 3), "b": (3, 12), "c": (8, 5), "d": (8,), "e": (2,), "e.0.a": (4, 3), "e.1.a": (4, 3), "f": (4, 2),
        "g": (4, 5), "h": (4, 3),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    file = tmp_path / "model.safetensors"
    save_tensors(tensors, names, file)
    found = Mapped(open_file(file), shapes, names)
    assert {*open_file(file).names()} == {"both", "pairs", "rows", "wide", "e", "stack"}
    for name, tensor in tensors.items():
        torch.testing.assert_close(found.read(name), tensor)
