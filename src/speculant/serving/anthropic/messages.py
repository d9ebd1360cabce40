"""Messages: a request as a chat, with its blocks as the chat's messages, and its answer in Anthropic's shape.

Anthropic's API has no parameter names in its errors, so each message of an error names the field itself.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from speculant.engine import StreamPiece
from speculant.serving.openai.answers import Answer, Call, Chunk, new_id
from speculant.serving.openai.messages import MessageReader
from speculant.serving.openai.protocol import (
    SPECULATION,
    Body,
    FunctionCall,
    GeneratingBody,
    Listed,
    Message,
    Object,
    Parts,
    TokenizeBody,
    ToolCall,
    TranslatedChat,
    is_finite,
)
from speculant.serving.openai.service import Job, Service
from speculant.serving.openai.settings import Prompt
from speculant.serving.options import MOST_MESSAGES
from speculant.serving.tools.base import Delta, ReasoningDelta, ToolDelta
from speculant.serving.wire import ApiError, encode, json_response, refusal, while_connected


class MessageTurn(BaseModel):
    """What one side says: a text, or blocks."""

    model_config = ConfigDict(strict=True)

    role: Literal["user", "assistant", "system"]
    content: str | Parts


Turns = Annotated[list[MessageTurn], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]


class CountBody(Body):
    """A body of /v1/messages/count_tokens: the fields that make a prompt."""

    aliases = MappingProxyType({"prompt": ("messages",)})

    messages: Turns
    system: str | Parts | None = None
    tools: Listed[Object] | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    output_config: Object | None = None
    chat_template_kwargs: Object | None = None


class MessagesBody(CountBody, GeneratingBody):
    """A body of /v1/messages: Anthropic's fields, and this package's own."""

    aliases = MappingProxyType(
        {
            "stop": ("stop_sequences",),
            "structured_outputs": ("structured_outputs", "output_config", "tool_choice"),
            "prompt": ("messages",),
            **SPECULATION,
        }
    )
    instead = MappingProxyType(
        {
            "instructions": "use system",
            "input": "use messages",
            "max_completion_tokens": "use max_tokens",
            "max_output_tokens": "use max_tokens",
            "reasoning_effort": 'use output_config={"effort": ...}',
            "continue_final_message": "let an assistant's message come last",
        }
    )

    max_tokens: int
    stop_sequences: Listed[str] | None = None
    metadata: Object | None = None
    service_tier: str | None = None
    cache_control: Object | None = None
    context_management: Object | None = None
    compaction: Object | None = None
    thread: Object | None = None
    container: str | Object | None = None
    mcp_servers: Parts | None = None
    output_format: Object | None = None
    inference_geo: str | None = None
    speed: str | None = None


MESSAGE_BODIES: Mapping[str, type[Body]] = MappingProxyType(
    {"/v1/messages": MessagesBody, "/v1/messages/count_tokens": CountBody}
)

Block = Mapping[str, Any]
_BILLING = "x-anthropic-billing-header:"
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}  # those of templates
_THINKS = {"enabled": True, "adaptive": True, "disabled": False}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NO_THREADS = "thread_unsupported_request"  # the code after which Anthropic's clients go on without a thread
_OMITTED = "omitted"  # a display of thinking
_SEALED = "speculant:"  # begins the signature of thinking whose text is in the signature alone


def chat_of(body: MessagesBody) -> TranslatedChat:
    """Return a request as a chat. Raises ApiError (400) for blocks, tools and fields that would have no effect."""
    _check(body)
    own = {
        **conversation(body),
        "stop": body.stop_sequences or None,
        "response_format": _form(body),
        "parallel_tool_calls": not _is_alone(body),
    }
    return TranslatedChat.model_construct(**{name: getattr(body, name) for name in GeneratingBody.model_fields} | own)


def conversation(body: CountBody) -> dict[str, Any]:
    """Return the fields of a chat that make a request's prompt. Raises ApiError (400)."""
    messages = messages_of(body.system, body.messages)
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant" and last.tool_calls:
        raise _wrong("the last message has a tool_use block: send its tool_result next")
    return {
        "messages": messages,
        "tools": None if body.tools is None else list(map(_chat_tool, body.tools)),
        "tool_choice": _chat_choice(body.tool_choice),
        "continue_final_message": last is not None and last.role == "assistant",
        "chat_template_kwargs": {**_variables(body), **(body.chat_template_kwargs or {})},
    }


def _check(body: MessagesBody) -> None:
    """Raise ApiError (400) for fields that would have no effect."""
    given = (body.context_management or {}).get("edits") or []
    edits = given if isinstance(given, list) else [given]
    refused = {
        "n": (body.n not in (None, 1), "a request has one answer; leave it out"),
        "stop": (getattr(body, "stop", None) is not None, "use stop_sequences"),
        "response_format": (body.response_format is not None, 'use output_config={"format": ...}'),
        "stream_options": (body.stream_options is not None, "a stream always has its usage; leave it out"),
        "prompt_logprobs": (body.prompt_logprobs is not None, "use /v1/chat/completions"),
        "container": (body.container is not None, "this server runs no code; leave it out"),
        "mcp_servers": (bool(body.mcp_servers), "this server runs no tools; let the client call them, as tools"),
        "compaction": (body.compaction is not None, "ask for a summary by a message"),
        "thread": (body.thread is not None, "conversations are not stored; send the whole conversation"),
        "context_management": (not all(map(_keeps_all, edits)), "a conversation is never cut; shorten it yourself"),
    }
    for name, (wrong, instead) in refused.items():
        if wrong:
            code = _NO_THREADS if name == "thread" else "unsupported_parameter"
            raise refusal(f"{name} is not supported here: {instead}.", name, code)


def _keeps_all(edit: object) -> bool:
    """Whether an edit of a conversation leaves it as it is; Claude Code sends such an edit."""
    return (
        isinstance(edit, Mapping) and str(edit.get("type")).startswith("clear_thinking") and edit.get("keep") == "all"
    )


def _form(body: MessagesBody) -> dict[str, Any] | None:
    """Return the form of the answer's text as a chat has it."""
    given = (body.output_config or {}).get("format") or body.output_format
    if given is None:
        return None
    if (
        not isinstance(given, Mapping)
        or given.get("type") != "json_schema"
        or not isinstance(given.get("schema"), Mapping)
    ):
        raise refusal('output_config.format is not {"type": "json_schema", "schema": {...}}.', "output_config")
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}


def _variables(body: CountBody) -> dict[str, Any]:
    """Return the variables by which templates switch thinking, under each of their names."""
    thinking, config = body.thinking or {}, body.output_config or {}
    if unknown := sorted(config.keys() - {"effort", "format"}):
        raise refusal(f"output_config.{unknown[0][:80]} is not supported: use effort and format.", "output_config")
    found: dict[str, Any] = {}
    if config.get("effort") is not None:
        if (effort := _name(config, "effort")) not in _EFFORTS:
            raise refusal(f"output_config.effort is none of {', '.join(_EFFORTS)}.", "output_config")
        found["reasoning_effort"] = _EFFORTS[effort]
    if body.thinking is not None:
        if (kind := _name(thinking, "type")) not in _THINKS:
            raise refusal(f"thinking.type is none of {', '.join(_THINKS)}.", "thinking")
        if thinking.get("display") not in (None, "summarized", _OMITTED):
            raise refusal(f'thinking.display is neither "summarized" nor "{_OMITTED}".', "thinking")
        found |= dict.fromkeys(("enable_thinking", "thinking"), _THINKS[kind])
    return found


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    name, kind, schema = tool.get("name"), tool.get("type"), tool.get("input_schema")
    if kind not in (None, "custom"):
        raise refusal(
            f"tools: this server does not know the tool of type {str(kind)[:80]!r}. Describe a tool that your client "
            "runs by name, description and input_schema, without a type.",
            "tools",
            "unsupported_value",
        )
    if not isinstance(name, str) or not isinstance(schema, Mapping):
        raise refusal('tools: give each one a name, and an input_schema such as {"type": "object", ...}.', "tools")
    lost = {
        "defer_loading": (tool.get("defer_loading"), "all tools are in the prompt; leave it out"),
        "input_examples": (tool.get("input_examples"), "write the examples into the description"),
        "allowed_callers": (tool.get("allowed_callers") not in (None, ["direct"]), "only the model calls tools"),
    }
    for field, (wrong, instead) in lost.items():
        if wrong:
            raise refusal(f"tools: {field} of {name[:80]!r} is not supported: {instead}.", "tools", "unsupported_value")
    own = {"name": name, "description": tool.get("description"), "parameters": schema, "strict": tool.get("strict")}
    return {"type": "function", "function": {key: value for key, value in own.items() if value is not None}}


def _chat_choice(choice: Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    kind, name = _name(choice, "type"), _name(choice, "name")
    if kind == "tool" and name:
        return {"type": "function", "function": {"name": name}}
    if kind not in _CHOICES:
        raise refusal(
            'tool_choice is none of {"type": "auto"}, {"type": "any"}, {"type": "none"} and '
            '{"type": "tool", "name": ...}.',
            "tool_choice",
        )
    return _CHOICES[kind]


def _is_alone(body: CountBody) -> bool:
    """Whether an answer has at most one call."""
    return (body.tool_choice or {}).get("disable_parallel_tool_use") is True


def messages_of(system: str | Sequence[Block] | None, turns: Sequence[MessageTurn]) -> list[Message]:
    """Return the messages of a conversation. Blocks of one role that follow each other are one message.

    Raises ApiError (400) for blocks that are not supported, and for a result whose call does not precede it.
    """
    runs: list[tuple[str, list[Block]]] = []
    for role, block in _blocks(system, turns):
        if not runs or role == "tool" or runs[-1][0] != role:
            runs.append((role, []))
        runs[-1][1].append(block)
    calls = set[str]()
    return [_result(blocks[0], calls) if role == "tool" else _message(role, blocks, calls) for role, blocks in runs]


def _blocks(system: str | Sequence[Block] | None, turns: Sequence[MessageTurn]) -> Iterator[tuple[str, Block]]:
    """Yield the blocks of a conversation, each with the role that it has in a chat."""
    yield from (("system", block) for block in _listed(system) if not is_billing(block.get("text")))
    for turn in turns:
        for block in _listed(turn.content):
            kind = block.get("type")
            if kind == "mid_conv_system":
                yield from (("system", each) for each in _listed(block.get("content")))
            else:
                yield "tool" if (kind, turn.role) == ("tool_result", "user") else turn.role, block


def is_billing(text: object) -> bool:
    """Whether a text is Claude Code's label for billing. With it no request would begin as an earlier one did."""
    return isinstance(text, str) and text.startswith(_BILLING)


def _listed(content: object) -> list[Block]:
    """Return a content as blocks; a text is one block."""
    blocks = [] if content is None else [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise _wrong("a content is neither a text nor a list of blocks")
    return blocks


def _message(role: str, blocks: Sequence[Block], calls: set[str]) -> Message:
    """Return one message. calls: the ids of calls so far, to which it adds its own."""
    of_kind: dict[str, list[Any]] = {"text": [], "thinking": [], "tool_use": [], "redacted_thinking": []}
    for block in blocks:
        kind = _name(block, "type")
        if kind not in (of_kind if role == "assistant" else ("text",)):
            raise _unsupported(block, f"a message of the role {role}")
        of_kind[kind].append(_READERS[kind](block))
    calls.update(call.id for call in of_kind["tool_use"])
    content, thought = "\n".join(of_kind["text"]), "\n".join(of_kind["thinking"])
    made = of_kind["tool_use"] or None
    return Message(
        role=role, content=content or (None if made else ""), reasoning_content=thought or None, tool_calls=made
    )


def _result(block: Block, calls: set[str]) -> Message:
    """Return the result of a call. Chats have no mark for errors, so the text says it."""
    call, texts = _text(block, "tool_use_id"), list[str]()
    if call not in calls:
        raise _wrong(f"no tool_use block with the id {call[:80]!r} precedes its tool_result")
    for each in _listed(block.get("content")):
        if each.get("type") != "text":
            raise _unsupported(each, "a tool_result")
        texts.append(_text(each, "text"))
    failed = ["Error:"] if block.get("is_error") is True else []
    return Message(role="tool", tool_call_id=call, content="\n".join([*failed, *texts]))


def _call(block: Block) -> ToolCall:
    given = block.get("input")
    if not isinstance(given, Mapping):
        raise _wrong("a tool_use block has no input that is an object")
    function = FunctionCall(name=_text(block, "name"), arguments=encode(given).decode())
    return ToolCall(id=_text(block, "id"), function=function)


def _thought(block: Block) -> str:
    """Return the text of thinking, which may be in the signature alone; other servers' signatures can't be read."""
    text, signature = _text(block, "thinking"), block.get("signature")
    if not text and isinstance(signature, str) and signature.startswith(_SEALED):
        try:
            return base64.b64decode(signature.removeprefix(_SEALED), validate=True).decode("utf-8")
        except ValueError:
            raise _wrong("a thinking block has a signature that was changed: send it as it came") from None
    return text


_READERS: Mapping[str, Callable[[Block], Any]] = MappingProxyType(
    {
        "text": lambda block: _text(block, "text"),
        "thinking": _thought,
        "tool_use": _call,
        "redacted_thinking": lambda block: None,  # nobody but its own server can read it
    }
)


def _name(given: Mapping[str, Any], key: str) -> str:
    """Return a text that names something; "" for anything else."""
    value = given.get(key)
    return value if isinstance(value, str) else ""


def _text(block: Block, name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"a block of type {_name(block, 'type')[:80]!r} has no {name} that is text")
    return value


def _unsupported(block: Block, where: str) -> ApiError:
    return _wrong(
        f"a block of type {_name(block, 'type')[:80]!r} can't be in {where}: this server reads text, thinking, "
        "tool_use and tool_result. Describe other content in a text block"
    )


def _wrong(problem: str) -> ApiError:
    return refusal(f"messages: {problem}.", "messages")


class MessageRoutes:
    """The handlers of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """Answer in the shape of Anthropic's Messages: thinking, text and calls, as blocks."""
        service = self._service
        body = await service.read(MessagesBody, request)
        model = await service.use(request, body.model)
        chat = await service.chat(model, request, lambda: chat_of(body))
        answer = MessageAnswer(chat.call, body, chat.make_reader)

        async def prompts() -> list[Prompt]:
            return [await service.prompts(request).of_chat(model.engine, chat.body)]

        return await service.answer(model, request, Job(chat.body, prompts, answer, named_events=True))

    async def count_tokens(self, request: Request) -> Response:
        """Return how many tokens the prompt of a message would have."""
        service = self._service
        body = await service.read(CountBody, request)
        engine = (await service.use(request, body.model)).engine
        engine.check_chats()
        made = await service.apart(request, lambda: TokenizeBody.model_construct(**conversation(body)))
        prompt = await while_connected(request.receive, service.prompts(request).of_chat(engine, made))
        return json_response({"input_tokens": prompt.num_tokens})


_DELTAS = MappingProxyType(  # by the type of a block, the type of its deltas and their field
    {
        "text": ("text_delta", "text"),
        "thinking": ("thinking_delta", "thinking"),
        "tool_use": ("input_json_delta", "partial_json"),
    }
)


@dataclass
class _Block:
    """A block of the answer. text: of a call, its arguments so far. id, name: of a call."""

    kind: str
    id: str = ""
    name: str = ""
    text: str = ""

    def delta(self, text: str) -> dict[str, Any]:
        """Return the delta of a piece of its text."""
        kind, field = _DELTAS[self.kind]
        return {"type": kind, field: text}

    def shown(self, hides: bool, signature: str = "") -> dict[str, Any]:
        """Return the block. hides: without the text of thinking."""
        if self.kind == "tool_use":
            return {"type": self.kind, "id": self.id, "name": self.name, "input": _read_input(self.text)}
        value = {"type": self.kind, self.kind: "" if hides and self.kind == "thinking" else self.text}
        return value if self.kind == "text" else {**value, "signature": signature}


def _read_input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, as far as they go if they are cut.

    Arguments that are nested too deep, or that have numbers beyond those of JSON's readers, stay a text.
    """
    try:
        value: dict[str, Any] = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {"unread": arguments}
    return value if is_finite(value) else {"unread": arguments}


class MessageAnswer(Answer):
    """A message of an assistant. Its chunks are events."""

    def __init__(self, call: Call, body: MessagesBody, make_reader: Callable[[Prompt], MessageReader]) -> None:
        super().__init__(call, 1)
        self._id, self._make_reader, self._reader = new_id("msg_"), make_reader, MessageReader()
        self._hides, self._is_alone = (body.thinking or {}).get("display") == _OMITTED, _is_alone(body)
        self._blocks: list[_Block] = []
        self._last: StreamPiece | None = None

    @override
    def begin(self, prompts: Sequence[Prompt]) -> list[Chunk]:
        self._reader = self._make_reader(prompts[0])
        self.readers = [self._reader]
        usage = {**_NO_USAGE, "input_tokens": prompts[0].num_tokens}
        message = {**self._named, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    @override
    def read(self, index: int, piece: StreamPiece) -> list[Chunk]:
        deltas = self._reader.feed(piece.text, piece.token).deltas
        if piece.finish_reason is not None:
            self._last = piece
            deltas = [*deltas, *self._reader.finish().deltas]
        events = [event for delta in deltas for event in self._of(delta)]
        if not (tokens := self.tokens_of(piece)):
            return events
        return [*events[:-1], {**events[-1], **tokens}] if events else [{"type": "ping", **tokens}]

    @override
    def end(self) -> list[Chunk]:
        last = {"type": "message_delta", "delta": self._ending(), "usage": self._usage(), **self.speculation()}
        return [*self._close(), last, {"type": "message_stop"}]

    @override
    def document(self) -> dict[str, Any]:
        content = [block.shown(self._hides, self._signature(block)) for block in self._blocks]
        return {**self._named, "content": content, **self._ending(), "usage": self._usage(), **self.speculation()}

    @property
    def _named(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self.call.model}

    def _of(self, delta: Delta) -> list[Chunk]:
        """Return the events of a delta, which belongs to the newest block or begins one."""
        if isinstance(delta, ToolDelta):
            if self._is_alone and delta.index:
                return []
            begun = [] if delta.name is None else self._open(_Block("tool_use", delta.id or "", delta.name))
            return [*begun, *self._add(delta.arguments)]
        if not delta.text:
            return []
        kind = "thinking" if isinstance(delta, ReasoningDelta) else "text"
        begun = [] if self._blocks and self._blocks[-1].kind == kind else self._open(_Block(kind))
        return [*begun, *self._add(delta.text)]

    def _add(self, text: str) -> list[Chunk]:
        """Add to the newest block."""
        block = self._blocks[-1]
        block.text += text
        if not text or (self._hides and block.kind == "thinking"):
            return []
        return [self._event("delta", delta=block.delta(text))]

    def _open(self, block: _Block) -> list[Chunk]:
        before = self._close()
        self._blocks.append(block)
        return [*before, self._event("start", content_block=block.shown(self._hides))]

    def _close(self) -> list[Chunk]:
        """Return the last events of the newest block, if there is one."""
        if not self._blocks:
            return []
        signature = self._signature(self._blocks[-1])
        signed = [self._event("delta", delta={"type": "signature_delta", "signature": signature})] if signature else []
        return [*signed, self._event("stop")]

    def _event(self, kind: str, **values: Any) -> Chunk:
        """Return an event about the newest block."""
        return {"type": f"content_block_{kind}", "index": len(self._blocks) - 1, **values}

    def _signature(self, block: _Block) -> str:
        """Return the signature of thinking, which clients send back; it has the text if they do not get it."""
        if block.kind != "thinking":
            return ""
        return _SEALED + base64.b64encode(block.text.encode() if self._hides else b"").decode()

    def _ending(self) -> dict[str, Any]:
        """Return why the answer ends."""
        piece, params = self._last, self.call.params
        assert piece is not None, "the answer has not ended"
        sequence = piece.stop_reason if isinstance(piece.stop_reason, str) else None
        if piece.finish_reason == "length":
            is_full = params.max_tokens is not None and self.usage()["completion_tokens"] < params.max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        else:
            called = not self._reader.is_cut and any(block.kind == "tool_use" for block in self._blocks)
            reason = "tool_use" if called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, Any]:
        """Return the usage. As in Anthropic's, `input_tokens` leaves out those that the cache had."""
        used = self.usage(self._reader.reasoning_tokens)
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            **_NO_USAGE,
            "input_tokens": used["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._reader.reasoning_tokens},
        }


_NO_USAGE = MappingProxyType(
    {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
)
