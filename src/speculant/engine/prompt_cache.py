"""The prompt cache of an engine: which files hold keys and values that its target would compute, bit for bit."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from speculant.cache import MEASURED, BlockFiles, KVCache, Source, StoredPrefixes
from speculant.config import EngineConfig
from speculant.errors import ConfigError
from speculant.files import Stamp, cache_folder, read_measured, write_file
from speculant.gguf_file import parts_of
from speculant.models import CausalLM, SequenceInput, build_batch, code_versions, encode_sources
from speculant.types import DraftTree

logger = logging.getLogger(__name__)

PROBE = 48  # tokens whose keys and values tell models and kernels apart
_TEXT = 0  # a sequence id that no request has
_CONTENT = ("*.safetensors", "*.gguf", "config.json")
_FORMAT = 1  # of the files' content
_PIECE = 2**22


def open_prompt_cache(
    config: EngineConfig,
    folder: Path,
    model: CausalLM,
    place: Path,
    cache: KVCache,
    keeps_sources: bool = True,
    facts: tuple[object, ...] = (),
) -> None:
    """Let the cache of a model, loaded from `place`, keep its prompts in a folder.

    keeps_sources: False if a drafter reads the encoder's results. facts: that keys and values depend on too. Raises
    ConfigError for an engine without prefixes.
    """
    if not config.enable_prefix_caching or config.kv_cache_backend != "paged":
        raise ConfigError(
            "prompt_cache keeps prefixes, and this engine shares none between requests",
            'leave enable_prefix_caching on, and kv_cache_backend="paged".',
        )
    started = time.perf_counter()
    files = BlockFiles(folder, _model_digest(model, place, cache, facts), config.prompt_cache_bytes())
    StoredPrefixes(cache, files, keeps_sources)
    logger.info(
        "prompts of %s are kept in %s; it was identified in %.2f s", place, folder, time.perf_counter() - started
    )


def _model_digest(model: CausalLM, place: Path, cache: KVCache, facts: tuple[object, ...]) -> bytes:
    """Return a digest of all that keys and values depend on beside the tokens: the weights and the arithmetic.

    The arithmetic is known by the versions of its code, and by what it computes for a few tokens: instruction sets with
    equal bits share files, and others do not.
    """
    facts = (*facts, _FORMAT, *code_versions(), cache.block_size, model.cache_shape, content_digest(place))
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
    for content in _probe(model, cache):
        digest.update(content)
    return digest.digest()


@torch.inference_mode()
def _probe(model: CausalLM, cache: KVCache) -> Iterator[memoryview]:
    """Yield the results for a few tokens: the last hidden states, and keys and values of every group of layers."""
    count = min(PROBE, model.max_positions - 1, cache.max_len)
    tokens = [(7 + 1031 * at) % model.vocab_size for at in range(count)]
    source = Source(MEASURED, tuple(tokens)) if model.needs.source else None
    try:
        if source is not None:
            encode_sources(model, cache, [source])
        inputs = SequenceInput(_TEXT, tokens, DraftTree.empty(), source=MEASURED if source else None)
        hidden = model.forward(build_batch([inputs], cache, model.cache_shape.device), cache.storage)
        yield hidden.last.contiguous().view(torch.uint8).flatten().cpu().numpy().data
        for seq_id in (_TEXT, *((MEASURED,) if source else ())):
            for group, slots in enumerate(cache.slots(seq_id)):
                yield cache.storage.dump(group, slots)
    finally:
        cache.release(_TEXT)
        cache.release(MEASURED)


def content_digest(place: Path) -> str:
    """Return a digest of a checkpoint's weights and configuration; it is kept as long as no file changes."""
    files = parts_of(place) if place.is_file() else sorted(each for kind in _CONTENT for each in place.glob(kind))
    stamps = json.dumps([Stamp.of(file) for file in files])
    kept = cache_folder("digests") / f"{hashlib.sha256(stamps.encode()).hexdigest()[:32]}.json"
    known = read_measured(kept)
    if isinstance(known.get("content"), str):
        return str(known["content"])
    now, digest = time.time(), hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    if all(Stamp.of(file).is_before(now) for file in files):
        write_file(kept, {"content": digest.hexdigest(), "spread": 0.0})
    return digest.hexdigest()
