"""Draft models with fewer learned positions than the target: drafts end with them, and nothing is read beyond."""

from __future__ import annotations

from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.kernels import usable_sets
from speculant.models import load_model
from tests.examples import examples
from tests.models import Shape, write_checkpoint
from tests.unit.models.families import Session

BACKENDS = ["reference", *(["native"] if usable_sets() else [])]
LEARNED, SHORT = 200, 40
PROMPTS = [[70 + place % 9 for place in range(length)] for length in (10, 36, 60)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=examples(50, least=36), ignore_eos=True)
DRAFTS: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "chain": {"method": "draft_model", "num_speculative_tokens": 4},
    "tree": {"method": "draft_model", "tree": [2, 2, 1]},
    "cascade": {"method": "cascade"},
    "specinfer": {"method": "specinfer"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return a target and a draft model."""
    folder = tmp_path_factory.mktemp("learned")
    target = Shape(family="gpt2", max_positions=LEARNED)
    draft = Shape(family="gpt2", max_positions=SHORT, noise=0.05)
    return write_checkpoint(folder / "target", target), write_checkpoint(folder / "draft", draft)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_texts_go_on_after_the_draft_s_last_position(drafts: str, kernels: str, folders: tuple[str, str]) -> None:
    target, draft = folders
    plain = LLM(target, kernels=kernels, dtype="float32", use_speculative_decoding=False).generate(PROMPTS, PARAMS)
    llm = LLM(target, kernels=kernels, dtype="float32", draft_model=draft, speculative_config=DRAFTS[drafts] or None)
    outputs = llm.generate(PROMPTS, PARAMS)
    texts, expected = ([out.outputs[0].token_ids for out in each] for each in (outputs, plain))
    assert texts == expected


@pytest.mark.parametrize("kernels", BACKENDS)
def test_a_position_that_no_row_was_learned_for_is_refused(kernels: str, folders: tuple[str, str]) -> None:
    session = Session(load_model(folders[1], "float32", kernels=kernels).model)
    session.extend([70] * SHORT)
    with pytest.raises((ValueError, IndexError)):
        session.extend([70])
