"""The two ways to run a model of transformers on flat batches: with keys and values in the cache, or without any."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from speculant.cache.base import CacheShape, KVStorage
from speculant.cache.paged import KVCache
from speculant.errors import ModelError
from speculant.models.base import Batch, Chain, Hidden, ModelNeeds, Segment, check_embeddings
from speculant.models.reference.attention import context_slots
from speculant.models.transformers.attention import AttentionSwitch, KeyLayout, KeyRecorder, StoredPass
from speculant.models.transformers.network import TransformersNetwork
from speculant.models.vocabulary import TargetVocabulary

_FIX = "use a drafting method that reads tokens."


class TransformersDecoder(ABC):
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

    def embed(self, tokens: Tensor) -> Tensor:
        """See `CausalLM.embed`."""
        return self.network.embed(self.own_tokens(tokens))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        logits = self.network.logits(hidden)
        if self._drawn is None or self._head_rows is None:
            return logits
        chosen = logits.index_select(1, self._head_rows)
        return logits.new_full((len(logits), self.vocab_size), -torch.inf).index_copy_(1, self._drawn, chosen)

    @abstractmethod
    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """See `CausalLM.forward`."""

    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> Sequence[Chain]:
        """See `CausalLM.grow`; this model draws no tokens by itself."""
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

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """See `CausalLM.forward`."""
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

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """See `CausalLM.forward`. Raises ModelError for rows with embeddings of their own."""
        if batch.embeddings is not None:
            raise ModelError("a model that computes whole texts again can't read input embeddings", _FIX)
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
