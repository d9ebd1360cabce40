"""Runs tests against copies of the package, in one process that has the heavy imports done.

Reads a line of JSON per run, {"root": folder with the package, "tests": node ids}, and answers with
one, {"code": pytest's exit code, "output": what it printed}.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import sys

import pytest
import torch

PATIENCE = 200  # seconds per test until a run that hangs ends this process


def run(root: str, tests: list[str]) -> dict[str, object]:
    """Run tests with `speculant` imported anew from `root`."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("speculant", "tests")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _of_editable_install(finder)]
    sys.path[0] = root
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        options = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "--every-combination"]
        code = pytest.main([*options, *tests])
    used = getattr(sys.modules.get("speculant"), "__file__", None) or ""
    assert used.startswith(root), f"speculant was imported from {used or 'nowhere'}"
    return {"code": int(code), "output": printed.getvalue()}


def _of_editable_install(finder: object) -> bool:
    """Tell the finder of an editable install, which would go before sys.path."""
    return "editable" in type(finder).__module__ or "editable" in getattr(finder, "__module__", "")


def main() -> None:
    """Serve until the input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        task = json.loads(line)
        faulthandler.dump_traceback_later(PATIENCE * len(task["tests"]), exit=True)
        answer = run(**task)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
