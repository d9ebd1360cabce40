"""Chats: messages in OpenAI's form, the templates that make prompts of them, and the reasoning that answers may have.

Templates are programs from a checkpoint, so they run in a sandbox.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from typing_extensions import override

from speculant.errors import ConfigError, Converts, ModelError, RequestError, SpeculantError, suggest
from speculant.files import parse_json
from speculant.text.sandbox import BoundedEnvironment, Budget

ROLES = ("system", "developer", "user", "assistant", "tool")
_CUSTOM_ROLE = re.compile(r"[A-Za-z][\w.-]{0,63}", re.ASCII)
_NOT_CONTINUED = "let the conversation end with a user's message, without continue_final_message."
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates
_REPAIR = "repair chat_template.jinja (or chat_template in tokenizer_config.json), or send a plain prompt."
_SPACE = " \t\r\n"  # may be next to tags
_THOUGHT = "It is wet."
_REASONED = {
    "role": "assistant",
    "content": "At sea.",
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT),  # templates read different names
}


def read_messages(messages: object, template: str | None = None) -> list[dict[str, Any]]:
    """Return a conversation for a chat template: contents become text, and the arguments of calls objects.

    A message is a mapping with a `role` and a `content`: a text, or a list of parts `{"type": "text", "text": ...}`. An
    assistant's message may have a `refusal` in place of a content, or parts of this type; with `tool_calls` it needs
    neither. template: its source; `developer` becomes `system` unless the template has this role. Other roles than
    ROLES are passed on, see `check_roles`. Raises RequestError with the number of the wrong message.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            f"a conversation is a {type(messages).__name__}", 'give a list of messages such as {"role": "user", ...}.'
        )
    if not messages:
        raise RequestError("the conversation has no messages", 'give at least {"role": "user", "content": "..."}.')
    has_developer = template is not None and _names("developer", template)
    return [_read(message, f"message {number}", has_developer) for number, message in enumerate(messages, start=1)]


def check_roles(conversation: Sequence[Mapping[str, Any]], template: str, text: str) -> None:
    """Raise RequestError if a template leaves out the content of a message whose role it does not know.

    conversation: as `read_messages` returns it. text: the prompt that the template made of it.
    """
    place = 0
    for number, message in enumerate(conversation, start=1):
        role, content = message["role"], message["content"].strip()
        if role in ROLES or _names(role, template):
            continue
        place = text.find(content, place)
        if place < 0:
            problem = f"has the role {role!r}, whose messages the chat template leaves out"
            _refuse(f"message {number}", problem, suggest(role, ROLES))


def with_mark(conversation: Sequence[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """Return a conversation whose last content ends with a mark, for `up_to_mark`; a space shows whether it is trimmed.

    mark: a text that occurs nowhere else. Raises RequestError for a last message that has calls in place of a content.
    """
    *before, last = conversation
    if last.get("tool_calls") and not last["content"]:
        raise RequestError("the last message can't be continued: it has no content", _NOT_CONTINUED)
    return [*before, {**last, "content": f"{last['content']}{mark} "}]


def up_to_mark(text: str, mark: str, content: str) -> str:
    """Return a rendered conversation up to the mark after its last content.

    White space at the end of the content is kept, unless the template trims contents. Raises RequestError if the
    template does not write the content as it is.
    """
    before, _, after = text.rpartition(mark)
    if mark not in text or not before.rstrip().endswith(content.strip()):
        raise RequestError("the last message can't be continued: the chat template changes its content", _NOT_CONTINUED)
    before = before.replace(f"{mark} ", "").replace(mark, "")  # a template may write a content twice
    return before if after.startswith(" ") else before.rstrip()


def _names(role: str, template: str) -> bool:
    """Whether a template compares something with the name of a role."""
    return f"'{role}'" in template or f'"{role}"' in template


def check_variables(given: object) -> Mapping[str, Any]:
    """Return the caller's variables for a template. Raises RequestError for a variable that has its own parameter."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError(f"chat_template_kwargs is {str(given)[:80]}", "map the template's variables to values.")
    if reserved := sorted(_RESERVED & set(given)):
        raise RequestError(f"chat_template_kwargs can't set {reserved[0]}", f"use the parameter {reserved[0]}.")
    return given


def _read(message: object, where: str, has_developer: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        _refuse(where, f"is a {type(message).__name__}", 'write it as {"role": "user", "content": "..."}.')
    role = message.get("role")
    if not isinstance(role, str) or not _CUSTOM_ROLE.fullmatch(role):
        fix = suggest(role[:80], ROLES) if isinstance(role, str) else f"give it one of the roles {', '.join(ROLES)}."
        _refuse(where, f"has the role {str(role)[:80]!r}" if role is not None else "has no role", fix)
    calls, refused = message.get("tool_calls"), message.get("refusal")
    value = {name: each for name, each in message.items() if each is not None and name != "refusal"}
    value["role"] = "system" if role == "developer" and not has_developer else role
    content = message.get("content")
    if not content and isinstance(refused, str) and role == "assistant":
        content = refused
    value["content"] = _text(content, where, bool(calls), ("text", "refusal") if role == "assistant" else ("text",))
    if calls:
        value["tool_calls"] = [_call(call, where) for call in (calls if isinstance(calls, list | tuple) else [None])]
    return value


def _text(content: object, where: str, optional: bool, kinds: Sequence[str]) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list | tuple):
        problem = "has no content" if content is None else f"has a content that is a {type(content).__name__}"
        _refuse(where, problem, "give it a text, or a list of text parts.")
    return "".join(_part(part, where, kinds) for part in content)


def _part(part: object, where: str, kinds: Sequence[str]) -> str:
    """Return the text of a part, which is under the name of the part's type."""
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get(kind) if isinstance(part, Mapping) and kind in kinds else None
    if not isinstance(text, str):
        problem = f"has a part of type {str(kind)[:80]!r} without text"
        _refuse(where, problem, 'use only {"type": "text", "text": "..."}.')
    return text


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        fix = 'write each as {"type": "function", "function": {"name": ..., "arguments": ...}}.'
        _refuse(where, "has tool_calls that are not calls", fix)
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments", {}))}}


def _arguments(given: Any) -> Any:
    """Return arguments as an object, which templates expect. Text that is not a JSON object stays unchanged."""
    if not isinstance(given, str):
        return given
    try:
        value = parse_json(given)
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


def _refuse(where: str, problem: str, fix: str) -> NoReturn:
    raise RequestError(f"{where} {problem}", fix)


class ChatTemplate:
    """A compiled chat template. It can neither change its arguments nor access anything else.

    Its text, memory and time are bounded; see speculant.text.sandbox for the exceptions.
    """

    def __init__(self, source: str) -> None:
        """Compile the template. Raises ModelError if it is not valid Jinja."""
        with Converts(ModelError, "the chat template is not valid", _REPAIR):
            try:
                self._template = _environment().from_string(source)
            except jinja2.TemplateSyntaxError as error:
                problem = f"the chat template is not valid: {error.message} (line {error.lineno})"
                raise ModelError(problem, _REPAIR) from error

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **variables: Any) -> str:
        """Return the prompt text of a conversation.

        Raises RequestError with the template's own reason, and ModelError if the sandbox stops the template.
        """
        given = {"tools": None, **variables, "messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render({**given, **Budget(given).variables()})
        except SecurityError as error:
            raise ModelError(
                f"the sandbox stopped the chat template: {error}", "do not trust this checkpoint."
            ) from error
        except Exception as error:
            raise RequestError(
                f"the chat template can't render these messages: {error}",
                "give each message a role that the model knows and a text content, in the order it expects.",
            ) from error


def answer_in(source: str, message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()) -> str | None:
    """Return an assistant's message as a template writes it after a user's, from the beginning of the answer.

    It ends with the text after a message. Return None if the template can't render it.
    """
    user, given = (
        {"role": "user", "content": "Where?"},
        {"tools": list(tools) or None, "bos_token": "", "eos_token": ""},
    )
    try:
        template = ChatTemplate(source)
        prompt, whole = template.render([user], True, **given), template.render([user, message], False, **given)
    except SpeculantError:
        return None
    pairs = enumerate(zip(prompt, whole, strict=False))
    start = next((place for place, (one, other) in pairs if one != other), len(prompt))
    tag = whole.rfind("<", 0, start)
    return whole[tag if tag > whole.rfind(">", 0, start) else start :]  # a tag is not cut


def read_template(given: object) -> str | None:
    """Return the source of a user's template, which is given as source or as a file.

    Raises ConfigError for a file that can't be read, and for a source that is not valid.
    """
    if given is None:
        return None
    source = given if isinstance(given, str) and ("{" in given or "\n" in given) else _read_file(given)
    try:
        ChatTemplate(source)
    except ModelError as error:
        raise ConfigError(error.problem, "repair it, or leave it out.") from error
    return source


def _read_file(given: object) -> str:
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"chat_template is a {type(given).__name__}", "give the source of a template, or its file.")
    with Converts(ConfigError, f"the chat template {given} can't be read", "give its source, or the path of its file."):
        return Path(given).expanduser().read_text(encoding="utf-8")


def find_template(folder: Path, settings: Mapping[str, Any], name: str = DEFAULT) -> str | None:
    """Return the source of a checkpoint's template, from its own file or from tokenizer_config.json.

    name: "default", or the name of an additional template such as "tool_use". Raises ModelError if the file can't be
    read, and as `template_in` does.
    """
    file = folder / ("chat_template.jinja" if name == DEFAULT else f"additional_chat_templates/{name}.jinja")
    if file.exists():
        with Converts(ModelError, f"{file} can't be read", "download it again."):
            return file.read_text(encoding="utf-8")
    return template_in(settings, name)


def template_in(settings: Mapping[str, Any], name: str = DEFAULT) -> str | None:
    """Return the source of a template from the content of tokenizer_config.json.

    Raises ModelError if the entry is neither a text nor a list of named templates.
    """
    given = settings.get("chat_template")
    entries = given if isinstance(given, list) else [{"name": DEFAULT, "template": given}]
    if all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries):
        template = {entry["name"]: entry.get("template") for entry in entries}.get(name)
        if template is None or isinstance(template, str):
            return template
    raise ModelError(
        "chat_template in tokenizer_config.json is neither a text nor a list of named templates",
        "correct it, or add a chat_template.jinja to the checkpoint's folder.",
    )


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training. Here the block is replaced by its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance variable

    @override
    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> BoundedEnvironment:
    """Return the environment that Hugging Face templates are written for."""
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.bound_filter("tojson", _to_json, _json_cost)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's filter, which escapes HTML: wrong in a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _json_cost(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> int:
    """Return the most characters of a value's JSON: each argument is counted as indent and as separator."""
    given = [*args, *kwargs.values()]
    widths = [each if isinstance(each, int) else budget.text(each) for each in given]
    return budget.text(value, indent=max([0, *widths]))


@pass_context
def _raise_exception(context: Context, message: object) -> None:
    budget = Budget.of(context)
    budget.charge(budget.text(message))
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if re.search(r"%[^A-Za-z%]*\d{3}", pattern):
        raise SecurityError("it formats the date with a width above 99")
    return datetime.now().strftime(pattern)


class ReasoningTags(NamedTuple):
    """The texts before and after a model's reasoning."""

    start: str
    end: str


@dataclass(frozen=True)
class ExpectedReasoning:
    """The reasoning to expect in an answer. The constraint of a form and the reader of the answer both use it.

    opened: the prompt ends with the start tag, so the answer begins within the reasoning. possible: the answer may have
    reasoning.
    """

    tags: ReasoningTags
    opened: bool
    possible: bool


TAGS = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
)


@lru_cache(maxsize=8)
def find_tags(template: str | None) -> ReasoningTags | None:
    """Return the tags around the reasoning in a chat template; None if it contains none, or writes reasoning otherwise.

    A template that writes no reasoning is trusted.
    """
    if template is None or not (found := [tags for tags in TAGS if tags.end in template]):
        return None
    answer = answer_in(template, _REASONED) or ""
    if _THOUGHT not in answer:
        return found[0]
    return next((tags for tags in found if _reads_back(tags, answer)), None)


def _reads_back(tags: ReasoningTags, answer: str) -> bool:
    before, _, after = answer.partition(tags.end)
    thought = before.strip(_SPACE).removeprefix(tags.start).strip(_SPACE)
    return thought == _THOUGHT and after.lstrip(_SPACE).startswith(_REASONED["content"])


def expect_reasoning(
    template: str | None, prompt: str, quoted: str = "", wanted: bool = True
) -> ExpectedReasoning | None:
    """Return the reasoning to expect after a prompt; None if its chat template has no tags.

    quoted: the text of a user's message; a tag in it at the end of the prompt opens no reasoning. wanted: an answer
    begins after the prompt, and the model may reason in it.
    """
    tags, prompt = find_tags(template), prompt.rstrip(_SPACE)
    if tags is None:
        return None
    own = not quoted.strip() or not prompt.endswith(quoted.rstrip(_SPACE))
    opened = own and prompt.endswith(tags.start)
    is_over = prompt.endswith(tags.end)  # templates write empty reasoning to switch it off
    return ExpectedReasoning(tags, opened, opened or (wanted and not is_over))
