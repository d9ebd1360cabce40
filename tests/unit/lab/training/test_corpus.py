"""The files that are read, and those that are held out."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculant.errors import ConfigError
from speculant.lab.training import is_held_out, read_corpus, standard_library


def test_the_held_out_rule_never_changes() -> None:
    names = [f"package/module_{i}.py" for i in range(200)]
    assert [i for i, name in enumerate(names) if is_held_out(name)] == [64, 164]
    assert is_held_out("fnmatch.py")
    assert not is_held_out("os.py")


def test_a_file_is_on_one_side_only(corpus_folder: Path) -> None:
    corpus = read_corpus([corpus_folder])
    training, held_out = ({document.name for document in side} for side in (corpus.training, corpus.held_out))
    assert held_out == {"package/module_64.py"}
    assert len(training) == 89
    assert not training & held_out


def test_the_standard_library_is_found() -> None:
    assert (standard_library() / "os.py").is_file()


def test_packages_empty_and_undecodable_files_are_left_out(corpus_folder: Path, tmp_path: Path) -> None:
    for name, content in {
        "package/module_64.py": b"held = 'out'\n",
        "kept.py": b"x = 1\r\n",
        "latin.py": b"x = '\xe9'\n",
        "empty.py": b" \n",
        "site-packages/installed.py": b"x = 1\n",
        "notes.txt": b"words\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    corpus = read_corpus([tmp_path])
    assert [(document.name, document.text) for document in corpus.training] == [("kept.py", "x = 1\n")]


@pytest.mark.parametrize(("name", "reason"), [("absent", "is not a folder"), ("empty", "no readable")])
def test_a_wrong_folder_is_explained(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=reason):
        read_corpus([tmp_path / name])


def test_a_corpus_without_held_out_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "os.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="held-out rule"):
        read_corpus([tmp_path])
