"""Verdicts from draws after all nodes at once are those of draws along the path, one by one."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from speculant.engine import Decision, TargetOutput, verify
from speculant.errors import SpeculantError
from speculant.kernels import REFERENCE, NativeSampler, Sampler, open_kernels
from speculant.params import SamplingParams
from speculant.sampling import Chance, KeyedChances, distribution
from speculant.scheduling import Scheduled
from speculant.types import DraftRules, DraftTree, Verdict
from speculant.verification import Match, Verifier, checked_verifiers
from speculant.verification.rejection import build as rejection
from tests.examples import sizes
from tests.models import make_request

VOCAB_SIZE, SEQUENCES = 7, 6
GREEDY, SEEDED = SamplingParams(temperature=0), SamplingParams(temperature=0.9, seed=3)
BIASED = SamplingParams(temperature=0, logit_bias={2: 3.0})
UNSEEDED = SamplingParams(temperature=1.1)
BATCHES = {
    "greedy": [GREEDY],
    "seeded": [SEEDED],
    "edited": [BIASED],
    "mixed": [GREEDY, SEEDED, BIASED, UNSEEDED],
    "unseeded": [UNSEEDED],
}


@dataclass(frozen=True)
class OneByOne(Match):
    """Draws along the path."""

    def verify(self, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        return super().verify(tree, p, chance)


def samplers() -> list[Sampler]:
    kernels = open_kernels()
    return [REFERENCE] if kernels is None else [REFERENCE, NativeSampler(kernels)]


def random_tree(rng: random.Random) -> DraftTree:
    """Draw a tree whose siblings may have the same token."""
    size = rng.randrange(6)
    return DraftTree.of([rng.randrange(3) for _ in range(size)], [rng.randrange(-1, node) for node in range(size)])


def outputs_of(rng: random.Random, kinds: list[SamplingParams]) -> tuple[list[TargetOutput], Tensor]:
    """Make the outputs of a pass. Some rows of logits are impossible, or NaN; an unseeded sequence has no draft."""
    sequences, first = [], 0
    for seq_id in range(1, 1 + SEQUENCES):
        params = kinds[seq_id % len(kinds)]
        request = make_request([1, 2], params=params, seq_id=seq_id)
        shared = params is not UNSEEDED
        request.drafts = DraftRules(verifier="rule" if shared else "ratio", shared_noise=shared)
        tree = random_tree(rng) if request.drafts.shared_noise else DraftTree.empty()
        sequences.append((Scheduled(request, 1, 1), tree, first))
        first += 1 + tree.size
    logits = 4 * torch.randn(first, VOCAB_SIZE, generator=torch.Generator().manual_seed(rng.randrange(10**6)))
    logits[:, 3:] -= 3  # drafted tokens are likely
    for row in range(first):
        if rng.random() < 0.1:
            logits[row] = rng.choice([-math.inf, math.nan])
    made = [
        TargetOutput(item, tree, logits, None, nodes=range(-1, tree.size), first_logits=at)
        for item, tree, at in sequences
    ]
    return made, logits


def readable(decisions: dict[int, Decision]) -> dict[int, Verdict | str]:
    """Return verdicts, and the texts of errors."""
    found: dict[int, Verdict | str] = {}
    for seq_id, decision in decisions.items():
        assert isinstance(decision, (Verdict, SpeculantError))
        found[seq_id] = decision if isinstance(decision, Verdict) else decision.problem
    return found


@pytest.mark.parametrize("passes", sizes(20, 60))
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("sampler", samplers(), ids=lambda sampler: type(sampler).__name__)
def test_verdicts_are_those_of_single_draws(batch: str, sampler: Sampler, passes: int) -> None:
    lengths = set()
    for seed in range(passes):
        decisions = []
        for rule in (Match(), OneByOne()):
            outputs, logits = outputs_of(random.Random(seed), BATCHES[batch])
            verifiers: dict[str, Verifier] = {"rule": rule, "ratio": rejection()}
            decisions.append(verify(outputs, logits, checked_verifiers(verifiers), KeyedChances(sampler), sampler))
        at_once, alone = map(readable, decisions)
        assert at_once == alone
        lengths |= {len(each.path) if isinstance(each, Verdict) else each for each in at_once.values()}
    assert len([each for each in lengths if isinstance(each, str)]) == 2, "both errors occur"
    assert batch == "unseeded" or max(each for each in lengths if isinstance(each, int)) >= 2


@pytest.mark.parametrize(("output", "edits"), [((), {}), ((3, 4), {}), ((3, 4), {"logit_bias": {2: 0.5}})])
def test_greedy_rows_make_no_distribution_after_min_tokens(
    monkeypatch: pytest.MonkeyPatch, output: tuple[int, ...], edits: dict[str, dict[int, float]]
) -> None:
    made = list[int]()
    name = "speculant.engine.runner.distribution"
    monkeypatch.setattr(name, lambda logits, *rest: made.append(1) or distribution(logits, *rest))
    params = SamplingParams(temperature=0, min_tokens=2, **edits)  # type: ignore[arg-type]
    item, logits = Scheduled(make_request([1, 2], output, params=params), 1, 1), torch.eye(VOCAB_SIZE)[5:6]
    outputs = [TargetOutput(item, DraftTree.empty(), logits, None, nodes=(-1,))]
    decisions = verify(outputs, logits, checked_verifiers({"match": Match()}), KeyedChances(), REFERENCE)
    assert decisions == {item.request.seq_id: Verdict((), 5)}
    assert bool(made) == (not output or bool(edits))
