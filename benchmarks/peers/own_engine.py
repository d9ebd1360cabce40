"""Speculant: plain decoding, a draft model of a fixed length, prompt lookup, and the default.

Weights are in its own formats, or in the GGUF files that llama.cpp reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.base import (
    DEFAULT,
    DRAFT,
    FILE,
    FLOAT,
    LOOKUP,
    PLAIN,
    Job,
    Measurement,
    Mode,
    Pair,
    Progress,
    PythonPeer,
)
from benchmarks.peers.llama_cpp import LlamaCpp

if TYPE_CHECKING:
    from speculant.engine import Runtime

_NO_ROUNDING, _FLOAT = "bfloat16", "float32"
_ROUNDED = ("int8", "int4")  # while a model is loaded


class OwnEngine(PythonPeer):
    """Speculant. converter: makes GGUF files; None = none are measured."""

    name = "Speculant"
    package = "speculant"
    install = 'pip install -c constraints.txt -e ".[bench]"'

    def __init__(self, converter: LlamaCpp | None = None) -> None:
        super().__init__()
        own = {FLOAT: (_FLOAT,), "bf16": (_NO_ROUNDING,), "int8": ("int8",), "int4": ("int4",), FILE: (FILE,)}
        files = {} if converter is None or converter.missing() else {each: converter.formats[each] for each in _ROUNDED}
        self._converter = converter
        self.formats = {name: (*formats, *files.get(name, ())) for name, formats in own.items()}

    def prepare(self, models: Pair, weights: str, folder: Path) -> Pair:
        """See `Peer.prepare`: its own formats are made while a model is loaded."""
        if self._converter is None or weights in (_FLOAT, _NO_ROUNDING, *_ROUNDED):
            return models
        return self._converter.write_files(models, weights, folder)


def measure(job: Job) -> Iterator[tuple[str, Measurement]]:
    """Measure each mode; the target is loaded once."""
    from speculant.engine import build_around
    from speculant.models import load_model

    quantization = job.format if job.format in _ROUNDED else None
    target = load_model(job.models.target, _dtype(job), kernels="auto", quantization=quantization)
    for mode in job.modes:
        runtime = build_around(_config(job, mode), target)
        runtime.engine.measurement.finish()  # nothing is drafted before it ends
        _run(runtime, job.workload.warm_up, job.workload.tokens)
        yield mode.name, _run(runtime, job.workload.prompts, job.workload.tokens)


def _dtype(job: Job) -> str:
    return _FLOAT if job.format == _FLOAT else _NO_ROUNDING


def _config(job: Job, mode: Mode) -> Any:
    from speculant.config import EngineConfig

    draft_weights = job.format if job.format in _ROUNDED else "none"
    speculation: dict[str, dict[str, Any]] = {
        PLAIN: {"use_speculative_decoding": False},
        DRAFT: {
            "draft_model": job.models.draft,
            "spec_length": mode.length,
            "draft_quantization": draft_weights,
        },
        LOOKUP: {"speculative_config": {"method": "prompt_lookup", "num_speculative_tokens": mode.length}},
        DEFAULT: {"draft_model": job.models.draft},
    }
    return EngineConfig.from_arguments(
        model=job.models.target,
        dtype=_dtype(job),
        max_num_seqs=len(job.workload.prompts),
        max_model_len=job.workload.positions,
        **speculation[mode.kind],
    )


def _run(runtime: Runtime, prompts: list[list[int]], tokens: int) -> Measurement:
    from speculant.params import SamplingParams

    engine, params = runtime.engine, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    before, progress = engine.metrics.steps, Progress(len(prompts))
    requests = []
    for index, given in enumerate(prompts):
        prompt, source = runtime.prompt_and_source(given)
        requests += engine.add_request(prompt, params, f"{before}-{index}", source=source)
    while engine.has_unfinished():
        engine.step()
        progress.record([len(request.output) for request in requests])
    drafted = sum(request.metrics.speculative_decoding.num_draft_tokens for request in requests)
    return progress.end([list(request.output) for request in requests], drafted)
