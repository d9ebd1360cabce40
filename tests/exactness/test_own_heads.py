"""A Qwen3.5 target, whose layers have states, with a head of its own: no draft changes a text."""

from __future__ import annotations

import pytest

from speculant.kernels import usable_sets
from tests.exactness.identity import Job, params_of, prompts_of
from tests.heads import write_with_head
from tests.models import HIDDEN_SIZE, VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("one_thread")

ENGINES = {
    "reference": {"dtype": "float64", "kernels": "reference"},
    **({name: {"dtype": name, "kernels": "native"} for name in ("float32", "bfloat16")} if usable_sets() else {}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_with_head(tmp_path_factory.mktemp("qwen3_5"))


@pytest.mark.parametrize("distribution", ["greedy", "seeded"])
@pytest.mark.parametrize("engine", ENGINES)
def test_texts_are_those_of_plain_decoding(target: str, engine: str, distribution: str) -> None:
    """Random heads: nearly every draft is rejected."""
    params = params_of(4, 16)[distribution]
    job = Job(target, prompts_of(4), (HIDDEN_SIZE, VOCAB_SIZE), {"max_model_len": 32, **ENGINES[engine]})
    plain = job.plain(params)
    for batch, length in ((4, 3), (1, 5)):
        config = {"method": "mtp", "num_speculative_tokens": length}
        texts, drafted, accepted = job.generate(params, speculative_config=config, max_num_seqs=batch)
        assert texts == plain
        assert drafted > accepted
