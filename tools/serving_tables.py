"""Writes the tables of docs/serving.md from the server's code: fields of requests, fields of other servers, options.

python tools/serving_tables.py
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.support_table import replaced  # noqa: E402

from speculant.cli import ServerFlags  # noqa: E402
from speculant.serving import ACCEPTED, REFUSED, ChatBody, CompletionBody, InfillBody, ResponseBody  # noqa: E402

PAGE = ROOT / "docs" / "serving.md"
BODIES = {"chats": ChatBody, "completions": CompletionBody, "responses": ResponseBody, "infill": InfillBody}
READ = {field for body in BODIES.values() for field in body.model_fields}


def updated(page: str) -> str:
    """Return a page whose tables are those of the code."""
    for name, lines in {"fields": fields(), "others": others(), "options": options()}.items():
        page = replaced(page, name, lines)
    return page


def fields() -> Iterator[str]:
    """Yield the table of the fields that the server reads, by the routes that read them."""
    routes: dict[str, list[str]] = defaultdict(list)
    for route, body in BODIES.items():
        for field in filter(READ.__contains__, body.model_fields):
            routes[field].append(route)
    yield from ("| Routes | Fields |", "|---|---|")
    for served, names in sorted(_grouped(routes).items(), key=lambda each: -each[0].count(",")):
        yield f"| {served} | {_listed(sorted(names))} |"


def others() -> Iterator[str]:
    """Yield the table of the fields that only other servers read, with what to use instead of a refused field."""
    advice = {name: [entry.advice] for name, entry in REFUSED.items() if name not in READ}
    instead = {text: names for text, names in _grouped(advice).items() if re.match("use |set ", text)}
    absent = [name for name, (text,) in advice.items() if text not in instead]
    yield from ("| Fields | Use instead |", "|---|---|")
    yield from (f"| {_listed(names)} | {text.partition(' ')[2]} |" for text, names in instead.items())
    yield f"| {_listed(absent)} | nothing; the error says why |"
    yield f"| {_listed(name for name in ACCEPTED if name not in READ)} | accepted, without effect |"


def options() -> Iterator[str]:
    """Yield the table of the server's flags."""
    hints = get_type_hints(ServerFlags, include_extras=True)
    defaults = {field.name: field.default for field in dataclasses.fields(ServerFlags.sets)}
    yield from ("| Option, default | |", "|---|---|")
    for name in ServerFlags.names():
        flag = f"`--{ServerFlags.renamed.get(name, name).replace('_', '-')}`"
        text = get_args(hints[name])[1].replace("; can be repeated", "").rstrip(".")
        own = re.search(r" \[default: (.*?)\]", text)
        default = own[1] if own else _shown(name, defaults[name])
        shown = f"{flag}: {default}" if default else flag
        yield f"| {shown} | {text.replace(own[0], '') if own else text} |".replace("  ", " ")


def _grouped(values: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Return names by their values, in the order of the first name."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, each in values.items():
        found[", ".join(each)].append(name)
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _shown(name: str, value: Any) -> str:
    """Return a default as a reader writes it: bytes in MiB or KiB, seconds with their unit."""
    if value in (None, (), False):
        return ""
    if name.endswith("_bytes"):
        return f"{value // 2**20} MiB" if value % 2**20 == 0 else f"{value // 2**10} KiB"
    if isinstance(value, float):
        return f"{value:g} s"
    return f"{value:,}" if isinstance(value, int) and value > 9999 else str(value)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the tables of {PAGE.relative_to(ROOT)}")
