"""From a request's fields to `SamplingParams`."""

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
    Generation,
    Prediction,
    ResponseBody,
)


def completion_params(engine: AsyncEngine, body: CompletionBody) -> SamplingParams:
    """Return the settings of a completion. Raises ApiError or ConfigError for those that can't be served."""
    if body.suffix:
        raise refusal("suffix is not supported: leave it out.", "suffix", "unsupported_parameter")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise refusal("best_of must be n: set n alone.", "best_of", "unsupported_parameter")
    given = {"max_tokens": DEFAULT_COMPLETION_TOKENS, **_given(engine, body)}
    if body.echo:
        given |= _echoing(body)
    return _merge(engine, given, body.logprobs)


def _echoing(body: CompletionBody) -> dict[str, Any]:
    """Return the settings of a completion that repeats its prompt; without an answer one token is made and left out."""
    if body.stream and body.logprobs is not None:
        raise refusal("echo with logprobs is not streamed: leave out stream, or logprobs.", "echo")
    given = {} if body.max_tokens != 0 else {"max_tokens": 1}
    if body.prompt_logprobs is None and body.logprobs is not None:
        given["prompt_logprobs"] = body.logprobs
    return given


def chat_params(engine: AsyncEngine, body: ChatBody) -> SamplingParams:
    """Return the settings of a chat; without a limit the answer may fill the context."""
    if body.modalities is not None and body.modalities != ["text"]:
        raise refusal("This server makes text alone.", "modalities", "unsupported_value")
    if body.top_logprobs is not None and not body.logprobs:
        raise refusal("top_logprobs needs logprobs=true.", "top_logprobs")
    given = {"max_tokens": None, **_given(engine, body)}
    if body.max_completion_tokens is not None:
        given["max_tokens"] = body.max_completion_tokens
    return _merge(engine, given, (body.top_logprobs or 0) if body.logprobs else None)


def response_params(engine: AsyncEngine, body: ResponseBody) -> SamplingParams:
    """Return the settings of a response."""
    if body.n not in (None, 1):
        raise refusal("A response has one answer: leave out n.", "n")
    if body.prompt_logprobs is not None:
        raise refusal("A response has no prompt_logprobs: use /v1/chat/completions.", "prompt_logprobs")
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise refusal("A response has its usage in the last event alone.", "stream_options")
    given = {**_given(engine, body), "max_tokens": body.max_output_tokens}
    form = (body.text or {}).get("format")
    if isinstance(form, Mapping) and form.get("type", "text") != "text":
        wrapped = {"type": form.get("type"), "json_schema": form}
        given["structured_outputs"] = _form(body.model_copy(update={"response_format": wrapped}))
    return _merge(engine, given, None)


def _given(engine: AsyncEngine, body: Generation) -> dict[str, Any]:
    """Return those settings that a body has."""
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


def _with_prediction(
    engine: AsyncEngine, speculation: bool | Mapping[str, Any] | None, prediction: Prediction
) -> bool | Mapping[str, Any] | None:
    """Return the speculation of a request with a prediction.

    Its drafts come from the prediction alone unless it names a method of its own. Where nothing drafts the prediction
    is not used, which changes nothing but the speed.
    """
    if prediction.type != "content":
        raise refusal(f"A prediction of type {prediction.type!r} is unknown: use content.")
    if speculation is False or engine.prediction_method is None:
        return speculation
    own = dict(speculation) if isinstance(speculation, Mapping) else {}
    return {"method": engine.prediction_method, **own} | dict(prediction=text_of(prediction.content))


def _form(body: Generation) -> Mapping[str, Any] | None:
    """Return the fields of `StructuredOutputs` that a body asks for, by response_format or in vLLM's way."""
    given = body.response_format
    kind = "text" if given is None else given.get("type")
    if given is None or kind == "text":
        return body.structured_outputs
    if body.structured_outputs is not None:
        raise refusal("response_format and structured_outputs are both given: keep one.", "response_format")
    if kind not in ("json_object", "json_schema"):
        raise refusal('response_format has no type "text", "json_object" or "json_schema".', "response_format")
    named = given.get("json_schema", given)  # llama.cpp has the schema beside the type
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if kind == "json_object" and schema is None:
        return {"json_object": True}
    if not isinstance(schema, Mapping):
        raise refusal('response_format needs {"json_schema": {"name": ..., "schema": {...}}}.', "response_format")
    return {"json": schema}


def predicts(engine: AsyncEngine, body: Generation, params: SamplingParams) -> bool:
    """Whether a request's drafts come from its prediction alone, so that its counts are the prediction's.

    Where the output's form forces tokens, these are drafts too.
    """
    asked = params.speculation
    named = isinstance(asked, Mapping) and asked.get("method") == engine.prediction_method
    return named and body.prediction is not None and params.structured_outputs is None


def text_of(content: str | Sequence[Mapping[str, Any]] | None, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a content: itself, or its parts of these kinds joined. Raises ApiError for other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part(part, kinds) for part in content)


def _part(part: Mapping[str, Any], kinds: Sequence[str]) -> str:
    text = part.get("text")
    if part.get("type", "text") not in kinds or not isinstance(text, str):
        raise refusal(f"A content part is no text: this model reads parts of type {' or '.join(kinds)} alone.")
    return text
