"""Models for measurements that are made from others, or of a real size with a known text.

Those made from others are kept on disk between measurements, in $XDG_CACHE_HOME/speculant/inflated. They are inflated,
decoded to floating-point numbers from a GGUF file, or rescaled to weights that lie on no grid.

A model whose text is known has one successor for each token. The last matrices of a layer hold tiny numbers, so a
token's embedding reaches the head nearly unchanged, and the head finds the successor. All matrices are read and
multiplied as usual. A draft model that is made for a share of the successors agrees with its target for these tokens
and for no others, so that share is the acceptance rate.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculant import __version__
from speculant.errors import ConfigError, ModelError, suggest
from speculant.files import cache_folder
from speculant.gguf_file import GgufFile
from speculant.lab.checkpoints import save_tensors, write_json, written_description
from speculant.lab.inflation.enlargement import Shape, named_shape
from speculant.lab.inflation.model import head_kind, head_shape, inflate, inflate_head, shape_of
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
    tensor_shapes,
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
        at, of = LAYER.format(index), layer.attention or decoder.attention
        for norm, readers in _READERS.items():
            gains = made[f"{at}{norm}.weight"]
            for reader in readers:
                made[f"{at}{reader}.weight"] *= gains
            made[f"{at}{norm}.weight"] = torch.ones_like(gains)
        values, inside = _factors(of.kv_heads * of.head_dim, generator), _factors(layer.mlp.size, generator)
        made[f"{at}self_attn.v_proj.weight"] *= values[:, None]
        of_queries = values.view(of.kv_heads, of.head_dim).repeat_interleave(of.groups, 0)  # they share their values
        made[f"{at}self_attn.o_proj.weight"] /= of_queries.flatten()
        made[f"{at}mlp.up_proj.weight"] *= inside[:, None]
        made[f"{at}mlp.down_proj.weight"] /= inside
    return made


def _factors(count: int, generator: torch.Generator) -> Tensor:
    return (SIGMA * torch.randn(count, generator=generator, dtype=torch.float64)).exp()


VOCABULARY = 32000
_TINY = 1e-9
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": VOCABULARY,
    "max_position_embeddings": 16384, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0, "head_dim": 64,
}  # fmt: skip
LLAMA_1B = {
    **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
LLAMA_50M = {
    **_LLAMA, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
_WRITERS = re.compile(r".*\.(o_proj|down_proj)\.weight")  # the last matrices of a layer's parts

Config = Mapping[str, Any]


def write_pair(
    folder: Path, agreement: float, shapes: tuple[Config, Config] = (LLAMA_1B, LLAMA_50M), first: int = 0
) -> tuple[Path, Path]:
    """Write a target, and a draft model for it, from their config.json files; return their folders.

    agreement: the share of the tokens for which the draft model has the target's successor, on average. It is exact,
    up to rounding, for the `first` tokens of the text that begins with token 0. By default, the target has 1.04 billion
    parameters and the draft model a twentieth.
    """
    size, generator = shapes[0]["vocab_size"], torch.Generator().manual_seed(0)
    following = torch.randperm(size, generator=generator)
    is_wrong = torch.rand(size, generator=generator) >= agreement
    text = [0]
    while len(text) < first:
        text.append(int(following[text[-1]]))
    order = torch.randperm(first, generator=generator)
    is_wrong[text[:first]] = order >= round(agreement * first)
    wrong, guessed = is_wrong.nonzero().flatten(), following.clone()
    guessed[wrong] = following[wrong.roll(1)]
    return (
        _write_checkpoint(folder / "target", shapes[0], following),
        _write_checkpoint(folder / "draft", shapes[1], guessed),
    )


def _write_checkpoint(folder: Path, config: Config, following: Tensor) -> Path:
    """Write a model in which following[t], a permutation, comes after token t."""
    folder.mkdir(parents=True)
    source = resolve_source("demo", "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    described = written_description(config)
    save_tensors(_tensors(described, following), described.tensors, folder / "model.safetensors")
    return folder


def _tensors(described: DecoderConfig, following: Tensor) -> dict[str, Tensor]:
    """Make the weights."""
    generator = torch.Generator().manual_seed(1)

    def random(shape: tuple[int, ...], scale: float) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).bfloat16()

    made = {
        name: torch.ones(shape).bfloat16() if "norm" in name else random(shape, _TINY if _WRITERS.match(name) else 0.02)
        for name, shape in tensor_shapes(described).items()
        if name not in (TABLE, HEAD)
    }
    made[TABLE] = random((described.vocab_size, described.hidden_size), 1.0)
    made[HEAD] = torch.empty_like(made[TABLE])
    made[HEAD][following] = 0.05 * made[TABLE]
    return made
