"""Prints the reports of `speculant doctor`: sections of facts, and findings with their costs and fixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from speculant.cli.terminal import results

UNITS = {"_gib": "GiB", "_mib": "MiB", "_kib": "KiB", "_gb_per_s": "GB/s"}


@dataclass(frozen=True)
class Finding:
    """One thing that is present, missing or slow: its cost, and the fix."""

    status: str  # ok, missing, note
    what: str
    cost: str = ""
    fix: str = ""


def show_report(sections: Mapping[str, Mapping[str, Any]], findings: Sequence[Finding]) -> None:
    """Print sections by title, then findings. The names of facts end in their units, see UNITS."""
    console = results()
    for title, section in sections.items():
        console.print(_label(title).title(), style="bold")
        console.print(_table(section))
    console.print("Findings", style="bold")
    for finding in findings:
        console.print(f"  {finding.status}: ", style="green" if finding.status == "ok" else "yellow", end="")
        console.print(finding.what)
        if finding.cost:
            console.print(f"      costs: {finding.cost}")
        if finding.fix:
            console.print(f"      fix: {finding.fix}")


def _table(section: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in section.items():
        table.add_row(f"  {name if isinstance(value, Mapping) else _label(name)}", _text(value))
    return table


def _label(name: str) -> str:
    for suffix, unit in UNITS.items():
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix).replace('_', ' ')} ({unit})"
    return name.replace("_", " ")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{_label(name)} {_text(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:.1f}"
    return "not installed" if value is None else str(value)
