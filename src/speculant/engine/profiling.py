"""A trace of an engine's steps: torch's profiler, with the phases of each step as named ranges.

    step 17   | schedule | draft | target pass | verify | commit |

A step of an encoder-decoder model that has new sources also has a range "encode", before the drafts.

torch's profiler does not see inside a native call; the range around the call shows how long it took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from speculant.errors import ConfigError

if TYPE_CHECKING:
    from speculant.engine.engine import Engine

Mark = Callable[[str], AbstractContextManager[object]]  # makes the range of a phase, by its name

PHASES = ("schedule", "draft", "target pass", "verify", "commit")
ENCODE = "encode"
unmarked: Mark = dict.fromkeys((*PHASES, ENCODE), nullcontext()).__getitem__  # marks nothing, without a call of Python


def check_trace_path(path: Path | None, what: str = "trace", example: str = "trace.json") -> None:
    """Raise ConfigError if `path` can't be written to; None = no file is wanted. what: the kind of file."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"the {what} {path} is a folder", f"name a file, such as {example}.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"the folder of the {what} {path} does not exist", "make it, or name a file in another one.")


@contextmanager
def profiled(engine: Engine, path: Path | None) -> Iterator[None]:
    """Profile the steps of `engine` inside this block, in this thread; write a Chrome trace in JSON to `path`.

    A name that ends with .gz is compressed. None = nothing is profiled. The trace is written if the block
    raises, too. Raises ConfigError as `check_trace_path` does.
    """
    if path is None:
        yield
        return
    check_trace_path(path)
    import torch.profiler  # takes a moment, and only a profile needs it

    profiler = torch.profiler.profile()
    engine.mark = torch.profiler.record_function
    try:
        with profiler:
            yield
    finally:
        engine.mark = unmarked
        profiler.export_chrome_trace(str(path))
