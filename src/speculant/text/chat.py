"""Chat templates. They are programs from a checkpoint, so they run in a sandbox."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context

from speculant.errors import ConfigError, Converts, ModelError, RequestError, SpeculantError
from speculant.text.costs import Budget
from speculant.text.sandbox import BoundedEnvironment

DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates
_REPAIR = "repair chat_template.jinja (or chat_template in tokenizer_config.json), or send a plain prompt."


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
    """Return the source of a user's template, which is given as source or as a file. Raises ConfigError."""
    if given is None or (isinstance(given, str) and ("{" in given or "\n" in given)):
        return given
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
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = _named_templates(template).get(name)
    elif name != DEFAULT:
        return None
    if template is not None and not isinstance(template, str):
        raise _unusable_template()
    return template


def _named_templates(entries: list[Any]) -> dict[str, Any]:
    if any(not isinstance(entry, dict) or not isinstance(entry.get("name"), str) for entry in entries):
        raise _unusable_template()
    return {entry["name"]: entry.get("template") for entry in entries}


def _unusable_template() -> ModelError:
    return ModelError(
        "chat_template in tokenizer_config.json is neither a text nor a list of named templates",
        "correct it, or add a chat_template.jinja to the checkpoint's folder.",
    )


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training. Here the block is replaced by its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance variable

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
