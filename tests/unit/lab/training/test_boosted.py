"""Training of boosted drafts: the tokens that count, the figures, and a run from prompts to a tree of drafts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from speculant.cli import app
from speculant.errors import ConfigError, ModelError
from speculant.lab.training import (
    BoostedConfig,
    DraftRun,
    DraftsRun,
    MissedObjective,
    OutputHead,
    Show,
    Texts,
    begin_folder,
    hidden_states,
    known_rows,
    likeliest,
    load_plain,
    measure,
    open_texts,
    save_texts,
)
from speculant.models import Decoder
from tests.models import END, Shape, write_checkpoint
from tests.unit.lab.training.runs import SMALL_DRAFT, command, drafts
from tests.unit.models.families import VARIANTS, thinned_cases

SEQ = 16


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A draft that agrees with the target for some tokens and not for others."""
    return load_plain(write_checkpoint(tmp_path_factory.mktemp("near") / "draft", Shape(noise=0.5, end=END)), "draft")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, target: Decoder) -> Texts:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("texts")
    save_texts(folder, torch.randint(33, 127, (40, SEQ)).tolist(), SEQ, 0)
    return open_texts(folder, target)


def config_of(out: Path, target: str, **changes: Any) -> BoostedConfig:
    return BoostedConfig(out, target, **{"boosted": 2, "steps": 2, "seq": SEQ, "batch": 2, **changes})


def test_drafts_name_their_target_without_its_path(tmp_path: Path) -> None:
    file = tmp_path / "target.gguf"
    file.write_bytes(b"GGUF")
    config = config_of(tmp_path / "drafts", str(file))
    assert config.target_name == "target"
    assert "--target target.gguf " in config.command()


def test_only_missed_tokens_are_learned(texts: Texts, target: Decoder, near: Decoder) -> None:
    """Only rows at which the first draft has another likeliest token count in the loss."""
    windows = texts.batch(0, 8)
    tokens, states = windows[:, 1:], texts.states_of(windows[:, 0]).flatten(0, 1)
    best = likeliest(states, OutputHead.of(target))
    missed = (target.logits(states).argmax(-1) != near.logits(hidden_states(near, tokens)).argmax(-1)).nonzero()[:, 0]
    assert 0 < len(missed) < len(best)
    objective = MissedObjective(target, texts, [near])
    assert objective._chosen(tokens, states, 0).tolist() == missed.tolist()
    own = hidden_states(near, tokens)[missed]
    q, p = near.logits(own).softmax(-1), target.logits(states[missed]).softmax(-1)
    expected = 2 * (p - q).abs().sum(-1).mean()  # at the end of a run: 4 times the total variation
    torch.testing.assert_close(objective.loss(near, windows, 1.0), expected, atol=1e-4, rtol=1e-4)


def test_the_first_draft_learns_every_token(texts: Texts, target: Decoder) -> None:
    windows = texts.batch(0, 4)
    states = texts.states_of(windows[:, 0]).flatten(0, 1)
    chosen = MissedObjective(target, texts, [])._chosen(windows[:, 1:], states, 0)
    assert chosen.tolist() == list(range(4 * SEQ))


def test_known_tokens_can_count_in_part(texts: Texts, target: Decoder, near: Decoder) -> None:
    windows = texts.batch(0, 38)
    tokens, states = windows[:, 1:], texts.states_of(windows[:, 0]).flatten(0, 1)
    counts = [
        len(MissedObjective(target, texts, [near], share)._chosen(tokens, states, 0)) for share in (0.0, 0.5, 1.0)
    ]
    assert counts[2] == len(states)
    assert counts[0] + 0.3 * (counts[2] - counts[0]) < counts[1] < counts[0] + 0.7 * (counts[2] - counts[0])


def test_a_draft_equal_to_the_target_leaves_nothing_to_learn(texts: Texts, target: Decoder) -> None:
    """If the earlier draft is the target, no token is left; the step has a gradient of zero."""
    windows, model = texts.batch(0, 2), load_trainable(target)
    loss = MissedObjective(target, texts, [target]).loss(model, windows, 0.5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


def load_trainable(target: Decoder) -> Decoder:
    model = Decoder(target.config)
    model.load_state_dict(target.state_dict())
    return model


def test_figures_are_those_of_the_formulas(texts: Texts, target: Decoder, near: Decoder) -> None:
    places = torch.arange(texts.num_training, len(texts.tokens))
    tokens, states = texts.tokens[places], texts.states_of(places).flatten(0, 1)
    p, q = target.logits(states).softmax(-1), near.logits(hidden_states(near, tokens)).softmax(-1)
    best = p.argmax(-1)
    found = measure([near, target], target, texts)
    assert found["rows"] == len(best)
    assert found["covered"] == 1.0
    assert found["alone"] == pytest.approx(float((q.topk(2).indices == best[:, None]).any(-1).float().mean()))
    alone = measure([near], target, texts)
    assert alone["alone"] == alone["covered"] == alone["agreement"]
    assert alone["agreement"] == pytest.approx(float((q.argmax(-1) == best).float().mean()))
    assert alone["alpha"] == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), abs=1e-4)
    assert known_rows([near], tokens, best).float().mean() == pytest.approx(alone["agreement"])


@pytest.mark.slow
def test_a_run_makes_drafts_for_one_tree(tmp_path: Path, target_folder: str, corpus_folder: Path) -> None:
    """From prompts to drafts in one tree, in one session and in two."""
    arguments = [
        "draft", "--target", target_folder, "--data", corpus_folder, "--tokens", 640, "--seq", SEQ, *SMALL_DRAFT,
    ]  # fmt: skip
    found = []
    for name, sessions in (
        ("once", [["--boosted", 2, "--steps", 6]]),
        ("twice", [["--boosted", 1, "--steps", 6], ["--boosted", 2, "--steps", 6, "--resume"]]),
    ):
        out = tmp_path / name
        *_, measured = [command(*arguments, "--out", out, *session) for session in sessions]
        found.append([without_time(each) for each in measured["drafts"]])
    assert found[0] == found[1]
    assert [each["steps"] for each in found[0]] == [6, 6]
    assert "Measured" in (out / "2" / "README.md").read_text()
    speculative = {"method": "specinfer", "model": str(out / "1"), "models": [str(out / "2")], "depth": 2}
    assert drafts(target_folder, speculative) > 0


def test_minutes_count_the_training_alone(tmp_path: Path, target_folder: str, corpus_folder: Path) -> None:
    told, minutes = list[str](), 1e-5
    config = config_of(tmp_path, target_folder, steps=None, minutes=minutes, data=(corpus_folder,), tokens=640)
    run = DraftsRun(config, Show(tell=told.append))
    outcome = run.carry_out()
    first, last = told
    assert first.startswith(f"preparation: the target writes 40 texts of {SEQ} tokens (--tokens)")
    assert first.endswith("the 1e-05 minutes begin after that")
    assert re.fullmatch(r"prepared in \d+\.\d minutes; the training begins", last)
    assert [each.steps for each in outcome.drafts] == [1, 1], "as long as a step takes, and no longer"
    assert run.summary(outcome)[0].endswith("1 steps, 0.0 minutes of training")
    run.carry_out(resume=True)
    assert len(told) == 2, "the texts are there"


def without_time(outcome: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in outcome.items() if name != "minutes"}


@pytest.mark.parametrize("case", thinned_cases(families=("llama",)))
def test_each_draft_begins_with_the_weights_before(
    tmp_path: Path, target: Decoder, target_folder: str, texts: Texts, case: tuple[str, str]
) -> None:
    """Of any family: the files of a draft hold its weights."""
    family, variant = case
    settings = tuple(VARIANTS.get(family, {}).get(variant, {}).items())
    start = write_checkpoint(tmp_path / "start", Shape(family=family, layers=3, seed=3, end=END, settings=settings))
    config = config_of(tmp_path / "out", target_folder, start=start)
    first = DraftRun(config, 1, target, texts)
    begin_folder(first.folder, resume=False)
    trainer = first.trainer()
    begun, given = cast(Decoder, trainer.model), dict(load_plain(start).named_parameters())
    every = dict(begun.named_parameters(remove_duplicate=False))  # keys and values may be stored as one tensor
    assert {*given} <= {*every}
    assert all(torch.equal(every[name], parameter) for name, parameter in given.items())
    with torch.no_grad():
        begun.model.norm.weight.fill_(2.0)
    for _ in trainer.run():
        pass
    first.finish(trainer)
    second = dict(cast(Decoder, DraftRun(config, 2, target, texts).trainer().model).named_parameters())
    for name, parameter in begun.named_parameters():
        assert torch.equal(second[name], parameter.bfloat16().float())
    name = next(each for each in given if each.endswith("self_attn.o_proj.weight"))
    assert not torch.equal(second[name], given[name])


def test_errors_are_raised_before_a_run(tmp_path: Path, target_folder: str) -> None:
    for changes, reason in (
        ({"boosted": 0}, "--boosted is 0"),
        ({"heads": 3}, "heads"),
        ({"steps": None}, "needs an end"),
    ):
        with pytest.raises(ConfigError, match=reason):
            config_of(tmp_path, target_folder, **changes)
    config = config_of(tmp_path, target_folder)
    config.folder(1).mkdir(parents=True)
    (config.folder(1) / "checkpoint.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match="holds a run already"):
        DraftsRun(config).carry_out()
    (tmp_path / "target.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is a file, and a folder is needed here"):
        DraftsRun(config_of(tmp_path, str(tmp_path / "target.gguf"))).carry_out(resume=True)
    result = CliRunner().invoke(app, ["train", "draft", "--boosted", "2", "--out", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "--target is missing" in str(result.exception)
