"""A progress bar over prompts, in tqdm's form."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from speculant.errors import ConfigError

Count = Callable[[], object]  # to be called when a prompt is done
ShowProgress = bool | Callable[..., Any]


@contextmanager
def progress(wanted: ShowProgress, total: int) -> Iterator[Count]:
    """Show how many of `total` prompts are done; the value is to be called for each.

    wanted: True shows a bar where standard error is a terminal, False none; a callable in tqdm's place makes the bar,
    wherever that is shown. Raises ConfigError for anything else.
    """
    if not isinstance(wanted, bool) and not callable(wanted):
        raise ConfigError(
            f"use_tqdm is a {type(wanted).__name__}",
            "set it to True, False or a callable like tqdm; give tools and what follows by name.",
        )
    if not callable(wanted) and not (wanted and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda: None
        return
    bar = (wanted if callable(wanted) else _tqdm())(total=total, desc="Processed prompts", dynamic_ncols=True)
    try:
        yield lambda: bar.update(1)
    finally:
        bar.close()


def _tqdm() -> Callable[..., Any]:
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # huggingface-hub depends on it

    made: Callable[..., Any] = tqdm
    return made
