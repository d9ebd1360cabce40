"""Gives a small model, or a head, the cost of a large one: the same function, written at the shape of a larger model.

The residual stream of the large model repeats the small one (lab/inflation/enlargement.py). The small model's layers
come first; the results of the others meet zeros. With noise, the small model's matrices are changed first: a draft
model then agrees less often with its target.

This holds for every part of a description. What the family's reader of config.json makes of the larger shape is
compared with the small model's description, so a family whose arithmetic changes with its sizes is refused.

A head's input and output states are copies of the small ones side by side, like the target's residual stream. Decoder
layers of a head get the target's shape, as in training; the inner width of feed-forward blocks grows with the hidden
size. The number of layers and the output head's tokens stay.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculant.drafting import FILE as SHORT_HEAD, HeadFolder, HeadParts, Part, Role, head_parts, head_within
from speculant.drafting.heads.folder import KIND
from speculant.errors import ConfigError, ModelError
from speculant.files import read_json
from speculant.lab.checkpoints import copy_files, stored_tensors, write_index, write_json, write_tensors
from speculant.lab.inflation.enlargement import Enlargement, NoisyFiles, Shape, decoder_shape, grown_config
from speculant.models import (
    HEAD,
    LAYER,
    TABLE,
    CheckpointFiles,
    Decoder,
    DecoderConfig,
    StoredWeights,
    count,
    parameters,
    read_description,
    read_model_config,
    show,
    tensor_shapes,
)
from speculant.models.families.llama import read_config

_READERS = r"(self_attn\.([qkv]|gate)_proj|linear_attn\.in_proj\w*|mlp\.(gate|up)_proj)"
PARTS: Mapping[str, Part] = {
    r"model\.embed_(tokens|positions)\.weight": Part(Role.TABLE),
    r"lm_head\.weight": Part(Role.OUTPUT),
    r".*(self_attn\.[qk]_norm|linear_attn\.norm)\.(weight|bias)": Part(Role.HEADS),
    r".*norm\.(weight|bias)": Part(Role.STATE),
    r"fc\.weight": Part(Role.BETWEEN, streams=2),
    rf".*\.{_READERS}\.weight": Part(Role.READER),
    rf".*\.({_READERS}\.bias|sinks|conv1d\.(weight|bias)|A_log|dt_bias)": Part(Role.READER_BIAS),
    r".*\.(self_attn\.o|linear_attn\.out|mlp\.down)_proj\.weight": Part(Role.WRITER),
    r".*\.(self_attn\.o|linear_attn\.out|mlp\.down)_proj\.bias": Part(Role.STATE),
}  # of a model's tensors and of those of a head among them, by patterns of names

_CARD = """\
---
library_name: speculant
pipeline_tag: text-generation
---

# {name} at a larger shape

This is the function of `{name}` at the shape of a larger model, written for measuring speed. It writes
the texts of the small model at the cost of the large one, and drafts are accepted as often. It was not trained at this
size, and it is no better than `{name}`, whose licence applies.

| | {name} | here |
|---|---|---|
{sizes}

The residual stream is the small model's {copies} times over. Further heads, rows of the MLP and layers are random, and
their results meet zeros. The vocabulary is the small one. {function}
"""
_EQUAL = "Logits are equal up to the order of floating-point sums."
_NOISY = "Noise of {noise:g} times their standard deviation was added to the matrices, so that its answers differ."


def shape_of(folder: Path) -> tuple[Shape, int]:
    """Return the shape of a checkpoint and its heads' dimension. Raises ModelError for one that can't be read."""
    decoder = read_description(read_model_config(folder))
    return decoder_shape(decoder), decoder.attention.head_dim


def inflate(source: Path, folder: Path, shape: Shape, noise: float = 0.0) -> None:
    """Write the model of `source` to `folder`, a new or empty one, at a larger shape.

    noise: of normal noise added to each matrix of the small model, in standard deviations of the matrix. The random
    weights are drawn with seed 0, the noise with another generator. Memory holds one layer at a time, or the embedding
    table and the head. Raises ModelError for a checkpoint that can't be inflated, and ConfigError for a shape that is
    too small, or that the model's family does not have, and for a folder that holds files.
    """
    files = CheckpointFiles.open(source)
    decoder, attention = files.decoder, files.decoder.attention
    enlargement = Enlargement(
        decoder_shape(decoder), shape, attention.head_dim, files.tensors.common_dtype(), attention.norm_all_heads,
        decoder.state,
    )  # fmt: skip
    grown, large = grown_config(files.config, decoder, shape)
    head = _grown_head(source, files, enlargement, noise)
    model = _Inflation(NoisyFiles(files.weights, noise), enlargement, decoder, large, head)
    weights = ("weights", parameters(decoder), parameters(large))
    make_folder(folder)
    copy_files(source, folder)
    _write_weights(folder, model)
    rows = [(key, size, getattr(shape, key)) for key, size in asdict(enlargement.small).items()]
    card = filled_card(_CARD, source, enlargement, [*rows, weights], noise)
    (folder / "README.md").write_text(card, encoding="utf-8")
    write_json(folder / "config.json", grown)  # the last: without it nothing loads


class _Inflation:
    """The tensors of the larger model, made from those of the small one."""

    def __init__(
        self, weights: NoisyFiles, enlargement: Enlargement, small: DecoderConfig, large: DecoderConfig,
        head: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        self._weights, self._enlargement, self._small, self._large = weights, enlargement, small, large
        self._head = head
        self._names, self._shapes = tensor_shapes(small).keys(), tensor_shapes(large)

    @property
    def num_parts(self) -> int:
        """The number of parts."""
        return 1 + self._large.num_layers + bool(self._head)

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors by the files' names: the ends of the model, each layer, and the head among them."""
        in_layers = LAYER.partition("{")[0]
        yield self._part([name for name in self._shapes if not name.startswith(in_layers)])
        for layer in range(self._large.num_layers):
            at = LAYER.format(layer)
            yield self._part([name for name in self._shapes if name.startswith(at)])
        if self._head:
            yield dict(self._head)

    def _part(self, names: Sequence[str]) -> dict[str, Tensor]:
        return stored_tensors({name: self._made(name) for name in names}, self._large.tensors)

    def _made(self, name: str) -> Tensor:
        part = _part_of_model(name)
        stored = TABLE if name == HEAD and self._small.head.tied else name
        if stored not in self._names:
            return self._further(part, name)
        made = self._enlargement.grown(part, self._weights.read(stored), name)
        return self._unscaled(made) if name == TABLE else made

    def _further(self, part: Part, name: str) -> Tensor:
        """Make a tensor of a layer that adds nothing to the stream."""
        if part.role is Role.READER:
            return self._enlargement.random_reader(name)
        is_scale = part.role in (Role.STATE, Role.HEADS) and name.endswith("norm.weight")
        return torch.full(self._shapes[name], float(is_scale), dtype=self._enlargement.dtype)

    def _unscaled(self, table: Tensor) -> Tensor:
        """Return the embedding table for the factor that the large model multiplies it by."""
        small, large = self._small.embedding.scale, self._large.embedding.scale
        if small == large:
            return table
        made = table * (small / large)
        if math.frexp(small / large)[0] != 0.5 or not torch.equal(made / (small / large), table):
            raise ModelError(
                f"embeddings are multiplied by {small:g}, and at the larger shape by {large:g}, so that the table would"
                " have to be rounded",
                "choose a hidden_size that is 4 or 16 times the model's.",
            )
        return made


def _part_of_model(name: str) -> Part:
    return next(part for pattern, part in PARTS.items() if re.fullmatch(pattern, name))


def _grown_head(source: Path, files: CheckpointFiles, enlargement: Enlargement, noise: float) -> dict[str, Tensor]:
    """Return the tensors of a head among the weights of `source`, at the large shape; {} = it has none known."""
    with torch.device("meta"):
        target = Decoder(files.decoder)
    found = head_within(source, target)
    if found is None:
        return {}
    weights, name_in_files = found
    noisy = NoisyFiles(weights, noise)
    made = {name: enlargement.grown(_part_of_model(name), noisy.read(name), name) for name in sorted(weights.names())}
    stored = stored_tensors(made, weights.tensors)
    return {name_in_files(name): tensor.contiguous() for name, tensor in stored.items()}


def _write_weights(folder: Path, model: _Inflation) -> None:
    """Write each part as a file as soon as it is made, then the index of all."""
    files = dict[str, str]()
    total = 0
    for number, tensors in enumerate(model.parts(), start=1):
        file = folder / f"model-{number:05}-of-{model.num_parts:05}.safetensors"
        write_tensors(file, tensors)
        files.update(dict.fromkeys(tensors, file.name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    write_index(folder, files, total)


def make_folder(folder: Path) -> None:
    """Make a folder. Raises ConfigError if it can't be made or holds files, which could be mixed with the model's."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} can't be made: {error}", "name a folder that you may write to.") from error
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", "name a new folder, or empty this one.")


def filled_card(
    card: str, source: Path, enlargement: Enlargement, sizes: Sequence[tuple[str, int, int]], noise: float
) -> str:
    """Return a model card. sizes: names of numbers, with the small and the large one."""
    return card.format(
        name=source.resolve().name,
        sizes="\n".join(f"| {what} | {before:,} | {after:,} |" for what, before, after in sizes),
        copies=enlargement.copies,
        function=_NOISY.format(noise=noise) if noise else _EQUAL,
    )


_LAYER_CONFIG = "transformer_layer_config"  # of the `speculators` package
_INNER = "inner_size"
_HEAD_CARD = """\
---
library_name: speculant
pipeline_tag: text-generation
---

# {name} at a larger shape

This is the function of the head `{name}` for its target at the shape of a larger model, written for measuring speed:
it drafts the tokens of the small head at the cost of a large one. It was not trained at this size. The licence of
`{name}` applies.

| | {name} | here |
|---|---|---|
{sizes}

The states are the small head's {copies} times over. Further attention heads and rows of the MLP are random, and their
results meet zeros. {function}
"""


def head_kind(folder: Path) -> str | None:
    """Return the method of the head in a folder; None = it is not a head."""
    kind = read_json(folder / "config.json").get(KIND)
    return None if kind is None else str(kind)


def head_shape(folder: Path) -> tuple[Shape, int]:
    """Return the sizes of a head and the dimension of its attention heads; a size that it lacks is 1."""
    inner = _layer_config(read_json(folder / "config.json"))
    if "intermediate_size" in inner:
        decoder = read_config({"max_position_embeddings": 1, "vocab_size": 1, **inner})
        return decoder_shape(decoder), decoder.attention.head_dim
    return Shape(count(inner, "hidden_size"), count(inner, _INNER, 1), 1, 1, 1), 1


def inflate_head(source: Path, folder: Path, shape: Shape, noise: float = 0.0) -> None:
    """Write the head of `source` to `folder`, a new or empty one, for its target at a larger shape, the target's.

    noise: see `inflate`. Raises ModelError for a head that can't be inflated, ConfigError for an unknown kind, for a
    shape that does not hold the head and for a folder that holds files.
    """
    head, parts = _opened_head(source)
    names = {stored: name for stored in sorted(head.names()) if (name := parts.rename(stored)) is not None}
    found = {stored: _part_of(parts, name, head) for stored, name in names.items()}
    enlargement, weights = _enlargement(head, parts, names, shape), NoisyFiles(head.files, noise)
    tensors = {
        stored: enlargement.grown(part, weights.read(head.stored[stored]), names[stored]).contiguous()
        for stored, part in found.items()
    }
    make_folder(folder)
    write_tensors(folder / "model.safetensors", tensors)
    if (source / SHORT_HEAD).exists():
        shutil.copyfile(source / SHORT_HEAD, folder / SHORT_HEAD)
    (folder / "README.md").write_text(_head_card(head, enlargement, tensors, noise), encoding="utf-8")
    write_json(folder / "config.json", _grown_config(head.config, enlargement))


def _opened_head(source: Path) -> tuple[HeadFolder, HeadParts]:
    kind = head_kind(source)
    if kind is None:
        raise ModelError(f"{source / 'config.json'} has no {KIND}, so it is not a head", "name the folder of a head.")
    parts = head_parts(kind)
    if parts is None:
        raise ModelError(
            f"{source} is a head of the kind {kind!r}, whose drafter does not describe its parts",
            "add HEAD to the drafter's module, as in the other modules.",
        )
    head = HeadFolder.open(str(source), kind)
    if parts.check is not None:
        parts.check(head)
    return head, parts


def _part_of(parts: HeadParts, name: str, head: HeadFolder) -> Part:
    part = parts.part(name)
    if part is None:
        raise ModelError(
            f"{head.folder} has a tensor {show(name)}, whose use is not known",
            "inflate a head without it.",
        )
    return part


def _enlargement(head: HeadFolder, parts: HeadParts, names: Mapping[str, str], shape: Shape) -> Enlargement:
    """Return the enlargement of a head, whose states may have another width than the target's."""
    small, head_dim = head_shape(head.folder)
    pattern, entry = next(iter(parts.parts.items()))
    of_target = {
        head.shape(stored)[-1] // entry.streams for stored, name in names.items() if re.fullmatch(pattern, name)
    }
    target_size = min(of_target, default=small.hidden_size)
    if shape.hidden_size % target_size:
        raise ConfigError(
            f"hidden_size {shape.hidden_size} is not a multiple of {target_size}, that of the target of {head.folder}",
            "choose a multiple.",
        )
    copies = shape.hidden_size // target_size
    large = Shape(copies * small.hidden_size, copies * small.intermediate_size, 1, 1, 1)
    if "intermediate_size" in _layer_config(head.config):
        large = replace(shape, hidden_size=large.hidden_size, num_hidden_layers=small.num_hidden_layers)
    assert isinstance(head.files, StoredWeights), "only folders are inflated"
    return Enlargement(small, large, head_dim, head.files.common_dtype())


def _layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.get(_LAYER_CONFIG, config)
    if not isinstance(inner, dict):
        raise ModelError(f"config.json has a {_LAYER_CONFIG} that is not an object", "correct config.json.")
    return inner


def _grown_config(config: dict[str, Any], enlargement: Enlargement) -> dict[str, Any]:
    """Return config.json with the large sizes."""
    inner = _layer_config(config)
    sizes = {**asdict(enlargement.large), "head_dim": enlargement.head_dim, _INNER: enlargement.large.intermediate_size}
    implied = ("num_key_value_heads", "head_dim") if "intermediate_size" in inner else ()
    large = {**inner, **{key: size for key, size in sizes.items() if key in inner or key in implied}}
    return {**config, _LAYER_CONFIG: large} if _LAYER_CONFIG in config else large


def _head_card(head: HeadFolder, enlargement: Enlargement, tensors: Mapping[str, Tensor], noise: float) -> str:
    before, after = _layer_config(head.config), _layer_config(_grown_config(head.config, enlargement))
    rows = [(key, before[key], after[key]) for key in before if after[key] != before[key]]
    small, large = (math.prod(head.shape(name)) for name in tensors), (each.numel() for each in tensors.values())
    return filled_card(_HEAD_CARD, head.folder, enlargement, [*rows, ("weights", sum(small), sum(large))], noise)
