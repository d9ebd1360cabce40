"""Training of drafts that predict several tokens in one pass: the rows of masks, the figures, and a run."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from speculant.cache import slotted_cache
from speculant.errors import ConfigError
from speculant.lab.training import (
    STRIDE,
    BoostedConfig,
    ParallelObjective,
    Texts,
    hidden_states,
    load_plain,
    masked_states,
    open_texts,
    overlap_by_depth,
    save_texts,
    with_mask,
)
from speculant.models import Decoder, SequenceInput, build_batch
from speculant.types import DraftTree
from tests.models import VOCAB_SIZE, Checkpoints, Shape, write_checkpoint
from tests.unit.lab.training.runs import SMALL_DRAFT, command, drafts

SEQ, DEPTH = 24, 4


@pytest.fixture
def texts(tmp_path: Path, target: Decoder) -> Texts:
    tokens = torch.randint(VOCAB_SIZE, (40, SEQ), generator=torch.Generator().manual_seed(1))
    save_texts(tmp_path, tokens.tolist(), SEQ, 0)
    return open_texts(tmp_path, target)


def draft_of(checkpoints: Checkpoints) -> Decoder:
    return with_mask(load_plain(checkpoints.near, "draft").requires_grad_())


@torch.no_grad()
def drafted(model: Decoder, tokens: list[int], masks: int) -> Tensor:
    """Return the states [1 + masks, hidden] of the last token and of masks after it, as a drafter computes them."""
    assert model.mask_token is not None
    cache = slotted_cache(model.cache_shape, 1, 64)
    inputs = SequenceInput(0, [*tokens, *[model.mask_token] * masks], DraftTree.empty())
    return model.forward(build_batch([inputs], cache, torch.device("cpu")), cache.storage).last[-1 - masks :]


@torch.inference_mode()
@pytest.mark.parametrize("window", [None, 5])
def test_rows_of_masks_are_those_of_a_draft(tmp_path: Path, window: int | None) -> None:
    settings = () if window is None else (("sliding_window", window),)
    family = "llama" if window is None else "mistral"
    model = with_mask(load_plain(write_checkpoint(tmp_path / "draft", Shape(family=family, settings=settings))))
    tokens, places = torch.randint(VOCAB_SIZE, (2, SEQ)), torch.tensor([0, 3, 9, SEQ - DEPTH])
    plain, masked = masked_states(model, tokens, places, DEPTH - 1)
    torch.testing.assert_close(plain.flatten(0, 1), hidden_states(model, tokens))
    for text, own in zip(tokens.tolist(), masked, strict=True):
        for place, states in zip(places.tolist(), own, strict=True):
            torch.testing.assert_close(states, drafted(model, text[: place + 1], DEPTH - 1)[1:])


def test_the_loss_is_the_mean_distance_over_tokens_and_masks(
    checkpoints: Checkpoints, target: Decoder, texts: Texts
) -> None:
    """The divergence KL(p, q), at every token and at every mask, from the target's states of the text."""
    model, windows = draft_of(checkpoints), texts.batch(0, 2)
    loss = ParallelObjective(target, texts, DEPTH, seed=3).loss(model, windows, 0.0)
    generator = torch.Generator().manual_seed(3 + int(windows[:, 0].sum()))
    count = SEQ - DEPTH + 1
    places = torch.randperm(count, generator=generator)[: count // STRIDE].sort().values.tolist()
    own, expected = texts.states_of(windows[:, 0]), list[Tensor]()
    for text, states in zip(windows[:, 1:].tolist(), own, strict=True):
        p = target.logits(states).log_softmax(-1)
        rows = [(drafted(model, text[: i + 1], 0)[0], i) for i in range(SEQ)]
        for place in places:
            rows += [(row, place + 1 + t) for t, row in enumerate(drafted(model, text[: place + 1], DEPTH - 1)[1:])]
        for state, i in rows:
            log_q = model.logits(state[None])[0, :VOCAB_SIZE].log_softmax(-1)
            expected.append((p[i].exp() * (p[i] - log_q)).sum())
    torch.testing.assert_close(loss, torch.stack(expected).mean(), rtol=1e-4, atol=1e-5)
    loss.backward()
    mask = cast(int, model.mask_token)
    assert float(cast(Tensor, model.model.embed_tokens.weight.grad)[mask].abs().sum()) > 0


@torch.inference_mode()
def test_the_overlap_at_each_depth(checkpoints: Checkpoints, target: Decoder, texts: Texts) -> None:
    model, sums, rows = draft_of(checkpoints), torch.zeros(DEPTH), 0
    for place in range(texts.num_training, len(texts.tokens)):
        text, states = texts.tokens[place].tolist(), texts.states_of(torch.tensor([place]))[0]
        for i in range(0, SEQ - DEPTH + 1, STRIDE):
            p = target.logits(states[i : i + DEPTH]).softmax(-1)
            q = model.logits(drafted(model, text[: i + 1], DEPTH - 1))[:, :VOCAB_SIZE].softmax(-1)
            sums, rows = sums + torch.minimum(p, q).sum(-1), rows + 1
    found = torch.tensor(overlap_by_depth(model, target, texts, DEPTH))
    torch.testing.assert_close(found, sums / rows, rtol=0, atol=1e-5)


def test_a_mask_changes_no_other_token(checkpoints: Checkpoints) -> None:
    before, tokens = load_plain(checkpoints.near, "draft"), torch.arange(SEQ)[None]
    model = with_mask(before)
    assert model.mask_token == before.vocab_size == model.vocab_size - 1
    assert with_mask(model) is model
    theirs, own = (each.logits(hidden_states(each, tokens)) for each in (before, model))
    torch.testing.assert_close(own[:, :-1], theirs)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *((each, "parallel=.* is not from 1 to") for each in ({"parallel": 0}, {"parallel": 33}, {"parallel": True})),
        ({"parallel": 8, "seq": 8}, "parallel=8 is not from 1 to 7"),
        ({"parallel": 4, "boosted": 2}, "boosted=2 drafts can't be trained with parallel=4"),
    ],
)
def test_a_wrong_number_is_refused(tmp_path: Path, changes: dict[str, int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        BoostedConfig(tmp_path, "demo", steps=1, **changes)


@pytest.mark.slow
def test_a_run_makes_a_draft_that_drafts_in_one_pass(tmp_path: Path, target_folder: str, corpus_folder: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--target", target_folder, "--data", corpus_folder, "--tokens", 640, "--seq", SEQ, *SMALL_DRAFT]
    (found,) = command("draft", "--parallel", 3, *arguments, "--steps", 4, "--out", out)["drafts"]
    assert len(found["by_depth"]) == 3
    assert "token 3 of a pass" in (out / "1" / "README.md").read_text()
    assert drafts(target_folder, {"method": "parallel", "model": str(out / "1"), "num_speculative_tokens": 3}) > 0
