"""An attention function of transformers that keeps keys and values in a `KVStorage`.

It is registered under a name of its own. A model that calls attention by name then works on flat batches with trees:

    attention n of a pass   writes the rows' keys and values to layer n of the storage, and reads those of each segment
    mask                    the model's own rule over positions (causal, sliding, chunked), and the tree's ancestors

When a model is loaded, its results are tested (probe.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculant.cache import KVStorage
from speculant.errors import ModelError
from speculant.kernels import attend
from speculant.models.base import Batch
from speculant.models.reference.attention import context_slots, visible_keys

NAME = "speculant"  # of the attention function, among those of transformers
_HOLDER = "speculant_attention"  # the attribute of modules that has their `AttentionSwitch`
_PLAIN = frozenset(
    {"position_ids", "cache_position", "dropout", "sliding_window"}
)  # arguments that change nothing here
_FIX = "this is used to choose how a model runs; report it if you see it."


class KeyLayout(NamedTuple):
    """The keys and values of one attention: heads, and the widths of a key and of a value."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """How many numbers per position hold the keys, or the values, of all heads."""
        return self.heads * max(self.key_dim, self.value_dim)


@dataclass(frozen=True)
class MaskRule:
    """The mask that a model passes to attention: a rule over the positions of rows and keys, given as tensors."""

    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def __call__(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return which of the keys' positions [k] each row's position [n] may see: [n, k] bool."""
        first = rows.new_zeros(())
        return self.sees(first, first, rows[:, None], keys[None, :]).expand(len(rows), len(keys))


class ScoreRules(NamedTuple):
    """How scores are made of queries and keys. softcap None = no bound; sinks [heads] None = there are none."""

    scaling: float | None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionPass(Protocol):
    """One pass of a model; it is called once per attention, in order."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: MaskRule | None, scores: ScoreRules) -> Tensor:
        """Return the result [T, heads, value_dim] of queries [T, heads, key_dim] and of the rows' keys and values."""
        ...


class AttentionSwitch:
    """Connects the attention modules of one model with the pass that runs."""

    def __init__(self, model: nn.Module) -> None:
        self._running: AttentionPass | None = None
        for module in model.modules():
            setattr(module, _HOLDER, self)

    @contextmanager
    def on(self, running: AttentionPass) -> Iterator[None]:
        """Connect the model's attentions with a pass."""
        self._running = running
        try:
            yield
        finally:
            self._running = None

    @property
    def running(self) -> AttentionPass:
        """The pass that runs."""
        assert self._running is not None, "no pass runs"
        return self._running


@dataclass
class KeyRecorder:
    """A pass that records the layout of every attention, and computes nothing."""

    layouts: list[KeyLayout] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: MaskRule | None, scores: ScoreRules) -> Tensor:
        """See `AttentionPass.attend`; zeros."""
        self.layouts.append(KeyLayout(key.shape[1], key.shape[2], value.shape[2]))
        self.dtypes |= {key.dtype, value.dtype}
        return query.new_zeros(*query.shape[:2], value.shape[2])


class StoredPass:
    """A pass over a flat batch, with keys and values in a storage whose positions are `width` numbers wide."""

    def __init__(self, batch: Batch, storage: KVStorage, layouts: list[KeyLayout], width: int) -> None:
        self._batch, self._storage, self._layouts, self._width = batch, storage, layouts, width
        self._slots, self._layer = context_slots(batch), 0
        self._masks: dict[int, tuple[MaskRule | None, list[Tensor]]] = {}  # by the rule's id

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: MaskRule | None, scores: ScoreRules) -> Tensor:
        """See `AttentionPass.attend`."""
        layout = KeyLayout(key.shape[1], key.shape[2], value.shape[2])
        if self._layer >= len(self._layouts) or self._layouts[self._layer] != layout:
            raise ModelError("the attentions of a pass are not those of the pass before", _FIX)
        self._storage.write(self._layer, self._batch.slot_mapping, self._wide(key), self._wide(value))
        parts, out = query.split_with_sizes([segment.num_rows for segment in self._batch.segments]), list[Tensor]()
        for rows, slots, mask in zip(parts, self._slots, self._masks_of(rule), strict=True):
            keys, values = self._storage.read(self._layer, slots)
            out.append(attention(rows, _narrow(keys, layout, layout.key_dim), _narrow(values, layout, layout.value_dim),
                                 mask, scores))  # fmt: skip
        self._layer += 1
        return torch.cat(out)

    def _wide(self, rows: Tensor) -> Tensor:
        """Return keys or values [T, heads, dim] as [T, 1, width]."""
        flat = rows.flatten(1)
        return functional.pad(flat, (0, self._width - flat.shape[1]))[:, None]

    def _masks_of(self, rule: MaskRule | None) -> list[Tensor]:
        """Return the mask [rows, keys] of each segment."""
        if id(rule) not in self._masks:
            self._masks[id(rule)] = rule, self._make_masks(rule)
        return self._masks[id(rule)][1]

    def _make_masks(self, rule: MaskRule | None) -> list[Tensor]:
        masks, first = list[Tensor](), 0
        for segment in self._batch.segments:
            positions = self._batch.positions[first : first + segment.num_rows]
            mask = visible_keys(segment, positions, None)
            if rule is not None:
                before = torch.arange(segment.start, device=positions.device)
                mask = mask & rule(positions, torch.cat([before, positions]))
            masks.append(mask)
            first += segment.num_rows
        return masks


def _narrow(stored: Tensor, layout: KeyLayout, dim: int) -> Tensor:
    """Return keys or values [n, heads, dim] from the storage's [n, 1, width]."""
    return stored[:, 0, : layout.heads * dim].view(-1, layout.heads, dim)


def attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scores: ScoreRules) -> Tensor:
    """Attend with queries [n, heads, key_dim] to keys and values [k, kv_heads, ...] where the mask [n, k] is True.

    Returns [n, heads, value_dim]. Heads that share a key head are neighbours.
    """
    n, heads, dim = query.shape
    kv_heads, groups = keys.shape[1], heads // keys.shape[1]
    folded = query.reshape(n, kv_heads, groups, dim).permute(1, 2, 0, 3)  # [kv_heads, groups, n, dim]
    keys, values = (each.transpose(0, 1)[:, None].expand(-1, groups, -1, -1) for each in (keys, values))
    hidden = query.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
    sinks = None if scores.sinks is None else scores.sinks.to(query.dtype).reshape(kv_heads, groups, 1, 1)
    scale = dim**-0.5 if scores.scaling is None else scores.scaling
    out = attend(folded, keys, values, hidden, scale, scores.softcap, sinks)
    return out.permute(2, 0, 1, 3).reshape(n, heads, values.shape[-1])


def registered() -> str:
    """Register the attention function and its masks with transformers; return their name."""
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    masking: Any = importlib.import_module("transformers.masking_utils")
    modeling.ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    masking.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask_rule)
    return NAME


def _mask_rule(*, mask_function: Callable[..., Tensor], **_sizes: object) -> MaskRule:
    """Make a mask when transformers asks for one: a rule, because the sizes here are those of the flat batch."""
    return MaskRule(mask_function)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
) -> tuple[Tensor, None]:
    """Attend when transformers asks for it: tensors [1, heads, T, dim], and a result [1, T, heads, dim]."""
    if attention_mask is not None and not isinstance(attention_mask, MaskRule):
        raise ModelError("the model makes its attention masks itself", _FIX)
    running: AttentionPass = getattr(module, _HOLDER).running
    rows, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
    rule = _sliding(options) if attention_mask is None else attention_mask
    return running.attend(rows, keys, values, rule, _scores(options))[None], None


def _sliding(options: Mapping[str, Any]) -> MaskRule | None:
    """Return the rule of a model that names a window and makes no mask; None = it has no window."""
    window = options.get("sliding_window")
    return None if window is None else MaskRule(lambda _batch, _head, row, key: key > row - window)


def _scores(options: Mapping[str, Any]) -> ScoreRules:
    """Read the arguments of an attention. Raises ModelError for one that is unknown and has a value."""
    known = {"scaling", "softcap", "s_aux", *_PLAIN}
    unknown = sorted(name for name, value in options.items() if name not in known and _matters(value))
    if unknown:
        raise ModelError(f"its attention has the argument {', '.join(unknown)}", _FIX)
    return ScoreRules(options.get("scaling"), options.get("softcap"), options.get("s_aux"))


def _matters(value: object) -> bool:
    return value is not None and not isinstance(value, bool)
