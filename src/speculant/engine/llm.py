"""`LLM`: prompts in, text out, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from speculant.engine.frontend import Frontend, Prompt, start_job
from speculant.engine.job import Job, StreamPiece, with_token_texts
from speculant.errors import RequestError
from speculant.params import SamplingParams
from speculant.types import RequestOutput


class LLM(Frontend):
    """Runs prompts to their end, or streams them, in the caller's own thread.

    Arguments are the fields of `EngineConfig`, see `Frontend`.
    """

    def __init__(self, model: str, draft_model: str | None = None, **arguments: Any) -> None:
        super().__init__(model, draft_model, **arguments)
        self.engine = self._runtime.engine
        self._ids = itertools.count()
        self._jobs: dict[str, Job] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids) together; one result per prompt, in order.

        One SamplingParams serves all prompts, or give one for each. A prompt that fails has
        finish_reason "error" and leaves the others alone; if all of them fail, the first error is raised.
        """
        listed = _as_prompts(prompts)
        jobs: list[Job] = []
        try:
            for prompt, params in zip(listed, self._params_for(listed, sampling_params), strict=True):
                while not self.engine.accepts(params.n) and self.engine.has_unfinished():
                    self._step()
                jobs.append(self._start(prompt, params))
            while not all(job.finished for job in jobs):
                self._step()
        finally:
            self._close(jobs)
        outputs = [job.output() for job in jobs]
        errors = [job.error for job in jobs]
        if errors and errors[0] is not None and all(errors):
            raise errors[0]
        return [with_token_texts(output, self.tokenizer) for output in outputs]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamPiece]:
        """Yield each token of a prompt's samples as it is committed; closing the iterator aborts.

        Several streams may be open at once: whichever is asked next moves all of them on.
        """
        job = self._start(prompt, sampling_params or self.default_params)
        try:
            while job.unread or not job.finished:
                while job.unread:
                    yield self._readable(job.piece(job.unread.popleft()))
                if not job.finished:
                    self._step()
        finally:
            self._close([job])
        if job.error is not None:
            raise job.error

    def _start(self, prompt: Prompt, params: SamplingParams) -> Job:
        job = start_job(self._runtime, self._order(prompt, params, f"request-{next(self._ids)}"))
        self._jobs[job.request_id] = job
        return job

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
    return [listed] if listed and isinstance(listed[0], int) else listed
