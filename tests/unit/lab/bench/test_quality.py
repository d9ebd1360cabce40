"""The figures of `speculant bench quality`: divergence, agreement and perplexity of two models along a text."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from speculant.config import EngineConfig
from speculant.errors import ConfigError, ModelError, PairError, RequestError
from speculant.kernels import usable_sets
from speculant.lab.bench import Compared, Interval, QualityText, compare_logits, quality, quality_document, read_text
from speculant.models import load_model
from speculant.text import Tokenizer
from tests.models import ALPHABET, BEGIN, VOCAB_SIZE, Checkpoints, Shape, write_checkpoint

CONTEXT = 16
WORDS = "Each line of this text is read by two models, one after the other. " * 3  # 201 characters, each a token


def load(reference: str, judged: str, dtype: str = "float64") -> Compared:
    return Compared.load(*(EngineConfig(each, dtype=dtype, kernels="reference") for each in (reference, judged)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(WORDS)
    return path


def cut(path: Path, source: str, context: int = CONTEXT, most: int = 1000) -> QualityText:
    return QualityText.read(path, Tokenizer.load(Path(source)), context, most)


def test_figures_of_a_table_are_those_by_hand() -> None:
    laws = torch.tensor([[[1, 2, 1], [1, 1, 2]], [[1, 1, 2], [1, 1, 2]]], dtype=torch.float64) / 4
    p, q = (law.log() + 5 for law in laws)  # a constant changes no distribution
    found = compare_logits(p, q, torch.tensor([2, 0]))
    # 1/4 log(1/1) + 1/2 log(2/1) + 1/4 log(1/2)
    np.testing.assert_allclose(found.divergence, [math.log(2) / 4, 0], atol=1e-15)
    assert found.agrees.tolist() == [0, 1]
    np.testing.assert_allclose(found.reference_nll, [math.log(4), math.log(4)])
    np.testing.assert_allclose(found.judged_nll, [math.log(2), math.log(4)])


def softmax(logits: np.ndarray) -> np.ndarray:
    made = np.exp(logits - logits.max(1, keepdims=True))
    return made / made.sum(1, keepdims=True)


def test_second_halves_of_chunks_are_scored(
    checkpoints: Checkpoints, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, text = load(checkpoints.target, checkpoints.near), cut(path, checkpoints.target)
    monkeypatch.setattr(quality, "_LOGITS", 3 * VOCAB_SIZE)  # three positions at a time
    found = list(models.scores(text))
    tokens = Tokenizer.load(Path(checkpoints.target)).encode(WORDS)
    assert [token for chunk in text.chunks for token in chunk] == tokens[: 12 * CONTEXT]
    assert (text.tokens, len(found)) == (len(tokens), 12)
    for chunk, scores in zip(text.chunks, found, strict=True):
        with torch.inference_mode():
            p, q = (
                softmax(each.model.logits(read_text(each.model, chunk)).numpy())
                for each in (models.reference, models.judged)
            )
        rows = np.arange(CONTEXT // 2, CONTEXT - 1)
        after = np.array(chunk)[rows + 1]
        np.testing.assert_allclose(scores.divergence, (p * np.log(p / q)).sum(1)[rows], atol=1e-12)
        np.testing.assert_allclose(scores.judged_nll, -np.log(q[rows, after]), atol=1e-12)
        np.testing.assert_array_equal(scores.agrees, (p.argmax(1) == q.argmax(1))[rows])


@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_a_model_is_no_distance_from_itself(checkpoints: Checkpoints, path: Path, kernels: str) -> None:
    if kernels == "native" and not usable_sets():
        pytest.skip("the native kernels are not built")
    config = EngineConfig(checkpoints.target, dtype="float32", kernels=kernels)
    models, text = Compared.load(config, config), cut(path, checkpoints.target)
    value = quality_document(models, path, text, list(models.scores(text)))
    assert {value["kl"][name] for name in ("mean", "error", "low", "high", "median", "p99_9", "max")} == {0}
    assert value["top_1"] == {"mean": 1, "low": 1, "high": 1, "error": 0}
    assert value["perplexity"]["ratio"] == {"mean": 1, "low": 1, "high": 1, "error": 0}
    assert value["perplexity"]["reference"] == value["perplexity"]["judged"]
    assert value["text"]["scored"] == 12 * (CONTEXT // 2 - 1)


@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_rounded_keys_are_a_small_distance_away(checkpoints: Checkpoints, path: Path, kernels: str) -> None:
    if kernels == "native" and not usable_sets():
        pytest.skip("the native kernels are not built")
    config = EngineConfig(checkpoints.target, dtype="float32", kernels=kernels)
    models = Compared.load(config, replace(config, kv_cache_dtype="int8"))
    value = quality_document(models, path, (text := cut(path, checkpoints.target)), list(models.scores(text)))
    assert 0 < value["kl"]["mean"] < 1e-3
    assert value["judged"]["kernels"] == f"{value['reference']['kernels']}, keys and values in int8"


def test_another_model_is_further_than_a_near_one(checkpoints: Checkpoints, path: Path) -> None:
    text = cut(path, checkpoints.target)
    found = {}
    for name, judged in (("near", checkpoints.near), ("far", checkpoints.far)):
        models = load(checkpoints.target, judged)
        found[name] = quality_document(models, path, text, list(models.scores(text)))
    near, far = found["near"], found["far"]
    assert 0 < near["kl"]["mean"] < near["kl"]["high"] < far["kl"]["low"]
    assert near["top_1"]["mean"] > far["top_1"]["mean"]
    assert near["kl"]["median"] <= near["kl"]["p90"] <= near["kl"]["p99"] <= near["kl"]["p99_9"] <= near["kl"]["max"]
    assert near["reference"]["name"] == "target"
    assert near["judged"]["weight_bytes"] == load_model(checkpoints.near, "float64").model.weight_bytes > 1000


def test_intervals_are_over_chunks() -> None:
    found = Interval.of([np.array([1.0, 3.0]), np.array([4.0, 4.0]), np.array([3.0, 3.0])])
    assert found.error is not None
    assert found.low is not None
    assert (found.mean, found.error) == (3, pytest.approx(1 / math.sqrt(3)))
    assert 3 - found.low == pytest.approx(4.303 / math.sqrt(3), rel=0.05)  # Student's quantile of two degrees
    exponential = found.exp()
    assert (exponential.mean, exponential.low) == (math.exp(3), math.exp(found.low))
    assert Interval.of([np.array([1.0, 2.0])]) == Interval(1.5)
    assert Interval(1.5).exp() == Interval(math.exp(1.5))
    assert math.isfinite(Interval(800.0, 1.0, 1e9, 1.0).exp().high or math.inf)


def test_intervals_have_no_impossible_values() -> None:
    found = Interval.of([np.array([0.9]), np.array([0.1])], least=0, most=1)
    assert (found.mean, found.low, found.high) == (0.5, 0, 1)


def test_intervals_hold_the_mean() -> None:
    generator, runs = np.random.default_rng(0), 400
    drawn = [Interval.of(list(generator.exponential(1, (16, 1)) * np.ones(5))) for _ in range(runs)]
    held = sum(each.low <= 1 <= each.high for each in drawn if each.low is not None and each.high is not None)
    assert 0.88 < held / runs < 0.97


def test_chunks_begin_as_texts_do(checkpoints: Checkpoints, path: Path) -> None:
    tokenizer = Tokenizer.load(Path(checkpoints.target))
    plain = QualityText.read(path, tokenizer, CONTEXT, 50)
    tokenizer.backend.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", BEGIN)])
    text = QualityText.read(path, tokenizer, CONTEXT, 50)
    assert len(plain.chunks) == len(text.chunks) == 3
    assert [chunk[0] for chunk in text.chunks] == [BEGIN] * 3
    assert [*text.chunks[0][1:]] == [*plain.chunks[0][:-1]]


def test_texts_that_cannot_be_scored_are_refused(checkpoints: Checkpoints, path: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa")
    for name, problem in (("empty", "has 0 tokens"), ("binary", "can't be read"), ("missing", "can't be read")):
        with pytest.raises(RequestError, match=problem):
            cut(tmp_path / name, checkpoints.target)
    with pytest.raises(RequestError, match="has 201 tokens, and a chunk has 205"):
        cut(path, checkpoints.target, 205)
    with pytest.raises(ConfigError, match="too few tokens"):
        cut(path, checkpoints.target, 4)
    with pytest.raises(ConfigError, match="less than a chunk"):
        cut(path, checkpoints.target, 16, 15)


def test_models_must_read_the_text(checkpoints: Checkpoints, path: Path, tmp_path: Path) -> None:
    short = write_checkpoint(tmp_path / "short", Shape(max_positions=10))
    with pytest.raises(RequestError, match="short reads at most 10 tokens, not 16"):
        load(checkpoints.target, short).check(cut(path, checkpoints.target))
    small = write_checkpoint(tmp_path / "small", Shape(vocab_size=BEGIN))
    models = load(checkpoints.target, small)
    text = QualityText([[1, BEGIN, *range(14)]], 16)
    with pytest.raises(RequestError, match=f"the token {BEGIN}, and small has {BEGIN}"):
        models.check(text)


def test_other_vocabularies_are_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", tokens=[*reversed(ALPHABET)])
    with pytest.raises(PairError, match="A and B have different vocabularies: 256 of 258 ids differ .* in A, .* in B"):
        load(checkpoints.target, other)


def test_padding_of_a_head_is_not_compared(checkpoints: Checkpoints, path: Path, tmp_path: Path) -> None:
    """Models of one seed have the same rows."""
    padded = write_checkpoint(tmp_path / "padded", Shape(vocab_size=VOCAB_SIZE + 24))
    models = load(checkpoints.target, padded)
    [scores, *_] = models.scores(cut(path, checkpoints.target))
    np.testing.assert_allclose(scores.divergence, 0, atol=1e-12)


def test_logits_that_are_not_finite_are_an_error(
    checkpoints: Checkpoints, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = load(checkpoints.target, checkpoints.near)
    logits = models.judged.model.logits

    def damaged(hidden: torch.Tensor) -> torch.Tensor:
        return logits(hidden).index_fill(1, torch.tensor([7]), math.nan)

    monkeypatch.setattr(models.judged.model, "logits", damaged)
    with pytest.raises(ModelError, match=r"near \(reference.*\) has logits that are not finite"):
        next(models.scores(cut(path, checkpoints.target)))


def test_memory_is_bounded_for_large_vocabularies(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Checkpoints, path: Path
) -> None:
    models, rows = load(checkpoints.target, checkpoints.near), []

    def counting(p: torch.Tensor, q: torch.Tensor, after: torch.Tensor) -> quality.ChunkScores:
        rows.append((len(p), len(q), len(after)))
        return compare_logits(p, q, after)

    monkeypatch.setattr(quality, "compare_logits", counting)
    monkeypatch.setattr(quality, "_LOGITS", VOCAB_SIZE - 1)  # less than a row: one at a time
    next(models.scores(cut(path, checkpoints.target)))
    assert rows == [(1, 1, 1)] * (CONTEXT // 2 - 1)
