"""Writes a quantised model as a GGUF file, as llama.cpp's conversion does. One tensor at a time is in memory.

Names and orders are those that the readers have (`gguf_tensors`), inverted. The blocks are those that the engine makes
when it rounds the weights itself, except that all matrices of a fused tensor, such as attn_qkv, have one type.

Values of metadata are those of the description, so that a config.json may leave settings to its family. What has no key
is left out; `speculant.lab.quantize.check` refuses such a model.
Byte-level tokenizers can be written, and Unigram ones that divide texts as T5's does. The whole tokenizer.json is
stored too, and takes precedence in readers that know it.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray
from torch import Tensor

from speculant.errors import ModelError
from speculant.files import read_json, read_optional_json
from speculant.gguf_file import GgufFile
from speculant.lab.checkpoints import stored_tensors
from speculant.models import (
    ARCHITECTURE,
    END_KEYS,
    ENDS,
    FULL,
    ROPE_FREQS,
    ROPE_LONG,
    ROPE_SHORT,
    CheckpointFiles,
    DecoderConfig,
    GgufFamily,
    Mapped,
    Mlp,
    Rope,
    RoundsWeights,
    StoredWeights,
    TensorMap,
    WeightSource,
    experts_of,
    gguf_families,
    gguf_head,
    gguf_tensors,
    open_folder,
    read_generation,
    read_plain,
    read_sampling,
    read_start_tokens,
    sampling_entries,
    stored_shape,
    tensor_shapes,
    text_config,
)
from speculant.text import (
    BYTES,
    ROLE_KEYS,
    SENTENCEPIECE_ROLES,
    SPLITS,
    TOOL_USE,
    TokenType,
    find_sentencepiece,
    find_template,
)

Config = Mapping[str, Any]
Entries = dict[str, Any]
_ORIGINAL = "original_max_position_embeddings"
_ROLES = {  # names in the model by names in the file; attn_qkv has a type between those of queries and values
    "token_embd": "embed_tokens",
    "output": "lm_head",
    "attn_v": "v_proj",
    "attn_qkv": "o_proj",
    "attn_output": "o_proj",
    "attn_o": "o_proj",
    "cross_attn_v": "v_proj",
    "cross_attn_o": "o_proj",
    "ffn_down": "down_proj",
    "ffn_down_exps": "down_proj",
}
_PLAIN = (
    *("ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd", "per_layer_token_embd", "attn_rel_b"),
    *("ssm_conv1d", "ssm_alpha", "ssm_beta", "ssm_ba", "ssm_norm", "conv"),
)  # matrices that are not rounded
_OWN = (
    "GGUF.",
    ARCHITECTURE,
    "general.file_type",
    "general.quantization_version",
    "general.alignment",
    "split.",
)  # prefixes of entries that are written anew
_DESCRIBES = "rope_"  # begins the names of tensors that are part of the description, and are written first
_FILE_TYPES = {"int4": 15, "int8": 7, "q8_0": 7, "q4_0": 2}  # llama.cpp's numbers for the type of most tensors


_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "phi3": {"original_max_position_embeddings": 4096},
    **{family: {"mrope_section": [11, 11, 10]} for family in ("qwen3_5_text", "qwen3_5_moe_text")},
}
"""Entries that a config.json may leave to its family, and that its description does not show."""


class Entry(NamedTuple):
    """A value of the metadata, its type, and that of its elements if it is an array; None = by the values."""

    value: Any
    type: GGUFValueType
    element: GGUFValueType | None = None


class StoredTensor(NamedTuple):
    """A tensor that is read when it is written."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class GgufModel:
    """The content of a GGUF file."""

    entries: Mapping[str, Entry]
    tensors: Mapping[str, StoredTensor]


def read_folder(folder: Path) -> GgufModel:
    """Return the content of a GGUF file with a folder's model. Raises ModelError for a model that can't be written."""
    name, known = str(text_config(read_json(folder / "config.json")).get("model_type")), gguf_families()
    if name not in known:
        raise ModelError(
            f"models of the type {name!r} are not written as GGUF files",
            f"name a folder as OUT, or use one of: {', '.join(sorted(known))}.",
        )
    files = CheckpointFiles.open(folder)
    config, decoder = files.config, files.decoder
    if files.tensors.quantised_kinds():
        raise ModelError(f"{folder} has weights that are quantised", "use the checkpoint it was made from.")
    family = known[name].of(decoder)
    own = _stored(files.weights, tensor_shapes(decoder), gguf_tensors(decoder, family), decoder.tensors.stored)
    heads, of_heads = _heads(folder, decoder, family)
    tensors = own | of_heads
    if decoder.encoder is not None and decoder.head.scale == 1:  # readers scale the logits of a file without a head
        tensors.setdefault("output.weight", tensors["token_embd.weight"])
    rope = {
        name: StoredTensor(values.shape, partial(torch.from_numpy, values))
        for name, values in rope_tensors(config, decoder).items()
    }
    described = model_entries(folder, config, decoder, heads)
    entries = {**described, **sampled_entries(folder), **text_entries(folder, decoder)}
    return GgufModel({key: _typed(value) for key, value in entries.items()}, tensors | rope)


def _stored(
    weights: WeightSource, shapes: Mapping[str, tuple[int, ...]], names: TensorMap, order: Callable[[str], str] = str
) -> dict[str, StoredTensor]:
    """Return the tensors of a file with these weights. order: their names, by which they are sorted."""
    found = dict[str, list[str]]()
    for own in sorted(shapes, key=lambda own: _numbered(order(own))):
        found.setdefault(names.stored(own), []).append(own)

    def read(stored: str) -> Tensor:
        return stored_tensors({own: _exact(read_plain(weights, own)) for own in found[stored]}, names)[stored]

    return {
        stored: StoredTensor(stored_shape(names.expression(own[0]), shapes[own[0]]), partial(read, stored))
        for stored, own in found.items()
    }


def _heads(folder: Path, decoder: DecoderConfig, family: GgufFamily) -> tuple[int, dict[str, StoredTensor]]:
    """Return how many heads for multi-token prediction a folder has beside its model, and their tensors in a file."""
    if not family.head:
        return 0, {}
    files = open_folder(folder)
    stored = {name.removeprefix("model."): name for name in files.names()}
    count = len({name.split(".")[2] for name in stored if name.startswith("mtp.layers.")})
    made = gguf_head(decoder, family, count)
    names = TensorMap(tuple((own, stored[own]) for own, _ in made.names if own in stored))
    shapes = {own: files.shape(stored[own]) for own, _ in names.names}
    return count, _stored(Mapped(files, shapes, names), shapes, made) if count else {}


def _exact(tensor: Tensor) -> Tensor:
    """Return numbers that may change, all but those of matrices, in the type that files store them in."""
    return tensor if tensor.ndim == 2 else tensor.float()


def _numbered(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names by the values of their numbers."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]


def text_entries(folder: Path, decoder: DecoderConfig) -> dict[str, Any]:
    """Return the metadata of a folder's tokenizer and end tokens. Raises ModelError if it can't be written."""
    found = tokenizer_entries(folder, decoder.vocab_size)
    return {**found, **end_entries(folder, found)}


def read_file(path: Path) -> GgufModel:
    """Return the content of a GGUF file. Raises ModelError if its weights are quantised."""
    file = GgufFile.open(path)
    weights = StoredWeights(file.tensors, path, file.parts)
    if kinds := weights.quantised_kinds():
        raise ModelError(
            f"{path} has quantised weights ({', '.join(kinds)}), and rounding them again loses more",
            "use a file or a folder with floating-point weights.",
        )
    tensors = {name: StoredTensor(weights.shape(name), partial(read_plain, weights, name)) for name in file.tensors}
    fields = {name: each for name, each in GGUFReader(path).fields.items() if not name.startswith(_OWN)}
    entries = {name: Entry(each.contents(), each.types[0], each.types[-1]) for name, each in fields.items()}
    return GgufModel({ARCHITECTURE: _typed(file.metadata[ARCHITECTURE]), **entries}, tensors)


def write_gguf(
    model: GgufModel,
    type_: str,
    backend: RoundsWeights,
    out: Path,
    begin: Callable[[str], None],
    check: Callable[[Path], None],
) -> None:
    """Write a file with rounded weights. type_: see `RoundsWeights`. begin: called with the name of each tensor.

    check: called with the file when all but its weights is there, so that an error costs no time.
    """
    writer = GGUFWriter(out, model.entries[ARCHITECTURE].value)
    for key, entry in model.entries.items():
        if key != ARCHITECTURE:
            writer.add_key_value(key, entry.value, entry.type, entry.element)
    writer.add_file_type(_FILE_TYPES[type_])
    writer.add_quantization_version(2)
    names = sorted(model.tensors, key=lambda name: not name.startswith(_DESCRIBES))
    kinds = {name: _kind(name, model.tensors, type_, backend) for name in names}
    size = 0
    for name in names:
        weights, of_block = GGML_QUANT_SIZES[kinds[name]]
        *rows, width = model.tensors[name].shape
        shape = (*rows, width // weights * of_block)
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), kinds[name])
        size += GGUFWriter.ggml_pad(math.prod(shape), writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    os.truncate(out, GGUFWriter.ggml_pad(out.stat().st_size, writer.data_alignment) + size)
    first = next(name for name in names if not name.startswith(_DESCRIBES))
    for name in names:
        if name == first:
            writer.flush()
            check(out)
        begin(name)
        writer.write_tensor_data(_bytes(model.tensors[name].read(), kinds[name], backend, name))
    writer.close()


def _kind(name: str, tensors: Mapping[str, StoredTensor], type_: str, backend: RoundsWeights) -> GGMLQuantizationType:
    """Return the kind of a tensor: that of its role, or float32 for vectors and matrices that are not rounded."""
    part, shape = name.split(".")[-2], tensors[name].shape
    if len(shape) < 2 or part in _PLAIN or not name.endswith(".weight"):
        return GGMLQuantizationType.F32
    of_state = part == "attn_qkv" and name.replace(part, "ssm_out") in tensors  # the first projection of a state
    role = part if of_state else _ROLES.get(part, part)
    kind = GGMLQuantizationType[backend.rounded_kind(type_, role, shape[-1])]
    return kind if shape[-1] % GGML_QUANT_SIZES[kind][0] == 0 else GGMLQuantizationType.F32


def _bytes(tensor: Tensor, kind: GGMLQuantizationType, backend: RoundsWeights, name: str) -> NDArray[np.uint8]:
    if kind == GGMLQuantizationType.F32:
        return tensor.float().contiguous().numpy().view(np.uint8)
    if not bool(tensor.isfinite().all()):
        raise ModelError(f"{name} has weights that are NaN or infinite", "download the checkpoint again.")
    return backend.round(kind.name, tensor.reshape(-1, tensor.shape[-1])).blocks.numpy()


def _typed(value: Any) -> Entry:
    """Return an entry with the type that readers expect. Bytes are an array."""
    if isinstance(value, bytes):
        return Entry(value, GGUFValueType.ARRAY, GGUFValueType.UINT8)
    if isinstance(value, int) and not isinstance(value, bool):
        return Entry(value, GGUFValueType.UINT32)
    return Entry(value, GGUFValueType.get_type(value))


def model_entries(folder: Path, config: Config, decoder: DecoderConfig, heads: int = 0) -> Entries:
    """Return the metadata of a folder's model, except for its tokenizer and its sampling. heads: behind its layers."""
    name, known = config["model_type"], gguf_families()
    architecture = known[name].of(decoder).architecture
    made = _encoder_decoder_entries if decoder.encoder else _decoder_entries
    own = made({**_DEFAULTS.get(name, {}), **config}, decoder)
    for family in known.values():
        if family.architecture == architecture:
            own |= family.written(decoder, heads)
    own |= _start_entries(folder, config, decoder)
    return {ARCHITECTURE: architecture, **{f"{architecture}.{key}": value for key, value in own.items()}}


def _decoder_entries(config: Config, decoder: DecoderConfig) -> Entries:
    """Return the metadata that most families have."""
    of = decoder.attention
    extends = decoder.ropes and _stated_kind(config, decoder) == "linear"  # readers of the file multiply the context
    stated = config.get("max_position_embeddings") if extends else None
    return {
        "vocab_size": decoder.vocab_size,
        "block_count": decoder.num_layers,
        "context_length": stated or decoder.max_positions,
        "embedding_length": decoder.hidden_size,
        "feed_forward_length": decoder.layers[0].mlp.size,
        "attention.head_count": of.heads,
        "attention.head_count_kv": _key_heads(config, decoder),
        "attention.key_length": of.head_dim,
        "attention.value_length": of.head_dim,
        f"attention.layer_norm_{'rms_' if decoder.norm.kind == 'rms' else ''}epsilon": decoder.norm.eps,
        **_positions(config, decoder),
        **_windows(decoder),
        **_experts(config, decoder),
    }


def _key_heads(config: Config, decoder: DecoderConfig) -> int | list[int]:
    """Return the number of key heads, or that of each layer where the family says it so."""
    if gguf_families()[config["model_type"]].keyless is None or not decoder.states:
        return decoder.attention.kv_heads
    return [layer.attention.kv_heads if layer.attention else 0 for layer in decoder.layers]


def _encoder_decoder_entries(config: Config, decoder: DecoderConfig) -> Entries:
    """Return the metadata of T5."""
    assert decoder.encoder is not None
    of, distances = decoder.attention, decoder.attention.distances
    assert distances is not None
    eps = decoder.norm.eps
    return {
        "context_length": config.get("n_positions") or 512,
        "embedding_length": decoder.hidden_size,
        "feed_forward_length": decoder.layers[0].mlp.size,
        "block_count": len(decoder.encoder.layers),
        "decoder_block_count": decoder.num_layers,
        "attention.head_count": of.heads,
        "attention.key_length": of.head_dim,
        "attention.value_length": of.head_dim,
        "attention.layer_norm_epsilon": eps,
        "attention.layer_norm_rms_epsilon": eps,
        "attention.relative_buckets_count": distances.buckets,
    }


def _start_entries(folder: Path, config: Config, decoder: DecoderConfig) -> Entries:
    """Return the metadata for the token that a decoder's prompt begins with."""
    if decoder.encoder is None:
        return {}
    tokens = read_start_tokens(read_generation(folder), config, decoder.vocab_size)
    return {"decoder_start_token_id": tokens[0]} if tokens else {}


def sampled_entries(folder: Path) -> Entries:
    """Return the sampling settings that a folder recommends. Raises ModelError for one that is out of range."""
    generation = read_generation(folder)
    read_sampling(generation, folder)  # checks them
    return sampling_entries(generation)


def _windows(decoder: DecoderConfig) -> Entries:
    """Return the sliding window, and which layers have it: all but each n-th, or a list."""
    size = next((window for window in decoder.windows if window), None)
    if size is None:
        return {}
    slides = [window is not None for window in decoder.windows]
    periods = {n: [n == 0 or (index + 1) % n != 0 for index in range(len(slides))] for n in range(len(slides) + 1)}
    pattern = next((n for n, layers in periods.items() if layers == slides), slides)
    return {"attention.sliding_window": size, "attention.sliding_window_pattern": pattern}


def _experts(config: Config, decoder: DecoderConfig) -> Entries:
    experts = experts_of(decoder)
    if experts is None:
        return {}
    found: Entries = {"expert_count": experts.count, "expert_used_count": experts.used}
    if "moe_intermediate_size" in gguf_families()[config["model_type"]].config:
        stated = config.get("intermediate_size") or experts.size
        dense = next((layer.mlp.size for layer in decoder.layers if isinstance(layer.mlp, Mlp)), stated)
        found |= {"expert_feed_forward_length": experts.size, "feed_forward_length": dense}
    return found


def _positions(config: Config, decoder: DecoderConfig) -> Entries:
    """Return the rotary positions: those of layers without a window, and the base of the others."""
    rope, rotated = _rope(decoder)
    if rope is None:
        return {}
    found: Entries = {"rope.freq_base": rope.theta, "rope.dimension_count": rotated}
    sliding = next((of.rope for of in decoder.attentions if of.window), None)
    if sliding:
        found["rope.freq_base_swa"] = sliding.theta
    if rope.original_max_positions:
        found["rope.scaling.original_context_length"] = rope.original_max_positions
    if sections := _settings(config).get("mrope_section", config.get("mrope_section")):
        found["rope.dimension_sections"] = [*sections, 0, 0, 0, 0][:4]
    return found | _scaling(config, decoder, rope)


def _rope(decoder: DecoderConfig) -> tuple[Rope | None, int]:
    """Return the rotary positions of layers without a window, or of others, and how many dimensions are rotated."""
    found = [of for of in decoder.attentions if of.rope]
    of = min(found, key=lambda each: each.window is not None, default=decoder.attention)
    return of.rope, of.rotated


def _settings(config: Config) -> Config:
    """Return the rotary settings of layers without a window."""
    scaling, rope = (config.get(key) or {} for key in ("rope_scaling", "rope_parameters"))
    nested = rope.get(FULL)
    return {**nested, **scaling} if nested is not None else scaling or rope


def _scaling(config: Config, decoder: DecoderConfig, rope: Rope) -> Entries:
    """Return the entries for the scaling of rotary positions; the rest of it is in tensors."""
    settings = _settings(config)
    if rope.long_factors:
        return {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": rope.scale}
    match _stated_kind(config, decoder):
        case "linear":
            return {"rope.scaling.type": "linear", "rope.scaling.factor": float(settings["factor"])}
        case "yarn":
            return _yarn(config, decoder, rope)
    return {} if rope.scale == 1 else {"rope.scaling.attn_factor": rope.scale}


def _stated_kind(config: Config, decoder: DecoderConfig) -> str | None:
    """Return the kind of scaling if entries describe all of it: linear, or YaRN with whole pairs as its bounds."""
    settings = _settings(config)
    kind = settings.get("rope_type") or settings.get("type")
    beside = config.get("rope_parameters") or {}
    is_truncated = False not in (settings.get("truncate"), beside.get("truncate"))
    is_stated = settings.get("factor") is not None and _original(config, decoder) is not None and is_truncated
    return kind if kind == "linear" or (kind == "yarn" and is_stated) else None


def _original(config: Config, decoder: DecoderConfig) -> int | None:
    """Return the context length before scaling. An entry outside the settings goes first, unless layers differ."""
    stated: int | None = _settings(config).get(_ORIGINAL)
    differ = FULL in (config.get("rope_parameters") or {}) or len(decoder.ropes) > 1
    return stated if differ else config.get(_ORIGINAL) or stated


def _yarn(config: Config, decoder: DecoderConfig, rope: Rope) -> Entries:
    """Return the entries of YaRN. Its factor of cosines and sines has two entries, of which one is needed."""
    settings = _settings(config)
    factor = float(settings["factor"])
    found = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": _original(config, decoder),
    }
    for key in ("beta_fast", "beta_slow"):
        if settings.get(key):
            found[f"rope.scaling.yarn_{key}"] = float(settings[key])
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    if math.isclose(rope.scale, usual):
        return found
    if rope.scale >= usual or settings.get("attention_factor") not in (None, 1):
        return {**found, "rope.scaling.yarn_attn_factor": rope.scale}
    return {**found, "rope.scaling.yarn_log_multiplier": (usual / rope.scale - 1) / (usual - 1)}


def rope_tensors(config: Config, decoder: DecoderConfig) -> dict[str, np.ndarray]:
    """Return the tensors of factors that some scalings of rotary positions have."""
    config = {**_DEFAULTS.get(config["model_type"], {}), **config}
    rope, _ = _rope(decoder)
    if rope is None or not rope.factors or not all(map(math.isfinite, rope.factors)):
        return {}
    if rope.long_factors:
        names = {ROPE_LONG: rope.long_factors, ROPE_SHORT: rope.factors}
    else:
        names = {} if _stated_kind(config, decoder) else {ROPE_FREQS: rope.factors}
    return {name: np.array(factors, np.float32) for name, factors in names.items()}


_FOLDER = "name a folder as OUT instead of a .gguf file."
_EOS, *_OTHER_ENDS = (f"tokenizer.ggml.{key}" for key in END_KEYS)
# Steps of a BPE that llama.cpp's conversion leaves out, such as Qwen's. Readers of tokenizer.json apply them.
_UNSTATED = ("NFC",)
_UNUSED_SCORE = -10000.0
_WORDS = SPLITS["gpt-2"].patterns  # of a ByteLevel step that splits by itself


def tokenizer_entries(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return the metadata of a folder's tokenizer. Raises ModelError for a kind that can't be written."""
    settings = {
        **read_optional_json(folder / "special_tokens_map.json"),
        **read_optional_json(folder / "tokenizer_config.json"),
    }
    if (folder / "tokenizer.json").is_file():
        content = read_json(folder / "tokenizer.json")
    else:
        found = find_sentencepiece(folder, settings)
        if found is None:
            raise ModelError(f"{folder} has no tokenizer.json, which a GGUF file needs", _FOLDER)
        content, settings = json.loads(found.to_str()), {**SENTENCEPIECE_ROLES, **settings}
    model = content.get("model") or {}
    if model.get("type") == "Unigram":
        return _unigram_entries(folder, content, settings, vocab_size)
    step = content.get("normalizer") or {}
    others = model.get("byte_fallback") or step.get("type") not in (None, *_UNSTATED) or not model.get("merges")
    if model.get("type", "BPE") != "BPE" or others:
        raise ModelError(
            "this tokenizer is not a byte-level BPE, nor T5's Unigram; only those are written to GGUF files", _FOLDER
        )
    texts, types = _tokens(content, vocab_size)
    ids = {text: index for index, text in enumerate(texts)}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _split_name(content.get("pre_tokenizer") or {}, bool(model.get("ignore_merges"))),
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [each if isinstance(each, str) else " ".join(each) for each in model["merges"]],
        **_roles(folder, settings, ids),
        "tokenizer.ggml.add_bos_token": _adds_first(content, settings),
        **_templates(folder, settings),
        "tokenizer.huggingface.json": json.dumps(content, ensure_ascii=False),
    }


def _unigram_entries(
    folder: Path, content: Mapping[str, Any], settings: Mapping[str, Any], vocab_size: int
) -> dict[str, Any]:
    """Return the metadata of a Unigram tokenizer. Raises ModelError unless it divides texts as T5's does."""
    model, step = content["model"], content.get("normalizer") or {}
    words = content.get("pre_tokenizer") or {}
    kinds = [each.get("type") for each in words.get("pretokenizers", [words])]
    if step.get("type") not in (None, "Precompiled") or kinds != ["WhitespaceSplit", "Metaspace"]:
        raise ModelError("this Unigram tokenizer divides texts in another way than T5's", _FOLDER)
    scores: dict[str, float] = dict(model["vocab"])
    texts, types = _tokens({**content, "model": {"vocab": {text: i for i, text in enumerate(scores)}}}, vocab_size)
    types[model["unk_id"]] = int(TokenType.UNKNOWN)
    if model.get("byte_fallback"):
        types = [int(TokenType.BYTE) if text in BYTES else kind for text, kind in zip(texts, types, strict=True)]
    charsmap = base64.b64decode(step.get("precompiled_charsmap") or "")
    template = (content.get("post_processor") or {}).get("single") or [{}]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [float(scores.get(text, _UNUSED_SCORE)) for text in texts],
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        **({"tokenizer.ggml.precompiled_charsmap": charsmap} if charsmap else {}),
        **_roles(folder, settings, {text: index for index, text in enumerate(texts)}),
        "tokenizer.ggml.add_bos_token": "SpecialToken" in template[0],
        "tokenizer.ggml.add_eos_token": "SpecialToken" in template[-1],
        "tokenizer.huggingface.json": json.dumps(content, ensure_ascii=False),
    }


def _tokens(content: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the texts and types of all tokens; ids that the tokenizer does not use get a text of their own."""
    found = {index: (text, TokenType.NORMAL) for text, index in content["model"]["vocab"].items()}
    for each in content.get("added_tokens") or ():
        found[each["id"]] = each["content"], TokenType.CONTROL if each["special"] else TokenType.USER_DEFINED
    if max(found) >= vocab_size:
        raise ModelError(f"the tokenizer has the token {max(found)} and the model {vocab_size} tokens", _FOLDER)
    ordered = [found.get(index, (f"[PAD{index}]", TokenType.UNUSED)) for index in range(vocab_size)]
    return [text for text, _ in ordered], [int(type_) for _, type_ in ordered]


def _split_name(step: Mapping[str, Any], ignores_merges: bool) -> str:
    """Return the name in `tokenizer.ggml.pre` of the way that words are split."""
    patterns = tuple(_patterns(step))
    for name, split in SPLITS.items():
        if split.patterns == patterns and split.ignore_merges == ignores_merges:
            return name
    raise ModelError("this tokenizer splits texts in a way that has no name in GGUF files", _FOLDER)


def _patterns(step: Mapping[str, Any]) -> Sequence[str]:
    match step.get("type"):
        case "Sequence":
            return [pattern for each in step["pretokenizers"] for pattern in _patterns(each)]
        case "ByteLevel" if not step.get("add_prefix_space"):
            return _WORDS if step.get("use_regex", True) else ()
        case "Split" if step.get("behavior") == "Isolated" and "Regex" in step["pattern"]:
            return [step["pattern"]["Regex"]]
        case "Digits" if step.get("individual_digits"):
            return [r"\p{N}"]
    raise ModelError(f"this tokenizer has the step {step.get('type')!r}, which has no name in GGUF files", _FOLDER)


def end_entries(folder: Path, roles: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata for a model's end tokens. roles: that of its tokenizer.

    Ollama and Speculant read all of them in one entry, llama.cpp up to two beside the tokenizer's own.
    """
    ids = _stated(folder, "eos_token_id")
    first = roles.get(_EOS, *ids[:1])
    others = [each for each in ids if each != first]
    return {_EOS: first, ENDS: ids, **dict(zip(_OTHER_ENDS, others, strict=False))} if ids else {}


def _stated(folder: Path, key: str) -> list[Any]:
    """Return the token ids of an entry of generation_config.json, or else of config.json."""
    files = read_generation(folder), text_config(read_json(folder / "config.json"))
    found: Any = next((each[key] for each in files if each.get(key) is not None), [])
    return found if isinstance(found, list) else [found]


def _roles(folder: Path, settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of tokens with a role, as the tokenizer's settings or the model's name them."""
    found = dict[str, int]()
    for role, key in ROLE_KEYS.items():
        named = settings.get(role)
        text = named.get("content") if isinstance(named, dict) else named
        index = ids.get(text) if isinstance(text, str) else next(iter(_stated(folder, f"{role}_id")), None)
        if isinstance(index, int):
            found[f"tokenizer.ggml.{key}"] = index
    return found


def _adds_first(content: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether texts begin with the BOS token."""
    if isinstance(settings.get("add_bos_token"), bool):
        return bool(settings["add_bos_token"])
    step = content.get("post_processor") or {}
    steps = step.get("processors", [step])
    singles = [each["single"][0] for each in steps if each.get("type") == "TemplateProcessing" and each.get("single")]
    return any("SpecialToken" in first for first in singles)


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template, and the one for conversations with tools if it is another."""
    default, tools = find_template(folder, settings), find_template(folder, settings, TOOL_USE)
    key = "tokenizer.chat_template"
    found: dict[str, Any] = {} if default is None else {key: default}
    return found if tools is None else {**found, f"{key}s": [TOOL_USE], f"{key}.{TOOL_USE}": tools}
