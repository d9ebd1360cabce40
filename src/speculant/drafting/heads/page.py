"""Heads that are decoder layers (models/heads.py), each kind as a page of data: names, states, norms and arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from speculant.drafting.base import DrafterContext
from speculant.drafting.heads.folder import HeadFolder, Renamed, renamed, require_target
from speculant.drafting.heads.hidden import Encode, HiddenDrafter, HiddenStateRunner
from speculant.drafting.topology import growing_tree_option
from speculant.errors import ModelError, PairError
from speculant.kernels import rms_norm
from speculant.models import (
    CausalLM,
    DecoderConfig,
    Head,
    HeadConfig,
    Layer,
    Mapped,
    StateEntry,
    TensorMap,
    attach,
    flag,
    head_shapes,
    is_whole,
    linears_of,
    read_attention,
    read_decoder,
    read_description,
    read_mlp,
    read_norm,
    read_windows,
    show,
    stored_name,
    stored_shape,
    text_config,
    usual_taps,
    windowed,
    with_name,
)

LAYER_KEYS = ("transformer_layer_config", "model")  # of config.json, whose value has the layers' sizes
ENCODER = "encoder.weight"  # the matrix that maps the states of several layers to one, fc in the files
ENCODER_NORM = "encoder.norm"
TOKEN_MAPS = ("d2t", "t2d")
NO_TENSORS: Mapping[str, tuple[int, ...]] = MappingProxyType({})


def last_state(folder: HeadFolder, target: CausalLM) -> tuple[int, ...]:
    """Return the layers of a head that reads the states after the target's final norm."""
    return (target.num_layers + 1,)


def newest(hidden: Sequence[Tensor]) -> Tensor:
    """Return the input of a head that reads one layer."""
    return hidden[0]


Sizes = Callable[[Mapping[str, Any], Collection[str], CausalLM], DecoderConfig]  # of config.json, names and a target


@dataclass(frozen=True, eq=False)
class HeadPage:
    """A kind of head.

    kind: the method. entry: how a state enters the layers. rename: from a file's name of a tensor to the model's; None
    = it is not the model's. layers: the target's layers whose states it reads. sizes: reads the description of its
    layers from config.json. describe: completes it, and raises SpeculantError for a head of another target. flags:
    fields of `HeadConfig`. norms: names and shapes of the norms beside the matrix that maps several layers' states to
    one, for states of a width; None = it reads one layer and has no such matrix. norm_after: they come after the
    matrix.
    """

    kind: str
    entry: StateEntry
    rename: Callable[[str], str | None]
    layers: Callable[[HeadFolder, CausalLM], tuple[int, ...]] = last_state
    describe: Callable[[DecoderConfig, Renamed, CausalLM], DecoderConfig] = lambda sizes, weights, target: sizes
    flags: Callable[[Renamed], Mapping[str, bool]] = lambda weights: {}
    norms: Callable[[HeadFolder, CausalLM, int], dict[str, tuple[int, ...]]] | None = None
    norm_after: bool = False
    sizes: Sizes | None = None  # None = `read_sizes`


def load_head(
    page: HeadPage,
    folder: HeadFolder,
    target: CausalLM,
    beside: Mapping[str, tuple[int, ...]] = NO_TENSORS,
    weights: Renamed | None = None,
    head: Head | None = None,
) -> tuple[CausalLM, Encode]:
    """Read a head, and its map from the states of layers to one; raises SpeculantError for one that does not fit.

    beside: names and shapes of its other tensors. weights: its tensors; None = read from the folder. head: its output
    head, whose rows are among the weights; None = as described.
    """
    weights = weights or renamed(folder, page.rename)
    names = weights.names()
    sizes = page.describe((page.sizes or read_sizes)(folder.config, names, target), weights, target)
    config = HeadConfig(
        sizes if head is None else replace(sizes, head=head),
        page.entry,
        fc_bias="fc.bias" in names,
        own_table="embed_tokens" in names,
        own_head="lm_head.weight" in names,
        **page.flags(weights),
    )
    encode, others = newest, dict(beside)
    if page.norms is not None:
        check_shared(folder, config, target)
        norms = page.norms(folder, target, sizes.hidden_size)
        others |= {ENCODER: (sizes.hidden_size, len(page.layers(folder, target)) * target.hidden_size), **norms}
    shapes, made = head_shapes(config, target), sizes.tensors.expression
    stored = {stored_name(made(name)): stored_shape(made(name), shape) for name, shape in shapes.items()}
    weights.check({**stored, **others}, page.kind)
    model = attach(target, config, Mapped(weights, shapes, sizes.tensors))
    return model, encode if page.norms is None else encoder(page, weights, target, [*norms], sizes.norm.eps)


def build_head(page: HeadPage, context: DrafterContext, tree: Any) -> HiddenDrafter:
    """Load a head and return its drafter; raises SpeculantError for one that does not fit the target."""
    target = require_target(context.target.model)
    folder = HeadFolder.open(str(context.model), page.kind)
    layers = page.layers(folder, target)
    model, encode = load_head(page, folder, target)
    return make_head_drafter(context, model, layers, encode, tree)


def make_head_drafter(
    context: DrafterContext, model: CausalLM, layers: tuple[int, ...], encode: Encode, tree: Any
) -> HiddenDrafter:
    """Return the drafter of a head, with a cache of its own; see `HiddenDrafter`."""
    runner, topology = HiddenStateRunner.of(context, model, encode=encode), growing_tree_option(context, tree)
    of = require_target(context.target.model)
    return HiddenDrafter(runner, layers, of.vocab_size, context.target.sampler, topology)


def read_sizes(config: Mapping[str, Any], names: Collection[str], target: CausalLM) -> DecoderConfig:
    """Read the layers' sizes. The tensors' names show which biases there are; the vocabulary is the target's."""
    filled = layer_entries(config, names, target)
    norm, windows = read_norm(filled), read_windows(filled)
    attention = read_attention(
        filled,
        bias="layers.0.self_attn.q_proj.bias" in names,
        output_bias="layers.0.self_attn.o_proj.bias" in names,
        qk_norm=norm if "layers.0.self_attn.q_norm.weight" in names else None,
    )
    layer = Layer(attention, read_mlp(filled, bias="layers.0.mlp.up_proj.bias" in names), norm, norm)
    most = read_decoder(filled, [layer]).max_positions
    return read_decoder(filled, windowed(layer, _windows(windows, most, target.max_positions)))


def sizes_of_family(config: Mapping[str, Any], names: Collection[str], target: CausalLM) -> DecoderConfig:
    """Describe a layer like the last one with attention of the model that config.json describes, whose family reads it.

    Its tensors are made of stored ones as those of the model's layers are.
    """
    decoder = read_description({**text_config(config), "vocab_size": target.vocab_size})
    layer = next((each for each in reversed(decoder.layers) if each.attention), None)
    if layer is None:
        raise ModelError("config.json describes no layer with attention, as the head's must be like", "correct it.")
    windows = _windows([layer.window], decoder.max_positions, target.max_positions)
    tensors = [(_in_head(name), with_name(made, _in_head)) for name, made in decoder.tensors.names]
    own = TensorMap(tuple(tensors)).unstacked(names)
    return replace(decoder, layers=tuple(windowed(layer, windows)), tensors=own)


def _in_head(name: str) -> str:
    return name.removeprefix("model.")


# Heads for multi-token prediction in Qwen's form.

QWEN, QWEN_COUNT = "mtp.", "mtp_num_hidden_layers"  # begins the names of tensors; a key of config.json


def describe_qwen(config: Mapping[str, Any], names: Collection[str], target: CausalLM) -> DecoderConfig:
    """Describe the layer of Qwen's head, from config.json; see `sizes_of_family`."""
    return _with_offset(sizes_of_family(config, names, target))


def _with_offset(sizes: DecoderConfig) -> DecoderConfig:
    """Return the sizes with norms whose stored scales are those minus one."""
    norm = replace(sizes.norm, offset=1.0)
    layers = [
        replace(layer.attending(qk_norm=sizes.attention.qk_norm and norm), before_attention=norm, before_mlp=norm)
        for layer in sizes.layers
    ]
    return replace(sizes, norm=norm, layers=tuple(layers))


def name_in_qwen(name: str) -> str:
    """Return Qwen's name of a tensor of the model, whose layer is one; the inverse of `rename` in mtp.py."""
    part, _, kind = name.rpartition(".")
    own = {"token_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden"}
    return f"{QWEN}{own.get(part, part)}.{kind}"


def layer_entries(config: Mapping[str, Any], names: Collection[str], target: CausalLM) -> dict[str, Any]:
    """Return the entries of config.json on the layers, with the number of layers that have tensors."""
    inner = next((config[key] for key in LAYER_KEYS if key in config), config)
    if not isinstance(inner, dict):
        raise ModelError(
            f"config.json has a {' or '.join(LAYER_KEYS)} that is no object, but {show(inner)}", "correct config.json."
        )
    layers = {int(name.split(".")[1]) for name in names if name.startswith("layers.") and name.split(".")[1].isdigit()}
    stated = {key: value for key, value in inner.items() if value is not None}
    filled = {"max_position_embeddings": target.max_positions, **stated}
    return filled | {"vocab_size": target.vocab_size, "num_hidden_layers": max(len(layers), 1)}


def _windows(own: Sequence[int | None], trained: int, needed: int) -> tuple[int | None, ...]:
    """Return the sliding windows of the layers of a head that was trained for fewer positions than the target.

    Rotary positions are relative. So a row that attends to the last `trained` rows alone is computed as if the text
    began with the first of them, and a head also drafts beyond the positions that it was trained for.
    """
    if trained >= needed:
        return tuple(own)
    return tuple(trained if window is None else min(window, trained) for window in own)


def with_own_head(sizes: DecoderConfig, weights: Renamed, target: CausalLM) -> DecoderConfig:
    """Return a description with the head's own output head, if its files have one, for the tokens that they name."""
    tokens = read_tokens(weights.source, target)
    return sizes.with_head(tokens if "lm_head.weight" in weights.names() else ())


def read_tokens(folder: HeadFolder, target: CausalLM) -> tuple[int, ...]:
    """Return the target's id of each token of the head's output head; () = all, in order. Raises PairError."""
    if "d2t" not in folder.names():
        return ()
    offsets = folder.read("d2t").long()
    tokens = (offsets + torch.arange(len(offsets))).tolist()
    folder.check_tokens("d2t", tokens, target)
    return tuple(tokens)


def check_shared(folder: HeadFolder, config: HeadConfig, target: CausalLM) -> None:
    """Check that a head that uses the target's embedding or output head has states of their width."""
    size = config.decoder.hidden_size
    if size != target.hidden_size and not (config.own_table and config.own_head):
        raise PairError(
            f"the head in {folder.folder} has states of {size} and no embedding or output head of its own,"
            f" and the target's are of {target.hidden_size}",
            "use a head that was trained for this target.",
        )


def encoder(page: HeadPage, weights: Renamed, target: CausalLM, norms: Sequence[str], eps: float) -> Encode:
    """Return the map from the states of layers, [n, hidden] each, to one; norms: none, one of all, or one of each."""
    of = target.cache_shape
    matrix, *scales = (weights.read(name).to(of.device, of.dtype) for name in (ENCODER, *norms))
    multiply = linears_of(target, [matrix])

    def normed(states: Tensor) -> Tensor:
        parts = zip(states.chunk(max(1, len(scales)), dim=-1), scales, strict=False)
        return torch.cat([rms_norm(*pair, eps) for pair in parts], dim=-1) if scales else states

    def encode(hidden: Sequence[Tensor]) -> Tensor:
        states = torch.cat(tuple(hidden), dim=-1)
        return normed(multiply(states[None])[0]) if page.norm_after else multiply(normed(states)[None])[0]

    return encode


# Heads that read the states of three layers (arXiv 2503.01840).

NUM_STATES = 3
LAYERS = "eagle_aux_hidden_state_layer_ids"
RENAMED: Mapping[str, str | None] = {
    "fc.weight": ENCODER, "input_norm.weight": f"{ENCODER_NORM}.weight",
    **{f"fc_norm.{place}.weight": f"{ENCODER_NORM}.{place}.weight" for place in range(NUM_STATES)},
    "embed_tokens.weight": "embed_tokens", **dict.fromkeys(TOKEN_MAPS),
    "midlayer.hidden_norm.weight": "hidden_norm.weight", "layers.0.hidden_norm.weight": "hidden_norm.weight",
}  # fmt: skip


def three_layers(folder: HeadFolder, target: CausalLM) -> tuple[int, ...]:
    """Return the target's layers whose inputs the head takes in: as in config.json, else 2, L // 2 and L - 3."""
    named, size = named_layers(folder), target.num_layers
    layers = list(usual_taps(size)) if named is None else named
    if (
        not isinstance(layers, list)
        or len(layers) != NUM_STATES
        or not all(is_whole(layer) and 0 <= layer <= size for layer in layers)
    ):
        raise PairError(
            f"the head in {folder.folder} takes in the layers {show(layers)}, and the target has 0 to {size}",
            f"use a head of this target, or name its three layers as {LAYERS} in config.json.",
        )
    return tuple(layers)


def named_layers(folder: HeadFolder) -> Any:
    """Return the layers that config.json names; None = it names none."""
    eagle, named = folder.config.get("eagle_config"), folder.config.get(LAYERS)
    return eagle.get(LAYERS) if named is None and isinstance(eagle, dict) else named


def require_named_layers(folder: HeadFolder) -> None:
    """Check that the layers do not depend on how many the target has. Raises ModelError."""
    if named_layers(folder) is None:
        raise ModelError(
            f"config.json in {folder.folder} does not name the target's layers whose inputs the head takes in",
            f"add them as {LAYERS}: 2, L // 2 and L - 3 of the L layers of its target.",
        )


def norms_before(folder: HeadFolder, target: CausalLM, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the norms before the three states are mapped. Raises ModelError for both kinds."""
    of_all, of_each = (flag(folder.config, key) for key in ("norm_before_fc", "fc_norm"))
    if of_all and of_each:
        raise ModelError(
            f"config.json in {folder.folder} has norm_before_fc and fc_norm, which exclude one another",
            "set the one that the head was trained with.",
        )
    if of_all:
        return {f"{ENCODER_NORM}.weight": (NUM_STATES * target.hidden_size,)}
    return {f"{ENCODER_NORM}.{place}.weight": (target.hidden_size,) for place in range(NUM_STATES * of_each)}


def rename_three(name: str) -> str | None:
    """Return the model's name of a tensor."""
    if name in RENAMED:
        return RENAMED[name]
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def three_states(kind: str) -> HeadPage:
    """Return the page of a kind of head that reads the states of three layers."""
    return HeadPage(
        kind,
        StateEntry.ATTENTION,
        rename_three,
        three_layers,
        with_own_head,
        lambda weights: {key: flag(weights.source.config, key) for key in ("norm_before_residual", "norm_output")},
        norms_before,
    )
