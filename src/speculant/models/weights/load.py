"""Loads a model from a folder in Hugging Face's format or a GGUF file. Headers are checked before tensors are read."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from speculant import plugins
from speculant.config import read_cache_dtype
from speculant.errors import ConfigError, suggest
from speculant.files import Stamp, read_json
from speculant.gguf_file import GgufFile, model_name
from speculant.models.backends.base import (
    AUTO,
    Backend,
    Computes,
    Packing,
    RoundsWeights,
    Store,
    StoresWeights,
    choose_backend,
    decoded_kinds,
    packing_of,
)
from speculant.models.base import CausalLM, ConvertsKeys
from speculant.models.config import text_config
from speculant.models.description import DecoderConfig
from speculant.models.gguf import gguf_weights, read_gguf_config, read_gguf_decoder
from speculant.models.sizes import TABLE, matrix_weights, tensor_shapes
from speculant.models.source import (
    NO_RULES,
    OutputRules,
    read_end_tokens,
    read_generation,
    read_output_rules,
    read_sampling,
    read_start_tokens,
    resolve_source,
)
from speculant.models.transformers import TransformersBackend, TransformersDecoder, check_options, load_by_transformers
from speculant.models.vocabulary import TargetVocabulary, with_short_head
from speculant.models.weights.formats import check_readable, quantization_of, unknown_family, with_options_beside
from speculant.models.weights.source import (
    DECODED_BITS,
    Mapped,
    StoredWeights,
    WeightSource,
    listed_kinds,
)
from speculant.models.weights.tensors import (
    SCHEMES,
    check_layers,
    check_tensors,
    open_folder,
    open_modules,
    renamed,
    scheme_of,
    with_stored_head,
    without_copies,
    without_heads,
)
from speculant.params import SamplingParams

logger = logging.getLogger(__name__)

_FAMILIES = "speculant.models"
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_STORED = {**_DTYPES, "float16": torch.float16}


@dataclass(frozen=True)
class Checkpoint:
    """A model that is ready to run, and the metadata of its folder."""

    model: CausalLM  # in eval mode, without gradients
    config: dict[str, Any]  # config.json as it is, or the metadata of a GGUF file in its keys
    folder: Path  # or a GGUF file
    dtype: torch.dtype
    eos_token_ids: frozenset[int]  # empty when the checkpoint names none
    generation: dict[str, Any]  # see `read_generation`; empty when there is none
    sampling: SamplingParams  # the settings that the checkpoint recommends
    name: str
    kernels: str  # the backend's name and facts, and why other backends were not chosen
    backend: Computes  # computes the model
    source: str = ""  # where packed weights are from, if that can differ
    mapped_bytes: int = 0  # of the model, which the system counts as free memory
    quantizations: Sequence[str] = ()  # types that its weights can be rounded to; none for a target's quantised ones
    weights: int = 0  # their number in the matrices that passes read, those of all experts included; 0 = unknown
    start_tokens: tuple[int, ...] = ()  # begin each prompt of an encoder-decoder model's decoder
    output_rules: OutputRules = NO_RULES  # of an encoder-decoder model

    @property
    def packing(self) -> Packing:
        """How the weights are stored, and why."""
        return packing_of(self.backend)


def load_model(
    source: str,
    dtype: str = "auto",
    device: str = "cpu",
    *,
    role: str = "target",
    revision: str | None = None,
    download_dir: str | None = None,
    kernels: str = "reference",
    quantization: str | None = None,
    head_tokens: tuple[int, ...] = (),
    vocabulary: TargetVocabulary | None = None,
    weight_packing: str = AUTO,
    weight_cache: Path | None = None,
    model_backend: str = AUTO,
    kv_cache_dtype: str = AUTO,
) -> Checkpoint:
    """Load a checkpoint from a folder, a GGUF file, the hub or "demo"; see `resolve_source`.

    model_backend: "transformers" lets that package compute the model; kernels then has no effect. Else kernels names a
    backend, such as reference or native; auto takes the best one that can compute the model. quantization is the type
    that weights are rounded to (int8 or int4 with the native kernels), or None. head_tokens: the tokens that have a
    logit, in ascending order; () = all. vocabulary: that of the target that the model drafts for, where it differs;
    None = the model's own. weight_packing: how weights are stored, plain or 12bit; auto = the faster way here, timed
    for a large model. weight_cache: the folder in which packed weights are kept between starts; None = none. dtype
    "auto" takes the checkpoint's type, or bfloat16 for blocks; float16 becomes float32, which holds the same numbers.
    kv_cache_dtype: the type of stored keys and values, int8, bfloat16 or float32; auto = dtype. device is "cpu" or
    "cuda", which may have an index. Code and pickles of a checkpoint are never run. Raises ModelError for a checkpoint
    that can't be used, ConfigError for a wrong option, or a backend that can't compute the model.
    """
    started = time.perf_counter()
    place = check_loading(dtype, device, quantization, weight_packing, model_backend, kv_cache_dtype)
    folder = resolve_source(source, role, revision, download_dir)
    if model_backend != AUTO:
        own, described = load_by_transformers(folder, dtype, place, head_tokens, vocabulary)
        return _checkpoint_of(own, described, folder, role, _name(source, role, folder))
    files = CheckpointFiles.open(folder)
    config, tensors, decoder = files.config, files.tensors, files.decoder
    _check_rounding(tensors, quantization, role)
    _warn_of_dynamic_rope(decoder)
    generation, ends, sampling = _read_settings(folder, config, decoder.vocab_size)
    chosen, named = files.dtype(dtype), files.weights
    backend, described = choose_backend(kernels, quantization, decoder, chosen, place, weight_packing, named)
    _warn_of_decoding(folder, backend, named)
    decoder, weights = _fitted(decoder, files.weights, head_tokens, vocabulary)
    backend, rounded = _rounding_for(role, quantization, backend)
    kept = KeptWeights.of(weight_cache, backend, tensors, _facts(files, chosen, rounded, decoder, vocabulary))
    loaded = kept.backend.load(decoder, weights, chosen, place, quantization)
    weights.check(backend.name)
    model, stored_as = _with_cache_type(loaded, chosen, kv_cache_dtype, backend)
    name, seconds, description = _name(source, role, folder), time.perf_counter() - started, described + stored_as
    logger.info("%s %s: %s, loaded in %.2f s, kernels: %s", role, name, chosen, seconds, description)
    made = kept.keep()
    logger.info("%s %s: weights are stored %s%s", role, name, packing_of(backend), made and f", {made}")
    return Checkpoint(
        model, config, folder, chosen, ends, generation, sampling, name, description, backend, made, kept.mapped_bytes,
        () if role != "draft" and tensors.quantised_kinds() else backend.quantizations, matrix_weights(files.decoder),
        *_read_decoding(files.decoder, generation, config),
    )  # fmt: skip


def check_loading(
    dtype: str,
    device: str,
    quantization: str | None,
    weight_packing: str,
    model_backend: str,
    kv_cache_dtype: str,
) -> torch.device:
    """Return the device, and check options of `load_model` before any file is looked up. Raises ConfigError."""
    place = _read_device(device)
    if dtype not in ("auto", *_DTYPES):
        raise ConfigError(f"dtype {dtype!r} is not supported", suggest(dtype, ("auto", *_DTYPES)))
    check_options(model_backend, quantization, weight_packing, read_cache_dtype(kv_cache_dtype))
    return place


def _read_settings(
    folder: Path, config: Mapping[str, Any], vocab_size: int
) -> tuple[dict[str, Any], frozenset[int], SamplingParams]:
    """Return the settings of generation in a folder, with the end tokens and the sampling that they recommend."""
    generation = read_generation(folder)
    return generation, read_end_tokens(generation, config, vocab_size), read_sampling(generation, folder)


def _read_decoding(
    decoder: DecoderConfig, generation: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[tuple[int, ...], OutputRules]:
    """Return the tokens that an encoder-decoder model's decoder begins with, and the rules of its outputs."""
    if decoder.encoder is None:
        return (), NO_RULES
    size = decoder.vocab_size
    return read_start_tokens(generation, config, size), read_output_rules(generation, config, size)


def _with_cache_type(
    model: CausalLM, dtype: torch.dtype, kv_cache_dtype: str, backend: Backend
) -> tuple[CausalLM, str]:
    """Return a model with a cache of a type, and words to add to its description: none for the model's own type."""
    stored = dtype if kv_cache_dtype == AUTO else getattr(torch, read_cache_dtype(kv_cache_dtype))
    if stored == dtype:
        return model, ""
    if not isinstance(model, ConvertsKeys):
        raise ConfigError(
            f"kv_cache_dtype={kv_cache_dtype!r} is impossible on the {backend.name} kernels",
            'leave it out, or set kernels="auto".',
        )
    return model.storing_keys_as(stored), f", keys and values in {kv_cache_dtype}"


def _facts(
    files: CheckpointFiles,
    dtype: torch.dtype,
    quantization: str | None,
    decoder: DecoderConfig,
    vocabulary: TargetVocabulary | None,
) -> list[str]:
    """Return what packed weights depend on besides the bytes of the files; options say what those bytes stand for."""
    options = json.dumps(quantization_of(files.config), sort_keys=True)
    return [str(dtype), str(quantization), str(decoder), options, *([str(vocabulary)] if vocabulary else [])]


def _checkpoint_of(model: TransformersDecoder, described: str, folder: Path, role: str, name: str) -> Checkpoint:
    """Return the checkpoint of a model that transformers computes, and say that it is slower."""
    config = read_json(folder / "config.json")
    whole = {**config, **_text_config(config)}
    generation, ends, sampling = _read_settings(folder, whole, model.vocab_size)
    logger.warning(
        "%s %s is computed by %s, as model_backend asks: slower than Speculant's own kernels, and a row's last bits"
        " depend on the batch, so speculation can change which of two nearly equal tokens is chosen",
        role, name, described,
    )  # fmt: skip
    return Checkpoint(
        model, config, folder, model.network.dtype, ends, generation, sampling, name, described, TransformersBackend()
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the end tokens that a model of several kinds of input has in the part for text."""
    nested = config.get("text_config")
    ends = nested.get("eos_token_id") if isinstance(nested, dict) else None
    return {} if ends is None or config.get("eos_token_id") is not None else {"eos_token_id": ends}


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint, whose headers have been compared with the model that they describe.

    config: the content of config.json, or the metadata of a GGUF file in its keys.
    """

    config: dict[str, Any]
    tensors: StoredWeights
    decoder: DecoderConfig

    @classmethod
    def open(cls, place: Path) -> CheckpointFiles:
        """Open a folder or a GGUF file. Raises ModelError."""
        config, tensors, described = _read_folder(place) if place.is_dir() else _read_gguf(place)
        files = cls(config, tensors, with_stored_head(described, tensors))
        check_tensors(files.tensors, files.decoder)
        return files

    @property
    def weights(self) -> Mapped:
        """The tensors by the model's names."""
        return Mapped(self.tensors, tensor_shapes(self.decoder), self.decoder.tensors)

    def dtype(self, wanted: str) -> torch.dtype:
        """Return the model's type; "auto" = that of the files, but for float16 float32, or bfloat16 with blocks."""
        if wanted != "auto":
            return _DTYPES[wanted]
        named = str(self.config.get("dtype") or self.config.get("torch_dtype") or "").removeprefix("torch.")
        stored = _STORED.get(named, self.tensors.common_dtype())
        if stored != torch.float16:
            return stored
        return torch.bfloat16 if self.tensors.quantised_kinds() else torch.float32


def read_description(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the description in a config.json, as its family reads it. Raises ModelError."""
    _check_family(config)
    decoder: DecoderConfig = plugins.load(_FAMILIES, config["model_type"]).read_config(config)
    return decoder


def _read_folder(folder: Path) -> tuple[dict[str, Any], StoredWeights, DecoderConfig]:
    """Read config.json and the headers of the weights in a folder."""
    config = with_options_beside(text_config(read_json(folder / "config.json")), folder)
    _check_family(config)  # before the files are opened
    scheme, decoder = scheme_of(config), read_description(config)
    tensors = renamed(open_folder(folder), decoder.tensors.stored(TABLE))
    tensors = without_copies(tensors, decoder.tensors.copies)
    layers = max(decoder.num_layers, len(decoder.encoder.layers) if decoder.encoder else 0)
    tensors = without_heads(tensors, config, layers)
    check_layers(tensors, layers)
    if scheme is not None:
        tensors, decoder = open_modules(tensors, scheme, decoder)
    return config, tensors, replace(decoder, tensors=decoder.tensors.unstacked(tensors.names()))


def _read_gguf(path: Path) -> tuple[dict[str, Any], StoredWeights, DecoderConfig]:
    """Read the header of a GGUF file."""
    file = GgufFile.open(path)
    config = read_gguf_config(file)
    decoder = read_gguf_decoder(file, config)
    return config, without_heads(gguf_weights(file), config, decoder.num_layers), decoder


def _rounding_for(role: str, quantization: str | None, backend: Backend) -> tuple[Backend, str | None]:
    """Return the backend that rounds the weights of a model with this role, and a name of the rounded type."""
    if role != "draft" or quantization is None or not isinstance(backend, RoundsWeights):
        return backend, quantization
    return backend.for_drafts(), f"{quantization} of a draft"


def _check_rounding(tensors: StoredWeights, quantization: str | None, role: str) -> None:
    """Raise ConfigError if a target's weights are quantised and are to be rounded again; a draft loses no text."""
    if quantization is not None and role != "draft" and tensors.quantised_kinds():
        raise ConfigError(
            f"quantization={quantization!r} can't be used for {tensors.place}, whose weights are quantised already"
            f" ({', '.join(tensors.quantised_kinds())})",
            "leave quantization out, or name a checkpoint with floating-point weights.",
        )


def _fitted(
    decoder: DecoderConfig, weights: Mapped, head_tokens: tuple[int, ...], vocabulary: TargetVocabulary | None
) -> tuple[DecoderConfig, Mapped]:
    """Return a model and its weights with logits for some tokens alone, by the target's ids; see `load_model`."""
    if vocabulary is None:
        return with_short_head(decoder, weights, head_tokens)
    return vocabulary.fit(decoder, weights, head_tokens)


@dataclass(frozen=True)
class KeptWeights:
    """The backend that loads a model, and the files that its packed weights are made from."""

    backend: Backend
    tensors: StoredWeights
    stamps: Sequence[Stamp] = ()
    started: float = 0.0

    @classmethod
    def of(cls, folder: Path | None, backend: Backend, tensors: StoredWeights, facts: Sequence[str]) -> KeptWeights:
        """Prepare the loading of a model. folder: None = its weights are not kept."""
        if folder is None or not isinstance(backend, StoresWeights):
            return cls(backend, tensors)
        started, stamps = time.time(), tensors.stamps()
        facts = [packing_of(backend).name, *facts, *map(str, stamps)]
        return cls(backend.with_store(folder, facts), tensors, stamps, started)

    @property
    def _store(self) -> Store | None:
        return self.backend.store if self.stamps and isinstance(self.backend, StoresWeights) else None

    @property
    def mapped_bytes(self) -> int:
        """How much of the model lies in mapped memory."""
        return self._store.mapped_bytes if self._store else 0

    def keep(self) -> str:
        """Keep the packed weights unless the files may have changed meanwhile. Returns the origin of the weights."""
        settled = all(stamp.is_before(self.started) for stamp in self.stamps)
        if self._store is None:
            return ""
        return self._store.keep() if settled and self.tensors.stamps() == self.stamps else "packed"


def _read_device(device: str) -> torch.device:
    """Return the device that a name stands for. Raises ConfigError if models can't run on it, or it does not exist."""
    hit = re.fullmatch(r"(cpu|cuda)(?::([0-9]{1,3}))?", str(device))
    if not hit:
        raise ConfigError(f"device {device!r} is unknown", "use 'cpu', 'cuda', or 'cuda:1' for the second CUDA device.")
    there = torch.cuda.device_count() if hit[1] == "cuda" else 1
    if int(hit[2] or 0) >= there:
        raise ConfigError(
            f"device {device!r} was asked for but torch sees {there} devices of this kind",
            "use device='cpu'" + (f", or an index below {there}." if there else "."),
        )
    return torch.device(device)


def _check_family(config: Mapping[str, Any]) -> None:
    if config.get("model_type") not in (known := plugins.names(_FAMILIES)):
        raise unknown_family(config, known)
    check_readable(config, plugins.names(SCHEMES))


def _warn_of_dynamic_rope(config: DecoderConfig) -> None:
    """Warn that dynamic rope scaling has no effect: `config.resolve` refuses a context in which it would have one."""
    if any(rope.kind == "dynamic" for rope in config.ropes):
        logger.warning(
            "config.json asks for dynamic rope scaling, which has no effect here. It begins beyond %d positions, and a"
            " longer context is refused: the angles would depend on the length of the whole sequence, and keys in the"
            " cache would keep those of a shorter one.",
            config.max_positions,
        )


def _warn_of_decoding(place: Path, backend: Backend, weights: WeightSource) -> None:
    """Warn of blocks that the kernels can't multiply by; the source has warned of matrices that it decodes itself."""
    kinds = decoded_kinds(backend, weights).items()
    decoded = {kind: count for kind, count in kinds if kind.upper() not in DECODED_BITS}
    if decoded:
        logger.warning(
            "%s: the %s kernels decode some blocks, because they can't multiply by them: %s. Decoded weights take more"
            " memory and time; `speculant doctor` with this model shows how much.",
            place.name, backend.name, listed_kinds(decoded),
        )  # fmt: skip


def _name(source: str, role: str, folder: Path) -> str:
    if source == "demo":
        return f"demo/{role}"
    place = Path(source).expanduser()
    if not place.exists():
        return source
    return model_name(folder) if folder.is_file() else folder.resolve().name
