"""A causal language model of transformers in two parts: from tokens to hidden states, and from those to logits.

    body   the module that the model calls first, with the tokens: embedding, layers and the final norm
    head   all that the model does after it, such as the output matrix, a scale and a softcap

The body's module is found by running the model once. For the head, the model's own code runs with a body that returns
the given states, so its rules are not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speculant.errors import ConfigError, ModelError
from speculant.models.base import check_taps, check_tokens
from speculant.models.rope_config import longest_context

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
