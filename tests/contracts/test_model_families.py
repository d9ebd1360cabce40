"""Every model family, found by its file, agrees with transformers, and with itself in any chunks and batches."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from speculant.models import CausalLM, SequenceInput
from speculant.types import DraftTree
from tests.unit.models.families import (
    FEW,
    NATIVE,
    REPEATING,
    STATES,
    MakePair,
    Pair,
    Session,
    cases,
    loading_pairs,
    make_pair,
    on_backends,
    random_tokens,
)

CLOSE = {"atol": 1e-4, "rtol": 0, "check_dtype": False}
ROUNDED = {**CLOSE, "atol": 3e-4}  # random states enlarge errors of float32; float64 has its own test
EXACT = {"atol": 1e-10, "rtol": 0}
PROMPT = random_tokens(24)
BEGINNINGS = [random_tokens(10, seed) for seed in range(6)]
TREE = DraftTree(
    tokens=torch.tensor([3, 9, 4, 3, 17, 9, 5, 30]),
    parents=torch.tensor([-1, -1, 0, 0, 1, 3, 3, 6]),
)


CHAIN = DraftTree.chain(TREE.token_list)


def tree_for(model: CausalLM) -> DraftTree:
    """Return the tree, or a chain for a model that takes no others."""
    return TREE if model.needs.most_nodes is None else CHAIN


def closeness(pair: Pair) -> dict[str, Any]:
    """Return how close the logits of transformers are."""
    return CLOSE if pair.ours.needs.most_nodes is None else ROUNDED


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Return a tree's nodes from the root's child down to `node`; none for the root (-1)."""
    return [] if node < 0 else [*path_to(tree, tree.parent_list[node]), node]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> MakePair:
    return loading_pairs(tmp_path_factory)


@pytest.fixture(params=on_backends("reference", "native"))
def pair(request: pytest.FixtureRequest, pairs: MakePair) -> Pair:
    """Return a model in float32 on a backend, to be compared with transformers."""
    return pairs(*request.param)


@pytest.fixture(params=on_backends("float64", "native"))
def steady(request: pytest.FixtureRequest, pairs: MakePair) -> Pair:
    """Return a model whose numbers hardly depend on how it is fed: they are wide, or rows are invariant."""
    backend, family, variant = request.param
    return pairs("steady" if backend == "native" else backend, family, variant)


def test_whole_prompt(pair: Pair) -> None:
    torch.testing.assert_close(Session(pair.ours).extend(PROMPT), pair.reference(PROMPT), **closeness(pair))


@pytest.mark.parametrize("steady", on_backends("float64", families=STATES), indirect=True)
def test_whole_prompt_in_float64(steady: Pair) -> None:
    torch.testing.assert_close(Session(steady.ours).extend(PROMPT), steady.reference(PROMPT), **EXACT)


@pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=NATIVE)])
@pytest.mark.parametrize(("family", "variant"), [case for case in cases() if case[0] in STATES])
def test_states_with_weights_of_usual_size(tmp_path: Path, family: str, variant: str, backend: str) -> None:
    made = make_pair(tmp_path, family, variant, spread=False)
    pair = made.on_native() if backend == "native" else made
    torch.testing.assert_close(Session(pair.ours).extend(PROMPT), pair.reference(PROMPT), atol=1e-5, rtol=0)


@pytest.mark.parametrize("pair", on_backends("reference", "native", families=FEW), indirect=True)
@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [1, 2, 5, 7, 23])
def test_prompt_in_chunks(pair: Pair, size: int) -> None:
    session = Session(pair.ours)
    logits = [session.extend(PROMPT[first : first + size]) for first in range(0, len(PROMPT), size)]
    torch.testing.assert_close(torch.cat(logits), pair.reference(PROMPT), **closeness(pair))


@pytest.mark.parametrize("pair", on_backends("reference", "native", families=FEW), indirect=True)
def test_several_sequences_in_one_batch(pair: Pair) -> None:
    """A fresh prompt, a chunk behind a context and a single row, side by side."""
    session = Session(pair.ours)
    prompts = [random_tokens(n, seed=n) for n in (9, 24, 13)]
    session.extend(prompts[1][:11], seq_id=1)
    session.extend(prompts[2][:12], seq_id=2)
    rests = [prompts[0], prompts[1][11:], prompts[2][12:]]
    logits = session.feed(*(SequenceInput(seq_id, rest, DraftTree.empty()) for seq_id, rest in enumerate(rests)))
    for part, prompt in zip(logits.split([len(rest) for rest in rests]), prompts, strict=True):
        torch.testing.assert_close(part, pair.reference(prompt)[-len(part) :], **closeness(pair))


@pytest.mark.parametrize("pair", on_backends("reference", "native", families=FEW), indirect=True)
@pytest.mark.covering(1)
@pytest.mark.parametrize("kept", [0, 1, 7, 20])
def test_truncate_and_replay(pair: Pair, kept: int) -> None:
    session = Session(pair.ours)
    session.extend([*PROMPT[:kept], *random_tokens(24 - kept, seed=5)])
    session.cache.truncate_to(0, kept)
    held = session.cache.length(0)
    assert held == (kept if pair.ours.needs.most_nodes is None else 0), "a state of committed tokens is not cut"
    torch.testing.assert_close(session.extend(PROMPT[held:]), pair.reference(PROMPT)[held:], **closeness(pair))


@pytest.mark.parametrize("steady", on_backends("float64", "native", families=FEW), indirect=True)
@pytest.mark.covering(1)
@pytest.mark.parametrize("context", [0, 4, 17])
def test_each_tree_path_equals_that_path_alone(steady: Pair, context: int) -> None:
    session, tree = Session(steady.ours), tree_for(steady.ours)
    if context:
        session.extend(PROMPT[:context])
    logits = session.feed(SequenceInput(0, PROMPT[context : context + 3], tree))
    for node in range(tree.size):
        tokens = PROMPT[: context + 3] + [tree.token_list[step] for step in path_to(tree, node)]
        alone = Session(steady.ours).extend(tokens)[-1]
        torch.testing.assert_close(logits[3 + node], alone, **EXACT)


@pytest.mark.parametrize("steady", on_backends("float64", "native", families=FEW), indirect=True)
@pytest.mark.covering(1)
@pytest.mark.parametrize("leaf", [-1, 1, 5, 7])
def test_after_keep_path_the_next_step_equals_a_fresh_prompt(steady: Pair, leaf: int) -> None:
    session, tree = Session(steady.ours), tree_for(steady.ours)
    session.feed(SequenceInput(0, PROMPT[:18], tree))
    path = path_to(tree, leaf)
    session.cache.compact(0, 18, path)
    tokens = PROMPT[:18] + [tree.token_list[node] for node in path] + [2, 8]
    fresh = Session(steady.ours).extend(tokens)
    torch.testing.assert_close(session.extend([2, 8]), fresh[-2:], **EXACT)


@functools.cache
def greedy_texts(model: PreTrainedModel) -> list[list[int]]:
    """Return transformers' own continuations of several prompts, worked out once for all backends.

    The sources of an encoder-decoder model are the prompts reversed. Without its cache, which keeps all keys for a
    sliding window of 1.
    """
    prompts, own = torch.tensor(BEGINNINGS), dict[str, Any]()
    if model.config.is_encoder_decoder:
        model.generation_config.forced_eos_token_id = None  # BART's, which the engine forces, and no model
        own = {"decoder_input_ids": prompts, "decoder_start_token_id": prompts[:, 0].tolist()}
    tokens = model.generate(
        prompts.flip(1) if own else prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
        max_new_tokens=12, use_cache=False, **own,
    )  # fmt: skip
    return list(tokens[:, prompts.shape[1] :].tolist())


@pytest.mark.parametrize("steady", on_backends("float64", "native", families=FEW), indirect=True)
def test_greedy_texts(steady: Pair) -> None:
    theirs = greedy_texts(steady.theirs)
    ours = [Session(steady.ours, sources={0: prompt[::-1]}).greedy(prompt, 12) for prompt in BEGINNINGS]
    assert ours == theirs
    repeating = steady.theirs.config.model_type in REPEATING
    assert repeating or len({token for text in theirs for token in text}) > 5, "loops of few tokens prove little"


@pytest.mark.parametrize("pair", on_backends("reference", "native", families=FEW), indirect=True)
def test_bfloat16_is_close(pair: Pair) -> None:
    """Rounding aside, bfloat16 takes the same path."""
    model = pair.in_bfloat16()
    narrow = Session(model).extend(PROMPT)
    assert model.cache_shape.dtype == torch.bfloat16
    wide = pair.reference(PROMPT).float()
    assert torch.nn.functional.cosine_similarity(wide, narrow.float()).mean() > 0.98
