"""The start cache changes no bit, and no damage to its files stops a start."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculant import LLM, SamplingParams, files
from speculant.cli import figures
from speculant.files import TICK, cache_folder
from speculant.kept_files import TEMPORARY, UnusableFileError, replacing
from speculant.kernels import Kernels, Type, Weight, open_kernels, usable_sets
from speculant.models import (
    KEPT,
    MAPPED,
    PACKED,
    Checkpoint,
    QuantizedBlocks,
    SequenceInput,
    StoredWeights,
    WeightCache,
    cache_files,
    load_model,
    map_weights,
    write_weights,
)
from speculant.models.weights import cache as weight_cache
from speculant.tree import DraftTree
from tests.commands import json_of
from tests.contracts.test_input_embeddings import Session
from tests.examples import examples
from tests.gguf_models import convert
from tests.models import Checkpoints, Shape, write_checkpoint
from tests.unit.models.families import Session as SourceSession, write_variant

pytestmark = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
WAYS = [("plain", None), ("12bit", None), ("plain", "int8"), ("plain", "int4")]
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep models of every size, wherever tests run, and say everything in each test."""
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", 0)
    monkeypatch.setattr(weight_cache, "lost_with", lambda folder: "")
    weight_cache.say_once.cache_clear()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that was written a while ago."""
    folder = write_checkpoint(tmp_path_factory.mktemp("source") / "model")
    time.sleep(2 * TICK)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def load(source: str, folder: Path | None, packing: str = "12bit", quantization: str | None = None) -> Checkpoint:
    """Load a model, and wait until its weights are written."""
    found = load_model(
        source, "bfloat16", kernels="native", quantization=quantization, weight_packing=packing, weight_cache=folder
    )
    for thread in threading.enumerate():
        if thread.name == weight_cache.THREAD:
            thread.join()
    return found


def logits(found: Checkpoint) -> Tensor:
    """Return the bits of some logits."""
    rows = Session(found.model).feed(SequenceInput(1, list(range(2, 250, 9)), DraftTree.empty()))
    return rows.view(torch.int32)


@pytest.fixture(scope="module")
def expected(source: str) -> Tensor:
    return logits(load(source, None))


def check(source: str, folder: Path, expected: Tensor, *sources: str) -> None:
    """Load a model several times: weights come from there, and have the same bits."""
    for wanted in sources:
        found = load(source, folder)
        assert found.source == wanted
        assert torch.equal(logits(found), expected)


@pytest.mark.parametrize(("packing", "quantization"), WAYS)
def test_bits_are_the_same_with_the_cache(source: str, folder: Path, packing: str, quantization: str | None) -> None:
    found = [load(source, each, packing, quantization) for each in (None, folder, folder)]
    assert [each.source for each in found] == ["", KEPT, MAPPED]
    assert [each.mapped_bytes > 0 for each in found] == [False, False, True]
    assert torch.equal(logits(found[0]), logits(found[1]))
    assert torch.equal(logits(found[0]), logits(found[2]))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An encoder-decoder checkpoint that was written a while ago."""
    folder = write_variant(tmp_path_factory.mktemp("encoder"), "t5", "flan")
    time.sleep(2 * TICK)
    return str(folder)


@pytest.mark.parametrize(("packing", "quantization"), WAYS)
def test_bits_of_an_encoder_are_the_same_with_the_cache(
    encoder: str, folder: Path, packing: str, quantization: str | None
) -> None:
    found = [load(encoder, each, packing, quantization) for each in (None, folder, folder)]
    assert [each.source for each in found] == ["", KEPT, MAPPED]
    seen = [SourceSession(each.model).extend([*range(50)]).view(torch.int32) for each in found]
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_blocks_have_the_same_bits_with_the_cache(source: str, folder: Path, tmp_path: Path) -> None:
    kinds = {"attn_q": "Q5_0", "attn_v": "F16", "ffn_down": "Q8_0", "token_embd": "Q8_0"}
    file = convert(source, tmp_path / "model.gguf", lambda name: kinds.get(name.split(".")[-2], "Q4_0"))
    time.sleep(2 * TICK)
    found = [load(str(file), each, "plain") for each in (None, folder, folder)]
    assert [each.source for each in found] == ["", KEPT, MAPPED]
    assert 0.9 < found[2].mapped_bytes / file.stat().st_size < 1.2  # small matrices are padded
    assert torch.equal(logits(found[0]), logits(found[1]))
    assert torch.equal(logits(found[0]), logits(found[2]))


def test_each_way_to_pack_has_a_file(source: str, folder: Path) -> None:
    for packing, quantization in WAYS:
        assert load(source, folder, packing, quantization).source == KEPT
    assert len(cache_files(folder)) == len(WAYS)
    assert len([*folder.iterdir()]) == len(WAYS)


def test_small_models_are_not_kept(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", 2**26)
    assert load(source, folder).source == PACKED
    assert not folder.exists()


# --- damage


@pytest.fixture(scope="module")
def content(source: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A cache's file."""
    least, weight_cache.LEAST_BYTES = weight_cache.LEAST_BYTES, 0
    folder = tmp_path_factory.mktemp("kept")
    load(source, folder)
    weight_cache.LEAST_BYTES = least
    (found,) = cache_files(folder)
    return found.path.read_bytes()


def flipped(content: bytes, place: int, mask: int) -> bytes:
    changed = bytearray(content)
    changed[place % len(content)] ^= mask
    return bytes(changed)


DAMAGE: dict[str, Callable[[bytes, int, int], bytes]] = {
    "a flipped byte": flipped,
    "the end is missing": lambda content, place, mask: content[: place % len(content)],
    "the beginning is missing": lambda content, place, mask: content[1 + place % len(content) :],
    "there is more": lambda content, place, mask: content + bytes([mask]) * (1 + place % 100),
    "zeros": lambda content, place, mask: content[: place % len(content)].ljust(len(content), b"\0"),
}


@pytest.mark.parametrize("how", DAMAGE)
@settings(max_examples=examples(60))
@given(place=st.integers(0, 2**20), mask=st.integers(1, 255))
def test_damaged_file_is_found(
    how: str, place: int, mask: int, content: bytes, source: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    damaged = DAMAGE[how](content, place, mask)
    path = tmp_path_factory.mktemp("damaged") / "file"
    path.write_bytes(damaged)
    kernels = open_kernels()
    assert kernels is not None
    with pytest.raises(UnusableFileError):
        map_weights(path, facts_of(content), kernels)
    path.write_bytes(content)
    assert map_weights(path, facts_of(content), kernels)


def facts_of(content: bytes) -> list[str]:
    length, _, _ = weight_cache.END.unpack(content[-weight_cache.END.size :])
    table = content[-weight_cache.END.size - length : -weight_cache.END.size]
    facts: list[str] = weight_cache.json.loads(table)["facts"]
    return facts


@pytest.mark.parametrize(
    "how", [pytest.param(each, marks=[] if each == "a flipped byte" else pytest.mark.slow) for each in DAMAGE]
)
def test_damaged_file_is_made_again(
    how: str, source: str, folder: Path, expected: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    check(source, folder, expected, KEPT)
    (path,) = (entry.path for entry in cache_files(folder))
    good = path.read_bytes()
    path.write_bytes(DAMAGE[how](good, 12345, 64))
    check(source, folder, expected, KEPT)
    assert "is not used, and its weights are packed again" in caplog.text
    assert path.read_bytes() == good
    check(source, folder, expected, MAPPED)


def test_file_of_another_model_is_not_used(source: str, folder: Path, expected: Tensor, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", Shape(seed=3))
    time.sleep(2 * TICK)
    check(source, folder, expected, KEPT)
    (path,) = (entry.path for entry in cache_files(folder))
    path.unlink()
    load(other, folder)
    cache_files(folder)[0].path.rename(path)
    check(source, folder, expected, KEPT, MAPPED)


@pytest.mark.parametrize(
    "name", ["__version__", *(pytest.param(each, marks=pytest.mark.slow) for each in ("FORMAT", "_library_digest"))]
)
def test_another_version_packs_again(
    name: str, source: str, folder: Path, expected: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(source, folder, expected, KEPT)
    monkeypatch.setattr(weight_cache, name, (lambda: "other") if name.startswith("_lib") else "0.0.7")
    check(source, folder, expected, KEPT, MAPPED)
    assert len(cache_files(folder)) == 2


def test_another_instruction_set_packs_again(
    source: str, folder: Path, expected: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(source, folder, expected, KEPT)
    monkeypatch.setenv("SPECULANT_ISA", "portable")
    assert load(source, folder).source == (MAPPED if usable_sets() == ["portable"] else KEPT)


@pytest.mark.skipif(not ROOT, reason="only root can give a file away")
def test_file_of_another_user_is_not_used(source: str, folder: Path, expected: Tensor) -> None:
    check(source, folder, expected, KEPT)
    (path,) = (entry.path for entry in cache_files(folder))
    os.chown(path, 4321, -1)
    check(source, folder, expected, KEPT, MAPPED)


def test_changed_checkpoint_is_packed_again(folder: Path, tmp_path: Path) -> None:
    """Even if the new file has the old one's name, size and time."""
    model = write_checkpoint(tmp_path / "model")
    file = Path(model, "model.safetensors")
    time.sleep(2 * TICK)
    assert [load(model, folder).source for _ in range(2)] == [KEPT, MAPPED]
    before = file.stat()
    save_file({name: -each for name, each in load_file(file).items()}, file, {"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    time.sleep(2 * TICK)
    found = load(model, folder)
    assert found.source == KEPT
    assert torch.equal(logits(found), logits(load(model, None)))


def test_checkpoint_that_may_still_change_is_not_kept(folder: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    assert load(model, folder).source == PACKED
    assert not folder.exists()


def test_checkpoint_that_changes_meanwhile_is_not_kept(
    source: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(source, tmp_path / "model")
    time.sleep(2 * TICK)
    read = StoredWeights.read

    def changing(files: StoredWeights, name: str) -> Tensor | QuantizedBlocks:
        os.utime(model / "model.safetensors")
        return read(files, name)

    monkeypatch.setattr(StoredWeights, "read", changing)
    assert load(str(model), folder).source == PACKED
    assert not folder.exists()


# --- writers that die, and disks that are full


class Deadly:
    """A file that kills its process after a number of writes."""

    def __init__(self, file: BinaryIO, left: int) -> None:
        self._file, self._left = file, left

    def write(self, data: bytes) -> int:
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        return self._file.write(data)

    def writelines(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            self.write(piece)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def store_of(
    source: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[WeightCache, list[str], dict[str, Weight]]:
    """Load a model without writing its weights; return what would be written."""
    taken: list[weight_cache.WeightStore] = []

    def take(store: weight_cache.WeightStore) -> str:
        taken.append(store)
        return KEPT

    with monkeypatch.context() as patch:
        patch.setattr(weight_cache.WeightStore, "keep", take)
        load(source, folder)
    (store,) = taken
    return store.cache, [*store.facts], store.made


def in_a_child(work: Callable[[], object]) -> int:
    """Run something in a process of its own; return the process."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


MOMENTS = [0, 1, 7, "fsync", "replace", "oldest"]


@pytest.mark.parametrize(
    "moment", [pytest.param(each, marks=[] if each in (1, "replace") else pytest.mark.slow) for each in MOMENTS]
)
def test_writer_that_is_killed_leaves_nothing_wrong(
    moment: int | str, source: str, folder: Path, expected: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, facts, weights = store_of(source, folder, monkeypatch)
    with monkeypatch.context() as patch:
        if isinstance(moment, int):
            patch.setattr(
                weight_cache,
                "write_weights",
                lambda file, *rest: write_weights(Deadly(file, moment), *rest),  # type: ignore[arg-type]
            )
        else:
            patch.setattr(
                *{"fsync": (os, "fsync"), "replace": (os, "replace")}.get(moment, (weight_cache, moment)), die
            )
        _, status = os.waitpid(in_a_child(lambda: cache.keep(facts, weights)), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert len([*folder.glob("*" + TEMPORARY)]) == (moment != "oldest")
    check(source, folder, expected, MAPPED if moment == "oldest" else KEPT, MAPPED)
    assert len([*folder.iterdir()]) == 1


@pytest.mark.slow
def test_writers_that_are_killed_at_any_moment(
    source: str, folder: Path, expected: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, facts, weights = store_of(source, folder, monkeypatch)
    monkeypatch.setattr(weight_cache, "PIECE", 64)
    started = time.perf_counter()
    os.waitpid(in_a_child(lambda: cache.keep(facts, weights)), 0)
    takes, chance, killed, tries = time.perf_counter() - started, random.Random(5), 0, 0
    while killed < 50:
        for entry in cache_files(folder):
            entry.path.unlink()
        child, moment = in_a_child(lambda: cache.keep(facts, weights)), chance.uniform(0, takes)
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
        was_killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        killed, tries = killed + was_killed, tries + 1
        assert tries < 1000, "nearly every writer ends before it is killed"
        takes = takes if was_killed else max(moment, 0.9 * takes)  # the machine was slower when it was measured
        complete = bool(cache_files(folder))
        check(source, folder, expected, MAPPED if complete else KEPT, MAPPED)
        assert len([*folder.iterdir()]) == 1


@pytest.mark.parametrize("place", ["fsync", "write"])
def test_full_disk_fails_no_start(
    place: str,
    source: str,
    folder: Path,
    expected: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if place == "fsync" else (weight_cache, "write_weights")), full)
        check(source, folder, expected, KEPT, KEPT)
    assert caplog.text.count("No space left on device") == 1
    assert not [*folder.iterdir()]
    check(source, folder, expected, KEPT, MAPPED)


def test_disk_is_not_filled(
    source: str, folder: Path, expected: Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_cache, "FREE_BYTES", 2**62)
    check(source, folder, expected, PACKED, PACKED)
    assert caplog.text.count("are free there") == 1
    assert not [*folder.iterdir()]


def test_place_that_is_no_folder_fails_no_start(
    source: str, tmp_path: Path, expected: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    check(source, tmp_path / "file", expected, PACKED, PACKED)
    assert caplog.text.count("can't be kept") == 1


# --- several processes


@pytest.fixture
def kernels() -> Kernels:
    found = open_kernels(threads=1)
    assert found is not None
    return found


def some(kernels: Kernels, seed: int = 0) -> dict[str, Weight]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": kernels.pack(Type.BF16, torch.randn(64, 64, generator=generator).bfloat16())}


def test_live_writer_keeps_its_file(kernels: Kernels, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, kernels)
    with replacing(tmp_path / "other"):
        (name,) = tmp_path.glob("*" + TEMPORARY)
        assert cache.find(["a"]) is None
        assert name.exists()
    name.write_bytes(b"abandoned")
    assert cache.find(["a"]) is None
    assert not name.exists()


def test_writers_at_the_same_time(kernels: Kernels, tmp_path: Path) -> None:
    cache, weights = WeightCache(tmp_path, kernels), some(kernels)
    children = [
        in_a_child(lambda: [cache.keep(["a"], weights) or cache.find(["a"]) for _ in range(5)]) for _ in range(4)
    ]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    found = cache.find(["a"])
    assert found is not None
    assert torch.equal(found["w"].memory, weights["w"].memory)
    assert len([*tmp_path.iterdir()]) == 1


def test_files_that_were_used_longest_ago_go_first(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, weights = WeightCache(tmp_path, kernels), some(kernels)
    cache.keep(["0"], weights)
    size = cache_files(tmp_path)[0].size
    monkeypatch.setattr(weight_cache, "LIMIT_BYTES", 3 * size)
    for name in "12":
        cache.keep([name], weights)
    for place, name in enumerate("012"):
        os.utime(cache.path([name]), (place, place))
    mapped = cache.find(["0"])  # the one that was used last now
    cache.keep(["3"], weights)
    assert [name for name in "0123" if cache.path([name]).exists()] == ["0", "2", "3"]
    monkeypatch.setattr(weight_cache, "LIMIT_BYTES", 1)
    cache.keep(["4"], weights)
    assert [entry.path for entry in cache_files(tmp_path)] == [cache.path(["4"])]
    assert mapped is not None
    assert torch.equal(mapped["w"].memory, weights["w"].memory)  # as long as it is mapped


# --- the option


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return cache_folder("weights")


def test_engine_keeps_weights_and_says_so(checkpoints: Checkpoints, home: Path, folder: Path) -> None:
    ways: list[tuple[object, Path | None]] = [
        ("off", None),
        (False, None),
        ("auto", home),
        (True, home),
        (folder, folder),
    ]
    texts, said = [], []
    for wanted, place in ways:
        llm = LLM(
            checkpoints.target, dtype="bfloat16", kernels="native", weight_cache=wanted, draft_quantization="none"
        )
        for thread in threading.enumerate():
            if thread.name == weight_cache.THREAD:
                thread.join()
        (output,) = llm.generate("import os", SamplingParams(temperature=0, max_tokens=8))
        texts.append(output.outputs[0].token_ids)
        said.append(figures(llm, output).partition("; context")[0].rpartition(", ")[2] if llm.weight_source else "")
        assert place is None or len(cache_files(place)) == 1
    assert said == ["", "", "and written to the cache", MAPPED, "and written to the cache"]
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("lost", ["memory", "container", "pod"])
def test_default_folder_that_is_lost_is_only_read(
    lost: str,
    source: str,
    home: Path,
    expected: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr(weight_cache, "lost_with", lambda folder: lost)
        check(source, home, expected, PACKED)
        assert f"{home} would be lost with this {lost}" in caplog.text
        assert not home.exists()
        check(source, home.parent / "named", expected, KEPT)
    check(source, home, expected, KEPT)
    monkeypatch.setattr(weight_cache, "lost_with", lambda folder: lost)
    check(source, home, expected, MAPPED)


def test_a_start_says_what_it_writes_and_where(
    checkpoints: Checkpoints, home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["generate", "a", "--model", checkpoints.target, "--dtype", "bfloat16", "--max-tokens", "2"]
    for times in (1, 0):
        caplog.clear()
        assert json_of(*command)["token_ids"]
        said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert sum(str(home) in each and "GiB" in each and "--weight-cache off" in each for each in said) == times
        for thread in threading.enumerate():
            if thread.name == weight_cache.THREAD:
                thread.join()


MOUNT = "36 27 8:1 {root} {point} rw,relatime - {kind} /dev/sda rw"


@pytest.mark.parametrize(
    ("root", "point", "kind", "lost"),
    [
        ("/", "/", "ext4", ""),
        ("/", "/", "overlay", "container"),
        ("/", "/home/a user", "tmpfs", "memory"),
        ("/pods/1/volumes/kubernetes.io~empty-dir/home", "/home", "ext4", "pod"),
        ("/volumes/models/_data", "/home", "ext4", ""),
        ("/", "/other", "tmpfs", "container"),
        ("/", "/home/a", "tmpfs", "container"),
    ],
)
def test_what_a_folder_is_lost_with(
    root: str, point: str, kind: str, lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        MOUNT.format(root="/", point="/", kind="overlay"),
        MOUNT.format(root=root, point=point.replace(" ", "\\040"), kind=kind),
    ]
    (tmp_path / "mounts").write_text("\n".join(lines))
    monkeypatch.setattr(files, "MOUNTS", tmp_path / "mounts")
    assert files.lost_with(Path("/home/a user/.cache/speculant/weights")) == lost
    monkeypatch.setattr(files, "MOUNTS", tmp_path / "none")
    assert files.lost_with(tmp_path) == "", "the system does not tell"


def test_reference_kernels_have_no_cache(checkpoints: Checkpoints, home: Path) -> None:
    assert LLM(checkpoints.target, dtype="bfloat16", kernels="reference").weight_source == ""
    assert not home.exists()


def test_a_start_logs_how_long_it_wrote(source: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load(source, folder)
    assert f"kept packed weights in {folder}" in caplog.text
