"""`speculant doctor`: what this machine has, what is missing, and what that costs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from speculant.cli.machine import Machine, inspect_machine
from speculant.cli.terminal import examples, print_json, progress, results

EXAMPLES = examples(
    "speculant doctor",
    "speculant doctor --json | python -m json.tool",
)
UNITS = {"_gib": "GiB", "_mib": "MiB", "_gb_per_s": "GB/s"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Report what this machine has, what is missing, and what that costs."""
    with progress("Measuring memory bandwidth"):
        machine = inspect_machine()
    if as_json:
        print_json(asdict(machine))
    else:
        _show(machine)


def _show(machine: Machine) -> None:
    console = results()
    for title, section in asdict(machine).items():
        if title == "findings":
            continue
        console.print(_label(title).title(), style="bold")
        console.print(_table(section))
    console.print("Findings", style="bold")
    for finding in machine.findings:
        console.print(f"  {finding.status}: ", style="green" if finding.status == "ok" else "yellow", end="")
        console.print(finding.what)
        if finding.cost:
            console.print(f"      costs: {finding.cost}")
        if finding.fix:
            console.print(f"      fix: {finding.fix}")


def _table(section: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in section.items():
        table.add_row(f"  {_label(name)}", _text(value))
    return table


def _label(name: str) -> str:
    for suffix, unit in UNITS.items():
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix).replace('_', ' ')} ({unit})"
    return name.replace("_", " ")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:.1f}"
    return "not installed" if value is None else str(value)
