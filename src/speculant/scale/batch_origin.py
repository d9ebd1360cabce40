"""What results were made with: a digest of the model, and one of the settings that change texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from speculant.config import EngineConfig
from speculant.serving.options import ServerOptions

# Others change speed, or which requests are refused: with a lossless rule, neither drafts nor neighbours change a text.
SETTINGS = ("dtype", "quantization", "kv_cache_dtype", "model_backend", "kernels", "seed", "device")
_OPTIONS = ("tool_parser", "per_request_spec_decode_metrics")
_KINDS = frozenset({".gguf", ".jinja", ".json", ".model", ".safetensors", ".txt"})
_SAMPLES, _SAMPLE = 64, 16_384  # of a file: how many, and their bytes; weights of two models differ almost everywhere
_BYTES = 4  # of each digest


@dataclass(frozen=True)
class Origin:
    """The digests of a model and of settings."""

    model: str = "0" * 2 * _BYTES
    settings: str = "0" * 2 * _BYTES

    @classmethod
    def of(cls, places: Iterable[Path], config: EngineConfig, options: ServerOptions) -> Origin:
        """Return the origin of a server's answers. places: of the target, and of a tokenizer that replaces its own."""
        drafting = config.speculative()
        settings = [getattr(config, name) for name in SETTINGS] + [getattr(options, name) for name in _OPTIONS]
        settings.append("auto" if drafting is None else drafting.verification)
        return cls(_digest(_facts(places)), _digest([json.dumps(settings, default=str).encode()]))


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.blake2b(digest_size=_BYTES)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def _facts(places: Iterable[Path]) -> Iterator[bytes]:
    """Yield names, sizes and samples of models' files. A folder may have moved."""
    for place in places:
        inner = sorted(each for each in place.iterdir() if each.suffix.lower() in _KINDS) if place.is_dir() else [place]
        for path in inner:
            size = path.stat().st_size
            yield from (path.name.encode(), str(size).encode())
            with path.open("rb") as file:
                for start in range(0, size, max(_SAMPLE, size // _SAMPLES)):
                    file.seek(start)
                    yield file.read(_SAMPLE)
