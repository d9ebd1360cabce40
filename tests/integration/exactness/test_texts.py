"""Texts of a pair are compared with the target's own distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from speculant import plugins
from speculant.config import EngineConfig
from speculant.engine import Runtime, build_engine
from speculant.errors import SpeculantError
from speculant.lab.exactness import (
    ScoredTexts,
    Second,
    Subject,
    TargetReader,
    complete,
    draw_and_score,
    reread,
    score_texts,
)
from speculant.models import load_model
from speculant.params import SamplingParams
from speculant.sampling import Node
from speculant.types import Request
from speculant.verification import Rejection
from tests.drafters import HEADS, model_of, options_of
from tests.faults import accept_always, report_flatter_distributions
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Checkpoints

PROMPTS = [[70, 71, 72], [80] * 9, [90]]
FREE = SamplingParams(max_tokens=40, ignore_eos=True)
DISTRIBUTION = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, repetition_penalty=1.2, ignore_eos=True)

pytestmark = pytest.mark.slow


def pair(checkpoints: Checkpoints, **values: object) -> EngineConfig:
    return EngineConfig.from_arguments(
        **{"model": checkpoints.target, "draft_model": checkpoints.far, "spec_length": 3, "max_num_seqs": 4, **values}
    )


def drawn(config: EngineConfig, texts: int = 40, params: SamplingParams = FREE) -> ScoredTexts:
    return draw_and_score(Subject(config, build_engine(config), PROMPTS, params), texts, lambda part: None)


def z(found: ScoredTexts) -> dict[str, float]:
    return {score.name: score.z for score in found.scores.made}


@pytest.mark.parametrize(
    ("kernels", "verification"), [("auto", "auto"), ("auto", "rejection"), ("auto", "match"), ("reference", "auto")]
)
def test_a_lossless_rule_passes(checkpoints: Checkpoints, kernels: str, verification: str) -> None:
    config = pair(checkpoints, speculative_config={"verification": verification}, kernels=kernels, dtype="float32")
    found = drawn(config)
    assert found.passed
    assert len(z(found)) == 3
    assert found.scores.favourite.num_tokens == 40 * 40
    assert found.speculation.num_accepted_draft_tokens > 100


def test_a_tree_passes(checkpoints: Checkpoints) -> None:
    found = drawn(pair(checkpoints, spec_length=None, speculative_config={"tree": [2, 1]}))
    assert found.passed
    assert found.scores.drafted.num_tokens > 1500


def test_a_rule_that_accepts_always_is_found(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_always(monkeypatch)
    found = drawn(pair(checkpoints, speculative_config={"verification": "rejection"}))
    assert not found.passed
    assert z(found)["q > p"] > 10
    assert z(found)["log p"] < -10


def test_a_draft_distribution_that_was_not_drawn_from_is_found(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_flatter_distributions(monkeypatch)
    found = drawn(pair(checkpoints, speculative_config={"verification": "rejection"}), texts=80)
    assert not found.passed
    assert max(map(abs, z(found).values())) > 5


def test_a_greedy_rule_is_found(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that looks right, from another distribution: rejected drafts are replaced by the likeliest token."""
    decide = Rejection.verify
    monkeypatch.setattr(Rejection, "verify", lambda self, tree, p, chance: decide(self, tree, p**2, chance))
    found = drawn(pair(checkpoints, speculative_config={"verification": "rejection"}))
    assert not found.passed
    assert z(found)["favourite"] > 5


def test_impossible_tokens_fail_where_no_rounding_explains_them(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    filtered = SamplingParams(max_tokens=20, top_k=3, ignore_eos=True)
    assert drawn(pair(checkpoints), 6, filtered).passed
    accept_always(monkeypatch)
    for kernels, bitwise in (("auto", True), ("reference", False)):
        config = pair(checkpoints, speculative_config={"verification": "rejection"}, kernels=kernels)
        found = drawn(config, 6, filtered)
        assert found.scores.impossible > 0
        assert found.bitwise == bitwise
        assert found.to_list()[-1]["passed"] is not bitwise


# --- reading


def texts_of(runtime: Runtime, params: SamplingParams) -> list[Request]:
    return complete(runtime, PROMPTS, [params] * len(PROMPTS))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_reader_sees_the_distributions_drawn_from(checkpoints: Checkpoints, dtype: str) -> None:
    """A seeded token is the argmax of its distribution and the noise of its place."""
    runtime = build_engine(pair(checkpoints, dtype=dtype, max_num_batched_tokens=4))
    (text,) = complete(runtime, [PROMPTS[1]], [replace(DISTRIBUTION, seed=3, speculation=False)])
    reader = TargetReader(runtime, 1, len(text.tokens))
    for place in range(text.num_output):
        here = reread(text, place)
        reader.end(here)
        distribution = reader.distributions([Node(here)])[0]
        here.drafts = replace(here.drafts, shared_noise=True)
        assert distribution_draw(here, distribution) == text.output[place]


def distribution_draw(request: Request, distribution: torch.Tensor) -> int:
    from speculant.sampling import KeyedNoise

    return KeyedNoise(request.seed, len(request.tokens)).draw(distribution)


def test_reading_on_equals_reading_anew(checkpoints: Checkpoints) -> None:
    runtime = build_engine(pair(checkpoints, max_num_batched_tokens=4))
    text = texts_of(runtime, DISTRIBUTION)[1]
    reader, fresh, growing = TargetReader(runtime, 1, 40), TargetReader(runtime, 1, 40), reread(text)
    for place in range(text.num_output):
        whole = reread(text, place)
        assert torch.equal(reader.distributions([Node(growing)]), fresh.distributions([Node(whole)]))
        fresh.end(whole)
        growing.extend([text.output[place]])


def test_the_second_drafter_reports_its_distribution(checkpoints: Checkpoints) -> None:
    config = pair(checkpoints, dtype="float64")
    runtime = build_engine(config)
    draft = load_model(checkpoints.far, "float64", role="draft")
    text = texts_of(runtime, DISTRIBUTION)[0]
    alone = TargetReader(replace(runtime, checkpoint=draft), 1, 40)
    second, copy = Second(config, runtime, 1, 40), reread(text)
    second.begin(copy)
    for token in text.output:
        q, rows = second.distributions([copy], torch.zeros(1, runtime.checkpoint.model.vocab_size, dtype=torch.float64))
        assert rows == [0]
        assert (q - alone.distributions([Node(copy)])).abs().max() < 1e-12
        copy.extend([token])


@pytest.mark.parametrize("method", plugins.names("speculant.drafting"))
def test_the_next_draft_is_fixed_before_the_token_is_known(checkpoints: Checkpoints, method: str) -> None:
    """A drafter that had learned the text would let a correct sampler fail."""
    config = pair(
        checkpoints,
        draft_model=model_of(method, checkpoints.near, HIDDEN_SIZE, VOCAB_SIZE),
        speculative_config={"method": method, **options_of(method, VOCAB_SIZE, PROMPTS)},
    )
    runtime = build_engine(config)
    texts = [text for _ in range(8) for text in texts_of(runtime, FREE)]
    scores = score_texts(config, runtime, texts)
    assert abs(scores.drafted.z) < 4
    assert method not in HEADS or scores.drafted.num_tokens > 900, "it saw no states"


@cache
def engine(target: str, draft: str) -> Runtime:
    return build_engine(EngineConfig(target, draft, max_num_seqs=2))


@pytest.mark.parametrize("alone", [True, False])
def test_texts_come_in_the_order_of_their_prompts(checkpoints: Checkpoints, alone: bool) -> None:
    runtime = engine(checkpoints.target, checkpoints.near)
    params = [SamplingParams(max_tokens=count) for count in (2, 9, 4)]
    texts = complete(runtime, PROMPTS, params, alone)
    assert [list(text.prompt) for text in texts] == PROMPTS
    assert all(text.num_output <= each.max_tokens for text, each in zip(texts, params, strict=True))  # type: ignore[operator]


def test_stop_strings_end_texts(checkpoints: Checkpoints) -> None:
    runtime = engine(checkpoints.target, checkpoints.near)
    letters: Sequence[str] = [chr(code) for code in range(65, 123)]
    texts = complete(runtime, PROMPTS, [SamplingParams(max_tokens=200, stop=letters, ignore_eos=True)] * 3)
    assert all(text.ending is not None and text.ending.reason == "stop" for text in texts)


def test_an_error_of_a_text_is_raised(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(*arguments: object) -> None:
        raise ArithmeticError("no verdict")

    config = pair(checkpoints, speculative_config={"verification": "rejection"})
    runtime = build_engine(config)
    monkeypatch.setattr(Rejection, "verify", breaking)
    with pytest.raises(SpeculantError, match="ArithmeticError: no verdict"):
        texts_of(runtime, FREE)
