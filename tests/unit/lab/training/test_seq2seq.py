"""Training of encoder-decoder models on pairs of texts, from files to a model folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from typer.testing import CliRunner

from speculant.engine import LLM
from speculant.errors import ConfigError
from speculant.lab.cli import train as commands
from speculant.lab.training import (
    PairBatches,
    PairObjective,
    Pairs,
    Seq2SeqConfig,
    Seq2SeqRun,
    load_plain,
    loss_of_pairs,
    overlap_of_pairs,
    read_pairs,
    read_texts,
    states_of_pairs,
)
from speculant.params import SamplingParams
from tests.unit.lab.training.runs import have_the_same_bits, prepare, resume, train

WORDS = "zero one two three four five six seven eight nine".split()
NUMBERS = [str(number * 3) for number in range(250)]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return files of numbers in digits, and in words, each of them in two lines."""
    folder = tmp_path_factory.mktemp("pairs")
    sources, targets = folder / "sources.txt", folder / "targets.jsonl"
    sources.write_text("\n".join(NUMBERS) + "\n", encoding="utf-8")
    targets.write_text("".join(json.dumps(words(each)) + "\n" for each in NUMBERS), encoding="utf-8")
    return sources, targets


def words(number: str) -> str:
    return "\n".join(WORDS[int(digit)] for digit in number)


def config_in(out: Path, files: tuple[Path, Path]) -> Seq2SeqConfig:
    return Seq2SeqConfig(
        out, *files, steps=40, vocab_size=290, hidden=16, intermediate=32, layers=2, decoder_layers=1,
        heads=2, source_tokens=8, target_tokens=12, batch=8, warmup=5,
    )  # fmt: skip


@pytest.fixture
def config(files: tuple[Path, Path], tmp_path: Path) -> Seq2SeqConfig:
    return config_in(tmp_path / "model", files)


class Finished:
    """A run that has ended, and its written model."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        self.config = config
        run, self.trainer = train(Seq2SeqRun(config))
        self.data, self.outcome = run.data, run.finish(self.trainer)


@pytest.fixture(scope="module")
def finished(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(config_in(tmp_path_factory.mktemp("finished") / "model", files))


def test_the_loss_falls_and_the_written_model_is_measured(finished: Finished) -> None:
    trainer, outcome = finished.trainer, finished.outcome
    assert trainer.recent_loss(5) < trainer.state.losses[0] - 1.5
    assert outcome.held_out_pairs + outcome.pairs == len(NUMBERS)
    assert outcome.held_out_loss == pytest.approx(trainer.recent_loss(5), abs=0.5)
    assert "--decoder-layers 1" in (finished.config.out / "README.md").read_text()


def test_seq2seq_runs_are_reproducible(config: Seq2SeqConfig, finished: Finished, tmp_path: Path) -> None:
    """The same seed gives the same bits, also after an interruption; another seed gives others."""
    whole, config = finished.trainer, replace(config, out=tmp_path / "interrupted")
    first, second = (prepare(Seq2SeqRun(config))[1] for _ in range(2))
    assert have_the_same_bits(resume(first, second, saved=11), whole)
    _, other = train(Seq2SeqRun(replace(config, out=tmp_path / "other", seed=2, steps=1)))
    assert other.state.losses[0] != whole.state.losses[0]


def test_transformers_computes_a_written_model(finished: Finished) -> None:
    out = finished.config.out
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(out, dtype=torch.float32).eval()
    assert not torch.equal(theirs.lm_head.weight, theirs.shared.weight)
    batch = finished.data.held_out.tensors(range(2))
    with torch.no_grad():
        seen = torch.arange(batch.sources.shape[1]) < batch.lengths[:, None]
        logits = theirs(batch.sources, attention_mask=seen, decoder_input_ids=batch.inputs).logits[batch.real]
        ours = load_plain(str(out))
        found = ours.logits(states_of_pairs(ours, batch))
    torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.slow  # a quick test compares the written model's logits
def test_a_written_model_serves_and_ends_its_texts(config: Seq2SeqConfig) -> None:
    """It learns the digits' words, which the engine then writes for a source in text."""
    longer = replace(config, hidden=32, intermediate=64, steps=400)
    Seq2SeqRun(longer).carry_out()
    llm = LLM(str(longer.out), dtype="float32", max_num_seqs=4)
    made = llm.generate(NUMBERS[:20], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert all(each.outputs[0].finish_reason == "stop" for each in made)
    right = sum(each.outputs[0].text == words(source) for each, source in zip(made, NUMBERS, strict=False))
    assert right >= 12


def test_a_draft_learns_from_its_teacher(config: Seq2SeqConfig, finished: Finished, tmp_path: Path) -> None:
    teacher = finished.config.out
    draft = replace(config, out=tmp_path / "draft", teacher=teacher, hidden=8, layers=1, decoder_layers=None, steps=60)
    run, trainer = prepare(Seq2SeqRun(draft))
    before = trainer.objective.loss(trainer.model, trainer.windows.batch(0, 8), 0.0).item()
    for _ in trainer.run():
        pass
    assert trainer.objective.loss(trainer.model, trainer.windows.batch(0, 8), 0.0).item() < before / 2
    outcome = run.finish(trainer)
    assert outcome.overlap is not None
    assert outcome.overlap.alpha > 0.5
    assert "a draft for the model in model/" in (draft.out / "README.md").read_text()
    assert (draft.out / "tokenizer.json").read_text() == (teacher / "tokenizer.json").read_text()


def test_padding_counts_nowhere(config: Seq2SeqConfig) -> None:
    """The loss of a batch is the mean over the tokens of its pairs alone."""
    run, trainer = prepare(Seq2SeqRun(config))
    data = run.data
    losses, counts = list[float](), list[int]()
    places = [3, 40, 90]
    for place in places:
        alone = data.training.tensors([place])
        head = trainer.model.logits(states_of_pairs(trainer.model, alone))
        losses.append(float(torch.nn.functional.cross_entropy(head, alone.tokens, reduction="sum").detach()))
        counts.append(len(alone.tokens))
    windows = torch.tensor([[place, 0] for place in places])
    found = PairObjective(data.training).loss(trainer.model, windows, 0.0).item()
    assert len(set(counts)) > 1
    assert found == pytest.approx(sum(losses) / sum(counts), rel=1e-5)


def test_each_epoch_has_all_pairs_in_batches_of_one_length() -> None:
    sources = [torch.tensor([1] * (1 + number * 7 % 40)) for number in range(64)]
    batches = PairBatches(Pairs(sources, sources, end=0), 4, seed=3)
    epochs = [[batches.batch(first, 4)[:, 0].tolist() for first in range(start, start + 64, 4)] for start in (0, 64)]
    for epoch in epochs:
        assert sorted(place for batch in epoch for place in batch) == list(range(64))
        assert max(max(len(sources[place]) for place in batch) - min(len(sources[place]) for place in batch)
                   for batch in epoch) <= 4  # fmt: skip
    assert epochs[0] != epochs[1]
    assert batches.batch(0, 4)[:, 0].tolist() == epochs[0][0]


def test_long_texts_are_cut_and_all_end(config: Seq2SeqConfig) -> None:
    config.out.mkdir()
    pairs = Seq2SeqRun(replace(config, target_tokens=4)).data.training
    batch = pairs.tensors(range(len(pairs)))
    assert batch.inputs.shape[1] == 4
    assert (batch.inputs[:, 0] == 0).all()
    assert batch.tokens[-1] == 0
    assert int((batch.tokens == 0).sum()) == len(pairs)
    assert Tokenizer.from_file(str(config.out / "tokenizer.json")).encode("7").ids[-1] == 0


def _short(config: Seq2SeqConfig) -> Seq2SeqConfig:
    path = config.out.parent / "short.txt"
    path.write_text("one\n")
    return replace(config, targets=path)


def _ids(config: Seq2SeqConfig) -> Seq2SeqConfig:
    path = config.out.parent / "ids.jsonl"
    path.write_text("[1, 2]\n" * len(NUMBERS))
    return replace(config, targets=path)


WRONG: dict[str, Callable[[Seq2SeqConfig], Any]] = {
    "has 250 lines and .* has 1": lambda config: read_pairs(_short(config)),
    "has token ids": lambda config: read_pairs(_ids(config)),
    "don't fill a batch of 500": lambda config: prepare(Seq2SeqRun(replace(config, batch=500))),
    "need two files": lambda config: replace(config, held_out_sources=config.sources),
    "has its tokenizer": lambda config: replace(config, teacher=config.out, tokenizer=config.out),
    "--layers is 0": lambda config: replace(config, decoder_layers=0),
    "heads of an even size": lambda config: replace(config, heads=3),
    "needs an end": lambda config: replace(config, steps=None),
}


@pytest.mark.parametrize("reason", list(WRONG))
def test_wrong_seq2seq_settings_are_refused(reason: str, config: Seq2SeqConfig) -> None:
    with pytest.raises(ConfigError, match=reason):
        WRONG[reason](config)


def test_a_teacher_without_an_encoder_is_refused(config: Seq2SeqConfig, trained_folder: Path) -> None:
    with pytest.raises(ConfigError, match="no encoder"):
        prepare(Seq2SeqRun(replace(config, teacher=trained_folder)))


def test_pairs_with_an_empty_side_are_left_out(tmp_path: Path) -> None:
    """Blank lines count, and so do characters that only some programs take for the end of a line."""
    sources, targets = tmp_path / "sources.txt", tmp_path / "targets.txt"
    sources.write_text("a\n\nb\u2028b\nc\n", encoding="utf-8")
    targets.write_text("A\nX\nB\n\n", encoding="utf-8")
    assert list(read_texts(sources, targets)) == [("a", "A"), ("b\u2028b", "B")]
    targets.write_text("\nX\n\n\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="have no pairs"):
        read_texts(sources, targets)


def test_held_out_files_are_measured_only(config: Seq2SeqConfig, files: tuple[Path, Path]) -> None:
    training, held_out = read_pairs(replace(config, held_out_sources=files[0], held_out_targets=files[1]))
    assert len(training) == len(held_out) == len(NUMBERS)
    assert read_texts(*files)[7][1] == words("21")
    split, out = read_pairs(config)
    assert 0 < len(out) < 20
    assert not set(split) & set(out)


def test_the_command_trains_a_target_and_its_draft(files: tuple[Path, Path], tmp_path: Path) -> None:
    small = "--vocab-size 290 --hidden 16 --intermediate 32 --layers 1 --heads 2 --batch 4 --steps 3".split()
    runner, target = CliRunner(), tmp_path / "target"
    run = runner.invoke(commands.app, ["seq2seq", *map(str, files), "--out", str(target), *small, "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["steps"] == 3
    again = ["seq2seq", *map(str, files), "--out", str(tmp_path / "draft"), "--teacher", str(target), *small[2:]]
    run = runner.invoke(commands.app, again)
    assert run.exit_code == 0, run.output
    assert "sum min(p, q) with the target" in run.stderr


def test_overlap_is_that_of_all_tokens(config: Seq2SeqConfig) -> None:
    """Several passes, some of them with more than the 256 tokens of a part, count together."""
    run, trainer = prepare(Seq2SeqRun(config))
    data = run.data
    _, other = prepare(Seq2SeqRun(replace(config, out=config.out.parent / "other", tokenizer=config.out, seed=2)))
    found = overlap_of_pairs(trainer.model, other.model, data.training)
    batch = data.training.tensors(range(len(data.training)))
    with torch.no_grad():
        p, q = (model.logits(states_of_pairs(model, batch)).softmax(-1) for model in (trainer.model, other.model))
    assert found.positions == len(batch.tokens) > 256 * 4
    assert found.alpha == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), rel=1e-5)
    assert found.greedy_agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()), abs=1e-3)


def test_watched_loss_is_that_of_some_pairs(config: Seq2SeqConfig) -> None:
    run, trainer = prepare(Seq2SeqRun(config))
    data = run.data
    assert trainer.measure is not None
    everything, some = (loss_of_pairs(trainer.model, data.training, most=most) for most in (None, 40))
    assert everything == pytest.approx(some, rel=0.1)
    assert trainer.measure() == f"held-out loss {loss_of_pairs(trainer.model, data.held_out):.3f}"
