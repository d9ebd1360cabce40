"""Drafts that nobody named: found near the target, measured, and never the reason why an engine does not start."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.config import EngineConfig
from speculant.engine import candidates
from tests.gguf_models import convert
from tests.heads import write_medusa
from tests.models import ALPHABET, HIDDEN_SIZE, VOCAB_SIZE, Shape, write_checkpoint

TARGET, SMALL = Shape(layers=4), Shape(layers=1)
PARAMS = [SamplingParams(temperature=0, max_tokens=12), SamplingParams(seed=3, max_tokens=12)]


@pytest.fixture(autouse=True)
def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Search, in an empty home, and use every draft that fits."""
    monkeypatch.setattr("speculant.engine.nearby.SEARCH_S", 60.0)
    monkeypatch.setattr("speculant.engine.build.LEAST_GAIN_FOUND", 0.0)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def target(tmp_path: Path) -> str:
    return write_checkpoint(tmp_path / "models" / "coder-4", TARGET)


def beside(tmp_path: Path) -> Path:
    return tmp_path / "models" / "coder-1"


def in_hub(tmp_path: Path) -> Path:
    return tmp_path / "hub" / "models--some--coder-1" / "snapshots" / "abc"


def in_cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "speculant" / "models" / "coder-1"


@pytest.mark.parametrize("place", [beside, in_hub, in_cache])
def test_a_draft_is_found_and_changes_no_text(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch, place: Callable[[Path], Path]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = write_checkpoint(place(tmp_path), SMALL)
    found, plain = LLM(target), LLM(target, use_speculative_decoding=False)
    assert f"found as {folder} (the target's tokens, 0." in found.speculation
    assert "times as fast as plain decoding" in found.speculation
    texts = [[out.outputs[0].token_ids for out in llm.generate(["def f", "import"], PARAMS)] for llm in (found, plain)]
    assert texts[0] == texts[1]


def test_a_file_finds_the_file_beside_it(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    small = write_checkpoint(beside(tmp_path), SMALL)
    files = [folder / name for name in ("coder-4.gguf", "coder-1.gguf")]
    for source, file in zip((target, small), files, strict=True):
        convert(Path(source), file)
    (folder / "coder-mmproj.gguf").write_bytes(b"GGUF")
    assert f"found as {files[1]}" in LLM(str(files[0])).speculation


@pytest.mark.parametrize(
    "arguments",
    [
        {"find_drafts": False},
        {"use_speculative_decoding": False},
        {"spec_length": 3},
        {"speculative_config": {"method": "ngram"}},
        {"speculative_config": {"draft_length": "fixed"}},
    ],
)
def test_nothing_is_looked_for_where_something_is_said(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    write_checkpoint(beside(tmp_path), SMALL)
    monkeypatch.setattr("speculant.engine.build.find_drafts", pytest.fail)
    assert "found as" not in LLM(target, **arguments).speculation


def too_large(folder: Path) -> None:
    write_checkpoint(folder, Shape(layers=3))


def of_another_vocabulary(folder: Path) -> None:
    write_checkpoint(folder, SMALL, ALPHABET[::-1])


def damaged(folder: Path) -> None:
    write_checkpoint(folder, SMALL)
    (folder / "model.safetensors").write_bytes(b"\x08" + bytes(15))


def without_a_layer(folder: Path) -> None:
    write_checkpoint(folder, SMALL)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))


def of_another_family(folder: Path) -> None:
    write_checkpoint(folder, SMALL)
    (folder / "config.json").write_text('{"model_type": "none"}')


def no_object(folder: Path) -> None:
    write_checkpoint(folder, SMALL)
    (folder / "config.json").write_text("[]")


def a_head_for_another_target(folder: Path) -> None:
    write_checkpoint(folder, SMALL)
    (folder / "config.json").write_text('{"speculant_head": "eagle3", "target": "other"}')


def with_a_pipe(folder: Path) -> None:
    """To open it would wait for ever."""
    write_checkpoint(folder, SMALL)
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")


WRONG: dict[Callable[[Path], None], str] = {
    too_large: "of the target's weights",
    of_another_vocabulary: "vocabulary is not the target's",
    damaged: "model.safetensors",
    without_a_layer: "layers",
    of_another_family: "none",
    no_object: "JSON object",
    a_head_for_another_target: "does not name this target",
    with_a_pipe: "tokenizer.json is not a regular file",
}


@pytest.mark.parametrize("write", WRONG, ids=lambda write: write.__name__)
def test_a_draft_that_does_not_fit_is_passed_over(
    tmp_path: Path, target: str, caplog: pytest.LogCaptureFixture, write: Callable[[Path], None]
) -> None:
    write(beside(tmp_path))
    right = write_checkpoint(tmp_path / "models" / "small", SMALL)
    with caplog.at_level(logging.INFO, "speculant"):
        llm = LLM(target)
    (line,) = [each.message for each in caplog.records if each.message.startswith("not used as a draft")]
    assert str(beside(tmp_path)) in line
    assert WRONG[write] in line
    assert f"found as {right}" in llm.speculation


def test_folders_of_others_are_passed_over(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 raises an error for a path inside a folder that the user may not read."""
    right, closed, ask = write_checkpoint(tmp_path / "models" / "small", SMALL), beside(tmp_path), Path.is_file

    def is_file(path: Path) -> bool:
        if closed in (path, path.parent):
            raise PermissionError(13, "Permission denied", str(path))
        return ask(path)

    closed.mkdir()
    monkeypatch.setattr(Path, "is_file", is_file)
    assert f"found as {right}" in LLM(target).speculation


def test_a_draft_that_can_not_be_loaded_is_refused(
    tmp_path: Path, target: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the error: the engine starts, with lookups."""

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("a fault")

    write_checkpoint(beside(tmp_path), SMALL)
    alone = LLM(target, find_drafts=False)
    monkeypatch.setattr("speculant.engine.draft_loading.expected_gain", fail)
    llm = LLM(target)
    assert "is not used: ZeroDivisionError('a fault')" in caplog.text
    assert llm.speculation == alone.speculation
    assert llm.limits == alone.limits
    assert llm.generate("def f", PARAMS[0])[0].outputs[0].token_ids


def test_a_draft_that_does_not_pay_is_refused(
    tmp_path: Path, target: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(beside(tmp_path), SMALL)
    monkeypatch.setattr("speculant.engine.build.LEAST_GAIN_FOUND", 1e9)
    assert "found as" not in LLM(target).speculation
    assert "times as fast with" in caplog.text


def test_a_draft_needs_room(
    tmp_path: Path, target: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(beside(tmp_path), SMALL)
    monkeypatch.setattr("speculant.engine.nearby.SHARE_OF_FREE", 1e-12)
    with caplog.at_level(logging.INFO, "speculant"):
        assert "found as" not in LLM(target).speculation
    assert "MiB of memory are free" in caplog.text
    monkeypatch.setattr("speculant.engine.nearby.SHARE_OF_FREE", 0.25)
    llm = LLM(target, kv_memory="144KiB", max_num_seqs=1)
    assert "found as" not in llm.speculation
    assert (
        llm.limits.max_model_len
        == LLM(target, kv_memory="144KiB", max_num_seqs=1, find_drafts=False).limits.max_model_len
    )


def test_a_head_that_names_the_target_is_found(tmp_path: Path, target: str) -> None:
    head = tmp_path / "models" / "head"
    write_medusa(head, HIDDEN_SIZE, VOCAB_SIZE)
    config = json.loads((head / "config.json").read_text())
    verifier = {"speculators_config": {"verifier": {"name_or_path": "publisher/coder-4"}}}
    (head / "config.json").write_text(json.dumps({"speculant_head": "medusa", **config, **verifier}))
    assert f"found as {head} (its config.json names the target" in LLM(target).speculation


def test_the_search_is_bounded(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Path(write_checkpoint(beside(tmp_path), SMALL))
    for number in range(8):
        shutil.copytree(small, tmp_path / "models" / f"other-{number}")
    assert len(candidates(Path(target))) == 9
    monkeypatch.setattr("speculant.engine.nearby.MOST_ENTRIES", 4)
    assert len(candidates(Path(target))) <= 4
    monkeypatch.setattr("speculant.engine.nearby.SEARCH_S", -1.0)
    assert "found as" not in LLM(target).speculation


def test_the_switch_is_a_flag() -> None:
    assert EngineConfig(model="x").find_drafts
    with pytest.raises(Exception, match="find_drafts"):
        EngineConfig.from_arguments(model="x", find_drafts="yes")
