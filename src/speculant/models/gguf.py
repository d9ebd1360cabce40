"""Models in GGUF files: their metadata in the keys of config.json, and the names of their tensors.

Keys of a model's metadata begin with its architecture, as in `llama.block_count`. A family that GGUF files can hold has
a `GgufFamily` named GGUF in its module.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from speculant import plugins
from speculant.errors import ModelError
from speculant.gguf_file import GgufFile, end_tokens
from speculant.models.config import MOST, MOST_FACTOR, MOST_HEAD_DIM, is_whole, show
from speculant.models.description import DecoderConfig
from speculant.models.sizes import HEAD, LAYER, NORM, TABLE
from speculant.models.tensor_map import Expression, TensorMap, Unpaired

FAMILIES = "speculant.models"
ROPE_FREQS = "rope_freqs.weight"  # the divisor of each pair's frequency; part of the config, not of the weights
GGUF_TABLE, GGUF_HEAD = "token_embd.weight", "output.weight"
LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # ends of a text, a turn and a message
# Entries that change a model's arithmetic in ways that are not implemented, and the values that change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("attn_logit_softcapping", "final_logit_softcapping", "rescale_every_n_layers", "token_shift_count"),
            *("attention.max_alibi_bias", "attention.clamp_kqv", "attention.relative_buckets_count"),
            *("attention.temperature_length", "attention.temperature_scale", "attention.shared_kv_layers"),
            *("expert_count", "nextn_predict_layers", "n_deepstack_layers", "embedding_length_per_layer_input"),
            *(
                "activation_sparsity_scale",
                "swiglu_clamp_exp",
                "swiglu_clamp_shexp",
                "rope.scaling.yarn_log_multiplier",
            ),
        ),
        (0,),
    ),
    **dict.fromkeys(
        (
            *("logit_scale", "residual_scale", "embedding_scale", "attention.output_scale", "attention.value_scale"),
            *("rope.scaling.alpha", "full_attention_interval"),
        ),
        (0, 1),
    ),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (0, -1),  # -1: the type of scaling decides
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "swin_norm": (False,),
    "hidden_activation": ("silu",),
}
_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.", re.ASCII)
_OTHER = "use a GGUF file of another model, or its checkpoint with safetensors."
_DAMAGED = "download the file again, or convert the model again."


@dataclass(frozen=True)
class GgufFamily:
    """How GGUF files store the models of a family.

    architecture: its name in `general.architecture`. paired: the rows of queries and keys are in pairs; see `Unpaired`.
    """

    architecture: str
    paired: bool = False

    def tensors(self, config: DecoderConfig) -> TensorMap:
        """Return where a file holds a model's tensors."""
        of = config.attention
        heads = {"self_attn.q_proj": of.heads, "self_attn.k_proj": of.kv_heads} if self.paired else {}
        names: list[tuple[str, Expression]] = [(TABLE, GGUF_TABLE), (NORM, "output_norm.weight"), (HEAD, GGUF_HEAD)]
        for own, stored in LAYER_PARTS.items():
            for kind in ("weight", "bias"):
                name = f"blk.{{}}.{stored}.{kind}"
                names.append((f"{LAYER}{own}.{kind}", Unpaired(name, heads[own]) if own in heads else name))
        return TensorMap(tuple(names))


def read_gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the metadata of the model in a file, in the keys of config.json. Raises ModelError."""
    facts = _Facts(file)
    family, _ = _family(file)
    layers = facts.count("block_count")
    _check_layers(file, layers)
    table = file.tensors.get(GGUF_TABLE)
    if table is None or len(table.shape) != 2:
        raise ModelError(f"{file.path} has no matrix {GGUF_TABLE}", _DAMAGED)
    hidden, heads = facts.count("embedding_length"), facts.count("attention.head_count")
    head_dim = facts.count("attention.key_length", hidden // heads, MOST_HEAD_DIM)
    facts.check_neutral({**NEUTRAL, "attention.scale": (0, head_dim**-0.5)})
    return {
        "model_type": family,
        "vocab_size": table.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": facts.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": facts.count("feed_forward_length"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(facts),
        "partial_rotary_factor": facts.count("rope.dimension_count", head_dim) / head_dim,
        "max_position_embeddings": facts.count("context_length"),
        "tie_word_embeddings": GGUF_HEAD not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        **_window(facts),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(file, table.shape[0]),
    }


def read_gguf_decoder(file: GgufFile, config: Mapping[str, Any]) -> DecoderConfig:
    """Return the description of the model in a file, from the config that `read_gguf_config` returns."""
    name, family = _family(file)
    try:
        decoder: DecoderConfig = plugins.load(FAMILIES, name).read_config(config)
    except ModelError as error:
        raise ModelError(
            f"the metadata of {file.path}, in the keys of config.json, describe no usable model: {error.problem}",
            _OTHER,
        ) from error
    window = config.get("sliding_window")
    if window is not None and any(layer.attention.window != window for layer in decoder.layers):
        raise ModelError(
            f"{file.path} has a sliding window of {window} positions, which is not implemented for {name}", _OTHER
        )
    return replace(decoder, tensors=family.tensors(decoder))


def _family(file: GgufFile) -> tuple[str, GgufFamily]:
    """Return the name of the family of a file's architecture, and the family."""
    architecture = file.metadata.get("general.architecture")
    known: dict[str, tuple[str, GgufFamily]] = {}
    for name in plugins.names(FAMILIES):
        family = getattr(plugins.load(FAMILIES, name), "GGUF", None)
        if isinstance(family, GgufFamily):
            known[family.architecture] = name, family
    if not isinstance(architecture, str) or architecture not in known:
        raise ModelError(
            f"{file.path} has the architecture {show(architecture)}, which is not implemented",
            f"use a file of one of these architectures: {', '.join(sorted(known))}.",
        )
    return known[architecture]


@dataclass(frozen=True)
class _Facts:
    """The metadata of a file's model."""

    file: GgufFile

    def get(self, key: str) -> Any:
        """Return an entry; None if there is none. A list of the same value for each layer stands for the value."""
        name = self._name(key)
        value = self.file.metadata.get(name)
        if not isinstance(value, list):
            return value
        if not value or any(each != value[0] for each in value):
            raise ModelError(
                f"{self.file.path} has {name} = {show(value)}, and layers that differ are not implemented", _OTHER
            )
        return value[0]

    def count(self, key: str, default: int | None = None, most: int = MOST) -> int:
        """Return a whole number of at least 1."""
        value = self._present(key, default)
        if not is_whole(value) or not 1 <= value <= most:
            raise self._wrong(key, value, f"a whole number from 1 to {most}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def check_neutral(self, entries: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse a file in which one of these entries has another than the given values."""
        for key, neutral in entries.items():
            value = self.get(key)
            if value is not None and not any(_equal(value, each) for each in neutral):
                raise ModelError(
                    f"{self.file.path} has {self._name(key)} = {show(value)}, which is not implemented", _OTHER
                )

    def _present(self, key: str, default: float | None) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.file.path} has no metadata entry {self._name(key)}", _DAMAGED)
        return value

    def _name(self, key: str) -> str:
        return f"{self.file.metadata.get('general.architecture')}.{key}"

    def _wrong(self, key: str, value: Any, expected: str) -> ModelError:
        return ModelError(f"{self.file.path} has {self._name(key)} = {show(value)}, not {expected}", _DAMAGED)


def _equal(value: Any, other: Any) -> bool:
    """Compare two values; files store numbers in float32."""
    if isinstance(value, int | float) and isinstance(other, int | float):
        return math.isclose(value, other, rel_tol=1e-6)
    return bool(value == other)


def _check_layers(file: GgufFile, layers: int) -> None:
    """Compare the number of layers with the tensors, before anything is allocated for each layer."""
    numbers = {int(hit[1]) for hit in map(_BLOCK.match, file.tensors) if hit}
    if len(numbers) != layers or max(numbers) != layers - 1:
        raise ModelError(
            f"{file.path} says that the model has {layers} layers and holds tensors of {len(numbers)}", _DAMAGED
        )


def _rope_scaling(facts: _Facts) -> dict[str, Any] | None:
    """Return the scaling of rotary positions; None = they are not scaled."""
    kind = facts.get("rope.scaling.type")
    factor = facts.get("rope.scaling.factor")
    factor = facts.get("rope.scale_linear") if factor is None else factor
    if kind not in (None, "none", "linear"):
        return {"rope_type": str(kind), "factor": factor}
    factor = 1.0 if kind == "none" or factor in (None, 0) else factor
    divisors = _divisors(facts.file)
    if divisors is not None:
        return {"rope_type": "factors", "factors": [each * _checked(facts.file, factor) for each in divisors]}
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _divisors(file: GgufFile) -> list[float] | None:
    """Read the divisors of the frequencies; None = the file has none."""
    tensor = file.tensors.get(ROPE_FREQS)
    if tensor is None:
        return None
    if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MOST_HEAD_DIM:
        raise ModelError(
            f"{file.path} has {ROPE_FREQS} of the shape {list(tensor.shape)} in {tensor.kind}, not a vector in F32",
            _DAMAGED,
        )
    try:
        with tensor.file.open("rb") as opened:
            opened.seek(tensor.offset)
            return [_checked(file, each) for each in struct.unpack(f"<{tensor.shape[0]}f", opened.read(tensor.size))]
    except (OSError, struct.error) as error:
        raise ModelError(f"{ROPE_FREQS} can't be read from {tensor.file}: {error}", _DAMAGED) from error


def _checked(file: GgufFile, factor: Any) -> float:
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
        raise ModelError(
            f"{file.path} scales rotary positions by {show(factor)}, not by {1 / MOST_FACTOR:g} to {MOST_FACTOR:g}",
            _DAMAGED,
        )
    return float(factor)


def _window(facts: _Facts) -> dict[str, Any]:
    """Return the entries for a sliding window on every layer, as Qwen's checkpoints have them."""
    size = facts.get("attention.sliding_window")
    if size is None or size == 0:
        return {"sliding_window": None}
    pattern = facts.get("attention.sliding_window_pattern")
    if pattern is not True:  # a list of each layer's; a number n excludes each n-th layer
        facts.check_neutral({"attention.sliding_window_pattern": ()})
    return {
        "sliding_window": facts.count("attention.sliding_window"), "use_sliding_window": True, "max_window_layers": 0,
    }  # fmt: skip


def _end_tokens(file: GgufFile, vocab_size: int) -> list[int]:
    """Return the tokens that end a text: by the metadata, or by their names."""
    named = [file.metadata.get(f"tokenizer.ggml.{key}") for key in END_KEYS]
    for each in named:
        if each is not None and not (is_whole(each) and 0 <= each < vocab_size):
            raise ModelError(f"{file.path} names the end token {show(each)}, and has {vocab_size} tokens", _DAMAGED)
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    found = {int(each) for each in named if each is not None}
    if isinstance(tokens, list):
        are_typed = isinstance(types, list) and len(types) == len(tokens)
        found |= end_tokens(tokens[:vocab_size], types if are_typed else None)
    return sorted(found)
