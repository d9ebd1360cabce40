"""Speculation never changes a text: greedy and seeded output, token for token, on the embedded pair.

In float64 no rounding can decide between two tokens, so equality is asked for without exception. In
float32 and bfloat16 torch's kernels give a row slightly different bits when other rows are beside
it: there a text may differ, but only where two tokens are as good as equally likely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import pytest

from speculant import LLM, SamplingParams, plugins
from speculant.kernels import usable_sets
from speculant.lengths import Adaptive, Calibration, CostCurve, StepCosts
from tests.drafters import BLIND
from tests.exactness.identity import Job, Texts
from tests.exactness.selection import combinations, slow_but
from tests.examples import examples

STEMS = [
    "def read(path):", "class Stack:", "import os\nimport sys\n", "for name in names:", "def main(argv=None):",
    "    try:\n", "if __name__ ==", "class TestParser(unittest.TestCase):", "# Return the", "    def __init__(self,",
]  # fmt: skip
BODIES = ["", "\n", '\n    """Return', " x = 1\n", "\n    self.assertEqual("]
PROMPTS = [stem + body for stem in STEMS for body in BODIES]  # 50

DISTRIBUTIONS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1},
}
NATIVE = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "12bit": {"dtype": "bfloat16", "weight_packing": "12bit"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
ENGINES = {"float64": {"dtype": "float64"}, **{name: {"kernels": "native", **own} for name, own in NATIVE.items()}}
SPEC_LENGTHS = (1, 2, 4, 8)
DRAFTERS = plugins.names("speculant.drafting")
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
HIDDEN_SIZE, VOCAB_SIZE = 256, 8192


@dataclass(frozen=True)
class Work:
    """The prompts that are run, and how far."""

    every: int
    tokens: int

    @property
    def prompts(self) -> list[str]:
        return PROMPTS[:: self.every]


FEW, SHORT, LONG = Work(every=17, tokens=16), Work(every=13, tokens=examples(20, least=14)), Work(every=7, tokens=48)

pytestmark = pytest.mark.usefixtures("one_thread")


def params(distribution: str, work: Work) -> list[SamplingParams]:
    """One set per prompt; seeded ones get a seed each."""
    seeds = [None if distribution == "greedy" else 1000 + i for i in range(len(work.prompts))]
    return [
        SamplingParams(**DISTRIBUTIONS[distribution], seed=seed, max_tokens=work.tokens, ignore_eos=True)
        for seed in seeds
    ]


def job_of(work: Work, engine: Mapping[str, str]) -> Job:
    return Job("demo", work.prompts, (HIDDEN_SIZE, VOCAB_SIZE), {"max_model_len": 256, **engine})


@cache
def plain_texts(distribution: str, work: Work, engine: tuple[tuple[str, str], ...]) -> Texts:
    """Return the text of each prompt alone, without speculation."""
    return job_of(work, dict(engine)).plain(params(distribution, work), least=len(work.prompts) // 2)


def check_identity(
    drafter: str,
    distribution: str,
    spec_length: int,
    work: Work,
    engine: dict[str, str],
    options: Mapping[str, Any] = NO_OPTIONS,
) -> None:
    """Compare plain texts with those of one drafter at one draft length, 8 at a time, and alone in `make test-all`."""
    plain = plain_texts(distribution, work, tuple(engine.items()))
    job = job_of(work, engine)
    for batch in (8, 1)[: examples(2, least=1)]:
        accepted = job.check(
            drafter, "demo", params(distribution, work), plain, spec_length, max_num_seqs=batch, options=options
        )
        assert accepted > 0 or drafter in BLIND, "nothing was ever accepted, so nothing was shown"


FLOAT64 = {(4, "draft_model", "greedy")}


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("spec_length", "drafter", "distribution"),
    combinations(lambda *each: each in FLOAT64, SPEC_LENGTHS, DRAFTERS, DISTRIBUTIONS),
)
def test_text_is_identical_in_float64(drafter: str, distribution: str, spec_length: int) -> None:
    check_identity(drafter, distribution, spec_length, FEW, ENGINES["float64"])


ON_NATIVE = {  # all drafters: test_family_identity.py
    ("float32", 8, "early_exit", "seeded"),
    ("bfloat16", 1, "eagle3", "greedy"),
    ("12bit", 4, "suffix", "seeded"),
    ("int8", 4, "specinfer", "greedy"),
    ("int4", 2, "merge", "seeded"),
}


@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("weights", "spec_length", "drafter", "distribution"),
    combinations(lambda *each: each in ON_NATIVE, NATIVE, SPEC_LENGTHS, DRAFTERS, DISTRIBUTIONS),
)
def test_text_is_identical_on_the_native_kernels(
    weights: str, drafter: str, distribution: str, spec_length: int
) -> None:
    """No bit of a row depends on its neighbours, so the texts are equal without a tolerance."""
    check_identity(drafter, distribution, spec_length, SHORT, ENGINES[weights])


@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
@pytest.mark.parametrize("distribution", slow_but(["seeded"], DISTRIBUTIONS))
def test_text_is_identical_in_any_packing(distribution: str) -> None:
    """Weights in 12 bits are the plain ones."""
    plain, coded = (
        plain_texts(
            distribution, SHORT, tuple({"dtype": "bfloat16", "kernels": "native", "weight_packing": each}.items())
        )
        for each in ("plain", "12bit")
    )
    assert coded == plain


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("spec_length", SPEC_LENGTHS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("weights", ENGINES if usable_sets() else ["float64"])
def test_long_texts_are_identical(weights: str, drafter: str, distribution: str, spec_length: int) -> None:
    check_identity(drafter, distribution, spec_length, LONG, ENGINES[weights])


@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
@pytest.mark.parametrize(
    ("weights", "distribution"),
    combinations(lambda *each: each == ("int4", "seeded"), NATIVE, DISTRIBUTIONS),
)
def test_text_is_identical_with_trees(weights: str, distribution: str) -> None:
    """Branches that one pass checks change no bit of each other, nor of the accepted path."""
    check_identity("draft_model", distribution, 9, SHORT, ENGINES[weights], {"tree": [3, 2]})


@pytest.mark.parametrize(
    ("weights", "distribution"),
    combinations(
        lambda *each: each in {("float32", "seeded"), ("int8", "greedy")} or not usable_sets(),
        ["float64", *(NATIVE if usable_sets() else ())],
        DISTRIBUTIONS,
    ),
)
def test_text_is_identical_with_drafter_selection(
    weights: str, distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter and the length change from step to step. Costs are given, so that they do so in every run."""
    costs = StepCosts(CostCurve({1: 1.0, 64: 1.3}), {"fallback": {1: CostCurve({1: 0.02, 16: 0.32})}})
    monkeypatch.setattr(Calibration, "costs", lambda self: costs)
    monkeypatch.setattr(Adaptive, "_follow", lambda self, *seen: None)
    monkeypatch.setattr(Adaptive, "_follow_plain", lambda self, *seen: None)
    plain, config = (
        plain_texts(distribution, SHORT, tuple(ENGINES[weights].items())),
        {"method": "fallback", "draft_length": "adaptive"},
    )
    for batch in (8, 1)[: examples(2, least=1)]:
        texts, _, accepted = job_of(SHORT, ENGINES[weights]).generate(
            params(distribution, SHORT), 2, draft_model="demo", speculative_config=config, max_num_seqs=batch
        )  # the second time the texts are known
        assert texts == plain, f"{batch} at a time"
        assert accepted > 0


@pytest.mark.parametrize(("dtype", "near"), [pytest.param("float32", 1e-3, marks=pytest.mark.slow), ("bfloat16", 0.25)])
def test_a_difference_on_torch_kernels_is_a_near_tie(dtype: str, near: float) -> None:
    """The first differing token is as likely in the plain run, up to `near` nats."""
    prompts = PROMPTS[:: 50 // examples(10, least=2)]
    tokens = examples(64, least=24)
    distributions = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)] * len(prompts)
    plain = LLM("demo", dtype=dtype, max_num_seqs=1, max_model_len=256, kernels="reference").generate(
        prompts, distributions
    )
    drafted = LLM(
        "demo", "demo", spec_length=4, max_num_seqs=8, max_model_len=256, dtype=dtype, kernels="reference"
    ).generate(prompts, distributions)
    for one, other in zip(plain, drafted, strict=True):
        chosen, entries = one.outputs[0].token_ids, one.outputs[0].logprobs or []
        for mine, token, entry in zip(chosen, other.outputs[0].token_ids, entries, strict=True):
            if mine != token:
                assert token in entry, "the other token was not even the sibling"
                assert entry[mine].logprob - entry[token].logprob <= near
                break
