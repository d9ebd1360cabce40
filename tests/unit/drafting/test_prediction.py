"""Predictions of the output: followed, left, found again; and refused where nothing reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from speculant import LLM, AsyncEngine, SamplingParams
from speculant.drafting import LONGEST_MATCH, Alignment, DrafterNeeds, DrafterReads, Drafters, PredictionDrafter
from speculant.errors import ConfigError, RequestError
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel
from speculant.params import MAX_PREDICTION
from tests.fakes import ScriptedDrafter, build_rig
from tests.models import VOCAB_SIZE, Checkpoints, make_request

TEXT = list(range(100, 130))


def ahead(prediction: Sequence[int], output: Sequence[int], limit: int = 4) -> list[int]:
    """The proposal after an output, whose prompt has the prediction's tokens."""
    drafter, request = PredictionDrafter(), make_request(TEXT, output, prediction=tuple(prediction))
    drafter.begin(request)
    return drafter.propose([request], [limit])[0].token_list


def test_prediction_is_proposed_from_its_beginning() -> None:
    assert ahead(TEXT, []) == [100, 101, 102, 103]
    assert ahead(TEXT, [100, 101]) == [102, 103, 104, 105]


def test_prediction_ends_with_its_tokens() -> None:
    assert ahead(TEXT, TEXT[:-2]) == [128, 129]
    assert ahead(TEXT, TEXT) == []
    assert ahead([], [1, 2]) == []


DEPARTURES: dict[str, tuple[list[int], list[int]]] = {
    "nothing in common": ([100, 7], []),
    "another token": ([100, 101, 7, 103], [104, 105]),
    "two other tokens": ([100, 7, 8, 103], [104, 105]),
    "left out": ([100, 101, 110], [111, 112]),
    "put in": ([100, 101, 7, 8, 9, 102], [103, 104]),
    "a single token decides only forwards": ([100, 101, 102, 103, 100], []),
    "two tokens decide backwards too": ([*TEXT[:10], 100, 101], [102, 103]),
    "again from the end": ([*TEXT, 100, 101], [102, 103]),
}


@pytest.mark.parametrize("name", DEPARTURES)
def test_prediction_is_found_again(name: str) -> None:
    output, expected = DEPARTURES[name]
    assert ahead(TEXT, output, 2) == expected


def test_prediction_is_found_by_the_longest_match() -> None:
    text = [1, 2, 3, 50, 9, 2, 3, 60, 8, 1, 2, 3, 70]
    assert ahead(text, [7, 1, 2, 3], 1) == [50], "the first of two equal matches"
    assert ahead(text, [9, 2, 3], 1) == [60], "longer than the first"
    assert ahead(text, [1, 2, 3, 50, 7, 1, 2, 3], 1) == [70], "of equal matches the one behind what was used"
    assert ahead(text, [*text, 9, 2, 3], 1) == [60], "before what was used, where there is none behind it"


def test_prediction_matches_the_output_alone() -> None:
    """The prompt ends like the prediction's middle; only the output determines the place."""
    drafter, request = PredictionDrafter(), make_request([1, 2], [3], prediction=(5, 3, 60, 1, 2, 3, 70))
    drafter.begin(request)
    assert drafter.propose([request], [1])[0].token_list == [60]


def test_prediction_scores_grow_with_agreement() -> None:
    drafter, request = PredictionDrafter(), make_request([1], [*TEXT[:5], 7, 106, 107], prediction=tuple(TEXT))
    drafter.begin(request)
    (tree,) = drafter.propose([request], [3])
    assert tree.scores == pytest.approx([3 / 4, 4 / 5, 5 / 6])  # two tokens have agreed since
    fresh = make_request([1], [], prediction=tuple(TEXT), seq_id=2)
    drafter.begin(fresh)
    assert drafter.propose([fresh], [2])[0].scores == pytest.approx([1 / 2, 2 / 3])


small = st.lists(st.integers(0, 3), max_size=40)


@given(prediction=small, output=small, parts=st.lists(st.integers(0, 7), max_size=12))
def test_prediction_place_does_not_depend_on_the_parts(
    prediction: list[int], output: list[int], parts: list[int]
) -> None:
    whole, stepwise, end = Alignment(prediction, 0), Alignment(prediction, 0), 0
    for part in parts:
        end = min(len(output), end + part)
        stepwise.read(output[:end])
    stepwise.read(output)
    whole.read(output)
    assert (whole.place, whole.run) == (stepwise.place, stepwise.run)
    if whole.place is not None and output:
        run = min(whole.run, LONGEST_MATCH)
        assert prediction[whole.place - run : whole.place] == output[len(output) - run :], "what agrees, agrees"


def engine_of(**needs: Any) -> Drafters:
    return Drafters(
        {"reader": ScriptedDrafter(lambda request: request.drafts.prediction, DrafterNeeds(**needs))}, "reader"
    )


def asking(prediction: object, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=3, speculation={"prediction": prediction, **more})


def test_prediction_reaches_drafters_that_read_it() -> None:
    rig = build_rig(
        TableModel(Pair(1, 6, FULL_SUPPORT).target, 6), engine_of(reads=DrafterReads(prediction=True)), length=2
    )
    assert rig.add([1], asking([2, 3]))[0].drafts.prediction == (2, 3)
    assert rig.add([1], SamplingParams(), "b")[0].drafts.prediction == ()
    with pytest.raises(RequestError, match="not a token id from 0 to 5"):
        rig.add([1], asking([2, 6]), "c")
    with pytest.raises(RequestError, match="not a token id"):
        rig.add([1], asking(["x"]), "d")
    with pytest.raises(RequestError, match="text and the engine handles tokens"):
        rig.add([1], asking("text"), "e")


def test_prediction_that_nothing_reads_is_refused() -> None:
    target = TableModel(Pair(1, 6, FULL_SUPPORT).target, 6)
    with pytest.raises(RequestError, match=r"(?s)the drafter 'reader', which does not read it.*Fix"):
        build_rig(target, engine_of(), length=2).add([1], asking([2]))
    with pytest.raises(RequestError, match=r"(?s)no drafter.*Fix"):
        build_rig(target).add([1], asking([2]))


@pytest.mark.parametrize("prediction", [5, {"a": 1}, "x" * (MAX_PREDICTION + 1), [1] * (MAX_PREDICTION + 1)])
def test_prediction_has_a_type_and_a_bound(prediction: object) -> None:
    with pytest.raises(ConfigError, match="the prediction"):
        asking(prediction)


def test_prediction_text_is_tokenised_for_the_engine(checkpoints: Checkpoints) -> None:
    """It need not be configured: the method is made when a request names it."""
    llm = LLM(checkpoints.target, dtype="float64")
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (expected,) = llm.generate("def f(", plain)
    text = expected.outputs[0].text
    drafted = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, speculation={"method": "prediction", "prediction": text}
    )
    (found,) = llm.generate("def f(", drafted)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    speculation = found.metrics.speculative_decoding
    assert speculation.num_accepted_draft_tokens > 15
    assert found.metrics.timing.target_passes < 8
    with pytest.raises(ConfigError, match="131072"):
        llm.generate("a", SamplingParams(speculation={"method": "prediction", "prediction": "x" * 200_000}))


async def _one(folder: str, prediction: object) -> int:
    settings = {"method": "prediction", "draft_length": "fixed"}  # whatever it costs here
    async with AsyncEngine(folder, dtype="float64", speculative_config=settings) as engine:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, speculation={"prediction": prediction})
        output = await engine.generate([40, 41], params)
        again = SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True, speculation={"prediction": output.outputs[0].text}
        )
        return (await engine.generate([40, 41], again)).metrics.speculative_decoding.num_accepted_draft_tokens


def test_prediction_comes_through_the_async_engine(checkpoints: Checkpoints) -> None:
    import asyncio

    assert asyncio.run(_one(checkpoints.target, [1, 2])) > 4
    with pytest.raises(RequestError, match=str(VOCAB_SIZE)):
        asyncio.run(_one(checkpoints.target, [VOCAB_SIZE]))
