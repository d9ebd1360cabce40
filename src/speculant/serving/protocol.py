"""The bodies of requests, in OpenAI's shapes and with this package's own fields.

Types are strict: text is not read as a number, nor true as 1. A field that is null counts as not given. Fields of other
servers are read, refused or accepted, see `fields`; other unknown fields are ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from speculant.params import SamplingParams
from speculant.serving.errors import ApiError, refusal
from speculant.serving.fields import ACCEPTED, REFUSED
from speculant.serving.options import MOST_MESSAGES

T = TypeVar("T")
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions alone
MOST_LISTED = 131_072  # entries of a list in a body
MOST_ENTRIES = MOST_LISTED + 8192  # of all lists and objects of a body
_Item = TypeVar("_Item")
Listed = Annotated[list[_Item], Field(fail_fast=True, max_length=MOST_LISTED)]
Tokens = Annotated[list[int], Field(fail_fast=True, min_length=1, max_length=MOST_LISTED)]
Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_LISTED)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MOST_LISTED)]
TokenLists = Annotated[list[Tokens], Field(fail_fast=True, min_length=1, max_length=MOST_LISTED)]
Biases = Annotated[dict[str, float], Field(fail_fast=True)]
Parts = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MOST_LISTED)]
Object = dict[str, Any]
Side = Literal["left", "right"]

# Settings that bodies name or write in another way, or that are read before the engine.
_OTHERWISE = frozenset({"logprobs", "structured_outputs", "detokenize", "truncate_prompt_tokens"})
SETTINGS = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - _OTHERWISE


class Body(BaseModel):
    """The base of all bodies."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    # The fields that set an engine's setting, by its name; the first that was sent counts. Others have the same name.
    aliases: ClassVar[Mapping[str, Sequence[str]]] = MappingProxyType({})
    # Advice for fields of other routes, where this route has the same setting under another name.
    instead: ClassVar[Mapping[str, str]] = MappingProxyType({})

    model: str | None = None

    def sent_as(self, name: str) -> str | None:
        """Return the field by which a client set the engine's setting `name`; None if it did not."""
        fields = self.aliases.get(name, (name,))
        return next(
            (each for each in fields if each in self.model_fields_set and getattr(self, each) is not None), None
        )


class StreamOptions(BaseModel):
    """Data that a stream has besides the answer."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Extras(BaseModel):
    """Fields that only this server has.

    tokens: chunks list their tokens, in `speculant_tokens`, and the last one has the figures on speculation.
    """

    model_config = ConfigDict(strict=True)

    tokens: bool | None = None


class Prediction(BaseModel):
    """A guess of the answer: OpenAI's Predicted Outputs."""

    model_config = ConfigDict(strict=True)

    type: str = "content"
    content: str | Parts


_SPECULATION = MappingProxyType({"method": ("speculation",), "verification": ("speculation",)})


def _on_wire(hint: Any) -> Any:
    """Return the type of a JSON field for a setting of a type."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Sequence:
        item = _on_wire(inner[0])
        return Listed[item]  # type: ignore[valid-type]
    if kind is Mapping:
        return Object
    return Union[tuple(map(_on_wire, inner))] if kind in (Union, UnionType) else hint  # noqa: UP007 - of any length


if TYPE_CHECKING:
    _Settings = Body
else:
    _hints = get_type_hints(SamplingParams)
    _Settings = create_model(
        "_Settings", __base__=Body, **{name: (_on_wire(_hints[name]) | None, None) for name in sorted(SETTINGS)}
    )


class GeneratingBody(_Settings):
    """A body that generates text: each field of `SamplingParams`, and these."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    logit_bias: Biases | None = None
    max_tokens: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    speculation: bool | Object | None = None
    prediction: Prediction | None = None
    response_format: Object | None = None
    structured_outputs: Object | None = None
    priority: int | None = None
    cache_salt: str | None = None
    speculant: Extras | None = None


class CompletionBody(GeneratingBody):
    """A body of /v1/completions. prompt: a text, token ids or an object, or a list of one kind of these.

    An object has the keys of a `TextPrompt`, a `TokensPrompt` or an `ExplicitEncoderDecoderPrompt`.
    """

    aliases = MappingProxyType(
        {
            "structured_outputs": ("structured_outputs", "response_format"),
            "source": ("prompt",),
            **_SPECULATION,
        }
    )

    prompt: str | Texts | Tokens | TokenLists | Object | Objects
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    return_token_ids: bool | None = None


class FunctionCall(BaseModel):
    """A function that the model called, and the JSON text of its arguments."""

    model_config = ConfigDict(strict=True)

    name: str
    arguments: str = "{}"


class ToolCall(BaseModel):
    """A call in an assistant's message."""

    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: str = "function"
    function: FunctionCall


class Message(BaseModel):
    """One message of a conversation. content: a text, or parts of type text; an assistant's also of type refusal."""

    model_config = ConfigDict(strict=True)

    role: str
    content: str | Parts | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: str | None = None


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]


class ConversationBody(Body):
    """A body with a conversation: the fields that make its prompt."""

    messages: Messages | None = None
    tools: Listed[Object] | None = None
    tool_choice: str | Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    reasoning_effort: str | None = None
    documents: Listed[Object] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None


class ChatBody(ConversationBody, GeneratingBody):
    """A body of /v1/chat/completions."""

    # A form of the answer beside a required call: False = it is refused, True = it has no effect.
    call_replaces_form: ClassVar[bool] = False
    aliases = MappingProxyType(
        {
            "max_tokens": ("max_completion_tokens", "max_tokens"),
            "logprobs": ("top_logprobs", "logprobs"),
            "structured_outputs": ("structured_outputs", "response_format", "tool_choice"),
            "prompt": ("messages",),
            **_SPECULATION,
        }
    )

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    modalities: Listed[str] | None = None
    return_token_ids: bool | None = None


class ResponseBody(GeneratingBody):
    """A body of /v1/responses. input: a text, or items: messages whose parts are text, calls and their outputs."""

    aliases = MappingProxyType(
        {
            "max_tokens": ("max_output_tokens", "max_tokens"),
            "structured_outputs": ("structured_outputs", "response_format", "text", "tool_choice"),
            "response_format": ("response_format", "text"),
            "prompt": ("input",),
            "messages": ("input",),
            **_SPECULATION,
        }
    )
    instead = MappingProxyType(
        {
            "logprobs": 'use include=["message.output_text.logprobs"] and top_logprobs',
            "max_completion_tokens": "use max_output_tokens",
            "prompt": "prompts are not stored; send the conversation as input",
            "messages": "use input",
            "reasoning_effort": 'use reasoning={"effort": ...}',
        }
    )

    input: str | Parts
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: int | None = None
    include: Listed[str] | None = None
    top_logprobs: int | None = None
    reasoning: Object | None = None
    text: Object | None = None
    tools: Listed[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    truncation: str | None = None
    chat_template_kwargs: Object | None = None
    metadata: Annotated[dict[str, str], Field(fail_fast=True)] | None = None


class TokenizeBody(ConversationBody):
    """A body of /tokenize: a prompt, or messages."""

    aliases = MappingProxyType({"prompt": ("prompt", "messages")})

    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """A body of /detokenize."""

    tokens: Listed[int]
    skip_special_tokens: bool | None = None


BODIES: Mapping[str, type[Body]] = MappingProxyType(
    {
        "/v1/chat/completions": ChatBody,
        "/v1/completions": CompletionBody,
        "/v1/responses": ResponseBody,
        "/tokenize": TokenizeBody,
        "/detokenize": DetokenizeBody,
    }
)


_PATHS: Mapping[str, list[str]] = MappingProxyType(  # by field, the routes that read it
    {
        name: [path for path, each in BODIES.items() if name in each.model_fields]
        for kind in BODIES.values()
        for name in kind.model_fields
    }
)


def check_kind(content_type: str) -> None:
    """Raise ApiError (415) unless a body is JSON by its type. A web page can send other types to any server."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        said = f"the type {kind[:80]!r}" if kind else "no type"
        text = f"The body has {said}: send JSON with the header Content-Type: application/json."
        raise ApiError(415, text, code="unsupported_media_type")


def read_body(kind: type[T], raw: bytes) -> T:
    """Parse a body. Raises ApiError (400) for invalid JSON, deep nesting, too many entries and wrong types."""
    assert issubclass(kind, Body)
    if count_entries(raw) > MOST_ENTRIES:
        text = f"The body has over {MOST_ENTRIES} entries in its lists and objects."
        raise refusal(text, code="body_too_large")
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise _invalid(error) from None
    for name, value in body:
        if not _is_finite(value):  # pydantic reads NaN and Infinity, and 1e999 as infinity
            raise refusal(f"{name} has a number that JSON can't express.", name, "invalid_json")
    _check_others(body, body.model_extra or {})
    return body


def _is_finite(value: Any) -> bool:
    """Whether all numbers within a value are finite."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return False
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, dict | BaseModel):
            waiting += dict(item).values()
    return True


def count_entries(raw: bytes) -> int:
    """Return at least the number of entries of all lists and objects of a JSON text, without parsing it.

    It is the number of commas and opening brackets. Those within strings are left out only if the number with them is
    too large. Parsing holds the interpreter's lock for up to a microsecond per entry. Counting releases it for most of
    its time.
    """
    most = sum(map(raw.count, (b",", b"[", b"{")))
    if most <= MOST_ENTRIES:
        return most
    plain = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    outside = ~np.logical_xor.accumulate(plain == ord('"'))
    return int(np.count_nonzero(outside & ((plain == ord(",")) | (plain == ord("[")) | (plain == ord("{")))))


def _check_others(body: Body, given: Mapping[str, Any]) -> None:
    """Refuse fields that a body does not read and that would change the answer."""
    generates = isinstance(body, GeneratingBody)
    for name, value in given.items():
        entry = REFUSED.get(name)
        if entry is not None:
            if entry.is_set(value) and (generates or (entry.of_prompt and isinstance(body, ConversationBody))):
                raise refusal(f"{name} is not supported: {entry.advice}.", name, "unsupported_parameter")
        elif generates and value and name not in ACCEPTED and (paths := _PATHS.get(name)):
            advice = f": {body.instead[name]}" if name in body.instead else ""
            raise refusal(f"{name} is a field of {' and '.join(paths)} only{advice}.", name, "unsupported_parameter")


def _invalid(error: ValidationError) -> ApiError:
    """Return the error of the first wrong field. If several types are allowed, it has the message for each one."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = found[0]
    if first["type"] == "json_invalid":
        return refusal(f"The body is not valid JSON, or it is nested too deep: {first['msg']}.", code="invalid_json")
    if not first["loc"]:
        return refusal(f"The body: {first['msg']}.", code="invalid_type")
    name = str(first["loc"][0])
    says = dict.fromkeys(each["msg"] for each in found if str(each["loc"][:1]) == str(first["loc"][:1]))
    return refusal(f"{name}: {', or: '.join(says)}.", name, "invalid_type")
