"""Tries a wheel as a user has it: installs it in an empty environment without a compiler, and runs the demo there.

`make wheel` calls it: python tools/try_wheel.py dist/speculant-*.whl. With --sets own it builds the wheel first, with
the kernels for this processor alone. The environment is a temporary folder outside the checkout, and PATH has nothing
but its programs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPILERS = ("cc", "gcc", "c++", "g++", "clang", "clang++", "cmake", "ninja", "make")
SHOW = "import speculant, speculant.kernels as kernels; print(speculant.__file__, *kernels.usable_sets())"


def build_wheel(sets: str, folder: Path) -> Path:
    """Build a wheel with the kernels for some sets of instructions, as CMakeLists.txt names them, in a folder."""
    settings = [f"--config-settings=build-dir={folder / 'build'}", f"--config-settings=cmake.define.SETS={sets}"]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", *settings]
    subprocess.run([*command, "-w", str(folder), str(ROOT)], check=True)
    return next(folder.glob("*.whl"))


def try_wheel(wheel: Path, folder: Path) -> None:
    """Install a wheel in a folder, check that its kernels are used, and run the demo. Raises SystemExit if not."""
    environment = folder / "environment"
    programs = environment / "bin"
    variables = {**os.environ, "PATH": str(programs)}
    for name in ("PYTHONPATH", "SPECULANT_LIBRARY", "SPECULANT_ISA"):
        variables.pop(name, None)
    venv.create(environment, with_pip=True)
    found = [name for name in COMPILERS if shutil.which(name, path=variables["PATH"])]
    if found:
        raise SystemExit(f"the empty environment has {', '.join(found)}")

    def run(*command: str) -> str:
        return subprocess.run(
            [str(programs / command[0]), *command[1:]],
            cwd=folder,
            env=variables,
            check=True,
            text=True,
            stdout=subprocess.PIPE,
        ).stdout

    started = time.monotonic()
    run("python", "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel.resolve()))
    installed = time.monotonic()
    place, *sets = run("python", "-c", SHOW).split()
    if not Path(place).is_relative_to(environment) or not sets:
        raise SystemExit(f"{place} has no native kernels for this processor: sets {sets}")
    print(run("speculant", "demo"))
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, sets {', '.join(sets)}")
    print(f"installed in {installed - started:.0f} s, the demo ran in {time.monotonic() - installed:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("wheel", type=Path, nargs="?")
    given.add_argument("--sets", help="build the wheel with these sets of instructions: own or all")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="speculant-wheel-") as name:
        folder = Path(name)
        try_wheel(arguments.wheel or build_wheel(arguments.sets, folder), folder)
