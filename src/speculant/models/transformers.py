"""Models that the package transformers computes: slower than our kernels, but any of its causal language models.

They are loaded from safetensors alone; a checkpoint's code is never run. A model has two parts:

    body   the module that the model calls first, with the tokens: embedding, layers and the final norm
    head   all that the model does after it, such as the output matrix, a scale and a softcap

The body's module is found by running the model once. For the head, the model's own code runs with a body that returns
the given states, so its rules are not copied.

An attention function that keeps keys and values in a `KVStorage` is registered under a name of its own. A model that
calls attention by name then works on flat batches with trees:

    attention n of a pass   writes the rows' keys and values to layer n of the storage, and reads those of each segment
    mask                    the model's own rule over positions (causal, sliding, chunked), and the tree's ancestors

A probe chooses between this way and one without a cache. Two texts go through the cache: chunks, trees, a kept path, a
rollback and a longer text. Each row's logits are compared with those after the row's own text, which transformers
computes in one pass without a cache.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from speculant.cache import CacheShape, KVCache, KVStorage, paged_cache
from speculant.config import MODEL_BACKENDS
from speculant.errors import ConfigError, Converts, ModelError, suggest
from speculant.kernels import REFERENCE, Sampler, attend
from speculant.models.backends.base import AUTO, PLAIN
from speculant.models.base import (
    Batch,
    Chain,
    Hidden,
    ModelNeeds,
    RunsPasses,
    Segment,
    SequenceInput,
    build_batch,
    check_embeddings,
    check_taps,
    check_tokens,
)
from speculant.models.config import longest_context
from speculant.models.reference import context_slots, visible_keys
from speculant.models.vocabulary import TargetVocabulary
from speculant.types import DraftTree

logger = logging.getLogger(__name__)

ATTENTION = "speculant"  # of the attention function, among those of transformers
_HOLDER = "speculant_attention"  # the attribute of modules that has their `AttentionSwitch`
_PLAIN = frozenset(
    {"position_ids", "cache_position", "dropout", "sliding_window"}
)  # arguments that change nothing here
_REPORT = "this is used to choose how a model runs; report it if you see it."


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
class KeyRecorder(AttentionPass):
    """A pass that records the layout of every attention, and computes nothing."""

    layouts: list[KeyLayout] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: MaskRule | None, scores: ScoreRules) -> Tensor:
        """Zeros."""
        self.layouts.append(KeyLayout(key.shape[1], key.shape[2], value.shape[2]))
        self.dtypes |= {key.dtype, value.dtype}
        return query.new_zeros(*query.shape[:2], value.shape[2])


class StoredPass(AttentionPass):
    """A pass over a flat batch, with keys and values in a storage whose positions are `width` numbers wide."""

    def __init__(self, batch: Batch, storage: KVStorage, layouts: list[KeyLayout], width: int) -> None:
        self._batch, self._storage, self._layouts, self._width = batch, storage, layouts, width
        self._slots, self._layer = context_slots(batch), 0
        self._masks: dict[int, tuple[MaskRule | None, list[Tensor]]] = {}  # by the rule's id

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: MaskRule | None, scores: ScoreRules) -> Tensor:
        layout = KeyLayout(key.shape[1], key.shape[2], value.shape[2])
        if self._layer >= len(self._layouts) or self._layouts[self._layer] != layout:
            raise ModelError("the attentions of a pass are not those of the pass before", _REPORT)
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
    modeling.ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
    masking.ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _mask_rule)
    return ATTENTION


def _mask_rule(*, mask_function: Callable[..., Tensor], **_sizes: object) -> MaskRule:
    """Make a mask when transformers asks for one: a rule, because the sizes here are those of the flat batch."""
    return MaskRule(mask_function)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
) -> tuple[Tensor, None]:
    """Attend when transformers asks for it: tensors [1, heads, T, dim], and a result [1, T, heads, dim]."""
    if attention_mask is not None and not isinstance(attention_mask, MaskRule):
        raise ModelError("the model makes its attention masks itself", _REPORT)
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
        raise ModelError(f"its attention has the argument {', '.join(unknown)}", _REPORT)
    return ScoreRules(options.get("scaling"), options.get("softcap"), options.get("s_aux"))


def _matters(value: object) -> bool:
    return value is not None and not isinstance(value, bool)


_UNBOUNDED = 32768  # positions of a model whose config names no bound, such as a recurrent one
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_GROWING = ("dynamic", "longrope")  # rope whose angles depend on the length of the whole text


class TransformersNetwork:
    """A model of transformers in eval mode, and its sizes. Raises ModelError for one that has no body."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._config = model.config.get_text_config(decoder=True)
        tokens = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        with torch.inference_mode():
            self._body, self._made = _first_module(model, lambda: model(input_ids=tokens, use_cache=False))
            states = self.states(input_ids=tokens, use_cache=False)[0]
            self.hidden_size, self.vocab_size = states.shape[-1], self.logits(states[0]).shape[-1]

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        dtype: torch.dtype = next(each for each in self.model.parameters() if each.is_floating_point()).dtype
        return dtype

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return int(self._config.num_hidden_layers)

    @property
    def max_positions(self) -> int:
        """The longest context, in positions. It ends before rotary positions depend on the length of the text."""
        named = [getattr(self._config, name, None) for name in _POSITIONS]
        longest = next((int(value) for value in named if isinstance(value, int) and value > 0), _UNBOUNDED)
        rope = getattr(self._config, "rope_parameters", None) or getattr(self._config, "rope_scaling", None)
        return min([_extended(rope, self._config, longest), *growing_bounds(rope, self._config, longest)])

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings [k, hidden] of tokens [k]. Raises RequestError for an unknown token."""
        table = self.model.get_input_embeddings()
        check_tokens(tokens, table.weight.shape[0])
        embedded: Tensor = table(tokens)
        return embedded

    def states(self, taps: Sequence[int] = (), **inputs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the body on inputs in transformers' names. Returns the last states [b, n, hidden], and those of taps."""
        check_taps(taps, self.num_layers)
        output = self._body(**inputs, **({"output_hidden_states": True} if taps else {}))
        entering = (output.hidden_states or ()) if taps else ()
        if taps and (len(entering) != self.num_layers + 1 or max(taps) == self.num_layers):
            raise ConfigError(
                f"hidden states of the layers {', '.join(map(str, taps))} are asked for, and transformers returns none"
                " of some of them",
                f"use layers below {self.num_layers}, or a method that reads no hidden states of layers.",
            )
        return output.last_hidden_state, tuple(entering[tap] for tap in taps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [r, vocab_size] of hidden states [r, hidden]."""
        own = vars(self._body).get("forward")
        self._body.forward = lambda *_args, **_options: self._made(last_hidden_state=hidden[None])
        try:
            tokens = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits[0]
        finally:
            if own is None:
                del self._body.forward
            else:
                self._body.forward = own
        return logits

    def plain(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits [vocab_size] after a text, as transformers computes them in one pass without a cache."""
        inputs = torch.tensor([list(tokens)], device=self.device)
        logits: Tensor = self.model(input_ids=inputs, use_cache=False).logits[0, -1]
        return logits


def _first_module(model: nn.Module, run: Callable[[], object]) -> tuple[Any, type]:
    """Return the first module that a model calls by itself and that returns hidden states, and its output's type."""
    depth, found = [0], list[tuple[nn.Module, type]]()

    def enter(*_: object) -> None:
        depth[0] += 1

    def leave(module: nn.Module, _inputs: object, output: object) -> None:
        depth[0] -= 1
        if depth[0] == 0 and isinstance(getattr(output, "last_hidden_state", None), Tensor):
            found.append((module, type(output)))

    parts = [part for part in model.modules() if part is not model]
    hooks = [part.register_forward_pre_hook(enter) for part in parts]
    hooks += [part.register_forward_hook(leave) for part in parts]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        raise ModelError(
            f"{type(model).__name__} of transformers does not separate its layers from its output head",
            "use a model of another family.",
        )
    return found[0]


def _extended(rope: object, config: object, longest: int) -> int:
    """Return the context that a scaling extends; see `longest_context`."""
    if not isinstance(rope, Mapping):
        return longest
    original = getattr(config, "original_max_position_embeddings", None)
    entries = {"max_position_embeddings": longest, "rope_parameters": dict(rope)}
    by_kind = any(isinstance(each, Mapping) for each in rope.values())
    return longest_context({**entries, "original_max_position_embeddings": original}, by_kind)


def growing_bounds(rope: object, config: object, longest: int) -> list[int]:
    """Return up to how many positions angles do not depend on the text's length, for each growing kind of rope."""
    if not isinstance(rope, Mapping):
        return []
    kinds = [each for each in rope.values() if isinstance(each, Mapping)] or [rope]
    growing = [kind for kind in kinds if (kind.get("rope_type") or kind.get("type")) in _GROWING]
    named = [kind.get("original_max_position_embeddings") for kind in growing]
    usual = getattr(config, "original_max_position_embeddings", None) or longest
    return [int(each or usual) for each in named]


_OTHER_METHOD = "use a drafting method that reads tokens."


class TransformersDecoder(ABC, RunsPasses):
    """A `CausalLM`. how: how it runs, in words."""

    needs = ModelNeeds()
    how = ""

    def __init__(self, network: TransformersNetwork, shape: CacheShape) -> None:
        self.network, self.cache_shape = network, shape
        self.vocab_size, self.hidden_size = network.vocab_size, network.hidden_size
        self.num_layers, self.max_positions = network.num_layers, network.max_positions
        self._read: Tensor | None = None  # [vocab_size], the token that is read for each; None = itself
        self._drawn: Tensor | None = None  # the tokens that have a logit; None = all
        self._head_rows: Tensor | None = None  # their rows in the network's head

    def draw_among(self, head_tokens: Sequence[int], vocabulary: TargetVocabulary | None) -> None:
        """Draft only tokens of a target's vocabulary, and of these only `head_tokens`; see `load_model`.

        Raises ConfigError if none is left.
        """
        rows, drawn, device = self.vocab_size, tuple(head_tokens), self.network.device
        own: Sequence[int] = drawn
        if vocabulary is not None:
            drawn = vocabulary.drawable(rows, drawn)
            own, read = vocabulary.head(drawn), vocabulary.table(rows)
            self._read, self.vocab_size = torch.tensor(read, device=device), len(read)
        if drawn:
            self._drawn, self._head_rows = torch.tensor(drawn, device=device), torch.tensor(own, device=device)

    @override
    def embed(self, tokens: Tensor) -> Tensor:
        return self.network.embed(self.own_tokens(tokens))

    @override
    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.network.logits(hidden)
        if self._drawn is None or self._head_rows is None:
            return logits
        chosen = logits.index_select(1, self._head_rows)
        return logits.new_full((len(logits), self.vocab_size), -torch.inf).index_copy_(1, self._drawn, chosen)

    @abstractmethod
    @override
    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden: ...

    @override
    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> Sequence[Chain]:
        """This model draws no tokens by itself."""
        return chains

    def own_tokens(self, tokens: Tensor) -> Tensor:
        """Return the model's own tokens for those of the target."""
        return tokens if self._read is None else self._read[tokens]


class CachedDecoder(TransformersDecoder):
    """Computes only new rows: attention reads and writes the storage.

    The storage has one layer per attention, as wide as the widest. Raises ModelError if the model does not call
    attention by name, or calls it with several types.
    """

    how = "with keys and values in the cache"

    def __init__(self, network: TransformersNetwork, switch: AttentionSwitch) -> None:
        self._switch, recorder = switch, KeyRecorder()
        tokens = torch.zeros(2, dtype=torch.long, device=network.device)
        with torch.inference_mode(), switch.on(recorder):
            network.states(**_flat(tokens, torch.arange(2, device=network.device)))
        if not recorder.layouts or len(recorder.dtypes) > 1:
            raise ModelError("its attention is not called by name", "this chooses how it runs.")
        self._layouts: list[KeyLayout] = recorder.layouts
        self._width = max(layout.width for layout in self._layouts)
        shape = CacheShape(len(self._layouts), 1, self._width, recorder.dtypes.pop(), network.device)
        super().__init__(network, shape)

    @override
    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        check_embeddings(batch, self.hidden_size)
        inputs = _flat(self.own_tokens(batch.tokens), batch.positions)
        if batch.embeddings is not None:
            looked_up = self.embed(inputs.pop("input_ids")[0].index_fill(0, batch.embedded_rows, 0))
            own = batch.embeddings.to(looked_up.dtype)
            inputs["inputs_embeds"] = looked_up.index_copy(0, batch.embedded_rows, own)[None]
        with self._switch.on(StoredPass(batch, storage, self._layouts, self._width)):
            last, entering = self.network.states(taps, **inputs)
        return Hidden(last[0], tuple(states[0] for states in entering))


def _flat(tokens: Tensor, positions: Tensor) -> dict[str, Any]:
    """Return the inputs of a flat batch: one text, whose mask hides nothing."""
    mask = torch.ones_like(tokens)[None]
    return {"input_ids": tokens[None], "position_ids": positions[None], "attention_mask": mask, "use_cache": False}


class RecomputedDecoder(TransformersDecoder):
    """Computes whole texts in each pass, once per leaf of a tree: for any causal language model.

    The storage holds the token of each position, as a number.
    """

    how = "without a cache: each pass computes whole texts again"

    def __init__(self, network: TransformersNetwork) -> None:
        super().__init__(network, CacheShape(1, 1, 1, torch.float64, network.device))

    @override
    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """Raises ModelError for rows with embeddings of their own."""
        if batch.embeddings is not None:
            raise ModelError("a model that computes whole texts again can't read input embeddings", _OTHER_METHOD)
        tokens = self.own_tokens(batch.tokens)
        kept = tokens.to(torch.float64)[:, None, None]
        storage.write(0, batch.slot_mapping, kept, kept)
        outputs = list[tuple[Tensor, ...]]()
        for segment, slots in zip(batch.segments, context_slots(batch), strict=True):
            text = storage.read(0, slots)[0][:, 0, 0].long()
            outputs.append(self._rows(segment, text, taps))
        last, *entering = (torch.cat(parts) for parts in zip(*outputs, strict=True))
        return Hidden(last, tuple(entering))

    def _rows(self, segment: Segment, text: Tensor, taps: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the last states and those of taps, [rows, hidden] each, of a sequence with the slots' tokens [end]."""
        chain = segment.start + segment.num_committed
        rows: list[tuple[Tensor, ...]] = [()] * segment.num_rows
        for path in leaf_paths(segment.parents):
            places = [*range(chain), *(chain + node for node in path)]
            last, entering = self.network.states(taps, input_ids=text[places][None], use_cache=False)
            for position, place in enumerate(places[segment.start :], segment.start):
                rows[place - segment.start] = tuple(states[0, position] for states in (last, *entering))
        return tuple(torch.stack(states) for states in zip(*rows, strict=True))


def leaf_paths(parents: Sequence[int]) -> list[list[int]]:
    """Return the nodes from the root to each leaf of a tree; one empty path for a tree without nodes."""
    paths = list[list[int]]()
    for node, parent in enumerate(parents):
        above = [] if parent < 0 else paths[parent]
        paths.append([*above, node])
    inner = set(parents)
    return [path for node, path in enumerate(paths) if node not in inner] or [[]]


# The error that is allowed, as a share of the largest logit, and how many rows may have a larger one.
_ALLOWED = 1e-4, 0
_ALLOWED_16 = 0.05, 2  # in bfloat16, whose rounding can choose another expert for a row
_SEED = 20
_BLOCKS, _BLOCK_SIZE = 32, 4  # of the probe's cache
_FIRST, _SECOND = 1, 2  # sequences
_PARENTS, _PATH = (-1, -1, 0, 2, 0), (0, 2)  # of the first one's tree; the path is kept
_CUT = 5  # tokens of the second one that are left


def choose_decoder(model: Any) -> tuple[TransformersDecoder, str]:
    """Return the fastest decoder whose results are right, and why it has no cache ("" if it has one).

    Raises ModelError if no decoder is right.
    """
    network, usual = TransformersNetwork(model), model.config._attn_implementation
    probe = Probe(network)
    wanted = probe.plain()
    why = ""
    try:
        cached = _cached(network)
        why = probe.difference(cached, wanted)
        if not why:
            return cached, ""
    except Exception as error:  # noqa: BLE001 - whatever a model raises under an attention that it does not know
        why = str(error).strip().split("\n")[0] or type(error).__name__
    logger.debug("%s can't use the cache: %s", type(model).__name__, why)
    model.set_attn_implementation(usual)
    recomputed = RecomputedDecoder(network)
    differs = probe.difference(recomputed, wanted)
    if differs:
        raise ModelError(
            f"{type(model).__name__} of transformers is no causal language model: {differs}",
            'use a model whose tokens depend on earlier tokens alone; or try dtype="float32", which rounds less.',
        )
    return recomputed, why


def _cached(network: TransformersNetwork) -> CachedDecoder:
    name = registered()
    network.model.set_attn_implementation(name)
    return CachedDecoder(network, AttentionSwitch(network.model))


class Probe:
    """The texts that a model is tried with, and the logits that they must have."""

    def __init__(self, network: TransformersNetwork) -> None:
        self._network = network
        generator = torch.Generator().manual_seed(_SEED)
        self._tokens = torch.randint(network.vocab_size, (40,), generator=generator).tolist()

    def plain(self) -> list[Tensor]:
        """Return the logits after each row's own text, as transformers computes them."""
        with torch.inference_mode():
            return [self._network.plain(text) for text in self._texts()]

    def difference(self, decoder: TransformersDecoder, wanted: Sequence[Tensor]) -> str:
        """Return how a decoder's logits differ from the wanted ones, "" if they are the same within rounding."""
        with torch.inference_mode():
            found = self._run(decoder)
        allowed, spared = _ALLOWED_16 if self._network.dtype.itemsize < 4 else _ALLOWED
        error = float(row_errors(torch.stack(found), torch.stack(list(wanted)))[-1 - spared])
        return "" if error <= allowed else f"its logits differ from those of a whole pass by {error:.2g} of the largest"

    def _run(self, decoder: TransformersDecoder) -> list[Tensor]:
        """Return the logits of each row of the passes."""
        cache, found = paged_cache(decoder.cache_shape, _BLOCKS, _BLOCK_SIZE), list[Tensor]()
        for number, inputs in enumerate(self._passes()):
            hidden = decoder.forward(build_batch(inputs, cache, self._network.device), cache.storage)
            found += decoder.logits(hidden.last)
            if number == 1:
                cache.compact(_FIRST, 7, _PATH)
                cache.truncate_to(_SECOND, _CUT)
        return found

    def _passes(self) -> list[list[SequenceInput]]:
        """Return the inputs of each pass."""
        tokens, none = self._tokens, DraftTree.empty()
        tree = DraftTree.of(tokens[7:12], _PARENTS)
        return [
            [SequenceInput(_FIRST, tokens[:6], none), SequenceInput(_SECOND, tokens[20:23], none)],
            [SequenceInput(_FIRST, tokens[6:7], tree), SequenceInput(_SECOND, tokens[23:27], none)],
            [SequenceInput(_SECOND, tokens[27:29], none), SequenceInput(_FIRST, tokens[12:15], none)],
        ]

    def _texts(self) -> list[list[int]]:
        """Return the text of each row of the passes, up to and including the row."""
        first, second, nodes = self._tokens[:7], self._tokens[20:27], self._tokens[7:12]
        drafts = [first + [nodes[node] for node in path] for path in ([0], [1], [0, 2], [0, 2, 3], [0, 4])]
        kept, cut = [*drafts[2], *self._tokens[12:15]], [*second[:_CUT], *self._tokens[27:29]]
        return [
            *_prefixes(first, 1, 6), *_prefixes(second, 1, 3),
            first, *drafts, *_prefixes(second, 4, 7),
            *_prefixes(cut, _CUT + 1, _CUT + 2), *_prefixes(kept, 10, 12),
        ]  # fmt: skip


def row_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """Return each row's largest error, as a share of the largest wanted logit, in ascending order.

    Both are logits [rows, V], where -infinity is a logit too. The error of a row with NaN is infinite.
    """
    errors = torch.where(found == wanted, 0.0, (found - wanted).abs().double())
    largest = wanted[wanted.isfinite()].abs().max()
    return (errors / largest).nan_to_num(nan=torch.inf).amax(-1).sort().values


def _prefixes(text: list[int], shortest: int, longest: int) -> list[list[int]]:
    return [text[:length] for length in range(shortest, longest + 1)]


NAME = "transformers"
INSTALL = 'run: pip install "speculant[transformers]" -c constraints.txt'
_ANOTHER = f"use a causal language model that this version of {NAME} runs, with safetensors weights."
_SHOWN = 3  # tensors in a message


@dataclass(frozen=True)
class TransformersBackend:
    """The facts about the backend; see `Computes`. torch may round a row differently in another batch."""

    name: str = NAME
    row_invariant: bool = False
    quantizations: Sequence[str] = ()
    sampler: Sampler = REFERENCE


def check_options(model_backend: str, quantization: str | None, weight_packing: str, kv_cache_dtype: str) -> None:
    """Check the options of a model before its files are looked up. Raises ConfigError.

    For transformers, the package must be installed, and weights, keys and values can't be rounded or packed.
    """
    if model_backend not in MODEL_BACKENDS:
        raise ConfigError(f"model_backend={model_backend!r} is unknown", suggest(str(model_backend), MODEL_BACKENDS))
    if model_backend == AUTO:
        return
    if find_spec(NAME) is None:
        raise ConfigError(f'model_backend="{NAME}" needs the package {NAME}, which is not installed', INSTALL)
    if quantization is not None:
        raise ConfigError(
            f'weights can\'t be rounded to {quantization} with model_backend="{NAME}"',
            "leave out the quantization, or the backend.",
        )
    if weight_packing not in (AUTO, PLAIN):
        raise ConfigError(
            f'weight_packing={weight_packing!r} is impossible with model_backend="{NAME}"',
            f'use "{AUTO}" or "{PLAIN}".',
        )
    if kv_cache_dtype != AUTO:
        raise ConfigError(
            f'kv_cache_dtype={kv_cache_dtype!r} is impossible with model_backend="{NAME}", which stores keys and values'
            " in the model's type",
            "leave out one of the two.",
        )


def load_by_transformers(
    folder: Path,
    dtype: str,
    device: torch.device,
    head_tokens: tuple[int, ...] = (),
    vocabulary: TargetVocabulary | None = None,
) -> tuple[TransformersDecoder, str]:
    """Load a model from a folder, and choose how it runs; the arguments are those of `load_model`.

    Returns also its class and how it runs, in words. Raises ModelError for a model that transformers can't run.
    """
    if not folder.is_dir():
        raise ModelError(
            f'{folder} is a GGUF file, and model_backend="{NAME}" reads folders alone',
            "leave model_backend out, or name the folder that the file was made from.",
        )
    model = _loaded(folder, "auto" if dtype == "auto" else getattr(torch, dtype))
    if model.dtype == torch.float16:
        model = model.float()
    kind, version = type(model).__name__, importlib.import_module(NAME).__version__
    with Converts(ModelError, f"{NAME} {version} can't run {kind} on texts", _ANOTHER), _quiet():
        decoder, why = choose_decoder(model.to(device).eval().requires_grad_(False))
    decoder.draw_among(head_tokens, vocabulary)
    reason = f", because {why}" if why else ""
    return decoder, f"{NAME} {version} ({kind}, {decoder.how}{reason})"


def _loaded(folder: Path, dtype: Any) -> Any:
    transformers: Any = importlib.import_module(NAME)
    try:
        with _quiet():
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True,
                output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # which errors it raises depends on the model and on its version
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelError(f"{NAME} can't load {folder}: {reason}", _ANOTHER) from error
    absent = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if absent:
        more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
        raise ModelError(
            f"{folder} lacks weights of {type(model).__name__}, or has them in another shape: "
            f"{', '.join(absent[:_SHOWN])}{more}",
            "use a complete checkpoint of a causal language model.",
        )
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide progress bars and reports of transformers; errors are raised anyway."""
    log: Any = importlib.import_module(NAME).utils.logging
    shows, level = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if shows:
            log.enable_progress_bar()
