"""Training of a decoder layer that continues from its own states, as it does in a draft.

Round 1 reads the target's states, and round m reads the states of round m - 1. A row attends to the last m - 1 rows as
those rounds made them, and to older rows as round 1 made them, since the target's states replace the layer's own once
tokens are accepted (arXiv 2408.15766; "training-time test" in arXiv 2503.01840, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from speculant.lab.training.config import HeadTrainingConfig
from speculant.lab.training.heads.objective import HeadInTraining
from speculant.models import (
    Attention,
    Decoder,
    DecoderConfig,
    Embedding,
    Head,
    HeadDecoder,
    Layer,
    Learned,
    Mlp,
    Norm,
    Rope,
    inner_width,
    rope_entries,
)

_PLAIN = Rope(10000.0)  # of a layer whose target has no rotary positions


class RoundsObjective(HeadInTraining):
    """The states that each round makes; the first round reads the states after the target's final norm.

    own_config: entries of config.json besides the layer's sizes.
    """

    def __init__(
        self, module: nn.Module, head: HeadDecoder, target: Decoder, depth: int, own_config: Mapping[str, Any]
    ) -> None:
        super().__init__(module, target, depth)
        self._head, self._own_config = head, own_config

    @override
    def config(self) -> dict[str, Any]:
        own = self._head.config.decoder
        return {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": own.hidden_size,
            "intermediate_size": inner_width(own.layers[0].mlp),
            "num_hidden_layers": 1,
            "num_attention_heads": own.attention.heads,
            "num_key_value_heads": own.attention.kv_heads,
            "head_dim": own.attention.head_dim,
            "rms_norm_eps": own.norm.eps,
            **rope_entries(own.attention.rope or _PLAIN),
            "max_position_embeddings": own.max_positions,
            "vocab_size": own.vocab_size,
            **self._own_config,
        }

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach().contiguous() for name, parameter in self._head.named_parameters()}

    def _entering(self, places: Tensor) -> Tensor:
        """Return the states [b, n, hidden] that the first round reads."""
        return self._texts.states_of(places)

    @override
    def predicted(self, places: Tensor) -> tuple[Tensor, Tensor]:
        entering, tokens = self._entering(places), self._texts.tokens_of(places)[:, 1:]
        embedded = self._target.embed(tokens.flatten()).view(*tokens.shape, -1)
        positions, attend = torch.arange(embedded.shape[1], device=tokens.device), RoundsOfRows()
        taken, made = entering[:, :-1], list[Tensor]()
        for _ in range(self.depth):
            out = self._head.states(embedded, taken, positions, attend)
            assert out.carried is not None
            made.append(out.last)
            taken = torch.cat((entering[:, :1], out.carried[:, :-1]), dim=1)
        begun = self.depth - 1  # rows that later rounds began with a state of the target
        skipped = max(begun, self._texts.opening - 2)
        own = torch.stack([out[:, skipped:] for out in made])
        return own.flatten(1, 2), self._texts.states_of(places)[:, 1 + skipped :].flatten(0, 1)


def layer_sizes(config: HeadTrainingConfig, target: Decoder) -> DecoderConfig:
    """Return a layer of Llama's arithmetic with the sizes of the target's first layer, and the target's tokens."""
    whole, of = target.config, target.config.attention
    attention = Attention(of.heads, of.kv_heads, of.head_dim, next(iter(whole.ropes), _PLAIN))
    norm = Norm(whole.norm.eps)
    layer = Layer(attention, Mlp(config.inner or inner_width(whole.layers[0].mlp)), norm, norm)
    return DecoderConfig(
        Embedding(whole.vocab_size, whole.hidden_size), (layer,), norm, Head(), max_positions=whole.max_positions
    )


def begin_small(module: nn.Module, seed: int) -> None:
    """Give small random weights to all matrices."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            shrink = 0.5 if "o_proj" in name or "down_proj" in name else 1.0
            nn.init.normal_(parameter, std=0.5 * shrink * parameter.shape[1] ** -0.5, generator=generator)


class RoundsOfRows:
    """The attention of one round after the other: see the module's docstring."""

    def __init__(self) -> None:
        self._versions = list[tuple[Tensor, Tensor]]()  # keys and values [b, heads, n, dim] of each round

    def __call__(
        self, layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned
    ) -> Tensor:
        """See `Attend`; of a head's only layer, which has no sinks, for rows [b, n, heads, dim]."""
        key, value = (each.transpose(1, 2).repeat_interleave(of.groups, 1) for each in (key, value))
        self._versions.append((key, value))
        return self._attend(query.transpose(1, 2) * of.head_dim**-0.5).transpose(1, 2)

    def _attend(self, query: Tensor) -> Tensor:
        """Attend with queries [b, heads, n, dim]: the key d rows back is that of round m - d, at least round 1."""
        length, newest = query.shape[2], len(self._versions) - 1
        keys, values = self._versions[0]
        places = torch.arange(length, device=query.device)
        distance = places[:, None] - places
        scores = (query @ keys.mT).masked_fill(distance < newest, -torch.inf)
        near = [self._near(query, keys, distance) for distance, (keys, _) in self._recent()]
        weights = torch.cat((scores, *near), dim=-1).softmax(-1)
        out: Tensor = weights[..., :length] @ values
        for place, (back, (_, own)) in enumerate(self._recent()):
            out = out + weights[..., length + place, None] * _moved(own, back)
        return out

    def _recent(self) -> list[tuple[int, tuple[Tensor, Tensor]]]:
        """Return the rows that later rounds made: how far back, and their version."""
        newest = len(self._versions) - 1
        return [(back, self._versions[newest - back]) for back in range(newest)]

    def _near(self, query: Tensor, keys: Tensor, back: int) -> Tensor:
        """Return the scores [b, heads, n, 1] of the rows `back` before each; the first rows have none."""
        scores = (query * _moved(keys, back)).sum(-1, keepdim=True)
        absent = torch.arange(query.shape[2], device=query.device)[:, None] < back
        return scores.masked_fill(absent, -torch.inf)


def _moved(x: Tensor, back: int) -> Tensor:
    """Return x [b, heads, n, dim] with row i - back in the place of row i, zeros first."""
    return functional.pad(x, (0, 0, back, 0))[:, :, : x.shape[2]]
