"""Training of look-ahead embeddings: row t after a token learns the target's distribution t tokens later.

The target is fixed; only the embeddings are learned. The rows of a text's tokens are computed as usual. After some of
them comes a chain of look-ahead rows, which attend to the tokens up to its place and to earlier rows of the chain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from speculant.lab.training.heads.base import HeadAcceptance
from speculant.lab.training.heads.distance import distances, overlaps, weighted
from speculant.lab.training.heads.future import RANKS
from speculant.lab.training.heads.texts import Texts
from speculant.lab.training.output import OutputHead
from speculant.lab.training.passes import attend_causally, attend_masked, within_window
from speculant.models import Attention, Decoder, Learned

STRIDE = 8  # tokens of a text from one place to the next
_AT_A_TIME = 8


class LookAhead(nn.Module):
    """The embeddings [T, hidden]. They have the name of token embeddings, so the optimizer treats both alike."""

    def __init__(self, target: Decoder, count: int, seed: int) -> None:
        super().__init__()
        table = target.look_up(torch.arange(target.vocab_size, device=target.cache_shape.device)).detach().cpu()
        noise = torch.randn(count, table.shape[1], generator=torch.Generator().manual_seed(seed))
        self.embed_tokens = nn.Parameter(table.mean(0) + noise * table.std(0))


class LookAheadObjective:
    """See `HeadInTraining`."""

    name = "distance to the target"
    layers: tuple[int, ...] = ()

    def __init__(self, module: LookAhead, target: Decoder, seed: int = 0) -> None:
        self.module: nn.Module = module
        self._inputs, self._target, self._seed = module.embed_tokens, target.requires_grad_(False), seed
        self._output = OutputHead.of(target).fixed()
        self._texts: Texts | None = None

    def use(self, texts: Texts) -> None:
        """See `HeadInTraining.use`."""
        self._texts = texts

    def loss(self, model: Any, windows: Tensor, progress: float) -> Tensor:
        """See `HeadInTraining.loss`."""
        generator = torch.Generator().manual_seed(self._seed + int(windows[:, 0].sum()))
        assert self._texts is not None
        offsets = min(STRIDE, windows.shape[1] - 1 - len(self._inputs) - max(0, self._texts.opening - 2))
        first = int(torch.randint(offsets, (), generator=generator))
        made, own = self._predicted(windows[:, 0], first)
        each = torch.cat([distances(made[[t]], own[t], self._output, progress) for t in range(len(made))])
        return weighted(each)

    def acceptance(self, rows: Tensor) -> HeadAcceptance:
        """See `HeadInTraining.acceptance`; at every STRIDE-th place."""
        count = len(self._inputs)
        alpha, shares, total = torch.zeros(count), torch.zeros(count, RANKS), 0
        with torch.inference_mode():
            for part in torch.split(rows, _AT_A_TIME):
                made, own = self._predicted(part, 0)
                found = [overlaps(made[[t]], own[t], self._output, RANKS) for t in range(count)]
                alpha = alpha + torch.cat([each[0] for each in found]).cpu()
                shares, total = shares + torch.cat([each[1] for each in found]).cpu(), total + own.shape[1]
        return HeadAcceptance((alpha / total).tolist(), (shares / total).tolist(), total)

    def config(self) -> dict[str, Any]:
        """See `HeadInTraining.config`."""
        count, hidden = self._inputs.shape
        return {"hidden_size": hidden, "vocab_size": self._target.vocab_size, "num_look_ahead": count}

    def tensors(self) -> dict[str, Tensor]:
        """See `HeadInTraining.tensors`."""
        return {"look_ahead.weight": self._inputs.detach()}

    def _predicted(self, rows: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return the look-ahead states [T, r, hidden] at places of texts, and the target's states that they predict."""
        assert self._texts is not None
        count, states = len(self._inputs), self._texts.states_of(rows)
        first += max(0, self._texts.opening - 2)
        places = torch.arange(first, states.shape[1] - count, STRIDE, device=states.device)
        made = look_ahead_states(self._target, self._texts.tokens_of(rows), places, self._inputs)
        own = torch.stack([states[:, places + 1 + t] for t in range(count)])
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
