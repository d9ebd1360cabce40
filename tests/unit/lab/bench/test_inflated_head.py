"""A head at a larger shape makes the same drafts for the inflated target as the small head for the small target."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculant import plugins
from speculant.drafting import head_parts, method_within, save_head_tokens
from speculant.errors import ConfigError, ModelError, SpeculantError
from speculant.kernels import usable_sets
from speculant.lab.inflation import Shape, inflate, inflate_head, inflated_head, shape_of
from speculant.models import load_model
from speculant.params import SamplingParams
from tests.heads import (
    WRITERS,
    Shown,
    head_context,
    write_eagle,
    write_eagle3,
    write_medusa,
    write_pass,
    write_with_head,
)
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Checkpoints, make_request

H, V = HIDDEN_SIZE, VOCAB_SIZE
SHAPE = Shape(3 * H, 100, 3, 12, 3)  # three copies, groups of four instead of two
TEXT = [7, 1, 2, 3, 4, 1, 2, 250, 5, 1, 2]
DEPTH = 3
HEADS: dict[str, tuple[str, Callable[..., str]]] = {
    "blockwise": ("blockwise", WRITERS["blockwise"]),
    "eagle": ("eagle", partial(write_eagle, bias=False)),
    "eagle with a bias": ("eagle", write_eagle),
    "eagle3": ("eagle3", partial(write_eagle3, own=False)),
    "eagle3 of few tokens": ("eagle3", partial(write_eagle3, draft_vocab=40, norm_before_residual=True)),
    "eagle3 with a norm of its input": ("eagle3", partial(write_eagle3, norm_before_fc=True)),
    "eagle3 with a norm of each state": ("eagle3", partial(write_eagle3, fc_norm=True)),
    "medusa": ("medusa", partial(write_medusa, layers=2)),
    "medusa with output heads": ("medusa", partial(write_medusa, own=True)),
    "pass": ("pass", WRITERS["pass"]),
}


class Targets(NamedTuple):
    small: str
    large: str


@pytest.fixture(scope="module")
def targets(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Targets:
    folder = tmp_path_factory.mktemp("target") / "large"
    inflate(Path(checkpoints.target), folder, SHAPE)
    return Targets(checkpoints.target, str(folder))


def write(kind: str, writer: Callable[..., str], folder: Path, **changes: Any) -> Path:
    """Write a small head whose config.json names its kind."""
    written = Path(writer(folder, H, V))
    config = json.loads((written / "config.json").read_text(encoding="utf-8"))
    config = {"hidden_size": H, **config, "speculant_head": kind, **changes}
    (written / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return written


@torch.inference_mode()
def drafts(kind: str, head: Path, target: str, dtype: str = "float64") -> tuple[list[int], list[int], Tensor]:
    """Return greedy drafts, then drawn ones and their distributions [n, V]."""
    kernels = "reference" if dtype == "float64" else "native"
    model = load_model(target, dtype, kernels=kernels).model
    context = head_context(str(head), model, {"tree": "chain"} if kind == "medusa" else {})
    drafter = Shown(plugins.load("speculant.drafting", kind).build(context), model)
    found = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=None)
        request = make_request(TEXT, params=params, shared_noise=temperature == 0)
        drafter.begin(request)
        (tree,) = drafter.propose([request], [DEPTH])
        drafter.end(request)
        found.append(tree)
    assert found[1].probs is not None
    return found[0].token_list, found[1].token_list, found[1].probs


@pytest.mark.parametrize("name", HEADS)
def test_inflated_head_drafts_the_same(name: str, targets: Targets, tmp_path: Path) -> None:
    kind, writer = HEADS[name]
    head = write(kind, writer, tmp_path / "head")
    inflate_head(head, tmp_path / "large", SHAPE)
    greedy, drawn, probs = drafts(kind, tmp_path / "large", targets.large)
    expected = drafts(kind, head, targets.small)
    assert (greedy, drawn) == expected[:2]
    assert len(greedy) == DEPTH
    torch.testing.assert_close(probs, expected[2], atol=1e-9, rtol=1e-9)


def test_a_head_among_the_weights_grows_with_them(tmp_path: Path) -> None:
    small, large = Path(write_with_head(tmp_path / "small")), tmp_path / "large"
    inflate(small, large, replace(shape_of(small)[0], hidden_size=3 * H, intermediate_size=100, num_hidden_layers=6))
    *same, probs = drafts("mtp", large, str(large))
    *expected, of_small = drafts("mtp", small, str(small))
    assert same == expected
    torch.testing.assert_close(probs, of_small, atol=1e-9, rtol=1e-9)


def test_a_head_in_another_form_is_left_out(tmp_path: Path) -> None:
    small, large = Path(write_with_head(tmp_path / "small", "deepseek")), tmp_path / "large"
    inflate(small, large, replace(shape_of(small)[0], hidden_size=2 * H))
    assert [method_within(each, 2) for each in (small, large)] == ["mtp", None]
    load_model(str(large), "float32", kernels="reference")


def test_short_output_head_stays_short(targets: Targets, tmp_path: Path) -> None:
    head = write("eagle", write_eagle, tmp_path / "head")
    save_head_tokens(head / "head_tokens.json", range(1, V, 3))
    inflate_head(head, tmp_path / "large", SHAPE)
    *same, probs = drafts("eagle", tmp_path / "large", targets.large)
    *expected, small = drafts("eagle", head, targets.small)
    assert same == expected
    assert not probs[:, ::3].any()
    torch.testing.assert_close(probs, small, atol=1e-9, rtol=1e-9)


@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
def test_native_kernels_compute_it(targets: Targets, tmp_path: Path) -> None:
    head = write("eagle", write_eagle, tmp_path / "head")
    inflate_head(head, tmp_path / "large", SHAPE)
    *same, probs = drafts("eagle", tmp_path / "large", targets.large, "float32")
    *expected, small = drafts("eagle", head, targets.small, "float32")
    assert same == expected
    torch.testing.assert_close(probs, small, atol=1e-4, rtol=1e-3)


def test_sizes_are_those_of_a_head_for_the_shape(tmp_path: Path) -> None:
    """A decoder layer has the target's sizes; a block's inner width grows with the hidden size."""
    large = {}
    for kind in filter(head_parts, WRITERS):
        inflate_head(write(kind, WRITERS[kind], tmp_path / kind), tmp_path / f"large {kind}", SHAPE)
        large[kind] = json.loads((tmp_path / f"large {kind}" / "config.json").read_text(encoding="utf-8"))
        assert large[kind]["hidden_size"] == 3 * H
        assert large[kind]["speculant_head"] == kind
    assert large["blockwise"]["inner_size"] == 3 * 24
    sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "head_dim")
    for kind in ("eagle", "eagle3"):
        assert [large[kind][key] for key in sizes] == [100, 12, 3, 1, 8]
    assert large["pass"] == {"num_look_ahead": 3, "hidden_size": 3 * H, "vocab_size": V, "speculant_head": "pass"}


def test_further_weights_are_random_and_meet_zeros(tmp_path: Path) -> None:
    inflate_head(write("blockwise", WRITERS["blockwise"], tmp_path / "head"), tmp_path / "large", SHAPE)
    tensors = load_file(tmp_path / "large" / "model.safetensors")
    up, down = tensors["heads.1.up.weight"], tensors["heads.1.down.weight"]
    assert up.shape == down.T.shape == (72, 96)
    assert up[24:].std() == pytest.approx(0.02, rel=0.05)
    assert down[:, :24].any()
    assert not down[:, 24:].any()


def test_known_tokens_and_the_layers_of_the_target_stay(tmp_path: Path) -> None:
    writer = partial(write_eagle3, draft_vocab=40)
    head = write("eagle3", writer, tmp_path / "head")
    inflate_head(head, tmp_path / "large", SHAPE)
    small, large = (load_file(folder / "model.safetensors") for folder in (head, tmp_path / "large"))
    assert torch.equal(large["d2t"], small["d2t"])
    assert torch.equal(large["t2d"], small["t2d"])
    assert large["lm_head.weight"].shape == (40, 3 * H)
    config = json.loads((tmp_path / "large" / "config.json").read_text(encoding="utf-8"))
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}


def test_card_describes_the_head(tmp_path: Path) -> None:
    inflate_head(write("medusa", write_medusa, tmp_path / "my-head"), tmp_path / "large", SHAPE, noise=0.1)
    card = (tmp_path / "large" / "README.md").read_text(encoding="utf-8")
    assert "the function of the head `my-head` for its target at the shape of a larger model" in card
    assert "| hidden_size | 32 | 96 |" in card
    assert f"| weights | {3 * (H * H + H):,} | {3 * (9 * H * H + 3 * H):,} |" in card
    assert "Noise of 0.1 times" in card


@pytest.mark.parametrize(
    ("kind", "shape", "reason"),
    [
        ("medusa", Shape(80, 1, 1, 1, 1), "hidden_size 80 is not a multiple of 32"),
        ("eagle", Shape(96, 47, 1, 4, 2), "intermediate_size 47 is below"),
        ("eagle", Shape(96, 48, 1, 4, 4), "group_size 1 is below"),
    ],
)
def test_smaller_shape_is_refused(kind: str, shape: Shape, reason: str, tmp_path: Path) -> None:
    head = write(kind, WRITERS[kind], tmp_path / "head")
    with pytest.raises(ConfigError, match=reason):
        inflate_head(head, tmp_path / "large", shape)
    assert not (tmp_path / "large").exists()


def test_other_heads_are_refused(targets: Targets, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no speculant_head"):
        inflate_head(Path(targets.small), tmp_path / "large", SHAPE)
    for kind, message in (("other", "no drafting plugin called 'other'"), ("suffix", "a head of the kind 'suffix'")):
        other = write(kind, WRITERS["medusa"], tmp_path / kind)
        with pytest.raises(SpeculantError, match=message):
            inflate_head(other, tmp_path / "large", SHAPE)
    unnamed = write("eagle3", WRITERS["eagle3"], tmp_path / "unnamed", eagle_config=None)
    with pytest.raises(ModelError, match="does not name the target's layers whose"):
        inflate_head(unnamed, tmp_path / "large", SHAPE)
    more = write("pass", WRITERS["pass"], tmp_path / "more")
    save_file({**load_file(more / "model.safetensors"), "gate": torch.ones(1)}, more / "model.safetensors")
    with pytest.raises(ModelError, match="a tensor 'gate', whose use"):
        inflate_head(more, tmp_path / "large", SHAPE)
    assert not (tmp_path / "large").exists()


def test_inflated_head_is_kept_until_the_small_one_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def writer(folder: Path, hidden: int, vocab_size: int) -> str:
        return write_pass(folder, 256, vocab_size, count=1)

    head = write("pass", writer, tmp_path / "head", hidden_size=256)
    first = inflated_head(head, "1b")
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert load_file(first / "model.safetensors")["look_ahead.weight"].shape == (1, 2048)
    assert inflated_head(head, "1b") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    write("pass", writer, tmp_path / "head", hidden_size=256, rank_shares=[[0.5]])
    assert inflated_head(head, "1b") != first
    with pytest.raises(ConfigError, match="no pair of the shape '2b'"):
        inflated_head(head, "2b")
