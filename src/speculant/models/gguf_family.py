"""How GGUF files store the models of a family: data that a family gives beside its `read_config`.

    GGUF = GgufFamily("gemma2", windows=WindowPattern(2, 4096), config={"final_logit_softcapping": Number(...)})

A family with the common tensor names and the common metadata needs only its architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import EllipsisType
from typing import Any

from speculant.models.description import DecoderConfig, Mlp, Norm
from speculant.models.sizes import (
    AFTER_ATTENTION,
    AFTER_MLP,
    BEFORE_ATTENTION,
    BEFORE_MLP,
    EXPERT,
    LAYER,
    layer_norms,
)
from speculant.models.tensor_map import Expression, Plus, Rows, Stacked, TensorMap, Unpaired, map_modules

GGUF_TABLE, GGUF_HEAD = "token_embd.weight", "output.weight"
BLOCK = "blk.{}."  # begins the names of a layer's tensors
WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.embed_positions": "position_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
QUERIES, KEYS, VALUES = (f"self_attn.{name}_proj" for name in "qkv")
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
FUSED_QKV = "attn_qkv"  # queries, keys and values


Function = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Number:
    """A metadata entry that is a positive number.

    default: the value if it is absent, or a function that makes it from the config so far. zero: the value that 0
    stands for. ... in place of either = that is an error.
    """

    key: str
    default: float | Function | EllipsisType | None = ...
    zero: float | EllipsisType | None = ...


@dataclass(frozen=True)
class Count:
    """A metadata entry that is a whole number of at least 1. default: the entry that replaces it if it is absent."""

    key: str
    default: str | None = None


@dataclass(frozen=True)
class TokenId:
    """A metadata entry that is a token id; None if it is absent."""

    key: str


@dataclass(frozen=True)
class HasTensor:
    """No metadata entry: `yes` if the file has a tensor of this name, else `no`."""

    name: str
    yes: str
    no: str


@dataclass(frozen=True)
class Truth:
    """A metadata entry that is true or false."""

    key: str
    default: bool


Wanted = Number | Count | Truth | TokenId | HasTensor | Function


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
    layers. tensors: where files hold the model's tensors; None = under the common names.

    config: other keys that `read_config` reads, each with its metadata entry, or a function of the config so far; "a.b"
    is the key b of the object a. neutral: entries that `read_config` does not read, and that change the arithmetic
    unless they have one of these values.
    """

    architecture: str
    needs: str | None = None
    paired: bool = False
    norm_eps: str = "rms_norm_eps"
    windows: WindowPattern | None = None
    blocks: Mapping[str, Count] = field(default_factory=lambda: {"blk": Count("block_count")})
    tensors: TensorMap | None = None
    config: Mapping[str, Wanted] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def stored_norm_eps(self) -> str:
        """The metadata entry for the epsilon of norms."""
        return f"attention.layer_norm_{'rms_' if self.norm_eps == 'rms_norm_eps' else ''}epsilon"

    @property
    def read(self) -> set[str]:
        """The metadata entries that `config` reads."""
        return {each.key for each in self.config.values() if isinstance(each, Number | Count | Truth | TokenId)}


def gguf_tensors(config: DecoderConfig, family: GgufFamily, stored: Collection[str]) -> TensorMap:
    """Return where a file holds a model's tensors. stored: all names in the file; some files fuse tensors."""
    if family.tensors:
        return family.tensors
    of = config.attention
    layer: dict[str, Expression] = {**PARTS, **_fused(config, stored), **_stacked(config)}
    if family.paired:
        layer |= {own: Unpaired(layer[own], heads) for own, heads in ((QUERIES, of.heads), (KEYS, of.kv_heads))}
    made = dict(map_modules(LAYER, BLOCK, layer, WHOLE).names)
    for own, norm in _norms(config).items():
        if norm.offset:  # the file has the sum of scale and offset
            made[f"{own}.weight"] = Plus(made[f"{own}.weight"], -norm.offset)
    return TensorMap(tuple(made.items()))


def _fused(config: DecoderConfig, stored: Collection[str]) -> dict[str, Rows]:
    """Return the parts of fused tensors: queries, keys and values, and gate and up of the feed-forward block."""
    of, mlp = config.attention, config.layers[0].mlp
    found: dict[str, Rows] = {}
    if f"{BLOCK}{FUSED_QKV}.weight".format(0) in stored:
        found |= _consecutive(FUSED_QKV, {QUERIES: of.query_size, KEYS: of.key_size, VALUES: of.key_size})
    if isinstance(mlp, Mlp) and mlp.gated and f"{BLOCK}{PARTS[GATE]}.weight".format(0) not in stored:
        found |= _consecutive(PARTS[UP], {GATE: mlp.size, UP: mlp.size})
    return found


def _stacked(config: DecoderConfig) -> dict[str, Stacked]:
    """Return the matrices of experts."""
    mlp = config.layers[-1].mlp
    if isinstance(mlp, Mlp):
        return {}
    return {f"{EXPERT}{{}}.{own}": Stacked(stored, mlp.count) for own, stored in EXPERTS.items()}


def _consecutive(fused: str, sizes: Mapping[str, int]) -> dict[str, Rows]:
    """Return the parts of a tensor that holds several tensors of these sizes, one after the other."""
    ends = list(accumulate(sizes.values()))
    return {own: Rows(fused, end - size, size, ends[-1]) for (own, size), end in zip(sizes.items(), ends, strict=True)}


def _norms(config: DecoderConfig) -> dict[str, Norm]:
    """Return the norms of a model by name; all layers have the same kinds."""
    layer = config.layers[0]
    found = {LAYER + own: norm for own, norm in layer_norms(layer).items()} | {"model.norm": config.norm}
    own = layer.attention.qk_norm
    return found | ({f"{LAYER}self_attn.{name}_norm": own for name in "qk"} if own else {})
