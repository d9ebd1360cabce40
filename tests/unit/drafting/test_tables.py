"""Tables of bigrams: smoothing, back-off, files, and the drafter that draws from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file
from torch import Tensor

from speculant.constraints import Constraint
from speculant.drafting import FORMAT, BigramTables, DrafterContext, StaticDrafter, build
from speculant.errors import ConfigError
from speculant.lab.training import count_bigrams
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances
from tests.fakes import drafter_context
from tests.models import make_request

V = 6
TEXT = [0, 1, 0, 1, 0, 2, 3, 0, 1]


def tables(*texts: Sequence[int], vocab_size: int = V, continuations: int = 8) -> BigramTables:
    found = count_bigrams(texts, vocab_size)
    return BigramTables.of_counts(found.tokens, found.pairs, found.counts, continuations)


def test_tables_are_smoothed_as_documented() -> None:
    """Token 0 is followed three times by 1 and once by 2: two different tokens, so 2 of 6 events are left over."""
    made = tables(TEXT)
    unigram = (torch.tensor([4.0, 3, 1, 1, 0, 0]) + 4 / 6) / (9 + 4)
    torch.testing.assert_close(made.unigram, unigram)
    expected = unigram * 2 / 6 + torch.tensor([0, 3 / 6, 1 / 6, 0, 0, 0])
    torch.testing.assert_close(made.row(0), expected.double(), rtol=0, atol=1e-7)
    torch.testing.assert_close(made.row(5), unigram.double(), rtol=0, atol=1e-7)  # never seen: the unigrams alone


def test_tables_keep_the_most_frequent_continuations() -> None:
    made = tables([0, 3, 0, 2, 0, 2, 0, 1], continuations=2)
    first, end = made.offsets[:2].tolist()
    assert made.tokens[first:end].tolist() == [1, 2], "the most frequent, then the lowest id"
    assert made.offsets.diff().max() <= 2
    assert float(made.row(0).sum()) == pytest.approx(1, abs=1e-12)


texts = st.lists(st.lists(st.integers(0, V - 1), min_size=2, max_size=30), min_size=1, max_size=4)


@given(given_texts=texts, continuations=st.integers(1, 6))
def test_tables_have_rows_that_are_distributions(given_texts: list[list[int]], continuations: int) -> None:
    made = tables(*given_texts, continuations=continuations)
    assert list(made.problems(V)) == []
    rows = torch.stack([made.row(token) for token in range(V)])
    torch.testing.assert_close(rows.sum(-1), torch.ones(V, dtype=torch.float64), rtol=0, atol=1e-12)
    assert bool((rows > 0).all()), "every token is possible"
    torch.testing.assert_close(made.log_probs(range(V)).exp().double(), rows, rtol=1e-5, atol=1e-7)
    for token in range(V):
        assert [made.probability(token, other) for other in range(V)] == pytest.approx(rows[token].tolist(), abs=1e-7)


def test_tables_are_saved_and_loaded(tmp_path: Path) -> None:
    made = tables(TEXT)
    made.save(tmp_path / "t.safetensors")
    loaded = BigramTables.load(tmp_path / "t.safetensors", V)
    for name in BigramTables.__annotations__:
        assert torch.equal(getattr(made, name), getattr(loaded, name))


def tensors() -> dict[str, Tensor]:
    made = tables(TEXT)
    return {name: getattr(made, name).clone() for name in BigramTables.__annotations__}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    made = tensors()
    return {**made, name: change(made[name])}


def with_item(index: int, value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor[index] = value
        return tensor

    return change


BROKEN: dict[str, tuple[Callable[[], dict[str, Tensor]], str]] = {
    "another vocabulary": (lambda: {n: getattr(tables(TEXT, vocab_size=9), n) for n in tensors()}, "vocabulary has 6"),
    "a missing tensor": (lambda: {n: t for n, t in tensors().items() if n != "weights"}, "not a file of tables"),
    "another type": (lambda: changed("weights", Tensor.double), "weights of shape"),
    "another shape": (lambda: changed("unigram", lambda t: t.reshape(2, 3)), "unigram of shape"),
    "a scalar": (lambda: changed("unigram", lambda t: t.sum()), "unigram of shape"),
    "too few offsets": (lambda: changed("offsets", lambda t: t[:-1].clone()), "offsets of shape"),
    "offsets that go back": (lambda: changed("offsets", with_item(1, 9)), "offsets that do not divide"),
    "offsets beyond the end": (lambda: changed("offsets", with_item(-1, 99)), "offsets that do not divide"),
    "a token beyond": (lambda: changed("tokens", with_item(-1, V)), "not ascending token ids"),
    "a negative token": (lambda: changed("tokens", with_item(0, -1)), "not ascending token ids"),
    "a token twice": (lambda: changed("tokens", with_item(1, 1)), "not ascending token ids"),
    "a negative weight": (lambda: changed("weights", with_item(0, -0.1)), "not distributions"),
    "weights above 1": (lambda: changed("weights", with_item(0, 1.5)), "not distributions"),
    "a weight that is no number": (lambda: changed("weights", with_item(0, float("nan"))), "not distributions"),
    "an infinite weight": (lambda: changed("weights", with_item(0, float("inf"))), "not distributions"),
    "a unigram below 0": (lambda: changed("unigram", with_item(0, -0.1)), "not distributions"),
    "unigrams that do not sum to 1": (lambda: changed("unigram", lambda t: t * 2), "not distributions"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_tables_that_are_broken_are_refused(name: str, tmp_path: Path) -> None:
    make, reason = BROKEN[name]
    path = tmp_path / "t.safetensors"
    save_file(make(), path, metadata={"format": FORMAT})
    with pytest.raises(ConfigError, match=f"(?s){reason}.*Fix"):
        BigramTables.load(path, V)


def test_tables_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    for content in (b"", b"text", b"\xff" * 100):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="not a readable file"):
            BigramTables.load(path, V)
    with pytest.raises(ConfigError, match="not a readable file"):
        BigramTables.load(tmp_path / "missing", V)
    save_file(tensors(), path)
    with pytest.raises(ConfigError, match="not a file of tables"):
        BigramTables.load(path, V)


def context(**options: object) -> DrafterContext:
    return drafter_context(V, options)


def test_static_needs_its_tables(tmp_path: Path) -> None:
    for options in ({}, {"tables": ""}, {"tables": 5}):
        with pytest.raises(ConfigError, match=r"(?s)names none.*speculant train"):
            build(context(**options))
    tables(TEXT, vocab_size=V + 1).save(tmp_path / "t.safetensors")
    with pytest.raises(ConfigError, match="vocabulary has 6"):
        build(context(tables=str(tmp_path / "t.safetensors")))


def test_static_drafts_the_likeliest_of_greedy_requests() -> None:
    drafter = StaticDrafter(tables(TEXT), KeyedChances())
    request = make_request([4, 3], params=SamplingParams(temperature=0))
    (tree,) = drafter.propose([request], [4])
    assert tree.token_list == [0, 1, 0, 1]
    made = tables(TEXT)
    pairs = [(3, 0), (0, 1), (1, 0), (0, 1)]
    assert tree.scores == pytest.approx([float(made.row(first)[second]) for first, second in pairs], abs=1e-6)


def test_static_draws_from_the_probs_it_reports() -> None:
    """Penalties, bias, filters and a constraint change q as they change p."""

    class OnlyOdd:
        is_done = False

        def mask(self, tokens: Sequence[int] = ()) -> Tensor:
            return torch.tensor([0b101010], dtype=torch.int32)

        def advance(self, tokens: Sequence[int]) -> None: ...

        def rollback(self, n: int) -> None: ...

    constraint: Constraint = OnlyOdd()  # type: ignore[assignment]
    params = SamplingParams(temperature=0.7, logit_bias={5: 3.0}, frequency_penalty=0.4, top_k=2)
    drafter = StaticDrafter(tables(TEXT), KeyedChances())
    request = make_request([0], [1, 0], params, shared_noise=False, constraint=constraint)
    (tree,) = drafter.propose([request], [3])
    assert tree.probs is not None
    assert tree.scores is None, "what was drawn must not decide on the length"
    assert bool((tree.probs[:, ::2] == 0).all()), "the constraint holds"
    assert ((tree.probs > 0).sum(-1) <= 2).all(), "top_k holds"
    logits = tables(TEXT).row(0).log()
    logits[5] += 3.0
    logits -= 0.4 * torch.tensor([1, 1, 0, 0, 0, 0])  # of what was generated
    weights = (logits / 0.7).exp() * torch.tensor([0, 1, 0, 1, 0, 1.0])
    weights[weights < weights.topk(2).values.min()] = 0
    torch.testing.assert_close(tree.probs[0], weights / weights.sum(), rtol=1e-5, atol=1e-6)


def test_static_ends_a_draft_where_nothing_is_possible() -> None:
    drafter = StaticDrafter(tables(TEXT), KeyedChances())
    banned = SamplingParams(logit_bias=dict.fromkeys(range(V), float("-inf")))
    (tree,) = drafter.propose([make_request([1], params=banned, shared_noise=False)], [3])
    assert tree.size == 0


def test_counts_are_those_of_the_texts() -> None:
    found = count_bigrams([TEXT, [5], [], [1, 0]], V)
    assert found.tokens.tolist() == [5, 4, 1, 1, 0, 1]
    pairs = dict(zip(found.pairs.tolist(), found.counts.tolist(), strict=True))
    assert pairs == {0 * V + 1: 3, 1 * V + 0: 3, 0 * V + 2: 1, 2 * V + 3: 1, 3 * V + 0: 1}
    assert np.all(np.diff(found.pairs) > 0)


def test_counts_do_not_depend_on_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [np.random.default_rng(seed).integers(0, V, 40).tolist() for seed in range(9)]
    whole = count_bigrams(texts, V)
    monkeypatch.setattr("speculant.lab.training.corpus.BATCH", 50)
    parts = count_bigrams(texts, V)
    assert np.array_equal(whole.pairs, parts.pairs)
    assert np.array_equal(whole.counts, parts.counts)


@pytest.mark.parametrize(("texts", "reason"), [([[0, V]], "token 6"), ([[0, -1]], "vocabulary"), ([[1]], "no two")])
def test_counts_of_useless_texts_are_refused(texts: list[list[int]], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        count_bigrams(texts, V)
