"""The grammar library's errors in words for users, who know neither its grammars nor its options."""

from __future__ import annotations

import re

MOST = 300  # characters of a reason
_OF_SCHEMA = "failed to compile JSON schema: "
_PLACE = re.compile(r"at (\d+)\((\d+)\): ")
_LISTING = re.compile(r"\n\s*\d+ \| ")  # of the source, in which the error is marked
_ENDLESS = ("NoExtensionBias", "circular references")
_REWORDED = (  # messages of the library, and their meaning for a schema
    (r"oneOf constraints are not supported", "two alternatives of a oneOf may fit the same value: use anyOf"),
    (r"Failed to generate regex for (?:integer|float) range", "a bound of a number is too large: use one within 1e17"),
    (r"Unsatisfiable schema: Regex is empty", "no text fits both a string's pattern and its other keywords"),
    (r"regex parse error.*error: ([^\n]*)", r"a pattern is not valid: \1"),
    (r"Expected f64 for ('\w+'), got (.*)", r"Expected a number for \1, got \2"),
    (r"Resource '(?:json-schema:///)?([^']*)'.*", r"the schema refers to '\1', which is not part of it"),
)
_PLAIN = re.compile(  # messages of the library in the schema's own words
    r"(Unimplemented keys: |Unsatisfiable schema: |Unknown format: |Invalid type: |Expected |Pointer '|Anchor '"
    r"|Value for '|patternProperty regexes /|\w+ must be |schema too large)",
)


def has_no_text(error: str) -> bool:
    """Whether an error says that nothing has the form."""
    return any(sign in error for sign in _ENDLESS)


def is_of_schema(error: str) -> bool:
    """Whether an error is about a JSON schema within a grammar."""
    return _OF_SCHEMA in error


def reason_of(error: str, kind: str = "") -> str:
    """Return an error of the library in one line, without its traceback, its grammars and its options.

    kind: of the form's source.
    """
    text = _LISTING.split(error.partition("<backtrace>")[0].replace("<non-verbose/>", ""))[0].strip()
    place, text = _PLACE.match(text), _PLACE.sub("", text, count=1)
    if has_no_text(text):
        return "no text has this form, as for a schema or a rule that refers only to itself"
    text = text.removeprefix("lexer error: ").rpartition(_OF_SCHEMA)[2]
    if kind != "grammar" or is_of_schema(error):
        for pattern, words in _REWORDED:
            if found := re.search(pattern, text, re.DOTALL):
                return _in_one_line(found.expand(words))
    if kind == "json" or is_of_schema(error):
        return _in_one_line(_of_schema(text))
    return _in_one_line(f"line {place[1]}, column {place[2]}: {text}" if place and kind == "grammar" else text)


def _of_schema(text: str) -> str:
    return (
        text if _PLAIN.match(text) else "the schema is too large, or has a keyword with a value that is not supported"
    )


def _in_one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST else line[: MOST - 3] + "..."
