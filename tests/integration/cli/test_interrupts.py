"""Ctrl-C while a command loads a model: one line, exit code 130, and no waiting for threads that can't be stopped."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest

SLOW_LOAD = """
    import signal, sys, threading, time
    from speculant.models import backends
    from speculant.models.weights import load
    from speculant.engine import build
    from speculant.cli import main

    def slow(*_, **__):
        threading.Thread(target=time.sleep, args=(60,)).start()  # as one that writes packed weights
        print("loading", flush=True)
        time.sleep(60)

    build.load_model = slow
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background inherits that it is ignored
    sys.argv[0] = "speculant"
    main.main()
"""


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "hi", "--model", "demo"),
        ("chat", "--model", "demo"),
        ("demo",),
        ("check-lossless",),
        ("bench", "latency", "--model", "demo"),
        ("serve", "demo", "--port", "0"),
    ],
)
def test_ctrl_c_ends_a_load(command: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLOW_LOAD), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "loading\n"
        interrupted = time.monotonic()
        process.send_signal(2)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert time.monotonic() - interrupted < 30, "nothing waits for the load, which takes a minute"
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
