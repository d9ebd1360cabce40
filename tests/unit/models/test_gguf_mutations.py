"""A GGUF file with any damage gives a model that runs, or a ModelError, within a second."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from speculant.errors import ModelError
from speculant.gguf_file import GgufFile
from speculant.text import Tokenizer
from tests.examples import examples
from tests.gguf_models import convert
from tests.models import Shape, write_checkpoint
from tests.unit.models.families import (
    CONV,
    DELTA,
    FAVOURED,
    FULL,
    LINEAR,
    MULTIPLIED,
    PADDED,
    SHARED,
    SHORT,
    VARIANTS,
    make_pair,
)
from tests.unit.models.loaded import runs_or_is_refused

pytestmark = pytest.mark.usefixtures("families_are_looked_up_once")
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.0, 3.0]}
# Families with metadata or tensors of their own
OTHERS = {
    "gemma2": {"head_dim": 4, "query_pre_attn_scalar": 4, "num_hidden_layers": 2},
    "phi3": {**PADDED, "hidden_size": 16, "original_max_position_embeddings": 16, "rope_parameters": LONGROPE},
    "granite": {**PADDED, **MULTIPLIED, "num_hidden_layers": 1},
    "ministral3": {"head_dim": 4, "num_hidden_layers": 1},
    "gpt_neox": {"num_hidden_layers": 1},
    "qwen3_5_text": {**DELTA, "num_hidden_layers": 2, "full_attention_interval": 2},
    "qwen3_5_moe_text": {**DELTA, **SHARED, "num_hidden_layers": 2, "full_attention_interval": 2},
    "qwen3_next": {**DELTA, **SHARED, "num_hidden_layers": 2, "full_attention_interval": 2},
    "lfm2": {**SHORT, "num_hidden_layers": 2, "layer_types": [CONV, FULL]},
    "granitemoehybrid": {
        **VARIANTS["granitemoehybrid"]["experts"],
        "num_hidden_layers": 2,
        "layer_types": [LINEAR, FULL],
    },
    "lfm2_moe": {**FAVOURED, "num_hidden_layers": 2, "layer_types": [CONV, FULL]},
}
EXTREMES = (0, 1, 2, 3, 7, 8, 9, 12, 13, 31, 32, 33, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40,
            2**62, 2**63 - 1, 2**63, 2**64 - 1)  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bytes, int]]:
    """Files of several families and kinds, with the sizes of their headers; one has a tokenizer."""
    root, made = tmp_path_factory.mktemp("originals"), []
    for family, kind in (("llama", "Q4_0"), ("qwen2", "Q8_0"), ("qwen3", "F16"), ("llama", "MXFP4")):
        source = Path(write_checkpoint(root / f"{family}-{kind}", Shape(family=family, layers=1)))
        if kind != "Q8_0":
            (source / "tokenizer.json").unlink()
        made.append(content_of(convert(source, root / f"{family}-{kind}.gguf", kind)))
    for family, settings in OTHERS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(VARIANTS, family, {"own": settings})
            pair = make_pair(root / family, family, "own")
        made.append(content_of(convert(pair.folder, root / f"{family}.gguf")))
    return made


def content_of(path: Path) -> tuple[bytes, int]:
    """Return the bytes of a file, and how many of them are its header."""
    return path.read_bytes(), min(each.offset for each in GgufFile.open(path).tensors.values())


def mutated(content: bytes, header: int, generator: random.Random) -> bytes:
    """Return a file with one to three changes, most of them in its header."""
    found = bytearray(content)
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        place = generator.randrange(header if generator.random() < 0.9 else len(found))
        size = generator.choice((1, 4, 8))
        match generator.randrange(8):
            case 0:
                found[place] ^= 1 << generator.randrange(8)
            case 1:
                found[place] = generator.randrange(256)
            case 2 | 3 | 4:
                value = generator.choice(EXTREMES) + generator.choice((0, 0, 0, -1, 1))
                found[place : place + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
            case 5:
                del found[place : place + generator.choice((1, 4, 8, 100))]
            case 6:
                found[place:place] = generator.randbytes(size)
            case 7:
                other = generator.randrange(header)
                found[place : place + size] = found[other : other + size]
        if len(found) < header:
            break
    if generator.random() < 0.15:
        del found[generator.randrange(len(found)) :]
    return bytes(found)


def check(content: bytes, path: Path) -> bool:
    """Load a file's tokenizer and model, and run the model if there is one. Returns whether there is."""
    path.write_bytes(content)
    started = time.process_time()
    with suppress(ModelError):
        Tokenizer.load(path)
    return runs_or_is_refused(path, seconds=1.0 - (time.process_time() - started))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The parts of a split file."""
    root = tmp_path_factory.mktemp("parts")
    source = write_checkpoint(root / "source", Shape(layers=1))
    first = convert(Path(source), root / "model.gguf", "Q8_0", parts=3)
    return list(GgufFile.open(first).parts)


def run_parts(parts: list[Path], folder: Path, count: int, seed: int) -> None:
    """Damage one part of a split file at a time."""
    torch.set_num_threads(1)
    contents = [part.read_bytes() for part in parts]
    sizes = [min(512, len(content)) for content in contents]
    found = []
    for index in range(count):
        generator = random.Random(seed * 1_000_003 + index)
        for part, content in zip(parts, contents, strict=True):
            (folder / part.name).write_bytes(content)
        damaged = generator.randrange(len(parts))
        content = mutated(contents[damaged], sizes[damaged], generator)
        found.append(check(content, folder / parts[damaged].name))
    assert 0.02 < sum(found) / count < 0.9, "both outcomes are tested"


def run(originals: list[tuple[bytes, int]], path: Path, count: int, seed: int) -> None:
    torch.set_num_threads(1)
    found = []
    for index in range(count):
        generator = random.Random(seed * 1_000_003 + index)
        content, header = generator.choice(originals)
        found.append(check(mutated(content, header, generator), path))
    assert 0.02 < sum(found) / count < 0.9, "both outcomes are tested"


def test_originals_are_models(originals: list[tuple[bytes, int]], tmp_path: Path) -> None:
    assert all(check(content, tmp_path / "model.gguf") for content, _ in originals)


def test_damaged_files_give_models_or_errors(originals: list[tuple[bytes, int]], tmp_path: Path) -> None:
    run(originals, tmp_path / "model.gguf", examples(300, least=150), seed=0)


def test_a_damaged_part_gives_a_model_or_an_error(parts: list[Path], tmp_path: Path) -> None:
    run_parts(parts, tmp_path, 60, seed=0)


@pytest.mark.slow
def test_many_damaged_parts_give_models_or_errors(parts: list[Path], tmp_path: Path) -> None:
    run_parts(parts, tmp_path, 1000, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_damaged_files_give_models_or_errors(
    originals: list[tuple[bytes, int]], tmp_path: Path, seed: int
) -> None:
    run(originals, tmp_path / "model.gguf", 1000, seed)
