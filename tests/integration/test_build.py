"""What the build compiles: this processor's best instruction set alone, or all of them; and the release's workflow."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from speculant.kernels import built_sets, usable_sets

ROOT = Path(__file__).parents[2]


def best() -> str:
    """Return the best set that this machine uses without being told to."""
    return next(each.name for each in built_sets() if each.usable and each.by_default)


def commands(folder: Path, sets: str) -> dict[str, str]:
    """Return the compiler's command for each unit: a source and a namespace."""
    options = ["-G", "Ninja", f"-DSETS={sets}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(folder), *options], check=True, capture_output=True)
    found = json.loads((folder / "compile_commands.json").read_text(encoding="utf-8"))
    spaces = [re.findall(r"-DSP_NAMESPACE=(\w+)", each["command"]) for each in found]
    return {
        "_".join([Path(each["file"]).stem, *space]): each["command"] for each, space in zip(found, spaces, strict=True)
    }


@pytest.mark.skipif(not (usable_sets() and shutil.which("cmake") and shutil.which("ninja")), reason="no build tools")
def test_a_build_has_the_best_set_in_full(tmp_path: Path) -> None:
    """Of SETS=own it is the only one; SETS=tested compiles others that this processor has, with less optimisation."""
    own, tested, full = (commands(tmp_path / sets, sets) for sets in ("own", "tested", "all"))
    assert re.findall(r"-DSP_WITH_(\w+)", own["dispatch"]) == [best().upper()]
    assert {*re.findall(r"-DSP_WITH_(\w+)", tested["dispatch"])} == {name.upper() for name in usable_sets()}
    assert set(own) < set(tested) <= set(full)
    assert {name for name in tested if "-O1" not in tested[name].split()} == set(own)
    assert not [name for name in (*own, *full) if "-O1" in {**full, **own}[name].split()]
    assert {name: full[name].split(" -o ")[0] for name in own if name != "dispatch"} == {
        name: own[name].split(" -o ")[0] for name in own if name != "dispatch"
    }


@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("ninja")), reason="no build tools")
@pytest.mark.parametrize(
    ("options", "variables", "builds", "says"),
    [
        (["-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF"], {"PATH": ""}, True, "there is no C++ compiler"),
        ([], {"CXX": "false"}, False, "false"),
    ],
)
def test_no_compiler_builds_nothing_and_a_broken_one_fails(
    tmp_path: Path, options: list[str], variables: dict[str, str], builds: bool, says: str
) -> None:
    ninja = f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}"
    command = [shutil.which("cmake"), "-S", ROOT, "-B", tmp_path, "-G", "Ninja", ninja, *options]
    known = {**{name: value for name, value in os.environ.items() if name != "CXX"}, **variables}
    done = subprocess.run(list(map(str, command)), check=False, env=known, capture_output=True, text=True)
    assert (done.returncode == 0, says in done.stderr) == (builds, True), done.stderr
    assert not builds or "libspeculant" not in (tmp_path / "build.ninja").read_text(encoding="utf-8")


def with_pip(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel in a folder with a broken compiler."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), *options]
    build = f"--config-settings=build-dir={folder / 'build'}"
    variables = {**os.environ, "CXX": "false"}
    return subprocess.run([*command, build, str(ROOT)], check=False, env=variables, capture_output=True, text=True)


@pytest.mark.slow
def test_pip_says_how_to_install_without_the_kernels(tmp_path: Path) -> None:
    failed = with_pip(tmp_path)
    (option,) = set(re.findall(r"--config-settings=\S+", failed.stdout + failed.stderr))
    assert failed.returncode != 0
    assert with_pip(tmp_path, option).returncode == 0
    (wheel,) = tmp_path.glob("*.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


@pytest.mark.slow
def test_the_source_package_has_what_a_build_needs(tmp_path: Path) -> None:
    """It has nothing that git ignores."""
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (package,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CMakeLists.txt", "csrc/dispatch.cpp", "src/speculant/py.typed"} < names
    assert not {name.partition("/")[0] for name in names} & {".venv", "build", "dist"}


@pytest.mark.slow
def test_a_wheel_runs_the_demo_without_a_compiler() -> None:
    """It is installed in an empty environment outside the checkout, whose PATH has no compiler."""
    command = [sys.executable, str(ROOT / "tools" / "try_wheel.py"), "--sets", "own"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert f"MB, sets {best()}\n" in said
    assert "the demo ran in" in said


def test_the_release_s_workflow_builds_what_make_builds() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert "has not been run" in text
    assert {"wheel"} == set(re.findall(r"run: make ([a-z-]+)", text)) <= targets
    assert set(jobs["publish"]["needs"]) < set(jobs)
