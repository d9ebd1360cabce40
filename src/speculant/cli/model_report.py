"""The report of `speculant doctor MODEL`: a model's sizes, the types of its matrices, and the slow ones among them.

No weights are read.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculant.cli.report import Finding
from speculant.errors import ModelError
from speculant.gguf_file import GgufFile

if TYPE_CHECKING:
    import torch

    from speculant.models import Backend, Checkpoint, CheckpointFiles, DecoderConfig, WeightTypes

KIB, MIB = 2**10, 2**20
FLOATS = ("f64", "f32", "f16", "bf16")
LEAST_WIDE = 64 * MIB  # matrices in float32 of more bytes than this are a finding

Kept = Callable[[str, Sequence[int]], tuple[str, int]]  # the type and the bytes of a matrix in memory


@dataclass(frozen=True)
class ModelReport:
    """The facts of a model. matrices: by their types in the files."""

    model: dict[str, Any]
    matrices: dict[str, dict[str, Any]]
    kernels: dict[str, Any]
    findings: list[Finding]


@dataclass(frozen=True)
class Matrix:
    """A matrix of a model: its types and bytes in the files and in memory."""

    name: str
    kind: str
    stored: int
    kept_as: str
    kept: int


def inspect_model(source: str, model_backend: str = "auto") -> ModelReport:
    """Collect the facts of a model by path, hub id or "demo". Raises ModelError for one that can't be used.

    model_backend: see `EngineConfig`; a model that transformers computes is loaded.
    """
    import torch

    from speculant.models import CheckpointFiles, choose_backend, load_model, resolve_source

    if model_backend != "auto":
        return _inspect_loaded(load_model(source, model_backend=model_backend))
    place = resolve_source(source)
    files = CheckpointFiles.open(place)
    dtype = files.dtype("auto")
    backend, says = choose_backend("auto", None, files.decoder, dtype, torch.device("cpu"), weights=files.weights)
    matrices = _matrices(files, _kept(files, backend, dtype))
    return ModelReport(
        model=_model(files, place),
        matrices=_by_kind(matrices),
        kernels={"in_use": says, **_memory(files, matrices, dtype)},
        findings=[_tokenizer_finding(place), _kernel_finding(backend, says), *_type_findings(matrices)],
    )


def _inspect_loaded(checkpoint: Checkpoint) -> ModelReport:
    """Report on a model that transformers computes."""
    model, shape = checkpoint.model, checkpoint.model.cache_shape
    slower = Finding(
        "note",
        f"it is computed by {checkpoint.kernels}",
        "slower than Speculant's own kernels; and speculation can change which of two nearly equal tokens is chosen",
        "leave model_backend out if Speculant's kernels compute this model",
    )
    return ModelReport(
        model={
            "place": str(checkpoint.folder),
            "architecture": checkpoint.config["model_type"],
            "layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "vocabulary": model.vocab_size,
            "context": model.max_positions,
            "tokenizer": _tokenizer_kind(checkpoint.folder),
        },
        matrices={},
        kernels={
            "in_use": checkpoint.kernels,
            "weights": str(checkpoint.dtype).removeprefix("torch."),
            "each_position_kib": shape.bytes_per_token / KIB,
        },
        findings=[_tokenizer_finding(checkpoint.folder), slower],
    )


def _model(files: CheckpointFiles, place: Path) -> dict[str, Any]:
    from speculant.models import parameters

    decoder = files.decoder
    return {
        "place": str(place),
        "architecture": files.config["model_type"],
        "parameters": parameters(decoder),
        "layers": decoder.num_layers,
        **({} if decoder.encoder is None else {"encoder_layers": len(decoder.encoder.layers)}),
        "hidden_size": decoder.hidden_size,
        "vocabulary": decoder.vocab_size,
        "context": decoder.max_positions,
        "tokenizer": _tokenizer_kind(place),
        "files_mib": sum(stamp.size for stamp in files.tensors.stamps()) / MIB,
    }


def _tokenizer_kind(place: Path) -> str | None:
    """Return the algorithm of a model's tokenizer; for a GGUF file, also how it splits texts into words."""
    if place.is_file():
        metadata = GgufFile.open(place).metadata
        names = [metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre")]
        return ", ".join(str(name) for name in names if name) or None
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((place / "tokenizer.json").read_text(encoding="utf-8"))["model"]["type"])
    return None


def _kept(files: CheckpointFiles, backend: Backend, dtype: torch.dtype) -> Kept:
    """Return the function from a matrix's name and shape to its type and bytes in memory."""
    from speculant.kernels import likely_bytes
    from speculant.models import CODED, NativeBackend, WeightTypes, packing_of, tensor_shapes

    if isinstance(backend, NativeBackend) and (kernels := backend.kernels) is not None:
        types = WeightTypes(files.weights, dtype, packing_of(backend).name == CODED)
        found = {name: types.of(name) for name, shape in tensor_shapes(files.decoder).items() if len(shape) == 2}
        found |= dict.fromkeys(_unified(files, types), types.common)
        return lambda name, shape: (found[name].name.lower(), likely_bytes(kernels, found[name], *shape))
    kind = str(dtype).removeprefix("torch.").replace("loat", "")
    return lambda name, shape: (kind, math.prod(shape) * dtype.itemsize)


def _unified(files: CheckpointFiles, types: WeightTypes) -> Iterator[str]:
    """Yield the names of matrices that do not keep their types; see `WeightReader.unified`."""
    from speculant.models import LAYER, TABLE, Experts, expert_matrices

    if types.have_orders([TABLE]):
        yield TABLE
    for index, layer in enumerate(files.decoder.layers):
        if isinstance(layer.mlp, Experts):
            groups = [[f"{LAYER.format(index)}mlp.{name}" for name in group] for group in expert_matrices(layer.mlp)]
            if types.have_orders(chain(*groups)) or types.mixed(groups):
                yield from chain(*groups)


def _matrices(files: CheckpointFiles, kept: Kept) -> list[Matrix]:
    from speculant.models import stored_bytes, tensor_shapes

    kind, shapes = files.weights.kind, tensor_shapes(files.decoder)
    return [
        Matrix(name, kind(name).lower(), stored_bytes(kind(name), shape), *kept(name, shape))
        for name, shape in shapes.items()
        if len(shape) == 2
    ]


def _by_kind(matrices: Sequence[Matrix]) -> dict[str, dict[str, Any]]:
    """Return numbers and sizes of matrices by their type in the files, the largest first."""
    found = defaultdict[str, list[Matrix]](list)
    for matrix in matrices:
        found[matrix.kind].append(matrix)
    return {
        kind: {
            "matrices": len(own),
            "in_files_mib": sum(each.stored for each in own) / MIB,
            "in_memory_mib": sum(each.kept for each in own) / MIB,
            "kept_as": sorted({each.kept_as for each in own}),
        }
        for kind, own in sorted(found.items(), key=lambda item: -sum(each.stored for each in item[1]))
    }


def _memory(files: CheckpointFiles, matrices: Sequence[Matrix], dtype: torch.dtype) -> dict[str, Any]:
    """Return the size of a model in memory, and the part that each pass reads."""
    from speculant.models import pass_matrices, source_matrices

    parts = {"read_in_each_pass_mib": {name for name, _, _ in pass_matrices(files.decoder)}}
    if files.decoder.encoder is not None:
        parts["read_to_encode_mib"] = {name for name, _ in source_matrices(files.decoder)}
    return {
        "weights_mib": sum(matrix.kept for matrix in matrices) / MIB,
        **{part: sum(each.kept for each in matrices if each.name in read) / MIB for part, read in parts.items()},
        "keys_and_values": str(dtype).removeprefix("torch."),
        **_cache_sizes(files.decoder, dtype),
    }


def _cache_sizes(decoder: DecoderConfig, dtype: torch.dtype) -> dict[str, float]:
    """Return the size of keys and values in a type, and in int8, which kv_cache_dtype chooses."""
    import torch

    from speculant.models import cache_shape

    found, length = dict[str, float](), decoder.max_positions
    for name, stored in (("", None), ("_in_int8", torch.int8)):
        shape = cache_shape(decoder, dtype, torch.device("cpu"), stored)
        needed = sum(shape.bytes_of(group.layers) * min(length, group.window or length) for group in shape.groups)
        found |= {f"each_position{name}_kib": shape.bytes_per_token / KIB, f"whole_context{name}_mib": needed / MIB}
    return found


def _tokenizer_finding(place: Path) -> Finding:
    from speculant.text import Tokenizer

    try:
        Tokenizer.load(place)
    except ModelError as error:
        return Finding(
            "missing", error.problem, "the model needs the tokenizer of another checkpoint, by --tokenizer", error.fix
        )
    return Finding("ok", "its tokenizer can be read")


def _kernel_finding(backend: Backend, says: str) -> Finding:
    if backend.row_invariant:
        computed = f"the {backend.name} kernels compute it: the same bits for any batch, with or without speculation"
        return Finding("ok", computed)
    return Finding(
        "missing",
        f"the native kernels do not compute it: {says}",
        "speed; and speculation can change which of two nearly equal tokens is chosen",
        "`speculant doctor` without a model shows the kernels of this machine",
    )


def _type_findings(matrices: Sequence[Matrix]) -> list[Finding]:
    """Find the types of a model's matrices that are slow."""
    from speculant.models import GOOD, listed_kinds

    decoded = [each for each in matrices if each.kind not in FLOATS and each.kept_as != each.kind]
    wide = [each for each in matrices if each.kept_as == "f32" and each not in decoded]
    has_blocks = any(each.kind not in FLOATS for each in matrices)  # such a file's matrices can't be rounded
    found = list[Finding]()
    if decoded:
        kept_as = " and ".join(sorted({each.kept_as for each in decoded}))
        found.append(
            Finding(
                "note",
                f"{listed_kinds(Counter(each.kind for each in decoded))} are decoded to {kept_as}",
                f"{_mib(decoded, 'kept')} MiB in memory instead of {_mib(decoded, 'stored')}, which each pass reads",
                f"use a file of the model in {GOOD}, which are multiplied as they are",
            )
        )
    if sum(each.kept for each in wide) > LEAST_WIDE:
        found.append(
            Finding(
                "note",
                f"{len(wide)} matrices are kept in float32, {_mib(wide, 'kept')} MiB",
                "passes take twice as long to read them as in bfloat16",
                f"use a file of the model in {GOOD}"
                if has_blocks
                else "round them, by --dtype bfloat16 or, to fewer bits, --quantization int8",
            )
        )
    return found or [Finding("ok", "no type of its matrices is slow here")]


def _mib(matrices: Sequence[Matrix], field: str) -> str:
    return f"{sum(getattr(each, field) for each in matrices) / MIB:.1f}"
