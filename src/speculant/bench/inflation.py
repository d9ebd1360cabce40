"""Gives a small model the cost of a large one: the same function, written at the shape of a larger model.

The residual stream of the large model is the small one's, several times over. Every copy is the same, and so is its
norm. The small model's heads, rows and layers come first. The others hold random weights that are read and multiplied
like any others, and what they compute meets zeros:

    stream   | x | x | x |    RMSNorm repeats as well, with the same epsilon
    readers  |W/2|W/2| 0 |    the quotient is a power of two, so that no bit is lost
    writers  | W | W | W |    as rows

With noise, the small model's matrices are changed first: a draft model that agrees less often with its target.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from speculant.bench.model_shapes import Shape
from speculant.errors import ConfigError, ModelError
from speculant.models.config import DecoderConfig
from speculant.models.fields import show
from speculant.models.llama import read_config
from speculant.models.source import read_json
from speculant.models.tensors import TensorFiles, check_layers, check_tensors
from speculant.models.weights import tensor_shapes

_SEED, _NOISE_SEED, _SCALE = 0, 1, 0.02  # of the random weights, and of noise
_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_NORMS = ("input_layernorm", "post_attention_layernorm")
_READERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")
_OWN_FILES = ("config.json", "README.md")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".index.json")

_CARD = """\
---
library_name: speculant
pipeline_tag: text-generation
---

# {name} at a larger shape

This is the function of `{name}` at the shape of a larger model, written for measuring speed: text and acceptance are
those of the small model, the cost is that of the large one. It was not trained at this size, and it is no better than
`{name}`. Licence and origin are those of `{name}`.

| | {name} | here |
|---|---|---|
{sizes}

The residual stream is the small model's {copies} times over. Further heads, rows of the MLP and layers are random, and
their results meet zeros. The vocabulary is the small one. {function}
"""
_EQUAL = "Logits are equal up to the order of floating-point sums."
_NOISY = "Noise of {noise:g} times their standard deviation was added to the matrices, so that it answers differently."


def shape_of(folder: Path) -> tuple[Shape, int]:
    """Return the shape of a Llama checkpoint and its heads' dimension. Raises ModelError for any other."""
    hf = read_json(folder / "config.json")
    _check_family(hf)
    decoder = read_config(hf)
    return _shape_of(decoder), decoder.head_dim


def inflate(source: Path, folder: Path, shape: Shape, noise: float = 0.0) -> None:
    """Write the Llama model of `source` to `folder`, a new or empty one, at a larger shape.

    noise: normal noise of so many standard deviations of each matrix is added to the small model's, so that a draft
    model agrees less often with its target. The random weights are drawn with seed 0, the noise with another generator.
    Memory holds one layer at a time, or the embedding table and the head.
    Raises ModelError for a checkpoint that can't be inflated, ConfigError for a shape that does not hold it and for a
    folder that holds files.
    """
    if not 0 <= noise < math.inf:
        raise ConfigError(f"noise={noise} is no share of a standard deviation", "use 0 or more; 0.1 is much.")
    hf = read_json(source / "config.json")
    _check_family(hf)
    weights, decoder = TensorFiles.open(source), read_config(hf)
    check_layers(weights, hf)
    check_tensors(weights, tensor_shapes(decoder))
    _check_fits(_shape_of(decoder), shape)
    grown = {**hf, **asdict(shape), "head_dim": decoder.head_dim, "tie_word_embeddings": False}
    num_weights = [_num_weights(config) for config in (decoder, read_config(grown))]
    _make_folder(folder)
    _copy_files(source, folder)
    _write_weights(folder, _Inflation(weights, decoder, shape, noise))
    card = _card(source.resolve().name, _shape_of(decoder), shape, num_weights, noise)
    (folder / "README.md").write_text(card, encoding="utf-8")
    text = json.dumps(grown, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")  # the last: without it nothing loads


class _Inflation:
    """The tensors of the larger model, made from those of the small one."""

    def __init__(self, weights: TensorFiles, decoder: DecoderConfig, shape: Shape, noise: float) -> None:
        self._weights, self._decoder, self._noise = weights, decoder, noise
        self._small, self._large = _shape_of(decoder), shape
        self._copies = shape.hidden_size // decoder.hidden_size
        self._dtype = weights.common_dtype()
        self._generator = torch.Generator().manual_seed(_SEED)
        self._noise_generator = torch.Generator().manual_seed(_NOISE_SEED)

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return 1 + self._large.num_hidden_layers

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors by name: the ends of the model, then each layer."""
        yield self._ends()
        for layer in range(self._large.num_hidden_layers):
            at = f"model.layers.{layer}."
            is_random = layer >= self._small.num_hidden_layers
            yield self._random_layer(at) if is_random else self._layer(at)

    def _ends(self) -> dict[str, Tensor]:
        head = _EMBEDDING if self._decoder.tie_embeddings else _HEAD
        return {
            _EMBEDDING: self._matrix(_EMBEDDING).repeat(1, self._copies),
            _HEAD: _spread(self._matrix(head), self._copies, head),
            _NORM: self._weights.read(_NORM).repeat(self._copies),
        }

    def _layer(self, at: str) -> dict[str, Tensor]:
        """Put the small model's layer into the first places of a random one."""
        made = self._random_layer(at)
        for name in _NORMS:
            made[f"{at}{name}.weight"] = self._weights.read(f"{at}{name}.weight").repeat(self._copies)
        for name in _READERS:
            stored = self._matrix(f"{at}{name}.weight")
            rows, places = self._units(name, self._small), self._units(name, self._large)
            part = _spread(stored, self._copies, f"{at}{name}.weight").view(*rows, -1)
            made[f"{at}{name}.weight"].view(*places, -1)[: rows[0], : rows[1]] = part
        for name in _WRITERS:
            stored = self._matrix(f"{at}{name}.weight")
            columns, places = self._units(name, self._small), self._units(name, self._large)
            part = stored.repeat(self._copies, 1).view(-1, *columns)
            made[f"{at}{name}.weight"].view(-1, *places)[:, : columns[0], : columns[1]] = part
        return made

    def _matrix(self, name: str) -> Tensor:
        """Read a matrix of the small model and add the noise."""
        stored = self._weights.read(name)
        if not self._noise:
            return stored
        drawn = torch.randn(stored.shape, generator=self._noise_generator)
        return (stored.float() + self._noise * stored.float().std() * drawn).to(self._dtype)

    def _random_layer(self, at: str) -> dict[str, Tensor]:
        """Make a layer that is computed and adds nothing to the stream."""
        hidden = self._large.hidden_size
        made = {f"{at}{name}.weight": torch.ones(hidden, dtype=self._dtype) for name in _NORMS}
        for name in _READERS:
            matrix = torch.empty(math.prod(self._units(name, self._large)), hidden, dtype=self._dtype)
            made[f"{at}{name}.weight"] = matrix.normal_(0, _SCALE, generator=self._generator)
        for name in _WRITERS:
            columns = math.prod(self._units(name, self._large))
            made[f"{at}{name}.weight"] = torch.zeros(hidden, columns, dtype=self._dtype)
        return made

    def _units(self, name: str, shape: Shape) -> tuple[int, int, int]:
        """Return the side of a matrix that is not the stream's: its groups, the heads of each, a head's dimensions."""
        if name.startswith("mlp."):
            return shape.intermediate_size, 1, 1
        per_group = 1 if name in ("self_attn.k_proj", "self_attn.v_proj") else shape.group_size
        return shape.num_key_value_heads, per_group, self._decoder.head_dim


def _spread(matrix: Tensor, copies: int, name: str) -> Tensor:
    """Spread a matrix [n, hidden] that reads the stream over its copies. Raises ModelError if that would round."""
    used = 1 << (copies.bit_length() - 1)  # the largest power of two that is not above `copies`
    part = matrix / used
    if not torch.equal(part * used, matrix):
        raise ModelError(
            f"{name} holds numbers that {matrix.dtype} can't hold divided by {used}, so that the function would change",
            "convert the checkpoint to float32, which holds smaller numbers.",
        )
    return torch.cat([*[part] * used, *[torch.zeros_like(part)] * (copies - used)], dim=1)


def _shape_of(decoder: DecoderConfig) -> Shape:
    return Shape(
        decoder.hidden_size, decoder.intermediate_size, decoder.num_layers, decoder.num_heads, decoder.num_kv_heads
    )


def _num_weights(decoder: DecoderConfig) -> int:
    return sum(math.prod(size) for size in tensor_shapes(decoder).values())


def _check_family(hf: Mapping[str, Any]) -> None:
    """Check that a model is one whose function is known to stay the same. Raises ModelError."""
    if hf.get("model_type") != "llama":
        raise ModelError(
            f"config.json names the model_type {show(hf.get('model_type'))}, and only Llama models can be inflated:"
            " other families have parts that were not taken into account",
            "use a checkpoint whose model_type is 'llama'.",
        )
    if "quantization_config" in hf or "compression_config" in hf:
        raise ModelError(
            "this checkpoint is quantised, so its numbers can't be spread", "use the unquantised one it came from."
        )
    biases = [key for key in ("attention_bias", "mlp_bias") if hf.get(key)]
    if biases:
        raise ModelError(
            f"config.json says {' and '.join(biases)}, and models with biases are not inflated",
            "use a Llama checkpoint without biases.",
        )


def _check_fits(small: Shape, large: Shape) -> None:
    """Check that every part of a model has a place in a larger shape. Raises ConfigError."""
    names = ("intermediate_size", "num_hidden_layers", "num_key_value_heads", "group_size")
    pairs = [(name, getattr(large, name), getattr(small, name)) for name in names]
    problems = [f"{name} {size} is below the model's {least}" for name, size, least in pairs if size < least]
    if large.hidden_size % small.hidden_size:
        problems.insert(0, f"hidden_size {large.hidden_size} is no multiple of the model's {small.hidden_size}")
    if problems:
        raise ConfigError(
            f"the shape does not hold the model: {', '.join(problems)}",
            "choose a multiple of the hidden size, and no other size below the model's (group_size ="
            " num_attention_heads / num_key_value_heads).",
        )


def _make_folder(folder: Path) -> None:
    """Make a folder. Raises ConfigError if it can't be made or holds files, which the model's could be mixed with."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} can't be made: {error}", "name a folder that you may write to.") from error
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", "name a new folder, or empty this one.")


def _copy_files(source: Path, folder: Path) -> None:
    """Copy the tokenizer and what else belongs to a model; weights and what is written anew are left out."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in _OWN_FILES and not file.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(file, folder / file.name)


def _write_weights(folder: Path, model: _Inflation) -> None:
    """Write each part as a file as soon as it is made, then the index of all."""
    files = dict[str, str]()
    total = 0
    for number, tensors in enumerate(model.parts(), start=1):
        file = folder / f"model-{number:05}-of-{model.num_parts:05}.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(0o644)  # save_file makes it readable for its owner only
        files.update(dict.fromkeys(tensors, file.name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _card(name: str, small: Shape, large: Shape, num_weights: list[int], noise: float) -> str:
    """Return the model card, which says what this model is."""
    rows = [(key, size, getattr(large, key)) for key, size in asdict(small).items()]
    lines = [f"| {what} | {before:,} | {after:,} |" for what, before, after in [*rows, ("weights", *num_weights)]]
    function = _NOISY.format(noise=noise) if noise else _EQUAL
    copies = large.hidden_size // small.hidden_size
    return _CARD.format(name=name, sizes="\n".join(lines), copies=copies, function=function)
