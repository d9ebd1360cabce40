"""`kv_cache_dtype`: accepted and refused values, and the positions that fit into the cache."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from speculant.config import EngineConfig, resolve
from speculant.engine import CacheMemory, Runtime, build_engine, read_arguments
from speculant.errors import ConfigError
from speculant.models import load_model
from tests.models import Checkpoints, checkpoints

__all__ = ["checkpoints"]

LAYERS, KV_HEADS, DIM = 2, 2, 8  # of the checkpoints


def built(checkpoints: Checkpoints, **arguments: Any) -> Runtime:
    return build_engine(EngineConfig(checkpoints.target, **{"dtype": "bfloat16", "kernels": "reference", **arguments}))


@pytest.mark.parametrize("given", ["auto", "int8", "bfloat16", "float32", torch.int8, torch.bfloat16])
def test_types_are_read_by_name(given: Any) -> None:
    assert EngineConfig("demo", kv_cache_dtype=given).kv_cache_dtype == str(given).removeprefix("torch.")


@pytest.mark.parametrize("given", ["fp8", "fp8_e4m3", "fp8_e5m2", torch.float8_e4m3fn])
def test_8_bit_floating_point_is_refused_by_name(given: Any, checkpoints: Checkpoints) -> None:
    for use in (lambda: EngineConfig("demo", kv_cache_dtype=given), lambda: load_model("demo", kv_cache_dtype=given)):
        with pytest.raises(ConfigError, match=r'kv_cache_dtype=.*8.* is not supported: .*\n.*kv_cache_dtype="int8"'):
            use()


@pytest.mark.parametrize(
    ("given", "meant"), [("int4", "int8"), ("float16", "float32"), ("bfloat", "bfloat16"), (8, "")]
)
def test_other_types_are_unknown(given: Any, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype='{given}' is unknown(.|\n)*{meant}"):
        EngineConfig("demo", kv_cache_dtype=given)


def test_vllm_s_argument_is_the_same() -> None:
    assert read_arguments({"kv_cache_dtype": "int8"}) == {"kv_cache_dtype": "int8"}
    assert read_arguments({"kv_cache_dtype": None}) == {}
    assert read_arguments({"kv_cache_dtype": "auto"}) == {"kv_cache_dtype": "auto"}


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers_refuses_it(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='int8' is impossible with model_backend"):
        built(checkpoints, kv_cache_dtype="int8", model_backend="transformers")


def test_a_backend_that_cannot_store_it_is_named(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    class Converting:
        """A class that no model has, in place of the protocol."""

    monkeypatch.setattr("speculant.models.weights.load.ConvertsKeys", Converting)
    with pytest.raises(ConfigError, match="kv_cache_dtype='int8' is impossible on the reference kernels"):
        load_model(checkpoints.target, kv_cache_dtype="int8")
    assert load_model(checkpoints.target, "bfloat16", kv_cache_dtype="bfloat16").model.cache_shape.stored is None


@pytest.mark.parametrize("backend", ["paged", "slotted"])
def test_as_much_memory_holds_nearly_twice_the_positions(backend: str, checkpoints: Checkpoints) -> None:
    """A head of 8 numbers takes 16 bytes in bfloat16, and 8 with a scale of 4 in int8."""
    memory = 2 * 120 * LAYERS * 2 * KV_HEADS * 2 * DIM  # 240 positions in bfloat16
    rooms = {}
    for dtype in ("auto", "bfloat16", "int8", "float32"):
        config = EngineConfig(
            checkpoints.target, kv_cache_dtype=dtype, kv_memory=memory, max_num_seqs=2, max_num_batched_tokens=8,
            kv_cache_backend=backend, block_size=4,
        )  # fmt: skip
        shape = load_model(checkpoints.target, "bfloat16", kv_cache_dtype=dtype).model.cache_shape
        cache = CacheMemory.of(config, resolve(config, 256), shape).make_target()
        rooms[dtype] = cache.num_blocks * cache.block_size
        stored = sum(part.nbytes for layer in range(LAYERS) for part in cache.storage.layer(layer))
        assert 0.95 * memory < stored <= memory
    assert rooms == {"auto": 240, "bfloat16": 240, "int8": 320, "float32": 120}


@pytest.mark.parametrize("drafter", ["draft_model", "early_exit"])
def test_drafters_have_caches_of_the_same_type(drafter: str, checkpoints: Checkpoints) -> None:
    """The draft shares the memory; a model and its name tell the type."""
    settings = {"speculative_config": {"method": drafter}, "kv_memory": 2**16, "max_model_len": 32, "max_num_seqs": 2}
    if drafter == "draft_model":
        settings["draft_model"] = checkpoints.near
    blocks = {}
    for dtype in ("auto", "int8"):
        runtime = built(checkpoints, kv_cache_dtype=dtype, **settings)
        assert runtime.checkpoint.kernels == "reference" + (", keys and values in int8" if dtype == "int8" else "")
        blocks[dtype] = runtime.engine.metrics.blocks_total
    assert blocks["int8"] == pytest.approx(4 / 3 * blocks["auto"], rel=0.1)
