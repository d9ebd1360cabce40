"""Turns a request's fields into `SamplingParams`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from speculant.engine.async_engine import AsyncEngine
from speculant.params import SamplingParams
from speculant.serving.errors import refusal
from speculant.serving.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    SETTINGS,
    ChatBody,
    CompletionBody,
    GeneratingBody,
    Prediction,
)

_WHITESPACE = frozenset({"disable_any_whitespace"})


def completion_params(engine: AsyncEngine, body: CompletionBody) -> SamplingParams:
    """Return the settings of a completion. Raises ApiError or ConfigError for invalid ones."""
    if body.suffix:
        raise refusal("suffix is not supported: leave it out.", "suffix", "unsupported_parameter")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise refusal("best_of must be n: set only n.", "best_of", "unsupported_parameter")
    given = {"max_tokens": DEFAULT_COMPLETION_TOKENS, **_given(engine, body)}
    if body.echo:
        given |= _echoing(body)
    return _merge(engine, given, body.logprobs)


def _echoing(body: CompletionBody) -> dict[str, Any]:
    """Return the settings of a completion that repeats its prompt. If max_tokens is 0, a token is made and left out."""
    if body.stream and body.logprobs is not None:
        raise refusal("echo with logprobs is not streamed: leave out stream, or logprobs.", "echo")
    given = {} if body.max_tokens != 0 else {"max_tokens": 1}
    if body.prompt_logprobs is None and body.logprobs is not None:
        given["prompt_logprobs"] = body.logprobs
    return given


def chat_params(engine: AsyncEngine, body: ChatBody) -> SamplingParams:
    """Return the settings of a chat; without a limit the answer may fill the context."""
    if body.modalities is not None and body.modalities != ["text"]:
        raise refusal("This server makes only text.", "modalities", "unsupported_value")
    if body.top_logprobs is not None and not body.logprobs:
        raise refusal("top_logprobs needs logprobs=true.", "top_logprobs")
    given = {"max_tokens": None, **_given(engine, body)}
    if body.max_completion_tokens is not None:
        given["max_tokens"] = body.max_completion_tokens
    return _merge(engine, given, (body.top_logprobs or 0) if body.logprobs else None)


def _given(engine: AsyncEngine, body: GeneratingBody) -> dict[str, Any]:
    """Return the settings that a body has."""
    if body.stream and body.prompt_logprobs is not None:
        raise refusal("prompt_logprobs are not streamed: leave out stream.", "prompt_logprobs")
    values = {name: value for name in SETTINGS if (value := getattr(body, name, None)) is not None}
    if (form := _form(body)) is not None:
        values["structured_outputs"] = form
    if body.prediction is not None:
        values["speculation"] = _with_prediction(engine, body.speculation, body.prediction)
    return values


def _merge(engine: AsyncEngine, given: Mapping[str, Any], logprobs: int | None) -> SamplingParams:
    """Return settings whose defaults are the checkpoint's; a beam search does not use sampling defaults."""
    defaults = SamplingParams() if "beam_width" in given else engine.default_params
    return dataclasses.replace(defaults, **given, logprobs=logprobs)


def with_bounded_drafts(params: SamplingParams, most: int) -> SamplingParams:
    """Return a client's settings with drafts of at most `most` tokens: a longer draft delays every other sequence."""
    wanted = params.speculation
    if not isinstance(wanted, Mapping) or wanted.get("num_speculative_tokens", 0) <= most:
        return params
    return dataclasses.replace(params, speculation={**wanted, "num_speculative_tokens": most})


def _with_prediction(
    engine: AsyncEngine, speculation: bool | Mapping[str, Any] | None, prediction: Prediction
) -> bool | Mapping[str, Any] | None:
    """Return the speculation of a request with a prediction.

    Its drafts come from the prediction alone unless it names a method. Without a method that drafts from predictions,
    the prediction is ignored, which changes only the speed.
    """
    if prediction.type != "content":
        raise refusal(f"A prediction of type {prediction.type!r} is unknown: use content.")
    if speculation is False or engine.prediction_method is None:
        return speculation
    own = dict(speculation) if isinstance(speculation, Mapping) else {}
    return {"method": engine.prediction_method, **own} | dict(prediction=_text_of(prediction.content))


def _form(body: GeneratingBody) -> Mapping[str, Any] | None:
    """Return the fields of `StructuredOutputs` that a body sets, by response_format or as in vLLM."""
    given, own = body.response_format, body.structured_outputs
    kind = "text" if given is None else given.get("type")
    if given is None or kind == "text":
        return None if own is not None and requires_call(body) and own.keys() <= _WHITESPACE else own
    if own is not None and not own.keys() <= _WHITESPACE:
        raise refusal("response_format and structured_outputs are both given: keep one.", "response_format")
    compact = {"disable_any_whitespace": wants_compact(body)}
    if kind not in ("json_object", "json_schema"):
        raise refusal('response_format has no type "text", "json_object" or "json_schema".', "response_format")
    named = given.get("json_schema", given)  # in llama.cpp the schema is next to the type
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if kind == "json_object" and schema is None:
        return {"json_object": True, **compact}
    if not isinstance(schema, Mapping):
        raise refusal('response_format needs {"json_schema": {"name": ..., "schema": {...}}}.', "response_format")
    return {"json": schema, **compact}


def requires_call(body: GeneratingBody) -> bool:
    """Whether a request requires a tool call."""
    return getattr(body, "tool_choice", None) not in (None, "none", "auto")


def wants_compact(body: GeneratingBody) -> bool:
    """Whether JSON has no white space between its parts, by response_format or in a required tool call.

    `structured_outputs={"disable_any_whitespace": false}` in the same request allows it.
    """
    compact = (body.structured_outputs or {}).get("disable_any_whitespace", True)
    if not isinstance(compact, bool):
        raise refusal("disable_any_whitespace must be true or false.", "structured_outputs")
    return compact


def predicts(engine: AsyncEngine, body: GeneratingBody, params: SamplingParams) -> bool:
    """Whether a request's drafts come from its prediction alone, so that their counts are those of the prediction.

    With a given form of the output, forced tokens are drafts too.
    """
    asked = params.speculation
    named = isinstance(asked, Mapping) and asked.get("method") == engine.prediction_method
    return named and body.prediction is not None and params.structured_outputs is None


def _text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a content: itself, or its parts joined. Raises ApiError for parts that are not text."""
    return content if isinstance(content, str) else "".join(map(_part, content))


def _part(part: Mapping[str, Any]) -> str:
    text = part.get("text")
    if part.get("type", "text") != "text" or not isinstance(text, str):
        raise refusal("A content part is not text: only parts of type text are supported.")
    return text
