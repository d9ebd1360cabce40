"""Training of a draft that predicts several tokens in one pass, by masks: PARD (arXiv 2504.18583).

At the tokens of a text, the draft learns as any draft does. Some of the tokens are each followed by a chain of masks. A
mask sees the text up to this token, and the earlier masks of its chain. The mask t places after the token stands for
the text's own token at that place, and learns the target's distribution after it. So one pass over a text trains all
depths of a draft at many places.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from speculant.lab.training.heads.look_ahead import look_ahead_mask
from speculant.lab.training.losses import Objective, OutputHead, chunks, distribution_distance
from speculant.lab.training.passes import attend_masked, within_window
from speculant.lab.training.texts import Texts
from speculant.models import Attention, Decoder, Learned

STRIDE = 4  # tokens from one chain of masks to the next, on average
_AT_A_TIME = 8  # texts


class ParallelObjective(Objective):
    """The distance of a draft's distributions from the target's, at the tokens and at `depth` - 1 masks after some.

    Windows are texts [b, 1 + n] with their places first (`Texts.batch`).
    """

    name = "distance to the target"

    def __init__(self, target: Decoder, texts: Texts, depth: int, seed: int = 0) -> None:
        self._output, self._texts, self._depth, self._seed = OutputHead.of(target).fixed(), texts, depth, seed

    @override
    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        tokens = windows[:, 1:]
        own = self._texts.states_of(windows[:, 0])
        generator = torch.Generator().manual_seed(self._seed + int(windows[:, 0].sum()))
        count = tokens.shape[1] - self._depth + 1
        places = torch.randperm(count, generator=generator)[: max(1, count // STRIDE)].sort().values
        plain, masked = masked_states(model, tokens, places, self._depth - 1)
        hidden = torch.cat((plain.flatten(0, 1), masked.flatten(0, 2)))
        targets = torch.cat((own.flatten(0, 1), own[:, _predicted(places, self._depth)].flatten(0, 2)))
        head = OutputHead.of(model, len(self._output.matrix))
        return distribution_distance(hidden, head, targets, self._output, progress)


def masked_states(model: Decoder, tokens: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the states of tokens [b, n], [b, n, hidden], and of `count` masks after places [m], [b, m, count, hidden].

    Masks see no other place's masks, and no token sees a mask.
    """
    mask, (batch, length) = model.config.embedding.mask, tokens.shape
    assert mask is not None
    extended = torch.cat((tokens, tokens.new_full((batch, len(places) * count), mask)), dim=1)
    own = torch.arange(length)
    positions = torch.cat((own, (places[:, None] + 1 + torch.arange(count)).flatten()))
    seen = {
        layer.attention.window: _seen(length, places, count, layer.attention.window) for layer in model.config.layers
    }

    def attend(layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned) -> Tensor:
        return attend_masked(of, query, key, value, seen[of.window], learned)

    *_, last = model.states(model.look_up(extended), positions, attend, tokens=extended)
    states: Tensor = model.model.norm(last)
    return states[:, :length], states[:, length:].view(batch, len(places), count, -1)


def _seen(length: int, places: Tensor, count: int, window: int | None) -> Tensor:
    """Return which keys each row sees [n + m * count, n + m * count]: tokens first, then the chains of masks."""
    own, masks = torch.arange(length), len(places) * count
    tokens = torch.cat((within_window(own, own, window), torch.zeros(length, masks, dtype=torch.bool)), 1)
    return torch.cat((tokens, look_ahead_mask(length, places, count, window)))


def _predicted(places: Tensor, depth: int) -> Tensor:
    """Return the positions [m, depth - 1] whose distributions the masks after places [m] learn."""
    return places[:, None] + 1 + torch.arange(depth - 1)


@torch.inference_mode()
def overlap_by_depth(model: Decoder, target: Decoder, texts: Texts, depth: int) -> list[float]:
    """Return the mean of sum min(p, q) at each depth of a draft, on the held-out texts, at every STRIDE-th place."""
    output = OutputHead.of(target)
    head, sums, rows = OutputHead.of(model, len(output.matrix)), torch.zeros(depth), 0
    places = torch.arange(0, texts.tokens.shape[1] - depth + 1, STRIDE)
    for part in torch.split(torch.arange(texts.num_training, len(texts.tokens)), _AT_A_TIME):
        own = texts.states_of(part)
        plain, masked = masked_states(model, texts.tokens[part], places, depth - 1)
        drafted = torch.cat((plain[:, places, None], masked), 2).flatten(0, 1)  # [b * m, depth, hidden]
        wanted = own[:, places[:, None] + torch.arange(depth)].flatten(0, 1)
        for each in chunks(len(drafted)):
            for t in range(depth):
                p, q = output.logits(wanted[each, t]).softmax(-1), head.logits(drafted[each, t]).softmax(-1)
                sums[t] += torch.minimum(p, q).sum()
        rows += len(drafted)
    return [float(total) / rows for total in sums]


def with_mask(model: Decoder) -> Decoder:
    """Return the model with one more row in its table and its output head, for a mask token, if it has no mask yet.

    The new row is the mean of the table; the model draws the mask hardly ever.
    """
    if model.config.embedding.mask is not None:
        return model
    size = model.vocab_size
    embedding = replace(model.config.embedding, vocab_size=size + 1, mask=size)
    made = Decoder(replace(model.config, embedding=embedding))
    with torch.no_grad():
        theirs = dict(model.named_parameters())
        for name, parameter in made.named_parameters():
            own = theirs[name]
            parameter[: len(own)] = own
            if len(parameter) > len(own):
                parameter[len(own)] = own.mean(0)
    return made
