"""A row without a distribution ends its own request with an error; below a drafted node it costs the draft alone."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculant import LLM, RequestOutput, SamplingParams
from speculant.beams import Beams
from speculant.config import Limits
from speculant.drafting import DrafterNeeds
from speculant.engine import advance_sound, verify_sound
from speculant.errors import RequestError, SpeculantError
from speculant.kernels import usable_sets
from speculant.lab.exactness import FULL_SUPPORT, History, Pair, Table, TableModel
from speculant.sampling import Purpose, Stream
from speculant.types import DraftTree, Request, Verdict
from tests.fakes import Rig, ScriptedDrafter, build_rig, known_verifiers, model_drafter
from tests.models import VOCAB_SIZE, write_checkpoint

INF = math.inf
BACKENDS = ["reference", *(["native"] if usable_sets() else [])]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 4},
    "sampled": {"temperature": 0.8},
    "top_k": {"top_k": 5, "top_p": 0.9},
}
EVERY_TOKEN = dict.fromkeys(range(VOCAB_SIZE), -INF)
POISON = 200  # a token whose embedding is NaN
PROMPTS = [[65, 66, 67], [70, 71], [80, 81, 82, 83]]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a checkpoint that produces NaN after one token."""
    folder = write_checkpoint(tmp_path_factory.mktemp("poisoned") / "target")
    weights = load_file(Path(folder) / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, str(Path(folder) / "model.safetensors"))
    return folder


def outputs(model: str, backend: str, draft: bool, params: Sequence[SamplingParams], prompts: Any) -> list[Any]:
    speculative: dict[str, Any] = {"draft_model": model, "spec_length": 3} if draft else {}
    llm = LLM(model=model, dtype="float32", kernels=backend, seed=1, **speculative)
    results = llm.generate(prompts, params)
    assert llm.engine.metrics.repeated_steps == 0, "the neighbours were computed twice"
    return results


def usual_params(settings: str) -> SamplingParams:
    return SamplingParams(max_tokens=8, ignore_eos=True, logit_bias={POISON: -INF}, **SETTINGS[settings])


@functools.cache
def healthy(model: str, backend: str, draft: bool, settings: str) -> list[Any]:
    """Return the outputs of all requests without an error."""
    return outputs(model, backend, draft, [usual_params(settings)] * 3, PROMPTS)


def assert_ended_alone(found: Sequence[RequestOutput], sound: Sequence[RequestOutput], reason: str) -> None:
    """Only the second request ended by an error, before its first token, and the others have their tokens."""
    sample = found[1].outputs[0]
    assert (sample.finish_reason, sample.token_ids) == ("error", [])
    assert reason in str(found[1].error)
    assert "Fix:" in str(found[1].error)
    for place in (0, 2):
        assert found[place].outputs == sound[place].outputs
        assert len(found[place].outputs[0].token_ids) == 8


@pytest.mark.covering(1)
@pytest.mark.parametrize("draft", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_ban_of_all_tokens_is_its_requests_error(backend: str, settings: str, draft: bool, poisoned: str) -> None:
    usual = usual_params(settings)
    banned = dataclasses.replace(usual, logit_bias=EVERY_TOKEN)
    found = outputs(poisoned, backend, draft, [usual, banned, usual], PROMPTS)
    assert_ended_alone(found, healthy(poisoned, backend, draft, settings), "no token is possible")


@pytest.mark.covering(1)
@pytest.mark.parametrize("draft", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_of_the_model_is_its_requests_error(backend: str, settings: str, draft: bool, poisoned: str) -> None:
    prompts = [PROMPTS[0], [70, POISON, 71], PROMPTS[2]]
    found = outputs(poisoned, backend, draft, [usual_params(settings)] * 3, prompts)
    assert_ended_alone(found, healthy(poisoned, backend, draft, settings), "NaN")


PAIR = Pair(5, 4, FULL_SUPPORT)
LOSSLESS = [name for name, verifier in known_verifiers().items() if verifier.lossless]
ROWS = {"nan": [math.nan] * 4, "one nan": [0.0, math.nan, 0.0, 0.0], "inf": [0.0, INF, 0.0, 0.0], "empty": [-INF] * 4}


def failing(row: Sequence[float], when: Any) -> Table:
    """Return the target's table with another row for some histories."""
    return lambda history: row if when(history) else PAIR.target(history)


def rig_of(table: Table, length: int, verification: str = "auto") -> Rig:
    limits = Limits(max_model_len=32, max_num_seqs=2, max_num_batched_tokens=48)
    drafter = model_drafter(TableModel(PAIR.draft, 4), 4, limits=limits) if length else None
    rig = build_rig(TableModel(table, 4), drafter, length=length, limits=limits, verification=verification)
    rig.expected = SpeculantError
    return rig


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"seed": 1}, {"seed": 2, "top_k": 3}])
@pytest.mark.parametrize("row", ROWS)
def test_an_output_fails_in_the_same_place_with_a_draft(row: str, settings: dict[str, Any]) -> None:
    """An error at a drafted node fails no request before its output gets there."""
    table, params = failing(ROWS[row], lambda history: len(history) == 9), SamplingParams(max_tokens=12, **settings)
    texts = []
    for length in (0, 2, 5):
        rig = rig_of(table, length)
        (request,) = rig.add((0, 1), params)
        rig.finish()
        assert (request.ending.reason, request.num_output) == ("error", 7)
        assert isinstance(request.ending.error, RequestError) == (row == "empty")
        texts.append(request.output)
    assert texts[1] == texts[2] == texts[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"seed": 1}, {}])
@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("row", ROWS)
def test_a_failed_row_below_a_draft_costs_that_draft(row: str, verifier: str, settings: dict[str, Any]) -> None:
    """A token that the target never accepts is proposed in every step, and has no distribution after it."""
    never = 3

    def table(history: History) -> Sequence[float]:
        return ROWS[row] if never in history else [*PAIR.target(history)[:3], -INF]

    def guess(request: Request) -> DraftTree:
        return DraftTree.of([0, never, 1, 2], [-1, 0, 1, 2])

    params = SamplingParams(max_tokens=12, logprobs=1, **settings)
    needs = DrafterNeeds()
    rig = build_rig(TableModel(table, 4), ScriptedDrafter(guess, needs), length=4, verification=verifier)
    (request,) = rig.add((0, 1), params)
    rig.finish()
    assert (request.ending.reason, request.num_output, request.ending.error) == ("length", 12, None)
    assert never not in request.output
    assert request.metrics.speculative_decoding.num_accepted_draft_tokens > 0
    if settings:
        plain = build_rig(TableModel(table, 4))
        (alone,) = plain.add((0, 1), params)
        plain.finish()
        assert request.output == alone.output


@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("bad", [0.0, math.nan])
def test_nothing_below_a_failed_row_is_verified(bad: float, verifier: str) -> None:
    """The node itself is accepted by its parent's row, and its token is the last one."""
    tree, p = DraftTree.chain([1, 0, 0, 2]), torch.eye(3, dtype=torch.float64)[[1, 0, 0, 0, 2]]
    p[1] = bad
    chance = Stream(1, (Purpose.ACCEPT, Purpose.DRAW), 0)
    totals = p.sum(-1).tolist()
    assert verify_sound(known_verifiers()[verifier], tree, p, totals, chance) == Verdict((), 1)
    p[1] = torch.tensor([1.0, 0.0, 0.0])
    assert verify_sound(known_verifiers()[verifier], tree, p, [1.0] * 5, chance) == Verdict((0, 1, 2), 0)


def test_failed_prompt_logprobs_are_the_requests_error() -> None:
    rig = rig_of(failing(ROWS["nan"], lambda history: history[:2] == (3, 3)), 0)
    params = SamplingParams(max_tokens=4, prompt_logprobs=0)
    victim, other = (rig.add(prompt, params, str(prompt))[0] for prompt in ((3, 3, 1), (0, 3, 1)))
    rig.finish()
    assert (victim.ending.reason, other.ending.reason) == ("error", "length")
    assert "NaN" in str(victim.ending.error)


def test_a_failed_row_of_a_beam_is_an_error_of_live_ones() -> None:
    beams = Beams(2, 1.0, frozenset(), longest=5, reach=8)
    sound = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    nan = torch.full((1, 3), math.nan, dtype=torch.float64)
    root, drafted = DraftTree.empty(), DraftTree.of([0, 1], [-1, -1])
    assert isinstance(advance_sound(beams, root, [-1], nan, [math.nan]), SpeculantError)
    one = advance_sound(beams, root, [-1], sound, [1.0])
    ahead = advance_sound(beams, drafted, [-1, 0, 1], torch.cat([sound, nan, sound]), [1.0, math.nan, 1.0])
    assert isinstance(one, Beams)
    assert isinstance(ahead, Beams)
    assert [each.tokens() for each in ahead.live] == [each.tokens() for each in one.live], "a drafted hypothesis waits"
    assert [each.tokens() for each in ahead.unscored] == [[0]]
