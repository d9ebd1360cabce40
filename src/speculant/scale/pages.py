"""Joins the metrics of replicas in one page of Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping

_ENGINE = 'engine="0"'  # within a label's value the quotes would be escaped


def joined(pages: Mapping[str, str]) -> str:
    """Return one page with the samples of all: the label `engine` is the name of their replica.

    A sample without that label, which describes no engine, is that of the first page.
    """
    described: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, (replica, page) in enumerate(pages.items()):
        family = ""
        for line in page.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                if line not in described.setdefault(family, []):
                    described[family].append(line)
            elif _ENGINE in line:
                samples.setdefault(family, []).append(line.replace(_ENGINE, f'engine="{replica}"'))
            elif number == 0:
                samples.setdefault(family, []).append(line)
    families = (line for family, about in described.items() for line in (*about, *samples.get(family, ())))
    return "".join(f"{line}\n" for line in families)
