"""Training of heads, on texts that the target writes, with the target's distributions as the goal.

blockwise, medusa    heads on one state: head i learns the target's distribution i + 1 tokens later
eagle, eagle3, mtp   a decoder layer that continues from its own states, as it does in a draft
pass                 look-ahead embeddings: row t after a token learns the target's distribution t tokens later
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from speculant.drafting import QWEN_COUNT, describe_qwen, method_within, name_in_qwen
from speculant.errors import ConfigError
from speculant.lab.checkpoints import stored_tensors, write_joined, write_json, write_tensors
from speculant.lab.training.config import HeadTrainingConfig
from speculant.lab.training.losses import OutputHead, distances, overlaps, weighted
from speculant.lab.training.network import attend_causally, attend_masked, load_plain, within_window
from speculant.lab.training.target_texts import Texts, prepare_texts
from speculant.lab.training.trainer import Objective, Trainer, TrainingRun, model_card
from speculant.models import (
    Attend,
    Attention,
    Decoder,
    DecoderConfig,
    Embedding,
    FeedForwardHeads,
    FutureShape,
    Head,
    HeadConfig,
    HeadDecoder,
    Layer,
    Learned,
    Mlp,
    Norm,
    ResidualHeads,
    Rope,
    StateEntry,
    inner_width,
    read_model_config,
    resolve_source,
    rope_entries,
    usual_taps,
)

RANKS = 8
_TEXTS_A_PASS = 8  # texts


@dataclass(frozen=True)
class HeadAcceptance:
    """Held-out figures by depth, the first drafted token first, on texts of the target.

    alpha: mean of sum min(p, q). rank_shares: of rows in which the target's likeliest token has each rank in q.
    """

    alpha: list[float]
    rank_shares: list[list[float]]
    rows: int


class HeadInTraining(Objective):
    """A head that is trained on a target's states, to predict `depth` tokens in a row.

    layers: whose states are inputs beside those after the final norm, numbered as in `DrafterNeeds.hidden_layers`.
    """

    name = "distance to the target"
    layers: tuple[int, ...] = ()

    def __init__(self, module: nn.Module, target: Decoder, depth: int) -> None:
        self.module, self.depth = module, depth
        self._target, self._output = target, OutputHead.of(target).fixed()
        self._used: Texts | None = None

    def use(self, texts: Texts) -> None:
        """Use the states of these texts from now on."""
        self._used = texts

    @property
    def _texts(self) -> Texts:
        assert self._used is not None
        return self._used

    @override
    def loss(self, model: Any, windows: Tensor, progress: float) -> Tensor:
        return weighted(self._each_depth(*self.predicted(windows[:, 0]), progress))

    def acceptance(self, rows: Tensor) -> HeadAcceptance:
        """Measure texts, given by their places [b]."""
        alpha, shares, total = torch.zeros(self.depth), torch.zeros(self.depth, RANKS), 0
        with torch.inference_mode():
            for part in torch.split(rows, _TEXTS_A_PASS):
                made, own = self.predicted(part)
                found = overlaps(made, own, self._output, RANKS, self._output_head())
                alpha, shares, total = alpha + found[0].cpu(), shares + found[1].cpu(), total + made.shape[1]
        return HeadAcceptance((alpha / total).tolist(), (shares / total).tolist(), total)

    @abstractmethod
    def predicted(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's states by depth [depth, r, hidden], and the target's that they predict.

        Of rows of the texts at these places [b], each of which has a prediction at all depths. The target's states are
        [r, hidden] if all depths predict the same rows, otherwise [depth, r, hidden].
        """

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the config.json of the folder, without figures."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the weights in the folder's format."""

    def _each_depth(self, made: Tensor, own: Tensor, progress: float) -> Tensor:
        """Return the loss at each depth [depth]."""
        return distances(made, own, self._output, progress, self._output_head())

    def _output_head(self) -> OutputHead | None:
        """Return the head's own output head; None = the target's."""
        return None


@dataclass(frozen=True)
class HeadKind:
    """A kind of head. make: a new head for a target.

    own_output_head: whether it may have an output head of its own. within_target: whether it may be among the weights.
    """

    make: Callable[[HeadTrainingConfig, Decoder], HeadInTraining]
    own_output_head: bool = False
    within_target: bool = False


class FutureObjective(HeadInTraining):
    """For each row s the heads predict from the states of rows s - 1, s - 2, ...

    extra: entries of config.json besides the sizes.
    """

    def __init__(self, heads: ResidualHeads | FeedForwardHeads, target: Decoder, extra: dict[str, Any]) -> None:
        super().__init__(heads, target, heads.shape.num_heads)
        self._heads, self._extra = heads, extra

    @override
    def config(self) -> dict[str, Any]:
        sizes = {"hidden_size": self._heads.shape.hidden_size, "vocab_size": self._target.vocab_size}
        return {**sizes, **self._extra}

    @override
    def tensors(self) -> dict[str, Tensor]:
        return self._heads.tensors()

    @override
    def predicted(self, places: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self._texts.states_of(places)
        count, length = self.depth, hidden.shape[1]
        made = self._heads.states(hidden.flatten(0, 1), count).view(count, *hidden.shape)
        first = max(count, self._texts.opening - 1)
        own = [made[head, :, first - 1 - head : length - 1 - head] for head in range(count)]
        return torch.stack(own).flatten(1, 2), hidden[:, first:].flatten(0, 1)


def new_blockwise(config: HeadTrainingConfig, target: Decoder) -> FutureObjective:
    """Return new heads (arXiv 1811.03115). Their outer weights are 0, so each begins as the target's own prediction."""
    inner = config.inner or 2 * target.hidden_size
    heads = FeedForwardHeads(FutureShape(config.num_heads, target.hidden_size, inner=inner))
    generator = torch.Generator().manual_seed(config.seed)
    torch.nn.init.normal_(heads.up, std=target.hidden_size**-0.5, generator=generator)
    return FutureObjective(heads, target, {"num_heads": config.num_heads, "inner_size": inner})


def new_medusa(config: HeadTrainingConfig, target: Decoder) -> FutureObjective:
    """Return new heads (arXiv 2401.10774); their weights are zero, so each begins as the target's own prediction."""
    heads = ResidualHeads(FutureShape(config.num_heads, target.hidden_size, config.num_layers))
    names = {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers}
    return FutureObjective(heads, target, names)


_PLAIN = Rope(10000.0)  # of a layer whose target has no rotary positions


class RoundsObjective(HeadInTraining):
    """The states that each round makes of a decoder layer that continues from its own states, as it does in a draft.

    Round 1 reads the target's states after its final norm, and round m reads the states of round m - 1. A row attends
    to the last m - 1 rows as those rounds made them, and to older rows as round 1 made them, since the target's states
    replace the layer's own once tokens are accepted (arXiv 2408.15766; "training-time test" in arXiv 2503.01840, 3.2).

    own_config: entries of config.json besides the layer's sizes.
    """

    def __init__(
        self, module: nn.Module, head: HeadDecoder, target: Decoder, depth: int, own_config: Mapping[str, Any]
    ) -> None:
        super().__init__(module, target, depth)
        self._head, self._own_config = head, own_config

    @override
    def config(self) -> dict[str, Any]:
        return {**layer_entries(self._head.config.decoder), **self._own_config}

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


def layer_entries(own: DecoderConfig) -> dict[str, Any]:
    """Return the entries of config.json for such a layer."""
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
    }


def begin_small(module: nn.Module, seed: int) -> None:
    """Give small random weights to all matrices."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            shrink = 0.5 if "o_proj" in name or "down_proj" in name else 1.0
            nn.init.normal_(parameter, std=0.5 * shrink * parameter.shape[1] ** -0.5, generator=generator)


class RoundsOfRows(Attend):
    """The attention of one round after the other: see `RoundsObjective`."""

    def __init__(self) -> None:
        self._versions = list[tuple[Tensor, Tensor]]()  # keys and values [b, heads, n, dim] of each round

    @override
    def __call__(
        self, layer: int, of: Attention, query: Tensor, key: Tensor, value: Tensor, learned: Learned
    ) -> Tensor:
        """Of a head's only layer, which has no sinks, for rows [b, n, heads, dim]."""
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


REGRESSION = 0.5  # weight of the distance of states; it falls to zero at the end of a run


class EagleObjective(RoundsObjective):
    """Rounds whose states are also trained to be near the target's."""

    @override
    def _each_depth(self, made: Tensor, own: Tensor, progress: float) -> Tensor:
        apart = functional.smooth_l1_loss(made, own.expand_as(made), reduction="none").mean((1, 2))
        return super()._each_depth(made, own, progress) + REGRESSION * (1 - progress) * apart


def new_eagle(config: HeadTrainingConfig, target: Decoder) -> EagleObjective:
    """Return a new layer (arXiv 2401.15077) of the target's own shape, with small random weights."""
    head = HeadDecoder(HeadConfig(layer_sizes(config, target), StateEntry.INPUT), target)
    begin_small(head, config.seed)
    with torch.no_grad():  # it begins as the target's state, so that the residual stream is of the right size
        size = target.hidden_size
        head.fc.weight[:, size:] += 0.5 * torch.eye(size)
    own = {"architectures": ["LlamaForCausalLM"], "bias": False}
    return EagleObjective(head, head, target, config.depth, own)


class MtpObjective(RoundsObjective):
    """Rounds whose states are those after the head's norm, as the first round's are those after the target's norm."""

    def is_described_in(self, config: Mapping[str, Any]) -> bool:
        """Whether the drafter reads this layer by a target's config.json."""
        own = self._head.config.decoder
        found = describe_qwen(config, (), self._target)
        return (found.layers, found.norm, found.tensors) == (own.layers, own.norm, own.tensors)

    @override
    def tensors(self) -> dict[str, Tensor]:
        made = stored_tensors(super().tensors(), self._head.config.decoder.tensors)
        return {name_in_qwen(name): tensor for name, tensor in made.items()}


def new_mtp(config: HeadTrainingConfig, target: Decoder) -> MtpObjective:
    """Return a new block of Qwen3.5's arithmetic with the sizes of the target's attention, and small random weights.

    Its attention is gated, and its norms' stored scales are those minus one, whatever the target's family.
    """
    own = mtp_entries(layer_sizes(config, target))
    sizes = describe_qwen(own, (), target)
    head = HeadDecoder(HeadConfig(sizes, StateEntry.NORMED, norm_output=True), target)
    begin_small(head, config.seed)
    with torch.no_grad():  # it begins as the target's state, of the target's size
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.zero_()
        head.fc.weight[:, target.hidden_size :] += torch.eye(target.hidden_size)
        scales, own_scales = target.model.norm.weight, head.norm.weight
        assert own_scales is not None
        assert scales is not None, "a norm before a head has scales"
        own_scales.add_((scales + target.config.norm.offset).square().mean().sqrt() - sizes.norm.offset)
    return MtpObjective(head, head, target, config.depth, own)


def mtp_entries(sizes: DecoderConfig) -> dict[str, Any]:
    """Return the entries of config.json for a block of the same sizes."""
    rotated = sizes.attention.rotated / sizes.attention.head_dim
    kind = {"model_type": "qwen3_5_text", "layer_types": ["full_attention"], QWEN_COUNT: 1}
    return {**layer_entries(sizes), **kind, "partial_rotary_factor": rotated}


_MEASURED = 16  # texts for measuring the size of states


class Network(nn.Module):
    """The head, and the matrix that maps the states of three layers to one."""

    def __init__(self, head: HeadDecoder, width: int) -> None:
        super().__init__()
        self.head = head
        self.fc = nn.Linear(width, head.hidden_size, bias=False)


class Eagle3Objective(RoundsObjective):
    """Rounds from the states of three of the target's layers, on distributions alone (arXiv 2503.01840).

    A head with an output head of its own has the most frequent tokens of the texts. A target's states grow from layer
    to layer, until a new layer's output is small beside them. In training they are divided by their size; the written
    weights include these divisors.
    """

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


def new_eagle3(config: HeadTrainingConfig, target: Decoder) -> Eagle3Objective:
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


_STRIDE = 8  # tokens of a text from one place to the next


class LookAhead(nn.Module):
    """The embeddings [T, hidden]. They have the name of token embeddings, so the optimizer treats both alike."""

    def __init__(self, target: Decoder, count: int, seed: int) -> None:
        super().__init__()
        table = target.look_up(torch.arange(target.vocab_size, device=target.cache_shape.device)).detach().cpu()
        noise = torch.randn(count, table.shape[1], generator=torch.Generator().manual_seed(seed))
        self.embed_tokens = nn.Parameter(table.mean(0) + noise * table.std(0))


class LookAheadObjective(HeadInTraining):
    """The target is compared at each depth with its own state there, in training at every _STRIDE-th place.

    The target is fixed; only the embeddings are learned (arXiv 2311.13581). The rows of a text's tokens are computed as
    usual. After some of them comes a chain of look-ahead rows, which attend to the tokens up to its place and to
    earlier rows of the chain.
    """

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
    def config(self) -> dict[str, Any]:
        count, hidden = self._inputs.shape
        return {"hidden_size": hidden, "vocab_size": self._target.vocab_size, "num_look_ahead": count}

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {"look_ahead.weight": self._inputs.detach()}

    @override
    def predicted(self, places: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return both for every _STRIDE-th row after `first`."""
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
    windows = {layer.window for layer in model.config.layers}
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


def new_pass(config: HeadTrainingConfig, target: Decoder) -> LookAheadObjective:
    """Return new look-ahead embeddings, each near the mean of the target's."""
    if target.config.states:
        raise ConfigError(
            "in training, rows that look ahead see all up to one place each, and a layer with a state sees all rows",
            "train a head of another kind, such as eagle.",
        )
    if config.num_heads >= config.seq:
        raise ConfigError(
            f"texts of {config.seq} tokens have no place for {config.num_heads} predicted ones", "raise --seq."
        )
    return LookAheadObjective(LookAhead(target, config.num_heads, config.seed), target, config.seed)


KINDS: Mapping[str, HeadKind] = {  # by the names of their functions, which are those of the methods that draft
    make.__name__.removeprefix("new_"): HeadKind(
        make, own_output_head=make is new_eagle3, within_target=make is new_mtp
    )
    for make in (new_blockwise, new_eagle, new_eagle3, new_medusa, new_mtp, new_pass)
}

_WATCHED = 16  # held-out texts that are measured during training


@dataclass(frozen=True)
class HeadOutcome:
    """The measurements of a finished run."""

    parameters: int
    bytes: int
    tokens: int  # seen in training, repetitions counted
    texts: int
    steps: int
    minutes: float
    acceptance: HeadAcceptance


class HeadRun(TrainingRun[HeadTrainingConfig, HeadOutcome]):
    """A run from texts that the target writes to the folder of a head."""

    @cached_property
    def target(self) -> Decoder:
        """The target in float32. Raises ConfigError for one that this training can't compute."""
        config = self.config
        with self.show.doing("Loading the target"):
            target = load_plain(config.target, device=config.device)
        if target.config.encoder is not None:
            raise ConfigError(
                f"{config.target} reads sources, which this training doesn't give it",
                "name a target without an encoder.",
            )
        return target

    @cached_property
    def head(self) -> HeadInTraining:
        """The head, with its first weights."""
        head = KINDS[self.config.kind].make(self.config, self.target)
        head.module.to(self.target.cache_shape.device)
        return head

    @cached_property
    def texts(self) -> Texts:
        """The target's texts, which are written if the folder lacks them."""
        return prepare_texts(self.config, self.target, self.show, self.head.layers)

    @override
    def _prepared(self) -> Trainer:
        config, head = self.config, self.head
        self._check_joined()
        texts = self.texts
        head.use(texts)
        rates = config.matrix_lr, config.vector_lr
        return Trainer(config, self.folder, head.module, texts, head, rates, config.settings(), self._shown)

    def _check_joined(self) -> None:
        """Check that the drafter finds the head among the target's weights. Raises ConfigError."""
        config, head = self.config, self.head
        if config.with_target is None:
            return
        assert isinstance(head, MtpObjective)
        place = resolve_source(config.target, "target")
        if not place.is_dir():
            why = f"{place.name} can't take up a head's tensors"
        elif method_within(place, self.target.num_layers):
            why = f"{config.target} has a head among its weights already"
        elif not head.is_described_in(read_model_config(place)):
            why = f"config.json of {config.target} describes no such layer as the head's"
        elif config.with_target.exists() and not (config.with_target.is_dir() and not [*config.with_target.iterdir()]):
            why = f"{config.with_target} is not an empty folder"
        else:
            return
        raise ConfigError(why, "name another folder, or leave out --with-target and name the head when it is used.")

    def _shown(self) -> str:
        """Return the head's acceptance on the first held-out texts."""
        first = self.texts.num_training
        found = self.head.acceptance(torch.arange(first, min(first + _WATCHED, len(self.texts.tokens))))
        return "held-out sum min(p, q) by token " + " ".join(f"{alpha:.3f}" for alpha in found.alpha)

    @override
    def finish(self, trainer: Trainer) -> HeadOutcome:
        config, head, texts, state = self.config, self.head, self.texts, trainer.state
        with self.show.doing("Measuring on held-out texts"):
            found = head.acceptance(torch.arange(texts.num_training, len(texts.tokens)))
        tensors = {
            name: tensor.cpu().to(torch.bfloat16) if tensor.is_floating_point() else tensor.cpu()
            for name, tensor in head.tensors().items()
        }
        file = config.out / "model.safetensors"
        write_tensors(file, tensors)
        outcome = HeadOutcome(
            parameters=sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
            bytes=file.stat().st_size,
            tokens=state.step * config.batch * config.seq,
            texts=texts.num_training,
            steps=state.step,
            minutes=state.elapsed / 60,
            acceptance=found,
        )
        shares = [[round(share, 4) for share in own] for own in found.rank_shares]
        effort = {"minutes": round(outcome.minutes, 2), "steps": state.step}
        names = {"speculant_head": config.kind, "target": config.target_name}
        written = {**names, **head.config(), "rank_shares": shares, "training": effort}
        write_json(config.out / "config.json", written)
        (config.out / "README.md").write_text(_card(config, outcome), encoding="utf-8")
        if config.with_target is not None:
            write_joined(resolve_source(config.target, "target"), file, config.with_target, {QWEN_COUNT: 1})
        return outcome

    @override
    def summary(self, outcome: HeadOutcome) -> list[str]:
        size = f"{outcome.parameters:,} weights, {outcome.bytes / 2**20:.2f} MiB"
        alphas = ", ".join(f"{share:.3f}" for share in outcome.acceptance.alpha)
        return [f"{self.config.out}: {size}, {outcome.steps:,} steps", f"sum min(p, q) by drafted token: {alphas}"]


_HEADINGS = (
    "| drafted token | mean of sum min(p, q) at temperature 1 | the model's likeliest token has rank 1, 2, 3, 4 |"
)


def _card(config: HeadTrainingConfig, outcome: HeadOutcome) -> str:
    figures = outcome.acceptance
    rows = [
        f"| {depth} | {alpha:.3f} | {' '.join(f'{share:.2f}' for share in shares[:4])} |"
        for depth, (alpha, shares) in enumerate(zip(figures.alpha, figures.rank_shares, strict=True), 1)
    ]
    return model_card(
        config.out.name,
        [
            f"A head of the kind {config.kind} for the model {config.target_name}: {outcome.parameters:,} weights in",
            f"bfloat16, {outcome.bytes / 2**20:.2f} MiB. It drafts tokens, which that model verifies;",
            "it is of no use alone.",
        ],
        f"Trained on {outcome.texts:,} {'conversations' if config.chat else 'texts'} of {config.seq} tokens that the"
        f" model wrote itself, at temperature {config.temperature:g}"
        f"{'' if config.chat else ', after prompts that were cut from text files'}: {outcome.tokens:,} tokens in"
        f" {outcome.steps:,} steps, {outcome.minutes:.3g} minutes on"
        f" {'a CPU' if config.device == 'cpu' else 'a GPU'}, by",
        config.command(),
        f"On {figures.rows:,} tokens of texts that were not trained on, computed in float32. The tokens before each"
        " prediction are the model's own.",
        [
            _HEADINGS,
            "| --- | --- | --- |",
            *rows,
        ],
    )
