"""The proofs cover every rule in use, and fail for wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from speculant.config import SpeculativeConfig
from speculant.drafting.base import DrafterContext
from speculant.drafting.model import draft_model
from speculant.engine.build import build_verifiers, load_verifiers
from speculant.lab.exactness import proofs
from speculant.lab.exactness.proofs import (
    CHAINS,
    TREES,
    Claim,
    Likeliest,
    Proof,
    TableDrafter,
    choose_draft,
    claims,
    prove,
)
from speculant.lab.exactness.tables import EXACT
from speculant.params import SamplingParams
from speculant.sampling.chance import Chance
from speculant.types import DraftTree, Request, Verdict
from speculant.verification import rejection
from tests.faults import accept_always, report_flatter_distributions
from tests.models import make_request

VERIFIERS = load_verifiers()
ENDLESS = SamplingParams(max_tokens=None)
MODEL = SpeculativeConfig(model="any")
TREE = SpeculativeConfig(model="any", options={"tree": [2, 1]})
PLAIN_TO_SEE = 1e-3


def proof(spec: SpeculativeConfig, verifier: str, cases: int = 16, params: SamplingParams = ENDLESS) -> Proof:
    verifiers, _ = build_verifiers(spec)
    return prove(
        Claim(verifier, verifiers[verifier].lossless, ["sampled"], params, cases),
        choose_draft(spec, verifiers),
        verifiers,
    )


@pytest.mark.parametrize("verifier", [name for name, verifier in VERIFIERS.items() if verifier.lossless])
def test_every_lossless_rule_is_proven_for_a_chain(verifier: str) -> None:
    found = proof(MODEL, verifier)
    assert found.passed
    assert found.cases == 16
    assert found.mean_accepted > 0.3
    assert set(found.sizes) == set(CHAINS)


@pytest.mark.parametrize(
    "verifier",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "match" else [])  # the chains above have it
        for name, verifier in VERIFIERS.items()
        if verifier.lossless and verifier.needs.branches
    ],
)
def test_every_branching_rule_is_proven_for_a_tree(verifier: str) -> None:
    found = proof(TREE, verifier, cases=8)
    assert found.passed
    assert found.mean_accepted > 0.3
    assert set(found.sizes) >= set(TREES) - {(3, 4)}, "a size with too many ways may be left out, the smaller never"


@pytest.mark.parametrize("spec", [SpeculativeConfig(method="ngram"), SpeculativeConfig(method="synthetic")])
def test_drafts_without_distributions_are_proven(spec: SpeculativeConfig) -> None:
    found = proof(spec, "match")
    assert found.passed
    assert found.mean_accepted > 0.1


@pytest.mark.parametrize("values", [{"temperature": 0.6, "top_p": 0.9}, {"top_k": 2, "repetition_penalty": 1.4}])
def test_the_users_settings_are_proven(values: dict[str, float]) -> None:
    assert proof(MODEL, "block", cases=8, params=SamplingParams(max_tokens=None, **values)).passed  # type: ignore[arg-type]


def test_a_rule_that_accepts_always_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    accept_always(monkeypatch)
    found = proof(MODEL, "rejection", cases=8)
    assert not found.passed
    assert found.deviation > PLAIN_TO_SEE
    assert not found.to_dict()["passed"]


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_a_draft_distribution_that_was_not_drawn_from_is_found(monkeypatch: pytest.MonkeyPatch, verifier: str) -> None:
    report_flatter_distributions(monkeypatch)
    assert proof(MODEL, verifier, cases=8).deviation > PLAIN_TO_SEE
    assert proof(MODEL, "match", cases=8).deviation <= EXACT, "a rule that never looks at distributions is not harmed"


def test_a_rule_that_breaks_down_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(self: rejection.Rejection, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        raise ArithmeticError("no verdict")

    monkeypatch.setattr(rejection.Rejection, "verify", breaking)
    found = proof(MODEL, "rejection", cases=8)
    assert not found.passed
    assert found.to_dict()["error"] == "ArithmeticError: no verdict"


def test_an_invalid_probability_ends_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "min", lambda one, ratio: 2 * ratio, raising=False)
    found = proof(MODEL, "rejection", cases=8)
    assert not found.passed
    assert "is not a probability" in str(found.error)


def requests(verifiers: Sequence[str], params: SamplingParams) -> dict[str, Request]:
    kinds = {"sampled": params, "greedy": replace(params, temperature=0), "seeded": replace(params, seed=0)}
    named = zip(kinds.items(), verifiers, strict=True)
    return {kind: make_request([1], params=each, verifier=verifier) for (kind, each), verifier in named}


def test_sizes_with_too_many_branches_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "MOST_WAYS", 20)
    found = proof(MODEL, "block", cases=30)
    assert found.passed
    assert found.cases == 30
    assert {(2, 1), (2, 2)} <= set(found.sizes) < set(CHAINS)
    monkeypatch.setattr(proofs, "MOST_WAYS", 0)
    nothing = proof(MODEL, "block", cases=30)
    assert (nothing.cases, nothing.passed, nothing.error) == (0, False, None)
    assert not nothing.to_dict()["vocabularies"]


def test_claims_are_made_of_the_rules_in_use() -> None:
    params = SamplingParams(temperature=0.7, top_k=5, max_tokens=9, logit_bias={900: 1.0}, stop="x")
    made = claims(requests(["block", "match", "match"], params), 40)
    assert [(each.verifier, each.kinds, each.cases) for each in made] == [
        ("block", ["sampled"], 40),
        ("match", ["greedy"], 10),
        ("match", ["seeded"], 10),
    ]
    assert [each.params for each in made] == [
        SamplingParams(temperature=temperature, top_k=5, max_tokens=None) for temperature in (0.7, 0, 0.7)
    ]
    together = claims(requests(["match", "match", "match"], params), 1)
    assert [(each.kinds, each.cases) for each in together] == [(["sampled", "seeded"], 1), (["greedy"], 1)]


def test_a_claim_repeats_its_rule_s_announcement() -> None:
    chosen = requests(["rejection", "rejection", "match"], SamplingParams())
    chosen["greedy"].metrics.lossless = False
    assert [each.lossless for each in claims(chosen, 1)] == [True, False, True]


# --- what drafts


def test_the_configured_method_drafts_with_its_own_options() -> None:
    chosen = choose_draft(TREE, VERIFIERS)
    assert chosen.description == "draft_model, around tables"
    assert chosen.needs.emits_tree
    assert chosen.needs.max_nodes == 4
    assert choose_draft(MODEL, VERIFIERS).needs.emits_probs


@pytest.mark.slow
def test_further_draft_models_have_tables_of_their_own() -> None:
    several = SpeculativeConfig(
        method="specinfer", model="any", options={"models": ["another"], "depth": 2}, verification="multi_draft"
    )
    found = proof(several, "multi_draft", cases=16)
    assert found.passed
    alone = SpeculativeConfig(method="specinfer", model="any", options={"draws": 2, "depth": 2})
    assert abs(found.mean_accepted - proof(alone, "multi_draft", cases=16).mean_accepted) > 0.01


def test_a_lossy_rule_is_enumerated_with_its_own_options() -> None:
    deviations = []
    for lenience in (1.0, 0.9, 0.3):
        spec = SpeculativeConfig(model="any", verification="lenient", options={"lenience": lenience})
        deviations.append(proof(spec, "lenient", cases=8).deviation)
    assert deviations[0] <= EXACT < PLAIN_TO_SEE < deviations[1] < deviations[2]


def test_a_method_without_a_source_is_replaced_and_reported() -> None:
    chosen = choose_draft(SpeculativeConfig(method="synthetic"), VERIFIERS)
    assert chosen.needs == Likeliest.needs
    assert "synthetic can't draft from tables (it drafted nothing)" in chosen.description


def test_a_method_that_needs_a_real_model_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(context: DrafterContext) -> None:
        raise AttributeError("no layers")

    monkeypatch.setattr(draft_model, "build", build)
    chosen = choose_draft(MODEL, VERIFIERS)
    assert "can't draft from tables (AttributeError: no layers)" in chosen.description
    found = prove(Claim("block", True, ["sampled"], ENDLESS, 8), chosen, VERIFIERS)
    assert found.passed
    assert found.mean_accepted > 0.1


def test_prompts_let_every_kind_draft() -> None:
    model, ngram = (choose_draft(spec, VERIFIERS) for spec in (MODEL, SpeculativeConfig(method="ngram")))
    assert isinstance(model, TableDrafter)
    assert model.prompt(3) == (0,)
    assert ngram.prompt(3) == (0, 1, 2, 0, 1, 2)
