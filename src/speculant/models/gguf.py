"""Models in GGUF files: their metadata in the keys of config.json, their description and their tensors.

Keys of a model's metadata begin with its architecture, as in `llama.block_count`. A family that GGUF files can hold has
a `GgufFamily` named GGUF in its module, beside `read_config`:

    GGUF = GgufFamily("gemma2", windows=WindowPattern(2, 4096), config={"final_logit_softcapping": Number(...)})

A family with the common tensor names and the common metadata needs only its architecture.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from types import EllipsisType
from typing import Any

from speculant import plugins
from speculant.errors import ModelError
from speculant.gguf_file import GgufFile, end_tokens
from speculant.models.config import FULL, MOST, MOST_FACTOR, MOST_HEAD_DIM, MOST_LAYERS, SLIDING, is_whole, show
from speculant.models.description import (
    SAME_NAMES,
    DecoderConfig,
    Experts,
    Expression,
    Mlp,
    Norm,
    Plus,
    Rows,
    Stacked,
    TensorMap,
    Unpaired,
    map_modules,
    stored_name,
)
from speculant.models.sizes import (
    AFTER_ATTENTION,
    AFTER_MLP,
    BEFORE_ATTENTION,
    BEFORE_MLP,
    EXPERT,
    LAYER,
    SHARED,
    SHARED_GATE,
    layer_norms,
)
from speculant.models.weights.source import Mapped, StoredWeights, map_tensor

GGUF_TABLE, GGUF_HEAD = "token_embd.weight", "output.weight"
BLOCK = "blk.{}."  # begins the names of a layer's tensors
WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.embed_positions": "position_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
QUERIES, KEYS, VALUES = (f"self_attn.{name}_proj" for name in "qkv")
GATES = "self_attn.gate_proj"  # of the result
GATE, UP = "mlp.gate_proj", "mlp.up_proj"
PARTS: Mapping[str, str] = {  # of a layer
    BEFORE_ATTENTION: "attn_norm",
    QUERIES: "attn_q",
    KEYS: "attn_k",
    VALUES: "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    AFTER_ATTENTION: "post_attention_norm",
    BEFORE_MLP: "ffn_norm",
    GATE: "ffn_gate",
    UP: "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    AFTER_MLP: "post_ffw_norm",
}
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}  # stacked
ROW = "ffn_gate_inp_shexp"  # a matrix of one row, which some files have as a vector
SHARED_EXPERT = {
    f"{SHARED}gate_proj": "ffn_gate_shexp",
    f"{SHARED}up_proj": "ffn_up_shexp",
    f"{SHARED}down_proj": "ffn_down_shexp",
    SHARED_GATE.removesuffix(".weight"): ROW,
}
FUSED_QKV = "attn_qkv"  # queries, keys and values
OF_HEADS = (*PARTS.keys() - {AFTER_ATTENTION, "mlp.router", AFTER_MLP},)  # of a layer of a head


Function = Callable[[Mapping[str, Any]], Any]
FromDescription = Callable[[DecoderConfig], Any]  # makes a value from a description


@dataclass(frozen=True)
class Number:
    """A metadata entry that is a positive number.

    default: the value if it is absent, or a function that makes it from the config so far. zero: the value that 0
    stands for. ... in place of either = that is an error. of: see `GgufFamily.written`.
    """

    key: str
    default: float | Function | EllipsisType | None = ...
    zero: float | EllipsisType | None = ...
    of: FromDescription | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Count:
    """A metadata entry that is a whole number of at least 1.

    default: its value if it is absent, or the entry that replaces it. of: see `GgufFamily.written`. least: the least
    value.
    """

    key: str
    default: str | int | None = None
    of: FromDescription | None = field(default=None, compare=False)
    least: int = 1


@dataclass(frozen=True)
class TokenId:
    """A metadata entry that is a token id; None if it is absent."""

    key: str


@dataclass(frozen=True)
class HasTensor:
    """No metadata entry: `yes` if the file has a tensor whose name ends with this, else `no`."""

    name: str
    yes: str | bool
    no: str | bool


@dataclass(frozen=True)
class Truth:
    """A metadata entry that is true or false. of: see `GgufFamily.written`."""

    key: str
    default: bool
    of: FromDescription | None = field(default=None, compare=False)


@dataclass(frozen=True)
class LayerFlags:
    """A metadata entry that is true or false for each layer, and for each head behind them; the types of layers.

    yes, no: the types. default: makes them from the config so far if the entry is absent. of: see
    `GgufFamily.written`.
    """

    key: str
    yes: str
    no: str
    default: Function
    of: FromDescription | None = field(default=None, compare=False)


Wanted = Number | Count | Truth | TokenId | HasTensor | LayerFlags | Function
_WRITTEN = Number | Count | Truth | LayerFlags  # have a function `of`


@dataclass(frozen=True)
class WindowPattern:
    """Sliding windows on some layers.

    period: every period-th layer has none, unless the file lists the layers. size: the window in positions if the file
    has none; None = then there are no windows.
    """

    period: int
    size: int | None = None


@dataclass(frozen=True)
class GgufFamily:
    """How GGUF files store the models of a family.

    architecture: its name in `general.architecture`. needs: an entry or a tensor that tells the family from others with
    the same architecture: files of the family have it, and an entry is not 0. paired: the rows of queries and keys are
    in pairs; see `Unpaired`. norm_eps: the key of config.json for the epsilon of norms. windows: None = all layers have
    the window, if the file has one. blocks: how the names of layers' tensors begin, with the entry that counts these
    layers. behind: the entry for how many of them are heads behind the layers. head: their modules outside of their
    layers, by the checkpoint's names. keyless: the type of layers that have 0 in the list of key heads; None = there
    are none. tensors: where files hold tensors that do not have the common names, or a function that makes it from the
    description.

    config: other keys that `read_config` reads, each with its metadata entry, or a function of the config so far; "a.b"
    is the key b of the object a. neutral: entries that `read_config` does not read, and that change the arithmetic
    unless they have one of these values. fixed: entries that have one value in all files of the family. stateless: the
    family whose files hold models of this one that have no state; None = this one.
    """

    architecture: str
    needs: str | None = None
    paired: bool = False
    norm_eps: str = "rms_norm_eps"
    windows: WindowPattern | None = None
    blocks: Mapping[str, Count] = field(default_factory=lambda: {"blk": Count("block_count")})
    behind: str | None = None
    head: Mapping[str, str] = field(default_factory=dict)
    keyless: str | None = None
    tensors: TensorMap | Callable[[DecoderConfig], TensorMap] = SAME_NAMES
    config: Mapping[str, Wanted] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    stateless: GgufFamily | None = None

    def of(self, decoder: DecoderConfig) -> GgufFamily:
        """Return the family whose files hold a model."""
        return self.stateless if self.stateless and not decoder.states else self

    @property
    def stored_norm_eps(self) -> str:
        """The metadata entry for the epsilon of norms."""
        return f"attention.layer_norm_{'rms_' if self.norm_eps in ('rms_norm_eps', 'norm_eps') else ''}epsilon"

    @property
    def read(self) -> set[str]:
        """The metadata entries that `config` reads."""
        own = {each.key for each in self.config.values() if isinstance(each, _WRITTEN | TokenId)}
        return own | ({self.behind} if self.behind else set())

    def written(self, decoder: DecoderConfig, heads: int = 0) -> dict[str, Any]:
        """Return the family's own entries of a model's metadata, for a file that is written with `heads` heads.

        They are those of `config` with a function `of`, whose result is the value; None = the entry is left out. Other
        entries are common to all families.
        """
        own = [each for each in self.config.values() if isinstance(each, _WRITTEN) and each.of]
        found = {**self.fixed, **{each.key: each.of(decoder) for each in own if each.of}}
        if self.windows and self.windows.size and not decoder.windows:
            found["attention.sliding_window_pattern"] = 1  # readers take a window for granted
        if heads and self.behind:
            found |= {self.behind: heads, "block_count": decoder.num_layers + heads}
            found |= {each.key: [*found[each.key], *[False] * heads] for each in own if isinstance(each, LayerFlags)}
        return {key: value for key, value in found.items() if value is not None}


def experts_of(decoder: DecoderConfig) -> Experts | None:
    """Return the experts of the first layer that has any."""
    return next((layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Experts)), None)


def of_experts(field: str) -> FromDescription:
    """Return what reads a field of the experts, or a field of that one ("a.b"); None = there are no experts."""
    read = attrgetter(field)
    return lambda decoder: None if (of := experts_of(decoder)) is None else read(of)


def of_state(field: str) -> FromDescription:
    """Return what reads a field of the layers' state; 1 = no layer has one."""
    return lambda decoder: getattr(decoder.state, field, 1)


def gguf_tensors(config: DecoderConfig, family: GgufFamily, stored: Collection[str] | None = None) -> TensorMap:
    """Return where a file holds a model's tensors. Some files fuse tensors.

    stored: all names in the file; None = it will be written, and fuses what the checkpoint fuses.
    """
    stored = _unfused(config) if stored is None else stored
    of = config.attention
    layer: dict[str, Expression] = {**PARTS, **_fused(config, stored), **_stacked(config, stored)}
    if family.paired:
        layer |= {own: Unpaired(layer[own], heads) for own, heads in ((QUERIES, of.heads), (KEYS, of.kv_heads))}
    own_names = family.tensors(config) if callable(family.tensors) else family.tensors
    made = dict((*map_modules(LAYER, BLOCK, layer, WHOLE).names, *own_names.names))
    for own, norm in _norms(config).items():
        if norm.offset:  # the file has the sum of scale and offset
            made[f"{own}.weight"] = Plus(made[f"{own}.weight"], -norm.offset)
    return replace(own_names, names=tuple(made.items()))


def gguf_head(
    config: DecoderConfig, family: GgufFamily, count: int, stored: Collection[str] | None = None
) -> TensorMap:
    """Return where a file holds `count` heads, by a checkpoint's names. Their blocks follow those of the layers.

    stored: see `gguf_tensors`. A head without a norm of its own has the model's.
    """
    like, offset, made = stored, config.norm.offset, dict[str, Expression]()
    if stored is not None:  # the tensors of the head's block say which parts are joined
        block, places = BLOCK.format(config.num_layers), (0, _attending(config))
        like = {name.replace(block, BLOCK.format(each)) for name in stored if name.startswith(block) for each in places}
    names = gguf_tensors(config, family, like)
    for own, part in family.head.items():
        place = f"{BLOCK}{part}.weight".format(config.num_layers)
        shared = own == "mtp.norm" and stored is not None and place not in stored
        whole = f"{WHOLE['model.norm']}.weight" if shared else place
        made[f"{own}.weight"] = Plus(whole, -offset) if "norm" in own and offset else whole
    for index in range(count if family.head else 0):
        for own in (f"{part}.{kind}" for part in OF_HEADS for kind in ("weight", "bias")):
            found = names.expression(f"{LAYER}{own}".format(config.num_layers + index))
            gated = config.attention.gated and own.startswith(QUERIES)
            made[f"mtp.layers.{index}.{own}"] = found.of if gated and isinstance(found, Rows) else found
    return TensorMap(tuple(made.items()))


def open_gguf_head(path: Path) -> tuple[dict[str, Any], Mapped]:
    """Return the metadata of a file's model, as `read_gguf_config` does, and its heads by a checkpoint's names.

    The file may have the heads alone. Raises ModelError.
    """
    file = GgufFile.open(path)
    facts, (name, family) = _Facts(file), _family(file)
    layers, heads = facts.layers(family.behind)
    alone = layers <= MOST_LAYERS and _blocks(file, "blk") == {*range(layers, layers + heads)}
    config = _read_config(facts, name, family) if alone else read_gguf_config(file)
    decoder = read_gguf_decoder(file, config)
    names = gguf_head(decoder, family, config["num_nextn_predict_layers"], file.tensors)
    shapes = {
        own: _taken(made, place.shape) for own, made in names.names if (place := file.tensors.get(stored_name(made)))
    }
    return config, Mapped(gguf_weights(file), shapes, names)


def _taken(made: Expression, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the part that an expression takes of a stored tensor of this shape."""
    return (shape[0] - made.period + made.size, *shape[1:]) if isinstance(made, Rows) and shape else shape


def _unfused(config: DecoderConfig) -> list[str]:
    """Return the names that tell what a file fuses, if it fuses what a checkpoint does."""

    def fuses(one: str, other: str) -> bool:
        return len({config.tensors.stored(f"{LAYER}{name}.weight".format(0)) for name in (one, other)}) == 1

    shown = [*([FUSED_QKV] if fuses(QUERIES, KEYS) else []), *([] if fuses(GATE, UP) else [PARTS[GATE]])]
    return [f"{BLOCK}{name}.weight".format(_attending(config) if name == FUSED_QKV else 0) for name in shown]


def _attending(config: DecoderConfig) -> int:
    """Return the index of the first layer with attention."""
    return next(index for index, layer in enumerate(config.layers) if layer.attention)


def _fused(config: DecoderConfig, stored: Collection[str]) -> dict[str, Rows]:
    """Return the parts of fused tensors: queries, keys, values and gates, and gate and up of feed-forward blocks."""
    of, mlp = config.attention, config.layers[0].mlp
    found: dict[str, Rows] = {}
    if f"{BLOCK}{FUSED_QKV}.weight".format(_attending(config)) in stored:
        queries = of.query_size * (2 if of.gated else 1)
        found |= _consecutive(FUSED_QKV, {QUERIES: queries, KEYS: of.key_size, VALUES: of.key_size})
    if of.gated:
        found |= _consecutive(found.get(QUERIES, PARTS[QUERIES]), {QUERIES: of.head_dim, GATES: of.head_dim})
    if isinstance(mlp, Mlp) and mlp.gated and f"{BLOCK}{PARTS[GATE]}.weight".format(0) not in stored:
        found |= _consecutive(PARTS[UP], {GATE: mlp.size, UP: mlp.size})
    return found


def _stacked(config: DecoderConfig, stored: Collection[str]) -> dict[str, Expression]:
    """Return the parts of blocks with experts. A file may have gate and up of all experts in one tensor."""
    of = experts_of(config)
    if of is None:
        return {}
    both, first = "ffn_gate_up_exps", next(index for index, layer in enumerate(config.layers) if layer.mlp == of)
    made: dict[str, Expression] = {own: Stacked(name, of.count) for own, name in EXPERTS.items()}
    if f"{BLOCK}{both}.weight".format(first) in stored:
        halves = {"gate_proj": 0, "up_proj": of.size}
        made |= {own: Rows(Stacked(both, of.count), at, of.size, 2 * of.size) for own, at in halves.items()}
    return {**SHARED_EXPERT, **{f"{EXPERT}{{}}.{own}": each for own, each in made.items()}}


def _consecutive(fused: Expression, sizes: Mapping[str, int]) -> dict[str, Rows]:
    """Return the parts of a tensor that holds several tensors of these sizes, one after the other."""
    ends = list(accumulate(sizes.values()))
    return {own: Rows(fused, end - size, size, ends[-1]) for (own, size), end in zip(sizes.items(), ends, strict=True)}


def _norms(config: DecoderConfig) -> dict[str, Norm]:
    """Return the norms of a model by name; all layers have the same kinds."""
    layer = config.layers[0]
    found = {LAYER + own: norm for own, norm in layer_norms(layer).items()} | {"model.norm": config.norm}
    own = config.attention.qk_norm
    return found | ({f"{LAYER}self_attn.{name}_norm": own for name in "qk"} if own else {})


FAMILIES = "speculant.models"
ARCHITECTURE = "general.architecture"  # the entry that the names of a model's entries begin with
# The divisors of the pairs' frequencies; those of long and of short texts. Part of the config, not of the weights.
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
YARN = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
    "mscale_all_dim": "yarn_log_multiplier",
}
ROPE_READ = {  # entries that not all kinds of scaling read
    "none": {"rope.scaling.attn_factor"},
    "linear": {"rope.scaling.attn_factor"},
    "yarn": {"rope.scaling.yarn_attn_factor", "rope.scaling.yarn_log_multiplier"},
    "longrope": {"rope.scaling.attn_factor"},
}
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # ends of a text, a turn and a message
ENDS = "tokenizer.ggml.eos_token_ids"  # Ollama's entry for all end tokens
# Entries that change a model's arithmetic in ways that are not implemented, and the values that change nothing. A
# family may read some of them.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("attn_logit_softcapping", "final_logit_softcapping", "rescale_every_n_layers", "token_shift_count"),
            *("attention.max_alibi_bias", "attention.clamp_kqv", "attention.relative_buckets_count"),
            *("attention.temperature_length", "attention.temperature_scale", "attention.shared_kv_layers"),
            *("expert_count", "nextn_predict_layers", "n_deepstack_layers", "embedding_length_per_layer_input"),
            *("leading_dense_block_count", "expert_shared_count", "router_logit_softcapping"),
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
            *("rope.scaling.alpha", "full_attention_interval", "interleave_moe_layer_step", "moe_every_n_layers"),
            *("expert_weights_scale", "expert_group_count", "expert_gating_func"),  # 1 = softmax
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
ENCODERS = ("t5encoder",)  # architectures without a decoder
_OTHER = "use a GGUF file of another model, or its checkpoint with safetensors."
_DAMAGED = "download the file again, or convert the model again."
_HEAD_ALONE = "if it is a model's head alone, name it as the draft model, with its method; else download it again."


def read_gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the metadata of the model in a file, in the keys of config.json. Raises ModelError."""
    facts = _Facts(file)
    name, family = _family(file)
    for beginning, counted in family.blocks.items():
        _check_layers(file, beginning, facts.read(counted, {}))
    return _read_config(facts, name, family)


def _read_config(facts: _Facts, name: str, family: GgufFamily) -> dict[str, Any]:
    scaling = _rope_kind(facts)
    found = {"model_type": name, **_common(facts, family, scaling)}
    fixed = {key: (value,) for key, value in family.fixed.items()}
    facts.check_neutral({**_neutral(found, scaling), **family.neutral, **fixed}, family.read)
    for path, value in family.config.items():
        outer, _, key = path.rpartition(".")
        into = found[outer] if outer else found
        into[key] = facts.read(value, found)
    return found


def _common(facts: _Facts, family: GgufFamily, scaling: str) -> dict[str, Any]:
    """Return the keys that all families read."""
    file = facts.file
    table = file.tensors.get(GGUF_TABLE)
    if table is None or len(table.shape) != 2:
        raise ModelError(f"{file.path} has no matrix {GGUF_TABLE}", _DAMAGED)
    hidden, heads = (facts.count(key) for key in ("embedding_length", "attention.head_count"))
    layers, behind = facts.layers(family.behind)
    keys, kinds = _key_heads(facts, family, heads, layers)
    head_dim = facts.count("attention.key_length", hidden // heads, MOST_HEAD_DIM)
    return {
        "vocab_size": table.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": behind,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": head_dim,
        "intermediate_size": facts.count("feed_forward_length", facts.get("expert_feed_forward_length")),
        family.norm_eps: facts.number(family.stored_norm_eps),
        "rope_theta": facts.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(facts, scaling),
        "partial_rotary_factor": _share(facts.count("rope.dimension_count", head_dim), head_dim),
        "max_position_embeddings": facts.count("context_length"),
        "tie_word_embeddings": GGUF_HEAD not in file.tensors,
        "attention_bias": any(name.endswith("attn_output.bias") for name in file.tensors),
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        **_windows(facts, family.windows, layers),
        **kinds,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [*_end_tokens(file, table.shape[0])],
    }


def _key_heads(facts: _Facts, family: GgufFamily, heads: int, layers: int) -> tuple[int, dict[str, Any]]:
    """Return the number of key heads, and the types of layers if some have none."""
    key = "attention.head_count_kv"
    given = facts.raw(key)
    if family.keyless is None or not isinstance(given, list):
        return facts.count(key, heads), {}
    own = [each for each in given if each != 0]
    if len(given) != layers or not own or any(each != own[0] for each in own):
        raise facts.wrong(key, given, f"0 or the same number for each of {layers} layers")
    return facts.whole(key, own[0], MOST), {"layer_types": [family.keyless if each == 0 else FULL for each in given]}


def _neutral(config: Mapping[str, Any], scaling: str) -> dict[str, tuple[Any, ...]]:
    """Return the values of entries that change nothing in a model with this config."""
    head_dim = config["head_dim"]
    found = {
        **NEUTRAL,
        "attention.scale": (0, head_dim**-0.5),
        "attention.key_length_swa": (head_dim,),
        "attention.value_length_swa": (head_dim,),
        "rope.dimension_count_swa": (int(head_dim * config["partial_rotary_factor"]),),
        "rope.freq_base_swa": (config["rope_theta"],),
    }
    if scaling == "yarn":
        found["rope.scaling.yarn_ext_factor"] = (1, -1)
    return {key: values for key, values in found.items() if key not in ROPE_READ.get(scaling, ())}


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
    size = config["sliding_window"]
    slides = [kind == SLIDING or bool(decoder.states) for kind in config["layer_types"]]
    windows = tuple(size if each else None for each in slides)
    if decoder.windows != (windows if any(windows) else ()):
        raise ModelError(
            f"{file.path} has a sliding window of {size} positions, which is not implemented for {name}", _OTHER
        )
    return replace(decoder, tensors=gguf_tensors(decoder, family, file.tensors))


def gguf_families() -> dict[str, GgufFamily]:
    """Return the families that GGUF files can hold, by name."""
    found = {name: getattr(plugins.load(FAMILIES, name), "GGUF", None) for name in plugins.names(FAMILIES)}
    return {name: family for name, family in found.items() if isinstance(family, GgufFamily)}


def _family(file: GgufFile) -> tuple[str, GgufFamily]:
    """Return the name of the family of a file's model, and the family."""
    facts = _Facts(file)
    known: dict[str, list[tuple[str, GgufFamily]]] = {}
    for name, family in gguf_families().items():
        known.setdefault(family.architecture, []).append((name, family))
    architecture = file.metadata.get(ARCHITECTURE)
    if architecture in ENCODERS:
        raise ModelError(
            f"{file.path} has the architecture {architecture}, an encoder alone, which writes no text",
            "use a file of the whole model, with an encoder and a decoder.",
        )
    if not isinstance(architecture, str) or architecture not in known:
        raise ModelError(
            f"{file.path} has the architecture {show(architecture)}, which is not implemented",
            f"use a file of one of these architectures: {', '.join(sorted(known))}.",
        )
    fitting = [each for each in known[architecture] if each[1].needs is None or facts.has(each[1].needs)]
    if not fitting:
        needed = " or ".join(f"{architecture}.{family.needs}" for _, family in known[architecture])
        raise ModelError(f"{file.path} has no metadata entry {needed}", _OTHER)
    return max(fitting, key=lambda each: each[1].needs is not None)


@dataclass(frozen=True)
class _Facts:
    """The metadata of a file's model."""

    file: GgufFile

    def raw(self, key: str) -> Any:
        """Return an entry as it is; None if there is none."""
        return self.file.metadata.get(self._name(key))

    def get(self, key: str) -> Any:
        """Return an entry; None if there is none. A list of the same value for each layer stands for the value."""
        name, value = self._name(key), self.raw(key)
        if not isinstance(value, list):
            return value
        if not value or any(each != value[0] for each in value):
            raise ModelError(
                f"{self.file.path} has {name} = {show(value)}, and layers that differ are not implemented", _OTHER
            )
        return value[0]

    def has(self, key: str) -> bool:
        """Whether an entry is there and not 0, or there is a tensor of this name."""
        return self.raw(key) not in (None, 0) or key in self.file.tensors

    def read(self, wanted: Wanted, config: Mapping[str, Any]) -> Any:
        """Return the value of one of a family's own keys; config: the keys so far."""
        if isinstance(wanted, Count):
            other = wanted.default
            default = self.count(other) if isinstance(other, str) else other
            return self.count(wanted.key, default, least=wanted.least)
        if isinstance(wanted, TokenId):
            return self.token(wanted.key, config["vocab_size"])
        if isinstance(wanted, HasTensor):
            return wanted.yes if any(name.endswith(wanted.name) for name in self.file.tensors) else wanted.no
        if isinstance(wanted, LayerFlags):
            return self.types(wanted, config)
        if not isinstance(wanted, Number | Truth):
            return wanted(config)
        value = self.get(wanted.key)
        if value is None and wanted.default is not ...:
            return wanted.default(config) if callable(wanted.default) else wanted.default
        if isinstance(wanted, Truth):
            if not isinstance(value, bool):
                raise self.wrong(wanted.key, value, "true or false")
        elif value == 0 and wanted.zero is not ...:
            return wanted.zero
        else:
            self.number(wanted.key)
        return value

    def count(self, key: str, default: int | None = None, most: int = MOST, least: int = 1) -> int:
        """Return a whole number of at least `least`."""
        return self.whole(key, self._present(key, default), most, least)

    def layers(self, behind: str | None) -> tuple[int, int]:
        """Return the numbers of layers and of heads behind them. behind: see `GgufFamily`."""
        blocks = self.count("block_count")
        heads = self.count(behind, most=blocks - 1) if behind and self.has(behind) else 0
        return blocks - heads, heads

    def whole(self, key: str, value: Any, most: int, least: int = 1) -> int:
        """Check that a value is a whole number of at least `least`."""
        if not is_whole(value) or not least <= value <= most:
            raise self.wrong(key, value, f"a whole number from {least} to {most}")
        return int(value)

    def types(self, wanted: LayerFlags, config: Mapping[str, Any]) -> list[str]:
        """Return the type of each layer."""
        given, blocks = self.raw(wanted.key), self.count("block_count")
        if given is None:
            found: list[str] = wanted.default(config)
            return found
        if not isinstance(given, list) or len(given) != blocks or not all(isinstance(each, bool) for each in given):
            raise self.wrong(wanted.key, given, f"true or false for each of {blocks} layers")
        return [wanted.yes if each else wanted.no for each in given[: config["num_hidden_layers"]]]

    def token(self, key: str, vocab_size: int) -> int | None:
        """Return a token id; None if it is absent."""
        value = self.get(key)
        if value is not None and not (is_whole(value) and 0 <= value < vocab_size):
            raise self.wrong(key, value, f"a token id from 0 to {vocab_size - 1}")
        return None if value is None else int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def check_neutral(self, entries: Mapping[str, tuple[Any, ...]], read: Collection[str] = ()) -> None:
        """Refuse a file in which one of these entries has none of its neutral values, unless it is in `read`."""
        for key, neutral in entries.items():
            value = None if key in read else self.get(key)
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
        return f"{self.file.metadata.get(ARCHITECTURE)}.{key}"

    def wrong(self, key: str, value: Any, expected: str) -> ModelError:
        return ModelError(f"{self.file.path} has {self._name(key)} = {show(value)}, not {expected}", _DAMAGED)


def _equal(value: Any, other: Any) -> bool:
    """Compare two values; files store numbers in float32."""
    if isinstance(value, int | float) and isinstance(other, int | float):
        return math.isclose(value, other, rel_tol=1e-6)
    return bool(value == other)


def _check_layers(file: GgufFile, beginning: str, layers: int) -> None:
    """Compare the number of layers with the tensors, before anything is allocated for each layer.

    beginning: how the names of these layers' tensors begin.
    """
    numbers = _blocks(file, beginning)
    if len(numbers) != layers or max(numbers) != layers - 1:
        raise ModelError(
            f"{file.path} says that the model has {layers} layers and holds tensors of {len(numbers)} layers"
            f" {beginning}.*",
            _HEAD_ALONE if numbers and 0 not in numbers else _DAMAGED,
        )


def _blocks(file: GgufFile, beginning: str) -> set[int]:
    """Return the numbers in the names of layers' tensors."""
    block = re.compile(rf"{re.escape(beginning)}\.([0-9]{{1,9}})\.", re.ASCII)
    return {int(hit[1]) for hit in map(block.match, file.tensors) if hit}


def _rope_kind(facts: _Facts) -> str:
    """Return how rotary positions are scaled. Files with longrope may have only its tensors, and no entry."""
    given = facts.get("rope.scaling.type")
    kind = "longrope" if ROPE_LONG in facts.file.tensors else "linear" if given is None else str(given)
    facts.check_neutral({"rope.scaling.type": tuple(ROPE_READ)})
    if kind in ("yarn", "longrope") and ROPE_FREQS in facts.file.tensors:
        raise ModelError(f"{facts.file.path} has {ROPE_FREQS} beside {kind} scaling, which is not implemented", _OTHER)
    return kind


def _rope_scaling(facts: _Facts, kind: str) -> dict[str, Any]:
    """Return the scaling of rotary positions."""
    factor = facts.get("rope.scaling.factor")
    factor = facts.get("rope.scale_linear") if factor is None else factor
    factor = 1.0 if kind == "none" or factor in (None, 0) else factor
    original = {"original_max_position_embeddings": facts.get("rope.scaling.original_context_length")}
    if kind == "yarn":
        own = {name: facts.get(f"rope.scaling.{key}") for name, key in YARN.items()}
        own["attention_factor"] = None if own["attention_factor"] == 1 else own["attention_factor"]
        return {"rope_type": kind, "factor": factor, "mscale": 1.0, **original, **own}
    scale = {"attention_factor": facts.number("rope.scaling.attn_factor", 1.0)}
    if kind == "longrope":
        long, short = (_divisors(facts.file, name) for name in (ROPE_LONG, ROPE_SHORT))
        return {"rope_type": kind, "long_factor": long, "short_factor": short, **scale, **original}
    divisors = _divisors(facts.file, ROPE_FREQS)
    if divisors is not None:
        return {
            "rope_type": "factors",
            "factors": [each * _checked(facts.file, factor) for each in divisors],
            **scale,
            **original,
        }
    if factor == 1:
        return {"rope_type": "factors", **scale, **original} if scale != {"attention_factor": 1} else {**original}
    facts.check_neutral({"rope.scaling.attn_factor": NEUTRAL["rope.scaling.attn_factor"]})
    return {"rope_type": "linear", "factor": factor, **original}


def _share(rotated: int, head_dim: int) -> float:
    """Return the share of a head that is rotated, so that int(head_dim * share) is exactly `rotated`."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, math.inf)


def _divisors(file: GgufFile, name: str) -> list[float] | None:
    """Read the divisors of the frequencies; None = the file has none."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MOST_HEAD_DIM:
        raise ModelError(
            f"{file.path} has {name} of the shape {list(tensor.shape)} in {tensor.kind}, not a vector in F32", _DAMAGED
        )
    return [_checked(file, each) for each in map_tensor(tensor).tolist()]


def _checked(file: GgufFile, factor: Any) -> float:
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
        raise ModelError(
            f"{file.path} scales rotary positions by {show(factor)}, not by {1 / MOST_FACTOR:g} to {MOST_FACTOR:g}",
            _DAMAGED,
        )
    return float(factor)


def _windows(facts: _Facts, of: WindowPattern | None, layers: int) -> dict[str, Any]:
    """Return the sliding window and which layers have it."""
    default = of.size if of else None
    if not facts.has("attention.sliding_window") and (default is None or facts.get("attention.sliding_window") == 0):
        return {"sliding_window": None, "layer_types": [FULL] * layers}
    sliding = _sliding(facts, of.period if of else 0, layers)
    return {
        "sliding_window": facts.count("attention.sliding_window", default),
        "use_sliding_window": True,
        "layer_types": [SLIDING if each else FULL for each in sliding],
    }


def _sliding(facts: _Facts, period: int, layers: int) -> list[bool]:
    """Return which layers have a window: those of the list in the file, or all but each n-th; n = 0: all."""
    key = "attention.sliding_window_pattern"
    given = facts.raw(key)
    period = period if given is None else given
    if isinstance(period, list) and len(period) == layers and all(isinstance(each, bool) for each in period):
        return period
    if not is_whole(period) or not 0 <= period <= MOST:
        raise facts.wrong(key, given, f"true or false for each of {layers} layers, or a whole number")
    return [period == 0 or (index + 1) % period != 0 for index in range(layers)]


@lru_cache(maxsize=4)  # a start asks for them several times
def _end_tokens(file: GgufFile, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a text: by the metadata, or by their names."""
    whole = file.metadata.get(ENDS)
    named = whole if isinstance(whole, list) else [file.metadata.get(f"tokenizer.ggml.{key}") for key in END_KEYS]
    for each in named:
        if each is not None and not (is_whole(each) and 0 <= each < vocab_size):
            raise ModelError(f"{file.path} names the end token {show(each)}, and has {vocab_size} tokens", _DAMAGED)
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    found = {int(each) for each in named if each is not None}
    if isinstance(tokens, list) and not isinstance(whole, list):
        are_typed = isinstance(types, list) and len(types) == len(tokens)
        found |= end_tokens(tokens[:vocab_size], types if are_typed else None)
    return tuple(sorted(found))


def gguf_weights(file: GgufFile) -> StoredWeights:
    """Return the tensors of a file, without the factors of rotary positions, which the description holds."""
    places = {name: place for name, place in file.tensors.items() if name not in (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)}
    for name, place in file.tensors.items():
        if name.endswith(f"{ROW}.weight") and len(place.shape) == 1:
            places[name] = replace(place, shape=(1, *place.shape))
    return StoredWeights(places, file.path, file.parts, "its metadata")
