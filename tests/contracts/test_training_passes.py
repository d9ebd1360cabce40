"""Training computes every model family, found by its file, as the reference decoder does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch

from speculant.errors import ConfigError, ModelError
from speculant.lab.training import (
    DistillObjective,
    OutputHead,
    TextObjective,
    decoded_states,
    encoded_sources,
    hidden_states,
    look_ahead_states,
    states_of_layers,
)
from speculant.models import Decoder, RoutedMlp, load_model, read_rope, rope_entries
from tests.heads import fresh_ahead, fresh_states
from tests.unit.models.families import ENCODER_DECODERS, FEW, Session, random_tokens, thinned_cases, write_variant

CLOSE = {"atol": 1e-8, "rtol": 1e-8}
LENGTH = 24  # more than the variants' windows
MakeDecoder = Callable[[tuple[str, str]], Decoder]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> MakeDecoder:
    """Return what loads a family's variant on the reference backend in float64, once."""

    @functools.cache
    def load(case: tuple[str, str]) -> Decoder:
        folder = write_variant(tmp_path_factory.mktemp("checkpoint"), *case)
        return cast(Decoder, load_model(str(folder), "float64").model)

    return load


@pytest.fixture(params=thinned_cases(families=FEW))
def model(request: pytest.FixtureRequest, decoders: MakeDecoder) -> Decoder:
    return decoders(request.param)


@torch.inference_mode()
def test_training_computes_each_layer_s_states(model: Decoder) -> None:
    texts = [random_tokens(LENGTH, seed) for seed in range(3)]
    layers = range(model.num_layers + 2)
    found = states_of_layers(model, torch.tensor(texts), layers)
    for row, text in enumerate(texts):
        for layer, expected in zip(layers, fresh_states(model, text, layers), strict=True):
            torch.testing.assert_close(found[layer][row], expected, **CLOSE)


@pytest.fixture(params=[case for case in thinned_cases(with_encoders=True) if case.values[0][0] in ENCODER_DECODERS])
def pair(request: pytest.FixtureRequest, decoders: MakeDecoder) -> Decoder:
    """Return an encoder-decoder model."""
    return decoders(request.param)


SOURCES = [random_tokens(count, count) for count in (30, 1, 17)]


def padded(texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts of one length [B, m], by tokens that must not count, and their own lengths [B]."""
    longest = max(map(len, texts))
    rows = torch.tensor([[*text, *random_tokens(longest - len(text))] for text in texts])
    return rows, torch.tensor([len(text) for text in texts])


@torch.inference_mode()
def test_training_decodes_padded_texts_from_padded_sources(pair: Decoder) -> None:
    texts = [random_tokens(count, count) for count in (5, LENGTH, 1)]
    sources, lengths = padded(SOURCES)
    encoded = encoded_sources(pair, sources, lengths)
    states = decoded_states(pair, padded(texts)[0], encoded, lengths)
    session = Session(pair, sources=dict(enumerate(SOURCES)))
    for index, text in enumerate(texts):
        expected = session.encode(index)
        torch.testing.assert_close(encoded[index, : len(SOURCES[index])], expected, **CLOSE)
        torch.testing.assert_close(pair.logits(states[index, : len(text)]), session.extend(text, index), **CLOSE)


def test_gradients_reach_every_parameter_through_sources(pair: Decoder) -> None:
    pair.requires_grad_()
    sources, lengths = padded(SOURCES)
    states = decoded_states(pair, sources, encoded_sources(pair, sources, lengths), lengths)
    own = dict(pair.named_parameters())
    gradients = torch.autograd.grad(pair.logits(states[:, :4]).square().sum(), list(own.values()))
    assert [name for name, each in zip(own, gradients, strict=True) if not each.abs().sum() > 0] == []


@torch.inference_mode()
def test_look_ahead_rows_are_those_of_a_pass(model: Decoder) -> None:
    texts, places = [random_tokens(LENGTH, seed) for seed in range(2)], torch.tensor([0, 3, 11, 20])
    inputs = model.model.embed_tokens.weight[:3]
    if model.config.states:
        with pytest.raises(ConfigError, match="a layer with a state sees all"):
            look_ahead_states(model, torch.tensor(texts), places, inputs)
        return
    made = look_ahead_states(model, torch.tensor(texts), places, inputs)
    for row, text in enumerate(texts):
        for index, place in enumerate(places.tolist()):
            expected = fresh_ahead(model, text[: place + 1], inputs)
            torch.testing.assert_close(made[row, index], expected, **CLOSE)


def test_gradients_reach_every_parameter(model: Decoder) -> None:
    model.requires_grad_()
    (last,) = states_of_layers(model, torch.tensor([random_tokens(LENGTH)]), [model.num_layers + 1])
    own = dict(model.model.named_parameters())
    gradients = torch.autograd.grad(last.square().sum(), list(own.values()), allow_unused=True)
    without = {name for name, each in zip(own, gradients, strict=True) if each is None or not each.abs().sum() > 0}
    favours = {name for name in own if name.endswith("expert_bias")}  # they select experts, and do nothing else
    assert without == {f"{name}.router.weight" for name in _constant_routers(model)} | favours


def _constant_routers(model: Decoder) -> list[str]:
    """Return the blocks whose rows use one expert each: its weight is 1, whatever the router's scores are."""
    blocks = ((name, block._of) for name, block in model.model.named_modules() if isinstance(block, RoutedMlp))
    return [name for name, of in blocks if of.used == 1 and of.renormalise]


@torch.inference_mode()
def test_its_first_layers_are_a_model(model: Decoder) -> None:
    tokens, layers = random_tokens(LENGTH), model.num_layers - 1
    (states,) = states_of_layers(model, torch.tensor([tokens]), [layers])
    expected = model.logits(model.model.norm(states[0]))
    torch.testing.assert_close(Session(model.truncated(layers)).extend(tokens), expected, **CLOSE)


@pytest.mark.covering(1)
@pytest.mark.parametrize("progress", [0.0, 0.6])
def test_objectives_are_those_of_the_model_s_logits(model: Decoder, progress: float) -> None:
    """Values and gradients, of a family as the target and as the draft."""
    windows = torch.tensor([[0, *random_tokens(8, seed)] for seed in range(3)])
    draft = copy.deepcopy(model).requires_grad_()
    with torch.no_grad():
        next(layer.self_attn for layer in draft.model.layers if layer._of.attention).o_proj.weight.mul_(0.5)
    inputs, following = windows[:, :-1], windows[:, 1:].flatten()
    p, log_q = (each.logits(hidden_states(each, inputs)).log_softmax(-1) for each in (model, draft))
    p, q = p.detach().exp(), log_q.exp()
    divergence, variation = (p * (p.log() - log_q)).sum(-1).mean(), (p - q).abs().sum(-1).mean() / 2
    expected = {
        DistillObjective(model): (1 - progress) * divergence + 4 * progress * variation,
        TextObjective(): torch.nn.functional.nll_loss(log_q, following),
    }
    for objective, plain in expected.items():
        loss = objective.loss(draft, windows, progress)
        torch.testing.assert_close(loss, plain, **CLOSE)
        made, own = (
            torch.autograd.grad(each, list(draft.parameters()), retain_graph=True, allow_unused=True)
            for each in (loss, plain)
        )
        for one, other in zip(made, own, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_a_head_s_config_has_its_target_s_rotary_positions(model: Decoder) -> None:
    """Of all ropes that its layers have."""
    for rope in model.config.ropes:
        assert read_rope(rope_entries(rope), model.config.max_positions) == rope


def test_training_refuses_a_bias_of_logits(decoders: MakeDecoder) -> None:
    """The heads of training have none."""
    with pytest.raises(ModelError, match="models with a bias of logits"):
        OutputHead.of(decoders(("bart", "plain")))
