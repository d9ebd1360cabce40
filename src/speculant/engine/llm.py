"""`LLM`: prompts in, text out, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from speculant.config import EngineConfig
from speculant.engine.build import build_engine, generation_defaults
from speculant.engine.job import Job, StreamPiece
from speculant.errors import RequestError
from speculant.params import SamplingParams
from speculant.text.stream import TextStream
from speculant.types import RequestOutput

Prompt = str | Sequence[int]


class LLM:
    """A model, its tokenizer, an optional drafter, and an engine that runs them.

    Arguments are the fields of `EngineConfig`; model and draft_model are a folder, a Hugging Face id
    or "demo". Raises SpeculantError with the fix for anything that does not fit.
    """

    def __init__(self, model: str, draft_model: str | None = None, **arguments: Any) -> None:
        self.config = EngineConfig.from_arguments(model=model, draft_model=draft_model, **arguments)
        self._built = build_engine(self.config)
        self._ids = itertools.count()
        self._jobs: dict[str, Job] = {}
        self.engine = self._built.engine
        self.tokenizer = self._built.tokenizer

    @property
    def speculating(self) -> bool:
        """Whether drafts are made."""
        return self._built.drafting

    @property
    def speculation(self) -> str:
        """What drafts, and how long; or why nothing does."""
        return self._built.speculation

    @property
    def default_params(self) -> SamplingParams:
        """The sampling settings that the checkpoint recommends."""
        return SamplingParams.from_mapping(generation_defaults(self._built.checkpoint))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids) together; one result per prompt, in order.

        One SamplingParams serves all prompts, or give one for each.
        """
        listed = _as_prompts(prompts)
        jobs: list[Job] = []
        try:
            for prompt, params in zip(listed, self._params_for(listed, sampling_params), strict=True):
                jobs.append(self._start(prompt, params))
            while not all(job.finished for job in jobs):
                self._step()
        finally:
            self._close(jobs)
        return [job.output() for job in jobs]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamPiece]:
        """Yield each token of a prompt's samples as it is committed; closing the iterator aborts.

        Several streams may be open at once: whichever is asked next moves all of them on.
        """
        job = self._start(prompt, sampling_params or self.default_params)
        try:
            while job.unread or not job.finished:
                while job.unread:
                    yield job.piece(job.unread.popleft())
                if not job.finished:
                    self._step()
        finally:
            self._close([job])

    def _start(self, prompt: Prompt, params: SamplingParams) -> Job:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        request_id = f"request-{next(self._ids)}"
        requests = self.engine.add_request(tokens, params, request_id, watch=lambda: TextStream(self.tokenizer, params))
        self._jobs[request_id] = Job(request_id, prompt if isinstance(prompt, str) else None, requests, self.tokenizer)
        return self._jobs[request_id]

    def _step(self) -> None:
        for output in self.engine.step():
            self._jobs[output.request_id].unread.append(output)

    def _close(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            del self._jobs[job.request_id]
            if not job.finished:
                self.engine.abort(job.request_id)

    def _params_for(
        self, prompts: Sequence[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.default_params] * len(prompts)
        if len(given) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts came with {len(given)} sampling parameters",
                "give one for each prompt, or one for all.",
            )
        return given


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt (a text, or token ids) from several."""
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and isinstance(listed[0], int):
        return [listed]
    for prompt in listed:
        if not isinstance(prompt, (str, Sequence)):
            raise RequestError(
                f"a prompt is a {type(prompt).__name__}", "give a text, a list of token ids, or a list of those."
            )
    return listed
