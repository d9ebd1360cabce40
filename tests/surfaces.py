"""The server's surfaces, one entry each: how a request is written for it, and how its answers are read.

A new surface is a new entry of SURFACES. `Wanted` is a request before a surface has written it, `Read` an answer in the
form that all surfaces have in common.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
from pydantic_core import from_json

from speculant import LLM, RequestOutput, SamplingParams
from tests.models import BEGIN, Shape
from tests.tagged import write_tagged

Body = dict[str, Any]
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
IDS = {tag: BEGIN + 1 + place for place, tag in enumerate((*TAGS, *MARKS))}  # of `write_model`
TEMPLATE = """{%- if tools %}{{ 'Call by <tool_call> and </tool_call>: ' + tools | tojson }}{% endif -%}
{%- for message in messages %}{{ message.role + ': ' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}
{{- '\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% if enable_thinking %}{{ '<think>' }}{% endif %}{% endif -%}
{# </think> #}"""
TEXTS = (
    *(
        "How are you?",
        "def f(x):\n    return x\n",
        "naïve café ☕",
        "日本語のテキスト",
        "🇳🇴🎉👩‍👩‍👧",
        "tab\tand\r\nline",
    ),
    *(
        "\u2028 and \u200d",
        '"quotes" \\ and {braces}',
        "a <think> b </think>",
        "<tool_call>",
        "  ",
        "\x00\x7f",
        "ab " * 40,
    ),
)
STOPS = ("e", "ab", "\n", "é", " ", "<tool", "zq")
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 2]}, "name": {"type": "string", "maxLength": 6}},
    "required": ["size", "name"],
    "additionalProperties": False,
}
NAMES = ("cut", "sew")


@dataclass(frozen=True)
class Wanted:
    """A random request. A conversation has messages in OpenAI's shape; a completion has prompts in their place.

    effort: of reasoning, see the template. form: a schema of the answer. choice: as OpenAI's, or a function's name.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    prompts: Sequence[str] = ()
    suffix: str | None = None
    tools: Sequence[str] = ()
    choice: str | None = None
    several: bool | None = None
    effort: str | None = None
    form: bool = False
    n: int = 1
    seed: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    stop: Sequence[str] = ()
    bias: Mapping[str, float] = field(default_factory=dict)
    logprobs: int | None = None
    echo: bool = False
    usage: bool = False
    continuous: bool = False

    @property
    def params(self) -> SamplingParams:
        """The settings of the same request to `LLM`."""
        form = {"json": SCHEMA, "disable_any_whitespace": True} if self.form else None
        same = ("n", "seed", "temperature", "top_p", "top_k", "max_tokens")
        given = {name: getattr(self, name) for name in same}
        bias = {int(token): value for token, value in self.bias.items()} or None
        ends = None if self.suffix is None else [IDS[mark] for mark in MARKS]
        more = {"stop": list(self.stop) or None, "stop_token_ids": ends, "logit_bias": bias, "structured_outputs": form}
        return SamplingParams(**given, **more)

    @property
    def forces(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice not in (None, "auto", "none")

    @property
    def is_told_by_llm(self) -> bool:
        """Whether `LLM` can be asked the same: the form of calls is the server's."""
        return not self.forces and not (self.form and self.tools and self.choice != "none")

    @property
    def functions(self) -> list[Body]:
        """The tools in OpenAI's shape."""
        return [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in self.tools]

    @property
    def variables(self) -> Body:
        """What the template gets besides messages and tools."""
        if self.effort is None:
            return {}
        return {"reasoning_effort": self.effort, "enable_thinking": self.effort != "none"}

    def output(self, llm: LLM) -> list[RequestOutput]:
        """Return what `LLM` answers; a token if it can't be asked the same."""
        params = self.params if self.is_told_by_llm else replace(self.params, max_tokens=1)
        if not self.messages:
            return llm.generate([self._with_hole(llm, prompt) for prompt in self.prompts], params, use_tqdm=False)
        tools = None if self.choice == "none" else self.functions or None
        return llm.chat(self.messages, params, use_tqdm=False, tools=tools, chat_template_kwargs=self.variables)

    def _with_hole(self, llm: LLM, prompt: str) -> Any:
        if self.suffix is None:
            return prompt
        before, after = (llm.tokenizer.encode(text, add_special_tokens=False) for text in (prompt, self.suffix))
        return {"prompt_token_ids": [IDS[MARKS[0]], *before, IDS[MARKS[1]], *after, IDS[MARKS[2]]]}


@dataclass(frozen=True)
class Choice:
    """One answer. calls: names and arguments, as values. cut: a limit ended it.

    tokens, more: what only some surfaces tell.
    """

    text: str
    reasoning: str = ""
    calls: Sequence[tuple[str, Any]] = ()
    cut: bool = False
    tokens: list[int] | None = None
    more: Any = None


@dataclass(frozen=True)
class Read:
    """An answer. usage: tokens of the prompts and of the answers; None = it has none."""

    choices: Sequence[Choice]
    usage: tuple[int, int] | None

    @property
    def shared(self) -> list[Choice]:
        """The answers, without what only some surfaces tell, such as arguments that are cut."""
        return [
            replace(choice, tokens=None, more=None, calls=choice.calls[: -1 if choice.cut else None])
            for choice in self.choices
        ]


def usage_of(value: Mapping[str, Any] | None, prompt: str = "prompt_tokens", answer: str = "completion_tokens") -> Any:
    """Return the numbers of a usage, which must agree with each other."""
    if value is None:
        return None
    assert value.get("total_tokens", value[prompt] + value[answer]) == value[prompt] + value[answer]
    return value[prompt], value[answer]


def value_of(arguments: str) -> Any:
    """Return the arguments of a call; a text if they are cut."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def settings_of(wanted: Wanted, **names: str) -> Body:
    """Return the settings of a request that differ from the defaults. names: those with another name."""
    usual = Wanted()
    given = {
        names.get(name, name): value
        for name in ("n", "seed", "top_p", "top_k", "stop", "max_tokens")
        if (value := getattr(wanted, name)) != getattr(usual, name) or name == "max_tokens"
    }
    return {**given, "temperature": wanted.temperature, **({"logit_bias": dict(wanted.bias)} if wanted.bias else {})}


def options_of(wanted: Wanted) -> Body:
    """Return the options of a stream, which `send` leaves out of a request for a whole answer."""
    if not wanted.usage:
        return {}
    return {
        "stream_options": {"include_usage": True, **({"continuous_usage_stats": True} if wanted.continuous else {})}
    }


def write_chat(wanted: Wanted) -> Body:
    body = {"messages": list(wanted.messages), **settings_of(wanted), **options_of(wanted), "return_token_ids": True}
    if wanted.tools:
        body["tools"] = wanted.functions
    if wanted.choice is not None:
        named = wanted.choice in wanted.tools
        body["tool_choice"] = {"type": "function", "function": {"name": wanted.choice}} if named else wanted.choice
    if wanted.form:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}
    if wanted.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": wanted.logprobs}
    given = {"parallel_tool_calls": wanted.several, "reasoning_effort": wanted.effort}
    return body | {name: value for name, value in given.items() if value is not None}


def _entries(logprobs: Mapping[str, Any] | None) -> list[Any]:
    return [] if logprobs is None else logprobs["content"]


def read_chat(document: Mapping[str, Any]) -> Read:
    choices = []
    for choice in document["choices"]:
        message, reason = choice["message"], choice["finish_reason"]
        functions = [each["function"] for each in message.get("tool_calls") or ()]
        calls = [(each["name"], value_of(each["arguments"])) for each in functions]
        text, reasoning = message["content"] or "", message.get("reasoning_content", "")
        more = choice["stop_reason"], _entries(choice["logprobs"]), reason
        choices.append(Choice(text, reasoning, calls, reason == "length", choice["token_ids"], more))
    return Read(choices, usage_of(document.get("usage")))


def join_chat(chunks: Sequence[Mapping[str, Any]]) -> Read:
    """Join chunks to a document."""
    made: dict[int, Body] = {}
    for shown in (choice for chunk in chunks for choice in chunk["choices"]):
        choice = made.setdefault(
            shown["index"], {"content": "", "reasoning_content": "", "tool_calls": [], "token_ids": []}
        )
        assert "finish_reason" not in choice, "something follows the reason of the end"
        for name in ("content", "reasoning_content"):
            choice[name] += shown["delta"].get(name) or ""
        for call in shown["delta"].get("tool_calls", ()):
            if call["index"] == len(choice["tool_calls"]):
                choice["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
            choice["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        choice["token_ids"] += shown.get("token_ids", ())
        choice.setdefault("logprobs", []).extend(_entries(shown["logprobs"]))
        if shown["finish_reason"] is not None:
            choice |= {name: shown[name] for name in ("finish_reason", "stop_reason")}
    rest = {name: chunks[0][name] for name in ("id", "object", "created", "model")}
    assert all(chunk[name] == value for chunk in chunks for name, value in rest.items())
    shown = [
        {**made[index], "message": made[index], "logprobs": {"content": made[index]["logprobs"]}}
        for index in sorted(made)
    ]
    return read_chat({"choices": shown, "usage": chunks[-1].get("usage")})


def write_completion(wanted: Wanted) -> Body:
    prompts = list(wanted.prompts)
    body = {"prompt": prompts[0] if len(prompts) == 1 else prompts, **settings_of(wanted), "return_token_ids": True}
    given = {"logprobs": wanted.logprobs, "echo": wanted.echo or None, "suffix": wanted.suffix}
    if wanted.form:
        given["structured_outputs"] = {"json": SCHEMA, "disable_any_whitespace": True}
    return body | options_of(wanted) | {name: value for name, value in given.items() if value is not None}


_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def read_completion(document: Mapping[str, Any]) -> Read:
    choices = []
    for choice in document["choices"]:
        logprobs = [(choice["logprobs"] or {}).get(name) or [] for name in _LISTS]
        more, cut = (choice["stop_reason"], logprobs), choice["finish_reason"] == "length"
        choices.append(Choice(choice["text"], cut=cut, tokens=choice["token_ids"], more=more))
    return Read(choices, usage_of(document.get("usage")))


def join_completion(chunks: Sequence[Mapping[str, Any]]) -> Read:
    """Join chunks to a document."""
    made: dict[int, Body] = {}
    for shown in (choice for chunk in chunks for choice in chunk["choices"]):
        empty = {"text": "", "logprobs": {name: [] for name in _LISTS}, "token_ids": []}
        choice = made.setdefault(shown["index"], empty)
        assert "finish_reason" not in choice, "something follows the reason of the end"
        choice["text"] += shown["text"]
        choice["token_ids"] += shown.get("token_ids", ())
        for name in _LISTS:
            choice["logprobs"][name] += (shown["logprobs"] or {}).get(name) or []
        if shown["finish_reason"] is not None:
            choice |= {name: shown[name] for name in ("finish_reason", "stop_reason")}
    return read_completion({"choices": [made[index] for index in sorted(made)], "usage": chunks[-1].get("usage")})


def write_infill(wanted: Wanted) -> Body:
    texts = {"input_prefix": wanted.prompts[0], "input_suffix": wanted.suffix or ""}
    form = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}} if wanted.form else {}
    return {**texts, **settings_of(wanted, max_tokens="n_predict"), **form}


def read_infill(document: Mapping[str, Any]) -> Read:
    more = [document[name] for name in ("stop_type", "stopping_word", "has_new_line", "truncated")]
    choice = Choice(document["content"], cut=document["stop_type"] == "limit", more=more)
    assert document["stop"]
    return Read([choice], (document["tokens_evaluated"], document["tokens_predicted"]))


def join_infill(events: Sequence[Mapping[str, Any]]) -> Read:
    """Join the texts; the last event has everything else."""
    *before, last = events
    assert not any(event["stop"] for event in before)
    return read_infill({**last, "content": "".join(event["content"] for event in events)})


LOGPROBS = "message.output_text.logprobs"


def write_response(wanted: Wanted) -> Body:
    items: list[Body] = []
    for message in wanted.messages:
        if message["role"] == "tool":
            items.append(
                {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            )
            continue
        if message["content"] or not message.get("tool_calls"):
            items.append({"role": message["role"], "content": message["content"] or ""})
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        items += [{"type": "function_call", "call_id": name, **function} for name, function in calls]
    body = {"input": items, "store": False, **settings_of(wanted, max_tokens="max_output_tokens")}
    if wanted.tools:
        body["tools"] = [{"type": "function", "name": name, "parameters": SCHEMA} for name in wanted.tools]
    if wanted.choice is not None:
        named = wanted.choice in wanted.tools
        body["tool_choice"] = {"type": "function", "name": wanted.choice} if named else wanted.choice
    if wanted.form:
        body["text"] = {"format": {"type": "json_schema", "name": "f", "schema": SCHEMA}}
    if wanted.logprobs is not None:
        body |= {"include": [LOGPROBS], "top_logprobs": wanted.logprobs}
    if wanted.effort is not None:
        body["reasoning"] = {"effort": wanted.effort}
    return body | ({} if wanted.several is None else {"parallel_tool_calls": wanted.several})


def read_response(document: Mapping[str, Any]) -> Read:
    text, reasoning, calls, logprobs = "", "", [], []
    for item in document["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], value_of(item["arguments"])))
        elif item["type"] == "reasoning":
            reasoning += "".join(part["text"] for part in item["content"])
        else:
            text += "".join(part["text"] for part in item["content"])
            logprobs += [each for part in item["content"] for each in part["logprobs"]]
    kinds = [(item["type"], item["status"]) for item in document["output"]]
    cut = document["incomplete_details"] is not None and document["incomplete_details"].get("reason") is not None
    usage = usage_of(document["usage"], "input_tokens", "output_tokens")
    details = document["usage"]["output_tokens_details"]
    return Read([Choice(text, reasoning, calls, cut, more=(kinds, logprobs, document["status"], details))], usage)


def join_response(events: Sequence[Mapping[str, Any]]) -> Read:
    """Join the pieces of each item; the last event has the whole response, which must be the same."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: list[Body] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append({**event["item"], "text": "", "logprobs": []})
        elif kind.endswith(".delta"):
            assert event["output_index"] == len(items) - 1
            items[-1]["text"] += event["delta"]
            items[-1]["logprobs"] += event.get("logprobs", ())
        elif kind == "response.output_text.done":
            items[-1]["logprobs"] = event["logprobs"]  # the last of them come with no text
        elif kind == "response.output_item.done":
            items[-1]["status"] = event["item"]["status"]
    for item in items:
        if item["type"] == "function_call":
            item["arguments"] = item["text"]
        else:
            item["content"] = [{"text": item["text"], "logprobs": item["logprobs"]}]
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    joined, whole = read_response({**last, "output": items}), read_response(last)
    assert joined == whole
    return whole


def write_message(wanted: Wanted) -> Body:
    turns: list[Body] = []
    for message in wanted.messages:
        role = "user" if message["role"] == "tool" else message["role"]
        block = {"type": "text", "text": message["content"]}
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        if not turns or turns[-1]["role"] != role:
            turns.append({"role": role, "content": []})
        functions = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        calls = [
            {"type": "tool_use", "id": name, "name": each["name"], "input": json.loads(each["arguments"])}
            for name, each in functions
        ]
        turns[-1]["content"] += [block, *calls]
    body = {**settings_of(wanted, stop="stop_sequences"), "messages": turns}
    if turns[0]["role"] == "system":
        body |= {"system": turns[0]["content"], "messages": turns[1:]}
    if wanted.tools:
        body["tools"] = [{"name": name, "input_schema": SCHEMA} for name in wanted.tools]
    if wanted.choice is not None or wanted.several is not None:
        named = wanted.choice in wanted.tools
        choice = {"type": "tool", "name": wanted.choice} if named else {"type": _KINDS[wanted.choice]}
        body["tool_choice"] = choice | ({"disable_parallel_tool_use": True} if wanted.several is False else {})
    if wanted.effort is not None:
        thinks = {"type": "enabled", "budget_tokens": 1024} if wanted.effort != "none" else {"type": "disabled"}
        body["thinking"] = thinks
    return body | ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}} if wanted.form else {})


_KINDS = {None: "auto", "auto": "auto", "required": "any", "none": "none"}


def read_message(document: Mapping[str, Any]) -> Read:
    blocks, usage, reason = document["content"], document["usage"], document["stop_reason"]
    texts = {kind: "".join(block.get(kind, "") for block in blocks) for kind in ("text", "thinking")}
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    more = [block["type"] for block in blocks], reason, document["stop_sequence"], usage["output_tokens_details"]
    cut = reason in ("max_tokens", "model_context_window_exceeded")
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    return Read([Choice(texts["text"], texts["thinking"], calls, cut, more=more)], (prompt, usage["output_tokens"]))


def join_message(events: Sequence[Mapping[str, Any]]) -> Read:
    """Join the pieces of each block."""
    events = [event for event in events if event["type"] != "ping"]
    blocks, is_open = list[Body](), False
    for event in events[1:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open
            blocks.append({**event["content_block"], "json": ""})
        assert event["index"] == len(blocks) - 1
        is_open = kind != "content_block_stop"
        for name, piece in event.get("delta", {}).items():
            name = {"partial_json": "json"}.get(name, name)
            blocks[-1][name] = blocks[-1].get(name, "") + piece if name != "type" else blocks[-1]["type"]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = from_json(block["json"] or "{}", allow_partial=True)
    first, change, last = events[0], *events[-2:]
    assert (first["type"], change["type"], last["type"], is_open) == (
        "message_start",
        "message_delta",
        "message_stop",
        False,
    )
    return read_message({**first["message"], "content": blocks, **change["delta"], "usage": change["usage"]})


def is_anthropic_error(value: Any) -> bool:
    """Whether a document is an error in Anthropic's shape."""
    error = value.get("error")
    return (
        value.get("type") == "error"
        and {*error} <= {"type", "message", "details"}
        and isinstance(error["message"], str)
    )


def is_openai_error(value: Any) -> bool:
    """Whether a document is an error in OpenAI's shape."""
    error = value.get("error")
    if not isinstance(error, dict) or {*error} != {"message", "type", "param", "code"}:
        return False
    optional = all(error[name] is None or isinstance(error[name], str) for name in ("param", "code"))
    return optional and isinstance(error["message"], str) and isinstance(error["type"], str)


@dataclass(frozen=True)
class Surface:
    """A route that generates. lacks: fields of `Wanted` that it does not have.

    plain: a small body, and the field of its prompt. done: its streams end with [DONE].
    """

    path: str
    write: Callable[[Wanted], Body]
    read: Callable[[Mapping[str, Any]], Read]
    join: Callable[[Sequence[Mapping[str, Any]]], Read]
    lacks: frozenset[str] = frozenset()
    chats: bool = True
    done: bool = True
    is_error: Callable[[Any], bool] = is_openai_error

    def whole(self, http: httpx.Client, body: Body) -> Read:
        """Send a request, and read the answer in one piece."""
        body = {name: value for name, value in body.items() if name != "stream_options"}
        response = http.post(self.path, json=body)
        assert response.status_code == 200, (body, response.text)
        return self.read(response.json())

    def streamed(self, http: httpx.Client, body: Body) -> Read:
        """Send a request, and join the events of the answer."""
        response = http.post(self.path, json={**body, "stream": True})
        assert response.status_code == 200, (body, response.text)
        return self.join(self.events(response.text))

    def events(self, text: str) -> list[Any]:
        """Return the events of a stream that has ended as it has to."""
        lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        if self.done:
            assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


_OF_COMPLETIONS = frozenset({"echo", "suffix"})
_OF_CHATS = frozenset({"tools", "choice", "several", "effort"})
_OF_SEVERAL = frozenset({"n", "usage", "continuous"})
SURFACES = (
    Surface("/v1/chat/completions", write_chat, read_chat, join_chat, _OF_COMPLETIONS),
    Surface("/v1/completions", write_completion, read_completion, join_completion, _OF_CHATS, chats=False),
    Surface(
        *("/v1/responses", write_response, read_response, join_response),
        _OF_COMPLETIONS | _OF_SEVERAL,
        done=False,
    ),
    Surface(
        *("/v1/messages", write_message, read_message, join_message),
        _OF_COMPLETIONS | _OF_SEVERAL | {"logprobs"},
        done=False,
        is_error=is_anthropic_error,
    ),
    Surface(
        *("/infill", write_infill, read_infill, join_infill),
        _OF_CHATS | _OF_SEVERAL | {"echo", "logprobs"},
        *(False, False),
    ),
)
CHAT = SURFACES[0]


def write_model(folder: Path, noise: float = 0.0, longest: int = 2048) -> str:
    """Write a random checkpoint that knows tags, calls and marks for filling in the middle."""
    shape = Shape(noise=noise, max_positions=longest, vocab_size=272)
    return write_tagged(folder, TEMPLATE, (*TAGS, *MARKS), shape)


def draw(chance: Random, surface: Surface) -> Wanted:
    """Return a random request that a surface can express. A bias makes tags likely."""
    tools = chance.sample(NAMES, chance.choice((0, 0, 1, 2)))
    choice = chance.choice((None, "auto", "none", "required", *tools)) if tools else None
    forces = choice not in (None, "auto", "none")
    form = not forces and chance.random() < 0.2
    drawn: dict[str, Any] = {
        "messages": _conversation(chance) if surface.chats else (),
        "prompts": ()
        if surface.chats
        else chance.choices(TEXTS, k=1 if "n" in surface.lacks else chance.choice((1, 1, 3))),
        "suffix": chance.choice(TEXTS) if chance.random() < 0.3 or "n" in surface.lacks else None,
        "tools": tools if surface.chats else (),
        "choice": choice if surface.chats else None,
        "several": chance.choice((None, True, False)) if tools and surface.chats else None,
        "effort": chance.choice((None, None, "none", "high")),
        "form": form,
        "n": chance.choice((1, 1, 1, 2, 3)),
        "temperature": chance.choice((0.0, 0.0, 0.3, 1.0, 1.7)),
        "seed": chance.randrange(2**31),
        "top_p": chance.choice((1.0, 1.0, 0.9, 0.5)),
        "top_k": chance.choice((0, 0, 1, 5, 40)),
        "max_tokens": chance.choice((7, 60, 160) if forces or form else (1, 2, 7, 24, 60)),
        "stop": () if forces or form else chance.sample(STOPS, chance.choice((0, 0, 1, 3))),
        "bias": {str(IDS[tag]): 5.0 for tag in chance.sample(TAGS, chance.choice((0, 0, 1, 3)))},
        "logprobs": chance.choice((None, None, 0, 3)),
        "echo": chance.random() < 0.2,
        "usage": chance.random() < 0.7,
        "continuous": chance.random() < 0.3,
    }
    wanted = {name: value for name, value in drawn.items() if name not in surface.lacks}
    if wanted.get("suffix") is not None:
        wanted["echo"] = False  # the two can't be combined
    if wanted.get("echo"):
        wanted["logprobs"] = None  # which echo does not stream
    return Wanted(**wanted)


def _conversation(chance: Random) -> list[Body]:
    messages: list[Body] = [{"role": "system", "content": chance.choice(TEXTS)}] if chance.random() < 0.4 else []
    for turn in range(chance.choice((0, 0, 1, 2))):
        messages.append({"role": "user", "content": chance.choice(TEXTS)})
        messages.append({"role": "assistant", "content": chance.choice(TEXTS)})
        if chance.random() < 0.5:
            call = {"name": "cut", "arguments": json.dumps({"size": turn, "name": chance.choice(TEXTS)})}
            messages[-1]["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": call}]
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": chance.choice(TEXTS)})
    return [*messages, {"role": "user", "content": chance.choice(TEXTS)}]


assert {each.name for each in fields(Wanted)} >= set().union(*(surface.lacks for surface in SURFACES))


def _tokenize(chance: Random) -> Body:
    given = {"prompt": chance.choice(TEXTS)} if chance.random() < 0.5 else {"messages": _conversation(chance)}
    return {**given, "return_token_strs": True}


def _count_tokens(chance: Random) -> Body:
    body = draw_body(chance, "/v1/messages")
    return {name: body[name] for name in body if name in ("messages", "system", "tools", "tool_choice", "thinking")}


OTHERS: Mapping[str, Callable[[Random], Body]] = {  # routes that read bodies and generate nothing
    "/v1/messages/count_tokens": _count_tokens,
    "/tokenize": _tokenize,
    "/detokenize": lambda chance: {"tokens": chance.choices(range(BEGIN), k=9), "skip_special_tokens": True},
}
IS_ERROR = dict.fromkeys(OTHERS, is_openai_error) | {surface.path: surface.is_error for surface in SURFACES}
IS_ERROR["/v1/messages/count_tokens"] = is_anthropic_error


def draw_body(chance: Random, path: str) -> Body:
    """Return a valid body of a route, in random order and perhaps of a stream."""
    surface = next((each for each in SURFACES if each.path == path), None)
    if surface is None:
        return OTHERS[path](chance)
    body = surface.write(draw(chance, surface))
    if chance.random() < 0.5:
        body["stream"] = True
    elif chance.random() < 0.9:
        body.pop("stream_options", None)
    return dict(chance.sample([*body.items()], len(body)))
