"""Reads files of measured costs: a verification curve, or a report of `speculant check-pair`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculant.errors import ConfigError

if TYPE_CHECKING:
    from speculant.lab.theory.speedup import VerificationCurve

LARGEST = 1e9  # of counts and costs
FORMS = 'write {"1": 1.0, "2": 1.03, ...} or {"tokens": [1, 2, ...], "cost": [1.0, 1.03, ...]}.'


def read_rates(text: str) -> list[float]:
    """Read a number, or numbers separated by commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--alpha {text!r} is not a number", "use --alpha 0.8, or one per depth: 0.9,0.8.") from None


def read_curve(path: Path | None, key: str = "verify_curve") -> VerificationCurve:
    """Read a verification curve; None = a pass costs the same whatever its tokens. Raises ConfigError.

    The file has an object of costs by number of tokens, or one of two lists `tokens` and `cost`, or either of them
    under the key. Costs may be in any unit.
    """
    from speculant.lab.theory.speedup import FLAT, VerificationCurve

    if path is None:
        return FLAT
    content = read_object(path)
    tokens, costs = _points(path, content.get(key, content))
    try:
        return VerificationCurve(tuple(tokens), tuple(costs))
    except ValueError as error:
        problem, _, fix = str(error).partition("; ")
        raise _error(path, f"can't be used: {problem}", f"{fix}.") from error


def read_pair(path: Path | None) -> tuple[list[float], float] | tuple[None, None]:
    """Return acceptance rates by depth and the cost ratio from a report of `check-pair`; None for another file.

    Raises ConfigError for a file that can't be read.
    """
    content = {} if path is None else read_object(path)
    try:
        best = content["precisions"][content["best"]["precision"]]
        rates = best["rates"] or [best["alpha"]["mean"]]
        return [float(rate) for rate in rates], float(best["cost_ratio"])
    except (KeyError, TypeError, ValueError):
        return None, None


def _error(path: Path, problem: str, fix: str = FORMS) -> ConfigError:
    return ConfigError(f"the verification curve {path} {problem}", fix)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _error(path, f"can't be read: {error}", "check the path.") from error
    except (ValueError, RecursionError) as error:
        raise _error(path, f"is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise _error(path, "does not hold a JSON object")
    return content


def _points(path: Path, points: Any) -> tuple[list[int], list[float]]:
    """Return numbers of tokens and their costs; the keys of an object are sorted."""
    if not isinstance(points, dict):
        raise _error(path, "has a curve that is not a JSON object")
    if not {"tokens", "cost"} & points.keys():
        pairs = sorted(((_read_key(path, key), cost) for key, cost in points.items()), key=lambda pair: pair[0])
        points = {"tokens": [count for count, _ in pairs], "cost": [cost for _, cost in pairs]}
    tokens, costs = points.get("tokens"), points.get("cost")
    if set(points) != {"tokens", "cost"} or not isinstance(tokens, list) or not isinstance(costs, list):
        raise _error(path, "does not have two lists, tokens and cost, and nothing else")
    for count in tokens:
        if not _is_number(count) or count != int(count):
            raise _error(path, f"has {count!r}, which is not a number of tokens")
    for cost in costs:
        if not _is_number(cost):
            raise _error(path, f"has {cost!r}, which is not a cost")
    return [int(count) for count in tokens], [float(cost) for cost in costs]


def _read_key(path: Path, key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise _error(path, f"has the key {key!r}, which is not a number of tokens") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
