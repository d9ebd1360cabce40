"""Forms whose texts name added tokens: the same on every backend, with and without speculation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from speculant import LLM, SamplingParams
from speculant.kernels import usable_sets
from tests.models import Shape, write_checkpoint

pytest.importorskip("llguidance")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # ids 258 to 261
FORMS: dict[str, dict[str, Any]] = {
    "common prefix": {"choice": ["<tool_call>x", "<tool_call>y"]},
    "no common prefix": {"choice": ["<tool_call>x", "plain"]},
    "regex": {"regex": "<think>[a-c]{3}</think>(<tool_call>|[0-9])z"},
    "json": {"json": {"enum": ["<tool_call>x", "<tool_call>y"]}},
    "lark": {"grammar": 'start: "<tool_call>" /[a-z]{2}/ <[258]> "</tool_call>"'},
}
SETTINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"seed": 3}}
KERNELS = ["reference", pytest.param("native", marks=pytest.mark.skipif(not usable_sets(), reason="not built"))]


@pytest.fixture(scope="module", params=[False, True], ids=["added", "special"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tagged")
    paths = [write_checkpoint(folder / name, Shape(noise=noise)) for name, noise in (("target", 0.0), ("near", 0.1))]
    for path in paths:
        file = str(Path(path) / "tokenizer.json")
        tokenizer = Tokenizer.from_file(file)
        tokenizer.add_tokens([AddedToken(tag, special=request.param, normalized=False) for tag in TAGS])
        tokenizer.save(file)
    return paths[0], paths[1]


@pytest.fixture(scope="module", params=KERNELS)
def llm(request: pytest.FixtureRequest, folders: tuple[str, str]) -> LLM:
    return LLM(folders[0], folders[1], dtype="float32", kernels=request.param)


@pytest.mark.covering(1)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("form", FORMS)
def test_forms_that_name_added_tokens_do_not_depend_on_drafts(llm: LLM, form: str, setting: str) -> None:
    """The grammar allows the tokens that it forces."""
    params = SamplingParams(
        max_tokens=40, structured_outputs=FORMS[form], skip_special_tokens=False, **SETTINGS[setting]
    )
    (drafted,), (plain,) = (llm.generate("hi", replace(params, speculation=on)) for on in (None, False))
    assert (drafted.error, drafted.outputs[0].finish_reason) == (None, "stop")
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.metrics.speculative_decoding.num_accepted_draft_tokens > 0, "the forced ones"
