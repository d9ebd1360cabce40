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
import mmap
import os
import re
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors import safe_open
from torch import Tensor
from typing_extensions import override

from speculant import plugins
from speculant.errors import Converts, ModelError
from speculant.files import Stamp, read_json
from speculant.models.config import listed
from speculant.models.description import DecoderConfig, stored_name, stored_shape
from speculant.models.sizes import HEAD, HEAD_BIAS, TABLE, tensor_shapes
from speculant.models.weights.formats import method_of, no_weights, quantization_of
from speculant.models.weights.source import FLOATS, HasOrders, QuantizedBlocks, ReadsStacks, StoredWeights, read_plain

logger = logging.getLogger(__name__)

CONFIG = "config.json"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_LAYER = re.compile(r"(?:[A-Za-z_]\w*\.)+?([0-9]{1,10})\.", re.ASCII)  # begins the names of a layer's tensors
_HARMLESS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
_PREFIXES = (("language_model.", ""), ("model.language_model.", "model."))  # of language models within larger ones
_HEADS = ("lm_head", "embed_out")
_LENGTH = 8  # bytes of the header's length, which begin a file
_TYPES = {
    **FLOATS, "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_SHARD = re.compile(r"\w[\w .+-]{0,199}", re.ASCII)  # the name of a file in the folder itself


@dataclass(frozen=True)
class TensorEntry:
    """The header's entry of one tensor."""

    file: Path
    shape: tuple[int, ...]
    kind: str  # safetensors' name of the type, such as BF16
    first: int  # byte of the file
    size: int  # bytes

    def part(self, index: int) -> TensorEntry:
        """Return the entry of one of stacked tensors. Raises ModelError if there is no such one."""
        if not self.shape or not 0 <= index < self.shape[0]:
            raise ModelError(f"{self.file} has no part {index} of a tensor {list(self.shape)}", "download it again.")
        size = self.size // self.shape[0]
        return replace(self, shape=self.shape[1:], first=self.first + index * size, size=size)


@dataclass(frozen=True)
class TensorFiles(StoredWeights, ReadsStacks):
    """A `WeightSource`: all tensors of a checkpoint by name. Until `read`, only the headers are read."""

    entries: dict[str, TensorEntry]
    folder: Path

    @classmethod
    def open(cls, folder: Path) -> TensorFiles:
        """Read the headers of the folder's safetensors files.

        Raises ModelError, also for a tensor that is in two files, or not in the file that the index names.
        """
        single, index = folder / _SINGLE, folder / _INDEX
        if not single.exists() and index.exists():
            return cls(_read_shards(index), folder)
        _check_exists(single)
        return cls(_read_header(single), folder)

    @classmethod
    def of_file(cls, file: Path) -> TensorFiles:
        """Read the header of one file. Raises ModelError if it is broken."""
        return cls(_read_header(file), file.parent)

    def common_dtype(self) -> torch.dtype:
        """Return the type that most tensors are stored in."""
        kinds = Counter(entry.kind for entry in self.entries.values())
        return FLOATS[kinds.most_common(1)[0][0]]

    @property
    @override
    def described_by(self) -> str:
        return CONFIG

    @property
    @override
    def place(self) -> Path:
        return self.folder

    @override
    def check_kinds(self) -> None:
        wrong = sorted(f"{name} is {entry.kind}" for name, entry in self.entries.items() if entry.kind not in FLOATS)
        if wrong:
            raise ModelError(
                f"the weights are stored in a type that is not supported ({listed(wrong)})",
                "use a checkpoint in float32, bfloat16 or float16.",
            )

    @override
    def quantised_kinds(self) -> list[str]:
        return []

    @override
    def names(self) -> Collection[str]:
        """Without tables that can be recomputed."""
        return [name for name in self.entries if not _is_harmless(name)]

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape

    @override
    def kind(self, name: str) -> str:
        return self.entries[name].kind

    def stamps(self) -> list[Stamp]:
        """Return the stamps of all files."""
        return [Stamp.of(file) for file in sorted({entry.file for entry in self.entries.values()})]

    @override
    def read(self, name: str) -> Tensor:
        """Raises ModelError if the file can't be read any longer."""
        return _read(self.entries[name])

    @override
    def read_stacked(self, name: str, index: int) -> Tensor:
        """Raises ModelError as `read` does."""
        return _read(self.entries[name].part(index))

    def renamed(self, table: str) -> TensorFiles:
        """Return the tensors of the language model, under the names that a file of it alone has.

        table: that name of the embedding table, such as "model.embed_tokens.weight". Files of models that also read
        images have other names: see _PREFIXES. Files of a model without its head lack the first part of each name.
        """
        if table in self.entries:
            return self
        for stored, plain in (*_PREFIXES, ("", table[: table.index(".") + 1])):
            if table.startswith(plain) and stored + table.removeprefix(plain) in self.entries:
                named = {_plain(name, stored, plain): entry for name, entry in self.entries.items()}
                return TensorFiles({name: entry for name, entry in named.items() if name}, self.folder)
        return self

    def without_copies(self, copies: Iterable[tuple[str, str]]) -> TensorFiles:
        """Return the tensors without copies of others; see `TensorMap.copies`. An absent one is its first copy.

        Raises ModelError if a copy differs.
        """
        entries = dict(self.entries)
        for name, copy in copies:
            own = entries.pop(copy, None)
            if own is not None and not _is_equal(entries.setdefault(name, own), own):
                raise ModelError(
                    f"{copy} differs from {name}, and the model has one tensor for both",
                    "use a checkpoint in which they are equal.",
                )
        return TensorFiles(entries, self.folder)


def _is_equal(one: TensorEntry, other: TensorEntry) -> bool:
    return one is other or (one.shape == other.shape and torch.equal(_read(one), _read(other)))


def _plain(name: str, stored: str, plain: str) -> str:
    """Return a tensor's name with another beginning; "" if it does not begin so. A head keeps its name."""
    if name.split(".")[0] in _HEADS:
        return name
    return plain + name.removeprefix(stored) if name.startswith(stored) else ""


def check_layers(found: TensorFiles, layers: int) -> None:
    """Compare the number of layers in the files' headers with that in config.json. Raises ModelError if they differ."""
    hits = (_LAYER.match(name) for name in found.entries if not _is_harmless(name))
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
        _check_tied_head(found, head, table)
        del shapes[head]
    _check_names(found, shapes.keys(), wanted.keys(), head)
    _check_shapes(found, shapes, wanted)
    found.check_kinds()


def _check_exists(single: Path) -> None:
    """Raise ModelError if the folder has no weights that can be read."""
    if not single.exists():
        raise no_weights(single.parent, f"neither {_SINGLE} nor {_INDEX}")


def _read_shards(index: Path) -> dict[str, TensorEntry]:
    """Read the headers of the files that an index lists, and check that each tensor is in the file that it names."""
    weight_map = _read_weight_map(index)
    headers = [_read_header(index.parent / file) for file in sorted(set(weight_map.values()))]
    found = [(name, entry) for header in headers for name, entry in header.items() if not _is_harmless(name)]
    wrong = sorted(name for name, entry in found if weight_map.get(name) != entry.file.name)
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


def _read_header(file: Path) -> dict[str, TensorEntry]:
    with _open(file) as opened:
        places = _read_places(file)
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        return {name: TensorEntry(file, tuple(s.get_shape()), s.get_dtype(), *places[name])
                for name, s in slices.items()}  # fmt: skip


def _read_places(file: Path) -> dict[str, tuple[int, int]]:
    """Return the first byte and the size of each tensor of a file whose header safetensors has checked."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    found = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: (_LENGTH + length + first, end - first) for name, (first, end) in found.items()}


def _read(entry: TensorEntry) -> Tensor:
    """Map a tensor. Changes to it stay in memory. Each has its own mapping, because a mapping keeps read pages."""
    if entry.kind not in _TYPES:
        raise ModelError(f"{entry.file} has a tensor of the type {entry.kind}, which can't be read", "convert it.")
    with Converts(ModelError, f"{entry.file} can't be read", "download it again."), entry.file.open("rb") as opened:
        if os.fstat(opened.fileno()).st_size < entry.first + entry.size:
            raise ModelError(f"{entry.file} has become shorter since it was opened", "download it again.")
        if not entry.size:
            return torch.empty(entry.shape, dtype=_TYPES[entry.kind], device="cpu")
        ahead = entry.first % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(opened.fileno(), ahead + entry.size, access=mmap.ACCESS_COPY, offset=entry.first - ahead)
        return torch.frombuffer(mapped, dtype=_TYPES[entry.kind], offset=ahead).view(entry.shape)


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises ModelError if its header is broken, or if the block fails."""
    reading = Converts(ModelError, f"{file} is not a readable safetensors file", "download it again.")
    with reading, safe_open(file, framework="pt") as opened:
        yield opened


def _is_harmless(name: str) -> bool:
    """Whether a tensor is a table that older programs stored and that can be recomputed."""
    return name.endswith(_HARMLESS)


def _is_table(found: StoredWeights, head: str, table: str) -> bool:
    """Whether a stored head equals the table of tokens, if there is one."""
    return table not in found.names() or torch.equal(read_plain(found, head), read_plain(found, table))


def _check_tied_head(found: StoredWeights, head: str, table: str) -> None:
    if not _is_table(found, head, table):
        raise ModelError(
            f"config.json says tie_word_embeddings = true, but {head} differs from {table}",
            "set tie_word_embeddings to false in config.json if the head was trained on its own.",
        )


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


SCHEMES = "speculant.models.weights.schemes"
AGAIN = "download the checkpoint again."


@dataclass(frozen=True)
class ModuleParts:
    """The tensors that a matrix consists of, by the ends of their names after the name of the module.

    index: of a single matrix among stacked ones; None = all of them.
    """

    files: TensorFiles
    module: str
    index: int | None = None

    def has(self, end: str) -> bool:
        """Whether there is such a tensor."""
        return self.module + end in self.files.entries

    def shape(self, end: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises ModelError if it is missing."""
        shape = self._entry(end).shape
        return shape if self.index is None else shape[1:]

    def kind(self, end: str) -> str:
        """Return safetensors' name of the type of a tensor, such as I32. Raises ModelError if it is missing."""
        return self._entry(end).kind

    def read(self, end: str) -> Tensor:
        """Read a tensor."""
        name = self.module + end
        return self.files.read(name) if self.index is None else self.files.read_stacked(name, self.index)

    def check(self, end: str, kinds: Collection[str], shape: Sequence[int]) -> None:
        """Raise ModelError unless a tensor exists and has one of these types and this shape."""
        if self.kind(end) not in kinds or self.shape(end) != tuple(shape):
            wanted = f"{' or '.join(sorted(kinds))} {list(shape)}"
            raise self.error(f"{self.module}{end} is {self.kind(end)} {list(self.shape(end))} instead of {wanted}")

    def error(self, problem: str, fix: str = AGAIN) -> ModelError:
        """Return the error of a matrix that can't be used."""
        return ModelError(f"{self.files.place}: {problem}", fix)

    def _entry(self, end: str) -> TensorEntry:
        if not self.has(end):
            raise self.error(f"{self.module}{end} is missing")
        return self.files.entries[self.module + end]


class StoredMatrix(Protocol):
    """A matrix [n, k] of several tensors, or stacked matrices, whose headers have been checked.

    Small tensors, such as zero points, may be read to find out the kind and the order.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, or of the stacked matrices."""
        ...

    @property
    def kind(self) -> str:
        """The layout of the blocks that `read` returns, in capitals; or a key of DECODED_BITS: it returns numbers."""
        ...

    @property
    def order(self) -> Tensor | None:
        """See `HasOrders.order`."""
        ...

    @property
    def why_decoded(self) -> str:
        """The reason why `read` returns numbers; "" if it returns blocks."""
        ...

    def read(self) -> Tensor | QuantizedBlocks:
        """Read it: blocks, or numbers in float32."""
        ...


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
    def matrix(self, parts: ModuleParts) -> StoredMatrix:
        """Return a matrix. Raises ModelError for headers that do not fit each other."""


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a config.json; None = its weights are plain. Raises ModelError for options it can't read."""
    method = method_of(config)
    if method is None:
        return None
    scheme: Scheme = plugins.load(SCHEMES, method.replace("-", "_")).read_scheme(quantization_of(config))
    return scheme


@dataclass(frozen=True)
class ModuleFiles(StoredWeights, ReadsStacks, HasOrders):
    """`StoredWeights` of files in which some matrices consist of several tensors.

    matrices: these, by name. unused: plain tensors that are left out.
    """

    files: TensorFiles
    scheme: Scheme
    matrices: Mapping[str, StoredMatrix]
    unused: frozenset[str] = frozenset()
    _last: dict[str, Tensor | QuantizedBlocks] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, files: TensorFiles, scheme: Scheme) -> ModuleFiles:
        """Find the matrices. Raises ModelError for headers that do not fit each other."""
        modules = {stored.removesuffix(mark) for mark in scheme.marks for stored in files.entries
                   if stored.endswith(mark)}  # fmt: skip
        parts = {module + scheme.weight: ModuleParts(files, module) for module in sorted(modules)}
        return cls(files, scheme, {name: scheme.matrix(each) for name, each in parts.items()})

    def _module(self, name: str) -> str:
        return name.removesuffix(self.scheme.weight)

    @cached_property
    def _plain(self) -> TensorFiles:
        """The files without the tensors of these matrices."""
        taken = {self._module(name) + end for name in self.matrices for end in self.scheme.parts} | self.unused
        return replace(self.files, entries={k: v for k, v in self.files.entries.items() if k not in taken})

    @property
    @override
    def described_by(self) -> str:
        return self.files.described_by

    @property
    @override
    def place(self) -> Path:
        return self.files.place

    @override
    def stamps(self) -> list[Stamp]:
        return self.files.stamps()

    @override
    def common_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.matrices else self.files.common_dtype()

    @override
    def quantised_kinds(self) -> list[str]:
        return sorted({matrix.kind for matrix in self.matrices.values()})

    @override
    def check_kinds(self) -> None:
        self._plain.check_kinds()

    @override
    def names(self) -> Collection[str]:
        return [*self._plain.names(), *self.matrices]

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self.matrices[name].shape if name in self.matrices else self._plain.shape(name)

    @override
    def kind(self, name: str) -> str:
        return self.matrices[name].kind if name in self.matrices else self._plain.kind(name)

    @override
    def order(self, name: str) -> Tensor | None:
        return self.matrices[name].order if name in self.matrices else None

    @override
    def read(self, name: str) -> Tensor | QuantizedBlocks:
        """The last matrix is kept until the next read: parts of a fused one, such as Phi-3's qkv_proj, follow."""
        found = self._last.get(name)
        if found is None:
            self._last.clear()  # before the next one takes memory
            if name not in self.matrices:
                return self._plain.read(name)
            found = self._last[name] = self.matrices[name].read()
        return found

    @override
    def read_stacked(self, name: str, index: int) -> Tensor | QuantizedBlocks:
        self._last.clear()
        if name not in self.matrices:
            return self._plain.read_stacked(name, index)
        return self.scheme.matrix(ModuleParts(self.files, self._module(name), index)).read()

    def say_decoded(self) -> None:
        """Warn of matrices that are decoded, with the reasons."""
        reasons = defaultdict[str, list[str]](list)
        for name, matrix in self.matrices.items():
            if matrix.why_decoded:
                reasons[matrix.why_decoded].append(name)
        if reasons:
            listed = "; ".join(f"{len(names)} ({names[0]} ...), because {why}" for why, names in reasons.items())
            logger.warning("%s: some matrices are decoded to floating-point numbers: %s", self.place.name, listed)


def open_modules(files: TensorFiles, scheme: Scheme, decoder: DecoderConfig) -> tuple[ModuleFiles, DecoderConfig]:
    """Return the weights of a quantised model, and its description for these files.

    Quantised matrices are [n, k], even if the family's plain matrices are transposed. Some programs store a bias of
    zeros for each module; it is left out where the model has no bias. Raises ModelError.
    """
    found = ModuleFiles.of(files, scheme)
    decoder = replace(decoder, tensors=decoder.tensors.upright(found.matrices))
    known = {stored_name(decoder.tensors.expression(name)) for name in tensor_shapes(decoder)}
    biases = {name.removesuffix(scheme.weight) + ".bias" for name in found.matrices} & files.entries.keys() - known
    zeros = {name for name in biases if files.kind(name) in FLOATS and not bool(files.read(name).any())}
    unread = {name for name in files.entries if name.endswith(tuple(scheme.unread))}
    found = replace(found, unused=frozenset(zeros | unread))
    found.say_decoded()
    return found, decoder
