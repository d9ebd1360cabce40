"""What is read from the prompt cache on disk has the bits that would be computed: cold, from memory and from disk."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speculant import LLM, SamplingParams, plugins
from speculant.cache import BlockFiles, StoredPrefixes
from speculant.errors import ConfigError
from speculant.kept_files import TEMPORARY
from speculant.kernels import usable_sets
from speculant.scheduling import STEP_S
from tests.drafters import model_of, options_of, predicting
from tests.exactness.selection import slow_but
from tests.examples import examples
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Shape, write_checkpoint
from tests.unit.models.families import VARIANTS, CaseWith, cases_with

pytestmark = pytest.mark.usefixtures("one_thread")

NATIVE: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32", "kernels": "native"},
    "int8": {"dtype": "bfloat16", "kernels": "native", "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"dtype": "bfloat16", "kernels": "native", "quantization": "int4"},
}
ENGINES = {"float64": {"dtype": "float64", "kernels": "reference"}, **(NATIVE if usable_sets() else {})}
DRAFTERS = plugins.names("speculant.drafting")
BLOCK, READ = 4, BlockFiles.read
PROMPTS = [[*range(70, 83), 71, 72], [*range(70, 80), *range(90, 97)], [88, 71, 70, 71, 70, 71, 70, 71, 70]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2),
]


def with_turns(names: Sequence[str], values: Sequence[str]) -> list[Any]:
    """Return pairs; each name's pairs but one are slow, and these take turns."""
    return [
        pytest.param(name, value, marks=[] if place % len(values) == number else pytest.mark.slow)
        for place, name in enumerate(names)
        for number, value in enumerate(values)
    ]


Texts = list[tuple[list[int], Any]]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return what writes a checkpoint of a variant, once."""

    @functools.cache
    def written(family: str, variant: str = "", noise: float = 0.0) -> str:
        settings = tuple(VARIANTS.get(family, {}).get(variant, {}).items())
        folder = tmp_path_factory.mktemp(family) / "model"
        return write_checkpoint(folder, Shape(family=family, layers=3, noise=noise, settings=settings))

    return written


def engine(target: str, folder: Path | None, **arguments: Any) -> LLM:
    return LLM(target, block_size=BLOCK, max_num_batched_tokens=32, prompt_cache=folder, **arguments)


def texts(llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS, params: Sequence[SamplingParams] = PARAMS) -> Texts:
    """Return the tokens of each prompt, and their log-probabilities where no bit of them depends on the batch."""
    outputs = llm.generate([[*prompt] for prompt in prompts], [*params])
    assert all(out.error is None for out in outputs)
    exact = llm.checkpoint.backend.row_invariant
    return [([*out.outputs[0].token_ids], out.outputs[0].logprobs if exact else None) for out in outputs]


def stored(llm: LLM) -> StoredPrefixes:
    """Return the prompt cache of an engine, when all is written."""
    found = llm.engine.stored_prefixes
    assert found is not None
    found.files.flush()
    return found


def check(target: str, folder: Path, **arguments: Any) -> None:
    """Compare texts without a prompt cache, and with one that is empty, in memory and on disk."""
    cold = texts(engine(target, None, **arguments))
    first = engine(target, folder, **arguments)
    assert texts(first) == cold
    assert stored(first).files.read_tokens == 0
    assert texts(first) == cold, "from memory"
    assert stored(first).files.written > 0
    before = inodes(folder)
    second = engine(target, folder, **arguments)
    assert texts(second) == cold, "from disk"
    assert stored(second).files.read_tokens > 0
    after = inodes(folder)
    assert {path: after[path] for path in before} == before, "what is on disk is written again"
    second.engine.check()


def inodes(folder: Path) -> dict[Path, int]:
    return {entry.path: entry.path.stat().st_ino for entry in BlockFiles.entries(folder)}


@pytest.mark.parametrize("case", cases_with([*ENGINES], with_encoders=True))
def test_families(case: CaseWith, write: Callable[..., str], tmp_path: Path) -> None:
    check(write(case.family, case.variant), tmp_path / "prompts", **ENGINES[case.value])


@pytest.mark.parametrize(("drafter", "weights"), with_turns(DRAFTERS, [w for w in ("float64", "int8") if w in ENGINES]))
def test_drafters(drafter: str, weights: str, write: Callable[..., str], tmp_path: Path) -> None:
    target, draft = write("llama"), write("llama", "", 0.02)
    plain = texts(engine(target, None, **ENGINES[weights], use_speculative_decoding=False))
    tokens = [own for own, _ in plain]
    model = model_of(drafter, draft, HIDDEN_SIZE, VOCAB_SIZE)
    config = {"method": drafter, "num_speculative_tokens": 3, **options_of(drafter, VOCAB_SIZE, tokens)}
    arguments = {**ENGINES[weights], "draft_model": model, "speculative_config": config}
    params = [predicting(drafter, own, text) for own, text in zip(PARAMS, tokens, strict=True)]
    for is_there in (False, True):
        llm = engine(target, tmp_path / "prompts", **arguments)
        assert texts(llm, params=params) == plain
        assert bool(stored(llm).files.read_tokens) == is_there
        for own in (cache.stored for cache in llm.engine._drafters.caches if cache.stored is not None):
            own.files.flush()
            assert bool(own.files.read_tokens) == is_there, "the draft model's"
        llm.engine.check()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
def test_memory_for_a_part_of_the_prefixes(family: str, write: Callable[..., str], tmp_path: Path) -> None:
    """More prefixes than blocks: they leave the memory, and come back from the disk."""
    target, draws = write(family, next(iter(VARIANTS[family]))), random.Random(5)
    stems = [[draws.randrange(70, 90) for _ in range(24)] for _ in range(6)]
    prompts = [[*draws.choice(stems)[: draws.randrange(5, 25)], 70 + place] for place in range(24)]
    params = [SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)] * len(prompts)
    settings = {**ENGINES["float64"], "use_speculative_decoding": False, "max_model_len": 32, "max_num_seqs": 2}
    cold = texts(engine(target, None, **settings), prompts, params)
    for _ in range(2):
        small = engine(target, tmp_path / "prompts", **settings)
        cache = small.engine._context.cache
        assert texts(small, prompts, params) == cold
        assert texts(small, prompts, params) == cold
        assert cache.num_blocks * BLOCK < sum(map(len, stems)), "nothing has to leave the memory"
        cache.check()
    assert stored(small).files.read_tokens > sum(map(len, stems)), "nothing came back a second time"


def damaged(content: bytes, others: Sequence[bytes], draws: random.Random) -> bytes:
    """Return what a disk, another program or a process that died may make of a file."""
    place, kind = draws.randrange(len(content)), draws.randrange(7)
    changed = bytearray(content)
    if kind == 0:
        changed[place] ^= 1 << draws.randrange(8)
    elif kind == 1:
        del changed[place:]
    elif kind == 2:
        changed[place:] = bytes(len(changed) - place)
    elif kind == 3:
        changed += draws.randbytes(1 + draws.randrange(64))
    elif kind == 4:
        changed[place : place + 8] = draws.randbytes(8)
    elif kind == 5:
        changed[:] = draws.choice(others)
    else:
        changed[place:place] = draws.randbytes(1 + draws.randrange(8))
    return bytes(changed)


@pytest.mark.parametrize("rounds", slow_but([25], [25, 1000]))
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "t5"])
def test_damaged_files(
    family: str, rounds: int, write: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No damage changes a text, and every file is sound afterwards."""
    target, folder, draws = write(family, next(iter(VARIANTS[family]))), tmp_path / "prompts", random.Random(family)
    weights = ENGINES["float64"]
    first = engine(target, folder, **weights)
    cold = texts(first)
    stored(first)
    whole = {entry.path: entry.path.read_bytes() for entry in BlockFiles.entries(folder)}
    others = [*whole.values()]
    llm, count = engine(target, folder, **weights), 0
    for _ in range(rounds):
        assert llm.reset_prefix_cache()
        for path in draws.sample([*whole], draws.randint(1, len(whole))):
            path.write_bytes(damaged(whole[path], others, draws))
            count += path.read_bytes() != whole[path]
        assert texts(llm) == cold
        stored(llm)
        for path, content in whole.items():
            if path.exists() and BlockFiles.verify(path):  # no prompt needed it
                path.write_bytes(content)
    assert count > 3 * rounds
    assert "Traceback" not in caplog.text
    llm.engine.check()


def test_processes_that_are_killed(write: Callable[..., str], tmp_path: Path) -> None:
    """At whatever moment a process dies, others find whole files, and the texts of before."""
    target, folder, draws = write("llama"), tmp_path / "prompts", random.Random(0)
    cold = texts(engine(target, None, **ENGINES["float64"]))
    for _ in range(examples(200, least=3)):
        child = os.fork()
        if not child:
            llm = engine(target, folder, **ENGINES["float64"])
            while True:
                made = [random.choices(range(70, 90), k=20) for _ in range(4)]
                texts(llm, [*PROMPTS, *made], [*PARAMS, *[PARAMS[0]] * len(made)])
        time.sleep(0.2 + draws.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert {BlockFiles.verify(entry.path) for entry in BlockFiles.entries(folder)} <= {""}
    llm = engine(target, folder, **ENGINES["float64"])
    assert texts(llm) == cold
    assert stored(llm).files.read_tokens > 0
    assert not [*folder.glob(f"*/*{TEMPORARY}")]


def test_reading_stops_nobody(write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step reads for a while; then others get their tokens. Closed requests leave nothing behind."""
    target, folder, prompt = write("llama"), tmp_path / "prompts", [70 + place % 19 for place in range(160)]
    settings = {**ENGINES["float64"], "use_speculative_decoding": False}
    first = engine(target, folder, **settings)
    cold = texts(first, [prompt], PARAMS[:1])
    stored(first)
    llm = engine(target, folder, **settings)
    files, read, reads = stored(llm).files, BlockFiles.read, list[float]()

    def slow(*arguments: Any) -> memoryview | None:
        reads.append(0.02)
        time.sleep(reads[-1])
        return read(files, *arguments)

    monkeypatch.setattr(files, "read", slow)
    llm.engine.add_request(PROMPTS[0], replace(PARAMS[0], max_tokens=64), "running")
    llm.engine.step()
    llm.engine.add_request(prompt, PARAMS[0], "reads")
    llm.engine.add_request(prompt, PARAMS[0], "leaves")
    found, steps = list[int](), 0
    while llm.engine.has_unfinished():
        before, outputs = len(reads), llm.engine.step()
        steps += len(reads) > before
        assert sum(reads[before:]) <= STEP_S + 2 * 0.02
        assert found or any(output.request_id == "running" for output in outputs), "the others wait for the disk"
        found += [output.token for output in outputs if output.request_id == "reads" and output.token is not None]
        if steps == 2:
            llm.engine.abort("leaves")
        llm.engine.check()
    assert found == cold[0][0]
    assert steps >= 160 / BLOCK * 0.02 / (STEP_S + 2 * 0.02)
    assert not llm.engine._scheduler._read


def test_a_long_prompt_gets_on_in_every_step(write: Callable[..., str], tmp_path: Path) -> None:
    """However little time a step has for it, some keys are found or a block is read."""
    target, folder = write("llama"), tmp_path / "prompts"
    prompt = [70 + place * place % 19 for place in range(200)]
    first = engine(target, folder, **ENGINES["float64"])
    cold = texts(first, [prompt], PARAMS[:1])
    stored(first)
    llm = engine(target, folder, **ENGINES["float64"])
    calls = 1
    while not llm.engine._context.cache.fetch(prompt, "", 0.0):
        calls += 1
        assert calls <= 3 * 200 // BLOCK
        llm.engine.check()
    assert calls >= 200 // BLOCK
    assert not stored(llm)._searches
    assert texts(llm, [prompt], PARAMS[:1]) == cold
    for _ in range(20):  # requests that are aborted meanwhile
        llm.engine._context.cache.fetch([*prompt[: 8 + _], *prompt], "", 0.0)
    assert len(stored(llm)._searches) <= 8


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_files_that_can_not_be_read(
    family: str, drafts: bool, write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them it is, for target or draft: what follows is computed, and nothing is tried again and again."""
    target, folder = write(family, next(iter(VARIANTS[family]))), tmp_path / "prompts"
    settings = ENGINES["float64"] | ({"draft_model": target} if drafts else {"use_speculative_decoding": False})
    first = engine(target, folder, **settings)
    cold = texts(first)
    stored(first)
    paths = [entry.path for entry in BlockFiles.entries(folder)]
    for path in random.Random(1).sample(paths, min(len(paths), 12)):
        content = path.read_bytes()
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").write_bytes(content)
        llm = engine(target, folder, **settings)
        reads = list[Any]()

        def read(files: BlockFiles, *given: Any, reads: list[Any] = reads) -> memoryview | None:
            reads.append(given)
            return READ(files, *given)

        with monkeypatch.context() as patch:
            patch.setattr(BlockFiles, "read", read)
            assert texts(llm) == cold
        assert len(reads) <= 2 * len(paths)
        path.unlink()
        path.write_bytes(content)


def test_preparations_read_from_the_disk(write: Callable[..., str], tmp_path: Path) -> None:
    target, folder = write("llama"), tmp_path / "prompts"
    first = engine(target, folder, **ENGINES["float64"])
    cold = texts(first)
    stored(first)
    llm = engine(target, folder, **ENGINES["float64"])
    made = llm.engine.prepare([*PROMPTS[1], 70])
    while llm.engine.prepares:
        assert llm.engine.step() == []
        llm.engine.check()
    assert made.done.result() == len(PROMPTS[1]) // BLOCK * BLOCK
    assert stored(llm).files.read_tokens == made.done.result()
    assert llm.engine.metrics.prepared_tokens == 0, "it was computed"
    assert texts(llm) == cold


def test_other_models_share_nothing(write: Callable[..., str], tmp_path: Path) -> None:
    """Neither do other roundings, types of keys, block sizes or salts."""
    llama, other, weights = write("llama"), write("llama", "", 0.02), ENGINES["float64"]
    kinds: list[tuple[str, dict[str, Any]]] = [
        (llama, weights),
        (other, weights),
        (llama, {**weights, "dtype": "float32"}),
        (llama, {**weights, "kv_cache_dtype": "int8"}),
        *((llama, own) for own in NATIVE.values() if usable_sets()),
    ]
    models = set[bytes]()
    for target, own in kinds:
        llm = engine(target, tmp_path / "prompts", **own)
        texts(llm)
        assert stored(llm).files.read_tokens == 0
        models.add(stored(llm).files.model)
    assert len(models) == len(kinds)
    moved = shutil.copytree(llama, tmp_path / "moved")
    llm = engine(str(moved), tmp_path / "prompts", **weights)
    for salt in ("someone", ""):
        llm.generate([{"prompt_token_ids": PROMPTS[0], "cache_salt": salt}], PARAMS[0])
        assert bool(stored(llm).files.read_tokens) == (salt == ""), "a copy of the model, under the same salt"


def test_a_folder_that_is_removed(write: Callable[..., str], tmp_path: Path) -> None:
    target, folder = write("llama"), tmp_path / "prompts"
    llm = engine(target, folder, **ENGINES["float64"])
    cold = texts(llm)
    stored(llm)
    shutil.rmtree(folder)
    assert llm.reset_prefix_cache()
    assert texts(llm) == cold
    stored(llm)
    assert BlockFiles.entries(folder), "nothing is written any more"


def test_what_does_not_pay_is_not_read(write: Callable[..., str], tmp_path: Path) -> None:
    target, folder = write("llama"), tmp_path / "prompts"
    texts(first := engine(target, folder, **ENGINES["float64"]))
    stored(first)
    llm = engine(target, folder, **ENGINES["float64"])
    speed = stored(llm).files.speed
    speed.note_read(1, 1e9)
    speed.note_computed(10**6, 1e-6)
    texts(llm)
    assert stored(llm).files.read_tokens == 0
    assert stored(llm).files.written == 0
    speed.note_computed(1, 1e30)
    assert llm.reset_prefix_cache()
    texts(llm)
    assert stored(llm).files.read_tokens > 0


@pytest.mark.parametrize("arguments", [{"enable_prefix_caching": False}, {"kv_cache_backend": "slotted"}])
def test_an_engine_without_prefixes(arguments: dict[str, Any], write: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shares none"):
        LLM(write("llama"), prompt_cache=tmp_path, **ENGINES["float64"], **arguments)
