"""Heads that draft a block in one pass, against a reference that is written out; and files that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from speculant import LLM, plugins
from speculant.cache import CacheShape, KVCache, paged_cache, slotted_cache
from speculant.drafting import Drafter
from speculant.errors import ConfigError, ModelError, PairError, SpeculantError
from speculant.kernels import usable_sets
from speculant.models import CausalLM, load_model
from speculant.params import SamplingParams
from speculant.types import DraftTree, Request
from tests.heads import Shown, fresh_states, head_context, write_dflash
from tests.layers import layer, normed
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Checkpoints, Shape, make_request, write_checkpoint

H, V = HIDDEN_SIZE, VOCAB_SIZE
TEXT = [7, 1, 2, 3, 4, 1, 2, 250, 5, 1, 2]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=None)
KERNELS = ["reference", *(["native"] if usable_sets() else [])]
SIZE, MASK = 5, 1
OF_AUTHORS = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}


def target_of(checkpoints: Checkpoints, kernels: str = "reference") -> CausalLM:
    return load_model(checkpoints.target, "float32", kernels=kernels).model


def build(folder: str, target: CausalLM, cache: Any = None, **options: Any) -> Drafter:
    context = head_context(folder, target, options)
    context = replace(context, make_cache=cache) if cache else context
    return Shown(plugins.load("speculant.drafting", "dflash").build(context), target)


def begun(drafter: Drafter, tokens: Sequence[int], seq_id: int = 1, params: SamplingParams = SAMPLED) -> Request:
    request = make_request(tokens, params=params, seq_id=seq_id, shared_noise=params.greedy)
    drafter.begin(request)
    return request


@torch.inference_mode()
def proposed(drafter: Drafter, requests: Sequence[Request], limit: int = SIZE) -> list[DraftTree]:
    return drafter.propose(requests, [limit] * len(requests))


def probs_of(tree: DraftTree) -> Tensor:
    assert tree.probs is not None
    return tree.probs


@torch.inference_mode()
def block_logits(
    folder: str, target: CausalLM, text: Sequence[int], window: int | None = None, factor: float = 1.0
) -> Tensor:
    """Return the logits [size, V] of a block; with a window, each row is causal and sees that many positions.

    factor: of the target's embeddings.
    """
    of, states = load_file(f"{folder}/model.safetensors"), torch.cat(fresh_states(target, text[:-1], (1, 2)), dim=-1)
    context = normed(states @ of["fc.weight"].T, of["hidden_norm.weight"])
    x, count = factor * target.embed(torch.tensor([text[-1], *[MASK] * (SIZE - 1)])), len(context)
    places = torch.arange(count + SIZE)
    rows = places[count:, None]
    hidden = (places > rows) | (places <= rows - window) if window else torch.zeros(SIZE, count + SIZE).bool()
    for each in range(2):
        x = layer(of, f"layers.{each}.", x, hidden, context)
    return target.logits(normed(x, of["norm.weight"]))


def assert_drawn_from(tree: DraftTree, logits: Tensor) -> None:
    torch.testing.assert_close(probs_of(tree), logits.softmax(-1).double(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_each_token_is_drawn_from_its_own_row(tmp_path: Path, checkpoints: Checkpoints, kernels: str) -> None:
    """In a second round too, after other tokens than the drafted ones; a block is whole, whatever the limit is."""
    target, folder = target_of(checkpoints, kernels), write_dflash(tmp_path / "head", H, V)
    drafter = build(folder, target)
    request = begun(drafter, TEXT)
    for limit in (SIZE, 2):
        (tree,) = proposed(drafter, [request], limit)
        assert tree.size == min(limit, SIZE - 1)
        assert_drawn_from(tree, block_logits(folder, target, request.tokens)[1 : 1 + tree.size])
        assert drafter.caches[0].length(1) == len(request.tokens) - 2  # the newest state's row is computed again
        request.tokens += [7, 9, 11]


@pytest.mark.parametrize("kernels", KERNELS)
def test_windows_of_the_authors_are_causal(tmp_path: Path, checkpoints: Checkpoints, kernels: str) -> None:
    target, sliding = target_of(checkpoints, kernels), ["sliding_attention"] * 2
    windows = {"layer_types": sliding, "use_sliding_window": True, "sliding_window": 3}
    folder = write_dflash(tmp_path / "head", H, V, **windows)
    drafter = build(folder, target)
    (tree,) = proposed(drafter, [begun(drafter, TEXT)])
    assert_drawn_from(tree, block_logits(folder, target, TEXT, window=3)[1:])


@pytest.mark.parametrize("kernels", KERNELS)
def test_causal_blocks(tmp_path: Path, checkpoints: Checkpoints, kernels: str) -> None:
    target = target_of(checkpoints, kernels)
    folder = write_dflash(tmp_path / "head", H, V, is_causal=True)
    drafter = build(folder, target)
    (tree,) = proposed(drafter, [begun(drafter, TEXT)])
    assert_drawn_from(tree, block_logits(folder, target, TEXT, window=100)[1:])


@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_depends_on_the_batch_or_on_chunks(tmp_path: Path, checkpoints: Checkpoints, dtype: str) -> None:
    target, folder = load_model(checkpoints.target, dtype, kernels="native").model, write_dflash(tmp_path / "h", H, V)
    texts = [TEXT, [*TEXT, *range(100, 150)], [3, 4], list(range(60, 90))]
    alone = list[Tensor]()
    for text in texts:
        drafter = build(folder, target)
        alone.append(probs_of(*proposed(drafter, [begun(drafter, text)])))
    drafter = build(folder, target)
    requests = [begun(drafter, text, seq_id) for seq_id, text in enumerate(texts)]
    first, *_, trees = [proposed(drafter, requests) for _ in range(4)]
    assert [tree.size for tree in first] == [4, 0, 0, 0], "a pass has 64 rows, so texts are processed in parts"
    assert all(torch.equal(probs_of(tree), probs) for tree, probs in zip(trees, alone, strict=True))


def test_a_tree_has_the_likeliest_tokens_of_each_row(tmp_path: Path, checkpoints: Checkpoints) -> None:
    target, folder = target_of(checkpoints), write_dflash(tmp_path / "head", H, V)
    best = block_logits(folder, target, TEXT)[1:3].topk(3).indices.tolist()
    drafter = build(folder, target, tree=[3, 2])
    (tree,) = proposed(drafter, [begun(drafter, TEXT, params=SamplingParams(temperature=0))], 9)
    assert tree.token_list == [*best[0], *best[1][:2] * 3]
    with pytest.raises(ConfigError, match="5 levels, and the head in .* drafts blocks of 4 tokens"):
        build(folder, target, tree=[1] * 5)


@pytest.mark.parametrize(
    ("room", "tree", "drafted"), [(5, None, 4), (3, None, 2), (3, [2, 1], 4), (1, None, 0), (2, [2, 1], 0)]
)
def test_a_block_is_as_large_as_the_cache_allows(
    tmp_path: Path, checkpoints: Checkpoints, room: int, tree: Any, drafted: int
) -> None:
    def cache(shape: CacheShape) -> KVCache:
        return slotted_cache(shape, 1, len(TEXT) - 1 + room)

    drafter = build(write_dflash(tmp_path / "head", H, V), target_of(checkpoints), cache, tree=tree)
    (found,) = proposed(drafter, [begun(drafter, TEXT)])
    assert found.size == drafted
    drafter.caches[0].check()


def test_sequences_that_share_too_few_blocks_draft_in_turn(tmp_path: Path, checkpoints: Checkpoints) -> None:
    def cache(shape: CacheShape) -> KVCache:
        return paged_cache(shape, 7, 4)  # each text has three of these blocks, and the third has room for two rows

    drafter = build(write_dflash(tmp_path / "head", H, V), target_of(checkpoints), cache)
    requests = [begun(drafter, TEXT, seq_id) for seq_id in range(2)]
    assert [tree.size for tree in proposed(drafter, requests)] == [4, 1]
    drafter.caches[0].check()


def test_forms_of_a_file_are_one_head(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """The authors count layers from the first one's output, `speculators` from the embeddings."""
    target = target_of(checkpoints)
    within = {**OF_AUTHORS, "block_size": SIZE}
    theirs = write_dflash(tmp_path / "authors", H, V, block_size=None, dflash_config=within)
    package = {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": MASK}
    found = []
    for folder in (theirs, write_dflash(tmp_path / "package", H, V, dflash_config=None, **package)):
        drafter = build(folder, target)
        found.append(probs_of(*proposed(drafter, [begun(drafter, TEXT)])))
    assert torch.equal(*found)


WRONG: dict[str, tuple[dict[str, Any], type[SpeculantError], str]] = {
    "no mask": ({"dflash_config": {"target_layer_ids": [0, 1]}}, ModelError, "mask token None"),
    "another mask": ({"dflash_config": {**OF_AUTHORS, "mask_token_id": V}}, ModelError, f"mask token {V}"),
    "no layers": ({"dflash_config": {**OF_AUTHORS, "target_layer_ids": []}}, PairError, "names the target's layers"),
    "other layers": ({"dflash_config": {**OF_AUTHORS, "target_layer_ids": [0, 2]}}, PairError, r"layers \[0, 2\]"),
    "one row": ({"block_size": 1}, ModelError, "blocks of 1 row"),
    "a scale": ({"dflash_config": {**OF_AUTHORS, "input_embedding_scale": -1}}, ModelError, "input_embedding_scale"),
    "no object": ({"dflash_config": [0, 1]}, ModelError, "dflash_config that is no object"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, checkpoints: Checkpoints, name: str) -> None:
    config, error, match = WRONG[name]
    folder = write_dflash(tmp_path / "head", H, V, **config)
    with pytest.raises(error, match=match):
        build(folder, target_of(checkpoints))


def test_a_head_of_blocks_is_known_by_its_config(tmp_path: Path, checkpoints: Checkpoints) -> None:
    folder = write_dflash(tmp_path / "head", H, V)
    assert "dflash" in LLM(checkpoints.target, draft_model=folder, spec_length=3).speculation


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_embeddings_have_the_head_s_scale(tmp_path: Path, scale: float, kernels: str) -> None:
    """Gemma multiplies embeddings by another number."""
    target = load_model(write_checkpoint(tmp_path / "gemma", Shape("gemma2")), "float32", kernels=kernels).model
    named = {"input_embedding_scale": scale} if scale != 1 else {}
    folder = write_dflash(tmp_path / "head", H, V, dflash_config={**OF_AUTHORS, **named})
    drafter = build(folder, target)
    (tree,) = proposed(drafter, [begun(drafter, TEXT)])
    assert_drawn_from(tree, block_logits(folder, target, TEXT, factor=scale / H**0.5)[1:])
