"""The drafter of chosen quality: it replays earlier outputs, with errors at the chosen rate."""

from __future__ import annotations

import pytest

from speculant.drafting import SyntheticDrafter, SyntheticOptions
from speculant.errors import ConfigError
from tests.models import make_request

SCRIPT = [token % 50 for token in range(400)]


def taught(rate: float, script: list[int] = SCRIPT, vocab_size: int = 50) -> SyntheticDrafter:
    drafter = SyntheticDrafter(SyntheticOptions(acceptance_rate=rate), vocab_size)
    drafter.end(make_request([1, 2], script, reason="length"))
    return drafter


def proposal(drafter: SyntheticDrafter, output: list[int], limit: int) -> list[int]:
    (tree,) = drafter.propose([make_request([1, 2], output)], [limit])
    return tree.token_list


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_the_chosen_share_of_tokens_is_right(rate: float) -> None:
    proposed = proposal(taught(rate), [], len(SCRIPT))
    kept = sum(a == b for a, b in zip(proposed, SCRIPT, strict=True)) / len(SCRIPT)
    assert kept == pytest.approx(rate, abs=0 if rate in (0, 1) else 0.08)
    assert all(0 <= token < 50 for token in proposed)


def test_it_goes_on_from_where_the_request_is() -> None:
    drafter = taught(1.0)
    assert proposal(drafter, SCRIPT[:7], 3) == SCRIPT[7:10]
    assert proposal(drafter, SCRIPT[:398], 5) == SCRIPT[398:]
    assert proposal(drafter, SCRIPT, 5) == []


def test_a_position_is_right_or_wrong_however_it_is_reached() -> None:
    drafter = taught(0.5)
    assert proposal(drafter, SCRIPT[:3], 9)[4:] == proposal(drafter, SCRIPT[:7], 5)


def test_an_unknown_prompt_gets_no_draft() -> None:
    for unknown in (make_request([2, 1]), make_request([1, 2], source=(3,))):
        (tree,) = taught(1.0).propose([unknown], [5])
        assert tree.size == 0


def test_the_longest_finished_continuation_is_remembered() -> None:
    drafter = taught(1.0, [1, 2, 3])
    drafter.end(make_request([1, 2], [9], reason="stop"))
    drafter.end(make_request([1, 2], [8, 8, 8, 8]))
    assert proposal(drafter, [], 9) == [1, 2, 3]


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_is_a_probability(rate: float) -> None:
    with pytest.raises(ConfigError, match="acceptance_rate"):
        SyntheticOptions(acceptance_rate=rate)
