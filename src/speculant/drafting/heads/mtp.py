"""Multi-token prediction: a head that was trained with its target (arXiv 2412.19437, section 2.2).

A matrix maps a token's normalized embedding and the target's normalized state before it to the input of a decoder
layer, and a final norm follows the layer. After the first drafted token the head reads its own output in place of the
target's state, as EAGLE does.

If there are several modules, each drafts one token (`ChainedDrafter`). Trees are drawn by the first module.

The folder may be the target's own, which is used if none is named. Names of the tensors of module m, possibly with the
prefix `model.`:

    mtp_layers.m.{token_layernorm, hidden_layernorm, input_proj, final_layernorm}      the `speculators` package, MiMo
    mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, mtp.layers.m            Qwen: modules share the rest
    layers.L+m.{enorm, hnorm, eh_proj, shared_head.norm, shared_head.head}             DeepSeek; the target has L layers

A GGUF file of a Qwen has the head in block L, and is read as if it had Qwen's names.

The columns of the matrix for the embedding come first; in MiMo's files they come last. Qwen's norms add one to the
stored scales, and its layer is like the target's layers with attention, output gate included. For the first drafted
token, a head reads the target's state after its final norm. For each further token, DeepSeek's head reads its own state
before its norm, and the other heads read their state after it; vLLM and llama.cpp run Qwen's heads in this way. The
embedding is the target's. So is the output head, unless the file has `shared_head.head`.

Memory: the weights, and a KV cache for each module. Cost: a pass of the layer and of the output head for each drafted
token; a chain or tree of one module is one native call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.composite import Proposals
from speculant.drafting.growth import Drafting, chain_input, draw_chains, fit_vocabulary
from speculant.drafting.heads.folder import SPECULATORS, HeadFolder, Renamed, renamed, require_target
from speculant.drafting.heads.hidden import HiddenDrafter, HiddenStateRunner
from speculant.drafting.heads.page import (
    QWEN,
    QWEN_COUNT,
    HeadPage,
    describe_qwen,
    last_state,
    load_head,
    make_head_drafter,
    name_in_qwen,
    newest,
)
from speculant.errors import ModelError, SpeculantError
from speculant.kernels import REFERENCE, Sampler
from speculant.models import (
    CausalLM,
    Chain,
    HeadConfig,
    Mapped,
    StateEntry,
    build_batch,
    count,
    head_shapes,
    read_plain,
    text_config,
)
from speculant.sampling import Node, distribution
from speculant.types import CommittedRows, DraftTree, Request

KIND = "mtp"
METHOD = Method(default_length=3, uses_model=True, uses_head=True, in_target=True)
MATRIX, LAYER = "fc.weight", "layers.0.self_attn.o_proj.weight"
COUNTS = (QWEN_COUNT, "num_nextn_predict_layers")  # keys of config.json
PARTS = {
    "token_layernorm": "token_norm", "pre_fc_norm_embedding": "token_norm", "enorm": "token_norm",
    "hidden_layernorm": "hidden_norm", "pre_fc_norm_hidden": "hidden_norm", "hnorm": "hidden_norm",
    "input_proj": "fc", "fc": "fc", "eh_proj": "fc",
    "final_layernorm": "norm", "norm": "norm", "shared_head.norm": "norm", "shared_head.head": "lm_head",
}  # fmt: skip


@dataclass(frozen=True)
class MtpOptions:
    """tree: children per node at each depth, as [3, 2, 1], or the ranks on the way to every node; None = a chain.

    It may also be "dynamic", or {"topk": 3, "depth": 6} with other numbers: see drafting/growth.py.
    """

    tree: Any = None


def build(context: DrafterContext) -> HiddenDrafter:
    """Load the head; raises SpeculantError for one that does not fit the target."""
    options = read_options(context, MtpOptions)
    target = require_target(context.target.model)
    folder = HeadFolder.open(str(context.model), KIND, among=True)
    layers, number = last_state(folder, target), count_modules(folder, target.num_layers)
    if number == 1 or options.tree is not None:
        return make_head_drafter(context, load(folder, target), layers, newest, options.tree)
    modules = [
        ModuleRunner.of(context, load(folder, target, module), encode=newest, shift=1 + module)
        for module in range(number)
    ]
    return ChainedDrafter(modules, layers, context.target.vocab_size, context.target.sampler)


def stored_in(place: Path, num_layers: int) -> int:
    """Return how many modules are among the weights of a model of `num_layers` layers; 0 = it has no head."""
    with suppress(SpeculantError):  # of weights that only another package reads
        folder = HeadFolder.open(str(place), KIND, among=True)
        names = {rename(name, num_layers) for name in folder.names()}
        return count_modules(folder, num_layers) if MATRIX in names else 0
    return 0


def count_modules(folder: HeadFolder, num_layers: int) -> int:
    """Return how many modules are stored for a target of `num_layers` layers, at most as many as config.json names."""
    entries, stored = text_config(folder.config), 1  # the first one is checked when it is read
    while LAYER in {rename(name, num_layers, stored) for name in folder.names()}:
        stored += 1
    return min([stored, *(count(entries, key) for key in COUNTS if entries.get(key))])


def load(folder: HeadFolder, target: CausalLM, module: int = 0) -> CausalLM:
    """Read a module from its own folder or from the target's. Raises ModelError if there is none."""
    folder.check_size(text_config(folder.config).get("hidden_size"), target.hidden_size, "hidden states of")
    behind = f"layers.{target.num_layers + module}."
    weights = renamed(folder, lambda name: rename(name, target.num_layers, module))
    if MATRIX not in weights.names():
        raise ModelError(
            f"{folder.folder} has no head for multi-token prediction: no mtp_layers.0, mtp or {behind}eh_proj",
            "name the folder of a checkpoint that has one.",
        )
    if _state_first(folder, weights):
        halves = read_plain(weights, MATRIX).chunk(2, dim=1)
        weights = replace(weights, made={MATRIX: torch.cat(halves[::-1], dim=1)})
    if weights.stored[MATRIX].startswith(QWEN):
        return load_head(OF_QWEN, folder, target, weights=weights)[0]
    in_target = any(name.startswith(behind) for name in weights.stored.values())
    page = HeadPage(KIND, StateEntry.NORMED, str, flags=lambda weights: {"norm_output": not in_target})
    return load_head(page, folder, target, weights=weights)[0]


OF_QWEN = HeadPage(
    KIND,
    StateEntry.NORMED,
    str,
    flags=lambda weights: {"norm_output": True},
    sizes=describe_qwen,
)


def weights_within(place: Path, target: CausalLM) -> tuple[Mapped, Callable[[str], str]] | None:
    """Return the tensors of Qwen's head among a model's weights, and their names in files; None = it has none.

    The names are the model's, and the tensors those of its layer.
    """
    folder = HeadFolder.open(str(place), KIND, among=True)
    weights = renamed(folder, lambda name: rename(name, target.num_layers))
    if not weights.stored[MATRIX].startswith(QWEN):
        return None
    sizes = describe_qwen(folder.config, weights.names(), target)
    return Mapped(weights, head_shapes(HeadConfig(sizes, OF_QWEN.entry), target), sizes.tensors), name_in_qwen


def _state_first(folder: HeadFolder, weights: Renamed) -> bool:
    return weights.stored[MATRIX].startswith("mtp_layers.") and SPECULATORS not in folder.config


def rename(name: str, num_layers: int, module: int = 0) -> str | None:
    """Return the model's name of a tensor of a module, for a target of `num_layers` layers; None = it is not of it."""
    outer = rf"mtp_layers\.{module}|layers\.{num_layers + module}|mtp(?:\.layers\.{module})?"
    found = re.fullmatch(rf"(?:{outer})\.(.+?)(\.weight|\.bias|(?<=_proj))", name)  # stacked experts have no suffix
    if found is None or found[1].startswith("layers."):  # the layer of another module
        return None
    part, kind = found.groups()
    if part in PARTS and not name.startswith(f"{QWEN}layers."):
        return f"{PARTS[part]}{kind}"
    return None if part == "embed_tokens" else f"layers.0.{part}{kind}"


class ModuleRunner(HiddenStateRunner):
    """Follows the states of the module before this one.

    texts: the tokens of sequences that have drafted ones in this round, these included.
    """

    takes_more = False  # the module after this one needs the states of the rows
    texts: Mapping[int, list[int]] = {}

    @override
    def text(self, request: Request) -> list[int]:
        return self.texts.get(request.seq_id, request.tokens)

    def start(self, request: Request) -> int:
        """Return the position of the next row."""
        followed = self._followed[request.seq_id]
        return followed.first + followed.length

    @override
    def note(self, request: Request, tokens: Sequence[int]) -> None:
        """Record the rows of committed tokens alone."""
        committed = len(request.tokens) - self._shift - self.start(request)
        super().note(request, tokens[: max(0, committed)])

    def settle(self, request: Request) -> None:
        """Drop the rows of drafted tokens, and the states that are made of any."""
        followed = self._followed[request.seq_id]
        if followed.pending is not None:
            followed.pending.keep(max(0, len(request.tokens) + 1 - self._shift - self.start(request)))
        if followed.length < self.cache.length(request.seq_id):
            self.finish(request)


class ChainedDrafter(HiddenDrafter):
    """Drafts a token with each of the modules; layers: the first module reads these target layers' states.

    Row i of module k, counted from 1, reads the state that module k - 1 computes in its row i, and token i + k. Module
    0 is the target.

        tokens     t0 t1 t2 t3           t3 = the newest token             d1, d2 = the first two drafted tokens
        module 1   (h0, t1)  (h1, t2)  (h2, t3)      predicts d1           h = states of the target
        module 2   (g0, t2)  (g1, t3)  (g2, d1)      predicts d2           g = states of module 1

    Each module has a KV cache. Rows of committed tokens stay in it. Rows of drafted tokens are dropped after each
    draft, and so are the states computed from them. Each token is drawn from the distribution that its module computes
    after all tokens before it. The verifier gets this distribution, so all verification rules are exact.
    """

    def __init__(
        self, modules: Sequence[ModuleRunner], layers: Sequence[int], vocab_size: int, sampler: Sampler = REFERENCE
    ) -> None:
        super().__init__(modules[0], layers, vocab_size, sampler)
        self._modules: Sequence[ModuleRunner] = tuple(modules)
        self.caches = tuple(module.cache for module in modules)
        self.needs = replace(self.needs, max_nodes=len(modules), usual_nodes=len(modules))

    @override
    def begin(self, request: Request) -> None:
        for module in self._modules:
            module.begin(request)

    @override
    def _draw(self, drafting: Drafting, topology: object) -> Proposals:
        most, requests = len(self._modules), [request for request, _ in drafting]
        chains = self._modules[0].plan([(request, min(limit, most)) for request, limit in drafting])
        levels = _Levels(self._modules, requests, chains, self._vocab_size, self._sampler)
        try:
            made = draw_chains(chains, levels)
            levels.end()
        finally:
            for module in self._modules:
                module.texts = {}
                for request in requests:
                    module.settle(request)
        return {chain.request.seq_id: draft for chain, draft in zip(chains, made, strict=True) if draft.size}


@dataclass
class _Levels:
    """The passes of a round, one of each module. chains: the input of the first; level: the next module's index."""

    modules: Sequence[ModuleRunner]
    requests: Sequence[Request]
    chains: Sequence[Chain]
    vocab_size: int
    sampler: Sampler
    level: int = 0

    def __call__(self, nodes: Sequence[Node]) -> Tensor:
        """Return the distribution [V] of the next token after each of the nodes: zeros if its module has a backlog."""
        logits = self._pass({node.request.seq_id: node.drafted for node in nodes})
        able = [place for place, node in enumerate(nodes) if node.request.seq_id in logits]
        device = self.modules[0].model.cache_shape.device
        probs = torch.zeros(len(nodes), self.vocab_size, dtype=torch.float64, device=device)
        if able:
            rows = torch.stack([logits[nodes[place].request.seq_id] for place in able])
            probs[able] = distribution(rows, [nodes[place] for place in able], self.sampler).to(probs)
        return probs

    def end(self) -> None:
        """Let the other modules process committed tokens."""
        while self.level < len(self.modules):
            self._pass({})

    def _pass(self, drafted: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Run the next module; return the logits [V] of the sequences that have these drafted tokens so far."""
        module, after = self.modules[self.level], self.modules[self.level + 1 : self.level + 2]
        chains = self.chains if not self.level else self._plan(module, drafted)
        self.level += 1
        if not chains:
            return {}
        model, states = module.model, dict[int, Tensor]()
        inputs = [
            chain_input(chain, chain.input_tokens, model.vocab_size, DraftTree.empty(), chain.hidden)
            for chain in chains
        ]
        hidden = model.forward(build_batch(inputs, module.cache, model.cache_shape.device), module.cache.storage)
        assert hidden.carried is not None, "the model hands nothing on"
        end = 0
        for chain in chains:
            request, first, end = chain.request, end, end + len(chain.input_tokens)
            if chain.limit and request.seq_id in drafted:
                states[request.seq_id] = hidden.last[end - 1]
            for following in after:
                rows = hidden.carried[first:end]
                following.observe(request, CommittedRows(module.start(request), chain.input_tokens, hidden=(rows,)))
            module.note(request, chain.input_tokens)
        if not states:
            return {}
        logits = fit_vocabulary(model.logits(torch.stack([*states.values()])), self.vocab_size)
        return dict(zip(states, logits, strict=True))

    def _plan(self, module: ModuleRunner, drafted: Mapping[int, Sequence[int]]) -> Sequence[Chain]:
        """Plan the input of a module after the first one."""
        drawing = [request for request in self.requests if request.seq_id in drafted]
        module.texts = {request.seq_id: [*request.tokens, *drafted[request.seq_id]] for request in drawing}
        return module.plan([(request, int(request.seq_id in drafted)) for request in self.requests])
