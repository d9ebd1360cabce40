"""OpenVINO GenAI: plain, a draft model, prompt lookup, with models that optimum-intel exported.

Its own defaults ("default") round the KV cache to 8 bits; the other modes keep 16.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.base import (
    DEFAULT,
    DRAFT,
    LOOKUP,
    PLAIN,
    Job,
    Measurement,
    Mode,
    Pair,
    Progress,
    PythonPeer,
    content_key,
    execute,
)

_EXPORT = {
    "bf16": ["fp16"],  # as stored; computed in bfloat16
    "int8": ["int8"],
    "int4": ["int4", "--sym", "--ratio", "1.0", "--group-size", "32", "--group-size-fallback", "adjust"],
}
_USUAL_LENGTH = 5  # of a draft, by the documentation; this pipeline has no default


class OpenVINO(PythonPeer):
    """OpenVINO GenAI on the processor."""

    name = "OpenVINO GenAI"
    package = "openvino-genai"
    install = (
        "python -m venv openvino && openvino/bin/pip install torch==2.13.0 openvino-genai==2026.4.1.0"
        " optimum-intel==2.2.0 && openvino/bin/pip uninstall -y torchvision; then add --openvino-python"
        " openvino/bin/python"
    )
    formats = {name: (name,) for name in _EXPORT}  # noqa: RUF012

    def prepare(self, models: Pair, weights: str, folder: Path) -> Pair:
        """Export both models, with weights rounded to the format. Raises PeerError."""
        converter = [*_EXPORT[weights], *map(self._version_of, ("openvino", "optimum-intel", "transformers"))]
        made = {}
        for role in ("target", "draft"):
            model = getattr(models, role)
            exported = folder / f"{role}-openvino-{weights}-{content_key(model, converter)}"
            if not exported.exists():
                self._export(model, weights, exported)
            made[role] = str(exported)
        return Pair(**made)

    def _export(self, model: str, weights: str, made: Path) -> None:
        partial = made.with_name(made.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        tool = Path(self.python).with_name("optimum-cli")
        task = ["--task", "text-generation-with-past", "--weight-format", *_EXPORT[weights]]
        execute([str(tool), "export", "openvino", "--model", model, *task, str(partial)])
        partial.rename(made)


def measure(job: Job) -> Iterator[tuple[str, Measurement]]:
    """Measure each mode, with a pipeline of its own."""
    for mode in job.modes:
        pipeline, config = _pipeline(job, mode), _generation(job, mode)
        _run(pipeline, config, job.workload.warm_up)
        yield mode.name, _run(pipeline, config, job.workload.prompts)
        del pipeline


def _pipeline(job: Job, mode: Mode) -> Any:
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = len(job.workload.prompts)
    scheduler.max_num_batched_tokens = len(job.workload.prompts) * job.workload.positions  # whole prompts at once
    scheduler.enable_prefix_caching = False
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.threads}
    if mode.kind != DEFAULT:
        properties |= {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    drafting: dict[str, Any] = {}
    if mode.kind in (DRAFT, DEFAULT):
        drafting["draft_model"] = genai.draft_model(job.models.draft, "CPU", **properties)
    elif mode.kind == LOOKUP:
        drafting["prompt_lookup"] = True
    return genai.ContinuousBatchingPipeline(job.models.target, scheduler, "CPU", {**properties, **drafting})


def _generation(job: Job, mode: Mode) -> Any:
    import openvino_genai as genai

    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = job.workload.tokens, True, False
    if mode.kind != PLAIN:
        config.num_assistant_tokens = mode.length or _USUAL_LENGTH
    if mode.kind == LOOKUP:
        config.max_ngram_size = 3
    return config


def _run(pipeline: Any, config: Any, prompts: list[list[int]]) -> Measurement:
    import numpy as np
    from openvino import Tensor

    inputs = [Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
    progress, outputs = Progress(len(prompts)), [list[int]() for _ in prompts]
    handles = [pipeline.add_request(index, each, config) for index, each in enumerate(inputs)]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        for handle, output in zip(handles, outputs, strict=True):
            while handle.can_read():
                output += next(iter(handle.read().values())).generated_ids
        progress.record([len(output) for output in outputs])
    return progress.end(outputs, None)
