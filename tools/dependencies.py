"""Prints the packages that Speculant needs, with those of the extras given: `python tools/dependencies.py dev`."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OWN = f"{PROJECT['name']}["  # an extra's requirement of another one


def of_extra(extra: str) -> Iterator[str]:
    """Return an extra's requirements, with those of the extras that it names."""
    for requirement in PROJECT["optional-dependencies"][extra]:
        if requirement.startswith(OWN):
            yield from of_extra(requirement.removeprefix(OWN).rstrip("]"))
        else:
            yield requirement


if __name__ == "__main__":
    print(*PROJECT["dependencies"], *(each for extra in sys.argv[1:] for each in of_extra(extra)))
