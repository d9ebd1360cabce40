"""A beam search in vLLM's shape: its parameters, and results whose sequences begin with the prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from speculant.errors import ConfigError
from speculant.params import SamplingParams
from speculant.text import Tokenizer
from speculant.types import CompletionOutput, Logprobs, RequestOutput


@dataclass(frozen=True)
class BeamSearchParams:
    """The settings of `LLM.beam_search`, which finds the beam_width best texts of at most max_tokens tokens.

    They are ranked by the sum of their log-probabilities / number of generated tokens ** length_penalty, under the
    distribution at temperature 1, whether temperature is 0 or 1. include_stop_str_in_output: an end token belongs to
    the text. Raises ConfigError for other temperatures and for structured_outputs.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            raise ConfigError("a beam search takes no structured_outputs", "use LLM.generate for a form.")
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """Return the settings of the same search for `LLM.generate`."""
        return SamplingParams(
            n=self.beam_width,
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
        )


@dataclass(frozen=True)
class BeamSearchSequence:
    """One text that was found.

    tokens: those of the prompt and of the text. text: of all these. cum_logprob: of the generated tokens. logprobs is
    empty: no alternatives are kept.
    """

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] = field(default_factory=list)


@dataclass(frozen=True)
class BeamSearchOutput:
    """The texts that were found for one prompt, the best first."""

    sequences: list[BeamSearchSequence]

    @classmethod
    def of(cls, result: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer) -> BeamSearchOutput:
        """Return a result of `LLM.generate` in this shape."""
        prompt = result.prompt_token_ids
        found = [sample for sample in result.outputs if sample.finish_reason != "error"]  # there may be fewer texts
        return cls([_sequence(prompt, sample, params, tokenizer) for sample in found])


def _sequence(
    prompt: list[int], sample: CompletionOutput, params: BeamSearchParams, tokenizer: Tokenizer
) -> BeamSearchSequence:
    own = sample.token_ids
    if sample.finish_reason == "stop" and not params.include_stop_str_in_output:
        own = own[:-1]
    tokens = [*prompt, *own]
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    return BeamSearchSequence(tokens, sample.cumulative_logprob or 0.0, text, sample.finish_reason, sample.stop_reason)
