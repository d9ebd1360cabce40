"""Dynamic trees through the public door: the text of plain decoding, whatever drafts and whichever backend computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.errors import ConfigError
from tests.models import Shape, write_checkpoint

PROMPTS = ["def read(path):", "import os\n\nclass Reader:\n    def"]


def generate(kernels: str, config: dict[str, Any] | None, params: SamplingParams) -> tuple[list[Any], list[Any]]:
    how: dict[str, Any] = {"use_speculative_decoding": False} if config is None else {"speculative_config": config}
    out = LLM("demo", max_model_len=128, kernels=kernels, dtype="float32", **how).generate(PROMPTS, params)
    return [each.outputs[0].token_ids for each in out], [each.metrics.speculative_decoding for each in out]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "seeded"])
def test_text_is_that_of_plain_decoding(method: str, kernels: str, sampling: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, **sampling)
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


@pytest.mark.parametrize("tree", ["deep", {"topk": 0}, {"depth": 33}, {"width": 3}, {"topk": 2.5}])
def test_other_trees_are_refused(tree: Any) -> None:
    with pytest.raises(ConfigError, match="tree="):
        LLM("demo", speculative_config={"method": "draft_model", "model": "demo", "tree": tree}, max_model_len=64)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("method", ["draft_model", "early_exit"])
def test_trees_reach_the_last_learned_position(method: str, kernels: str, tmp_path: Path) -> None:
    """Nodes of one depth share a position, so a tree may have more nodes than positions are left."""
    shape = Shape(family="gpt2", layers=3, max_positions=64, settings=(("n_positions", 64),))
    target = write_checkpoint(tmp_path / "target", shape)
    own: dict[str, Any] = {"model": target} if method == "draft_model" else {"layers": 2}
    config = {"method": method, "tree": "dynamic", "draft_length": "fixed", **own}
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    common: dict[str, Any] = {"dtype": "float32", "kernels": kernels}
    [plain] = LLM(target, use_speculative_decoding=False, **common).generate("def f(a, b):", params)
    llm = LLM(target, speculative_config=config, **common)
    [drafted] = llm.generate("def f(a, b):", params)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert len(plain.prompt_token_ids) + len(plain.outputs[0].token_ids) == 64
    assert llm.engine.metrics.drafter_errors == 0


def test_an_early_exit_keeps_to_the_room_of_its_draft(tmp_path: Path) -> None:
    """The target's cache has room for the draft alone, above all in layers with a window."""
    windows = (("sliding_window", 24), ("use_sliding_window", True), ("max_window_layers", 2))
    target = write_checkpoint(tmp_path / "target", Shape(family="qwen2", layers=4, settings=windows))
    tree = {"topk": 8, "depth": 7}
    config = {"method": "early_exit", "layers": 3, "tree": tree, "num_speculative_tokens": 8, "draft_length": "fixed"}
    common: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 5, "max_num_batched_tokens": 32, "block_size": 4}
    llm = LLM(target, speculative_config=config, **common)
    out = llm.generate(["def f(a, b):", "import os", "x", "def f", "y"], SamplingParams(temperature=0, max_tokens=40))
    assert sum(each.metrics.speculative_decoding.num_draft_tokens for each in out) > 0
    assert llm.engine.metrics.drafter_errors == 0
