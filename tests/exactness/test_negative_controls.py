"""What is known to bias the output does so here too: a distribution test that misses these proves nothing.

Each control breaks one thing beside the shipping code; the deviation must be plain to see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from speculant.config import Limits
from speculant.drafting.base import Drafter
from speculant.lab.exactness.enumeration import EnumeratingChance
from speculant.lab.exactness.tables import EXACT, FULL_SUPPORT, Pair, softmax
from speculant.params import SamplingParams
from speculant.sampling.chance import Chances
from speculant.types import DraftTree, Request, Verdict
from speculant.verification import rejection
from tests.exactness.speculation import Case, MakeDrafter, draft_model, enumerate_case
from tests.exactness.verdicts import chain_of, distance, sampled
from tests.fakes import ScriptedDrafter
from tests.faults import always

PLAIN_TO_SEE = 1e-3
RARE = 0.4  # a draft token with less than this is "unlikely"
PAIRS = [Pair(seed, 3, FULL_SUPPORT) for seed in range(4)]

Change = Callable[[Pair, Request, DraftTree], DraftTree]


class Meddling:
    """The real drafter, whose trees are changed after it has returned them."""

    def __init__(self, drafter: Drafter, change: Callable[[Request, DraftTree], DraftTree]) -> None:
        self.needs = drafter.needs
        self.begin, self.observe, self.end = drafter.begin, drafter.observe, drafter.end
        self._drafter, self._change = drafter, change

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        trees = self._drafter.propose(requests, limits)
        pairs = zip(requests, trees, strict=True)
        return [self._change(request, tree) if tree.size else tree for request, tree in pairs]


def meddling(change: Change) -> MakeDrafter:
    """Make a maker of meddling drafters."""

    def make(pair: Pair, chances: Chances, limits: Limits) -> Drafter:
        return Meddling(draft_model(pair, chances, limits), lambda seq_id, tree: change(pair, seq_id, tree))

    return make


def cut(tree: DraftTree, size: int) -> DraftTree:
    assert tree.probs is not None
    return DraftTree.chain(tree.token_list[:size], tree.probs[:size])


def own_probabilities(tree: DraftTree) -> list[float]:
    """Return q(x) of every node."""
    assert tree.probs is not None
    return tree.probs.gather(1, tree.tokens[:, None])[:, 0].tolist()


def discard_the_unlikely(pair: Pair, request: Request, tree: DraftTree) -> DraftTree:
    unlikely = [q < RARE for q in own_probabilities(tree)]
    return cut(tree, unlikely.index(True)) if True in unlikely else tree


def discard_by_joint_probability(pair: Pair, request: Request, tree: DraftTree) -> DraftTree:
    joint = torch.tensor(own_probabilities(tree)).cumprod(0)
    return cut(tree, int((joint >= RARE**2).sum()))


def stop_behind_the_unlikely(pair: Pair, request: Request, tree: DraftTree) -> DraftTree:
    """Keep the unlikely token and draft nothing after it: this is exact."""
    unlikely = [q < RARE for q in own_probabilities(tree)]
    return cut(tree, unlikely.index(True) + 1) if True in unlikely else tree


def report(make_distribution: Callable[[Sequence[float]], Sequence[float]]) -> Change:
    """Report another distribution of the draft's logits than the one that was drawn from."""

    def change(pair: Pair, request: Request, tree: DraftTree) -> DraftTree:
        histories = [(*request.tokens, *tree.tokens_to(node - 1)) for node in range(tree.size)]
        distributions = torch.tensor(
            [make_distribution(pair.draft(history)) for history in histories], dtype=torch.float64
        )
        return dataclasses.replace(tree, probs=distributions)

    return change


def worst(make_drafter: MakeDrafter, params: SamplingParams | None = None) -> float:
    """Return the largest deviation over a few pairs."""
    settings = params or SamplingParams(max_tokens=None)
    cases = [Case(pair, 2, settings, make_drafter=make_drafter, width=8) for pair in PAIRS]
    return max(enumerate_case(case).deviation() for case in cases)


@pytest.mark.parametrize("change", [discard_the_unlikely, discard_by_joint_probability])
def test_discarding_drawn_tokens_shows(change: Change) -> None:
    assert worst(meddling(change)) > PLAIN_TO_SEE


def test_stopping_behind_a_drawn_token_is_exact() -> None:
    assert worst(meddling(stop_behind_the_unlikely)) <= EXACT


def test_the_likelier_of_two_draws_shows() -> None:
    """A sampled tree of two siblings, pruned to the better one."""

    def make(pair: Pair, chances: Chances, limits: Limits) -> Drafter:
        def propose(request: Request) -> DraftTree:
            distribution = torch.tensor(softmax(pair.draft(tuple(request.tokens))), dtype=torch.float64)
            chance = chances.draft(request)
            best = max(
                (chance.draw(distribution), chance.draw(distribution)), key=lambda token: float(distribution[token])
            )
            return DraftTree.chain([best], distribution[None])

        return ScriptedDrafter(propose)

    assert worst(make) > PLAIN_TO_SEE


def test_a_greedy_draft_that_reports_a_distribution_shows() -> None:
    def make(pair: Pair, chances: Chances, limits: Limits) -> Drafter:
        def propose(request: Request) -> DraftTree:
            distribution = torch.tensor(softmax(pair.draft(tuple(request.tokens))), dtype=torch.float64)
            return DraftTree.chain([int(distribution.argmax())], distribution[None])

        return ScriptedDrafter(propose)

    assert worst(make) > PLAIN_TO_SEE


def test_a_distribution_rounded_after_the_draw_shows() -> None:
    def rounded(logits: Sequence[float]) -> list[float]:
        coarse = torch.tensor(softmax(logits)).to(torch.bfloat16).double()
        return (coarse / coarse.sum()).tolist()  # one that does not sum to 1 is refused

    assert worst(meddling(report(rounded))) > 1e-5


def test_raw_distribution_for_a_filtered_draw_shows() -> None:
    top_k = SamplingParams(max_tokens=None, top_k=2)
    assert worst(meddling(report(softmax)), top_k) > PLAIN_TO_SEE


def test_another_temperature_shows() -> None:
    cold = SamplingParams(max_tokens=None, temperature=0.7)
    assert worst(meddling(report(softmax)), cold) > PLAIN_TO_SEE


def test_a_distribution_without_penalties_shows() -> None:
    penalty = SamplingParams(max_tokens=None, repetition_penalty=1.5)
    assert worst(meddling(report(softmax)), penalty) > PLAIN_TO_SEE


def test_the_same_reports_without_a_transform_are_exact() -> None:
    assert worst(meddling(report(softmax))) <= EXACT


# --- the rule itself


def target_for_residual(p: Tensor, q: Tensor) -> Tensor:
    return p


def residual_not_normalised(p: Tensor, q: Tensor) -> Tensor:
    """Draw with a sum that is not 1: the last token gets the difference."""
    rest = (p - q).clamp(min=0)
    rest[-1] += 1 - rest.sum()
    return rest


def absolute_difference(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).abs() + (p if torch.equal(p, q) else 0)


def without_the_token_alone(p: Tensor, q: Tensor) -> Tensor:
    """Forbid only the likeliest draft token, as if the draft had been certain."""
    rest = p.clone()
    rest[int(q.argmax())] = 0
    return rest


@pytest.mark.parametrize(
    "fault", [target_for_residual, residual_not_normalised, absolute_difference, without_the_token_alone]
)
def test_wrong_residuals_show(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor, Tensor], Tensor]) -> None:
    monkeypatch.setattr(rejection, "residual", fault)
    assert max(distance(rejection.Rejection(), pair, sampled(pair, chain_of(2))) for pair in PAIRS) > PLAIN_TO_SEE


def target_probability(tree: DraftTree, p: Tensor, q: Tensor) -> list[float]:
    return p.gather(1, tree.tokens[:, None])[:, 0].tolist()


def ratio_of_the_row_before(tree: DraftTree, p: Tensor, q: Tensor) -> list[float]:
    return [1.0, *likelihood_ratios(tree, p, q)][:-1]


likelihood_ratios = rejection.likelihood_ratios


@pytest.mark.parametrize("fault", [always, target_probability, ratio_of_the_row_before])
def test_wrong_acceptance_shows(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[DraftTree, Tensor, Tensor], list[float]]
) -> None:
    monkeypatch.setattr(rejection, "likelihood_ratios", fault)
    assert max(distance(rejection.Rejection(), pair, sampled(pair, chain_of(2))) for pair in PAIRS) > PLAIN_TO_SEE


class GreedyAcceptance(rejection.Rejection):
    """Keep a draft token if it is the target's likeliest: text that looks right, with another distribution."""

    def verify(self, tree: DraftTree, p: Tensor, chance: EnumeratingChance) -> Verdict:
        for node, token in enumerate(tree.token_list):
            if token != int(p[node].argmax()):
                return Verdict(tuple(range(node)), chance.draw(p[node]))
        return Verdict(tuple(range(tree.size)), chance.draw(p[-1]))


def test_greedy_acceptance_shows() -> None:
    assert max(distance(GreedyAcceptance(), pair, sampled(pair, chain_of(2))) for pair in PAIRS) > PLAIN_TO_SEE
