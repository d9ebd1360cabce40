"""Targets whose layers have states: no draft, however much of it is rejected, changes a text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from speculant import LLM, SamplingParams
from speculant.cache import MOST_PENDING, KVCache, StateRows, paged_cache
from speculant.config import Limits
from speculant.drafting import Drafters, ParallelChains, StaticTree
from speculant.engine import Engine, EngineOptions
from speculant.errors import ConfigError
from speculant.kernels import usable_sets
from speculant.lab.exactness import FULL_SUPPORT, Pair
from speculant.lengths import Fixed
from speculant.metrics import SpeculationMetrics
from speculant.models import Checkpoint, load_model
from speculant.sampling import KeyedChances
from speculant.types import Request
from tests.exactness.identity import Job, params_of
from tests.exactness.speculation import (
    BRANCHING,
    LOSSLESS,
    Case,
    MakeDrafter,
    assert_exact,
    draft_model,
    ngram,
    of_two_models,
    scripted,
)
from tests.examples import examples
from tests.fakes import ScriptedDrafter, few_blocks, known_verifiers
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Shape, write_checkpoint
from tests.unit.models.families import STATES, VARIANTS

pytestmark = pytest.mark.usefixtures("one_thread")

LONGEST = examples(4000, least=200)  # tokens of an answer
ENGINES = {
    "reference": {"dtype": "float64", "kernels": "reference"},
    **({"native": {"dtype": "float32", "kernels": "native"}} if usable_sets() else {}),
}
PROMPT = [*range(70, 90), 7]
FAMILIES = [
    each if each in ("qwen3_5_text", "lfm2") else pytest.param(each, marks=pytest.mark.slow) for each in STATES
]  # a delta rule, and a convolution alone; the quick suites of families have the others


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return what writes a checkpoint of a family."""

    def written(family: str) -> str:
        settings = tuple(VARIANTS[family]["plain"].items())
        shape = Shape(family=family, layers=3, max_positions=2 * LONGEST, settings=settings)
        return write_checkpoint(tmp_path_factory.mktemp(family) / "model", shape)

    return written


def answer(
    checkpoint: Checkpoint, params: SamplingParams, text: Sequence[int] | None = None
) -> tuple[list[int], SpeculationMetrics]:
    """Return an answer to `PROMPT`; drafts are parts of `text` of any length, which are right up to any token."""
    model, draws = checkpoint.model, random.Random(0)

    def propose(request: Request) -> list[int]:
        own = (text or [])[request.num_output :][: draws.randint(0, MOST_PENDING - 1)]
        right = draws.randint(0, len(own))
        return [*own[:right], *(draws.randrange(70, 90) for _ in own[right:])]

    sampler, limits = checkpoint.backend.sampler, Limits(len(PROMPT) + LONGEST, 1, 64)
    engine = Engine(
        EngineOptions(limits, 0, frozenset(), sampler=sampler), model,
        paged_cache(model.cache_shape, -(-limits.max_model_len // 16), 16), KeyedChances(sampler), known_verifiers(),
        Fixed(MOST_PENDING - 1), Drafters.of(ScriptedDrafter(propose)),
    )  # fmt: skip
    (request,) = engine.add_request(PROMPT, params, "r")
    while engine.has_unfinished():
        engine.step()
        engine.check()
    return request.output, request.metrics.speculative_decoding


BLOCKS = few_blocks(48, keep_prefixes=False)
RANKS = {(0,), (1,), (0, 0), (1, 0)}
TABLE_DRAFTERS: dict[str, MakeDrafter] = {
    "model": draft_model,
    "tree": partial(draft_model, topology=StaticTree(frozenset(RANKS))),
    "draws": partial(draft_model, topology=ParallelChains((0, 0), 2)),
    "models": partial(of_two_models, ParallelChains((0, 1), 2)),
    "copies": ngram,
}
CASES = [
    (rule, name) for rule in LOSSLESS for name in TABLE_DRAFTERS if rule in BRANCHING or name in ("model", "copies")
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("rule", "drafter"), CASES)
def test_a_table_of_states_keeps_the_distribution(rule: str, drafter: str) -> None:
    """A tree becomes its first path."""
    for seed in range(examples(4, least=1)):
        for size, length, steps in ((3, 2, 1), (2, 2, 2)):
            pair, make = Pair(seed, size), TABLE_DRAFTERS[drafter]
            assert_exact(
                Case(
                    pair, length, verification=rule, prompt=(0, 1, 0, 1), steps=steps, make_drafter=make, cache=BLOCKS,
                    has_states=True,
                )
            )  # fmt: skip


@pytest.mark.parametrize("rule", ["rejection", "match", "block"])
def test_rejected_drafts_of_each_length(rule: str) -> None:
    make = scripted(0, 1, 1, 0, 1, 0, 0, 1, 1)
    for length, steps in ((9, 1), (4, 2)):
        case = Case(
            Pair(3, 2, FULL_SUPPORT), length, verification=rule, steps=steps, width=8, make_drafter=make, cache=BLOCKS,
            has_states=True,
        )  # fmt: skip
        assert assert_exact(case) > 0.5


@pytest.mark.parametrize("fault", [{"settled": -1}, {"certain": 1}, {"certain": -1}])
def test_a_state_with_a_row_too_many_is_seen(monkeypatch: pytest.MonkeyPatch, fault: dict[str, int]) -> None:
    """A row that is added twice, one that was only drafted, or one that is lost."""
    advance = KVCache.advance

    def wrong(cache: KVCache, seq_id: int, start: int, certain: int) -> StateRows:
        rows = advance(cache, seq_id, start, certain)
        return rows._replace(**{name: max(0, getattr(rows, name) + by) for name, by in fault.items()})

    monkeypatch.setattr(KVCache, "advance", wrong)
    case = Case(Pair(3, 2, FULL_SUPPORT), 1, prompt=(0, 1, 1, 1), steps=2, cache=BLOCKS, has_states=True)
    with pytest.raises((AssertionError, ValueError)):  # or numbers that are none, of a row that nobody wrote
        assert_exact(case)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_answer_with_drafts_rejected_at_any_length(
    write: Callable[[str], str], family: str, engine: str
) -> None:
    checkpoint = load_model(write(family), **ENGINES[engine])
    params = SamplingParams(seed=1, max_tokens=LONGEST, ignore_eos=True)
    plain, _ = answer(checkpoint, params)
    drafted, counted = answer(checkpoint, params, plain)
    assert drafted == plain
    assert len({*counted.per_step_accepted}) >= min(MOST_PENDING, LONGEST // 25)


SILENT = ("layers.2.self_attn.o_proj", "layers.2.linear_attn.out_proj", "layers.2.conv.out_proj", "layers.2.mlp.down",
          "layers.2.feed_forward.w2")  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_in_the_target_s_cache_leave_its_states(write: Callable[[str], str], family: str, engine: str) -> None:
    """The third layer adds nothing, so drafts of the first two are right: passes add long drafts to states."""
    path = f"{write(family)}/model.safetensors"
    tensors = load_file(path)
    quiet = {name for name in tensors if any(part in name for part in SILENT)}
    save_file({name: each * (name not in quiet) for name, each in tensors.items()}, path)
    prompts = [[7], [*range(70, 86), 7], [*range(70, 86), 9], [*range(70, 86), 9, 5]]
    params = [SamplingParams(n=1 + place % 3, seed=place, max_tokens=40, ignore_eos=True) for place in range(4)]
    common = {"block_size": 4, "max_num_seqs": 4, "kv_memory": "4MiB", **ENGINES[engine]}
    plain = LLM(str(Path(path).parent), use_speculative_decoding=False, **common)
    want = [[each.token_ids for each in out.outputs] for out in plain.generate(prompts, params)]
    for length in (3, MOST_PENDING - 1):
        config = {"method": "early_exit", "layers": 2, "num_speculative_tokens": length}
        llm = LLM(str(Path(path).parent), speculative_config=config, **common)
        for _ in range(2):
            outputs = llm.generate(prompts, params)
            assert [[each.token_ids for each in out.outputs] for out in outputs] == want
            assert llm.engine.metrics.drafter_errors == 0
            counted = [out.metrics.speculative_decoding for out in outputs]
            assert sum(each.num_accepted_draft_tokens for each in counted) > 60


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_masks_are_no_part_of_a_draft_model_s_state(write: Callable[[str], str], family: str) -> None:
    job = Job(
        write(family), [PROMPT, PROMPT[3:]], (HIDDEN_SIZE, VOCAB_SIZE), {"kv_memory": "4MiB", **ENGINES["reference"]}
    )
    params = params_of(2, 24)["greedy"]
    job.check("parallel", job.target, params, job.plain(params))


def test_a_draft_model_with_a_state_draws_no_trees(write: Callable[[str], str]) -> None:
    for method, options in (("specinfer", {}), ("draft_model", {"tree": [2, 1]})):
        with pytest.raises(ConfigError, match="has layers with a state"):
            LLM("demo", draft_model=write("lfm2"), speculative_config={"method": method, **options})
