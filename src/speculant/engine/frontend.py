"""What every way into an engine begins with: loaded models, and a prompt that becomes a `Generation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from speculant.config import EngineConfig, Limits
from speculant.engine.build import build_engine
from speculant.engine.generation import Generation, StreamPiece, with_token_texts
from speculant.errors import RequestError
from speculant.params import SamplingParams
from speculant.text.stop import compile_stops

Prompt = str | Sequence[int]


class Frontend:
    """A model, its tokenizer, an optional drafter, and an engine that runs them.

    Arguments are the fields of `EngineConfig`; model and draft_model are a folder, a Hugging Face id
    or "demo". Raises SpeculantError with the fix for anything that does not fit.
    """

    def __init__(self, model: str, draft_model: str | None = None, **arguments: Any) -> None:
        self.config = EngineConfig.from_arguments(model=model, draft_model=draft_model, **arguments)
        self._runtime = build_engine(self.config)
        self.tokenizer = self._runtime.tokenizer
        self._compile_stops = lru_cache(maxsize=8)(compile_stops)  # many prompts share their stop strings

    @property
    def speculating(self) -> bool:
        """Whether drafts are made."""
        return self._runtime.drafting

    @property
    def speculating_beams(self) -> bool:
        """Whether drafts are made for beam searches too."""
        return self._runtime.drafting_beams

    @property
    def speculation(self) -> str:
        """What drafts, and how long; or why nothing does."""
        return self._runtime.speculation

    @property
    def limits(self) -> Limits:
        """The sizes of the engine: context, sequences that run and wait, rows per pass."""
        return self._runtime.limits

    @property
    def prediction_method(self) -> str | None:
        """The method that drafts from a request's prediction alone; None if nothing drafts."""
        return self._runtime.prediction_method

    @property
    def kernels(self) -> str:
        """What computes the target, and why it is not the native kernels if it is not."""
        return self._runtime.checkpoint.kernels

    @property
    def default_params(self) -> SamplingParams:
        """The sampling settings that the checkpoint recommends."""
        return self._runtime.checkpoint.sampling

    def _generation(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str, priority: int = 0, cache_salt: str = ""
    ) -> Generation:
        """Tokenise a prompt and compile its stop strings; raises RequestError for what is no prompt."""
        given: object = prompt
        if not isinstance(given, (str, Sequence)):
            raise RequestError(
                f"a prompt is a {type(given).__name__}", "give a text, a list of token ids, or a list of those."
            )
        text = prompt if isinstance(prompt, str) else None
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        params = self._tokenised(params or self.default_params)
        stops = self._compile_stops(tuple(params.stop))
        return Generation(request_id, text, tokens, params, priority, cache_salt, stops)

    def _tokenised(self, params: SamplingParams) -> SamplingParams:
        """Return settings whose prediction, if there is one, is token ids."""
        text = params.prediction
        if not isinstance(text, str):
            return params
        return params.with_prediction(self.tokenizer.encode(text, add_special_tokens=False))

    def _readable(self, piece: StreamPiece) -> StreamPiece:
        """Return a piece for the caller: tokens of log-probabilities get their texts."""
        return piece if piece.output is None else replace(piece, output=with_token_texts(piece.output, self.tokenizer))
