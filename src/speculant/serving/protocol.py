"""The bodies of requests, in OpenAI's shapes with this package's own fields beside them.

Types are strict: text is no number, true is no 1. What is null counts as not given. Unknown fields are accepted, as
other servers have many that mean nothing here; those that would change the answer are refused (`REFUSED`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from speculant.serving.errors import ApiError, refusal

T = TypeVar("T")
MOST_LISTED = 131_072  # entries of a list in a body
_Item = TypeVar("_Item")
Listed = Annotated[list[_Item], Field(fail_fast=True, max_length=MOST_LISTED)]
Tokens = Annotated[list[int], Field(fail_fast=True, min_length=1, max_length=MOST_LISTED)]
Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_LISTED)]
TokenLists = Annotated[list[Tokens], Field(fail_fast=True, min_length=1, max_length=MOST_LISTED)]
Parts = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MOST_LISTED)]
Object = dict[str, Any]

# Fields of other servers that would change the answer, and what is to be used instead.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "guided_json": 'use structured_outputs={"json": ...}',
        "guided_regex": 'use structured_outputs={"regex": ...}',
        "guided_choice": 'use structured_outputs={"choice": ...}',
        "guided_grammar": 'use structured_outputs={"grammar": ...}',
        "chat_template": "templates come from the model's folder alone; leave it out",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "this server makes text; leave it out",
        "use_beam_search": "set beam_width",
        "previous_response_id": "responses are not stored; send the whole conversation as input",
        "conversation": "conversations are not stored; send the whole conversation as input",
        "background": "responses are not stored; leave it out",
        "prompt_embeds": "send text or token ids",
    }
)


class Body(BaseModel):
    """What every body has in common."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """What a stream has beside the answer."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Extras(BaseModel):
    """What this server alone has. tokens: chunks list their tokens, in `speculant_tokens`."""

    model_config = ConfigDict(strict=True)

    tokens: bool | None = None


class Prediction(BaseModel):
    """A guess of the answer: OpenAI's Predicted Outputs."""

    model_config = ConfigDict(strict=True)

    type: str = "content"
    content: str | Parts


class Generation(Body):
    """Settings of every request that generates. Names and meanings are those of `SamplingParams`."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    speculation: bool | Object | None = None
    prediction: Prediction | None = None
    response_format: Object | None = None
    structured_outputs: Object | None = None
    priority: int | None = None
    cache_salt: str | None = None
    speculant: Extras | None = None


class CompletionBody(Generation):
    """A body of /v1/completions. prompt: a text, texts, token ids, or lists of token ids."""

    prompt: str | Texts | Tokens | TokenLists
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


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
    """One message of a conversation. content: a text, or parts of type text."""

    model_config = ConfigDict(strict=True)

    role: str
    content: str | Parts | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatBody(Generation):
    """A body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_LISTED)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Listed[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    reasoning_effort: str | None = None
    modalities: Listed[str] | None = None


class ResponseBody(Generation):
    """A body of /v1/responses. input: a text, or messages whose parts are text."""

    input: str | Parts
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: Listed[str] | None = None
    top_logprobs: int | None = None
    reasoning: Object | None = None
    text: Object | None = None
    tools: Listed[Object] | None = None
    tool_choice: str | Object | None = None
    truncation: str | None = None
    chat_template_kwargs: Object | None = None
    metadata: dict[str, str] | None = None


class TokenizeBody(Body):
    """A body of /tokenize: a prompt, or messages."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_LISTED)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: Listed[Object] | None = None
    chat_template_kwargs: Object | None = None


class DetokenizeBody(Body):
    """A body of /detokenize."""

    tokens: Listed[int]


BODIES: Mapping[str, type[Body]] = MappingProxyType(
    {
        "/v1/chat/completions": ChatBody,
        "/v1/completions": CompletionBody,
        "/v1/responses": ResponseBody,
        "/tokenize": TokenizeBody,
        "/detokenize": DetokenizeBody,
    }
)


def read_body(kind: type[T], raw: bytes) -> T:
    """Return the body that JSON text has. Raises ApiError (400) for what is no JSON, too deep, or of other types."""
    assert issubclass(kind, Body)
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise _invalid(error) from None
    for name, instead in REFUSED.items():
        if name in (body.model_extra or {}) and body.model_extra[name] not in (None, False):  # type: ignore[index]
            raise refusal(f"{name} is not supported: {instead}.", name, "unsupported_parameter")
    return body


def _invalid(error: ValidationError) -> ApiError:
    """Return the error of the first wrong field; where several types are allowed it has what each one says."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = found[0]
    if first["type"] == "json_invalid":
        return refusal(f"The body is not valid JSON, or it is nested too deep: {first['msg']}.", code="invalid_json")
    if not first["loc"]:
        return refusal(f"The body: {first['msg']}.", code="invalid_type")
    name = str(first["loc"][0])
    says = dict.fromkeys(each["msg"] for each in found if str(each["loc"][:1]) == str(first["loc"][:1]))
    return refusal(f"{name}: {', or: '.join(says)}.", name, "invalid_type")
