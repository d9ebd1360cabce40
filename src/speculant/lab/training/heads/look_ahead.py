"""Training of look-ahead embeddings: row t after a token learns the target's distribution t tokens later.

The target is fixed; only the embeddings are learned. The rows of a text's tokens are computed as usual. After some of
them comes a chain of look-ahead rows, which attend to the tokens up to its place and to earlier rows of the chain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from speculant.lab.training.heads.objective import RANKS, HeadInTraining
from speculant.lab.training.losses import distances, overlaps, weighted
from speculant.lab.training.passes import attend_causally, attend_masked, within_window
from speculant.models import Attention, Decoder, Learned

_STRIDE = 8  # tokens of a text from one place to the next


class LookAhead(nn.Module):
    """The embeddings [T, hidden]. They have the name of token embeddings, so the optimizer treats both alike."""

    def __init__(self, target: Decoder, count: int, seed: int) -> None:
        super().__init__()
        table = target.look_up(torch.arange(target.vocab_size, device=target.cache_shape.device)).detach().cpu()
        noise = torch.randn(count, table.shape[1], generator=torch.Generator().manual_seed(seed))
        self.embed_tokens = nn.Parameter(table.mean(0) + noise * table.std(0))


class LookAheadObjective(HeadInTraining):
    """The target is compared at each depth with its own state there, in training at every _STRIDE-th place."""

    def __init__(self, module: LookAhead, target: Decoder, seed: int = 0) -> None:
        super().__init__(module, target.requires_grad_(False), len(module.embed_tokens))
        self._inputs, self._seed = module.embed_tokens, seed

    @override
    def loss(self, model: Any, windows: Tensor, progress: float) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed + int(windows[:, 0].sum()))
        offsets = min(_STRIDE, windows.shape[1] - 1 - self.depth - max(0, self._texts.opening - 2))
        first = int(torch.randint(offsets, (), generator=generator))
        return weighted(self._each_depth(*self.predicted(windows[:, 0], first), progress))

    @override
    def _each_depth(self, made: Tensor, own: Tensor, progress: float) -> Tensor:
        each = zip(made, own, strict=True)
        return torch.cat([distances(one[None], its_own, self._output, progress) for one, its_own in each])

    @override
    def _overlaps(self, made: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        each = zip(made, own, strict=True)
        alpha, shares = zip(*(overlaps(one[None], its_own, self._output, RANKS) for one, its_own in each), strict=True)
        return torch.cat(alpha), torch.cat(shares)

    @override
    def config(self) -> dict[str, Any]:
        count, hidden = self._inputs.shape
        return {"hidden_size": hidden, "vocab_size": self._target.vocab_size, "num_look_ahead": count}

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"look_ahead.weight": self._inputs.detach()}

    @override
    def predicted(self, places: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return both for every _STRIDE-th row after `first`; the target's states are [depth, r, hidden]."""
        states = self._texts.states_of(places)
        first += max(0, self._texts.opening - 2)
        rows = torch.arange(first, states.shape[1] - self.depth, _STRIDE, device=states.device)
        made = look_ahead_states(self._target, self._texts.tokens_of(places), rows, self._inputs)
        own = torch.stack([states[:, rows + 1 + t] for t in range(self.depth)])
        return made.permute(2, 0, 1, 3).flatten(1, 2), own.flatten(1, 2)


def look_ahead_states(model: Decoder, tokens: Tensor, places: Tensor, inputs: Tensor) -> Tensor:
    """Return the states [b, m, T, hidden] of chains of rows with inputs [T, hidden] after places [m] of tokens [b, n].

    The chains have gradients for `inputs`; the tokens' rows have none.
    """
    (batch, length), (count, hidden) = tokens.shape, inputs.shape
    positions = (places[:, None] + 1 + torch.arange(count, device=places.device)).flatten()  # [m * T]
    windows = {layer.attention.window for layer in model.config.layers}
    masks = {window: look_ahead_mask(length, places, count, window) for window in windows}
    stored = list[tuple[Tensor, Tensor]]()  # the tokens' keys and values, by layer

    def attend(layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned) -> Tensor:
        stored.append((key, value))
        return attend_causally(layer, of, query, key, value, learned)

    def attend_ahead(layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned) -> Tensor:
        keys, values = (torch.cat(each, dim=1) for each in zip(stored[layer], (key, value), strict=True))
        return attend_masked(of, query, keys, values, masks[of.window], learned)

    with torch.no_grad():
        x = model.look_up(tokens)
        for _ in model.states(x, torch.arange(length, device=tokens.device), attend, tokens=tokens):
            pass
    ahead = inputs.repeat(len(places), 1).expand(batch, -1, hidden)  # [b, m * T, hidden]
    *_, last = model.states(ahead, positions, attend_ahead)
    states: Tensor = model.model.norm(last)
    return states.view(batch, len(places), count, hidden)


def look_ahead_mask(length: int, places: Tensor, count: int, window: int | None = None) -> Tensor:
    """Return which keys each row sees [m * T, n + m * T]: the tokens up to its place, and its chain up to itself.

    window: the number of positions that a row sees, its own included; None = all.
    """
    device = places.device
    of = torch.arange(len(places), device=device).repeat_interleave(count)
    within, before = torch.arange(count, device=device).repeat(len(places)), torch.arange(length, device=device)
    own = places[of] + 1 + within  # positions
    tokens = before <= places[of][:, None]
    chain = of[:, None] == of
    return torch.cat((
        tokens & within_window(own, before, window), chain & within_window(own, own, window)
    ), 1)  # fmt: skip
