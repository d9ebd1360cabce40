"""Dynamic trees through the public door: the text of plain decoding, whatever drafts and whichever backend computes."""

from __future__ import annotations

from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.errors import ConfigError

PROMPTS = ["def read(path):", "import os\n\nclass Reader:\n    def"]


def generate(kernels: str, config: dict[str, Any] | None, params: SamplingParams) -> tuple[list[Any], list[Any]]:
    how: dict[str, Any] = {"use_speculative_decoding": False} if config is None else {"speculative_config": config}
    out = LLM("demo", max_model_len=128, kernels=kernels, dtype="float32", **how).generate(PROMPTS, params)
    return [each.outputs[0].token_ids for each in out], [each.metrics.speculative_decoding for each in out]


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "seeded"])
def test_text_is_that_of_plain_decoding(method: str, kernels: str, sampling: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=32, ignore_eos=True, **sampling)
    config = {"method": method, "model": "demo", "tree": "dynamic", "draft_length": "fixed"}
    (texts, figures), (plain, _) = (generate(kernels, each, params) for each in (config, None))
    assert texts == plain
    for figure in figures:
        assert figure.num_accepted_draft_tokens > 5
        assert figure.num_draft_tokens > 5 * figure.num_spec_steps, "eight nodes a step, but for the last ones"


def test_sampled_requests_get_chains() -> None:
    config = {"method": "draft_model", "model": "demo", "tree": {"topk": 3, "depth": 2}, "draft_length": "fixed"}
    _, figures = generate("auto", config, SamplingParams(max_tokens=16, ignore_eos=True))
    for figure in figures:
        assert 0 < figure.num_draft_tokens <= 2 * figure.num_spec_steps


@pytest.mark.parametrize("tree", ["deep", {"topk": 0}, {"width": 3}, {"topk": 2.5}])
def test_other_trees_are_refused(tree: Any) -> None:
    with pytest.raises(ConfigError, match="tree="):
        LLM("demo", speculative_config={"method": "draft_model", "model": "demo", "tree": tree}, max_model_len=64)
