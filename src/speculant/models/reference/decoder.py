"""The decoder that all families share. Parameter names are those of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from speculant.cache.base import CacheShape, KVCache, KVStorage
from speculant.kernels import reference
from speculant.models.base import Batch, Chain, Hidden, ModelNeeds, check_embeddings, check_taps, check_tokens
from speculant.models.config import DecoderConfig
from speculant.models.reference.attention import AttentionPlan, attend
from speculant.models.reference.rotary import Rotary


def spread(logits: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """Return logits [r, vocab_size] from those [r, n] of a short head with the ids `tokens` [n]; others are -inf."""
    return logits.new_full((len(logits), vocab_size), -torch.inf).index_copy_(1, tokens, logits)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of the last dimension."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., dim]."""
        return reference.rms_norm(x, self.weight, self._eps)


class Attention(nn.Module):
    """Self-attention with grouped heads over the stored keys and values."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self._layer, self._window = layer, config.windows[layer]
        self._heads, self._kv_heads, self._dim = config.num_heads, config.num_kv_heads, config.head_dim
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self._qk_norm = config.qk_norm

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], plan: AttentionPlan, storage: KVStorage) -> Tensor:
        """Map x [T, hidden] to [T, hidden] and write this layer's keys and values to the storage."""
        query = self.q_proj(x).view(-1, self._heads, self._dim)
        key = self.k_proj(x).view(-1, self._kv_heads, self._dim)
        value = self.v_proj(x).view(-1, self._kv_heads, self._dim)
        if self._qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        rotated = reference.rotate(torch.cat((query, key), dim=1), *angles)
        query, key = rotated.split_with_sizes((self._heads, self._kv_heads), dim=1)
        storage.write(self._layer, plan.batch.slot_mapping, key, value)
        out = attend(query, self._layer, self._window, plan, storage)
        projected: Tensor = self.o_proj(out.flatten(1))
        return projected


class MLP(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [T, hidden] to [T, hidden]."""
        out: Tensor = self.down_proj(reference.silu_gate(self.gate_proj(x), self.up_proj(x)))
        return out


class Layer(nn.Module):
    """Attention and feed-forward blocks, each after a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], plan: AttentionPlan, storage: KVStorage) -> Tensor:
        """Map x [T, hidden] to [T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), angles, plan, storage)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Backbone(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        # From a tensor: on "meta", the default initialisation would import torch's compiler, which takes a second.
        zeros = torch.zeros(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(zeros, freeze=False)  # type: ignore[no-untyped-call]
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class Decoder(nn.Module):
    """A `CausalLM`: embedding, layers, norm, and a head that may share the embedding's weight."""

    needs = ModelNeeds()

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, len(config.head_tokens) or config.vocab_size, bias=False)
        self.tie_head()
        self._rotary = Rotary(config.rope, config.head_dim)
        self._windows = frozenset(config.windows)
        self._groups = config.num_heads // config.num_kv_heads

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
        config = self.config
        return CacheShape(config.num_layers, config.num_kv_heads, config.head_dim, weight.dtype, weight.device)

    @cached_property
    def _head_tokens(self) -> Tensor:
        return torch.tensor(self.config.head_tokens, device=self.lm_head.weight.device)

    def tie_head(self) -> None:
        """Share the embedding's weight with the head if the config ties them; call it after parameters are replaced."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """See `CausalLM.embed`; in the model's dtype."""
        check_tokens(tokens, self.vocab_size)
        return self._look_up(tokens)

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """See `CausalLM.forward`."""
        check_taps(taps, self.num_layers)
        x = self._inputs(batch)
        angles = self._rotary.angles(batch.positions, x.dtype)
        plan = AttentionPlan.build(batch, self._windows, self._groups, x.dtype)
        entering = {}  # hidden states by the layer that takes them as input
        for index, layer in enumerate(self.model.layers):
            if index in taps:
                entering[index] = x
            x = layer(x, angles, plan, storage)
        entering[self.num_layers] = x
        return Hidden(self.model.norm(x), tuple(entering[tap] for tap in taps))

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
        return spread(out, self._head_tokens, self.vocab_size) if self.config.head_tokens else out

    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> Sequence[Chain]:
        """See `CausalLM.grow`; this model draws none by itself."""
        return chains

    def truncated(self, num_layers: int) -> Decoder:
        """See `Truncatable.truncated`."""
        windows = self.config.windows[:num_layers]
        with torch.device("meta"):
            model = Decoder(replace(self.config, num_layers=num_layers, windows=windows))
        model.model.embed_tokens, model.model.norm = self.model.embed_tokens, self.model.norm
        model.model.layers, model.lm_head = self.model.layers[:num_layers], self.lm_head
        return model.eval()
