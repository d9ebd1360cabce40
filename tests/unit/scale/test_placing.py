"""How many cores engines get, and whether they fit on machines."""

from __future__ import annotations

import logging

import pytest
import ray

from speculant.errors import ConfigError
from speculant.scale import ReplicaOptions, check_fit, cores_of_each, equal_share, fitting


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
