"""Small random heads on disk, and a wrapper that gives a drafter the hidden states that it reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculant.cache import KVCache, Source, paged_cache, slotted_cache
from speculant.drafting import Drafter, DrafterContext, StatelessDrafter
from speculant.models import CausalLM, SequenceInput, build_batch, encode_sources
from speculant.types import CommittedRows, DraftTree, Request
from tests.fakes import drafter_context
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Shape, write_checkpoint

LAYER = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256,
}  # fmt: skip


def write_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = "model") -> str:
    """Write a head; return its folder as text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / f"{file}.safetensors")
    return str(folder)


def head_context(folder: str, target: CausalLM, options: Mapping[str, Any]) -> DrafterContext:
    """Return the context that a head's drafter is built from."""
    make_cache = partial(paged_cache, num_blocks=64, block_size=4)
    return drafter_context(target.vocab_size, options, folder, make_cache=make_cache, target=target)


class Random:
    """Tensors of normal numbers, the same for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return a matrix whose product with a state of unit size is of unit size."""
        return torch.randn(shape, generator=self._generator) * scale / shape[-1] ** 0.5

    def norm(self, size: int) -> Tensor:
        """Return a norm's scales."""
        return 1 + 0.1 * torch.randn(size, generator=self._generator)


def medusa_tensors(
    hidden: int, heads: int = 3, layers: int = 1, own: int | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Return tensors as on the hub; own: the vocabulary of the heads' own output heads."""
    random, found = Random(seed), dict[str, Tensor]()
    for head in range(heads):
        for layer in range(layers):
            found[f"{head}.{layer}.linear.weight"] = random.matrix(hidden, hidden)
            found[f"{head}.{layer}.linear.bias"] = random.matrix(hidden)
        if own:
            found[f"{head}.{layers}.weight"] = random.matrix(own, hidden, scale=3.0)
    return found


def write_medusa(folder: Path, hidden: int, vocab_size: int, own: bool = False, **sizes: int) -> str:
    """Write a head of residual blocks."""
    config = {"medusa_num_heads": sizes.get("heads", 3), "medusa_num_layers": sizes.get("layers", 1)}
    return write_head(folder, config, medusa_tensors(hidden, own=vocab_size if own else None, **sizes))


def write_blockwise(folder: Path, hidden: int, vocab_size: int, heads: int = 3, inner: int = 24, seed: int = 0) -> str:
    """Write a head of feed-forward blocks."""
    random, found = Random(seed), dict[str, Tensor]()
    for head in range(heads):
        found |= {
            f"heads.{head}.up.weight": random.matrix(inner, hidden),
            f"heads.{head}.up.bias": random.matrix(inner),
            f"heads.{head}.down.weight": random.matrix(hidden, inner),
            f"heads.{head}.down.bias": random.matrix(hidden),
        }
    config = {"num_heads": heads, "inner_size": inner, "hidden_size": hidden, "vocab_size": vocab_size}
    return write_head(folder, config, found)


def layer_tensors(random: Random, prefix: str, hidden: int, width: int, sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a decoder layer's tensors without its first norm; width: of what attention reads."""
    queries = sizes["num_attention_heads"] * sizes["head_dim"]
    keys = sizes["num_key_value_heads"] * sizes["head_dim"]
    inner = sizes["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (queries, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    found = {f"{prefix}{name}.weight": random.matrix(*shape) for name, shape in shapes.items()}
    return {**found, f"{prefix}post_attention_layernorm.weight": random.norm(hidden)}


def write_eagle(folder: Path, hidden: int, vocab_size: int, bias: bool = True, seed: int = 0, **sizes: Any) -> str:
    """Write a head as EAGLE has it on the hub."""
    config = {**LAYER, "model_type": "llama", "hidden_size": hidden, "vocab_size": vocab_size, "bias": bias, **sizes}
    random = Random(seed)
    found = {
        "fc.weight": random.matrix(hidden, 2 * hidden),
        **layer_tensors(random, "layers.0.", hidden, hidden, config),
    }
    if bias:
        found["fc.bias"] = random.matrix(hidden)
    return write_head(folder, {**config, "num_hidden_layers": 1}, found)


def write_eagle3(
    folder: Path,
    hidden: int,
    vocab_size: int,
    *,
    draft_vocab: int | None = None,
    own: bool = True,
    prefix: str = "midlayer.",
    seed: int = 0,
    **config: Any,
) -> str:
    """Write a head as EAGLE-3 has it on the hub; draft_vocab: tokens of its own output head, None = all."""
    sizes = {**LAYER, "hidden_size": hidden, "vocab_size": vocab_size, "draft_vocab_size": draft_vocab or vocab_size}
    sizes |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, **config}
    random = Random(seed)
    found = {
        "fc.weight": random.matrix(hidden, 3 * hidden),
        **({"input_norm.weight": random.norm(3 * hidden)} if config.get("norm_before_fc") else {}),
        **({f"fc_norm.{place}.weight": random.norm(hidden) for place in range(3)} if config.get("fc_norm") else {}),
        f"{prefix}hidden_norm.weight": random.norm(hidden),
        f"{prefix}input_layernorm.weight": random.norm(hidden),
        "norm.weight": random.norm(hidden),
        **layer_tensors(random, prefix, hidden, 2 * hidden, sizes),
    }
    if own:
        found["lm_head.weight"] = random.matrix(draft_vocab or vocab_size, hidden)
    if draft_vocab is not None:
        known = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:draft_vocab].sort().values
        found["d2t"] = known - torch.arange(draft_vocab)
        found["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, known, True)
    return write_head(folder, {"model_type": "llama", **sizes, "num_hidden_layers": 1}, found)


def write_peagle(folder: Path, hidden: int, vocab_size: int, seed: int = 0, **config: Any) -> str:
    """Write a P-EAGLE head: an EAGLE-3 head with the state of a mask."""
    write_eagle3(folder, hidden, vocab_size, seed=seed, **{"ptd_token_id": 3, **config})
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "mask_hidden": Random(seed + 1).matrix(1, 3 * hidden)[None]}, folder / "model.safetensors")
    return str(folder)


def write_dflash(folder: Path, hidden: int, vocab_size: int, num_layers: int = 2, seed: int = 0, **config: Any) -> str:
    """Write a DFlash head as its authors do."""
    sizes = {**LAYER, "hidden_size": hidden, "vocab_size": vocab_size, "block_size": 5, "model_type": "qwen3"}
    sizes |= {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1]}, **config}
    sizes, random = {key: value for key, value in sizes.items() if value is not None}, Random(seed)
    found = {
        "fc.weight": random.matrix(hidden, 2 * hidden),
        "hidden_norm.weight": random.norm(hidden),
        "norm.weight": random.norm(hidden),
    }
    for layer in range(num_layers):
        prefix = f"layers.{layer}."
        found |= {f"{prefix}input_layernorm.weight": random.norm(hidden)}
        found |= {f"{prefix}self_attn.{name}_norm.weight": random.norm(sizes["head_dim"]) for name in "qk"}
        found |= layer_tensors(random, prefix, hidden, hidden, sizes)
    return write_head(folder, {**sizes, "num_hidden_layers": num_layers}, found)


_OF_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
MTP_NAMES = {
    "speculators": ("mtp_layers.{}.", "mtp_layers.{}.", _OF_MIMO),
    "mimo": ("model.mtp_layers.{}.", "model.mtp_layers.{}.", _OF_MIMO),
    "qwen": ("mtp.", "mtp.layers.{}.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
    "deepseek": ("model.layers.{}.", "model.layers.{}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
}  # fmt: skip


def write_mtp(
    folder: Path, hidden: int, vocab_size: int, form: str = "speculators", num_layers: int = 2, seed: int = 0,
    modules: int = 1, gated: bool = False, **config: Any,
) -> str:  # fmt: skip
    """Write a head for multi-token prediction, in a form of its publishers; num_layers: the target's.

    gated: its attention is that of Qwen3.5.
    """
    sizes = {**LAYER, "model_type": "llama", "hidden_size": hidden, "vocab_size": vocab_size, **config}
    sizes = {"num_hidden_layers": num_layers, **sizes}
    config = {"speculators_model_type": "mtp", "transformer_layer_config": sizes} if form == "speculators" else sizes
    stored, random = dict[str, Tensor](), Random(seed)
    for module in range(modules):
        place = module + num_layers * (form == "deepseek")
        outer, inner, names = MTP_NAMES[form]
        outer, inner = outer.format(place), inner.format(place)
        of_e, of_h = random.matrix(hidden, 2 * hidden).chunk(2, dim=1)
        values = (
            random.norm(hidden),
            random.norm(hidden),
            torch.cat((of_h, of_e) if form == "mimo" else (of_e, of_h), 1),
        )
        found = {
            f"{outer}{name}.weight": each for name, each in zip(names, (*values, random.norm(hidden)), strict=True)
        }
        found[f"{inner}input_layernorm.weight"] = random.norm(hidden)
        found |= layer_tensors(random, inner, hidden, hidden, sizes)
        if gated:
            queries = found[f"{inner}self_attn.q_proj.weight"]
            found[f"{inner}self_attn.q_proj.weight"] = random.matrix(2 * len(queries), hidden)
            found |= {f"{inner}self_attn.{name}_norm.weight": random.norm(sizes["head_dim"]) for name in "qk"}
        own = {name: each - float(form == "qwen" and "norm" in name) for name, each in found.items()}
        stored = {**own, **stored}  # the first module's, where modules share tensors
    return write_head(folder, config, stored)


QWEN35: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}  # fmt: skip


QWEN35_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40,
}  # fmt: skip


def write_with_head(folder: Path, form: str = "qwen3_5", **shape: Any) -> str:
    """Write a checkpoint with a head for multi-token prediction among its weights; shape: see `Shape`.

    form: of its names, in a Llama's files; or the family Qwen3.5, perhaps with experts, which the head has too.
    """
    hybrid = form.startswith("qwen3_5")
    settings = {**QWEN35, **(QWEN35_EXPERTS if form == "qwen3_5_moe" else {})}
    settings = settings if hybrid else {"num_nextn_predict_layers": 1}
    own = {"family": f"{form}_text", "layers": 3} if hybrid else {"layers": 2}
    target = write_checkpoint(folder / "target", Shape(**own, **shape, settings=tuple(settings.items())))
    inner = {"intermediate_size": 2 * HIDDEN_SIZE, "gated": hybrid}
    head = write_mtp(folder / "head", HIDDEN_SIZE, VOCAB_SIZE, "qwen" if hybrid else form, own["layers"], **inner)
    stored = [load_file(f"{each}/model.safetensors") for each in (target, head)]
    if form == "qwen3_5_moe":
        layer, mine = "model.layers.1.", "mtp.layers.0."
        stored[1] = {name: each for name, each in stored[1].items() if ".mlp." not in name}
        stored[1] |= {
            name.replace(layer, mine): each.flip(0) for name, each in stored[0].items() if f"{layer}mlp." in name
        }
    save_file({**stored[0], **stored[1]}, f"{target}/model.safetensors")
    return target


def write_pass(folder: Path, hidden: int, vocab_size: int, count: int = 3) -> str:
    """Write look-ahead embeddings: unit vectors, which table models take for tokens."""
    inputs = torch.eye(hidden)[[(place + 1) % min(hidden, vocab_size) for place in range(count)]]
    config = {"num_look_ahead": count, "hidden_size": hidden, "vocab_size": vocab_size}
    return write_head(folder, config, {"look_ahead.weight": inputs})


WRITERS = {
    "medusa": write_medusa,
    "blockwise": write_blockwise,
    "eagle": write_eagle,
    "eagle3": write_eagle3,
    "peagle": write_peagle,
    "dflash": write_dflash,
    "mtp": write_mtp,
    "pass": write_pass,
}


class Shown(StatelessDrafter):
    """A drafter that observes states of a fresh pass over the committed tokens. One without states stays as it is."""

    def __init__(self, drafter: Drafter, target: CausalLM, source: Sequence[int] = ()) -> None:
        self.drafter, self._target, self._source = drafter, target, source
        self.needs, self.caches = drafter.needs, drafter.caches
        self._seen: dict[int, int] = {}

    def begin(self, request: Request) -> None:
        self.drafter.begin(request)
        self._seen[request.seq_id] = 0

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        for request in requests:
            self._show(request)
        return self.drafter.propose(requests, limits)

    def catch_up(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._show(request)
        self.drafter.catch_up(requests)

    def observe(self, request: Request, rows: CommittedRows) -> None:
        self._show(request)

    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        self.drafter.roll_back(request, dropped)

    def end(self, request: Request) -> None:
        self.drafter.end(request)

    def _show(self, request: Request) -> None:
        start, end = self._seen[request.seq_id], len(request.tokens) - request.num_drafted - 1
        if start < end and request.search is None:
            rows = fresh_rows(self.drafter, self._target, request.tokens[:end], start, self._source)
            self.drafter.observe(request, rows)
            self._seen[request.seq_id] = end


def fresh_rows(
    drafter: Drafter, target: CausalLM, tokens: Sequence[int], start: int = 0, source: Sequence[int] = ()
) -> CommittedRows:
    """Return the rows, from `start` on, that a drafter observes of a fresh pass over a text."""
    states = fresh_states(target, tokens, drafter.needs.hidden_layers, source)
    inputs: Tensor | None = getattr(drafter, "inputs", None)
    if inputs is not None:
        states = (torch.cat((*states, fresh_ahead(target, tokens, inputs, source))),)
    return CommittedRows(start, tokens[start:], (), tuple(each[start:] for each in states))


def fresh_cache(target: CausalLM, length: int, source: Sequence[int]) -> tuple[KVCache, int | None]:
    """Make a cache for a text; return it with the sequence of its source, which is encoded; None = it has none."""
    if not source:
        return slotted_cache(target.cache_shape, 1, length), None
    cache = slotted_cache(target.cache_shape, 2, max(length, len(source)))
    encode_sources(target, cache, [Source(-1, tuple(source))])
    return cache, -1


@torch.inference_mode()
def fresh_ahead(target: CausalLM, tokens: Sequence[int], inputs: Tensor, source: Sequence[int] = ()) -> Tensor:
    """Return the states [k, hidden] of a chain of rows with own inputs [k, hidden] behind a text, of a pass alone."""
    (cache, own_source), first = fresh_cache(target, len(tokens) + len(inputs), source), len(tokens)
    tree = DraftTree.chain([0] * len(inputs))
    own = {first + row: each for row, each in enumerate(inputs)}
    row = SequenceInput(0, tokens, tree, own, source=own_source)
    batch = build_batch([row], cache, target.cache_shape.device)
    return target.forward(batch, cache.storage).last[first:]


@torch.inference_mode()
def fresh_states(
    target: CausalLM, tokens: Sequence[int], layers: Sequence[int], source: Sequence[int] = ()
) -> tuple[Tensor, ...]:
    """Return the states [n, hidden] of layers, of a pass over a text alone."""
    cache, own_source = fresh_cache(target, len(tokens), source)
    row = SequenceInput(0, tokens, DraftTree.empty(), source=own_source)
    batch = build_batch([row], cache, target.cache_shape.device)
    taps = [layer for layer in layers if layer <= target.num_layers]
    hidden = target.forward(batch, cache.storage, taps)
    found = dict(zip(taps, hidden.taps, strict=True))
    return tuple(found.get(layer, hidden.last) for layer in layers)
