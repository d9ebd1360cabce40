"""A quantised checkpoint with any damage gives a model that runs, or a ModelError, within a second."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import sizes
from tests.models import Shape, write_checkpoint
from tests.quantised_folders import FORMATS, Gptq, awq_config, awq_module, edit_config, quantise
from tests.unit.models.loaded import runs_or_is_refused

pytestmark = pytest.mark.usefixtures("families_are_looked_up_once")
KINDS = ["U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64", "BOOL", "F8_E4M3", "X"]
NUMBERS = [-1, 0, 1, 2, 3, 4, 7, 8, 9, 16, 31, 32, 33, 64, 127, 128, 256, 2**15, 2**31, 2**32, 2**63, 2**64, 1.5, None]
VALUES = ["gptq", "awq", "int-quantized", "float", "group", "64x64", True, [], {}, [128, 128]]  # of options
ENDS = (".weight", ".g_idx", ".bias", ".qweight", ".SCB", ".weight_scale")
IN_GROUPS = {"gptq": Gptq(), "order": Gptq(act_order=True, sym=True), "awq": Gptq()}
SCALED = (
    "packed 4 bits, zero points", "int8 channels", "int8, zero points", "e4m3 blocks", "mixed", "fp8 small blocks",
    "nf4, nested", "llm.int8",
)  # fmt: skip


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one layer."""
    root = tmp_path_factory.mktemp("quantised")
    source = Path(write_checkpoint(root / "plain", Shape(hidden_size=32, layers=1)))
    (source / "tokenizer.json").unlink()
    for name, own in IN_GROUPS.items():
        write = {"write": awq_module} if name == "awq" else {}
        quantise(source, root / name, root / f"{name}-numbers", own, **write)
    edit_config(root / "awq", quantization_config=awq_config(32))
    for name in SCALED:
        quantise(source, root / name, root / f"{name}-numbers", FORMATS[name])
    return [root / name for name in (*IN_GROUPS, *SCALED)]


def parts_of(folder: Path) -> tuple[dict[str, Any], bytes, dict[str, Any]]:
    """Return the header of the weights, their bytes, and config.json."""
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :], json.loads((folder / "config.json").read_text())


def mutate(header: dict[str, Any], config: dict[str, Any], generator: random.Random) -> None:
    """Change a header or an option in one place; most changed tensors are parts of quantised matrices."""
    names = [name for name in header if name != "__metadata__"]
    parts = [name for name in names if "_proj" in name]
    name = generator.choice(parts if generator.random() < 0.9 else names)
    entry = header[name]
    match generator.randrange(10):
        case 0:
            entry["dtype"] = generator.choice(KINDS)
        case 1 | 2 | 3:
            if entry["shape"]:
                entry["shape"][generator.randrange(len(entry["shape"]))] = generator.choice(NUMBERS)
        case 4:
            entry["shape"] = generator.choice([[], entry["shape"][::-1], [*entry["shape"], 1], entry["shape"][:1]])
        case 5:
            entry["data_offsets"] = [generator.choice([*entry["data_offsets"], *NUMBERS]) for _ in range(2)]
        case 6:
            header[generator.choice(names)] = entry
        case 7:
            del header[name]
        case 8:
            header[name.rpartition(".")[0] + generator.choice(ENDS)] = entry
        case 9:
            change_option(config["quantization_config"], generator)


def change_option(options: dict[str, Any], generator: random.Random) -> None:
    """Change an option, at times one inside others."""
    key = generator.choice(list(options))
    if isinstance(options[key], dict) and options[key] and generator.random() < 0.9:
        change_option(options[key], generator)
    else:
        options[key] = generator.choice([*NUMBERS, *VALUES])


def changed_bytes(content: bytes, generator: random.Random) -> bytes:
    """Return the bytes of all tensors, at times with a random part, such as groups out of range."""
    if generator.random() < 0.7:
        return content
    place = generator.randrange(len(content))
    return content[:place] + generator.randbytes(64) + content[place + 64 :] if place + 64 < len(content) else content


def check(folder: Path, header: dict[str, Any], content: bytes, config: dict[str, Any]) -> bool:
    """Write a checkpoint, and load and run its model. Returns whether there is one."""
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)
    (folder / "config.json").write_text(json.dumps(config))
    return runs_or_is_refused(folder)


@pytest.mark.parametrize("count", sizes(150, 4000))
def test_damage_gives_a_model_or_an_error(count: int, quantised: list[Path], tmp_path: Path) -> None:
    generator, models = random.Random(count), 0
    for case in range(count):
        header, content, config = parts_of(quantised[case % len(quantised)])
        for _ in range(generator.choice((1, 1, 2))):
            mutate(header, config, generator)
        try:
            with torch.inference_mode():
                models += check(tmp_path, header, changed_bytes(content, generator), config)
        except Exception as error:
            raise AssertionError(f"case {case} of {count}: {error!r}") from error
    assert count / 50 < models < count / 2
