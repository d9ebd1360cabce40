"""Every verifier returns a legal verdict for any draft. `tests/exactness` proves their distributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from speculant import plugins
from speculant.sampling import Chance, KeyedNoise, Purpose, Stream
from speculant.types import DraftTree, Verdict
from speculant.verification import Verifier

KIND = "speculant.verification"
VERIFIERS = plugins.names(KIND)
every_rule = pytest.mark.parametrize("name", VERIFIERS)


def load_rule(name: str) -> Verifier:
    verifier: Verifier = plugins.load(KIND, name).build()
    return verifier


@dataclass
class Willing:
    """Accepts everything possible (u = 0) and draws the likeliest token; keeps the probabilities that it was given."""

    asked: list[float] = field(default_factory=list)

    def accept(self, probability: float) -> bool:
        self.asked.append(probability)
        return probability > 0

    def draw(self, weights: Tensor) -> int:
        assert_distribution(weights)
        return int(weights.argmax())


class Unwilling(Willing):
    """Rejects everything that is not certain (u just below 1)."""

    def accept(self, probability: float) -> bool:
        self.asked.append(probability)
        return probability >= 1


def assert_distribution(weights: Tensor) -> None:
    assert weights.dim() == 1
    assert bool(torch.isfinite(weights).all())
    assert bool((weights >= 0).all())
    assert float(weights.sum()) > 0, "nothing to draw from"


@dataclass(frozen=True)
class Case:
    """A draft and the target's distributions behind each of its nodes."""

    tree: DraftTree
    p: Tensor


def random_case(rng: np.random.Generator, chain: bool, deterministic: bool) -> Case:
    """Draw a tree of up to five nodes, siblings with different tokens, and probs with zeros and point masses."""
    vocab_size = int(rng.integers(2, 6))
    size = int(rng.integers(0, 6))
    parents, tokens, rows = [], [], []
    q_of: dict[int, Tensor] = {}
    for node in range(size):
        parent = node - 1 if chain else int(rng.integers(-1, node))
        distribution = q_of.setdefault(parent, random_distribution(rng, vocab_size))
        if float(distribution.sum()) == 0:
            break
        token = int(rng.choice(vocab_size, p=(distribution / distribution.sum()).numpy()))
        parents.append(parent)
        tokens.append(token)
        rows.append(distribution / distribution.sum())
        q_of[parent] = distribution.clone().index_fill_(0, torch.tensor(token), 0.0)  # without replacement
        q_of[parent][q_of[parent] < 1e-12] = 0.0
    probs = torch.stack(rows) if rows and not deterministic else None
    tree = DraftTree(torch.tensor(tokens, dtype=torch.int64), torch.tensor(parents, dtype=torch.int64), probs)
    return Case(tree, torch.stack([random_distribution(rng, vocab_size) for _ in range(len(tokens) + 1)]))


def random_distribution(rng: np.random.Generator, vocab_size: int) -> Tensor:
    kind = rng.integers(3)
    distribution = rng.dirichlet(np.ones(vocab_size))
    if kind == 1:
        distribution[rng.permutation(vocab_size)[: rng.integers(1, vocab_size)]] = 0.0
    if kind == 2:
        distribution = np.eye(vocab_size)[rng.integers(vocab_size)]
    return torch.tensor(distribution / distribution.sum())


def cases(verifier: Verifier) -> st.SearchStrategy[Case]:
    """Return cases that a rule understands."""
    chain = st.just(True) if not verifier.needs.branches else st.booleans()
    return st.builds(
        lambda seed, chain, plain: random_case(np.random.default_rng(seed), chain, plain),
        st.integers(0, 2**32),
        chain,
        st.booleans(),
    )


def production_chance(verifier: Verifier, seed: int) -> Chance:
    return KeyedNoise(seed, 5) if verifier.needs.shared_noise else Stream(seed, (Purpose.ACCEPT, Purpose.DRAW), 0)


CHANCES: dict[str, Callable[[Verifier], Chance]] = {
    "willing": lambda verifier: Willing(),
    "unwilling": lambda verifier: Unwilling(),
    "seed 1": lambda verifier: production_chance(verifier, 1),
    "seed 2": lambda verifier: production_chance(verifier, 2),
}
every_chance = pytest.mark.parametrize("chance", CHANCES)


def assert_legal(case: Case, verdict: Verdict) -> None:
    """Assert that the path runs downwards from a child of the root, and that each of its tokens is possible."""
    above = -1
    for node in verdict.path:
        assert case.tree.parent_list[node] == above, "a path steps from parent to child"
        assert float(case.p[1 + above, case.tree.token_list[node]]) > 0, "an impossible token was accepted"
        above = node
    assert isinstance(verdict.token, int)
    assert float(case.p[1 + above, verdict.token]) > 0, "an impossible token follows"


@every_rule
@every_chance
@given(data=st.data())
def test_a_verdict_is_a_possible_path_and_a_possible_token(name: str, chance: str, data: st.DataObject) -> None:
    verifier = load_rule(name)
    case = data.draw(cases(verifier))
    assert_legal(case, verifier.verify(case.tree, case.p, CHANCES[chance](verifier)))


@every_rule
@given(data=st.data())
def test_inputs_are_left_alone(name: str, data: st.DataObject) -> None:
    verifier = load_rule(name)
    case = data.draw(cases(verifier))
    p, q = case.p.clone(), None if case.tree.probs is None else case.tree.probs.clone()
    verifier.verify(case.tree, case.p, Willing())
    assert torch.equal(case.p, p)
    assert q is None or torch.equal(case.tree.probs, q)


@every_rule
@given(seed=st.integers(0, 2**32))
def test_without_a_draft_the_target_is_sampled(name: str, seed: int) -> None:
    verifier = load_rule(name)
    p = random_distribution(np.random.default_rng(seed), 5)[None]
    expected = production_chance(verifier, seed).draw(p[0])
    assert verifier.verify(DraftTree.empty(), p, production_chance(verifier, seed)) == Verdict((), expected)


@every_rule
@pytest.mark.parametrize("with_probs", [True, False])
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=5), agreed=st.integers(0, 5), last=st.integers(0, 3))
def test_point_masses_are_matched(name: str, with_probs: bool, tokens: list[int], agreed: int, last: int) -> None:
    """With a target that is certain, the verdict is the longest agreeing run and the target's next token."""
    verifier = load_rule(name)
    agreed = min(agreed, len(tokens))
    said = [*tokens[:agreed], *((token + 1) % 4 for token in tokens[agreed:]), last]
    tree = DraftTree.chain(tokens, torch.eye(4, dtype=torch.float64)[tokens] if with_probs else None)
    p = torch.eye(4, dtype=torch.float64)[said]
    for chance in (Willing(), Unwilling(), production_chance(verifier, 3)):
        assert verifier.verify(tree, p, chance) == Verdict(tuple(range(agreed)), said[agreed])


@every_rule
@given(seed=st.integers(0, 2**32), size=st.integers(1, 4))
def test_a_perfect_draft_is_accepted_whole(name: str, seed: int, size: int) -> None:
    """Where draft and target are one distribution and one draw, nothing may be rejected."""
    verifier, rng = load_rule(name), np.random.default_rng(seed)
    distributions = torch.stack([random_distribution(rng, 5) for _ in range(size + 1)])
    if verifier.needs.shared_noise:
        noise = production_chance(verifier, seed)
        tree = DraftTree.chain([noise.draw(distribution) for distribution in distributions[:-1]])
    else:
        tree = DraftTree.chain(
            [int(rng.choice(5, p=distribution.numpy())) for distribution in distributions[:-1]],
            distributions[:-1].clone(),
        )
    assert verifier.verify(tree, distributions, production_chance(verifier, seed)).path == tuple(range(size))


@every_rule
@pytest.mark.parametrize("with_probs", [True, False])
def test_an_impossible_draft_is_never_accepted(name: str, with_probs: bool) -> None:
    verifier = load_rule(name)
    q = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    p = torch.tensor([[0.0, 0.5, 0.5], [0.2, 0.3, 0.5]], dtype=torch.float64)
    tree = DraftTree.chain([0], q if with_probs else None)
    for seed in range(50):
        verdict = verifier.verify(tree, p, production_chance(verifier, seed))
        assert verdict.path == ()
        assert verdict.token in (1, 2)
    assert verifier.verify(tree, p, Willing()).path == ()


@every_rule
def test_a_residual_rounded_to_zero_still_yields_a_token(name: str) -> None:
    """p is below q in the last bit and nowhere above it: rejecting is possible, and then p itself is drawn from."""
    verifier = load_rule(name)
    q = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    p = torch.tensor([[0.5 - 2.0**-54, 0.5], [1.0, 0.0]], dtype=torch.float64)
    chance = Unwilling()
    assert_legal(Case(DraftTree.chain([0], q), p), verifier.verify(DraftTree.chain([0], q), p, chance))
    sure = verifier.needs.shared_noise or not verifier.lossless  # a lenient rule accepts long before it comes to that
    assert sure or chance.asked[0] < 1, "the test does not reach the residual"


@every_rule
@given(seed=st.integers(0, 2**32))
def test_chance_gets_probabilities_between_0_and_1(name: str, seed: int) -> None:
    verifier = load_rule(name)
    case = random_case(np.random.default_rng(seed), chain=True, deterministic=False)
    for chance in (Willing(), Unwilling()):
        verifier.verify(case.tree, case.p, chance)
        assert all(0 <= probability <= 1 for probability in chance.asked)


@every_rule
def test_a_rule_announces_what_it_needs(name: str) -> None:
    verifier = load_rule(name)
    assert isinstance(verifier.lossless, bool)
    fork = DraftTree(torch.tensor([0, 1]), torch.tensor([-1, -1]))
    p = torch.full((3, 2), 0.5, dtype=torch.float64)
    if verifier.needs.branches:
        assert_legal(Case(fork, p), verifier.verify(fork, p, production_chance(verifier, 1)))
    else:
        with pytest.raises(ValueError, match="chain"):
            verifier.verify(fork, p, production_chance(verifier, 1))


def test_the_rules_are_found() -> None:
    assert {"match", "rejection"} <= set(VERIFIERS)
