"""Modules in a chain, each of which drafts one token, against a reference that computes whole texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from speculant import plugins
from speculant.cache import CacheShape, KVCache, paged_cache
from speculant.drafting import Drafter
from speculant.kernels import usable_sets
from speculant.models import CausalLM, load_model
from speculant.params import SamplingParams
from speculant.types import CommittedRows, DraftTree, Request
from tests.heads import Shown, fresh_states, head_context, write_mtp
from tests.layers import layer, normed
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Checkpoints, make_request

H, V = HIDDEN_SIZE, VOCAB_SIZE
TEXT = [7, 1, 2, 3, 4, 1, 2, 250, 5, 1, 2]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=None)
KERNELS = ["reference", *(["native"] if usable_sets() else [])]


def build(folder: str, target: CausalLM, budget: int = 64, blocks: int = 64, **options: object) -> Drafter:
    def cache(shape: CacheShape) -> KVCache:
        return paged_cache(shape, blocks, 4)

    context = replace(head_context(folder, target, options), max_num_batched_tokens=budget, make_cache=cache)
    drafter: Drafter = plugins.load("speculant.drafting", "mtp").build(context)
    return drafter


def begun(drafter: Drafter, tokens: Sequence[int], seq_id: int = 1) -> Request:
    request = make_request(tokens, params=SAMPLED, seq_id=seq_id, shared_noise=False)
    drafter.begin(request)
    return request


@torch.inference_mode()
def proposed(drafter: Drafter, requests: Sequence[Request], limit: int = 9) -> list[DraftTree]:
    return drafter.propose(requests, [limit] * len(requests))


@torch.inference_mode()
def expected(folder: str, target: CausalLM, text: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """Return the logits [n, V] of each of n drafted tokens after a text, by the names of the `speculators` package."""
    of, logits = load_file(f"{folder}/model.safetensors"), list[Tensor]()
    (states,) = fresh_states(target, text[:-1], (target.num_layers + 1,))
    hidden = torch.ones(len(states), len(states), dtype=torch.bool).triu(1)
    for module in range(len(drafted)):
        prefix = f"mtp_layers.{module}."
        tokens = target.embed(torch.tensor([*text, *drafted][module + 1 : module + len(text)]))
        entering = (
            normed(tokens, of[f"{prefix}token_layernorm.weight"]),
            normed(states, of[f"{prefix}hidden_layernorm.weight"]),
        )
        x = layer(of, prefix, torch.cat(entering, dim=-1) @ of[f"{prefix}input_proj.weight"].T, hidden)
        states = normed(x, of[f"{prefix}final_layernorm.weight"])
        logits.append(target.logits(states)[-1])
    return torch.stack(logits)


def assert_drawn_from(tree: DraftTree, logits: Tensor) -> None:
    assert tree.probs is not None
    torch.testing.assert_close(tree.probs, logits.softmax(-1).double(), atol=1e-5, rtol=1e-4)


def loaded(checkpoints: Checkpoints, kernels: str = "reference") -> CausalLM:
    return load_model(checkpoints.target, "float32", kernels=kernels).model


@pytest.mark.parametrize("kernels", KERNELS)
def test_each_module_drafts_a_token(tmp_path: Path, checkpoints: Checkpoints, kernels: str) -> None:
    """Also after rounds whose drafts were rejected, accepted in part, or were shorter."""
    target, folder = loaded(checkpoints, kernels), write_mtp(tmp_path / "head", H, V, modules=3)
    drafter = Shown(build(folder, target), target)
    request = begun(drafter, TEXT)
    for limit, size, more in ((9, 3, [7]), (2, 2, [9, 11]), (1, 1, []), (3, 3, [5, 6, 7, 8, 9]), (3, 3, [])):
        (tree,) = proposed(drafter, [request], limit)
        assert tree.size == size
        assert_drawn_from(tree, expected(folder, target, request.tokens, tree.token_list))
        for cache in drafter.caches:
            cache.check()
        request.tokens += tree.token_list[:1] + more if more else []
    assert [cache.length(1) for cache in drafter.caches] == [len(request.tokens) - 1 - lag for lag in (1, 1, 2)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_no_draft_depends_on_the_batch_or_on_chunks(tmp_path: Path, checkpoints: Checkpoints, kernels: str) -> None:
    target, folder = loaded(checkpoints, kernels), write_mtp(tmp_path / "head", H, V, modules=3)
    texts = [TEXT, [*TEXT, *range(100, 130)], [3, 4], list(range(60, 90))]
    drafter = Shown(build(folder, target, budget=16), target)
    requests = [begun(drafter, text, seq_id) for seq_id, text in enumerate(texts)]
    rounds = [proposed(drafter, requests) for _ in range(12)]
    assert any(tree.size == 0 for tree in rounds[0])
    for text, tree in zip(texts, rounds[-1], strict=True):
        assert_drawn_from(tree, expected(folder, target, text, tree.token_list))


def test_a_prefix_is_taken_over_by_all_modules(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """States of the positions that the target took over are not observed again, and drafts are the same."""
    target, folder = loaded(checkpoints), write_mtp(tmp_path / "head", H, V, modules=3)
    drafter, text = build(folder, target), [*TEXT, *range(40, 52)]
    first = begun(drafter, text, 1)
    drafter.observe(first, state_rows(target, text, 0))
    for _ in range(2):  # rows enter the index when the next draft begins
        (tree,) = proposed(drafter, [first])
    second = make_request(text, params=SAMPLED, seq_id=2, shared_noise=False)
    assert drafter.match_prefix(second) == len(text)
    drafter.begin(second)
    drafter.observe(second, state_rows(target, text, len(text) - 4))  # row i of the third module is that of token i + 3
    (other,) = proposed(drafter, [second])
    assert_drawn_from(other, expected(folder, target, text, other.token_list))
    assert tree.size == other.size == 3


def test_rows_of_a_prefix_may_be_missing(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """The target takes over more than the modules know: they draft, and give nobody rows at other places."""
    target, folder = loaded(checkpoints), write_mtp(tmp_path / "head", H, V, modules=3)
    drafter, text = build(folder, target), [*TEXT, *range(40, 52)]
    for seq_id in (1, 2):
        late = begun(drafter, text, seq_id)
        drafter.observe(late, state_rows(target, text, len(text) - 3))
        for _ in range(2):
            (tree,) = proposed(drafter, [late])
            assert tree.size == 3
        assert [cache.length(seq_id) for cache in drafter.caches] == [1, 1, 0]
        drafter.end(late)


def state_rows(target: CausalLM, text: Sequence[int], start: int) -> CommittedRows:
    (states,) = fresh_states(target, text[:-1], (target.num_layers + 1,))
    return CommittedRows(start, text[start:-1], hidden=(states[start:],))


def test_a_module_without_room_ends_the_draft(tmp_path: Path, checkpoints: Checkpoints) -> None:
    target, folder = loaded(checkpoints), write_mtp(tmp_path / "head", H, V, modules=3)
    drafter = Shown(build(folder, target, blocks=3), target)  # of 12 rows
    request = begun(drafter, TEXT)
    while len(request.tokens) < 16:
        (tree,) = proposed(drafter, [request])
        if tree.size:
            assert_drawn_from(tree, expected(folder, target, request.tokens, tree.token_list))
        request.tokens.append(3)
    assert not tree.size


@pytest.mark.parametrize("form", ["mimo", "qwen", "deepseek"])
def test_forms_of_several_modules(tmp_path: Path, checkpoints: Checkpoints, form: str) -> None:
    """Qwen's modules differ in their layer alone; DeepSeek's hand on the state before the final norm."""
    target = loaded(checkpoints)
    folders = [write_mtp(tmp_path / each, H, V, each, modules=3) for each in ("speculators", form)]
    usual, theirs = (Shown(build(folder, target), target) for folder in folders)
    ((tree,), (other,)) = (proposed(drafter, [begun(drafter, TEXT)]) for drafter in (usual, theirs))
    assert tree.size == other.size == 3
    assert tree.probs is not None
    assert other.probs is not None
    assert torch.equal(tree.probs[0], other.probs[0])
    assert torch.equal(tree.probs, other.probs) == (form == "mimo")


def test_config_may_name_fewer_modules(tmp_path: Path, checkpoints: Checkpoints) -> None:
    target = loaded(checkpoints)
    sizes = {"num_nextn_predict_layers": 2}
    folder = write_mtp(tmp_path / "head", H, V, "mimo", modules=3, **sizes)
    assert build(folder, target).needs.max_nodes == 2
    assert build(folder, target, tree=[2, 2]).needs.max_nodes == 6, "the first module draws trees"
