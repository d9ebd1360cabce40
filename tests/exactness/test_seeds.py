"""A seed fixes the text: with speculation on or off, alone or in any batch. Without one, nothing repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from speculant.config import Limits
from speculant.drafting import Drafter, NgramDrafter, NgramOptions
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel
from speculant.params import SamplingParams
from tests.exactness.selection import slow_but
from tests.fakes import build_rig, model_drafter

V = 4
PAIR = Pair(3, V, FULL_SUPPORT)
LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
LENGTH = 24
DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "model": lambda: model_drafter(TableModel(PAIR.draft, V), V, limits=LIMITS),
    "ngram": lambda: NgramDrafter(NgramOptions()),
}


def texts(
    settings: Sequence[SamplingParams], drafter: str = "none", seed: int = 0, verifier: str = "auto"
) -> list[list[int]]:
    """Run all requests together; return their outputs, sample by sample."""
    rig = build_rig(
        TableModel(PAIR.target, V), DRAFTERS[drafter](), length=3, limits=LIMITS, seed=seed, verification=verifier
    )
    requests = [request for i, each in enumerate(settings) for request in rig.add((0, 1), each, str(i))]
    rig.finish()
    return [request.output for request in requests]


def seeded(seed: int | None) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=LENGTH)


def test_a_seed_overrides_the_configured_rule() -> None:
    assert texts([seeded(5)], "model", verifier="rejection") == texts([seeded(5)])


def test_a_per_request_switch_changes_no_seeded_text() -> None:
    plain = texts([seeded(5)])[0]
    for speculation in (False, {"num_speculative_tokens": 1}, {"num_speculative_tokens": 5}, {"verification": "match"}):
        switched = SamplingParams(seed=5, max_tokens=LENGTH, speculation=speculation)
        assert texts([switched, seeded(9)], "model")[0] == plain


@pytest.mark.parametrize("drafter", slow_but(["none", "model"], DRAFTERS))
def test_a_seed_repeats_and_another_does_not(drafter: str) -> None:
    first, again, other = texts([seeded(1), seeded(1), seeded(2)], drafter)
    assert first == again != other
    assert texts([seeded(1)], drafter, seed=99) == [first]  # the engine's own seed does not matter


@pytest.mark.parametrize("drafter", slow_but(["none", "model"], DRAFTERS))
def test_without_a_seed_nothing_repeats(drafter: str) -> None:
    first, second = texts([seeded(None), seeded(None)], drafter)
    assert first != second
    assert texts([seeded(None)], drafter, seed=1) != [first]
    assert texts([seeded(None)], drafter) == [first]  # but a run does


@pytest.mark.parametrize("seed", [None, 4])
def test_samples_differ(seed: int | None) -> None:
    samples = texts([SamplingParams(n=4, seed=seed, max_tokens=LENGTH)], "model")
    assert len({tuple(sample) for sample in samples}) == 4


@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_rounds_do_not_repeat(verifier: str) -> None:
    """With p = q = a fair coin, a stream that starts anew every round gives the same token every time."""
    fair = TableModel(lambda history: [0.0, 0.0], 2)
    drafter = model_drafter(TableModel(lambda history: [0.0, 0.0], 2), 2, limits=LIMITS)
    rig = build_rig(fair, drafter, length=1, verification=verifier, limits=LIMITS)
    (request,) = rig.add((0,), SamplingParams(max_tokens=60))
    rig.finish()
    drafts, others = request.output[::2], request.output[1::2]
    assert {0, 1} == set(drafts) == set(others)
