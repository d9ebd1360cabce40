"""The form of a request's output, in a form that the grammar library can write."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from speculant.errors import ConfigError, RequestError, suggest
from speculant.files import MOST_DEPTH, is_deep, is_encodable, parse_json

MAX_CHARACTERS = 65_536  # of a schema, an expression or a grammar, or of all choices together
MAX_CHOICES = 1024
_OPTIONS = "x-guidance"  # of the grammar library, some of which would allow invalid values
KINDS = ("json", "regex", "choice", "grammar", "json_object")
# Fields of vLLM that are not supported, with alternatives.
REFUSED = {
    "disable_additional_properties": 'write "additionalProperties": false into the schema.',
    "whitespace_pattern": "use disable_any_whitespace, or describe the text by a regex.",
    "structural_tag": "describe the text by a grammar.",
}
LARGEST = 10**18  # beyond it the library writes no bound of a number
SMALLEST = 1e-60  # below it the library's expression is nested too deep
LOWEST_INTEGER = -(2**63) + 1024  # the lowest float64 above the lowest int64
HIGHEST_INTEGER = 2**63 - 1
_LOW_BOUNDS, _HIGH_BOUNDS = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_VALUES = frozenset({"const", "enum", "default", "examples"})  # keywords whose values are no schemas
_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})


class GrammarSource(NamedTuple):
    """A grammar to compile: one of KINDS, and its text; choices are a JSON list."""

    kind: str
    text: str
    compact: bool

    @property
    def digest(self) -> bytes:
        """A short name of the grammar, for notes that are kept about many of them."""
        content = f"{self.kind} {self.compact} {self.text}".encode()
        return hashlib.blake2b(content, digest_size=16).digest()


@dataclass(frozen=True)
class StructuredOutputs:
    """The form of an output, with vLLM's field names. Exactly one of the first five is set.

    json: a JSON schema, as a mapping or as text. regex: an expression in Rust's syntax, without look-around, that the
    whole output matches. choice: the texts to choose from. grammar: a Lark grammar with the rule `start`, or one in
    EBNF (GBNF), as vLLM and llama.cpp take it, with the rule `root ::= ...`.
    json_object: any JSON object. disable_any_whitespace: JSON has no white space between its parts, so more of its
    tokens are forced. The last three are fields of vLLM and must not be set.

    Raises ConfigError for values of another type, and RequestError for texts that are too large.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: None = None
    structural_tag: None = None

    def __post_init__(self) -> None:
        for name, fix in REFUSED.items():
            if getattr(self, name) not in (None, False):
                raise ConfigError(f"{name} of structured_outputs is not supported", fix)
        if self.json_object is None:
            object.__setattr__(self, "json_object", False)
        named = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(named) != 1:
            given = " and ".join(named) or "none"
            raise ConfigError(f"structured_outputs has {given} of {', '.join(KINDS)}", "set exactly one of them.")
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} is not a truth value", "use True or False.")
        if self.choice is not None:
            object.__setattr__(self, "choice", _read_choices(self.choice))
        text = self.source.text
        if len(text) > MAX_CHARACTERS:
            raise RequestError(
                f"{named[0]} of structured_outputs has {len(text)} characters, more than {MAX_CHARACTERS}",
                "make it smaller, for example by $defs for parts that occur several times.",
            )
        if not is_encodable(text):
            raise RequestError(f"{named[0]} of structured_outputs is not valid Unicode", "remove lone surrogates.")

    @cached_property
    def source(self) -> GrammarSource:
        """The text to compile; it is equal for equal forms."""
        if self.json is not None:
            return GrammarSource("json", _schema_text(self.json), self.disable_any_whitespace)
        if self.json_object:
            return GrammarSource("json", '{"type": "object"}', self.disable_any_whitespace)
        if self.choice is not None:
            return GrammarSource("choice", json.dumps(list(self.choice), ensure_ascii=False), False)
        kind = "regex" if self.regex is not None else "grammar"
        return GrammarSource(kind, _text(kind, getattr(self, kind)), False)


StructuredOutputsParams = StructuredOutputs  # vLLM's name


def read_structured(given: Any) -> StructuredOutputs:
    """Read the `structured_outputs` of a request: a StructuredOutputs, or a mapping of its fields."""
    if isinstance(given, StructuredOutputs):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"structured_outputs is a {type(given).__name__}", 'give a StructuredOutputs, or a mapping {"regex": ...}.'
        )
    known = [each.name for each in dataclasses.fields(StructuredOutputs)]
    for key in given:
        if key not in known:
            raise ConfigError(f"structured_outputs has the unknown key {key!r}", suggest(str(key), known))
    return StructuredOutputs(**given)


def _text(kind: str, given: object) -> str:
    if not isinstance(given, str):
        raise ConfigError(f"{kind} of structured_outputs is a {type(given).__name__}", "give it as text.")
    return given


def _read_choices(given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
        raise ConfigError("choice of structured_outputs is not a list of texts", 'give for example ["yes", "no"].')
    if not 0 < len(given) <= MAX_CHOICES:
        raise RequestError(
            f"choice of structured_outputs has {len(given)} texts and may have 1 to {MAX_CHOICES}",
            "give fewer, or describe them by a regex.",
        )
    return tuple(given)


def _schema_text(given: object) -> str:
    """Return a schema as JSON text. The order of its keys matters: the output has the same order."""
    schema = _parsed(given) if isinstance(given, str) else given
    if not isinstance(schema, Mapping):
        raise ConfigError(f"json of structured_outputs is a {type(schema).__name__}", "give a JSON schema: an object.")
    if is_deep(dict(schema)):
        raise _too_deep()
    try:
        written = with_written_bounds({key: each for key, each in schema.items() if key != _OPTIONS})
        return json.dumps(written, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"json of structured_outputs is not JSON: {error}", "use only JSON's types.") from error


def _parsed(text: str) -> Any:
    if len(text) > MAX_CHARACTERS:
        return {"": text}  # refused later for its size, so it need not be parsed
    try:
        return parse_json(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise RequestError(f"json of structured_outputs is not valid JSON: {error}", "correct the schema.") from error


def _too_deep() -> RequestError:
    return RequestError(
        f"json of structured_outputs is nested over {MOST_DEPTH} levels deep",
        "name inner schemas in $defs and refer to them.",
    )


def with_written_bounds(schema: Any) -> Any:
    """Return a schema whose bounds the library can write. Every value that it allows is valid for the given one.

    The library writes the numbers within bounds digit by digit, and computes bounds in float64. A bound that it can't
    write is moved inwards to the next one that it can.
    """
    if isinstance(schema, list):
        return [with_written_bounds(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kinds = schema.get("type")
    is_integer = kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds)
    return {key: _keyword(key, value, is_integer) for key, value in schema.items()}


def _keyword(key: str, value: Any, is_integer: bool) -> Any:
    if key in _LOW_BOUNDS + _HIGH_BOUNDS and isinstance(value, int | float) and not isinstance(value, bool):
        return value if not math.isfinite(value) else _bound(value, key in _LOW_BOUNDS, is_integer)
    if key in _BY_NAME and isinstance(value, Mapping):
        return {name: with_written_bounds(each) for name, each in value.items()}
    return value if key in _VALUES else with_written_bounds(value)


def _bound(value: float, is_low: bool, is_integer: bool) -> float:
    """Return the bound itself, or the next one inwards: upwards for a low bound, downwards for a high one."""
    if is_integer:
        value = max(value, LOWEST_INTEGER) if is_low else min(value, HIGHEST_INTEGER)
        if not is_low and value == HIGHEST_INTEGER:
            return value  # which the library reads as float64, and limits to int64
    else:
        value = max(value, -LARGEST) if is_low else min(value, LARGEST)
        if 0 < abs(value) < SMALLEST:
            inwards = (value > 0) == is_low  # away from zero
            value = math.copysign(SMALLEST, value) if inwards else 0
    return _as_float64(value, is_low)


def _as_float64(value: float, is_low: bool) -> float:
    """Return the nearest float64 inwards; integers stay integers."""
    nearest = float(value)
    if nearest < value and is_low:
        nearest = math.nextafter(nearest, math.inf)
    elif nearest > value and not is_low:
        nearest = math.nextafter(nearest, -math.inf)
    return int(nearest) if isinstance(value, int) else nearest
