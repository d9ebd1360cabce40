"""Transformers on torch: plain, assisted generation, prompt lookup."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.peers.base import DEFAULT, DRAFT, FLOAT, LOOKUP, PLAIN, Job, Measurement, Mode, Progress, PythonPeer


class Transformers(PythonPeer):
    """Hugging Face transformers."""

    name = "transformers"
    package = "transformers"
    install = 'pip install -c constraints.txt "speculant[bench]"'
    formats = {"bf16": ("bfloat16",), FLOAT: ("float32",)}  # noqa: RUF012

    def refusal(self, mode: Mode, batch: int) -> str | None:
        """Refuse drafts for several sequences, as `generate` does."""
        return "assisted generation takes one sequence" if batch > 1 and mode.kind != PLAIN else None


def measure(job: Job) -> Iterator[tuple[str, Measurement]]:
    """Measure each mode; the models are loaded once."""
    import torch

    torch.set_num_threads(job.threads)
    target, draft = (_load(folder, job.format) for folder in (job.models.target, job.models.draft))
    for mode in job.modes:
        arguments = _arguments(mode, draft)
        _run(target, job.workload.warm_up, job.workload.tokens, arguments)
        yield mode.name, _run(target, job.workload.prompts, job.workload.tokens, arguments)


def _load(folder: str, dtype: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    with_encoder = AutoConfig.from_pretrained(folder).is_encoder_decoder
    kind = AutoModelForSeq2SeqLM if with_encoder else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None  # outputs have a fixed length
    return model


def _arguments(mode: Mode, draft: Any) -> dict[str, Any]:
    """Return the arguments of `generate`; a draft's length is a setting of the draft model."""
    fixed = mode.kind == DRAFT
    draft.generation_config.num_assistant_tokens = mode.length if fixed else None
    draft.generation_config.num_assistant_tokens_schedule = "constant" if fixed else None
    draft.generation_config.assistant_confidence_threshold = 0.0 if fixed else None
    return {
        PLAIN: {},
        DRAFT: {"assistant_model": draft},
        LOOKUP: {"prompt_lookup_num_tokens": mode.length},
        DEFAULT: {"assistant_model": draft},
    }[mode.kind]


class _Watch:
    """A streamer: it receives the prompts first and then the tokens of each pass."""

    def __init__(self, sequences: int) -> None:
        self._lengths, self._sequences = [0] * sequences, sequences
        self.progress = Progress(sequences)
        self.num_passes = 0
        self._prompted = False

    def put(self, value: Any) -> None:
        if self._prompted:
            self.num_passes += 1
            self._lengths = [length + value.numel() // self._sequences for length in self._lengths]
            self.progress.record(self._lengths)
        self._prompted = True

    def end(self) -> None:
        pass


def _run(model: Any, prompts: list[list[int]], tokens: int, arguments: dict[str, Any]) -> Measurement:
    import torch

    ids = torch.tensor(prompts)
    with_encoder, widths = model.config.is_encoder_decoder, list[int]()
    name, begun = ("decoder_input_ids", 1) if with_encoder else ("input_ids", ids.shape[1])
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append((kwargs[name] if name in kwargs else args[0]).shape[1]),
        with_kwargs=True,
    )
    watch = _Watch(len(prompts))
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            streamer=watch,
            **arguments,
        )
    hook.remove()
    drafted = sum(widths) - begun - (watch.num_passes - 1)  # a pass reads the last token and the draft
    return watch.progress.end(made[:, begun:].tolist(), drafted * len(prompts))
