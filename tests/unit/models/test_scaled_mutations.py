"""compressed-tensors, FP8 and bitsandbytes with any damage give a model that runs, or a ModelError, within a second."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import Shape, write_checkpoint
from tests.scaled_folders import FORMATS, quantise
from tests.unit.models.test_module_mutations import (
    KINDS,
    NUMBERS,
    _families_are_looked_up_once,
    changed_bytes,
    check,
    parts_of,
)

__all__ = ["_families_are_looked_up_once"]
NAMES = (
    "packed 4 bits, zero points", "int8 channels", "int8, zero points", "e4m3 blocks", "mixed", "fp8 small blocks",
    "nf4, nested", "llm.int8",
)  # fmt: skip


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one layer."""
    root = tmp_path_factory.mktemp("scaled")
    source = Path(write_checkpoint(root / "plain", Shape(hidden_size=32, layers=1)))
    (source / "tokenizer.json").unlink()
    for name in NAMES:
        quantise(source, root / name, root / f"{name}-numbers", FORMATS[name])
    return [root / name for name in NAMES]


def mutate(header: dict[str, Any], config: dict[str, Any], generator: random.Random) -> None:
    """Change a header or an option in one place."""
    names = [name for name in header if name != "__metadata__"]
    parts = [name for name in names if "_proj" in name]
    name = generator.choice(parts if generator.random() < 0.9 else names)
    entry = header[name]
    match generator.randrange(9):
        case 0 | 1:
            entry["dtype"] = generator.choice(KINDS)
        case 2 | 3:
            if entry["shape"]:
                entry["shape"][generator.randrange(len(entry["shape"]))] = generator.choice(NUMBERS)
        case 4:
            entry["shape"] = generator.choice([[], entry["shape"][::-1], [*entry["shape"], 1], entry["shape"][:1]])
        case 5:
            header[generator.choice(names)] = entry
        case 6:
            del header[name]
        case 7:
            header[name.rpartition(".")[0] + generator.choice((".weight", ".SCB", ".weight_scale", ".bias"))] = entry
        case 8:
            change_option(config["quantization_config"], generator)


def change_option(options: dict[str, Any], generator: random.Random) -> None:
    """Change an option, at times one inside others."""
    key = generator.choice(list(options))
    if isinstance(options[key], dict) and options[key] and generator.random() < 0.9:
        change_option(options[key], generator)
    else:
        options[key] = generator.choice(
            [*NUMBERS, "int-quantized", "float", "group", True, [], {}, [128, 128], "64x64"]
        )


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_parts_give_a_model_or_an_error(count: int, scaled: list[Path], tmp_path: Path) -> None:
    generator, models = random.Random(count), 0
    for case in range(count):
        header, content, config = parts_of(scaled[case % len(scaled)])
        for _ in range(generator.choice((1, 1, 2))):
            mutate(header, config, generator)
        try:
            with torch.inference_mode():
                models += check(tmp_path, header, changed_bytes(content, generator), config)
        except Exception as error:
            raise AssertionError(f"case {case} of {count}: {error!r}") from error
    assert count / 50 < models < count / 2
