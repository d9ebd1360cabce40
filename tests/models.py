"""Small random checkpoints on disk, in Hugging Face's format, and requests without an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from speculant import plugins
from speculant.kernels import usable_sets
from speculant.lab.checkpoints import save_tensors
from speculant.metrics import RequestMetrics, TimingMetrics
from speculant.models import Decoder
from speculant.params import SamplingParams
from speculant.types import DraftRules, Ending, Request, Sender, Stops

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # byte-level: a token is a byte
PRINTABLE = [ALPHABET.index(chr(byte)) for byte in range(33, 127)]
END, BEGIN = 256, 257
VOCAB_SIZE = 264  # rows of the head: padded beyond the tokenizer's 258 tokens
HIDDEN_SIZE = 32
_MOST_ROWS = 320
EXACT_DTYPE = "float32" if usable_sets() else "float64"  # a type in which neither drafts nor neighbours change a text


@dataclass(frozen=True)
class Shape:
    """The properties of a checkpoint that tests vary. Models of one seed differ by `noise` alone."""

    family: str = "llama"
    seed: int = 0
    noise: float = 0.0
    layers: int = 2
    vocab_size: int = VOCAB_SIZE
    max_positions: int = 256
    end: int | list[int] = END
    tied: bool = False
    hidden_size: int = HIDDEN_SIZE
    settings: tuple[tuple[str, Any], ...] = ()  # further entries of config.json


def write_checkpoint(
    folder: Path, shape: Shape = Shape(), tokens: Sequence[str] = ALPHABET, added: Sequence[str] = ()
) -> str:
    """Write a checkpoint that prefers printable characters, and return its folder as text.

    `tokens` are the tokenizer's, by id; two special ones follow them, and then those of `added`.
    """
    folder.mkdir(parents=True)
    config = _config(shape)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}', encoding="utf-8")
    write_tokenizer(folder, tokens, added)
    description = plugins.load("speculant.models", shape.family).read_config(config)
    with torch.device("meta"):
        model = Decoder(description)
    weights = {name: _weight(name, parameter, shape) for name, parameter in sorted(model.named_parameters())}
    save_tensors(weights, description.tensors, folder / "model.safetensors")
    return str(folder)


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": shape.family,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 2 * shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": shape.hidden_size // 4,
        "max_position_embeddings": shape.max_positions,
        "eos_token_id": shape.end,
        "torch_dtype": "float32",
        "tie_word_embeddings": shape.tied,
        **dict(shape.settings),
    }


def write_tokenizer(folder: Path, tokens: Sequence[str] = ALPHABET, added: Sequence[str] = ()) -> None:
    """Write the tokenizer of `write_checkpoint` into a folder."""
    _tokenizer(tokens, added).save(str(folder / "tokenizer.json"))


def _tokenizer(tokens: Sequence[str], added: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<begin>", *added])
    return tokenizer


def _weight(name: str, parameter: Tensor, shape: Shape) -> Tensor:
    weight = _random(name, parameter, shape.seed)
    if shape.noise:
        weight += shape.noise * weight.std(correction=0) * _random(name, parameter, shape.seed + 1000)
    if name == "lm_head.weight":
        rare = torch.full((len(weight), 1), 0.1)
        rare[[token for token in PRINTABLE if token < len(rare)]] = 1.0
        weight *= rare
    return weight


def _random(name: str, parameter: Tensor, seed: int) -> Tensor:
    """Draw a tensor; those of larger vocabularies begin with the rows of smaller ones."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 10_000 + seed)
    size = tuple(parameter.shape)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * torch.randn(size, generator=generator)
    rows = _MOST_ROWS if name in ("lm_head.weight", "model.embed_tokens.weight") else size[0]
    return 0.35 * torch.randn((rows, *size[1:]), generator=generator)[: size[0]].clone()


@dataclass(frozen=True)
class Checkpoints:
    """Folders: a target, a draft that often agrees with it, and one that hardly does."""

    target: str
    near: str
    far: str


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Write the usual checkpoints once."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return Checkpoints(
        target=write_checkpoint(folder / "target"),
        near=write_checkpoint(folder / "near", Shape(noise=0.1)),
        far=write_checkpoint(folder / "far", Shape(seed=1, layers=1)),
    )


def make_request(
    prompt: Sequence[int],
    output: Sequence[int] = (),
    params: SamplingParams | None = None,
    seq_id: int = 1,
    **fields: Any,
) -> Request:
    """Make a request that has generated `output` so far; `fields` replace the other defaults.

    They are fields of `Request` or of the values in it.
    """
    defaults: dict[str, Any] = {
        "request_id": f"request-{seq_id}",
        "index": 0,
        "params": params or SamplingParams(),
        "seed": seq_id,
        "metrics": RequestMetrics(TimingMetrics(arrival=0.0)),
    }
    for name, kind in {"sender": Sender, "drafts": DraftRules, "stops": Stops, "ending": Ending}.items():
        defaults[name] = kind(**{key: fields.pop(key) for key in kind.__annotations__ if key in fields})
    return Request(seq_id=seq_id, prompt=tuple(prompt), tokens=[*prompt, *output], **{**defaults, **fields})
