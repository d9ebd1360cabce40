"""The bodies of requests, in OpenAI's shapes and with this package's own fields.

Types are strict: text is not read as a number, nor true as 1. A field that is null counts as not given. Fields of other
servers are read, refused or accepted (`REFUSED`, `ACCEPTED`); other unknown fields are ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from speculant.serving.options import MOST_MESSAGES
from speculant.serving.wire import ApiError, refusal

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


SPECULATION = MappingProxyType({"method": ("speculation",), "verification": ("speculation",)})


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
            **SPECULATION,
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
            **SPECULATION,
        }
    )

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    modalities: Listed[str] | None = None
    return_token_ids: bool | None = None


class TranslatedChat(ChatBody):
    """A request in another shape as a chat. The form of its text has no effect on a required call."""

    call_replaces_form: ClassVar[bool] = True


class ResponseBody(GeneratingBody):
    """A body of /v1/responses. input: a text, or items: messages whose parts are text, calls and their outputs."""

    aliases = MappingProxyType(
        {
            "max_tokens": ("max_output_tokens", "max_tokens"),
            "structured_outputs": ("structured_outputs", "response_format", "text", "tool_choice"),
            "response_format": ("response_format", "text"),
            "prompt": ("input",),
            "messages": ("input",),
            **SPECULATION,
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


class ExtraFile(BaseModel):
    """A text of an editor's other files, or of another place in the same file."""

    model_config = ConfigDict(strict=True)

    text: str
    filename: str | None = None


class InfillBody(GeneratingBody):
    """A body of llama.cpp's /infill. prompt: text between the prefix and the cursor, such as the line's beginning."""

    aliases = MappingProxyType(
        {
            "max_tokens": ("n_predict", "max_tokens"),
            "structured_outputs": ("structured_outputs", "response_format"),
            "prompt": ("input_prefix",),
            **SPECULATION,
        }
    )

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Field(fail_fast=True, max_length=MOST_MESSAGES)] | None = None
    prompt: str | None = None
    n_predict: int | None = None
    n_indent: int | None = None
    t_max_predict_ms: int | None = None
    samplers: Listed[str] | None = None
    response_fields: Listed[str] | None = None
    id_slot: int | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(ConversationBody):
    """A body of /tokenize: a prompt, or messages."""

    aliases = MappingProxyType({"prompt": ("prompt", "messages")})

    prompt: str | None = None
    return_token_strs: bool | None = None


class PrefillBody(ConversationBody):
    """A body of /v1/prefill: that of a chat or a completion, whose settings have no effect.

    wait: the answer comes once the prompt is read.
    """

    aliases = MappingProxyType({"prompt": ("prompt", "messages")})

    prompt: str | Texts | Tokens | TokenLists | Object | Objects | None = None
    suffix: str | None = None
    cache_salt: str | None = None
    wait: bool | None = None


class PrefilledChat(ChatBody):
    """A chat whose prompt is read alone."""

    wait: bool | None = None


class PrefilledCompletion(CompletionBody):
    """A completion whose prompts are read alone."""

    wait: bool | None = None


class DetokenizeBody(Body):
    """A body of /detokenize."""

    tokens: Listed[int]
    skip_special_tokens: bool | None = None


BODIES: Mapping[str, type[Body]] = MappingProxyType(
    {
        "/v1/chat/completions": ChatBody,
        "/v1/completions": CompletionBody,
        "/v1/responses": ResponseBody,
        "/infill": InfillBody,
        "/v1/prefill": PrefillBody,
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
        if not is_finite(value):  # pydantic reads NaN and Infinity, and 1e999 as infinity
            raise refusal(f"{name} has a number that JSON can't express.", name, "invalid_json")
    _check_others(body, body.model_extra or {})
    return body


def is_finite(value: Any) -> bool:
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


def count_entries(raw: bytes, plain_most: int = MOST_ENTRIES) -> int:
    """Return at least the number of entries of all lists and objects of a JSON text, without parsing it.

    It is the number of commas and opening brackets. Those within strings are left out only if there are more than
    `plain_most` with them. Parsing holds the interpreter's lock for up to a microsecond per entry. Counting releases it
    for most of its time.
    """
    most = sum(map(raw.count, (b",", b"[", b"{")))
    if most <= plain_most:
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


@dataclass(frozen=True)
class Refused:
    """A field that the servers of vLLM or llama.cpp document, this one does not read, and that would change the answer.

    It is refused, so a client is told when it can't get the answer that it wants. A field that a body declares is read,
    even if it is listed here.

    advice: what to do instead. off: values that change nothing; None is always one. of_prompt: the field changes a
    prompt's tokens, so /tokenize refuses it too.
    """

    advice: str
    off: tuple[Any, ...] = (False, "", [], {})
    of_prompt: bool = False

    def is_set(self, value: Any) -> bool:
        """Whether a value would change the answer."""
        return value is not None and value not in self.off


_SAMPLER = "use temperature, top_k, top_p or min_p"
_STORED = "use previous_response_id"
_GRAMMAR = 'use structured_outputs={"grammar": ...}'
_SCHEMA = 'use response_format={"type": "json_schema", ...}'
_TEXT_ONLY = "this server reads and makes only text; leave it out"
_ONE_MODEL = "this server runs one model on one machine; leave it out"
_CHAT = "use /v1/chat/completions"
_PAIR = 'use prompt={"encoder_prompt": ..., "decoder_prompt": ...} on /v1/completions'

REFUSED: Mapping[str, Refused] = MappingProxyType(
    {
        # forms of the output
        "guided_json": Refused('use structured_outputs={"json": ...}', (False,)),
        "guided_regex": Refused('use structured_outputs={"regex": ...}'),
        "guided_choice": Refused('use structured_outputs={"choice": ...}'),
        **dict.fromkeys(("guided_grammar", "grammar"), Refused(_GRAMMAR)),
        "json_schema": Refused(_SCHEMA, (False,)),
        "n_indent": Refused('use structured_outputs={"regex": ...}'),
        # sampling
        "logits_processors": Refused("no request can bring code; use logit_bias"),
        "use_beam_search": Refused("set beam_width"),
        "typical_p": Refused(_SAMPLER, (1.0,)),
        **dict.fromkeys(("mirostat", "xtc_probability"), Refused(_SAMPLER)),
        "dry_multiplier": Refused("use repetition_penalty or frequency_penalty"),
        "dynatemp_range": Refused("set only temperature"),
        "top_n_sigma": Refused("use min_p", (0, -1)),
        "min_keep": Refused("use top_k"),
        "samplers": Refused("the order of samplers is fixed; leave it out"),
        "repeat_penalty": Refused("use repetition_penalty", (1.0,)),
        "repeat_last_n": Refused("penalties see all tokens; leave it out", (64, 0, -1)),
        "watermarking": Refused("leave it out"),
        "repetition_detection": Refused("use repetition_penalty and max_tokens"),
        "lora": Refused(_ONE_MODEL),
        "vllm_xargs": Refused("no request can bring extensions; leave it out"),
        "speculative.n_max": Refused('use speculation={"num_speculative_tokens": ...}'),
        **dict.fromkeys(("speculative.n_min", "speculative.p_min"), Refused("use speculation")),
        # end conditions
        "n_predict": Refused("use max_tokens", (-1,)),
        "n_cmpl": Refused("use n", (1,)),
        **dict.fromkeys(("t_max_predict_ms", "reasoning_control"), Refused("use max_tokens")),
        "thinking_token_budget": Refused("use max_tokens", (-1,)),
        # prompts
        "chat_template": Refused("templates come only from the model's folder; leave it out", of_prompt=True),
        **dict.fromkeys(("encoder_prompt", "decoder_prompt"), Refused(_PAIR, of_prompt=True)),
        "prompt_embeds": Refused("send text or token ids", of_prompt=True),
        **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), Refused(_TEXT_ONLY, of_prompt=True)),
        "add_generation_prompt": Refused(_CHAT, (True,)),
        "content": Refused("use prompt", of_prompt=True),
        "add_special": Refused("use add_special_tokens", of_prompt=True),
        "parse_special": Refused("special tokens in a text are always read as such", (True,), of_prompt=True),
        **dict.fromkeys(
            ("n_keep", "n_discard"), Refused("a prompt that is too long is refused; use truncate_prompt_tokens")
        ),
        "truncation": Refused("shorten the input", ("disabled",)),
        **dict.fromkeys(
            ("input_prefix", "input_suffix", "input_extra"),
            Refused("use /infill, or suffix on /v1/completions"),
        ),
        **dict.fromkeys(("previous_input_messages", "previous_response"), Refused(_STORED)),
        "conversation": Refused(f"conversations have no id; {_STORED}"),
        # content of the answer
        "audio": Refused(_TEXT_ONLY),
        "detokenize": Refused("answers are text; set return_token_ids for their tokens", (True,)),
        **dict.fromkeys(
            ("enable_response_messages", "response_fields", "return_progress", "routed_experts_prompt_start"),
            Refused("leave it out"),
        ),
        "functions": Refused("use tools"),
        "function_call": Refused("use tool_choice"),
        "tool_choice": Refused(f"{_CHAT} for tools", ("auto", "none")),
        "include": Refused("use logprobs; include is a field of /v1/responses"),
        "include_reasoning": Refused("ignore reasoning_content instead", (True,)),
        "reasoning": Refused("use reasoning_effort on /v1/chat/completions; reasoning is a field of /v1/responses"),
        "reasoning_format": Refused("reasoning is always in reasoning_content", ("auto", "deepseek")),
        **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), Refused(_ONE_MODEL)),
        **dict.fromkeys(("logprob_token_ids", "n_probs"), Refused("use logprobs")),
        "post_sampling_probs": Refused("log-probabilities are the model's own; leave it out"),
        "return_prompt_text": Refused("use /tokenize and /detokenize"),
        **dict.fromkeys(("return_tokens", "return_tokens_as_token_ids"), Refused("set return_token_ids")),
        "spaces_between_special_tokens": Refused("the tokenizer decides on spaces; leave it out", (True,)),
        "timings_per_token": Refused("see --per-request-spec-decode-metrics, or /metrics"),
        "verbosity": Refused("say it in the prompt", ("medium",)),
        "web_search_options": Refused("this server searches nothing; leave it out"),
        "with_pieces": Refused("set return_token_strs", of_prompt=True),
    }
)

# Fields that change nothing in the answer, and why.
ACCEPTED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("user", "metadata", "store", "service_tier", "safety_identifier", "session_id", "request_id"),
            "labels of a request: of these only /v1/responses reads store and metadata",
        ),
        **dict.fromkeys(
            ("prompt_cache_key", "prompt_cache_retention", "cache_prompt", "id_slot", "n_cache_reuse"),
            "the prefix cache decides by itself, and changes no token",
        ),
        "t_max_prompt_ms": "llama.cpp's editors send it, and llama.cpp does not read it either",
        **dict.fromkeys(
            ("stream_interval", "sse_ping_interval"), "a stream has a chunk for each token; its text is the same"
        ),
        **dict.fromkeys(("return_token_offsets", "return_mm_kwargs"), "of vLLM's render routes, which are not here"),
        **dict.fromkeys(
            ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
            "nothing without dry_multiplier, which is refused",
        ),
        **dict.fromkeys(("mirostat_tau", "mirostat_eta"), "nothing without mirostat, which is refused"),
        "dynatemp_exponent": "nothing without dynatemp_range, which is refused",
        "xtc_threshold": "nothing without xtc_probability, which is refused",
        "guided_decoding_backend": "nothing without the other guided fields, which are refused",
        "guided_whitespace_pattern": "nothing without the other guided fields, which are refused",
        "parallel_tool_calls": "nothing where there are no tools",
    }
)
