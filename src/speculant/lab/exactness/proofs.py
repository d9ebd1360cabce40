"""Proofs on random tables: every branch of the real step is followed, and the distributions are compared.

The configured drafter drafts, with a table as its model; a drafter that can't proposes a table's likeliest tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from typing_extensions import override

from speculant import plugins
from speculant.cache import CacheShape, KVCache, slotted_cache
from speculant.config import Limits, SpeculativeConfig
from speculant.drafting import (
    Drafter,
    DrafterContext,
    DrafterNeeds,
    Drafters,
    DraftModels,
    StatelessDrafter,
    Target,
    complete,
)
from speculant.engine import Engine, EngineOptions, build_verifiers, method_name
from speculant.lab.exactness.enumeration import (
    EXACT,
    FULL_SUPPORT,
    Case,
    History,
    Pair,
    TableModel,
    TooManyWaysError,
    enumerate_case,
)
from speculant.lengths import Fixed
from speculant.params import SamplingParams
from speculant.sampling import Chances, KeyedChances
from speculant.types import CommittedRows, DraftTree, Request
from speculant.verification import Verifier

MakeCache = Callable[[CacheShape], KVCache]
MakeDrafter = Callable[[Pair, Chances, Limits, MakeCache], Drafter]
# Settings that shape a distribution.
SHAPING = (*("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),)
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

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
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

    @override
    def begin(self, request: Request) -> None:
        self._drafters[request.seq_id] = self._make()
        self._drafters[request.seq_id].begin(request)

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        pairs = zip(requests, limits, strict=True)
        return [tree for request, limit in pairs for tree in self._drafters[request.seq_id].propose([request], [limit])]

    @override
    def observe(self, request: Request, rows: CommittedRows) -> None:
        self._drafters[request.seq_id].observe(request, rows)

    @override
    def end(self, request: Request) -> None:
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
    about = f"a table's likeliest tokens, as {name} can't draft from tables ({why})"
    return TableDrafter(about, lambda pair, *_: Likeliest(pair), Likeliest.needs)


def of_method(spec: SpeculativeConfig) -> MakeDrafter:
    """Return a maker of the method's drafter; its model is a pair's draft table, further models have other tables."""
    plugin, (_, options) = plugins.load("speculant.drafting", method_name(spec)), build_verifiers(spec)

    def make(pair: Pair, chances: Chances, limits: Limits, make_cache: MakeCache) -> Drafter:
        pairs = (replace(pair, seed=pair.seed + APART * number) for number in itertools.count())
        context = DrafterContext(
            options,
            spec.model,
            Target(pair.vocab_size, torch.device("cpu")),
            DraftModels(
                lambda source, head_tokens=(): TableModel(
                    next(pairs).draft, pair.vocab_size, masks=plugin.METHOD.reads_masks
                )
            ),
            make_cache,
            chances,
            limits.max_num_batched_tokens,
        )
        drafter = complete(plugin.build(context))
        separate = plugin.METHOD.learns and not drafter.caches
        return Separate(lambda: complete(plugin.build(context))) if separate else drafter

    return make


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
    if request.ending.error is not None:
        raise request.ending.error
    return drafter.needs, request.metrics.speculative_decoding.num_draft_tokens > 0


Size = tuple[int, int]

# (vocabulary, nodes of a draft) -> how often a size occurs in a cycle
CHAINS = {(2, 1): 2, (2, 2): 2, (2, 3): 2, (3, 1): 2, (3, 2): 2, (3, 3): 1, (4, 1): 2, (4, 2): 1}
TREES = {(2, 2): 2, (2, 3): 3, (2, 4): 3, (3, 2): 2, (3, 3): 2, (4, 2): 2, (3, 4): 1}
WIDTH = 8  # branches followed in one batch
MOST_WAYS = 500  # branches of one case; larger cases are left out (some drafters make many draws)


@dataclass(frozen=True)
class Claim:
    """A verifier, the kinds of requests that it verifies, and the settings of its enumeration.

    lossless: whether the verifier announces that it is lossless.
    """

    verifier: str
    lossless: bool
    kinds: Sequence[str]
    params: SamplingParams
    cases: int

    def __str__(self) -> str:
        return f"Enumerating {self.verifier} on tables, for {' and '.join(self.kinds)} requests"


@dataclass(frozen=True)
class Proof:
    """The result of a claim's enumeration; `error` is the error that ended it early, if any."""

    claim: Claim
    draft: str
    sizes: Sequence[Size]
    cases: int
    mean_accepted: float
    deviation: float
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Whether every distribution was the target's up to rounding."""
        return self.error is None and self.cases > 0 and self.deviation <= EXACT

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values for JSON."""
        return {
            "rule": self.claim.verifier,
            "announced_lossless": self.claim.lossless,
            "requests": list(self.claim.kinds),
            "draft": self.draft,
            "vocabularies": sorted({vocab_size for vocab_size, _ in self.sizes}),
            "draft_nodes": sorted({nodes for _, nodes in self.sizes}),
            "cases": self.cases,
            "mean_accepted": self.mean_accepted,
            "largest_deviation": self.deviation,
            "tolerance": EXACT,
            "error": self.error,
            "passed": self.passed,
        }


def claims(requests: Mapping[str, Request], cases: int) -> list[Claim]:
    """Return the claims to prove: one per verifier that an engine chose, with the kinds of requests that it serves.

    The first claim gets `cases`, the others a quarter. A seeded request makes the same draws as a sampled one, with
    keyed noise instead of fresh noise.
    """
    kinds: dict[tuple[str, bool], list[str]] = {}
    for kind, request in requests.items():
        kinds.setdefault((request.drafts.verifier, request.params.greedy), []).append(kind)
    made: list[Claim] = []
    for (verifier, _), of_rule in kinds.items():
        first, share = requests[of_rule[0]], 4 if made else 1
        made.append(Claim(verifier, first.metrics.lossless, of_rule, on_tables(first.params), max(1, cases // share)))
    return made


def on_tables(params: SamplingParams) -> SamplingParams:
    """Return the settings without token ids, texts and ends."""
    return SamplingParams(max_tokens=None, **{name: getattr(params, name) for name in SHAPING})


def prove(
    claim: Claim,
    draft: TableDrafter,
    verifiers: Mapping[str, Verifier],
    tell: Callable[[str], None] = lambda part: None,
) -> Proof:
    """Enumerate a claim over random pairs of distributions: zeros, ties, equal and disjoint supports, point masses.

    tell: called with a line before each pair, with the result of the pairs so far.
    """
    found: list[tuple[float, float]] = []
    sizes, too_large, error = set[Size](), set[Size](), None
    for case in _cases(claim, draft):
        size = (case.pair.vocab_size, case.length)
        if len(found) == claim.cases or too_large.issuperset(_sizes(draft)):
            break
        if size in too_large:
            continue
        furthest = max((deviation for deviation, _ in found), default=0.0)
        tell(f"{claim}: {len(found)} of {claim.cases} pairs, within {furthest:.0e} of the target's distribution")
        try:
            found.append(_measure(case, draft, verifiers))
            sizes.add(size)
        except TooManyWaysError:
            too_large.add(size)
        except Exception as caught:  # noqa: BLE001 - a verifier's error is a result of the check
            error = f"{type(caught).__name__}: {caught}"
            break
    deviations, accepted = [each[0] for each in found], [each[1] for each in found]
    mean = sum(accepted) / max(1, len(found))
    return Proof(claim, draft.description, sorted(sizes), len(found), mean, max(deviations, default=0.0), error)


def _sizes(draft: TableDrafter) -> Mapping[Size, int]:
    return TREES if draft.needs.emits_tree else CHAINS


def _cases(claim: Claim, draft: TableDrafter) -> Iterator[Case]:
    sizes = _sizes(draft)
    rounds = [size for turn in range(max(sizes.values())) for size, times in sizes.items() if turn < times]
    for seed, (vocab_size, nodes) in enumerate(itertools.cycle(rounds)):
        pair, prompt = Pair(seed, vocab_size), draft.prompt(vocab_size)
        idle = min(1, len(prompt) - 1)  # a longer prompt's first verification has no draft
        yield Case(pair, nodes, claim.params, claim.verifier, prompt, width=WIDTH, idle=idle)


def _measure(case: Case, draft: TableDrafter, verifiers: Mapping[str, Verifier]) -> tuple[float, float]:
    """Return the distance of the output's distribution from the target's, and the mean number of accepted drafts."""
    found = enumerate_case(case, lambda chances: build_case(case, draft.make, chances, verifiers)[0], MOST_WAYS)
    return found.deviation(), found.mean_accepted
