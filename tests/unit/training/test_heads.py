"""Training of heads: losses and gradients, rounds as a head is used, and a run from prompts to a drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from speculant import LLM, SamplingParams
from speculant.cache.factory import slotted_cache
from speculant.cli.main import app
from speculant.errors import ConfigError
from speculant.models.base import SequenceInput, build_batch
from speculant.models.decoder import Decoder
from speculant.models.heads import HeadDecoder
from speculant.models.weights import load_model
from speculant.training.heads.config import HeadTrainingConfig, kind_names, load_kind
from speculant.training.heads.distance import distances, overlaps
from speculant.training.heads.kinds.eagle import EagleObjective
from speculant.training.heads.look_ahead import look_ahead_states
from speculant.training.heads.texts import most_texts, open_texts, save_texts
from speculant.types import DraftTree
from tests.heads import fresh_ahead
from tests.models import END, Shape, write_checkpoint

SEQ = 16


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("heads") / "target", Shape(end=END))


@pytest.fixture(scope="module")
def target(target_folder: str) -> Decoder:
    return cast(Decoder, load_model(target_folder, "float32").model)


def config_of(out: Path, target: str, kind: str, **changes: Any) -> HeadTrainingConfig:
    return HeadTrainingConfig(out, target, kind, **{"steps": 4, "seq": SEQ, "batch": 2, "num_heads": 2, **changes})


def test_distance_is_that_of_the_distributions() -> None:
    """Value and gradient are those of autograd on the plain formula."""
    torch.manual_seed(0)
    states, own, matrix = torch.randn(2, 300, 5, requires_grad=True), torch.randn(300, 5), torch.randn(11, 5)
    for progress in (0.0, 0.3, 1.0):
        (gradient,) = torch.autograd.grad(distances(states, own, matrix, progress).sum(), states)
        q, p = (states @ matrix.T).softmax(-1), (own @ matrix.T).softmax(-1)
        divergence, variation = (p * (p.log() - q.log())).sum(-1), (p - q).abs().sum(-1) / 2
        plain = ((1 - progress) * divergence + 4 * progress * variation).mean(-1)
        (expected,) = torch.autograd.grad(plain.sum(), states)
        torch.testing.assert_close(distances(states, own, matrix, progress), plain, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-3)
    alpha, shares = overlaps(states.detach(), own, matrix, 11)
    torch.testing.assert_close(alpha, torch.minimum(p, q).sum((1, 2)), atol=1e-3, rtol=1e-4)
    assert shares.sum(1).tolist() == [300, 300]
    assert shares[0, 0] == (q[0].argmax(-1) == p.argmax(-1)).sum()


@torch.inference_mode()
def test_rounds_are_drafts_from_every_row(tmp_path: Path, target: Decoder, target_folder: str) -> None:
    """What round m makes of a row is what the head makes of it as the m-th row of a draft."""
    save_texts(tmp_path, [torch.randint(0, 250, (SEQ,)).tolist() for _ in range(3)], SEQ, 0)
    texts = open_texts(tmp_path, target)
    objective = load_kind("eagle").make(config_of(tmp_path, target_folder, "eagle", depth=3), target)
    assert isinstance(objective, EagleObjective)
    objective.use(texts)
    made, own = objective._rounds(torch.tensor([1]), texts.tokens[[1]])
    states, head = texts.states_of(torch.tensor([1]))[0], cast(HeadDecoder, objective.module)
    torch.testing.assert_close(own, states[3:])
    for row in range(2, SEQ - 1):
        for depth in range(3):
            expected = draft_state(head, texts.tokens[1], states, row - depth, depth)
            torch.testing.assert_close(made[depth, row - 2], expected, atol=2e-5, rtol=1e-4)


def draft_state(head: HeadDecoder, tokens: Tensor, states: Tensor, root: int, depth: int) -> Tensor:
    """Return what the head makes `depth` rows behind a root row, in a cache, each from what the row before made."""
    cache = slotted_cache(head.cache_shape, 1, SEQ)
    fed, hidden = tokens[1 : root + 2].tolist(), states[: root + 1]
    for place in range(depth + 1):
        batch = build_batch([SequenceInput(0, fed, DraftTree.empty(), hidden=hidden)], cache, torch.device("cpu"))
        carried = head.forward(batch, cache.storage).carried
        assert carried is not None
        fed, hidden = [int(tokens[root + 2 + place])] if place < depth else [], carried[-1:]
    return hidden[0]


def test_texts_stay_within_the_bound() -> None:
    assert most_texts(10_000, 100, 64, cache_gib=1.0) == 100
    assert most_texts(10_000, 100, 64, cache_gib=10 * 2 * 100 * 64 / 2**30) == 10
    assert most_texts(1, 100, 64, cache_gib=1e-6) == 2


def test_every_kind_is_a_method() -> None:
    from speculant import plugins

    assert set(kind_names()) <= set(plugins.names("speculant.drafting"))
    with pytest.raises(ConfigError, match="did you mean 'eagle'"):
        config_of(Path("out"), "demo", "eagel")


@pytest.mark.parametrize("kind", kind_names())
def test_a_run_makes_a_head_that_drafts(kind: str, tmp_path: Path, target_folder: str, corpus_folder: Path) -> None:
    """From prompts to a folder that an engine drafts with, in one session and in two."""
    arguments = [
        "train", "head", "--kind", kind, "--target", target_folder, "--data", str(corpus_folder), "--suffix", ".txt",
        "--tokens", "640", "--seq", str(SEQ), "--batch", "4", "--num-heads", "2", "--depth", "2", "--json",
    ]  # fmt: skip
    suffix = next(path.suffix for path in corpus_folder.rglob("*") if path.is_file())
    arguments[arguments.index(".txt")] = suffix
    found = []
    for name, sessions in (("once", [["--steps", "6"]]), ("twice", [["--steps", "3"], ["--steps", "6", "--resume"]])):
        out = tmp_path / name
        for session in sessions:
            result = CliRunner().invoke(app, [*arguments, "--out", str(out), *session])
            assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout))
    assert found[0]["steps"] == found[1]["steps"] == 6
    assert len(found[0]["acceptance"]["alpha"]) == 2
    assert all(0 <= share <= 1 for share in found[0]["acceptance"]["alpha"])
    assert "Measured" in (out / "README.md").read_text()
    training = json.loads((out / "config.json").read_text())["training"]
    assert training["steps"] == 6
    assert training["minutes"] == pytest.approx(found[1]["minutes"], abs=0.01)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    plain = LLM(target_folder, use_speculative_decoding=False).generate(["hello", "def f"], params)
    llm = LLM(target_folder, speculative_config={"method": kind, "model": str(out), "num_speculative_tokens": 2})
    drafted = llm.generate(["hello", "def f"], params)
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.metrics.speculative_decoding.num_draft_tokens for each in drafted) > 0


def test_a_second_run_in_a_folder_is_refused(tmp_path: Path, target_folder: str) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    arguments = ["train", "head", "--kind", "medusa", "--target", target_folder, "--steps", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code
    assert isinstance(result.exception, ConfigError | SystemExit)


@torch.inference_mode()
def test_look_ahead_rows_are_those_of_a_draft(target: Decoder) -> None:
    """Behind each place of a text, the rows are what the target's pass makes of them in a draft."""
    tokens = torch.randint(0, 250, (2, SEQ), generator=torch.Generator().manual_seed(0))
    inputs, places = torch.randn(3, target.hidden_size), torch.tensor([0, 4, 9])
    made = look_ahead_states(target, tokens, places, inputs)
    assert made.shape == (2, 3, 3, target.hidden_size)
    for row, text in enumerate(tokens.tolist()):
        for index, place in enumerate(places.tolist()):
            expected = fresh_ahead(target, text[: place + 1], inputs)
            torch.testing.assert_close(made[row, index], expected, atol=2e-5, rtol=1e-4)


def test_look_ahead_learns_what_comes_later(tmp_path: Path, target: Decoder, target_folder: str) -> None:
    """Each row is compared with the target's state so many tokens on; the embeddings alone have gradients."""
    save_texts(tmp_path, [torch.randint(0, 250, (SEQ,)).tolist() for _ in range(3)], SEQ, 0)
    texts = open_texts(tmp_path, target)
    objective = load_kind("pass").make(config_of(tmp_path, target_folder, "pass"), target)
    objective.use(texts)
    made, own = objective._predicted(torch.tensor([1]), 5)
    states = texts.states_of(torch.tensor([1]))[0]
    torch.testing.assert_close(own, torch.stack([states[[6, 14]], states[[7, 15]]]))
    (inputs,) = objective.module.parameters()
    for index, place in enumerate((5, 13)):
        expected = fresh_ahead(target, texts.tokens[1, : place + 1].tolist(), inputs)
        torch.testing.assert_close(made[:, index], expected, atol=2e-5, rtol=1e-4)
    objective.loss(objective.module, texts.batch(0, 2), 0.5).backward()
    assert inputs.grad is not None
    assert inputs.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in target.parameters())
