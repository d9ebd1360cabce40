"""The numbers behind training: passes, losses, gradients, steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from speculant.lab.training import (
    CausalTexts,
    DistillObjective,
    Muon,
    TextObjective,
    TrainingConfig,
    TrainingSchedule,
    hf_config,
    hidden_states,
    new_network,
    orthogonalize,
    project_embedding,
)
from speculant.models import Decoder, State, StateInputs, change


def network(config: TrainingConfig, seed: int) -> Decoder:
    return new_network(hf_config(config, 300), seed)


def randoms(*shape: int) -> Tensor:
    return torch.randint(300, shape, generator=torch.Generator().manual_seed(5))


def batch_logits(model: Decoder, windows: Tensor) -> Tensor:
    return model.logits(hidden_states(model, windows[:, :-1]))


def gradients(model: Decoder, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_the_text_objective_is_cross_entropy(config: TrainingConfig) -> None:
    model, windows = network(config, 1), randoms(20, 33)
    loss = TextObjective().loss(model, windows, 0.0)
    expected = functional.cross_entropy(batch_logits(model, windows), windows[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(model, loss), gradients(model, expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_the_distillation_loss_is_divergence_and_variation(config: TrainingConfig, progress: float) -> None:
    draft, target = network(config, 1).double(), network(config, 2).double()
    windows = randoms(10, 33)
    loss = DistillObjective(target).loss(draft, windows, progress)
    with torch.no_grad():
        p = batch_logits(target, windows).softmax(-1)
    q = batch_logits(draft, windows).softmax(-1)
    divergence = (p * (p / q).log()).sum(-1).mean()
    expected = (1 - progress) * divergence + 4 * progress * (1 - torch.minimum(p, q).sum(-1).mean())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(draft, loss), gradients(draft, expected))


@pytest.mark.parametrize("steps", [None, (0.0, math.inf)], ids=["delta rule", "mamba 2"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_states_of_whole_texts_are_those_of_row_after_row(length: int, steps: tuple[float, float] | None) -> None:
    """In chunks, with the same gradients, also where a state is nearly forgotten."""
    generator = torch.Generator().manual_seed(length)

    def random(*shape: int) -> Tensor:
        return torch.randn(2, length, 4, *shape, dtype=torch.float64, generator=generator)

    slopes = -random().mul(3).exp()  # from 0 to -1000
    inputs = [each.requires_grad_() for each in (random(8), random(6), slopes, random(), random(8))]
    key, value, decay, rate, query = inputs
    rows = StateInputs(key / key.norm(dim=-1, keepdim=True), value, decay.exp(), rate.sigmoid(), query)
    of = State(88, 4, 4, 4, 8, 6, steps=steps)
    state, results = torch.zeros(2, 4, 8, 6, dtype=torch.float64), list[Tensor]()
    for row in range(length):
        state, _ = change(of, state, StateInputs(*(each[:, row] for each in rows)))
        results.append((state * query[:, row, ..., None]).sum(-2))
    expected = torch.stack(results, 1)
    found = CausalTexts().recur(0, of, rows)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    pairs = (torch.autograd.grad((each * weights).sum(), inputs, retain_graph=True) for each in (found, expected))
    torch.testing.assert_close(*pairs, atol=1e-9, rtol=1e-6)


def test_orthogonalize_levels_the_singular_values() -> None:
    matrices = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_muon_goes_downhill(shape: tuple[int, int]) -> None:
    goal = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    parameter = torch.nn.Parameter(torch.zeros(shape))
    optimizer = Muon([parameter], lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        (parameter - goal).square().sum().backward()
        optimizer.step()
    assert (parameter - goal).square().mean() < 0.05 * goal.square().mean()


def test_a_projected_embedding_keeps_the_strongest_directions(config: TrainingConfig, tmp_path: Path) -> None:
    wide = TrainingConfig(out=tmp_path, steps=1, hidden=32, heads=2, kv_heads=1, layers=1)
    draft, target = network(config, 1), network(wide, 2)
    with torch.no_grad():  # all of it lies in as many directions as the draft has
        target.model.embed_tokens.weight[:, 16:] = target.model.embed_tokens.weight[:, :16]
        project_embedding(draft, target)
        narrow, full = draft.model.embed_tokens.weight, target.model.embed_tokens.weight
        torch.testing.assert_close(narrow @ narrow.T, full @ full.T, rtol=1e-4, atol=1e-5)


def test_the_rate_follows_the_clock_or_the_steps() -> None:
    by_clock, by_both = TrainingSchedule(None, 2.0, warmup=10), TrainingSchedule(100, 2.0, warmup=10)
    assert by_clock.progress(1000, 60.0) == 0.5
    assert by_both.progress(75, 60.0) == 0.75
    assert by_both.progress(10, 500.0) == 1.0
    assert by_clock.factor(4, 0.0) == 0.5
    assert by_clock.factor(100, 0.75) == 0.25
    assert by_clock.factor(100, 1.0) == 0.0
