"""Errors that a user can cause, each with a problem and a fix."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType


class SpeculantError(Exception):
    """Base of every error a user can cause.

    The message is one sentence about the problem and its reason, followed by the fix.
    """

    def __init__(self, problem: str, fix: str) -> None:
        self.problem = problem
        self.fix = fix
        super().__init__(f"{problem}\n  Fix: {fix}")


class ConfigError(SpeculantError, ValueError):
    """A configuration or sampling parameter that is out of range, unknown or contradictory."""


class AbsentError(ConfigError, AttributeError):
    """A method of another program that is absent here; `hasattr` is False."""


class ModelError(SpeculantError, ValueError):
    """A checkpoint that can't be loaded: missing, malformed, unsafe or of an unknown kind."""


class PairError(SpeculantError, ValueError):
    """A draft that does not fit its target."""


class DistributionError(SpeculantError, ValueError):
    """Weights that do not form a distribution, or two distributions over different outcomes."""


class DraftError(SpeculantError, ValueError):
    """A draft that breaks the contract of `Drafter.propose`. It is dropped, and no request fails."""


class DraftLengthError(SpeculantError, ValueError):
    """Lengths that break the contract of `DraftLength.choose`. The step then has no drafts."""


class RequestError(SpeculantError, ValueError):
    """A prompt or request that can't be served."""


class ContextFullError(RequestError):
    """A prompt or a conversation that leaves no room in the context for an answer."""


class ConstraintError(RequestError):
    """A constraint that can't find the next tokens. Its request ends alone, without repeating the step."""


class CapacityError(SpeculantError, RuntimeError):
    """A limit that is exceeded: cache memory, sequence slots, context length."""


class EngineClosedError(SpeculantError, RuntimeError):
    """A request to an engine that was shut down, or one that the shutdown aborted."""


class EngineDeadError(SpeculantError, RuntimeError):
    """An engine that failed; `__cause__` is the error."""


class ServerError(SpeculantError, RuntimeError):
    """A server that can't be reached, or failed."""


def is_failure(error: BaseException) -> bool:
    """Whether an error is a failure of code. That includes panics of Rust extensions, which are BaseExceptions."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


@dataclass(frozen=True)
class Converts:
    """A context that converts errors of foreign code into a SpeculantError of type `to`, with their message.

    Panics of Rust extensions are converted too. SpeculantErrors, KeyboardInterrupt and SystemExit are not.
    Instances are reusable.
    """

    to: type[SpeculantError]
    problem: str
    fix: str

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, SpeculantError) and is_failure(error):
            raise self.to(f"{self.problem}: {error}", self.fix) from error


class Guard:
    """Calls plug-ins whose errors must not fail requests. Logs the first error of each name and type."""

    def __init__(self, logger: logging.Logger, consequence: str) -> None:
        self._logger, self._consequence = logger, consequence
        self._logged: set[tuple[str, str]] = set()

    def succeeds(self, name: str, call: Callable[[], object]) -> bool:
        """Make a call and return whether it succeeded."""
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - anything but a failure is raised again
            self.note(name, error)
            return False
        return True

    def note(self, name: str, error: BaseException) -> None:
        """Log an error that a call raised; raise it again if it is no failure of the plug-in, such as an interrupt."""
        if not is_failure(error):
            raise error
        kind = name, type(error).__name__
        if kind not in self._logged:
            self._logged.add(kind)
            self._logger.warning("%s failed, %s: %r", name, self._consequence, error)


def suggest(given: str, known: Iterable[str]) -> str:
    """Return advice for an unknown name: the closest known name, and all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=1)
    if close:
        return f"did you mean {close[0]!r}? Known: {', '.join(names)}."
    return f"use one of: {', '.join(names)}."
