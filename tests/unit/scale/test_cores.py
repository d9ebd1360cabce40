"""The cores of replicas: how many each has, and which it claims."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from speculant.errors import ConfigError
from speculant.scale import Cores, ReplicaOptions, check_fit, cores_of_each, equal_share, fitting

HOLDER = """
import sys, time
from pathlib import Path
from speculant.scale.options import Cores
cores = Cores.claim(1, Path(sys.argv[1]))
print(sorted(cores.numbers) if cores else None, flush=True)
time.sleep(60)
"""
COUNT = len(os.sched_getaffinity(0))


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process have three cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})


@pytest.mark.usefixtures("three")
def test_claims_are_disjoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cores"
    first, second = Cores.claim(1, folder), Cores.claim(2, folder)
    assert first is not None
    assert second is not None
    assert (first.numbers, second.numbers) == ({0}, {1, 2})
    with caplog.at_level(logging.WARNING):
        assert Cores.claim(1, folder) is None
    assert "only 0 of 1 cores are free" in caplog.text
    second.release()
    again = Cores.claim(1, folder)
    assert again is not None
    assert again.numbers == {1}


@pytest.mark.usefixtures("three")
def test_a_claim_that_fails_takes_nothing(tmp_path: Path) -> None:
    assert Cores.claim(4, tmp_path) is None
    whole = Cores.claim(3, tmp_path)
    assert whole is not None
    assert len(whole.numbers) == 3


def test_the_system_releases_cores_of_a_killed_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        held = int(holder.stdout.readline().strip("[]\n"))
        assert held in os.sched_getaffinity(0)
        assert Cores.claim(COUNT, tmp_path) is None, "a core of another process was claimed"
        holder.send_signal(signal.SIGKILL)
    free = Cores.claim(COUNT, tmp_path)
    assert free is not None
    assert held in free.numbers
    free.release()


def test_a_process_uses_its_cores(tmp_path: Path) -> None:
    code = HOLDER.split("print")[0] + "cores.use()\nimport os\nprint(os.sched_getaffinity(0) == cores.numbers)"
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True"


def test_systems_without_sets_of_cores_share_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert Cores.claim(1, tmp_path) is None


# --- how many cores engines get, and whether they fit on machines


@pytest.mark.parametrize(
    ("machines", "count", "cores"),
    [([8, 8, 8], 2, 8), ([8, 8, 8], 4, 4), ([2], 4, 1), ([], 1, 1), ([16, 2], 3, 5), ([1], 1, 1), ([64], 3, 21)],
)
def test_shares_are_the_largest_that_fit(machines: list[int], count: int, cores: int) -> None:
    assert equal_share(machines, count) == cores
    assert fitting(machines, cores + 1) < count


def test_replicas_that_do_not_fit_here_are_refused() -> None:
    check_fit(ReplicaOptions((2, 4)), 2)
    with pytest.raises(ConfigError, match="3 replicas with 1 cores each do not fit on machines with 2 cores"):
        check_fit(ReplicaOptions((3, 3)), 2)
    with pytest.raises(ConfigError, match="--replica-cores"):
        check_fit(ReplicaOptions((1, 1), cores=4), 2)


def test_other_clusters_may_grow(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    dead = {"Alive": False, "Resources": {"CPU": 64.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 4.0}}, dead])
    with caplog.at_level(logging.WARNING):
        assert cores_of_each(ReplicaOptions((1, 2))) == 2
        assert caplog.text == ""
        assert cores_of_each(ReplicaOptions((1, 2), cores=8)) == 8
    assert "they wait until there are more machines" in caplog.text
