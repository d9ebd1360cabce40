"""The reference interpreter of a description: torch, differentiable. Training and heads use the same layers.

Parameter names are those of Llama's checkpoints, in every family.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from speculant.cache.base import CacheShape, KVCache, KVStorage
from speculant.kernels import reference
from speculant.models.base import Batch, Chain, Hidden, ModelNeeds, check_embeddings, check_taps, check_tokens
from speculant.models.description import Attention, DecoderConfig, Layer, Mlp, Norm
from speculant.models.reference.attention import Attend, StoredKeys
from speculant.models.reference.rotary import Rotary

Angles = tuple[Tensor, Tensor]  # cos and sin, see `Rotary.angles`


def spread(logits: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """Return logits [r, vocab_size] from those [r, n] of a short head with the ids `tokens` [n]; others are -inf."""
    return logits.new_full((len(logits), vocab_size), -torch.inf).index_copy_(1, tokens, logits)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of the last dimension."""

    def __init__(self, dim: int, norm: Norm) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self._eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., dim]."""
        return reference.rms_norm(x, self.weight, self._eps)


class SelfAttention(nn.Module):
    """A layer's attention, which reads inputs [..., inputs]."""

    def __init__(self, of: Attention, layer: int, inputs: int, hidden: int) -> None:
        super().__init__()
        self._of, self._layer = of, layer
        self.q_proj = nn.Linear(inputs, of.query_size, bias=of.bias)
        self.k_proj = nn.Linear(inputs, of.key_size, bias=of.bias)
        self.v_proj = nn.Linear(inputs, of.key_size, bias=of.bias)
        self.o_proj = nn.Linear(of.query_size, hidden, bias=of.output_bias)
        if of.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(of.head_dim, of.qk_norm), RMSNorm(of.head_dim, of.qk_norm)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Map x [..., inputs] to [..., hidden]."""
        of, rows = self._of, x.shape[:-1]
        query = self.q_proj(x).view(*rows, of.heads, of.head_dim)
        key = self.k_proj(x).view(*rows, of.kv_heads, of.head_dim)
        value = self.v_proj(x).view(*rows, of.kv_heads, of.head_dim)
        if of.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        rotated = reference.rotate(torch.cat((query, key), dim=-2), *angles)
        query, key = rotated.split_with_sizes((of.heads, of.kv_heads), dim=-2)
        projected: Tensor = self.o_proj(attend(self._layer, of, query, key, value).flatten(-2))
        return projected


class GatedMlp(nn.Module):
    """The feed-forward block."""

    def __init__(self, of: Mlp, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, of.size, bias=of.bias)
        self.up_proj = nn.Linear(hidden, of.size, bias=of.bias)
        self.down_proj = nn.Linear(of.size, hidden, bias=of.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., hidden] to a result of the same shape."""
        out: Tensor = self.down_proj(reference.silu_gate(self.gate_proj(x), self.up_proj(x)))
        return out


class DecoderLayer(nn.Module):
    """Attention and feed-forward blocks, each added to the residual stream. inputs: the width that attention reads."""

    def __init__(self, layer: Layer, index: int, hidden: int, inputs: int) -> None:
        super().__init__()
        if layer.before_attention:
            self.input_layernorm = RMSNorm(hidden, layer.before_attention)
        self.self_attn = SelfAttention(layer.attention, index, inputs, hidden)
        self.post_attention_layernorm = RMSNorm(hidden, layer.before_mlp)
        self.mlp = GatedMlp(layer.mlp, hidden)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Map x [..., hidden] to a result of the same shape."""
        return self.add(x, self.input_layernorm(x), angles, attend)

    def add(self, x: Tensor, entering: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Add both blocks to the residual stream x [..., hidden]; attention reads `entering` [..., inputs]."""
        x = x + self.self_attn(entering, angles, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Backbone(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        # From a tensor: on "meta", the default initialisation would import torch's compiler, which takes a second.
        zeros = torch.zeros(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(zeros, freeze=False)  # type: ignore[no-untyped-call]
        hidden = config.hidden_size
        self.layers = nn.ModuleList(DecoderLayer(each, i, hidden, hidden) for i, each in enumerate(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm)


class Decoder(nn.Module):
    """A `CausalLM`: embedding, layers, norm, and a head that may share the embedding's weight."""

    needs = ModelNeeds()

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, len(config.head.tokens) or config.vocab_size, bias=False)
        self.tie_head()
        self._rotary = Rotary(config.attention.rope, config.attention.head_dim)

    @property
    def vocab_size(self) -> int:
        """Rows of the output head, padding rows included."""
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.config.num_layers

    @property
    def hidden_size(self) -> int:
        """The width of a hidden state and of an input embedding."""
        return self.config.hidden_size

    @property
    def max_positions(self) -> int:
        """The longest context that the checkpoint was trained for, in positions."""
        return self.config.max_positions

    @property
    def cache_shape(self) -> CacheShape:
        """The shape of one position of this model's cache."""
        weight = self.model.embed_tokens.weight
        of = self.config.attention
        sizes = self.num_layers, of.kv_heads, of.head_dim
        return CacheShape(*sizes, weight.dtype, weight.device, self.config.windows)

    @cached_property
    def _head_tokens(self) -> Tensor:
        return torch.tensor(self.config.head.tokens, device=self.lm_head.weight.device)

    def tie_head(self) -> None:
        """Share the embedding's weight with the head if the config ties them; call it after parameters are replaced."""
        if self.config.head.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """See `CausalLM.embed`; in the model's dtype."""
        check_tokens(tokens, self.vocab_size)
        return self._look_up(tokens)

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """See `CausalLM.forward`."""
        check_taps(taps, self.num_layers)
        inputs = self._inputs(batch)
        attend = StoredKeys.build(batch, storage, self.config, inputs.dtype)
        entering = {}  # hidden states by the layer that takes them as input
        for index, x in enumerate(self.states(inputs, batch.positions, attend)):
            if index in taps:
                entering[index] = x
        return Hidden(self.model.norm(x), tuple(entering[tap] for tap in taps))

    def states(self, x: Tensor, positions: Tensor, attend: Attend) -> Iterator[Tensor]:
        """Yield the input [..., n, hidden] of each layer, beginning with x, and the output of the last one.

        positions [n] are those of the rows.
        """
        angles = self._rotary.angles(positions, x.dtype)
        yield x
        for layer in self.model.layers:
            x = layer(x, angles, attend)
            yield x

    def _inputs(self, batch: Batch) -> Tensor:
        """Return the input embeddings [T, hidden] of a batch: looked up, except for rows that have their own."""
        check_embeddings(batch, self.hidden_size)
        if batch.embeddings is None:
            return self._look_up(batch.tokens)
        x = self._look_up(batch.tokens.index_fill(0, batch.embedded_rows, 0))
        return x.index_copy(0, batch.embedded_rows, batch.embeddings.to(x.dtype))

    def _look_up(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.model.embed_tokens(tokens)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        out: Tensor = self.lm_head(hidden)
        return spread(out, self._head_tokens, self.vocab_size) if self.config.head.tokens else out

    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> Sequence[Chain]:
        """See `CausalLM.grow`; this model draws none by itself."""
        return chains

    def truncated(self, num_layers: int) -> Decoder:
        """See `Truncatable.truncated`."""
        with torch.device("meta"):
            model = Decoder(self.config.truncated(num_layers))
        model.model.embed_tokens, model.model.norm = self.model.embed_tokens, self.model.norm
        model.model.layers, model.lm_head = self.model.layers[:num_layers], self.lm_head
        return model.eval()
