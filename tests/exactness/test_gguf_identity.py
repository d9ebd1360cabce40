"""Speculation changes no text of a GGUF file whose matrices have types of their own, with any drafter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams, plugins
from speculant.kernels.native import usable_sets
from tests.drafters import model_of, options_of, predicting
from tests.gguf_models import convert
from tests.models import VOCAB_SIZE, Shape, write_checkpoint

pytestmark = [
    pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built"),
    pytest.mark.usefixtures("one_thread"),
]
HIDDEN_SIZE = 256
DRAFTERS = plugins.names("speculant.drafting")
KINDS = {
    "token_embd": "Q8_0", "attn_q": "Q4_0", "attn_k": "Q5_1", "attn_v": "Q8_0", "ffn_up": "Q5_1", "ffn_down": "Q5_0",
}  # fmt: skip
HALVES = {"attn_k": "F16", "ffn_up": "BF16"}
PROMPTS = [[70 + place, 71, 72 + place, 80, 71, 72] for place in range(6)]
PARAMS = {
    "greedy": [SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)] * len(PROMPTS),
    "seeded": [SamplingParams(temperature=0.7, seed=place, max_tokens=16, ignore_eos=True) for place in range(6)],
}


@dataclass(frozen=True)
class Files:
    """A target, and a draft that often agrees."""

    target: str
    draft: str


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("files")
    return Files(write_file(folder / "target", 0.0, KINDS), write_file(folder / "draft", 0.02, KINDS | HALVES))


def write_file(folder: Path, noise: float, kinds: dict[str, str]) -> str:
    source = write_checkpoint(folder, Shape(hidden_size=HIDDEN_SIZE, layers=3, noise=noise, tied=True))
    return str(convert(source, folder / "model.gguf", lambda name: kinds.get(name.split(".")[-2], "Q4_1")))


def generate(
    files: Files, params: list[SamplingParams], runs: int = 1, **arguments: Any
) -> tuple[list[list[int]], int, int]:
    """Return the texts of the last run, and how many tokens were drafted and accepted."""
    llm = LLM(files.target, max_model_len=64, **arguments)
    assert "q4_1 6 matrices, q5_1 6, q8_0 4, q4_0 3" in llm.kernels
    outputs = [llm.generate(PROMPTS, params) for _ in range(runs)][-1]
    counted = [out.metrics.speculative_decoding for out in outputs]
    drafted, accepted = (
        sum(getattr(each, name) for each in counted) for name in ("num_draft_tokens", "num_accepted_draft_tokens")
    )
    return [list(out.outputs[0].token_ids) for out in outputs], drafted, accepted


@pytest.fixture(scope="module")
def plain(files: Files) -> dict[str, list[list[int]]]:
    """Return the texts without speculation, each alone."""
    off = {"use_speculative_decoding": False, "max_num_seqs": 1}
    found = {name: generate(files, params, **off)[0] for name, params in PARAMS.items()}
    assert all(len({tuple(text) for text in texts}) > 3 for texts in found.values())
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("distribution", PARAMS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_drafter_changes_a_text(
    drafter: str, distribution: str, files: Files, plain: dict[str, list[list[int]]]
) -> None:
    expected = plain[distribution]
    params = [predicting(drafter, each, text) for each, text in zip(PARAMS[distribution], expected, strict=True)]
    config = {"method": drafter, "num_speculative_tokens": 3, **options_of(drafter, VOCAB_SIZE, expected)}
    model = model_of(drafter, files.draft, HIDDEN_SIZE, VOCAB_SIZE)
    runs = 2 if plugins.load("speculant.drafting", drafter).METHOD.learns else 1
    texts, drafted, accepted = generate(files, params, runs, draft_model=model, speculative_config=config)
    assert texts == expected
    assert drafted > 0
    assert accepted > 0 or model != files.draft, "no draft was accepted: a weak test"
