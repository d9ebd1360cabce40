"""The commands and programs of the documentation run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from speculant import SamplingParams, params
from speculant.config import USUAL_CONTEXT, USUAL_ROWS, EngineConfig, SpeculativeConfig
from speculant.metrics import SpeculationMetrics, TimingMetrics
from speculant.models import LEAST_BYTES, LIMIT_BYTES
from tests.commands import invoke
from tests.gguf_models import convert
from tests.models import Shape, write_checkpoint

ROOT = Path(__file__).parents[3]
DOCUMENTS = ("README.md", "docs/quickstart.md", "docs/planning.md", "docs/profiling.md", "docs/structured.md")
WITH_COMMANDS = (*DOCUMENTS, "docs/benchmarks.md")
RESULTS = ROOT / "benchmarks" / "results"
SAMPLES = {  # figures in README.md and the results that they come from
    "toy": ("heads_demo", ("texts", "held-out", "default", "ways", "default"), ("speed",), ("tokens_per_pass",)),
    "real": (
        "real_text_head_small",
        ("cells", "head, bfloat16, batch 1, T = 0"),
        ("over_plain", "default"),
        ("tokens_per_pass", "default"),
    ),
}
OTHERS = ("demo", "serve", "chat")  # they have their own tests; the last two do not end by themselves
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
LINKED = ("README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in PAGES))


def _blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def _commands(document: str) -> list[str]:
    lines = [line for block in _blocks(document, "sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("speculant ") and line.split()[1] not in OTHERS]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_runs(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = _blocks(document, "python")
    assert blocks
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, document, "exec"), scope)


def _case(command: str) -> Any:
    """Return a command as a test case; those that measure are slow."""
    slow = command.startswith(("speculant bench ", "speculant doctor  ")) and "--help" not in command
    return pytest.param(command, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("command", [_case(line) for document in WITH_COMMANDS for line in _commands(document)])
def test_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("speculant.lab.bench.pair._COST_SECONDS", 0.01)
    monkeypatch.setattr("speculant.lab.bench.pair.SPEED_SECONDS", 0.01)
    arguments = shlex.split(command, comments=True)[1:]
    if files := [Path(each) for each in arguments if re.fullmatch(r"path/.*\.gguf", each)]:  # the reader's own
        source = write_checkpoint(tmp_path / "source", Shape(layers=1, hidden_size=256))
        files[0].parent.mkdir()
        for file in files:
            convert(source, file, "Q4_K")
    invoke(*arguments)


def test_the_readme_shows_what_its_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    (program,), (shown,) = _blocks("README.md", "python"), _blocks("README.md", "text")
    exec(compile(program, "README.md", "exec"), {})
    *text, figures = capsys.readouterr().out.splitlines()
    *shown_text, shown_figures = shown.splitlines()
    assert text == shown_text
    numbers, shown_numbers = (list(map(float, re.findall(r"\d\.\d", line))) for line in (figures, shown_figures))
    assert numbers == pytest.approx(shown_numbers, rel=0.4)  # the type of the draft's weights is chosen by speed
    assert re.sub(r"\d", "", figures) == re.sub(r"\d", "", shown_figures)


@pytest.mark.parametrize("kind", SAMPLES)
def test_figures_of_the_readme_are_those_of_a_result(kind: str) -> None:
    name, place, speed, tokens = SAMPLES[kind]
    found = _at(json.loads((RESULTS / f"{name}.json").read_text())["seen"], place)
    spread, text = _at(found, speed), (ROOT / "README.md").read_text()
    (row,) = re.findall(rf"^\| {kind}: .*", text, re.MULTILINE)
    expected = [spread["median"], spread["q1"], spread["q3"], _at(found, tokens)]
    assert re.findall(r"\b\d\.\d\d\b", row) == [f"{figure:.2f}" for figure in expected]
    assert f"`{name}.json`" in text
    medians = sorted((by["median"], chat) for chat, by in found.get("by_category", {}).items())
    shown = [f"{median:.2f} ({chat})" for median, chat in (*medians[:1], *medians[-1:])]
    assert [each for each in shown if each not in " ".join(text.split())] == []


def test_figures_of_scaling_are_those_of_results() -> None:
    batch, replicas = (json.loads((RESULTS / f"{name}.json").read_text())["seen"] for name in ("batch", "replicas"))
    text = " ".join((ROOT / "docs/scaling.md").read_text().split())
    for way in ("plain", "speculation"):
        first, second = (batch["completion"][f"batch of {size}, {way}"]["speed"]["median"] for size in (8, 32))
        assert f"{first:.2f} and {second:.2f} times" in text
    hits = [f"{100 * replicas[name]['hit_rate']['median']:.0f}%" for name in ("prefix", "random")]
    times = [f"{1e3 * replicas[name]['first_token_s']['median']:.0f}" for name in ("prefix", "random")]
    assert f"{hits[0]} of the prompt tokens in the cache instead of {hits[1]}" in text
    assert f"{times[0]} ms instead of {times[1]}" in text


def _at(value: Any, place: Sequence[str]) -> Any:
    for key in place:
        value = value[key]
    return value


def test_the_readme_has_ten_links_and_the_oldest_python() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(re.findall(r"(?<!!)\[[^]]*\]\(", text)) <= 10
    (oldest,) = re.findall(r'^requires-python = ">=(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"Python {oldest} or newer" in text


NAMES = {  # in the first column of tables of docs/quickstart.md, under each heading
    "Parameter": {field.name for field in fields(SamplingParams)} | {"num_speculative_tokens"},
    "Engine argument": {field.name for field in fields(EngineConfig)},
    "Key": {field.name for field in fields(SpeculativeConfig)},
    "Metric": {*SpeculationMetrics().to_dict(), "tokens_per_pass", *TimingMetrics(0.0).to_dict()},
}


@pytest.mark.parametrize("heading", NAMES)
def test_names_in_tables_of_the_quickstart_exist(heading: str) -> None:
    page = (ROOT / "docs/quickstart.md").read_text()
    table = page.partition(f"| {heading} | ")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE)))
    assert len(named) > 2
    assert [name for name in named if name not in NAMES[heading]] == []


def test_limits_in_the_quickstart_are_those_of_the_code() -> None:
    page = (ROOT / "docs/quickstart.md").read_text()
    rows = page.partition("| Parameter | Limit |")[2].partition("\n\n")[0].splitlines()[2:]
    shown = [list(map(int, re.findall(r"\b\d+\b", row))) for row in rows]
    most = params.MAX_STOP_TOKEN_IDS
    assert {most} == {params.MAX_LOGIT_BIAS, params.MAX_BAD_WORDS}
    expected = [[params.MAX_N], [params.MAX_STOPS, params.MAX_STOP_CHARACTERS], [most], [params.MAX_LOGPROBS]]
    assert shown == [*expected, [params.MAX_SPECULATIVE_TOKENS]]
    usual, flat = EngineConfig("demo"), " ".join(page.split())
    for figures in (
        f"running sequences ({usual.max_num_seqs}); rows per pass ({USUAL_ROWS})",
        f"may wait ({usual.max_waiting})",
        f"at most {USUAL_CONTEXT:,} tokens each",
        f"weights of {LEAST_BYTES // 2**20} MiB or more",
        f"at most {LIMIT_BYTES // 2**30} GiB",
    ):
        assert figures in flat


@pytest.mark.parametrize("document", LINKED)
def test_links_and_files_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    linked = [(ROOT / document).parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    sources = re.findall(r"`([a-z_/]+/[a-z_]+\.(?:py|h|json))`", text)
    missing = [name for name in sources if not any((base / name).exists() for base in (ROOT, ROOT / "src/speculant"))]
    assert [str(path) for path in linked if not path.exists()] + missing == []


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", ["CHANGELOG.md", *LINKED])
def test_sections_that_are_linked_exist(document: str) -> None:
    path = ROOT / document
    linked = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text())
    missing = [f"{page}#{part}" for page, part in linked if part not in _anchors(path.parent / page if page else path)]
    assert missing == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_that_are_named_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", (ROOT / document).read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets
