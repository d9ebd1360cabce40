"""What all answers share: the call, the pieces and the usage. An answer is the same streamed or in one piece."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from speculant.engine import StreamPiece
from speculant.params import SamplingParams
from speculant.serving.prompts import Prompt
from speculant.serving.token_texts import TokenTexts
from speculant.types import CompletionOutput, RequestOutput


@dataclass(frozen=True)
class Call:
    """The facts about a request that its answer needs.

    model: as named by the client. predicted: drafts come from the user's prediction alone. level: how many figures on
    speculation the answer has. lists_tokens: chunks have `speculant_tokens`. returns_ids: choices have their token ids.
    continuous_usage: each chunk has the usage so far.
    """

    model: str
    params: SamplingParams
    texts: TokenTexts
    level: str = "none"
    predicted: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    lists_tokens: bool = False
    returns_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


Chunk = Mapping[str, Any]


class Answer(ABC):
    """Reads the pieces of a request in order. outputs: the result of each prompt, None until it is complete.

    prompts: set before `begin`. generated: tokens so far.
    """

    def __init__(self, call: Call, num_prompts: int) -> None:
        self.call = call
        self.outputs: list[RequestOutput | None] = [None] * num_prompts
        self.prompts: Sequence[Prompt] = ()
        self.generated = 0

    def begin(self, prompts: Sequence[Prompt]) -> list[Chunk]:
        """Return the chunks before the first piece."""
        return []

    def feed(self, prompt: int, piece: StreamPiece) -> list[Chunk]:
        """Read a piece and return its chunks, if any."""
        if piece.output is not None:
            self.outputs[prompt] = piece.output
        self.generated += piece.token is not None
        return self.read(prompt * self.call.params.n + piece.index, piece)

    @abstractmethod
    def read(self, index: int, piece: StreamPiece) -> list[Chunk]:
        """Read a piece of one choice and return its chunks, if any."""

    @abstractmethod
    def end(self) -> list[Chunk]:
        """Return the chunks after the last piece."""

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """Return the whole answer, after the last piece."""

    @property
    def results(self) -> list[RequestOutput]:
        """The results of the prompts that are complete."""
        return [output for output in self.outputs if output is not None]

    def usage(self, reasoning_tokens: int = 0) -> dict[str, Any]:
        """Return the usage of tokens; see `usage`."""
        return usage(self.results, self.call.predicted, reasoning_tokens)

    def chunk_usage(self) -> dict[str, Any]:
        """Return the usage entry of a chunk before the last one."""
        if not self.call.include_usage:
            return {}
        if not self.call.continuous_usage:
            return {"usage": None}
        prompt = sum(each.num_tokens for each in self.prompts)
        total = prompt + self.generated
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": self.generated, "total_tokens": total}}

    def speculation(self) -> dict[str, Any]:
        """Return the answer's figures on speculation; see `speculation`."""
        return speculation(self.results, self.call.level)

    def last_speculation(self, piece: StreamPiece) -> dict[str, Any]:
        """Return the figures on speculation for the last piece's chunk, unless a chunk with the usage has them."""
        last = piece.output is not None and len(self.results) == len(self.outputs)
        return self.speculation() if last and not self.call.include_usage else {}

    def tokens_of(self, piece: StreamPiece) -> dict[str, Any]:
        """Return a piece's entry of `speculant_tokens`, if the request wants it."""
        if not self.call.lists_tokens:
            return {}
        return {"speculant_tokens": [{"text": piece.text, "drafted": piece.drafted, "corrected": piece.corrected}]}

    def ids_of(self, piece: StreamPiece) -> dict[str, Any]:
        """Return the token id of a piece for a chunk's choice, if the request wants it."""
        if not self.call.returns_ids:
            return {}
        return {"token_ids": [] if piece.token is None else [piece.token]}

    def ids_of_output(self, output: CompletionOutput) -> dict[str, Any]:
        """Return the token ids of a choice, if the request wants them."""
        return {"token_ids": list(output.token_ids)} if self.call.returns_ids else {}


def new_id(kind: str) -> str:
    """Return an id such as `cmpl-...`."""
    return kind + secrets.token_hex(16)


def usage(outputs: Sequence[RequestOutput], predicted: bool, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Return `usage` in OpenAI's shape, over all prompts.

    predicted: all drafts came from the user's prediction, so their counts are those of the prediction.
    """
    prompt = sum(output.num_prompt_tokens for output in outputs)
    completion = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    specs = [output.metrics.speculative_decoding for output in outputs] if predicted else []
    accepted = sum(spec.num_accepted_draft_tokens for spec in specs)
    drafted = sum(spec.num_draft_tokens for spec in specs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.metrics.cached_tokens for output in outputs)},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def speculation(outputs: Sequence[RequestOutput], level: str) -> dict[str, Any]:
    """Return a response's figures on speculation, in vLLM's shape: the key `metrics`, or nothing.

    `tokens_per_pass` is added to vLLM's figures. level: "none", "summary" or "detailed". The figures are those of a
    single sample; they are None for several.
    """
    if level == "none":
        return {}
    if len(outputs) != 1 or len(outputs[0].outputs) != 1:
        return {"metrics": None}
    metrics = outputs[0].metrics
    if metrics.verification is None:
        return {"metrics": {"speculative_decoding": None}}
    figures = {"tokens_per_pass": metrics.tokens_per_pass, **metrics.to_dict()["speculative_decoding"]}
    if level == "detailed":
        figures |= metrics.speculative_decoding.steps()
    return {"metrics": {"speculative_decoding": figures}}
