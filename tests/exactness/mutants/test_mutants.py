"""A known fault in a copy of the package makes the named test fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import speculant
from tests.exactness.mutants.catalogue import MUTANTS
from tests.exactness.mutants.mutant import Mutant

PACKAGE = Path(speculant.__file__).parent
ROOT = Path(__file__).parents[3]
EXACTNESS = Path(__file__).parents[1].relative_to(ROOT)
SMOKE = {"u always 0", "max_tokens overshot", "block stops at its first failure"}  # in `make test`
FAILED = int(pytest.ExitCode.TESTS_FAILED)


class Runner:
    """The process that runs killers; started when it is needed, and again if a run took it down."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, root: Path, killers: list[str]) -> tuple[int, str]:
        """Run killers with the package from a folder; return pytest's exit code and output."""
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        tests = [f"{EXACTNESS}/{killer}" for killer in killers]
        self._process.stdin.write(json.dumps({"root": str(root), "tests": tests}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            pytest.fail(f"the runner ended: {killers} hung, or took the process down")
        answer = json.loads(line)
        return answer["code"], answer["output"]

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.communicate()


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("runner.py"))]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def case(mutant: Mutant) -> object:
    """Return the parameter of a mutant; all but a few are left to `make test-all`."""
    marks = [] if mutant.name in SMOKE else [pytest.mark.slow]
    return pytest.param(mutant, id=mutant.name, marks=marks)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """Give the process that all mutants of this module share."""
    made = Runner()
    yield made
    made.stop()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Make a folder with a copy of the package's code."""
    shutil.copytree(PACKAGE, tmp_path / "speculant", ignore=shutil.ignore_patterns("assets", "__pycache__"))
    return tmp_path


def test_names_are_unique() -> None:
    names = {mutant.name for mutant in MUTANTS}
    assert len(names) == len(MUTANTS)
    assert names > SMOKE


@pytest.mark.slow
def test_the_unchanged_package_passes(runner: Runner, copy: Path) -> None:
    code, output = runner.run(copy, sorted({mutant.killer for mutant in MUTANTS}))
    assert code == 0, output


@pytest.mark.parametrize("mutant", [case(mutant) for mutant in MUTANTS])
def test_mutant_dies(runner: Runner, copy: Path, mutant: Mutant) -> None:
    put_in(copy, mutant)
    code, output = runner.run(copy, [mutant.killer])
    assert code == FAILED, f"{mutant.killer} did not fail but ended with {code}:\n{output}"


def put_in(root: Path, mutant: Mutant) -> None:
    """Edit a copy of the package; an edit that no longer fits the source is an error."""
    file = root / "speculant" / mutant.file
    source = file.read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1, f"{mutant.file} has {source.count(mutant.old)} times:\n{mutant.old}"
    file.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")


def test_every_mutant_fits_the_source() -> None:
    """Without a run of its killer, which is left to `make test-all`."""
    for mutant in MUTANTS:
        assert (PACKAGE / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1, mutant.name
        file, name = mutant.killer.partition("[")[0].split("::")
        assert f"def {name}(" in (ROOT / EXACTNESS / file).read_text(encoding="utf-8"), mutant.killer


def test_a_stale_mutant_is_an_error(copy: Path) -> None:
    with pytest.raises(AssertionError, match="0 times"):
        put_in(copy, Mutant("stale", "types.py", "no such text", "", ""))


@pytest.mark.slow
def test_a_survivor_is_an_error(runner: Runner, copy: Path) -> None:
    harmless = Mutant("harmless", "types.py", '"""The types', '"""The words', "test_chance.py::test_known_hashes")
    with pytest.raises(AssertionError, match="did not fail"):
        test_mutant_dies(runner, copy, harmless)
