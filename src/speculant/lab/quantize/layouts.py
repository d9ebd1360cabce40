"""How llama.cpp's conversion stores each family's checkpoints: names, order of rows, and metadata.

Names and orders share nothing with `speculant.models`, which reads the files, so that tests can compare the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speculant.lab.quantize.entries import Config, Entries, decoder_entries, encoder_decoder_entries
from speculant.models import Attention, DecoderConfig, Experts

_ARCHITECTURE = "general.architecture"
_EXPERT = re.compile(r"experts\.[0-9]+\.")  # whose tensors are stacked

_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}


@dataclass(frozen=True)
class GgufLayout:
    """The layout of a family.

    whole: names outside of layers. parts: names within a layer. layers: the name before a layer's number; blocks: the
    same in the file. entries: returns the family's own metadata. defaults: entries that a config.json may leave to the
    family, and that its description does not show. paired: rows of queries and keys are interleaved. shifted: norms
    have 1 added. turned: matrices are transposed. regrouped: queries of all heads come first, then keys, then values.
    encoder: the layout of the encoder's layers.
    """

    architecture: str
    whole: Mapping[str, str] = field(default_factory=lambda: _WHOLE)
    parts: Mapping[str, str] = field(default_factory=lambda: _PARTS)
    layers: str = "model.layers"
    blocks: str = "blk"
    entries: Callable[[DecoderConfig], Entries] = lambda _: {}
    defaults: Config = field(default_factory=dict)
    paired: bool = False
    shifted: bool = False
    turned: bool = False
    regrouped: bool = False
    encoder: GgufLayout | None = None

    def stored_name(self, name: str) -> str:
        """Return the name in GGUF of a tensor of a checkpoint."""
        part, _, kind = name.rpartition(".")
        if part in self.whole:
            return f"{self.whole[part]}.{kind}"
        if self.encoder and part.startswith(self.encoder.layers):
            return self.encoder.stored_name(name)
        layer, _, part = part.removeprefix(f"{self.layers}.").partition(".")
        return f"{self.blocks}.{layer}.{self.parts[_EXPERT.sub('experts.', part)]}.{kind}"

    def stored(self, name: str, tensor: Tensor, of: Attention) -> Tensor:
        """Return a checkpoint's tensor as the file has it."""
        if self.shifted and name.endswith("norm.weight"):
            return tensor + 1
        order = self._order(name, len(tensor), of)
        tensor = tensor if order is None else tensor[order]
        return tensor.T.contiguous() if self.is_turned(name) else tensor

    def loaded(self, name: str, tensor: Tensor, of: Attention) -> Tensor:
        """Return a file's tensor as the checkpoint has it; the inverse of `stored`."""
        if self.shifted and name.endswith("norm.weight"):
            return tensor - 1
        tensor = tensor.T if self.is_turned(name) else tensor
        order = self._order(name, len(tensor), of)
        if order is None:
            return tensor
        out = torch.empty_like(tensor)
        out[order] = tensor
        return out

    def is_turned(self, name: str) -> bool:
        """Whether the file has a tensor transposed."""
        return self.turned and any(f".{part}.weight" in name for part in ("c_attn", "c_proj", "c_fc"))

    def _order(self, name: str, rows: int, of: Attention) -> Tensor | None:
        """Return the order of a tensor's rows in the file; None = as they are."""
        heads = next((n for part, n in (("q_proj", of.heads), ("k_proj", of.kv_heads)) if f".{part}." in name), 0)
        if self.paired and heads:  # the halves of each head, interleaved
            return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).reshape(-1)
        if self.regrouped and "query_key_value" in name:
            return torch.arange(rows).view(of.heads, 3, -1).transpose(0, 1).reshape(-1)
        return None


def _softcaps(decoder: DecoderConfig, *, of_scores: bool) -> Entries:
    caps = {
        "attn_logit_softcapping": decoder.attention.softcap if of_scores else None,
        "final_logit_softcapping": decoder.head.softcap,
    }
    return {name: cap for name, cap in caps.items() if cap is not None}


def _gemma2(decoder: DecoderConfig) -> Entries:
    windows = {} if decoder.windows else {"attention.sliding_window_pattern": 1}  # readers take a window for granted
    return {**_softcaps(decoder, of_scores=True), **windows}


def _granite(decoder: DecoderConfig) -> Entries:
    return {
        "attention.scale": decoder.attention.score_scale,
        "embedding_scale": decoder.embedding.scale,
        "residual_scale": decoder.layers[0].residual_scale,
        "logit_scale": 1 / decoder.head.scale,
    }


def _mistral3(decoder: DecoderConfig) -> Entries:
    beta = decoder.attention.rope.query_beta if decoder.attention.rope else 0.0
    return {"attention.temperature_scale": beta} if beta else {}


def _weighting(decoder: DecoderConfig) -> Entries:
    experts = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Experts)]
    return {"expert_weights_norm": experts[0].renormalise} if experts else {}


_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_ROUTED = {**_PARTS, "mlp.gate": "ffn_gate_inp", **{f"mlp.experts.{own}": name for own, name in _EXPERTS.items()}}
_MIXTRAL = {
    **_PARTS,
    "block_sparse_moe.gate": "ffn_gate_inp",
    **{f"block_sparse_moe.experts.w{i}": f"ffn_{name}_exps" for i, name in ((1, "gate"), (2, "down"), (3, "up"))},
}
_GEMMA_PARTS = {**_PARTS, **_AFTER, "pre_feedforward_layernorm": "ffn_norm"}
_OLMO = GgufLayout("olmo2", parts={**_PARTS, **_AFTER})
_T5_ATTENTION = {
    "layer.0.layer_norm": "attn_norm",
    **{f"layer.0.SelfAttention.{name}": f"attn_{name}" for name in "qkvo"},
    "layer.0.SelfAttention.relative_attention_bias": "attn_rel_b",
}
_T5_CROSS = {
    "layer.1.layer_norm": "cross_attn_norm",
    **{f"layer.1.EncDecAttention.{name}": f"cross_attn_{name}" for name in "qkvo"},
}
_T5_MLP = {"wi_0": "ffn_gate", "wi_1": "ffn_up", "wi": "ffn_up", "wo": "ffn_down"}


def _t5_parts(mlp: int, other: Mapping[str, str]) -> dict[str, str]:
    """Return the names within a layer; mlp: the number of its feed-forward block."""
    inner = {f"layer.{mlp}.DenseReluDense.{name}": stored for name, stored in _T5_MLP.items()}
    return {**_T5_ATTENTION, **other, f"layer.{mlp}.layer_norm": "ffn_norm", **inner}


_T5 = GgufLayout(
    "t5",
    whole={
        "shared": "token_embd",
        "lm_head": "output",
        "decoder.final_layer_norm": "dec.output_norm",
        "encoder.final_layer_norm": "enc.output_norm",
    },
    parts=_t5_parts(2, _T5_CROSS),
    layers="decoder.block",
    blocks="dec.blk",
    encoder=GgufLayout("t5", parts=_t5_parts(1, {}), layers="encoder.block", blocks="enc.blk"),
)
LAYOUTS = {
    "t5": _T5,
    "umt5": _T5,
    "llama": GgufLayout("llama", paired=True),
    "mistral": GgufLayout(
        "mistral3", paired=True, entries=_mistral3
    ),  # as in Mistral 3; earlier ones are stored as Llama
    "qwen2": GgufLayout("qwen2"),
    "qwen3": GgufLayout("qwen3"),
    "qwen3_moe": GgufLayout("qwen3moe", parts=_ROUTED, entries=_weighting),
    "olmoe": GgufLayout("olmoe", parts=_ROUTED, entries=_weighting),
    "mixtral": GgufLayout("llama", parts=_MIXTRAL, paired=True),
    "gemma2": GgufLayout("gemma2", parts=_GEMMA_PARTS, shifted=True, entries=_gemma2),
    "gemma3_text": GgufLayout(
        "gemma3", parts=_GEMMA_PARTS, shifted=True, entries=lambda decoder: _softcaps(decoder, of_scores=False)
    ),
    "phi3": GgufLayout(
        "phi3",
        parts={**_PARTS, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        defaults={"original_max_position_embeddings": 4096},
    ),
    "smollm3": GgufLayout("smollm3", paired=True),
    "granite": GgufLayout("granite", paired=True, entries=_granite),
    "cohere": GgufLayout(
        "command-r", entries=lambda decoder: {"logit_scale": decoder.head.scale}
    ),  # its checkpoints' rows are interleaved too
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "ministral3": GgufLayout("mistral3", paired=True, entries=_mistral3),
    "starcoder2": GgufLayout("starcoder2", parts={**_PARTS, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}),
    "gpt2": GgufLayout(
        "gpt2",
        whole={
            "transformer.wte": "token_embd",
            "transformer.wpe": "position_embd",
            "transformer.ln_f": "output_norm",
            "lm_head": "output",
        },
        parts={
            "ln_1": "attn_norm",
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "ln_2": "ffn_norm",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        layers="transformer.h",
        turned=True,
    ),
    "gpt_neox": GgufLayout(
        "gptneox",
        whole={
            "gpt_neox.embed_in": "token_embd",
            "gpt_neox.final_layer_norm": "output_norm",
            "embed_out": "output",
        },
        parts={
            "input_layernorm": "attn_norm",
            "attention.query_key_value": "attn_qkv",
            "attention.dense": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
        },
        layers="gpt_neox.layers",
        regrouped=True,
        entries=lambda decoder: {"use_parallel_residual": decoder.layers[0].parallel},
    ),
}


def described(config: Config, decoder: DecoderConfig) -> Entries:
    """Return the metadata of a checkpoint, except for its tokenizer and its settings of generation."""
    layout = LAYOUTS[config["model_type"]]
    made = encoder_decoder_entries if decoder.encoder else decoder_entries
    own = {**made({**layout.defaults, **config}, decoder), **layout.entries(decoder)}
    return {_ARCHITECTURE: layout.architecture, **{f"{layout.architecture}.{key}": own[key] for key in own}}


def stored_tensors(names: Iterable[str], layout: GgufLayout) -> dict[str, list[str]]:
    """Return a checkpoint's tensors by their names in the file; several of one name are the matrices of experts."""
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=numbered):
        found.setdefault(layout.stored_name(name), []).append(name)
    return found


def numbered(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names by the values of their numbers."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]
