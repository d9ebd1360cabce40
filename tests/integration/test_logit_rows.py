"""The head, a model's largest matrix, multiplies only the rows whose logits are read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from speculant import LLM, SamplingParams
from speculant.kernels import Draft, Kernels, Op, Pass, usable_sets
from speculant.models import Decoder, NativeDecoder
from tests.models import Shape, write_checkpoint

CHUNK, OUTPUT = 16, 20
PROMPTS = ["a" * 50, "b" * 33, "c" * 5]  # a token each
KERNELS = ["reference", *(["native"] if usable_sets() else [])]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"use_speculative_decoding": False},
    "lookup": {"method": "ngram"},
    "draft model": {"method": "draft_model"},
    "tree": {"method": "specinfer"},
    "cascade": {"method": "cascade", "inner": {"method": "ngram"}},
}


class Counts(Counter[str]):
    """Rows that a head multiplies, and rows of passes, by the number of the model's layers: a draft model has one."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for kind in (Decoder, NativeDecoder):
            self._count_logits(monkeypatch, kind)
        draft = Kernels.draft

        def drafting(kernels: Kernels, ops: Any, head: Op, on: Pass, drawn: Draft) -> None:
            draft(kernels, ops, head, on, drawn)
            self["drafts"] += drawn.sequences

        monkeypatch.setattr(Kernels, "draft", drafting)

    def _count_logits(self, monkeypatch: pytest.MonkeyPatch, kind: type[Decoder] | type[NativeDecoder]) -> None:
        logits, forward = kind.logits, kind.forward

        def counted(model: Any, hidden: Tensor) -> Tensor:
            self[f"logits {model.num_layers}"] += len(hidden)
            return logits(model, hidden)

        def passed(model: Any, batch: Any, *others: Any, **named: Any) -> Any:
            self[f"rows {model.num_layers}"] += len(batch.tokens)
            return forward(model, batch, *others, **named)

        monkeypatch.setattr(kind, "logits", counted)
        monkeypatch.setattr(kind, "forward", passed)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    made = Counts()
    made.install(monkeypatch)
    return made


def open_llm(folder: Path, way: str, kernels: str) -> LLM:
    target, draft = (write_checkpoint(folder / str(layers), Shape(layers=layers)) for layers in (2, 1))
    own = {**WAYS[way]}
    if "method" in own:
        own = {**own, "num_speculative_tokens": 3, "draft_length": "fixed"}
        own |= {"model": draft} if way != "lookup" else {}
        own = {"speculative_config": own}
    return LLM(target, kernels=kernels, max_num_batched_tokens=CHUNK, max_num_seqs=3, dtype="float32", **own)


@pytest.mark.covering(2)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_only_rows_that_are_read_have_logits(
    tmp_path: Path, counts: Counts, way: str, kernels: str, temperature: float
) -> None:
    """The target: a row for each sequence and pass that samples, and one for each drafted token."""
    llm = open_llm(tmp_path, way, kernels)
    counts.clear()
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=OUTPUT, ignore_eos=True)
    metrics = [each.metrics for each in llm.generate(PROMPTS, params)]
    drafted = sum(each.speculative_decoding.num_draft_tokens for each in metrics)
    assert counts["logits 2"] == sum(each.timing.sampled_passes for each in metrics) + drafted
    assert counts["rows 2"] >= sum(map(len, PROMPTS)) + drafted
    if way == "draft model":
        steps = sum(each.speculative_decoding.num_spec_steps for each in metrics)
        assert drafted > 0
        assert counts["drafts"] == steps if kernels == "native" else counts["logits 1"] == drafted


@pytest.mark.parametrize("kernels", KERNELS)
def test_log_probabilities_of_a_prompt_read_each_row_once(tmp_path: Path, counts: Counts, kernels: str) -> None:
    llm = open_llm(tmp_path, "plain", kernels)
    counts.clear()
    llm.generate(PROMPTS, SamplingParams(max_tokens=OUTPUT, ignore_eos=True, prompt_logprobs=1, n=2))
    assert counts["logits 2"] == sum(len(prompt) - 1 for prompt in PROMPTS) + 2 * OUTPUT * len(PROMPTS)
