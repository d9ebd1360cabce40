"""The safetensors files of a checkpoint: found, checked against the model, and read one tensor at a time.

In most quantised checkpoints several tensors are one matrix:

    in the files                                      matrix of the model
    layers.0.mlp.up_proj.qweight, .scales, .qzeros    layers.0.mlp.up_proj.weight
    layers.0.mlp.down_proj.weight                     the same: modules may stay plain

A `Scheme` knows the tensors of a format. It is a module of the package `schemes`, named after config.json's
`quant_method`.
"""

from __future__ import annotations

import json
import logging
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from safetensors import safe_open
from torch import Tensor

from speculant import plugins
from speculant.errors import Converts, ModelError
from speculant.files import TensorPlace, read_json
from speculant.models.config import listed
from speculant.models.description import DecoderConfig, stored_name, stored_shape
from speculant.models.sizes import HEAD, HEAD_BIAS, TABLE, tensor_shapes
from speculant.models.weights.formats import method_of, no_weights, quantization_of
from speculant.models.weights.source import (
    CONFIG,
    FLOATS,
    JoinedMatrix,
    StoredWeights,
    decodable,
    map_tensor,
    read_plain,
)

logger = logging.getLogger(__name__)

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_HEAD = re.compile(r"(?:model\.)?(?:mtp|mtp_layers)\.")  # a head for multi-token prediction beside a model
_LAYER = re.compile(r"(?:[A-Za-z_]\w*\.)+?([0-9]{1,10})\.", re.ASCII)  # begins the names of a layer's tensors
_HARMLESS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
_PREFIXES = (("language_model.", ""), ("model.language_model.", "model."))  # of language models within larger ones
_HEADS = ("lm_head", "embed_out")
GOOD = "Q4_K_M, Q5_K_M, Q6_K or Q8_0"  # GGUF files whose blocks the native kernels multiply by
_LENGTH = 8  # bytes of the header's length, which begin a file
_SHARD = re.compile(r"\w[\w .+-]{0,199}", re.ASCII)  # the name of a file in the folder itself


def open_folder(folder: Path) -> StoredWeights:
    """Read the headers of the folder's safetensors files.

    Raises ModelError, also for a tensor that is in two files, or not in the file that the index names.
    """
    single, index = folder / _SINGLE, folder / _INDEX
    if single.exists():
        return open_file(single)
    if not index.exists():
        raise no_weights(folder, f"neither {_SINGLE} nor {_INDEX}")
    places = _read_shards(index)
    return StoredWeights(places, folder, sorted({place.file for place in places.values()}))


def open_file(file: Path) -> StoredWeights:
    """Read the header of one file. Raises ModelError if it is broken."""
    return StoredWeights(_read_header(file), file.parent, [file])


def renamed(found: StoredWeights, table: str) -> StoredWeights:
    """Return the tensors of the language model, under the names that a file of it alone has.

    table: that name of the embedding table, such as "model.embed_tokens.weight". Files of models that also read
    images have other names: see _PREFIXES. Files of a model without its head lack the first part of each name.
    """
    if table in found.places:
        return found
    for stored, plain in (*_PREFIXES, ("", table[: table.index(".") + 1])):
        if table.startswith(plain) and stored + table.removeprefix(plain) in found.places:
            named = {_plain(name, stored, plain): place for name, place in found.places.items()}
            return replace(found, places={name: place for name, place in named.items() if name})
    return found


def without_copies(found: StoredWeights, copies: Iterable[tuple[str, str]]) -> StoredWeights:
    """Return the tensors without copies of others; see `TensorMap.copies`. An absent one is its first copy.

    Raises ModelError if a copy differs.
    """
    places = dict(found.places)
    for name, copy in copies:
        own = places.pop(copy, None)
        if own is not None and not _is_equal(places.setdefault(name, own), own):
            raise ModelError(
                f"{copy} differs from {name}, and the model has one tensor for both",
                "use a checkpoint in which they are equal.",
            )
    return replace(found, places=places)


def _is_equal(one: TensorPlace, other: TensorPlace) -> bool:
    return one is other or (one.shape == other.shape and torch.equal(map_tensor(one), map_tensor(other)))


def _plain(name: str, stored: str, plain: str) -> str:
    """Return a tensor's name with another beginning; "" if it does not begin so. A head keeps its name."""
    if name.split(".")[0] in _HEADS:
        return name
    return plain + name.removeprefix(stored) if name.startswith(stored) else ""


def without_heads(found: StoredWeights, config: Mapping[str, Any], layers: int) -> StoredWeights:
    """Return the tensors of the model alone, without its heads for multi-token prediction, which a drafter reads.

    They have names of their own, or are the layers after the model's, as many as num_nextn_predict_layers.
    """
    behind = range(layers, layers + int(config.get("num_nextn_predict_layers") or 0))
    kept = {
        name: place
        for name, place in found.places.items()
        if not (_HEAD.match(name) or ((hit := _LAYER.match(name)) and int(hit.group(1)) in behind))
    }
    return found if len(kept) == len(found.places) else replace(found, places=kept)


def check_layers(found: StoredWeights, layers: int) -> None:
    """Compare the number of layers in the files' headers with that in config.json. Raises ModelError if they differ."""
    hits = map(_LAYER.match, found.names())
    numbers = {int(hit.group(1)) for hit in hits if hit}
    if len(numbers) != layers or max(numbers) != layers - 1:
        spanned = f" ({min(numbers)} to {max(numbers)})" if numbers else ""
        raise ModelError(
            f"config.json says num_hidden_layers = {layers}, but the weights hold {len(numbers)} layers{spanned}",
            "use the config.json that belongs to these weights, or download the checkpoint again.",
        )


def with_stored_head(config: DecoderConfig, found: StoredWeights) -> DecoderConfig:
    """Return the model with a head of its own if the files decide that and hold one that is not the table.

    A bias that the files lack is 0.
    """
    if config.head.bias and config.tensors.stored(HEAD_BIAS) not in found.names():
        config = replace(config, head=replace(config.head, bias=False))
    head, table = config.tensors.stored(HEAD), config.tensors.stored(TABLE)
    if not config.head.by_files or head not in found.names():
        return config
    return config if _is_table(found, head, table) else config.with_head(())


def check_tensors(found: StoredWeights, config: DecoderConfig) -> None:
    """Compare the files with the model that is described. Raises ModelError on any difference."""
    shapes = {name: found.shape(name) for name in found.names() if name not in config.tensors.unused}
    made = {name: config.tensors.expression(name) for name in tensor_shapes(config)}
    wanted = {stored_name(made[name]): stored_shape(made[name], shape) for name, shape in tensor_shapes(config).items()}
    head, table = config.tensors.stored(HEAD), config.tensors.stored(TABLE)
    if config.head.tied and head in shapes:
        if not _is_table(found, head, table):
            raise ModelError(
                f"config.json says tie_word_embeddings = true, but {head} differs from {table}",
                "set tie_word_embeddings to false in config.json if the head was trained on its own.",
            )
        del shapes[head]
    _check_names(found, shapes.keys(), wanted.keys(), head)
    _check_shapes(found, shapes, wanted)
    _check_kinds(found)


def _read_shards(index: Path) -> dict[str, TensorPlace]:
    """Read the headers of the files that an index lists, and check that each tensor is in the file that it names."""
    weight_map = _read_weight_map(index)
    headers = [_read_header(index.parent / file) for file in sorted(set(weight_map.values()))]
    found = [(name, place) for header in headers for name, place in header.items()]
    wrong = sorted(name for name, place in found if weight_map.get(name) != place.file.name)
    if wrong:
        raise ModelError(
            f"{index.parent} has tensors in files where {_INDEX} does not list them ({listed(wrong)})",
            "download the checkpoint again.",
        )
    return dict(found)


def _read_weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor. Raises ModelError if the map is unusable, or a file is missing."""
    found = read_json(index).get("weight_map")
    weight_map: dict[str, str] = found if isinstance(found, dict) else {}
    files: list[object] = [*weight_map.values()]
    if not files or any(not isinstance(file, str) or not _SHARD.fullmatch(file) for file in files):
        raise ModelError(f"{index} has no usable weight_map", "download the checkpoint again.")
    missing = sorted(file for file in set(weight_map.values()) if not (index.parent / file).is_file())
    if missing:
        raise ModelError(
            f"{index.parent} lacks {listed(missing)}, which {_INDEX} lists", "download the checkpoint again."
        )
    return weight_map


def _read_header(file: Path) -> dict[str, TensorPlace]:
    """Return the places of the tensors of a file, without tables that older programs stored and that can be computed.

    Raises ModelError if safetensors finds the header broken.
    """
    reading = Converts(ModelError, f"{file} is not a readable safetensors file", "download it again.")
    with reading, safe_open(file, framework="pt"), file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH), "little")
        header = json.loads(opened.read(length))
    found = dict[str, TensorPlace]()
    for name, entry in header.items():
        if name != "__metadata__" and not name.endswith(_HARMLESS):
            first, end = entry["data_offsets"]
            place = _LENGTH + length + first
            found[name] = TensorPlace(file, tuple(entry["shape"]), entry["dtype"], place, end - first)
    return found


def _is_table(found: StoredWeights, head: str, table: str) -> bool:
    """Whether a stored head equals the table of tokens, if there is one."""
    return table not in found.names() or torch.equal(read_plain(found, head), read_plain(found, table))


def _check_names(weights: StoredWeights, found: Iterable[str], wanted: Iterable[str], head: str) -> None:
    missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing == [head] and not unexpected:
        raise ModelError(
            f"{weights.described_by} says tie_word_embeddings = false, but the weights have no {head}",
            "set tie_word_embeddings to true in config.json, or download the checkpoint again.",
        )
    problems = [
        f"{len(names)} {what} ({listed(names)})"
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if problems:
        raise ModelError(
            f"the tensors in {weights.place} are not those that {weights.described_by} describes:"
            f" {' and '.join(problems)}",
            "use the config.json that belongs to these weights, or download the checkpoint again."
            if weights.described_by == CONFIG
            else "use a file of one of the supported architectures, or download it again.",
        )


def _check_shapes(
    weights: StoredWeights, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    wrong = [
        f"{name} is {list(shape)} but {weights.described_by} asks for {list(wanted[name])}"
        for name, shape in sorted(found.items())
        if shape != wanted[name]
    ]
    if wrong:
        raise ModelError(
            f"the weights in {weights.place} do not fit {weights.described_by}: {listed(wrong, separator='; ')}",
            "check vocab_size, hidden_size, intermediate_size, head_dim and the numbers of heads in config.json."
            if weights.described_by == CONFIG
            else "download the file again.",
        )


def _check_kinds(weights: StoredWeights) -> None:
    """Raise ModelError for a tensor of a type that can't be read."""
    kinds = {name: place.kind for name, place in weights.places.items()}
    wrong = sorted(f"{name} is {kind}" for name, kind in kinds.items() if kind not in FLOATS and not decodable(kind))
    if wrong and weights.described_by == CONFIG:
        raise ModelError(
            f"the weights are stored in a type that is not supported ({listed(wrong)})",
            "use a checkpoint in float32, bfloat16 or float16.",
        )
    if wrong:
        raise ModelError(
            f"{weights.place} has tensors of kinds that can't be decoded ({listed(wrong)})",
            f"use a file of the model in {GOOD}, or with floating-point weights.",
        )


SCHEMES = "speculant.models.weights.schemes"
AGAIN = "download the checkpoint again."


@dataclass(frozen=True)
class ModuleParts:
    """The tensors that a matrix consists of, by the ends of their names after the name of the module."""

    files: StoredWeights
    module: str

    def has(self, end: str) -> bool:
        """Whether there is such a tensor."""
        return self.module + end in self.files.places

    def shape(self, end: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises ModelError if it is missing."""
        return self._place(end).shape

    def kind(self, end: str) -> str:
        """Return safetensors' name of the type of a tensor, such as I32. Raises ModelError if it is missing."""
        return self._place(end).kind

    def read(self, end: str, index: int | None = None) -> Tensor:
        """Read a tensor, or one of stacked tensors."""
        name = self.module + end
        return cast(Tensor, self.files.read(name) if index is None else self.files.read_stacked(name, index))

    def check(self, end: str, kinds: Collection[str], shape: Sequence[int]) -> None:
        """Raise ModelError unless a tensor exists and has one of these types and this shape."""
        if self.kind(end) not in kinds or self.shape(end) != tuple(shape):
            wanted = f"{' or '.join(sorted(kinds))} {list(shape)}"
            raise self.error(f"{self.module}{end} is {self.kind(end)} {list(self.shape(end))} instead of {wanted}")

    def error(self, problem: str, fix: str = AGAIN) -> ModelError:
        """Return the error of a matrix that can't be used."""
        return ModelError(f"{self.files.place}: {problem}", fix)

    def _place(self, end: str) -> TensorPlace:
        if not self.has(end):
            raise self.error(f"{self.module}{end} is missing")
        return self.files.places[self.module + end]


class Scheme(ABC):
    """A format of quantised weights.

    marks: the ends of the names of tensors that only a quantised matrix has. parts: the ends of all names of its
    tensors, other than a bias. weight: the end of the matrix's own name. unread: the ends of the names of tensors that
    are left out wherever they are, such as scales of activations.
    """

    marks: ClassVar[Sequence[str]]
    parts: ClassVar[Sequence[str]]
    weight: ClassVar[str] = ".weight"
    unread: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def matrix(self, parts: ModuleParts) -> JoinedMatrix:
        """Return a matrix. Raises ModelError for headers that do not fit each other.

        Small tensors, such as zero points, may be read to find out its kind and its order.
        """


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a config.json; None = its weights are plain. Raises ModelError for options it can't read."""
    method = method_of(config)
    if method is None:
        return None
    scheme: Scheme = plugins.load(SCHEMES, method.replace("-", "_")).read_scheme(quantization_of(config))
    return scheme


def joined(files: StoredWeights, scheme: Scheme) -> StoredWeights:
    """Return the weights with the matrices that a scheme makes of tensors.

    Warns of matrices that are decoded. Raises ModelError for headers that do not fit each other.
    """
    modules = {stored.removesuffix(mark) for mark in scheme.marks for stored in files.places if stored.endswith(mark)}
    matrices = {module + scheme.weight: scheme.matrix(ModuleParts(files, module)) for module in sorted(modules)}
    taken = {module + end for module in modules for end in scheme.parts}
    places = {name: place for name, place in files.places.items() if name not in taken}
    _say_decoded(files, matrices)
    return replace(files, places=places, joined=matrices)


def _say_decoded(files: StoredWeights, matrices: Mapping[str, JoinedMatrix]) -> None:
    reasons = defaultdict[str, list[str]](list)
    for name, matrix in matrices.items():
        if matrix.why_decoded:
            reasons[matrix.why_decoded].append(name)
    if reasons:
        listed = "; ".join(f"{len(names)} ({names[0]} ...), because {why}" for why, names in reasons.items())
        logger.warning("%s: some matrices are decoded to floating-point numbers: %s", files.place.name, listed)


def open_modules(files: StoredWeights, scheme: Scheme, decoder: DecoderConfig) -> tuple[StoredWeights, DecoderConfig]:
    """Return the weights of a quantised model, and its description for these files.

    Quantised matrices are [n, k], even if the family's plain matrices are transposed. Some programs store a bias of
    zeros for each module; it is left out where the model has no bias. Raises ModelError.
    """
    found = joined(files, scheme)
    decoder = replace(decoder, tensors=decoder.tensors.upright(found.joined))
    known = {stored_name(decoder.tensors.expression(name)) for name in tensor_shapes(decoder)}
    biases = {name.removesuffix(scheme.weight) + ".bias" for name in found.joined} & found.places.keys() - known
    unused = {name for name in biases if files.kind(name) in FLOATS and not bool(read_plain(files, name).any())}
    unused |= {name for name in found.places if name.endswith(tuple(scheme.unread))}
    places = {name: place for name, place in found.places.items() if name not in unused}
    return replace(found, places=places), decoder
