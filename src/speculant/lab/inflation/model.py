"""Gives a small model the cost of a large one: the same function, written at the shape of a larger model.

The residual stream of the large model repeats the small one (lab/inflation/matrices.py). The small model's layers come
first; the results of the others meet zeros. With noise, the small model's matrices are changed first: a draft model
then agrees less often with its target.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from speculant.errors import ConfigError, ModelError
from speculant.files import read_json
from speculant.lab.inflation.matrices import Enlargement, NoisyFiles
from speculant.lab.inflation.shapes import Shape
from speculant.models.config import show
from speculant.models.description import DecoderConfig
from speculant.models.families.llama import read_config
from speculant.models.sizes import parameters
from speculant.models.weights.formats import quantised_format
from speculant.models.weights.tensors import TensorFiles, check_layers, check_tensors

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
_NOISY = "Noise of {noise:g} times their standard deviation was added to the matrices, so that its answers differ."


def shape_of(folder: Path) -> tuple[Shape, int]:
    """Return the shape of a Llama checkpoint and its heads' dimension. Raises ModelError for any other."""
    hf = read_json(folder / "config.json")
    _check_family(hf)
    decoder = read_config(hf)
    return decoder_shape(decoder), decoder.attention.head_dim


def inflate(source: Path, folder: Path, shape: Shape, noise: float = 0.0) -> None:
    """Write the Llama model of `source` to `folder`, a new or empty one, at a larger shape.

    noise: of normal noise added to each matrix of the small model, in standard deviations of the matrix. The random
    weights are drawn with seed 0, the noise with another generator. Memory holds one layer at a time, or the embedding
    table and the head. Raises ModelError for a checkpoint that can't be inflated, and ConfigError for a shape that is
    too small and for a folder that holds files.
    """
    hf = read_json(source / "config.json")
    _check_family(hf)
    weights, decoder = TensorFiles.open(source), read_config(hf)
    check_layers(weights, decoder.num_layers)
    check_tensors(weights, decoder)
    enlargement = Enlargement(decoder_shape(decoder), shape, decoder.attention.head_dim, weights.common_dtype())
    model = _Inflation(NoisyFiles(weights, noise), enlargement, decoder.head.tied)
    grown = {**hf, **asdict(shape), "head_dim": decoder.attention.head_dim, "tie_word_embeddings": False}
    num_weights = [parameters(config) for config in (decoder, read_config(grown))]
    make_folder(folder)
    _copy_files(source, folder)
    _write_weights(folder, model)
    card = _card(source.resolve().name, enlargement, num_weights, noise)
    (folder / "README.md").write_text(card, encoding="utf-8")
    text = json.dumps(grown, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")  # the last: without it nothing loads


class _Inflation:
    """The tensors of the larger model, made from those of the small one."""

    def __init__(self, weights: NoisyFiles, enlargement: Enlargement, tie_embeddings: bool) -> None:
        self._weights, self._enlargement, self._is_tied = weights, enlargement, tie_embeddings

    @property
    def num_parts(self) -> int:
        """The number of parts."""
        return 1 + self._enlargement.large.num_hidden_layers

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors by name: the ends of the model, then each layer."""
        yield self._ends()
        for layer in range(self._enlargement.large.num_hidden_layers):
            at = f"model.layers.{layer}."
            is_random = layer >= self._enlargement.small.num_hidden_layers
            yield self._random_layer(at) if is_random else self._layer(at)

    def _ends(self) -> dict[str, Tensor]:
        read, enlargement, head = self._weights.read, self._enlargement, _EMBEDDING if self._is_tied else _HEAD
        return {
            _EMBEDDING: enlargement.table(read(_EMBEDDING)),
            _HEAD: enlargement.reading(read(head), head),
            _NORM: enlargement.written(read(_NORM)),
        }

    def _layer(self, at: str) -> dict[str, Tensor]:
        """Make a layer whose first places are the small model's."""
        read, enlargement = self._weights.read, self._enlargement
        norms, readers, writers = _layer_names(at)
        made = {name: enlargement.written(read(name)) for name in norms}
        made |= {name: enlargement.reader(read(name), name) for name in readers}
        return made | {name: enlargement.writer(read(name), name) for name in writers}

    def _random_layer(self, at: str) -> dict[str, Tensor]:
        """Make a layer that adds nothing to the stream."""
        enlargement = self._enlargement
        norms, readers, writers = _layer_names(at)
        made = {name: torch.ones(enlargement.large.hidden_size, dtype=enlargement.dtype) for name in norms}
        made |= {name: enlargement.random_reader(name) for name in readers}
        return made | {name: enlargement.empty_writer(name) for name in writers}


def _layer_names(at: str) -> tuple[list[str], list[str], list[str]]:
    """Return the names of a layer's norms, of the matrices that read the stream, and of those that write it."""
    norms, readers, writers = ([f"{at}{name}.weight" for name in names] for names in (_NORMS, _READERS, _WRITERS))
    return norms, readers, writers


def decoder_shape(decoder: DecoderConfig) -> Shape:
    """Return the sizes of a model."""
    return Shape(
        decoder.hidden_size,
        decoder.layers[0].mlp.size,
        decoder.num_layers,
        decoder.attention.heads,
        decoder.attention.kv_heads,
    )


def _check_family(hf: Mapping[str, Any]) -> None:
    """Check that the model's function is known to stay the same. Raises ModelError."""
    if hf.get("model_type") != "llama":
        raise ModelError(
            f"config.json names the model_type {show(hf.get('model_type'))}, and only Llama models can be inflated",
            "use a checkpoint whose model_type is 'llama'.",
        )
    if quantised_format(hf) is not None:
        raise ModelError(
            "this checkpoint is quantised, so its numbers can't be spread", "use the unquantised one it came from."
        )
    biases = [key for key in ("attention_bias", "mlp_bias") if hf.get(key)]
    if biases:
        raise ModelError(
            f"config.json says {' and '.join(biases)}, and models with biases are not inflated",
            "use a Llama checkpoint without biases.",
        )


def make_folder(folder: Path) -> None:
    """Make a folder. Raises ConfigError if it can't be made or holds files, which could be mixed with the model's."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} can't be made: {error}", "name a folder that you may write to.") from error
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", "name a new folder, or empty this one.")


def _copy_files(source: Path, folder: Path) -> None:
    """Copy the tokenizer and the other files of a model, without weights and files that are written anew."""
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


def _card(name: str, enlargement: Enlargement, num_weights: list[int], noise: float) -> str:
    """Return the model card."""
    rows = [(key, size, getattr(enlargement.large, key)) for key, size in asdict(enlargement.small).items()]
    lines = [f"| {what} | {before:,} | {after:,} |" for what, before, after in [*rows, ("weights", *num_weights)]]
    function = _NOISY.format(noise=noise) if noise else _EQUAL
    return _CARD.format(name=name, sizes="\n".join(lines), copies=enlargement.copies, function=function)
