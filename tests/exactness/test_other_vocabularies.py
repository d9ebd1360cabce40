"""A draft model of another tokenizer, whose ids mean other tokens, keeps the output's distribution."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from speculant.config import Limits
from speculant.drafting import Drafter, DraftModelRunner, ModelDrafter, read_tree
from speculant.kernels import usable_sets
from speculant.lab.exactness import FULL_SUPPORT, MIXED, Pair, TableModel
from speculant.models import CausalLM, load_model
from speculant.params import SamplingParams
from speculant.sampling import Chances, KeyedChances
from speculant.types import DraftTree, Request
from tests.exactness import speculation
from tests.exactness.speculation import BRANCHING, LOSSLESS, Case
from tests.examples import examples
from tests.fakes import MakeCache, Rig, both_caches, build_rig, few_blocks, paged, slotted
from tests.mapped import WORDS, Words, mapped_drafter, table_of
from tests.models import HIDDEN_SIZE, Shape, make_request, write_checkpoint

KERNELS = ["reference", *(["native"] if usable_sets() else [])]
PROMPT = (0, 2, 1)
ZEROS = ("one-hot", "both one-hot", "disjoint", "zeros", "dense")
LONGER = 4  # times as many tokens as the target's, at most


def draft_pair(words: Words, pair: Pair) -> Pair:
    """Return random distributions over the draft's own tokens."""
    return Pair(pair.seed + 100, words.rows, pair.kinds)


def runner_of(model: CausalLM, chances: Chances, limits: Limits, cache: MakeCache = slotted) -> DraftModelRunner:
    longer = Limits(LONGER * limits.max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens)
    return DraftModelRunner(model, cache(model.cache_shape, longer), chances, limits.max_num_batched_tokens)


def with_table(words: Words, tree: Any, pair: Pair, chances: Chances, limits: Limits) -> Drafter:
    model = table_of(words, draft_pair(words, pair).draft)
    return mapped_drafter(runner_of(model, chances, limits), words.vocabulary, read_tree(tree))


@functools.cache
def load(name: str, kernels: str) -> CausalLM:
    """Load a random draft model with the ids of a target of 3 tokens."""
    words = WORDS[name]
    folder = Path(tempfile.mkdtemp(prefix="vocabulary-")) / "draft"
    write_checkpoint(folder, Shape(vocab_size=words.rows, end=0))
    dtype = "float64" if kernels == "reference" else "float32"  # its rows depend on the batch, in their last bits
    return load_model(str(folder), dtype, kernels=kernels, vocabulary=words.vocabulary).model


def with_model(name: str, kernels: str, tree: Any, pair: Pair, chances: Chances, limits: Limits) -> Drafter:
    return mapped_drafter(runner_of(load(name, kernels), chances, limits), WORDS[name].vocabulary, read_tree(tree))


def assert_exact(make: functools.partial[Drafter], verifier: str, length: int) -> None:
    accepted = 0.0
    for seed in range(examples(4, least=1)):
        pair = Pair(seed, 3, MIXED if seed % 2 else FULL_SUPPORT)
        case = Case(pair, length, verification=verifier, prompt=PROMPT, width=8, make_drafter=make)
        accepted += speculation.assert_exact(case)
    assert accepted > 0.02


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("name", WORDS)
def test_chains_of_other_ids_keep_the_distribution(name: str, verifier: str) -> None:
    assert_exact(functools.partial(with_table, WORDS[name], None), verifier, 2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", LOSSLESS)
def test_a_step_without_a_shared_token_has_no_draft(verifier: str) -> None:
    """The draft's tables often give the shared tokens no probability."""
    words, lengths = WORDS["some are shared"], list[int]()

    def make(pair: Pair, chances: Chances, limits: Limits) -> Drafter:
        drafter = with_table(words, None, pair, chances, limits)
        propose = drafter.propose

        def noting(requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
            trees = propose(requests, limits)
            lengths.extend(tree.size for tree in trees)
            return trees

        drafter.propose = noting  # type: ignore[method-assign]
        return drafter

    for seed in range(3):
        case = Case(Pair(seed, 3, ZEROS), 2, verification=verifier, prompt=PROMPT, width=8, make_drafter=make)
        speculation.assert_exact(case)
    assert {0, 2} <= {*lengths}


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", BRANCHING)
@pytest.mark.parametrize("name", WORDS)
def test_trees_of_other_ids_keep_the_distribution(name: str, verifier: str) -> None:
    assert_exact(functools.partial(with_table, WORDS[name], [2, 1]), verifier, 3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", WORDS)
def test_models_of_other_ids_keep_the_distribution(name: str, kernels: str, verifier: str) -> None:
    assert_exact(functools.partial(with_model, name, kernels, None), verifier, 2)


class CheckedMapping(ModelDrafter):
    """The real drafter, whose chains must carry the draft's distribution after its own tokens of the text."""

    words: Words
    pair: Pair
    sizes: list[int]

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        trees = super().propose(requests, limits)
        for request, tree in zip(requests, trees, strict=True):
            self.sizes.append(tree.size)
            if tree.size:
                assert tree.probs is not None
                texts = [(*request.tokens, *tree.token_list[:place]) for place in range(tree.size)]
                expected = [self.words.probs(self.pair.draft(self.words.expected(text))) for text in texts]
                wanted = torch.tensor(expected, dtype=torch.float64)
                torch.testing.assert_close(tree.probs, wanted, rtol=0, atol=1e-12)
        return trees


def checked(
    name: str, limits: Limits, cache: MakeCache, length: int = 3, longest: int = 1024
) -> tuple[Rig, CheckedMapping]:
    words, pair = WORDS[name], Pair(1, WORDS[name].size, FULL_SUPPORT)
    own = draft_pair(words, pair)
    model = table_of(words, own.draft)
    model.max_positions = longest
    drafter = mapped_drafter(runner_of(model, KeyedChances(), limits, cache), words.vocabulary, kind=CheckedMapping)
    assert isinstance(drafter, CheckedMapping)
    drafter.words, drafter.pair, drafter.sizes = words, own, []
    target = TableModel(pair.target, words.size)
    return build_rig(target, drafter, length=length, limits=limits, cache=cache), drafter


@pytest.mark.covering(1)
@both_caches
@pytest.mark.parametrize("name", WORDS)
def test_a_draft_reads_its_own_tokens_of_the_text(name: str, cache: MakeCache) -> None:
    """Prompts of several lengths in one batch, one of them twice, so that its prefix is found."""
    rig, drafter = checked(name, Limits(48, 4, 48), cache)
    for number, prompt in enumerate([(0,), (1, 2, 1, 0, 2, 2), (2, 2, 0, 1), (1, 2, 1, 0, 2, 2)]):
        rig.add(prompt, SamplingParams(max_tokens=16), str(number))
    rig.finish()
    assert max(drafter.sizes) == 3


@pytest.mark.parametrize("name", WORDS)
def test_a_backlog_of_other_tokens_is_caught_up(name: str) -> None:
    rig, drafter = checked(name, Limits(64, 2, 5), paged)
    rig.add((0, 1, 2, 2, 1, 0, 1, 1, 2, 1), SamplingParams(max_tokens=40), "long")
    rig.add((1,), SamplingParams(max_tokens=30), "short")
    rig.finish()
    assert max(drafter.sizes) >= 2


def test_preempted_requests_read_their_text_again() -> None:
    rig, drafter = checked("some are shared", Limits(40, 3, 24), few_blocks(14))
    for number in range(3):
        rig.add((number, 1, 2), SamplingParams(max_tokens=28), str(number))
    rig.finish()
    assert rig.engine.metrics.preemptions > 0
    assert max(drafter.sizes) > 1


def test_a_draft_ends_with_its_own_context() -> None:
    """It has more tokens than the target, and a position for each; the table model refuses further ones."""
    most = 0
    for longest in range(6, 14):
        rig, drafter = checked("some are shared", Limits(32, 1, 32), paged, longest=longest)
        rig.add((1, 2), SamplingParams(max_tokens=16), "short")
        rig.finish()
        assert drafter.sizes[-1] == 0
        most += max(drafter.sizes)
    assert most > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", WORDS)
def test_drafts_have_the_target_s_ids(name: str, kernels: str) -> None:
    """The same model without the mapping gives the logits, at its own ids, after its own tokens."""
    words, model = WORDS[name], load(name, kernels)
    drafter = with_model(name, kernels, None, Pair(0, 3), KeyedChances(), Limits(32, 1, 64))
    request = make_request([0, 1, 2, 2], shared_noise=False)
    drafter.begin(request)
    (tree,) = drafter.propose([request], [6])
    assert tree.probs is not None
    assert {*tree.token_list} <= {*words.shared}
    assert (tree.probs > 0).any(0).nonzero()[:, 0].tolist() == sorted(words.shared)
    states = torch.ones(1, HIDDEN_SIZE, dtype=model.cache_shape.dtype)
    folder = Path(tempfile.mkdtemp(prefix="vocabulary-")) / "draft"
    write_checkpoint(folder, Shape(vocab_size=words.rows, end=0))
    plain = load_model(str(folder), str(model.cache_shape.dtype).removeprefix("torch."), kernels=kernels).model
    logits, own = model.logits(states)[0], plain.logits(states)[0]
    assert logits.isfinite().nonzero()[:, 0].tolist() == sorted(words.shared)
    assert all(logits[token] == own[draft] for token, draft in words.shared.items())
    read = words.vocabulary.read([0, 1, 2])
    assert torch.equal(model.embed(torch.tensor(read)), plain.embed(torch.tensor(words.vocabulary.draft_tokens(read))))
