"""Models that are made from others for measurements, kept on disk between them: $XDG_CACHE_HOME/speculant/inflated.

They are inflated, decoded to floating-point numbers from a GGUF file, or rescaled to weights that lie on no grid.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from speculant import __version__
from speculant.errors import ConfigError, ModelError, suggest
from speculant.files import cache_folder
from speculant.gguf_file import GgufFile
from speculant.lab.checkpoints import save_tensors, write_json
from speculant.lab.inflation.heads import head_kind, head_shape, inflate_head
from speculant.lab.inflation.model import inflate, shape_of
from speculant.lab.inflation.shapes import Shape, named_shape
from speculant.models import (
    BEFORE_ATTENTION,
    BEFORE_MLP,
    HEAD,
    LAYER,
    NORM,
    TABLE,
    CheckpointFiles,
    DecoderConfig,
    read_description,
    read_plain,
    resolve_source,
)
from speculant.text import read_gguf_tokenizer

PAIRS = {"1b": "50m", "3b": "50m"}  # shapes of a target, and of the draft model beside it
SIGMA, SEED = 0.3, 0
_READERS = {
    BEFORE_ATTENTION: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    BEFORE_MLP: ("mlp.gate_proj", "mlp.up_proj"),
}
_FAMILY = "llama"


def kept_model(source: Path, label: str, write: Callable[[Path], None]) -> Path:
    """Return the folder of a model that is made from `source`, a folder or a file; it is written if it is missing.

    label: names what is made of the source. write: makes it in the folder that it is given, config.json last.
    Raises ConfigError if the folder can't be written.
    """
    name = source.resolve().name.removesuffix(".gguf").removeprefix(f"{__version__}-")
    folder = cache_folder("inflated") / f"{__version__}-{name}-{label}-{_digest(source)}"
    if not (folder / "config.json").exists():
        try:
            _make(folder, write)
        except OSError as error:
            if not (folder / "config.json").exists():  # another process may have been faster
                raise ConfigError(f"{folder} can't be written: {error}", "make room, or set XDG_CACHE_HOME.") from error
    return folder


def decoded_model(source: Path) -> Path:
    """Return the folder of the model in a GGUF file, decoded to bfloat16."""
    return kept_model(source, "decoded", partial(write_decoded, source))


def rescaled_model(source: Path) -> Path:
    """Return the folder of a model's function with weights that lie on no grid, in bfloat16; see `write_rescaled`."""
    return kept_model(source, "off-grid", partial(write_rescaled, source))


def inflated_model(source: Path, shape: Shape, noise: float = 0.0) -> Path:
    """Return the folder of a model at a larger shape or at its own; see `inflate`."""
    sizes = "x".join(map(str, (shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers)))
    return kept_model(source, f"{sizes}-noise-{noise:g}", lambda folder: inflate(source, folder, shape, noise))


def _make(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a model under a temporary name, and rename it when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        write(made)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _digest(source: Path) -> str:
    """Return a digest of a model's weights and configuration, or of a file."""
    digest = hashlib.sha256()
    for file in sorted([*source.glob("*.json"), *source.glob("*.safetensors")]) if source.is_dir() else [source]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def inflated_pair(shape: str, draft: Path | None = None) -> tuple[Path, Path]:
    """Return the folders of target and draft model, which are written if they are missing: 2 GiB for "1b".

    draft: another draft for the embedded target; None = the embedded one. They are in
    $XDG_CACHE_HOME/speculant/inflated, ~/.cache by default. Raises ConfigError for another shape.
    """
    _check(shape)
    own = resolve_source("demo", "draft") if draft is None else draft
    return _kept(resolve_source("demo", "target"), shape), _kept(own, PAIRS[shape])


def inflated_head(head: str | Path, shape: str) -> Path:
    """Return the folder of a head of the embedded target, inflated for the target of `inflated_pair`.

    head: the method of an embedded head, or a folder. Raises SpeculantError for one that can't be inflated.
    """
    _check(shape)
    return _kept(head if isinstance(head, Path) else resolve_source("demo", f"heads/{head}"), shape)


def _check(shape: str) -> None:
    if shape not in PAIRS:
        raise ConfigError(f"there is no pair of the shape {shape!r}", suggest(shape, PAIRS))


def _kept(source: Path, shape: str) -> Path:
    return kept_model(source, shape, lambda folder: _write(source, folder, shape))


def _write(source: Path, folder: Path, shape: str) -> None:
    is_head = head_kind(source) is not None
    _, head_dim = head_shape(source) if is_head else shape_of(source)
    (inflate_head if is_head else inflate)(source, folder, named_shape(shape, head_dim))


def write_decoded(source: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model of a GGUF file to an existing folder, with its tokenizer and chat template.

    A folder can be inflated and changed by noise; blocks of small integers can't.
    Memory holds all weights. Raises ModelError for a file that can't be read.
    """
    files = CheckpointFiles.open(source)
    weights, tokenizer = files.weights, read_gguf_tokenizer(GgufFile.open(source).metadata)
    tensors = {name: read_plain(weights, name).to(dtype) for name in weights.names()}
    save_tensors(tensors, read_description(files.config).tensors, folder / "model.safetensors")
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config = {**files.config, "dtype": str(dtype).removeprefix("torch.")}
    write_json(folder / "tokenizer_config.json", tokenizer.settings)
    write_json(folder / "config.json", config)  # the last: without it nothing loads


def write_rescaled(source: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model of a folder to an existing other folder, with scaled columns: the same function on no grid.

    The weights of a model that was quantised lie on a grid, so rounding them to as many bits again shows nothing. Here

        gains of a norm         move to the columns of the matrices that read it, and become 1; the head is untied
        values and outputs      rows of v_proj are multiplied by factors, and columns of o_proj divided by them
        up and down projection  likewise

    The factors are lognormal. Nothing scales the embedding table, which stays on its grid. Memory holds all weights in
    float64. Raises ModelError for a model that is no Llama without biases.
    """
    files = CheckpointFiles.open(source)
    tensors = {name: read_plain(files.weights, name).to(torch.float64, copy=True) for name in files.weights.names()}
    if files.config["model_type"] != _FAMILY or any(name.endswith("bias") for name in tensors):
        raise ModelError(f"{source} is no Llama model without biases", "use a model of that kind.")
    made = {name: tensor.to(dtype) for name, tensor in _rescaled(tensors, files.decoder).items()}
    save_tensors(made, files.decoder.tensors, folder / "model.safetensors")
    for file in source.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    config = {**files.config, "tie_word_embeddings": False, "dtype": str(dtype).removeprefix("torch.")}
    write_json(folder / "config.json", config)  # the last: without it nothing loads


def _rescaled(tensors: Mapping[str, Tensor], decoder: DecoderConfig) -> dict[str, Tensor]:
    made, generator = dict(tensors), torch.Generator().manual_seed(SEED)
    made[HEAD] = made.get(HEAD, made[TABLE]) * made[NORM]
    made[NORM] = torch.ones_like(made[NORM])
    for index, layer in enumerate(decoder.layers):
        at, of = LAYER.format(index), layer.attention
        for norm, readers in _READERS.items():
            gains = made[f"{at}{norm}.weight"]
            for reader in readers:
                made[f"{at}{reader}.weight"] *= gains
            made[f"{at}{norm}.weight"] = torch.ones_like(gains)
        values, inside = _factors(of.kv_heads * of.head_dim, generator), _factors(layer.mlp.size, generator)
        made[f"{at}self_attn.v_proj.weight"] *= values[:, None]
        made[f"{at}self_attn.o_proj.weight"] /= _of_query_heads(values, decoder)
        made[f"{at}mlp.up_proj.weight"] *= inside[:, None]
        made[f"{at}mlp.down_proj.weight"] /= inside
    return made


def _factors(count: int, generator: torch.Generator) -> Tensor:
    return (SIGMA * torch.randn(count, generator=generator, dtype=torch.float64)).exp()


def _of_query_heads(values: Tensor, decoder: DecoderConfig) -> Tensor:
    """Return the factors of all query heads' numbers; query heads that share a key head share its values."""
    of = decoder.attention
    return values.view(of.kv_heads, of.head_dim).repeat_interleave(of.groups, 0).flatten()
