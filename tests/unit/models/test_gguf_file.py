"""Headers of GGUF files: read as the gguf package writes them, and refused if they are malformed."""

from __future__ import annotations

import os
import shutil
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from speculant import gguf_file
from speculant.errors import ModelError
from speculant.files import TICK
from speculant.gguf_file import MAGIC, MOST_NESTED, GgufFile, is_gguf, model_name, name_of, parts_of

METADATA: dict[str, Any] = {
    "a.text": "Grüße 👋",
    "a.truth": True,
    "a.texts": ["", "a", "é", "\U0001f600"],
    "a.numbers": [1.5, -2.0],
    "a.truths": [True, False],
    "a.nested": [[1, 2], [3]],
}
NUMBERS = {
    "uint8": 255,
    "int8": -128,
    "uint16": 65535,
    "int16": -32768,
    "uint32": 2**32 - 1,
    "int32": -(2**31),
    "uint64": 2**64 - 1,
    "int64": -(2**63),
    "float32": 0.25,
    "float64": 0.1,
}
Write = Callable[..., Path]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "model.gguf")


def written(path: Path, split: int = 0, alignment: int | None = None) -> Path:
    writer = GGUFWriter(path, "llama", split_max_tensors=split)
    for key, value in METADATA.items():
        writer.add_key_value(key, value, GGUFValueType.get_type(value))
    for name, value in NUMBERS.items():
        writer.add_key_value(f"n.{name}", value, GGUFValueType[name.upper()])
    if alignment:
        writer.add_custom_alignment(alignment)
    generator = np.random.default_rng(0)
    for index in range(5):
        writer.add_tensor(f"{index}.f32", generator.random((3, 5), dtype=np.float32))
    blocks = generator.integers(0, 256, (4, 2 * 18), dtype=np.uint8)
    writer.add_tensor("blocks", blocks, raw_dtype=GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        GgufFile.open(path)
    return str(caught.value)


def header(*entries: bytes, version: int = 3, tensors: int = 0, count: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, len(entries) if count is None else count) + b"".join(entries)


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def entry(key: str, type_: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", type_) + value


def tensor(name: str, shape: tuple[int, ...], type_: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_, offset)


def test_metadata_is_read_as_it_was_written(path: Path) -> None:
    metadata = GgufFile.open(path).metadata
    assert {key: metadata[key] for key in METADATA} == METADATA
    assert {name: metadata[f"n.{name}"] for name in NUMBERS} == NUMBERS
    assert metadata["a.truth"] is True


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_tensors_are_where_the_gguf_package_finds_them(tmp_path: Path, alignment: int | None) -> None:
    path = written(tmp_path / "model.gguf", alignment=alignment)
    found = GgufFile.open(path).tensors
    expected = GGUFReader(path).tensors
    assert list(found) == [each.name for each in expected]
    for each in expected:
        own = found[each.name]
        assert (own.kind, own.offset, own.size) == (each.tensor_type.name, each.data_offset, each.n_bytes)
        assert list(own.shape) == [*map(int, each.shape)][::-1]
        assert own.file == path


@pytest.mark.parametrize("part", [1, 2, 3])
def test_any_part_of_a_split_file_opens_all(tmp_path: Path, part: int) -> None:
    whole = GgufFile.open(written(tmp_path / "whole.gguf"))
    written(tmp_path / "model.gguf", split=2)
    found = GgufFile.open(tmp_path / f"model-0000{part}-of-00003.gguf")
    assert found.path.name == "model-00001-of-00003.gguf"
    assert found.metadata.items() >= whole.metadata.items()
    assert {name: each.shape for name, each in found.tensors.items()} == {
        name: each.shape for name, each in whole.tensors.items()
    }
    assert len({each.file for each in found.tensors.values()}) == 3


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    written(tmp_path / "model.gguf", split=2)
    (tmp_path / "model-00002-of-00003.gguf").unlink()
    assert "lacks model-00002-of-00003.gguf, of the 3 parts" in refusal(tmp_path / "model-00003-of-00003.gguf")


def test_a_renamed_part_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "model.gguf", split=2)
    (tmp_path / "model-00002-of-00003.gguf").rename(tmp_path / "second.gguf")
    assert "part 2 of 3 of a split model by its metadata, but its name" in refusal(tmp_path / "second.gguf")


def test_a_part_of_another_place_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "model.gguf", split=2)
    shutil.copy(tmp_path / "model-00002-of-00003.gguf", tmp_path / "model-00003-of-00003.gguf")
    assert "is part 2 of 3 of a split model by its metadata" in refusal(tmp_path / "model-00001-of-00003.gguf")


def test_a_file_is_read_again_after_a_change(path: Path) -> None:
    os.utime(path)
    time.sleep(2 * TICK)
    first = GgufFile.open(path)
    assert GgufFile.open(path) is first
    path.write_bytes(header(entry("k", 4, struct.pack("<I", 7))))
    assert dict(GgufFile.open(path).metadata) == {"k": 7}


def test_gguf_is_recognised_by_name_or_magic_bytes(tmp_path: Path, path: Path) -> None:
    nameless = tmp_path / "nameless"
    shutil.copy(path, nameless)
    (tmp_path / "empty.GGUF").touch()
    (tmp_path / "other").write_bytes(b"GGU")
    assert [is_gguf(each) for each in (path, nameless, tmp_path / "empty.GGUF")] == [True] * 3
    assert [is_gguf(each) for each in (tmp_path, tmp_path / "other", tmp_path / "none.gguf")] == [False] * 3


def test_names_that_only_resemble_parts_are_whole_files(tmp_path: Path) -> None:
    for name in ("a-00001-of-00001.gguf", "a-1-of-2.gguf", "-00001-of-00002.gguf", "a.gguf"):
        assert parts_of(tmp_path / name) == (tmp_path / name,)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"PK\3\4", "begins with"),
        (b"GGUF\3\0", "needs 8 bytes and the file has 6"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(version=1), "its version is 1, and 2 and 3"),
        (header(version=4), "its version is 4"),
        (header(count=2**63), "metadata entries, more than it can hold"),
        (header(tensors=2**63), "tensors, more than it can hold"),
        (header(entry("k", 4, b"\0" * 4), entry("k", 4, b"\0" * 4)), "the metadata key k twice"),
        (header(entry("k", 13, b"")), "k is of the unknown type 13"),
        (header(entry("k", 8, struct.pack("<Q", 2**40))), "k has 1099511627776 bytes, more than"),
        (header(entry("k", 8, text(b"\xff"))), "k is not valid UTF-8"),
        (header(text(b"\xff") + bytes(8)), "a metadata key is not valid UTF-8"),
        (header(entry("k", 9, struct.pack("<IQ", 8, 2**61))), "elements in k, more than it can hold"),
        (header(entry("k", 9, struct.pack("<IQ", 0, 2**61))), "elements in k, more than it can hold"),
        (
            header(entry("k", 9, struct.pack("<IQ", 8, 2) + text("a") + text(b"\xff"))),
            "element 1 of k is not valid UTF-8",
        ),
        (header(entry("k", 9, struct.pack("<IQ", 8, 2) + text("a"))), "element 1 of k is beyond the end"),
        (header(entry("k", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 99))), "ends within k"),
        (header(entry("k", 9, struct.pack("<IQ", 9, 1) * 9)), f"k has arrays nested over {MOST_NESTED} deep"),
        (header(entry("k", 9, struct.pack("<IQ", 9, 2**17) + bytes(2**18))), "131072 elements in k, more than"),
        (header(entry("general.alignment", 4, struct.pack("<I", 24))), "general.alignment is 24"),
        (header(entry("general.alignment", 4, bytes(4))), "general.alignment is 0"),
        (header(entry("general.alignment", 8, text("x"))), "general.alignment is x"),
        (header(tensor("t", (), 0) + bytes(99), tensors=1, count=0), "t has 0 dimensions"),
        (header(tensor("t", (1, 1, 1, 1, 1)) + bytes(99), tensors=1, count=0), "t has 5 dimensions"),
        (header(tensor("t", (0, 3)) + bytes(99), tensors=1, count=0), "t has the shape [3, 0]"),
        (header(tensor("t", (2**60, 2**60)) + bytes(99), tensors=1, count=0), "t has the shape"),
        (header(tensor("t", (8,), 4) + bytes(99), tensors=1, count=0), "t is of the type 4, which is unknown"),
        (header(tensor("t", (8,), 2) + bytes(99), tensors=1, count=0), "Q4_0 has blocks of 32"),
        (header(tensor("t", (8,), 0, 8) + bytes(99), tensors=1, count=0), "t is at 8, which is not a multiple of 32"),
        (header(tensor("t", (99,)) + bytes(99), tensors=1, count=0), "t ends at byte"),
        (header(tensor("t", (9,)) * 2 + bytes(99), tensors=2, count=0), "the tensor t twice"),
        (header(tensor("t", (9,)) + tensor("u", (9,), 0, 32) + bytes(99), tensors=2, count=0), "t and u overlap"),
    ],
)
def test_a_malformed_header_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    message = refusal(path)
    assert reason in message
    assert str(path) in message


def test_texts_with_zeros_are_read(tmp_path: Path) -> None:
    path, texts = tmp_path / "model.gguf", ["", "a\0b", "\u00e4", "\0"]
    path.write_bytes(header(entry("k", 9, struct.pack("<IQ", 8, len(texts)) + b"".join(map(text, texts)))) + bytes(99))
    assert GgufFile.open(path).metadata["k"] == texts


def test_equal_texts_of_two_files_are_decoded_once(tmp_path: Path) -> None:
    paths, array = (tmp_path / "a.gguf", tmp_path / "b.gguf"), struct.pack("<IQ", 8, 2) + text("one") + text("two")
    for path in paths:
        path.write_bytes(header(entry("name", 8, text(path.name)), entry("k", 9, array)) + bytes(99))
    one, other = (GgufFile.open(path).metadata["k"] for path in paths)
    assert one is other
    assert one == ["one", "two"]


def test_a_header_is_read_once_by_several_threads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start reads the tokenizer and the model of a file at the same time."""
    time.sleep(2 * TICK)
    reads, read = list[Path](), gguf_file._read

    def slowly(part: Path) -> Any:
        reads.append(part)
        time.sleep(0.05)
        return read(part)

    monkeypatch.setattr(gguf_file, "_read", slowly)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(GgufFile.open, [path, path])
    assert one is other
    assert reads == [path]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "there is no file" in refusal(tmp_path / "model.gguf")


def test_every_truncation_within_the_header_is_refused(tmp_path: Path, path: Path) -> None:
    content, cut = path.read_bytes(), tmp_path / "cut.gguf"
    end = min(each.offset for each in GgufFile.open(path).tensors.values())
    for size in range(0, end, 3):
        cut.write_bytes(content[:size])
        assert str(cut) in refusal(cut)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("a.Q4_0.gguf", "a.Q4_0"),
        ("a-00001-of-00003.gguf", "a"),
        ("a-1-of-3.gguf", "a-1-of-3"),
        ("nameless", "nameless"),
    ],
)
def test_a_model_is_named_by_its_file_without_part_and_suffix(file: str, name: str) -> None:
    assert model_name(Path("folder", file)) == name


def test_a_model_is_named_without_its_path(tmp_path: Path) -> None:
    file = tmp_path / "a.Q4_0-00001-of-00003.gguf"
    file.write_bytes(MAGIC)
    assert name_of(str(file)) == "a.Q4_0"
    assert name_of(str(tmp_path / "." / "..")) == tmp_path.parent.name
    assert name_of("org/name:Q4_0") == "org/name:Q4_0"
