"""A head of some tokens: their logits are those of the whole head, and no other token can be drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculant.cache.storage import slotted_cache
from speculant.drafting.heads.short import output_rows
from speculant.errors import ConfigError, PairError
from speculant.kernels.native import usable_sets
from speculant.models.base import SequenceInput, build_batch
from speculant.models.weights.load import Checkpoint, load_model
from speculant.types import DraftTree
from tests.encoder_decoders import make_bart, write_t5
from tests.models import VOCAB_SIZE, write_checkpoint

HEAD = (0, 3, 4, 77, 130, VOCAB_SIZE - 1)
KERNELS = ["reference", *(["native"] if usable_sets() else [])]


def tie(folder: Path) -> None:
    """Make the head that of the embedding."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))


@torch.inference_mode()
def logits_of(checkpoint: Checkpoint) -> Tensor:
    model, tokens = checkpoint.model, [5, 9, 200, 7]
    cache = slotted_cache(model.cache_shape, 1, len(tokens))
    batch = build_batch([SequenceInput(0, tokens, DraftTree.empty())], cache, model.cache_shape.device)
    return model.logits(model.forward(batch, cache.storage).last)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("tied", [True, False])
def test_short_head_has_the_logits_of_the_whole_one(tmp_path: Path, kernels: str, tied: bool) -> None:
    folder = write_checkpoint(tmp_path / "model")
    if tied:
        tie(Path(folder))
    whole = load_model(folder, "float32", kernels=kernels)
    short = load_model(folder, "float32", kernels=kernels, head_tokens=HEAD)
    assert short.model.vocab_size == whole.model.vocab_size == VOCAB_SIZE
    expected, found = logits_of(whole), logits_of(short)
    others = [token for token in range(VOCAB_SIZE) if token not in HEAD]
    assert torch.all(found[:, others] == -torch.inf)
    if kernels == "native":
        assert torch.equal(found[:, list(HEAD)], expected[:, list(HEAD)])
    else:
        torch.testing.assert_close(found[:, list(HEAD)], expected[:, list(HEAD)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_short_head_of_unknown_tokens_is_refused(tmp_path: Path, kernels: str) -> None:
    folder = write_checkpoint(tmp_path / "model")
    with pytest.raises(ConfigError, match="head_tokens"):
        load_model(folder, "float32", kernels=kernels, head_tokens=(3, VOCAB_SIZE))


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_of_a_head_with_a_bias_are_refused(tmp_path: Path, kernels: str) -> None:
    folder = write_t5(tmp_path / "model", make_bart("marian"))
    tensors = load_file(f"{folder}/model.safetensors")
    for bias in (0.0, 1.0):
        biases = torch.full((1, VOCAB_SIZE), bias, dtype=torch.float64)
        save_file({**tensors, "final_logits_bias": biases}, f"{folder}/model.safetensors", {"format": "pt"})
        target = load_model(folder, "float32", kernels=kernels).model
        if bias:
            with pytest.raises(PairError, match="have a bias"):
                output_rows(target, HEAD)
        else:
            assert output_rows(target, HEAD).shape == (len(HEAD), target.hidden_size)
