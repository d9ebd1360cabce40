"""Speculation changes no text of a GPTQ checkpoint with act-order, zero points and several types, with any drafter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams, plugins
from speculant.kernels.native import usable_sets
from tests.drafters import model_of, options_of, predicting
from tests.models import VOCAB_SIZE, Shape, write_checkpoint
from tests.quantised_folders import Gptq, edit_config, quantise

pytestmark = [
    pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built"),
    pytest.mark.usefixtures("one_thread"),
]
HIDDEN_SIZE = 64
DRAFTERS = plugins.names("speculant.drafting")
QUICK = DRAFTERS[::7]
MIX = Gptq(
    act_order=True,
    modules={"k_proj": {"act_order": False}, "v_proj": None, "up_proj": {"sym": True}, "down_proj": {"bits": 8}},
)
PROMPTS = [[70 + place, 71, 72 + place, 80, 71, 72] for place in range(6)]
PARAMS = {
    "greedy": [SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)] * len(PROMPTS),
    "seeded": [SamplingParams(temperature=0.7, seed=place, max_tokens=16, ignore_eos=True) for place in range(6)],
}


@dataclass(frozen=True)
class Folders:
    """A target, and a draft that often agrees."""

    target: str
    draft: str


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("folders")
    return Folders(write_folder(root / "target", 0.0), write_folder(root / "draft", 0.02))


def write_folder(root: Path, noise: float) -> str:
    source = Path(write_checkpoint(root / "plain", Shape(hidden_size=HIDDEN_SIZE, layers=3, noise=noise)))
    quantise(source, root / "packed", root / "numbers", MIX)
    edit_config(root / "packed", quantization_config={**MIX.config, "dynamic": {"-:.*v_proj": {}}})
    return str(root / "packed")


def generate(
    folders: Folders, params: list[SamplingParams], runs: int = 1, **arguments: Any
) -> tuple[list[list[int]], int, int]:
    """Return the texts of the last run, and how many tokens were drafted and accepted."""
    llm = LLM(folders.target, max_model_len=64, **arguments)
    outputs = [llm.generate(PROMPTS, params) for _ in range(runs)][-1]
    counted = [out.metrics.speculative_decoding for out in outputs]
    drafted, accepted = (
        sum(getattr(each, name) for each in counted) for name in ("num_draft_tokens", "num_accepted_draft_tokens")
    )
    return [list(out.outputs[0].token_ids) for out in outputs], drafted, accepted


@pytest.fixture(scope="module")
def plain(folders: Folders) -> dict[str, list[list[int]]]:
    """Return the texts without speculation, each alone."""
    off = {"use_speculative_decoding": False, "max_num_seqs": 1}
    found = {name: generate(folders, params, **off)[0] for name, params in PARAMS.items()}
    assert all(len({tuple(text) for text in texts}) > 3 for texts in found.values())
    return found


def test_the_kernels_multiply_by_every_type(folders: Folders) -> None:
    kernels = LLM(folders.target, max_model_len=64).kernels
    assert all(words in kernels for words in ("zero4 12 matrices", "q4_0 3", "zero8 3")), kernels


@pytest.mark.covering(1)
@pytest.mark.parametrize("distribution", PARAMS)
@pytest.mark.parametrize(
    "drafter", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in DRAFTERS]
)
def test_no_drafter_changes_a_text_of_gptq(
    drafter: str, distribution: str, folders: Folders, plain: dict[str, list[list[int]]]
) -> None:
    expected = plain[distribution]
    params = [predicting(drafter, each, text) for each, text in zip(PARAMS[distribution], expected, strict=True)]
    config = {"method": drafter, "num_speculative_tokens": 3, **options_of(drafter, VOCAB_SIZE, expected)}
    model = model_of(drafter, folders.draft, HIDDEN_SIZE, VOCAB_SIZE)
    runs = 2 if plugins.load("speculant.drafting", drafter).METHOD.learns else 1
    texts, drafted, accepted = generate(folders, params, runs, draft_model=model, speculative_config=config)
    assert texts == expected
    assert drafted > 0
    assert accepted > 0 or model != folders.draft, "no draft was accepted: a weak test"
