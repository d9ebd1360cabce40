"""What the build compiles: this processor's best instruction set alone, or all of them; and the release's workflow."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from speculant.kernels import usable_sets

ROOT = Path(__file__).parents[2]


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
    """Of SETS=own it is the only one; SETS=tested compiles the others with less optimisation."""
    own, tested, full = (commands(tmp_path / sets, sets) for sets in ("own", "tested", "all"))
    assert re.findall(r"-DSP_WITH_(\w+)", own["dispatch"]) == [usable_sets()[0].upper()]
    assert set(own) < set(tested) == set(full)
    assert {name for name in tested if "-O1" not in tested[name].split()} == set(own)
    assert not [name for name in (*own, *full) if "-O1" in {**full, **own}[name].split()]
    assert {name: full[name].split(" -o ")[0] for name in own if name != "dispatch"} == {
        name: own[name].split(" -o ")[0] for name in own if name != "dispatch"
    }


def test_the_release_s_workflow_builds_what_make_builds() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert "has not been run" in text
    assert {"wheel"} == set(re.findall(r"run: make ([a-z-]+)", text)) <= targets
    assert set(jobs["publish"]["needs"]) < set(jobs)
