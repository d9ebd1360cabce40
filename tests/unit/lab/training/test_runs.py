"""Whole runs, from files to a model folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from speculant.errors import ConfigError
from speculant.lab.training import (
    FILE_NAME,
    LanguageRun,
    Trainer,
    TrainingConfig,
    begin_folder,
    evaluate,
    export_model,
    held_out_windows,
    hidden_states,
    load_plain,
    overlap,
)
from speculant.text import Tokenizer
from tests.unit.lab.training.runs import have_the_same_bits, prepare, resume, tiny, train


@pytest.fixture(scope="module")
def whole(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LanguageRun, Trainer]:
    """A run that was not interrupted."""
    return train(LanguageRun(tiny(corpus_folder, tmp_path_factory.mktemp("whole") / "model")))


def test_the_loss_falls(whole: tuple[LanguageRun, Trainer]) -> None:
    _, trainer = whole
    losses = trainer.state.losses
    assert len(losses) == 30
    assert losses[0] > 5.0
    assert trainer.recent_loss(5) < losses[0] - 0.8


def test_a_resumed_run_ends_with_the_same_bits(config: TrainingConfig, whole: tuple[LanguageRun, Trainer]) -> None:
    first, second = (prepare(LanguageRun(config))[1] for _ in range(2))
    assert have_the_same_bits(resume(first, second, saved=11), whole[1])


def test_a_time_budget_ends_a_run_on_time(config: TrainingConfig) -> None:
    _, trainer = prepare(LanguageRun(replace(config, steps=None, minutes=1.0)))
    seconds = iter(range(0, 10_000, 2))
    trainer.clock = lambda: float(next(seconds))  # two seconds a step
    assert [report.step for report in trainer.run()][-1] == 30


def test_checkpoints_are_written_during_a_run(config: TrainingConfig) -> None:
    _, trainer = prepare(LanguageRun(config))
    seconds = iter(range(0, 10_000, 2))
    trainer.clock, trainer.save_every = (lambda: float(next(seconds))), 10.0
    reports = trainer.run()
    for _ in range(6):
        next(reports)
    _, other = prepare(LanguageRun(config))
    other.resume()
    assert other.state.step == 5


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 1},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({"batch": 2}, {"seed": 9}, {"matrix_lr": 0.1})),
    ],
)
def test_a_run_is_not_resumed_with_other_settings(config: TrainingConfig, change: dict[str, int]) -> None:
    _, trainer = prepare(LanguageRun(config))
    trainer.save()
    _, other = prepare(LanguageRun(replace(config, **change)))
    with pytest.raises(ConfigError, match="other settings"):
        other.resume()


def test_a_run_is_not_overwritten(config: TrainingConfig) -> None:
    _, trainer = prepare(LanguageRun(config))
    with pytest.raises(ConfigError, match=FILE_NAME):
        trainer.resume()
    trainer.save()
    with pytest.raises(ConfigError, match="holds a run already"):
        begin_folder(config.out, resume=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": 18}, "heads of an even size"),
        ({"kv_heads": 3}, "key heads"),
        ({"vocab_size": 200}, "256 bytes"),
        ({"seq": 128}, "positions"),
        ({"steps": -1}, "--steps is -1"),
        ({"tokenizer": Path("a"), "distill_from": Path("b")}, "its target's tokenizer"),
    ],
)
def test_invalid_settings_are_refused(config: TrainingConfig, change: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        replace(config, **change)  # type: ignore[arg-type]


def test_a_run_needs_an_end(config: TrainingConfig) -> None:
    with pytest.raises(ConfigError, match="needs an end"):
        _ = replace(config, steps=None).schedule


def test_the_card_describes_the_written_folder(trained_folder: Path, corpus_folder: Path) -> None:
    model, tokenizer = load_plain(str(trained_folder)), Tokenizer.from_folder(trained_folder)
    card = (trained_folder / "README.md").read_text()
    held_out = (corpus_folder / "package/module_64.py").read_text()
    ids = [*tokenizer.encode(held_out, add_special_tokens=False), 0]
    loss = evaluate(model, [torch.tensor([0, *ids[i : i + 32]]) for i in range(0, len(ids), 32)])
    assert f"| held-out loss, nats a token | {loss:.3f} |" in card
    assert "speculant train lm --out target --steps 60 --data corpus" in card
    assert str(trained_folder.parent) not in card
    assert tokenizer.encode("x")[0] == tokenizer.bos_id == tokenizer.eos_id == 0
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt == "<|endoftext|># user:\nhi\n\n# assistant:\n"


def test_transformers_reads_the_folder_the_same_way(whole: tuple[LanguageRun, Trainer], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run, trainer = whole
    texts = run.texts
    folder = tmp_path / "float32"
    export_model(folder, trainer.model, trainer.settings["network"], texts.tokenizer, torch.float32)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([0, *texts.training[0][:40]])
    with torch.no_grad():
        ours = trainer.model.logits(hidden_states(trainer.model, tokens[None]))
        torch.testing.assert_close(theirs(tokens[None]).logits[0], ours, atol=1e-4, rtol=0)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    words = transformers.AutoTokenizer.from_pretrained(folder)
    assert words("def get").input_ids == texts.tokenizer.encode("def get").ids


@pytest.mark.slow
def test_distillation_raises_the_overlap(config: TrainingConfig, trained_folder: Path) -> None:
    config = replace(config, distill_from=trained_folder, steps=40)
    run, trainer = prepare(LanguageRun(config))
    target = load_plain(str(trained_folder))
    windows = held_out_windows(run.texts.held_out, config.seq, run.texts.end_of_text)
    before = overlap(target, trainer.model, windows)
    for _ in trainer.run():
        pass
    outcome = run.finish(trainer)
    assert outcome.overlap is not None
    assert outcome.overlap.alpha > before.alpha + 0.2
    assert outcome.overlap.positions == outcome.held_out_tokens == sum(len(window) - 1 for window in windows)
    assert "--distill-from target" in (config.out / "README.md").read_text()


def test_a_model_overlaps_itself(trained_folder: Path) -> None:
    model = load_plain(str(trained_folder))
    same = overlap(model, model, [torch.arange(20), torch.arange(7)])
    assert same.alpha == pytest.approx(1.0)
    assert same.greedy_agreement == 1.0
    assert same.positions == 25


def test_files_too_short_for_a_window_are_refused(config: TrainingConfig, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for number in (64, 65):
        (tmp_path / f"package/module_{number}.py").write_text("x\n")
    with pytest.raises(ConfigError, match="too few for windows"):
        prepare(LanguageRun(replace(config, data=(tmp_path,))))
