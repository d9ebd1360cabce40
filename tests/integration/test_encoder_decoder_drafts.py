"""Every drafter on an encoder-decoder model: the texts are those of plain decoding, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams, plugins
from speculant.drafting import ModelDrafter
from speculant.errors import ConfigError, PairError
from speculant.kernels import usable_sets
from speculant.types import RequestOutput
from tests.drafters import HEADS, PREDICTED, model_of, options_of
from tests.encoder_decoders import make_t5, write_t5
from tests.models import ALPHABET, HIDDEN_SIZE, VOCAB_SIZE, Checkpoints, write_tokenizer

METHODS = sorted({*plugins.names("speculant.drafting")} - PREDICTED)  # contracts/test_drafters.py has predictions
QUICK = {  # what runs without slow tests
    "draft_model", "dynamic tree", "early_exit", "on the target's encoder", "specinfer", "suffix",
}  # fmt: skip
TREES: dict[str, dict[str, Any]] = {
    "tree": {"method": "draft_model", "tree": [2, 1, 1]},
    "dynamic tree": {"method": "draft_model", "tree": "dynamic"},
    "tree of first layers": {"method": "early_exit", "tree": [2, 1]},
    "inner first layers": {"method": "cascade", "inner": "early_exit"},
    "on the target's encoder": {"method": "draft_model", "encoder": "target"},
    "tree on the target's encoder": {"method": "draft_model", "encoder": "target", "tree": "dynamic"},
    "first layers among others": {"method": "merge", "members": ["suffix", "early_exit"]},
    "model among others": {
        "method": "fallback", "members": ["prompt_lookup", {"method": "draft_model", "encoder": "target"}],
    },
}  # fmt: skip
POSITIONS = 128  # in each cache where memory is scarce: little more than one text and source of the greatest length
CONFIGS = [
    pytest.param(config, marks=[] if name in QUICK else [pytest.mark.slow], id=name)
    for name, config in [*((method, {"method": method}) for method in METHODS), *TREES.items()]
]
SCARCE = {"max_num_seqs": 8, "max_num_batched_tokens": 80, "block_size": 4}
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
NATIVE = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
ENGINES = [
    pytest.param({"dtype": "float64", "kernels": "reference"}, id="reference"),
    pytest.param({"dtype": "float64", "kernels": "reference", **SCARCE}, id="reference, scarce"),
    pytest.param({"dtype": "float32", "kernels": "native"}, marks=NATIVE, id="native"),
    pytest.param({"dtype": "bfloat16", "kernels": "native", **SCARCE}, marks=NATIVE, id="native, scarce"),
]
TEXTS = [
    "hello world",
    "the same words, the same words, the same words",
    "hello world",
    "def f(x): return x",
    "a",
    "hello world",
    "import os, import re, import os",
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(seed=3, max_tokens=24, temperature=0.7),
    SamplingParams(n=4, seed=4, temperature=0.8, max_tokens=16),
    SamplingParams(beam_width=3, n=2, max_tokens=10, temperature=0),
    SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(seed=5, max_tokens=20),
]
Texts = list[list[list[int]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return a target, a draft that is near it, and one whose states have another width."""
    folder = tmp_path_factory.mktemp("t5")
    models = {"target": make_t5(), "near": make_t5(0.1), "far": make_t5(d_model=16)}
    return Checkpoints(**{name: write_t5(folder / name, model) for name, model in models.items()})


@pytest.fixture(scope="module")
def alone(folders: Checkpoints) -> Callable[[dict[str, Any]], Texts]:
    """Return what makes the texts without drafts, one request at a time, once for each type on each backend."""
    known = dict[str, Texts]()

    def made(engine: dict[str, Any]) -> Texts:
        own = {key: engine[key] for key in ("dtype", "kernels")}
        if str(own) not in known:
            llm = LLM(folders.target, **own, use_speculative_decoding=False, max_model_len=64)
            known[str(own)] = [
                tokens_of(llm.generate([text], each))[0] for text, each in zip(TEXTS, PARAMS, strict=True)
            ]
        return known[str(own)]

    return made


def tokens_of(results: Sequence[RequestOutput]) -> Texts:
    return [[sample.token_ids for sample in result.outputs] for result in results]


def engine_of(folders: Checkpoints, config: dict[str, Any], engine: dict[str, Any]) -> LLM:
    """Make an engine that drafts 4 tokens at a time; one with SCARCE gets memory for POSITIONS in each cache."""
    own_model = model_of(config["method"], folders.near, HIDDEN_SIZE, VOCAB_SIZE)
    draft = folders.near if "draft_model" in str(config) else own_model
    if "block_size" in engine:
        of_target = 1 if draft is None else 1.6 if config["method"] in HEADS else 2  # caches of its size
        position = 2 * 2 * HIDDEN_SIZE * BYTES[engine["dtype"]]  # keys and values of two layers
        engine = {**engine, "kv_memory": int(of_target * POSITIONS * position)}
    options = options_of(config["method"], VOCAB_SIZE, [[1, 2, 3]])
    own = {"num_speculative_tokens": 4, "draft_length": "fixed", **config, **options}
    return LLM(folders.target, draft_model=draft, speculative_config=own, **engine, max_model_len=64)


def assert_nothing_is_left(llm: LLM) -> None:
    engine = llm.engine
    engine.check()
    assert engine.metrics.drafter_errors == 0
    assert not engine._scheduler.sources._by_key
    for cache in (engine._context.cache, *engine._drafters.caches):
        assert cache.free_tokens() == cache.num_blocks * cache.block_size
    for drafter in engine._drafters.sub_drafters.values():
        if isinstance(drafter, ModelDrafter):
            sources = drafter._runner.sources
            sources.check()
            assert not sources._sources._by_key
            assert not sources._observed


@pytest.mark.covering(1)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("config", CONFIGS)
def test_drafted_texts_together_are_plain_ones_alone(
    folders: Checkpoints, alone: Callable[[dict[str, Any]], Texts], config: dict[str, Any], engine: dict[str, Any]
) -> None:
    """Greedy, seeded, four samples and beams, of different sources and of equal ones; where memory is scarce, too."""
    llm = engine_of(folders, config, engine)
    results = list[RequestOutput]()
    for _ in range(2):  # drafters learn, and prefixes are found again
        results = llm.generate(TEXTS, PARAMS)
        assert tokens_of(results) == alone(engine)
        assert_nothing_is_left(llm)
    assert sum(each.metrics.speculative_decoding.num_draft_tokens for each in results) > 0
    if config["method"] not in HEADS:
        assert ("block_size" in engine) == (llm.engine.metrics.preemptions > 0)


def a_pair(folders: Checkpoints, folder: Path, change: Callable[[Path], object]) -> LLM:
    """Make an engine whose draft model is a changed copy of the near one."""
    draft = folder / "draft"
    shutil.copytree(folders.near, draft)
    change(draft)
    return LLM(folders.target, str(draft), dtype="float64", kernels="reference", max_model_len=64)


def start_otherwise(draft: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        entries = json.loads((draft / name).read_text()) | {"decoder_start_token_id": 5}
        (draft / name).write_text(json.dumps(entries))


def test_drafts_that_read_other_texts_are_refused(
    folders: Checkpoints, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    with pytest.raises(PairError, match=r"begin with \[5\], and those of the target with \[\d+\]"):
        a_pair(folders, tmp_path / "start", start_otherwise)
    with pytest.raises(PairError, match="has an encoder, and its vocabulary is not that of"):
        a_pair(folders, tmp_path / "tokens", lambda draft: write_tokenizer(draft, ALPHABET[::-1]))
    with pytest.raises(PairError, match=r"is an encoder-decoder model and the target .* is not"):
        LLM(checkpoints.target, folders.near, dtype="float64")


@pytest.mark.parametrize(
    ("draft", "encoder", "error", "words"),
    [
        ("far", "target", PairError, "the width 32 in the target and 16 in the draft model"),
        ("near", "mine", ConfigError, "encoder='mine' is unknown"),
    ],
)
def test_wrong_encoders_are_refused(
    folders: Checkpoints, draft: str, encoder: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        LLM(
            folders.target,
            getattr(folders, draft),
            dtype="float64",
            speculative_config={"method": "draft_model", "encoder": encoder},
        )


def test_a_target_without_encoder_has_no_results_to_read(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="are not both encoder-decoder models"):
        LLM(
            checkpoints.target,
            checkpoints.near,
            dtype="float64",
            speculative_config={"method": "draft_model", "encoder": "target"},
        )


@pytest.mark.parametrize("tree", [*(pytest.param(each, marks=pytest.mark.slow) for each in (None, [2, 1])), "dynamic"])
def test_a_draft_model_may_have_no_encoder(
    folders: Checkpoints, checkpoints: Checkpoints, alone: Callable[[dict[str, Any]], Texts], tree: Any
) -> None:
    """It reads the decoder's tokens alone."""
    on_native = {"dtype": "float32", "kernels": "native"}
    engine = on_native if usable_sets() else {"dtype": "float64", "kernels": "reference"}
    own = {"method": "draft_model", "tree": tree, "draft_length": "fixed"}
    llm = LLM(folders.target, checkpoints.near, speculative_config=own, **engine, max_model_len=64)
    results = llm.generate(TEXTS, PARAMS)
    assert tokens_of(results) == alone(engine)
    assert sum(each.metrics.speculative_decoding.num_draft_tokens for each in results) > 0
    assert_nothing_is_left(llm)


def test_the_target_drafts_what_it_accepts(folders: Checkpoints) -> None:
    """As its own draft it must read the same source: also with the results of its own encoder, in any batch."""
    passes = list[int]()
    for encoder in ("own", "target"):
        own = {"method": "draft_model", "encoder": encoder, "num_speculative_tokens": 5, "draft_length": "fixed"}
        llm = LLM(folders.target, folders.target, dtype="float64", kernels="reference", speculative_config=own)
        results = llm.generate(TEXTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        passes += [each.metrics.timing.target_passes for each in results]
    assert max(passes) <= 5, "each pass but the first gives six tokens"
