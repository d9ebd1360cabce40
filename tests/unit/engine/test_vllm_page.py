"""docs/vllm.md has a row for every argument, parameter and method in the code; its program runs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from speculant.checks import Rule
from speculant.config import EngineConfig
from speculant.engine import ABSENT, FRONTEND, LLM, REFUSED, RENAMED, RULES, SERVER_RULES, SPECULATIVE_RULES, VALUES
from speculant.params import FOREIGN, SamplingParams
from speculant.structured import spec
from speculant.types import CompletionOutput, Logprob, RequestOutput
from tests.unit.engine.test_vllm_arguments import VLLM

PAGE = (Path(__file__).parents[3] / "docs/vllm.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")}


def names(section: str) -> set[str]:
    """Return the code of a section as single words."""
    return {word for code in re.findall(r"`([^`]+)`", SECTIONS[section]) for word in re.findall(r"\w+", code)}


def test_every_argument_of_llm_has_a_row() -> None:
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    expected = {*RULES, *RENAMED, *VALUES, *SERVER_RULES, *SPECULATIVE_RULES, *VLLM, *FRONTEND, "model"}
    assert expected <= names("Arguments")
    assert {name for name in VLLM if name not in RULES} <= fields | {*RENAMED, *FRONTEND}


def test_every_row_is_of_a_known_argument() -> None:
    table = [
        line for line in SECTIONS["Arguments"].partition("The server alone")[0].splitlines() if line.startswith("| `")
    ]
    listed = {name for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert listed <= fields | {*RULES, *RENAMED, *FRONTEND, "api_server_count"}


@pytest.mark.parametrize("rules", [RULES, SERVER_RULES, SPECULATIVE_RULES], ids=["llm", "server", "speculative"])
def test_what_has_no_effect_stands_in_one_row(rules: Mapping[str, Rule]) -> None:
    rows = [line for line in SECTIONS["Arguments"].splitlines() if "| no effect" in line]
    listed = [set(re.findall(r"`(\w+)`", row.split("|")[1])) for row in rows]
    assert {name for name, rule in rules.items() if rule.harmless is None} in listed


def test_every_sampling_parameter_has_a_row() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields | set(FOREIGN) | set(spec.REFUSED) <= names("Fields of `SamplingParams`")


def test_keys_of_prompts_have_a_row() -> None:
    assert {*REFUSED, "prompt", "prompt_token_ids", "cache_salt"} <= names("Prompts")


def test_every_output_has_a_row() -> None:
    fields = {field.name for kind in (CompletionOutput, RequestOutput, Logprob) for field in dataclasses.fields(kind)}
    assert fields <= names("Outputs")


def test_every_absent_method_has_a_row() -> None:
    assert set(ABSENT) <= names("Methods of `LLM`")


def test_methods_exist_where_the_page_names_them() -> None:
    table = [line for line in SECTIONS["Methods of `LLM`"].splitlines() if line.startswith("| `")]
    for line in table:
        for name in re.findall(r"`(\w+)`", line.split("|")[1]):
            assert hasattr(LLM, name) == ("| absent" not in line), name


def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(program, "docs/vllm.md", "exec"), {})
    assert capsys.readouterr().out.startswith("def pop(self): ")
