"""A decoder layer over the states of three of the target's layers (arXiv 2503.01840).

It is trained in rounds (heads/rounds.py) on distributions alone: its states need not be near the target's. It predicts
with the target's output head, or with a learned one of fewer tokens.

A target's states grow from layer to layer, until a new layer's output is small beside them. In training they are
divided by their size; the written weights include these divisors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from speculant.errors import ConfigError
from speculant.lab.training.config import HeadTrainingConfig
from speculant.lab.training.heads.objective import HeadKind
from speculant.lab.training.heads.rounds import RoundsObjective, begin_small, layer_sizes
from speculant.lab.training.losses import OutputHead
from speculant.lab.training.texts import Texts
from speculant.models import Decoder, HeadConfig, HeadDecoder, StateEntry, usual_taps

_MEASURED = 16  # texts for measuring the size of states


class Network(nn.Module):
    """The head, and the matrix that maps the states of three layers to one."""

    def __init__(self, head: HeadDecoder, width: int) -> None:
        super().__init__()
        self.head = head
        self.fc = nn.Linear(width, head.hidden_size, bias=False)


class Eagle3Objective(RoundsObjective):
    """Rounds from the states of three layers. A short output head has the most frequent tokens of the texts."""

    def __init__(self, network: Network, target: Decoder, depth: int, layers: tuple[int, ...]) -> None:
        own = network.head.config
        super().__init__(network, network.head, target, depth, _config(own, layers, target))
        self.layers = layers
        self._fc = network.fc
        self._tokens: Tensor | None = None
        self._sizes = torch.ones(network.fc.in_features)

    @override
    def use(self, texts: Texts) -> None:
        """Use the states of these texts; a short output head begins with the target's rows of its tokens."""
        super().use(texts)
        self._sizes = state_sizes(texts, len(self.layers))
        if self._head.config.own_head:
            tokens = frequent_tokens(texts, len(self._head.lm_head.weight), self._target.vocab_size)
            self._tokens = tokens.to(texts.device)
            with torch.no_grad():
                self._head.lm_head.weight.copy_(self._output.rows(self._tokens))

    @override
    def tensors(self) -> dict[str, Tensor]:
        found = {_hub_name(name): tensor for name, tensor in super().tensors().items()}
        found["fc.weight"] = self._fc.weight.detach() / self._sizes
        if self._tokens is not None:
            tokens = self._tokens.cpu()
            found["d2t"] = tokens - torch.arange(len(tokens))
            found["t2d"] = torch.zeros(self._target.vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
        return found

    @override
    def _output_head(self) -> OutputHead | None:
        return None if self._tokens is None else OutputHead(self._head.lm_head.weight, self._tokens)

    @override
    def _entering(self, places: Tensor) -> Tensor:
        out: Tensor = self._fc(self._texts.taps_of(places) / self._sizes)
        return out


def state_sizes(texts: Texts, num_layers: int) -> Tensor:
    """Return the root mean square of each layer's states, for each of their numbers: [layers * hidden]."""
    taps = texts.taps_of(torch.arange(min(_MEASURED, texts.num_training)))
    width = taps.shape[-1] // num_layers
    sizes = taps.view(*taps.shape[:2], num_layers, width).square().mean((0, 1, 3)).sqrt()
    return sizes.clamp(min=1e-6).repeat_interleave(width)


def frequent_tokens(texts: Texts, count: int, vocab_size: int) -> Tensor:
    """Return the most frequent ids [count] of the training texts, ascending; the lowest among equals."""
    counts = texts.tokens[: texts.num_training].flatten().bincount(minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def _make(config: HeadTrainingConfig, target: Decoder) -> Eagle3Objective:
    """Return a new layer of the target's own shape, with small random weights. Raises ConfigError."""
    known = config.draft_vocab
    if known is not None and known > target.vocab_size:
        raise ConfigError(
            f"draft_vocab={known} is more than the target's {target.vocab_size} tokens", "lower --draft-vocab."
        )
    layers = tuple(max(0, min(layer, target.num_layers)) for layer in usual_taps(target.num_layers))
    sizes = layer_sizes(config, target).with_head(tuple(range(known or 0)))
    head = HeadDecoder(HeadConfig(sizes, StateEntry.ATTENTION, own_head=known is not None), target)
    network = Network(head, len(layers) * target.hidden_size)
    begin_small(network, config.seed)
    own, scales = head.norm.weight, target.model.norm.weight
    assert own is not None
    assert scales is not None, "a norm before a head has scales"
    with torch.no_grad():  # it begins as the last of the states, and reads it like the target
        network.fc.weight[:, -target.hidden_size :] += torch.eye(target.hidden_size)
        own.copy_(scales + target.config.norm.offset)
    return Eagle3Objective(network, target, config.depth, layers)


def _config(own: HeadConfig, layers: tuple[int, ...], target: Decoder) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "target_hidden_size": target.hidden_size,
        "draft_vocab_size": len(own.decoder.head.tokens) or target.vocab_size,
        "norm_before_residual": own.norm_before_residual,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True},
    }


def _hub_name(name: str) -> str:
    """Return the name of a head's tensor in files on the hub."""
    if name == "hidden_norm.weight":
        return f"midlayer.{name}"
    return name.replace("layers.0.", "midlayer.")


KIND = HeadKind(_make, own_output_head=True)
