"""Suffix drafts: from the request's own text and from finished ones, by salt and within a bound."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from speculant import LLM
from speculant.config import Limits
from speculant.drafting import PART, SuffixDrafter, SuffixOptions, SuffixStore, match_score
from speculant.errors import ConfigError
from speculant.kernels import NativeSuffixIndex, SuffixAutomaton, SuffixSettings, open_suffix_index
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel
from speculant.models import resolve_source
from speculant.params import SamplingParams
from speculant.text import Tokenizer
from speculant.types import CommittedRows, DraftTree, Ending, Request
from tests.fakes import build_rig, few_blocks
from tests.models import make_request

NATIVE_BYTES, REFERENCE_BYTES, SALT_BYTES = 190, 580, 3000
V = 4
TARGET = TableModel(Pair(6, V, FULL_SUPPORT).target, V)


def small_store(most_texts: int, most_tokens: int) -> SuffixStore:
    return SuffixStore(most_texts, most_tokens, lambda: open_suffix_index(SuffixSettings()))


class FullIndex(SuffixAutomaton):
    def extend(self, tokens: Sequence[int]) -> None:
        raise MemoryError


def known(store: SuffixStore, context: Sequence[int], salt: str = "") -> list[list[int]]:
    """Return a store's continuations of a context."""
    found = [index.continuation(context, 8) for index in store.indexes(salt)]
    return [each.tokens for each in found if each.tokens]


def draft(drafter: SuffixDrafter, request: Request, limit: int = 8) -> DraftTree:
    (tree,) = drafter.propose([request], [limit])
    return tree


def serve(drafter: SuffixDrafter, request: Request, reason: str | None = "stop") -> None:
    """Run a request from its first call to its last."""
    drafter.begin(request)
    drafter.observe(request, CommittedRows(0, request.tokens[:-1], request.output))
    request.ending = Ending(reason)
    drafter.end(request)


def asked(drafter: SuffixDrafter, prompt: Sequence[int], salt: str = "", seq_id: int = 77) -> list[int]:
    """Return the draft after a prompt."""
    request = make_request(prompt, seq_id=seq_id, cache_salt=salt)
    drafter.begin(request)
    tokens = draft(drafter, request).token_list
    drafter.end(request)
    return tokens


def test_suffix_drafts_from_its_own_text() -> None:
    assert asked(SuffixDrafter(SuffixOptions()), [1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6]
    assert asked(SuffixDrafter(SuffixOptions()), [1, 2, 3, 4, 5]) == []


def test_suffix_drafts_from_finished_requests() -> None:
    drafter = SuffixDrafter(SuffixOptions())
    serve(drafter, make_request([1, 2], [30, 31, 32, 33], seq_id=1))
    assert asked(drafter, [9, 8, 30, 31]) == [32, 33]
    assert asked(drafter, [1, 2]) == [30, 31], "the end of the prompt leads to the output"


def test_suffix_match_with_the_largest_sum_wins() -> None:
    drafter = SuffixDrafter(SuffixOptions())
    serve(drafter, make_request([5], [1, 2, 3, 4, 7, 8, 9], seq_id=1))
    prompt = [3, 4, 6, 6, 0, 1, 2, 3, 4]
    assert asked(drafter, prompt) == [7, 8, 9], "four tokens match in the store, two in the own text"
    assert asked(drafter, [*prompt[:5], 3, 4]) == [6, 6], "the same two match in both, and the own text comes first"


def test_suffix_scores_are_ratios_times_match_scores() -> None:
    drafter = SuffixDrafter(SuffixOptions())
    request = make_request([1, 2, 5, 0, 1, 2, 5, 0, 0, 1, 2, 6, 0, 3, 1, 2])
    drafter.begin(request)
    tree = draft(drafter, request)
    assert tree.token_list == [5, 0]
    assert tree.scores == pytest.approx([2 / 3 * match_score(2), 1.0 * match_score(3)])


@pytest.mark.parametrize(("factor", "expected"), [(0.5, 1), (1.0, 3), (2.0, 6), (0.0, 0)])
def test_suffix_factor_bounds_the_draft(factor: float, expected: int) -> None:
    drafter = SuffixDrafter(SuffixOptions(suffix_decoding_max_spec_factor=factor))
    assert asked(drafter, [1, 2, 3, 10, 11, 12, 13, 14, 15, 16, 17, 0, 1, 2, 3]) == list(range(10, 10 + expected))


def test_suffix_min_prob_ends_the_draft() -> None:
    prompt = [1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 0, 1, 2, 6, 7, 1, 2]
    for least, expected in ((0.1, [3, 5]), (0.5, [3]), (0.7, [])):
        assert asked(SuffixDrafter(SuffixOptions(suffix_decoding_min_token_prob=least)), prompt) == expected


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_suffix_learns_only_finished_outputs(reason: str | None) -> None:
    drafter = SuffixDrafter(SuffixOptions())
    serve(drafter, make_request([1, 2], [30, 31, 32, 33], seq_id=1), reason)
    assert drafter.store.num_texts == drafter.store.num_tokens == 0
    assert asked(drafter, [1, 2, 30, 31]) == []


def test_suffix_learns_a_preempted_request_once() -> None:
    drafter = SuffixDrafter(SuffixOptions())
    request = make_request([1, 2], [30, 31])
    serve(drafter, request, None)
    request.extend([32, 33])
    serve(drafter, request, "length")
    assert (drafter.store.num_texts, drafter.store.num_tokens) == (1, 6)
    assert asked(drafter, [7, 30, 31]) == [32, 33]
    assert not drafter._readers, "a request that ended left something behind"


def test_suffix_sequence_that_begins_anew_forgets() -> None:
    drafter = SuffixDrafter(SuffixOptions())
    request = make_request([1, 2, 3, 1])
    drafter.begin(request)
    assert draft(drafter, request).token_list == [2]
    drafter.end(request)
    other = make_request([4, 5, 6, 1])  # of the same id
    drafter.begin(other)
    assert draft(drafter, other).size == 0


def test_suffix_samples_do_not_see_one_another() -> None:
    drafter = SuffixDrafter(SuffixOptions())
    samples = [make_request([1, 2], [8, index, 9, 8], seq_id=index) for index in (3, 4)]
    for sample in samples:
        drafter.begin(sample)
    assert [tree.token_list for tree in drafter.propose(samples, [4, 4])] == [[3], [4]]


def test_suffix_salts_share_nothing() -> None:
    drafter = SuffixDrafter(SuffixOptions())
    serve(drafter, make_request([1, 2], [30, 31, 32, 33], seq_id=1, cache_salt="a"))
    serve(drafter, make_request([1, 2], [30, 41, 42, 43], seq_id=2, cache_salt="b"))
    assert asked(drafter, [0, 1, 2, 30], "a") == [31, 32, 33]
    assert asked(drafter, [0, 1, 2, 30], "b") == [41, 42, 43]
    assert asked(drafter, [0, 1, 2, 30], "c") == asked(drafter, [0, 1, 2, 30]) == []


def test_engine_leaves_only_finished_texts_in_the_store() -> None:
    """Preempted, forked and aborted requests on the real engine, with memory for two sequences of four."""
    limits, drafter = Limits(28, 4, 16), SuffixDrafter(SuffixOptions())
    rig = build_rig(TARGET, drafter, length=5, limits=limits, cache=few_blocks(8))
    params: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
    requests = rig.add((1,) * 9, SamplingParams(temperature=0, **params), "one", cache_salt="x")
    requests += rig.add((0, 1, 2), SamplingParams(seed=5, n=3, **params), "three")
    aborted = rig.add((2, 3, 0), SamplingParams(seed=1, **params), "aborted", cache_salt="y")
    while aborted[0].num_output < 3:
        rig.step()
    rig.abort("aborted")
    rig.finish()
    assert rig.engine.metrics.preemptions > 0
    assert drafter.store.num_texts == len(requests) == 4
    assert drafter.store.num_tokens == sum(len(request.tokens) for request in requests)
    assert set(drafter.store._newer.indexes) == {"x", ""}
    assert not drafter._readers


@given(
    most_texts=st.integers(0, 5),
    most_tokens=st.integers(0, 30),
    texts=st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 20)), max_size=30),
)
def test_store_keeps_to_its_bounds(most_texts: int, most_tokens: int, texts: list[tuple[str, int]]) -> None:
    store = small_store(most_texts, most_tokens)
    for number, (salt, length) in enumerate(texts):
        text = list(range(100 * number, 100 * number + length))
        store.add(salt, text)
        assert store.num_texts <= most_texts
        assert store.num_tokens <= most_tokens
        kept = text[-(most_tokens // 2) :] if most_texts and most_tokens > 1 else []
        if len(kept) > 1:
            assert known(store, kept[:1], salt) == [kept[1:2]], "the newest text is there"


def test_store_drops_the_oldest_texts_first() -> None:
    store = small_store(10, 10_000)
    for number in range(100):
        store.add("", [1000 + number, number, number])
        there = [bool(known(store, [1000 + earlier])) for earlier in range(number + 1)]
        assert there == sorted(there), "a text outlived a newer one"
        assert min(number + 1, 5) <= sum(there) == store.num_texts <= 10


@pytest.mark.slow
def test_store_of_ten_thousand_requests_is_bounded() -> None:
    drafter = SuffixDrafter(SuffixOptions(suffix_decoding_corpus_tokens=100_000))
    for number in range(12_000):
        prompt, output = [number % 50, 7], [(number * each) % 997 for each in range(1, 16)]
        serve(drafter, make_request(prompt, output, seq_id=number, cache_salt=str(number % 10)))
        if number % 500 == 0:
            assert drafter.store.num_texts <= 10_000
            assert drafter.store.num_tokens <= 100_000
    assert drafter.store.num_tokens > 50_000 - 17, "the newest half of the bound is there"
    per_token = NATIVE_BYTES if isinstance(open_suffix_index(SuffixSettings()), NativeSuffixIndex) else REFERENCE_BYTES
    assert drafter.store.num_bytes <= per_token * 100_000 + SALT_BYTES * 2 * 10


@pytest.mark.slow
def test_store_of_many_requests_counts_requests() -> None:
    drafter = SuffixDrafter(SuffixOptions())
    for number in range(11_000):
        serve(drafter, make_request([1], [number, number + 1], seq_id=number))
    assert 5000 <= drafter.store.num_texts <= 10_000
    assert known(drafter.store, [10_999])
    assert not known(drafter.store, [10])


@pytest.mark.parametrize("name", ["suffix_decoding_max_cached_requests", "suffix_decoding_corpus_tokens"])
def test_store_of_no_size_learns_nothing(name: str) -> None:
    options: dict[str, Any] = {name: 0}
    drafter = SuffixDrafter(SuffixOptions(**options))
    serve(drafter, make_request([1, 2], [30, 31, 32, 33], seq_id=1))
    assert drafter.store.num_texts == 0
    assert asked(drafter, [0, 30, 31]) == []


def test_suffix_defaults_are_those_of_vllm() -> None:
    options = SuffixOptions()
    assert options.suffix_decoding_max_tree_depth == 24
    assert options.suffix_decoding_max_cached_requests == 10_000
    assert options.suffix_decoding_max_spec_factor == 1.0
    assert options.suffix_decoding_min_token_prob == 0.1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tree_depth", 1),
        ("max_cached_requests", -1),
        ("max_spec_factor", -0.1),
        ("max_spec_factor", math.inf),
        ("max_spec_factor", math.nan),
        ("min_token_prob", 1.1),
        ("min_token_prob", math.nan),
        ("corpus_tokens", -1),
    ],
)
def test_impossible_suffix_options_are_refused(name: str, value: float) -> None:
    options: dict[str, Any] = {f"suffix_decoding_{name}": value}
    with pytest.raises(ConfigError, match=name):
        SuffixOptions(**options)


TEXT = "def area_of_a_rectangle(width, height):\n    return width * height\n"


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("demo", use_speculative_decoding=False)


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_corpus_is_continued_from_the_first_request_on(tmp_path: Path, plain: LLM, kind: str) -> None:
    file = tmp_path / f"corpus.{kind}"
    tokens = Tokenizer.load(resolve_source("demo", "target")).encode(TEXT, add_special_tokens=False)
    file.write_text(TEXT if kind == "txt" else json.dumps({"token_ids": tokens}) + "\n[1, 2]\n", encoding="utf-8")
    config = {"method": "suffix", "num_speculative_tokens": 4, "draft_length": "fixed"}
    prompt, params = tokens[:6], SamplingParams(temperature=0, max_tokens=1)
    drafted = []
    for corpus in ({}, {"suffix_corpus": str(file)}):
        llm = LLM("demo", speculative_config={**config, **corpus})
        (output,) = llm.generate([prompt], params)
        drafted.append(known(drafter_of(llm).store, prompt, "another"))
        assert output.outputs[0].token_ids == plain.generate([prompt], params)[0].outputs[0].token_ids
    assert drafted == [[], [tokens[6:12]]]


def drafter_of(llm: LLM) -> SuffixDrafter:
    drafter = llm.engine._drafters.sub_drafters["suffix"]
    assert isinstance(drafter, SuffixDrafter)
    return drafter


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokens.jsonl", "[1, 2, 99999999]", "has the token 99999999"),
        ("tokens.jsonl", "{}", "has no token ids"),
        ("missing.txt", None, "can't be read as text"),
    ],
)
def test_a_wrong_corpus_is_refused(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    config = {"method": "suffix", "num_speculative_tokens": 4, "suffix_corpus": str(tmp_path / name)}
    with pytest.raises(ConfigError, match=words):
        LLM("demo", speculative_config=config)


def test_running_requests_draft_from_one_another() -> None:
    """A part of an output is learnt while its request runs; the rest, once, when it ends."""
    drafter, text = SuffixDrafter(SuffixOptions()), [*range(200, 290)]
    running = make_request([1, 2, 3], text[: PART - 1], seq_id=1)
    drafter.begin(running)
    draft(drafter, running)
    assert asked(drafter, [9, *text[:5]]) == []
    running.extend(text[PART - 1 : PART])
    draft(drafter, running)
    assert asked(drafter, [9, *text[:5]])[:3] == text[5:8]
    assert drafter.store.num_tokens == 3 + PART
    running.extend(text[PART:])
    running.ending = Ending("stop")
    drafter.end(running)
    rest = len(text) - PART
    assert drafter.store.num_tokens == 3 + PART + SuffixOptions().suffix_decoding_max_tree_depth - 1 + rest
    assert asked(drafter, text[PART - 3 : PART])[:3] == text[PART : PART + 3]


def test_a_preempted_request_is_learnt_once() -> None:
    drafter, text = SuffixDrafter(SuffixOptions()), [*range(200, 200 + PART)]
    running = make_request([1, 2, 3], text, seq_id=1)
    for _ in range(2):
        drafter.begin(running)
        draft(drafter, running)
        drafter.end(running)
    assert drafter.store.num_tokens == 3 + PART


def test_a_store_goes_on_after_an_index_without_memory() -> None:
    indexes = iter([FullIndex(SuffixSettings()), open_suffix_index(SuffixSettings())])
    store = SuffixStore(8, 100, lambda: next(indexes))
    with pytest.raises(MemoryError):
        store.add("", [1, 2, 3, 4])
    store.add("", [1, 2, 3, 4])
    assert known(store, [2, 3])
