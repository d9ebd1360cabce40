"""The cost model: a decoder's tensors, and the sizes of its passes and of its cache, from its description alone.

A model's tensors have the same names in every family: those of Llama's checkpoints, and for tensors that Llama does not
have, names of our own. `TensorMap` has the names in the files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from speculant.cache import NO_KEYS, CacheShape, LayerShape, StateShape
from speculant.models.description import (
    Attention,
    DecoderConfig,
    Embedding,
    Experts,
    Layer,
    Mlp,
    Norm,
    State,
    TokenInputs,
)

if TYPE_CHECKING:
    import torch

TABLE, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
POSITIONS, EMBEDDING_NORM = "embed_positions", "embedding_norm"  # modules of the decoder and of the encoder
DECODER = "model."  # begins the names of the decoder's tensors, except for those of the head
LAYER = "model.layers.{}."  # begins the names of a layer's tensors
ENCODER = "encoder."  # begins the names of the encoder's
ENCODER_LAYER, ENCODER_NORM = "encoder.layers.{}.", "encoder.norm.weight"
SELF, CROSS = "self_attn.", "cross_attn."  # begin the names of a layer's attention, and of that over the source
STATE = "linear_attn."  # begins the names of a state's tensors
DISTANCES = "distances.weight"  # of attention
BEFORE_ATTENTION, BEFORE_MLP = "input_layernorm", "post_attention_layernorm"  # norms of a layer
BEFORE_CROSS = "cross_attention_layernorm"
AFTER_ATTENTION, AFTER_MLP = "attention_output_norm", "mlp_output_norm"
END_ATTENTION, END_CROSS, END_MLP = "attention_end_norm", "cross_attention_end_norm", "mlp_end_norm"
TOKEN_INPUTS, SCALE = "token_inputs.", "scale"  # of a layer; the names of the former begin so
TOKEN_TABLE = "embed_tokens.weight"  # of the inputs
SOURCE_KEYS = (CROSS + "k_proj.weight", CROSS + "v_proj.weight")  # end the names of matrices that sources multiply by
EXPERT = "mlp.experts."  # is in the names of the experts' tensors
SHARED, SHARED_GATE = "mlp.shared_expert.", "mlp.shared_expert_gate.weight"  # of the expert that all rows use

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: DecoderConfig) -> Shapes:
    """Return the shape of each tensor of a model. A tied head has none of its own."""
    hidden = config.hidden_size
    found: Shapes = {TABLE: (config.vocab_size, hidden), **_embedding(DECODER, config.embedding)}
    for index, layer in enumerate(config.layers):
        found |= {LAYER.format(index) + name: shape for name, shape in _layer(layer, hidden).items()}
        if layer.token_inputs:
            table = (layer.token_inputs.rows, layer.token_inputs.size)
            found[LAYER.format(index) + TOKEN_INPUTS + TOKEN_TABLE] = table
    found |= _norm(NORM.removesuffix(".weight"), config.norm, hidden)
    if config.encoder:
        found |= _embedding(ENCODER, config.embedding)
        for index, layer in enumerate(config.encoder.layers):
            found |= {ENCODER_LAYER.format(index) + name: shape for name, shape in _layer(layer, hidden).items()}
        found |= _norm(ENCODER_NORM.removesuffix(".weight"), config.encoder.norm, hidden)
    if not config.head.tied:
        found[HEAD] = (len(config.head.tokens) or config.vocab_size, hidden)
    if config.head.bias:
        found[HEAD_BIAS] = (len(config.head.tokens) or config.vocab_size,)
    return found


def parameters(config: DecoderConfig) -> int:
    """Return the number of weights."""
    return sum(map(math.prod, tensor_shapes(config).values()))


def matrix_weights(config: DecoderConfig) -> int:
    """Return the number of weights of matrices that passes of the decoder read.

    Those of a short head count as if it were whole.
    """
    return round(_read_weights(config)(None))


def pass_matrices(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, int], float]]:
    """Yield the name and the shape of each matrix that a pass of one row multiplies by, and the share that it reads.

    The share of an expert's matrix is the probability that a row uses it; other matrices have 1. A tied head has the
    name of the table. An encoder's pass reads other matrices, see `source_matrices`.
    """
    unread = {name for name, _ in source_matrices(config)} | ({TABLE} if not config.head.tied else set())
    for name, (n, k) in _matrices(tensor_shapes(config)):
        if name not in unread:
            yield name, (n, k), _read_share(config.layers[int(name.split(".")[2])].mlp, 1) if EXPERT in name else 1.0


def source_matrices(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name and the shape of each matrix that the encoding of a source multiplies by."""
    for name, shape in _matrices(tensor_shapes(config)):
        if name.startswith(ENCODER) or name.endswith(SOURCE_KEYS):
            yield name, shape


def _matrices(shapes: Shapes) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the tensors that rows are multiplied by: all of two dimensions but tables."""
    for name, shape in shapes.items():
        if len(shape) == 2 and not name.endswith((f"{POSITIONS}.weight", TOKEN_INPUTS + TOKEN_TABLE, DISTANCES)):
            yield name, (shape[0], shape[1])


def relative_reads(config: DecoderConfig) -> Callable[[int], float]:
    """Return how many weights a pass reads, by its rows, over those that a pass of one row reads: 1 without experts.

    With experts it is the expected number, if each row selects its experts at random, independently of the other rows.
    Texts may use some experts more often, and then a pass reads less. The sizes of the weights are added up once.
    """
    reads = _read_weights(config)
    return lambda rows: reads(rows) / reads(1)


def _read_weights(config: DecoderConfig) -> Callable[[int | None], float]:
    """Return how many weights of matrices a pass reads, by its rows, None = of very many."""
    others, experts = float(config.hidden_size * config.vocab_size), Counter[Mlp | Experts]()
    for layer, count in Counter(config.layers).items():
        for name, shape in _matrices(_layer(layer, config.hidden_size)):
            if EXPERT in name:
                experts[layer.mlp] += count * math.prod(shape)
            elif not name.endswith(SOURCE_KEYS):
                others += count * math.prod(shape)
    return lambda rows: others + sum(size * _read_share(mlp, rows) for mlp, size in experts.items())


def _read_share(of: Mlp | Experts, rows: int | None) -> float:
    """Return the share of experts that a pass reads."""
    return 1.0 if isinstance(of, Mlp) or rows is None else 1 - (1 - of.used / of.count) ** rows


def values_per_position(config: DecoderConfig) -> int:
    """Return how many numbers the cache holds for one position: keys and values of each layer."""
    return sum(2 * layer.attention.key_size for layer in config.layers if layer.attention)


def activations(config: DecoderConfig) -> dict[str, int]:
    """Return the width of each array that a pass fills for a row; see models/native/program.py."""
    kinds, hidden = set(config.every_layer), config.hidden_size
    states = [layer.state for layer in kinds if layer.state]
    inputs = max((layer.token_inputs.size for layer in kinds if layer.token_inputs), default=0)
    return {
        "x": hidden,
        "y": hidden,
        "qkv": max([of.fused_size for of in config.attentions] + [sum(of.projections.values()) for of in states]),
        "heads": max([of.query_size for of in config.attentions] + [of.size for of in states]),
        "gated": max(inner_width(layer.mlp) for layer in kinds),
        **_routed_widths(config),
        **{name: width for name, width in _mixing_widths(config).items() if width},
        **({"embedded": hidden, "inputs": inputs, "projected": inputs} if inputs else {}),
    }


def cache_shape(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device, stored: torch.dtype | None = None
) -> CacheShape:
    """Return the shape of one position of a decoder's cache. stored: see `CacheShape`."""
    own = tuple(
        LayerShape(of.kv_heads, of.head_dim, of.shares) if of else NO_KEYS
        for of in (layer.attention for layer in config.layers)
    )
    first, differing = max(own, key=lambda shape: shape.heads > 0), () if len(set(own)) == 1 else own
    states = tuple(None if of is None else state_shape(of) for of in config.states)
    return CacheShape(
        len(own), first.num_kv_heads, first.head_dim, dtype, device, config.windows, differing, stored, states
    )  # fmt: skip


def state_shape(of: State) -> StateShape:
    """Return the shape of the record that a sequence has in such a layer."""
    return StateShape(of.heads * of.key_dim * of.head_dim, of.update_size, of.width, of.conv)


def inner_width(of: Mlp | Experts) -> int:
    """Return how many numbers a row has inside of a feed-forward block, those of all experts that it uses."""
    return of.size if isinstance(of, Mlp) else max(of.used * of.size, of.shared.size if of.shared else 0)


def _mixing_widths(config: DecoderConfig) -> dict[str, int]:
    """Return the arrays that some attention and some states have besides: gates, and convolved rows."""
    return {
        "gates": max((of.query_size for of in config.attentions if of.gated), default=0),
        "columns": max((of.width for of in config.states if of and of.heads), default=0),
    }


def _routed_widths(config: DecoderConfig) -> dict[str, int]:
    """Return the arrays of layers with experts: the scores of each, and the results of those that a row uses."""
    found = [layer.mlp for layer in config.layers if isinstance(layer.mlp, Experts)]
    if not found:
        return {}
    return {
        "scores": max(of.count for of in found), "results": max(of.used for of in found) * config.hidden_size,
    }  # fmt: skip


def learned_positions(of: Embedding) -> int:
    """Return the rows of a table of learned positions; 0 = there is none."""
    return 0 if of.sinusoids else of.positions or 0


def layer_norms(layer: Layer) -> dict[str, Norm]:
    """Return the norms that a layer has on the residual stream's width, by the names of their modules."""
    found = {
        BEFORE_ATTENTION: layer.before_attention,
        AFTER_ATTENTION: layer.after_attention,
        END_ATTENTION: layer.end_attention,
        BEFORE_CROSS: layer.before_cross,
        END_CROSS: layer.end_cross,
        BEFORE_MLP: layer.before_mlp,
        AFTER_MLP: layer.after_mlp,
        END_MLP: layer.end_mlp,
    }
    return {name: norm for name, norm in found.items() if norm}


def _layer(layer: Layer, hidden: int) -> Shapes:
    """Return a layer's tensors."""
    found = {}
    if layer.attention:
        found = {SELF + name: shape for name, shape in _attention(layer.attention, hidden).items()}
    if layer.state:
        found = {STATE + name: shape for name, shape in _state(layer.state, hidden).items()}
    if layer.cross:
        found |= {CROSS + name: shape for name, shape in _attention(layer.cross, hidden).items()}
    found |= _mlp(layer.mlp, hidden)
    for name, norm in layer_norms(layer).items():
        found |= _norm(name, norm, hidden)
    if layer.token_inputs:
        found |= {TOKEN_INPUTS + name: shape for name, shape in _token_inputs(layer.token_inputs, hidden).items()}
    if layer.scaled:
        found[SCALE] = (1,)
    return found


def _embedding(beginning: str, of: Embedding) -> Shapes:
    """Return the tensors of embeddings besides the table of tokens."""
    rows = learned_positions(of)
    found: Shapes = {f"{beginning}{POSITIONS}.weight": (rows, of.hidden_size)} if rows else {}
    return found | (_norm(beginning + EMBEDDING_NORM, of.norm, of.hidden_size) if of.norm else {})


def _norm(name: str, norm: Norm, width: int) -> Shapes:
    kinds = (*(["weight"] if norm.scaled else []), *(["bias"] if norm.bias else []))
    return {f"{name}.{kind}": (width,) for kind in kinds}


def _token_inputs(of: TokenInputs, hidden: int) -> Shapes:
    """Return the tensors of a layer's inputs, except for its table."""
    matrices: Shapes = {
        "projection.weight": (of.size, hidden),
        "gate_proj.weight": (of.size, hidden),
        "out_proj.weight": (hidden, of.size),
    }
    return matrices | _norm("norm", of.norm, of.size) | _norm("output_norm", of.norm, hidden)


def _attention(of: Attention, hidden: int) -> Shapes:
    found: Shapes = {"o_proj.weight": (hidden, of.query_size)}
    own = [("q", of.query_size), ("k", of.key_size), ("v", of.key_size)][: 3 if of.own_kv_heads else 1]
    own += [("gate", of.query_size)] if of.gated else []
    for name, size in own:
        found[f"{name}_proj.weight"] = (size, hidden)
        if of.bias:
            found[f"{name}_proj.bias"] = (size,)
    if of.output_bias:
        found["o_proj.bias"] = (hidden,)
    if of.distances and of.distances.shares is None:
        found[DISTANCES] = (of.distances.buckets, of.heads)
    if of.sinks:
        found["sinks"] = (of.heads,)
    if of.qk_norm:
        for name, size in zip("qk"[: 2 if of.own_kv_heads else 1], of.normed_sizes, strict=False):
            found |= _norm(f"{name}_norm", of.qk_norm, size)
    if of.value_norm and of.own_kv_heads:
        found |= _norm("v_norm", of.value_norm, of.head_dim)
    return found


def _state(of: State, hidden: int) -> Shapes:
    found: Shapes = {f"{name}.weight": (size, hidden) for name, size in of.projections.items()}
    found |= {"conv1d.weight": (of.width, 1, of.conv), "out_proj.weight": (hidden, of.size)}
    if of.bias:
        found |= {f"{name}.bias": (size,) for name, size in (*of.projections.items(), ("out_proj", hidden))}
    if of.conv_bias:
        found["conv1d.bias"] = (of.width,)
    for name in ("A_log", "dt_bias", *([] if of.steps is None else ["D"])) if of.heads else ():
        found[name] = (of.heads,)
    return found | (_norm("norm", of.norm, of.normed_size) if of.norm else {})


def _mlp(of: Mlp | Experts, hidden: int) -> Shapes:
    if isinstance(of, Experts):
        return _experts(of, hidden)
    inner = ("gate", "up") if of.gated else ("up",)
    found: Shapes = {f"mlp.{name}_proj.weight": (of.size, hidden) for name in inner}
    found["mlp.down_proj.weight"] = (hidden, of.size)
    if of.bias:
        found |= {f"mlp.{name}_proj.bias": (of.size,) for name in inner}
        found["mlp.down_proj.bias"] = (hidden,)
    return found


def _experts(of: Experts, hidden: int) -> Shapes:
    found: Shapes = {"mlp.router.weight": (of.count, hidden)}
    if of.bias:
        found["mlp.router.bias"] = (of.count,)
    if of.favours:
        found["mlp.expert_bias"] = (of.count,)
    if of.shared:
        found |= {name.replace("mlp.", SHARED): shape for name, shape in _mlp(of.shared, hidden).items()}
    if of.shared_gate:
        found[SHARED_GATE] = (1, hidden)
    one = {name.removeprefix("mlp."): shape for name, shape in _mlp(Mlp(of.size, of.bias), hidden).items()}
    return found | {f"{EXPERT}{index}.{name}": shape for index in range(of.count) for name, shape in one.items()}
