"""docs/vllm.md has a row for every argument, parameter and method that differs from vLLM's; its program runs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from speculant.config import EngineConfig, SpeculativeConfig
from speculant.engine import ABSENT, FRONTEND, LLM, REFUSED, RENAMED, RULES, SERVER_RULES, SPECULATIVE_RULES, VALUES
from speculant.params import FOREIGN, SamplingParams
from speculant.structured import spec
from speculant.types import CompletionOutput, Logprob, RequestOutput
from tests.unit.engine.test_vllm_arguments import VLLM

PAGE = (Path(__file__).parents[3] / "docs/vllm.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")}
# The fields of vLLM's SamplingParams and outputs that are the same here.
VLLM_SAMPLING = """
    n temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty max_tokens min_tokens stop
    stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens detokenize logit_bias allowed_token_ids
    bad_words
""".split()
VLLM_OUTPUTS = """
    request_id prompt prompt_token_ids prompt_logprobs outputs finished num_cached_tokens encoder_prompt
    encoder_prompt_token_ids index text token_ids cumulative_logprob logprobs stop_reason logprob rank decoded_token
""".split()
PARTS = dict(
    zip(("llm", "server", "speculative"), re.split("\n(?:Flags of|Keys of)", SECTIONS["Arguments"]), strict=True)
)
TRANSLATED = ("parallel_drafting", "num_speculative_tokens_per_batch_size")  # keys of vLLM that are read as others
TABLES = {"llm": RULES, "server": SERVER_RULES, "speculative": SPECULATIVE_RULES}


def rows(text: str) -> dict[str, str]:
    """Return the second cell of a table's rows, by the names in the first; `*` in a name stands for any letters."""
    found = re.findall(r"^\| (`[^|]*) \| (.*) \|$", text, re.MULTILINE)
    return {name: said for names, said in found for name in re.findall(r"`\w*?\.?([\w*]+)`", names)}


def row(name: str, text: str) -> str | None:
    """Return a table's text about a name: from the row of that name, or from a row with a pattern such as `top_*`."""
    known = rows(text)
    patterns = [said for each, said in known.items() if re.fullmatch(each.replace("*", r"\w*"), name)]
    return known.get(name) or next(iter(patterns), None)


def fields(*kinds: type) -> set[str]:
    return {field.name for kind in kinds for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("part", TABLES)
def test_every_rule_has_a_row_that_says_what_it_does(part: str) -> None:
    said = {name: row(name, PARTS[part]) or row(name, PARTS["llm"]) or "" for name in TABLES[part]}
    effect = {name: "no effect" if rule.harmless is None else "refused" for name, rule in TABLES[part].items()}
    assert {name: said[name] for name in said if not said[name].startswith(effect[name])} == {}


def test_arguments_of_vllm_without_a_row_exist_here() -> None:
    assert all(row(name, PARTS["llm"]) for name in (*RENAMED, *VALUES) if name != "model_backend")
    same = {name for name in VLLM if row(name, PARTS["llm"]) is None}
    assert same <= fields(EngineConfig) | {*FRONTEND}
    assert "max_num_seqs" in same


def test_rows_cover_known_names_that_differ() -> None:
    for part, rules in TABLES.items():
        own = fields(SpeculativeConfig if part == "speculative" else EngineConfig)
        known = {*own, *rules, *RENAMED, *FRONTEND, "api_server_count", *TRANSLATED}
        for name in rows(PARTS[part]):
            of = {each for each in known if re.fullmatch(name.replace("*", r"\w*"), each)}
            assert len(of) > 1 and not of & own - {*rows(PARTS[part])} if "*" in name else of == {name}, name


def test_sampling_parameters_that_are_not_vllm_s_have_a_row() -> None:
    section = SECTIONS["Fields of `SamplingParams`"]
    own = fields(SamplingParams) - {*VLLM_SAMPLING}
    assert {name for name in (*own, *FOREIGN) if row(name, section) is None} == set()
    assert all("refused" in (row(name, section) or "") for name in FOREIGN)
    assert [name for name in spec.REFUSED if f"`{name}`" not in section] == []


def test_keys_of_prompts_are_named() -> None:
    named = set(re.findall(r"`([\w*]+)`", SECTIONS["Prompts"]))
    keys = {*REFUSED, "prompt", "prompt_token_ids", "cache_salt"}
    assert {key for key in keys if not any(re.fullmatch(each.replace("*", r"\w*"), key) for each in named)} == set()


def test_outputs_that_are_not_vllm_s_have_a_row() -> None:
    own = fields(CompletionOutput, RequestOutput, Logprob) - {*VLLM_OUTPUTS}
    assert own <= {*rows(SECTIONS["Outputs"])}


def test_every_absent_method_has_a_row() -> None:
    assert set(ABSENT) <= {*rows(SECTIONS["Methods of `LLM`"])}


def test_methods_exist_where_the_page_names_them() -> None:
    for name, said in rows(SECTIONS["Methods of `LLM`"]).items():
        assert hasattr(LLM, name) == (not said.startswith("absent")), name


def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(program, "docs/vllm.md", "exec"), {})
    assert capsys.readouterr().out.startswith("def pop(self): ")
