"""Training computes every model family, found by its file, as the reference decoder does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import pytest
import torch

from speculant.lab.training.heads.look_ahead import look_ahead_states
from speculant.lab.training.passes import states_of_layers
from speculant.models.reference.decoder import Decoder
from speculant.models.rope_config import read_rope, rope_entries
from tests.heads import fresh_ahead, fresh_states
from tests.unit.models.families import cases, make_pair, random_tokens

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
LENGTH = 24  # more than the variants' windows
MakeDecoder = Callable[[tuple[str, str]], Decoder]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> MakeDecoder:
    """Return what loads a family's variant on the reference backend, once."""

    @functools.cache
    def load(case: tuple[str, str]) -> Decoder:
        return cast(Decoder, make_pair(tmp_path_factory.mktemp("checkpoint"), *case).ours)

    return load


@pytest.fixture(params=cases(), ids="-".join)
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


@torch.inference_mode()
def test_look_ahead_rows_are_those_of_a_pass(model: Decoder) -> None:
    text, places = random_tokens(LENGTH), torch.tensor([0, 3, 11, 20])
    inputs = model.model.embed_tokens.weight[:3]
    made = look_ahead_states(model, torch.tensor([text]), places, inputs)[0]
    for index, place in enumerate(places.tolist()):
        expected = fresh_ahead(model, text[: place + 1], inputs)
        torch.testing.assert_close(made[index], expected, atol=2e-5, rtol=1e-4)


def test_gradients_reach_every_parameter(model: Decoder) -> None:
    model.requires_grad_()
    (last,) = states_of_layers(model, torch.tensor([random_tokens(LENGTH)]), [model.num_layers + 1])
    own = dict(model.model.named_parameters())
    gradients = torch.autograd.grad(last.square().sum(), list(own.values()))
    assert [name for name, each in zip(own, gradients, strict=True) if not each.abs().sum() > 0] == []


def test_a_head_s_config_has_its_target_s_rotary_positions(model: Decoder) -> None:
    rope, most = model.config.attention.rope, model.config.max_positions
    assert read_rope(rope_entries(rope), most) == rope
