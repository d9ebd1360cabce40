"""Models that were trained to read masks draft all tokens in one pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from speculant import LLM, SamplingParams
from speculant.cache.base import KVStorage
from speculant.cache.factory import slotted_cache
from speculant.drafting.model.drafter import OnePassDrafter, mask_of
from speculant.drafting.model.runner import DraftModelRunner
from speculant.drafting.topology import StaticTree
from speculant.errors import ModelError, PairError
from speculant.models.base import Batch, CausalLM, Hidden
from speculant.models.vocabulary import DraftVocabulary
from speculant.models.weights.load import load_model
from speculant.sampling.chance import KeyedChances
from speculant.types import DraftTree, Request
from tests.drafters import with_mask
from tests.models import VOCAB_SIZE, Checkpoints, make_request

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=1.0)
PROMPT = list(range(40, 60))
MASK = 3


@pytest.fixture(scope="module")
def folder(checkpoints: Checkpoints) -> Path:
    return Path(with_mask(checkpoints.near, MASK))


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return load_model(str(folder), "float64", "cpu").model


def drafter_of(model: CausalLM, topology: StaticTree | None = None, stop_below: float = 0.0) -> OnePassDrafter:
    mask = mask_of(model)
    assert mask is not None
    cache = slotted_cache(model.cache_shape, 4, 64)
    return OnePassDrafter(
        DraftModelRunner(model, cache, KeyedChances(), 256, stop_below), mask, VOCAB_SIZE, topology=topology
    )


def begun(drafter: OnePassDrafter, params: SamplingParams, tokens: Sequence[int] = PROMPT, seq_id: int = 1) -> Request:
    request = make_request(tokens, params=params, seq_id=seq_id, shared_noise=params.greedy)
    drafter.begin(request)
    return request


def expected(folder: Path, tokens: Sequence[int], depth: int) -> torch.Tensor:
    """Return transformers' logits [depth, V] after the tokens and after each of depth - 1 masks."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.inference_mode():
        out: torch.Tensor = theirs(torch.tensor([[*tokens, *[MASK] * (depth - 1)]])).logits[0, -depth:]
    return out


def proposed(drafter: OnePassDrafter, request: Request, limit: int) -> DraftTree:
    (tree,) = drafter.propose([request], [limit])
    return tree


def test_each_token_is_drawn_from_its_own_mask_s_row(folder: Path, model: CausalLM) -> None:
    drafter = drafter_of(model)
    request, rows = begun(drafter, SAMPLED), expected(folder, PROMPT, 6)
    tree = proposed(drafter, request, 6)
    assert tree.probs is not None
    assert tree.parent_list == [-1, 0, 1, 2, 3, 4]
    torch.testing.assert_close(tree.probs, rows.softmax(-1), rtol=0, atol=1e-6)


def test_later_drafts_read_committed_tokens_alone(folder: Path, model: CausalLM) -> None:
    """Nothing that was drafted, and no mask, is part of the text that the next draft follows."""
    drafter = drafter_of(model)
    request = begun(drafter, GREEDY)
    proposed(drafter, request, 8)
    assert drafter.caches[0].length(1) == len(PROMPT)
    request.tokens += [7, 9, 11]
    tree = proposed(drafter, request, 5)
    assert tree.token_list == expected(folder, request.tokens, 5).argmax(-1).tolist()
    assert drafter.caches[0].length(1) == len(request.tokens)


def test_a_draft_ends_after_an_unlikely_token(folder: Path, model: CausalLM) -> None:
    likeliest = expected(folder, PROMPT, 8).softmax(-1).max(-1)
    least = likeliest.values.sort().values[4].item() + 1e-6  # five of the eight tokens are less likely
    end = 1 + next(place for place, share in enumerate(likeliest.values.tolist()) if share < least)
    drafter = drafter_of(model, stop_below=least)
    assert proposed(drafter, begun(drafter, GREEDY), 8).token_list == likeliest.indices[:end].tolist()
    assert end < 8


def test_a_tree_has_the_likeliest_tokens_of_each_depth(folder: Path, model: CausalLM) -> None:
    drafter = drafter_of(model, StaticTree.of_widths([3, 2]))
    best = expected(folder, PROMPT, 2).topk(3).indices.tolist()
    tree = proposed(drafter, begun(drafter, GREEDY), 9)
    assert tree.token_list == [*best[0], *best[1][:2] * 3]
    assert tree.parent_list == [-1, -1, -1, 0, 0, 1, 1, 2, 2]
    assert drafter.caches[0].length(1) == len(PROMPT)


def test_a_draft_takes_one_pass_for_all_sequences(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, forward = list[int](), type(model).forward

    def counted(self: CausalLM, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        rows.append(len(batch.tokens))
        return forward(self, batch, storage, taps)

    monkeypatch.setattr(type(model), "forward", counted)
    drafter = drafter_of(model)
    requests = [begun(drafter, GREEDY, PROMPT[: 5 + seq], seq) for seq in (1, 2, 3)]
    trees = drafter.propose(requests, [4, 1, 7])
    assert [tree.size for tree in trees] == [4, 1, 7]
    assert rows == [6 + 3 + 7 + 8 + 6]


def test_the_usual_method_drafts_in_one_pass_if_the_model_can(folder: Path, checkpoints: Checkpoints) -> None:
    def passes(method: str, **options: object) -> int:
        config = {"method": method, "num_speculative_tokens": 4, "draft_length": "fixed", **options}
        llm = LLM(checkpoints.target, draft_model=str(folder), speculative_config=config, dtype="float64")
        (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=24))
        return int(output.metrics.speculative_decoding.num_draft_tokens)

    assert passes("draft_model") == passes("parallel") != passes("draft_model", parallel=False)


def test_a_model_without_a_mask_is_refused_by_the_method(checkpoints: Checkpoints) -> None:
    config = {"method": "parallel", "num_speculative_tokens": 4}
    with pytest.raises(PairError, match="no mask token: its config.json has no 'pard_token'"):
        LLM(checkpoints.target, draft_model=checkpoints.near, speculative_config=config, dtype="float64")


@pytest.mark.parametrize("token", [VOCAB_SIZE, -1, "3", True])
def test_a_wrong_mask_is_refused(folder: Path, tmp_path: Path, token: object) -> None:
    for file in folder.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file.resolve())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"pard_token": token}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="no token of the model's"):
        load_model(str(tmp_path), "float64", "cpu")


def test_a_fitted_vocabulary_keeps_the_mask(folder: Path, model: CausalLM) -> None:
    """The mask is a token that the target's tokenizer does not have; it would be read as a substitute."""
    fitted = load_model(
        str(folder), "float64", "cpu", vocabulary=DraftVocabulary(VOCAB_SIZE, frozenset({MASK, 70}), 5)
    ).model
    assert mask_of(fitted) == VOCAB_SIZE
    trees = [proposed(drafter, begun(drafter, GREEDY), 6) for drafter in (drafter_of(model), drafter_of(fitted))]
    assert trees[0].token_list == trees[1].token_list
