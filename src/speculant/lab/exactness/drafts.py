"""The drafters of an enumeration: the configured drafter with a table as its model, or a table's likeliest tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from speculant import plugins
from speculant.cache import CacheShape, KVCache, slotted_cache
from speculant.config import Limits, SpeculativeConfig
from speculant.drafting import Drafter, DrafterContext, DrafterNeeds, Drafters, StatelessDrafter, complete
from speculant.engine import Engine, EngineOptions, build_verifiers, method_name
from speculant.lab.exactness.distributions import FULL_SUPPORT, Pair
from speculant.lab.exactness.speculation import Case
from speculant.lab.exactness.tables import History, TableModel
from speculant.lengths import Fixed
from speculant.params import SamplingParams
from speculant.sampling import Chances, KeyedChances
from speculant.types import CommittedRows, DraftTree, Request
from speculant.verification import Verifier

MakeCache = Callable[[CacheShape], KVCache]
MakeDrafter = Callable[[Pair, Chances, Limits, MakeCache], Drafter]
TRIAL = 8  # a drafter that works on tables drafts within this number of tokens
APART = 1_000_000  # distance of the seeds of a pair and of the tables of further draft models


@dataclass(frozen=True)
class TableDrafter:
    """A drafter of an enumeration, with a description for the user."""

    description: str
    make: MakeDrafter
    needs: DrafterNeeds

    def prompt(self, vocab_size: int) -> History:
        """Return a prompt that it can draft after: a drafter without a model needs text to match."""
        return (0,) if self.needs.emits_probs else tuple(range(vocab_size)) * 2


class Likeliest(StatelessDrafter):
    """Proposes the likeliest tokens of a pair's draft distribution, without probs."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        return [self._chain(tuple(request.tokens), limit) for request, limit in zip(requests, limits, strict=True)]

    def _chain(self, history: History, limit: int) -> DraftTree:
        tokens: list[int] = []
        while len(tokens) < limit:
            logits = self._pair.draft((*history, *tokens))
            tokens.append(logits.index(max(logits)))
        return DraftTree.chain(tokens)


class Separate(StatelessDrafter):
    """Keeps a drafter for each sequence, so that branches of an enumeration do not learn from each other; no caches."""

    def __init__(self, make: Callable[[], Drafter]) -> None:
        self._make, self.needs = make, make().needs
        self._drafters: dict[int, Drafter] = {}

    def begin(self, request: Request) -> None:
        """See `Drafter.begin`."""
        self._drafters[request.seq_id] = self._make()
        self._drafters[request.seq_id].begin(request)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        pairs = zip(requests, limits, strict=True)
        return [tree for request, limit in pairs for tree in self._drafters[request.seq_id].propose([request], [limit])]

    def observe(self, request: Request, rows: CommittedRows) -> None:
        """See `Drafter.observe`."""
        self._drafters[request.seq_id].observe(request, rows)

    def end(self, request: Request) -> None:
        """See `Drafter.end`."""
        self._drafters.pop(request.seq_id).end(request)


def choose_draft(spec: SpeculativeConfig, verifiers: Mapping[str, Verifier]) -> TableDrafter:
    """Return the configured method with its own options, if it drafts on tables; else `Likeliest`."""
    name, make = method_name(spec), of_method(spec)
    try:
        needs, drafted = _try(make, verifiers)
        why = "" if drafted else "it drafted nothing"
    except Exception as error:  # noqa: BLE001 - a drafter may raise any error on a table
        needs, why = DrafterNeeds(), f"{type(error).__name__}: {error}"
    if not why:
        return TableDrafter(f"{name}, around tables", make, needs)
    return TableDrafter(
        f"a table's likeliest tokens, as {name} can't draft from tables ({why})", likeliest, Likeliest.needs
    )


def of_method(spec: SpeculativeConfig) -> MakeDrafter:
    """Return a maker of the method's drafter; its model is a pair's draft table, further models have other tables."""
    plugin, (_, options) = plugins.load("speculant.drafting", method_name(spec)), build_verifiers(spec)

    def make(pair: Pair, chances: Chances, limits: Limits, make_cache: MakeCache) -> Drafter:
        pairs = (replace(pair, seed=pair.seed + APART * number) for number in itertools.count())
        context = DrafterContext(
            options=options,
            model=spec.model,
            vocab_size=pair.vocab_size,
            device=torch.device("cpu"),
            chances=chances,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            load_draft=lambda source, head_tokens=(): TableModel(
                next(pairs).draft, pair.vocab_size, masks=plugin.METHOD.reads_masks
            ),
            make_cache=make_cache,
        )
        drafter = complete(plugin.build(context))
        separate = plugin.METHOD.learns and not drafter.caches
        return Separate(lambda: complete(plugin.build(context))) if separate else drafter

    return make


def likeliest(pair: Pair, chances: Chances, limits: Limits, make_cache: MakeCache) -> Drafter:
    """Make a `Likeliest`."""
    return Likeliest(pair)


def build_case(
    case: Case, make: MakeDrafter, chances: Chances, verifiers: Mapping[str, Verifier]
) -> tuple[Engine, Drafter]:
    """Build the real engine on a case's tables; its caches keep no prefixes."""

    def make_cache(shape: CacheShape) -> KVCache:
        return slotted_cache(shape, case.limits.max_num_seqs, case.limits.max_model_len)

    target = TableModel(case.pair.target, case.pair.vocab_size)
    cache = make_cache(target.cache_shape)
    drafter = make(case.pair, chances, case.limits, make_cache)
    options = EngineOptions(case.limits, 0, case.ends, case.verification)
    engine = Engine(options, target, cache, chances, dict(verifiers), Fixed(case.length), Drafters.of(drafter))
    return engine, drafter


def _try(make: MakeDrafter, verifiers: Mapping[str, Verifier]) -> tuple[DrafterNeeds, bool]:
    """Run a drafter for a few tokens; return its needs, and whether it drafted anything."""
    case = Case(Pair(0, 3, FULL_SUPPORT), 2, verification="auto")
    engine, drafter = build_case(case, make, KeyedChances(), verifiers)
    (request,) = engine.add_request((0, 1, 2, 0, 1, 2), SamplingParams(max_tokens=TRIAL), "trial")
    while not request.finished:
        engine.step()
    if request.error is not None:
        raise request.error
    return drafter.needs, request.metrics.speculative_decoding.num_draft_tokens > 0
