"""Ctrl-C while a command loads a model: one line, exit code 130, and no wait for the load's threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Each command runs in a child, so that one start and its imports serve all of them.
SLOW_LOAD = """
    import json, os, signal, sys, threading, time
    from speculant.models import backends
    from speculant.models.weights import load
    from speculant.engine import build
    from speculant.cli import main

    def slow(*_, **__):
        threading.Thread(target=time.sleep, args=(60,)).start()  # like one that writes packed weights
        print(json.dumps({"loading": os.getpid()}), flush=True)
        time.sleep(60)

    build.load_model = slow
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background inherits that it is ignored
    while line := sys.stdin.buffer.readline():
        errors, *arguments = json.loads(line)
        if not (child := os.fork()):
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
            sys.argv = ["speculant", *arguments]
            sys.exit(main.main())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"status": status}), flush=True)
"""


@pytest.fixture(scope="module")
def commands() -> Iterator[subprocess.Popen[str]]:
    """Start the program that runs commands."""
    program = [sys.executable, "-c", textwrap.dedent(SLOW_LOAD)]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "hi", "--model", "demo"),
        pytest.param(("chat", "--model", "demo"), marks=pytest.mark.slow),
        pytest.param(("demo",), marks=pytest.mark.slow),
        pytest.param(("check-lossless",), marks=pytest.mark.slow),
        pytest.param(("bench", "latency", "--model", "demo"), marks=pytest.mark.slow),
        pytest.param(("serve", "demo", "--port", "0"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(50)  # nothing waits for the load, which takes a minute
def test_ctrl_c_ends_a_load(commands: subprocess.Popen[str], command: tuple[str, ...], tmp_path: Path) -> None:
    errors = tmp_path / "errors"

    def told() -> dict[str, Any]:
        assert commands.stdout is not None
        return dict(json.loads(commands.stdout.readline()))

    assert commands.stdin is not None
    commands.stdin.write(json.dumps([str(errors), *command]) + "\n")
    commands.stdin.flush()
    begun = told()
    assert "loading" in begun, errors.read_text(encoding="utf-8")
    os.kill(begun["loading"], 2)
    assert told() == {"status": 130}
    err = errors.read_text(encoding="utf-8")
    assert err.splitlines()[-1] == "stopped by Ctrl-C"
    assert err.count("stopped") == 1
    assert "Traceback" not in err


EARLY = """
    import sys
    from speculant.cli.entry import main

    class Interrupts:
        def find_spec(self, name, path=None, target=None):
            if name == "speculant.cli.main":
                raise KeyboardInterrupt

    sys.meta_path.insert(0, Interrupts())
    main()
"""


def test_ctrl_c_ends_the_imports() -> None:
    command = [sys.executable, "-c", textwrap.dedent(EARLY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped by Ctrl-C\n")
