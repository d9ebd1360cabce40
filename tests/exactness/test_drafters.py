"""Every drafter, found by its file, keeps the output's distribution under every rule, and changes no other text."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speculant import plugins
from speculant.config import Limits, SpeculativeConfig
from speculant.drafting import (
    BigramTables,
    Drafter,
    Drafters,
    ParallelChains,
    StaticDrafter,
    StaticTree,
    TreeTopology,
    takes_model,
)
from speculant.lab.exactness import FULL_SUPPORT, MIXED, History, Pair, TableModel, of_method
from speculant.lab.training import count_bigrams
from speculant.params import SamplingParams
from speculant.sampling import Chances, KeyedChances
from speculant.types import Request
from tests.exactness.selection import combinations
from tests.exactness.speculation import BRANCHING, LOSSLESS, Case, assert_exact, draft_model
from tests.examples import examples
from tests.fakes import MakeCache, build_rig, drafter_context, few_blocks, paged, slotted
from tests.heads import WRITERS, write_dflash, write_eagle, write_eagle3, write_mtp, write_peagle

KIND = "speculant.drafting"
BUDGET = 64  # of a head, in tokens
Make = Callable[..., Drafter]  # of a pair, chances, limits and what makes a cache


def configured(method: str, **options: Any) -> Make:
    """Return what makes a drafter of a method, whose models are tables."""
    model = {"model": "table"} if takes_model(method) else {}
    make = of_method(SpeculativeConfig.from_mapping({"method": method, **model, **options}))
    return lambda pair, chances, limits, cache: make(pair, chances, limits, lambda shape: cache(shape, limits))


def static(pair: Pair, chances: Chances, limits: Limits, cache: MakeCache = slotted) -> Drafter:
    """Make tables of a random text; one continuation per token is kept, so that the back-off counts."""
    text = np.random.default_rng(pair.seed).integers(0, pair.vocab_size, 30).tolist()
    found = count_bigrams([text], pair.vocab_size)
    return StaticDrafter(BigramTables.of_counts(found.tokens, found.pairs, found.counts, 1), chances)


SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 5}
MODULES = "mtp of two modules"


@functools.cache
def folder_of(method: str, vocab_size: int) -> str:
    """Write a head for a table model, whose states are the logits."""
    folder = Path(tempfile.mkdtemp(prefix="heads-"))
    if method == "eagle":
        return write_eagle(folder, vocab_size, vocab_size, **SMALL)
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}}
    if method == "eagle3":
        known = vocab_size - 1 if vocab_size > 3 else None
        return write_eagle3(folder, vocab_size, vocab_size, draft_vocab=known, **SMALL, **layers)
    if method == "peagle":
        return write_peagle(folder, vocab_size, vocab_size, ptd_token_id=1, **SMALL, **layers)
    if method == "dflash":
        blocks = {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [-1, 0]}, "block_size": 4}
        return write_dflash(folder, vocab_size, vocab_size, **SMALL, **blocks)
    if method == MODULES:
        return write_mtp(folder, vocab_size, vocab_size, modules=2)
    return WRITERS[method](folder, vocab_size, vocab_size)


def head(method: str, tree: Any = None) -> Make:
    """Return what makes a head's drafter; its target is a pair's target table."""
    options = {"tree": tree or "chain"} if tree or method == "medusa" else {}

    def make(pair: Pair, chances: Chances, limits: Limits, cache: MakeCache) -> Drafter:
        target = TableModel(pair.target, pair.vocab_size)
        context = drafter_context(
            pair.vocab_size, options, folder_of(method, pair.vocab_size), load=lambda source, head_tokens=(): target,
            make_cache=lambda shape: cache(shape, limits), target=target, chances=chances, budget=BUDGET,
        )  # fmt: skip
        drafter: Drafter = plugins.load(KIND, method.split()[0]).build(context)
        return drafter

    return make


@dataclass(frozen=True)
class Way:
    """A way to draft, and the random pairs that it is enumerated on.

    sizes: vocabularies and draft lengths. kinds: of distributions. least: mean number of accepted tokens.
    """

    make: Make
    sizes: Sequence[tuple[int, int]] = ((3, 2),)
    prompt: History = (0, 1, 2, 0)
    kinds: Sequence[str] = MIXED
    least: float = 0.02
    idle: int | None = 1
    quick: int = 2
    full: int = 4

    def check(self, verifier: str) -> None:
        """Enumerate random pairs of every size: `full` of each, in `make test` `quick` ones."""
        cases = [
            Case(
                Pair(seed, vocab_size, tuple(self.kinds)), length, verification=verifier, prompt=self.prompt, width=8,
                idle=self.idle, make_drafter=functools.partial(self.make, cache=slotted),
            )
            for vocab_size, length in self.sizes
            for seed in range(examples(self.full, least=self.quick))
        ]  # fmt: skip
        assert sum(map(assert_exact, cases)) >= self.least * len(cases)


def of_head(method: str, tree: Any = None, length: int = 2) -> Way:
    """Only tables with full support have finite logits, like a model's. A short head needs four tokens."""
    sizes = ((4, length), (3, length)) if method == "eagle3" else ((3, length), (4, length))
    return Way(head(method, tree), sizes[: examples(2, least=1)], (0, 1), FULL_SUPPORT, 0.1, None, quick=1, full=2)


def of_table(make: Make) -> Way:
    """Drafts that need no text before them."""
    return Way(make, ((2, 3), (3, 2), (4, 2)), (0,), least=0.1)


def of_tree(topology: TreeTopology) -> Way:
    """With three tokens a second sibling has hardly a choice, and much that is wrong does not show."""
    make: Make = functools.partial(draft_model, topology=topology)
    return Way(make, ((3, topology.most_nodes), (4, topology.most_nodes)), (0,), least=0.1, quick=1)


def of_text(method: str) -> Way:
    """Drafts that are copied from the text."""
    return Way(configured(method), ((3, 3),), (0, 1, 2, 0, 1, 0))


MIXTURE, TREE = ["ngram", "draft_model"], {"method": "draft_model", "tree": [2, 1]}
ELSEWHERE = {  # drafters that need more than tables, and the test that has them
    "early_exit": "test_target_cache.py", "prediction": "contracts/test_drafters.py",
    "synthetic": "test_constraints.py",
}  # fmt: skip
CHAINS: dict[str, Way] = {
    **{method: Way(configured(method)) for method in plugins.names(KIND) if method not in {*ELSEWHERE, *WRITERS}},
    **{method: of_head(method) for method in (*WRITERS, MODULES)},
    **{method: of_text(method) for method in ("ngram", "prompt_lookup", "suffix")},
    **{method: of_table(configured(method)) for method in ("parallel", "random")},
    "static": of_table(static),
    "draft_model": Way(configured("draft_model"), ((3, 2), (4, 2)), (0,), least=0.1),
    "cascade of models": Way(configured("cascade", inner={"method": "draft_model", "model": "another"})),
    "fallback": Way(configured("fallback", members=MIXTURE)),
    "fallback to a cascade": Way(configured("fallback", members=[{"method": "ngram", "min_order": 4}, "cascade"])),
}
TREES: dict[str, Way] = {
    "pair": of_tree(StaticTree.of_widths([2])),
    "three": of_tree(StaticTree.of_widths([3])),
    "two deep": of_tree(StaticTree.of_widths([2, 1])),
    "uneven": of_tree(StaticTree(frozenset({(0,), (1,), (0, 0), (0, 1)}))),
    "two draws": of_tree(ParallelChains((0, 0), 2)),
    "three draws": of_tree(ParallelChains((0, 0, 0), 1)),
    "one pass": Way(configured("parallel", tree=[2, 1]), ((3, 4),), (0,)),
    "merge": Way(configured("merge", members=MIXTURE), ((3, 3),)),
    "merge of lookups": Way(
        configured("merge", members=["ngram", {"method": "ngram", "max_order": 2}], model=None), ((3, 3),)
    ),
    "fallback to trees": Way(configured("fallback", members=["ngram", TREE]), ((3, 3),)),
    "cascade of trees": Way(configured("cascade", inner={**TREE, "model": "another"}), ((3, 3),), quick=1, full=2),
    **{
        f"{method} {name}": of_head(method, tree, 4)
        for method in ("medusa", "eagle", "eagle3", "peagle", "dflash", "mtp")
        for name, tree in (("two deep", [2, 1]), ("uneven", [[0], [1], [0, 0]]))
    },
}
for branching in [name for name, way in CHAINS.items() if name in ("merge", "specinfer", "token_recycling")]:
    TREES[branching] = CHAINS.pop(branching)
QUICK = {  # the rule of a tree in `make test`; the smallest one has all rules, and test_rules.py has all shapes
    "three": "match", "two deep": "multi_draft", "uneven": "traversal", "two draws": "multi_draft",
    "three draws": "traversal", "one pass": "match", "merge": "traversal", "merge of lookups": "match",
    "fallback to trees": "traversal", "cascade of trees": "multi_draft", "specinfer": "multi_draft",
    "token_recycling": "traversal",
    "eagle3 uneven": "traversal", "peagle uneven": "multi_draft",
}  # fmt: skip


def test_no_drafter_is_forgotten() -> None:
    assert {name.split()[0] for name in {**CHAINS, **TREES}} | {*ELSEWHERE} >= {*plugins.names(KIND)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", LOSSLESS)
@pytest.mark.parametrize("name", CHAINS)
def test_chains_keep_the_distribution(name: str, verifier: str) -> None:
    CHAINS[name].check(verifier)


@pytest.mark.parametrize(
    ("name", "verifier"),
    combinations(lambda name, verifier: verifier in (QUICK.get(name), *BRANCHING * (name == "pair")), TREES, BRANCHING),
)
def test_trees_keep_the_distribution(name: str, verifier: str) -> None:
    TREES[name].check(verifier)


# --- other texts

PAIR = Pair(3, 4, FULL_SUPPORT)
PROMPTS = [(0, 1, 2, 3) * 3, (0, 1, 2, 3) * 3, (1, 2), (0, 1, 2, 3) * 2 + (1,), (3,), (2, 2, 2)]
SETTINGS: list[dict[str, Any]] = [
    {"seed": 0, "temperature": 1.3},
    {"temperature": 0},
    {"seed": 2, "top_k": 2},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"seed": 4, "frequency_penalty": 0.4},
    {"temperature": 0},
]


def texts(drafters: Drafters, methods: Sequence[str | None], limits: Limits, cache: MakeCache) -> tuple[Any, int, int]:
    """Serve a request for each method; return the texts, and how many drafts were accepted and requests preempted."""
    rig = build_rig(TableModel(PAIR.target, 4), drafters, length=4, limits=limits, cache=cache)
    requests = list[Request]()
    for index, method in enumerate(methods):
        wanted = {"speculation": {"method": method}} if method else {}
        params = SamplingParams(max_tokens=16, **SETTINGS[index % len(SETTINGS)], **wanted)
        requests += rig.add(PROMPTS[index % len(PROMPTS)], params, str(index))
    rig.finish()
    accepted = sum(each.metrics.speculative_decoding.num_accepted_draft_tokens for each in requests)
    return [request.output for request in requests], accepted, rig.engine.metrics.preemptions


@functools.cache
def plain_texts() -> list[list[int]]:
    """Return the texts of a request for each setting, alone and without a draft."""
    found, *_ = texts(Drafters(), [None] * len(SETTINGS), Limits(40, 1, 40), slotted)
    return list(found)


@pytest.mark.covering(1)
@pytest.mark.parametrize("cache", ["blocks", "few blocks", "slots"])
@pytest.mark.parametrize("name", [*CHAINS, *TREES])
def test_no_drafter_changes_a_text(name: str, cache: str) -> None:
    """Greedy and seeded, several at a time, prompts in chunks, prefix hits, and preempted where memory is short."""
    made: dict[str, MakeCache] = {"blocks": few_blocks(60), "few blocks": few_blocks(9), "slots": slotted}
    limits, way = Limits(40, 3, 6), {**CHAINS, **TREES}[name]
    drafters = Drafters.of(way.make(PAIR, KeyedChances(), limits, made[cache]))
    found, accepted, preempted = texts(drafters, [None] * len(SETTINGS), limits, made[cache])
    assert found == plain_texts()
    assert accepted > 0
    assert (preempted > 0) == (cache == "few blocks")


def test_all_drafters_in_one_batch_change_no_text() -> None:
    """Each way beside every other one and beside requests without a draft."""
    limits = Limits(max_model_len=40, max_num_seqs=6, max_num_batched_tokens=64)
    made = {name: way.make(PAIR, KeyedChances(), limits, paged) for name, way in {**CHAINS, **TREES}.items()}
    methods = [*made, None]
    methods += [None] * (-len(methods) % len(SETTINGS))
    found, accepted, _ = texts(Drafters(made), methods, limits, paged)
    assert found == plain_texts() * (len(methods) // len(SETTINGS))
    assert accepted > 2 * len(made)
