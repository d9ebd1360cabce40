"""The settings of speculation that a request may override."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from speculant.errors import ConfigError, suggest

MAX_SPECULATIVE_TOKENS = 512  # nodes of a draft
MAX_PREDICTION = 131_072  # characters of its text, and tokens


@dataclass(frozen=True)
class Speculation:
    """The settings of speculation that a request may override; None = the engine's own.

    prediction: the caller's guess of the output, as text or token ids, for methods that draft from it.
    """

    method: str | None = None
    num_speculative_tokens: int | None = None
    verification: str | None = None
    prediction: str | Sequence[int] | None = None


def is_whole(given: object) -> TypeGuard[int]:
    """Whether a value is a whole number: neither a truth value nor a number with a fraction, even of zero."""
    return isinstance(given, int) and not isinstance(given, bool)


KEYS = tuple(each.name for each in dataclasses.fields(Speculation))


def read_speculation(given: Any) -> bool | Mapping[str, Any] | None:
    """Check the `speculation` of a request's `SamplingParams`, as far as possible without an engine."""
    if given is None or isinstance(given, bool):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculation={given!r} is neither a truth value nor a mapping", "use False to turn it off.")
    for key in given:
        if key not in KEYS:
            raise ConfigError(f"speculation can't set {key!r} per request", suggest(str(key), KEYS))
    tokens, verifier = given.get("num_speculative_tokens", 0), given.get("verification", "auto")
    if not (is_whole(tokens) and 0 <= tokens <= MAX_SPECULATIVE_TOKENS):
        raise ConfigError(
            f"num_speculative_tokens={tokens!r} is not a whole number from 0 to {MAX_SPECULATIVE_TOKENS}",
            "use for example 4.",
        )
    if not isinstance(given.get("method", ""), str):
        raise ConfigError(
            f"method={given['method']!r} is not the name of a drafter", "leave it out for the engine's own."
        )
    if not isinstance(verifier, str):
        raise ConfigError(f"verification={verifier!r} is not the name of a verifier", 'use for example "auto".')
    if (prediction := Speculation(**given).prediction) is not None:
        _check_prediction(prediction)
    return dict(given)


def _check_prediction(given: object) -> None:
    if not isinstance(given, str | list | tuple):
        raise ConfigError(f"the prediction is a {type(given).__name__}", "give text or a list of token ids.")
    if len(given) > MAX_PREDICTION:
        unit = "characters" if isinstance(given, str) else "tokens"
        raise ConfigError(f"the prediction has {len(given)} {unit}, more than {MAX_PREDICTION}", "shorten it.")
