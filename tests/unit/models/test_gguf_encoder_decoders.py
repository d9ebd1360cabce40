"""GGUF files of encoder-decoder models: their start token, their head, and files that can't be used.

tests/unit/models/test_gguf_families.py compares descriptions and logits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculant.errors import ModelError
from speculant.kernels import usable_sets
from speculant.models import load_model
from tests.gguf_models import convert
from tests.unit.models.families import Session
from tests.unit.models.test_gguf_families import TOKENS, pair_of

NATIVE = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
KERNELS = ["reference", pytest.param("native", marks=NATIVE)]
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pair_of(tmp_path_factory.mktemp("t5"), "t5", "flan").folder


@pytest.fixture
def write(folder: Path, tmp_path: Path) -> Write:
    """Return what writes the model as a file with other metadata."""
    return lambda **entries: convert(folder, tmp_path / "t5.gguf", metadata=entries)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("own_head", [False, True])
def test_a_head_of_its_own_is_not_scaled(folder: Path, tmp_path: Path, own_head: bool, kernels: str) -> None:
    """T5 1.1 has one. The logits of T5 1.0, whose head is the table, are scaled."""
    tensors = load_file(folder / "model.safetensors")
    if own_head:
        tensors["lm_head.weight"] = tensors["shared.weight"].flip(0) * 1.5
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = (folder / "config.json").read_text().replace('"scale_decoder_outputs": true', '"x": 0')
    (source / "config.json").write_text(
        config.replace('"tie_word_embeddings": true', f'"tie_word_embeddings": {str(not own_head).lower()}')
    )
    path = convert(source, tmp_path / "model.gguf")
    own, other = (load_model(str(place), kernels=kernels).model for place in (path, source))
    assert (own.config.head.scale == 1, own.config.head.tied) == (own_head, not own_head)  # type: ignore[attr-defined]
    torch.testing.assert_close(Session(own).extend(TOKENS), Session(other).extend(TOKENS), rtol=1e-5, atol=1e-5)


def test_the_start_token_is_that_of_the_metadata(write: Write) -> None:
    assert load_model(str(write(**{"t5.decoder_start_token_id": 7}))).start_tokens == (7,)
    absent = write(**{"t5.decoder_start_token_id": None, "tokenizer.ggml.bos_token_id": 5})
    assert load_model(str(absent)).start_tokens == (5,)


def test_a_decoder_has_the_encoder_s_layers_unless_stated(write: Write) -> None:
    assert load_model(str(write(**{"t5.decoder_block_count": None}))).model.num_layers == 3


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "t5encoder"}, "the architecture t5encoder, an encoder alone"),
    ({"t5.decoder_start_token_id": 61}, r"t5\.decoder_start_token_id = 61, not a token id from 0 to 60"),
    ({"t5.decoder_start_token_id": True}, r"t5\.decoder_start_token_id = True, not a token id"),
    ({"t5.decoder_block_count": 2}, r"2 layers and holds tensors of 3 layers dec\.blk\.\*"),
    ({"t5.block_count": 4}, r"4 layers and holds tensors of 3 layers enc\.blk\.\*"),
    ({"t5.attention.relative_buckets_count": None}, r"no metadata entry t5\.attention\.relative_buckets_count"),
    ({"t5.attention.relative_buckets_count": 16}, r"attn_rel_b\.weight"),
]


@pytest.mark.parametrize(("entries", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_file_that_cannot_be_used_is_refused(write: Write, entries: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        load_model(str(write(**entries)))
    assert caught.value.fix
