"""Turns a request's fields into `SamplingParams`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from speculant.engine import AsyncEngine
from speculant.params import SamplingParams
from speculant.serving.errors import refusal
from speculant.serving.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    SETTINGS,
    ChatBody,
    CompletionBody,
    GeneratingBody,
    Prediction,
    ResponseBody,
)

LOGPROBS = "message.output_text.logprobs"  # a response has log-probabilities if its `include` has this
_OF_NOTHING = frozenset(  # values of `include` about items that no response here has, and reasoning is not encrypted
    {
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "message.input_image.image_url",
    }
)
_WHITESPACE = frozenset({"disable_any_whitespace"})
_MOST_METADATA = (16, 64, 512)  # entries, characters of a name and of a text: OpenAI's limits


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


def response_params(engine: AsyncEngine, body: ResponseBody) -> SamplingParams:
    """Return the settings of a response; without a limit it may fill the context."""
    _check_response(body)
    if body.prompt_logprobs is not None:
        raise refusal("A response has no prompt_logprobs: use /v1/chat/completions.", "prompt_logprobs")
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise refusal("A response has its usage in the last event only.", "stream_options")
    given = {"max_tokens": None, **_given(engine, body)}
    if body.max_output_tokens is not None:
        given["max_tokens"] = body.max_output_tokens
    form = (body.text or {}).get("format")
    if form is not None and not isinstance(form, Mapping):
        raise refusal("text.format is not an object.", "text")
    if form is not None and form.get("type", "text") != "text":
        wrapped = {"type": form.get("type"), "json_schema": form}
        given["structured_outputs"] = _form(body.model_copy(update={"response_format": wrapped}))
    return _merge(engine, given, (body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None)


def _check_response(body: ResponseBody) -> None:
    """Raise ApiError (400) for fields of OpenAI's Responses that would have no effect here."""
    included = set(body.include or ())
    reasoning = _set_keys(body.reasoning, {"summary": "auto"})  # there are none, and none are required
    text = _set_keys(body.text, {"verbosity": "medium"})
    asked = f'include=["{LOGPROBS}"]'
    refused = {
        "n": (body.n not in (None, 1), "a response has one answer; leave it out"),
        "include": (bool(included - {LOGPROBS} - _OF_NOTHING), f"this server supports only {asked}"),
        "top_logprobs": (bool(body.top_logprobs) and LOGPROBS not in included, f"it needs {asked}"),
        "reasoning": (bool(reasoning - {"effort"}), "only effort is supported; reasoning is not summarised"),
        "text": (bool(text - {"format"}), "only format is supported"),
        "truncation": (
            body.truncation not in (None, "disabled", "auto"),
            'use "disabled"; a conversation is never cut',
        ),
        "response_format": (body.response_format is not None and "format" in text, "text.format is given too"),
    }
    for name, (wrong, instead) in refused.items():
        if wrong:
            raise refusal(f"{name} is not supported here: {instead}.", name, "unsupported_parameter")
    given, (entries, name_length, text_length) = body.metadata or {}, _MOST_METADATA
    if len(given) > entries or any(len(name) > name_length or len(text) > text_length for name, text in given.items()):
        limits = f"{entries} entries, with names of {name_length} characters and texts of {text_length}"
        raise refusal(f"metadata may have at most {limits}.", "metadata")


def _set_keys(value: Mapping[str, Any] | None, usual: Mapping[str, str]) -> set[str]:
    """Return the keys whose values are neither null nor the usual ones."""
    return {key for key, each in (value or {}).items() if each is not None and each != usual.get(key)}


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
