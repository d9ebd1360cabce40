"""Within a model whose keys and values are int8, nothing changes a text: no drafter, batch, chunk or kind of cache."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from speculant import SamplingParams, plugins
from speculant.kernels import usable_sets
from speculant.models import CausalLM, load_model
from tests.drafters import FEW_METHODS
from tests.exactness.identity import Job, Texts, params_of, prompts_of
from tests.exactness.selection import combinations, slow_but
from tests.exactness.test_native_decoder import CACHES, NUM_TOKENS, VARIANTS, feed, make_decoder, make_native, tokens_of
from tests.models import HIDDEN_SIZE, VOCAB_SIZE, Checkpoints, checkpoints
from tests.unit.models.families import FEW, Session, random_tokens, thinned_cases, write_variant

__all__ = ["checkpoints"]

pytestmark = pytest.mark.usefixtures("one_thread")
NATIVE = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
ENGINES: dict[str, dict[str, str]] = {
    "reference": {"dtype": "float64", "kernels": "reference"},
    "float32": {"dtype": "float32", "kernels": "native"},
    "bfloat16": {"dtype": "bfloat16", "kernels": "native"},
}
COMPUTED = [name for name, engine in ENGINES.items() if engine["kernels"] == "reference" or usable_sets()]
DRAFTERS = plugins.names("speculant.drafting")
PROMPTS = prompts_of(6)
SHARED = [[*range(60, 85), 40 + place] for place in range(6)]  # with a common prefix
PARAMS = {
    **params_of(6, 16),
    "beams": [SamplingParams(temperature=0.0, beam_width=3, max_tokens=12)] * 6,
}
ROUNDED = {"kv_cache_dtype": "int8", "max_model_len": 64}
SPECINFER = {"method": "specinfer", "num_speculative_tokens": 6}
WAYS: dict[str, dict[str, Any]] = {
    "together": {"max_num_seqs": 6},
    "slotted": {"max_num_seqs": 3, "kv_cache_backend": "slotted"},
    "small chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 5},
    "blocks of 3": {"max_num_seqs": 6, "block_size": 3},
    "preempted": {"max_num_seqs": 6, "kv_memory": 14 * 16 * 2 * 2 * 2 * (8 + 4), "block_size": 4},  # 224 positions
    "without prefixes": {"max_num_seqs": 2, "enable_prefix_caching": False},
}


def job_of(target: str, engine: str, prompts: Texts = PROMPTS) -> Job:
    sizes, says = (HIDDEN_SIZE, VOCAB_SIZE), ["keys and values in int8"]
    return Job(target, prompts, sizes, {**ROUNDED, **ENGINES[engine]}, says)


@functools.cache
def plain_texts(target: str, engine: str, distribution: str) -> Texts:
    """Return the text of each prompt alone, without speculation."""
    return job_of(target, engine).plain(PARAMS[distribution], least=3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("distribution", ["greedy", "seeded"])
@pytest.mark.parametrize("engine", COMPUTED)
@pytest.mark.parametrize("drafter", slow_but(FEW_METHODS, DRAFTERS))
def test_no_drafter_changes_a_text_of_rounded_keys(
    drafter: str, engine: str, distribution: str, checkpoints: Checkpoints
) -> None:
    plain = plain_texts(checkpoints.target, engine, distribution)
    job_of(checkpoints.target, engine).check(drafter, checkpoints.near, PARAMS[distribution], plain)


@pytest.mark.parametrize(
    ("engine", "distribution", "way"),
    combinations(
        lambda engine, distribution, way: engine == "float32" and (distribution == "greedy") == (way != "together"),
        COMPUTED, PARAMS, WAYS,
    ),
)  # fmt: skip
def test_no_way_to_keep_them_changes_a_text(engine: str, distribution: str, way: str, checkpoints: Checkpoints) -> None:
    """Batches, both kinds of caches, chunks, preemption, prefixes and beams, with trees of a draft model."""
    params, job = PARAMS[distribution], job_of(checkpoints.target, engine, SHARED)
    drafts = {"draft_model": checkpoints.near, "speculative_config": SPECINFER}
    off = {"use_speculative_decoding": False, "max_num_seqs": 1, "enable_prefix_caching": False}
    assert job.generate(params, 2, **drafts, **WAYS[way])[0] == job.generate(params, **off)[0]


def test_texts_of_rounded_keys_are_another_model_s(checkpoints: Checkpoints) -> None:
    """Else the tests above would show nothing."""
    params = [SamplingParams(temperature=0.7, seed=place, max_tokens=40, ignore_eos=True) for place in range(6)]
    own = Job(checkpoints.target, PROMPTS, (0, 0), {"max_model_len": 64, **ENGINES["reference"]})
    assert job_of(checkpoints.target, "reference").plain(params) != own.plain(params)


def rounded_session(folder: Path, dtype: str, kernels: str) -> Session:
    return Session(load_model(str(folder), dtype, kernels=kernels, kv_cache_dtype="int8").model)


@NATIVE
@pytest.mark.parametrize("case", thinned_cases(families=FEW))
def test_every_family_reads_the_numbers_of_the_reference(case: tuple[str, str], tmp_path: Path) -> None:
    """Windows, sinks, soft caps, norms of keys, shared layers and odd dimensions; and they are near the model's own.

    A number between two integers may be rounded to either one, so a few rows differ by a step of one number. Random
    weights magnify roundings, some far more than others. A cache of bfloat16, which rounds more finely, shows how far.
    """
    folder, tokens = write_variant(tmp_path, *case), random_tokens(24)
    wide = rounded_session(folder, "float64", "reference").extend(tokens)
    seen = rounded_session(folder, "float32", "native").extend(tokens)
    own, fine = (
        Session(load_model(str(folder), "float64", kv_cache_dtype=stored).model).extend(tokens)
        for stored in ("auto", "bfloat16")
    )
    steps = (seen - wide).abs().amax(-1)
    assert float(steps.median()) < 1e-4
    assert float(steps.max()) < 0.05
    assert 0 < (wide - own).norm() < 10 * (fine - own).norm()


@NATIVE
@pytest.mark.parametrize("case", thinned_cases(families=FEW))
def test_families_read_their_own_prompt_as_they_decode(case: tuple[str, str], tmp_path: Path) -> None:
    folder, tokens = write_variant(tmp_path, *case), random_tokens(24)
    whole = rounded_session(folder, "bfloat16", "native").extend(tokens)
    session = rounded_session(folder, "bfloat16", "native")
    assert torch.equal(torch.cat([session.extend([token]) for token in tokens]), whole)


@NATIVE
@pytest.mark.covering(1)
@pytest.mark.parametrize("isa", usable_sets())
@pytest.mark.parametrize("variant", slow_but(["biases", "experts", "odd"], VARIANTS))
def test_chunks_and_caches_change_no_bit_of_rounded_keys(variant: str, isa: str) -> None:
    native, alone = (
        make_native(isa, threads=threads, **VARIANTS[variant]).storing_keys_as(torch.int8) for threads in (2, 1)
    )
    tokens, shape = tokens_of(2, native.vocab_size), native.cache_shape
    whole = feed(native, CACHES["slotted"](shape), 1, tokens, [NUM_TOKENS])
    for name, chunks in (("paged", [1] * 40 + [600]), ("paged by 5", [7, 13, 80, 540]), ("slotted", [600] + [1] * 40)):
        assert torch.equal(feed(native, CACHES[name](shape), 1, tokens, chunks), whole), (name, chunks[:3])
    assert torch.equal(feed(alone, CACHES["paged"](shape), 1, tokens, [320, 319, 1]), whole)
    decoder = make_decoder(**VARIANTS[variant]).storing_keys_as(torch.int8)
    expected = feed(decoder, CACHES["slotted"](decoder.cache_shape), 1, tokens, [NUM_TOKENS])
    assert float((whole - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("kernels", ["reference", pytest.param("native", marks=NATIVE)])
def test_a_model_keeps_its_cache_in_all_its_forms(kernels: str, checkpoints: Checkpoints) -> None:
    """Its first layers, and its heads, have a cache of the same type; so has the model that rounds heads."""
    model: Any = load_model(checkpoints.target, "float32", kernels=kernels, kv_cache_dtype="int8").model
    forms: list[CausalLM] = [
        model,
        model.truncated(1),
        *([model.rounding_heads("int8")] if kernels == "native" else []),
    ]
    assert {form.cache_shape.stored for form in forms} == {torch.int8}
    assert model.cache_shape.bytes_per_token == 2 * 2 * 2 * (8 + 4)
