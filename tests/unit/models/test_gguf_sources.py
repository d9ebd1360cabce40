"""GGUF files are found by path, in a folder, and on the hub by file or tag; several candidates are listed."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from speculant.errors import ModelError
from speculant.models import load_model, read_model_config, resolve_folder, resolve_source, resolve_tokenizer
from tests.gguf_models import convert
from tests.models import Shape, write_checkpoint

Files = Callable[..., Path]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Make a folder of files that have only the first bytes of a GGUF file."""

    def make(*names: str, folder: str = "folder") -> Path:
        for name in names:
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_bytes(b"GGUF")
        return tmp_path / folder

    return make


def refusal(source: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_source(str(source))
    return str(caught.value)


def test_a_path_names_a_file_or_any_of_its_parts(files: Files) -> None:
    folder = files("model.Q4_K_M.gguf", "Big.GGUF", "nameless", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf")
    for name in ("model.Q4_K_M.gguf", "Big.GGUF", "nameless"):
        assert resolve_source(str(folder / name)) == folder / name
    assert resolve_source(str(folder / "big-00002-of-00002.gguf")) == folder / "big-00001-of-00002.gguf"


def test_a_folder_stands_for_its_only_model(files: Files) -> None:
    folder = files("big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "mmproj-big-f16.gguf", "imatrix.gguf")
    assert resolve_source(str(folder)) == folder / "big-00001-of-00002.gguf"


def test_several_models_in_a_folder_are_listed(files: Files) -> None:
    folder = files("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf")
    assert f"has 2 GGUF models\n  Fix: name one file: {folder}/a.gguf, {folder}/b-00001-of-00002.gguf." in refusal(
        folder
    )


def test_safetensors_in_a_folder_come_first(files: Files) -> None:
    folder = files("a.gguf", "b.gguf", "model.safetensors")
    assert resolve_source(str(folder)) == folder


def test_a_tokenizer_is_read_from_a_folder_with_any_models(files: Files, tmp_path: Path) -> None:
    assert resolve_tokenizer(str(files("a.gguf", "b.gguf", "tokenizer.json"))) == tmp_path / "folder"
    assert resolve_tokenizer(str(files("a.gguf", folder="other"))) == tmp_path / "other" / "a.gguf"


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK")
    assert "neither a folder nor in the GGUF format" in refusal(tmp_path / "model.bin")
    assert "there is no file" in refusal(tmp_path / "absent.gguf")
    assert "org/name:file.gguf" in refusal("org/model-q4.gguf")
    assert "there is no file" in refusal("https://huggingface.co/org/name/resolve/main/model-q4.gguf")


def test_a_file_is_refused_in_place_of_a_folder(files: Files) -> None:
    folder = files("a.gguf")
    assert resolve_folder(str(folder), "heads/medusa") == folder
    for source in (str(folder / "a.gguf"), "org/name:Q4_0"):
        with pytest.raises(ModelError, match="is a file, and a folder is needed here"):
            resolve_folder(source, "heads/medusa")


def test_the_config_of_a_file_is_in_the_keys_of_config_json(tmp_path: Path) -> None:
    source = Path(write_checkpoint(tmp_path / "source", Shape(layers=1)))
    path = convert(source, tmp_path / "model.gguf")
    own, expected = read_model_config(path), read_model_config(source)
    assert {key: own[key] for key in expected if key not in ("torch_dtype", "eos_token_id")} == {
        key: value for key, value in expected.items() if key not in ("torch_dtype", "eos_token_id")
    }


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("form", ["file", "folder"])
def test_names_of_models_are_those_of_their_files(tmp_path: Path, form: str, parts: int) -> None:
    source = Path(write_checkpoint(tmp_path / "source", Shape(layers=1)))
    (tmp_path / "folder").mkdir()
    path = convert(source, tmp_path / "folder" / "Tiny.Q4_0.gguf", parts=parts)
    assert load_model(str(path if form == "file" else path.parent)).name == "Tiny.Q4_0"


class Hub:
    """A repository with these files; `snapshot_download` copies the wanted ones."""

    def __init__(self, patch: pytest.MonkeyPatch, cache: Path, names: Sequence[str], model: Path) -> None:
        self.cache, self.names, self.model, self.is_online = cache, names, model, True
        self.wanted: list[list[str]] = []
        patch.setattr("huggingface_hub.list_repo_files", self._list)
        patch.setattr("huggingface_hub.snapshot_download", self._download)

    def _list(self, name: str, revision: str | None) -> list[str]:
        assert (name, revision) == ("org/Model-GGUF", "main")
        if not self.is_online:
            raise OfflineModeIsEnabled("offline")
        return [".gitattributes", *self.names]

    def _download(self, name: str, **options: Any) -> str:
        assert (name, options["revision"], options["cache_dir"]) == ("org/Model-GGUF", "main", "downloads")
        for file in self.names if self.is_online else ():
            if any(fnmatch.fnmatch(file, pattern) for pattern in options["allow_patterns"]):
                target = self.cache / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.model, target)
        self.wanted.append(options.get("allow_patterns", []))
        self.cache.mkdir(exist_ok=True)
        return str(self.cache)

    def resolve(self, wanted: str = "") -> str:
        """Return the place that a source stands for, relative to the cache."""
        found = resolve_source("org/Model-GGUF" + (wanted and f":{wanted}"), "target", "main", "downloads")
        return found.relative_to(self.cache).as_posix()


SEVERAL = ["model-Q4_K_M.gguf", "model-Q4_K_S.gguf", "model-Q4_0.gguf", "mmproj-model-Q4_0.gguf",
           "F16/model-F16-00001-of-00002.gguf", "F16/model-F16-00002-of-00002.gguf", "README.md"]  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Sequence[str]], Hub]:
    (tmp_path / "content").write_bytes(b"GGUF")
    return lambda names: Hub(monkeypatch, tmp_path / "cache", names, tmp_path / "content")


def test_only_the_tokenizer_of_a_repository_is_downloaded(hub: Callable[[Sequence[str]], Hub]) -> None:
    repository = hub([*SEVERAL, "tokenizer.json"])
    assert resolve_tokenizer("org/Model-GGUF", "main", "downloads") == repository.cache
    assert sorted(path.name for path in repository.cache.iterdir()) == ["tokenizer.json"]


def test_a_repository_without_a_tokenizer_gives_its_models(hub: Callable[[Sequence[str]], Hub]) -> None:
    repository = hub(["model-Q4_0.gguf"])
    for source in ("org/Model-GGUF", "org/Model-GGUF:Q4_0"):
        assert resolve_tokenizer(source, "main", "downloads") == repository.cache / "model-Q4_0.gguf"


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("model-Q4_0.gguf", ["model-Q4_0.gguf"]),
        ("mmproj-model-Q4_0.gguf", ["mmproj-model-Q4_0.gguf"]),
        ("Q4_K_M", ["model-Q4_K_M.gguf"]),
        ("q4_k_s", ["model-Q4_K_S.gguf"]),
        ("Q4_0", ["model-Q4_0.gguf"]),
        ("f16", SEVERAL[4:6]),
        ("model-F16-00002-of-00002.gguf", SEVERAL[4:6]),
        ("F16/model-F16-00001-of-00002.gguf", SEVERAL[4:6]),
    ],
)
def test_a_file_or_a_tag_names_a_model_on_the_hub(
    hub: Callable[[Sequence[str]], Hub], wanted: str, found: list[str]
) -> None:
    """Only its own files are downloaded."""
    repository = hub(SEVERAL)
    assert repository.resolve(wanted) == found[0]
    assert repository.wanted == [found]


@pytest.mark.parametrize("wanted", ["Q5_K_M", "Q4_K", "Q4", "other.gguf"])
def test_a_tag_that_stands_for_no_file_is_refused(hub: Callable[[Sequence[str]], Hub], wanted: str) -> None:
    with pytest.raises(ModelError, match=f"org/Model-GGUF has no GGUF models that {wanted} stands for") as caught:
        hub(SEVERAL).resolve(wanted)
    assert "org/Model-GGUF:model-Q4_K_M.gguf" in caught.value.fix


def test_a_repository_of_one_model_needs_no_name(hub: Callable[[Sequence[str]], Hub]) -> None:
    repository = hub(["config.json", "model-00001-of-00002.gguf", "model-00002-of-00002.gguf"])
    assert repository.resolve() == "model-00001-of-00002.gguf"
    assert repository.wanted[1:] == [["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"]]


def test_models_of_a_repository_are_listed(hub: Callable[[Sequence[str]], Hub]) -> None:
    with pytest.raises(ModelError, match="org/Model-GGUF has 4 GGUF models") as caught:
        hub(SEVERAL).resolve()
    assert caught.value.fix.startswith("name one file: org/Model-GGUF:F16/model-F16-00001-of-00002.gguf, org/")


def test_safetensors_of_a_repository_come_first(hub: Callable[[Sequence[str]], Hub]) -> None:
    repository = hub([*SEVERAL, "model.safetensors"])
    assert repository.resolve() == "."
    assert len(repository.wanted) == 1


def test_downloaded_files_are_found_without_the_hub(hub: Callable[[Sequence[str]], Hub]) -> None:
    repository = hub(SEVERAL)
    repository.resolve("Q4_0")
    repository.is_online = False
    assert repository.resolve("Q4_0") == repository.resolve() == "model-Q4_0.gguf"
    with pytest.raises(ModelError, match="no GGUF models that Q4_K_M"):
        repository.resolve("Q4_K_M")


def test_nothing_is_found_without_the_hub(hub: Callable[[Sequence[str]], Hub]) -> None:
    repository = hub(SEVERAL)
    repository.is_online = False
    with pytest.raises(ModelError, match="org/Model-GGUF"):
        repository.resolve("Q4_0")


@pytest.mark.parametrize("wanted", ["", "Q4_0"])
def test_a_dead_hub_is_named_beside_a_downloaded_tokenizer(hub: Callable[[Sequence[str]], Hub], wanted: str) -> None:
    repository = hub([*SEVERAL, "tokenizer.json"])
    resolve_tokenizer("org/Model-GGUF", "main", "downloads")
    repository.is_online = False
    with pytest.raises(ModelError, match="some of its files have not been downloaded before, and HF_HUB_OFFLINE"):
        repository.resolve(wanted)
