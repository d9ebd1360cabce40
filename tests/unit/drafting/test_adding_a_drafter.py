"""The page on adding a drafter is true: its code, saved here or in another package, drafts and changes no text."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from speculant import LLM, SamplingParams, plugins
from speculant.drafting import DrafterNeeds, DrafterReads, Method, StatelessDrafter, lookup
from speculant.errors import ConfigError
from speculant.types import CommittedRows
from tests.architecture.drafters import drafter_names, leaks
from tests.architecture.source import Module, load_package
from tests.models import Checkpoints

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "adding-a-drafter.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
((NAME, ROOM),) = re.findall(r"Saved as `(\w+)\.py`, for example in `src/speculant/(drafting/\w+)/`", PAGE)
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
PROMPTS = ["def read(path):", "import os", "hello world " * 4]


def install(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the page's code in another package, as the page says, as a method of this name."""
    (entry,) = re.findall(r'    \[project\.entry-points\."speculant\.drafting"\]\n    (.*)\n', PAGE)
    package, _ = re.fullmatch(rf'{NAME} = "(\w+)\.({NAME})"', entry).groups()
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("", encoding="utf-8")
    (folder / package / f"{name}.py").write_text(CODE, encoding="utf-8")
    info = folder / "their_drafter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-drafter\nVersion: 1.0\n", encoding="utf-8")
    points = f"[speculant.drafting]\n{name} = {package}.{name}\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture(params=[pytest.param("in a room", marks=pytest.mark.slow), "another package"])
def installed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Save the page's code in the one place or the other; return the method's name."""
    if request.param == "another package":
        install(tmp_path, NAME, monkeypatch)
        return NAME
    (tmp_path / f"{NAME}.py").write_text(CODE, encoding="utf-8")
    monkeypatch.setattr(lookup, "__path__", [*lookup.__path__, str(tmp_path)])
    return NAME


def test_it_is_found_and_leaves_greedy_text_as_it_was(installed: str, checkpoints: Checkpoints) -> None:
    assert installed in plugins.names("speculant.drafting")
    plain = LLM(checkpoints.target, dtype="float64").generate(PROMPTS, GREEDY)
    settings = {"method": installed, "window": 128, "draft_length": "fixed"}  # whatever it costs here
    llm = LLM(checkpoints.target, dtype="float64", speculative_config=settings)
    results = llm.generate(PROMPTS, GREEDY)
    assert [each.outputs[0].text for each in results] == [each.outputs[0].text for each in plain]
    assert [each.outputs[0].token_ids for each in results] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.metrics.speculative_decoding.num_accepted_draft_tokens for each in results) > 0
    assert llm.speculation.startswith(f"{installed}, 3 tokens a step")


def test_its_options_are_checked(installed: str, checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="did you mean 'window'"):
        LLM(checkpoints.target, speculative_config={"method": installed, "windw": 128})


def test_it_is_gone_when_it_is_uninstalled(tmp_path: Path, checkpoints: Checkpoints) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(tmp_path, "another_name", monkeypatch)
        assert "another_name" in plugins.names("speculant.drafting")
    with pytest.raises(ConfigError, match="no drafting plugin called 'another_name'"):
        LLM(checkpoints.target, speculative_config={"method": "another_name"})


@pytest.mark.slow
def test_saved_in_a_room_it_passes_the_check_of_names() -> None:
    modules = load_package()
    others, own = [each for each in modules if not each.name.endswith(f".{NAME}")], Module(_dotted(ROOM, NAME), CODE)
    names = drafter_names([*others, own])
    assert NAME in names
    assert [leak for module in (*others, own) for leak in leaks(module, names)] == []


def _dotted(room: str, name: str) -> str:
    return f"{room.replace('/', '.')}.{name}"


def test_every_field_and_call_is_on_the_page() -> None:
    rows = {name for row in re.findall(r"^\| (`[^|]*) \|", PAGE, flags=re.MULTILINE) for name in _names(row)}
    for fields in (Method, DrafterNeeds, DrafterReads):
        assert {field.name for field in dataclasses.fields(fields)} <= rows
    assert {name for name in vars(StatelessDrafter) if not name.startswith("_")} - {"needs"} <= rows
    assert set(CommittedRows._fields) <= rows


def _names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)", cell)


def test_the_page_names_what_exists() -> None:
    for path in re.findall(r"`((?:tests|src)/[\w/]+\.py)`", PAGE):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:drafting|models)/[\w/]+\.py)`", PAGE):
        assert (ROOT / "src" / "speculant" / path).exists(), path
